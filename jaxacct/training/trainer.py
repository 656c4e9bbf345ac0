"""Trainer: DP-SGD that stops before a step that would exceed the budget."""

from __future__ import annotations

import contextlib
import functools
import os
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxacct.core import markup
from jaxacct.core.chacha import key_from_bytes, secret_bytes
from jaxacct.core.progress import say, waiting
from jaxacct.core.types import Foreign, PyTree
from jaxacct.core.validation import COUNT, InputError, check, choice
from jaxacct.training.clipping.clipped_sum import METHODS, norm_methods, sensitivity
from jaxacct.training.clipping.examples_apart import refuse_closed_over, refuse_records
from jaxacct.training.clipping.traces import refuse_kept
from jaxacct.training.ledger import Ledger
from jaxacct.training.plan import Plan
from jaxacct.training.plan.plan import require_plan
from jaxacct.training.run import run_ledger
from jaxacct.training.run.checkpoints import Checkpoint, Store
from jaxacct.training.run.evaluations import Evaluations, ValidationScore, validation_score
from jaxacct.training.run.log import Log, ProgressLine, RunLog, checked_log, run_log
from jaxacct.training.run.program import Program, Streamed
from jaxacct.training.run.state import NOTHING, Evaluation, History, Looks, Past, Scores, State, followed, shown
from jaxacct.training.sharding.placement import Placement, copied
from jaxacct.training.source import Source, require_rows, source_of_mapped
from jaxacct.training.step import noise, step_function
from jaxacct.training.step.counts_and_losses import AdaptiveClip, PrivateLoss
from jaxacct.training.step.key_derivation import begin
from jaxacct.training.step.models import Untrained, initialised, join_model, loss_of, refuse_state, split_model
from jaxacct.training.step.step_function import Carried, Correlated, StepRule, own_state


