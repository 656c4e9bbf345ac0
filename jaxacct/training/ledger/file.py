"""The file of a ledger while it is open: held against other writers, added to, on the disk before anything counts."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import stat
from pathlib import Path
from typing import BinaryIO

from jaxacct.core.files import lock, sync_folder, unwritable
from jaxacct.core.validation import InputError

__all__ = ["LedgerFile", "beside"]


def beside(place: Path) -> Path:
    """A unique name for a temporary file in the same folder, no longer than 255 bytes."""
    name = place.name.encode(errors="ignore")[:242].decode(errors="ignore")
    return place.with_name(f"{name}.{secrets.token_hex(4)}.tmp")


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

    @property
    def is_open(self) -> bool:
        return self._file is not None

    def require_open(self) -> None:
        """InputError where the file is closed."""
        _ = self.file

    def hold(self) -> None:
        """Refuse a ledger that another process is writing (where the system has such locks)."""
        try:
            lock(self.file)
        except BlockingIOError:
            self.close()
            raise InputError(f"{self.path}: another process is writing it; wait for it, or stop it first") from None
        if not self._is_there(self.file):  # the process that wrote it has replaced it meanwhile
            self.close()
            raise InputError(f"{self.path}: was replaced while it was being opened; open it again")

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

    def replace_end(self, end: int, content: bytes) -> None:
        """Replace all that follows byte `end`, atomically, by a new file that is locked from the start."""
        place, old = Path(os.path.realpath(self.path)), self.file
        temporary = beside(place)
        try:
            descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o600)
            new = os.fdopen(descriptor, "r+b")
        except OSError as error:
            raise unwritable(self.path, error) from None
        try:
            with contextlib.suppress(OSError):  # file systems without permissions
                temporary.chmod(stat.S_IMODE(os.fstat(old.fileno()).st_mode))
            lock(new)
            old.seek(0)
            shutil.copyfileobj(old, new)
            new.seek(end)
            new.truncate()
            new.write(content)
            new.flush()
            os.fsync(new.fileno())
            if os.name != "posix":  # an open file cannot be renamed there
                new.close()
                old.close()
            os.replace(temporary, place)
            sync_folder(place)
        except BaseException as error:
            with contextlib.suppress(OSError):
                new.close()
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            if isinstance(error, OSError):
                raise unwritable(self.path, error) from None
            raise
        old.close()
        self._file = place.open("r+b") if new.closed else new
        self._file.seek(0, os.SEEK_END)
        self.size = end + len(content)

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
        if not self._is_there(file):
            raise InputError(f"{self.path}: was deleted or replaced while it was open; restore it from a copy")
        if os.fstat(file.fileno()).st_size != size:
            raise InputError(f"{self.path}: was changed by something else while it was open; restore it from a copy")

    def _is_there(self, file: BinaryIO) -> bool:
        """Whether an open file is the one at the path."""
        try:
            return os.path.samestat(os.fstat(file.fileno()), os.stat(self.path))
        except FileNotFoundError:
            return False
