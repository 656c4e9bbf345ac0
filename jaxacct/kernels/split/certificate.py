"""The certificate of the split contour: every error of its integrand bounded, and the bracket of delta that is left."""

from typing import NamedTuple

import jax

from jaxacct.core.floats import ROUNDOFF
from jaxacct.kernels.arrays import Array, logistic, namespace
from jaxacct.kernels.departures import depth
from jaxacct.kernels.law import LossLaw
from jaxacct.kernels.nodes import trapezoid
from jaxacct.kernels.special import log1p
from jaxacct.kernels.split import cutoff, errors, remainder, rounding
from jaxacct.kernels.split.integrand import Integrand, Quadrature, logs_of, needed
from jaxacct.kernels.split.parts import Grid, TiltedParts, composed, rise_and_norm, tilted
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


def _on_the_axis(law: LossLaw, placed: Placement, points: int) -> _OnAxis:
    """Bound the images and the bulk compositions; all grids go through one trace of the error bound.

    An axis in front stands for the two kinds of grids, even and of bulk steps, and one behind it for two abscissae.
    """
    xp = namespace(law.gauss_n, placed.contour.c)
    contour, choice = placed
    windows = contour.windows
    bulk, bulk_at = remainder.bulk_grids(law, choice, points)
    even = grids_of(law, windows, contour.c, points)
    grids = jax.tree.map(lambda *x: xp.stack(x)[:, None], even, bulk)
    low = xp.stack([windows.low, choice.low])[:, None]
    at = xp.stack([xp.stack([contour.c, contour.images_at]), bulk_at])
    sides, c = (law.gauss_sigma, law.gauss_q), at[..., None]
    parts = tilted(law.sign[..., None], c, grids)
    found = errors.axis_errors(*sides, law.sign[..., None], low, windows.high, c, grids, parts)
    found = found + rounding.weight_errors(*sides, c, grids, parts, low, windows.high)
    own, image, leaps = (jax.tree.map(lambda x, i=i: x[i], parts) for i in ((0, 0), (0, 1), 1))
    images = cutoff.chernoff(law, windows.keep_bulk, image, found[0, 1], contour.images_at)
    bulk_log = cutoff.bulk_chernoff(law, leaps, found[1], bulk_at)
    return _OnAxis(even, own, found[0, 0], images, bulk_at, bulk_log)


def certify(law: LossLaw, placed: Placement, integrand: Integrand, made_from: Quadrature, points: int) -> Certificate:
    """Bound every error of an integrand."""
    xp = namespace(law.gauss_n, integrand.t)
    grids, parts, bulk, jump = made_from
    contour, choice = placed
    windows, c, n, count = contour.windows, contour.c, law.gauss_n, integrand.angle.shape[-1]
    t, t_max = integrand.t, integrand.h * contour.nodes_kept
    logs = logs_of(law, contour, parts, bulk, jump, t)
    axis = _on_the_axis(law, placed, points)
    sides, place = (law.gauss_sigma, law.gauss_q), (windows.low, windows.high)
    at, furthest = c[..., None], t_max[..., None]
    steps = errors.step_errors(*sides, law.sign[..., None], *place, at, grids, parts, furthest)
    # of the numerator and of the denominator
    steps = xp.where(steps < 0.5, 2.0 * steps / (1.0 - xp.minimum(steps, 0.5)), errors.USELESS)
    part_errors, at_c = [], []
    off = rounding.rounding_errors(*sides, at, grids, parts, furthest, depth(points, count), *place)
    for part, (rate, most, own) in enumerate(off):
        step = steps[..., part]
        part_errors.append(step[..., None] + xp.minimum(rate[..., None] * t[..., None, :], most[..., None]))
        at_c.append(step + own)

    odds, keep_bulk = parts.log_jump - parts.log_bulk, windows.keep_bulk
    rise, log_norm = rise_and_norm(law, keep_bulk, parts.log_bulk, parts.log_jump)
    base, share = rise + log_norm, logistic(xp, odds)
    ceilings = xp.hypot(1.0 + bulk[0], bulk[1]) + part_errors[0]
    jumps = xp.hypot(1.0 + jump[0], jump[1]) + part_errors[1]
    ratio = xp.exp(odds)[..., None] * jumps / ceilings
    most = composed(n, log1p(ratio))
    fallen = xp.exp(-most)
    gain = -xp.expm1(-most) + keep_bulk[..., None] * fallen  # (e^R - 1 + keep_bulk) / e^R at its largest
    units = ROUNDOFF * (16.0 + n.shape[-1])
    moved = composed(n, (part_errors[0] + units * xp.hypot(*bulk)) / ceilings)
    jumped = composed(n, ratio / (1.0 + ratio) * (part_errors[1] / jumps + 2.0 * units))
    # the last two: rounding of the factors of a term, and of the sum of `count` of them
    spread = xp.abs(logs.plain) + xp.abs(logs.rise) + most + logs.turned + 6.0 + count / 16.0
    ceiling = composed(n, xp.log(ceilings)) - law.mu2[..., None] * t**2 / 2.0 + most - base[..., None]
    slack = xp.exp(ceiling) * (gain * (moved + units * spread) + jumped)
    slack = xp.where(xp.isfinite(integrand.log_modulus), slack, 0.0)

    jump_error = xp.sum(xp.where(n > 0, at_c[1], 0.0), axis=-1)
    ratio_error = xp.where(keep_bulk > 0, xp.sum(n * (share * at_c[1]), axis=-1), (1.0 + rise) * jump_error)
    size = xp.abs(integrand.k0) + xp.sum(n * xp.abs(parts.log_bulk), axis=-1) + law.mu2 * c * (c + 1.0) + rise + 30.0
    common = FIRST_ORDER * (xp.sum(n * at_c[0], axis=-1) + ratio_error) + units * size
    left_out = remainder.bounds(law, windows, choice, integrand.far, axis.bulk_at, axis.bulk_log, points)
    # the decay by which the contour was placed comes from a coarse grid without a bound of its error
    beyond = cutoff.decay_beyond(law, windows, axis.even, axis.parts, axis.errors, c, integrand.k0, t_max)
    beyond = beyond + xp.log(xp.pi * (t_max - 0.5 * integrand.h))
    needs = needed(law, contour, grids)
    return Certificate(common, slack, xp.exp(-beyond), contour.images_at, axis.images_log, left_out, needs)


