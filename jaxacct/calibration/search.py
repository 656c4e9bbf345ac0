"""The search of every calibration: the least protective value whose certified epsilon meets a target (README.md).

A value *holds* where the certified upper end of epsilon, evaluated at that very value, is at most the target.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np

from jaxacct.core.bounds import Bounds, in_order
from jaxacct.core.progress import waiting
from jaxacct.engines.protocol import Effort

CLAIMED = ("ok", "not_binding", "loose")
"""Statuses of a value whose certified epsilon meets the target."""
AIM = 0.15
"""Fast solves aim below the target by AIM * rtol, relatively, so that the certified epsilon usually meets it."""
USUAL_SLOPE_OF_NOISE, USUAL_SLOPE = -1.3, 1.0
"""First guesses of d log(epsilon)/dx, where x = log(value): the first if epsilon falls in x, the second if it rises."""
LARGEST_EXCESS = 8.0
"""Bound to which |log(epsilon/target)| is clipped. If epsilon is unknown, the logarithm counts as LARGEST_EXCESS."""
WIDE = 0.1
"""A bracket of epsilon is wide above this relative width: near values cannot be told apart, so a search ends sooner."""
ROUGH_EFFORTS = Effort(0.3, 2**25, in_search=True), Effort(2.5e-3, 2**27, in_search=True)
"""The two efforts that start a search. The first has memory for lattices of 2^15 or 2^16 nodes, the second for 2^18."""
AT_LIMIT = 1e-12
"""A value counts as a limit of the search if log(value) and log(limit) differ by less than this."""

Evaluate = Callable[[np.ndarray, np.ndarray], Bounds]
"""Maps (rows, a value for each row) to certified Bounds of epsilon."""


class Search(NamedTuple):
    """The settings of a search; arrays have one element for each row."""

    evaluate: Evaluate
    target: np.ndarray
    lowest: np.ndarray  # > 0
    highest: np.ndarray
    falls: np.ndarray  # whether epsilon falls as the value grows
    rtol: float  # a row is finished once its upper epsilon is below the target by at most 0.5 * rtol * `scale`
    closest: float = 1e-12  # or once a value that holds is closer than this in log(value) to one that misses
    whole: bool = False  # whether values are whole numbers
    infeasible: str = "infeasible"  # status of a row in which no value holds
    privates_first: np.ndarray | None = None  # rows that first try the least protective limit; None means no row
    scale: np.ndarray | None = None  # unit of distances between epsilon and the target; None means the target
    says_best: bool = True  # whether one more value may be evaluated to show that the found value is the best
    all_there_is: bool = False  # whether values end at the least protective limit, as a sampling probability does at 1
    reach: float = 0.3  # longest first step of x = log(value)
    roughly: Callable[[np.ndarray, np.ndarray, Effort], Bounds] | None = None  # `evaluate` for a given effort

    def closeness(self, rows: np.ndarray | slice = slice(None)) -> np.ndarray:
        """Return s = rtol * scale / target. A row is done once (1 - s/2) target <= upper end of epsilon <= target."""
        target = self.target[rows]
        return self.rtol * (target if self.scale is None else self.scale[rows]) / target


class Start(NamedTuple):
    """The x = log(value) at which the search of some rows starts, with what is known at this x."""

    x: np.ndarray
    slope: np.ndarray  # d log(epsilon)/dx; 0 where it is not known
    solved: np.ndarray  # whether x is thought to be the solution


class BestValues(NamedTuple):
    """The best value of each row, with its certified epsilon; NaN where no value holds."""

    value: np.ndarray
    status: np.ndarray  # as in `Calibration`
    lower: np.ndarray
    estimate: np.ndarray
    upper: np.ndarray
    kind: np.ndarray
    word: np.ndarray  # `Bounds.status` of the certified epsilon; where no value holds, the same as `status`
    engine: np.ndarray
    shown: np.ndarray  # whether the value is shown to be the best one (see `_judged`)

    def bounds(self, shape: tuple[int, ...]) -> Bounds:
        """Return the certified epsilon at the values, as Bounds whose arrays have this shape."""
        columns = (self.lower, self.estimate, self.upper, self.kind, self.word, self.engine)
        return Bounds(*(column.reshape(shape) for column in columns))

    def keep(self, rows: np.ndarray, values: np.ndarray, bounds: Bounds, mask: np.ndarray, status: str) -> None:
        """Record the values of some rows, where the mask is true, with their status and certified epsilon."""
        rows = rows[mask]
        self.value[rows], self.status[rows] = values[mask], status
        for name in ("lower", "estimate", "upper", "kind", "engine"):
            getattr(self, name)[rows] = np.asarray(getattr(bounds, name))[mask]
        self.word[rows] = np.asarray(bounds.status)[mask]

    def fail(self, rows: np.ndarray, status: str) -> None:
        """Record that no value of some rows holds, with this status. Values that were kept before become NaN."""
        self.status[rows] = self.word[rows] = status
        for column in (self.value, self.lower, self.estimate, self.upper):
            column[rows] = np.nan


def certified_search(search: Search, start: Callable[[np.ndarray], Start]) -> BestValues:
    """Return each row's least protective value that holds. `start` is called once, for rows that no limit settles."""
    size, own = search.target.size, search.evaluate
    found, missed, steep = _nothing_yet(size), np.full(size, np.nan), np.zeros(size, bool)

    def evaluate(rows: np.ndarray, values: np.ndarray) -> Bounds:
        """Return the Bounds of epsilon. Record in `missed` each row's most protective value that misses the target."""
        work.done = int(np.sum(np.isin(found.status, CLAIMED)))
        bounds = own(rows, values)
        some = _lower_end(bounds) > search.target[rows]
        at, new = rows[some], values[some]
        missed[at] = np.where(search.falls[at], np.fmax(missed[at], new), np.fmin(missed[at], new))
        return bounds

    with waiting(size) as work:
        search = search._replace(evaluate=evaluate)
        rows = _settled_by_limits(search, found)
        begin = start(rows)
        if search.roughly is not None and not search.whole:
            begin, search = _approached(search, rows, begin)
        if search.whole:
            _whole_numbers(search, found, rows, begin.x)
        else:
            slope = _secant(search, found, rows, begin)[2]
            steep[rows] = begin.solved & (np.abs(slope) * least_apart(search.rtol) >= search.closeness(rows))
        claimed = np.isin(found.status, CLAIMED)
        found.fail(np.flatnonzero(claimed & ~((found.upper <= search.target) & np.isfinite(found.value))), "infeasible")
        _judged(search, found, missed, steep)
    return found


