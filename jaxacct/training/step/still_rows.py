"""A check of a program by its bits: rows of a batch stay as they are when another row changes."""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr

from jaxacct.chacha import CHACHA20
from jaxacct.training.step.traces import evaluate
from jaxacct.validation import InputError

__all__ = ["require_still_rows"]

_ROWS = 3
_MOST_BYTES = 2**28
"""Arrays of a program that is looked at: rows, and what is made in the place of values that are not known yet."""
_REMEMBERED = 256
"""Programs that are not looked at again."""
_looked_at: dict[bytes, None] = {}


def require_still_rows(name: str, traced: ClosedJaxpr) -> None:
    """InputError if rows of the trace of one example, run for a batch, move when another row changes.

    A batch of three rows is run once as it is and twice with an outer row replaced; the others must keep their bits.
    Rows, and numbers that are not known while a program is traced, are drawn.  Each program is looked at once in a
    process; one whose arrays take more than 256 MiB is not.
    """
    unknown = [const for const in traced.consts if not _is_known(const)]
    examples = [jax.ShapeDtypeStruct((_ROWS, *aval.shape), aval.dtype) for aval in traced.in_avals]
    if sum(math.prod(a.shape) * a.dtype.itemsize for a in (*unknown, *examples)) > _MOST_BYTES:
        return
    form = " ".join(str(getattr(const, "aval", np.shape(const))) for const in traced.consts)
    digest = hashlib.sha256(f"{traced.jaxpr} {form}".encode()).digest()
    if digest in _looked_at:
        return
    x64 = jax.dtypes.canonicalize_dtype(np.float64) == np.float64
    with ThreadPoolExecutor(1) as alone:  # no trace is going on in a thread of its own
        if not alone.submit(_rows_stay, traced, examples, x64).result():
            raise InputError(
                f"{name} moves the result of one example when another changes, must keep examples apart; call no "
                "operation with a rule of its own for batches"
            )
    while len(_looked_at) >= _REMEMBERED:
        del _looked_at[next(iter(_looked_at))]
    _looked_at[digest] = None


def _rows_stay(traced: ClosedJaxpr, examples: Sequence[Any], x64: bool) -> bool:
    """Whether each row keeps its bits when an outer row is replaced, wherever a program repeats its own bits."""
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
                again = _bits(run(consts, *rows))  # some devices add in an order of their own each time
                repeats = [np.delete(a == b, place, axis=0) for a, b in zip(before, again, strict=True)]
                if any(np.any(a & b) for a, b in zip(moved, repeats, strict=True)):
                    return False
    return True


def _quickly_compiled(lowered: Any) -> Any:
    """The program, compiled without what takes XLA's CPU compiler most of its time, where it knows these options."""
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
    """Whether the numbers of a constant are at hand, in this process."""
    return not isinstance(const, jax.core.Tracer) and getattr(const, "is_fully_addressable", True)


def _drawn(rng: np.random.Generator, aval: Any, weights: bool) -> Any:
    """An array of a shape and type: ordinary numbers, none of them negative but for matrices of weights."""
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
