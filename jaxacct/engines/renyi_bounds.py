"""Rényi accounting: upper bounds of epsilon and delta from the moments of the loss, at the best order of each row.

With `K(c) = log E_P[e^{cL} ; L < inf]` and `kappa(c) = c^c/(1+c)^{1+c}`, for every c > 0 the finite part of delta obeys

    delta(eps) <= kappa(c) e^{K(c) - c eps},    eps(delta) <= (K(c) + log kappa(c) - log delta)/c,

since `(1 - e^-x)_+ <= kappa(c) e^{cx}`.  Without mass at infinity also `delta(eps)^2 <= 1 - e^-R` (Bretagnolle, Huber)
and `delta(eps)^2 <= R/2` (Pinsker), where R is the divergence of any order above 1.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from jaxacct.core.floats import ROUNDOFF, SMALLEST_POSITIVE
from jaxacct.engines.loss_moments import log_moments
from jaxacct.kernels.certificate import log_kappa
from jaxacct.mechanisms.loss_components import Components

__all__ = ["least_delta", "least_epsilon"]

START = np.geomspace(1e-3, 1e5, 33)
"""Values of alpha - 1 with which the search for the best order starts."""
SEARCH_ROUNDS = 4
"""Rounds of the search for the best order, including the first."""
REFINED_ORDERS = 13
"""Orders tried in each later round, between the neighbours of the best one so far."""


def least_epsilon(parts: Components, delta: np.ndarray, orders: np.ndarray | None = None) -> np.ndarray:
    """(B,) epsilon at the finite part's delta > 0, from the given values of alpha - 1 or at the best order."""
    log_delta = np.log(delta)
    best, least = _minimise(parts, lambda c, k: _sum_up(k, log_kappa(c), -log_delta) / c, orders)
    variation = np.sqrt(_square_of_variation(least))  # 0 where the moments underflow, which proves nothing
    near = (parts.log_survival == 0) & (variation > 0.0) & (delta * (1.0 - 1e-14) >= variation)
    return np.where(near, 0.0, np.maximum(best + 1e-13 * np.abs(best), 0.0))


def least_delta(parts: Components, epsilon: np.ndarray, orders: np.ndarray | None = None) -> np.ndarray:
    """(B,) the finite part's delta at epsilon, from the given values of alpha - 1 or at the best order."""
    best, least = _minimise(parts, lambda c, k: _sum_up(k, -c * epsilon, log_kappa(c)), orders)
    finite = np.exp(np.minimum(best, 0.0)) * (1.0 + 1e-12) + SMALLEST_POSITIVE
    known = (parts.log_survival == 0) & (epsilon >= 0.0)
    near = np.where(known, np.sqrt(_square_of_variation(least)) * (1.0 + 1e-14), 1.0)
    return np.where(near > 0.0, np.minimum(finite, near), finite)


def _sum_up(*terms: np.ndarray) -> np.ndarray:
    """An upper bound of a sum of rounded terms that may cancel."""
    total, size = np.zeros(()), np.zeros(())
    for term in terms:
        total, size = total + term, size + np.abs(term)
    return total + 4.0 * ROUNDOFF * size


def _square_of_variation(divergence: np.ndarray) -> np.ndarray:
    """An upper bound of the squared total variation, by Pinsker and by Bretagnolle and Huber."""
    divergence = np.maximum(divergence, 0.0)
    return np.minimum(0.5 * divergence, -np.expm1(-divergence))


def _minimise(
    parts: Components, objective: Callable[[np.ndarray, np.ndarray], np.ndarray], orders: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray]:
    """The least objective over c and the least Rényi divergence found, per row; every c gives a valid bound.

    Each objective is a convex function of c, or one divided by c, so it has a single minimum.
    """
    size = parts.mu2.size
    c = np.sort(START if orders is None else orders)[:, None] + np.zeros(size)
    best, least = np.full(size, np.inf), np.full(size, np.inf)
    for _ in range(SEARCH_ROUNDS if orders is None else 1):
        k = _upper_moments(parts, c)
        values = np.nan_to_num(objective(c, k), nan=np.inf, posinf=np.inf, neginf=-np.inf)
        at = np.argmin(values, axis=0)[None]
        best = np.minimum(best, np.take_along_axis(values, at, 0)[0])
        least = np.minimum(least, np.min(k / c, axis=0))
        left, right = (np.take_along_axis(c, np.clip(at + d, 0, c.shape[0] - 1), 0) for d in (-1, 1))
        c = left * (right / left) ** np.linspace(0.0, 1.0, REFINED_ORDERS)[:, None]
    return best, least


def _upper_moments(parts: Components, c: np.ndarray) -> np.ndarray:
    """Upper ends of K(c) for c of shape (O, B)."""
    count, size = c.shape
    rows = np.tile(np.arange(size), count)
    high = log_moments(parts.take(rows), c.ravel()).high.reshape(count, size)
    return np.where(np.isnan(high), np.inf, high)
