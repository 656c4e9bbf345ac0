"""Types of public signatures, for editors and type checkers."""

from typing import Any, TypeAlias

from numpy.typing import ArrayLike as ArrayLike

PyTree: TypeAlias = Any
"""Nested containers with arrays as leaves. Python has no type for them, since JAX takes any registered class."""
Leaf: TypeAlias = Any
"""Field of a pytree: a number, an array, a tracer under `jax.jit`, or any result of a function in `jax.tree.map`."""
Foreign: TypeAlias = Any
"""Object of a package that need not be installed, such as a figure of Matplotlib or a data frame of pandas."""
Numbers: TypeAlias = Any
"""Result of a function: a number if every argument is a number, else an array. No type can express this choice."""
Index: TypeAlias = Any
"""Anything that NumPy takes between brackets: whole numbers, slices, masks, and tuples of these."""
