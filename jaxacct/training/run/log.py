"""What is shown of a run while it goes on: the log of its steps, epsilon beside them, and the progress line.

Nothing waits for the device: the numbers of a step are fetched once it is done, as a rule while the next ones are being
computed.  They are told together, once a second: what a step computes has driven the log's own code and data out of the
caches, so that a record by itself takes several times as long.  What the log's reader does with them is outside the
guarantee, since most of them are not private.  Reasons: jaxacct/training/run/README.md, "The log".
"""

from __future__ import annotations

import bisect
import contextlib
import datetime
import functools
import json
import math
import os
import re
import stat
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxacct.core import progress
from jaxacct.core.files import unwritable
from jaxacct.core.progress import Progress
from jaxacct.core.text import outward
from jaxacct.core.validation import InputError
from jaxacct.mechanisms import Mechanism
from jaxacct.training.ledger import Ledger
from jaxacct.training.ledger.contents import Spent, claim, counted
from jaxacct.training.ledger.format import Run
from jaxacct.training.plan import Plan
from jaxacct.training.plan.plan import MANY_KINDS
from jaxacct.training.plan.solver import epsilon_of_several
from jaxacct.training.run.state import State, Stretch, released
from jaxacct.training.step.key_derivation import digest
from jaxacct.training.step.step_function import Observed
from jaxacct.training.step.step_mechanisms import BY_PASS, Release

__all__ = ["EpsilonSoFar", "Live", "Log", "RunLog", "checked_log", "run_log"]

POINTS = 16
"""Places of a table that is made for one run.  Each is a claim of its own; those of a plan are made in two calls."""
EVEN_PLACES = 64
"""Places of the plan's own table."""
APART = 1.1
"""Factor between two places early in a plan, where the plan's own table, evenly spaced, has few."""
EARLY_RTOL = 0.01
"""Relative width of the brackets there, of which upper ends are used."""
Held = list[tuple[Spent, list[Run]]]
"""What counts against a plan: for each run what it has spent, and its plans; the current one comes first."""
PAUSES = (0.2, 10.0)
"""Seconds between two updates; each waits for the step to be done, so that the rate is one of steps done."""
_FIRST = b'{"event": "begin"'
"""How a log begins."""
_PIECE = 2**16
"""Bytes of a file that are read at a time, from its end, to find its last whole line."""
Log = Callable[[dict[str, Any]], Any] | str | os.PathLike[str] | None
"""Where a log goes: a function of one record, the path of a file of JSON lines, or nowhere."""
MOST_PENDING = 8
"""Looks whose steps may still be under way: with more the host waits for the oldest, and the device has work left."""
MOST_HELD = 32
"""Looks whose steps are done and whose numbers are still on the device: with more they are fetched and told."""
PAUSE_SECONDS = 1.0
"""How long what is there is held, so that it is told together."""
WINDOW = 32
"""Looks over which the rate is taken."""
WAIT_SECONDS = 5.0
"""How long a record waits for the table of epsilon; later ones find it there."""
WORDS = 200
"""Characters of an error's message that are told."""


class _Look(NamedTuple):
    """Numbers of a step, on the device or on their way; place: where a table of epsilon has what was released."""

    step: int
    observed: Observed
    place: Place | None


class _Done(NamedTuple):
    """A look whose step is done, when that was seen, and how many steps a second were being taken."""

    look: _Look
    when: float
    rate: float | None


