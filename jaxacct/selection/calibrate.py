"""The noise for which a whole private selection meets a target: `ja.calibrate_noise_multiplier` with a law of K."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from jaxacct import account, solvers
from jaxacct.bounds import Bounds
from jaxacct.guess import Goal
from jaxacct.mechanisms import dp_sgd
from jaxacct.selection.law_of_k import Law
from jaxacct.selection.mechanism import select
from jaxacct.validation import InputError, refuse_tracers

__all__ = ["law_shape", "solve"]

LEAST_RTOL = 1e-3
"""Smallest relative closeness to the target that is asked for: the bracket of a selection is hardly narrower than
1e-4."""
SINGLE_RUN_SHARE = 0.65
"""The search begins at the noise with which a single run takes this share of the target epsilon."""


def law_shape(law: Any) -> tuple[int, ...]:
    """The batch shape of a law of K; InputError for anything else."""
    if not isinstance(law, Law):
        raise InputError(f"repetitions = {law!r:.40} must be a law of K; use one such as selection.Geometric(0.1)")
    refuse_tracers("ja.calibrate_noise_multiplier", "jaxacct.kernels.worst_score", repetitions=law)
    return law.shape


def solve(
    goal: Goal, law: Law, shape: tuple[int, ...], candidates: str = "iid"
) -> tuple[np.ndarray, np.ndarray, tuple[np.ndarray, ...]]:
    """As `solvers.solve`, for the selection: (values, statuses, columns of Bounds) for every row of the goal."""
    laws = law.flattened(shape)
    rtol = max(goal.rtol, LEAST_RTOL)

    def certify(asked: Goal, rows: np.ndarray, values: np.ndarray) -> Bounds:
        pieces = []
        for row, value in zip(rows, values, strict=True):  # each has a curve of its own, and one program serves all
            run = dp_sgd(noise_multiplier=[value], **{name: column[[row]] for name, column in asked.known.items()})
            chosen = select(run, jax.tree.map(lambda x, row=row: x[[row]], laws), candidates=candidates)
            pieces.append(account.epsilon(chosen, asked.delta[[row]], relation=asked.relation, rtol=rtol))
        names = ("lower", "estimate", "upper", "kind", "status", "engine")
        return Bounds(*(np.concatenate([getattr(piece, name) for piece in pieces]) for name in names))

    near = goal._replace(epsilon=SINGLE_RUN_SHARE * goal.epsilon)
    return solvers.search(goal._replace(rtol=rtol, met=0.25 * rtol), certify, near)
