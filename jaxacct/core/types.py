"""Types of public signatures, for editors and type checkers."""

from typing import Any, TypeAlias

from numpy.typing import ArrayLike as ArrayLike

PyTree: TypeAlias = Any
"""Nested containers with arrays as leaves.  Python has no type for them, since JAX takes any registered class."""
Leaf: TypeAlias = Any
"""A field of a pytree: a number or an array; under `jax.jit` a tracer; in `jax.tree.map` what the function returns."""
Foreign: TypeAlias = Any
"""An object of a package that need not be installed, such as a figure of Matplotlib or a data frame of pandas."""
Numbers: TypeAlias = Any
"""A number where every argument is one, else an array.  Which of them depends on shapes, which types do not tell."""
Index: TypeAlias = Any
"""What NumPy takes between brackets: whole numbers, slices, masks, and tuples of these."""
