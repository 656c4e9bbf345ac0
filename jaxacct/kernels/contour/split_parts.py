"""One step of a sampled Gaussian, split smoothly by its outcome u into bulk, jumps and far tail (kernels/README.md).

    bulk    A(z) = int w1 w2 P e^{zL} du          w1(u) = Phi((low - u)/low_blur), the low window
    jumps   B(z) = int (1 - w1) w2 P e^{zL} du    w2(u) = Phi((high - u)/high_blur), the far window

The nodes of the trapezoid rule are equidistant in `v = u + warp L(u)`, so that one point per turn suffices to follow
e^{itL}.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import numpy as np

from jaxacct.core.floats import ROUNDOFF
from jaxacct.kernels.arrays import (
    Array,
    interp,
    keep_apart,
    log1p,
    log_ndtr,
    log_ndtr_sides,
    logistic,
    logsumexp,
    namespace,
    repeat,
    softplus,
    stack,
    total,
)
from jaxacct.kernels.contour import gaussian_errors
from jaxacct.kernels.contour.core import log_kappa
from jaxacct.kernels.contour.gaussian_errors import ROUNDED_UP, TALLEST_LINE
from jaxacct.kernels.law import TAIL_NATS, LossLaw, Tilted, log_mix, quadrature_range

LARGEST_TURN_SHARE = 0.85
"""Largest share of a grid's points that follow the turns of e^{itL} (L: the loss). The others resolve the windows."""
NO_WINDOW = 1e9
"""Centre, in u, of a window that cuts nothing off: every outcome lies below this centre."""


class Windows(NamedTuple):
    """Centres of the windows that split outcomes, and whether bulk compositions (split.py) are integrated."""

    low: Array  # (J,) centres of the windows between bulk and jumps, in u
    high: Array  # (J,) centres of the windows between jumps and far tail, in u
    keep_bulk: Array  # 1: bulk compositions are integrated; 0: they are left out


class Steps(NamedTuple):
    """J sampled Gaussians in one direction, with the centres `low` and `high` of their `Windows`."""

    sigma: Array  # (J,) noise multipliers
    q: Array  # (J,) sampling probabilities
    sign: Array  # 1 for remove, -1 for add; its last axis broadcasts over J
    low: Array
    high: Array


def steps_of(law: LossLaw, low: Array, high: Array) -> Steps:
    return Steps(law.gauss_sigma, law.gauss_q, law.sign[..., None], low, high)


class Grid(NamedTuple):
    """Quadrature points of one sampled Gaussian, with all values that do not depend on the tilt."""

    u: Array  # (X,) nodes
    gap: Array  # (X,) du at each node, the node's weight in the quadrature
    step: Array  # distance of neighbouring nodes in v = u + warp L(u), L the loss
    warp: Array  # factor of L(u) in v; 0 if the nodes are evenly spaced in u
    slack: Array  # (X,) upper bound of the error of u, which solves u + warp L(u) = v approximately
    loss: Array  # (X,) log mix, the loss of the remove direction
    posterior: Array  # (X,) q e^y / mix at each node, with y = u/sigma - 1/(2 sigma^2)
    log_bulk: Array  # (X,) log(w1 w2 phi gap): w1 is the low window, w2 the far window, phi the normal density
    log_jump: Array  # (X,) log((1 - w1) w2 phi gap)


class TiltedParts(NamedTuple):
    """Bulk and jumps of one sampled Gaussian under a tilt."""

    bulk: Array  # (X,) weights of the bulk, which sum to one
    jump: Array  # (X,) weights of the jumps, which sum to one
    log_bulk: Array  # log A(c): the logarithm of the sum of the bulk's weights before they are normalised
    log_jump: Array  # log B(c), the same for the jumps


def low_blur(sigma: Array) -> Array:
    """Return the width of the low window. It is small for small sigma, since losses grow like e^{u/sigma}."""
    return 0.15 * namespace(sigma).minimum(sigma, 1.0)


def high_blur(sigma: Array) -> Array:
    """Return the width of the far window. It is small for small sigma, as `low_blur` is."""
    return 0.1 * namespace(sigma).minimum(sigma, 1.0)


