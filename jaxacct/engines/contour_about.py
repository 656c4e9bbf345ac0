"""Brackets of delta at several epsilons of one composition that are near each other, on one contour."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from jaxacct.engines import quick_bounds
from jaxacct.engines.backend import evaluate
from jaxacct.engines.contour import (
    DELTA_ROUNDS,
    LADDER,
    LEAST_DELTA,
    LOWEST_LOG_DELTA,
    PLAIN,
    Answer,
    law,
    may_split,
    reach,
    rung_for,
)
from jaxacct.kernels import contour
from jaxacct.kernels.split import contour as split_contour
from jaxacct.mechanisms.loss_components import Components

__all__ = ["delta_about", "delta_along"]

FIRST_SPLIT = sum(not rung.split for rung in LADDER)
"""Place of the first split rung of the ladder."""
MOST_RUNGS = 5
"""Rungs for many eps: on finer ones a contour takes as long as the ladder does for each eps."""


def delta_about(parts: Components, epsilon: np.ndarray, floor: np.ndarray, width: float, tolerance: float) -> Answer:
    """Brackets of the finite part of delta, 0 and 1 where nothing is known; every array (B, K).

    epsilon : at least 0; those of a row should be within about a deviation of the loss.
    floor : an upper end at most this is not refined.
    width : relative width at which a bracket is narrow enough.
    tolerance : size of images and cut-off terms relative to delta.
    """
    middle = 0.5 * (np.min(epsilon, axis=1) + np.max(epsilon, axis=1))
    both = np.ones(epsilon.shape, bool)
    rung, widths = np.zeros(middle.size, int), np.full(epsilon.shape, width)
    return _climb(contour.delta_about, parts, middle, epsilon, floor, widths, both, tolerance, rung)


def delta_along(
    parts: Components,
    place: np.ndarray,
    epsilon: np.ndarray,
    floor: np.ndarray,
    width: np.ndarray,
    both: np.ndarray,
    tolerance: float,
    rung: np.ndarray,
) -> Answer:
    """The same for many eps of a row, rising, which may be several deviations of the loss from that of the contour.

    Far from the contour the images leave no lower end.

    place : (B,), the eps for which the contour is placed.  width : (B, K).
    both : (B, K), whether the lower end is wanted; else the upper end need only be near the estimate.
    rung : (B,), on which each row begins; it is changed to the last one that was used.
    """
    return _climb(contour.delta_along, parts, place, epsilon, floor, width, both, tolerance, rung)


def _climb(
    kernel: Callable[..., Any],
    parts: Components,
    middle: np.ndarray,
    epsilon: np.ndarray,
    floor: np.ndarray,
    width: np.ndarray,
    both: np.ndarray,
    tolerance: float,
    last: np.ndarray,
) -> Answer:
    along = kernel is contour.delta_along
    rungs = PLAIN[:MOST_RUNGS] if along else LADDER
    splits = may_split(parts)
    answer = Answer(np.zeros(epsilon.shape), np.full(epsilon.shape, np.nan), np.ones(epsilon.shape))
    answer.upper[epsilon > reach(parts).largest_loss[:, None]] = 0.0
    due = np.where(np.all(answer.upper <= floor, axis=1), len(rungs), last)
    for step, rung in enumerate(rungs):
        rows = np.flatnonzero(due == step)
        if not rows.size:
            continue
        last[rows] = step
        log_tol = np.full(rows.size, np.log(max(tolerance, rung.tolerance)))
        static, unknown = {"points": rung.points, "count": rung.nodes}, np.zeros(rows.size)
        more: tuple[Any, ...] = (log_tol,)
        if rung.split:
            ask, more = split_contour.delta_about, (split_contour.Start(unknown, unknown), log_tol)
            static["rounds"] = DELTA_ROUNDS
        else:
            ask = kernel
        arguments = (law(parts, rows), middle[rows], epsilon[rows], *more)
        found = evaluate(ask, arguments, rows.size, rung.chunk, **static)
        low, high = _from_logs(found[0], found[2], found[3] & (np.isfinite(found[0]) | ~both[rows]))
        low, high = (_all_agreed if along else _agreed)(parts.take(rows), epsilon[rows], low, high)
        middle_of = np.exp(np.minimum(found[1], 0.0))
        better = high - low < answer.upper[rows] - answer.lower[rows]
        answer.estimate[rows] = np.where(better, middle_of, answer.estimate[rows])
        low, high = np.maximum(low, answer.lower[rows]), np.minimum(high, answer.upper[rows])
        agree = low <= high
        answer.lower[rows], answer.upper[rows] = np.where(agree, low, 0.0), np.where(agree, high, 1.0)
        below = np.where(both[rows], low, middle_of)
        done = agree & ((high - below <= width[rows] * high) | (high <= floor[rows]))
        needs = found[4].reshape(rows.size, 2)
        next_one = np.maximum(rung_for(needs, rungs), step + 1)
        if along:  # where the rung has all that is needed, and where none has, no other one would do better
            enough = np.all(needs <= (rung.points, rung.nodes), axis=1)
            beyond = np.any(needs > (rungs[-1].points, rungs[-1].nodes), axis=1)
            next_one = np.where(enough | beyond, len(rungs), next_one)
        else:
            next_one = np.minimum(next_one, max(FIRST_SPLIT, step + 1))
            next_one = np.where((next_one >= FIRST_SPLIT) & ~splits[rows], len(rungs), next_one)
        due[rows] = np.where(np.all(done, axis=1), len(rungs), next_one)
    middle_of = np.where(np.isnan(answer.estimate), answer.upper, answer.estimate)
    return answer._replace(estimate=np.clip(middle_of, answer.lower, answer.upper))


def _from_logs(low: np.ndarray, high: np.ndarray, ok: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Ends of delta from those of its logarithm; 0 and 1 where there are none."""
    known = ok & np.isfinite(high) & (low < np.inf)
    lower = np.where(known & (low > LOWEST_LOG_DELTA), np.exp(np.minimum(low, 0.0)), 0.0)
    upper = np.where(known, np.maximum(np.exp(np.minimum(high, 0.0)), LEAST_DELTA), 1.0)
    return lower, upper


def _agreed(parts: Components, epsilon: np.ndarray, low: np.ndarray, high: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The ends where no quick theorem contradicts them, else 0 and 1."""
    each = parts.take(np.repeat(np.arange(len(epsilon)), epsilon.shape[1]))
    holds = _holds(each, *(x.reshape(-1) for x in (epsilon, low, high))).reshape(low.shape)
    return np.where(holds, low, 0.0), np.where(holds, high, 1.0)


def _all_agreed(
    parts: Components, epsilon: np.ndarray, low: np.ndarray, high: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The ends of rows where no quick theorem contradicts the first, the middle or the last eps, else 0 and 1."""
    holds = np.ones(epsilon.shape[0], bool)
    for column in (0, epsilon.shape[1] // 2, -1):
        holds &= _holds(parts, epsilon[:, column], low[:, column], high[:, column])
    return np.where(holds[:, None], low, 0.0), np.where(holds[:, None], high, 1.0)


def _holds(parts: Components, epsilon: np.ndarray, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Whether no quick theorem contradicts the ends."""
    least, most = quick_bounds.limits("delta", parts, epsilon, np.zeros(epsilon.size))
    return (low <= most) & (high >= least)
