"""The contour of one round of random allocation: brackets of calls and puts, and profiles (README.md of this folder).

`sign` is 1 for the call E(S - k)_+ and -1 for the put E(k - S)_+. A profile lists bounds of delta at many losses.
Neighbouring losses share a contour while their brackets are narrow enough.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, TypeVar

import jax
import numpy as np

from jaxacct.core.floats import ROUNDOFF
from jaxacct.kernels.arrays import Array, log_ndtr
from jaxacct.kernels.contour import allocation_law
from jaxacct.kernels.contour.allocation_law import Cells, Cuts, Line, Powers, Windows, cells_of, cuts_of, tail
from jaxacct.kernels.contour.core import log_geometric

STEEPEST = 9.0
"""Cap on Im u of the path of integration at the centre of a window, in widths of the window."""
MOST_NODES = 6_000
"""Largest number of nodes of a contour."""
Some = TypeVar("Some")
COARSE = 160
"""Number of cells of the grid in u that serves to place a contour, and to bound its images and the terms cut off."""
TOLERANCE = 1e-10
"""Default size of the terms that are cut off, relative to the value of the integral."""
MANY = 250
"""A contour may treat the bulk (slots with a small X) apart from the jumps (slots with a large X), or all slots
together. If the way tried first takes more nodes than MANY, the other way is tried as well."""
ILL = 6.0
"""The other way (`MANY`) is also tried if the first one loses this many nats to cancellation (`Place.digits`)."""
LOW_BLUR = 0.08
"""Width, in log X, of the smooth window between the bulk (smaller X) and the jumps (larger X)."""
LOW_SHARE = 0.5
"""For E(S - k)_+ the bulk has the slots with X/t below about LOW_SHARE (k - 1). So one jump brings at least half of the
rise from E S = 1 to k, and neither the bulk's nor the jumps' contour loses many digits."""
BULK_END = 9.0
"""A contour of the bulk alone has a grid in u up to this many window widths above `low`. The window is 1e-19 there."""


class Place(NamedTuple):
    """The placement of a contour, and bounds that hold for this placement."""

    line: Line  # the line of integration in z
    windows: Windows  # the cuts of a slot's law into bulk, jumps and far slots
    cells: Cells  # the grid in u
    far: Array  # (B, R) abscissas of Chernoff bounds, all larger than c
    log_far: Array  # (B, R) log of upper bounds of the integrand at z = `far`, without its factor e^{-sign z k}/z^2
    log_bulk: Array  # (B, R) log of upper bounds of A^t at `far`, with A the bulk's transform; -inf without a bulk
    digits: Array  # (B,) nats lost to cancellation: log of the ratio of the integrand at z = c to the guessed value
    log_beyond: Array  # (B,) log of a bound of the sum of terms after the last node, without the factor e^{-sign c k}


def _grid(low: Array, high: Array, size: int) -> Array:
    """Return a geometric grid from low to high, (B, size)."""
    return low[:, None] * (high / low)[:, None] ** np.linspace(0.0, 1.0, size)


@np.errstate(all="ignore")
def place(sign: float, s: Array, t: Array, k: Array, guess: Array, tolerance: Array | float = TOLERANCE) -> Place:
    """Choose windows, line and Chernoff bounds for thresholds k, (B,). `guess` estimates the log of the integral."""
    tolerance = np.broadcast_to(tolerance, s.shape)
    # for a call whose k is so large that mostly one slot alone brings S above k, try a contour with a bulk first
    alone = (sign > 0) & (k - 1.0 > 15.0 * _deviation(s, t))
    groups = [rows for split in (False, True) if (rows := np.flatnonzero(alone == split)).size]
    given = s, t, k, guess, tolerance
    found = (_better_place(sign, *rows_of(given, rows), bool(alone[rows[0]])) for rows in groups)
    order = np.argsort(np.concatenate(groups))
    return jax.tree.map(lambda *each: np.concatenate(each)[order], *found)


def _better_place(sign: float, s: Array, t: Array, k: Array, guess: Array, tolerance: Array, split: bool) -> Place:
    """Place contours, with a bulk if `split`. If a contour is long or loses digits, try the other way (`MANY`)."""
    found = _place(sign, s, t, k, guess, tolerance, LOW_SHARE if split else 0.0)
    rows = np.flatnonzero((found.line.count > MANY) | ~(found.digits < ILL))
    if rows.size == 0:
        return found
    share = 0.0 if split else LOW_SHARE
    other = _place(sign, s[rows], t[rows], k[rows], guess[rows], tolerance[rows], share)
    better = _badness(other) < _badness(rows_of(found, rows))
    return replaced(found, rows[better], rows_of(other, better))


def replaced(found: Place, rows: Array, other: Place) -> Place:
    """Return `found` with its `rows` replaced by the placements `other`."""

    def merged(kept: Array, new: Array) -> Array:
        kept = kept.copy()
        kept[rows] = new
        return kept

    return jax.tree.map(merged, found, other)


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
    # `at` is the log of the integrand at z = c, and `log_value` an estimate of log E(k - S)_+
    log_value = np.where(split, guess, np.where(guess < at, at, at - 2.0))
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
    """Place a contour of E[(S - k)_+; all slots are in the bulk], with the transform A^t. `beside` defines the bulk."""
    low, blur = beside.windows.low, beside.windows.low_blur
    none = np.full_like(s, -np.inf)
    windows = Windows(none, np.ones_like(s), low, blur, beside.windows.start, low + BULK_END * blur)
    with np.errstate(all="ignore"):
        return _of_call(s, t, k, guess, np.broadcast_to(tolerance, s.shape), windows, True)


def _of_call(s: Array, t: Array, k: Array, guess: Array, tolerance: Array, windows: Windows, known: bool) -> Place:
    """Place contours of E(S - k)_+ for given windows. Unless `known`, a guess far below Chernoff's bound is raised."""
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
    """Complete a placement: find the last node, and compute Chernoff bounds at the abscissas `far`."""
    c, period = line
    step = 2.0 * np.pi / period
    scale = np.array([np.interp(one, *_sorted(a, b)) for one, a, b in zip(c, *saddle, strict=True)])
    last, beyond = last_node(cells, cuts, t, c, step, scale, goal + sign * c * k, _deviation(s, t), sign)
    digits = scale - sign * c * k - 2.0 * np.log(c) - guess
    log_far, log_bulk = log_power(cells, cuts, t, far, sign)
    return Place(Line(c, step, last), windows, cells, far, log_far, log_bulk, digits, beyond)