def ends(steps: Steps, c: Array) -> tuple[Array, Array]:
    """Return both ends of a grid in u. The grid covers the far window for remove, and the tilted law for add."""
    sigma, q, sign, _, high = steps
    xp = namespace(sigma, high, c)
    # A grid for remove ends at `last`, where the far window is below 1e-60. So the tilted law times the far window has
    # a mass of less than e^-45 beyond `last`, even if the law grows by a factor e^60 between `high` and `last`.
    removing, first, last = sign > 0, -((2.0 * TAIL_NATS) ** 0.5), high + 17.0 * high_blur(sigma)
    if xp is np and np.all(removing):  # only a grid for add depends on the tilted law
        shape = np.broadcast_shapes(np.shape(sign), np.shape(c), last.shape)
        return np.full(shape, first), np.broadcast_to(last, shape)
    lo, hi = quadrature_range(sigma, q, sign, c)
    cells = 128  # number of cells of a grid that finds the end of the tilted law; no bound depends on it
    cell = (hi - lo) / float(cells)
    u = lo[..., None] + cell[..., None] * xp.arange(cells + 1)
    exponent = -c[..., None] * log_mix(sigma[..., None], q[..., None], u)[0] - 0.5 * u**2
    inside = exponent > xp.max(exponent, axis=-1)[..., None] - TAIL_NATS
    hi = xp.where(inside[..., -1], hi, lo + cell * (cells + 1 - xp.argmax(inside[..., ::-1], axis=-1)))
    return xp.where(removing, first, lo), xp.where(removing, last, hi)


def grid(steps: Steps, c: Array, nodes: int, frequency: Array | None = None, stop: Array = np.inf) -> Grid:
    """Return a grid up to u = `stop`: evenly spaced if `frequency` is None, else fine enough for e^{i frequency L}."""
    sigma, q, _, low, high = steps
    xp = namespace(sigma, low, high, c)
    lo, hi = ends(steps, c)
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

    # `Grid.slack` bounds the error that four Newton steps leave
    u = repeat(xp, 4, newton, interp(xp, v, even + warps * loss, even))
    loss, posterior = log_mix(sigma, q, u)
    growth = 1.0 + warps * posterior / sigma
    return u, steps / growth, step, warp, xp.abs(u + warps * loss - v) / growth


def tilted(sign: Array, c: Array, nodes: Grid) -> TiltedParts:
    """Tilt bulk and jumps by c: return their normalised weights, log A(c) and log B(c)."""
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
    """Return `sum n x` over the J sampled Gaussians of a composition, for n of shape (J,) and x of shape (J, K)."""
    return namespace(n, x).sum(n[..., None] * x, axis=-2)


def rise_and_norm(law: LossLaw, keep_bulk: Array, log_bulk: Array, log_jump: Array) -> tuple[Array, Array]:
    """Return `R = sum n log(1 + B/A)` and `log(1 - (1 - keep_bulk) e^{-R})` from log A (`log_bulk`) and log B."""
    xp = namespace(law.gauss_n, keep_bulk, log_bulk)
    rise = xp.sum(law.gauss_n * softplus(log_jump - log_bulk), axis=-1)
    return rise, xp.where(keep_bulk > 0, 0.0, xp.log(-xp.expm1(-rise)))


class Shares(NamedTuple):
    """Those values of the grids of J sampled Gaussians that `cumulants` needs at every tilt; every field is (J, X)."""

    loss: Array  # as in `Grid`
    log_both: Array  # log(w2 phi gap), with the symbols of `Grid`; w2 phi gap is bulk plus jumps
    bulk: Array  # share of the bulk in w2 phi gap
    jump: Array  # share of the jumps; the two shares add up to one at every node


def shares(grids: Grid) -> Shares:
    """Compute `Shares` from the grids: at each node, the bulk and the jumps are expressed as shares of their sum."""
    xp = namespace(grids.log_bulk)
    both = xp.logaddexp(grids.log_bulk, grids.log_jump)
    bulk, jump = xp.exp(grids.log_bulk - both), xp.exp(grids.log_jump - both)
    return keep_apart(xp, Shares(grids.loss, both, bulk, jump))


