"""Mechanisms of which only zero-concentrated differential privacy (zCDP) is known, and points of their profiles."""

from __future__ import annotations

import functools
from typing import ClassVar

import numpy as np

from jaxacct.core.floats import ROUNDOFF, SMALLEST_POSITIVE
from jaxacct.core.types import Leaf
from jaxacct.core.validation import NON_NEGATIVE
from jaxacct.mechanisms.base import BaseMechanism, ConcentratedPart, FinitePair, FinitePart, register
from jaxacct.mechanisms.finite import sample_pair
from jaxacct.mechanisms.profile import pair_of_profile, stacked

ORDERS = 24
"""Number of Rényi orders that are tried for each point of the profile."""
LEAST_ORDER = 1e-6
"""Smallest value of alpha - 1 that is tried, where alpha is the Rényi order."""


@register
class ZCDP(BaseMechanism):
    """Any (xi, rho)-zCDP mechanism: Rényi divergences are at most xi + rho alpha for alpha > 1, in both directions.

    In a composition the rho and the xi of such guarantees add up, also beside other mechanisms. At each epsilon some
    mechanism attains the profile, but no single pair attains it at every epsilon, so ``kind`` is "bound" (README.md,
    "Zero-concentrated privacy"). The guarantee must hold under the relation of the question.

    Parameters
    ----------
    rho : array_like >= 0, finite
    xi : array_like >= 0, finite
        Constant part of the bound. It broadcasts with rho.

    References
    ----------
    Bun, Steinke (2016), Concentrated Differential Privacy: Simplifications, Extensions, and Lower Bounds.
    Asoodeh et al. (2021), Three Variants of Differential Privacy: Lossless Conversion and Applications.

    >>> import jaxacct as ja
    >>> one, several = ZCDP(0.1), ja.compose(ZCDP(0.05), ja.repeat(ZCDP(0.001), 50))
    >>> [round(float(ja.epsilon(m, 1e-5).upper), 3) for m in (one, several)]
    [1.914, 1.914]
    """

    rho: Leaf
    xi: Leaf = 0.0
    constraints: ClassVar = {"rho": NON_NEGATIVE, "xi": NON_NEGATIVE}

    def finite_pair(self, relation: str) -> FinitePair:
        return concentrated_pair(np.asarray(self.rho, np.float64), np.asarray(self.xi, np.float64))

    def part(self, rate: np.ndarray, relation: str, direction: str) -> ConcentratedPart | FinitePart:
        if np.all(rate == 1.0):
            return ConcentratedPart(np.asarray(self.rho, np.float64), np.asarray(self.xi, np.float64))
        return sample_pair(self.finite_pair(relation), rate, direction)


def concentrated_pair(rho: np.ndarray, xi: np.ndarray) -> FinitePair:
    """Return the pair whose profile joins the points of `_points`. It dominates every (xi, rho)-zCDP mechanism."""
    rho, xi = np.broadcast_arrays(rho, xi)
    points = [_points(float(r), float(x)) for r, x in zip(rho.ravel(), xi.ravel(), strict=True)]
    return stacked([pair_of_profile(epsilon, delta, delta) for epsilon, delta in points], rho.shape)


