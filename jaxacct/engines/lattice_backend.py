"""Where the lattice engine's kernels run: by NumPy, which needs no compiler, or by XLA, which compiles each shape."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any, Protocol

import jax
import numpy as np

from jaxacct.kernels import elementary_check

__all__ = ["Runner", "backend_for", "runner"]


class Runner(Protocol):
    """Calls a kernel."""

    def __call__(self, kernel: Callable[..., Any], *arguments: Any, **static: int) -> Any:
        """The kernel at the arguments; arguments by name are sizes of arrays."""


def backend_for(choice: str = "auto") -> str:
    """ "numpy" or "xla"; of "auto", NumPy on CPUs and XLA elsewhere.

    Where NumPy's functions are less accurate on this machine than the bounds assume, it is XLA whatever was chosen.
    """
    if choice not in ("auto", "numpy", "xla"):
        raise ValueError(f'backend must be "auto", "numpy" or "xla"; got {choice!r}')
    if choice == "xla" or (choice == "auto" and jax.default_backend() != "cpu"):
        return "xla"
    failure = elementary_check.failure()
    if failure is None:
        return "numpy"
    warnings.warn(f"XLA answers instead of NumPy, since on this machine {failure}", RuntimeWarning, stacklevel=2)
    return "xla"


def runner(backend: str) -> Runner:
    """What calls kernels on a backend, "numpy" or "xla"."""
    return _by_numpy if backend == "numpy" else _by_xla


def _by_numpy(kernel: Callable[..., Any], *arguments: Any, **static: int) -> Any:
    with np.errstate(all="ignore"):  # kernels evaluate both sides of every choice
        return kernel(*arguments, **static)


def _by_xla(kernel: Callable[..., Any], *arguments: Any, **static: int) -> Any:
    return _compiled(kernel, tuple(static))(*arguments, **static)


@functools.cache
def _compiled(kernel: Callable[..., Any], static: tuple[str, ...]) -> Callable[..., Any]:
    return jax.jit(kernel, static_argnames=static)
