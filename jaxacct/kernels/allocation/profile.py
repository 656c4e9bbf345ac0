"""The profile of one round at many losses at once: certified brackets of delta, for the pairs that are composed.

Contours are placed at some of the losses and read at their neighbours too, which costs little.  Where such a bracket is
wide a contour of its own is placed.  Theorems answer what no contour does.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from jaxacct.core.floats import ROUNDOFF
from jaxacct.kernels.allocation import theorems
from jaxacct.kernels.allocation.bracket import Contour, bracket_near, contours_at, rows_of

__all__ = ["LARGEST_LOSS", "RoundProfile", "losses_for", "round_profile", "round_profiles"]

READ_TOGETHER = ((60, 0.3), (15, 0.15), (2, 0.1))
"""Losses that are read from one contour, and how far they may lie apart; what is too wide is asked again, turn by turn.

The distance is that of log(e^eps - 1 + NEAR deviations): where one slot decides, what is left out of a contour depends
on how large that slot is, and for a loss near 0 it hardly matters."""
NEAR = 3.0
"""Deviations of one round's loss within which losses are near 0."""
CUT_OFF = 5e-3, 1e-3
"""What a contour leaves out, as a share of the width wanted: where it is read first, and where it is asked again."""
WIDTHS = ((-9.0, 1e-5), (-15.0, 1e-4), (-20.0, 1e-3), (-36.0, 1e-2), (-42.0, 0.1), (-np.inf, 0.3))
"""(log of delta, relative width): above such a delta a wider bracket gets a contour of its own.

The largest deltas decide for many rounds.  There chords between losses are off by a few 1e-4 of delta, and where the
smaller ones are, by a few hundredths."""
ALONE_FROM = -42.0
"""log of the delta below which no loss gets a contour of its own: there its bracket is hardly narrower."""
LONG = 1000
"""Nodes of a line from which on what it leaves wide is not asked again: longer lines gain little, and cost seconds."""
KNOWN = 0.3
"""Relative width of a bracket from which on its estimate takes the place of the guess."""
LEAST_S, MOST_S, MOST_SLOTS = 1e-4, 20.0, 1e9
"""1/sigma between which, and slots up to which, contours are placed."""
LAST_LOG_DELTA = -69.0
"""log of the delta at which the losses end; what is left there is mass at infinity."""
FAR_LOG_DELTA = -31.0
"""log of the delta from which the losses lie further apart."""
LARGEST_LOSS = 600.0
"""e^eps and products with it stay within float64 up to here."""
BULK_POINTS = 110
"""Losses within a few deviations of the loss of one round; they decide the width for many rounds."""
BULK_SPREAD = 2.0
"""How far they spread, in deviations: the best density is the cube root of the law's, which is sqrt(3) as wide."""
NATS, FAR_NATS = 0.4, 1.5
"""By how much log delta falls from one loss to the next, beyond the bulk: they decide the width for few rounds."""
MOST_GAP = 0.06
"""Largest distance of two losses above the far ones: where one slot decides, losses spread over several units."""
DENSE = 4.0
"""How many times as many losses there are beyond the bulk where they lie densely, down to the last."""
LEAST_GAP = 1e-7
"""Least distance of two losses."""
LEAST_DEVIATION = 1e-300
"""Of one round's loss, whose variance may underflow."""
SCAN = 600
"""Losses at which the guess of the profile is looked at."""


class RoundProfile(NamedTuple):
    """Losses, ascending from 0, and the ends of delta there; all of shape (K,)."""

    epsilon: np.ndarray
    lower: np.ndarray
    upper: np.ndarray


