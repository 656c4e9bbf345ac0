"""Brackets of delta and epsilon for one round of random allocation (kernels/contour/README.md defines S, s and t)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from jaxacct.core.floats import ROUNDOFF, bisected
from jaxacct.engines import closed_form
from jaxacct.engines.backend import in_blocks
from jaxacct.engines.protocol import Answer
from jaxacct.kernels.contour import allocation_law
from jaxacct.kernels.contour.allocation import (
    TOLERANCE,
    Contour,
    bracket_near,
    brackets_at,
    contours_at,
    estimate_near,
    put_below,
    reach,
)

ROUNDS = 14
"""Largest number of times that one search for epsilon places its contour of integration."""
NARROW = 1e-2
"""A search ends when the relative width of its bracket is at most NARROW times the wanted relative width `rtol`."""
CUT_OFF = 3e-3
"""The first contour of a search leaves out terms whose size is about CUT_OFF * (wanted relative width) * delta."""
NEAR = 0.01
"""Newton's method on one contour ends when a step changes eps by at most NEAR * `narrow`, relative to eps."""
SIGNS = {"remove": 1.0, "add": -1.0}
"""Sign of each direction. With k = e^{sign eps}, delta is E(S - k)_+ for sign 1, and e^eps E(k - S)_+ for sign -1."""
ROUGH_RTOL = 0.5
"""If rtol >= ROUGH_RTOL, lower bounds of epsilon are first taken from theorems. The contour may not be needed."""
PLACEMENTS = 3
"""Largest number of times that the contour of integration is placed for one delta."""
SMALL = 1e-8
"""A contour for delta may leave out terms of about this size, relative to delta."""


def delta(sigma: np.ndarray, slots: np.ndarray, eps: np.ndarray, direction: str | None) -> Answer:
    """Return brackets of delta at eps >= 0, (B,). `direction` None means the direction with the larger delta."""

    def solved(sigma: np.ndarray, t: np.ndarray, eps: np.ndarray) -> np.ndarray:
        worst = _delta_block(SIGNS[direction or "remove"], sigma, t, eps)
        if direction is None:  # add is skipped where Chernoff's bound shows that its delta is smaller
            rows = np.flatnonzero(~_add_is_below(1.0 / sigma, t, eps, worst[0]))
            if rows.size:
                worst[:, rows] = np.maximum(worst[:, rows], _delta_block(-1.0, sigma[rows], t[rows], eps[rows]))
        return worst

    low, mid, high = in_blocks(solved, _flat(sigma, slots, eps))
    return Answer(low, mid, np.minimum(high, 1.0))


def epsilon(
    sigma: np.ndarray,
    slots: np.ndarray,
    delta: np.ndarray,
    direction: str | None,
    rtol: float = 1e-4,
) -> Answer:
    """Return brackets of epsilon at `delta`, (B,). `direction` None means the direction with the larger epsilon."""

    def solved(sigma: np.ndarray, slots: np.ndarray, delta: np.ndarray) -> np.ndarray:
        first = _epsilon_block(SIGNS[direction or "remove"], sigma, slots, delta, rtol=rtol)
        if direction is not None:
            return first
        return np.maximum(first, _epsilon_block(-1.0, sigma, slots, delta, first[0], rtol=rtol))

    return Answer(*in_blocks(solved, _flat(sigma, slots, delta)))


def _flat(*arrays: np.ndarray | float) -> list[np.ndarray]:
    return [np.ravel(a).astype(np.float64) for a in np.broadcast_arrays(*(np.asarray(a, np.float64) for a in arrays))]


