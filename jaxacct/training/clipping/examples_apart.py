"""Runs a function for every example of a batch, and refuses it if one example could affect another's result.

README.md of this folder, "Examples apart", has the three checks, with reasons and limits.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import math
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Primitive

from jaxacct.core.chacha import CHACHA20
from jaxacct.core.validation import InputError
from jaxacct.training.clipping.traces import bind, contents, evaluate, inner_traces, is_key, words_of

_LEAST_RUN = 16  # a constant that shares fewer consecutive simple rows with the data may do so by chance
_ALL_BYTES = 2**28  # a larger data array, or a Source, is compared only in blocks of rows
_BLOCKS, _BLOCK_ROWS = 32, 64
_OWN_BYTES = 12  # a row is simple if it compresses to fewer than 12 bytes more than zeros; it may equal data by chance
_MOST_COLUMNS = 64  # data or a constant with at most this many columns are also compared column by column
_GROUPS = {
    "elementwise": """
        abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e bitcast_convert_type cbrt ceil
        clamp clz complex conj convert_element_type copy copy_p cos cosh digamma div eq eq_to erf erf_inv erfc exp exp2
        expm1 floor ge gt igamma igamma_grad_a igammac imag integer_pow is_finite le le_to lgamma log log1p logistic lt
        lt_to max min mul mulhi name ne neg nextafter not or polygamma population_count pow real reciprocal
        reduce_precision rem round rsqrt select_n shift_left shift_right_arithmetic
        shift_right_logical sign sin sinh sqrt square stop_gradient sub tan tanh xor zeros_like zeta
    """,
    "shapes and indexing": """
        broadcast_in_dim concatenate dynamic_slice dynamic_update_slice empty empty2 gather iota pad reshape rev scatter
        scatter-add scatter-max scatter-min scatter-mul scatter-sub scatter_add scatter_max scatter_min scatter_mul
        scatter_sub slice split squeeze stack tile transpose unstack
    """,
    "reductions, scans and sorts along axes": """
        approx_top_k argmax argmin cumlogsumexp cummax cummin cumprod cumsum fft reduce reduce_and reduce_max reduce_min
        reduce_or reduce_prod reduce_sum reduce_window reduce_window_max reduce_window_min reduce_window_sum reduce_xor
        select_and_gather_add select_and_scatter_add sort top_k
    """,
    "products": "conv_general_dilated dot_general",
    "linear algebra": """
        cholesky custom_linear_solve eig eigh geqp3 geqrf hessenberg householder_product lu lu_pivots_to_permutation
        ormqr qr schur svd symmetric_product triangular_solve tridiagonal tridiagonal_solve
    """,
    "random numbers from keys of a known kind": """
        iota_2x32_shape random_bits random_clone random_fold_in random_gamma random_seed random_split random_unwrap
        random_wrap threefry2x32
    """,
    "nested programs": """
        call checkpoint closed_call cond core_call custom_jvp_call custom_vjp_call custom_vjp_call_jaxpr jit
        optimization_barrier pjit platform_index remat remat2 scan shard_map while
    """,
    "mutable arrays that are created in the program": "addupdate freeze get new_ref swap",
    "placement of arrays": """
        device_put layout_constraint pbroadcast pcast pvary reshard sharding_constraint with_memory_space_constraint
    """,
    "collectives along axes that begin in the program": """
        all_gather all_gather_invariant all_to_all axis_index pmax pmin ppermute psum psum_invariant reduce_scatter
    """,
    "output for debugging, without a result": "debug_callback debug_print",
}
LANE_BY_LANE = frozenset(name for names in _GROUPS.values() for name in names.split())
_ON_HOST = "runs code on the host, which can see all examples at once or remember them"
_IN_JAX = "write it in JAX"
_KNOWN_TO_MIX = {
    "custom_vmap_call": (
        "jax.custom_batching.custom_vmap",
        "has its own batching rule, which sees all examples at once",
        "call the function without custom_vmap",
    ),
    "pure_callback": ("jax.pure_callback", _ON_HOST, _IN_JAX),
    "io_callback": ("jax.experimental.io_callback", _ON_HOST, _IN_JAX),
    "buffer_callback": ("jax.experimental.buffer_callback", _ON_HOST, _IN_JAX),
    "ffi_call": ("jax.ffi.ffi_call", _ON_HOST, _IN_JAX),
    "pallas_call": (
        "pallas_call",
        "is a kernel whose runs for different examples can share memory",
        "write it in JAX, or choose a JAX implementation (such as 'xla')",
    ),
    "rng_bit_generator": (
        "jax.lax.rng_bit_generator",
        "draws for all examples with the first one's key",
        "use jax.random with threefry",
    ),
    "rng_uniform": ("jax.lax.rng_uniform", "draws for all examples from one state", "use jax.random with threefry"),
    "regularized_incomplete_beta": (
        "jax.lax.regularized_incomplete_beta",
        "iterates for all examples until the slowest has converged",
        "write its series in JAX",
    ),
}
"""For each operation that is known to mix examples: its public name, why it is refused, and what to use instead."""
_UNKNOWN = (
    "is not known to give each example of a batch what it would get alone",
    "use operations of jax.numpy, jax.lax and jax.nn",
)
_ROWS = 3
_looked_at: set[bytes] = set()  # digests of the traces that passed `require_still_rows`


def one_of(batch: Any) -> Any:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(np.shape(leaf)[1:], jnp.result_type(leaf)), batch)


def for_each(name: str, function: Callable[[Any], Any], batch: Any) -> Any:
    """Run ``jax.vmap(function)(batch)``; refuse a function in which one example could see another."""
    leaves, form = jax.tree_util.tree_flatten(batch)
    flat = lambda *example: function(jax.tree_util.tree_unflatten(form, example))
    traced, shapes = jax.make_jaxpr(flat, return_shape=True)(*one_of(leaves))
    refuse_mixing(name, traced)
    require_still_rows(name, traced)
    outputs = channels_last(jax.vmap(lambda *example: evaluate(traced, example)))(*leaves)
    return jax.tree_util.tree_unflatten(jax.tree_util.tree_structure(shapes), outputs)


def require_still_rows(name: str, traced: ClosedJaxpr) -> None:
    """Raise InputError if a change of one row of a random batch changes another row's result (README.md)."""
    unknown = [const for const in traced.consts if not _is_known(const)]
    examples = [jax.ShapeDtypeStruct((_ROWS, *aval.shape), aval.dtype) for aval in traced.in_avals]
    if sum(math.prod(a.shape) * a.dtype.itemsize for a in (*unknown, *examples)) > 2**28:
        return
    form = " ".join(str(getattr(const, "aval", np.shape(const))) for const in traced.consts)
    digest = hashlib.sha256(f"{traced.jaxpr} {form}".encode()).digest()
    if digest in _looked_at:
        return
    x64 = jax.dtypes.canonicalize_dtype(np.float64) == np.float64
    with ThreadPoolExecutor(1) as alone:  # a new thread, since the current thread may be tracing a program
        if not alone.submit(_rows_stay, traced, examples, x64).result():
            raise InputError(
                f"{name} moves the result of one example when another changes, but must keep examples apart; call no "
                "operation that has its own batching rule"
            )
    _looked_at.add(digest)