class RunLog:
    """Takes the looks of one `fit`, and tells them in their order; `begin` comes first.

    Parameters
    ----------
    put : is given each record; None where nothing is asked for.
    file : what `put` writes to, if it does; it is told how the `fit` begins and ends as well.
    every : looks are at every so manieth step, and at the last one of the plan.
    run : what the run is called.
    """

    def __init__(self, put: Callable[[dict[str, Any]], Any] | None, file: LogFile | None, every: int, run: str) -> None:
        self._put, self._file, self._every, self._run = put, file, every, run
        self._epsilon: EpsilonSoFar | None = None
        self._last = 0
        self._pending: deque[_Look] = deque()
        self._held: deque[_Done] = deque()
        self._fetched: deque[tuple[float, Place | None, dict[str, Any]]] = deque()
        self._recent: deque[tuple[int, float]] = deque(maxlen=WINDOW)
        self._begin = self._told = time.monotonic()
        self.ending: dict[str, Any] = {}

    @property
    def shows(self) -> bool:
        """Whether outputs, such as a private loss, are logged while the run goes on."""
        return self._put is not None

    def begin(self, plan: Plan, state: State, ledger: Ledger | None) -> None:
        """Steps are about to be taken, from a state on, by a plan; ledger : what holds all else, or None."""
        if self._put is None:
            return
        self._epsilon, self._last = EpsilonSoFar(plan, state.step, state.history.stretches, ledger), plan.steps
        if self._file is not None:
            self.tell(self._file.beginning(self._run, state.step) | {"steps": plan.steps, "log_every": self._every})
            self._flush()

    def look(self, step: int, observed: Observed, stretches: tuple[Stretch, ...]) -> None:
        """So many steps have been handed to the device, the last of which has these numbers.

        stretches : of what has been released until then, where no ledger holds it.
        """
        if self._put is None or self._epsilon is None or (step % self._every and step != self._last):
            return
        self._pending.append(_Look(step, observed, self._epsilon.place(step, stretches)))
        while self._pending and (len(self._pending) > MOST_PENDING or _is_there(self._pending[0])):
            self._hold()
        now = time.monotonic()
        if len(self._held) >= MOST_HELD or now - self._told >= PAUSE_SECONDS:
            self._told = now
            self._fetch()
            self._tell(self._epsilon)

    def returned(self, state: State) -> State:
        """The state that the `fit` returns; the last line of a file says what may be claimed of it."""
        self.ending = {"step": state.step, "ended": state.stopped}
        if self._put is not None and self._file is not None and self._epsilon is not None:
            with contextlib.suppress(Exception):  # such as of a ledger that is gone: who asks the state is told
                found = state.epsilon
                ends = {"lower": float(found.lower), "upper": float(found.upper), "delta": state.plan.target_delta}
                self.ending["epsilon"] = ends | {"kind": found.kind, "covers": self._epsilon.covers}
        return state

    def close(self) -> None:
        """Tell what is left.  What cannot be fetched, as after a failure of the device, is left out."""
        if self._put is None or self._epsilon is None:
            return
        with contextlib.suppress(Exception):
            while self._pending:
                self._hold()
        with contextlib.suppress(Exception):
            self._fetch()
        self._tell(self._epsilon, everything=True)
        if self._file is not None:
            self.tell({"event": "end", "run": self._run} | self.ending)
            self._flush()

    def tell(self, record: dict[str, Any]) -> None:
        """Hand a record over."""
        if self._put is not None:
            self._whatever_fails(functools.partial(self._put, record))

    def _flush(self) -> None:
        """Hand what a file has been told to the system."""
        if self._put is not None and self._file is not None:
            self._whatever_fails(self._file.flush)

    def _whatever_fails(self, act: Callable[[], Any]) -> None:
        """Whoever takes a record cannot stop the run by failing, and is given nothing after that."""
        try:
            act()
        except Exception as error:
            self._put = None
            words = " ".join(f"{type(error).__name__}: {error}".split())[:WORDS]
            progress.say(f"jaxacct: log raised {words}; training goes on without it")

    def _hold(self) -> None:
        """The oldest look under way, which is waited for, is done; one that an interrupt left behind is held once."""
        look = self._pending[0]
        if self._held and self._held[-1].look is look:
            self._pending.popleft()
            return
        if not _is_there(look):
            jax.block_until_ready(look.observed)
        now = time.monotonic()
        self._recent.append((look.step, now))
        first, since = self._recent[0]
        self._held.append(_Done(look, now, (look.step - first) / (now - since) if now > since else None))
        self._pending.popleft()

    def _fetch(self) -> None:
        """The numbers of all looks that are held, which are asked for together."""
        for leaf in jax.tree_util.tree_leaves([done.look.observed for done in self._held]):
            leaf.copy_to_host_async()
        while self._held:
            look, when, rate = self._held[0]
            if self._fetched and self._fetched[-1][2]["step"] == look.step:  # an interrupt left it behind
                self._held.popleft()
                continue
            told = numbers_of(look.observed) | {"seconds": when - self._begin, "steps_per_second": rate}
            record = {"event": "step", "run": self._run, "step": look.step, "not_private": told}
            if look.observed.value is not None:
                record["private"] = {"loss": np.asarray(look.observed.value).item()}
            self._fetched.append((when, look.place, record))
            self._held.popleft()

    def _tell(self, epsilon: EpsilonSoFar, everything: bool = False) -> None:
        """Hand over what is fetched, from the first on, if its epsilon is known or has been waited for."""
        while self._fetched:
            since, place, record = self._fetched[0]
            if place is not None and not place.table.ready:
                left = WAIT_SECONDS - (time.monotonic() - since)
                if everything:
                    place.table.wait(max(left, 0.0))
                elif left > 0.0:
                    break
            record = record | {"epsilon": epsilon.told(place)}
            if self._file is None:  # an interrupt may follow: a function gets no record twice, and a file keeps it once
                self._fetched.popleft()
                self.tell(record)
            else:
                self.tell(record)
                self._fetched.popleft()
        self._flush()


