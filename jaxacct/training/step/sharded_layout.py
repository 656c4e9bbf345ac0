"""Which part of every array of a step is on which device of a mesh: by shapes alone, so that all processes agree."""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxacct.core.validation import InputError
from jaxacct.training.step.parts import Rest
from jaxacct.training.step.parts import whole as model_of
from jaxacct.training.step.step_function import Carried

__all__ = [
    "axes_of",
    "carried_specs",
    "check_layout",
    "frozen_specs",
    "is_spec",
    "over_examples",
    "param_specs",
    "sum_specs",
]

MODES = ("data", "fsdp")
"""Ways to lay out parameters that have a name; any other is a pytree of PartitionSpecs."""
_LEAST = 1024
"""Entries of an array below which it is not worth cutting: every device has all of it."""


def is_spec(node: Any) -> bool:
    """Whether a node of a pytree is a PartitionSpec, which JAX may take for a container."""
    return isinstance(node, P)


def check_layout(mesh: Any, shard: Any) -> Mesh:
    """The mesh, with axes that JAX shards by itself; InputError where mesh or shard is none.

    >>> check_layout(jax.make_mesh((1,), ("x",)), "rows")
    Traceback (most recent call last):
        ...
    jaxacct.InputError: shard = 'rows' must be 'data', 'fsdp' or a pytree of PartitionSpecs; use one of them
    """
    if not isinstance(mesh, Mesh):
        raise InputError(f"mesh = {mesh!r:.40} must be a jax.sharding.Mesh; use jax.make_mesh((n,), ('devices',))")
    if not (isinstance(shard, str) and shard in MODES):
        specs = jax.tree_util.tree_leaves(shard, is_leaf=is_spec)
        if not specs or not all(is_spec(spec) for spec in specs):
            raise InputError(
                f"shard = {shard!r:.40} must be 'data', 'fsdp' or a pytree of PartitionSpecs; use one of them"
            )
        unknown = sorted({name for spec in specs for name in _axes_in(spec)} - set(mesh.axis_names))
        if unknown:
            raise InputError(
                f"shard names the axis {unknown[0]!r:.40}, must be among {mesh.axis_names}; use the mesh's axes"
            )
    return Mesh(mesh.devices, mesh.axis_names)


def axes_of(names: Any) -> tuple[str, ...]:
    """The mesh axes along which one axis of an array is cut."""
    return () if names is None else (names,) if isinstance(names, str) else tuple(names)


def _axes_in(spec: P) -> list[str]:
    """The mesh axes that a spec names; InputError where it names one twice, or leaves to JAX how an array lies."""
    found: list[str] | None
    try:
        found = [name for names in spec for name in axes_of(names)]
    except (TypeError, ValueError):  # P.UNCONSTRAINED, or sums that are still to be formed
        found = None
    if found is None or len(set(found)) < len(found):
        raise InputError(f"shard has {spec}, must name an axis once at most, and nothing else; use names and None")
    return found


def over_examples(mesh: Mesh) -> P:
    """Rows lie over all devices, whatever the axes of the mesh are for."""
    return P(mesh.axis_names)


def param_specs(mesh: Mesh, shard: Any, params: Any) -> Any:
    """A PartitionSpec for every parameter; InputError where one does not divide its array."""
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
    """How the sums of gradients lie when the noise is drawn.

    As the parameters do; where every device has all of a parameter, its sum is cut all the same: each device adds a
    part of the noise, and what is gathered afterwards is noisy.
    """
    specs = param_specs(mesh, shard, params)
    one = lambda leaf, spec: spec if any(axes_of(names) for names in spec) else _cut(np.shape(leaf), mesh)
    return jax.tree.map(one, params, specs)


def carried_specs(mesh: Mesh, shard: Any, carried: Carried) -> Carried:
    """A PartitionSpec for all that goes from step to step: what the optimizer keeps for a parameter lies as that does.

    It is found by its path, which ends in the parameter's, and by its shape.  (A guess that fails costs memory alone.)
    """
    params = jax.tree_util.tree_flatten_with_path(carried.params)[0]
    specs = param_specs(mesh, shard, carried.params)
    known = [
        (tuple(map(str, path)), np.shape(leaf), spec)
        for (path, leaf), spec in zip(params, jax.tree_util.tree_leaves(specs, is_leaf=is_spec), strict=True)
    ]

    def kept(path: Any, leaf: Any) -> P:
        names, shape = tuple(map(str, path)), np.shape(leaf)
        ends = lambda own: names[len(names) - len(own) :] == own
        fits = [(len(own), spec) for own, size, spec in known if size == shape and ends(own)]
        return max(fits, key=lambda fit: fit[0])[1] if fits else P()

    on_all = lambda tree: jax.tree.map(lambda _: P(), tree)
    opt_state = jax.tree_util.tree_map_with_path(kept, carried.opt_state)
    return Carried(specs, opt_state, on_all(carried.clip_norm), on_all(carried.not_finite))


def frozen_specs(mesh: Mesh, shard: Any, trained: Any, rest: Rest | None) -> Any:
    """A PartitionSpec for every frozen array: as if it were trained."""
    if rest is None:
        return None
    model = model_of(trained, rest)
    numbers = jax.tree.map(lambda leaf: leaf if hasattr(leaf, "shape") else np.zeros(()), model)
    specs = jax.tree_util.tree_leaves(param_specs(mesh, shard, numbers), is_leaf=is_spec)
    left, own = list(rest.frozen), []
    for leaf, spec in zip(jax.tree_util.tree_leaves(model), specs, strict=True):
        if left and leaf is left[0]:  # both are in the order of the model
            left.pop(0)
            own.append(spec)
    return Rest(tuple(own), rest.form)


def _cut(shape: tuple[int, ...], mesh: Mesh) -> P:
    """Along the first axis that the number of devices divides: a part is then in one piece, or in few."""
    if mesh.size == 1 or math.prod(shape) < _LEAST:
        return P()
    for axis, size in enumerate(shape):
        if size % mesh.size == 0:
            return P(*[None] * axis, mesh.axis_names)
    return P()
