"""Low-rank adapters act as the merged parameters in modules of every kind, and an example's gradient stays small."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from helpers import refusal
from training_runs import KEY, plan_of

from jaxacct.core.chacha import key_from_bytes
from jaxacct.training import LoRA, Trainer, clipped_sum, lora
from jaxacct.training.step.models import adapted, join_model, split_model

X = np.random.default_rng(0).normal(size=(6, 5, 8)).astype(np.float32)


class Attention(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(2)(nn.relu(nn.MultiHeadDotProductAttention(num_heads=2)(x, x)))


def moved(params, seed=1):
    """The same parameters with random shifts added to the adapters."""
    rng = np.random.default_rng(seed)
    shift = lambda a: np.asarray(a) + 0.3 * rng.normal(size=a.shape).astype(a.dtype)
    return LoRA(params.base, jax.tree.map(shift, params.adapters), params.scale, params.outer)


def equinox_case():
    eqx = pytest.importorskip("equinox")
    return eqx.nn.MLP(8, 3, 16, 1, key=jax.random.key(0)), lambda model, x: jax.vmap(model)(x), None


CASES = {
    "linen": lambda: (
        Attention().init(jax.random.key(0), X[0]),
        lambda params, x: Attention().apply(params, x),
        None,
    ),
    "nnx": lambda: (nnx.Linear(8, 6, rngs=nnx.Rngs(0)), lambda model, x: model(x), None),
    "equinox": equinox_case,
    "both sides": lambda: (
        {"w": np.ones((8, 4), np.float32), "v": np.ones((4, 5), np.float32)},
        lambda p, x: p["v"] @ (x @ p["w"]) + jnp.einsum("tf,fk->kt", x, p["w"]) @ x[:, :4],
        lambda path: True,
    ),
    "three axes": lambda: (
        {"kernel": np.ones((8, 2, 4), np.float32), "out": np.ones((2, 4, 8), np.float32)},
        lambda p, x: jnp.einsum("thd,hdf->tf", jnp.einsum("tf,fhd->thd", x, p["kernel"]), p["out"]),
        lambda path: True,
    ),
    "other uses": lambda: (
        {"kernel": np.ones((8, 8), np.float32) / 8, "table": jnp.ones((9, 4))},
        lambda p, x: (
            jax.lax.fori_loop(0, 2, lambda i, y: y @ p["kernel"], x).sum()
            + p["table"][jnp.array([1, 2])]
            + p["kernel"].T[0, 0]
        ),
        lambda path: True,
    ),
    "jit and a cast": lambda: (
        {"kernel": np.ones((8, 4), np.float32)},
        lambda p, x: jax.jit(lambda w, x: x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16))(p["kernel"], x).astype(
            jnp.float32
        ),
        None,
    ),
}


QUICK = ("nnx", "equinox", "jit and a cast")


@pytest.mark.parametrize("case", [*QUICK, *(pytest.param(c, marks=pytest.mark.slow) for c in CASES if c not in QUICK)])
def test_adapters_are_the_merged_parameters(case):
    model, function, where = CASES[case]()
    params = lora(model, 3, where=where, alpha=6.0, key=key_from_bytes(KEY))
    other = moved(params)

    @jax.jit
    def outputs():
        merged = [function(m, X[0]) for m in (model, params.merge(), other.merge())]
        return [*merged, *(adapted(function)(p, X[0]) for p in (params, other))]

    base, first, merged, mine_at_first, mine = outputs()
    tolerance = 0.05 if case == "jit and a cast" else 1e-4
    for found, expected in ((first, base), (mine_at_first, base), (mine, merged)):  # b is zero at first
        np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance)
    assert params.scale == 2.0 and not np.allclose(mine, base, atol=1e-2)


@pytest.mark.parametrize("method", ["ghost", pytest.param("vmap", marks=pytest.mark.slow)])
def test_clipped_gradients_are_those_of_the_merged_parameters(method):
    function = lambda p, x: jnp.sum(jnp.sin(x @ p["kernel"] + p["bias"]))
    params = moved(
        lora({"kernel": np.ones((8, 6), np.float32), "bias": np.zeros(6, np.float32)}, 2, key=key_from_bytes(KEY))
    )
    trained, rest = split_model(params, lambda path: path == "bias")
    loss = lambda t, x: adapted(function)(join_model(t, rest), x)
    done = clipped_sum(loss, trained, X, clip_norm=0.7, method=method)
    gradient = jax.grad(lambda t, x: function(join_model(t, rest).merge(), x))
    leaves = jax.tree.leaves(jax.jit(jax.vmap(gradient, (None, 0)))(trained, X))
    flat = np.concatenate([np.reshape(a, (len(X), -1)) for a in leaves], 1).astype(np.float64)
    expected = sum(g * min(1.0, 0.7 / np.linalg.norm(g)) for g in flat)
    found = np.concatenate([np.ravel(a) for a in jax.tree.leaves(done.total)])
    assert len(found) == 6 + 2 * (8 + 6)
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4)


def test_no_example_has_a_gradient_of_the_size_of_the_base():
    function = lambda p, x: jnp.sum(jnp.sin(x @ p["kernel"]))
    trained, rest = split_model(lora({"kernel": np.ones((8, 6), np.float32)}, 2))
    one = jax.grad(lambda t, x: adapted(function)(join_model(t, rest), x))
    shapes = {v.aval.shape for e in jax.make_jaxpr(one)(trained, X[0]).jaxpr.eqns for v in e.outvars}
    assert (8, 2) in shapes and (8, 6) not in shapes


def test_a_cast_to_integers_rounds_the_sum():
    params = lora({"kernel": np.full((2, 2), 0.6, np.float32)}, 1)
    adapters = {"kernel": {"a": np.ones((2, 1), np.float32), "b": np.full((1, 2), 0.6, np.float32)}}
    function = lambda params: params["kernel"].astype(jnp.int32)
    found = adapted(function)(dataclasses.replace(params, adapters=adapters))
    assert found.tolist() == [[1, 1], [1, 1]]  # 1.2 is cut to 1; .6 and .6 would be cut to 0


def test_what_is_adapted():
    params = {
        "conv": {"kernel": np.ones((3, 3, 4, 4), np.float32)},
        "d": {"kernel": np.ones((4, 2, 3), np.float32), "bias": np.ones(3, np.float32)},
    }
    shapes = lambda tree: jax.tree.map(jnp.shape, tree.adapters)
    assert shapes(lora(params, 2)) == {"d/kernel": {"a": (4, 2), "b": (2, 2, 3)}}
    assert shapes(lora(params, 1, where=lambda p: "conv" in p)) == {"conv/kernel": {"a": (3, 3, 1), "b": (1, 4, 4)}}
    assert "where selects d/bias, float32 of 1 axes" in refusal(lora, params, 2, where=lambda p: "bias" in p)
    assert "where selects none" in refusal(lora, params, 2, where=lambda p: False)
    assert "rank = 0 must be" in refusal(lora, params, 0)
    assert "alpha = -1.0 must be" in refusal(lora, params, 2, alpha=-1.0)
    first = lora(params, 2, key=key_from_bytes(KEY)).adapters["d/kernel"]
    assert not np.any(first["b"]) and np.std(first["a"]) > 0


@pytest.mark.slow
@pytest.mark.parametrize("head", [False, True])
def test_a_run_trains_adapters_alone_and_the_head_where_it_is_selected(head):
    loss = lambda out, y: optax.softmax_cross_entropy_with_integer_labels(out.mean(0), y)
    labels = np.arange(6) % 2
    model = Attention()
    params = lora(
        model.init(jax.random.key(0), X[0]), 2, where=lambda p: "Multi" in p and p.endswith("kernel"), alpha=4.0
    )
    trainable = (lambda path: "params/Dense_0" in path) if head else None
    trainer = Trainer(model, optax.adam(0.05), plan_of(6, noise=0.01, steps=30), 1.0, loss=loss, trainable=trainable)
    state = trainer.fit(trainer.init(params, KEY), (X, labels), progress=False)
    same = jax.tree.map(lambda a, b: bool((a == b).all()), state.params.base, params.base)["params"]
    assert all(jax.tree.leaves(same["MultiHeadDotProductAttention_0"]))
    assert same["Dense_0"] == {"bias": not head, "kernel": not head}
    assert not (state.params.adapters["params/MultiHeadDotProductAttention_0/out/kernel"]["b"] == 0).any()
    guess = model.apply(state.params.merge(), X).mean(1).argmax(1)
    assert (guess == labels).mean() > 0.8
