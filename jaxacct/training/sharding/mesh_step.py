"""One private step on the devices of a mesh, the same mechanism as `private_step` (README.md, "Several devices")."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxacct.core.chacha import key_words
from jaxacct.core.validation import InputError
from jaxacct.training.clipping.clipped_sum import Clipped, wide
from jaxacct.training.sampling.sampler import Selection
from jaxacct.training.step import step_function
from jaxacct.training.step.models import Untrained, join_model
from jaxacct.training.step.noise import UNIT, with_noise
from jaxacct.training.step.step_function import Carried, Correlated, Numbers, Observed, StepRule, Sums, keys, own_state

MODES = ("data", "fsdp")  # named layouts of the parameters; any other layout is a pytree of PartitionSpecs


def sharded_step(rule: StepRule, mesh: Mesh, shard: Any, size: int) -> Callable[..., tuple[Carried, Observed]]:
    """Return `private_step` for a mesh.  Device d has records or users d r to d r + r - 1, r = ceil(size / devices)."""

    def step(
        carried: Carried, words: Any, pass_words: Any, data: Any, now: Numbers, frozen: Untrained | None = None
    ) -> tuple[Carried, Observed]:
        specs, cuts = param_specs(mesh, shard, carried.params), sum_specs(mesh, shard, carried.params)
        rest = frozen_specs(mesh, shard, carried.params, frozen)
        rows = (data.count if rule.examples_per_user else jax.tree_util.tree_leaves(data)[0]).shape[0] // mesh.size

        def local(
            params: Any, frozen: Any, clip_norm: Any, words: Any, pass_words: Any, data: Any, now: Numbers
        ) -> Sums:
            key, pass_key = keys(words, pass_words)
            first = jax.lax.axis_index(mesh.axis_names) * rows
            here = _those_of(step_function.draw(rule, key, pass_key, size, now), first, rows)
            whole, of_model = at_hand(params, specs, frozen, rest, clip_norm)
            # Add up only after the loop in `sums_over`: devices with different numbers of turns would wait forever.
            return added_up(step_function.sums_over(rule, whole, key, here, data, of_model, first), cuts, mesh)

        sums = jax.shard_map(
            local,
            mesh=mesh,
            in_specs=(specs, rest, P(), P(), P(), P(mesh.axis_names), P()),
            out_specs=specs_of_sums(cuts),
            check_vma=False,
        )(carried.params, frozen, carried.clip_norm, words, pass_words, data, now)
        return released(rule, mesh, shard, carried, keys(words, pass_words)[0], sums, now)

    return step


def _those_of(drawn: Selection, first: Any, rows: int) -> Selection:
    """Return the drawn records among `first` to `first + rows - 1`, which a device has.  Number `first` becomes 0."""
    places = drawn.indices.shape[0]
    at = drawn.indices - first
    mine = (jnp.arange(places, dtype=jnp.int32) < drawn.count) & (at >= 0) & (at < rows)
    where = jnp.nonzero(mine, size=min(rows, places), fill_value=0)[0]
    return Selection(at[where].astype(jnp.int32), jnp.sum(mine, dtype=jnp.int32))


def added_up(mine: Sums, cuts: Any, mesh: Mesh) -> Sums:
    """Add up all devices' sums, in a `shard_map`; a device keeps its part of the gradients' sum, as `cuts` says."""
    total = zipped(lambda part, spec: _summed(part, spec, mesh), mine.clipped.total, cuts)
    others = (mine.clipped.clipped, mine.clipped.not_finite, mine.members, mine.seen)
    clipped, not_finite, members, seen = jax.lax.psum(others, mesh.axis_names)
    return Sums(Clipped(total, clipped, not_finite), members, seen)


def specs_of_sums(cuts: Any) -> Any:
    """Return the PartitionSpecs of the result of `added_up`."""
    on_all: Any = P()  # the spec of every array in the field `seen`: each device has the whole array
    return Sums(Clipped(cuts, P(), P()), P(), on_all)


def released(
    rule: StepRule, mesh: Mesh, shard: Any, carried: Carried, key: Any, sums: Sums, now: Numbers
) -> tuple[Carried, Observed]:
    """Return the result of `release` on a mesh, for sums whose arrays are cut over the devices as `sum_specs` says."""
    specs = param_specs(mesh, shard, carried.params)
    add_noise = sharded_noise(mesh, sum_specs(mesh, shard, carried.params))

    def noisy(key: Any, total: Any, std: Any) -> Any:
        place = lambda leaf, spec: jax.lax.with_sharding_constraint(leaf, NamedSharding(mesh, spec))
        return zipped(place, add_noise(key, total, std), specs)

    return step_function.release(rule, carried, key, sums, now, noisy)


def zipped(function: Callable[[Any, P], Any], tree: Any, specs: Any) -> Any:
    """Apply a function to each array of a tree together with the array's PartitionSpec."""
    leaves, structure = jax.tree_util.tree_flatten(tree)
    cuts = jax.tree_util.tree_leaves(specs, is_leaf=is_spec)
    return jax.tree_util.tree_unflatten(structure, list(map(function, leaves, cuts)))


