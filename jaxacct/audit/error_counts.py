"""Lower bounds on epsilon from scores or error counts, by Clopper and Pearson's limits or a fit of Gaussian DP."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jaxacct.accounting.account import epsilon as epsilon_of
from jaxacct.core.text import exact, listed, outward, unusual
from jaxacct.core.types import ArrayLike, Leaf
from jaxacct.core.validation import (
    COUNT,
    DELTA,
    DELTA_OR_ZERO,
    OPEN_PROBABILITY,
    Constraint,
    InputError,
    broadcast_shape,
    check,
    choice,
    require_at_most,
)
from jaxacct.mechanisms import Gaussian

RELATIONS = ("add_or_remove_one", "zero_out", "remove_one", "add_one")
"""Relations between the data with the canary and the data without it."""
UNCONDITIONAL = "lower bound"
"""Kind of a bound that assumes nothing about the mechanism."""
CONDITIONAL = "conditional: Gaussian DP"
"""Kind of a bound that holds only if the trade-off curve is a Gaussian's."""
WHOLE_NUMBERS = Constraint("use whole numbers of {name}", 0, integral=True)
"""Allowed values of counts."""


def upper_limit(hits: Any, trials: Any, error: Any) -> np.ndarray:
    """Return Clopper and Pearson's upper limit, at the level `error`, of the probability of a hit; rounded up."""
    from scipy.special import betainccinv  # slow to import, and rarely needed

    hits, trials = np.asarray(hits, np.float64), np.asarray(trials, np.float64)
    open_end = hits >= trials
    limit = betainccinv(hits + 1.0, np.where(open_end, 1.0, trials - hits), error)
    # The factor 1 + 1e-10 covers the rounding error of SciPy's inverse of the incomplete beta function.
    return np.where(open_end, 1.0, np.minimum(limit * (1.0 + 1e-10), 1.0))


def clopper_pearson(
    false_positives: ArrayLike,
    absent: ArrayLike,
    false_negatives: ArrayLike,
    present: ArrayLike,
    *,
    delta: ArrayLike,
    confidence: float = 0.95,
    relation: str = "add_or_remove_one",
) -> LowerBound:
    """Bound epsilon from below by error counts: epsilon >= log((1 - delta - FNR)/FPR) and log((1 - delta - FPR)/FNR).

    FPR and FNR are Clopper and Pearson's upper limits of the false positive and the false negative rate.

    Parameters
    ----------
    false_positives : array_like; number of runs without the canary that the auditor took for runs with the canary.
    absent, present : array_like; numbers of runs without and with the canary.  The rule of guessing is chosen without
        looking at these runs.
    false_negatives : array_like; number of runs with the canary that the auditor took for runs without the canary.
    delta : in [0, 1).  It broadcasts with the counts; each element of the result holds at ``confidence`` by itself.
    confidence : in (0, 1).  Each limit fails with probability at most (1 - confidence)/2.
    relation : {"add_or_remove_one", "zero_out", "remove_one", "add_one"}
        "remove_one" uses the first inequality alone, and "add_one" uses the second alone.  Under "zero_out" a run
        without the canary has a record in its place that contributes 0.

    Returns
    -------
    LowerBound

    References
    ----------
    Clopper and Pearson (1934); Kairouz, Oh and Viswanath (2015); Jagielski, Ullman and Oprea (2020).  README.md of this
    folder, "What a lower bound says".

    >>> clopper_pearson(0, 1000, 300, 1000, delta=1e-5, confidence=0.99)
    LowerBound(epsilon >= 4.82941 at delta 1e-05, confidence 0.99, 2,000 trials, clopper_pearson)
    """
    error, delta = error_of(confidence), np.asarray(check("delta", delta, DELTA_OR_ZERO))
    (fpr, fnr), trials = _rates((false_positives, absent, false_negatives, present), 0.5 * error, delta)
    choice("relation", relation, RELATIONS)
    shown = lambda one, other: np.log(np.maximum(1.0 - delta - other, 1e-300)) - np.log(one)
    first = 0.0 if relation == "add_one" else shown(fpr, fnr)
    second = 0.0 if relation == "remove_one" else shown(fnr, fpr)
    found = np.maximum(np.maximum(first, second), 0.0)
    return LowerBound(plain(found), plain(delta), confidence, plain(trials), "clopper_pearson", relation=relation)


