"""delta(eps) of a composition from a sum over a vertical line, every error enclosed.

    delta(eps) = (1/2 pi i) int M(z) e^{-z eps}/(z (z + 1)) dz,   M(z) = prod_i M_i(z)^{n_i},   Re z = c > 0

The trapezoid rule of step 2 pi/p in Im z returns sum_j e^{j c p} delta(eps + j p) exactly.  See README.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxacct.verification.balls import acb, arb, ball, between, precision, tick, within
from jaxacct.verification.record import Unplanned
from jaxacct.verification.smooth import Gauss

__all__ = ["enclose", "saddle"]

WIDEST = 40_000_000
"""Most products of a node in t and a node in x for one sum."""
SHARES = (1.0, 0.95, 0.85, 0.7, 0.5, 0.3)
"""Where the line may be, relative to the saddle point."""


@dataclass(frozen=True)
class Plan:
    """Where the line is, how far the sum goes and how much it is smoothed; nothing here enters a bound unproved."""

    c: float
    below: float
    above: float
    period: float
    count: int
    smoothing: float
    bits: float


def enclose(build: Any, epsilon: float, log_scale: float, digits: int, most: int, widest: int = 0) -> Any:
    """Enclose the finite part of delta(epsilon) to about `digits` digits of e^log_scale, with at most `most` nodes.

    widest : where given, a sum of more products than this, or one that is smoothed, raises Unplanned.
    build() gives the (part, count) pairs at the current precision.
    """
    with precision(128):
        plan = _plan(build(), epsilon, log_scale - digits * np.log(10.0), most, widest or WIDEST)
    if plan.smoothing and widest:
        raise Unplanned("its sum is too long")
    with precision(int(96 + 2.2 * plan.bits + plan.bits)):
        return _sum(build(), plan, ball(epsilon))


def _plan(parts: Any, epsilon: float, log_tolerance: float, most: int, widest: int) -> Plan:
    """Choose the line near the saddle point, the period by the aliases and the cut-off by the decay."""

    def action(c: np.ndarray) -> np.ndarray:
        return sum(count * part.log_mgf(c) for part, count in parts) - c * epsilon  # type: ignore[no-any-return]

    with np.errstate(all="ignore"):
        middle = saddle(parts, epsilon)
        # below the saddle point the aliases above may fall much faster, at the price of digits that cancel
        wanted = log_tolerance - 2.0
        period, c, least, above = min(_period(action, middle * share, wanted) for share in SHARES)[1:]
        if not np.isfinite(period):
            raise Unplanned("its aliases cannot be bounded")
    start = float(action(np.array([c]))[0])
    total = max(count for _, count in parts)
    bits = max(start - log_tolerance, 1.0) + np.log(total) + 12.0

    def left_over(t: float) -> float:
        return sum(count * part.log_decay(c, t) for part, count in parts) - c * epsilon - np.log(t) - 1.1

    step = 2 * np.pi / period
    nodes = max([1] + [part.cost(c, bits) for part, _ in parts if hasattr(part, "cost")])
    most = int(min(most, widest / nodes))
    last = most * step
    smoothing = 0.0
    if left_over(last) > wanted:
        needed = left_over(last) - wanted
        smoothing = float(np.sqrt(2 * needed / max(last**2 - c * (c + 1), 1e-300)))
        if not last**2 > 4 * c * (c + 1):
            raise Unplanned("its sum is too long")
    else:
        low_t, high_t = step, last
        while high_t > 1.02 * low_t:
            middle = float(np.sqrt(low_t * high_t))
            low_t, high_t = (middle, high_t) if left_over(middle) > wanted else (low_t, middle)
        last = high_t
    count = max(int(np.ceil(last / step)) + 1, 2)
    return Plan(c, least, above, period, count, smoothing, float(bits))


def saddle(parts: Any, epsilon: float) -> float:
    """Where M(c) e^{-c eps}/(c (c + 1)) is least, c > 0, in floats."""
    grid = np.geomspace(1e-4, 1e7, 300)
    for _ in range(3):
        values = sum(count * part.log_mgf(grid) for part, count in parts) - grid * epsilon
        values = values - np.log(grid) - np.log1p(grid)
        if not np.isfinite(values).any():
            raise Unplanned("its saddle point is out of reach")
        best = int(np.nanargmin(np.where(np.isfinite(values), values, np.nan)))
        grid = np.geomspace(grid[max(best - 1, 0)], grid[min(best + 1, grid.size - 1)], 60)
    return float(grid[30])


def _period(action: Any, c: float, wanted: float) -> tuple[float, float, float, float, float]:
    """Cost of a line, its period, c, and the two orders of the Chernoff bounds of its aliases (0 for delta <= 1)."""
    below, above = c * np.linspace(0.02, 0.98, 49), c * (1.0 + np.geomspace(1e-3, 30.0, 100))
    low = np.append((action(below) - wanted) / (c - below), -wanted / c)
    high = (action(above) - wanted) / (above - c)
    low, high = (np.where(np.isfinite(x), x, np.inf) for x in (low, high))
    left, right = int(np.argmin(low)), int(np.argmin(high))
    period = float(max(low[left], high[right], 0.5 / c))
    lost = float(action(np.array([c]))[0]) - wanted
    cost = period * np.sqrt(max(lost, 1.0)) if np.isfinite(period * lost) else np.inf
    return cost, period, c, 0.0 if left == below.size else float(below[left]), float(above[right])


def _sum(parts: Any, plan: Plan, epsilon: Any) -> Any:
    c, period = arb(plan.c), arb(plan.period)
    step = 2 * arb.pi() / period
    width = max(1, int(np.sqrt(plan.count)))
    rows = range((plan.count + width - 1) // width)
    last = step * (len(rows) * width)
    lines = [part.values(c, step, rows, width, count, plan.bits) for part, count in parts]
    square = arb(plan.smoothing) ** 2
    plain, twice = arb(0), arb(0)
    turns = [acb(0, -step * j * epsilon).exp() for j in range(width)]
    index = 0
    for row in rows:
        tick()
        found = [next(line) for line in lines]
        place = acb(0, -step * (row * width) * epsilon).exp()
        for j in range(width):
            z = acb(c, index * step)
            value = place * turns[j] / (z * (z + 1))
            for (_, count), line in zip(parts, found, strict=True):
                value *= line[j] ** count
            if index == 0:
                value /= 2
            if plan.smoothing:
                rise = (square * z * (z + 1) / 2).exp()
                value *= rise
                plain += value.real
                twice += (value * rise**3).real
            else:
                plain += value.real
            index += 1
    scale = (-c * epsilon).exp() / arb.pi()
    tail = arb(1)
    for part, count in parts:
        tail *= part.decay(c, last, count) ** count
    tail *= (square * (c * (c + 1) - last * last) / 2).exp() * scale / (last - step)
    error = within(tail)
    smoothed = plain * scale * step + error
    if not plan.smoothing:
        return smoothed - _aliases(parts, plan, epsilon)
    # the second sum has 4 times the square: e^{4 x} where the first has e^x; its tail is below the first's
    most = arb(4)
    aliases = _aliases([*parts, (Gauss(most * square), 1)], plan, epsilon)
    first = smoothed - aliases
    second = twice * scale * step + error * (3 * square * c * (c + 1) / 2).exp() - aliases
    ratio = (3 * square / 8).exp() / 2
    lower = (first - ratio * second) / (1 - ratio)
    return between(lower.lower(), first.upper())


def _aliases(parts: Any, plan: Plan, epsilon: Any) -> Any:
    """The ball [0, bound] of what the sum counts too much: delta at epsilon + j period, j = +-1, +-2, ..."""
    c, period = arb(plan.c), arb(plan.period)
    above, below = arb(plan.above), arb(plan.below)
    bound = _chernoff(parts, above, epsilon) / (((above - c) * period).exp() - 1)
    if plan.below:
        bound += _chernoff(parts, below, epsilon) / (((c - below) * period).exp() - 1)
    else:
        bound += 1 / ((c * period).exp() - 1)
    return between(0, bound.abs_upper())


def _chernoff(parts: Any, a: Any, epsilon: Any) -> Any:
    """delta(eps) <= M(a) e^{-a eps} a^a/(1 + a)^{1 + a}."""
    total = (-a * epsilon).exp() * (a * a.log() - (1 + a) * (1 + a).log()).exp()
    for part, count in parts:
        total *= part.mgf(acb(a)).real ** count
    return total
