"""Random allocation: each record takes part in a fixed number of the t slots of a round, chosen at random."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np

from jaxacct.floats import ROUNDOFF
from jaxacct.mechanisms import allocation_rounds
from jaxacct.mechanisms.base import SENSITIVITY, Mechanism, batch_shape, register, require_mechanism
from jaxacct.mechanisms.finite import sample_pair
from jaxacct.mechanisms.gaussian import Gaussian
from jaxacct.mechanisms.parts import FinitePair, FinitePart, GaussianPart, Part
from jaxacct.mechanisms.profile import stacked
from jaxacct.validation import COUNT, InputError

__all__ = ["BallsInBins", "RandomAllocation", "replaced_in_two_steps", "rounds_inside"]

EPOCHS_WARNING = (
    "BallsInBins keeps each record in the same slot in every epoch; ja.repeat(ja.RandomAllocation(...), epochs), with "
    "a fresh slot in every epoch, costs up to five times less epsilon"
)
"""What a user of the same bins in several epochs is told."""


@register
@dataclass(frozen=True, eq=False)
class RandomAllocation(Mechanism):
    """A round of t releases, each record in exactly ``participations`` of them, chosen at random by itself.

    With one participation the pair is P = (1/t) sum_i N(e_i, sigma^2 I), Q = N(0, sigma^2 I) in t dimensions. It is
    exact for add, remove and zero-out, and adaptive. Composed, as in ``ja.repeat(RandomAllocation(Gaussian(1.0), 100),
    epochs)`` for a fresh allocation in every epoch, its profile is put on 200 to 400 losses from above and from below:
    the answer is a certified bracket, about 3e-4 to 1e-3 wide. With t slots and k participations, 1 < k < t, the slots
    are cut into k blocks at random, which is revealed, and ``kind`` is "bound". k = t is t plain releases, t = 1 is
    one. ``replace_one`` is a bound: a record is removed and another added. Renyi divergences, selections and other
    answers that take the dominating pair alone are bounds as well.

    The slots of different records are independent. Bins of equal size, as a shuffle makes them, are not covered: there
    the others' bins depend on the record's own. For t = 2, sigma = 1, delta(1) is .1172 or more, and not .0592.

    A user whose k records share one bin is one record of k times the contribution: noise multiplier sigma/k.

    One round is narrow to 1e-6 as a rule. Composed rounds go by two pairs at some 200 losses: epsilon is then narrow to
    about 1e-3 and delta to a few per cent, whatever ``rtol`` asks, and the status "ok" allows 2e-3 and 5e-2.

    Parameters
    ----------
    mechanism : Gaussian
        What each slot releases: the sum over the records that are in it, with noise.
    slots : array_like of whole numbers from 1 to 2**53
        t, the number of releases of a round, public.
    participations : array_like of whole numbers from 1 to slots
        In how many of them a record takes part, exactly. "At most k" is not known to be dominated, and not covered.
    group : array_like of whole numbers, 1 or more
        How many records, each in bins of its own, are protected together. Above 1 it is a bound, and participations are
        1 or all slots. All fields broadcast.

    Raises
    ------
    InputError
        Another base mechanism, a value outside its limits, more participations than slots, or a group with some of the
        slots.

    References
    ----------
    Feldman, Shenfeld (2025), Privacy Amplification by Random Allocation, arXiv:2502.08202. Chua et al. (2024),
    Balls-and-Bins Sampling for DP-SGD, arXiv:2412.16802. Choquette-Choo et al. (2024), arXiv:2410.06266, Lemma 3.2.

    >>> import jaxacct as ja
    >>> fresh = ja.RandomAllocation(ja.Gaussian(2.0), slots=100)
    >>> round(float(ja.epsilon(fresh, 1e-5).upper), 5)
    0.17319
    """

    mechanism: Any
    slots: Any
    participations: Any = 1.0
    group: Any = 1.0
    constraints: ClassVar = {"slots": COUNT, "participations": COUNT, "group": COUNT}

    def __post_init__(self) -> None:
        _require_gaussian(type(self).__name__, self.mechanism)
        super().__post_init__()
        try:
            slots, taken, group = np.broadcast_arrays(self.slots, self.participations, self.group)
            numbers = [np.asarray(x, np.float64) for x in (slots, taken, group)]
        except (TypeError, ValueError):  # tracers
            return
        _refuse(numbers[1] > numbers[0], "participations", numbers[1], "at most slots; use fewer, or more slots")
        some = (numbers[2] > 1.0) & (numbers[1] > 1.0) & (numbers[1] < numbers[0])
        _refuse(some, "group", numbers[2], "1 where records take part in some of the slots; use participations=1")

    def expand(self, relation: str, direction: str) -> list[tuple[Part, np.ndarray]]:
        return self._parts(relation, direction, False)

    def expand_below(self, relation: str, direction: str) -> list[tuple[Part, np.ndarray]]:
        return self._parts(relation, direction, True)

    def has_bracket(self) -> bool:
        return True

    def symmetric(self) -> bool:
        return bool(self._plain().all())

    def kind_under(self, relation: str, composed: bool = False) -> str:
        return "certified" if self.symmetric() else "bound"

    def kind_of_bracket(self, relation: str, composed: bool = False) -> str:
        once = (np.asarray(self.participations) == 1.0) & (np.asarray(self.group) == 1.0)
        exact = np.all(self._plain() | (once & (relation != "replace_one")))
        return "certified" if exact else "bound"

    def _plain(self) -> np.ndarray:
        """Where every record is in every slot."""
        return np.asarray(np.equal(self.participations, self.slots))

    def _parts(self, relation: str, direction: str, below: bool) -> list[tuple[Part, np.ndarray]]:
        shape = batch_shape(self)
        names = (self.mechanism.noise_multiplier, self.slots, self.participations, self.group)
        sigma, slots, taken, group = (np.broadcast_to(np.asarray(x, np.float64), shape) for x in names)
        if relation == "replace_one" and not self.symmetric():
            raise InputError(
                "relation = 'replace_one' gives no pair for random allocation; ask ja.epsilon or ja.delta, which bound "
                "it, or use relation='add_or_remove_one'"
            )
        small = np.floor(slots / taken)
        larger = slots - small * taken  # so many blocks have one slot more
        plain = GaussianPart(sigma / group / SENSITIVITY[relation], np.where(small == 1.0, 1.0, 0.0))
        parts: list[tuple[Part, np.ndarray]] = [(plain, np.where(small == 1.0, taken - larger, 1.0))]
        for size, count in ((small, taken - larger), (small + 1.0, larger)):
            present = (size > 1.0) & (count > 0.0)
            if present.any():
                part = _of_rows(sigma, size, group, present, direction, below)
                parts.append((part, np.where(present, count, 1.0)))
        return parts


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
        _require_gaussian(type(self).__name__, self.mechanism)
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
        return not mechanism.symmetric()
    return any(replaced_in_two_steps(inner) for inner in mechanism.inside())


def _of_rows(
    sigma: np.ndarray, slots: np.ndarray, group: np.ndarray, present: np.ndarray, direction: str, below: bool
) -> FinitePart:
    """The finite law of each configuration, of one loss 0 where it is absent."""
    nothing = np.zeros(1), np.ones(1), np.ones(1)
    pairs = []
    for noise, t, g, here in zip(*(x.ravel() for x in (sigma, slots, group, present)), strict=True):
        if not here or (below and g > 1.0):  # of a group nothing is claimed from below
            pairs.append(FinitePair(*nothing, np.asarray(0.0), np.asarray(0.0)))
        elif below:
            loss, mass, _ = allocation_rounds.below(float(noise), float(t), direction)
            pairs.append(FinitePair(loss, mass, mass, np.asarray(0.0), np.asarray(0.0)))
        else:
            pairs.append(allocation_rounds.above(float(noise), float(t), float(g)))
    pair = stacked(pairs, sigma.shape)
    if below:  # made for the direction that is asked for
        return FinitePart(pair.loss, pair.p, pair.p_infinity)
    return sample_pair(pair, np.asarray(1.0), direction)


def _require_gaussian(owner: str, mechanism: Any) -> None:
    require_mechanism("mechanism", mechanism)
    if type(mechanism) is not Gaussian:
        raise InputError(
            f"{owner} of {type(mechanism).__name__} is not supported, since its law is known for Gaussian noise only; "
            "use a Gaussian, as in ja.RandomAllocation(ja.Gaussian(1.0), 100)"
        )


def _refuse(bad: np.ndarray, name: str, values: np.ndarray, rest: str) -> None:
    if bad.any():
        index = [int(i) for i in np.argwhere(bad)[0]]
        raise InputError(f"{name}{index or ''} = {float(values[tuple(index)]):g} must be {rest}")
