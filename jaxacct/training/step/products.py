"""Operations y = op(x, w) whose gradient by w is a sum of products of rows: sum_t x_t dy_t^T.

x_t are rows of the operation's other operand (patches, for a convolution), dy_t those of the cotangent of y.  A product
with batch axes is one such sum for each place along them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

__all__ = ["FORMS", "Product"]


@dataclass(frozen=True)
class Product:
    """How an operation's gradient by its operand w is formed.

    other : the number of the operand x.  output : shape and dtype of y.
    groups, left, right : the axes of w; the gradient's place (g, k, m) is in the order of these.
    matrix : (x, dy) -> (groups, rows, K) and (groups, rows, M).
    indexed : x_t are unit vectors, and given as the numbers of their entries, shape (groups, rows); a number outside of
    0 to K - 1 is a vector of zeros.
    """

    other: int
    output: Any
    groups: tuple[int, ...]
    left: tuple[int, ...]
    right: tuple[int, ...]
    matrix: Callable[[Any, Any], tuple[Any, Any]]
    indexed: bool = False


_MODES = tuple(getattr(jax.lax.GatherScatterMode, name) for name in ("FILL_OR_DROP", "PROMISE_IN_BOUNDS", "CLIP"))


def _dense(eqn: Any, operand: int) -> Product | None:
    """dot_general with the parameter on either side."""
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
    """A convolution with the parameter as its kernel: a product with the patches of its input."""
    p = eqn.params
    if operand != 1 or p["feature_group_count"] != 1 or p["batch_group_count"] != 1:
        return None
    spec = p["dimension_numbers"]
    kernel = [eqn.invars[1].aval.shape[i] for i in spec.rhs_spec]  # output features, input features, space
    y = eqn.outvars[0].aval
    first, last = ([x_spec[0], *x_spec[2:], x_spec[1]] for x_spec in (spec.lhs_spec, spec.out_spec))
    if y.size == 0 or 0 in kernel:
        return None
    rows, inner = y.size // kernel[0], math.prod(kernel[1:])
    space = list(
        zip(
            kernel[2:],
            [y.shape[i] for i in spec.out_spec[2:]],
            p["window_strides"],
            p["padding"],
            p["lhs_dilation"],
            p["rhs_dilation"],
            strict=True,
        )
    )

    def matrix(x: Any, dy: Any) -> tuple[Any, Any]:
        x = x.transpose(first)
        spread = [(*pad, apart - 1) for _, _, _, pad, apart, _ in space]
        x = jax.lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0), *spread, (0, 0, 0)])
        # Each axis of space becomes two: the place of the window, and the place in the window.  Taking whole rows is
        # several times faster than jax.lax.conv_general_dilated_patches.
        for axis, (width, places, stride, _, _, apart) in enumerate(space):
            index = np.arange(places)[:, None] * stride + np.arange(width) * apart
            x = jnp.take(x, index, 1 + 2 * axis, mode="clip")
        order = [0, *range(1, 2 * len(space), 2), *range(2, 2 * len(space) + 1, 2), x.ndim - 1]
        return x.transpose(order).reshape(1, rows, inner), dy.transpose(last).reshape(1, rows, kernel[0])

    output_axis, input_axis, *space_axes = spec.rhs_spec
    return Product(0, y, (), (*space_axes, input_axis), (output_axis,), matrix)


def _embedding(eqn: Any, operand: int) -> Product | None:
    """Rows of a table by number; a number out of range has no gradient, or the nearest row's in the mode "clip"."""
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
        and p["mode"] in _MODES
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
        # a row that does not exist was not read; it goes past the end, where additions are dropped
        rows = jnp.where(inside, jnp.where(inside, rows, 0).astype(jnp.int32), shape[0])
        return rows[None], jnp.where(inside[:, None], dy, 0)[None]

    return Product(1, y, (), (0,), (1,), matrix, indexed=True)


FORMS = {"dot_general": _dense, "conv_general_dilated": _conv, "gather": _embedding}
"""By primitive: (equation, number of the operand w) -> its product; None where this use of w is another."""
