"""Privacy of "tune on a Poisson sample, then train once" as one profile, and the noise for which it meets a target.

Tuning and final run enter as the pairs that dominate them: (P_1, Q_1) that of the tuning, by the exact worst case over
scores, and (P_2, Q_2) that of the final run.  With q the share of the sample, removing a record is dominated by

    q P_1 x Q_2 + (1-q) Q_1 x P_2  against  Q_1 x Q_2      (variant "rest": the final run on what is not in the sample)
    (q P_1 + (1-q) Q_1) x P_2      against  Q_1 x Q_2      (variant "all": the final run on all of the data)

and adding by the swap (proofs: jaxacct/selection/README.md, "Tuning on a random subset").  Both pairs are finite, so
the profile of the product is a sum over its atoms, rounded up.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from jaxacct.accounting import account
from jaxacct.calibration.search import least_private
from jaxacct.core.validation import InputError
from jaxacct.mechanisms import Mechanism, PrivacyProfile
from jaxacct.selection import Law, bound_delta, bound_epsilon
from jaxacct.selection.base_profile import upper_delta
from jaxacct.selection.subset_privacy import atoms
from jaxacct.selection.worst_case import bracket

__all__ = ["Product", "least_noise", "product", "profile_of_run", "profile_of_tuning"]

RELATIONS = ("remove_one", "add_one")
"""The two directions, in the order of the profiles."""
TUNING_POINTS = 112
"""Values of eps of a selection's profile: twice as many lower epsilon by less than 1e-3 of it."""
WHOLE_POINTS = 160
"""Values of eps of the profile of the whole."""
LAST_DELTA_SHARE = 1e-4
"""Profiles end where delta is this share of the target delta; what is left counts as mass at infinity."""
SUM_ERROR = 1e-10
"""Relative allowance for sums of up to 10^6 products of two masses."""
NOISE_RTOL = 1e-3
"""The search ends at an epsilon within this share below the target."""
TARGET_MARGIN = 1e-5
"""Relative distance that is kept from the target: the profile of the whole, evaluated again, is that exact."""
LEAST_NOISE = 1e-2
"""Smallest noise multiplier that is searched."""
LARGEST_NOISE = 1e5
"""Largest noise multiplier that is searched; a target that it does not meet is refused."""


class Product(NamedTuple):
    """The pair of the whole: atoms in descending order of the likelihood ratio, with running sums from both ends."""

    ratio: np.ndarray  # (A,) descending
    p_above: np.ndarray  # (A + 1,) P-mass of the first k atoms
    q_above: np.ndarray
    p_below: np.ndarray  # (A + 1,) P-mass of all but the first k atoms
    q_below: np.ndarray
    infinite: float  # P-mass where Q has none

    def delta(self, epsilon: Any, relation: str) -> np.ndarray:
        """Upper ends of delta at eps >= 0 for one direction."""
        grown = np.exp(np.asarray(epsilon, np.float64))
        if relation == "remove_one":
            k = np.searchsorted(-self.ratio, -grown, side="left")
            value = self.p_above[k] * (1.0 + SUM_ERROR) - grown * self.q_above[k] * (1.0 - SUM_ERROR) + self.infinite
        else:
            k = np.searchsorted(-self.ratio, -1.0 / grown, side="right")
            value = self.q_below[k] * (1.0 + SUM_ERROR) - grown * self.p_below[k] * (1.0 - SUM_ERROR)
        return np.clip(value, 0.0, 1.0)

    def epsilon(self, delta: float) -> float:
        """The upper end of eps at delta, the larger of both directions; inf below the mass at infinity."""
        worst = lambda eps: max(float(self.delta(eps, name)) for name in RELATIONS)
        finite = self.ratio[np.isfinite(self.ratio) & (self.ratio > 0.0)]
        low, high = 0.0, float(np.max(np.abs(np.log(finite)), initial=0.0)) + 1.0
        if worst(low) <= delta:
            return 0.0
        if worst(high) > delta:
            return math.inf
        for _ in range(60):
            middle = 0.5 * (low + high)
            low, high = (low, middle) if worst(middle) <= delta else (middle, high)
        return high

    def profile(self, *points: float, last: float = 1e-12) -> PrivacyProfile:
        """The whole as a mechanism that composes: its profile at eps from 0 to where delta is `last`, and at points."""
        top = self.epsilon(max(last, 2.0 * self.infinite))
        grid = np.linspace(0.0, top if math.isfinite(top) else 50.0, WHOLE_POINTS)
        for point in points:
            grid = np.append(grid[np.abs(grid - point) > 1e-6], point)
        grid = np.sort(grid)
        return PrivacyProfile(grid, *(self.delta(grid, name) for name in RELATIONS))


