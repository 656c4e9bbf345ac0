"""Chooses the records that take part in a step (one function for each batch rule), and the examples of users.

For data that the host loads, the functions `host_...` draw the same records in NumPy, from the same random words.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxacct.core.chacha import host_bits, host_block, host_fold_in, host_split, secret
from jaxacct.core.types import ArrayLike
from jaxacct.core.validation import PROBABILITY, InputError, check

Carry = TypeVar("Carry")
_HOST_PIECE = 2**20  # records that `host_poisson` draws at a time; 2**31 records at once would take 8 GB


class Selection(NamedTuple):
    """Records of one logical batch."""

    indices: Any  # int32 array with room for the largest batch; the first `count` entries are the records' numbers
    count: Any


def threshold(sampling_probability: ArrayLike) -> np.ndarray:
    """Return floor(q 2^64), shape (3,) or (3, n), as uint32 words: 1 if q is 1 (else 0), high 32 bits, low 32 bits."""
    q = np.asarray(check("sampling_probability", sampling_probability, PROBABILITY))
    certain = np.floor(q)
    high = np.floor(np.ldexp(q - certain, 32))  # floor, ldexp and these differences are exact in floating point
    low = np.floor(np.ldexp(np.ldexp(q - certain, 32) - high, 32))
    return np.stack([certain, high, low]).astype(np.uint32)


def poisson(key: jax.Array, dataset_size: int, sampling_probability: ArrayLike) -> Selection:
    """Draw every example independently with probability q, that is, if its 64 random bits are below ``threshold(q)``.

    Parameters
    ----------
    key : a JAX key of at least 256 bits, such as ``fresh_key()``; it determines the batch.
    dataset_size : int from 1 to 2**31 - 1, static.
    sampling_probability : the rate q, or one rate for each example, chosen without the data; or ``threshold(rates)``.
        Thresholds may be traced, rates may not.

    Returns
    -------
    Selection : the numbers of the drawn examples, in ascending order.

    A step with this batch is accounted for as PoissonSampled(Gaussian(noise_multiplier), q), for neighbouring data sets
    that differ by one added or removed example.  If each example has its own rate, q is the rate of the added or
    removed example, or the largest rate.  Divide the sum of the gradients by the sum of the rates, never by the count.

    References
    ----------
    Abadi et al. 2016, "Deep learning with differential privacy".

    >>> from jaxacct.training import fresh_key
    >>> int(poisson(fresh_key(), 1000, 1.0).count)
    1000
    """
    return _first_of(_sampled(key, dataset_size, sampling_probability, several=True))


def truncated_poisson(key: jax.Array, dataset_size: int, sampling_probability: ArrayLike, cap: int) -> Selection:
    """Draw a Poisson sample; if it has more than ``cap`` records, keep a uniformly random subset of ``cap`` of them.

    Parameters
    ----------
    key, dataset_size, sampling_probability : as for `poisson`, but with one rate for all records.
    cap : int, static: the number of places of the selection.

    Returns
    -------
    Selection : the number of records before the cut is not in it, and must never be released.

    The first ``cap`` drawn records in an independent random order are kept.  Subsets of one size are exactly equally
    likely.  A step is accounted for as TruncatedPoissonSampled(Gaussian(noise_multiplier), q, dataset_size, cap).

    References
    ----------
    Ganesh 2025, arXiv 2508.15089.

    >>> from jaxacct.training import fresh_key
    >>> few = truncated_poisson(fresh_key(), 1000, 0.9, 8)
    >>> few.indices.shape, int(few.count), len(set(few.indices.tolist()))
    ((8,), 8, 8)
    """
    places = _size("cap", cap)
    draw_key, order_key = jax.random.split(secret(key))
    taken = _sampled(draw_key, dataset_size, sampling_probability)
    order = permutation(order_key, taken.shape[0])
    kept, count = _first_of(taken[order], places)
    return Selection(order[kept], count)


def random_allocation(round_key: jax.Array, dataset_size: int, number: ArrayLike, position: ArrayLike) -> Selection:
    """Return the records of one slot.  In each round every record draws one of ``number`` slots uniformly.

    Parameters
    ----------
    round_key : one JAX key of at least 256 bits for all steps of the round, and for no other round.
    dataset_size : int from 1 to 2**31 - 1, static.
    number, position : the number of slots in the round, and the slot, from 0; may be traced.

    Returns
    -------
    Selection : every record is in the selection of exactly one slot of the round.  Indices are in ascending order.

    A whole round is accounted for as RandomAllocation(Gaussian(noise_multiplier), number).

    References
    ----------
    Chua et al. 2024 (balls and bins); Feldman and Shenfeld 2025, arXiv 2502.08202.

    >>> from jaxacct.training import fresh_key
    >>> key = fresh_key()
    >>> sorted(i for p in range(3) for b in [random_allocation(key, 5, 3, p)] for i in b.indices[: b.count].tolist())
    [0, 1, 2, 3, 4]
    """
    return _first_of(slots(round_key, dataset_size, number) == jnp.asarray(position, jnp.uint32))


def cyclic_poisson(
    key: jax.Array,
    group_key: jax.Array,
    dataset_size: int,
    sampling_probability: ArrayLike,
    number: ArrayLike,
    position: ArrayLike,
) -> Selection:
    """Draw each record of one group independently with probability q, and no record of any other group.

    Parameters
    ----------
    key, dataset_size, sampling_probability : as for `poisson`, but with one rate for all records.
    group_key : one JAX key of at least 256 bits for all steps of a run, and for no other run; it draws the groups.
    number : the number of groups; may be traced.  Each record is in one of them, independently and uniformly.
    position : the number of the group, from 0; step i has group i modulo ``number``.  May be traced.

    Returns
    -------
    Selection : indices are in ascending order.

    A run is accounted for as MatrixMechanism(strategy, s, CyclicPoisson(number, q)), for neighbouring data sets that
    differ by one added or removed record.

    References
    ----------
    Choquette-Choo et al. 2023, "(Amplified) Banded Matrix Factorization", arXiv 2306.08153.

    >>> from jaxacct.training import fresh_key
    >>> key, group_key = fresh_key(), fresh_key()
    >>> drawn = [cyclic_poisson(key, group_key, 5, 1.0, 3, group) for group in range(3)]
    >>> sorted(record for batch in drawn for record in batch.indices[: batch.count].tolist())
    [0, 1, 2, 3, 4]
    """
    turn = slots(group_key, dataset_size, number) == jnp.asarray(position, jnp.uint32)
    return _first_of(turn & _sampled(key, dataset_size, sampling_probability))


def slots(key: Any, size: int, number: Any) -> Any:
    """Draw a slot for each of ``size`` records: independent uint32, exactly uniform on 0 to number - 1."""
    number = jnp.asarray(number, jnp.uint32)
    # In uint32, 0 - number is 2^32 - number.  So number divides last + 1, and a word up to last is uniform mod number.
    last = jnp.uint32(2**32 - 1) - (jnp.uint32(0) - number) % number

    def draw(state: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
        key, found, again = state
        key, now = jax.random.split(key)
        bits = jax.random.bits(now, (_size("dataset_size", size),), jnp.uint32)
        return key, jnp.where(again, bits % number, found), again & (bits > last)

    none = jnp.zeros(size, jnp.uint32), jnp.ones(size, bool)
    return jax.lax.while_loop(lambda state: jnp.any(state[2]), draw, (secret(key), *none))[1]


def without_replacement(key: jax.Array, dataset_size: int, batch_size: ArrayLike) -> Selection:
    """Draw a uniformly random set of exactly ``batch_size`` examples: the beginning of a random permutation.

    Parameters
    ----------
    key, dataset_size : as for `poisson`.
    batch_size : an integer; may be traced.

    Returns
    -------
    Selection : batch_size examples, or all examples if there are fewer.

    A step is accounted for as SampledWithoutReplacement(Gaussian(noise_multiplier), batch_size / dataset_size).

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