def _deviation(s: Array, t: Array) -> Array:
    """Return the standard deviation of S."""
    return np.sqrt(np.expm1(np.minimum(s * s, 600.0)) / t)


def _sorted(a: Array, b: Array) -> tuple[Array, Array]:
    order = np.argsort(a)
    return a[order], b[order]


def _windows_of_call(s: Array, t: Array, k: Array, goal: Array, share: float) -> Windows:
    edge = _far_from(s, t, k, goal)
    blur = np.minimum(0.03 / s, 0.3)  # width of the far window
    high = edge + allocation_law.ROOM * blur
    low, low_blur = np.full_like(s, -np.inf), np.ones_like(s)
    if share > 0.0:
        low, low_blur = np.log(np.maximum(share * t * (k - 1.0), 1.0)) / s + 0.5 * s, LOW_BLUR / s
        low = np.minimum(low, high - 0.9 / s)
    return Windows(low, low_blur, high, blur, np.full_like(s, -REACH), high + 7.0 * blur)


def _far_from(s: Array, t: Array, k: Array, goal: Array) -> Array:
    """Return the least u, (B,), for which the chance that a slot lies above u and yet S < k is negligible."""
    # If S < k and a slot has X/t > x, the other slots' sum is below k - x. The chance of such a sum is about e^{-m^2/2}
    # if k - x lies m standard deviations below the mean of the sum.
    spread = np.sqrt(np.exp(np.minimum(s * s, 600.0)) / t)[:, None]
    m = np.linspace(0.0, 8.0, 17)
    most = 1.001 * k[:, None]  # 1.001 leaves room for larger thresholds on this contour
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
    """Return the abscissas tried, the log of the transform at each, and the abscissa with the least integrand."""
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
    """Return the u <= 0 with u + s c X(u)/t = 0: the mode of e^{-u^2/2} e^{-c X/t}."""
    u = np.zeros_like(s)
    for _ in range(60):
        pull = s * c * np.exp(s * u - 0.5 * s * s - np.log(t))
        u = u - (u + pull) / (1.0 + s * pull)
    return np.minimum(np.where(np.isfinite(u), u, 0.0), 0.0)


def _right(c: Array, seen: Array, exponents: Array, goal: Array) -> tuple[Array, Array]:
    """Return the least period whose images j > 0 are negligible by Chernoff's bound, and the abscissa of the bound."""
    gap = seen - c[:, None]
    needed = np.where(gap > 0.02 * c[:, None], (exponents - goal[:, None]) / gap, np.inf)
    needed = np.where(np.isnan(needed), np.inf, needed)
    least = np.argmin(needed, axis=1)[:, None]
    return np.take_along_axis(needed, least, axis=1)[:, 0], np.take_along_axis(seen, least, axis=1)[:, 0]


def _abscissa(best: Array, seen: Array, exponents: Array, goal: Array) -> tuple[Array, Array]:
    """Return an abscissa below the saddle point `best`, and a period at which all images j != 0 are negligible."""
    chosen, period = 0.5 * best, np.full_like(best, np.inf)
    for share in (0.4, 0.5, 0.6, 0.7, 0.8, 0.88):
        c = share * best
        left = (np.log1p(np.maximum(-goal / c, 0.0)) - goal) / c
        both = np.maximum(left, _right(c, seen, exponents, goal)[0])
        better = both < period
        chosen, period = np.where(better, c, chosen), np.where(better, both, period)
    return chosen, period


def last_node(
    cells: Cells, cuts: Cuts, t: Array, c: Array, step: Array, scale: Array, goal: Array, deviation: Array, sign: float
) -> tuple[Array, Array]:
    """Return the last node's index, and log b for a bound b of the sum over later nodes; log b < `goal` if possible."""
    # The fall is `scale`, the log of the transform at z = c, minus log b. The fall grows about as a power of the index.
    # So secant steps in log(index) and log(fall) find log(index) to within about `enough`. Where the fall is at most 1,
    # log(index) moves by `stride`. Both paths in u (`local` of `_path`) are tried until one path misses the goal.
    # Thereafter only the path with the smaller b is tried.
    stride, enough = 0.8, 0.2
    most = np.log(MOST_NODES)
    low, high = np.zeros_like(c), np.full_like(c, most)
    # the secant aims at a fall 2% larger than needed, so that its index is mostly large enough
    wanted = np.log(np.maximum(scale - goal, 1.0)) + 0.02
    at = np.clip(0.5 * (np.log(2.0) + wanted) - np.log(deviation * step), 0.0, most)
    at = np.where(np.isnan(at), 0.5 * most, at)
    power, before, seen = np.full_like(c, 2.0), np.full_like(c, np.nan), np.full_like(c, np.nan)
    local, open_ = np.zeros(len(c), bool), np.ones(len(c), bool)
    beyond = np.full_like(c, np.inf)
    rows = np.arange(len(c))
    for _ in range(12):
        some = rows_of((cells, cuts, t, c), rows)
        y = np.ceil(np.exp(at[rows])) * step[rows]
        bound = np.empty(rows.size)
        both, one = np.flatnonzero(open_[rows]), np.flatnonzero(~open_[rows])
        if both.size:
            near, far = (
                log_beyond_on(*rows_of(some, both), y[both], sign, np.full(both.size, x)) for x in (True, False)
            )
            bound[both], local[rows[both]] = np.fmin(near, far), ~(far < near)
            open_[rows[both]] = np.maximum(near, far) < goal[rows[both]]
        if one.size:
            bound[one] = log_beyond_on(*rows_of(some, one), y[one], sign, local[rows[one]])
        here, less = at[rows], low[rows]
        fine = bound < goal[rows]
        low[rows] = less = np.where(fine, less, np.maximum(less, here))
        high[rows] = more = np.where(fine, np.minimum(high[rows], here), high[rows])
        beyond[rows] = np.where(fine, bound, beyond[rows])
        fall = np.log(np.maximum(scale[rows] - bound, 1e-2))
        fresh = (fall - seen[rows]) / (here - before[rows])
        power[rows] = steep = np.where((fresh > 0.1) & (fresh < 4.0), fresh, power[rows])
        before[rows], seen[rows] = here, fall
        # `here` is log(index), and `fall` is log(fall)
        new = here + np.where(fall > 0.0, (wanted[rows] - fall) / steep, np.where(fine, -stride, stride))
        middle = 0.5 * (less + np.where(more < most, more, np.minimum(more, less + 2.0 * stride)))
        at[rows] = np.where((new > less) & (new < more), new, middle)
        spare = fine & (fall - wanted[rows] < enough * steep)
        rows = rows[~spare & ~(more - less < enough)]
        if rows.size == 0:
            break
    last = np.ceil(np.exp(high))
    if np.any(high == most):  # no index tried is large enough
        beyond = np.where(high == most, log_beyond_on(cells, cuts, t, c, last * step, sign, local), beyond)
    return last, beyond