def _weights(law: LossLaw, parts: Shares, c: Array) -> tuple[Array, Array]:
    """Tilt bulk plus jumps by c. Return the log of the largest weight, (J,), and weights/(largest weight), (J, X)."""
    xp = namespace(law.gauss_n, parts.loss, c)
    exponent = xp.where(law.sign > 0, c + 1.0, -c)[..., None, None] * parts.loss + parts.log_both
    top = xp.max(exponent, axis=-1)
    return top, xp.exp(exponent - top[..., None])


def _mass(weight: Array) -> Array:
    xp = namespace(weight)
    return xp.maximum(xp.sum(weight, axis=-1), 1e-300)


def log_size(law: LossLaw, keep_bulk: Array, parts: Shares, c: Array) -> Array:
    """Return `K(c) = log(prod (A+B)^n - (1 - keep_bulk) prod A^n)` plus the term of the Gaussians without sampling."""
    xp = namespace(law.gauss_n, parts.loss, c)
    top, weight = _weights(law, parts, c)
    log_bulk, log_jump = (top + xp.log(_mass(weight * share)) for share in (parts.bulk, parts.jump))
    rise, log_norm = rise_and_norm(law, keep_bulk, log_bulk, log_jump)
    return xp.sum(law.gauss_n * log_bulk, axis=-1) + rise + log_norm + law.mu2 * c * (c + 1.0) / 2.0


def cumulants(law: LossLaw, keep_bulk: Array, parts: Shares, c: Array) -> tuple[Array, Array, Array]:
    """Return `log_size` and its first two derivatives in c. They only place the contour, so A or B may underflow."""
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


def place_of(sigma: Array, q: Array, loss: Array) -> Array:
    """Return the u at which log mix is a given positive loss."""
    xp = namespace(loss, q)
    # y = log(e^loss - (1 - q)) - log q solves log mix = loss
    y = xp.where(loss > 1.0, loss + log1p(-(1.0 - q) * xp.exp(-loss)), xp.log(xp.expm1(loss) + q)) - xp.log(q)
    return sigma * (y + 0.5 / sigma**2)


USELESS = 1e30
"""An error bound that certifies nothing. It is finite, since it may be multiplied by a weight of zero."""
STAIRS = 12.0
"""A side joins the shifted line to the real axis. A step function with this many stairs bounds the integrand there."""
STRIP_SHARE = 0.97
"""Largest height of a shifted line, as a share of pi sigma. The integrand is analytic where |Im u| < pi sigma."""
SIDES_FACTOR = 2.0 * TALLEST_LINE
"""Largest length of the two sides at one end of the grid, above and below the real axis. The kernel on a side is up
to 1.41 times e^{-2 pi Im v/step}, but only where sigma is of the order of the step. Such sides are so short that their
length times 1.41 is below this bound, too (kernels/README.md, section 6)."""


def in_front(values: Sequence[float] | np.ndarray, ndim: int) -> np.ndarray:
    """Put values on a first axis, in front of `ndim` axes of length 1."""
    return np.reshape(np.asarray(values), (-1, *[1] * ndim))


def _log_tail_above(x: Array) -> Array:
    """Return an upper bound of log Phi(x)."""
    return namespace(x).where(x < 0.0, -0.5 * x**2 - np.log(2.0), 0.0)


def _window(largest: Array, smallest: Array, growth: Array) -> Array:
    """Return an upper bound of `log |Phi(x + i y)|` for smallest <= x <= largest and `growth` = y^2/2."""
    xp = namespace(largest, smallest, growth)
    return xp.minimum(growth + _log_tail_above(largest), softplus(growth + _log_tail_above(-smallest)))


def _windows(steps: Steps, alpha: Array, u: Array) -> tuple[Array, Array]:
    """Return upper bounds of log |w1 w2| and log |(1 - w1) w2| in each cell of the line Im u = `alpha`."""
    blur_far, blur_near = high_blur(steps.sigma), low_blur(steps.sigma)
    far, near = ((0.5 * (alpha / blur) ** 2)[..., None] for blur in (blur_far, blur_near))
    beyond = (steps.high[..., None] - u) / blur_far[..., None]
    below = (steps.low[..., None] - u) / blur_near[..., None]
    base = _window(beyond[..., :-1], beyond[..., 1:], far)
    bulk = base + _window(below[..., :-1], below[..., 1:], near)
    jump = base + _window(-below[..., 1:], -below[..., :-1], near)
    return bulk, jump