def fixed_batches(epoch_key: jax.Array, dataset_size: int, batch_size: ArrayLike, position: ArrayLike) -> Selection:
    """Return batch number ``position`` of an epoch: the data are shuffled once, then cut into batches.

    Every example is in exactly one of the ceil(dataset_size / batch_size) batches, the last of which may be smaller.
    There is no amplification by sampling: the epoch is accounted for as one Gaussian mechanism.

    Parameters
    ----------
    epoch_key : one JAX key of at least 256 bits for all batches of the epoch.
    dataset_size : int from 1 to 2**31 - 1, static.
    batch_size, position : integers; may be traced.

    Returns
    -------
    Selection

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
    """Draw a random permutation of range(size), int32: it sorts random 64-bit numbers, drawn again until all differ."""

    def draw(key: Any) -> tuple[Any, Any, Any]:
        key, now = jax.random.split(key)
        bits = jax.random.bits(now, (2, size), jnp.uint32)
        high, low, order = jax.lax.sort((bits[0], bits[1], jnp.arange(size, dtype=jnp.int32)), num_keys=2)
        return key, order, jnp.any((high[1:] == high[:-1]) & (low[1:] == low[:-1]))

    return jax.lax.while_loop(lambda drawn: drawn[2], lambda drawn: draw(drawn[0]), draw(secret(key)))[1]


def _sampled(key: Any, dataset_size: int, sampling_probability: Any, several: bool = False) -> Any:
    """Return for each record whether it is in a Poisson sample.  With `several` each record may have its own rate."""
    size = _size("dataset_size", dataset_size)
    given = getattr(sampling_probability, "dtype", None) == np.uint32
    words = sampling_probability if given else threshold(sampling_probability)
    if np.shape(words) != (3,) and not (several and np.shape(words) == (3, size)):
        each = f", or one for each of {size} records" if several else "; only `poisson` has a rate for each record"
        raise InputError(f"sampling_probability has shape {np.shape(words)[1:]}, must be a number{each}")
    certain, high, low = (jnp.asarray(words, jnp.uint32)[i] for i in range(3))
    bits = jax.random.bits(secret(key), (2, size), jnp.uint32)
    return (certain > 0) | (bits[0] < high) | ((bits[0] == high) & (bits[1] < low))


def _first_of(taken: Any, most: int | None = None) -> Selection:
    """Return the records for which `taken` is True, ascending: the first `most`, or all.  `jnp.nonzero` is slower."""
    size = taken.shape[0]
    places = size if most is None else most
    rank = jax.lax.cumsum(taken.astype(jnp.int32))  # for a taken record, its number among the taken records, from 1
    where = jnp.where(taken, rank - 1, places)  # mode="drop" drops a record whose place is `places` or more
    indices = jnp.zeros(places, jnp.int32).at[where].set(jnp.arange(size, dtype=jnp.int32), mode="drop")
    return Selection(indices, jnp.minimum(rank[-1], places))


def over_micro_batches(
    selection: Selection,
    micro_size: int,
    body: Callable[[Carry, Any, Any], Carry],
    init: Carry,
    *,
    all_places: bool = False,
) -> Carry:
    """Fold ``body(carry, indices, mask)`` over the selection in micro-batches of one static size.

    Parameters
    ----------
    selection : Selection
    micro_size : int, static: examples in one call of body.
    body : (carry, indices, mask) -> carry.  Places beyond the last example have mask False and index 0.
    init : the first carry.
    all_places : static: whether to go through all places, whatever the count, so that every draw takes the same work.

    Returns
    -------
    The last carry.  Without all_places, body runs ceil(count / micro_size) times, in the same program for every count.

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

    rounds = padded.shape[0] // micro if all_places else (selection.count + micro - 1) // micro
    return jax.lax.fori_loop(0, rounds, one, init)


