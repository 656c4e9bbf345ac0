"""Curves and heat maps of a value against the inputs of a sweep.

The data choose what the user does not: which rows, which input along which axis, and what is held fixed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxacct.core.validation import InputError, choice
from jaxacct.mechanisms.dp_sgd_run import SOURCES
from jaxacct.plots import style
from jaxacct.sweeps.columns import ANSWER, TEXT, measures, place, solved_for, varying
from jaxacct.sweeps.grid import suggest
from jaxacct.sweeps.table import Table

KINDS = ("curve", "heatmap", "profile", "tradeoff")
"""The kinds of pictures."""
MOST_CURVES = 8
"""Most curves that are put into one picture unasked: more could not be told apart."""
_FOLLOWS = {**SOURCES, "sampling_probability": ("dataset_size", *SOURCES["sampling_probability"])}
"""Inputs that say the same as a derived one, when that is along an axis."""
MOST_MARKED_POINTS = 25
"""Points of a curve up to which each is marked; beyond, the marks would hide the curve."""


def draw_curves(view: View, canvas: Any, axes: Any) -> int:
    """The value against x, one curve per value of `by`, the bracket as a band; returns how many curves."""
    table, (low, middle, high) = view.table, view.ends()
    families = [None] if view.by is None else list(dict.fromkeys(table[view.by].tolist()))
    if view.by is not None and view.by not in TEXT:
        families.sort()
    for family, colour, dash in zip(families, style.colours(families), style.dashes(len(families)), strict=True):
        rows = np.arange(len(table)) if view.by is None else np.flatnonzero(table[view.by] == family)
        rows = rows[np.argsort(table[view.x][rows], kind="stable")]
        at = table[view.x][rows]
        shown = np.where(np.isfinite(middle[rows]), middle[rows], np.nan)
        name = family if isinstance(family, str) or family is None else style.number(family)
        marker = "o" if rows.size <= MOST_MARKED_POINTS else None
        axes.plot(at, shown, dash, color=colour, label=name, marker=marker, markersize=3.2)
        axes.fill_between(at, low[rows], high[rows], color=colour, alpha=0.25, linewidth=0)
    style.scale(axes, "x", table[view.x])
    style.scale(axes, "y", middle)
    axes.set(xlabel=style.MEANING[view.x], ylabel=style.MEANING[view.value])
    _title(view, axes)
    style.legend(axes, len(families), style.MEANING.get(view.by or "", ""))
    return len(families)


def draw_heatmap(view: View, canvas: Any, axes: Any) -> int:
    """The value as colour over x and `by`, with lines of equal value; returns how many cells."""
    assert view.by is not None
    table, upper = view.table, view.ends()[2]
    sides = {name: np.unique(table[name]) for name in (view.by, view.x)}
    cells = np.full([values.size for values in sides.values()], np.nan)
    cells.reshape(-1)[place(table.columns, sides)] = np.where(np.isfinite(upper), upper, np.nan)
    vertical, horizontal = sides.values()
    from matplotlib.colors import LogNorm

    axes.grid(False)
    axes.set_facecolor("0.85")
    norm = LogNorm() if style.spread_over_decades(cells) else None
    mesh = axes.pcolormesh(_edges(horizontal), _edges(vertical), cells, norm=norm, cmap="viridis", rasterized=True)
    for side, values in (("x", horizontal), ("y", vertical)):
        style.scale(axes, side, values)
    if min(cells.shape) >= 6 and np.isfinite(cells).all():
        lines = axes.contour(horizontal, vertical, cells, levels=_levels(cells), colors="white", linewidths=0.9)
        axes.clabel(lines, fmt=lambda level: f"{level:g}", fontsize=8)
    bar = canvas.colorbar(mesh, ax=axes, label=style.MEANING[view.value])
    bar.outline.set_visible(False)
    axes.set(xlabel=style.MEANING[view.x], ylabel=style.MEANING[view.by])
    _title(view, axes)
    return int(cells.size)


def _title(view: View, axes: Any) -> None:
    """What all rows of the picture share, and what the guarantee is about."""
    hidden = (view.x, view.by, "quantity", "relation", "name", view.value)
    table = view.table
    names = [name for name in style.MEANING if name in table.columns and name not in hidden]
    shared = {name: table[name][0] for name in names if (table[name] == table[name][0]).all()}
    shared = {name: value for name, value in shared.items() if not shared.keys() & set(SOURCES.get(name, ()))}
    if "name" in table.columns and view.by != "name" and table["name"][0]:
        shared = {"name": str(table["name"][0])} | shared
    words = ", or ".join(style.RELATION.get(str(word), "") for word in dict.fromkeys(table["relation"].tolist()))
    certified = view.value == measured(view.quantity) and (table["kind"] == "certified").all()
    style.title(axes, style.described(shared), f"{'certified; ' if certified else ''}{words}")


def _edges(values: np.ndarray) -> np.ndarray:
    """Cell borders half way between values, on the scale that they are drawn on."""
    logarithmic = style.spread_over_decades(values)
    at = np.log(values) if logarithmic else values
    middle = 0.5 * (at[1:] + at[:-1])
    edges = np.concatenate([[2 * at[0] - middle[0]], middle, [2 * at[-1] - middle[-1]]])
    return np.exp(edges) if logarithmic else edges


def _levels(cells: np.ndarray) -> list[float]:
    """Round values inside the range, about six of them."""
    low, high = cells.min(), cells.max()
    tens = 10.0 ** np.arange(np.floor(np.log10(max(low, 1e-300))), np.log10(high) + 1)
    for steps in ((1, 1.5, 2, 3, 4, 5, 6, 8), (1, 2, 3, 5), (1, 2, 5), (1, 3), (1,)):
        levels = [float(f"{ten * step:.6g}") for ten in tens for step in steps if low < ten * step < high]
        if len(levels) <= 7:
            break
    return levels


@dataclass(frozen=True, eq=False)
class View:
    """Rows to draw, the input along x, the one that makes families (or the vertical axis), and the rest."""

    table: Table
    quantity: str
    value: str
    x: str
    by: str | None
    fixed: dict[str, Any]

    def ends(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(lower, middle, upper) of what is drawn: the bracket where there is one."""
        if self.value == measured(self.quantity):
            return self.table["lower"], self.table["estimate"], self.table["upper"]
        column = self.table[self.value]
        return column, column, column


