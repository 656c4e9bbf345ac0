"""Turns models of any kind into pytrees, splits them into trained and frozen parts, and adds adapters and losses."""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import sys
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxacct.core.chacha import CHACHA20, fresh_key
from jaxacct.core.types import Leaf, PyTree
from jaxacct.core.validation import COUNT, POSITIVE, InputError, check
from jaxacct.training.clipping.traces import bind, evaluate, is_key

_REMEDY = "use GroupNorm or LayerNorm, or statistics of public data, frozen (trainable=) and only read"
_NO_KEY = "the module draws random numbers and has no key for it; give rngs=True, or the names of its streams"


@dataclass(frozen=True)
class Outer:
    """Form of an nnx module: the graph that `nnx.split` returns, the structure of its state, and facts of each leaf."""

    graph: Any
    structure: Any
    order: tuple[int, ...]  # for each leaf of `model_as_pytree`'s pytree, its index among the state's leaves
    kinds: tuple[type, ...]  # for each such leaf, the type of its nnx variable

    def of_kind(self, kind: str) -> list[bool]:
        """Return for each leaf whether it is an nnx variable of the named type, or of a type derived from it."""
        return [issubclass(each, getattr(_nnx(), kind)) for each in self.kinds]


def is_nnx(model: Any) -> bool:
    """Return whether a model is a module of flax.nnx."""
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(model, nnx.Module)


def is_equinox(value: Any, name: str = "Module") -> bool:
    """Return whether a value is an instance of the named class of Equinox, or of a derived class."""
    bases = type(value).__mro__
    return any(base.__name__ == name and base.__module__.split(".")[0] == "equinox" for base in bases)


def has_equinox(tree: Any) -> bool:
    """Return whether a module of Equinox is in a pytree."""
    return any(is_equinox(node) for node in jax.tree_util.tree_leaves(tree, is_leaf=is_equinox))


def model_as_pytree(model: Any) -> tuple[Any, Outer | None]:
    """Return a model's pytree and, for an nnx module, its `Outer` (else None).  Refuse a model with Equinox state."""
    if is_nnx(model):
        nnx = _nnx()
        graph, state = nnx.split(model)
        leaves, structure = jax.tree_util.tree_flatten(state)
        kinds = [
            type(variable)
            for variable in jax.tree_util.tree_leaves(state, is_leaf=lambda node: isinstance(node, nnx.Variable))
        ]
        places = nnx.to_pure_dict(jax.tree_util.tree_unflatten(structure, range(len(leaves))))
        order, form = jax.tree_util.tree_flatten(places)
        outer = Outer(graph, structure, tuple(order), tuple(kinds[place] for place in order))
        return jax.tree_util.tree_unflatten(form, [leaves[place] for place in order]), outer
    stateful = lambda node: is_equinox(node, "StateIndex") or is_equinox(node, "State")
    if any(stateful(node) for node in jax.tree_util.tree_leaves(model, is_leaf=stateful)):
        raise InputError("the model has an equinox.nn.State, which mixes examples; use GroupNorm or LayerNorm")
    return model, None


def pytree_as_model(tree: Any, outer: Outer | None) -> Any:
    """Invert `model_as_pytree`: return the model, given its pytree and its `Outer`."""
    if outer is None:
        return tree
    # the graph fixes the dict keys of `tree`, hence the order of its leaves: leaf i has index `order[i]` in the state
    values: list[Any] = [None] * len(outer.order)
    for place, value in zip(outer.order, jax.tree_util.tree_leaves(tree), strict=True):
        values[place] = value
    return _nnx().merge(outer.graph, jax.tree_util.tree_unflatten(outer.structure, values))


def arrays_of(tree: Any) -> list[Any]:
    """Return each leaf as a JAX array, None if it is no array.  Numbers count as arrays, except in an Equinox model."""
    kinds = (jax.Array, np.ndarray) if has_equinox(tree) else (jax.Array, np.ndarray, np.generic, bool, int, float)
    return [jnp.asarray(leaf) if isinstance(leaf, kinds) else None for leaf in jax.tree_util.tree_leaves(tree)]


def paths(tree: Any) -> list[str]:
    """Return the path of every leaf, such as "params/Dense_0/kernel"."""
    found = jax.tree_util.tree_flatten_with_path(tree)[0]
    return [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in found]


