"""Trade-off curves as polygons, from certified brackets of a privacy profile.

The concave curve `T(u) = min_r (delta(log r) + r u)` (largest P-mass of a set of Q-mass u) is convex conjugate to the
profile, so every upper end of delta is a line above it.  Between two slopes the profile lies above the extensions of
its neighbouring chords, which makes lines that stay below it: an outer and an inner polygon.
"""

from __future__ import annotations

import numpy as np

from jaxacct.kernels.worst_score import Polygon

JOINED = 16
"""Rows into which the cells that are hardly active are joined."""
SLOPE = 1.0 + 1e-11
"""Slopes of cells are rounded up by this."""


def outer(ratio: np.ndarray, upper: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(u, T) at the knots of a concave polygon above the curve, from upper ends of delta at ratios e^eps, ascending."""
    r, d = np.concatenate([[0.0], ratio])[::-1], np.concatenate([[1.0], upper])[::-1]
    return _envelope(r, np.minimum(d, 1.0), 1.0)


def inner(ratio: np.ndarray, lower: np.ndarray, upper: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The same below the curve, from brackets of delta at ascending ratios."""
    # delta(r) >= 1 - r stands in for a chord on the left; beyond the last ratio delta is only known to be >= 0
    r = np.concatenate([[0.0], ratio])
    low, high = np.concatenate([[1.0], lower]), np.concatenate([[1.0], upper])
    fall = np.concatenate([[-1.0], (low[1:] - high[:-1]) / np.diff(r)])  # steepest slope with which delta goes on
    rise = np.concatenate([(high[1:] - low[:-1]) / np.diff(r), [0.0]])  # flattest slope with which it came
    rise = np.minimum(rise, 0.0)
    a, b = slice(None, -1), slice(1, None)
    # the extension from the left of r_k, low_k + fall_k (r - r_k), meets the one from the right of r_{k+1}
    gap = low[a] - fall[a] * r[a] - low[b] + rise[b] * r[b]
    steep = rise[b] - fall[a]
    meet = np.where(steep > 0, gap / np.where(steep > 0, steep, 1.0), r[b])
    meet = np.clip(meet, r[a], r[b])
    at = np.maximum(low[a] + fall[a] * (meet - r[a]), low[b] + rise[b] * (meet - r[b]))
    end = r[-1] - low[-1] / fall[-1] if fall[-1] < 0 and low[-1] > 0 else r[-1] * 2.0
    slopes = np.concatenate([r, meet, [end]])
    values = np.maximum(np.concatenate([low, at, [0.0]]), np.maximum(1.0 - slopes, 0.0))
    order = np.lexsort((values, slopes))[::-1]
    return _envelope(slopes[order], values[order], 1.0 - 1e-14)


def _envelope(r: np.ndarray, d: np.ndarray, rounding: float) -> tuple[np.ndarray, np.ndarray]:
    """Knots in [0, 1] of min_k (d_k + r_k u) for descending slopes r, the last of which is 0."""
    keep: list[int] = []
    for k in range(r.size):
        if keep and r[keep[-1]] == r[k]:
            if d[keep[-1]] <= d[k]:
                continue
            keep.pop()
        while len(keep) > 1:
            a, b = keep[-2], keep[-1]
            if (d[k] - d[a]) * (r[a] - r[b]) > (d[b] - d[a]) * (r[a] - r[k]):
                break
            keep.pop()
        if keep and d[k] <= d[keep[-1]]:
            keep.pop()  # lower and flatter: the one before never counts
        keep.append(k)
    r, d = r[keep], d[keep]
    u = np.concatenate([[0.0], np.diff(d) / -np.diff(r), [1.0]])
    u = np.minimum(np.maximum.accumulate(u), 1.0)
    left, right = d[:-1] + r[:-1] * u[1:-1], d[1:] + r[1:] * u[1:-1]
    between = np.maximum(left, right) * (1.0 + 4e-16) if rounding == 1.0 else np.minimum(left, right) * rounding
    t = np.concatenate([[d[0]], between, [1.0]])
    return u, np.minimum(np.maximum.accumulate(t), 1.0)


def polygon(u: np.ndarray, t: np.ndarray, steepness: np.ndarray, fine: float, rows: int, columns: int) -> Polygon:
    """Fixed numbers of rows and columns from knots.

    Cells whose slope is at least `fine` are rows of their own, as far as there are rows; those between it and one,
    which are not expected to be active, are joined.  `steepness` = log phi'(T) at the knots says where columns are
    cut finer.
    """
    slope = np.diff(t) / np.maximum(np.diff(u), 1e-300)
    above = int(np.sum(slope > 1.0))
    count = min(int(np.sum(slope >= fine)), rows - JOINED, above)
    ends = np.unique(np.concatenate([np.arange(count + 1), np.linspace(count, above, JOINED + 1).round().astype(int)]))
    ends = np.concatenate([ends, np.full(rows + 1 - ends.size, ends[-1])])
    slopes = np.where(ends[:-1] < ends[1:], slope[np.minimum(ends[:-1], slope.size - 1)] * SLOPE, 1.0)
    place = _cuts(np.diff(np.maximum(steepness, steepness[-1] - 60.0)), columns)
    knots = np.arange(u.size)
    return Polygon(u[ends], t[ends], slopes, np.interp(place, knots, u), np.interp(place, knots, t))


def _cuts(variation: np.ndarray, columns: int) -> np.ndarray:
    """Fractional cell indices of `columns` + 1 ends: every cell's own, and more where it varies."""
    low, high = 1e-9, 1e3
    for _ in range(60):
        middle = np.sqrt(low * high)
        if np.sum(np.ceil(np.maximum(variation / middle, 1.0))) > columns:
            low = middle
        else:
            high = middle
    pieces = np.ceil(np.maximum(variation / high, 1.0)).astype(int)
    place = np.repeat(np.arange(variation.size), pieces).astype(float)
    starts = np.cumsum(pieces) - pieces
    place += (np.arange(place.size) - np.repeat(starts, pieces)) / np.repeat(pieces, pieces)
    return np.concatenate([place, np.full(columns + 1 - place.size, float(variation.size))])
