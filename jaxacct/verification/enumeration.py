"""delta(eps) of finitely many losses by adding up every total: exact, as ball arithmetic encloses the rounding."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from flint import arb_poly

from jaxacct.verification.ball_arithmetic import arb, tick
from jaxacct.verification.finite_losses import spread

__all__ = ["enumerate_totals", "power_of_grid", "repeated_laplace", "states"]

MOST_STEPS = 10**7
"""More steps of a law with two or more losses are never enumerated."""
TOO_MANY = 10**12
"""More totals than anybody adds up."""
FAR_TOO_MANY = 10**30
"""Stands for any number of totals above TOO_MANY."""


def states(parts: Any) -> int:
    """How many totals of counts there are: the product of the binomial coefficients (n + a - 1 over a - 1).

    Beyond TOO_MANY it is not computed, and FAR_TOO_MANY is returned.
    """
    total = 1
    for part, count in parts:
        atoms = len(part.loss)
        if atoms == 0:
            return 0
        if count > MOST_STEPS and atoms > 1:
            return FAR_TOO_MANY
        total *= math.comb(count + atoms - 1, atoms - 1)
        if total > TOO_MANY:
            return FAR_TOO_MANY
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


def power_of_grid(part: Any, count: int, epsilon: Any, most: int) -> Any:
    """The same sum for one law on a grid, by a power of its generating function.

    None where the law is on no grid, has fewer than three losses, or the power has more than `most` terms.
    """
    if part.grid is None or len(part.loss) < 3:
        return None
    offset, step, ks = part.grid
    low, by = min(ks), spread(part.grid)
    if (max(ks) - low) // by * count > most:
        return None
    masses = [arb(0)] * ((max(ks) - low) // by + 1)
    for k, p in zip(ks, part.p, strict=True):
        masses[(k - low) // by] += p
    tick()
    total = arb(0)
    for j, mass in enumerate((arb_poly(masses) ** count).coeffs()):
        gap = epsilon - count * offset - (count * low + j * by) * step
        if not gap >= 0:
            total += mass * (-gap.expm1()).max(0)
    return total


def repeated_laplace(top: Any, count: int, epsilon: Any) -> Any:
    """delta(eps) of n Laplace mechanisms by a closed form.

    With w = 1 + 2z, M^n is a sum of powers of 1/w times exponentials of z.  The integral of such a term,
    I_m = (1/2 pi i) int e^{zd}/(z(z + 1) w^m) dz is 0 for d <= 0.  For d > 0, I_0 = 1 - e^{-d}, I_1 = (1 - e^{-d/2})^2
    and I_m = I_{m-2} - 2 e^{-d/2} (d/2)^{m-1}/(m-1)!, since 1/((w^2 - 1) w^m) = 1/((w^2 - 1) w^{m-2}) - 1/w^m.
    """
    total = arb(0)
    for k in range(count + 1):
        tick()
        d = (2 * k - count) * top - epsilon
        if d <= 0:
            continue
        d = d.max(0)
        small = (-d / 2).exp()
        integrals, term = [-(-d).expm1(), (1 - small) ** 2], 2 * small
        for m in range(2, count + 1):
            term *= d / 2 / (m - 1)
            integrals.append(integrals[m - 2] - term)
        powers = arb_poly([1, 1]) ** k * arb_poly([1, -1]) ** (count - k)
        inner = sum((a * b for a, b in zip(powers.coeffs(), integrals, strict=False)), arb(0))
        total += math.comb(count, k) * (-(count - k) * top).exp() * inner
    return total / arb(2) ** count


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