def _gaussian(u: Array) -> Array:
    """Return the log of a cell's width times the largest normal density in the cell, for every cell."""
    xp = namespace(u)
    left, right = u[..., :-1], u[..., 1:]
    nearest = xp.minimum(xp.abs(left), xp.abs(right)) * (left * right > 0)
    return xp.log(right - left) - 0.5 * nearest**2 - 0.5 * np.log(2.0 * np.pi)


def cell_bounds(steps: Steps, c: Array, alpha: Array, edges: tuple[Array, Array]) -> tuple[Array, Array, Array, Array]:
    """Per cell of Im u = alpha, return upper bounds of log int |bulk| and log int |jumps|, and a range of arg mix."""
    (sigma, q, sign, *_), (u, loss) = steps, edges
    xp = namespace(u, loss, c, alpha)
    angle, width, power = (alpha / sigma)[..., None], sigma[..., None], c[..., None] + 1.0
    exponent = xp.minimum(u / width - 0.5 / width**2, 600.0)
    odds = xp.exp((xp.log(q) - log1p(-q))[..., None] + exponent)
    shrink = 1.0 - 4.0 * odds / (1.0 + odds) ** 2 * xp.sin(0.5 * angle) ** 2
    modulus = loss + 0.5 * xp.log(xp.maximum(shrink, 1e-300))
    turn = xp.arctan2(odds * xp.sin(angle), 1.0 + odds * xp.cos(angle))
    # `blurred` bounds the rounding of the exponents (c + 1) log mix and -c log mix
    edge = xp.maximum(xp.abs(u[..., 0]), xp.abs(u[..., -1]))
    off = (4.0 * ROUNDOFF * (edge / sigma + 0.5 / sigma**2 + 1.0))[..., None]
    blurred = power * (odds / (1.0 + odds) * off + 4.0 * gaussian_errors.LOG_MIX_UNITS * ROUNDOFF * xp.abs(loss))
    modulus, turn, blurred = keep_apart(xp, (modulus, turn, blurred))  # so XLA computes the values at each edge once
    # If v = `angle` is at most pi/2, |mix| is monotone in u. For a larger v use mix cos(v/2) <= |mix| <= mix.
    steep = angle > 0.5 * xp.pi
    highest = xp.where(steep, loss[..., 1:], modulus[..., 1:])
    lowest = xp.where(steep, loss[..., :-1] + xp.log(xp.cos(0.5 * angle)), modulus[..., :-1])
    grown = xp.where((sign > 0)[..., None], power * highest, -c[..., None] * lowest)
    grown = grown + (xp.maximum(blurred[..., :-1], blurred[..., 1:]) + _gaussian(u)) + (0.5 * alpha**2)[..., None]
    bulk, jump = _windows(steps, alpha, u)
    return grown + bulk, grown + jump, turn[..., :-1] * (1.0 - 8.0 * off), turn[..., 1:] * (1.0 + 8.0 * off)


def side_bounds(steps: Steps, c: Array, alpha: Array, nodes: Grid) -> Array:
    """Return upper bounds of log densities at Im u <= alpha. Rows: bulk, jumps. Columns: first and last node."""
    # The sides lie up to half a step outside the grid. The density there is at most the density at the nearest node.
    # For add, the bound needs the share by which |mix| falls. This share rises with u: take the right end of each side.
    sigma, q, sign, low, high = steps
    xp = namespace(nodes.u, c, alpha)
    u, loss = (x[..., [0, -1]] for x in (nodes.u, nodes.loss))
    outer = stack(xp, [u[..., 0], u[..., 1] + nodes.gap[..., -1]])
    share = gaussian_errors.shrinking(sigma[..., None], q[..., None], outer)
    shrink = 0.5 * log1p(-share * xp.sin(0.5 * alpha / sigma)[..., None] ** 2)
    at = c[..., None]
    grown = xp.where((sign > 0)[..., None], (at + 1.0) * loss, -at * (loss + shrink))

    def window(x: Array, width: Array) -> Array:
        growth = (0.5 * (alpha / width) ** 2)[..., None]
        return xp.where(x > 0, softplus(growth + _log_tail_above(-x)), growth + _log_tail_above(x))

    base = grown - 0.5 * u**2 + (0.5 * alpha**2)[..., None] - 0.5 * np.log(2.0 * np.pi)
    base = base + window((high[..., None] - u) / high_blur(sigma)[..., None], high_blur(sigma))
    place = (low[..., None] - u) / low_blur(sigma)[..., None]
    return xp.stack([base + window(place, low_blur(sigma)), base + window(-place, low_blur(sigma))], axis=-2)


