"""Bounds without an engine: lower bounds by tests on the outputs, upper bounds by theorems (README.md, "Theorems").

They answer where no engine does. They check the contour and the lattice engine, which do not use this code.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from scipy.special import log_ndtr

from jaxacct.core.floats import ROUNDOFF
from jaxacct.engines import closed_form
from jaxacct.engines.quick_bounds import (
    Chance,
    chance,
    largest_loss,
    log_tail_above,
    log_tail_below,
    total_variation,
)
from jaxacct.mechanisms.loss_components import Components

LEAST_DELTA = 1e-307
"""The closed form of a Gaussian's epsilon is used only for larger deltas. For others the upper bound is inf."""
QUANTILES = np.array([-8.0, -4.0, -2.0, -1.0, 0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0, 12.0, 20.0, 36.0])
"""Thresholds of the tests on single outputs: distances, in standard deviations, from the modes 0 and 1/sigma."""
DEVIATIONS = np.array([1e4, 100.0, 8.0, 4.0, 2.5, 1.5, 0.7, 0.0, -1.0, -2.0, -3.0, -4.0, -5.0, -6.0, -7.0, -9.0, -12.0])
"""Thresholds of counts and sums: distances from the mean under P towards the mean under Q, in standard deviations."""
TAIL_NATS = np.array([2.0, 5.0, 10.0, 20.0, 40.0, 80.0, 200.0, 600.0])
"""For each x, tests on counts try a threshold that the count exceeds with a probability of about e^-x."""
LOG_ERROR = 1e-12
"""Absolute rounding error that is allowed for the logarithm of a probability."""
EXP_ERROR = 1024.0 * ROUNDOFF
"""Bound of the relative error of e^x, if |x| < 745, e^x > SUBNORMAL, and x has a relative error of at most ROUNDOFF."""
SUBNORMAL = 1e-307
"""Upper bound of the rounding error of numbers below float64's normal range."""


def tests_of(parts: Components) -> Tests:
    """Return all tests of every row of the batch. Equal rows, such as one mechanism at many eps, are computed once."""
    table = np.concatenate([x.reshape(len(parts.sign), -1) for x in parts], axis=1)
    places: dict[bytes, int] = {}
    back = np.array([places.setdefault(row.tobytes(), len(places)) for row in table], np.intp)
    parts = parts.take(np.unique(back, return_index=True)[1])
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        found = [plain(parts)]
        for gaussian in _gaussians(parts):
            found += [gaussian_counts(parts, *gaussian), gaussian_means(parts, *gaussian)]
        for column in range(parts.laplace_n.shape[1]):
            found.append(laplace_counts(parts, column))
        for column in range(parts.finite_n.shape[1]):
            found.append(finite_counts(parts, column))
    log_p, log_q = (np.concatenate(columns, axis=1) for columns in zip(*found, strict=True))
    log_p = log_p + _log_survival(parts)[:, None]
    known = np.isfinite(log_p) & (log_p <= 0.0) & ~np.isnan(log_q)
    return Tests(np.where(known, log_p, -np.inf)[back], np.where(known, np.minimum(log_q, 0.0), 0.0)[back])


def best_epsilon(tests: Tests, delta: np.ndarray) -> np.ndarray:
    """Return (B,) the largest of the tests' lower bounds of epsilon, >= 0. `delta` leaves out the mass at infinity."""
    left = np.exp(tests.log_p) * (1.0 - EXP_ERROR) - delta[:, None] * (1.0 + 4.0 * ROUNDOFF) - SUBNORMAL
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        gain = np.log(left) - tests.log_q
        gain -= 16.0 * ROUNDOFF * (np.abs(tests.log_q) + np.abs(np.log(left)) + 1.0)
    return np.max(np.where((left > 0.0) & ~np.isnan(gain), gain, 0.0), axis=1, initial=0.0)


