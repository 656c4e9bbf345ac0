"""Losses through which examples of a batch could reach one another are refused: their gradients are no one's own.

Every example is evaluated by the same trace, of one example, under vmap.  An operation then sees the other examples
only if its rule for batches is the user's own code, if it runs code on the host, or if it speaks with other devices.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr

from jaxacct.validation import InputError

__all__ = ["refuse_mixing"]

OWN_RULE = "is given all examples at once by its own rule"
HOST = "runs code on the host that can be given all examples at once or remember them"
MIXING = {
    "custom_vmap_call": ("jax.custom_batching.custom_vmap", OWN_RULE, "call the function without custom_vmap"),
    "pure_callback": ("jax.pure_callback", HOST, "write it in JAX"),
    "io_callback": ("jax.experimental.io_callback", HOST, "write it in JAX"),
    "ffi_call": ("jax.ffi.ffi_call", HOST, "write it in JAX"),
}
"""By primitive: the public name, what is wrong with it, and the remedy."""

HARMLESS_AXES = ("pvary", "pcast")
"""Operations that name an axis of devices and move nothing along it."""


def refuse_mixing(closed: ClosedJaxpr) -> None:
    """InputError if the trace, of one example's gradient, holds an operation that could see other examples.

    Refused by name: custom_vmap, callbacks that return something, foreign functions, collectives along an axis that
    is not made within the trace, and references to mutable arrays from outside.
    """
    for name, along in _operations(closed.jaxpr, frozenset()):
        if name in MIXING:
            call, why, remedy = MIXING[name]
            raise InputError(f"loss_fn calls {call}, which {why}, must keep examples apart; {remedy}")
        if along:
            axes = ", ".join(map(repr, along))
            raise InputError(
                f"loss_fn calls {name} along axis {axes}, which mixes examples of several devices, "
                "must keep examples apart; sum over devices after clipping"
            )
    for aval in (*closed.in_avals, *(var.aval for var in closed.jaxpr.constvars)):
        if type(aval).__name__ == "AbstractRef":
            raise InputError("loss_fn uses a mutable array, which examples can share, must be pure; pass its value")


def _operations(jaxpr: Jaxpr, bound: frozenset[Any]) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Each operation's name and the axes of devices that it uses and that do not begin within the trace."""
    for eqn in jaxpr.eqns:
        name, params = eqn.primitive.name, eqn.params
        named = [axis for key in ("axes", "axis_name") for axis in _as_tuple(params.get(key))]
        free = tuple(axis for axis in named if isinstance(axis, str) and axis not in bound)
        yield name, () if name in HARMLESS_AXES else free
        inside = bound | frozenset(getattr(params.get("mesh"), "axis_names", ()))
        for inner in _inner(tuple(params.values())):
            yield from _operations(inner, inside)


def _inner(values: tuple[Any, ...]) -> Iterator[Jaxpr]:
    for value in values:
        if isinstance(value, tuple | list):
            yield from _inner(tuple(value))
        elif isinstance(value, ClosedJaxpr):
            yield value.jaxpr
        elif isinstance(value, Jaxpr):
            yield value


def _as_tuple(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, tuple | list) else (value,)
