"""Clipping: against per-example gradients in float64, between methods, and the sensitivity as a property."""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from helpers import refusal
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxacct.training import clipped_sum, sensitivity
from jaxacct.training.clipping import ghost_norms
from jaxacct.training.clipping.clipped_sum import norm_methods
from jaxacct.training.clipping.examples_apart import channels_last


class Convnet(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Conv(5, (3, 3), strides=(2, 1), padding="SAME")(x))
        x = nn.relu(nn.Conv(6, (2, 3), padding="VALID", kernel_dilation=(1, 2))(x))
        return nn.Dense(4, use_bias=False)(x.reshape(-1))


class Text(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(11, 6)(tokens)
        return nn.Dense(4)(nn.gelu(nn.Dense(8)(x))).mean(0)


class Tied(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        table = nn.Embed(9, 4)
        return table.attend(nn.Dense(4)(table(tokens))).mean(0)[:4]


def cross_entropy(model):
    def loss(params, example):
        x, y = example
        return -jax.nn.log_softmax(model.apply(params, x))[y]

    return loss


@functools.cache  # one loss function for all tests, so that its programs are compiled once
def problem(name, examples=5, seed=0):
    """(loss, params, batch) of a small network."""
    rng = np.random.default_rng(seed)
    y = rng.integers(0, 4, examples)
    if name == "conv":
        x, model = rng.normal(size=(examples, 8, 9, 2)).astype(np.float32), Convnet()
    elif name == "mlp":
        x, model = (
            rng.normal(size=(examples, 12)).astype(np.float32),
            nn.Sequential([nn.Dense(9), nn.tanh, nn.Dense(4)]),
        )
    else:
        x, model = rng.integers(0, 8, (examples, 6)), Text() if name == "text" else Tied()
    params = jax.eval_shape(lambda x: model.init(jax.random.key(seed), x), x[0])
    params = jax.tree.map(lambda p: rng.normal(scale=p.shape[-1] ** -0.5, size=p.shape).astype(p.dtype), params)
    return cross_entropy(model), params, (x, y)


def flat(tree):
    return np.concatenate([np.asarray(a, np.float64).ravel() for a in jax.tree_util.tree_leaves(tree)])


@functools.cache
def rows_of(name):
    """Each example's gradient in ``problem(name)``."""
    return per_example(*problem(name))


def per_example(loss, params, batch):
    """One row for each example: its gradient, converted to float64 after it is computed."""
    grads = jax.jit(jax.vmap(jax.grad(loss), (None, 0)))(params, batch)
    leaves = [np.asarray(g, np.float64).reshape(len(g), -1) for g in jax.tree_util.tree_leaves(grads)]
    return np.concatenate(leaves, 1)


NETWORKS = ["conv", "mlp", "text", "tied"]
SLOW = pytest.param("mlp", "auto", marks=pytest.mark.slow)  # `test_a_clip_norm_for_each_part` checks similar sums


@pytest.mark.parametrize("name, method", [*((n, "ghost") for n in NETWORKS), ("conv", "vmap"), SLOW])
def test_clipped_sum_against_each_gradient_by_itself(name, method):
    loss, params, batch = problem(name)
    rows = rows_of(name)
    norms = np.linalg.norm(rows, axis=1)
    clip = float(np.sort(norms)[2]) * 1.001
    mask = np.array([True, True, False, True, True])
    weights = np.minimum(1, clip / norms) * mask
    got = clipped_sum(loss, params, batch, mask, clip, method)
    np.testing.assert_allclose(flat(got.total), weights @ rows, atol=1e-4 * clip)
    assert int(got.clipped) == (mask & (norms > clip)).sum() and int(got.not_finite) == 0


@pytest.mark.parametrize("name, method", [*((n, "ghost") for n in NETWORKS), ("conv", "vmap")])
def test_no_contribution_exceeds_the_clip_norm(name, method):
    """The computed contribution of each example is at most C, without a tolerance, and nearly C for small C."""
    loss, params, batch = problem(name)
    for clip in (1e-3, 0.77):
        for i in range(5):
            length = np.linalg.norm(flat(clipped_sum(loss, params, batch, np.arange(5) == i, clip, method).total))
            assert length <= clip
            if clip < 0.1:
                assert length >= clip * (1 - 2e-3)


def test_which_parameters_are_found():
    loss, params, batch = problem("conv")
    one = jax.tree.map(lambda a: a[0], batch)
    found = norm_methods(loss, params, one, "ghost")
    assert {path.split("'")[3] + "." + path.split("'")[5] for path, way in found.items() if way == "ghost"} == {
        "Conv_0.kernel",
        "Conv_1.kernel",
        "Dense_0.kernel",
    }
    assert set(norm_methods(loss, params, one, "vmap").values()) == {"vmap"}
    loss, params, batch = problem("tied")  # the table is used twice
    found = norm_methods(loss, params, jax.tree.map(lambda a: a[0], batch), "ghost")
    assert found["['params']['Embed_0']['embedding']"] == "ghost"
    assert found["['params']['Dense_0']['kernel']"] == "ghost"


def test_nnx_and_plain_jax_are_found_too():
    layers = lambda: nnx.Sequential(nnx.Linear(12, 9, rngs=nnx.Rngs(0)), nnx.tanh, nnx.Linear(9, 4, rngs=nnx.Rngs(1)))
    graph, shapes = nnx.split(nnx.eval_shape(layers))
    _, params, batch = problem("mlp")
    params = jax.tree.unflatten(jax.tree.structure(shapes), jax.tree.leaves(params))  # in the same order
    loss = lambda p, example: -jax.nn.log_softmax(nnx.merge(graph, p)(example[0]))[example[1]]
    assert list(norm_methods(loss, params, jax.tree.map(lambda a: a[0], batch), "ghost").values()).count("ghost") == 2
    rows = rows_of("mlp")
    weights = np.minimum(1, 0.5 / np.linalg.norm(rows, axis=1))
    got = clipped_sum(loss, params, batch, clip_norm=0.5, method="ghost")
    np.testing.assert_allclose(flat(got.total), weights @ rows, atol=1e-5)


def test_products_in_every_layout():
    """The sums are right for a parameter on the left, one with three axes, and one contracted over two axes."""
    rng = np.random.default_rng(3)
    params = [rng.normal(size=s).astype(np.float32) for s in [(4, 3), (3, 2, 5), (5, 7, 2)]]
    x = rng.normal(size=(6, 3, 8)).astype(np.float32)

    def loss(p, x):
        h = jnp.tanh(p[0] @ x)  # (4, 8)
        h = jnp.einsum("th,hde->tde", jnp.sin(h[:, :3]), p[1])
        return jnp.sum(jnp.sin(jnp.einsum("tde,emd->tm", h, p[2])))

    rows = per_example(loss, params, x)
    assert set(norm_methods(loss, params, x[0], "ghost").values()) == {"ghost"}
    for clip in (1e6, 0.3):
        weights = np.minimum(1, clip / np.linalg.norm(rows, axis=1))
        got = flat(clipped_sum(loss, params, x, clip_norm=clip, method="ghost").total)
        np.testing.assert_allclose(got, weights @ rows, rtol=1e-3, atol=1e-4)


@functools.cache
def chain(depth):
    """The loss of a network of `depth` layers, in plain JAX."""

    def loss(params, x):
        for w, b in params:
            x = jnp.tanh(x @ w + b) * 3
        return jnp.sum(x)

    return loss


@pytest.mark.slow  # quick runs test single contributions: above, and in test_training_clipping_range.py
@settings(max_examples=10, deadline=None)
@given(
    st.just((4,)),
    st.sampled_from([(), (6,)]),
    st.integers(0, 2**31),
    st.sampled_from([1e-6, 0.02, 1.0, 50.0]),
    st.sampled_from(["vmap", "ghost"]),
)
def test_neighbouring_sums_differ_by_at_most_the_clip_norm(widths, rows, seed, clip, method):
    """Random networks on vectors and on sequences, weights over eight decades, one example taken out."""
    rng = np.random.default_rng(seed)
    params = [
        (jnp.asarray(rng.normal(size=s) * 10 ** rng.uniform(-4, 4), jnp.float32), jnp.zeros(s[1]))
        for s in itertools.pairwise([5, *widths])
    ]
    x = jnp.asarray(rng.normal(size=(4, *rows, 5)), jnp.float32)
    run = lambda mask: flat(clipped_sum(chain(len(widths)), params, x, mask, clip, method).total)
    full, without = run(np.ones(4, bool)), run(np.arange(4) != 2)
    # the additions over examples (and rows) round by a few units of the largest sum, 4 C
    assert np.linalg.norm(full - without) <= clip * (1 + 24 * 2.0**-24 * 4)


@pytest.mark.parametrize("method", ["vmap", "auto"])
def test_gradients_that_are_not_finite_count_as_zero(method):
    loss, params, (x, y) = problem("mlp")
    poisoned = x.copy()
    poisoned[1], poisoned[3, 0], poisoned[4, 2] = np.inf, np.nan, np.nan
    got = clipped_sum(loss, params, (poisoned, y), np.arange(5) != 3, 1.0, method)
    expected = clipped_sum(loss, params, (x, y), np.isin(np.arange(5), [0, 2]), 1.0, method)
    np.testing.assert_array_equal(flat(got.total), flat(expected.total))
    assert int(got.not_finite) == 2


@pytest.mark.parametrize("method", ["ghost", pytest.param("vmap", marks=pytest.mark.slow)])
def test_a_norm_whose_square_overflows_is_clipped_like_any_other(method):
    x = np.array([[3e38, 3e38, 0.0], [3.0, 0.0, 4.0]], np.float32)
    got = clipped_sum(jnp.dot, np.zeros(3, np.float32), x, clip_norm=10.0, method=method)
    np.testing.assert_allclose(got.total, [3 + 50**0.5, 50**0.5, 4.0], rtol=1e-4)
    assert (int(got.clipped), int(got.not_finite)) == (1, 0)


def test_rows_that_do_not_exist_have_no_gradient():
    params = {"table": np.ones((3, 2), np.float32), "w": np.ones(2, np.float32)}
    loss = lambda p, t: jnp.sum(jnp.nan_to_num(jnp.take(p["table"], t, axis=0)) * p["w"])
    tokens = np.array([[0, 0, 5], [-1, 1, 7]], np.int32)
    got = clipped_sum(loss, params, tokens, clip_norm=9.0, method="ghost")
    np.testing.assert_allclose(got.total["table"], [[2, 2], [1, 1], [1, 1]], rtol=1e-5)
    np.testing.assert_allclose(got.total["w"], [4, 4], rtol=1e-5)
    assert norm_methods(loss, params, tokens[0], "ghost")["['table']"] == "ghost"


def test_a_clip_norm_for_each_part():
    loss, params, batch = problem("mlp")
    norms = {"params": {"layers_0": 0.05, "layers_2": {"kernel": 0.2, "bias": 0.01}}}
    assert sensitivity(norms) == pytest.approx(np.sqrt(0.05**2 + 0.2**2 + 0.01**2), rel=1e-15)
    got = flat(clipped_sum(loss, params, batch, clip_norm=norms, method="ghost").total)
    rows = rows_of("mlp")
    first, bias = 9 + 12 * 9, 4  # the first layer's parameters come first, then the last one's bias and kernel
    for part, clip in [(slice(first), 0.05), (slice(first, first + bias), 0.01), (slice(first + bias, None), 0.2)]:
        weights = np.minimum(1, clip / np.linalg.norm(rows[:, part], axis=1))
        np.testing.assert_allclose(got[part], weights @ rows[:, part], atol=1e-4 * clip)


def test_low_precision_parameters_are_summed_in_float32():
    params, data = np.ones(1000, jnp.bfloat16), np.ones((900, 1000), jnp.bfloat16)
    got = clipped_sum(lambda p, x: jnp.sum(p * x).astype(jnp.float32), params, data)
    assert got.total.dtype == jnp.float32
    np.testing.assert_allclose(flat(got.total), 900 / np.sqrt(1000), rtol=1e-4)


def test_a_long_sum_of_squares_does_not_stand_still():
    """More than 2^24 equal squares: added one after the other in float32 they would stop growing there."""
    number = 2**24 + 2**21 + 3
    total = float(jax.jit(ghost_norms.blocked_sum)(np.ones(number, np.float32)))
    assert abs(total / number - 1) < 63 * 5 * 2.0**-24


@pytest.mark.parametrize(
    "change, text",
    [
        ({"clip_norm": 0.0}, "clip_norm = 0.0 must be"),
        ({"clip_norm": {"other": 1.0}}, "must be a number or a prefix of the parameters"),
        ({"method": "fast"}, "method = 'fast' is not known"),
        ({"params": jnp.arange(3)}, "must be floating"),
        ({"batch": (jnp.zeros((2, 3)), jnp.zeros(3))}, "must all be equal"),
        ({"loss_fn": lambda p, x: p * x}, "must be a scalar"),
    ],
)
def test_bad_clipping_is_refused(change, text):
    given = {"loss_fn": lambda p, x: jnp.dot(p, x), "params": jnp.zeros(3), "batch": jnp.ones((2, 3))}
    assert text in refusal(lambda: clipped_sum(**(given | change)))


@pytest.mark.parametrize("method", ["vmap", "ghost"])
def test_parameters_without_entries_are_carried_along(method):
    loss = lambda p, x: p["w"] @ x + jnp.sum(p["none"] @ p["w"]) + jnp.sum(x @ p["no column"])
    params = {
        name: np.zeros(shape, np.float32) for name, shape in {"w": 3, "none": (0, 3), "no column": (3, 0)}.items()
    }
    done = clipped_sum(loss, params, np.full((2, 3), 9, np.float32), method=method)
    assert jax.tree.map(np.shape, done.total) == jax.tree.map(np.shape, params)
    assert int(done.clipped) == 2 and abs(np.linalg.norm(done.total["w"]) - 2) < 1e-4


SPREAD = {"lhs_dilation": (1, 2, 1), "padding": [(0, 0), (1, 0), (0, 1)]}
FORMS = [  # dimension numbers, shapes of input and kernel, and the rest
    (("NCH", "OIH", "NCH"), (2, 3, 9), (4, 3, 2), {"window_strides": (2,), "padding": [(1, 0)]}),
    (("NHWC", "HWIO", "NHWC"), (2, 7, 6, 4), (3, 2, 4, 5), {"window_strides": (1, 2), "padding": "SAME"}),
    (("CHWN", "IHWO", "HWNC"), (4, 7, 6, 2), (2, 3, 2, 6), {"feature_group_count": 2, "rhs_dilation": (2, 1)}),
    (("NDHWC", "DHWIO", "NDHWC"), (2, 4, 5, 3, 2), (2, 2, 2, 2, 3), SPREAD),
    (("HNC", "OHI", "CNH"), (9, 4, 3), (6, 2, 3), {"batch_group_count": 2}),
]


@pytest.mark.parametrize(("form", "x", "kernel", "more"), FORMS, ids=["".join(form[0]) for form in FORMS])
def test_convolutions_with_channels_last_are_the_same(form, x, kernel, more):
    """Values and both gradients stay the same.  All convolutions, also those of the gradients, have channels last."""
    rng = np.random.default_rng(0)
    x, kernel = (rng.normal(size=shape).astype(np.float32) for shape in (x, kernel))
    settings = {"window_strides": (1,) * (x.ndim - 2), "padding": "VALID", **more}
    conv = lambda x, kernel: jax.lax.conv_general_dilated(x, kernel, dimension_numbers=form, **settings)

    def whole(x, kernel):
        y, pull = jax.vjp(conv, x, kernel)
        return y, *pull(jnp.cos(y))

    for found, expected in zip(jax.jit(channels_last(whole))(x, kernel), jax.jit(whole)(x, kernel), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    traced = jax.make_jaxpr(channels_last(whole))(x, kernel)
    specs = {e.params["dimension_numbers"] for e in traced.jaxpr.eqns if e.primitive.name == "conv_general_dilated"}
    space, last = tuple(range(1, x.ndim - 1)), x.ndim - 1
    assert specs == {((0, last, *space), (last, last - 1, *range(x.ndim - 2)), (0, last, *space))}


def test_a_step_s_convolutions_are_in_the_one_form():
    loss, *given = problem("conv")
    traced = jax.make_jaxpr(lambda *given: clipped_sum(loss, *given, method="ghost"))(*given, np.ones(5, bool), 1.0)
    forms = re.findall(r"ConvDimensionNumbers\((.*?\))\)", str(traced))
    assert len(forms) == 3  # the second layer has a gradient with respect to its input
    assert set(forms) == {"lhs_spec=(0, 3, 1, 2), rhs_spec=(3, 2, 0, 1), out_spec=(0, 3, 1, 2)"}


def test_a_scaled_loss_normalises_gradients():
    """training/README.md, "Models": a gradient g shorter than C/s enters the sum as s g, a longer one with norm C."""
    rng = np.random.default_rng(3)
    rows = rng.normal(size=(6, 3)).astype(np.float32) * 10.0 ** np.array([[-6], [-4], [-2], [0], [2], [4]], np.float32)
    scale, norm = 1e3, 0.5
    loss = lambda w, x: scale * jnp.dot(w, x)
    for place, row in enumerate(rows):
        done = clipped_sum(loss, np.zeros(3, np.float32), rows, np.arange(6) == place, clip_norm=norm).total
        length = np.linalg.norm(row)
        np.testing.assert_allclose(done, row * min(scale, norm / length), rtol=1e-5)
