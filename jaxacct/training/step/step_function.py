"""One private step as a pure function: draw, clip and sum in micro-batches, add noise, divide, update."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jaxacct.chacha import CHACHA20
from jaxacct.training.step import noise, sampler
from jaxacct.training.step.adaptive_clip import AdaptiveClip
from jaxacct.training.step.clipping import Clipped, clipped_sum
from jaxacct.training.step.noise import wide
from jaxacct.training.step.step_mechanisms import ALLOCATION, FIXED, POISSON, TRUNCATED, slots_of
from jaxacct.training.step.users import mean_over_examples, of_users

__all__ = ["Carried", "Numbers", "StepSettings", "numbers", "private_step"]

_STD_ROUND_UP = 1.0 + 2.0**-20
"""Factor by which the float32 standard deviation is never below noise_multiplier times the float32 clip norm."""
_ROUNDING = 1e-12
"""Relative room for the rounding of rate times dataset_size, before an expected batch size is rounded down."""


class StepSettings(Protocol):
    """What a step needs of its plan; a `Segment` has it."""

    @property
    def noise_multiplier(self) -> float:
        """Noise on the sum of clipped gradients, in clip norms."""

    @property
    def sampling_probability(self) -> float:
        """The rate of Poisson sampling."""

    @property
    def expected_batch_size(self) -> float:
        """What the noisy sum is divided by."""


class Carried(NamedTuple):
    """What a step hands to the next one.  (Its name is in digests of states: a saved run depends on it.)"""

    params: Any
    opt_state: Any
    clip_norm: Any
    not_finite: Any


class Numbers(NamedTuple):
    """What may differ between steps of one compiled program: all from the plan's segment.

    threshold : of Poisson sampling.  size : of batches of a fixed size; of random allocation the slots of the round.
    position : the batch's place in its pass, or the slot.
    gradient_noise : noise multiplier on the gradients.  count_noise : of the adaptive clip norm's count.
    """

    threshold: Any
    size: Any
    position: Any
    expected_batch_size: Any
    gradient_noise: Any
    count_noise: Any


def numbers(segment: StepSettings, sampling: str, adaptive: AdaptiveClip | None, position: int) -> Numbers:
    """The numbers of a step; InputError where the count of adaptive clipping leaves no room for the gradients."""
    z, expected = segment.noise_multiplier, segment.expected_batch_size
    if sampling == ALLOCATION:
        size = slots_of(segment.sampling_probability)
    else:  # of fixed batches rounding up costs nothing; a sample may not exceed the share that is accounted for
        size = np.ceil(expected) if sampling == FIXED else np.floor(expected * (1.0 + _ROUNDING))
    return Numbers(
        sampler.threshold(segment.sampling_probability),
        np.int32(size),
        np.int32(position),
        np.float32(expected),
        np.float32(adaptive.gradient_noise(z, expected) if adaptive else z),
        np.float32(adaptive.count_deviation(expected) if adaptive else 0.0),
    )


def private_step(
    loss_fn: Callable[[Any, Any], Any],
    optimizer: Any,
    sampling: str,
    micro_batch: int,
    method: str,
    adaptive: AdaptiveClip | None,
    cap: int | None = None,
    examples_per_user: int | None = None,
) -> Callable[..., Carried]:
    """(carried, key words, pass key words, data, numbers) -> carried, pure: for jit, vmap, and audits.

    The key must be used for this step alone; its words are those of ``jax.random.key_data``.  The pass key, of fixed
    batches and of random allocation, is one for a whole pass over the data.

    cap : of truncated Poisson sampling, the places of a batch.
    examples_per_user : the most of a user's examples that a step uses; the data are then `UserData`.  None where every
        record counts for itself.
    """

    def draw(key: Any, pass_key: Any, size: int, now: Numbers) -> sampler.Selection:
        if sampling == POISSON:
            return sampler.poisson(key, size, now.threshold)
        if sampling == TRUNCATED:
            assert cap is not None
            return sampler.truncated_poisson(key, size, now.threshold, min(cap, size))
        if sampling == ALLOCATION:
            return sampler.random_allocation(pass_key, size, now.size, now.position)
        if sampling == FIXED:
            return sampler.fixed_batches(pass_key, size, now.size, now.position)
        return sampler.without_replacement(key, size, now.size)

    loss = loss_fn if examples_per_user is None else mean_over_examples(loss_fn)

    def step(carried: Carried, words: Any, pass_words: Any, data: Any, now: Numbers) -> Carried:
        import optax

        params, opt_state, clip_norm, not_finite = carried
        key, pass_key = (jax.random.wrap_key_data(w, impl=CHACHA20) for w in (words, pass_words))
        size = (data.count if examples_per_user else jax.tree_util.tree_leaves(data)[0]).shape[0]
        drawn = draw(noise.stream(key, noise.SAMPLING), noise.stream(pass_key, noise.SAMPLING), size, now)

        def add(carry: tuple[Clipped, Any], indices: Any, mask: Any) -> tuple[Clipped, Any]:
            so_far, members = carry
            if examples_per_user is None:
                batch = jax.tree.map(lambda a: a[indices], data)
            else:
                batch, has_any = of_users(noise.stream(key, noise.EXAMPLES), data, indices, examples_per_user)
                mask = mask & has_any
            summed = clipped_sum(loss, params, batch, mask, clip_norm, method)
            return jax.tree.map(jnp.add, so_far, summed), members + jnp.sum(mask, dtype=jnp.int32)

        dtype = wide(jnp.result_type(*jax.tree_util.tree_leaves(params)))
        nothing = Clipped(jax.tree.map(lambda p: jnp.zeros(p.shape, dtype), params), jnp.int32(0), jnp.int32(0))
        micro = min(micro_batch, drawn.indices.shape[0])
        begin = nothing, jnp.int32(0)  # users without examples are no members: they add nothing to any sum
        summed, members = sampler.over_micro_batches(drawn, micro, add, begin, all_places=sampling == TRUNCATED)

        norms = jax.tree_util.tree_leaves(clip_norm)
        std = now.gradient_noise * jnp.sqrt(sum(c**2 for c in norms)) * _STD_ROUND_UP
        noisy = noise.add(noise.stream(key, noise.NOISE), summed.total, std)
        mean = jax.tree.map(lambda g, p: (g / now.expected_batch_size).astype(p.dtype), noisy, params)
        updates, opt_state = optimizer.update(mean, opt_state, params)
        if adaptive is not None:
            clip_norm = adaptive.update(
                noise.stream(key, noise.QUANTILE),
                clip_norm,
                members - summed.clipped - summed.not_finite,
                members,
                now.count_noise,
                now.expected_batch_size,
            )
        return Carried(optax.apply_updates(params, updates), opt_state, clip_norm, not_finite + summed.not_finite)

    return step