def theorems_of(sign: float, s: np.ndarray, t: np.ndarray, eps: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the lower and upper bounds of delta that theorems give in closed form, without a contour."""
    k = np.exp(sign * eps)
    low, high = allocation_law.bounds(sign, s, t, k)
    if sign > 0:
        high = np.fmin(high, allocation_law.one_slot_above(s, t, k))
    else:
        low, high = low / k * (1.0 - 8.0 * ROUNDOFF), high / k * (1.0 + 8.0 * ROUNDOFF)
    # upper bound: the delta of a Gaussian mechanism that also reveals the record's slot
    gaussian = closed_form.delta(s * (1.0 + 2.0 * ROUNDOFF), eps)
    low, high = np.where(low > 0.0, low, 0.0), np.where(high >= 0.0, np.minimum(high, 1.0), 1.0)
    # `wrong` covers the relative rounding error of k, which is at most (|eps| + 2) * 2 * ROUNDOFF
    wrong = (np.abs(eps) + 4.0) * 2.0 * ROUNDOFF
    low = np.maximum(low - wrong * np.minimum(k, 1.0 / k), 0.0) if sign < 0 else np.maximum(low - wrong * k, 0.0)
    high = np.minimum(high + wrong * np.maximum(k, 1.0 / k), 1.0)
    return low, np.fmin(high, gaussian.upper)


def _delta_block(sign: float, sigma: np.ndarray, t: np.ndarray, eps: np.ndarray) -> np.ndarray:
    s = 1.0 / sigma
    low, high = theorems_of(sign, s, t, eps)
    mid = np.sqrt(low * high)
    one = t == 1.0
    if one.any():
        exact = closed_form.delta(s[one], eps[one])
        low[one], mid[one], high[one] = exact.lower, exact.estimate, exact.upper
    rows = np.flatnonzero(reach(s, t) & (high > 1e-290) & (eps < 600.0))
    if rows.size:
        value = _evaluated(sign, s[rows], t[rows], eps[rows], low[rows], high[rows])
        good = _intersect(low, high, rows, value.lower, value.upper)
        mid[rows] = np.where(good, value.estimate, mid[rows])
    wide = np.flatnonzero(reach(s, t) & (high - low > 1e-7 * high) & (high > 1e-6) & (eps < 30.0))
    if sign > 0 and wide.size:
        _intersect(low, high, wide, *_by_parity(s[wide], t[wide], eps[wide]))
        mid[wide] = 0.5 * (low[wide] + high[wide])
    return np.array([low, np.clip(mid, low, high), high])


def _intersect(low: np.ndarray, high: np.ndarray, rows: np.ndarray, least: np.ndarray, most: np.ndarray) -> np.ndarray:
    """Intersect each bracket of `rows` with [least, most], in place, if they overlap. Return the mask of overlaps."""
    agree = (least <= high[rows]) & (most >= low[rows])
    low[rows] = np.where(agree, np.fmax(low[rows], least), low[rows])
    high[rows] = np.where(agree, np.fmin(high[rows], most), high[rows])
    return agree


def _by_parity(s: np.ndarray, t: np.ndarray, eps: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return bounds of delta for remove, which is 1 - k + E(k - S)_+ with k = e^eps. A contour bounds E(k - S)_+."""
    k = np.exp(eps)
    low, _, high, _ = brackets_at(-1.0, s, t, k, np.log(k))
    wrong = 16.0 * ROUNDOFF * k
    return (1.0 - k) + low - wrong, (1.0 - k) + high + wrong


def _evaluated(sign: float, s: np.ndarray, t: np.ndarray, eps: np.ndarray, low: np.ndarray, high: np.ndarray) -> Value:
    """Return brackets of delta by contours placed for a guess of delta. Where the guess was poor, guess again."""
    k = np.exp(sign * eps)
    floor, most = np.log(np.maximum(low, 1e-295)), np.log(np.maximum(high, 1e-295))
    guess = np.clip(allocation_law.guess(sign, s, t, k) - min(sign, 0.0) * eps, floor, most)
    shift = np.where(sign > 0, 0.0, -eps)  # log delta + shift is log E(sign (S - k))_+; `SIGNS` defines S and k
    value = Value(*np.full((4, len(s)), np.nan))
    for _ in range(PLACEMENTS):
        ends = np.empty((4, len(s)))
        for rows, contour in contours_at(sign, s, t, k, guess + shift, SMALL):
            ends[:, rows] = value_of(contour, eps[rows])
        found = Value(*ends)
        better = ~(value.upper - value.lower <= found.upper - found.lower)
        value = Value(*(np.where(better, a, b) for a, b in zip(found, value, strict=True)))
        seen = np.log(np.clip(found.estimate, 1e-295, 1.0))
        seen = np.where(np.isfinite(seen), np.clip(seen, floor, most), guess)
        if np.all((np.abs(seen - guess) < 4.0) | ~(value.upper - value.lower > 1e-7 * value.upper)):
            break
        guess = seen
    return value


def _epsilon_block(
    sign: float,
    sigma: np.ndarray,
    t: np.ndarray,
    delta: np.ndarray,
    floor: np.ndarray | None = None,
    *,
    rtol: float,
) -> np.ndarray:
    s = 1.0 / sigma
    gaussian = closed_form.epsilon(s * (1.0 + 2.0 * ROUNDOFF), delta, np.zeros_like(delta))
    low, mid, high = np.zeros_like(s), 0.5 * gaussian.upper, gaussian.upper.copy()
    one = t == 1.0
    if one.any():
        exact = closed_form.epsilon(s[one], delta[one], 4.0 * ROUNDOFF * np.ones(one.sum()))
        low[one], mid[one], high[one] = exact.lower, exact.estimate, exact.upper
    zero = theorems_of(sign, s, t, np.zeros_like(s))[1] <= delta
    low[zero], mid[zero], high[zero] = 0.0, 0.0, 0.0
    if rtol >= ROUGH_RTOL:
        low = np.where(zero | one, low, np.minimum(_least(sign, s, t, delta, high), high))
    open_ = ~(high - low <= rtol * high)
    rows = np.flatnonzero(reach(s, t) & ~zero & open_ & (delta > 1e-280) & (high > 0.0) & (high < 600.0))
    if rows.size:
        least = 0.0 if floor is None else floor[rows]
        found = search(sign, s[rows], t[rows], delta[rows], high[rows], rtol, least)
        high[rows] = np.fmin(high[rows], found[2])
        low[rows] = np.where(found[0] <= high[rows], np.fmax(found[0], low[rows]), 0.0)
        low[rows] = np.where(low[rows] <= high[rows], low[rows], 0.0)
        mid[rows] = found[1]
    return np.array([low, np.clip(np.where(np.isnan(mid), low, mid), low, high), high])


def _least(sign: float, s: np.ndarray, t: np.ndarray, delta: np.ndarray, most: np.ndarray) -> np.ndarray:
    """Find, by bisection, the largest eps at which theorems show that delta exceeds the target; 0 if there is none."""
    above = lambda eps: theorems_of(sign, s, t, eps)[0] > delta
    return bisected(np.zeros_like(s), np.minimum(most, 600.0), above, 12)[0]


class Value(NamedTuple):
    """A bracket of delta, and the slope of delta. Every array is (B,)."""

    lower: np.ndarray
    estimate: np.ndarray
    upper: np.ndarray
    slope: np.ndarray  # estimate of -d delta / d eps


def value_of(contour: Contour, eps: np.ndarray) -> Value:
    """Return the bracket of delta at an eps near the eps for which the contour was placed."""
    k = np.exp(contour.sign * eps)
    low, mid, high, slope = bracket_near(contour, k)
    if contour.sign > 0:
        return Value(low, mid, high, k * slope)
    with np.errstate(all="ignore"):
        return Value(low / k * (1.0 - 16.0 * ROUNDOFF), mid / k, high / k * (1.0 + 16.0 * ROUNDOFF), slope - mid / k)


def estimate_of(contour: Contour, eps: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return only the estimate and the slope of `value_of`, in a fraction of its time."""
    k = np.exp(contour.sign * eps)
    mid, slope = estimate_near(contour, k)
    with np.errstate(all="ignore"):
        return (mid, k * slope) if contour.sign > 0 else (mid / k, slope - mid / k)


def search(
    sign: float,
    s: np.ndarray,
    t: np.ndarray,
    delta: np.ndarray,
    most: np.ndarray,  # an upper bound of epsilon
    rtol: float = 1e-4,
    floor: np.ndarray | float = 0.0,  # where epsilon is shown to be at most this, the answer is (0, 0, floor)
) -> np.ndarray:
    """Return (lower, estimate, upper) of epsilon. A lower bound that is not proved is 0, an upper bound inf."""
    narrow, tolerance = np.clip((NARROW * rtol, CUT_OFF * rtol), (1e-12, 1e-14), (1e-3, 1e-5))
    floor = np.broadcast_to(floor, s.shape)
    low, high = np.zeros_like(s), most.copy()
    eps = np.minimum(np.maximum(floor, 0.0), most)
    rows = np.flatnonzero(eps == 0.0)
    eps[rows] = start(sign, s[rows], t[rows], delta[rows], most[rows])
    answer = np.array([low, eps, np.full_like(s, np.inf)])
    below = _add_is_below(s, t, floor, delta) if sign < 0 else np.zeros(len(s), bool)
    answer[:, below] = np.zeros(below.sum()), np.zeros(below.sum()), floor[below]
    rows = np.flatnonzero(~below)
    for _ in range(ROUNDS):
        if rows.size == 0:
            break
        going = np.zeros(len(s), bool)
        log_option = np.log(delta[rows]) + min(sign, 0.0) * eps[rows]
        found = contours_at(sign, s[rows], t[rows], np.exp(sign * eps[rows]), log_option, tolerance)
        for some, contour in found:
            at = rows[some]
            placed, target = eps[at], delta[at]
            value, low[at], high[at] = _newton(contour, placed, target, low[at], high[at], floor[at], narrow)
            here = value[0]
            settled = high[at] <= floor[at]
            ends = (0.0 * here, floor[at]) if settled.all() else _ends(contour, *value, target, floor[at])
            ends = np.where(settled, 0.0, ends[0]), np.where(settled, floor[at], ends[1])
            answer[0, at], answer[2, at] = np.fmax(answer[0, at], ends[0]), np.fmin(answer[2, at], ends[1])
            answer[1, at], eps[at] = here, np.clip(here, low[at], high[at])
            width = answer[2, at] - answer[0, at]
            done = settled | (np.isfinite(answer[2, at]) & (width <= narrow * answer[2, at])) | (answer[2, at] <= 0.0)
            going[at] = ~done & ((np.abs(eps[at] - placed) > 1e-6 * here) | (tolerance > TOLERANCE))
        rows, tolerance = np.flatnonzero(going), min(tolerance, TOLERANCE)
    return answer


def _add_is_below(s: np.ndarray, t: np.ndarray, eps: np.ndarray, delta: np.ndarray) -> np.ndarray:
    """Return whether Chernoff's bound shows that delta_add at eps is below a given delta."""
    below = np.zeros(len(s), bool)
    rows = np.flatnonzero(reach(s, t) & (eps > 0.0) & (eps < 500.0) & (delta > 0.0))
    if rows.size:
        below[rows] = put_below(s[rows], t[rows], np.exp(-eps[rows])) + eps[rows] < np.log(delta[rows])
    return below


def start(sign: float, s: np.ndarray, t: np.ndarray, delta: np.ndarray, most: np.ndarray) -> np.ndarray:
    """Estimate epsilon by bisection on the guessed delta (`allocation_law.guess`)."""
    guess = lambda eps: allocation_law.guess(sign, s, t, np.exp(sign * eps)) - min(sign, 0.0) * eps
    low, high = bisected(np.zeros_like(s), most, lambda eps: guess(eps) > np.log(delta), 22)
    return 0.5 * (low + high)


def _newton(
    contour: Contour,
    eps: np.ndarray,
    delta: np.ndarray,
    low: np.ndarray,  # [low, high] brackets epsilon; every bracket of delta found here may narrow [low, high]
    high: np.ndarray,
    floor: np.ndarray,
    narrow: float,
) -> tuple[tuple[np.ndarray, Value], np.ndarray, np.ndarray]:
    """Take Newton steps on log delta from eps. Return ((eps reached, bracket of delta there), low, high)."""

    def read(value: Value, eps: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        usable = (value.slope > 0.0) & (value.estimate > 0.0) & (value.lower > 0.2 * value.upper)
        new_low = np.where(value.lower > delta, np.maximum(low, eps), low)
        new_high = np.where(value.upper < delta, np.minimum(high, eps), high)
        return usable, new_low, new_high

    value = value_of(contour, eps)
    usable, low, high = read(value, eps)
    # rows whose bracket of delta at `eps` is too wide take no Newton step: delta is bracketed at `middle` instead
    middle = 0.5 * (low + high)
    middle = np.where(np.abs(middle - eps) > 1e-3 * eps, middle, 0.5 * (eps + high))
    new, mid, slope = np.where(usable, eps, middle), value.estimate, value.slope
    for _ in range(5):  # at most 5 Newton steps on one contour
        step = (np.log(mid) - np.log(delta)) * mid / slope
        going = usable & np.isfinite(step) & (slope > 0.0) & ~(high <= floor)
        to = np.clip(new + np.where(going, step, 0.0), 0.5 * (low + new) * (low > 0.0), 0.5 * (high + new))
        moved = going & (np.abs(to - new) > NEAR * narrow * new)
        new = np.where(moved, to, new)
        if not np.any(moved):
            break
        mid, slope = estimate_of(contour, new)
    if np.any(new != eps):
        for _ in range(4):  # delta is bracketed at most 4 times, first where Newton ended
            reached, value = new, value_of(contour, new)
            good, low, high = read(value, reached)
            back = usable & ~good  # where delta's bracket at `new` is too wide, go halfway back to `eps`
            if not np.any(back):
                break
            new = np.where(back, 0.5 * (eps + new), new)
        eps = reached
    return (eps, value), low, high


def _ends(
    contour: Contour, eps: np.ndarray, value: Value, delta: np.ndarray, floor: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return (lower, upper) bounds of epsilon, each proved by delta's bracket at that bound; 0 or inf if unproved."""
    below, above = np.zeros_like(eps), np.where((eps == 0.0) & (value.upper <= delta), 0.0, np.inf)
    for widen in (1.0, 4.0, 64.0, 4096.0):
        margin = widen * (1e-15 * eps + 4.0 * ROUNDOFF * delta / value.slope)
        high = np.maximum(eps + 1.02 * widen * np.maximum(value.upper - delta, 0.0) / value.slope + margin, 0.0)
        low = np.maximum(eps - 1.02 * widen * np.maximum(delta - value.lower, 0.0) / value.slope - margin, 0.0)
        if not np.all(np.isfinite(above)):
            above = np.where(np.isinf(above) & (value_of(contour, high).upper <= delta), high, above)
        if not np.all((below > 0.0) | (low == 0.0)):
            below = np.where((below == 0.0) & (value_of(contour, low).lower >= delta), low, below)
        if np.all(np.isfinite(above) | (eps <= floor)) and np.all((below > 0.0) | (low == 0.0)):
            break
    return below, above
