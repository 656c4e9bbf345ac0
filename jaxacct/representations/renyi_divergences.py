"""Certified Rényi divergences and zCDP of a mechanism, Rényi accounting, and conversions of Rényi guarantees.

Rényi accounting serves for comparison, and for curves computed elsewhere: the certified engines give tighter bounds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxacct.core.bounds import Bounds
from jaxacct.core.floats import ROUNDOFF, SMALLEST_POSITIVE
from jaxacct.core.types import ArrayLike, Leaf
from jaxacct.core.validation import (
    DELTA,
    NON_NEGATIVE,
    POSITIVE,
    PROBABILITY,
    InputError,
    check,
    refuse_tracers,
    with_hints,
)
from jaxacct.engines import loss_moments
from jaxacct.engines.loss_moments import Interval, log_moments
from jaxacct.kernels.contour.core import log_kappa
from jaxacct.mechanisms import Components, Mechanism, batch_shape, components, directions
from jaxacct.mechanisms.base import on_batch, register

UP_EXPONENTIAL = 1.0 + 1e-12
"""Factor that makes a computed e^x an upper bound. For |x| <= 745 the relative error of e^x is well below 1e-12."""
CUT = 1e-290
"""A mass at infinity below this is a tail that was cut off, as for discrete Gaussian noise. A larger mass is a leak."""
NEAR_ONE = 1e-5
"""Distance d. The divergences of the orders 1 - d and 1 + d bracket the divergence of an order from 1 to 1 + d."""
LEAST_ORDER, MOST_ORDER = 1e-12, 1e150
"""Rounding spoils the moments of smaller orders, and the moments of larger orders may overflow. The divergence rises
with the order. So its value at LEAST_ORDER is an upper bound at smaller orders, and its value at MOST_ORDER is a lower
bound at larger orders."""
OK_WIDTH = 1e-3
"""Largest relative width of a bracket whose status is "ok"."""
_GRID = np.concatenate([np.geomspace(1e-5, 0.1, 40), np.geomspace(0.11, 1e5, 260)])
"""Values of alpha - 1, dense where R_alpha/alpha usually has its maximum. Convexity bounds it between the values."""
ORDERS = 1.0 + np.geomspace(1e-2, 1e3, 101)
"""Default orders of a curve, from 1.01 to 1001. Any set of orders gives a valid bound of epsilon or delta."""


@register
@dataclass(frozen=True)
class RenyiCurve:
    """Upper bounds of a mechanism's Rényi divergences at some orders. A composition, also adaptive, adds the curves.

    Parameters
    ----------
    orders : array (O,)
    values : array (O, ...), in nats

    References
    ----------
    Mironov (2017), Proposition 1.

    >>> gaussian = RenyiCurve(np.array([2.0, 4.0]), np.array([1.0, 2.0]))
    >>> (gaussian + 3 * gaussian).values.tolist()
    [4.0, 8.0]
    """

    orders: Leaf
    values: Leaf

    def __add__(self, other: RenyiCurve) -> RenyiCurve:
        """Return the curve of the composition of two mechanisms, from their two curves at the same orders."""
        if not np.array_equal(self.orders, other.orders):
            raise InputError("the curves have different orders; evaluate both at the same orders")
        return RenyiCurve(self.orders, self.values + other.values)

    def __mul__(self, times: Any) -> RenyiCurve:
        """Return the curve of `times` composed runs of the mechanism that has this curve."""
        return RenyiCurve(self.orders, self.values * np.asarray(check("times", times, NON_NEGATIVE)))

    __rmul__ = __mul__

    def epsilon(self, delta: ArrayLike) -> Bounds:
        """Return the epsilon at `delta` that `epsilon_from_renyi` derives from this curve."""
        return epsilon_from_renyi(self.orders, self.values, delta)

    def delta(self, epsilon: ArrayLike) -> Bounds:
        """Return the delta at `epsilon` that `delta_from_renyi` derives from this curve."""
        return delta_from_renyi(self.orders, self.values, epsilon)

    def tradeoff(self, fpr: ArrayLike) -> Bounds:
        """Return `tradeoff_from_renyi` at `fpr`. The values must bound both directions, R(P || Q) and R(Q || P)."""
        return tradeoff_from_renyi(self.orders, self.values, fpr)


def renyi_curve(mechanism: Mechanism, orders: ArrayLike = ORDERS, relation: str = "add_or_remove_one") -> RenyiCurve:
    """Return the Rényi curve of a mechanism: the upper ends of `renyi_divergence`.

    Parameters
    ----------
    mechanism : Mechanism
    orders : array_like (O,), > 0
    relation : {"add_or_remove_one", "add_one", "remove_one", "replace_one", "zero_out"}

    Returns
    -------
    RenyiCurve with values of shape (O, *batch shape of the mechanism)

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
def rdp_epsilon(
    mechanism: Mechanism, delta: ArrayLike, *, orders: ArrayLike | None = None, relation: str = "add_or_remove_one"
) -> Bounds:
    """Bound eps of a mechanism by Rényi accounting, with the best order in each direction of the relation.

    In one direction `eps = min over c > 0 of (K(c) + log kappa(c) - log(delta - delta_inf))/c`. Here c is alpha - 1,
    kappa(c) is c^c/(1+c)^{1+c}, and delta_inf is the probability of an infinite loss. K(c) = log E_P[e^{cL}; L < inf]
    is the log moment of the loss L, rounded up by a bound of its error. If no loss is infinite and delta^2 is at least
    R/2 or 1 - e^-R for the divergence R of an order, eps is 0. The answer is the largest eps over the directions.

    Parameters
    ----------
    mechanism : Mechanism
    delta : array_like in (0, 1); broadcasts with the mechanism's fields
    orders : array_like (O,), > 1; by default a wide grid, and more orders around its best
    relation : {"add_or_remove_one", "add_one", "remove_one", "replace_one", "zero_out"}

    Returns
    -------
    Bounds
        kind "bound" with lower 0. Where delta <= delta_inf, upper is inf and the status is "mass_at_infinity".

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
def rdp_delta(
    mechanism: Mechanism, epsilon: ArrayLike, *, orders: ArrayLike | None = None, relation: str = "add_or_remove_one"
) -> Bounds:
    """Bound delta of a mechanism at eps >= 0 by Rényi accounting, with the best order in each direction.

    In one direction `delta = delta_inf + min over c > 0 of kappa(c) e^{K(c) - c eps}`, in the symbols of `rdp_epsilon`.
    If no loss is infinite, delta^2 is also at most R/2 and 1 - e^-R, where R is the divergence of any order. The answer
    is the largest delta over the directions.

    Parameters
    ----------
    mechanism : Mechanism
    epsilon : array_like, >= 0; broadcasts with the mechanism's fields
    orders : array_like (O,), > 1; by default a wide grid, and more orders around its best
    relation : {"add_or_remove_one", "add_one", "remove_one", "replace_one", "zero_out"}

    Returns
    -------
    Bounds of kind "bound" with lower 0

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


