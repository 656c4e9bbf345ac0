"""Two pairs from a certified bracket of a privacy profile at points: one that dominates it, and one that it dominates.

Above, the chords between the upper ends (`pair_of_profile`).  Below, the profile lies above the chord of two points
wherever that is continued beyond them, since it is convex in a = e^eps.  Between two points the larger of the two
chords that are continued from either side holds, and so does the largest convex function below all of these.  Its
corners are where the two continued chords meet.  README.md, "Two pairs of a bracket".
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from jaxacct.core.floats import ROUNDOFF
from jaxacct.mechanisms.parts import FinitePair, FinitePart
from jaxacct.mechanisms.profile import LEAST_GAP, pair_of_profile

__all__ = ["BracketedProfile", "direction_of", "lowered_part", "pair_above", "pair_below", "part_below"]

CORNER_UNITS = 32.0
"""Units of rounding by which a corner of the pair below is lowered, of the terms that it is the difference of."""
MASS_UNITS = 128.0
"""Units of rounding by which a mass is rounded outward: 16 that `pair_of_profile` adds, as many that it may be off, and
the sums and the exponential here."""


FLATTEST = 1e-20
"""Least slope of a continued chord, relative to its value: one that does not fall at all would have no end."""


class BracketedProfile(NamedTuple):
    """A convex profile delta(eps) known to lie between two ends at points eps, ascending from 0; all of shape (K,)."""

    epsilon: np.ndarray
    lower: np.ndarray
    upper: np.ndarray


def pair_above(forward: BracketedProfile, reverse: BracketedProfile) -> FinitePair:
    """The pair that dominates: forward is H_{e^eps}(P || Q), reverse H_{e^eps}(Q || P), each at its own points."""
    return pair_of_profile(*_joined(forward.epsilon, forward.upper, reverse.epsilon, reverse.upper))


def part_below(forward: BracketedProfile, reverse: BracketedProfile, direction: str) -> FinitePart:
    """The law of the loss, under P for "remove" and under Q for "add", of a pair that is dominated.

    The masses sum to 1: what is rounded away is given to the lowest loss.  That is dominated as well.  While the payoff
    takes the lowest loss in, it takes in all, and is 1 - a times the mass under the other law, which is 1 or more.
    """
    return direction_of(pair_below(forward, reverse), direction)


def pair_below(forward: BracketedProfile, reverse: BracketedProfile) -> FinitePair:
    """A pair that is dominated but for rounding, which `direction_of` allows for."""
    corners = (_corners(*forward), _corners(*reverse))
    centre = min(values[0] for _, values in corners)
    for _, values in corners:
        values[0] = centre
    return pair_of_profile(*_joined(*corners[0], *corners[1]))


def direction_of(pair: FinitePair, direction: str) -> FinitePart:
    """`part_below` of a pair of `pair_below`."""
    order = np.argsort(pair.loss, kind="stable")
    loss, p, q = (x[order] for x in pair[:3])
    keep = (p > 0.0) & (q > 0.0)
    loss, p, q = loss[keep], p[keep], q[keep]
    # a mass is the difference of two sums of masses beyond it, times e^|loss|
    beyond = np.where(loss >= 0.0, np.cumsum(q[::-1])[::-1], np.cumsum(p))
    with np.errstate(over="ignore"):
        wrong = MASS_UNITS * ROUNDOFF * (p + q + 2.0 * beyond * np.exp(np.abs(loss)))
    larger, smaller = wrong, wrong * np.exp(-np.abs(loss))
    off_p, off_q = np.where(loss >= 0.0, larger, smaller), np.where(loss >= 0.0, smaller, larger)
    if direction == "add":
        loss, p, q, off_p, off_q = (x[::-1] for x in (-loss, q, p, off_q, off_p))
    p, q = p - off_p, q + off_q
    return lowered_part(p, q)


def lowered_part(p: np.ndarray, q: np.ndarray) -> FinitePart:
    """The law of log p/q under P, for masses p that were rounded down and q that were rounded up."""
    keep = p > 0.0
    p, q = p[keep], q[keep]
    if not p.size:
        return FinitePart(np.zeros(1), np.ones(1), np.asarray(0.0))
    loss = np.log(p) - np.log(q)
    rest = 1.0 - p.sum()
    if rest >= 0.0:
        p, q = _lowest_as_one(p, q, loss, rest)
        loss = np.log(p) - np.log(q)
        lowest = int(np.argmin(loss))
        p[lowest] += rest
        # its own mass under the other law stays, or grows so that its loss stays the lowest
        others = np.delete(loss, lowest)
        most = float(others.min()) if others.size else 0.0
        loss[lowest] = min(np.log(p[lowest]) - np.log(q[lowest]), most)
    else:
        p = p / p.sum() * (1.0 - 4.0 * ROUNDOFF * p.size)
        loss = np.log(p) - np.log(q)
    return FinitePart(loss, p, np.asarray(0.0))


def _lowest_as_one(p: np.ndarray, q: np.ndarray, loss: np.ndarray, mass: float) -> tuple[np.ndarray, np.ndarray]:
    """The lowest losses that have no more than `mass` together as one atom, which is post-processing.

    `mass` itself is given to that atom.  Alone at the lowest loss of all it would be far more than any law with such a
    tail has there, and a lattice made for the pair above has no room for that.
    """
    order = np.argsort(loss, kind="stable")
    many = max(int(np.searchsorted(np.cumsum(p[order]), mass, side="right")), 1)
    first, others = order[:many], order[many:]
    return np.append(p[others], p[first].sum()), np.append(q[others], q[first].sum())


def _joined(
    epsilon: np.ndarray, delta: np.ndarray, back: np.ndarray, reverse: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Points of the two directions on one axis; 1, which says nothing, where a direction has no point."""
    both = np.union1d(epsilon, back)
    f, r = np.ones(both.size), np.ones(both.size)
    f[np.searchsorted(both, epsilon)], r[np.searchsorted(both, back)] = delta, reverse
    return both, f, r


