"""The likelihood ratio of one round of random allocation, and bounds of its transforms by cells.

S = (X_1 + ... + X_t)/t with X = e^{s u - s^2/2}, u standard normal, s = 1/sigma.  README.md of this folder, sections 1
and 4.  Arrays have a leading batch axis (B,), one entry a configuration.
"""

from typing import NamedTuple

import numpy as np

from jaxacct.core.floats import ROUNDOFF
from jaxacct.kernels.arrays import Array
from jaxacct.kernels.special import log_ndtr_sides

__all__ = [
    "ROOM",
    "Cells",
    "Cuts",
    "Windows",
    "cells_of",
    "cuts_of",
    "interval",
    "jump_below",
    "log_path",
    "log_real",
    "ratio",
    "shares",
    "tail",
]

ROOM = 6.3
"""Widths of the far window below its centre from which on a slot is taken for far."""
SMALLEST = 1e-290
"""Masses below it, and likelihood ratios, may have lost digits to underflow."""
LARGEST_LOG = 600.0
"""A bound of a window that is larger than its exponential stands for one that says nothing."""
SLACK = 1e-11
"""Relative allowance for the rounding of a sum over cells: masses are off by at most some hundred units (README, 5)."""


class Windows(NamedTuple):
    """The smooth cuts of one slot's law: bulk below `low`, far above `high`; the law ends sharply at `end`."""

    low: Array
    """(B,) -inf: there is no bulk, and everything is integrated."""
    low_blur: Array
    high: Array
    """(B,) inf: nothing is far."""
    high_blur: Array
    start: Array
    """(B,) u below which the law is only bounded."""
    end: Array


class Cells(NamedTuple):
    """A grid in u with the mass of every cell and a share for chords."""

    s: Array
    """(B, 1) 1/sigma."""
    edges: Array
    """(B, J + 1) values of u."""
    x: Array
    """(B, J + 1) X/t at the edges."""
    mass: Array
    """(B, J) probability of each cell."""
    share: Array
    """(B, J) (mean of X - lower end)/(upper end - lower end)."""
    doubt: Array
    """(B, J) how far the share may be off; 1 where underflow leaves nothing of it."""


class Cuts(NamedTuple):
    """log Phi(-x) and log Phi(x) at the edges of a grid, x the distance from a window's centre in its widths."""

    windows: Windows
    low: tuple[Array, Array] | None
    """(B, J + 1) each; None where no configuration has a bulk."""
    high: tuple[Array, Array] | None
    """None where nothing is far in any configuration."""


def ratio(u: Array, s: Array, t: Array) -> Array:
    """X/t = e^{s u - s^2/2}/t, for u of shape (B, ...) and s, t that broadcast with it."""
    return np.exp(s * u - 0.5 * s * s - np.log(t))


def tail(x: Array) -> Array:
    """Phi(-x)."""
    from scipy import special

    return special.ndtr(-x)


def interval(a: Array, b: Array) -> Array:
    """Phi(b) - Phi(a) for a <= b, relatively accurate in either tail."""
    flip = a + b > 0.0
    return tail(np.where(flip, a, -b)) - tail(np.where(flip, b, -a))


