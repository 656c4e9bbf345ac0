"""The result of a sweep: named columns, one row per configuration."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxacct.core import markup
from jaxacct.core.files import optional_package, write_csv
from jaxacct.core.text import outward
from jaxacct.core.validation import LARGEST_COUNT, InputError
from jaxacct.sweeps.columns import ANSWER, TEXT, WHOLE, place, product_axes
from jaxacct.sweeps.grid import INPUTS
from jaxacct.sweeps.result_files import read_columns, write_parquet

ROWS_PER_PIECE = 8192
"""Rows that are turned into text, or into a Parquet row group, at a time: a few megabytes of text."""


@dataclass(frozen=True, eq=False)
class Table:
    """Columns of equal length, one row per configuration in the order of the grid.

    Numbers are float64, words are text.  `lower`, `estimate` and `upper` bracket the epsilon or delta asked
    for, and in a calibration the epsilon that the solved value gives.  NaN marks an input that does not
    apply, and the answer of an infeasible configuration, whose `status` says why.

    Parameters
    ----------
    columns : dict of arrays, each of shape (rows,)
        One column is `quantity`.
    index : pandas.Index, optional
        Of the DataFrame that was swept; `to_pandas` gives it back.

    >>> from jaxacct.sweeps import sweep
    >>> t = sweep({"noise_multiplier": [2.0, 4.0], "sampling_probability": 1, "steps": 1, "delta": 1e-5})
    >>> len(t), t["status"].tolist(), [round(x, 4) for x in t.take([1])["upper"].tolist()]
    (2, ['ok', 'ok'], [0.9263])
    """

    columns: dict[str, np.ndarray]
    index: Any = None

    def __len__(self) -> int:
        return len(self.columns["quantity"])

    def __getitem__(self, column: str) -> np.ndarray:
        return self.columns[column]

    def __repr__(self) -> str:
        return f"Table({len(self)} rows: {', '.join(self.columns)})"

    def _repr_html_(self) -> str:
        """The first rows, the bracket rounded outward; solved values are in full."""
        shown, rest = markup.cut(len(self))
        title = f"Sweep, {len(self):,} {'row' if len(self) == 1 else 'rows'}"
        head = self.take(slice(0, len(shown)))
        ends = {
            "lower": [outward(x, ".6g", up=False) for x in head["lower"]],
            "estimate": [f"{x:.6g}" for x in head["estimate"]],
            "upper": [outward(x, ".6g", up=True) for x in head["upper"]],
        }
        texts = dict(zip(self.columns, zip(*head.rows(), strict=True), strict=False)) | ends
        return markup.table(title, tuple(self.columns), zip(*texts.values(), strict=True), rest)

    def take(self, rows: Any) -> Table:
        """The rows of a NumPy index."""
        index = None if self.index is None else self.index[rows]
        return Table({name: column[rows] for name, column in self.columns.items()}, index)

    def beside(self, others: Mapping[str, np.ndarray], index: Any = None) -> Table:
        """The table with other columns before its own, after the name, and an index for `to_pandas`."""
        name = {"name": self["name"]} if "name" in self.columns else {}
        return Table(name | dict(others) | self.columns, index)

    def rows(self) -> Iterator[list[str]]:
        """The cells as text: floats in full precision, absent inputs empty, answers that do not exist nan."""
        for piece in self._pieces():
            lists = {name: _as_list(column) for name, column in piece.columns.items()}
            cells = [_cells(name, column, lists["quantity"]) for name, column in lists.items()]
            yield from (list(row) for row in zip(*cells, strict=True))

    def to_csv(self, path: str | os.PathLike[str]) -> None:
        """Write a CSV with a header line; reading it back gives the same numbers."""
        write_csv(Path(path), tuple(self.columns), self.rows())

    def to_parquet(self, path: str | os.PathLike[str]) -> None:
        """Write a Parquet file (needs pyarrow)."""
        numbers = {name for name, column in self.columns.items() if _is_numeric(column)}
        text = tuple(name for name in self.columns if name not in numbers)
        pieces = (
            {name: _for_parquet(name, column, name in numbers) for name, column in piece.columns.items()}
            for piece in self._pieces()
        )
        write_parquet(Path(path), text, tuple(self.columns), pieces)

    def to_pandas(self) -> Any:
        """The table as a pandas.DataFrame (needs pandas)."""
        return optional_package("pandas", "a DataFrame").DataFrame(self.columns, index=self.index)

    def to_xarray(self) -> Any:
        """The table as an xarray.Dataset with a labelled axis for every input that varies (needs xarray).

        Inputs that do not vary are scalar coordinates, those that follow from others (steps from epochs)
        coordinates along all axes.  Raises InputError for a table that is no product of its inputs.

        >>> from jaxacct.sweeps import sweep
        >>> t = sweep({"noise_multiplier": [2.0, 4.0], "sampling_probability": 1, "steps": [1, 4], "delta": 1e-5})
        >>> d = t.to_xarray()
        >>> round(float(d.upper.sel(noise_multiplier=4.0, steps=1)), 4)
        0.9263
        """
        xarray = optional_package("xarray", "a Dataset")
        axes = product_axes(self.columns)
        shape = tuple(len(values) for values in axes.values())
        order = np.argsort(place(self.columns, axes))
        data: dict[str, Any] = {}
        coordinates: dict[str, Any] = dict(axes)
        for name, column in self.columns.items():
            if name in axes:
                continue
            known = name in ("name", "quantity", "relation", *INPUTS) and name != self["quantity"][0]
            alike = known and bool((column == column[0]).all())
            values = column[0] if alike else (tuple(axes), column[order].reshape(shape))
            (coordinates if known else data)[name] = values
        return xarray.Dataset(data, coordinates)

    def _pieces(self) -> Iterator[Table]:
        """The rows a few thousand at a time."""
        return (self.take(slice(start, start + ROWS_PER_PIECE)) for start in range(0, len(self), ROWS_PER_PIECE))


def read_table(path: str | os.PathLike[str]) -> Table:
    """The table in a result file.

    Parameters
    ----------
    path : path of a .csv or .parquet file

    Returns
    -------
    Table

    Raises
    ------
    InputError
        A file that cannot be read, or is no result of a sweep.

    >>> import tempfile
    >>> from jaxacct.sweeps import read_table, sweep
    >>> t = sweep({"noise_multiplier": [2.0, 4.0], "sampling_probability": 1, "steps": 1, "delta": 1e-5})
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     t.to_csv(f"{folder}/result.csv")
    ...     again = read_table(f"{folder}/result.csv")
    >>> bool((again["upper"] == t["upper"]).all())
    True
    """
    columns = read_columns(Path(path), TEXT)
    missing = [name for name in ("quantity", "relation", *ANSWER) if name not in columns]
    if missing:
        raise InputError(f"{path}: is no result of a sweep: it has no column {missing[0]!r}")
    return Table(columns)


def blank(names: tuple[str, ...], size: int) -> Table:
    """A table to be filled in."""
    return Table({name: np.full(size, "", object) if name in TEXT else np.full(size, np.nan) for name in names})


def fill(table: Table, rows: np.ndarray, piece: Table) -> None:
    """Put a piece into the rows of a table."""
    for name, column in table.columns.items():
        column[rows] = piece[name]


def write(table: Table, path: Path) -> None:
    """Write a table to a file, by its ending."""
    (table.to_parquet if path.suffix.lower() == ".parquet" else table.to_csv)(path)


def _is_numeric(column: np.ndarray) -> bool:
    """Whether float64 holds a column as it is."""
    if column.dtype.kind not in "fiu":
        return False
    return column.dtype.kind == "f" or column.size == 0 or int(np.abs(column).max()) <= LARGEST_COUNT


def _for_parquet(name: str, column: np.ndarray, number: bool) -> np.ndarray:
    if number:
        return column.astype(np.float64)
    return column if name in TEXT else np.array([str(cell) for cell in _as_list(column)], object)


def _as_list(column: np.ndarray) -> list[Any]:
    """The cells of a column; of dates and other words of NumPy as text."""
    return column.tolist() if column.dtype.kind in "fiubO" else [str(cell) for cell in column]


def _cells(name: str, column: list[Any], quantities: list[str]) -> list[str]:
    if name in TEXT:
        return column
    return [_cell(name, x, q) if isinstance(x, float) else str(x) for x, q in zip(column, quantities, strict=True)]


def _cell(name: str, value: float, quantity: str) -> str:
    if math.isnan(value):
        return "nan" if name in (*ANSWER, quantity) else ""
    return str(int(value)) if name in WHOLE and value.is_integer() else repr(value)
