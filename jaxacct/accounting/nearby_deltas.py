"""Certified deltas of many runs at several epsilons of each, on one contour for each run."""

from __future__ import annotations

import numpy as np

from jaxacct.accounting.account import delta_without_attacks
from jaxacct.accounting.dispatch import beyond_kernels, kinds_of, nearly_always_sampled
from jaxacct.core.bounds import Bounds
from jaxacct.core.floats import ROUNDOFF
from jaxacct.engines.contour import delta_about, delta_along, reach
from jaxacct.mechanisms import Components, Mechanism, components, directions
from jaxacct.mechanisms.base import take_rows

__all__ = ["deltas_about", "deltas_along"]

WIDTH, TOLERANCE = 0.25, 0.01
"""Of rtol: how narrow a bracket of one direction is to be, and what the contour may cut off."""

LOWER_PLACE = 0.28
"""Where the contour of adding is placed, over the place or the largest loss."""
FAR_TOLERANCE = 1e-9
"""What that contour may cut off, which is larger in relation to delta several deviations above its place."""
ROUGH = 3e-3
"""Relative distance of an upper end from the estimate that is near enough where rtol is not wanted."""


def deltas_about(run: Mechanism, epsilon: np.ndarray, relation: str, rtol: float) -> Bounds:
    """delta of n runs at (K, n) real epsilons: on one contour for each run, or one by one where that is too wide.

    run : DP-SGD, n of them.  rtol : relative width at which a bracket is narrow enough.
    """
    ends = np.zeros((3, *epsilon.shape))
    one_contour = np.all(epsilon >= 0.0, axis=0)
    with np.errstate(all="ignore"):
        for direction in directions(run, relation):
            parts = components(run, relation, direction)
            one_contour &= _plain(parts)
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
        rest = delta_without_attacks(take_rows(run, left), epsilon[:, left], relation=relation, rtol=rtol)
        ends[:, :, left] = rest.lower, rest.estimate, rest.upper
    low, high = ends[0], np.minimum(ends[2], 1.0)
    return Bounds(low, np.clip(ends[1], low, high), high, run.kind_under(relation), "ok", "tradeoff")


def deltas_along(
    run: Mechanism,
    place: np.ndarray,
    epsilon: np.ndarray,
    both: np.ndarray,
    relation: str,
    rtol: float,
    tolerance: float = TOLERANCE,
    rungs: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Lower and upper ends of delta of n runs at (K, n) epsilons, rising, on one contour for each run and direction.

    Nothing is refined beyond that: where nothing is known the ends are 0 and 1.

    run : DP-SGD, n of them.  place : (n,), near the eps where rtol is wanted.  both : (K, n), whether it is; elsewhere
    a rough upper end is enough.  tolerance : of rtol, what the contour there may cut off by a first approximation of
    delta.  rungs : (2, n), on which the contours of the directions begin; changed to those on which they ended.
    """
    rungs = np.zeros((2, place.size), int) if rungs is None else rungs
    low, high = np.zeros(epsilon.shape), np.zeros(epsilon.shape)
    with np.errstate(all="ignore"):
        # the larger one first, as a rule: the other's upper ends need only not be larger
        for direction, begin in zip(sorted(directions(run, relation), reverse=True), rungs, strict=False):
            parts = components(run, relation, direction)
            plain = _plain(parts) & np.all(epsilon >= 0.0, axis=0)
            high[:, ~plain] = 1.0
            rows = np.flatnonzero(plain)
            if rows.size:
                some, at, cut_off, asked = parts.take(rows), place[rows], tolerance * rtol, both[:, rows].T
                if direction == "add":  # its loss is bounded, and its deltas matter near eps = 0
                    at, cut_off = LOWER_PLACE * np.minimum(at, reach(some).largest_loss), FAR_TOLERANCE
                    asked = np.zeros(asked.shape, bool)
                widths = np.where(asked, WIDTH * rtol, ROUGH)
                rung = begin[rows]
                found = delta_along(some, at, epsilon[:, rows].T, low[:, rows].T, widths, asked, cut_off, rung)
                begin[rows] = rung
                low[:, rows] = np.maximum(low[:, rows], found.lower.T)
                high[:, rows] = np.maximum(high[:, rows], found.upper.T)
    return low * (1.0 - 4.0 * ROUNDOFF), np.minimum(high * (1.0 + 4.0 * ROUNDOFF), 1.0)


def _plain(parts: Components) -> np.ndarray:
    """Whether the contour engine alone answers, row by row."""
    kinds = kinds_of(parts)
    by_formula = kinds.gaussian | (kinds.sampled_steps == 1) | (kinds.sampled_steps == 2)
    others = by_formula | beyond_kernels(parts, kinds) | nearly_always_sampled(parts)
    return reach(parts).answers & ~kinds.empty & (parts.delta_infinity == 0.0) & ~others
