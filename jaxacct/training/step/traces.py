"""A function written out as operations (a jaxpr), to be run as it stands or with some operations changed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Literal

__all__ = ["BODIES", "bind", "evaluate", "trace", "written_out"]

BODIES = ("scan", "checkpoint", "remat", "remat2")
"""Operations with a body that is seen through where a parameter enters it: loops, and what is computed again."""
_CALLS = {"jit": "jaxpr", "pjit": "jaxpr", "closed_call": "call_jaxpr"}
"""Operations that are nothing but a call of this parameter."""


def trace(loss_fn: Callable[..., Any], params: Any, example: Any) -> ClosedJaxpr:
    """The loss of one example, as operations on the flattened parameters and example, calls of jit written out."""
    closed = jax.make_jaxpr(loss_fn)(*jax.tree.map(_shape_of, (params, example)))
    return written_out(closed)


def written_out(closed: ClosedJaxpr) -> ClosedJaxpr:
    """The same operations, calls of jit written out."""
    return jax.make_jaxpr(lambda *values: evaluate(closed, values))(*closed.in_avals)


def evaluate(
    closed: ClosedJaxpr, values: Sequence[Any], operation: Callable[..., list[Any]] | None = None
) -> list[Any]:
    """Run a trace, calls of jit written out; each operation is ``operation(place, equation, operands)``."""
    operation = operation or bind
    env = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
    env.update(zip(closed.jaxpr.invars, values, strict=True))
    read = lambda var: var.val if isinstance(var, Literal) else env[var]
    for place, eqn in enumerate(closed.jaxpr.eqns):
        operands = [read(var) for var in eqn.invars]
        if eqn.primitive.name in _CALLS:
            outputs = evaluate(eqn.params[_CALLS[eqn.primitive.name]], operands, operation)
        else:
            outputs = operation(place, eqn, operands)
        env.update(zip(eqn.outvars, outputs, strict=True))
    return [read(var) for var in closed.jaxpr.outvars]


def bind(place: int, eqn: Any, operands: list[Any]) -> list[Any]:
    """An operation of a trace as it stands there."""
    bound = eqn.primitive.get_bind_params(eqn.params)
    functions, params = bound if isinstance(bound, tuple) else ((), bound)  # JAX before and after 0.10
    with eqn.ctx.manager:
        outputs = eqn.primitive.bind(*functions, *operands, **params)
    return outputs if eqn.primitive.multiple_results else [outputs]


def _shape_of(value: Any) -> Any:
    """The shape and dtype of an array or a number."""
    return jax.ShapeDtypeStruct(jnp.shape(value), jnp.result_type(value))
