"""Clip norms: one for all parameters or one for each part, what they bound, and how far rounding lowers them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxacct.core.validation import Constraint, InputError, Tracer, check
from jaxacct.training.clipping.ghost_norms import allowance

__all__ = ["sensitivity"]

CLIP_NORM = Constraint("use a {name} such as 1.0, and scale the loss if needed", 1e-10, 1e10)
"""In this range, noise in proportion to the clip norm, and squares of clip norms, are ordinary in float32."""
DEVIATION = Constraint("use an ordinary {name}, such as 1.0", 1e-10, 1e10)
"""Standard deviations of noise, in sensitivities.  Beyond these float32 may hold zero or infinity in their place: there
would be no noise, or nothing but NaN."""
_SMALLEST_TRACED, _LARGEST_TRACED = 2.0**-100, 2.0**100
"""A traced clip norm outside of these, or NaN, lets nothing through: it cannot be refused inside a compiled program."""


def sensitivity(clip_norm: Any) -> float:
    """The most that one example adds to a clipped sum: C, or the root of the sum of squares, rounded up.

    Parameters
    ----------
    clip_norm : C > 0, or a pytree of them, one for each part of the parameters.

    Returns
    -------
    float

    Raises
    ------
    InputError : a clip norm outside [1e-10, 1e10].

    References
    ----------
    Abadi et al. 2016; McMahan et al. 2018 (a clip norm for each part).

    >>> sensitivity({"layer": 3.0, "head": 4.0}) - 5.0 < 1e-15
    True
    """
    norms = [float(check("clip_norm", c, CLIP_NORM)) for c in jax.tree_util.tree_leaves(clip_norm)]
    if not norms:  # of none the sensitivity would be 0, and so would the noise
        raise InputError(f"clip_norm = {clip_norm!r:.40} holds no number, must hold one or more; give 1.0, for example")
    return norms[0] if len(norms) == 1 else math.nextafter(math.hypot(*norms), math.inf)


def deviation(noise_multiplier: Any, norms: Sequence[Any]) -> Any:
    """In float32, noise multiplier times the root of the sum of squared clip norms, raised by more than it rounds."""
    rounding = 1.0 + (16 + len(norms)) * 2.0**-24
    return jnp.float32(noise_multiplier) * jnp.sqrt(sum(jnp.float32(c) ** 2 for c in norms)) * rounding


def grouped(clip_norm: Any, params: Any) -> tuple[list[Any], list[int]]:
    """The clip norms, and for each parameter the number of the one that it falls under."""
    norms = jax.tree_util.tree_leaves(clip_norm)
    for norm in norms:
        if not isinstance(norm, Tracer) and np.ndim(check("clip_norm", norm, CLIP_NORM)):
            raise InputError(f"clip_norm has shape {np.shape(norm)}, must be a number; use one number for each part")
    try:
        counts = jax.tree.leaves(jax.tree.map(lambda _, part: len(jax.tree.leaves(part)), clip_norm, params))
    except ValueError:
        raise InputError("clip_norm must be a number or a prefix of the parameters; give one number a part") from None
    return norms, [group for group, count in enumerate(counts) for _ in range(count)]


def limit_of(clip_norm: Any, sizes: Sequence[int], rows: int, dtype: Any) -> Any:
    """The clip norm, less the rounding of norms and contributions (README.md); 0 for one that none can be held to."""
    below_normal = 16 * rows * math.sqrt(sum(sizes)) * float(jnp.finfo(dtype).tiny)
    c = jnp.asarray(clip_norm, dtype)
    held = (c >= _SMALLEST_TRACED) & (c <= _LARGEST_TRACED)
    return jnp.where(held, c * (1 - allowance(sizes, dtype)) - below_normal, 0)


def wide(dtype: Any) -> Any:
    """The dtype in which sums and noise are formed: at least float32."""
    return jnp.promote_types(dtype, jnp.float32)


def beside(dtype: Any) -> Any:
    """The dtype in which values beside the gradients are summed; int32 stays int32, so that its sums are exact."""
    return dtype if dtype == jnp.int32 else wide(dtype)
