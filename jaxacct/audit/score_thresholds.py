"""From scores of runs with and without the canary to a lower bound, with thresholds chosen so that confidence holds."""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxacct.audit.error_counts import clopper_pearson, gaussian_fit, upper_limit
from jaxacct.audit.lower_bound import LowerBound, error_of
from jaxacct.core.validation import OPEN_PROBABILITY, InputError, check, choice

__all__ = ["METHODS", "from_scores"]

METHODS = ("clopper_pearson", "gaussian_fit")
"""How error counts become a lower bound."""
THRESHOLDS_PER_END = 200
"""Thresholds that are tried on the runs held out, from either end of either sample: close together in the tails."""


def from_scores(
    absent: Any,
    present: Any,
    *,
    delta: float,
    confidence: float = 0.95,
    method: str = "clopper_pearson",
    thresholds: Any = None,
    held_out: float = 0.5,
) -> LowerBound:
    """A lower bound on epsilon from the scores of independent runs without and with the canary.

    A run is taken for one with the canary if its score exceeds a threshold.

    Parameters
    ----------
    absent, present : array_like, shape (runs,)
        Scores, in an order that has nothing to do with them (as simulated).
    delta : float
    confidence : float in (0, 1)
    method : {"clopper_pearson", "gaussian_fit"}
        "gaussian_fit" is true only of mechanisms that are Gaussian DP.
    thresholds : array_like, optional
        Numbers chosen without looking at these scores; the error is divided among them (Bonferroni).  By default the
        threshold that is best on the first ``held_out`` of either sample is used on the rest, and only the rest counts
        as trials.
    held_out : float in (0, 1)

    Returns
    -------
    LowerBound

    Raises
    ------
    InputError
        Other shapes, NaN, or too few runs.

    References
    ----------
    As for `clopper_pearson` and `gaussian_fit`.

    >>> rng = np.random.default_rng(0)
    >>> absent, present = rng.normal(size=50_000), rng.normal(1.0, 1.0, 50_000)
    >>> found = from_scores(absent, present, delta=1e-5, confidence=0.99, method="gaussian_fit")
    >>> 0.9 < found.mu < 1.0, found.trials
    (True, 50000)
    """
    error_of(confidence)
    choice("method", method, METHODS)
    without, there = _sample("absent", absent), _sample("present", present)
    if thresholds is None:
        share = float(check("held_out", held_out, OPEN_PROBABILITY))
        first, second = (min(max(int(share * x.size), 1), x.size - 1) for x in (without, there))
        cuts = np.array([_best(without[:first], there[:second], delta, confidence, method)])
        without, there = without[first:], there[second:]
    else:
        cuts = np.atleast_1d(np.asarray(thresholds, np.float64))
        if cuts.ndim != 1 or np.isnan(cuts).any() or not cuts.size:
            raise InputError("thresholds must be a list of numbers, without NaN; leave them out to hold some runs out")
    false_positives, false_negatives = _errors(without, there, cuts)
    sizes = without.size, there.size
    if method == "gaussian_fit":
        return gaussian_fit(false_positives, sizes[0], false_negatives, sizes[1], delta=delta, confidence=confidence)
    each = 1.0 - error_of(confidence) / cuts.size
    found = clopper_pearson(false_positives, sizes[0], false_negatives, sizes[1], delta=delta, confidence=each)
    return LowerBound(float(np.max(found.epsilon)), float(delta), confidence, sum(sizes), method)


def _sample(name: str, values: Any) -> np.ndarray:
    values = np.asarray(values, np.float64)
    if values.ndim != 1 or values.size < 2 or np.isnan(values).any():
        raise InputError(f"{name} must be scores of shape (runs,), at least 2 and without NaN; give one per run")
    return values


def _errors(absent: np.ndarray, present: np.ndarray, cuts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """How many scores of either sample are on the wrong side of every threshold."""
    above = absent.size - np.searchsorted(np.sort(absent), cuts, side="right")
    return above, np.searchsorted(np.sort(present), cuts, side="right")


def _best(absent: np.ndarray, present: np.ndarray, delta: float, confidence: float, method: str) -> float:
    """The threshold that would give most on these scores."""
    from scipy.special import ndtri

    tails = []
    for values in map(np.sort, (absent, present)):
        ranks = np.unique(np.geomspace(1, values.size, THRESHOLDS_PER_END).astype(int)) - 1
        tails += [values[ranks], values[::-1][ranks]]
    cuts = np.unique(np.concatenate(tails))
    wrong = _errors(absent, present, cuts)
    if method == "clopper_pearson":
        each = clopper_pearson(wrong[0], absent.size, wrong[1], present.size, delta=delta, confidence=confidence)
        return float(cuts[np.argmax(each.epsilon)])
    half = 0.5 * error_of(confidence)
    fpr, fnr = upper_limit(wrong[0], absent.size, half), upper_limit(wrong[1], present.size, half)
    return float(cuts[np.argmax(-ndtri(fpr) - ndtri(fnr))])
