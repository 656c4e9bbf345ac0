"""Powers of two taken out of arrays: products with them are exact, so that no norm overflows or vanishes.

Exponents are read from the bits.  Subnormal numbers, which XLA's arithmetic takes for zero in some places and not in
others, are told from the bits too.  All arrays are float32 or float64.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

__all__ = ["NOTHING", "exponent", "normal", "power", "scaled"]

NOTHING = -(2**20)
"""The exponent of an array without any normal number: below all others, also where a few of them are added."""


def exponent(values: Any) -> Any:
    """e with 2^e <= |value| < 2^(e+1), int32; NOTHING for zeros and subnormal numbers, ``finfo.maxexp`` beyond them.

    >>> exponent(jnp.array([1.0, -3.9, 1e-45, 0.0, jnp.inf, jnp.nan])).tolist()
    [0, 1, -1048576, -1048576, 128, 128]
    """
    info = jnp.finfo(values.dtype)
    field = (_magnitude(values) >> info.nmant).astype(np.int32)
    return jnp.where(field > 0, field - (info.maxexp - 1), NOTHING)


def normal(values: Any) -> Any:
    """The same values with zeros in place of subnormal numbers."""
    info = jnp.finfo(values.dtype)
    return jnp.where(_magnitude(values) >= 1 << info.nmant, values, 0)


def power(exponents: Any, dtype: Any) -> Any:
    """2^e; zero where that is subnormal, and the largest power of two where it overflows.

    >>> power(jnp.array([-1, 10]), jnp.float32).tolist()
    [0.5, 1024.0]
    """
    info = jnp.finfo(dtype)
    field = jnp.clip(exponents, info.minexp - 1, info.maxexp - 1) + (info.maxexp - 1)
    return jax.lax.bitcast_convert_type(field.astype(_integer(dtype)) << info.nmant, dtype)


def scaled(values: Any, exponents: Any) -> Any:
    """values * 2^e, for e from twice the least to twice the largest exponent of the dtype; zero below.

    >>> float(scaled(jnp.float32(2.0**100), jnp.int32(-200)) * 2.0**100)
    1.0
    """
    half = exponents >> 1
    return values * power(half, values.dtype) * power(exponents - half, values.dtype)


def _magnitude(values: Any) -> Any:
    """The bits of |value| as an integer: in the order of |value|, infinity and then NaN above all."""
    integer = _integer(values.dtype)
    return jax.lax.bitcast_convert_type(values, integer) & np.iinfo(integer).max


def _integer(dtype: Any) -> Any:
    return np.dtype(f"int{8 * jnp.dtype(dtype).itemsize}")
