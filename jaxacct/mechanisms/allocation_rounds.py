"""The pairs of one round of random allocation, kept for the rounds that were asked for last.

A round whose pairs cannot be made does not end the batch that it is in.  It gets the pair of the Gaussian that tells
the slot from above, and from below one that claims nothing, so that its status is "width".
"""

from __future__ import annotations

import contextlib
import functools
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Literal, TypeVar

import numpy as np

from jaxacct.core.floats import ROUNDOFF
from jaxacct.kernels.allocation.profile import LARGEST_LOSS, RoundProfile, round_profiles
from jaxacct.mechanisms.base import DIRECTIONS
from jaxacct.mechanisms.bracketing_pairs import BracketedProfile, direction_of, pair_above, pair_below
from jaxacct.mechanisms.gaussian import profile_of_gaussian
from jaxacct.mechanisms.parts import FinitePair, FinitePart

__all__ = ["Losses", "above", "below", "prepare", "with_losses"]

KEPT = 1024
"""Rounds whose profiles and pairs are kept; each takes some 40 kB."""
FAILURES = (ArithmeticError, ValueError, IndexError, RuntimeError, MemoryError)
"""What may be raised by a round that cannot be answered."""
TOLD_LOSSES = 300
"""Losses of the Gaussian that stands in for such a round."""
FAR_LOSSES, FAR_DEVIATIONS = 40, 37.0
"""Losses beyond the last of a round's own, and where they end: there the Gaussian's delta is some 1e-300."""
Found = TypeVar("Found")
LONE_WIDTH = 1e-6
"""Relative width from which a point between two better ones is left out."""
Profiles = tuple[BracketedProfile, BracketedProfile]
"""Of one round, in both directions."""
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
    """Profiles in both directions.  A round whose slot is told is a Gaussian, which is never better."""
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
    """Compute the profiles of rounds, together, and their pairs, so that they are there when they are asked for.

    rounds : (noise multiplier, slots) of each.
    """
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
    return _or_else(_pair_above, lambda: _pair_of_told(sigma, group), sigma, slots, group)


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
    make: Callable[..., Found], otherwise: Callable[[], Found], sigma: float, slots: float, *more: float
) -> Found:
    """What `make` finds, or else something that claims less; that is not kept, so that it is tried again."""
    try:
        return make(sigma, slots, _LOSSES.get(), *more)
    except FAILURES as error:
        warnings.warn(
            f"a round of {slots:g} slots at noise multiplier {sigma:g} failed ({error}); the Gaussian that tells the "
            "slot answers",
            stacklevel=3,
        )
        return otherwise()


def _pair_of_told(sigma: float, group: float) -> FinitePair:
    """The pair of the Gaussian that tells the slot, or one that says nothing."""
    try:
        mu = 1.0 / sigma * (1.0 + 4.0 * ROUNDOFF)
        eps = np.linspace(0.0, min(mu * (0.5 * mu + 12.0), LARGEST_LOSS), TOLD_LOSSES)
        told = profile_of_gaussian(mu, eps)
        told = np.where(told <= 1.0, told, 1.0)
        profile = _of_group(BracketedProfile(eps, np.zeros_like(told), told), group)
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
    """The profile with losses beyond its last one, by the Gaussian whose slot is told, so that less is at infinity."""
    last, end = profile.epsilon[-1], min(mu * (0.5 * mu + FAR_DEVIATIONS), LARGEST_LOSS)
    if not (last < end and profile.upper[-1] > 0.0):
        return profile
    far = np.linspace(last, end, FAR_LOSSES + 1)[1:]
    told = np.minimum(profile_of_gaussian(mu, far), profile.upper[-1])
    if not np.all(told <= 1.0):
        return profile
    return BracketedProfile(
        np.append(profile.epsilon, far), np.append(profile.lower, 0.0 * far), np.append(profile.upper, told)
    )


def _without_lone(profile: RoundProfile) -> BracketedProfile:
    wide = ~(profile.upper - profile.lower <= LONE_WIDTH * profile.upper)
    beside = np.concatenate([[True], wide[:-1]]) | np.concatenate([wide[1:], [True]])
    keep = ~wide | beside
    return BracketedProfile(*(x[keep] for x in profile))
