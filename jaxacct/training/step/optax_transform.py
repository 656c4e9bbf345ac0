"""An Optax transformation that makes a clipped sum private."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxacct.core.chacha import secret
from jaxacct.core.files import optional_package
from jaxacct.core.validation import POSITIVE, check
from jaxacct.training.step import noise
from jaxacct.training.step.clip_norm import DEVIATION, sensitivity

__all__ = ["NoiseState", "noisy_mean"]

_STD_ROUND_UP = 1.0 + 2.0**-20


class NoiseState(NamedTuple):
    """The key of the noise and the number of steps taken."""

    key: Any
    count: Any


def noisy_mean(key: Any, noise_multiplier: float, clip_norm: Any, expected_batch_size: float) -> Any:
    """Optax transformation: (clipped sum + noise) / expected batch size, in place of the gradient.

    Its input must be the *sum over the whole drawn batch of gradients clipped to clip_norm*, as ``clipped_sum``
    returns it (over several micro-batches: their sums added first).  It cannot see whether that is so: given a mean
    gradient, as optimizers usually are, it protects nothing.

    Parameters
    ----------
    key : a JAX key of at least 256 bits, such as ``fresh_key()``; every call has a stream of its own, derived from it.
    noise_multiplier : from 1e-10 to 1e10; the noise has standard deviation noise_multiplier times
        ``sensitivity(clip_norm)``.
    clip_norm : as given to ``clipped_sum``.
    expected_batch_size : > 0, what the noisy sum is divided by; never the size of the batch that was drawn.

    Returns
    -------
    optax.GradientTransformation

    Raises
    ------
    InputError : a key of fewer bits, or a bad number.

    What one call costs depends on how the batch was drawn, and only the caller knows: Poisson sampled, it is
    PoissonSampled(Gaussian(noise_multiplier), q).

    References
    ----------
    Abadi et al. 2016 (DP-SGD).

    >>> import jax.numpy as jnp, optax
    >>> from jaxacct.training import clipped_sum, fresh_key, noisy_mean, poisson
    >>> from jaxacct.training.step import noise
    >>> x, params, root = jnp.ones((100, 3)), jnp.zeros(3), fresh_key()
    >>> loss = lambda params, example: jnp.sum((params - example) ** 2)
    >>> steps = optax.chain(noisy_mean(root, 1.0, clip_norm=1.0, expected_batch_size=20.0), optax.sgd(0.5))
    >>> state = steps.init(params)
    >>> for step in range(3):
    ...     drawn = poisson(noise.stream(root, noise.SAMPLING, step), 100, 0.2)
    ...     mask = jnp.arange(100) < drawn.count
    ...     total = clipped_sum(loss, params, x[drawn.indices], mask, clip_norm=1.0).total
    ...     updates, state = steps.update(total, state, params)
    ...     params = optax.apply_updates(params, updates)
    >>> params.shape
    (3,)
    """
    optax = optional_package("optax", "noisy_mean")
    secret(key)
    expected = check("expected_batch_size", expected_batch_size, POSITIVE)
    # sums may be float32, and a deviation must not be rounded down with them
    std = check("noise_multiplier", noise_multiplier, DEVIATION) * sensitivity(clip_norm) * _STD_ROUND_UP

    def init(params: Any) -> NoiseState:
        return NoiseState(key, jnp.zeros((), jnp.int32))

    def update(total: Any, state: NoiseState, params: Any = None) -> tuple[Any, NoiseState]:
        noisy = noise.add(noise.stream(state.key, noise.NOISE, state.count), total, std)
        return jax.tree.map(lambda g: g / expected, noisy), NoiseState(state.key, state.count + 1)

    return optax.GradientTransformation(init, update)
