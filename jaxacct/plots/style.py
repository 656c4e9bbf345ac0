"""The look of pictures (labels with symbols, scales, colours for colour-blind readers), and how they are saved."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxacct.core.files import optional_package, replacing
from jaxacct.core.validation import InputError
from jaxacct.mechanisms.dp_sgd_run import SOURCES

SYMBOL = {"noise_multiplier": "$\\sigma$", "sampling_probability": "$q$", "steps": "$T$", "epsilon": "$\\varepsilon$"}
SYMBOL |= {"delta": "$\\delta$", "target_epsilon": "target $\\varepsilon$", "target_delta": "target $\\delta$"}
MEANING = {
    "noise_multiplier": "noise multiplier $\\sigma$ (noise s.d. / clip norm)",
    "sampling_probability": "sampling probability $q$ per step",
    "steps": "number of steps $T$",
    "epsilon": "privacy loss $\\varepsilon$",
    "delta": "$\\delta$",
    "target_epsilon": "target privacy loss $\\varepsilon$",
    "target_delta": "target $\\delta$",
    "target_advantage": "target membership advantage",
    "target_tpr": "target true-positive rate",
    "target_bayes_success": "target Bayes success",
    "target_posterior": "target posterior probability",
    "target_reconstruction": "target reconstruction success",
    "target_mu": "target $\\mu$ of Gaussian DP",
    "at_fpr": "false-positive rate",
    "prior": "prior probability of membership",
    "baseline": "reconstruction success without output",
    "above_fpr": "floor of the error rates",
    "dataset_size": "data-set size (records)",
    "batch_size": "expected batch size (records)",
    "slots": "batches of a round or of an epoch",
    "epochs": "epochs",
    "sampling": "batch rule",
    "cap": "cap of a batch (records)",
    "bands": "steps that share noise",
    "groups": "groups that take turns",
    "group": "records of one person",
    "repetitions": "law of $K$",
    "eta": "$\\eta$ of the law of $K$",
    "gamma": "$\\gamma$ of the law of $K$",
    "mean": "expected number of candidates $E[K]$",
    "trials": "trials of the law of $K$",
    "probability_of_run": "probability that a trial runs",
    "count": "number of candidates $K$",
}
RELATION = {
    "add_or_remove_one": "add or remove one record",
    "add_one": "add one record",
    "remove_one": "remove one record",
    "replace_one": "replace one record",
    "zero_out": "zero out one record",
}

LONG = 40
"""Labels with more characters stand below the axes."""
_DISTINCT = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8c8c00")
"""Okabe and Ito's palette, with its yellow darkened for white paper."""
_DASHES = ("-", "--", "-.", ":")
_SETTINGS = {
    "font.size": 9.5,
    "axes.labelsize": 10,
    "legend.fontsize": 8.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "0.9",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "lines.linewidth": 1.6,
    "legend.frameon": False,
    "pdf.fonttype": 42,
    "svg.hashsalt": "jaxacct",
}


def settings() -> Any:
    """Return the context in which a figure is drawn and saved; its exit restores matplotlib's settings."""
    return optional_package("matplotlib", "a picture").rc_context(_SETTINGS)


def figure(square: bool) -> tuple[Any, Any]:
    """Return a figure, as wide as one column of text, and its axes, without matplotlib's global state."""
    from matplotlib.figure import Figure

    canvas = Figure(figsize=(4.4, 4.6) if square else (5.4, 3.7), layout="constrained")
    return canvas, canvas.add_subplot()


def check_picture(path: Path) -> None:
    """Before any work is done, raise an error if `path` has no picture's ending, or if matplotlib is missing."""
    if path.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise InputError(f"{path}: a picture must end in .png, .svg or .pdf")
    optional_package("matplotlib", "a picture")


def save(canvas: Any, path: Path) -> None:
    """Write the figure; the same figure gives the same bytes."""
    kind = path.suffix.lower().removeprefix(".")
    undated = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(kind)
    with replacing(path) as temporary:
        canvas.savefig(temporary, format=kind, dpi=200, metadata=undated)


