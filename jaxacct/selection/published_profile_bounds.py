"""Published bounds of a selection by the base's privacy profile, one per law of K, with their free parameter optimised.

Each has the form `delta_A(eps) <= m delta(eps - shift)`, m = E[K].  The shift depends on eps_1 >= 0, which is free, and
on delta(eps_1), taken from the direction in which the theorem is true (README.md of this folder, "Which direction").
"""

from __future__ import annotations

import numpy as np

from jaxacct.core.validation import InputError
from jaxacct.mechanisms import Mechanism
from jaxacct.selection.base_profile import Sides, common_shape, sides, upper_delta, upper_epsilon
from jaxacct.selection.law_families import Binomial, Law, Poisson, TruncatedNegativeBinomial

__all__ = ["LAWS", "delta", "epsilon", "minimiser", "shift"]

LAWS = (TruncatedNegativeBinomial, Binomial, Poisson)
"""Laws of K for which such a theorem is published."""
ROUNDED_UP = 1.0 + 1e-12
"""A factor larger than the rounding of any of these formulas, by which their values are rounded up."""
FIRST_POINTS = 49
"""Values of eps_1 that are tried at first."""
REFINED_POINTS = 17
"""Values of eps_1 in each refinement, around the best one before."""
REFINEMENTS = 4
"""Refinements: each is 8 times finer.  Any eps_1 gives a true bound, a better one only a smaller number."""
_LEAST_BASE_DELTA = 1e-12
"""The largest eps_1 tried is where delta of the base has fallen to this: beyond it nothing is to be gained."""


def epsilon(run: Mechanism, law: Law, delta: np.ndarray, relation: str) -> np.ndarray:
    """eps for which the selection is (eps, delta)-DP: `eps_base(delta/m) + shift`; inf where no theorem applies.

    TruncatedNegativeBinomial [Koskela, Redberg, Wang 2024, Theorem 5.2], Binomial [Theorem 5.7] and Poisson
    [Corollary 5.8]; InputError for other laws.  run, law and delta broadcast; kind "bound".
    """
    shape = common_shape(run, law, "delta", delta)
    value = np.zeros(shape)
    for side in sides(run, relation):
        left = np.broadcast_to(delta / law.mean, shape) / ROUNDED_UP
        value = np.maximum(value, (upper_epsilon(run, left, side.forward) + shift(run, law, side)) * ROUNDED_UP)
    return value


def delta(run: Mechanism, law: Law, epsilon: np.ndarray, relation: str) -> np.ndarray:
    """Upper bounds of delta(eps), eps >= 0, of the selection by the same theorems; 1 where none applies."""
    shape = common_shape(run, law, "epsilon", epsilon)
    value = np.zeros(shape)
    for side in sides(run, relation):
        moved = np.broadcast_to(epsilon / ROUNDED_UP - shift(run, law, side), shape)
        base = upper_delta(run, np.maximum(moved, -700.0), side.forward)
        value = np.maximum(value, np.where(moved > -700.0, np.minimum(law.mean * base * ROUNDED_UP, 1.0), 1.0))
    return value


def shift(run: Mechanism, law: Law, side: Sides) -> np.ndarray:
    """The least eps that a theorem adds in one direction: (*batch of base and law,), inf where it does not apply.

    Truncated negative binomial, from the reverse direction: `(eta+1) log(e^{eps_1} + (1-gamma)/gamma delta(eps_1))`.
    Binomial, from the same direction, where `e^{eps_1} >= 1 + p/(1-p) delta(eps_1)` (without that it is false):
    `(n-1) log(1 + p (e^{eps_1} - 1) + p delta(eps_1))`.
    Poisson, from either direction: `m (e^{eps_1} - 1 + delta(eps_1))`.
    """
    if isinstance(law, TruncatedNegativeBinomial):
        return _negative_binomial(run, law, side.reverse)
    if isinstance(law, Binomial):
        return _binomial(run, law, side.forward)
    if isinstance(law, Poisson):
        # e^{eps_1} + delta(eps_1) does not decrease: the best eps_1 is 0, where both directions are the same
        return np.asarray(law.mean) * upper_delta(run, np.zeros(()), side.forward) * ROUNDED_UP
    names = ", ".join(kind.__name__ for kind in LAWS)
    raise InputError(f"no profile bound is published for k = {type(law).__name__}; use {names}, or bound='envelope'")


def minimiser(run: Mechanism, law: TruncatedNegativeBinomial, relation: str) -> np.ndarray:
    """The eps_1 that minimises `e^{eps_1} + (1-gamma)/gamma delta(eps_1)`, convex in e^{eps_1}, by grids."""
    return _least(run, law, relation)[0]


def _negative_binomial(run: Mechanism, law: TruncatedNegativeBinomial, relation: str) -> np.ndarray:
    return (np.asarray(law.eta) + 1.0) * _least(run, law, relation)[1] * ROUNDED_UP


def _least(run: Mechanism, law: TruncatedNegativeBinomial, relation: str) -> tuple[np.ndarray, np.ndarray]:
    """The best eps_1 and the logarithm of the objective there: a grid, then finer ones around the best point."""
    shape = common_shape(run, law, "eta", np.asarray(law.eta))
    odds = (1.0 - np.asarray(law.gamma)) / law.gamma
    low = np.zeros(shape)
    high = np.broadcast_to(upper_epsilon(run, np.asarray(_LEAST_BASE_DELTA), relation), shape)
    high = np.where(np.isfinite(high), high, 50.0)
    place, best = np.zeros(shape), np.full(shape, np.inf)
    for count in (FIRST_POINTS, *(REFINED_POINTS,) * REFINEMENTS):
        grid = low + (high - low) * np.linspace(0.0, 1.0, count).reshape(-1, *(1,) * len(shape))
        value = grid + np.log1p(odds * np.exp(-grid) * upper_delta(run, grid, relation))
        at = np.argmin(value, axis=0)[None]
        low, middle, high = (np.take_along_axis(grid, np.clip(at + d, 0, count - 1), 0)[0] for d in (-1, 0, 1))
        found = np.take_along_axis(value, at, 0)[0]
        place, best = np.where(found < best, middle, place), np.minimum(best, found)
    return place, best


def _binomial(run: Mechanism, law: Binomial, relation: str) -> np.ndarray:
    """The objective does not decrease in eps_1 either: the least eps_1 that meets the condition, by grids."""
    shape = common_shape(run, law, "trials", np.asarray(law.trials))
    n, p = np.broadcast_to(law.trials, shape), np.broadcast_to(law.probability_of_run, shape)
    low, high = np.zeros(shape), np.log1p(p / np.maximum(1.0 - p, 1e-300))  # at the end it holds for delta = 1
    best = np.full(shape, np.inf)
    for count in (FIRST_POINTS, *(REFINED_POINTS,) * REFINEMENTS):
        grid = low + (high - low) * np.linspace(0.0, 1.0, count).reshape(-1, *(1,) * len(shape))
        base = upper_delta(run, grid, relation)
        meets = np.expm1(grid) * (1.0 - p) >= p * base * ROUNDED_UP
        value = np.where(meets, np.log1p(p * (np.expm1(grid) + base)), np.inf)
        best = np.minimum(best, np.min(value, axis=0))
        first = np.where(np.any(meets, axis=0), np.argmax(meets, axis=0), count - 1)[None]
        low, high = (np.take_along_axis(grid, np.clip(first + d, 0, count - 1), 0)[0] for d in (-1, 0))
    alone = np.where(p == 1.0, np.inf, best)
    return np.where(n == 1.0, 0.0, np.maximum(n - 1.0, 1.0) * alone) * ROUNDED_UP
