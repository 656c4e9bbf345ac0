"""Random allocation: in a round of t releases ("slots") each record takes part in some, which are drawn at random."""

from __future__ import annotations

import contextlib
import decimal
import functools
import math
import operator
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from decimal import Decimal
from fractions import Fraction
from itertools import accumulate
from typing import Any, ClassVar, Literal, NamedTuple, Self, TypeVar

import numpy as np

from jaxacct.core.floats import FAILURES, ROUNDOFF, SMALLEST_POSITIVE
from jaxacct.core.types import Leaf
from jaxacct.core.validation import COUNT, InputError, refuse_where
from jaxacct.kernels.contour.allocation import LARGEST_LOSS, round_profiles
from jaxacct.mechanisms.additive_noise import Gaussian, profile_of_gaussian
from jaxacct.mechanisms.base import (
    DIRECTIONS,
    SENSITIVITY,
    EqualToAnother,
    FinitePair,
    FinitePart,
    GaussianPart,
    Mechanism,
    Part,
    batch_shape,
    element,
    register,
)
from jaxacct.mechanisms.finite import (
    ApproximateDP,
    FiniteMechanism,
    FiniteOutput,
    PureDP,
    RandomizedResponse,
    absence_unknown,
    sample_pair,
)
from jaxacct.mechanisms.profile import BracketedProfile, direction_of, pair_above, pair_below, stacked, stacked_parts

FINITE_BASES = (RandomizedResponse, PureDP, ApproximateDP, FiniteOutput)
MOST_EPSILON = 1e15
"""Largest epsilon of a base with finitely many outputs. e^epsilon is a Decimal, whose exponent is at most 1e18."""
MOST_ATOMS = 20_000
"""Largest number of losses of a round. Each vector of counts (how many slots have each output) has one loss."""
LEAST_MASS = 1e-290
"""Smallest mass, near the smallest float64, that a law for lower ends keeps; laws for upper ends keep all masses."""
FAR = 37.0
"""Far profiles end at the loss mu (mu/2 + FAR). There delta of a Gaussian of sensitivity mu is about 1e-300."""
KEPT = 1024
"""Number of rounds whose profiles and pairs are cached; each takes some 40 kB."""
Made = TypeVar("Made")
Profiles = tuple[BracketedProfile, BracketedProfile]
"""Profiles of one round in the directions (remove, add)."""
Losses = Literal["usual", "dense", "far"]
"""Names a grid of losses. "dense" has more losses, for wide brackets. "far" has larger ones, for infinite brackets."""
_KEPT: dict[tuple[float, float, Losses], Profiles] = {}
_LOCK = threading.Lock()
_LOSSES: ContextVar[Losses] = ContextVar("losses", default="usual")


