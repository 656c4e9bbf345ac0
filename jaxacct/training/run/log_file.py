"""A log as a file of JSON lines, to which every `fit` appends: where that begins, its steps, and how it ended."""

from __future__ import annotations

import contextlib
import datetime
import json
import math
import os
import re
import stat
from pathlib import Path
from typing import Any, NamedTuple

from jaxacct.core.files import unwritable
from jaxacct.core.validation import InputError

__all__ = ["LogFile"]

_FIRST = b'{"event": "begin"'
"""How a log begins."""
_PIECE = 2**16
"""Bytes of a file that are read at a time, from its end, to find its last whole line."""


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
