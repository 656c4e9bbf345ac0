"""Rigorous bounds of the quadrature and rounding errors of the split contour (kernels/README.md, section 6).

For the two parts `A` and `B` of parts.py, each relative to its own value on the real axis.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from jaxacct.floats import ROUNDOFF
from jaxacct.kernels import certificate
from jaxacct.kernels.arrays import Array
from jaxacct.kernels.law import log_mix
from jaxacct.kernels.rounding import sum_depth
from jaxacct.kernels.special import log1p
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
LARGEST_DOUBT = 0.1
"""Error of the logarithm of a weight from which on the first order says nothing, and nothing is certified."""


def _log_tail_above(x: Array) -> Array:
    """An upper bound of log Phi(x)."""
    return jnp.where(x < 0.0, -0.5 * x**2 - jnp.log(2.0), 0.0)


def _window(largest: Array, smallest: Array, growth: Array) -> Array:
    """An upper bound of `log |Phi(x + i y)|` for smallest <= x <= largest, growth = y^2/2."""
    return jnp.minimum(growth + _log_tail_above(largest), jnp.logaddexp(0.0, growth + _log_tail_above(-smallest)))


def _windows(sigma: Array, low: Array, high: Array, alpha: Array, u: Array) -> tuple[Array, Array]:
    """Upper bounds of the logarithm of both windows' moduli at a height, cell by cell: (bulk, jump)."""
    left, right = u[:-1], u[1:]
    far = 0.5 * (alpha / high_blur(sigma)) ** 2
    near = 0.5 * (alpha / low_blur(sigma)) ** 2
    base = _window((high - left) / high_blur(sigma), (high - right) / high_blur(sigma), far)
    bulk = base + _window((low - left) / low_blur(sigma), (low - right) / low_blur(sigma), near)
    jump = base + _window((right - low) / low_blur(sigma), (left - low) / low_blur(sigma), near)
    return bulk, jump


def _gaussian(u: Array) -> Array:
    """log of phi times the width at its largest in every cell."""
    left, right = u[:-1], u[1:]
    nearest = jnp.minimum(jnp.abs(left), jnp.abs(right)) * (left * right > 0)
    return jnp.log(right - left) - 0.5 * nearest**2 - 0.5 * jnp.log(2.0 * jnp.pi)


def cell_bounds(
    sigma: Array, q: Array, sign: Array, low: Array, high: Array, c: Array, alpha: Array, edges: tuple[Array, Array]
) -> tuple[Array, Array, Array, Array]:
    """Upper bounds on a line at height alpha, cell by cell: (log bulk, log jump, least and largest argument)."""
    u, loss = edges
    angle = alpha / sigma
    odds = jnp.exp(jnp.log(q) - log1p(-q) + jnp.minimum(u / sigma - 0.5 / sigma**2, 600.0))
    shrink = 1.0 - 4.0 * odds / (1.0 + odds) ** 2 * jnp.sin(0.5 * angle) ** 2
    modulus = loss + 0.5 * jnp.log(jnp.maximum(shrink, 1e-300))
    turn = jnp.arctan2(odds * jnp.sin(angle), 1.0 + odds * jnp.cos(angle))
    # what rounding can add to the exponents
    off = 4.0 * ROUNDOFF * (jnp.maximum(jnp.abs(u[0]), jnp.abs(u[-1])) / sigma + 0.5 / sigma**2 + 1.0)
    blurred = (c + 1.0) * (odds / (1.0 + odds) * off + 4.0 * certificate.LOG_MIX_UNITS * ROUNDOFF * jnp.abs(loss))
    modulus, turn, blurred = lax.optimization_barrier((modulus, turn, blurred))  # both ends of a cell read them
    # the modulus is monotone in u for angles up to pi/2; beyond, mix cos(v/2) <= |mix| <= mix
    steep = angle > 0.5 * jnp.pi
    highest = jnp.where(steep, loss[1:], modulus[1:])
    lowest = jnp.where(steep, loss[:-1] + jnp.log(jnp.cos(0.5 * angle)), modulus[:-1])
    grown = jnp.where(sign > 0, (c + 1.0) * highest, -c * lowest) + jnp.maximum(blurred[:-1], blurred[1:])
    grown = grown + 0.5 * alpha**2 + _gaussian(u)
    bulk, jump = _windows(sigma, low, high, alpha, u)
    return grown + bulk, grown + jump, turn[:-1] * (1.0 - 8.0 * off), turn[1:] * (1.0 + 8.0 * off)