def profile_of_tuning(run: Mechanism, law: Law, delta: float) -> PrivacyProfile:
    """The profile of "run K times, release the best", through points of its exact worst case in both directions.

    The points are upper ends.  run, law : one configuration each.  delta : the target for the whole; the points go far
    below it.
    """
    both = RELATIONS[: 1 if run.symmetric() else 2]
    envelope = lambda at, name: bound_delta(run, law, at, bound="envelope", relation=name).upper
    last = float(bound_epsilon(run, law, max(LAST_DELTA_SHARE * delta, 1e-15), bound="envelope").upper)
    grid = np.linspace(0.0, max(last, 1e-3) if math.isfinite(last) else 50.0, TUNING_POINTS)
    # the envelope is a little looser, but goes down to deltas that the other bracket does not resolve
    sides = [np.minimum(bracket("delta", run, law, grid, name, math.inf)[1], envelope(grid, name)) for name in both]
    return PrivacyProfile(grid, sides[0], sides[-1])


def profile_of_run(run: Mechanism, delta: float) -> PrivacyProfile:
    """The profile of one run in both directions, through points that are upper ends."""
    if isinstance(run, PrivacyProfile):
        return run
    grid = np.linspace(0.0, max(_reach(run, max(LAST_DELTA_SHARE * delta, 1e-15)), 1e-3), 2 * TUNING_POINTS)
    return PrivacyProfile(grid, *(upper_delta(run, grid, name) for name in RELATIONS))


def product(tuning: PrivacyProfile, trained: PrivacyProfile, share: float, variant: str) -> Product:
    """The pair of the whole from the profiles of the tuning on its sample and of the final run on its data."""
    (p1, q1, more1), (p2, q2, more2) = (atoms(one.pair()) for one in (tuning, trained))
    base = np.outer(q1, q2).ravel()
    if variant == "rest":
        mixed = share * np.outer(p1, q2) + (1.0 - share) * np.outer(q1, p2)
        infinite = share * more1 + (1.0 - share) * more2
    else:
        mixed = np.outer(share * p1 + (1.0 - share) * q1, p2)
        infinite = share * more1 + more2
    mixed = mixed.ravel()
    with np.errstate(divide="ignore"):
        ratio = np.where(base > 0.0, mixed / np.where(base > 0.0, base, 1.0), np.inf)
    order = np.argsort(-ratio, kind="stable")
    ratio, p, q = ratio[order], mixed[order], base[order]
    above = [np.concatenate([[0.0], np.cumsum(x)]) for x in (p, q)]
    below = [np.concatenate([np.cumsum(x[::-1])[::-1], [0.0]]) for x in (p, q)]
    return Product(ratio, above[0], above[1], below[0], below[1], float(infinite) * (1.0 + SUM_ERROR))


def least_noise(epsilon: Callable[[float], float], target: float, near: float, rtol: float = NOISE_RTOL) -> float:
    """The least noise multiplier whose epsilon meets the target: one of those tried, and within rtol below the target.

    epsilon : upper end for a noise multiplier, falling at least nearly.  near : where the search begins.
    InputError where no noise is enough.
    """
    if near <= 0.0 or not math.isfinite(near):
        raise InputError(f"near = {near!r} must be a positive noise multiplier")
    found = least_private(
        lambda values: np.array([epsilon(float(value)) for value in values]),
        target,
        near,
        (LEAST_NOISE, LARGEST_NOISE),
        falls=True,
        rtol=2.0 * rtol,
        margin=TARGET_MARGIN,
    )
    if math.isnan(found):
        raise InputError(f"target_epsilon = {target!r} is met by no noise up to {LARGEST_NOISE:g}; raise the target")
    return found


def _reach(run: Mechanism, level: float) -> float:
    """An eps at which the delta of a run has fallen to a level, or the last of its points."""
    if isinstance(run, PrivacyProfile):
        return float(np.max(run.epsilon))
    found = float(account.epsilon(run, level, rtol=0.01).upper)
    return found if math.isfinite(found) else 50.0
