"""Constants of a program that are a part of the data: a loss that closes over records sees them all.

A constant is compared by content: rows of the data along any axis of it, in its dtype, and, where single rows say too
little (labels), runs of rows in the order that the data have.  README.md of this folder, "Examples apart", says what is
not found.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from jaxacct.training.step.lane_by_lane import inner_traces
from jaxacct.validation import InputError

__all__ = ["refuse_closed_over"]

_ALL_BYTES = 2**28
"""Data up to this size are read as a whole; of larger ones, and of a Source, some blocks of rows are."""
_BLOCKS, _BLOCK_ROWS = 32, 64
_OWN_BYTES = 12
"""A row, or a run of rows, that compresses this well, beside zeros, is too simple to come from the data alone."""
_RUN_BITS, _LEAST_RUN = 96.0, 16
"""A run is so long that it has this much entropy by the frequencies of its rows, and at least so many rows."""
_MOST_COLUMNS = 64
"""Columns of the data, or of a constant, that are compared by themselves."""
_CHUNK = 2**20


def refuse_closed_over(name: str, closed: ClosedJaxpr, data: Any, more: Any = (), source: bool = False) -> None:
    """InputError where a constant of a trace, or one of more arrays of the model, equals a part of the data.

    data : pytree of arrays, or (source) a Source.  What is not known while a program is traced is compared by identity.
    """
    leaves = jax.tree_util.tree_leaves(data.layout.example if source else data)
    found = {id(each): each for each in (*_constants(closed), *jax.tree_util.tree_leaves(more))}.values()
    traced = {id(leaf) for leaf in leaves if isinstance(leaf, jax.core.Tracer)}
    if any(id(each) in traced for each in found):
        raise _refusal(name, "the batch that it is given an example of")
    known = [np.asarray(each) for each in found if _has_numbers(each)]
    for place, leaf in enumerate(leaves):
        size, one = (len(data), leaf.shape) if source else (np.shape(leaf)[0], np.shape(leaf)[1:])
        width = math.prod(one)
        if not (source or _has_numbers(leaf)) or not width * size:
            continue
        rows: np.ndarray | None = None
        for each in known:
            views = [view for view in _views(each, width) if _says_enough(view)]
            columns = 1 < width <= _MOST_COLUMNS and any(map(_says_enough, _views(each, 1)))
            if not views and not columns:
                continue
            try:
                rows = _some_rows(leaf, size, data.layout if source else None, place) if rows is None else rows
            except InputError:
                break  # an example that cannot be loaded: the run tells, if it draws it
            with np.errstate(all="ignore"):
                cast = rows.reshape(-1, width).astype(each.dtype)
            lists = [cast[:, [j]] for j in range(width)] if columns else []
            pairs = [(view, cast) for view in views]
            pairs += [(view, column) for column in lists for view in _views(each, 1)]
            if any(_meet(view, column) for view, column in pairs):
                raise _refusal(name, f"an array of shape {each.shape} that holds rows of the data")


def _refusal(name: str, what: str) -> InputError:
    return InputError(
        f"{name} closes over {what}, so that every example sees others, must see its own alone; take what it needs "
        "from its example and the parameters, or from public data"
    )


def _constants(closed: ClosedJaxpr | Jaxpr) -> Iterator[Any]:
    """The arrays that a trace holds, at any depth."""
    if isinstance(closed, ClosedJaxpr):
        yield from closed.consts
        closed = closed.jaxpr
    for eqn in closed.eqns:
        yield from (var.val for var in eqn.invars if isinstance(var, Literal) and np.ndim(var.val))
        for inner in inner_traces(tuple(eqn.params.values())):
            yield from _constants(inner)


def _has_numbers(array: Any) -> bool:
    """Whether an array is at hand in this process, and holds numbers."""
    dtype = getattr(array, "dtype", None)
    plain = dtype is not None and (jnp.issubdtype(dtype, jnp.number) or jnp.issubdtype(dtype, jnp.bool_))
    if not plain or isinstance(array, jax.core.Tracer) or not hasattr(array, "__array__"):
        return False
    return bool(getattr(array, "is_fully_addressable", True))


def _some_rows(leaf: Any, size: int, layout: Any, place: int) -> np.ndarray:
    """Rows of a leaf, in their dtype on the device: all, or of large ones and of a Source those of some blocks."""
    if layout is None and math.prod(leaf.shape) * leaf.dtype.itemsize <= _ALL_BYTES:
        rows = np.asarray(leaf)
    else:
        begins = np.unique(np.linspace(0, max(size - _BLOCK_ROWS, 0), _BLOCKS).astype(np.int64))
        numbers = np.unique((begins[:, None] + np.arange(_BLOCK_ROWS)).clip(max=size - 1))
        if layout is None:
            rows = np.asarray(leaf[numbers])
        else:
            buffers = layout.buffers((numbers.size,))
            layout.load(numbers, buffers, lambda: False)
            rows = buffers[place]
    return rows.astype(jax.dtypes.canonicalize_dtype(rows.dtype), copy=False)


def _says_enough(view: np.ndarray) -> bool:
    """Whether rows of a constant could show, by themselves or as a run, that they come from the data."""
    return len(view) >= _LEAST_RUN or any(_own_bytes(row) >= _OWN_BYTES for row in view)


def _views(constant: np.ndarray, width: int) -> Iterator[np.ndarray]:
    """A constant as rows of so many numbers: along each of its axes, and as it lies in memory."""
    if not constant.ndim or constant.size < width:
        return
    if constant.size % width == 0:
        yield constant.reshape(-1, width)
    for axis, length in enumerate(constant.shape):
        if axis and length and constant.size // length == width:
            yield np.moveaxis(constant, axis, 0).reshape(length, width)
    if width == 1 and constant.ndim == 2:
        for turned in (constant, constant.T):
            if 1 < turned.shape[1] <= _MOST_COLUMNS:
                yield from (turned[:, [j]] for j in range(turned.shape[1]))


def _meet(ours: np.ndarray, rows: np.ndarray) -> bool:
    """Whether rows of a constant are rows of the data, and say enough that this is no accident."""
    mine, theirs = _hashed(ours), _hashed(rows)
    known, counts = np.unique(theirs, return_counts=True)
    first = np.unique(mine[np.isin(mine, known)])[:64]
    for one in first:
        row, often = ours[np.argmax(mine == one)], counts[np.searchsorted(known, one)]
        if 2 * often <= max(len(rows), 2) and not _is_progression(row) and _own_bytes(row) >= _OWN_BYTES:
            return True
    share = counts / len(rows)
    entropy = -float(np.sum(share * np.log2(share)))
    length = max(math.ceil(_RUN_BITS / entropy), _LEAST_RUN) if entropy > 0.01 else len(rows) + 1
    if length > min(len(rows), len(ours)):
        return False
    begins = np.unique([*range(0, len(ours) - length + 1, length), len(ours) - length])
    same = np.isin(_runs(mine, length)[begins], _runs(theirs, length))
    return any(_own_bytes(_numbered(ours[begin : begin + length])) >= _OWN_BYTES for begin in begins[same][:64])


def _hashed(rows: np.ndarray) -> np.ndarray:
    """A number of 64 bits for each row, from its bytes."""
    width = rows.shape[1] * rows.dtype.itemsize
    weights = np.random.default_rng(0).integers(0, 2**63, -(-width // 4), np.uint64) * np.uint64(2) + np.uint64(1)
    found = np.empty(len(rows), np.uint64)
    for begin in range(0, len(rows), step := max(_CHUNK // max(width, 1), 1)):
        part = np.ascontiguousarray(rows[begin : begin + step])
        content = np.zeros((len(part), 4 * len(weights)), np.uint8)
        content[:, :width] = part.view(np.uint8).reshape(len(part), width)
        found[begin : begin + step] = ((content.view(np.uint32).astype(np.uint64) + np.uint64(1)) * weights).sum(axis=1)
    return found ^ (found >> np.uint64(29))


def _runs(hashes: np.ndarray, length: int) -> np.ndarray:
    """A number for each run of so many hashes, by differences of sums: of equal runs equal ones."""
    factor = 0x9E3779B97F4A7C15
    powers = np.cumprod(np.full(len(hashes), factor, np.uint64))
    back = np.cumprod(np.full(len(hashes), pow(factor, -1, 2**64), np.uint64))
    sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(hashes * powers)])
    return (sums[length:] - sums[:-length]) * back[: len(hashes) - length + 1]


def _numbered(run: np.ndarray) -> np.ndarray:
    """The steps from row to row of a run, its rows numbered in their order: of a regular run, regular ones."""
    as_bytes = np.ascontiguousarray(run)
    if run.shape[1] > 1 or run.dtype.kind not in "biuf":
        as_bytes = as_bytes.view(np.uint8).reshape(len(run), -1)
    numbers = np.unique(as_bytes, axis=0, return_inverse=True)[1].reshape(-1)
    return np.diff(numbers).astype(np.int8 if len(run) < 128 else np.int32)


def _own_bytes(values: np.ndarray) -> int:
    """By how many bytes an array compresses worse than zeros."""
    content = np.ascontiguousarray(values).tobytes()
    return len(zlib.compress(content)) - len(zlib.compress(bytes(len(content))))


def _is_progression(row: np.ndarray) -> bool:
    """Whether a row goes on by equal steps, as a constant or a grid does."""
    steps = np.diff(row.astype(np.float64) if row.dtype.kind != "c" else np.abs(row))
    return bool(len(steps) == 0 or np.all(np.abs(steps - steps[0]) <= 1e-4 * np.abs(steps[0])))
