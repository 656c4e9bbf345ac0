"""Grids from files, DataFrames and lists of dicts.

A TOML file has blocks of lists and ranges.  A CSV, a DataFrame and a list of dicts have one configuration per row, and
may have columns of the user beside the inputs.
"""

from __future__ import annotations

import csv
import math
import os
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxacct.core.files import reading
from jaxacct.core.keywords import meant
from jaxacct.core.validation import InputError, shown
from jaxacct.mechanisms.dp_sgd_run import SOURCES
from jaxacct.sweeps.grid import (
    ANSWER,
    FIELDS,
    INPUTS,
    LAW_NUMBERS,
    QUANTITIES,
    WORDS,
    Grid,
    concatenate,
    expand,
    suggest,
)

_SETTINGS = ("name", "quantity", "zip")
"""Keys of a TOML block that are no inputs."""
COLUMNS = ("name", "quantity", *INPUTS)
"""Columns with a meaning; all other columns are kept beside the answers."""
SETTLED_BY = {
    **SOURCES,
    "sampling_probability": ("dataset_size", *SOURCES["sampling_probability"]),
    **{f"{prefix}{name}": (name, f"target_{name}") for name in ("epsilon", "delta") for prefix in ("", "target_")},
}
"""For each input, other inputs that settle the same quantity.  A grid that has the input needs none of the others."""


