"""Rényi and zero-concentrated guarantees turned into (eps, delta) and trade-off functions, and into each other.

Orders lie along the first axis of the values; any set of orders gives a valid bound, more orders a tighter one.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxacct.core.bounds import Bounds
from jaxacct.core.types import ArrayLike
from jaxacct.core.validation import (
    DELTA,
    NON_NEGATIVE,
    POSITIVE,
    PROBABILITY,
    InputError,
    check,
)

_ORDERS_ZCDP = np.geomspace(0.02, 50.0, 1500)
"""Orders less 1 that are tried, relative to the best order of the simple bound."""
UP_EXPONENTIAL = 1.0 + 1e-12
"""Rounds an exponential up: its relative error grows with the exponent, which is at most about 745."""


def log_kappa(c: np.ndarray) -> np.ndarray:
    """log kappa(c), kappa(c) = c^c/(1+c)^{1+c}: the least constant with (1 - e^-x)_+ <= kappa e^{cx} for all x."""
    return -np.log1p(c) - c * np.log1p(1.0 / c)


def epsilon_from_renyi(orders: ArrayLike, values: ArrayLike, delta: ArrayLike) -> Bounds:
    """eps such that a mechanism with Rényi divergences `values` at `orders` is (eps, delta)-DP.

    `eps = min over alpha > 1 of R + log((alpha-1)/alpha) - (log delta + log alpha)/(alpha-1)`, and 0 where
    `delta^2 >= 1 - e^-R` for some alpha >= 1.

    Parameters
    ----------
    orders : array_like (O,), > 0
        Orders below 1 are not used.
    values : array_like (O,) or (O, ...), >= 0
        Upper bounds of the divergences in nats; inf is allowed.
    delta : array_like in (0, 1)
        Broadcasts with `values[0]`.

    Returns
    -------
    Bounds
        kind "bound": `upper` is the guarantee, and `lower` is 0.

    References
    ----------
    Canonne, Kamath and Steinke (2020), Proposition 12; the case 0 is the inequality of Bretagnolle and Huber (1979).

    >>> orders = np.arange(2, 64)
    >>> float(epsilon_from_renyi(orders, orders / 2, 1e-5).upper.round(4))
    4.7527
    """
    delta = np.asarray(check("delta", delta, DELTA))
    orders, values = orders_and_values(orders, values, delta.ndim)
    c = np.where(orders > 1.0, orders - 1.0, 1.0)
    eps = np.where(orders > 1.0, values + (log_kappa(c) - np.log(delta)) / c, np.inf)
    eps = np.maximum(np.min(eps, axis=0), 0.0)
    near = np.min(np.where(orders >= 1.0, values, np.inf), axis=0)
    eps = np.where(delta**2 * (1.0 - 1e-14) >= -np.expm1(-near), 0.0, eps * (1.0 + 1e-14))
    return Bounds(np.zeros_like(eps), eps, eps, "bound", np.where(np.isinf(eps), "width", "ok"), "renyi")


def delta_from_renyi(orders: ArrayLike, values: ArrayLike, epsilon: ArrayLike) -> Bounds:
    """delta such that a mechanism with Rényi divergences `values` at `orders` is (eps, delta)-DP.

    `delta = min over alpha > 1 of e^{(alpha-1)(R - eps)} (1 - 1/alpha)^{alpha-1} / alpha`, at most 1, and at most
    `sqrt(1 - e^-R)`.

    Parameters
    ----------
    orders, values : array_like
        As in `epsilon_from_renyi`.
    epsilon : array_like, >= 0
        Broadcasts with `values[0]`.

    Returns
    -------
    Bounds
        kind "bound": `upper` is the guarantee, and `lower` is 0.

    References
    ----------
    Canonne, Kamath and Steinke (2020), Proposition 12; Bretagnolle and Huber (1979).

    >>> float(delta_from_renyi([2.0, 8.0], [1.0, 4.0], 4.0).upper.round(6))
    0.012447
    """
    epsilon = np.asarray(check("epsilon", epsilon, NON_NEGATIVE))
    orders, values = orders_and_values(orders, values, epsilon.ndim)
    c = np.where(orders > 1.0, orders - 1.0, 1.0)
    with np.errstate(over="ignore"):
        each = np.where(orders > 1.0, np.exp(np.minimum(c * (values - epsilon) + log_kappa(c), 1.0)), 1.0)
    near = np.min(np.where(orders >= 1.0, values, np.inf), axis=0)
    delta = np.minimum(np.minimum(np.min(each, axis=0), np.sqrt(-np.expm1(-near))) * UP_EXPONENTIAL, 1.0)
    return Bounds(np.zeros_like(delta), delta, delta, "bound", engine="renyi")


def tradeoff_from_renyi(
    orders: ArrayLike, values: ArrayLike, fpr: ArrayLike, *, both_directions: bool = True
) -> Bounds:
    """The trade-off function that Rényi divergences imply: the largest lower bound that any order gives.

    A test with false positive rate x and false negative rate y is a post-processing.  The Rényi divergence of its
    Bernoulli laws therefore obeys `D_alpha(1-y, x) <= R_alpha` for every order alpha, and with both directions
    `D_alpha(x, 1-y) <= R_alpha`.  Orders in (1/2, 1) and 1 count as well.  An order of 1/2 or less says no more than
    the order 1 - alpha when both directions hold.

    Parameters
    ----------
    orders, values : array_like (O,)
        As in `epsilon_from_renyi`, of one configuration.
    fpr : array_like in [0, 1]
        False positive rates.
    both_directions : bool
        Whether the values bound both directions, as they do under a symmetric relation.

    Returns
    -------
    Bounds
        Of the shape of fpr, kind "bound": `lower` is the guarantee (the safe end of a bisection), `upper` is 1 - fpr.

    References
    ----------
    Zhu, Dong and Wang (2022), appendix F.1; Balle et al. (2020).

    >>> orders = np.array([0.6, 1.0, 2.0, 4.0])
    >>> float(tradeoff_from_renyi(orders, orders / 2, 0.1).lower.round(4))
    0.5068
    """
    orders, values = orders_and_values(orders, values, 0)
    if values.ndim > 1:
        raise InputError(f"values has shape {values.shape} and must be (O,) here; convert one configuration at a time")
    x = np.asarray(check("fpr", fpr, PROBABILITY))
    allowed = values * UP_EXPONENTIAL + 1e-15  # more than the rounding of `_excess`
    low, high = np.zeros(x.shape), 1.0 - x
    for _ in range(60):  # the ends then differ by less than a unit in the last place of 1
        y = 0.5 * (low + high)
        excess = _excess(orders, allowed, 1.0 - y, x)
        if both_directions:
            excess |= _excess(orders, allowed, x, 1.0 - y)
        low, high = np.where(excess, y, low), np.where(excess, high, y)
    return Bounds(low, low, 1.0 - x, "bound", engine="renyi")


def orders_and_values(orders: Any, values: Any, trailing: int) -> tuple[np.ndarray, np.ndarray]:
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
    """Whether the Rényi divergence of Bernoulli(p) from Bernoulli(q) exceeds the allowed value at some order."""
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


def renyi_from_zcdp(rho: ArrayLike, orders: ArrayLike) -> np.ndarray:
    """The Rényi divergences that rho-zCDP bounds: `rho alpha` at orders alpha >= 1.

    Parameters
    ----------
    rho : array_like, >= 0
    orders : array_like (O,), > 0

    Returns
    -------
    numpy.ndarray
        (O, *shape of rho): upper bounds of the divergences.

    References
    ----------
    Bun and Steinke (2016), Definition 1.1.

    >>> renyi_from_zcdp(0.5, [2.0, 4.0]).tolist()
    [1.0, 2.0]
    """
    rho, orders = np.asarray(check("rho", rho, NON_NEGATIVE)), np.asarray(check("orders", orders, POSITIVE))
    return np.multiply.outer(orders, rho)


def epsilon_from_zcdp(rho: ArrayLike, delta: ArrayLike) -> Bounds:
    """eps such that rho-zCDP gives (eps, delta)-DP: the Rényi conversion minimised over orders.

    It is never above the simpler `rho + 2 sqrt(rho log(1/delta))`.  `jaxacct.epsilon(ZCDP(rho), delta)` is smaller at
    large deltas.

    Parameters
    ----------
    rho : array_like, > 0
    delta : array_like in (0, 1)
        They broadcast.

    Returns
    -------
    Bounds
        kind "bound": `upper` is the guarantee, and `lower` is 0.

    References
    ----------
    Bun and Steinke (2016), Proposition 1.3; Canonne, Kamath and Steinke (2020), Proposition 12.

    >>> float(epsilon_from_zcdp(0.5, 1e-5).upper.round(4))
    4.7284
    """
    rho, delta = np.broadcast_arrays(check("rho", rho, POSITIVE), check("delta", delta, DELTA))
    centre = np.sqrt(np.log(1.0 / delta) / rho)
    c = np.multiply.outer(_ORDERS_ZCDP, centre)
    eps = np.min(rho * (1.0 + c) + (log_kappa(c) - np.log(delta)) / c, axis=0)
    simple = rho + 2.0 * np.sqrt(rho * np.log(1.0 / delta))
    eps = np.maximum(np.minimum(eps, simple), 0.0) * (1.0 + 1e-13)  # two logarithms are rounded
    # the square of the total variation that rho allows, by Pinsker and by Bretagnolle and Huber
    variation = np.minimum(0.5 * rho, -np.expm1(-rho))
    eps = np.where(delta**2 * (1.0 - 1e-14) >= variation, 0.0, eps)
    return Bounds(np.zeros_like(eps), eps, eps, "bound", engine="renyi")
