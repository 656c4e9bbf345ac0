"""What a sweep will do: its blocks, which of them are its own, and an estimate of time and memory."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxacct.core.validation import COUNT, GIBIBYTE, InputError, check_one, choice, shown
from jaxacct.engines.backend import fixed
from jaxacct.engines.devices import local
from jaxacct.sweeps.columns import layout, solved_for
from jaxacct.sweeps.grid import QUANTITIES, Grid, expand
from jaxacct.sweeps.parts import slice_of
from jaxacct.sweeps.read import read_grid
from jaxacct.sweeps.records import as_grid, is_records
from jaxacct.sweeps.solve import Settings, settings, solve

SMALLEST_BLOCK, LARGEST_BLOCK = 512, 4096
"""Rows solved between two writes: a sixteenth of the grid, within these limits.

Fewer would not fill the compiled programs, more would be lost when a process is killed."""
SAMPLE_ROWS = 256
"""Configurations of each quantity that a dry run solves to measure the rate, in a second or so."""


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


@dataclass(frozen=True)
class Plan:
    """What a sweep would do: counts, and what a sample of it took.  `jaxacct.sweeps.plan` makes one.

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

    Raises
    ------
    InputError
        Invalid values, or an unreadable grid file.

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
    """The largest memory that this process has had so far, where the system tells."""
    if os.name != "posix":
        return 0
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak
