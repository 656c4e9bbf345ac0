"""The pairs of one round of random allocation, and for bases with few outputs the exact law of its loss.

A round whose pairs cannot be made does not end its batch: from above it gets the pair of the Gaussian that tells the
slot, from below one that claims nothing, so that its status is "width".
"""

from __future__ import annotations

import contextlib
import decimal
import functools
import math
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from decimal import Decimal
from fractions import Fraction
from typing import Literal, NamedTuple, TypeVar

import numpy as np

from jaxacct.core.floats import FAILURES, ROUNDOFF, SMALLEST_POSITIVE
from jaxacct.core.validation import InputError
from jaxacct.kernels.contour.allocation import LARGEST_LOSS, RoundProfile, round_profiles
from jaxacct.mechanisms.additive_noise import profile_of_gaussian
from jaxacct.mechanisms.base import DIRECTIONS
from jaxacct.mechanisms.finite import ApproximateDP, FiniteMechanism, FiniteOutput, PureDP, RandomizedResponse
from jaxacct.mechanisms.parts import FinitePair, FinitePart
from jaxacct.mechanisms.profile import BracketedProfile, direction_of, pair_above, pair_below

FINITE_BASES = (RandomizedResponse, PureDP, ApproximateDP, FiniteOutput)
"""Base mechanisms whose outputs' probabilities are known exactly."""
MOST_EPSILON = 1e15
"""Largest epsilon of a base: decimal exponents end at 1e18."""
MOST_ATOMS = 20_000
"""Most distinct counts of the outputs."""
LEAST_MASS = 1e-290
"""Below it float64 soon ends: such masses are kept in laws from above, and left out of laws from below."""
KEPT = 1024
"""Rounds whose profiles and pairs are kept; each takes some 40 kB."""
Made = TypeVar("Made")
Profiles = tuple[BracketedProfile, BracketedProfile]
"""The profiles of one round in both directions."""
Losses = Literal["usual", "dense", "far"]
"""Which losses a round has: "dense" is for compositions whose bracket is wide, "far" where it has no upper end."""
_KEPT: dict[tuple[float, float, Losses], Profiles] = {}
_LOCK = threading.Lock()
_LOSSES: ContextVar[Losses] = ContextVar("losses", default="usual")


@contextlib.contextmanager
def with_losses(which: Losses) -> Iterator[None]:
    """While this lasts rounds have these losses."""
    token = _LOSSES.set(which)
    try:
        yield
    finally:
        _LOSSES.reset(token)


def _profiles(sigma: float, slots: float, losses: Losses) -> Profiles:
    """The profile in both directions."""
    kept = _KEPT.get((sigma, slots, losses))
    return kept if kept is not None else _profiles_of([(sigma, slots)], losses)[0]


def _profiles_of(rounds: Sequence[tuple[float, float]], losses: Losses) -> list[Profiles]:
    """Profiles in both directions.  A round whose slot is revealed is a Gaussian, which is never better."""
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
                found.append(_without_lone(RoundProfile(profile.epsilon, np.minimum(profile.lower, high), high)))
            both.append(found)
        made = list(zip(*both, strict=True))
    with _LOCK:
        for key, pair in zip(rounds, made, strict=True):
            _KEPT[(*key, losses)] = pair
        while len(_KEPT) > KEPT:
            _KEPT.pop(next(iter(_KEPT)))
    return made


def prepare(rounds: Sequence[tuple[float, float]]) -> None:
    """Compute the pairs of rounds, (noise multiplier, slots) each, together, so that they are there when asked for."""
    losses = _LOSSES.get()
    missing = [one for one in rounds if (*one, losses) not in _KEPT]
    if len(missing) > 1:
        with contextlib.suppress(*FAILURES):  # then each by itself
            _profiles_of(missing, losses)
    for sigma, slots in rounds:
        above(sigma, slots, 1.0)
        _below(sigma, slots)


def above(sigma: float, slots: float, group: float) -> FinitePair:
    """The pair that dominates a round, for up to `group` records."""
    return _or_else(_pair_above, lambda: _pair_of_revealed(sigma, group), sigma, slots, group)


def below(sigma: float, slots: float, direction: str) -> FinitePart:
    """The law of the loss of a pair that a round dominates."""
    if direction not in DIRECTIONS:
        raise ValueError(direction)
    return _below(sigma, slots)[DIRECTIONS.index(direction)]


def _below(sigma: float, slots: float) -> tuple[FinitePart, ...]:
    nothing = FinitePart(np.zeros(1), np.ones(1), np.asarray(0.0))
    return _or_else(_parts_below, lambda: (nothing,) * len(DIRECTIONS), sigma, slots)


