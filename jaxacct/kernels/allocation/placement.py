"""Where the contour goes: windows, abscissa, period and number of nodes.  No bound depends on any choice made here.

A line ends at the node beyond which the bound of the rest is small enough (README.md, section 4).
"""

from typing import NamedTuple, TypeVar

import jax
import numpy as np

from jaxacct.kernels.allocation.cutoff import log_beyond_on, log_power
from jaxacct.kernels.allocation.law import ROOM, Cells, Cuts, Windows, cells_of, cuts_of
from jaxacct.kernels.allocation.transform import Line
from jaxacct.kernels.arrays import Array

__all__ = ["TOLERANCE", "Place", "place", "place_of_bulk", "place_split", "replaced", "tilted_mode"]

MOST_NODES = 6_000
"""Most nodes on the line."""
PROBES = 12
"""Most indices that are tried for the last node."""
PAST_THE_GOAL = 0.02
"""By how much, in the logarithm, the secant aims past the goal, so that what it finds is mostly enough."""
STRIDE = 0.8
"""Step of the logarithm of the index where the bound says nothing about the way to go."""
NEAR_ENOUGH = 0.2
"""Distance, in the logarithm, of an index that is not too small from one that is, or from where the secant sees it."""
Some = TypeVar("Some")
COARSE = 160
"""Cells of the grids on which choices are made, and the images bounded."""
TOLERANCE = 1e-10
"""Size of what is cut off, relative to the value, where nothing else is asked for."""
REACH = 8.6
"""Deviations of the standard normal law that are kept."""
MANY = 250
"""Nodes above which another way is tried."""
ILL = 6.0
"""log of the scale over the value above which another way is tried: digits are lost."""
ONE_SLOT = 15.0
"""Deviations of S that a threshold lies above the mean, from which on one large slot decides: jumps are split off."""
FAR_BLUR = 0.03
"""Width of the window beyond which slots are far, in log X."""
LOW_BLUR = 0.08
"""Width of the window between bulk and jumps, in log X."""
LOW_SHARE = 0.5
"""Where the bulk of the call ends, as a share of the threshold's distance from the mean.

Jumps larger than half of it leave the others less than half; the scales of both contours are then near their values.
"""
POOR = 2.0
"""log of the scale of a put over its value, roughly, where the guess is of no use."""
BULK_END = 9.0
"""Widths of the window behind which the law of the bulk ends."""


class Place(NamedTuple):
    """Everything that `bracket.py` needs to know about where it integrates."""

    line: Line
    windows: Windows
    cells: Cells
    far: Array
    """(B, R) abscissas beyond c at which Chernoff bounds may be taken."""
    log_far: Array
    """(B, R) log of upper bounds of the integrand there, without e^{-sign z k}/z^2."""
    log_bulk: Array
    """(B, R) log of upper bounds of A^t there; -inf where there is no bulk."""
    digits: Array
    """(B,) log of the scale over the value."""
    log_beyond: Array
    """(B,) log of a bound of what lies beyond the last node, without e^{-sign c k}."""


def _grid(low: Array, high: Array, size: int) -> Array:
    """(B, size) geometrically from low to high."""
    return low[:, None] * (high / low)[:, None] ** np.linspace(0.0, 1.0, size)


def place(sign: float, s: Array, t: Array, k: Array, guess: Array, tolerance: Array | float = TOLERANCE) -> Place:
    """Windows, line and Chernoff bounds for E(S - k)_+ (sign = 1) or E(k - S)_+ (sign = -1), (B,) each.

    guess : log of about how large the value is.
    tolerance : size of what is cut off, relative to the guess.
    """
    tolerance = np.broadcast_to(tolerance, s.shape)
    with np.errstate(all="ignore"):
        alone = (sign > 0) & (k - 1.0 > ONE_SLOT * _deviation(s, t))
        if alone.all() or not alone.any():
            return _better_place(sign, s, t, k, guess, tolerance, bool(alone.all()))
        whole, split = (
            (rows, _better_place(sign, s[rows], t[rows], k[rows], guess[rows], tolerance[rows], first))
            for rows, first in ((np.flatnonzero(~alone), False), (np.flatnonzero(alone), True))
        )
        order = np.argsort(np.concatenate([whole[0], split[0]]))
        return jax.tree.map(lambda a, b: np.concatenate([a, b])[order], whole[1], split[1])


