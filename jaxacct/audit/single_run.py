"""Auditing in one run: many canaries, each in or out by a coin, and how many of the coins are guessed right."""

from __future__ import annotations

from typing import Any, overload

import numpy as np

from jaxacct.audit.error_counts import guess_counts
from jaxacct.audit.known_curve import GUESSED, CurveTest, known_curve_test
from jaxacct.audit.lower_bound import LowerBound, error_of, plain
from jaxacct.core.validation import NON_NEGATIVE, Constraint, InputError, check, choice

__all__ = ["coin_guesses", "one_run", "one_run_p_value"]

BISECTIONS = 60
"""Bisections of epsilon: more than there are bits in a float64."""
LOG_ERROR = 1e-9
"""Allowance for the rounding of the logarithm of a p-value."""


def one_run_p_value(epsilon: Any, correct: Any, guesses: Any, canaries: Any, delta: Any) -> Any:
    """The largest probability that any (epsilon, delta)-DP mechanism lets v or more of r guesses be right.

    With `q = e^eps/(1 + e^eps)`, m canaries and B = Bin(r, q):
    `Pr[B >= v] + 2 m delta max_{1<=i<=v} (Pr[B >= v - i] - Pr[B >= v])/i`.
    Where 2 m delta > 1 this need not grow with epsilon; then a larger value is returned that does.  In logarithms
    throughout.

    Parameters
    ----------
    epsilon : array_like >= 0
    correct, guesses, canaries : array_like of whole numbers
        v, r and m: correct <= guesses <= canaries.
    delta : array_like in [0, 1)
        All broadcast.

    Returns
    -------
    float or numpy.ndarray

    References
    ----------
    Steinke, Nasr and Jagielski (2023), Theorem 5.2 and Proposition 5.7; README.md of this folder, "What a lower bound
    says".

    >>> round(one_run_p_value(0.0, 60, 100, 100, 0.0), 6)  # Pr[Bin(100, 1/2) >= 60]
    0.028444
    """
    epsilon = np.asarray(check("epsilon", epsilon, NON_NEGATIVE))
    fields, shape = guess_counts(correct, guesses, canaries, delta, epsilon.shape)
    flat = [np.broadcast_to(x, shape).reshape(-1) for x in (epsilon, *fields)]
    return plain(np.exp(_log_p(*flat)).reshape(shape))


@overload
def one_run(
    correct: Any,
    guesses: Any,
    canaries: Any,
    *,
    delta: Any,
    confidence: float = ...,
    claim: None = ...,
    guessed: str = ...,
) -> LowerBound: ...
@overload
def one_run(
    correct: Any,
    guesses: Any,
    canaries: Any,
    *,
    claim: Any,
    delta: Any = ...,
    confidence: float = ...,
    guessed: str = ...,
) -> CurveTest: ...
def one_run(
    correct: Any,
    guesses: Any,
    canaries: Any,
    *,
    delta: Any = None,
    confidence: float = 0.95,
    claim: Any = None,
    guessed: str = "both",
) -> LowerBound:
    """The largest epsilon at which so many right guesses would have probability below 1 - confidence.

    With a ``claim`` the guesses are held against its whole trade-off curve instead, which sees more: `CurveTest`.

    m ``canaries`` were each put in by a fair coin of its own, and the mechanism ran once.  ``guesses`` of the coins
    were chosen by looking at the output alone, and ``correct`` of them were guessed right (`coin_guesses`).  The
    (epsilon, delta) is about adding or removing one canary.

    Parameters
    ----------
    correct, guesses, canaries : array_like of whole numbers
        correct <= guesses <= canaries.
    delta : array_like in [0, 1)
        All broadcast.  With a Plan as claim it may be left out, and is the plan's.
    confidence : float in (0, 1)
    claim : Plan, Mechanism, Profile or float, optional
        As for `known_curve_p_value`, which also says what must hold of the guesses.
    guessed : {"both", "in"}
        "in" if every guess says that a canary was in, and some are not guessed: sharper against a claim.

    Returns
    -------
    LowerBound
        With a claim a `CurveTest`.

    Raises
    ------
    InputError
        Invalid counts, no delta, or another claim.

    References
    ----------
    As for `one_run_p_value` and, with a claim, `known_curve_p_value`.

    >>> one_run(95, 100, 1000, delta=1e-5, confidence=0.95)
    LowerBound(epsilon >= 2.165176 at delta 1e-05, confidence 0.95, 1,000 trials, one_run)
    """
    if claim is not None:
        return known_curve_test(correct, guesses, canaries, claim, delta=delta, confidence=confidence, guessed=guessed)
    if delta is None:
        raise InputError("delta = None must be a number; only a Plan as claim has one of its own")
    choice("guessed", guessed, GUESSED)
    error = error_of(confidence)
    fields, shape = guess_counts(correct, guesses, canaries, delta)
    v, r, m, d = (np.broadcast_to(x, shape).reshape(-1) for x in fields)
    rejected = lambda at: _log_p(at, v, r, m, d) < np.log(error) - LOG_ERROR
    # at the right end even r of r guesses have probability q^r >= error
    low, high = np.zeros(v.size), np.maximum(np.log(r / -np.log(error)) + 1.0, 1.0)
    some = rejected(low)
    for _ in range(BISECTIONS):
        middle = 0.5 * (low + high)
        right = rejected(middle)
        low, high = np.where(right, middle, low), np.where(right, high, middle)
    epsilon = np.where(some, low, 0.0).reshape(shape)
    trials = np.broadcast_to(fields[2], shape).astype(np.int64)
    return LowerBound(plain(epsilon), plain(fields[3]), confidence, plain(trials), "one_run")


