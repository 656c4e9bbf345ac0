"""Audits in one run: a coin decides for each canary whether it is in. Right guesses refute an epsilon or a curve."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, overload

import numpy as np

from jaxacct.audit.error_counts import CONDITIONAL, LowerBound, epsilon_of_mu, error_of, guess_counts, plain, safe
from jaxacct.core.floats import ROUNDOFF, bisected
from jaxacct.core.text import exact, listed, outward
from jaxacct.core.types import ArrayLike, Leaf, Numbers
from jaxacct.core.validation import (
    NON_NEGATIVE,
    POSITIVE,
    Constraint,
    InputError,
    check,
    check_one,
    choice,
    require_at_most,
    shown,
)
from jaxacct.mechanisms import Gaussian, Mechanism, batch_shape
from jaxacct.mechanisms.loss_components import add_and_remove
from jaxacct.representations.mechanism_profile import Profile, profile
from jaxacct.selection.base_profile import upper_hull
from jaxacct.training import Plan

FARTHEST_EPSILON = 50.0
"""`claimed_lines` makes lines at epsilons from 0 to min(this, e), where e is the epsilon with claimed delta 1e-15."""
DOWN = 1.0 - 8.0 * ROUNDOFF
"""Factor that rounds a result of a few operations down."""
Inverse = Callable[[np.ndarray], np.ndarray]
"""Function from y to a lower bound of inf{x : F(x) >= y}, infinite where y > 1. F is the claimed curve: an event of
probability x without the record has at most probability F(x) with the record."""
GUESSED = ("both", "in")
"""With "both" an audit guesses that some canaries are in and that others are out. With "in" it guesses only "in"."""


def one_run_p_value(
    epsilon: ArrayLike, correct: ArrayLike, guesses: ArrayLike, canaries: ArrayLike, delta: ArrayLike
) -> Numbers:
    """Bound from above the probability that v or more of r guesses are right, for any (epsilon, delta)-DP mechanism.

    For m canaries, `q = e^eps/(1 + e^eps)` and a binomial B = Bin(r, q), the bound is
    `Pr[B >= v] + 2 m delta max_{1<=i<=v} (Pr[B >= v - i] - Pr[B >= v])/i`.
    Where 2 m delta > 1 this bound may fall as epsilon grows.  Then a larger bound is returned, which does not fall.

    Parameters
    ----------
    epsilon : array_like >= 0
    correct, guesses, canaries : array_like of whole numbers v <= r <= m.
    delta : in [0, 1).  All arguments broadcast.

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
    correct: ArrayLike,
    guesses: ArrayLike,
    canaries: ArrayLike,
    *,
    delta: ArrayLike,
    confidence: float = ...,
    claim: None = ...,
    guessed: str = ...,
) -> LowerBound: ...


@overload
def one_run(
    correct: ArrayLike,
    guesses: ArrayLike,
    canaries: ArrayLike,
    *,
    claim: Plan | Mechanism | Profile | float,
    delta: ArrayLike = ...,
    confidence: float = ...,
    guessed: str = ...,
) -> CurveTest: ...


def one_run(
    correct: ArrayLike,
    guesses: ArrayLike,
    canaries: ArrayLike,
    *,
    delta: ArrayLike | None = None,
    confidence: float = 0.95,
    claim: Plan | Mechanism | Profile | float | None = None,
    guessed: str = "both",
) -> LowerBound:
    """Bound epsilon from below, from the number of right guesses in one run, or test the curve of a ``claim``.

    Each of m ``canaries`` was put in or left out by a fair coin of its own, and the mechanism ran once.  An auditor saw
    the output alone and guessed some of the coins (`coin_guesses`).  Of these ``guesses``, ``correct`` were right.  The
    bound is the largest epsilon, for adding or removing one canary, at which so many right guesses have a probability
    below 1 - confidence.  A test of the whole trade-off curve of a ``claim`` refutes more claims: `CurveTest`.

    With a claim, the number of guesses must be fixed before the coins are tossed: guess the largest scores, not the
    scores above a threshold.  Guesses may depend on the output and on randomness of their own, but not on the coins.
    Where several numbers of guesses or several scores are tried, multiply each p-value by the number of tries.

    Parameters
    ----------
    correct, guesses, canaries : array_like of whole numbers; correct <= guesses <= canaries.
    delta : array_like in [0, 1).  It may be left out if the claim is a Plan, which has a delta.  All arrays broadcast.
    confidence : float in (0, 1)
    claim : a Plan claims the curve of one run, a mechanism or a Profile claims its own curve, and a positive number mu
        claims mu-Gaussian DP.  The claim is about adding or removing one canary, or about replacing or zeroing one if
        its relation is replace_one or zero_out.  A plan with data_dependent=True claims no curve, and is refused.
    guessed : {"both", "in"}; "in" if every guess says that a canary was in, and some coins are not guessed.  With a
        claim, "in" refutes more than "both".

    Returns
    -------
    LowerBound : with a claim a `CurveTest`.

    References
    ----------
    As for `one_run_p_value`; with a claim Mahloujifar, Melis and Chaudhuri (2024), arXiv:2410.22235, and README.md of
    this folder, "A known curve".

    >>> one_run(95, 100, 1000, delta=1e-5, confidence=0.95)
    LowerBound(epsilon >= 2.165175 at delta 1e-05, confidence 0.95, 1,000 trials, one_run)
    """
    if claim is not None:
        return known_curve_test(correct, guesses, canaries, claim, delta=delta, confidence=confidence, guessed=guessed)
    if delta is None:
        raise InputError("delta = None must be a number; only a Plan as claim has one of its own")
    choice("guessed", guessed, GUESSED)
    error = error_of(confidence)
    fields, shape = guess_counts(correct, guesses, canaries, delta)
    v, r, m, d = (np.broadcast_to(x, shape).reshape(-1) for x in fields)
    rejected = lambda at: _log_p(at, v, r, m, d) < np.log(error) - 1e-9
    # At epsilon = `high` even r right guesses of r have a probability q^r >= error. So `high` is never rejected.
    low, high = np.zeros(v.size), np.maximum(np.log(r / -np.log(error)) + 1.0, 1.0)
    found, _ = bisected(low, high, rejected, 60)  # more halvings than a float64 has significant bits
    epsilon = np.where(rejected(low), found, 0.0).reshape(shape)
    trials = np.broadcast_to(fields[2], shape).astype(np.int64)
    return LowerBound(plain(epsilon), plain(fields[3]), confidence, plain(trials), "one_run")


def coin_guesses(scores: ArrayLike, included: ArrayLike, positive: int, negative: int) -> tuple[int, int]:
    """Guess that the canaries with the highest scores are in, and the canaries with the lowest scores out.

    Parameters
    ----------
    scores : array_like, shape (canaries,)
    included : array_like of bool, shape (canaries,); whether each canary was in.
    positive, negative : how many canaries to guess in, and how many out: fixed before the scores are seen.

    Returns
    -------
    tuple of int : number of right guesses, number of guesses.

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
    """Return the logarithm of `one_run_p_value`; all arrays have the shape (batch,)."""
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
        # `within` is log Pr[v - i <= B < v], summed from v downwards, since a difference of two tails would cancel.
        i = k[1:]
        below = np.where(i <= at, np.take_along_axis(mass, np.maximum(at - i.astype(int), 0), axis=1), -np.inf)
        within = np.logaddexp.accumulate(below, axis=1)
        share = np.log(2.0 * m * delta)[:, None] - np.log(i)
        plus = np.where(share <= 0.0, np.logaddexp(beyond, share + within), share + np.logaddexp(beyond, within))
        plus = np.where(i <= at, plus, -np.inf)
        return np.minimum(np.maximum(beyond[:, 0], plus.max(axis=1)), 0.0)


@dataclass(frozen=True, eq=False, repr=False)
class CurveTest(LowerBound):
    """Test of a claimed trade-off curve, made by `one_run`.

    If the claim is true, `p_value <= a` has probability at most a.  A small p-value refutes the claimed curve and every
    curve that promises more.  It refutes no single (epsilon, delta).  The guesses also refute mu'-Gaussian DP for
    every mu' < ``mu``.  ``epsilon`` is a lower bound only if the run has the trade-off curve of a Gaussian mechanism.

    Parameters
    ----------
    epsilon, delta, confidence, trials, method, kind, mu, relation : as in `LowerBound`.
    p_value : the p-value, rounded up.
    claim : the tested claim, in words.
    guessed : {"both", "in"}, as for `one_run`.

    References
    ----------
    README.md of this folder, "A known curve".

    >>> from jaxacct.audit import one_run
    >>> one_run(95, 100, 1000, claim=0.3, delta=1e-5, confidence=0.99).refuted
    True
    """

    p_value: Leaf = 1.0
    claim: str = ""
    guessed: str = "both"

    @property
    def refuted(self) -> Numbers:
        """Whether the claimed curve is refuted at level 1 - confidence."""
        return plain(np.asarray(self.p_value) <= error_of(self.confidence))

    def __repr__(self) -> str:
        """Return the result of the test as text, followed by the bound."""
        p = listed(self.p_value, lambda value: outward(value, ".3g", up=True))
        bound = super().__repr__().removeprefix("LowerBound(")
        return f"CurveTest({self.claim}: p = {p}, refuted: {self.refuted}; mu >= {safe(self.mu)}, {bound}"


def known_curve_test(
    correct: Any, guesses: Any, canaries: Any, claim: Any, *, delta: Any, confidence: float, guessed: str
) -> CurveTest:
    """Return the answer of `one_run` where a claim is given."""
    error = error_of(confidence)
    if delta is None:
        if not isinstance(claim, Plan):
            raise InputError("delta = None must be a number unless claim is a Plan; give the delta of the epsilon")
        delta = claim.target_delta
    (c, g, m, d), shape = guess_counts(correct, guesses, canaries, delta)
    choice("guessed", guessed, GUESSED)
    if guessed == "in":
        require_at_most("guesses", g, "canaries - 1", m - 1.0, "guesses that every canary is in say nothing")
    right, made, coins = (np.broadcast_to(x, shape).reshape(-1, 1) for x in (c, g, m))
    p_value = _p_value(right, made, coins, by_lines(claimed_lines(claim, guessed)), guessed).reshape(shape)

    def held(mu: np.ndarray) -> np.ndarray:
        side = by_gaussian(mu) if guessed == "both" else halved(by_gaussian(mu))
        return ~refuted(np.full(mu.shape, error), right, made, coins, side)

    # Every mu below a refuted mu is refuted, so `_sections` finds the largest. In float64, no audit refutes mu = 50.
    mu = _sections(held, 0.0, 50.0, right.shape[0])[0].reshape(shape)
    at = np.broadcast_to(d, shape)
    epsilon = np.where(at > 0.0, epsilon_of_mu(mu, np.where(at > 0.0, at, 0.5)), np.where(mu > 0.0, np.inf, 0.0))
    trials = np.broadcast_to(m, shape).astype(np.int64)
    relation = claim.relation if isinstance(claim, Plan | Profile) else "add_or_remove_one"
    fields = (plain(epsilon), plain(d), confidence, plain(trials), "one_run_curve", CONDITIONAL, plain(mu), relation)
    return CurveTest(*fields, plain(p_value), words(claim), guessed)


def refuted(tau: np.ndarray, c: np.ndarray, g: np.ndarray, m: np.ndarray, inverse: Inverse) -> np.ndarray:
    """Return whether the curve rules out tau = Pr[c or more of g guesses are right] (README.md, "A known curve")."""
    # r and h are the two sums in the proof, rounded down
    r, h = DOWN * tau * c / m, DOWN * tau * (g - c) / m
    for i in range(int(c.max()) - 1, -1, -1):
        active = i < c
        more = np.where(active, np.maximum(h, inverse(r)), h)
        # If `more` is infinite, h becomes infinite, and h alone refutes tau. `step` is then 0, which leaves r finite.
        step = np.subtract(more, h, out=np.zeros_like(r), where=np.isfinite(more))
        r = np.where(active, DOWN * (r + i / np.maximum(g - i, 1.0) * step), r)
        h = more
    return DOWN * (r + h) > g / m


def _p_value(c: np.ndarray, g: np.ndarray, m: np.ndarray, inverse: Inverse, guessed: str) -> np.ndarray:
    """Return the p-value: the least tau for which `refuted` was found True, or 1. The counts have shape (batch, 1)."""
    side = inverse if guessed == "both" else halved(inverse)
    wrong = lambda log_tau: refuted(np.exp(log_tau), c, g, m, side)
    return np.minimum(np.exp(_sections(wrong, -690.0, 0.0, c.shape[0])[1]) / DOWN, 1.0)


def _sections(true: Callable[[np.ndarray], np.ndarray], low: float, high: float, rows: int) -> tuple[Any, Any]:
    """Return, for each row, the ends of a short interval in [low, high] in which `true` turns from False to True."""
    left, right = np.full(rows, low), np.full(rows, high)
    share = np.arange(1.0, 17.0) / 17.0
    for _ in range(10):  # the interval shrinks by a factor of 17^10 = 2e12
        at = left[:, None] + (right - left)[:, None] * share
        turned = np.argmax(np.concatenate([true(at), np.ones((rows, 1), bool)], axis=1), axis=1)
        ends = np.concatenate([left[:, None], at, right[:, None]], axis=1)
        left, right = (np.take_along_axis(ends, turned[:, None] + k, axis=1)[:, 0] for k in (0, 1))
    return left, right


class Lines(NamedTuple):
    """Lines above the curve: y <= intercept + slope x. An event has probability x without the record and y with it."""

    intercept: np.ndarray
    slope: np.ndarray
    breaks: np.ndarray  # values of y at which another line begins to give the largest lower bound of x


def claimed_lines(claim: Any, guessed: str) -> Lines:
    """Return lines above the claimed curve. If `guessed` is "in", only the curve of removing a canary is used."""
    relation = "add_or_remove_one" if guessed == "both" else "remove_one"
    if isinstance(claim, Plan):
        if claim.filter is not None:
            raise InputError(
                "claim is a Plan with data_dependent = True, which promises an epsilon at every delta, but no curve; "
                "give plan.mechanism if the run followed the plan as it was made"
            )
        one = profile(claim.mechanism, claim.relation)
    elif isinstance(claim, Profile):
        one = claim
    elif isinstance(claim, Mechanism):
        one = profile(claim)
    else:
        mu = check_one("claim", claim, POSITIVE, "give a Plan, a mechanism, a Profile or a mu")
        one = profile(Gaussian(1.0 / mu))
    if batch_shape(one.mechanism) != ():
        raise InputError("claim is a batch of mechanisms; test one claim at a time")
    if not add_and_remove(one.mechanism, one.relation):
        relation = one.relation
    reverse = "add_one" if relation == "remove_one" else relation
    steep, steep_delta = flat, flat_delta = _deltas(replace(one, relation=relation))
    if reverse != relation:
        flat, flat_delta = _deltas(replace(one, relation=reverse))
    slope = np.concatenate([np.exp(-flat[::-1]), np.exp(steep)])
    above = np.concatenate([1.0 - np.exp(-flat[::-1]) * (1.0 - flat_delta[::-1]), steep_delta])
    return _lowest(above + 4.0 * ROUNDOFF * np.maximum(above, slope < 1.0), slope)


def _deltas(side: Profile) -> tuple[np.ndarray, np.ndarray]:
    """Return epsilons, and upper bounds of a profile's delta at these epsilons."""
    farthest = float(side.epsilon(1e-15).upper)  # lines at larger eps would be lower by 1e-15 at most
    # 257 epsilons are enough: between two of them the lines are too high by an error of second order in their distance
    epsilon = np.linspace(0.0, np.fmin(farthest, FARTHEST_EPSILON), 257)
    return epsilon, np.asarray(side.delta(epsilon).upper)