def side_bounds(
    sigma: Array, q: Array, sign: Array, low: Array, high: Array, c: Array, alpha: Array, nodes: Grid
) -> Array:
    """Upper bounds (2, 2) of the logarithm of (bulk, jump) densities at the two ends, at every height up to alpha."""
    # they lie up to half a step outside, where the density, falling outwards, is at most that at the last nodes
    u = jnp.stack([nodes.u[0], nodes.u[-1]])
    loss, posterior = log_mix(sigma, q, u)
    shrink = 0.5 * log1p(-4.0 * posterior * (1.0 - posterior) * jnp.sin(0.5 * alpha / sigma) ** 2)
    grown = jnp.where(sign > 0, (c + 1.0) * loss, -c * (loss + shrink))

    def window(x: Array, width: Array) -> Array:
        growth = 0.5 * (alpha / width) ** 2
        return jnp.where(x > 0, jnp.logaddexp(0.0, growth + _log_tail_above(-x)), growth + _log_tail_above(x))

    base = grown - 0.5 * u**2 + 0.5 * alpha**2 - 0.5 * jnp.log(2.0 * jnp.pi)
    base = base + window((high - u) / high_blur(sigma), high_blur(sigma))
    place = (low - u) / low_blur(sigma)
    return jnp.stack([base + window(place, low_blur(sigma)), base + window(-place, low_blur(sigma))])


def log_sum(x: Array) -> Array:
    top = jnp.max(x)
    return top + jnp.log(jnp.sum(jnp.exp(x - top)))


def cell_edges(sigma: Array, q: Array, nodes: Grid) -> tuple[Array, Array]:
    """Cell ends, from half a step or more outside the grid on either side, and log mix there."""
    outside = jnp.stack([nodes.u[0] - nodes.step, nodes.u[-1] + nodes.gap[-1]])
    loss, _ = log_mix(sigma, q, outside)
    join = lambda ends, inner: jnp.concatenate([ends[:1], inner, ends[1:]])
    return lax.optimization_barrier((join(outside, nodes.u), join(loss, nodes.loss)))


def tails(sigma: Array, sign: Array, c: Array, nodes: Grid, parts: TiltedParts) -> Array:
    """Mass of the tilted integrand beyond the ends of the grid, relative to each part."""
    inner = jnp.abs(nodes.u[0])
    slope = jnp.where(sign > 0, 0.0, c * nodes.posterior[0] / sigma)
    outside = jnp.where(slope < inner - 0.5, 1.0 / jnp.maximum(inner - slope, 0.5), USELESS)
    # beyond the right end mix^-c phi falls ever faster; in the remove direction the law ends there
    steep = nodes.u[-1] + c * nodes.posterior[-1] / sigma
    after = jnp.where(sign > 0, 0.0, jnp.where(steep > 0.5, 2.0, USELESS))

    def error(weight: Array) -> Array:
        density = weight / nodes.gap
        falling = (weight[0] <= weight[1]) & (weight[-1] <= weight[-2])
        return jnp.where(falling, density[0] * outside + density[-1] * after, USELESS)

    return jnp.stack([error(parts.bulk), error(parts.jump)])


def _heights(sigma: Array, nodes: Grid, exponents: tuple[float, ...]) -> Array:
    widest = jnp.minimum(STRIP_SHARE * jnp.pi * sigma, TALLEST_LINE)
    lowest = jnp.minimum(4.0 * high_blur(sigma) ** 2 / nodes.step, 0.9 * widest)
    return lowest * (widest / lowest) ** jnp.array(exponents)


def _least(sigma: Array, nodes: Grid, error: Callable[[Array], Array], exponents: tuple[float, ...]) -> Array:
    """The smallest of the errors at some heights of the line, if the grid can see the law at all."""
    errors = ROUNDED_UP * jnp.min(jax.vmap(error)(_heights(sigma, nodes, exponents)), axis=0)
    seen = (sigma > LEAST_SIGMA_PER_STEP * nodes.step) & (sigma > LEAST_SIGMA)
    return jnp.where(seen, jnp.minimum(errors, USELESS), USELESS)


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
    turning: Array,
) -> Array:
    """What the sides of the path cost, relative to each part; `turning` is the phase per unit of height."""
    climb = jnp.arange(1.0, STAIRS + 1.0) / STAIRS
    decay = 2.0 * jnp.pi * alpha / nodes.step
    # up a side, the integrand grows and the kernel falls: each stair by its worse ends
    rise = jax.vmap(lambda f: side_bounds(sigma, q, sign, low, high, c, f * alpha, nodes))(climb)
    turned = turning * alpha - decay * (climb - climb[0])
    return SIDES_FACTOR * jnp.max(jnp.sum(jnp.exp(rise + turned[:, None, None] - own[:, None]), axis=2), axis=0)


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
    edges = cell_edges(sigma, q, nodes)
    own = jnp.stack([parts.log_bulk, parts.log_jump])
    excess = t_max - 2.0 * jnp.pi * nodes.warp / nodes.step

    def error(alpha: Array) -> Array:
        bulk, jump, turn_l, turn_r = cell_bounds(sigma, q, sign, low, high, c, alpha, edges)
        phase = excess * jnp.where(excess > 0, turn_r, turn_l)
        decay = 2.0 * jnp.pi * alpha / nodes.step
        moved = jnp.stack([log_sum(bulk + phase), log_sum(jump + phase)]) - own
        turning = jnp.maximum(excess, 0.0) / sigma  # arg mix <= alpha/sigma
        sides = _climbed(sigma, q, sign, low, high, c, alpha, nodes, own, turning)
        return 2.0 * jnp.exp(moved - decay) / (-jnp.expm1(-decay)) + sides

    return _least(sigma, nodes, error, SHIFT_EXPONENTS) + tails(sigma, sign, c, nodes, parts)


