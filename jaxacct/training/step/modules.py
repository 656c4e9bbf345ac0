"""The loss of one example, of modules as they are: linen, nnx and Equinox; and refusals of layers that mix examples."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxacct.core.validation import InputError
from jaxacct.training.step.models import LoRA, adapted, is_equinox, is_nnx, paths

_REMEDY = "use GroupNorm or LayerNorm, or statistics of public data, frozen (trainable=) and only read"


def streams(rngs: bool | Sequence[str]) -> tuple[str, ...]:
    """The names of a linen module's streams of random numbers: those given, or "dropout"."""
    if isinstance(rngs, str):
        return (rngs,)
    return ("dropout",) * bool(rngs) if isinstance(rngs, bool) else tuple(rngs)


def loss_of(
    loss_fn: Any,
    loss: Callable[[Any, Any], Any] | None,
    rngs: bool | Sequence[str],
    apply_kwargs: Mapping[str, Any] | None,
) -> Callable[..., Any]:
    """(model, example) or (model, example, key) -> loss, of a function of the same, or of a module and a loss.

    The loss of an example (input, target) is ``loss(output, target)``, where the output is

    * of linen ``module.apply(params, input, rngs={"dropout": key}, **apply_kwargs)``, rngs where there is a key;
    * of nnx ``module(input, **apply_kwargs)``, its streams of random numbers begun with the key;
    * of Equinox ``module(input, key=key, **apply_kwargs)``, the key where there is one.
    """
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
        output = _linen(loss_fn, streams(rngs), named)
    else:
        raise InputError("loss goes with a module of Flax (linen or nnx) or Equinox; of a function leave it out")

    def of_pair(model: Any, example: Any, *key: Any) -> Any:
        if not isinstance(example, tuple | list) or len(example) != 2:
            raise InputError(
                f"an example is a {type(example).__name__}, must be a pair (input, target) for a module and loss; give "
                "data=(inputs, targets), or a loss function of one's own"
            )
        return loss(output(model, example[0], *key), example[1])

    return adapted(_checked(of_pair))


def initialised(module: Any, key: Any, example: Any, rngs: bool | Sequence[str], apply_kwargs: Any) -> Any:
    """First parameters: a linen module's, from a key and the shape of an input; those that another module holds."""
    if is_nnx(module) or is_equinox(module):
        return module
    if module is None or example is None:
        raise InputError("params is missing; give the parameters, or for a linen module an example input")
    keys = {name: jax.random.fold_in(key, 1 + number) for number, name in enumerate(streams(rngs))}
    # from shapes alone: an example is private
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(jnp.shape(a), jnp.result_type(a)), example)
    with _plain_errors():
        return module.lazy_init({"params": key, **keys}, shapes, **(apply_kwargs or {}))


def refuse_state(module: Any, trained: Any) -> None:
    """InputError where what a linen module has besides parameters would be trained."""
    linen = module is not None and not is_nnx(module) and not is_equinox(module)
    named = [*paths(trained.base), *trained.adapters] if isinstance(trained, LoRA) else paths(trained)
    tops = {path.partition("/")[0] for path in named}
    if linen and tops and "params" not in tops:
        raise InputError(
            f"params has no 'params' but {', '.join(sorted(tops))[:40]!r}, must be the variables of module.init; "
            "give {'params': ...}"
        )
    others = sorted(tops - {"params"} if linen else tops & {"batch_stats"})
    if others:
        raise InputError(
            f"the model has {', '.join(others)} besides params; what mixes examples (batch normalisation) is not "
            f"private; {_REMEDY}"
        )


def _linen(module: Any, names: tuple[str, ...], named: Mapping[str, Any]) -> Callable[..., Any]:
    def output(params: Any, inputs: Any, *key: Any) -> Any:
        keys = [jax.random.fold_in(key[0], number) for number in range(len(names))] if len(names) > 1 else key
        rngs = dict(zip(names, keys, strict=True)) if key else None
        return module.apply(params, inputs, rngs=rngs, **named)

    return output


class _plain_errors:
    """Errors of Flax, Equinox and JAX about random numbers, state and axes, in one line that says what to do."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if kind is not None and issubclass(kind, NameError) and "unbound axis name" in str(error):
            axis = str(error).partition("axis name: ")[2].partition(".")[0]
            raise InputError(
                f"the loss names the axis {axis!r}, along which examples would mix (batch normalisation?), must keep "
                f"them apart; {_REMEDY}"
            ) from None
        if kind is RuntimeError and "requires a key" in str(error):  # Equinox's dropout
            raise InputError(_NO_KEY) from None
        if kind is None or not kind.__module__.startswith("flax"):
            return
        if kind.__name__ == "InvalidRngError":
            raise InputError(_NO_KEY) from None
        if kind.__name__ == "LazyInitError":
            raise InputError(
                "the module's first parameters depend on the values of the example, which is private, must depend on "
                "its shape alone; give params that come from public data"
            ) from None
        if kind.__name__ == "ModifyScopeVariableError":
            raise InputError(f"the module changes state with its input, which mixes examples; {_REMEDY}") from None
        if kind.__name__ == "TraceContextError":
            raise InputError(
                "the loss changes an nnx module that it closes over (dropout counts its draws, batch normalisation its "
                "statistics); give the module to init: the loss is then (model, example), or with rngs=True "
                "(model, example, key)"
            ) from None


_NO_KEY = "the module draws random numbers and has no key for it; give rngs=True, or the names of its streams"


def _require_arguments(module: Any, named: Mapping[str, Any]) -> None:
    """InputError where a linen module asks for an argument that it is not given, such as ``train``."""
    others = list(inspect.signature(module.__call__).parameters.values())[1:]  # the first is the input
    missing = [
        p.name
        for p in others
        if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) and p.name not in named
    ]
    if missing:
        raise InputError(
            f"{type(module).__name__} asks for {', '.join(missing)}; give apply_kwargs={{{missing[0]!r}: ...}}"
        )


def _require_call(loss_fn: Callable[..., Any], keys: bool) -> None:
    """InputError where a loss function takes a key that it is not given, or is given one that it does not take."""
    try:
        signature = inspect.signature(loss_fn)
    except (TypeError, ValueError):  # not every callable has one
        return
    try:
        signature.bind(*range(3 if keys else 2))
    except TypeError as error:
        told = "(params, example, key), since rngs is given" if keys else "(params, example), with rngs=True a key too"
        raise InputError(f"loss_fn is called as {told}, and its arguments differ: {error}; change either") from None


def _checked(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function; of an nnx module begun with the key, and InputError where it changes the module's state."""

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


def _nnx() -> Any:
    from flax import nnx

    return nnx


def _begin(model: Any, key: Any) -> None:
    """Begin all streams of random numbers of an nnx module anew, each with a key of its own."""
    nnx = _nnx()
    found = [node for _, node in nnx.iter_graph(model) if isinstance(node, nnx.RngStream)]
    for number, stream in enumerate(found):
        own, shape = jax.random.fold_in(key, number), stream.key.get_value().shape
        stream.key.set_value(jax.random.split(own, shape) if shape else own)
        stream.count.set_value(jnp.zeros_like(stream.count.get_value()))


def _values(model: Any) -> dict[Any, tuple[type, Any]]:
    """{path: (type of variable, value)} of an nnx module."""
    nnx = _nnx()
    return {path: (type(v), v.get_value()) for path, v in nnx.to_flat_state(nnx.state(model))}
