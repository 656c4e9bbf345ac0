"""Planning of a sum over a vertical line, in floats.

A plan says where the line is, the period of the sum, how far the sum goes, and what is taken out of it.  Nothing
planned enters a bound without being bounded again in ball arithmetic: a bad plan costs width, and never truth.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jaxacct.verification import small_loss_steps
from jaxacct.verification.result import Unplanned
from jaxacct.verification.sampled_gaussian_planning import Cut

__all__ = ["Line", "Plan", "plans", "saddle"]

LINE_SHARES = (1.0, 0.95, 0.85, 0.7, 0.5, 0.3)
"""Positions of the line that are tried, as shares of the saddle point.  See `_line` for why one may lie below it."""
PERIOD_SLACK = 3e-3
"""A period exceeds the gap to the end of the losses by this share of epsilon, so that it serves near epsilons too."""
LONG_SUM_PRODUCTS = 400_000
"""Products (of a node in t and a node in x) from which on a sum is long, and a plan with cuts is tried instead."""


@dataclass(frozen=True)
class Line:
    """Re z = c, and the period of the sum along it.

    below, above : orders of the Chernoff bounds of the aliases on either side; None where losses do not reach them.
    """

    c: float
    period: float
    below: float | None
    above: float | None
    cost: float


@dataclass(frozen=True)
class Plan:
    """Everything that is chosen before a sum over a line is made.

    line : the line and the period of the sum along it.
    count : nodes of the sum.
    smoothing : deviation of the extra Gaussian loss, 0 where there is none; see "Smoothing" in README.md.
    bits : accuracy of the values of M, in natural digits.
    cost : products (of a node in t and a node in x) that the sum takes.
    small_loss : the cuts by which steps with small loss are taken apart, None where they are not.
    cuts : the cuts of each part above which its largest outputs are left out; empty where none are.
    """

    line: Line
    count: int
    smoothing: float
    bits: float
    cost: float
    small_loss: small_loss_steps.SmallLossSteps | None = None
    cuts: tuple[tuple[Cut, ...], ...] = ()


def plans(parts: Any, epsilon: float, aim: float, most: int) -> Iterator[Plan]:
    """Plans in the order in which they are tried, until one is short.

    The first sum is of the composition as it is.  For sampled Gaussians there follow the sum with the steps of small
    loss taken apart, and, for remove, both sums again with the largest outputs left out.
    """
    first = _plan(parts, epsilon, aim, most, False)
    yield first
    if first.cost < LONG_SUM_PRODUCTS or not small_loss_steps.only_sampled_gaussians(parts):
        return
    best = _plan(parts, epsilon, aim, most, True)
    yield best
    if best.cost < LONG_SUM_PRODUCTS or parts[0][0].direction == "add":
        return
    for width in small_loss_steps.LARGEST_CUT_WIDTHS:
        kept = small_loss_steps.without_largest(parts, aim - 2.0, width)
        for apart in (False, True):
            found = _plan(kept, epsilon, aim, most, apart)
            yield replace(found, cuts=tuple(part.cuts for part, _ in kept))
            if found.cost < LONG_SUM_PRODUCTS:
                return


def _plan(parts: Any, epsilon: float, aim: float, most: int, apart: bool) -> Plan:
    """Choose the line near the saddle point, the period by the aliases and the cut-off by the decay.

    apart : whether the steps with small loss are taken apart.
    """

    def action(c: np.ndarray) -> np.ndarray:
        # parts have no common type that says log_mgf returns an array
        return sum(count * part.log_mgf(c) for part, count in parts) - c * epsilon  # type: ignore[no-any-return]  # arb has no types

    wanted = aim - 2.0
    line = _line(action, saddle(parts, epsilon), wanted, _gaps(parts, epsilon))
    c, period = line.c, line.period
    if not np.isfinite(period):
        raise Unplanned("its aliases cannot be bounded")
    start = max(float(action(np.array([c]))[0]), -np.log(-np.expm1(-c * period)) - c * period)
    total = max(count for _, count in parts)
    bits = max(start - aim, 1.0) + float(np.log(total)) + 12.0
    nodes = max([1] + [part.cost(c, bits) for part, _ in parts if hasattr(part, "cost")])

    def left_over(t: float) -> float:
        return sum(count * part.log_decay(c, t) for part, count in parts) - c * epsilon - np.log(t) - 1.1

    step, smoothing = 2 * np.pi / period, 0.0
    if apart:
        found = small_loss_steps.plan_split(parts, c, epsilon, wanted, step, most, bits)
        if found is None:
            return Plan(line, 2, 0.0, bits, float("inf"))
        count = max(int(np.ceil(found.far / step)) + 1, 2)
        return Plan(line, count, 0.0, bits, found.cost + count * nodes, found.small_loss)
    last = small_loss_steps.where_it_falls_to(left_over, step, most * step, wanted)
    if not np.isfinite(last) and small_loss_steps.only_sampled_gaussians(parts):
        return Plan(line, 2, 0.0, bits, float("inf"))
    if not np.isfinite(last):
        # a smoothed loss has no ends
        line = _line(action, c, wanted, (np.inf, np.inf))
        last = most * 2 * np.pi / line.period
        if not last**2 > 4 * c * (c + 1):
            raise Unplanned("its sum is too long")
        smoothing = float(np.sqrt(2 * (left_over(last) - wanted) / (last**2 - c * (c + 1))))
    count = max(int(np.ceil(last * line.period / (2 * np.pi))) + 1, 2)
    return Plan(line, count, smoothing, bits, float(count * nodes))


def saddle(parts: Any, epsilon: float) -> float:
    """Where M(c) e^{-c eps}/(c (c + 1)) is least, c > 0, in floats."""
    grid = np.geomspace(1e-4, 1e7, 100)
    for _ in range(3):
        values = sum(count * part.log_mgf(grid) for part, count in parts) - grid * epsilon
        values = values - np.log(grid) - np.log1p(grid)
        if not np.isfinite(values).any():
            raise Unplanned("its saddle point is out of reach")
        best = int(np.nanargmin(np.where(np.isfinite(values), values, np.nan)))
        grid = np.geomspace(grid[max(best - 1, 0)], grid[min(best + 1, grid.size - 1)], 20)
    return float(grid[10])


def _gaps(parts: Any, epsilon: float) -> tuple[float, float]:
    """How far the least loss lies below epsilon and the largest above it, in floats and a little enlarged.

    inf where the losses have no such end.
    """
    sides = []
    for name, sign in (("least", -1.0), ("largest", 1.0)):
        ends: list[Any] = [getattr(part, name, None) for part, _ in parts]
        gap = np.inf
        if all(end is not None for end in ends):
            total = sum(count * float(end.mid()) for end, (_, count) in zip(ends, parts, strict=True))
            gap = max(sign * (total - epsilon), 0.0) + PERIOD_SLACK * (abs(total) + abs(epsilon))
        sides.append(float(gap))
    return sides[0], sides[1]


def _line(action: Any, saddle: float, wanted: float, gaps: tuple[float, float]) -> Line:
    """The line that costs least, and for it the shortest period whose aliases are below e^wanted.

    On a line below the saddle point the aliases above epsilon may fall much faster; the price is that more leading
    digits of the sum cancel.
    """
    orders = saddle * np.geomspace(0.01, 30.0, 120)
    beneath = -1.0 - (saddle + 1.0) * np.geomspace(1e-2, 1e2, 30)
    sizes, deeper, starts = action(orders), action(beneath), action(saddle * np.array(LINE_SHARES))
    found = []
    for share, start in zip(LINE_SHARES, starts, strict=True):
        c = share * saddle
        inside, above = orders < 0.99 * c, orders > 1.001 * c
        below = np.append(orders[inside], beneath)
        low = (np.append(sizes[inside], deeper) - wanted) / (c - below)
        high = (sizes[above] - wanted) / (orders[above] - c)
        low, high = (np.where(np.isfinite(x), x, np.inf) for x in (low, high))
        left, right = int(np.argmin(low)), int(np.argmin(high))
        period = float(max(min(low[left], gaps[0]), min(high[right], gaps[1]), 0.05 / c))
        cost = period * np.sqrt(max(start - wanted, 1.0))
        below_order = None if gaps[0] < low[left] else float(below[left])
        above_order = None if gaps[1] < high[right] else float(orders[above][right])
        found.append(Line(c, period, below_order, above_order, float(cost if np.isfinite(cost) else np.inf)))
    return min(found, key=lambda each: each.cost)
