"""A line that shows the work done, the rate and the time left, on standard error or in a notebook."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

Item = TypeVar("Item")

BAR_WIDTH = 24
"""Number of characters of the bar. The counts, the rate and the remaining time fit beside it in 80 columns."""
NOTEBOOK_PAUSE = 0.2
"""Smallest number of seconds between two updates in a notebook, since each update is a message to the browser."""
NOTEBOOK_WAIT = 0.5
"""Seconds of work after which a notebook shows a line if `show` is None.  Shorter work leaves no output behind."""
WAIT, TICK = 1.0, 0.5
"""WAIT: seconds of work after which `waiting` shows a line. TICK: seconds between two updates of this line."""
_open: deque[Progress] = deque(maxlen=1)
"""Holds the bar that stands on the terminal's last line. It is empty if no bar stands there."""
_waiting = threading.Lock()
"""Lock held by a call of `waiting` that shows a line. A second call at the same time shows no line."""


class Progress:
    """A progress line that is redrawn on a terminal or in a notebook; elsewhere each update is a line of its own."""

    def __init__(
        self,
        total: int | None,
        show: bool | None,  # None: on a terminal, and in a notebook after NOTEBOOK_WAIT seconds
        there: int = 0,  # rows done before the start, which the rate does not count
        unit: str = "rows",
        pauses: tuple[float, float] = (0.0, 1.0),  # least seconds between updates: (if redrawn, otherwise)
        apart: Callable[[], float] = lambda: 0.0,  # returns the seconds spent on compiling, not counted by the rate
    ) -> None:
        self._total, self._there, self._unit = total, there, unit
        self._terminal = on_terminal()
        self._notebook = not self._terminal and in_notebook()
        self._line: Any = None
        self._pause = max(pauses[0], NOTEBOOK_PAUSE) if self._notebook else pauses[0 if self._terminal else 1]
        self._show = self._terminal or self._notebook if show is None else show
        self._wait = NOTEBOOK_WAIT if self._notebook and show is None else 0.0
        self._apart, self._before = apart, apart()
        self._begin = time.monotonic()
        self._last = 0.0
        self.width = 0

    def due(self, done: int) -> bool:
        """Return whether `update` would show anything now."""
        if not self._show or (self._line is None and time.monotonic() - self._begin < self._wait):
            return False
        return done == self._total or time.monotonic() - self._last >= self._pause

    def update(self, done: int, more: str = "") -> None:
        """Show how many rows are done, followed by the text `more`."""
        if not self.due(done):
            return
        self._last = time.monotonic()
        seconds = self._last - self._begin - (self._apart() - self._before)
        line = bar(done, self._total, seconds, self._there, self._unit) + more
        if self._notebook:
            self._redraw(line)
            return
        self.width = max(self.width, len(line))
        print(f"\r{line:<{self.width}}" if self._terminal else f"{line}\n", end="", file=sys.stderr, flush=True)
        if self._terminal:
            _open.append(self)

    def _redraw(self, line: str) -> None:
        """Show the line as one output of the notebook. Later calls replace the text of this output."""
        from IPython.display import display

        shown = {"text/plain": line}
        if self._line is None:
            self._line = display(shown, raw=True, display_id=True)
        else:
            self._line.update(shown, raw=True)

    @property
    def stands(self) -> bool:
        """Whether this bar stands on the terminal's last line."""
        return self in _open

    def erase(self) -> None:
        if self._line is not None:
            self._line.update({"text/plain": ""}, raw=True)
        elif self.stands:
            _open.clear()
            print(f"\r{'':<{self.width}}\r", end="", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Leave the line in its last state and go to the next line."""
        if self._show and self._terminal and self.width:
            print(file=sys.stderr, flush=True)
            _open.clear()


def tracked(items: Iterable[Item], unit: str, show: bool | None = None) -> Iterator[Item]:
    """Yield the items, and show on a line how many of them are done."""
    known = list(items)
    with contextlib.closing(Progress(len(known), show, unit=unit)) as line:
        for done, item in enumerate(known):
            line.update(done)
            yield item
        line.update(len(known))


class Waiting:
    """The object that `waiting` yields. The `with` block counts finished rows (or other units) in `done`."""

    done = 0


@contextlib.contextmanager
def waiting(total: int | None, unit: str = "rows", show: bool | None = None) -> Iterator[Waiting]:
    """Show a progress line once the `with` block has taken a second, and erase the line when the block ends."""
    work = Waiting()
    wanted = on_terminal() or in_notebook() if show is None else show
    if not wanted or not _waiting.acquire(blocking=False):
        yield work
        return
    try:
        with contextlib.ExitStack() as line:
            with contextlib.suppress(RuntimeError):  # if no thread can be started, no line is shown
                line.enter_context(_ticking(work, total, unit))
            yield work
    finally:
        _waiting.release()


@contextlib.contextmanager
def _ticking(work: Waiting, total: int | None, unit: str) -> Iterator[None]:
    """Start a thread that shows on a line how much is done. At the end, stop the thread and erase the line."""
    over, began = threading.Event(), time.monotonic()
    bar = Progress(total, True, unit=unit)

    def tick() -> None:
        pause = WAIT
        with contextlib.suppress(OSError, ValueError):
            while not over.wait(pause):
                pause = TICK
                if not (on_terminal() or in_notebook()):  # the line cannot be redrawn: write it once
                    say(f"{work.done:,} {unit}")
                    return
                if not _open or bar.stands:
                    bar.update(work.done, f"  for {_clock(time.monotonic() - began)}")

    thread = threading.Thread(target=tick, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        with contextlib.suppress(OSError, ValueError):
            bar.erase()


def on_terminal() -> bool:
    """Return whether standard error is a terminal: False if standard error is closed or the process has none."""
    try:
        return sys.stderr is not None and sys.stderr.isatty()
    except (AttributeError, ValueError):
        return False


def in_notebook() -> bool:
    """Return whether the process is a Jupyter kernel. A process that has not imported IPython is no kernel."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", None)
    return shell is not None and getattr(shell(), "kernel", None) is not None


def say(line: str) -> None:
    """Print one line on standard error. The line replaces an open bar, whose next update appears below the line."""
    print(f"\r{line:<{_open[-1].width}}" if _open else line, file=sys.stderr, flush=True)


def bar(done: int, total: int | None, seconds: float, there: int = 0, unit: str = "rows") -> str:
    """Return one line of progress. `there` rows were done before the start. The later rows took `seconds`.

    >>> bar(512, 1024, 2.0)
    '[############............] 512/1,024  256 rows/s  0:02 left'
    """
    if total is None:
        return f"{done:,} {unit}"
    filled = BAR_WIDTH * done // total if total else BAR_WIDTH
    picture = f"[{'#' * filled}{'.' * (BAR_WIDTH - filled)}] {done:,}/{total:,}"
    if done == there or seconds <= 0.0:
        return picture
    rate = (done - there) / seconds
    speed = f"{rate:,.0f}" if rate >= 10 else f"{rate:.2g}"
    tail = f"{_clock((total - done) / rate)} left" if done < total else f"in {_clock(seconds)}"
    return f"{picture}  {speed} {unit}/s  {tail}"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
