"""Privacy of tuning on a Poisson sample of the data and then training once (README.md, "Tuning on a random subset")."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from jaxacct.accounting import account
from jaxacct.core.bounds import Bounds
from jaxacct.core.floats import bisected
from jaxacct.core.types import ArrayLike
from jaxacct.core.validation import DELTA, PROBABILITY, InputError, check_one, choice
from jaxacct.mechanisms import Mechanism, PoissonSampled, PrivacyProfile, batch_shape, compose
from jaxacct.mechanisms.base import FinitePair, require_mechanism
from jaxacct.mechanisms.sampled_batches import require_samplable
from jaxacct.selection.base_profile import upper_delta
from jaxacct.selection.law_of_k import Law
from jaxacct.selection.named_bounds import bound_delta, bound_epsilon

VARIANTS = ("rest", "all")
"""The final run is on all data outside the sample ("rest"), or on all data ("all")."""
RELATIONS = ("remove_one", "add_one")
"""The relations of removing and of adding a record, in the order in which PrivacyProfile takes their deltas."""
SUM_ERROR = 1e-10
"""Assumed upper bound of the relative error of a sum of up to 10^6 products of two masses."""


def subset_epsilon(
    tuned: Mechanism,
    k: Law,
    trained: Mechanism,
    sampling_probability: ArrayLike,
    delta: ArrayLike,
    *,
    variant: str = "rest",
) -> Bounds:
    """Compute eps of "tune on a Poisson sample, then train once": the tuning's winner and the final run are released.

    Let (P_1, Q_1) be a dominating pair of the tuning, made from the envelope, and (P_2, Q_2) one of the final run.
    "rest" gives the eps of `q P_1 x Q_2 + (1-q) Q_1 x P_2` against `Q_1 x Q_2`.  "all" gives the eps of the sampled
    tuning composed with the final run.  Neighbours differ by adding or removing one record.

    Parameters
    ----------
    tuned : one run of a candidate on the sample, one configuration.
    k : one law of K.
    trained : the final run, one configuration. With "rest" its batches must not have a fixed size.
    sampling_probability : q in [0, 1], the probability with which a record is in the sample.
    delta : float in (0, 1)
    variant : the final run is on the data outside the sample ("rest"), or on all data ("all").

    Returns
    -------
    Bounds of kind "bound", with lower 0.

    References
    ----------
    Koskela and Kulkarni (2023), Theorem 1 (equations 3.6, 3.7).  Zhu and Wang (2019).  README.md of this folder,
    "Tuning on a random subset".

    >>> import jaxacct as ja
    >>> from jaxacct import selection
    >>> run = ja.Gaussian(4.0)
    >>> b = selection.subset_epsilon(run, selection.Poisson(10), run, 0.1, 1e-5)
    >>> whole = selection.bound_epsilon(run, selection.Poisson(10), 1e-5)
    >>> b.kind, bool(b.upper < whole.upper)
    ('bound', True)
    """
    require_mechanism("tuned", tuned)
    require_mechanism("trained", trained)
    if not isinstance(k, Law) or k.shape or batch_shape(tuned) or batch_shape(trained):
        raise InputError("tuned, k and trained must be one configuration each; call once for each")
    require_samplable("subset_epsilon", tuned, fixed_size=False)
    if choice("variant", variant, VARIANTS) == "rest":  # the data outside a Poisson sample have no fixed size either
        require_samplable("the final run", trained, fixed_size=False)
    q = check_one("sampling_probability", sampling_probability, PROBABILITY, "give a single number in each call")
    target = check_one("delta", delta, DELTA, "give a single number in each call")
    upper = lambda at: bound_epsilon(tuned, k, at, bound="envelope").upper
    at = lambda grid, name: bound_delta(tuned, k, grid, bound="envelope", relation=name).upper
    pair = _through_points(upper, at, target)
    if variant == "all":
        value = float(account.epsilon(compose(PoissonSampled(pair, q), trained), target).upper)
    else:
        upper, at = lambda at: account.epsilon(trained, at).upper, lambda grid, name: upper_delta(trained, grid, name)
        value = product(pair, _through_points(upper, at, target), q, variant).epsilon(target)
    return Bounds(0.0, value, value, "bound", "ok" if np.isfinite(value) else "width", "profile")


def _through_points(
    epsilon: Callable[[float], Any], delta: Callable[[np.ndarray, str], np.ndarray], target: float
) -> PrivacyProfile:
    """Return the `PrivacyProfile` through upper bounds of delta at 400 eps. At the last eps, delta is 1e-4 `target`."""
    top = float(epsilon(max(target * 1e-4, 1e-300)))
    # With 400 points each, two pairs have a product of 160,000 atoms. SUM_ERROR covers sums of up to 10^6 terms.
    grid = np.linspace(0.0, max(top, 1e-6) if np.isfinite(top) else 50.0, 400)
    return PrivacyProfile(grid, *(delta(grid, name) for name in RELATIONS))


def atoms(pair: FinitePair) -> tuple[np.ndarray, np.ndarray, float]:
    """Return the P-masses and the Q-masses of a pair's atoms, and the P-mass of the outcomes without Q-mass."""
    p, q = np.append(pair.p, 0.0), np.append(pair.q, pair.q_infinity)
    kept = (p > 0.0) | (q > 0.0)
    return p[kept], q[kept], float(pair.p_infinity)


