"""Where a run's arrays are: on one device, or on those of a mesh; how they get there, and what is digested of them."""

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
from jaxacct.training.run.processes import ALONE, Processes
from jaxacct.training.run.sharded_data import rows_on_mesh, users_on_mesh
from jaxacct.training.run.state import State
from jaxacct.training.step import key_derivation
from jaxacct.training.step.loaded_step import Gathering, loaded_step, sharded_loaded_step
from jaxacct.training.step.parts import Rest
from jaxacct.training.step.sharded_layout import carried_specs, check_layout, frozen_specs, is_spec, over_examples
from jaxacct.training.step.sharded_step import sharded_step
from jaxacct.training.step.step_function import Carried, StepRule, private_step
from jaxacct.training.step.users import user_data

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

    def carried(self, state: State, trained: Any) -> Carried:
        """What the step works on, as new arrays: where they came from must make no difference to the program.

        trained : the part of the state's parameters that is trained.
        """
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

    def carried(self, state: State, trained: Any) -> Carried:
        """What the step works on, as new arrays on the mesh.

        trained : the part of the state's parameters that is trained.
        """
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
