"""What a step releases besides the gradients: the mean loss, and a count that adapts the clip norm."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np

from jaxacct.core.types import ArrayLike
from jaxacct.core.validation import OPEN_PROBABILITY, POSITIVE, Constraint, InputError, check
from jaxacct.training.clipping.clipped_sum import CLIP_NORM, DEVIATION
from jaxacct.training.step import noise

_UNITS = 2**10  # losses are rounded to units of bound/_UNITS, so that their sum is exact
_MOST_MEMBERS = 2**20  # largest expected batch size.  The noisy sum of twice as many centred losses fits into int32.


@dataclass(frozen=True)
class PrivateLoss:
    """Request to release a noisy mean loss with every step, without adding to the step's privacy cost.

    Let v_i be the loss of member i, clipped to [0, bound].  A step also releases sum_i (v_i - bound/2) plus Gaussian
    noise of standard deviation ``noise * bound``; v_i and the noise are rounded to multiples of bound/1024.  Adding or
    removing an example moves this sum by at most bound/2, its sensitivity.  Replacing one moves the sum of losses by at
    most twice its sensitivity, and the sum of gradients likewise.  If z is the plan's noise multiplier, the gradients
    get noise multiplier (z^-2 - (2 noise)^-2)^(-1/2), which needs noise > z/2.  Gradients and loss together then cost
    as much as one Gaussian mechanism of noise multiplier z.

    The optimizer gets the mean loss (noisy sum)/(expected batch size) + bound/2, clipped to [0, bound], as ``value``.

    Parameters
    ----------
    bound : from 1e-10 to 1e10, chosen without the data.  A larger loss counts as the bound, and a negative loss as 0.
    noise : standard deviation of the noise on the sum of losses, as a multiple of the bound, > 0; by default a tenth of
        the expected batch size, so that the noise on the mean loss has standard deviation bound/10.

    References
    ----------
    Andrew et al. 2021, who release a count besides the gradients in the same way.

    >>> round(gradient_noise(1.0, 100.0, None, PrivateLoss(bound=5.0, noise=10.0)), 6)
    1.001252
    """

    bound: float
    noise: float | None = None

    def __post_init__(self) -> None:
        # a bound in this range keeps losses and their noise far from the ends of float32's range
        remedy = "scale the loss, so that an ordinary {name} such as 1.0 fits it"
        check("bound", self.bound, Constraint(remedy, 1e-10, 1e10))
        if self.noise is not None:
            check("noise", self.noise, DEVIATION)

    def deviation(self, expected_batch_size: float) -> float:
        """Return the standard deviation of the noise on the sum of losses, as a multiple of the bound."""
        return 0.1 * expected_batch_size if self.noise is None else self.noise

    def draw(self, words: ArrayLike, expected_batch_size: float) -> np.int32:
        """Draw the noise on the sum of losses, in units of bound/1024, from a step's key, given as uint32 `words`."""
        return noise.rounded(words, noise.LOSS, _UNITS * Fraction(self.deviation(expected_batch_size)))

    def clipped(self, loss: jax.Array) -> jax.Array:
        """Clip a member's loss to [0, bound]; NaN counts as the bound."""
        bound = jnp.float32(self.bound)
        return jnp.clip(jnp.nan_to_num(loss.astype(jnp.float32), nan=bound, posinf=bound, neginf=0), 0, bound)

    def units(self, loss: jax.Array) -> jax.Array:
        """Return a member's loss as a whole number of units, from 0 to 1024; 1024 units equal the bound."""
        return jnp.clip(jnp.round(self.clipped(loss) / jnp.float32(self.bound) * _UNITS), 0, _UNITS).astype(jnp.int32)

    def release(self, total: jax.Array, members: jax.Array, drawn: jax.Array, expected: jax.Array) -> jax.Array:
        """Return the noisy mean loss, given the sum of a batch's losses in units and the noise from `draw`."""
        bound, noisy = jnp.float32(self.bound), total - _UNITS // 2 * members + drawn
        return jnp.clip(noisy.astype(jnp.float32) * (bound / _UNITS) / expected + 0.5 * bound, 0, bound)


