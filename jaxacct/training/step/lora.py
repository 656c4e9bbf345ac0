"""Low-rank adapters: W + scale a b in place of each chosen array W, where W is frozen and only a and b are trained.

No model has to be changed.  The function that uses the parameters is traced; where a product uses an adapted W, the
input goes through W and, beside it, through a and then b, so that no example has a gradient of the size of W.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from jaxacct.core.validation import COUNT, POSITIVE, InputError, check
from jaxacct.training.step.opened import Outer, arrays_of, closed, opened, paths
from jaxacct.training.step.traces import bind, evaluate

__all__ = ["LoRA", "adapted", "lora"]


@functools.partial(jax.tree_util.register_dataclass, data_fields=["base", "adapters"], meta_fields=["scale", "outer"])
@dataclass(frozen=True)
class LoRA:
    """Parameters with low-rank adapters, made by `lora`.

    A Trainer takes it in place of the parameters.  It trains the adapters, and of the base what ``trainable`` selects.
    The loss gets the parameters that it knows.

    Parameters
    ----------
    base : the parameters, as a pytree; of an nnx module nested dicts.
    adapters : {path of an array in the base: {"a": (leading axes, rank), "b": (rank, trailing axes)}}.
    scale : alpha / rank.
    outer : what an nnx module is besides; None for other models.

    References
    ----------
    Hu et al. 2022, "LoRA: low-rank adaptation of large language models"; Yu et al. 2022 (with differential privacy).

    >>> adapted = lora({"kernel": jnp.ones((4, 3))}, 2)
    >>> {name: each.shape for name, each in adapted.adapters["kernel"].items()}
    {'a': (4, 2), 'b': (2, 3)}
    >>> bool((adapted.merge()["kernel"] == 1.0).all())  # b is zero at first
    True
    """

    base: Any
    adapters: dict[str, dict[str, Any]]
    scale: float
    outer: Outer | None = field(default=None, repr=False)

    def merge(self) -> Any:
        """The parameters, or the module, with W + scale a b in place of each adapted W."""
        leaves, structure = jax.tree_util.tree_flatten(self.base)
        for place, path in enumerate(paths(self.base)):
            if path in self.adapters:
                leaves[place] = _Adapted(leaves[place], *self.factors(path), self.scale).merged()
        return closed(jax.tree_util.tree_unflatten(structure, leaves), self.outer)

    def factors(self, path: str) -> tuple[Any, Any]:
        """a and b of one adapted array."""
        return self.adapters[path]["a"], self.adapters[path]["b"]


def lora(params: Any, rank: int, *, where: Any = None, alpha: float | None = None, key: Any = None) -> LoRA:
    """Parameters with low-rank adapters, ready to be trained privately: W + (alpha/rank) a b, b zero at first.

    Parameters
    ----------
    params : linen variables, an nnx or Equinox module, or any pytree: the base, which stays as it is.  It must not come
        from the private data.
    rank : int, at least 1; of each product a b.
    where : a function path -> bool, of paths such as "params/Dense_0/kernel"; by default arrays of two or three axes
        named "kernel", and of two axes named "weight".  Convolutions and look-ups are adapted as well where they are
        chosen, with a gradient of W's own size for each example.
    alpha : > 0, by default the rank, so that the scale is 1.
    key : a JAX key for a, which is N(0, 1/fan-in); by default from the operating system.

    Returns
    -------
    LoRA : for ``trainer.init``; its ``merge()`` gives parameters without adapters.

    Raises
    ------
    InputError : nothing chosen, an array of fewer than two axes, a bad rank or alpha.

    An array of more than two axes is cut into leading and trailing axes where the two are most nearly of one size: for
    a projection (features, heads, width) after the first axis, for one (heads, width, features) before the last.

    References
    ----------
    Hu et al. 2022, "LoRA: low-rank adaptation of large language models".

    >>> params = {"dense": {"kernel": jnp.ones((6, 4)), "bias": jnp.zeros(4)}}
    >>> lora(params, 2, alpha=8.0).scale
    4.0
    """
    from jaxacct.core.chacha import fresh_key

    size = int(check("rank", rank, COUNT))
    scale = 1.0 if alpha is None else float(check("alpha", alpha, POSITIVE)) / size
    key = fresh_key() if key is None else key
    base, outer = opened(params)
    adapters = {}
    chosen = _by_name if where is None else lambda path, array: where(path)
    for place, (path, array) in enumerate(zip(paths(base), arrays_of(base), strict=True)):
        if array is None or not chosen(path, array):
            continue
        if array.ndim < 2 or not jnp.issubdtype(array.dtype, jnp.floating):
            raise InputError(
                f"where selects {path}, {array.dtype} of {array.ndim} axes, must be floating and of two or more; "
                "train it by trainable="
            )
        split = _split(array.shape)
        lead, trail = array.shape[:split], array.shape[split:]
        dtype = jnp.promote_types(array.dtype, jnp.float32)
        first = jax.random.normal(jax.random.fold_in(key, place), (*lead, size), dtype) / math.sqrt(math.prod(lead))
        adapters[path] = {"a": first, "b": jnp.zeros((size, *trail), dtype)}
    if not adapters:
        raise InputError("where selects none of the parameters, must select at least one; it is given paths")
    return LoRA(base, adapters, scale, outer)


def adapted(function: Callable[..., Any]) -> Callable[..., Any]:
    """(model, ...) -> what a function of a model returns; also of a `LoRA`, without forming any W + scale a b."""

    @functools.wraps(function)
    def run(model: Any, *others: Any) -> Any:
        if not isinstance(model, LoRA):
            return function(model, *others)
        leaves, structure = jax.tree_util.tree_flatten(model.base)
        there = [place for place, array in enumerate(arrays_of(model.base)) if array is not None]

        def flat(values: Sequence[Any], rest: Any) -> Any:
            filled = list(leaves)
            for place, value in zip(there, values, strict=True):
                filled[place] = value
            return function(closed(jax.tree_util.tree_unflatten(structure, filled), model.outer), *rest)

        arrays = [jnp.asarray(leaves[place]) for place in there]
        traced, form = jax.make_jaxpr(flat, return_shape=True)(arrays, others)
        names = paths(model.base)
        values = [
            _Adapted(array, *model.factors(names[place]), model.scale) if names[place] in model.adapters else array
            for place, array in zip(there, arrays, strict=True)
        ]
        outputs = evaluate(traced, [*values, *jax.tree_util.tree_leaves(others)], _operation)
        return jax.tree_util.tree_unflatten(jax.tree_util.tree_structure(form), [_merged(out) for out in outputs])

    return run


@dataclass(frozen=True)
class _Adapted:
    """W and its factors, on the way to the operation that uses them."""

    w: Any
    a: Any
    b: Any
    scale: float

    def merged(self) -> Any:
        """W + scale a b, with W's dtype."""
        product = jnp.tensordot(self.a * self.scale, self.b, 1, precision=jax.lax.Precision.HIGHEST)
        return (self.w.astype(product.dtype) + product).astype(self.w.dtype)