def axis_errors(
    sigma: Array, q: Array, sign: Array, low: Array, high: Array, c: Array, nodes: Grid, parts: TiltedParts
) -> Array:
    """The same for t = 0 on an even grid, from `mix cos(v/2) <= |mix(x + i sigma v)| <= mix` at every height."""
    u, loss = cell_edges(sigma, q, nodes)
    own = jnp.stack([parts.log_bulk, parts.log_jump])
    flat = lax.optimization_barrier(jnp.where(sign > 0, (c + 1.0) * loss[1:], -c * loss[:-1]) + _gaussian(u))

    def error(alpha: Array) -> Array:
        bulk, jump = _windows(sigma, low, high, alpha, u)
        shrink = jnp.where(sign > 0, 0.0, -c * jnp.log(jnp.cos(0.5 * alpha / sigma)))
        decay = 2.0 * jnp.pi * alpha / nodes.step
        moved = jnp.stack([log_sum(flat + bulk), log_sum(flat + jump)]) + 0.5 * alpha**2 + shrink - own
        sides = _climbed(sigma, q, sign, low, high, c, alpha, nodes, own, 0.0)
        return 2.0 * jnp.exp(moved - decay) / (-jnp.expm1(-decay)) + sides

    return _least(sigma, nodes, error, AXIS_SHIFT_EXPONENTS) + tails(sigma, sign, c, nodes, parts)


def _window_rounding(distance: Array, blur: Array) -> tuple[Array, Array]:
    """(units of rounding of log w, its derivative in u) at a distance inside the window."""
    x = jnp.clip(distance / blur, -40.0, 9.0)
    return 20.0 + 6.0 * jnp.minimum(x, 0.0) ** 2, jnp.where(x < 8.5, jnp.maximum(-x, 0.0) + 1.0, 0.0) / blur


def rounding_errors(
    sigma: Array,
    q: Array,
    c: Array,
    nodes: Grid,
    weight: Array,
    log_part: Array,
    t_max: Array,
    depth: float,
    low: Array,
    high: Array,
    side: float,
) -> Array:
    """(rate, ceiling, weight) as in certificate.py, with the nodes' own errors and the windows'.

    side is 1 for the bulk part and -1 for the jumps.
    """
    z, size = jnp.abs(c) + 1.0, jnp.abs(nodes.loss)
    slope = nodes.posterior / sigma
    edge = jnp.maximum(jnp.abs(nodes.u[0]), jnp.abs(nodes.u[-1]))
    in_y = 4.0 * (jnp.abs(nodes.u) / sigma + 0.5 / sigma**2)
    through_y = nodes.posterior * (in_y - 3.0 * jnp.log(q))
    growth = nodes.step / nodes.gap
    # of a node's place, and of its gap by the posterior
    node = (
        nodes.slack / ROUNDOFF
        + (4.0 * edge + nodes.warp * ((certificate.LOG_MIX_UNITS + 6.0) * size + through_y)) / growth
    )
    near, near_slope = _window_rounding(side * (low - nodes.u), low_blur(sigma))
    far, far_slope = _window_rounding(high - nodes.u, high_blur(sigma))
    steepness = jnp.abs(nodes.u) + z * slope + near_slope + far_slope + 1.0 / sigma
    own = (
        32.0
        + jnp.abs(log_part)
        + (certificate.LOG_MIX_UNITS + 2.0) * z * size
        + 2.0 * nodes.u**2
        + z * through_y
        + in_y
    )
    own = own + near + far + node * steepness
    doubt = ROUNDOFF * jnp.max(jnp.where(weight > 0.0, own, 0.0))
    rotated = own + depth
    turned = (certificate.LOG_MIX_UNITS + 12.0) * size + through_y + node * slope
    common = sum_depth(nodes.u.size) + 40.0 + 8.0 * jnp.abs(log_part)
    bounds = jnp.stack([size * rotated + turned, 2.0 * rotated + t_max * turned, own + common])
    return jnp.where(doubt < LARGEST_DOUBT, ROUNDOFF * (1.0 + 2.0 * doubt) * (bounds @ weight), USELESS)
