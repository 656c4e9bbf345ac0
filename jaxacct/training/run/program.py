"""Compiles a run's step, computes the digests from which the run's keys are derived, and loads batches of a Source.

A *lineage* is a run's secret root key, with digests of all that led to a step (training/step/README.md, "Keys").
"""

from __future__ import annotations

import functools
import hashlib
import secrets
import threading
from collections import deque
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor, wait
from itertools import islice, pairwise
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxacct.core.progress import say
from jaxacct.core.validation import InputError
from jaxacct.engines import programs
from jaxacct.training.clipping.traces import contents
from jaxacct.training.ledger import Ledger
from jaxacct.training.plan import Plan
from jaxacct.training.run.checkpoints import Checkpoint
from jaxacct.training.sampling.sampler import grouped, host_of_users
from jaxacct.training.sharding.placement import Placement, copied
from jaxacct.training.source import Source
from jaxacct.training.step import key_derivation, noise
from jaxacct.training.step.key_derivation import Lineage, StepKey
from jaxacct.training.step.models import Untrained
from jaxacct.training.step.step_function import Carried, Numbers, Observed, StepRule, draw_on_host, numbers_at
from jaxacct.training.step.step_mechanisms import ALLOCATION, BY_PASS, ORDER, TRUNCATED, WITH_NOISE, require_kept

_PATIENCE = 1.0
"""Number of seconds to wait silently for a thread to end; afterwards a printed line says what the program waits for."""
_sending = functools.partial(jax.transfer_guard_host_to_device, "allow")
"""Context in which JAX itself moves a step's key and numbers to the device, at a tenth of the cost of `device_put`."""
_HOST = b"host 1"
"""Text in a digest that stands for the host's part of a step, which is to draw the batch and to order micro-batches."""


class Prepared(NamedTuple):
    """Step that is ready to run."""

    line: Lineage  # the lineage after the step
    key: StepKey
    settings: Numbers
    partition: str  # the fingerprint of the step's pass or round; "" if the batch rule has neither
    batch: Any = None  # the `Batch` that was loaded from a source; None without a source


