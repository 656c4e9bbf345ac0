"""Gaussian noise for one step, and the streams of randomness of a run (README.md of this folder, "Noise")."""

from __future__ import annotations

import hmac
import math
from fractions import Fraction
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxacct.core.chacha import host_fold_in, key_words, noise_words, secret
from jaxacct.core.files import optional_package
from jaxacct.core.types import Foreign, PyTree
from jaxacct.core.validation import POSITIVE, InputError, check
from jaxacct.samplers.exact_draws import KeyedBits, rounded_gaussian
from jaxacct.training.clipping.clipped_sum import DEVIATION, sensitivity, wide
from jaxacct.training.clipping.traces import computed_once, unfolded_true

# Purposes of a run's streams of random numbers.  `jaxacct.tuning` uses 5 and 6.  Saved runs depend on these numbers.
INITIALISATION = 1
SAMPLING = 2
NOISE = 3  # the gradient noise
QUANTILE = 4  # the noise on the count for the adaptive clip norm
EXAMPLES = 7  # which examples of a user enter a step
MODEL = 8  # the random numbers of the model for each example, such as dropout masks
LOSS = 9  # the noise on the private loss
UNIT = 32  # normal draws in a unit of noise: three ChaCha20 blocks have 48 words, and three words make two draws
_PIECE, _PIECE_ON_CPU = 16_368, 1_056
"""Largest numbers of units drawn at a time: 12 MB on GPUs and TPUs, a core's cache on a CPU.  On a CPU a larger number
doubles the CPU time of several threads.  Rows of draws compete for cache lines if the number is a power of two."""


@jax.jit
def stream(key: Any, purpose: Any, step: Any = 0) -> Any:
    """Return the key for one purpose at one step; different purposes and steps have independent keys."""
    # the loop makes XLA compile `fold_in` once, and not once for each of the two calls
    numbers = jnp.stack([jnp.asarray(number, jnp.uint32) for number in (purpose, step)])
    return jax.lax.fori_loop(0, 2, lambda i, key: jax.random.fold_in(key, numbers[i]), key)


def host_stream(words: Any, purpose: int) -> np.ndarray:
    """Return the words of the key ``stream(key, purpose)``, given the words of `key`.  NumPy computes them."""
    return host_fold_in(host_fold_in(words, purpose), 0)


def add(key: Any, tree: Any, std: Any) -> Any:
    """Add independent N(0, std^2) to each entry of a whole batch's sum, once per step.

    `std` is the noise multiplier times the clip norm, for all neighbouring relations.  Divide the noisy sum by the
    *expected* batch size.
    """
    leaves, structure = jax.tree_util.tree_flatten(tree)
    words, dtypes, noisy = key_words(key), [wide(leaf.dtype) for leaf in leaves], list(leaves)
    for dtype in dict.fromkeys(dtypes):
        rows = {place: _rows(leaves[place].astype(dtype)) for place, own in enumerate(dtypes) if own == dtype}
        for place, own in with_noise(words, rows, jnp.asarray(std, dtype), len(leaves)).items():
            noisy[place] = own.reshape(-1)[: leaves[place].size].reshape(leaves[place].shape)
    return jax.tree_util.tree_unflatten(structure, noisy)