def rows_of(some: Some, rows: Array) -> Some:
    """Return a pytree, such as a `Place`, with the given `rows` of each array, in their order and with repetitions."""
    return jax.tree.map(lambda x: x[rows] if np.ndim(x) else x, some)


def _path(cells: Cells, windows: Windows, y: Array, local: Array) -> Array:
    """Choose Im u, (B, J + 1), at the edges of cells: at most a multiple of X(u) if `local`, else of the mean of X."""
    u, s = cells.edges, cells.s
    # Im u = alpha lowers the log of the integrand by about s y (X/t) alpha - alpha^2/2, most at alpha = s y X/t.
    size = np.minimum(1.45 / s, y[:, None] * s * np.where(local[:, None], cells.x, _one_over_t(cells)))
    for place, blur in ((windows.low, windows.low_blur), (windows.high, windows.high_blur)):
        there = np.abs(place[:, None]) < np.inf
        at = np.where(there[:, 0], place, 0.0)[:, None]
        here = np.exp(s * at - 0.5 * s * s) * _one_over_t(cells)
        most = np.minimum(STEEPEST, y[:, None] * s * here * blur[:, None])
        away = np.abs(u - at) / blur[:, None]
        # A cell's bound takes the larger Im u of its two edges. `near` is the least distance of an edge and its two
        # neighbours from the window, in widths.
        near = away.copy()
        near[:, 1:] = np.minimum(near[:, 1:], away[:, :-1])
        near[:, :-1] = np.minimum(near[:, :-1], away[:, 1:])
        # `far` caps Im u. At edges far from the window, the window's Phi is then within e^-40 of 0 or 1.
        far = np.sqrt(np.maximum(near * near - 80.0, most * most))
        shift = np.minimum(most + np.maximum(near - STEEPEST, 0.0), far)
        size = np.where(there, np.minimum(size, shift * blur[:, None]), size)
    size = np.minimum(size, np.minimum(u - u[:, :1], u[:, -1:] - u))
    return np.maximum(np.minimum(size, 1.5 / s), 0.0)


def _one_over_t(cells: Cells) -> Array:
    return cells.x[:, :1] * np.exp(0.5 * cells.s**2 - cells.s * cells.edges[:, :1])


def log_power(cells: Cells, cuts: Cuts, t: Array, r: Array, sign: float) -> tuple[Array, Array]:
    """Return upper bounds of the logs of (A + B)^t - A^t and of A^t at real r, (B, R) each.

    The transforms are A of the bulk, or 0, and B of the jumps. (A + B)^t - A^t is at most t B (A + B)^{t-1}.
    """
    whole: Array = np.isneginf(cuts.windows.low)
    bulk, jump = allocation_law.shares(cuts, np.zeros((len(t), 1)))
    log_jump, t = allocation_law.log_real(cells, jump, allocation_law.jump_below(cuts.windows), r, sign), t[:, None]
    if whole.all():
        return t * log_jump, np.full_like(log_jump, -np.inf)
    log_bulk = allocation_law.log_real(cells, bulk, np.ones(len(t)), r, sign)
    both = np.logaddexp(log_bulk, log_jump)
    power = np.where(whole[:, None], t * log_jump, np.log(t) + log_jump + (t - 1.0) * both)
    return power, np.where(whole[:, None], -np.inf, t * log_bulk)


def log_beyond_on(cells: Cells, cuts: Cuts, t: Array, c: Array, y: Array, sign: float, local: Array) -> Array:
    """Bound from above the log, (B,), of h/pi times the sum of |transform|/|z|^2 over nodes, h apart, with Im z > y."""
    whole: Array = np.isneginf(cuts.windows.low)
    bulk, jump = allocation_law.log_path(cells, cuts, c, y, _path(cells, cuts.windows, y, local), sign)
    both = np.where(whole, jump, np.logaddexp(bulk, jump))
    power = np.where(whole, t * both, np.log(t) + jump + (t - 1.0) * both)
    return np.where(np.isnan(power), np.inf, power) - np.log(np.pi * y)


def log_images(k: Array, c: Array, period: Array, far: Array, log_far: Array, sign: float) -> Array:
    """Bound the log of the sum of images j > 0 from above (README.md, section 2), (B,), by the c' > c of `far`."""
    gap = (far - c[:, None]) * period[:, None]
    each = log_far - sign * far * k[:, None] - 1.0 - np.log(far) + log_geometric(gap)
    each = each + 1e-12 * (np.abs(gap) + far * k[:, None])
    each = np.where((gap > 0.0) & ~np.isnan(each), each, np.inf)
    least = np.min(each, axis=1)
    return np.where(period >= k, -np.inf, least) if sign < 0 else least


