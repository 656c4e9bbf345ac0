"""Parameters that are trained, and the rest of a model: what is frozen, and what is no array.

The step works on the trained part alone: it is clipped, gets noise, and is what the optimizer knows.  The rest goes
through the step as an argument of its own.  The loss gets the whole.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxacct.core.chacha import CHACHA20
from jaxacct.core.validation import InputError
from jaxacct.training.step.lora import LoRA
from jaxacct.training.step.opened import Outer, arrays_of, closed, is_equinox, opened, paths

__all__ = ["Rest", "apart", "whole"]


class _Place:
    """In the form of a model, in place of a leaf that is an array and so not part of the form."""


@dataclass(frozen=True)
class _Stream:
    """In the form of an nnx module, in place of its key or count of a stream of random numbers."""

    shape: tuple[int, ...]
    dtype: Any

    def empty(self) -> Any:
        """A value that stands there until the key of an example is known."""
        if jax.dtypes.issubdtype(self.dtype, jax.dtypes.prng_key):
            return jax.random.wrap_key_data(jnp.zeros((*self.shape, 8), jnp.uint32), impl=CHACHA20)
        return jnp.zeros(self.shape, self.dtype)


@jax.tree_util.register_pytree_node_class
@dataclass(frozen=True)
class Rest:
    """What of a model is not trained: arrays, and a form that is no array and is known when the step is traced.

    Parameters
    ----------
    frozen : arrays, in the order of the model's leaves.
    form : the structure of the model; for each of its leaves whether it is trained; its leaves that are no arrays; and
        what an nnx module is besides.
    """

    frozen: tuple[Any, ...]
    form: tuple[Hashable, tuple[bool, ...], tuple[Hashable, ...], Outer | None]

    def tree_flatten(self) -> tuple[tuple[Any, ...], Any]:
        """Its arrays, and all else."""
        return self.frozen, self.form

    @classmethod
    def tree_unflatten(cls, form: Any, frozen: Sequence[Any]) -> Rest:
        """From its arrays, and all else."""
        return cls(tuple(frozen), form)


def apart(model: Any, trainable: Any = None) -> tuple[Any, Rest | None]:
    """(the trained part, the rest) of a model; the rest is None where everything is trained.

    The trained part has the model's structure, with None in place of every other leaf.  Of an nnx module it is nested
    dicts.

    Parameters
    ----------
    model : a pytree, or a module of nnx or Equinox.
    trainable : a function path -> bool; a pytree of bools, a prefix of the model; a type of nnx variables; or None:
        all arrays of numbers, of an nnx module nnx.Param, of a `LoRA` the adapters.  (Of a `LoRA` the others select
        from the base, beside the adapters.)

    Raises
    ------
    InputError : nothing is trained, or a mask that is no prefix of the model.

    >>> trained, rest = apart({"base": jnp.ones(2), "head": jnp.zeros(1)}, lambda path: path.startswith("head"))
    >>> trained
    {'base': None, 'head': Array([0.], dtype=float32)}
    >>> whole(trained, rest)["base"].tolist()
    [1.0, 1.0]
    """
    tree, outer = opened(model)
    leaves, structure = jax.tree_util.tree_flatten(tree)
    arrays = arrays_of(tree)
    if isinstance(tree, LoRA):
        own = len(leaves) - len(jax.tree_util.tree_leaves(tree.adapters))
        marks = [False] * own if trainable is None else _marks(tree.base, tree.outer, trainable, own)
        marks += [True] * (len(leaves) - own)
    else:
        marks = _marks(tree, outer, trainable, len(leaves))
    others: list[Any] = [leaf if array is None else _Place for array, leaf in zip(arrays, leaves, strict=True)]
    streams = outer or (tree.outer if isinstance(tree, LoRA) else None)
    for i, kind in enumerate(streams.of_kind("RngState") if streams is not None else []):
        if kind:
            others[i] = _Stream(leaves[i].shape, leaves[i].dtype)
    chosen = [mark and other is _Place for mark, other in zip(marks, others, strict=True)]
    if not any(chosen):
        raise InputError("trainable selects none of the parameters, must select at least one; it is given paths")
    if all(chosen) and outer is None:
        return jax.tree_util.tree_unflatten(structure, arrays), None
    trained = [array if mark else None for array, mark in zip(arrays, chosen, strict=True)]
    frozen = [a for a, mark, other in zip(arrays, chosen, others, strict=True) if other is _Place and not mark]
    form = (structure, tuple(chosen), tuple(others), outer)
    return jax.tree_util.tree_unflatten(structure, trained), Rest(tuple(frozen), form)


def whole(trained: Any, rest: Rest | None) -> Any:
    """The model that was taken `apart`, with these values of its trained part."""
    if rest is None:
        return trained
    structure, chosen, others, outer = rest.form
    values, frozen = iter(jax.tree_util.tree_leaves(trained)), iter(rest.frozen)
    leaves = []
    for mark, other in zip(chosen, others, strict=True):
        leaf = next(values if mark else frozen) if other is _Place else other
        leaves.append(leaf.empty() if isinstance(leaf, _Stream) else leaf)
    return closed(jax.tree_util.tree_unflatten(structure, leaves), outer)  # type: ignore[arg-type]  # the form of an opened model


def _marks(tree: Any, outer: Outer | None, trainable: Any, count: int) -> list[bool]:
    """For each leaf whether it is to be trained, if it is an array of numbers."""
    floating = [a is not None and jnp.issubdtype(a.dtype, jnp.floating) for a in arrays_of(tree)]
    if outer is not None:
        wanted = outer.of_kind("Param") if trainable is None else floating
        if isinstance(trainable, type):
            return [issubclass(kind, trainable) for kind in outer.kinds]
    else:
        modules = any(is_equinox(node) for node in jax.tree_util.tree_leaves(tree, is_leaf=is_equinox))
        wanted = floating if modules else [True] * count  # integers among plain parameters are a mistake
    if trainable is None:
        return wanted
    if isinstance(trainable, type):
        raise InputError(
            f"trainable is the type {trainable.__name__}, which goes with an nnx module only; "
            "give a function of paths, such as lambda path: 'head' in path"
        )
    if callable(trainable):
        marks = [bool(trainable(path)) for path in paths(tree)]
    else:
        for mark in jax.tree_util.tree_leaves(trainable):
            if np.ndim(mark) or np.asarray(mark).dtype != bool:  # a name would count as True
                raise InputError(
                    f"trainable has {mark!r:.40}, must have bools; give them, or a function of paths, such as "
                    "lambda path: 'head' in path"
                )
        try:
            spread = lambda mark, part: [bool(mark)] * len(jax.tree_util.tree_leaves(part))
            marks = jax.tree_util.tree_leaves(jax.tree.map(spread, trainable, tree))
        except ValueError:
            raise InputError(
                "trainable is no prefix of the parameters, must be one; give bools in the parameters' structure"
            ) from None
    return [mark and fits for mark, fits in zip(marks, wanted, strict=True)]