def _orders_less_one(orders: Any) -> np.ndarray | None:
    """Return the user's orders, each reduced by 1. Return None if the user gave no orders."""
    if orders is None:
        return None
    grid = np.atleast_1d(check("orders", orders, POSITIVE))
    if grid.size == 0:
        raise InputError("orders is empty; give at least one order above 1, or leave it out")
    if np.any(grid <= 1.0):
        raise InputError(f"orders = {float(np.min(grid))!r} must be > 1; use orders above 1")
    return np.asarray(grid - 1.0)


def renyi_divergence(mechanism: Mechanism, order: ArrayLike, relation: str = "add_or_remove_one") -> Bounds:
    """Compute the Rényi divergence of order alpha of the dominating pair (P, Q) of a mechanism.

    It is `R_alpha(P || Q) = log E_Q[(dP/dQ)^alpha] / (alpha - 1)` in nats, and at alpha = 1 the Kullback-Leibler
    divergence. The answer is the largest over the directions of the relation. The mechanism is (alpha, upper)-RDP.

    Parameters
    ----------
    mechanism : Mechanism
    order : array_like, finite, > 0, whole or not; broadcasts with the mechanism's fields
    relation : {"add_or_remove_one", "add_one", "remove_one", "replace_one", "zero_out"}

    Returns
    -------
    Bounds
        kind "certified", or "bound" with lower 0 if the pair only bounds the mechanism. Where order >= 1 and an
        infinite loss has positive probability, upper is inf. If this probability is at least 1e-290, a certified
        bracket also has lower inf, and status "mass_at_infinity". Any other bracket has status "width" if upper is inf,
        or if the bracket is certified and its relative width exceeds 1e-3. Certified brackets at orders below 1e-12
        are so wide.

    References
    ----------
    Mironov (2017); Mironov, Talwar and Zhang (2019).  Errors: jaxacct/representations/README.md, "Moments".

    >>> import jaxacct as ja
    >>> renyi_divergence(ja.Gaussian(2.0), [2.0, 8.0]).upper.round(9)
    array([0.25, 1.  ])
    """
    refuse_tracers("renyi_divergence", "jaxacct.kernels.law.cumulants", mechanism=mechanism, order=order)
    order = check("order", order, POSITIVE)
    shape, each, flat = sides(mechanism, order, "order", relation)
    low, high = np.full(flat.shape, -np.inf), np.zeros(flat.shape)
    for parts in each:
        side = _divergence(parts, flat)
        low, high = np.maximum(low, side.low), np.maximum(high, side.high)
    low = np.minimum(np.maximum(low, 0.0), high)
    return _answer(mechanism, relation, low.reshape(shape), high.reshape(shape))


