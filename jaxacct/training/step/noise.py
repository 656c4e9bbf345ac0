"""Gaussian noise for one step, and the streams of randomness of a run.

`jax.random.normal` in float32 never exceeds 5.5 standard deviations, since it is made from 23 bits: an output farther
out would give an example away with a probability that no accountant of the Gaussian knows.  Here 64 bits make the
radius, and the tail ends beyond 9.4 standard deviations (probability 1e-20).
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxacct.chacha import secret

__all__ = ["INITIALISATION", "NOISE", "QUANTILE", "SAMPLING", "add", "normal", "stream"]

INITIALISATION, SAMPLING, NOISE, QUANTILE = range(1, 5)
"""The purposes of a run's streams: first parameters, batches, gradient noise, noise of the clipping quantile.

The values are part of the keys: a saved run depends on them.
"""


def stream(key: Any, purpose: int, step: Any = 0) -> Any:
    """The key for one purpose at one step; different purposes and steps have independent keys.

    >>> from jaxacct.training import fresh_key
    >>> root = fresh_key()
    >>> batch_key, noise_key = stream(root, SAMPLING, 7), stream(root, NOISE, 7)
    >>> bool(batch_key == noise_key)
    False
    """
    return jax.random.fold_in(jax.random.fold_in(key, purpose), step)


def add(key: Any, tree: Any, std: Any) -> Any:
    """Add independent N(0, std^2) to every entry of a pytree: once per step, to the sum over the whole batch.

    std is noise_multiplier times the clip norm; the relation (replacing an example moves the sum by up to twice the
    clip norm) is the accountant's affair.  Divide by the *expected* batch size afterwards, never by the drawn one.
    The result has the dtype of the tree, at least float32.  Keys of less than 256 bits are refused.

    >>> import jax.numpy as jnp
    >>> from jaxacct.training import fresh_key
    >>> noisy = add(fresh_key(), {"w": jnp.zeros((2, 3))}, 1.0)
    >>> noisy["w"].shape
    (2, 3)
    """
    leaves, structure = jax.tree_util.tree_flatten(tree)
    noisy, key = [], secret(key)
    for place, leaf in enumerate(leaves):
        dtype = wide(leaf.dtype)
        draw = normal(jax.random.fold_in(key, place), leaf.shape, dtype)
        noisy.append(leaf.astype(dtype) + jnp.asarray(std, dtype) * draw)
    return jax.tree_util.tree_unflatten(structure, noisy)


def normal(key: Any, shape: tuple[int, ...], dtype: Any = jnp.float32) -> Any:
    """Standard normal draws by Box and Muller's method from 96 bits for every pair.

    >>> from jaxacct.training import fresh_key
    >>> abs(float(normal(fresh_key(), (10_000,)).mean())) < 0.07  # 7 standard deviations
    True
    """
    count = int(np.prod(shape, dtype=np.int64))
    high, low, turn = jax.random.bits(key, (3, (count + 1) // 2), jnp.uint32)
    return jnp.concatenate(from_bits(high, low, turn, dtype))[:count].reshape(shape)


def from_bits(high: Any, low: Any, turn: Any, dtype: Any) -> tuple[Any, Any]:
    """Two normal draws from three words: radius sqrt(-2 log u), u = (high, low) in 64 bits; angle from ``turn``.

    Relative accuracy of a few units in the last place everywhere: u near 1 goes through its complement v, `log(1 - v) =
    -2 artanh(v/(2 - v))`, and sine and cosine are sines of angles below a right angle with signs from two bits of their
    own.  Power series take the place of log1p and sin, which are most of a step's noise otherwise.
    """
    dtype = jnp.dtype(dtype)
    near_zero = high < np.uint32(2**31)
    v = _unit(jnp.where(near_zero, high, ~high), 32, dtype) + (
        _unit(jnp.where(near_zero, low, ~low), 64, dtype) + dtype.type(2.0**-65)
    )
    # terms after which the series' next one is below the rounding, for float32 and for float64
    log_terms, sine_terms = (9, 7) if dtype.itemsize == 4 else (17, 11)
    s = v / (2 - v)  # at most 1/3
    complement = 2 * s * _horner([1.0 / (2 * k + 1) for k in range(log_terms)], s * s)
    radius = jnp.sqrt(2 * jnp.where(near_zero, -jnp.log(v), complement))
    sines = [(-1.0) ** k * (np.pi / 2) ** (2 * k + 1) / math.factorial(2 * k + 1) for k in range(sine_terms)]
    quarter = turn >> np.uint32(2)
    parts = []
    for part, sign in ((quarter, turn & np.uint32(1)), (np.uint32(2**30 - 1) - quarter, turn & np.uint32(2))):
        turns = _unit(part, 30, dtype) + dtype.type(2.0**-31)  # of a right angle
        sine = turns * _horner(sines, turns * turns)
        parts.append(radius * jnp.where(sign > 0, -sine, sine))
    return parts[0], parts[1]


def _horner(coefficients: list[float], x: Any) -> Any:
    """The polynomial with these coefficients, lowest first, at x."""
    value = jnp.full_like(x, coefficients[-1])
    for coefficient in coefficients[-2::-1]:
        value = value * x + np.asarray(coefficient, x.dtype)
    return value


def wide(dtype: Any) -> Any:
    """The dtype in which sums and noise are formed: at least float32."""
    return jnp.promote_types(dtype, jnp.float32)


def _unit(word: Any, bits: int, dtype: Any) -> Any:
    """An integer as the binary fraction whose last of so many bits is its last one."""
    return word.astype(dtype) * dtype.type(2.0**-bits)
