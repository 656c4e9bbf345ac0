"""One round of random allocation: certified delta, epsilon and tail probabilities (jaxacct/kernels/allocation/README.md).

Remove is (P, Q), add is (Q, P), with P = (1/t) sum_i N(e_i, sigma^2 I) and Q = N(0, sigma^2 I); S = dP/dQ.
delta_remove(eps) = E(S - e^eps)_+ and delta_add(eps) = e^eps E(e^-eps - S)_+.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from jaxacct.engines import closed_form
from jaxacct.engines.contour import Answer
from jaxacct.floats import ROUNDOFF
from jaxacct.kernels.allocation import theorems
from jaxacct.kernels.allocation.bracket import bracket_near, contour_at

__all__ = ["delta", "epsilon"]

BLOCK = 32
"""Configurations evaluated together."""
LEAST_S, MOST_S = 1e-4, 20.0
"""1/sigma between which the contour is asked."""
MOST_SLOTS = 1e9
"""Slots up to which the contour is asked."""
ROUNDS = 8
"""Most placements of the contour in a search for epsilon."""
REFINED = 3.0
"""Change of c k beyond which the contour is placed anew."""


def delta(sigma: np.ndarray, slots: np.ndarray, eps: np.ndarray, direction: str) -> Answer:
    """Brackets of delta at eps >= 0 in one direction, "remove" or "add"; all arguments broadcast to (B,).

    slots : whole numbers from 1 to 2**53.
    """
    sigma, slots, eps = _flat(sigma, slots, eps)
    return _in_blocks(_delta_block, direction, sigma, slots, eps)


def epsilon(sigma: np.ndarray, slots: np.ndarray, delta: np.ndarray, direction: str) -> Answer:
    """Brackets of inf {eps >= 0 : delta(eps) <= delta} in one direction; all arguments broadcast to (B,)."""
    sigma, slots, delta = _flat(sigma, slots, delta)
    return _in_blocks(_epsilon_block, direction, sigma, slots, delta)


def _flat(*arrays: np.ndarray) -> list[np.ndarray]:
    return [np.ravel(a).astype(np.float64) for a in np.broadcast_arrays(*(np.asarray(a, np.float64) for a in arrays))]


def _in_blocks(
    solve: Callable[..., np.ndarray], direction: str, sigma: np.ndarray, slots: np.ndarray, given: np.ndarray
) -> Answer:
    found = np.empty((3, sigma.size))
    order = np.lexsort((given, sigma, slots))
    for first in range(0, sigma.size, BLOCK):
        rows = order[first : first + BLOCK]
        with np.errstate(all="ignore"):
            found[:, rows] = solve(1.0 if direction == "remove" else -1.0, sigma[rows], slots[rows], given[rows])
    return Answer(*found)


class _Value(NamedTuple):
    lower: np.ndarray
    estimate: np.ndarray
    upper: np.ndarray
    slope: np.ndarray
    """-d delta / d eps, estimated."""


def _reach(s: np.ndarray, t: np.ndarray) -> np.ndarray:
    return (s > LEAST_S) & (s < MOST_S) & (t <= MOST_SLOTS) & (t > 1.0)


def _value(sign: float, contour: object, eps: np.ndarray) -> _Value:
    """The bracket of delta from a contour."""
    k = np.exp(sign * eps)
    low, mid, high, slope = bracket_near(contour, k)
    units = 1.0 + 8.0 * ROUNDOFF
    if sign > 0:
        # k is off by a unit or so of eps: allowed for in the slope's direction
        return _Value(low, mid, high, k * slope)
    return _Value(low / k / units, mid / k, high / k * units, slope - mid / k)


def _theorems(
    sign: float, sigma: np.ndarray, s: np.ndarray, t: np.ndarray, eps: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Bounds of delta by theorems: closed forms, and the Gaussian mechanism, which tells the slot."""
    k = np.exp(sign * eps)
    low, high = theorems.bounds(sign, s, t, k)
    if sign < 0:
        low, high = low / k * (1.0 - 8.0 * ROUNDOFF), high / k * (1.0 + 8.0 * ROUNDOFF)
    gaussian = closed_form.delta(s * (1.0 + 2.0 * ROUNDOFF), eps)
    low, high = np.where(low > 0.0, low, 0.0), np.where(high >= 0.0, np.minimum(high, 1.0), 1.0)
    # k = e^eps is rounded by up to eps + 2 units
    wrong = (np.abs(eps) + 4.0) * 2.0 * ROUNDOFF
    low = np.maximum(low - wrong * np.minimum(k, 1.0 / k), 0.0) if sign < 0 else np.maximum(low - wrong * k, 0.0)
    high = np.minimum(high + wrong * np.maximum(k, 1.0 / k), 1.0)
    return low, np.fmin(high, gaussian.upper)