def _errors(integrand: Integrand, certificate: Certificate, epsilon: Array) -> tuple[Array, Array]:
    """(two-sided error over Z, images in absolute terms)."""
    xp = namespace(integrand.t, epsilon)
    size = xp.hypot(*integrand.weight)
    height = (integrand.t + integrand.c[..., None]) * xp.exp(integrand.log_modulus)
    turned = 8.0 * ROUNDOFF * height * xp.abs(epsilon)[..., None]
    both = SUM_OUTWARD * xp.sum(size * (certificate.slack + turned), axis=-1) + certificate.tail
    period = 2.0 * xp.pi / integrand.h
    left = certificate.remainder.log_mass - integrand.c * period - xp.log(-xp.expm1(-integrand.c * period))
    gap = (certificate.images_at - integrand.c) * period
    right = certificate.images_log - certificate.images_at * epsilon - gap
    right = right - xp.log(-xp.expm1(-xp.where(gap > 0, gap, 1.0)))
    return both, xp.exp(left) + xp.exp(xp.where(gap > 0, right, xp.inf))


def ends(integrand: Integrand, certificate: Certificate, epsilon: Array) -> tuple[Array, Array]:
    """(log lower, log upper) of delta(eps)."""
    xp = namespace(integrand.k0, epsilon)
    value, _ = trapezoid(integrand, epsilon)
    both, images = _errors(integrand, certificate, epsilon)
    far, _ = remainder.far(integrand.far, epsilon)
    log_z = integrand.k0 - integrand.c * epsilon
    both = both + 8.0 * ROUNDOFF * xp.abs(value)
    z = xp.exp(xp.maximum(log_z, LEAST_LOG_SCALE))
    up, down = xp.exp(certificate.common), xp.exp(-certificate.common)
    beyond = remainder.far_above(certificate.remainder, epsilon) + remainder.bulk(certificate.remainder, epsilon)
    high = z * (value + both) * up + beyond
    least = xp.where(log_z < LEAST_LOG_SCALE, xp.minimum(0.0, value - both), value - both)
    low = z * least * xp.where(least > 0, down, up) - remainder.OUTWARD * images * up + far
    log_low, log_high = (xp.log(xp.maximum(x, 1e-300)) for x in (low, high))
    margin = 16.0 * ROUNDOFF * (xp.abs(log_z) + xp.abs(integrand.c * epsilon) + 8.0)
    # what the contour integrates is at least 0: else the bounds contradict each other
    certain = (value + both >= 0.0) & (high < xp.inf)
    low = xp.where(certain & (low > 1e-300), log_low - margin - 8.0 * ROUNDOFF * xp.abs(log_low), -xp.inf)
    return low, xp.where(certain, log_high + margin + 8.0 * ROUNDOFF * xp.abs(log_high), xp.inf)
