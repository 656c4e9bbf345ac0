"""Result files of sweeps: CSV and Parquet, refused before the work where they could not be written or read."""

from __future__ import annotations

import csv
import importlib
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxacct.core.files import optional_package, replacing
from jaxacct.core.validation import InputError, shown
from jaxacct.sweeps.columns import ANSWER
from jaxacct.sweeps.grid import INPUTS

ENDINGS = (".csv", ".parquet")
"""How the name of a result may end."""
REPLACE = "replace it with --overwrite (overwrite=True)"
"""What to do about a result that is there already."""


def out_path(out: Any) -> Path:
    """The path of a result; what is no path is refused."""
    if not isinstance(out, str | os.PathLike) or not os.fspath(out):
        raise InputError(f"out = {shown(out)} must be the path of a file; name the result, such as 'result.csv'")
    return Path(out)


def refuse_existing(path: Path, remedy: str = REPLACE) -> None:
    """Refuse to write over a file that is there."""
    if path.exists():
        raise InputError(f"{path}: is there already; {remedy}, or give another name")


def check_result(path: Path) -> None:
    """Refuse a result that could not be written, before any work is done for it."""
    if path.suffix.lower() not in ENDINGS:
        raise InputError(f"{path}: the result must end in .csv or .parquet")
    if path.suffix.lower() == ".parquet":
        optional_package("pyarrow", "a Parquet file")
    if path.is_dir():
        raise InputError(f"{path}: cannot be written: it is a folder")


def write_parquet(path: Path, text: Sequence[str], names: Sequence[str], pieces: Iterable[dict[str, Any]]) -> None:
    """One row group per piece; the columns named in `text` are strings, the others float64."""
    arrow = optional_package("pyarrow", "a Parquet file")
    schema = arrow.schema([(name, arrow.string() if name in text else arrow.float64()) for name in names])
    with (
        replacing(path) as temporary,
        importlib.import_module("pyarrow.parquet").ParquetWriter(str(temporary), schema) as writer,
    ):
        for piece in pieces:
            writer.write_table(arrow.table(piece, schema=schema))


def read_columns(path: Path, text: Sequence[str]) -> dict[str, np.ndarray]:
    """The columns of a result file; whatever is wrong with it is refused in one line."""
    readers: dict[str, Callable[[Path, Sequence[str]], dict[str, np.ndarray]]]
    readers = {".csv": _read_csv, ".parquet": _read_parquet}
    if path.suffix.lower() not in readers:
        raise InputError(f"{path}: a result must end in .csv or .parquet")
    try:
        return readers[path.suffix.lower()](path, text)
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror or error}") from None
    except (ValueError, csv.Error) as error:
        raise InputError(f"{path}: is no result of a sweep: {' '.join(str(error).split())}") from None


def _read_csv(path: Path, text: Sequence[str]) -> dict[str, np.ndarray]:
    with path.open(newline="", encoding="utf-8-sig") as file:  # spreadsheets begin a file with a mark
        reader = csv.reader(file, strict=True)
        names = _distinct(next(reader, []))
        columns: list[list[Any]] = [[] for _ in names]
        known: dict[str, str] = {}
        for cells in reader:
            if len(cells) != len(names):
                raise ValueError(f"line {reader.line_num} has {len(cells)} cells under a header of {len(names)}")
            for name, column, cell in zip(names, columns, cells, strict=True):
                number = name in INPUTS or name in ANSWER
                column.append(float(cell or "nan") if number and name not in text else known.setdefault(cell, cell))
    return {name: _column(name, column, text) for name, column in zip(names, columns, strict=True)}


def _distinct(names: list[str]) -> list[str]:
    """The names of the columns; ValueError for one that is there twice, of which one would be taken in silence."""
    for place, name in enumerate(names):
        if name in names[:place]:
            raise ValueError(f"column {shown(name)} appears twice")
    return names


def _read_parquet(path: Path, text: Sequence[str]) -> dict[str, np.ndarray]:
    optional_package("pyarrow", "a Parquet file")
    columns = importlib.import_module("pyarrow.parquet").read_table(str(path)).to_pydict()
    return {name: _column(name, column, text) for name, column in columns.items()}


def _column(name: str, cells: list[Any], text: Sequence[str]) -> np.ndarray:
    """One column: text, or numbers; a column that is no sweep's own holds numbers if all its cells are numbers."""
    if name in text:
        return np.array(cells, object)
    try:
        return np.array([float(cell if cell != "" else "nan") for cell in cells], np.float64)
    except (TypeError, ValueError):
        if name in INPUTS or name in ANSWER:
            raise
        return np.array(cells, object)
