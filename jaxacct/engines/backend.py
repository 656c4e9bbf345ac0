"""Choose which backend evaluates the kernels: NumPy, or programs that XLA has compiled (README.md, "Backends")."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import os
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextvars import copy_context
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np

from jaxacct.core.floats import FAILURES
from jaxacct.core.progress import Progress
from jaxacct.core.validation import InputError
from jaxacct.engines import devices, programs
from jaxacct.engines.programs import Run
from jaxacct.kernels import elementary_check

NUMPY_MOST = 40_000
"""Largest number of configurations in a job that NumPy computes. For larger jobs, XLA is faster."""


class _Path(NamedTuple):
    numpy: bool
    asked: bool  # whether the user asked for this backend


_path: contextvars.ContextVar[_Path | None] = contextvars.ContextVar("path", default=None)


@contextlib.contextmanager
def job(
    size: int,  # configurations of the whole job
    backend: str = "auto",
    *,
    apart: bool = False,  # whether to ignore the enclosing job's backend, unless the user chose it
) -> Iterator[None]:
    """Run every batch of the context on one backend: the user's choice, the enclosing job's, or else the faster one."""
    around = _path.get()
    if backend == "numpy" and not _holds():
        raise InputError("backend = 'numpy' cannot certify on this machine; use 'xla'")
    if backend == "xla":
        devices.local()  # raises if no device can certify
    if backend != "auto":
        path = _Path(backend == "numpy", True)
    else:
        path = around if around is not None and (around.asked or not apart) else _Path(_suits(size), False)
    token = _path.set(path)
    try:
        yield
    finally:
        _path.reset(token)


@contextlib.contextmanager
def fixed(numpy: bool) -> Iterator[None]:
    """Run every batch of the context on NumPy if `numpy`, else on XLA, as the caller has already chosen for the job."""
    token = _path.set(_Path(numpy, False))
    try:
        yield
    finally:
        _path.reset(token)


def suiting(size: int, *, selections: bool = False) -> str:
    """Return the name of the backend that "auto" means for a job of this size. `on_numpy` explains `selections`."""
    return "numpy" if on_numpy(size, selections=selections) else "xla"


def on_numpy(size: int, *, apart: bool = False, selections: bool = False) -> bool:
    """Return whether NumPy computes a batch. `apart` is as in `job`. `selections`: the batch has private selections."""
    path = _path.get()
    return _suits(size, selections) if path is None or (apart and not path.asked) else path.numpy


def _suits(size: int, selections: bool = False) -> bool:
    device = devices.certifying()
    if device is None:
        return _holds()
    # a private selection takes NumPy about as long as 16 configurations
    most = 2_400 if selections else NUMPY_MOST
    if size > most or device.platform != "cpu" or not _holds():
        return False
    # above 1,500 configurations XLA is faster if `jaxacct warm` has stored programs; it stores none for selections
    return selections or size <= 1_500 or not programs.are_kept()


@functools.cache
def _holds() -> bool:
    """Return whether NumPy's functions are as accurate on this machine as the bounds assume."""
    np.empty(2**21)  # allocated and freed once: then glibc reuses memory of this size, which saves a tenth of the time
    failure = elementary_check.failure()
    if failure is not None:
        warnings.warn(f"XLA answers instead of NumPy, since on this machine {failure}", RuntimeWarning, stacklevel=2)
    return failure is None


