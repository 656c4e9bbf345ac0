"""Renyi filters: what a plan may use at one order, whatever the data make of it on the way."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from jaxacct.mechanisms import Mechanism
from jaxacct.representations.renyi_accounting import ORDERS, renyi_curve
from jaxacct.representations.renyi_conversions import epsilon_from_renyi
from jaxacct.training.schedule import Filter
from jaxacct.validation import InputError

if TYPE_CHECKING:
    from jaxacct.training.plan import Plan

__all__ = ["filter_of", "promises", "spent_renyi"]

ROOM = 1.0 + 1e-10
"""The budget, relative to what the plan uses: the same steps added in another order differ by their rounding."""


def filter_of(plan: Plan) -> Filter:
    """The filter that a plan fixes: what the plan itself uses, at the order where that is worth the least epsilon.

    Nothing less would do: the run in which nothing is changed spends as much.
    """
    used = _used(plan, plan.mechanism)
    best = int(np.argmin(_worth(used, plan.target_delta)))
    if not np.isfinite(used[best]):
        raise InputError("data_dependent = True: no Renyi divergence of the plan is finite; use more noise")
    return Filter(float(ORDERS[best]), float(used[best]))


def promises(plan: Plan, mechanism: Mechanism) -> np.ndarray:
    """The epsilon that the best filter for each of a batch of runs promises."""
    return np.min(_worth(_used(plan, mechanism), plan.target_delta), axis=0)


def spent_renyi(plan: Plan, mechanism: Mechanism, chosen: Filter) -> np.ndarray:
    """What a mechanism takes from a filter."""
    return np.asarray(renyi_curve(mechanism, [chosen.order], plan.relation).values[0])


def _used(plan: Plan, mechanism: Mechanism) -> np.ndarray:
    return np.asarray(renyi_curve(mechanism, ORDERS, plan.relation).values) * ROOM


def _worth(used: np.ndarray, delta: float) -> np.ndarray:
    """Of budgets at all orders, (O, ...), the epsilon that a filter of each order and budget promises."""
    pairs = zip(ORDERS, used, strict=True)
    return np.stack([epsilon_from_renyi([order], np.asarray(budget)[None], delta).upper for order, budget in pairs])
