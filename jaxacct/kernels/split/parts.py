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

import jax
import jax.numpy as jnp
from jax import lax

from jaxacct.kernels.arrays import Array
from jaxacct.kernels.law import TAIL_NATS, LossLaw, log_mix, quadrature_range
from jaxacct.kernels.rounding import total
from jaxacct.kernels.special import log1p, log_ndtr

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
    return 0.15 * jnp.minimum(sigma, 1.0)


def high_blur(sigma: Array) -> Array:
    """Width of the far window."""
    return 0.1 * jnp.minimum(sigma, 1.0)


def ends(sigma: Array, q: Array, sign: Array, high: Array, c: Array) -> tuple[Array, Array]:
    """The range in u: up to the far window, or for the add direction as far as the law tilted by c reaches."""
    lo, hi = quadrature_range(sigma, q, sign, c)
    u = lo + (hi - lo) / float(TILTED_RANGE_CELLS) * jnp.arange(TILTED_RANGE_CELLS + 1)
    exponent = -c * log_mix(sigma, q, u)[0] - 0.5 * u**2
    inside = exponent > jnp.max(exponent) - TAIL_NATS
    hi = jnp.where(
        inside[-1], hi, lo + (hi - lo) / float(TILTED_RANGE_CELLS) * (TILTED_RANGE_CELLS + 1 - jnp.argmax(inside[::-1]))
    )
    removing = sign > 0
    return jnp.where(removing, -jnp.sqrt(2.0 * TAIL_NATS), lo), jnp.where(
        removing, high + GRID_BEYOND_FAR_WINDOW * high_blur(sigma), hi
    )


def grid(
    sigma: Array,
    q: Array,
    sign: Array,
    low: Array,
    high: Array,
    c: Array,
    nodes: int,
    frequency: Array | None = None,
    stop: Array = jnp.inf,
) -> Grid:
    """`nodes` points up to a sharp end, even in u, or dense enough to follow a frequency."""
    lo, hi = ends(sigma, q, sign, high, c)
    hi = jnp.minimum(hi, stop)
    if frequency is None:
        step = (hi - lo) / (nodes - 1)
        u = lo + step * jnp.arange(nodes)
        gap, warp, slack = jnp.full_like(u, step), 0.0 * step, jnp.zeros_like(u)
    else:
        u, gap, step, warp, slack = _warped(sigma, q, lo, hi, nodes, frequency)
    loss, posterior = log_mix(sigma, q, u)
    base = -0.5 * u**2 + jnp.log(gap) - 0.5 * jnp.log(2.0 * jnp.pi) + log_ndtr((high - u) / high_blur(sigma))
    place = (low - u) / low_blur(sigma)
    return lax.optimization_barrier(
        Grid(u, gap, step, warp, slack, loss, posterior, base + log_ndtr(place), base + log_ndtr(-place))
    )


def _warped(
    sigma: Array, q: Array, lo: Array, hi: Array, nodes: int, frequency: Array
) -> tuple[Array, Array, Array, Array, Array]:
    even = lo + (hi - lo) / (nodes - 1) * jnp.arange(nodes)
    loss, _ = log_mix(sigma, q, even)
    rise = jnp.maximum(loss[-1] - loss[0], 1e-300)
    turns = jnp.minimum(frequency * rise / (2.0 * jnp.pi), LARGEST_TURN_SHARE * (nodes - 1.0))
    step = (hi - lo) / (nodes - 1.0 - turns)
    warp = turns * step / rise
    v = lo + warp * loss[0] + step * jnp.arange(nodes)

    def newton(_: Array, u: Array) -> Array:
        loss, posterior = log_mix(sigma, q, u)
        return u - (u + warp * loss - v) / (1.0 + warp * posterior / sigma)

    u = lax.fori_loop(0, NEWTON_STEPS, newton, jnp.interp(v, even + warp * loss, even))
    loss, posterior = log_mix(sigma, q, u)
    growth = 1.0 + warp * posterior / sigma
    return u, step / growth, step, warp, jnp.abs(u + warp * loss - v) / growth


