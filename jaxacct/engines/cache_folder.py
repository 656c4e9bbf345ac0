"""The folder that keeps compiled programs between processes: where it is, whether it is safe, and its size.

A program is native code that will be run.  So the folder and each file must belong to this user and be writable by
nobody else; what is not so is not used, and the reason is told.  Nothing here needs JAX.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import tempfile
import time
from pathlib import Path

VARIABLE = "JAXACCT_CACHE_DIR"
"""Environment variable that names the folder; empty, it turns the keeping of programs off."""
LIMIT_BYTES = 512 * 2**20
"""Most bytes that the programs take together; beyond it those unused for longest go.  A program takes 1 to 6 MiB."""
ENDING = ".program"
"""End of the name of a kept program."""
WARM_ENDING = ".warm"
"""Ends the name of an empty file that says that `jaxacct warm` has kept the programs of sweeps."""
TEMPORARY = ".unfinished-"
"""Beginning of the name of a program that is being written."""
ABANDONED_SECONDS = 3600.0
"""Age of an unfinished file whose process has surely ended: writing one takes a second."""
OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
"""Mode bits of what others may write."""
DIGEST_BYTES = hashlib.sha256().digest_size
"""Length of the digest at the beginning of a file."""


class Unusable(Exception):
    """Why programs are not kept, in one line."""


class Missing(Unusable):
    """The folder is not there yet."""


def directory() -> Path | None:
    """$JAXACCT_CACHE_DIR, or the folder jaxacct under $XDG_CACHE_HOME or ~/.cache; None if the first is empty.

    Raises Unusable where there is no home folder.
    """
    chosen = os.environ.get(VARIABLE)
    if chosen is not None:
        return Path(chosen) if chosen else None
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "jaxacct"
    except RuntimeError as error:
        raise Unusable(f"no cache folder: {error}") from None


def safe_folder(create: bool) -> Path:
    """The folder, which is there and safe, or Unusable with the reason; `create` makes it, with mode 0700."""
    path = directory()
    if path is None:
        raise Unusable(f"{VARIABLE} is empty")
    try:
        if create:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.mkdir(mode=0o700, exist_ok=True)
        status = path.stat()
    except FileNotFoundError:
        raise Missing(f"{path} is not there yet; the first program that is compiled makes it") from None
    except OSError as error:
        raise Unusable(f"{path}: {error.strerror or error}") from None
    if not stat.S_ISDIR(status.st_mode):
        raise Unusable(f"{path} is not a folder")
    if not _ours(status):
        raise Unusable(f"{path} belongs to another user; name a folder of your own in {VARIABLE}")
    if status.st_mode & OTHERS_WRITE:
        raise Unusable(f"{path} can be written by others; chmod 700 makes it safe")
    return path


def read(path: Path) -> bytes | None:
    """What a file keeps, None where there is no such file, or it is damaged or not safe; it counts as used now."""
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            if not _ours(status) or status.st_mode & OTHERS_WRITE or not stat.S_ISREG(status.st_mode):
                return None
            digest, payload = file.read(DIGEST_BYTES), file.read()
    except OSError:
        return None
    if _digest(path.name, payload) != digest:
        return None
    with contextlib.suppress(OSError):  # a folder that may only be read
        os.utime(path)
    return payload


def write(path: Path, payload: bytes) -> bool:
    """Whether a file now keeps a payload: written beside its place and renamed, so that nobody reads half of it."""
    temporary = None
    try:
        handle, temporary = tempfile.mkstemp(prefix=TEMPORARY, dir=path.parent)  # with mode 0600
        with os.fdopen(handle, "wb") as file:
            file.write(_digest(path.name, payload))
            file.write(payload)
        os.replace(temporary, path)
    except OSError:  # a full disk, or a folder that may only be read
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
        return False
    trim(path.parent)
    return True


def kept(folder: Path) -> list[tuple[Path, os.stat_result]]:
    """The programs in the folder, unused for longest first."""
    found = []
    with contextlib.suppress(OSError):
        for path in folder.glob(f"*{ENDING}"):
            with contextlib.suppress(OSError):  # another process may have removed it
                found.append((path, path.stat()))
    return sorted(found, key=lambda each: (each[1].st_mtime, each[0].name))


def trim(folder: Path, limit: int | None = None) -> None:
    """Remove what was unused for longest until the programs fit, and what other processes have left unfinished."""
    files = kept(folder)
    excess = sum(status.st_size for _, status in files) - (LIMIT_BYTES if limit is None else limit)
    for path, status in files:
        if excess <= 0:
            break
        with contextlib.suppress(OSError):
            path.unlink()
            excess -= status.st_size
    _sweep_up(folder, ABANDONED_SECONDS)


def clear(folder: Path) -> tuple[int, int]:
    """Remove every program; (how many went, their bytes)."""
    count = size = 0
    for path, status in kept(folder):
        with contextlib.suppress(OSError):
            path.unlink()
            count, size = count + 1, size + status.st_size
    for path in folder.glob(f"*{WARM_ENDING}"):
        with contextlib.suppress(OSError):
            path.unlink()
    _sweep_up(folder, 0.0)
    return count, size


def _sweep_up(folder: Path, age: float) -> None:
    with contextlib.suppress(OSError):
        for path in folder.glob(f"{TEMPORARY}*"):
            with contextlib.suppress(OSError):
                if time.time() - path.stat().st_mtime >= age:
                    path.unlink()


def _ours(status: os.stat_result) -> bool:
    return not hasattr(os, "getuid") or status.st_uid == os.getuid()


def _digest(name: str, payload: bytes) -> bytes:
    """Of the name too: a file that was renamed keeps another program than its name says."""
    digest = hashlib.sha256(name.encode() + b"\n")
    digest.update(payload)
    return digest.digest()
