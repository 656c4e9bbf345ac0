"""Places a run's arrays on one device or on a mesh, computes their digests, and lets processes exchange bytes."""

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
from jaxacct.training.clipping.traces import is_key, words_of
from jaxacct.training.sampling.sampler import UserData, grouped, user_data
from jaxacct.training.sharding import mesh_step
from jaxacct.training.sharding.mesh_step import is_spec
from jaxacct.training.step import key_derivation
from jaxacct.training.step.key_derivation import digest
from jaxacct.training.step.models import Untrained
from jaxacct.training.step.step_function import Carried, Correlated, StepRule, private_step
from jaxacct.training.step.step_mechanisms import require_kept

_FRAME = 256  # bytes that `Processes.gather` sends first: a message's length in 8 bytes, then the message's beginning


class Processes:
    """Processes that take each step of a run together; this one is `number`.  `gather` and `tell` wait for all."""

    def __init__(self, count: int, number: int) -> None:
        self.count, self.number = count, number

    @classmethod
    def of(cls, mesh: Any) -> Processes:
        """Return the processes that have devices in a mesh; they must be all processes, or this process alone."""
        own, there = jax.process_index(), sorted({device.process_index for device in mesh.devices.flat})
        if there == [own]:
            return ALONE
        if there != list(range(jax.process_count())):
            raise InputError(
                f"mesh has devices of processes {there}, must have some of all {jax.process_count()}, or this one's "
                "alone; make it from jax.devices() or from jax.local_devices()"
            )
        return cls(len(there), own)

    @property
    def first(self) -> bool:
        """Whether this process is the first process, which writes the ledger."""
        return self.number == 0

    def gather(self, own: bytes) -> list[bytes]:
        """Return a list of what all processes give as `own`, in the order of the processes."""
        if self.count == 1:
            return [own]
        from jax.experimental.multihost_utils import process_allgather

        together = lambda content, room: np.asarray(process_allgather(np.frombuffer(content.ljust(room, b"\0"), "u1")))
        head = len(own).to_bytes(8, "little") + own
        frames = [bytes(row) for row in together(head[:_FRAME], _FRAME)]
        lengths = [int.from_bytes(frame[:8], "little") for frame in frames]
        if max(lengths) > _FRAME - 8:
            room = max(lengths) - (_FRAME - 8)
            rest = together(head[_FRAME:], -(-room // _FRAME) * _FRAME)  # JAX compiles once per size: use few sizes
            frames = [frame + bytes(row) for frame, row in zip(frames, rest, strict=True)]
        return [frame[8 : 8 + length] for frame, length in zip(frames, lengths, strict=True)]

    def tell(self, told: bytes) -> bytes:
        """Return in every process what the first process gives as `told`.  What the other processes give is ignored."""
        return self.gather(told if self.first else b"")[0]

    def decide(self, function: Callable[[], bytes]) -> bytes:
        """Call a function in the first process alone.  Return its result, or raise if it fails, in all processes."""
        if self.count == 1:
            return function()
        if self.first:
            try:
                answer = function()
            except BaseException as error:
                refused = isinstance(error, InputError)
                self.tell(f"R{error}".encode() if refused else f"F{type(error).__name__}: {error}".encode())
                raise
            self.tell(b"A" + answer)
            return answer
        told = self.tell(b"")
        if told[:1] == b"R":
            raise InputError(told[1:].decode())
        if told[:1] == b"F":
            raise RuntimeError(f"the first process failed: {told[1:].decode()}")
        return told[1:]

    def agree(self, name: str, own: bytes) -> None:
        """Raise InputError unless all processes give the same bytes `own`.  The message calls them `name`."""
        everyone = self.gather(own)
        others = [number for number, given in enumerate(everyone) if given != everyone[0]]
        if others:
            raise InputError(f"{name} of process {others[0]} differs from that of process 0; give the same")

    def any(self, *own: bool) -> tuple[bool, ...]:
        """Return, for each position in `own`, whether any process gives True at this position."""
        return tuple(any(answers) for answers in zip(*self.gather(bytes(own)), strict=True))


ALONE = Processes(1, 0)  # the processes of a run in a single process


def _whole(function: Callable[..., Any], **options: Any) -> Any:
    """Jit a function, with unused arguments in the program's text too: the keys of a run are derived from the text."""
    return jax.jit(function, keep_unused=True, **options)


class Placement:
    """Puts the arrays of a run on JAX's default device or on a mesh.  `shard` says how a mesh holds the parameters."""

    def __init__(self, rule: StepRule, size: int, mesh: Any, shard: Any) -> None:
        if mesh is None and shard is not None:
            raise InputError(f"shard = {shard!r:.40} needs a mesh; give one, such as jax.make_mesh((n,), ('devices',))")
        self._rule, self._size, self._shard = rule, size, "data" if shard is None else shard
        self.mesh: Mesh | None = None if mesh is None else mesh_step.check_layout(mesh, self._shard)
        self.processes = ALONE if self.mesh is None else Processes.of(self.mesh)
        self.devices = 1 if self.mesh is None else self.mesh.size
        self.step_function = (
            private_step(rule) if self.mesh is None else mesh_step.sharded_step(rule, self.mesh, self._shard, size)
        )

    def describe(self) -> list[tuple[str, str]]:
        """Return the pairs (name, value) with which a notebook describes the placement; none without a mesh."""
        if self.mesh is None:
            return []
        shape = " x ".join(f"{size} {name}" for name, size in self.mesh.shape.items())
        return [("mesh", shape), ("shard", self._shard if isinstance(self._shard, str) else "PartitionSpecs")]

    def data(self, data: Any, users: Any) -> Any:
        """Return the data for a step, grouped by user if `users` are given; on a mesh each device gets its own rows."""
        if self.mesh is None:
            data = _on_device(data)
            return data if users is None else user_data(data, users, self._size)
        if users is None:
            return _rows_on_mesh(data, self.mesh, self._size)
        return _users_on_mesh(data, users, self.mesh, self._size, self.processes)

    def carried(self, state: Any, trained: Any) -> Carried:
        """Return a state's `Carried` with the parameters `trained`; all arrays are copies: the step overwrites them."""
        opt_state = state.opt_state
        if self._rule.buffers:
            past = self._rule.no_past(trained)
            # A state from a pickle lacks the buffers of noise.  `fit` then goes on from a checkpoint, which has them.
            if state.past is not None and state.past.arrays is not None:
                forms = [[*map(jnp.shape, jax.tree.leaves(each))] for each in (state.past.arrays, past)]
                norms = map(key_derivation.digest_tree, (state.past.clip_norm, state.clip_norm))
                require_kept("clip_norm", len({*norms}) == 1)
                require_kept("trained parameters", forms[0] == forms[1])
                past = state.past.arrays
            opt_state = Correlated(past, opt_state)
        carried = Carried(trained, opt_state, state.clip_norm, np.int32(state.not_finite))
        return copied(self._put(carried, self._where(carried)))

    def frozen(self, trained: Any, frozen: Untrained | None) -> Untrained | None:
        """Put the frozen arrays on the devices.  Each array gets the layout that it would have if it were trained."""
        specs = None if self.mesh is None else mesh_step.frozen_specs(self.mesh, self._shard, trained, frozen)
        rest: Untrained | None = self._put(frozen, self._shardings(specs))
        return rest

    def begin(self, init: Callable[[Any], Any], params: Any) -> tuple[Any, Any]:
        """Return the initial parameters and the optimizer's initial state, on the devices on which they will stay."""
        if self.mesh is None:
            return params, init(params)
        params = self._put(params, self._where(Carried(params, (), (), ())).params)
        where = self._where(Carried(params, jax.eval_shape(init, params), (), ()))
        return params, jax.jit(init, out_shardings=where.opt_state)(params)

    def digest(self, tree: Any) -> bytes:
        """Return a SHA-256 digest of a pytree of arrays; on a mesh, a digest of the digests of the arrays' parts."""
        if self.mesh is None:
            return key_derivation.digest_tree(tree)
        leaves, structure = jax.tree_util.tree_flatten(tree)
        told, own = [key_derivation.form_of(structure)], []
        for leaf in map(words_of, leaves):
            told.append(f"{leaf.dtype} {leaf.shape} {leaf.sharding.spec}".encode())
            parts = list(dict.fromkeys(map(str, leaf.sharding.devices_indices_map(leaf.shape).values())))
            found = np.zeros((len(parts), 32), np.uint8)
            for part in leaf.addressable_shards:
                if part.replica_id == 0:  # several devices may hold the same part: digest it only once
                    content = np.ascontiguousarray(np.asarray(part.data)).reshape(-1).view(np.uint8)
                    own_digest = hashlib.sha256(content.data).digest()
                    found[parts.index(str(part.index))] = np.frombuffer(own_digest, np.uint8)
            own.append(found)
        return digest(*told, *self.processes.gather(b"".join(found.tobytes() for found in own)))

    def digest_program(self, traced: Any) -> bytes:
        """Return a digest of a traced program, of the mesh, and of the machine and libraries of every process."""
        own = key_derivation.digest_program(traced)
        if self.mesh is None:
            return own
        devices = [(device.id, device.process_index, device.device_kind) for device in self.mesh.devices.flat]
        mesh = repr((self.mesh.axis_names, self.mesh.devices.shape, devices)).encode()
        return digest(*self.processes.gather(digest(mesh, own)))

    def step(self, carried: Carried, *rest: Any) -> Any:
        """Trace the program of a step.  The program overwrites the arrays of its argument `carried`."""
        return _whole(self.step_function, donate_argnums=0, **self._after(carried)).trace(carried, *rest)

    def loaded(self, carried: Carried, words: Any, batch: Any, now: Any, frozen: Any) -> list[Any]:
        """Trace the programs of a `LoadedStep`; `batch` is (rows, indices, mask), or only their shapes and dtypes."""
        lies: dict[str, Any] = {}
        if self.mesh is None:
            nothing, one, end = mesh_step.loaded_step(self._rule, batch[0])
            so_far = jax.eval_shape(nothing, carried, frozen)
        else:
            nothing, one, end = mesh_step.sharded_loaded_step(self._rule, batch[0], self.mesh, self._shard)
            spread = NamedSharding(self.mesh, P(self.mesh.axis_names))
            placed = lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=spread)
            batch, so_far = jax.tree.map(placed, (batch, jax.eval_shape(nothing, carried, frozen)))
            lies = {"out_shardings": spread}
        return [
            _whole(nothing, **lies).trace(carried, frozen),
            _whole(one, donate_argnums=2, **lies).trace(carried, words, so_far, *batch, frozen),
            _whole(end, **self._after(carried)).trace(carried, words, so_far, now),
        ]

    def batch(self, batch: Any) -> Any:
        """Put a micro-batch on the devices, for the programs of `loaded`.  On a mesh each device gets an equal part."""
        if self.mesh is None:
            return jax.device_put(batch)
        where = NamedSharding(self.mesh, P(self.mesh.axis_names))
        put = lambda rows: jax.make_array_from_callback(rows.shape, where, lambda index: rows[index])
        return jax.tree.map(put, batch)

    def in_order(self, carried: Carried) -> list[Any]:
        """Return the devices of a run, in the order of the mesh if there is one."""
        return [*carried.not_finite.devices()] if self.mesh is None else [*self.mesh.devices.flat]

    def _after(self, carried: Carried) -> dict[str, Any]:
        """Return the option of `jax.jit` that fixes the layout of a step's results; no option without a mesh."""
        return {} if self.mesh is None else {"out_shardings": (self._where(carried), NamedSharding(self.mesh, P()))}

    def _where(self, carried: Carried) -> Any:
        return None if self.mesh is None else self._shardings(mesh_step.carried_specs(self.mesh, self._shard, carried))

    def _shardings(self, specs: Any) -> Any:
        mesh = self.mesh
        return None if mesh is None else jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=is_spec)

    def _put(self, tree: Any, where: Any) -> Any:
        """Put arrays where `where` says.  Arrays not yet spread over processes must be the same in all processes."""
        if self.mesh is None:
            return _on_device(tree)
        if self.processes.count > 1:
            on_host = [leaf for leaf in jax.tree_util.tree_leaves(tree) if not _spread(leaf)]
            self.processes.agree("state", key_derivation.digest_tree(on_host))

        def put(leaf: Any, sharding: NamedSharding) -> Any:
            if _spread(leaf):
                same = lambda x: x if is_key(x) else jax.lax.convert_element_type(x, x.dtype)
                return jax.jit(same, out_shardings=sharding)(leaf)
            array = np.asarray(words_of(leaf))
            array = array.astype(jax.dtypes.canonicalize_dtype(array.dtype), copy=False)
            placed = jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])
            return jax.random.wrap_key_data(placed, impl=jax.random.key_impl(leaf)) if is_key(leaf) else placed

        return jax.tree.map(put, tree, where)