def cells_of(s: Array, t: Array, windows: Windows, size: int) -> Cells:
    """`size` cells from `windows.start` to `windows.end`, a third of them at either window."""
    s, t = s[:, None], t[:, None]
    start, end = windows.start[:, None], windows.end[:, None]
    grid = start + (end - start) * np.linspace(0.0, 1.0, 4 * size + 1)
    total = np.linspace(0.0, 1.0, 4 * size + 1) + np.zeros_like(grid)
    for place, blur in ((windows.low, windows.low_blur), (windows.high, windows.high_blur)):
        there = np.abs(place[:, None]) < np.inf
        at = (grid - np.where(there, place[:, None], 0.0)) / blur[:, None]
        total = total + np.where(there, np.clip(at / 18.0 + 0.5, 0.0, 1.0), 0.0)
    total = (total - total[:, :1]) / (total[:, -1:] - total[:, :1])
    levels = np.linspace(0.0, 1.0, size + 1)
    edges = np.array([np.interp(levels, *row) for row in zip(total, grid, strict=True)])
    edges[:, :1], edges[:, -1:] = start, end
    mass = interval(edges[:, :-1], edges[:, 1:])
    moment = interval(edges[:, :-1] - s, edges[:, 1:] - s)
    width = s * (edges[:, 1:] - edges[:, :-1])
    low = np.exp(s * edges[:, :-1] - 0.5 * s * s)
    with np.errstate(all="ignore"):
        share = (moment / (mass * low) - 1.0) / np.expm1(width)
    share = np.where(share >= 0.0, np.minimum(share, 1.0), np.where(share < 0.0, 0.0, 1.0))
    doubt = SLACK / np.minimum(width.min(axis=1, keepdims=True), 1.0)
    doubt = np.where(np.minimum(np.minimum(mass, moment), low) > SMALLEST, doubt, 1.0)
    return Cells(s, edges, ratio(edges, s, t), mass, share, doubt)


def cuts_of(cells: Cells, windows: Windows) -> Cuts:
    """The windows at the edges of the cells, where they do not depend on Im u."""
    whole, open_ = np.isneginf(windows.low), np.isinf(windows.high)
    some = (~whole.all(), ~open_.all())
    low = np.where(whole, -1e300, windows.low)[:, None]
    high = np.where(open_, 1e300, windows.high)[:, None]
    at_low = (cells.edges - low) / windows.low_blur[:, None] if some[0] else None
    at_high = (cells.edges - high) / windows.high_blur[:, None] if some[1] else None
    return Cuts(
        windows,
        None if at_low is None else log_ndtr_sides(-at_low),
        None if at_high is None else log_ndtr_sides(-at_high),
    )


def shares(cuts: Cuts, alpha: Array) -> tuple[Array, Array]:
    """Upper bounds over each cell of |w1 w2| and |(1 - w1) w2| at Im u <= alpha, (B, J).

    |Phi(x + iy)| <= min(e^{y^2/2} Phi(x), 1 + e^{y^2/2} Phi(-x)).  Where either factor leaves float64 the product need
    not be extreme: beside a window alpha may grow as fast as the distance from it.
    """

    def window(most: Array, least: Array, y: Array) -> Array:
        grown = np.exp(np.minimum(0.5 * y * y + most, LARGEST_LOG))
        return np.minimum(grown, 1.0 + np.where(y > 0.0, np.exp(np.minimum(0.5 * y * y + least, LARGEST_LOG)), 0.0))

    windows = cuts.windows
    bulk: Array = np.zeros((len(windows.low), 1))
    jump, near = np.ones_like(bulk), np.ones_like(bulk)
    if cuts.low is not None:
        y = alpha / windows.low_blur[:, None]
        inside, beyond = cuts.low
        bulk, jump = window(inside[:, :-1], beyond[:, 1:], y), window(beyond[:, 1:], inside[:, :-1], y)
        whole: Array = np.isneginf(windows.low)
        bulk, jump = np.where(whole[:, None], 0.0, bulk), np.where(whole[:, None], 1.0, jump)
    if cuts.high is not None:
        near = window(cuts.high[0][:, :-1], cuts.high[1][:, 1:], alpha / windows.high_blur[:, None])
        open_: Array = np.isinf(windows.high)
        near = np.where(open_[:, None], 1.0, near)
    return bulk * near, jump * near


def jump_below(cells: Cells, windows: Windows) -> Array:
    """The largest 1 - w1 below the first edge, (B,)."""
    whole: Array = np.isneginf(windows.low)
    at = (np.where(whole, 0.0, windows.low) - cells.edges[:, 0]) / windows.low_blur
    return np.where(whole, 1.0, tail(at))


