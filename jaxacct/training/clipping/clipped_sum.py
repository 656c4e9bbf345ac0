"""Per-example clipping: the sum of the gradients of a batch's examples, each scaled down to a norm of at most C."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxacct.core.types import ArrayLike, Leaf, PyTree
from jaxacct.core.validation import Constraint, InputError, Tracer, check, choice
from jaxacct.training.clipping import ghost_norms as ghost
from jaxacct.training.clipping.examples_apart import for_each, one_of, refuse_closed_over
from jaxacct.training.clipping.ghost_norms import allowance
from jaxacct.training.clipping.parameter_uses import Uses, Written, tapped, uses_of, zero_tap
from jaxacct.training.clipping.traces import KEPT, computed_once, trace, unfolded_true

CLIP_NORM = Constraint("use a {name} such as 1.0, and scale the loss if needed", 1e-10, 1e10)
"""In this range a clip norm, its square, and noise in proportion to it are normal float32 numbers."""
DEVIATION = Constraint("use an ordinary {name}, such as 1.0", 1e-10, 1e10)
"""Range of (standard deviation of the noise)/(sensitivity).  Outside it float32 may give no noise, or NaN."""
METHODS = ("auto", "vmap", "ghost")


class Clipped(NamedTuple):
    """Sum of clipped gradients, and two counts.  None of the three is private, so never publish them.

    Parameters
    ----------
    total : the sum before noise: a pytree like the parameters, of float32 or wider.
    clipped : number of examples whose gradient, or a part of it with its own clip norm, was longer than the clip norm.
    not_finite : number of examples that contribute nothing: the gradient has a NaN, an infinity or an overflow in the
        parameter's dtype, or is longer than 2^126 clip norms.  If a traced clip norm is NaN or out of range, this
        counts every example whose gradient is not 0 in the part that the clip norm limits.

    >>> import jax.numpy as jnp
    >>> done = clipped_sum(jnp.dot, jnp.zeros(1), jnp.array([[2.0], [jnp.inf]]))
    >>> int(done.clipped), int(done.not_finite)
    (1, 1)
    """

    total: Leaf
    clipped: Leaf
    not_finite: Leaf


def clipped_sum(
    loss_fn: Callable[[Any, Any], Any],
    params: PyTree,
    batch: PyTree,
    mask: ArrayLike | None = None,
    clip_norm: PyTree = 1.0,
    method: str = "auto",
    has_aux: bool = False,
) -> PyTree:
    """Return the sum over the batch of g_i min(1, C/|g_i|), with g_i the gradient of ``loss_fn(params, example_i)``.

    Adding or removing one example moves the sum by at most ``sensitivity(clip_norm)``, replacing one by at most twice
    that.  Rounding is included: each gradient has norm at most C as it enters the sum, and is left out if not finite.
    Inside jit, a traced clip norm of NaN or outside [2^-100, 2^100] makes the sum zero.

    Parameters
    ----------
    loss_fn : (params, example) -> scalar loss of one example.
    params : pytree of floating-point arrays.
    batch : pytree of arrays with the examples along the first axis.
    mask : bool, shape (examples,); False leaves an example out (padding).  By default all examples take part.
    clip_norm : C > 0, or a pytree of such numbers that is a prefix of the parameters: each clips its part by itself.
    method : {"auto", "vmap", "ghost"}
        "vmap" keeps the gradient of each example in memory.  "ghost" computes norms from the inputs and cotangents of
        products, convolutions and embeddings; a parameter with any other use gets "vmap".  "auto" takes the cheaper of
        the two for each parameter (see ``norm_methods``).  All methods agree up to rounding.
    has_aux : whether loss_fn returns (loss, aux), aux a pytree of numbers and arrays.

    Returns
    -------
    Clipped.  With has_aux: (Clipped, sums of aux over the examples that contribute).  The sums are *not* private.

    Raises
    ------
    InputError : the loss could mix examples: it has unknown operations, uses rbg keys, or closes over records.

    References
    ----------
    Abadi et al. 2016; Goodfellow 2015; Li et al. 2022 (ghost norms); Bu et al. 2023 (book-keeping).

    >>> import jax.numpy as jnp
    >>> loss = lambda params, example: jnp.dot(params, example)
    >>> done = clipped_sum(loss, jnp.zeros(2), jnp.array([[3.0, 4.0], [0.5, 0.0]]), clip_norm=1.0)
    >>> done.total.round(3), int(done.clipped), int(done.not_finite)
    (Array([1.1, 0.8], dtype=float32), 1, 0)
    """
    choice("method", method, METHODS)
    for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]:
        if not jnp.issubdtype(dtype := jnp.result_type(leaf), jnp.floating):
            name = jax.tree_util.keystr(path)
            raise InputError(f"params{name} has dtype {dtype}, must be floating; close over it instead")
    grouped(clip_norm, params)
    examples = _batch_size(batch)
    traced, shapes = jax.make_jaxpr(loss_fn, return_shape=True)(params, one_of(batch))
    split_loss(shapes, has_aux)
    refuse_closed_over("loss_fn", traced, batch)
    mask = np.ones(examples, bool) if mask is None else mask
    try:
        done, aux = _clipped_sum(loss_fn, params, batch, mask, clip_norm, method, has_aux)
    except jax.errors.UnexpectedTracerError:
        raise InputError(KEPT) from None
    return (done, aux) if has_aux else done


@functools.partial(jax.jit, static_argnums=(0, 5, 6))
def _clipped_sum(
    loss_fn: Callable[[Any, Any], Any], params: Any, batch: Any, mask: Any, clip_norm: Any, method: str, has_aux: bool
) -> tuple[Clipped, Any]:
    leaves, structure = jax.tree_util.tree_flatten(params)
    norms, groups = grouped(clip_norm, params)
    examples = _batch_size(batch)
    dtype = jnp.dtype(wide(jnp.result_type(*leaves)))
    pair = loss_fn if has_aux else lambda params, example: (loss_fn(params, example), ())
    aux_form = jax.tree_util.tree_structure(jax.eval_shape(pair, params, one_of(batch))[1])
    written, found = find_ways(pair, params, one_of(batch), method)
    sites = [site for site in found if isinstance(site, ghost.Site)]
    direct = [i for i, way in enumerate(found) if way == "vmap"]
    together: dict[Any, list[int]] = {}  # each list is a bundle: all small leaves with one clip norm, or one large leaf
    for i in direct:
        together.setdefault((groups[i], None if leaves[i].size <= 2**14 else i), []).append(i)
    bundles = list(together.values())
    uses = [use for site in sites for use, _ in site.uses]
    wanted = sorted({(use.place, use.product.other) for use in uses})

    def gradients(example: Any) -> Any:
        def loss(taps: Any, chosen: Any) -> Any:
            values = list(leaves)
            for i, value in zip(direct, chosen, strict=True):
                values[i] = value
            (loss, *aux), met = tapped(written, [*values, *jax.tree_util.tree_leaves(example)], taps, wanted)
            return loss, (met, aux)

        taps = {use.place: zero_tap(use) for use in uses}
        (dys, grads), (met, aux) = jax.grad(loss, (0, 1), has_aux=True)(taps, [leaves[i] for i in direct])
        return grads, [site.operands(met, dys, dtype) for site in sites], aux

    # Each gradient is computed once, for its norm and for the sum: a second computation could round to a larger norm.
    true = unfolded_true([*norms, min(leaves, key=np.size), mask, *jax.tree_util.tree_leaves(batch)])
    grads, rows, aux = computed_once(true, lambda: for_each("loss_fn", gradients, batch))
    grads = dict(zip(direct, (g.astype(dtype) for g in grads), strict=True))
    rows_of = lambda bundle: [grads[i].reshape(examples, -1) for i in bundle]
    joined = [flat[0] if len(flat) == 1 else jnp.concatenate(flat, axis=1) for flat in map(rows_of, bundles)]

    # (E, a bound on (|g|/2^E)^2, whether g is surely finite) of each part g of a gradient; the first part is only zeros
    parts = [(jnp.full((1, examples), ghost.NOTHING), jnp.zeros((1, examples), dtype), jnp.ones((1, examples), bool))]
    parts += [tuple(a[None] for a in jax.vmap(_norm_squared)(g)) for g in joined]
    parts += [site.measured(each, dtype) for site, each in zip(sites, rows, strict=True)]
    counts = [1, *(1 for _ in bundles), *(site.groups for site in sites)]
    sizes = [1, *(g.shape[1] for g in joined), *(leaves[site.leaf].size // site.groups for site in sites)]
    begins = np.cumsum([0, *counts])
    first_leaves = [*(bundle[0] for bundle in bundles), *(site.leaf for site in sites)]
    group_of = np.repeat([0, *(groups[i] for i in first_leaves)], counts)
    members = [np.flatnonzero(group_of == group) for group in range(len(norms))]
    most = max((site.rows for site in sites), default=1)
    limits = [limit_of(c, np.repeat(sizes, counts).tolist(), most, dtype) for c in norms]

    def weights_of() -> tuple[Any, Any, Any, Any]:
        exponents, squares, sure = (jnp.concatenate(column) for column in zip(*parts, strict=True))
        scales = [_scales(exponents[m], squares[m], c) for c, m in zip(limits, members, strict=True)]
        finite = jnp.all(sure, axis=0) & jnp.all(jnp.stack([scale.usable for scale in scales]), axis=0)
        fits = jnp.all(jnp.stack([scale.fits for scale in scales]), axis=0)
        keep = finite & mask
        of_parts = jnp.zeros(exponents.shape, dtype)
        for scale, m in zip(scales, members, strict=True):
            of_parts = of_parts.at[m].set(scale.parts)
        return (
            jnp.where(keep, jnp.stack([scale.weight for scale in scales]), 0),
            jnp.where(keep, of_parts, 0),
            keep,
            jnp.stack([jnp.sum(keep & ~fits), jnp.sum(mask & ~finite)]).astype(jnp.int32),
        )

    # `places`: the offset of each bundled leaf in its bundle's total, then the index of each site's first part
    starts = [at for bundle in bundles for at in np.cumsum([0, *(leaves[i].size for i in bundle)])[:-1].tolist()]
    places = [*starts, *begins[1 + len(bundles) : -1].tolist()]

    # Weights are computed once.  The compiler sees no values in `places`, so slices of one size share compiled code.
    # Both come from a single branch, since a GPU's host waits for each branch.
    both = computed_once(true, lambda: (weights_of(), [np.int32(place) for place in places]))
    (weights, of_parts, keep, (clipped, not_finite)), data = both
    numbers = iter(data)
    totals = [jnp.zeros(leaf.shape, dtype) for leaf in leaves]
    for bundle, g in zip(bundles, joined, strict=True):
        total = jnp.tensordot(weights[groups[bundle[0]]], _kept(keep, g), 1, precision=ghost.HIGHEST)
        for i in bundle:
            start, size = next(numbers), leaves[i].size
            part = jax.lax.dynamic_slice_in_dim(total, start, size, allow_negative_indices=False)
            totals[i] = part.reshape(leaves[i].shape)
    for site, each, place in zip(sites, rows, numbers, strict=True):
        own = jax.lax.dynamic_slice_in_dim(of_parts, place, site.groups, allow_negative_indices=False)
        totals[site.leaf] = site.total(each, keep, own, dtype)
    kinds = [beside(a.dtype) for a in aux]
    sums = [jnp.sum(_kept(keep, a.astype(d)), axis=0, dtype=d) for a, d in zip(aux, kinds, strict=True)]
    done = Clipped(jax.tree_util.tree_unflatten(structure, totals), clipped, not_finite)
    return done, jax.tree_util.tree_unflatten(aux_form, sums)


def _norm_squared(g: Any) -> tuple[Any, Any, Any]:
    """Return (E, (|g|/2^E)^2, whether g is finite) for a gradient g, with E the exponent of its largest entry."""
    # In float32 limit E to 126: for E = 127 the factor 2^-E would be subnormal, and `power` would return 0.
    top = jnp.minimum(ghost.exponent(jnp.max(jnp.abs(g), initial=0)), jnp.finfo(g.dtype).maxexp - 2)
    square = ghost.sum_squares(g * ghost.power(-top, g.dtype))
    return top, square, jnp.isfinite(square)


class _Scales(NamedTuple):
    """Factors that clip the gradient g of each example to one clip norm C."""

    fits: Any  # (examples,): whether g stays unclipped; False if g contains a NaN
    weight: Any  # (examples,): min(1, C/|g|)
    parts: Any  # (parts, examples): 2^E min(1, C/|g|), E the part's exponent.  A clipped part is part/2^E times this
    usable: Any  # (examples,): whether `weight` and `parts` are normal numbers; False if g contains a NaN


def _scales(exponents: Any, squares: Any, limit: Any) -> _Scales:
    """Compute the `_Scales` for the norm `limit`.  The arrays of E and (|part|/2^E)^2 have shape (parts, examples)."""
    top = jnp.max(exponents, axis=0, initial=ghost.NOTHING)
    apart = exponents - top[None]
    length = jnp.sqrt(jnp.sum(squares * ghost.power(2 * apart, squares.dtype), axis=0))
    fits = length <= ghost.scaled(limit, -top)
    quotient = limit / length
    weight = ghost.scaled(quotient, -top)
    least = jnp.finfo(squares.dtype).tiny
    return _Scales(
        fits,
        jnp.where(fits, 1, weight),
        jnp.where(fits[None], ghost.power(exponents, squares.dtype), ghost.scaled(quotient[None], apart)),
        fits | ((quotient >= least) & (weight >= least)),
    )


def split_loss(out: Any, has_aux: bool) -> tuple[Any, Any]:
    """Split a loss function's result into (loss, aux); aux is () if there is none.  The loss must be a scalar."""
    pair = isinstance(out, tuple) and len(out) == 2
    loss, aux = out if has_aux and pair else (out, ())
    number = len(jax.tree_util.tree_leaves(loss)) == 1 and loss is jax.tree_util.tree_leaves(loss)[0]
    if has_aux > pair or not number or loss.shape != () or not jnp.issubdtype(loss.dtype, jnp.floating):
        told = "(loss, aux), the loss a scalar" if has_aux else "a scalar"
        remedy = (
            "take the mean over its axes" if has_aux == pair else "give has_aux=True for (loss, aux), and only there"
        )
        shown = jax.tree.map(lambda a: f"{a.dtype}{list(a.shape)}", out)
        raise InputError(f"loss_fn returns {shown!s:.60} for one example, must be {told}; {remedy}")
    return loss, aux