def read_grid(path: str | os.PathLike[str]) -> Grid:
    r"""Read a grid file and check it; an error is one line that names the place.

    A TOML grid is a list of blocks.  A block is the product of its lists and ranges (the last one written varies
    fastest), or with `zip = true` its lists side by side::

        [defaults]                      # optional, shared by all blocks; a block may override
        target_delta = [1e-5, 1e-6]

        [[block]]
        name = "MNIST"                  # optional, the result's first column
        dataset_size = 60000            # with batch_size: sampling_probability = batch_size / dataset_size
        batch_size = [128, 256]
        epochs = [10, 20]               # steps = ceil(epochs * dataset_size / batch_size)
        target_epsilon = {start = 0.25, stop = 16, num = 7, scale = "log"}

    A block leaves out exactly one of noise_multiplier, sampling_probability, steps, epsilon (or target_epsilon) and
    delta (or target_delta): the sweep solves for it, and `quantity = "..."` may state it.  With
    `repetitions = "geometric"` and `gamma = [0.1, 0.01]` (or another law of K, `jaxacct.sweeps.grid.LAWS`) epsilon is
    the epsilon of running the configuration K times and releasing the best output.  A file without `[[block]]` is one
    block.  A CSV has the same names as columns, among them `name` and `quantity`; an empty cell is a value left out.
    Other columns are kept beside the answers.  A column whose name looks like an absent input is refused.

    Parameters
    ----------
    path : path of a .toml or .csv file

    Returns
    -------
    Grid

    >>> import pathlib, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = pathlib.Path(folder, "grid.csv")
    ...     text = "noise_multiplier,sampling_probability,steps,delta\n1,0.01,10,1e-5\n2,0.01,10,1e-5\n"
    ...     size = path.write_text(text)
    ...     grid = read_grid(path)
    >>> len(grid), grid.inputs["noise_multiplier"].tolist()
    (2, [1.0, 2.0])
    """
    path = Path(path)
    readers = {".toml": _read_toml, ".csv": _read_csv}
    if path.suffix.lower() not in readers:
        raise InputError(f"{path}: a grid must end in .toml or .csv")
    with reading(path):
        try:
            text = path.read_text(encoding="utf-8-sig")
        except UnicodeDecodeError:
            raise InputError(f"{path}: cannot be read: it is not UTF-8 text") from None
    try:
        return readers[path.suffix.lower()](text)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def _read_toml(text: str) -> Grid:
    try:
        document = tomllib.loads(text)
    except ValueError as error:  # a whole number with too many digits raises ValueError, too
        raise InputError(f"not valid TOML: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise InputError("not valid TOML: its arrays or tables are nested too deeply") from None
    defaults = document.pop("defaults", {})
    if not isinstance(defaults, dict):
        raise InputError("defaults must be a table; write [defaults]")
    if "block" not in document:
        return _block(defaults | document, "the grid")
    blocks = document.pop("block")
    if not isinstance(blocks, list) or not blocks or not all(isinstance(block, Mapping) for block in blocks):
        raise InputError("block must be an array of tables; write [[block]]")
    for key in document:
        shared = key in INPUTS or key in _SETTINGS
        hint = "; write shared keys under [defaults]" if shared else suggest(key, ("block", "defaults"))
        raise InputError(f"unknown top-level key {key!r}{hint}")
    return concatenate(
        [_block(defaults | block, f"block {block.get('name', i)!r}") for i, block in enumerate(blocks, 1)]
    )


def _block(entries: Mapping[str, Any], place: str) -> Grid:
    for key, value in entries.items():
        if key not in _SETTINGS and key not in INPUTS:
            raise InputError(f"{place}: unknown key {key!r}{suggest(key, (*INPUTS, *_SETTINGS))}")
        wanted = {"name": str, "quantity": str, "zip": bool}.get(key)
        if wanted and not isinstance(value, wanted):
            kind = "true or false" if wanted is bool else "text in quotes"
            raise InputError(f"{place}: {key} = {value!r} must be {kind}")
    fields = {key: value for key, value in entries.items() if key not in _SETTINGS}
    mode = "zip" if entries.get("zip", False) else "product"
    try:
        return expand(fields, mode=mode, quantity=entries.get("quantity"), name=entries.get("name", ""))
    except InputError as error:
        raise InputError(f"{place}: {error}") from None


def _read_csv(text: str) -> Grid:
    reader = csv.reader(text.splitlines(), strict=True)
    try:
        rows = [(reader.line_num, cells) for cells in reader if any(cell.strip() for cell in cells)]
    except csv.Error as error:
        raise InputError(f"line {reader.line_num}: not valid CSV: {error}") from None
    if len(rows) < 2:
        raise InputError("no configurations; write a header line and one line per configuration")
    header = [cell.strip() for cell in rows[0][1]]
    records = [_record(header, number, cells) for number, cells in rows[1:]]
    columns = {name: [record[place] for record in records] for place, name in enumerate(header)}
    return grid_of_records(header, columns, [f"line {number}" for number, _ in rows[1:]])


def _record(header: list[str], number: int, cells: list[str]) -> list[Any]:
    """Return the cells of one CSV line: numbers for inputs, text for other columns, None for empty cells."""
    if len(cells) != len(header):
        raise InputError(f"line {number}: {len(cells)} cells under a header of {len(header)}")
    record: list[Any] = []
    for column, cell in zip(header, (cell.strip() for cell in cells), strict=True):
        try:
            record.append(float(cell) if cell and column in FIELDS else cell or None)
        except ValueError:
            rule = FIELDS[column]
            wanted = f"{'' if rule.integral else 'a number '}{rule.limit}"
            raise InputError(f"line {number}: {column} = {shown(cell)} must be {wanted}") from None
    return record


def as_grid(grid: Any, quantity: str | None = None) -> Grid:
    """Return the grid of a DataFrame or a list of dicts.  Every row is one configuration.

    None or NaN stands for a value that is left out.
    """
    if is_frame(grid):
        names = [str(name) for name in grid.columns]
        columns = {name: grid.iloc[:, place] for place, name in enumerate(names)}
        cells = {name: _with_none(column) if name in COLUMNS else column for name, column in columns.items()}
        return grid_of_records(names, cells, [f"row {label!r}" for label in grid.index], quantity)
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
) -> Grid:
    """Make a grid from columns of cells, in which None marks a value left out.

    An error names the row by its text in `places`.
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
    return Grid(grid.name, grid.quantity, grid.inputs, beside)


def _refuse_misspelt(names: Sequence[str]) -> None:
    """Refuse a column with the name of an answer's column, or with nearly the name of an absent input."""
    given = {name for one in names for name in (one, *SETTLED_BY.get(one, ()))}
    given |= set() if "repetitions" in given else set(LAW_NUMBERS)
    absent = [name for name in COLUMNS if name not in given]
    for name in names:
        if name in COLUMNS:
            continue
        if name in (*ANSWER, *WORDS, "relation"):
            raise InputError(f"column {name!r} has the name of a column of the answer; rename it, or leave it out")
        right = meant(name, absent, cutoff=0.8)  # a lower cutoff would refuse the user's own columns
        if right:
            raise InputError(f"unknown column {name!r}; did you mean {right!r}? rename it, whichever it is")
    if not any(name in INPUTS for name in names):
        raise InputError(f"no column is an input; give four of {', '.join(QUANTITIES)}")


def _group(records: list[dict[str, Any]], places: list[str]) -> Grid:
    """Make one grid from rows that give the same inputs. An error names the bad row."""
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
    """Return the cells of an input, with None for NaN, pandas' NA and NaT, and empty text."""
    nan = lambda cell: isinstance(cell, float | np.floating) and math.isnan(cell)
    empty = lambda cell: isinstance(cell, str) and not cell.strip()
    missing = ("NAType", "NaTType")
    return [None if nan(cell) or empty(cell) or type(cell).__name__ in missing else cell for cell in cells]


def _kept(cells: Any) -> np.ndarray:
    """Return a column of the user as an array.

    A list of ints, floats and None becomes numbers, with NaN for None.  Other cells stay as they are, with "" for None.
    """
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


def is_frame(grid: Any) -> bool:
    """Return whether an object has the attributes of a pandas.DataFrame; pandas is not imported."""
    return all(hasattr(grid, name) for name in ("iloc", "columns", "index"))