def best_delta(tests: Tests, epsilon: np.ndarray) -> np.ndarray:
    """Return (B,) the largest of the tests' lower bounds of delta at eps, at least 0."""
    p = np.exp(tests.log_p) * (1.0 - EXP_ERROR)
    with np.errstate(over="ignore", invalid="ignore"):
        cost = epsilon[:, None] + tests.log_q
        cost = np.exp(cost + 16.0 * ROUNDOFF * (np.abs(cost) + np.abs(tests.log_q)) + ROUNDOFF) * (1.0 + EXP_ERROR)
        left = p - cost
    left = np.where(np.isnan(left), 0.0, left)
    return np.max(left - 4.0 * ROUNDOFF * p - SUBNORMAL, axis=1, initial=0.0)


def rare_step_epsilon(parts: Components, delta: np.ndarray) -> np.ndarray:
    """Return (B,) a lower bound of epsilon: the best by tests on one step, or on all n steps, of a sampled Gaussian."""
    best, removing = np.zeros(delta.size), parts.sign > 0
    delta = delta * np.exp(-_log_survival(parts)) * (1.0 + EXP_ERROR)
    known = delta < 1.0
    delta = np.where(known, delta, 0.5)
    for sigma, q, n in _gaussians(parts):
        present = known & (n > 0)
        several = present & removing & (n > 1)
        # epsilon of one step at delta and at (1 + m) delta/n: m makes up for the term that `_any_step` subtracts
        margins = np.array([1.0 + m for m in (1e-9, 1e-6, 1e-3, 0.1, 1.0, 10.0)] if several.any() else [])[:, None]
        share = delta / np.maximum(n, 1.0) * margins
        # A delta below 1e-306 is near the end of float64's range and has no relative accuracy, so it is not used.
        usable = several & (share > 1e-306) & (share < 1.0)
        targets = np.concatenate([delta[None], np.where(usable, share, 0.5)])
        sigmas, rates, directions = (np.tile(x, len(targets)) for x in (sigma, q, removing))
        slack = np.full(targets.size, 8.0 * ROUNDOFF)
        steps = closed_form.epsilon_of_one_step(sigmas, rates, directions, targets.ravel(), slack)
        found = steps.lower.reshape(targets.shape)
        best = np.fmax(best, np.where(present, found[0], 0.0))
        for eps, fits in zip(found[1:], usable, strict=True):
            holds = _any_step(sigma, q, n, removing, eps) >= delta
            best = np.fmax(best, np.where(fits & holds, eps, 0.0))
    return best


def rare_step_delta(parts: Components, epsilon: np.ndarray) -> np.ndarray:
    """Return (B,) a lower bound of delta: the best by tests on one step, or on all n steps, of a sampled Gaussian."""
    best, removing = np.zeros(epsilon.size), parts.sign > 0
    for sigma, q, n in _gaussians(parts):
        found = closed_form.delta_of_one_step(sigma, q, removing, epsilon).lower
        found = np.fmax(found, _any_step(sigma, q, n, removing, epsilon))
        best = np.fmax(best, np.where(n > 0, found, 0.0))
    return best * np.exp(_log_survival(parts)) * (1.0 - EXP_ERROR)


def _any_step(sigma: np.ndarray, q: np.ndarray, n: np.ndarray, removing: np.ndarray, eps: np.ndarray) -> np.ndarray:
    """Return a lower bound of delta by "any step" (README.md): n (delta_1(eps) - (n - 1) p d) for remove, 0 for add."""
    single = closed_form.delta_of_one_step(sigma, q, removing, eps).lower
    with np.errstate(all="ignore"):
        s = 1.0 / sigma
        large = eps - np.log(q) + np.log1p(-(1.0 - q) * np.exp(-eps))  # log(1 + (e^eps - 1)/q), also for a large eps
        odds = np.where(eps > 1.0, large, np.log1p(np.expm1(np.minimum(eps, 1.0)) / q))
        u = (odds * sigma + 0.5 * s) * (1.0 - 64.0 * ROUNDOFF)
        # u is rounded down and the tails are rounded up, so that `p` and `d` are upper bounds
        (far, wrong), (near, off) = log_tail(u, 0.0 * s), log_tail(u, s)
        d = np.exp(np.log(q) + near + off) * (1.0 + EXP_ERROR)
        p = (np.exp(far + wrong) + d) * (1.0 + EXP_ERROR)
        value = n * (single - (n - 1.0) * p * d) * (1.0 - 8.0 * ROUNDOFF) - SUBNORMAL
    return np.where(removing & (value > 0.0), np.minimum(value, 1.0), 0.0)


