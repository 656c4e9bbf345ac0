"""Gaussian noise for arrays that lie on several devices: each draws that of its own part, and none waits for another.

The noise of an entry follows from the key and from the entry's number in the whole array, so it does not matter which
device has it.  Layout: jaxacct/training/step/README.md, "Several devices".
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxacct.core.chacha import key_words, noise_words
from jaxacct.core.validation import InputError
from jaxacct.training.step.noise import from_bits, wide
from jaxacct.training.step.sharded_layout import axes_of, is_spec

__all__ = ["sharded_noise"]

_UNIT = 32
"""Draws of one unit: three blocks of 16 words make 16 pairs."""
_PIECE = 2_046
"""Units at a time, some 1.5 MB of scratch memory: devices that are simulated on one processor share its caches."""
_LARGEST = 2**32
"""Entries are numbered in uint32."""


def sharded_noise(mesh: Mesh, specs: Any) -> Callable[[Any, Any, Any], Any]:
    """(key, tree, std) -> the tree with independent N(0, std^2) on every entry, for arrays that lie as specs say.

    For jit.  As `noise.add`, but for the order: entry p of a leaf, counted row by row in the whole array, is draw
    p % 32 of unit p // 32.  So meshes of all sizes use the same random words for the same entry.
    """

    def add(key: Any, tree: Any, std: Any) -> Any:
        leaves, structure = jax.tree_util.tree_flatten(tree)
        cuts = tuple(jax.tree_util.tree_leaves(specs, is_leaf=is_spec))
        shapes = [leaf.shape for leaf in leaves]
        for place, shape in enumerate(shapes):
            if math.prod(shape) >= _LARGEST:
                raise InputError(f"leaf {place} has {math.prod(shape)} entries, must have < 2**32; cut it in two")

        def local(words: Any, std: Any, *parts: Any) -> tuple[Any, ...]:
            boxes = [_box(*each) for each in zip(shapes, [part.shape for part in parts], cuts, strict=True)]
            dtypes, noisy = [wide(part.dtype) for part in parts], list(parts)
            for dtype in dict.fromkeys(dtypes):
                mine = {place: boxes[place] for place, own in enumerate(dtypes) if own == dtype}
                for (place, box), draws in zip(mine.items(), _drawn(words, mine, len(parts), dtype), strict=True):
                    noisy[place] = parts[place].astype(dtype) + jnp.asarray(std, dtype) * box.cut(draws)
            return tuple(noisy)

        on_each = jax.shard_map(local, mesh=mesh, in_specs=(P(), P(), *cuts), out_specs=cuts, check_vma=False)
        return jax.tree_util.tree_unflatten(structure, on_each(key_words(key), std, *leaves))

    return add


class _Box(NamedTuple):
    """The part of an array that one device has, as runs of entries whose numbers follow each other.

    first : the number of the first entry of every run, uint32; the device's own.  length : entries of a run.
    units : of a run, those it begins and ends in included.  aligned : runs begin with a unit.
    shape : of all runs together.  begins, sizes : where in that, and how large, is the part itself.
    """

    first: Any
    length: int
    units: int
    aligned: bool
    shape: tuple[int, ...]
    begins: tuple[Any, ...]
    sizes: tuple[int, ...]

    def cut(self, draws: Any) -> Any:
        """The part's own draws, out of those of all its units, shape (runs * units, 32)."""
        rows = draws.reshape(self.first.size, self.units * _UNIT)
        if self.aligned:
            rows = rows[:, : self.length]
        else:
            cut = lambda row, at: jax.lax.dynamic_slice_in_dim(row, at, self.length)
            rows = jax.vmap(cut)(rows, (self.first % _UNIT).astype(jnp.int32))
        return jax.lax.dynamic_slice(rows.reshape(self.shape), self.begins, self.sizes)


