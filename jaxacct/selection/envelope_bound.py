"""The envelope: a cheap upper bound of the worst score's leak, for every law of K and eps >= 0.

With T the concave trade-off curve of the base (largest P-mass of a set of Q-mass u), L its slope and E = e^eps, the
exact integrand `L(u) phi'(T(w) - T(u)) - E phi'(w - u)` is at most `L(u) phi'(T(v)) - E phi'(v)` at v = w - u, since
T is concave.  So

    delta_A(eps) <= int_0^1 max_v (L(u) phi'(T(v)) - E phi'(v))_+ du + phi(1) - phi(1 - T(0)),

and the maximum over v is one upper envelope of lines in L/E for all u and eps (README.md of this folder, "The
envelope").  Gaussian bases are answered by `gaussian_envelope.py`, and here where that is too loose.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

import numpy as np

from jaxacct.core.floats import ROUNDOFF
from jaxacct.mechanisms import Mechanism, batch_shape
from jaxacct.mechanisms.base import element
from jaxacct.selection import gaussian_envelope
from jaxacct.selection.base_profile import common_shape, infinite_mass, place, sides, upper_delta, upper_epsilon
from jaxacct.selection.law_of_k import Law, evaluated
from jaxacct.selection.tradeoff_polygons import outer, upper_hull

__all__ = [
    "INFLATED",
    "LARGEST_EPS",
    "TAIL_SHARE",
    "Envelope",
    "best_lines",
    "cells",
    "crossing",
    "delta",
    "epsilon",
    "lines",
    "rows",
    "without_least",
]

POINTS_ABOVE = 800
"""Values of eps > 0 at which the profile of the base is taken: slopes of the curve above one."""
POINTS_BELOW = 800
"""Values of eps < 0: slopes of the curve below one, where v is."""
CUTS_PER_KNOT = 6
"""Points per knot at which the cells are cut for the maximum over v, besides the knots."""
POINTS_NEAR_ONE = 1500
"""Points that crowd towards v = 1, and as many towards T(v) = 1, where phi' may vary fast."""
TAIL_SHARE = 1e-6
"""Share of delta that the tail of the base beyond the grid of eps may add to the answer."""
INFLATED = 4e-12
"""More than the relative errors of generating functions and of sums."""
LEAST_GAIN = 1e-300
"""A gain is at least this: below it float64 may have lost it."""
STEPS_FROM_BELOW = 60
"""Steps for eps from below, of which some six are usual."""
OUTWARD_STEPS = 24
"""Steps from there, each four times as far as the one before, until the leak is at most delta."""
LEAST_HEIGHT = 1e-300
"""Knots of the polygon whose u is below this are left out: of differences of such u float64 has too few digits."""
LARGEST_EPS = 700.0
"""Largest eps that is looked at: its exp is finite."""
LARGEST_RATIO = float(np.exp(LARGEST_EPS))
"""Its exp."""