def cell_edges(steps: Steps, nodes: Grid) -> tuple[Array, Array]:
    """Return the edges of cells in u, and log mix at them. The outer edges lie half a step or more outside the grid."""
    xp = namespace(nodes.u)
    outside = stack(xp, [nodes.u[..., 0] - nodes.step, nodes.u[..., -1] + nodes.gap[..., -1]])
    loss, _ = log_mix(steps.sigma[..., None], steps.q[..., None], outside)
    join = lambda ends, inner: xp.concatenate([ends[..., :1], inner, ends[..., 1:]], axis=-1)
    return keep_apart(xp, (join(outside, nodes.u), join(loss, nodes.loss)))


def tails(steps: Steps, c: Array, nodes: Grid, parts: TiltedParts) -> Array:
    """Bound the masses of the tilted bulk and jumps beyond the ends of the grid, relative to A(c) and B(c)."""
    sigma, sign = steps.sigma, steps.sign
    xp = namespace(nodes.u, c)
    inner = xp.abs(nodes.u[..., 0])
    slope = xp.where(sign > 0, 0.0, c * nodes.posterior[..., 0] / sigma)
    outside = xp.where(slope < inner - 0.5, 1.0 / xp.maximum(inner - slope, 0.5), USELESS)
    # `after` bounds the mass beyond the grid's right end, divided by the density at this end. For remove the law ends
    # there. For add the law falls at least like e^{-steep u} beyond it.
    steep = nodes.u[..., -1] + c * nodes.posterior[..., -1] / sigma
    after = xp.where(sign > 0, 0.0, xp.where(steep > 0.5, 2.0, USELESS))

    def error(weight: Array) -> Array:
        first, last = weight[..., 0], weight[..., -1]
        falling = (first <= weight[..., 1]) & (last <= weight[..., -2])
        beyond = first / nodes.gap[..., 0] * outside + last / nodes.gap[..., -1] * after
        return xp.where(falling, beyond, USELESS)

    return stack(xp, [error(parts.bulk), error(parts.jump)])


def _least(
    sigma: Array, like: Array, nodes: Grid, error: Callable[[Array], Array], exponents: Sequence[float]
) -> Array:
    """Return the least `error` over lines Im u > 0, one line per exponent, or USELESS where sigma is too small."""
    xp = namespace(nodes.step, like)
    widest = xp.minimum(STRIP_SHARE * xp.pi * sigma, TALLEST_LINE)
    lowest = xp.minimum(4.0 * high_blur(sigma) ** 2 / nodes.step, 0.9 * widest)  # suits the far window
    heights = lowest * (widest / lowest) ** in_front(exponents, like.ndim)
    errors = ROUNDED_UP * xp.min(error(heights), axis=0)
    # Return USELESS for a grid of step 20 sigma or more, which cannot resolve the law (kernels/README.md, section 6),
    # and for sigma up to 2e-3, where 1/sigma is too large for the closed forms of the remainder.
    seen = (sigma > 0.05 * nodes.step) & (sigma > 2e-3)
    return xp.where(seen[..., None], xp.minimum(errors, USELESS), USELESS)


def _climbed(steps: Steps, c: Array, alpha: Array, nodes: Grid, own: Array, turning: Array | float) -> Array:
    """Bound the integrals of A/A(c) and B/B(c) along both sides of the path. Their phase is at most turning * Im u."""
    xp = namespace(nodes.u, c, alpha)
    climb = in_front(np.arange(1.0, STAIRS + 1.0) / STAIRS, alpha.ndim)
    decay = 2.0 * xp.pi * alpha / nodes.step
    # Each side is cut into STAIRS pieces. As Im v grows along a side, the bound of the integrand grows, and the kernel
    # e^{-2 pi Im v/step} falls. So each piece takes the bound from its upper end and the kernel from its lower end.
    rise = side_bounds(steps, c, climb * alpha, nodes)
    turned = turning * alpha - decay * (climb - climb[0])
    exponent = rise + turned[..., None, None] - own[..., None]
    return SIDES_FACTOR * xp.max(xp.sum(xp.exp(exponent), axis=-1), axis=0)


