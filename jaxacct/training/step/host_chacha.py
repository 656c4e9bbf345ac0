"""The keystream of `jaxacct.core.chacha` in NumPy, word for word: draws for data that the host loads.

ChaCha20 is integer arithmetic, so both come out the same to the last bit.  NumPy lets other threads run meanwhile.
"""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["bits", "bits_at", "fold_in", "keystream", "split", "stream"]

_CONSTANTS = np.array([0x61707865, 0x3320646E, 0x79622D32, 0x6B206574], np.uint32)
"""The text "expand 32-byte k"."""
_BITS, _SPLIT, _FOLD_IN = range(3)
"""Last word of the nonce, as in `jaxacct.core.chacha`."""
_PIECE = 8192
"""Blocks at a time: half a megabyte of state, which stays in the processor's cache."""


def keystream(key: Any, counter: Any, nonce: tuple[Any, Any, Any]) -> np.ndarray:
    """The ChaCha20 block function [RFC 8439, section 2.3]: uint32, shape (n, 16), a row for each counter.

    key : uint32, shape (8,), or (8, n) with a key for each counter.  nonce : three numbers, or arrays of (n,).

    >>> words = keystream(np.zeros(8, np.uint32), np.zeros(1, np.uint32), (0, 0, 0))
    >>> words.astype("<u4").tobytes()[:8].hex()  # RFC 8439, appendix A.1, vector 1
    '76b8e0ada0f13d90'
    """
    counter = np.asarray(counter, np.uint32)
    key = np.broadcast_to(np.asarray(key, np.uint32).reshape(8, -1), (8, counter.size))
    last = [np.broadcast_to(np.asarray(word, np.uint32), counter.shape) for word in nonce]
    found = np.empty((counter.size, 16), np.uint32)
    for begin in range(0, counter.size, _PIECE):
        part = slice(begin, begin + _PIECE)
        found[part] = _columns(key[:, part], counter[part], [word[part] for word in last]).T
    return found


def fold_in(key: Any, data: Any) -> np.ndarray:
    """The words of ``jax.random.fold_in(key, data)``; of several data, a column for each."""
    data = np.asarray(data, np.uint32)
    found = keystream(key, np.zeros(data.size, np.uint32), (data.reshape(-1), 0, _FOLD_IN))[:, :8]
    return found.T if data.ndim else found[0]


def split(key: Any) -> tuple[np.ndarray, np.ndarray]:
    """The words of the two keys of ``jax.random.split(key)``."""
    words = keystream(key, np.zeros(1, np.uint32), (0, 0, _SPLIT))[0]
    return words[:8], words[8:]


def bits(key: Any, count: int, first: int = 0) -> np.ndarray:
    """Words `first` to `first + count - 1` of ``jax.random.bits(key, (many,), jnp.uint32)``."""
    begin = first // 16
    blocks = np.arange(begin, -(-(first + count) // 16), dtype=np.uint32)
    return keystream(key, blocks, (0, 0, _BITS)).reshape(-1)[first - 16 * begin :][:count]


def bits_at(key: Any, places: np.ndarray) -> np.ndarray:
    """Single words of the same, by their places."""
    return keystream(key, places // 16, (0, 0, _BITS))[np.arange(places.size), places % 16]


def stream(key: Any, purpose: int) -> np.ndarray:
    """The words of ``noise.stream(key, purpose)``."""
    return fold_in(fold_in(key, purpose), 0)


def _columns(key: np.ndarray, counter: np.ndarray, nonce: list[np.ndarray]) -> np.ndarray:
    """Keystream, a column of 16 words for each counter."""
    start = np.empty((16, counter.size), np.uint32)
    start[:4], start[4:12], start[12] = _CONSTANTS[:, None], key, counter
    start[13:] = nonce
    a, b, c, d = (start[4 * i : 4 * i + 4].copy() for i in range(4))
    spare = np.empty_like(a)
    for _ in range(10):
        _quarter_rounds(a, b, c, d, spare)
        b, c, d = b[[1, 2, 3, 0]], c[[2, 3, 0, 1]], d[[3, 0, 1, 2]]
        _quarter_rounds(a, b, c, d, spare)
        b, c, d = b[[3, 0, 1, 2]], c[[2, 3, 0, 1]], d[[1, 2, 3, 0]]
    return start + np.concatenate([a, b, c, d])


def _quarter_rounds(a: np.ndarray, b: np.ndarray, c: np.ndarray, d: np.ndarray, spare: np.ndarray) -> None:
    """Four quarter rounds side by side, in place."""
    for left, right in ((16, 12), (8, 7)):
        a += b
        d ^= a
        _rotate(d, left, spare)
        c += d
        b ^= c
        _rotate(b, right, spare)


def _rotate(x: np.ndarray, by: int, spare: np.ndarray) -> None:
    np.right_shift(x, 32 - by, out=spare)
    np.left_shift(x, by, out=x)
    np.bitwise_or(x, spare, out=x)
