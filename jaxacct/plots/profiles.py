"""Privacy profiles and trade-off curves of selected rows of a sweep, computed again from their parameters."""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxacct.accounting import account
from jaxacct.core.progress import Progress
from jaxacct.core.validation import InputError
from jaxacct.plots import style
from jaxacct.sweeps import samplings
from jaxacct.sweeps.columns import TEXT
from jaxacct.sweeps.table import Table

EPSILONS_PER_PROFILE = 64
"""Values of epsilon at which a profile is computed: enough for a smooth curve."""
SMALLEST_DELTA = 1e-10
"""The delta down to which profiles are drawn, below any that is claimed in practice."""
MOST_ROWS = 6
"""Rows that are drawn unless rows are asked for: their legend still fits."""
_PARAMETERS = ("noise_multiplier", "sampling_probability", "steps")


def pick(table: Table, rows: list[int] | None) -> Table:
    """The rows asked for, or up to six evenly spread ones; only rows that have an answer."""
    if rows is None:
        solved = np.flatnonzero(np.isfinite(table["upper"]))
        spread = np.linspace(0, solved.size - 1, min(solved.size, MOST_ROWS)).astype(int)
        rows = solved[spread].tolist()
    for row in rows:
        if not 0 <= row < len(table):
            raise InputError(f"rows: {row} must be >= 0 and < {len(table)}; rows are counted from 0")
        if "repetitions" in table.columns and table["repetitions"][row]:
            raise InputError(f"rows: row {row} is a private selection, of which no profile is drawn; choose another")
        if not all(np.isfinite(table[name][row]) for name in _PARAMETERS):
            raise InputError(f"rows: row {row} has no answer ({table['status'][row]}); choose another")
    if not rows:
        raise InputError("no row has an answer to draw; choose others with --rows or --where")
    chosen = table.take(np.array(rows))
    if len(set(chosen["relation"])) > 1:
        raise InputError("the rows have different relations; choose rows of one with --where relation=...")
    return chosen


def profile(table: Table) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(epsilon, and lower, estimate, upper of delta), one line per row, from epsilon 0 to where delta is 1e-10.

    The values of epsilon are denser near 0, where the trade-off function needs them.  A progress bar counts rows.
    """
    relation = str(table["relation"][0])
    found, bar = np.zeros((len(table), 4, EPSILONS_PER_PROFILE)), Progress(len(table), None, unit="profiles")
    try:
        for row in range(len(table)):
            bar.update(row)
            run = samplings.run_of_row({name: column[row] for name, column in table.columns.items()})
            end = account.epsilon(run, SMALLEST_DELTA, relation=relation).upper
            epsilon = np.linspace(0.0, 1.0, EPSILONS_PER_PROFILE) ** 3 * max(float(end), 1e-3)
            bounds = account.delta(run, epsilon, relation=relation)
            found[row] = epsilon, bounds.lower, bounds.estimate, bounds.upper
        bar.update(len(table))
    finally:
        bar.close()
    epsilon, low, middle, high = np.moveaxis(found, 1, 0)
    return epsilon, low, middle, high


def tradeoff(epsilon: np.ndarray, delta: np.ndarray, alpha: np.ndarray) -> np.ndarray:
    """The least false negative rate at false positive rates alpha, for a privacy profile at some points.

    `f(alpha) = max over the points of max(0, 1 - delta - e^eps alpha, e^-eps (1 - delta - alpha))`, for a profile
    that holds in both directions [Dong, Roth and Su 2022, Proposition 2.5].  With upper ends of delta it is a
    certified lower bound on the trade-off function.

    >>> tradeoff(np.array([0.0, 1.0]), np.array([0.2, 0.0]), np.array([0.0, 0.2, 1.0])).round(3).tolist()
    [1.0, 0.6, 0.0]
    """
    eps, slack, at = epsilon[:, None], delta[:, None], alpha[None, :]
    steep = 1.0 - slack - np.exp(eps) * at
    flat = np.exp(-eps) * (1.0 - slack - at)
    return np.maximum(np.max(np.maximum(steep, flat), axis=0), 0.0)


def draw_profiles(table: Table, axes: Any) -> None:
    """delta against epsilon, with the bracket as a band."""
    epsilon, low, middle, high = profile(table)
    for row, (name, colour, dash) in enumerate(_looks(table)):
        axes.plot(epsilon[row], middle[row], dash, color=colour, label=name)
        axes.fill_between(epsilon[row], low[row], high[row], color=colour, alpha=0.25, linewidth=0)
    largest = epsilon[:, -1]
    if style.spread_over_decades(largest):
        style.scale(axes, "x", largest)
        axes.set_xlim(0.05 * largest.min(), 1.2 * largest.max())
    else:
        axes.set_xlim(left=0.0)
    axes.set_yscale("log")
    axes.set(ylim=(SMALLEST_DELTA, 1.5), xlabel=style.MEANING["epsilon"], ylabel="$\\delta(\\varepsilon)$")
    _finish(table, axes, "privacy profile, certified")


def draw_tradeoffs(table: Table, axes: Any) -> None:
    """The certified lower bound on the trade-off function, with the line of perfect privacy."""
    relation = str(table["relation"][0])
    if relation in ("add_one", "remove_one"):
        raise InputError(f"a trade-off curve needs both directions, not relation {relation!r}; use add_or_remove_one")
    epsilon, _, _, high = profile(table)
    alpha = np.unique(np.concatenate([np.linspace(0.0, 1.0, 401), np.geomspace(1e-6, 1e-2, 60)]))
    for row, (name, colour, dash) in enumerate(_looks(table)):
        axes.plot(alpha, tradeoff(epsilon[row], high[row], alpha), dash, color=colour, label=name)
    axes.plot([0, 1], [1, 0], ":", color="0.5", linewidth=1.0)
    axes.text(0.52, 0.52, "no leakage", color="0.4", fontsize=8.5, rotation=-45, ha="center", va="center")
    axes.set(xlabel="false positive rate $\\alpha$", ylabel="false negative rate, at least $f(\\alpha)$")
    axes.set(xlim=(0, 1), ylim=(0, 1), aspect="equal")
    _finish(table, axes, "trade-off function, certified lower bound")


def _looks(table: Table) -> list[tuple[str, Any, str]]:
    """(label, colour, line style) per row; the label names what differs."""
    shown = [name for name in ("name", *_PARAMETERS) if name in table.columns]
    differing = [name for name in shown if len(set(table[name].tolist())) > 1]
    names = [
        style.described({name: table[name][row] if name in TEXT else float(table[name][row]) for name in differing})
        for row in range(len(table))
    ]
    return list(zip(names, style.colours(names), style.dashes(len(names)), strict=True))


def _finish(table: Table, axes: Any, what: str) -> None:
    shown = [name for name in ("name", *_PARAMETERS) if name in table.columns]
    shared = {name: table[name].tolist()[0] for name in shown if len(set(table[name].tolist())) == 1}
    style.title(axes, what, style.described(shared), style.RELATION.get(str(table["relation"][0]), ""))
    style.legend(axes, len(table))
