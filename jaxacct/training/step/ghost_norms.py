"""Norms of per-example gradients without the gradients: what a parameter meets in the loss tells its gradient's form.

The loss of one example is traced.  Where a parameter is used once, as the matrix of a product, the kernel of a
convolution or the table of an embedding, its gradient is a sum of products of that operation's input and of the
cotangent of its output; both are read off by adding a zero to the output (a tap) and differentiating by it.  The trace
knows no layers, so this holds for Flax (linen and nnx) as for plain JAX, and any other use of a parameter is seen.
Derivations and error bounds: jaxacct/training/step/README.md, "Clipping".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Literal

from jaxacct.training.step import powers_of_two as powers
from jaxacct.training.step.block_sums import BLOCK, block_levels, blocked_sum, row_squares, sum_squares
from jaxacct.training.step.traces import bind, evaluate

__all__ = ["HIGHEST", "Site", "find_sites", "tapped"]

HIGHEST = jax.lax.Precision.HIGHEST
"""Products in full float32 on devices that would round the factors first: the error bounds count on it."""


@dataclass(frozen=True)
class Site:
    """The one operation that uses a parameter: y = op(x, parameter), as rows of a matrix product.

    leaf, equation : the parameter and the operation's place in the trace.
    output : shape and dtype of y for one example.
    rows : how many products make the gradient of one example; cheap : whether norms are cheaper this way.
    shape, dtype : the parameter's.
    matrix : (x, dy) of one example -> (rows, K) and (rows, M); None for an embedding, x being row numbers.
    back : (K, M) -> the parameter's shape.
    """

    leaf: int
    equation: int
    operand: int
    output: Any
    rows: int
    cheap: bool
    shape: tuple[int, ...]
    dtype: Any
    matrix: Callable[[Any, Any], tuple[Any, Any]] | None = None
    back: Callable[[Any], Any] | None = None

    def normalised(self, x: Any, dy: Any) -> tuple[Any, Any, Any, Any]:
        """(x', dy', E, m) of one example: its gradient is 2^E sum_t x'_t dy'_t^T, and no entry of the sum exceeds m.

        m = sum_t max|x'_t| max|dy'_t|, whose largest term is in [1, 8).  Each row of x has a power of two of its own,
        and hands it to its row of dy.
        """
        peak_dy = jnp.max(jnp.abs(dy), axis=1)
        along_dy = powers.exponent(peak_dy)
        if self.matrix is None:
            top = jnp.max(along_dy)
            return x, powers.scaled(powers.normal(dy), -top), top, jnp.sum(powers.scaled(peak_dy, -top))
        peak_x = jnp.max(jnp.abs(x), axis=1)
        # 2^-127 would be subnormal
        along_x = jnp.minimum(powers.exponent(peak_x), jnp.finfo(x.dtype).maxexp - 2)
        top = jnp.max(along_x + along_dy)
        from_x, to_dy = powers.power(-along_x, x.dtype), along_x - top
        most = jnp.sum(peak_x * from_x * powers.scaled(peak_dy, to_dy))
        return powers.normal(x) * from_x[:, None], powers.scaled(powers.normal(dy), to_dy[:, None]), top, most

    def norm_squared(self, x: Any, dy: Any, top: Any, most: Any) -> tuple[Any, Any]:
        """Of one normalised example: an upper bound on the square of |g|/2^E, and whether g is sure to be finite."""
        unit = jnp.finfo(dy.dtype).eps / 2
        levels = 2 * block_levels(max(math.prod(self.shape), self.rows**2))
        if self.matrix is None:
            # equal rows of the table add before they are squared
            first = jnp.argmax(x[:, None] == x[None, :], axis=1)
            square = sum_squares(jax.ops.segment_sum(dy, first, self.rows))
            scale, terms = jnp.sum(jnp.sqrt(row_squares(dy))), 0
        elif self.rows == 1:
            square = sum_squares(x) * sum_squares(dy)
            scale, terms = jnp.sqrt(square), 0
        else:
            products = jnp.matmul(x, x.T, precision=HIGHEST) * jnp.matmul(dy, dy.T, precision=HIGHEST)
            square = jnp.maximum(blocked_sum(products), 0)
            scale, terms = jnp.sum(jnp.sqrt(row_squares(x) * row_squares(dy))), x.shape[1] + dy.shape[1]
        square = square + 2 * (terms + BLOCK * levels + 2 * self.rows + 16) * unit * scale**2
        # no entry of g/2^E exceeds its norm or m; a NaN or an infinity anywhere is in the square
        largest = powers.scaled(dy.dtype.type(jnp.finfo(self.dtype).max), -top)
        return square, jnp.isfinite(square) & ((most <= largest) | (jnp.sqrt(square) <= largest))

    def total(self, x: Any, dy: Any) -> Any:
        """The sum of the examples' gradients; x and dy with the examples in front, dy already weighted."""
        if self.matrix is None:
            zero = jnp.zeros(self.shape, dy.dtype)
            return zero.at[x.reshape(-1)].add(dy.reshape(-1, dy.shape[-1]), mode="drop")
        assert self.back is not None
        flat = [a.reshape(-1, a.shape[-1]) for a in (x, dy)]
        return self.back(jnp.matmul(flat[0].T, flat[1], precision=HIGHEST))

    def operands(self, x: Any, dy: Any, dtype: Any) -> tuple[Any, Any]:
        """Input and cotangent of one example, as matrices (an embedding: row numbers and a matrix)."""
        if self.matrix is None:
            rows, dy = x.reshape(-1), dy.reshape(-1, self.shape[1]).astype(dtype)
            inside = rows >= 0
            if self.shape[0] <= jnp.iinfo(rows.dtype).max:
                inside &= rows < self.shape[0]
            # a row that does not exist was not read; it goes past the end, where additions are dropped
            rows = jnp.where(inside, jnp.where(inside, rows, 0).astype(jnp.int32), self.shape[0])
            return rows, jnp.where(inside[:, None], dy, 0)
        return self.matrix(x.astype(dtype), dy.astype(dtype))


