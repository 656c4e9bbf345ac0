"""One step of a sampled Gaussian, split smoothly by its outcome u = x/sigma into bulk, jumps and far tail.

The bulk lies below `low`, the far tail above `high`, and the jumps between them:

    bulk   A(z) = int w1 w2 P e^{zL} du          w1(u) = Phi((low - u)/low_blur)
    jump   B(z) = int (1 - w1) w2 P e^{zL} du    w2(u) = Phi((high - u)/high_blur)

The contour integrates `prod (A+B)^n - (1 - keep_bulk) prod A^n`: compositions without a far step, and for
keep_bulk = 0 only those with at least one jump.  The windows are entire functions, so that the trapezoid rule stays
exponentially accurate.  Its nodes are equidistant in `v = u + warp L(u)`.  They are dense where the loss is steep, so
that following e^{itL} costs one point per turn and no more.
"""

from typing import NamedTuple

import numpy as np

from jaxacct.kernels.arrays import Array, interp, keep_apart, logistic, namespace, repeat
from jaxacct.kernels.law import TAIL_NATS, LossLaw, log_mix, quadrature_range
from jaxacct.kernels.rounding import total
from jaxacct.kernels.special import log1p, log_ndtr, log_ndtr_sides, softplus

GRID_BEYOND_FAR_WINDOW = 17.0
"""How far the grid reaches beyond `high`, in widths of the far window.

The far window is below 1e-60 there, so that less than e^-45 is left of a tilted law that grows by e^60 on the way.
"""
LARGEST_TURN_SHARE = 0.85
"""Largest share of the grid's points that may go to following the turns of e^{itL}; the others resolve the windows."""
NO_WINDOW = 1e9
"""A place in u beyond every outcome: a window there cuts nothing off."""
TILTED_RANGE_CELLS = 128
"""Cells of the grid on which `ends` looks for the end of a tilted law; no bound depends on where it finds it."""
NEWTON_STEPS = 4
"""Newton steps that place the nodes of a warped grid.  What they leave of the error is measured (`Grid.slack`)."""


class Windows(NamedTuple):
    """Where the outcomes of the J sampled Gaussians are split, and whether compositions of bulk steps stay in."""

    low: Array  # (J,) centres of the windows between bulk and jumps, in u
    high: Array  # (J,) centres of the windows between jumps and far tail, in u
    keep_bulk: Array  # 1: compositions of bulk steps alone are integrated with the others; 0: they are left out


class Grid(NamedTuple):
    """Quadrature points for one sampled Gaussian, with everything that does not depend on the tilt."""

    u: Array  # (X,)
    gap: Array  # (X,) du per node
    step: Array  # spacing in v
    warp: Array
    slack: Array  # (X,) bound on the error of u as a node
    loss: Array  # (X,) log mix, before the sign
    posterior: Array  # (X,)
    log_bulk: Array  # (X,) log of w1 w2 phi gap
    log_jump: Array  # (X,)


class TiltedParts(NamedTuple):
    """Bulk and jumps of one sampled Gaussian under a tilt."""

    bulk: Array  # (X,) weights, which sum to one
    jump: Array  # (X,) weights, which sum to one
    log_bulk: Array  # log A(c)
    log_jump: Array  # log B(c)


def low_blur(sigma: Array) -> Array:
    """Width of the low window: losses grow like e^{u/sigma}, so that it is narrower for small sigma."""
    return 0.15 * namespace(sigma).minimum(sigma, 1.0)


def high_blur(sigma: Array) -> Array:
    """Width of the far window."""
    return 0.1 * namespace(sigma).minimum(sigma, 1.0)


def ends(sigma: Array, q: Array, sign: Array, high: Array, c: Array) -> tuple[Array, Array]:
    """The range in u: up to the far window, or for the add direction as far as the law tilted by c reaches."""
    xp = namespace(sigma, high, c)
    removing, first, last = sign > 0, -((2.0 * TAIL_NATS) ** 0.5), high + GRID_BEYOND_FAR_WINDOW * high_blur(sigma)
    if xp is np and np.all(removing):  # what follows is for the add direction
        shape = np.broadcast_shapes(np.shape(sign), np.shape(c), last.shape)
        return np.full(shape, first), np.broadcast_to(last, shape)
    lo, hi = quadrature_range(sigma, q, sign, c)
    cell = (hi - lo) / float(TILTED_RANGE_CELLS)
    u = lo[..., None] + cell[..., None] * xp.arange(TILTED_RANGE_CELLS + 1)
    exponent = -c[..., None] * log_mix(sigma[..., None], q[..., None], u)[0] - 0.5 * u**2
    inside = exponent > xp.max(exponent, axis=-1)[..., None] - TAIL_NATS
    hi = xp.where(inside[..., -1], hi, lo + cell * (TILTED_RANGE_CELLS + 1 - xp.argmax(inside[..., ::-1], axis=-1)))
    return xp.where(removing, first, lo), xp.where(removing, last, hi)


