"""The file of a ledger while it is open: held against other writers, added to, on the disk before anything counts."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import BinaryIO

from jaxacct.files import unwritable
from jaxacct.validation import InputError

__all__ = ["LedgerFile"]


class LedgerFile:
    """An open file, and how many bytes it should have.

    file : None once it is closed; nothing can be written then.
    """

    def __init__(self, path: Path, file: BinaryIO | None) -> None:
        self.path, self._file = path, file
        self.size = 0

    @property
    def file(self) -> BinaryIO:
        """The file; InputError where it is closed."""
        if self._file is None:
            raise InputError(f"{self.path}: is not open for writing; use Ledger.open")
        return self._file

    def require_open(self) -> None:
        """InputError where the file is closed."""
        _ = self.file

    def hold(self) -> None:
        """Refuse a ledger that another process is writing (where the system has such locks)."""
        if os.name != "posix":
            return
        import fcntl  # only such systems have it

        try:
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.file.close()
            raise InputError(f"{self.path}: another process is writing it; wait for it, or stop it first") from None

    def append(self, content: bytes) -> None:
        """Write at the end, and make sure that it is on the disk, in the file that is at the path."""
        file = self.file
        try:
            self._require_in_place(file, self.size)
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
            self._require_in_place(file, self.size + len(content))
        except (OSError, InputError) as error:
            self.give_up()
            raise error if isinstance(error, InputError) else unwritable(self.path, error) from None
        self.size += len(content)

    def cut(self, end: int) -> None:
        """Drop what is beyond a place, and go on there."""
        self.file.truncate(end)
        self.file.seek(end)

    def end_last_line(self) -> None:
        """A last line that lacks nothing but its end counts as it is; what follows begins a line of its own.

        The end need not be on the disk when this returns: without it the file is read the same, and `append` puts all
        that is in the file on the disk before its own entry counts as written.
        """
        file = self.file
        file.seek(0, os.SEEK_END)
        file.seek(-1, os.SEEK_END)
        if file.read(1) != b"\n":
            try:
                file.write(b"\n")
                file.flush()
            except OSError as error:
                raise unwritable(self.path, error) from None
            self.size += 1

    def close(self) -> None:
        """Close the file, if it is open; nothing can be written afterwards."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def give_up(self) -> None:
        """Close it in the middle of an entry: what is in the file now is not known; opened again, it is."""
        with contextlib.suppress(OSError):
            self.close()
        self._file = None

    def forget(self) -> None:
        """Nothing can be written afterwards; whoever opened the file closes it."""
        self._file = None

    def _require_in_place(self, file: BinaryIO, size: int) -> None:
        """InputError unless the file that is open is still the one at the path, and holds just what was written."""
        mine = os.fstat(file.fileno())
        try:
            there = os.stat(self.path)
        except FileNotFoundError:
            there = None
        if there is None or not os.path.samestat(mine, there):
            raise InputError(f"{self.path}: was deleted or replaced while it was open; restore it from a copy")
        if mine.st_size != size:
            raise InputError(f"{self.path}: was changed by something else while it was open; restore it from a copy")
