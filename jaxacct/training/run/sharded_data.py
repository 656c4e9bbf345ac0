"""Data on the devices of a mesh: each has the rows of its own records, or of its own users."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jaxacct.core.validation import InputError
from jaxacct.training.run.processes import Processes
from jaxacct.training.step.key_derivation import digest
from jaxacct.training.step.sharded_layout import over_examples
from jaxacct.training.step.users import UserData, grouped

__all__ = ["rows_on_mesh", "users_on_mesh"]


def rows_on_mesh(data: Any, mesh: Mesh, size: int) -> Any:
    """A pytree of arrays with one row for each record: r = ceil(size / devices) rows on each device, in their order.

    Of arrays on the host each process reads the rows of its own devices alone, so a memory map will do.  What is
    missing in the end is filled with zeros, which are never drawn.  Arrays that lie on several processes already are
    moved.
    """
    rows = -(-size // mesh.size)
    where = NamedSharding(mesh, over_examples(mesh))

    def put(leaf: Any) -> Any:
        if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
            if size % mesh.size:
                raise InputError(
                    f"data has {size} rows over several processes, must be a multiple of {mesh.size}, the mesh's "
                    "devices; give every process an array of all rows, of which it reads its own"
                )
            return jax.jit(lambda rows: rows, out_shardings=where)(leaf)
        array, dtype = _on_host(leaf)
        read = lambda begin: np.asarray(array[begin : min(begin + rows, size)])
        return _filled(read, (rows, *array.shape[1:]), dtype, where)

    return jax.tree.map(put, data)


def users_on_mesh(data: Any, users: Any, mesh: Mesh, size: int, processes: Processes) -> UserData:
    """Examples grouped by their users, as `user_data` does it: every device has all examples of its own users.

    Every device has room for as many examples as the one with the most.
    """
    ids = np.asarray(users)
    if any(isinstance(leaf, jax.Array) and not leaf.is_fully_addressable for leaf in jax.tree_util.tree_leaves(data)):
        raise InputError("data of users must be arrays of all examples in every process; give those")
    processes.agree("users", digest(np.ascontiguousarray(ids).tobytes()))
    order, first, count = grouped(users, size, {np.shape(leaf)[:1] for leaf in jax.tree_util.tree_leaves(data)})
    rows = -(-size // mesh.size)
    begins = [min(device * rows, size) for device in range(mesh.size + 1)]
    ends = np.append(first, len(ids))[begins]  # of the devices, among the examples in the order of the users
    room = max(int(np.max(np.diff(ends))), 1)
    where = NamedSharding(mesh, over_examples(mesh))
    of = lambda device: order[ends[device] : ends[device + 1]]

    def put(leaf: Any) -> Any:
        array, dtype = _on_host(leaf)
        return _filled(lambda begin: np.asarray(array[of(begin // room)]), (room, *array.shape[1:]), dtype, where)

    column = lambda read, length: _filled(read, (length,), np.dtype(np.int32), where)
    mine = lambda begin: slice(begin, min(begin + rows, size))
    return UserData(
        jax.tree.map(put, data),
        column(lambda begin: np.arange(len(of(begin // room))), room),
        column(lambda begin: first[mine(begin)] - ends[begin // rows], rows),
        column(lambda begin: count[mine(begin)], rows),
    )


def _on_host(leaf: Any) -> tuple[Any, Any]:
    """What rows are read from, and the dtype that they get on a device."""
    array = leaf if hasattr(leaf, "shape") and not isinstance(leaf, jax.Array) else np.asarray(leaf)
    return array, jax.dtypes.canonicalize_dtype(array.dtype)


def _filled(read: Callable[[int], np.ndarray], part: tuple[int, ...], dtype: Any, where: NamedSharding) -> Any:
    """The array of which every device has a part of this shape, read from its first row on, and zeros after it."""

    def one(index: Any) -> np.ndarray:
        have = read(index[0].start or 0)
        full = np.zeros(part, dtype)
        full[: len(have)] = have
        return full

    whole = (part[0] * where.mesh.size, *part[1:])
    return jax.make_array_from_callback(whole, where, one)
