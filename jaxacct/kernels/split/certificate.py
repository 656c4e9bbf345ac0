"""The certificate of the split contour: every error of its integrand bounded, and the bracket of delta that is left."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxacct.floats import ROUNDOFF
from jaxacct.kernels.arrays import Array
from jaxacct.kernels.law import LossLaw
from jaxacct.kernels.nodes import depth, trapezoid
from jaxacct.kernels.special import log1p
from jaxacct.kernels.split import cutoff, errors, remainder
from jaxacct.kernels.split.integrand import Integrand, Quadrature, logs_of, needed
from jaxacct.kernels.split.parts import Grid, TiltedParts, rise_and_norm, tilted
from jaxacct.kernels.split.placement import Placement, grids_of
from jaxacct.kernels.split.remainder import Remainder

FIRST_ORDER = 1.01
"""Factor for the terms beyond the first order of a small error."""
SUM_OUTWARD = 1.0000001
"""Factor for the rounding of a sum of error bounds."""
LEAST_LOG_SCALE = -690.0
"""Least logarithm of Z that is exponentiated: e^-690 is still a normal number."""


class Certificate(NamedTuple):
    """Bounds of the errors of an integrand, and of what is not integrated."""

    common: Array  # bound on the error of K(c), a factor common to all nodes
    slack: Array  # (count,) bound on the error of the integrand at each node, relative to e^{K(c)}
    tail: Array  # bound on the terms that were cut off, over Z
    images_at: Array  # abscissa of the Chernoff bound for images to the right
    images_log: Array  # and its logarithm at eps = 0
    remainder: Remainder
    needs: Array  # (points, nodes) with which the certificate would be narrow


class _OnAxis(NamedTuple):
    """What is computed on the real axis, where t = 0 and grids are even."""

    even: Grid  # at the contour's abscissa
    parts: TiltedParts
    errors: Array  # (J, 2) of both parts
    images_log: Array  # Chernoff bound for the images
    bulk_at: Array  # abscissae of the Chernoff bounds for compositions of bulk steps
    bulk_log: Array


_rounding = jax.vmap(errors.rounding_errors, (0, 0, None, 0, 0, 0, None, None, 0, 0, None))
"""Of the J sampled Gaussians."""


def _on_the_axis(law: LossLaw, placed: Placement, points: int) -> _OnAxis:
    """Bound the images and the bulk compositions; all grids go through one trace of the error bound."""
    contour, choice = placed
    windows = contour.windows
    bulk, bulk_at = remainder.bulk_grids(law, choice, points)
    even = grids_of(law, windows, contour.c, points)
    kinds = jnp.array([0, 0] + [1] * bulk_at.size)
    grids = jax.tree.map(lambda *x: jnp.stack(x)[kinds], even, bulk)
    lows = jnp.stack([windows.low, choice.low])[kinds]

    def one(grid: Grid, c: Array, low: Array) -> tuple[TiltedParts, Array]:
        parts = jax.vmap(tilted, (None, None, 0))(law.sign, c, grid)
        sides = (law.gauss_sigma, law.gauss_q)
        bound = jax.vmap(errors.axis_errors, (0, 0, None, 0, 0, None, 0, 0))
        own = [
            _rounding(*sides, c, grid, weight, log_part, 0.0, 0.0, low, windows.high, side)[:, 2]
            for weight, log_part, side in ((parts.bulk, parts.log_bulk, 1.0), (parts.jump, parts.log_jump, -1.0))
        ]
        return parts, bound(*sides, law.sign, low, windows.high, c, grid, parts) + jnp.stack(own, axis=1)

    at = jnp.concatenate([contour.c[None], contour.images_at[None], bulk_at])
    parts, found = jax.vmap(one)(grids, at, lows)
    own, image = (jax.tree.map(lambda x, i=i: x[i], parts) for i in range(2))
    images = cutoff.chernoff(law, windows.keep_bulk, image, found[1], contour.images_at)
    leaps = jax.tree.map(lambda x: x[2:], parts)
    bulk_log = jax.vmap(cutoff.bulk_chernoff, (None, 0, 0, 0))(law, leaps, found[2:], bulk_at)
    return _OnAxis(even, own, found[0], images, bulk_at, bulk_log)


def certify(law: LossLaw, placed: Placement, integrand: Integrand, made_from: Quadrature, points: int) -> Certificate:
    """Bound every error of an integrand."""
    grids, parts, bulk, jump = made_from
    contour, choice = placed
    windows, c, n, count = contour.windows, contour.c, law.gauss_n, integrand.angle.size
    t, t_max = integrand.t, integrand.h * contour.nodes_kept
    logs = logs_of(law, contour, parts, bulk, jump, t)
    axis = _on_the_axis(law, placed, points)
    bound = jax.vmap(errors.step_errors, (0, 0, None, 0, 0, None, 0, 0, None))
    sides = (law.gauss_sigma, law.gauss_q, law.sign, windows.low, windows.high)
    steps = bound(*sides, c, grids, parts, t_max)
    # of the numerator and of the denominator
    steps = jnp.where(steps < 0.5, 2.0 * steps / (1.0 - jnp.minimum(steps, 0.5)), errors.USELESS)
    part_errors, at_c = [], []
    kinds = ((parts.bulk, parts.log_bulk, steps[:, 0], 1.0), (parts.jump, parts.log_jump, steps[:, 1], -1.0))
    for weight, log_part, step, side in kinds:
        both = (law.gauss_sigma, law.gauss_q, c, grids, weight, log_part, t_max, depth(points, count))
        rate, most, own = _rounding(*both, windows.low, windows.high, side).T
        part_errors.append(step[:, None] + jnp.minimum(rate[:, None] * t, most[:, None]))
        at_c.append(step + own)

    odds = parts.log_jump - parts.log_bulk
    rise, log_norm = rise_and_norm(law, windows.keep_bulk, parts.log_bulk, parts.log_jump)
    base, share = rise + log_norm, jax.nn.sigmoid(odds)
    ceilings = jnp.hypot(1.0 + bulk[0], bulk[1]) + part_errors[0]
    jumps = jnp.hypot(1.0 + jump[0], jump[1]) + part_errors[1]
    ratio = jnp.exp(odds)[:, None] * jumps / ceilings
    most = n @ log1p(ratio)
    gain = -jnp.expm1(-most) + windows.keep_bulk * jnp.exp(-most)  # (e^R - 1 + keep_bulk) / e^R at its largest
    units = ROUNDOFF * (16.0 + n.size)
    moved = n @ ((part_errors[0] + units * jnp.hypot(*bulk)) / ceilings)
    jumped = n @ (ratio / (1.0 + ratio) * (part_errors[1] / jumps + 2.0 * units))
    # the last two: rounding of the factors of a term, and of the sum of `count` of them
    spread = jnp.abs(logs.plain) + jnp.abs(logs.rise) + most + logs.turned + 6.0 + count / 16.0
    ceiling = n @ jnp.log(ceilings) - law.mu2 * t**2 / 2.0 + most - base
    slack = jnp.exp(ceiling) * (gain * (moved + units * spread) + jumped)
    slack = jnp.where(jnp.isfinite(integrand.log_modulus), slack, 0.0)

    jump_error = jnp.sum(jnp.where(n > 0, at_c[1], 0.0))
    ratio_error = jnp.where(windows.keep_bulk > 0, n @ (share * at_c[1]), (1.0 + rise) * jump_error)
    size = jnp.abs(integrand.k0) + n @ jnp.abs(parts.log_bulk) + law.mu2 * c * (c + 1.0) + rise + 30.0
    common = FIRST_ORDER * (n @ at_c[0] + ratio_error) + units * size
    left_out = remainder.bounds(law, windows, choice, integrand.far, axis.bulk_at, axis.bulk_log, points)
    # the decay by which the contour was placed comes from a coarse grid without a bound of its error
    beyond = cutoff.decay_beyond(law, windows, axis.even, axis.parts, axis.errors, c, integrand.k0, t_max)
    beyond = beyond + jnp.log(jnp.pi * (t_max - 0.5 * integrand.h))
    needs = needed(law, contour, grids)
    return Certificate(common, slack, jnp.exp(-beyond), contour.images_at, axis.images_log, left_out, needs)


def _errors(integrand: Integrand, certificate: Certificate, epsilon: Array) -> tuple[Array, Array]:
    """(two-sided error over Z, images in absolute terms)."""
    turned = 8.0 * ROUNDOFF * (integrand.t + integrand.c) * jnp.abs(epsilon) * jnp.exp(integrand.log_modulus)
    both = SUM_OUTWARD * jnp.sum(jnp.hypot(*integrand.weight) * (certificate.slack + turned)) + certificate.tail
    period = 2.0 * jnp.pi / integrand.h
    left = certificate.remainder.log_mass - integrand.c * period - jnp.log(-jnp.expm1(-integrand.c * period))
    gap = (certificate.images_at - integrand.c) * period
    right = (
        certificate.images_log
        - certificate.images_at * epsilon
        - gap
        - jnp.log(-jnp.expm1(-jnp.where(gap > 0, gap, 1.0)))
    )
    return both, jnp.exp(left) + jnp.exp(jnp.where(gap > 0, right, jnp.inf))


def ends(integrand: Integrand, certificate: Certificate, epsilon: Array) -> tuple[Array, Array]:
    """(log lower, log upper) of delta(eps)."""
    value, _ = trapezoid(integrand, epsilon)
    both, images = _errors(integrand, certificate, epsilon)
    far, _ = remainder.far(integrand.far, epsilon)
    log_z = integrand.k0 - integrand.c * epsilon
    both = both + 8.0 * ROUNDOFF * jnp.abs(value)
    z, up, down = (
        jnp.exp(jnp.maximum(log_z, LEAST_LOG_SCALE)),
        jnp.exp(certificate.common),
        jnp.exp(-certificate.common),
    )
    high = (
        z * (value + both) * up
        + remainder.far_above(certificate.remainder, epsilon)
        + remainder.bulk(certificate.remainder, epsilon)
    )
    least = jnp.where(log_z < LEAST_LOG_SCALE, jnp.minimum(0.0, value - both), value - both)
    low = z * least * jnp.where(least > 0, down, up) - remainder.OUTWARD * images * up + far
    log_low, log_high = (jnp.log(jnp.maximum(x, 1e-300)) for x in (low, high))
    margin = 16.0 * ROUNDOFF * (jnp.abs(log_z) + jnp.abs(integrand.c * epsilon) + 8.0)
    # what the contour integrates is at least 0: else the bounds contradict each other
    certain = (value + both >= 0.0) & (high < jnp.inf)
    low = jnp.where(certain & (low > 1e-300), log_low - margin - 8.0 * ROUNDOFF * jnp.abs(log_low), -jnp.inf)
    return low, jnp.where(certain, log_high + margin + 8.0 * ROUNDOFF * jnp.abs(log_high), jnp.inf)
