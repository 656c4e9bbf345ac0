"""The privacy profile at every real epsilon: below 0 it follows from the reverse direction."""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxacct import account
from jaxacct.bounds import Bounds
from jaxacct.mechanisms import Mechanism, batch_shape
from jaxacct.validation import broadcast_shape

__all__ = ["delta_at_any"]

_REVERSED = {"add_one": "remove_one", "remove_one": "add_one"}
"""The relation of the reverse direction; the other relations are their own reverse."""


def delta_at_any(mechanism: Mechanism, epsilon: np.ndarray, relation: str, **settings: Any) -> Bounds:
    """`jaxacct.delta` for real eps, by `H_{e^-x}(P||Q) = 1 - e^-x + e^-x H_{e^x}(Q||P)` (Zhu et al. 2022, Lemma 45)."""
    if np.all(epsilon >= 0):
        return account.delta_without_attacks(mechanism, epsilon, relation=relation, **settings)
    shape = broadcast_shape({"the mechanism": batch_shape(mechanism), "epsilon": epsilon.shape})
    back = account.delta_without_attacks(
        mechanism, np.abs(epsilon), relation=_REVERSED.get(relation, relation), **settings
    )
    ahead = (
        account.delta_without_attacks(mechanism, np.abs(epsilon), relation=relation, **settings)
        if relation in _REVERSED
        else back
    )
    below, scale, gap = epsilon < 0, np.exp(np.minimum(epsilon, 0.0)), -np.expm1(np.minimum(epsilon, 0.0))
    ends = []
    for end, turn in (("lower", -1e-15), ("estimate", 0.0), ("upper", 1e-15)):
        reflected = np.clip((gap + scale * getattr(back, end)) * (1.0 + turn), 0.0, 1.0)
        ends.append(np.where(below, reflected, getattr(ahead, end)))
    choose = lambda word: np.broadcast_to(np.where(below, getattr(back, word), getattr(ahead, word)), shape)
    words = choose("status"), choose("engine")
    low, middle, high = ends
    return Bounds(low, np.clip(middle, low, high), high, mechanism.kind_of_bracket(relation), *words)