def grid(
    sigma: Array,
    q: Array,
    sign: Array,
    low: Array,
    high: Array,
    c: Array,
    nodes: int,
    frequency: Array | None = None,
    stop: Array = np.inf,
) -> Grid:
    """`nodes` points up to a sharp end, even in u, or dense enough to follow a frequency."""
    xp = namespace(sigma, low, high, c)
    lo, hi = ends(sigma, q, sign, high, c)
    hi = xp.minimum(hi, stop)
    if frequency is None:
        step = (hi - lo) / (nodes - 1)
        u = lo[..., None] + step[..., None] * xp.arange(nodes)
        gap, warp, slack = step[..., None], 0.0 * step, xp.zeros_like(u)
    else:
        u, gap, step, warp, slack = _warped(sigma, q, lo, hi, nodes, frequency)
    sigma = sigma[..., None]
    loss, posterior = log_mix(sigma, q[..., None], u)
    density = -0.5 * u**2 + (xp.log(gap) - 0.5 * xp.log(2.0 * xp.pi))
    base = density + log_ndtr((high[..., None] - u) / high_blur(sigma))
    inside, outside = log_ndtr_sides((low[..., None] - u) / low_blur(sigma))
    gap = xp.broadcast_to(gap, u.shape)
    return keep_apart(xp, Grid(u, gap, step, warp, slack, loss, posterior, base + inside, base + outside))


def _warped(
    sigma: Array, q: Array, lo: Array, hi: Array, nodes: int, frequency: Array
) -> tuple[Array, Array, Array, Array, Array]:
    xp = namespace(sigma, lo, hi, frequency)
    sigma, q = sigma[..., None], q[..., None]
    even = lo[..., None] + ((hi - lo) / (nodes - 1))[..., None] * xp.arange(nodes)
    loss, _ = log_mix(sigma, q, even)
    rise = xp.maximum(loss[..., -1] - loss[..., 0], 1e-300)
    turns = xp.minimum(frequency * rise / (2.0 * xp.pi), LARGEST_TURN_SHARE * (nodes - 1.0))
    step = (hi - lo) / (nodes - 1.0 - turns)
    warp = turns * step / rise
    steps, warps = step[..., None], warp[..., None]
    v = (lo + warp * loss[..., 0])[..., None] + steps * xp.arange(nodes)

    def newton(_: Array, u: Array) -> Array:
        loss, posterior = log_mix(sigma, q, u)
        return u - (u + warps * loss - v) / (1.0 + warps * posterior / sigma)

    u = repeat(xp, NEWTON_STEPS, newton, interp(xp, v, even + warps * loss, even))
    loss, posterior = log_mix(sigma, q, u)
    growth = 1.0 + warps * posterior / sigma
    return u, steps / growth, step, warp, xp.abs(u + warps * loss - v) / growth


def tilted(sign: Array, c: Array, nodes: Grid) -> TiltedParts:
    """Both parts under the tilt c."""
    xp = namespace(c, nodes.loss)
    turned = xp.where(sign > 0, c + 1.0, -c)[..., None] * nodes.loss
    bulk, log_bulk = _normalised(nodes.log_bulk + turned)
    jump, log_jump = _normalised(nodes.log_jump + turned)
    return TiltedParts(bulk, jump, log_bulk, log_jump)


def _normalised(exponent: Array) -> tuple[Array, Array]:
    xp = namespace(exponent)
    top = xp.max(exponent, axis=-1)
    weight = xp.exp(exponent - top[..., None])
    mass = total(weight)
    return weight / mass[..., None], top + xp.log(mass)


def composed(n: Array, x: Array) -> Array:
    """`sum n x` over the sampled Gaussians of a composition: n (J,), x (J, K)."""
    return namespace(n, x).sum(n[..., None] * x, axis=-2)


def rise_and_norm(law: LossLaw, keep_bulk: Array, log_bulk: Array, log_jump: Array) -> tuple[Array, Array]:
    """`R = sum n log(1 + B/A)` and `log(1 - (1 - keep_bulk) e^{-R})`."""
    xp = namespace(law.gauss_n, keep_bulk, log_bulk)
    rise = xp.sum(law.gauss_n * softplus(log_jump - log_bulk), axis=-1)
    return rise, xp.where(keep_bulk > 0, 0.0, xp.log(-xp.expm1(-rise)))


