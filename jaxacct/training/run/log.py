"""Logs a run's steps with the epsilon so far, and shows a progress line (README.md, "The log")."""

from __future__ import annotations

import bisect
import contextlib
import datetime
import json
import math
import os
import re
import stat
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxacct.core import progress
from jaxacct.core.files import writing
from jaxacct.core.progress import Progress
from jaxacct.core.text import outward
from jaxacct.core.validation import InputError
from jaxacct.mechanisms import Mechanism
from jaxacct.training.ledger import Ledger
from jaxacct.training.ledger.contents import Spent, added, claim, counted
from jaxacct.training.ledger.format import Run
from jaxacct.training.plan import Plan
from jaxacct.training.plan.plan import MANY_KINDS
from jaxacct.training.plan.segments import even_steps
from jaxacct.training.plan.solver import epsilon_of_several
from jaxacct.training.run.state import State, Stretch, epsilon_of, released
from jaxacct.training.step.key_derivation import digest
from jaxacct.training.step.step_function import Observed
from jaxacct.training.step.step_mechanisms import BY_PASS, Release

Held = list[tuple[Spent, list[Run]]]
"""Spending that counts against a plan: for each run, its spending and its `run` lines.  The current run is first."""
PAUSES = (0.2, 10.0)
"""Shortest and longest time between two updates of the progress line, in seconds."""
_FIRST = b'{"event": "begin"'
Log = Callable[[dict[str, Any]], Any] | str | os.PathLike[str] | None
"""Destination of a log: a function that gets each record, the path of a file of JSON lines, or None."""
MOST_PENDING = 8
"""Largest number of logged steps that may still be running; if there are more, the host waits for the oldest."""
MOST_HELD = 32
"""Largest number of finished steps whose numbers stay on the device; if there are more, all are fetched and put out."""
PAUSE_SECONDS = 1.0
"""Number of seconds that log records are held back, so that several are handed over together."""
WAIT_SECONDS = 5.0
"""Longest time, in seconds, that a log record waits until a thread has computed the table of epsilon by step."""


@dataclass(slots=True)
class _Look:
    """One logged step.  A field that is set is not computed again after an interrupt."""

    step: int
    observed: Observed  # the numbers of the step, on the device
    point: TablePoint | None  # where to look up epsilon; None if no table covers all releases so far
    when: float | None = None  # the time at which the step was found to be done, in seconds
    rate: float | None = None  # steps per second, averaged over the last logged steps up to this one
    record: dict[str, Any] | None = None  # the log record without epsilon; None until the numbers are fetched


