"""What the tests of the trainer share; `python training_runs.py FOLDER` is a run to be killed, and prints its steps."""

import contextlib
import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxacct.training import Plan, Trainer
from jaxacct.training.step.step_function import Observed, draw, keys
from jaxacct.tuning import tuning_run

STEPS = 40
KEY = bytes(range(32))


def squares(params, example):
    return jnp.sum((params - example) ** 2)


def linear(params, example):
    """Its gradient is the example."""
    return jnp.dot(params, example)


def regression(params, example):
    return (example[0] @ params - example[1]) ** 2


def plan_of(size, q=1.0, noise=1.0, steps=1, **more):
    return Plan(
        target_delta=1e-5, dataset_size=size, sampling_probability=q, noise_multiplier=noise, steps=steps, **more
    )


def still(carried, words, pass_words, data, now, frozen=None):
    """A step that moves nothing and compiles in no time, for tests of counts that do not depend on outputs."""
    none = jnp.int32(0)
    return carried, Observed(jnp.float32(0), (), none, none, none, None)


def keyed(carried, words, pass_words, data, now, frozen=None):
    """As `still`, but parameters move by the step's key: where they end up alike, all keys were the same."""
    moved = jax.tree.map(lambda leaf: leaf + (words[0] % 1024).astype(leaf.dtype), carried.params)
    return carried._replace(params=moved), still(carried, words, pass_words, data, now)[1]


def moving(carried, words, pass_words, data, now, frozen=None):
    """A step that is compiled in no time, and moves by the key and the data."""
    moved = carried.params + words[0].astype(jnp.float32) / 2.0**32 + data.sum(0)
    return carried._replace(params=moved), still(carried, words, pass_words, data, now)[1]


@functools.cache
def of_rate(step, rate):
    """Return one program for each pair of a step and a rate: equal pairs share their program."""

    def one(*given):
        after, observed = step(*given)
        return after, observed._replace(loss=jnp.float32(rate))

    return one


def still_trainer(plan, rate=0.1, clip_norm=1.0, step=still, **more):
    """A Trainer whose steps are compiled in no time; each rate has a program of its own."""
    trainer = Trainer(linear, sgd(rate), plan, clip_norm, **more)
    trainer.placement.step_function = of_rate(step, rate)
    return trainer


def drawing_trainer(plan, rate=1.0):
    """A Trainer whose steps take a rate off the parameter of each record that is drawn, and do no more."""
    trainer = still_trainer(plan, rate)

    def step(carried, words, pass_words, data, now, frozen=None):
        drawn = draw(trainer.rule, *keys(words, pass_words), plan.dataset_size, now)
        there = jnp.arange(len(drawn.indices)) < drawn.count
        moved = carried._replace(params=carried.params.at[drawn.indices].add(-rate * there))
        return moved, still(carried, words, pass_words, data, now)[1]

    trainer.placement.step_function = step
    return trainer


sgd, adam = functools.cache(optax.sgd), functools.cache(optax.adam)
"""Cached, so that `shared` gets the same object for the same rate."""
_FIRST = {}


def shared(loss, optimizer, plan, clip_norm=1.0, **more):
    """A Trainer that shares its program with those of the same loss, optimizer, batches and settings, for any plan.

    A test that changes what a step does makes a Trainer of its own.
    """
    trainer = Trainer(loss, optimizer, plan, clip_norm, **more)
    adaptive, most = trainer.adaptive, trainer.examples_per_user
    batches = plan.sampling, plan.dataset_size, plan.cap, trainer.micro_batch, trainer.rule.buffers
    known = lambda value: repr(value) if isinstance(value, dict) else value  # what is trained may be a dict
    rest = sorted((name, known(value)) for name, value in more.items() if name != "micro_batch")
    first = _FIRST.setdefault((loss, optimizer, *batches, adaptive, most, *rest), trainer)
    trainer.rule, trainer.placement, trainer.step_function = first.rule, first.placement, first.step_function
    return trainer


@contextlib.contextmanager
def quick_candidates():
    """Candidates of tunings move by their rates and keys alone, and nothing is compiled.

    Yields a list of what each call of `side_by_side` got: (loss, plan, settings).  For tests of anything but the
    training, which `test_tuning_side_by_side.py` has.
    """
    given = []

    def side_by_side(loss_fn, make_optimizer, plan, **settings):
        given.append((loss_fn, plan, settings))

        def train(params, configs, keys, data, private=(), trial=False):
            if trial:
                return params
            make_optimizer({name: column[0] for name, column in configs.items()})
            luck = np.array([np.random.default_rng(words).random() for words in np.asarray(keys)])
            move = (configs["rate"] * (1.0 + luck)).astype(np.float32)
            return jax.tree.map(lambda a: a + move.reshape(-1, *(1 for _ in a.shape[1:])), params)

        return train

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuning_run, "side_by_side", side_by_side)
        yield given


def start():
    """(trainer, first state, data) of a small run with a target; the same in every process."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(30, 3)).astype(np.float32)
    plan = Plan(target_epsilon=4.0, target_delta=1e-5, dataset_size=30, sampling_probability=1.0, steps=STEPS)
    trainer = shared(regression, adam(0.1), plan)
    return trainer, trainer.init(jnp.zeros(3), KEY), (x, x @ np.array([1.0, -2.0, 3.0], np.float32))


if __name__ == "__main__":
    trainer, state, data = start()
    trainer.fit(
        state,
        data,
        ledger=f"{sys.argv[1]}/run.jsonl",
        checkpoints=f"{sys.argv[1]}/checkpoints",
        checkpoint_every=7,
        callbacks=[lambda state: print(state.step, flush=True)],
        progress=False,
    )
