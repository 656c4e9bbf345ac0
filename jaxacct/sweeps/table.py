"""Tables of named columns, which hold the results of sweeps: one row for each configuration."""

from __future__ import annotations

import csv
import functools
import importlib
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxacct.core import markup
from jaxacct.core.files import optional_package, reading, replacing, write_csv
from jaxacct.core.text import outward
from jaxacct.core.types import Foreign, Index
from jaxacct.core.validation import LARGEST_COUNT, InputError, choice, shown
from jaxacct.mechanisms.dp_sgd_run import SOURCES
from jaxacct.sweeps.grid import ANSWER, COUNTS, INPUTS, QUANTITIES, WORDS, Grid, is_frame, with_levels

TEXT = ("name", "quantity", "sampling", "repetitions", "relation", *WORDS)
"""Columns of text; all other columns are float64."""
WHOLE = (*COUNTS, "epochs")
"""Columns whose whole numbers are written without a decimal point."""
ENDINGS = (".csv", ".parquet")
REPLACE = "replace it with --overwrite (overwrite=True)"
ROWS_PER_PIECE = 8192


@dataclass(frozen=True, eq=False)
class Table:
    """The result of a sweep: columns of equal length, one row per configuration in the order of the grid.

    Columns of numbers are float64, all others hold text.  `lower`, `estimate` and `upper` bracket the epsilon or delta
    of the row.  In a calibrated row they bracket what the target limits (epsilon or another risk) at the solved value.
    An input that does not apply is NaN.  So is the answer of an infeasible configuration; `status` has the reason.

    Parameters
    ----------
    columns : dict of arrays, each of shape (rows,).  The column "quantity" names what was solved for.

    >>> from jaxacct.sweeps import sweep
    >>> t = sweep({"noise_multiplier": [2.0, 4.0], "sampling_probability": 1, "steps": 1, "delta": 1e-5})
    >>> len(t), t["status"].tolist(), [round(x, 4) for x in t.take([1])["upper"].tolist()]
    (2, ['ok', 'ok'], [0.9263])
    """

    columns: dict[str, np.ndarray]

    def __len__(self) -> int:
        return len(self.columns["quantity"])

    def __getitem__(self, column: str) -> np.ndarray:
        return self.columns[column]

    def __repr__(self) -> str:
        return f"Table({len(self)} rows: {', '.join(self.columns)})"

    def _repr_html_(self) -> str:
        rows, rest = markup.cut(len(self))
        title = f"Sweep, {len(self):,} {'row' if len(self) == 1 else 'rows'}"
        head = self.take(slice(0, len(rows)))
        ends = {
            "lower": [outward(x, ".6g", up=False) for x in head["lower"]],
            "estimate": [f"{x:.6g}" for x in head["estimate"]],
            "upper": [outward(x, ".6g", up=True) for x in head["upper"]],
        }
        texts = dict(zip(self.columns, zip(*head.rows(), strict=True), strict=False)) | ends
        return markup.table(title, tuple(self.columns), zip(*texts.values(), strict=True), rest)

    def take(self, rows: Index) -> Table:
        """Return the rows at a NumPy index."""
        return Table({name: column[rows] for name, column in self.columns.items()})

    def beside(self, others: Mapping[str, np.ndarray]) -> Table:
        """Return the table with the columns `others` after the column `name`."""
        name = {"name": self["name"]} if "name" in self.columns else {}
        return Table(name | dict(others) | self.columns)

    def rows(self) -> Iterator[list[str]]:
        """Yield the cells of each row as text, with all digits.  An absent input is "", an absent answer is "nan"."""
        for piece in self._pieces():
            lists = {name: _as_list(column) for name, column in piece.columns.items()}
            for name, column in lists.items():
                if name not in TEXT:
                    lists[name] = list(map(functools.partial(_cell, name), column, lists["quantity"]))
            yield from map(list, zip(*lists.values(), strict=True))

    def to_csv(self, path: str | os.PathLike[str]) -> None:
        """Write a CSV with a header line.  The cells have so many digits that `read_table` returns the same numbers."""
        write_csv(Path(path), tuple(self.columns), self.rows())

    def to_parquet(self, path: str | os.PathLike[str]) -> None:
        """Write a Parquet file (needs pyarrow)."""
        # A column is in `numbers` if float64 holds its cells exactly.  All other columns are written as text.
        exact = lambda c: c.dtype.kind == "f" or (c.dtype.kind in "iu" and np.abs(c).max(initial=0) <= LARGEST_COUNT)
        numbers = {name for name, column in self.columns.items() if exact(column)}
        cells = lambda name, column: column if name in TEXT else np.array(list(map(str, _as_list(column))), object)
        arrow = optional_package("pyarrow", "a Parquet file")
        schema = arrow.schema([(name, arrow.float64() if name in numbers else arrow.string()) for name in self.columns])
        with (
            replacing(Path(path)) as temporary,
            importlib.import_module("pyarrow.parquet").ParquetWriter(str(temporary), schema) as writer,
        ):
            for piece in self._pieces():
                columns = {n: c.astype(np.float64) if n in numbers else cells(n, c) for n, c in piece.columns.items()}
                writer.write_table(arrow.table(columns, schema=schema))

    def to_pandas(self) -> Foreign:
        """Return the table as a pandas.DataFrame (needs pandas).  Counts are int64 if every row has a whole number."""
        whole = lambda c: ((c >= 0) & (c <= LARGEST_COUNT) & (c == np.floor(c))).all()
        columns = {n: c.astype(int) if n in WHOLE and whole(c) else c for n, c in self.columns.items()}
        return optional_package("pandas", "a DataFrame").DataFrame(columns)

    def like(self, frame: Foreign) -> Foreign:
        """Return the table as a DataFrame with the index and the types of `frame`, the DataFrame that was swept."""
        found = self.to_pandas()
        found.index = frame.index
        for place, name in enumerate(map(str, frame.columns)):
            given = frame.iloc[:, place]
            # If an input column had empty cells, the sweep may have filled them: then keep the sweep's column.
            asked = name in ("name", "quantity", *INPUTS)
            if name in found and not (asked and given.isna().any()):
                found[name] = given.array
        found.to_pandas = found.copy  # older code calls `to_pandas` on the result of a sweep
        return found

    def to_xarray(self) -> Foreign:
        """Return the table as an xarray.Dataset with a labelled axis for every input that varies (needs xarray).

        Other inputs are scalar coordinates, or coordinates along all axes if they follow from inputs that vary (steps
        from epochs).  Raises InputError unless the rows are all combinations of the inputs' values, each once.

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
        return (self.take(slice(start, start + ROWS_PER_PIECE)) for start in range(0, len(self), ROWS_PER_PIECE))


def read_table(path: str | os.PathLike[str] | Foreign) -> Table:
    """Read the table in a result file.

    Parameters
    ----------
    path : path of a .csv or .parquet file, or the DataFrame that a sweep returned

    Returns
    -------
    Table

    >>> import tempfile
    >>> from jaxacct.sweeps import read_table, sweep
    >>> t = sweep({"noise_multiplier": [2.0, 4.0], "sampling_probability": 1, "steps": 1, "delta": 1e-5})
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     t.to_csv(f"{folder}/result.csv")
    ...     again = read_table(f"{folder}/result.csv")
    >>> bool((again["upper"] == t["upper"]).all())
    True
    """
    columns = _read_frame(path) if is_frame(path) else _read_columns(Path(path))
    quantities = dict.fromkeys(columns.get("quantity", ()))
    solved = [choice("quantity", word, QUANTITIES) for word in quantities if word not in ("epsilon", "delta")]
    missing = [name for name in ("quantity", "relation", *ANSWER, "kind", "status", *solved) if name not in columns]
    if missing:
        what = "frame" if is_frame(path) else path
        raise InputError(f"{what}: is no result of a sweep: it has no column {missing[0]!r}")
    return Table(columns)


def blank(names: tuple[str, ...], size: int) -> Table:
    return Table({name: np.full(size, "", object) if name in TEXT else np.full(size, np.nan) for name in names})


def fill(table: Table, rows: np.ndarray, piece: Table) -> None:
    """Copy `piece`, a table of the rows numbered `rows`, into the whole `table`."""
    for name, column in table.columns.items():
        column[rows] = piece[name]


def write(table: Table, path: Path) -> None:
    (table.to_parquet if path.suffix.lower() == ".parquet" else table.to_csv)(path)


def _as_list(column: np.ndarray) -> list[Any]:
    return column.tolist() if column.dtype.kind in "fiubO" else [str(cell) for cell in column]


def _cell(name: str, value: Any, quantity: str) -> str:
    if not isinstance(value, float):
        return str(value)
    if math.isnan(value):
        return "nan" if name in (*ANSWER, quantity) else ""
    return str(int(value)) if name in WHOLE and value.is_integer() else repr(value)


def layout(grid: Grid) -> tuple[str, ...]:
    solved = [quantity for quantity in INPUTS if quantity in grid.quantity and quantity not in ("epsilon", "delta")]
    inputs = [field for field in INPUTS if field in grid.inputs or field in solved]
    return (*(["name"] if any(grid.name) else []), "quantity", *inputs, "relation", *ANSWER, *WORDS)


def varying(columns: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return {input: its values in order of appearance} for the inputs that vary and follow from no other input."""
    solved = set(columns.get("quantity", ()))
    found = {}
    for name in ("name", "quantity", *INPUTS):
        if name in solved or name not in columns or any(source in columns for source in SOURCES.get(name, ())):
            continue
        values, first = np.unique(columns[name], return_index=True)
        if values.size > 1:
            found[name] = values[np.argsort(first)]
    return found


