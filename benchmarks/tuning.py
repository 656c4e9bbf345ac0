"""Candidates trained side by side against one after the other: the same plan, models and data in one run.

    python benchmarks/tuning.py [--candidates 16] [--hidden 16] [--steps 100] [--rounds 5] [--json]

DP-SGD of a small network on data of the size and shape of scikit-learn's digits (noise in their place).  Cold is the
first call of each way, compilation included; warm is the median of the rounds, in which the ways alternate.  There are
three ways to train one after the other.  "one by one" gives one candidate at a time to the program that trains side by
side, which loops over the steps on the device.  "one trainer's fit" calls `Trainer.fit`, which loops in Python, of one
trainer; it compiles once, as the learning rate is in the optimizer's state.  "a trainer for each" makes and compiles a
trainer for each learning rate.
"""

import argparse
import json
import secrets
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxacct import tuning
from jaxacct.training import Plan, Trainer

SIZE = 1_500
"""Examples of the data set."""
INPUTS = 64
"""Numbers of an example."""
CLASSES = 10
"""Labels."""


def first(key, hidden):
    one, two = jax.random.split(key)
    return {
        "in": 0.1 * jax.random.normal(one, (INPUTS, hidden)),
        "out": 0.1 * jax.random.normal(two, (hidden, CLASSES)),
    }


def loss(params, example):
    x, y = example
    logits = jnp.tanh(x @ params["in"]) @ params["out"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, y)


def timed(call):
    begin = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - begin


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--candidates", type=int, default=16)
    parser.add_argument("--hidden", type=int, default=16)
    parser.add_argument("--batch", type=float, default=64)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rng, n = np.random.default_rng(0), options.candidates
    data = rng.normal(size=(SIZE, INPUTS)).astype(np.float32), rng.integers(0, CLASSES, SIZE)
    plan = Plan(
        target_delta=1e-5,
        dataset_size=SIZE,
        expected_batch_size=options.batch,
        noise_multiplier=1.0,
        steps=options.steps,
    )
    train = tuning.side_by_side(loss, lambda c: optax.sgd(c["rate"]), plan)
    params = jax.vmap(lambda key: first(key, options.hidden))(jax.random.split(jax.random.key(0), n))
    configs = {"rate": np.geomspace(0.01, 1.0, n)}
    keys = tuning.key_words([secrets.token_bytes(32) for _ in range(n)])

    def together():
        return train(params, configs, keys, data)

    def alone():
        some = lambda tree, i: jax.tree.map(lambda x: x[i : i + 1], tree)
        return [train(some(params, i), some(configs, i), keys[i : i + 1], data) for i in range(n)]

    def fitted():
        done = []
        for i in range(n):
            trainer = Trainer(loss, optax.sgd(float(configs["rate"][i])), plan, 1.0)
            begin = trainer.init(jax.tree.map(lambda x, i=i: x[i], params))
            done.append(trainer.fit(begin, data, progress=False).params)
        return done

    one = Trainer(loss, optax.inject_hyperparams(optax.sgd)(learning_rate=1.0), plan, 1.0)

    def refitted():
        done = []
        for i in range(n):
            begin = one.init(jax.tree.map(lambda x, i=i: x[i], params))
            begin.opt_state.hyperparams["learning_rate"] = jnp.float32(configs["rate"][i])
            done.append(one.fit(begin, data, progress=False).params)
        return done

    ways = {
        "side by side": together,
        "one by one": alone,
        "one trainer's fit": refitted,
        "a trainer for each": fitted,
    }
    cold = [timed(way) for way in ways.values()]
    warm = [[timed(way) for way in ways.values()] for _ in range(options.rounds)]
    medians = [statistics.median(each) for each in zip(*warm, strict=True)]
    report = {
        "candidates": n,
        "cold_seconds": dict(zip(ways, cold, strict=True)),
        "warm_seconds": dict(zip(ways, medians, strict=True)),
        "ratios": dict(zip(ways, [seconds / medians[0] for seconds in medians], strict=True)),
        "candidate_steps_per_second": n * options.steps / medians[0],
    }
    if options.json:
        print(json.dumps(report))
        return
    print(f"{f'{n} candidates, {options.steps} steps':26s}   cold s   warm s   ratio")
    for name, a, b in zip(ways, cold, medians, strict=True):
        print(f"{name:26s} {a:8.2f} {b:8.3f} {b / medians[0]:7.2f}")
    print(f"{report['candidate_steps_per_second']:.0f} candidate steps per second")


if __name__ == "__main__":
    main()