def spread_over_decades(values: Any) -> bool:
    """Return whether values need a logarithmic axis: all are positive, the largest is at least 8 times the smallest."""
    known = np.asarray(values, np.float64)
    known = known[np.isfinite(known)]
    return bool(known.size and known.min() > 0.0 and known.max() >= 8.0 * known.min())


def scale(axes: Any, side: str, values: Any) -> None:
    """Make an axis logarithmic if its values span decades. Label it with plain numbers if they span only a few."""
    if not spread_over_decades(values):
        return
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    getattr(axes, f"set_{side}scale")("log")
    known = np.asarray(values)[np.isfinite(values)]
    ratio = known.max() / known.min()
    if ratio < 300.0:
        axis = getattr(axes, f"{side}axis")
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if ratio > 20.0 else (1.0, 1.5, 2.0, 3.0, 5.0, 7.0)))
        axis.set_major_formatter(FuncFormatter(lambda value, _: number(value)))
        axis.set_minor_formatter(NullFormatter())


def number(value: float) -> str:
    r"""Write a number for a label; write very large and very small numbers with a power of ten.

    >>> number(1e-5), number(0.02), number(60000.0), number(2.5e-7)
    ('$10^{-5}$', '0.02', '60,000', '$2.5\\times10^{-7}$')
    """
    if value != 0 and not 1e-3 <= abs(value) < 1e6:
        front, exponent = f"{value:.3g}".split("e") if "e" in f"{value:.3g}" else (f"{value:.3g}", "0")
        power = f"10^{{{int(exponent)}}}"
        return f"${power}$" if front == "1" else f"${front}\\times{power}$"
    return f"{int(value):,}" if float(value).is_integer() else f"{value:.4g}"


def described(fields: Mapping[str, Any]) -> str:
    """Write inputs as symbol = number, and text as it is. Leave out what is absent, or follows from another input."""
    given = {name: value for name, value in fields.items() if value == value and value != ""}
    return ", ".join(
        value if isinstance(value, str) else f"{SYMBOL.get(name, name.replace('_', ' '))} = {number(value)}"
        for name, value in given.items()
        if not given.keys() & set(SOURCES.get(name, ()))
    )


def colours(values: Sequence[Any]) -> list[Any]:
    """Return one colour per curve: an ordered scale for numbers, distinct colours for names."""
    from matplotlib import colormaps

    if len(values) == 1 or isinstance(values[0], str):
        return [_DISTINCT[i % len(_DISTINCT)] for i in range(len(values))]
    return [colormaps["viridis"](x) for x in np.linspace(0.0, 0.85, len(values))]


def dashes(count: int) -> list[str]:
    """Return one line style per curve, so that curves differ in black-and-white print too."""
    return [_DASHES[i % len(_DASHES)] for i in range(count)]


def title(axes: Any, *lines: str) -> None:
    """Write lines about the whole picture in small print above it."""
    axes.set_title("\n".join(line for line in lines if line), fontsize=9, color="0.25", loc="left")


def legend(axes: Any, count: int, title: str = "") -> None:
    """Draw the legend: below the axes for long labels, inside them for few curves, otherwise beside them."""
    handles, labels = axes.get_legend_handles_labels()
    if max(map(len, labels), default=0) > LONG:
        whole = [label.replace(" = ", "\xa0=\xa0") for label in labels]  # no line ends at an equals sign
        labels = [textwrap.fill(each, 66, break_long_words=False, break_on_hyphens=False) for each in whole]
        axes.legend(handles, labels, title=title, loc="upper center", bbox_to_anchor=(0.5, 0.0), borderaxespad=4.5)
        if axes.figure.axes == [axes]:  # the curves keep their height
            lines = "\n".join(labels).count("\n") + 1
            axes.figure.set_figheight(axes.figure.get_figheight() + 0.15 * lines + 0.06 * len(labels) + 0.3)
    elif count > 6:
        axes.legend(title=title, loc="center left", bbox_to_anchor=(1.0, 0.5))
    elif count > 1:
        axes.legend(title=title)
