"""Finds the uses of each parameter in a loss, and runs the loss so that it also returns the operands of these uses.

The trace of one example's loss holds every operation, so no use is missed.  A parameter w is followed through casts,
transpositions, reshapes, loops and checkpoints to operations y = op(x, w).  For some of them the gradient with respect
to w is sum_t x_t dy_t^T, with x_t the rows of x (patches for a convolution) and dy_t the rows of the cotangent of y.
A tap is an array of zeros that is added to y: the gradient of the loss with respect to it is the cotangent of y.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Literal

from jaxacct.training.clipping.traces import bind, evaluate, written_out

Place = tuple[int, ...]  # where an operation is: the indices of the loops and checkpoints around it, then its index
Operand = tuple[Place, int]  # (place of an operation, index of one of its operands)
Met = dict[Operand, Any]  # {operand: its value, with a leading axis for each loop around the operation}
Step = tuple[int, int]  # (size, stride) of an axis, or of a part of an axis


@dataclass(frozen=True)
class Product:
    """Rule that gives the gradient of y = op(x, w) in w as sums of products x_t dy_t^T.  Each group has its own sum."""

    other: int  # index of x among the operands of op
    output: Any  # the shape and dtype of y
    groups: tuple[int, ...]  # the batch axes of w; merged in this order, they are the axis of the groups
    left: tuple[int, ...]  # the axes of w that are merged into the axis of length K
    right: tuple[int, ...]  # the axes of w that are merged into the axis of length M
    matrix: Callable[[Any, Any], tuple[Any, Any]]  # (x, dy) -> x_t of (groups, rows, K), dy_t of (groups, rows, M)
    indexed: bool = False  # x_t are unit vectors, for which `matrix` gives the index of the 1 (outside [0, K): x_t = 0)


def _dense(eqn: Any, operand: int) -> Product | None:
    """Return the `Product` of a dot_general that has the parameter as an operand; None if an array has no entries."""
    along, batch = eqn.params["dimension_numbers"]
    w_aval, x_aval, y = eqn.invars[operand].aval, eqn.invars[1 - operand].aval, eqn.outvars[0].aval
    along_w, along_x, batch_w, batch_x = along[operand], along[1 - operand], batch[operand], batch[1 - operand]
    free_x = [i for i in range(x_aval.ndim) if i not in (*along_x, *batch_x)]
    free_w = [i for i in range(w_aval.ndim) if i not in (*along_w, *batch_w)]
    groups, rows, inner = (math.prod(x_aval.shape[i] for i in axes) for axes in (batch_x, free_x, along_x))
    outer = math.prod(w_aval.shape[i] for i in free_w)
    if groups * rows * inner * outer == 0:
        return None

    def matrix(x: Any, dy: Any) -> tuple[Any, Any]:
        x = x.transpose(*batch_x, *free_x, *along_x).reshape(groups, rows, inner)
        if operand == 0:
            return x, dy.reshape(groups, outer, rows).swapaxes(1, 2)
        return x, dy.reshape(groups, rows, outer)

    return Product(1 - operand, y, tuple(batch_w), tuple(along_w), tuple(free_w), matrix)


def _conv(eqn: Any, operand: int) -> Product | None:
    """Return the `Product` of a convolution whose kernel is the parameter.  Its x_t are the patches of the input."""
    p = eqn.params
    if operand != 1 or p["feature_group_count"] != 1 or p["batch_group_count"] != 1:
        return None
    spec = p["dimension_numbers"]
    kernel = [eqn.invars[1].aval.shape[i] for i in spec.rhs_spec]  # [output features, input features, *window widths]
    y = eqn.outvars[0].aval
    first, last = ([x_spec[0], *x_spec[2:], x_spec[1]] for x_spec in (spec.lhs_spec, spec.out_spec))
    if y.size == 0 or 0 in kernel:
        return None
    rows, inner = y.size // kernel[0], math.prod(kernel[1:])
    places = [y.shape[i] for i in spec.out_spec[2:]]
    settings = (p[name] for name in ("window_strides", "padding", "lhs_dilation", "rhs_dilation"))
    space = list(zip(kernel[2:], places, *settings, strict=True))

    def matrix(x: Any, dy: Any) -> tuple[Any, Any]:
        x = x.transpose(first)
        spread = [(*pad, apart - 1) for _, _, _, pad, apart, _ in space]
        x = jax.lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0), *spread, (0, 0, 0)])
        # Split each spatial axis: position of the window, position in it.  Faster than conv_general_dilated_patches.
        for axis, (width, places, stride, _, _, apart) in enumerate(space):
            index = np.arange(places)[:, None] * stride + np.arange(width) * apart
            x = jnp.take(x, index, 1 + 2 * axis, mode="clip")
        order = [0, *range(1, 2 * len(space), 2), *range(2, 2 * len(space) + 1, 2), x.ndim - 1]
        return x.transpose(order).reshape(1, rows, inner), dy.transpose(last).reshape(1, rows, kernel[0])

    output_axis, input_axis, *space_axes = spec.rhs_spec
    return Product(0, y, (), (*space_axes, input_axis), (output_axis,), matrix)


def _embedding(eqn: Any, operand: int) -> Product | None:
    """Return the `Product` of an operation that looks up whole rows of the parameter; None for any other look-up."""
    p, shape = eqn.params, eqn.invars[0].aval.shape
    spec, y = p["dimension_numbers"], eqn.outvars[0].aval
    whole_rows = (
        operand == 0
        and len(shape) == 2
        and tuple(p["slice_sizes"]) == (1, shape[1])
        and spec.collapsed_slice_dims == (0,)
        and spec.start_index_map == (0,)
        and spec.offset_dims == (y.ndim - 1,)
        and not spec.operand_batching_dims
        and p["mode"].name in ("FILL_OR_DROP", "PROMISE_IN_BOUNDS", "CLIP")
    )
    if not whole_rows or y.size == 0 or shape[0] >= 2**31 - 1:
        return None

    def matrix(x: Any, dy: Any) -> tuple[Any, Any]:
        rows, dy = x.reshape(-1), dy.reshape(-1, shape[1])
        if p["mode"] == jax.lax.GatherScatterMode.CLIP:
            rows = jnp.clip(rows, 0, min(shape[0] - 1, jnp.iinfo(rows.dtype).max))
            return rows.astype(jnp.int32)[None], dy[None]
        inside = rows >= 0
        if shape[0] <= jnp.iinfo(rows.dtype).max:
            inside &= rows < shape[0]
        # A row number out of range reads no row of the parameter.  So set it to `shape[0]`, the index of a zero x_t.
        rows = jnp.where(inside, jnp.where(inside, rows, 0).astype(jnp.int32), shape[0])
        return rows[None], jnp.where(inside[:, None], dy, 0)[None]

    return Product(1, y, (), (0,), (1,), matrix, indexed=True)


FORMS = {"dot_general": _dense, "conv_general_dilated": _conv, "gather": _embedding}
"""Maps a primitive to a function of (equation, index of operand w) that returns a `Product`, or None for other uses."""


@dataclass(frozen=True)
class Use:
    place: Place
    view: View
    product: Product


@dataclass(frozen=True)
class Written:
    """Trace in which calls of jit are replaced by the called operations."""

    closed: ClosedJaxpr
    inner: dict[int, Written]  # {index of a loop or checkpoint with a parameter as operand: its body}


@dataclass
class Uses:
    """Uses of one parameter: operations with a known gradient, and the names of all other operations."""

    known: list[Use] = field(default_factory=list)
    others: list[str] = field(default_factory=list)


def uses_of(closed: ClosedJaxpr, leaves: int) -> tuple[Written, list[Uses]]:
    """Return a trace as `Written`, and the `Uses` of each of its first ``leaves`` inputs.  Output 0 is the loss."""
    found = [Uses() for _ in range(leaves)]
    views = {var: (leaf, View.of(var.aval)) for leaf, var in enumerate(closed.jaxpr.invars[:leaves])}
    return _follow(closed, views, closed.jaxpr.outvars[:1], (), found), found


def _follow(
    closed: ClosedJaxpr, views: dict[Any, tuple[int, View]], outputs: Any, place: tuple[int, ...], found: list[Uses]
) -> Written:
    """Add the uses in a trace to ``found``.  ``views`` maps inputs of the trace to (index of parameter, view)."""
    live, inner = _live(closed.jaxpr, outputs), {}
    for number, eqn in enumerate(closed.jaxpr.eqns):
        if eqn.primitive.name == "stop_gradient" or not any(var in live for var in eqn.outvars):
            continue
        entering = {i: views[var] for i, var in enumerate(eqn.invars) if not isinstance(var, Literal) and var in views}
        if entering and eqn.primitive.name in ("scan", "checkpoint", "remat", "remat2"):
            body = eqn.params["jaxpr"]
            body = written_out(body if isinstance(body, ClosedJaxpr) else ClosedJaxpr(body, ()))
            seen = {}
            for i, (leaf, view) in entering.items():
                inside = _inside(eqn, i, view)
                if inside is None:
                    found[leaf].others.append("the carry of a loop")
                else:
                    seen[body.jaxpr.invars[i]] = leaf, inside
            carried = eqn.params.get("num_carry", 0)
            pairs = enumerate(zip(body.jaxpr.outvars, eqn.outvars, strict=True))
            needed = [var for i, (var, outside) in pairs if i < carried or outside in live]
            inner[number] = _follow(body, seen, needed, (*place, number), found)
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
    """Given an operation on a view, such as a reshape, return the result as a `View`; None if no `View` fits it."""
    name, params, shape = eqn.primitive.name, eqn.params, eqn.outvars[0].aval.shape
    if name == "convert_element_type":
        if not jnp.issubdtype(params["new_dtype"], jnp.floating):
            return None
        return replace(view, narrow=min(view.narrow, jnp.dtype(params["new_dtype"]), key=largest))
    if name == "transpose":
        return replace(view, axes=tuple(view.axes[i] for i in params["permutation"]))
    if (name == "reshape" and params["dimensions"] is None) or name == "squeeze":
        return view.reshaped(shape)
    if name == "broadcast_in_dim" and math.prod(shape) == math.prod(eqn.invars[0].aval.shape):
        return view.reshaped(shape)  # only axes of length 1 are added, so the order of the entries stays
    return None


def largest(dtype: Any) -> float:
    return float(jnp.finfo(dtype).max)


def _inside(eqn: Any, operand: int, view: View) -> View | None:
    """Return the view that a loop or checkpoint hands to its body; None for a carry, whose values may change."""
    if eqn.primitive.name != "scan":
        return view
    length, constants = eqn.params["length"], eqn.params["num_consts"]
    if operand < constants:
        return replace(view, loops=(*view.loops, (length, None)))
    if operand < constants + eqn.params["num_carry"]:
        return None
    return replace(view, axes=view.axes[1:], loops=(*view.loops, (length, view.axes[0])))


def _live(jaxpr: Any, outputs: Any) -> set[Any]:
    """Return the variables through which the gradient of the outputs passes."""
    live = {var for var in outputs if not isinstance(var, Literal) and _smooth(var)}
    for eqn in reversed(jaxpr.eqns):
        if eqn.primitive.name != "stop_gradient" and any(var in live for var in eqn.outvars):
            live |= {var for var in eqn.invars if not isinstance(var, Literal) and _smooth(var)}
    return live


def _smooth(var: Any) -> bool:
    return jnp.issubdtype(getattr(var.aval, "dtype", jnp.float32), jnp.inexact)


@dataclass(frozen=True)
class View:
    """All entries of a parameter or, inside loops over its slices, the entries of one slice."""

    axes: tuple[tuple[Step, ...], ...]  # for each axis, its `Step` pairs (size, stride)
    narrow: Any  # among the dtypes that the entries were cast to, the one with the smallest range
    loops: tuple[tuple[int, tuple[Step, ...] | None], ...] = ()  # outermost first: (length, the sliced axis or None)

    @classmethod
    def of(cls, aval: Any) -> View:
        strides = [math.prod(aval.shape[i + 1 :]) for i in range(aval.ndim)]
        steps = zip(aval.shape, strides, strict=True)
        return cls(tuple((step,) if step[0] != 1 else () for step in steps), aval.dtype)

    def reshaped(self, sizes: Sequence[int]) -> View | None:
        """Return the view reshaped to axes of these sizes; None if constant strides cannot describe the result."""
        rest = list(merged(step for axis in self.axes for step in axis))
        axes = []
        for size in sizes:
            steps = []
            while size > 1:
                (here, stride), *rest = rest
                if here > size:
                    if here % size:
                        return None
                    rest.insert(0, (here // size, stride))
                    here, stride = size, stride * (here // size)
                if size % here:
                    return None
                steps.append((here, stride))
                size //= here
            axes.append(tuple(steps))
        return replace(self, axes=tuple(axes))


def merged(steps: Any) -> tuple[Step, ...]:
    """Merge (size, stride) pairs into the fewest pairs that visit the same entries in the same order."""
    out: list[Step] = []
    for size, stride in steps:
        if out and out[-1][1] == size * stride:
            out[-1] = (out[-1][0] * size, stride)
        elif size > 1:
            out.append((size, stride))
    return tuple(out)


def zero_tap(use: Use) -> Any:
    """Return the tap of a use: zeros in the shape of the operation's output, with a leading axis for each loop."""
    lengths, output = [length for length, _ in use.view.loops], use.product.output
    return jnp.zeros((*lengths, *output.shape), output.dtype)


