"""Releases of training steps as mechanisms.  A run is described by counts of its distinct releases."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxacct.core.validation import InputError
from jaxacct.mechanisms import (
    Gaussian,
    Mechanism,
    PoissonSampled,
    RandomAllocation,
    SampledWithoutReplacement,
    ShuffledBatches,
    TruncatedPoissonSampled,
    compose,
    repeat,
)
from jaxacct.mechanisms.dp_sgd_run import nearest_slots

POISSON, TRUNCATED, ALLOCATION = "poisson", "truncated_poisson", "random_allocation"
WITHOUT_REPLACEMENT, FIXED, CYCLIC, ORDER = "without_replacement", "fixed_batches", "cyclic_poisson", "fixed_order"
SAMPLING = (POISSON, TRUNCATED, ALLOCATION, WITHOUT_REPLACEMENT, FIXED, CYCLIC, ORDER)  # the batch rules
BY_PASS = (ALLOCATION, FIXED, CYCLIC, ORDER)
"""Batch rules with one release per pass or round, which uses a record at most once.  ORDER: one release per run."""
WITH_PASS_KEYS = (ALLOCATION, FIXED)
"""Batch rules that draw the batch of each record anew for every pass.  The groups of CYCLIC are drawn once in a run."""
WITH_NOISE = (CYCLIC, ORDER)  # rules that allow correlated noise, since two steps of a record are far apart
UNSAMPLED = (FIXED, ORDER)  # rules that put each record into exactly one batch of every pass
OF_ONE_SIZE = (WITHOUT_REPLACEMENT, *UNSAMPLED)  # rules whose batches all have the same number of records
INSTEAD = {
    FIXED: "each pass as ja.Gaussian(noise_multiplier / 5**0.5)",
    ORDER: "each run in a fixed order as ja.Gaussian(noise_multiplier / 3)",
}
"""End of an error message: what to account for if an added record takes the place of one that moves to a second batch.
With clip norm C, the sum of the first batch then changes by up to 2 C, and that of the second by up to C.  The changes
are orthogonal under FIXED, but not under ORDER, where steps share noise."""
_SHARED = "the next ones share noise with them"
STAYS = {
    "noise": f"{_SHARED}; let it stay, or recalibrate the plan so far",
    "groups": f"{_SHARED}, and records would move; let it stay",
    "expected_batch_size": f"{_SHARED}, and records would move; let it stay",
    "data": "records would change their groups; give the same in the same order, or begin another run by trainer.init",
    "clip_norm": f"{_SHARED}; give the state as fit left it",
    "trained parameters": f"{_SHARED}; give the state as fit left it",
    "ledger": f"{_SHARED}; go on without a ledger, or give one from the first step on",
}
"""The facts that must not change in a run whose steps share noise.  Each is mapped to its reason and remedy."""


def require_kept(fact: str, kept: bool) -> None:
    """Raise InputError if `kept` is False: then `fact`, a key of `STAYS`, is not the same as in the steps so far."""
    if not kept:
        raise InputError(f"{fact} must be the same as in the steps so far: {STAYS[fact]}")


class Turn(NamedTuple):
    """A step of a run, with the numbers that `follows` compares."""

    step: int
    groups: int  # the number of groups of records; 0 if the batch rule has no groups
    noise_multiplier: float

    def follows(self, last: Turn | None) -> bool:
        """Return whether `last` is the step before this one, with as many groups and no larger noise multiplier."""
        before = (self.step - 1, self.groups)
        return last is not None and last[:2] == before and last.noise_multiplier <= self.noise_multiplier

    def alone(self) -> Release:
        """Return the extra release, at rate 1, of a step that begins a stretch.  `released` says when it counts."""
        return Release(CYCLIC, self.noise_multiplier, 1.0)


class Release(NamedTuple):
    """One release: the noisy sum of a step, or all noisy sums of a pass under a batch rule in `BY_PASS`."""

    # a release also covers the effect of its records on later steps that share its noise
    sampling: str
    noise_multiplier: float
    # the rate of a step (under CYCLIC: in its group), or 1 / slots (ALLOCATION); 1 if UNSAMPLED, or the pass is unknown
    sampling_probability: float
    cap: int = 0  # the largest batch under truncated Poisson sampling; 0 under other rules
    dataset_size: int = 0  # the number of records under truncated Poisson sampling; 0 under other rules


def single(
    sampling: str, noise_multiplier: Any, sampling_probability: Any, cap: Any = 0, dataset_size: Any = 0
) -> Mechanism:
    """Return the mechanism of one release.  The numbers may be arrays; the mechanism is then a batch."""
    base = Gaussian(noise_multiplier)
    if sampling == WITHOUT_REPLACEMENT:
        return SampledWithoutReplacement(base, sampling_probability)
    if sampling == TRUNCATED:
        # do as the sampler, which rounds the rate down to a multiple of 2^-64: with a cap the lower rate may leak more
        rate = np.floor(np.ldexp(np.asarray(sampling_probability, np.float64), 64)) * 2.0**-64
        return TruncatedPoissonSampled(base, rate, dataset_size=dataset_size, cap=cap)
    if sampling == ALLOCATION:
        return RandomAllocation(base, nearest_slots(sampling_probability))
    if sampling in UNSAMPLED and np.ndim(sampling_probability) == 0:
        return ShuffledBatches(base, 1)  # the upper bounds do not depend on the number of batches, so 1 serves for all
    # rules in UNSAMPLED come here only with an array of rates, in which 0 stands for "no release"
    if sampling in (POISSON, *UNSAMPLED, CYCLIC):
        return PoissonSampled(base, sampling_probability)
    raise InputError(f"sampling = {sampling!r:.40} has no accounting; use one of {', '.join(SAMPLING)}")


def release_of_pass(sampling: str, noise_multiplier: float, sampling_probability: float) -> Release:
    """Return the release of a pass, given the least noise multiplier of its steps and their sampling probability."""
    return Release(sampling, noise_multiplier, 1.0 if sampling in UNSAMPLED else sampling_probability)


def composed(counts: Mapping[Release, int], rates: Any = None) -> Mechanism:
    """Compose each release as often as `counts` says.  With `rates`, return a batch, one mechanism for each rate."""
    own = lambda release: release if rates is None else (*release[:2], rates)
    parts = [repeat(single(*own(release)), count) for release, count in counts.items() if count]
    if not parts:
        return PoissonSampled(Gaussian(1.0), 0.0)
    return parts[0] if len(parts) == 1 else compose(*parts)


def prefixes(counts: Sequence[Mapping[Release, int]]) -> Mechanism:
    """Compose each of several collections of releases; return a batch with one mechanism for each collection."""
    known = dict.fromkeys(release for each in counts for release in each)
    parts = []
    for release in known:
        number = np.array([each.get(release, 0) for each in counts], np.float64)
        rate: Any = release.sampling_probability
        if not number.all():
            rate = np.where(number > 0, rate, 0.0)  # a count of 0 becomes rate 0, at which a release leaks nothing
        mechanism = single(release.sampling, release.noise_multiplier, rate, *release[3:])
        parts.append(repeat(mechanism, np.maximum(number, 1.0)))
    if not parts:
        return PoissonSampled(Gaussian(np.ones(len(counts))), 0.0)
    return parts[0] if len(parts) == 1 else compose(*parts)