def _answer(mechanism: Mechanism, relation: str, low: np.ndarray, high: np.ndarray) -> Bounds:
    """Return the `Bounds` with the ends `low` and `high`. If the mechanism's kind is "bound", 0 replaces `low`."""
    # composed=True: where no pair of neighbours has the law of the loss of (P, Q), the kind is "bound"
    kind = mechanism.kind_under(relation, composed=True)
    certified = kind == "certified"
    low = np.fmax(low, 0.0) if certified else np.zeros_like(low)
    high = np.where(np.isnan(high), np.inf, high)
    with np.errstate(invalid="ignore"):
        narrow = np.isfinite(high) & ((high - low <= OK_WIDTH * high) | (not certified))
        middle = np.where(np.isinf(high), low, np.clip(0.5 * (low + high), low, high)) if certified else high
    status = np.where(np.isinf(low), "mass_at_infinity", np.where(narrow, "ok", "width"))
    return Bounds(low, middle, high, kind, status, "quadrature")


def zero_concentrated(mechanism: Mechanism, relation: str = "add_or_remove_one") -> Bounds:
    """Compute the smallest rho for which the dominating pair is rho-zCDP: `sup_{alpha > 1} R_alpha / alpha`.

    The bracket holds for all orders. Between two orders of a grid the convexity of K(c) = c R_{1+c} bounds R_alpha.
    Beyond the grid R_alpha/alpha is at most n/(2 sigma^2) + l/a. Here n Gaussian steps have noise multiplier sigma, l
    is the largest loss of the other parts, and a is the last order of the grid. Poisson sampling of a Gaussian does not
    make rho smaller: R_alpha/alpha tends to n/(2 sigma^2) at high orders.

    Parameters
    ----------
    mechanism : Mechanism
    relation : {"add_or_remove_one", "add_one", "remove_one", "replace_one", "zero_out"}

    Returns
    -------
    Bounds
        kind "certified", or "bound" with lower 0 if the pair only bounds the mechanism. Where an infinite loss has
        positive probability, upper is inf. If this probability is at least 1e-290, a certified bracket also has lower
        inf.

    References
    ----------
    Bun and Steinke (2016).  Errors: jaxacct/representations/README.md, "Moments".

    >>> import jaxacct as ja
    >>> round(float(zero_concentrated(ja.repeat(ja.Gaussian(2.0), 8)).upper), 9)
    1.0
    """
    refuse_tracers("zero_concentrated", "jaxacct.kernels.law.cumulants", mechanism=mechanism)
    shape = batch_shape(mechanism)
    low, high = np.zeros(int(np.prod(shape))), np.zeros(int(np.prod(shape)))
    for parts in _each_direction(mechanism, relation):
        side = _largest_ratio(parts)
        low, high = np.maximum(low, side.low), np.maximum(high, side.high)
    return _answer(mechanism, relation, low.reshape(shape), high.reshape(shape))


