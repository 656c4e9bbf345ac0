"""An optimizer that keeps a moving average of the parameters in its state."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxacct.core.files import optional_package
from jaxacct.core.types import Foreign, Leaf
from jaxacct.core.validation import OPEN_PROBABILITY, check_one
from jaxacct.training.step.step_function import require_optimizer


class Averaged(NamedTuple):
    """State of an `averaged` optimizer.

    Parameters
    ----------
    inner : the state of the optimizer itself.
    average : the moving average of the parameters, in float32 or wider.  Like the parameters it may be published.
    count : number of steps taken.

    References
    ----------
    De et al. 2022, arXiv:2204.13650, section 3.3.

    >>> import jax.numpy as jnp, optax
    >>> averaged(optax.sgd(0.1)).init(jnp.ones(2)).average
    Array([1., 1.], dtype=float32)
    """

    inner: Leaf
    average: Leaf
    count: Leaf


def averaged(optimizer: Foreign, decay: float = 0.9999) -> Foreign:
    """Return the optimizer, with a moving average of the parameters in its state; its updates do not change.

    After step t the average is d a + (1 - d) p, with a the previous average, p the new parameters, and
    d = min(decay, (1 + t)/(10 + t)), which soon forgets the first parameters.  The average depends on released
    parameters alone, so it costs no privacy.  `state.opt_state.average` holds the average;
    `params_of(folder, average=True)` reads it from a checkpoint.

    Parameters
    ----------
    optimizer : an Optax transformation.
    decay : in (0, 1).

    Returns
    -------
    An Optax transformation with the state `Averaged`.

    Raises
    ------
    InputError : no Optax transformation, or a decay that is not in (0, 1).

    References
    ----------
    De et al. 2022, arXiv:2204.13650, section 3.3.

    >>> import jax.numpy as jnp, optax
    >>> from jaxacct.training import Plan, Trainer, averaged
    >>> plan = Plan(target_delta=1e-5, dataset_size=10, sampling_probability=1.0, noise_multiplier=5.0, steps=3)
    >>> trainer = Trainer(lambda w, x: jnp.sum((w - x) ** 2), averaged(optax.sgd(0.1)), plan, clip_norm=1.0)
    >>> state = trainer.fit(trainer.init(jnp.zeros(2)), jnp.ones((10, 2)), progress=False)
    >>> state.opt_state.average.shape, int(state.opt_state.count)
    ((2,), 3)
    """
    require_optimizer(optimizer)
    most = float(check_one("decay", decay, OPEN_PROBABILITY, "one number for all parameters"))
    optax = optional_package("optax", "a moving average of parameters")
    inner = optax.with_extra_args_support(optimizer)
    wide = lambda array: jnp.copy(array).astype(jnp.promote_types(array.dtype, jnp.float32))

    def init(params: Any) -> Averaged:
        return Averaged(inner.init(params), jax.tree.map(wide, params), jnp.int32(0))

    def update(gradient: Any, state: Averaged, params: Any, **more: Any) -> tuple[Any, Averaged]:
        updates, own = inner.update(gradient, state.inner, params, **more)
        count = state.count + 1
        kept = jnp.minimum(most, (1.0 + count) / (10.0 + count))
        mixed = lambda before, new: (kept * before + (1.0 - kept) * new).astype(before.dtype)
        average = jax.tree.map(mixed, state.average, optax.apply_updates(params, updates))
        return updates, Averaged(own, average, count)

    return optax.GradientTransformationExtraArgs(init, update)
