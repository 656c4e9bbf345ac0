"""Calibration of DP-SGD whose batches are not Poisson samples of single records: the same search, other runs.

What Poisson sampling would need is where the search begins; only certified brackets of the run itself decide.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from jaxacct.accounting import account
from jaxacct.calibration.calibrated import Calibration, checked_goal, result, search_for
from jaxacct.calibration.search import Start, certified_search
from jaxacct.calibration.start import calibration_start
from jaxacct.core.bounds import Bounds
from jaxacct.core.validation import RELATIONS, InputError, choice
from jaxacct.engines.backend import job
from jaxacct.mechanisms import SAMPLING, dp_sgd

__all__ = ["calibrated_by_rule"]


def calibrated_by_rule(
    unknown: str,
    target_epsilon: Any,
    target_delta: Any,
    known: dict[str, Any],
    rule: dict[str, Any],
    relation: str,
    rtol: float,
    limits: tuple[float, float],
    backend: str,
) -> Calibration:
    """The least private value of `unknown` that meets the target.

    known : the other parameters.
    rule : `sampling`, `dataset_size`, `cap` and `group`, as `dp_sgd` takes them.
    """
    choice("sampling", rule["sampling"], SAMPLING)
    sampling = rule["sampling"]
    if sampling == "random_allocation" and unknown == "sampling_probability":
        raise InputError(
            "sampling_probability cannot be solved for with sampling = 'random_allocation', whose slots are whole; use "
            "ja.calibrate(lambda t: ja.repeat(ja.RandomAllocation(ja.Gaussian(sigma), t), rounds), whole=True, ...)"
        )
    numbers = {name: rule[name] for name in ("dataset_size", "cap") if rule[name] is not None}
    words = {"sampling": sampling, "group": rule["group"]}
    goal, shape = checked_goal(
        unknown, target_epsilon, target_delta, known | numbers, relation, rtol, limits, {}, backend, RELATIONS
    )
    effort = account.effort_of_search(goal.rtol)

    def certified(rows: np.ndarray, values: np.ndarray) -> Bounds:
        fields = {name: column[rows] for name, column in goal.known.items()} | {unknown: values}
        return account.bracket_epsilon(dp_sgd(**fields, **words), goal.delta[rows], goal.relation, effort)

    def started(rows: np.ndarray) -> Start:
        start = calibration_start(near, rows)[0]
        x = start.x + math.log(rule["group"]) if unknown == "noise_multiplier" else start.x
        return Start(np.clip(x, *np.log(limits)), np.zeros(rows.size), np.zeros(rows.size, bool))

    near = goal._replace(known={name: goal.known[name] for name in known}, relation="add_or_remove_one")
    with job(goal.epsilon.size, backend):
        found = certified_search(search_for(goal, certified), started)
    # a cap binds more often at a larger rate, so that epsilon need not grow with the rate
    return result(found, shape, unknown != "sampling_probability" or sampling != "truncated_poisson")