class RunLog:
    """Log of one `fit`: of every step that is a multiple of `every`, and the plan's last.  Call `begin` first."""

    def __init__(self, put: Callable[[dict[str, Any]], Any] | None, file: LogFile | None, every: int, run: str) -> None:
        self._put, self._file, self._every, self._run = put, file, every, run
        self.epsilon: EpsilonSoFar | None = None
        self._last = 0
        self._looks: deque[_Look] = deque()
        self._recent: deque[tuple[int, float]] = deque(maxlen=32)  # the last logged steps and their times, for `rate`
        self._begin = self._told = time.monotonic()
        self.ending: dict[str, Any] = {}

    @property
    def shows(self) -> bool:
        """Whether a log shows outputs, such as a private loss, while the run goes on."""
        return self._put is not None

    def begin(self, plan: Plan, state: State, ledger: Ledger | None) -> None:
        """Begin the log of the steps of `plan` after `state`.  With a ledger, epsilon covers all its runs."""
        self.epsilon, self._last = EpsilonSoFar(plan, state.step, state.history.stretches, ledger), plan.steps
        if self._file is not None:
            record = {"event": "begin", "run": self._run, "step": state.step, "resumed": state.step > 0}
            record |= {"again_until": self._file.there} if self._file.there > state.step else {}
            now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
            self.tell(record | {"time": now, "steps": plan.steps, "log_every": self._every})

    def look(self, step: int, observed: Observed, stretches: tuple[Stretch, ...]) -> None:
        """Log the numbers of a step, which may still run on the device.  Do nothing for a step that is not logged."""
        if self._put is None or self.epsilon is None or (step % self._every and step != self._last):
            return
        self._looks.append(_Look(step, observed, self.epsilon.point(step, stretches)))
        self._see_done(MOST_PENDING)
        held = sum(look.when is not None for look in self._unread())
        now = time.monotonic()
        if held >= MOST_HELD or now - self._told >= PAUSE_SECONDS:
            self._told = now
            self._fetch()
            self._tell(self.epsilon)

    def evaluated(self, step: int, value: Any) -> None:
        """Log the value of an evaluation after `step` steps, behind the records of these steps."""
        if self._put is None or self.epsilon is None:
            return
        self._see_done(0)
        self._fetch()
        self._tell(self.epsilon, everything=True)
        self.tell({"event": "evaluation", "run": self._run, "step": step, "value": value})

    def returned(self, state: State) -> State:
        """Store how the run ended, for the last line of the log file.  Return `state`."""
        self.ending = {"step": state.step, "ended": state.stopped}
        if self._put is not None and self._file is not None and self.epsilon is not None:
            with contextlib.suppress(Exception):  # an error is dropped here, since `state.epsilon` raises it, too
                found = state.epsilon
                ends = {"lower": float(found.lower), "upper": float(found.upper), "delta": state.plan.target_delta}
                self.ending["epsilon"] = ends | {"kind": found.kind, "covers": self.epsilon.covers}
        return state

    def close(self) -> None:
        """Log the remaining records; drop records that cannot be fetched, for example after the device failed."""
        if self._put is None or self.epsilon is None:
            return
        with contextlib.suppress(Exception):
            self._see_done(0)
        with contextlib.suppress(Exception):
            self._fetch()
        self._tell(self.epsilon, everything=True)
        if self._file is not None:
            self.tell({"event": "end", "run": self._run} | self.ending)

    def tell(self, record: dict[str, Any]) -> None:
        """Hand a record to the log's function or file.  If this call fails, the run goes on without a log."""
        try:
            if self._put is not None:
                self._put(record)
        except Exception as error:
            self._put = None
            words = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            progress.say(f"jaxacct: log raised {words}; training goes on without it")

    def _unread(self) -> list[_Look]:
        """Return the logged steps whose numbers are not fetched yet.  They are the latest logged steps."""
        return [look for look in self._looks if look.record is None]

    def _see_done(self, most: int) -> None:
        """Set `when` and `rate` of the steps that are done, in order; wait while more than `most` still run."""
        waiting = [look for look in self._unread() if look.when is None]
        for place, look in enumerate(waiting):
            if not look.observed.members.is_ready():  # a step's numbers are ready together: one program makes them
                if len(waiting) - place <= most:
                    break
                jax.block_until_ready(look.observed)
            now = time.monotonic()
            self._recent.append((look.step, now))
            first, since = self._recent[0]
            look.rate = (look.step - first) / (now - since) if now > since else None
            look.when = now

    def _fetch(self) -> None:
        """Fetch the numbers of all steps that are done, by copies that overlap, and make the steps' records."""
        done = [look for look in self._unread() if look.when is not None]
        for leaf in jax.tree_util.tree_leaves([look.observed for look in done]):
            leaf.copy_to_host_async()
        for look in done:
            assert look.when is not None
            observed = jax.device_get(look.observed)
            told = numbers_of(observed) | {"seconds": look.when - self._begin, "steps_per_second": look.rate}
            record = {"event": "step", "run": self._run, "step": look.step, "not_private": told}
            if observed.value is not None:
                record["private"] = {"loss": np.asarray(observed.value).item()}
            look.record = record

    def _tell(self, epsilon: EpsilonSoFar, everything: bool = False) -> None:
        """Hand over fetched records in order; if `everything`, return only when all are handed over.

        A record is kept back until its table is ready, but at most `WAIT_SECONDS` after its step was found to be done.
        """
        while self._looks and self._looks[0].record is not None:
            look = self._looks[0]
            assert look.when is not None and look.record is not None
            if look.point is not None and not look.point.table.ready:
                left = WAIT_SECONDS - (time.monotonic() - look.when)
                if everything:
                    look.point.table.wait(max(left, 0.0))
                elif left > 0.0:
                    break
            record = look.record | {"epsilon": epsilon.told(look.point)}
            # after an interrupt a function must not get a record twice; a file may, since `LogFile.write` skips it
            if self._file is None:
                self._looks.popleft()
            self.tell(record)
            if self._file is not None:
                self._looks.popleft()