def _nothing_yet(size: int) -> BestValues:
    """Return the result of `size` rows before any value is known."""
    value, low, middle, high = (np.full(size, np.nan) for _ in range(4))
    status, kind, word, engine = (np.full(size, x, dtype="<U28") for x in ("infeasible", "certified", "infeasible", ""))
    return BestValues(value, status, low, middle, high, kind, word, engine, np.zeros(size, bool))


def _approached(search: Search, rows: np.ndarray, begin: Start) -> tuple[Start, Search]:
    """Search with each of ROUGH_EFFORTS. Return a start nearer to the solutions, and the search to run from there."""
    narrow, target = search.evaluate, search.target
    hopeless, guessed = np.zeros(target.size, bool), np.zeros(target.size, bool)
    known: dict[tuple[Effort, bytes, bytes], Bounds] = {}

    def roughly(rows: np.ndarray, values: np.ndarray, effort: Effort) -> Bounds:
        asked = effort, rows.tobytes(), values.tobytes()
        if asked not in known:
            assert search.roughly is not None
            known[asked] = search.roughly(rows, values, effort)
        return known[asked]

    def steering(rows: np.ndarray, values: np.ndarray, effort: Effort) -> Bounds:
        """Return estimates of epsilon as `Bounds` that bound nothing: they only steer, and no claim uses them."""
        bounds = roughly(rows, values, effort)
        middle, high = bounds.estimate, bounds.upper
        low = np.where(np.equal(bounds.kind, "certified"), bounds.lower, middle)
        with np.errstate(invalid="ignore"):
            # if a bracket is this wide, relatively, after the last of ROUGH_EFFORTS, no effort makes it narrow
            hopeless[rows] = (np.asarray(bounds.status) == "width") & ~(high - low <= 0.05 * high)
        least = _lower_end(bounds)
        guessed[rows] |= hopeless[rows] & (least < high)
        guess = np.where(hopeless[rows], np.clip(target[rows], least, high), middle)
        return Bounds(guess, guess, guess, "certified", "ok")

    def evaluate(rows: np.ndarray, values: np.ndarray) -> Bounds:
        hard, easy = np.flatnonzero(hopeless[rows]), np.flatnonzero(~hopeless[rows])
        pieces = [(hard, roughly(rows[hard], values[hard], ROUGH_EFFORTS[-1]))] if hard.size else []
        return in_order([*pieces, (easy, narrow(rows[easy], values[easy]))] if easy.size else pieces)

    left = np.flatnonzero(~begin.solved)
    for effort in ROUGH_EFFORTS if left.size else ():
        # a row is finished once |epsilon/target - 1| is at most about 0.25 times the effort's rtol
        above = 1.0 + 0.25 * effort.rtol
        rough = search._replace(evaluate=partial(steering, effort=effort), rtol=effort.rtol, target=target * above)
        some = Start(*(column[left] for column in begin))
        x, excess, slope = _secant(rough, _nothing_yet(target.size), rows[left], some)
        due = np.log1p(-0.2 * search.closeness(rows[left])) - np.log(above) - excess
        slope = np.where(guessed[rows[left]], 0.0, slope)
        near = (slope != 0.0) & (np.abs(due) < effort.rtol)
        begin.x[left], begin.slope[left] = x + np.where(near, due / np.where(near, slope, 1.0), 0.0), slope
        search, guessed[:] = search._replace(reach=1.0), False
    return begin._replace(solved=begin.solved | (begin.slope != 0.0)), search._replace(evaluate=evaluate)


