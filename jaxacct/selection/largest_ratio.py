"""The largest of `phi'(T(v) - p)/phi'(v)` over v, rounded up: by how much a selection can raise the largest loss.

phi is the generating function of K, T the trade-off curve of the base in one direction and p = T(0) its mass at
infinity.  README.md of this folder, "The ends of the profile", has the proof and the rounding.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from scipy.special import expit

from jaxacct.core.floats import ROUNDOFF
from jaxacct.kernels.worst_mesh import Outer
from jaxacct.selection.law_families import Binomial, PointMass, Poisson, TruncatedNegativeBinomial
from jaxacct.selection.law_of_k import Law, evaluated

__all__ = [
    "LARGEST_LOSS",
    "LEAST_SLOPE",
    "LOG_ODDS_FIRST",
    "LOG_ODDS_LAST",
    "MASS_ERROR",
    "RELATIVE_ERROR",
    "largest_ratio",
    "log_ratio_at_knots",
    "log_slopes",
    "slopes",
]

MASS_ERROR = 16.0 * ROUNDOFF
"""More than the absolute error of a mass: masses are at most 1 and a difference of two has a few roundings."""
RELATIVE_ERROR = 4e-12
"""More than the relative errors of phi, of phi' (exponents up to 700) and of masses."""
LOG_ODDS_FIRST = -40.0
"""First end of s, where v = 1/(1 + e^-s): below it, at v = 4e-18, one bound serves all v."""
LOG_ODDS_LAST = 60.0
"""Last end of s but for infinity: 1 - v is 1e-26 there."""
FIRST_CELLS = 4096
"""Cells of s at first."""
PIECES_PER_CUT = 4
"""A cell whose bound counts is cut into so many."""
MOST_CELLS = 2**18
"""Cells are cut as long as there are fewer than this, which limits time and memory; the bound is then looser."""
RATIO_TOLERANCE = 1e-8
"""Relative error of the largest ratio that is aimed at: it moves the largest loss by as much, absolutely."""
KNOTS_DECIDE = (Binomial, PointMass, Poisson, TruncatedNegativeBinomial)
"""Families of laws for which the largest ratio is at a knot (README.md of this folder, "The ends of the profile")."""
LARGEST_LOSS = 650.0
"""Largest loss of a base that is looked at: exp of it is far from overflow."""
LEAST_SLOPE = 1e-290
"""phi' rounded up is at least this, and no order counts whose cost is less: below it float64 may have lost it."""


def log_ratio_at_knots(above: Outer, law: Law, apart: float) -> float:
    """An upper bound of `log phi'(T(v) - p) - log phi'(v)` over v; inf if unknown.

    For the families named here the ratio is monotone between the knots of T, so that the knots decide.  Of any other
    law, a user's own included, that is not known.
    """
    if type(law) not in KNOTS_DECIDE:
        return np.inf
    gain, cost = (
        log_slopes(law, 1.0 - above.p + apart * (1.0 - RELATIVE_ERROR) - MASS_ERROR, 1.0),
        log_slopes(law, 1.0 - above.q, -1.0),
    )
    with np.errstate(invalid="ignore"):
        found = float(np.max(gain - cost))
    return found if found >= 0.0 else np.inf


def log_slopes(law: Law, y: np.ndarray, side: float) -> np.ndarray:
    """log phi' at 1 - y up to a constant of the law, also where phi' underflows.

    Rounded up for side 1 and down for side -1; -inf and NaN where it is not known.
    """
    y = np.clip(y, 0.0, 1.0)
    known = type(law) in KNOTS_DECIDE  # a class that inherits may have another formula
    with np.errstate(divide="ignore", invalid="ignore"):
        if isinstance(law, TruncatedNegativeBinomial) and known:
            value = -(law.eta + 1.0) * np.log(law.gamma + (1.0 - law.gamma) * y)
            error = 8.0 * ROUNDOFF * (law.eta + 1.0)
        elif isinstance(law, Poisson) and known:
            value, error = -law.mean * y, 0.0
        elif isinstance(law, Binomial | PointMass) and known:
            n, p = (law.trials, law.probability_of_run) if isinstance(law, Binomial) else (law.repetitions, 1.0)
            value = (n - 1.0) * np.log1p(-p * y) if n > 1.0 else np.zeros(y.shape)
            error = 8.0 * ROUNDOFF * (n - 1.0) / np.maximum(1.0 - p * y, ROUNDOFF)
        else:
            steep = slopes(law, y)
            value, error = (
                np.where(steep > LEAST_SLOPE, np.log(np.maximum(steep, LEAST_SLOPE)), np.nan),
                2.0 * RELATIVE_ERROR,
            )
        return value + side * (error + 8.0 * ROUNDOFF * np.abs(value))


