"""Bounds of what the contour leaves out: nodes beyond the last one, and the periodic images (README.md, 1 and 4)."""

import numpy as np

from jaxacct.kernels.allocation.law import Cells, Cuts, Windows, jump_below, log_path, log_real, shares
from jaxacct.kernels.arrays import Array

__all__ = ["log_beyond_on", "log_images", "log_power"]

STEEPEST = 9.0
"""Largest shift of the path at a window, in widths of the window."""

CLEAR = 80.0
"""x^2 less the squared shift at a distance x, in widths of a window: Phi is then within e^-40 of 0 or 1."""


def _path(cells: Cells, windows: Windows, y: Array, local: Array) -> Array:
    """Im u at the edges of the cells, (B, J + 1): 0 at both ends, and small near a narrow window.

    local : (B,) whether it follows X(u), and not the mean of X.
    """
    u, s = cells.edges, cells.s
    # s y X alpha - alpha^2/2 is largest at alpha = s y X
    size = np.minimum(1.45 / s, y[:, None] * s * np.where(local[:, None], cells.x, _scale(cells)))
    for place, blur in ((windows.low, windows.low_blur), (windows.high, windows.high_blur)):
        there = np.abs(place[:, None]) < np.inf
        at = np.where(there[:, 0], place, 0.0)[:, None]
        here = np.exp(s * at - 0.5 * s * s) * _scale(cells)
        most = np.minimum(STEEPEST, y[:, None] * s * here * blur[:, None])
        away = np.abs(u - at) / blur[:, None]
        near = away.copy()  # the least of the cells on both sides, whose bounds take it with the largest shift
        near[:, 1:], near[:, :-1] = np.minimum(near[:, 1:], away[:, :-1]), np.minimum(near[:, :-1], away[:, 1:])
        far = np.sqrt(np.maximum(near * near - CLEAR, most * most))
        shift = np.minimum(most + np.maximum(near - STEEPEST, 0.0), far)
        size = np.where(there, np.minimum(size, shift * blur[:, None]), size)
    size = np.minimum(size, np.minimum(u - u[:, :1], u[:, -1:] - u))
    return np.maximum(np.minimum(size, 1.5 / s), 0.0)


def _scale(cells: Cells) -> Array:
    """1/t."""
    return cells.x[:, :1] * np.exp(0.5 * cells.s**2 - cells.s * cells.edges[:, :1])


def log_power(cells: Cells, cuts: Cuts, t: Array, r: Array, sign: float) -> tuple[Array, Array]:
    """log of upper bounds of the integrand (A + B)^t - A^t at real r, (B, R), and of A^t, -inf without a bulk.

    (A + B)^t - A^t <= t B (A + B)^{t-1}.
    """
    whole: Array = np.isneginf(cuts.windows.low)
    bulk, jump = shares(cuts, np.zeros((len(t), 1)))
    log_jump, t = log_real(cells, jump, jump_below(cells, cuts.windows), r, sign), t[:, None]
    if whole.all():
        return t * log_jump, np.full_like(log_jump, -np.inf)
    log_bulk = log_real(cells, bulk, np.ones(len(t)), r, sign)
    both = np.logaddexp(log_bulk, log_jump)
    power = np.where(whole[:, None], t * log_jump, np.log(t) + log_jump + (t - 1.0) * both)
    return power, np.where(whole[:, None], -np.inf, t * log_bulk)


def log_beyond_on(cells: Cells, cuts: Cuts, t: Array, c: Array, y: Array, sign: float, local: Array) -> Array:
    """log of a bound of (1/pi) h sum |F(c + iy')|/|z|^2 over all nodes y' > y, by the one path or the other, (B,)."""
    whole: Array = np.isneginf(cuts.windows.low)
    bulk, jump = log_path(cells, cuts, c, y, _path(cells, cuts.windows, y, local), sign)
    both = np.where(whole, jump, np.logaddexp(bulk, jump))
    power = np.where(whole, t * both, np.log(t) + jump + (t - 1.0) * both)
    return np.where(np.isnan(power), np.inf, power) - np.log(np.pi * y)


def log_images(k: Array, c: Array, period: Array, far: Array, log_far: Array, sign: float) -> Array:
    """log of a bound of sum_{j >= 1} e^{jcp} V(k + sign j p), V the value integrated, (B,); the least of all far > c.

    V(y) <= F(c') e^{-sign c' y}/(e c'), F the transform of what is integrated, since (x)_+ <= e^{c'x}/(e c').
    """
    gap = (far - c[:, None]) * period[:, None]
    ratio = np.where(gap < 30.0, np.log(np.expm1(np.minimum(gap, 30.0))), gap)
    each = log_far - sign * far * k[:, None] - 1.0 - np.log(far) - ratio + 1e-12 * (np.abs(gap) + far * k[:, None])
    each = np.where((gap > 0.0) & ~np.isnan(each), each, np.inf)
    least = np.min(each, axis=1)
    return np.where(period >= k, -np.inf, least) if sign < 0 else least
