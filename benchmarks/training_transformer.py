"""A private step of a transformer of 12 million parameters beside one that is not, and beside jax_privacy's.

    PYTHONPATH=. python benchmarks/training_transformer.py [--rounds 5] [--only float32] [--optimizer adam] [--small]

Two models: "float32", layer by layer; and "bfloat16", its layers in a loop (`nn.scan`), with one table for the words
that it reads and those that it predicts.  A step is gradient, clipping, noise and optimizer.  Each kind of step has its
CPU seconds to trace and to compile, its scratch memory and its median time; the kinds take turns.  Gradients alone,
clipped or not, have their scratch memory, and the memory that one more example adds.  Rows of jax_privacy are left out
where it is not installed.
"""

import argparse
import functools
import importlib.util
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

from jaxacct.training import clipped_sum, fresh_key, norm_methods
from jaxacct.training.step import noise

WORDS, WIDTH, LAYERS, HEADS, LENGTH = 2048, 384, 6, 6, 64
"""Size of the vocabulary, width, layers and heads of the transformer, and the length of a sequence."""
BATCHES = (4, 8)
"""Sizes of two batches; memory for one more example is the difference quotient between them."""


class Layer(nn.Module):
    """Attention and two dense layers."""

    dtype: object

    @nn.compact
    def __call__(self, h, _=None):
        dense, norm = (functools.partial(kind, dtype=self.dtype) for kind in (nn.Dense, nn.LayerNorm))
        q, k, v = (a.reshape(len(h), HEADS, -1) for a in jnp.split(dense(3 * WIDTH)(norm()(h)), 3, -1))
        scores = jnp.einsum("thd,shd->hts", q, k) / np.sqrt(WIDTH / HEADS).astype(np.float32).item()
        scores = jax.nn.softmax(jnp.where(jnp.tril(jnp.ones((len(h), len(h)), bool)), scores, -1e4))
        h += dense(WIDTH)(jnp.einsum("hts,shd->thd", scores, v).reshape(len(h), WIDTH))
        return h + dense(WIDTH)(nn.gelu(dense(4 * WIDTH)(norm()(h)))), None


class Transformer(nn.Module):
    """12.2 million parameters in float32, 11.5 with one table."""

    dtype: object
    together: bool

    @nn.compact
    def __call__(self, words):
        table = nn.Embed(WORDS, WIDTH, dtype=self.dtype)
        h = table(words) + nn.Embed(LENGTH, WIDTH, dtype=self.dtype)(jnp.arange(len(words)))
        if self.together:
            loop = nn.scan(Layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=LAYERS)
            h, _ = loop(self.dtype)(h, None)
        else:
            for _ in range(LAYERS):
                h, _ = Layer(self.dtype)(h)
        h = nn.LayerNorm(dtype=self.dtype)(h)
        told = table.attend(h) if self.together else nn.Dense(WORDS, use_bias=False, dtype=self.dtype)(h)
        return told.astype(jnp.float32)


MODELS = {"float32": Transformer(jnp.float32, False), "bfloat16": Transformer(jnp.bfloat16, True)}


def loss_of(model):
    """Cross entropy of the next word."""

    def loss(params, words):
        chances = jax.nn.log_softmax(model.apply(params, words[:-1]))
        return -jnp.mean(jnp.take_along_axis(chances, words[1:, None], axis=-1))

    return loss


def gradients_of(loss):
    """By name: (params, batch) -> the sum of gradients, clipped or not."""
    found = {
        "not private": lambda p, b: jax.grad(lambda p: jnp.sum(jax.vmap(loss, (None, 0))(p, b)))(p),
        "private": lambda p, b: clipped_sum(loss, p, b).total,
    }
    if importlib.util.find_spec("jax_privacy"):
        import jax_privacy

        found["jax_privacy"] = jax_privacy.clipped_grad(loss, l2_clip_norm=1.0, keep_batch_dim=False, batch_argnums=1)
    return found


def step_of(name, gradients, optimizer):
    """(params, state, batch, key) -> (params, state): noise, and the optimizer."""

    def step(params, state, batch, key):
        total = gradients(params, batch)
        if name == "private":
            total = noise.add(key, total, 1.0)
        elif name == "jax_privacy":
            leaves, form = jax.tree.flatten(total)
            keys = jax.random.split(key, len(leaves))
            leaves = [g + jax.random.normal(k, g.shape, g.dtype) for g, k in zip(leaves, keys, strict=True)]
            total = jax.tree.unflatten(form, leaves)
        updates, state = optimizer.update(total, state, params)
        return optax.apply_updates(params, updates), state

    return step


def compiled(function, *arguments, **settings):
    """(the program, CPU seconds of its tracing, of its compilation)."""
    begin = time.process_time()
    lowered = jax.jit(function, **settings).lower(*arguments)
    traced = time.process_time()
    program = lowered.compile()
    return program, traced - begin, time.process_time() - traced


def scratch(program):
    return program.memory_analysis().temp_size_in_bytes / 2**20


def measure(title, rounds, optimizer):
    model, rng = MODELS[title], np.random.default_rng(0)
    words = jnp.asarray(rng.integers(0, WORDS, (BATCHES[-1], LENGTH + 1)), jnp.int32)
    params, loss = model.init(jax.random.key(0), words[0, :-1]), loss_of(model)
    ways = list(norm_methods(loss, params, words[0]).values())
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    print(f"{title}: {count:,} parameters in {len(ways)} leaves, {ways.count('ghost')} of them by ghost norms")
    runs, times = {}, {}
    for name, gradients in gradients_of(loss).items():
        used = [scratch(compiled(gradients, params, words[:size])[0]) for size in BATCHES]
        key = fresh_key() if name == "private" else jax.random.key(1)
        state = optimizer.init(params)
        program, traced, seconds = compiled(step_of(name, gradients, optimizer), params, state, words, key)
        each = (used[1] - used[0]) / (BATCHES[1] - BATCHES[0])
        print(
            f"  {name:12} gradients {used[1]:6.1f} MiB at {BATCHES[1]}, {each:5.1f} an example; "
            f"step {scratch(program):6.1f} MiB, traced in {traced:4.1f} and compiled in {seconds:5.1f} CPU s",
            flush=True,
        )
        runs[name], times[name] = functools.partial(program, params, state, words, key), ([], [])
    for _ in range(rounds):
        for name, run in runs.items():
            begin, cpu = time.perf_counter(), time.process_time()
            jax.block_until_ready(run())
            times[name][0].append(time.perf_counter() - begin)
            times[name][1].append(time.process_time() - cpu)
    base = [statistics.median(column) for column in times["not private"]]
    for name, columns in times.items():
        wall, cpu = (statistics.median(column) for column in columns)
        told = f"{1e3 * wall:8.1f} ms a step ({wall / base[0]:.2f} x)"
        print(f"  {name:12} {told}, {1e3 * cpu:8.1f} of CPU ({cpu / base[1]:.2f} x)")


def main():
    global WORDS, WIDTH, LAYERS, HEADS
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=list(MODELS))
    parser.add_argument("--optimizer", choices=["sgd", "adam"], default="sgd")
    parser.add_argument("--layers", type=int, default=LAYERS, help="8 make 101 leaves in float32")
    parser.add_argument("--small", action="store_true", help="a width of 128: .9 million parameters with 4 layers")
    args = parser.parse_args()
    LAYERS = args.layers
    if args.small:
        WORDS, WIDTH, HEADS = 512, 128, 4
    for title in MODELS:
        if args.only in (None, title):
            measure(title, args.rounds, getattr(optax, args.optimizer)(1e-4))


if __name__ == "__main__":
    main()
