"""The integrand of the split contour at its nodes, and the value that they give.

delta is the contour integral of `prod (A+B)^n - (1 - keep_bulk) prod A^n`, plus the share of the compositions with a
far step, plus, for keep_bulk = 0, that of the compositions of bulk steps alone (remainder.py).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxacct.kernels.arrays import Array
from jaxacct.kernels.law import LossLaw
from jaxacct.kernels.nodes import departures, polar, trapezoid, weight_at
from jaxacct.kernels.split import remainder
from jaxacct.kernels.split.parts import LARGEST_TURN_SHARE, Grid, TiltedParts, high_blur, rise_and_norm, tilted
from jaxacct.kernels.split.placement import Contour, grids_of
from jaxacct.kernels.split.remainder import FarMasses


class Integrand(NamedTuple):
    """The integrand without its dependence on eps, at t_k = k h, relative to e^{K(c)}; values without error bounds."""

    c: Array  # abscissa
    k0: Array  # K(c)
    h: Array  # spacing of t
    t: Array  # (count,)
    weight: tuple[Array, Array]  # as in Nodes
    log_modulus: Array  # (count,)
    angle: Array  # (count,)
    far: FarMasses


class Quadrature(NamedTuple):
    """What an integrand was made from: the grids, their parts under the tilt, and both parts at every node.

    (A(z_k)/A(c) - 1) and (B(z_k)/B(c) - 1) are pairs of real and imaginary parts, each (J, count).
    """

    grids: Grid
    parts: TiltedParts
    bulk: tuple[Array, Array]
    jump: tuple[Array, Array]


def _quadrature(law: LossLaw, contour: Contour, points: int, count: int) -> Quadrature:
    """The grid that follows t up to the last node kept, and both parts' departures from one at every node."""
    h = 2.0 * jnp.pi / contour.period
    grids = grids_of(law, contour.windows, contour.c, points, h * contour.nodes_kept)
    parts = jax.vmap(tilted, (None, None, 0))(law.sign, contour.c, grids)
    sums = jax.vmap(lambda w, a: departures(w, a, count))
    turn = h * law.sign * grids.loss
    return Quadrature(grids, parts, sums(parts.bulk, turn), sums(parts.jump, turn))


def _ratio(odds: Array, bulk: tuple[Array, Array], jump: tuple[Array, Array]) -> tuple[Array, Array]:
    """`(B/A)(z)` from the departures."""
    scale = jnp.exp(odds)[:, None] / jnp.maximum((1.0 + bulk[0]) ** 2 + bulk[1] ** 2, 1e-300)
    re = scale * ((1.0 + jump[0]) * (1.0 + bulk[0]) + jump[1] * bulk[1])
    return re, scale * (jump[1] * (1.0 + bulk[0]) - (1.0 + jump[0]) * bulk[1])


class Logs(NamedTuple):
    """Logarithms of `prod A^n` and of `prod (1 + B/A)^n` along the contour, moduli and angles."""

    plain: Array
    plain_turn: Array
    rise: Array
    rise_turn: Array
    turned: Array  # the angles' terms, which may cancel, in magnitude


def logs_of(
    law: LossLaw, contour: Contour, parts: TiltedParts, bulk: tuple[Array, Array], jump: tuple[Array, Array], t: Array
) -> Logs:
    """Both logarithms at every node, from the departures."""
    log_size, turned = polar(*bulk)
    added, added_turn = polar(*_ratio(parts.log_jump - parts.log_bulk, bulk, jump))
    n = law.gauss_n
    plain = n @ log_size - law.mu2 * t**2 / 2.0
    pure = law.mu2 * t * (contour.c + 0.5)
    sizes = jnp.abs(pure) + n @ (jnp.abs(turned) + jnp.abs(added_turn))
    return Logs(plain, n @ turned + pure, n @ added, n @ added_turn, sizes)


def integrand_at(law: LossLaw, contour: Contour, points: int, count: int) -> tuple[Integrand, Quadrature]:
    """Evaluate the integrand, on grids of `points` points at `count` nodes."""
    h = 2.0 * jnp.pi / contour.period
    t = h * jnp.arange(count)
    made_from = _quadrature(law, contour, points, count)
    parts = made_from.parts
    logs = logs_of(law, contour, parts, made_from.bulk, made_from.jump, t)
    keep_bulk = contour.windows.keep_bulk
    rise, log_norm = rise_and_norm(law, keep_bulk, parts.log_bulk, parts.log_jump)
    # e^R - (1 - keep_bulk), relative to e^{max(r, 0)}
    r, top = logs.rise, jnp.maximum(logs.rise, 0.0)
    half = 2.0 * jnp.sin(0.5 * logs.rise_turn) ** 2
    less = jnp.expm1(-jnp.abs(r))
    re = jnp.where(r > 0, -less - half, less * (1.0 - half) - half) + keep_bulk * jnp.exp(-top)
    im = jnp.exp(r - top) * jnp.sin(logs.rise_turn)
    base = rise + log_norm
    log_modulus = logs.plain + top - base + jnp.log(jnp.maximum(jnp.hypot(re, im), 1e-300))
    log_modulus = jnp.where(jnp.arange(count) < contour.nodes_kept, log_modulus, -jnp.inf)
    k0 = law.mu2 * contour.c * (contour.c + 1.0) / 2.0 + law.gauss_n @ parts.log_bulk + base
    far = remainder.far_masses(law, contour.windows.high)
    angle = logs.plain_turn + jnp.arctan2(im, re)
    return Integrand(contour.c, k0, h, t, weight_at(contour.c, h, t), log_modulus, angle, far), made_from


def needed(law: LossLaw, contour: Contour, grids: Grid) -> Array:
    """(points, nodes) on which the contour could be followed to the end."""
    turns = contour.nodes_needed * jnp.max(grids.loss[:, -1] - grids.loss[:, 0]) / contour.period
    reach = (grids.u[:, -1] - grids.u[:, 0]) / (1.1 * high_blur(law.gauss_sigma))
    return jnp.stack(
        [jnp.maximum(1.05 * (turns + jnp.max(reach)), 1.02 * turns / LARGEST_TURN_SHARE), contour.nodes_needed]
    )


def estimate(integrand: Integrand, epsilon: Array) -> tuple[Array, Array]:
    """(log delta, minus its derivative in eps)."""
    value, slope = trapezoid(integrand, epsilon)
    z = jnp.exp(integrand.k0 - integrand.c * epsilon)
    far, far_slope = remainder.far(integrand.far, epsilon)
    total = jnp.maximum(z * value + far, 1e-300)
    return jnp.log(total), jnp.maximum(z * slope - far_slope, 0.0) / total
