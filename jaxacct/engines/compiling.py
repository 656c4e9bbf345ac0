"""What preparing programs has cost in this process, and one line on standard error while the first ones compile."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator

from jaxacct.core import progress
from jaxacct.engines import cache_folder

NOTICE_SECONDS = 1.0
"""Seconds of compiling after which a user is told what is taking so long."""
QUIET = "JAXACCT_QUIET"
"""Environment variable that turns the line off, when it is set to anything but 0."""


class Clock:
    """Seconds in which at least one thread was inside `running`, and how much of the work succeeded, in `count`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside, self._begin, self._spent, self.count = 0, 0.0, 0.0, 0

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        with self._lock:
            if self._inside == 0:
                self._begin = time.monotonic()
            self._inside += 1
        try:
            yield
        finally:
            with self._lock:
                self._inside -= 1
                if self._inside == 0:
                    self._spent += time.monotonic() - self._begin

    @property
    def seconds(self) -> float:
        with self._lock:
            return self._spent + (time.monotonic() - self._begin if self._inside else 0.0)

    def add(self) -> None:
        """Count one more."""
        with self._lock:
            self.count += 1


preparing, compiling, loading, saving = Clock(), Clock(), Clock(), Clock()
"""All of it; tracing and compiling; loading kept programs and trying them; writing them."""
_once = threading.Lock()
"""Held for ever by the first who says the line, or who wants it not to be said."""


def seconds() -> float:
    """Seconds of this process in which programs were being prepared: a rate of answers leaves them out."""
    return preparing.seconds


@contextlib.contextmanager
def announced() -> Iterator[None]:
    """Compiling: counted, and a line says so as soon as this process has compiled for more than a second."""
    timer = None
    if not _once.locked() and _shown():
        timer = threading.Timer(max(NOTICE_SECONDS - compiling.seconds, 0.0), _say)
        timer.daemon = True
        timer.start()
    try:
        with compiling.running():
            yield
        compiling.add()
    finally:
        if timer is not None:
            timer.cancel()


def say_nothing() -> None:
    """For a command that shows by itself what it compiles."""
    _once.acquire(blocking=False)


def _say() -> None:
    if not _once.acquire(blocking=False):
        return
    try:
        kept = f"once; kept in {cache_folder.safe_folder(create=True)}); `jaxacct warm` does it ahead"
    except cache_folder.Unusable as reason:
        kept = f"in each process: {reason})"
    progress.say(f"jaxacct: compiling kernels for this machine ({kept}")


def _shown() -> bool:
    """On a terminal or in a notebook, unless the user wants it quiet."""
    return os.environ.get(QUIET, "0") in ("", "0") and (progress.on_terminal() or progress.in_notebook())