@functools.lru_cache(maxsize=64)  # an accountant's checks ask for the same points again
@np.errstate(all="ignore")
def _points(rho: float, xi: float) -> tuple[np.ndarray, np.ndarray]:
    """Return points (epsilon, delta), ascending from 0, at which (xi, rho)-zCDP implies (epsilon, delta)-DP."""
    if rho == 0.0:  # the guarantee is xi-DP
        top = np.array([np.tanh(0.5 * xi) * (1.0 + 8.0 * ROUNDOFF), 0.0])
        return (np.array([0.0, xi]), top) if xi > LEAST_ORDER**2 else (np.zeros(1), top[:1])
    corner = _corner(rho, xi)
    far = max(xi + rho + np.sqrt(2.0 * rho) * 37.5, 1.1 * corner)  # delta is about 1e-307 at 37.5 deviations
    # For each epsilon the best test has two outputs. For one of them p > q, and s is its log(p/q). The least s, for
    # epsilon 0, is `corner`. With these 1019 values of s, the chords between the points add about 1e-4 to epsilon.
    s = np.concatenate([corner * np.linspace(1.0, 1.02, 20), np.linspace(1.02 * corner, far, 1000)[1:]])
    t, c = _boundary(s, rho, xi)
    epsilon, delta = _tangent(s, t, c, rho, xi)
    centre = min(np.tanh(0.5 * corner) * (1.0 + 1e-12), 1.0)
    kept = (epsilon > 0.0) & (delta < centre)
    order = np.argsort(epsilon[kept], kind="stable")
    epsilon, delta = np.append(0.0, epsilon[kept][order]), np.append(centre, delta[kept][order])
    delta = np.minimum.accumulate(delta)
    apart = np.append(True, np.diff(epsilon) > max(1e-9, 1e-9 * epsilon[-1]))
    return epsilon[apart], delta[apart]


def _corner(rho: float, xi: float) -> float:
    """Return the least s that proves delta(0) <= tanh(s/2). Two outputs of losses s and -s attain it."""
    c = _orders(rho, 4 * ORDERS)
    for _ in range(2):
        limit = c * (xi + rho * (1.0 + c))
        low, high = np.zeros(c.size), np.full(c.size, 2.0 * (xi + rho) + 2.0 * np.sqrt(xi + rho) + 100.0 * rho)
        for _ in range(60):
            s = 0.5 * (low + high)
            v, y = np.tanh(0.5 * s), c * s
            near = np.log1p(2.0 * np.sinh(0.5 * np.minimum(y, 1.0)) ** 2 + v * np.sinh(np.minimum(y, 1.0)))
            log_f = np.where(y < 1.0, near, y + np.log(0.5 * (1.0 + v) + 0.5 * (1.0 - v) * np.exp(-2.0 * y)))
            enough = log_f >= limit
            low, high = np.where(enough, low, s), np.where(enough, s, high)
        best = int(np.argmin(high))
        found = float(high[best])
        c = np.geomspace(c[max(best - 1, 0)], c[min(best + 1, c.size - 1)], 4 * ORDERS)
    return found


def _orders(rho: float, count: int) -> np.ndarray:
    """Return a grid of alpha - 1. It reaches sqrt(-log(p)/rho) for p = 1e-300. Likelier outputs need smaller orders."""
    return np.geomspace(LEAST_ORDER, 30.0 / np.sqrt(rho) + 1.0, count)


def _boundary(s: np.ndarray, rho: float, xi: float) -> tuple[np.ndarray, np.ndarray]:
    """Return (t, c) for each s. The best test has outputs with log(p/q) = s and -t. Order 1 + c is the strictest."""
    c = np.broadcast_to(_orders(rho, ORDERS), (s.size, ORDERS))
    log_q, best = _rarest_of_orders(s, c, rho, xi)
    for _ in range(2):
        left, right = (np.take_along_axis(c, np.clip(best + d, 0, c.shape[1] - 1), 1) for d in (-1, 1))
        c = left * (right / left) ** np.linspace(0.0, 1.0, 7)
        log_q, best = _rarest_of_orders(s, c, rho, xi)
    q = np.exp(log_q)
    p = np.minimum(q * np.exp(s), 1.0 - ROUNDOFF)
    return np.log1p(-q) - np.log1p(-p), np.take_along_axis(c, best, 1)[:, 0]


def _rarest_of_orders(s: np.ndarray, c: np.ndarray, rho: float, xi: float) -> tuple[np.ndarray, np.ndarray]:
    log_q = _rarest(s[:, None], c, rho, xi)
    best = np.argmin(log_q, axis=1)[:, None]
    return np.take_along_axis(log_q, best, 1)[:, 0], best


