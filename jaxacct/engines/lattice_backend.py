"""Where the lattice engine's kernels run: by NumPy, which needs no compiler, or by XLA, which compiles each shape."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol

import jax
import numpy as np

from jaxacct.engines.backend import on_numpy

__all__ = ["Runner", "runner"]


class Runner(Protocol):
    """Calls a kernel."""

    def __call__(self, kernel: Callable[..., Any], *arguments: Any, **static: int) -> Any:
        """The kernel at the arguments; arguments by name are sizes of arrays."""


def runner() -> Runner:
    """What calls kernels: NumPy on a CPU however large the job, unless the user asked for XLA."""
    return _by_numpy if on_numpy(1, apart=True) else _by_xla


def _by_numpy(kernel: Callable[..., Any], *arguments: Any, **static: int) -> Any:
    with np.errstate(all="ignore"):  # kernels evaluate both sides of every choice
        return kernel(*arguments, **static)


def _by_xla(kernel: Callable[..., Any], *arguments: Any, **static: int) -> Any:
    return _compiled(kernel, tuple(static))(*arguments, **static)


@functools.cache
def _compiled(kernel: Callable[..., Any], static: tuple[str, ...]) -> Callable[..., Any]:
    return jax.jit(kernel, static_argnames=static)