READ_TOGETHER = ((60, 0.3), (15, 0.15), (2, 0.1))
"""The largest number of losses that share a contour, and their largest distance (in `apart` of `_by_contours`), for
each of three turns. A later turn takes the losses whose brackets are still too wide."""
CUT_OFF = 5e-3, 1e-3
"""Tolerance of a contour in the first turn and in later turns, divided by the wanted relative width of its brackets."""
WIDTHS = ((-9.0, 1e-5), (-15.0, 1e-4), (-20.0, 1e-3), (-36.0, 1e-2), (-42.0, 0.1), (-np.inf, 0.3))
"""Pairs (x, w): the first pair with x < log delta has the wanted relative width w of a bracket of delta. A smaller w
would be of little use, since the chords between losses overstate delta by more: by a few 1e-4 for the largest deltas,
on which compositions mostly depend, and by a few hundredths in the tail."""
LONG = 1000
"""Losses whose contour has more nodes than this get no second contour, which would be slow and gain little."""
VERY_LONG = 1500
"""A contour with more nodes than this may take up to a second. `most_long` limits the number of such contours."""
KNOWN = 0.3
"""If a bracket of delta has at most this relative width, its estimate is the guess for the next contour."""
LAST_LOG_DELTA = -69.0
"""A profile's losses end where log delta is about this. The mass beyond the last loss becomes mass at infinity."""
LARGEST_LOSS = 600.0
"""Largest loss of a profile. Up to it e^eps, and products with e^eps, stay within float64."""
BULK_SPREAD = 2.0
"""Near 0, a profile's losses have a normal density, this many times as wide as the density f of one round's loss. The
best density of a profile's losses is about the cube root of f, and so sqrt(3) times as wide as f."""
DENSE = 4.0
"""A dense profile has this many times as many losses beyond the bulk, and even more in the far tail."""
LEAST_GAP = 1e-7
"""Smallest distance of losses, in units of the larger of 1e-3 and the standard deviation of one round's loss."""
LEAST_DEVIATION = 1e-300
"""Smallest standard deviation assumed for one round's loss, whose variance may underflow."""
SCAN = 600
"""Number of losses of each of the two grids on which `losses_for` guesses delta."""
CELLS = 48
"""Number of cells of the grid of `put_below`."""
REACH = 8.6
"""Cells start about this many standard deviations below the mode of u's law. For E(k - S)_+ the law is tilted, and the
cells mostly end at u <= REACH. The mass beyond these ends is only bounded."""


class Contour(NamedTuple):
    """An evaluated contour. Its brackets are narrow at thresholds near the threshold for which `place` was chosen."""

    sign: float  # 1 for E(S - k)_+, -1 for E(k - S)_+
    s: Array  # (B,) 1/sigma
    t: Array  # (B,) number of slots
    place: Place
    powers: Powers  # the integrand at the nodes
    bulk: Contour | None  # the contour of A^t; None if there is no bulk, or if Chernoff's bound of A^t suffices


def contours_at(
    sign: float,
    s: Array,
    t: Array,
    k: Array,
    guess: Array,
    tolerance: Array | float,
    most_long: int | None = None,  # largest number of contours of over VERY_LONG nodes for one (s, t)
) -> list[tuple[Array, Contour]]:
    """Return (row numbers, contour for k) for groups of similar node counts. Rows beyond `most_long` are left out."""
    tolerance = np.broadcast_to(tolerance, s.shape)
    where = place(sign, s, t, k, guess, tolerance)
    goal = guess + np.log(tolerance)
    kept = np.arange(len(s))
    if most_long is not None:
        long = np.flatnonzero(where.line.count > VERY_LONG)
        before = [np.sum((s[long[:place]] == s[row]) & (t[long[:place]] == t[row])) for place, row in enumerate(long)]
        kept = np.setdiff1d(kept, long[np.array(before, int) >= most_long])
    rows = kept[_bulk_chance(rows_of(where, kept), k[kept]) > goal[kept]] if sign > 0 else np.zeros(0, int)
    if rows.size == 0:
        return [(kept[at], one) for at, one in _evaluated(sign, s[kept], t[kept], rows_of(where, kept))]
    below = place_of_bulk(s[rows], t[rows], k[rows], guess[rows], tolerance[rows], rows_of(where, rows))
    # If the bulk's own contour has more than 100 nodes, a smaller bulk is tried: it may need no contour.
    for share in (0.25, 0.15):
        long = np.flatnonzero(below.line.count > 100)
        if long.size == 0:
            break
        some = rows[long]
        with np.errstate(all="ignore"):
            other = _place(1.0, s[some], t[some], k[some], guess[some], tolerance[some], share)
        shorter = other.line.count < where.line.count[some] + below.line.count[long]
        alone = np.flatnonzero((_bulk_chance(other, k[some]) <= goal[some]) & shorter)
        where = replaced(where, some[alone], rows_of(other, alone))
        others = np.setdiff1d(np.arange(rows.size), long[alone])
        rows, below = rows[others], rows_of(below, others)
    rest = np.setdiff1d(kept, rows)
    found = [(rest[at], one) for at, one in _evaluated(sign, s[rest], t[rest], rows_of(where, rest))]
    above = _evaluated(sign, s[rows], t[rows], rows_of(where, rows), below)
    return found + [(rows[at], one) for at, one in above]


def _evaluated(sign: float, s: Array, t: Array, where: Place, bulk: Place | None = None) -> list[tuple[Array, Contour]]:
    """Evaluate the contours placed at `where`, and those of A^t placed at `bulk`, in groups of similar node counts."""
    longest = where.line.count if bulk is None else np.maximum(where.line.count, bulk.line.count)
    length = np.ceil(np.log2(longest + 1.0))
    found = []
    with np.errstate(all="ignore"):
        # contours of different rounds stay apart: those of one array share a number of nodes, on which digits depend
        for kind in np.unique(np.stack([s, t, length]), axis=1).T:
            alike = np.flatnonzero((s == kind[0]) & (t == kind[1]) & (length == kind[2]))
            # few lines at a time, so that the arrays of their nodes stay in the cache
            size = max(int(6000 / 2.0 ** kind[2]), 1)
            for rows in (alike[first : first + size] for first in range(0, alike.size, size)):
                below = None if bulk is None else _contour(sign, s[rows], t[rows], rows_of(bulk, rows), None)
                found.append((rows, _contour(sign, s[rows], t[rows], rows_of(where, rows), below)))
    return found


def _contour(sign: float, s: Array, t: Array, where: Place, bulk: Contour | None) -> Contour:
    line, windows = where.line, where.windows
    ends = allocation_law.panels_of(s, t, windows, np.hypot(line.c, line.count * line.step))
    return Contour(sign, s, t, where, allocation_law.powers_on(line, s, t, windows, ends, sign), bulk)


