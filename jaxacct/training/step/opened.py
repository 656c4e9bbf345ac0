"""A model of any kind as a pytree of plain leaves, and back: linen variables, nnx and Equinox modules, or any pytree.

No package of models is imported unless the model at hand is one of its own.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxacct.core.validation import InputError

__all__ = ["Outer", "arrays_of", "closed", "is_equinox", "is_nnx", "opened", "paths"]


@dataclass(frozen=True)
class Outer:
    """What an nnx module is besides the values of its variables.

    graph, structure : of `nnx.split`.  order : of the plain pytree's leaves, their places in the state.
    kinds : for each leaf of the plain pytree its type of variable.
    """

    graph: Any
    structure: Any
    order: tuple[int, ...]
    kinds: tuple[type, ...]

    def of_kind(self, kind: str) -> list[bool]:
        """For each leaf whether it is a variable of this type of nnx, or of one derived from it."""
        from flax import nnx

        return [issubclass(each, getattr(nnx, kind)) for each in self.kinds]


def is_nnx(model: Any) -> bool:
    """Whether this is a module of flax.nnx."""
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(model, nnx.Module)


def is_equinox(value: Any, name: str = "Module") -> bool:
    """Whether a value is of this class of Equinox, or of one derived from it."""
    bases = type(value).__mro__
    return any(base.__name__ == name and base.__module__.split(".")[0] == "equinox" for base in bases)


def opened(model: Any) -> tuple[Any, Outer | None]:
    """(pytree, what an nnx module is besides; None for other models).

    An nnx module becomes nested dicts by the names of its attributes.  InputError for an Equinox module with state.
    """
    if is_nnx(model):
        from flax import nnx

        graph, state = nnx.split(model)
        leaves, structure = jax.tree_util.tree_flatten(state)
        kinds = [type(variable) for variable in jax.tree_util.tree_leaves(state, is_leaf=_is_variable)]
        places = nnx.to_pure_dict(jax.tree_util.tree_unflatten(structure, range(len(leaves))))
        order, form = jax.tree_util.tree_flatten(places)
        outer = Outer(graph, structure, tuple(order), tuple(kinds[place] for place in order))
        return jax.tree_util.tree_unflatten(form, [leaves[place] for place in order]), outer
    stateful = lambda node: is_equinox(node, "StateIndex") or is_equinox(node, "State")
    if any(stateful(node) for node in jax.tree_util.tree_leaves(model, is_leaf=stateful)):
        raise InputError(
            "the model has an equinox.nn.State, which mixes examples (batch normalisation), must have none; "
            "use GroupNorm or LayerNorm"
        )
    return model, None


def closed(tree: Any, outer: Outer | None) -> Any:
    """The model that was `opened`."""
    if outer is None:
        return tree
    from flax import nnx

    # the structure of the dicts is known from the graph: their leaves are in the order that `opened` gave
    values: list[Any] = [None] * len(outer.order)
    for place, value in zip(outer.order, jax.tree_util.tree_leaves(tree), strict=True):
        values[place] = value
    return nnx.merge(outer.graph, jax.tree_util.tree_unflatten(outer.structure, values))


def arrays_of(tree: Any) -> list[Any]:
    """For each leaf its JAX array, or None where it is none.

    Numbers of Python are arrays, except in a tree that holds an Equinox module, where they are settings such as a
    dropout rate.
    """
    settings = any(is_equinox(node) for node in jax.tree_util.tree_leaves(tree, is_leaf=is_equinox))
    kinds = (jax.Array, np.ndarray) if settings else (jax.Array, np.ndarray, np.generic, bool, int, float)
    return [jnp.asarray(leaf) if isinstance(leaf, kinds) else None for leaf in jax.tree_util.tree_leaves(tree)]


def paths(tree: Any) -> list[str]:
    """The path of every leaf, such as "params/Dense_0/kernel"."""
    found = jax.tree_util.tree_flatten_with_path(tree)[0]
    return [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in found]


def _is_variable(node: Any) -> bool:
    from flax import nnx

    return isinstance(node, nnx.Variable)
