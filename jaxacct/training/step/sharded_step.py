"""One private step on the devices of a mesh: the same mechanism as `private_step`.

Parameters, sums over the members of a batch, and what is noisy already cross devices; examples do not.

Why it is the same mechanism: jaxacct/training/step/README.md, "Several devices".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxacct.training.step.clipping import Clipped
from jaxacct.training.step.parts import Rest
from jaxacct.training.step.sampler import Selection
from jaxacct.training.step.sharded_layout import axes_of, frozen_specs, is_spec, over_examples, param_specs, sum_specs
from jaxacct.training.step.sharded_noise import sharded_noise
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

__all__ = ["added_up", "gathered", "released", "sharded_step", "specs_of_sums", "zipped"]


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
