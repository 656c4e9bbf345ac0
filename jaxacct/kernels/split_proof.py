"""Bounds of every error of the split contour's integrand, and the bracket of delta that they leave."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxacct.floats import ROUNDOFF
from jaxacct.kernels import aside, split_certificate
from jaxacct.kernels.aside import Aside
from jaxacct.kernels.law import Law
from jaxacct.kernels.nodes import depth, trapezoid
from jaxacct.kernels.special import log1p
from jaxacct.kernels.split import rise_and_norm, tilted
from jaxacct.kernels.split_place import Placed, frames_of
from jaxacct.kernels.split_wave import Wave, logs_of, needed


class Proof(NamedTuple):
    """What the certificate needs besides: errors of the wave, and bounds of what is left aside."""

    common: jax.Array  # bound on the error of K(c)
    slack: jax.Array  # (count,)
    tail: jax.Array
    images_at: jax.Array
    images_log: jax.Array
    aside: Aside
    needs: jax.Array


class _Axis(NamedTuple):
    """An even grid at the contour's abscissa, its parts and their errors, and Chernoff bounds on the real axis."""

    even: Any
    parts: Any
    errors: jax.Array
    images_log: jax.Array
    calm_at: jax.Array
    calm_log: jax.Array


_rounding = jax.vmap(split_certificate.rounding_errors, (0, 0, None, 0, 0, 0, None, None, 0, 0, None))


def _on_the_axis(law: Law, placed: Placed, points) -> _Axis:
    """Bound the images and the calm compositions; all grids go through one trace of the error bound."""
    place, choice = placed
    window = place.window
    calm, calm_at = aside.calm_frames(law, choice, points)
    even = frames_of(law, window, place.c, points)
    kinds = jnp.array([0, 0] + [1] * calm_at.size)
    grids = jax.tree.map(lambda *x: jnp.stack(x)[kinds], even, calm)
    lows = jnp.stack([window.low, choice.low])[kinds]

    def one(grid, c, low):
        parts = jax.vmap(tilted, (None, None, 0))(law.sign, c, grid)
        sides = (law.gauss_sigma, law.gauss_q)
        bound = jax.vmap(split_certificate.axis_errors, (0, 0, None, 0, 0, None, 0, 0))
        own = [
            _rounding(*sides, c, grid, weight, log_part, 0.0, 0.0, low, window.high, side)[:, 2]
            for weight, log_part, side in ((parts.calm, parts.log_calm, 1.0), (parts.jump, parts.log_jump, -1.0))
        ]
        return parts, bound(*sides, law.sign, low, window.high, c, grid, parts) + jnp.stack(own, axis=1)

    at = jnp.concatenate([place.c[None], place.images_at[None], calm_at])
    parts, errors = jax.vmap(one)(grids, at, lows)
    own, image = (jax.tree.map(lambda x, i=i: x[i], parts) for i in range(2))
    images = split_certificate.chernoff(law, window.keep, image, errors[1], place.images_at)
    leaps = jax.tree.map(lambda x: x[2:], parts)
    calm_log = jax.vmap(split_certificate.calm_chernoff, (None, 0, 0, 0))(law, leaps, errors[2:], calm_at)
    return _Axis(even, own, errors[0], images, calm_at, calm_log)