def _on_device(tree: Any) -> Any:
    """Put a pytree's arrays on the default device, uncommitted: a committed array would change the keys of the run."""
    default = jax.device_put(np.float32(0)).devices()
    # on a CPU `device_put` may share the memory of a NumPy array, which the caller may change later
    copy = True if {device.platform for device in default} == {"cpu"} else None

    def one(leaf: Any) -> Any:
        if is_key(leaf):
            return jax.random.wrap_key_data(one(words_of(leaf)), impl=jax.random.key_impl(leaf))
        if isinstance(leaf, jax.Array) and not leaf.committed and leaf.devices() == default:
            return jnp.asarray(leaf, leaf.dtype)
        return jax.device_put(np.array(leaf, copy=copy))

    return jax.tree.map(one, tree)


def copied(carried: Carried) -> Carried:
    """Copy each array by `device_put`, which compiles nothing, or by `jnp.copy` if it is spread over processes."""
    copy = lambda leaf: jnp.copy(leaf) if _spread(leaf) else jax.device_put(leaf, may_alias=False)
    there: Carried = jax.tree.map(copy, carried)
    return there


def _spread(leaf: Any) -> bool:
    """Return whether an array is spread over the devices of several processes."""
    return isinstance(leaf, jax.Array) and not leaf.is_fully_addressable


