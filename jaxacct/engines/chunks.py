"""Batches of any size through one compiled program: chunks of one fixed shape, on every core or device there is.

The chunk a device is given has the same shape whatever the number of devices, and a program treats its rows apart
from one another, so that results do not depend on how many devices took part, to the last bit.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

AXIS = "configurations"
"""The one mesh axis: configurations, spread over the devices of this process."""


def in_chunks(compiled: Callable[..., Any], chunk: int, arguments: Any, size: int) -> list[np.ndarray]:
    """Run a compiled program over a batch, `chunk` configurations per device at a time; the last ones are padded.

    One device keeps several chunks in flight from a pool of threads.  Several devices share a mesh: each call of
    the program takes one chunk per device.  Under `jax.distributed` these are the devices of this process alone.
    """
    devices = tuple(jax.local_devices())
    run = _on_one if len(devices) == 1 else functools.partial(_on_mesh, devices)
    pieces = run(compiled, list(_pieces(arguments, size, chunk * len(devices))))
    return [np.concatenate(columns)[:size] for columns in zip(*pieces, strict=True)]


def _pieces(arguments: Any, size: int, rows: int) -> Iterator[Callable[[], Any]]:
    """The arguments a piece at a time, all of one shape: past the end the last row is repeated."""
    for start in range(0, size, rows):
        index = np.minimum(np.arange(start, start + rows), size - 1)
        yield lambda index=index: jax.tree.map(lambda a: a[index], arguments)


def _on_one(compiled: Callable[..., Any], pieces: list[Callable[[], Any]]) -> list[list[np.ndarray]]:
    def one(piece: Callable[[], Any]) -> list[np.ndarray]:
        with jax.enable_x64():
            return [np.asarray(x) for x in compiled(*piece())]

    if len(pieces) == 1:
        return [one(pieces[0])]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(one, pieces))


def _on_mesh(
    devices: tuple[Any, ...], compiled: Callable[..., Any], pieces: list[Callable[[], Any]]
) -> list[list[np.ndarray]]:
    """Calls return before they are done, so that the devices work while the next chunks are laid out."""
    program, sharding = _spread(compiled, devices)
    with jax.enable_x64():
        pending = [program(*jax.device_put(piece(), sharding)) for piece in pieces]
        return [[np.asarray(x) for x in out] for out in pending]


@functools.cache
def _spread(compiled: Any, devices: tuple[Any, ...]) -> tuple[Callable[..., Any], NamedSharding]:
    """The program on all devices at once, each on a chunk of its own, and the sharding of its arguments."""
    mesh, along = Mesh(np.array(devices), (AXIS,)), PartitionSpec(AXIS)
    program = compiled.wrapped(
        functools.partial(jax.shard_map, mesh=mesh, in_specs=along, out_specs=along, check_vma=False)
    )
    return program, NamedSharding(mesh, along)
