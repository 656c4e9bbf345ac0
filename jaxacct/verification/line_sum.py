"""Enclosure of delta(eps) of a composition by a sum over the line Re z = c (README.md, "The sum over a line").

The sum also holds aliases: terms of delta at eps + j p, for j != 0 and the step 2 pi/p.  Each number of a `Plan` is
bounded again in balls, so that a bad plan only widens bounds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from jaxacct.verification import small_loss_steps
from jaxacct.verification.ball_arithmetic import Unplanned, acb, arb, ball, between, precision, tick, within
from jaxacct.verification.closed_form_losses import GaussianLoss
from jaxacct.verification.sampled_gaussian import Cut

LINE_SHARES = (1.0, 0.95, 0.85, 0.7, 0.5, 0.3)
"""For each share, the line Re z = share * saddle point is tried. With a share below 1 the aliases may fall faster."""
LONG_SUM_PRODUCTS = 400_000
"""If a sum of sampled Gaussians takes this many products or more, `plans` makes other plans too."""
REUSE_SHARE = 1e-3
"""A kept sum is used again if epsilon changed by at most this share, and log_scale by at most this number."""
_kept: list[tuple[Any, float, float, LineSum]] = []
"""(key, epsilon, log_scale, sum) of the latest sums. A sum serves for every epsilon near its own."""


def enclose(build: Any, epsilon: float, log_scale: float, digits: int, most: int, dearest: float = float("inf")) -> Any:
    """Enclose delta's part from finite losses to 10^-digits e^log_scale. Raise Unplanned if no plan costs < dearest."""
    with precision(128), np.errstate(all="ignore"):
        parts = build()
        key = (tuple((part.key, count) for part, count in parts), digits, most)
        for known, at, scale, line in _kept:
            if known == key and abs(epsilon - at) <= REUSE_SHARE * at and abs(log_scale - scale) <= REUSE_SHARE:
                return line.at(ball(epsilon))
        plan = min(plans(parts, epsilon, log_scale - digits * np.log(10.0), most), key=lambda each: each.cost)
    if not plan.cost < dearest:
        raise Unplanned("its sum is too long")
    line = LineSum(build, plan)
    with precision(128):
        _kept.insert(0, (key, epsilon, log_scale, line))
        del _kept[4:]  # bounds the memory
    return line.at(ball(epsilon))


def at_most(parts: Any, epsilon: float) -> Any:
    """Bound delta(epsilon) from above by Chernoff's bound, which needs M at one point only."""
    with np.errstate(all="ignore"):
        c = saddle(parts, epsilon)
        for _ in range(20):
            if all(part.cost(c, 60.0) <= 3_000 for part, _ in parts if hasattr(part, "cost")):
                break
            c /= 2
        else:
            return arb("inf")
    return _chernoff(parts, arb(c), ball(epsilon)).abs_upper()


