"""One private step in three programs, for a batch that the host loads: no sums yet, a micro-batch more, the release.

What goes from one to the next is theirs alone: on a mesh it holds the sums of each device by itself, and the parameters
as every device needs them, gathered once for a step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxacct.training.step.parts import Rest
from jaxacct.training.step.sharded_layout import frozen_specs, over_examples, param_specs, sum_specs
from jaxacct.training.step.sharded_step import added_up, gathered, released, specs_of_sums, zipped
from jaxacct.training.step.step_function import Carried, Numbers, Observed, StepRule, Sums, add, keys, no_sums, release

__all__ = ["Gathering", "LoadedStep", "loaded_step", "sharded_loaded_step"]


class LoadedStep(NamedTuple):
    """Three pure functions.

    nothing : (carried, frozen) -> so far.
    one : (carried, key words, so far, rows, indices, mask, frozen) -> so far.
    end : (carried, key words, so far, numbers) -> (carried, observed).
    """

    nothing: Callable[..., Any]
    one: Callable[..., Any]
    end: Callable[..., tuple[Carried, Observed]]


class Gathering(NamedTuple):
    """Between the micro-batches of a step on a mesh.

    sums : the first axis is that of the devices, each of which has its own.  params, frozen : all of them, everywhere.
    """

    sums: Any
    params: Any
    frozen: Any


def loaded_step(rule: StepRule, rows: Any) -> LoadedStep:
    """For one device; ``rows`` holds the shapes of a micro-batch."""

    def nothing(carried: Carried, frozen: Rest | None) -> Sums:
        return no_sums(rule, carried, rows, frozen)

    def one(
        carried: Carried, words: Any, so_far: Sums, rows: Any, indices: Any, mask: Any, frozen: Rest | None
    ) -> Sums:
        return add(rule, carried, keys(words, words)[0], so_far, rows, indices, mask, frozen)

    def end(carried: Carried, words: Any, sums: Sums, now: Numbers) -> tuple[Carried, Observed]:
        return release(rule, carried, keys(words, words)[0], sums, now)

    return LoadedStep(nothing, one, end)


def sharded_loaded_step(rule: StepRule, rows: Any, mesh: Mesh, shard: Any) -> LoadedStep:
    """For the devices of a mesh, each of which has an equal part of every micro-batch."""
    spread = over_examples(mesh)
    over = lambda function, ins, outs: jax.shard_map(function, mesh=mesh, in_specs=ins, out_specs=outs, check_vma=False)
    at_hand = lambda params, clip_norm: Carried(params, None, clip_norm, None)

    def nothing(carried: Carried, frozen: Rest | None) -> Gathering:
        specs = param_specs(mesh, shard, carried.params)
        rest = P() if frozen is None else frozen_specs(mesh, shard, carried.params, frozen)

        def local(params: Any, frozen: Any, clip_norm: Any) -> Gathering:
            params = zipped(gathered, params, specs)
            frozen = frozen if frozen is None else zipped(gathered, frozen, rest)
            sums = no_sums(rule, at_hand(params, clip_norm), rows, frozen)
            return Gathering(jax.tree.map(lambda a: a[None], sums), params, frozen)

        begin = over(local, (specs, rest, P()), Gathering(spread, P(), P()))
        done: Gathering = begin(carried.params, frozen, carried.clip_norm)
        return done

    def one(
        carried: Carried, words: Any, so_far: Gathering, rows: Any, indices: Any, mask: Any, _: Rest | None
    ) -> Gathering:
        def local(so_far: Gathering, clip_norm: Any, words: Any, rows: Any, indices: Any, mask: Any) -> Any:
            mine = jax.tree.map(lambda a: a[0], so_far.sums)
            here, key = at_hand(so_far.params, clip_norm), keys(words, words)[0]
            return jax.tree.map(lambda a: a[None], add(rule, here, key, mine, rows, indices, mask, so_far.frozen))

        more = over(local, (Gathering(spread, P(), P()), P(), P(), spread, spread, spread), spread)
        return so_far._replace(sums=more(so_far, carried.clip_norm, words, rows, indices, mask))

    def end(carried: Carried, words: Any, so_far: Gathering, now: Numbers) -> tuple[Carried, Observed]:
        cuts = sum_specs(mesh, shard, carried.params)
        local = lambda sums: added_up(jax.tree.map(lambda a: a[0], sums), cuts, mesh)
        sums = over(local, (spread,), specs_of_sums(cuts))(so_far.sums)
        return released(rule, mesh, shard, carried, keys(words, words)[0], sums, now)

    return LoadedStep(nothing, one, end)