def norm_methods(
    loss_fn: Callable[[Any, Any], Any], params: PyTree, example: PyTree, method: str = "auto", has_aux: bool = False
) -> dict[str, str]:
    """Return how `clipped_sum` with the same method finds the norm of each parameter.

    Parameters
    ----------
    loss_fn, params, method, has_aux : as for `clipped_sum`.
    example : one example, without a batch axis: arrays, or their shapes and dtypes.

    Returns
    -------
    dict : {path of the parameter: word}.  The word is "ghost", "vmap", or "none" (no gradient).  Its attribute
        ``reason`` says why it is not "ghost".

    >>> import jax.numpy as jnp
    >>> loss = lambda params, x: jnp.sum(jnp.tanh(x @ params["kernel"] + params["bias"]))
    >>> norm_methods(loss, {"kernel": jnp.zeros((30, 20)), "bias": jnp.zeros(20)}, jnp.zeros(30))
    {"['bias']": 'vmap', "['kernel']": 'ghost'}
    >>> norm_methods(loss, {"kernel": jnp.zeros((30, 20)), "bias": jnp.zeros(20)}, jnp.zeros(30))["['bias']"].reason
    'its use by add is no product, convolution or look-up of rows'
    """
    choice("method", method, METHODS)
    split_loss(jax.eval_shape(loss_fn, params, example), has_aux)
    found = find_ways(loss_fn, params, example, method)[1]
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_flatten_with_path(params)[0]]
    return {path: Way("ghost") if isinstance(way, ghost.Site) else way for path, way in zip(paths, found, strict=True)}


