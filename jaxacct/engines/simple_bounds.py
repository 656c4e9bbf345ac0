"""Upper bounds by theorems that need no engine, to stand where none answers and to be held against those that do.

For a composition of Gaussians (sampled or not), Laplace and finite parts, with B the sum of the largest losses of the
bounded parts:

* *not sampled*: a Poisson sampled pair is dominated by its base, since H_a is jointly convex: with mu^2 =
  sum n/sigma^2 over all Gaussians, `delta(eps) <= delta_mu(eps - B)` and `eps(delta) <= eps_mu(delta) + B`;
* *hits*: tell the attacker which steps were hit.  Under Q the same coins are tossed, so that a step that was not hit
  has loss 0 and one that was has the loss of the base: given k hits, at most `delta_k`, a Gaussian of mu^2 =
  k/sigma^2.  Hence
  `delta(eps) <= Pr[N > k] + delta_k(eps)` for every k, N binomial;
* *basic composition*, of sampled Gaussians alone: with N steps in all, `eps(delta) <= sum n eps_1(delta/N)` and
  `delta(eps) <= sum n delta_1(eps/N)`, by the closed form of one step.  It is the best of these where hits are rarer
  than delta;
* *total variation*: `delta(eps) <= delta(0) <= sum n TV`;
* *bounded*: `delta(eps) = 0` from B on, where there are no Gaussians; sampled ones have losses of at most
  `-n log(1-q)` when a record is added.

All of them are rounded up.
"""

from __future__ import annotations

import numpy as np
from scipy.special import erf

from jaxacct.core.floats import ROUNDOFF
from jaxacct.engines import closed_form
from jaxacct.engines.quick_bounds import chance, largest_loss, log_tail_above
from jaxacct.mechanisms.loss_components import Components

__all__ = ["least_delta", "least_epsilon", "total_variation"]

RARE_SHARES = (0.5, 0.9, 0.999, 1e-3)
"""Shares of delta that are given to rare numbers of hits; the best of the bounds counts."""
RARE_LOG_MASSES = (-690.0, -400.0, -200.0, -100.0, -60.0, -40.0, -25.0, -15.0, -10.0, -6.0, -3.0)
"""Logarithms of the probability that is given to them where delta is asked for; the best of the bounds counts."""
BISECTIONS = 60
"""Of the number of hits, which is whole and at most 2^53."""
LEAST_EACH = 1e-306
"""Least delta of a step: one nearer to the end of float64's range has no relative accuracy."""
LEAST_DELTA = 1e-307
"""Least delta that a closed form is asked for."""


def _bounded(parts: Components) -> np.ndarray:
    """B, and in the add direction also what sampled Gaussians cannot exceed, rounded up; inf where there is no such."""
    gauss = parts.gauss_n > 0
    with np.errstate(divide="ignore"):
        sampled = -np.sum(np.where(gauss, parts.gauss_n * np.log1p(-parts.gauss_q), 0.0), axis=1)
    open_above = (parts.mu > 0) | (np.any(gauss, axis=1) & (parts.sign > 0))
    return np.where(open_above, np.inf, (largest_loss(parts).above + sampled) * (1.0 + 256.0 * ROUNDOFF))


def total_variation(parts: Components) -> np.ndarray:
    """`sum n TV` of the parts, at least delta(0) of the finite losses, rounded up."""
    mu, s = parts.mu / np.sqrt(8.0), 1.0 / parts.gauss_sigma / np.sqrt(8.0)
    total = erf(mu) + np.sum(np.where(parts.gauss_n > 0, parts.gauss_n * parts.gauss_q * erf(s), 0.0), axis=1)
    laplace = parts.laplace_q * -np.expm1(-0.5 / parts.laplace_scale)
    total += np.sum(np.where(parts.laplace_n > 0, parts.laplace_n * laplace, 0.0), axis=1)
    finite = np.sum(parts.finite_mass * -np.expm1(-np.maximum(parts.finite_loss, 0.0)), axis=2)
    total += np.sum(np.where(parts.finite_n > 0, parts.finite_n * finite, 0.0), axis=1)
    terms = sum(n.shape[1] for n in (parts.gauss_n, parts.laplace_n, parts.finite_n)) + parts.finite_mass.shape[2]
    return total * (1.0 + ROUNDOFF * (64.0 + terms)) + 1e-307