def step_errors(steps: Steps, c: Array, nodes: Grid, parts: TiltedParts, t_max: Array) -> Array:
    """Bound the errors of A/A(c) and B/B(c) at c + it, |t| <= t_max, that come from the grid's step and ends."""
    xp = namespace(nodes.u, c, t_max)
    edges = cell_edges(steps, nodes)
    own = stack(xp, [parts.log_bulk, parts.log_jump])
    # On the line Im u = alpha, |e^{itL}| <= e^{t_max arg mix}, and Im v = alpha + warp arg mix. So the kernel
    # e^{-2 pi Im v/step} cancels the growth of |e^{itL}|, up to the factor e^{excess arg mix}.
    excess = t_max - 2.0 * xp.pi * nodes.warp / nodes.step

    def error(alpha: Array) -> Array:
        bulk, jump, turn_l, turn_r = cell_bounds(steps, c, alpha, edges)
        phase = excess[..., None] * xp.where((excess > 0)[..., None], turn_r, turn_l)
        decay = (2.0 * xp.pi * alpha / nodes.step)[..., None]
        moved = stack(xp, [logsumexp(bulk + phase), logsumexp(jump + phase)]) - own
        turning = xp.maximum(excess, 0.0) / steps.sigma  # since arg mix is at most Im u/sigma
        sides = _climbed(steps, c, alpha, nodes, own, turning)
        return 2.0 * xp.exp(moved - decay) / (-xp.expm1(-decay)) + sides

    return _least(steps.sigma, own[..., 0], nodes, error, (0.0, 0.2, 0.4, 0.6)) + tails(steps, c, nodes, parts)


def axis_errors(steps: Steps, c: Array, nodes: Grid, parts: TiltedParts) -> Array:
    """Return `step_errors` for t = 0 and evenly spaced nodes, from |mix| <= mix and `gaussian_errors.shrinking`."""
    xp = namespace(nodes.u, c)
    u, loss = cell_edges(steps, nodes)
    own = stack(xp, [parts.log_bulk, parts.log_jump])
    removing, at = steps.sign > 0, c[..., None]
    flat = xp.where(removing[..., None], (at + 1.0) * loss[..., 1:], -at * loss[..., :-1]) + _gaussian(u)
    flat, share = keep_apart(xp, flat), gaussian_errors.shrinking(steps.sigma, steps.q, u[..., -1])

    def error(alpha: Array) -> Array:
        bulk, jump = _windows(steps, alpha, u)
        shrink = xp.where(removing, 0.0, -0.5 * c * log1p(-share * xp.sin(0.5 * alpha / steps.sigma) ** 2))
        decay = (2.0 * xp.pi * alpha / nodes.step)[..., None]
        moved = stack(xp, [logsumexp(flat + bulk), logsumexp(flat + jump)]) + (0.5 * alpha**2 + shrink)[..., None] - own
        sides = _climbed(steps, c, alpha, nodes, own, 0.0)
        return 2.0 * xp.exp(moved - decay) / (-xp.expm1(-decay)) + sides

    return _least(steps.sigma, own[..., 0], nodes, error, (0.1, 0.3, 0.5)) + tails(steps, c, nodes, parts)


DECAY_ROUNDING = 1e-9
"""Relative rounding error of a decay -log(|integrand|/e^{K(c)}), and of the logarithms that `_by_jumps` subtracts."""
FIRST_ORDER = 1.01
"""Factor that covers the terms of second and higher order in a small error."""


def _whole(nodes: Grid, parts: TiltedParts, sign: Array, c: Array) -> Tilted:
    """Return the law of bulk and jumps together, tilted by c, on an evenly spaced grid."""
    xp = namespace(nodes.u, c)
    log_m = xp.logaddexp(parts.log_bulk, parts.log_jump)
    bulk, jump = (xp.exp(x - log_m)[..., None] for x in (parts.log_bulk, parts.log_jump))
    power = xp.where(sign > 0, c + 1.0, -c)
    return Tilted(nodes.u, nodes.step, nodes.loss, nodes.posterior, parts.bulk * bulk + parts.jump * jump, log_m, power)


