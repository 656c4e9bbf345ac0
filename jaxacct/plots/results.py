"""Pictures of the result of a sweep: a value against its inputs, and privacy profiles of rows."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxacct.core.types import Foreign
from jaxacct.core.validation import InputError, choice
from jaxacct.plots import style
from jaxacct.plots.side_by_side import MOST_CURVES, Curve, draw_profiles, draw_tradeoffs
from jaxacct.representations.mechanism_profile import profile
from jaxacct.sweeps.grid import SETTLED_BY, suggest
from jaxacct.sweeps.solve import run_of_row
from jaxacct.sweeps.table import TEXT, Table, place, read_table, solved_for, varying

MOST_ROWS = 6
_INPUTS = ("name", *style.MEANING)


def plot(
    result: Table | str | os.PathLike[str] | Foreign,
    out: str | os.PathLike[str],
    *,
    kind: str | None = None,
    x: str | None = None,
    by: str | None = None,
    value: str | None = None,
    where: Mapping[str, Any] | None = None,
    rows: Sequence[int] | None = None,
) -> dict[str, Any]:
    """Draw the result of a sweep into a file, and return a description of the picture.

    Parameters
    ----------
    result : Table, the DataFrame that a sweep returned, or the path of a .csv or .parquet result
    out : path ending in .png, .svg or .pdf
    kind : {"curve", "heatmap", "profile", "tradeoff"}; a value against an input, with its bracket as a band; a value as
        colour over two inputs; or some rows by `plot_profiles` or `plot_tradeoffs`. By default a curve, or a heat map
        where two inputs have more than eight values each.
    x, by : names of inputs, by default those with the most values. `x` is the horizontal axis. `by` is the vertical
        axis of a heat map, or has a curve for each value. Other inputs are held at the value that most rows have.
    value : name of an input, by default of the quantity that the sweep solved for. If that is a parameter,
        value="epsilon" draws the epsilon that was reached.
    where : dict from column names to values; only the rows with these values are drawn.
    rows : numbers, from 0, of the rows to draw as profiles or trade-off curves, among the rows that `where` leaves. By
        default up to six rows, evenly spread.

    Returns
    -------
    dict : the kind of picture, what it draws along which axis, the inputs held fixed, and the file.

    References
    ----------
    Dong, Roth, Su (2022), Gaussian Differential Privacy, Proposition 2.12 (the trade-off function from a profile).

    >>> import tempfile
    >>> from jaxacct.plots import plot
    >>> from jaxacct.sweeps import sweep
    >>> t = sweep({"noise_multiplier": [2.0, 4.0], "sampling_probability": 1, "steps": [1, 4, 9], "delta": 1e-5})
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     done = plot(t, f"{folder}/figure.png")
    >>> done["kind"], done["x"], done["by"], done["value"]
    ('curve', 'steps', 'noise_multiplier', 'epsilon')
    """
    path = Path(out)
    style.check_picture(path)
    table = result if isinstance(result, Table) else read_table(result)
    if kind is not None:
        choice("kind", kind, ("curve", "heatmap", "profile", "tradeoff"))
    with style.settings():
        canvas, axes = style.figure(square=kind == "tradeoff")
        if kind in ("profile", "tradeoff"):
            for name, given in {"x": x, "by": by, "value": value}.items():
                if given is not None:
                    raise InputError(f"{name} is for curves and heat maps; choose rows with --rows or --where")
            chosen = pick(filtered(table, where or {}), None if rows is None else list(rows))
            words = style.described(_shared(chosen)), style.RELATION.get(str(chosen["relation"][0]), "")
            (draw_profiles if kind == "profile" else draw_tradeoffs)(axes, _curves(chosen), None, *words)
            report: dict[str, Any] = {"kind": kind, "curves": len(chosen)}
        else:
            if rows is not None:
                raise InputError("rows is for profiles and trade-off curves; choose rows with --where")
            kind, view = choose(table, kind, x, by, value, where or {})
            draw = draw_heatmap if kind == "heatmap" else draw_curves
            count = draw(view, canvas, axes)
            report = {"kind": kind, "value": view.value, "x": view.x, "by": view.by, "fixed": view.fixed}
            report |= {"cells" if kind == "heatmap" else "curves": count}
        style.save(canvas, path)
    return report | {"written": str(path)}


def draw_curves(view: View, canvas: Any, axes: Any) -> int:
    """Draw upper ends against x, one curve per value of `by`, with bands to the lower ends; return how many curves."""
    table, (low, high) = view.table, view.ends()
    families = [None] if view.by is None else list(dict.fromkeys(table[view.by].tolist()))
    if view.by is not None and view.by not in TEXT:
        families.sort()
    for family, colour, dash in zip(families, style.colours(families), style.dashes(len(families)), strict=True):
        rows = np.arange(len(table)) if view.by is None else np.flatnonzero(table[view.by] == family)
        rows = rows[np.argsort(table[view.x][rows], kind="stable")]
        at = table[view.x][rows]
        shown = np.where(np.isfinite(high[rows]), high[rows], np.nan)
        name = family if isinstance(family, str) or family is None else style.number(family)
        marker = "o" if rows.size <= 25 else None
        axes.plot(at, shown, dash, color=colour, label=name, marker=marker, markersize=3.2)
        axes.fill_between(at, low[rows], high[rows], color=colour, alpha=0.25, linewidth=0)
    style.scale(axes, "x", table[view.x])
    style.scale(axes, "y", high)
    axes.set(xlabel=style.MEANING[view.x], ylabel=style.MEANING[view.value])
    _title(view, axes)
    style.legend(axes, len(families), style.MEANING.get(view.by or "", ""))
    return len(families)


def draw_heatmap(view: View, canvas: Any, axes: Any) -> int:
    """Draw the value as colour over x and `by`, with lines of equal value; return the number of cells."""
    assert view.by is not None
    table, upper = view.table, view.ends()[1]
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
    """Write above the picture the inputs that all its rows share, and the relation of the guarantee."""
    table, drawn = view.table, (view.x, view.by, view.value)
    shared = {name: value for name, value in _shared(table).items() if name not in drawn}
    words = ", or ".join(style.RELATION.get(str(word), "") for word in dict.fromkeys(table["relation"].tolist()))
    certified = view.value == measured(view.quantity) and (table["kind"] == "certified").all()
    style.title(axes, style.described(shared), f"{'certified; ' if certified else ''}{words}")


def _edges(values: np.ndarray) -> np.ndarray:
    """Return the cell borders half way between values, on the scale of their axis."""
    logarithmic = style.spread_over_decades(values)
    at = np.log(values) if logarithmic else values
    middle = 0.5 * (at[1:] + at[:-1])
    edges = np.concatenate([[2 * at[0] - middle[0]], middle, [2 * at[-1] - middle[-1]]])
    return np.exp(edges) if logarithmic else edges


def _levels(cells: np.ndarray) -> list[float]:
    """Return about six round values, within the range of the cells, at which lines of equal value are drawn."""
    low, high = cells.min(), cells.max()
    tens = 10.0 ** np.arange(np.floor(np.log10(max(low, 1e-300))), np.log10(high) + 1)
    for steps in ((1, 1.5, 2, 3, 4, 5, 6, 8), (1, 2, 3, 5), (1, 2, 5), (1, 3), (1,)):
        levels = [float(f"{ten * step:.6g}") for ten in tens for step in steps if low < ten * step < high]
        if len(levels) <= 7:
            break
    return levels


@dataclass(frozen=True, eq=False)
class View:
    """The rows to draw, the column `value` to draw, and the inputs `x`, `by` to draw it against (see `plot`)."""

    table: Table
    quantity: str
    value: str
    x: str
    by: str | None
    fixed: dict[str, Any]

    def ends(self) -> tuple[np.ndarray, np.ndarray]:
        """Return (lower, upper) of the drawn value; a value without a bracket is returned twice."""
        if self.value == measured(self.quantity):
            return self.table["lower"], self.table["upper"]
        column = self.table[self.value]
        return column, column


def measured(quantity: str) -> str:
    """Return what the columns `lower`, `estimate`, `upper` bracket if a sweep solved for `quantity`."""
    return "delta" if quantity == "delta" else "epsilon"


def filtered(table: Table, where: Mapping[str, Any]) -> Table:
    """Return the rows with the given values; refuse a value that no row has, and name the existing values."""
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
    """Return the kind of picture ("curve" or "heatmap") and the rows to draw. Arguments that are None get defaults."""
    table = filtered(table, where)
    quantities = solved_for(table.columns)
    if len(quantities) > 1:
        raise InputError(
            f"the result solves for {' and '.join(quantities)}; choose one, such as --where quantity={quantities[0]}"
        )
    quantity, fixed = quantities[0], dict(where)
    if value is None:
        value = quantity
    inputs = [name for name in _INPUTS if name in table.columns]
    choice("value", value, dict.fromkeys([quantity, measured(quantity), *(n for n in inputs if n not in TEXT)]))
    for name in (x, by):
        if name is not None and name not in inputs:
            raise InputError(f"{name!r} is no input of this result{suggest(name, inputs)}")
        if name == value:
            raise InputError(f"{name} is what is drawn; choose another input for the axis")
    if x is None:
        axes = {name: len(values) for name, values in varying(table.columns).items() if name not in (value, *TEXT)}
        free = [name for name in axes if name != by and name not in SETTLED_BY.get(by or "", ())]
        x = max(free, key=lambda name: axes[name], default=None)
    if x is None:
        raise InputError("no input differs between the rows; there is nothing to draw along an axis")
    if by is None:
        # For a heat map, `by` is the numeric input with the most values. For curves, `by` is the input with the most
        # values among the inputs with at most MOST_CURVES values.
        others = _open_axes(table, value, x, by)
        count = {name: len(np.unique(table[name].astype(str) if name in TEXT else table[name])) for name in others}
        by = max((name for name in others if name not in TEXT), key=count.__getitem__, default=None)
        if not (kind == "heatmap" or (kind is None and by is not None and count[by] > MOST_CURVES)):
            by = max((name for name in others if count[name] <= MOST_CURVES), key=count.__getitem__, default=None)
    if kind is None:
        many = by is not None and by not in TEXT and len(np.unique(table[by])) > MOST_CURVES
        kind = "heatmap" if many else "curve"
    if kind == "heatmap" and (by is None or by in TEXT or x in TEXT):
        raise InputError("a heat map needs two inputs that are numbers and differ; name them with --x and --by")
    if x == by:
        raise InputError(f"x and by are both {x}; choose two inputs")
    while left := _open_axes(table, value, x, by):
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


def _open_axes(table: Table, value: str, x: str, by: str | None) -> list[str]:
    """Return the inputs that vary, are neither `x` nor `by`, and do not follow from `x` and `by`."""
    used = [column for column in (x, by) if column is not None]
    cells = lambda names: len(set(zip(*(table[name].tolist() for name in names), strict=True)))
    free = (name for name in varying(table.columns) if name not in (value, *used))
    return [name for name in free if cells([*used, name]) != cells(used)]


def pick(table: Table, rows: list[int] | None) -> Table:
    """Return the requested rows, or up to MOST_ROWS evenly spread rows; refuse rows without an answer."""
    if rows is None:
        solved = np.flatnonzero(np.isfinite(table["upper"]))
        spread = np.linspace(0, solved.size - 1, min(solved.size, MOST_ROWS)).astype(int)
        rows = solved[spread].tolist()
    for row in rows:
        if not 0 <= row < len(table):
            raise InputError(f"rows: {row} must be >= 0 and < {len(table)}; rows are counted from 0")
        if "repetitions" in table.columns and table["repetitions"][row]:
            raise InputError(f"rows: row {row} is a private selection, of which no profile is drawn; choose another")
        if np.isnan(table["upper"][row]):
            raise InputError(f"rows: row {row} has no answer ({table['status'][row]}); choose another")
    if not rows:
        raise InputError("no row has an answer to draw; choose others with --rows or --where")
    chosen = table.take(np.array(rows))
    if len(set(chosen["relation"])) > 1:
        raise InputError("the rows have different relations; choose rows of one with --where relation=...")
    return chosen


def _curves(table: Table) -> list[Curve]:
    """Return a curve for each row, labelled by its name if all differ, else by the given inputs that differ."""
    named = len(set(table.columns.get("name", ()))) == len(table)
    solved, found = set(table["quantity"]) - {"epsilon", "delta"}, []
    hidden = {*_shared(table), *(solved if len(set(table["quantity"])) == 1 else ())}
    for row in ({name: column[at] for name, column in table.columns.items()} for at in range(len(table))):
        run = run_of_row(row)
        inputs = ["name"] if named else [name for name in _INPUTS if name in row and name not in hidden]
        name = style.described({name: row[name] for name in inputs})
        found.append(Curve(name or type(run).__name__, profile(run, str(row["relation"]))))
    return found


def _shared(table: Table) -> dict[str, Any]:
    """Return the inputs that are the same in all rows."""
    columns = {name: table[name] for name in _INPUTS if name in table.columns}
    return {name: column[0] for name, column in columns.items() if (column == column[0]).all()}
