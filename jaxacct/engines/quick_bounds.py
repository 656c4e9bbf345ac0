"""Cheap bounds by which answers are checked, and bounds of tails of binomial laws (README.md). SciPy is not used."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from jaxacct.core.floats import ROUNDOFF, SMALLEST_POSITIVE
from jaxacct.mechanisms.finite import log_mixture
from jaxacct.mechanisms.loss_components import Components

LARGEST_LOSS_UNITS = 256.0
"""Relative error of a finite part's largest loss, in units of ROUNDOFF. The loss of one step alone needs 128."""
LOG_ERROR = 1e-12
"""Rounding error allowed for a logarithm x: LOG_ERROR if |x| <= 1, and LOG_ERROR |x| otherwise."""
DEVIATIONS = np.array([9.0, 6.0, 3.0, 1.5, 0.0, -3.0, -6.0])
"""Thresholds of the tests on sums: distances from the mean under P towards the mean under Q, in standard deviations."""
_BELOW = np.array([0.5 * math.erfc(-x / math.sqrt(2.0)) for x in DEVIATIONS])
"""Pr[N(0, 1) < x] for each x of `DEVIATIONS`: the chance under P that the sum passes the test with this threshold."""
_HIT = 0.5 * math.erfc(-1.0 / math.sqrt(2.0)) * (1.0 - LOG_ERROR)
"""Pr[N(0, 1) > -1], rounded down: the chance that an output exceeds its mean less one standard deviation."""


class LargestLoss(NamedTuple):
    """The supremum of the loss of all Laplace and finite parts together, raised to 0 where it is negative."""

    near: np.ndarray  # the computed supremum, a sum of terms with relative errors <= LARGEST_LOSS_UNITS * ROUNDOFF
    above: np.ndarray  # the supremum, rounded up


def largest_loss(parts: Components) -> LargestLoss:
    """Return the largest loss of all Laplace and finite parts. A part of n steps adds n times a step's largest loss."""
    if parts.laplace_n.shape[1] + parts.finite_n.shape[1] == 0:
        return LargestLoss(np.zeros(parts.sign.shape), np.zeros(parts.sign.shape))
    rate = parts.laplace_q
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        up = log_mixture(1.0 / parts.laplace_scale, rate)
        down = -log_mixture(-1.0 / parts.laplace_scale, rate)
        laplace = parts.laplace_n * np.where(parts.sign[:, None] > 0, up, down)
        finite = np.where(parts.finite_mass > 0, parts.finite_loss, -np.inf)
        top = np.max(finite, axis=2, initial=-np.inf)
        finite = parts.finite_n * np.where((parts.finite_n > 0) & (top > -np.inf), top, 0.0)
        terms = [*laplace.T, *finite.T]
        # the relative error of each term, in units of ROUNDOFF
        units = [32.0] * laplace.shape[1] + [LARGEST_LOSS_UNITS] * finite.shape[1]
        total = sum(terms)
        above = total + ROUNDOFF * sum(unit * np.abs(x) for unit, x in zip(units, terms, strict=True))
    return LargestLoss(np.fmax(total, 0.0), np.where(np.isnan(above), np.inf, np.maximum(above, 0.0)))


def total_variation(parts: Components) -> np.ndarray:
    """Return (B,) an upper bound of delta(0) without the mass at infinity (README.md, "From above")."""
    with np.errstate(all="ignore"):
        present, s = parts.gauss_n > 0, 1.0 / parts.gauss_sigma
        each = np.where(present, parts.gauss_n * parts.gauss_q * _of_gaussian(s), 0.0)
        one_by_one = _of_gaussian(parts.mu) + np.sum(each, axis=1)
        # chi^2 + 1 is a product over the steps. Each term is at least 1e-300, so that none underflows.
        each = np.where(present, parts.gauss_n * np.log1p(np.maximum(parts.gauss_q**2 * np.expm1(s * s), 1e-300)), 0.0)
        plain = np.where(parts.mu > 0.0, np.maximum(parts.mu * parts.mu, 1e-300), 0.0)
        total = np.fmin(one_by_one, 0.5 * np.sqrt(np.expm1(plain + np.sum(each, axis=1))))
        laplace = parts.laplace_q * -np.expm1(-0.5 / parts.laplace_scale)
        total += np.sum(np.where(parts.laplace_n > 0, parts.laplace_n * laplace, 0.0), axis=1)
        finite = np.sum(parts.finite_mass * -np.expm1(-np.maximum(parts.finite_loss, 0.0)), axis=2)
        total += np.sum(np.where(parts.finite_n > 0, parts.finite_n * finite, 0.0), axis=1)
        terms = sum(n.shape[1] for n in (parts.gauss_n, parts.laplace_n, parts.finite_n)) + parts.finite_mass.shape[2]
        return np.fmin(total * (1.0 + ROUNDOFF * (64.0 + terms)) + 1e-307, 1.0)