class Shares(NamedTuple):
    """The grids of J sampled Gaussians, as the cumulants need them at every tilt; (J, X) each."""

    loss: Array
    log_both: Array  # log of w2 phi gap
    bulk: Array  # shares of the two parts, which sum to one at every node
    jump: Array


def shares(grids: Grid) -> Shares:
    """Both parts as shares of their sum."""
    xp = namespace(grids.log_bulk)
    both = xp.logaddexp(grids.log_bulk, grids.log_jump)
    bulk, jump = xp.exp(grids.log_bulk - both), xp.exp(grids.log_jump - both)
    return keep_apart(xp, Shares(grids.loss, both, bulk, jump))


def _weights(law: LossLaw, parts: Shares, c: Array) -> tuple[Array, Array]:
    """(logarithm of the largest, weights over it, (J, X)) of both parts together under the tilt c."""
    xp = namespace(law.gauss_n, parts.loss, c)
    exponent = xp.where(law.sign > 0, c + 1.0, -c)[..., None, None] * parts.loss + parts.log_both
    top = xp.max(exponent, axis=-1)
    return top, xp.exp(exponent - top[..., None])


def _mass(weight: Array) -> Array:
    xp = namespace(weight)
    return xp.maximum(xp.sum(weight, axis=-1), 1e-300)


def log_size(law: LossLaw, keep_bulk: Array, parts: Shares, c: Array) -> Array:
    """`K(c) = log(prod (A+B)^n - (1 - keep_bulk) prod A^n)`, pure Gaussians included."""
    xp = namespace(law.gauss_n, parts.loss, c)
    top, weight = _weights(law, parts, c)
    log_bulk, log_jump = (top + xp.log(_mass(weight * share)) for share in (parts.bulk, parts.jump))
    rise, log_norm = rise_and_norm(law, keep_bulk, log_bulk, log_jump)
    return xp.sum(law.gauss_n * log_bulk, axis=-1) + rise + log_norm + law.mu2 * c * (c + 1.0) / 2.0


def cumulants(law: LossLaw, keep_bulk: Array, parts: Shares, c: Array) -> tuple[Array, Array, Array]:
    """`log_size` and its first two derivatives.

    For placing the contour: a part smaller than e^-600 of the other is not resolved.
    """
    xp = namespace(law.gauss_n, parts.loss, c)
    n, loss = law.gauss_n, law.sign[..., None, None] * parts.loss
    top, weight = _weights(law, parts, c)

    def moments(share: Array) -> tuple[Array, Array, Array]:
        w = weight * share
        mass = _mass(w)
        mean = xp.sum(w * loss, axis=-1) / mass
        return top + xp.log(mass), mean, xp.sum(w * (loss - mean[..., None]) ** 2, axis=-1) / mass

    (log_bulk, mean_bulk, spread_bulk), (log_jump, mean_jump, spread_jump) = map(moments, (parts.bulk, parts.jump))
    rise, log_norm = rise_and_norm(law, keep_bulk, log_bulk, log_jump)
    share, apart = logistic(xp, log_jump - log_bulk), mean_jump - mean_bulk
    first = xp.sum(n * (share * apart), axis=-1)
    second = xp.sum(n * (share * ((1.0 - share) * apart**2 + spread_jump - spread_bulk)), axis=-1)
    gain = xp.exp(-log_norm)
    value = xp.sum(n * log_bulk, axis=-1) + rise + log_norm
    mean = xp.sum(n * mean_bulk, axis=-1) + gain * first
    spread = xp.sum(n * spread_bulk, axis=-1)
    variance = xp.maximum(spread + gain * second - gain * (gain - 1.0) * first**2, 1e-3 * spread)
    return value + law.mu2 * c * (c + 1.0) / 2.0, mean + law.mu2 * (c + 0.5), variance + law.mu2


def log_odds_at(loss: Array, q: Array) -> Array:
    """`log(e^loss - (1 - q)) - log q`, the y with log mix = loss, for loss > 0."""
    xp = namespace(loss, q)
    return xp.where(loss > 1.0, loss + log1p(-(1.0 - q) * xp.exp(-loss)), xp.log(xp.expm1(loss) + q)) - xp.log(q)


def place_of(sigma: Array, q: Array, loss: Array) -> Array:
    """The u at which log mix is a given positive loss."""
    return sigma * (log_odds_at(loss, q) + 0.5 / sigma**2)