def _box(whole: tuple[int, ...], part: tuple[int, ...], spec: P) -> _Box:
    """The box of the device that this runs on, of an array that is cut as a spec says."""
    names = [axes_of(spec[axis]) if axis < len(spec) else () for axis in range(len(whole))]
    place: list[Any] = [jax.lax.axis_index(own).astype(jnp.uint32) if own else np.uint32(0) for own in names]
    strides = [math.prod(whole[axis + 1 :]) for axis in range(len(whole))]
    shape, begins = list(part), list[Any]([np.uint32(0)] * len(whole))
    last = -1
    for axis in reversed(range(len(whole))):
        if part[axis] == whole[axis]:
            continue
        length = part[axis] * strides[axis]
        if _UNIT * _units(length, aligned=length % _UNIT == 0) <= whole[axis] * strides[axis]:
            last = axis
            break
        # shorter runs would be cut from so many more units that it costs less to draw what other devices have as well
        shape[axis], begins[axis], place[axis] = whole[axis], place[axis] * np.uint32(part[axis]), np.uint32(0)
    first: Any = jnp.zeros((), jnp.uint32)
    for axis in range(last + 1):
        first = first + place[axis] * np.uint32(shape[axis] * strides[axis])
        if axis < last:
            first = first[..., None] + jnp.arange(shape[axis], dtype=jnp.uint32) * np.uint32(strides[axis])
    length = math.prod(shape[max(last, 0) :])
    steps = [strides[axis] for axis in range(last)] + ([length] if last >= 0 else [])
    aligned = not any(step % _UNIT for step in steps)
    return _Box(first.reshape(-1), length, _units(length, aligned), aligned, tuple(shape), tuple(begins), part)


def _units(length: int, aligned: bool) -> int:
    """Units that so many entries can be in."""
    return -(-length // _UNIT) if aligned else (length + _UNIT - 2) // _UNIT + 1


def _drawn(words: Any, boxes: dict[int, _Box], leaves: int, dtype: Any) -> list[Any]:
    """Standard normal draws of all units of some boxes, by the leaf's place, each of shape (runs * units, 32).

    Unit u of leaf l is the columns (u, l, 0), (u, l, 1) and (u, l, 2) of the keystream, as in `noise.add`.
    """
    counters = [_counters(box) for box in boxes.values()]
    begins = np.cumsum([0, *(counter.size for counter in counters)])
    total = int(begins[-1])
    pieces = max(1, -(-total // _PIECE))
    each = -(-total // pieces)
    spare = pieces * each - total  # belongs to no leaf
    counter = jnp.concatenate([*counters, jnp.zeros(spare, jnp.uint32)])

    def piece(number: Any) -> Any:
        own = jax.lax.dynamic_slice_in_dim(counter, number * each, each)
        at = number * each + jnp.arange(each, dtype=jnp.int32)
        leaf = jnp.searchsorted(jnp.asarray(begins[1:], jnp.int32), at, side="right")
        place = jnp.asarray([*boxes, leaves], jnp.uint32)[leaf]
        thirds = jnp.repeat(jnp.arange(3, dtype=jnp.uint32), each)
        high, low, turn = jnp.split(noise_words(words, jnp.tile(own, 3), jnp.tile(place, 3), thirds), 3, axis=1)
        return jnp.concatenate(from_bits(high, low, turn, dtype)).T

    if pieces == 1:
        flat = piece(0)
    else:
        put = lambda i, flat: jax.lax.dynamic_update_slice_in_dim(flat, piece(i), i * each, axis=0)
        flat = jax.lax.fori_loop(0, pieces, put, jnp.zeros((pieces * each, _UNIT), dtype))
    return [flat[at:end] for at, end in itertools.pairwise(begins)]


def _counters(box: _Box) -> Any:
    """The numbers of the units of all runs, one run after the other."""
    return (box.first[:, None] // _UNIT + jnp.arange(box.units, dtype=jnp.uint32)).reshape(-1)
