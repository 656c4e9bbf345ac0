"""Conversions between privacy profile, trade-off function and Gaussian DP.

`tradeoff_from_profile` and `profile_from_tradeoff` take an array of guarantees (upper bounds of delta, or lower bounds
of the trade-off function f) or a Bounds. For an array, the answer is of kind "bound", and only one of its ends is
computed. For a Bounds, the answer has the kind of this Bounds.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxacct.core.bounds import Bounds
from jaxacct.core.floats import ROUNDOFF, bisected
from jaxacct.core.types import ArrayLike
from jaxacct.core.validation import NON_NEGATIVE, OPEN_PROBABILITY, PROBABILITY, REAL, InputError, check, refuse_where
from jaxacct.engines import closed_form
from jaxacct.engines.loss_moments import Interval

OK_WIDTH = 1e-3
"""Largest width of a bracket of f, and relative width of one of delta, that is "ok"."""
LARGEST_EPS = 700.0
"""Points of larger |eps| are left out, since e^709 is near float64's end. Beyond, delta is bounded by delta(700)."""


def tradeoff_from_profile(epsilon: ArrayLike, delta: ArrayLike, fpr: ArrayLike, *, symmetric: bool = True) -> Bounds:
    """Return the trade-off function `f(a) = sup_eps {1 - delta(eps) - e^eps a}` from delta on a grid of eps.

    Parameters
    ----------
    epsilon : array_like (G,) of any real numbers
    delta : array_like (G,) of upper bounds of delta(eps), or Bounds of it
    fpr : array_like in [0, 1] of false positive rates
    symmetric : bool; whether the relation is symmetric, as add_or_remove_one is, so that delta(eps) gives delta(-eps).

    Returns
    -------
    Bounds : f in the shape of fpr. If delta is an array, `lower` is the guarantee, and `upper` is 1 - fpr.

    References
    ----------
    Dong, Roth and Su (2022), Proposition 2.12; both ends are derived in jaxacct/representations/README.md.

    >>> float(tradeoff_from_profile([0.0], [0.2], 0.3).lower.round(9))
    0.5
    """
    eps = np.atleast_1d(check("epsilon", epsilon, REAL))
    low, high, kind = _values("delta", delta, eps.shape)
    kept = np.abs(eps) <= LARGEST_EPS
    if not kept.any():
        raise InputError(f"epsilon has no value from -{LARGEST_EPS:g} to {LARGEST_EPS:g}; give a point there")
    eps, low, high = eps[kept], low[kept], high[kept]  # f is proved by the other points alone
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
    status = np.where(found.high - found.low <= OK_WIDTH, "ok", "width")
    return Bounds(found.low, 0.5 * (found.low + found.high), found.high, kind, status)


def profile_from_tradeoff(fpr: ArrayLike, fnr: ArrayLike, epsilon: ArrayLike) -> Bounds:
    """Return the privacy profile `delta(eps) = 1 + f*(-e^eps) = sup_a {1 - f(a) - e^eps a}` from f on a grid.

    Parameters
    ----------
    fpr : array_like (G,) in [0, 1]
    fnr : array_like (G,) of the values at fpr of a convex lower bound of the trade-off function f, or Bounds of f
    epsilon : array_like of any real numbers

    Returns
    -------
    Bounds : delta in the shape of epsilon. If fnr is an array, `upper` is the guarantee, and `lower` is 0.

    References
    ----------
    Dong, Roth and Su (2022), Proposition 2.12.

    >>> a = np.linspace(0, 1, 1001)
    >>> float(profile_from_tradeoff(a, np.maximum(0.8 - a, 0), 0.0).upper.round(9))
    0.2
    """
    a = np.atleast_1d(check("fpr", fpr, PROBABILITY))
    low, high, kind = _values("fnr", fnr, a.shape)
    refuse_where(low > 1.0 - a + 1e-9, "fnr", low, "must be <= 1 - fpr, which a guess without the output reaches")
    a, low, high = _sorted(a, low, high)
    if a[0] > 0.0:
        a, low, high = np.concatenate([[0.0], a]), np.concatenate([low[:1], low]), np.concatenate([[1.0], high])
    if a[-1] < 1.0:
        a, low, high = (np.concatenate([v, [end]]) for v, end in ((a, 1.0), (low, 0.0), (high, 0.0)))
    eps = np.asarray(check("epsilon", epsilon, REAL))
    found = conjugate(a, low, high, np.exp(np.minimum(eps, LARGEST_EPS)), steepest=np.inf, beyond=None)
    found = Interval(np.where(eps > LARGEST_EPS, 0.0, found.low), found.high)  # delta falls in eps
    if kind == "bound":
        return Bounds(np.zeros_like(found.high), found.high, found.high, kind)
    found = consistent(found)
    status = np.where(found.high - found.low <= OK_WIDTH * found.high, "ok", "width")
    return Bounds(found.low, 0.5 * (found.low + found.high), found.high, kind, status)


def _values(name: str, values: Any, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray, str]:
    """Return lower and upper bounds of the given values, and the `kind` of results computed from them."""
    if shape == (0,):
        raise InputError(f"{name} is empty; give at least one point")
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
    """Return (x, low, high) in ascending order of x, with the tightest bounds of points with equal x."""
    unique, where = np.unique(x, return_inverse=True)
    lowest, highest = np.zeros(unique.size), np.ones(unique.size)
    np.maximum.at(lowest, where, low)
    np.minimum.at(highest, where, high)
    return unique, lowest, highest