def tapped(
    written: Written, values: Sequence[Any], taps: Mapping[Place, Any], wanted: Sequence[Operand], place: Place = ()
) -> tuple[list[Any], Met]:
    """Run a trace, adding each tap to the output of its operation.  Return the outputs and the ``wanted`` operands."""
    met: Met = {}

    def operation(number: int, eqn: Any, operands: list[Any]) -> list[Any]:
        here = (*place, number)
        inner = {other: tap for other, tap in taps.items() if len(other) > len(here) and other[: len(here)] == here}
        if inner:
            body = lambda values, taps: tapped(written.inner[number], values, taps, wanted, here)
            with eqn.ctx.manager:
                outputs, within = (_scan if eqn.primitive.name == "scan" else _checkpoint)(eqn, body, operands, inner)
            met.update(within)
            return outputs
        outputs = bind(number, eqn, operands)
        if here not in taps:
            return outputs
        met.update({(at, i): operands[i] for at, i in wanted if at == here})
        return [outputs[0] + taps[here]]

    return evaluate(written.closed, values, operation), met


def _scan(eqn: Any, body: Any, operands: list[Any], taps: Mapping[Place, Any]) -> tuple[list[Any], Met]:
    p = eqn.params
    constants, carried = p["num_consts"], p["num_carry"]
    first, start, along = operands[:constants], operands[constants:][:carried], operands[constants + carried :]

    def one(carry: list[Any], each: tuple[list[Any], Any]) -> tuple[list[Any], Any]:
        outputs, met = body([*first, *carry, *each[0]], each[1])
        return outputs[:carried], (outputs[carried:], met)

    settings = {"length": p["length"], "reverse": p["reverse"], "unroll": p["unroll"]}
    carry, (stacked, met) = jax.lax.scan(one, start, (along, dict(taps)), **settings)
    return [*carry, *stacked], met


def _checkpoint(eqn: Any, body: Any, operands: list[Any], taps: Mapping[Place, Any]) -> tuple[list[Any], Met]:
    settings = {"prevent_cse": eqn.params["prevent_cse"], "policy": eqn.params["policy"]}
    return jax.checkpoint(body, **settings)(operands, dict(taps))
