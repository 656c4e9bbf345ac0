"""Random allocation of mechanisms with few outputs: the law of the loss, by counts of what the slots put out.

In decimal arithmetic of 60 digits or more: every loss and mass is its own value, rounded once.
README.md, "Allocated outputs".
"""

from __future__ import annotations

import decimal
import functools
import math
from collections.abc import Iterator
from decimal import Decimal
from fractions import Fraction
from typing import NamedTuple

import numpy as np

from jaxacct.core.validation import InputError
from jaxacct.mechanisms.finite import ApproximateDP, FiniteMechanism, PureDP, RandomizedResponse
from jaxacct.mechanisms.finite_output import FiniteOutput
from jaxacct.mechanisms.parts import FinitePart

__all__ = ["FINITE_BASES", "AllocatedLaw", "allocated_law", "refuse_counts"]

FINITE_BASES = (RandomizedResponse, PureDP, ApproximateDP, FiniteOutput)
"""Base mechanisms whose outputs' probabilities are known exactly."""
DIGITS = 60
"""Of decimal arithmetic, where losses are not small.  A few are lost on the way, one for each tenfold of the slots."""
MOST_EPSILON = 1e15
"""Largest epsilon of a base: decimal exponents end at 1e18."""
MOST_ATOMS, MOST_TERMS = 20_000, 250_000
"""Limits on the counts that are told apart, and on these times the participations."""
LEAST_MASS = 1e-290
"""Below it float64 soon ends: such masses are kept in laws from above, and left out of laws from below."""
KEPT = 256
"""Laws that are kept; the largest takes half a megabyte."""


class AllocatedLaw(NamedTuple):
    """The loss of a round with finitely many counts."""

    loss: np.ndarray
    p: np.ndarray
    q: np.ndarray
    p_infinity: float
    q_infinity: float

    def part(self, direction: str, below: bool) -> FinitePart:
        """The law in a direction; `below`: without the smallest masses, so that it is dominated."""
        loss, mass, infinity = self.loss, self.p, self.p_infinity
        if direction == "add":
            loss, mass, infinity = -loss, self.q, self.q_infinity
        if not below:
            return FinitePart(loss, mass, np.asarray(infinity))
        small = mass < LEAST_MASS
        least = int(np.argmin(loss))
        small[least] = False
        kept = np.where(small, 0.0, mass)
        # a mass moved to the least loss makes every delta smaller
        kept[least] += mass[small].sum() + (infinity if infinity < LEAST_MASS else 0.0)
        return FinitePart(np.where(small, 0.0, loss), kept, np.asarray(infinity if infinity >= LEAST_MASS else 0.0))

    def underflows(self) -> bool:
        """Whether there are masses near the end of float64."""
        ends = [self.p_infinity or 1.0, self.q_infinity or 1.0]
        return bool(np.min([self.p.min(), self.q.min(), *ends]) < LEAST_MASS)


