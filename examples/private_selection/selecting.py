"""What the figures of this folder share: arguments, tables, pictures, bounds, candidates gained."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping

import numpy as np

import jaxacct as ja
from jaxacct import selection

Columns = Mapping[str, np.ndarray]
RENYI, PROFILE, WORST, ATTACK = "Renyi (Papernot, Steinke)", "profile (Koskela et al.)", "worst case (ours)", "attack"


def run(describe: str | None, numbers: Callable[[bool], Mapping[str, Columns]], y: str, **scales: str) -> None:
    """Compute and print tables; with --out draw one panel per table, with each column against the first column.

    y : the label of every panel, or several labels separated by "|".
    """
    parser = argparse.ArgumentParser(description=(describe or "").split("\n")[0])
    parser.add_argument("--out", help="PNG file to write; needs matplotlib")
    parser.add_argument("--small", action="store_true", help="a few points only")
    arguments = parser.parse_args()
    panels = numbers(arguments.small)
    for title, columns in panels.items():
        print(title)
        print(*(f"{name:>27}" for name in columns))
        for row in zip(*columns.values(), strict=True):
            print(*(f"{value:27.6g}" for value in row))
    if arguments.out:
        draw(panels, arguments.out, y, **scales)


def draw(panels: Mapping[str, Columns], out: str, y: str, **scales: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    wide = min(len(panels), 2 if len(panels) == 4 else 3)
    tall = -(-len(panels) // wide)
    figure, every = plt.subplots(tall, wide, figsize=(5.2 * wide, 4.2 * tall), layout="constrained", squeeze=False)
    for place, (axes, (title, columns)) in enumerate(zip(every.flat, panels.items(), strict=False)):
        (x, across), *rest = columns.items()
        for number, (name, values) in enumerate(rest):
            style = ("-", "--", "-.", (0, (5, 1, 1, 1, 1, 1)))[number % 4]
            attack = {"color": "black", "linestyle": ":", "zorder": 9}
            axes.plot(across, values, label=name, **(attack if name == ATTACK else {"linestyle": style}))
        labels = y.split("|")
        axes.set(xlabel=x, ylabel=labels[place % len(labels)], title=title, **scales)
        axes.legend(fontsize=8)
    figure.savefig(out, dpi=150)
    plt.close(figure)


def epsilons(
    base: ja.Mechanism, law: selection.Law, delta: float | np.ndarray, *published: str
) -> dict[str, np.ndarray]:
    """Epsilon by the named published bounds and by the exact worst case, and the epsilon that the worst score has."""
    named = {"renyi": RENYI, "privacy_profile": PROFILE}
    found = {named[b]: selection.bound_epsilon(base, law, delta, bound=b).upper for b in published}
    exact = ja.epsilon(selection.select(base, law), delta)
    return {**found, WORST: exact.upper, ATTACK: exact.lower}


def gained(columns: Columns, better: str, worse: str = RENYI) -> np.ndarray:
    """The factor by which `better` allows more candidates than `worse` at equal epsilon; inf beyond the last row.

    The first column is the mean number of candidates, ascending; its logarithm is interpolated linearly in epsilon.
    """
    m = np.log(next(iter(columns.values())))
    return np.exp(np.interp(columns[worse], columns[better], m, right=np.inf) - m)


def tuned_profile(base: ja.Mechanism, law: selection.Law, delta: float, points: int = 100) -> ja.PrivacyProfile:
    """The exact worst case of a selection as a privacy profile, given at `points` values of epsilon."""
    chosen = selection.select(base, law)
    grid = np.linspace(0.0, float(ja.epsilon(chosen, delta * 1e-4).upper), points)
    return ja.PrivacyProfile(grid, *(ja.delta(chosen, grid, relation=r).upper for r in ("remove_one", "add_one")))