def measured(quantity: str) -> str:
    """What lower, estimate and upper are of."""
    return quantity if measures(quantity) else "epsilon"


def filtered(table: Table, where: Mapping[str, Any]) -> Table:
    """The rows with the given values; a value that no row has is refused, with those there are."""
    for name, wanted in where.items():
        if name not in table.columns:
            raise InputError(f"where: unknown column {name!r}{suggest(name, table.columns)}")
        column = table[name]
        if name in TEXT:
            keep = column == str(wanted)
        else:
            try:
                keep = np.isclose(column, float(wanted), rtol=1e-9, atol=0.0)
            except ValueError:
                raise InputError(f"where: {name} = {wanted!r} must be a number") from None
        if not keep.any():
            there = list(dict.fromkeys(column.tolist()))
            shown = ", ".join(map(str, there[:8])) + (" and more" if len(there) > 8 else "")
            raise InputError(f"where: no row has {name} = {wanted}; use one of {shown}")
        table = table.take(np.flatnonzero(keep))
    return table


def choose(
    table: Table, kind: str | None, x: str | None, by: str | None, value: str | None, where: Mapping[str, Any]
) -> tuple[str, View]:
    """The kind of picture and the view of the table for a curve or a heat map; what is not given is chosen.

    The input with the most values goes along x, the next one makes a family of curves if it has at most eight
    values and the vertical axis of a heat map otherwise; the others are held at the value that most rows have.
    """
    table = filtered(table, where)
    quantities = solved_for(table.columns)
    if len(quantities) > 1:
        raise InputError(
            f"the result solves for {' and '.join(quantities)}; choose one, such as --where quantity={quantities[0]}"
        )
    quantity = quantities[0]
    value = _value(table, quantity, value)
    fixed = dict(where)
    axes = _numeric_axes(table, value)
    for name in (x, by):
        if name is not None:
            _check_axis(table, name, value)
    x = x or next((name for name in axes if name != by and name not in _FOLLOWS.get(by or "", ())), None)
    if x is None:
        raise InputError("no input differs between the rows; there is nothing to draw along an axis")
    others = [name for name in _all_axes(table, value) if not _determined(table, name, x, by)]
    if by is None:
        by = _family(table, kind, others, value)
    if kind is None:
        many = by is not None and by not in TEXT and len(np.unique(table[by])) > MOST_CURVES
        kind = "heatmap" if many else "curve"
    if kind == "heatmap" and (by is None or by in TEXT or x in TEXT):
        raise InputError("a heat map needs two inputs that are numbers and differ; name them with --x and --by")
    if x == by:
        raise InputError(f"x and by are both {x}; choose two inputs")
    while left := [name for name in _all_axes(table, value) if not _determined(table, name, x, by)]:
        column = table[left[0]].tolist()
        most = max(dict.fromkeys(column), key=column.count)
        fixed[left[0]] = most
        table = filtered(table, {left[0]: most})
    if len(np.unique(table[x])) < 2:
        held = ", ".join(f"{name} = {held}" for name, held in fixed.items())
        raise InputError(
            f"with {held} only one value of {x} is left; choose rows with --where, or another --x and --by"
        )
    return kind, View(table, quantity, value, x, by, fixed)


