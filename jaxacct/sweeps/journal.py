"""The journal of a sweep: solved rows, appended block by block to a file that survives a kill at any moment.

A file is a sequence of records, each a mark, the length of its content, a checksum, and the content.  The first one
says what the sweep is (`Header`), the others hold rows of its table.  A record counts once it is whole; what a kill
has left behind it is dropped.  Every record is on the disk before the next block is begun.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

import jax
import numpy as np

import jaxacct
from jaxacct.core import files
from jaxacct.core.validation import InputError
from jaxacct.engines.devices import platform
from jaxacct.sweeps.columns import TEXT
from jaxacct.sweeps.grid import Grid
from jaxacct.sweeps.solve import Settings
from jaxacct.sweeps.table import Table

MARK = b"jxa1"
"""Begins every record; the digit is the version of the format."""
_RECORD_HEAD = struct.Struct("<4sQI")
"""Mark, bytes of the content, CRC-32 of the content."""
_FRONT_SIZE = struct.Struct("<I")
"""Bytes of the JSON text that a record of rows begins with."""


@dataclass(frozen=True)
class Header:
    """Everything that the rows of a sweep depend on, and the slice of it that a file holds."""

    jaxacct: str
    jax: str
    platform: str
    grid: str
    rows: int
    columns: tuple[str, ...]
    relation: str
    engine: str
    rtol: float
    backend: str
    block: int
    shard: tuple[int, int]

    def differs(self, other: Header, but: tuple[str, ...] = ()) -> str:
        """The first field in which two sweeps differ, in words; empty where they are the same."""
        for name, mine in asdict(self).items():
            theirs = getattr(other, name)
            if name in but or mine == theirs:
                continue
            if name in ("grid", "rows", "columns"):
                return "another grid"
            return f"{name} = {theirs!r} instead of {mine!r}"
        return ""


def header(grid: Grid, columns: tuple[str, ...], chosen: Settings, block: int, shard: tuple[int, int]) -> Header:
    """The header of a sweep as it would run here and now."""
    digest = hashlib.sha256()
    for words in (grid.name, grid.quantity):
        digest.update("\x1f".join(words).encode() + b"\x1e")
    for name, column in grid.inputs.items():
        text = name in TEXT
        content = "\x1f".join(column).encode() if text else np.ascontiguousarray(column, "<f8").tobytes()
        digest.update(name.encode() + content)
    versions = (jaxacct.__version__, jax.__version__, platform())
    same = chosen._asdict()
    return Header(*versions, digest.hexdigest(), len(grid), columns, **same, block=block, shard=shard)


class Journal:
    """A journal open for appending, held against other processes: it is also the lock of its sweep.

    `hold` opens it, and creates it where there is none; then `begin` starts it anew or `catch_up` goes on with it.
    """

    def __init__(self, path: Path, file: io.FileIO) -> None:
        self.path, self._file = path, file
        self._end = 0

    @classmethod
    def hold(cls, path: Path) -> Journal:
        """The journal of this name; InputError where another process has it (on systems that have such locks)."""
        while True:
            try:
                file = cast(io.FileIO, path.open("a+b", buffering=0))
            except OSError as error:
                raise files.unwritable(path, error) from None
            try:
                _lock(file, path)
                if _is_at(file, path):
                    return cls(path, file)
            except BaseException:
                file.close()
                raise
            file.close()  # the run that had it has just finished and removed it

    @property
    def fresh(self) -> bool:
        """Whether there is nothing in it, as in one that has just been created."""
        return os.fstat(self._file.fileno()).st_size == 0

    def begin(self, head: Header) -> None:
        """Discard what is in it and write the header of a sweep; a file that is no journal is left alone."""
        with self.path.open("rb") as file:
            if not MARK.startswith(file.read(len(MARK))):
                raise InputError(
                    f"{self.path}: is no journal of a sweep; move it away, or give the result another name"
                )
        self._cut(0)
        self._write(json.dumps(asdict(head)).encode())
        files.sync_folder(self.path)

    def catch_up(self, head: Header, keep: Callable[[np.ndarray, Table], None]) -> None:
        """Hand every whole record to `keep` and cut off what follows them; refused if of another sweep."""
        with self.path.open("rb") as file:
            records = _records(file)
            first = next(records, None)
            if first is None:  # killed before the header was whole
                self.begin(head)
                return
            difference = head.differs(_header(first, self.path))
            if difference:
                raise InputError(
                    f"{self.path}: was written by another sweep, with {difference}; "
                    "repeat that one, or start anew with --overwrite (overwrite=True)"
                )
            end = file.tell()
            for content in records:
                keep(*_decode(content))
                end = file.tell()
        self._cut(end)

    def append(self, rows: np.ndarray, piece: Table) -> None:
        """Add solved rows; they are on the disk when this returns."""
        self._write(_encode(rows, piece))

    def discard(self) -> None:
        """Remove it."""
        self._let_go_to_rename()
        self.path.unlink(missing_ok=True)

    def become(self, path: Path) -> None:
        """Give it another name, which it takes at once."""
        self._move(self.path, path)

    def take_over(self, path: Path) -> None:
        """Put a file in its place; it is to be held anew."""
        self._move(path, self.path)

    def _move(self, source: Path, target: Path) -> None:
        self._let_go_to_rename()
        try:
            os.replace(source, target)
            files.sync_folder(target)
        except OSError as error:
            raise files.unwritable(target, error) from None

    def _let_go_to_rename(self) -> None:
        if os.name != "posix":  # elsewhere what is open cannot be renamed
            self.close()

    def close(self) -> None:
        self._file.close()

    def _write(self, content: bytes) -> None:
        left = memoryview(_RECORD_HEAD.pack(MARK, len(content), zlib.crc32(content)) + content)
        size = len(left)
        try:
            while left:
                left = left[self._file.write(left) :]
            os.fsync(self._file.fileno())
        except OSError as error:
            with contextlib.suppress(OSError):
                self._cut(self._end)  # whole records only, and the room that half a one has taken is given back
            raise files.unwritable(self.path, error) from None
        self._end += size

    def _cut(self, end: int) -> None:
        try:
            self._file.truncate(end)
        except OSError as error:
            raise files.unwritable(self.path, error) from None
        self._end = end


def _lock(file: io.FileIO, path: Path) -> None:
    """Hold a journal until it is closed, where the system and the file system have such locks."""
    try:
        files.lock(file)
    except BlockingIOError:
        raise InputError(
            f"{path}: another process is writing it; wait for it, stop it first, or give the result another name"
        ) from None
    except OSError:
        pass


def _is_at(file: io.FileIO, path: Path) -> bool:
    """Whether the open file still has its name."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def kept_block(paths: Iterable[Path]) -> int | None:
    """The block of the first of these journals and parts that says one."""
    for path in paths:
        if path.is_file():
            with contextlib.suppress(InputError):
                return peek(path).block
    return None


