"""The types that kernels are annotated with."""

from collections.abc import Callable
from typing import Any, TypeAlias

__all__ = ["Array", "Generating"]

Array: TypeAlias = Any
"""A float64 array, or a number.

`Any`, since one kernel is called with JAX arrays, with NumPy arrays and, under jit, vmap and jvp, with tracers: no
static type covers the three and the arithmetic between them.  Shapes stand in docstrings and in comments on fields.
"""
Generating: TypeAlias = Callable[[Array], tuple[Array, Array, Array]]
"""The probability generating function of a law of K: maps `y = 1 - x` to (phi, phi', phi'') at x (generating.py)."""