def _determined(table: Table, name: str, x: str, by: str | None) -> bool:
    """Whether an input is along an axis, or follows from those that are."""
    used = [column for column in (x, by) if column is not None]
    if name in used:
        return True
    groups = set(zip(*(table[column].tolist() for column in used), strict=True))
    return len(groups) == len(set(zip(*(table[column].tolist() for column in (*used, name)), strict=True)))


def _value(table: Table, quantity: str, value: str | None) -> str:
    numbers = [name for name in table.columns if name not in (*TEXT, *ANSWER)]
    return (
        quantity if value is None else choice("value", value, dict.fromkeys([quantity, measured(quantity), *numbers]))
    )


def _check_axis(table: Table, name: str, value: str) -> None:
    inputs = [column for column in table.columns if column not in (*ANSWER, "relation", "kind", "status", "engine")]
    if name not in inputs:
        raise InputError(f"{name!r} is no input of this result{suggest(name, inputs)}")
    if name == value:
        raise InputError(f"{name} is what is drawn; choose another input for the axis")


def _all_axes(table: Table, value: str) -> list[str]:
    return [name for name in varying(table.columns) if name != value]


def _numeric_axes(table: Table, value: str) -> list[str]:
    """Inputs that differ, the one with the most values first; of equals, the earlier one in the table."""
    axes = varying(table.columns)
    names = [name for name in _all_axes(table, value) if name not in TEXT]
    return sorted(names, key=lambda name: -len(axes[name]))


def _family(table: Table, kind: str | None, others: list[str], value: str) -> str | None:
    """The input for families of curves, or for the vertical axis."""
    count = {name: len(np.unique(table[name].astype(str) if name in TEXT else table[name])) for name in others}
    numbers = [name for name in others if name not in TEXT]
    largest = max(numbers, key=lambda name: count[name], default=None)
    if kind == "heatmap" or (kind is None and largest is not None and count[largest] > MOST_CURVES):
        return largest
    return max((name for name in others if count[name] <= MOST_CURVES), key=lambda name: count[name], default=None)
