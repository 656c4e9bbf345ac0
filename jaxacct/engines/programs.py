"""Kernels as compiled programs, and batches run through them.

A program is compiled quickly for a few configurations, and optimised for many.  Any program answers a few
configurations in milliseconds.  Theirs is therefore compiled without optimisation, in a fraction of the time, and takes
a small chunk.  Neither relaxes IEEE arithmetic: the rounding bounds in the certificates hold for both.  Use `alike` to
fix one variant for a long job; otherwise both may get compiled.  `program_store.py` keeps programs between processes.

A batch is cut into chunks of one fixed shape, which run on every core or device there is (`in_chunks`).  A chunk has
the same shape whatever the number of devices, and each device compiles the same program, so that results do not depend
on how many devices took part, to the last bit.  (One program partitioned over a mesh would not do: XLA fuses it
otherwise than the program of one device, and the last bits differ.)
"""

from __future__ import annotations

import contextlib
import contextvars
import ctypes
import functools
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxacct.engines import cache_folder, compiling, program_store

FEW = 8
"""Largest number of configurations that takes the quickly compiled program."""
MANY = 256
"""Largest number of configurations that are done sooner with the quickly compiled programs, compilation included."""
QUICK = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
    "xla_cpu_parallel_codegen_split_count": 1,  # cutting so little code into modules costs more than threads gain
    # a third of the time: one emitter for all kernels instead of an MLIR pipeline for each
    "xla_cpu_use_fusion_emitters": False,
    # with that emitter this pass drops copies that change a layout (jaxlib 0.10.2), and with them transposes
    "xla_disable_hlo_passes": "simplification after layout assignment",
}
"""Compile options of the quickly compiled programs, for XLA on CPUs."""

Run = Callable[..., Sequence[Any]]


class Program(NamedTuple):
    """A kernel vmapped over configurations."""

    run: Run  # returns the leaves of the answer
    chunk: int  # configurations that it takes


_few: contextvars.ContextVar[bool | None] = contextvars.ContextVar("few", default=None)


@contextlib.contextmanager
def alike(few: bool) -> Iterator[None]:
    """Inside, every batch uses the quickly compiled program (`few`), or none does: each kernel compiles once."""
    token = _few.set(few)
    try:
        yield
    finally:
        _few.reset(token)


@contextlib.contextmanager
def large(size: int) -> Iterator[None]:
    """Inside, a batch of more than MANY configurations uses optimised programs, also for the few that are left over."""
    with alike(False) if size > MANY and _few.get() is None else contextlib.nullcontext():
        yield


def quickly(size: int) -> bool:
    """Whether a batch of this size is done sooner with the quickly compiled programs, compilation included."""
    told = _few.get()
    return jax.default_backend() == "cpu" and (size <= MANY if told is None else told)


def on_numpy(size: int) -> bool:
    """Whether a batch of this size is done sooner on NumPy, which compiles nothing."""
    return quickly(size)


def program(kernel: Callable[..., Any], size: int, chunk: int, **static: int) -> Program:
    """The program for a batch of a size; `chunk` is the number of configurations that the optimised one takes."""
    told = _few.get()
    cpu = jax.default_backend() == "cpu"
    few = size <= FEW if told is None else told and cpu
    quick = few and cpu
    return Program(_batched(kernel, quick, tuple(static.items())), min(chunk, FEW) if few else chunk)


