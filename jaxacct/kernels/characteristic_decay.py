"""How fast the characteristic function of a tilted loss decays: a bound by level sets (README.md, section 2).

The terms of the t-sum that are cut off are bounded by it.
"""

from jaxacct.core.floats import ROUNDOFF
from jaxacct.kernels.arrays import Array, cummin, flat, keep_apart, namespace, pick, stack
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
    points and the integral by its lower Riemann sum.  Both results have shape (2 (LEVELS - 1),).
    """
    xp, size = namespace(t.u), t.u.shape[-1]
    log_f = xp.log(t.weight) - xp.log(t.step)[..., None] - xp.log(t.posterior) + xp.log(sigma)[..., None]
    log_f = xp.where(t.weight > 0.0, log_f, -xp.inf)
    units = per_term(sigma, q, t)
    log_f, off = keep_apart(xp, (log_f, ROUNDOFF * (units.loss + 4.0 * xp.abs(t.loss))))
    # log f is concave up to this much convexity; a chord then over-estimates it by at most `sag`
    convexity = -1.0 + (xp.abs(t.power) + 1.0) / (4.0 * sigma**2)
    sag = xp.maximum(convexity, 0.0) * t.step**2 / 8.0
    index = xp.arange(size)
    peak = xp.argmax(log_f, axis=-1)
    valley_right = cummin(xp, xp.where(index < peak[..., None], xp.inf, log_f))
    valley_left = cummin(xp, xp.where(index > peak[..., None], xp.inf, log_f), reverse=True)
    valley = xp.where(index >= peak[..., None], valley_right, valley_left)
    rising = log_f > valley
    other = xp.where(xp.any(rising, axis=-1), xp.argmax(xp.where(rising, log_f, -xp.inf), axis=-1), peak)
    modes = stack(xp, [peak, other])
    tops = xp.take_along_axis(log_f, modes, axis=-1)
    # without a second mode its floor is its top, and its slabs are empty
    floor = xp.minimum(pick(xp, valley, other), tops[..., 1])
    floors = stack(xp, [xp.full_like(floor, -xp.inf), floor])
    levels = xp.maximum(tops[..., None] - xp.linspace(0.0, LOWEST_LEVEL, LEVELS) ** 2 / 2.0, floors[..., None])
    heights = xp.exp(levels - sag[..., None, None])
    slabs = flat(xp, heights[..., :-1] - heights[..., 1:])
    lengths = _lengths(sigma, t, log_f, off, xp.repeat(modes, LEVELS - 1, axis=-1), flat(xp, levels[..., :-1]))
    # heights are off by a part in 2,000 at most, which ROUNDED_DOWN allows for, or prove nothing
    inside = log_f > xp.min(tops, axis=-1)[..., None] - LEVEL_DOUBT_NATS
    doubt = xp.max(xp.where(inside, units.weight + 16.0 * (1.0 + xp.abs(log_f)), 0.0), axis=-1)
    doubt = ROUNDOFF * doubt + 3.0 * units.y
    return xp.where((doubt < LARGEST_HEIGHT_ERROR)[..., None], slabs, 0.0), lengths


def _lengths(sigma: Array, t: Tilted, log_f: Array, off: Array, modes: Array, levels: Array) -> Array:
    """The lengths, in the loss, of the level sets about modes at levels; modes and levels: (M,)."""
    xp, size = namespace(log_f), log_f.shape[-1]
    index = xp.arange(size)
    outside = log_f[..., None, :] < levels[..., None]
    mode = modes[..., None]
    right = xp.min(xp.where(outside & (index > mode), index, size), axis=-1)
    left = xp.max(xp.where(outside & (index < mode), index, -1), axis=-1)
    inner_r, inner_l = right - 1, left + 1
    outer_r, outer_l = xp.minimum(right, size - 1), xp.maximum(left, 0)

    def at(values: Array, places: Array) -> Array:
        return xp.take_along_axis(values, places, axis=-1)

    f_r, f_l, loss_l = at(log_f, inner_r), at(log_f, inner_l), at(t.loss, inner_l)
    slope_r, slope_l = f_r - at(log_f, outer_r), f_l - at(log_f, outer_l)
    part_r = xp.where(slope_r > 0, (f_r - levels) / xp.where(slope_r > 0, slope_r, 1.0), 0.0)
    part_l = xp.where(slope_l > 0, (f_l - levels) / xp.where(slope_l > 0, slope_l, 1.0), 0.0)
    # the loss is convex in u: tangent below on the right, chord above on the left
    end_r = at(t.loss, inner_r) + part_r * t.step[..., None] * at(t.posterior, inner_r) / sigma[..., None]
    end_l = loss_l + part_l * (at(t.loss, outer_l) - loss_l)
    # either end moves with the rounding of the two losses that it is made from
    moved = 2.0 * (at(off, inner_r) + at(off, inner_l) + at(off, outer_l))
    return xp.maximum(end_r - end_l - moved, 0.0)


def gaussian_decay(slabs: Array, lengths: Array, frequency: Array) -> Array:
    """A lower bound of `1 - |M(c + it)|/M(c)` that holds for every t >= frequency."""
    xp = namespace(lengths, frequency)
    lost = xp.sum(slabs * lengths * (1.0 - sinc_envelope(0.5 * frequency[..., None] * lengths)), axis=-1)
    # 1 - s(y) is off by 16 units of 1 at most, and all masses together are at most 1
    return xp.maximum(ROUNDED_DOWN * lost - 20.0 * ROUNDOFF, 0.0)


def sinc_envelope(y: Array) -> Array:
    """An upper bound of `sup_{y' >= y} |sin y' / y'|`, decreasing in y: the Taylor polynomial bounds from above."""
    xp = namespace(y)
    s = xp.minimum(y, 3.0) ** 2
    central = 1.0 - s / 6.0 * (1.0 - s / 20.0 * (1.0 - s / 42.0 * (1.0 - s / 72.0)))
    return xp.where(
        y < 3.0, xp.maximum(central, FIRST_SIDE_LOBE), xp.minimum(FIRST_SIDE_LOBE, 1.0 / xp.maximum(y, 1.0))
    )