def proof(law: Law, placed: Placed, wave: Wave, made_from, points) -> Proof:
    """Bound every error of a wave."""
    frames, parts, calm, jump = made_from
    place, choice = placed
    window, c, n, count = place.window, place.c, law.gauss_n, wave.angle.size
    t, t_max = wave.t, wave.h * place.kept
    logs = logs_of(law, place, parts, calm, jump, t)
    axis = _on_the_axis(law, placed, points)
    bound = jax.vmap(split_certificate.step_errors, (0, 0, None, 0, 0, None, 0, 0, None))
    sides = (law.gauss_sigma, law.gauss_q, law.sign, window.low, window.high)
    steps = bound(*sides, c, frames, parts, t_max)
    # of the numerator and of the denominator
    steps = jnp.where(steps < 0.5, 2.0 * steps / (1.0 - jnp.minimum(steps, 0.5)), split_certificate.USELESS)
    errors, at_c = [], []
    kinds = ((parts.calm, parts.log_calm, steps[:, 0], 1.0), (parts.jump, parts.log_jump, steps[:, 1], -1.0))
    for weight, log_part, step, side in kinds:
        both = (law.gauss_sigma, law.gauss_q, c, frames, weight, log_part, t_max, depth(points, count))
        rate, most, own = _rounding(*both, window.low, window.high, side).T
        errors.append(step[:, None] + jnp.minimum(rate[:, None] * t, most[:, None]))
        at_c.append(step + own)

    odds = parts.log_jump - parts.log_calm
    rise, log_norm = rise_and_norm(law, window.keep, parts.log_calm, parts.log_jump)
    base, share = rise + log_norm, jax.nn.sigmoid(odds)
    ceilings = jnp.hypot(1.0 + calm[0], calm[1]) + errors[0]
    jumps = jnp.hypot(1.0 + jump[0], jump[1]) + errors[1]
    ratio = jnp.exp(odds)[:, None] * jumps / ceilings
    most = n @ log1p(ratio)
    gain = -jnp.expm1(-most) + window.keep * jnp.exp(-most)  # (e^R - 1 + keep) / e^R at its largest
    units = ROUNDOFF * (16.0 + n.size)
    moved = n @ ((errors[0] + units * jnp.hypot(*calm)) / ceilings)
    jumped = n @ (ratio / (1.0 + ratio) * (errors[1] / jumps + 2.0 * units))
    # the last two: rounding of the factors of a term, and of the sum of `count` of them
    spread = jnp.abs(logs.plain) + jnp.abs(logs.rise) + most + logs.turned + 6.0 + count / 16.0
    ceiling = n @ jnp.log(ceilings) - law.mu2 * t**2 / 2.0 + most - base
    slack = jnp.exp(ceiling) * (gain * (moved + units * spread) + jumped)
    slack = jnp.where(jnp.isfinite(wave.log_modulus), slack, 0.0)

    jump_error = jnp.sum(jnp.where(n > 0, at_c[1], 0.0))
    ratio_error = jnp.where(window.keep > 0, n @ (share * at_c[1]), (1.0 + rise) * jump_error)
    size = jnp.abs(wave.k0) + n @ jnp.abs(parts.log_calm) + law.mu2 * c * (c + 1.0) + rise + 30.0
    common = 1.01 * (n @ at_c[0] + ratio_error) + units * size
    left_aside = aside.bounds(law, window, choice, wave.far, axis.calm_at, axis.calm_log, points)
    # the plan's decay comes from a coarse grid without a bound of its error
    beyond = split_certificate.decay_beyond(law, window, axis.even, axis.parts, axis.errors, c, wave.k0, t_max)
    beyond = beyond + jnp.log(jnp.pi * (t_max - 0.5 * wave.h))
    needs = needed(law, place, frames)
    return Proof(common, slack, jnp.exp(-beyond), place.images_at, axis.images_log, left_aside, needs)


def _errors(wave: Wave, proof: Proof, epsilon):
    """(two-sided error over Z, images in absolute terms)."""
    turned = 8.0 * ROUNDOFF * (wave.t + wave.c) * jnp.abs(epsilon) * jnp.exp(wave.log_modulus)
    both = 1.0000001 * jnp.sum(jnp.hypot(*wave.weight) * (proof.slack + turned)) + proof.tail
    period = 2.0 * jnp.pi / wave.h
    left = proof.aside.log_mass - wave.c * period - jnp.log(-jnp.expm1(-wave.c * period))
    gap = (proof.images_at - wave.c) * period
    right = proof.images_log - proof.images_at * epsilon - gap - jnp.log(-jnp.expm1(-jnp.where(gap > 0, gap, 1.0)))
    return both, jnp.exp(left) + jnp.exp(jnp.where(gap > 0, right, jnp.inf))


def ends(wave: Wave, proof: Proof, epsilon):
    """(log lower, log upper) of delta(eps)."""
    value, _ = trapezoid(wave, epsilon)
    both, images = _errors(wave, proof, epsilon)
    far, _ = aside.far(wave.far, epsilon)
    log_z = wave.k0 - wave.c * epsilon
    both = both + 8.0 * ROUNDOFF * jnp.abs(value)
    z, up, down = jnp.exp(jnp.maximum(log_z, -690.0)), jnp.exp(proof.common), jnp.exp(-proof.common)
    high = z * (value + both) * up + aside.far_above(proof.aside, epsilon) + aside.calm(proof.aside, epsilon)
    least = jnp.where(log_z < -690.0, jnp.minimum(0.0, value - both), value - both)
    low = z * least * jnp.where(least > 0, down, up) - 1.000001 * images * up + far
    log_low, log_high = (jnp.log(jnp.maximum(x, 1e-300)) for x in (low, high))
    margin = 16.0 * ROUNDOFF * (jnp.abs(log_z) + jnp.abs(wave.c * epsilon) + 8.0)
    # what the contour integrates is at least 0: else the bounds contradict each other
    certain = (value + both >= 0.0) & (high < jnp.inf)
    low = jnp.where(certain & (low > 1e-300), log_low - margin - 8.0 * ROUNDOFF * jnp.abs(log_low), -jnp.inf)
    return low, jnp.where(certain, log_high + margin + 8.0 * ROUNDOFF * jnp.abs(log_high), jnp.inf)
