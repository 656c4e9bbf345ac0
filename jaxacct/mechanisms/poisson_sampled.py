"""Poisson sampling: every record is in a batch by itself; groups of records of one person."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from decimal import Decimal
from fractions import Fraction
from typing import Any, ClassVar, cast

import numpy as np

from jaxacct.mechanisms.base import (
    BaseMechanism,
    Mechanism,
    batch_shape,
    register,
    require_mechanism,
)
from jaxacct.mechanisms.contribution_laws import LARGEST_GROUP, binomial
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
from jaxacct.mechanisms.mixture_profiles import mixture_pair, revealed_pair, taking_part
from jaxacct.mechanisms.parts import FinitePair, Part
from jaxacct.mechanisms.profile import stacked
from jaxacct.validation import PROBABILITY, InputError

__all__ = ["PoissonSampled", "groups_inside"]

NEAR_ONE = 0.999
"""Products of nested rates above this must be exact: their distance from 1 decides the loss of a record left out."""


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
    their number in the batch is revealed, and j of them move the sum by 2j; or they are removed, and others are added.
    The smaller bound is answered.

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
        for index in np.argwhere(product > NEAR_ONE):
            factors = (float(np.broadcast_to(part, product.shape)[tuple(index)]) for part in (rate, inner))
            exact = math.prod(Fraction(factor) for factor in factors)
            if exact != Fraction(float(product[tuple(index)])):
                place = f"sampling_probability{index.tolist() if index.size else ''}"
                raise InputError(
                    f"nested {place} multiply to {float(product[tuple(index)])!r} after rounding, too near 1 for its "
                    "distance from 1 to be known; give the product as one rate"
                )
        return base, product


def groups_inside(mechanism: Mechanism) -> bool:
    """Whether the mechanism contains a Poisson sample of which groups of records are protected."""
    here = isinstance(mechanism, PoissonSampled) and mechanism.group > 1
    return here or any(groups_inside(inner) for inner in mechanism.inside())
