"""Lower bounds from tests: whoever sees the outputs can run any test on them, so delta is at least what a test shows.

A set S of outputs has `P(S) <= e^eps Q(S) + delta`, so every test with known masses gives

    delta(eps) >= P(S) - e^eps Q(S),        eps >= log((P(S) - delta)/Q(S)).

Each part of a composition is tested by itself; the outputs of the others are ignored:

* *one step*: of a sampled Gaussian, in closed form, which is the best of all tests on it;
* *any step*: is some output of the n beyond the threshold of that best test, which accepts with probability p under P
  and p - d under Q?  `1 - (1-p)^n - e^eps (1 - (1-p+d)^n) >= n (d (1-p)^{n-1} - (e^eps - 1)(p - d))`, by the mean
  value theorem and Bernoulli, so that `delta_n(eps) >= n (delta_1(eps) - (n-1) p d)`;
* *counts*: in how many of its n steps does the output lie beyond a threshold (on the side where P is likelier)?  At
  least k times, for several k; the tails are those of a binomial law, bounded in `quick_bounds`;
* *means*, for Gaussians with many steps: is the sum of the n outputs beyond a threshold?  Under the law without hits it
  is normal; under the mixture both tails are bounded by Chernoff, `E e^{v x} = e^{v^2/2} (1 - q + q e^{v s})`.

What is bounded is the finite part of delta: P is the law given that every loss is finite, times the probability of
that, in the part that is tested and in all the others.

Everything is in logarithms, so that masses as small as e^{-10^300} do no harm.  The contour and the lattice engine,
which are checked against these bounds, share no code with them.
"""

from __future__ import annotations

import numpy as np

from jaxacct.core.floats import ROUNDOFF
from jaxacct.engines import closed_form
from jaxacct.engines.threshold_masses import (
    Tests,
    finite_counts,
    gaussian_counts,
    gaussian_means,
    laplace_counts,
    log_tail,
    plain,
)
from jaxacct.mechanisms.loss_components import Components

__all__ = ["Tests", "best_delta", "best_epsilon", "rare_step_delta", "rare_step_epsilon", "tests_of"]

SHARE_MARGINS = (1e-9, 1e-6, 1e-3, 0.1, 1.0, 10.0)
"""By how much more than its share of delta one of many steps is given, for what p d takes; the best bound counts."""
EXP_ERROR = 1024.0 * ROUNDOFF
"""What e^x may be off by, relatively, where it is above SUBNORMAL: its argument is below 745 and known to a unit."""
SUBNORMAL = 1e-307
"""More than rounding can take from what is below the normal numbers."""
LEAST_SHARE = 1e-306
"""Least delta of a step: one nearer to the end of float64's range has no relative accuracy."""


def tests_of(parts: Components) -> Tests:
    """All tests of every row of the batch."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        found = [plain(parts)]
        for column in range(parts.gauss_n.shape[1]):
            found += [gaussian_counts(parts, column), gaussian_means(parts, column)]
        for column in range(parts.laplace_n.shape[1]):
            found.append(laplace_counts(parts, column))
        for column in range(parts.finite_n.shape[1]):
            found.append(finite_counts(parts, column))
    log_p, log_q = (np.concatenate(columns, axis=1) for columns in zip(*found, strict=True))
    log_p = log_p + _log_survival(parts)[:, None]
    known = np.isfinite(log_p) & (log_p <= 0.0) & ~np.isnan(log_q)
    return Tests(np.where(known, log_p, -np.inf), np.where(known, np.minimum(log_q, 0.0), 0.0))


def best_epsilon(tests: Tests, delta: np.ndarray) -> np.ndarray:
    """(B,) the largest of the lower bounds of epsilon at the finite part's delta, at least 0."""
    left = np.exp(tests.log_p) * (1.0 - EXP_ERROR) - delta[:, None] * (1.0 + 4.0 * ROUNDOFF) - SUBNORMAL
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        gain = np.log(left) - tests.log_q
        gain -= 16.0 * ROUNDOFF * (np.abs(tests.log_q) + np.abs(np.log(left)) + 1.0)
    return np.max(np.where((left > 0.0) & ~np.isnan(gain), gain, 0.0), axis=1, initial=0.0)


def best_delta(tests: Tests, epsilon: np.ndarray) -> np.ndarray:
    """(B,) the largest of the lower bounds of delta at eps, at least 0."""
    p = np.exp(tests.log_p) * (1.0 - EXP_ERROR)
    with np.errstate(over="ignore", invalid="ignore"):
        cost = epsilon[:, None] + tests.log_q
        cost = np.exp(cost + 16.0 * ROUNDOFF * (np.abs(cost) + np.abs(tests.log_q)) + ROUNDOFF) * (1.0 + EXP_ERROR)
        left = p - cost
    left = np.where(np.isnan(left), 0.0, left)
    return np.max(left - 4.0 * ROUNDOFF * p - SUBNORMAL, axis=1, initial=0.0)


