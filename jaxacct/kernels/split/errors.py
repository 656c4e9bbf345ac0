"""Rigorous bounds of the quadrature errors of the split contour (kernels/README.md, section 6).

For the two parts `A` and `B` of parts.py, each relative to its own value on the real axis.  rounding.py has the others.
"""

from collections.abc import Callable, Sequence

import numpy as np

from jaxacct.core.floats import ROUNDOFF
from jaxacct.kernels import certificate
from jaxacct.kernels.arrays import Array, keep_apart, namespace, stack
from jaxacct.kernels.law import log_mix
from jaxacct.kernels.special import log1p, softplus
from jaxacct.kernels.split.parts import Grid, TiltedParts, high_blur, low_blur

SHIFT_EXPONENTS = (0.0, 0.2, 0.4, 0.6)
"""Heights tried for the shifted line: 0 is what suits the far window, 1 the widest strip, geometrically between."""
AXIS_SHIFT_EXPONENTS = (0.1, 0.3, 0.5)
"""The same where t = 0."""
USELESS = 1e30
"""An error that certifies nothing.

It is finite for the sake of parts of weight zero, such as the jumps with keep_bulk = 1, where low = NO_WINDOW.
"""
STAIRS = 12.0
"""Stairs in which the sides of the path are bounded."""
LEAST_SIGMA = 2e-3
"""Noise multiplier below which nothing is certified: 1/sigma is too large for the closed forms of remainder.py."""
LEAST_SIGMA_PER_STEP = 0.05
"""The same over the spacing of the grid, which below that cannot see the law (kernels/README.md, section 6)."""
TALLEST_LINE = 12.0
"""Largest height of a shifted line, in u."""
STRIP_SHARE = 0.97
"""Largest height of a shifted line, over the half width pi sigma of the strip in which the integrand is analytic."""
SIDES_FACTOR = 2.0 * TALLEST_LINE
"""What the sides of the path contribute at most, over the bound of the integrand there: their lengths together.

On the sides the kernel is at most 1.41 e^{-2 pi Im v/h} (kernels/README.md, section 6).
"""
ROUNDED_UP = 1.001
"""Factor for the rounding of an error bound's own arithmetic."""


def in_front(values: Sequence[float] | np.ndarray, ndim: int) -> np.ndarray:
    """Values as an axis in front of ndim others."""
    return np.reshape(np.asarray(values), (-1, *[1] * ndim))


def _log_tail_above(x: Array) -> Array:
    """An upper bound of log Phi(x)."""
    return namespace(x).where(x < 0.0, -0.5 * x**2 - np.log(2.0), 0.0)


def _window(largest: Array, smallest: Array, growth: Array) -> Array:
    """An upper bound of `log |Phi(x + i y)|` for smallest <= x <= largest, growth = y^2/2."""
    xp = namespace(largest, smallest, growth)
    return xp.minimum(growth + _log_tail_above(largest), softplus(growth + _log_tail_above(-smallest)))


def _windows(sigma: Array, low: Array, high: Array, alpha: Array, u: Array) -> tuple[Array, Array]:
    """Upper bounds of the logarithm of both windows' moduli at a height, cell by cell: (bulk, jump)."""
    far, near = (0.5 * (alpha / blur) ** 2 for blur in (high_blur(sigma), low_blur(sigma)))
    far, near = far[..., None], near[..., None]
    beyond = (high[..., None] - u) / high_blur(sigma)[..., None]
    below = (low[..., None] - u) / low_blur(sigma)[..., None]
    base = _window(beyond[..., :-1], beyond[..., 1:], far)
    bulk = base + _window(below[..., :-1], below[..., 1:], near)
    jump = base + _window(-below[..., 1:], -below[..., :-1], near)
    return bulk, jump


def _gaussian(u: Array) -> Array:
    """log of phi times the width at its largest in every cell."""
    xp = namespace(u)
    left, right = u[..., :-1], u[..., 1:]
    nearest = xp.minimum(xp.abs(left), xp.abs(right)) * (left * right > 0)
    return xp.log(right - left) - 0.5 * nearest**2 - 0.5 * np.log(2.0 * np.pi)