def find_sites(closed: ClosedJaxpr, leaves: int) -> list[Site]:
    """The parameters, among the first ``leaves`` inputs, whose only use is an operation with a known gradient."""
    uses: dict[Any, list[int]] = {var: [] for var in closed.jaxpr.invars[:leaves]}
    for place, eqn in enumerate(closed.jaxpr.eqns):
        for var in eqn.invars:
            if not isinstance(var, Literal) and var in uses:
                uses[var].append(place)
    for var in closed.jaxpr.outvars:
        if not isinstance(var, Literal) and var in uses:
            uses[var].append(-1)
    sites, taken = [], set()
    for leaf, places in enumerate(uses.values()):
        if len(places) == 1 and places[0] >= 0 and places[0] not in taken:
            eqn = closed.jaxpr.eqns[places[0]]
            make = _FORMS.get(eqn.primitive.name)
            site = make(eqn, leaf, places[0], closed.jaxpr.invars[leaf]) if make else None
            if site is not None:
                sites.append(site)
                taken.add(places[0])
    return sites


def tapped(closed: ClosedJaxpr, sites: Sequence[Site]) -> Callable[..., tuple[Any, tuple[list[Any], list[Any]]]]:
    """(taps, values) -> the loss of a `trace` with a tap added to each site's output; the sites' inputs, and what else
    the trace returns."""
    places = {site.equation: number for number, site in enumerate(sites)}

    def run(taps: Sequence[Any], values: Sequence[Any]) -> tuple[Any, tuple[list[Any], list[Any]]]:
        inputs: list[Any] = [None] * len(sites)

        def tap(place: int, eqn: Any, operands: list[Any]) -> list[Any]:
            outputs = bind(place, eqn, operands)
            if place not in places:
                return outputs
            number = places[place]
            inputs[number] = operands[sites[number].operand]
            return [outputs[0] + taps[number]]

        loss, *others = evaluate(closed, values, tap)
        return loss, (inputs, others)

    return run