def brackets_at(sign: float, s: Array, t: Array, k: Array, guess: Array) -> tuple[Array, Array, Array, Array]:
    """Place contours for the thresholds k, and return `bracket_near` of each contour at its own threshold."""
    ends = np.empty((4, len(s)))
    for rows, contour in contours_at(sign, s, t, k, guess, TOLERANCE):
        ends[:, rows] = bracket_near(contour, k[rows])
    return ends[0], ends[1], ends[2], ends[3]


@np.errstate(all="ignore")
def bracket_near(found: Contour, k: Array) -> tuple[Array, Array, Array, Array]:
    """Return (lower, estimate, upper, |slope in k|) of E(S - k)_+ or E(k - S)_+, valid within 8 roundoffs of k."""
    low, mid, high, slope = _beside(found, k)
    for one in (found,) if found.bulk is None else (found, found.bulk):
        ends = _integrated(one, k)
        low, mid, high, slope = low + ends[0], mid + ends[1], high + ends[2], slope + ends[3]
    low, high = low - 8.0 * ROUNDOFF * np.abs(low), high + 8.0 * ROUNDOFF * np.abs(high)
    good = low <= high
    low, high = np.where(good, low, -np.inf), np.where(good, high, np.inf)
    return low, np.clip(np.where(good, mid, 0.0), low, high), high, slope


@np.errstate(all="ignore")
def estimate_near(found: Contour, k: Array) -> tuple[Array, Array]:
    """Return only the estimate and the slope of `bracket_near`, in a fraction of the time."""
    mid, slope = _outside(found, k)[:2]
    for one in (found,) if found.bulk is None else (found, found.bulk):
        plain, slope_here = _sums(one, _turned(one, k))
        scale = _scale(one, k)
        mid, slope = mid + scale * plain, slope + scale * slope_here
    return mid, slope


def _scale(found: Contour, k: Array) -> Array:
    return np.exp(found.powers.log_scale - found.sign * found.place.line.c * k)


def _turned(found: Contour, k: Array) -> Array:
    """Return the integrand times z^2 at the nodes, (B, N), divided by `_scale`. The first node's value is halved."""
    turned = found.powers.value * (1.0 + allocation_law.turned_by(-found.sign * found.powers.turn * k[:, None]))
    turned[:, 0] *= 0.5
    return turned


def _sums(found: Contour, turned: Array) -> tuple[Array, Array]:
    """Return the integrals of `turned`/z^2 and of `turned`/z along the line, (B,) each, divided by `_scale`."""
    line = found.place.line
    over = turned / (line.c[:, None] + 1j * found.powers.turn)
    plain = np.sum((over / (line.c[:, None] + 1j * found.powers.turn)).real, axis=1)
    return plain * line.step / np.pi, np.sum(over.real, axis=1) * line.step / np.pi


def _integrated(found: Contour, k: Array) -> tuple[Array, Array, Array, Array]:
    """Return (lower, estimate, upper, slope in k) of the integral on one line, (B,) each."""
    sign, where, powers = found.sign, found.place, found.powers
    c, step, period = where.line.c, where.line.step, 2.0 * np.pi / where.line.step
    scale, turned = _scale(found, k), _turned(found, k)
    plain, slope = _sums(found, turned)
    half = np.ones(powers.turn.shape[1])
    half[0] = 0.5
    size = c[:, None] ** 2 + powers.turn**2
    phase = powers.turn * k[:, None]
    wrong = powers.error * half + np.abs(turned) * ROUNDOFF * (40.0 + turned.shape[1] + 12.0 * phase)
    wrong = np.sum(wrong / size, axis=1) * step / np.pi * (1.0 + 1e-9)
    wrong = wrong + (np.abs(plain) + wrong) * ROUNDOFF * (60.0 + 6.0 * (np.abs(powers.log_scale) + 4.0 * c * k))
    cut = np.exp(where.log_beyond - sign * c * k) * (1.0 + 8.0 * ROUNDOFF * (16.0 + np.abs(where.log_beyond) + c * k))
    ratio = np.exp(-c * period)
    near_images = ratio * ((1.0 if sign > 0 else k) + period) / (1.0 - ratio) ** 2
    right = log_images(k, c, period, where.far, where.log_far, sign)
    images = near_images * (1.0 + 1e-9 + 8.0 * ROUNDOFF * c * period) + np.exp(right + 1e-9)
    return scale * (plain - wrong) - cut - images, scale * plain, scale * (plain + wrong) + cut, scale * slope


def _outside(found: Contour, k: Array) -> tuple[Array, Array, Array]:
    """Return (value, |slope in k|, error bound) of E[S - k; a slot is far] (call) or E[k - S; all in bulk] (put)."""
    sign, s, t, windows = found.sign, found.s, found.t, found.place.windows
    whole: Array = np.isneginf(windows.low)
    if sign > 0:
        root = np.sqrt(1.0 + windows.high_blur**2)
        far, far_x = tail(windows.high / root), tail((windows.high - s) / root)
        gone, gone_x = t * np.log1p(-far), np.log1p(-far_x) + (t - 1.0) * np.log1p(-far)
        first, second = -np.expm1(gone_x), -np.expm1(gone)
        units = (80.0 + 8.0 * (windows.high + s) ** 2) * ROUNDOFF
        return first - k * second, second, units * (first + k * second)
    if whole.all():
        return np.zeros_like(k), np.zeros_like(k), np.zeros_like(k)
    m, mx, shrunk, units = _all_bulk(windows, s, t, whole)
    value, doubt = shrunk * (k * m - mx), units * shrunk * (k * m + mx)
    return np.where(whole, 0.0, value), np.where(whole, 0.0, shrunk * m), np.where(whole, 0.0, doubt)


def _all_bulk(windows: Windows, s: Array, t: Array, whole: Array) -> tuple[Array, Array, Array, Array]:
    """Return E w1, E[X w1] and (E w1)^{t-1} for the bulk's window w1, and a bound of all relative rounding errors."""
    root, at = np.sqrt(1.0 + windows.low_blur**2), np.where(whole, 0.0, windows.low)
    log_m, log_mx = log_ndtr(at / root), log_ndtr((at - s) / root)
    units = (60.0 + 10.0 * t * (1.0 + np.abs(log_m)) + 8.0 * (np.abs(at) + s) ** 2) * ROUNDOFF
    return np.exp(log_m), np.exp(log_mx), np.exp((t - 1.0) * log_m), units