def in_chunks(compiled: Run, chunk: int, arguments: Any, size: int) -> list[np.ndarray]:
    """Run a compiled program over a batch, `chunk` configurations at a time; the last chunk is padded.

    The chunks go to the devices in turn, several of them in flight at a time.  Under `jax.distributed` these are
    the devices of this process alone.
    """
    devices = jax.local_devices()
    leaves, tree = jax.tree.flatten(arguments)

    def one(start: int) -> list[np.ndarray]:
        index = np.minimum(np.arange(start, start + chunk), size - 1)
        with jax.enable_x64():
            piece = jax.tree.unflatten(tree, [leaf[index] for leaf in leaves])
            if len(devices) > 1:
                piece = jax.device_put(piece, devices[start // chunk % len(devices)])
            return [np.asarray(x) for x in compiled(*piece)]

    starts = range(0, size, chunk)
    if len(starts) > 1:
        with ThreadPoolExecutor(max(os.cpu_count() or 1, 2 * len(devices) - 1)) as pool:
            pieces = list(pool.map(one, starts))
    else:
        pieces = [one(start) for start in starts]
    return [np.concatenate(columns)[:size] for columns in zip(*pieces, strict=True)]


@functools.cache
def _batched(kernel: Callable[..., Any], quick: bool, static: tuple[tuple[str, int], ...]) -> Run:
    function = jax.vmap(jax.jit(functools.partial(kernel, **dict(static)), inline=True))
    label = f"{kernel.__module__}.{kernel.__qualname__} {dict(static)}"
    return Compiled(function, QUICK if quick else None, label)


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
                with compiling.preparing.running():
                    self._ready[key] = self._prepare(leaves, tree, f"{self._label} {signature}", device)
        return self._ready[key](*leaves)

    def _prepare(self, leaves: list[Any], tree: Any, label: str, device: Any) -> Run:
        if device is None:
            device = jax.device_put(0.0).device  # the one that takes part unless something else is said
        folder = _folder() if isinstance(device, jax.Device) and _own(tree) else None
        if folder is not None:
            with compiling.loading.running():
                kept = program_store.load(folder, label, device)
                works = kept is not None and _works(kept, leaves)
            if kept is not None and works:
                compiling.loading.add()
                return kept

        def flat(*leaves: Any) -> list[Any]:
            return jax.tree.leaves(self._function(*jax.tree.unflatten(tree, leaves)))

        with compiling.announced():
            compiled = _compile(jax.jit(flat, keep_unused=True).lower(*leaves), self._options)
        _trim()
        if folder is not None:
            with compiling.saving.running():
                if _keep(folder, label, device, compiled, leaves):
                    compiling.saving.add()
        return compiled


def _keep(folder: Path, label: str, device: Any, compiled: jax.stages.Compiled, leaves: list[Any]) -> bool:
    """Whether a program was kept.  XLA serialises one that came from JAX's own cache without its functions."""
    if not program_store.save(folder, label, device, compiled):
        return False
    if jax.config.values["jax_compilation_cache_dir"] is None:
        return True
    kept = program_store.load(folder, label, device)
    works = kept is not None and _works(kept, leaves)
    if not works:
        with contextlib.suppress(OSError):
            program_store.path_of(folder, label, device).unlink()
    return works


def _folder() -> Path | None:
    """Where programs are kept; None where that is turned off or not safe, and for one of several processes."""
    if jax.process_count() > 1:  # kept programs are those of a single process
        return None
    try:
        return cache_folder.safe_folder(create=True)
    except cache_folder.Unusable:
        return None


def _own(tree: Any) -> bool:
    """Whether a tree is made of containers and classes of jaxacct alone: the code of others is not in a file's name."""
    node = tree.node_data()
    kind = type(None) if node is None else node[0]
    ours = kind.__module__.partition(".")[0] in ("builtins", "jaxacct")
    return ours and all(_own(child) for child in tree.children())


def _works(kept: Run, leaves: list[Any]) -> bool:
    """Whether a kept program runs: some load and fail when they are called."""
    try:
        jax.block_until_ready(kept(*leaves))
    except Exception:  # whatever the runtime raises for it, compiling anew is the remedy
        return False
    return True


def _trim() -> None:
    """Give the system back what compiling has freed: glibc keeps it, some 100 MiB for each optimised program."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


@functools.cache
def known(**options: Any) -> dict[str, Any]:
    """Those of the compile options that this XLA has."""
    lowered = jax.jit(lambda x: x).lower(0)

    def has(name: str) -> bool:
        try:
            lowered.compile(compiler_options={name: options[name]})
        except jax.errors.JaxRuntimeError as error:
            if "No such compile option" not in str(error):
                raise
            return False
        return True

    return {name: value for name, value in options.items() if has(name)}


def _compile(lowered: jax.stages.Lowered, options: dict[str, Any] | None) -> jax.stages.Compiled:
    try:
        return lowered.compile(compiler_options=options)
    except jax.errors.JaxRuntimeError as error:
        if "No such compile option" not in str(error):
            raise
        return lowered.compile(compiler_options=known(**options or {}))  # another XLA, which has dropped some
