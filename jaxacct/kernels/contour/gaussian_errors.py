"""Bounds of the errors of sampled Gaussians and other parts on a contour (kernels/README.md, sections 1 to 4).

Each function bounds one source of error.  Most bounds are relative to the tilted mass `M(c)`.  The likelihood ratio of
a sampled Gaussian at u = x/sigma is mix = 1 - q + q e^y, with y = u/sigma - 1/(2 sigma^2).
"""

from functools import partial
from typing import NamedTuple

from jaxacct.core.floats import ROUNDOFF
from jaxacct.kernels.arrays import SMALLEST_NORMAL, Array, cummin, keep_apart, log1p, namespace, pick, stack, sum_depth
from jaxacct.kernels.contour.core import log_kappa
from jaxacct.kernels.law import LossLaw, Tilted, finite_weights, laplace_log_m, log_mix, tilted_gaussian

LEVELS = 20
"""Number of level sets about each mode of a density. More level sets would narrow the bound by little."""
FAST = 0.95
"""The path leaves out a node of negligible weight if the phase may turn there by over FAST * 2 pi in a grid step."""
NEGLIGIBLE = 1e-12
"""Weight up to which a node may be left out of the path."""
ROUNDED_DOWN = 0.999
"""Factor on the masses of level sets. It makes them lower bounds although the heights have errors of up to 2.5e-4."""
FIRST_SIDE_LOBE = 0.217235
"""Largest |sin y / y| for y > pi, which is the first zero of sin y / y. The number is rounded up."""
FINITE_LOSS_ERROR = 1e-26
"""Allowed absolute error of a finite law's loss. 16 roundoffs of the loss are allowed too (mechanisms/README.md)."""
LOG_MIX_UNITS = 18.0
"""Relative error of log mix, in roundoffs, if y is exact in mix = 1 - q + q e^y (kernels/README.md, section 4)."""
TALLEST_LINE = 12.0
"""Largest imaginary part of u on a shifted line of integration."""
LARGEST_DOUBT = 0.1
"""First-order error bounds are used only if the log of every weight is off by less than this."""
ROUNDED_UP = 1.001
"""Factor on an error bound that covers the rounding of the bound itself."""


def _range_error(sigma: Array, q: Array, sign: Array, t: Tilted) -> Array:
    """Bound the tilted mass outside the grid, relative to M(c)."""
    xp = namespace(t.u)
    lo, hi, a = t.u[..., 0], t.u[..., -1], t.power
    second = xp.log(q) + a * (a - 1.0) / (2.0 * sigma**2)
    first = log1p(-q)
    shift, move = a / sigma, -a * q / sigma
    by_jensen = 0.5 * move * (move + 1.0 / sigma)
    # remove: both tails of each of the two Gaussians; add: one bound of the right tail, two bounds of the left tail
    beyond = stack(xp, [hi, -lo, hi - shift, shift - lo, hi, -lo, -lo - move])
    log_size = stack(xp, [first, first, second, second, a * t.loss[..., -1], a * first, by_jensen])
    log_tail = xp.where(beyond > 0, -xp.log(2.0) - 0.5 * beyond**2, 0.0)
    tail = xp.exp(log_size - t.log_m[..., None] + log_tail)
    adding = tail[..., 4] + xp.minimum(tail[..., 5], tail[..., 6])
    return xp.where(sign > 0, xp.sum(tail[..., :4], axis=-1), adding)


class _PathEnd(NamedTuple):
    """Where the path of integration returns to the real axis, and what is left out (kernels/README.md, section 3)."""

    kept: Array  # (X + 1,) whether a cell lies below the path. Cells lie between nodes, and one outside each end
    odds: Array  # () odds at the right side of the path
    feet: Array  # () sum over the path's two sides: mass of the heavier cell beside the foot of the side
    beyond: Array  # () bound of the mass of the nodes left out, and of the integral over their cells