@contextlib.contextmanager
def run_log(log: Log, every: int, state: State) -> Iterator[RunLog]:
    """Yield the log of a `fit` that begins at `state`.  On exit, even by an error, hand over the remaining records."""
    run = digest(b"run", state.lineage.root.key).hex()[:16]  # the name that the run also has in a ledger
    with contextlib.ExitStack() as stack:
        file = None if log is None or callable(log) else stack.enter_context(contextlib.closing(LogFile(log, run)))
        found = RunLog(log if callable(log) else None if file is None else file.write, file, every, run)
        stack.callback(found.close)
        try:
            yield found
        except BaseException as error:
            found.ending = {"ended": type(error).__name__}
            raise


def checked_log(log: Any, ledger: Any = None) -> Log:
    """Return `log` if it is None, a function or a path.  Refuse anything else, and the path of the ledger."""
    if log is None or callable(log):
        return log
    if not isinstance(log, str | os.PathLike):
        raise InputError(f"log = {log!r:.40} must be a function of one record, or the path of a file of JSON lines")
    other = ledger.path if isinstance(ledger, Ledger) else ledger
    if isinstance(other, str | os.PathLike) and os.path.realpath(log) == os.path.realpath(other):
        raise InputError(f"log and ledger are both {os.fspath(log)!r}; give each a file of its own")
    return log


def numbers_of(observed: Observed) -> dict[str, Any]:
    """Return the numbers of a finished step that carry no noise.  A mean is None if no gradient was finite."""
    members, clipped, not_finite = (int(x) for x in (observed.members, observed.clipped, observed.not_finite))
    each = members - not_finite
    mean = lambda total: (np.asarray(total, np.float64) / each).tolist() if each else None
    found = {"loss": mean(observed.loss), "clipped_share": clipped / each if each else None}
    found |= {"not_finite": not_finite, "members": members}
    leaves = jax.tree_util.tree_flatten_with_path(observed.aux)[0]
    aux = {jax.tree_util.keystr(path, simple=True, separator="/") or "aux": mean(leaf) for path, leaf in leaves}
    return found | ({"aux": aux} if aux else {})