def _of_gaussian(mu: np.ndarray) -> np.ndarray:
    """Return an upper bound of a Gaussian's total variation, by Polya: erf(x)^2 <= 1 - e^{-4 x^2/pi}, x = mu/sqrt 8."""
    return np.where(mu > 1e-7, np.sqrt(-np.expm1(mu * mu * (-0.5 / math.pi))), mu / math.sqrt(2.0 * math.pi))


def limits(
    quantity: str,  # "epsilon" or "delta"
    parts: Components,
    target: np.ndarray,  # the given delta or epsilon
    slack: np.ndarray,  # relative error of a given delta
) -> tuple[np.ndarray, np.ndarray]:
    """Return (lower, upper) bounds of `quantity` at `target`. Deltas leave out the mass at infinity."""
    log_p, log_q = _tests(parts)
    with np.errstate(all="ignore"):
        above = largest_loss(parts).above
        # upper bound of mu of the composition of all Gaussians, if the sampled ones were used without sampling
        each = np.where(parts.gauss_n > 0, np.sqrt(parts.gauss_n) / parts.gauss_sigma, 0.0)
        largest = np.max(each, axis=1, initial=0.0)
        mu = np.hypot(parts.mu, largest * math.sqrt(max(each.shape[1], 1))) * (1.0 + LOG_ERROR)
        if quantity == "epsilon":
            left = np.exp(log_p) * (1.0 - LOG_ERROR) - (target * (1.0 + slack))[:, None] * (1.0 + LOG_ERROR)
            gain = np.log(np.maximum(left, SMALLEST_POSITIVE)) - log_q
            gain -= LOG_ERROR * (1.0 + np.abs(gain) + np.abs(log_q))
            lower = np.max(np.where((left > 0.0) & (gain > 0.0), gain, 0.0), axis=1)
            z = np.sqrt(np.maximum(-2.0 * np.log(2.0 * target * (1.0 - slack) * (1.0 - LOG_ERROR)), 0.0))
            upper = (mu * (0.5 * mu + z) + above) * (1.0 + LOG_ERROR)
            return lower, np.where(np.isnan(upper), np.inf, upper)
        cost = target[:, None] + log_q
        cost += LOG_ERROR * (1.0 + np.abs(target[:, None]) + np.abs(log_q))
        left = np.exp(log_p) * (1.0 - LOG_ERROR) - np.exp(np.minimum(cost, 1.0)) * (1.0 + LOG_ERROR)
        lower = np.max(np.where(left > 0.0, left, 0.0), axis=1)
        at = (target - above * (1.0 + LOG_ERROR)) * (1.0 - LOG_ERROR)
        a = np.where(mu > 0.0, at / mu - 0.5 * mu, np.where(at >= 0.0, np.inf, -np.inf))
        a -= LOG_ERROR * (np.abs(at / np.where(mu > 0.0, mu, 1.0)) + mu)
        upper = np.where((a > 0.0) & (at >= 0.0), 0.5 * np.exp(-0.5 * a * a) * (1.0 + LOG_ERROR) + 1e-300, 1.0)
        return lower, np.where(np.isnan(upper), 1.0, upper)


