"""The engine of the same bins in every epoch: one round of random allocation with less noise, rounded either way."""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxacct.core.bounds import Bounds
from jaxacct.engines.allocation_mechanism import OneRound
from jaxacct.engines.protocol import MechanismEngine
from jaxacct.mechanisms.balls_in_bins import BallsInBins

__all__ = ["SameBins"]


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
