"""Trainer: DP-SGD with the budget inside the loop."""

from __future__ import annotations

import functools
import os
import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxacct.bounds import Bounds
from jaxacct.training import lineage, noise
from jaxacct.training.adaptive import AdaptiveClip
from jaxacct.training.budget import promised
from jaxacct.training.chacha import key_from_bytes
from jaxacct.training.clipping import METHODS, sensitivity, ways
from jaxacct.training.ledger import Ledger
from jaxacct.training.lineage import Lineage
from jaxacct.training.lines import Step
from jaxacct.training.plan import Plan
from jaxacct.training.progress import Live
from jaxacct.training.releases import FIXED
from jaxacct.training.steps import Carried, numbers, private_step
from jaxacct.validation import COUNT, InputError, check, choice

__all__ = ["State", "Trainer"]


@dataclass(frozen=True)
class State:
    """A run between two steps.

    params, opt_state : what the optimizer works on; free to be published.
    step : steps taken.  clip_norm : as it is now.
    epsilon : Bounds at the plan's delta of what may be claimed, of one run: from the ledger's entries where there is a
        ledger.  Stopped by a callback, that and all steps the plan still had: the callback may have looked at outputs.
    stopped : why `fit` returned: "finished", "callback", or "budget" (one more step would exceed the target).
    not_finite : gradients so far with a NaN or an infinity, which counted as zero.  It looks at the data: not private.
    lineage : where the randomness comes from; holds the secret key of the run.
    """

    params: Any
    opt_state: Any
    clip_norm: Any
    step: int
    not_finite: int = field(repr=False)
    lineage: Lineage = field(repr=False)
    spent: Callable[[], Bounds] = field(repr=False, compare=False)
    stopped: str = ""

    @functools.cached_property
    def epsilon(self) -> Bounds:
        """Epsilon spent so far; after a stop by a callback, of the steps that were still to come as well."""
        return self.spent()