def _lower_end(found: Bounds | BestValues) -> np.ndarray:
    """Return the lower end of each bracket. A bracket of kind "bound" has no lower end, so return its upper end."""
    return np.where(np.equal(found.kind, "certified"), found.lower, found.upper)


def _judged(search: Search, found: BestValues, missed: np.ndarray, steep: np.ndarray) -> None:
    """Write the status of each value that meets the target, and whether brackets show that this value is the best.

    A value is the best if the lower end of epsilon exceeds the target at another value, which protects slightly less.
    A value is also the best if both ends of its epsilon are within rtol of the target and epsilon changes fast enough
    with the value (`steep`).
    """
    apart = max(least_apart(search.rtol), search.closest)
    bolder = np.where(search.falls, -1.0, 1.0)
    with np.errstate(invalid="ignore", divide="ignore"):
        distance = bolder * np.log(missed / found.value)
        shown = (distance > 0.0) & (distance <= apart * (1.0 + 1e-9))
        if search.whole:
            shown |= missed == found.value + bolder
        near = _lower_end(found) >= search.target * (1.0 - search.closeness())
    inside = np.flatnonzero(found.status == "ok")
    best = (shown | (near & steep))[inside]
    asked = ~best & (_lower_end(found) >= (1.0 - WIDE) * found.upper)[inside] & search.says_best
    rows = inside[asked]
    if rows.size:
        values = beside(found.value[rows], search.falls[rows], apart, search.whole)
        bounds = search.evaluate(rows, np.clip(values, search.lowest[rows], search.highest[rows]))
        best[asked] = _lower_end(bounds) > search.target[rows]
    conclude(found, inside, best)
    found.shown[found.status == "not_binding"] = search.all_there_is