def _path_end(t: Tilted, odds: Array, sigma: Array, t_max: Array) -> _PathEnd:
    """Return where the path ends for |t| <= t_max. `odds` has the odds at all nodes, and a step outside each end."""
    xp = namespace(t.u, t_max)
    index, half_step = xp.arange(t.u.shape[-1]), xp.exp(0.5 * t.step / sigma)
    last_heavy = xp.max(xp.where(t.weight > NEGLIGIBLE, index, 0), axis=-1)
    fast = t.posterior * (half_step * t_max * t.step / sigma)[..., None] > FAST * 2.0 * xp.pi
    fast = fast & (index > last_heavy[..., None])
    last = xp.sum(~fast, axis=-1) - 1
    behind = index - last[..., None]
    mass = xp.exp(t.step**2 / 8.0)[..., None] * t.weight  # a cell between nodes has at most the mass of its heavier end
    return _PathEnd(
        kept=xp.concatenate([xp.ones_like(fast[..., :1]), ~fast], axis=-1),
        odds=pick(xp, odds, last + 1) * half_step,
        feet=mass[..., 0] + xp.max(xp.where((behind == 0) | (behind == 1), mass, 0.0), axis=-1),
        beyond=xp.where(xp.any(fast, axis=-1), 3.0 * xp.sum(xp.where(behind >= 0, mass, 0.0), axis=-1), 0.0),
    )


def _step_error(sigma: Array, q: Array, sign: Array, t: Tilted, t_max: Array) -> Array:
    """Bound the trapezoid error, relative to M(c), for every |t| <= t_max, on the shifted line x + i alpha."""
    xp = namespace(t.u, t_max)
    width = sigma[..., None]
    ends = stack(xp, [t.u[..., 0] - t.step, t.u[..., -1] + t.step])
    end_loss, _ = log_mix(width, q[..., None], ends)
    u = xp.concatenate([ends[..., :1], t.u, ends[..., 1:]], axis=-1)
    loss = xp.concatenate([end_loss[..., :1], t.loss, end_loss[..., 1:]], axis=-1)
    y = u / width - 0.5 / width**2
    # y is cut at 600, so that the odds stay finite. Larger odds would not change the bounds below.
    odds = xp.exp((xp.log(q) - log1p(-q))[..., None] + xp.minimum(y, 600.0))
    nearest = xp.minimum(xp.abs(u[..., :-1]), xp.abs(u[..., 1:])) * (u[..., :-1] * u[..., 1:] > 0)
    # `off` bounds the rounding error of y, and `blurred` the rounding error of `exponent` below
    edge = xp.maximum(xp.abs(u[..., 0]), xp.abs(u[..., -1]))
    off = 4.0 * ROUNDOFF * (edge / sigma + 0.5 / sigma**2 + 1.0)
    z = xp.abs(t.power) + 1.0
    blurred = (
        z[..., None] * (odds / (1.0 + odds) * off[..., None] + 4.0 * LOG_MIX_UNITS * ROUNDOFF * xp.abs(loss))
        + 16.0 * SMALLEST_NORMAL * t_max[..., None]
    )
    end = _path_end(t, odds, sigma, t_max)
    widest = xp.pi * sigma
    steepest = xp.max(t.posterior * (t.weight > NEGLIGIBLE), axis=-1)
    wanted = xp.minimum(2.0 * xp.pi / t.step - t_max * steepest / sigma, 9.5)
    # Three heights of the line are tried, as shares of the height that seems best. Each height gives a valid bound.
    shifts = xp.minimum(widest, wanted)[..., None] * xp.asarray((0.5, 0.8, 0.95))
    alpha = xp.clip(shifts, 1e-3 * widest[..., None], xp.minimum(0.97 * widest, TALLEST_LINE)[..., None])
    # The path returns to the real axis half a step outside the kept nodes, along two sides.
    # |mix(x + i alpha)| and arg mix are monotone in x, so a cell is bounded by the worse of its ends.
    # from here on, the last axis but one is for the heights of the line
    angle = (alpha / width)[..., None]
    odds, loss, small = odds[..., None, :], loss[..., None, :], angle <= 0.5 * xp.pi
    argument = xp.arctan2(odds[..., 1:] * xp.sin(angle), 1.0 + odds[..., 1:] * xp.cos(angle))
    log_modulus = loss + 0.5 * log1p(-4.0 * odds / (1.0 + odds) ** 2 * xp.sin(0.5 * angle) ** 2)
    lowest = xp.where(small, log_modulus, loss + xp.log(xp.cos(0.5 * angle)))
    upper = xp.where(small, log_modulus, loss)[..., 1:]
    grown = t.power[..., None, None] * xp.where((sign > 0)[..., None, None], upper, lowest[..., :-1])
    turned = ((1.0 + 8.0 * off) * t_max)[..., None, None] * argument
    exponent = grown + turned + (xp.maximum(blurred[..., :-1], blurred[..., 1:]) - 0.5 * nearest**2)[..., None, :]
    exponent = xp.where(end.kept[..., None, :], exponent, -xp.inf)
    top = xp.max(exponent, axis=-1)
    step = t.step[..., None]
    whole = top + xp.log(xp.sum(xp.exp(exponent - top[..., None]), axis=-1) * step) - 0.5 * xp.log(2.0 * xp.pi)
    decay = 2.0 * xp.pi * alpha / step
    error = 0.5 * alpha**2 + whole - t.log_m[..., None] + xp.log(2.0) - decay - log1p(-xp.exp(-decay))
    # Along a side the log of the integrand rises by at most a convex function, 0 at the foot and `rise` at the top.
    shrunk = xp.max(xp.where(end.kept[..., None, :], (loss - lowest)[..., 1:], 0.0), axis=-1)
    angle, o = angle[..., 0], end.odds[..., None]
    argument = xp.maximum(o / (1.0 + o) * angle, xp.arctan2(o * xp.sin(angle), 1.0 + o * xp.cos(angle)))
    rise = 0.5 * alpha**2 + xp.maximum(-t.power, 0.0)[..., None] * shrunk - decay
    rise = xp.minimum(rise + ((1.0 + 8.0 * off) * t_max)[..., None] * argument, 600.0)
    side = 2.0 * end.feet[..., None] * alpha / step * xp.where(rise < -1.0, -1.0 / rise, xp.exp(xp.maximum(rise, 0.0)))
    return ROUNDED_UP * (xp.min(xp.exp(error) + side, axis=-1) + end.beyond)