@register
class RandomAllocation(Mechanism):
    """A round of t releases; each record takes part in exactly ``participations`` of them, drawn at random.

    With one participation the pair is P = (1/t) sum_i N(e_i, sigma^2 I), Q = N(0, sigma^2 I) in t dimensions: exact for
    add, remove and zero-out, also for adaptive releases. ``ja.repeat(RandomAllocation(Gaussian(1.0), 100), epochs)``
    draws a fresh allocation in every round; its answer is a certified bracket. With k participations, 1 < k < t, the
    answer is a bound: that of a mechanism that splits the slots at random into k blocks, reveals the blocks, and draws
    one slot in each. With k = t a round is t plain releases. For k < t a replacement counts as a removal and an
    addition, and its answer is a bound. Rényi divergences and private selections for k < t are bounds, too.

    The draws of different records must be independent. A shuffle into slots of equal size is not covered, because the
    other records' slots then depend on the record's slot. For t = 2 and sigma = 1 the shuffle's delta(1) is at least
    .1172, and random allocation's delta(1) is .0592.

    For a base of finitely many outputs (``RandomizedResponse``, ``PureDP``, ``ApproximateDP``, ``FiniteOutput``) the
    answer is exact under add and remove, for any number k of participations. Under ``zero_out`` it is a bound, in which
    the record's slots are public, unless the base is a ``FiniteOutput``. ``replace_one`` is refused. A round may have
    at most min(20,000, 250,000/k) vectors of counts (how many slots have each output).

    One round's bracket usually has a relative width of 1e-6. Composed rounds reach some 1e-3 for epsilon and a few per
    cent for delta, whatever ``rtol`` asks. Their status is "ok" up to 1e-3 for epsilon and 5e-2 for delta.

    Parameters
    ----------
    mechanism : Gaussian, or a mechanism with finitely many outputs; the release of each slot.
    slots : whole numbers from 1 to 2**53; t, the number of releases of a round, which is public.
    participations : whole numbers from 1 to slots; k, exactly. No dominating pair is known for "at most k".
    group : whole numbers, 1 or more; how many records, each in slots of its own, are protected together. Above 1 the
        answer is a bound, and participations must be 1 or all slots. Records that share one slot are instead a single
        record: use group 1 and noise multiplier sigma / (number of records). All fields broadcast.

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
        super().__post_init__()
        finite = self._finite()
        if not finite:
            require_gaussian_slots(type(self).__name__, self.mechanism)
        try:
            numbers = np.broadcast_arrays(self.slots, self.participations, self.group)
            slots, taken, group = (np.asarray(x, np.float64) for x in numbers)
        except (TypeError, ValueError):  # JAX tracers have no values to check
            return
        some = (group > 1.0) & (taken > 1.0) & (taken < slots)
        for bad, name, values, rest in (
            (taken > slots, "participations", taken, "at most slots; use fewer, or more slots"),
            (some, "group", group, "1 where records take part in some of the slots; use participations=1"),
            (finite & (group > 1.0), "group", group, "1 for a base with finitely many outputs"),
        ):
            refuse_where(bad, name, values, f"must be {rest}", "{:g}".format)

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
            return "bound" if self.reveals(relation) else str(self.mechanism.kind_under(relation, composed))
        return "certified" if self.symmetric() else "bound"

    def kind_of_bracket(self, relation: str, composed: bool = False) -> str:
        if self._finite():
            return self.kind_under(relation, composed)
        once = (np.asarray(self.participations) == 1.0) & (np.asarray(self.group) == 1.0)
        exact = np.all(self._plain() | (once & (relation != "replace_one")))
        return "certified" if exact else "bound"

    def _plain(self) -> np.ndarray:
        """Return whether every record is in every slot, for each configuration."""
        return np.asarray(np.equal(self.participations, self.slots))

    def _finite(self) -> bool:
        """Return whether the base has finitely many outputs, so that all laws are exact."""
        return isinstance(self.mechanism, FINITE_BASES)

    def reveals(self, relation: str) -> bool:
        return self._finite() and absence_unknown(self.mechanism, relation) and not self._plain().all()

    def replaced_apart(self) -> bool:
        return not self.symmetric() and not self._finite()

    def _laws(self, revealed: bool = False) -> list[AllocatedLaw]:
        """Return each configuration's loss law, in the flat order of the batch. If `revealed`, the slots are public."""
        shape = batch_shape(self)
        slots = self.participations if revealed else self.slots
        numbers = (np.broadcast_to(x, shape).ravel() for x in (slots, self.participations))
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
            laws = self._laws(self.reveals(relation))
            part = stacked_parts([law.part(direction, below) for law in laws], shape)
            return [(part, np.asarray(1.0))]
        names = (self.mechanism.noise_multiplier, self.slots, self.participations, self.group)
        sigma, slots, taken, group = (np.broadcast_to(np.asarray(x, np.float64), shape) for x in names)
        self.require_pair(relation, "for random allocation")
        if not below:  # where a bound needs losses above LARGEST_LOSS, which no pair holds, reveal the record's slots
            mu = group / sigma
            bound = (group > 1.0) | (taken > 1.0) | (_LOSSES.get() == "far")
            revealed = bound & ~(mu * (0.5 * mu + FAR) <= LARGEST_LOSS)
            slots = np.where(revealed, taken, slots)
        small = np.floor(slots / taken)
        larger = slots - small * taken  # number of blocks with `small` + 1 slots
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
    """Return the loss law of one block of `slots` slots per configuration. If `present` is False, the loss is 0."""
    rows = list(zip(*(x.ravel().tolist() for x in (sigma, slots, group, present)), strict=True))
    zero, one, nowhere = np.zeros(1), np.ones(1), np.asarray(0.0)
    if below:
        nothing = FinitePart(zero, one, nowhere)
        laws = [  # no lower bound is known for groups: their loss 0 claims only delta >= 0
            law_below_round(noise, t, direction) if here and g == 1.0 else nothing for noise, t, g, here in rows
        ]
        return stacked_parts(laws, sigma.shape)
    absent = FinitePair(zero, one, one, nowhere, nowhere)
    pairs = [pair_above_round(noise, t, g) if here else absent for noise, t, g, here in rows]
    return sample_pair(stacked(pairs, sigma.shape), np.asarray(1.0), direction)


