"""Sums of squares whose rounding is known: terms are added in blocks, so that no run of additions is long.

Error bounds: jaxacct/training/step/README.md, "Clipping", paragraph "Rounding".
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

__all__ = ["BLOCK", "allowance", "block_levels", "blocked_sum", "row_squares", "sum_squares"]

BLOCK = 64
"""Terms of a block: the longest run of additions.  Larger ones round more, smaller ones make more levels of blocks."""


def sum_squares(values: Any) -> Any:
    """The sum of squares of all entries, block by block."""
    return blocked_sum(jnp.square(values))


def row_squares(values: Any) -> Any:
    """The sum of squares of each row."""
    return jax.vmap(sum_squares)(values)


def blocked_sum(values: Any) -> Any:
    """A sum of non-negative terms with at most 63 additions for each level of blocks: relative error 63 u a level."""
    flat = values.reshape(-1)
    while flat.size > BLOCK:
        flat = jnp.pad(flat, (0, -flat.size % BLOCK)).reshape(-1, BLOCK).sum(1)
    return flat.sum()


def allowance(sizes: Sequence[int], dtype: Any) -> float:
    """By how much, relatively, a norm formed by ``blocked_sum`` over leaves may be too small, and a scaling too large.

    Half the relative error of the sum of squares (64 units a level of blocks, one for each leaf), and 8 units for the
    root, the quotient and the products; twice that, for devices that do not round correctly.
    """
    levels = max(map(block_levels, sizes), default=1)
    return (BLOCK * levels + len(sizes) + 16) * float(jnp.finfo(dtype).eps) / 2


def block_levels(size: int) -> int:
    """Levels of blocks in a sum of so many terms."""
    return max(1, math.ceil(math.log(max(size, 2), BLOCK) - 1e-9))