@contextlib.contextmanager
def run_log(log: Log, every: int, state: State) -> Iterator[RunLog]:
    """The log of a `fit` that goes on from a state; however that ends, what is left is told.

    Of the processes of one run only the first has a log: the others are given None.

    Raises
    ------
    InputError : a file that cannot be written, or is no log.
    """
    run = digest(b"run", state.lineage.root.key).hex()[:16]  # as in a ledger
    file, put = None, None
    if callable(log):
        put = log
    elif log is not None:
        file = LogFile(log, run)
        put = file.write
    found = RunLog(put, file, every, run)
    try:
        yield found
    except BaseException as error:
        found.ending = {"ended": type(error).__name__}
        raise
    finally:
        try:
            found.close()
        finally:
            if file is not None:
                file.close()


def checked_log(log: Any, ledger: Any = None) -> Log:
    """InputError for what is neither None, a function, nor a path; and for the path of the ledger."""
    if log is None or callable(log):
        return log
    if not isinstance(log, str | os.PathLike):
        raise InputError(f"log = {log!r:.40} must be a function of one record, or the path of a file of JSON lines")
    other = ledger.path if isinstance(ledger, Ledger) else ledger
    if isinstance(other, str | os.PathLike) and os.path.realpath(log) == os.path.realpath(other):
        raise InputError(f"log and ledger are both {os.fspath(log)!r}; give each a file of its own")
    return log


def numbers_of(observed: Observed) -> dict[str, Any]:
    """The numbers of a step that are not private, waited for; None for the mean or share of nobody.

    Means are over the members of the batch that contribute: all but those whose gradient is not finite.
    """
    members, clipped, not_finite = (int(x) for x in (observed.members, observed.clipped, observed.not_finite))
    each = members - not_finite
    mean = lambda total: (np.asarray(total, np.float64) / each).tolist() if each else None
    found = {
        "loss": mean(observed.loss),
        "clipped_share": clipped / each if each else None,
        "not_finite": not_finite,
        "members": members,
    }
    leaves = jax.tree_util.tree_flatten_with_path(observed.aux)[0]
    aux = {jax.tree_util.keystr(path, simple=True, separator="/") or "aux": mean(leaf) for path, leaf in leaves}
    return found | ({"aux": aux} if aux else {})


def _is_there(look: _Look) -> bool:
    return look.observed.members.is_ready()  # and with it all else that its program returned


class _Waiting(NamedTuple):
    """Lines that the system has not been given, and the place in the file before it is."""

    after: int
    lines: dict[tuple[str, int], bytes]


class LogFile:
    """A file of JSON lines, open for appending, and readable by its owner alone: most of it is not private.

    A last line that was cut off is removed.  A step that the file has already, since the run was resumed from a
    checkpoint before it, is marked by ``"again": true``.

    Parameters
    ----------
    path : a new file, or a log to go on with.
    run : the run that `write` is for; a file may hold several.

    Raises
    ------
    InputError : a file that cannot be written, or is no log.
    """

    def __init__(self, path: str | os.PathLike[str], run: str) -> None:
        place = Path(path)
        try:
            descriptor = os.open(place, os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_BINARY", 0), 0o600)
            self._file = os.fdopen(descriptor, "r+b", buffering=0)
        except OSError as error:
            raise unwritable(place, error) from None
        try:
            self._file.seek(0)
            start = self._file.read(len(_FIRST))
            if start and not start == _FIRST[: len(start)]:
                raise InputError(f"{place}: is there already and is no log of a training; give another path as log")
            _make_private(descriptor)
            _cut_after_last_line(self._file)
            self.there = self._last_step(run)
            self._waiting = _Waiting(self._file.seek(0, os.SEEK_END), {})
        except OSError as error:  # such as of a pipe, of which nothing can be read again
            self._file.close()
            raise unwritable(place, error) from None
        except BaseException:
            self._file.close()
            raise

    def beginning(self, run: str, step: int) -> dict[str, Any]:
        """A record that says that a `fit` begins, or goes on, and which steps come again."""
        record = {"event": "begin", "run": run, "step": step, "resumed": step > 0}
        again = {"again_until": self.there} if self.there > step else {}
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        return record | again | {"time": now}

    def write(self, record: dict[str, Any]) -> None:
        """One record as one line, which `flush` hands to the system; one that an interrupt had given before is one."""
        if record["event"] == "step" and record["step"] <= self.there:
            record = record | {"again": True}
        line = json.dumps(_finite(record), allow_nan=False).encode() + b"\n"
        self._settle()
        self._waiting.lines[record["event"], record["step"] if record["event"] == "step" else 0] = line

    def flush(self) -> None:
        """Hand all lines to the system; those that it was given before an interrupt or an error are not given again."""
        self._settle()
        text = b"".join(self._waiting.lines.values())
        while text:
            text = text[self._file.write(text) :]
        self._waiting = _Waiting(self._file.tell(), {})

    def _settle(self) -> None:
        """Lines that the system has been given wait no longer."""
        place = self._file.tell()
        if place != self._waiting.after:
            self._waiting = _Waiting(place, {})

    def close(self) -> None:
        """Flush and close the file."""
        with contextlib.suppress(OSError):  # of a full disk, which has been told
            self.flush()
        self._file.close()

    def _last_step(self, run: str) -> int:
        """The last step of a run that is in the file; 0 where there is none."""
        pattern = re.compile(rb'\{"event": "step", "run": "' + re.escape(run.encode()) + rb'", "step": (\d+)[,}]')
        self._file.seek(0)
        with open(os.dup(self._file.fileno()), "rb") as lines:
            found = (pattern.match(line) for line in lines)
            return max((int(match[1]) for match in found if match), default=0)


def _make_private(descriptor: int) -> None:
    """Take everyone's rights but the owner's from a file that was there before; devices, as /dev/null, are let be."""
    mode = os.fstat(descriptor).st_mode
    if os.name == "posix" and stat.S_ISREG(mode) and mode & 0o077:
        os.fchmod(descriptor, 0o600)


def _cut_after_last_line(file: Any) -> None:
    """Remove what follows the last line's end: a line that was being written when the process was killed."""
    size = end = file.seek(0, os.SEEK_END)
    while end > 0:
        begin = max(end - _PIECE, 0)
        file.seek(begin)
        place = file.read(end - begin).rfind(b"\n")
        if place >= 0:
            end = begin + place + 1
            break
        end = begin
    if end < size:
        file.truncate(end)


def _finite(node: Any) -> Any:
    """The same with None for what JSON has no number for."""
    if isinstance(node, dict):
        return {name: _finite(value) for name, value in node.items()}
    if isinstance(node, list | tuple):
        return [_finite(value) for value in node]
    return None if isinstance(node, float) and not math.isfinite(node) else node


class Live:
    """One line on standard error, with an upper bound of epsilon from the plan's table; show None: on a terminal.

    The table is computed in a thread of its own, begun with the first line that is shown: training does not wait for
    the programs to be compiled, and lines say nothing of epsilon until it is there.  (No daemon: a compilation must not
    be cut off when the interpreter ends, which waits for it.)  A table that cannot be computed, as when the interpreter
    is ending, is not shown.
    """

    def __init__(self, plan: Plan, there: int, show: bool | None) -> None:
        self._plan = plan
        self._progress = Progress(plan.steps, show, there, "steps", PAUSES)
        self.table: threading.Thread | None = None

    def update(self, step: int, device: Any) -> None:
        """Show that so many steps are done; ``device`` is a result of the last one."""
        if self._progress.due(step):
            jax.block_until_ready(device)
            self._progress.update(step, self._epsilon(step))

    def _epsilon(self, step: int) -> str:
        if self._plan.has_curve:
            return f"  epsilon <= {outward(float(self._plan.live_epsilon(step).upper), '.3g', up=True)}"
        if self.table is None and step < self._plan.steps:
            self.table = threading.Thread(target=self._compute, args=(step,), name="live epsilon")
            self.table.start()
        return ""

    def _compute(self, step: int) -> None:
        with contextlib.suppress(Exception):  # for the line alone: what fails here fails in the state's epsilon, too
            self._plan.live_epsilon(step)

    def close(self) -> None:
        """Leave the line as it stands."""
        self._progress.close()


class _Table:
    """Upper ends of epsilon along a plan, computed in a thread of its own when they are first asked for."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._uppers: tuple[list[int], list[float]] = [], []  # after which steps, in one piece for other threads
        self._thread: threading.Thread | None = None

    def at(self, step: int) -> Place:
        """The place after so many steps; the table is begun, unless it was before."""
        if self._thread is None:
            # no daemon: a compilation must not be cut off when the interpreter ends, which waits for it
            self._thread = threading.Thread(target=self._safely, name="epsilon of the log")
            self._thread.start()
        return Place(self, step)

    @property
    def ready(self) -> bool:
        """Whether all is there that ever will be."""
        return self._thread is not None and not self._thread.is_alive()

    def wait(self, seconds: float) -> None:
        """Wait so long at most until it is there."""
        if self._thread is not None:
            self._thread.join(seconds)

    def planned(self, step: int) -> Counter[Release]:
        """The releases that it is of, after so many steps."""
        return self._plan.releases_after(step)

    def upper(self, step: int) -> float | None:
        """The upper end after so many steps; None where it is not computed."""
        steps, uppers = self._uppers
        return uppers[bisect.bisect_left(steps, step)] if steps else None

    def _safely(self) -> None:
        try:
            self._compute()
        except Exception:  # for the log alone: what fails here fails in the state's epsilon, too, and is told there
            return

    def _compute(self) -> None:
        plan = self._plan
        even = np.unique(np.ceil(np.linspace(0.0, plan.steps, min(EVEN_PLACES, plan.steps) + 1)[1:])).astype(int)
        curve = [(step, float(plan.live_epsilon(step).upper)) for step in even.tolist()]
        self._put(curve)
        if plan.filter is not None or plan.sampling in BY_PASS or len(plan.whole) > MANY_KINDS:
            return
        steps, step, apart = [], 1, plan.steps / EVEN_PLACES
        while step * (APART - 1.0) < apart and apart > 1.0:
            steps.append(step)
            step = max(step + 1, int(APART * step))
        if steps:
            found = epsilon_of_several(plan, [plan.releases_after(step) for step in steps], EARLY_RTOL)
            self._put([*curve, *zip(steps, found.upper.tolist(), strict=True)])

    def _put(self, found: list[tuple[int, float]]) -> None:
        """The table, from upper ends after some steps, of which a later one holds as well: the least from each on."""
        found = sorted(found)
        least = np.minimum.accumulate([upper for _, upper in found[::-1]])[::-1]
        self._uppers = [step for step, _ in found], least.tolist()


class _TableAfter(_Table):
    """The same of what was held before a step, and the plan's steps from there on."""

    def __init__(self, plan: Plan, step: int, held: Held) -> None:
        super().__init__(plan)
        self._first, self._held = step, held
        self._before = _added(held)[0]

    def planned(self, step: int) -> Counter[Release]:
        return self._before + self._plan.releases_between(self._first, step)

    def _compute(self) -> None:
        first, last = self._first, self._plan.steps
        (own, headers), *rest = self._held
        headers = [*headers, Run("", "", self._plan)]
        uppers = []
        steps = np.unique(np.ceil(np.linspace(first, last, min(POINTS, last - first) + 1)[1:])).astype(int).tolist()
        for step in steps:
            spent = replace(own, releases=own.releases + self._plan.releases_between(first, step))
            found = claim([(spent, headers), *rest], self._plan.target_delta, self._plan.relation)
            uppers.append((step, float(found.upper)))
        self._put(uppers)


class Place(NamedTuple):
    """After how many steps a table is of all that has been released."""

    table: _Table
    step: int


class EpsilonSoFar:
    """Upper ends of epsilon after the steps of one `fit`.

    Parameters
    ----------
    plan : the plan that the steps follow.
    step : steps taken before.
    stretches : what was spent before, where there is no ledger.
    ledger : what holds everything else; None.
    """

    def __init__(self, plan: Plan, step: int, stretches: tuple[Stretch, ...], ledger: Ledger | None) -> None:
        self.plan, self._ledger = plan, ledger
        held = [
            (replace(spent, releases=Counter(spent.releases), others=Counter(spent.others)), list(headers))
            for spent, headers in self._held(stretches)
        ]
        self._others = _added(held)[1]
        filters = {line.plan.filter for _, headers in held for line in headers} | {plan.filter}
        self._of_plan = len(filters) == 1 and (plan.filter is None or len(held) == 1) and not self._others
        self._tables = [*([_Table(plan)] if self._of_plan else []), _TableAfter(plan, step, held)]

    def place(self, step: int, stretches: tuple[Stretch, ...]) -> Place | None:
        """Where a table has all that has been released until now, so many steps having been taken; it is begun.

        The place is after more steps where a run goes on from a checkpoint, and what it repeats is in the ledger.
        """
        if self._ledger is None and self._of_plan and len(stretches) == 1:  # as a rule, and then nothing is counted
            plan, first, end, _ = stretches[0]
            if plan is self.plan and first == 0:
                return self._tables[0].at(end)
        spent, others = _added(self._held(stretches))
        last = self.plan.steps
        for table in self._tables if others == self._others else []:
            holds = lambda end, table=table: spent <= table.planned(end)
            if holds(step):
                return table.at(step)
            if holds(last):
                return table.at(step + bisect.bisect_left(range(step, last), True, key=holds))
        return None

    def told(self, place: Place | None) -> dict[str, Any]:
        """Epsilon as a log has it, where `place` returned this: `upper` is None where nothing is known, and why."""
        upper, why = None, "more was released than a table has"
        if place is not None:
            upper, why = place.table.upper(place.step), "the table could not be computed, or not in time"
        known = upper is not None and math.isfinite(upper)
        found = {"upper": upper if known else None, "delta": self.plan.target_delta, "kind": "bound"}
        return found | {"covers": self.covers} | ({} if known else {"why": f"{why}; see state.epsilon"})

    @property
    def covers(self) -> str:
        """What epsilon is of."""
        if self.plan.repetitions is not None:
            return "this run of the tuning"
        return "this run" if self._ledger is None else "all runs of the ledger"

    def _held(self, stretches: tuple[Stretch, ...]) -> Held:
        ledger = self._ledger
        if ledger is None:
            return [(Spent(released(stretches)), [Run("", "", one.plan) for one in stretches])]
        names = [name for name in counted(self.plan, ledger) if name != ledger.run]
        others = [(ledger.counting(name), ledger.headers[name]) for name in names]
        own = ledger.runs[ledger.run]
        own = replace(own, releases=own.releases + own.owed) if own.owed else own
        return [(own, ledger.headers[ledger.run]), *others]


def _added(runs: Held) -> tuple[Counter[Release], Counter[Mechanism]]:
    """The training steps, and the other mechanisms, of several runs, counted."""
    releases: Counter[Release] = Counter()
    others: Counter[Mechanism] = Counter()
    for spent, _ in runs:
        releases.update(spent.releases)
        others.update(spent.others)
    return releases, others