def at_hand(params: Any, specs: Any, frozen: Any, rest: Any, clip_norm: Any) -> tuple[Carried, Any]:
    """In a `shard_map`, gather whole arrays of `params`, cut as `specs` says, and of `frozen`, cut as `rest` says."""

    def gathered(part: Any, spec: P) -> Any:
        for axis, names in enumerate(spec):
            if axes_of(names):
                part = jax.lax.all_gather(part, axes_of(names), axis=axis, tiled=True)
        return part

    return Carried(zipped(gathered, params, specs), None, clip_norm, None), zipped(gathered, frozen, rest)


def _summed(total: Any, spec: P, mesh: Mesh) -> Any:
    """Return the sum of an array over all devices; each device keeps the part of the sum that `spec` gives it."""
    left = set(mesh.axis_names)
    for axis, names in enumerate(spec):
        if axes_of(names):
            total = jax.lax.psum_scatter(total, axes_of(names), scatter_dimension=axis, tiled=True)
            left -= set(axes_of(names))
    over = tuple(name for name in mesh.axis_names if name in left)
    return jax.lax.psum(total, over) if over else total


def sharded_noise(mesh: Mesh, specs: Any) -> Callable[[Any, Any, Any], Any]:
    """Return a function (key, tree, std) that adds independent N(0, std^2) noise to every entry of a tree.

    `specs` says how the arrays are cut.  On every mesh, entry p of a whole array (p counts row by row) gets normal draw
    p % 32 of unit p // 32.
    """

    def add(key: Any, tree: Any, std: Any) -> Any:
        leaves, structure = jax.tree_util.tree_flatten(tree)
        cuts = tuple(jax.tree_util.tree_leaves(specs, is_leaf=is_spec))
        shapes = [leaf.shape for leaf in leaves]
        for place, shape in enumerate(shapes):
            if math.prod(shape) >= 2**32:  # the numbers of the entries must fit in uint32
                raise InputError(f"leaf {place} has {math.prod(shape)} entries, must have < 2**32; cut it in two")

        def local(words: Any, std: Any, *parts: Any) -> tuple[Any, ...]:
            runs = [_run(*each) for each in zip(shapes, [part.shape for part in parts], cuts, strict=True)]
            dtypes, noisy = [wide(part.dtype) for part in parts], list(parts)
            for dtype in dict.fromkeys(dtypes):
                mine = {place: runs[place] for place, own in enumerate(dtypes) if own == dtype}
                zeros = {place: jnp.zeros((UNIT, run.units), dtype) for place, run in mine.items()}
                first = {place: run.first // UNIT for place, run in mine.items()}
                for place, draws in with_noise(words, zeros, jnp.asarray(std, dtype), len(parts), first).items():
                    noisy[place] = parts[place].astype(dtype) + runs[place].cut(draws, parts[place].shape)
            return tuple(noisy)

        on_each = jax.shard_map(local, mesh=mesh, in_specs=(P(), P(), *cuts), out_specs=cuts, check_vma=False)
        return jax.tree_util.tree_unflatten(structure, on_each(key_words(key), std, *leaves))

    return add


class _Run(NamedTuple):
    """Consecutive entries of an array, counted row by row, that contain the part of the array that a device has."""

    first: Any  # uint32, the number of the first of these entries in the array; it may differ between devices
    shape: tuple[int, ...]  # the shape that these entries have as an array of their own
    begins: list[Any]  # for each axis of `shape`, the index at which the device's part begins

    @property
    def units(self) -> int:
        """Largest number of units of noise that these entries can touch, wherever in its unit the first entry lies."""
        return (math.prod(self.shape) + UNIT - 2) // UNIT + 1

    def cut(self, draws: Any, part: tuple[int, ...]) -> Any:
        """Given the draws of all units, shape (32, units), return the draws for the device's part, of shape `part`."""
        own = jax.lax.dynamic_slice_in_dim(draws.T.reshape(-1), self.first % UNIT, math.prod(self.shape))
        return jax.lax.dynamic_slice(own.reshape(self.shape), self.begins, part)


def _run(whole: tuple[int, ...], part: tuple[int, ...], spec: P) -> _Run:
    """Return a device's `_Run`: just the device's part if only the first axis is cut, else the whole array."""
    names = [axes_of(spec[axis]) if axis < len(spec) else () for axis in range(len(whole))]
    place = [jax.lax.axis_index(own).astype(jnp.uint32) if own else jnp.uint32(0) for own in names]
    if part[:1] != whole[:1] and part[1:] == whole[1:]:
        return _Run(place[0] * np.uint32(math.prod(part)), part, [0] * len(part))
    return _Run(jnp.uint32(0), whole, [at * np.uint32(size) for at, size in zip(place, part, strict=True)])


def is_spec(node: Any) -> bool:
    """Return whether a node is a PartitionSpec; use it as ``is_leaf``, because JAX may treat a spec as a container."""
    return isinstance(node, P)


def check_layout(mesh: Any, shard: Any) -> Mesh:
    """Return the same mesh with its axes in JAX's automatic mode.  Raise InputError for an invalid mesh or shard."""
    if not isinstance(mesh, Mesh):
        raise InputError(f"mesh = {mesh!r:.40} must be a jax.sharding.Mesh; use jax.make_mesh((n,), ('devices',))")
    if not (isinstance(shard, str) and shard in MODES):
        specs = jax.tree_util.tree_leaves(shard, is_leaf=is_spec)
        if not specs or not all(is_spec(spec) for spec in specs):
            raise InputError(f"shard = {shard!r:.40} must be 'data', 'fsdp' or a pytree of PartitionSpecs")
        unknown = sorted({name for spec in specs for name in _axes_in(spec)} - set(mesh.axis_names))
        if unknown:
            raise InputError(f"shard names the axis {unknown[0]!r:.40}, must be one of the mesh's: {mesh.axis_names}")
    return Mesh(mesh.devices, mesh.axis_names)


def axes_of(names: Any) -> tuple[str, ...]:
    """Return the mesh axes that one entry of a PartitionSpec names, as a tuple."""
    return () if names is None else (names,) if isinstance(names, str) else tuple(names)


def _axes_in(spec: P) -> list[str]:
    """Return the mesh axes that a spec names; raise InputError if it names an axis twice, or anything but an axis."""
    found: list[str] | None
    try:
        found = [name for names in spec for name in axes_of(names)]
    except (TypeError, ValueError):  # raised for P.UNCONSTRAINED, and for a spec with unreduced or reduced axes
        found = None
    if found is None or len(set(found)) < len(found):
        raise InputError(f"shard has {spec}, must name an axis once at most, and nothing else; use names and None")
    return found


def param_specs(mesh: Mesh, shard: Any, params: Any) -> Any:
    """Return a PartitionSpec for every parameter.  Raise InputError if a spec cuts its array into unequal parts."""
    if shard == "data":
        return jax.tree.map(lambda _: P(), params)
    if shard == "fsdp":
        return jax.tree.map(lambda leaf: _cut(np.shape(leaf), mesh), params)
    try:
        specs = jax.tree.map(lambda spec, part: jax.tree.map(lambda _: spec, part), shard, params, is_leaf=is_spec)
    except ValueError as error:
        reason = str(error).splitlines()[0][:80]
        raise InputError(f"shard must be a prefix of the parameters ({reason}); give PartitionSpecs for them") from None
    paths, leaves = jax.tree_util.tree_flatten_with_path(params)[0], jax.tree_util.tree_leaves(specs, is_leaf=is_spec)
    for (path, leaf), spec in zip(paths, leaves, strict=True):
        shape, parts = np.shape(leaf), [math.prod(mesh.shape[name] for name in axes_of(names)) for names in spec]
        if len(parts) > len(shape) or any(size % part for size, part in zip(shape, parts, strict=False)):
            raise InputError(
                f"parameter {jax.tree_util.keystr(path) or 'params'} has shape {shape}, must be cut evenly by {spec}; "
                "give another PartitionSpec"
            )
    return specs


def sum_specs(mesh: Mesh, shard: Any, params: Any) -> Any:
    """Return the specs of the sum of the gradients: a parameter's own spec if it cuts an axis, else `_cut`'s."""
    specs = param_specs(mesh, shard, params)
    one = lambda leaf, spec: spec if any(axes_of(names) for names in spec) else _cut(np.shape(leaf), mesh)
    return jax.tree.map(one, params, specs)


def carried_specs(mesh: Mesh, shard: Any, carried: Carried) -> Carried:
    """Return the PartitionSpecs of a `Carried`."""
    params = jax.tree_util.tree_flatten_with_path(carried.params)[0]
    specs = param_specs(mesh, shard, carried.params)
    known = [
        (tuple(map(str, path)), np.shape(leaf), spec)
        for (path, leaf), spec in zip(params, jax.tree_util.tree_leaves(specs, is_leaf=is_spec), strict=True)
    ]

    def kept(path: Any, leaf: Any) -> P:  # path mu/w gets the spec of parameter w if the shapes are equal; else P()
        names, shape = tuple(map(str, path)), np.shape(leaf)
        ends = lambda own: names[len(names) - len(own) :] == own
        fits = [(len(own), spec) for own, size, spec in known if size == shape and ends(own)]
        return max(fits, key=lambda fit: fit[0])[1] if fits else P()

    on_all = lambda tree: jax.tree.map(lambda _: P(), tree)
    opt_state = jax.tree_util.tree_map_with_path(kept, own_state(carried.opt_state))
    if isinstance(carried.opt_state, Correlated):
        opt_state = Correlated(jax.tree.map(lambda spec: P(None, *spec), specs, is_leaf=is_spec), opt_state)
    return Carried(specs, opt_state, on_all(carried.clip_norm), on_all(carried.not_finite))


def frozen_specs(mesh: Mesh, shard: Any, trained: Any, rest: Untrained | None) -> Any:
    """Return a PartitionSpec for every frozen array: the spec that the array would have if it were trained."""
    if rest is None:
        return None
    model = join_model(trained, rest)
    numbers = jax.tree.map(lambda leaf: leaf if hasattr(leaf, "shape") else np.zeros(()), model)
    specs = jax.tree_util.tree_leaves(param_specs(mesh, shard, numbers), is_leaf=is_spec)
    left, own = list(rest.frozen), []
    for leaf, spec in zip(jax.tree_util.tree_leaves(model), specs, strict=True):
        if left and leaf is left[0]:  # the frozen leaves have the model's order: compare only with the next one
            left.pop(0)
            own.append(spec)
    return Untrained(tuple(own), rest.form)


def _cut(shape: tuple[int, ...], mesh: Mesh) -> P:
    """Return a spec that cuts the first axis whose length is a multiple of the number of devices, if there is one."""
    if mesh.size == 1 or math.prod(shape) < 1024:  # a small array is cheaper whole
        return P()
    for axis, size in enumerate(shape):
        if size % mesh.size == 0:
            return P(*[None] * axis, mesh.axis_names)
    return P()


LoadedStep = tuple[Callable[..., Any], Callable[..., Any], Callable[..., tuple[Carried, Observed]]]
"""Three functions for batches that the host loads: begin a step, add a micro-batch, and release the sums."""


def loaded_step(rule: StepRule, rows: Any) -> LoadedStep:
    """Return a `LoadedStep` for one device, given a micro-batch `rows` or only its shapes and dtypes."""

    def nothing(carried: Carried, frozen: Untrained | None) -> Sums:
        return step_function.no_sums(rule, carried, rows, frozen)

    def one(
        carried: Carried, words: Any, so_far: Sums, rows: Any, indices: Any, mask: Any, frozen: Untrained | None
    ) -> Sums:
        return step_function.add(rule, carried, keys(words, words)[0], so_far, rows, indices, mask, frozen)

    def end(carried: Carried, words: Any, sums: Sums, now: Numbers) -> tuple[Carried, Observed]:
        return step_function.release(rule, carried, keys(words, words)[0], sums, now)

    return nothing, one, end


def sharded_loaded_step(rule: StepRule, rows: Any, mesh: Mesh, shard: Any) -> LoadedStep:
    """Return `loaded_step` for a mesh.  Until the release, arrays of `Sums` have an extra first axis: the devices."""
    spread = P(mesh.axis_names)
    over = lambda function, ins, outs: jax.shard_map(function, mesh=mesh, in_specs=ins, out_specs=outs, check_vma=False)

    def nothing(carried: Carried, frozen: Untrained | None) -> Sums:
        alone: Sums = jax.eval_shape(lambda: step_function.no_sums(rule, carried, rows, frozen))
        return jax.tree.map(lambda a: jnp.zeros((mesh.size, *a.shape), a.dtype), alone)

    def one(
        carried: Carried, words: Any, so_far: Sums, rows: Any, indices: Any, mask: Any, frozen: Untrained | None
    ) -> Sums:
        specs, rest = param_specs(mesh, shard, carried.params), frozen_specs(mesh, shard, carried.params, frozen)

        def local(
            so_far: Sums, params: Any, frozen: Any, clip_norm: Any, words: Any, rows: Any, indices: Any, mask: Any
        ) -> Sums:
            here, of_model = at_hand(params, specs, frozen, rest, clip_norm)
            mine = jax.tree.map(lambda a: a[0], so_far)
            mine = step_function.add(rule, here, keys(words, words)[0], mine, rows, indices, mask, of_model)
            return jax.tree.map(lambda a: a[None], mine)

        more = over(local, (spread, specs, rest, P(), P(), spread, spread, spread), spread)
        done: Sums = more(so_far, carried.params, frozen, carried.clip_norm, words, rows, indices, mask)
        return done

    def end(carried: Carried, words: Any, so_far: Sums, now: Numbers) -> tuple[Carried, Observed]:
        cuts = sum_specs(mesh, shard, carried.params)
        local = lambda sums: added_up(jax.tree.map(lambda a: a[0], sums), cuts, mesh)
        sums = over(local, (spread,), specs_of_sums(cuts))(so_far)
        return released(rule, mesh, shard, carried, keys(words, words)[0], sums, now)

    return nothing, one, end
