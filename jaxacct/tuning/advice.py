"""What the budget advisor answers: its options as records, a table, a CSV, a data frame and a picture."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxacct.core import markup
from jaxacct.core.files import optional_package, write_csv
from jaxacct.core.text import outward
from jaxacct.core.validation import POSITIVE, InputError, check

__all__ = ["Advice", "Option"]


@dataclass(frozen=True)
class Option:
    """One way to spend the budget.

    Parameters
    ----------
    split : {"everything", "rest", "all"}
        "everything": candidates on all data, the winner released.  "rest" or "all": candidates on a sample, then a
        final run on the other data, or on all data.
    share : float
        Of the sample; 1 for "everything".
    family, parameter : str, float
        The law of K: gamma, of Poisson laws the mean.
    candidates : float
        E[K], of all rounds together.
    noise_multiplier : float
        Of candidates and final run.
    released_noise, candidate_noise : float
        Noise multiplier over expected batch size, of the released model and of the candidates: the standard deviation
        of the noise on a mean gradient, per clip norm.
    epsilon : float
        Certified upper end for the whole, at most the target; NaN where nothing meets it.
    gradients, gradients_95 : float
        Gradient evaluations: their expectation and their 95 % quantile by the law of K.
    status : {"ok", "not_binding", "loose", "infeasible"}
        "ok": at most 0.2 % of the target is unspent.  "not_binding": more, because less noise or an E[K] above a
        million is not searched.  "loose": more, for another reason, such as a whole number of candidates.
    search : str
        "iid"; "4 rounds", each round's winner public, with `candidates` those of all rounds and `parameter` that of one
        round; "adaptive", each candidate after all before it.
    """

    split: str
    share: float
    family: str
    parameter: float
    candidates: float
    noise_multiplier: float
    released_noise: float
    candidate_noise: float
    epsilon: float
    gradients: float
    gradients_95: float
    status: str
    search: str = "iid"


@dataclass(frozen=True)
class Advice:
    """The options for one target, in the order of the grid; made by `advise`.

    `print(advice)` is a table; `to_csv`, `to_pandas` and `draw` write it.

    Parameters
    ----------
    options : tuple of Option
    target_epsilon, target_delta : float
    solved : {"noise_multiplier", "candidates"}
        What was solved for.
    untuned_noise : float
        Noise multiplier of a single run that takes the whole budget.

    >>> from jaxacct import tuning
    >>> advice = tuning.advise(4.0, 1e-5, 1000, 1.0, steps=1, noise_multiplier=2.0, shares=[1.0], families=["poisson"])
    >>> advice.solved, advice.best().family, len(advice.rows())
    ('candidates', 'poisson', 1)
    """

    options: tuple[Option, ...]
    target_epsilon: float
    target_delta: float
    solved: str
    untuned_noise: float

    def best(self, noise: float | None = None) -> Option:
        """The option with the most candidates, and of equals the least noise; `noise` limits the released noise.

        Without a limit it is for advice at a given noise multiplier; InputError where no option is left.
        """
        limit = math.inf if noise is None else float(check("noise", noise, POSITIVE))
        left = [one for one in self.options if one.status != "infeasible" and one.released_noise <= limit]
        if not left:
            raise InputError("no option meets the target within this noise; allow more, or raise the target")
        return max(left, key=lambda one: (one.candidates, -one.released_noise))

    def rows(self) -> list[list[str]]:
        """The cells as text, floats in full precision."""
        return [[x if isinstance(x, str) else repr(x) for x in dataclasses.astuple(one)] for one in self.options]

    def to_csv(self, path: str | os.PathLike[str]) -> None:
        """Write a CSV with a header line."""
        write_csv(Path(path), _COLUMNS, self.rows())

    def to_pandas(self) -> Any:
        """The table as a pandas.DataFrame (needs pandas)."""
        return optional_package("pandas", "a DataFrame").DataFrame([dataclasses.asdict(one) for one in self.options])

    def draw(self, path: str | os.PathLike[str]) -> None:
        """Draw released noise, or the candidates that were solved for: .png, .svg or .pdf (needs matplotlib)."""
        from jaxacct.plots import style

        place = Path(path)
        style.check_picture(place)
        with style.settings():
            canvas, axes = style.figure(square=False)
            (_draw_noise if self.solved == "noise_multiplier" else _draw_candidates)(self, axes)
            target = {"target_epsilon": self.target_epsilon, "target_delta": self.target_delta}
            style.title(axes, "what the budget buys, certified", style.described(target))
            style.save(canvas, place)

    def _repr_html_(self) -> str:
        shown, rest = markup.cut(len(self.options))
        lines = (_cells(self.options[row]) for row in shown)
        note = f"numbers are rounded; sigma and epsilon upward{'; ' + rest if rest else ''}"
        title = f"What epsilon = {self.target_epsilon!r}, delta = {self.target_delta!r} buys; solved for {self.solved}"
        return markup.table(title, _HEAD, lines, note)

    def __str__(self) -> str:
        lines: list[tuple[str, ...]] = [_HEAD, *map(_cells, self.options)]
        wide = [max(map(len, column)) for column in zip(*lines, strict=True)]
        return "\n".join("  ".join(f"{x:>{w}}" for x, w in zip(line, wide, strict=True)) for line in lines)


_HEAD = (
    "search",
    "split",
    "share",
    "law of K",
    "E[K]",
    "sigma",
    "noise/batch",
    "epsilon",
    "gradients",
    "95 %",
    "status",
)
"""The header of the table that is printed."""


def _cells(one: Option) -> tuple[str, ...]:
    """The line of an option as it is printed; noise and epsilon are rounded up, so that they hold as they stand."""
    law = f"{one.family} {one.parameter:.4g}"
    noise = [outward(x, ".4g", up=True) for x in (one.noise_multiplier, one.released_noise)]
    cost = [outward(one.epsilon, ".5g", up=True), f"{one.gradients:.3g}", f"{one.gradients_95:.3g}"]
    return one.search, one.split, f"{one.share:g}", law, f"{one.candidates:.4g}", *noise, *cost, one.status


_COLUMNS = tuple(f.name for f in dataclasses.fields(Option))
"""The header of the CSV."""


def _draw_noise(advice: Advice, axes: Any) -> None:
    """Released noise against E[K], a line for every split and law."""
    _lines(advice, axes, lambda one: (one.candidates, one.released_noise), "E[K]")
    axes.set(xlabel="expected number of candidates $E[K]$", ylabel="noise of the released model / batch size")


def _draw_candidates(advice: Advice, axes: Any) -> None:
    """E[K] against the share, a line for every variant and law."""
    _lines(advice, axes, lambda one: (one.share, one.candidates), "share")
    axes.set(xlabel="share of the data that is tuned on", ylabel="expected number of candidates $E[K]$")


def _lines(advice: Advice, axes: Any, point: Callable[[Option], tuple[float, float]], x: str) -> None:
    from jaxacct.plots import style

    named: dict[str, list[tuple[float, float]]] = {}
    for one in advice.options:
        if one.status != "infeasible":
            split = one.split if x == "share" or one.split == "everything" else f"{one.split} of {one.share:g}"
            how = one.family if one.search == "iid" else f"{one.search}, {one.family}"
            named.setdefault(f"{split}, {how}", []).append(point(one))
    for (name, points), colour, dash in zip(
        named.items(), style.colours(list(named)), style.dashes(len(named)), strict=True
    ):
        across, up = zip(*sorted(points), strict=True)
        axes.plot(across, up, dash, marker="o", markersize=3.5, color=colour, label=name)
    style.scale(axes, "x", [p[0] for points in named.values() for p in points])
    style.scale(axes, "y", [p[1] for points in named.values() for p in points])
    style.legend(axes, len(named))
