"""The engine of one round of random allocation as a mechanism: the larger of the directions of a relation.

`engines/allocation.py` answers for each direction; jaxacct/kernels/allocation/README.md has the proofs.  Balls in bins
are one round of random allocation with less noise, which is rounded both ways.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxacct.core.bounds import Bounds
from jaxacct.core.validation import InputError, UnboundedLossError, broadcast_shape
from jaxacct.engines.protocol import MechanismEngine
from jaxacct.mechanisms.balls_in_bins import BallsInBins
from jaxacct.mechanisms.base import DIRECTIONS, batch_shape
from jaxacct.mechanisms.gaussian import Gaussian
from jaxacct.mechanisms.random_allocation import RandomAllocation

__all__ = ["OneRound", "SameBins"]

_DIRECTIONS_OF = {
    "add_or_remove_one": DIRECTIONS,
    "zero_out": DIRECTIONS,
    "remove_one": ("remove",),
    "add_one": ("add",),
}
"""The directions whose larger answer each relation takes."""
NO_RELATIVE_ACCURACY = 1e-300
"""Near the end of float64's range a delta has no relative accuracy, so any bracket below it is narrow."""


class OneRound(MechanismEngine):
    """One round of random allocation of a Gaussian, one slot a record."""

    name = "allocation"
    by_rows = True

    def supports(self, mechanism: Any) -> bool:
        return (
            isinstance(mechanism, RandomAllocation)
            and type(mechanism.mechanism) is Gaussian
            and bool(np.all(np.equal(mechanism.participations, 1.0) & np.equal(mechanism.group, 1.0)))
            and not mechanism.symmetric()  # plain releases, under any relation
        )

    def epsilon(self, mechanism: Any, delta: np.ndarray, relation: str, rtol: float) -> Bounds:
        return self._epsilon(mechanism, delta, relation, rtol, None)

    def epsilon_near(self, mechanism: Any, delta: np.ndarray, relation: str, rtol: float, near: np.ndarray) -> Bounds:
        return self._epsilon(mechanism, delta, relation, rtol, near)

    def _epsilon(
        self, mechanism: Any, delta: np.ndarray, relation: str, rtol: float, near: np.ndarray | None
    ) -> Bounds:
        if np.any(np.asarray(delta) == 0.0):
            raise UnboundedLossError(np.asarray(delta) == 0.0)
        return _bracket("epsilon", mechanism, delta, relation, rtol, near)

    def delta(self, mechanism: Any, epsilon: np.ndarray, relation: str, rtol: float) -> Bounds:
        return _bracket("delta", mechanism, epsilon, relation, rtol)

    def guess(self, mechanism: Any, delta: np.ndarray) -> np.ndarray | None:
        from jaxacct.engines import allocation

        shape = np.broadcast_shapes(batch_shape(mechanism), np.shape(delta))
        columns = mechanism.mechanism.noise_multiplier, mechanism.slots, delta
        return allocation.guess(*(np.broadcast_to(x, shape).reshape(-1) for x in columns)).reshape(shape)

    def excess(self, mechanism: Any, epsilon: np.ndarray, delta: np.ndarray, relation: str) -> np.ndarray | None:
        from jaxacct.engines import allocation

        if relation not in _DIRECTIONS_OF:
            return None
        shape = np.broadcast_shapes(batch_shape(mechanism), np.shape(epsilon), np.shape(delta))
        sigma, slots, asked, eps = (
            np.broadcast_to(x, shape).reshape(-1)
            for x in (mechanism.mechanism.noise_multiplier, mechanism.slots, delta, epsilon)
        )
        # removing a record was the larger direction in every case seen
        return allocation.excess(sigma, slots, asked, eps, _DIRECTIONS_OF[relation][0]).reshape(shape)


def _bracket(
    quantity: str, mechanism: Any, given: np.ndarray, relation: str, rtol: float, near: np.ndarray | None = None
) -> Bounds:
    from jaxacct.engines import allocation  # SciPy: only where it is needed

    if relation not in _DIRECTIONS_OF:
        raise InputError(
            f"relation = {relation!r} gives no pair for random allocation; ask ja.epsilon or ja.delta: they bound it"
        )
    mine = batch_shape(mechanism)
    shape = broadcast_shape({"the mechanism": mine, "delta" if quantity == "epsilon" else "epsilon": np.shape(given)})
    sigma, slots, target = (
        np.broadcast_to(np.asarray(x, np.float64), shape).reshape(-1)
        for x in (mechanism.mechanism.noise_multiplier, mechanism.slots, given)
    )
    ways = _DIRECTIONS_OF[relation]
    if quantity == "epsilon":
        begin = None if near is None else np.broadcast_to(near, shape).reshape(-1)
        worst = (
            allocation.epsilon_of_both(sigma, slots, target, rtol, begin)
            if len(ways) == 2
            else allocation.epsilon(sigma, slots, target, ways[0], rtol, begin)
        )
    else:
        worst = (
            allocation.delta_of_both(sigma, slots, target)
            if len(ways) == 2
            else allocation.delta(sigma, slots, target, ways[0])
        )
    narrow = (np.isfinite(worst.upper) & (worst.upper - worst.lower <= rtol * worst.upper)) | (
        worst.upper <= NO_RELATIVE_ACCURACY
    )
    status = np.where(narrow, "ok", "width").astype("<U16")
    status[worst.upper == 0.0] = "zero"
    lower, estimate, upper = (end.reshape(shape) for end in worst)
    return Bounds(lower, estimate, upper, "certified", status.reshape(shape), OneRound.name)


class SameBins(MechanismEngine):
    """Balls in bins by themselves; composed with other mechanisms they have two pairs, as any random allocation."""

    name = "same_bins"

    def supports(self, mechanism: Any) -> bool:
        return isinstance(mechanism, BallsInBins) and not mechanism.symmetric()

    def epsilon(self, mechanism: Any, delta: np.ndarray, relation: str, rtol: float) -> Bounds:
        less, more = (mechanism.one_round(below) for below in (False, True))
        return _ends(*(OneRound().epsilon(one, delta, relation, rtol) for one in (less, more)))

    def delta(self, mechanism: Any, epsilon: np.ndarray, relation: str, rtol: float) -> Bounds:
        less, more = (mechanism.one_round(below) for below in (False, True))
        return _ends(*(OneRound().delta(one, epsilon, relation, rtol) for one in (less, more)))


def _ends(above: Bounds, below: Bounds) -> Bounds:
    """The upper end with slightly less noise, the lower end with slightly more."""
    low, high = np.minimum(below.lower, above.upper), above.upper
    return Bounds(low, np.clip(above.estimate, low, high), high, above.kind, above.status, above.engine)