def product_axes(columns: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the varying inputs.  Refuse a table that does not hold each combination of their values exactly once."""
    axes = varying(columns)
    rows = len(columns["quantity"])
    cells = int(np.prod([len(values) for values in axes.values()], dtype=np.int64))
    if "quantity" in axes:
        raise InputError(f"the table solves for {' and '.join(axes['quantity'])}; labelled axes need one quantity")
    if cells != rows or np.unique(place(columns, axes)).size != rows:
        sizes = " x ".join(f"{len(values)} {name}" for name, values in axes.items()) or "one configuration"
        raise InputError(
            f"the table has {rows:,} rows and is no product of its inputs ({sizes}); "
            "labelled axes need a product grid without repeated values, use to_pandas() for others"
        )
    return axes


def place(columns: Mapping[str, np.ndarray], axes: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return the position of every row in the product of the axes, in C order."""
    index = np.zeros(len(columns["quantity"]), np.int64)
    for name, values in axes.items():
        order = np.argsort(values)
        index = index * len(values) + order[np.searchsorted(values[order], columns[name])]
    return index


def solved_for(columns: Mapping[str, np.ndarray]) -> list[str]:
    return [quantity for quantity in QUANTITIES if quantity in set(columns["quantity"])]


def out_path(out: object, named: str = "the result, such as 'result.csv'") -> Path:
    """Return `out` as the path of a file to write.  If `out` is no path, raise an InputError that asks for `named`."""
    if not isinstance(out, str | os.PathLike) or not os.fspath(out):
        raise InputError(f"out = {shown(out)} must be the path of a file; name {named}")
    return Path(os.fsdecode(out))


def refuse_existing(path: Path, remedy: str = REPLACE) -> None:
    if path.exists():
        raise InputError(f"{path}: is there already; {remedy}, or give another name")


def check_result(path: Path) -> None:
    """Refuse a path to which no result can be written, so that the user learns this before the sweep has run."""
    if path.suffix.lower() not in ENDINGS:
        raise InputError(f"{path}: the result must end in .csv or .parquet")
    if path.suffix.lower() == ".parquet":
        optional_package("pyarrow", "a Parquet file")
    if path.is_dir():
        raise InputError(f"{path}: cannot be written: it is a folder")


def _read_columns(path: Path) -> dict[str, np.ndarray]:
    """Return the columns of a result file.  Raise InputError, with a message of one line, if the file is invalid."""
    if path.suffix.lower() not in ENDINGS:
        raise InputError(f"{path}: a result must end in .csv or .parquet")
    with reading(path):
        try:
            return _read_csv(path) if path.suffix.lower() == ".csv" else _read_parquet(path)
        except (ValueError, csv.Error) as error:
            raise InputError(f"{path}: is no result of a sweep: {' '.join(str(error).split())}") from None


def _read_csv(path: Path) -> dict[str, np.ndarray]:
    with path.open(newline="", encoding="utf-8-sig") as file:  # spreadsheets write a byte-order mark
        reader = csv.reader(file, strict=True)
        names = with_levels(next(reader, []))
        for place, name in enumerate(names):
            if name in names[:place]:
                raise ValueError(f"column {shown(name)} appears twice")
        columns: list[list[Any]] = [[] for _ in names]
        known: dict[str, str] = {}
        for cells in reader:
            if len(cells) != len(names):
                raise ValueError(f"line {reader.line_num} has {len(cells)} cells under a header of {len(names)}")
            for name, column, cell in zip(names, columns, cells, strict=True):
                number = name in INPUTS or name in ANSWER
                column.append(float(cell or "nan") if number and name not in TEXT else known.setdefault(cell, cell))
    return {name: _column(name, column) for name, column in zip(names, columns, strict=True)}


def _read_parquet(path: Path) -> dict[str, np.ndarray]:
    optional_package("pyarrow", "a Parquet file")
    columns = importlib.import_module("pyarrow.parquet").read_table(str(path)).to_pydict()
    return {name: _column(name, column) for name, column in columns.items()}


def _read_frame(frame: Foreign) -> dict[str, np.ndarray]:
    names, absent = [str(name) for name in frame.columns], frame.isna().to_numpy()
    cells = frame.astype(object).mask(absent, "").to_numpy()
    return {name: _column(name, list(column)) for name, column in zip(names, cells.T, strict=True)}


def _column(name: str, cells: list[Any]) -> np.ndarray:
    """Return text if `name` is in `TEXT`, else float64; but a user's column in which a cell is no number stays text."""
    if name in TEXT:
        return np.array(cells, object)
    try:
        return np.array([float(cell if cell != "" else "nan") for cell in cells], np.float64)
    except (TypeError, ValueError):
        if name in INPUTS or name in ANSWER:
            raise
        return np.array(cells, object)
