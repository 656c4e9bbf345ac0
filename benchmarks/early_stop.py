"""A private early stop: steps saved, noise added and epsilon paid, for rules of several epsilons.

`python benchmarks/early_stop.py` trains a logistic regression of 20 features on 4,000 records, with 2,000 private
validation records, 12 times for each rule, and prints a Markdown table (about 2 CPU minutes).
"""

import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxacct as ja
from jaxacct.training import EarlyStop, Plan, Trainer

SEEDS, STEPS = 12, 600
RUN = {"dataset_size": 4000, "sampling_probability": 0.05, "steps": STEPS}
GIVEN = {"target_epsilon": 3.0, "target_delta": 1e-5} | RUN


def records(rng, count):
    x = rng.normal(size=(count, 20)).astype(np.float32)
    label = x @ np.linspace(-1.0, 1.0, 20) + rng.logistic(size=count) > 0.0
    return x, label.astype(np.float32)


def loss(params, example):
    return jnp.logaddexp(0.0, -(2.0 * example[1] - 1.0) * (example[0] @ params))


def right(params, example):
    return (example[0] @ params > 0.0) == (example[1] > 0.5)


def row(rule, data, validation, test, plain):
    plan = Plan(**GIVEN, early_stop=rule)
    trainer = Trainer(loss, optax.sgd(0.3), plan, 1.0)
    given = {"score": right, "validation": validation} if rule is not None else {}
    ends, accuracy = [], []
    for seed in range(SEEDS):
        state = trainer.fit(trainer.init(jnp.zeros(20), bytes([seed] * 32)), data, progress=False, **given)
        ends.append(state.step)
        accuracy.append(float(jnp.mean(jax.vmap(right, (None, 0))(state.params, test))))
        claimed = float(state.epsilon.upper)
        assert claimed <= 3.0 and abs(claimed - float(plan.epsilon.upper)) < 1e-6 * claimed
    steps = float(ja.epsilon(ja.dp_sgd(plan.noise_multiplier, 0.05, STEPS), 1e-5).upper)
    own = "none" if rule is None else f"{rule.epsilon:g}"
    early = sum(end < STEPS for end in ends)
    saved = 100.0 * (1.0 - np.mean(ends) / STEPS)
    return (
        f"| {own} | {100.0 * (plan.noise_multiplier / plain - 1.0):.1f} % | {steps:.3f} | {claimed:.3f} | "
        f"{early} of {SEEDS} | {saved:.0f} % | {100.0 * np.mean(accuracy):.1f} % |"
    )


def main():
    rng, begin = np.random.default_rng(0), time.process_time()
    data, validation, test = records(rng, 4000), records(rng, 2000), records(rng, 20_000)
    plain = Plan(**GIVEN).noise_multiplier
    print("| epsilon of the rule | more noise | of the steps | claimed | ended early | steps saved | accuracy |")
    print("|---|---|---|---|---|---|---|")
    for epsilon in (None, 0.1, 0.2, 0.5, 1.0):
        rule = None if epsilon is None else EarlyStop(epsilon, every=25, patience=3)
        print(row(rule, data, validation, test, plain), flush=True)
    print(f"\n{time.process_time() - begin:.0f} CPU seconds")


if __name__ == "__main__":
    main()
