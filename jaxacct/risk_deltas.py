"""Certified deltas of many runs at several epsilons of each that are near each other, on one contour for each run."""

from __future__ import annotations

import numpy as np

from jaxacct.bounds import Bounds
from jaxacct.dispatch import kinds_of
from jaxacct.engines.contour_about import delta_about
from jaxacct.floats import ROUNDOFF
from jaxacct.mechanisms import Mechanism, components, directions
from jaxacct.mechanisms.base import take_rows
from jaxacct.real_profile import delta_at_any

__all__ = ["deltas_about"]

WIDTH, TOLERANCE = 0.25, 0.01
"""Of rtol: how narrow a bracket of one direction is to be, and what the contour may cut off."""


def deltas_about(run: Mechanism, epsilon: np.ndarray, relation: str, rtol: float) -> Bounds:
    """delta of n runs at (K, n) real epsilons: on one contour for each run, and by `delta_at_any` where that is wide.

    run : DP-SGD, n of them.  rtol : relative width at which a bracket is narrow enough.
    """
    ends = np.zeros((3, *epsilon.shape))
    one_contour = np.all(epsilon >= 0.0, axis=0)
    with np.errstate(all="ignore"):
        for direction in directions(run, relation):
            parts = components(run, relation, direction)
            kinds = kinds_of(parts)
            one_contour &= kinds.smooth & (parts.delta_infinity == 0.0)
            one_contour &= ~(kinds.closed_form | kinds.two_steps | kinds.beyond_kernels | kinds.nearly_always_sampled)
            rows = np.flatnonzero(one_contour)
            if rows.size:
                found = delta_about(
                    parts.take(rows), epsilon[:, rows].T, ends[0][:, rows].T, WIDTH * rtol, TOLERANCE * rtol
                )
                ends[:, :, rows] = np.maximum(ends[:, :, rows], np.stack(found).transpose(0, 2, 1))
    # an upper end of 0 always looks narrow
    one_contour &= np.all((ends[2] - ends[0] <= rtol * ends[2]) & (ends[2] > 0.0), axis=0)
    ends *= 1.0 + 4.0 * ROUNDOFF * np.array([-1.0, 0.0, 1.0])[:, None, None]
    left = np.flatnonzero(~one_contour)
    if left.size:
        rest = delta_at_any(take_rows(run, left), epsilon[:, left], relation, rtol=rtol)
        ends[:, :, left] = rest.lower, rest.estimate, rest.upper
    low, high = ends[0], np.minimum(ends[2], 1.0)
    return Bounds(low, np.clip(ends[1], low, high), high, run.kind_under(relation), "ok", "tradeoff")