def losses_for(s: float, t: float, sign: float, dense: bool = False) -> np.ndarray:
    """Losses eps at which the profile should be known: dense where one round's loss lies, and along its tail."""
    far_from, times = (LAST_LOG_DELTA, DENSE) if dense else (FAR_LOG_DELTA, 1.0)
    deviation = max(float(_deviation(np.asarray(s), np.asarray(t))), LEAST_DEVIATION)
    reach = min(0.5 * s * s + 12.0 * s, LARGEST_LOSS)
    scan = np.concatenate([np.linspace(0.0, 1.0, SCAN) * min(12.0 * deviation, reach), np.linspace(0.0, reach, SCAN)])
    scan = np.unique(scan)
    log_delta = _guess(sign, np.full(scan.size, s), np.full(scan.size, t), scan)
    log_delta = np.minimum.accumulate(np.where(np.isnan(log_delta), LAST_LOG_DELTA, log_delta))
    last = int(np.argmax(log_delta <= LAST_LOG_DELTA)) if log_delta[-1] <= LAST_LOG_DELTA else scan.size - 1
    scan, log_delta = scan[: max(last, 2) + 1], log_delta[: max(last, 2) + 1]
    middle = 0.5 * (scan[1:] + scan[:-1])
    bulk = np.exp(-0.5 * np.square(middle / (BULK_SPREAD * deviation)))
    weight = BULK_POINTS * bulk / (BULK_SPREAD * deviation * np.sqrt(0.5 * np.pi)) * np.diff(scan)
    weight += -np.diff(log_delta) / np.where(log_delta[1:] > far_from, NATS / times, FAR_NATS)
    weight += np.where(log_delta[1:] > far_from, np.diff(scan) / MOST_GAP, 0.0)
    count = np.concatenate([[0.0], np.cumsum(weight)])
    eps = np.interp(np.arange(np.ceil(count[-1]) + 1.0) * count[-1] / np.ceil(count[-1]), count, scan)
    return eps[np.concatenate([[True], np.diff(eps) > LEAST_GAP * max(deviation, 1e-3)])]


def round_profile(s: float, t: float, sign: float, dense: bool = False) -> RoundProfile:
    """delta_remove(eps) (sign = 1) or delta_add(eps) (sign = -1) of one round, at the losses of `losses_for`.

    delta_remove(eps) = E(S - e^eps)_+, delta_add(eps) = e^eps E(e^-eps - S)_+, s = 1/sigma.
    """
    return round_profiles(np.array([s]), np.array([t]), sign, dense)[0]


def round_profiles(s: np.ndarray, t: np.ndarray, sign: float, dense: bool = False) -> list[RoundProfile]:
    """`round_profile` of each of several rounds, s and t of shape (M,): their contours are evaluated together."""
    each = [losses_for(float(one), float(slots), sign, dense) for one, slots in zip(s, t, strict=True)]
    sizes = [eps.size for eps in each]
    asked = _Asked(
        sign, np.repeat(s, sizes), np.repeat(t, sizes), np.concatenate(each), np.repeat(range(s.size), sizes)
    )
    with np.errstate(all="ignore"):
        k = np.exp(sign * asked.eps)
        low, high = theorems.bounds(sign, asked.s, asked.t, k)
        if sign < 0:
            low, high = low / k, high / k
        low, high = _narrowed(asked, *_outward(low, high))
        low, high = np.fmax(low, 0.0), np.fmin(np.where(np.isnan(high), 1.0, high), 1.0)
        low = np.where(low <= high, low, 0.0)
        ends = np.cumsum(sizes)[:-1]
        found = zip(each, np.split(low, ends), np.split(high, ends), strict=True)
        return [_falling(*one) for one in found]


class _Asked(NamedTuple):
    """Losses of several rounds, one round after the other; all of shape (K,) but the sign."""

    sign: float
    s: np.ndarray
    t: np.ndarray
    eps: np.ndarray
    owner: np.ndarray
    """Number of the round."""


def _falling(eps: np.ndarray, low: np.ndarray, high: np.ndarray) -> RoundProfile:
    # e^eps is off by a few units of eps and 1: as much as delta falls in that distance, and it is convex in e^eps
    off = 4.0 * ROUNDOFF * (1.0 + eps[1:])
    wrong = np.concatenate([[0.0], off * high[:-1] / -np.expm1(-np.diff(eps))])
    low = np.maximum(low - wrong, 0.0)
    high = np.minimum(high + wrong, 1.0)
    # delta falls
    return RoundProfile(eps, np.maximum.accumulate(low[::-1])[::-1], np.minimum.accumulate(high))


