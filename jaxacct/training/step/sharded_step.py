"""One private step on the devices of a mesh: the same mechanism as `private_step`.

Parameters, sums over the members of a batch, and what is noisy already cross devices; examples do not.

Why it is the same mechanism: jaxacct/training/step/README.md, "Several devices".

Each device draws the noise of its own part, and none waits for another.  The noise of an entry follows from the key
and from the entry's number in the whole array, so it does not matter which device has it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxacct.core.chacha import key_words, noise_words
from jaxacct.core.validation import InputError
from jaxacct.training.step.clipping import Clipped
from jaxacct.training.step.noise import from_bits, wide
from jaxacct.training.step.parts import Rest
from jaxacct.training.step.sampler import Selection
from jaxacct.training.step.sharded_layout import axes_of, frozen_specs, is_spec, over_examples, param_specs, sum_specs
from jaxacct.training.step.step_function import (
    Carried,
    Numbers,
    Observed,
    StepRule,
    Sums,
    draw,
    keys,
    release,
    sums_over,
)

__all__ = ["added_up", "gathered", "released", "sharded_noise", "sharded_step", "specs_of_sums", "zipped"]

_UNIT = 32
"""Draws of one unit: three blocks of 16 words make 16 pairs."""
_PIECE = 2_046
"""Units at a time, some 1.5 MB of scratch memory: devices that are simulated on one processor share its caches."""
_LARGEST = 2**32
"""Entries are numbered in uint32."""


def sharded_step(rule: StepRule, mesh: Mesh, shard: Any, size: int) -> Callable[..., tuple[Carried, Observed]]:
    """`private_step` over the devices of a mesh, for jit: the same arguments, and the same results.

    Parameters
    ----------
    rule : as for `private_step`.
    mesh, shard : as `check_layout` lets through.  carried lies as `carried_specs` says.
    size : how many records, or users, there are.  Device number d has those from d r on, r = ceil(size / devices), and
        data are r rows for each device: those beyond the last record are never drawn.
    """

    def step(
        carried: Carried, words: Any, pass_words: Any, data: Any, now: Numbers, frozen: Rest | None = None
    ) -> tuple[Carried, Observed]:
        specs, cuts = param_specs(mesh, shard, carried.params), sum_specs(mesh, shard, carried.params)
        rows = (data.count if rule.examples_per_user else jax.tree_util.tree_leaves(data)[0]).shape[0] // mesh.size

        rest = P() if frozen is None else frozen_specs(mesh, shard, carried.params, frozen)

        def local(
            params: Any, frozen: Any, clip_norm: Any, words: Any, pass_words: Any, data: Any, now: Numbers
        ) -> Sums:
            key, pass_key = keys(words, pass_words)
            first = jax.lax.axis_index(mesh.axis_names) * rows
            here = _those_of(draw(rule, key, pass_key, size, now), first, rows)
            at_hand = Carried(zipped(gathered, params, specs), None, clip_norm, None)
            of_model = frozen if frozen is None else zipped(gathered, frozen, rest)
            summed, members, seen = sums_over(rule, at_hand, key, here, data, of_model, first)
            # no loop is left to run, of which other devices may have more rounds: all of them get here
            return added_up(Sums(summed, members, seen), cuts, mesh)

        sums = jax.shard_map(
            local,
            mesh=mesh,
            in_specs=(specs, rest, P(), P(), P(), over_examples(mesh), P()),
            out_specs=specs_of_sums(cuts),
            check_vma=False,
        )(carried.params, frozen, carried.clip_norm, words, pass_words, data, now)
        return released(rule, mesh, shard, carried, keys(words, pass_words)[0], sums, now)

    return step


def _those_of(drawn: Selection, first: Any, rows: int) -> Selection:
    """Of a selection, those among so many records from the first one on, as places in these."""
    places = drawn.indices.shape[0]
    at = drawn.indices - first
    mine = (jnp.arange(places, dtype=jnp.int32) < drawn.count) & (at >= 0) & (at < rows)
    where = jnp.nonzero(mine, size=min(rows, places), fill_value=0)[0]
    return Selection(at[where].astype(jnp.int32), jnp.sum(mine, dtype=jnp.int32))


def added_up(mine: Sums, cuts: Any, mesh: Mesh) -> Sums:
    """The sums over all devices, of which each keeps its part: once for a step, in a `shard_map`."""
    total = zipped(lambda part, spec: _summed(part, spec, mesh), mine.clipped.total, cuts)
    others = (mine.clipped.clipped, mine.clipped.not_finite, mine.members, mine.seen)
    clipped, not_finite, members, seen = jax.lax.psum(others, mesh.axis_names)
    return Sums(Clipped(total, clipped, not_finite), members, seen)


def specs_of_sums(cuts: Any) -> Any:
    """How that lies."""
    everywhere: Any = P()  # for all that was seen
    return Sums(Clipped(cuts, P(), P()), P(), everywhere)


def released(
    rule: StepRule, mesh: Mesh, shard: Any, carried: Carried, key: Any, sums: Sums, now: Numbers
) -> tuple[Carried, Observed]:
    """`release` for sums that lie as `sum_specs` says."""
    specs = param_specs(mesh, shard, carried.params)
    add_noise = sharded_noise(mesh, sum_specs(mesh, shard, carried.params))

    def noisy(key: Any, total: Any, std: Any) -> Any:
        place = lambda leaf, spec: jax.lax.with_sharding_constraint(leaf, NamedSharding(mesh, spec))
        return zipped(place, add_noise(key, total, std), specs)

    return release(rule, carried, key, sums, now, noisy)


def zipped(function: Callable[[Any, P], Any], tree: Any, specs: Any) -> Any:
    """A function of every array of a tree and its PartitionSpec."""
    leaves, structure = jax.tree_util.tree_flatten(tree)
    cuts = jax.tree_util.tree_leaves(specs, is_leaf=is_spec)
    return jax.tree_util.tree_unflatten(structure, list(map(function, leaves, cuts)))


def gathered(part: Any, spec: P) -> Any:
    """A whole array from the parts of all devices, in a `shard_map`."""
    for axis, names in enumerate(spec):
        if axes_of(names):
            part = jax.lax.all_gather(part, axes_of(names), axis=axis, tiled=True)
    return part


def _summed(total: Any, spec: P, mesh: Mesh) -> Any:
    """The sum over all devices, of which each keeps its part."""
    left = set(mesh.axis_names)
    for axis, names in enumerate(spec):
        if axes_of(names):
            total = jax.lax.psum_scatter(total, axes_of(names), scatter_dimension=axis, tiled=True)
            left -= set(axes_of(names))
    over = tuple(name for name in mesh.axis_names if name in left)
    return jax.lax.psum(total, over) if over else total


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
