"""Pictures that compare mechanisms (privacy profiles, trade-off functions, risks) or the errors of noise strategies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxacct.accounting import account
from jaxacct.core.bounds import Bounds
from jaxacct.core.files import optional_package
from jaxacct.core.progress import tracked
from jaxacct.core.text import exact, outward
from jaxacct.core.types import ArrayLike, Foreign
from jaxacct.core.validation import NON_NEGATIVE, PROBABILITY, InputError, check, choice, shown
from jaxacct.mechanisms import RELATIONS, Mechanism, batch_shape
from jaxacct.mechanisms.base import require_mechanism
from jaxacct.plots import style
from jaxacct.representations.mechanism_profile import Profile, profile
from jaxacct.representations.risk_table import RiskTable

MOST_CURVES = 8
"""Largest number of curves of one picture; a reader could not distinguish more."""
SMALLEST_DELTA = 1e-10
ENDS_TRIED = (SMALLEST_DELTA, 1e-6, 1e-3, 0.1)
"""A curve ends at the smallest of these deltas that has a finite epsilon."""
RATES = 81

OTHER_NOISE = {
    "random_allocation": "random allocation, independent noise",
    "fixed_order": "not sampled, buffered noise",
}
"""Maps the sampling of each `StrategyAdvice` option without bands to its name in the legend."""


class Curve(NamedTuple):
    name: str  # in the legend
    profile: Profile


def plot_profiles(
    mechanisms: Mapping[str, Mechanism | Profile] | Mechanism | Profile,
    *,
    epsilon: ArrayLike | None = None,
    relation: str | None = None,
    axes: Foreign = None,
) -> Foreign:
    r"""Draw delta against epsilon for any mechanisms side by side (needs matplotlib).

    Each line is the upper end of `delta(eps) = sup H_{e^eps}(P || Q)` over neighbours, which a claim may state. Between
    computed points the line is the chord in e^eps, which is no lower than delta, since delta is convex in e^eps. A band
    reaches down to the lower end. The legend names each curve's kind, such as "certified".

    Parameters
    ----------
    mechanisms : Mechanism or Profile, or a dict of them, by their names in the legend. A batch has a curve for each of
        its elements. At most 8 curves are drawn.
    epsilon : values >= 0 at which delta is computed, by default 120 values up to where delta is 1e-10.
    relation : the neighbouring relation, by default "add_or_remove_one"; a Profile has its own.
    axes : the axes to draw on, by default those of a new figure. `axes.figure.savefig(path)` writes it to a file.

    Returns
    -------
    matplotlib Axes

    Raises
    ------
    InputError : if there is no mechanism, there are too many curves, or the profiles have different relations.

    References
    ----------
    Balle and Wang (2018), Improving the Gaussian Mechanism for Differential Privacy (the profile of a mechanism).

    >>> import jaxacct as ja
    >>> axes = ja.plot_profiles({"Gaussian": ja.Gaussian(2.0), "Laplace": ja.Laplace(2.0)}, epsilon=[0.0, 0.2, 0.4])
    >>> axes.get_ylabel(), [line.get_label() for line in axes.get_lines()]
    ('$\\delta(\\varepsilon)$', ['Gaussian (certified)', 'Laplace (certified)'])
    """
    curves, words = _curves(mechanisms, relation)
    grid = None if epsilon is None else np.unique(check("epsilon", epsilon, NON_NEGATIVE))
    with style.settings():
        axes = axes_for(axes, square=False)
        draw_profiles(axes, curves, grid, words)
    return axes


def plot_tradeoffs(
    mechanisms: Mapping[str, Mechanism | Profile] | Mechanism | Profile,
    *,
    fpr: ArrayLike | None = None,
    relation: str | None = None,
    axes: Foreign = None,
) -> Foreign:
    r"""Draw the trade-off functions of any mechanisms side by side (needs matplotlib).

    Each line is the lower end of `f(alpha)`, the least false negative rate of any membership test with false positive
    rate alpha. At the computed rates no attack is below the line. A band reaches up to the upper end.

    Parameters
    ----------
    mechanisms, relation, axes : as in `plot_profiles`.
    fpr : false positive rates in [0, 1], by default 81.

    Returns
    -------
    matplotlib Axes

    References
    ----------
    Dong, Roth and Su (2022), Gaussian Differential Privacy, Proposition 2.12.

    >>> import jaxacct as ja
    >>> axes = ja.plot_tradeoffs(ja.Gaussian(2.0), fpr=[0.0, 0.5, 1.0])
    >>> axes.get_ylabel(), [line.get_label() for line in axes.get_lines()][0]
    ('false negative rate $f(\\alpha)$', 'Gaussian (certified)')
    """
    curves, words = _curves(mechanisms, relation)
    grid = None if fpr is None else np.unique(check("fpr", fpr, PROBABILITY))
    with style.settings():
        axes = axes_for(axes, square=True)
        draw_tradeoffs(axes, curves, grid, words)
    return axes


def draw_profiles(axes: Any, curves: list[Curve], epsilon: np.ndarray | None, *words: str) -> None:
    """Draw delta against epsilon, by default up to where delta is SMALLEST_DELTA; add `words` to the title."""
    grids, ends = _epsilons(curves) if epsilon is None else ([epsilon] * len(curves), epsilon)
    drawn = _draw(axes, curves, grids, lambda one, at: one.delta(at), "upper")
    smallest = min(line[line > 0.0].min(initial=1.0) for line in drawn)
    axes.set_yscale("log")
    axes.set_ylim(max(SMALLEST_DELTA if epsilon is None else 0.0, 0.5 * smallest), 1.5)
    if epsilon is None and style.spread_over_decades(ends):
        style.scale(axes, "x", ends)
        axes.set_xlim(0.05 * min(ends), 1.2 * max(ends))
    else:
        axes.set_xlim(left=float(grids[0][0]))
    axes.set(xlabel=style.MEANING["epsilon"], ylabel="$\\delta(\\varepsilon)$")
    style.title(axes, "privacy profile: lines are upper ends, bands reach down to lower ends", *words)
    style.legend(axes, max(len(curves), 2))


def draw_tradeoffs(axes: Any, curves: list[Curve], fpr: np.ndarray | None, *words: str) -> None:
    """Draw the trade-off functions, by default at RATES rates; add `words` to the title."""
    near_zero = np.concatenate([np.geomspace(1e-4, 1e-2, 10), np.linspace(0.0, 1.0, RATES - 10)])
    grids = [np.unique(near_zero) if fpr is None else fpr] * len(curves)
    _draw(axes, curves, grids, lambda one, at: one.tradeoff(at), "lower")
    axes.plot([0, 1], [1, 0], ":", color="0.5", linewidth=1.0, label="no leakage")
    axes.set(xlabel="false positive rate $\\alpha$", ylabel="false negative rate $f(\\alpha)$")
    axes.set(xlim=(0, 1), ylim=(0, 1), aspect="equal")
    style.title(axes, "trade-off function: lines are lower ends,", "bands reach up to upper ends", *words)
    style.legend(axes, max(len(curves), 2))


def plot_risks(table: RiskTable, *, names: Sequence[str] | None = None, axes: Foreign = None) -> Foreign:
    """Draw the readings of `ja.risk` that are probabilities, as bars up to their upper ends (needs matplotlib).

    A line across the bar marks the success of an attacker who does not see the output.

    Parameters
    ----------
    table : RiskTable of at most 8 configurations, each of which has its own bars.
    names : names of the configurations of a batch in the legend; by default their indices.
    axes : as in `plot_profiles`.

    Returns
    -------
    matplotlib Axes

    Raises
    ------
    InputError : if the table has more than 8 configurations, or if there are more or fewer names than configurations.

    References
    ----------
    jaxacct/representations/README.md derives every reading.

    >>> import jaxacct as ja
    >>> axes = ja.risk(ja.Gaussian(2.0)).plot()
    >>> [label.get_text() for label in axes.get_yticklabels()][:2]
    ['advantage', 'true positive rate\\nfpr 0.01']
    """
    bars = [one for one in table.readings if not one.name.startswith("gdp") and one.name != "bayes_excess"]
    at = [", ".join(f"{key} {exact(value)}" for key, value in one.at.items()) for one in bars]
    rows_of = [f"{one.name.replace('_', ' ')}\n{where}".strip() for one, where in zip(bars, at, strict=True)]
    shape = bars[0].bounds.shape
    count = int(np.prod(shape))
    if count > MOST_CURVES:
        raise InputError(f"the table has {count} configurations; draw at most {MOST_CURVES} at once")
    if names is not None and len(names) != count:
        raise InputError(f"names has {len(names)} entries, and the table {count} configurations; name each of them")
    labels = names or [str(list(index)) for index in np.ndindex(shape)]
    colours = style.colours(labels if names else range(count))
    places, thick = np.arange(len(bars))[::-1], 0.8 / max(count, 1)
    with style.settings():
        axes = axes_for(axes, square=False)
        for number, index in enumerate(np.ndindex(shape)):
            ends = [float(one.bounds.upper[index]) for one in bars]
            rows = places + thick * ((count - 1) / 2 - number)
            drawn = axes.barh(rows, ends, 0.9 * thick, color=colours[number], label=labels[number])
            axes.bar_label(drawn, [outward(end, ".3g", up=True) for end in ends], padding=3, fontsize="small")
        known = [one.at.get("prior", one.at.get("baseline", one.at.get("fpr", 0.0))) for one in bars]
        without = [max(p, 1 - p) if one.name == "bayes_success" else p for one, p in zip(bars, known, strict=True)]
        axes.plot(without, places, "|", color="black", markersize=16, label="without the output")
        axes.set_yticks(places, rows_of)
        axes.set(xlim=(0.0, 1.15), xlabel="largest probability (advantage: difference of two)")
        style.title(axes, "what the best attack achieves: upper ends", style.RELATION[table.relation])
        handles, labels = axes.get_legend_handles_labels()
        keep = slice(None) if shape else slice(1)
        axes.legend(handles[keep], labels[keep], loc="upper center", bbox_to_anchor=(0.5, -0.18), ncols=5)
    return axes


def draw_strategies(advice: Any, axes: Any = None) -> Any:
    """Draw the error of each option of a `training.StrategyAdvice` against its number of bands; return the axes."""
    banded = [option for option in advice.options if option.sampling not in OTHER_NOISE]
    bands = [one.strategy.overlap for one in banded]
    colours, dashes = style.colours(["", *OTHER_NOISE]), style.dashes(3)
    with style.settings():
        axes = axes_for(axes, square=False)
        axes.plot(bands, [one.error for one in banded], "o-", color=colours[0], label="cyclic Poisson, banded noise")
        for (name, label), colour, dash in zip(OTHER_NOISE.items(), colours[1:], dashes[1:], strict=True):
            for option in advice.options:
                if option.sampling == name:
                    axes.axhline(option.error, color=colour, linestyle=dash, label=label)
        axes.set_xscale("log", base=2)
        axes.set_xticks(bands, list(map(str, bands)))
        axes.set(xlabel="bands (1: DP-SGD)", ylabel="error of prefix sums (clip norms)")
        axes.set_ylim(bottom=0.0)
        names = ("target_epsilon", "target_delta", "steps", "dataset_size", "batch_size")
        words = style.described({name: getattr(advice, name) for name in names})
        style.title(axes, f"noise alone, at certified privacy; {style.RELATION[advice.relation]}", words)
        axes.legend()
    return axes


def _curves(mechanisms: Any, relation: str | None) -> tuple[list[Curve], str]:
    """Return a curve for each element of each mechanism, and the relation of all curves in words."""
    if relation is not None:
        choice("relation", relation, RELATIONS)
    named = mechanisms if isinstance(mechanisms, Mapping) else {"": mechanisms}
    if not named:
        raise InputError("mechanisms is empty; give at least one, such as {'A': ja.Gaussian(1.0)}")
    curves: list[Curve] = []
    for name, given in named.items():
        if isinstance(given, Profile):
            if relation not in (None, given.relation):
                raise InputError(
                    f"relation = {relation!r} is not that of the profile, {given.relation!r}; leave relation out"
                )
            whole = given
        else:
            mechanism = require_mechanism(f"mechanisms[{shown(name)}]" if name else "mechanisms", given)
            whole = profile(mechanism, relation or RELATIONS[0])
        curves += _elements(str(name) or type(whole.mechanism).__name__, whole, MOST_CURVES - len(curves))
    relations = {curve.profile.relation for curve in curves}
    if len(relations) > 1:
        raise InputError(f"the profiles have different relations, {', '.join(sorted(relations))}; draw each by itself")
    return curves, style.RELATION[curves[0].profile.relation]


def _elements(name: str, whole: Profile, room: int) -> list[Curve]:
    shape = batch_shape(whole.mechanism)
    count = int(np.prod(shape))
    if count > room:
        raise InputError(f"the mechanisms have more than {MOST_CURVES} elements; draw at most {MOST_CURVES} at once")
    if not shape:
        return [Curve(name, whole)]
    return [Curve(f"{name} {list(index)}", whole.element(index)) for index in np.ndindex(shape)]


def _epsilons(curves: list[Curve]) -> tuple[list[np.ndarray], list[float]]:
    """Return each curve's values of epsilon, denser near 0, and the epsilon at which each curve ends."""
    tried = [account.epsilon(one.mechanism, np.array(ENDS_TRIED), relation=one.relation).upper for _, one in curves]
    ends = [max(float(next((end for end in found if np.isfinite(end)), 10.0)), 1e-3) for found in tried]
    # a curve whose delta never falls to SMALLEST_DELTA is drawn up to the farthest end of any curve
    last = [end if np.isfinite(found[0]) else max(ends) for end, found in zip(ends, tried, strict=True)]
    squares = np.linspace(0.0, 1.0, 120) ** 2
    return [np.unique(np.append(squares * far, end)) for far, end in zip(last, ends, strict=True)], ends


