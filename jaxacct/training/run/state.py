"""State: a run between two steps, and what may be claimed of it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from jaxacct.core.bounds import Bounds
from jaxacct.training.plan import Plan
from jaxacct.training.run.history import History, claimed
from jaxacct.training.step.key_derivation import Lineage

__all__ = ["Looks", "State", "shown"]


@dataclass(frozen=True)
class State:
    """A run between two steps.

    `epsilon` is what may be claimed, as Bounds at the plan's delta.  It covers all steps that led here, under any plan,
    or all that the ledger holds.  If a callback stopped the run, or looked at outputs of a run that did not end by
    itself, the remaining steps of the plan count as well.  Within a callback only the steps taken count.  (With
    repetitions it covers this one of the K runs.)

    Parameters
    ----------
    params : the whole model, with what is frozen; what is trained of it is free to be published.
    opt_state : of what is trained; free to be published.
    clip_norm : as it is now.
    step : steps taken.
    not_finite : gradients so far with a NaN or an infinity, which counted as zero.  It looks at the data: not private.
    lineage : where the randomness comes from; holds the secret key of the run.
    history : what was spent on the way, or how far the ledger was that holds it.
    plan : the last one.
    stopped : why `fit` returned: "finished", "callback", or "budget" (one more step would exceed the target).
    seen : whether callbacks have looked at outputs.

    >>> import jax.numpy as jnp, optax
    >>> from jaxacct.training import Plan, Trainer
    >>> plan = Plan(target_delta=1e-5, dataset_size=10, sampling_probability=1.0, noise_multiplier=5.0, steps=3)
    >>> trainer = Trainer(lambda w, x: jnp.sum((w - x) ** 2), optax.sgd(0.1), plan, clip_norm=1.0)
    >>> state = trainer.init(jnp.zeros(2))
    >>> state.step, float(state.epsilon.upper)
    (0, 0.0)
    """

    params: Any
    opt_state: Any
    clip_norm: Any
    step: int
    not_finite: int = field(repr=False)
    lineage: Lineage = field(repr=False)
    history: History = field(repr=False)
    plan: Plan = field(repr=False)
    stopped: str = ""
    seen: bool = field(default=False, repr=False)

    @functools.cached_property
    def epsilon(self) -> Bounds:
        """Epsilon spent so far; if outputs may have ended the run, the remaining steps count as well."""
        ended = self.stopped in ("finished", "budget") or (not self.stopped and not self.seen)
        return claimed(self.history, self.plan, self.step, ended, goes_on=False)


class Looks:
    """Whether callbacks have looked at outputs.

    seen : whether they have, in this `fit` or before it.
    note : called before the first look of this `fit`; if it raises, the callback gets the error instead of outputs.
    now : the state with which callbacks are being called, or None.
    """

    def __init__(self, seen: bool, note: Callable[[], Any]) -> None:
        self.seen = seen
        self.now: State | None = None
        self._note: Callable[[], Any] | None = note

    def look(self) -> None:
        """Note that outputs are about to be seen."""
        if self._note is not None:
            self._note()
            self._note = None
        self.seen = True

    def over(self) -> None:
        """The `fit` has ended: later looks cannot have ended it."""
        self.now = self._note = None


_NO_OUTPUTS = frozenset({"step", "plan", "stopped", "history", "__class__"})
"""Attributes of a state that do not depend on outputs; reading them is no look."""


class _Shown(State):
    """A state for callbacks, which notes a look before it gives outputs."""

    looks: ClassVar[Looks]

    def __getattribute__(self, name: str) -> Any:
        looks: Looks | None = object.__getattribute__(self, "__dict__").get("looks")
        if looks is None:  # while it is copied
            return super().__getattribute__(name)
        if name == "seen":
            return looks.seen
        if name == "epsilon" and looks.now is self:
            return claimed(self.history, self.plan, self.step, ended=False, goes_on=True)
        if name == "epsilon":
            return claimed(self.history, self.plan, self.step, ended=not looks.seen, goes_on=False)
        if name not in _NO_OUTPUTS:
            looks.look()
        return super().__getattribute__(name)


def shown(state: State, looks: Looks) -> State:
    """A state for callbacks, which are about to be called with it."""
    view = object.__new__(_Shown)
    vars(view).update(vars(state), looks=looks)
    looks.now = view
    return view