def _corners(epsilon: np.ndarray, lower: np.ndarray, upper: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(eps, value) of the corners of a convex function below the profile, ending where it is 0.

    The line through two points, continued to the right, carries every corner.  It holds wherever it is continued, so
    that a corner may lie further to the right on it than where it meets the line that comes from the right.
    """
    if epsilon.size < 3:  # no chord on either side of a point
        return np.zeros(1), np.zeros(1)
    a = np.exp(epsilon)
    gap = a[:-1] * np.expm1(np.diff(epsilon))
    # slopes of chords in a: at most the profile's own to their right, at least the profile's own to their left
    steep = np.minimum((lower[1:] - upper[:-1]) / gap, -FLATTEST * lower[1:] / a[1:])
    flat = np.minimum((upper[1:] - lower[:-1]) / gap, 0.0)
    first = lower[1] - flat[1] * gap[0] - _off(lower[1], flat[1], a[1])
    at, values, end = [0.0], [max(float(first), 0.0)], 1e-3
    size = epsilon.size
    points, heights, a, gap, steep, flat = (x.tolist() for x in (epsilon, lower, a, gap, steep, flat))  # loops faster
    for k in range(1, size):
        if heights[k] <= 0.0 or values[-1] <= 0.0:
            break
        slope = steep[k - 1]
        zero = heights[k] / -slope if slope < 0.0 else math.inf  # how far beyond the point the line meets 0
        end = points[k] + math.log1p(zero / a[k])
        reach = zero
        if k + 2 < size:
            turn = flat[k + 1] - slope
            reach = (heights[k] - heights[k + 1] + flat[k + 1] * gap[k]) / turn if turn > 0.0 else gap[k]
        if k + 1 < size:
            reach = min(max(reach, 0.0), gap[k])
        here = max(points[k] + math.log1p(reach / a[k]), at[-1] + LEAST_GAP)
        if here >= end:
            break
        reach = a[k] * math.expm1(here - points[k])
        value = heights[k] + slope * reach - _off(heights[k], slope, a[k] + reach)
        at.append(here)
        values.append(max(value, 0.0))
    if values[-1] > 0.0:  # along the last line down to 0
        at.append(max(end, at[-1] + LEAST_GAP))
        values.append(0.0)
    return np.array(at), np.array(values)


def _off(value: float, slope: float, a: float) -> float:
    return CORNER_UNITS * ROUNDOFF * (abs(value) + abs(slope) * a)
