"""Rényi divergences of a mechanism and its zero-concentrated parameter, certified from the moments of its loss."""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxacct.core.bounds import Bounds
from jaxacct.core.floats import ROUNDOFF
from jaxacct.core.validation import POSITIVE, broadcast_shape, check, refuse_tracers
from jaxacct.engines.loss_moments import Interval, log_moments
from jaxacct.mechanisms import Components, Mechanism, batch_shape, components, directions

__all__ = ["renyi_divergence", "sides", "zero_concentrated"]

CUT = 1e-290
"""A mass at infinity below this stands for a tail that was cut off, as that of discrete Gaussian noise."""
NEAR_ONE = 1e-5
"""The divergence of order 1 is bracketed by those of the orders 1 -+ this, as divergences increase with the order."""
_GRID = np.concatenate([np.geomspace(1e-5, 0.1, 40), np.geomspace(0.11, 1e5, 260)])
"""Orders less 1 between which zCDP is bounded by convexity: dense about 1, where the largest ratio mostly lies."""
_NARROW_ZCDP = 1e-3
"""Relative width up to which a bracket of rho has the status "ok"."""


def renyi_divergence(mechanism: Mechanism, order: Any, relation: str = "add_or_remove_one") -> Bounds:
    """The Rényi divergence of order alpha of the dominating pair, the larger over the relation's directions.

    `R_alpha(P || Q) = log E_Q[(dP/dQ)^alpha] / (alpha - 1)`, in nats; alpha = 1 is the Kullback-Leibler divergence.
    This is what a mechanism is Rényi differentially private with.  For one Poisson sampled Gaussian it is exact at
    every order, fractional ones included.

    Parameters
    ----------
    mechanism : Mechanism
    order : array_like, finite, > 0
        Broadcasts with the mechanism's fields; the answer has their common shape.
    relation : {"add_or_remove_one", "add_one", "remove_one", "replace_one", "zero_out"}

    Returns
    -------
    Bounds
        kind "certified", or "bound" with lower 0 where the mechanism's pair only bounds it.  (inf, inf) with status
        "mass_at_infinity" where an infinite loss has positive probability and order >= 1.

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
    # a pair that joins several attains each delta(eps), but no pair of data sets has all of its loss
    kind = mechanism.kind_under(relation, composed=True)
    low = low if kind == "certified" else np.zeros_like(low)
    status = np.where(np.isinf(low), "mass_at_infinity", "ok")
    status = np.where(np.isinf(high) & np.isfinite(low), "width", status)
    middle = np.where(np.isinf(high), np.where(np.isinf(low), np.inf, low), 0.5 * (low + high))
    ends = [x.reshape(shape) for x in (low, np.clip(middle, low, high), high)]
    return Bounds(
        ends[0],
        ends[1],
        ends[2],
        kind=kind,
        status=status.reshape(shape),
        engine="quadrature",
    )


def zero_concentrated(mechanism: Mechanism, relation: str = "add_or_remove_one") -> Bounds:
    """The smallest rho for which the dominating pair is rho-zCDP: `sup_{alpha > 1} R_alpha / alpha`.

    The bracket holds for all orders: between grid points by convexity of K(c) = c R_{1+c}, beyond the last point by
    the largest bounded loss and by the unsampled Gaussian.  Poisson sampling a Gaussian does not improve rho: at high
    orders R_alpha/alpha tends to n/(2 sigma^2).

    Parameters
    ----------
    mechanism : Mechanism
    relation : {"add_or_remove_one", "add_one", "remove_one", "replace_one", "zero_out"}

    Returns
    -------
    Bounds
        kind "certified", or "bound" with lower 0 where the mechanism's pair only bounds it; infinite where a loss can
        be infinite.

    Raises
    ------
    InputError
        An unknown relation, or one that the mechanism does not define.

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
    for direction in directions(mechanism, relation):
        side = _largest_ratio(components(mechanism, relation, direction))
        low, high = np.maximum(low, side.low), np.maximum(high, side.high)
    low, high = low.reshape(shape), high.reshape(shape)
    kind = mechanism.kind_under(relation, composed=True)  # as in `renyi_divergence`
    low = low if kind == "certified" else np.zeros_like(low)
    with np.errstate(invalid="ignore"):
        narrow = np.isfinite(high) & (high - low <= _NARROW_ZCDP * high)
    status = np.where(np.isinf(low), "mass_at_infinity", np.where(narrow, "ok", "width"))
    middle = np.where(np.isinf(high), low, 0.5 * (low + np.where(np.isinf(high), low, high)))
    return Bounds(low, np.clip(middle, low, high), high, kind, status, "quadrature")


