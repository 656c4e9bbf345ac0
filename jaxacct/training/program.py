"""The compiled step of a run, and the digests that its keys follow from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from jaxacct.training import lineage
from jaxacct.training.lineage import Lineage, StepKey
from jaxacct.training.releases import FIXED
from jaxacct.training.steps import Carried, Numbers, numbers

if TYPE_CHECKING:
    from jaxacct.training.trainer import Trainer

__all__ = ["Program"]


class Program:
    """A trainer's step for one state and data: traced, digested, and compiled when it is asked for.

    session : a digest of all that decides what comes after a checkpoint: equal sessions repeat it exactly.
    """

    def __init__(self, trainer: Trainer, carried: Carried, before: Lineage, step: int, data: Any) -> None:
        self._plan, self._adaptive = trainer.plan, trainer.adaptive
        self.carried, self.data = carried, data
        self.line = lineage.joined(before, lineage.digest_tree(carried))
        zero = np.zeros(8, np.uint32)
        now = self._numbers(min(step, self._plan.steps - 1), 0)
        self._traced = jax.jit(trainer.step_function).trace(carried, zero, zero, data, now)
        self._digest = lineage.digest_program(self._traced)
        self._data = lineage.digest_tree(data)
        self.session = lineage.digest(self._digest, self._data, self._plan.to_json().encode())

    def compiled(self) -> Any:
        """(carried, key words, pass key words, data, numbers) -> carried."""
        return self._traced.lower().compile()

    def advance(self, line: Lineage, step: int) -> tuple[Lineage, StepKey, Numbers, str]:
        """A step's lineage, keys and numbers, and of fixed batches the fingerprint of its pass; "" elsewhere."""
        segment, begins, place = self._plan.at(step), -1, 0
        if self._plan.sampling == FIXED:
            begins = self._plan.pass_of(step)[1]
            place = step - begins
        after, key = lineage.advance(line, self._digest, self._data, (step, *segment[2:], place), begins)
        return after, key, self._numbers(step, place), key.partition if begins >= 0 else ""

    def _numbers(self, step: int, place: int) -> Numbers:
        return numbers(self._plan.at(step), self._plan.sampling, self._adaptive, place)