def _rows_stay(traced: ClosedJaxpr, examples: Sequence[Any], x64: bool) -> bool:
    """Return whether all other rows' results keep their bits if the first or last row of a random batch is replaced."""
    with jax.enable_x64(x64):
        rng = np.random.default_rng(0)
        consts = [const if _is_known(const) else _drawn(rng, const.aval, True) for const in traced.consts]
        rows, others = ([_drawn(rng, each, False) for each in examples] for _ in range(2))
        avals = [const.aval for const in traced.jaxpr.constvars]
        one = lambda consts, *row: evaluate(
            ClosedJaxpr(traced.jaxpr, [*map(_as_keys, consts, avals)]), [*map(_as_keys, row, traced.in_avals)]
        )
        batched = jax.vmap(one, (None, *(0 for _ in rows)))
        run = _quickly_compiled(jax.jit(batched).lower(consts, *rows))
        before = _bits(run(consts, *rows))
        for place in (0, _ROWS - 1):
            changed = [row.copy() for row in rows]
            for row, other in zip(changed, others, strict=True):
                row[place] = other[place]
            after = _bits(run(consts, *changed))
            moved = [np.delete(a != b, place, axis=0) for a, b in zip(before, after, strict=True)]
            if any(map(np.any, moved)):
                again = _bits(run(consts, *rows))  # ignore bits in which two runs on the same rows differ
                repeats = [np.delete(a == b, place, axis=0) for a, b in zip(before, again, strict=True)]
                if any(np.any(a & b) for a, b in zip(moved, repeats, strict=True)):
                    return False
    return True