def _nnx() -> Any:
    from flax import nnx

    return nnx


@functools.partial(jax.tree_util.register_dataclass, data_fields=["base", "adapters"], meta_fields=["scale", "outer"])
@dataclass(frozen=True)
class LoRA:
    """Parameters with low-rank adapters, made by `lora`.

    A Trainer takes the object in place of the parameters.  It trains the adapters, and what its ``trainable`` selects
    of the base.  The loss function gets a model of the kind that `lora` was given.

    Parameters
    ----------
    base : the parameters, as a pytree; the pytree of an nnx module has nested dicts.
    adapters : {path of an array in the base: {"a": (leading axes, rank), "b": (rank, trailing axes)}}.
    scale, outer : alpha / rank, and the form of an nnx module (None for other models).

    References
    ----------
    Hu et al. 2022, "LoRA: low-rank adaptation of large language models"; Yu et al. 2022 (with differential privacy).

    >>> adapted = lora({"kernel": jnp.ones((4, 3))}, 2)
    >>> {name: each.shape for name, each in adapted.adapters["kernel"].items()}
    {'a': (4, 2), 'b': (2, 3)}
    >>> bool((adapted.merge()["kernel"] == 1.0).all())  # b is zero at first
    True
    """

    base: Leaf
    adapters: dict[str, dict[str, Any]]
    scale: float
    outer: Outer | None = field(default=None, repr=False)

    def merge(self) -> PyTree:
        """Return the parameters, or the module, with W + scale a b in place of each adapted W."""
        leaves, structure = jax.tree_util.tree_flatten(self.base)
        for place, path in enumerate(paths(self.base)):
            if path in self.adapters:
                leaves[place] = _Adapted(leaves[place], **self.adapters[path], scale=self.scale).merged()
        return pytree_as_model(jax.tree_util.tree_unflatten(structure, leaves), self.outer)


def lora(
    params: PyTree, rank: int, *, where: PyTree = None, alpha: float | None = None, key: jax.Array | None = None
) -> LoRA:
    """Return parameters with low-rank adapters, for private training: W + (alpha/rank) a b, with b zero at first.

    Parameters
    ----------
    params : the base: linen variables, an nnx or Equinox module, or any pytree.  It must not come from private data.
    rank : int, at least 1; the rank of each product a b.
    where : a function of a path such as "params/Dense_0/kernel".  It returns True for each array, of two or more axes,
        that gets an adapter.  By default: arrays named "kernel", of two or three axes, or "weight", of two axes.
        If W is the array of a convolution or look-up, the gradient of each example is as large as W.
    alpha : > 0, by default the rank, which makes the scale 1.
    key : a JAX key, from which the factor ``a`` is drawn as N(0, 1/fan-in); by default a key from the operating system.

    Returns
    -------
    LoRA : the parameters to give to ``trainer.init``.  Its method ``merge()`` returns parameters without adapters.

    The axes of an array are cut into leading and trailing axes of nearly equal total size: for example, axes
    (features, heads, width) are cut into (features) and (heads, width).

    References
    ----------
    Hu et al. 2022, "LoRA: low-rank adaptation of large language models".

    >>> params = {"dense": {"kernel": jnp.ones((6, 4)), "bias": jnp.zeros(4)}}
    >>> lora(params, 2, alpha=8.0).scale
    4.0
    """
    size = int(check("rank", rank, COUNT))
    scale = 1.0 if alpha is None else float(check("alpha", alpha, POSITIVE)) / size
    key = fresh_key() if key is None else key
    base, outer = model_as_pytree(params)
    adapters = {}
    axes = {"kernel": (2, 3), "weight": (2,)}
    usual = lambda path, array: array.ndim in axes.get(path.rpartition("/")[2], ())
    chosen = usual if where is None else lambda path, array: where(path)
    for place, (path, array) in enumerate(zip(paths(base), arrays_of(base), strict=True)):
        if array is None or not chosen(path, array):
            continue
        if array.ndim < 2 or not jnp.issubdtype(array.dtype, jnp.floating):
            raise InputError(
                f"where selects {path}, {array.dtype} of {array.ndim} axes, must be floating and of two or more; "
                "train it by trainable="
            )
        split = min(range(1, array.ndim), key=lambda at: max(map(math.prod, (array.shape[:at], array.shape[at:]))))
        lead, trail = array.shape[:split], array.shape[split:]
        dtype = jnp.promote_types(array.dtype, jnp.float32)
        first = jax.random.normal(jax.random.fold_in(key, place), (*lead, size), dtype) / math.sqrt(math.prod(lead))
        adapters[path] = {"a": first, "b": jnp.zeros((size, *trail), dtype)}
    if not adapters:
        raise InputError("where selects none of the parameters, must select at least one; it is given paths")
    return LoRA(base, adapters, scale, outer)


