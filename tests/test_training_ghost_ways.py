"""Which way each parameter's norm is found, and what is said where it is not "ghost"."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from jaxacct.training import clipped_sum, norm_methods


def size(tree):
    return float(np.sqrt(sum(np.square(np.asarray(a, np.float64)).sum() for a in jax.tree.leaves(tree))))


REASONS = {
    # the parameter's use, and what is said of it
    "vmap, mul": (lambda w, x: jnp.sum(x @ (w * 2)), "its use by mul is no product"),
    "vmap, also": (lambda w, x: jnp.sum(x @ w) + jnp.sum(w**2), "integer_pow"),
    "vmap, views": (lambda w, x: jnp.sum(jnp.sin(x @ w)) + jnp.sum(jnp.sin(x[0] @ w.reshape(4, 9)[:, :6].T)), "slice"),
    "vmap, rows": (lambda w, x: jnp.sum(x @ w) + jnp.sum(x.reshape(-1)[:9] @ w.reshape(9, 4)), "rows and columns"),
    "vmap, cond": (lambda w, x: jax.lax.cond(x[0, 0] > 0, lambda: jnp.sum(x @ w), lambda: 0.0), "cond"),
    "vmap, carry": (lambda w, x: jax.lax.fori_loop(0, 3, lambda i, w: jnp.tanh(w @ x[:6].T), w).sum(), "carry"),
    "vmap, rule": (lambda w, x: jnp.sum(own_rule(w, x)), "custom_vjp"),
    "none, stop": (lambda w, x: jnp.sum(x @ jax.lax.stop_gradient(w)), "no gradient"),
    "none, late": (lambda w, x: jnp.sum(x) + jax.lax.stop_gradient(jnp.sum(jnp.sin(x @ w))), "no gradient"),
    "none, sign": (lambda w, x: jnp.sum(jnp.where(x @ w > 0, 1.0, 2.0)), "no gradient"),
    "ghost, stop": (lambda w, x: jnp.sum(x @ w) + jnp.sum(jax.lax.stop_gradient(w) ** 2), ""),
}


@jax.custom_vjp
def own_rule(w, x):
    return x @ w


own_rule.defvjp(lambda w, x: (x @ w, (w, x)), lambda kept, g: (2 * kept[1].T @ g, g @ kept[0].T))


W, BATCH = np.full((6, 6), 1 / 3, np.float32), np.random.default_rng(0).normal(size=(2, 6, 6)).astype(np.float32)


@pytest.mark.parametrize("case", REASONS)
def test_what_is_used_and_why(case):
    loss, told = REASONS[case]
    way = norm_methods(loss, W, BATCH[0], "ghost")[""]
    assert way == case.split(",")[0] and told in way.reason and bool(way.reason) == (way != "ghost")


QUICK = ("vmap, rule", "none, late", "ghost, stop")


@pytest.mark.parametrize("case", [c if c in QUICK else pytest.param(c, marks=pytest.mark.slow) for c in REASONS])
def test_the_sum_is_right_whatever_is_used(case):
    loss, _ = REASONS[case]
    grads = np.asarray(jax.jit(jax.vmap(jax.grad(loss), (None, 0)))(W, BATCH))
    weights = [min(1.0, 0.7 / max(size(grad), 1e-9)) for grad in grads]
    got = clipped_sum(loss, W, BATCH, clip_norm=0.7, method="ghost")
    np.testing.assert_allclose(got.total, np.tensordot(weights, grads, 1), atol=1e-3)


def test_uses_by_aux_are_none():
    loss = lambda w, x: (jnp.sum(jnp.sin(x @ w)), {"norm": jnp.sum(w**2), "y": jnp.sum(x @ w)})
    assert norm_methods(loss, W, BATCH[0], "ghost", has_aux=True) == {"": "ghost"}
    done, aux = clipped_sum(loss, W, BATCH, method="ghost", has_aux=True)
    assert float(aux["norm"]) == pytest.approx(8) and size(done.total) > 0


def test_what_costs_more_is_said():
    loss = lambda w, x: jnp.sum(jnp.sin(x @ w))
    given = np.ones((4, 4), np.float32), np.ones((9, 4), np.float32)
    way = norm_methods(loss, *given)[""]
    assert way == "vmap" and "fewer entries than the products of 9 rows" in way.reason
    assert norm_methods(loss, *given, "vmap")[""].reason == "method='vmap'"


class Layer(nn.Module):
    @nn.compact
    def __call__(self, h, _):
        x = nn.LayerNorm(dtype=jnp.bfloat16)(h)
        return h + nn.Dense(16, dtype=jnp.bfloat16)(nn.gelu(nn.Dense(16, dtype=jnp.bfloat16)(x))), None


class Stacked(nn.Module):
    """A model in bfloat16 with checkpoints in a loop over layers and one table for the embedding and the logits."""

    @nn.compact
    def __call__(self, tokens):
        table = nn.Embed(30, 16, dtype=jnp.bfloat16)
        layers = nn.scan(nn.remat(Layer), variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
        h, _ = layers()(table(tokens), None)
        return table.attend(h).astype(jnp.float32)


@pytest.mark.slow  # each part is in `test_training_clipping.py` and `test_training_ghost_routes.py`
def test_a_module_with_all_of_it():
    model, tokens = Stacked(), jnp.asarray(np.random.default_rng(0).integers(0, 30, (3, 6)))
    params = model.init(jax.random.key(0), tokens[0])
    loss = lambda p, t: -jnp.mean(jax.nn.log_softmax(model.apply(p, t))[jnp.arange(6), t[::-1]])
    found = norm_methods(loss, params, tokens[0])
    for path, way in found.items():
        assert way == ("ghost" if "kernel" in path or "embedding" in path else "vmap")
    run = jax.jit(lambda mask, clip: clipped_sum(loss, params, tokens, mask, clip).total)
    plain = clipped_sum(loss, params, tokens, method="vmap", clip_norm=1e6).total
    whole = run(np.ones(3, bool), 1e6)
    assert size(jax.tree.map(lambda a, b: a - b, whole, plain)) <= 0.02 * size(plain)  # 2 % for rounding to bfloat16
    for i in range(3):
        assert 0.0099 <= size(run(np.arange(3) == i, 0.01)) <= np.float32(0.01)