def gradient_noise(
    noise_multiplier: float, expected_batch_size: float, adaptive: AdaptiveClip | None, private_loss: PrivateLoss | None
) -> float:
    """Return the gradients' noise multiplier, rounded up.  A step then costs as much as Gaussian(noise_multiplier)."""
    check("noise_multiplier", noise_multiplier, DEVIATION)
    if private_loss is not None and not expected_batch_size <= _MOST_MEMBERS:
        raise InputError(
            f"expected_batch_size = {expected_batch_size:.6g} must be <= {_MOST_MEMBERS} with a PrivateLoss; "
            "use smaller batches, or leave the loss out"
        )
    deviations = {}
    if private_loss is not None:
        deviations["noise of PrivateLoss"] = private_loss.deviation(expected_batch_size)
    if adaptive is not None:
        deviations["count_noise of AdaptiveClip"] = adaptive.count_deviation(expected_batch_size)
    if not deviations:
        return noise_multiplier
    share = math.fsum((noise_multiplier / (2.0 * each)) ** 2 for each in deviations.values())
    if not share < 1.0:
        told = " and ".join(f"{name} = {each:.6g}" for name, each in deviations.items())
        raise InputError(
            f"{told} must be > {math.sqrt(len(deviations)) * noise_multiplier / 2.0:.6g}, which leaves room for the "
            "gradients; use more noise on them, or larger batches"
        )
    return noise_multiplier / math.sqrt(1.0 - share) * (1.0 + 2e-15)  # the factor 1 + 2e-15 covers rounding


@dataclass(frozen=True)
class AdaptiveClip:
    """Clip norm that tracks a quantile of the norms of the gradients [Andrew et al. 2021].

    Every step also releases a count of sensitivity 1/2: each unclipped example adds 1/2 and each clipped one -1/2.  Its
    Gaussian noise has standard deviation ``count_noise`` and is rounded to multiples of 1/2.  The clip norm C is
    multiplied by exp(-learning_rate (share - quantile)), where share is the noisy share of unclipped examples.  If z is
    the plan's noise multiplier, the gradients get noise multiplier (z^-2 - (2 count_noise)^-2)^(-1/2), which needs
    count_noise > z/2.  Gradients and count together then cost as much as one Gaussian mechanism of noise multiplier z.

    Parameters
    ----------
    initial : the first clip norm.
    quantile : the quantile of the norms that C tracks, in (0, 1).
    learning_rate : > 0.
    count_noise : standard deviation of the noise on the count, in examples; by default a tenth of the expected batch
        size [Andrew et al.].

    References
    ----------
    Andrew et al. 2021, "Differentially private learning with adaptive clipping".

    >>> rule = AdaptiveClip(initial=0.1, quantile=0.5, count_noise=10.0)
    >>> rule.count_deviation(100.0)
    10.0
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
        """Return the standard deviation of the noise on the count, in examples."""
        return 0.1 * expected_batch_size if self.count_noise is None else self.count_noise

    def draw(self, words: ArrayLike, expected_batch_size: float) -> np.int32:
        """Draw the noise on twice the count, as an integer, from a step's key, given as uint32 `words`."""
        return noise.rounded(words, noise.QUANTILE, 2 * Fraction(self.count_deviation(expected_batch_size)))

    def update(
        self, clip_norm: jax.Array, unclipped: jax.Array, examples: jax.Array, drawn: jax.Array, expected: jax.Array
    ) -> jax.Array:
        """Return the next clip norm, given two int32 counts (unclipped examples, all examples) and `draw`'s noise."""
        halves = 2 * unclipped - examples + drawn
        share = 0.5 * halves.astype(jnp.float32) / expected + 0.5
        moved = clip_norm * jnp.exp(-self.learning_rate * (share - self.quantile))
        return jnp.clip(moved, 1e-9, 1e9)  # keeps the clip norm well inside the allowed range `CLIP_NORM`