def decay_of_both(law: LossLaw, windows: Windows, grids: Grid, parts: TiltedParts, c: Array, frequency: Array) -> Array:
    """Return a lower bound of the decay -log(|integrand|/e^{K(c)}) at every t >= frequency, for keep_bulk 1 and 0."""
    # keep_bulk is the first axis of `windows`, `grids`, `parts` and `c`, and the second of `frequency` and the result
    xp = namespace(law.gauss_n, windows.low, frequency)
    (_, *kept), (windows, *left) = (jax.tree.map(lambda x, i=i: x[i], (windows, grids, parts, c)) for i in range(2))
    by_levels = _by_levels(law, kept[0], kept[1], kept[2], frequency[:, 0])
    by_jumps = _by_jumps(law, windows, left[0], left[1], left[2], frequency[:, 1])
    return _rounded_down(law, xp.stack([by_levels, by_jumps], axis=1), frequency)


def _rounded_down(law: LossLaw, sampled: Array, frequency: Array) -> Array:
    plain = law.mu2 * frequency**2 / 2.0
    # 0.01 nats cover rounding errors that are not in proportion to the decay
    return (plain + sampled) * (1.0 - DECAY_ROUNDING) - 0.01


def _by_levels(law: LossLaw, grids: Grid, parts: TiltedParts, c: Array, frequency: Array) -> Array:
    """For keep_bulk = 1, bound the decay (`decay_of_both`) due to sampled Gaussians from below. Use level sets."""
    xp = namespace(law.gauss_n, grids.u, frequency)
    whole = _whole(grids, parts, law.sign[..., None], c[..., None])
    slabs, lengths = gaussian_errors.level_sets(law.gauss_sigma, law.gauss_q, whole)
    each = gaussian_errors.gaussian_decay(slabs, lengths, frequency[..., None])
    return xp.sum(law.gauss_n * each, axis=-1)


def _by_jumps(law: LossLaw, windows: Windows, grids: Grid, parts: TiltedParts, c: Array, frequency: Array) -> Array:
    """For keep_bulk = 0, bound the decay (`decay_of_both`) due to sampled Gaussians from below. Use a bound of |B|."""
    xp = namespace(law.gauss_n, grids.u, frequency)
    ceilings = _jump_ceiling(law, windows, c[..., None], grids, parts.log_jump, frequency[..., None])
    odds = parts.log_jump - parts.log_bulk
    rise, log_norm = rise_and_norm(law, windows.keep_bulk, parts.log_bulk, parts.log_jump)
    reached = xp.sum(law.gauss_n * softplus(odds + ceilings), axis=-1)
    by_jumps = rise - reached + log_norm - xp.log(-xp.expm1(-reached))
    return by_jumps - DECAY_ROUNDING * (rise + reached)


def _jump_ceiling(law: LossLaw, windows: Windows, c: Array, nodes: Grid, log_jump: Array, frequency: Array) -> Array:
    """For remove, bound log(|B(c+it)|/B(c)) from above, t >= frequency. |e^{itL}| falls in t on lines Im u > 0."""
    xp = namespace(nodes.u, frequency)
    sigma, steps = law.gauss_sigma, steps_of(law, windows.low, windows.high)._replace(sign=xp.ones_like(c))
    heights = in_front((1.5, 2.8, 4.5, 7.0), frequency.ndim) * low_blur(sigma)
    alpha = xp.minimum(heights, STRIP_SHARE * xp.pi * sigma)
    _, jump, turn, _ = cell_bounds(steps, c, alpha, cell_edges(steps, nodes))
    sides = side_bounds(steps, c, alpha, nodes)[..., 1, :]
    # the heights are taken one after the other, since the terms of all heights would not fit into a cache
    sums = xp.stack([logsumexp(own - frequency[..., None] * angle) for own, angle in zip(jump, turn, strict=True)])
    sums = xp.logaddexp(sums, np.log(SIDES_FACTOR) + logsumexp(sides))
    return xp.minimum(xp.min(sums, axis=0) - log_jump, 0.0)


