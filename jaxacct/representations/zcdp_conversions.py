"""Zero-concentrated guarantees (zCDP) turned into Rényi divergences and (eps, delta), and back."""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxacct.core.bounds import Bounds
from jaxacct.core.validation import DELTA, NON_NEGATIVE, POSITIVE, check
from jaxacct.representations.renyi_conversions import UP_EXPONENTIAL, log_kappa, orders_and_values

__all__ = ["delta_from_zcdp", "epsilon_from_zcdp", "renyi_from_zcdp", "zcdp_from_renyi"]

_UP = 1.0 + 1e-13
"""Outward factor for an epsilon that is minimised over orders, with two logarithms."""
_ORDERS_ZCDP = np.geomspace(0.02, 50.0, 1500)
"""Orders less 1 that are tried, relative to the best order of the simple bound."""


def renyi_from_zcdp(rho: Any, orders: Any) -> np.ndarray:
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


def zcdp_from_renyi(orders: Any, values: Any) -> Bounds:
    """The smallest rho with R_alpha <= rho alpha at the given orders above 1; kind "estimate".

    Between the orders nothing is checked.  If the values are exact, the number is a lower bound of rho.
    `jaxacct.profile(mechanism).zcdp()` is certified for all orders.

    Parameters
    ----------
    orders, values : array_like
        As in `epsilon_from_renyi`.

    Returns
    -------
    Bounds
        kind "estimate"; lower, estimate and upper are one number.

    Raises
    ------
    InputError
        Invalid values, or orders and values that do not match.

    References
    ----------
    Bun and Steinke (2016), Definition 1.1.

    >>> float(zcdp_from_renyi([2.0, 4.0], [1.0, 2.4]).estimate)
    0.6
    """
    orders, values = orders_and_values(orders, values, 0)
    rho = np.max(np.where(orders > 1.0, values / orders, 0.0), axis=0)
    return Bounds(rho, rho, rho, "estimate", engine="renyi")


def epsilon_from_zcdp(rho: Any, delta: Any) -> Bounds:
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
    eps = np.maximum(np.minimum(eps, simple), 0.0) * _UP
    eps = np.where(delta**2 * (1.0 - 1e-14) >= _square_of_variation(rho), 0.0, eps)
    return Bounds(np.zeros_like(eps), eps, eps, "bound", engine="renyi")


def delta_from_zcdp(rho: Any, epsilon: Any) -> Bounds:
    """delta such that rho-zCDP gives (eps, delta)-DP: the Rényi conversion minimised over orders; at most TV.

    TV is the total variation that rho allows, at most `sqrt(rho/2)`.  `jaxacct.delta(ZCDP(rho), epsilon)` is smaller at
    small epsilons.

    Parameters
    ----------
    rho : array_like, > 0
    epsilon : array_like, >= 0
        They broadcast.

    Returns
    -------
    Bounds
        kind "bound": `upper` is the guarantee, and `lower` is 0.

    References
    ----------
    Canonne, Kamath and Steinke (2020), Proposition 12.

    >>> bool(delta_from_zcdp(0.5, epsilon_from_zcdp(0.5, 1e-5).upper).upper < 1.0001e-5)
    True
    """
    rho, eps = np.broadcast_arrays(check("rho", rho, POSITIVE), check("epsilon", epsilon, NON_NEGATIVE))
    centre = np.maximum(eps / rho, 1.0) / 2.0
    c = np.multiply.outer(_ORDERS_ZCDP, centre)
    log_delta = np.min(c * (rho * (1.0 + c) - eps) + log_kappa(c), axis=0)
    most = np.minimum(np.exp(np.minimum(log_delta, 0.0)), np.sqrt(_square_of_variation(rho)))
    delta = np.minimum(most * UP_EXPONENTIAL, 1.0)
    return Bounds(np.zeros_like(delta), delta, delta, "bound", engine="renyi")


def _square_of_variation(rho: np.ndarray) -> np.ndarray:
    """The square of the total variation that rho allows, by Pinsker and by Bretagnolle and Huber."""
    return np.minimum(0.5 * rho, -np.expm1(-rho))