def evaluate(kernel: Callable[..., Any], arguments: Any, size: int, chunk: int, **static: int) -> list[np.ndarray]:
    """Return the leaves of the pytree that a kernel computes for a batch. XLA takes `chunk` configurations per call."""
    path = _path.get()
    if not (_suits(size) if path is None else path.numpy):
        return in_chunks(program(kernel, **static), chunk, arguments, size)
    # only the certificates of split.py rely on SciPy's erfc
    if kernel.__module__ == "jaxacct.kernels.contour.split" and elementary_check.failure(special=True) is not None:
        raise ArithmeticError(elementary_check.failure(special=True))
    leaves, tree = jax.tree.flatten(arguments)
    # A chunk of 2^14 quadrature points fits into a cache. For a finite part a kernel computes a term for each node and
    # atom. 16 such terms take as much memory as a point.
    atoms = max(leaf.size // size for leaf in leaves) if size else 1
    largest = max(static["points"], atoms * static["count"] // 16)
    some = max(1, 2**14 // largest)

    def one(start: int) -> list[Any]:
        piece = [np.asarray(leaf[start : start + some]) for leaf in leaves]
        with np.errstate(all="ignore"):  # no warning of NaN, since callers drop bounds that are NaN
            return jax.tree.leaves(kernel(*jax.tree.unflatten(tree, piece), **static))

    return _joined(one, range(0, size, some), os.cpu_count() or 1)


def _joined(piece: Callable[[int], list[Any]], starts: range, workers: int) -> list[np.ndarray]:
    """Call `piece` on every start, in threads. Return the leaves of all answers, joined in the order of the starts."""
    if len(starts) > 1 and workers > 1:
        with ThreadPoolExecutor(workers) as pool:
            pieces = list(pool.map(piece, starts))
    else:
        pieces = [piece(start) for start in starts]
    return [np.concatenate(columns) for columns in zip(*pieces, strict=True)]


def in_chunks(compiled: Run, chunk: int, arguments: Any, size: int) -> list[np.ndarray]:
    """Run a compiled program on chunks of a batch, on this process's devices in turn. The last chunk is padded."""
    each = devices.local()
    leaves, tree = jax.tree.flatten(arguments)

    def one(start: int) -> list[np.ndarray]:
        index = np.minimum(np.arange(start, start + chunk), size - 1)
        with devices.double_precision():
            piece = jax.tree.unflatten(tree, [leaf[index] for leaf in leaves])
            if len(each) > 1:
                piece = jax.device_put(piece, each[start // chunk % len(each)])
            # Copy the results: a view would keep JAX's array alive, which takes more memory than the copy.
            return [np.array(x) for x in compiled(*piece)]

    whole = _joined(one, range(0, size, chunk), max(os.cpu_count() or 1, 2 * len(each) - 1))
    return [column[:size] for column in whole]


@functools.cache
def program(kernel: Callable[..., Any], **static: int) -> Compiled:
    """Return a kernel as a `Compiled`, which takes a batch of configurations."""
    return Compiled(functools.partial(kernel, **static), None, f"{kernel.__module__}.{kernel.__qualname__} {static}")


class Compiled:
    """A function of pytrees, compiled by XLA for each shape and device. It returns leaves. Threads may share it."""

    def __init__(self, function: Callable[..., Any], options: dict[str, Any] | None, label: str) -> None:
        self._function, self._options, self._label = function, options, f"{label} {options}"
        self._ready: dict[Any, Run] = {}
        self._locks: dict[Any, threading.Lock] = {}

    def __call__(self, *arguments: Any) -> Sequence[Any]:
        leaves, tree = jax.tree.flatten(arguments)
        device = next((leaf.device for leaf in leaves if isinstance(leaf, jax.Array)), None)
        signature = (tree, *((leaf.shape, leaf.dtype) for leaf in leaves))
        key = (signature, device)
        with self._locks.setdefault(key, threading.Lock()):
            if key not in self._ready:
                with programs.preparing.running():
                    self._ready[key] = programs.prepare(
                        self._function, self._options, f"{self._label} {signature}", leaves, tree, device
                    )
        return self._ready[key](*leaves)


# Functions that call the lattice engine's kernels. Such a kernel takes one configuration, so no chunks are needed.


Runner = Callable[..., Any]
"""A function that calls its first argument, a kernel, with the other arguments. Keyword arguments are array sizes."""


def runner() -> Runner:
    """Return the function that calls the lattice engine's kernels, with NumPy or with XLA as `on_numpy` decides."""
    return _by_numpy if on_numpy(1, apart=True) else _by_xla


def _by_numpy(kernel: Callable[..., Any], *arguments: Any, **static: int) -> Any:
    with np.errstate(all="ignore"):  # `where` evaluates its unused branch too, which may overflow
        return kernel(*arguments, **static)


def _by_xla(kernel: Callable[..., Any], *arguments: Any, **static: int) -> Any:
    return _compiled(kernel, tuple(static))(*arguments, **static)


@functools.cache
def _compiled(kernel: Callable[..., Any], static: tuple[str, ...]) -> Callable[..., Any]:
    return jax.jit(kernel, static_argnames=static)


# Functions for engines that run only on NumPy. They solve blocks of configurations on several cores.

BLOCK = 256
"""Largest number of configurations that are evaluated together."""
LEAST = 64
"""Smallest number of configurations in a block when a batch is divided among threads."""
MOST_THREADS = 8
"""Largest number of threads. NumPy releases the interpreter's lock only in long loops, so more threads would wait."""

Item = TypeVar("Item")
Result = TypeVar("Result")
Solve = Callable[..., np.ndarray]
"""Maps columns (sigma, slots, delta or epsilon, ...) to an array (3, rows): lower bound, estimate and upper bound."""


def in_blocks(solve: Solve, columns: list[np.ndarray]) -> np.ndarray:
    """Return the array (3, rows) that `solve` (see `Solve`) finds when it is called on blocks of similar rows."""
    sigma, slots, given = columns[:3]
    found = np.empty((3, sigma.size))
    order = np.lexsort((given, sigma, slots))
    threads = int(np.clip(sigma.size // BLOCK, 1, min(devices.cores(), MOST_THREADS)))
    size = int(np.clip(-(-sigma.size // (2 * threads)), LEAST, BLOCK)) if threads > 1 else BLOCK
    blocks = [order[first : first + size] for first in range(0, sigma.size, size)]

    def solved(rows: np.ndarray) -> np.ndarray:
        with np.errstate(all="ignore"):  # set in every thread, since the setting holds in one thread only
            return _solved(solve, [column[rows] for column in columns])

    bar = Progress(sigma.size, None if sigma.size >= 300 else False)
    for at, ends in on_cores(solved, blocks, bar, [rows.size for rows in blocks], threads):
        found[:, blocks[at]] = ends
    return found


def on_cores(
    work: Callable[[Item], Result],
    items: Sequence[Item],
    bar: Progress,
    sizes: Sequence[int] | None = None,  # by how much `bar` advances after each item (default: 1)
    threads: int = MOST_THREADS,
) -> Iterator[tuple[int, Result]]:
    """Yield (index, `work(item)`) for each item, in any order. An interrupt cancels the items that have not begun."""
    done, most = 0, min(devices.cores(), threads, len(items))
    pool = ThreadPoolExecutor(most) if most > 1 else None
    try:
        if pool is None:
            found: Iterable[tuple[int, Result]] = ((at, work(item)) for at, item in enumerate(items))
        else:
            jobs = {pool.submit(copy_context().run, work, item): at for at, item in enumerate(items)}
            found = ((jobs[job], job.result()) for job in as_completed(jobs))
        for at, result in found:
            yield at, result
            done += 1 if sizes is None else sizes[at]
            bar.update(done)
    finally:
        if pool is not None:
            pool.shutdown(wait=True, cancel_futures=True)
        bar.close()


def _solved(solve: Solve, columns: list[np.ndarray]) -> np.ndarray:
    """Return what `solve` finds. If `solve` fails, call it on each row alone; a row that fails again gets [0, inf]."""
    try:
        return solve(*columns)
    except FAILURES:
        if columns[0].size == 1:
            return np.array([[0.0], [0.0], [np.inf]])
        return np.concatenate([_solved(solve, [x[[i]] for x in columns]) for i in range(columns[0].size)], axis=1)
