"""A function of one example, for every example of a batch; refused if examples could reach one another through it.

The function is traced with one example, and the trace runs under vmap.  An operation can then see other examples only
through its batching rule or its compiled code; `lane_by_lane.py` lists the operations that cannot.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxacct.training.step.channels_last import channels_last
from jaxacct.training.step.lane_by_lane import refuse_mixing
from jaxacct.training.step.still_rows import require_still_rows
from jaxacct.training.step.traces import evaluate

__all__ = ["for_each", "one_of"]


def one_of(batch: Any) -> Any:
    """Shapes and dtypes of one example."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(np.shape(leaf)[1:], jnp.result_type(leaf)), batch)


def for_each(name: str, function: Callable[[Any], Any], batch: Any) -> Any:
    """``jax.vmap(function)(batch)``, each example by itself: InputError if the function could see other examples.

    name : of the user's function.  Operations that are not known to keep examples apart are refused, and so are
    programs in which a row of a small batch changes with another one.

    >>> for_each("loss_fn", jnp.sum, jnp.ones((2, 3))).tolist()
    [3.0, 3.0]
    >>> for_each("loss_fn", jax.custom_batching.sequential_vmap(jnp.sin), jnp.ones((2, 3)))  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    jaxacct.InputError: loss_fn calls jax.custom_batching.custom_vmap, which ...
    """
    leaves, form = jax.tree_util.tree_flatten(batch)
    flat = lambda *example: function(jax.tree_util.tree_unflatten(form, example))
    traced, shapes = jax.make_jaxpr(flat, return_shape=True)(*one_of(leaves))
    refuse_mixing(name, traced)
    require_still_rows(name, traced)
    outputs = channels_last(jax.vmap(lambda *example: evaluate(traced, example)))(*leaves)
    return jax.tree_util.tree_unflatten(jax.tree_util.tree_structure(shapes), outputs)