def points_needed(sigma: Array, t: Tilted, t_max: Array) -> Array:
    """Return the number of points that make `_step_error` negligible at t_max."""
    xp = namespace(t.u, t_max)
    turning = t_max * xp.max(t.posterior * (t.weight > NEGLIGIBLE), axis=-1) / sigma
    reach = xp.minimum(9.0, 0.95 * xp.pi * sigma)
    return (t.u[..., -1] - t.u[..., 0]) * (turning + 0.5 * reach + 45.0 / reach) / (2.0 * xp.pi)


class Rounding(NamedTuple):
    """Rounding errors of the X terms of a quadrature sum. Fields are (X,), in units of 2^-53, unless said otherwise."""

    weight: Array  # error of the logarithm of a weight
    loss: Array  # absolute error of the loss
    y: Array  # () largest absolute error of y = u/sigma - 1/(2 sigma^2) over all nodes, not divided by 2^-53
    doubt: Array  # () the larger of the field `y` and the largest error of a weight's logarithm, not divided by 2^-53


def per_term(sigma: Array, q: Array, t: Tilted) -> Rounding:
    """Bound the rounding of every term of the quadrature sum on a grid (kernels/README.md, section 4)."""
    xp = namespace(t.u)
    sigma, q, power = sigma[..., None], q[..., None], t.power[..., None]
    edge = xp.maximum(xp.abs(t.u[..., :1]), xp.abs(t.u[..., -1:]))
    through_y = 4.0 * (xp.abs(t.u) / sigma + 0.5 / sigma**2)
    z, size = xp.abs(power) + 1.0, xp.abs(t.loss)
    y = through_y - 3.0 * xp.log(q)
    placed = 3.0 * edge * xp.abs(power * t.posterior / sigma - t.u)
    own = 20.0 + xp.abs(t.log_m)[..., None]
    weight = own + (LOG_MIX_UNITS + 2.0) * z * size + 2.0 * t.u**2 + placed + z * t.posterior * y
    loss = LOG_MIX_UNITS * size + t.posterior * (y + 3.0 * edge / sigma) + 16.0 * SMALLEST_NORMAL / ROUNDOFF
    largest_y = ROUNDOFF * (xp.max(through_y, axis=-1) + (3.0 * edge / sigma)[..., 0])
    return Rounding(weight, loss, largest_y, xp.maximum(ROUNDOFF * xp.max(weight, axis=-1), largest_y))


