"""Planning and running a sweep: each block enters the table and the journal as soon as it is solved."""

from __future__ import annotations

import contextlib
import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxacct.core.files import Unwritable
from jaxacct.core.keywords import with_hints
from jaxacct.core.progress import Progress
from jaxacct.core.validation import COUNT, GIBIBYTE, InputError, check_flag, check_one, choice, shown
from jaxacct.engines import programs
from jaxacct.engines.backend import fixed
from jaxacct.engines.devices import local
from jaxacct.sweeps.grid import QUANTITIES, Grid, expand
from jaxacct.sweeps.journal import (
    Journal,
    header,
    journal_path,
    kept_block,
    part_path,
    slice_of,
    traces,
    wait_and_merge,
    wait_for_merge,
)
from jaxacct.sweeps.read import as_grid, is_records, read_grid
from jaxacct.sweeps.solve import Settings, settings, solve
from jaxacct.sweeps.table import (
    REPLACE,
    Table,
    blank,
    check_result,
    fill,
    layout,
    out_path,
    refuse_existing,
    solved_for,
    write,
)

SMALLEST_BLOCK, LARGEST_BLOCK = 512, 4096
"""Rows solved between two writes: a sixteenth of the grid, within these limits.

Fewer would not fill the compiled programs, more would be lost when a process is killed."""
SAMPLE_ROWS = 256
"""Configurations of each quantity that a dry run solves to measure the rate, in a second or so."""


class SweepInterrupted(KeyboardInterrupt):
    """Ctrl-C during a sweep: how many rows were done, and the journal that holds them.

    Parameters
    ----------
    done, total : int
        Rows done, and rows of this slice.
    journal : Path or None
        None for a sweep without `out`, of which nothing is kept.

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
) -> Table:
    """Solve every DP-SGD configuration of a grid: epsilon, delta, or a calibrated parameter.

    All local devices share the work.  With `out`, solved blocks go to a journal beside it (its name with .journal
    added), which survives whatever ends the process; the result appears when it is complete.  A row on which the
    engines raise has the status "failed" and the bracket that always holds; the others are not touched, and a warning
    says what was raised.

    Parameters
    ----------
    grid : dict of numbers, arrays and ranges; DataFrame; list of dicts; or the path of a .toml or .csv grid
        Its fields are noise_multiplier, sampling_probability, steps, epsilon and delta (for calibrations also
        called target_epsilon and target_delta); the one left out is solved for.  dataset_size, batch_size and
        epochs may stand for sampling_probability and steps.  See `jaxacct.sweeps.read_grid` for files.
        Of a DataFrame or a list of dicts every row is one configuration; columns that are no inputs are kept beside the
        answers, in order, and `to_pandas` of the result has the index of the DataFrame.
    mode : {"product", "zip"}
        For a dict: every combination (the last field varies fastest), or the arrays broadcast together.
    quantity : str, optional
        Except for files: what is solved for, as a check on what the fields leave out.
    out : path ending in .csv or .parquet, optional
        The result, which must not be there already (see overwrite).
    relation, engine, rtol, backend
        As in `jaxacct.epsilon` and `jaxacct.calibrate_noise_multiplier` (calibrations choose the engine).
    progress : bool, optional
        A progress bar on standard error; by default only on a terminal.
    block : int, optional
        Rows solved between two writes; by default a sixteenth of the grid, at least 512 and at most 4096.
    resume : bool
        Go on from the journal of an interrupted run, where there is one, in its blocks.
    overwrite : bool
        Discard such a journal, and replace an earlier result when this one is complete.
    shard : "i/n", optional
        Solve the i-th of n slices into the part file OUT.i-of-n.part, for `jaxacct.sweeps.merge`.
    distributed : bool
        After `jax.distributed.initialize()`: every process solves its slice, the first one merges them.  `out`
        must be on a file system that all of them share.

    Returns
    -------
    Table
        Columns: name (if any), columns of the grid that are no inputs, quantity, the inputs, relation, lower, estimate,
        upper, kind, status, engine.  A solved noise multiplier, sampling probability or steps has its own column, and
        the bracket is of the epsilon it gives.  Rows are in the order of the grid (of this slice, except where all are
        merged).

    Raises
    ------
    InputError
        One line for invalid values, an unreadable file, a result that is there already, or a journal that is in the
        way, of another sweep or in use, before anything is solved; also for a disk that is full, with what is kept.
    SweepInterrupted
        Ctrl-C; a KeyboardInterrupt that says how many rows are done and where they are.

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
    path = None if out is None else out_path(out)
    if path is not None and resume and block is None:
        block = kept_block(traces(path, slice_of(shard)))
    work = lay_out(grid, mode, quantity, relation, engine, rtol, backend, block, shard)
    if work.grid.beside and work.shard[1] > 1:
        raise InputError(
            f"column {next(iter(work.grid.beside))!r} is no input, and slices do not keep such columns; "
            "leave it out, or sweep without shard"
        )
    if path is None:
        for name, given in {"resume": resume, "overwrite": overwrite, "shard": shard is not None}.items():
            if given:
                raise InputError(f"{name} needs out; name the result, such as out='result.csv'")
        return work.whole(_Slice(work).solve(progress))
    check_result(path)
    if isinstance(grid, str | os.PathLike) and path.exists() and path.samefile(grid):
        raise InputError(f"{path}: the result would overwrite the grid; give another name")
    run = _Run(work, path, resume, overwrite)
    if work.shard[1] == 1:
        return work.whole(run.whole(progress))
    table = run.part(progress if work.shard[0] == 1 or not distributed else False, merged=distributed)
    if distributed and work.shard[0] == 1:
        return wait_and_merge(path, run.head)
    if distributed:
        wait_for_merge(path, work.shard)
    return table


