"""Conversions between privacy profile, trade-off function and Rényi divergence, each with its kind.

A profile or trade-off function given as an array is taken as a guarantee: an upper bound of delta, a lower bound of f.
The answer is then a guarantee of kind "bound".  Where Bounds are given, the answer has two ends and their kind.
Sources: Zhu, Dong and Wang 2022, appendix B; Dong, Roth and Su 2022; Balle, Barthe and Gaboardi 2018.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from jaxacct.core.bounds import Bounds
from jaxacct.core.validation import (
    DELTA_OR_ZERO,
    NON_NEGATIVE,
    POSITIVE,
    PROBABILITY,
    REAL,
    InputError,
    check,
)
from jaxacct.representations.convex_conjugate import conjugate, consistent

__all__ = [
    "profile_from_tradeoff",
    "renyi_from_profile",
    "tradeoff_from_approximate_dp",
    "tradeoff_from_profile",
]

_SLACK = 1e-14
"""Absolute rounding of a handful of operations on numbers up to 1."""
_FLAT_POWER = 1e-9
"""Distance of an order from 1 below which the Rényi divergence of order 1 is taken."""


def tradeoff_from_profile(epsilon: Any, delta: Any, fpr: Any, *, symmetric: bool = True) -> Bounds:
    """Trade-off function `f(a) = sup_eps {1 - delta(eps) - e^eps a}` from delta on a grid of eps.

    Parameters
    ----------
    epsilon : array_like (G,)
        Any real numbers.
    delta : array_like (G,) or Bounds
        Upper bounds of delta(eps), or brackets of it.
    fpr : array_like in [0, 1]
        False positive rates.
    symmetric : bool
        Whether the relation is symmetric, as add_or_remove_one is: delta at -eps then follows from delta at eps.

    Returns
    -------
    Bounds
        Of the shape of fpr.  From an array, kind "bound": `lower` is the guarantee, and `upper` is 1 - fpr.

    References
    ----------
    Dong, Roth and Su (2022), Proposition 2.12; both ends are derived in jaxacct/representations/README.md.

    >>> float(tradeoff_from_profile([0.0], [0.2], 0.3).lower.round(9))
    0.5
    """
    eps = np.atleast_1d(check("epsilon", epsilon, REAL))
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
    if kind == "bound":
        return Bounds(found.low, found.low, np.maximum(1.0 - a, found.low), kind)
    found = consistent(found)
    return Bounds(found.low, 0.5 * (found.low + found.high), found.high, kind)


def profile_from_tradeoff(fpr: Any, fnr: Any, epsilon: Any) -> Bounds:
    """Privacy profile `delta(eps) = 1 + f*(-e^eps) = sup_a {1 - f(a) - e^eps a}` from f on a grid.

    Parameters
    ----------
    fpr : array_like (G,) in [0, 1]
    fnr : array_like (G,) or Bounds
        Values at fpr of a convex trade-off function that holds, or brackets of f.
    epsilon : array_like
        Any real numbers.

    Returns
    -------
    Bounds
        Of the shape of epsilon.  From an array, kind "bound": `upper` is the guarantee, and `lower` is 0.

    References
    ----------
    Dong, Roth and Su (2022), Proposition 2.12.

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
    ratio = np.exp(np.asarray(check("epsilon", epsilon, REAL)))
    found = conjugate(a, low, high, ratio, steepest=np.inf, beyond=None)
    if kind == "bound":
        return Bounds(np.zeros_like(found.high), found.high, found.high, kind)
    found = consistent(found)
    return Bounds(found.low, 0.5 * (found.low + found.high), found.high, kind)


def renyi_from_profile(
    forward: Callable[[np.ndarray], Any],
    backward: Callable[[np.ndarray], Any],
    order: Any,
    *,
    largest: float,
    panels: int = 64,
) -> Bounds:
    """Rényi divergence from the profiles of the two directions, by an integral over eps.

    `e^{(alpha-1) R} = 1 + alpha (alpha - 1) int_0^inf (e^{(alpha-1) eps} delta_PQ + e^{-alpha eps} delta_QP) d eps`,
    and R = int (delta_PQ + e^-eps delta_QP) d eps at alpha = 1.

    Parameters
    ----------
    forward, backward : callable
        delta_PQ and delta_QP as functions of an array of eps.
    order : array_like, > 0
    largest : float, > 0
        Where the integral ends.  The integrand must be negligible there, which for large orders is far beyond any eps
        of interest.
    panels : int
        Panels of 16 Gauss-Legendre nodes at the coarser of two resolutions.

    Returns
    -------
    Bounds
        kind "estimate": the finer resolution, plus and minus its difference from the coarser one.

    References
    ----------
    Balle, Barthe and Gaboardi (2018).

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
        small = np.abs(power) < _FLAT_POWER
        return np.where(small, total, np.log1p((1.0 + power) * power * total) / np.where(small, 1.0, power))

    rough, fine = integral(panels), integral(2 * panels)
    error = np.abs(fine - rough) + 1e-13 * np.abs(fine)
    return Bounds(fine - error, fine, fine + error, "estimate", engine="quadrature")


def tradeoff_from_approximate_dp(epsilon: Any, delta: Any, fpr: Any) -> Bounds:
    """The trade-off function of (eps, delta)-DP: `max(0, 1 - delta - e^eps a, e^-eps (1 - delta - a))`.

    Parameters
    ----------
    epsilon : array_like, >= 0
    delta : array_like in [0, 1)
    fpr : array_like in [0, 1]
        All broadcast.

    Returns
    -------
    Bounds
        kind "bound": `lower` is the guarantee.

    References
    ----------
    Wasserman and Zhou (2010); Kairouz, Oh and Viswanath (2015).

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