def _quickly_compiled(lowered: Any) -> Any:
    if jax.default_backend() == "cpu":
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            options = {"xla_backend_optimization_level": 0, "xla_cpu_use_fusion_emitters": False}
            return lowered.compile(compiler_options=options)
    return lowered.compile()


def _bits(outputs: Sequence[Any]) -> list[np.ndarray]:
    return [np.asarray(words_of(a)).reshape(_ROWS, -1).view(np.uint8) for a in outputs]


def _is_known(const: Any) -> bool:
    """Return whether the values of a constant are available in this process."""
    return not isinstance(const, jax.core.Tracer) and bool(getattr(const, "is_fully_addressable", True))


def _drawn(rng: np.random.Generator, aval: Any, weights: bool) -> np.ndarray:
    shape, dtype = aval.shape, aval.dtype
    if is_key(aval):
        return rng.integers(0, 2**32, (*shape, *_known_keys()[dtype][1]), np.uint32)
    if weights and len(shape) > 1:
        found = rng.standard_normal(shape) / math.sqrt(math.prod(shape[:-1]))
    elif jnp.issubdtype(dtype, jnp.inexact):
        found = rng.uniform(0.25, 1.0, shape)
    else:
        found = rng.integers(0, 2, shape)
    return found.astype(dtype)


def _as_keys(values: Any, aval: Any) -> Any:
    if not is_key(aval) or is_key(values):
        return values
    return jax.random.wrap_key_data(values, impl=_known_keys()[aval.dtype][0])


def refuse_mixing(name: str, closed: ClosedJaxpr) -> None:
    """Raise InputError if a key, device axis, mutable array or operation outside `LANE_BY_LANE` could mix examples."""
    _refuse_keys(f"{name} is given", closed.jaxpr.invars)
    for eqn, bound in _operations(closed.jaxpr, frozenset()):
        operation = eqn.primitive.name
        # another library's operation may have the name of a JAX operation
        if operation not in LANE_BY_LANE or eqn.primitive not in _of_jax(len(sys.modules)):
            call, why, remedy = _KNOWN_TO_MIX.get(operation, (operation, *_UNKNOWN))
            raise InputError(f"{name} calls {call}, which {why}, but must keep examples apart; {remedy}")
        _refuse_keys(f"{name} calls {operation} with", (*eqn.invars, *eqn.outvars))
        along = _axes_from_outside(eqn, bound)
        if along:
            raise InputError(
                f"{name} calls {operation} along axis {', '.join(map(repr, along))}, which mixes examples of several "
                "devices, but must keep examples apart; sum over devices after clipping"
            )
    if any(type(var.aval).__name__ == "AbstractRef" for var in closed.jaxpr.constvars):
        raise InputError(f"{name} uses a mutable array, which examples can share, but must be pure; pass its value")


def _refuse_keys(who: str, variables: Sequence[Any]) -> None:
    for aval in (var.aval for var in variables):
        if is_key(aval) and aval.dtype not in _known_keys():
            raise InputError(
                f"{who} a random key of type {aval.dtype}, whose numbers for one example can depend on the key of "
                "another, but must keep examples apart; use jax.random.key(seed, impl='threefry2x32'), or let "
                "rngs=True give one"
            )


@functools.lru_cache(1)
def _of_jax(_: int) -> frozenset[Primitive]:
    """Return the operations that JAX's modules define.  The argument, a number of modules, renews the cached result."""
    modules = [module for name, module in [*sys.modules.items()] if name.partition(".")[0] == "jax"]
    return frozenset(each for one in modules for each in [*vars(one).values()] if isinstance(each, Primitive))


