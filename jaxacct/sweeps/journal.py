"""The files of a sweep: its journal, and the parts of its slices, which `merge` joins into one table.

A process appends solved rows to its journal block by block, and the journal of a complete slice becomes its part file.
The first record of a file is its `Header`, and all others hold rows.  Every record is on the disk before the next block
is begun.  A reader drops the last record if a kill has cut it off.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import re
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

import jax
import numpy as np

import jaxacct
from jaxacct.core import files
from jaxacct.core.validation import InputError, check_flag
from jaxacct.engines.devices import certifying
from jaxacct.sweeps.grid import Grid
from jaxacct.sweeps.solve import Settings
from jaxacct.sweeps.table import TEXT, Table, blank, check_result, fill, out_path, refuse_existing, write

MARK = b"jxa1"
"""First bytes of every record; the digit is the version of the format."""
_RECORD_HEAD = struct.Struct("<4sQI")
"""Layout of a record's head: mark, number of bytes of the content, CRC-32 of the content."""
_FRONT_SIZE = struct.Struct("<I")
"""First bytes of a record of rows: the length of the JSON text that follows them."""


@dataclass(frozen=True)
class Header:
    """First record of a file: the settings that the rows of a sweep depend on, and the slice that the file holds."""

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
        """Name the first field, other than those in `but`, in which two sweeps differ; empty text if none differs."""
        for name, mine in asdict(self).items():
            theirs = getattr(other, name)
            if name in but or mine == theirs:
                continue
            if name in ("grid", "rows", "columns"):
                return "another grid"
            return f"{name} = {theirs!r} instead of {mine!r}"
        return ""


def header(grid: Grid, columns: tuple[str, ...], chosen: Settings, block: int, shard: tuple[int, int]) -> Header:
    """Return the header of a sweep: digest of `grid`, settings, versions of jaxacct and JAX, and platform."""
    digest = hashlib.sha256()
    for words in (grid.name, grid.quantity):
        written = "\x1f".join(words)
        if written.count("\x1f") != len(words) - 1:  # a name has the separator
            written = repr([*words])
        digest.update(written.encode() + b"\x1e")
    for name, column in grid.inputs.items():
        content = "\x1f".join(column).encode() if name in TEXT else np.ascontiguousarray(column, "<f8").tobytes()
        digest.update(name.encode() + content)
    device = certifying()
    versions = (jaxacct.__version__, jax.__version__, "cpu" if device is None else device.platform)
    return Header(*versions, digest.hexdigest(), len(grid), columns, **chosen._asdict(), block=block, shard=shard)


class Journal:
    """A journal. `hold` opens and locks it, so that no other process can run the same sweep."""

    def __init__(self, path: Path, file: io.FileIO) -> None:
        self.path, self._file = path, file

    @classmethod
    def hold(cls, path: Path) -> Journal:
        """Open and lock the journal at a path; raise InputError if another process has locked it."""
        while True:
            with files.writing(path):
                file = cast(io.FileIO, path.open("a+b", buffering=0))
            try:
                with contextlib.suppress(OSError):  # the system or the file system may have no locks
                    files.lock(file, path, "wait for it, stop it first, or give the result another name")
                with contextlib.suppress(FileNotFoundError):
                    if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                        return cls(path, file)
            except BaseException:
                file.close()
                raise
            file.close()  # another run removed this file before it was locked: open the path again

    @property
    def fresh(self) -> bool:
        """Whether the journal is empty, as a newly created one is."""
        return os.fstat(self._file.fileno()).st_size == 0

    def begin(self, head: Header) -> None:
        """Empty the journal and write the header of a sweep; refuse a file that is no journal."""
        with self.path.open("rb") as file:
            if not MARK.startswith(file.read(len(MARK))):
                raise InputError(
                    f"{self.path}: is no journal of a sweep; move it away, or give the result another name"
                )
        self._cut(0)
        self._write(json.dumps(asdict(head)).encode())
        files.sync_folder(self.path)

    def catch_up(self, head: Header, keep: Callable[[np.ndarray, Table], None]) -> None:
        """Pass the rows of whole records to `keep`; cut the file after the last one. Refuse another sweep's journal."""
        with self.path.open("rb") as file:
            records = _records(file)
            first = next(records, None)
            if first is None:  # the earlier run was killed before the header was whole
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
        """Append solved rows, and return when they are on the disk."""
        self._write(_encode(rows, piece))

    def discard(self) -> None:
        self._let_go_to_rename()
        self.path.unlink(missing_ok=True)

    def rename(self, source: Path, target: Path) -> None:
        """Rename `source` to `target` atomically. One of the two is the path of this journal."""
        self._let_go_to_rename()
        with files.writing(target):
            os.replace(source, target)
            files.sync_folder(target)

    def _let_go_to_rename(self) -> None:
        if os.name != "posix":  # other systems cannot rename an open file
            self.close()

    def close(self) -> None:
        self._file.close()

    def _write(self, content: bytes) -> None:
        left = memoryview(_RECORD_HEAD.pack(MARK, len(content), zlib.crc32(content)) + content)
        end = os.fstat(self._file.fileno()).st_size
        try:
            with files.writing(self.path):
                while left:
                    left = left[self._file.write(left) :]
                os.fsync(self._file.fileno())
        except files.Unwritable:
            with contextlib.suppress(files.Unwritable):
                self._cut(end)  # remove the half-written record, which would take room on the disk
            raise

    def _cut(self, end: int) -> None:
        with files.writing(self.path):
            self._file.truncate(end)


