"""Where a run's arrays are, on one device or on those of a mesh, and how the processes of a run come to one answer.

A device of a mesh has the rows of its own records, or of its own users.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxacct.core.validation import InputError
from jaxacct.training.sampling.sampler import UserData, grouped, user_data
from jaxacct.training.sharding.mesh_step import (
    Gathering,
    carried_specs,
    check_layout,
    frozen_specs,
    is_spec,
    loaded_step,
    over_examples,
    sharded_loaded_step,
    sharded_step,
)
from jaxacct.training.sharding.processes import ALONE, Processes
from jaxacct.training.step import key_derivation
from jaxacct.training.step.key_derivation import digest
from jaxacct.training.step.models import Rest
from jaxacct.training.step.step_function import Carried, StepRule, private_step

__all__ = ["OnMesh", "OneDevice", "placement"]


class OneDevice:
    """All arrays on JAX's default device."""

    processes: Processes = ALONE
    devices = 1

    def __init__(self, rule: StepRule, size: int) -> None:
        self.step_function = private_step(rule)
        self._rule, self._size = rule, size

    def describe(self) -> list[tuple[str, str]]:
        """What is shown of it in a notebook."""
        return []

    def data(self, data: Any, users: Any) -> Any:
        """The data, and whose they are, as the step takes them."""
        data = _anew(data)
        return data if users is None else user_data(data, users, self._size)

    def carried(self, state: Any, trained: Any) -> Carried:
        """What a step works on, of a `State` with this trained part: new arrays, so that their origin is not seen."""
        carried: Carried = _anew(Carried(trained, state.opt_state, state.clip_norm, np.int32(state.not_finite)))
        return carried

    def frozen(self, trained: Any, frozen: Rest | None) -> Rest | None:
        """The rest of the model, as new arrays."""
        rest: Rest | None = _anew(frozen)
        return rest

    def begin(self, init: Callable[[Any], Any], params: Any) -> tuple[Any, Any]:
        """The first parameters and optimizer state."""
        return params, init(params)

    def digest(self, tree: Any) -> bytes:
        """SHA-256 of a pytree of arrays."""
        return key_derivation.digest_tree(tree)

    def digest_program(self, traced: Any) -> bytes:
        """A digest of a traced program, and of what runs it."""
        return key_derivation.digest_program(traced)

    def step(self, carried: Carried, *rest: Any) -> Any:
        """The step's program, traced."""
        return jax.jit(self.step_function).trace(carried, *rest)

    def loaded(self, carried: Carried, words: Any, batch: Any, now: Any, frozen: Any) -> list[Any]:
        """The three programs of a step whose batch is loaded, traced; ``batch`` holds shapes of a micro-batch."""
        parts = loaded_step(self._rule, batch[0])
        sums = jax.eval_shape(parts.nothing, carried, frozen)
        return [
            jax.jit(parts.nothing).trace(carried, frozen),
            jax.jit(parts.one, donate_argnums=2).trace(carried, words, sums, *batch, frozen),
            jax.jit(parts.end).trace(carried, words, sums, now),
        ]

    def batch(self, batch: Any) -> Any:
        """A micro-batch, as these programs take it."""
        return batch


