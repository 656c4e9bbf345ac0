"""An audit in one run against a known curve: is so many right guesses possible under the claimed trade-off function?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxacct.audit.claimed_curve import DOWN, Inverse, by_gaussian, by_lines, claimed_lines, halved, words
from jaxacct.audit.error_counts import epsilon_of_mu, guess_counts
from jaxacct.audit.lower_bound import CONDITIONAL, LowerBound, error_of, plain, require_at_most
from jaxacct.core.validation import InputError, choice
from jaxacct.training import Plan

__all__ = ["CurveTest", "known_curve_p_value", "known_curve_test", "refuted"]

GUESSED = ("both", "in")
"""Which guesses are made: of both kinds, or only that a canary was in."""
SECTIONS = 16
"""Points at once of a search by sections: each round divides the interval by one more than this."""
ROUNDS = 10
"""Rounds of a search: the interval shrinks by 17^10 = 2e12."""
LEAST_LOG_P = -690.0
"""Where the search for a p-value starts: the logarithm of 1e-300."""
LARGEST_MU = 50.0
"""Where the search for a Gaussian-DP mu ends; an attack on it is never wrong in float64."""


@dataclass(frozen=True, eq=False, repr=False)
class CurveTest(LowerBound):
    """A test of a claimed trade-off curve, and what the same guesses say of a Gaussian-DP mu; by `one_run`.

    If the claim is true, `p_value <= a` has probability at most a.  A small one refutes the claimed curve, and so every
    curve that promises more.  It says nothing of any one (epsilon, delta).  The fields of `LowerBound` are those of the
    bound on mu by the same guesses: the run is not mu'-Gaussian DP for any mu' < ``mu``, without a condition, and its
    ``epsilon`` is at least as said if the curve is that of a Gaussian.

    Parameters
    ----------
    epsilon, delta, confidence, trials, method, kind, mu
        As in `LowerBound`.
    p_value : float or numpy.ndarray
        Rounded up.
    claim : str
        What was tested, in words.
    guessed : {"both", "in"}

    References
    ----------
    README.md of this folder, "A known curve".

    >>> from jaxacct.audit import one_run
    >>> one_run(95, 100, 1000, claim=0.3, delta=1e-5, confidence=0.99).refuted
    True
    """

    p_value: Any = 1.0
    claim: str = ""
    guessed: str = "both"

    @property
    def refuted(self) -> Any:
        """Whether the claimed curve is refuted at level 1 - confidence."""
        return plain(np.asarray(self.p_value) <= error_of(self.confidence))

    def __repr__(self) -> str:
        """The test first, then the bound."""
        p = np.array2string(np.asarray(self.p_value), threshold=8, formatter={"float_kind": "{:.3g}".format})
        mu = np.array2string(np.asarray(self.mu), precision=6, threshold=8)
        bound = super().__repr__().removeprefix("LowerBound(")
        return f"CurveTest({self.claim}: p = {p}, refuted: {self.refuted}; mu >= {mu}, {bound}"


def known_curve_p_value(correct: Any, guesses: Any, canaries: Any, claim: Any, *, guessed: str = "both") -> Any:
    """The largest probability that the claimed trade-off curve lets c or more of g guesses be right, rounded up.

    Each of m canaries was in or out by a fair coin of its own, independent of the others; the mechanism ran once.  The
    number of guesses g was fixed before the coins were tossed: the g largest scores, not the scores above a threshold.
    Guesses depend on the output that the claim is about, and on randomness of their own, not on the coins.  If several
    g or scores are tried, each p-value is multiplied by their number.

    Parameters
    ----------
    correct, guesses, canaries : array_like of whole numbers
        c, g and m: correct <= guesses <= canaries.  All broadcast.
    claim : Plan, Mechanism, Profile or float
        What is claimed of adding or removing one canary (of replacing one, or zeroing it out, if the plan or profile
        is under replace_one or zero_out): the curve of a plan's run, once; of a mechanism; or mu-Gaussian DP for a
        number mu > 0.
    guessed : {"both", "in"}
        "in" if every guess says that a canary was in: sharper, and needs only the curve of removing.

    Returns
    -------
    float or numpy.ndarray

    Raises
    ------
    InputError
        Invalid counts or another claim.

    References
    ----------
    Mahloujifar, Melis and Chaudhuri (2024), arXiv:2410.22235; README.md of this folder, "A known curve", has the proof
    and that for "in".

    >>> round(known_curve_p_value(19, 20, 100, 1.0), 3), round(known_curve_p_value(19, 20, 100, 1.0, guessed="in"), 3)
    (0.391, 0.244)
    """
    (c, g, m, _), shape = guess_counts(correct, guesses, canaries, 0.0)
    choice("guessed", guessed, GUESSED)
    return plain(_p_value(*_columns(c, g, m, shape), by_lines(claimed_lines(claim, guessed)), guessed).reshape(shape))


def known_curve_test(
    correct: Any, guesses: Any, canaries: Any, claim: Any, *, delta: Any, confidence: float, guessed: str
) -> CurveTest:
    """The answer of `one_run` with a claim."""
    error = error_of(confidence)
    if delta is None:
        if not isinstance(claim, Plan):
            raise InputError("delta = None must be a number unless claim is a Plan; give the delta of the epsilon")
        delta = claim.target_delta
    (c, g, m, d), shape = guess_counts(correct, guesses, canaries, delta)
    choice("guessed", guessed, GUESSED)
    if guessed == "in":
        require_at_most("guesses", g, "canaries - 1", m - 1.0, "guesses that every canary is in say nothing")
    counts = _columns(c, g, m, shape)
    p_value = _p_value(*counts, by_lines(claimed_lines(claim, guessed)), guessed).reshape(shape)
    mu = _gaussian_mu(*counts, error, guessed).reshape(shape)
    at = np.broadcast_to(d, shape)
    epsilon = np.where(at > 0.0, epsilon_of_mu(mu, np.where(at > 0.0, at, 0.5)), np.where(mu > 0.0, np.inf, 0.0))
    trials = np.broadcast_to(m, shape).astype(np.int64)
    fields = (plain(epsilon), plain(d), confidence, plain(trials), "one_run_curve", CONDITIONAL, plain(mu))
    return CurveTest(*fields, plain(p_value), words(claim), guessed)


def refuted(tau: np.ndarray, c: np.ndarray, g: np.ndarray, m: np.ndarray, inverse: Inverse) -> np.ndarray:
    """Whether c or more of g right guesses cannot have probability tau.  All broadcast, with whole c <= g <= m.

    r and h are lower bounds of sum_{t>=i} t p_t/m and sum_{t>=i} (g - t) p_t/m for i = c, c - 1, ..., 0.  At i = 0 both
    together are g/m.  What is rounded down leaves the claim more room.
    """
    r, h = DOWN * tau * c / m, DOWN * tau * (g - c) / m
    for i in range(int(c.max()) - 1, -1, -1):
        active = i < c
        more = np.where(active, np.maximum(h, inverse(r)), h)
        # an infinite `more` stays, and decides: r need not be told
        step = np.subtract(more, h, out=np.zeros_like(r), where=np.isfinite(more))
        r = np.where(active, DOWN * (r + i / np.maximum(g - i, 1.0) * step), r)
        h = more
    return DOWN * (r + h) > g / m


def _p_value(c: np.ndarray, g: np.ndarray, m: np.ndarray, inverse: Inverse, guessed: str) -> np.ndarray:
    """The least tau that is seen to be refuted, else 1; counts (B, 1)."""
    side = inverse if guessed == "both" else halved(inverse)
    wrong = lambda log_tau: refuted(np.exp(log_tau), c, g, m, side)
    return np.minimum(np.exp(_sections(wrong, LEAST_LOG_P, 0.0, c.shape[0])[1]) / DOWN, 1.0)


def _gaussian_mu(c: np.ndarray, g: np.ndarray, m: np.ndarray, error: float, guessed: str) -> np.ndarray:
    """The largest mu that is seen to be refuted at this error, else 0; the curves are nested."""

    def held(mu: np.ndarray) -> np.ndarray:
        inverse = by_gaussian(mu)
        side = inverse if guessed == "both" else halved(inverse)
        return ~refuted(np.full(mu.shape, error), c, g, m, side)

    return _sections(held, 0.0, LARGEST_MU, c.shape[0])[0]


def _sections(true: Callable[[np.ndarray], np.ndarray], low: float, high: float, rows: int) -> tuple[Any, Any]:
    """For each row neighbours between which an increasing statement turns true: the ends as they were evaluated."""
    left, right = np.full(rows, low), np.full(rows, high)
    share = np.arange(1.0, SECTIONS + 1.0) / (SECTIONS + 1.0)
    for _ in range(ROUNDS):
        at = left[:, None] + (right - left)[:, None] * share
        turned = np.argmax(np.concatenate([true(at), np.ones((rows, 1), bool)], axis=1), axis=1)
        ends = np.concatenate([left[:, None], at, right[:, None]], axis=1)
        left, right = (np.take_along_axis(ends, turned[:, None] + k, axis=1)[:, 0] for k in (0, 1))
    return left, right


def _columns(
    c: np.ndarray, g: np.ndarray, m: np.ndarray, shape: tuple[int, ...]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    of = lambda x: np.broadcast_to(x, shape).reshape(-1, 1)
    return of(c), of(g), of(m)
