"""delta(eps) of finitely many losses by adding up every total: exact but for the rounding that is enclosed."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from jaxacct.verification.balls import arb, tick

__all__ = ["enumerate_totals", "states"]


def states(parts: Any) -> int:
    """How many totals of counts there are: the product of binomials (n + a - 1 over a - 1)."""
    total = 1
    for part, count in parts:
        atoms = len(part.loss)
        if atoms == 0:
            return 0
        if count > 10**7 and atoms > 1:
            return 10**30
        total *= math.comb(count + atoms - 1, atoms - 1)
        if total > 10**12:
            return 10**30
    return total


def enumerate_totals(parts: Any, epsilon: Any) -> Any:
    """Sum of mass (1 - e^{eps - loss})_+ over the totals of the losses."""
    *rest, last = parts
    fixed = [(arb(0), arb(1))]
    for part, count in rest:
        fixed = [(x + y, m * n) for x, m in fixed for y, n in _totals(part, count)]
    total = arb(0)
    for loss, mass in _totals(*last):
        for start, share in fixed:
            gap = epsilon - loss - start
            if not gap >= 0:
                total += mass * share * (-gap.expm1()).max(0)
    return total


def _totals(part: Any, count: int) -> Iterator[tuple[Any, Any]]:
    """Loss and mass of every way to distribute the steps over the outcomes."""
    if len(part.loss) == 1:
        yield count * part.loss[0], part.p[0] ** count
        return
    if len(part.loss) == 2:
        yield from _binomial(part, count)
        return
    powers = []
    for p in part.p:
        line = [arb(1)]
        for k in range(1, count + 1):
            line.append(line[-1] * p / k)
        powers.append(line)
    yield from _multinomial(part.loss, powers, count, arb(0), arb(count).gamma() * count)


def _binomial(part: Any, count: int) -> Iterator[tuple[Any, Any]]:
    (one, two), (p, q) = part.loss, part.p
    mass, ratio = q**count, p / q
    for k in range(count + 1):
        if k % 4096 == 0:
            tick()
        yield k * one + (count - k) * two, mass
        mass *= ratio * (count - k) / (k + 1)


def _multinomial(losses: Any, powers: Any, left: int, loss: Any, mass: Any) -> Iterator[tuple[Any, Any]]:
    if len(losses) == 1:
        yield loss + left * losses[0], mass * powers[0][left]
        return
    tick()
    for k in range(left + 1):
        yield from _multinomial(losses[1:], powers[1:], left - k, loss + k * losses[0], mass * powers[0][k])
