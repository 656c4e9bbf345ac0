"""Users as the unit of privacy: all of a user's examples together have one gradient, which is clipped as one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxacct.core.validation import InputError

__all__ = ["UserData", "grouped", "mean_over_examples", "of_users", "user_data"]


class UserData(NamedTuple):
    """Examples, and whose they are.

    examples : pytree of arrays, the examples along the first axis.
    order : int32, the places of the examples, user by user.
    first, count : int32, one for each user: where the user's examples begin in ``order``, and how many there are.
    """

    examples: Any
    order: Any
    first: Any
    count: Any


def user_data(examples: Any, users: Any, number: int) -> UserData:
    """Examples grouped by their users.

    Parameters
    ----------
    examples : pytree of arrays, the examples along the first axis.
    users : integers, one for each example: whose it is, from 0 to number - 1.  A user may have none.
    number : of users; public.

    Raises
    ------
    InputError : users that are no integers in this range, or not one for each example.

    >>> data = user_data(jnp.arange(4.0), [2, 0, 2, 2], 3)
    >>> data.order.tolist(), data.first.tolist(), data.count.tolist()
    ([1, 0, 2, 3], [0, 1, 1], [1, 0, 3])
    """
    sizes = {np.shape(leaf)[:1] for leaf in jax.tree_util.tree_leaves(examples)}
    return UserData(examples, *(jnp.asarray(column, jnp.int32) for column in grouped(users, number, sizes)))


def grouped(users: Any, number: int, sizes: set[tuple[int, ...]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The columns order, first and count of `UserData`, for examples whose first axes are given."""
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
    """(their examples, weights) of some users, shapes (users, most, ...) and (users, most); and who has any.

    before : where the data are a part of all, how many users come before them.

    Of a user with more than ``most`` examples a random subset of so many is taken, for this key [Floyd's algorithm].
    The weights of a user's examples are equal and add up to 1; what fills the other places is the user's own first
    example, of weight 0.  So nothing of a user depends on another one.  (Subsets are uniform up to 2^-32 times the
    number of examples; no guarantee depends on it.)
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


def mean_over_examples(loss_fn: Callable[..., Any]) -> Callable[..., Any]:
    """(params, (examples, weights)[, key]) -> the weighted mean of what loss_fn returns for one user's examples.

    With a key, the user's, each example has one of its own, from it and the example's place among those of the user.
    """

    def loss(params: Any, user: tuple[Any, Any], *key: Any) -> Any:
        examples, weights = user
        places = jnp.arange(weights.shape[0])
        own = [jax.vmap(jax.random.fold_in, (None, 0))(each, places) for each in key]
        found = jax.vmap(loss_fn, (None, 0, *(0 for _ in own)))(params, examples, *own)

        def mean(each: Any) -> Any:
            inexact = jnp.issubdtype(each.dtype, jnp.inexact)
            dtype = each.dtype if inexact else jnp.result_type(each, jnp.float32)  # a bool is counted, as integers are
            return jnp.sum(each * weights.astype(dtype).reshape(-1, *(1,) * (each.ndim - 1)), axis=0)

        return jax.tree.map(mean, found)

    return loss