def _beside(found: Contour, k: Array) -> tuple[Array, Array, Array, Array]:
    """Return (lower, estimate, upper, |slope|) of the outcomes that the line omits: a slot far, or all in bulk."""
    sign, s, t, where = found.sign, found.s, found.t, found.place
    windows = where.windows
    whole: Array = np.isneginf(windows.low)
    value, slope, doubt = _outside(found, k)
    low, high = value - doubt, value + doubt
    if sign > 0:
        far = tail(windows.high / np.sqrt(1.0 + windows.high_blur**2))
        lost = tail((windows.end - windows.high) / windows.high_blur) * (tail(windows.end - s) + t * tail(windows.end))
        high = high + _far_but_small(windows, s, t, k, far) + lost
        if found.bulk is not None:
            differs = _bulk_differs(windows, np.minimum(found.bulk.place.windows.end, windows.end), s, t)
            low, high = low - differs, high + differs
        elif not whole.all():
            high = high + np.exp(_bulk_chance(where, k))
    elif not whole.all():
        m, mx, shrunk, _ = _all_bulk(windows, s, t, whole)
        at = np.where(whole, 0.0, windows.low)
        edge = np.log(k) / s + 0.5 * s  # if S > k, some slot has X > k and so u > edge
        # Above `edge`, w1 <= Phi(-d) e^{-d (u - edge)/blur}. So E[w1; u > edge] <= e^leak, E[X w1; ...] <= e^leak_x.
        d = (edge - at) / windows.low_blur
        pull = d / windows.low_blur
        leak_x = log_ndtr(-d) + pull * edge - 0.5 * s * s + 0.5 * (s - pull) ** 2 + log_ndtr(s - pull - edge)
        leak = log_ndtr(-d) + pull * edge + 0.5 * pull**2 + log_ndtr(-pull - edge)
        over = shrunk * (np.exp(leak_x) + t * np.exp(leak) * mx / m) * (1.0 + 1e-6)
        high = high + np.where(whole, 0.0, np.where(d > 0.0, over, np.inf))
    return low, 0.5 * (low + high), high, slope


def _bulk_chance(where: Place, k: Array) -> Array:
    """Return the log of Chernoff's bound of E[(S - k)_+; all slots are in the bulk], (B,); -inf without a bulk."""
    each = where.log_bulk - where.far * k[:, None] - 1.0 - np.log(where.far)
    return np.where(np.isneginf(where.windows.low), -np.inf, np.min(np.where(np.isnan(each), np.inf, each), axis=1))


def _bulk_differs(windows: Windows, end: Array, s: Array, t: Array) -> Array:
    """Bound the change of E(S - k)_+ when w1 1[u <= `end`] replaces the slot weight w1 w2 (README.md, section 1)."""
    low, blur, gap = windows.low, windows.low_blur, windows.high - windows.low
    beyond = tail((end - low) / blur) * (t * tail(end) + tail(end - s))
    both = np.exp(-0.5 * gap * gap / (blur**2 + windows.high_blur**2)) * (t * tail(low) + tail(low - s))
    differs = (beyond + both + tail(gap / windows.high_blur) * (t + 1.0)) * (1.0 + 1e-9)
    return np.where(gap > 0.0, differs, np.inf)


def _far_but_small(windows: Windows, s: Array, t: Array, k: Array, far: Array) -> Array:
    """Bound E[(k - S)_+; a slot is far] from above (README.md, section 1); `far` is the chance that a slot is far."""
    d, blur = allocation_law.ROOM, windows.high_blur
    edge = windows.high - d * blur
    log_below = log_ndtr(-d) - d * edge / blur + 0.5 * (d / blur) ** 2 + log_ndtr(edge - d / blur)
    below = np.fmin(np.exp(log_below + 1e-6), far) * k
    left = k - np.exp(s * edge - 0.5 * s * s - np.log(t)) * (1.0 - 1e-12)
    spread = np.exp(s * s) / t
    c = np.maximum(1.0 - 1.0 / t - left, 1e-3) / spread
    less = -c / t + 0.5 * c * c * spread / t
    log_put = (t - 1.0) * np.log1p(np.minimum(less, 0.0) + 1e-16) + c * left - 1.0 - np.log(c)
    log_put = np.where(less > 0.0, np.inf, log_put)
    put = np.where(left <= 0.0, 0.0, np.fmin(np.exp(log_put + 1e-8), left))
    return t * (below + far * put) * (1.0 + 1e-9)


def reach(s: Array, t: Array) -> Array:
    """Return whether contours can be placed for 1/sigma = s and t slots."""
    return (s > 1e-4) & (s < 20.0) & (t > 1.0) & (t <= 1e9)


@np.errstate(all="ignore")
def put_below(s: Array, t: Array, k: Array) -> Array:
    """Return an upper bound, (B,), of log E(k - S)_+: the least log(e^{ck} E e^{-cS}/(e c)) over several c."""
    deviation = np.sqrt(np.expm1(np.minimum(s * s, 600.0)) / t)
    # the grid of c surrounds two guesses of the saddle point: `near` is for a normal S, `alone` for P(all X < t k)
    near = np.maximum(1.0 - k, deviation) / deviation**2
    edge = (np.log(t * k)) / s + 0.5 * s
    alone = t / (s * k) * np.exp(-0.5 * (edge**2 + np.log(2.0 * np.pi)) - log_ndtr(edge))
    grid = near[:, None] * np.geomspace(0.5, 60.0, 12) ** np.minimum(s, 1.0)[:, None]
    grid = np.concatenate([grid, alone[:, None] * np.geomspace(0.1, 10.0, 9)], axis=1)
    none, one = np.full_like(s, -np.inf), np.ones_like(s)
    start = tilted_mode(s, t, np.max(grid, axis=1)) - REACH
    windows = Windows(none, one, -none, one, start, np.full_like(s, REACH))
    cells = cells_of(s, t, windows, CELLS)
    log = log_power(cells, cuts_of(cells, windows), t, grid, -1.0)[0]
    each = log + grid * k[:, None] - 1.0 - np.log(grid) + 1e-12 * grid * k[:, None] + 1e-9
    return np.min(np.where(np.isnan(each), np.inf, each), axis=1)


class RoundProfile(NamedTuple):
    """K losses that ascend from 0, with lower and upper bounds of delta at each. Every field has shape (K,)."""

    epsilon: np.ndarray
    lower: np.ndarray
    upper: np.ndarray


