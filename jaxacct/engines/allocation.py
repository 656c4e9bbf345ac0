"""One round of random allocation: certified delta, epsilon and tails (jaxacct/kernels/allocation/README.md).

Remove is (P, Q), add is (Q, P), with P = (1/t) sum_i N(e_i, sigma^2 I) and Q = N(0, sigma^2 I); S = dP/dQ.
delta_remove(eps) = E(S - e^eps)_+ and delta_add(eps) = e^eps E(e^-eps - S)_+.
"""

from __future__ import annotations

import numpy as np

from jaxacct.core.floats import ROUNDOFF
from jaxacct.engines import closed_form
from jaxacct.engines.allocation_search import Value, estimate_of, search, start, value_of
from jaxacct.engines.blocks import in_blocks
from jaxacct.engines.contour import Answer
from jaxacct.kernels.allocation import theorems
from jaxacct.kernels.allocation.bracket import brackets_at, contours_at
from jaxacct.kernels.allocation.chernoff import put_below

__all__ = ["delta", "delta_of_both", "epsilon", "epsilon_of_both", "excess", "guess"]

SIGNS = {"remove": 1.0, "add": -1.0}
"""Of the option that each direction is: a call, or a put."""
LEAST_S, MOST_S = 1e-4, 20.0
"""1/sigma between which the contour is asked."""
ROUGH = 0.5
"""Relative width from which on theorems are asked for lower ends of epsilon, which spare the contour."""
PLACEMENTS = 3
"""Most placements of the contour for one delta."""
SMALL = 1e-8
"""What a contour may leave out of a delta, relatively."""
ROUGHLY = 1e-5
"""What a contour leaves out, relative to delta, where only an estimate is asked for."""
MOST_SLOTS = 1e9
"""Slots up to which the contour is asked."""


def delta(sigma: np.ndarray, slots: np.ndarray, eps: np.ndarray, direction: str) -> Answer:
    """Brackets of delta at eps >= 0 in one direction, "remove" or "add"; all arguments broadcast to (B,).

    slots : whole numbers from 1 to 2**53.
    """
    sign = SIGNS[direction]
    found = in_blocks(lambda *rows: _delta_block(sign, *rows), _flat(sigma, slots, eps))
    return found._replace(upper=np.minimum(found.upper, 1.0))


def delta_of_both(sigma: np.ndarray, slots: np.ndarray, eps: np.ndarray) -> Answer:
    """The larger of both directions, each end on its own; adding is left out where Chernoff shows it to be smaller."""

    def both(sigma: np.ndarray, t: np.ndarray, eps: np.ndarray) -> np.ndarray:
        worst = _delta_block(1.0, sigma, t, eps)
        rows = np.flatnonzero(reach(1.0 / sigma, t) & (eps > 0.0) & (eps < 500.0) & (worst[0] > 0.0))
        below = np.zeros(len(eps), bool)
        below[rows] = put_below(1.0 / sigma[rows], t[rows], np.exp(-eps[rows])) + eps[rows] < np.log(worst[0, rows])
        rows = np.flatnonzero(~below)
        if rows.size:
            worst[:, rows] = np.maximum(worst[:, rows], _delta_block(-1.0, sigma[rows], t[rows], eps[rows]))
        return worst

    found = in_blocks(both, _flat(sigma, slots, eps))
    return found._replace(upper=np.minimum(found.upper, 1.0))


def epsilon(
    sigma: np.ndarray,
    slots: np.ndarray,
    delta: np.ndarray,
    direction: str,
    rtol: float = 1e-4,
    near: np.ndarray | None = None,
) -> Answer:
    """Brackets of inf {eps >= 0 : delta(eps) <= delta} in one direction; all arguments broadcast to (B,).

    near : where the search begins.
    """
    sign = SIGNS[direction]
    begin = 0.0 if near is None else near

    def one(sigma: np.ndarray, slots: np.ndarray, delta: np.ndarray, begin: np.ndarray) -> np.ndarray:
        return _epsilon_block(sign, sigma, slots, delta, rtol=rtol, begin=begin)

    return in_blocks(one, _flat(sigma, slots, delta, begin))


