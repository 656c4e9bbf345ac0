"""The epsilon at which one round's delta meets a target: Newton on a contour that is placed anew as it moves."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from jaxacct.floats import ROUNDOFF
from jaxacct.kernels.allocation import theorems
from jaxacct.kernels.allocation.bracket import Contour, bracket_near, contour_at

__all__ = ["Value", "search", "value_of"]

ROUNDS = 7
"""Most placements of the contour."""
NEWTON = 5
"""Newton steps on one contour."""
NARROW = 1e-7
"""Relative width at which a search ends."""


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
    return Value(low / k * (1.0 - 16.0 * ROUNDOFF), mid / k, high / k * (1.0 + 16.0 * ROUNDOFF), slope - mid / k)


def search(sign: float, s: np.ndarray, t: np.ndarray, delta: np.ndarray, most: np.ndarray) -> np.ndarray:
    """(lower, estimate, upper) of epsilon, at most `most`; ends that are not shown to hold are 0 and inf."""
    low, high, eps = np.zeros_like(s), most.copy(), _start(sign, s, t, delta, most)
    answer = np.array([low, eps, np.full_like(s, np.inf)])
    rows = np.arange(len(s))
    for _ in range(ROUNDS):
        placed, target = eps[rows], delta[rows]
        log_option = np.log(target) + min(sign, 0.0) * placed
        contour = contour_at(sign, s[rows], t[rows], np.exp(sign * placed), log_option)
        here, low[rows], high[rows] = _newton(contour, placed, target, low[rows], high[rows])
        ends = _ends(contour, here, target)
        answer[0, rows], answer[2, rows] = np.fmax(answer[0, rows], ends[0]), np.fmin(answer[2, rows], ends[1])
        answer[1, rows], eps[rows] = here, here
        narrow = np.isfinite(answer[2, rows]) & (answer[2, rows] - answer[0, rows] <= NARROW * answer[2, rows])
        rows = rows[~narrow & (answer[2, rows] > 0.0) & (np.abs(here - placed) > 1e-6 * here)]
        if rows.size == 0:
            break
    return answer


def _start(sign: float, s: np.ndarray, t: np.ndarray, delta: np.ndarray, most: np.ndarray) -> np.ndarray:
    """Epsilon by the guessed profile, by bisection."""
    low, high, goal = np.zeros_like(s), most.copy(), np.log(delta)
    for _ in range(22):
        eps = 0.5 * (low + high)
        above = theorems.guess(sign, s, t, np.exp(sign * eps)) - min(sign, 0.0) * eps > goal
        low, high = np.where(above, eps, low), np.where(above, high, eps)
    return 0.5 * (low + high)


def _newton(
    contour: Contour, eps: np.ndarray, delta: np.ndarray, low: np.ndarray, high: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(eps, low, high): Newton on log delta, kept between ends that brackets of delta move."""
    for _ in range(NEWTON):
        value = value_of(contour, eps)
        low = np.where(value.lower > delta, np.maximum(low, eps), low)
        high = np.where(value.upper < delta, np.minimum(high, eps), high)
        new = eps + (np.log(value.estimate) - np.log(delta)) * value.estimate / value.slope
        usable = (value.slope > 0.0) & np.isfinite(new) & (value.lower > 0.2 * value.upper)
        new = np.where(usable, np.clip(new, 0.5 * (low + eps) * (low > 0.0), 0.5 * (high + eps)), 0.5 * (low + high))
        if np.all(np.abs(new - eps) <= 1e-14 * eps):
            break
        eps = new
    return eps, low, high


def _ends(contour: Contour, eps: np.ndarray, delta: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Ends about an estimate that the brackets of delta there show to hold; 0 and inf otherwise."""
    value = value_of(contour, eps)
    below, above = np.zeros_like(eps), np.where((eps == 0.0) & (value.upper <= delta), 0.0, np.inf)
    for widen in (1.0, 4.0, 64.0, 4096.0):
        margin = widen * (1e-15 * eps + 4.0 * ROUNDOFF * delta / value.slope)
        high = np.maximum(eps + 1.02 * widen * np.maximum(value.upper - delta, 0.0) / value.slope + margin, 0.0)
        low = np.maximum(eps - 1.02 * widen * np.maximum(delta - value.lower, 0.0) / value.slope - margin, 0.0)
        above = np.where(np.isinf(above) & (value_of(contour, high).upper <= delta), high, above)
        below = np.where((below == 0.0) & (value_of(contour, low).lower >= delta), low, below)
        if np.all(np.isfinite(above)) and np.all((below > 0.0) | (low == 0.0)):
            break
    return below, above
