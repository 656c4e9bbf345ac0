"""Conversions between privacy profile, trade-off function, Gaussian DP and Rényi divergence, each with its kind.

Arrays given as a profile or trade-off function are taken as a guarantee (an upper bound of delta, a lower bound of
f), and what comes out is a guarantee of kind "bound".  Bounds given keep their two ends and their kind.
Sources: Zhu, Dong and Wang 2022, appendix B; Dong, Roth and Su 2022; Balle, Barthe and Gaboardi 2018.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from scipy.special import ndtr, ndtri

from jaxacct.bounds import Bounds
from jaxacct.engines import closed_form
from jaxacct.representations.convex_conjugate import conjugate
from jaxacct.validation import (
    DELTA_OR_ZERO,
    NON_NEGATIVE,
    OPEN_PROBABILITY,
    POSITIVE,
    PROBABILITY,
    Constraint,
    InputError,
    check,
)

__all__ = [
    "gdp_from_profile",
    "profile_from_gdp",
    "profile_from_tradeoff",
    "renyi_from_profile",
    "tradeoff_from_approximate_dp",
    "tradeoff_from_gdp",
    "tradeoff_from_profile",
]

_REAL = Constraint("use a finite {name}", -np.inf)
_SLACK = 1e-14
_SMALLEST = 1e-300


def tradeoff_from_profile(epsilon: Any, delta: Any, fpr: Any, *, symmetric: bool = True) -> Bounds:
    """Trade-off function `f(a) = sup_eps {1 - delta(eps) - e^eps a}` from delta on a grid of eps.

    epsilon : (G,) real.  delta : (G,) upper bounds of delta(eps), or their Bounds.  fpr : any shape, in [0, 1].
    symmetric : the relation is symmetric, as add_or_remove_one is, so that delta at -eps follows from delta at eps.

    Returns Bounds of shape fpr.  From an array `lower` is the guarantee, kind "bound", and `upper` is 1 - fpr.

    >>> float(tradeoff_from_profile([0.0], [0.2], 0.3).lower.round(9))
    0.5
    """
    eps = np.atleast_1d(check("epsilon", epsilon, _REAL))
    low, high, kind = _values("delta", delta, eps.shape)
    x = np.exp(eps)
    low = np.maximum(low, np.maximum(1.0 - x, 0.0)) if kind == "bound" else low
    if symmetric:
        x = np.concatenate([x, np.exp(-eps)])
        gap, scale = -np.expm1(-eps), np.exp(-eps)
        low, high = (np.concatenate([v, np.clip(gap + scale * v, 0.0, 1.0)]) for v in (low, high))
    x, low, high = _sorted(np.concatenate([[0.0], x]), np.concatenate([[1.0], low]), np.concatenate([[1.0], high]))
    a = np.asarray(check("fpr", fpr, PROBABILITY))
    found = conjugate(x, low, high, a, steepest=1.0, beyond=0.0)
    upper = np.maximum(1.0 - a if kind == "bound" else found.high, found.low)
    return Bounds(found.low, found.low if kind == "bound" else 0.5 * (found.low + upper), upper, kind)


def profile_from_tradeoff(fpr: Any, fnr: Any, epsilon: Any) -> Bounds:
    """Privacy profile `delta(eps) = 1 + f*(-e^eps) = sup_a {1 - f(a) - e^eps a}` from f on a grid.

    fpr : (G,) in [0, 1].  fnr : (G,) values at fpr of a convex trade-off function that holds, or Bounds of f.
    epsilon : any shape, real.

    Returns Bounds of shape epsilon.  From an array `upper` is the guarantee, kind "bound", and `lower` is 0.

    >>> a = np.linspace(0, 1, 1001)
    >>> float(profile_from_tradeoff(a, np.maximum(0.8 - a, 0), 0.0).upper.round(9))
    0.2
    """
    a = np.atleast_1d(check("fpr", fpr, PROBABILITY))
    low, high, kind = _values("fnr", fnr, a.shape)
    a, low, high = _sorted(a, low, high)
    if a[0] > 0.0:
        a, low, high = np.concatenate([[0.0], a]), np.concatenate([low[:1], low]), np.concatenate([[1.0], high])
    if a[-1] < 1.0:
        a, low, high = (np.concatenate([v, [end]]) for v, end in ((a, 1.0), (low, 0.0), (high, 0.0)))
    ratio = np.exp(np.asarray(check("epsilon", epsilon, _REAL)))
    found = conjugate(a, low, high, ratio, steepest=np.inf, beyond=None)
    if kind == "bound":
        return Bounds(np.zeros_like(found.high), found.high, found.high, kind)
    return Bounds(found.low, 0.5 * (found.low + found.high), found.high, kind)


def renyi_from_profile(
    forward: Callable[[np.ndarray], Any],
    backward: Callable[[np.ndarray], Any],
    order: Any,
    *,
    largest: float,
    panels: int = 64,
) -> Bounds:
    """Rényi divergence from the profiles of the two directions, by the integral of Balle, Barthe and Gaboardi 2018.

    `e^{(alpha-1) R} = 1 + alpha (alpha - 1) int_0^inf (e^{(alpha-1) eps} delta_PQ + e^{-alpha eps} delta_QP) d eps`,
    and R = int (delta_PQ + e^-eps delta_QP) d eps at alpha = 1.

    forward, backward : delta_PQ and delta_QP on arrays of eps.  order : > 0.  largest : where the integral ends; it
    must lie where the integrand is negligible, which for large orders is far beyond any eps of interest.

    Returns Bounds of kind "estimate": the ends are two resolutions' difference around the finer one.

    >>> zero = lambda eps: 0.0 * eps
    >>> float(renyi_from_profile(zero, zero, 2.0, largest=5.0).upper)
    0.0
    """
    alpha = np.asarray(check("order", order, POSITIVE))[..., None]
    check("largest", largest, POSITIVE)

    def integral(count: int) -> np.ndarray:
        nodes, weights = np.polynomial.legendre.leggauss(16)
        half = 0.5 * largest / count
        eps = (half * (2.0 * np.arange(count)[:, None] + 1.0 + nodes)).ravel()
        weight = half * np.tile(weights, count)
        both = np.exp((alpha - 1.0) * eps) * forward(eps) + np.exp(-alpha * eps) * backward(eps)
        total = both @ weight
        power = alpha[..., 0] - 1.0
        small = np.abs(power) < 1e-9
        return np.where(small, total, np.log1p((1.0 + power) * power * total) / np.where(small, 1.0, power))

    rough, fine = integral(panels), integral(2 * panels)
    error = np.abs(fine - rough) + 1e-13 * np.abs(fine)
    return Bounds(fine - error, fine, fine + error, "estimate", engine="quadrature")


def profile_from_gdp(mu: Any, epsilon: Any) -> Bounds:
    """delta(eps) of mu-Gaussian differential privacy, `Phi(mu/2 - eps/mu) - e^eps Phi(-mu/2 - eps/mu)`, certified.

    mu : > 0.  epsilon : >= 0; they broadcast.  Source: Dong, Roth and Su 2022, Corollary 2.13.

    >>> float(profile_from_gdp(0.5, 1.0).estimate.round(9))
    0.006829595
    """
    mu, eps = np.broadcast_arrays(check("mu", mu, POSITIVE), check("epsilon", epsilon, NON_NEGATIVE))
    low, middle, high = closed_form.delta(mu, eps)
    high = np.maximum(high, _SMALLEST)  # below it exp underflows
    return Bounds(low, np.clip(middle, low, high), high, "certified", engine="closed_form")


def gdp_from_profile(epsilon: Any, delta: Any) -> Bounds:
    """The mu whose mu-GDP profile passes through (eps, delta): any mechanism that is mu-GDP for it satisfies both.

    epsilon : >= 0.  delta : in (0, 1).  They broadcast; certified.  A mechanism known to be (eps, delta)-DP at one
    point is not mu-GDP for this mu; one that is mu-GDP needs at least the largest such mu over its whole profile.

    >>> float(gdp_from_profile(1.0, 0.006829595).estimate.round(6))
    0.5
    """
    eps, target = np.broadcast_arrays(check("epsilon", epsilon, NON_NEGATIVE), check("delta", delta, OPEN_PROBABILITY))

    def crossing(end: str) -> tuple[np.ndarray, np.ndarray]:
        below, above = np.full(eps.shape, np.log(1e-8)), np.log(np.sqrt(2.0 * eps) + 80.0)
        for _ in range(90):
            middle = 0.5 * (below + above)
            met = getattr(closed_form.delta(np.exp(middle), eps), end) <= target
            below, above = np.where(met, middle, below), np.where(met, above, middle)
        return np.exp(below), np.exp(above)

    low, high = crossing("upper")[0] * (1.0 - 1e-15), crossing("lower")[1] * (1.0 + 1e-15)
    return Bounds(low, np.sqrt(low) * np.sqrt(high), high, "certified", engine="closed_form")


def tradeoff_from_gdp(mu: Any, fpr: Any) -> Bounds:
    """`f_mu(a) = Phi(Phi^-1(1 - a) - mu)`, certified but for the accuracy of SciPy's normal distribution (1e-14).

    mu : >= 0.  fpr : in [0, 1]; they broadcast.  Source: Dong, Roth and Su 2022, Definition 2.6.

    >>> float(tradeoff_from_gdp(1.0, 0.5).estimate.round(9))
    0.158655254
    """
    mu, a = np.broadcast_arrays(check("mu", mu, NON_NEGATIVE), check("fpr", fpr, PROBABILITY))
    quantile = -ndtri(a)
    value = ndtr(quantile - mu)
    with np.errstate(invalid="ignore"):
        relative = _SLACK * (4.0 + (np.abs(quantile - mu) + 1.0) * (np.abs(quantile) + mu))
    relative = np.where(np.isfinite(quantile), np.minimum(relative, 1.0), 0.0)
    return Bounds(value * (1.0 - relative), value, np.minimum(value * (1.0 + relative), 1.0), "certified")


def tradeoff_from_approximate_dp(epsilon: Any, delta: Any, fpr: Any) -> Bounds:
    """The trade-off function of (eps, delta)-DP: `max(0, 1 - delta - e^eps a, e^-eps (1 - delta - a))`.

    epsilon : >= 0.  delta : in [0, 1).  fpr : in [0, 1].  All broadcast.  `lower` is the guarantee, kind "bound".
    Source: Wasserman and Zhou 2010; Kairouz, Oh and Viswanath 2015.

    >>> float(tradeoff_from_approximate_dp(0.0, 0.1, 0.2).lower.round(9))
    0.7
    """
    eps, delta = np.asarray(check("epsilon", epsilon, NON_NEGATIVE)), np.asarray(check("delta", delta, DELTA_OR_ZERO))
    a = np.asarray(check("fpr", fpr, PROBABILITY))
    value = np.maximum(np.maximum(1.0 - delta - np.exp(eps) * a, np.exp(-eps) * (1.0 - delta - a)), 0.0)
    value = np.maximum(value - _SLACK * (value > 0), 0.0)
    return Bounds(value, value, np.maximum(np.broadcast_to(1.0 - a, value.shape), value), "bound")


def _values(name: str, values: Any, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray, str]:
    """Lower and upper values on the grid, and the kind of what is drawn from them."""
    if isinstance(values, Bounds):
        kinds = np.unique(np.asarray(values.kind))
        if kinds.size > 1 or values.shape != shape:
            raise InputError(f"{name} must be Bounds of one kind and of the grid's shape {shape}; evaluate it there")
        return np.asarray(values.lower), np.asarray(values.upper), str(kinds[0])
    given = np.atleast_1d(check(name, values, PROBABILITY))
    if given.shape != shape or given.ndim != 1:
        raise InputError(f"{name} has shape {given.shape} and must have the grid's shape {shape}; give (G,) for both")
    return given, given, "bound"


def _sorted(x: np.ndarray, low: np.ndarray, high: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """In order of x, equal points joined."""
    unique, where = np.unique(x, return_inverse=True)
    lowest, highest = np.zeros(unique.size), np.ones(unique.size)
    np.maximum.at(lowest, where, low)
    np.minimum.at(highest, where, high)
    return unique, lowest, highest