def epsilon_of_both(
    sigma: np.ndarray, slots: np.ndarray, delta: np.ndarray, rtol: float = 1e-4, near: np.ndarray | None = None
) -> Answer:
    """The larger of both directions, each end on its own.

    The second direction is not solved where it is shown to lie below the first one's lower end.
    """
    begin = 0.0 if near is None else near

    def both(sigma: np.ndarray, slots: np.ndarray, delta: np.ndarray, begin: np.ndarray) -> np.ndarray:
        first = _epsilon_block(1.0, sigma, slots, delta, rtol=rtol, begin=begin)
        return np.maximum(first, _epsilon_block(-1.0, sigma, slots, delta, first[0], rtol=rtol))

    return in_blocks(both, _flat(sigma, slots, delta, begin))


def excess(sigma: np.ndarray, slots: np.ndarray, delta: np.ndarray, eps: np.ndarray, direction: str) -> np.ndarray:
    """About log(epsilon at delta) - log(eps) by one step of Newton at eps, (B,); nothing is claimed."""
    sign = SIGNS[direction]

    def step(sigma: np.ndarray, t: np.ndarray, delta: np.ndarray, eps: np.ndarray) -> np.ndarray:
        s, found = 1.0 / sigma, np.full((3, len(sigma)), np.nan)
        rows = np.flatnonzero(reach(s, t) & (eps > 0.0) & (eps < 600.0))
        if rows.size:
            log_option = np.log(delta[rows]) + min(sign, 0.0) * eps[rows]
            for some, contour in contours_at(sign, s[rows], t[rows], np.exp(sign * eps[rows]), log_option, ROUGHLY):
                at = rows[some]
                mid, slope = estimate_of(contour, eps[at])
                found[0, at] = (np.log(mid) - np.log(delta[at])) * mid / (slope * eps[at])
        return found

    return in_blocks(step, _flat(sigma, slots, delta, eps))[0]


def guess(sigma: np.ndarray, slots: np.ndarray, delta: np.ndarray) -> np.ndarray:
    """About epsilon of removing a record, (B,); nothing is claimed."""
    sigma, slots, delta = _flat(sigma, slots, delta)
    with np.errstate(all="ignore"):
        s = 1.0 / sigma
        most = closed_form.epsilon(s, delta, np.zeros_like(delta)).upper
        return start(1.0, s, slots, delta, np.minimum(most, 600.0))


def _flat(*arrays: np.ndarray | float) -> list[np.ndarray]:
    return [np.ravel(a).astype(np.float64) for a in np.broadcast_arrays(*(np.asarray(a, np.float64) for a in arrays))]


def reach(s: np.ndarray, t: np.ndarray) -> np.ndarray:
    return (s > LEAST_S) & (s < MOST_S) & (t <= MOST_SLOTS) & (t > 1.0)