def losses_for(s: float, t: float, sign: float, dense: bool = False) -> np.ndarray:
    """Choose losses eps for a profile: densely where one round's loss is likely, and less densely along its tail."""
    # `far_from`: the log delta at which the far tail begins; `times`: factor on the number of losses before this tail
    far_from, times = (LAST_LOG_DELTA, DENSE) if dense else (-31.0, 1.0)
    deviation = max(float(_deviation_of_loss(np.asarray(s), np.asarray(t))), LEAST_DEVIATION)
    reach = min(0.5 * s * s + 12.0 * s, LARGEST_LOSS)
    scan = np.concatenate([np.linspace(0.0, 1.0, SCAN) * min(12.0 * deviation, reach), np.linspace(0.0, reach, SCAN)])
    scan = np.unique(scan)
    log_delta = _guess(sign, np.full(scan.size, s), np.full(scan.size, t), scan)
    log_delta = np.minimum.accumulate(np.where(np.isnan(log_delta), LAST_LOG_DELTA, log_delta))
    last = int(np.argmax(log_delta <= LAST_LOG_DELTA)) if log_delta[-1] <= LAST_LOG_DELTA else scan.size - 1
    scan, log_delta = scan[: max(last, 2) + 1], log_delta[: max(last, 2) + 1]
    middle = 0.5 * (scan[1:] + scan[:-1])
    bulk = np.exp(-0.5 * np.square(middle / (BULK_SPREAD * deviation)))
    # 110 losses lie in the bulk. They decide how wide the bracket of a composition of many rounds is.
    weight = 110 * bulk / (BULK_SPREAD * deviation * np.sqrt(0.5 * np.pi)) * np.diff(scan)
    # From one loss to the next, log delta falls by at most 0.4/times nats, and by at most 1.5 nats in the far tail,
    # which matters only in compositions of few rounds.
    before_tail = log_delta[1:] > far_from
    weight += -np.diff(log_delta) / np.where(before_tail, 0.4 / times, 1.5)
    # Where one slot makes up most of S, log delta falls slowly. So losses before the tail are at most 0.06 apart, too.
    weight += np.where(before_tail, np.diff(scan) / 0.06, 0.0)
    count = np.concatenate([[0.0], np.cumsum(weight)])
    eps = np.interp(np.arange(np.ceil(count[-1]) + 1.0) * count[-1] / np.ceil(count[-1]), count, scan)
    return eps[np.concatenate([[True], np.diff(eps) > LEAST_GAP * max(deviation, 1e-3)])]


def round_profiles(s: np.ndarray, t: np.ndarray, sign: float, dense: bool = False) -> list[RoundProfile]:
    """Return profiles for s, t, (M,): of E(S - e^eps)_+ (remove, sign 1) or of e^eps E(e^-eps - S)_+ (add, sign -1)."""
    each = [losses_for(float(one), float(slots), sign, dense) for one, slots in zip(s, t, strict=True)]
    sizes = [eps.size for eps in each]
    asked = _Asked(
        sign, np.repeat(s, sizes), np.repeat(t, sizes), np.concatenate(each), np.repeat(range(s.size), sizes)
    )
    with np.errstate(all="ignore"):
        k = np.exp(sign * asked.eps)
        low, high = allocation_law.bounds(sign, asked.s, asked.t, k)
        if sign < 0:
            # bounds are raised to e^-660 at least, so that exp does not underflow
            high = np.fmin(high, np.exp(np.maximum(put_below(asked.s, asked.t, k), -660.0)))
            low, high = low / k, high / k
        else:
            high = np.fmin(high, allocation_law.one_slot_above(asked.s, asked.t, k))
        low, high = _narrowed(asked, *_outward(low, high), dense)
        low, high = np.fmax(low, 0.0), np.fmin(np.where(np.isnan(high), 1.0, high), 1.0)
        low = np.where(low <= high, low, 0.0)
        ends = np.cumsum(sizes)[:-1]
        found = zip(each, np.split(low, ends), np.split(high, ends), strict=True)
        return [falling(*one) for one in found]


class _Asked(NamedTuple):
    """The losses of all rounds, one round after the other. All arrays have shape (K,)."""

    sign: float
    s: np.ndarray
    t: np.ndarray
    eps: np.ndarray
    owner: np.ndarray  # index of the round that each loss belongs to


def falling(eps: np.ndarray, low: np.ndarray, high: np.ndarray) -> RoundProfile:
    """Widen bounds of delta by the effect of rounding e^eps, make them fall with eps, and return them as a profile."""
    # e^eps has a relative error of at most `off`. Delta is convex in e^eps, so it changes by at most `wrong`.
    off = 4.0 * ROUNDOFF * (1.0 + eps[1:])
    wrong = np.concatenate([[0.0], off * high[:-1] / -np.expm1(-np.diff(eps))])
    low = np.maximum(low - wrong, 0.0)
    high = np.minimum(high + wrong, 1.0)
    return RoundProfile(eps, np.maximum.accumulate(low[::-1])[::-1], np.minimum.accumulate(high))


def _narrowed(asked: _Asked, low: np.ndarray, high: np.ndarray, dense: bool) -> tuple[np.ndarray, np.ndarray]:
    """Narrow the theorems' bounds by contours where possible. A round whose contours fail keeps its bounds."""
    rows = np.flatnonzero(reach(asked.s, asked.t))
    if rows.size == 0:
        return low, high
    try:
        some = rows_of(asked, rows)
        least, most = _by_parity(some, *_by_contours(some, low[rows], high[rows], dense), dense)
    except (ArithmeticError, ValueError, IndexError, MemoryError):
        rounds = np.unique(asked.owner[rows])
        if rounds.size > 1:
            for one in rounds:
                at = asked.owner == one
                low[at], high[at] = _narrowed(rows_of(asked, at), low[at], high[at], dense)
        return low, high
    low[rows], high[rows] = least, most
    return low, high


def _guess(sign: float, s: np.ndarray, t: np.ndarray, eps: np.ndarray) -> np.ndarray:
    """Estimate log(delta). Nothing certified depends on this estimate."""
    with np.errstate(all="ignore"):
        found = allocation_law.guess(sign, s, t, np.exp(sign * eps))
    return found - min(sign, 0.0) * eps


