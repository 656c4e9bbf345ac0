"""What training steps release, as mechanisms: equal releases are counted, so that a run is a few repeated ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxacct.mechanisms import (
    Gaussian,
    Mechanism,
    PoissonSampled,
    SampledWithoutReplacement,
    compose,
    repeat,
)

__all__ = ["FIXED", "POISSON", "SAMPLING", "WITHOUT_REPLACEMENT", "Release", "composed", "prefixes", "single"]

POISSON, WITHOUT_REPLACEMENT, FIXED = SAMPLING = ("poisson", "without_replacement", "fixed_batches")
"""How a batch is drawn, which decides how it is accounted for."""


class Release(NamedTuple):
    """One noisy sum: how its batch was drawn, its noise multiplier, and the share of the data in it.

    Of fixed batches a release is a whole pass over the data, which holds every record once: its share is 1.
    """

    sampling: str
    noise_multiplier: float
    sampling_probability: float


def single(sampling: str, noise_multiplier: Any, sampling_probability: Any) -> Mechanism:
    """One release as a mechanism; the numbers may be arrays."""
    base = Gaussian(noise_multiplier)
    if sampling == WITHOUT_REPLACEMENT:
        return SampledWithoutReplacement(base, sampling_probability)
    if sampling == FIXED and np.ndim(sampling_probability) == 0:
        return base
    return PoissonSampled(base, sampling_probability)


def composed(counts: Mapping[Release, int]) -> Mechanism:
    """All releases together; of none at all, a mechanism that leaks nothing."""
    parts = [repeat(single(*release), count) for release, count in counts.items() if count]
    if not parts:
        return PoissonSampled(Gaussian(1.0), 0.0)
    return parts[0] if len(parts) == 1 else compose(*parts)


def prefixes(counts: Sequence[Mapping[Release, int]]) -> Mechanism:
    """Several collections of releases as one batch, one element each."""
    known = dict.fromkeys(release for each in counts for release in each)
    parts = []
    for release in known:
        number = np.array([each.get(release, 0) for each in counts], np.float64)
        rate = np.where(number > 0, release.sampling_probability, 0.0)  # what is sampled at rate 0 leaks nothing
        parts.append(repeat(single(release.sampling, release.noise_multiplier, rate), np.maximum(number, 1.0)))
    if not parts:
        return PoissonSampled(Gaussian(np.ones(len(counts))), 0.0)
    return parts[0] if len(parts) == 1 else compose(*parts)
