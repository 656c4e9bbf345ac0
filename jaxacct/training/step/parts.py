"""Parameters that are trained, and the rest of a model: what is frozen, and what is no array.

The step works on the trained part alone: it is clipped, gets noise, and is what the optimizer knows.  The rest goes
through the step as an argument of its own.  The loss gets the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxacct.validation import InputError

__all__ = ["Rest", "apart", "paths", "whole"]

_HERE = object()
"""In place of a leaf that is an array, and so not part of the form."""


@jax.tree_util.register_pytree_node_class
@dataclass(frozen=True)
class Rest:
    """What of a model is not trained: arrays, and a form that is no array and is known when the step is traced.

    Parameters
    ----------
    frozen : arrays, in the order of the model's leaves.
    form : the structure of the model; for each of its leaves whether it is trained; and its leaves that are no arrays.
    """

    frozen: tuple[Any, ...]
    form: tuple[Hashable, ...]

    def tree_flatten(self) -> tuple[tuple[Any, ...], tuple[Hashable, ...]]:
        """Its arrays, and all else."""
        return self.frozen, self.form

    @classmethod
    def tree_unflatten(cls, form: tuple[Hashable, ...], frozen: Sequence[Any]) -> Rest:
        """From its arrays, and all else."""
        return cls(tuple(frozen), form)


def paths(tree: Any) -> list[str]:
    """The path of every leaf, such as "params/Dense_0/kernel"."""
    found = jax.tree_util.tree_flatten_with_path(tree)[0]
    return [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in found]


def apart(model: Any, trainable: Any = None) -> tuple[Any, Rest | None]:
    """(the trained part, the rest) of a model; the rest is None where everything is trained.

    The trained part has the model's structure, with None in place of every other leaf.

    Parameters
    ----------
    model : pytree.
    trainable : None for all numbers; a pytree of bools, a prefix of the model; or a function path -> bool.

    Raises
    ------
    InputError : nothing is trained, or a mask that is no prefix of the model.

    >>> trained, rest = apart({"base": jnp.ones(2), "head": jnp.zeros(1)}, lambda path: path.startswith("head"))
    >>> trained
    {'base': None, 'head': Array([0.], dtype=float32)}
    >>> whole(trained, rest)["base"].tolist()
    [1.0, 1.0]
    """
    leaves, structure = jax.tree_util.tree_flatten(model)
    arrays = [_array(leaf) for leaf in leaves]
    chosen = [
        array is not None and mark for array, mark in zip(arrays, _marks(model, trainable, len(leaves)), strict=True)
    ]
    if not any(chosen):
        raise InputError("trainable selects none of the parameters, must select at least one; see paths in the model")
    if all(chosen):
        return jax.tree_util.tree_unflatten(structure, arrays), None
    trained = [array if mark else None for array, mark in zip(arrays, chosen, strict=True)]
    frozen = tuple(a for a, mark in zip(arrays, chosen, strict=True) if a is not None and not mark)
    others = tuple(_HERE if a is not None else leaf for a, leaf in zip(arrays, leaves, strict=True))
    return jax.tree_util.tree_unflatten(structure, trained), Rest(frozen, (structure, tuple(chosen), others))


def whole(trained: Any, rest: Rest | None) -> Any:
    """The model that was taken `apart`, with these values of its trained part."""
    if rest is None:
        return trained
    structure, chosen, others = rest.form
    trained_leaves, frozen = iter(jax.tree_util.tree_leaves(trained)), iter(rest.frozen)
    leaves = [
        next(trained_leaves) if mark else next(frozen) if other is _HERE else other
        for mark, other in zip(chosen, others, strict=True)  # type: ignore[call-overload]
    ]
    return jax.tree_util.tree_unflatten(structure, leaves)


def _array(leaf: Any) -> Any:
    """A number or an array as a JAX array; None for anything else."""
    if isinstance(leaf, jax.Array | np.ndarray | np.generic | bool | int | float):
        return jnp.asarray(leaf)
    return None


def _marks(model: Any, trainable: Any, count: int) -> list[bool]:
    """For each leaf whether it is to be trained."""
    if trainable is None:
        return [True] * count
    if isinstance(trainable, Callable):  # type: ignore[arg-type]
        return [bool(trainable(path)) for path in paths(model)]
    try:
        spread = jax.tree.map(lambda mark, part: [bool(mark)] * len(jax.tree_util.tree_leaves(part)), trainable, model)
    except ValueError:
        raise InputError(
            "trainable is no prefix of the parameters, must be one; give bools in the parameters' structure"
        ) from None
    return [bool(mark) for mark in jax.tree_util.tree_leaves(spread)]
