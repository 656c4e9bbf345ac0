"""Rounds of random allocation of which some configurations have one round only.

One round has an engine of its own, far narrower than the pairs that stand for a round in a composition.  So the rows
of one round are asked by themselves, as the mechanism without the repetition, and the others as they are.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from jaxacct.accounting.dispatch import engine_of_mechanism
from jaxacct.core.bounds import Bounds
from jaxacct.core.validation import broadcast_shape
from jaxacct.mechanisms import Mechanism, Repeated, batch_shape
from jaxacct.mechanisms.base import take_rows
from jaxacct.mechanisms.random_allocation import RandomAllocation

__all__ = ["single_rounds"]

Ask = Callable[[Mechanism, np.ndarray], Bounds]
"""(mechanism, deltas or epsilons) -> brackets."""


def single_rounds(quantity: str, mechanism: Mechanism, given: np.ndarray, engine: str, ask: Ask) -> Bounds | None:
    """The brackets of "epsilon" or "delta" of a mechanism that repeats one round once in some rows; None for others.

    ask : answers mechanisms in which no row, or every row, is a single round.
    """
    if engine != "auto" or not isinstance(mechanism, Repeated) or (quantity == "epsilon" and not given.all()):
        return None  # a delta of 0 is refused where all parts are seen
    inner, steps = mechanism.mechanism, np.asarray(mechanism.steps, np.float64)
    while isinstance(inner, Repeated):
        inner, steps = inner.mechanism, steps * np.asarray(inner.steps, np.float64)
    once = steps == 1.0
    if not isinstance(inner, RandomAllocation) or not once.any() or engine_of_mechanism(inner, engine) is None:
        return None
    other = "delta" if quantity == "epsilon" else "epsilon"
    shape = broadcast_shape({"the mechanism": batch_shape(mechanism), other: given.shape})
    if once.all():
        return ask(inner, np.broadcast_to(given, shape))
    mine = batch_shape(mechanism)
    places = np.broadcast_to(np.arange(int(np.prod(mine))).reshape(mine), shape).reshape(-1)
    targets, once = np.broadcast_to(given, shape).reshape(-1), np.broadcast_to(once, shape).reshape(-1)
    inner = take_rows(Repeated(inner, steps), places).mechanism  # all fields along one axis
    several = take_rows(mechanism, places[~once])
    first, second = ask(take_rows(inner, np.flatnonzero(once)), targets[once]), ask(several, targets[~once])
    columns = []
    for one, two in zip(_columns(first), _columns(second), strict=True):
        column = np.empty(once.size, np.result_type(one, two))
        column[once], column[~once] = one, two
        columns.append(column.reshape(shape))
    return Bounds(*columns)


def _columns(found: Bounds) -> tuple[np.ndarray, ...]:
    return tuple(
        np.asarray(column)
        for column in (found.lower, found.estimate, found.upper, found.kind, found.status, found.engine)
    )