def _log_survival(parts: Components) -> np.ndarray:
    """Return (B,) the log of the probability that every loss is finite, rounded down; 0 where all losses are finite."""
    atoms = parts.finite_mass.shape[2]
    left = np.sum(parts.finite_mass, axis=2)
    # `wrong` bounds the error of the mass at infinity, which is 1 - `left` up to the error 2 * `atoms` * ROUNDOFF
    wrong = parts.infinity_units[:, None] * ROUNDOFF * (np.maximum(1.0 - left, 0.0) + 2.0 * atoms * ROUNDOFF)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        each = np.where(parts.finite_n > 0, parts.finite_n * wrong / left, 0.0)
        lowest = parts.log_survival * (1.0 + 16.0 * ROUNDOFF) - 2.0 * np.sum(each, axis=1)
    return np.where(parts.log_survival < 0.0, np.where(np.isnan(lowest), -np.inf, lowest), 0.0)


def _gaussians(parts: Components) -> Iterable[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Return (sigma, q, n) of each sampled Gaussian, (B,) each."""
    return zip(parts.gauss_sigma.T, parts.gauss_q.T, parts.gauss_n.T, strict=True)


class Tests(NamedTuple):
    """Bounds for M tests of each row. A test is an event S that is likelier under P than under Q."""

    log_p: np.ndarray  # (B, M) lower bounds of log P(S); -inf where there is no test
    log_q: np.ndarray  # (B, M) upper bounds of log Q(S); 0 where there is no test


def log_tail(u: np.ndarray, mean: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return log Pr[N(mean, 1) > u], and a bound of its error."""
    x = mean - u
    value = log_ndtr(x)
    size = np.square(np.minimum(x, 0.0)) + (1.0 + np.minimum(np.abs(x), -np.minimum(x, -40.0))) * np.abs(mean)
    return value, ROUNDOFF * (64.0 + 8.0 * size) + 1e-13 * np.abs(value)


def plain(parts: Components) -> Tests:
    """Return tests on the sum of all Gaussians that are not sampled."""
    mu = parts.mu[:, None]
    z = np.concatenate([QUANTILES, -QUANTILES])[None, :]
    log_p = np.where(mu > 0.0, log_ndtr(-z) - LOG_ERROR, -np.inf)
    log_q, error = log_tail(z, -mu)
    return Tests(log_p, np.where(mu > 0.0, np.minimum(log_q + error, 0.0), 0.0))


def _counts(n: np.ndarray, under_p: Chance, under_q: Chance) -> Tests:
    """Return the tests "event c occurs in at least k of n steps" for several k. The chances of C events are (B, C)."""
    n = n[:, None, None]
    under_p, under_q = (Chance(*(x[:, :, None] for x in hit)) for hit in (under_p, under_q))
    expected = n * np.exp(under_p.log_p)
    k = np.ceil(expected - DEVIATIONS * np.sqrt(expected * np.exp(under_p.log_rest)))
    # if the event is rare, the thresholds above miss the count's tail: add `few`, rough quantiles of a Poisson law
    few = np.ceil(TAIL_NATS / np.maximum(1.0 - np.log(expected), 1.0))
    k = np.concatenate([k, few, np.ones_like(expected), np.broadcast_to(n, expected.shape)], axis=2)
    k = np.clip(np.where(np.isnan(k), 1.0, k), 1.0, n)
    low, high = (
        tail.reshape(n.shape[0], -1) for tail in (log_tail_below(n, k, under_p), log_tail_above(n, k, under_q))
    )
    present = n[:, 0] > 0
    return Tests(np.where(present, low, -np.inf), np.where(present, high, 0.0))


def gaussian_counts(parts: Components, sigma: np.ndarray, q: np.ndarray, n: np.ndarray) -> Tests:
    """Return tests on how many of a sampled Gaussian's n outputs lie beyond a threshold, for several thresholds."""
    s, rate = 1.0 / sigma[:, None], q[:, None]
    u = np.concatenate([np.broadcast_to(QUANTILES, (n.size, QUANTILES.size)), s - QUANTILES], axis=1)
    hit, miss = np.log(rate), np.log1p(-rate)

    def mixture(side: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        (zero, error), (one, wrong) = log_tail(side * u, 0.0 * s), log_tail(side * u, side * s)
        value = np.logaddexp(miss + zero, hit + one)
        most = np.logaddexp(miss + zero + error, hit + one + wrong)
        return value, most - value + 8.0 * ROUNDOFF * (1.0 - hit - miss + np.abs(value))

    def normal(side: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return log_tail(side * u, 0.0 * s)

    # remove: P is the mixture, so large outputs are likelier under P. add: Q is the mixture, so small ones are.
    removing = parts.sign[:, None] > 0
    side = np.where(removing, 1.0, -1.0)
    tails = ((law(side), law(-side)) for law in (mixture, normal))
    of_mixture, of_pure = (chance(p, rest, error, off) for (p, error), (rest, off) in tails)
    under_p, under_q = (
        Chance(*(np.where(removing, *pair) for pair in zip(*order, strict=True)))
        for order in ((of_mixture, of_pure), (of_pure, of_mixture))
    )
    return _counts(n, under_p, under_q)


def gaussian_means(parts: Components, sigma: np.ndarray, q: np.ndarray, n: np.ndarray) -> Tests:
    """Return tests on the sum of a sampled Gaussian's n outputs, in units of its noise's standard deviation."""
    sigma, q, n = (x[:, None] for x in (sigma, q, n))
    s, root = 1.0 / sigma, np.sqrt(n)
    removing = parts.sign[:, None] > 0
    drift = root * q * s
    spread = np.sqrt(1.0 + q * (1.0 - q) * s * s)
    x = np.where(removing, drift - DEVIATIONS * spread, DEVIATIONS)
    low = _log_mixture_below(n, q, s, x)  # upper bound of log Pr[sum <= x] under the mixture
    (below, wrong_below), (above, wrong_above) = log_tail(-x, 0.0 * x), log_tail(x, 0.0 * x)
    p = np.where(removing, np.log1p(-np.exp(np.minimum(low, -1e-300))), below - wrong_below) - LOG_ERROR
    other = np.where(removing, above + wrong_above, low)
    present = n > 0
    return Tests(np.where(present, p, -np.inf), np.where(present, other, 0.0))


def _log_mixture_below(n: np.ndarray, q: np.ndarray, s: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Return an upper bound of log Pr[sum of n mixture outputs <= x sqrt n]: the least of several Chernoff bounds."""
    root = np.sqrt(n)
    drift = root * q * s
    gap = np.maximum(drift - x, 0.0)
    best = np.zeros(np.broadcast_shapes(gap.shape, s.shape))
    for share in (0.1, 0.3, 0.6, 0.8, 0.9, 1.0, 1.1):  # fractions of the exponent that is best if the sum is normal
        v = share * gap / root
        shrink = -np.expm1(-v * s)
        terms = (0.5 * n * v * v, n * np.log1p(-q * shrink), v * root * x)
        value = terms[0] + terms[1] + terms[2]
        value += 32.0 * ROUNDOFF * (sum(np.abs(t) for t in terms) + 1.0)
        best = np.where(np.isfinite(value), np.minimum(best, value), best)
    return best


def laplace_counts(parts: Components, column: int) -> Tests:
    """Return tests on the number of steps whose loss without sampling is at least v, for several v."""
    scale, q, n = (x[:, column] for x in (parts.laplace_scale, parts.laplace_q, parts.laplace_n))
    edge, rate = 1.0 / scale[:, None], q[:, None]
    removing = parts.sign[:, None] > 0
    # v = edge - drop, where 0 <= drop < 2 edge
    drop = np.minimum([0.0, 1e-3, 1e-2, 0.1, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0], 1.999 * edge)
    # log Pr[loss >= v] without sampling under P (`near`) and under Q (`far`); the `_rest` of each is log Pr[loss < v]
    near = np.log1p(-0.5 * np.exp(-0.5 * drop))
    near_rest = -np.log(2.0) - 0.5 * drop
    far = -np.log(2.0) - edge + 0.5 * drop
    far_rest = np.log1p(-np.exp(far))
    hit = np.log(rate)
    miss = np.log1p(-np.where(rate < 1.0, rate, 0.0))
    miss = np.where(rate < 1.0, miss, -np.inf)

    def mix(unhit: np.ndarray, struck: np.ndarray) -> np.ndarray:
        return np.logaddexp(miss + unhit, hit + struck)

    p, p_rest = np.where(removing, mix(far, near), near), np.where(removing, mix(far_rest, near_rest), near_rest)
    other = np.where(removing, far, mix(near, far))
    other_rest = np.where(removing, far_rest, mix(near_rest, far_rest))
    error = 64.0 * ROUNDOFF * (1.0 + edge - hit) + 0.0 * p
    return _counts(n, chance(p, p_rest, error, error), chance(other, other_rest, error, error))


def finite_counts(parts: Components, column: int) -> Tests:
    """Return tests on the number of steps with loss >= v, v being an atom's loss. P is conditioned on finite losses."""
    loss, mass, n = parts.finite_loss[:, column], parts.finite_mass[:, column], parts.finite_n[:, column]
    order = np.argsort(np.where(mass > 0.0, -loss, np.inf), axis=1)
    loss, mass = np.take_along_axis(loss, order, 1), np.take_along_axis(mass, order, 1)
    p = np.cumsum(mass, axis=1)
    p = np.log(p / p[:, -1:])
    q_terms = np.where(mass > 0.0, np.log(mass) - loss, -np.inf)
    other = np.logaddexp.accumulate(q_terms, axis=1)
    take = np.unique(np.linspace(0, loss.shape[1] - 1, min(loss.shape[1], 24)).astype(int))
    p, other, loss = p[:, take], other[:, take], np.abs(loss[:, take])
    error = LOG_ERROR + 8.0 * ROUNDOFF * (mass.shape[1] + np.abs(p))
    error_q = error + 8.0 * ROUNDOFF * (loss + np.where(np.isfinite(other), np.abs(other), 0.0))
    p, other = np.minimum(p, 0.0), np.minimum(other, 0.0)
    p_rest, other_rest = (np.log1p(-np.exp(np.minimum(x, -1e-18))) for x in (p, other))
    # `spread`, `spread_q`: error bounds of log Pr[loss < v]. Pr[loss < v] is off by as much as Pr[loss >= v].
    spread, spread_q = (
        _grown(x * (1.0 + np.exp(-rest))) for x, rest in ((error, p_rest), (error_q * np.exp(other), other_rest))
    )
    return _counts(n, chance(p, p_rest, error, spread), chance(other, other_rest, error_q, spread_q))


def _grown(x: np.ndarray) -> np.ndarray:
    """Return an upper bound of -log(1 - x), the error of log y if y has the relative error x; inf if x >= 1/4."""
    return np.where(x < 0.25, 1.2 * x, np.inf)


def _bounded(parts: Components) -> np.ndarray:
    """Return an upper bound of the composition's loss, or inf if the loss is unbounded."""
    gauss = parts.gauss_n > 0
    with np.errstate(divide="ignore"):
        sampled = -np.sum(np.where(gauss, parts.gauss_n * np.log1p(-parts.gauss_q), 0.0), axis=1)
    open_above = (parts.mu > 0) | (np.any(gauss, axis=1) & (parts.sign > 0))
    return np.where(open_above, np.inf, (largest_loss(parts).above + sampled) * (1.0 + 256.0 * ROUNDOFF))


def _all_gaussians(parts: Components) -> np.ndarray:
    """Return mu of the composition of all Gaussians, rounded up. Sampled Gaussians are taken without their sampling."""
    with np.errstate(over="ignore"):
        each = np.where(parts.gauss_n > 0, np.sqrt(parts.gauss_n) / parts.gauss_sigma, 0.0)
    return functools.reduce(np.hypot, each.T, parts.mu) * (1.0 + (8.0 + 4.0 * each.shape[1]) * ROUNDOFF)


def _hits(parts: Components, log_share: np.ndarray) -> np.ndarray:
    """Return mu of all Gaussians, rounded up, if each sampled Gaussian samples the record at most k times.

    Each sampled Gaussian has its own k. The chance that any of them exceeds its k is at most e^log_share.
    """
    columns = parts.gauss_n.shape[1]
    present = np.maximum(np.sum(parts.gauss_n > 0, axis=1), 1)
    each = log_share - np.log(present)
    mu = parts.mu
    for sigma, q, n in _gaussians(parts):
        present_here = n > 0
        n = np.where(present_here, n, 1.0)
        error = 4.0 * ROUNDOFF * (1.0 + np.abs(np.log(q)))
        hit = chance(np.log(q), np.log1p(-q), error, error)
        low, high = np.zeros_like(n), n.copy()  # the bisection for k ends with k = `high`; k = n is always large enough
        for _ in range(60):  # 60 halvings suffice, since n has fewer than 60 binary digits
            middle = np.floor(0.5 * (low + high))
            enough = (middle < high) & (log_tail_above(n, middle + 1.0, hit) <= each)
            before = low, high
            high, low = np.where(enough, middle, high), np.where(enough, low, np.minimum(middle + 1.0, high))
            if np.array_equal(before, (low, high)):
                break
        with np.errstate(over="ignore"):
            mu = np.hypot(mu, np.where(present_here, np.sqrt(high) / sigma, 0.0))
    return mu * (1.0 + (8.0 + 4.0 * columns) * ROUNDOFF)


def _only_sampled(parts: Components) -> np.ndarray:
    others = np.any(parts.laplace_n > 0, axis=1) | np.any(parts.finite_n > 0, axis=1)
    return np.any(parts.gauss_n > 0, axis=1) & (parts.mu == 0.0) & ~others


def _basic_epsilon(parts: Components, delta: np.ndarray) -> np.ndarray:
    """Return the epsilon of basic composition, rounded up; inf where basic composition does not apply."""
    total, most = np.zeros(delta.size), np.sum(parts.gauss_n, axis=1)
    each = delta / most * (1.0 - (8.0 + parts.gauss_n.shape[1]) * ROUNDOFF)
    # A delta below 1e-306 is near the end of float64's range and has no relative accuracy, so it is not used.
    usable = _only_sampled(parts) & (each > 1e-306) & (each < 1.0)
    each = np.where(usable, each, 0.5)
    for sigma, q, n in _gaussians(parts):
        law = np.where(n > 0, sigma, 1.0), np.where(n > 0, q, 0.5), parts.sign > 0
        step = closed_form.epsilon_of_one_step(*law, each, np.full(delta.size, 8.0 * ROUNDOFF)).upper
        total += np.where(n > 0, n * step, 0.0)
    return np.where(usable, total * (1.0 + (8.0 + 4.0 * parts.gauss_n.shape[1]) * ROUNDOFF), np.inf)


def _basic_delta(parts: Components, epsilon: np.ndarray) -> np.ndarray:
    """Return the delta of basic composition, rounded up; 1 where basic composition does not apply."""
    total, most = np.zeros(epsilon.size), np.sum(parts.gauss_n, axis=1)
    usable = _only_sampled(parts) & (epsilon >= 0.0)
    each = np.where(usable, epsilon / most * (1.0 - (8.0 + parts.gauss_n.shape[1]) * ROUNDOFF), 0.0)
    for sigma, q, n in _gaussians(parts):
        law = np.where(n > 0, sigma, 1.0), np.where(n > 0, q, 0.5), parts.sign > 0
        total += np.where(n > 0, n * closed_form.delta_of_one_step(*law, each).upper, 0.0)
    return np.where(usable, np.fmin(total * (1.0 + (8.0 + 4.0 * parts.gauss_n.shape[1]) * ROUNDOFF), 1.0), 1.0)


def least_epsilon(parts: Components, delta: np.ndarray, slack: np.ndarray) -> np.ndarray:
    """Return (B,) an upper bound of epsilon. `delta`, without the mass at infinity, has the relative error `slack`."""
    safe = delta * (1.0 - slack) * (1.0 - 4.0 * ROUNDOFF)
    bounded = largest_loss(parts).above
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        best = np.fmin(_bounded(parts), _with(bounded, _upper_epsilon(_all_gaussians(parts), safe)))
        if np.any(parts.gauss_n > 0):
            best = np.fmin(best, _basic_epsilon(parts, safe))
            for share in (0.5, 0.9, 0.999, 1e-3):  # share of delta for the chance of more than k hits (see `_hits`)
                mu = _hits(parts, np.log(safe) + np.log(share) - 1e-12)
                best = np.fmin(best, _with(bounded, _upper_epsilon(mu, safe * (1.0 - share) * (1.0 - 4.0 * ROUNDOFF))))
        return np.where(total_variation(parts) <= safe, 0.0, np.where(np.isnan(best), np.inf, best))


def _upper_epsilon(mu: np.ndarray, delta: np.ndarray) -> np.ndarray:
    """Return an upper bound of the epsilon at delta of mu-Gaussian DP; 0 where mu is 0."""
    present = mu > 0
    upper = closed_form.epsilon(np.where(present, mu, 1.0), np.maximum(delta, LEAST_DELTA), np.zeros_like(mu)).upper
    return np.where(present, np.where(delta > LEAST_DELTA, upper, np.inf), 0.0)


def _with(bounded: np.ndarray, epsilon: np.ndarray) -> np.ndarray:
    return (bounded + epsilon) * (1.0 + 4.0 * ROUNDOFF)


def least_delta(parts: Components, epsilon: np.ndarray) -> np.ndarray:
    """Return (B,) the smallest of several upper bounds of delta at eps. Delta leaves out the mass at infinity."""
    left = epsilon - largest_loss(parts).above
    left = left - 4.0 * ROUNDOFF * np.abs(epsilon)
    best = np.fmin(total_variation(parts), 1.0)
    best = np.fmin(best, _upper_delta(_all_gaussians(parts), left))
    if np.any(parts.gauss_n > 0):
        best = np.fmin(best, _basic_delta(parts, left))
        for log_share in (-690.0, -400.0, -200.0, -100.0, -60.0, -40.0, -25.0, -15.0, -10.0, -6.0, -3.0):
            mu = _hits(parts, np.full(left.shape, log_share))
            best = np.fmin(best, (_upper_delta(mu, left) + np.exp(log_share)) * (1.0 + 1e-12))
    return np.where(epsilon > _bounded(parts), 0.0, best)


def _upper_delta(mu: np.ndarray, epsilon: np.ndarray) -> np.ndarray:
    """Return an upper bound of the delta at eps of mu-Gaussian DP; 1 where eps is negative."""
    present = (mu > 0) & np.isfinite(mu)
    at = np.maximum(epsilon, 0.0)
    upper = closed_form.delta(np.where(present, mu, 1.0), at).upper
    upper = np.where(present, upper, np.where(mu > 0, 1.0, 0.0))
    return np.where(epsilon >= 0.0, upper, 1.0)