class Trainer:
    """DP-SGD by a plan: batches, noise and accounting all come from it.

    Every step draws a batch as the plan says, sums the gradients clipped to norm C, adds Gaussian noise of standard
    deviation ``noise_multiplier * C`` to each entry of the sum, divides by the *expected* batch size, and hands the
    result to the optimizer.  (Where examples are replaced the sum moves by 2 C; the plan's accounting knows.)

    Parameters
    ----------
    loss_fn : (params, example) -> scalar loss of one example; or a Flax linen module together with ``loss``, then
        examples are pairs (input, target) and the loss is ``loss(module.apply(params, input), target)``.
    optimizer : an Optax transformation.
    plan : Plan
    clip_norm : C > 0, a pytree of norms (each part is clipped by itself), or an AdaptiveClip.
    method : {"auto", "vmap", "ghost"}, as for ``clipped_sum``.
    micro_batch : examples at a time, for memory; changes nothing but rounding.  By default at most 64.

    The step is compiled once, whatever batches are drawn.  The guarantee is that of the plan for exact arithmetic; what
    floating point adds to it is in jaxacct/training/README.md.

    >>> import jax.numpy as jnp, optax
    >>> from jaxacct.training import Plan, Trainer
    >>> plan = Plan(target_epsilon=2.0, target_delta=1e-5, dataset_size=50, sampling_probability=1.0, steps=3)
    >>> trainer = Trainer(lambda w, x: jnp.sum((w - x) ** 2), optax.sgd(0.1), plan, clip_norm=1.0)
    >>> state = trainer.fit(trainer.init(jnp.zeros(2)), jnp.ones((50, 2)), progress=False)
    >>> state.step, state.stopped, bool(state.epsilon.upper <= 2.0)
    (3, 'finished', True)
    """

    def __init__(
        self,
        loss_fn: Any,
        optimizer: Any,
        plan: Plan,
        clip_norm: Any,
        *,
        loss: Callable[[Any, Any], Any] | None = None,
        method: str = "auto",
        micro_batch: int | None = None,
    ) -> None:
        choice("method", method, METHODS)
        self.module = None if loss is None else loss_fn
        self.loss_fn = loss_fn if loss is None else _of_module(loss_fn, loss)
        if not callable(self.loss_fn) or (loss is None and hasattr(loss_fn, "apply")):
            raise InputError("loss_fn must be a function (params, example) -> scalar; with a module, give loss as well")
        self.optimizer, self.plan, self.method = optimizer, plan, method
        self.adaptive = clip_norm if isinstance(clip_norm, AdaptiveClip) else None
        self.clip_norm = clip_norm.initial if isinstance(clip_norm, AdaptiveClip) else clip_norm
        sensitivity(self.clip_norm)  # refuses what is no clip norm
        largest = max(segment.expected_batch_size for segment in plan.segments)
        default = min(64, max(int(np.ceil(largest)), 1))
        self.micro_batch = default if micro_batch is None else int(check("micro_batch", micro_batch, COUNT))
        for segment in plan.segments:
            numbers(segment, plan.sampling, self.adaptive, 0)
        self.step_function = private_step(
            self.loss_fn, optimizer, plan.sampling, self.micro_batch, method, self.adaptive
        )

    def init(self, params: Any = None, key: bytes | None = None, *, example: Any = None) -> State:
        """The state before the first step.

        key : 32 secret bytes for all randomness of the run, by default from the operating system; never for two runs.
        example : for a module without params: an input, from whose shape the parameters are drawn.
        """
        if key is not None and (not isinstance(key, bytes) or len(key) != 32):
            raise InputError("key must be 32 bytes; leave it out, or use secrets.token_bytes(32)")
        root = secrets.token_bytes(32) if key is None else key
        if params is None:
            if self.module is None or example is None:
                raise InputError("params is missing; give the parameters, or for a module an example input")
            params = self.module.init(noise.stream(key_from_bytes(root), noise.INITIALISATION), example)
            others = sorted(set(params) - {"params"})
            if others:
                raise InputError(
                    f"the module has {', '.join(others)} besides params; what mixes examples is not private"
                )
        params = jax.tree.map(jnp.asarray, params)
        clip_norm = jax.tree.map(lambda c: jnp.asarray(c, jnp.float32), self.clip_norm)
        return self._state(Carried(params, self.optimizer.init(params), clip_norm, 0), 0, lineage.begin(root))

    def ways(self, params: Any, data: Any) -> dict[str, str]:
        """How each parameter's norms are found: "ghost" or "vmap"."""
        one = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), data)
        return ways(self.loss_fn, params, one, self.method)

    def fit(
        self,
        state: State,
        data: Any,
        *,
        ledger: Ledger | str | os.PathLike[str] | None = None,
        callbacks: Iterable[Callable[[State], Any]] = (),
        checkpoints: str | os.PathLike[str] | None = None,
        checkpoint_every: int = 100,
        progress: bool | None = True,
        by: str = "",
    ) -> State:
        """Train to the end of the plan, to the limit of the budget, or until a callback returns something true.

        data : pytree of arrays, the plan's dataset_size examples along the first axis; kept on the device.
        ledger : a path (a new file, or one to go on with) or an open Ledger; every step is in it, on the disk, before
            its noisy gradient is used.  What else it holds counts against the target.
        callbacks : called with the state after every step.
        checkpoints : a folder; a run found there is resumed, from its last checkpoint, bit by bit.  It holds the
            secret key of the run.  checkpoint_every : in steps.
        progress : a line with rate, time left and an upper bound of epsilon; None only on a terminal.
        """
        self._check_data(data)
        every = int(check("checkpoint_every", checkpoint_every, COUNT))
        data = jax.tree.map(lambda a: jnp.asarray(np.asarray(a)), data)
        store = None
        if checkpoints is not None:
            from jaxacct.training.checkpoints import Store

            store = Store(checkpoints)
            state = self._resumed(store, state)
        opened = None if ledger is None else _open(ledger, state, self.plan, by)
        try:
            return self._run(state, data, opened, list(callbacks), store, every, progress)
        finally:
            if store is not None:
                store.close()
            if opened is not None and not isinstance(ledger, Ledger):
                opened.close()

    def _run(
        self,
        state: State,
        data: Any,
        ledger: Ledger | None,
        callbacks: list[Callable[[State], Any]],
        store: Any,
        every: int,
        progress: bool | None,
    ) -> State:
        carried = _carried(state)
        line = lineage.joined(state.lineage, lineage.digest_tree(carried))
        step, stopped = state.step, "finished"
        first = self.plan.at(min(step, self.plan.steps - 1))
        zero = np.zeros(8, np.uint32)
        now = numbers(first, self.plan.sampling, self.adaptive, 0)
        traced = jax.jit(self.step_function).trace(carried, zero, zero, data, now)
        compiled = traced.lower().compile()
        program = lineage.digest_program(traced)
        fingerprint = lineage.digest_tree(data)
        spent = functools.partial(self._spent, ledger)
        bar = Live(self.plan, step, progress)
        if store is not None and store.latest() is None:
            store.save(step, carried, line)  # before anything is released: a crash can then be replayed
        while step < self.plan.steps:
            segment = self.plan.at(step)
            begins, place = -1, 0
            if self.plan.sampling == FIXED:
                begins = self.plan.pass_of(step)[1]
                place = step - begins
            settings = (step, *segment[2:], place)
            after, key = lineage.advance(line, program, fingerprint, settings, begins)
            if ledger is not None and not _note(ledger, self.plan, step, key, begins):
                stopped = "budget"
                break
            now = numbers(segment, self.plan.sampling, self.adaptive, place)
            carried = compiled(carried, key.words, key.pass_words, data, now)
            line, step = after, step + 1
            bar.update(step, carried.clip_norm)
            snapshot = None
            if store is not None and (step % every == 0 or step == self.plan.steps):
                line = line._replace(seal=lineage.digest_tree(carried))
                store.save(step, carried, line)
            if callbacks:
                snapshot = self._state(carried, step, line, functools.partial(spent, step))
                if any([callback(snapshot) for callback in callbacks]):
                    stopped = "callback"
                    break
        bar.close()
        line = line._replace(seal=lineage.digest_tree(carried))
        return self._state(carried, step, line, functools.partial(spent, step, stopped), stopped)

    def _spent(self, ledger: Ledger | None, step: int, stopped: str = "") -> Bounds:
        """Epsilon from the ledger where there is one: what is in it, not what should be.

        Where a callback chose to stop, with the rest of the plan: a run that outputs may end is a part of the whole
        one, and of no shorter one.
        """
        chosen = stopped == "callback"
        if ledger is None:
            return self.plan.epsilon_after(self.plan.steps if chosen else step)
        read = Ledger.read(ledger.path)
        read.run = ledger.run
        if chosen:
            return promised(self.plan, read, step)
        return read.epsilon(self.plan.target_delta, self.plan.relation, ledger.run)

    def _state(
        self, carried: Carried, step: int, line: Lineage, spent: Callable[[], Bounds] | None = None, stopped: str = ""
    ) -> State:
        report = spent or functools.partial(self._spent, None, step)
        params, opt_state, clip_norm, not_finite = carried
        return State(params, opt_state, clip_norm, step, not_finite, line, report, stopped)

    def _resumed(self, store: Any, state: State) -> State:
        """The last checkpoint of the folder, or the state where there is none."""
        last = store.latest()
        if last is None:
            return state
        if state.step > last:
            raise InputError(f"state.step = {state.step} is past the last checkpoint, {last}; use another folder")
        carried, line = store.load(last, _carried(state))
        return self._state(carried, last, line)

    def _check_data(self, data: Any) -> None:
        sizes = {np.shape(leaf)[:1] for leaf in jax.tree_util.tree_leaves(data)}
        if sizes != {(self.plan.dataset_size,)}:
            raise InputError(
                f"data has first axes {sorted(sizes)}, must be ({self.plan.dataset_size},), the plan's dataset_size; "
                "make the plan for these data"
            )