def conclude(found: BestValues, rows: np.ndarray, best: np.ndarray) -> None:
    """Record in `found.shown` whether the values in `rows` are the best. Where not, the status becomes "loose"."""
    found.shown[rows] = best
    found.status[rows[~best]] = "loose"


def beside(values: np.ndarray, falls: np.ndarray, apart: float, whole: bool) -> np.ndarray:
    """Return values that protect less by the relative distance `apart`; if `whole`, at least the next whole number."""
    bolder = np.where(falls, -1.0, 1.0)
    others = values * np.exp(bolder * apart)
    return np.where(np.abs(others - values) < 1.0, values + bolder, np.rint(others)) if whole else others


def least_apart(rtol: float) -> float:
    """Return the relative distance d. A value counts as the best if one that protects less by up to d does not hold."""
    return min(10.0 * rtol, max(0.01, rtol))


def start_at(values: np.ndarray) -> Callable[[np.ndarray], Start]:
    """Return a function from rows to their `Start` at log(values), with unknown slopes; `values` has one per row."""
    x = np.log(values)
    return lambda rows: Start(x[rows], np.zeros(rows.size), np.zeros(rows.size, bool))


def status_of_upper_end(upper: float, target: float, share: float, at_limit: bool) -> str:
    """Return the status of a value by its upper epsilon: "ok" if at most `share` of the target stays unspent.

    >>> status_of_upper_end(1.9999, 2.0, 1e-3, False), status_of_upper_end(1.5, 2.0, 1e-3, True)
    ('ok', 'not_binding')
    """
    if upper >= target * (1.0 - share):
        return "ok"
    return "not_binding" if at_limit else "loose"


def least_private(
    upper: Callable[[np.ndarray], np.ndarray],
    target: float,
    start: float,
    limits: tuple[float, float],
    *,
    falls: bool,
    rtol: float,
    closest: float = 1e-12,
    whole: bool = False,
    margin: float = 0.0,  # share of the target that stays unspent, since another evaluation may differ by rounding
) -> float:
    """Return the least protective value that holds by upper bounds of epsilon (`upper`) alone; NaN if none holds."""

    def evaluate(rows: np.ndarray, values: np.ndarray) -> Bounds:
        found = np.asarray(upper(values), np.float64)
        ends = np.where(np.isnan(found), np.inf, found)  # a value whose epsilon is unknown misses the target
        return Bounds(np.zeros_like(ends), ends, ends, "bound", "ok")

    one = np.ones(1)
    search = Search(
        evaluate=evaluate,
        target=one * target * (1.0 - margin),
        lowest=one * limits[0],
        highest=one * limits[1],
        falls=np.array([falls]),
        rtol=rtol,
        closest=closest,
        whole=whole,
        says_best=False,
    )
    return float(certified_search(search, start_at(one * min(max(start, limits[0]), limits[1]))).value[0])


def _settled_by_limits(search: Search, found: BestValues) -> np.ndarray:
    """In the rows of `privates_first`, keep the limit that protects least where it holds. Return all other rows."""
    rows = np.arange(search.target.size)
    tried = rows[:0] if search.privates_first is None else rows[search.privates_first]
    if tried.size == 0:
        return rows
    values = np.where(search.falls, search.lowest, search.highest)[tried]
    bounds = search.evaluate(tried, values)
    holds = bounds.upper <= search.target[tried]
    found.keep(tried, values, bounds, holds, "not_binding")
    return np.setdiff1d(rows, tried[holds])