def _rows(leaf: Any) -> Any:
    """Return an array's entries in 32 rows. Each column belongs to one unit of noise. Zeros fill up the last row."""
    units = -(-leaf.size // UNIT)
    return jnp.pad(leaf.reshape(-1), (0, UNIT * units - leaf.size)).reshape(UNIT, units)


def rounded(words: Any, purpose: int, std: Fraction) -> np.int32:
    """Return a draw of N(0, std^2), rounded to an integer, modulo 2^32.  The host draws exactly, from a step's key."""
    key = hmac.digest(np.asarray(words, "<u4").tobytes(), b"rounded" + bytes([purpose]), "sha256")
    drawn = rounded_gaussian(std * std, KeyedBits(key))
    return np.int32((drawn + 2**31) % 2**32 - 2**31)


def with_noise(
    words: Any, arrays: dict[int, Any], std: Any, leaves: int, first: dict[int, Any] | None = None
) -> dict[int, Any]:
    """Return `arrays` plus `std` times normals.  Keys are indices of leaves in a pytree with `leaves` leaves.

    An array has shape (32, units).  Its units are numbered from 0, or from its number in `first`.  On a CPU, large
    arrays change in place, and all others are joined.  Elsewhere all are joined, since a GPU's host waits for branches.
    """
    count = sum(array.shape[1] for array in arrays.values())
    if count >= 2**31:  # units are counted in int32
        raise InputError(
            f"{UNIT * count} entries must be < 2**36 in one call; add noise to parts, each with its own key"
        )
    on_cpu, dtype = jax.default_backend() == "cpu", std.dtype
    pieces = max(1, -(-count // (_PIECE_ON_CPU if on_cpu else _PIECE)))
    each = -(-count // pieces)
    if each > 48:  # a multiple of 16 fills XLA's vectors and compiles in half the time
        each += -each % 16
    large = [place for place, array in arrays.items() if on_cpu and pieces > 1 and array.shape[1] >= each]
    small = [place for place in arrays if place not in large]
    order = large + small
    begins = np.cumsum([0, *(arrays[place].shape[1] for place in order)])
    starts = begins[:-1].tolist()
    if pieces > 1 and len(starts) > 1:  # in all other cases the starts stay constants, which compile fast
        starts = computed_once(unfolded_true([words]), lambda: [np.int32(start) for start in starts])
    targets = [arrays[place] for place in large]
    if small:
        joined = jnp.concatenate([arrays[place] for place in small], axis=1)
        whole = max(joined.shape[1], each) if large else pieces * each
        targets.append(jnp.pad(joined, ((0, 0), (0, whole - joined.shape[1]))))

    def piece(begin: Any) -> Any:
        at = begin + jnp.arange(each, dtype=jnp.int32)
        own = jnp.searchsorted(jnp.asarray(begins[1:], jnp.int32), at, side="right")
        zero = jnp.asarray(begins, jnp.int32)  # for each array, the value of `at` that gives counter 0
        if first is not None:
            zero -= jnp.stack([*(first[place].astype(jnp.int32) for place in order), jnp.int32(0)])
        counter = (at - zero[own]).astype(jnp.uint32)
        place = jnp.asarray([*order, leaves], jnp.uint32)[own]
        thirds = jnp.repeat(jnp.arange(3, dtype=jnp.uint32), each)
        high, low, turn = jnp.split(noise_words(words, jnp.tile(counter, 3), jnp.tile(place, 3), thirds), 3, axis=1)
        return std * jnp.concatenate(from_bits(high, low, turn, dtype))

    columns = partial(jax.lax.dynamic_slice_in_dim, slice_size=each, axis=1)
    put = partial(jax.lax.dynamic_update_slice_in_dim, axis=1)

    def add_piece(number: Any, now: tuple[Any, list[Any]]) -> tuple[Any, list[Any]]:
        (room, targets), begin = now, number * each
        if not large:
            return room, [put(target, columns(target, begin) + piece(begin), begin) for target in targets]
        room = put(room, piece(begin), each)

        def change(target: Any, at: Any, of_piece: Any) -> Any:
            return put(target, columns(target, at) + columns(room, each + of_piece), at)

        def changed(target: Any, start: Any) -> Any:
            """Add the columns of the piece that are the target's.  The target's first column is `start`."""
            at = jnp.clip(begin - start, 0, target.shape[1] - each)
            some = (begin - start > -each) & (begin - start < target.shape[1])
            return jax.lax.cond(some, change, lambda target, *_: target, target, at, at + start - begin)

        return room, [changed(*pair) for pair in zip(targets, starts, strict=False)]

    room = jnp.zeros((UNIT, 3 * each if large else 0), dtype)  # a piece lies in the middle, between zeros
    now = room, targets
    _, targets = add_piece(0, now) if pieces == 1 else jax.lax.fori_loop(0, pieces, add_piece, now)
    found = dict(zip(large, targets, strict=False))
    for start, place in zip(starts[len(large) :], small, strict=True):
        at, units = start - starts[len(large)], arrays[place].shape[1]
        found[place] = jax.lax.dynamic_slice_in_dim(targets[-1], at, units, 1, allow_negative_indices=False)
    return found


def from_bits(high: Any, low: Any, turn: Any, dtype: Any) -> tuple[Any, Any]:
    """Return two normals: bits (high, low) set the radius, `turn` the angle.  Relative error 2e-6, in float64 1e-13."""
    dtype = jnp.dtype(dtype)
    near_zero = high < np.uint32(2**31)
    v = _unit(jnp.where(near_zero, high, ~high), 32, dtype) + (
        _unit(jnp.where(near_zero, low, ~low), 64, dtype) + dtype.type(2.0**-65)
    )
    # numbers of terms of the power series: the next term is below the rounding error of float32, or of float64
    log_terms, sine_terms = (9, 7) if dtype.itemsize == 4 else (17, 11)
    s = v / (2 - v)  # at most 1/3
    complement = 2 * s * _horner([1.0 / (2 * k + 1) for k in range(log_terms)], s * s)
    radius = jnp.sqrt(2 * jnp.where(near_zero, -jnp.log(v), complement))
    sines = [(-1.0) ** k * (np.pi / 2) ** (2 * k + 1) / math.factorial(2 * k + 1) for k in range(sine_terms)]
    quarter = turn >> np.uint32(2)
    parts = []
    for part, sign in ((quarter, turn & np.uint32(1)), (np.uint32(2**30 - 1) - quarter, turn & np.uint32(2))):
        turns = _unit(part, 30, dtype) + dtype.type(2.0**-31)  # the angle, in units of a right angle
        sine = turns * _horner(sines, turns * turns)
        parts.append(radius * jnp.where(sign > 0, -sine, sine))
    return parts[0], parts[1]


def _horner(coefficients: list[float], x: Any) -> Any:
    """Return the value at x of the polynomial with these coefficients, the constant term first."""
    value = jnp.full_like(x, coefficients[-1])
    for coefficient in coefficients[-2::-1]:
        value = value * x + np.asarray(coefficient, x.dtype)
    return value


def _unit(word: Any, bits: int, dtype: Any) -> Any:
    """Return an integer of `bits` bits as a binary fraction: word / 2^bits."""
    return word.astype(dtype) * dtype.type(2.0**-bits)


class NoiseState(NamedTuple):
    """Key of the noise, and the number of steps taken so far."""

    key: Any
    count: Any


def noisy_mean(key: jax.Array, noise_multiplier: float, clip_norm: PyTree, expected_batch_size: float) -> Foreign:
    """Return an Optax transformation that turns a clipped sum into (clipped sum + noise) / expected batch size.

    Its input must be the *sum over the whole drawn batch of gradients clipped to clip_norm*, as ``clipped_sum`` returns
    it; add micro-batches first.  No code can check this: with a mean, or without clipping, the noise protects nothing.
    Use one `noisy_mean` for one tree, and give each branch of ``optax.multi_transform`` a key of its own: the same key
    draws the same noise for both parts, and their difference has none.

    Parameters
    ----------
    key : a JAX key of at least 256 bits, such as ``fresh_key()``, from which every call derives its own stream.
    noise_multiplier : from 1e-10 to 1e10: the standard deviation of the noise divided by ``sensitivity(clip_norm)``.
    clip_norm : as given to ``clipped_sum``.
    expected_batch_size : > 0, the divisor of the noisy sum; never the size of the batch that was drawn.

    Returns
    -------
    optax.GradientTransformation

    With Poisson sampling at rate q one call costs as much privacy as PoissonSampled(Gaussian(noise_multiplier), q).

    References
    ----------
    Abadi et al. 2016 (DP-SGD).

    >>> import jax.numpy as jnp, optax
    >>> from jaxacct.training import clipped_sum, fresh_key, noisy_mean, poisson
    >>> from jaxacct.training.step import noise
    >>> x, params, root = jnp.ones((100, 3)), jnp.zeros(3), fresh_key()
    >>> loss = lambda params, example: jnp.sum((params - example) ** 2)
    >>> steps = optax.chain(noisy_mean(root, 1.0, clip_norm=1.0, expected_batch_size=20.0), optax.sgd(0.5))
    >>> state = steps.init(params)
    >>> for step in range(2):
    ...     drawn = poisson(noise.stream(root, noise.SAMPLING, step), 100, 0.2)
    ...     mask = jnp.arange(100) < drawn.count
    ...     total = clipped_sum(loss, params, x[drawn.indices], mask, clip_norm=1.0).total
    ...     updates, state = steps.update(total, state, params)
    ...     params = optax.apply_updates(params, updates)
    >>> params.shape
    (3,)
    """
    optax = optional_package("optax", "noisy_mean")
    secret(key)
    expected = check("expected_batch_size", expected_batch_size, POSITIVE)
    # For a float32 sum, `add` rounds `std` to float32, perhaps down.  The last factor raises `std` by more than that.
    std = check("noise_multiplier", noise_multiplier, DEVIATION) * sensitivity(clip_norm) * (1.0 + 2.0**-20)

    def init(params: Any) -> NoiseState:
        return NoiseState(key, jnp.zeros((), jnp.int32))

    def update(total: Any, state: NoiseState, params: Any = None) -> tuple[Any, NoiseState]:
        noisy = add(stream(state.key, NOISE, state.count), total, std)
        return jax.tree.map(lambda g: g / expected, noisy), NoiseState(state.key, state.count + 1)

    return optax.GradientTransformation(init, update)