def _carried(state: State) -> Carried:
    """What the step works on, as new arrays: where they came from must make no difference to the program."""
    carried = Carried(state.params, state.opt_state, state.clip_norm, np.int32(state.not_finite))
    return jax.tree.map(lambda a: jnp.asarray(np.asarray(a)), carried)


def _note(ledger: Ledger, plan: Plan, step: int, key: lineage.StepKey, begins: int) -> bool:
    """Put a step on record, if it is in the ledger already or the budget allows it."""
    segment = plan.at(step)
    partition = key.partition if begins >= 0 else None
    entry = (step, key.key_fingerprint, key.batch_fingerprint, *segment[2:4])
    there = Step(ledger.run, *entry, plan.sampling, partition) in ledger.runs[ledger.run].seen
    if not there and not plan.allows(ledger, step, partition):
        return False
    ledger.record(*entry, partition=partition)
    return True


def _open(ledger: Ledger | str | os.PathLike[str], state: State, plan: Plan, by: str) -> Ledger:
    """The ledger, at the run of this state: its name comes from its secret key."""
    name = lineage.digest(b"run", state.lineage.root).hex()[:16]
    if not isinstance(ledger, Ledger):
        if not Path(ledger).exists():
            return Ledger.create(ledger, plan, name, by)
        ledger = Ledger.open(ledger)
    if name not in ledger.runs:
        ledger.begin(plan, name, by)
    ledger.run = name
    if ledger.plan != plan:
        ledger.replan(plan)
    return ledger


def _of_module(module: Any, loss: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    if not callable(getattr(module, "apply", None)):
        raise InputError(
            "loss goes with a Flax linen module; of an nnx module give (params, example) -> loss, see README"
        )
    return lambda params, example: loss(module.apply(params, example[0]), example[1])