def _lowest(intercept: np.ndarray, slope: np.ndarray) -> Lines:
    """Return the lines whose lower bound of x, (y - intercept)/slope, is the largest for some y (see `Lines`)."""
    steep, start = 1.0 / slope, -intercept / slope
    kept = upper_hull(steep, start)
    return Lines(intercept[kept], slope[kept], -np.diff(start[kept]) / np.diff(steep[kept]))


def by_lines(lines: Lines) -> Inverse:
    """Return the function from y to a lower bound of x, by the line that is best at y. All lines give valid bounds."""

    def inverse(y: np.ndarray) -> np.ndarray:
        best = np.searchsorted(lines.breaks, y)
        x = DOWN * (y - lines.intercept[best]) / lines.slope[best]
        return np.where(y > 1.0, np.inf, np.maximum(x, 0.0))

    return inverse


def by_gaussian(mu: np.ndarray) -> Inverse:
    """Return the inverse of the curve of mu-Gaussian DP, rounded down. mu broadcasts with the inverse's argument y."""
    from scipy.special import ndtr, ndtri

    def inverse(y: np.ndarray) -> np.ndarray:
        x = (1.0 - 1e-11) * ndtr(ndtri(np.minimum(y, 1.0)) - mu)  # SciPy's functions have errors of about 1e-14
        return np.where(y > 1.0, np.inf, np.minimum(x, y))

    return inverse


def halved(inverse: Inverse) -> Inverse:
    """Given the inverse of a curve F, return the inverse of F(2x)/2, the curve for guesses "in"."""
    return lambda y: 0.5 * inverse(2.0 * y)


def words(claim: Any) -> str:
    if isinstance(claim, Plan):
        return "curve of the plan"
    if isinstance(claim, Mechanism | Profile):
        return f"curve of {shown(claim.mechanism if isinstance(claim, Profile) else claim)}"
    return f"{exact(claim)}-Gaussian DP"
