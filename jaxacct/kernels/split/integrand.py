"""The integrand of the split contour at its nodes, and the value that they give.

delta is the contour integral of `prod (A+B)^n - (1 - keep_bulk) prod A^n`, plus the share of the compositions with a
far step, plus, for keep_bulk = 0, that of the compositions of bulk steps alone (remainder.py).
"""

from typing import NamedTuple

from jaxacct.kernels.arrays import Array, namespace, stack
from jaxacct.kernels.departures import departures, polar
from jaxacct.kernels.law import LossLaw
from jaxacct.kernels.nodes import trapezoid, weight_at
from jaxacct.kernels.split import remainder
from jaxacct.kernels.split.parts import (
    LARGEST_TURN_SHARE,
    Grid,
    TiltedParts,
    composed,
    high_blur,
    rise_and_norm,
    tilted,
)
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
    xp = namespace(law.gauss_n, contour.period)
    h = 2.0 * xp.pi / contour.period
    grids = grids_of(law, contour.windows, contour.c, points, h * contour.nodes_kept)
    parts = tilted(law.sign[..., None], contour.c[..., None], grids)
    turn = (h * law.sign)[..., None, None] * grids.loss
    re, im = departures(xp.stack([parts.bulk, parts.jump]), turn, count)
    return Quadrature(grids, parts, (re[0], im[0]), (re[1], im[1]))


def _ratio(odds: Array, bulk: tuple[Array, Array], jump: tuple[Array, Array]) -> tuple[Array, Array]:
    """`(B/A)(z)` from the departures."""
    xp = namespace(odds, bulk[0])
    whole = 1.0 + bulk[0], 1.0 + jump[0]
    scale = xp.exp(odds)[..., None] / xp.maximum(whole[0] ** 2 + bulk[1] ** 2, 1e-300)
    re = scale * (whole[1] * whole[0] + jump[1] * bulk[1])
    return re, scale * (jump[1] * whole[0] - whole[1] * bulk[1])


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
    xp = namespace(law.gauss_n, t)
    log_size, turned = polar(*bulk)
    added, added_turn = polar(*_ratio(parts.log_jump - parts.log_bulk, bulk, jump))
    n, mu2 = law.gauss_n, law.mu2[..., None]
    plain = composed(n, log_size) - mu2 * t**2 / 2.0
    pure = mu2 * t * (contour.c + 0.5)[..., None]
    sizes = xp.abs(pure) + composed(n, xp.abs(turned) + xp.abs(added_turn))
    return Logs(plain, composed(n, turned) + pure, composed(n, added), composed(n, added_turn), sizes)


def integrand_at(law: LossLaw, contour: Contour, points: int, count: int) -> tuple[Integrand, Quadrature]:
    """Evaluate the integrand, on grids of `points` points at `count` nodes."""
    xp = namespace(law.gauss_n, contour.c)
    h, index = 2.0 * xp.pi / contour.period, xp.arange(count)
    t = h[..., None] * index
    made_from = _quadrature(law, contour, points, count)
    parts = made_from.parts
    logs = logs_of(law, contour, parts, made_from.bulk, made_from.jump, t)
    keep_bulk = contour.windows.keep_bulk
    rise, log_norm = rise_and_norm(law, keep_bulk, parts.log_bulk, parts.log_jump)
    # e^R - (1 - keep_bulk), relative to e^{max(r, 0)}
    r, top = logs.rise, xp.maximum(logs.rise, 0.0)
    half = 2.0 * xp.sin(0.5 * logs.rise_turn) ** 2
    less = xp.expm1(-xp.abs(r))
    re = xp.where(r > 0, -less - half, less * (1.0 - half) - half) + keep_bulk[..., None] * xp.exp(-top)
    im = xp.exp(r - top) * xp.sin(logs.rise_turn)
    base = rise + log_norm
    log_modulus = logs.plain + top - base[..., None] + xp.log(xp.maximum(xp.hypot(re, im), 1e-300))
    log_modulus = xp.where(index < contour.nodes_kept[..., None], log_modulus, -xp.inf)
    bulk = xp.sum(law.gauss_n * parts.log_bulk, axis=-1)
    k0 = law.mu2 * contour.c * (contour.c + 1.0) / 2.0 + bulk + base
    far = remainder.far_masses(law, contour.windows.high)
    angle = logs.plain_turn + xp.arctan2(im, re)
    return Integrand(contour.c, k0, h, t, weight_at(contour.c, h, t), log_modulus, angle, far), made_from


def needed(law: LossLaw, contour: Contour, grids: Grid) -> Array:
    """(points, nodes) on which the contour could be followed to the end."""
    xp = namespace(law.gauss_n, grids.u)
    rise = xp.max(grids.loss[..., -1] - grids.loss[..., 0], axis=-1)
    turns = contour.nodes_needed * rise / contour.period
    reach = xp.max((grids.u[..., -1] - grids.u[..., 0]) / (1.1 * high_blur(law.gauss_sigma)), axis=-1)
    points = xp.maximum(1.05 * (turns + reach), 1.02 * turns / LARGEST_TURN_SHARE)
    return stack(xp, [points, contour.nodes_needed])


def estimate(integrand: Integrand, epsilon: Array) -> tuple[Array, Array]:
    """(log delta, minus its derivative in eps)."""
    xp = namespace(integrand.k0, epsilon)
    value, slope = trapezoid(integrand, epsilon)
    z = xp.exp(integrand.k0 - integrand.c * epsilon)
    far, far_slope = remainder.far(integrand.far, epsilon)
    total = xp.maximum(z * value + far, 1e-300)
    return xp.log(total), xp.maximum(z * slope - far_slope, 0.0) / total
