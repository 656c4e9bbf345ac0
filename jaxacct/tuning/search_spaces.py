"""Search spaces: grids and products of distributions, from which candidates are drawn independently of each other."""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxacct.core.validation import InputError
from jaxacct.tuning.distributions import (
    WORDS_PER_DRAW,
    Choice,
    Distribution,
    LogUniform,
    Uniform,
    checked_weights,
    place,
    plain,
    shares_of,
)

__all__ = ["Grid", "Random", "Space", "draws_alike", "grid"]


class Space(ABC):
    """A law of configurations {name: value}; `Grid` and `Random` are spaces.

    Draws of `Grid`, and of `Random` with the distributions of this package, with different keys are independent
    (`draws_alike`).  Of any other space that is what the user declares.

    >>> from jaxacct import tuning
    >>> isinstance(tuning.grid(rate=[0.1, 0.2]), tuning.Space)
    True
    """

    @property
    @abstractmethod
    def names(self) -> tuple[str, ...]:
        """The names of the hyper-parameters."""

    @abstractmethod
    def sample(self, key: Any) -> dict[str, Any]:
        """One draw, from a JAX key that is used for nothing else."""

    @abstractmethod
    def settings(self, names: Iterable[str]) -> list[tuple[dict[str, Any], Fraction]]:
        """All values that some of the hyper-parameters can take together, with their probabilities.

        InputError where they are not finitely many.
        """


@dataclass(frozen=True)
class Grid(Space):
    """A finite list of configurations with the same names, drawn with equal weights or with given ones.

    Draws are independent: unlike in grid search, one configuration may come twice and another not at all.

    Parameters
    ----------
    points : sequence of mappings
        Of names to numbers and words.
    weights : sequence of float, optional
        They sum to 1 (to 1e-9).

    Raises
    ------
    InputError
        No points, points with different names, values of another type, or weights that do not fit.

    >>> space = Grid([{"rate": 0.1, "steps": 20}, {"rate": 0.2, "steps": 10}], [0.25, 0.75])
    >>> [(one, str(share)) for one, share in space.settings(["steps"])]
    [({'steps': 20}, '1/4'), ({'steps': 10}, '3/4')]
    """

    points: Sequence[Mapping[str, Any]]
    weights: Sequence[float] | None = None

    def __post_init__(self) -> None:
        points = tuple(MappingProxyType({name: plain(value) for name, value in point.items()}) for point in self.points)
        object.__setattr__(self, "points", points)
        object.__setattr__(self, "weights", checked_weights(len(points), self.weights))
        for index, point in enumerate(points):
            if set(point) != set(points[0]):
                raise InputError(
                    f"points[{index}] has the names {sorted(point)}, must be {sorted(points[0])} as others"
                )

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the hyper-parameters."""
        return tuple(self.points[0])

    def sample(self, key: Any) -> dict[str, Any]:
        return dict(self.points[place(_bits(key, 1)[0], shares_of(len(self.points), self.weights))])

    def settings(self, names: Iterable[str]) -> list[tuple[dict[str, Any], Fraction]]:
        names = list(names)
        rows = zip(self.points, shares_of(len(self.points), self.weights), strict=True)
        return _merged([({name: point[name] for name in names}, share) for point, share in rows])


@dataclass(frozen=True)
class Random(Space):
    """Independent hyper-parameters, each with a law of its own; a number or a word stands for itself.

    Parameters
    ----------
    axes : mapping
        Of names to a `Distribution`, a number or a word.

    Raises
    ------
    InputError
        No axes, or values of another type.

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
        """The names of the hyper-parameters."""
        return tuple(self.axes)

    def sample(self, key: Any) -> dict[str, Any]:
        draws = _bits(key, len(self.axes))
        return {name: law.at(bits) for (name, law), bits in zip(self.axes.items(), draws, strict=True)}

    def settings(self, names: Iterable[str]) -> list[tuple[dict[str, Any], Fraction]]:
        rows = []
        for name in names:
            law = self.axes[name]
            if not isinstance(law, Choice):
                raise InputError(
                    f"{name} affects privacy and is drawn from {type(law).__name__}; use a Choice of a few values"
                )
            rows.append([((name, value), share) for value, share in zip(law.values, law.shares, strict=True)])
        each = itertools.product(*rows)
        return _merged(
            [(dict(pair for pair, _ in one), math.prod((share for _, share in one), start=Fraction(1))) for one in each]
        )


def draws_alike(space: Any) -> bool:
    """Whether draws with independent keys are known to be i.i.d.

    That is known of the classes of this package, and of no subclass of theirs.

    >>> draws_alike(grid(rate=[0.1, 0.2])), draws_alike(iter([{"rate": 0.1}]))
    (True, False)
    """
    known = (Choice, LogUniform, Uniform)
    return type(space) is Grid or (type(space) is Random and all(type(law) in known for law in space.axes.values()))


def grid(**axes: Sequence[Any]) -> Grid:
    """The product of lists of values as a Grid, all points equally likely.

    Parameters
    ----------
    **axes : sequence of numbers and words
        The values of each hyper-parameter.

    Returns
    -------
    Grid

    Raises
    ------
    InputError
        A list is empty, or a value has another type.

    >>> len(grid(rate=[0.1, 0.2, 0.4], clip_norm=[0.5, 1.0]).points)
    6
    """
    return Grid([dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())])


def _bits(key: Any, count: int) -> list[int]:
    """Whole numbers below 2^128, one for each draw."""
    words = np.asarray(jax.random.bits(key, (count, WORDS_PER_DRAW), jnp.uint32))
    return [int.from_bytes(row.astype("<u4").tobytes(), "little") for row in words]


def _merged(rows: list[tuple[dict[str, Any], Fraction]]) -> list[tuple[dict[str, Any], Fraction]]:
    """Equal settings joined and impossible ones left out, in the order in which they first occur."""
    totals: dict[tuple[Any, ...], Fraction] = {}
    for setting, share in rows:
        if share:
            totals[tuple(setting.items())] = totals.get(tuple(setting.items()), Fraction(0)) + share
    return [(dict(setting), share) for setting, share in totals.items()]