def _delta_block(sign: float, sigma: np.ndarray, t: np.ndarray, eps: np.ndarray) -> np.ndarray:
    s = 1.0 / sigma
    low, high = _theorems(sign, sigma, s, t, eps)
    mid = np.sqrt(low * high)
    one = t == 1.0
    if one.any():
        exact = closed_form.delta(s[one], eps[one])
        low[one], mid[one], high[one] = exact.lower, exact.estimate, exact.upper
    rows = np.flatnonzero(_reach(s, t) & (high > 1e-290) & (eps < 600.0))
    if rows.size:
        value = _evaluated(sign, s[rows], t[rows], eps[rows], low[rows], high[rows])
        good = (value.lower <= high[rows]) & (value.upper >= low[rows])
        low[rows] = np.where(good, np.fmax(low[rows], value.lower), low[rows])
        high[rows] = np.where(good, np.fmin(high[rows], value.upper), high[rows])
        mid[rows] = np.where(good, value.estimate, mid[rows])
    return np.array([low, np.clip(mid, low, high), high])


def _evaluated(sign: float, s: np.ndarray, t: np.ndarray, eps: np.ndarray, low: np.ndarray, high: np.ndarray) -> _Value:
    """Delta by the contour, placed again where the guess of its size was poor."""
    k = np.exp(sign * eps)
    floor, most = np.log(np.maximum(low, 1e-295)), np.log(np.maximum(high, 1e-295))
    guess = np.clip(theorems.guess(sign, s, t, k) - min(sign, 0.0) * eps, floor, most)
    shift = np.where(sign > 0, 0.0, -eps)  # of the option against delta
    value = None
    for _ in range(3):
        contour = contour_at(sign, s, t, k, guess + shift)
        found = _value(sign, contour, eps)
        if value is None:
            value = found
        else:
            better = ~(value.upper - value.lower <= found.upper - found.lower)
            value = _Value(*(np.where(better, a, b) for a, b in zip(found, value, strict=True)))
        seen = np.log(np.clip(found.estimate, 1e-295, 1.0))
        seen = np.where(np.isfinite(seen), np.clip(seen, floor, most), guess)
        if np.all((np.abs(seen - guess) < 4.0) | ~(value.upper - value.lower > 1e-7 * value.upper)):
            break
        guess = seen
    return value


def _epsilon_block(sign: float, sigma: np.ndarray, t: np.ndarray, delta: np.ndarray) -> np.ndarray:
    s = 1.0 / sigma
    gaussian = closed_form.epsilon(s * (1.0 + 2.0 * ROUNDOFF), delta, np.zeros_like(delta))
    low, mid, high = np.zeros_like(s), 0.5 * gaussian.upper, gaussian.upper.copy()
    one = t == 1.0
    if one.any():
        exact = closed_form.epsilon(s[one], delta[one], 4.0 * ROUNDOFF * np.ones(one.sum()))
        low[one], mid[one], high[one] = exact.lower, exact.estimate, exact.upper
    # Scarf's bound at 0 is the largest delta
    zero = _theorems(sign, sigma, s, t, np.zeros_like(s))[1] <= delta
    low[zero], mid[zero], high[zero] = 0.0, 0.0, 0.0
    rows = np.flatnonzero(_reach(s, t) & ~zero & (delta > 1e-280) & (high > 0.0) & (high < 600.0))
    if rows.size:
        found = _solve(sign, s[rows], t[rows], delta[rows], high[rows])
        high[rows] = np.fmin(high[rows], found[2])
        low[rows] = np.where(found[0] <= high[rows], np.fmax(found[0], 0.0), 0.0)
        mid[rows] = found[1]
    return np.array([low, np.clip(np.where(np.isnan(mid), low, mid), low, high), high])


