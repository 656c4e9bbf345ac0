"""Epsilon along a plan: all prefixes as one batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np

from jaxacct.core.bounds import Bounds
from jaxacct.core.validation import COUNT, check
from jaxacct.training.plan.accounting import epsilon_of_several
from jaxacct.training.plan.solved import SolvedPlan
from jaxacct.training.step.step_mechanisms import TRUNCATED, Release

__all__ = ["MANY_KINDS", "dominating", "epsilon_curve"]

MANY_KINDS, _LEVELS = 16, (12, 4)
"""With more than 16 kinds of step, the curve is that of 12 levels of noise times 4 of the rate, in one call."""
_CURVE_RTOL = 0.02
"""Relative width of the curve for the live epsilon: its upper ends are safe, and so it is quick."""


def epsilon_curve(plan: SolvedPlan, points: int) -> tuple[np.ndarray, Bounds]:
    """`Plan.epsilon_curve`."""
    count = int(check("points", points, COUNT))
    at = np.unique(np.ceil(np.linspace(0.0, plan.steps, min(count, plan.steps) + 1)[1:])).astype(int)
    if plan.filter:
        return at, plan.promised(at.shape)
    counts = [plan.releases_after(int(step)) for step in at]
    few = len(plan.whole) <= MANY_KINDS
    if not few:
        stand_in = dominating({release for each in counts for release in each}, *_LEVELS)
        counts = [_renamed(each, stand_in) for each in counts]
    curve = epsilon_of_several(plan, counts, _CURVE_RTOL)
    if few:
        return at, curve
    upper = np.minimum(curve.upper, plan.epsilon.upper)
    return at, Bounds(np.zeros(at.size), upper, upper, "bound", curve.status, curve.engine)


def dominating(releases: Iterable[Release], noise_levels: int, rate_levels: int) -> dict[Release, Release]:
    """For each release one of few that tells at least as much: less noise, a higher rate.

    Neighbours on a logarithmic scale share the least noise and the highest rate among them.  With a cap a higher rate
    may tell less (the cap binds more often), so there only those of one rate are neighbours.
    """
    known = list(releases)
    levels = [
        _level([release.noise_multiplier for release in known], noise_levels),
        _level([release.sampling_probability for release in known], rate_levels),
    ]
    groups: dict[Any, list[Release]] = {}
    for release, noise_level, rate_level in zip(known, *levels, strict=True):
        alike = release[2:] if release.sampling == TRUNCATED else rate_level
        groups.setdefault((release.sampling, noise_level, alike), []).append(release)
    found: dict[Release, Release] = {}
    for group in groups.values():
        noise = min(release.noise_multiplier for release in group)
        rate = max(release.sampling_probability for release in group)
        found |= dict.fromkeys(group, group[0]._replace(noise_multiplier=noise, sampling_probability=rate))
    return found


def _level(values: list[float], count: int) -> list[int]:
    """The level, from 0 to count - 1, of each value on a logarithmic scale."""
    logs = np.log(values)
    # a little wider, so that the largest value is within the last level; at least 1e-12, where all values are one
    width = max(float(np.ptp(logs)), 1e-12) * (1.0 + 1e-9) / count
    return np.floor((logs - logs.min()) / width).astype(int).tolist()


def _renamed(counts: Counter[Release], names: dict[Release, Release]) -> Counter[Release]:
    """The counts with each release under the name of the one that stands for it."""
    found: Counter[Release] = Counter()
    for release, count in counts.items():
        found[names[release]] += count
    return found
