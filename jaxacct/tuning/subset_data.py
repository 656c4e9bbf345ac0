"""The secret sample and the other data, in arrays whose shapes depend neither on the sample nor on K."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxacct.training.step import sampler
from jaxacct.tuning.subset_plan import SubsetPlan

__all__ = ["if_present", "split"]

ROOM_EXCEEDED = 1e-18
"""Probability that a sample exceeds the room made for it; it then gets more, at the price of another compilation."""


def split(key: Any, data: Any, plan: SubsetPlan) -> tuple[Any, Any]:
    """((examples, present) of the sample, the same of what the final run is trained on)."""
    drawn = sampler.poisson(key, plan.dataset_size, sampler.threshold(plan.share))
    inside = np.sort(np.asarray(drawn.indices)[: int(drawn.count)])
    rest = np.setdiff1d(np.arange(plan.dataset_size), inside)
    other = rest if plan.variant == "rest" else np.arange(plan.dataset_size)
    rooms = [_room(plan.dataset_size, plan.share), plan.dataset_size]
    if plan.variant == "rest":
        rooms[1] = _room(plan.dataset_size, 1.0 - plan.share)
    return _held(data, inside, rooms[0]), _held(data, other, rooms[1])


def if_present(loss_fn: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """The loss of an example that is present; for one that is not, a constant without gradient."""

    def loss(params: Any, held: Any) -> Any:
        example, present = held
        return jax.numpy.where(present, loss_fn(params, example), 0.0)

    return loss


def _room(size: int, share: float) -> int:
    """How many records a Poisson sample will not exceed."""
    from scipy.stats import binom

    return max(min(int(binom.isf(ROOM_EXCEEDED, size, share)) + 1, size), 1)


def _held(data: Any, rows: np.ndarray, room: int) -> tuple[Any, np.ndarray]:
    """The rows, filled up to the room with rows that are not present."""
    filled = np.concatenate([rows, np.zeros(max(room - len(rows), 0), rows.dtype)])
    return jax.tree.map(lambda a: np.asarray(a)[filled], data), np.arange(len(filled)) < len(rows)
