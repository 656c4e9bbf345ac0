"""Which backend evaluates the kernels: NumPy, which compiles nothing, or programs that XLA has compiled.

On a CPU some ten thousands of configurations are done on NumPy before XLA has compiled its programs and run them; more,
and any number on an accelerator, are done sooner by XLA.  The two agree to rounding, and not to the last bit.  So a job
takes one path throughout, fixed before it begins (`job`).

On NumPy a batch is cut into chunks that fit into the cache.  The size of a chunk changes no bit of an answer.  For XLA
it is cut into chunks of one fixed shape, which run on every core or device there is (`in_chunks`).  A chunk has the
same shape whatever the number of devices, and each device compiles the same program, so that results do not depend on
how many devices took part, to the last bit.  (One program partitioned over a mesh would not do: XLA fuses it otherwise
than the program of one device, and the last bits differ.)
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import os
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxacct.core.validation import InputError
from jaxacct.engines import devices, programs
from jaxacct.engines.programs import Run
from jaxacct.kernels import elementary_check

__all__ = ["NUMPY_MOST", "Compiled", "evaluate", "fixed", "in_chunks", "job", "on_numpy", "program", "suiting"]

NUMPY_MOST = 40_000
"""Largest job that NumPy does: about where compiling the programs of the contour engine begins to pay."""
NUMPY_MOST_IF_KEPT = 1_500
"""The same where `jaxacct warm` has kept the programs: loading them pays sooner."""
NUMPY_MOST_SELECTIONS = 2_400
"""Largest job of private selections that NumPy does; each costs it as much as some 16 configurations.  `jaxacct warm`
keeps none of their programs."""
CHUNK_POINTS = 2**14
"""Quadrature points of all configurations of a chunk together: fewer cost more calls, more do not fit into a cache."""
NODES_A_POINT = 16
"""Entries of the tables of rotations for one quadrature point, about: as many terms of atoms take as much memory."""


class _Path(NamedTuple):
    numpy: bool
    asked: bool  # whether the user asked for it


CALLS_ERFC = "jaxacct.kernels.split.contour"
"""Module of the kernels that certify with erfc, which is checked apart since SciPy has it."""

_path: contextvars.ContextVar[_Path | None] = contextvars.ContextVar("path", default=None)


@contextlib.contextmanager
def job(size: int, backend: str = "auto", *, apart: bool = False) -> Iterator[None]:
    """Inside, every batch takes one path: the one that is asked for, else that of the job around it, else the cheaper.

    size : configurations of the whole job.
    backend : what the user asks for, for this job and those within.
    apart : whether a job of another size around this one is passed over, if nothing was asked for.
    """
    around = _path.get()
    if backend == "numpy" and not _holds():
        raise InputError("backend = 'numpy' cannot certify on this machine; use 'xla'")
    if backend == "xla":
        devices.local()  # refuses where none certifies
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
    """Inside, every batch takes the path that was chosen beforehand for the job that this is a piece of."""
    token = _path.set(_Path(numpy, False))
    try:
        yield
    finally:
        _path.reset(token)


def suiting(size: int, *, selections: bool = False) -> str:
    """The backend, by name, that "auto" means for a job of a size; `selections` as for `on_numpy`."""
    return "numpy" if on_numpy(size, selections=selections) else "xla"


def on_numpy(size: int, *, apart: bool = False, selections: bool = False) -> bool:
    """Whether a batch of this size goes to NumPy; `apart` as for `job`.

    selections : whether it is one of private selections at their worst score.
    """
    path = _path.get()
    return _suits(size, selections) if path is None or (apart and not path.asked) else path.numpy


def _suits(size: int, selections: bool = False) -> bool:
    if devices.only_numpy():
        return _holds()
    most = NUMPY_MOST_SELECTIONS if selections else NUMPY_MOST
    if size > most or devices.platform() != "cpu" or not _holds():
        return False
    return selections or size <= NUMPY_MOST_IF_KEPT or not programs.are_kept()


@functools.cache
def _holds() -> bool:
    """Whether NumPy's functions are as accurate on this machine as the bounds assume."""
    failure = elementary_check.failure()
    if failure is not None:
        warnings.warn(f"XLA answers instead of NumPy, since on this machine {failure}", RuntimeWarning, stacklevel=2)
    return failure is None


def evaluate(kernel: Callable[..., Any], arguments: Any, size: int, chunk: int, **static: int) -> list[np.ndarray]:
    """The leaves of a kernel's answer for a batch of configurations.

    chunk : configurations in a call of a compiled program.
    static : the kernel's keywords; `points`, its quadrature points, says how many configurations fit into a cache.
    """
    path = _path.get()
    if not (_suits(size) if path is None else path.numpy):
        return in_chunks(program(kernel, **static), chunk, arguments, size)
    if kernel.__module__ == CALLS_ERFC and elementary_check.failure(special=True) is not None:
        raise ArithmeticError(elementary_check.failure(special=True))
    leaves, tree = jax.tree.flatten(arguments)
    atoms = max(leaf.size // size for leaf in leaves) if size else 1  # of a finite part, of which every node has a term
    largest = max(static["points"], atoms * static["count"] // NODES_A_POINT)
    some = max(1, CHUNK_POINTS // largest)

    def one(start: int) -> list[Any]:
        piece = [np.asarray(leaf[start : start + some]) for leaf in leaves]
        with np.errstate(all="ignore"):  # an end that is not a number is dropped by the one who asks
            return jax.tree.leaves(kernel(*jax.tree.unflatten(tree, piece), **static))

    starts, workers = range(0, size, some), os.cpu_count() or 1
    if len(starts) > 1 and workers > 1:
        with ThreadPoolExecutor(workers) as pool:
            pieces = list(pool.map(one, starts))
    else:
        pieces = [one(start) for start in starts]
    return [np.concatenate(columns) for columns in zip(*pieces, strict=True)]


def in_chunks(compiled: Run, chunk: int, arguments: Any, size: int) -> list[np.ndarray]:
    """Run a compiled program over a batch, `chunk` configurations at a time; the last chunk is padded.

    The chunks go to the devices in turn, several of them in flight at a time.  Under `jax.distributed` these are
    the devices of this process alone.
    """
    each = devices.local()
    leaves, tree = jax.tree.flatten(arguments)

    def one(start: int) -> list[np.ndarray]:
        index = np.minimum(np.arange(start, start + chunk), size - 1)
        with devices.double_precision():
            piece = jax.tree.unflatten(tree, [leaf[index] for leaf in leaves])
            if len(each) > 1:
                piece = jax.device_put(piece, each[start // chunk % len(each)])
            # copies: a view would keep JAX's array alive, whose bookkeeping is larger than the numbers
            return [np.array(x) for x in compiled(*piece)]

    starts = range(0, size, chunk)
    if len(starts) > 1:
        with ThreadPoolExecutor(max(os.cpu_count() or 1, 2 * len(each) - 1)) as pool:
            pieces = list(pool.map(one, starts))
    else:
        pieces = [one(start) for start in starts]
    return [np.concatenate(columns)[:size] for columns in zip(*pieces, strict=True)]


@functools.cache
def program(kernel: Callable[..., Any], **static: int) -> Compiled:
    """A kernel as programs that take a batch of configurations."""
    return Compiled(functools.partial(kernel, **static), None, f"{kernel.__module__}.{kernel.__qualname__} {static}")


class Compiled:
    """A function of pytrees, as programs that are loaded, or compiled, when they are first called.

    A call with arguments of new shapes, or on another device, is a new program; several threads may call it.  The
    label says what the function is, apart from its sources; the answer is a list of its leaves.
    """

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