def theorems_of(sign: float, s: np.ndarray, t: np.ndarray, eps: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
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
    low, high = theorems_of(sign, s, t, eps)
    mid = np.sqrt(low * high)
    one = t == 1.0
    if one.any():
        exact = closed_form.delta(s[one], eps[one])
        low[one], mid[one], high[one] = exact.lower, exact.estimate, exact.upper
    rows = np.flatnonzero(reach(s, t) & (high > 1e-290) & (eps < 600.0))
    if rows.size:
        value = _evaluated(sign, s[rows], t[rows], eps[rows], low[rows], high[rows])
        good = (value.lower <= high[rows]) & (value.upper >= low[rows])
        low[rows] = np.where(good, np.fmax(low[rows], value.lower), low[rows])
        high[rows] = np.where(good, np.fmin(high[rows], value.upper), high[rows])
        mid[rows] = np.where(good, value.estimate, mid[rows])
    wide = np.flatnonzero(reach(s, t) & (high - low > 1e-7 * high) & (high > 1e-6) & (eps < 30.0))
    if sign > 0 and wide.size:
        least, most = _by_parity(s[wide], t[wide], eps[wide])
        good = (least <= high[wide]) & (most >= low[wide])
        low[wide] = np.where(good, np.fmax(low[wide], least), low[wide])
        high[wide] = np.where(good, np.fmin(high[wide], most), high[wide])
        mid[wide] = 0.5 * (low[wide] + high[wide])
    return np.array([low, np.clip(mid, low, high), high])


def _by_parity(s: np.ndarray, t: np.ndarray, eps: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(lower, upper) of delta_remove by E(S - k)_+ = 1 - k + E(k - S)_+: of absolute accuracy, for large deltas."""
    k = np.exp(eps)
    low, _, high, _ = brackets_at(-1.0, s, t, k, np.log(k))
    wrong = 16.0 * ROUNDOFF * k
    return (1.0 - k) + low - wrong, (1.0 - k) + high + wrong


def _evaluated(sign: float, s: np.ndarray, t: np.ndarray, eps: np.ndarray, low: np.ndarray, high: np.ndarray) -> Value:
    """Delta by the contour, placed again where the guess of its size was poor."""
    k = np.exp(sign * eps)
    floor, most = np.log(np.maximum(low, 1e-295)), np.log(np.maximum(high, 1e-295))
    guess = np.clip(theorems.guess(sign, s, t, k) - min(sign, 0.0) * eps, floor, most)
    shift = np.where(sign > 0, 0.0, -eps)  # of the option against delta
    value: Value | None = None
    for _ in range(PLACEMENTS):
        ends = np.empty((4, len(s)))
        for rows, contour in contours_at(sign, s, t, k, guess + shift, SMALL):
            ends[:, rows] = value_of(contour, eps[rows])
        found = Value(*ends)
        if value is None:
            value = found
        else:
            better = ~(value.upper - value.lower <= found.upper - found.lower)
            value = Value(*(np.where(better, a, b) for a, b in zip(found, value, strict=True)))
        seen = np.log(np.clip(found.estimate, 1e-295, 1.0))
        seen = np.where(np.isfinite(seen), np.clip(seen, floor, most), guess)
        if np.all((np.abs(seen - guess) < 4.0) | ~(value.upper - value.lower > 1e-7 * value.upper)):
            break
        guess = seen
    assert value is not None
    return value


def _epsilon_block(
    sign: float,
    sigma: np.ndarray,
    t: np.ndarray,
    delta: np.ndarray,
    floor: np.ndarray | None = None,
    *,
    rtol: float,
    begin: np.ndarray | float = 0.0,
) -> np.ndarray:
    s = 1.0 / sigma
    gaussian = closed_form.epsilon(s * (1.0 + 2.0 * ROUNDOFF), delta, np.zeros_like(delta))
    low, mid, high = np.zeros_like(s), 0.5 * gaussian.upper, gaussian.upper.copy()
    one = t == 1.0
    if one.any():
        exact = closed_form.epsilon(s[one], delta[one], 4.0 * ROUNDOFF * np.ones(one.sum()))
        low[one], mid[one], high[one] = exact.lower, exact.estimate, exact.upper
    # Scarf's bound at 0 is the largest delta
    zero = theorems_of(sign, s, t, np.zeros_like(s))[1] <= delta
    low[zero], mid[zero], high[zero] = 0.0, 0.0, 0.0
    if rtol >= ROUGH:  # theorems may suffice
        low = np.where(zero | one, low, np.minimum(_least(sign, s, t, delta, high), high))
    open_ = ~(high - low <= rtol * high)
    rows = np.flatnonzero(reach(s, t) & ~zero & open_ & (delta > 1e-280) & (high > 0.0) & (high < 600.0))
    if rows.size:
        least = 0.0 if floor is None else floor[rows]
        near = np.broadcast_to(begin, s.shape)[rows]
        found = search(sign, s[rows], t[rows], delta[rows], high[rows], rtol, least, near)
        high[rows] = np.fmin(high[rows], found[2])
        low[rows] = np.where(found[0] <= high[rows], np.fmax(found[0], low[rows]), 0.0)
        low[rows] = np.where(low[rows] <= high[rows], low[rows], 0.0)
        mid[rows] = found[1]
    return np.array([low, np.clip(np.where(np.isnan(mid), low, mid), low, high), high])


def _least(sign: float, s: np.ndarray, t: np.ndarray, delta: np.ndarray, most: np.ndarray) -> np.ndarray:
    """The largest epsilon tried at which theorems show a delta above the target; 0 where none does."""
    low, high = np.zeros_like(s), np.minimum(most, 600.0)
    for _ in range(12):
        middle = 0.5 * (low + high)
        above = theorems_of(sign, s, t, middle)[0] > delta
        low, high = np.where(above, middle, low), np.where(above, high, middle)
    return low
