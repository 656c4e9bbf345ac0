"""A function of one example, for every example of a batch; refused if examples could reach one another through it.

What is traced, with one example, is what is run, under vmap.  An operation then sees the other examples only if its
rule for batches is the user's own code, if it runs code on the host, or if it speaks with other devices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr

from jaxacct.training.step.channels_last import channels_last
from jaxacct.training.step.traces import evaluate
from jaxacct.validation import InputError

__all__ = ["for_each", "one_of"]

_OWN_RULE = "is given all examples at once by its own rule"
_ON_HOST = "runs code on the host that can be given all examples at once or remember them"
_MIXING = {
    "custom_vmap_call": ("jax.custom_batching.custom_vmap", _OWN_RULE, "call the function without custom_vmap"),
    "pure_callback": ("jax.pure_callback", _ON_HOST, "write it in JAX"),
    "io_callback": ("jax.experimental.io_callback", _ON_HOST, "write it in JAX"),
    "ffi_call": ("jax.ffi.ffi_call", _ON_HOST, "write it in JAX"),
}
"""By primitive: the public name, what is wrong with it, and the remedy."""

_HARMLESS_AXES = ("pvary", "pcast")
"""Operations that name an axis of devices and move nothing along it."""


def one_of(batch: Any) -> Any:
    """Shapes and dtypes of one example."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(np.shape(leaf)[1:], jnp.result_type(leaf)), batch)


def for_each(name: str, function: Callable[[Any], Any], batch: Any) -> Any:
    """``jax.vmap(function)(batch)``, each example by itself: InputError if the function could see other examples.

    name : of the function that the user gave.  Refused by name are custom_vmap, callbacks that return something,
    foreign functions, collectives along an axis that begins outside of the function, and mutable arrays from outside.

    >>> for_each("loss_fn", jnp.sum, jnp.ones((2, 3))).tolist()
    [3.0, 3.0]
    >>> for_each("loss_fn", jax.custom_batching.sequential_vmap(jnp.sin), jnp.ones((2, 3)))  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    jaxacct.validation.InputError: loss_fn calls jax.custom_batching.custom_vmap, which ...
    """
    leaves, form = jax.tree_util.tree_flatten(batch)
    flat = lambda *example: function(jax.tree_util.tree_unflatten(form, example))
    traced, shapes = jax.make_jaxpr(flat, return_shape=True)(*one_of(leaves))
    _refuse_mixing(name, traced)
    outputs = channels_last(jax.vmap(lambda *example: evaluate(traced, example)))(*leaves)
    return jax.tree_util.tree_unflatten(jax.tree_util.tree_structure(shapes), outputs)


def _refuse_mixing(name: str, closed: ClosedJaxpr) -> None:
    """InputError where a trace has an operation through which examples could reach one another."""
    for operation, along in _operations(closed.jaxpr, frozenset()):
        if operation in _MIXING:
            call, why, remedy = _MIXING[operation]
            raise InputError(f"{name} calls {call}, which {why}, must keep examples apart; {remedy}")
        if along:
            axes = ", ".join(map(repr, along))
            raise InputError(
                f"{name} calls {operation} along axis {axes}, which mixes examples of several devices, "
                "must keep examples apart; sum over devices after clipping"
            )
    if any(type(var.aval).__name__ == "AbstractRef" for var in closed.jaxpr.constvars):
        raise InputError(f"{name} uses a mutable array, which examples can share, must be pure; pass its value")


def _operations(jaxpr: Jaxpr, bound: frozenset[Any]) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Each operation's name and the axes of devices that it uses and that do not begin within the trace."""
    for eqn in jaxpr.eqns:
        name, params = eqn.primitive.name, eqn.params
        named = [axis for key in ("axes", "axis_name") for axis in _as_tuple(params.get(key))]
        free = tuple(axis for axis in named if isinstance(axis, str) and axis not in bound)
        yield name, () if name in _HARMLESS_AXES else free
        inside = bound | frozenset(getattr(params.get("mesh"), "axis_names", ()))
        for inner in _inner(tuple(params.values())):
            yield from _operations(inner, inside)


def _inner(values: tuple[Any, ...]) -> Iterator[Jaxpr]:
    """The traces among an operation's parameters."""
    for value in values:
        if isinstance(value, tuple | list):
            yield from _inner(tuple(value))
        elif isinstance(value, ClosedJaxpr):
            yield value.jaxpr
        elif isinstance(value, Jaxpr):
            yield value


def _as_tuple(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, tuple | list) else (value,)
