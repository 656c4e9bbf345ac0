"""The result of a sweep: named columns, one row per configuration, and the files it is written to."""

from __future__ import annotations

import csv
import importlib
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from jaxacct.sweep.grid import FIELDS, Grid
from jaxacct.validation import InputError

ANSWER = ("lower", "estimate", "upper")
WORDS = ("kind", "status", "engine")
_WHOLE = ("dataset_size", "batch_size", "epochs", "steps")
"""Columns whose whole numbers are written without a decimal point."""


def layout(grid: Grid) -> tuple[str, ...]:
    """The columns of a grid's result: name, quantity, inputs, what is solved for, bracket, and its words."""
    solved = [quantity for quantity in FIELDS if quantity in grid.quantity and not _answers(quantity)]
    inputs = [field for field in FIELDS if field in grid.inputs or field in solved]
    name = ["name"] if any(grid.name) else []
    return (*name, "quantity", *inputs, "relation", *ANSWER, *WORDS)


def _answers(quantity: str) -> bool:
    """Whether lower, estimate and upper hold the quantity itself (otherwise the epsilon reached)."""
    return quantity in ("epsilon", "delta")


@dataclass(frozen=True, eq=False)
class Table:
    """Columns of equal length, one row per configuration in the order of the grid.

    Numbers are float64, words are text.  `lower`, `estimate` and `upper` bracket the epsilon or delta asked
    for, and in a calibration the epsilon that the solved value gives.  NaN marks an input that does not
    apply, and the answer of an infeasible configuration, whose `status` says why.
    """

    columns: dict[str, np.ndarray]

    def __len__(self) -> int:
        return len(self.columns["quantity"])

    def __getitem__(self, column: str) -> np.ndarray:
        return self.columns[column]

    def __repr__(self) -> str:
        return f"Table({len(self)} rows: {', '.join(self.columns)})"

    def rows(self) -> Iterator[list[str]]:
        """The cells as text: floats in full precision, absent inputs empty, answers that do not exist nan."""
        lists = {name: column.tolist() for name, column in self.columns.items()}
        quantities = lists["quantity"]
        cells = [
            [_cell(name, value, quantity) for value, quantity in zip(column, quantities, strict=True)]
            for name, column in lists.items()
        ]
        return (list(row) for row in zip(*cells, strict=True))

    def to_csv(self, path: str | os.PathLike[str]) -> None:
        """Write a CSV with a header line; reading it back gives the same numbers."""
        self._write(CsvSink(Path(path), tuple(self.columns)))

    def to_parquet(self, path: str | os.PathLike[str]) -> None:
        """Write a Parquet file (needs pyarrow)."""
        self._write(ParquetSink(Path(path), tuple(self.columns)))

    def to_pandas(self) -> Any:
        """The table as a pandas.DataFrame (needs pandas)."""
        return _extra("pandas", "a DataFrame").DataFrame(self.columns)

    def _write(self, sink: Sink) -> None:
        try:
            sink.write(self)
        finally:
            sink.close()


def _cell(name: str, value: Any, quantity: str) -> str:
    if isinstance(value, str):
        return value
    if math.isnan(value):
        return "nan" if name in (*ANSWER, quantity) else ""
    return str(int(value)) if name in _WHOLE and value.is_integer() else repr(value)


def join(tables: Sequence[Table]) -> Table:
    """Tables of the same columns one after the other."""
    return Table({name: np.concatenate([table[name] for table in tables]) for name in tables[0].columns})


class Sink(Protocol):
    """Where a sweep's rows go as they are done; after `close` the file is complete for the rows written."""

    def write(self, table: Table) -> None: ...

    def close(self) -> None: ...


def open_sink(path: Path, columns: tuple[str, ...]) -> Sink:
    """The sink for a path, by its ending; opened now, so that a bad path is refused before any work."""
    sinks: dict[str, type[CsvSink] | type[ParquetSink]] = {".csv": CsvSink, ".parquet": ParquetSink}
    if path.suffix.lower() not in sinks:
        raise InputError(f"{path}: the result must end in .csv or .parquet")
    return sinks[path.suffix.lower()](path, columns)


class CsvSink:
    """A CSV file, flushed after every write."""

    def __init__(self, path: Path, columns: tuple[str, ...]) -> None:
        try:
            self._file = path.open("w", newline="", encoding="utf-8")
        except OSError as error:
            raise _unwritable(path, error) from None
        self._writer = csv.writer(self._file, lineterminator="\n")
        self._writer.writerow(columns)

    def write(self, table: Table) -> None:
        self._writer.writerows(table.rows())
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class ParquetSink:
    """A Parquet file with one row group per write."""

    def __init__(self, path: Path, columns: tuple[str, ...]) -> None:
        self._arrow = _extra("pyarrow", "a Parquet file")
        words = ("name", "quantity", "relation", *WORDS)
        kinds = [(name, self._arrow.string() if name in words else self._arrow.float64()) for name in columns]
        self._schema = self._arrow.schema(kinds)
        try:
            self._writer = importlib.import_module("pyarrow.parquet").ParquetWriter(str(path), self._schema)
        except OSError as error:
            raise _unwritable(path, error) from None

    def write(self, table: Table) -> None:
        lists = {name: column.tolist() for name, column in table.columns.items()}
        self._writer.write_table(self._arrow.table(lists, schema=self._schema))

    def close(self) -> None:
        self._writer.close()


def _extra(module: str, purpose: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        raise InputError(
            f"{purpose} needs {module}, which is not installed; run pip install {module}, or write a .csv"
        ) from None


def _unwritable(path: Path, error: OSError) -> InputError:
    return InputError(f"{path}: cannot be written: {error.strerror or error}")
