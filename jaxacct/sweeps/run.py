"""Plans and runs a sweep."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxacct.core.files import Unwritable
from jaxacct.core.progress import Progress
from jaxacct.core.types import Foreign
from jaxacct.core.validation import COUNT, GIBIBYTE, InputError, check_flag, check_one, choice, shown, with_hints
from jaxacct.engines import programs
from jaxacct.engines.backend import fixed
from jaxacct.engines.devices import local
from jaxacct.sweeps import table as tables
from jaxacct.sweeps.grid import QUANTITIES, Grid, as_grid, expand, is_frame, read_grid
from jaxacct.sweeps.journal import Header, Journal, header, journal_path, kept_block, merge_all, part_path, slice_of
from jaxacct.sweeps.solve import Settings, settings, solve
from jaxacct.sweeps.table import Table

SMALLEST_BLOCK, LARGEST_BLOCK = 512, 4096
"""Least and largest default of `block`. Fewer rows would not fill a compiled program; a kill loses up to one block."""
POLL_SECONDS = 0.2
"""Seconds between two checks for the files of other processes.  The pause spares a shared file system."""


class SweepInterrupted(KeyboardInterrupt):
    """Error after Ctrl-C during a sweep.

    Parameters
    ----------
    done : number of finished rows.
    total : number of rows of this slice.
    journal : path of the journal; None for a sweep without `out`, which keeps no rows.

    >>> print(SweepInterrupted(512, 1024, None))
    interrupted after 512 of 1,024 rows
    """

    def __init__(self, done: int, total: int, journal: Path | None) -> None:
        kept = f", kept in {journal}; continue with --resume (resume=True)" if journal is not None else ""
        super().__init__(f"interrupted after {done:,} of {total:,} rows{kept}")
        self.done, self.total, self.journal = done, total, journal


@with_hints
def sweep(
    grid: Mapping[str, Any] | Sequence[Mapping[str, Any]] | Grid | str | os.PathLike[str] | Any,
    *,
    mode: str = "product",
    quantity: str | None = None,
    out: str | os.PathLike[str] | None = None,
    relation: str | None = None,
    engine: str = "auto",
    rtol: float = 1e-4,
    backend: str = "auto",
    progress: bool | None = None,
    block: int | None = None,
    resume: bool = False,
    overwrite: bool = False,
    shard: str | None = None,
    distributed: bool = False,
) -> Table | Foreign:
    """Solve every DP-SGD configuration of a grid: epsilon, delta, or a calibrated parameter.

    All local devices share the work.  With `out`, solved blocks go to a file beside the result, the journal, which
    survives any end of the process.  The result appears when the table is complete.  A row on which the engines raise
    an error has the status "failed" and a trivial bracket (NaN for a calibration), and a warning names the error.

    Parameters
    ----------
    grid : dict of numbers, arrays and ranges; DataFrame; list of dicts; or the path of a .toml or .csv grid
        `jaxacct.sweeps.read_grid` lists the fields.  The sweep solves for the one of noise_multiplier, steps,
        sampling_probability, epsilon and delta that is left out.  In a DataFrame or a list of dicts every row is one
        configuration, and columns that are no inputs are kept beside the answers.
    mode : for a dict: "product" makes every combination (the last field varies fastest), "zip" broadcasts the arrays.
    quantity : the quantity to solve for.  It must be the field that is left out.  A grid file has its own `quantity`.
    out : the file of the result, a path ending in .csv or .parquet.  The file must not exist yet (see overwrite).
    relation, engine, rtol, backend : as in `jaxacct.epsilon`.  Calibrations need `engine="auto"`.
    progress : whether to show a progress bar on standard error; by default it is shown only on a terminal.
    block : number of rows between two writes; by default a 16th of the grid, rounded up to a power of 2, 512 to 4096.
    resume : whether to continue from an interrupted run's journal, if any; it also gives the block size if none is set.
    overwrite : whether to discard an interrupted run's journal, and to replace an earlier result by the complete one.
    shard : "i/n" solves the i-th of n slices into the part file OUT.i-of-n.part, for `jaxacct.sweeps.merge`.
    distributed : whether every process solves its slice, and the first process merges the slices.  Call
        `jax.distributed.initialize()` before.  `out` must be on a file system that all processes share.

    Returns
    -------
    Table, or a pandas.DataFrame if a DataFrame was swept in a single slice
        Columns: name (if any), columns of the grid that are no inputs, quantity, the inputs, relation, lower, estimate,
        upper, kind, status, engine.  A solved noise multiplier, sampling probability or number of steps has its own
        column, and lower and upper then enclose the epsilon (or the risk that was the target) at that value.  Rows are
        in the order of the grid, or of this slice if the slices are not merged.  A returned DataFrame has the index and
        the types of the swept one, but a numeric input column in which values were left out becomes float64.

    Raises
    ------
    InputError : before any work, if a value is invalid, a file is unreadable, the result exists already, or a journal
        is in use or of another sweep; later, if the disk is full.  The message says which rows are kept.
    SweepInterrupted : after Ctrl-C; a KeyboardInterrupt with the number of finished rows and their journal.

    >>> from jaxacct.sweeps import sweep
    >>> t = sweep({"noise_multiplier": [2.0, 4.0], "sampling_probability": 1, "steps": 1, "delta": 1e-5})
    >>> [round(x, 4) for x in t["upper"].tolist()]
    [1.9931, 0.9263]
    """
    for name, value in {"resume": resume, "overwrite": overwrite, "distributed": distributed}.items():
        check_flag(name, value, "True does what its name says")
    if distributed and shard is not None:
        raise InputError("shard and distributed both slice the grid; leave one of them out")
    if resume and overwrite:
        raise InputError("resume and overwrite contradict each other; leave one of them out")
    if distributed:
        shard = f"{jax.process_index() + 1}/{jax.process_count()}"
    path = None if out is None else tables.out_path(out)
    if path is not None and resume and block is None:
        block = kept_block(path, slice_of(shard))
    work = lay_out(grid, mode, quantity, block, shard, relation=relation, engine=engine, rtol=rtol, backend=backend)
    if work.grid.beside and work.shard[1] > 1:
        raise InputError(
            f"column {next(iter(work.grid.beside))!r} is no input, and slices do not keep such columns; "
            "leave it out, or sweep without shard"
        )
    if path is None:
        for name, given in {"resume": resume, "overwrite": overwrite, "shard": shard is not None}.items():
            if given:
                raise InputError(f"{name} needs out; name the result, such as out='result.csv'")
        table = work.solve(progress).beside(work.grid.beside)
        return table.like(grid) if is_frame(grid) else table
    tables.check_result(path)
    if isinstance(grid, str | os.PathLike) and path.exists() and path.samefile(grid):
        raise InputError(f"{path}: the result would overwrite the grid; give another name")
    if work.shard[1] == 1:
        table = work.whole(path, progress, resume, overwrite)
        return table.like(grid) if is_frame(grid) else table
    shown = progress if work.shard[0] == 1 or not distributed else False
    table = work.part(path, shown, resume, overwrite, merged=distributed)
    if distributed and work.shard[0] == 1:
        while (whole := merge_all(path, work.head)) is None:  # wait until every process has written its part
            time.sleep(POLL_SECONDS)
        return whole
    while distributed and part_path(path, work.shard).exists():  # wait until the first process has merged the parts
        time.sleep(POLL_SECONDS)
    return table


@dataclass(frozen=True, eq=False)
class Work:
    """A slice of a sweep. All rows of a block ask for one quantity."""

    grid: Grid
    settings: Settings
    columns: tuple[str, ...]
    block: int
    shard: tuple[int, int]
    blocks: list[np.ndarray]

    @functools.cached_property
    def rows(self) -> np.ndarray:
        """Row numbers of this slice, in the order of the grid, shape (rows,)."""
        return np.sort(np.concatenate([np.zeros(0, np.int64), *self.blocks]))

    @functools.cached_property
    def table(self) -> Table:
        """The table of this slice; the cells of rows that are not solved yet are empty."""
        return tables.blank(self.columns, self.rows.size)

    @functools.cached_property
    def done(self) -> np.ndarray:
        """Whether each row of this slice is solved, shape (rows,)."""
        return np.zeros(self.rows.size, bool)

    @functools.cached_property
    def head(self) -> Header:
        return header(self.grid, self.columns, self.settings, self.block, self.shard)

    @property
    def count(self) -> int:
        return int(np.sum(self.done))

    def solved(self, rows: np.ndarray) -> Table:
        with fixed(self.settings.backend == "numpy"):
            return solve(self.grid.take(rows), self.settings, self.columns, len(self.grid) == 1)

    def keep(self, rows: np.ndarray, piece: Table) -> None:
        index = np.searchsorted(self.rows, rows)
        tables.fill(self.table, index, piece)
        self.done[index] = True

    def solve(self, show: bool | None, journal: Journal | None = None) -> Table:
        """Solve the unsolved blocks, append each block to the journal, and return the table of the slice."""
        progress = Progress(self.rows.size, show, self.count, apart=programs.seconds)
        progress.update(self.count)
        try:
            for rows in self.blocks:
                if self.done[np.searchsorted(self.rows, rows[0])]:
                    continue
                piece = self.solved(rows)
                if journal is not None:
                    journal.append(rows, piece)
                self.keep(rows, piece)
                progress.update(self.count)
        except KeyboardInterrupt:
            raise SweepInterrupted(self.count, self.rows.size, None if journal is None else journal.path) from None
        finally:
            progress.close()
        return self.table

    def whole(self, out: Path, show: bool | None, resume: bool, overwrite: bool) -> Table:
        """Solve all blocks into the journal, write the result, and remove the journal."""
        with self._journal(out, {out: tables.REPLACE}, resume, overwrite) as journal:
            table = self.solve(show, journal).beside(self.grid.beside)
            tables.write(table, out)
            journal.discard()
        return table

    def part(self, out: Path, show: bool | None, resume: bool, overwrite: bool, *, merged: bool) -> Table:
        """Solve a slice into its journal, and rename the journal to the part file. `resume`: continue an old part."""
        part = part_path(out, self.shard)
        if part.exists() and resume:
            with contextlib.closing(Journal.hold(journal_path(out, self.shard))) as journal:
                if journal.fresh:
                    journal.rename(part, journal.path)
        taken = {part: f"keep it with --resume (resume=True), or {tables.REPLACE}"}
        taken |= {out: tables.REPLACE} if merged else {}
        with self._journal(out, taken, resume, overwrite) as journal:
            part.unlink(missing_ok=True)  # else `merge_all` could merge an old part while this one is solved
            table = self.solve(show, journal)
            journal.rename(journal.path, part)
        return table

    @contextlib.contextmanager
    def _journal(self, out: Path, taken: dict[Path, str], resume: bool, overwrite: bool) -> Iterator[Journal]:
        """Lock the journal. Resume an interrupted run, or begin a new one unless a file in `taken` exists."""
        path = journal_path(out, self.shard)
        journal = Journal.hold(path)
        try:
            if journal.fresh or overwrite:
                for other, remedy in {} if overwrite else taken.items():
                    tables.refuse_existing(other, remedy)
                journal.begin(self.head)
            elif resume:
                journal.catch_up(self.head, self.keep)
            else:
                raise InputError(
                    f"{path}: holds the rows of an interrupted run; continue it with --resume (resume=True), "
                    "or discard it with --overwrite (overwrite=True)"
                )
        except BaseException:
            if journal.fresh:
                journal.discard()
            journal.close()
            raise
        try:
            yield journal
        except Unwritable as error:
            raise Unwritable(
                f"{error}; {self.count:,} of {self.rows.size:,} rows are kept in {path}: make room, or "
                "permit the writing, and continue with --resume (resume=True)"
            ) from None
        except SweepInterrupted:
            raise
        except KeyboardInterrupt:  # Ctrl-C while the result was written
            raise SweepInterrupted(self.count, self.rows.size, path) from None
        finally:
            journal.close()


@dataclass(frozen=True)
class Plan:
    """A preview of a sweep, made by `jaxacct.sweeps.plan`.

    Parameters
    ----------
    configurations : number of rows of the whole grid.
    quantities : for each quantity, the number of rows of the whole grid that are solved for it.
    shard : the numbers (i, n) of this slice, the i-th of n.
    own, blocks : number of rows and of blocks of this slice.
    block : number of rows in a block.
    backend : "numpy" or "xla", which runs the kernels.  The default on a CPU is "numpy" for up to 40,000 rows
        (2,400 with repetitions; 1,500 without repetitions if `jaxacct warm` has stored programs).
    devices : number and platform of the devices.
    sample : number of configurations, spread over the slice, that were solved to measure the speed.
    seconds, first_seconds : estimated time for this slice's rows, and time for compiling, measured on the sample.
    memory_bytes : estimate: the process's largest use so far, plus the slice's table, plus the lattice engine's limit.

    >>> from jaxacct.sweeps import plan
    >>> p = plan({"noise_multiplier": [2.0, 4.0], "sampling_probability": 1, "steps": 1, "delta": 1e-5})
    >>> p.own, p.shard, p.seconds >= 0
    (2, (1, 1), True)
    """

    configurations: int
    quantities: dict[str, int]
    shard: tuple[int, int]
    own: int
    blocks: int
    block: int
    backend: str
    devices: str
    sample: int
    seconds: float
    first_seconds: float
    memory_bytes: int


def lay_out(grid: Any, mode: str, quantity: str | None, block: int | None, shard: str | None, **asked: Any) -> Work:
    """Return the `Work` of a sweep, and refuse invalid arguments. `asked` are the arguments of `settings`."""
    configurations = _configurations(grid, mode, quantity)
    chosen = settings(configurations, **asked)
    if block is None:
        sixteenth = 1 << math.ceil(math.log2(max(len(configurations) / 16, 1)))
        block = min(max(sixteenth, SMALLEST_BLOCK), LARGEST_BLOCK)
    size = int(check_one("block", block, COUNT, "one length serves the whole sweep"))
    mine = slice_of(shard)  # slice i of n takes every n-th block, from the i-th on
    blocks = []
    for word in tables.solved_for({"quantity": configurations.quantity}):
        rows = np.flatnonzero(configurations.quantity == word)
        blocks += [rows[start : start + size] for start in range(0, rows.size, size)]
    return Work(configurations, chosen, tables.layout(configurations), size, mine, blocks[mine[0] - 1 :: mine[1]])


def plan(
    grid: Mapping[str, Any] | Sequence[Mapping[str, Any]] | Grid | str | os.PathLike[str] | Any,
    *,
    mode: str = "product",
    quantity: str | None = None,
    relation: str | None = None,
    engine: str = "auto",
    rtol: float = 1e-4,
    backend: str = "auto",
    block: int | None = None,
    shard: str | None = None,
) -> Plan:
    """Preview `jaxacct.sweep` with these arguments.

    A sample of up to 256 configurations of each quantity is solved twice, once to compile and once for the time.

    Parameters
    ----------
    grid, mode, quantity, relation, engine, rtol, backend, block, shard : as in `jaxacct.sweep`.

    Returns
    -------
    Plan

    >>> from jaxacct.sweeps import plan
    >>> p = plan({"noise_multiplier": [2.0, 4.0], "sampling_probability": 1, "steps": [1, 2], "delta": 1e-5})
    >>> p.configurations, p.quantities, p.blocks, p.sample
    (4, {'epsilon': 4}, 1, 4)
    """
    work = lay_out(grid, mode, quantity, block, shard, relation=relation, engine=engine, rtol=rtol, backend=backend)
    asked, mine = work.grid.quantity, work.rows
    count = {word: int(np.sum(asked == word)) for word in tables.solved_for({"quantity": asked})}
    seconds = first = 0.0
    sampled = 0
    for word in count:
        rows = mine[asked[mine] == word]
        if rows.size == 0:
            continue
        sample = rows[np.linspace(0, rows.size - 1, min(rows.size, 256)).astype(int)]
        begin = time.perf_counter()
        work.solved(sample)
        middle = time.perf_counter()
        work.solved(sample)
        warm = time.perf_counter() - middle
        seconds += warm * rows.size / sample.size
        first += max(middle - begin - warm, 0.0)
        sampled += sample.size
    each, used = local(), 0
    if os.name == "posix":  # other systems do not report the memory that was used
        import resource

        used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return Plan(
        configurations=len(work.grid),
        quantities=count,
        shard=work.shard,
        own=mine.size,
        blocks=len(work.blocks),
        block=work.block,
        backend=work.settings.backend,
        devices=f"{len(each)} {each[0].platform}",
        sample=sampled,
        seconds=seconds,
        first_seconds=first,
        memory_bytes=used + 8 * len(work.columns) * mine.size + GIBIBYTE,
    )


def _configurations(grid: Any, mode: str, quantity: str | None) -> Grid:
    if isinstance(grid, Mapping):
        return expand(grid, mode=mode, quantity=quantity)
    if is_frame(grid) or isinstance(grid, list | tuple):
        if mode != "product":
            raise InputError("mode is for a dict of arrays; every record is one configuration")
        if quantity is not None:
            choice("quantity", quantity, QUANTITIES)
        return as_grid(grid, quantity)
    if mode != "product" or quantity is not None:
        raise InputError("mode and quantity are for a dict of arrays; a grid file states them itself")
    if isinstance(grid, Grid):
        return grid
    if not isinstance(grid, str | os.PathLike):
        raise InputError(
            f"grid = {shown(grid)} of type {type(grid).__name__} is no grid; give a dict of fields, a DataFrame, a "
            "list of dicts, or the path of a .toml or .csv file"
        )
    return read_grid(grid)