def adapted(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function so that its model may be a `LoRA`.  Products with W + scale a b are computed without that sum."""

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
            return function(pytree_as_model(jax.tree_util.tree_unflatten(structure, filled), model.outer), *rest)

        arrays = [jnp.asarray(leaves[place]) for place in there]
        traced, form = jax.make_jaxpr(flat, return_shape=True)(arrays, others)
        names = [paths(model.base)[place] for place in there]
        values = [
            _Adapted(array, **model.adapters[name], scale=model.scale) if name in model.adapters else array
            for name, array in zip(names, arrays, strict=True)
        ]
        outputs = evaluate(traced, [*values, *jax.tree_util.tree_leaves(others)], _operation)
        return jax.tree_util.tree_unflatten(jax.tree_util.tree_structure(form), [_merged(out) for out in outputs])

    return run


@dataclass(frozen=True)
class _Adapted:
    """Adapted parameter W and its factors a and b.  The object replaces W when `adapted` runs a traced function."""

    w: Any
    a: Any
    b: Any
    scale: float

    def merged(self) -> Any:
        """Return W + scale a b in the dtype of W."""
        product = jnp.tensordot(self.a * self.scale, self.b, 1, precision=jax.lax.Precision.HIGHEST)
        return (self.w.astype(product.dtype) + product).astype(self.w.dtype)


def _merged(value: Any) -> Any:
    return value.merged() if isinstance(value, _Adapted) else value


def _operation(place: int, eqn: Any, operands: list[Any]) -> list[Any]:
    """Run one operation of a traced function.  Products and casts of an adapted W avoid merging W, a and b."""
    adapted = [side for side, value in enumerate(operands) if isinstance(value, _Adapted)]
    if len(adapted) == 1:
        value = operands[adapted[0]]
        floating = jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.floating)  # a cast to integers needs the merged W
        if eqn.primitive.name == "convert_element_type" and floating:
            cast = bind(place, eqn, [value.w])[0]
            return [_Adapted(cast, value.a.astype(cast.dtype), value.b.astype(cast.dtype), value.scale)]
        if eqn.primitive.name == "dot_general":
            beside = _beside(eqn.params, operands, adapted[0])
            if beside is not None:
                y = bind(place, eqn, [value.w if other is value else other for other in operands])[0]
                return [y + beside.astype(y.dtype)]
    return bind(place, eqn, [_merged(operand) for operand in operands])


def _beside(params: Mapping[str, Any], operands: list[Any], side: int) -> Any:
    """Return what the adapter adds: scale (x a) b to x W, or scale (x b^T) a^T to x W^T; None for other products."""
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
    if side == 1:  # W is the right factor, so the rank is the last axis of `inner`
        inner = product(x, near, ((contracted[0], along), ((), ())))
        return product(inner * w.scale, far.astype(inner.dtype), (((inner.ndim - 1,), (rank_axis,)), ((), ())))
    inner = product(near, x, ((along, contracted[1]), ((), ())))  # W is the left factor: the rank is axis 0 of `inner`
    return product(far.astype(inner.dtype), inner * w.scale, (((rank_axis,), (0,)), ((), ())))


@dataclass(frozen=True)
class _Stream:
    """Placeholder in `Untrained.form` for the key, or the count, of an nnx module's stream of random numbers."""

    shape: tuple[int, ...]
    dtype: Any

    def empty(self) -> Any:
        """Return a zero key or count, used until an example's key is known."""
        if is_key(self):
            return jax.random.wrap_key_data(jnp.zeros((*self.shape, 8), jnp.uint32), impl=CHACHA20)
        return jnp.zeros(self.shape, self.dtype)


@functools.partial(jax.tree_util.register_dataclass, data_fields=["frozen"], meta_fields=["form"])
@dataclass(frozen=True)
class Untrained:
    """Everything in a model that is not trained."""

    frozen: tuple[Any, ...]  # the arrays, in the order of the model's leaves
    # the structure; for each leaf, if it is trained; for each, the leaf or None (an array); the form of an nnx module
    form: tuple[Hashable, tuple[bool, ...], tuple[Hashable, ...], Outer | None]


def split_model(model: Any, trainable: Any = None) -> tuple[Any, Untrained | None]:
    """Return (model with None for untrained leaves, rest).  Unless the model is nnx, rest is None if all is trained."""
    tree, outer = model_as_pytree(model)
    leaves, structure = jax.tree_util.tree_flatten(tree)
    arrays = arrays_of(tree)
    if isinstance(tree, LoRA):
        own = len(leaves) - len(jax.tree_util.tree_leaves(tree.adapters))
        marks = [False] * own if trainable is None else _marks(tree.base, tree.outer, trainable)
        marks += [True] * (len(leaves) - own)
    else:
        marks = _marks(tree, outer, trainable)
    others: list[Any] = [leaf if array is None else None for array, leaf in zip(arrays, leaves, strict=True)]
    streams = outer or (tree.outer if isinstance(tree, LoRA) else None)
    for i, kind in enumerate(streams.of_kind("RngState") if streams is not None else []):
        if kind:
            others[i] = _Stream(leaves[i].shape, leaves[i].dtype)
    chosen = [mark and other is None for mark, other in zip(marks, others, strict=True)]
    if not any(chosen):
        raise InputError("trainable selects none of the parameters, must select at least one; it is given paths")
    if all(chosen) and outer is None:
        return jax.tree_util.tree_unflatten(structure, arrays), None
    trained = [array if mark else None for array, mark in zip(arrays, chosen, strict=True)]
    frozen = [a for a, mark, other in zip(arrays, chosen, others, strict=True) if other is None and not mark]
    form = (structure, tuple(chosen), tuple(others), outer)
    return jax.tree_util.tree_unflatten(structure, trained), Untrained(tuple(frozen), form)


def join_model(trained: Any, rest: Untrained | None) -> Any:
    """Return the whole model from a trained part and from the rest that `split_model` returned."""
    if rest is None:
        return trained
    structure, chosen, others, outer = rest.form
    values, frozen = iter(jax.tree_util.tree_leaves(trained)), iter(rest.frozen)
    leaves = []
    for mark, other in zip(chosen, others, strict=True):
        leaf = next(values if mark else frozen) if other is None else other
        leaves.append(leaf.empty() if isinstance(leaf, _Stream) else leaf)
    return pytree_as_model(jax.tree_util.tree_unflatten(structure, leaves), outer)  # type: ignore[arg-type]  # a PyTreeDef is annotated as Hashable


def _marks(tree: Any, outer: Outer | None, trainable: Any) -> list[bool]:
    """Return for each leaf whether to train it; for a leaf that is no array the answer has no effect."""
    floating = [a is not None and jnp.issubdtype(a.dtype, jnp.floating) for a in arrays_of(tree)]
    if outer is not None:
        wanted = outer.of_kind("Param") if trainable is None else floating
        if isinstance(trainable, type):
            return [issubclass(kind, trainable) for kind in outer.kinds]
    else:
        # In a plain pytree every leaf counts as trainable.  `clipped_sum` refuses an integer array among the leaves.
        wanted = floating if has_equinox(tree) else [True] * len(floating)
    if trainable is None:
        return wanted
    if isinstance(trainable, type):
        raise InputError(
            f"trainable is the type {trainable.__name__}, which goes with an nnx module only; "
            "give a function of paths, such as lambda path: 'head' in path"
        )
    if callable(trainable):
        marks = [bool(trainable(path)) for path in paths(tree)]
    else:
        for mark in jax.tree_util.tree_leaves(trainable):
            if np.ndim(mark) or np.asarray(mark).dtype != bool:  # refuse a string: bool() would take it for True
                raise InputError(
                    f"trainable has {mark!r:.40}, must have bools; give them, or a function of paths, such as "
                    "lambda path: 'head' in path"
                )
        try:
            spread = lambda mark, part: [bool(mark)] * len(jax.tree_util.tree_leaves(part))
            marks = jax.tree_util.tree_leaves(jax.tree.map(spread, trainable, tree))
        except ValueError:
            raise InputError("trainable is no prefix of the parameters; give bools in their structure") from None
    return [mark and fits for mark, fits in zip(marks, wanted, strict=True)]


def streams(rngs: bool | Sequence[str]) -> tuple[str, ...]:
    """Return the names of a linen module's random streams.  If `rngs` is True, the only name is "dropout"."""
    if isinstance(rngs, bool):
        return ("dropout",) if rngs else ()
    return (rngs,) if isinstance(rngs, str) else tuple(rngs)


def loss_of(
    loss_fn: Any,
    loss: Callable[[Any, Any], Any] | None,
    rngs: bool | Sequence[str],
    apply_kwargs: Mapping[str, Any] | None,
) -> Callable[..., Any]:
    """Return the loss as a function (model, example[, key]).  `loss_fn` is this function, or, with `loss`, a module."""
    named = dict(apply_kwargs or {})
    if isinstance(loss_fn, type):
        raise InputError(
            f"loss_fn is the class {loss_fn.__name__}, must be a module or a function; give {loss_fn.__name__}(...)"
        )
    if loss is None:
        if not callable(loss_fn) or hasattr(loss_fn, "apply") or is_nnx(loss_fn) or is_equinox(loss_fn):
            raise InputError("loss_fn must be a function (params, example) -> scalar; with a module, give loss as well")
        if named:
            raise InputError("apply_kwargs goes with a module and loss; a loss function calls the module itself")
        _require_call(loss_fn, bool(rngs))
        return adapted(_checked(loss_fn))
    if is_nnx(loss_fn):
        output = lambda model, inputs, *key: model(inputs, **named)
    elif is_equinox(loss_fn):
        output = lambda model, inputs, *key: model(inputs, **({"key": key[0]} if key else {}), **named)
    elif callable(getattr(loss_fn, "apply", None)):
        _require_arguments(loss_fn, named)
        names = streams(rngs)

        def output(model: Any, inputs: Any, *key: Any) -> Any:
            keys = [jax.random.fold_in(key[0], number) for number in range(len(names))] if len(names) > 1 else key
            return loss_fn.apply(model, inputs, rngs=dict(zip(names, keys, strict=True)) if key else None, **named)
    else:
        raise InputError("loss goes with a module of Flax (linen or nnx) or Equinox; of a function leave it out")

    def of_pair(model: Any, example: Any, *key: Any) -> Any:
        if not isinstance(example, tuple | list) or len(example) != 2:
            what = "one array" if hasattr(example, "shape") else f"a {type(example).__name__}"
            raise InputError(
                f"an example is {what}, must be a pair (input, target) for a module and loss; give "
                "data=(inputs, targets), or a loss function of one's own"
            )
        return loss(output(model, example[0], *key), example[1])

    return adapted(_checked(of_pair))


def initialised(module: Any, key: Any, example: Any, rngs: bool | Sequence[str], apply_kwargs: Any) -> Any:
    """Return a linen module's initial parameters for inputs of `example`'s shape; return other modules as given."""
    if is_nnx(module) or is_equinox(module):
        return module
    if module is None or example is None:
        raise InputError("params is missing; give the parameters, or for a linen module an example input")
    keys = {name: jax.random.fold_in(key, 1 + number) for number, name in enumerate(streams(rngs))}
    # initial parameters must depend on the shapes alone, since an example is private
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(jnp.shape(a), jnp.result_type(a)), example)
    with _plain_errors():
        return module.lazy_init({"params": key, **keys}, shapes, **(apply_kwargs or {}))