class LineSum:
    """Values of M(z)/(z (z + 1)) at the nodes of a line. They give delta at every epsilon near the plan's epsilon."""

    def __init__(self, build: Any, plan: Plan) -> None:
        self.plan, self.bits = plan, int(96 + 3.2 * plan.bits)
        with precision(self.bits):
            self.parts, self.rest = build(), arb(0)
            if plan.cuts:
                self.parts = [(part.altered(cuts=x), n) for (part, n), x in zip(self.parts, plan.cuts, strict=True)]
                self.rest = between(0, small_loss_steps.mass_of_largest(self.parts))
            self.step = 2 * arb.pi() / arb(plan.line.period)
            self.width = max(1, int(np.sqrt(plan.count)))
            self.rows = range((plan.count + self.width - 1) // self.width)
            self.last = self.step * (len(self.rows) * self.width)
            self.values = self._values()
            self.tail = self._tail()

    def _values(self) -> list[Any]:
        """Return M(z)/(z (z + 1)) at every node, halved at the first. With `small_loss`, M - A replaces M (`_tail`)."""
        c, plan, step, width = arb(self.plan.line.c), self.plan, self.step, self.width
        lines = [part.values(c, step, self.rows, width, count, plan.bits) for part, count in self.parts]
        apart = plan.small_loss.along_line(self.parts, c, step, self.rows, width, plan.bits) if plan.small_loss else []
        values: list[Any] = []
        for _ in self.rows:
            tick()
            found, large = [next(line) for line in lines], [next(line) for line in apart]
            for j in range(width):
                z = acb(c, len(values) * step)
                powers = (line[j] ** count for (_, count), line in zip(self.parts, found, strict=True))
                value = math.prod(powers, start=acb(1))
                if large:
                    both = zip(self.parts, found, large, strict=True)
                    value -= math.prod(((line[j] - other[j]) ** n for (_, n), line, other in both), start=acb(1))
                values.append(value / (z * (z + 1)))
        values[0] /= 2
        return values

    def _tail(self) -> Any:
        """Bound |M| (|M - A| with `small_loss`) from above past the last node. A is the part of M from small losses."""
        c, plan = arb(self.plan.line.c), self.plan
        if plan.small_loss:
            return plan.small_loss.tail(self.parts, c, self.last)
        tail = (arb(plan.smoothing) ** 2 * (c * (c + 1) - self.last * self.last) / 2).exp()
        powers = (part.decay(c, self.last, count) ** count for part, count in self.parts)
        return math.prod(powers, start=tail).abs_upper()

    def at(self, epsilon: Any) -> Any:
        """Enclose delta at an epsilon."""
        with precision(self.bits):
            return self._at(epsilon) + self.rest

    def _at(self, epsilon: Any) -> Any:
        plan, step, c = self.plan, self.step, arb(self.plan.line.c)
        square = arb(plan.smoothing) ** 2
        plain, twice = arb(0), arb(0)
        turns = [acb(0, -step * j * epsilon).exp() for j in range(self.width)]
        for row in self.rows:
            tick()
            at = row * self.width
            place = acb(0, -step * at * epsilon).exp()
            for j, turn in enumerate(turns):
                value = self.values[at + j] * (place * turn)
                if plan.smoothing:
                    z = acb(c, (at + j) * step)
                    rise = (square * z * (z + 1) / 2).exp()
                    value *= rise
                    twice += (value * rise**3).real
                plain += value.real
        scale = (-c * epsilon).exp() / arb.pi()
        error = within(self.tail * scale / (self.last - step))
        first = plain * scale * step + error
        if not plan.smoothing:
            whole = first - _aliases(self.parts, plan, epsilon)
            return whole + plan.small_loss.delta(self.parts, epsilon) if plan.small_loss else whole
        # `second` has 4 times the smoothing variance of `first`: its terms have the factor rise^4 in place of rise
        most = arb(4)
        aliases = _aliases([*self.parts, (GaussianLoss(most * square), 1)], plan, epsilon)
        first -= aliases
        second = twice * scale * step + error * (3 * square * c * (c + 1) / 2).exp() - aliases
        ratio = (3 * square / 8).exp() / 2
        lower = (first - ratio * second) / (1 - ratio)
        return between(lower.lower(), first.upper())


def _aliases(parts: Any, plan: Plan, epsilon: Any) -> Any:
    """Enclose the sum's excess over delta(epsilon), the sum of e^{j c period} delta(epsilon + j period) over j != 0."""
    c, period, orders = arb(plan.line.c), arb(plan.line.period), plan.line
    total, bound = arb(0), arb(0)
    if orders.above is not None:
        above = arb(orders.above)
        bound += _chernoff(parts, above, epsilon) / (((above - c) * period).exp() - 1)
    elif not _end(parts, "largest") <= epsilon + period:
        return arb("nan")
    if orders.below is not None and orders.below > 0:
        below = arb(orders.below)
        bound += _chernoff(parts, below, epsilon) / (((c - below) * period).exp() - 1)
    else:
        # Let p and q be the masses under P and Q. For every x, delta(x) is p - e^x q + E_P[(e^{x - loss} - 1)_+]. Over
        # x = epsilon + j period, j < 0, the first two terms are summed in closed form, and the third is bounded.
        p, q = _masses(parts)
        if plan.small_loss:
            one, two = plan.small_loss.masses(parts)
            p, q = p - one, q - two
        total += p / ((c * period).exp() - 1) - q * epsilon.exp() / (((c + 1) * period).exp() - 1)
        if orders.below is not None:
            below = arb(orders.below)
            bound += _reverse(parts, -below, epsilon) / (((c - below) * period).exp() - 1)
        elif not _end(parts, "least") >= epsilon - period:
            return arb("nan")
    return total + between(0, bound.abs_upper())


def _end(parts: Any, name: str) -> Any:
    """Return the least or the largest loss of the composition, for the name "least" or "largest"."""
    return sum((count * getattr(part, name) for part, count in parts), arb(0))


def _masses(parts: Any) -> tuple[Any, Any]:
    """Return the mass of the composition's finite losses under P, which is M(0), and under Q, which is M(-1)."""
    p, q = arb(1), arb(1)
    for part, count in parts:
        one, two = part.masses
        p, q = p * one**count, q * two**count
    return p, q


def _chernoff(parts: Any, a: Any, epsilon: Any) -> Any:
    """Return Chernoff's upper bound of delta(eps): M(a) e^{-a eps} a^a/(1 + a)^{1 + a}."""
    return _moment(parts, a, epsilon) * (a * a.log() - (1 + a) * (1 + a).log()).exp()


def _reverse(parts: Any, b: Any, epsilon: Any) -> Any:
    """Return an upper bound of E_P[(e^{eps - loss} - 1)_+]: M(-b) e^{b eps} (b - 1)^{b - 1}/b^b for b > 1."""
    return _moment(parts, -b, epsilon) * ((b - 1) * (b - 1).log() - b * b.log()).exp()


def _moment(parts: Any, a: Any, epsilon: Any) -> Any:
    """Return M(a) e^{-a eps}, with the composition's moment generating function M of the loss."""
    return math.prod((part.mgf(acb(a)).real ** count for part, count in parts), start=(-a * epsilon).exp())


class Line(NamedTuple):
    """The line Re z = c, and the period of the sum along it."""

    c: float
    period: float
    below: float | None  # exponent of Chernoff's bound of aliases with j < 0; None if no loss is below epsilon - period
    above: float | None  # the same for j > 0; None if no loss is above epsilon + period
    cost: float


@dataclass(frozen=True)
class Plan:
    """All choices that are made, in floats, before a sum over a line."""

    line: Line
    count: int  # nodes of the sum
    smoothing: float  # standard deviation of the extra Gaussian loss, or 0 (README.md, "Smoothing")
    bits: float  # accuracy of the values of M, in nats
    cost: float  # products that the sum takes: its nodes times the nodes of one M(z)
    small_loss: small_loss_steps.SmallLossSteps | None = None
    cuts: tuple[tuple[Cut, ...], ...] = ()  # for each part, the cuts above which its largest outputs are left out


def plans(parts: Any, epsilon: float, aim: float, most: int) -> Iterator[Plan]:
    """Yield plans until one is cheap: first a plain one, then with small losses apart, then with large outputs cut."""
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
    """Return a plan, in floats: a line near the saddle point, a period with small aliases, and the number of nodes."""

    def action(c: np.ndarray) -> np.ndarray:
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
        # The smoothed loss is unbounded. So choose the line anew, with infinite gaps on both sides of epsilon.
        line = _line(action, c, wanted, (np.inf, np.inf))
        last = most * 2 * np.pi / line.period
        if not last**2 > 4 * c * (c + 1):
            raise Unplanned("its sum is too long")
        smoothing = float(np.sqrt(2 * (left_over(last) - wanted) / (last**2 - c * (c + 1))))
    count = max(int(np.ceil(last * line.period / (2 * np.pi))) + 1, 2)
    return Plan(line, count, smoothing, bits, float(count * nodes))


def saddle(parts: Any, epsilon: float) -> float:
    """Return, roughly and in floats, the c > 0 at which M(c) e^{-c eps}/(c (c + 1)) is least."""
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
    """Return epsilon - least loss and largest loss - epsilon, slightly enlarged, or inf if there is no such loss."""
    sides = []
    for name, sign in (("least", -1.0), ("largest", 1.0)):
        ends: list[Any] = [getattr(part, name, None) for part, _ in parts]
        gap = np.inf
        if all(end is not None for end in ends):
            total = sum(count * float(end.mid()) for end, (_, count) in zip(ends, parts, strict=True))
            # enlarge the gap, so that the line serves for nearby epsilons too
            gap = max(sign * (total - epsilon), 0.0) + 3e-3 * (abs(total) + abs(epsilon))
        sides.append(float(gap))
    return sides[0], sides[1]


def _line(action: Any, saddle: float, wanted: float, gaps: tuple[float, float]) -> Line:
    """Return the line on which the sum costs least, with the shortest period that makes the aliases small."""
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
