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

TANGENTS = 46
"""Tangents between eps = 0 and the best one at the floor, besides two close to that."""


class Shown(NamedTuple):
    """Brackets of mu row by row, and which of them are narrow."""

    lower: np.ndarray
    upper: np.ndarray
    narrow: np.ndarray


def shown_on_one_contour(
    run: Mechanism, relation: str, floor: np.ndarray, place: Place, width: float
) -> Shown:
    """mu of DP-SGD runs under a relation that is its own reverse, where few tangents decide.

    place : where the best eps at the floor is thought to be.  width : relative width of a bracket of mu that is
    narrow enough.
    """
    near = three_places(place, KNOWN_WIDTH)
    # mu falls as the rate rises: the nearer to the floor, the closer the tangents, in eps as the squares
    shares = 1.0 - np.linspace(1.0, 0.0, TANGENTS + 1)[:-1] ** 2
    epsilon = np.concatenate([place.epsilon * shares[:, None], near])
    order = np.argsort(epsilon, axis=0, kind="stable")
    back = np.argsort(order, axis=0)[-3:]
    epsilon, at_floor = np.take_along_axis(epsilon, order, axis=0), order >= TANGENTS
    lower, upper = np.zeros(floor.size), np.full(floor.size, np.inf)
    rows = np.flatnonzero(np.isfinite(place.epsilon) & (near[0] > 0.0))
    if rows.size:
        some = take_rows(run, rows)
        ends = deltas_along(some, place.epsilon[rows], epsilon[:, rows], at_floor[:, rows], relation, width)
        low, high = (np.take_along_axis(end, back[:, rows], axis=0) for end in ends)
        known = Place(place.epsilon[rows], place.deviation[rows])
        rate = rate_from_three(near[:, rows], Rates(low, high, high), known, floor[rows], KNOWN_WIDTH)
        upper[rows] = largest_mu(np.stack([epsilon[:, rows], *ends]), floor[rows])[0]
        lower[rows] = np.nan_to_num(least_mu(rate, ends[0][0], floor[rows]))
    with np.errstate(invalid="ignore"):
        narrow = np.isfinite(upper) & (lower <= upper) & (upper - lower <= width * upper)
    return Shown(lower, upper, narrow)