def _kept(keep: Any, values: Any) -> Any:
    """Set the values of examples outside `keep` to 0.  A weight of 0 does not suffice, since 0 * NaN is NaN."""
    return jnp.where(keep.reshape(-1, *(1,) * (values.ndim - 1)), values, 0)


def _batch_size(batch: Any) -> int:
    sizes = {np.shape(leaf)[:1] for leaf in jax.tree_util.tree_leaves(batch)}
    if len(sizes) != 1 or () in sizes:
        raise InputError(f"batch has first axes {sorted(sizes)}, must all be equal; put the examples along the first")
    return int(sizes.pop()[0])


class Way(str):
    """A word that says how a parameter's norm is found.  ``reason`` says why the word is not "ghost" ("" if it is)."""

    reason: str

    def __new__(cls, word: str, reason: str = "") -> Way:
        way = super().__new__(cls, word)
        way.reason = reason
        return way


def find_ways(loss_fn: Any, params: Any, example: Any, method: str) -> tuple[Written, list[Any]]:
    """Return the trace of a loss, and for each parameter a `Site` if ghost norms are used for it, else a `Way`."""
    leaves = jax.tree_util.tree_leaves(params)
    written, uses = uses_of(trace(loss_fn, params, example), len(leaves))
    return written, [_way(i, leaf, each, method) for i, (leaf, each) in enumerate(zip(leaves, uses, strict=True))]