class Trainer:
    """DP-SGD by a plan: batches, noise and accounting all come from it.

    Every step draws a batch as the plan says, sums the gradients clipped to norm C, adds Gaussian noise of standard
    deviation ``noise_multiplier * C`` to each entry, divides by the *expected* batch size, and calls the optimizer.
    (Replacing an example moves the sum by up to 2 C; the plan's accounting covers this.)  The plan's guarantee holds
    for exact arithmetic; jaxacct/training/step/README.md bounds the effect of floating point.

    Parameters
    ----------
    loss_fn : (params, example) -> scalar loss of one example; or a linen, nnx or Equinox module, together with `loss`.
    optimizer, plan : an Optax transformation, and a Plan.
    clip_norm : the norm C > 0, a pytree of norms (each part is clipped by itself), or an AdaptiveClip.
    loss : (output, target) -> scalar, for a module on examples (input, target).  The loss of an example is
        ``loss(module.apply(params, input), target)`` of linen, ``loss(module(input), target)`` of nnx and Equinox.
    method : {"auto", "vmap", "ghost"}, as for ``clipped_sum``.
    micro_batch : number of examples (or users) processed at a time, by default at most 64.  It limits the memory.
    examples_per_user : only for unit "user" of the plan: the largest number of a user's examples in a step.  Of a user
        who has more, each step takes a fresh random subset.  The mean of the user's gradients is clipped to norm C.
    rngs : whether the loss is called as (params, example, key).  The key depends on the step and the example alone.  A
        module gets it as its framework expects.  If a linen module has streams other than "dropout", give their names.
    apply_kwargs : for a module, further arguments of its call, such as ``{"train": True}``.
    has_aux : whether the loss returns (loss, aux).  Aux is summed over the batch, for logs: it is *not* private.
    trainable : the trained part: a function path -> bool of paths such as "params/Dense_0/kernel"; a pytree of bools, a
        prefix of the parameters; or a type of nnx variables.  All else is frozen: not clipped, without noise, unknown
        to the optimizer; it must not come from the private data.  The default is the nnx.Param of an nnx module, the
        adapters of parameters with `lora`, and everything for other models.
    private_loss : a PrivateLoss.  Each step then also releases a noisy mean loss, given to the optimizer as ``value``.
    mesh : a jax.sharding.Mesh.  Its devices, of one process or of all under `jax.distributed`, share the examples (or
        users) of each step.  The batch that a key draws does not depend on the size of the mesh.
    shard : with a mesh, the layout of the parameters and the optimizer's state: "data" (default), all on every device;
        "fsdp", a part on each, gathered during a step; or a pytree of PartitionSpecs, a prefix of the parameters.

    Raises
    ------
    InputError : a loss that is no function, a bad clip norm, method, mesh or shard, an AdaptiveClip or PrivateLoss that
        leaves no room for the gradients, examples_per_user that does not go with the plan's unit.

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
        loss_fn: Callable[..., Any],
        optimizer: Foreign,
        plan: Plan,
        clip_norm: PyTree,
        *,
        loss: Callable[[Any, Any], Any] | None = None,
        method: str = "auto",
        micro_batch: int | None = None,
        examples_per_user: int | None = None,
        rngs: bool | Sequence[str] = False,
        apply_kwargs: Mapping[str, Any] | None = None,
        has_aux: bool = False,
        trainable: PyTree = None,
        private_loss: PrivateLoss | None = None,
        mesh: jax.sharding.Mesh | None = None,
        shard: PyTree = None,
    ) -> None:
        choice("method", method, METHODS)
        self.module = None if loss is None else loss_fn
        self.loss_fn = loss_of(loss_fn, loss, rngs, apply_kwargs)
        step_function.require_optimizer(optimizer)
        require_plan(plan)
        self.optimizer, self.plan, self.method = optimizer, plan, method
        self.adaptive = clip_norm if isinstance(clip_norm, AdaptiveClip) else None
        self.clip_norm = clip_norm.initial if isinstance(clip_norm, AdaptiveClip) else clip_norm
        sensitivity(self.clip_norm)  # raises InputError for a bad clip norm
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
        for segment in plan.segments:  # raises InputError if the noisy count and loss leave no budget for gradients
            step_function.numbers_at(plan, segment.start, self.adaptive, private_loss)
        taps = plan.taps(0)
        if taps is not None and (self.adaptive is not None or private_loss is not None):
            raise InputError(
                f"{'clip_norm' if private_loss is None else 'private_loss'} releases more in each step, which has no "
                "accounting with noise that steps share; leave it out, or make the plan with noise=None"
            )
        rule = (self.loss_fn, optimizer, plan.sampling, self.micro_batch, method, self.adaptive, plan.cap, most)
        self.rule = StepRule(*rule, bool(rngs), has_aux, private_loss, 0 if taps is None else taps.past.size)
        self.trainable, self.rngs, self.apply_kwargs = trainable, rngs, apply_kwargs
        self.placement = Placement(self.rule, plan.dataset_size, mesh, shard)
        self.step_function = self.placement.step_function

    def _repr_html_(self) -> str:
        clipped = "adaptive" if self.adaptive is not None else repr(self.clip_norm)
        name = getattr(self.loss_fn if self.module is None else type(self.module), "__qualname__", "a function")
        pairs = [
            ("loss", name),
            ("clip norm", clipped),
            ("method", self.method),
            ("micro batch", str(self.micro_batch)),
            *([] if self.examples_per_user is None else [("examples per user", str(self.examples_per_user))]),
            *self.placement.describe(),
        ]
        return markup.fields("Trainer", pairs) + self.plan._repr_html_()

    def init(self, params: PyTree = None, key: bytes | None = None, *, example: PyTree = None) -> State:
        """Return the state before the first step.  First parameters must not come from the private data.

        Parameters
        ----------
        params : floating-point pytree, nnx or Equinox module, or result of `lora`; by default from the given module.
        key : 32 secret bytes for all randomness of one run, by default from the operating system.
        example : for a linen module without params: an input, whose shape fixes the shapes of the drawn parameters.

        Raises
        ------
        InputError : neither params nor example, a bad key, a model that mixes examples, or an optimizer that asks for
            non-private values.
        """
        root = self.placement.processes.tell(secret_bytes(key))
        if params is None:
            first = noise.stream(key_from_bytes(root), noise.INITIALISATION)
            params = initialised(self.module, first, example, self.rngs, self.apply_kwargs)
        trained, rest = split_model(params, self.trainable)
        refuse_state(self.module, trained)
        clip_norm = jax.tree.map(lambda c: jnp.asarray(c, jnp.float32), self.clip_norm)
        trained, opt_state = self.placement.begin(self.rule.begin, trained)
        step_function.look_at(self.optimizer, own_state(opt_state), trained, self.rule.private_loss)
        carried = Carried(trained, opt_state, clip_norm, 0)
        return self._state(Checkpoint(0, carried, begin(root), NOTHING, b""), rest)

    def norm_methods(self, params: PyTree, data: PyTree) -> dict[str, str]:
        """Return how each parameter's norm is found, for examples such as those of `data` (see `norm_methods`)."""
        most = self.examples_per_user
        if isinstance(data, Source):
            data = jax.tree.map(lambda a: jax.ShapeDtypeStruct((len(data), *a.shape), a.dtype), data.layout.example)
        several = () if most is None else (most,)
        one = jax.tree.map(lambda a: jax.ShapeDtypeStruct((*several, *a.shape[1:]), a.dtype), data)
        trained, rest = split_model(params, self.trainable)
        example = one if most is None else (one, jax.ShapeDtypeStruct((most,), jnp.float32))
        key = (jax.eval_shape(lambda: key_from_bytes(bytes(32))),) if self.rule.rngs else ()
        return norm_methods(self.rule.member_loss(rest), trained, (example, *key), self.method, has_aux=True)

    def fit(
        self,
        state: State,
        data: PyTree,
        *,
        users: PyTree = None,
        ledger: Ledger | str | os.PathLike[str] | None = None,
        callbacks: Iterable[Callable[[State], Any]] = (),
        checkpoints: str | os.PathLike[str] | None = None,
        checkpoint_every: int = 100,
        progress: bool | None = True,
        by: str = "",
        log: Log = None,
        log_every: int = 1,
        note_ahead: int | None = None,
        evaluate: Callable[[Any, Any], Any] | None = None,
        public_data: PyTree = None,
        eval_every: int = 100,
        score: Callable[[Any, Any], Any] | None = None,
        validation: PyTree = None,
    ) -> State:
        """Train to the end of the plan, to the limit of the budget, or until a callback returns something true.

        Parameters
        ----------
        state : the result of `init` or of an earlier `fit`.  First parameters that hold rows of data are refused.
        data : pytree of arrays with the plan's dataset_size examples along the first axis, kept on the device.  Or a
            Source, which loads each batch during the previous step; without a mesh a NumPy memory map is read as a
            Source.  On a mesh every process needs the map of all rows and reads those of its own devices; from a Source
            it loads whole batches.
        users : for unit "user" of the plan: each example's user, 0 to dataset_size - 1, for any number of examples.
        ledger : an open Ledger, or the path of a new or existing one.  Every step is in it, on the disk, before its
            noisy gradient is used.  The ledger's other entries count against the target.  A state or checkpoint that is
            noted in a ledger is refused without this ledger, or with an older copy.
        callbacks : functions that are called with the state after every step.
        checkpoints : a folder, made private to its owner since it holds the run's secret key.  A run found there is
            resumed, with a result equal to the last bit (with a Source only if there is a ledger).
        checkpoint_every, log_every, eval_every : number of steps between two checkpoints, records, or evaluations.
        progress : whether to show a line with rate, time left and an upper bound of epsilon; None: only on a terminal.
        by : the name of whoever runs the training, for the ledger.
        log : a function that gets the record (a dict) of a step, or the path of a file of JSON lines, to which a
            resumed run appends.  A record has an upper bound of epsilon so far; what is under "not_private" is *not*
            private, and must not end a run: the function's result is ignored, and it is not called again once it
            raises.  Records are put out once a second and at the end (jaxacct/training/run/README.md, "The log").
        note_ahead : the largest number of steps that one write enters into the ledger: by default, and at most, 1 % of
            the plan's steps, but 1 step for a Source or for batch rules with passes or rounds.  A write enters only as
            many steps as keep writing below 5 % of the time.  If a run is cut off, steps that were entered but not
            taken count as spent until the run is resumed.
        evaluate : (params, public_data) -> a number or a dict of numbers, such as a validation loss, called after every
            `eval_every` steps and after the plan's last.  The values, in ``state.evaluations`` and the log, may be
            published, at no cost if the run goes to its end.  But each call counts as a look at outputs: if the run
            ends early, its whole plan is spent (jaxacct/training/README.md, "Evaluations").
        public_data : the data of ``evaluate``, declared public: nothing in them is, or comes from, a protected record.
        score : only for a plan with an early stop: (params, example) -> a number, clipped to [0, 1] (NaN counts as 0).
            The sum over ``validation`` decides when the run ends.  No callback or evaluation is called after that.
        validation : private examples along the first axis, at most 2^20; they may be training data or others.

        Returns
        -------
        State : after the last step taken; `stopped` says why no further step was taken.

        Raises
        ------
        InputError : data of another size than the plan's; a state, ledger or checkpoint that do not belong together; a
            plan that leaves no room after the earlier spending; a Source that cannot load an example, or gives others
            than before a crash.  All steps before the error are in the ledger and the checkpoints.
        """
        if getattr(jax.config, "jax_disable_jit"):  # noqa: B009 - the type of the settings lacks this attribute
            raise InputError("jax_disable_jit is set, and keys depend on the compiled program; leave it unset in fit")
        if not isinstance(state, State):
            raise InputError(f"state is a {type(state).__name__}, must be a State; use trainer.init(params)")
        if state.step and state.history == NOTHING:
            raise InputError(
                f"state says step {state.step}, but its history has no step; give the state that fit returned or a "
                "folder as checkpoints, or trainer.init(params) with the ledger that holds those steps"
            )
        if state.step:
            self.plan.require_noise_of(state.plan)
        elif state.past is not None:
            state = replace(state, past=None)  # no step yet, so drop the noise buffers: this trainer makes its own
        where, private = self.placement, (data, validation)  # no function and no first parameter may hold rows of these
        if where.mesh is None:  # on a mesh a memory map stays a map, since each process reads its own rows only
            data = source_of_mapped(data)
        if (self.plan.unit == "user") != (users is not None):
            what = "missing" if users is None else "given"
            raise InputError(f"users is {what}, and the plan's unit is {self.plan.unit!r}; give users if it is 'user'")
        # with users, `grouped` checks the numbers of users and examples
        require_rows(data, self.plan.dataset_size if users is None else None, sources=True)
        callbacks, evaluations = list(callbacks), None
        if evaluate is not None:
            evaluations = Evaluations(evaluate, public_data, eval_every, private)
            callbacks.insert(0, evaluations)
        elif public_data is not None:
            raise InputError("public_data is given without evaluate; give both, or leave both out")
        judge = validation_score(self.plan, score, validation, where.mesh is not None)
        every = int(check("checkpoint_every", checkpoint_every, COUNT))
        ahead = None if note_ahead is None else int(check("note_ahead", note_ahead, COUNT))
        run_ledger.require_same(where.processes, state, self.plan, every, bool(callbacks), checkpoints is not None)
        looks = checked_log(log, ledger) if where.processes.first else None, int(check("log_every", log_every, COUNT))
        if not isinstance(data, Source):
            data = where.data(data, users)
        store = found = None
        with contextlib.ExitStack() as stack:
            if checkpoints is not None:
                store = Store(checkpoints, where.processes)
                stack.callback(store.close)
            trained, rest = split_model(state.params, self.trainable)
            carried = where.carried(state, trained)
            if store is not None:
                found = run_ledger.last_checkpoint(store, state, carried, where.digest)
            if found is not None:
                state = self._state(found, rest)
                carried = where.carried(state, found.carried.params)
            state.lineage.root.key  # noqa: B018 - raises InputError if the state has no key
            where.processes.decide(functools.partial(run_ledger.require_ledger, state.history, ledger))
            start = (self.rule, self.plan, carried, state.lineage, state.step, data, rest)
            with waiting(None, "steps: tracing the step", progress if where.processes.first else False):
                (with_ledger,) = where.processes.any(where.processes.first and ledger is not None)
                if isinstance(data, Source):
                    program: Program = Streamed(where, *start, users, found, with_ledger)
                else:
                    program = Program(where, *start)
            stack.callback(program.close)
            for traced in program.traced:
                refuse_kept(traced)
                refuse_closed_over("loss_fn", traced.jaxpr, private, () if rest is None else rest.frozen)
            if state.step == 0:
                refuse_records(carried.params, private)
            if judge is not None:
                judge.begin(carried.params, rest, private)
            if found is not None and found.session and not program.goes_on(found, with_ledger):
                # unknown steps may have followed the checkpoint, so the whole plan of the checkpoint counts as spent
                state = replace(state, history=state.history.whole())
            run_ledger.require_room_after(state, self.plan)
            with run_log(*looks, state) as told:
                noted = run_ledger.open_run_ledger(where.processes, ledger, state, self.plan, by, ahead)
                if noted is not None:
                    stack.callback(noted.close)
                told.begin(self.plan, state, noted.ledger if noted is not None else None)
                if evaluations is not None:
                    evaluations.tell = told.evaluated
                values = [] if evaluations is None else evaluations.values
                run = self._run(state, program, noted, callbacks, values, judge, store, found, every, progress, told)
                return told.returned(run)

    def _run(
        self,
        state: State,
        program: Program,
        ledger: run_ledger.RunLedger | None,
        callbacks: list[Callable[[State], Any]],
        evaluations: list[Evaluation],
        judge: ValidationScore | None,
        store: Store | None,
        found: Checkpoint | None,
        every: int,
        progress: bool | None,
        told: RunLog,
    ) -> State:
        plan, step, scores = self.plan, state.step, state.scores.values
        # the loop below may replace this reason; "early_stop" here means that an early stop had ended the run before
        stopped = state.stopped if state.stopped == "early_stop" and judge is not None else "finished"
        carried, line, stretches = program.carried, program.line, state.history.stretches
        partition = program.advance(line, step)[2] if step < plan.steps else ""
        until = plan.steps if ledger is not None else run_ledger.last_step_in_budget(plan, stretches, state, partition)
        processes, digest_of = self.placement.processes, self.placement.digest

        def see(looked: bool = True) -> None:
            if ledger is not None:
                ledger.seen(plan, step, looked)

        # several processes write into the ledger only together: before any callback they write that outputs are seen
        alone = processes.count == 1
        looks, noted, noted_until = Looks(state.seen, see if alone else lambda: None), alone, step

        def now(stopped: str = "", session: bytes = b"") -> Checkpoint:
            done = followed(stretches, plan, step, step, partition) if session else stretches
            history = History(done) if ledger is None else History((), ledger.mark())
            return Checkpoint(step, carried, line, history, session, stopped, looks.seen, scores)

        saved = found

        def keep_look() -> None:
            """Mark in a new checkpoint that outputs were seen, unless a ledger or the last checkpoint has the mark."""
            nonlocal line, saved
            if ledger is None and store is not None and saved is not None and looks.seen and not saved.seen:
                line = line.replace(seal=digest_of(carried))
                saved = now(session=program.session)
                store.save(saved)

        begins, ended = step < plan.steps and stopped != "early_stop", None if ledger is None else ledger.ended
        repeats = program.goes_on(found, ledger is not None)
        if store is not None and begins and not repeats:
            saved = now(session=program.session)
            store.save(saved)  # saved before the first release, so that a run can be repeated after a crash
        if begins and step < until:
            with waiting(None, "steps: compiling the step", progress if processes.first else False):
                program.begin(line, step, until)
        assert told.epsilon is not None
        bar = ProgressLine(told.epsilon, step, progress if processes.first else False)
        try:
            while step < plan.steps and stopped != "early_stop":
                if step >= until:
                    stopped = "budget"
                    break
                upcoming = program.prepared(line, step)
                after, key, settings, partition, batch = upcoming
                if ledger is not None and step >= noted_until:
                    noted_until = step + ledger.note(plan, step, upcoming, program)
                    if noted_until == step:
                        if step == 0:
                            raise InputError(
                                f"none of the plan's {plan.steps} steps fits the budget beside what the ledger holds; "
                                "for other data use another ledger"
                            )
                        stopped = "budget"
                        break
                done, observed = program.run(carried, key, settings, batch)
                then = followed(stretches, plan, step, step + 1, partition)
                carried, stretches, line, step = done, then, after, step + 1
                told.look(step, observed, stretches)
                rule = plan.early_stop
                if judge is not None and rule is not None and step % rule.numbers[1] == 0 and step < plan.steps:
                    scores = (*scores, judge(carried.params))
                    # do not ask the rule if the ledger has an end (`ended`): a second answer "end" would cost again
                    if rule.ends(scores, line.root.key, line.chain) if ended is None else step == ended:
                        if ledger is not None:
                            ledger.stopped_early(plan, step)
                        looks.seen, stopped = True, "early_stop"
                        break
                bar.update(step, carried.clip_norm, stretches)
                if store is not None and step % every == 0 and step < plan.steps:
                    line = line.replace(seal=digest_of(carried))
                    saved = now(session=program.session)
                    store.save(saved)
                if callbacks:
                    if not noted:
                        see()
                        noted = True
                    view = shown(self._state(now(), program.frozen, evaluations), looks)
                    try:
                        stop, alive = self._called(callbacks, view, looks), weakref.ref(view)
                    except BaseException:
                        if alone:
                            _whatever_fails(keep_look)
                        raise
                    del view
                    # the next step must not overwrite arrays of this state that a callback may have kept
                    kept = looks.at_this or alive() is not None
                    stop, looks.seen, kept = processes.any(stop, looks.seen, kept)
                    if not stop:
                        keep_look()
                    if kept and program.overwrites and not stop:
                        carried = copied(carried)
                    if stop:
                        looks.seen |= told.shows
                        see(looks.seen)
                        stopped = "callback"
                        break
        except BaseException as error:
            # checkpoints, log or progress line of an interrupted run may have been seen, so note where the run ended
            refused = isinstance(error, InputError) and step == state.step
            if ledger is not None and step and not refused:
                _whatever_fails(functools.partial(ledger.cut_off, plan, step))
            # With several processes no checkpoint is written: perhaps only one has the error, and none can write alone.
            if store is not None and alone and (session := program.session_after(error)) is not None:
                line = line.replace(seal=digest_of(carried))
                with contextlib.suppress(InputError):
                    store.save(now(session=session))
                    say(f"cut off after step {step}; its checkpoint is written")
            raise
        finally:
            looks.over()
        bar.close()
        line = line.replace(seal=digest_of(carried))
        # steps that are being repeated may have been released beyond this one: then their session stays open
        followed_on = repeats and ledger is None and stopped not in ("finished", "budget")
        last = now(stopped, program.session if followed_on else b"")
        if store is not None and (saved is None or (saved.step, saved.session) != (step, b"")):
            store.save(last)  # without `session`: no released step follows, so a resumed run has none to repeat
        if followed_on:
            last = last._replace(history=last.history.whole())
        if ledger is not None and stopped == "early_stop":
            ledger.stopped_early(plan, step)  # needed if the run got its ledger only after the early stop
        return self._state(last, program.frozen, tuple(evaluations))

    def _called(self, callbacks: list[Callable[[State], Any]], view: State, looks: Looks) -> bool:
        """Return whether a callback stops the run.  A callback that raises counts as a look at outputs."""
        try:
            return any([callback(view) for callback in callbacks])
        except BaseException:
            _whatever_fails(looks.look)
            raise
        finally:
            looks.now = None

    def _state(self, found: Checkpoint, frozen: Untrained | None, evaluations: Sequence[Evaluation] = ()) -> State:
        """Return the `State` of a checkpoint, whose params are the trained and the frozen parameters together."""
        trained, opt_state, clip_norm, not_finite = found.carried
        past = Past(opt_state.past, clip_norm) if isinstance(opt_state, Correlated) else None
        rest = (found.lineage, found.history, self.plan, found.stopped, found.seen, past, evaluations)
        after = (found.step, not_finite, *rest, Scores(found.scores))
        return State(join_model(trained, frozen), own_state(opt_state), clip_norm, *after)


def _whatever_fails(note: Callable[[], Any]) -> None:
    """Call `note` after an error, to write that outputs were seen.  If `note` raises InputError, print its message."""
    try:
        note()
    except InputError as error:
        say(f"jaxacct: {error}; nothing says that outputs were seen: count the plan to its end")