def rare_step_epsilon(parts: Components, delta: np.ndarray) -> np.ndarray:
    """(B,) the largest epsilon by a single step of a sampled Gaussian, or by any one of its steps, from below."""
    best, removing = np.zeros(delta.size), parts.sign > 0
    delta = delta * np.exp(-_log_survival(parts)) * (1.0 + EXP_ERROR)
    known = delta < 1.0
    delta = np.where(known, delta, 0.5)
    slack = np.full(delta.size, 8.0 * ROUNDOFF)
    for column in range(parts.gauss_n.shape[1]):
        sigma, q, n = (x[:, column] for x in (parts.gauss_sigma, parts.gauss_q, parts.gauss_n))
        present = known & (n > 0)
        found = closed_form.epsilon_of_one_step(sigma, q, removing, delta, slack).lower
        best = np.fmax(best, np.where(present, found, 0.0))
        several = present & removing & (n > 1)
        if not several.any():
            continue
        for more in SHARE_MARGINS:
            share = delta / np.maximum(n, 1.0) * (1.0 + more)
            usable = several & (share > LEAST_SHARE) & (share < 1.0)
            found = closed_form.epsilon_of_one_step(sigma, q, removing, np.where(usable, share, 0.5), slack).lower
            holds = _any_step(sigma, q, n, removing, found) >= delta
            best = np.fmax(best, np.where(usable & holds, found, 0.0))
    return best


def rare_step_delta(parts: Components, epsilon: np.ndarray) -> np.ndarray:
    """(B,) the largest delta by a single step of a sampled Gaussian, or by any one of its steps, from below."""
    best, removing = np.zeros(epsilon.size), parts.sign > 0
    for column in range(parts.gauss_n.shape[1]):
        sigma, q, n = (x[:, column] for x in (parts.gauss_sigma, parts.gauss_q, parts.gauss_n))
        found = closed_form.delta_of_one_step(sigma, q, removing, epsilon).lower
        found = np.fmax(found, _any_step(sigma, q, n, removing, epsilon))
        best = np.fmax(best, np.where(n > 0, found, 0.0))
    return best * np.exp(_log_survival(parts)) * (1.0 - EXP_ERROR)


def _any_step(sigma: np.ndarray, q: np.ndarray, n: np.ndarray, removing: np.ndarray, eps: np.ndarray) -> np.ndarray:
    """`n (delta_1(eps) - (n - 1) p d)`, rounded down, when a record is removed; 0 where that says nothing."""
    single = closed_form.delta_of_one_step(sigma, q, removing, eps).lower
    with np.errstate(all="ignore"):
        s = 1.0 / sigma
        odds = np.where(eps > 1.0, eps - np.log(q), np.log1p(np.expm1(np.minimum(eps, 1.0)) / q))
        u = (odds * sigma + 0.5 * s) * (1.0 - 64.0 * ROUNDOFF)
        # u rounded down and the tails rounded up: p and d are those of the best test or larger
        (far, wrong), (near, off) = log_tail(u, 0.0 * s), log_tail(u, s)
        d = np.exp(np.log(q) + near + off) * (1.0 + EXP_ERROR)
        p = (np.exp(far + wrong) + d) * (1.0 + EXP_ERROR)
        value = n * (single - (n - 1.0) * p * d) * (1.0 - 8.0 * ROUNDOFF) - SUBNORMAL
    return np.where(removing & (value > 0.0), np.minimum(value, 1.0), 0.0)


def _log_survival(parts: Components) -> np.ndarray:
    """(B,) log of the probability that every loss is finite, rounded down; 0 where all losses are."""
    atoms = parts.finite_mass.shape[2]
    left = np.sum(parts.finite_mass, axis=2)
    # 1 less the mass at infinity, of which that is known to its units, and the sum to as many as there are atoms
    wrong = parts.infinity_units[:, None] * ROUNDOFF * (np.maximum(1.0 - left, 0.0) + 2.0 * atoms * ROUNDOFF)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        each = np.where(parts.finite_n > 0, parts.finite_n * wrong / left, 0.0)
        lowest = parts.log_survival * (1.0 + 16.0 * ROUNDOFF) - 2.0 * np.sum(each, axis=1)
    return np.where(parts.log_survival < 0.0, np.where(np.isnan(lowest), -np.inf, lowest), 0.0)
