"""Mechanisms made of others: Poisson sampled, repeated, several in a row, and DP-SGD.

The file is a few lines longer than 300 lines so that the combinators stand together.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, ClassVar, cast

import numpy as np

from jaxacct.keywords import with_hints
from jaxacct.mechanisms.base import (
    DIRECTIONS,
    BaseMechanism,
    Combinator,
    Mechanism,
    batch_shape,
    register,
    require_mechanism,
    weakest,
)
from jaxacct.mechanisms.contribution_laws import LARGEST_GROUP, binomial
from jaxacct.mechanisms.either_order import either_order
from jaxacct.mechanisms.expression import number
from jaxacct.mechanisms.finite import sample_pair
from jaxacct.mechanisms.gaussian import Gaussian
from jaxacct.mechanisms.gaussian_branches import (
    Branch,
    OfGaussianMixtures,
    require_gaussian,
    rows_of,
    whole_number,
)
from jaxacct.mechanisms.gaussian_mixture import MixtureOfGaussians
from jaxacct.mechanisms.loss_components import exact_product
from jaxacct.mechanisms.mixture_profiles import mixture_pair, revealed_pair, taking_part
from jaxacct.mechanisms.parts import FinitePair, FinitePart, Part
from jaxacct.mechanisms.profile import stacked
from jaxacct.validation import COUNT, PROBABILITY, InputError

__all__ = ["Composed", "PoissonSampled", "Repeated", "compose", "dp_sgd", "repeat"]


@register
@dataclass(frozen=True, eq=False)
class PoissonSampled(OfGaussianMixtures):
    """A base mechanism run on a Poisson sample: each record is in it with ``sampling_probability`` q.

    With (P, Q) the base pair: remove ((1-q) Q + q P, Q), add (Q, (1-q) Q + q P). The two directions differ for
    0 < q < 1; q = 1 is the base and q = 0 leaks nothing. Sampling a sample multiplies the rates. ``replace_one`` is
    refused for 0 < q < 1. Sampling a Repeated or Composed mechanism is refused: sampling once and composing inside is
    another mechanism than composing sampled steps.

    ``group`` = k > 1 protects any k records together, such as those of one person: of a Gaussian, Binomial(k, q) many
    of them are in a batch, and the pair is (sum_j Bin_j N(j, s^2), N(0, s^2)). It is exact for add, remove and zero-out
    of up to k records, whatever they are. Under ``replace_one`` k records are replaced, and the answer is a bound:
    their number in the batch is revealed, and j of them move the sum by 2j.

    Parameters
    ----------
    mechanism : BaseMechanism or PoissonSampled
        A single step.
    sampling_probability : array_like in [0, 1]
        q; broadcasts with the base's fields.
    group : int from 1 to 1000
        k, one for the whole batch; above 1 the base must be a Gaussian.

    Raises
    ------
    InputError
        Something that cannot be sampled, a value outside its limits, with its index, or shapes that do not broadcast.

    References
    ----------
    Zhu, Dong, Wang (2022), Optimal Accounting of Differential Privacy via Characteristic Function, Theorem 11.
    Ganesh (2024), Tight Group-Level DP Guarantees for DP-SGD with Sampling via Mixture of Gaussians Mechanisms.

    >>> PoissonSampled(Gaussian(noise_multiplier=1.0), sampling_probability=0.01)
    PoissonSampled(mechanism=Gaussian(noise_multiplier=1.0), sampling_probability=0.01)
    >>> PoissonSampled(Gaussian(1.0), 0.01, group=5).expression()
    'ja.PoissonSampled(mechanism=ja.Gaussian(noise_multiplier=1.0), sampling_probability=0.01, group=5)'
    """

    mechanism: Any
    sampling_probability: Any
    group: int = field(default=1, metadata={"static": True, "optional": True})
    constraints: ClassVar = {"sampling_probability": PROBABILITY}

    def __post_init__(self) -> None:
        require_mechanism("mechanism", self.mechanism)
        if not isinstance(self.mechanism, BaseMechanism | PoissonSampled):
            raise InputError(
                f"PoissonSampled of {type(self.mechanism).__name__} is not supported; sample a single step, "
                "as in repeat(PoissonSampled(Gaussian(1.0), 0.01), 1000)"
            )
        object.__setattr__(self, "group", whole_number("group", self.group, LARGEST_GROUP))
        super().__post_init__()
        if isinstance(self.mechanism, PoissonSampled) and self.mechanism.group > 1:
            raise InputError("group belongs to the outermost sampling; leave it out inside")
        if self.group > 1:
            require_gaussian(f"group = {self.group}: PoissonSampled", self._flat()[0])

    def __repr__(self) -> str:
        group = f", group={self.group}" if self.group != 1 else ""
        return (
            f"PoissonSampled(mechanism={self.mechanism!r}, sampling_probability={self.sampling_probability!r}{group})"
        )

    def expand(self, relation: str, direction: str) -> list[tuple[Part, np.ndarray]]:
        base, rate = self._flat()
        if self.group > 1:
            return [(sample_pair(self._pair_of_group(relation), np.asarray(1.0), direction), np.asarray(1.0))]
        proper = (rate > 0.0) & (rate < 1.0)
        if relation == "replace_one" and proper.any():
            index = [int(i) for i in np.argwhere(proper)[0]]
            place = f"sampling_probability{index if index else ''}"
            raise InputError(
                f"relation = 'replace_one' is not supported with {place} = "
                f"{float(rate[tuple(index)])!r}; use relation='add_or_remove_one', or probability 1"
            )
        return [(base.part(rate, relation, direction), np.asarray(1.0))]

    def symmetric(self) -> bool:
        base, rate = self._flat()
        return base.symmetric() and bool(np.all((rate == 0.0) | (rate == 1.0)))

    def kind_under(self, relation: str, composed: bool = False) -> str:
        return "bound" if self.group > 1 else super().kind_under(relation, composed)

    def branches(self, relation: str) -> list[list[Branch]] | None:
        base, rate = self._flat()
        if relation == "replace_one":
            return None
        if isinstance(base, MixtureOfGaussians):
            size = int(np.prod(batch_shape(self)))
            shape = batch_shape(self)
            rates = np.broadcast_to(rate, shape).reshape(-1)
            places = np.broadcast_to(np.arange(int(np.prod(batch_shape(base)))).reshape(batch_shape(base)), shape)
            inner, found = base.rows(), []
            for row in range(size):
                shift, weight = inner[places.reshape(-1)[row]]
                mixed = np.append((1.0 - rates[row]), rates[row] * weight)
                found.append([Branch(1.0, np.append(0.0, shift), mixed)])
            return found
        if not isinstance(base, Gaussian):
            return None
        return [[Branch(1.0, shift, weight)] for shift, weight in self._contributions()]

    def ordinary(self) -> bool:
        return self.group == 1 and not isinstance(self._flat()[0], MixtureOfGaussians)

    def of_gaussians(self) -> bool:
        return isinstance(self._flat()[0], Gaussian | MixtureOfGaussians)

    def attained(self, relation: str) -> bool:
        return True

    def _contributions(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Shifts in deviations and weights of a group under a Gaussian base, for every configuration."""
        base, rate = self._flat()
        found = []
        for sigma, q in rows_of(self, cast(Gaussian, base).noise_multiplier, rate):
            weights = binomial(self.group, Decimal(q))
            found.append((np.arange(weights.size) / sigma, weights))
        return found

    def _pair_of_group(self, relation: str) -> FinitePair:
        if relation == "replace_one":
            pairs = [revealed_pair((2.0 * shift, *taking_part(weight))) for shift, weight in self._contributions()]
        else:
            pairs = [mixture_pair(shift, weight) for shift, weight in self._contributions()]
        return stacked(pairs, batch_shape(self))

    def _flat(self) -> tuple[BaseMechanism, np.ndarray]:
        """The base under all the sampling, and the product of the rates."""
        rate = np.asarray(self.sampling_probability, np.float64)
        if not isinstance(self.mechanism, PoissonSampled):
            return self.mechanism, rate
        base, inner = self.mechanism._flat()
        product = rate * inner
        if np.any((product == 0.0) & (rate > 0.0) & (inner > 0.0)):
            raise InputError("nested sampling_probability multiply to less than float64 can hold; use larger rates")
        return base, product


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

    def expand(self, relation: str, direction: str) -> list[tuple[Part, np.ndarray]]:
        return self._times_steps(self.mechanism.expand(relation, direction))

    def expand_below(self, relation: str, direction: str) -> list[tuple[Part, np.ndarray]]:
        return self._times_steps(self.mechanism.expand_below(relation, direction))

    def has_bracket(self) -> bool:
        return self.mechanism.has_bracket()

    def _times_steps(self, inner: list[tuple[Part, np.ndarray]]) -> list[tuple[Part, np.ndarray]]:
        steps = np.asarray(self.steps, np.float64)
        return [(part, exact_product(count, steps)) for part, count in inner]

    def expression(self) -> str:
        steps, step = f"steps={number(self.steps, whole=True)}", self.mechanism
        if not isinstance(step, PoissonSampled) or type(step.mechanism) is not Gaussian:
            return f"ja.repeat({step.expression()}, {steps})"
        noise, rate = number(step.mechanism.noise_multiplier), number(step.sampling_probability)
        group = f", group={step.group}" if step.group > 1 else ""
        return f"ja.dp_sgd(noise_multiplier={noise}, sampling_probability={rate}, {steps}{group})"

    def kind_under(self, relation: str, composed: bool = False) -> str:
        return self.mechanism.kind_under(relation, composed or self._several())

    def kind_of_bracket(self, relation: str, composed: bool = False) -> str:
        return self.mechanism.kind_of_bracket(relation, composed or self._several())

    def _several(self) -> bool:
        return bool(np.any(np.asarray(self.steps) > 1.0))


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

    def expand_below(self, relation: str, direction: str) -> list[tuple[Part, np.ndarray]]:
        return [item for mechanism in self.mechanisms for item in mechanism.expand_below(relation, direction)]

    def has_bracket(self) -> bool:
        return any(mechanism.has_bracket() for mechanism in self.mechanisms)

    def expression(self) -> str:
        return f"ja.compose({', '.join(mechanism.expression() for mechanism in self.mechanisms)})"

    def _mixes_orders(self, relation: str) -> bool:
        """Whether several mechanisms each have an order of their own under a relation."""
        return relation == "replace_one" and sum(not m.symmetric() for m in self.mechanisms) > 1

    def kind_under(self, relation: str, composed: bool = False) -> str:
        kind = super().kind_under(relation, composed or len(self.mechanisms) > 1)
        return "bound" if kind == "certified" and self._mixes_orders(relation) else kind

    def kind_of_bracket(self, relation: str, composed: bool = False) -> str:
        composed = composed or len(self.mechanisms) > 1
        kind = weakest(mechanism.kind_of_bracket(relation, composed) for mechanism in self.mechanisms)
        return "bound" if kind == "certified" and self._mixes_orders(relation) else kind


