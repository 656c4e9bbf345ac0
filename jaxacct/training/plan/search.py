"""A certified search over one number: batches of candidates, narrowed down to the last one that meets a target."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from jaxacct.validation import InputError

__all__ = ["RTOL", "search", "tolerance"]

RTOL = 1e-4
"""How close to the target, relative to it and absolutely, the certified epsilon of a solution lies."""
_LEAST_RTOL = 1e-6
"""Never closer than this, relatively, however large the target is."""
_CANDIDATES = 8
"""Values evaluated in one call: as many as the programs for a few configurations take at once."""
_ROUNDS = 60
"""Most calls.  Each narrows the bracket at least by half, so that none of the searches here comes near it."""
_SPREAD = np.array([-0.3, -0.1, -0.02, -0.004, 0.004, 0.02, 0.1])
"""Where to look around the secant's answer, as shares of the bracket: near it, and farther away in case it misleads."""
_LARGEST_EXCESS = 8.0
"""|log(epsilon / target)| is cut off here, so that infinite and vanishing epsilons have finite secants."""
_CLOSEST = 1e-13
"""A bracket in log(value) that is narrower than this holds no further float64 value worth trying."""


def tolerance(target: float) -> float:
    """The relative closeness that is within RTOL both relatively and absolutely."""
    return max(RTOL * min(1.0, 1.0 / target), _LEAST_RTOL)


def search(
    upper: Callable[[np.ndarray], np.ndarray],
    target: float,
    start: float,
    limits: tuple[float, float],
    *,
    falling: bool,
    whole: bool = False,
    rtol: float | None = None,
) -> float:
    """The least private value in the limits whose upper epsilon meets the target, or NaN where none does.

    `upper` answers a batch of values; it falls with the value (noise) or rises (steps, rate), at least nearly so: what
    is returned has itself been evaluated and lies within `rtol` below the target, is the last whole number, or the
    limit where that still meets it.
    """
    rtol = tolerance(target) if rtol is None else rtol
    side = 1.0 if falling else -1.0  # y = side * log value: private for large y
    low, high = sorted(side * np.log(np.array(limits)))
    bad, good = (low, np.inf), (high, -np.inf)  # (y, log(upper/target))
    answer = np.nan
    tried_bad = tried_good = False
    margin = 1e-7 if whole else 0.05 * rtol  # for the rounding by which another evaluation may differ
    aim = np.log1p(-0.3 * rtol)
    y = np.clip(side * np.log(start) + np.linspace(-0.7, 0.7, _CANDIDATES), low, high)
    for _ in range(_ROUNDS):
        values = np.clip(np.exp(side * y), *limits)
        values = np.unique(np.round(values) if whole else values)
        found = np.asarray(upper(values), np.float64)
        with np.errstate(divide="ignore"):
            excess = np.where(
                np.isnan(found), _LARGEST_EXCESS, np.clip(np.log(found / target), -_LARGEST_EXCESS, _LARGEST_EXCESS)
            )
        for value, f in zip(values, excess, strict=True):
            at = side * np.log(value)
            if f <= -margin and (not tried_good or at < good[0]):
                good, tried_good, answer = (at, f), True, float(value)
            elif f > -margin and (not tried_bad or at > bad[0]):
                bad, tried_bad = (at, f), True
        if tried_good and ((good[1] >= -rtol and not whole) or good[0] <= low + 1e-12):
            break
        if tried_bad and bad[0] >= high - 1e-12:
            return np.nan
        if tried_good and tried_bad and (good[0] - bad[0] < _CLOSEST or (whole and _adjacent(side, bad[0], good[0]))):
            break
        y = _following(bad, good, tried_bad, tried_good, aim)
    if not tried_good:
        raise InputError(f"target_epsilon = {target!r} was not met in {_ROUNDS} rounds of search; raise it a little")
    return answer


def _following(
    bad: tuple[float, float], good: tuple[float, float], tried_bad: bool, tried_good: bool, aim: float
) -> np.ndarray:
    """Where to look next: around the secant, and at the middle; outwards while one end is missing."""
    if not tried_good:
        return bad[0] + (good[0] - bad[0]) * np.geomspace(0.02, 1.0, _CANDIDATES)
    if not tried_bad:
        return good[0] - (good[0] - bad[0]) * np.geomspace(0.02, 1.0, _CANDIDATES)
    width = good[0] - bad[0]
    share = np.clip((bad[1] - aim) / max(bad[1] - good[1], 1e-300), 0.0, 1.0)
    inside = np.clip(share + _SPREAD, 0.02, 0.98)
    return bad[0] + width * np.append(inside, 0.5)


def _adjacent(side: float, first: float, second: float) -> bool:
    """Whether two whole numbers, given as side * log(number), are neighbours."""
    return abs(np.exp(side * first) - np.exp(side * second)) < 1.5
