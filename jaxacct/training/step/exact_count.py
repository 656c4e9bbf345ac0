"""Exact sum over records of a value in [0, 1], counted in whole units; one record moves the sum by at most 1."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxacct.core.validation import InputError
from jaxacct.training.clipping.examples_apart import for_each, one_of, refuse_closed_over

UNIT_BITS, LOWER_BITS = 20, 10
"""Exponents of two: a value has at most 2^20 units, and its lower part is its remainder modulo 2^10.

The lower and the upper parts of the values are summed separately, each in 32 bits.
"""
MOST_EXAMPLES = 2**20
"""Largest number of examples: each 10-bit part of a value is at most 2^10, so its sum is at most 2^30."""
BLOCK_SIZE = 256
"""Number of examples whose values are computed together; one compiled program serves any number of examples."""


def units(value: Callable[[Any, Any], Any], params: Any, data: Any, unit: float) -> tuple[Any, Any]:
    """Return the exact count in units as two 32-bit sums (upper, lower): the count is `upper * 2^10 + lower`."""

    of_one = jax.make_jaxpr(lambda example: value(params, example))
    refuse_closed_over("value", of_one(one_of(data)), data)

    def of_block(held: tuple[Any, Any]) -> Any:
        examples, present = held
        each = for_each("value", lambda example: value(params, example), examples)
        if each.shape != present.shape:
            raise InputError(
                f"value gives shape {each.shape[1:]} for one example, must be a number; take the mean of it"
            )
        each = jnp.asarray(each, jnp.float32)
        clipped = jnp.clip(jnp.where(jnp.isnan(each) | ~present, 0.0, each), 0.0, 1.0)
        each = jnp.round(clipped * (1.0 / unit)).astype(jnp.int32)
        return jnp.sum(each >> LOWER_BITS), jnp.sum(each & (2**LOWER_BITS - 1))

    size = jax.tree_util.tree_leaves(data)[0].shape[0]
    count = -(-size // BLOCK_SIZE)  # the last block is filled up with zeros

    def cut(a: Any) -> Any:
        padded = jnp.pad(jnp.asarray(a), [(0, count * BLOCK_SIZE - size)] + [(0, 0)] * (np.ndim(a) - 1))
        return padded.reshape(count, BLOCK_SIZE, *padded.shape[1:])

    present = jnp.arange(count * BLOCK_SIZE).reshape(count, BLOCK_SIZE) < size
    upper, lower = (jnp.sum(part) for part in jax.lax.map(of_block, (jax.tree.map(cut, data), present)))
    return upper, lower