def _rows_on_mesh(data: Any, mesh: Mesh, size: int) -> Any:
    """Put ceil(size / devices) consecutive rows on each device, zeros after the last.  A process reads its own rows."""
    rows = -(-size // mesh.size)
    where = NamedSharding(mesh, P(mesh.axis_names))

    def put(leaf: Any) -> Any:
        if _spread(leaf):
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


def _users_on_mesh(data: Any, users: Any, mesh: Mesh, size: int, processes: Processes) -> UserData:
    """Return `UserData` on a mesh: each device has consecutive users and all their examples, filled up with zeros."""
    ids = np.asarray(users)
    if any(_spread(leaf) for leaf in jax.tree_util.tree_leaves(data)):
        raise InputError("data of users must be arrays of all examples in every process; give those")
    processes.agree("users", digest(np.ascontiguousarray(ids).tobytes()))
    order, first, count = grouped(users, size, {np.shape(leaf)[:1] for leaf in jax.tree_util.tree_leaves(data)})
    rows = -(-size // mesh.size)
    begins = [min(device * rows, size) for device in range(mesh.size + 1)]
    ends = np.append(first, len(ids))[begins]  # the examples of device d are order[ends[d]:ends[d + 1]]
    room = max(int(np.max(np.diff(ends))), 1)
    where = NamedSharding(mesh, P(mesh.axis_names))
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
    """Return (array on the host from which rows can be read, dtype that JAX gives to these rows on a device)."""
    array = leaf if hasattr(leaf, "shape") and not isinstance(leaf, jax.Array) else np.asarray(leaf)
    return array, jax.dtypes.canonicalize_dtype(array.dtype)


def _filled(read: Callable[[int], np.ndarray], part: tuple[int, ...], dtype: Any, where: NamedSharding) -> Any:
    """Return an array with a part for each device: `read(number of its first row)`, then zeros up to shape `part`."""

    def one(index: Any) -> np.ndarray:
        have = read(index[0].start or 0)
        full = np.zeros(part, dtype)
        full[: len(have)] = have
        return full

    return jax.make_array_from_callback((part[0] * where.mesh.size, *part[1:]), where, one)