def _rounding_errors(sigma: Array, q: Array, t: Tilted, t_max: Array, depth: float) -> tuple[Array, Array, Array]:
    """Return bounds of the rounding errors of r/t, r and log M(c), with r = `M(c+it)/M(c) - 1` and 0 < t <= t_max."""
    xp = namespace(t.u, t_max)
    units = per_term(sigma, q, t)
    size = xp.abs(t.loss)
    # a term of r is a weight times `e^{it loss} - 1`, whose modulus is at most `min(2, t |loss|)`
    rotated = units.weight + depth
    turned = units.loss + 12.0 * size
    # the sums below add errors to first order, and `grown` covers the higher orders
    grown = ROUNDOFF * xp.where(units.doubt < LARGEST_DOUBT, 1.0 + 2.0 * units.doubt, xp.inf)
    own = sum_depth(t.u.shape[-1]) + 40.0 + 8.0 * xp.abs(t.log_m)
    return (
        grown * xp.sum(t.weight * (size * rotated + turned), axis=-1),
        grown * xp.sum(t.weight * (2.0 * rotated + t_max[..., None] * turned), axis=-1),
        grown * (xp.sum(t.weight * units.weight, axis=-1) + own),
    )


def gaussian_errors(
    sigma: Array, q: Array, sign: Array, t: Tilted, t_max: Array, depth: float
) -> tuple[Array, Array, Array, Array]:
    """Return (a, b, m, e). If |t| <= t_max, M(c+it)/M(c) is off by at most a + min(b |t|, m), and log M(c) by e."""
    xp = namespace(t.u, t_max)
    quadrature = ROUNDED_UP * (_range_error(sigma, q, sign, t) + _step_error(sigma, q, sign, t, t_max))
    # The errors of M(c+it) and M(c) are at most `quadrature` times M(c). The next line bounds the quotient's error.
    quadrature = xp.where(quadrature < 0.5, 2.0 * quadrature / (1.0 - xp.minimum(quadrature, 0.5)), xp.inf)
    rate, ceiling, weight = _rounding_errors(sigma, q, t, t_max, depth)
    return quadrature, rate, ceiling, quadrature + weight


def shrinking(sigma: Array, q: Array, end: Array) -> Array:
    """Return s with `|mix(x + i alpha)|^2 >= mix(x)^2 (1 - s sin^2(v/2))` for x <= `end`, v = alpha/sigma."""
    xp = namespace(sigma, q, end)
    log_odds = xp.log(q) - log1p(-q) + end / sigma - 0.5 / sigma**2
    off = 1e-12 + 16.0 * ROUNDOFF * (xp.abs(end) / sigma + 0.5 / sigma**2)
    return xp.where(log_odds < 0.0, xp.minimum((1.0 + off) / xp.cosh(0.5 * log_odds) ** 2, 1.0), 1.0)


