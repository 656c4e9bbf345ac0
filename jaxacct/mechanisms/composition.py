"""Composition: the same mechanism repeated, several in a row, and DP-SGD."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn

import numpy as np

from jaxacct.mechanisms.base import DIRECTIONS, Combinator, Mechanism, register, require_mechanism
from jaxacct.mechanisms.either_order import either_order
from jaxacct.mechanisms.finite import sample_pair
from jaxacct.mechanisms.gaussian import Gaussian
from jaxacct.mechanisms.parts import FinitePart, Part
from jaxacct.mechanisms.sampling import PoissonSampled
from jaxacct.validation import COUNT, LARGEST_COUNT, InputError

__all__ = ["Composed", "Repeated", "compose", "dp_sgd", "exact_product", "exact_sum", "repeat"]


@register
@dataclass(frozen=True, eq=False)
class Repeated(Combinator):
    """A mechanism composed with itself ``steps`` times, adaptively: losses add (README.md, "Composition").

    Nested repetitions multiply their counts, which must stay within 2**53. The neighbouring relation is that of the
    question; ``kind`` is that of the mechanism.

    Parameters
    ----------
    mechanism : Mechanism
        What is repeated.
    steps : array_like of whole numbers from 1 to 2**53
        Integral floats are accepted; broadcasts with the mechanism's fields.

    Raises
    ------
    InputError
        No mechanism, or a value outside its limits, with its index.

    References
    ----------
    Zhu, Dong, Wang (2022), Optimal Accounting of Differential Privacy via Characteristic Function, Theorem 10.

    >>> Repeated(Gaussian(2.0), steps=100)
    Repeated(mechanism=Gaussian(noise_multiplier=2.0), steps=100.0)
    """

    mechanism: Any
    steps: Any
    constraints: ClassVar = {"steps": COUNT}

    def __post_init__(self) -> None:
        require_mechanism("mechanism", self.mechanism)
        super().__post_init__()

    def expand(self, relation: str, direction: str) -> list[tuple[Part, np.ndarray]]:
        steps = np.asarray(self.steps, np.float64)
        inner = self.mechanism.expand(relation, direction)
        return [(part, exact_product(count, steps)) for part, count in inner]

    @property
    def kind(self) -> str:
        return self.mechanism.kind

    def kind_under(self, relation: str) -> str:
        several = bool(np.any(np.asarray(self.steps) > 1.0))
        joined = several and self.mechanism.joins_orders(relation)
        return "bound" if joined else self.mechanism.kind_under(relation)

    def joins_orders(self, relation: str) -> bool:
        return self.mechanism.joins_orders(relation)


@register
@dataclass(frozen=True, eq=False)
class Composed(Combinator):
    """Several mechanisms run one after the other on the same data, each free to depend on earlier outputs.

    Each direction composes by itself and the worse is taken at the end. Under ``replace_one`` mechanisms whose two
    laws are not alike may each have them in either order: of two or more such mechanisms each is taken with the larger
    of its two profiles, and the answer is a bound. Which mechanisms are run must be fixed in advance, whatever the
    earlier outputs.

    Parameters
    ----------
    mechanisms : tuple of Mechanism
        One or more; their fields broadcast against each other.

    Raises
    ------
    InputError
        No mechanisms, something that is no mechanism, or fields that do not broadcast.

    References
    ----------
    Zhu, Dong, Wang (2022), Optimal Accounting of Differential Privacy via Characteristic Function, Theorem 10.

    >>> Composed((Gaussian(1.0), Gaussian(2.0)))
    Composed(mechanisms=(Gaussian(noise_multiplier=1.0), Gaussian(noise_multiplier=2.0)))
    """

    mechanisms: tuple[Any, ...]

    def __post_init__(self) -> None:
        if isinstance(self.mechanisms, Mechanism) or not isinstance(self.mechanisms, tuple | list):
            raise InputError("mechanisms must be a tuple of mechanisms; use compose(first, second)")
        if not self.mechanisms:
            raise InputError("mechanisms is empty; compose at least one mechanism")
        object.__setattr__(self, "mechanisms", tuple(self.mechanisms))
        for index, mechanism in enumerate(self.mechanisms):
            require_mechanism(f"mechanisms[{index}]", mechanism)
        super().__post_init__()

    def expand(self, relation: str, direction: str) -> list[tuple[Part, np.ndarray]]:
        return [
            item
            for mechanism in self.mechanisms
            for item in (
                _in_either_order(mechanism, relation)
                if self._mixes_orders(relation) and not mechanism.symmetric()
                else mechanism.expand(relation, direction)
            )
        ]

    def _mixes_orders(self, relation: str) -> bool:
        """Whether several mechanisms each have an order of their own under a relation."""
        return relation == "replace_one" and sum(not m.symmetric() for m in self.mechanisms) > 1

    @property
    def kind(self) -> str:
        kinds = {mechanism.kind for mechanism in self.mechanisms}
        return "bound" if "bound" in kinds else "certified"

    def kind_under(self, relation: str) -> str:
        kinds = {mechanism.kind_under(relation) for mechanism in self.mechanisms}
        joined = self._mixes_orders(relation) or (len(self.mechanisms) > 1 and self.joins_orders(relation))
        return "bound" if joined or "bound" in kinds else "certified"

    def joins_orders(self, relation: str) -> bool:
        return self._mixes_orders(relation) or any(m.joins_orders(relation) for m in self.mechanisms)


def _in_either_order(mechanism: Mechanism, relation: str) -> list[tuple[Part, np.ndarray]]:
    """The parts of a mechanism under a symmetric relation, each finite one with its two laws in either order."""
    parts: list[tuple[Part, np.ndarray]] = []
    forward, reverse = (mechanism.expand(relation, direction) for direction in DIRECTIONS)
    for (one, count), (two, _) in zip(forward, reverse, strict=True):
        if isinstance(one, FinitePart) and isinstance(two, FinitePart):
            one = sample_pair(either_order(one, two), np.asarray(1.0), "remove")
        parts.append((one, count))
    return parts


def repeat(mechanism: Mechanism, steps: Any) -> Repeated:
    """The mechanism composed with itself ``steps`` times.

    Parameters
    ----------
    mechanism : Mechanism
        What is repeated.
    steps : array_like of whole numbers from 1 to 2**53
        Broadcasts with the mechanism's fields.

    Returns
    -------
    Repeated

    Raises
    ------
    InputError
        No mechanism, or a value outside its limits, with its index.

    References
    ----------
    Zhu, Dong, Wang (2022), Optimal Accounting of Differential Privacy via Characteristic Function, Theorem 10.

    >>> repeat(Gaussian(noise_multiplier=2.0), 100).steps
    100.0
    """
    return Repeated(mechanism, steps)


def compose(*mechanisms: Mechanism) -> Composed:
    """The composition of different mechanisms; their fields broadcast against each other.

    Parameters
    ----------
    *mechanisms : Mechanism
        One or more, fixed in advance; each may depend on the outputs of those before it.

    Returns
    -------
    Composed

    Raises
    ------
    InputError
        No mechanisms, something that is no mechanism, or fields that do not broadcast.

    References
    ----------
    Zhu, Dong, Wang (2022), Optimal Accounting of Differential Privacy via Characteristic Function, Theorem 10.

    >>> len(compose(Gaussian(1.0), Gaussian(2.0)).mechanisms)
    2
    """
    return Composed(mechanisms)


def dp_sgd(noise_multiplier: Any, sampling_probability: Any, steps: Any) -> Repeated:
    """DP-SGD: ``steps`` Poisson sampled Gaussian steps, under adding or removing one record.

    All three arguments broadcast, one configuration per element: an array of noise multipliers is a batch of runs, not
    a schedule (for a schedule, compose the steps).

    Parameters
    ----------
    noise_multiplier : array_like > 0, finite
        Standard deviation of the noise over the clip norm, the add/remove sensitivity.
    sampling_probability : array_like in [0, 1]
        The chance of each record to be in a batch.
    steps : array_like of whole numbers from 1 to 2**53

    Returns
    -------
    Repeated
        ``repeat(PoissonSampled(Gaussian(noise_multiplier), sampling_probability), steps)``.

    Raises
    ------
    InputError
        A value outside its limits, with its index, or shapes that do not broadcast.

    References
    ----------
    Abadi et al. (2016), Deep Learning with Differential Privacy.

    >>> dp_sgd(noise_multiplier=1.0, sampling_probability=0.01, steps=1000).mechanism
    PoissonSampled(mechanism=Gaussian(noise_multiplier=1.0), sampling_probability=0.01)
    """
    return Repeated(PoissonSampled(Gaussian(noise_multiplier), sampling_probability), steps)


def exact_product(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Product of whole numbers up to 2**53 held in float64; refused where it exceeds 2**53."""
    a, b = np.broadcast_arrays(first, second)
    if np.any(a > LARGEST_COUNT // b.astype(np.int64)):
        _refuse_counts(a > LARGEST_COUNT // b.astype(np.int64), a * b)
    return a * b


def exact_sum(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Sum of whole numbers up to 2**53 held in float64; refused where it exceeds 2**53."""
    a, b = np.broadcast_arrays(first, second)
    if np.any(a > LARGEST_COUNT - b):
        _refuse_counts(a > LARGEST_COUNT - b, a + b)
    return a + b


def _refuse_counts(bad: np.ndarray, value: np.ndarray) -> NoReturn:
    index = [int(i) for i in np.argwhere(bad)[0]]
    place = f"{index}" if index else ""
    raise InputError(f"total steps{place} = {float(value[tuple(index)]):.6g} must be <= 2**53; use fewer repetitions")
