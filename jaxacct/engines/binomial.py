"""Tails of the binomial law in logarithms, from above and from below, for any number of trials up to 2^53.

With `kl(x, p) = x log(x/p) + (1-x) log((1-x)/(1-p))`:

* `Pr[N >= k] <= e^{-n kl(k/n, p)}` for k >= np, and `Pr[N < k] <= e^{-n kl((k-1)/n, p)}` for k - 1 <= np (Chernoff);
* the term at 0 < k < n is `sqrt(n/(2 pi k (n-k))) e^{-n kl(k/n, p)}` times a factor between
  `e^{-1/(12k) - 1/(12(n-k))}` and 1 (Robbins 1955), and those above it fall at least by
  `r = (n-k) p/((k+1)(1-p))` from one to the next.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from jaxacct.floats import ROUNDOFF

__all__ = ["Chance", "chance", "log_below", "log_tail_above", "log_tail_below"]

TAIL_TERMS = 16
"""How many terms of a tail are added up from below: nearly all of it where few hits are expected."""


class Chance(NamedTuple):
    """log p and log(1 - p) of a hit, and how far each may be off."""

    log_p: np.ndarray
    log_rest: np.ndarray
    error_p: np.ndarray
    error_rest: np.ndarray


def chance(log_p: np.ndarray, log_rest: np.ndarray, error_p: np.ndarray, error_rest: np.ndarray) -> Chance:
    """From log p and log(1 - p) and their errors.

    The one that is near 0 is computed from the other where that gives it a smaller error.
    """
    log_p, log_rest, error_p, error_rest = np.broadcast_arrays(log_p, log_rest, error_p, error_rest)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        likely = log_p > -np.log(2.0)
        far, error = np.where(likely, log_rest, log_p), np.where(likely, error_rest, error_p)
        odds = np.exp(far + error)
        other = np.log1p(-np.minimum(np.exp(far), 0.75))
        small = 4.0 * np.expm1(np.minimum(error, 700.0)) * odds + 4.0 * ROUNDOFF * np.abs(other) + 1e-307
        small = np.where(odds < 0.75, small, np.inf)
    for_p, for_rest = likely & (small < error_p), ~likely & (small < error_rest)
    return Chance(
        np.where(for_p, other, log_p),
        np.where(for_rest, other, log_rest),
        np.where(for_p, small, error_p),
        np.where(for_rest, small, error_rest),
    )


def _divergence(n: np.ndarray, k: np.ndarray, hit: Chance) -> tuple[np.ndarray, np.ndarray]:
    """(n kl(k/n, p), bound of its error)."""
    x = k / n
    with np.errstate(divide="ignore", invalid="ignore"):
        at_hits = np.where(k > 0, k * np.log(np.where(k > 0, x, 1.0)), 0.0)
        at_misses = np.where(k < n, (n - k) * np.log1p(-np.minimum(x, 1.0)), 0.0)
        hits = np.where(k > 0, k * hit.log_p, 0.0)
        misses = np.where(k < n, (n - k) * hit.log_rest, 0.0)
        error = np.where(k > 0, k * hit.error_p, 0.0) + np.where(k < n, (n - k) * hit.error_rest, 0.0)
    size = np.abs(at_hits) + np.abs(at_misses) + np.abs(hits) + np.abs(misses) + k + 1.0
    return (at_hits - hits) + (at_misses - misses), error + 16.0 * ROUNDOFF * size


def _log_term(n: np.ndarray, k: np.ndarray, divergence: np.ndarray) -> np.ndarray:
    """`log sqrt(n/(2 pi k (n-k))) - n kl`."""
    return 0.5 * (np.log(n) - np.log(2.0 * np.pi * k) - np.log(np.maximum(n - k, 1.0))) - divergence


def log_tail_above(n: np.ndarray, k: np.ndarray, hit: Chance) -> np.ndarray:
    """An upper bound of log Pr[N >= k], k >= 1 whole."""
    divergence, error = _divergence(n, k, hit)
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        most = hit.log_p + hit.error_p
        chernoff = np.where(k >= n * np.exp(most) * (1.0 + 1e-12), np.minimum(error - divergence, 0.0), 0.0)
        log_ratio = np.log(np.maximum(n - k, 0.0)) - np.log(k + 1.0) + most - (hit.log_rest - hit.error_rest)
        ratio = np.exp(log_ratio) * (1.0 + 1e-12)
        term = _log_term(n, k, divergence) + error
        term = np.where(k >= n, n * most * (1.0 - 4.0 * ROUNDOFF), term)
        tail = np.where(ratio < 1.0, term - np.log1p(-np.minimum(ratio, 1.0 - ROUNDOFF)) + 1e-12, 0.0)
        union = np.minimum(np.log(n) + most + 1e-12, 0.0)
    return np.fmin(np.fmin(np.fmin(chernoff, tail), union), 0.0)


def log_below(n: np.ndarray, k: np.ndarray, hit: Chance) -> np.ndarray:
    """An upper bound of log Pr[N < k], k >= 1 whole (Chernoff; 0 where that is no bound)."""
    divergence, error = _divergence(n, k - 1.0, hit)
    with np.errstate(invalid="ignore", over="ignore"):
        least = n * np.exp(hit.log_p - hit.error_p) * (1.0 - 1e-12)
        bound = np.where(k - 1.0 <= least, np.minimum(error - divergence, 0.0), 0.0)
        none = n * np.minimum(hit.log_rest + hit.error_rest, 0.0) * (1.0 - 4.0 * ROUNDOFF)
    return np.fmin(np.where(k <= 1.0, none, bound), 0.0)


def log_tail_below(n: np.ndarray, k: np.ndarray, hit: Chance) -> np.ndarray:
    """A lower bound of log Pr[N >= k], k >= 1 whole: what Chernoff leaves, or the first terms of the tail."""
    divergence, error = _divergence(n, k, hit)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        rest = n - k
        correction = 1.0 / (12.0 * k) + 1.0 / (12.0 * np.maximum(rest, 1.0))
        term = _log_term(n, k, divergence) - error - correction
        last = n * (hit.log_p - hit.error_p) * (1.0 + 4.0 * ROUNDOFF)
        term = np.where(rest > 0, term, np.where(k == n, last, -np.inf))
        odds = np.exp(np.minimum(hit.log_p - hit.log_rest - hit.error_p - hit.error_rest, 700.0)) * (1.0 - 1e-12)
        total = factor = np.ones_like(term)
        for j in range(TAIL_TERMS):
            factor = factor * np.maximum(rest - j, 0.0) / (k + j + 1.0) * odds * (1.0 - 1e-14)
            total = total + np.where(np.isfinite(factor), factor, 0.0)
        terms = np.minimum(term + np.log(total) - 1e-12, 0.0)
        left = np.log1p(-np.exp(np.minimum(log_below(n, k, hit) + 1e-12, 0.0))) - 1e-307
    return np.where(k > n, -np.inf, np.fmax(np.where(np.isnan(terms), -np.inf, terms), left))