@functools.cache
def _known_keys() -> dict[Any, tuple[Any, tuple[int, ...]]]:
    """Return {dtype: (implementation, shape of the key data)} for the types of random keys that keep examples apart."""

    def of(impl: Any) -> tuple[Any, tuple[Any, tuple[int, ...]]]:
        key = jax.eval_shape(lambda: jax.random.key(0, impl=impl))
        return key.dtype, (impl, jax.eval_shape(jax.random.key_data, key).shape)

    return dict(map(of, ("threefry2x32", CHACHA20)))


def _axes_from_outside(eqn: Any, bound: frozenset[Any]) -> tuple[str, ...]:
    """Return the device axes, except `bound`, along which an operation moves data."""
    if eqn.primitive.name in ("pvary", "pcast"):  # these two name an axis but move no data along it
        return ()
    named = [eqn.params.get(key) for key in ("axes", "axis_name")]
    flat = [axis for each in named for axis in (each if isinstance(each, tuple | list) else (each,))]
    return tuple(axis for axis in flat if isinstance(axis, str) and axis not in bound)


def _operations(jaxpr: Jaxpr, bound: frozenset[Any]) -> Iterator[tuple[Any, frozenset[Any]]]:
    """Yield each operation of a trace, and the names of the device axes that begin around it in the trace."""
    for eqn in jaxpr.eqns:
        yield eqn, bound
        inside = bound | eqn.params.get("newly_manual_axes", frozenset())  # not the axes that began outside
        for inner in inner_traces(eqn):
            yield from _operations(inner.jaxpr if isinstance(inner, ClosedJaxpr) else inner, inside)


