"""Convolutions in the one form that XLA's CPU compiler runs fast everywhere.

It brings convolutions into the form that its library of them takes, channels last, in a program's outermost
computation only (seen in jaxlib 0.10.2); inside a loop all others are plain loops over their indices, several times
slower.  A step's micro-batches are a loop, and the gradients of a convolution are convolutions of another form.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax

from jaxacct.training.step.traces import bind, evaluate

__all__ = ["channels_last"]


def channels_last(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, of pytrees of arrays, with every convolution between transpositions; on CPUs only.

    >>> import jax.numpy as jnp
    >>> smooth = lambda x: jax.lax.conv_general_dilated(x, jnp.ones((1, 1, 3)) / 3, (1,), "VALID")
    >>> channels_last(smooth)(jnp.arange(5.0).reshape(1, 1, 5)).round(5).tolist()
    [[[1.0, 2.0, 3.0]]]
    """

    @functools.wraps(function)
    def run(*arguments: Any) -> Any:
        if jax.default_backend() != "cpu":
            return function(*arguments)
        closed, shapes = jax.make_jaxpr(function, return_shape=True)(*arguments)
        outputs = evaluate(closed, jax.tree_util.tree_leaves(arguments), _operation)
        return jax.tree_util.tree_unflatten(jax.tree_util.tree_structure(shapes), outputs)

    return run


def _operation(place: int, eqn: Any, operands: list[Any]) -> list[Any]:
    """An operation as it stands; a convolution between transpositions to channels last and back."""
    if eqn.primitive.name != "conv_general_dilated":
        return bind(place, eqn, operands)
    params = dict(eqn.params)
    spec = params.pop("dimension_numbers")
    left, out = ((order[0], *order[2:], order[1]) for order in (spec.lhs_spec, spec.out_spec))
    right = (*spec.rhs_spec[2:], spec.rhs_spec[1], spec.rhs_spec[0])
    last = tuple(range(len(left)))
    batched, kernel = (0, last[-1], *last[1:-1]), (last[-1], last[-2], *last[:-2])
    form = jax.lax.ConvDimensionNumbers(batched, kernel, batched)
    operands = [operands[0].transpose(left), operands[1].transpose(right)]
    with eqn.ctx.manager:
        found = eqn.primitive.bind(*operands, dimension_numbers=form, **params)
    return [found.transpose(sorted(last, key=lambda i: out[i]))]
