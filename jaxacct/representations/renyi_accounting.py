"""Rényi accounting as an engine of its own: curves that add, and epsilon and delta through the best order.

The answers are upper bounds, never below those of the certified engines.  They are here for comparison, for curves
that come from elsewhere, and for mechanisms with only a known Rényi guarantee.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.special import gammaln, logsumexp

from jaxacct.core.bounds import Bounds
from jaxacct.core.keywords import with_hints
from jaxacct.core.validation import (
    DELTA,
    NON_NEGATIVE,
    POSITIVE,
    PROBABILITY,
    Constraint,
    InputError,
    check,
    refuse_tracers,
)
from jaxacct.engines import loss_moments
from jaxacct.mechanisms import Mechanism, batch_shape
from jaxacct.mechanisms.base import register
from jaxacct.representations import renyi_conversions
from jaxacct.representations.renyi_divergences import renyi_divergence, sides

__all__ = ["RenyiCurve", "rdp_delta", "rdp_epsilon", "renyi_curve", "subsampled_renyi"]

ORDERS = 1.0 + np.geomspace(1e-2, 1e3, 101)
"""Default orders of a curve: 1.01 to 1001, evenly spread in the logarithm of the order less 1."""
_INTEGER = Constraint("use a whole number of 2 or more", 2, 4096, integral=True)


@register
@dataclass(frozen=True)
class RenyiCurve:
    """Upper bounds of Rényi divergences at some orders; the curves of composed mechanisms add, adaptive ones included.

    Parameters
    ----------
    orders : array (O,)
    values : array (O, ...)
        Upper bounds in nats, with the orders along the first axis.

    References
    ----------
    Mironov (2017), Proposition 1.

    >>> gaussian = RenyiCurve(np.array([2.0, 4.0]), np.array([1.0, 2.0]))
    >>> (gaussian + 3 * gaussian).values.tolist()
    [4.0, 8.0]
    """

    orders: Any
    values: Any

    def __add__(self, other: RenyiCurve) -> RenyiCurve:
        """Composition with another curve at the same orders."""
        if not np.array_equal(self.orders, other.orders):
            raise InputError("the curves have different orders; evaluate both at the same orders")
        return RenyiCurve(self.orders, self.values + other.values)

    def __mul__(self, times: Any) -> RenyiCurve:
        """Composition with itself `times` times."""
        return RenyiCurve(self.orders, self.values * np.asarray(check("times", times, NON_NEGATIVE)))

    __rmul__ = __mul__

    def epsilon(self, delta: Any) -> Bounds:
        """`epsilon_from_renyi` of this curve."""
        return renyi_conversions.epsilon_from_renyi(self.orders, self.values, delta)

    def delta(self, epsilon: Any) -> Bounds:
        """`delta_from_renyi` of this curve."""
        return renyi_conversions.delta_from_renyi(self.orders, self.values, epsilon)

    def tradeoff(self, fpr: Any) -> Bounds:
        """`tradeoff_from_renyi` of this curve, which must bound both directions."""
        return renyi_conversions.tradeoff_from_renyi(self.orders, self.values, fpr)


def renyi_curve(mechanism: Mechanism, orders: Any = ORDERS, relation: str = "add_or_remove_one") -> RenyiCurve:
    """The Rényi curve of a mechanism: the upper ends of `renyi_divergence`.

    Parameters
    ----------
    mechanism : Mechanism
    orders : array_like (O,), > 0
    relation : {"add_or_remove_one", "add_one", "remove_one", "replace_one", "zero_out"}

    Returns
    -------
    RenyiCurve
        With values (O, *batch shape of the mechanism).

    References
    ----------
    Mironov (2017).

    >>> import jaxacct as ja
    >>> renyi_curve(ja.Gaussian(1.0), [2.0, 4.0]).values.round(9).tolist()
    [1.0, 2.0]
    """
    orders = np.atleast_1d(check("orders", orders, POSITIVE))
    column = orders.reshape(-1, *(1,) * len(batch_shape(mechanism)))
    return RenyiCurve(orders, np.asarray(renyi_divergence(mechanism, column, relation).upper))


@with_hints
def rdp_epsilon(mechanism: Mechanism, delta: Any, *, orders: Any = None, relation: str = "add_or_remove_one") -> Bounds:
    """eps of a mechanism through Rényi accounting: the best order's bound, the larger over the directions.

    `eps = min over c > 0 of (K(c) + log kappa(c) - log(delta - delta_inf))/c` with c = alpha - 1 and
    kappa(c) = c^c/(1+c)^{1+c}.  K(c) is the log moment of the finite loss, evaluated with its error bound, and
    delta_inf is the mass at infinity.  eps is 0 where delta^2 is at least R/2 or 1 - e^-R for a divergence R.

    Parameters
    ----------
    mechanism : Mechanism
    delta : array_like in (0, 1)
        Broadcasts with the mechanism's fields.
    orders : array_like (O,), > 1, optional
        Used as they are; by default a wide grid that is refined around the best order.
    relation : {"add_or_remove_one", "add_one", "remove_one", "replace_one", "zero_out"}

    Returns
    -------
    Bounds
        kind "bound" with lower 0; infinite with status "mass_at_infinity" where delta <= delta_inf.

    References
    ----------
    Mironov (2017); Mironov, Talwar and Zhang (2019); Canonne, Kamath and Steinke (2020), Proposition 12.

    >>> import jaxacct as ja
    >>> float(rdp_epsilon(ja.Gaussian(1.0), 1e-5).upper.round(4))
    4.7284
    """
    refuse_tracers("rdp_epsilon", "jaxacct.kernels.law.cumulants", mechanism=mechanism, delta=delta)
    delta = check("delta", delta, DELTA)
    shape, each, flat = sides(mechanism, delta, "delta", relation)
    eps, chosen = np.zeros(flat.shape), _orders_less_one(orders)
    for parts in each:
        left = flat - parts.delta_infinity * (1.0 + 1e-14)
        side = loss_moments.least_epsilon(parts, np.where(left > 0, left, 1.0), chosen)
        eps = np.maximum(eps, np.where(left > 0, side, np.inf))
    status = np.where(np.isinf(eps), "mass_at_infinity", np.where(eps == 0, "zero", "ok"))
    eps, status = eps.reshape(shape), status.reshape(shape)
    return Bounds(np.zeros(shape), eps, eps, "bound", status, "renyi")


@with_hints
def rdp_delta(mechanism: Mechanism, epsilon: Any, *, orders: Any = None, relation: str = "add_or_remove_one") -> Bounds:
    """delta of a mechanism at eps >= 0 through Rényi accounting: the best order's bound, the larger over directions.

    `delta = delta_inf + min over c > 0 of kappa(c) e^{K(c) - c eps}`, with the symbols of `rdp_epsilon`.

    Parameters
    ----------
    mechanism : Mechanism
    epsilon : array_like, >= 0
        Broadcasts with the mechanism's fields.
    orders : array_like (O,), > 1, optional
        Used as they are; by default a wide grid that is refined around the best order.
    relation : {"add_or_remove_one", "add_one", "remove_one", "replace_one", "zero_out"}

    Returns
    -------
    Bounds
        kind "bound" with lower 0.

    References
    ----------
    Mironov (2017); Mironov, Talwar and Zhang (2019); Canonne, Kamath and Steinke (2020), Proposition 12.

    >>> import jaxacct as ja
    >>> float(rdp_delta(ja.Gaussian(1.0), 4.7284).upper.round(7))
    1e-05
    """
    refuse_tracers("rdp_delta", "jaxacct.kernels.law.cumulants", mechanism=mechanism, epsilon=epsilon)
    epsilon = check("epsilon", epsilon, NON_NEGATIVE)
    shape, each, flat = sides(mechanism, epsilon, "epsilon", relation)
    delta, chosen = np.zeros(flat.shape), _orders_less_one(orders)
    for parts in each:
        finite = loss_moments.least_delta(parts, flat, chosen)
        delta = np.maximum(delta, np.minimum(finite + parts.delta_infinity, 1.0) * (1.0 + 1e-15))
    delta = np.minimum(delta, 1.0).reshape(shape)
    return Bounds(np.zeros(shape), delta, delta, "bound", engine="renyi")


def subsampled_renyi(mechanism: Mechanism, sampling_probability: Any, order: Any) -> Bounds:
    """Rényi divergence of any mechanism Poisson sampled, from that of the mechanism itself, at whole orders.

    `R(alpha) <= 1/(alpha-1) log( (1-q)^{alpha-1} (alpha q - q + 1) + C(alpha,2) q^2 (1-q)^{alpha-2} e^{R(2)}
    + 3 sum_{j=3}^{alpha} C(alpha,j) q^j (1-q)^{alpha-j} e^{(j-1) R(j)} )`, under add_or_remove_one.  This is looser
    than `renyi_divergence` of `PoissonSampled`.  It needs only the Rényi curve, and it holds for compositions that are
    sampled as a whole.

    Parameters
    ----------
    mechanism : Mechanism
        One configuration.
    sampling_probability : float in [0, 1]
    order : int from 2 to 4096

    Returns
    -------
    Bounds
        kind "bound" with lower 0.

    Raises
    ------
    InputError
        Invalid values, or a batch.

    References
    ----------
    Zhu and Wang (2019); Koskela and Kulkarni (2023), Theorem 4.

    >>> import jaxacct as ja
    >>> float(subsampled_renyi(ja.Gaussian(1.0), 0.01, 2).upper.round(9))
    0.000171813
    """
    q = float(check("sampling_probability", sampling_probability, PROBABILITY))
    alpha = int(check("order", order, _INTEGER))
    j = np.arange(2, alpha + 1)
    base = renyi_divergence(mechanism, j.astype(np.float64)).upper
    if np.shape(base) != j.shape:
        raise InputError("mechanism must be one configuration here; call once for each")
    if q == 1.0:
        return Bounds(0.0, base[-1], base[-1], "bound", engine="renyi")
    choose = gammaln(alpha + 1) - gammaln(j + 1) - gammaln(alpha - j + 1)
    with np.errstate(divide="ignore"):
        log_terms = choose + j * np.log(q) + (alpha - j) * np.log1p(-q) + (j - 1) * base + np.log(np.where(j > 2, 3, 1))
    first = (alpha - 1) * np.log1p(-q) + np.log1p((alpha - 1) * q)
    total = float(logsumexp(np.concatenate([[first], log_terms])))
    upper = max(total * (1.0 + 1e-12) + 1e-13, 0.0) / (alpha - 1)
    return Bounds(0.0, upper, upper, "bound", engine="renyi")


def _orders_less_one(orders: Any) -> np.ndarray | None:
    """The user's orders, each less 1."""
    if orders is None:
        return None
    grid = np.atleast_1d(check("orders", orders, POSITIVE))
    if grid.size == 0:
        raise InputError("orders is empty; give at least one order above 1, or leave it out")
    if np.any(grid <= 1.0):
        raise InputError(f"orders = {float(np.min(grid))!r} must be > 1; use orders above 1")
    return np.asarray(grid - 1.0)
