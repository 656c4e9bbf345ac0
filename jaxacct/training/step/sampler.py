"""Which examples take part in a step: Poisson samples, samples of a fixed size, and shuffled batches, on the device.

Nothing is truncated: a selection has room for every example, and the loop over its micro-batches runs as many times
as this draw needs, in one compiled program.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxacct.chacha import secret
from jaxacct.validation import PROBABILITY, InputError, check

__all__ = [
    "Selection",
    "fixed_batches",
    "over_micro_batches",
    "permutation",
    "poisson",
    "threshold",
    "without_replacement",
]

Carry = TypeVar("Carry")


class Selection(NamedTuple):
    """The examples of one logical batch: the first ``count`` of ``indices`` (int32, one place for every example)."""

    indices: Any
    count: Any


def threshold(sampling_probability: float) -> np.ndarray:
    """The integer that 64 random bits are compared with, as three words: certain, high, low.

    floor(q 2^64), so that the realised rate is at most q and less than 2^-64 below it; a lower rate leaks no more.
    Every float64 q >= 2^-11 is realised exactly.

    >>> threshold(0.5)
    array([         0, 2147483648,          0], dtype=uint32)
    """
    q = check("sampling_probability", sampling_probability, PROBABILITY)
    if np.ndim(q):
        raise InputError(f"sampling_probability has shape {np.shape(q)}, must be a number; one step has one rate")
    certain, rest = divmod(math.floor(Fraction(float(q)) * 2**64), 2**64)
    return np.array([certain, *divmod(rest, 2**32)], np.uint32)


def poisson(key: Any, dataset_size: int, sampling_probability: Any) -> Selection:
    """Every example by itself with probability q: 64 random bits below ``threshold(q)``.

    Parameters
    ----------
    key : a JAX key of at least 256 bits, such as ``fresh_key()``; who can guess it knows who takes part.
    dataset_size : int, static.
    sampling_probability : a number, or its ``threshold`` where it is traced.

    Returns
    -------
    Selection : the count is binomial(dataset_size, q), with no upper limit below dataset_size.  Indices ascend.

    Raises
    ------
    InputError : a key of fewer bits, a size that is no positive integer, a rate outside [0, 1].

    A step with this batch is accounted for as PoissonSampled(Gaussian(noise_multiplier), q), under adding or removing
    an example.

    References
    ----------
    Abadi et al. 2016, "Deep learning with differential privacy".

    >>> from jaxacct.training import fresh_key
    >>> int(poisson(fresh_key(), 1000, 1.0).count)
    1000
    """
    size = _size("dataset_size", dataset_size)
    words = sampling_probability if np.shape(sampling_probability) == (3,) else threshold(sampling_probability)
    certain, high, low = (jnp.asarray(words, jnp.uint32)[i] for i in range(3))
    bits = jax.random.bits(secret(key), (2, size), jnp.uint32)
    taken = (certain > 0) | (bits[0] < high) | ((bits[0] == high) & (bits[1] < low))
    indices = jnp.nonzero(taken, size=size, fill_value=0)[0]
    return Selection(indices.astype(jnp.int32), jnp.sum(taken, dtype=jnp.int32))


def without_replacement(key: Any, dataset_size: int, batch_size: Any) -> Selection:
    """A uniformly random set of exactly ``batch_size`` examples: the beginning of a random permutation.

    Parameters
    ----------
    key : a JAX key of at least 256 bits, such as ``fresh_key()``; who can guess it knows who takes part.
    dataset_size : int, static.
    batch_size : an integer; may be traced.

    Returns
    -------
    Selection : of batch_size examples, or of all where there are fewer.

    Raises
    ------
    InputError : a key of fewer bits, a size that is no positive integer.

    A step with this batch is accounted for as SampledWithoutReplacement(Gaussian(noise_multiplier), batch_size /
    dataset_size).

    References
    ----------
    Balle, Barthe and Gaboardi 2018, "Privacy amplification by subsampling".

    >>> from jaxacct.training import fresh_key
    >>> chosen = without_replacement(fresh_key(), 10, 4)
    >>> len(set(chosen.indices[:4].tolist())), int(chosen.count)
    (4, 4)
    """
    size = _size("dataset_size", dataset_size)
    return Selection(permutation(key, size), jnp.minimum(jnp.asarray(batch_size, jnp.int32), size))


def fixed_batches(epoch_key: Any, dataset_size: int, batch_size: Any, position: Any) -> Selection:
    """Batch number ``position`` of an epoch: the data are shuffled once, then cut into batches.

    Every example is in exactly one of the ceil(dataset_size / batch_size) batches, the last of which may be smaller.
    There is no amplification by sampling: the epoch is accounted for as one Gaussian mechanism.

    Parameters
    ----------
    epoch_key : one JAX key of at least 256 bits for all batches of the epoch.
    dataset_size : int, static.
    batch_size, position : integers; may be traced.

    Returns
    -------
    Selection

    Raises
    ------
    InputError : a key of fewer bits, a size that is no positive integer.

    References
    ----------
    McSherry 2009, "Privacy integrated queries" (parallel composition).

    >>> from jaxacct.training import fresh_key
    >>> key = fresh_key()
    >>> sorted(i for p in range(3) for b in [fixed_batches(key, 5, 2, p)] for i in b.indices[: b.count].tolist())
    [0, 1, 2, 3, 4]
    """
    size = _size("dataset_size", dataset_size)
    start = jnp.asarray(batch_size, jnp.int32) * jnp.asarray(position, jnp.int32)
    order = permutation(epoch_key, size)[(jnp.arange(size, dtype=jnp.int32) + start) % size]
    return Selection(order, jnp.clip(size - start, 0, jnp.asarray(batch_size, jnp.int32)))


def permutation(key: Any, size: int) -> Any:
    """A random permutation of range(size), int32: the order of 64-bit sort keys, drawn again if two are equal.

    Given that all keys differ every order is equally likely, exactly.
    """

    def draw(key: Any) -> tuple[Any, Any, Any]:
        key, now = jax.random.split(key)
        bits = jax.random.bits(now, (2, size), jnp.uint32)
        high, low, order = jax.lax.sort((bits[0], bits[1], jnp.arange(size, dtype=jnp.int32)), num_keys=2)
        return key, order, jnp.any((high[1:] == high[:-1]) & (low[1:] == low[:-1]))

    return jax.lax.while_loop(lambda drawn: drawn[2], lambda drawn: draw(drawn[0]), draw(secret(key)))[1]


def over_micro_batches(
    selection: Selection, micro_size: int, body: Callable[[Carry, Any, Any], Carry], init: Carry
) -> Carry:
    """Fold ``body(carry, indices, mask)`` over the selection in micro-batches of one static size.

    Parameters
    ----------
    selection : Selection
    micro_size : int, static: examples in one call of body.
    body : (carry, indices, mask) -> carry.  In the last call the mask is False, and the index 0, where there is no
        example left.
    init : the first carry.

    Returns
    -------
    The last carry.  body runs ceil(count / micro_size) times; that depends on the draw, not on the program, and an
    empty selection runs it never.

    Raises
    ------
    InputError : micro_size is no positive integer.

    >>> total = lambda sum, indices, mask: sum + (indices * mask).sum()
    >>> int(over_micro_batches(Selection(jnp.array([4, 2, 7, 1, 0, 0]), jnp.int32(4)), 3, total, 0))
    14
    """
    micro = _size("micro_batch", micro_size)
    places = selection.indices.shape[0]
    padded = jnp.pad(selection.indices, (0, -places % micro))

    def one(i: Any, carry: Carry) -> Carry:
        place = i * micro + jnp.arange(micro, dtype=jnp.int32)
        mask = place < selection.count
        return body(carry, jnp.where(mask, jax.lax.dynamic_slice_in_dim(padded, i * micro, micro), 0), mask)

    return jax.lax.fori_loop(0, (selection.count + micro - 1) // micro, one, init)


def _size(name: str, value: Any) -> int:
    """A number of examples that fits in int32; InputError for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or not 1 <= value < 2**31:
        raise InputError(f"{name} = {value!r:.40} must be an integer from 1 to 2**31 - 1; use a number of examples")
    return int(value)