def _way(leaf: int, value: Any, uses: Uses, method: str) -> Any:
    if not uses.known and not uses.others:
        return Way("none", "the loss has no gradient with respect to it")
    if method == "vmap":
        return Way("vmap", "method='vmap'")
    site = ghost.site_of(leaf, value, uses)
    if isinstance(site, str):
        return Way("vmap", site)
    if not site.cheap and method == "auto":
        return Way("vmap", f"its gradient has fewer entries than the products of {site.rows} rows")
    return site


def sensitivity(clip_norm: PyTree) -> float:
    """Return the largest norm that one example can add to a clipped sum: C, or sqrt(sum_i C_i^2), rounded up.

    Parameters
    ----------
    clip_norm : C, or a pytree of C_i, one for each part of the parameters.  Each is between 1e-10 and 1e10.

    Returns
    -------
    float

    References
    ----------
    Abadi et al. 2016; McMahan et al. 2018 (a clip norm for each part).

    >>> sensitivity({"layer": 3.0, "head": 4.0}) - 5.0 < 1e-15
    True
    """
    norms = [float(check("clip_norm", c, CLIP_NORM)) for c in jax.tree_util.tree_leaves(clip_norm)]
    if not norms:  # without a clip norm the sensitivity, and so the noise, would be 0
        raise InputError(f"clip_norm = {clip_norm!r:.40} holds no number, must hold one or more; give 1.0, for example")
    return norms[0] if len(norms) == 1 else math.nextafter(math.hypot(*norms), math.inf)


