"""Sampling of a fixed number of records with replacement."""

from __future__ import annotations

from dataclasses import dataclass, field
from decimal import Decimal, localcontext
from typing import Any, ClassVar

import numpy as np

from jaxacct.core.validation import Constraint, InputError, Tracer
from jaxacct.mechanisms.base import batch_shape, register, require_mechanism
from jaxacct.mechanisms.contribution_laws import LARGEST_GROUP, binomial
from jaxacct.mechanisms.finite import sample_pair
from jaxacct.mechanisms.gaussian_branches import (
    LOSS_OF_PRESENCE,
    Branch,
    OfGaussianMixtures,
    require_gaussian,
    rows_of,
    whole_number,
)
from jaxacct.mechanisms.mixture_profiles import mixture_pair, revealed_pair, taking_part
from jaxacct.mechanisms.parts import FinitePair, Part
from jaxacct.mechanisms.profile import stacked

__all__ = ["SampledWithReplacement"]

SIZE = Constraint("use a whole number of records", 1, 1e9, integral=True)
"""What a number of records may be."""


@register
@dataclass(frozen=True, eq=False)
class SampledWithReplacement(OfGaussianMixtures):
    """A Gaussian on ``batch_size`` B draws from n = ``dataset_size`` records, each draw independent of the others.

    A record is drawn Binomial(B, 1/n) times, and each time it takes the place of another one: the pair is
    (sum_m Bin_m N(2m, s^2), N(0, s^2)), exact for add and remove. ``group`` = k > 1 protects any k records together,
    with Binomial(B, k/n). Under ``replace_one`` and ``zero_out`` the answer is a bound: delta(log a) <=
    sum_{m >= 1} Bin_m delta_{2m}(log a'), with delta_{2m} of the Gaussian of sensitivity 2m, a' = 1 + (a - 1)/eta and
    eta = 1 - (1 - k/n)^B. ``kind`` is that of the pair put on finitely many losses: "bound".

    A record that is drawn m times counts m times: clip every draw, not the sum of a record's draws. n and B are public,
    and the sum is divided by a constant.

    Parameters
    ----------
    mechanism : Gaussian
        A single step; noise in units of the add/remove sensitivity.
    batch_size : array_like of whole numbers from 1 to 1e9
        B, the number of draws.
    dataset_size : array_like of whole numbers from 1 to 1e9
        n, the size of the larger data set. All fields broadcast.
    group : int from 1 to 1000
        k, one for the whole batch, less than n.

    Raises
    ------
    InputError
        A base that is not a Gaussian, a value outside its limits, with its index, or shapes that do not broadcast.

    References
    ----------
    Balle, Barthe, Gaboardi (2018), Privacy Amplification by Subsampling, Theorem 10. README.md, "Draws with
    replacement".

    >>> import jaxacct as ja
    >>> step = ja.SampledWithReplacement(ja.Gaussian(2.0), batch_size=10, dataset_size=1000)
    >>> b = ja.epsilon(ja.repeat(step, 1000), 1e-5)
    >>> round(float(b.upper), 3), b.kind
    (1.882, 'certified')
    """

    mechanism: Any
    batch_size: Any
    dataset_size: Any
    group: int = field(default=1, metadata={"static": True, "optional": True})
    constraints: ClassVar = {"batch_size": SIZE, "dataset_size": SIZE}

    def __post_init__(self) -> None:
        require_mechanism("mechanism", self.mechanism)
        require_gaussian("SampledWithReplacement", self.mechanism)
        object.__setattr__(self, "group", whole_number("group", self.group, LARGEST_GROUP))
        super().__post_init__()
        if not isinstance(self.dataset_size, Tracer) and np.any(np.asarray(self.dataset_size) <= self.group):
            smallest = int(np.min(self.dataset_size))
            raise InputError(f"dataset_size = {smallest} must be > group = {self.group}; other records must be left")

    def symmetric(self) -> bool:
        return False

    def displaces(self) -> bool:
        return True

    def kind_under(self, relation: str, composed: bool = False) -> str:
        return "bound"

    def expand(self, relation: str, direction: str) -> list[tuple[Part, np.ndarray]]:
        once = np.asarray(1.0)
        pairs = [_pair(shift, weight, relation) for shift, weight in self._contributions()]
        return [(sample_pair(stacked(pairs, batch_shape(self)), once, direction), once)]

    def branches(self, relation: str) -> list[list[Branch]] | None:
        if relation not in LOSS_OF_PRESENCE:
            return None
        return [[Branch(1.0, shift, weight)] for shift, weight in self._contributions()]

    def attained(self, relation: str) -> bool:
        return relation in LOSS_OF_PRESENCE

    def _contributions(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Shifts in deviations and weights of every configuration."""
        found = []
        for sigma, batch, size in rows_of(self, self.mechanism.noise_multiplier, self.batch_size, self.dataset_size):
            with localcontext(prec=60):
                chance = Decimal(self.group) / Decimal(int(size))
            weights = binomial(int(batch), chance)
            found.append((2.0 * np.arange(weights.size) / sigma, weights))
        return found


def _pair(shift: np.ndarray, weight: np.ndarray, relation: str) -> FinitePair:
    if relation in LOSS_OF_PRESENCE:
        return mixture_pair(shift, weight)
    return revealed_pair((shift, *taking_part(weight)))
