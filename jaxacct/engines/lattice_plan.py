"""Choices of the lattice engine: tilt, window, range and step.  Nothing certified depends on them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from jaxacct.engines.lattice_part import ApproximateLaw, LatticePart

__all__ = ["LatticePlan", "common_step", "peak", "plan_for", "share_of", "unresolved"]

BISECTIONS = 26
"""Of a range of at most 40 in log theta: the tilt is found to a millionth, far finer than it matters."""
END_TILTS = 41
"""Tilts that are tried on either side for the ends of the window."""
KEEP_ALL = -1e4
"""Logarithm of a mass that no loss lies beyond: nothing is left out."""
LEFT_OUT_NATS = 4.0
"""Nats below the relative tolerance at which mass may be left out: e^-4 of it."""
LARGEST_TILT = 1e6
"""Largest tilt that is tried: delta then falls to a part in e within a millionth of eps."""
SMALLEST_TILT = 1e-3
"""Smallest tilt that is tried, over one by the spread of the loss."""
MOST_STEPS = 20000
"""Most steps that are tried for the laws' own gaps."""


class LatticePlan(NamedTuple):
    """What a bracket on the lattice is made with; nothing certified depends on it."""

    theta: float  # the tilt
    centre: float  # expected eps
    cut: float  # log of the mass of high losses that may be left out
    share: float  # log of the tilted mass of low losses that may be left out
    bottom: float  # lower end of the window in the composed loss
    top: float  # upper end
    above: float  # added to the tilt for the Chernoff bound of what lies above the window
    below: float  # subtracted from it for what lies below


def _cumulants(sketches: list[ApproximateLaw], theta: float) -> tuple[float, float, float]:
    """K(theta) = log E[e^{theta L}] of the composition, its mean and its variance under the tilt."""
    total, mean, variance = 0.0, 0.0, 0.0
    for loss, log_mass, count in sketches:
        exponent = log_mass + theta * loss
        top = exponent.max()
        weight = np.exp(exponent - top)
        size = weight.sum()
        centre = float(weight @ loss) / size
        total += count * (top + np.log(size))
        mean += count * centre
        variance += count * float(weight @ np.square(loss - centre)) / size
    return float(total), float(mean), float(variance)


def _log_m(sketches: list[ApproximateLaw], theta: float) -> float:
    """K(theta) alone."""
    total = 0.0
    for loss, log_mass, count in sketches:
        exponent = log_mass + theta * loss
        top = exponent.max()
        total += count * (top + np.log(np.exp(exponent - top).sum()))
    return float(total)


def share_of(rtol: float) -> float:
    """log of the share of delta that truncated mass may carry."""
    return float(np.log(rtol)) - LEFT_OUT_NATS


def plan_for(laws: list[LatticePart], eps: float | None, log_delta: float, share: float) -> LatticePlan:
    """Tilt and window for a given eps, or for the eps at which delta is given; eps is taken as at least 0.

    The tilt is the saddle point of K(theta) - theta eps - log theta(theta + 1), under the law without the
    losses so high that they do not matter at `log_delta`: with them a heavy tail would draw the saddle to
    itself.  `log_delta` 0 is unknown, and then nothing is left out.
    """
    untruncated = KEEP_ALL if log_delta == 0.0 else log_delta + share
    sketches = [law.sketch(untruncated) for law in laws]

    def state(theta: float) -> tuple[float, float, float]:
        k, mean, variance = _cumulants(sketches, theta)
        at = mean - 1.0 / theta - 1.0 / (1.0 + theta)
        curvature = variance + theta**-2.0 + (1.0 + theta) ** -2.0
        return k, at, k - theta * at - np.log(theta * (theta + 1.0)) - 0.5 * np.log(2 * np.pi * curvature)

    # tilts are of the order of one over the spread of the loss
    spread = max(1.0, float(np.sqrt(_cumulants(sketches, 0.0)[2])))
    low, high = np.log(SMALLEST_TILT / spread), np.log(LARGEST_TILT)
    for _ in range(BISECTIONS):
        theta = float(np.exp(0.5 * (low + high)))
        _, at, value = state(theta)
        past = at >= eps if eps is not None else (value <= log_delta and at >= 0.0)
        low, high = (low, np.log(theta)) if past else (np.log(theta), high)
    theta = float(np.exp(high))
    k, at, _ = state(theta)
    centre = max(at, 0.0) if eps is None else max(eps, 0.0)
    if log_delta == 0.0:
        log_delta = min(k - theta * centre + np.log(peak(theta)), 0.0)
    # delta over e^{K - theta eps}: small where the tilted law has two modes, as with few hits
    left_out = share - 3.0 + min(log_delta - (k - theta * centre), -3.0)
    grid = np.geomspace(1e-2, 1e3, END_TILTS) * max(1.0 / spread, 0.1 * theta)
    up = np.array([(_log_m(sketches, theta + t) - k - left_out) / t for t in grid])
    down = np.array([(k - _log_m(sketches, theta - t) + left_out) / t for t in grid])
    top, bottom = float(np.min(up)), float(np.max(down))
    return LatticePlan(
        theta,
        centre,
        float(log_delta + share),
        share,
        min(bottom, centre),
        max(top, centre),
        float(grid[np.argmin(up)]),
        float(grid[np.argmax(down)]),
    )


def unresolved(laws: list[LatticePart], plan: LatticePlan, length: int) -> bool:
    """Whether the longest lattice is so coarse that rounding every step's loss up to a node exceeds eps itself."""
    step = (plan.top - plan.bottom) / length
    moved = 0.0
    for law in laws:
        sketch = law.sketch(plan.cut)
        _, _, variance = _cumulants([sketch._replace(repeats=1.0)], 0.0)
        if variance < (step / 30.0) ** 2:
            share = np.exp(sketch.log_mass) @ -np.expm1(sketch.loss.min() - sketch.loss)
            moved += sketch.repeats * step * float(share)
    return moved > max(plan.centre, step)


def common_step(step: float, laws: list[LatticePart]) -> float:
    """The step in [step, 1.5 step] for which the laws' own gaps are closest to whole numbers of steps."""
    gaps = [pair for law in laws for pair in law.gaps() if pair[0] >= step]
    if not gaps:
        return step
    distance, weight = (np.array(x) for x in zip(*gaps, strict=True))
    lead = distance[np.argmax(weight * distance)]
    most, fewest = max(np.floor(lead / step), 1.0), max(np.ceil(lead / (1.5 * step)), 1.0)
    if fewest > most:  # no part of the lead is that long
        return step
    steps = lead / np.arange(most, fewest - 1.0, -1.0)[:MOST_STEPS]
    cost = np.zeros(steps.size)
    for d, w in zip(distance, weight, strict=True):
        cost += w * steps * np.abs(d / steps - np.rint(d / steps))
    return float(steps[np.argmin(cost + 1e-12 * weight.sum() * steps)])


def peak(theta: float) -> float:
    """sup over d of e^{-theta d}(1 - e^{-d})."""
    return float(np.exp(theta * np.log(theta / (1.0 + theta)) - np.log1p(theta)))