def _tests(parts: Components) -> tuple[np.ndarray, np.ndarray]:
    """For M events S of each row, return lower bounds of log P(S, finite loss) and upper bounds of log Q(S), (B, M)."""
    with np.errstate(all="ignore"):
        mu = parts.mu[:, None]
        log_p = np.where(mu > 0.0, np.log(_BELOW)[None, :] - LOG_ERROR, -np.inf)
        x = (mu - DEVIATIONS[None, :]) - LOG_ERROR * (1.0 + mu)
        found = [(log_p, np.where(mu > 0.0, _crude_tail(x), 0.0))]
        for column in range(parts.gauss_n.shape[1]):
            sigma, q, n = (x[:, column][:, None] for x in (parts.gauss_sigma, parts.gauss_q, parts.gauss_n))
            found += _sampled(sigma, q, n, parts.sign[:, None] > 0)
        for column in range(parts.laplace_n.shape[1]):
            edge, q = 1.0 / parts.laplace_scale[:, column], parts.laplace_q[:, column]
            found.append(_laplace(edge, q, parts.laplace_n[:, column], parts.sign > 0))
        for column in range(parts.finite_n.shape[1]):
            found.append(_finite(*(x[:, column] for x in (parts.finite_loss, parts.finite_mass, parts.finite_n))))
        survival = np.minimum(parts.log_survival, 0.0) * (1.0 + LOG_ERROR)
    log_p, log_q = (np.concatenate(columns, axis=1) for columns in zip(*found, strict=True))
    log_p = log_p + survival[:, None]
    known = np.isfinite(log_p) & ~np.isnan(log_q)
    return np.where(known, log_p, -np.inf), np.where(known, np.minimum(log_q, 0.0), 0.0)


def _crude_tail(x: np.ndarray) -> np.ndarray:
    """Return an upper bound of log Pr[N(0, 1) > x]."""
    return np.where(x > 0.0, -0.5 * x * x * (1.0 - LOG_ERROR) - math.log(2.0), 0.0)


def _sampled(
    sigma: np.ndarray, q: np.ndarray, n: np.ndarray, removing: np.ndarray
) -> list[tuple[np.ndarray, np.ndarray]]:
    s, root = 1.0 / sigma, np.sqrt(n)
    # Tests on S, the sum of the outputs divided by sigma sqrt(n). `low` is Chernoff's upper bound of log Pr[S <= x] if
    # every output is drawn from the mixture.
    spread = np.sqrt(1.0 + q * (1.0 - q) * s * s)
    x = np.where(removing, root * q * s - DEVIATIONS * spread, DEVIATIONS)
    v = np.maximum(root * q * s - x, 0.0) / root
    terms = (0.5 * n * v * v, n * np.log1p(q * np.expm1(-v * s)), v * root * x)
    low = sum(terms) + LOG_ERROR * (1.0 + sum(np.abs(t) for t in terms))
    low = np.minimum(np.where(np.isnan(low), 0.0, low), 0.0)
    of_mixture = np.where(low < -LOG_ERROR, np.log(-np.expm1(np.minimum(low, -LOG_ERROR))) - LOG_ERROR, -np.inf)
    log_p = np.where(removing, of_mixture, np.log(_BELOW) - LOG_ERROR)
    log_q = np.where(removing, _crude_tail(x * (1.0 - LOG_ERROR)), low)
    # Tests on the number of outputs above u sigma. Under the mixture an output is above it with a chance >= q Phi(1).
    u = (s - 1.0) * (1.0 - LOG_ERROR)
    hit, tail = np.log(q) + math.log(_HIT), np.minimum(_crude_tail(u), -math.log(2.0))
    zero = np.zeros_like(u)
    under_p = Chance(hit, np.log1p(-np.exp(hit)), zero + LOG_ERROR, LOG_ERROR * np.exp(hit))
    under_q = Chance(
        tail, np.log1p(-np.exp(tail)), LOG_ERROR * (1.0 - tail), 2.0 * LOG_ERROR * (1.0 - tail) * np.exp(tail)
    )
    expected = n * np.exp(hit)
    fewer = [expected - deviations * np.sqrt(expected) for deviations in (9.0, 6.0, 2.0)]
    k = np.ceil(np.concatenate([*fewer, zero + 1.0], axis=1))
    k = np.clip(np.where(np.isnan(k), 1.0, k), 1.0, n)
    above = log_tail_below(n, k, under_p), log_tail_above(n, k, under_q)
    # Test for add: no output exceeds (s - 4) sigma. Under Q, an output with the record nearly always exceeds that.
    none = n * np.log1p(-np.exp(np.minimum(_crude_tail(s - 4.0), -math.log(2.0)))) * (1.0 + LOG_ERROR)
    never = n * np.log1p(-q * (1.0 - 4e-5)) * (1.0 - LOG_ERROR)
    counts = [np.where(removing, above[0], none), np.where(removing, above[1], np.minimum(never, 0.0))]
    useful = (n > 0) & (s > np.where(removing, 2.0, 8.0))
    counts = [np.where(useful, counts[0], -np.inf), np.where(useful, counts[1], 0.0)]
    present = n > 0
    return [(np.where(present, log_p, -np.inf), np.where(present, log_q, 0.0)), (counts[0], counts[1])]