class OnMesh:
    """Records over all devices of a mesh, parameters as `shard` says."""

    def __init__(self, rule: StepRule, size: int, mesh: Any, shard: Any) -> None:
        self._rule, self._shard, self._size = rule, shard, size
        self._mesh: Mesh = check_layout(mesh, shard)
        self.processes, self.devices = Processes.of(self._mesh), self._mesh.size
        self.step_function = sharded_step(rule, self._mesh, shard, size)

    def describe(self) -> list[tuple[str, str]]:
        """What is shown of it in a notebook."""
        shape = " x ".join(f"{size} {name}" for name, size in self._mesh.shape.items())
        how = self._shard if isinstance(self._shard, str) else "PartitionSpecs"
        return [("mesh", shape), ("shard", how)]

    def data(self, data: Any, users: Any) -> Any:
        """The data, and whose they are, every device with its own rows."""
        if users is None:
            return rows_on_mesh(data, self._mesh, self._size)
        return users_on_mesh(data, users, self._mesh, self._size, self.processes)

    def carried(self, state: Any, trained: Any) -> Carried:
        """What a step works on, of a `State` with this trained part, as new arrays on the mesh."""
        carried = Carried(trained, state.opt_state, state.clip_norm, np.int32(state.not_finite))
        placed: Carried = self._put(carried, self._where(carried))
        return placed

    def frozen(self, trained: Any, frozen: Rest | None) -> Rest | None:
        """The rest of the model on the mesh, cut as the parameters are."""
        specs = frozen_specs(self._mesh, self._shard, trained, frozen)
        rest: Rest | None = self._put(frozen, self._shardings(specs))
        return rest

    def begin(self, init: Callable[[Any], Any], params: Any) -> tuple[Any, Any]:
        """The first parameters and optimizer state, made where they are to be."""
        params = self._put(params, self._where(Carried(params, (), (), ())).params)
        where = self._where(Carried(params, jax.eval_shape(init, params), (), ()))
        return params, jax.jit(init, out_shardings=where.opt_state)(params)

    def digest(self, tree: Any) -> bytes:
        """SHA-256 of a pytree of arrays on the mesh: of every part, made where it is, and these together."""
        leaves, structure = jax.tree_util.tree_flatten(tree)
        told, own = [key_derivation.form_of(structure)], []
        for leaf in map(_numbers, leaves):
            told.append(f"{leaf.dtype} {leaf.shape} {leaf.sharding.spec}".encode())
            there = leaf.sharding.devices_indices_map(leaf.shape)
            parts = list(dict.fromkeys(map(str, there.values())))
            found = np.zeros((len(parts), 32), np.uint8)
            for part in leaf.addressable_shards:
                if part.replica_id == 0:  # of equal parts one is digested
                    content = np.ascontiguousarray(np.asarray(part.data)).reshape(-1).view(np.uint8)
                    own_digest = hashlib.sha256(content.data).digest()
                    found[parts.index(str(part.index))] = np.frombuffer(own_digest, np.uint8)
            own.append(found)
        together = self.processes.gather(b"".join(found.tobytes() for found in own))
        return key_derivation.digest(*told, *together)

    def digest_program(self, traced: Any) -> bytes:
        """A digest of a traced program, of the mesh, and of what runs it in every process."""
        devices = [(device.id, device.process_index, device.device_kind) for device in self._mesh.devices.flat]
        mesh = repr((self._mesh.axis_names, self._mesh.devices.shape, devices)).encode()
        own = key_derivation.digest(mesh, key_derivation.digest_program(traced))
        return key_derivation.digest(*self.processes.gather(own))

    def step(self, carried: Carried, *rest: Any) -> Any:
        """The step's program, traced."""
        return jax.jit(self.step_function, out_shardings=self._after(carried)).trace(carried, *rest)

    def loaded(self, carried: Carried, words: Any, batch: Any, now: Any, frozen: Any) -> list[Any]:
        """The three programs of a step whose batch is loaded, traced; ``batch`` holds shapes of a micro-batch."""
        parts = sharded_loaded_step(self._rule, batch[0], self._mesh, self._shard)
        spread, everywhere = (NamedSharding(self._mesh, spec) for spec in (over_examples(self._mesh), P()))
        lies = Gathering(spread, everywhere, everywhere)
        placed = lambda tree, where: jax.tree.map(
            lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=where), tree
        )
        so_far = Gathering(*map(placed, jax.eval_shape(parts.nothing, carried, frozen), lies))
        one = jax.jit(parts.one, donate_argnums=2, out_shardings=lies)
        return [
            jax.jit(parts.nothing, out_shardings=lies).trace(carried, frozen),
            one.trace(carried, words, so_far, *placed(batch, spread), frozen),
            jax.jit(parts.end, out_shardings=self._after(carried)).trace(carried, words, so_far, now),
        ]

    def batch(self, batch: Any) -> Any:
        """A micro-batch on the mesh, an equal part of it on each device."""
        where = NamedSharding(self._mesh, over_examples(self._mesh))
        put = lambda rows: jax.make_array_from_callback(rows.shape, where, lambda index: rows[index])
        return jax.tree.map(put, batch)

    def _after(self, carried: Carried) -> Any:
        return self._where(carried), NamedSharding(self._mesh, P())

    def _where(self, carried: Carried) -> Carried:
        where: Carried = self._shardings(carried_specs(self._mesh, self._shard, carried))
        return where

    def _shardings(self, specs: Any) -> Any:
        return jax.tree.map(lambda spec: NamedSharding(self._mesh, spec), specs, is_leaf=is_spec)

    def _put(self, tree: Any, where: Any) -> Any:
        """Arrays on the mesh; those on the host must be the same in every process."""
        on_host = [leaf for leaf in jax.tree_util.tree_leaves(tree) if not _spread(leaf)]
        if self.processes.count > 1:
            self.processes.agree("state", key_derivation.digest_tree(on_host))

        def put(leaf: Any, sharding: NamedSharding) -> Any:
            if _spread(leaf):
                same = lambda x: x if _is_key(x) else jax.lax.convert_element_type(x, x.dtype)
                return jax.jit(same, out_shardings=sharding)(leaf)
            array = np.asarray(_numbers(leaf))
            array = array.astype(jax.dtypes.canonicalize_dtype(array.dtype), copy=False)
            placed = jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])
            return jax.random.wrap_key_data(placed, impl=jax.random.key_impl(leaf)) if _is_key(leaf) else placed

        return jax.tree.map(put, tree, where)


def _anew(tree: Any) -> Any:
    """The same numbers as new arrays."""
    return jax.tree.map(lambda a: a if _is_key(a) else jnp.asarray(np.asarray(a)), tree)


def _is_key(leaf: Any) -> bool:
    return jax.dtypes.issubdtype(getattr(leaf, "dtype", None), jax.dtypes.prng_key)


def _numbers(leaf: Any) -> Any:
    """An array of numbers; of random keys, their words."""
    return jax.random.key_data(leaf) if _is_key(leaf) else leaf


def _spread(leaf: Any) -> bool:
    """Whether an array is on several processes."""
    return isinstance(leaf, jax.Array) and not leaf.is_fully_addressable


def placement(rule: StepRule, size: int, mesh: Any, shard: Any) -> OneDevice | OnMesh:
    """Where a trainer's runs are; InputError where a way to shard is given and no mesh."""
    if mesh is not None:
        return OnMesh(rule, size, mesh, "data" if shard is None else shard)
    if shard is not None:
        raise InputError(f"shard = {shard!r:.40} goes with a mesh; give one, such as jax.make_mesh((n,), ('devices',))")
    return OneDevice(rule, size)


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
