"""ChaCha20 [RFC 8439] as a JAX random generator with keys of 256 bits. Under a key, each purpose has its own keystream.

Threefry, JAX's default, has keys of 64 bits. An attacker can try them all. The functions `host_...` run in NumPy.
"""

from __future__ import annotations

import functools
import math
import secrets
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.random import define_prng_impl

from jaxacct.core.validation import InputError

_CONSTANTS = np.array([0x61707865, 0x3320646E, 0x79622D32, 0x6B206574], np.uint32)
"""Constants of ChaCha20: the text "expand 32-byte k" as four words."""
_BITS, _SPLIT, _FOLD_IN, _SEED, _NOISE = range(5)
"""Purposes of the keystream. The purpose is the last word of the nonce, so no two purposes share a block."""
_MIRRORS = (np.arange(1, 5)[:, None] - np.arange(4)) % 4
"""For each row of the state, the order that puts the diagonals into the columns. Applied twice, it changes nothing."""
_HOST_BLOCKS = 8192
"""Number of blocks that NumPy computes at a time: half a megabyte of state, which stays in the processor's cache."""


@jax.jit
def block(key: Any, counter: Any, nonce: Any) -> jax.Array:
    """Return uint32 of shape (n, 16): 16 words of keystream for each of n counters [RFC 8439, section 2.3]."""
    key, counter, nonce = (jnp.asarray(x, jnp.uint32) for x in (key, counter, nonce))
    return _columns(key, counter, tuple(nonce)).T


def _columns(
    key: Any,  # (8,), in NumPy also (8, n)
    counter: Any,
    nonce: tuple[Any, Any, Any],  # words: numbers, or arrays (n,)
    xp: Any = jnp,
) -> Any:
    """Return uint32 of shape (16, n): a column of keystream for each of n counters. `xp` is `jax.numpy` or NumPy."""
    wide = lambda words: xp.broadcast_to(words[:, None] if words.ndim == 1 else words, (words.shape[0], counter.size))
    last = [xp.broadcast_to(xp.asarray(word, xp.uint32), counter.shape) for word in (counter, *nonce)]
    start = (wide(xp.asarray(_CONSTANTS)), wide(key[:4]), wide(key[4:]), xp.stack(last))
    if xp is np:
        end = tuple(row.copy() for row in start)
        for number in range(20):
            end = _round(number, end)
    else:
        end = jax.lax.fori_loop(0, 20, _round, start)
    return xp.concatenate([x + y for x, y in zip(start, end, strict=True)])


def noise_words(key: Any, counter: Any, first: Any, second: Any) -> Any:
    """Return noise keystream, uint32 (16, n), for n triples (counter, first, second). Use a triple once per key."""
    return _columns(key, counter, (first, second, _NOISE))


def _round(_: Any, rows: tuple[Any, ...]) -> tuple[Any, ...]:
    """Apply a quarter round to each column, then exchange columns and diagonals. NumPy's arrays change in place."""
    # XLA's program for CPUs is faster with `stack`, NumPy without it
    mirrored = lambda row, order: row[order] if isinstance(row, np.ndarray) else jnp.stack([row[i] for i in order])
    return tuple(map(mirrored, _quarter_rounds(*rows), _MIRRORS))


def _quarter_rounds(a: Any, b: Any, c: Any, d: Any) -> tuple[Any, ...]:
    for left, right in ((16, 12), (8, 7)):
        a += b
        d ^= a
        d = _rotate(d, left)
        c += d
        b ^= c
        b = _rotate(b, right)
    return a, b, c, d


def _rotate(x: Any, by: int) -> Any:
    left = x << np.uint32(by)
    x >>= np.uint32(32 - by)
    left |= x
    return left


def _nonce(purpose: int, first: Any = 0, second: Any = 0) -> Any:
    """Return the three words of a nonce; the last word is the purpose."""
    return jnp.stack([jnp.asarray(x, jnp.uint32) for x in (first, second, purpose)])


@jax.jit
def _seed(seed: Any) -> Any:
    """Return a key made from an integer of at most 64 bits, for tests only. ``fresh_key`` draws keys for real runs."""
    low = jax.lax.convert_element_type(seed, jnp.uint32)
    half = jax.lax.shift_right_logical(seed, jax.lax.full_like(seed, 32)) if seed.dtype.itemsize == 8 else 0
    high = jnp.asarray(half).astype(jnp.uint32)
    return block(jnp.zeros(8, jnp.uint32), jnp.zeros(1, jnp.uint32), _nonce(_SEED, low, high))[0, :8]


