"""Canaries for a trainer's step: gradients that are planted, or one crafted example."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxacct.audit.canary_game import ABSENT_MARK, REAL_MARK, Game, flattened
from jaxacct.core.validation import COUNT, InputError, check
from jaxacct.training import Trainer, sensitivity

__all__ = ["gradient_canaries", "input_canary"]

PLANTED_LENGTH = 1e4
"""Length of a planted gradient in units of the largest clip norm: whatever is clipped comes out at norm C."""


def gradient_canaries(trainer: Trainer, data: Any, count: int = 1) -> Game:
    """Canaries whose gradients are planted: number j pulls with norm C at coordinate j of the parameters, flattened.

    In every step in which it takes part the clipped sum moves by C (up to the allowance for rounding that clipping
    takes off) in a direction of its own, whatever the parameters are: the strongest that an example can do.  The score
    of a canary is what the noisy sums hold at its coordinate, over all steps, in units of C.  Planting makes clipping
    take per-example gradients: to audit clipping by ghost norms, use `input_canary`.

    Parameters
    ----------
    trainer : Trainer
        Its plan's dataset_size is that of the data and ``count``; it has one clip norm for all parameters.
    data : pytree of arrays, or None
        Examples along the first axis; None for no other examples.
    count : int
        How many canaries.

    Returns
    -------
    Game

    Raises
    ------
    InputError
        Several clip norms, or more canaries than parameters.

    References
    ----------
    README.md of this folder, "Canaries".

    >>> import optax
    >>> from jaxacct.training import Plan
    >>> plan = Plan(target_delta=1e-5, dataset_size=1, sampling_probability=1.0, noise_multiplier=0.1, steps=2)
    >>> trainer = Trainer(lambda w, x: w @ x, optax.sgd(0.1), plan, clip_norm=3.0)
    >>> game = gradient_canaries(trainer, None)
    >>> float(game.play(jnp.zeros(4), True, runs=100).scores.mean().round(1))
    2.0
    """
    count = int(check("count", count, COUNT))
    if trainer.adaptive is not None or len(jax.tree_util.tree_leaves(trainer.clip_norm)) != 1:
        raise InputError("clip_norm must be one number for gradient canaries; use input_canary")
    norm = sensitivity(trainer.clip_norm)
    loss_fn = trainer.loss_fn

    def planted(params: Any, marked: Any) -> Any:
        example, mark = marked
        flat = flattened(params)
        if flat.size < count:
            raise InputError(f"count = {count} must be <= {flat.size}, the number of parameters; plant fewer")
        # the optimizer descends: a loss that falls along the coordinate would flip the sign of the noisy sum
        pull = jnp.where(mark > 0, PLANTED_LENGTH * norm * flat[jnp.maximum(mark - 1, 0)], 0.0)
        return pull if example is None else pull + jnp.where(mark == REAL_MARK, loss_fn(params, example), 0.0)

    observe = lambda params, noisy: flattened(noisy)[:count] / norm
    marks = np.arange(1, count + 1, dtype=np.int32)
    if data is not None:
        size = jax.tree_util.tree_leaves(data)[0].shape[0]
        first = jax.tree.map(lambda a: jnp.repeat(jnp.asarray(a)[:1], count, axis=0), data)
        data = jax.tree.map(lambda a, b: jnp.concatenate([jnp.asarray(a), b]), data, first)
        marks = np.concatenate([np.full(size, REAL_MARK, np.int32), marks])
    return Game(trainer, planted, data, marks, observe, count)


def input_canary(trainer: Trainer, data: Any, example: Any) -> Game:
    """One more example, crafted: an image from elsewhere, a wrong label.  All of the step is the trainer's own.

    The score is the inner product of the noisy sums with the canary's own gradient, clipped, in units of C^2 and summed
    over the steps: a rule that knows the parameters before every step.

    Parameters
    ----------
    trainer : Trainer
        Its plan's dataset_size is one more than the data.
    data : pytree of arrays
        Examples along the first axis.
    example : pytree
        Like one of the data.

    Returns
    -------
    Game

    Raises
    ------
    InputError
        The data do not fit the plan.

    References
    ----------
    Nasr et al. (2023).

    >>> import optax
    >>> from jaxacct.training import Plan
    >>> plan = Plan(target_delta=1e-5, dataset_size=3, sampling_probability=1.0, noise_multiplier=0.1, steps=1)
    >>> trainer = Trainer(lambda w, x: w @ x, optax.sgd(0.1), plan, clip_norm=1.0)
    >>> game = input_canary(trainer, jnp.zeros((2, 2)), jnp.array([0.0, 7.0]))
    >>> [abs(float(game.play(jnp.zeros(2), there, runs=100).scores.mean().round(1))) for there in (True, False)]
    [1.0, 0.0]
    """
    loss_fn = trainer.loss_fn
    crafted, norm = jax.tree.map(jnp.asarray, example), sensitivity(trainer.clip_norm)
    whole = jax.tree.map(lambda a, b: jnp.concatenate([jnp.asarray(a), b[None].astype(a.dtype)]), data, crafted)
    size = jax.tree_util.tree_leaves(whole)[0].shape[0]

    def marked_loss(params: Any, marked: Any) -> Any:
        one, mark = marked
        return jnp.where(mark == ABSENT_MARK, 0.0, loss_fn(params, one))

    def observe(params: Any, noisy: Any) -> Any:
        own = flattened(jax.grad(loss_fn)(params, crafted))
        return (flattened(noisy) @ own / (norm * jnp.maximum(jnp.linalg.norm(own), norm)))[None]

    return Game(trainer, marked_loss, whole, np.full(size, REAL_MARK, np.int32), observe, 1)
