"""Balls in bins: random allocation whose slots stay the same in every epoch; and what is inside a mechanism."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np

from jaxacct.core.floats import ROUNDOFF
from jaxacct.core.validation import COUNT
from jaxacct.mechanisms.allocated_outputs import FINITE_BASES
from jaxacct.mechanisms.base import Mechanism, batch_shape, register
from jaxacct.mechanisms.gaussian import Gaussian
from jaxacct.mechanisms.parts import Part
from jaxacct.mechanisms.random_allocation import RandomAllocation, require_gaussian_slots

__all__ = ["BallsInBins", "replaced_in_two_steps", "rounds_inside"]

EPOCHS_WARNING = (
    "BallsInBins keeps each record in the same slot in every epoch; ja.repeat(ja.RandomAllocation(...), epochs), with "
    "a fresh slot in every epoch, costs up to five times less epsilon"
)
"""What a user of the same bins in several epochs is told."""


@register
@dataclass(frozen=True, eq=False)
class BallsInBins(Mechanism):
    """Several epochs of t releases, each record in one of the t slots, the same in every epoch.

    It is exactly one round of ``RandomAllocation`` with noise multiplier sigma/sqrt(epochs): the sum of a slot's
    releases over the epochs tells all that they tell. This is what jax_privacy's BallsInBinsSampling draws. A fresh
    slot in every epoch, ``ja.repeat(RandomAllocation(Gaussian(sigma), slots), epochs)``, costs up to five times less
    epsilon: at sigma = 2, 100 slots, 10 epochs and delta = 1e-5 it is .603 against 2.96. A warning says so.

    Parameters
    ----------
    mechanism : Gaussian
        What each slot releases in each epoch.
    slots : array_like of whole numbers from 1 to 2**53
        t, the number of releases of an epoch.
    epochs : array_like of whole numbers from 1 to 2**53
        All fields broadcast.

    Raises
    ------
    InputError
        Another base mechanism, a value outside its limits, with its index, or shapes that do not broadcast.

    References
    ----------
    Chua et al. (2024), Balls-and-Bins Sampling for DP-SGD, arXiv:2412.16802.

    >>> import jaxacct as ja
    >>> import warnings
    >>> with warnings.catch_warnings(action="ignore"):
    ...     kept = ja.BallsInBins(ja.Gaussian(2.0), slots=100, epochs=4)
    >>> fresh = ja.repeat(ja.RandomAllocation(ja.Gaussian(2.0), slots=100), 4)
    >>> bool(ja.epsilon(kept, 1e-5).lower > 1.6 * ja.epsilon(fresh, 1e-5).upper)
    True
    """

    mechanism: Any
    slots: Any
    epochs: Any
    constraints: ClassVar = {"slots": COUNT, "epochs": COUNT}

    def __post_init__(self) -> None:
        require_gaussian_slots(type(self).__name__, self.mechanism)
        super().__post_init__()
        try:
            several = np.any((np.asarray(self.epochs, np.float64) > 1.0) & (np.asarray(self.slots, np.float64) > 1.0))
        except (TypeError, ValueError):  # tracers
            return
        if several:
            warnings.warn(EPOCHS_WARNING, stacklevel=4)

    def validated(self) -> Self:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it was told when it was made
            return super().validated()

    def expand(self, relation: str, direction: str) -> list[tuple[Part, np.ndarray]]:
        return self._parts(relation, direction, False)

    def expand_below(self, relation: str, direction: str) -> list[tuple[Part, np.ndarray]]:
        return self._parts(relation, direction, True)

    def has_bracket(self) -> bool:
        return True

    def symmetric(self) -> bool:
        return bool(np.all(np.equal(self.slots, 1.0)))

    def kind_under(self, relation: str, composed: bool = False) -> str:
        return "certified" if self.symmetric() else "bound"

    def kind_of_bracket(self, relation: str, composed: bool = False) -> str:
        return "certified" if self.symmetric() or relation != "replace_one" else "bound"

    def one_round(self, below: bool) -> RandomAllocation:
        """The round that it is; its noise is rounded up for lower ends (`below`), and down for upper ends."""
        sigma, epochs = (np.asarray(x, np.float64) for x in (self.mechanism.noise_multiplier, self.epochs))
        rounding = 4.0 * ROUNDOFF if below else -4.0 * ROUNDOFF
        return RandomAllocation(Gaussian(sigma / np.sqrt(epochs) * (1.0 + rounding)), self.slots)

    def _parts(self, relation: str, direction: str, below: bool) -> list[tuple[Part, np.ndarray]]:
        return self.one_round(below)._parts(relation, direction, below)


def rounds_inside(mechanism: Mechanism) -> list[tuple[float, float]]:
    """(noise multiplier, slots) of the rounds of random allocation inside whose pairs are made, each once."""
    if isinstance(mechanism, BallsInBins):
        both = (rounds_inside(mechanism.one_round(below)) for below in (False, True))
        return list(dict.fromkeys(one for each in both for one in each))
    if isinstance(mechanism, RandomAllocation) and isinstance(mechanism.mechanism, FINITE_BASES):
        return []
    if not isinstance(mechanism, RandomAllocation):
        return list(dict.fromkeys(one for inner in mechanism.inside() for one in rounds_inside(inner)))
    sigma, slots, taken = (
        np.ravel(np.broadcast_to(np.asarray(x, np.float64), batch_shape(mechanism)))
        for x in (mechanism.mechanism.noise_multiplier, mechanism.slots, mechanism.participations)
    )
    small = np.floor(slots / taken)
    larger = slots - small * taken
    found = [(sigma[(small > 1.0)], small[(small > 1.0)]), (sigma[larger > 0.0], small[larger > 0.0] + 1.0)]
    return list(dict.fromkeys(pair for some in found for pair in zip(*(x.tolist() for x in some), strict=True)))


def replaced_in_two_steps(mechanism: Mechanism) -> bool:
    """Whether the mechanism contains a random allocation, for which no pair of a replaced record is known."""
    if isinstance(mechanism, RandomAllocation | BallsInBins):
        return not mechanism.symmetric() and not isinstance(mechanism.mechanism, FINITE_BASES)
    return any(replaced_in_two_steps(inner) for inner in mechanism.inside())
