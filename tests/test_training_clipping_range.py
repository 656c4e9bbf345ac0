"""Contributions of single examples over the whole range of each dtype, measured in float64: never more than C."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxacct.training import clipped_sum
from jaxacct.training.clipping.clipped_sum import norm_methods

DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "float16": jnp.float16}
LARGEST = {"float32": 127, "bfloat16": 127, "float16": 15}
SMALLEST = {"float32": -149, "bfloat16": -133, "float16": -24}
"""Exponents of the largest power of two and of the smallest subnormal number of each dtype."""


def conv(x, w):
    return jax.lax.conv_general_dilated(x[None], w, (1,), [(1, 0)], dimension_numbers=("NHC", "HIO", "NHC"))[0]


LAYERS = {
    # name: shapes of the parameter, x and dy; y = op(x, w); gradient from x and dy in float64, before any clipping
    "dense": ((40, 3), (40,), (3,), lambda x, w: x @ w, np.outer),
    "rows": ((9, 8), (4, 9), (4, 8), lambda x, w: x @ w, lambda x, dy: np.einsum("tk,tm->km", x, dy)),
    "conv": (
        (2, 3, 5),
        (6, 3),
        (6, 5),
        conv,
        lambda x, dy: np.stack([np.einsum("tk,tm->km", np.pad(x, ((1, 0), (0, 0)))[h : h + 6], dy) for h in (0, 1)]),
    ),
    "embedding": ((300, 7), (5,), (5, 7), lambda x, w: jnp.take(w, x, axis=0), None),
    "product": ((11,), (11,), (11,), lambda x, w: x * w, lambda x, dy: x * dy),
    "bias": ((4, 6), (4, 6), (4, 6), lambda x, w: x + w, lambda x, dy: dy),
}
CASES = [
    (layer, method) for layer in LAYERS for method in (("vmap",) if layer in ("product", "bias") else ("ghost", "vmap"))
]
QUICK = {
    ("dense", "ghost", "float32"),
    ("conv", "ghost", "float16"),
    ("embedding", "ghost", "float32"),
    ("rows", "vmap", "float32"),
    ("product", "vmap", "bfloat16"),
}
"""The programs that the quick run compiles, for all tests."""
PROGRAMS = [
    pytest.param(*case, dtype, marks=() if (*case, dtype) in QUICK else pytest.mark.slow)
    for case in CASES
    for dtype in DTYPES
]


def gradient_of_table(x, dy):
    total = np.zeros(LAYERS["embedding"][0])
    np.add.at(total, x, dy)
    return total


@functools.cache
def program(layer, method, dtype):
    """A compiled (batch of x and dy, mask, clip norm) -> Clipped, at a parameter of zeros."""
    shape, _, _, op, _ = LAYERS[layer]
    w = np.zeros(shape, DTYPES[dtype])
    loss = lambda w, example: jnp.sum(op(example[0], w) * example[1])
    return jax.jit(lambda batch, mask, clip: clipped_sum(loss, w, batch, mask, clip, method))


def numbers(rng, shape, dtype, exponent=None):
    """Random numbers of a dtype: all near one power of two, or each row or each entry near one of its own."""
    low, high = SMALLEST[dtype], LARGEST[dtype]
    own = [(1,) * len(shape), (*shape[:1], *(1,) * (len(shape) - 1)), shape][rng.integers(3)]
    exponents = rng.integers(low, high + 1, own) if exponent is None else np.full(own, exponent)
    values = rng.choice([-1, 1], shape) * rng.uniform(1, 2, shape) * 2.0 ** np.clip(exponents, low, high)
    values = np.where(rng.random(shape) < 0.1, 0, values)
    with np.errstate(over="ignore"):
        return values.astype(DTYPES[dtype])


def draw(rng, layer, dtype):
    """x, dy and a clip norm; a third of the gradients are near 2^-10 to 2^10, from factors far apart."""
    _, x_shape, dy_shape, *_ = LAYERS[layer]
    balanced = rng.random() < 1 / 3
    exponent = rng.integers(SMALLEST[dtype], LARGEST[dtype] + 1) if balanced else None
    opposite = rng.integers(-10, 11) - exponent if balanced else None
    if layer == "embedding":
        x = rng.integers(0, rng.choice([3, 300]), x_shape).astype(np.int32)
    else:
        x = numbers(rng, x_shape, dtype, exponent)
    dy = numbers(rng, dy_shape, dtype, opposite)
    clip = 2.0 ** (rng.integers(-149, 128) if rng.random() < 0.5 else rng.integers(-20, 10)) * rng.uniform(1, 2)
    return x, dy, np.float32(clip)


def truth(layer, x, dy):
    """The gradient in float64."""
    wide = lambda a: np.asarray(a, np.float64)
    if layer == "embedding":
        return gradient_of_table(x, wide(dy))
    return LAYERS[layer][4](wide(x), wide(dy))


def length(values):
    """The norm in float64: squares of float32 neither overflow nor vanish there."""
    return float(np.linalg.norm(np.asarray(values, np.float64)))


def worst(layer, method, dtype, count, seed=0):
    """(largest contribution/C, how many were clipped, how many refused) of that many random examples."""
    run, rng = program(layer, method, dtype), np.random.default_rng(seed)
    ratio, clipped, refused = 0.0, 0, 0
    for number in range(count):
        if number % 3 == 0:
            draws = [draw(rng, layer, dtype) for _ in range(3)]
            batch = tuple(np.stack(values) for values in zip(*draws, strict=True))[:2]
        x, dy, clip = draws[number % 3]
        got = run(batch, np.arange(3) == number % 3, clip)
        norm, not_finite = length(got.total), int(got.not_finite)
        where = f"number {number} of seed {seed}: x = {x!r}, dy = {dy!r}, C = {clip!r}, contribution {norm!r}"
        assert norm <= float(clip), where
        assert norm == 0 or not not_finite, where
        if not np.abs(truth(layer, x, dy)).max() <= float(jnp.finfo(DTYPES[dtype]).max) * (1 + 2.0**-8):
            assert not_finite == 1, where
        ratio, clipped, refused = max(ratio, norm / float(clip)), clipped + int(got.clipped), refused + not_finite
    return ratio, clipped, refused


@pytest.mark.parametrize("layer, method, dtype", PROGRAMS)
def test_no_contribution_exceeds_the_clip_norm_over_the_whole_range(layer, method, dtype):
    ratio, clipped, _ = worst(layer, method, dtype, 30)
    assert ratio > 0.9 and clipped >= 2


@pytest.mark.slow
@pytest.mark.parametrize("layer, method, dtype", PROGRAMS)
def test_no_contribution_exceeds_the_clip_norm_in_10_000(layer, method, dtype):
    worst(layer, method, dtype, 10_000, seed=1)


TWO_FACTORS = [case for case in PROGRAMS if "float32" in case.values and case.values[0] not in ("embedding", "bias")]


@pytest.mark.parametrize("layer, method, dtype", TWO_FACTORS)
def test_factors_far_apart_are_clipped_like_any_others(layer, method, dtype):
    """With x near 2^e and dy near 2^-e the gradient is clipped to norm C, and not dropped."""
    run, rng = program(layer, method, dtype), np.random.default_rng(3)
    for exponent in (-110, -70, -1, 70, 110):
        x, dy = (
            (rng.normal(size=shape) * 2.0**e).astype(np.float32)
            for shape, e in zip(LAYERS[layer][1:3], (exponent, -exponent), strict=True)
        )
        g = truth(layer, x, dy)
        for clip in (1e-3, 0.3 * length(g), 2 * length(g)):
            batch = tuple(np.stack([a, np.zeros_like(a), a]) for a in (x, dy))
            got = run(batch, np.array([True, True, False]), np.float32(clip))
            expected = g * min(1.0, clip / length(g))
            assert length(got.total - expected) <= 1e-3 * length(expected)
            assert (int(got.clipped), int(got.not_finite)) == (clip < length(g), 0)


@pytest.mark.parametrize("layer, method, dtype", PROGRAMS)
def test_a_bad_row_counts_and_changes_no_other(layer, method, dtype):
    run, rng = program(layer, method, dtype), np.random.default_rng(4)
    for bad in (np.nan, np.inf, "product"):
        draws = [draw(rng, layer, dtype)[:2] for _ in range(3)]
        x, dy = (np.stack(values) for values in zip(*draws, strict=True))
        dy[0], dy[2] = (rng.normal(size=dy[0].shape).astype(dy.dtype) for _ in range(2))
        if layer != "embedding":
            x[0], x[2] = (rng.normal(size=x[0].shape).astype(x.dtype) for _ in range(2))
        if bad != "product":
            dy[1].flat[0] = bad
        elif layer in ("embedding", "bias"):
            continue
        else:
            x[1] = dy[1] = jnp.finfo(dy.dtype).max  # both factors are finite, but the gradient is not
        got = run((x, dy), np.ones(3, bool), np.float32(1))
        alone = run((x, dy), np.array([True, False, True]), np.float32(1))
        np.testing.assert_array_equal(got.total, alone.total)
        assert (int(got.not_finite), int(alone.not_finite)) == (1, 0) and length(alone.total) > 0.5


@functools.cache
def weighted(method):
    """A compiled (batch of inputs, targets and weights, clip norm) -> Clipped, at a parameter of zeros."""
    loss = lambda p, e: e[2] * 0.5 * jnp.sum((e[0] @ p["w"] - e[1]) ** 2)
    return jax.jit(
        lambda batch, clip: clipped_sum(
            loss, {"w": np.zeros((1024, 2), np.float32)}, batch, clip_norm=clip, method=method
        )
    )


@pytest.mark.parametrize("method", ["ghost", "vmap"])
@pytest.mark.parametrize("x, target, weight", [(1e-19, 1.2e19, 1.0), (1e18, 1e18, 1e-19), (1e-30, 1e30, 1.0)])
@pytest.mark.parametrize("clip", [1.0, 1e-3, 1e-9])
def test_squares_that_vanish_do_not_hide_a_gradient(method, x, target, weight, clip):
    """The squares of the factors are 0 or infinite in float32, the gradient is not."""
    full = lambda shape, value: np.full(shape, value, np.float32)
    got = weighted(method)((full((1, 1024), x), full((1, 2), target), full(1, weight)), np.float32(clip))
    assert 0.999 * clip <= length(got.total["w"]) <= np.float32(clip)
    assert (int(got.clipped), int(got.not_finite)) == (1, 0)


@pytest.mark.parametrize("clip", [np.nan, np.inf, -1.0, 0.0, 1e-40, 1e35])
def test_a_traced_clip_norm_that_holds_nothing_lets_nothing_through(clip):
    run = program("rows", "vmap", "float32")
    ones = np.ones((3, 4, 9), np.float32)
    got = run((ones, ones[..., 1:]), np.arange(3) < 2, np.float32(clip))
    assert not got.total.any() and int(got.not_finite) == 2


UNSIGNED = {"xla_cpu_use_fusion_emitters": True}
"""XLA's default.  With the plain emitters, which the quick run takes, XLA reads the index 255 of a uint8 as -1."""