class Program:
    """Step function for one plan, state and data.  `__init__` traces and digests it, and `begin` compiles it."""

    overwrites = True  # whether a step overwrites the arrays of the `Carried` that it is given

    def __init__(
        self,
        where: Placement,
        rule: StepRule,
        plan: Plan,
        carried: Carried,
        before: Lineage,
        step: int,
        data: Any,
        frozen: Untrained | None = None,
    ) -> None:
        self._where, self._rule, self._plan, self.frozen = where, rule, plan, where.frozen(carried.params, frozen)
        self._whole = data
        zero = np.zeros(8, np.uint32)
        now = self._numbers(min(step, self._plan.steps - 1), zero)
        self.traced = [where.step(carried, zero, zero, data, now, self.frozen)]  # all programs that `begin` compiles
        self._settle(carried, before, where.digest_program(self.traced[0]), where.digest(data))

    def _settle(self, carried: Carried, before: Lineage, program: bytes, data: bytes) -> None:
        """Set `session`, the lineage, and the digests of program and data. Digests and lineage make the keys."""
        self.carried, self._later = carried, deque[Prepared]()
        self.line = key_derivation.joined(before, self._where.digest(carried))
        self._digest, self._data = program, data
        form = key_derivation.digest(repr((type(self).__name__, self._where.describe())).encode())
        # `form` says how the data lie on devices; digests of data can be compared only if their forms are equal
        self._cut = form + data
        require_kept("data", before.pass_cut[:32] != form or before.pass_cut == self._cut)
        if self.frozen is not None:  # the digest has only shapes and dtypes of the frozen arrays: add their values
            self._digest = key_derivation.digest(self._digest, self._where.digest(self.frozen.frozen))
        # the program's digest does not cover these two settings, whose noise is an argument of the program
        beside = repr((self._rule.adaptive, self._rule.private_loss)).encode()
        # If a run resumes from a checkpoint with an equal session, it repeats the steps after the checkpoint exactly.
        self.session = key_derivation.digest(self._digest, self._data, self._plan.to_json().encode(), beside)

    def begin(self, line: Lineage, step: int, until: int) -> None:
        """Compile the program, or load it from the store of programs, before steps `step` to `until - 1` are run."""
        lowered = self.traced[0].lower()
        if not key_derivation.repeats(contents(self.traced[0].jaxpr)[1]):
            self._compiled = lowered.compile()
            return
        zero = np.zeros(8, np.uint32)
        now, devices = self._numbers(step, zero), self._where.in_order(self.carried)
        trial = lambda compiled: compiled(copied(self.carried), zero, zero, self._whole, now, self.frozen)
        self._compiled = programs.kept_step(lowered, self._digest.hex(), devices, trial)

    def prepared(self, line: Lineage, step: int) -> Prepared:
        """Return step `step` after the lineage `line`, ready to be run.  Call this for the steps in order."""
        return self._later.popleft() if self._later else self._anew(line, step)

    def later(self, line: Lineage, step: int, count: int) -> list[StepKey]:
        """Return the keys of `count` steps from `step` on, after the lineage `line`.  `prepared` will use them."""
        for number in range(step + len(self._later), step + count):
            self._later.append(self._anew(self._later[-1].line if self._later else line, number))
        return [each.key for each in islice(self._later, count)]

    def _anew(self, line: Lineage, step: int) -> Prepared:
        after, key, partition = self.advance(line, step)
        return Prepared(after, key, self._numbers(step, key.words), partition)

    def run(self, carried: Carried, key: StepKey, settings: Numbers, batch: Any) -> tuple[Carried, Observed]:
        """Run one step and overwrite the arrays of ``carried``.  A ledger of the run must already hold the step."""
        with _sending():
            return self._compiled(carried, key.words, key.pass_words, self._whole, settings, self.frozen)

    def close(self) -> None:
        """Do nothing: only a streamed program has threads to end."""

    def session_after(self, error: BaseException) -> bytes | None:
        """Return None: no checkpoint is written after an error, since a resumed run repeats the steps."""
        return None

    def goes_on(self, found: Checkpoint | None, ledger: bool) -> bool:
        """Return whether this run repeats what followed `found`: same session, and a ledger in both or in neither."""
        if found is None or found.session != self.session:
            return False
        return (found.history.ledger is not None) == ledger

    def advance(self, line: Lineage, step: int) -> tuple[Lineage, StepKey, str]:
        """Return the lineage after a step, the step's keys, and its pass's or round's fingerprint ("" if none)."""
        segment, begins, place, cut = self._plan.at(step), -1, 0, b""
        if self._plan.sampling in BY_PASS:
            begins = self._plan.pass_of(step)[1]
            place = step - begins
            size = repr((begins, segment.expected_batch_size)).encode()
            cuts = {ALLOCATION: key_derivation.digest(self.session), **dict.fromkeys(WITH_NOISE, self._cut)}
            cut = cuts.get(self._plan.sampling, size)
        settings: tuple[Any, ...] = (step, *segment[2:], place, self._rule.adaptive, self._rule.private_loss)
        taps = self._plan.taps(step)
        if self._plan.rates_digest is not None:  # the rates decide the draw, so they enter the key
            settings = (*settings, self._plan.rates_digest)
        # weights of correlated noise enter the key, too: releases with one key but other weights would reveal the noise
        if taps is not None:
            settings += tuple(np.asarray(weights).tolist() for weights in taps)
        groups = self._plan.batches if self._plan.sampling == ORDER else self._plan.groups
        after, key = key_derivation.advance(line, self._digest, self._data, settings, begins, cut, groups)
        return after, key, key.partition if begins >= 0 else ""

    def _numbers(self, step: int, words: Any = None) -> Numbers:
        return numbers_at(self._plan, step, self._rule.adaptive, self._rule.private_loss, words)


class OtherExamples(InputError):
    """Error: a step draws the same records as when it was released, but the source gives other examples for them."""


class Batch(NamedTuple):
    """Loaded batch, filled up to whole micro-batches.  A place holds one member (a record or a user), or is empty."""

    leaves: list[np.ndarray]  # one row for each place: a record, or the examples that a user contributes
    weights: np.ndarray | None  # the weight of each example of each user; None if the members are records
    indices: np.ndarray  # int32, the number of the record or user in each place; 0 in an empty place
    mask: np.ndarray  # whether each place holds a member