def _all_gaussians(parts: Components) -> np.ndarray:
    """mu of all Gaussians as if none were sampled, rounded up."""
    with np.errstate(over="ignore"):
        each = np.where(parts.gauss_n > 0, np.sqrt(parts.gauss_n) / parts.gauss_sigma, 0.0)
    mu = parts.mu
    for column in range(each.shape[1]):
        mu = np.hypot(mu, each[:, column])
    return mu * (1.0 + (8.0 + 4.0 * each.shape[1]) * ROUNDOFF)


def _hits(parts: Components, log_share: np.ndarray) -> np.ndarray:
    """mu given at most k hits of each part, rounded up; k is exceeded anywhere with probability e^log_share at most."""
    columns = parts.gauss_n.shape[1]
    present = np.maximum(np.sum(parts.gauss_n > 0, axis=1), 1)
    each = log_share - np.log(present)
    mu = parts.mu
    for column in range(columns):
        sigma, q, n = (x[:, column] for x in (parts.gauss_sigma, parts.gauss_q, parts.gauss_n))
        present_here = n > 0
        n = np.where(present_here, n, 1.0)
        error = 4.0 * ROUNDOFF * (1.0 + np.abs(np.log(q)))
        hit = chance(np.log(q), np.log1p(-q), error, error)
        low, high = np.zeros_like(n), n.copy()  # Pr[N > high] is small enough, always so at n
        for _ in range(BISECTIONS):
            middle = np.floor(0.5 * (low + high))
            enough = (middle < high) & (log_tail_above(n, middle + 1.0, hit) <= each)
            before = low, high
            high, low = np.where(enough, middle, high), np.where(enough, low, np.minimum(middle + 1.0, high))
            if np.array_equal(before, (low, high)):
                break  # every number is found: no turn moves it any more
        with np.errstate(over="ignore"):
            mu = np.hypot(mu, np.where(present_here, np.sqrt(high) / sigma, 0.0))
    return mu * (1.0 + (8.0 + 4.0 * columns) * ROUNDOFF)


def _only_sampled(parts: Components) -> np.ndarray:
    others = np.any(parts.laplace_n > 0, axis=1) | np.any(parts.finite_n > 0, axis=1)
    return np.any(parts.gauss_n > 0, axis=1) & (parts.mu == 0.0) & ~others


def _basic_epsilon(parts: Components, delta: np.ndarray) -> np.ndarray:
    """Basic composition's epsilon, rounded up; inf where it does not apply."""
    total, most = np.zeros(delta.size), np.sum(parts.gauss_n, axis=1)
    each = delta / most * (1.0 - (8.0 + parts.gauss_n.shape[1]) * ROUNDOFF)
    usable = _only_sampled(parts) & (each > LEAST_EACH) & (each < 1.0)
    each = np.where(usable, each, 0.5)
    for column in range(parts.gauss_n.shape[1]):
        sigma, q, n = (x[:, column] for x in (parts.gauss_sigma, parts.gauss_q, parts.gauss_n))
        law = np.where(n > 0, sigma, 1.0), np.where(n > 0, q, 0.5), parts.sign > 0
        step = closed_form.epsilon_of_one_step(*law, each, np.full(delta.size, 8.0 * ROUNDOFF)).upper
        total += np.where(n > 0, n * step, 0.0)
    return np.where(usable, total * (1.0 + (8.0 + 4.0 * parts.gauss_n.shape[1]) * ROUNDOFF), np.inf)


