"""Bounds of |M(c + it)|/M(c) for all larger t: by level sets of the tilted density of the loss, and on moved lines.

README.md, section 7, has the proofs.
"""

from __future__ import annotations

import numpy as np

from jaxacct.kernels.arrays import Array
from jaxacct.kernels.mixture_law import Quadrature, line

__all__ = ["largest_modulus_gap"]

LINES = (1.0, 0.6, 0.35, 0.2)
"""Heights of the moved lines, over the largest that serves."""
HIGHEST_LINE = 3.0
"""Height above which no line is tried: the Gaussian grows by e^{v^2/2}."""
BLOCK = 16
"""Values of t that are taken at a time."""

PEELS = 3
"""Unimodal parts that are taken out of a density, one after the other."""
SIDE_LOBE = 0.217235
"""sup |sin y|/y beyond the first zero, rounded up."""
HEIGHT_SHARE = 0.998
"""What heights are multiplied by: rounding of the density, and of the integral of the tilted law."""


def largest_modulus_gap(branch: Quadrature, t: Array) -> Array:
    """A lower bound of 1 - |M(c + i t')|/M(c) for all t' >= t, (T,)."""
    return np.maximum(_by_level_sets(branch, t), 1.0 - _on_lines(branch, t))


def _on_lines(branch: Quadrature, t: Array) -> Array:
    """|M(c + it)|/M(c) on the line u + iv towards which |e^{it loss}| = e^{-t arg mix} falls, the best of a few v."""
    law = branch.law
    spread = float(law.shift[-1] - law.shift[0])
    highest = min(0.5 * np.pi / spread if spread > 0.0 else np.inf, HIGHEST_LINE)
    found = np.ones(t.shape)
    for share in LINES:
        on = line(law, branch.power, branch.u, branch.step, share * highest, branch.log_m)
        angle = np.minimum(on.angle[:-1], on.angle[1:])
        ends = float(np.logaddexp(on.log_left, on.log_right))
        for block in range(0, t.size, BLOCK):
            some = slice(block, block + BLOCK)
            inside = np.exp(np.minimum(on.log_cells - t[some, None] * angle * (1.0 - 1e-12), 50.0)).sum(axis=1)
            found[some] = np.minimum(found[some], 1.001 * (inside + np.exp(min(ends, 50.0))))
    return found


def _by_level_sets(branch: Quadrature, t: Array) -> Array:
    length, height = _cells(branch)
    gap = np.zeros(t.shape)
    for _ in range(PEELS):
        if not np.any(height > 0.0):
            break
        under = _unimodal(height, int(np.argmax(height)))
        height = np.maximum(height - under, 0.0)
        order = np.argsort(-under, kind="stable")
        span = np.cumsum(length[order])  # of the level set at each height
        fall = -np.diff(np.append(under[order], 0.0))
        kept = (fall > 0.0) & (span > 0.0)
        span, mass = span[kept], (span * fall)[kept]
        for block in range(0, t.size, BLOCK):
            some = slice(block, block + BLOCK)
            gap[some] += (mass * (1.0 - _sinc(0.5 * t[some, None] * span))).sum(axis=1)
    return np.clip(gap - 1e-12, 0.0, 1.0)


def _cells(branch: Quadrature) -> tuple[Array, Array]:
    """Lengths of the cells in the loss, from below, and the density there, from below."""
    spread = float(branch.law.shift[-1] - branch.law.shift[0])
    bend = -1.0 + max(branch.power, 0.0) * 0.25 * spread**2  # largest second derivative of the logarithm
    low = np.minimum(branch.p[:-1], branch.p[1:]) / branch.step * np.exp(-max(bend, 0.0) * branch.step**2 / 8.0)
    slope = np.maximum(branch.slope[1:], branch.slope[:-1])
    length = np.maximum(
        np.diff(branch.log_mix) * (1.0 - 1e-6)
        - 1e-13 * (1.0 + np.abs(branch.log_mix[1:]) + branch.law.shift.size / 64.0),
        0.0,
    )
    with np.errstate(divide="ignore", invalid="ignore"):
        height = np.where((length > 0.0) & (slope > 0.0), HEIGHT_SHARE * low / slope, 0.0)
    # a cell holds no more than its density times its width, whatever the rounding of its length
    most = HEIGHT_SHARE * low * branch.step
    with np.errstate(divide="ignore", invalid="ignore"):
        height = np.where(length > 0.0, np.minimum(height, most / np.where(length > 0.0, length, 1.0)), 0.0)
    return length, height


def _unimodal(height: Array, mode: int) -> Array:
    """The largest function under `height` that falls on both sides of a place."""
    right = np.minimum.accumulate(height[mode:])
    left = np.minimum.accumulate(height[mode::-1])[::-1]
    return np.concatenate([left[:-1], right])


def _sinc(y: Array) -> Array:
    """sup over y' >= y of |sin y'|/y'."""
    near = np.where(y < 1e-4, 1.0, np.sin(np.minimum(y, np.pi)) / np.maximum(y, 1e-300))
    near = np.where(y < 1e-4, 1.0 - y * y / 6.0 * (1.0 - 1e-6), near)
    return np.where(y < np.pi, np.maximum(near, SIDE_LOBE), np.minimum(SIDE_LOBE, 1.0 / np.maximum(y, 1e-300)))