def _raised(law: LossLaw, keep_bulk: Array, parts: TiltedParts, errors: Array, rise: Array) -> Array:
    """Bound how far K(c) can rise if log A and log B rise by the given errors, (J, 2)."""
    xp = namespace(law.gauss_n, errors)
    n, of_bulk, of_jump = law.gauss_n, errors[..., 0], errors[..., 1]
    share = logistic(xp, parts.log_jump - parts.log_bulk)
    # For keep_bulk = 0: if A and B rise by the same factor, K(c) rises by n times the rise of log A. If only B rises,
    # R = `rise` grows by dR, at most R times the rise of log B. So log(e^R - 1) in K(c) rises by at most (1 + R)/R dR.
    jumps = xp.sum(xp.where(n > 0, of_jump, 0.0), axis=-1)
    without = xp.sum(n * of_bulk, axis=-1) + (1.0 + rise) * jumps
    with_bulk = xp.sum(n * ((1.0 - share) * of_bulk + share * of_jump), axis=-1)
    return FIRST_ORDER * xp.where(keep_bulk > 0, with_bulk, without)


def _log_total(law: LossLaw, keep_bulk: Array, parts: TiltedParts, c: Array) -> tuple[Array, Array]:
    xp = namespace(law.gauss_n, parts.log_bulk, c)
    rise, log_norm = rise_and_norm(law, keep_bulk, parts.log_bulk, parts.log_jump)
    bulk = xp.sum(law.gauss_n * parts.log_bulk, axis=-1)
    return law.mu2 * c * (c + 1.0) / 2.0 + bulk + rise + log_norm, rise


def chernoff(law: LossLaw, keep_bulk: Array, parts: TiltedParts, errors: Array, c: Array) -> Array:
    """Bound `K(c) + log kappa(c)` of integrated compositions from above. `errors` bounds errors of log A and log B."""
    own, rise = _log_total(law, keep_bulk, parts, c)
    value = own + _raised(law, keep_bulk, parts, errors, rise) + log_kappa(c)
    return value + _sum_rounding(law, parts, rise, c)


def _sum_rounding(law: LossLaw, parts: TiltedParts, rise: Array, c: Array) -> Array:
    """Bound the rounding of sums of `n log A`, `n log(1 + B/A)` and log kappa(c), with a factor of about 2 to spare."""
    xp = namespace(law.gauss_n, parts.log_bulk, c)
    bulk = xp.sum(law.gauss_n * xp.abs(parts.log_bulk), axis=-1)
    size = law.mu2 * c * (c + 1.0) + bulk + rise + xp.abs(log_kappa(c))
    return ROUNDOFF * (law.gauss_n.shape[-1] + 24.0) * (size + 40.0)


def decay_beyond(
    law: LossLaw,
    windows: Windows,
    grids: Grid,
    parts: TiltedParts,
    errors: Array,  # (J, 2) bounds of the errors of log A(c) and log B(c), which the result covers
    c: Array,
    k0: Array,
    frequency: Array,
) -> Array:
    """Return a lower bound of -log(|integrand|/e^{k0}) for t >= frequency; k0 estimates K(c)."""
    xp = namespace(law.gauss_n, windows.low, frequency)
    own, rise = _log_total(law, windows.keep_bulk, parts, c)
    by_levels = _by_levels(law, grids, parts, c, frequency)
    by_jumps = _by_jumps(law, windows, grids, parts, c, frequency)
    bound = _rounded_down(law, xp.where(windows.keep_bulk > 0, by_levels, by_jumps), frequency)
    rounding = 2.0 * _sum_rounding(law, parts, rise, c)
    return bound - _raised(law, windows.keep_bulk, parts, errors, rise) + k0 - own - rounding


def bulk_chernoff(law: LossLaw, parts: TiltedParts, errors: Array, c: Array) -> Array:
    """Bound `K(c) + log kappa(c)` of the bulk compositions from above."""
    xp = namespace(law.gauss_n, parts.log_bulk, c)
    bulk = xp.sum(law.gauss_n * (parts.log_bulk + FIRST_ORDER * errors[..., 0]), axis=-1)
    value = law.mu2 * c * (c + 1.0) / 2.0 + bulk + log_kappa(c)
    return value + _sum_rounding(law, parts, xp.zeros_like(c), c)
