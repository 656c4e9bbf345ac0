"""The probabilities of K as certified brackets, with bounds of what lies beyond the numbers that are listed."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from jaxacct.core.floats import ROUNDOFF
from jaxacct.core.validation import InputError
from jaxacct.selection.law_families import (
    Binomial,
    Categorical,
    PointMass,
    Poisson,
    TruncatedNegativeBinomial,
    largest_k,
)
from jaxacct.selection.law_of_k import Law

__all__ = ["Weights", "weights"]

ROUNDINGS_PER_TERM = 8.0
"""Units of rounding by which one more factor of a product of ratios, or one more term of a sum, may be off."""
SUM_ERROR = 4e-13
"""Relative error of a Categorical's probabilities, which sum to 1 up to 1e-13."""
LEAST_PRODUCT = 1e-290
"""Below this a product may have lost its relative accuracy."""
MOST_LISTED = 2**21
"""Numbers k that are listed, at most; the rest is in the bounds of what lies beyond."""
LARGEST_MODE = 2.0**52
"""A law whose mode is beyond this is not listed at all: neighbouring whole numbers are hardly told apart there."""


class Weights(NamedTuple):
    """`low <= Pr[K = k] <= high` for the listed k >= 1, ascending, and bounds of what is not listed.

    ``below`` bounds Pr[1 <= K < k[0]]; ``above_low <= Pr[K > k[-1]] <= above``.
    """

    k: np.ndarray
    low: np.ndarray
    high: np.ndarray
    below: float
    above_low: float
    above: float


def weights(law: Law, tail: float) -> Weights:
    """Certified probabilities of one law of K.

    Less than `tail` is left out on either side, where 2^21 numbers are enough for that.  The ratios `Pr[K = k + 1]/Pr[K
    = k]` are multiplied from the mode on, and the products are divided by their sum.  Beyond the list the products are
    below a geometric series.  InputError for a law that is not one of this library.

    >>> from jaxacct.selection import Geometric
    >>> found = weights(Geometric(0.5), 1e-9)
    >>> found.k[:3].tolist(), bool((found.low <= 0.5**found.k).all()), bool((0.5**found.k <= found.high).all())
    ([1.0, 2.0, 3.0], True, True)
    """
    if isinstance(law, Categorical):
        each = np.asarray(law.probabilities)
        return _listed(
            np.arange(each.size, dtype=np.float64),
            each * (1.0 - SUM_ERROR),
            each * (1.0 + SUM_ERROR),
            0.0,
            0.0,
        )
    if isinstance(law, PointMass) or (isinstance(law, Binomial) and float(law.probability_of_run) == 1.0):
        return Weights(np.array([largest_k(law)]), np.ones(1), np.ones(1), 0.0, 0.0, 0.0)
    if not isinstance(law, TruncatedNegativeBinomial | Poisson | Binomial):
        raise InputError(
            f"k of type {type(law).__name__} has no certified probabilities; use a law of jaxacct.selection, "
            "such as Categorical"
        )
    first, mode, last = _range(law)
    if not mode < LARGEST_MODE:
        return Weights(np.zeros(0), np.zeros(0), np.zeros(0), 1.0, 0.0, 1.0)
    half = 64.0
    while True:
        start, stop = max(mode - half, first), min(mode + half, last)
        k = np.arange(start, stop + 1.0)
        up, down = _ratios(law, np.arange(mode, stop)), 1.0 / _ratios(law, np.arange(start, mode))[::-1]
        with np.errstate(under="ignore"):
            value = np.concatenate([np.cumprod(down)[::-1], [1.0], np.cumprod(up)])
        slack = ROUNDINGS_PER_TERM * ROUNDOFF * (k.size + 8.0)
        low = np.where(value < LEAST_PRODUCT, 0.0, value * (1.0 - slack))
        high = value * (1.0 + slack) + np.where(value < LEAST_PRODUCT, 2.0 * LEAST_PRODUCT, 0.0)
        above = 0.0 if stop == last else high[-1] * _series(_ratios(law, np.array([stop]))[0], _gap(law))
        below = 0.0 if start == first else high[0] * _series(1.0 / _ratios(law, np.array([start - 1.0]))[0], 0.0)
        if max(above, below) <= tail * (1.0 - 1e-6) or k.size >= MOST_LISTED:
            break
        half *= 2.0
    least, most = np.sum(low) * (1.0 - slack), np.sum(high) * (1.0 + slack) + above + below
    return _listed(k, low / most * (1.0 - slack), high / least * (1.0 + slack), below / least, above / least)


def _listed(k: np.ndarray, low: np.ndarray, high: np.ndarray, below: float, above: float) -> Weights:
    """The list without K = 0, which costs nothing, and without numbers of probability 0."""
    slack = ROUNDINGS_PER_TERM * ROUNDOFF * (k.size + 8.0)
    left = 1.0 - np.sum(high) * (1.0 + slack) - below - slack
    kept = (k >= 1.0) & (high > 0.0)
    rest = min(above * (1.0 + slack), 1.0)
    return Weights(k[kept], low[kept], np.minimum(high[kept], 1.0), min(below, 1.0), min(max(left, 0.0), rest), rest)


def _range(law: Any) -> tuple[float, float, float]:
    """(smallest k, mode, largest k)."""
    if isinstance(law, Poisson):
        return 0.0, float(np.floor(law.mean)), np.inf
    if isinstance(law, Binomial):
        trials = float(law.trials)
        return 0.0, min(float(np.floor((trials + 1.0) * law.probability_of_run)), trials), trials
    return 1.0, float(np.floor(max((law.eta - 1.0) * (1.0 - law.gamma) / law.gamma, 1.0))), np.inf


def _ratios(law: Any, k: np.ndarray) -> np.ndarray:
    """`Pr[K = k + 1]/Pr[K = k]`, right to a few units.

    It does not increase in k, except for a negative binomial with eta < 1.
    """
    if isinstance(law, Poisson):
        return law.mean / (k + 1.0)
    if isinstance(law, Binomial):
        return (law.trials - k) / (k + 1.0) * (law.probability_of_run / (1.0 - law.probability_of_run))
    return (1.0 - law.gamma) * ((k + law.eta) / (k + 1.0))


def _gap(law: Any) -> float:
    """A lower bound of 1 minus any ratio: gamma for a negative binomial with eta at most 1, else 0."""
    return float(law.gamma) if isinstance(law, TruncatedNegativeBinomial) and law.eta <= 1.0 else 0.0


def _series(ratio: float, gap: float) -> float:
    """`r + r^2 + ...`, r at most 1 - gap where gap > 0, else at most `ratio`."""
    if gap > 0.0:
        return 1.0 / gap * (1.0 + ROUNDINGS_PER_TERM * ROUNDOFF)
    left = 1.0 - ratio * (1.0 + ROUNDINGS_PER_TERM * ROUNDOFF)
    return float(ratio / left * (1.0 + ROUNDINGS_PER_TERM * ROUNDOFF)) if left > 0.0 else np.inf