def refuse_state(module: Any, trained: Any) -> None:
    """Raise InputError if linen collections other than "params", or any model's batch_stats, would be trained."""
    linen = module is not None and not is_nnx(module) and not is_equinox(module)
    named = [*paths(trained.base), *trained.adapters] if isinstance(trained, LoRA) else paths(trained)
    tops = {path.partition("/")[0] for path in named}
    if linen and tops and "params" not in tops:
        raise InputError(f"params has no 'params' but {', '.join(sorted(tops))[:40]!r}; give {{'params': ...}}")
    others = sorted(tops - {"params"} if linen else tops & {"batch_stats"})
    if others:
        raise InputError(
            f"the model has {', '.join(others)} besides params; what mixes examples (batch normalisation) is not "
            f"private; {_REMEDY}"
        )


_ERRORS_OF_FLAX = {
    "InvalidRngError": _NO_KEY,
    "LazyInitError": "the module's initial parameters depend on the values of the example, which is private, must "
    "depend on its shape alone; give params that come from public data",
    "ModifyScopeVariableError": f"the module changes state with its input, which mixes examples; {_REMEDY}",
    "TraceContextError": "the loss changes an nnx module that it closes over (dropout counts its draws, batch "
    "normalisation its statistics); give the module to init: the loss is then (model, example), or with rngs=True "
    "(model, example, key)",
}


