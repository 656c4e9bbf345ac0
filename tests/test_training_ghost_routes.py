"""On every route from a parameter to its products, norms agree with float64 and no contribution exceeds C."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.interpreters import partial_eval

from jaxacct.training import clipped_sum, norm_methods

DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "float16": jnp.float16}
K, M, T, LAYERS, BATCH = 6, 6, 3, 3, 4


def recurrent(p, x, dtype):
    """The same kernel is used in every run of a loop, and once more after the loop."""
    step = lambda h, row: (jnp.tanh(h @ p["w"].astype(dtype) + row), h)
    last, states = jax.lax.scan(step, jnp.zeros(K, dtype), x)
    return states @ p["w"].astype(dtype) + last


def stacked(p, x, dtype, wrap=lambda f: f, reverse=False):
    layer = wrap(lambda h, w: jnp.tanh(h @ w.astype(dtype)))
    return jax.lax.scan(lambda h, w: (layer(h, w), None), x, p["stack"], reverse=reverse)[0]


def nested(p, x, dtype):
    """The inner loop takes slices of a slice of `stack2`, and the same kernel `w` in all its runs."""

    def outer(h, stack):
        inner = lambda h, w: (jnp.tanh(h @ w + h @ p["w"].astype(dtype)), None)
        return jax.lax.scan(inner, h, stack.astype(dtype).reshape(2, K, K // 2, 2).reshape(2, K, K))[0], None

    return jax.lax.scan(outer, x, p["stack2"])[0]


ROUTES = {
    # name: (params, x, dtype of the operations) -> numbers; each parameter that it uses must be "ghost"
    "cast": lambda p, x, d: x @ p["w"].astype(d),
    "transposed": lambda p, x, d: x @ p["w"].T.astype(d),
    "reshaped": lambda p, x, d: jnp.einsum("tk,khd->thd", x, p["w"].astype(d).reshape(K, 2, M // 2)),
    "split rows": lambda p, x, d: jnp.einsum("thd,hdm->tm", x.reshape(T, 3, 2), p["w"].astype(d).reshape(3, 2, M)),
    "squeezed": lambda p, x, d: x @ jnp.squeeze(jnp.expand_dims(p["w"].astype(d), (0, 2)), (0, 2)),
    "batched": lambda p, x, d: jnp.einsum("tg,gm->tgm", x, p["w"].astype(d)),
    "heads": lambda p, x, d: jnp.einsum("thd,hde->the", x.reshape(T, 2, 3), p["w"].astype(d).reshape(2, 3, M)),
    "kernel": lambda p, x, d: jax.lax.conv_general_dilated(
        x[None, :, :3], p["w"].T.reshape(2, 3, M).astype(d), (1,), "SAME", dimension_numbers=("NHC", "HIO", "NHC")
    ),
    "one row": lambda p, x, d: x[0] @ p["w"].astype(d),
    "twice": lambda p, x, d: jnp.tanh(x @ p["w"].astype(d)) @ p["w"].astype(d),
    "both sides": lambda p, x, d: jnp.tanh(x @ p["w"].astype(d)) @ p["w"].T.astype(d),
    "squared": lambda p, x, d: x @ (p["w"].astype(d) @ p["w"].astype(d)),
    "one of two": lambda p, x, d: x @ (p["v"].astype(d) @ p["w"].astype(d)),
    "tied": lambda p, x, d: jnp.tanh(p["table"].astype(d)[jnp.abs(x[:, 0] * 2).astype(int)]) @ p["table"].T.astype(d),
    "two look-ups": lambda p, x, d: (
        p["table"].astype(d)[jnp.array([1, 1, 2])] * p["table"].astype(d)[jnp.abs(x[:, 1]).astype(int)]
    ),
    "clipped look-up": lambda p, x, d: jnp.take(p["table"].astype(d), jnp.array([1, 12, -3]), axis=0, mode="clip"),
    "loop": stacked,
    "loop backwards": functools.partial(stacked, reverse=True),
    "loop of checkpoints": functools.partial(stacked, wrap=jax.checkpoint),
    "checkpoint": lambda p, x, d: jax.checkpoint(lambda x: jnp.sin(jnp.tanh(x @ p["w"].astype(d))))(x),
    "checkpoint twice": lambda p, x, d: jax.checkpoint(lambda x: jnp.tanh(x @ p["w"].astype(d)) @ p["w"].T.astype(d))(
        x
    ),
    "recurrent": recurrent,
    "loops in loops": nested,
    "jit": lambda p, x, d: jax.jit(lambda w: jax.nn.gelu(x @ w.T))(p["w"].astype(d)),
}


def loss_of(route, dtype):
    """The loss: the sum of a route's outputs, each weighted by a number of the example."""

    def loss(p, example):
        y = ROUTES[route](p, example[0].astype(dtype), dtype)
        weights = jnp.resize(example[1], y.shape).astype(y.dtype)
        return jnp.sum((y * weights).astype(jnp.promote_types(dtype, jnp.float32)))

    return loss


