"""Random allocation of mechanisms with few outputs: the law of the loss, by counts of what the slots put out.

Decimal arithmetic of 60 digits: every loss and mass is its own value, rounded once.  README.md, "Allocated outputs".
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

from jaxacct.mechanisms.finite import ApproximateDP, FiniteMechanism, PureDP, RandomizedResponse
from jaxacct.mechanisms.finite_output import FiniteOutput
from jaxacct.mechanisms.parts import FinitePart
from jaxacct.validation import InputError

__all__ = ["FINITE_BASES", "AllocatedLaw", "allocated_law"]

FINITE_BASES = (RandomizedResponse, PureDP, ApproximateDP, FiniteOutput)
"""Base mechanisms whose outputs' probabilities are known exactly."""
DIGITS = decimal.Context(prec=60, Emin=decimal.MIN_EMIN, Emax=decimal.MAX_EMAX)
MOST_ATOMS, MOST_TERMS = 20_000, 1_000_000
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


@functools.lru_cache(maxsize=KEPT)
def allocated_law(base: FiniteMechanism, slots: int, taken: int) -> AllocatedLaw:
    """The loss of one configuration: a record takes part in `taken` of the slots, drawn without replacement."""
    with decimal.localcontext(DIGITS):
        outputs = _outputs(base)
        common = [(p / q, q) for p, q in outputs if q > 0] or [(Decimal(0), Decimal(0))]
        alone = sum((p for p, q in outputs if q == 0), Decimal(0))
        atoms = math.comb(slots + len(common) - 1, len(common) - 1)
        if atoms > MOST_ATOMS or atoms * taken > MOST_TERMS:
            raise InputError(
                f"slots = {slots} with participations = {taken} gives {atoms:,} counts of {len(common)} outputs, which "
                f"must be at most {min(MOST_ATOMS, MOST_TERMS // taken):,}; use fewer slots, or a base with fewer "
                "outputs such as PureDP"
            )
        choices = Decimal(math.comb(slots, taken))
        found, never = [], Decimal(0)
        for weight, symmetric in _counts(common, slots, taken):
            ratio = symmetric / choices
            if ratio > 0:
                found.append((float(ratio.ln()), _up(weight * ratio), _up(weight)))
            else:
                never += weight
        infinite = 1 - (1 - alone) ** taken
    loss, p, q = np.array(found or [(0.0, 0.0, 0.0)]).T
    return AllocatedLaw(loss, p, q, _up(infinite), _up(never))


def _up(value: Decimal) -> float:
    """The nearest float64; of what is smaller than all of them the smallest."""
    return max(float(value), 5e-324) if value > 0 else 0.0


def _counts(outputs: list[tuple[Decimal, Decimal]], slots: int, taken: int) -> Iterator[tuple[Decimal, Decimal]]:
    """(Q-mass, e_taken of the ratios of the slots' outputs) for every way in which the outputs may be counted."""
    powers = [_powers(q, slots) for _, q in outputs]
    ratios = [_powers(x, taken) for x, _ in outputs]
    last = len(outputs) - 1

    def terms(place: int, count: int) -> list[Decimal]:
        """Coefficients of (1 + x z)^count up to z^taken."""
        return [math.comb(count, j) * ratios[place][j] for j in range(min(count, taken) + 1)]

    def walk(place: int, left: int, weight: Decimal, before: list[Decimal]) -> Iterator[tuple[Decimal, Decimal]]:
        if place == last:
            here = terms(place, left)
            whole = sum((before[taken - j] * c for j, c in enumerate(here) if taken - j < len(before)), Decimal(0))
            yield weight * powers[place][left], whole
            return
        for count in range(left + 1):
            here, size = terms(place, count), min(len(before) + count, taken + 1)
            product = [
                sum((before[i - j] * here[j] for j in range(len(here)) if 0 <= i - j < len(before)), Decimal(0))
                for i in range(size)
            ]
            yield from walk(place + 1, left - count, weight * math.comb(left, count) * powers[place][count], product)

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
        pairs = list(zip(*([x / sum(values) for x in values] for values in given), strict=True))
    else:
        delta = Decimal(float(getattr(base, "delta", 0.0)))
        odds = (-Decimal(float(base.epsilon))).exp()  # type: ignore[attr-defined]
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