@functools.lru_cache(maxsize=KEPT)
def _pair_above(sigma: float, slots: float, losses: Losses, group: float) -> FinitePair:
    return pair_above(*(_of_group(profile, group) for profile in _profiles(sigma, slots, losses)))


@functools.lru_cache(maxsize=KEPT)
def _parts_below(sigma: float, slots: float, losses: Losses) -> tuple[FinitePart, ...]:
    pair = pair_below(*_profiles(sigma, slots, losses))
    return tuple(direction_of(pair, direction) for direction in DIRECTIONS)


def _or_else(
    make: Callable[..., Made], otherwise: Callable[[], Made], sigma: float, slots: float, *more: float
) -> Made:
    """The result of `make`; if it fails, that of `otherwise`, which claims less and is not cached."""
    try:
        return make(sigma, slots, _LOSSES.get(), *more)
    except FAILURES as error:
        warnings.warn(
            f"a round of {slots:g} slots at noise multiplier {sigma:g} failed ({error}); the Gaussian that tells the "
            "slot answers",
            stacklevel=3,
        )
        return otherwise()


def _pair_of_revealed(sigma: float, group: float) -> FinitePair:
    """The pair of the Gaussian that reveals the slot, or, if that fails, a pair that bounds nothing."""
    try:
        mu = 1.0 / sigma * (1.0 + 4.0 * ROUNDOFF)
        eps = np.linspace(0.0, min(mu * (0.5 * mu + 12.0), LARGEST_LOSS), 300)
        revealed = profile_of_gaussian(mu, eps)
        revealed = np.where(revealed <= 1.0, revealed, 1.0)
        profile = _of_group(BracketedProfile(eps, np.zeros_like(revealed), revealed), group)
        return pair_above(profile, profile)
    except FAILURES:
        return FinitePair(np.zeros(1), np.zeros(1), np.zeros(1), np.asarray(1.0), np.asarray(1.0))


def _of_group(profile: BracketedProfile, group: float) -> BracketedProfile:
    """delta_g(g eps) <= delta(eps) (1 + e^eps + ... + e^{(g-1) eps}), for g records one after the other."""
    if group == 1.0:
        return profile
    eps = profile.epsilon
    # the sum is at most g e^{(g-1) eps}, and at eps > 0 the quotient of two differences
    with np.errstate(over="ignore", invalid="ignore"):
        sums = np.where(eps > 0.0, np.expm1(group * eps) / np.expm1(np.where(eps > 0.0, eps, 1.0)), group)
        sums = np.minimum(np.where(np.isnan(sums), np.inf, sums), group * np.exp((group - 1.0) * eps))
        high = np.where(profile.upper > 0.0, profile.upper * sums * (1.0 + 64.0 * ROUNDOFF * (1.0 + group * eps)), 0.0)
    high = np.minimum(np.where(np.isnan(high), 1.0, high), 1.0)
    return BracketedProfile(group * eps, np.zeros_like(high), high)


def _with_far_losses(profile: BracketedProfile, mu: float) -> BracketedProfile:
    """The profile with losses beyond its last, by the Gaussian whose slot is revealed, so that less is at infinity."""
    # the Gaussian's delta is some 1e-300 there
    last, end = profile.epsilon[-1], min(mu * (0.5 * mu + 37.0), LARGEST_LOSS)
    if not (last < end and profile.upper[-1] > 0.0):
        return profile
    far = np.linspace(last, end, 41)[1:]
    revealed = np.minimum(profile_of_gaussian(mu, far), profile.upper[-1])
    if not np.all(revealed <= 1.0):
        return profile
    return BracketedProfile(
        np.append(profile.epsilon, far), np.append(profile.lower, 0.0 * far), np.append(profile.upper, revealed)
    )


def _without_lone(profile: RoundProfile) -> BracketedProfile:
    wide = ~(profile.upper - profile.lower <= 1e-6 * profile.upper)  # a wide point between two narrow ones is left out
    beside = np.concatenate([[True], wide[:-1]]) | np.concatenate([wide[1:], [True]])
    keep = ~wide | beside
    return BracketedProfile(*(x[keep] for x in profile))


class AllocatedLaw(NamedTuple):
    """The loss of a round with finitely many counts."""

    loss: np.ndarray
    p: np.ndarray
    q: np.ndarray
    p_infinity: float
    q_infinity: float

    def part(self, direction: str, below: bool) -> FinitePart:
        """The law in a direction; `below`: without the smallest masses, so that it is dominated."""
        loss, mass, infinity = self.loss, self.p, self.p_infinity
        if direction == "add":
            loss, mass, infinity = -loss, self.q, self.q_infinity
        if not below:
            return FinitePart(loss, mass, np.asarray(infinity))
        small = mass < LEAST_MASS
        least = int(np.argmin(loss))
        small[least] = False
        kept = np.where(small, 0.0, mass)
        # a mass moved to the least loss makes every delta smaller
        kept[least] += mass[small].sum() + (infinity if infinity < LEAST_MASS else 0.0)
        return FinitePart(np.where(small, 0.0, loss), kept, np.asarray(infinity if infinity >= LEAST_MASS else 0.0))

    def underflows(self) -> bool:
        """Whether there are masses near the end of float64."""
        ends = [self.p_infinity or 1.0, self.q_infinity or 1.0]
        return bool(np.min([self.p.min(), self.q.min(), *ends]) < LEAST_MASS)


def refuse_counts(base: FiniteMechanism, slots: float, taken: float, index: str) -> None:
    """Refuse a configuration with more distinct counts than MOST_ATOMS; `index` is its index in the batch."""
    if getattr(base, "epsilon", 0.0) > MOST_EPSILON:
        raise InputError(
            f"epsilon{index} = {base.epsilon:g} of the base must be at most {MOST_EPSILON:g} in RandomAllocation; "  # type: ignore[attr-defined]  # of PureDP and ApproximateDP
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


@functools.lru_cache(maxsize=256)  # the largest takes half a megabyte
def allocated_law(base: FiniteMechanism, slots: int, taken: int) -> AllocatedLaw:
    """The loss of one configuration: a record takes part in `taken` of the slots, drawn without replacement."""
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
        # 1 - (1 - alone)^taken, without cancellation if alone is small
        infinite = alone * sum(_powers(1 - alone, taken - 1), Decimal(0))
    loss, p, q = np.array(found or [(0.0, 0.0, 0.0)]).T
    return AllocatedLaw(loss, p, q, _up(infinite), _up(never))


def _context(base: FiniteMechanism) -> decimal.Context:
    """A decimal context with enough digits for losses as small as those of the base."""
    epsilon = float(getattr(base, "epsilon", 1.0))
    more = math.ceil(-math.log10(epsilon)) if 0.0 < epsilon < 1.0 else 0
    # a few digits are lost on the way, one for each tenfold of the slots
    return decimal.Context(prec=60 + more, Emin=decimal.MIN_EMIN, Emax=decimal.MAX_EMAX)


def _up(value: Decimal) -> float:
    """The nearest float64; underflow rounds up to the smallest float."""
    return max(float(value), SMALLEST_POSITIVE) if value > 0 else 0.0


def _counts(outputs: list[tuple[Decimal, Decimal]], slots: int, taken: int) -> Iterator[tuple[Decimal, Decimal]]:
    """(Q-mass, dP/dQ) for every way in which the outputs of the slots may be counted."""
    factorial = [Decimal(1)]
    for n in range(1, slots + 1):
        factorial.append(factorial[-1] * n)
    # of q^n/n! and x^j/j!: the multinomial coefficients are quotients of factorials
    powers = [[a / f for a, f in zip(_powers(q, slots), factorial, strict=True)] for _, q in outputs]
    ratios = [[a / f for a, f in zip(_powers(x, taken), factorial[: taken + 1], strict=True)] for x, _ in outputs]
    last, all_ways = len(outputs) - 1, factorial[slots] / (factorial[taken] * factorial[slots - taken])

    def terms(place: int, count: int) -> list[Decimal]:
        """Coefficients of (1 + x z)^count up to z^taken."""
        return [ratios[place][j] * factorial[count] / factorial[count - j] for j in range(min(count, taken) + 1)]

    def walk(place: int, left: int, weight: Decimal, before: list[Decimal]) -> Iterator[tuple[Decimal, Decimal]]:
        if place == last:
            here = terms(place, left)
            whole = sum((before[taken - j] * c for j, c in enumerate(here) if taken - j < len(before)), Decimal(0))
            yield weight * powers[place][left] * factorial[slots], whole / all_ways
            return
        for count in range(left + 1):
            here, size = terms(place, count), min(len(before) + count, taken + 1)
            product = [
                sum((before[i - j] * here[j] for j in range(len(here)) if 0 <= i - j < len(before)), Decimal(0))
                for i in range(size)
            ]
            yield from walk(place + 1, left - count, weight * powers[place][count], product)

    yield from walk(0, slots, Decimal(1), [Decimal(1)])


def _powers(value: Decimal, most: int) -> list[Decimal]:
    found = [Decimal(1)]
    for _ in range(most):
        found.append(found[-1] * value)
    return found


def _outputs(base: FiniteMechanism) -> list[tuple[Decimal, Decimal]]:
    """(p, q) of every output; outputs with equal ratio are merged, since telling them apart reveals nothing more."""
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
        odds = (-Decimal(float(base.epsilon))).exp()  # type: ignore[attr-defined]  # of PureDP and ApproximateDP
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