def _laplace(edge: np.ndarray, q: np.ndarray, n: np.ndarray, removing: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (lower bound of log P(S), upper bound of log Q(S)). S: one given step has its largest Laplace loss."""
    near, far = np.full_like(edge, -math.log(2.0)), -math.log(2.0) - edge
    mixed = log_mixture(np.where(removing, edge, -edge), q) + np.where(removing, far, near)
    log_p, log_q = np.where(removing, mixed, near), np.where(removing, far, mixed)
    error = LOG_ERROR * (1.0 + edge)
    present = n > 0
    return np.where(present, log_p - error, -np.inf)[:, None], np.where(present, log_q + error, 0.0)[:, None]


def _finite(loss: np.ndarray, mass: np.ndarray, n: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return bounds of log P(S | finite loss) and log Q(S). S: one given step has its largest finite loss."""
    top = np.argmax(np.where(mass > 0.0, loss, -np.inf), axis=1)[:, None]
    loss, atom = np.take_along_axis(loss, top, 1), np.take_along_axis(mass, top, 1)
    log_p = np.log(atom) - np.log(np.sum(mass, axis=1, keepdims=True))
    log_q = np.log(atom) - loss
    error = LOG_ERROR * (1.0 + np.abs(log_p))
    present = (n > 0)[:, None]
    return np.where(present, log_p - error, -np.inf), np.where(present, log_q + error + LOG_ERROR * np.abs(loss), 0.0)


class Chance(NamedTuple):
    """The probability p of an event in one step, as log p and log(1 - p), with the error of each logarithm."""

    log_p: np.ndarray
    log_rest: np.ndarray
    error_p: np.ndarray
    error_rest: np.ndarray


def chance(log_p: np.ndarray, log_rest: np.ndarray, error_p: np.ndarray, error_rest: np.ndarray) -> Chance:
    """Return a `Chance`. The larger of p and 1 - p is computed from the smaller one where that reduces its error."""
    log_p, log_rest, error_p, error_rest = np.broadcast_arrays(log_p, log_rest, error_p, error_rest)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        likely = log_p > -np.log(2.0)
        far, error = np.where(likely, log_rest, log_p), np.where(likely, error_rest, error_p)
        odds = np.exp(far + error)
        other = np.log1p(-np.minimum(np.exp(far), 0.75))
        small = 4.0 * np.expm1(np.minimum(error, 700.0)) * odds + 4.0 * ROUNDOFF * np.abs(other) + 1e-307
        small = np.where(odds < 0.75, small, np.inf)
    for_p, for_rest = likely & (small < error_p), ~likely & (small < error_rest)
    logs = np.where(for_p, other, log_p), np.where(for_rest, other, log_rest)
    return Chance(*logs, np.where(for_p, small, error_p), np.where(for_rest, small, error_rest))


def _divergence(n: np.ndarray, k: np.ndarray, hit: Chance) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return D = n kl(k/n, p), `log sqrt(n/(2 pi k (n-k))) - D`, and a bound on each error. README.md defines kl."""
    x = k / n
    with np.errstate(divide="ignore", invalid="ignore"):
        at_hits = np.where(k > 0, k * np.log(np.where(k > 0, x, 1.0)), 0.0)
        at_misses = np.where(k < n, (n - k) * np.log1p(-np.minimum(x, 1.0)), 0.0)
        hits = np.where(k > 0, k * hit.log_p, 0.0)
        misses = np.where(k < n, (n - k) * hit.log_rest, 0.0)
        error = np.where(k > 0, k * hit.error_p, 0.0) + np.where(k < n, (n - k) * hit.error_rest, 0.0)
        size = np.abs(at_hits) + np.abs(at_misses) + np.abs(hits) + np.abs(misses) + k + 1.0
        divergence = (at_hits - hits) + (at_misses - misses)
        log_term = 0.5 * (np.log(n) - np.log(2.0 * np.pi * k) - np.log(np.maximum(n - k, 1.0))) - divergence
    return divergence, log_term, error + 16.0 * ROUNDOFF * size


def log_tail_above(n: np.ndarray, k: np.ndarray, hit: Chance) -> np.ndarray:
    """Return an upper bound of log Pr[N >= k] for an integer k >= 1. N is the number of hits in n independent steps."""
    divergence, log_term, error = _divergence(n, k, hit)
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        most = hit.log_p + hit.error_p
        chernoff = np.where(k >= n * np.exp(most) * (1.0 + 1e-12), np.minimum(error - divergence, 0.0), 0.0)
        log_ratio = np.log(np.maximum(n - k, 0.0)) - np.log(k + 1.0) + most - (hit.log_rest - hit.error_rest)
        ratio = np.exp(log_ratio) * (1.0 + 1e-12)
        term = log_term + error
        term = np.where(k >= n, n * most * (1.0 - 4.0 * ROUNDOFF), term)
        tail = np.where(ratio < 1.0, term - np.log1p(-np.minimum(ratio, 1.0 - ROUNDOFF)) + 1e-12, 0.0)
        union = np.minimum(np.log(n) + most + 1e-12, 0.0)
    return np.fmin(np.fmin(np.fmin(chernoff, tail), union), 0.0)


def log_tail_below(n: np.ndarray, k: np.ndarray, hit: Chance) -> np.ndarray:
    """Return a lower bound of log Pr[N >= k]: from the tail's first terms, or from an upper bound of Pr[N < k]."""
    _, log_term, error = _divergence(n, k, hit)
    fewer, _, off = _divergence(n, k - 1.0, hit)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        rest = n - k
        correction = 1.0 / (12.0 * k) + 1.0 / (12.0 * np.maximum(rest, 1.0))
        term = log_term - error - correction
        last = n * (hit.log_p - hit.error_p) * (1.0 + 4.0 * ROUNDOFF)
        term = np.where(rest > 0, term, np.where(k == n, last, -np.inf))
        odds = np.exp(np.minimum(hit.log_p - hit.log_rest - hit.error_p - hit.error_rest, 700.0)) * (1.0 - 1e-12)
        total = factor = np.ones_like(term)
        # add the next 16 terms of the tail, which are nearly all of it if the mean of N is small
        for j in range(16):
            factor = factor * np.maximum(rest - j, 0.0) / (k + j + 1.0) * odds * (1.0 - 1e-14)
            total = total + np.where(np.isfinite(factor), factor, 0.0)
        terms = np.minimum(term + np.log(total) - 1e-12, 0.0)
        # `below` is an upper bound of log Pr[N < k]: Chernoff's bound if k - 1 is at most the mean of N, else 0.
        least = n * np.exp(hit.log_p - hit.error_p) * (1.0 - 1e-12)
        below = np.where(k - 1.0 <= least, np.minimum(off - fewer, 0.0), 0.0)
        none = n * np.minimum(hit.log_rest + hit.error_rest, 0.0) * (1.0 - 4.0 * ROUNDOFF)
        below = np.fmin(np.where(k <= 1.0, none, below), 0.0)
        left = np.log1p(-np.exp(np.minimum(below + 1e-12, 0.0))) - 1e-307
    return np.where(k > n, -np.inf, np.fmax(np.where(np.isnan(terms), -np.inf, terms), left))