def _rarest(s: np.ndarray, c: np.ndarray, rho: float, xi: float) -> np.ndarray:
    """Return log q for the largest q <= e^-s such that order 1 + c allows an event of P-mass q e^s and Q-mass q."""
    alpha = 1.0 + c
    limit, power = c * (xi + rho * alpha), alpha * s
    most = np.exp(-s) * (1.0 - ROUNDOFF)
    grown = np.expm1(np.minimum(power, 700.0)) - alpha * np.expm1(s)
    near = 0.5 * alpha * c * s * s * (1.0 + (1.0 + alpha) * s / 3.0)
    log_rise = np.where(power < 0.01, np.log(near), np.where(power < 700.0, np.log(np.maximum(grown, near)), power))
    log_limit = np.where(limit < 700.0, np.log(np.expm1(np.minimum(limit, 700.0))), limit)
    log_q = np.minimum(log_limit - log_rise, np.log(most))
    for _ in range(5):  # Newton's steps fall to the root: the function is convex, and the start is above the root
        q = np.exp(log_q)
        p = np.minimum(q * np.exp(s), 1.0 - ROUNDOFF)
        t = np.log1p(-q) - np.log1p(-p)
        shrunk = np.exp(-limit)
        grown = np.exp(power + log_q - limit) - q * shrunk
        first = np.where(power < 1.0, q * shrunk * np.expm1(np.minimum(power, 1.0)), grown)
        value = first + (1.0 - q) * np.expm1(-alpha * t) * shrunk + np.expm1(-limit)
        other = np.exp(-alpha * t) * (c - alpha * np.exp(s) * (1.0 - q) / (1.0 - p)) * shrunk
        slope = np.exp(power - limit) + other
        step = value / (q * slope)
        log_q = np.minimum(log_q + np.log1p(-np.clip(np.where(np.isnan(step), 0.0, step), -1.0, 0.9)), np.log(most))
    return log_q


def _tangent(s: np.ndarray, t: np.ndarray, c: np.ndarray, rho: float, xi: float) -> tuple[np.ndarray, np.ndarray]:
    """Return a proved (epsilon, delta), rounded up, by the tangents of x^(1 + c) at e^s and e^-t, for any s > -t."""
    alpha, x = 1.0 + c, s + t
    grown, shrunk = _log_mean(c * x), _log_mean(alpha * x)
    epsilon = s + shrunk - grown
    epsilon += 64.0 * ROUNDOFF * (s + np.abs(shrunk) + np.abs(grown)) + SMALLEST_POSITIVE
    limit = c * (xi + rho * alpha)
    one, two = -alpha * np.expm1(-c * t), -c * np.expm1(-alpha * t)
    excess = np.expm1(np.minimum(limit, 700.0)) + (one - two) + 32.0 * ROUNDOFF * (one + two)
    log_excess = np.where(limit < 700.0, np.log(excess), limit)
    log_delta = log_excess - np.log(alpha) - c * s - np.log(-np.expm1(-c * x))
    size = 32.0 + limit + c * s + np.abs(log_excess) + np.abs(np.log(alpha)) + np.abs(np.log(c * x))
    delta = np.exp(np.minimum(log_delta + 32.0 * ROUNDOFF * size, 0.0)) + 4.0 * SMALLEST_POSITIVE
    usable = np.isfinite(epsilon) & np.isfinite(log_delta)
    return np.where(usable, epsilon, -1.0), np.where(usable, delta, 1.0)


def _log_mean(y: np.ndarray) -> np.ndarray:
    """Compute log((1 - e^-y)/y) for y > 0."""
    small = y < 1e-2
    series = -0.5 * y + y * y / 24.0 - y**4 / 2880.0
    return np.where(small, series, np.log(-np.expm1(-np.where(small, 1.0, y))) - np.log(np.where(small, 1.0, y)))
