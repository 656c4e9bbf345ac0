"""How fast the characteristic function of a tilted loss decays: a bound by level sets (README.md, section 2).

The terms of the t-sum that are cut off are bounded by it.
"""

import jax
import jax.numpy as jnp
from jax import lax

from jaxacct.floats import ROUNDOFF
from jaxacct.kernels.arrays import Array
from jaxacct.kernels.certificate import per_term
from jaxacct.kernels.law import Tilted

LEVELS = 20
"""Heights of level sets about each mode; more would narrow the bound by little."""
LOWEST_LEVEL = 5.5
"""The lowest of them, as deviations of a normal density from its mode: 15 nats below it."""
LEVEL_DOUBT_NATS = 16.0
"""Nats below a mode within which rounding may matter to its level sets."""
LARGEST_HEIGHT_ERROR = 2.5e-4
"""Relative error of a height beyond which nothing is claimed; ROUNDED_DOWN allows for it."""
ROUNDED_DOWN = 0.999
"""What rounding leaves of the level sets' masses at least."""
FIRST_SIDE_LOBE = 0.217235
"""The supremum of |sin y / y| beyond its first zero, rounded up."""


def level_sets(sigma: Array, q: Array, t: Tilted) -> tuple[Array, Array]:
    """Level sets of the tilted density f of the loss: (heights of slabs, lengths that they at least have).

    f is a stack of level sets, and a level set that contains an interval of length lambda contributes a
    uniform law: `|phi(t)| <= 1 - int lambda(y) (1 - s(t lambda(y)/2)) dy`, where `s(y) = sup_{y' >= y}
    |sin y'/y'|` is decreasing, so that one t bounds all larger ones.  Two intervals are used, around the highest
    mode and, above the valley between, around the next.  Their lengths are bounded from inside between grid
    points and the integral by its lower Riemann sum.
    """
    size = t.u.size
    log_f = jnp.log(t.weight) - jnp.log(t.step) - jnp.log(t.posterior) + jnp.log(sigma)
    log_f = jnp.where(t.weight > 0.0, log_f, -jnp.inf)
    units = per_term(sigma, q, t)
    log_f, off = lax.optimization_barrier((log_f, ROUNDOFF * (units.loss + 4.0 * jnp.abs(t.loss))))
    # log f is concave up to this much convexity; a chord then over-estimates it by at most `sag`
    convexity = -1.0 + (jnp.abs(t.power) + 1.0) / (4.0 * sigma**2)
    sag = jnp.maximum(convexity, 0.0) * t.step**2 / 8.0
    index = jnp.arange(size)
    peak = jnp.argmax(log_f)
    valley_right = lax.cummin(jnp.where(index < peak, jnp.inf, log_f))
    valley_left = lax.cummin(jnp.where(index > peak, jnp.inf, log_f), reverse=True)
    valley = jnp.where(index >= peak, valley_right, valley_left)
    rising = log_f > valley
    other = jnp.where(jnp.any(rising), jnp.argmax(jnp.where(rising, log_f, -jnp.inf)), peak)
    # without a second mode its floor is its top, and its slabs are empty
    floors = jnp.stack([-jnp.inf, jnp.minimum(valley[other], log_f[other])])

    def length(mode: Array, level: Array) -> Array:
        outside = log_f < level
        right = jnp.min(jnp.where(outside & (index > mode), index, size))
        left = jnp.max(jnp.where(outside & (index < mode), index, -1))
        inner_r, inner_l = right - 1, left + 1
        outer_r, outer_l = jnp.minimum(right, size - 1), jnp.maximum(left, 0)
        slope_r = log_f[inner_r] - log_f[outer_r]
        slope_l = log_f[inner_l] - log_f[outer_l]
        part_r = jnp.where(slope_r > 0, (log_f[inner_r] - level) / jnp.where(slope_r > 0, slope_r, 1.0), 0.0)
        part_l = jnp.where(slope_l > 0, (log_f[inner_l] - level) / jnp.where(slope_l > 0, slope_l, 1.0), 0.0)
        # the loss is convex in u: tangent below on the right, chord above on the left
        end_r = t.loss[inner_r] + part_r * t.step * t.posterior[inner_r] / sigma
        end_l = t.loss[inner_l] + part_l * (t.loss[outer_l] - t.loss[inner_l])
        # either end moves with the rounding of the two losses that it is made from
        moved = 2.0 * (off[inner_r] + off[inner_l] + off[outer_l])
        return jnp.maximum(end_r - end_l - moved, 0.0)

    def stack(mode: Array, floor: Array) -> tuple[Array, Array]:
        levels = jnp.maximum(log_f[mode] - jnp.linspace(0.0, LOWEST_LEVEL, LEVELS) ** 2 / 2.0, floor)
        heights = jnp.exp(levels - sag)
        lengths = jax.vmap(length, (None, 0))(mode, levels[:-1])
        return heights[:-1] - heights[1:], lengths

    slabs, lengths = jax.vmap(stack)(jnp.stack([peak, other]), floors)
    # heights are off by a part in 2,000 at most, which ROUNDED_DOWN allows for, or prove nothing
    inside = log_f > jnp.min(log_f[jnp.stack([peak, other])]) - LEVEL_DOUBT_NATS
    doubt = ROUNDOFF * jnp.max(jnp.where(inside, units.weight + 16.0 * (1.0 + jnp.abs(log_f)), 0.0)) + 3.0 * units.y
    return jnp.where(doubt < LARGEST_HEIGHT_ERROR, slabs, 0.0).ravel(), lengths.ravel()


def gaussian_decay(slabs: Array, lengths: Array, frequency: Array) -> Array:
    """A lower bound of `1 - |M(c + it)|/M(c)` that holds for every t >= frequency."""
    lost = jnp.sum(slabs * lengths * (1.0 - sinc_envelope(0.5 * frequency * lengths)))
    # 1 - s(y) is off by 16 units of 1 at most, and all masses together are at most 1
    return jnp.maximum(ROUNDED_DOWN * lost - 20.0 * ROUNDOFF, 0.0)


def sinc_envelope(y: Array) -> Array:
    """An upper bound of `sup_{y' >= y} |sin y' / y'|`, decreasing in y: the Taylor polynomial bounds from above."""
    s = jnp.minimum(y, 3.0) ** 2
    central = 1.0 - s / 6.0 * (1.0 - s / 20.0 * (1.0 - s / 42.0 * (1.0 - s / 72.0)))
    return jnp.where(
        y < 3.0, jnp.maximum(central, FIRST_SIDE_LOBE), jnp.minimum(FIRST_SIDE_LOBE, 1.0 / jnp.maximum(y, 1.0))
    )