def peek(path: Path) -> Header:
    """What sweep a journal or part belongs to."""
    return next(_read(path))


def read(path: Path) -> Iterator[tuple[np.ndarray, Table]]:
    """The rows in the whole records of a journal or part."""
    records = _read(path)
    next(records)
    return records


def _read(path: Path) -> Iterator[Any]:
    """The header, then the rows of every record."""
    try:
        file = path.open("rb")
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror or error}") from None
    with file:
        records = _records(file)
        first = next(records, None)
        if first is None:
            raise InputError(f"{path}: is no part of a sweep; give the .part files that --shard writes")
        yield _header(first, path)
        yield from map(_decode, records)


def _records(file: BinaryIO) -> Iterator[bytes]:
    """The contents of the whole records, as far as they go."""
    while True:
        frame = file.read(_RECORD_HEAD.size)
        if len(frame) < _RECORD_HEAD.size:
            return
        mark, length, checksum = _RECORD_HEAD.unpack(frame)
        if mark != MARK or length > os.fstat(file.fileno()).st_size - file.tell():
            return
        content = file.read(length)
        if zlib.crc32(content) != checksum:
            return
        yield content


def _header(content: bytes, path: Path) -> Header:
    try:
        fields = json.loads(content)
        return Header(**fields | {name: tuple(fields[name]) for name in ("columns", "shard")})
    except (ValueError, TypeError, KeyError):
        raise InputError(f"{path}: was written by another version of jaxacct; start anew with --overwrite") from None


def _encode(rows: np.ndarray, piece: Table) -> bytes:
    """Row numbers, then each column: floats as they are, text as numbers of words listed in front."""
    words, arrays = {}, [rows.astype("<i8")]
    for name, column in piece.columns.items():
        if name in TEXT:
            known, code = np.unique(column.astype(str), return_inverse=True)
            words[name] = known.tolist()
            arrays.append(code.astype("<u4"))
        else:
            arrays.append(column.astype("<f8"))
    front = json.dumps({"rows": rows.size, "columns": list(piece.columns), "words": words}).encode()
    return b"".join([_FRONT_SIZE.pack(len(front)), front, *(array.tobytes() for array in arrays)])


def _decode(content: bytes) -> tuple[np.ndarray, Table]:
    start = _FRONT_SIZE.size + _FRONT_SIZE.unpack_from(content)[0]
    front = json.loads(content[_FRONT_SIZE.size : start])
    count = front["rows"]

    def take(dtype: str) -> np.ndarray:
        nonlocal start
        array = np.frombuffer(content, dtype, count, start)
        start += array.nbytes
        return array

    rows, columns = take("<i8"), {}
    for name in front["columns"]:
        words = front["words"].get(name)
        columns[name] = take("<f8") if words is None else np.array(words, object)[take("<u4")]
    return rows, Table(columns)
