"""Ledger: an append-only record of what a run releases.  Each entry is on the disk before its release."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import stat
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Self

import numpy as np

from jaxacct.core.files import lock, reading, regular_file, rename_new, sync_folder, writing
from jaxacct.core.types import ArrayLike
from jaxacct.core.validation import InputError
from jaxacct.mechanisms import Mechanism, PureDP, batch_shape
from jaxacct.mechanisms.base import require_mechanism
from jaxacct.training.ledger import format as ledger_format
from jaxacct.training.ledger.contents import STOPPED_EARLY, Contents, ahead, one_unit, room
from jaxacct.training.ledger.format import Chain, Line, Run, Seen, Spend, Step
from jaxacct.training.plan import Plan
from jaxacct.training.plan.plan import require_plan


class Mark(NamedTuple):
    """State of a ledger: its path, its current run, the number of its lines, and the SHA-256 digest of all lines."""

    path: str
    run: str
    lines: int
    head: str


def _new_beside(place: Path, path: Path) -> tuple[Path, BinaryIO]:
    """Return (path, open file) of a new file beside `place` that only its owner can read.  Errors name `path`."""
    name = place.name.encode(errors="ignore")[:242].decode(errors="ignore")  # so `temporary` has at most 255 bytes
    temporary = place.with_name(f"{name}.{secrets.token_hex(4)}.tmp")
    with writing(path):
        descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o600)
    return temporary, os.fdopen(descriptor, "r+b")


class LedgerFile:
    """The file of an open ledger.  `hold` locks other writers out.  An entry is on the disk when `append` returns."""

    def __init__(self, path: Path, file: BinaryIO | None) -> None:
        self.path, self._file, self._process = path, file, os.getpid()
        self.size = 0

    @property
    def file(self) -> BinaryIO:
        """The open file.  If the file is closed, or was opened before a fork, reading this raises InputError."""
        if self._file is None:
            raise InputError(f"{self.path}: is not open for writing; use Ledger.open")
        if self._process != os.getpid():
            raise InputError(f"{self.path}: was opened by another process, of which this one is a fork; write there")
        return self._file

    @property
    def is_open(self) -> bool:
        return self._file is not None

    def hold(self) -> None:
        """Lock the file, if the system has file locks.  If another process is writing it, raise InputError."""
        try:
            lock(self.file, self.path, "wait for it, or stop it first")
        except InputError:
            self.close()
            raise
        if not self._is_there(self.file):  # another process replaced the file before this process locked it
            self.close()
            raise InputError(f"{self.path}: was replaced while it was being opened; open it again")

    def append(self, content: bytes) -> None:
        """Write bytes at the end of the file, and make sure that they are on the disk at the ledger's path."""
        file = self.file
        try:
            with writing(self.path):
                self._require_in_place(file, self.size)
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
                self._require_in_place(file, self.size + len(content))
        except InputError:
            with contextlib.suppress(OSError):
                self.close()
            raise
        self.size += len(content)

    def replace_end(self, end: int, content: bytes) -> None:
        """Replace all after the first `end` bytes by `content`, in a locked copy that then takes the file's place."""
        place, old = Path(os.path.realpath(self.path)), self.file
        temporary, new = _new_beside(place, self.path)
        try:
            with writing(self.path):
                with contextlib.suppress(OSError):  # chmod may fail on file systems without permissions
                    temporary.chmod(stat.S_IMODE(os.fstat(old.fileno()).st_mode))
                lock(new, temporary, "wait for it, or stop it first")
                old.seek(0)
                shutil.copyfileobj(old, new)
                new.seek(end)
                new.truncate()
                new.write(content)
                new.flush()
                os.fsync(new.fileno())
                if os.name != "posix":  # outside of POSIX an open file cannot be renamed, so both are closed
                    new.close()
                    old.close()
                os.replace(temporary, place)
                sync_folder(place)
        except BaseException:
            with contextlib.suppress(OSError):
                new.close()
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise
        old.close()
        self._file = place.open("r+b") if new.closed else new
        self._file.seek(0, os.SEEK_END)
        self.size = end + len(content)

    def end_last_line(self) -> None:
        """If a complete last line has no newline, write one there.  Only the next `append` syncs it to the disk."""
        file = self.file
        file.seek(0, os.SEEK_END)
        file.seek(-1, os.SEEK_END)
        if file.read(1) != b"\n":
            with writing(self.path):
                file.write(b"\n")
                file.flush()
            self.size += 1

    def close(self) -> None:
        """Close the file if it is open."""
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def _require_in_place(self, file: BinaryIO, size: int) -> None:
        """Raise InputError unless `file` is still the file at the ledger's path and has exactly `size` bytes."""
        if not self._is_there(file):
            raise InputError(f"{self.path}: was deleted or replaced while it was open; restore it from a copy")
        if os.fstat(file.fileno()).st_size != size:
            raise InputError(f"{self.path}: was changed by something else while it was open; restore it from a copy")

    def _is_there(self, file: BinaryIO) -> bool:
        """Return whether `file` is still the file at the ledger's path."""
        try:
            return os.path.samestat(os.fstat(file.fileno()), os.stat(self.path))
        except FileNotFoundError:
            return False


