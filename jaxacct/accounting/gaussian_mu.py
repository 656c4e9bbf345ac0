"""The mu of Gaussian differential privacy that holds above a floor of the error rates.

The claim is `f(a) >= f_mu(a) wherever a >= floor and f(a) >= floor`, f the trade-off function of both directions.
It is shown by tangents: `1 - f(a) <= delta(eps) + e^eps a` for every eps, and against the convex f_mu a tangent need
only be compared at the two ends of a cell.
Derivation: jaxacct/representations/README.md, "Gaussian differential privacy".
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from scipy.special import ndtri

from jaxacct.accounting.true_positive_rates import Deltas, Place, Rates, best_epsilon, rate_at
from jaxacct.core.bounds import Bounds
from jaxacct.core.floats import ROUNDOFF

__all__ = ["KNOWN_WIDTH", "GaussianFit", "Goal", "gaussian_fit", "largest_mu", "least_mu", "with_more"]

TANGENTS = 13
"""Tangents of the first round, evenly spread in eps from 0 to the best one at the floor."""
STRETCH = 4.0
"""How far beyond the best place at the floor tangents reach where that place is not certain, as with atoms."""
ROUNDS = 14
"""How often tangents are added where the bound is largest."""
DOUBLINGS = 3
"""How often every cell is then halved while the bracket is not "ok"."""
OK_WIDTH = 1e-4
"""Relative width of a bracket that is "ok"."""
ADDED = 3
"""Tangents added to a row in a round."""
ADDED_TO_GOAL = 6
"""The same where mu need only be shown to be at most a goal, which many cells may miss at first."""
NEAREST_TANGENT = 0.004
"""Distance in eps of the two steepest tangents, over that of the steepest and eps = 0, where there is a goal."""
FAR_TANGENTS = 7
"""How many of these, the flattest, are not near the others."""
TOGETHER = 0.8
"""Spread in eps of tangents that are near each other, in deviations of the loss."""
KNOWN_WIDTH = 0.004
"""Distance of the three values around a place that is known, in deviations of the loss: twice what it may be off."""
NARROW = 2e-7
"""A row is finished when its bracket of mu is relatively this narrow."""
ROUNDING = 1e-13
"""Relative error allowed for normal quantiles."""


class GaussianFit(NamedTuple):
    """Brackets row by row."""

    mu: Bounds
    lines: np.ndarray
    """The tangents of the first round: (eps, lower and upper delta), each (K, n)."""
    epsilon: np.ndarray
    """The eps of the best tangent at the floor."""


class Goal(NamedTuple):
    """A mu that is to be shown, row by row, and where the best place at the floor is thought to be."""

    mu: np.ndarray
    place: Place
    near: Deltas
    """The deltas, quicker, where the epsilons of a row are near each other."""
    width: float
    """Relative width of a bracket that is narrow enough."""


def gaussian_fit(
    deltas: Deltas, floor: np.ndarray, kind: str, start: Place | None = None, goal: Goal | None = None
) -> GaussianFit:
    """mu of rows whose `deltas` are those of a relation that is its own reverse.

    floor : least false-positive and false-negative rate, in (0, 1/2).  goal : a row is finished, too, when a narrow
    bracket of mu is at most that, or when mu is above it.
    """
    size = floor.size
    everywhere = np.arange(size)
    place, rate = _at_floor(deltas, floor, start, goal)
    # without a lower end the place may be on either side of a jump of Q(L > eps)
    last = np.maximum(place.epsilon, 1e-9) * np.where(rate.low > floor, 1.0, STRETCH)
    shares = np.linspace(0.0, 1.0, TANGENTS)
    if goal is not None:  # mu is nearly always largest at the floor, and what is shown elsewhere must not be larger
        shares = np.append(1.0 - np.geomspace(1.0, NEAREST_TANGENT, TANGENTS - 1), 1.0)
    epsilon = last * shares[:, None]
    far = 0 if goal is None else FAR_TANGENTS
    lines = np.concatenate([_lines(deltas, part, everywhere, goal) for part in (epsilon[:far], epsilon[far:])], axis=1)
    low = least_mu(rate, lines[1, 0], floor)
    high = np.full(size, np.inf)
    rows, first, added = everywhere, lines, ADDED if goal is None else ADDED_TO_GOAL
    last_turn = ROUNDS if goal is not None else ROUNDS + DOUBLINGS
    for turn in range(last_turn + 1):
        most, ends = largest_mu(lines, floor[rows])
        high[rows] = np.minimum(high[rows], most)
        enough = NARROW if turn < ROUNDS else OK_WIDTH
        done = (high[rows] - low[rows] <= enough * high[rows]) | (turn == last_turn)
        if goal is not None:
            near = high[rows] - low[rows] <= goal.width * high[rows]
            done |= (near & (high[rows] <= goal.mu[rows])) | (low[rows] > goal.mu[rows])
        if done.all():
            break
        rows, lines, ends = rows[~done], lines[:, :, ~done], ends[:, ~done]
        worst = np.argpartition(-ends, added, axis=0)[:added]
        if turn >= ROUNDS:  # many cells have nearly the largest bound
            worst = np.arange(ends.shape[0])[:, None] + np.zeros((1, rows.size), int)
        lines = _with(lines, _lines(deltas, _between(lines, worst), rows, goal))
    low = np.nan_to_num(low)
    agree = low <= high  # of ends that contradict each other neither is used
    low, high = np.where(agree, low, 0.0), np.where(agree, high, np.inf)
    narrow = np.isfinite(high) & (high - low <= OK_WIDTH * high)
    status = np.where(agree, np.where(narrow, "ok", "width"), "contradiction")
    mu = Bounds(low if kind == "certified" else 0.0 * low, high, high, kind, status, "tradeoff")
    return GaussianFit(mu, first, last)


def _at_floor(deltas: Deltas, floor: np.ndarray, start: Place | None, goal: Goal | None) -> tuple[Place, Rates]:
    """The best place at the floor, and the bracket of the true-positive rate there."""
    if goal is None:
        place = best_epsilon(deltas, floor, start)
        return place, rate_at(deltas, place, floor)
    place = Place(goal.place.epsilon.copy(), goal.place.deviation.copy())
    rate = rate_at(goal.near, place, floor, KNOWN_WIDTH)
    left = np.flatnonzero(~(rate.low > floor))
    if left.size:  # it is not where it was thought to be
        some = lambda epsilon, rows: deltas(epsilon, left[rows])
        found = best_epsilon(some, floor[left], Place(place.epsilon[left], place.deviation[left]))
        place.epsilon[left], place.deviation[left] = found
        for end, new in zip(rate, rate_at(some, found, floor[left]), strict=True):
            end[left] = new
    return place, rate


def least_mu(rate: Rates, least_advantage: np.ndarray, floor: np.ndarray) -> np.ndarray:
    """The mu that a bracket of the true-positive rate at the floor and a lower end of delta(0) refute, NaN for none."""
    low = np.maximum(_distance(rate.low, floor, -1.0), _on_diagonal(0.5 * (1.0 - least_advantage), -1.0))
    # only then is the floor in the range of the claim
    return np.where(1.0 - rate.high >= floor * (1.0 + 4.0 * ROUNDOFF), low, 0.0)


def _distance(rate: np.ndarray, fpr: np.ndarray, turn: float) -> np.ndarray:
    """`Phi^-1(rate) - Phi^-1(fpr)`, the mu on whose curve a true-positive rate lies, rounded by `turn`."""
    with np.errstate(invalid="ignore"):
        first, second = ndtri(np.clip(rate * (1.0 + turn * 8.0 * ROUNDOFF), 0.0, 1.0)), ndtri(fpr)
        return first - second + turn * ROUNDING * (np.abs(second) + np.where(np.isfinite(first), np.abs(first), 0.0))


def _on_diagonal(rate: np.ndarray, turn: float) -> np.ndarray:
    """The mu whose curve meets the diagonal at an error rate up to 1/2, `-2 Phi^-1(rate)`, rounded by `turn`."""
    with np.errstate(invalid="ignore"):
        found = -2.0 * ndtri(np.clip(rate * (1.0 - turn * 8.0 * ROUNDOFF), 0.0, 0.5)) * (1.0 + turn * ROUNDING)
        return np.maximum(found, 0.0)


def largest_mu(lines: np.ndarray, floor: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The mu that all cells show, and the largest mu at each of the ends between two cells.

    Cell k is where tangent k is used.  Any division of [floor, c] into cells is sound where a tangent meets the
    diagonal at c or above it, with the mu that the diagonal asks for at c.
    """
    epsilon, _, delta = lines
    with np.errstate(over="ignore"):  # a tangent so steep says nothing
        ratio = np.exp(epsilon) * (1.0 + 4.0 * ROUNDOFF)
    fixed = 0.5 * (1.0 - delta[0])  # on the diagonal; the rest follows by symmetry
    floor = np.minimum(floor, np.maximum(fixed, 0.0))
    with np.errstate(all="ignore"):
        ends = (delta[:-1] - delta[1:]) / np.diff(ratio, axis=0)
    ends = np.minimum.accumulate(np.clip(np.nan_to_num(ends, nan=1.0), floor, np.maximum(fixed, floor)), axis=0)
    edges = np.concatenate([fixed[None], ends, floor[None]])  # falling; cell k is [edges[k + 1], edges[k]]
    at_left, at_right = (_distance(delta + ratio * edge, edge, 1.0) for edge in (edges[1:], edges[:-1]))
    used = edges[1:] < edges[:-1]
    shown = np.where(used, np.maximum(at_left, at_right), -np.inf)
    nowhere = ~used.any(axis=0)
    alone = np.min(_distance(delta + ratio * floor, floor, 1.0), axis=0)
    # beyond `fixed` another tangent may be the larger: there f_mu is at most `fixed`, and so below it
    largest = np.maximum(np.where(nowhere, alone, np.max(shown, axis=0)), _on_diagonal(fixed, 1.0))
    # a rate of 0 or more above 1 has no mu
    largest = np.where((fixed > 0.0) & ~np.isnan(largest), largest, np.inf)
    between = np.maximum(np.where(used[:-1], at_left[:-1], -np.inf), np.where(used[1:], at_right[1:], -np.inf))
    return largest, np.nan_to_num(between, nan=np.inf)


