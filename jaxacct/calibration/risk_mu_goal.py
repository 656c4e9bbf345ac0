"""mu of Gaussian differential privacy above a floor by tangents chosen beforehand, on one contour for each direction.

Where about the best eps at the floor is known, and mu is attained there as nearly always, they show less elsewhere.  So
many tangents decide, rough ones far from the floor.  What they leave open is for `risk_mu.gaussian_fit`.
Derivation: jaxacct/representations/README.md, "Gaussian differential privacy".
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from jaxacct.accounting.gaussian_mu import KNOWN_WIDTH, largest_mu, least_mu
from jaxacct.accounting.nearby_deltas import deltas_along
from jaxacct.accounting.true_positive_rates import Place, Rates, rate_from_three, three_places
from jaxacct.mechanisms import Mechanism
from jaxacct.mechanisms.base import take_rows

__all__ = ["Shown", "shown_on_one_contour"]

BLOCK = 64
"""Tangents of a block, which share a contour."""
TRIES = ((1, 1e-2), (1, 1e-2), (1, 1e-5), (4, 1e-8))
"""Blocks of tangents, and what the contour may cut off of the width, try by try.

mu of a nearly Gaussian run hardly falls, and needs many tangents.  Where losses are rare and large, what is cut off is
many times as much as the saddle point approximation shows.
"""
ABOVE, FARTHEST = 8, 0.12
"""Tangents of a block above the place, in case the best eps is there, and the distance of the last in shares of it."""


class Shown(NamedTuple):
    """Brackets of mu row by row, which of them are narrow, and about the best eps at the floor."""

    lower: np.ndarray
    upper: np.ndarray
    narrow: np.ndarray
    epsilon: np.ndarray


@np.errstate(invalid="ignore")  # a comparison with what is not a number does not hold
def shown_on_one_contour(
    run: Mechanism, relation: str, floor: np.ndarray, place: Place, width: float, rungs: np.ndarray | None = None
) -> Shown:
    """mu of DP-SGD runs under a relation that is its own reverse, where tangents chosen beforehand decide.

    place : where the best eps at the floor is thought to be.  width : relative width of a bracket of mu that is
    narrow enough.  rungs : as of `deltas_along`.
    """
    size = floor.size
    shown = Shown(np.zeros(size), np.full(size, np.inf), np.zeros(size, bool), place.epsilon.copy())
    rungs = np.zeros((2, size), int) if rungs is None else rungs
    rows = np.arange(size)
    for blocks, tolerance in TRIES:
        at = Place(shown.epsilon[rows], place.deviation[rows])
        usable = np.isfinite(at.epsilon) & (three_places(at, KNOWN_WIDTH)[0] > 0.0)
        rows, at = rows[usable], Place(at.epsilon[usable], at.deviation[usable])
        if not rows.size:
            break
        begin = rungs[:, rows]
        lower, upper, better = _bracket(
            take_rows(run, rows), relation, floor[rows], at, width, blocks, tolerance, begin
        )
        rungs[:, rows] = begin
        more = (lower <= upper) & np.isfinite(upper)
        narrow = more & (upper - lower <= width * upper)
        shown.lower[rows], shown.upper[rows], shown.narrow[rows] = lower, upper, narrow
        shown.epsilon[rows] = np.where(narrow | ~np.isfinite(better), at.epsilon, better)
        rows = rows[more & ~narrow]
    # what wide brackets say of the place is not used
    return shown._replace(epsilon=np.where(shown.narrow, shown.epsilon, place.epsilon))


def _bracket(
    run: Mechanism,
    relation: str,
    floor: np.ndarray,
    place: Place,
    width: float,
    blocks: int,
    tolerance: float,
    rungs: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Lower and upper ends of mu, by so many blocks of tangents, and about the best eps at the floor."""
    size, near = floor.size, three_places(place, KNOWN_WIDTH)
    above = ABOVE * blocks
    below = BLOCK * blocks - 3 - above
    # mu falls as the rate rises: the nearer to the floor, the closer the tangents, in eps as the squares
    shares = 1.0 - np.linspace(1.0, 0.0, below + 1)[:-1] ** 2
    shares = np.append(shares, 1.0 + FARTHEST * np.linspace(0.0, 1.0, above + 1)[1:] ** 2)
    epsilon = np.concatenate([place.epsilon * shares[:, None], near])
    order = np.argsort(epsilon, axis=0, kind="stable")
    back = np.argsort(order, axis=0)[-3:]
    epsilon, at_floor = np.take_along_axis(epsilon, order, axis=0), order >= BLOCK * blocks - 3
    # a block is a row of its own
    apart = lambda values: values.reshape(blocks, BLOCK, size).swapaxes(0, 1).reshape(BLOCK, blocks * size)
    whole = lambda values: values.reshape(BLOCK, blocks, size).swapaxes(0, 1).reshape(blocks * BLOCK, size)
    many = take_rows(run, np.tile(np.arange(size), blocks))
    asked = np.tile(place.epsilon, blocks), apart(epsilon), apart(at_floor)
    every = np.tile(rungs, blocks)
    found = deltas_along(many, *asked, relation, width, tolerance, every)
    rungs[:] = every.reshape(2, blocks, size).max(axis=1)
    ends = [whole(end) for end in found]
    low, high = (np.take_along_axis(end, back, axis=0) for end in ends)
    rate = rate_from_three(near, Rates(low, high, high), place, floor, KNOWN_WIDTH)
    upper = largest_mu(np.stack([epsilon, *ends]), floor)[0]
    return np.nan_to_num(least_mu(rate, ends[0][0], floor)), upper, _lowest(epsilon, ends[1], floor)


@np.errstate(all="ignore")  # a place that is not a number is not used
def _lowest(epsilon: np.ndarray, delta: np.ndarray, floor: np.ndarray) -> np.ndarray:
    """About the eps at which `delta + e^eps a` is least, by a parabola through the least value and its neighbours."""
    rates = delta + np.exp(epsilon) * floor
    best = np.clip(np.argmin(rates, axis=0), 2, epsilon.shape[0] - 3)
    # the next but one: neighbours may be so near that only rounding tells them apart
    x, y = (np.take_along_axis(v, best + np.array([-2, 0, 2])[:, None], axis=0) for v in (epsilon, rates))
    left, right = (y[1] - y[0]) / (x[1] - x[0]), (y[2] - y[1]) / (x[2] - x[1])
    bend = (right - left) / (x[2] - x[0])
    found = 0.5 * (x[0] + x[1]) - 0.5 * left / bend
    return np.where((bend > 0.0) & (found > 0.0), np.clip(found, 0.8 * x[0], 1.2 * x[2]), x[1])
