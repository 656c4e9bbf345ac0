"""The noise for which a whole private selection meets a target: `ja.calibrate_noise_multiplier` with a law of K."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from jaxacct.accounting import account
from jaxacct.calibration.dp_sgd_search import search_for
from jaxacct.calibration.search import Found, certified_search
from jaxacct.calibration.starting_points import Goal, calibration_start
from jaxacct.core.bounds import Bounds
from jaxacct.core.validation import InputError, refuse_tracers
from jaxacct.engines.backend import job
from jaxacct.mechanisms import dp_sgd
from jaxacct.selection.law_of_k import Law
from jaxacct.selection.mechanism import select

__all__ = ["law_shape", "noise_of_selection"]

LEAST_RTOL = 1e-3
"""Relative closeness to the target that is wanted at most: the bracket of a selection is no narrower than about
1e-4."""
SINGLE_RUN_SHARE = 0.65
"""The search begins where a single run takes this share of the target."""


def law_shape(law: Any) -> tuple[int, ...]:
    """The batch shape of a law of K; InputError for anything else."""
    if not isinstance(law, Law):
        raise InputError(f"repetitions = {law!r:.40} must be a law of K; use one such as selection.Geometric(0.1)")
    refuse_tracers("ja.calibrate_noise_multiplier", "jaxacct.kernels.worst_score", repetitions=law)
    return law.shape


def noise_of_selection(goal: Goal, law: Law, shape: tuple[int, ...], candidates: str, backend: str = "auto") -> Found:
    """The noise multiplier of every row of the goal for which the selection, not only a single run, meets the
    target."""
    laws = law.flattened(shape)
    rtol = max(goal.rtol, LEAST_RTOL)

    def certify(relation: str, rows: np.ndarray, values: np.ndarray) -> Bounds:
        pieces = []
        for row, value in zip(rows, values, strict=True):  # each has a curve of its own, and one program serves all
            known: dict[str, Any] = {name: column[[row]] for name, column in goal.known.items()}
            run = dp_sgd(noise_multiplier=[value], **known)
            chosen = select(run, jax.tree.map(lambda x, row=row: x[[row]], laws), candidates=candidates)
            pieces.append(account.epsilon(chosen, goal.delta[[row]], relation=relation, rtol=rtol))
        names = ("lower", "estimate", "upper", "kind", "status", "engine")
        return Bounds(*(np.concatenate([getattr(piece, name) for piece in pieces]) for name in names))

    search = search_for(goal, lambda rows, values: certify(goal.relation, rows, values))
    search = search._replace(rtol=rtol, closest=0.25 * rtol)
    if goal.relation == "add_or_remove_one":
        search = search._replace(leader=lambda rows, values: certify("remove_one", rows, values))
    near = goal._replace(epsilon=SINGLE_RUN_SHARE * goal.epsilon)
    with job(goal.epsilon.size, backend):
        return certified_search(
            search, lambda rows: calibration_start(near, rows)[0]._replace(solved=np.zeros(rows.size, bool))
        )