@contextlib.contextmanager
def _plain_errors() -> Iterator[None]:
    """Turn errors of Flax, Equinox and JAX about random numbers, state and axes into one line with a remedy."""
    try:
        yield
    except Exception as error:
        told = _ERRORS_OF_FLAX.get(type(error).__name__) if type(error).__module__.startswith("flax") else None
        if type(error) is RuntimeError and "requires a key" in str(error):  # Equinox's dropout raises this
            told = _NO_KEY
        if isinstance(error, NameError) and "unbound axis name" in str(error):
            axis = str(error).partition("axis name: ")[2].partition(".")[0]
            told = (
                f"the loss names the axis {axis!r}, along which examples would mix (batch normalisation?), must keep "
                f"them apart; {_REMEDY}"
            )
        if told is None:
            raise
        raise InputError(told) from None


def _require_arguments(module: Any, named: Mapping[str, Any]) -> None:
    """Raise InputError if a linen module asks for an argument that is not given, such as ``train``."""
    others = list(inspect.signature(module.__call__).parameters.values())[1:]  # without the first, which is the input
    needed = lambda p: p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    missing = [p.name for p in others if needed(p) and p.name not in named]
    if missing:
        raise InputError(
            f"{type(module).__name__} asks for {', '.join(missing)}; give apply_kwargs={{{missing[0]!r}: ...}}"
        )