def _outward(low: np.ndarray, high: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return low * (1.0 - 8.0 * ROUNDOFF), high * (1.0 + 8.0 * ROUNDOFF)


def _by_contours(asked: _Asked, low: np.ndarray, high: np.ndarray, dense: bool) -> tuple[np.ndarray, np.ndarray]:
    """Narrow the theorems' bounds by contours. A contour's bracket that contradicts the theorems is not used."""
    sign, s, t, eps, owner = asked
    least, most = low.copy(), high.copy()
    logs = np.clip(_guess(sign, s, t, eps), np.log(np.maximum(low, 1e-295)), np.log(np.maximum(high, 1e-295)))
    last = np.searchsorted(owner, owner, side="right") - 1
    hopeless = np.zeros(eps.size, bool)
    # A delta below 1e-30 gets no contour. The theorems' bounds suffice, since profiles end at a delta of about 1e-30.
    wide = np.flatnonzero(~(high - low <= _wanted(logs) * high) & (high > 1e-30))
    # Losses with similar `apart` share a contour. Where one slot decides whether S > k, the part that a contour leaves
    # out depends on that slot's size, about e^eps - 1. Below three standard deviations of the loss, the size
    # hardly affects `apart`.
    apart = np.log(np.expm1(np.abs(eps)) + 3.0 * np.maximum(_deviation_of_loss(s, t), LEAST_DEVIATION))
    for turn, (together, distance) in enumerate(READ_TOGETHER):
        if wide.size == 0:
            break
        groups = list(_in_groups(wide, owner, together, apart, distance))
        # Place a call's contour for the loss after the group: slots that are far there are far for the whole group.
        place = lambda rows: min(int(rows[-1]) + 1, int(last[rows[0]])) if sign > 0 else int(rows[rows.size // 2])
        placed = np.array([place(rows) for rows in groups])
        hopeless[wide] = True  # stays True for losses whose contour is not evaluated
        most_long = None if dense else 3 if sign > 0 else 0
        for some, contour in _placed(asked, logs, placed, CUT_OFF[min(turn, 1)], most_long):
            at = np.concatenate([groups[one] for one in some])
            each = np.repeat(np.arange(some.size), [groups[one].size for one in some])
            hopeless[at] = contour.place.line.count[each] > LONG
            lower, estimate, upper = _read(contour, each, eps[at])
            good = (lower <= upper) & (lower <= most[at]) & (upper >= least[at])
            low[at] = np.where(good, np.fmax(low[at], lower), low[at])
            high[at] = np.where(good, np.fmin(high[at], upper), high[at])
            known = good & (upper - lower <= KNOWN * upper) & (estimate > 0.0)
            logs[at] = np.where(known, np.log(np.where(known, estimate, 1.0)), logs[at])
        wide = ~(high - low <= _wanted(logs) * high)
        # a loss with delta below e^-42 gets no further contour, which would hardly narrow its bracket
        wide = np.flatnonzero(wide & (logs > -42.0) & ~hopeless)
    return low, high


def _by_parity(asked: _Asked, low: np.ndarray, high: np.ndarray, dense: bool) -> tuple[np.ndarray, np.ndarray]:
    """Where brackets of delta_remove are wide, narrow them by E(k - S)_+ = delta_remove - 1 + k, with k = e^eps."""
    width = _wanted(np.log(np.maximum(0.5 * (low + high), 1e-295)))
    # the absolute error of E(k - S)_+ is too large for a delta_remove below 1e-6
    rows = np.flatnonzero(~(high - low <= width * high) & (high > 1e-6) & (asked.eps < 30.0))
    if asked.sign < 0 or rows.size == 0:
        return low, high
    k, gap, wrong = np.exp(asked.eps[rows]), -np.expm1(asked.eps[rows]), 32.0 * ROUNDOFF
    least, most = np.maximum((low[rows] - gap) / k - wrong, 0.0), (high[rows] - gap) / k + wrong
    put = rows_of(asked, rows)._replace(sign=-1.0, eps=-asked.eps[rows])
    least, most = _by_contours(put, least, most, dense)
    low[rows] = np.fmax(low[rows], gap + k * (least - wrong))
    high[rows] = np.fmin(high[rows], gap + k * (most + wrong))
    return low, high


def _in_groups(
    rows: np.ndarray, owner: np.ndarray, together: int, apart: np.ndarray, distance: float
) -> Iterator[np.ndarray]:
    """Yield groups of at most `together` rows of one round. Within a group, `apart` differs by at most `distance`."""
    for some in np.split(rows, np.flatnonzero(np.diff(owner[rows])) + 1):
        first = 0
        while first < some.size:
            near = int(np.searchsorted(apart[some], apart[some[first]] + distance, side="right"))
            end = max(min(first + together, near), first + 1)
            yield some[first:end]
            first = end


def _deviation_of_loss(s: np.ndarray, t: np.ndarray) -> np.ndarray:
    """Return the standard deviation that one round's loss would have if it were normal."""
    return np.sqrt(np.log1p(np.expm1(np.minimum(s * s, 600.0)) / t))


def _wanted(logs: np.ndarray) -> np.ndarray:
    return np.select([logs > log for log, _ in WIDTHS], [width for _, width in WIDTHS])


def _read(contour: Contour, each: np.ndarray, eps: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (lower, estimate, upper) of delta at losses eps. Row `each[i]` of the contour is used for eps[i]."""
    lower, estimate, upper, _ = bracket_near(rows_of(contour, each), np.exp(contour.sign * eps))
    if contour.sign < 0:
        lower, estimate, upper = (x * np.exp(eps) for x in (lower, estimate, upper))
    lower, upper = _outward(lower, upper)
    return lower, estimate, upper


def _placed(
    asked: _Asked, logs: np.ndarray, rows: np.ndarray, cut_off: float, most_long: int | None
) -> list[tuple[np.ndarray, Contour]]:
    sign, s, t, eps, _ = asked
    s, t, eps, logs = s[rows], t[rows], eps[rows], logs[rows]
    shift = np.where(sign > 0, 0.0, -eps)  # log E(S - k)_+ or log E(k - S)_+ is log(delta) + shift
    return contours_at(sign, s, t, np.exp(sign * eps), logs + shift, cut_off * _wanted(logs), most_long)
