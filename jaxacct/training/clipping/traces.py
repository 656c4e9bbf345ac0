"""Runs traces (jaxprs).  Operations may be changed, or computed only once (README.md of this folder)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from jaxacct.core.validation import InputError

_CALLS = {"jit": "jaxpr", "pjit": "jaxpr", "closed_call": "call_jaxpr"}  # {operation: its parameter that holds a trace}
KEPT = (
    "a function of examples keeps a traced value, as a custom_vjp or custom_gradient does whose rule uses an example "
    "from outside; pass the value to the rule as an argument or a residual"
)


def trace(loss_fn: Callable[..., Any], params: Any, example: Any) -> ClosedJaxpr:
    shape_of = lambda value: jax.ShapeDtypeStruct(jnp.shape(value), jnp.result_type(value))
    return written_out(jax.make_jaxpr(loss_fn)(*jax.tree.map(shape_of, (params, example))))


def written_out(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Return the trace with calls of jit replaced by the called operations."""
    return jax.make_jaxpr(lambda *values: evaluate(closed, values))(*closed.in_avals)


def evaluate(
    closed: ClosedJaxpr, values: Sequence[Any], operation: Callable[..., list[Any]] | None = None
) -> list[Any]:
    """Run a trace.  Each operation, also inside calls of jit, runs as ``operation(index, equation, operands)``."""
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
    with eqn.ctx.manager:
        outputs = eqn.primitive.bind(*operands, **eqn.primitive.get_bind_params(eqn.params))
    return outputs if eqn.primitive.multiple_results else [outputs]


def computed_once(true: Any, function: Callable[[], Any]) -> Any:
    """Return the pytree ``function()``.  It is computed in a branch on ``true`` (see `unfolded_true`), so only once."""
    traced, shapes = jax.make_jaxpr(function, return_shape=True)()
    outputs = jax.lax.cond(
        true,
        lambda: jax.lax.optimization_barrier(evaluate(traced, ())),
        lambda: [jnp.zeros(aval.shape, aval.dtype) for aval in traced.out_avals],
    )
    return jax.tree_util.tree_unflatten(jax.tree_util.tree_structure(shapes), outputs)


def unfolded_true(values: Sequence[Any]) -> Any:
    """Return True, computed from the first number of each value, so that no compiler takes it for a constant."""
    numbers = [
        value for value in values if jnp.size(value) and not jax.dtypes.issubdtype(value.dtype, jax.dtypes.extended)
    ]
    first = [jnp.ravel(value)[0].astype(jnp.float32) for value in numbers]
    return _true(*(jax.lax.bitcast_convert_type(value, jnp.int32) for value in first))


@jax.custom_batching.custom_vmap
def _true(*bits: Any) -> Any:
    return functools.reduce(jnp.add, bits, jnp.int32(0)) & 1 < 2


@_true.def_vmap
def _true_for_all(axis_size: int, batched: Sequence[bool], *bits: Any) -> tuple[Any, bool]:
    """Return one True for the whole batch.  With a batch of Trues, vmap would run both sides of a branch."""
    return _true(*(value[0] if many else value for value, many in zip(bits, batched, strict=True))), False


def is_key(leaf: Any) -> bool:
    return jax.dtypes.issubdtype(getattr(leaf, "dtype", None), jax.dtypes.prng_key)


def words_of(leaf: Any) -> Any:
    """Return the array itself.  For random keys of JAX, return their uint32 words."""
    return jax.random.key_data(leaf) if is_key(leaf) else leaf


def contents(closed: ClosedJaxpr) -> tuple[list[Any], set[str]]:
    """Return (constants, names of operations) of a trace and of all traces inside it."""
    constants: list[Any] = []
    primitives: set[str] = set()

    def collect(trace: Any) -> None:
        constants.extend(getattr(trace, "consts", ()))
        for eqn in trace.eqns:
            primitives.add(eqn.primitive.name)
            constants.extend(var.val for var in eqn.invars if isinstance(var, Literal))
            for inner in inner_traces(eqn):
                collect(inner)

    collect(closed)
    return constants, primitives


def refuse_kept(traced: jax.stages.Traced) -> None:
    """Raise InputError if a traced program takes more inputs than it is given, which are values of an ended trace."""
    if len(traced.jaxpr.in_avals) > len(jax.tree_util.tree_leaves(traced.args_info)):
        raise InputError(KEPT)


def inner_traces(eqn: Any) -> list[Jaxpr | ClosedJaxpr]:
    is_trace = lambda value: isinstance(value, ClosedJaxpr | Jaxpr)
    return [*filter(is_trace, jax.tree_util.tree_leaves(list(eqn.params.values()), is_leaf=is_trace))]
