"""Writes files under another name and renames them when they are complete; locks files; reports errors in one line."""

from __future__ import annotations

import contextlib
import csv
import functools
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
    """Refusal of a file that cannot be written, with the system's message."""


@contextlib.contextmanager
def _refusing(path: Path | str, what: str, refusal: type[InputError]) -> Iterator[None]:
    """Turn the system's errors into refusals of one line, such as "FILE: cannot be read: Permission denied"."""
    try:
        yield
    except OSError as error:
        raise refusal(f"{path}: cannot be {what}: {error.strerror or error}") from None


reading = functools.partial(_refusing, what="read", refusal=InputError)
writing = functools.partial(_refusing, what="written", refusal=Unwritable)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path to write to, and rename the file to `path` once its content is on the disk."""
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        with writing(path):
            yield temporary
            with temporary.open("rb") as file:
                os.fsync(file.fileno())
            os.replace(temporary, path)
    finally:
        with contextlib.suppress(OSError):  # unlink raises NotADirectoryError if the parent is no folder
            temporary.unlink(missing_ok=True)
    sync_folder(path)


def rename_new(old: Path, new: Path) -> None:
    """Rename a file; raise FileExistsError if another file has the new name."""
    try:
        os.link(old, new)
    except FileExistsError:
        raise
    except OSError:  # the file system has no hard links
        if os.path.lexists(new):
            raise FileExistsError from None
        os.rename(old, new)
    else:
        old.unlink()


def sync_folder(path: Path) -> None:
    """Write a file's folder to the disk (on POSIX only), so that the file's new name survives a power cut."""
    if os.name == "posix":
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def lock(file: io.FileIO | BinaryIO, path: Path | str, remedy: str, shared: bool = False) -> None:
    """Lock an open file, on POSIX only. Raise InputError if another lock is in the way; `shared` locks coexist."""
    if os.name != "posix":
        return
    import fcntl

    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        raise InputError(f"{path}: another process is writing it; {remedy}") from None


def regular_file(name: str, path: str | os.PathLike[str]) -> Path:
    """Return the path of a file to read; raise InputError for a folder, a pipe or a device. A missing file passes."""
    place = Path(path)
    if not os.fspath(path):
        raise InputError(f"{name} = {os.fspath(path)!r} names no file; give its path")
    try:
        mode = place.stat().st_mode
    except (OSError, ValueError):  # such as a missing file; opening the file will report the same error
        return place
    if not stat.S_ISREG(mode):
        kinds = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
        what = kinds.get(stat.S_IFMT(mode), "a device")
        raise InputError(f"{place}: cannot be read: it is {what}, no {name}; give a file")
    return place


def write_csv(path: Path, names: Sequence[str], rows: Iterable[list[str]]) -> None:
    with replacing(path) as temporary, temporary.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(names)
        writer.writerows(rows)


def optional_package(module: str, what: str) -> Any:
    """Import a module of an optional package; raise InputError with the remedy if the package is not installed."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if (error.name or module).partition(".")[0] != module.partition(".")[0]:
            raise
        raise InputError(lacking(what, module)) from None
