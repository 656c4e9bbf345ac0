"""Digits, a small network with tempered sigmoids, and many private runs at once: what the scripts here share.

Runs differ in learning rate, noise, sampling rate, steps and records.  All of these are inputs of one compiled program:
the trainer's step (`jaxacct.training.step`) under vmap.
"""

import csv
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxacct.core.chacha import CHACHA20
from jaxacct.training.sampling import sampler
from jaxacct.training.step import noise
from jaxacct.training.step.step_function import Carried, Numbers, StepRule, private_step
from jaxacct.training.step.step_mechanisms import POISSON

DELTA = 1e-5
CLIP_NORM = 1.0
HIDDEN = 64
SCALE, TEMPERATURE, OFFSET = 2.0, 2.0, 1.0
"""Parameters of the tempered sigmoid; with these values it is tanh."""
MICRO_BATCH = 40
TOGETHER = 64
"""Runs in one call of the compiled program."""
OPTIMIZERS = {"DP-SGD": optax.sgd, "DP-Adam": optax.adam}


def load():
    """Three pairs (images, labels): the private training data, a public validation set, and a test set."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(images))
    images, labels = (images[order] / 8.0 - 1.0).astype(np.float32), labels[order].astype(np.int32)
    part = np.arange(len(images)) % 6
    return [(images[chosen], labels[chosen]) for chosen in (part > 1, part == 1, part == 0)]


def tempered_sigmoid(x):
    """`s sigmoid(T x) - o` [Papernot et al. 2020]."""
    return SCALE * jax.nn.sigmoid(TEMPERATURE * x) - OFFSET


def initial(rng):
    """The first parameters of one run, from NumPy's generator."""
    layer = lambda m, n: (rng.normal(0.0, m**-0.5, (m, n)).astype(np.float32), np.zeros(n, np.float32))
    return {"hidden": layer(64, HIDDEN), "out": layer(HIDDEN, 10)}


def logits(params, images):
    (w, b), (v, c) = params["hidden"], params["out"]
    return tempered_sigmoid(images @ w + b) @ v + c


def loss(params, example):
    """Cross-entropy of one example (image, label, present); the constant 0 if the example is not present."""
    image, label, present = example
    value = optax.softmax_cross_entropy_with_integer_labels(logits(params, image), label)
    return jnp.where(present, value, 0.0)


class Runs(NamedTuple):
    """Settings, first parameters and data of private runs: row i of each field belongs to run i."""

    params: dict
    learning_rate: np.ndarray
    noise: np.ndarray
    rate: np.ndarray
    steps: np.ndarray
    batch: np.ndarray  # expected batch size, by which sums are divided
    members: np.ndarray  # (runs, n) row numbers of the training data, padded with -1


def join(parts):
    return jax.tree.map(lambda *x: np.concatenate(x), *parts)


def train(optimizer, runs, data, seed):
    """The parameters of all runs after their last step; runs are sorted by length and trained TOGETHER at a time."""
    order = np.argsort(runs.steps, kind="stable")
    words = np.random.default_rng(seed).integers(0, 2**32, (len(order), 8), np.uint32)
    images, labels = (jnp.asarray(a) for a in data)
    done = []
    for start in range(0, len(order), TOGETHER):
        rows = order[np.minimum(np.arange(start, start + TOGETHER), len(order) - 1)]
        some = jax.tree.map(lambda a, rows=rows: a[rows], runs)
        thresholds = np.stack([sampler.threshold(float(r)) for r in some.rate])
        zero = np.zeros(TOGETHER, np.int32)
        batch, sigma = some.batch.astype(np.float32), some.noise.astype(np.float32)
        nothing = np.zeros(TOGETHER, np.float32)
        now = Numbers(thresholds, zero, zero, batch, sigma, nothing, nothing)
        rest = (some.learning_rate.astype(np.float32), now, some.steps.astype(np.int32), words[rows], some.members)
        done.append(_together(optimizer, some.params, *rest, images, labels))
    back = np.argsort(order)
    return jax.tree.map(lambda *x: np.concatenate(x)[: len(order)][back], *jax.device_get(done))


def _one(optimizer, params, learning_rate, now, steps, words, members, images, labels):
    transform = OPTIMIZERS[optimizer](learning_rate)
    step = private_step(StepRule(loss, transform, POISSON, MICRO_BATCH, "auto", None))
    present = members >= 0
    data = (images[members], labels[members], present)
    root = jax.random.wrap_key_data(words, impl=CHACHA20)
    unused = jax.random.key_data(root)

    def body(t, carried):
        return step(carried, jax.random.key_data(noise.stream(root, noise.NOISE, t)), unused, data, now)[0]

    state = jax.tree.map(jnp.asarray, transform.init(params))
    first = Carried(params, state, jnp.float32(CLIP_NORM), jnp.int32(0))
    return jax.lax.fori_loop(0, steps, body, first).params


_mapped = jax.vmap(_one, (None, 0, 0, 0, 0, 0, 0, None, None))
_together = jax.jit(_mapped, static_argnums=0)


@jax.jit
def _correct(params, images):
    return jax.vmap(lambda p: jnp.argmax(logits(p, images), -1))(params)


def accuracy(params, data):
    """Share of right answers of each run; 0 for a run whose parameters are not all finite."""
    finite = np.all([np.isfinite(leaf).reshape(len(leaf), -1).all(1) for leaf in jax.tree.leaves(params)], axis=0)
    return np.where(finite, np.mean(np.asarray(_correct(params, data[0])) == data[1], axis=1), 0.0)


def mean_and_error(values):
    """Mean and its standard error."""
    values = np.asarray(values, np.float64)
    return float(values.mean()), float(values.std(ddof=1) / np.sqrt(values.size)) if values.size > 1 else 0.0


def write(rows, path):
    """Dictionaries as a CSV; numbers with six digits."""
    with Path(path).open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows({k: f"{v:.6g}" if isinstance(v, float) else v for k, v in row.items()} for row in rows)