def deviation(noise_multiplier: Any, norms: Sequence[Any]) -> Any:
    """Return noise multiplier * sqrt(sum of squared clip norms) in float32, raised by more than the rounding error."""
    rounding = 1.0 + (16 + len(norms)) * 2.0**-24
    return jnp.float32(noise_multiplier) * jnp.sqrt(sum(jnp.float32(c) ** 2 for c in norms)) * rounding


def grouped(clip_norm: Any, params: Any) -> tuple[list[Any], list[int]]:
    """Return the list of clip norms, and for each parameter the position of its clip norm in that list."""
    norms = jax.tree_util.tree_leaves(clip_norm)
    for norm in norms:
        if not isinstance(norm, Tracer) and np.ndim(check("clip_norm", norm, CLIP_NORM)):
            raise InputError(f"clip_norm has shape {np.shape(norm)}, must be a number; use one number for each part")
    try:
        counts = jax.tree.leaves(jax.tree.map(lambda _, part: len(jax.tree.leaves(part)), clip_norm, params))
    except ValueError:
        raise InputError("clip_norm must be a number or a prefix of the parameters; give one for each part") from None
    return norms, [group for group, count in enumerate(counts) for _ in range(count)]


def limit_of(clip_norm: Any, sizes: Sequence[int], rows: int, dtype: Any) -> Any:
    """Return the clip norm minus a margin for rounding (README.md); 0 if the clip norm is NaN or out of range."""
    below_normal = 16 * rows * math.sqrt(sum(sizes)) * float(jnp.finfo(dtype).tiny)
    c = jnp.asarray(clip_norm, dtype)
    held = (c >= 2.0**-100) & (c <= 2.0**100)  # False for NaN.  Compiled code cannot raise: the limit becomes 0.
    return jnp.where(held, c * (1 - allowance(sizes, dtype)) - below_normal, 0)


def wide(dtype: Any) -> Any:
    """Return the dtype in which sums and noise are formed: at least float32."""
    return jnp.promote_types(dtype, jnp.float32)


def beside(dtype: Any) -> Any:
    """Return the dtype in which losses, aux or counts are summed: int32 stays, any other becomes at least float32."""
    return dtype if dtype == jnp.int32 else wide(dtype)