def log_real(cells: Cells, weight: Array, below: Array, r: Array, sign: float) -> Array:
    """log of an upper bound of E[w e^{sign r X/t}], (B, R), for weights (B, J) and r >= 0 of shape (B, R).

    below : (B,) the weight below the first edge, at most.
    A chord lies above the exponential, which is convex in X.  For sign = 1 the law ends at the last edge.
    """
    share = np.clip(cells.share + sign * cells.doubt, 0.0, 1.0)
    w0, w1 = weight * cells.mass * (1.0 - share), weight * cells.mass * share
    top = cells.x[:, -1:] * r if sign > 0 else np.zeros_like(r)  # so that nothing overflows
    grown = np.exp(sign * r[:, :, None] * cells.x[:, None, :] - top[:, :, None])
    total = np.einsum("brj,bj->br", grown[:, :, :-1], w0) + np.einsum("brj,bj->br", grown[:, :, 1:], w1)
    less = below[:, None] * tail(-cells.edges[:, :1]) * np.exp((sign > 0) * r * cells.x[:, :1] - top)
    beyond = tail(cells.edges[:, -1:]) * np.exp(-r * cells.x[:, -1:]) if sign < 0 else 0.0
    with np.errstate(divide="ignore"):
        return (
            np.log(total + less + beyond)
            + top
            + 2.0 * SLACK
            + 4.0 * _relative(cells) * np.minimum(r * cells.x[:, -1:], 750.0)
        )


def _relative(cells: Cells) -> Array:
    """(B, 1) the relative rounding error of X/t on the grid, at most."""
    return ROUNDOFF * (8.0 + 4.0 * (cells.s * (np.abs(cells.edges[:, -1:]) + cells.s) + 30.0))


def log_path(cells: Cells, cuts: Cuts, c: Array, y: Array, alpha: Array, sign: float) -> tuple[Array, Array]:
    """log of upper bounds of |A(c + iy')| and |B(c + iy')| for every y' >= y, (B,).

    The line of integration is u + i sign alpha(u), with alpha >= 0 piecewise linear, 0 at both ends, s alpha <= pi/2;
    `alpha` has its values at the edges, (B, J + 1).  |e^{sign z X}| = e^{X (sign c cos(s alpha) - y sin(s alpha))}.
    """
    s, windows = cells.s, cuts.windows
    most, least = np.maximum(alpha[:, :-1], alpha[:, 1:]), np.minimum(alpha[:, :-1], alpha[:, 1:])
    slope = (alpha[:, 1:] - alpha[:, :-1]) / (cells.edges[:, 1:] - cells.edges[:, :-1])
    stretch = np.sqrt(1.0 + slope * slope)
    c, y = c[:, None], y[:, None]
    fall = y * np.sin(s * least) * (1.0 - 1e-9)
    if sign > 0:
        rate = c * np.cos(s * least) * (1.0 + 1e-9) - fall
        top = c * cells.x[:, -1:]
    else:
        rate = -c * np.cos(s * most) * (1.0 - 1e-9) - fall
        top = np.zeros_like(c)
    exponent = np.where(rate > 0.0, rate * cells.x[:, 1:], rate * cells.x[:, :-1])
    grown = cells.mass * stretch * np.exp(0.5 * most * most + exponent - top)
    bulk, jump = shares(cuts, most)
    below = tail(-cells.edges[:, 0]) * np.exp((sign > 0) * (c * cells.x[:, :1]) - top)[:, 0]
    beyond = tail(cells.edges[:, -1]) * np.exp(-c * cells.x[:, -1:])[:, 0] if sign < 0 else 0.0
    whole: Array = np.isneginf(windows.low)
    share_below = jump_below(cells, windows)
    slack = (2.0 * SLACK + 4.0 * _relative(cells) * np.minimum((c + y) * cells.x[:, -1:], 750.0))[:, 0]
    with np.errstate(divide="ignore"):
        log_bulk = np.log(np.sum(bulk * grown, axis=1) + np.where(whole, 0.0, below))
        log_jump = np.log(np.sum(jump * grown, axis=1) + beyond + below * share_below)
    return log_bulk + top[:, 0] + slack, log_jump + top[:, 0] + slack