def gaussian_fit(
    false_positives: ArrayLike,
    absent: ArrayLike,
    false_negatives: ArrayLike,
    present: ArrayLike,
    *,
    delta: ArrayLike,
    confidence: float = 0.95,
) -> LowerBound:
    """Bound mu from below by max over thresholds of Phi^-1(1 - FPR) - Phi^-1(FNR); return mu and its epsilon at delta.

    FPR and FNR are as for `clopper_pearson`.  **Conditional**: the epsilon holds only if the mechanism's trade-off
    curve is that of a Gaussian mechanism.  A step on all data has such a curve; subsampled or tuned training does not.

    Parameters
    ----------
    false_positives, absent, false_negatives, present
        As for `clopper_pearson`, with one element per threshold along the last axis.  All thresholds are applied to the
        same runs, and are chosen without looking at these runs.
    delta, confidence : in (0, 1).  Delta broadcasts with all axes of the counts but the last.

    Returns
    -------
    LowerBound : its kind is "conditional: Gaussian DP", and it has mu.

    References
    ----------
    Nasr et al. (2023).

    >>> found = gaussian_fit([1587, 500], 10_000, [1587, 3612], 10_000, delta=1e-5, confidence=0.99)
    >>> round(found.mu, 3), round(found.epsilon, 3), found.kind
    (1.915, 9.476, 'conditional: Gaussian DP')
    """
    from scipy.special import ndtri

    error, delta = error_of(confidence), np.asarray(check("delta", delta, DELTA))
    counts = [np.atleast_1d(np.asarray(x)) for x in (false_positives, absent, false_negatives, present)]
    thresholds = max(x.shape[-1] for x in counts)
    (fpr, fnr), trials = _rates(counts, error / (2 * thresholds), np.zeros(()))
    mu = np.max(-ndtri(fpr) - ndtri(fnr), axis=-1)
    mu, delta = np.broadcast_arrays(np.maximum(mu, 0.0), delta)
    epsilon = epsilon_of_mu(mu, delta)
    return LowerBound(
        plain(epsilon), plain(delta), confidence, plain(trials.max(axis=-1)), "gaussian_fit", CONDITIONAL, plain(mu)
    )


def epsilon_of_mu(mu: np.ndarray, delta: np.ndarray) -> np.ndarray:
    """Return the epsilon at delta of mu-Gaussian DP, rounded down; 0 where mu is at most 1e-9."""
    known = mu > 1e-9
    return np.where(known, epsilon_of(Gaussian(1.0 / np.where(known, mu, 1.0)), delta).lower, 0.0)


def guess_counts(
    correct: Any, guesses: Any, canaries: Any, delta: Any, more: tuple[int, ...] = ()
) -> tuple[list[np.ndarray], tuple[int, ...]]:
    """Return the checked counts and delta of a one-run audit, and the shape to which these and `more` broadcast."""
    given = {"correct": correct, "guesses": guesses, "canaries": canaries, "delta": delta}
    rules = (WHOLE_NUMBERS, COUNT, COUNT, DELTA_OR_ZERO)
    fields = {name: np.asarray(check(name, x, rule)) for (name, x), rule in zip(given.items(), rules, strict=True)}
    shape = broadcast_shape({name: x.shape for name, x in fields.items()} | {"epsilon": more})
    for one, of in (("correct", "guesses"), ("guesses", "canaries")):
        require_at_most(one, fields[one], of, fields[of], "count every canary once")
    return list(fields.values()), shape


def _rates(counts: Iterable[Any], error: float, delta: np.ndarray) -> tuple[tuple[np.ndarray, np.ndarray], np.ndarray]:
    """Return the upper limits (FPR, FNR) of the two error rates, and the number of all runs."""
    names, rules = ("false_positives", "absent", "false_negatives", "present"), 2 * (WHOLE_NUMBERS, COUNT)
    given = {name: np.asarray(check(name, x, rule)) for name, x, rule in zip(names, counts, rules, strict=True)}
    for wrong, runs in (names[:2], names[2:]):
        require_at_most(wrong, given[wrong], runs, given[runs], "count the wrong guesses among those runs")
    broadcast_shape({name: x.shape for name, x in given.items()} | {"delta": delta.shape})
    false_positives, absent, false_negatives, present = given.values()
    trials = np.add(*np.broadcast_arrays(absent, present)).astype(np.int64)
    return (upper_limit(false_positives, absent, error), upper_limit(false_negatives, present, error)), trials


@dataclass(frozen=True, eq=False)
class LowerBound:
    """Statement that with probability at least ``confidence`` a mechanism is not (e, delta)-DP for any e < ``epsilon``.

    The probability is over the trials of the audit.  Each element of a batch holds at ``confidence`` by itself.  If k
    statements are to hold together, ask for each at confidence 1 - (1 - confidence)/k.

    Parameters
    ----------
    epsilon : the lower bound; 0 says nothing.
    delta, confidence : of the statement.
    trials : number of runs, with the canary and without; for an audit in one run, the number of canaries.
    method : name of the method that found the bound.
    kind : "lower bound", or "conditional: Gaussian DP" if it holds only for a Gaussian's trade-off curve.
    mu : the Gaussian-DP parameter that a Gaussian fit found; otherwise None.
    relation : the neighbouring relation for which the statement holds.

    References
    ----------
    README.md of this folder, "What a lower bound says".

    >>> LowerBound(0.75, 1e-5, 0.99, 20_000, "clopper_pearson")
    LowerBound(epsilon >= 0.75 at delta 1e-05, confidence 0.99, 20,000 trials, clopper_pearson)
    """

    epsilon: Leaf
    delta: Leaf
    confidence: float
    trials: Leaf
    method: str
    kind: str = UNCONDITIONAL
    mu: Leaf = None
    relation: str = RELATIONS[0]

    def __repr__(self) -> str:
        trials = f"{self.trials:,}" if isinstance(self.trials, int) else str(self.trials)
        condition = "" if self.kind == UNCONDITIONAL else f", {self.kind}"
        return (
            f"LowerBound(epsilon >= {safe(self.epsilon)} at delta {listed(self.delta, exact)}, confidence "
            f"{exact(self.confidence)}, {trials} trials, {self.method}{condition}{unusual(self.relation)})"
        )