@functools.partial(jax.jit, static_argnums=1)
def _split(key: Any, shape: tuple[int, ...]) -> Any:
    count = math.prod(shape)
    blocks = block(key, jnp.arange((count + 1) // 2, dtype=jnp.uint32), _nonce(_SPLIT))
    return blocks.reshape(-1, 8)[:count].reshape(*shape, 8)


@jax.jit
def _fold_in(key: Any, data: Any) -> Any:
    return block(key, jnp.zeros(1, jnp.uint32), _nonce(_FOLD_IN, data))[0, :8]


@functools.partial(jax.jit, static_argnums=(1, 2))
def _random_bits(key: Any, bit_width: int, shape: tuple[int, ...]) -> Any:
    """Return the keystream under a nonce of zeros, as numbers of `bit_width` bits; a 64-bit number takes two words."""
    count = math.prod(shape)
    blocks = -(-count * bit_width // 512)
    if blocks > 2**32:  # the block counter has 32 bits [RFC 8439], so more blocks would repeat the keystream
        raise InputError(f"{count} draws from one key must be <= 2**36 words; split the key first")
    if blocks > 48:  # a multiple of 16 blocks fills XLA's vectors and compiles in two thirds of the time
        blocks += -blocks % 16
    stream = block(key, jnp.arange(blocks, dtype=jnp.uint32), _nonce(_BITS)).reshape(-1)
    if bit_width == 32:
        return stream[:count].reshape(shape)
    if bit_width == 64:
        stream = stream.reshape(-1, 2)
    return jax.lax.bitcast_convert_type(stream, jnp.dtype(f"uint{bit_width}")).reshape(-1)[:count].reshape(shape)


CHACHA20 = define_prng_impl(
    key_shape=(8,),
    seed=_seed,
    split=_split,
    random_bits=_random_bits,
    fold_in=_fold_in,
    name="jaxacct_chacha20",
    tag="cc20",
)
"""Implementation for ``jax.random.key(seed, impl=CHACHA20)``. ``fresh_key`` makes keys with 256 random bits."""


def fresh_key() -> jax.Array:
    """Draw a ChaCha20 key of 256 bits from the operating system. Use the key for one training run only.

    Returns
    -------
    Typed JAX key. Anyone who knows the key can compute the noise.

    References
    ----------
    RFC 8439 (ChaCha20).

    >>> import jax
    >>> jax.random.normal(fresh_key(), (3,)).shape
    (3,)
    """
    return key_from_bytes(secret_bytes(None))


def secret_bytes(key: bytes | None) -> bytes:
    """Return the given 32 secret bytes; if None is given, draw 32 bytes from the operating system."""
    if key is None:
        return secrets.token_bytes(32)
    if not isinstance(key, bytes) or len(key) != 32:
        raise InputError("key must be 32 bytes; leave it out, or use secrets.token_bytes(32)")
    return key


def key_from_bytes(data: bytes) -> jax.Array:
    """Return the ChaCha20 key made of 32 bytes, little-endian. Anyone who knows the bytes can compute the noise."""
    words = np.frombuffer(secret_bytes(data), "<u4").astype(np.uint32)
    return jax.random.wrap_key_data(jnp.asarray(words), impl=CHACHA20)


def secret(key: Any) -> Any:
    """Return the key if it has at least 256 bits, else raise InputError. Whether the bits are random is not checked."""
    if not jnp.issubdtype(getattr(key, "dtype", np.dtype(object)), jax.dtypes.prng_key):
        raise InputError(f"key = {key!r:.40} must be a typed JAX key of 256 bits; use jaxacct.training.fresh_key()")
    bits = 32 * math.prod(jax.random.key_data(key).shape[key.ndim :])
    if not bits >= 256:
        raise InputError(f"key has {bits} bits, must have at least 256; use jaxacct.training.fresh_key()")
    return key


def key_words(key: Any) -> Any:
    """Return the eight words of a ChaCha20 key; for a key of another generator, return 256 bits drawn with that key."""
    if jax.random.key_impl(secret(key)) == CHACHA20:
        return jax.random.key_data(key)
    return jax.random.bits(jax.random.fold_in(key, 0), (8,), jnp.uint32)


def host_block(key: Any, counter: Any, nonce: tuple[Any, Any, Any]) -> np.ndarray:
    """Compute `block` in NumPy, as uint32 of shape (n, 16). Key and nonce have the shapes that `_columns` takes."""
    counter, key = np.asarray(counter, np.uint32), np.asarray(key, np.uint32)
    last = [np.broadcast_to(np.asarray(word, np.uint32), counter.shape) for word in nonce]
    found = np.empty((counter.size, 16), np.uint32)
    for begin in range(0, counter.size, _HOST_BLOCKS):
        part = slice(begin, begin + _HOST_BLOCKS)
        first, second, purpose = (word[part] for word in last)
        own = key if key.ndim == 1 else key[:, part]
        found[part] = _columns(own, counter[part], (first, second, purpose), np).T
    return found


def host_fold_in(key: Any, data: Any) -> np.ndarray:
    """Return the words of ``jax.random.fold_in(key, data)``: shape (8,), or (8, n) for an array of n numbers `data`."""
    data = np.asarray(data, np.uint32)
    found = host_block(key, np.zeros(data.size, np.uint32), (data.reshape(-1), 0, _FOLD_IN))[:, :8]
    return found.T if data.ndim else found[0]


def host_split(key: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return the words of the two keys of ``jax.random.split(key)``."""
    words = host_block(key, np.zeros(1, np.uint32), (0, 0, _SPLIT))[0]
    return words[:8], words[8:]


def host_bits(key: Any, count: int, first: int = 0) -> np.ndarray:
    """Return words `first` to `first + count - 1` of ``jax.random.bits(key, (n,), jnp.uint32)``; n >= first + count."""
    begin = first // 16
    blocks = np.arange(begin, -(-(first + count) // 16), dtype=np.uint32)
    return host_block(key, blocks, (0, 0, _BITS)).reshape(-1)[first - 16 * begin :][:count]