def refuse_counts(base: FiniteMechanism, slots: float, taken: float, index: str) -> None:
    """Refuse a configuration with more counts than are told apart, by its index in the batch."""
    if getattr(base, "epsilon", 0.0) > MOST_EPSILON:
        raise InputError(
            f"epsilon{index} = {base.epsilon:g} of the base must be at most {MOST_EPSILON:g} in RandomAllocation; "  # type: ignore[attr-defined]  # of PureDP and ApproximateDP
            "nothing is private beyond it"
        )
    with decimal.localcontext(_context(base)):
        outputs = sum(q > 0 for _, q in _outputs(base))
    atoms = math.comb(int(slots) + outputs - 1, outputs - 1) if outputs > 1 and slots <= MOST_ATOMS else int(slots)
    atoms = 1 if outputs <= 1 else atoms
    most = int(min(MOST_ATOMS, MOST_TERMS // taken))
    if atoms > most:
        raise InputError(
            f"slots{index} = {slots:g} with participations = {taken:g} makes {most:,} or more counts of {outputs} "
            f"outputs, more than {most:,}; use fewer slots, or a base with fewer outputs such as PureDP"
        )


@functools.lru_cache(maxsize=KEPT)
def allocated_law(base: FiniteMechanism, slots: int, taken: int) -> AllocatedLaw:
    """The loss of one configuration: a record takes part in `taken` of the slots, drawn without replacement."""
    with decimal.localcontext(_context(base)):
        outputs = _outputs(base)
        common = [(p / q, q) for p, q in outputs if q > 0]
        alone = sum((p for p, q in outputs if q == 0), Decimal(0))
        found, never = [], Decimal(0)
        for weight, ratio in _counts(common, slots, taken):
            if ratio > 0:
                found.append((float(ratio.ln()), _up(weight * ratio), _up(weight)))
            else:
                never += weight
        # 1 - (1 - alone)^taken, of which nothing would be left where alone is small
        infinite = alone * sum(_powers(1 - alone, taken - 1), Decimal(0))
    loss, p, q = np.array(found or [(0.0, 0.0, 0.0)]).T
    return AllocatedLaw(loss, p, q, _up(infinite), _up(never))


def _context(base: FiniteMechanism) -> decimal.Context:
    """Digits enough for losses as small as those of the base."""
    epsilon = float(getattr(base, "epsilon", 1.0))
    more = math.ceil(-math.log10(epsilon)) if 0.0 < epsilon < 1.0 else 0
    return decimal.Context(prec=DIGITS + more, Emin=decimal.MIN_EMIN, Emax=decimal.MAX_EMAX)


def _up(value: Decimal) -> float:
    """The nearest float64; of what is smaller than all of them the smallest."""
    return max(float(value), 5e-324) if value > 0 else 0.0


def _counts(outputs: list[tuple[Decimal, Decimal]], slots: int, taken: int) -> Iterator[tuple[Decimal, Decimal]]:
    """(Q-mass, dP/dQ) for every way in which the outputs of the slots may be counted."""
    factorial = [Decimal(1)]
    for n in range(1, slots + 1):
        factorial.append(factorial[-1] * n)
    # of q^n/n! and x^j/j!: the multinomial coefficients are quotients of factorials
    powers = [[a / f for a, f in zip(_powers(q, slots), factorial, strict=True)] for _, q in outputs]
    ratios = [[a / f for a, f in zip(_powers(x, taken), factorial[: taken + 1], strict=True)] for x, _ in outputs]
    last, all_ways = len(outputs) - 1, factorial[slots] / (factorial[taken] * factorial[slots - taken])

    def terms(place: int, count: int) -> list[Decimal]:
        """Coefficients of (1 + x z)^count up to z^taken."""
        return [ratios[place][j] * factorial[count] / factorial[count - j] for j in range(min(count, taken) + 1)]

    def walk(place: int, left: int, weight: Decimal, before: list[Decimal]) -> Iterator[tuple[Decimal, Decimal]]:
        if place == last:
            here = terms(place, left)
            whole = sum((before[taken - j] * c for j, c in enumerate(here) if taken - j < len(before)), Decimal(0))
            yield weight * powers[place][left] * factorial[slots], whole / all_ways
            return
        for count in range(left + 1):
            here, size = terms(place, count), min(len(before) + count, taken + 1)
            product = [
                sum((before[i - j] * here[j] for j in range(len(here)) if 0 <= i - j < len(before)), Decimal(0))
                for i in range(size)
            ]
            yield from walk(place + 1, left - count, weight * powers[place][count], product)

    yield from walk(0, slots, Decimal(1), [Decimal(1)])


def _powers(value: Decimal, most: int) -> list[Decimal]:
    found = [Decimal(1)]
    for _ in range(most):
        found.append(found[-1] * value)
    return found


def _outputs(base: FiniteMechanism) -> list[tuple[Decimal, Decimal]]:
    """(p, q) of every output, those of equal ratio as one: their number tells nothing more."""
    if isinstance(base, RandomizedResponse):
        true = Fraction(float(base.probability))
        other = (1 - true) / (base.categories - 1)
        pairs = [(true, other), (other, true), ((base.categories - 2) * other,) * 2]
    elif isinstance(base, FiniteOutput):
        given = [[Fraction(float(x)) for x in np.ravel(values)] for values in (base.p, base.q)]
        totals = [sum(values) for values in given]
        pairs = [(p / totals[0], q / totals[1]) for p, q in zip(*given, strict=True)]
    else:
        delta = Decimal(float(getattr(base, "delta", 0.0)))
        odds = (-Decimal(float(base.epsilon))).exp()  # type: ignore[attr-defined]  # of PureDP and ApproximateDP
        likely = (1 - delta) / (1 + odds)
        if odds == 1:
            return [(2 * likely, 2 * likely), (delta, Decimal(0)), (Decimal(0), delta)]
        return [(likely, likely * odds), (likely * odds, likely), (delta, Decimal(0)), (Decimal(0), delta)]
    joined: dict[Fraction | None, tuple[Fraction, Fraction]] = {}
    for p, q in pairs:
        if p or q:
            ratio = p / q if q else None
            before = joined.get(ratio, (Fraction(0), Fraction(0)))
            joined[ratio] = (before[0] + p, before[1] + q)
    as_decimal = lambda x: Decimal(x.numerator) / Decimal(x.denominator)
    return [(as_decimal(p), as_decimal(q)) for p, q in joined.values()]