class LogFile:
    """File of JSON lines, open for appending.  Only its owner may read it, since most of its numbers carry no noise."""

    def __init__(self, path: str | os.PathLike[str], run: str) -> None:
        place = Path(path)
        with writing(place):
            descriptor = os.open(place, os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_BINARY", 0), 0o600)
            self._file = os.fdopen(descriptor, "r+b", buffering=0)
        try:
            with writing(place):
                self._file.seek(0)  # raises an error for a pipe, which cannot be read again
                start = self._file.read(len(_FIRST))
                if start and not start == _FIRST[: len(start)]:
                    raise InputError(f"{place}: is there already and is no log of a training; give another path as log")
                _make_private(descriptor)
                self.there, end = self._last_step(run)
                if end < self._file.seek(0, os.SEEK_END):
                    self._file.truncate(end)  # drop a last line that a killed process left incomplete
                self._last: tuple[Any, int] = None, self._file.seek(0, os.SEEK_END)  # last record, start of its line
        except BaseException:
            self._file.close()
            raise

    def write(self, record: dict[str, Any]) -> None:
        """Write a record as one line.  Skip the last record if it comes again, as it may after an interrupt."""
        key, place = (record["event"], record.get("step")), self._file.tell()
        if key == self._last[0] and place != self._last[1]:
            return
        if record["event"] in ("step", "evaluation") and record["step"] <= self.there:
            record = record | {"again": True}
        text = json.dumps(_finite(record), allow_nan=False).encode() + b"\n"
        self._last = key, place
        while text:
            text = text[self._file.write(text) :]

    def close(self) -> None:
        self._file.close()

    def _last_step(self, run: str) -> tuple[int, int]:
        """Return a run's largest step number in the file (0 if none), and the byte where the last whole line ends."""
        pattern = re.compile(rb'\{"event": "step", "run": "' + re.escape(run.encode()) + rb'", "step": (\d+)[,}]')
        step = end = 0
        self._file.seek(0)
        with open(os.dup(self._file.fileno()), "rb") as lines:
            for line in lines:
                if not line.endswith(b"\n"):
                    break
                end += len(line)
                if match := pattern.match(line):
                    step = max(step, int(match[1]))
        return step, end


def _make_private(descriptor: int) -> None:
    """Make an existing regular file private to its owner.  Leave devices, such as /dev/null, as they are."""
    mode = os.fstat(descriptor).st_mode
    if os.name == "posix" and stat.S_ISREG(mode) and mode & 0o077:
        os.fchmod(descriptor, 0o600)


def _finite(node: Any) -> Any:
    """Return a document with None in place of infinities and NaN, for which JSON has no number."""
    if isinstance(node, dict):
        return {name: _finite(value) for name, value in node.items()}
    if isinstance(node, list | tuple):
        return [_finite(value) for value in node]
    return None if isinstance(node, float) and not math.isfinite(node) else node


class ProgressLine:
    """Progress line on standard error. It shows an upper bound of epsilon once a thread has computed the table."""

    def __init__(self, epsilon: EpsilonSoFar, there: int, show: bool | None) -> None:
        self._epsilon, self._asked = epsilon, False
        self._progress = Progress(epsilon.plan.steps, show, there, "steps", PAUSES)

    def update(self, step: int, device: Any, stretches: tuple[Stretch, ...]) -> None:
        """Show that `step` steps are done, as soon as the last of them has computed the array ``device``."""
        if self._progress.due(step):
            jax.block_until_ready(device)
            self._progress.update(step, self._told(step, stretches))

    def _told(self, step: int, stretches: tuple[Stretch, ...]) -> str:
        """Return the text about epsilon after `step` steps; "" until a thread, started here, has a table."""
        plan = self._epsilon.plan
        if step == plan.steps and not self._asked:
            return ""  # the table would come too late
        self._asked, point = True, self._epsilon.point(step, stretches)
        upper = None if point is None else point.table.upper(point.step)
        return "" if upper is None else f"  {epsilon_of(plan)} <= {outward(upper, '.3g', up=True)}"

    def close(self) -> None:
        """End the updates.  The line stays as it is."""
        self._progress.close()


class _Table:
    """Upper bounds of epsilon by step, from a thread.  They cover `held`, and the steps of `plan` from `first` on."""

    def __init__(self, plan: Plan, first: int = 0, held: Held | None = None) -> None:
        self._plan, self._first, self._held = plan, first, held
        self._before = added(spent for spent, _ in held or [])[0]
        self._uppers: tuple[list[int], list[float]] = [], []  # (steps, upper bounds); other threads read this pair
        self._thread: threading.Thread | None = None

    def at(self, step: int) -> TablePoint:
        """Return the point of the table after `step` steps.  The first call starts the thread that fills the table."""
        if self._thread is None:
            # not a daemon thread: the interpreter waits for it at exit, so that the exit cuts off no compilation
            self._thread = threading.Thread(target=self._compute, name="epsilon of the log")
            self._thread.start()
        return TablePoint(self, step)

    @property
    def ready(self) -> bool:
        """Whether the computation of the table has ended."""
        return self._thread is not None and not self._thread.is_alive()

    def wait(self, seconds: float) -> None:
        """Wait until the computation of the table has ended, but for at most `seconds` seconds."""
        if self._thread is not None:
            self._thread.join(seconds)

    def planned(self, step: int) -> Counter[Release]:
        """Return the releases that the bound after `step` steps covers."""
        return self._before + self._plan.releases_between(self._first, step)

    def upper(self, step: int) -> float | None:
        """Return the upper bound of epsilon after `step` steps; None if the table is not computed."""
        steps, uppers = self._uppers
        return uppers[bisect.bisect_left(steps, step)] if steps else None

    def _compute(self) -> None:
        with contextlib.suppress(Exception):  # an error is dropped here, since `state.epsilon` raises it, too
            plan = self._plan
            if self._held is not None:  # a table of only 16 steps, since each of its bounds needs its own accounting
                (own, headers), *others = self._held
                uppers = []
                for step in even_steps(self._first, plan.steps, 16).tolist():
                    spent = replace(own, releases=own.releases + plan.releases_between(self._first, step))
                    runs = [(spent, [*headers, Run("", "", plan)]), *others]
                    uppers.append((step, float(claim(runs, plan.target_delta, plan.relation).upper)))
                self._put(uppers)
                return
            curve = [(step, float(plan.live_epsilon(step).upper)) for step in even_steps(0, plan.steps, 64).tolist()]
            self._put(curve)
            if plan.filter is not None or plan.sampling in BY_PASS or len(plan.whole) > MANY_KINDS:
                return
            # `curve` has one entry per `apart` steps.  Early in the run, add entries at steps that grow by about 10 %.
            steps, step, apart = [], 1, plan.steps / 64
            while 0.1 * step < apart and apart > 1.0:
                steps.append(step)
                step = max(step + 1, int(1.1 * step))
            if steps:
                found = epsilon_of_several(plan, [plan.releases_after(step) for step in steps], 0.01)
                self._put([*curve, *zip(steps, found.upper.tolist(), strict=True)])

    def _put(self, found: list[tuple[int, float]]) -> None:
        """Fill the table from pairs (step, bound).  A later step's bound holds, too: each step gets the least."""
        found = sorted(found)
        least = np.minimum.accumulate([upper for _, upper in found[::-1]])[::-1]
        self._uppers = [step for step, _ in found], least.tolist()


class TablePoint(NamedTuple):
    """A table of epsilon, and a step in it.  The table's bound at this step covers all releases so far."""

    table: _Table
    step: int


class EpsilonSoFar:
    """Upper bounds of epsilon during one `fit`: bounds of a table at steps where they cover all releases so far."""

    def __init__(self, plan: Plan, step: int, stretches: tuple[Stretch, ...], ledger: Ledger | None) -> None:
        self.plan, self._ledger = plan, ledger
        self._own: Counter[Mechanism] = Counter([] if plan.early_stop is None else [plan.early_stop.mechanism])
        held = [
            (replace(spent, releases=Counter(spent.releases), others=Counter(spent.others)), list(headers))
            for spent, headers in self._held(stretches)
        ]
        self._others = added(spent for spent, _ in held)[1]
        filters = {line.plan.filter for _, headers in held for line in headers} | {plan.filter}
        alone = len(filters) == 1 and (plan.filter is None or len(held) == 1)
        self._of_plan = alone and self._others == self._own
        self._tables = [*([_Table(plan)] if self._of_plan else []), _Table(plan, step, held)]

    def point(self, step: int, stretches: tuple[Stretch, ...]) -> TablePoint | None:
        """Return a table's first point, from `step` on, that covers all releases so far; None if none does."""
        # In the usual case the run has taken the first `end` steps of this plan, so releases need not be counted.
        if self._ledger is None and self._of_plan and len(stretches) == 1:
            plan, first, end, _ = stretches[0]
            if plan is self.plan and first == 0:
                return self._tables[0].at(end)
        spent, others = added(one for one, _ in self._held(stretches))
        last = self.plan.steps
        for table in self._tables if others == self._others else []:
            holds = lambda end, table=table: spent <= table.planned(end)
            if holds(step):
                return table.at(step)
            if holds(last):
                return table.at(step + bisect.bisect_left(range(step, last), True, key=holds))
        return None

    def told(self, point: TablePoint | None) -> dict[str, Any]:
        """Return the entry `epsilon` of a log record.  If there is no upper bound, the entry says why."""
        upper, why = None, "more was released than a table has"
        if point is not None:
            upper, why = point.table.upper(point.step), "the table could not be computed, or not in time"
        known = upper is not None and math.isfinite(upper)
        found = {"upper": upper if known else None, "delta": self.plan.target_delta, "kind": "bound"}
        return found | {"covers": self.covers} | ({} if known else {"why": f"{why}; see state.epsilon"})

    @property
    def covers(self) -> str:
        """The words by which a log record names the runs that its epsilon covers."""
        if self.plan.repetitions is not None:
            return "this run of the tuning"
        return "this run" if self._ledger is None else "all runs of the ledger"

    def _held(self, stretches: tuple[Stretch, ...]) -> Held:
        ledger = self._ledger
        if ledger is None:
            return [(Spent(released(stretches), self._own), [Run("", "", one.plan) for one in stretches])]
        names = [name for name in counted(self.plan, ledger) if name != ledger.run]
        others = [(ledger.counting(name), ledger.headers[name]) for name in names]
        own = ledger.runs[ledger.run]
        own = replace(own, releases=own.releases + own.owed) if own.owed else own
        return [(own, ledger.headers[ledger.run]), *others]