class _Run:
    """The rows of one slice on their way to its file, by way of a journal that is held while this runs."""

    def __init__(self, work: Work, out: Path, resume: bool, overwrite: bool) -> None:
        self.work, self.out, self.resume, self.overwrite = work, out, resume, overwrite
        self.head = header(work.grid, work.columns, work.settings, work.block, work.shard)
        self.path = journal_path(out, work.shard)
        self.slice = _Slice(work)

    def whole(self, show: bool | None) -> Table:
        """All blocks: into the journal, then the result, then the journal is done with."""

        def finish(table: Table, journal: Journal) -> None:
            write(self.work.whole(table), self.out)
            journal.discard()

        return self._solve(show, self._begun({self.out: REPLACE}), finish)

    def part(self, show: bool | None, merged: bool) -> Table:
        """The blocks of one slice, into a journal that becomes its part; a part that is there already is kept."""
        part = part_path(self.out, self.work.shard)
        if part.exists() and self.resume:
            with contextlib.closing(Journal.hold(self.path)) as journal:
                if journal.fresh:
                    journal.take_over(part)
        taken = {part: f"keep it with --resume (resume=True), or {REPLACE}"} | ({self.out: REPLACE} if merged else {})
        journal = self._begun(taken)
        part.unlink(missing_ok=True)  # an earlier one, which is not to be taken for this one

        return self._solve(show, journal, lambda table, journal: journal.become(part))

    def _begun(self, taken: dict[Path, str]) -> Journal:
        """The journal, held, with the rows that it keeps from an interrupted run handed to the slice.

        taken : the files that must not be there already, with the remedy.  A journal is begun only where they are
        not there, or may be replaced, so one that is there permits that.
        """
        journal = Journal.hold(self.path)
        try:
            if journal.fresh and not self.overwrite:
                for path, remedy in taken.items():
                    refuse_existing(path, remedy)
            if not journal.fresh and not self.overwrite and not self.resume:
                raise InputError(
                    f"{self.path}: holds the rows of an interrupted run; continue it with --resume (resume=True), "
                    "or discard it with --overwrite (overwrite=True)"
                )
            if journal.fresh or self.overwrite:
                journal.begin(self.head)
            else:
                journal.catch_up(self.head, self.slice.keep)
        except BaseException:
            if journal.fresh:
                journal.discard()
            journal.close()
            raise
        return journal

    def _solve(self, show: bool | None, journal: Journal, finish: Callable[[Table, Journal], None]) -> Table:
        """Solve the rows that the journal lacks, and write all rows to their file; then the journal is removed."""
        try:
            table = self.slice.solve(show, journal)
            finish(table, journal)
        except Unwritable as error:
            done, total = int(np.sum(self.slice.done)), self.slice.rows.size
            raise Unwritable(
                f"{error}; {done:,} of {total:,} rows are kept in {self.path}: make room, or permit the writing, "
                "and continue with --resume (resume=True)"
            ) from None
        except SweepInterrupted:
            raise
        except KeyboardInterrupt:  # while the result was written
            raise SweepInterrupted(int(np.sum(self.slice.done)), self.slice.rows.size, self.path) from None
        finally:
            journal.close()
        return table


class _Slice:
    """The rows of this run: the table that they fill, and which of them are solved."""

    def __init__(self, work: Work) -> None:
        self.work, self.rows = work, work.rows
        self.table = blank(work.columns, self.rows.size)
        self.done = np.zeros(self.rows.size, bool)

    def keep(self, rows: np.ndarray, piece: Table) -> None:
        index = np.searchsorted(self.rows, rows)
        fill(self.table, index, piece)
        self.done[index] = True

    def solve(self, show: bool | None, journal: Journal | None = None) -> Table:
        """The table, once the blocks that are not solved yet are solved and in the journal."""
        work, total, done = self.work, self.rows.size, int(np.sum(self.done))
        progress = Progress(total, show, done, apart=programs.seconds)
        progress.update(done)
        try:
            for rows in work.blocks:
                if self.done[np.searchsorted(self.rows, rows[0])]:
                    continue
                with fixed(work.settings.backend == "numpy"):
                    piece = solve(work.grid.take(rows), work.settings, work.columns, len(work.grid) == 1)
                if journal is not None:
                    journal.append(rows, piece)
                self.keep(rows, piece)
                done += rows.size
                progress.update(done)
        except KeyboardInterrupt:
            raise SweepInterrupted(done, total, None if journal is None else journal.path) from None
        finally:
            progress.close()
        return self.table


