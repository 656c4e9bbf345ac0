"""The largest true-positive rate at a false-positive rate, `T(a) = min over E of {delta(log E) + E a}`, for many rows.

The sum is convex in E.  A secant finds about where it is least, and three values of delta around that place bracket the
minimum.  The place decides only how narrow the bracket is.  Derivation: jaxacct/representations/README.md.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from scipy.special import ndtri

from jaxacct.core.bounds import Bounds
from jaxacct.core.floats import ROUNDOFF

__all__ = [
    "Deltas",
    "Place",
    "Rates",
    "best_epsilon",
    "posterior_of",
    "rate_at",
    "rate_from_three",
    "start_at",
    "three_places",
]

Deltas = Callable[[np.ndarray, np.ndarray], Bounds]
"""(epsilons of shape (K, n), n rows) -> certified delta at them, of the same shape; any real epsilon."""

TURNS = 8
"""Most steps of the secant; each row leaves when it is near enough."""
DIFFERENCE = 0.01
"""Distance in eps of the difference quotient of delta, in deviations of the loss."""
NEAR = 2e-4
"""A place is near enough when the false-positive rate there is this close to the wanted one, as a normal quantile."""
WIDTH = 0.0015
"""Distance of the three values around the place, in deviations of the loss: far beyond NEAR, and small squared."""
LONGEST = 2.0
"""Longest step of the secant, in deviations of the loss."""
LEAST_DEVIATION, LARGEST_DEVIATION = 1e-9, 50.0
"""Deviations of the loss that are thought possible when the search begins and goes on."""


class Place(NamedTuple):
    """About where the sum is least, row by row, and the deviation of the loss there."""

    epsilon: np.ndarray
    deviation: np.ndarray


class Rates(NamedTuple):
    """Brackets: of the largest true-positive rate, or of the deltas that it follows from."""

    low: np.ndarray
    estimate: np.ndarray
    high: np.ndarray


def best_epsilon(deltas: Deltas, fpr: np.ndarray, start: Place | None = None) -> Place:
    """About the eps with `Q(L > eps) = fpr`, at which `delta + e^eps fpr` is least.

    The normal quantile of `Q(L > eps)` is linear in eps for Gaussians and nearly so for compositions, so that its
    secant needs few steps.  Without a start the deviation is that of the Gaussian with the same delta(0).
    """
    everywhere, wanted = np.arange(fpr.size), -ndtri(fpr)
    if start is None:
        start = start_at(np.asarray(deltas(np.zeros((1, fpr.size)), everywhere).estimate)[0], fpr)
    epsilon, deviation = start.epsilon.copy(), start.deviation.copy()
    low, high = np.full(fpr.size, -np.inf), np.full(fpr.size, np.inf)
    last, last_gap = np.full(fpr.size, np.nan), np.full(fpr.size, np.nan)
    rows = everywhere
    for _ in range(TURNS):
        at, spread = epsilon[rows], deviation[rows]
        gap = _quantile(deltas, at, spread, rows) - wanted[rows]
        with np.errstate(all="ignore"):  # what is not a number moves nothing
            slope = (gap - last_gap[rows]) / (at - last[rows])
            fresh = np.isfinite(slope) & (slope > 0.0)
            spread = np.clip(np.where(fresh, 1.0 / slope, spread), LEAST_DEVIATION, LARGEST_DEVIATION)
        low[rows], high[rows] = np.where(gap < 0.0, at, low[rows]), np.where(gap < 0.0, high[rows], at)
        last[rows], last_gap[rows], deviation[rows] = at, gap, spread
        moved = at - spread * np.clip(gap, -LONGEST, LONGEST)
        inside = (moved > low[rows]) & (moved < high[rows])
        moved = np.where(inside, moved, 0.5 * (low[rows] + high[rows]))
        epsilon[rows] = np.where(np.isfinite(moved), moved, at)
        rows = rows[np.abs(gap) > NEAR]
        if not rows.size:
            break
    return Place(epsilon, deviation)


def start_at(advantage: np.ndarray, fpr: np.ndarray) -> Place:
    """The place for the Gaussian whose delta(0) is `advantage`."""
    deviation = np.clip(2.0 * ndtri(0.5 * (1.0 + advantage)), LEAST_DEVIATION, LARGEST_DEVIATION)
    return Place(deviation * (-ndtri(fpr) - 0.5 * deviation), deviation)


def _quantile(deltas: Deltas, epsilon: np.ndarray, deviation: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """About the normal quantile of `Q(L > eps) = -d delta/dE`, by a difference quotient."""
    half = 0.5 * DIFFERENCE * deviation
    values = np.asarray(deltas(np.stack([epsilon - half, epsilon + half]), rows).estimate)
    with np.errstate(all="ignore"):
        tail = (values[0] - values[1]) / (2.0 * np.exp(epsilon) * np.sinh(half))
        return -ndtri(np.clip(np.nan_to_num(tail), 1e-300, 1.0 - 1e-16))


def rate_at(deltas: Deltas, place: Place, fpr: np.ndarray, width: float = WIDTH) -> Rates:
    """Certified bracket of `T(fpr)` from three values of delta around a place, which may be any.

    width : distance of the three in deviations of the loss; the lower end needs a place about that near to the best.
    """
    at = three_places(place, width)
    found = deltas(at, np.arange(fpr.size))
    ends = (np.asarray(end) for end in (found.lower, found.estimate, found.upper))
    return rate_from_three(at, Rates(*ends), place, fpr, width)


def three_places(place: Place, width: float) -> np.ndarray:
    """The eps of the three values, (3, n)."""
    return place.epsilon + width * place.deviation * np.array([-1.0, 0.0, 1.0])[:, None]


def rate_from_three(at: np.ndarray, found: Rates, place: Place, fpr: np.ndarray, width: float) -> Rates:
    """The bracket of `T(fpr)` from those of delta at `three_places`."""
    distance = width * place.deviation
    with np.errstate(over="ignore", invalid="ignore"):
        line = np.exp(at) * fpr
        ends = (found.low + line) * (1.0 - 16.0 * ROUNDOFF), found.estimate + line
        upper = (found.high + line) * (1.0 + 16.0 * ROUNDOFF)
        lower = ends[0]
        # ratio of the distances in E, e^-distance, whose rounding is covered by the factors
        ratio, rough = np.exp(-distance) * (1.0 + 1e-4), np.exp(distance) * (1.0 + 1e-4)
        left = lower[1] - ratio * np.maximum(upper[2] - lower[1], 0.0)
        right = lower[1] - rough * np.maximum(upper[0] - lower[1], 0.0)
        turns = (lower[0] >= upper[1]) & (lower[2] >= upper[1]) & (distance > 1e-9 * np.abs(place.epsilon))
        low = np.where(turns, np.minimum(left, right), fpr)
        high = np.minimum(np.nan_to_num(np.min(upper, axis=0), nan=1.0, posinf=1.0), 1.0)
    low = np.minimum(np.maximum(np.nan_to_num(low), fpr), 1.0)
    agree = low <= high
    low, high = np.where(agree, low, fpr), np.where(agree, high, 1.0)
    return Rates(low, np.clip(np.nan_to_num(ends[1][1]), low, high), high)


def posterior_of(rate: Any, prior: Any, fpr: Any, turn: int) -> Any:
    """`p t/(p t + (1 - p) a)` for a true-positive rate t, rounded down (turn -1) or up (1)."""
    with np.errstate(all="ignore"):
        # a/t first: neither p t nor (1 - p)/p need be a float64
        odds = (1.0 - prior) * (fpr / rate / prior)
        found = 1.0 / (1.0 + odds) * (1.0 + turn * 16.0 * ROUNDOFF)
    tiny = (fpr < 1e-290 * rate) & (fpr > 0.0)  # the quotient may be subnormal, and then it is not accurate
    if turn > 0:
        found = np.where(tiny, 1.0, np.maximum(found, 1e-307))
    elif turn < 0:
        found = np.where(tiny | (found < 1e-300), 0.0, found)
    return np.clip(np.where(rate > 0.0, found, prior), 0.0, 1.0)