def _size(name: str, value: Any) -> int:
    """Return the value as an int if it is a number of examples that fits in int32; else raise InputError."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or not 1 <= value < 2**31:
        raise InputError(f"{name} = {value!r:.40} must be an integer from 1 to 2**31 - 1; use a number of examples")
    return int(value)


class UserData(NamedTuple):
    """Examples, and which of them belong to each user."""

    examples: Any  # pytree of arrays, whose first axes run over all examples of all users
    order: Any  # the positions of all examples along these axes, sorted by user
    first: Any  # for each user, the index in `order` at which the positions of this user's examples begin
    count: Any


def user_data(examples: Any, users: Any, number: int) -> UserData:
    """Return a `UserData` of the examples.  `users` has the user of each example, an integer from 0 to number - 1."""
    sizes = {np.shape(leaf)[:1] for leaf in jax.tree_util.tree_leaves(examples)}
    return UserData(examples, *(jnp.asarray(column, jnp.int32) for column in grouped(users, number, sizes)))


def grouped(users: Any, number: int, sizes: set[tuple[int, ...]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the fields order, first and count of `UserData`; `sizes` holds the shapes (n,) of the first axes."""
    ids = np.asarray(users)
    if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer) or sizes != {ids.shape}:
        raise InputError(
            f"users has shape {ids.shape} and dtype {ids.dtype}, must be one integer for each example, "
            f"first axes {sorted(sizes)}; give the user of every example"
        )
    outside = np.flatnonzero((ids < 0) | (ids >= number))
    if outside.size:
        raise InputError(
            f"users[{outside[0]}] = {ids[outside[0]]} must be from 0 to {number - 1}, one less than dataset_size; "
            "number the users, as numpy.unique(users, return_inverse=True)[1] does"
        )
    count = np.bincount(ids, minlength=number)
    first = np.cumsum(count) - count
    return np.argsort(ids, kind="stable"), first, count