def _better_place(sign: float, s: Array, t: Array, k: Array, guess: Array, tolerance: Array, split: bool) -> Place:
    """With or without a split, as told, and the other way where that is better."""
    found = _place(sign, s, t, k, guess, tolerance, LOW_SHARE if split else 0.0)
    rows = np.flatnonzero((found.line.count > MANY) | ~(found.digits < ILL))
    if rows.size == 0:
        return found
    share = 0.0 if split else LOW_SHARE
    other = _place(sign, s[rows], t[rows], k[rows], guess[rows], tolerance[rows], share)
    first = jax.tree.map(lambda a: a[rows], found)
    better = _badness(other) < _badness(first)
    return replaced(found, rows[better], jax.tree.map(lambda a: a[better], other))


def replaced(found: Place, rows: Array, other: Place) -> Place:
    """`found` with other placements in some rows."""

    def merged(kept: Array, new: Array) -> Array:
        kept = kept.copy()
        kept[rows] = new
        return kept

    return jax.tree.map(merged, found, other)


def place_split(s: Array, t: Array, k: Array, guess: Array, tolerance: Array, share: float) -> Place:
    """`place` of the call with a bulk that ends at `share` of the threshold's distance from the mean."""
    with np.errstate(all="ignore"):
        return _place(1.0, s, t, k, guess, tolerance, share)


def _badness(found: Place) -> Array:
    lost = np.maximum(found.digits - ILL, 0.0)
    worse = found.line.count * (1.0 + lost * lost) + np.where(found.line.count >= MOST_NODES, 1e9, 0.0)
    return np.where(np.isfinite(worse), worse, np.inf)


def _place(sign: float, s: Array, t: Array, k: Array, guess: Array, tolerance: Array, share: float) -> Place:
    split = share > 0.0
    if sign > 0:
        return _of_call(s, t, k, guess, tolerance, _windows_of_call(s, t, k, guess + np.log(tolerance), share), split)
    windows, cells = _windows_of_put(s, t, k, split)
    cuts = cuts_of(cells, windows)
    seen, logs, c = _saddle(cells, cuts, t, k, sign, 2.0, 0.3 / k, np.maximum(400.0 / k, 80.0 / _deviation(s, t)))
    exponents = logs + seen * k[:, None] - np.log(seen)
    at = np.min(np.where(seen == c[:, None], exponents - np.log(seen), np.inf), axis=1)
    # the scale bounds the value but for a factor of the abscissa, so that a guess above it is a poor one
    log_value = np.where(split, guess, np.where(guess < at, at, at - POOR))
    goal = log_value + np.log(tolerance)
    needed, _ = _right(c, seen, exponents - 1.0, goal)
    period = np.maximum((np.log(k + 40.0 / c) - goal) / c, np.minimum(needed, k))
    reach = 46.0 + np.maximum(-logs[np.arange(len(k)), np.argmin(np.abs(seen - c[:, None]), axis=1)] / t, 0.0)
    end = np.minimum((np.log(reach / c) + np.log(t)) / s + 0.5 * s, REACH)
    start = np.minimum(tilted_mode(s, t, c) - REACH, end - 4.0)
    if split:
        end = np.maximum(end, windows.low + 9.0 * windows.low_blur)
    windows = windows._replace(start=start, end=end)
    cells = cells_of(s, t, windows, COARSE)
    far = _grid(1.1 * c, 40.0 * c, 20)
    return _ended(sign, s, t, k, guess, goal, windows, cells, cuts_of(cells, windows), (c, period), (seen, logs), far)


