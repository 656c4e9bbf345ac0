"""What may be claimed of the runs of a ledger: exact composition, or a Rényi filter where one of them has one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxacct import account
from jaxacct.bounds import Bounds
from jaxacct.representations.renyi_accounting import renyi_curve
from jaxacct.representations.renyi_conversions import epsilon_from_renyi
from jaxacct.training.lines import Run
from jaxacct.training.spent import Spent, total
from jaxacct.validation import InputError

__all__ = ["claim"]


def claim(runs: Sequence[tuple[Spent, list[Run]]], delta: float, relation: str | None) -> Bounds:
    """Epsilon of what some runs have spent, each with the plans that it has followed."""
    relations = {line.plan.relation for _, headers in runs for line in headers}
    if relation is None:
        if len(relations) > 1:
            raise InputError(f"relation is missing; the plans have {' and '.join(sorted(relations))}, choose one")
        relation = next(iter(relations))
    every = [[line.plan.filter for line in headers if line.plan.filter] for _, headers in runs]
    orders = {one.order for several in every for one in several}
    if not orders:
        return account.epsilon(total([spent for spent, _ in runs]), delta, relation=relation)
    if len(orders) > 1 or relations != {relation}:
        raise InputError("the runs have Renyi filters of different orders or relations; ask for one run at a time")
    used = 0.0  # at the filters' order: the budgets of the runs that have one, and what the others have spent
    for (spent, _), several in zip(runs, every, strict=True):
        renyi = float(renyi_curve(total([spent]), [*orders], relation).values[0])
        budget = max((one.budget for one in several), default=renyi)
        used += budget if renyi <= budget else np.inf
    upper = float(epsilon_from_renyi([*orders], [used], delta).upper)
    return Bounds(0.0, upper, upper, "bound", "width" if np.isinf(upper) else "ok", "rdp_filter")