def channels_last(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function with the same values as `function`.  On CPUs it runs every convolution with channels last."""

    @functools.wraps(function)
    def run(*arguments: Any) -> Any:
        if jax.default_backend() != "cpu":
            return function(*arguments)
        closed, shapes = jax.make_jaxpr(function, return_shape=True)(*arguments)
        outputs = evaluate(closed, jax.tree_util.tree_leaves(arguments), _operation)
        return jax.tree_util.tree_unflatten(jax.tree_util.tree_structure(shapes), outputs)

    return run


def _operation(place: int, eqn: Any, operands: list[Any]) -> list[Any]:
    """Run an operation. A convolution is run with channels last, between two transpositions; others are unchanged."""
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


def refuse_closed_over(name: str, closed: ClosedJaxpr, private: Any, more: Any = ()) -> None:
    """Raise InputError if a constant of a trace, or one of the model's arrays ``more``, holds a part of `private`."""
    found = [*contents(closed)[0], *jax.tree_util.tree_leaves(more)]
    traced = {id(leaf) for leaf in jax.tree_util.tree_leaves(private) if isinstance(leaf, jax.core.Tracer)}
    if any(id(each) in traced for each in found):
        what = "the batch of which it gets an example"
    elif (holder := with_records(found, private)) is not None:
        what = f"an array of shape {holder.shape} that holds rows of the data"
    else:
        return
    raise InputError(
        f"{name} closes over {what}, so an example may see others; take what it needs "
        "from its example and the parameters, or from public data"
    )


def refuse_records(params: Any, private: Any) -> None:
    """Raise InputError if parameters that are trained hold rows of private data before the first step."""
    if (holder := with_records(params, private, columns=False)) is not None:
        raise InputError(
            f"params has an array of shape {holder.shape} that holds rows of the data, and first parameters get no "
            "noise; draw them at random, or take them from public data"
        )


def with_records(arrays: Any, private: Any, columns: bool = True, alike: bool = False) -> np.ndarray | None:
    """Return an array that holds rows of the private arrays and Sources; None if no array does.

    With `columns`, one shared column suffices.  With `alike`, the arrays are data too, and may share rows by chance.
    """
    unique = {id(each): each for each in jax.tree_util.tree_leaves(arrays) if _has_numbers(each)}
    known = [_some_rows(each, len(each)) if alike and each.ndim else np.asarray(each) for each in unique.values()]
    for part in _parts(private):
        for each in known:
            if not columns and part.width == 1 and sum(length > 1 for length in each.shape) > 1:
                continue
            groups = [(view, False) for view in _views(each, part.width) if _says_enough(view)]
            if columns and 1 < part.width <= _MOST_COLUMNS and any(map(_says_enough, _views(each, 1))):
                groups += [(view, True) for view in _views(each, 1)]
            try:
                for view, apart in groups:
                    ours = _Hashed(view)
                    if any(_meet(ours, theirs, alike) for theirs in part(each, apart)):
                        return each
            except InputError:
                break  # skip the comparison: the run that draws these rows will raise the same error
    return None


class _Part:
    """A private array, or one part of a Source's examples.  A call returns hashes of its rows or columns in a dtype."""

    def __init__(self, leaf: Any, size: int, shape: tuple[int, ...], layout: Any = None, place: int = 0) -> None:
        self.width, self._of = math.prod(shape), (leaf, size, layout, place)
        self._hashed: dict[Any, list[_Hashed]] = {}

    def __call__(self, like: np.ndarray, apart: bool) -> list[_Hashed]:
        if (like.dtype, apart) not in self._hashed:
            with np.errstate(all="ignore"):
                cast = self._rows.astype(like.dtype)
            parts = [cast[:, [j]] for j in range(self.width)] if apart else [cast]
            self._hashed[like.dtype, apart] = [*map(_Hashed, parts)]
        return self._hashed[like.dtype, apart]

    @functools.cached_property
    def _rows(self) -> np.ndarray:
        return _some_rows(*self._of).reshape(-1, self.width)


def _parts(private: Any) -> list[_Part]:
    """Return the private arrays, and the parts of private Sources, that have numbers to compare."""
    found = []
    for leaf in jax.tree_util.tree_leaves(private):
        if hasattr(leaf, "dataset"):
            examples = enumerate(jax.tree_util.tree_leaves(leaf.layout.example))
            found += [_Part(one, len(leaf), one.shape, leaf.layout, place) for place, one in examples]
        elif _has_numbers(leaf) and np.ndim(leaf) and np.size(leaf):
            found.append(_Part(leaf, len(leaf), np.shape(leaf)[1:]))
    return [part for part in found if part.width]


def _has_numbers(array: Any) -> bool:
    dtype = getattr(array, "dtype", None)
    plain = dtype is not None and (jnp.issubdtype(dtype, jnp.number) or jnp.issubdtype(dtype, jnp.bool_))
    return plain and hasattr(array, "__array__") and _is_known(array)


def _some_rows(leaf: Any, size: int, layout: Any = None, place: int = 0) -> np.ndarray:
    """Return all rows of a data array, or at most 32 blocks of a large array or a Source, in the dtype JAX gives it."""
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
    """Return whether a constant is complex enough to compare: it has `_LEAST_RUN` rows, or a row that is not simple."""
    return len(view) >= _LEAST_RUN or any(_own_bytes(row) >= _OWN_BYTES for row in view)


def _views(constant: np.ndarray, width: int) -> Iterator[np.ndarray]:
    """Yield the arrays of shape (rows, width) into which a constant can be cut, in memory order or along an axis."""
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


class _Hashed:
    """Rows, the hash of each row, the sorted distinct hashes, and the number of rows with each distinct hash."""

    def __init__(self, rows: np.ndarray) -> None:
        self.rows, self.hashes = rows, _hashed(rows)
        self.once, self.counts = np.unique(self.hashes, return_counts=True)

    @functools.cached_property
    def length(self) -> int:
        """Number of rows that together have 96 bits of entropy.  It exceeds len(rows) if the rows vary too little."""
        share = self.counts / len(self.rows)
        entropy = -float(np.sum(share * np.log2(share)))
        return max(math.ceil(96.0 / entropy), _LEAST_RUN) if entropy > 0.01 else len(self.rows) + 1

    @functools.cached_property
    def runs(self) -> np.ndarray:
        return np.sort(_runs(self.hashes, self.length))


def _meet(ours: _Hashed, theirs: _Hashed, alike: bool) -> bool:
    """Return whether an array contains rows of the data that are too complex to agree by accident."""
    shared = ours.once[_among(ours.once, theirs.once)][:64]
    # for two samples of one distribution, the share of `ours` in `theirs` is near the share of `theirs` with a twin
    twins = 1.0 - np.sum(theirs.counts == 1) / len(theirs.rows)
    by_chance = alike and np.mean(_among(ours.hashes, theirs.once)) <= (1.0 + twins) / 2
    # rows of few distinct values, such as signs, may agree by chance: only runs of such rows count
    values = len(np.unique(theirs.rows[:: max(len(theirs.rows) // 4096, 1)]))
    few = theirs.rows.shape[1] * np.log2(values) < np.log2(float(len(theirs.rows)) * len(ours.rows)) + 20.0
    for one in () if by_chance or few else shared:
        row, often = ours.rows[np.argmax(ours.hashes == one)], theirs.counts[np.searchsorted(theirs.once, one)]
        if 2 * often <= max(len(theirs.rows), 2) and not _is_progression(row) and _own_bytes(row) >= _OWN_BYTES:
            return True
    length, size = theirs.length, len(ours.rows)
    if not shared.size or length > min(len(theirs.rows), size):
        return False
    begins = np.unique([*range(0, size - length + 1, length), size - length])
    same = _among(_runs(ours.hashes, length)[begins], theirs.runs)
    return any(_own_bytes(_numbered(ours.rows[begin : begin + length])) >= _OWN_BYTES for begin in begins[same][:64])


def _among(values: np.ndarray, known: np.ndarray) -> np.ndarray:
    return known[np.searchsorted(known, values).clip(max=len(known) - 1)] == values


def _hashed(rows: np.ndarray) -> np.ndarray:
    width = rows.shape[1] * rows.dtype.itemsize
    weights = np.random.default_rng(0).integers(0, 2**63, -(-width // 4), np.uint64) * np.uint64(2) + np.uint64(1)
    found = np.empty(len(rows), np.uint64)
    for begin in range(0, len(rows), step := max(2**20 // max(width, 1), 1)):
        part = np.ascontiguousarray(rows[begin : begin + step])
        content = np.zeros((len(part), 4 * len(weights)), np.uint8)
        content[:, :width] = part.view(np.uint8).reshape(len(part), width)
        found[begin : begin + step] = ((content.view(np.uint32).astype(np.uint64) + np.uint64(1)) * weights).sum(axis=1)
    return found ^ (found >> np.uint64(29))


def _runs(hashes: np.ndarray, length: int) -> np.ndarray:
    """Return a hash of each run of `length` consecutive rows.  Equal runs have equal hashes."""
    factor = 0x9E3779B97F4A7C15
    powers = np.cumprod(np.full(len(hashes), factor, np.uint64))
    back = np.cumprod(np.full(len(hashes), pow(factor, -1, 2**64), np.uint64))
    sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(hashes * powers)])
    return (sums[length:] - sums[:-length]) * back[: len(hashes) - length + 1]


def _numbered(run: np.ndarray) -> np.ndarray:
    """Return the differences of consecutive rows' ranks.  A row's rank is its place among the sorted distinct rows."""
    as_bytes = np.ascontiguousarray(run)
    if run.shape[1] > 1 or run.dtype.kind not in "biuf":
        as_bytes = as_bytes.view(np.uint8).reshape(len(run), -1)
    numbers = np.unique(as_bytes, axis=0, return_inverse=True)[1].reshape(-1)
    return np.diff(numbers).astype(np.int8 if len(run) < 128 else np.int32)


def _own_bytes(values: np.ndarray) -> int:
    """Return how many bytes longer the compressed array is than compressed zeros of the same size."""
    content = np.ascontiguousarray(values).tobytes()
    return len(zlib.compress(content)) - len(zlib.compress(bytes(len(content))))


def _is_progression(row: np.ndarray) -> bool:
    steps = np.diff(row.astype(np.float64) if row.dtype.kind != "c" else np.abs(row))
    return bool(len(steps) == 0 or np.all(np.abs(steps - steps[0]) <= 1e-4 * np.abs(steps[0])))
