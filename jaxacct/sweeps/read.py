"""Grid files: TOML blocks of lists and ranges, or a CSV with one configuration per row."""

from __future__ import annotations

import csv
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxacct.core.validation import InputError, shown
from jaxacct.sweeps.grid import FIELDS, INPUTS, Grid, concatenate, expand, suggest
from jaxacct.sweeps.records import grid_of_records

_SETTINGS = ("name", "quantity", "zip")
"""Keys of a block that are no inputs."""


def read_grid(path: str | os.PathLike[str]) -> Grid:
    r"""Read and validate a grid file; whatever is wrong with it is refused in one line, with the place.

    A TOML grid is a list of blocks; every block is the product of its lists and ranges (the last one written
    varies fastest), or with `zip = true` its lists side by side::

        [defaults]                      # optional, shared by all blocks; a block may override
        target_delta = [1e-5, 1e-6]

        [[block]]
        name = "MNIST"                  # optional, the result's first column
        dataset_size = 60000            # with batch_size: sampling_probability = batch_size / dataset_size
        batch_size = [128, 256]
        epochs = [10, 20]               # steps = ceil(epochs * dataset_size / batch_size)
        target_epsilon = {start = 0.25, stop = 16, num = 7, scale = "log"}

    Of noise_multiplier, sampling_probability, steps, epsilon (or target_epsilon) and delta (or target_delta)
    a block leaves out exactly one, which is solved for; `quantity = "..."` may state it.  With
    `repetitions = "geometric"` and `gamma = [0.1, 0.01]` (or another law of K, `jaxacct.sweeps.repetitions.LAWS`)
    epsilon is that of running the configuration K times and releasing the best.  A file without
    `[[block]]` is one block.  A CSV has the same names as columns, among them `name` and `quantity`; an empty
    cell is a value left out.  Other columns are kept beside the answers; one that looks like an input that is not there
    is refused.

    Parameters
    ----------
    path : path of a .toml or .csv file

    Returns
    -------
    Grid

    Raises
    ------
    InputError
        A file that cannot be read or is no grid, unknown or missing fields, or values outside their limits.

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
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise InputError(f"{path}: cannot be read: it is not UTF-8 text") from None
    try:
        return readers[path.suffix.lower()](text)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def _read_toml(text: str) -> Grid:
    try:
        document = tomllib.loads(text)
    except ValueError as error:  # also a whole number of more digits than Python converts
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
    rows = [(number, cells) for number, cells in _lines(text) if any(cell.strip() for cell in cells)]
    if len(rows) < 2:
        raise InputError("no configurations; write a header line and one line per configuration")
    header = [cell.strip() for cell in rows[0][1]]
    records = [_record(header, number, cells) for number, cells in rows[1:]]
    columns = {name: [record[place] for record in records] for place, name in enumerate(header)}
    return grid_of_records(header, columns, [f"line {number}" for number, _ in rows[1:]])


def _lines(text: str) -> list[tuple[int, list[str]]]:
    reader = csv.reader(text.splitlines(), strict=True)
    try:
        return [(reader.line_num, cells) for cells in reader]
    except csv.Error as error:
        raise InputError(f"line {reader.line_num}: not valid CSV: {error}") from None


def _record(header: list[str], number: int, cells: list[str]) -> list[Any]:
    """One line: numbers for the inputs, text for the rest, None for empty inputs."""
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
