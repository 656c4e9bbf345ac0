"""Sampled Gaussian steps with so little noise that outputs show the hits (README.md, "Little noise")."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from jaxacct.core.floats import ROUNDOFF
from jaxacct.engines import contour
from jaxacct.engines.protocol import Answer
from jaxacct.mechanisms.loss_components import Components

MOST_HITS = 4096
"""Compositions that may have more hits are left to other engines, since each number of hits costs a term."""
ENOUGH = 40.0
"""Largest threshold that is taken. Pr[N(0, 1) > 40] is e^-804.6."""
LOG_EXCESS = -30.0
"""The threshold is chosen so that losses are known up to e^LOG_EXCESS, unless this threshold exceeds ENOUGH."""


class Steps(NamedTuple):
    """The sampled Gaussian steps of each row, and what their outputs show, (B,)."""

    removing: np.ndarray
    mu: np.ndarray  # of all Gaussians without sampling; 0 if there are none
    s: np.ndarray  # 1/sigma
    n: np.ndarray
    log_hit: np.ndarray  # log q
    log_miss: np.ndarray  # log(1 - q)
    most: np.ndarray  # largest number of hits whose term is computed
    threshold: np.ndarray  # t
    excess: np.ndarray  # upper bound of |loss - the loss that the number of hits implies|


class Reach(NamedTuple):
    """Masks of configurations, (B,)."""

    answers: np.ndarray  # one sampled Gaussian of little noise, beside unsampled ones
    settles: np.ndarray  # the chance that an output misleads is too small for float64, so that the answer is exact


def reach(parts: Components) -> Reach:
    alone = np.sum(parts.gauss_n > 0.0, axis=1) == 1
    alone &= ~(np.any(parts.laplace_n > 0.0, axis=1) | np.any(parts.finite_n > 0.0, axis=1))
    # with more noise than this no threshold is large enough, whatever q and n are
    alone &= np.min(np.where(parts.gauss_n > 0.0, parts.gauss_sigma, np.inf), axis=1, initial=np.inf) < 0.1
    rows, settles = np.flatnonzero(alone), np.zeros(alone.shape, bool)
    if rows.size:
        steps = _steps(parts.take(rows))
        # the threshold is in standard deviations of the noise: Pr[N(0, 1) > 5] is 3e-7
        alone[rows] = (steps.threshold >= 5.0) & (~steps.removing | (steps.most < MOST_HITS))
        settles[rows] = alone[rows] & (steps.threshold == ENOUGH)
    return Reach(alone, settles)


def _steps(parts: Components) -> Steps:
    column = np.argmax(parts.gauss_n, axis=1)[:, None]
    sigma, q, n = (np.take_along_axis(x, column, 1)[:, 0] for x in (parts.gauss_sigma, parts.gauss_q, parts.gauss_n))
    with np.errstate(over="ignore", under="ignore"):
        s, log_hit, log_miss = 1.0 / sigma, np.log(q), np.log1p(-q)
        most = np.minimum(n, np.ceil(n * q + 39.0 * np.sqrt(n * q) + 180.0))
        log_factor = np.log(n) + np.logaddexp(-log_hit, log_hit - log_miss)
        threshold = np.minimum(0.5 * s - (log_factor - LOG_EXCESS) / s, ENOUGH)
        exponent = np.maximum(s * (threshold - 0.5 * s), -1e300)
        excess = np.exp(np.minimum(log_factor + exponent + 1e-9 * (np.abs(log_factor) + np.abs(exponent)), 700.0))
    removing, mu = parts.sign > 0, np.where(parts.mu2 > 0.0, parts.mu, 0.0)
    return Steps(removing, mu, s, n, log_hit, log_miss, most, threshold, excess + contour.LEAST_DELTA)


def _log_chances(steps: Steps, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (logs of the chances of 0, ..., count - 1 hits, bounds of their errors, log of the chance of more hits).

    For add, the only term is that of no hit. Its chance is 1.
    """
    hits, logit = np.arange(count, dtype=float), (steps.log_hit - steps.log_miss)[:, None]
    none, n = (steps.n * steps.log_miss)[:, None], steps.n[:, None]
    with np.errstate(divide="ignore", invalid="ignore"):
        left, more = np.log(np.maximum(n - hits, 0.0)), np.log(hits + 1.0)
        rise = left - more + logit  # log(chance of one hit more/chance of this number of hits)
        rises = np.concatenate([np.zeros_like(none), np.cumsum(rise, axis=1)[:, :-1]], axis=1)
        log_chance = none + rises
        size = np.abs(rises) + 8.0 * (left + more + np.abs(logit))
        sizes = np.cumsum(np.where(np.isfinite(size), size, 0.0), axis=1)
        error = ROUNDOFF * (8.0 * np.abs(none) + sizes + np.where(np.isfinite(rises), np.abs(rises), 0.0))
        # beyond the last term each chance is at most e^rise times the one before, since `rise` falls
        ratio = np.exp(np.minimum(rise[:, -1] + 1e-9, 0.0))
        log_more = (log_chance + error + rise)[:, -1] - np.log1p(-ratio) + 1e-9
        log_more = np.where(np.isnan(log_more), np.where(steps.n >= count, 0.0, -np.inf), np.minimum(log_more, 0.0))
    only = np.where(hits == 0.0, 0.0, -np.inf)
    remove = steps.removing[:, None]
    log_chance, error = np.where(remove, log_chance, only), np.where(remove, error, 0.0)
    return log_chance, error, np.where(steps.removing, log_more, -np.inf)