def cell_bounds(
    sigma: Array, q: Array, sign: Array, low: Array, high: Array, c: Array, alpha: Array, edges: tuple[Array, Array]
) -> tuple[Array, Array, Array, Array]:
    """Upper bounds on a line at height alpha, cell by cell: (log bulk, log jump, least and largest argument)."""
    u, loss = edges
    xp = namespace(u, loss, c, alpha)
    angle, width, power = (alpha / sigma)[..., None], sigma[..., None], c[..., None] + 1.0
    exponent = xp.minimum(u / width - 0.5 / width**2, 600.0)
    odds = xp.exp((xp.log(q) - log1p(-q))[..., None] + exponent)
    shrink = 1.0 - 4.0 * odds / (1.0 + odds) ** 2 * xp.sin(0.5 * angle) ** 2
    modulus = loss + 0.5 * xp.log(xp.maximum(shrink, 1e-300))
    turn = xp.arctan2(odds * xp.sin(angle), 1.0 + odds * xp.cos(angle))
    # what rounding can add to the exponents
    edge = xp.maximum(xp.abs(u[..., 0]), xp.abs(u[..., -1]))
    off = (4.0 * ROUNDOFF * (edge / sigma + 0.5 / sigma**2 + 1.0))[..., None]
    blurred = power * (odds / (1.0 + odds) * off + 4.0 * certificate.LOG_MIX_UNITS * ROUNDOFF * xp.abs(loss))
    modulus, turn, blurred = keep_apart(xp, (modulus, turn, blurred))  # both ends of a cell read them
    # the modulus is monotone in u for angles up to pi/2; beyond, mix cos(v/2) <= |mix| <= mix
    steep = angle > 0.5 * xp.pi
    highest = xp.where(steep, loss[..., 1:], modulus[..., 1:])
    lowest = xp.where(steep, loss[..., :-1] + xp.log(xp.cos(0.5 * angle)), modulus[..., :-1])
    grown = xp.where((sign > 0)[..., None], power * highest, -c[..., None] * lowest)
    grown = grown + (xp.maximum(blurred[..., :-1], blurred[..., 1:]) + _gaussian(u)) + (0.5 * alpha**2)[..., None]
    bulk, jump = _windows(sigma, low, high, alpha, u)
    return grown + bulk, grown + jump, turn[..., :-1] * (1.0 - 8.0 * off), turn[..., 1:] * (1.0 + 8.0 * off)


def side_bounds(
    sigma: Array, q: Array, sign: Array, low: Array, high: Array, c: Array, alpha: Array, nodes: Grid
) -> Array:
    """Upper bounds (2, 2) of the logarithm of (bulk, jump) densities at the two ends, at every height up to alpha."""
    # they lie up to half a step outside, where the density, falling outwards, is at most that at the last nodes
    xp = namespace(nodes.u, c, alpha)
    u, loss, posterior = (x[..., [0, -1]] for x in (nodes.u, nodes.loss, nodes.posterior))
    shrink = 0.5 * log1p(-4.0 * posterior * (1.0 - posterior) * xp.sin(0.5 * alpha / sigma)[..., None] ** 2)
    at = c[..., None]
    grown = xp.where((sign > 0)[..., None], (at + 1.0) * loss, -at * (loss + shrink))

    def window(x: Array, width: Array) -> Array:
        growth = (0.5 * (alpha / width) ** 2)[..., None]
        return xp.where(x > 0, softplus(growth + _log_tail_above(-x)), growth + _log_tail_above(x))

    base = grown - 0.5 * u**2 + (0.5 * alpha**2)[..., None] - 0.5 * np.log(2.0 * np.pi)
    base = base + window((high[..., None] - u) / high_blur(sigma)[..., None], high_blur(sigma))
    place = (low[..., None] - u) / low_blur(sigma)[..., None]
    return xp.stack([base + window(place, low_blur(sigma)), base + window(-place, low_blur(sigma))], axis=-2)


def log_sum(x: Array) -> Array:
    """log of the sum of e^x over the last axis."""
    xp = namespace(x)
    top = xp.max(x, axis=-1)
    return top + xp.log(xp.sum(xp.exp(x - top[..., None]), axis=-1))


def cell_edges(sigma: Array, q: Array, nodes: Grid) -> tuple[Array, Array]:
    """Cell ends, from half a step or more outside the grid on either side, and log mix there."""
    xp = namespace(nodes.u)
    outside = stack(xp, [nodes.u[..., 0] - nodes.step, nodes.u[..., -1] + nodes.gap[..., -1]])
    loss, _ = log_mix(sigma[..., None], q[..., None], outside)
    join = lambda ends, inner: xp.concatenate([ends[..., :1], inner, ends[..., 1:]], axis=-1)
    return keep_apart(xp, (join(outside, nodes.u), join(loss, nodes.loss)))