def _in_either_order(mechanism: Mechanism, relation: str) -> list[tuple[Part, np.ndarray]]:
    """The parts of a mechanism under a symmetric relation, each finite one with its two laws in either order."""
    parts: list[tuple[Part, np.ndarray]] = []
    forward, reverse = (mechanism.expand(relation, direction) for direction in DIRECTIONS)
    for (one, count), (two, _) in zip(forward, reverse, strict=True):
        if isinstance(one, FinitePart) and isinstance(two, FinitePart):
            one = sample_pair(either_order(one, two), np.asarray(1.0), "remove")
        parts.append((one, count))
    return parts


@with_hints
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


@with_hints
def dp_sgd(noise_multiplier: Any, sampling_probability: Any, steps: Any, *, group: Any = 1) -> Repeated:
    """DP-SGD: ``steps`` Poisson sampled Gaussian steps, under adding or removing one record, or a group of them.

    All three arguments broadcast, one configuration per element: an array of noise multipliers is a batch of runs, not
    a schedule (for a schedule, compose the steps).

    Parameters
    ----------
    noise_multiplier : array_like > 0, finite
        Standard deviation of the noise over the clip norm, the add/remove sensitivity.
    sampling_probability : array_like in [0, 1]
        The chance of each record to be in a batch.
    steps : array_like of whole numbers from 1 to 2**53
    group : int from 1 to 1000
        How many records are protected together, such as all those of one person.

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
    return Repeated(PoissonSampled(Gaussian(noise_multiplier), sampling_probability, group), steps)
