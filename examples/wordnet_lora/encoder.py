"""A small transformer, and its pre-training on public definitions.

Pre-training hides a fifth of the words of a definition, and asks for the hidden words and for the word defined.  The
defined word is predicted from the mean of the final states, from which the classes are read later.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from dictionaries import CLASSES, LENGTH, MASK, PAD
from flax import linen as nn

from jaxacct.core.progress import Progress

WIDTH, LAYERS, HEADS = 128, 2, 4
HIDDEN_SHARE = 0.2
"""Share of the words of a definition that pre-training hides."""
BATCH, LEARNING_RATE, STEPS = 256, 2e-3, 1200
"""Batch size, largest learning rate and number of steps of pre-training."""
CHUNK = 5
"""Steps between two looks at the progress bar."""


class Block(nn.Module):
    """Attention among the words of one definition, and two dense layers for each word."""

    @nn.compact
    def __call__(self, x, there):
        y = nn.LayerNorm()(x)
        query, key, value = (
            nn.Dense(WIDTH, name=name)(y).reshape(LENGTH, HEADS, -1) for name in ("query", "key", "value")
        )
        scores = jnp.einsum("qhd,khd->hqk", query, key) * query.shape[-1] ** -0.5
        weights = nn.softmax(jnp.where(there, scores, -1e9))
        mixed = jnp.einsum("hqk,khd->qhd", weights, value).reshape(x.shape)
        x = x + nn.Dense(WIDTH, name="out")(mixed)
        y = nn.gelu(nn.Dense(2 * WIDTH)(nn.LayerNorm()(x)))
        return x + nn.Dense(WIDTH)(y)


class Encoder(nn.Module):
    """The numbers of the words of one definition -> (scores of the classes, states of the words, their mean)."""

    vocabulary: int

    @nn.compact
    def __call__(self, numbers):
        there = numbers != PAD
        small = nn.initializers.normal(0.02)
        x = nn.Embed(self.vocabulary, WIDTH, name="words", embedding_init=small)(numbers)
        x = x + self.param("places", small, (LENGTH, WIDTH))
        for _ in range(LAYERS):
            x = Block()(x, there)
        x = nn.LayerNorm()(x)
        mean = jnp.sum(x * there[:, None], 0) / jnp.maximum(jnp.sum(there), 1)
        return nn.Dense(CLASSES, name="head", kernel_init=nn.initializers.zeros)(mean), x, mean


def initial(vocabulary, seed):
    """Random parameters of an encoder; its head is 0."""
    return Encoder(vocabulary).init(jax.random.key(seed), jnp.zeros(LENGTH, jnp.int32))["params"]


def scores(params, numbers):
    """Scores of the classes of one definition."""
    return Encoder(len(params["words"]["embedding"])).apply({"params": params}, numbers)[0]


def in_attention(path):
    """Whether a path is that of a matrix of the attention, which LoRA adapts."""
    return path.endswith(("query/kernel", "key/kernel", "value/kernel", "out/kernel"))


def hide(key, numbers):
    """(numbers of one definition with a fifth of its words hidden, places, whether the word at a place is hidden)."""
    there = numbers != PAD
    places = jnp.argsort(jnp.where(there, jax.random.uniform(key, (LENGTH,)), 2.0))[
        : int(np.ceil(HIDDEN_SHARE * LENGTH))
    ]
    counts = jnp.arange(len(places)) < jnp.ceil(HIDDEN_SHARE * jnp.sum(there))
    return numbers.at[places].set(jnp.where(counts, MASK, numbers[places])), places, counts


def pretraining_loss(params, outputs, key, numbers, headwords):
    """The mean cross-entropy of a batch's hidden words, plus the mean cross-entropy of its headwords."""
    hidden, places, counts = jax.vmap(hide)(jax.random.split(key, len(numbers)), numbers)
    model = Encoder(len(outputs["bias"]))
    _, states, means = jax.vmap(lambda one: model.apply({"params": params}, one))(hidden)
    words = params["words"]["embedding"].T
    cross = optax.softmax_cross_entropy_with_integer_labels
    asked = jnp.take_along_axis(states, places[:, :, None], 1) @ outputs["hidden"] @ words + outputs["bias"]
    lost = cross(asked, jnp.take_along_axis(numbers, places, 1))
    defined = cross(means @ outputs["defined"] @ words + outputs["bias"], headwords)
    return jnp.sum(lost * counts) / jnp.sum(counts) + jnp.mean(defined)


def pretrain(numbers, headwords, vocabulary, seed, steps=STEPS, progress=True):
    """(weights of an encoder without LoRA, last losses) after `steps` steps of Adam on public definitions."""
    numbers, headwords = jnp.asarray(numbers), jnp.asarray(headwords)
    outputs = {"hidden": jnp.eye(WIDTH), "defined": jnp.eye(WIDTH), "bias": jnp.zeros(vocabulary)}
    both = initial(vocabulary, seed), outputs
    rates = optax.warmup_cosine_decay_schedule(0.0, LEARNING_RATE, max(steps // 10, 1), max(steps, 2))
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(rates))

    def step(carried, key):
        both, state = carried
        for_rows, for_hiding = jax.random.split(key)
        rows = jax.random.randint(for_rows, (BATCH,), 0, len(numbers))
        loss = lambda both: pretraining_loss(*both, for_hiding, numbers[rows], headwords[rows])
        value, gradient = jax.value_and_grad(loss)(both)
        changes, state = optimizer.update(gradient, state, both)
        return (optax.apply_updates(both, changes), state), value

    @functools.partial(jax.jit, donate_argnums=0)
    def some(carried, keys):
        return jax.lax.scan(step, carried, keys)

    carried, keys = (both, optimizer.init(both)), jax.random.split(jax.random.key(seed + 1), steps)
    bar, losses = Progress(steps, progress, unit="steps"), []
    for begin in range(0, steps, CHUNK):
        carried, values = some(carried, keys[begin : begin + CHUNK])
        losses.append(float(jnp.mean(values)))
        bar.update(min(begin + CHUNK, steps), f", public loss {losses[-1]:.2f}")
    return carried[0][0], losses