def _start(sign: float, s: np.ndarray, t: np.ndarray, delta: np.ndarray, most: np.ndarray) -> np.ndarray:
    """Epsilon by the guessed profile, by bisection."""
    low, high, goal = np.zeros_like(s), most.copy(), np.log(delta)
    for _ in range(22):
        eps = 0.5 * (low + high)
        above = theorems.guess(sign, s, t, np.exp(sign * eps)) - min(sign, 0.0) * eps > goal
        low, high = np.where(above, eps, low), np.where(above, high, eps)
    return 0.5 * (low + high)


def _solve(sign: float, s: np.ndarray, t: np.ndarray, delta: np.ndarray, most: np.ndarray) -> np.ndarray:
    """(lower, estimate, upper) of epsilon; ends that are not shown to hold are 0 and inf."""
    goal = np.log(delta)
    low, high = np.zeros_like(s), most.copy()
    eps = _start(sign, s, t, delta, most)
    answer = np.array([np.zeros_like(s), eps, np.full_like(s, np.inf)])
    open_ = np.arange(len(s))
    for _ in range(ROUNDS):
        a, b, d, g = s[open_], t[open_], delta[open_], goal[open_]
        placed = eps[open_]
        contour = contour_at(sign, a, b, np.exp(sign * placed), g + np.where(sign > 0, 0.0, -placed))
        here, lo, hi = placed, low[open_], high[open_]
        limit = REFINED / (contour.place.line.c * np.exp(sign * placed))
        for _ in range(5):
            value = _value(sign, contour, here)
            size, rate = value.estimate, value.slope / value.estimate
            fine = (size > 0.0) & (rate > 0.0)
            above = size > d
            lo, hi = np.where(fine & above, np.maximum(lo, here), lo), np.where(fine & ~above, np.minimum(hi, here), hi)
            step = np.where(fine, (np.log(np.where(fine, size, 1.0)) - g) / rate, np.nan)
            new = here + step
            new = np.where((new >= lo) & (new <= hi), new, 0.5 * (lo + hi))
            moved = np.abs(new - placed) > limit
            new = np.where(moved, placed + np.clip(new - placed, -limit, limit), new)
            done = np.abs(new - here) <= 1e-14 * new
            here = new
            if done.all():
                break
        ends = _ends(sign, contour, here, d)
        answer[1, open_] = here
        answer[0, open_] = np.fmax(answer[0, open_], ends[0])
        answer[2, open_] = np.fmin(answer[2, open_], ends[1])
        low[open_], high[open_] = np.minimum(lo, here), np.maximum(hi, here)
        jump = new + 0.0 * step
        target = np.where(moved, np.clip(placed + (here - placed) + np.nan_to_num(step), lo, hi), here)
        eps[open_] = target
        narrow = answer[2] - answer[0] <= 1e-8 * answer[2]
        drift = np.zeros(len(s), bool)
        drift[open_] = np.abs(here - placed) > 0.5 * limit
        open_ = np.flatnonzero(~narrow & drift)
        if open_.size == 0:
            break
    return answer


def _ends(sign: float, contour: object, eps: np.ndarray, delta: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Ends about an estimate that are shown to hold by the bracket of delta there; 0 and inf otherwise."""
    value = _value(sign, contour, eps)
    rate = value.slope
    below, above = np.zeros_like(eps), np.full_like(eps, np.inf)
    for widen in (1.0, 4.0, 64.0, 4096.0):
        margin = widen * (1e-15 * eps + 4.0 * ROUNDOFF * delta / rate)
        high = np.maximum(eps + 1.02 * widen * np.maximum(value.upper - delta, 0.0) / rate + margin, 0.0)
        low = np.maximum(eps - 1.02 * widen * np.maximum(delta - value.lower, 0.0) / rate - margin, 0.0)
        at_high, at_low = _value(sign, contour, high), _value(sign, contour, low)
        above = np.where(np.isinf(above) & (at_high.upper <= delta), high, above)
        below = np.where((below == 0.0) & (at_low.lower >= delta), low, below)
        if np.all(np.isfinite(above)) and np.all((below > 0.0) | (low == 0.0)):
            break
    return below, above