def place_of_bulk(s: Array, t: Array, k: Array, guess: Array, tolerance: Array | float, beside: Place) -> Place:
    """Where A^t of the call is integrated by itself, A the transform of the bulk of another placement."""
    low, blur = beside.windows.low, beside.windows.low_blur
    none = np.full_like(s, -np.inf)
    windows = Windows(none, np.ones_like(s), low, blur, beside.windows.start, low + BULK_END * blur)
    with np.errstate(all="ignore"):
        return _of_call(s, t, k, guess, np.broadcast_to(tolerance, s.shape), windows, True)


def _of_call(s: Array, t: Array, k: Array, guess: Array, tolerance: Array, windows: Windows, known: bool) -> Place:
    """The placement for given windows.  known : whether the guess is taken as it is; else the scale may raise it."""
    cells = cells_of(s, t, windows, COARSE)
    cuts, deviation = cuts_of(cells, windows), _deviation(s, t)
    light = (np.maximum(k - 1.0, 0.0) + 1.5 * deviation) / deviation**2
    top = np.minimum(8.0 * light, 250.0 / cells.x[:, -1])
    bottom = np.clip(0.5 / (k - 1.0 + deviation), 1e-3 * top, 0.5 * top)
    seen, logs, best = _saddle(cells, cuts, t, k, 1.0, 1.0, bottom, top)
    exponents = logs - seen * k[:, None] - np.log(seen)
    log_value = guess if known else np.maximum(guess, np.min(exponents, axis=1) - 4.0)
    goal = log_value + np.log(tolerance)
    c, period = _abscissa(best, seen, exponents - 1.0, goal)
    far = np.minimum(_grid(1.1 * c, 40.0 * c, 14), np.maximum(400.0 / cells.x[:, -1], 1.1 * c)[:, None])
    sharpest = _right(c, seen, exponents - 1.0, goal)[1]
    far = np.concatenate([sharpest[:, None] * np.array([0.95, 1.0, 1.05]), far], axis=1)
    return _ended(1.0, s, t, k, guess, goal, windows, cells, cuts, (c, period), (seen, logs), far)


def _ended(
    sign: float,
    s: Array,
    t: Array,
    k: Array,
    guess: Array,
    goal: Array,
    windows: Windows,
    cells: Cells,
    cuts: Cuts,
    line: tuple[Array, Array],
    saddle: tuple[Array, Array],
    far: Array,
) -> Place:
    """The placement with its last node, and Chernoff bounds at the abscissas `far`."""
    c, period = line
    step = 2.0 * np.pi / period
    scale = np.array([np.interp(one, *_sorted(a, b)) for one, a, b in zip(c, *saddle, strict=True)])
    last, beyond = last_node(cells, cuts, t, c, step, scale, goal + sign * c * k, _deviation(s, t), sign)
    digits = scale - sign * c * k - 2.0 * np.log(c) - guess
    log_far, log_bulk = log_power(cells, cuts, t, far, sign)
    return Place(Line(c, step, last), windows, cells, far, log_far, log_bulk, digits, beyond)


def _deviation(s: Array, t: Array) -> Array:
    """The standard deviation of S."""
    return np.sqrt(np.expm1(np.minimum(s * s, 600.0)) / t)


def _sorted(a: Array, b: Array) -> tuple[Array, Array]:
    order = np.argsort(a)
    return a[order], b[order]


def _windows_of_call(s: Array, t: Array, k: Array, goal: Array, share: float) -> Windows:
    edge = _far_from(s, t, k, goal)
    blur = np.minimum(FAR_BLUR / s, 0.3)
    high = edge + ROOM * blur
    low, low_blur = np.full_like(s, -np.inf), np.ones_like(s)
    if share > 0.0:
        low, low_blur = np.log(np.maximum(share * t * (k - 1.0), 1.0)) / s + 0.5 * s, LOW_BLUR / s
        low = np.minimum(low, high - 0.9 / s)
    return Windows(low, low_blur, high, blur, np.full_like(s, -REACH), high + 7.0 * blur)


