"""Ledger: an append-only record of what a run releases, on the disk before it is released."""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Self

import numpy as np

from jaxacct.core.files import regular_file, rename_new, sync_folder, unwritable
from jaxacct.core.validation import InputError
from jaxacct.mechanisms import Mechanism, batch_shape
from jaxacct.mechanisms.base import require_mechanism
from jaxacct.training.ledger import format as ledger_format
from jaxacct.training.ledger import stop_rule
from jaxacct.training.ledger.contents import Contents, ahead
from jaxacct.training.ledger.file import LedgerFile, beside
from jaxacct.training.ledger.format import Line, Run, Seen, Spend, Step
from jaxacct.training.plan import Plan

__all__ = ["Ledger", "Mark"]


class Mark(NamedTuple):
    """How far a ledger was: its path then, the run, the number of lines, and a SHA-256 digest of all of them."""

    path: str
    run: str
    lines: int
    head: str


class Ledger(Contents):
    """What one or several runs have spent: one JSON line per release, on the disk before `record` returns.

    Call `record` before the noisy sum is used.  Then a crash at any moment can only make the ledger say too much:
    a line that was cut off counts as a step, at the least noise and the highest rate that its run has known.  An entry
    is known by its run, step, key, batch and noise: a replay of exactly the same counts once, any other counts again.
    So equal fingerprints must mean an equal output, to the last bit; a step repeated in any other way needs a new key.

    Call `seen` before you look at outputs of a run that you may end because of them.  From then on `spent` and
    `epsilon` count the run to the end of its plan, whenever it ends.

    One process writes at a time.  Whatever is damaged but for the last line is refused, with the number of the line.

    Made by `create`, `open` or `read`.  Its attributes are `run`, the name of the current run; `runs`, what each run
    has spent, by name; and `headers`, the `run` lines of each, with its plans.

    Parameters
    ----------
    path : where it is.
    file : the open file, for `create`, `open` and `read`; None for a ledger that cannot be written.

    Raises
    ------
    InputError : a file that is there already, cannot be opened or written, is damaged, or is another one by now.

    >>> import tempfile
    >>> from jaxacct.training import Plan
    >>> plan = Plan(target_delta=1e-5, dataset_size=50, sampling_probability=1.0, noise_multiplier=5.0, steps=4)
    >>> path = tempfile.mkdtemp() + "/run.jsonl"
    >>> with Ledger.create(path, plan, by="ada") as ledger:
    ...     ledger.record(0, "key 0", "all", 5.0, 1.0)
    ...     ledger.record(0, "key 0", "all", 5.0, 1.0)  # resumed, and exactly the same
    ...     ledger.record(1, "key 1", "all", 5.0, 1.0)
    ...     ledger.spent()
    Repeated(mechanism=PoissonSampled(mechanism=Gaussian(noise_multiplier=5.0), sampling_probability=1.0), steps=2.0)
    """

    def __init__(self, path: Path, file: BinaryIO | None) -> None:
        super().__init__(path)
        self._file = LedgerFile(path, file)
        self.lock = threading.RLock()  # from the choice of a run to its entry, where several threads have runs
        self._chains = [ledger_format.BEGINNING]  # before the first line, and after each

    @classmethod
    def create(cls, path: str | os.PathLike[str], plan: Plan, run: str | None = None, by: str = "") -> Ledger:
        """A new ledger, for a run of a plan, readable by its owner alone; a file that is there already is refused.

        run : its name, by default a random one.  by : who runs it, as the caller wants it told.
        """
        place = Path(path)
        taken = InputError(f"{place}: is there already; use Ledger.open to go on with it, or another name")
        if os.path.lexists(place):
            raise taken
        temporary = beside(place)  # until the first line is on the disk, so that nobody finds a ledger without a run
        try:
            file = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o600)
        except OSError as error:
            raise unwritable(place, error) from None
        ledger = cls(place, os.fdopen(file, "r+b"))
        try:
            ledger._file.path = temporary
            ledger._file.hold()
            ledger.begin(plan, run, by)
            rename_new(temporary, place)
            ledger._file.path = place
        except BaseException as error:
            ledger.close()
            temporary.unlink(missing_ok=True)
            if isinstance(error, FileExistsError):
                raise taken from None
            if isinstance(error, OSError):
                raise unwritable(place, error) from None
            raise
        sync_folder(place)
        return ledger

    @classmethod
    def open(cls, path: str | os.PathLike[str], run: str | None = None) -> Ledger:
        """A ledger to be continued: the named run of it, by default the last that began."""
        place = regular_file("ledger", path)
        try:
            ledger = cls(place, place.open("r+b"))
        except OSError as error:
            raise InputError(f"{place}: cannot be opened: {error.strerror or error}") from None
        ledger._file.hold()
        try:
            ledger._catch_up(mend=True)
            if run is not None and run not in ledger.runs:
                raise InputError(f"run = {run!r:.60} is not in {place}; it has {', '.join(map(repr, ledger.runs))}")
        except BaseException:
            ledger.close()
            raise
        ledger.run = ledger.run if run is None else run
        return ledger

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Ledger:
        """A ledger to look at: nothing is written, and another process may be writing."""
        place = regular_file("ledger", path)
        try:
            with place.open("rb") as file:
                ledger = cls(place, file)
                ledger._catch_up(mend=False)
        except OSError as error:
            raise InputError(f"{place}: cannot be read: {error.strerror or error}") from None
        ledger._file.forget()
        return ledger

    @property
    def is_open(self) -> bool:
        """Whether entries can be written."""
        return self._file.is_open

    def begin(self, plan: Plan, run: str | None = None, by: str = "") -> str:
        """Begin another run in the same ledger, which becomes the current one; its name.

        A plan whose unit is another than that of the ledger's runs is refused: their guarantees do not add up.
        """
        name = secrets.token_hex(8) if run is None else ledger_format.words("run", run)
        if name in self.runs:
            raise InputError(f"run = {name!r} is in the ledger already; give another name, or open it")
        self._require_unit(plan)
        self._append([Run(name, ledger_format.words("by", by), plan)])
        return name

    def replan(self, plan: Plan) -> None:
        """Note that the current run goes on with another plan, such as one that was recalibrated."""
        self._require_unit(plan)
        self._append([Run(self.run, self.headers[self.run][-1].by, plan)])

    def record(
        self,
        step: int,
        key_fingerprint: str,
        batch_fingerprint: str,
        noise_multiplier: float,
        sampling_probability: float,
        partition: str | None = None,
    ) -> None:
        """Note a step that is about to be released; it is on the disk when this returns.

        Parameters
        ----------
        step : its number, from 0.
        key_fingerprint, batch_fingerprint : texts that are equal only where the step comes out equal, to the last bit.
        noise_multiplier, sampling_probability : of this step.
        partition : of fixed batches, a fingerprint of how the data were cut into the batches of this pass.  Steps of
            one partition are taken to have disjoint batches, and together cost what the dearest costs.  Without it
            every step costs a Gaussian of its own.  The same of random allocation, where it is a fingerprint of the
            slots that the records drew for this round: a partition costs a whole round.

        Raises
        ------
        InputError : a bad value, or a ledger that cannot be written.
        """
        entry = (step, key_fingerprint, batch_fingerprint, noise_multiplier, sampling_probability, partition)
        self._append([self._step(*entry)])

    def record_many(
        self,
        steps: Sequence[int],
        key_fingerprints: Sequence[str],
        batch_fingerprints: Sequence[str],
        noise_multiplier: Any,
        sampling_probability: Any,
        partitions: Sequence[str | None] | None = None,
    ) -> None:
        """`record` for several steps in one write, before any of them is released; the numbers broadcast."""
        count = len(steps)
        noise, rate = (np.broadcast_to(x, count).tolist() for x in (noise_multiplier, sampling_probability))
        columns = (steps, key_fingerprints, batch_fingerprints, noise, rate, partitions or [None] * count)
        if {len(column) for column in columns} != {count}:
            raise InputError(f"record_many needs {count} fingerprints of each kind, one per step; give them all")
        self._append([self._step(*row) for row in zip(*columns, strict=True)])

    def spend(self, mechanism: Mechanism, note: str = "") -> None:
        """Note any other release, such as a whole private selection; it is on the disk when this returns."""
        require_mechanism("mechanism", mechanism)
        if batch_shape(mechanism):
            raise InputError(f"mechanism of shape {batch_shape(mechanism)} must be one configuration; note one by one")
        self._append([Spend(self.run, mechanism, ledger_format.words("note", note))])

    def seen(self, step: int, looked: bool = True) -> None:
        """Note that outputs of the current run are about to be seen, after `step` steps of its plan.

        The entry is on the disk when this returns.  From then on the run counts as far as its plan and target allow,
        whenever it ends, until it continues with another plan.

        looked : False if the run is stopped by something that may have seen outputs but did not ask for them.  Once the
            run continues with another plan, the rest of this one then no longer counts.
        """
        with self.lock:
            spent = self.runs[self.run]
            known, step = spent.looks, max(int(step), spent.next)  # a resumed run repeats steps of the ledger
            if known is None:
                until = step + stop_rule.room(self.plan, self, step) if step < self.plan.steps else self.plan.steps
                self._append([ledger_format.checked_seen(Seen(self.run, step, until, looked))])
            elif looked and not known.looked:
                self._append([known._replace(step=spent.next, looked=True)])

    def another_way(self, step: int, partition: str | None) -> int | None:
        """The new end of a run whose outputs were seen, if the ledger does not count this step yet; else None."""
        spent, plan = self.runs[self.run], self.plan
        if spent.looks is None:
            return None
        left = spent.looks.until - step
        if step == spent.next and ahead(plan, spent, step, left, partition) == ahead(plan, spent, step, left, None):
            return None
        return step + stop_rule.room(plan, self, step, partition)

    def promise(self, step: int, until: int) -> None:
        """Note the new next step and the new end of a run whose outputs were seen."""
        known = self.runs[self.run].looks
        if known is not None:
            self._append([known._replace(step=step, until=until)])

    def leaves_room(self, plan: Plan, next_step: int, partition: str | None = None) -> bool:
        """Whether what the ledger holds and one more step of a plan stay within its target and its Renyi filter.

        `Plan.allows` asks this for a plan that has one of them, and says what the arguments are.
        """
        return stop_rule.leaves_room(plan, self, next_step, partition)

    def mark(self) -> Mark:
        """How far the ledger is, for `require` later on."""
        with self.lock:
            return Mark(str(self.path.absolute()), self.run, len(self._chains) - 1, self._chains[-1].head.hex())

    def require(self, mark: Mark) -> None:
        """InputError, in one line, unless the ledger goes on from where it was at a mark."""
        have = len(self._chains) - 1
        if have < mark.lines:
            raise InputError(
                f"{self.path}: has {have} lines, but {mark.lines} were noted for this state; it is an "
                f"older copy or another ledger: restore the one that was {mark.path}"
            )
        if mark.lines < 1 or self._chains[mark.lines].head.hex() != mark.head or mark.run not in self.runs:
            raise InputError(
                f"{self.path}: its first {mark.lines} lines are not those that were noted for this state; "
                f"it is another ledger: give the one that was {mark.path}"
            )

    def close(self) -> None:
        """Close the file; nothing can be noted afterwards."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _step(self, step: int, key: str, batch: str, noise: float, rate: float, partition: str | None) -> Step:
        plan = self.plan
        entry = Step(self.run, step, key, batch, noise, rate, plan.sampling, partition, *plan.truncation)
        return ledger_format.checked(entry)

    def _require_unit(self, plan: Plan) -> None:
        stop_rule.one_unit(plan, (line.plan for lines in self.headers.values() for line in lines))

    def _append(self, entries: Sequence[Line]) -> None:
        """Write, make sure that it is on the disk, and only then count."""
        with self.lock:
            self._file.require_open()
            content, chains = b"", self._chains[-1:]
            for entry in entries:
                line, chain = ledger_format.encode(entry, chains[-1])
                content += line
                chains.append(chain)
            try:
                self._file.append(content)
                self._chains += chains[1:]
                for entry in entries:
                    self.count(entry)
            except BaseException:  # an interrupt as well: what is counted here may not be what is in the file
                self._file.give_up()
                raise

    def _catch_up(self, mend: bool) -> None:
        """Count every line; replace a last one that was cut off by what it counts as."""
        fragment, end = b"", 0
        for number, (line, chain, place) in enumerate(ledger_format.read(self._file.file, self.path), 1):
            if isinstance(line, bytes):
                fragment, end = line, place
                break
            if not isinstance(line, Run) and line.run not in self.runs:
                raise InputError(f"{self.path}: line {number} is of a run that never began; restore it from a copy")
            self._chains.append(chain)
            self._file.size = place
            self.count(line)
        if not self.runs:
            raise InputError(f"{self.path}: is empty; delete it, nothing was ever noted in it")
        torn = self.torn(fragment) if fragment and ledger_format.looks_like_a_step(fragment) else None
        if not mend:
            if torn is not None:
                self.count(torn)
            return
        if torn is not None:
            line, chain = ledger_format.encode(torn, self._chains[-1])
            self._file.replace_end(end, line)
            self._chains.append(chain)
            self.count(torn)
        elif fragment:
            self._file.cut(end)
        else:
            self._file.end_last_line()
