"""Refuse a loss that closes over records of the data: it would see them for every example.

Each constant of a program is compared with the data by content: rows along any axis, in the dtype of the constant.
Short rows, such as labels, are compared as runs in the order of the data.  README.md of this folder, "Examples apart",
lists what is not found.
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

from jaxacct.core.validation import InputError
from jaxacct.training.step.lane_by_lane import inner_traces

__all__ = ["refuse_closed_over"]

_ALL_BYTES = 2**28
"""Data up to this size are compared whole; of larger data, and of a Source, only some blocks of rows are."""
_BLOCKS, _BLOCK_ROWS = 32, 64
_OWN_BYTES = 12
"""A row or a run is evidence only if it compresses to this many bytes more than zeros: simpler ones agree by chance."""
_RUN_BITS, _LEAST_RUN = 96.0, 16
"""A run has at least this much entropy, by the frequencies of its rows, and at least this many rows."""
_MOST_COLUMNS = 64
"""Single columns are compared up to this many columns of the data or of a constant."""
_CHUNK = 2**20


def refuse_closed_over(name: str, closed: ClosedJaxpr, data: Any, more: Any = (), source: bool = False) -> None:
    """InputError where a constant of a trace, or one of `more` arrays of the model, holds a part of the data.

    data : pytree of arrays, or (source) a Source.  An array that is itself traced is compared by identity.
    """
    leaves = jax.tree_util.tree_leaves(data.layout.example if source else data)
    found = {id(each): each for each in (*_constants(closed), *jax.tree_util.tree_leaves(more))}.values()
    traced = {id(leaf) for leaf in leaves if isinstance(leaf, jax.core.Tracer)}
    if any(id(each) in traced for each in found):
        raise _refusal(name, "the batch of which it gets an example")
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
                break  # the run refuses an example that cannot be loaded, if it draws it
            with np.errstate(all="ignore"):
                cast = rows.reshape(-1, width).astype(each.dtype)
            lists = [cast[:, [j]] for j in range(width)] if columns else []
            pairs = [(view, cast) for view in views]
            pairs += [(view, column) for column in lists for view in _views(each, 1)]
            if any(_meet(view, column) for view, column in pairs):
                raise _refusal(name, f"an array of shape {each.shape} that holds rows of the data")


def _refusal(name: str, what: str) -> InputError:
    return InputError(
        f"{name} closes over {what}, so every example sees others, but must see its own alone; take what it needs "
        "from its example and the parameters, or from public data"
    )


def _constants(closed: ClosedJaxpr | Jaxpr) -> Iterator[Any]:
    """The arrays in a trace, at any depth."""
    if isinstance(closed, ClosedJaxpr):
        yield from closed.consts
        closed = closed.jaxpr
    for eqn in closed.eqns:
        yield from (var.val for var in eqn.invars if isinstance(var, Literal) and np.ndim(var.val))
        for inner in inner_traces(tuple(eqn.params.values())):
            yield from _constants(inner)


def _has_numbers(array: Any) -> bool:
    """Whether an array is numeric and its values are available in this process."""
    dtype = getattr(array, "dtype", None)
    plain = dtype is not None and (jnp.issubdtype(dtype, jnp.number) or jnp.issubdtype(dtype, jnp.bool_))
    if not plain or isinstance(array, jax.core.Tracer) or not hasattr(array, "__array__"):
        return False
    return bool(getattr(array, "is_fully_addressable", True))


def _some_rows(leaf: Any, size: int, layout: Any, place: int) -> np.ndarray:
    """Rows of a leaf, in their dtype on the device: all, or some blocks of large data and of a Source."""
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
    """Whether the rows of a constant, one by one or as a run, are complex enough to identify them as data."""
    return len(view) >= _LEAST_RUN or any(_own_bytes(row) >= _OWN_BYTES for row in view)


def _views(constant: np.ndarray, width: int) -> Iterator[np.ndarray]:
    """A constant as rows of `width` numbers: in memory order, and along each axis."""
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
    """Whether rows of a constant are rows of the data that are too complex to agree by accident."""
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
    """A 64-bit hash of the bytes of each row."""
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
    """A hash of each run of `length` rows, from differences of prefix sums; equal runs have equal hashes."""
    factor = 0x9E3779B97F4A7C15
    powers = np.cumprod(np.full(len(hashes), factor, np.uint64))
    back = np.cumprod(np.full(len(hashes), pow(factor, -1, 2**64), np.uint64))
    sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(hashes * powers)])
    return (sums[length:] - sums[:-length]) * back[: len(hashes) - length + 1]


def _numbered(run: np.ndarray) -> np.ndarray:
    """Differences of consecutive rows after each distinct row is given its rank; a regular run compresses well."""
    as_bytes = np.ascontiguousarray(run)
    if run.shape[1] > 1 or run.dtype.kind not in "biuf":
        as_bytes = as_bytes.view(np.uint8).reshape(len(run), -1)
    numbers = np.unique(as_bytes, axis=0, return_inverse=True)[1].reshape(-1)
    return np.diff(numbers).astype(np.int8 if len(run) < 128 else np.int32)


def _own_bytes(values: np.ndarray) -> int:
    """How many more bytes an array compresses to than zeros of the same size do."""
    content = np.ascontiguousarray(values).tobytes()
    return len(zlib.compress(content)) - len(zlib.compress(bytes(len(content))))


def _is_progression(row: np.ndarray) -> bool:
    """Whether a row is an arithmetic progression, such as a constant or a grid."""
    steps = np.diff(row.astype(np.float64) if row.dtype.kind != "c" else np.abs(row))
    return bool(len(steps) == 0 or np.all(np.abs(steps - steps[0]) <= 1e-4 * np.abs(steps[0])))
