"""Files: written under another name and renamed when complete, locked against other processes, refused in one line."""

from __future__ import annotations

import contextlib
import csv
import importlib
import io
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from jaxacct.core.lazy_exports import lacking
from jaxacct.core.validation import InputError


class Unwritable(InputError):
    """A file cannot be written, in the system's words."""


def unwritable(path: Path, error: OSError) -> Unwritable:
    """A refusal in the system's words."""
    return Unwritable(f"{path}: cannot be written: {error.strerror or error}")


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary name to write to; it takes the place of `path` at once, when everything is on the disk."""
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise unwritable(path, error) from None
    finally:
        with contextlib.suppress(OSError):  # a path that is not a folder holds no temporary file
            temporary.unlink(missing_ok=True)
    sync_folder(path)


def rename_new(old: Path, new: Path) -> None:
    """Give a file a name that no other has; FileExistsError where one has."""
    try:
        os.link(old, new)
    except FileExistsError:
        raise
    except OSError:  # of a file system without hard links
        if os.path.lexists(new):
            raise FileExistsError from None
        os.rename(old, new)
    else:
        old.unlink()


def sync_folder(path: Path) -> None:
    """Make the creation or renaming of a file survive a power cut, where the system knows how."""
    if os.name == "posix":
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def lock(file: io.FileIO | BinaryIO) -> None:
    """Hold an open file until it is closed; BlockingIOError where another process holds it.

    A system without such locks lets every process have it.  A file system without them raises OSError.
    """
    if os.name != "posix":
        return
    import fcntl

    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def regular_file(name: str, path: str | os.PathLike[str]) -> Path:
    """The path of a file to read; InputError for a folder or a pipe.  A missing file passes."""
    place = Path(path)
    if not os.fspath(path):
        raise InputError(f"{name} = {os.fspath(path)!r} names no file; give its path")
    try:
        mode = place.stat().st_mode
    except (OSError, ValueError):  # such as a name with a zero byte, which is reported when the file is opened
        return place
    if not stat.S_ISREG(mode):
        kinds = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
        what = kinds.get(stat.S_IFMT(mode), "a device")
        raise InputError(f"{place}: cannot be read: it is {what}, no {name}; give a file")
    return place


def write_csv(path: Path, names: Sequence[str], rows: Iterable[list[str]]) -> None:
    """A header line and one line per row."""
    with replacing(path) as temporary, temporary.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(names)
        writer.writerows(rows)


def optional_package(module: str, what: str) -> Any:
    """A module of an optional package; InputError with the remedy where it is not installed."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if (error.name or module).partition(".")[0] != module.partition(".")[0]:
            raise
        raise InputError(lacking(what, module)) from None