def _far_from(s: Array, t: Array, k: Array, goal: Array) -> Array:
    """The least u at which a slot may be far: that it is, and S < k all the same, is negligible.

    A slot beyond x leaves k - x to the others, m of their deviations below their mean, which has chance e^{-m^2/2}.
    """
    spread = np.sqrt(np.exp(np.minimum(s * s, 600.0)) / t)[:, None]
    m = np.linspace(0.0, 8.0, 17)
    most = 1.001 * k[:, None]  # a little room for thresholds near k
    x = np.minimum(k[:, None] - 1.0 + (m + 0.1) * spread, most)
    u = (np.log(t)[:, None] + np.log(x)) / s[:, None] + 0.5 * s[:, None]
    chance = (np.log(t) + np.log(k))[:, None] - 0.5 * np.maximum(u, 0.0) ** 2 - 0.5 * m * m
    fine = (chance < goal[:, None]) | (x >= most)
    least = np.min(np.where(fine, u, np.inf), axis=1)
    whole = (np.log(t) + np.log(most[:, 0])) / s + 0.5 * s
    negligible = np.sqrt(2.0 * np.maximum(np.log(t * k) - goal, 1.0))
    return np.minimum(np.minimum(least, whole), negligible)


def _windows_of_put(s: Array, t: Array, k: Array, split: bool) -> tuple[Windows, Cells]:
    none = np.full_like(s, -np.inf)
    start = tilted_mode(s, t, 20.0 / k) - REACH
    windows = Windows(none, np.ones_like(s), -none, np.ones_like(s), start, np.full_like(s, REACH))
    if split:
        blur = LOW_BLUR / s
        low = np.log(k) / s + 0.5 * s - 7.0 * blur
        windows = windows._replace(low=low, low_blur=blur)
    return windows, cells_of(s, t, windows, COARSE)


def _saddle(
    cells: Cells, cuts: Cuts, t: Array, k: Array, sign: float, power: float, low: Array, high: Array
) -> tuple[Array, Array, Array]:
    """Abscissas, the logarithms of the integrand there, and the abscissa of the least exponent."""
    seen, logs = [], []
    rows = np.arange(len(k))
    for size in (24, 9):
        grid = _grid(low, high, size)
        log = log_power(cells, cuts, t, grid, sign)[0]
        seen.append(grid)
        logs.append(log)
        exponent = log - sign * grid * k[:, None] - power * np.log(grid)
        exponent = np.where(np.isfinite(exponent), exponent, np.inf)
        best = np.argmin(exponent, axis=1)
        low, high = grid[rows, np.maximum(best - 1, 0)], grid[rows, np.minimum(best + 1, size - 1)]
    return np.concatenate(seen, axis=1), np.concatenate(logs, axis=1), grid[rows, best]


def tilted_mode(s: Array, t: Array, c: Array) -> Array:
    """The u <= 0 with u + s c X(u)/t = 0: the mode of N(u) e^{-c X/t}."""
    u = np.zeros_like(s)
    for _ in range(60):
        pull = s * c * np.exp(s * u - 0.5 * s * s - np.log(t))
        u = u - (u + pull) / (1.0 + s * pull)
    return np.minimum(np.where(np.isfinite(u), u, 0.0), 0.0)


def _right(c: Array, seen: Array, exponents: Array, goal: Array) -> tuple[Array, Array]:
    """The period for which Chernoff bounds make the images negligible, and the abscissa of the bound that does."""
    gap = seen - c[:, None]
    needed = np.where(gap > 0.02 * c[:, None], (exponents - goal[:, None]) / gap, np.inf)
    needed = np.where(np.isnan(needed), np.inf, needed)
    least = np.argmin(needed, axis=1)[:, None]
    return np.take_along_axis(needed, least, axis=1)[:, 0], np.take_along_axis(seen, least, axis=1)[:, 0]