def _values(search: Search, rows: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Return e^x inside the limits; where x is at a limit, return exactly that limit."""
    low, high = search.lowest[rows], search.highest[rows]
    with np.errstate(over="ignore"):
        values = np.clip(np.exp(x), low, high)
    values = np.where(np.abs(x - np.log(low)) < AT_LIMIT, low, values)
    return np.where(np.abs(x - np.log(high)) < AT_LIMIT, high, values)


def _secant(
    search: Search, found: BestValues, rows: np.ndarray, start: Start
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Search by a bracketed secant. Return the last x, log(epsilon/target) there, and the slope (0 if not known)."""
    low, high, falls = np.log(search.lowest[rows]), np.log(search.highest[rows]), search.falls[rows]
    private_limit, bold_limit = np.where(falls, high, low), np.where(falls, low, high)
    size = rows.size
    x, kept, first = np.clip(start.x, low, high), private_limit.copy(), start.slope
    # safe: the last x that met the target; bold: the last x that missed it; NaN if there is none yet
    safe, bold = np.full(size, np.nan), np.full(size, np.nan)
    last_x, last_excess = np.full(size, np.nan), np.full(size, np.nan)
    usual = np.where(falls, USUAL_SLOPE_OF_NOISE, USUAL_SLOPE)
    measured = np.isfinite(first) & (first * usual > 0.0)
    slope = np.where(measured, first, usual)
    # the longest allowed step of x; it doubles whenever the secant proposes a longer step
    reach = np.full(size, search.reach)
    closeness = search.closeness(rows)
    aim = np.log1p(-0.2 * closeness)
    active = np.ones(size, bool)
    # at most 60 evaluations of one row; bisection alone needs 50
    for turn in range(60):
        here = np.flatnonzero(active)
        if here.size == 0:
            break
        at, target = x[here], search.target[rows[here]]
        values = _values(search, rows[here], at)
        bounds = search.evaluate(rows[here], values)
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = np.log(bounds.upper / target)
        # `excess` is log(epsilon/target), which is positive where epsilon is too large
        excess = np.where(np.isnan(ratio), LARGEST_EXCESS, np.clip(ratio, -LARGEST_EXCESS, LARGEST_EXCESS))
        holds = bounds.upper <= target
        close = holds & (bounds.upper >= target * (1.0 - 0.5 * closeness[here]))
        at_bold = holds & (np.abs(at - bold_limit[here]) < AT_LIMIT)
        at_private = ~holds & (np.abs(at - private_limit[here]) < AT_LIMIT)
        never = at_private & ~np.isfinite(safe[here])
        nearer = np.abs(at - bold_limit[here]) < np.abs(kept[here] - bold_limit[here])
        better = holds & (nearer | (found.status[rows[here]] == "infeasible"))
        found.keep(rows[here], values, bounds, better, "ok")
        found.keep(rows[here], values, bounds, at_bold, "not_binding")
        found.fail(rows[here[never]], search.infeasible)
        kept[here[better]] = at[better]
        safe[here], bold[here] = np.where(holds, at, safe[here]), np.where(holds, bold[here], at)
        with np.errstate(invalid="ignore", divide="ignore"):
            fresh = (excess - last_excess[here]) / (at - last_x[here])
            sound = np.isfinite(fresh) & (fresh * slope[here] > 0) & (np.abs(excess) < LARGEST_EXCESS)
            slope[here], measured[here] = np.where(sound, fresh, slope[here]), measured[here] | sound
            step = (aim[here] - excess) / slope[here]
            # where epsilon is 0 or unknown, `excess` shows only the direction of the step, not its length
            far = np.abs(excess) >= LARGEST_EXCESS
            step = np.where(far, -2.0 * np.sign(excess) * np.sign(slope[here]) * reach[here], step)
            unsure = (np.asarray(bounds.status) == "width") & (bounds.lower > 0.0)
            wide = unsure & (bounds.upper - bounds.lower > WIDE * bounds.upper)
            close |= holds & wide & (target - bounds.upper < WIDE * (bounds.upper - bounds.lower))
            met = np.abs(safe[here] - bold[here]) < np.where(wide, WIDE * search.rtol, search.closest)
        last_x[here], last_excess[here] = at, excess
        active[here[close | at_bold | at_private | met]] = False
        following = np.clip(at + np.clip(step, -reach[here], reach[here]), low[here], high[here])
        bracketed = np.isfinite(safe[here]) & np.isfinite(bold[here])
        ends = np.sort(np.stack([safe[here], bold[here]]), axis=0)
        outside = ~((following > ends[0]) & (following < ends[1])) | (turn % 6 == 5)
        x[here] = np.where(bracketed & outside, 0.5 * (safe[here] + bold[here]), following)
        reach[here] = np.where(np.abs(step) > reach[here], 2.0 * reach[here], reach[here])
    return last_x, last_excess, np.where(measured, slope, 0.0)


def _whole_numbers(search: Search, found: BestValues, rows: np.ndarray, start: np.ndarray) -> None:
    """Search for the least protective whole number that holds: outwards in growing strides, then inside a bracket."""
    low, high = search.lowest[rows], search.highest[rows]
    bolder = np.where(search.falls[rows], -1.0, 1.0)  # the direction in which values protect less
    bold_limit, private_limit = np.where(bolder > 0, high, low), np.where(bolder > 0, low, high)
    with np.errstate(over="ignore"):
        n = np.clip(np.floor(np.exp(start) * (1.0 + bolder * AIM * search.rtol)), low, high)
    holds_at, fails_at = np.full(rows.size, np.nan), np.full(rows.size, np.nan)
    # log(epsilon/target) at `holds_at` and at `fails_at`
    holds_excess, fails_excess = np.zeros(rows.size), np.zeros(rows.size)
    stride = np.ones(rows.size)  # length of the next step outwards
    active = np.ones(rows.size, bool)
    turn = 0
    while active.any():
        here = np.flatnonzero(active)
        bounds = search.evaluate(rows[here], n[here])
        with np.errstate(divide="ignore", invalid="ignore"):
            excess = np.log(bounds.upper / search.target[rows[here]])
        good = bounds.upper <= search.target[rows[here]]
        found.keep(rows[here], n[here], bounds, good, "ok")
        at_limit = good & (n[here] == bold_limit[here])
        found.keep(rows[here], n[here], bounds, at_limit, "not_binding")
        never = ~good & (n[here] == private_limit[here])
        found.fail(rows[here[never]], search.infeasible)
        holds_at[here] = np.where(good, n[here], holds_at[here])
        fails_at[here] = np.where(good, fails_at[here], n[here])
        holds_excess[here] = np.where(good, np.maximum(excess, -LARGEST_EXCESS), holds_excess[here])
        fails_excess[here] = np.where(good, fails_excess[here], np.fmin(excess, LARGEST_EXCESS))
        active &= ~(np.abs(fails_at - holds_at) <= 1.0)
        active[here[at_limit | never]] = False
        bracketed = np.isfinite(fails_at) & np.isfinite(holds_at)
        outwards = np.where(np.isfinite(holds_at), holds_at + bolder * stride, fails_at - bolder * stride)
        n = np.where(bracketed, np.floor(0.5 * (holds_at + fails_at)), np.clip(outwards, low, high))
        # log(epsilon) is interpolated only where `holds_at` and `fails_at` differ by more than a factor of 2
        far = np.maximum(holds_at, fails_at) > 2.0 * np.minimum(holds_at, fails_at)
        # every third turn bisects, since interpolation of log(epsilon) in log(n) may make little progress
        if turn % 3:
            with np.errstate(divide="ignore", invalid="ignore"):
                share = holds_excess / (holds_excess - fails_excess)
                line = np.floor(holds_at * (fails_at / holds_at) ** share)
            inside = np.sort(np.stack([holds_at, fails_at]), axis=0) + np.array([[1.0], [-1.0]])
            n = np.where(bracketed & far & np.isfinite(line), np.clip(line, *inside), n)
        stride = np.where(bracketed, stride, 4.0 * stride)
        turn += 1
