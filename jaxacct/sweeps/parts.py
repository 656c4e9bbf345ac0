"""Slices of a sweep, each solved by a process of its own into a part file, and the parts merged into one table."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from jaxacct.core.validation import InputError, check_flag
from jaxacct.sweeps import journal, result_files
from jaxacct.sweeps.journal import Header
from jaxacct.sweeps.table import Table, blank, fill, write

POLL_SECONDS = 0.2
"""Between two looks for the files of other processes: short beside any sweep, and no load on a shared file system."""


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
    """Where the rows of a slice are kept until all are done."""
    return out.with_name(f"{_slice_name(out, shard)}.journal")


def part_path(out: Path, shard: tuple[int, int]) -> Path:
    """The part file of a slice, which its journal becomes when it is complete; the result itself for 1/1."""
    return out if shard == (1, 1) else out.with_name(f"{_slice_name(out, shard)}.part")


def traces(out: Path, shard: tuple[int, int]) -> Iterator[Path]:
    """Where a run of this sweep may have left its settings: the journal and part of the slice, then of the others."""
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
        out = result_files.out_path(out)
        result_files.check_result(out)
        if not overwrite:
            result_files.refuse_existing(out)
    owner: dict[int, Path] = {}
    reference: Header | None = None
    for path in map(Path, parts):
        head = journal.peek(path)
        if reference is None:
            reference, first = head, path
            table = blank(head.columns, head.rows)
            done = np.zeros(head.rows, bool)
        difference = reference.differs(head, but=("shard",))
        if difference or head.shard[1] != reference.shard[1]:
            words = difference or f"slice {_words(head.shard)} instead of one of {reference.shard[1]}"
            raise InputError(f"{path}: belongs to another sweep than {first}, with {words}; give parts of one sweep")
        number = head.shard[0]
        if number in owner:
            raise InputError(f"{path} and {owner[number]} overlap: both hold slice {_words(head.shard)}; leave one out")
        owner[number] = path
        for rows, piece in journal.read(path):
            if done[rows].any():
                raise InputError(f"{path}: holds rows of another slice; solve slice {_words(head.shard)} again")
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


def _words(shard: tuple[int, int]) -> str:
    return f"{shard[0]}/{shard[1]}"


def wait_and_merge(out: Path, head: Header) -> Table:
    """For the first of several processes: the merged table once every part is there; the parts are then removed.

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
    """Whether the part is there, and not that of an earlier sweep which its process is about to replace."""
    return path.exists() and not head.differs(journal.peek(path), but=("shard",))


def wait_for_merge(out: Path, shard: tuple[int, int]) -> None:
    """For the other processes: until the first one has merged, and so removed, this one's part."""
    while part_path(out, shard).exists():
        time.sleep(POLL_SECONDS)