def _draw(
    axes: Any, curves: list[Curve], grids: list[np.ndarray], ask: Callable[[Profile, np.ndarray], Bounds], end: str
) -> list[np.ndarray]:
    """Draw each curve as a line at the upper or lower `end`, with its bracket as a band. Return the lines' values."""
    answers = [ask(curve.profile, grid) for curve, grid in tracked(zip(curves, grids, strict=True), "curves")]
    names, drawn = [curve.name for curve in curves], []
    looks = zip(names, style.colours(names), style.dashes(len(names)), strict=True)
    for (name, colour, dash), grid, found in zip(looks, grids, answers, strict=True):
        kinds = "; ".join(dict.fromkeys(np.ravel(found.kind).tolist()))
        unsure = float(np.mean(~np.asarray(found.ok)))
        rest = f", {unsure:.0%} of points not ok" if unsure else ""
        at, lower, upper = grid, np.asarray(found.lower), np.asarray(found.upper)
        if end == "upper":
            at, upper = _chords(grid, upper)
            lower = np.minimum(np.interp(at, grid, lower), upper)
        drawn.append(upper if end == "upper" else lower)
        axes.plot(at, drawn[-1], dash, color=colour, label=f"{name} ({kinds}{rest})")
        axes.fill_between(at, np.maximum(lower, 1e-300), upper, color=colour, alpha=0.25, linewidth=0)
    return drawn


def _chords(epsilon: np.ndarray, delta: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the given points, and points on the chords between neighbouring points (e^eps, delta)."""
    if epsilon.size < 2:
        return epsilon, delta
    gap = np.diff(epsilon)[:, None]
    inside = np.linspace(0.0, 1.0, 8, endpoint=False)
    share = np.expm1(gap * inside) / np.expm1(gap)
    values = delta[:-1, None] + np.diff(delta)[:, None] * share
    at = epsilon[:-1, None] + gap * inside
    return np.append(at.ravel(), epsilon[-1]), np.append(values.ravel(), delta[-1])


def axes_for(given: Any, square: bool) -> Any:
    """Return the given axes, or those of a new pyplot figure, which a notebook shows by itself."""
    if given is not None:
        return given
    optional_package("matplotlib", "a picture")
    from matplotlib import pyplot

    return pyplot.subplots(figsize=(4.6, 4.9) if square else (5.4, 3.9), layout="constrained")[1]
