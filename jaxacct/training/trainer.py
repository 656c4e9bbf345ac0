"""Trainer: DP-SGD with the budget inside the loop.

The file is a few lines longer than 300 lines so that the loop and what it keeps are read together.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxacct import markup
from jaxacct.chacha import key_from_bytes
from jaxacct.training.ledger import Ledger
from jaxacct.training.ledger.format import Step
from jaxacct.training.plan import Plan
from jaxacct.training.run.checkpoints import Checkpoint, Store
from jaxacct.training.run.history import NOTHING, History, followed
from jaxacct.training.run.program import Program, carried_from
from jaxacct.training.run.progress import Live
from jaxacct.training.run.resume import last_checkpoint, open_ledger, reach, require_ledger
from jaxacct.training.run.state import State, shown
from jaxacct.training.step import noise
from jaxacct.training.step.adaptive_clip import AdaptiveClip
from jaxacct.training.step.clip_norm import sensitivity
from jaxacct.training.step.clipping import METHODS, norm_methods
from jaxacct.training.step.key_derivation import StepKey, begin, digest_tree
from jaxacct.training.step.modules import initialised, loss_of, refuse_state
from jaxacct.training.step.optimizers import look_at
from jaxacct.training.step.parts import Rest, apart, whole
from jaxacct.training.step.private_loss import PrivateLoss
from jaxacct.training.step.step_function import Carried, StepRule, numbers, private_step
from jaxacct.training.step.users import user_data
from jaxacct.validation import COUNT, InputError, check, choice

__all__ = ["State", "Trainer"]


class Trainer:
    """DP-SGD by a plan: batches, noise and accounting all come from it.

    Every step draws a batch as the plan says, sums the gradients clipped to norm C, adds Gaussian noise of standard
    deviation ``noise_multiplier * C`` to each entry of the sum, divides by the *expected* batch size, and hands the
    result to the optimizer.  (Where examples are replaced the sum moves by 2 C; the plan's accounting knows.)

    Parameters
    ----------
    loss_fn : (params, example) -> scalar loss of one example; or a linen, nnx or Equinox module together with ``loss``.
    optimizer : an Optax transformation.
    plan : Plan
    clip_norm : C > 0, a pytree of norms (each part is clipped by itself), or an AdaptiveClip.
    loss : (output, target) -> scalar, for a module.  Examples are then pairs (input, target), and the loss of one is
        ``loss(module.apply(params, input), target)``, or ``loss(module(input), target)`` of nnx and Equinox.
    method : {"auto", "vmap", "ghost"}, as for ``clipped_sum``.
    micro_batch : examples at a time, for memory; changes nothing but rounding.  By default at most 64.  With users:
        users at a time.
    examples_per_user : where the plan's unit is "user", and only there: the most of a user's examples that a step uses,
        a fresh random subset of them where there are more.  The mean of their gradients is clipped to norm C.
    rngs : whether the loss gets a key of the example, (params, example, key): for dropout and augmentation.  The key
        depends on the step and the example alone.  A module gets it as its framework expects; for linen streams other
        than "dropout" give their names.
    apply_kwargs : for a module, what it is called with besides, such as ``{"train": True}``.
    has_aux : whether the loss returns (loss, aux).  Aux is summed over the batch, for logs: it is *not* private.
    trainable : what is trained: a function path -> bool of paths such as "params/Dense_0/kernel"; a pytree of bools, a
        prefix of the parameters; or a type of nnx variables.  All else is frozen: it is not clipped, gets no noise, is
        unknown to the optimizer, and must not come from the private data.  By default everything is trained; of an nnx
        module its nnx.Param, of parameters with `lora` the adapters.
    private_loss : a PrivateLoss: the mean loss of every step is released too, and handed to the optimizer as ``value``.

    Raises
    ------
    InputError : a loss that is no function, a bad clip norm or method, an AdaptiveClip or PrivateLoss that leaves no
        room for the gradients, or examples_per_user that the plan's unit does not go with.

    The step is compiled once, whatever batches are drawn.  The guarantee is that of the plan for exact arithmetic; what
    floating point adds to it is in jaxacct/training/step/README.md.

    References
    ----------
    Abadi et al. 2016 (DP-SGD).

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
        examples_per_user: int | None = None,
        rngs: bool | Sequence[str] = False,
        apply_kwargs: Mapping[str, Any] | None = None,
        has_aux: bool = False,
        trainable: Any = None,
        private_loss: PrivateLoss | None = None,
    ) -> None:
        choice("method", method, METHODS)
        self.module = None if loss is None else loss_fn
        self.loss_fn = loss_of(loss_fn, loss, rngs, apply_kwargs)
        self.optimizer, self.plan, self.method = optimizer, plan, method
        self.adaptive = clip_norm if isinstance(clip_norm, AdaptiveClip) else None
        self.clip_norm = clip_norm.initial if isinstance(clip_norm, AdaptiveClip) else clip_norm
        sensitivity(self.clip_norm)  # refuses what is no clip norm
        if (plan.unit == "user") != (examples_per_user is not None):
            raise InputError(
                f"examples_per_user = {examples_per_user!r:.40} does not go with unit = {plan.unit!r} of the plan; "
                "give it where the unit is 'user', and only there"
            )
        most = None if examples_per_user is None else int(check("examples_per_user", examples_per_user, COUNT))
        self.examples_per_user = most
        largest = plan.cap or max(segment.expected_batch_size for segment in plan.segments)
        default = max(min(64 // (most or 1), int(np.ceil(largest))), 1)
        self.micro_batch = default if micro_batch is None else int(check("micro_batch", micro_batch, COUNT))
        for segment in plan.segments:
            numbers(segment, plan.sampling, self.adaptive, 0, private_loss)
        rule = (self.loss_fn, optimizer, plan.sampling, self.micro_batch, method, self.adaptive, plan.cap, most)
        self.rule = StepRule(*rule, bool(rngs), has_aux, private_loss)
        self.trainable, self.rngs, self.apply_kwargs = trainable, rngs, apply_kwargs
        self.step_function = private_step(self.rule)

    def _repr_html_(self) -> str:
        clipped = "adaptive" if self.adaptive is not None else repr(self.clip_norm)
        name = getattr(self.loss_fn if self.module is None else type(self.module), "__qualname__", "a function")
        pairs = [
            ("loss", name),
            ("clip norm", clipped),
            ("method", self.method),
            ("micro batch", str(self.micro_batch)),
            *([] if self.examples_per_user is None else [("examples per user", str(self.examples_per_user))]),
        ]
        return markup.fields("Trainer", pairs) + self.plan._repr_html_()

    def init(self, params: Any = None, key: bytes | None = None, *, example: Any = None) -> State:
        """The state before the first step.

        Parameters
        ----------
        params : pytree of floating-point arrays, an nnx or Equinox module, or what `lora` returns; may be left out
            where the trainer was given a module.
        key : 32 secret bytes for all randomness of the run, by default from the operating system; never for two runs.
        example : for a linen module without params: an input, from whose shape the parameters are drawn.

        Raises
        ------
        InputError : neither params nor an example, a key of another length, a model with state that mixes examples, an
            optimizer that asks for what is not private.
        """
        if key is not None and (not isinstance(key, bytes) or len(key) != 32):
            raise InputError("key must be 32 bytes; leave it out, or use secrets.token_bytes(32)")
        root = secrets.token_bytes(32) if key is None else key
        if params is None:
            first = noise.stream(key_from_bytes(root), noise.INITIALISATION)
            params = initialised(self.module, first, example, self.rngs, self.apply_kwargs)
        trained, rest = apart(params, self.trainable)
        refuse_state(self.module, trained)
        clip_norm = jax.tree.map(lambda c: jnp.asarray(c, jnp.float32), self.clip_norm)
        opt_state = self.optimizer.init(trained)
        look_at(self.optimizer, opt_state, trained, self.rule.private_loss)
        carried = Carried(trained, opt_state, clip_norm, 0)
        return self._state(Checkpoint(0, carried, begin(root), NOTHING, b""), rest)

    def norm_methods(self, params: Any, data: Any) -> dict[str, str]:
        """How each parameter's norms are found: {path: "ghost" or "vmap"}."""
        most = self.examples_per_user
        several = () if most is None else (most,)
        one = jax.tree.map(lambda a: jax.ShapeDtypeStruct((*several, *a.shape[1:]), a.dtype), data)
        trained, rest = apart(params, self.trainable)
        example = one if most is None else (one, jax.ShapeDtypeStruct((most,), jnp.float32))
        key = (jax.eval_shape(lambda: key_from_bytes(bytes(32))),) if self.rule.rngs else ()
        return norm_methods(self.rule.member_loss(rest), trained, (example, *key), self.method, has_aux=True)

    ways = norm_methods  # its old name

    def fit(
        self,
        state: State,
        data: Any,
        *,
        users: Any = None,
        ledger: Ledger | str | os.PathLike[str] | None = None,
        callbacks: Iterable[Callable[[State], Any]] = (),
        checkpoints: str | os.PathLike[str] | None = None,
        checkpoint_every: int = 100,
        progress: bool | None = True,
        by: str = "",
    ) -> State:
        """Train to the end of the plan, to the limit of the budget, or until a callback returns something true.

        Parameters
        ----------
        state : what `init` or an earlier `fit` returned.
        data : pytree of arrays, the plan's dataset_size examples along the first axis; kept on the device.
        users : where the plan's unit is "user", whose each example is: an integer from 0 to dataset_size - 1 for each.
            The data are then any number of examples.
        ledger : a path (a new file, or one to go on with) or an open Ledger; every step is in it, on the disk, before
            its noisy gradient is used.  What else it holds counts against the target.  A state or checkpoint that is
            noted in a ledger goes on with that one only: another, an older one, or none is refused.
        callbacks : called with the state after every step.
        checkpoints : a folder; a run found there is resumed, from its last checkpoint, bit by bit.  It holds the
            secret key of the run, and is made its owner's alone.
        checkpoint_every : in steps.
        progress : whether to show a line with rate, time left and an upper bound of epsilon; None: only on a terminal.
        by : who runs it, for the ledger.

        Returns
        -------
        State : after the last step taken; `stopped` says why that was the last one.

        Raises
        ------
        InputError : data of another size than the plan's; a state, ledger or checkpoint that do not belong together; a
            plan that what was spent before does not leave room for.
        """
        self._check_data(data, users)
        every = int(check("checkpoint_every", checkpoint_every, COUNT))
        data = jax.tree.map(lambda a: jnp.asarray(np.asarray(a)), data)
        if users is not None:
            data = user_data(data, users, self.plan.dataset_size)
        store: Store | None = None
        found: Checkpoint | None = None
        if checkpoints is not None:
            store = Store(checkpoints)
        opened: Ledger | None = None
        own = False
        try:
            trained, rest = apart(state.params, self.trainable)
            carried = carried_from(state, trained)
            if store is not None and (found := last_checkpoint(store, state, carried)) is not None:
                state = self._state(found, rest)
                carried = carried_from(state, found.carried.params)
            require_ledger(state.history, ledger)
            of_plan = (self.plan, self.adaptive, carried, state.lineage, state.step, data)
            program = Program(self.step_function, *of_plan, rest, self.rule.private_loss)
            if found is not None and found.session not in (b"", program.session):
                # steps may have been taken after the checkpoint, of which nothing is known: its whole plan counts
                state = replace(state, history=state.history.whole())
            opened, own = open_ledger(ledger, state, self.plan, by)
            return self._run(state, program, opened, list(callbacks), store, found, every, progress)
        finally:
            if store is not None:
                store.close()
            if opened is not None and own:
                opened.close()

    def _run(
        self,
        state: State,
        program: Program,
        ledger: Ledger | None,
        callbacks: list[Callable[[State], Any]],
        store: Store | None,
        found: Checkpoint | None,
        every: int,
        progress: bool | None,
    ) -> State:
        plan, step, stopped = self.plan, state.step, "finished"
        carried, line, stretches = program.carried, program.line, state.history.stretches
        partition = program.advance(line, step)[3] if step < plan.steps else ""
        until = plan.steps if ledger is not None else reach(plan, stretches, state, partition)
        if until == step < plan.steps and found is not None and state.history != found.history:
            raise InputError(
                f"checkpoint of step {step} is of another plan, program, machine or data, and steps after it may have "
                "been released that no ledger holds; go on with the same ones, and keep a ledger"
            )
        looks = ["before"] if state.seen else []

        def now(stopped: str = "", session: bytes = b"") -> Checkpoint:
            done = followed(stretches, plan, step, step, partition) if session else stretches
            history = History(done) if ledger is None else History((), ledger.mark())
            return Checkpoint(step, carried, line, history, session, stopped, bool(looks))

        saved = found
        if store is not None and step < plan.steps and not program.goes_on(found, ledger):
            saved = now(session=program.session)  # before anything is released: a crash can then be replayed
            store.save(saved)
        compiled: Any = program.compiled() if step < until else None
        bar = Live(plan, step, progress)
        while step < plan.steps:
            after, key, settings, partition = program.advance(line, step)
            if step >= until or (ledger is not None and not _note(ledger, plan, step, key, partition or None)):
                stopped = "budget"
                break
            carried, _ = compiled(carried, key.words, key.pass_words, program.data, settings, program.frozen)
            stretches = followed(stretches, plan, step, step + 1, partition)
            line, step = after, step + 1
            bar.update(step, carried.clip_norm)
            if store is not None and step % every == 0 and step < plan.steps:
                line = line._replace(seal=digest_tree(carried))
                saved = now(session=program.session)
                store.save(saved)
            if callbacks:
                view = shown(self._state(now(), program.frozen), looks)
                if any([callback(view) for callback in callbacks]):
                    stopped = "callback"
                    break
        bar.close()
        line = line._replace(seal=digest_tree(carried))
        last = now(stopped)
        if store is not None and (saved is None or (saved.step, saved.session) != (step, b"")):
            store.save(last)  # nothing was released after it
        return self._state(last, program.frozen)

    def _state(self, found: Checkpoint, frozen: Rest | None) -> State:
        """A checkpoint as users see it: with the whole model."""
        trained, opt_state, clip_norm, not_finite = found.carried
        rest = (found.lineage, found.history, self.plan, found.stopped, found.seen)
        return State(whole(trained, frozen), opt_state, clip_norm, found.step, not_finite, *rest)

    def _check_data(self, data: Any, users: Any) -> None:
        """InputError where the data are not as many as the plan's, or users do not go with its unit."""
        if (self.plan.unit == "user") != (users is not None):
            told = "missing" if users is None else "given"
            raise InputError(
                f"users is {told}, and the plan's unit is {self.plan.unit!r}; give whose each example is where it "
                "is 'user', and only there"
            )
        if users is not None:
            return  # `user_data` looks at them
        sizes = {np.shape(leaf)[:1] for leaf in jax.tree_util.tree_leaves(data)}
        if sizes != {(self.plan.dataset_size,)}:
            raise InputError(
                f"data has first axes {sorted(sizes)}, must be ({self.plan.dataset_size},), the plan's dataset_size; "
                "make the plan for these data"
            )


def _note(ledger: Ledger, plan: Plan, step: int, key: StepKey, partition: str | None) -> bool:
    """Put a step on record, if it is in the ledger already or the budget allows it."""
    segment = plan.at(step)
    entry = (step, key.key_fingerprint, key.batch_fingerprint, *segment[2:4])
    there = Step(ledger.run, *entry, plan.sampling, partition, *plan.truncation) in ledger.runs[ledger.run].seen
    if not there and not plan.allows(ledger, step, partition):
        return False
    ledger.record(*entry, partition=partition)
    return True