loss_of = functools.cache(loss_of)


@functools.cache
def used(route):
    """Names of the parameters that a route uses."""
    p, example = given_to(np.random.default_rng(0), jnp.float32)
    closed = jax.make_jaxpr(loss_of(route, jnp.float32))(p, jax.tree.map(lambda a: a[0], example))
    needed = partial_eval.dce_jaxpr(closed.jaxpr, [True])[1]
    return tuple(name for name, is_needed in zip(sorted(p), needed, strict=False) if is_needed)


def given_to(rng, dtype=jnp.float32):
    """Parameters and a batch."""
    shapes = {"w": (K, M), "v": (K, K), "table": (9, K), "stack": (LAYERS, K, K), "stack2": (LAYERS, 2, K, K)}
    p = {name: (rng.normal(size=shape) / 2).astype(dtype) for name, shape in shapes.items()}
    return p, tuple(rng.normal(size=(BATCH, T, K)).astype(dtype) for _ in range(2))


def only(route, p):
    return {name: p[name] for name in used(route)}


def in_float64(route, p, batch):
    """The per-example gradients as a list of arrays, computed in float64 throughout."""
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda a: a.astype(np.float64), (p, batch))
        grads = jax.jit(jax.vmap(jax.grad(loss_of(route, jnp.float64)), (None, 0)))(*wide)
        return [np.asarray(g) for g in jax.tree.leaves(grads)]


def size(tree):
    return float(np.sqrt(sum(np.square(np.asarray(a, np.float64)).sum() for a in jax.tree.leaves(tree))))


@functools.cache
def program(route, dtype, method="ghost"):
    loss = loss_of(route, DTYPES[dtype])
    return jax.jit(lambda p, batch, mask, clip: clipped_sum(loss, p, batch, mask, clip, method))


@pytest.mark.parametrize("route", ROUTES)
def test_every_route_is_followed(route):
    p, batch = given_to(np.random.default_rng(0))
    one = jax.tree.map(lambda a: a[0], batch)
    found = norm_methods(loss_of(route, jnp.bfloat16), p, one, "ghost")
    assert used(route)
    for name in p:
        way = found[f"['{name}']"]
        assert (way, way.reason != "") == (("ghost", False) if name in used(route) else ("none", True))


QUICK = "loop of checkpoints"


@pytest.mark.parametrize("route", [r if r == QUICK else pytest.param(r, marks=pytest.mark.slow) for r in ROUTES])
def test_sums_and_norms_against_float64(route):
    """Sums and norms agree with float64.  An example clipped to C, a third of its norm, has norm 0.99 C to C."""
    p, batch = given_to(np.random.default_rng(1))
    p = only(route, p)
    expected = in_float64(route, p, batch)
    run = program(route, "float32")
    whole = run(p, batch, np.ones(BATCH, bool), np.float32(1e6))
    for got, each in zip(jax.tree.leaves(whole.total), expected, strict=True):
        np.testing.assert_allclose(got, each.sum(0), rtol=1e-4, atol=1e-5)
    for i in range(BATCH):
        length = size([each[i] for each in expected])
        alone = run(p, batch, np.arange(BATCH) == i, np.float32(1e6))
        assert size(alone.total) == pytest.approx(length, rel=1e-4)
        clip = np.float32(length / 3)
        clipped = run(p, batch, np.arange(BATCH) == i, clip)
        assert 0.99 * clip <= size(clipped.total) <= clip and int(clipped.clipped) == 1


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(sorted(ROUTES)),
    st.sampled_from(sorted(DTYPES)),
    st.integers(0, 2**31),
    st.tuples(*(st.sampled_from([-30, -8, -2, 0, 0, 2, 5, 12]) for _ in range(3))),
    st.sampled_from([1e-6, 0.02, 1.0, 300.0]),
)
def test_no_contribution_exceeds_the_clip_norm(route, dtype, seed, exponents, clip):
    """Random models, whose parameters, inputs and weights each have a scale of their own."""
    rng = np.random.default_rng(seed)
    p, (x, y) = given_to(rng)
    p = jax.tree.map(lambda a: a * np.float32(2.0 ** exponents[0]), only(route, p))
    batch = x * np.float32(2.0 ** exponents[1]), y * np.float32(2.0 ** exponents[2])
    got = program(route, dtype)(p, batch, np.arange(BATCH) == 1, np.float32(clip))
    assert size(got.total) <= np.float32(clip)


NARROW = ("float32", -140), ("float16", -20)


def opposite(w, e):
    """The difference of two uses of one kernel; the second use's gradient is `e[2]` times that of the first use."""
    return jnp.sum((e[0] @ w) * e[1]) - e[2] * jnp.sum((w.T @ e[0].T) * e[1].T)


@functools.cache
def of_opposite():
    return jax.jit(lambda w, batch, mask, clip: clipped_sum(opposite, w, batch, mask, clip, "ghost"))


