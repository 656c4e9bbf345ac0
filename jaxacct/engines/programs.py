"""Programs compiled by XLA: loaded from the disk where `program_store.py` has them, else compiled and kept there."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

from jaxacct.engines import cache_folder, compiling, devices, program_store

Run = Callable[..., Sequence[Any]]


def prepare(
    function: Callable[..., Any], options: dict[str, Any] | None, label: str, leaves: list[Any], tree: Any, device: Any
) -> Run:
    """The program for a function of pytrees at arguments of given shapes; it returns the leaves of the answer.

    label : all that the program depends on, but sources, versions and the machine.
    device : None for the first.
    """
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
        return jax.tree.leaves(function(*jax.tree.unflatten(tree, leaves)))

    with compiling.announced():
        compiled = _compile(jax.jit(flat, keep_unused=True).lower(*leaves), options)
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


def note_warm() -> None:
    """Remember that the programs of sweeps are kept for this process's first device."""
    folder = _folder()
    if folder is not None:
        program_store.note_warm(folder, devices.local()[0])


def are_kept() -> bool:
    """Whether `jaxacct warm` has kept the programs of sweeps."""
    try:
        folder = cache_folder.safe_folder(create=False)
    except cache_folder.Unusable:
        return False
    return jax.process_count() == 1 and program_store.is_warm(folder, devices.local()[0])


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
