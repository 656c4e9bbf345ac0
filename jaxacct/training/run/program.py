"""The compiled step of a run, and the digests that its keys follow from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxacct.training.ledger import Ledger
from jaxacct.training.plan import Plan
from jaxacct.training.run.checkpoints import Checkpoint
from jaxacct.training.run.state import State
from jaxacct.training.step import key_derivation
from jaxacct.training.step.adaptive_clip import AdaptiveClip
from jaxacct.training.step.key_derivation import Lineage, StepKey
from jaxacct.training.step.parts import Rest
from jaxacct.training.step.private_loss import PrivateLoss
from jaxacct.training.step.step_function import Carried, Numbers, numbers
from jaxacct.training.step.step_mechanisms import ALLOCATION, BY_PASS

__all__ = ["Program", "carried_from"]


class Program:
    """A step function for one plan, state and data: traced, digested, and compiled when it is asked for.

    session : a digest of all that decides what comes after a checkpoint: equal sessions repeat it exactly.
    """

    def __init__(
        self,
        step_function: Callable[..., Any],
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
        self.carried, self.data = carried, data
        self.frozen = _anew(frozen)
        self.line = key_derivation.joined(before, key_derivation.digest_tree(carried))
        zero = np.zeros(8, np.uint32)
        now = self._numbers(min(step, self._plan.steps - 1), 0)
        self._traced = jax.jit(step_function).trace(carried, zero, zero, data, now, self.frozen)
        self._digest = key_derivation.digest_program(self._traced)
        if self.frozen is not None:  # its form is in the program, its arrays are arguments
            self._digest = key_derivation.digest(self._digest, key_derivation.digest_tree(self.frozen.frozen))
        self._data = key_derivation.digest_tree(data)
        beside = repr((adaptive, private_loss)).encode()  # its noise is an argument of the program, not a part of it
        self.session = key_derivation.digest(self._digest, self._data, self._plan.to_json().encode(), beside)

    def compiled(self) -> Any:
        """(carried, key words, pass key words, data, numbers, frozen) -> (carried, observed)."""
        return self._traced.lower().compile()

    def goes_on(self, found: Checkpoint | None, ledger: Ledger | None) -> bool:
        """Whether the last checkpoint says already with which program and ledger steps are taken after it."""
        if found is None or found.session != self.session:
            return False
        return (found.history.ledger is None) == (ledger is None)

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

    def _numbers(self, step: int, place: int) -> Numbers:
        return numbers(self._plan.at(step), self._plan.sampling, self._adaptive, place, self._private_loss)


def carried_from(state: State, trained: Any) -> Carried:
    """What the step works on, as new arrays: where they came from must make no difference to the program.

    trained : the part of the state's parameters that is trained.
    """
    carried: Carried = _anew(Carried(trained, state.opt_state, state.clip_norm, np.int32(state.not_finite)))
    return carried


def _anew(tree: Any) -> Any:
    """The same numbers as new arrays."""
    is_key = lambda a: jax.dtypes.issubdtype(jnp.result_type(a), jax.dtypes.prng_key)
    return jax.tree.map(lambda a: a if is_key(a) else jnp.asarray(np.asarray(a)), tree)