def tilted(sign: Array, c: Array, nodes: Grid) -> TiltedParts:
    """Both parts under the tilt c."""
    power = jnp.where(sign > 0, c + 1.0, -c)
    bulk, log_bulk = _normalised(nodes.log_bulk + power * nodes.loss)
    jump, log_jump = _normalised(nodes.log_jump + power * nodes.loss)
    return TiltedParts(bulk, jump, log_bulk, log_jump)


def _normalised(exponent: Array) -> tuple[Array, Array]:
    top = jnp.max(exponent)
    weight = jnp.exp(exponent - top)
    mass = total(weight)
    return weight / mass, top + jnp.log(mass)


def rise_and_norm(law: LossLaw, keep_bulk: Array, log_bulk: Array, log_jump: Array) -> tuple[Array, Array]:
    """`R = sum n log(1 + B/A)` and `log(1 - (1 - keep_bulk) e^{-R})`."""
    rise = jnp.sum(law.gauss_n * jnp.logaddexp(0.0, log_jump - log_bulk))
    return rise, jnp.where(keep_bulk > 0, 0.0, jnp.log(-jnp.expm1(-rise)))


class Shares(NamedTuple):
    """The grids of J sampled Gaussians, as the cumulants need them at every tilt; (J, X) each."""

    loss: Array
    log_both: Array  # log of w2 phi gap
    bulk: Array  # shares of the two parts, which sum to one at every node
    jump: Array


def shares(grids: Grid) -> Shares:
    """Both parts as shares of their sum."""
    both = jnp.logaddexp(grids.log_bulk, grids.log_jump)
    bulk, jump = jnp.exp(grids.log_bulk - both), jnp.exp(grids.log_jump - both)
    return lax.optimization_barrier(Shares(grids.loss, both, bulk, jump))


def cumulants(law: LossLaw, keep_bulk: Array, parts: Shares, c: Array) -> tuple[Array, Array, Array]:
    """`K(c) = log(prod (A+B)^n - (1 - keep_bulk) prod A^n)`, pure Gaussians included, and its first two derivatives.

    For placing the contour: a part smaller than e^-600 of the other is not resolved.
    """
    n, loss = law.gauss_n, law.sign * parts.loss
    exponent = jnp.where(law.sign > 0, c + 1.0, -c) * parts.loss + parts.log_both
    top = jnp.max(exponent, axis=1)
    weight = jnp.exp(exponent - top[:, None])

    def moments(share: Array) -> tuple[Array, Array, Array]:
        w = weight * share
        mass = jnp.maximum(jnp.sum(w, axis=1), 1e-300)
        mean = jnp.sum(w * loss, axis=1) / mass
        return top + jnp.log(mass), mean, jnp.sum(w * (loss - mean[:, None]) ** 2, axis=1) / mass

    (log_bulk, mean_bulk, spread_bulk), (log_jump, mean_jump, spread_jump) = map(moments, (parts.bulk, parts.jump))
    rise, log_norm = rise_and_norm(law, keep_bulk, log_bulk, log_jump)
    share, apart = jax.nn.sigmoid(log_jump - log_bulk), mean_jump - mean_bulk
    first = n @ (share * apart)
    second = n @ (share * ((1.0 - share) * apart**2 + spread_jump - spread_bulk))
    gain = jnp.exp(-log_norm)
    value = n @ log_bulk + rise + log_norm
    mean = n @ mean_bulk + gain * first
    variance = n @ spread_bulk + gain * second - gain * (gain - 1.0) * first**2
    variance = jnp.maximum(variance, 1e-3 * (n @ spread_bulk))
    return value + law.mu2 * c * (c + 1.0) / 2.0, mean + law.mu2 * (c + 0.5), variance + law.mu2


def log_odds_at(loss: Array, q: Array) -> Array:
    """`log(e^loss - (1 - q)) - log q`, the y with log mix = loss, for loss > 0."""
    return jnp.where(loss > 1.0, loss + log1p(-(1.0 - q) * jnp.exp(-loss)), jnp.log(jnp.expm1(loss) + q)) - jnp.log(q)


def place_of(sigma: Array, q: Array, loss: Array) -> Array:
    """The u at which log mix is a given positive loss."""
    return sigma * (log_odds_at(loss, q) + 0.5 / sigma**2)