class Terms(NamedTuple):
    """The terms of delta: for each row, one for each of K numbers of hits. Fields are (B, K) unless said otherwise."""

    steps: Steps
    least: np.ndarray  # lower bound of the log of the chance of this number of hits
    most: np.ndarray  # upper bound of the same log
    log_rare: np.ndarray  # (B,), upper bound of log(n Phi(-t))
    log_more: np.ndarray  # (B,), log of the chance of more hits than the last term has
    v: np.ndarray  # standard deviation of the loss, given this number of hits
    away: np.ndarray  # the term at eps is the delta of a Gaussian at eps + away


def _terms(steps: Steps) -> Terms:
    from scipy.special import log_ndtr  # slow to import

    count = int(np.max(np.where(steps.removing, steps.most, 0.0))) + 1
    log_chance, error, log_more = _log_chances(steps, count)
    hits, n = np.arange(count, dtype=float), steps.n[:, None]
    away = hits * -steps.log_hit[:, None] + np.maximum(n - hits, 0.0) * -steps.log_miss[:, None]
    away = np.where(steps.removing[:, None], away, n * steps.log_miss[:, None])
    v = np.hypot(np.sqrt(hits) * steps.s[:, None], steps.mu[:, None])
    log_rare = np.log(steps.n) + log_ndtr(-steps.threshold) + 1e-9 * (1.0 + steps.threshold**2)
    return Terms(steps, log_chance - error, log_chance + error, log_rare, log_more, v, away)


