"""Search spaces: laws of single hyper-parameters, and laws from which whole configurations are drawn."""

from __future__ import annotations

import bisect
import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from types import MappingProxyType
from typing import Any, ClassVar, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jaxacct.core.validation import POSITIVE, PROBABILITY, Constraint, InputError, check


class Distribution(ABC):
    """Law of one hyper-parameter.  If you write a law, its draws count as adaptive unless you declare them i.i.d.

    >>> import jax
    >>> from jaxacct import tuning
    >>> class Always(tuning.Distribution):
    ...     def at(self, bits):
    ...         return 0.1
    >>> tuning.Random({"rate": Always()}).sample(jax.random.key(0))
    {'rate': 0.1}
    """

    @abstractmethod
    def at(self, bits: int) -> bool | float | str:
        """Return the value that belongs to `bits`, a random whole number below 2^128."""


@dataclass(frozen=True)
class _Interval(Distribution):
    """Law on an interval [low, high). `rule` says which ends are allowed."""

    low: float
    high: float
    rule: ClassVar = Constraint("use finite ends", -1.7e308, 1.7e308)

    def __post_init__(self) -> None:
        low, high = (float(check(name, getattr(self, name), self.rule)) for name in ("low", "high"))
        if not low < high:
            raise InputError(f"low = {low!r} must be < high = {high!r}; exchange them, or use a Choice of one value")
        object.__setattr__(self, "low", low)
        object.__setattr__(self, "high", high)


@dataclass(frozen=True)
class Uniform(_Interval):
    """Uniform law on [low, high): a value is computed exactly from 128 random bits, and rounded once to float64.

    Parameters
    ----------
    low, high : finite, low < high.

    >>> Uniform(1.0, 3.0).at(2**127)
    2.0
    """

    def at(self, bits: int) -> float:
        low, high = Fraction(self.low), Fraction(self.high)
        return min(float(low + (high - low) * Fraction(bits, 2**128)), math.nextafter(self.high, self.low))


@dataclass(frozen=True)
class LogUniform(_Interval):
    """Law of e^x for a uniform x on [log low, log high).

    Parameters
    ----------
    low, high : 0 < low < high.

    >>> round(LogUniform(0.01, 1.0).at(2**127), 12)
    0.1
    """

    rule: ClassVar = POSITIVE

    def at(self, bits: int) -> float:
        share = float(Fraction(bits, 2**128))
        value = math.exp(math.log(self.low) + share * (math.log(self.high) - math.log(self.low)))
        return min(max(value, self.low), math.nextafter(self.high, self.low))


@dataclass(frozen=True)
class Choice(Distribution):
    """Law on a few values, with equal weights or with given ones.

    Parameters
    ----------
    values : numbers and strings.
    weights : probabilities that sum to 1 within 1e-9, then normalized.  A value's probability errs by at most 2^-128.

    >>> Choice(["adam", "sgd"], [0.25, 0.75]).at(2**126)
    'sgd'
    """

    values: Sequence[Any]
    weights: Sequence[float] | None = None

    def __post_init__(self) -> None:
        values = tuple(plain(value) for value in self.values)
        object.__setattr__(self, "values", values)
        object.__setattr__(self, "weights", _checked_weights(len(values), self.weights))

    def at(self, bits: int) -> bool | float | str:
        return self.values[_drawn(bits, len(self.values), self.weights)]


def _drawn(bits: int, count: int, weights: Sequence[float] | None) -> int:
    """Return the first index whose cumulative share of the weights exceeds bits/2^128."""
    exact = [Fraction(1)] * count if weights is None else [Fraction(weight) for weight in weights]
    ends = list(itertools.accumulate(exact))
    return bisect.bisect_right(ends, Fraction(bits, 2**128) * ends[-1])


def _checked_weights(count: int, weights: Sequence[float] | None) -> tuple[float, ...] | None:
    """Return the weights as a tuple; raise InputError unless there is one for each value and they sum to 1."""
    if not count:
        raise InputError("a space without values has nothing to draw; give at least one")
    if weights is None:
        return None
    found = np.atleast_1d(check("weights", weights, PROBABILITY))
    if found.shape != (count,) or abs(float(found.sum()) - 1.0) > 1e-9:
        raise InputError(f"weights must be {count} numbers that sum to 1; give the probabilities of drawing")
    return tuple(found.tolist())