def coin_guesses(scores: Any, included: Any, positive: int, negative: int) -> tuple[int, int]:
    """(correct, guesses): the `positive` highest scores are guessed to be in, the `negative` lowest to be out.

    Parameters
    ----------
    scores : array_like, shape (canaries,)
    included : array_like of bool, shape (canaries,)
        Whether each canary was in.
    positive, negative : int
        How many are guessed; they must be fixed before the scores are seen.

    Returns
    -------
    tuple of int

    Raises
    ------
    InputError
        Other shapes, NaN, or more guesses than canaries.

    >>> coin_guesses([3.0, 0.1, 2.0, -1.0], [True, False, False, False], positive=2, negative=1)
    (2, 3)
    """
    scores, included = np.asarray(scores, np.float64), np.asarray(included)
    if scores.ndim != 1 or included.shape != scores.shape or included.dtype != bool:
        raise InputError("scores and included must be numbers and bools of one shape (canaries,); give one per canary")
    if np.isnan(scores).any():
        raise InputError(f"scores[{int(np.argmax(np.isnan(scores)))}] = nan must be a number; use -inf for no score")
    for name, count in (("positive", positive), ("negative", negative)):
        check(name, count, Constraint("use a whole number of guesses", 0, scores.size, integral=True))
    if positive + negative > scores.size:
        raise InputError(f"positive + negative = {positive + negative} must be <= {scores.size}; guess each coin once")
    order = np.argsort(scores, kind="stable")
    taken_out, taken_in = order[: int(negative)], order[scores.size - int(positive) :]
    return int(np.sum(included[taken_in]) + np.sum(~included[taken_out])), int(positive + negative)


def _log_p(epsilon: Any, v: Any, r: Any, m: Any, delta: Any) -> np.ndarray:
    """log of the p-value, all (B,)."""
    from scipy.special import gammaln

    k = np.arange(int(r.max()) + 1.0)
    log_out = -np.logaddexp(0.0, epsilon)[:, None]  # log(1 - q)
    log_in = log_out + epsilon[:, None]
    n = r[:, None]
    with np.errstate(invalid="ignore", divide="ignore"):
        choose = gammaln(n + 1.0) - gammaln(k + 1.0) - gammaln(np.maximum(n - k, 0.0) + 1.0)
        mass = np.where(k <= n, choose + k * log_in + np.maximum(n - k, 0.0) * log_out, -np.inf)
        tail = np.logaddexp.accumulate(mass[:, ::-1], axis=1)[:, ::-1]
        at = v.astype(int)[:, None]
        beyond = np.take_along_axis(tail, at, axis=1)  # Pr[B >= v]
        # S_i = Pr[v - i <= B < v], summed downwards from v: no difference of tails
        i = k[1:]
        below = np.where(i <= at, np.take_along_axis(mass, np.maximum(at - i.astype(int), 0), axis=1), -np.inf)
        within = np.logaddexp.accumulate(below, axis=1)
        share = np.log(2.0 * m * delta)[:, None] - np.log(i)
        plus = np.where(share <= 0.0, np.logaddexp(beyond, share + within), share + np.logaddexp(beyond, within))
        plus = np.where(i <= at, plus, -np.inf)
        return np.minimum(np.maximum(beyond[:, 0], plus.max(axis=1)), 0.0)