OTHERS = [
    (300, np.uint8),
    (100, np.int8),
    *itertools.product((100, 300), (np.int32, np.uint32)),
]


@pytest.mark.parametrize(
    "rows, index",
    [(300, np.int8), (100, np.uint8), *(pytest.param(*other, marks=pytest.mark.slow) for other in OTHERS)],
)
def test_the_rows_of_an_embedding_by_indices_of_any_integer(index, rows):
    """The sum is right for more rows than the index's dtype can number, and for indices that no row has."""
    form = jax.lax.GatherDimensionNumbers(offset_dims=(1,), collapsed_slice_dims=(0,), start_index_map=(0,))
    table = lambda w, i: jax.lax.gather(w, i[:, None], form, (1, 2), mode="fill", fill_value=0)
    loss = lambda w, e: jnp.sum(table(w, e[0]) * e[1])
    tokens = np.array([[0, 99, 3, 3], [7, rows - 1, rows, 120], [1, 2, 3, 127]])
    tokens = np.minimum(tokens, np.iinfo(index).max).astype(index)
    if index == np.int8:
        tokens[2, 0] = -1
    batch = (tokens, np.random.default_rng(0).normal(size=(3, 4, 2)).astype(np.float32))
    w = np.ones((rows, 2), np.float32)
    assert norm_methods(loss, w, jax.tree.map(lambda a: a[0], batch), "ghost") == {"": "ghost"}

    summed = jax.jit(lambda w, batch: clipped_sum(loss, w, batch, clip_norm=1.5, method="ghost").total)
    found = summed.lower(w, batch).compile(compiler_options=UNSIGNED)(w, batch)
    expected = np.zeros((rows, 2))
    for numbers, pulls in zip(tokens.tolist(), np.asarray(batch[1]), strict=True):
        own = np.zeros((rows, 2))
        for number, pull in zip(numbers, pulls, strict=True):
            if 0 <= number < rows:
                own[number] += pull
        expected += own * min(1.0, 1.5 / np.linalg.norm(own))
    np.testing.assert_allclose(found, expected, atol=1e-3)
    assert np.count_nonzero(expected[:, 0]) >= 5


@pytest.mark.parametrize(
    "method, examples",
    [
        ("ghost", 16),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [("vmap", 1), ("vmap", 16), ("ghost", 1), ("auto", 1), ("auto", 16)]
        ),
    ],
)
def test_what_is_clipped_is_what_is_summed(method, examples):
    """a b - c, where c is a b rounded, is 0, or the rounding error where a compiler contracts the two operations.

    With the norm of one value and the sum of the other, a contribution would be tens of thousands of clip norms.
    """
    loss = lambda w, example: jnp.sum((example[0] * example[1] - example[2]) @ w)
    w = np.zeros((3, 9), np.float32)
    step = jax.jit(lambda *batch: clipped_sum(loss, w, batch, batch[3], 1.0, method).total)
    a, b = np.random.default_rng(examples).uniform(1e5, 1e6, (2, examples, 3)).astype(np.float32)
    for place in range(min(examples, 4)):
        alone = np.asarray(step(a, b, a * b, np.arange(examples) == place), np.float64)
        assert np.linalg.norm(alone) <= 1.0
