"""The JAX operations that treat each example of a batch as if it were alone; all others are refused.

An operation is on the list if its batching rule and its compiled code compute each row from that row alone.  README.md
of this folder, "Examples apart", says how this was checked.  An operation that is not on the list, such as one of a
newer JAX or of another package, is refused.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.extend.core.primitives as public
from jax.extend.core import ClosedJaxpr, Jaxpr

from jaxacct.core.chacha import CHACHA20
from jaxacct.core.validation import InputError

__all__ = ["LANE_BY_LANE", "refuse_mixing"]

_GROUPS = {
    "elementwise": """
        abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e bitcast_convert_type cbrt ceil
        clamp clz complex conj convert_element_type copy copy_p cos cosh digamma div eq eq_to erf erf_inv erfc exp exp2
        expm1 floor ge gt igamma igamma_grad_a igammac imag integer_pow is_finite le le_to lgamma log log1p logistic lt
        lt_to max min mul mulhi name ne neg nextafter not or polygamma population_count pow real reciprocal
        reduce_precision rem round rsqrt select_n shift_left shift_right_arithmetic
        shift_right_logical sign sin sinh sqrt square stop_gradient sub tan tanh xor zeros_like zeta
    """,
    "shapes and indexing": """
        broadcast_in_dim concatenate dynamic_slice dynamic_update_slice empty empty2 gather iota pad reshape rev scatter
        scatter-add scatter-max scatter-min scatter-mul scatter-sub scatter_add scatter_max scatter_min scatter_mul
        scatter_sub slice split squeeze stack tile transpose unstack
    """,
    "reductions, scans and sorts along axes": """
        approx_top_k argmax argmin cumlogsumexp cummax cummin cumprod cumsum fft reduce reduce_and reduce_max reduce_min
        reduce_or reduce_prod reduce_sum reduce_window reduce_window_max reduce_window_min reduce_window_sum reduce_xor
        select_and_gather_add select_and_scatter_add sort top_k
    """,
    "products": "conv_general_dilated dot_general",
    "linear algebra": """
        cholesky custom_linear_solve eig eigh geqp3 geqrf hessenberg householder_product lu lu_pivots_to_permutation
        ormqr qr schur svd symmetric_product triangular_solve tridiagonal tridiagonal_solve
    """,
    "random numbers from keys of a known kind": """
        iota_2x32_shape random_bits random_clone random_fold_in random_gamma random_seed random_split random_unwrap
        random_wrap threefry2x32
    """,
    "nested programs": """
        call checkpoint closed_call cond core_call custom_jvp_call custom_vjp_call custom_vjp_call_jaxpr jit
        optimization_barrier pjit platform_index remat remat2 scan shard_map while
    """,
    "mutable arrays that are created in the program": "addupdate freeze get new_ref swap",
    "placement of arrays": """
        device_put layout_constraint pbroadcast pcast pvary reshard sharding_constraint with_memory_space_constraint
    """,
    "collectives along axes that begin in the program": """
        all_gather all_gather_invariant all_to_all axis_index pmax pmin ppermute psum psum_invariant reduce_scatter
    """,
    "output for debugging, without a result": "debug_callback debug_print",
}
LANE_BY_LANE = frozenset(name for names in _GROUPS.values() for name in names.split())

_OWN_RULE = "has its own batching rule, which sees all examples at once"
_ON_HOST = "runs code on the host, which can see all examples at once or remember them"
_KERNEL = "is a kernel whose runs for different examples can share memory"
_IN_JAX = "write it in JAX"
_KNOWN_TO_MIX = {
    "custom_vmap_call": ("jax.custom_batching.custom_vmap", _OWN_RULE, "call the function without custom_vmap"),
    "pure_callback": ("jax.pure_callback", _ON_HOST, _IN_JAX),
    "io_callback": ("jax.experimental.io_callback", _ON_HOST, _IN_JAX),
    "buffer_callback": ("jax.experimental.buffer_callback", _ON_HOST, _IN_JAX),
    "ffi_call": ("jax.ffi.ffi_call", _ON_HOST, _IN_JAX),
    "pallas_call": ("pallas_call", _KERNEL, "write it in JAX, or choose a JAX implementation (such as 'xla')"),
    "rng_bit_generator": (
        "jax.lax.rng_bit_generator",
        "draws for all examples with the first one's key",
        "use jax.random with threefry",
    ),
    "rng_uniform": ("jax.lax.rng_uniform", "draws for all examples from one state", "use jax.random with threefry"),
    "regularized_incomplete_beta": (
        "jax.lax.regularized_incomplete_beta",
        "iterates for all examples until the slowest has converged",
        "write its series in JAX",
    ),
}
"""For each operation: its public name, the reason and the remedy."""
_UNKNOWN = (
    "is not known to give each example of a batch what it would get alone",
    "use operations of jax.numpy, jax.lax and jax.nn",
)
_HARMLESS_AXES = ("pvary", "pcast")
"""Operations that name a device axis but move no data along it."""


def refuse_mixing(name: str, closed: ClosedJaxpr) -> None:
    """InputError where the trace of a user's function has an operation that can mix examples.

    Refused are operations outside `LANE_BY_LANE`, random keys that are neither threefry nor ChaCha20, collectives along
    an axis from outside the trace, and mutable arrays from outside.
    """
    _refuse_keys(f"{name} is given", closed.jaxpr.invars)
    for eqn, bound in _operations(closed.jaxpr, frozenset()):
        operation = eqn.primitive.name
        if operation not in LANE_BY_LANE or not _is_jaxs_own(eqn.primitive):
            call, why, remedy = _KNOWN_TO_MIX.get(operation, (operation, *_UNKNOWN))
            raise InputError(f"{name} calls {call}, which {why}, but must keep examples apart; {remedy}")
        _refuse_keys(f"{name} calls {operation} with", (*eqn.invars, *eqn.outvars))
        along = _axes_from_outside(eqn, bound)
        if along:
            raise InputError(
                f"{name} calls {operation} along axis {', '.join(map(repr, along))}, which mixes examples of several "
                "devices, but must keep examples apart; sum over devices after clipping"
            )
    if any(type(var.aval).__name__ == "AbstractRef" for var in closed.jaxpr.constvars):
        raise InputError(f"{name} uses a mutable array, which examples can share, but must be pure; pass its value")


def _refuse_keys(who: str, variables: Sequence[Any]) -> None:
    """InputError where a random key is of an unknown kind."""
    for dtype in (getattr(var.aval, "dtype", None) for var in variables):
        if jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key) and dtype not in _known_keys():
            raise InputError(
                f"{who} a random key of type {dtype}, whose numbers for one example can depend on the key of another, "
                "but must keep examples apart; use jax.random.key(seed, impl='threefry2x32'), or let rngs=True "
                "give one"
            )


@functools.cache
def _known_keys() -> tuple[Any, ...]:
    """The key types whose random numbers for an example depend on its own key alone."""
    return tuple(
        jax.eval_shape(lambda impl=impl: jax.random.key(0, impl=impl)).dtype for impl in ("threefry2x32", CHACHA20)
    )


def _is_jaxs_own(primitive: Any) -> bool:
    """False for an operation that has the name of a JAX operation but is another one."""
    return getattr(public, f"{primitive.name.replace('-', '_')}_p", primitive) is primitive


def _axes_from_outside(eqn: Any, bound: frozenset[Any]) -> tuple[str, ...]:
    """The device axes that an operation uses and that begin outside the trace."""
    if eqn.primitive.name in _HARMLESS_AXES:
        return ()
    named = [axis for key in ("axes", "axis_name") for axis in _as_tuple(eqn.params.get(key))]
    return tuple(axis for axis in named if isinstance(axis, str) and axis not in bound)


def _operations(jaxpr: Jaxpr, bound: frozenset[Any]) -> Iterator[tuple[Any, frozenset[Any]]]:
    """Each operation, with the device axes that begin in the trace around it."""
    for eqn in jaxpr.eqns:
        yield eqn, bound
        inside = bound | frozenset(getattr(eqn.params.get("mesh"), "axis_names", ()))
        for inner in inner_traces(tuple(eqn.params.values())):
            yield from _operations(inner.jaxpr if isinstance(inner, ClosedJaxpr) else inner, inside)


def inner_traces(values: tuple[Any, ...]) -> Iterator[Jaxpr | ClosedJaxpr]:
    """The traces among the parameters of an operation."""
    for value in values:
        if isinstance(value, tuple | list):
            yield from inner_traces(tuple(value))
        elif isinstance(value, ClosedJaxpr | Jaxpr):
            yield value


def _as_tuple(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, tuple | list) else (value,)
