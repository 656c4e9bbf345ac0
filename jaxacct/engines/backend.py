"""Which backend evaluates the kernels: NumPy, which compiles nothing, or programs that XLA has compiled.

A few thousand configurations are done on NumPy before XLA has compiled a program for them; many more, or any on an
accelerator, are done sooner by XLA.  The two agree to rounding, and not to the last bit.  So a job takes one path
throughout, fixed before it begins (`job`).

On NumPy a batch is cut into chunks that stay in the cache.  The size of a chunk changes no bit of an answer.
"""

from __future__ import annotations

import contextlib
import contextvars
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from jaxacct.engines import programs

__all__ = ["NUMPY_MOST", "evaluate", "job", "on_numpy"]

NUMPY_MOST = 40_000
"""Largest job that NumPy does on a CPU: from here on XLA has compiled and run before NumPy is done."""
CHUNK_ENTRIES = 2**15
"""Entries of the largest arrays of a chunk: a quarter of a megabyte each, so that a few of them fit into a cache."""

_numpy: contextvars.ContextVar[bool | None] = contextvars.ContextVar("numpy", default=None)


@contextlib.contextmanager
def job(size: int, backend: str = "auto") -> Iterator[None]:
    """Inside, every batch takes one path: that of the job around it, or the one asked for, or the cheaper one."""
    if backend == "auto":
        token = _numpy.set(on_numpy(size))
    else:
        token = _numpy.set(backend == "numpy")
    try:
        yield
    finally:
        _numpy.reset(token)


def on_numpy(size: int) -> bool:
    """Whether a batch of this size goes to NumPy."""
    told = _numpy.get()
    return jax.default_backend() == "cpu" and size <= NUMPY_MOST if told is None else told


def evaluate(
    kernel: Callable[..., Any], arguments: Any, size: int, chunk: int, entries: int, **static: int
) -> list[np.ndarray]:
    """The leaves of a kernel's answer for a batch of configurations.

    chunk : configurations per call of a compiled program.
    entries : those of the kernel's largest array for one configuration, about.
    """
    if not on_numpy(size):
        return programs.in_chunks(*programs.program(kernel, size, chunk, **static), arguments, size)
    leaves, tree = jax.tree.flatten(arguments)
    chunk = max(1, CHUNK_ENTRIES // entries)

    def one(start: int) -> list[Any]:
        piece = [np.asarray(leaf[start : start + chunk]) for leaf in leaves]
        with np.errstate(all="ignore"):  # what overflows or is not defined is dealt with where it matters
            return jax.tree.leaves(kernel(*jax.tree.unflatten(tree, piece), **static))

    starts, workers = range(0, size, chunk), os.cpu_count() or 1
    if len(starts) > 1 and workers > 1:
        with ThreadPoolExecutor(workers) as pool:
            pieces = list(pool.map(one, starts))
    else:
        pieces = [one(start) for start in starts]
    return [np.concatenate(columns) for columns in zip(*pieces, strict=True)]
