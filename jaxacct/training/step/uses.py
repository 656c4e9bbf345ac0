"""How a loss uses each of its parameters: through casts, transpositions and reshapes, inside of loops and checkpoints.

The trace of the loss of one example is gone through from its parameters on.  A use of a parameter is an operation whose
gradient is known (`products.py`), or anything else, which is named.  Uses that the loss's gradient does not pass, as
behind `stop_gradient`, are none.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Literal

from jaxacct.training.step.products import FORMS, Product
from jaxacct.training.step.traces import BODIES, written_out
from jaxacct.training.step.views import View

__all__ = ["Use", "Uses", "Written", "uses_of"]


@dataclass(frozen=True)
class Use:
    """An operation that meets a parameter.  place : of the operation, and before it of the loops around it."""

    place: tuple[int, ...]
    view: View
    product: Product


@dataclass(frozen=True)
class Written:
    """A trace without calls; the loops and checkpoints in it that a parameter enters are such traces themselves."""

    closed: ClosedJaxpr
    inner: dict[int, Written] = field(default_factory=dict)


@dataclass
class Uses:
    """Of one parameter: the operations with a known gradient, and names of all other uses."""

    known: list[Use] = field(default_factory=list)
    others: list[str] = field(default_factory=list)


def uses_of(closed: ClosedJaxpr, leaves: int) -> tuple[Written, list[Uses]]:
    """The trace of a loss, and the uses of each of its first ``leaves`` inputs; the loss is the first output.

    A parameter without any use has no gradient.
    """
    found = [Uses() for _ in range(leaves)]
    views = {var: (leaf, View.of(var.aval)) for leaf, var in enumerate(closed.jaxpr.invars[:leaves])}
    written = _follow(closed, views, closed.jaxpr.outvars[:1], (), found)
    return written, found


def _follow(
    closed: ClosedJaxpr, views: dict[Any, tuple[int, View]], outputs: Any, place: tuple[int, ...], found: list[Uses]
) -> Written:
    """Add to ``found`` the uses in a trace of which some inputs are views of parameters."""
    live, inner = _live(closed.jaxpr, outputs), {}
    for number, eqn in enumerate(closed.jaxpr.eqns):
        if eqn.primitive.name == "stop_gradient" or not any(var in live for var in eqn.outvars):
            continue
        entering = {i: views[var] for i, var in enumerate(eqn.invars) if not isinstance(var, Literal) and var in views}
        if entering and eqn.primitive.name in BODIES:
            body = eqn.params["jaxpr"]
            body = written_out(body if isinstance(body, ClosedJaxpr) else ClosedJaxpr(body, ()))
            seen = {}
            for i, (leaf, view) in entering.items():
                inside = _inside(eqn, i, view)
                if inside is None:
                    found[leaf].others.append("the carry of a loop")
                else:
                    seen[body.jaxpr.invars[i]] = leaf, inside
            inner[number] = _follow(body, seen, _needed(eqn, body, live), (*place, number), found)
            continue
        for operand, (leaf, view) in entering.items():
            changed = _viewed(eqn, view)
            if changed is not None:
                views[eqn.outvars[0]] = leaf, changed
                continue
            form = FORMS.get(eqn.primitive.name)
            product = form(eqn, operand) if form else None
            if product is None:
                found[leaf].others.append(eqn.primitive.name)
            else:
                found[leaf].known.append(Use((*place, number), view, product))
    for var in outputs:
        if not isinstance(var, Literal) and var in views:
            found[views[var][0]].others.append("the result of a loop or checkpoint" if place else "the loss itself")
    return Written(closed, inner)


def _viewed(eqn: Any, view: View) -> View | None:
    """What an operation makes of a view; None where that is no view, with constant strides, of the same entries."""
    name, params, shape = eqn.primitive.name, eqn.params, eqn.outvars[0].aval.shape
    if name == "convert_element_type":
        return view.cast(params["new_dtype"]) if jnp.issubdtype(params["new_dtype"], jnp.floating) else None
    if name == "transpose":
        return view.transposed(params["permutation"])
    if (name == "reshape" and params["dimensions"] is None) or name == "squeeze":
        return view.reshaped(shape)
    if name == "broadcast_in_dim" and math.prod(shape) == math.prod(eqn.invars[0].aval.shape):
        return view.reshaped(shape)  # its axes keep their order
    return None


def _inside(eqn: Any, operand: int, view: View) -> View | None:
    """A view as the body of a loop or checkpoint sees it; None where a loop may change it."""
    if eqn.primitive.name != "scan":
        return view
    length, constants = eqn.params["length"], eqn.params["num_consts"]
    if operand < constants:
        return view.repeated(length)
    return view.sliced(length) if operand >= constants + eqn.params["num_carry"] else None


def _needed(eqn: Any, body: ClosedJaxpr, live: set[Any]) -> list[Any]:
    """The outputs of a body that the loss can depend on."""
    carried = eqn.params.get("num_carry", 0)
    pairs = enumerate(zip(body.jaxpr.outvars, eqn.outvars, strict=True))
    return [inside for i, (inside, outside) in pairs if i < carried or outside in live]


def _live(jaxpr: Any, outputs: Any) -> set[Any]:
    """The variables that the gradient of the outputs passes."""
    live = {var for var in outputs if not isinstance(var, Literal) and _smooth(var)}
    for eqn in reversed(jaxpr.eqns):
        if eqn.primitive.name != "stop_gradient" and any(var in live for var in eqn.outvars):
            live |= {var for var in eqn.invars if not isinstance(var, Literal) and _smooth(var)}
    return live


def _smooth(var: Any) -> bool:
    """Whether there are gradients by values of this type."""
    return jnp.issubdtype(getattr(var.aval, "dtype", jnp.float32), jnp.inexact)