def _merged(value: Any) -> Any:
    return value.merged() if isinstance(value, _Adapted) else value


def _operation(place: int, eqn: Any, operands: list[Any]) -> list[Any]:
    """An operation of a trace: products with an adapted W and casts of it keep the factors apart."""
    adapted = [side for side, value in enumerate(operands) if isinstance(value, _Adapted)]
    if len(adapted) == 1:
        value = operands[adapted[0]]
        floating = jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.floating)  # a sum of integers is not a rounded sum
        if eqn.primitive.name == "convert_element_type" and floating:
            cast = bind(place, eqn, [value.w])[0]
            return [_Adapted(cast, value.a.astype(cast.dtype), value.b.astype(cast.dtype), value.scale)]
        if eqn.primitive.name == "dot_general":
            beside = _beside(eqn.params, operands, adapted[0])
            if beside is not None:
                y = bind(place, eqn, [_plain(operand) for operand in operands])[0]
                return [y + beside.astype(y.dtype)]
    return bind(place, eqn, [_merged(operand) for operand in operands])


def _plain(value: Any) -> Any:
    return value.w if isinstance(value, _Adapted) else value


def _beside(params: Mapping[str, Any], operands: list[Any], side: int) -> Any:
    """scale x a b of a product of x and W, or scale x b^T a^T of one over W's trailing axes; None for any other."""
    contracted, batch = params["dimension_numbers"]
    w, x = operands[side], operands[1 - side]
    lead = w.a.ndim - 1
    over = tuple(contracted[side])
    if batch[0] or sorted(over) not in (list(range(lead)), list(range(lead, w.w.ndim))):
        return None
    forward = sorted(over) == list(range(lead))
    a, b = w.a.astype(w.w.dtype), w.b.astype(w.w.dtype)
    near, far = (a, b) if forward else (b, a)
    along = over if forward else tuple(1 + axis - lead for axis in over)
    product = functools.partial(
        jax.lax.dot_general, precision=params["precision"], preferred_element_type=params["preferred_element_type"]
    )
    rank_axis = 0 if forward else far.ndim - 1
    if side == 1:  # x W: the rank comes last
        inner = product(x, near, ((contracted[0], along), ((), ())))
        return product(inner * w.scale, far.astype(inner.dtype), (((inner.ndim - 1,), (rank_axis,)), ((), ())))
    inner = product(near, x, ((along, contracted[1]), ((), ())))  # W x: the rank comes first
    return product(far.astype(inner.dtype), inner * w.scale, (((rank_axis,), (0,)), ((), ())))


def _by_name(path: str, array: Any) -> bool:
    """Whether an array is a matrix by its name."""
    name = path.rpartition("/")[2]
    return (name == "kernel" and array.ndim in (2, 3)) or (name == "weight" and array.ndim == 2)


def _split(shape: tuple[int, ...]) -> int:
    """Where to cut the axes in two parts that are most nearly of one size."""
    return min(range(1, len(shape)), key=lambda at: max(math.prod(shape[:at]), math.prod(shape[at:])))
