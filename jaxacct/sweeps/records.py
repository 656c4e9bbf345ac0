"""Grids from records: rows of a CSV, dicts, or a pandas DataFrame, with columns of the user's own beside the inputs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxacct.core.keywords import meant
from jaxacct.core.validation import InputError, shown
from jaxacct.mechanisms.dp_sgd_run import SOURCES
from jaxacct.sweeps.columns import ANSWER, WORDS
from jaxacct.sweeps.grid import INPUTS, QUANTITIES, Grid, concatenate, expand
from jaxacct.sweeps.repetitions import FIELDS as LAW_NUMBERS

__all__ = ["as_grid", "grid_of_records", "is_records"]

COLUMNS = ("name", "quantity", *INPUTS)
"""Columns with a meaning; all others are kept beside the answers."""
SETTLED_BY = {
    **SOURCES,
    "sampling_probability": ("dataset_size", *SOURCES["sampling_probability"]),
    **{f"{prefix}{name}": (name, f"target_{name}") for name in ("epsilon", "delta") for prefix in ("", "target_")},
}
"""Inputs that nobody needs beside another one, so that no column is taken for them."""
LIKENESS = 0.8
"""How much a column must look like an input that is not there to be taken for a misspelling of it."""


def is_records(grid: Any) -> bool:
    """Whether a grid is a DataFrame or a list of dicts."""
    return _is_frame(grid) or isinstance(grid, list | tuple)


def as_grid(grid: Any, quantity: str | None = None) -> Grid:
    """The grid of a DataFrame or a list of dicts, one configuration each, in their order.

    None and NaN in an input are values left out.  Columns that are no inputs are kept beside the answers, and so is
    the index of a DataFrame.  A column that looks like an input that is not there is refused.

    >>> run = {"noise_multiplier": 2.0, "sampling_probability": 1, "steps": 1, "delta": 1e-5}
    >>> grid = as_grid([run | {"site": "A"}, run | {"site": "B"}])
    >>> grid.beside["site"].tolist(), str(grid.quantity[0])
    (['A', 'B'], 'epsilon')
    """
    if _is_frame(grid):
        names = [str(name) for name in grid.columns]
        columns = {name: grid.iloc[:, place] for place, name in enumerate(names)}
        cells = {name: _with_none(column) if name in COLUMNS else column for name, column in columns.items()}
        return grid_of_records(names, cells, [f"row {label!r}" for label in grid.index], quantity, grid.index)
    for place, record in enumerate(grid):
        if not isinstance(record, Mapping):
            raise InputError(
                f"grid[{place}] = {shown(record)} of type {type(record).__name__} is no record; give a list of dicts "
                "such as {'noise_multiplier': 1.0, 'sampling_probability': 0.01, 'steps': 1000, 'delta': 1e-5}"
            )
    names = list(dict.fromkeys(str(name) for record in grid for name in record))
    texts = [{str(name): value for name, value in record.items()} for record in grid]
    for place, (record, text) in enumerate(zip(grid, texts, strict=True)):
        if len(text) < len(record):
            raise InputError(f"record {place}: two of its columns have the same name as text; rename one of them")
    cells = {name: [record.get(name) for record in texts] for name in names}
    cells |= {name: _with_none(column) for name, column in cells.items() if name in COLUMNS}
    return grid_of_records(names, cells, [f"record {place}" for place in range(len(grid))], quantity)


def grid_of_records(
    names: Sequence[str],
    cells: Mapping[str, Any],
    places: Sequence[str],
    quantity: str | None = None,
    index: Any = None,
) -> Grid:
    """The grid of columns of cells, None where an input is left out; errors name the place of the row.

    names : in order, to find one that is there twice.  quantity : of rows that state none.
    """
    for number, name in enumerate(names):
        if name in names[:number]:
            raise InputError(f"column {name!r} appears twice; leave one out")
    if not places:
        raise InputError("no configurations; give at least one row")
    _refuse_misspelt(names)
    known = {name: cells[name] for name in names if name in COLUMNS}
    for name, column in known.items():
        for place, cell in zip(places, column, strict=True):
            if isinstance(cell, list | tuple) or bool(getattr(cell, "shape", ())):
                raise InputError(
                    f"{place}: {name} = {shown(cell)} must be one value; a row is one configuration, write one for each"
                )
    rows = [
        {name: value for name, value in zip(known, row, strict=True) if value is not None}
        for row in zip(*known.values(), strict=True)
    ]
    patterns: dict[tuple[Any, ...], list[int]] = {}
    for row, record in enumerate(rows):
        if quantity is not None:
            record.setdefault("quantity", quantity)
        pattern = (record.get("quantity"), *(field for field in record if field in INPUTS))
        patterns.setdefault(pattern, []).append(row)
    order = np.concatenate([np.asarray(group) for group in patterns.values()])
    groups = [_group([rows[row] for row in group], [places[row] for row in group]) for group in patterns.values()]
    grid = concatenate(groups).take(np.argsort(order))
    beside = {name: _kept(cells[name]) for name in names if name not in COLUMNS}
    return Grid(grid.name, grid.quantity, grid.inputs, beside, index)


def _refuse_misspelt(names: Sequence[str]) -> None:
    """Refuse a column that is taken for a missing input, or that would stand in the way of an answer."""
    given = {name for one in names for name in (one, *SETTLED_BY.get(one, ()))}
    given |= set() if "repetitions" in given else set(LAW_NUMBERS)
    absent = [name for name in COLUMNS if name not in given]
    for name in names:
        if name in COLUMNS:
            continue
        if name in (*ANSWER, *WORDS, "relation"):
            raise InputError(f"column {name!r} has the name of a column of the answer; rename it, or leave it out")
        right = meant(name, absent, LIKENESS)
        if right:
            raise InputError(f"unknown column {name!r}; did you mean {right!r}? rename it, whichever it is")
    if not any(name in INPUTS for name in names):
        raise InputError(f"no column is an input; give four of {', '.join(QUANTITIES)}")


def _group(records: list[dict[str, Any]], places: list[str]) -> Grid:
    """Rows that fill in the same columns, as one grid; an error names the row."""
    fields = [field for field in records[0] if field in INPUTS]
    quantity = records[0].get("quantity")
    try:
        grid = expand({f: [r[f] for r in records] for f in fields}, mode="zip", quantity=quantity)
    except InputError:
        for place, record in zip(places, records, strict=True):
            try:
                expand({field: record[field] for field in fields}, mode="zip", quantity=quantity)
            except InputError as error:
                raise InputError(f"{place}: {error}") from None
        raise
    return Grid(np.array([str(r.get("name", "")) for r in records], dtype=object), grid.quantity, grid.inputs)


def _with_none(cells: Any) -> list[Any]:
    """The cells of an input, None for those that are left out."""
    return [None if _left_out(cell) else cell for cell in cells]


def _left_out(value: Any) -> bool:
    """None, NaN, pandas' NA and NaT, and empty text."""
    if value is None or type(value).__name__ in ("NAType", "NaTType"):
        return True
    return (isinstance(value, float | np.floating) and math.isnan(value)) or (
        isinstance(value, str) and not value.strip()
    )


def _kept(cells: Any) -> np.ndarray:
    """A column of the user's own: numbers as numbers, anything else as it is."""
    if hasattr(cells, "to_numpy"):
        return np.asarray(cells.to_numpy())
    kinds = {type(cell) for cell in cells}
    if kinds <= {int, float, bool} and len(kinds) == 1:
        array = np.array(cells)
        if array.dtype.kind in "fib":
            return array
    if kinds <= {int, float, type(None)} and kinds != {type(None)}:
        return np.array([np.nan if cell is None else cell for cell in cells], np.float64)
    column = np.empty(len(cells), object)
    column[:] = ["" if cell is None else cell for cell in cells]
    return column


def _is_frame(grid: Any) -> bool:
    """Whether something is a pandas.DataFrame; pandas is not imported to find out."""
    return all(hasattr(grid, name) for name in ("iloc", "columns", "index"))