def conjugate(x: Any, low: Any, high: Any, slope: Any, *, steepest: float, beyond: float | None) -> Interval:
    """Bracket `sup_z {1 - g(z) - slope z}` for a convex, non-increasing g that lies in [low, high] at the points x.

    `x`, `low`, `high` have shape (G,); x increases from the left end of the domain. `slope` >= 0 has any shape. On the
    first cell g(x) >= g(x_0) - steepest (x - x_0); `steepest` may be inf. `beyond` is a lower bound of g to the right
    of the grid, or None if the domain ends there. If no g fits, the answer's lower end may exceed its upper end.
    """
    # Lower end: the largest lower bound of 1 - g(x) - slope x at a point, without convexity. Upper end: see `_cells`.
    x, low, high = (np.asarray(v, np.float64) for v in (x, low, high))
    s = np.asarray(slope, np.float64)[..., None]
    lower = np.max(1.0 - high - s * x - 8.0 * ROUNDOFF * (1.0 + s * x), axis=-1)
    upper = np.max(_cells(x, low, high, s, steepest), axis=-1)
    if beyond is not None:
        last = (low[-1] - high[-2]) / (x[-1] - x[-2])
        with np.errstate(all="ignore"):
            share = np.where(-last > s, s / max(-last, 1e-300), 1.0) if last < 0 else np.ones_like(s)
        tail = 1.0 - share * low[-1] - (1.0 - share) * beyond - s * x[-1] + 16.0 * ROUNDOFF * (1.0 + s * x[-1])
        upper = np.maximum(upper, tail[..., 0])
    return Interval(np.clip(lower, 0.0, 1.0), np.clip(upper, 0.0, 1.0))


def consistent(found: Interval) -> Interval:
    """Return `found`, where every interval with low > high is replaced by [0, 1], which claims nothing."""
    agree = found.low <= found.high
    return Interval(np.where(agree, found.low, 0.0), np.where(agree, found.high, 1.0))


def best_cells(x: np.ndarray, low: np.ndarray, high: np.ndarray, slope: np.ndarray, steepest: float) -> np.ndarray:
    """Return, for each slope, the index of the cell on which the upper bound of `1 - g(x) - slope x` is largest."""
    return np.argmax(_cells(x, low, high, slope[..., None], steepest), axis=-1)


def _cells(x: np.ndarray, low: np.ndarray, high: np.ndarray, s: np.ndarray, steepest: float) -> np.ndarray:
    """Return upper bounds (..., G - 1) of `1 - g(x) - s x` on each cell between points x, for g as in `conjugate`."""
    width = np.diff(x)
    # The convex g lies on each cell above the extended chords of the two neighbouring cells, so above every mixture of
    # these lines, and 1 - mixture - s x is largest at an end of the cell. The slope of g is at least `chord_low` to the
    # right of a cell, and at most `chord_high` to its left.
    chord_low = (low[1:] - high[:-1]) / width
    chord_high = np.minimum((high[1:] - low[:-1]) / width, 0.0)
    known = np.isfinite(steepest)
    from_left = np.concatenate([[-steepest if known else 0.0], chord_low[:-1]])
    from_right = np.concatenate([chord_high[1:], [0.0]])
    with np.errstate(all="ignore"):
        share = np.where(from_right > from_left, (s + from_right) / (from_right - from_left), 1.0)
    share = np.clip(np.nan_to_num(share, nan=1.0), 0.0, 1.0)
    if not known:
        share[..., 0] = 0.0
    at_left = share * low[:-1] + (1.0 - share) * (low[1:] - from_right * width)
    at_right = share * (low[:-1] + from_left * width) + (1.0 - share) * low[1:]
    ratio = np.concatenate([[1.0], width[1:] / width[:-1]])
    back = np.concatenate([width[:-1] / width[1:], [1.0]])
    size = 4.0 + s * x[1:] + ratio + back + np.abs(from_left * width) + np.abs(from_right * width)
    return np.maximum(1.0 - at_left - s * x[:-1], 1.0 - at_right - s * x[1:]) + 16.0 * ROUNDOFF * size


def gdp_from_profile(epsilon: ArrayLike, delta: ArrayLike) -> Bounds:
    """Return the mu for which the profile of mu-GDP passes through (eps, delta).

    A mechanism that is mu-GDP for this mu is (eps, delta)-DP, but the converse is false. If a mechanism is mu'-GDP, mu'
    is at least the mu of every point (eps, delta) of the mechanism's profile.

    Parameters
    ----------
    epsilon : array_like, >= 0
    delta : array_like in (0, 1), which broadcasts with epsilon

    Returns
    -------
    Bounds : of kind "certified".

    References
    ----------
    Dong, Roth and Su (2022), Corollary 2.13, solved for mu.

    >>> float(gdp_from_profile(1.0, 0.006829595).estimate.round(6))
    0.5
    """
    eps, target = np.broadcast_arrays(check("epsilon", epsilon, NON_NEGATIVE), check("delta", delta, OPEN_PROBABILITY))

    def crossing(end: str) -> tuple[np.ndarray, np.ndarray]:
        # a mu below 1e-290 has the lower end 0
        below, above = np.full(eps.shape, np.log(1e-290)), np.log(np.sqrt(2.0 * eps) + 80.0)
        met = lambda log_mu: getattr(closed_form.delta(np.exp(log_mu), eps), end) <= target
        below, above = bisected(below, above, met, 90)  # then they differ by less than their rounding error
        return np.exp(below), np.exp(above)

    low, high = crossing("upper")[0] * (1.0 - 1e-15), crossing("lower")[1] * (1.0 + 1e-15)
    low = np.where(closed_form.delta(low, eps).upper <= target, low, 0.0)  # no mu of the search may meet the target
    status = np.where(high <= low * (1.0 + 1e-6), "ok", "width")
    return Bounds(low, np.sqrt(low) * np.sqrt(high), high, "certified", status, "closed_form")
