"""The epsilon at which one round's delta meets a target: Newton on a contour that is placed anew as it moves."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from jaxacct.core.floats import ROUNDOFF
from jaxacct.kernels.allocation import theorems
from jaxacct.kernels.allocation.bracket import Contour, bracket_near, contours_at, estimate_near
from jaxacct.kernels.allocation.chernoff import put_below
from jaxacct.kernels.allocation.placement import TOLERANCE

__all__ = ["Value", "estimate_of", "search", "start", "value_of"]

ROUNDS = 14
"""Most placements of the contour."""
NEWTON = 5
"""Newton steps on one contour."""
RETREATS = 4
"""Most readings where Newton ends."""
NARROW = 1e-2
"""Relative width at which a search ends, as a share of the width asked for."""
CUT_OFF = 3e-3
"""What a contour may leave out, relative to delta, as a share of the width asked for."""
NEAR = 0.01
"""Newton ends at steps this small, relative to the width at which the search ends."""


class Value(NamedTuple):
    """A bracket of delta, (B,) each."""

    lower: np.ndarray
    estimate: np.ndarray
    upper: np.ndarray
    slope: np.ndarray
    """-d delta / d eps, estimated."""


def value_of(contour: Contour, eps: np.ndarray) -> Value:
    """The bracket of delta at eps near the one that the contour was placed for."""
    k = np.exp(contour.sign * eps)
    low, mid, high, slope = bracket_near(contour, k)
    if contour.sign > 0:
        return Value(low, mid, high, k * slope)
    with np.errstate(all="ignore"):
        return Value(low / k * (1.0 - 16.0 * ROUNDOFF), mid / k, high / k * (1.0 + 16.0 * ROUNDOFF), slope - mid / k)


def estimate_of(contour: Contour, eps: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(estimate, slope) of `value_of`, for a fraction of its work."""
    k = np.exp(contour.sign * eps)
    mid, slope = estimate_near(contour, k)
    with np.errstate(all="ignore"):
        return (mid, k * slope) if contour.sign > 0 else (mid / k, slope - mid / k)


def search(
    sign: float,
    s: np.ndarray,
    t: np.ndarray,
    delta: np.ndarray,
    most: np.ndarray,
    rtol: float = 1e-4,
    floor: np.ndarray | float = 0.0,
    near: np.ndarray | float = 0.0,
) -> np.ndarray:
    """(lower, estimate, upper) of epsilon, at most `most`; ends that are not shown to hold are 0 and inf.

    rtol : the width wanted; what can be had for nothing is narrower.
    floor : where epsilon is at most this, that is all that is found out: (0, 0, floor).
    near : where the search begins, where it is positive and there is no floor.
    """
    narrow, tolerance = np.clip((NARROW * rtol, CUT_OFF * rtol), (1e-12, 1e-14), (1e-3, 1e-5))
    floor = np.broadcast_to(floor, s.shape)
    low, high = np.zeros_like(s), most.copy()
    eps = np.minimum(np.where(floor > 0.0, floor, np.where(near < most, near, 0.0)), most)
    rows = np.flatnonzero(eps == 0.0)
    eps[rows] = start(sign, s[rows], t[rows], delta[rows], most[rows])
    answer = np.array([low, eps, np.full_like(s, np.inf)])
    below = _below_floor(sign, s, t, delta, floor)
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


def _below_floor(sign: float, s: np.ndarray, t: np.ndarray, delta: np.ndarray, floor: np.ndarray) -> np.ndarray:
    """Where Chernoff's bound of delta_add at the floor is at most delta, so that epsilon is at most the floor."""
    below = np.zeros(len(s), bool)
    if sign < 0:
        rows = np.flatnonzero((floor > 0.0) & (floor < 500.0))
        if rows.size:
            below[rows] = put_below(s[rows], t[rows], np.exp(-floor[rows])) + floor[rows] < np.log(delta[rows])
    return below


def start(sign: float, s: np.ndarray, t: np.ndarray, delta: np.ndarray, most: np.ndarray) -> np.ndarray:
    """Epsilon by the guessed profile, by bisection."""
    low, high, goal = np.zeros_like(s), most.copy(), np.log(delta)
    for _ in range(22):
        eps = 0.5 * (low + high)
        above = theorems.guess(sign, s, t, np.exp(sign * eps)) - min(sign, 0.0) * eps > goal
        low, high = np.where(above, eps, low), np.where(above, high, eps)
    return 0.5 * (low + high)


def _newton(
    contour: Contour,
    eps: np.ndarray,
    delta: np.ndarray,
    low: np.ndarray,
    high: np.ndarray,
    floor: np.ndarray,
    narrow: float,
) -> tuple[tuple[np.ndarray, Value], np.ndarray, np.ndarray]:
    """((eps, delta there), low, high): Newton on log delta, kept between ends that brackets of delta move.

    The steps need estimates only; brackets are taken where the contour was placed and where Newton ends.
    """

    def read(value: Value, eps: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        usable = (value.slope > 0.0) & (value.estimate > 0.0) & (value.lower > 0.2 * value.upper)
        new_low = np.where(value.lower > delta, np.maximum(low, eps), low)
        new_high = np.where(value.upper < delta, np.minimum(high, eps), high)
        return usable, new_low, new_high

    value = value_of(contour, eps)
    usable, low, high = read(value, eps)
    middle = 0.5 * (low + high)
    middle = np.where(np.abs(middle - eps) > 1e-3 * eps, middle, 0.5 * (eps + high))  # nothing was learnt at eps
    new, mid, slope = np.where(usable, eps, middle), value.estimate, value.slope
    for _ in range(NEWTON):
        step = (np.log(mid) - np.log(delta)) * mid / slope
        going = usable & np.isfinite(step) & (slope > 0.0) & ~(high <= floor)
        to = np.clip(new + np.where(going, step, 0.0), 0.5 * (low + new) * (low > 0.0), 0.5 * (high + new))
        moved = going & (np.abs(to - new) > NEAR * narrow * new)
        new = np.where(moved, to, new)
        if not np.any(moved):
            break
        mid, slope = estimate_of(contour, new)
    if np.any(new != eps):
        for _ in range(RETREATS):
            reached, value = new, value_of(contour, new)
            good, low, high = read(value, reached)
            back = usable & ~good  # estimates went further than brackets reach
            if not np.any(back):
                break
            new = np.where(back, 0.5 * (eps + new), new)
        eps = reached
    return (eps, value), low, high


def _ends(
    contour: Contour, eps: np.ndarray, value: Value, delta: np.ndarray, floor: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Ends about an estimate that the brackets of delta there show to hold; 0 and inf otherwise."""
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
