"""Laws of one hyper-parameter: uniform, log-uniform, or one of a few values, from 128 random bits."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from jaxacct.core.validation import POSITIVE, PROBABILITY, Constraint, InputError, check

__all__ = [
    "WORDS_PER_DRAW",
    "Choice",
    "Distribution",
    "LogUniform",
    "Uniform",
    "checked_weights",
    "place",
    "plain",
    "shares_of",
]

FINITE_END = Constraint("use finite ends", -1.7e308, 1.7e308)
"""What the ends of a uniform law must be."""
WORDS_PER_DRAW = 4
"""Words of 32 bits for one draw: 128 bits, so that probabilities are right to 2^-128."""


class Distribution(ABC):
    """The law of one hyper-parameter; `Uniform`, `LogUniform` and `Choice` are such laws.

    A law of your own may keep state, so that candidates drawn from it count as adaptive unless they are declared i.i.d.

    >>> import jax
    >>> from jaxacct import tuning
    >>> class Always(tuning.Distribution):
    ...     def at(self, bits):
    ...         return 0.1
    >>> tuning.Random({"rate": Always()}).sample(jax.random.key(0))
    {'rate': 0.1}
    """

    @abstractmethod
    def at(self, bits: int) -> Any:
        """The value that 128 random bits stand for."""


@dataclass(frozen=True)
class Uniform(Distribution):
    """Uniform on [low, high): from 128 random bits, rounded once to float64.

    Parameters
    ----------
    low, high : float
        Finite, low < high.

    Raises
    ------
    InputError
        The ends are not finite, or not in order.

    >>> Uniform(1.0, 3.0).at(2**127)
    2.0
    """

    low: float
    high: float

    def __post_init__(self) -> None:
        _ends(self, FINITE_END)

    def at(self, bits: int) -> float:
        low, high = Fraction(self.low), Fraction(self.high)
        return min(
            float(low + (high - low) * Fraction(bits, 2 ** (32 * WORDS_PER_DRAW))), math.nextafter(self.high, self.low)
        )


@dataclass(frozen=True)
class LogUniform(Distribution):
    """exp of a uniform law on [log low, log high).

    Parameters
    ----------
    low, high : float
        0 < low < high.

    Raises
    ------
    InputError
        The ends are not positive and finite, or not in order.

    >>> round(LogUniform(0.01, 1.0).at(2**127), 12)
    0.1
    """

    low: float
    high: float

    def __post_init__(self) -> None:
        _ends(self, POSITIVE)

    def at(self, bits: int) -> float:
        share = float(Fraction(bits, 2 ** (32 * WORDS_PER_DRAW)))
        value = math.exp(math.log(self.low) + share * (math.log(self.high) - math.log(self.low)))
        return min(max(value, self.low), math.nextafter(self.high, self.low))


@dataclass(frozen=True)
class Choice(Distribution):
    """One of a few values, with equal weights or with given ones.

    Parameters
    ----------
    values : sequence of numbers and words
    weights : sequence of float, optional
        They sum to 1 (to 1e-9) and are made to; a value's probability is that of its weight up to 2^-128.

    Raises
    ------
    InputError
        No values, values of another type, or weights that do not fit.

    >>> Choice(["adam", "sgd"], [0.25, 0.75]).at(2**126)
    'sgd'
    """

    values: Sequence[Any]
    weights: Sequence[float] | None = None

    def __post_init__(self) -> None:
        values = tuple(plain(value) for value in self.values)
        object.__setattr__(self, "values", values)
        object.__setattr__(self, "weights", checked_weights(len(values), self.weights))

    def at(self, bits: int) -> Any:
        return self.values[place(bits, self.shares)]

    @property
    def shares(self) -> list[Fraction]:
        """The probabilities, as exact numbers that sum to 1."""
        return shares_of(len(self.values), self.weights)


def place(bits: int, shares: list[Fraction]) -> int:
    """The index drawn: the first whose cumulative probability exceeds bits/2^128."""
    point, total = Fraction(bits, 2 ** (32 * WORDS_PER_DRAW)), Fraction(0)
    for index, share in enumerate(shares):
        total += share
        if point < total:
            return index
    raise AssertionError("shares sum to 1")


def shares_of(count: int, weights: Sequence[float] | None) -> list[Fraction]:
    raw = [Fraction(1)] * count if weights is None else [Fraction(w) for w in weights]
    return [share / sum(raw) for share in raw]


def checked_weights(count: int, weights: Sequence[float] | None) -> tuple[float, ...] | None:
    if not count:
        raise InputError("a space without values has nothing to draw; give at least one")
    if weights is None:
        return None
    found = np.atleast_1d(check("weights", weights, PROBABILITY))
    if found.shape != (count,) or abs(float(found.sum()) - 1.0) > 1e-9:
        raise InputError(f"weights must be {count} numbers that sum to 1; give the probabilities of drawing")
    return tuple(found.tolist())


def plain(value: Any) -> Any:
    """A number, word, or None as Python has it, so that what is released does not depend on where it came from."""
    value = value.item() if isinstance(value, np.generic) or (hasattr(value, "item") and np.ndim(value) == 0) else value
    if not isinstance(value, int | float | str | bool | None):
        raise InputError(f"value {value!r:.40} must be a number or a word; name what it stands for, and look it up")
    return value


def _ends(law: Any, rule: Constraint) -> None:
    low, high = (float(check(name, getattr(law, name), rule)) for name in ("low", "high"))
    if not low < high:
        raise InputError(f"low = {low!r} must be < high = {high!r}; exchange them, or use a Choice of one value")
    object.__setattr__(law, "low", low)
    object.__setattr__(law, "high", high)
