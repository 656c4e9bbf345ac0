"""Gauss-Legendre panels for the transforms of one slot's law, and a bound of their error (README.md, 3 and 5)."""

from typing import NamedTuple

import numpy as np

from jaxacct.kernels.allocation.law import Windows, ratio, tail
from jaxacct.kernels.arrays import Array

__all__ = ["POINTS", "Nodes", "nodes_of", "panel_errors", "panels_of", "rounding_units"]

POINTS = 24
"""Nodes of a panel."""
MOST_PANELS = 3000.0
"""Most panels of a line."""
_PLACES, _WEIGHTS = np.polynomial.legendre.leggauss(POINTS)
_ELLIPSES = np.array([1.6, 2.0, 2.5, 3.2, 4.0, 5.0, 6.5, 9.0, 14.0, 25.0])
"""Sizes rho of the Bernstein ellipses that are tried for every panel."""


class Nodes(NamedTuple):
    """Nodes in u, and their weights for the bulk and for the rest."""

    u: Array
    """(B, X)."""
    x: Array
    """(B, X) X/t."""
    bulk: Array
    """(B, X) weight N(u) w1 w2 du."""
    jump: Array
    """(B, X) weight N(u) (1 - w1) w2 du."""


def panels_of(s: Array, t: Array, windows: Windows, size: Array, most: float = 4.0, fine: int = 600) -> Array:
    """(B, J + 1) ends of panels: narrow where the integrand turns quickly.  No bound depends on this choice.

    size : (B,) the largest |z| wanted.
    """
    grid = windows.start[:, None] + (windows.end - windows.start)[:, None] * np.linspace(0.0, 1.0, fine + 1)
    middle = 0.5 * (grid[:, 1:] + grid[:, :-1])
    turn = size[:, None] * ratio(middle, s[:, None], t[:, None])
    turn = np.minimum(turn, 1e6)
    rate = 1.0 / most + s[:, None] * (turn / (0.25 + turn) / 2.5 + turn / 36.0)
    for place, blur in ((windows.low, windows.low_blur), (windows.high, windows.high_blur)):
        with np.errstate(invalid="ignore"):
            far = np.abs(middle - place[:, None]) / blur[:, None]
        rate = rate + np.where(far < 9.0, 0.3 / blur[:, None], 0.0)
    total = np.cumsum(rate * np.diff(grid, axis=1), axis=1)
    total = np.concatenate([np.zeros_like(total[:, :1]), total], axis=1)
    count = int(np.ceil(np.minimum(total[:, -1].max(), MOST_PANELS)))
    levels = np.linspace(0.0, 1.0, count + 1)
    found = [np.interp(levels * row[-1], row, places) for row, places in zip(total, grid, strict=True)]
    ends = np.array(found)
    ends[:, 0], ends[:, -1] = windows.start, windows.end
    return ends


def nodes_of(s: Array, t: Array, windows: Windows, ends: Array) -> Nodes:
    """The nodes and weights of all panels."""
    middle, half = 0.5 * (ends[:, 1:] + ends[:, :-1]), 0.5 * (ends[:, 1:] - ends[:, :-1])
    u = (middle[:, :, None] + half[:, :, None] * _PLACES).reshape(len(ends), -1)
    weight = (half[:, :, None] * _WEIGHTS).reshape(len(ends), -1) * np.exp(-0.5 * u * u) / np.sqrt(2.0 * np.pi)
    whole: Array = np.isneginf(windows.low)
    open_: Array = np.isinf(windows.high)
    if not open_.all():
        weight = weight * tail((u - windows.high[:, None]) / windows.high_blur[:, None])
    bulk, jump = np.zeros_like(weight), weight
    if not whole.all():
        at = (u - np.where(whole, -60.0, windows.low)[:, None]) / windows.low_blur[:, None]
        bulk = np.where(whole[:, None], 0.0, weight * tail(at))
        jump = np.where(whole[:, None], weight, weight * tail(-at))
    return Nodes(u, ratio(u, s[:, None], t[:, None]), bulk, jump)


