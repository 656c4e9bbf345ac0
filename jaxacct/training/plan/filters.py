"""Renyi filters [Feldman and Zrnic 2021]: what a plan may use at one order, whatever the data make of it on the way.

Why a filter must be fixed before the first step, and what it promises:
jaxacct/training/plan/README.md, "Recalibration".
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from jaxacct.core.validation import InputError
from jaxacct.mechanisms import Mechanism
from jaxacct.representations.renyi_accounting import ORDERS, renyi_curve
from jaxacct.representations.renyi_conversions import epsilon_from_renyi

__all__ = ["Filter", "filter_of", "promises", "spent_renyi"]

_BUDGET_OVER_USE = 1.0 + 1e-10
"""The budget, relative to what the plan uses: the same steps added in another order differ by their rounding."""


class Filter(NamedTuple):
    """A Rényi filter [Feldman and Zrnic 2021]: at this order no more than `budget` is ever spent."""

    order: float
    budget: float

    def epsilon(self, delta: float) -> float:
        """What it promises at delta."""
        return float(epsilon_from_renyi([self.order], [self.budget], delta).upper)


def filter_of(mechanism: Mechanism, delta: float, relation: str) -> Filter:
    """The filter that a plan fixes for its run: what the run uses, at the order where that is worth the least epsilon.

    A smaller budget would not do: the run in which nothing is changed spends as much.

    Raises
    ------
    InputError : no Renyi divergence of the run is finite.
    """
    used = _used(mechanism, relation)
    best = int(np.argmin(_worth(used, delta)))
    if not np.isfinite(used[best]):
        raise InputError("data_dependent = True: no Renyi divergence of the plan is finite; use more noise")
    return Filter(float(ORDERS[best]), float(used[best]))


def promises(mechanism: Mechanism, delta: float, relation: str) -> np.ndarray:
    """The epsilon that the best filter for each of a batch of runs promises."""
    return np.min(_worth(_used(mechanism, relation), delta), axis=0)


def spent_renyi(mechanism: Mechanism, chosen: Filter, relation: str) -> np.ndarray:
    """What a mechanism takes from a filter."""
    return np.asarray(renyi_curve(mechanism, [chosen.order], relation).values[0])


def _used(mechanism: Mechanism, relation: str) -> np.ndarray:
    """The budgets, one for each order of the grid, that let a run pass."""
    return np.asarray(renyi_curve(mechanism, ORDERS, relation).values) * _BUDGET_OVER_USE


def _worth(used: np.ndarray, delta: float) -> np.ndarray:
    """Of budgets at all orders, shape (orders, ...), the epsilon that a filter of each order and budget promises."""
    pairs = zip(ORDERS, used, strict=True)
    return np.stack([epsilon_from_renyi([order], np.asarray(budget)[None], delta).upper for order, budget in pairs])