def safe(values: ArrayLike) -> str:
    """Write lower bounds, rounded down."""
    return listed(values, lambda value: outward(value, ".7g", up=False))


def error_of(confidence: Any) -> float:
    """Return 1 - confidence, the probability with which a lower bound may be wrong."""
    number = check("confidence", confidence, OPEN_PROBABILITY)
    if np.ndim(number):
        raise InputError("confidence must be one number; ask for every statement by itself")
    return 1.0 - float(number)


def plain(values: Any) -> Any:
    """Return a Python number for an array of shape (), and any other array unchanged."""
    values = np.asarray(values)
    return values.item() if not values.shape else values


def from_scores(
    absent: ArrayLike,
    present: ArrayLike,
    *,
    delta: float,
    confidence: float = 0.95,
    method: str = "clopper_pearson",
    thresholds: ArrayLike | None = None,
    held_out: float = 0.5,
    relation: str = "add_or_remove_one",
) -> LowerBound:
    """Bound epsilon from below, from scores of independent runs without and with the canary.

    The test guesses that a run had the canary if the run's score exceeds a threshold.

    Parameters
    ----------
    absent, present : array_like, shape (runs,); scores without and with the canary, in an order independent of them.
    delta, confidence : float
    method : {"clopper_pearson", "gaussian_fit"}; "gaussian_fit" holds only if the trade-off curve is a Gaussian's.
    thresholds : numbers chosen without looking at these scores.  The thresholds share the error 1 - confidence.
        By default the first part of each sample chooses one threshold, and only the other runs count as trials.
    held_out : in (0, 1); how large this first part is, as a share of the sample.
    relation : as for `clopper_pearson`. A Gaussian fit holds for removing and for adding alike.

    Returns
    -------
    LowerBound

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
    choice("method", method, ("clopper_pearson", "gaussian_fit"))
    choice("relation", relation, RELATIONS)
    without, there = _sample("absent", absent), _sample("present", present)
    if thresholds is None:
        share = float(check("held_out", held_out, OPEN_PROBABILITY))
        first, second = (min(max(int(share * x.size), 1), x.size - 1) for x in (without, there))
        cuts = np.array([_best(without[:first], there[:second], delta, confidence, method, relation)])
        without, there = without[first:], there[second:]
    else:
        cuts = np.atleast_1d(np.asarray(thresholds, np.float64))
        if cuts.ndim != 1 or np.isnan(cuts).any() or not cuts.size:
            raise InputError("thresholds must be a list of numbers, without NaN; leave them out to hold some runs out")
    counts = _errors(without, there, cuts)
    if method == "gaussian_fit":
        return replace(gaussian_fit(*counts, delta=delta, confidence=confidence), relation=relation)
    each = 1.0 - error_of(confidence) / cuts.size
    found = clopper_pearson(*counts, delta=delta, confidence=each, relation=relation)
    return replace(found, epsilon=float(np.max(found.epsilon)), confidence=confidence)


def _sample(name: str, values: Any) -> np.ndarray:
    """Return scores as an array; raise InputError unless there are two or more, without NaN."""
    values = np.asarray(values, np.float64)
    if values.ndim != 1 or values.size < 2 or np.isnan(values).any():
        raise InputError(f"{name} must be scores of shape (runs,), at least 2 and without NaN; give one per run")
    return values


def _errors(absent: np.ndarray, present: np.ndarray, cuts: np.ndarray) -> tuple[np.ndarray, int, np.ndarray, int]:
    """Return (absent scores above each threshold, absent scores, present scores at or below it, present scores)."""
    above = absent.size - np.searchsorted(np.sort(absent), cuts, side="right")
    return above, absent.size, np.searchsorted(np.sort(present), cuts, side="right"), present.size


def _best(
    absent: np.ndarray, present: np.ndarray, delta: float, confidence: float, method: str, relation: str
) -> float:
    """Return the threshold for which these scores give the largest bound."""
    from scipy.special import ndtri

    tails = []
    for values in map(np.sort, (absent, present)):
        # the thresholds to try are the scores at these ranks, most of which are in the two tails
        ranks = np.unique(np.geomspace(1, values.size, 200).astype(int)) - 1
        tails += [values[ranks], values[::-1][ranks]]
    cuts = np.unique(np.concatenate(tails))
    counts = _errors(absent, present, cuts)
    if method == "clopper_pearson":
        each = clopper_pearson(*counts, delta=delta, confidence=confidence, relation=relation)
        return float(cuts[np.argmax(each.epsilon)])
    half = 0.5 * error_of(confidence)
    fpr, fnr = upper_limit(*counts[:2], half), upper_limit(*counts[2:], half)
    return float(cuts[np.argmax(-ndtri(fpr) - ndtri(fnr))])