def log_deltas(terms: Terms, eps: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return lower and upper bounds of log delta at eps >= 0, (..., B). Where delta is 0 they are -inf."""
    removing, log_rare, excess = (x[:, None] for x in (terms.steps.removing, terms.log_rare, terms.steps.excess))
    at, off = eps[..., None] + terms.away, 8.0 * ROUNDOFF * (eps[..., None] + np.abs(terms.away))
    # remove: the loss is at most `excess` above the loss that the number of hits implies; add: at most `excess` below
    latest, earliest = at + off + np.where(removing, 0.0, excess), at - off - np.where(removing, excess, 0.0)
    low = terms.least + _log_delta(terms.v, latest, -1.0)
    # the upper bound's other terms: the chance that an output misleads, and the chance of more hits
    rest = np.where(removing, np.logaddexp(log_rare, terms.log_more[:, None]), -np.inf)
    rest = np.broadcast_to(rest, (*eps.shape, 1))
    high = np.concatenate([terms.most + _log_delta(terms.v, earliest, 1.0), rest], axis=-1)
    with np.errstate(divide="ignore"):
        sure = np.where(removing, 0.0, np.log(-np.expm1(np.minimum(log_rare, 0.0))))[:, 0]
    return _log_sum(low) + sure - 1e-12, np.minimum(_log_sum(high) + 1e-12, 0.0)


def _log_sum(x: np.ndarray) -> np.ndarray:
    """Return the log of the sum of e^x over the last axis, with an error below 1e-12."""
    top = np.max(x, axis=-1)
    top = np.where(top > -np.inf, top, 0.0)
    with np.errstate(divide="ignore", under="ignore"):
        return top + np.log(np.sum(np.exp(x - top[..., None]), axis=-1))


def _log_delta(v: np.ndarray, at: np.ndarray, side: float) -> np.ndarray:
    """Return an upper (side 1) or lower (-1) bound of log E(1 - e^{at - G})_+ for G ~ N(v^2/2, v^2). G = 0 if v = 0."""
    from jaxacct.engines import closed_form  # needs SciPy

    normal = v > 0.0
    value, _, error = closed_form.log_delta(np.where(normal, v, 1.0), np.abs(at))
    bound = np.where(normal, value + side * error, -np.inf)
    bound = np.where(np.isnan(bound), 0.0 if side > 0.0 else -np.inf, np.minimum(bound, 0.0))
    if side < 0.0:  # with a = at/v - v/2, delta is Phi(-a) - e^at Phi(-a - v) >= 1 - 2 e^-800 if a <= -40
        size = np.abs(at) / np.where(normal, v, 1.0)
        beyond = size - 0.5 * v + 8.0 * ROUNDOFF * (size + v) < -41.0
        bound = np.where(normal & beyond, np.maximum(bound, -1e-300), bound)
    # at -x, delta is 1 - e^-x + e^-x times the delta at x
    below = np.minimum(at, 0.0)
    with np.errstate(divide="ignore"):
        reflected = np.log(np.exp(below + bound) - np.expm1(below))
        reflected += side * ROUNDOFF * (16.0 + 4.0 * np.where(reflected > -np.inf, np.abs(reflected), 0.0))
    return np.where(at < 0.0, np.minimum(reflected, 0.0), bound)


def delta(parts: Components, eps: np.ndarray) -> Answer:
    """Return the bracket of delta at eps."""
    ends = [np.zeros(eps.size), np.zeros(eps.size)]
    for rows, terms in _blocks(parts):
        for end, value in zip(ends, log_deltas(terms, eps[rows]), strict=True):
            end[rows] = value
    lower = np.where(ends[0] > contour.LOWEST_LOG_DELTA, np.exp(ends[0]), 0.0)
    upper = np.where(ends[1] > -np.inf, np.maximum(np.exp(ends[1]), contour.LEAST_DELTA), 0.0)
    lower, upper = lower * (1.0 - 4.0 * ROUNDOFF), np.minimum(upper * (1.0 + 4.0 * ROUNDOFF), 1.0)
    return Answer(lower, 0.5 * (lower + upper), upper)


def epsilon(parts: Components, target: np.ndarray, slack: np.ndarray) -> Answer:
    """Return the bracket of the least eps >= 0 with delta(eps) <= target. `slack` bounds the error of log(target)."""
    from jaxacct.engines import closed_form  # needs SciPy

    ends = np.zeros((3, target.size))
    for rows, terms in _blocks(parts):
        log_target, steps = np.log(target[rows]), terms.steps
        # a loss for which every step hits the record (remove), or none does (add), is a Gaussian's plus a constant
        mu = np.hypot(steps.mu, np.where(steps.removing, np.sqrt(steps.n) * steps.s, 0.0))
        top = closed_form.simple_epsilon(mu, log_target, slack[rows]).upper
        top = np.where(mu > 0.0, top, 0.0) - np.where(steps.removing, 0.0, steps.n * steps.log_miss)
        bounds = functools.partial(log_deltas, terms)
        ends[:, rows] = closed_form.by_bisection(bounds, top * (1.0 + 16.0 * ROUNDOFF), log_target, slack[rows])
    return Answer(*ends)


def _blocks(parts: Components) -> Iterator[tuple[np.ndarray, Terms]]:
    """Yield (rows, their terms) of blocks of rows whose numbers of hits are alike."""
    steps = _steps(parts)
    counts = np.where(steps.removing, steps.most, 0.0) + 1.0
    order = np.argsort(counts, kind="stable")
    while order.size:
        rows = order[: max(1, int(500_000 // counts[order[0]]))]  # bounds the memory
        rows = rows[counts[rows] <= 2.0 * counts[rows[0]]]
        yield rows, _terms(Steps(*(x[rows] for x in steps)))
        order = order[rows.size :]
