"""Curves and heat maps of a value against the inputs of a sweep."""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxacct.plots import style
from jaxacct.plots.choose import View, measured
from jaxacct.sweeps.columns import TEXT, place

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
    if "epochs" in shared or "batch_size" in shared:
        shared = {name: value for name, value in shared.items() if name not in ("steps", "sampling_probability")}
    if "name" in table.columns and view.by != "name" and table["name"][0]:
        shared = {"name": str(table["name"][0])} | shared
    words = style.RELATION.get(str(table["relation"][0]), "")
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