def panel_errors(
    s: Array, t: Array, windows: Windows, ends: Array, c: Array, y: Array, sign: float, less_one: Array
) -> tuple[Array, Array]:
    """Bounds of the quadrature errors of int N w (e^{sign z X/t} - 1), bulk and rest, for all |Im z| <= y; (B,) each.

    less_one : (B,) False where the base is integrated without the - 1; the rest beside a bulk always is.

    8 q sup |f| rho^{-2n}/(1 - rho^{-2}) on the ellipse of size rho about a panel of half width q.  sup |f| is taken
    over the rectangle around the ellipse, factor by factor.
    """
    middle, half = 0.5 * (ends[:, 1:] + ends[:, :-1])[..., None], 0.5 * (ends[:, 1:] - ends[:, :-1])[..., None]
    real, imag = half * (_ELLIPSES + 1.0 / _ELLIPSES) * 0.5, half * (_ELLIPSES - 1.0 / _ELLIPSES) * 0.5
    left, right = middle - real, middle + real
    s, t, c, y = (a[:, None, None] for a in (s, t, c, y))
    near = np.maximum(np.maximum(left, -right), 0.0)
    log = 0.5 * (imag * imag - near * near) - 0.5 * np.log(2.0 * np.pi)
    with np.errstate(over="ignore"):
        x_most, x_least = ratio(right, s, t), ratio(left, s, t)
        angle = s * imag
        swing = np.where(angle < 0.5 * np.pi, np.sin(np.minimum(angle, 1.5)), 1.0)
        swing = np.where(angle < 1.5, swing, 1.0)
        if sign > 0:
            growth = (c + y * swing) * x_most
        else:
            growth = np.where(
                angle < 1.5, -c * x_least * np.cos(np.minimum(angle, 1.5)) + y * swing * x_most, (c + y) * x_most
            )
        # |e^w - 1| <= min(|w| e^{max(Re w, 0)}, 1 + e^{Re w})
        up = np.maximum(growth, 0.0)
        gain = np.minimum(np.log(c + y) + np.log(x_most), np.log(2.0))
        gain = np.where(less_one[:, None, None], gain, 0.0)
    log = log + up + np.log(8.0 * half) - 2.0 * POINTS * np.log(_ELLIPSES) - np.log1p(-(_ELLIPSES**-2.0))

    def window(x_most: Array, x_least: Array, shift: Array) -> Array:
        grown = np.exp(np.minimum(0.5 * shift * shift, 600.0))
        return np.log(np.minimum(grown * tail(-x_most), 1.0 + grown * tail(x_least)) + 1e-300)

    whole, open_ = windows.low[:, None, None] == -np.inf, windows.high[:, None, None] == np.inf
    if not open_.all():
        high, blur = np.where(open_, 0.0, windows.high[:, None, None]), windows.high_blur[:, None, None]
        log = log + np.where(open_, 0.0, window((high - left) / blur, (high - right) / blur, imag / blur))
    bulk, jump = np.where(whole, -np.inf, log), log + gain
    if not whole.all():
        low, blur = np.where(whole, 0.0, windows.low[:, None, None]), windows.low_blur[:, None, None]
        bulk = np.where(whole, -np.inf, log + gain + window((low - left) / blur, (low - right) / blur, imag / blur))
        jump = np.where(whole, log + gain, log + window((right - low) / blur, (left - low) / blur, imag / blur))
    with np.errstate(over="ignore", invalid="ignore"):
        return tuple(np.exp(np.fmin(np.min(one, axis=2), 700.0)).sum(axis=1) for one in (bulk, jump))


def rounding_units(nodes: Nodes, s: Array, t: Array, windows: Windows) -> Array:
    """(B, X) units of 2^-53 by which a term of a sum over the nodes may be off, relative to its factors."""
    u = np.abs(nodes.u)
    units = nodes.u.shape[1] + 60.0 + 4.0 * u * u + 6.0 * (s[:, None] * u + 0.5 * s[:, None] ** 2 + np.log(t)[:, None])
    for place, blur in ((windows.low, windows.low_blur), (windows.high, windows.high_blur)):
        there: Array = np.isfinite(place)
        at = np.abs(nodes.u - np.where(there, place, 0.0)[:, None]) / blur[:, None]
        moved = (
            (1.0 + at) * 3.0 * (u + np.abs(np.where(there, place, 0.0))[:, None]) / blur[:, None] + 12.0 + 2 * at * at
        )
        units = units + np.where(there[:, None] & (at < 40.0), moved, 0.0)
    return units