def require_gaussian_slots(owner: str, mechanism: Any) -> None:
    if type(mechanism) is not Gaussian:
        others = ", or a mechanism with few outputs such as ja.PureDP(0.1)" if owner == "RandomAllocation" else ""
        raise InputError(
            f"{owner} of {type(mechanism).__name__} is not supported, since its law is not known; its base is a "
            f"Gaussian{others}. Several Gaussians equal one of noise multiplier (sum z^-2)^(-1/2); others leak no more "
            "than what it releases in all the slots of a record, without the allocation"
        )


@register
class BallsInBins(EqualToAnother):
    """Several epochs of t releases (slots). A record takes part in one random slot, the same in every epoch.

    This equals one round of ``RandomAllocation`` with noise multiplier sigma/sqrt(epochs). jax_privacy's
    BallsInBinsSampling draws such batches. A fresh slot in every epoch, ``ja.repeat(RandomAllocation(Gaussian(sigma),
    slots), epochs)``, costs up to five times less epsilon: .603 instead of 2.96 at sigma = 2, 100 slots, 10 epochs and
    delta = 1e-5. A warning says so if slots and epochs are both above 1.

    Parameters
    ----------
    mechanism : Gaussian; the release of each slot in each epoch.
    slots : whole numbers from 1 to 2**53; t, the number of releases of an epoch.
    epochs : whole numbers from 1 to 2**53. All fields broadcast.

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
        super().__post_init__()
        require_gaussian_slots(type(self).__name__, self.mechanism)
        try:
            several = np.any((np.asarray(self.epochs, np.float64) > 1.0) & (np.asarray(self.slots, np.float64) > 1.0))
        except (TypeError, ValueError):  # tracers have no values
            return
        if several:
            warnings.warn(
                "BallsInBins keeps each record in the same slot in every epoch; ja.repeat(ja.RandomAllocation(...), "
                "epochs), with a fresh slot in every epoch, costs up to five times less epsilon",
                stacklevel=4,
            )

    def validated(self) -> Self:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the warning was given when the mechanism was made
            return super().validated()

    def replaced_apart(self) -> bool:
        return not self.symmetric()

    def equivalent(self, below: bool = False) -> RandomAllocation:
        """Return the round of RandomAllocation that equals the mechanism, with noise rounded down, or up if `below`."""
        sigma, epochs = (np.asarray(x, np.float64) for x in (self.mechanism.noise_multiplier, self.epochs))
        rounding = 4.0 * ROUNDOFF if below else -4.0 * ROUNDOFF
        return RandomAllocation(Gaussian(sigma / np.sqrt(epochs) * (1.0 + rounding)), self.slots)


def rounds_inside(mechanism: Mechanism) -> list[tuple[float, float]]:
    """Return the distinct (noise multiplier, slots) of a mechanism's Gaussian rounds, and of a round's blocks."""
    if isinstance(mechanism, BallsInBins):
        both = (rounds_inside(mechanism.equivalent(below)) for below in (False, True))
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


@contextlib.contextmanager
def with_losses(which: Losses) -> Iterator[None]:
    """Within the `with` block, compute the profiles of all rounds at the set of losses that `which` names."""
    token = _LOSSES.set(which)
    try:
        yield
    finally:
        _LOSSES.reset(token)


def _profiles(sigma: float, slots: float, losses: Losses) -> Profiles:
    """Return the profiles of a round in both directions, from the cache if possible."""
    kept = _KEPT.get((sigma, slots, losses))
    return kept if kept is not None else _profiles_of([(sigma, slots)], losses)[0]


def _profiles_of(rounds: Sequence[tuple[float, float]], losses: Losses) -> list[Profiles]:
    """Compute the profiles of rounds in both directions. Cap each delta at that of one Gaussian release."""
    sigma, slots = np.array(rounds, np.float64).T
    mus = 1.0 / sigma * (1.0 + 4.0 * ROUNDOFF)
    made: list[Profiles]
    if losses == "far":
        usual = [_profiles(*one, "usual") for one in rounds]
        made = [(_with_far_losses(a, mu), _with_far_losses(b, mu)) for (a, b), mu in zip(usual, mus, strict=True)]
    else:
        both = []
        for sign in (1.0, -1.0):
            found = []
            for profile, mu in zip(round_profiles(1.0 / sigma, slots, sign, losses == "dense"), mus, strict=True):
                high = np.minimum(profile.upper, profile_of_gaussian(mu, profile.epsilon))
                found.append(_without_lone(BracketedProfile(profile.epsilon, np.minimum(profile.lower, high), high)))
            both.append(found)
        made = [_with_one_start(*pair) for pair in zip(*both, strict=True)]
    with _LOCK:
        for key, pair in zip(rounds, made, strict=True):
            _KEPT[(*key, losses)] = pair
        while len(_KEPT) > KEPT:
            _KEPT.pop(next(iter(_KEPT)))
    return made


def _with_one_start(*pair: BracketedProfile) -> Profiles:
    """Tighten both brackets: 1 - (1 - TV) e^eps <= delta <= TV, where TV is delta at eps = 0 in either direction."""
    least, most = max(one.lower[0] for one in pair), min(one.upper[0] for one in pair)
    if not least <= most:
        return pair[0], pair[1]

    def narrowed(one: BracketedProfile) -> BracketedProfile:
        floor = 1.0 - (1.0 - least) * np.exp(one.epsilon) * (1.0 + 8.0 * ROUNDOFF * (1.0 + one.epsilon))
        return BracketedProfile(one.epsilon, np.maximum(one.lower, floor), np.minimum(one.upper, most))

    return narrowed(pair[0]), narrowed(pair[1])


def prepare(rounds: Sequence[tuple[float, float]]) -> None:
    """Compute several rounds together and cache their pairs. A round is given as (noise multiplier, slots)."""
    losses = _LOSSES.get()
    missing = [one for one in rounds if (*one, losses) not in _KEPT]
    if len(missing) > 1:
        with contextlib.suppress(*FAILURES):  # on a failure the loop below computes each round separately
            _profiles_of(missing, losses)
    for sigma, slots in rounds:
        pair_above_round(sigma, slots, 1.0)
        law_below_round(sigma, slots, DIRECTIONS[0])


def pair_above_round(sigma: float, slots: float, group: float) -> FinitePair:
    """Return the pair that dominates a round, for up to `group` records."""
    return _or_else(_pair_above, lambda: _pair_of_revealed(sigma, group), sigma, slots, group)


def law_below_round(sigma: float, slots: float, direction: str) -> FinitePart:
    """Return a loss law whose delta is at most that of the round. On a failure its delta is 0."""
    nothing = FinitePart(np.zeros(1), np.ones(1), np.asarray(0.0))
    return _or_else(_parts_below, lambda: (nothing, nothing), sigma, slots)[DIRECTIONS.index(direction)]


@functools.lru_cache(maxsize=KEPT)
def _pair_above(sigma: float, slots: float, losses: Losses, group: float) -> FinitePair:
    return pair_above(*(_of_group(profile, group, 1.0 / sigma) for profile in _profiles(sigma, slots, losses)))


@functools.lru_cache(maxsize=KEPT)
def _parts_below(sigma: float, slots: float, losses: Losses) -> tuple[FinitePart, ...]:
    pair = pair_below(*_profiles(sigma, slots, losses))
    return tuple(direction_of(pair, direction) for direction in DIRECTIONS)


def _or_else(
    make: Callable[..., Made], otherwise: Callable[[], Made], sigma: float, slots: float, *more: float
) -> Made:
    """Return the result of `make`. If `make` fails, warn and return the result of `otherwise`, a weaker bound."""
    try:
        return make(sigma, slots, _LOSSES.get(), *more)
    except FAILURES as error:
        warnings.warn(
            f"a round of {slots:g} slots at noise multiplier {sigma:g} failed ({error}); the Gaussian that reveals the "
            "slot bounds it instead",
            stacklevel=3,
        )
        return otherwise()


def _pair_of_revealed(sigma: float, group: float) -> FinitePair:
    """Return the pair of one Gaussian release, which reveals the slot. On a failure return a pair with delta = 1."""
    try:
        mu = 1.0 / sigma * (1.0 + 4.0 * ROUNDOFF)
        eps = np.linspace(0.0, min(mu * (0.5 * mu + 12.0), LARGEST_LOSS), 300)
        revealed = profile_of_gaussian(mu, eps)
        revealed = np.where(revealed <= 1.0, revealed, 1.0)
        profile = _of_group(BracketedProfile(eps, np.zeros_like(revealed), revealed), group, 1.0 / sigma)
        return pair_above(profile, profile)
    except FAILURES:
        return FinitePair(np.zeros(1), np.zeros(1), np.zeros(1), np.asarray(1.0), np.asarray(1.0))


def _of_group(profile: BracketedProfile, group: float, mu: float) -> BracketedProfile:
    """Return an upper bound of the profile of `group` records from that of one (README.md, "Random allocation")."""
    if group == 1.0:
        return profile
    eps, together = profile.epsilon, group * mu * (1.0 + 8.0 * ROUNDOFF)
    # `sums` is the sum of e^{j eps} over j < group, or the bound group * e^{(group - 1) eps} if the quotient overflows.
    with np.errstate(over="ignore", invalid="ignore"):
        sums = np.where(eps > 0.0, np.expm1(group * eps) / np.expm1(np.where(eps > 0.0, eps, 1.0)), group)
        sums = np.minimum(np.where(np.isnan(sums), np.inf, sums), group * np.exp((group - 1.0) * eps))
        high = np.where(profile.upper > 0.0, profile.upper * sums * (1.0 + 64.0 * ROUNDOFF * (1.0 + group * eps)), 0.0)
    far = np.linspace(0.0, min(together * (0.5 * together + FAR), LARGEST_LOSS), 300)
    losses = np.union1d(group * eps, far)
    capped = np.fmin(profile_of_gaussian(together, losses), 1.0)
    own = np.searchsorted(losses, group * eps)
    capped[own] = np.fmin(capped[own], high)
    return BracketedProfile(losses, np.zeros_like(capped), capped)


def _with_far_losses(profile: BracketedProfile, mu: float) -> BracketedProfile:
    """Extend the profile to larger losses by delta of one Gaussian release, so that less mass has infinite loss."""
    last, end = profile.epsilon[-1], min(mu * (0.5 * mu + FAR), LARGEST_LOSS)
    if not (last < end and profile.upper[-1] > 0.0):
        return profile
    far = np.linspace(last, end, 41)[1:]
    revealed = np.minimum(profile_of_gaussian(mu, far), profile.upper[-1])
    if not np.all(revealed <= 1.0):
        return profile
    return BracketedProfile(
        np.append(profile.epsilon, far), np.append(profile.lower, 0.0 * far), np.append(profile.upper, revealed)
    )


def _without_lone(profile: BracketedProfile) -> BracketedProfile:
    # leave out each point with a wide bracket between two points with narrow brackets
    wide = ~(profile.upper - profile.lower <= 1e-6 * profile.upper)
    beside = np.concatenate([[True], wide[:-1]]) | np.concatenate([wide[1:], [True]])
    keep = ~wide | beside
    return BracketedProfile(*(x[keep] for x in profile))


class AllocatedLaw(NamedTuple):
    """Law of the loss of a round whose base has finitely many outputs: masses under P and under Q."""

    loss: np.ndarray
    p: np.ndarray
    q: np.ndarray
    p_infinity: float  # P-mass of the outputs that have Q-mass 0
    q_infinity: float  # Q-mass of the outputs that have P-mass 0

    def part(self, direction: str, below: bool) -> FinitePart:
        """Return the loss law of a direction. If `below`, move each mass less than LEAST_MASS to the smallest loss."""
        loss, mass, infinity = self.loss, self.p, self.p_infinity
        if direction == "add":
            loss, mass, infinity = -loss, self.q, self.q_infinity
        if not below:
            return FinitePart(loss, mass, np.asarray(infinity))
        small = mass < LEAST_MASS
        least = int(np.argmin(loss))
        small[least] = False
        kept = np.where(small, 0.0, mass)
        # Moving mass to the smallest loss makes every delta smaller, so the law stays a lower bound.
        kept[least] += mass[small].sum() + (infinity if infinity < LEAST_MASS else 0.0)
        return FinitePart(np.where(small, 0.0, loss), kept, np.asarray(infinity if infinity >= LEAST_MASS else 0.0))

    def underflows(self) -> bool:
        """Return whether any mass is near the smallest float64; if so, upper and lower ends need different laws."""
        ends = [self.p_infinity or 1.0, self.q_infinity or 1.0]
        return bool(np.min([self.p.min(), self.q.min(), *ends]) < LEAST_MASS)


def refuse_counts(base: FiniteMechanism, slots: float, taken: float, index: str) -> None:
    """Refuse an epsilon > MOST_EPSILON and too many vectors of counts (`_counts`), naming element `index`."""
    if getattr(base, "epsilon", 0.0) > MOST_EPSILON:
        raise InputError(
            f"epsilon{index} = {base.epsilon:g} of the base must be at most {MOST_EPSILON:g} in RandomAllocation; "  # type: ignore[attr-defined]  # only PureDP and ApproximateDP have an epsilon
            "nothing is private beyond it"
        )
    with decimal.localcontext(_context(base)):
        outputs = sum(q > 0 for _, q in _outputs(base))
    atoms = math.comb(int(slots) + outputs - 1, outputs - 1) if outputs > 1 and slots <= MOST_ATOMS else int(slots)
    atoms = 1 if outputs <= 1 else atoms
    most = int(min(MOST_ATOMS, 250_000 // taken))
    if atoms > most:
        raise InputError(
            f"slots{index} = {slots:g} with participations = {taken:g} makes {most:,} or more counts of {outputs} "
            f"outputs, more than {most:,}; use fewer slots, or a base with fewer outputs such as PureDP"
        )


@functools.lru_cache(maxsize=256)  # a law takes up to half a megabyte
def allocated_law(base: FiniteMechanism, slots: int, taken: int) -> AllocatedLaw:
    """Return the law of the loss of a round in which a record takes part in `taken` of the slots."""
    with decimal.localcontext(_context(base)):
        outputs = _outputs(base)
        common = [(p / q, q) for p, q in outputs if q > 0]
        alone = sum((p for p, q in outputs if q == 0), Decimal(0))
        found, never = [], Decimal(0)
        for weight, ratio in _counts(common, slots, taken):
            if ratio > 0:
                found.append((float(ratio.ln()), _up(weight * ratio), _up(weight)))
            else:
                never += weight
        # `infinite` is 1 - (1 - alone)^taken, the P-mass of infinite loss. The sum loses no digits if `alone` is small.
        infinite = alone * sum(_powers(1 - alone, taken - 1), Decimal(0))
    loss, p, q = np.array(found or [(0.0, 0.0, 0.0)]).T
    return AllocatedLaw(loss, p, q, _up(infinite), _up(never))


def _context(base: FiniteMechanism) -> decimal.Context:
    """Return a decimal context with enough digits for losses as small as those of the base."""
    epsilon = float(getattr(base, "epsilon", 1.0))
    more = math.ceil(-math.log10(epsilon)) if 0.0 < epsilon < 1.0 else 0
    # the sums of `allocated_law` lose one digit for each factor of 10 in the number of slots
    return decimal.Context(prec=60 + more, Emin=decimal.MIN_EMIN, Emax=decimal.MAX_EMAX)


def _up(value: Decimal) -> float:
    """Return the nearest float64, or the smallest positive float64 if a positive value would become 0."""
    return max(float(value), SMALLEST_POSITIVE) if value > 0 else 0.0


def _counts(outputs: list[tuple[Decimal, Decimal]], slots: int, taken: int) -> Iterator[tuple[Decimal, Decimal]]:
    """Yield (Q-mass, dP/dQ) for every possible vector of counts, which says how many slots have each output."""
    factorial = list(accumulate(range(1, slots + 1), operator.mul, initial=Decimal(1)))
    # `powers` has q^n/n! and `ratios` has x^j/j! with x = p/q, because multinomial probabilities contain them
    powers = [[a / f for a, f in zip(_powers(q, slots), factorial, strict=True)] for _, q in outputs]
    ratios = [[a / f for a, f in zip(_powers(x, taken), factorial[: taken + 1], strict=True)] for x, _ in outputs]
    last, all_ways = len(outputs) - 1, factorial[slots] / (factorial[taken] * factorial[slots - taken])

    def terms(place: int, count: int) -> list[Decimal]:
        """Return the coefficients of (1 + x z)^count up to z^taken, where x is p/q of the output at `place`."""
        return [ratios[place][j] * factorial[count] / factorial[count - j] for j in range(min(count, taken) + 1)]

    def coefficient(one: list[Decimal], other: list[Decimal], power: int) -> Decimal:
        return sum((one[power - j] * c for j, c in enumerate(other) if 0 <= power - j < len(one)), Decimal(0))

    def walk(place: int, left: int, weight: Decimal, before: list[Decimal]) -> Iterator[tuple[Decimal, Decimal]]:
        if place == last:
            whole = coefficient(before, terms(place, left), taken)
            yield weight * powers[place][left] * factorial[slots], whole / all_ways
            return
        for count in range(left + 1):
            here = terms(place, count)
            product = [coefficient(before, here, i) for i in range(min(len(before) + count, taken + 1))]
            yield from walk(place + 1, left - count, weight * powers[place][count], product)

    yield from walk(0, slots, Decimal(1), [Decimal(1)])


def _powers(value: Decimal, most: int) -> list[Decimal]:
    return list(accumulate([value] * most, operator.mul, initial=Decimal(1)))


def _outputs(base: FiniteMechanism) -> list[tuple[Decimal, Decimal]]:
    """Return each output's probabilities (p, q) under P and Q. Outputs with the same ratio p/q count as one output."""
    if isinstance(base, RandomizedResponse):
        true = Fraction(float(base.probability))
        other = (1 - true) / (base.categories - 1)
        pairs = [(true, other), (other, true), ((base.categories - 2) * other,) * 2]
    elif isinstance(base, FiniteOutput):
        given = [[Fraction(float(x)) for x in np.ravel(values)] for values in (base.p, base.q)]
        totals = [sum(values) for values in given]
        pairs = [(p / totals[0], q / totals[1]) for p, q in zip(*given, strict=True)]
    else:
        delta = Decimal(float(getattr(base, "delta", 0.0)))
        odds = (-Decimal(float(base.epsilon))).exp()  # type: ignore[attr-defined]  # base: PureDP or ApproximateDP
        likely = (1 - delta) / (1 + odds)
        if odds == 1:
            return [(2 * likely, 2 * likely), (delta, Decimal(0)), (Decimal(0), delta)]
        return [(likely, likely * odds), (likely * odds, likely), (delta, Decimal(0)), (Decimal(0), delta)]
    joined: dict[Fraction | None, tuple[Fraction, Fraction]] = {}
    for p, q in pairs:
        if p or q:
            ratio = p / q if q else None
            before = joined.get(ratio, (Fraction(0), Fraction(0)))
            joined[ratio] = (before[0] + p, before[1] + q)
    as_decimal = lambda x: Decimal(x.numerator) / Decimal(x.denominator)
    return [(as_decimal(p), as_decimal(q)) for p, q in joined.values()]
