"""The compiled step of a run, and the digests that its keys follow from."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from jaxacct.training.plan import Plan
from jaxacct.training.run.checkpoints import Checkpoint
from jaxacct.training.run.placement import OneDevice, OnMesh
from jaxacct.training.step import key_derivation
from jaxacct.training.step.adaptive_clip import AdaptiveClip
from jaxacct.training.step.key_derivation import Lineage, StepKey
from jaxacct.training.step.parts import Rest
from jaxacct.training.step.private_loss import PrivateLoss
from jaxacct.training.step.step_function import Carried, Numbers, Observed, draws, numbers
from jaxacct.training.step.step_mechanisms import ALLOCATION, BY_PASS

__all__ = ["Prepared", "Program"]


class Prepared(NamedTuple):
    """A step that may be taken: the lineage after it, its keys, numbers, pass ("" for none), and what it works on."""

    line: Lineage
    key: StepKey
    settings: Numbers
    partition: str
    batch: Any = None


class Program:
    """A step function for one plan, state and data: traced, digested, and compiled when it is asked for.

    session : a digest of all that decides what comes after a checkpoint: equal sessions repeat it exactly.
    traces : the jaxprs of all that it compiles.
    """

    def __init__(
        self,
        where: OneDevice | OnMesh,
        plan: Plan,
        adaptive: AdaptiveClip | None,
        carried: Carried,
        before: Lineage,
        step: int,
        data: Any,
        frozen: Rest | None = None,
        private_loss: PrivateLoss | None = None,
    ) -> None:
        self._plan, self._adaptive, self._private_loss = plan, adaptive, private_loss
        self._where, self.frozen = where, where.frozen(carried.params, frozen)
        self._whole = data
        zero = np.zeros(8, np.uint32)
        now = self._numbers(min(step, self._plan.steps - 1), 0, zero)
        self._traced = where.step(carried, zero, zero, data, now, self.frozen)
        self.traces = (self._traced.jaxpr,)
        self._settle(carried, before, where.digest_program(self._traced), where.digest(data))

    def _settle(self, carried: Carried, before: Lineage, program: bytes, data: bytes) -> None:
        """What keys and session follow from: digests of the program and of the data."""
        self.carried = carried
        self.line = key_derivation.joined(before, self._where.digest(carried))
        self._digest, self._data = program, data
        if self.frozen is not None:  # its form is in the program, its arrays are arguments
            self._digest = key_derivation.digest(self._digest, self._where.digest(self.frozen.frozen))
        # their noise is an argument of the program, not a part of it
        beside = repr((self._adaptive, self._private_loss)).encode()
        self.session = key_derivation.digest(self._digest, self._data, self._plan.to_json().encode(), beside)

    def begin(self, line: Lineage, step: int, until: int) -> None:
        """Get ready for the steps from one on, to before another: compile."""
        self._compiled = self._traced.lower().compile()

    def prepared(self, line: Lineage, step: int) -> Prepared:
        """A step after a lineage, ready to be noted and run."""
        after, key, settings, partition = self.advance(line, step)
        return Prepared(after, key, self._with_draws(settings, step, key), partition)

    def run(self, carried: Carried, key: StepKey, settings: Numbers, batch: Any) -> tuple[Carried, Observed]:
        """One step; it is in the ledger before this is called."""
        return self._compiled(carried, key.words, key.pass_words, self._whole, settings, self.frozen)

    def close(self) -> None:
        """Nothing to end here."""

    def keeps_after(self, error: BaseException) -> bool:
        """Whether a run that ends with an error leaves a checkpoint: no, going on from the last one is the same."""
        return False

    @property
    def goes_on_as(self) -> bytes:
        """The session of that checkpoint; b"" where nothing can have been released after it that is to be repeated."""
        return self.session

    def goes_on(self, found: Checkpoint | None, ledger: bool) -> bool:
        """Whether the last checkpoint says already with which program and ledger steps are taken after it."""
        if found is None or found.session != self.session:
            return False
        return (found.history.ledger is not None) == ledger

    def advance(self, line: Lineage, step: int) -> tuple[Lineage, StepKey, Numbers, str]:
        """A step's lineage, keys and numbers, and the fingerprint of its pass or round; "" where there are none.

        Fixed batches keep their cut as long as the batch size and the first step of the pass are the same.  Slots are
        drawn anew unless program, data and plan are the same: jaxacct/training/run/README.md, "Rounds that are cut
        short".
        """
        segment, begins, place, cut = self._plan.at(step), -1, 0, b""
        if self._plan.sampling in BY_PASS:
            begins = self._plan.pass_of(step)[1]
            place = step - begins
            size = repr((begins, segment.expected_batch_size)).encode()
            cut = key_derivation.digest(self.session) if self._plan.sampling == ALLOCATION else size
        settings = (step, *segment[2:], place, self._adaptive, self._private_loss)
        after, key = key_derivation.advance(line, self._digest, self._data, settings, begins, cut)
        return after, key, self._numbers(step, place), key.partition if begins >= 0 else ""

    def _numbers(self, step: int, place: int, words: Any = None) -> Numbers:
        return numbers(self._plan.at(step), self._plan.sampling, self._adaptive, place, self._private_loss, words)

    def _with_draws(self, settings: Numbers, step: int, key: StepKey) -> Numbers:
        """The numbers of a step, with the noise of its count and of its loss."""
        count, loss = draws(self._plan.at(step), self._adaptive, self._private_loss, key.words)
        return settings._replace(count_draw=count, loss_draw=loss)
