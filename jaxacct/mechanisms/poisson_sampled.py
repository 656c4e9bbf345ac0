"""Poisson sampling: every record is in a batch by itself; groups of records of one person."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from decimal import Decimal
from fractions import Fraction
from typing import Any, ClassVar, cast

import numpy as np

from jaxacct.core.validation import PROBABILITY, InputError
from jaxacct.mechanisms.base import DIRECTIONS, BaseMechanism, Mechanism, batch_shape, register, require_mechanism
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
from jaxacct.mechanisms.sampled_releases import (
    Several,
    one_gaussian,
    pair_of_releases,
    part_below_sampled,
    replaced_pair,
    require_samplable,
)

__all__ = ["PoissonSampled", "groups_inside"]

NEAR_ONE = 0.999
"""Products of nested rates above this must be exact: their distance from 1 decides the loss of a record left out."""


@register
@dataclass(frozen=True, eq=False)
class PoissonSampled(OfGaussianMixtures):
    """A base mechanism run on a Poisson sample: each record is in it with ``sampling_probability`` q.

    With (P, Q) the base pair: remove ((1-q) Q + q P, Q), add (Q, (1-q) Q + q P). The two directions differ for
    0 < q < 1; q = 1 is the base and q = 0 leaks nothing. Sampling a sample multiplies the rates. Under ``replace_one``
    the answer is a bound for 0 < q < 1.

    A composition inside runs all its mechanisms on one sample, as in ``PoissonSampled(compose(Gaussian(1.0),
    Laplace(5.0)), 0.01)``. This differs from a composition of samples. Several Gaussians become one Gaussian of noise
    (sum z^-2)^{-1/2}. Otherwise the pair of the whole composition is sampled (README.md, "Several releases from one
    sample").

    ``group`` = k > 1 protects any k records together, such as those of one person: of a Gaussian, Binomial(k, q) many
    of them are in a batch, and the pair is (sum_j Bin_j N(j, s^2), N(0, s^2)). It is exact for add, remove and zero-out
    of up to k records, whatever they are. Under ``replace_one`` k records are replaced, and the answer is a bound:
    the smaller of two. One reveals how many of them are in the batch: j of them move the sum by 2j. The other removes
    k records and adds k others.

    Parameters
    ----------
    mechanism : Mechanism
        What runs on one sample: a step or a composition. Mechanisms that need a data set of fixed size are refused.
    sampling_probability : array_like in [0, 1]
        q; broadcasts with the base's fields.
    group : int from 1 to 1000
        k, the same for all configurations; above 1 the base must be Gaussian, or a composition of Gaussians.

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
    >>> import jaxacct as ja
    >>> both = ja.repeat(ja.Laplace(1.0), 2)
    >>> round(float(ja.epsilon(ja.PoissonSampled(both, 0.1), 1e-6).upper), 4)  # one sample
    0.494
    >>> round(float(ja.epsilon(ja.repeat(ja.PoissonSampled(ja.Laplace(1.0), 0.1), 2), 1e-6).upper), 4)  # two samples
    0.3171
    >>> PoissonSampled(Gaussian(1.0), 0.01, group=5).expression()
    'ja.PoissonSampled(mechanism=ja.Gaussian(noise_multiplier=1.0), sampling_probability=0.01, group=5)'
    """

    mechanism: Any
    sampling_probability: Any
    group: int = field(default=1, metadata={"static": True, "optional": True})
    constraints: ClassVar = {"sampling_probability": PROBABILITY}

    def __post_init__(self) -> None:
        require_mechanism("mechanism", self.mechanism)
        require_samplable("PoissonSampled", self.mechanism, fixed_size=False)
        object.__setattr__(self, "group", whole_number("group", self.group, LARGEST_GROUP))
        super().__post_init__()
        if self.group > 1 and self._innermost().gaussians() is None:
            require_gaussian(f"group = {self.group}: PoissonSampled", self._innermost())

    def __repr__(self) -> str:
        group = f", group={self.group}" if self.group != 1 else ""
        return (
            f"PoissonSampled(mechanism={self.mechanism!r}, sampling_probability={self.sampling_probability!r}{group})"
        )

    def expand(self, relation: str, direction: str) -> list[tuple[Part, np.ndarray]]:
        (base, rate), once = self._flat(), np.asarray(1.0)
        if self.group > 1:
            return [(sample_pair(self._pair_of_group(relation), once, direction), once)]
        if relation == "replace_one" and self._draws():
            return [(sample_pair(replaced_pair(base, rate, batch_shape(self)), once, direction), once)]
        if isinstance(base, BaseMechanism):
            return [(base.part(rate, relation, direction), once)]
        if np.all(rate == 1.0):
            return base.expand(relation, direction)
        under = "replace_one" if relation == "replace_one" else "add_or_remove_one"
        return [(sample_pair(pair_of_releases(base, under), rate, direction), once)]

    def expand_below(self, relation: str, direction: str) -> list[tuple[Part, np.ndarray]]:
        base, rate = self._flat(up=True)
        if self.group > 1 or isinstance(base, MixtureOfGaussians):
            return super().expand_below(relation, direction)
        if isinstance(base, BaseMechanism):
            return [(base.part(rate, relation, direction), np.asarray(1.0))]
        if np.all(rate == 1.0):
            return base.expand_below(relation, direction)
        under = "replace_one" if relation == "replace_one" else "add_or_remove_one"
        return [(part_below_sampled(base, rate, batch_shape(self), under, direction), np.asarray(1.0))]

    def has_bracket(self) -> bool:
        below, above = self._flat()[0], self._flat(up=True)[0]
        return super().has_bracket() or not isinstance(below, BaseMechanism) or below != above

    def infinity_exactly(self, direction: str) -> Fraction | None:
        rate, inner = Fraction(float(self.sampling_probability)), self.mechanism.infinity_exactly(direction)
        if self.group > 1 or inner is None:
            return None
        return rate * inner if direction == "remove" or rate == 1 else Fraction(0)

    def symmetric(self) -> bool:
        base, _ = self._flat()
        return base.symmetric() and not self._draws()

    def kind_under(self, relation: str, composed: bool = False) -> str:
        base, rate = self._flat()
        if self.group > 1 or (relation == "replace_one" and self._draws()):
            return "bound"
        if isinstance(base, BaseMechanism):
            return super().kind_under(relation, composed) if base == self._flat(up=True)[0] else "bound"
        return base.kind_under(relation, composed) if np.all(rate == 1.0) else "bound"

    def kind_of_bracket(self, relation: str, composed: bool = False) -> str:
        base, _ = self._flat()
        if self.group > 1 or isinstance(base, MixtureOfGaussians):
            return super().kind_of_bracket(relation, composed)
        bound = relation == "replace_one" and self._draws()
        return "bound" if bound else base.kind_of_bracket(relation, composed)

    def several(self, relation: str) -> Several | None:
        """The releases from one sample; None where their profile does not determine the answer for this relation."""
        base, rate = self._flat()
        if isinstance(base, BaseMechanism) or (relation == "replace_one" and self._draws()):
            return None
        replaced = relation == "replace_one"
        return Several(base, rate, {side: relation if replaced else f"{side}_one" for side in DIRECTIONS})

    def _draws(self) -> bool:
        """Whether any record is drawn with a probability strictly between 0 and 1."""
        rate = self._flat()[1]
        return bool(np.any((rate > 0.0) & (rate < 1.0)))

    def _innermost(self) -> Mechanism:
        inner = self.mechanism
        while isinstance(inner, PoissonSampled):
            inner = inner.mechanism
        return cast(Mechanism, inner)

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

    def _flat(self, up: bool = False) -> tuple[Mechanism, np.ndarray]:
        """The base under all nested sampling, and the product of the rates; `up` rounds noise up instead of down."""
        rate = np.asarray(self.sampling_probability, np.float64)
        if not isinstance(self.mechanism, PoissonSampled):
            base: Mechanism = self.mechanism
            both = None if isinstance(base, BaseMechanism) else one_gaussian(base)
            return base if both is None else both[up], rate
        base, inner = self.mechanism._flat(up)
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
    """Whether the mechanism contains a PoissonSampled with group > 1."""
    here = isinstance(mechanism, PoissonSampled) and mechanism.group > 1
    return here or any(groups_inside(inner) for inner in mechanism.inside())
