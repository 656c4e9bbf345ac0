"""Pictures of the result of a sweep, and of mechanisms side by side (need matplotlib)."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxacct.core.validation import InputError, choice
from jaxacct.plots import inputs, profiles, style
from jaxacct.plots.side_by_side import plot_profiles, plot_tradeoffs
from jaxacct.sweeps.table import Table, read_table

__all__ = ["plot", "plot_profiles", "plot_tradeoffs"]


def plot(
    result: Table | str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    kind: str | None = None,
    x: str | None = None,
    by: str | None = None,
    value: str | None = None,
    where: Mapping[str, Any] | None = None,
    rows: Sequence[int] | None = None,
) -> dict[str, Any]:
    """Draw the result of a sweep into a .png, .svg or .pdf file, and say what was drawn.

    Parameters
    ----------
    result : Table, or the path of a .csv or .parquet result
    out : path ending in .png, .svg or .pdf
    kind : {"curve", "heatmap", "profile", "tradeoff"}
        A value against an input with its bracket as a band; a value as colour over two inputs; delta against
        epsilon, or the trade-off function, of some rows.  By default a curve, or a heat map where two inputs
        have more than eight values each.
    x, by : names of inputs
        What goes along the horizontal axis, and what makes a family of curves or the vertical axis.  By default
        the inputs with the most values; all others are held at the value that most rows have.
    value : name of a column
        By default what was solved for; "epsilon" draws the one that a calibrated parameter gives.
    where : dict of column names and values
        Only the rows with these values.
    rows : row numbers from 0
        For profiles and trade-off curves, among the rows that `where` leaves; by default up to six, evenly spread.

    Returns
    -------
    dict
        kind, what was drawn along the axes, what was held fixed, and the file.

    Raises
    ------
    InputError
        One line for whatever cannot be drawn or written.

    References
    ----------
    Dong, Roth, Su (2022), Gaussian Differential Privacy, Proposition 2.5 (the trade-off function from a profile).

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
        choice("kind", kind, inputs.KINDS)
    with style.settings():
        canvas, axes = style.figure(square=kind == "tradeoff")
        if kind in ("profile", "tradeoff"):
            for name, given in {"x": x, "by": by, "value": value}.items():
                if given is not None:
                    raise InputError(f"{name} is for curves and heat maps; choose rows with --rows or --where")
            chosen = profiles.pick(inputs.filtered(table, where or {}), None if rows is None else list(rows))
            (profiles.draw_profiles if kind == "profile" else profiles.draw_tradeoffs)(chosen, axes)
            report: dict[str, Any] = {"kind": kind, "curves": len(chosen)}
        else:
            if rows is not None:
                raise InputError("rows is for profiles and trade-off curves; choose rows with --where")
            kind, view = inputs.choose(table, kind, x, by, value, where or {})
            draw = inputs.draw_heatmap if kind == "heatmap" else inputs.draw_curves
            count = draw(view, canvas, axes)
            report = {"kind": kind, "value": view.value, "x": view.x, "by": view.by, "fixed": view.fixed}
            report |= {"cells" if kind == "heatmap" else "curves": count}
        style.save(canvas, path)
    return report | {"written": str(path)}