def of_users(key: Any, data: UserData, users: Any, most: int, before: Any = None) -> tuple[tuple[Any, Any], Any]:
    """For some users, return ((examples (users, most, ...), weights (users, most)), whether each user has examples).

    If a user has n > most examples, `most` of them are drawn, each uniformly up to a relative error of n 2^-32.  No
    privacy guarantee depends on this error.  The first user in `data` has number `before`, by default 0.
    """
    count, first = data.count[users], data.first[users]
    kept = jnp.minimum(count, most)

    def places(user: Any, count: Any, kept: Any) -> Any:
        bits = jax.random.bits(jax.random.fold_in(key, user), (most,), jnp.uint32)

        def one(i: Any, chosen: Any) -> Any:
            last = count - kept + i
            drawn = (bits[i] % (jnp.maximum(last, 0).astype(jnp.uint32) + 1)).astype(jnp.int32)
            pick = jnp.where(jnp.any(chosen == drawn), last, drawn)
            return chosen.at[i].set(jnp.where(i < kept, pick, -1))

        return jax.lax.fori_loop(0, most, one, jnp.full(most, -1, jnp.int32))

    numbers = users if before is None else users + before
    chosen = jax.vmap(places)(numbers, count, kept)
    taken = chosen >= 0
    where = data.order[jnp.where(taken, first[:, None] + chosen, first[:, None])]
    weights = taken / jnp.maximum(kept, 1)[:, None].astype(jnp.float32)
    return (jax.tree.map(lambda a: a[where], data.examples), weights), kept > 0


def host_poisson(key: Any, size: int, threshold: np.ndarray) -> np.ndarray:
    """Compute in NumPy the indices of the records that `poisson` draws."""
    if threshold[0].all():
        return np.arange(size)
    found, each = [], np.broadcast_to(threshold.reshape(3, -1), (3, size))
    for begin in range(0, size, _HOST_PIECE):
        certain, high, low = each[:, begin : begin + _HOST_PIECE]
        words = host_bits(key, certain.size, begin)
        taken = (words < high) | (certain > 0)
        level = np.flatnonzero((words == high) & (certain == 0))  # only these records need their low 32 bits
        places = size + begin + level
        taken[level] = host_block(key, places // 16, (0, 0, 0))[np.arange(places.size), places % 16] < low[level]
        found.append(begin + np.flatnonzero(taken))
    return np.concatenate(found)


def host_slots(key: Any, size: int, number: int) -> np.ndarray:
    """Compute in NumPy the slots that `slots` draws."""
    last = 2**32 - 1 - 2**32 % number
    found, again = np.zeros(size, np.uint32), np.ones(size, bool)
    while again.any():
        key, now = host_split(key)
        words = host_bits(now, size)
        found[again] = words[again] % np.uint32(number)
        again &= words > last
    return found


def host_permutation(key: Any, size: int) -> np.ndarray:
    """Compute in NumPy the permutation that `permutation` draws."""
    while True:
        key, now = host_split(key)
        high, low = host_bits(now, 2 * size).reshape(2, size).astype(np.uint64)
        sort_keys = high << np.uint64(32) | low
        order = np.argsort(sort_keys)
        in_order = sort_keys[order]
        if not (in_order[1:] == in_order[:-1]).any():
            return order


def host_of_users(
    key: Any, order: np.ndarray, first: np.ndarray, count: np.ndarray, users: np.ndarray, most: int
) -> tuple[np.ndarray, np.ndarray]:
    """Compute in NumPy (positions, weights) of `of_users`, each (users.size, most).  Each user must have examples."""
    count, first = count[users], first[users]
    kept = np.minimum(count, most)
    blocks = -(-most // 16)
    each = np.repeat(host_fold_in(key, users), blocks, axis=1)
    bits = host_block(each, np.tile(np.arange(blocks, dtype=np.uint32), users.size), (0, 0, 0))
    bits = bits.reshape(users.size, 16 * blocks)
    chosen = np.full((users.size, most), -1)
    for i in range(most):
        last = count - kept + i
        pick = bits[:, i] % (last + 1)
        pick = np.where((chosen == pick[:, None]).any(1), last, pick)
        chosen[:, i] = np.where(i < kept, pick, -1)
    taken = chosen >= 0
    weights = taken / kept[:, None].astype(np.float32)
    return order[first[:, None] + np.where(taken, chosen, 0)], weights.astype(np.float32)