def kept_block(out: Path, shard: tuple[int, int]) -> int | None:
    """Return the block size from a journal or part of this slice; if none is readable, from one of another slice."""
    number, count = shard
    for i in (number, *range(1, count + 1)):
        for path in (journal_path(out, (i, count)), part_path(out, (i, count))):
            if path.is_file():
                with contextlib.suppress(InputError):
                    return peek(path).block
    return None


def peek(path: Path) -> Header:
    """Return the header of a journal or part."""
    return next(_read(path))


def _read(path: Path) -> Iterator[Any]:
    """Yield the header of a journal or part, then the rows of every whole record."""
    with files.reading(path):
        file = path.open("rb")
    with file:
        records = _records(file)
        first = next(records, None)
        if first is None:
            raise InputError(f"{path}: is no part of a sweep; give the .part files that --shard writes")
        yield _header(first, path)
        yield from map(_decode, records)


def _records(file: BinaryIO) -> Iterator[bytes]:
    """Yield the contents of the records, up to the first record that is cut off or damaged."""
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
    """Encode row numbers and columns; a column of text becomes indices into a list of its words."""
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
    """Return the numbers (i, n) of a slice "i/n"; for None return (1, 1)."""
    if shard is None:
        return 1, 1
    match = re.fullmatch(r"([0-9]{1,6})/([0-9]{1,6})", str(shard))
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise InputError(f"shard = {shard!r} must be i/n with 1 <= i <= n; write 1/4 to 4/4 for four slices")
    return int(match[1]), int(match[2])


def journal_path(out: Path, shard: tuple[int, int]) -> Path:
    """Return the path of the journal that keeps the rows of an unfinished slice."""
    return out.with_name(f"{_slice_name(out, shard)}.journal")


def part_path(out: Path, shard: tuple[int, int]) -> Path:
    """Return the path of a complete slice's part file; for the slice 1/1 the path of the result."""
    return out if shard == (1, 1) else out.with_name(f"{_slice_name(out, shard)}.part")


def _slice_name(out: Path, shard: tuple[int, int]) -> str:
    return out.name if shard == (1, 1) else f"{out.name}.{shard[0]}-of-{shard[1]}"


def merge(
    parts: Sequence[str | os.PathLike[str]], out: str | os.PathLike[str] | None = None, *, overwrite: bool = False
) -> Table:
    """Merge the part files of all slices of a sweep into the table that one process would write, to the last byte.

    Parameters
    ----------
    parts : the part files that `sweep(grid, out=..., shard="i/n")` leaves, for i from 1 to n.
    out : the file to write the table to, a path ending in .csv or .parquet.
    overwrite : whether to replace an earlier result.

    Returns
    -------
    Table

    Raises
    ------
    InputError : if a part is missing, unfinished, given twice, or of another sweep, or if the result exists already.

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
    first = Path(parts[0])
    reference = peek(first)
    table, done = blank(reference.columns, reference.rows), np.zeros(reference.rows, bool)
    for path in map(Path, parts):
        records = _read(path)
        head = next(records)
        difference, (number, total) = reference.differs(head, but=("shard",)), head.shard
        if difference or total != reference.shard[1]:
            words = difference or f"slice {number}/{total} instead of one of {reference.shard[1]}"
            raise InputError(f"{path}: belongs to another sweep than {first}, with {words}; give parts of one sweep")
        if number in owner:
            raise InputError(f"{path} and {owner[number]} overlap: both hold slice {number}/{total}; leave one out")
        owner[number] = path
        for rows, piece in records:
            if done[rows].any():
                raise InputError(f"{path}: holds rows of another slice; solve slice {number}/{total} again")
            fill(table, rows, piece)
            done[rows] = True
    if not done.all():
        raise InputError(_missing(reference, owner, int(np.sum(~done))))
    if out is not None:
        write(table, Path(out))
    return table


def _missing(head: Header, owner: dict[int, Path], rows: int) -> str:
    """Return the error message that names the slices whose rows are missing."""
    total = head.shard[1]
    absent = [f"{number}/{total}" for number in range(1, total + 1) if number not in owner]
    if absent:
        shown = ", ".join(absent[:8]) + (" and more" if len(absent) > 8 else "")
        return f"{rows:,} of {head.rows:,} rows are missing: no part of slice {shown}; give all {total} parts"
    unfinished = ", ".join(str(path) for path in owner.values() if path.suffix == ".journal") or "a part"
    return f"{rows:,} of {head.rows:,} rows are missing: {unfinished} is not finished; continue it with --resume"


def merge_all(out: Path, head: Header) -> Table | None:
    """Merge and remove the parts of all slices. Return the table, or None while a part of this sweep is missing."""
    count = head.shard[1]
    paths = [part_path(out, (number, count)) for number in range(1, count + 1)]
    # also return None while a part is from an earlier sweep: the process of its slice will replace that part
    if not all(path.exists() and not head.differs(peek(path), but=("shard",)) for path in paths):
        return None
    table = merge(paths, out, overwrite=True)  # an old `out` is here only if the sweep was told to overwrite it
    for path in paths:
        path.unlink()
    return table