def plain(value: Any) -> Any:
    """Return a number, string or None as a plain Python value, so that a release hides the type that it had."""
    value = value.item() if isinstance(value, np.generic) or (hasattr(value, "item") and np.ndim(value) == 0) else value
    if not isinstance(value, int | float | str | bool | None):
        raise InputError(f"value {value!r:.40} must be a number, a string or None; give a name instead, and look it up")
    return value


class Sampled(Protocol):
    """Object that draws configurations, such as a `Space`."""

    def sample(self, key: jax.Array) -> dict[str, Any]:
        """Return one configuration {name: value}."""


class Space(ABC):
    """Law of configurations {name: value}.  If you write a space, its draws count as i.i.d. only if you declare it.

    >>> from jaxacct import tuning
    >>> isinstance(tuning.grid(rate=[0.1, 0.2]), tuning.Space)
    True
    """

    @property
    @abstractmethod
    def names(self) -> tuple[str, ...]:
        """Names of the hyper-parameters."""

    @abstractmethod
    def sample(self, key: jax.Array) -> dict[str, Any]:
        """Return one configuration, drawn from a JAX key that is used for nothing else."""


@dataclass(frozen=True)
class Grid(Space):
    """Finite list of configurations with the same names, drawn independently with equal or given probabilities.

    Parameters
    ----------
    points : mappings {name: number or string}, all with the same names.
    weights : the points' probabilities, which sum to 1 within 1e-9.

    >>> space = Grid([{"rate": 0.1, "steps": 20}, {"rate": 0.2, "steps": 10}], [0.25, 0.75])
    >>> space.names, space.weights
    (('rate', 'steps'), (0.25, 0.75))
    """

    points: Sequence[Mapping[str, Any]]
    weights: Sequence[float] | None = None

    def __post_init__(self) -> None:
        points = tuple(MappingProxyType({name: plain(value) for name, value in point.items()}) for point in self.points)
        object.__setattr__(self, "points", points)
        object.__setattr__(self, "weights", _checked_weights(len(points), self.weights))
        for index, point in enumerate(points):
            if set(point) != set(points[0]):
                raise InputError(
                    f"points[{index}] has the names {sorted(point)}, must be {sorted(points[0])} as others"
                )

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.points[0])

    def sample(self, key: jax.Array) -> dict[str, Any]:
        return dict(self.points[_drawn(_bits(key, 1)[0], len(self.points), self.weights)])


@dataclass(frozen=True)
class Random(Space):
    """Law of independent hyper-parameters, each of which has its own law or a fixed value.

    Parameters
    ----------
    axes : {name: a `Distribution`, or a fixed number or string}.

    >>> space = Random({"rate": LogUniform(1e-3, 1.0), "clip_norm": Choice([0.5, 1.0])})
    >>> sorted(space.sample(jax.random.key(0)))
    ['clip_norm', 'rate']
    """

    axes: Mapping[str, Distribution]

    def __post_init__(self) -> None:
        if not self.axes:
            raise InputError("axes is empty; give at least one hyper-parameter")
        axes = {name: law if isinstance(law, Distribution) else Choice([law]) for name, law in self.axes.items()}
        object.__setattr__(self, "axes", MappingProxyType(axes))

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.axes)

    def sample(self, key: jax.Array) -> dict[str, Any]:
        draws = _bits(key, len(self.axes))
        return {name: law.at(bits) for (name, law), bits in zip(self.axes.items(), draws, strict=True)}


def draws_alike(space: Any) -> bool:
    """Return True if draws with independent keys are surely i.i.d., False for a user's class, which may keep state."""
    if isinstance(space, type) or not callable(getattr(space, "sample", None)):
        raise InputError(f"space = {space!r:.40} draws nothing; use tuning.grid(rate=[0.1, 0.2]) or tuning.Random(...)")
    known = (Choice, LogUniform, Uniform)
    return type(space) is Grid or (type(space) is Random and all(type(law) in known for law in space.axes.values()))


def grid(**axes: Sequence[Any]) -> Grid:
    """Make a Grid of all combinations of the given values, all equally likely.

    Parameters
    ----------
    **axes : the values of each hyper-parameter.

    Returns
    -------
    Grid

    >>> len(grid(rate=[0.1, 0.2, 0.4], clip_norm=[0.5, 1.0]).points)
    6
    """
    return Grid([dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())])


def _bits(key: Any, count: int) -> list[int]:
    """Return `count` random whole numbers below 2^128, drawn from the key."""
    words = np.asarray(jax.random.bits(key, (count, 4), jnp.uint32))
    return [int.from_bytes(row.astype("<u4").tobytes(), "little") for row in words]