def sides(
    mechanism: Mechanism, values: float | np.ndarray, name: str, relation: str
) -> tuple[tuple[int, ...], list[Components], np.ndarray]:
    """Broadcast values against mechanisms. Return (shape, components of each direction, values), the last two flat."""
    shape, rows, flat = on_batch(mechanism, name, values)
    least_order = np.min(flat, initial=np.inf) if name == "order" else 1.0
    return shape, [parts.take(rows) for parts in _each_direction(mechanism, relation, least_order)], flat


def _each_direction(mechanism: Mechanism, relation: str, least_order: float = 1.0) -> list[Components]:
    """Return the components of a relation's directions; "remove" alone where its divergences are the larger ones."""
    first, *rest = directions(mechanism, relation)
    parts = components(mechanism, relation, first)
    if first == "remove" and least_order >= 0.5 and not np.any(parts.finite_n):  # README.md, on directions
        return [parts]
    return [parts, *(components(mechanism, relation, d) for d in rest)]


@np.errstate(over="ignore", invalid="ignore")
def _divergence(parts: Components, order: np.ndarray) -> Interval:
    used = np.maximum(order, LEAST_ORDER)
    at_one = (order >= 1.0) & (order < 1.0 + NEAR_ONE)
    c = np.where(at_one, NEAR_ONE, used - 1.0)
    moments = log_moments(parts, c)
    first, second = moments.low / c, moments.high / c
    lost = np.isnan(first) | np.isnan(second)  # True where c (c + 1) overflows, so that the moments are NaN
    if lost.any():
        least = log_moments(parts.take(lost), np.full(int(lost.sum()), MOST_ORDER)).low / MOST_ORDER
        first[lost] = np.nan_to_num(least, nan=0.0)
        second[lost] = np.inf
    low, high = np.minimum(first, second), np.maximum(first, second)
    if at_one.any():
        low[at_one] = log_moments(parts.take(at_one), np.full(int(at_one.sum()), -NEAR_ONE)).high / -NEAR_ONE
    # Near order 0 the divergence is about proportional to the order. So the rounding of `order - 1` changes it by a
    # relative error of about ROUNDOFF/order.
    slack = 4.0 * ROUNDOFF * (1.0 + 1.0 / used)
    low, high = low - slack * np.abs(low), high + slack * np.abs(high)
    low = np.where(order < used, 0.0, low)
    unsampled = (order * _limit(parts) + _largest_bounded(parts)) * (1.0 + 1e-12)
    high = np.where(np.isfinite(high) | (order < 1.0), high, unsampled)
    leaks, cut = (x & (order >= 1.0) for x in _leaks(parts))
    return Interval(np.where(leaks, np.inf, low), np.where(leaks | cut, np.inf, high))


@np.errstate(over="ignore", invalid="ignore", divide="ignore")
def _largest_ratio(parts: Components) -> Interval:
    """Bracket sup R_alpha/alpha over alpha > 1. It equals `sup_{c > 0} K(c)/(c (c + 1))`, where K(c) = c R_{1+c}."""
    size, grid = parts.mu2.size, _GRID
    rows, orders = np.repeat(np.arange(size), grid.size), np.tile(grid, size)
    k_low, k_high = (x.reshape(size, grid.size) for x in log_moments(parts.take(rows), orders))
    limit = _limit(parts)
    ratio = grid * (grid + 1.0)
    low = np.maximum(np.max(k_low / ratio, axis=1), limit * (1.0 - 8.0 * ROUNDOFF))
    # For 0 < c <= c_0 = grid[0], K(c) <= c K(c_0)/c_0 since K is convex. So K(c)/(c (c + 1)) is at most `first`.
    first = k_high[:, 0] / grid[0]
    # K lies below its chords A + B c, and (A + B c)/(c (c + 1)) is largest at an end or where B c^2 + 2 A c + A = 0.
    slope = (k_high[:, 1:] - k_high[:, :-1]) / np.diff(grid)
    intercept = np.minimum(k_high[:, :-1] - slope * grid[:-1], 0.0)
    turn = (-intercept + np.sqrt(intercept**2 - intercept * slope)) / slope
    inside = (turn > grid[:-1]) & (turn < grid[1:])
    peak = np.where(inside, (intercept + slope * turn) / (turn * (turn + 1.0)), 0.0)
    cells = np.maximum(np.max(k_high / ratio, axis=1), np.max(np.nan_to_num(peak, nan=np.inf), axis=1))
    high = np.maximum(np.maximum(first, cells), limit + _largest_bounded(parts) / (1.0 + grid[-1]))
    finite = parts.finite_n > 0
    # The last finite part may represent a zCDP guarantee. Then `limit + xi` already bounds R_alpha/alpha of this part.
    finite[:, -1:] &= ~parts.guaranteed()[:, None]
    known = ~np.any(np.concatenate([parts.gauss_n > 0, parts.laplace_n > 0, finite], axis=1), axis=1)
    high = np.where(known, limit + parts.xi, high) * (1.0 + 1e-12)
    leaks, cut = _leaks(parts)
    low = np.minimum(low, high)
    return Interval(np.where(leaks, np.inf, low), np.where(leaks | cut, np.inf, high))


def _limit(parts: Components) -> np.ndarray:
    """Return R_alpha/alpha of all Gaussian parts as if they were not sampled, plus the rho of a zCDP guarantee."""
    used = parts.gauss_n > 0
    steps = np.where(used, parts.gauss_n / np.where(used, parts.gauss_sigma, 1.0) ** 2, 0.0)
    return 0.5 * (parts.mu2 + np.sum(steps, axis=1)) + parts.rho


def _leaks(parts: Components) -> tuple[np.ndarray, np.ndarray]:
    """Return, per row, whether the probability of an infinite loss is at least CUT, and whether it is in (0, CUT)."""
    # A zCDP guarantee bounds the moments even if a tail was cut off, so in its row the second result is False.
    lost = parts.log_survival < np.where(parts.guaranteed(), -CUT, 0.0)
    cut = lost & (parts.log_survival > -CUT)
    return lost & ~cut, cut


def _largest_bounded(parts: Components) -> np.ndarray:
    """Return the largest total loss of Laplace and finite parts, at least 0. A (xi, rho)-zCDP guarantee adds xi."""
    rate, width = parts.laplace_q, 1.0 / parts.laplace_scale
    laplace = np.sum(parts.laplace_n * np.where(parts.laplace_n > 0, width, 0.0) * np.where(rate > 0, 1.0, 0.0), axis=1)
    top = np.max(np.where(parts.finite_mass > 0, parts.finite_loss, -np.inf), axis=2, initial=-np.inf)
    each = parts.finite_n * np.where(parts.finite_n > 0, top, 0.0)
    if each.shape[1]:
        each[:, -1] = np.where(parts.guaranteed(), parts.xi, each[:, -1])
    return np.maximum(laplace + np.sum(each, axis=1), 0.0)


