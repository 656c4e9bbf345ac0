"""Random allocation: each record is in some of the t slots of a round, chosen at random afresh, or in the same slot."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np

from jaxacct.core.floats import ROUNDOFF
from jaxacct.core.types import Leaf
from jaxacct.core.validation import COUNT, InputError, refuse_where
from jaxacct.mechanisms import allocation_rounds
from jaxacct.mechanisms.additive_noise import Gaussian
from jaxacct.mechanisms.allocation_rounds import FINITE_BASES, AllocatedLaw, allocated_law, refuse_counts
from jaxacct.mechanisms.base import SENSITIVITY, Mechanism, batch_shape, element, register, require_mechanism
from jaxacct.mechanisms.finite import sample_pair
from jaxacct.mechanisms.parts import FinitePair, FinitePart, GaussianPart, Part
from jaxacct.mechanisms.profile import stacked, stacked_parts

EPOCHS_WARNING = (
    "BallsInBins keeps each record in the same slot in every epoch; ja.repeat(ja.RandomAllocation(...), epochs), with "
    "a fresh slot in every epoch, costs up to five times less epsilon"
)
"""Warning to a user who keeps the same bins for several epochs."""


@register
@dataclass(frozen=True, eq=False)
class RandomAllocation(Mechanism):
    """A round of t releases, each record in exactly ``participations`` of them, chosen at random by itself.

    With one participation the pair is P = (1/t) sum_i N(e_i, sigma^2 I), Q = N(0, sigma^2 I) in t dimensions. It is
    exact for add, remove and zero-out, and adaptive. Composed, as in ``ja.repeat(RandomAllocation(Gaussian(1.0), 100),
    epochs)`` for a fresh allocation in every epoch, its profile is put on 200 to 400 losses from above and from below:
    the answer is a certified bracket, about 3e-4 to 6e-4 wide. With t slots and k participations, 1 < k < t, the slots
    are cut into k blocks at random, which is revealed, and ``kind`` is "bound". k = t is t plain releases, t = 1 is
    one. ``replace_one`` is a bound: a record is removed and another added. Renyi divergences, selections and other
    answers that take the dominating pair alone are bounds as well.

    The slots of different records are independent. Bins of equal size, as a shuffle makes them, are not covered: there
    the others' bins depend on the record's own. For t = 2, sigma = 1, delta(1) is .1172 or more, and not .0592.

    A base with finitely many outputs (``RandomizedResponse``, ``PureDP``, ``ApproximateDP``, ``FiniteOutput``) is exact
    for every number of participations, under add, remove and zero-out: the law of the loss is found from the counts of
    the outputs, up to 20,000 of them.

    A user whose k records share one bin is one record of k times the contribution: noise multiplier sigma/k.

    One round is narrow to 1e-6 as a rule. Composed rounds go by two pairs at some 200 losses, or more where epsilon is
    wide. Epsilon is then narrow to 1e-3 and delta to a few per cent, whatever ``rtol`` asks: the status "ok" allows
    1e-3 and 5e-2 there.

    Parameters
    ----------
    mechanism : Gaussian, or a mechanism with finitely many outputs
        What each slot releases: the sum over the records that are in it, with noise; or its output.
    slots : array_like of whole numbers from 1 to 2**53
        t, the number of releases of a round, public.
    participations : array_like of whole numbers from 1 to slots
        In how many of them a record takes part, exactly. "At most k" is not known to be dominated, and not covered.
    group : array_like of whole numbers, 1 or more
        How many records, each in bins of its own, are protected together. Above 1 it is a bound, and participations are
        1 or all slots. All fields broadcast.

    References
    ----------
    Feldman, Shenfeld (2025), Privacy Amplification by Random Allocation, arXiv:2502.08202. Chua et al. (2024),
    Balls-and-Bins Sampling for DP-SGD, arXiv:2412.16802. Choquette-Choo et al. (2024), arXiv:2410.06266, Lemma 3.2.

    >>> import jaxacct as ja
    >>> fresh = ja.RandomAllocation(ja.Gaussian(2.0), slots=100)
    >>> round(float(ja.epsilon(fresh, 1e-5).upper), 5)
    0.17319
    """

    mechanism: Leaf
    slots: Leaf
    participations: Leaf = 1.0
    group: Leaf = 1.0
    constraints: ClassVar = {"slots": COUNT, "participations": COUNT, "group": COUNT}

    def __post_init__(self) -> None:
        finite = isinstance(self.mechanism, FINITE_BASES)
        if not finite:
            require_gaussian_slots(type(self).__name__, self.mechanism)
        super().__post_init__()
        try:
            slots, taken, group = np.broadcast_arrays(self.slots, self.participations, self.group)
            numbers = [np.asarray(x, np.float64) for x in (slots, taken, group)]
        except (TypeError, ValueError):  # tracers
            return
        refuse_where(
            numbers[1] > numbers[0],
            "participations",
            numbers[1],
            "must be at most slots; use fewer, or more slots",
            "{:g}".format,
        )
        some = (numbers[2] > 1.0) & (numbers[1] > 1.0) & (numbers[1] < numbers[0])
        for bad, why in (
            (some, "where records take part in some of the slots; use participations=1"),
            (finite & (numbers[2] > 1.0), "for a base with finitely many outputs"),
        ):
            refuse_where(bad, "group", numbers[2], f"must be 1 {why}", "{:g}".format)

    def expand(self, relation: str, direction: str) -> list[tuple[Part, np.ndarray]]:
        return self._parts(relation, direction, False)

    def expand_below(self, relation: str, direction: str) -> list[tuple[Part, np.ndarray]]:
        return self._parts(relation, direction, True)

    def has_bracket(self) -> bool:
        return not self._finite() or any(law.underflows() for law in self._laws())

    def symmetric(self) -> bool:
        return bool(self._plain().all()) and (not self._finite() or self.mechanism.symmetric())

    def kind_under(self, relation: str, composed: bool = False) -> str:
        if self._finite():
            return str(self.mechanism.kind_under(relation, composed))
        return "certified" if self.symmetric() else "bound"

    def kind_of_bracket(self, relation: str, composed: bool = False) -> str:
        if self._finite():
            return self.kind_under(relation, composed)
        once = (np.asarray(self.participations) == 1.0) & (np.asarray(self.group) == 1.0)
        exact = np.all(self._plain() | (once & (relation != "replace_one")))
        return "certified" if exact else "bound"

    def _plain(self) -> np.ndarray:
        """Whether every record is in every slot, for each configuration."""
        return np.asarray(np.equal(self.participations, self.slots))

    def _finite(self) -> bool:
        """Whether the base has finitely many outputs: then all laws are exact."""
        return isinstance(self.mechanism, FINITE_BASES)

    def _laws(self) -> list[AllocatedLaw]:
        """The law of every configuration, in the flat order of the batch."""
        shape = batch_shape(self)
        numbers = (np.broadcast_to(x, shape).ravel() for x in (self.slots, self.participations))
        places = list(np.ndindex(shape))
        rows = [(element(self, index).mechanism, t, k) for index, t, k in zip(places, *numbers, strict=True)]
        for index, row in zip(places, rows, strict=True):
            refuse_counts(*row, str(list(index)) if index else "")
        return [allocated_law(base, int(t), int(k)) for base, t, k in rows]

    def _parts(self, relation: str, direction: str, below: bool) -> list[tuple[Part, np.ndarray]]:
        shape = batch_shape(self)
        if self._finite():
            if relation == "replace_one":
                raise InputError(
                    "relation = 'replace_one' is not supported for RandomAllocation of a mechanism with finitely many "
                    "outputs, whose laws are those with a record and without it; claim nothing for it"
                )
            part = stacked_parts([law.part(direction, below) for law in self._laws()], shape)
            return [(part, np.asarray(1.0))]
        names = (self.mechanism.noise_multiplier, self.slots, self.participations, self.group)
        sigma, slots, taken, group = (np.broadcast_to(np.asarray(x, np.float64), shape) for x in names)
        if relation == "replace_one" and not self.symmetric():
            raise InputError(
                "relation = 'replace_one' gives no pair for random allocation; ask ja.epsilon or ja.delta for a bound"
            )
        small = np.floor(slots / taken)
        larger = slots - small * taken  # number of blocks with one slot more
        plain = GaussianPart(sigma / group / SENSITIVITY[relation], np.where(small == 1.0, 1.0, 0.0))
        parts: list[tuple[Part, np.ndarray]] = [(plain, np.where(small == 1.0, taken - larger, 1.0))]
        for size, count in ((small, taken - larger), (small + 1.0, larger)):
            present = (size > 1.0) & (count > 0.0)
            if present.any():
                part = _of_rows(sigma, size, group, present, direction, below)
                parts.append((part, np.where(present, count, 1.0)))
        return parts


def _of_rows(
    sigma: np.ndarray, slots: np.ndarray, group: np.ndarray, present: np.ndarray, direction: str, below: bool
) -> FinitePart:
    """The finite law of each configuration; where the part is absent, a single loss 0."""
    nothing = np.zeros(1), np.ones(1), np.ones(1)
    pairs = []
    for noise, t, g, here in zip(*(x.ravel() for x in (sigma, slots, group, present)), strict=True):
        if not here or (below and g > 1.0):  # groups have no lower bound
            pairs.append(FinitePair(*nothing, np.asarray(0.0), np.asarray(0.0)))
        elif below:
            loss, mass, _ = allocation_rounds.below(float(noise), float(t), direction)
            pairs.append(FinitePair(loss, mass, mass, np.asarray(0.0), np.asarray(0.0)))
        else:
            pairs.append(allocation_rounds.above(float(noise), float(t), float(g)))
    pair = stacked(pairs, sigma.shape)
    if below:  # already made for this direction
        return FinitePart(pair.loss, pair.p, pair.p_infinity)
    return sample_pair(pair, np.asarray(1.0), direction)


def require_gaussian_slots(owner: str, mechanism: Any) -> None:
    """Refuse a base that is no Gaussian."""
    require_mechanism("mechanism", mechanism)
    if type(mechanism) is not Gaussian:
        others = ", or a mechanism with few outputs such as ja.PureDP(0.1)" if owner == "RandomAllocation" else ""
        raise InputError(
            f"{owner} of {type(mechanism).__name__} is not supported, since its law is not known; its base is a "
            f"Gaussian{others}. Several Gaussians are the one of noise (sum z^-2)^(-1/2); anything else leaks no more "
            "than what it releases in all the slots of a record, without the allocation"
        )


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

    mechanism: Leaf
    slots: Leaf
    epochs: Leaf
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
        return self.one_round(False).expand(relation, direction)

    def expand_below(self, relation: str, direction: str) -> list[tuple[Part, np.ndarray]]:
        return self.one_round(True).expand_below(relation, direction)

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
