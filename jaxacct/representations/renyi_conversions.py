"""Rényi and zero-concentrated guarantees turned into (eps, delta), trade-off functions and each other.

Orders lie along the first axis of the values; any set of orders gives a valid bound, more orders a tighter one.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxacct.bounds import Bounds
from jaxacct.validation import (
    DELTA,
    NON_NEGATIVE,
    POSITIVE,
    PROBABILITY,
    InputError,
    check,
)

__all__ = [
    "delta_from_renyi",
    "delta_from_zcdp",
    "epsilon_from_renyi",
    "epsilon_from_zcdp",
    "log_kappa",
    "renyi_from_zcdp",
    "tradeoff_from_renyi",
    "zcdp_from_renyi",
]


def log_kappa(c: np.ndarray) -> np.ndarray:
    """`log(c^c/(1+c)^{1+c})`: (1 - e^-x)_+ <= kappa e^{cx}, the constant of the conversion at order 1 + c."""
    return -np.log1p(c) - c * np.log1p(1.0 / c)


def epsilon_from_renyi(orders: Any, values: Any, delta: Any) -> Bounds:
    """eps such that a mechanism with Rényi divergences `values` at `orders` is (eps, delta)-DP.

    `eps = min over alpha > 1 of R + log((alpha-1)/alpha) - (log delta + log alpha)/(alpha-1)`, and 0 where
    `delta^2 >= 1 - e^-R` for some alpha >= 1 [Canonne, Kamath and Steinke 2020, Proposition 12; Bretagnolle, Huber].

    orders : (O,) > 0, those below 1 are not used.  values : (O, ...) or (O,), upper bounds, inf allowed.
    delta : in (0, 1), broadcasts with values[0].  Returns Bounds of kind "bound", lower 0.

    >>> orders = np.arange(2, 64)
    >>> float(epsilon_from_renyi(orders, orders / 2, 1e-5).upper.round(4))
    4.7527
    """
    delta = np.asarray(check("delta", delta, DELTA))
    orders, values = _curve(orders, values, delta.ndim)
    c = np.where(orders > 1.0, orders - 1.0, 1.0)
    eps = np.where(orders > 1.0, values + (log_kappa(c) - np.log(delta)) / c, np.inf)
    eps = np.maximum(np.min(eps, axis=0), 0.0)
    near = np.min(np.where(orders >= 1.0, values, np.inf), axis=0)
    eps = np.where(delta**2 * (1.0 - 1e-14) >= -np.expm1(-near), 0.0, eps * (1.0 + 1e-14))
    return Bounds(np.zeros_like(eps), eps, eps, "bound", np.where(np.isinf(eps), "width", "ok"), "renyi")


def delta_from_renyi(orders: Any, values: Any, epsilon: Any) -> Bounds:
    """delta such that a mechanism with Rényi divergences `values` at `orders` is (eps, delta)-DP.

    `delta = min over alpha > 1 of e^{(alpha-1)(R - eps)} (1 - 1/alpha)^{alpha-1} / alpha`, at most 1, and at most
    `sqrt(1 - e^-R)`.  Arguments, sources and kind as `epsilon_from_renyi`; epsilon >= 0.

    >>> float(delta_from_renyi([2.0, 8.0], [1.0, 4.0], 4.0).upper.round(6))
    0.012447
    """
    epsilon = np.asarray(check("epsilon", epsilon, NON_NEGATIVE))
    orders, values = _curve(orders, values, epsilon.ndim)
    c = np.where(orders > 1.0, orders - 1.0, 1.0)
    with np.errstate(over="ignore"):
        each = np.where(orders > 1.0, np.exp(np.minimum(c * (values - epsilon) + log_kappa(c), 1.0)), 1.0)
    near = np.min(np.where(orders >= 1.0, values, np.inf), axis=0)
    delta = np.minimum(np.minimum(np.min(each, axis=0), np.sqrt(-np.expm1(-near))) * (1.0 + 1e-12), 1.0)
    return Bounds(np.zeros_like(delta), delta, delta, "bound", engine="renyi")


def tradeoff_from_renyi(orders: Any, values: Any, fpr: Any, *, both_directions: bool = True) -> Bounds:
    """The trade-off function that Rényi divergences imply: the largest of the two-point constraints' bounds.

    A test with false positive rate x and false negative rate y is a post-processing, so that for every order alpha
    the Rényi divergence of Bernoulli laws obeys `D_alpha(1-y, x) <= R_alpha`, and with both directions
    `D_alpha(x, 1-y) <= R_alpha`; orders in (1/2, 1) and 1 included (orders up to 1/2 say no more than
    1 - alpha when both directions hold) [Zhu, Dong and Wang 2022, appendix F.1; Balle et al. 2020].

    orders, values : (O,) each.  fpr : any shape, in [0, 1].
    both_directions : whether values bound both directions, as they do under a symmetric relation.
    Returns Bounds of shape fpr, kind "bound": `lower` is the guarantee (bisection, safe end), `upper` is 1 - fpr.

    >>> orders = np.array([0.6, 1.0, 2.0, 4.0])
    >>> float(tradeoff_from_renyi(orders, orders / 2, 0.1).lower.round(4))
    0.5068
    """
    orders, values = _curve(orders, values, 0)
    if values.ndim > 1:
        raise InputError(f"values has shape {values.shape} and must be (O,) here; convert one configuration at a time")
    x = np.asarray(check("fpr", fpr, PROBABILITY))
    allowed = values * (1.0 + 1e-12) + 1e-15
    low, high = np.zeros(x.shape), 1.0 - x
    for _ in range(60):
        y = 0.5 * (low + high)
        excess = _excess(orders, allowed, 1.0 - y, x)
        if both_directions:
            excess |= _excess(orders, allowed, x, 1.0 - y)
        low, high = np.where(excess, y, low), np.where(excess, high, y)
    return Bounds(low, low, 1.0 - x, "bound", engine="renyi")


def renyi_from_zcdp(rho: Any, orders: Any) -> np.ndarray:
    """The Rényi divergences that rho-zCDP bounds: `rho alpha` at orders alpha >= 1 [Bun and Steinke 2016].

    rho : >= 0, any shape.  orders : (O,).  Returns an array (O, ...), a bound.

    >>> renyi_from_zcdp(0.5, [2.0, 4.0]).tolist()
    [1.0, 2.0]
    """
    rho, orders = np.asarray(check("rho", rho, NON_NEGATIVE)), np.asarray(check("orders", orders, POSITIVE))
    return np.multiply.outer(orders, rho)


def zcdp_from_renyi(orders: Any, values: Any) -> Bounds:
    """The smallest rho with R_alpha <= rho alpha at the given orders above 1; kind "estimate".

    Between the orders nothing is checked, so `lower` is a lower bound of rho (if values are exact) and `upper`
    repeats it; `jaxacct.profile(mechanism).zcdp()` is certified for all orders.

    >>> float(zcdp_from_renyi([2.0, 4.0], [1.0, 2.4]).estimate)
    0.6
    """
    orders, values = _curve(orders, values, 0)
    rho = np.max(np.where(orders > 1.0, values / orders, 0.0), axis=0)
    return Bounds(rho, rho, rho, "estimate", engine="renyi")


def epsilon_from_zcdp(rho: Any, delta: Any) -> Bounds:
    """eps such that rho-zCDP gives (eps, delta)-DP, the Rényi conversion minimised over orders; kind "bound".

    Never above the simpler `rho + 2 sqrt(rho log(1/delta))`.  rho : > 0.  delta : in (0, 1).  They broadcast.

    >>> float(epsilon_from_zcdp(0.5, 1e-5).upper.round(4))
    4.7284
    """
    rho, delta = np.broadcast_arrays(check("rho", rho, POSITIVE), check("delta", delta, DELTA))
    centre = np.sqrt(np.log(1.0 / delta) / rho)
    c = np.multiply.outer(np.geomspace(0.02, 50.0, 1500), centre)
    eps = np.min(rho * (1.0 + c) + (log_kappa(c) - np.log(delta)) / c, axis=0)
    simple = rho + 2.0 * np.sqrt(rho * np.log(1.0 / delta))
    eps = np.maximum(np.minimum(eps, simple), 0.0) * (1.0 + 1e-13)
    return Bounds(np.zeros_like(eps), eps, eps, "bound", engine="renyi")


def delta_from_zcdp(rho: Any, epsilon: Any) -> Bounds:
    """delta such that rho-zCDP gives (eps, delta)-DP; arguments as `epsilon_from_zcdp`, epsilon >= 0.

    >>> bool(delta_from_zcdp(0.5, epsilon_from_zcdp(0.5, 1e-5).upper).upper < 1.0001e-5)
    True
    """
    rho, eps = np.broadcast_arrays(check("rho", rho, POSITIVE), check("epsilon", epsilon, NON_NEGATIVE))
    centre = np.maximum(eps / rho, 1.0) / 2.0
    c = np.multiply.outer(np.geomspace(0.02, 50.0, 1500), centre)
    log_delta = np.min(c * (rho * (1.0 + c) - eps) + log_kappa(c), axis=0)
    delta = np.minimum(np.exp(np.minimum(log_delta, 0.0)) * (1.0 + 1e-12), 1.0)
    return Bounds(np.zeros_like(delta), delta, delta, "bound", engine="renyi")


def _curve(orders: Any, values: Any, trailing: int) -> tuple[np.ndarray, np.ndarray]:
    """Orders shaped to broadcast along the first axis of values, and the values."""
    orders = np.atleast_1d(check("orders", orders, POSITIVE))
    values = np.asarray(values, np.float64)
    if np.isnan(values).any() or (values < 0).any():
        raise InputError("values holds a negative number or NaN and must be >= 0; give upper bounds of the divergences")
    if orders.ndim != 1 or values.shape[:1] != orders.shape:
        raise InputError(
            f"orders of shape {orders.shape} and values of shape {values.shape} do not match; "
            "give orders (O,) and values (O, ...)"
        )
    extra = max(trailing - (values.ndim - 1), 0)
    values = values.reshape(orders.shape + (1,) * extra + values.shape[1:])
    return orders.reshape(orders.shape + (1,) * (values.ndim - 1)), values


def _excess(orders: np.ndarray, allowed: np.ndarray, p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """Whether the Rényi divergence of Bernoulli(p) from Bernoulli(q) exceeds what is allowed at some order."""
    found = np.zeros(np.broadcast_shapes(p.shape, q.shape), bool)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        logs = [np.log(v) for v in (p, q, 1.0 - p, 1.0 - q)]
        for alpha, limit in zip(orders, allowed, strict=True):
            if alpha == 1.0:
                terms = [np.where(a > 0, a * (la - lb), 0.0) for a, la, lb in ((p, *logs[:2]), (1.0 - p, *logs[2:]))]
                divergence = terms[0] + terms[1]
            else:
                each = [alpha * la + (1.0 - alpha) * lb for la, lb in (logs[:2], logs[2:])]
                each = [np.where(np.isnan(e), -np.inf, e) for e in each]
                divergence = np.logaddexp(*each) / (alpha - 1.0)
            found |= divergence > limit
    return found