@pytest.mark.parametrize("share", [1.0, 1 + 2.0**-12, 1 - 2.0**-20])
@pytest.mark.parametrize("clip", [1e-6, 1.0])
def test_uses_that_cancel(share, clip):
    """The difference of the two uses may be rounding error alone; even so its norm is at most C."""
    rng = np.random.default_rng(5)
    batch = tuple((rng.normal(size=(BATCH, 9, K)) * 100).astype(np.float32) for _ in range(2))
    batch = (*batch, np.full(BATCH, share, np.float32))
    w = rng.normal(size=(K, K)).astype(np.float32)
    assert norm_methods(opposite, w, jax.tree.map(lambda a: a[0], batch), "ghost") == {"": "ghost"}
    for i in range(BATCH):
        got = of_opposite()(w, batch, np.arange(BATCH) == i, np.float32(clip))
        assert size(got.total) <= np.float32(clip) and int(got.not_finite) == 0


@pytest.mark.parametrize("route", [QUICK, pytest.param("tied", marks=pytest.mark.slow)])
def test_gradients_of_zero_add_nothing(route):
    p, (x, y) = given_to(np.random.default_rng(2))
    got = program(route, "float32")(only(route, p), (x, np.zeros_like(y)), np.ones(BATCH, bool), np.float32(1))
    assert size(got.total) == 0 and (int(got.clipped), int(got.not_finite)) == (0, 0)


@pytest.mark.parametrize(
    "dtype, exponent", [("bfloat16", -130), *(pytest.param(*case, marks=pytest.mark.slow) for case in NARROW)]
)
def test_subnormal_factors(dtype, exponent):
    p, (x, y) = given_to(np.random.default_rng(3))
    p, y = only("both sides", p), (y * 2.0**exponent).astype(np.float32)
    for clip in (1e-10, 1.0):
        got = program("both sides", dtype)(p, (x, y), np.arange(BATCH) == 0, np.float32(clip))
        assert size(got.total) <= np.float32(clip) and int(got.not_finite) == 0


@pytest.mark.parametrize(
    "route, dtype",
    [("both sides", "bfloat16"), (QUICK, "float32"), pytest.param("tied", "bfloat16", marks=pytest.mark.slow)],
)
def test_one_bad_example_is_left_out(route, dtype):
    p, (x, y) = given_to(np.random.default_rng(4))
    p, run = only(route, p), program(route, dtype)
    without = run(p, (x, y), np.arange(BATCH) != 1, np.float32(1))
    for bad in (np.nan, np.inf):
        y[1, 0, 0] = bad
        got = run(p, (x, y), np.ones(BATCH, bool), np.float32(1))
        assert int(got.not_finite) == 1 and size(got.total) > 0
        for a, b in zip(jax.tree.leaves(got.total), jax.tree.leaves(without.total), strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("method", ["ghost", pytest.param("vmap", marks=pytest.mark.slow)])
def test_gradients_beyond_the_range_of_a_cast_are_not_finite(method):
    """The parameter is cast to float16, where the second example's gradient, 2e5, is infinite."""
    loss = lambda w, e: jnp.sum((e[0] @ w.astype(jnp.float16)) * e[1]).astype(jnp.float32)
    ones = np.ones((3, 1, 4), np.float16)
    batch = ones * np.array([1, 2000, 100], np.float16)[:, None, None], ones * np.float16(100)
    got = clipped_sum(loss, np.zeros((4, 4), np.float32), batch, clip_norm=1.0, method=method)
    assert int(got.not_finite) == 1 and 1.99 <= size(got.total) <= 2


@functools.cache
def of_products():
    loss = lambda w, e: jnp.sum((e[0] @ w) * e[1])
    w = np.zeros((70, 40), np.float32)
    return jax.jit(lambda batch, clip: clipped_sum(loss, w, batch, np.arange(2) < 1, clip, "ghost"))


@pytest.mark.parametrize(
    "rows, left", [(300, 0.0), (300, 1e-7), (300, 1e-5), (300, 1e-3), pytest.param(64, 1e-7, marks=pytest.mark.slow)]
)
def test_many_rows_that_cancel(rows, left):
    """Rows are nearly equal and cotangents have both signs, so the gradient is far smaller than sum_t |x_t| |dy_t|."""
    rng = np.random.default_rng(6)
    x = rng.normal(size=(2, 1, 70)) + 1e-3 * rng.normal(size=(2, rows, 70))
    dy = rng.normal(size=(2, 1, 40)) * np.where(np.arange(rows) % 2, 1, -1)[:, None] + left * rng.normal(
        size=(2, rows, 40)
    )
    batch = tuple(a.astype(np.float32) for a in (x, dy))
    exact = np.linalg.norm(np.einsum("tk,tm->km", *(np.asarray(a[0], np.float64) for a in batch)))
    for clip in np.float32([1e-6, exact / 10, exact / 2, exact * 0.99, exact * 1.01]):
        got = of_products()(batch, clip)
        assert size(got.total) <= clip and (clip > exact or int(got.clipped) == 1)