def _abscissa(best: Array, seen: Array, exponents: Array, goal: Array) -> tuple[Array, Array]:
    """An abscissa below the saddle point and the period for which images are negligible on both sides."""
    chosen, period = 0.5 * best, np.full_like(best, np.inf)
    for share in (0.4, 0.5, 0.6, 0.7, 0.8, 0.88):
        c = share * best
        left = (np.log1p(np.maximum(-goal / c, 0.0)) - goal) / c
        both = np.maximum(left, _right(c, seen, exponents, goal)[0])
        better = both < period
        chosen, period = np.where(better, c, chosen), np.where(better, both, period)
    return chosen, period


def last_node(
    cells: Cells,
    cuts: Cuts,
    t: Array,
    c: Array,
    step: Array,
    scale: Array,
    goal: Array,
    deviation: Array,
    sign: float,
) -> tuple[Array, Array]:
    """The index of the last node, where the bound of what lies beyond falls to the goal, and that bound.

    The fall below the scale grows about as a power of the index, as its square where the law is nearly normal: a
    secant in the logarithms of both, kept between an index that is too small and one that is not.  Which path serves is
    settled at an index where they do not both suffice: far out either may be the smaller by a hair.
    """
    most = np.log(MOST_NODES)
    low, high = np.zeros_like(c), np.full_like(c, most)
    wanted = np.log(np.maximum(scale - goal, 1.0)) + PAST_THE_GOAL
    at = np.clip(0.5 * (np.log(2.0) + wanted) - np.log(deviation * step), 0.0, most)
    at = np.where(np.isnan(at), 0.5 * most, at)
    power, before, seen = np.full_like(c, 2.0), np.full_like(c, np.nan), np.full_like(c, np.nan)
    local, open_ = np.zeros(len(c), bool), np.ones(len(c), bool)
    beyond = np.full_like(c, np.inf)
    rows = np.arange(len(c))
    for _ in range(PROBES):
        some = _taken((cells, cuts, t, c), rows)
        y = np.ceil(np.exp(at[rows])) * step[rows]
        bound = np.empty(rows.size)
        both, one = np.flatnonzero(open_[rows]), np.flatnonzero(~open_[rows])
        if both.size:
            near, far = (
                log_beyond_on(*_taken(some, both), y[both], sign, np.full(both.size, x)) for x in (True, False)
            )
            bound[both], local[rows[both]] = np.fmin(near, far), ~(far < near)
            open_[rows[both]] = np.maximum(near, far) < goal[rows[both]]
        if one.size:
            bound[one] = log_beyond_on(*_taken(some, one), y[one], sign, local[rows[one]])
        here, less = at[rows], low[rows]
        fine = bound < goal[rows]
        low[rows] = less = np.where(fine, less, np.maximum(less, here))
        high[rows] = more = np.where(fine, np.minimum(high[rows], here), high[rows])
        beyond[rows] = np.where(fine, bound, beyond[rows])
        fall = np.log(np.maximum(scale[rows] - bound, 1e-2))
        fresh = (fall - seen[rows]) / (here - before[rows])
        power[rows] = steep = np.where((fresh > 0.1) & (fresh < 4.0), fresh, power[rows])
        before[rows], seen[rows] = here, fall
        # far out the bound may be poor, and one that is above the scale says nothing about the way
        stride = np.where(fall > 0.0, (wanted[rows] - fall) / steep, np.where(fine, -STRIDE, STRIDE))
        new = here + stride
        middle = 0.5 * (less + np.where(more < most, more, np.minimum(more, less + 2.0 * STRIDE)))
        at[rows] = np.where((new > less) & (new < more), new, middle)
        spare = fine & (fall - wanted[rows] < NEAR_ENOUGH * steep)  # hardly more than is asked
        rows = rows[~spare & ~(more - less < NEAR_ENOUGH)]
        if rows.size == 0:
            break
    last = np.ceil(np.exp(high))
    if np.any(high == most):  # no index tried is enough
        beyond = np.where(high == most, log_beyond_on(cells, cuts, t, c, last * step, sign, local), beyond)
    return last, beyond


def _taken(some: Some, rows: Array) -> Some:
    """Some rows of arrays that all have one for each of them."""
    return jax.tree.map(lambda x: x[rows], some) if rows.size < len(jax.tree.leaves(some)[0]) else some
