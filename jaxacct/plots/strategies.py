"""The picture of advice on correlated noise: error against the number of bands."""

from __future__ import annotations

from typing import Any

from jaxacct.plots import style
from jaxacct.plots.side_by_side import axes_for

NAMES = {"random_allocation": "random allocation, independent noise", "fixed_order": "not sampled, buffered noise"}
"""Options without a number of bands to choose, each with its name in the legend."""


def draw_strategies(advice: Any, axes: Any = None) -> Any:
    """Draw a `training.StrategyAdvice`; return the axes, by default those of a new figure."""
    banded = [option for option in advice.options if option.sampling not in NAMES]
    bands, colours, dashes = [one.strategy.overlap for one in banded], style.colours(["", *NAMES]), style.dashes(3)
    with style.settings():
        axes = axes_for(axes, square=False)
        axes.plot(bands, [one.error for one in banded], "o-", color=colours[0], label="cyclic Poisson, banded noise")
        for (name, label), colour, dash in zip(NAMES.items(), colours[1:], dashes[1:], strict=True):
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
