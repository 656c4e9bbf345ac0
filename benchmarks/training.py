"""One private training step beside one that is not, and beside jax_privacy: medians, and memory for each example.

    PYTHONPATH=. python benchmarks/training.py

The network is the small convolutional one of 26,010 parameters for 28 x 28 images that the tutorials of DP-SGD
libraries share; a batch has 256 examples.  Steps are timed in turn, round by round, so that what else the machine does
falls on all alike.  Rows of jax_privacy are left out where it is not installed.
"""

import argparse
import importlib.util
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

from jaxacct.training import Plan, Trainer, clipped_sum, fresh_key, noise
from jaxacct.training.steps import Carried, numbers

BATCH, SIZE = 256, 60_000
CLIP_NORM, NOISE = 1.0, 1.1


class Convnet(nn.Module):
    """26,010 parameters."""

    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Conv(16, (8, 8), strides=(2, 2), padding="SAME")(x))
        x = nn.max_pool(x, (2, 2))
        x = nn.relu(nn.Conv(32, (4, 4), strides=(2, 2), padding="VALID")(x))
        x = nn.max_pool(x, (2, 2))
        x = nn.relu(nn.Dense(32)(x.reshape(*x.shape[:-3], -1)))
        return nn.Dense(10)(x)


class Wide(nn.Module):
    """269,322 parameters in dense layers, where norms without gradients pay."""

    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Dense(256)(x.reshape(*x.shape[:-3], -1)))
        x = nn.relu(nn.Dense(256)(x))
        return nn.Dense(10)(x)


def loss_of(module):
    cross_entropy = optax.softmax_cross_entropy_with_integer_labels
    return lambda params, example: cross_entropy(module.apply(params, example[0]), example[1])


def plain_step(loss, optimizer):
    """Mean gradient over the batch, and the update."""

    def step(params, state, batch, key):
        mean = lambda p: jnp.mean(jax.vmap(loss, (None, 0))(p, batch))
        updates, state = optimizer.update(jax.grad(mean)(params), state, params)
        return optax.apply_updates(params, updates), state

    return step


def private_step(loss, optimizer, method):
    """Clip, sum, add noise, divide, update: the batch in one piece."""

    def step(params, state, batch, key):
        total = clipped_sum(loss, params, batch, clip_norm=CLIP_NORM, method=method).total
        mean = jax.tree.map(lambda g: g / BATCH, noise.add(key, total, NOISE * CLIP_NORM))
        updates, state = optimizer.update(mean, state, params)
        return optax.apply_updates(params, updates), state

    return step


def jax_privacy_step(loss, optimizer):
    """The same with jax_privacy's clipped gradients, and noise from jax.random."""
    import jax_privacy

    clipped = jax_privacy.clipped_grad(
        loss, l2_clip_norm=CLIP_NORM, normalize_by=BATCH, keep_batch_dim=False, batch_argnums=1
    )

    def step(params, state, batch, key):
        leaves, structure = jax.tree.flatten(clipped(params, batch))
        keys = jax.random.split(key, len(leaves))
        std = NOISE * CLIP_NORM / BATCH
        noisy = [g + std * jax.random.normal(k, g.shape, g.dtype) for g, k in zip(leaves, keys, strict=True)]
        updates, state = optimizer.update(jax.tree.unflatten(structure, noisy), state, params)
        return optax.apply_updates(params, updates), state

    return step


def trainer_step(module, params, data):
    """The trainer's own step: a Poisson batch of 256 expected from 60,000, in micro-batches of 64."""
    plan = Plan(target_delta=1e-5, dataset_size=SIZE, expected_batch_size=BATCH, noise_multiplier=NOISE, steps=100)
    trainer = Trainer(loss_of(module), optax.sgd(0.1), plan, CLIP_NORM)
    now = numbers(plan.at(0), plan.sampling, None, 0)
    carried = Carried(params, trainer.optimizer.init(params), jnp.float32(CLIP_NORM), jnp.int32(0))
    step = jax.jit(trainer.step_function)
    rng = np.random.default_rng(0)

    def run():
        words = rng.integers(0, 2**32, 8, np.uint32)
        return step(carried, words, words, data, now)

    return run


def memory(step, arguments, batch_of):
    """Bytes of scratch memory that one more example takes."""
    sizes = (BATCH // 2, BATCH)
    used = []
    for size in sizes:
        params, state, key = arguments
        compiled = jax.jit(step).lower(params, state, batch_of(size), key).compile()
        used.append(compiled.memory_analysis().temp_size_in_bytes)
    return (used[1] - used[0]) / (sizes[1] - sizes[0])


def measure(name, module, rounds, with_trainer):
    rng = np.random.default_rng(0)
    images = rng.normal(size=(SIZE if with_trainer else BATCH, 28, 28, 1)).astype(np.float32)
    data = (jnp.asarray(images), jnp.asarray(rng.integers(0, 10, len(images))))
    batch_of = lambda size: jax.tree.map(lambda a: a[:size], data)
    params = module.init(jax.random.key(0), images[0])
    optimizer, loss = optax.sgd(0.1), loss_of(module)
    state = optimizer.init(params)
    key, other = fresh_key(), jax.random.key(1)
    steps = {"not private": (plain_step(loss, optimizer), key)}
    for method in ("vmap", "ghost", "auto"):
        steps[f"private, {method}"] = (private_step(loss, optimizer, method), key)
    if importlib.util.find_spec("jax_privacy"):
        steps["jax_privacy"] = (jax_privacy_step(loss, optimizer), other)
    runs, scratch = {}, {}
    for label, (step, k) in steps.items():
        compiled = jax.jit(step)
        runs[label] = lambda compiled=compiled, k=k: compiled(params, state, batch_of(BATCH), k)
        scratch[label] = memory(step, (params, state, k), batch_of)
    if with_trainer:
        runs["Trainer's step, with its draw"] = trainer_step(module, params, data)
    times = {label: [] for label in runs}
    for round_number in range(rounds + 1):
        for label, run in runs.items():
            begin = time.perf_counter()
            jax.block_until_ready(run())
            if round_number:  # the first compiles
                times[label].append(time.perf_counter() - begin)
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    print(f"{name}, {count:,} parameters, batch {BATCH}, {jax.devices()[0].device_kind}, {rounds} rounds")
    base = statistics.median(times["not private"])
    for label in runs:
        median = statistics.median(times[label])
        each = f"{scratch[label] / 1024:8.1f} KiB an example" if label in scratch else ""
        print(f"  {label:30} {1e3 * median:8.2f} ms {median / base:6.2f} x  {each}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    measure("convnet", Convnet(), rounds, True)
    measure("dense network", Wide(), rounds, False)


if __name__ == "__main__":
    main()
