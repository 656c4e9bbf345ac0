"""What may be claimed of the runs of a ledger: exact composition, or a Rényi filter where one of them has one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxacct.accounting import account
from jaxacct.core.bounds import Bounds
from jaxacct.core.validation import InputError
from jaxacct.mechanisms.base import weakest
from jaxacct.representations.renyi_accounting import renyi_curve
from jaxacct.representations.renyi_conversions import epsilon_from_renyi
from jaxacct.training.ledger.format import Run
from jaxacct.training.ledger.totals import MANY_RELEASES, Spent, at_least, at_most, total
from jaxacct.training.plan.request import DISPLACING
from jaxacct.training.step.step_mechanisms import FIXED

__all__ = ["claim"]

_RTOL = 1e-4
"""A bracket from grouped releases is "ok" up to this relative width, as in `jaxacct.epsilon`."""


def claim(runs: Sequence[tuple[Spent, list[Run]]], delta: float, relation: str | None) -> Bounds:
    """Epsilon of what some runs have spent.

    Parameters
    ----------
    runs : for each run what it has spent, and the `run` lines with the plans that it has followed.
    delta : in (0, 1).
    relation : by default that of the plans, which must then all have one.

    Without a Renyi filter the releases of all runs are composed exactly.  With one, a run that has a filter counts as
    the filter's budget at the filter's order, and infinitely much if it has spent more than that; the other runs
    count as what they have spent, at that order.

    Raises
    ------
    InputError : plans of several relations and none chosen, filters of several orders or relations, or fixed batches
        under a relation in which a record is added or removed.
    """
    relations = {line.plan.relation for _, headers in runs for line in headers}
    if relation is None:
        if len(relations) > 1:
            raise InputError(f"relation is missing; the plans have {' and '.join(sorted(relations))}, choose one")
        relation = next(iter(relations))
    if len({line.plan.unit for _, headers in runs for line in headers}) > 1:
        raise InputError("runs of records and of users are in it, whose guarantees do not add up; ask for one run")
    fixed = any(line.plan.sampling == FIXED for _, headers in runs for line in headers)
    if relation in DISPLACING and (fixed or any(r.sampling == FIXED for spent, _ in runs for r in spent.releases)):
        raise InputError(
            f"relation = {relation!r} does not hold for fixed batches, where one record more moves another to another "
            "batch; account for each pass as ja.Gaussian(noise_multiplier / 5**0.5)"
        )
    every = [[line.plan.filter for line in headers if line.plan.filter] for _, headers in runs]
    orders = {one.order for several in every for one in several}
    if not orders:
        return _composed([spent for spent, _ in runs], delta, relation)
    if len(orders) > 1 or relations != {relation}:
        raise InputError("the runs have Renyi filters of different orders or relations; ask for one run at a time")
    used = 0.0  # Renyi divergence at the filters' order
    for (spent, _), several in zip(runs, every, strict=True):
        renyi = float(renyi_curve(total([spent]), [*orders], relation).values[0])
        budget = max((one.budget for one in several), default=renyi)
        used += budget if renyi <= budget else np.inf
    upper = float(epsilon_from_renyi([*orders], [used], delta).upper)
    return Bounds(0.0, upper, upper, "bound", "width" if np.isinf(upper) else "ok", "rdp_filter")


def _composed(several: list[Spent], delta: float, relation: str) -> Bounds:
    """Epsilon of the composition; if many releases differ, similar ones are grouped, once for each end."""
    if len(set().union(*(spent.releases for spent in several))) <= MANY_RELEASES:
        return account.epsilon(total(several), delta, relation=relation)
    most = account.epsilon(total(several, at_most), delta, relation=relation)
    least = account.epsilon(total(several, at_least), delta, relation=relation)
    lower, upper = float(least.lower), float(most.upper)
    narrow = upper - lower <= _RTOL * upper
    status = most.status if not most.ok else least.status if not least.ok else "ok" if narrow else "width"
    kind = weakest([str(most.kind), str(least.kind)])
    return Bounds(lower if kind == "certified" else 0.0, float(most.estimate), upper, kind, status, most.engine)