class Envelope(NamedTuple):
    """`leak(E) = sum_i height_i max_k (slope_i gain_k - E cost_k)_+ + infinite`, for one base, direction and law."""

    slope: np.ndarray
    height: np.ndarray
    gain: np.ndarray
    cost: np.ndarray
    infinite: float

    def leak(self, ratio: np.ndarray) -> np.ndarray:
        """Upper bounds of delta at ratios E >= 1, any shape."""
        if not all(np.isfinite(x).all() for x in (self.slope, self.height, self.gain, self.cost)):
            return np.ones(ratio.shape)
        gain, cost = self._best(ratio)
        value = self.slope * gain - ratio[..., None] * cost
        total = np.sum(self.height * np.maximum(value, 0.0), axis=-1) + self.infinite
        total = total * (1.0 + INFLATED)
        return np.where(total <= 1.0, total, 1.0)

    def next_ratio(self, ratio: np.ndarray, target: np.ndarray) -> np.ndarray:
        """Where the lines that are the best at `ratio` fall to the target together; NaN or inf where they do not."""
        fixed, cost = self.line(ratio)
        return (fixed - target) / cost

    def line(self, ratio: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(A, B) of the function `A - E B` that the leak is about `ratio`."""
        gain, cost = self._best(ratio)
        height = np.where(self.slope * gain > ratio[..., None] * cost, self.height, 0.0)
        return np.sum(height * self.slope * gain, axis=-1) + self.infinite, np.sum(height * cost, axis=-1)

    def _best(self, ratio: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(gain, cost) of the best line of every row at every ratio."""
        ends = (self.cost[1:] - self.cost[:-1]) / (self.gain[1:] - self.gain[:-1])
        best = np.searchsorted(ends, self.slope / ratio[..., None])
        return self.gain[best], self.cost[best]


def delta(run: Mechanism, law: Law, epsilon: np.ndarray, relation: str) -> np.ndarray:
    """Upper bounds of delta(eps), eps >= 0, of the selection; kind "bound".  run, law and epsilon broadcast."""
    wanted = np.broadcast_to(epsilon, common_shape(run, law, "epsilon", epsilon))
    value, left = _at_once(gaussian_envelope.delta, run, law, wanted)
    for side in sides(run, relation) if left.any() else ():
        level = upper_delta(run, wanted, side.forward) * (TAIL_SHARE / np.maximum(law.mean, 1.0))
        for here, made, _ in _each(run, law, side.forward, level, left):
            value[here] = np.maximum(value[here], made.leak(np.exp(wanted[here])))
    return value


def epsilon(run: Mechanism, law: Law, delta: np.ndarray, relation: str) -> np.ndarray:
    """eps for which the selection is (eps, delta)-DP; inf where none is found.

    The end of a bisection at which the upper bound of delta was at most the target.
    """
    wanted = np.broadcast_to(delta, common_shape(run, law, "delta", delta))
    value, left = _at_once(gaussian_envelope.epsilon, run, law, wanted)
    for side in sides(run, relation) if left.any() else ():
        for here, made, _ in _each(run, law, side.forward, wanted * (TAIL_SHARE / np.maximum(law.mean, 1.0)), left):
            value[here] = np.maximum(value[here], crossing(made, wanted[here]))
    return value


def _at_once(
    answer: Callable[[np.ndarray, Law, np.ndarray], np.ndarray], run: Mechanism, law: Law, wanted: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """(values, where they are not known) of a batch of Gaussian bases; unknown values are 0."""
    mu = gaussian_envelope.mus(run)
    if mu is None:
        return np.zeros(wanted.shape), np.ones(wanted.shape, bool)
    rows = np.broadcast_to(mu.reshape(batch_shape(run)), wanted.shape).reshape(-1)
    found = answer(rows, law.flattened(wanted.shape), wanted.reshape(-1)).reshape(wanted.shape)
    left = ~np.isfinite(found)
    return np.where(left, 0.0, found), left


def _each(
    run: Mechanism, law: Law, relation: str, level: np.ndarray, asked: np.ndarray
) -> Iterator[tuple[np.ndarray, Envelope, float]]:
    """For every pair of a base and a law: where it is asked for, its envelope and the last eps of its grid.

    The grid ends where delta of the base has fallen by `level`, or the share TAIL_SHARE of it, to its mass at infinity.
    """
    shape = np.broadcast_shapes(batch_shape(run), law.shape)
    number = np.broadcast_to(np.arange(int(np.prod(shape))).reshape(shape), level.shape)
    least = np.full(int(np.prod(shape)), np.inf)
    np.minimum.at(least, number.reshape(-1), level.reshape(-1))
    infinite = infinite_mass(run, relation)
    least = np.minimum(np.clip(np.maximum(least.reshape(shape), TAIL_SHARE * infinite), 1e-290, 1.0) + infinite, 1.0)
    last = np.broadcast_to(upper_epsilon(run, least, relation), shape)
    for count, index in enumerate(np.ndindex(shape)):
        here = (number == count) & asked
        if not here.any():
            continue
        top = min(max(float(last[index]), 1e-6), LARGEST_EPS)
        base, one = element(run, place(batch_shape(run), index)), law.element(place(law.shape, index))
        yield here, _made(base, one, top, relation), top


def _made(run: Mechanism, law: Law, top: float, relation: str) -> Envelope:
    """The envelope from a profile on a grid up to eps = top."""
    above, below = (np.linspace(0.0, top, n + 1)[1:] for n in (POINTS_ABOVE, POINTS_BELOW))
    grid = np.concatenate([-below[::-1], [0.0], above])
    _, u, t = outer(np.exp(grid), upper_delta(run, grid, relation))
    u, t = without_least(u, t)
    slope, height = rows(u, t)
    gain, cost = best_lines(*lines(law, *cells(u, t, grid.size + 3)))
    (sure, survived), (steep, _), _ = evaluated(law, np.array([0.0, t[0]]))
    # phi(1) - phi(1 - t) is at most t phi'(1); the difference cancels where t is small
    difference = sure - survived + 4.0 * ROUNDOFF * (1.0 + steep) + 2.0 * INFLATED
    infinite = float(np.fmin(difference, t[0] * steep * (1.0 + 2.0 * INFLATED)))
    return Envelope(slope, height, gain, cost, infinite)


def without_least(u: np.ndarray, t: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A polygon above one with knots (u, T): mass whose u is tiny, of losses near 700, becomes mass at infinity.

    The last knot with a tiny u moves to u = 0, so that the first line rises.
    """
    last = int(np.searchsorted(u, LEAST_HEIGHT)) - 1
    return np.concatenate([[0.0], u[last + 1 :]]), t[last:]


def rows(u: np.ndarray, t: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(slopes, rounded up, and heights) of the lines of a polygon."""
    height, rise = np.diff(u), np.diff(t)
    kept = height > 0.0
    return rise[kept] / height[kept] * (1.0 + INFLATED), height[kept]


def cells(u: np.ndarray, t: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Ends of cells of v on which T is linear; their number depends on `size` alone.

    The cells are narrow where phi'(v) or phi'(T(v)) may vary fast.
    """
    near_one = 1.0 - np.geomspace(1e-13, 1.0, POINTS_NEAR_ONE)
    knots = np.linspace(0.0, u.size - 1.0, CUTS_PER_KNOT * size)
    v = np.concatenate([u, np.ones(size - u.size), np.interp(knots, np.arange(u.size), u), near_one])
    v = np.sort(np.concatenate([v, np.interp(near_one, t, u)]))
    return v, np.interp(v, u, t)


def lines(law: Law, v: np.ndarray, w: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Gain and cost at the ends of the cells, so that `s phi'(T(v)) - phi'(v)` is at most the best line at any s.

    On a cell phi'(T) is at most its chord, and phi' is at least a tangent.  The tangent is the one in the middle, or
    the one on the left where phi' is steep.  The difference is linear, so the ends of the cell decide.
    """
    with np.errstate(all="ignore"):  # what is no number is found by `best_lines`
        _, first, second = evaluated(law, 1.0 - np.stack([0.5 * (v[1:] + v[:-1]), v[:-1]]))
        _, gain, steeper = evaluated(law, 1.0 - w)
        least, tilt = first * (1.0 - INFLATED) - 4.0 * ROUNDOFF * second, second * np.diff(v)
        middle = (tilt[0] < first[0]) & (first[0] > 16.0 * ROUNDOFF * second[0])
        left = np.where(middle, least[0] - 0.5 * tilt[0] * (1.0 + INFLATED), least[1])
        right = np.where(middle, least[0] + 0.5 * tilt[0] * (1.0 - INFLATED), least[1] + tilt[1] * (1.0 - INFLATED))
        cost = np.minimum(np.append(left, np.inf), np.append(np.inf, right))
        gain = np.maximum(gain * (1.0 + INFLATED) + 4.0 * ROUNDOFF * steeper, LEAST_GAIN)
    return np.maximum.accumulate(gain), np.maximum(cost, 0.0)  # rounding may disorder gains that hardly differ


def best_lines(gain: np.ndarray, cost: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The lines that are the best somewhere; where a number left float64, one that is above everything."""
    if not (np.isfinite(gain).all() and np.isfinite(cost).all()):
        return np.array([np.inf]), np.zeros(1)  # a line that is no number must not be left out
    kept = upper_hull(gain, -cost)
    return gain[kept], cost[kept]


class Leak(Protocol):
    """An upper bound of delta at every ratio, a maximum of lines in it."""

    def leak(self, ratio: np.ndarray) -> np.ndarray:
        """Upper bounds of delta."""

    def next_ratio(self, ratio: np.ndarray, target: np.ndarray) -> np.ndarray:
        """Where the line that holds at a ratio falls to the target."""


def crossing(made: Leak, target: np.ndarray) -> np.ndarray:
    """Upper ends of the eps where the leak passes delta: every end is one at which the leak was at most delta.

    The leak is the largest of functions `A - E B` of E = e^eps.  So `E = (A - delta)/B`, with the A and B that hold at
    one E below the end, is below the end too and nearer to it.  From there the end is looked for upwards.
    """
    low = np.ones(target.shape)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        for _ in range(STEPS_FROM_BELOW):
            above = made.next_ratio(low, target)
            following = np.minimum(np.where(above > low, above, low), LARGEST_RATIO)
            done = not np.any(following > low * (1.0 + INFLATED))
            low = following
            if done:
                break
    found, beyond = np.full(target.shape, np.inf), made.leak(np.ones(target.shape)) > target
    ahead = np.log(low)
    for step in INFLATED * 4.0 ** np.arange(OUTWARD_STEPS):
        at = np.minimum(ahead * (1.0 + step) + step, LARGEST_EPS)
        within = made.leak(np.exp(at)) <= target
        found = np.where(np.isinf(found) & within, at, found)
        if np.all(np.isfinite(found)):
            break
    return np.where(beyond, found, 0.0)
