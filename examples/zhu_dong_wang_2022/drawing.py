"""What the figures of this folder share: arguments, a table of the numbers, and the picture."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping

import numpy as np

Columns = Mapping[str, np.ndarray]


def run(describe: str | None, numbers: Callable[[bool], Columns], x: str, y: str, **scales: str) -> None:
    """Compute columns, print them, and draw each column against the first."""
    parser = argparse.ArgumentParser(description=(describe or "").split("\n")[0])
    parser.add_argument("--out", required=True, help="PNG file to write")
    parser.add_argument("--small", action="store_true", help="a few points only")
    arguments = parser.parse_args()
    columns = numbers(arguments.small)
    print(*(f"{name:>24}" for name in columns))
    for row in zip(*columns.values(), strict=True):
        print(*(f"{value:24.9g}" for value in row))
    draw(columns, arguments.out, x, y, **scales)


def draw(columns: Columns, out: str, x: str, y: str, **scales: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    (_, across), *rest = columns.items()
    figure, axes = plt.subplots(figsize=(6.0, 4.2), layout="constrained")
    for (name, values), style in zip(rest, ("-", "--", "-.", ":", "-", "--"), strict=False):
        axes.plot(across, values, style, label=name)
    axes.set(xlabel=x, ylabel=y, **scales)
    axes.legend()
    figure.savefig(out, dpi=150)
    plt.close(figure)