def epsilon_from_renyi(orders: ArrayLike, values: ArrayLike, delta: ArrayLike) -> Bounds:
    """Return eps such that every mechanism with Rényi divergences `values` at `orders` is (eps, delta)-DP.

    `eps = min over alpha > 1 of R + log((alpha-1)/alpha) - (log delta + log alpha)/(alpha-1)`, where R is the
    divergence of order alpha. If `delta^2 >= 1 - e^-R` for some alpha >= 1, then eps is 0.

    Parameters
    ----------
    orders : array_like (O,), > 0; orders below 1 are not used
    values : array_like (O,) or (O, ...), >= 0; upper bounds of the divergences in nats, inf allowed
    delta : array_like in (0, 1); broadcasts with `values[0]`

    Returns
    -------
    Bounds of kind "bound": `upper` is the guarantee, and `lower` is 0

    References
    ----------
    Canonne, Kamath and Steinke (2020), Proposition 12. For the case eps = 0: Bretagnolle and Huber (1979).

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
    """Return delta such that every mechanism with Rényi divergences `values` at `orders` is (eps, delta)-DP.

    `delta = min over alpha > 1 of e^{(alpha-1)(R - eps)} (1 - 1/alpha)^{alpha-1} / alpha`, where R is the divergence of
    order alpha. The number 1 and, for every alpha >= 1, `sqrt(1 - e^-R)` are valid too. The smallest is returned.

    Parameters
    ----------
    orders, values : array_like, as in `epsilon_from_renyi`
    epsilon : array_like, >= 0; broadcasts with `values[0]`

    Returns
    -------
    Bounds of kind "bound": `upper` is the guarantee, and `lower` is 0

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
    least = np.minimum(np.min(each, axis=0), np.sqrt(-np.expm1(-near))) * UP_EXPONENTIAL
    delta = np.where(near > 0.0, np.minimum(least + SMALLEST_POSITIVE, 1.0), 0.0)  # e^x may underflow to 0
    return Bounds(np.zeros_like(delta), delta, delta, "bound", engine="renyi")


def tradeoff_from_renyi(
    orders: ArrayLike, values: ArrayLike, fpr: ArrayLike, *, both_directions: bool = True
) -> Bounds:
    """Return the trade-off function f that Rényi divergences imply. f is the largest lower bound that any order gives.

    A test of false positive rate x and false negative rate y is positive with probability 1 - y under P, and x under Q.
    Let `D_alpha(p, q)` be the Rényi divergence of Bernoulli(p) from Bernoulli(q), and R_alpha the value at order alpha.
    A test is a post-processing, so `D_alpha(1-y, x) <= R_alpha` at every order, also at orders of at most 1. If the
    values bound both directions, `D_alpha(x, 1-y) <= R_alpha` too.

    Parameters
    ----------
    orders, values : array_like (O,), orders > 0, values >= 0 as in `epsilon_from_renyi`
    fpr : array_like in [0, 1]
    both_directions : bool; whether the values bound both directions, as under a symmetric relation

    Returns
    -------
    Bounds
        kind "bound", in the shape of fpr. `lower` is the guarantee f: no test has a smaller false negative rate.
        `upper` is 1 - fpr, which every trade-off function obeys.

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
    allowed = values * UP_EXPONENTIAL + 1e-15  # the values, increased by more than the rounding errors of `_excess`
    low, high = np.zeros(x.shape), 1.0 - x
    for _ in range(60):  # after 60 halvings `high - low` is at most 2^-60, less than the rounding error of 1
        y = 0.5 * (low + high)
        excess = _excess(orders, allowed, 1.0 - y, x)
        if both_directions:
            excess |= _excess(orders, allowed, x, 1.0 - y)
        low, high = np.where(excess, y, low), np.where(excess, high, y)
    return Bounds(low, low, 1.0 - x, "bound", engine="renyi")


def orders_and_values(orders: Any, values: Any, trailing: int) -> tuple[np.ndarray, np.ndarray]:
    """Return arrays that broadcast: orders (O, 1, ...), and values with at least `trailing` axes after the first."""
    orders = np.atleast_1d(check("orders", orders, POSITIVE))
    values = np.asarray(values, np.float64)
    if np.isnan(values).any() or (values < 0).any():
        raise InputError("values holds a negative number or NaN and must be >= 0; give upper bounds of the divergences")
    if not orders.size:
        raise InputError("orders is empty; give at least one order")
    if orders.ndim != 1 or values.shape[:1] != orders.shape:
        raise InputError(
            f"orders of shape {orders.shape} and values of shape {values.shape} do not match; "
            "give orders (O,) and values (O, ...)"
        )
    values = values.reshape(orders.shape + (1,) * max(trailing - (values.ndim - 1), 0) + values.shape[1:])
    return orders.reshape(orders.shape + (1,) * (values.ndim - 1)), values


def _excess(orders: np.ndarray, allowed: np.ndarray, p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """Return, per (p, q), whether the divergence of Bernoulli(p) from Bernoulli(q) exceeds `allowed` at some order."""
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
