"""Running a sweep: the grid in chunks, every chunk written to the result file as soon as it is done."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxacct import account, calibrate
from jaxacct.bounds import Bounds
from jaxacct.mechanisms import RELATIONS, dp_sgd
from jaxacct.sweep.grid import Grid, expand
from jaxacct.sweep.progress import Progress
from jaxacct.sweep.read import read_grid
from jaxacct.sweep.table import ANSWER, WORDS, Sink, Table, join, layout, open_sink
from jaxacct.validation import COUNT, OPEN_PROBABILITY, InputError, check, choice

CHUNK = 512
"""Rows solved between two writes."""

_CALIBRATIONS: dict[str, Callable[..., calibrate.Calibration]] = {
    "noise_multiplier": calibrate.calibrate_noise_multiplier,
    "sampling_probability": calibrate.calibrate_sampling_probability,
    "steps": calibrate.calibrate_steps,
}


class SweepInterrupted(KeyboardInterrupt):
    """Ctrl-C during a sweep: how many rows were done, and the file that holds them (None without one)."""

    def __init__(self, done: int, total: int, out: Path | None) -> None:
        kept = f", kept in {out}" if out is not None else ""
        super().__init__(f"interrupted after {done:,} of {total:,} rows{kept}")
        self.done, self.total, self.out = done, total, out


class _Settings(NamedTuple):
    relation: str
    engine: str
    rtol: float


def sweep(
    grid: Mapping[str, Any] | Grid | str | os.PathLike[str],
    *,
    mode: str = "product",
    quantity: str | None = None,
    out: str | os.PathLike[str] | None = None,
    relation: str = "add_or_remove_one",
    engine: str = "auto",
    rtol: float = 1e-4,
    progress: bool | None = None,
    chunk: int = CHUNK,
) -> Table:
    """Solve every DP-SGD configuration of a grid: epsilon, delta, or a calibrated parameter.

    Parameters
    ----------
    grid : dict of numbers, arrays and ranges, or the path of a .toml or .csv grid
        Its fields are noise_multiplier, sampling_probability, steps, epsilon and delta (for calibrations also
        called target_epsilon and target_delta); the one left out is solved for.  dataset_size, batch_size and
        epochs may stand for sampling_probability and steps.  See `jaxacct.sweep.read_grid` for files.
    mode : {"product", "zip"}
        For a dict: every combination (the last field varies fastest), or the arrays broadcast together.
    quantity : str, optional
        For a dict: what is solved for, as a check on what the fields leave out.
    out : path ending in .csv or .parquet, optional
        Rows are written there chunk by chunk; an interrupt loses none of the chunks done.
    relation, engine, rtol
        As in `jaxacct.epsilon` and `jaxacct.calibrate_noise_multiplier` (calibrations choose the engine).
    progress : bool, optional
        A progress bar on standard error; by default only on a terminal.
    chunk : int
        Rows solved and written at a time.

    Returns
    -------
    Table
        Columns: name (if any), quantity, the inputs, relation, lower, estimate, upper, kind, status, engine.
        A solved noise multiplier, sampling probability or steps has its own column, and the bracket is of the
        epsilon it gives.  Rows are in the order of the grid.

    Raises
    ------
    InputError
        One line for invalid values or an unreadable file, before anything is solved.
    SweepInterrupted
        Ctrl-C; a KeyboardInterrupt that says how many rows are done and where they are.

    >>> from jaxacct.sweep import sweep
    >>> t = sweep({"noise_multiplier": [2.0, 4.0], "sampling_probability": 1, "steps": 1, "delta": 1e-5})
    >>> [round(x, 4) for x in t["upper"].tolist()]
    [1.9931, 0.9263]
    """
    configurations = _configurations(grid, mode, quantity)
    choice("relation", relation, RELATIONS)
    choice("engine", engine, account.ENGINES)
    _refuse_settings(configurations, relation, engine)
    rows = int(np.asarray(check("chunk", chunk, COUNT)).item())
    settings = _Settings(relation, engine, float(np.asarray(check("rtol", rtol, OPEN_PROBABILITY)).item()))
    if out is None:
        return _run(configurations, settings, rows, progress, None, None)
    path = Path(out)
    if isinstance(grid, str | os.PathLike) and path.exists() and path.samefile(grid):
        raise InputError(f"{path}: the result would overwrite the grid; give another name")
    sink = open_sink(path, layout(configurations))
    try:
        return _run(configurations, settings, rows, progress, sink, path)
    finally:
        sink.close()


def _configurations(grid: Any, mode: str, quantity: str | None) -> Grid:
    if isinstance(grid, Mapping):
        return expand(grid, mode=mode, quantity=quantity)
    if mode != "product" or quantity is not None:
        raise InputError("mode and quantity are for a dict of arrays; a grid file states them itself")
    return grid if isinstance(grid, Grid) else read_grid(grid)


def _refuse_settings(grid: Grid, relation: str, engine: str) -> None:
    """Calibrations choose their own engine and know the add and remove relations only."""
    calibrated = [word for word in _CALIBRATIONS if word in grid.quantity]
    if calibrated and engine != "auto":
        raise InputError(f"engine = {engine!r} is not available for solving {calibrated[0]}; use 'auto'")
    if calibrated and relation == "replace_one":
        raise InputError(
            f"relation = 'replace_one' is not available for solving {calibrated[0]}; "
            "use 'add_or_remove_one', 'add_one' or 'remove_one'"
        )


def _run(grid: Grid, settings: _Settings, chunk: int, show: bool | None, sink: Sink | None, out: Path | None) -> Table:
    names, total, done = layout(grid), len(grid), 0
    pieces: list[Table] = []
    progress = Progress(total, show)
    progress.update(0)
    try:
        for start in range(0, total, chunk):
            piece = _chunk(grid.take(slice(start, start + chunk)), settings, names)
            if sink is not None:
                sink.write(piece)
            pieces.append(piece)
            done += len(piece)
            progress.update(done)
    except KeyboardInterrupt:
        raise SweepInterrupted(done, total, out) from None
    finally:
        progress.close()
    return join(pieces)


def _chunk(grid: Grid, settings: _Settings, names: tuple[str, ...]) -> Table:
    """Solve the rows of each quantity together and put the answers back in order."""
    size = len(grid)
    columns: dict[str, np.ndarray] = {name: np.full(size, np.nan) for name in names}
    columns |= {name: np.full(size, "", dtype=object) for name in WORDS}
    columns |= grid.inputs
    columns |= {"quantity": grid.quantity, "relation": np.full(size, settings.relation, dtype=object)}
    if "name" in names:
        columns["name"] = grid.name
    for quantity in dict.fromkeys(grid.quantity):
        rows = np.flatnonzero(grid.quantity == quantity)
        answer = _solve(str(quantity), grid.take(rows).inputs, settings)
        for name, values in answer.items():
            column = np.array(columns[name])
            column[rows] = values
            columns[name] = column
    return Table({name: columns[name] for name in names})


def _solve(quantity: str, inputs: Mapping[str, np.ndarray], settings: _Settings) -> dict[str, Any]:
    """The columns that one quantity's rows gain."""
    if quantity in _CALIBRATIONS:
        known = ("noise_multiplier", "sampling_probability", "steps", "target_epsilon", "target_delta")
        fields: dict[str, Any] = {name: inputs[name] for name in known if name != quantity}
        found = _CALIBRATIONS[quantity](**fields, relation=settings.relation, rtol=settings.rtol)
        status = np.where(found.status == "ok", found.epsilon.status, found.status)
        return _columns(found.epsilon) | {quantity: found.value, "status": status.astype(object)}
    mechanism = dp_sgd(inputs["noise_multiplier"], inputs["sampling_probability"], inputs["steps"])
    if quantity == "epsilon":
        return _columns(account.epsilon(mechanism, inputs["delta"], **settings._asdict()))
    return _columns(account.delta(mechanism, inputs["epsilon"], **settings._asdict()))


def _columns(bounds: Bounds) -> dict[str, Any]:
    return {name: getattr(bounds, name) for name in ANSWER} | {
        name: np.asarray(getattr(bounds, name)).astype(object) for name in WORDS
    }