def _step_error_on_the_axis(sigma: Array, q: Array, sign: Array, c: Array, end: Array, step: Array) -> Array:
    """Bound how far log M(c) lies above the log of its trapezoid sum (kernels/README.md, section 3)."""
    xp = namespace(end, c)
    share = shrinking(sigma, q, end)
    s = stack(xp, [xp.ones_like(share), xp.ones_like(share), share])
    sigma, step, c, removing = sigma[..., None], step[..., None], c[..., None], (sign > 0)[..., None]
    # For add, log `relative` is about alpha^2/2 + c s v^2/8 - 2 pi alpha/step. `best` is the alpha that minimizes this.
    best = 8.0 * xp.pi * sigma**2 / (step * (c * s + 4.0 * sigma**2))
    # Three lines are tried. On the first two s is 1 and |v| < pi. On the third s is `share` and |v| <= pi/2.
    tallest = xp.minimum(xp.asarray([4.0, 8.0, 8.0]), xp.asarray([0.6, 0.95, 0.5]) * xp.pi * sigma)
    alpha = xp.minimum(tallest, xp.where(xp.asarray([True, False, True]), best, xp.inf))
    shrunk = 0.5 * log1p(-s * xp.sin(0.5 * alpha / sigma) ** 2)
    decay = 2.0 * xp.pi * alpha / step
    relative = 2.0 * xp.exp(0.5 * alpha**2 + xp.where(removing, 0.0, -c * shrunk) - decay) / (-xp.expm1(-decay))
    error = xp.min(relative, axis=-1)
    return xp.where(error < 0.5, -log1p(-xp.minimum(error, 0.5)), xp.inf)


def _log_m_above(sigma: Array, q: Array, sign: Array, c: Array, nodes: int) -> Array:
    """Return an upper bound of log M(c) of one sampled Gaussian: the log of a trapezoid sum plus all error bounds."""
    xp = namespace(sigma, c)
    t = tilted_gaussian(sigma, q, sign, c, nodes)
    edge = xp.maximum(xp.abs(t.u[..., 0]), xp.abs(t.u[..., -1]))
    # Errors of the exponents change log M(c), a log of a sum of exponentials, by at most the largest error (`worst`),
    # and if all are small, by about the mean error (`mean`). `units` gives `worst` from the largest |loss|,
    # u^2 and posterior, and `mean` from their means, both in roundoffs.
    z, through_y = xp.abs(t.power) + 1.0, 4.0 * (edge / sigma + 0.5 / sigma**2) - 3.0 * xp.log(q)

    def units(loss: Array, square: Array, posterior: Array) -> Array:
        placed = 3.0 * edge * (z * posterior / sigma + xp.sqrt(square))
        own = 20.0 + xp.abs(t.log_m) + (LOG_MIX_UNITS + 2.0) * z * loss + 2.0 * square
        return own + placed + z * posterior * through_y

    worst = ROUNDED_UP * units(xp.maximum(xp.abs(t.loss[..., 0]), xp.abs(t.loss[..., -1])), edge**2, 1.0)
    mean = units(*(xp.sum(t.weight * values, axis=-1) for values in (xp.abs(t.loss), t.u**2, t.posterior)))
    doubt = ROUNDOFF * worst
    rounding = xp.where(doubt < LARGEST_DOUBT, (ROUNDED_UP + 2.0 * doubt) * mean, worst)
    rounding = ROUNDOFF * (rounding + sum_depth(nodes) + 40.0 + 8.0 * xp.abs(t.log_m))
    in_step = _step_error_on_the_axis(sigma, q, sign, c, t.u[..., -1] + t.step, t.step)
    above = t.log_m + ROUNDED_UP * in_step + rounding
    # the mass beyond the grid adds at most 2 e^-42 < 1e-17; if |u| > 1e14, float64 cannot tell points of the grid apart
    return xp.where((t.step > 0.0) & (edge < 1e14), above + 1e-17, xp.inf)


def finite_units(loss: Array, mass: Array, weight: Array) -> Array:
    """Bound the relative rounding error of a sum of `mass e^{c loss}`, in roundoffs, as if c loss were exact."""
    xp = namespace(loss, weight)
    log_mass = xp.log(xp.where(mass > 0, mass, 1.0))
    # A mass that was computed as exp(x) has a relative error of a few roundoffs times |x|. `size` is the mean of |x|.
    size = xp.sum(weight * xp.abs(log_mass), axis=-1) / xp.sum(weight, axis=-1)
    return 100.0 + 4.0 * loss.shape[-1] + 10.0 * size


def _finite_above(loss: Array, mass: Array, c: Array) -> Array:
    xp = namespace(loss, mass, c)
    top, weight = finite_weights(loss, mass, c)
    log_m = top + xp.log(xp.sum(weight, axis=-1))
    reach = xp.max(xp.where(mass > 0, xp.abs(loss), 0.0), axis=-1)
    units = finite_units(loss, mass, weight) + 24.0 * c * reach + 8.0 * xp.abs(log_m)
    return log_m + ROUNDOFF * units + c * FINITE_LOSS_ERROR


def chernoff(law: LossLaw, c: Array, nodes: int) -> Array:
    """Bound `K(c) + log kappa(c)` for c > 0 from above, with all errors; inf if no bound is certified."""
    xp = namespace(law.sign, c)
    at = c[..., None]
    terms = [(law.mu2 * c * (c + 1.0) / 2.0)[..., None], log_kappa(c)[..., None]]
    if (n := law.gauss_n).shape[-1]:
        above = _log_m_above(law.gauss_sigma, law.gauss_q, law.sign[..., None], at, nodes)
        terms.append(xp.where(n > 0, n * above, 0.0))
    if (n := law.laplace_n).shape[-1]:
        above = laplace_log_m(law.laplace_scale, at) + ROUNDOFF * (120.0 + 24.0 * (at + 1.0) / law.laplace_scale)
        terms.append(xp.where(n > 0, n * above, 0.0))
    if (n := law.finite_n).shape[-1]:
        terms.append(xp.where(n > 0, n * _finite_above(law.finite_loss, law.finite_mass, at), 0.0))
    size = sum(term.shape[-1] for term in terms)
    total, magnitude = (sum(xp.sum(term, axis=-1) for term in each) for each in (terms, [xp.abs(x) for x in terms]))
    value = total + ROUNDOFF * (size + 16.0) * (magnitude + 4.0)
    return xp.where(xp.isfinite(value), value, xp.inf)


def level_sets(sigma: Array, q: Array, t: Tilted) -> tuple[Array, Array]:
    """Bound the loss's tilted density from below by slabs: (heights, lengths of level sets), (2 (LEVELS - 1),) each."""
    xp, size = namespace(t.u), t.u.shape[-1]
    log_f = xp.log(t.weight) - xp.log(t.step)[..., None] - xp.log(t.posterior) + xp.log(sigma)[..., None]
    log_f = xp.where(t.weight > 0.0, log_f, -xp.inf)
    units = per_term(sigma, q, t)
    log_f, off = keep_apart(xp, (log_f, ROUNDOFF * (units.loss + 4.0 * xp.abs(t.loss))))
    # f: tilted density of the loss. With the posterior p, which rises with u, (log f)'' is -1 + (power + 1) p (1 - p)/
    # sigma^2. So a chord exceeds log f by at most `sag`.
    most = xp.minimum(ROUNDED_UP * t.posterior[..., -1], 0.25)
    convexity = -1.0 + xp.maximum(t.power + 1.0, 0.0) * most / sigma**2
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
    # without a second mode, `other` is the peak, `floor` is the height of the peak, and the slabs of `other` are empty
    floor = xp.minimum(pick(xp, valley, other), tops[..., 1])
    floors = stack(xp, [xp.full_like(floor, -xp.inf), floor])
    # The lowest level is 5.5^2/2 nats below the top. A normal density falls so far at 5.5 standard deviations.
    levels = xp.maximum(tops[..., None] - xp.linspace(0.0, 5.5, LEVELS) ** 2 / 2.0, floors[..., None])
    heights = xp.exp(levels - sag[..., None, None])
    shape = (*floor.shape, 2 * (LEVELS - 1))
    slabs, levels = (xp.reshape(x, shape) for x in (heights[..., :-1] - heights[..., 1:], levels[..., :-1]))
    lengths = _lengths(sigma, t, log_f, off, xp.repeat(modes, LEVELS - 1, axis=-1), levels)
    # every level is less than 16 nats below its mode, so `doubt` ignores the errors of log f at lower values
    inside = log_f > xp.min(tops, axis=-1)[..., None] - 16.0
    doubt = xp.max(xp.where(inside, units.weight + 16.0 * (1.0 + xp.abs(log_f)), 0.0), axis=-1)
    doubt = ROUNDOFF * doubt + 3.0 * units.y
    # ROUNDED_DOWN covers a relative error of up to 2.5e-4 of each height. Where the error may be larger, slabs are 0.
    return xp.where((doubt < 2.5e-4)[..., None], slabs, 0.0), lengths


def _lengths(sigma: Array, t: Tilted, log_f: Array, off: Array, modes: Array, levels: Array) -> Array:
    """Return lower bounds, in losses, of lengths of intervals about the nodes `modes` on which log f >= `levels`."""
    xp, size = namespace(log_f), log_f.shape[-1]
    index = xp.arange(size)
    outside = log_f[..., None, :] < levels[..., None]
    mode = modes[..., None]
    right = xp.min(xp.where(outside & (index > mode), index, size), axis=-1)
    left = xp.max(xp.where(outside & (index < mode), index, -1), axis=-1)
    inner_r, inner_l = right - 1, left + 1
    outer_r, outer_l = xp.minimum(right, size - 1), xp.maximum(left, 0)
    at = partial(xp.take_along_axis, axis=-1)
    f_r, f_l, loss_l = at(log_f, inner_r), at(log_f, inner_l), at(t.loss, inner_l)
    slope_r, slope_l = f_r - at(log_f, outer_r), f_l - at(log_f, outer_l)
    part_r = xp.where(slope_r > 0, (f_r - levels) / xp.where(slope_r > 0, slope_r, 1.0), 0.0)
    part_l = xp.where(slope_l > 0, (f_l - levels) / xp.where(slope_l > 0, slope_l, 1.0), 0.0)
    # the loss is convex in u: a tangent at the right and a chord at the left give an interval inside the level set
    end_r = at(t.loss, inner_r) + part_r * t.step[..., None] * at(t.posterior, inner_r) / sigma[..., None]
    end_l = loss_l + part_l * (at(t.loss, outer_l) - loss_l)
    # `moved` bounds the sum of the rounding errors of both ends of the interval
    moved = 2.0 * (at(off, inner_r) + at(off, inner_l) + at(off, outer_l))
    return xp.maximum(end_r - end_l - moved, 0.0)


def gaussian_decay(slabs: Array, lengths: Array, frequency: Array) -> Array:
    """Return a lower bound of `1 - |M(c + it)|/M(c)` that holds for every t >= frequency."""
    xp = namespace(lengths, frequency)
    lost = xp.sum(slabs * lengths * (1.0 - sinc_envelope(0.5 * frequency[..., None] * lengths)), axis=-1)
    # `1 - sinc_envelope` is off by at most 16 roundoffs. So is `lost`, since the slabs' masses sum to at most 1.
    return xp.maximum(ROUNDED_DOWN * lost - 20.0 * ROUNDOFF, 0.0)


def sinc_envelope(y: Array) -> Array:
    """Return an upper bound of `sup_{y' >= y} |sin y' / y'|` that never rises with y."""
    xp = namespace(y)
    s = xp.minimum(y, 3.0) ** 2
    central = 1.0 - s / 6.0 * (1.0 - s / 20.0 * (1.0 - s / 42.0 * (1.0 - s / 72.0)))
    return xp.where(
        y < 3.0, xp.maximum(central, FIRST_SIDE_LOBE), xp.minimum(FIRST_SIDE_LOBE, 1.0 / xp.maximum(y, 1.0))
    )