class Ledger(Contents):
    """Record of what one or several runs have spent.  The file has one JSON line for each release.

    `record` puts the line of a step on the disk before the step's noisy sum is used, so a crash can only make the
    ledger overstate the spending.  A step's line that a crash cuts off counts as the costliest that it can have been.
    If the crash cut off the run's name, too, the line counts for each run that it may belong to.

    Steps whose entries agree in every field are exact replays and count once.  A repeated step whose entry differs
    counts again.  So equal fingerprints must mean outputs equal to the last bit: a repeated step whose output can
    differ needs a new key.

    Call `seen` before you look at outputs that may make you end a run early.  From then on `spent` and `epsilon` count
    all steps that the plan and its target allow.

    Only one process can write at a time.  A damaged line, other than a last one that was cut off, raises InputError.

    Make ledgers by `Ledger.create`, `Ledger.open` and `Ledger.read`.  `run` is the name of the current run.  `runs`
    maps names of runs to their spending, `headers` to the list of their `Run` entries, one for each plan followed.

    Parameters
    ----------
    path : the path of the ledger.
    file : the open file, or None for a ledger that cannot be written.

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
        # held while a thread sets `run` and writes an entry, so that no other thread changes `run` in between
        self.lock = threading.RLock()
        self._chains = [ledger_format.BEGINNING]  # item i holds the checksums of the first i lines

    @classmethod
    def create(cls, path: str | os.PathLike[str], plan: Plan, run: str | None = None, by: str = "") -> Ledger:
        """Create a ledger for a run, in a file that only its owner can read; raise InputError if the path is taken.

        run : the name of the run, by default a random name.  by : the name of the person who trains.
        """
        return cls.begun(path, lambda ledger: ledger.begin(plan, run, by))

    @classmethod
    def begun(cls, path: str | os.PathLike[str], write: Callable[[Ledger], Any]) -> Ledger:
        """Create a ledger whose first lines are those that `write` writes; if `write` raises, there is no ledger."""
        place = Path(path)
        taken = InputError(f"{place}: is there already; use Ledger.open to go on with it, or another name")
        if os.path.lexists(place):
            raise taken
        # the file has a temporary name until its first lines are on the disk, so a file at `path` always has them
        temporary, file = _new_beside(place, place)
        ledger = cls(place, file)
        try:
            with writing(place):
                ledger._file.path = temporary
                ledger._file.hold()
                write(ledger)
                try:
                    rename_new(temporary, place)
                except FileExistsError:
                    raise taken from None
                ledger._file.path = place
        except BaseException:
            ledger.close()
            temporary.unlink(missing_ok=True)
            raise
        sync_folder(place)
        return ledger

    @classmethod
    def open(cls, path: str | os.PathLike[str], run: str | None = None) -> Ledger:
        """Open a ledger to continue the run named `run`, by default the run that began or was replanned last."""
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
        """Open a ledger for reading only.  Another process may write to the ledger at the same time."""
        place = regular_file("ledger", path)
        with reading(place), place.open("rb") as file:
            ledger = cls(place, file)
            ledger._catch_up(mend=False)
        ledger.close()
        return ledger

    @property
    def is_open(self) -> bool:
        """Whether the ledger is open for writing."""
        return self._file.is_open

    def begin(
        self, plan: Plan, run: str | None = None, by: str = "", spent: Mechanism | None = None, note: str = ""
    ) -> str:
        """Begin another run, make it the current run and return its name.  The unit must be that of the ledger.

        spent, note : what the run has spent before it came into the ledger, as for `spend`, in the same write.
        """
        name = secrets.token_hex(8) if run is None else ledger_format.words("run", run)
        if name in self.runs:
            raise InputError(f"run = {name!r} is in the ledger already; give another name, or open it")
        self._require_unit(plan)
        before = [] if spent is None else [Spend(name, spent, ledger_format.words("note", note))]
        self._append([Run(name, ledger_format.words("by", by), plan), *before])
        return name

    def replan(self, plan: Plan) -> None:
        """Continue the current run with another plan.  If steps share noise, keep strategy, groups and batch size."""
        self._require_unit(plan)
        if self.runs[self.run].numbers:
            plan.require_noise_of(self.plan)
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
        """Write an entry for a step to the disk; release the step's noisy sum only afterwards.

        Parameters
        ----------
        step : the number of the step, from 0.
        key_fingerprint, batch_fingerprint : texts that identify the step's key and batch.  Steps with equal texts must
            have results that are equal to the last bit.
        noise_multiplier, sampling_probability : those of this step.
        partition : a text that identifies how this pass divides the data (fixed batches), the slots that the records
            drew (random allocation), the pass through the groups (cyclic Poisson sampling), or the run (fixed order).
            Steps with the same text must have disjoint batches, except with a fixed order.  Together they cost as much
            as the costliest of them or, with random allocation, as one round.  If the batch rule has passes or rounds,
            a step with None costs as much as a Gaussian release of all records.
        """
        numbers = noise_multiplier, sampling_probability
        self._append([self.step_entry(step, key_fingerprint, batch_fingerprint, *numbers, partition)])

    def record_many(
        self,
        steps: Sequence[int],
        key_fingerprints: Sequence[str],
        batch_fingerprints: Sequence[str],
        noise_multiplier: ArrayLike,
        sampling_probability: ArrayLike,
        partitions: Sequence[str | None] | None = None,
    ) -> None:
        """Write entries of several steps before their releases; noise and rate are one number, or one for each step."""
        count = len(steps)
        noise, rate = (np.broadcast_to(x, count).tolist() for x in (noise_multiplier, sampling_probability))
        columns = (steps, key_fingerprints, batch_fingerprints, noise, rate, partitions or [None] * count)
        if {len(column) for column in columns} != {count}:
            raise InputError(f"record_many needs {count} fingerprints of each kind, one per step; give them all")
        self._append([self.step_entry(*row) for row in zip(*columns, strict=True)])

    def step_entry(self, step: int, key: str, batch: str, noise: float, rate: float, partition: str | None) -> Step:
        """Return the entry of a step of the current run; raise InputError if a value is invalid."""
        sizes = *self.plan.truncation, self.plan.groups or 0
        entry = Step(self.run, step, key, batch, noise, rate, self.plan.sampling, partition, *sizes)
        return ledger_format.checked(entry)

    def spend(self, mechanism: Mechanism, note: str = "") -> None:
        """Write an entry for a release other than a training step.  Make the release only when `spend` has returned."""
        require_mechanism("mechanism", mechanism)
        if batch_shape(mechanism):
            raise InputError(f"mechanism of shape {batch_shape(mechanism)} must be one configuration; note one by one")
        self._append([Spend(self.run, mechanism, ledger_format.words("note", note))])

    def seen(self, step: int, looked: bool = True) -> None:
        """Write that outputs are about to be seen after `step` steps; show them only when `seen` has returned.

        From then on all steps that the plan and its target allow count as spent, even if the run ends earlier.

        looked : True if a callback asks for the outputs, False if something else, such as an error, ended the run.
            If the plan is then replaced, its untaken steps still count only if `looked` is True.
        """
        with self.lock:
            self._append(self._to_be_seen(step, looked))

    def ended_early(self, step: int) -> None:
        """Write that the early-stop rule ended the current run after `step` steps, and what `seen` writes."""
        with self.lock:
            entries = self._to_be_seen(step, looked=True)
            if self.runs[self.run].ended is None:
                entries.append(Spend(self.run, PureDP(0.0), f"{STOPPED_EARLY}{step}"))
            self._append(entries)

    def _to_be_seen(self, step: int, looked: bool) -> list[Line]:
        """Return a list with the entry that `seen(step, looked)` must write; [] if the ledger has it already."""
        spent = self.runs[self.run]
        # a resumed run repeats steps that have entries, so `step` may be below the next new step `spent.next`
        known, step = spent.looks, max(int(step), spent.next)
        if known is None:
            until = step + room(self.plan, self, step) if step < self.plan.steps else self.plan.steps
            return [ledger_format.checked_seen(Seen(self.run, step, until, looked))]
        return [known._replace(step=spent.next, looked=True)] if looked and not known.looked else []

    def another_way(self, step: int, partition: str | None) -> int | None:
        """Return the end to promise (see `promise`) after an entry of `step`; None if it stays or no outputs were seen.

        The end changes if `step` is not the run's next step, if it is not before the old end, or if its pass or round,
        with the fingerprint `partition`, changes the cost of the steps ahead.
        """
        spent, plan = self.runs[self.run], self.plan
        if spent.looks is None:
            return None
        left = spent.looks.until - step
        expected = step == spent.next and left >= 1
        if expected and ahead(plan, spent, step, left, partition) == ahead(plan, spent, step, left, None):
            return None
        return step + room(plan, self, step, partition)

    def promise_anew(self) -> None:
        """Compute the promised end of the current run again (see `promise`), and write it if it has changed.

        The end rises if the entries of all runs leave room for more steps.  It falls only if the run's own entries
        leave less room, as after a crash before the new end was written: other runs never lower it.
        """
        run, plan = self.run, self.plan
        spent = self.runs[run]
        if spent.looks is None or not self.headers[run][-1].told or spent.next >= plan.steps:
            return
        alone = Contents(self.path)
        alone.run, alone.runs, alone.headers = run, {run: spent}, {run: self.headers[run]}
        least, most = (spent.next + room(plan, ledger, spent.next) for ledger in (self, alone))
        until = min(max(spent.looks.until, least), most)
        if until != spent.looks.until:
            self.promise(spent.next, until)

    def promise(self, step: int, until: int) -> None:
        """If outputs of the run were seen, write its next `step` and promised end: all steps before `until` count."""
        known = self.runs[self.run].looks
        if known is not None:
            self._append([known._replace(step=step, until=until)])

    def mark(self) -> Mark:
        """Return the present state of the ledger, for `require`."""
        with self.lock:
            return Mark(str(self.path.absolute()), self.run, len(self._chains) - 1, self._chains[-1].head.hex())

    def require(self, mark: Mark) -> None:
        """Raise InputError unless the ledger begins with the lines that it had when the mark was taken."""
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
        """Close the file.  Afterwards no entry can be written."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _require_unit(self, plan: Plan) -> None:
        require_plan(plan)
        one_unit(plan, (line.plan for lines in self.headers.values() for line in lines))

    def _append(self, entries: Sequence[Line]) -> None:
        """Write entries to the disk, and then count what they spend."""
        if not entries:
            return
        with self.lock:
            content, chains = self._encoded(entries)
            try:
                self._file.append(content)
                self._chains += chains
                for entry in entries:
                    self.count(entry)
            except BaseException:  # the counts may now differ from the file, so close the file
                with contextlib.suppress(OSError):
                    self._file.close()
                raise

    def _encoded(self, entries: Sequence[Line]) -> tuple[bytes, list[Chain]]:
        """Return the next lines of the file as bytes, and the checksums after each of them."""
        content, chains = b"", self._chains[-1:]
        for entry in entries:
            line, chain = ledger_format.encode(entry, chains[-1])
            content += line
            chains.append(chain)
        return content, chains[1:]

    def _catch_up(self, mend: bool) -> None:
        """Count all lines of the file.  A step that a crash cut off counts as `Torn`.  `mend` repairs the last line."""
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
            raise InputError(
                f"{self.path}: is empty; restore it from a copy, or give another path if nothing was ever noted in it"
            )
        if fragment and ledger_format.looks_like_a_step(fragment):
            torn = self.torn(fragment)
            if mend:
                content, chains = self._encoded(torn)
                self._file.replace_end(end, content)
                self._chains += chains
            for one in torn:
                self.count(one)
        elif mend and fragment:
            self._file.file.truncate(end)
            self._file.file.seek(end)
        elif mend:
            self._file.end_last_line()
