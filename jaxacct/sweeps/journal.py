"""The files of a sweep: its journal, and the parts of its slices, which are merged into one table.

Solved rows are appended block by block to the journal, a file that survives a kill at any moment.  The journal of a
slice becomes its part when it is complete.

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
import re
import struct
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

import jax
import numpy as np

import jaxacct
from jaxacct.core import files
from jaxacct.core.validation import InputError, check_flag
from jaxacct.engines.devices import platform
from jaxacct.sweeps.grid import Grid
from jaxacct.sweeps.solve import Settings
from jaxacct.sweeps.table import TEXT, Table, blank, check_result, fill, out_path, refuse_existing, write

MARK = b"jxa1"
"""Begins every record; the digit is the version of the format."""
_RECORD_HEAD = struct.Struct("<4sQI")
"""Mark, bytes of the content, CRC-32 of the content."""
_FRONT_SIZE = struct.Struct("<I")
"""Bytes of the JSON text that a record of rows begins with."""
POLL_SECONDS = 0.2
"""Pause between two checks for other processes' files: short for any sweep, and no load on a shared file system."""


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
        """Discard the journal's content and write the header of a sweep; a file that is no journal is left alone."""
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
        if os.name != "posix":  # elsewhere open files cannot be renamed
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
    """The header of a journal or part, which names its sweep."""
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


def slice_of(shard: str | None) -> tuple[int, int]:
    """(i, n) from "i/n", (1, 1) from None.

    >>> slice_of("2/8")
    (2, 8)
    """
    if shard is None:
        return 1, 1
    match = re.fullmatch(r"([0-9]{1,6})/([0-9]{1,6})", str(shard))
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise InputError(f"shard = {shard!r} must be i/n with 1 <= i <= n; write 1/4 to 4/4 for four slices")
    return int(match[1]), int(match[2])


def journal_path(out: Path, shard: tuple[int, int]) -> Path:
    """The file that keeps the rows of a slice until all are done."""
    return out.with_name(f"{_slice_name(out, shard)}.journal")


def part_path(out: Path, shard: tuple[int, int]) -> Path:
    """The part file of a slice, which its journal becomes when it is complete; the result itself for 1/1."""
    return out if shard == (1, 1) else out.with_name(f"{_slice_name(out, shard)}.part")


def traces(out: Path, shard: tuple[int, int]) -> Iterator[Path]:
    """Files in which a run of this sweep may have left its settings: journal and part of this slice, then of others."""
    number, count = shard
    for i in (number, *(i for i in range(1, count + 1) if i != number)):
        yield journal_path(out, (i, count))
        if count > 1:
            yield part_path(out, (i, count))


def _slice_name(out: Path, shard: tuple[int, int]) -> str:
    return out.name if shard == (1, 1) else f"{out.name}.{shard[0]}-of-{shard[1]}"


def merge(
    parts: Sequence[str | os.PathLike[str]], out: str | os.PathLike[str] | None = None, *, overwrite: bool = False
) -> Table:
    """The table of a sweep from the part files of all its slices, in the order of the grid.

    It is the same to the last byte as that of one process.

    Parameters
    ----------
    parts : list of paths
        The part files that `sweep(grid, out=..., shard="i/n")` leaves, for i from 1 to n.
    out : path ending in .csv or .parquet, optional
        The file that receives the table.
    overwrite : bool
        Replace an earlier result.

    Returns
    -------
    Table

    Raises
    ------
    InputError
        A part that is missing, unfinished, given twice, or of another sweep; a result that is there already.

    >>> import tempfile
    >>> from jaxacct.sweeps import merge, sweep
    >>> grid = {"noise_multiplier": [2.0, 4.0], "sampling_probability": 1, "steps": [1, 4], "delta": 1e-5}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     for shard in ("1/2", "2/2"):
    ...         part = sweep(grid, out=f"{folder}/table.csv", shard=shard, block=2)
    ...     table = merge([f"{folder}/table.csv.{i}-of-2.part" for i in (1, 2)])
    >>> [round(x, 4) for x in table["upper"].tolist()]
    [1.9931, 4.3772, 0.9263, 1.9931]
    """
    if isinstance(parts, str | os.PathLike) or not parts:
        raise InputError("parts is empty; give the .part files of all slices" if not parts else "parts must be a list")
    check_flag("overwrite", overwrite, "True replaces an earlier result")
    if out is not None:
        out = out_path(out)
        check_result(out)
        if not overwrite:
            refuse_existing(out)
    owner: dict[int, Path] = {}
    reference: Header | None = None
    for path in map(Path, parts):
        head = peek(path)
        if reference is None:
            reference, first = head, path
            table = blank(head.columns, head.rows)
            done = np.zeros(head.rows, bool)
        difference = reference.differs(head, but=("shard",))
        if difference or head.shard[1] != reference.shard[1]:
            words = difference or f"slice {_slice(head.shard)} instead of one of {reference.shard[1]}"
            raise InputError(f"{path}: belongs to another sweep than {first}, with {words}; give parts of one sweep")
        number = head.shard[0]
        if number in owner:
            raise InputError(f"{path} and {owner[number]} overlap: both hold slice {_slice(head.shard)}; leave one out")
        owner[number] = path
        for rows, piece in read(path):
            if done[rows].any():
                raise InputError(f"{path}: holds rows of another slice; solve slice {_slice(head.shard)} again")
            fill(table, rows, piece)
            done[rows] = True
    assert reference is not None
    if not done.all():
        raise InputError(_missing(reference, owner, int(np.sum(~done))))
    if out is not None:
        write(table, Path(out))
    return table


def _missing(head: Header, owner: dict[int, Path], rows: int) -> str:
    total = head.shard[1]
    absent = [f"{number}/{total}" for number in range(1, total + 1) if number not in owner]
    if absent:
        shown = ", ".join(absent[:8]) + (" and more" if len(absent) > 8 else "")
        return f"{rows:,} of {head.rows:,} rows are missing: no part of slice {shown}; give all {total} parts"
    unfinished = ", ".join(str(path) for path in owner.values() if path.suffix == ".journal") or "a part"
    return f"{rows:,} of {head.rows:,} rows are missing: {unfinished} is not finished; continue it with --resume"


def _slice(shard: tuple[int, int]) -> str:
    return f"{shard[0]}/{shard[1]}"


def wait_and_merge(out: Path, head: Header) -> Table:
    """Wait for every part, merge them into a table and remove them; for the first of several processes.

    The processes share the file system of `out`; that they are alive is for `jax.distributed` to watch.
    """
    count = head.shard[1]
    paths = [part_path(out, (number, count)) for number in range(1, count + 1)]
    while not all(_ready(path, head) for path in paths):
        time.sleep(POLL_SECONDS)
    table = merge(paths, out, overwrite=True)  # the run was not begun if it may not replace it
    for path in paths:
        path.unlink()
    return table


def _ready(path: Path, head: Header) -> bool:
    """Whether the part is there and is not a part of an earlier sweep, which its process will replace."""
    return path.exists() and not head.differs(peek(path), but=("shard",))


def wait_for_merge(out: Path, shard: tuple[int, int]) -> None:
    """Wait until the first process has merged, and so removed, this one's part; for the other processes."""
    while part_path(out, shard).exists():
        time.sleep(POLL_SECONDS)
