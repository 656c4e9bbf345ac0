"""Finds the norm of each example's gradient from the uses of a parameter in the loss, without forming the gradient.

README.md of this folder, "Clipping", has the derivations and the bounds of all rounding errors.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxacct.training.clipping.parameter_uses import Step, Use, Uses, largest, merged

BLOCK = 64  # terms in a block: `blocked_sum` sums each block, then the sums in blocks, and so on (README.md)
NOTHING = -(2**20)  # exponent of an array without normal numbers; even NOTHING + 1024 is below all other exponents
HIGHEST = jax.lax.Precision.HIGHEST  # at a lower precision some devices round the factors and break the error bounds
inlined = functools.partial(jax.jit, inline=True)  # traces a function once for all arguments of the same shapes


class Rows(NamedTuple):
    """Rows x_t and dy_t of a gradient, which is the sum over t of x_t dy_t^T.  A field without rows is None."""

    number: Any  # the position of the 1 in each unit vector x_t, of shape (groups, rows)
    beside: Any  # the dy_t of the unit vectors, of shape (groups, rows, M)
    x: Any  # the x_t of all other rows, of shape (groups, rows, K)
    dy: Any  # the dy_t of all other rows, of shape (groups, rows, M)


@dataclass(frozen=True)
class Site:
    """A parameter.  Each of its uses adds a sum of products x_t dy_t^T, of shape (groups, K, M), to its gradient."""

    leaf: int
    shape: tuple[int, ...]
    uses: tuple[tuple[Use, bool], ...]  # (use, whether x and dy swap roles, as for a transposed parameter)
    steps: tuple[tuple[Step, ...], tuple[Step, ...], tuple[Step, ...]]  # (size, stride) of the axes groups, K, M
    narrow: Any  # the dtype with the smallest range among those that the parameter is cast to

    @property
    def groups(self) -> int:
        """Number of groups.  A group is a slice of the parameter along a loop or a batch axis.  It has its own norm."""
        return _size(self.steps[0])

    @property
    def rows(self) -> int:
        """Number of products x_t dy_t^T whose sum is one group's gradient."""
        return sum(_rows(use) for use, _ in self.uses)

    @property
    def cheap(self) -> bool:
        """Whether all x_t and dy_t together have no more entries than the gradient; unit vectors count as 0 entries."""
        inner, outer = map(_size, self.steps[1:])
        return sum(_rows(use) * (outer + inner * (not use.product.indexed)) for use, _ in self.uses) <= inner * outer

    def operands(self, met: Mapping[Any, Any], dys: Mapping[Any, Any], dtype: Any) -> Rows:
        """Return one example's rows from `met` (operands of the operations) and `dys` (cotangents of their outputs)."""
        columns: list[list[Any]] = [[], [], [], []]
        for use, turned in self.uses:
            x, dy = _arranged(use, met[use.place, use.product.other], dys[use.place])
            x, dy = (dy, x) if turned else (x, dy)
            for column, values in zip(columns[:2] if use.product.indexed else columns[2:], (x, dy), strict=True):
                column.append(values)
        together = [jnp.concatenate(column, axis=1) if column else None for column in columns]
        # Rows of a narrower dtype stay narrow here to save memory.  `measured` and `total` widen them to `dtype`.
        return Rows(
            together[0],
            *(a if a is None or a.dtype.itemsize <= dtype.itemsize else a.astype(dtype) for a in together[1:]),
        )

    def measured(self, rows: Rows, dtype: Any) -> tuple[Any, Any, Any]:
        """For each group and example return E, a bound on (|g|/2^E)^2, and whether the gradient g is surely finite."""
        return self._each_group(jax.vmap(lambda one: self._norm_squared(*_normalised(_wide(one, dtype)))), rows)

    def total(self, rows: Rows, keep: Any, weights: Any, dtype: Any) -> Any:
        """Sum weight * g/2^E (see `measured`) over the examples in ``keep``.  Weights have shape (groups, examples)."""

        def one(rows: Rows, weights: Any) -> Any:
            rows = jax.vmap(lambda one: _normalised(_wide(one, dtype))[0])(rows)
            sums = jnp.zeros(tuple(map(_size, self.steps[1:])), dtype)
            kept = lambda values: jnp.where(keep[:, None, None], values, 0)
            weighted = lambda values: kept(values) * weights[:, None, None]
            if rows.x is not None:
                x, dy = (a.reshape(-1, a.shape[-1]) for a in (kept(rows.x), weighted(rows.dy)))
                sums = jnp.matmul(x.T, dy, precision=HIGHEST)
            if rows.number is not None:
                beside = weighted(rows.beside)
                sums = sums.at[rows.number.reshape(-1)].add(beside.reshape(-1, beside.shape[-1]), mode="drop")
            return sums

        sums = self._each_group(one, rows, weights)
        steps = [step for several in self.steps for step in several]
        order = sorted(range(len(steps)), key=lambda i: -steps[i][1])
        return sums.reshape([size for size, _ in steps]).transpose(order).reshape(self.shape)

    def _each_group(self, function: Callable[..., Any], rows: Rows, *more: Any) -> Any:
        """Call a function once for each group, with the rows of all examples in that group.  Stack the results."""

        def one(group: Any) -> Any:
            pick = lambda axis: lambda a: jax.lax.dynamic_index_in_dim(a, group, axis, keepdims=False)
            return function(jax.tree.map(pick(1), rows), *map(pick(0), more))

        if self.groups > 1:
            return jax.lax.map(one, jnp.arange(self.groups))
        return jax.tree.map(lambda a: a[None], function(jax.tree.map(lambda a: a[:, 0], rows), *(a[0] for a in more)))

    def _norm_squared(self, rows: Rows, top: Any, most: Any) -> tuple[Any, Any, Any]:
        """Return the result of `measured` for one group and example; the arguments come from `_normalised`."""
        number, beside, x, dy = rows
        right = jnp.concatenate([a for a in (beside, dy) if a is not None])
        unit = jnp.finfo(right.dtype).eps / 2
        added = BLOCK * 2 * block_levels(max(math.prod(self.shape) // self.groups, self.rows**2)) + 16
        if x is None:
            lengths = jnp.sqrt(jax.vmap(sum_squares)(right))
            # Several look-ups of one table row add to the same gradient row: sum their dy_t, then square the sums.
            first = jnp.argmax(number[:, None] == number[None, :], axis=1)
            square = sum_squares(jax.ops.segment_sum(right, first, self.rows))
            slack = added * square
        elif number is None and self.rows == 1:
            square = sum_squares(x) * sum_squares(right)
            lengths, slack = jnp.sqrt(square)[None], added * square
        else:
            left, along = _gram(number, x), jnp.matmul(right, right.T, precision=HIGHEST)
            same = jnp.arange(self.rows)[:, None] == jnp.arange(self.rows)
            of_x, lengths = jnp.sqrt(jnp.sum(jnp.where(same, jnp.stack([left, along]), 0), axis=2))
            inner, outer = x.shape[1], right.shape[1]
            by_left = inner * of_x[:, None] * of_x * jnp.abs(along)
            by_right = outer * lengths[:, None] * lengths * (jnp.abs(left) + 2 * inner * unit * of_x[:, None] * of_x)
            both = jnp.stack([left * along, by_left + by_right + added * jnp.abs(left * along)])
            square, slack = jax.vmap(blocked_sum)(both)
            square, lengths = jnp.maximum(square, 0), of_x * lengths
        additions = self.rows * (2 if x is None else 1) + 8
        length = jnp.sqrt(square + 2 * unit * slack) + 2 * additions * unit * jnp.sum(lengths)
        square = length**2
        # No entry of g/2^E exceeds `length` or `most`.  A NaN or an infinity in any entry makes `square` not finite.
        largest = scaled(right.dtype.type(jnp.finfo(self.narrow).max), -top)
        return top, square, jnp.isfinite(square) & ((most <= largest) | (length <= largest))


def site_of(leaf: int, aval: Any, uses: Uses) -> Site | str:
    """Return the `Site` of a parameter, or the reason why its norm cannot be found without the gradient."""
    if uses.others:
        return f"its use by {', '.join(sorted(set(uses.others)))} is no product, convolution or look-up of rows"
    forms = [_form(use) for use in uses.known]
    indexed = [form for form, use in zip(forms, uses.known, strict=True) if use.product.indexed]
    groups, left, right = (indexed or forms)[0]
    turned = []
    for form, use in zip(forms, uses.known, strict=True):
        if form == (groups, left, right):
            turned.append(False)
        elif form == (groups, right, left) and not use.product.indexed:
            turned.append(True)
        else:
            return "its uses do not split it into the same rows and columns"
    narrow = min((use.view.narrow for use in uses.known), key=largest)
    site = Site(leaf, aval.shape, tuple(zip(uses.known, turned, strict=True)), (groups, left, right), narrow)
    longest = max(site.rows, _size(right), 0 if len(indexed) == len(forms) else _size(left))
    # The error bounds hold for sums of up to 2^20 float32 terms: the relative error is then at most 2^20 2^-24 = 1/16.
    return site if longest <= 2**20 else f"it meets {longest} rows or columns, too many to bound their rounding"


def _form(use: Use) -> tuple[tuple[Step, ...], tuple[Step, ...], tuple[Step, ...]]:
    """Return the axes of a use's gradient: groups, K and M, each as (size, stride) pairs in the flat parameter."""
    view, product = use.view, use.product
    along = lambda axes: [step for axis in axes for step in view.axes[axis]]
    cut = [step for _, steps in view.loops for step in steps or ()]
    return merged([*cut, *along(product.groups)]), merged(along(product.left)), merged(along(product.right))


def _arranged(use: Use, x: Any, dy: Any) -> tuple[Any, Any]:
    """Reshape x and dy to (groups, rows, ...).  Loops over slices of the parameter add groups, other loops add rows."""
    loops = use.view.loops
    matrix = use.product.matrix
    for _ in loops:
        matrix = jax.vmap(matrix)
    depth = len(loops)
    cut = [i for i, (_, steps) in enumerate(loops) if steps is not None]
    order = [*cut, depth, *(i for i in range(depth) if i not in cut), depth + 1]
    groups = _size(_form(use)[0])
    return tuple(  # type: ignore[return-value]  # the tuple has two arrays
        a.transpose(*order, *range(depth + 2, a.ndim)).reshape(groups, -1, *a.shape[depth + 2 :]) for a in matrix(x, dy)
    )


@inlined
def _normalised(rows: Rows) -> tuple[Rows, Any, Any]:
    """Scale rows to x', dy' with g = 2^E sum_t x'_t dy'_t^T.  Return (scaled rows, E, sum_t max|x'_t| max|dy'_t|)."""
    number, beside, x, dy = rows
    peak_of = lambda a: jnp.max(jnp.abs(a), axis=1)
    tops, parts = [], []
    if beside is not None:
        peak = peak_of(beside)
        tops.append(jnp.max(exponent(peak)))
    if x is not None:
        peak_x, peak_dy = peak_of(x), peak_of(dy)
        # In float32 limit the exponent e to 126: for e = 127, 2^-e would be subnormal, and `power` would return 0.
        along_x = jnp.minimum(exponent(peak_x), jnp.finfo(x.dtype).maxexp - 2)
        tops.append(jnp.max(along_x + exponent(peak_dy)))
    top = jnp.max(jnp.stack(tops))
    if beside is not None:
        parts.append(jnp.sum(scaled(peak, -top)))
        beside = scaled(normal(beside), -top)
    if x is not None:
        from_x, to_dy = power(-along_x, x.dtype), along_x - top
        parts.append(jnp.sum(peak_x * from_x * scaled(peak_dy, to_dy)))
        x, dy = normal(x) * from_x[:, None], scaled(normal(dy), to_dy[:, None])
    return Rows(number, beside, x, dy), top, sum(parts)


def _gram(number: Any, x: Any) -> Any:
    """Return the inner products of all pairs of rows.  The rows are the unit vectors (1 at `number`) and then `x`."""
    gram = jnp.matmul(x, x.T, precision=HIGHEST)
    if number is None:
        return gram
    mixed = jnp.take(x, number, axis=1, mode="fill", fill_value=0)
    return jnp.block([[(number[:, None] == number[None, :]).astype(x.dtype), mixed.T], [mixed, gram]])


def _wide(rows: Rows, dtype: Any) -> Rows:
    return Rows(rows.number, *(None if a is None else a.astype(dtype) for a in rows[1:]))


def _rows(use: Use) -> int:
    """Count the products x_t dy_t^T that a use adds to one group's gradient, in all passes of loops around it."""
    repeated = math.prod(length for length, steps in use.view.loops if steps is None)
    product = use.product
    columns = _size([step for axis in (*product.groups, *product.right) for step in use.view.axes[axis]])
    return repeated * (math.prod(product.output.shape) // columns)


def _size(steps: Sequence[Step]) -> int:
    return math.prod(size for size, _ in steps)


@inlined
def exponent(values: Any) -> Any:
    """Return int32 e with 2^e <= |value| < 2^(e+1); NOTHING for 0 and subnormals, ``finfo.maxexp`` for inf and NaN."""
    info = jnp.finfo(values.dtype)
    field = (_magnitude(values) >> info.nmant).astype(np.int32)
    return jnp.where(field > 0, field - (info.maxexp - 1), NOTHING)


@inlined
def normal(values: Any) -> Any:
    """Return the values with zeros in place of subnormal numbers."""
    info = jnp.finfo(values.dtype)
    return jnp.where(_magnitude(values) >= 1 << info.nmant, values, 0)


@functools.partial(inlined, static_argnums=1)
def power(exponents: Any, dtype: Any) -> Any:
    """Return 2^e: zero where 2^e is subnormal, and the largest power of two where it overflows."""
    info = jnp.finfo(dtype)
    field = jnp.clip(exponents, info.minexp - 1, info.maxexp - 1) + (info.maxexp - 1)
    return jax.lax.bitcast_convert_type(field.astype(_integer(dtype)) << info.nmant, dtype)


@inlined
def scaled(values: Any, exponents: Any) -> Any:
    """Return values * 2^e; 0 if e is below twice the dtype's least exponent.  e is at most twice the largest one."""
    half = exponents >> 1
    return values * power(half, values.dtype) * power(exponents - half, values.dtype)


def _magnitude(values: Any) -> Any:
    """Return the bits of |value| as an integer; a larger |value| gives a larger integer, and NaN the largest."""
    integer = _integer(values.dtype)
    return jax.lax.bitcast_convert_type(values, integer) & np.iinfo(integer).max


def _integer(dtype: Any) -> Any:
    return np.dtype(f"int{8 * jnp.dtype(dtype).itemsize}")


def sum_squares(values: Any) -> Any:
    return blocked_sum(jnp.square(values))


@inlined
def blocked_sum(values: Any) -> Any:
    """Sum terms >= 0 in blocks, then the block sums, etc.  A level has at most the relative error of 63 additions."""
    flat = values.reshape(-1)
    while flat.size > BLOCK:
        flat = jnp.pad(flat, (0, -flat.size % BLOCK)).reshape(-1, BLOCK).sum(1)
    return flat.sum()


def allowance(sizes: Sequence[int], dtype: Any) -> float:
    """Return the part of a clip norm to subtract from it for rounding errors when arrays of these sizes are clipped."""
    levels = max(map(block_levels, sizes), default=1)
    return (BLOCK * levels + len(sizes) + 16) * float(jnp.finfo(dtype).eps) / 2


def block_levels(size: int) -> int:
    return max(1, math.ceil(math.log(max(size, 2), BLOCK) - 1e-9))
