"""A function of one example, for every example of a batch; refused if examples could reach one another through it.

The function is traced with one example, and the trace runs under vmap.  An operation can then see other examples only
through its batching rule or its compiled code; `lane_by_lane.py` lists the operations that cannot.

A compiled program is checked, too: each row of a batch keeps its bits when another row changes.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr

from jaxacct.core.chacha import CHACHA20
from jaxacct.core.validation import InputError
from jaxacct.training.step.channels_last import channels_last
from jaxacct.training.step.lane_by_lane import refuse_mixing
from jaxacct.training.step.traces import evaluate

__all__ = ["for_each", "one_of"]

_ROWS = 3
_MOST_BYTES = 2**28
"""Programs with more bytes in their rows and drawn constants are not checked."""
_REMEMBERED = 256
"""Number of programs that are remembered as checked."""
_looked_at: dict[bytes, None] = {}


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


def require_still_rows(name: str, traced: ClosedJaxpr) -> None:
    """InputError if a row of a small random batch changes when another row changes (README.md, "Examples apart")."""
    unknown = [const for const in traced.consts if not _is_known(const)]
    examples = [jax.ShapeDtypeStruct((_ROWS, *aval.shape), aval.dtype) for aval in traced.in_avals]
    if sum(math.prod(a.shape) * a.dtype.itemsize for a in (*unknown, *examples)) > _MOST_BYTES:
        return
    form = " ".join(str(getattr(const, "aval", np.shape(const))) for const in traced.consts)
    digest = hashlib.sha256(f"{traced.jaxpr} {form}".encode()).digest()
    if digest in _looked_at:
        return
    x64 = jax.dtypes.canonicalize_dtype(np.float64) == np.float64
    with ThreadPoolExecutor(1) as alone:  # a thread of its own has no trace under way
        if not alone.submit(_rows_stay, traced, examples, x64).result():
            raise InputError(
                f"{name} moves the result of one example when another changes, but must keep examples apart; call no "
                "operation that has its own batching rule"
            )
    while len(_looked_at) >= _REMEMBERED:
        del _looked_at[next(iter(_looked_at))]
    _looked_at[digest] = None


def _rows_stay(traced: ClosedJaxpr, examples: Sequence[Any], x64: bool) -> bool:
    """Whether each row keeps its bits when an outer row is replaced; entries that never repeat are left out."""
    with jax.enable_x64(x64):
        rng = np.random.default_rng(0)
        consts = [const if _is_known(const) else _drawn(rng, const.aval, True) for const in traced.consts]
        rows, others = ([_drawn(rng, each, False) for each in examples] for _ in range(2))
        one = lambda consts, *row: evaluate(ClosedJaxpr(traced.jaxpr, consts), row)
        batched = jax.vmap(one, (None, *(0 for _ in rows)))
        run = _quickly_compiled(jax.jit(batched).lower(consts, *rows))
        before = _bits(run(consts, *rows))
        for place in (0, _ROWS - 1):
            changed = [row.at[place].set(other[place]) for row, other in zip(rows, others, strict=True)]
            after = _bits(run(consts, *changed))
            moved = [np.delete(a != b, place, axis=0) for a, b in zip(before, after, strict=True)]
            if any(map(np.any, moved)):
                again = _bits(run(consts, *rows))  # some devices add in a different order each time
                repeats = [np.delete(a == b, place, axis=0) for a, b in zip(before, again, strict=True)]
                if any(np.any(a & b) for a, b in zip(moved, repeats, strict=True)):
                    return False
    return True


def _quickly_compiled(lowered: Any) -> Any:
    """The program, compiled with few optimizations on CPU where XLA knows these options."""
    if jax.default_backend() == "cpu":
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            return lowered.compile(
                compiler_options={"xla_backend_optimization_level": 0, "xla_cpu_use_fusion_emitters": False}
            )
    return lowered.compile()


def _bits(outputs: Sequence[Any]) -> list[np.ndarray]:
    """The bytes of each output, row by row."""
    numbers = [jax.random.key_data(a) if jnp.issubdtype(a.dtype, jax.dtypes.prng_key) else a for a in outputs]
    return [np.asarray(a).reshape(_ROWS, -1).view(np.uint8) for a in numbers]


def _is_known(const: Any) -> bool:
    """Whether the values of a constant are available in this process."""
    return not isinstance(const, jax.core.Tracer) and getattr(const, "is_fully_addressable", True)


def _drawn(rng: np.random.Generator, aval: Any, weights: bool) -> Any:
    """A random array of a shape and type: in [0.25, 1] or in {0, 1}; matrices of weights are normal."""
    shape, dtype = aval.shape, aval.dtype
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        impl = next(i for i in ("threefry2x32", CHACHA20) if jax.random.key(0, impl=i).dtype == dtype)
        words = jax.random.key_data(jax.random.key(0, impl=impl)).shape
        return jax.random.wrap_key_data(jnp.asarray(rng.integers(0, 2**32, (*shape, *words), np.uint32)), impl=impl)
    if weights and len(shape) > 1:
        found = rng.standard_normal(shape) / math.sqrt(math.prod(shape[:-1]))
    elif jnp.issubdtype(dtype, jnp.inexact):
        found = rng.uniform(0.25, 1.0, shape)
    else:
        found = rng.integers(0, 2, shape)
    return jnp.asarray(found.astype(dtype))