def _dense(eqn: Any, leaf: int, place: int, var: Any) -> Site | None:
    """dot_general of a matrix x with the parameter, no batch axes."""
    (left, right), (batch, _) = eqn.params["dimension_numbers"]
    if batch:
        return None
    side = 1 if eqn.invars[1] is var else 0
    along_w, along_x = (right, left) if side else (left, right)
    x_aval, w_aval = eqn.invars[1 - side].aval, var.aval
    free_x = [i for i in range(x_aval.ndim) if i not in along_x]
    free_w = [i for i in range(w_aval.ndim) if i not in along_w]
    rows = math.prod(x_aval.shape[i] for i in free_x)
    inner = math.prod(x_aval.shape[i] for i in along_x)
    outer = math.prod(w_aval.shape[i] for i in free_w)
    order = [*along_w, *free_w]
    if rows * inner * outer == 0:
        return None

    def matrix(x: Any, dy: Any) -> tuple[Any, Any]:
        dy = dy.reshape(rows, outer) if side else dy.reshape(outer, rows).T
        return x.transpose(*free_x, *along_x).reshape(rows, inner), dy

    def back(total: Any) -> Any:
        return total.reshape([w_aval.shape[i] for i in order]).transpose(_inverse(order))

    cheap = rows * (inner + outer) <= inner * outer
    return Site(leaf, place, 1 - side, eqn.outvars[0].aval, rows, cheap, w_aval.shape, w_aval.dtype, matrix, back)


def _conv(eqn: Any, leaf: int, place: int, var: Any) -> Site | None:
    """A convolution with the parameter as its kernel: a product with the patches of its input."""
    p = eqn.params
    if eqn.invars[1] is not var or p["feature_group_count"] != 1 or p["batch_group_count"] != 1:
        return None
    spec = p["dimension_numbers"]
    kernel = [var.aval.shape[i] for i in spec.rhs_spec]  # output features, input features, space
    y = eqn.outvars[0].aval
    first, last = ([x_spec[0], *x_spec[2:], x_spec[1]] for x_spec in (spec.lhs_spec, spec.out_spec))
    rows, inner = y.size // kernel[0], math.prod(kernel[1:])
    if y.size == 0:
        return None
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
        return x.transpose(order).reshape(rows, inner), dy.transpose(last).reshape(rows, kernel[0])

    def back(total: Any) -> Any:
        total = total.reshape(*kernel[2:], kernel[1], kernel[0])
        return jnp.moveaxis(total, (-1, -2), (0, 1)).transpose(_inverse(spec.rhs_spec))

    cheap = rows * (inner + kernel[0]) <= inner * kernel[0]
    return Site(leaf, place, 0, y, rows, cheap, var.aval.shape, var.aval.dtype, matrix, back)


def _embedding(eqn: Any, leaf: int, place: int, var: Any) -> Site | None:
    """Rows of a table by number; a number out of range reads NaN and has no gradient."""
    p, shape = eqn.params, var.aval.shape
    spec, y = p["dimension_numbers"], eqn.outvars[0].aval
    whole_rows = (
        eqn.invars[0] is var
        and len(shape) == 2
        and tuple(p["slice_sizes"]) == (1, shape[1])
        and spec.collapsed_slice_dims == (0,)
        and spec.start_index_map == (0,)
        and spec.offset_dims == (y.ndim - 1,)
        and not spec.operand_batching_dims
        and p["mode"] == jax.lax.GatherScatterMode.FILL_OR_DROP
    )
    if not whole_rows or y.size == 0 or shape[0] >= 2**31 - 1:
        return None
    rows = y.size // shape[1]
    return Site(leaf, place, 1, y, rows, rows <= shape[0], shape, var.aval.dtype)


_FORMS = {"dot_general": _dense, "conv_general_dilated": _conv, "gather": _embedding}
"""By primitive: how to recognise an operation whose gradient is known; None where this use of it is another."""


def _inverse(order: Sequence[int]) -> list[int]:
    """The permutation that undoes another one."""
    return sorted(range(len(order)), key=lambda i: order[i])
