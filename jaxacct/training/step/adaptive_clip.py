"""Adaptive clipping: the clip norm follows a quantile of the gradients' norms, found privately."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import jax.numpy as jnp

from jaxacct.core.validation import OPEN_PROBABILITY, POSITIVE, InputError, check
from jaxacct.training.step import noise
from jaxacct.training.step.clip_norm import CLIP_NORM, DEVIATION

__all__ = ["AdaptiveClip"]

_CLIP_RANGE = (1e-9, 1e9)
"""Where the clip norm stays, whatever the gradients do: within what a clip norm may be, with room to spare."""
_COUNT_NOISE_SHARE = 0.1
"""The noise on the count by default, as a share of the expected batch size [Andrew et al. 2021]."""
_ROUND_UP = 1.0 + 1e-15
"""Factor on the noise multiplier of the gradients that makes up for the rounding of its formula."""


@dataclass(frozen=True)
class AdaptiveClip:
    """A clip norm that tracks a quantile of the norms of the gradients [Andrew et al. 2021].

    Every step also releases a count: the sum of 1/2 for each unclipped and -1/2 for each clipped example, with Gaussian
    noise of standard deviation ``count_noise``, rounded to halves.  Then C <- C exp(-learning_rate (share - quantile)).
    The sum has sensitivity 1/2 (replacing an example: 1, twice that, as for the gradients), so gradients with noise
    multiplier z_gradient = (z^-2 - (2 count_noise)^-2)^(-1/2) and the count together cost what one Gaussian of noise
    multiplier z costs: the plan's.  That needs count_noise > z/2.

    Parameters
    ----------
    initial : the clip norm to start with.
    quantile : of the norms, in (0, 1).
    learning_rate : > 0.
    count_noise : standard deviation, in examples; by default a tenth of the expected batch size [Andrew et al.].

    Raises
    ------
    InputError : a number outside its range; in `gradient_noise`, a count_noise that leaves no room for the gradients.

    References
    ----------
    Andrew et al. 2021, "Differentially private learning with adaptive clipping".

    >>> rule = AdaptiveClip(initial=0.1, quantile=0.5, count_noise=10.0)
    >>> round(rule.gradient_noise(1.0, 100.0), 6)
    1.001252
    """

    initial: float
    quantile: float = 0.5
    learning_rate: float = 0.2
    count_noise: float | None = None

    def __post_init__(self) -> None:
        check("initial", self.initial, CLIP_NORM)
        check("quantile", self.quantile, OPEN_PROBABILITY)
        check("learning_rate", self.learning_rate, POSITIVE)
        if self.count_noise is not None:
            check("count_noise", self.count_noise, DEVIATION)

    def count_deviation(self, expected_batch_size: float) -> float:
        """The standard deviation of the noise on the count."""
        return _COUNT_NOISE_SHARE * expected_batch_size if self.count_noise is None else self.count_noise

    def gradient_noise(self, noise_multiplier: float, expected_batch_size: float) -> float:
        """The noise multiplier of the gradients that leaves room for the count, rounded up; InputError if none does."""
        deviation = self.count_deviation(expected_batch_size)
        share = (noise_multiplier / (2.0 * deviation)) ** 2
        if share >= 1.0:
            raise InputError(
                f"count_noise = {deviation:.6g} must be > {noise_multiplier / 2.0:.6g}, half the noise multiplier; "
                "use more noise on the count, or larger batches"
            )
        return noise_multiplier / math.sqrt(1.0 - share) * _ROUND_UP

    def draw(self, words: Any, expected_batch_size: float) -> Any:
        """The noise on twice the count, from the key of a step."""
        return noise.rounded(words, noise.QUANTILE, 2 * Fraction(self.count_deviation(expected_batch_size)))

    def update(self, clip_norm: Any, unclipped: Any, examples: Any, drawn: Any, expected: Any) -> Any:
        """The next clip norm, from counts of one drawn batch; can be called inside jit.

        unclipped, examples : int32 counts of unclipped and of all examples in the batch.  drawn : from `draw`.
        expected : batch size.
        """
        halves = 2 * unclipped - examples + drawn
        share = 0.5 * halves.astype(jnp.float32) / expected + 0.5
        moved = clip_norm * jnp.exp(-self.learning_rate * (share - self.quantile))
        return jnp.clip(moved, *_CLIP_RANGE)
