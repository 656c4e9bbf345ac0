"""Whether a mu of Gaussian differential privacy that is known beforehand holds above a floor, by one contour for each run.

mu is nearly always attained at the floor, and what the tangents elsewhere show is less.  So many tangents on one
contour decide, rough ones far from the floor.  What they leave open is for `risk_mu.gaussian_fit`.
Derivation: jaxacct/representations/README.md, "Gaussian differential privacy".
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from jaxacct.mechanisms import Mechanism
from jaxacct.mechanisms.base import take_rows
from jaxacct.risk_deltas import deltas_along
from jaxacct.risk_mu import KNOWN_WIDTH, largest_mu, least_mu
from jaxacct.risk_rates import Place, Rates, rate_from_three, three_places

__all__ = ["Shown", "shown_on_one_contour"]

ALMOST = 0.02
"""Relative width of a bracket that more tangents may make narrow."""
BLOCKS = (1, 4)
"""Blocks of tangents of the first and the second try; mu of a nearly Gaussian run hardly falls, and needs many."""
BLOCK = 64
"""Tangents of a block, which share a contour; three of all are for the rate at the floor."""


class Shown(NamedTuple):
    """Brackets of mu row by row, and which of them are narrow."""

    lower: np.ndarray
    upper: np.ndarray
    narrow: np.ndarray


def shown_on_one_contour(run: Mechanism, relation: str, floor: np.ndarray, place: Place, width: float) -> Shown:
    """mu of DP-SGD runs under a relation that is its own reverse, where tangents chosen beforehand decide.

    place : where the best eps at the floor is thought to be.  width : relative width of a bracket of mu that is
    narrow enough.
    """
    shown = Shown(np.zeros(floor.size), np.full(floor.size, np.inf), np.zeros(floor.size, bool))
    near = three_places(place, KNOWN_WIDTH)
    rows = np.flatnonzero(np.isfinite(place.epsilon) & (near[0] > 0.0))
    for blocks in BLOCKS:
        if rows.size:
            some = Place(place.epsilon[rows], place.deviation[rows])
            lower, upper = _bracket(take_rows(run, rows), relation, floor[rows], some, near[:, rows], width, blocks)
            # a row whose rate at the floor is not known needs more than tangents
            more = (lower <= upper) & (upper - lower <= ALMOST * upper)
            with np.errstate(invalid="ignore"):
                narrow = np.isfinite(upper) & (lower <= upper) & (upper - lower <= width * upper)
            shown.lower[rows], shown.upper[rows], shown.narrow[rows] = lower, upper, narrow
            rows = rows[more & ~narrow]
    return shown


def _bracket(
    run: Mechanism, relation: str, floor: np.ndarray, place: Place, near: np.ndarray, width: float, blocks: int
) -> tuple[np.ndarray, np.ndarray]:
    """Lower and upper ends of mu, by so many blocks of tangents."""
    size, tangents = floor.size, BLOCK * blocks - 3
    # mu falls as the rate rises: the nearer to the floor, the closer the tangents, in eps as the squares
    shares = 1.0 - np.linspace(1.0, 0.0, tangents + 1)[:-1] ** 2
    epsilon = np.concatenate([place.epsilon * shares[:, None], near])
    order = np.argsort(epsilon, axis=0, kind="stable")
    back = np.argsort(order, axis=0)[-3:]
    epsilon, at_floor = np.take_along_axis(epsilon, order, axis=0), order >= tangents
    # a block is a row of its own
    apart = lambda values: values.reshape(blocks, BLOCK, size).swapaxes(0, 1).reshape(BLOCK, blocks * size)
    whole = lambda values: values.reshape(BLOCK, blocks, size).swapaxes(0, 1).reshape(blocks * BLOCK, size)
    many = take_rows(run, np.tile(np.arange(size), blocks))
    found = deltas_along(many, np.tile(place.epsilon, blocks), apart(epsilon), apart(at_floor), relation, width)
    ends = [whole(end) for end in found]
    low, high = (np.take_along_axis(end, back, axis=0) for end in ends)
    rate = rate_from_three(near, Rates(low, high, high), place, floor, KNOWN_WIDTH)
    upper = largest_mu(np.stack([epsilon, *ends]), floor)[0]
    return np.nan_to_num(least_mu(rate, ends[0][0], floor)), upper