class Streamed(Program):
    """Program for one plan, state and source.  `begin` starts the threads that load batches, and `close` ends them."""

    # A step leaves its argument arrays intact.  So after an interrupt within a step, the earlier state can be saved.
    overwrites = False

    def __init__(
        self,
        where: Placement,
        rule: StepRule,
        plan: Plan,
        carried: Carried,
        before: Lineage,
        step: int,
        source: Source,
        frozen: Untrained | None,
        users: Any,
        found: Checkpoint | None,
        ledger: bool,
    ) -> None:
        self._where, self._rule, self._plan, self.frozen = where, rule, plan, where.frozen(carried.params, frozen)
        self._source = source
        self._users = None if users is None else grouped(users, plan.dataset_size, {(len(source),)})
        self._places = min(rule.cap or plan.dataset_size, plan.dataset_size)
        self._micro = min(rule.micro_batch, self._places) * where.devices  # micro-batch size on all devices together
        zero, most = np.zeros(8, np.uint32), rule.examples_per_user
        shape = (self._micro,) if most is None else (self._micro, most)
        rows = jax.tree.map(lambda a: jax.ShapeDtypeStruct((*shape, *a.shape), a.dtype), source.layout.example)
        rows = rows if most is None else (rows, jax.ShapeDtypeStruct(shape, jnp.float32))
        batch = (rows, *(jax.ShapeDtypeStruct((self._micro,), dtype) for dtype in (jnp.int32, jnp.bool_)))
        now = self._numbers(min(step, plan.steps - 1), zero)
        self.traced = where.loaded(carried, zero, batch, now, self.frozen)
        settings = repr((rule.sampling, rule.cap, rule.examples_per_user, self._micro)).encode()
        digests = [where.digest_program(each) for each in self.traced]
        about = f"{len(source)} {source.layout.example}".encode()
        data = key_derivation.digest(b"source", about, key_derivation.digest_tree(self._users))
        self._settle(carried, before, key_derivation.digest(_HOST, settings, *digests), data)
        self._repeats = ledger and source.repeats
        if not self._repeats:
            self.session = key_derivation.digest(self.session, where.processes.tell(secrets.token_bytes(16)))
        # Steps draw the same records as before only in the checkpoint's session, where the ledger shows whether the
        # source gives the same examples.  Otherwise fresh random bits make all draws new.
        if found is None or found.session != self.session:
            self.line = key_derivation.anew(self.line, where.processes.tell(secrets.token_bytes(16)))
        self._stop = threading.Event()
        self._before: Any = carried.not_finite

    def begin(self, line: Lineage, step: int, until: int) -> None:
        """Start the threads that load batches.  While they load the first batches, compile the programs."""
        self._ahead = Ahead(self._batches(line, step, until), self._source.prefetch, self._stop)
        self._nothing, self._add, self._release = (each.lower().compile() for each in self.traced)

    def later(self, line: Lineage, step: int, count: int) -> list[StepKey]:
        """Return no keys: a step's key depends on its batch, which is not loaded yet."""
        return []

    def prepared(self, line: Lineage, step: int) -> Prepared:
        """Return the next step with its batch and keys.  Call this method for the steps in order."""
        taken = self._ahead.take()
        self._where.processes.agree("what the source loads", taken.key.key_fingerprint.encode())
        return taken

    def run(self, carried: Carried, key: StepKey, settings: Numbers, batch: Any) -> tuple[Carried, Observed]:
        """Run step n.  First wait until step n - 2 is done, so that the device holds the batches of few steps."""
        done, self._before = self._before, carried.not_finite
        jax.block_until_ready(done)
        sums = self._nothing(carried, self.frozen)
        structure = jax.tree_util.tree_structure(self._source.layout.example)
        for first in range(0, batch.mask.size, self._micro):
            part = slice(first, first + self._micro)
            rows = jax.tree_util.tree_unflatten(structure, [leaf[part] for leaf in batch.leaves])
            if batch.weights is not None:
                rows = (rows, batch.weights[part])
            placed = self._where.batch((rows, batch.indices[part], batch.mask[part]))
            with _sending():
                sums = self._add(carried, key.words, sums, *placed, self.frozen)
        with _sending():
            return self._release(carried, key.words, sums, settings)

    def close(self) -> None:
        """Tell the threads that load batches to end, and wait until they have ended."""
        if hasattr(self, "_ahead"):
            self._ahead.close()

    def session_after(self, error: BaseException) -> bytes | None:
        """Return a checkpoint's `session` after an error: b"" if no run can repeat later steps; None: write none."""
        return None if isinstance(error, OtherExamples) else self.session if self._repeats else b""

    def _batches(self, line: Lineage, step: int, until: int) -> Generator[Prepared, None, None]:
        """Yield steps `step` to `until - 1` with their loaded batches, on which the keys of their noise depend."""
        with ThreadPoolExecutor(self._source.workers, "jaxacct source") as pool:
            for number in range(step, until):
                line, key, partition = self.advance(line, number)
                rule, settings = self._rule, self._numbers(number)
                who = draw_on_host(rule, key.words, key.pass_words, self._plan.dataset_size, settings)
                batch = self._load(pool, key.words, who)
                line, key = key_derivation.loaded(line, key, _digest(batch))
                settings = self._numbers(number, key.words)
                yield Prepared(line, key, settings, partition, batch)

    def _load(self, pool: ThreadPoolExecutor, words: Any, who: np.ndarray) -> Batch:
        """Load the examples of the records or users `who`.  Leave out users without examples: they add nothing."""
        most, layout, weights = self._rule.examples_per_user or 1, self._source.layout, None
        if self._users is not None:
            who = who[self._users[2][who] > 0]
            numbers, found = host_of_users(noise.host_stream(words, noise.EXAMPLES), *self._users, who, most)
        count = self._places if self._rule.sampling == TRUNCATED else who.size
        rows = -(-count // self._micro) * self._micro
        leaves = layout.buffers((rows * most,))
        if self._users is None:
            numbers = who
        else:
            weights = np.zeros((rows, most), np.float32)
            weights[: who.size] = found
        self._fill(pool, numbers.reshape(-1), leaves)
        if weights is not None:
            leaves = [leaf.reshape(rows, most, *leaf.shape[1:]) for leaf in leaves]
        indices = np.zeros(rows, np.int32)
        indices[: who.size] = who
        return Batch(leaves, weights, indices, np.arange(rows) < who.size)

    def _fill(self, pool: ThreadPoolExecutor, numbers: np.ndarray, leaves: list[np.ndarray]) -> None:
        """Load the examples `numbers` into the first rows of `leaves`, an equal share by each worker."""
        failed = threading.Event()

        def share(ends: tuple[int, int]) -> None:
            part = slice(*ends)
            try:
                given_up = lambda: self._stop.is_set() or failed.is_set()
                self._source.layout.load(numbers[part], [leaf[part] for leaf in leaves], given_up)
            except BaseException:
                failed.set()
                raise

        shares = min(self._source.workers, numbers.size)
        ends = [numbers.size * place // shares for place in range(shares + 1)] if shares else []
        try:
            errors = [done.exception() for done in [pool.submit(share, each) for each in pairwise(ends)]]
        except BaseException:  # the main thread was interrupted: tell the workers to give up
            failed.set()
            raise
        told = [error for error in errors if error is not None]
        if told:
            raise next((error for error in told if isinstance(error, InputError)), told[0])


def _digest(batch: Batch) -> bytes:
    """Return the SHA-256 digest of a loaded batch.  It covers the number of members, and all their examples."""
    count = int(batch.mask.sum())
    parts = (hashlib.sha256(leaf[:count].reshape(-1).view(np.uint8).data).digest() for leaf in batch.leaves)
    return key_derivation.digest(str(count).encode(), *parts)


def require_same_rows(ledger: Ledger, step: int, key: StepKey) -> None:
    """Raise OtherExamples if the ledger has this step with the same drawn records but with other examples."""
    spent = ledger.runs[ledger.run]
    if step not in spent.numbers:
        return
    for entry in spent.seen:
        if (entry.step, entry.batch) == (step, key.batch_fingerprint) and entry.key != key.key_fingerprint:
            raise OtherExamples(
                f"step {step} was released with other examples for the same draw: the source does not repeat itself, "
                "or was changed; go on with Source(..., repeats=False)"
            )


class Ahead:
    """Steps of a generator, up to `depth` of them made in advance by a thread.  `take` raises the thread's errors."""

    def __init__(self, items: Generator[Prepared, None, None], depth: int, stop: threading.Event) -> None:
        self._items, self._stop = items, stop
        self._thread = ThreadPoolExecutor(1, "jaxacct source")
        self._made = deque(self._thread.submit(next, items) for _ in range(depth))

    def take(self) -> Prepared:
        """Return the generator's next step; raise StopIteration after the last one."""
        if not self._made:
            return next(self._items)
        item = self._made[0].result()
        self._made.popleft()
        self._made.append(self._thread.submit(next, self._items))
        return item

    def close(self) -> None:
        """Tell the thread to end, and wait until it has ended."""
        self._stop.set()
        running = [each for each in self._made if not each.cancel()]
        if wait(running, _PATIENCE).not_done:
            say("waiting for the source to finish what it is loading")
        self._thread.shutdown()
        self._items.close()
