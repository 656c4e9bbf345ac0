"""The columns of a result: their names, which of them are text, and which may be labelled axes."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from jaxacct.core.validation import InputError
from jaxacct.mechanisms.dp_sgd_run import SOURCES
from jaxacct.sweeps.grid import COUNTS, INPUTS, QUANTITIES, Grid

ANSWER = ("lower", "estimate", "upper")
"""Columns of the bracket."""
WORDS = ("kind", "status", "engine")
"""Columns of text that belong to the bracket."""
TEXT = ("name", "quantity", "sampling", "repetitions", "relation", *WORDS)
"""Columns of text; all others are float64."""

WHOLE = (*COUNTS, "epochs")
"""Columns whose whole numbers are written without a decimal point."""


def layout(grid: Grid) -> tuple[str, ...]:
    """The columns of a grid's result: name, quantity, inputs, what is solved for, bracket, and its words."""
    solved = [quantity for quantity in INPUTS if quantity in grid.quantity and not measures(quantity)]
    inputs = [field for field in INPUTS if field in grid.inputs or field in solved]
    name = ["name"] if any(grid.name) else []
    return (*name, "quantity", *inputs, "relation", *ANSWER, *WORDS)


def measures(quantity: str) -> bool:
    """Whether lower, estimate and upper hold the quantity itself (otherwise the epsilon or the risk reached)."""
    return quantity in ("epsilon", "delta")


def varying(columns: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The inputs that differ between rows and do not follow from others, with their values as first met.

    >>> columns = {"steps": np.array([1.0, 1.0, 2.0, 2.0]), "delta": np.array([1e-5, 1e-6, 1e-5, 1e-6])}
    >>> {name: values.tolist() for name, values in varying(columns).items()}
    {'steps': [1.0, 2.0], 'delta': [1e-05, 1e-06]}
    """
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
    """The varying inputs of a table that holds each of their combinations once; others are refused."""
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
    """The position of every row in the product of the axes, in C order."""
    index = np.zeros(len(columns["quantity"]), np.int64)
    for name, values in axes.items():
        order = np.argsort(values)
        index = index * len(values) + order[np.searchsorted(values[order], columns[name])]
    return index


def solved_for(columns: Mapping[str, np.ndarray]) -> list[str]:
    """What the rows are solved for, in the usual order."""
    return [quantity for quantity in QUANTITIES if quantity in set(columns["quantity"])]