def _narrowed(asked: _Asked, low: np.ndarray, high: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The ends by theorems, narrowed by contours where these can be placed; rounds that fail leave the others."""
    rows = np.flatnonzero((asked.s > LEAST_S) & (asked.s < MOST_S) & (asked.t > 1.0) & (asked.t <= MOST_SLOTS))
    if rows.size == 0:
        return low, high
    try:
        some = _Asked(asked.sign, *(x[rows] for x in asked[1:]))
        least, most = _by_contours(some, low[rows], high[rows])
    except (ArithmeticError, ValueError, IndexError, MemoryError):
        rounds = np.unique(asked.owner[rows])
        if rounds.size > 1:
            for one in rounds:
                at = asked.owner == one
                low[at], high[at] = _narrowed(_Asked(asked.sign, *(x[at] for x in asked[1:])), low[at], high[at])
        return low, high  # theorems answer
    low[rows], high[rows] = least, most
    return low, high


def _guess(sign: float, s: np.ndarray, t: np.ndarray, eps: np.ndarray) -> np.ndarray:
    """log of about delta; nothing certified depends on it."""
    with np.errstate(all="ignore"):
        found = theorems.guess(sign, s, t, np.exp(sign * eps))
    return found - min(sign, 0.0) * eps


def _outward(low: np.ndarray, high: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return low * (1.0 - 8.0 * ROUNDOFF), high * (1.0 + 8.0 * ROUNDOFF)


def _by_contours(asked: _Asked, low: np.ndarray, high: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The ends by theorems, narrowed by contours; what contradicts them is not used."""
    sign, s, t, eps, owner = asked
    least, most = low.copy(), high.copy()
    logs = np.clip(_guess(sign, s, t, eps), np.log(np.maximum(low, 1e-295)), np.log(np.maximum(high, 1e-295)))
    last = np.searchsorted(owner, owner, side="right") - 1
    hopeless = np.zeros(eps.size, bool)
    wide, apart = np.arange(eps.size), np.log(np.expm1(eps) + NEAR * np.maximum(_deviation(s, t), LEAST_DEVIATION))
    for turn, (together, distance) in enumerate(READ_TOGETHER):
        groups = list(_in_groups(wide, owner, together, apart, distance))
        placed = np.array([_place_for(rows, sign, int(last[rows[0]])) for rows in groups])
        for some, contour in _placed(asked, logs, placed, CUT_OFF[min(turn, 1)]):
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
        wide = np.flatnonzero(wide & (logs > ALONE_FROM) & ~hopeless)
        if wide.size == 0:
            break
    return low, high


def _in_groups(
    rows: np.ndarray, owner: np.ndarray, together: int, apart: np.ndarray, distance: float
) -> Iterator[np.ndarray]:
    """Rows of one round each, at most so many together and so far apart."""
    for some in np.split(rows, np.flatnonzero(np.diff(owner[rows])) + 1):
        first = 0
        while first < some.size:
            near = int(np.searchsorted(apart[some], apart[some[first]] + distance, side="right"))
            end = max(min(first + together, near), first + 1)
            yield some[first:end]
            first = end


def _deviation(s: np.ndarray, t: np.ndarray) -> np.ndarray:
    """Of the loss of one round, were it normal."""
    return np.sqrt(np.log1p(np.expm1(np.minimum(s * s, 600.0)) / t))


def _place_for(rows: np.ndarray, sign: float, last: int) -> int:
    """The loss for which a contour is placed that is read at several: no slot may be far that is not at any of them."""
    return min(int(rows[-1]) + 1, last) if sign > 0 else int(rows[rows.size // 2])


def _wanted(logs: np.ndarray) -> np.ndarray:
    return np.select([logs > log for log, _ in WIDTHS], [width for _, width in WIDTHS])


def _read(contour: Contour, each: np.ndarray, eps: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(lower, estimate, upper) of delta at losses eps, each from one of the rows of a contour."""
    lower, estimate, upper, _ = bracket_near(rows_of(contour, each), np.exp(contour.sign * eps))
    if contour.sign < 0:
        lower, estimate, upper = (x * np.exp(eps) for x in (lower, estimate, upper))
    lower, upper = _outward(lower, upper)
    return lower, estimate, upper


def _placed(asked: _Asked, logs: np.ndarray, rows: np.ndarray, cut_off: float) -> list[tuple[np.ndarray, Contour]]:
    sign, s, t, eps, _ = asked
    s, t, eps, logs = s[rows], t[rows], eps[rows], logs[rows]
    shift = np.where(sign > 0, 0.0, -eps)  # of the option against delta
    return contours_at(sign, s, t, np.exp(sign * eps), logs + shift, cut_off * _wanted(logs))
