"""How much a Gaussian trade-off function gives away of the true one: the regret, bracketed from values of delta.

The regret of f_mu is the least kappa with `f(a + kappa) - kappa <= f_mu(a)` for all a.  It is at most
`sup over eps >= 0 of (delta_mu(eps) - delta(eps))/(1 + e^eps)`, and at least the value of that quotient at eps = 0.
Derivation: jaxacct/representations/README.md, "Gaussian differential privacy".
"""

from __future__ import annotations

import numpy as np

from jaxacct.accounting.gaussian_mu import with_more
from jaxacct.accounting.true_positive_rates import Deltas
from jaxacct.core.bounds import Bounds
from jaxacct.core.floats import ROUNDOFF

__all__ = ["gaussian_regret"]

ROUNDS = 8
"""How often values of delta are added where the bound is largest."""
ADDED = 4
"""Values added to a row in a round."""
NARROW = 1e-3
"""A row is finished when its bracket is relatively this narrow, or NARROW_ABSOLUTE wide."""
NARROW_ABSOLUTE = 1e-7


def gaussian_regret(deltas: Deltas, lines: np.ndarray, mu: np.ndarray, kind: str) -> Bounds:
    """The regret of f_mu, row by row, for deltas of a relation that is its own reverse.

    lines : the first values of delta, as `GaussianFit.lines`; eps rises from 0.
    """
    from jaxacct.engines import closed_form  # SciPy, which takes a while to import: only where it is needed

    low, high = np.zeros(mu.size), np.full(mu.size, 0.5)  # a regret is never above 1/2: f(a + 1/2) - 1/2 <= 0
    rows = np.flatnonzero(np.isfinite(mu) & (mu > 0.0))
    high[mu == 0.0] = 0.0
    lines = lines[:, :, rows]
    for turn in range(ROUNDS + 1):
        if not rows.size:
            break
        epsilon, below, above = lines
        flat = np.broadcast_to(mu[rows], epsilon.shape).reshape(-1)
        gaussian = closed_form.delta(flat, epsilon.reshape(-1))
        most, least = (end.reshape(epsilon.shape) for end in (gaussian.upper, gaussian.lower))
        cells, last = _cells(epsilon, below, above, most)
        bound = np.maximum(np.max(cells, axis=0), last) * (1.0 + 1e-12) + 4.0 * ROUNDOFF
        low[rows] = np.maximum(low[rows], 0.5 * (least[0] - above[0]) - 4.0 * ROUNDOFF)
        high[rows] = np.maximum(np.minimum(high[rows], np.maximum(bound, 0.0)), low[rows])
        done = (high[rows] - low[rows] <= np.maximum(NARROW * high[rows], NARROW_ABSOLUTE)) | (turn == ROUNDS)
        rows, lines, cells = rows[~done], lines[:, :, ~done], cells[:, ~done]
        if rows.size:
            worst = np.argpartition(-cells, ADDED, axis=0)[:ADDED]
            lines = with_more(deltas, lines, worst, rows)
    low = low if kind == "certified" else np.zeros_like(low)
    narrow = high - low <= np.maximum(10.0 * NARROW * high, NARROW_ABSOLUTE)
    return Bounds(low, low + 0.5 * (high - low), high, kind, np.where(narrow, "ok", "width"), "tradeoff")


def _cells(
    epsilon: np.ndarray, low: np.ndarray, high: np.ndarray, gaussian: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The largest quotient on every cell between two eps, and beyond the last.

    On a cell delta_mu is below its chord, and delta above the chords of both neighbouring cells, extended, and above
    its value at the right end.  Each quotient of two lines is monotone, so its ends decide.
    """
    with np.errstate(all="ignore"):
        ratio = np.exp(epsilon)
        # not a difference of two e^eps, of which nothing may be left between two that are near
        width, share = ratio[:-1] * np.expm1(np.diff(epsilon, axis=0)), 1.0 / (1.0 + ratio)
        # at most the slope of delta: by symmetry -(1 - delta(0))/2 belongs to its slopes at E = 1
        before = np.concatenate([-0.5 * (1.0 - low[:1]), (low[1:-1] - high[:-2]) / width[:-1]]) * (1.0 + 1e-9)
        # at least it
        after = np.minimum((high[2:] - low[1:-1]) / width[1:], 0.0) * (1.0 - 1e-9)
    after = np.concatenate([after, np.zeros_like(low[:1])])
    bounds = []
    for left, right in (
        (low[:-1], low[:-1] + before * width),
        (low[1:] - after * width, low[1:]),
        (low[1:], low[1:]),
    ):
        at_left, at_right = (gaussian[:-1] - left) * share[:-1], (gaussian[1:] - right) * share[1:]
        bounds.append(np.nan_to_num(np.maximum(at_left, at_right), nan=np.inf))
    return np.min(bounds, axis=0), gaussian[-1] * share[-1]
