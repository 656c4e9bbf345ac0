"""Brackets of delta at several epsilons of one composition that are near each other, on one contour."""

from __future__ import annotations

import numpy as np

from jaxacct.engines import quick_bounds
from jaxacct.engines.backend import evaluate
from jaxacct.engines.contour import LADDER, LEAST_DELTA, LOWEST_LOG_DELTA, Answer, law, reach, rung_for
from jaxacct.kernels import contour
from jaxacct.mechanisms.loss_components import Components

__all__ = ["delta_about"]

RUNGS = tuple(rung for rung in LADDER if not rung.split)
"""The plain rungs; a composition that none of them answers is left to the ladder."""


def delta_about(
    parts: Components,
    epsilon: np.ndarray,
    floor: np.ndarray,
    width: float | np.ndarray,
    tolerance: float | np.ndarray,
    place: np.ndarray | None = None,
) -> Answer:
    """Brackets of the finite part of delta, 0 and 1 where nothing is known; every array (B, K).

    epsilon : at least 0; those of a row should be within about a deviation of the loss of where the contour is placed.
    floor : an upper end at most this is not refined.
    width : relative width at which a bracket is narrow enough, a number or (B, K).
    tolerance : size of images and cut-off terms relative to delta, a number or (B,).
    place : (B,), the eps for which the contour is placed; by default the middle of a row's.
    """
    middle = 0.5 * (np.min(epsilon, axis=1) + np.max(epsilon, axis=1)) if place is None else place
    width, log_tol = np.broadcast_to(width, epsilon.shape), np.log(np.broadcast_to(tolerance, middle.shape))
    answer = Answer(np.zeros(epsilon.shape), np.full(epsilon.shape, np.nan), np.ones(epsilon.shape))
    answer.upper[epsilon > reach(parts).largest_loss[:, None]] = 0.0
    due = np.where(np.all(answer.upper <= floor, axis=1), len(RUNGS), 0)
    for step, rung in enumerate(RUNGS):
        rows = np.flatnonzero(due == step)
        if not rows.size:
            continue
        arguments = (law(parts, rows), middle[rows], epsilon[rows], log_tol[rows])
        static = {"points": rung.points, "count": rung.nodes}
        found = evaluate(contour.delta_about, arguments, rows.size, rung.chunk, **static)
        low, high = _agreed(parts.take(rows), epsilon[rows], *_from_logs(found[0], found[2], found[3]))
        middle_of = np.exp(np.minimum(found[1], 0.0))
        better = high - low < answer.upper[rows] - answer.lower[rows]
        answer.estimate[rows] = np.where(better, middle_of, answer.estimate[rows])
        low, high = np.maximum(low, answer.lower[rows]), np.minimum(high, answer.upper[rows])
        agree = low <= high
        answer.lower[rows], answer.upper[rows] = np.where(agree, low, 0.0), np.where(agree, high, 1.0)
        done = agree & ((high - low <= width[rows] * high) | (high <= floor[rows]))
        next_one = np.maximum(rung_for(found[4].reshape(rows.size, 2), RUNGS), step + 1)
        due[rows] = np.where(np.all(done, axis=1), len(RUNGS), next_one)
    middle_of = np.where(np.isnan(answer.estimate), answer.upper, answer.estimate)
    return answer._replace(estimate=np.clip(middle_of, answer.lower, answer.upper))


def _from_logs(low: np.ndarray, high: np.ndarray, ok: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Ends of delta from those of its logarithm; 0 and 1 where there are none."""
    known = ok & np.isfinite(low) & np.isfinite(high)
    lower = np.where(known & (low > LOWEST_LOG_DELTA), np.exp(np.minimum(low, 0.0)), 0.0)
    upper = np.where(known, np.maximum(np.exp(np.minimum(high, 0.0)), LEAST_DELTA), 1.0)
    return lower, upper


def _agreed(parts: Components, epsilon: np.ndarray, low: np.ndarray, high: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The ends where no quick theorem contradicts them, else 0 and 1."""
    for column, target in enumerate(epsilon.T):
        least, most = quick_bounds.limits("delta", parts, target, np.zeros(target.size))
        holds = (low[:, column] <= most) & (high[:, column] >= least)
        low[:, column] = np.where(holds, low[:, column], 0.0)
        high[:, column] = np.where(holds, high[:, column], 1.0)
    return low, high