def with_more(deltas: Deltas, lines: np.ndarray, cells: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """The tangents of some rows with others between tangents c and c + 1, for the (R, n) numbers c in `cells`."""
    return _with(lines, _lines(deltas, _between(lines, cells), rows, None))


def _between(lines: np.ndarray, cells: np.ndarray) -> np.ndarray:
    return 0.5 * (np.take_along_axis(lines[0], cells, axis=0) + np.take_along_axis(lines[0], cells + 1, axis=0))


def _with(lines: np.ndarray, more: np.ndarray) -> np.ndarray:
    together = np.concatenate([lines, more], axis=1)
    order = np.argsort(together[0], axis=0, kind="stable")
    return np.take_along_axis(together, order[None], axis=1)


def _lines(deltas: Deltas, epsilon: np.ndarray, rows: np.ndarray, goal: Goal | None) -> np.ndarray:
    """(eps, lower and upper delta) of tangents, each (K, n)."""
    lines = np.stack([epsilon, epsilon, epsilon])
    close = np.zeros(rows.size, bool)
    if goal is not None and epsilon.size:
        close = np.ptp(epsilon, axis=0) <= TOGETHER * goal.place.deviation[rows]
    for some, ask in ((np.flatnonzero(~close), deltas), (np.flatnonzero(close), goal.near if goal else deltas)):
        if some.size and epsilon.size:
            found = ask(epsilon[:, some], rows[some])
            lines[1][:, some], lines[2][:, some] = found.lower, found.upper
    return lines
