"""Who takes part in a step, drawn by the host: the same records from the same keys as `step_function.draw`, in NumPy.

For data that the host loads.  Each rule mirrors the one of its name in `sampler`, whose page says why its draw is
exact; tests/test_training_sources_draws.py compares the two index by index, draws that are repeated included.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxacct.training.step import host_chacha, noise
from jaxacct.training.step.step_function import Numbers, StepRule
from jaxacct.training.step.step_mechanisms import ALLOCATION, FIXED, POISSON, TRUNCATED

__all__ = ["drawn", "members", "places"]

_PIECE = 2**20
"""Records at a time in a Poisson sample: words for all of 2**31 of them would take 8 GB."""


def places(rule: StepRule, size: int) -> int:
    """The places of a selection: room for all that it can hold."""
    return min(rule.cap or size, size)


def drawn(rule: StepRule, words: Any, pass_words: Any, size: int, now: Numbers) -> np.ndarray:
    """The members of a logical batch among so many records (or users), in their order."""
    key, pass_key = (host_chacha.stream(each, noise.SAMPLING) for each in (words, pass_words))
    if rule.sampling == POISSON:
        return _sampled(key, size, now.threshold)
    if rule.sampling == TRUNCATED:
        draw_key, order_key = host_chacha.split(key)
        order, taken = permutation(order_key, size), np.zeros(size, bool)
        taken[_sampled(draw_key, size, now.threshold)] = True
        return order[taken[order]][: places(rule, size)]
    if rule.sampling == ALLOCATION:
        return np.flatnonzero(slots(pass_key, size, int(now.size)) == int(now.position))
    if rule.sampling == FIXED:
        begin = int(now.size) * int(now.position)
        return permutation(pass_key, size)[begin : begin + int(now.size)]
    return permutation(key, size)[: int(now.size)]


def slots(key: Any, size: int, number: int) -> np.ndarray:
    """An independent slot for each record, uniform on 0 to number - 1; words beyond the last multiple are redrawn."""
    last = 2**32 - 1 - 2**32 % number
    found, again = np.zeros(size, np.uint32), np.ones(size, bool)
    while again.any():
        key, now = host_chacha.split(key)
        words = host_chacha.bits(now, size)
        found[again] = words[again] % np.uint32(number)
        again &= words > last
    return found


def permutation(key: Any, size: int) -> np.ndarray:
    """A random permutation of range(size): the order of 64-bit sort keys, drawn again if two are equal."""
    while True:
        key, now = host_chacha.split(key)
        high, low = host_chacha.bits(now, 2 * size).reshape(2, size).astype(np.uint64)
        sort_keys = high << np.uint64(32) | low
        order = np.argsort(sort_keys)
        in_order = sort_keys[order]
        if not (in_order[1:] == in_order[:-1]).any():
            return order


def _sampled(key: Any, size: int, threshold: np.ndarray) -> np.ndarray:
    """The members of a Poisson sample, in their order.  Low words are drawn only where they decide."""
    certain, high, low = threshold
    if certain:
        return np.arange(size)
    found = []
    for begin in range(0, size, _PIECE):
        words = host_chacha.bits(key, min(_PIECE, size - begin), begin)
        taken = words < high
        level = np.flatnonzero(words == high)
        taken[level] = host_chacha.bits_at(key, size + begin + level) < low
        found.append(begin + np.flatnonzero(taken))
    return np.concatenate(found)


def members(
    words: Any, order: np.ndarray, first: np.ndarray, count: np.ndarray, users: np.ndarray, most: int
) -> tuple[np.ndarray, np.ndarray]:
    """(numbers, weights) of the examples that a step takes of some users, shape (users, most): as `users.of_users`.

    order, first, count : of all users, from `users.grouped`.  users : none of them without examples.
    """
    count, first = count[users], first[users]
    kept = np.minimum(count, most)
    keys = host_chacha.fold_in(host_chacha.stream(words, noise.EXAMPLES), users)
    blocks = -(-most // 16)
    each = np.repeat(keys, blocks, axis=1)
    bits = host_chacha.keystream(each, np.tile(np.arange(blocks, dtype=np.uint32), users.size), (0, 0, 0))
    bits = bits.reshape(users.size, 16 * blocks)
    chosen = np.full((users.size, most), -1)
    for i in range(most):  # Floyd's algorithm
        last = count - kept + i
        pick = bits[:, i] % (last + 1)
        pick = np.where((chosen == pick[:, None]).any(1), last, pick)
        chosen[:, i] = np.where(i < kept, pick, -1)
    taken = chosen >= 0
    weights = taken / kept[:, None].astype(np.float32)
    return order[first[:, None] + np.where(taken, chosen, 0)], weights.astype(np.float32)
