"""The conjugate that joins privacy profile and trade-off function, from certified values on a grid.

    f(a) = sup_{E >= 0} {1 - H(E) - E a},      H(E) = sup_{0 <= a <= 1} {1 - f(a) - E a},

with H(E) = delta(log E).  Both H and f are convex and non-increasing, and both formulas are one: `conjugate`.
Derivation of the two ends: README.md of this folder.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxacct.core.floats import ROUNDOFF
from jaxacct.engines.loss_moments import Interval

__all__ = ["best_cells", "conjugate", "consistent"]


def conjugate(x: Any, low: Any, high: Any, slope: Any, *, steepest: float, beyond: float | None) -> Interval:
    """Bracket of `sup_x {1 - g(x) - slope x}` for a convex non-increasing g known to lie in [low, high] at x.

    Lower end: every grid point is a candidate.  Upper end: on each cell g lies above the chords of the two neighbouring
    cells, extended.  So it lies above any mixture of the two lines, and `1 - mixture - slope x` is largest at an end of
    the cell.

    x, low, high : (G,) with x increasing from the left end of the domain.
    slope : any shape, >= 0; the answer has this shape.
    steepest : g(x) >= g(x_0) - steepest (x - x_0) on the first cell; inf if nothing is known.
    beyond : a lower bound of g to the right of the grid, or None where the domain ends with the grid.

    The lower end needs no convexity.  The ends contradict each other where [low, high] holds no convex function.
    """
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
    """The interval where its ends agree and [0, 1] where they contradict each other: then neither can be trusted."""
    agree = found.low <= found.high
    return Interval(np.where(agree, found.low, 0.0), np.where(agree, found.high, 1.0))


def best_cells(x: np.ndarray, low: np.ndarray, high: np.ndarray, slope: np.ndarray, steepest: float) -> np.ndarray:
    """Index of the cell with the largest upper end for each slope: where a finer grid helps."""
    return np.argmax(_cells(x, low, high, slope[..., None], steepest), axis=-1)


def _cells(x: np.ndarray, low: np.ndarray, high: np.ndarray, s: np.ndarray, steepest: float) -> np.ndarray:
    """Upper bound of the supremum over each of the G - 1 cells, for slopes s of shape (..., 1)."""
    width = np.diff(x)
    chord_low = (low[1:] - high[:-1]) / width  # at most the slope of the chord of g; extended to the right
    chord_high = np.minimum((high[1:] - low[:-1]) / width, 0.0)  # at least that slope; extended to the left
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