def slopes(law: Law, y: np.ndarray) -> np.ndarray:
    """phi' at 1 - y for any number of y."""
    return evaluated(law, np.clip(y, 0.0, 1.0))[1]


def largest_ratio(law: Law, most: Callable[[np.ndarray], np.ndarray], slope: float) -> float:
    """An upper bound of `phi'(T(v) - p)/phi'(v)` over v in (0, 1], at least 1; inf where float64 has none.

    Numerator and denominator do not decrease in v.  So on a cell the ratio is at most the numerator at its right end
    over the denominator at its left end.  Before a cell, where T(v) - p is at most slope * v, the ratio `phi'(slope
    v)/phi'(v)` does not decrease, since phi' has no negative coefficients.
    """

    def bounds(ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(2, C) ends to upper bounds on the cells, and lower bounds of the largest."""
        gain = np.maximum(slopes(law, most(ends)) * (1.0 + 2.0 * RELATIVE_ERROR), LEAST_SLOPE)
        cost = slopes(law, expit(-ends) * (1.0 + 4.0 * ROUNDOFF)) * (1.0 - 2.0 * RELATIVE_ERROR)
        with np.errstate(divide="ignore", over="ignore"):
            return gain[1] / cost[0], gain[0] / cost[0]

    s = np.linspace(LOG_ODDS_FIRST, LOG_ODDS_LAST, FIRST_CELLS + 1)
    high, low = bounds(np.stack([s[:-1], np.append(s[1:-1], np.inf)]))
    reach = np.minimum(expit(s[:-1]), 1.0 / slope)
    start = np.maximum(slopes(law, 1.0 - slope * reach - MASS_ERROR) * (1.0 + 2.0 * RELATIVE_ERROR), LEAST_SLOPE)
    with np.errstate(divide="ignore", over="ignore"):
        before = start / (slopes(law, 1.0 - reach + MASS_ERROR) * (1.0 - 2.0 * RELATIVE_ERROR))
    # from the last v before which the ratio is no more than what it is later, or where the two meet
    after, reached = (np.maximum.accumulate(x[::-1])[::-1] for x in (high, low))
    least = np.maximum(before, after)
    first = int(np.argmin(least))
    enough = np.flatnonzero((before <= reached * (1.0 + RATIO_TOLERANCE)) & (least <= 1.1 * least[first]))
    first = int(enough[-1]) if enough.size else first
    ends = np.stack([s[:-1], np.append(s[1:-1], np.inf)])[:, first:]
    settled, best = max(1.0, float(before[first])), float(reached[first])
    high = high[first:]
    while np.isfinite(high).all():
        open_ = high > max(settled, best * (1.0 + RATIO_TOLERANCE))
        if not open_.any() or open_.sum() * PIECES_PER_CUT > MOST_CELLS:
            break
        settled = max(settled, float(np.max(high[~open_], initial=1.0)))
        left, right = ends[:, open_]
        cuts = (
            left + (np.minimum(right, LOG_ODDS_LAST) - left) * np.arange(PIECES_PER_CUT + 1)[:, None] / PIECES_PER_CUT
        )
        cuts[-1] = right  # beyond all numbers for the last
        if np.any(np.diff(cuts, axis=0) <= 0.0):
            break
        ends = np.stack([cuts[:-1], cuts[1:]]).reshape(2, -1)
        high, low = bounds(ends)
        best = max(best, float(np.max(low)))
    return max(settled, float(np.max(high)))