def sides(
    mechanism: Mechanism, values: float | np.ndarray, name: str, relation: str
) -> tuple[tuple[int, ...], list[Components], np.ndarray]:
    """The common shape of a mechanism and values, the components of every direction on it, the values flattened."""
    mine = batch_shape(mechanism)
    shape = broadcast_shape({"the mechanism": mine, name: np.shape(values)})
    rows = np.broadcast_to(np.arange(int(np.prod(mine))).reshape(mine), shape).reshape(-1)
    each = [components(mechanism, relation, d).take(rows) for d in directions(mechanism, relation)]
    return shape, each, np.broadcast_to(np.asarray(values, np.float64), shape).reshape(-1)


def _divergence(parts: Components, order: np.ndarray) -> Interval:
    at_one = order == 1.0
    c = np.where(at_one, NEAR_ONE, order - 1.0)
    moments = log_moments(parts, c)
    first, second = moments.low / c, moments.high / c
    low, high = np.minimum(first, second), np.maximum(first, second)
    if at_one.any():
        below = log_moments(parts.take(at_one), np.full(int(at_one.sum()), -NEAR_ONE))
        low[at_one] = below.high / -NEAR_ONE
    # order - 1 is rounded for orders near 0, where the divergence is proportional to the order
    slack = 4.0 * ROUNDOFF * (1.0 + 1.0 / order)
    low, high = low - slack * np.abs(low), high + slack * np.abs(high)
    leaks, cut = (x & (order >= 1.0) for x in _leaks(parts))
    return Interval(np.where(leaks, np.inf, low), np.where(leaks | cut, np.inf, high))


def _largest_ratio(parts: Components) -> Interval:
    """Bracket of `sup_{c > 0} K(c)/(c (c + 1))`."""
    size, grid = parts.mu2.size, _GRID
    rows, orders = np.repeat(np.arange(size), grid.size), np.tile(grid, size)
    moments = log_moments(parts.take(rows), orders)
    k_low, k_high = (x.reshape(size, grid.size) for x in moments)
    limit = 0.5 * (parts.mu2 + np.sum(parts.gauss_n / parts.gauss_sigma**2, axis=1)) + parts.rho
    ratio = grid * (grid + 1.0)
    low = np.maximum(np.max(k_low / ratio, axis=1), limit * (1.0 - 8.0 * ROUNDOFF))
    first = k_high[:, 0] / grid[0]  # K(c) <= c K(c_0)/c_0 on the first cell
    # the chord A + B c of a cell, over c (c + 1), is largest at an end or where B c^2 + 2 A c + A = 0
    slope = (k_high[:, 1:] - k_high[:, :-1]) / np.diff(grid)
    with np.errstate(invalid="ignore", divide="ignore"):
        intercept = np.minimum(k_high[:, :-1] - slope * grid[:-1], 0.0)
        turn = (-intercept + np.sqrt(intercept**2 - intercept * slope)) / slope
        inside = (turn > grid[:-1]) & (turn < grid[1:])
        peak = np.where(inside, (intercept + slope * turn) / (turn * (turn + 1.0)), 0.0)
    cells = np.maximum(np.max(k_high / ratio, axis=1), np.max(np.nan_to_num(peak, nan=np.inf), axis=1))
    beyond = limit + _largest_bounded(parts) / (1.0 + grid[-1])
    high = np.maximum(np.maximum(first, cells), beyond)
    gaussian = ~np.any(np.concatenate([parts.gauss_n, parts.laplace_n, parts.finite_n], axis=1) > 0, axis=1)
    high = np.where(gaussian, limit, high) * (1.0 + 1e-12)
    leaks, cut = _leaks(parts)
    low = np.minimum(low, high)
    return Interval(np.where(leaks, np.inf, low), np.where(leaks | cut, np.inf, high))


def _leaks(parts: Components) -> tuple[np.ndarray, np.ndarray]:
    """Whether a loss is infinite, and whether a tail too small to matter elsewhere was cut off.

    Only the mass of a cut tail is known, so that divergences of order 1 and more are bounded from below only.
    """
    lost = parts.log_survival < np.where(parts.guaranteed(), -CUT, 0.0)  # a guarantee's moments need no tail
    cut = lost & (parts.log_survival > -CUT)
    return lost & ~cut, cut


def _largest_bounded(parts: Components) -> np.ndarray:
    """The largest loss of the Laplace and finite parts, or 0; a part that represents a zCDP guarantee counts xi."""
    rate, width = parts.laplace_q, 1.0 / parts.laplace_scale
    laplace = np.sum(parts.laplace_n * np.where(parts.laplace_n > 0, width, 0.0) * np.where(rate > 0, 1.0, 0.0), axis=1)
    top = np.max(np.where(parts.finite_mass > 0, parts.finite_loss, -np.inf), axis=2, initial=-np.inf)
    each = parts.finite_n * np.where(parts.finite_n > 0, top, 0.0)
    if each.shape[1]:  # at order infinity a guarantee allows xi beside rho alpha
        each[:, -1] = np.where(parts.guaranteed(), parts.xi, each[:, -1])
    return np.maximum(laplace + np.sum(each, axis=1), 0.0)