def _require_call(loss_fn: Callable[..., Any], keys: bool) -> None:
    """Raise InputError if a loss function takes a key and gets none, or gets a key and takes none."""
    try:
        signature = inspect.signature(loss_fn)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(*range(3 if keys else 2))
    except TypeError as error:
        told = "(params, example, key), since rngs is given" if keys else "(params, example), with rngs=True a key too"
        raise InputError(f"loss_fn is called as {told}, and its arguments differ: {error}; change either") from None


def _checked(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a loss function.  `key` restarts an nnx module's random streams.  A change of its other state is refused."""

    @functools.wraps(function)
    def run(model: Any, example: Any, *key: Any) -> Any:
        if not is_nnx(model):
            with _plain_errors():
                return function(model, example, *key)
        for each in key:
            _begin(model, each)
        before = _values(model)
        with _plain_errors():
            out = function(model, example, *key)
        for path, (kind, value) in _values(model).items():
            if path in before and value is not before[path][1]:
                if issubclass(kind, _nnx().RngState):
                    if not key:
                        raise InputError(_NO_KEY)
                else:
                    raise InputError(
                        f"{'/'.join(map(str, path))}, a {kind.__name__}, is changed by the loss, which mixes examples; "
                        f"call model.eval(), or {_REMEDY}"
                    )
        return out

    return run


def _begin(model: Any, key: Any) -> None:
    """Restart all streams of random numbers of an nnx module, each with its own key derived from `key`."""
    nnx = _nnx()
    found = [node for _, node in nnx.iter_graph(model) if isinstance(node, nnx.RngStream)]
    for number, stream in enumerate(found):
        own, shape = jax.random.fold_in(key, number), stream.key.get_value().shape
        stream.key.set_value(jax.random.split(own, shape) if shape else own)
        stream.count.set_value(jnp.zeros_like(stream.count.get_value()))


def _values(model: Any) -> dict[Any, tuple[type, Any]]:
    """Return {path: (type of variable, value)} of an nnx module."""
    nnx = _nnx()
    return {path: (type(v), v.get_value()) for path, v in nnx.to_flat_state(nnx.state(model))}