def tails(sigma: Array, sign: Array, c: Array, nodes: Grid, parts: TiltedParts) -> Array:
    """Mass of the tilted integrand beyond the ends of the grid, relative to each part."""
    xp = namespace(nodes.u, c)
    inner = xp.abs(nodes.u[..., 0])
    slope = xp.where(sign > 0, 0.0, c * nodes.posterior[..., 0] / sigma)
    outside = xp.where(slope < inner - 0.5, 1.0 / xp.maximum(inner - slope, 0.5), USELESS)
    # beyond the right end mix^-c phi falls ever faster; in the remove direction the law ends there
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
    """The smallest of the errors at some heights of the line, if the grid can see the law at all.

    `error` takes heights with an axis in front of all batch axes, which are those of `like`.
    """
    xp = namespace(nodes.step, like)
    widest = xp.minimum(STRIP_SHARE * xp.pi * sigma, TALLEST_LINE)
    lowest = xp.minimum(4.0 * high_blur(sigma) ** 2 / nodes.step, 0.9 * widest)
    heights = lowest * (widest / lowest) ** in_front(exponents, like.ndim)
    errors = ROUNDED_UP * xp.min(error(heights), axis=0)
    seen = (sigma > LEAST_SIGMA_PER_STEP * nodes.step) & (sigma > LEAST_SIGMA)
    return xp.where(seen[..., None], xp.minimum(errors, USELESS), USELESS)


def _climbed(
    sigma: Array,
    q: Array,
    sign: Array,
    low: Array,
    high: Array,
    c: Array,
    alpha: Array,
    nodes: Grid,
    own: Array,
    turning: Array | float,
) -> Array:
    """What the sides of the path cost, relative to each part; `turning` is the phase per unit of height."""
    xp = namespace(nodes.u, c, alpha)
    climb = in_front(np.arange(1.0, STAIRS + 1.0) / STAIRS, alpha.ndim)
    decay = 2.0 * xp.pi * alpha / nodes.step
    # up a side, the integrand grows and the kernel falls: each stair by its worse ends
    rise = side_bounds(sigma, q, sign, low, high, c, climb * alpha, nodes)
    turned = turning * alpha - decay * (climb - climb[0])
    exponent = rise + turned[..., None, None] - own[..., None]
    return SIDES_FACTOR * xp.max(xp.sum(xp.exp(exponent), axis=-1), axis=0)


def step_errors(
    sigma: Array,
    q: Array,
    sign: Array,
    low: Array,
    high: Array,
    c: Array,
    nodes: Grid,
    parts: TiltedParts,
    t_max: Array,
) -> Array:
    """Trapezoid error of (A, B)(c + it), relative to (A, B)(c), for every |t| <= t_max, ends included.

    The line of integration is moved to height alpha in u.  There `Im v = alpha + warp arg mix`, so that the warp
    pays for the phase `t arg mix`.
    """
    xp = namespace(nodes.u, c, t_max)
    edges = cell_edges(sigma, q, nodes)
    own = stack(xp, [parts.log_bulk, parts.log_jump])
    excess = t_max - 2.0 * xp.pi * nodes.warp / nodes.step

    def error(alpha: Array) -> Array:
        bulk, jump, turn_l, turn_r = cell_bounds(sigma, q, sign, low, high, c, alpha, edges)
        phase = excess[..., None] * xp.where((excess > 0)[..., None], turn_r, turn_l)
        decay = (2.0 * xp.pi * alpha / nodes.step)[..., None]
        moved = stack(xp, [log_sum(bulk + phase), log_sum(jump + phase)]) - own
        turning = xp.maximum(excess, 0.0) / sigma  # arg mix <= alpha/sigma
        sides = _climbed(sigma, q, sign, low, high, c, alpha, nodes, own, turning)
        return 2.0 * xp.exp(moved - decay) / (-xp.expm1(-decay)) + sides

    return _least(sigma, own[..., 0], nodes, error, SHIFT_EXPONENTS) + tails(sigma, sign, c, nodes, parts)


def axis_errors(
    sigma: Array, q: Array, sign: Array, low: Array, high: Array, c: Array, nodes: Grid, parts: TiltedParts
) -> Array:
    """The same for t = 0 on an even grid, from `mix cos(v/2) <= |mix(x + i sigma v)| <= mix` at every height."""
    xp = namespace(nodes.u, c)
    u, loss = cell_edges(sigma, q, nodes)
    own = stack(xp, [parts.log_bulk, parts.log_jump])
    removing, at = sign > 0, c[..., None]
    flat = xp.where(removing[..., None], (at + 1.0) * loss[..., 1:], -at * loss[..., :-1]) + _gaussian(u)
    flat = keep_apart(xp, flat)

    def error(alpha: Array) -> Array:
        bulk, jump = _windows(sigma, low, high, alpha, u)
        shrink = xp.where(removing, 0.0, -c * xp.log(xp.cos(0.5 * alpha / sigma)))
        decay = (2.0 * xp.pi * alpha / nodes.step)[..., None]
        moved = stack(xp, [log_sum(flat + bulk), log_sum(flat + jump)]) + (0.5 * alpha**2 + shrink)[..., None] - own
        sides = _climbed(sigma, q, sign, low, high, c, alpha, nodes, own, 0.0)
        return 2.0 * xp.exp(moved - decay) / (-xp.expm1(-decay)) + sides

    return _least(sigma, own[..., 0], nodes, error, AXIS_SHIFT_EXPONENTS) + tails(sigma, sign, c, nodes, parts)