class Product(NamedTuple):
    """A pair of laws P and Q with A atoms that dominates the tuning composed with the final run."""

    ratio: np.ndarray  # (A,) likelihood ratios P/Q of the atoms, descending
    p_above: np.ndarray  # (A + 1,): element k is the P-mass of the first k atoms
    q_above: np.ndarray  # (A + 1,): element k is the Q-mass of the first k atoms
    p_below: np.ndarray  # (A + 1,): element k is the P-mass of all but the first k atoms
    q_below: np.ndarray  # (A + 1,): element k is the Q-mass of all but the first k atoms
    infinite: float  # P-mass of the outcomes without Q-mass

    def delta(self, epsilon: Any, relation: str) -> np.ndarray:
        """Return upper bounds of delta at eps >= 0 in the direction of `relation`."""
        grown = np.exp(np.asarray(epsilon, np.float64))
        if relation == "remove_one":
            k = np.searchsorted(-self.ratio, -grown, side="left")
            value = self.p_above[k] * (1.0 + SUM_ERROR) - grown * self.q_above[k] * (1.0 - SUM_ERROR) + self.infinite
        else:
            k = np.searchsorted(-self.ratio, -1.0 / grown, side="right")
            value = self.q_below[k] * (1.0 + SUM_ERROR) - grown * self.p_below[k] * (1.0 - SUM_ERROR)
        return np.clip(value, 0.0, 1.0)

    def epsilon(self, delta: float) -> float:
        """Return an upper bound of eps at delta in both directions, or inf if there is none."""
        worst = lambda eps: max(float(self.delta(eps, name)) for name in RELATIONS)
        finite = self.ratio[np.isfinite(self.ratio) & (self.ratio > 0.0)]
        low, high = 0.0, float(np.max(np.abs(np.log(finite)), initial=0.0)) + 1.0
        if worst(low) <= delta:
            return 0.0
        if worst(high) > delta:
            return math.inf
        return float(bisected(low, high, lambda eps: worst(eps) > delta, 60)[1])

    def profile(self, *points: float) -> PrivacyProfile:
        """Return the profile of the tuning with the final run, from delta at `points` and at 160 evenly spaced eps."""
        top = self.epsilon(max(1e-12, 2.0 * self.infinite))
        grid = np.linspace(0.0, top if math.isfinite(top) else 50.0, 160)
        for point in points:
            grid = np.append(grid[np.abs(grid - point) > 1e-6], point)
        grid = np.sort(grid)
        return PrivacyProfile(grid, *(self.delta(grid, name) for name in RELATIONS))


def product(tuning: PrivacyProfile, trained: PrivacyProfile, share: float, variant: str) -> Product:
    """Return the `Product` of the tuning and the final run. `share` is the chance that a record is in the sample."""
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