def _basic_delta(parts: Components, epsilon: np.ndarray) -> np.ndarray:
    """Basic composition's delta, rounded up; 1 where it does not apply."""
    total, most = np.zeros(epsilon.size), np.sum(parts.gauss_n, axis=1)
    usable = _only_sampled(parts) & (epsilon >= 0.0)
    each = np.where(usable, epsilon / most * (1.0 - (8.0 + parts.gauss_n.shape[1]) * ROUNDOFF), 0.0)
    for column in range(parts.gauss_n.shape[1]):
        sigma, q, n = (x[:, column] for x in (parts.gauss_sigma, parts.gauss_q, parts.gauss_n))
        law = np.where(n > 0, sigma, 1.0), np.where(n > 0, q, 0.5), parts.sign > 0
        total += np.where(n > 0, n * closed_form.delta_of_one_step(*law, each).upper, 0.0)
    return np.where(usable, np.fmin(total * (1.0 + (8.0 + 4.0 * parts.gauss_n.shape[1]) * ROUNDOFF), 1.0), 1.0)


def least_epsilon(parts: Components, delta: np.ndarray, slack: np.ndarray) -> np.ndarray:
    """(B,) the smallest upper bound of epsilon at the finite part's delta, known up to a relative slack."""
    safe = delta * (1.0 - slack) * (1.0 - 4.0 * ROUNDOFF)
    bounded = largest_loss(parts).above
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        best = np.fmin(_bounded(parts), _with(bounded, _upper_epsilon(_all_gaussians(parts), safe)))
        if np.any(parts.gauss_n > 0):
            best = np.fmin(best, _basic_epsilon(parts, safe))
            for share in RARE_SHARES:
                mu = _hits(parts, np.log(safe) + np.log(share) - 1e-12)
                best = np.fmin(best, _with(bounded, _upper_epsilon(mu, safe * (1.0 - share) * (1.0 - 4.0 * ROUNDOFF))))
        return np.where(total_variation(parts) <= safe, 0.0, np.where(np.isnan(best), np.inf, best))


def _upper_epsilon(mu: np.ndarray, delta: np.ndarray) -> np.ndarray:
    """The Gaussian's epsilon from above; 0 where mu is 0."""
    present = mu > 0
    upper = closed_form.epsilon(np.where(present, mu, 1.0), np.maximum(delta, LEAST_DELTA), np.zeros_like(mu)).upper
    return np.where(present, np.where(delta > LEAST_DELTA, upper, np.inf), 0.0)


def _with(bounded: np.ndarray, epsilon: np.ndarray) -> np.ndarray:
    return (bounded + epsilon) * (1.0 + 4.0 * ROUNDOFF)


def least_delta(parts: Components, epsilon: np.ndarray) -> np.ndarray:
    """(B,) the smallest upper bound of the finite part's delta at eps."""
    left = epsilon - largest_loss(parts).above
    left = left - 4.0 * ROUNDOFF * np.abs(epsilon)
    best = np.fmin(total_variation(parts), 1.0)
    best = np.fmin(best, _upper_delta(_all_gaussians(parts), left))
    if np.any(parts.gauss_n > 0):
        best = np.fmin(best, _basic_delta(parts, left))
        for log_share in RARE_LOG_MASSES:
            mu = _hits(parts, np.full(left.shape, log_share))
            best = np.fmin(best, (_upper_delta(mu, left) + np.exp(log_share)) * (1.0 + 1e-12))
    return np.where(epsilon > _bounded(parts), 0.0, best)


def _upper_delta(mu: np.ndarray, epsilon: np.ndarray) -> np.ndarray:
    """The Gaussian's delta from above, 1 where eps is negative."""
    present = (mu > 0) & np.isfinite(mu)
    at = np.maximum(epsilon, 0.0)
    upper = closed_form.delta(np.where(present, mu, 1.0), at).upper
    upper = np.where(present, upper, np.where(mu > 0, 1.0, 0.0))
    return np.where(epsilon >= 0.0, upper, 1.0)
