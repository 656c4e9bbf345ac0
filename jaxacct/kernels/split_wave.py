"""The integrand of the split contour at its nodes, and the value that they give.

delta = (contour integral of prod (A+B)^n - (1 - keep) prod A^n) + far compositions + (calm compositions)
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxacct.kernels import aside
from jaxacct.kernels.aside import Far
from jaxacct.kernels.law import Law
from jaxacct.kernels.nodes import departures, polar, trapezoid, weight_at
from jaxacct.kernels.split import FULLEST, high_blur, rise_and_norm, tilted
from jaxacct.kernels.split_place import Place, frames_of


class Wave(NamedTuple):
    """The integrand without its dependence on eps, at t_k = k h, relative to e^{K(c)}; no certificate."""

    c: jax.Array
    k0: jax.Array
    h: jax.Array
    t: jax.Array  # (count,)
    weight: tuple[jax.Array, jax.Array]  # as in Nodes
    log_modulus: jax.Array  # (count,)
    angle: jax.Array  # (count,)
    far: Far


def _sums(law: Law, place: Place, points, count):
    """The grid that follows t up to the last node kept, and both parts' departures from one at every node."""
    h = 2.0 * jnp.pi / place.period
    frames = frames_of(law, place.window, place.c, points, h * place.kept)
    parts = jax.vmap(tilted, (None, None, 0))(law.sign, place.c, frames)
    sums = jax.vmap(lambda w, a: departures(w, a, count))
    turn = h * law.sign * frames.loss
    return frames, parts, sums(parts.calm, turn), sums(parts.jump, turn)


def _ratio(odds, calm, jump):
    """`(B/A)(z)` from the departures."""
    scale = jnp.exp(odds)[:, None] / jnp.maximum((1.0 + calm[0]) ** 2 + calm[1] ** 2, 1e-300)
    re = scale * ((1.0 + jump[0]) * (1.0 + calm[0]) + jump[1] * calm[1])
    return re, scale * (jump[1] * (1.0 + calm[0]) - (1.0 + jump[0]) * calm[1])


class _Logs(NamedTuple):
    """Logarithms of `prod A^n` and of `prod (1 + B/A)^n` along the contour, moduli and angles."""

    plain: jax.Array
    plain_turn: jax.Array
    rise: jax.Array
    rise_turn: jax.Array
    turned: jax.Array  # the angles' terms, which may cancel, in magnitude


def logs_of(law: Law, place: Place, parts, calm, jump, t):
    """Both logarithms at every node, from the departures."""
    log_size, turned = polar(*calm)
    added, added_turn = polar(*_ratio(parts.log_jump - parts.log_calm, calm, jump))
    n = law.gauss_n
    plain = n @ log_size - law.mu2 * t**2 / 2.0
    pure = law.mu2 * t * (place.c + 0.5)
    sizes = jnp.abs(pure) + n @ (jnp.abs(turned) + jnp.abs(added_turn))
    return _Logs(plain, n @ turned + pure, n @ added, n @ added_turn, sizes)


def wave_at(law: Law, place: Place, points, count):
    """Evaluate the integrand; returns the wave and what its certificate is made from."""
    h = 2.0 * jnp.pi / place.period
    t = h * jnp.arange(count)
    frames, parts, calm, jump = _sums(law, place, points, count)
    logs = logs_of(law, place, parts, calm, jump, t)
    keep = place.window.keep
    rise, log_norm = rise_and_norm(law, keep, parts.log_calm, parts.log_jump)
    # e^R - (1 - keep), relative to e^{max(r, 0)}
    r, top = logs.rise, jnp.maximum(logs.rise, 0.0)
    half = 2.0 * jnp.sin(0.5 * logs.rise_turn) ** 2
    less = jnp.expm1(-jnp.abs(r))
    re = jnp.where(r > 0, -less - half, less * (1.0 - half) - half) + keep * jnp.exp(-top)
    im = jnp.exp(r - top) * jnp.sin(logs.rise_turn)
    base = rise + log_norm
    log_modulus = logs.plain + top - base + jnp.log(jnp.maximum(jnp.hypot(re, im), 1e-300))
    log_modulus = jnp.where(jnp.arange(count) < place.kept, log_modulus, -jnp.inf)
    k0 = law.mu2 * place.c * (place.c + 1.0) / 2.0 + law.gauss_n @ parts.log_calm + base
    far = aside.far_masses(law, place.window.high)
    angle = logs.plain_turn + jnp.arctan2(im, re)
    wave = Wave(place.c, k0, h, t, weight_at(place.c, h, t), log_modulus, angle, far)
    return wave, (frames, parts, calm, jump)


def needed(law: Law, place: Place, frames):
    """(points, nodes) on which the contour could be followed to the end."""
    turns = place.count * jnp.max(frames.loss[:, -1] - frames.loss[:, 0]) / place.period
    reach = (frames.u[:, -1] - frames.u[:, 0]) / (1.1 * high_blur(law.gauss_sigma))
    return jnp.stack([jnp.maximum(1.05 * (turns + jnp.max(reach)), 1.02 * turns / FULLEST), place.count])


def estimate(wave: Wave, epsilon):
    """(log delta, minus its derivative in eps)."""
    value, slope = trapezoid(wave, epsilon)
    z = jnp.exp(wave.k0 - wave.c * epsilon)
    far, far_slope = aside.far(wave.far, epsilon)
    total = jnp.maximum(z * value + far, 1e-300)
    return jnp.log(total), jnp.maximum(z * slope - far_slope, 0.0) / total