@dataclass(frozen=True, eq=False)
class Work:
    """A sweep laid out: configurations, settings, and the blocks of rows that this run solves.

    A block holds rows of one quantity and is solved by itself, so that no answer depends on what else the run
    does.  Slice i of n takes every n-th block, from the i-th.
    """

    grid: Grid
    settings: Settings
    columns: tuple[str, ...]
    block: int
    shard: tuple[int, int]
    blocks: list[np.ndarray]

    @property
    def rows(self) -> np.ndarray:
        """The rows of this slice in the order of the grid."""
        return np.sort(np.concatenate([np.zeros(0, np.int64), *self.blocks]))

    def whole(self, table: Table) -> Table:
        """The whole table with the grid's other columns; journals and slices hold the table without them."""
        return table.beside(self.grid.beside, self.grid.index)


@dataclass(frozen=True)
class Plan:
    """A preview of a sweep: counts, and the time that a sample of it took.  `jaxacct.sweeps.plan` makes one.

    Parameters
    ----------
    configurations : int
        Rows of the whole grid.
    quantities : dict of str and int
        How many rows are solved for each quantity.
    shard : (i, n)
        The slice, i-th of n.
    own : int
        Rows of this slice.
    blocks, block : int
        Blocks of this slice, and rows in a block.
    backend : {"numpy", "xla"}
        What evaluates the kernels: NumPy for up to 40,000 rows (2,400 with repetitions) on a CPU, unless something
        else was asked for.
    devices : str
        Their number and platform.
    sample : int
        Configurations that were solved to measure the rate, spread over the slice.
    seconds : float
        Estimate for solving the rows of this slice.
    first_seconds : float
        What compiling the programs took here, once, for that sample.
    memory_bytes : int
        The process with the sample solved, the whole table, and the limit of the lattice engine.

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


def lay_out(
    grid: Mapping[str, Any] | Sequence[Mapping[str, Any]] | Grid | str | os.PathLike[str] | Any,
    mode: str,
    quantity: str | None,
    relation: str | None,
    engine: str,
    rtol: float,
    backend: str,
    block: int | None,
    shard: str | None,
) -> Work:
    """The work of a sweep with these arguments, or a refusal of them."""
    configurations = _configurations(grid, mode, quantity)
    chosen = settings(configurations, relation, engine, rtol, backend)
    if block is None:
        sixteenth = 1 << math.ceil(math.log2(max(len(configurations) / 16, 1)))
        block = min(max(sixteenth, SMALLEST_BLOCK), LARGEST_BLOCK)
    size = int(check_one("block", block, COUNT, "one length serves the whole sweep"))
    mine = slice_of(shard)
    blocks = []
    for word in solved_for({"quantity": configurations.quantity}):
        rows = np.flatnonzero(configurations.quantity == word)
        blocks += [rows[start : start + size] for start in range(0, rows.size, size)]
    return Work(configurations, chosen, layout(configurations), size, mine, blocks[mine[0] - 1 :: mine[1]])


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
    """What `jaxacct.sweep` with these arguments would do and about how long it would take; solves a small sample twice.

    The sample has up to 256 configurations of each quantity, evenly spread over the grid; its first solution
    compiles the programs, the second one is timed.

    Parameters
    ----------
    grid, mode, quantity, relation, engine, rtol, backend, block, shard
        As in `jaxacct.sweep`.

    Returns
    -------
    Plan

    >>> from jaxacct.sweeps import plan
    >>> p = plan({"noise_multiplier": [2.0, 4.0], "sampling_probability": 1, "steps": [1, 2], "delta": 1e-5})
    >>> p.configurations, p.quantities, p.blocks, p.sample
    (4, {'epsilon': 4}, 1, 4)
    """
    work = lay_out(grid, mode, quantity, relation, engine, rtol, backend, block, shard)
    count = {word: int(np.sum(work.grid.quantity == word)) for word in solved_for({"quantity": work.grid.quantity})}
    mine = work.rows
    seconds = first = 0.0
    sampled = 0
    for word in count:
        rows = mine[work.grid.quantity[mine] == word]
        if rows.size == 0:
            continue
        sample = work.grid.take(rows[np.linspace(0, rows.size - 1, min(rows.size, SAMPLE_ROWS)).astype(int)])
        cold, warm = (_timed(sample, work) for _ in range(2))
        seconds += warm * rows.size / len(sample)
        first += max(cold - warm, 0.0)
        sampled += len(sample)
    each = local()
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
        memory_bytes=_resident() + 8 * len(work.columns) * mine.size + GIBIBYTE,
    )


def _configurations(grid: Any, mode: str, quantity: str | None) -> Grid:
    if isinstance(grid, Mapping):
        return expand(grid, mode=mode, quantity=quantity)
    if is_records(grid):
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


def _timed(sample: Grid, work: Work) -> float:
    begin = time.perf_counter()
    with fixed(work.settings.backend == "numpy"):
        solve(sample, work.settings, work.columns, len(work.grid) == 1)
    return time.perf_counter() - begin


def _resident() -> int:
    """The largest memory that this process has used so far, if the system reports it."""
    if os.name != "posix":
        return 0
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak
