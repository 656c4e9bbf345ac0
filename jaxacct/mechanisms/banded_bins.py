"""Brackets epsilon and delta of balls in bins with a banded matrix mechanism, and makes its pairs of distributions."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from jaxacct.core.floats import ROUNDOFF
from jaxacct.core.progress import waiting
from jaxacct.core.types import Leaf
from jaxacct.core.validation import POSITIVE, InputError
from jaxacct.kernels.contour.allocation import falling, losses_for
from jaxacct.kernels.contour.banded_bins import Bins, Profile
from jaxacct.mechanisms.additive_noise import Gaussian, profile_of_gaussian
from jaxacct.mechanisms.base import Mechanism, Part, batch_shape, register
from jaxacct.mechanisms.finite import sample_pair
from jaxacct.mechanisms.profile import BracketedProfile, direction_of, pair_above, pair_below, stacked, stacked_parts
from jaxacct.mechanisms.random_allocation import RandomAllocation
from jaxacct.strategies.strategy import Strategy

SMALLEST = 1e-200
"""Smallest variance allowed for the normal variable of a bin; the largest one is 1/SMALLEST."""
KEPT = 64
"""Number of runs whose coefficients and contours are cached."""


def bands_of(strategy: Strategy, bins: int) -> tuple[np.ndarray, np.ndarray]:
    """Return |C[i, i]| and |C[i, i - 1]| (0 for i = 0) of every step i; refuse runs without a known bound."""
    if strategy.overlap > 2:
        raise InputError(
            f"{type(strategy).__name__} has {strategy.overlap} bands, and balls in bins need at most 2: no bound is "
            "known for more; use strategies.Banded(2, ...), or CyclicPoisson, which allows as many bands as groups"
        )
    rows = getattr(strategy, "entries", None)
    if rows is None or strategy.entry_error:
        raise InputError(
            f"{type(strategy).__name__} has no bound with balls in bins; use strategies.Banded(2, ...) or Toeplitz"
        )
    if not strategy.overlap <= bins <= strategy.steps:
        raise InputError(
            f"bins = {bins} must be between {strategy.overlap}, the number of bands, and steps = {strategy.steps}: "
            "no bound is known for other runs; use more steps, or a participation without sampling"
        )
    rows = np.abs(np.pad(rows, ((0, 2 - len(rows)), (0, 0))))
    return rows[0], np.append(0.0, rows[1, :-1])


def normals_of(strategy: Strategy, bins: int, noise: float) -> Bins:
    """Return the normal variables of a run, one for each bin (`Bins`)."""
    diagonal, beside = bands_of(strategy, bins)
    rows = -(-strategy.steps // bins)
    by_bin = lambda values: np.pad(values / noise, (0, rows * bins - values.size)).reshape(rows, bins).T
    one, two = by_bin(diagonal), by_bin(beside)
    total = lambda values: np.array([math.fsum(row) for row in values.tolist()])
    with np.errstate(over="ignore", under="ignore"):
        variance = total(one * one) + np.roll(total(two * two), -1)
    if not SMALLEST <= variance.min() <= variance.max() <= 1.0 / SMALLEST:
        raise InputError(
            f"noise_multiplier = {noise} is too far from the columns of {type(strategy).__name__}: squares of their "
            "quotients are lost to rounding; use a noise multiplier between 1e-90 and 1e90"
        )
    return Bins(variance, np.roll(total(one * two), -1))


@functools.lru_cache(maxsize=KEPT)
def contours_of(strategy: Strategy, bins: int, noise: float) -> Profile:
    """Return the profile of a run. It is cached, and keeps the contours that it has placed."""
    return Profile(normals_of(strategy, bins, noise))


def epsilon_of_bins(strategy: Strategy, bins: int, noise: float, signs: list[float], delta: float) -> np.ndarray:
    """Return (lower, estimate, upper) of eps at `delta`: the largest over the directions `signs` (1 remove, -1 add)."""
    profile, found = contours_of(strategy, bins, noise), np.zeros(3)
    mu = _largest(profile)
    eps = np.linspace(0.0, mu * (0.5 * mu + 40.0), 4001)
    most = float(eps[np.argmax(np.append(profile_of_gaussian(mu, eps[:-1]), 0.0) <= delta)])  # delta is 0 at the end
    for sign in signs:
        if not found[0] or profile.known(sign, found[:1])[2, 0] > delta:  # otherwise this direction needs a smaller eps
            found = np.maximum(found, profile.epsilon(sign, delta, most))
    return found


def delta_of_bins(
    strategy: Strategy, bins: int, noise: float, signs: list[float], epsilon: np.ndarray, width: float, least: float
) -> np.ndarray:
    """Return (lower, estimate, upper) of delta at K values of eps, (3, K): the largest over the directions `signs`.

    A relative `width` is narrow enough. A bracket of a delta below `least` may be wider.
    """
    profile = contours_of(strategy, bins, noise)
    at, back = np.unique(epsilon, return_inverse=True)
    found, largest = np.zeros((3, at.size)), profile_of_gaussian(_largest(profile), at)
    for sign in signs:
        one = profile.delta(sign, at, width, least=np.maximum(least, found[0]))
        found = np.maximum(found, np.minimum(one, largest))
    return found[:, back]


def _largest(profile: Profile) -> float:
    """Return the sensitivity, rounded up, of the Gaussian mechanism that also reveals the record's bin."""
    return float(profile.bins.sizes.max()) * (1.0 + 32.0 * ROUNDOFF)


@functools.lru_cache(maxsize=KEPT)
def _profiles(strategy: Strategy, bins: int, noise: float) -> tuple[BracketedProfile, ...]:
    """Bracket delta of a run at some hundred losses, in both directions."""
    profile = contours_of(strategy, bins, noise)
    mu, found = _largest(profile), []
    # with this number of slots, the likelihood ratio of random allocation has the standard deviation of the bins' ratio
    slots = max(np.expm1(min(mu * mu, 600.0)) / profile.bins.deviation**2, 1.0)
    with waiting(2, "directions of a round") as work:
        for sign, least in ((1.0, 3e-10), (-1.0, 1e-16)):
            eps = losses_for(mu, slots, sign)
            low, _, high = delta_of_bins(strategy, bins, noise, [sign], eps, 1e-5, least)
            found.append(BracketedProfile(*falling(eps, low, high)))
            work.done += 1
    return tuple(found)


@register
@dataclass(frozen=True, eq=False)
class SharedBins(Mechanism):
    """Balls in bins whose neighbouring bins share noise. Compositions use two pairs, above and below its profile."""

    strategy: Strategy = field(metadata={"static": True})
    noise_multiplier: Leaf
    bins: int = field(metadata={"static": True})
    constraints: ClassVar = {"noise_multiplier": POSITIVE}
    replaced_apart: ClassVar = True

    def expand(self, relation: str, direction: str) -> list[tuple[Part, np.ndarray]]:
        pairs = [pair_above(*each) for each in self._each(relation)]
        return [(sample_pair(stacked(pairs, batch_shape(self)), np.asarray(1.0), direction), np.asarray(1.0))]

    def expand_below(self, relation: str, direction: str) -> list[tuple[Part, np.ndarray]]:
        parts = [direction_of(pair_below(*each), direction) for each in self._each(relation)]
        return [(stacked_parts(parts, batch_shape(self)), np.asarray(1.0))]

    def _each(self, relation: str) -> list[tuple[BracketedProfile, ...]]:
        if relation == "replace_one":
            raise InputError(
                "relation = 'replace_one' gives no pair for balls in bins; ask ja.epsilon or ja.delta for a bound"
            )
        return [_profiles(self.strategy, self.bins, noise) for noise in np.ravel(self.noise_multiplier).tolist()]

    def has_bracket(self) -> bool:
        return True

    def kind_of_bracket(self, relation: str, composed: bool = False) -> str:
        return "certified" if relation != "replace_one" else "bound"


def in_bins(strategy: Strategy, noise: np.ndarray, bins: int, below: bool) -> Mechanism:
    """Return `SharedBins`, or a round of random allocation for a single bin, or for equal bins that share no noise."""
    diagonal, beside = bands_of(strategy, bins)
    equal = strategy.steps % bins == 0 and np.all(diagonal == diagonal[0])
    if not beside.any() and (equal or bins == 1):
        rounding = 1.0 + (8.0 if below else -8.0) * ROUNDOFF
        size = np.sqrt(math.fsum(diagonal[::bins] ** 2))
        return RandomAllocation(Gaussian(noise / size * rounding), float(bins))
    return SharedBins(strategy, noise, bins)
