"""Canaries in the real step: what they plant, what audits of it find, and that a broken step is caught."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from training_cases import gaussian_epsilon
from training_runs import linear, plan_of

from jaxacct.audit import coin_guesses, from_scores, gradient_canaries, input_canary, one_run
from jaxacct.core.validation import InputError
from jaxacct.training import AdaptiveClip, Trainer


def quadratic(params, example):
    return 0.5 * jnp.sum((params["w"] - example) ** 2) + params["b"] * example[0]


START = {"b": jnp.zeros(()), "w": jnp.ones(3)}


def test_a_planted_gradient_has_length_c_in_every_step_it_takes_part_in():
    """With little noise the score is the number of steps with the canary, whatever the data and the parameters are.

    The canary's parameter is b, along which the data have no gradient.
    """
    data = np.random.default_rng(0).normal(size=(6, 3)).astype(np.float32) * [0, 1, 1]
    trainer = Trainer(quadratic, optax.sgd(0.1), plan_of(7, q=0.3, noise=1e-6, steps=5), 0.7)
    game = gradient_canaries(trainer, data)
    counts, absent = (game.play(START, there, 400).scores[:, 0] for there in (True, False))
    taken = np.round(counts)
    np.testing.assert_allclose(counts, taken, atol=1e-4)
    np.testing.assert_allclose(absent, 0.0, atol=1e-4)
    assert abs(taken.mean() - 1.5) < 5 * np.sqrt(5 * 0.21 / 400) and set(range(5)) <= set(taken) <= set(range(6))
    assert 0.7 < taken.var() / (5 * 0.21) < 1.3


def test_a_run_is_the_trainers_and_its_score_is_the_product_with_the_clipped_gradient():
    """Outcome and score are those of a loop by hand, with little noise. Ghost norms clip the canary's gradient, too."""
    data, canary = np.random.default_rng(1).normal(size=(6, 5)).astype(np.float32), 3 * np.ones(5, np.float32)
    loss = lambda params, x: jnp.sum(jnp.tanh(x @ params))
    trainer = Trainer(loss, optax.sgd(0.5), plan_of(7, noise=1e-6, steps=4), 0.7, method="ghost")
    game, start = input_canary(trainer, data, canary), jnp.zeros((5, 4))
    assert game.trainer.norm_methods(start, (jnp.ones((7, 5)), jnp.zeros(7, jnp.int32))) == {"": "ghost"}

    def clipped(w, x):
        gradient = np.outer(x, 1.0 - np.tanh(x @ w) ** 2)
        return gradient * min(1.0, 0.7 / np.linalg.norm(gradient))

    for there in (False, True):
        w, score = np.zeros((5, 4)), 0.0
        for _ in range(4):
            total = sum(clipped(w, x) for x in [*data, *[canary] * there])
            score += np.sum(total * clipped(w, canary)) / 0.7**2
            w = w - 0.5 * total / 7
        found = game.play(start, there, 2)
        np.testing.assert_allclose(found.outcome, [w, w], atol=1e-5)
        np.testing.assert_allclose(found.scores, [[score], [score]], rtol=1e-4)
    np.testing.assert_array_equal(found.scores[:1], game.play(start, True, 1).scores)


@pytest.mark.parametrize("sampling", ["poisson", pytest.param("fixed_batches", marks=pytest.mark.slow)])
def test_audit_of_a_whole_run_finds_its_epsilon_and_no_more(sampling):
    """A run has four steps on all data (Gaussian DP) or two passes of two batches. Only the canary has a gradient.

    Each run has a learning rate of its own, on which the scores do not depend.
    """
    sizes = {"q": 1.0, "steps": 4} if sampling == "poisson" else {"q": 0.5, "steps": 4, "sampling": sampling}
    plan = plan_of(2, noise=2.0, **sizes)
    claimed = float(plan.epsilon.upper)
    assert claimed == pytest.approx(gaussian_epsilon(np.sqrt(4 if sampling == "poisson" else 2) / 2.0), rel=1e-6)
    trainer = Trainer(linear, optax.inject_hyperparams(optax.sgd)(learning_rate=9.0), plan, 1.0)
    game, rates = gradient_canaries(trainer, jnp.zeros((1, 3))), np.linspace(0.1, 0.9, 2000)
    of_each = {"hyperparameters": {"learning_rate": rates}, "outcome": lambda params: params[0]}
    played = [game.play(jnp.zeros(3), there, 2000, seed=5, **of_each) for there in (False, True)]
    without, present = (each.scores[:, 0] for each in played)
    # the canary's parameter moves by the learning rate of the run
    np.testing.assert_allclose(played[1].outcome, -rates * present / (2 * sizes["q"]), rtol=1e-4, atol=1e-5)
    middle = 0.5 * float(np.round(present.mean()))
    cuts = middle + np.array([-1.0, 0.0, 1.0])
    found = from_scores(without, present, delta=1e-5, confidence=0.999, method="gaussian_fit", thresholds=cuts)
    # with fixed batches the adversary does not know which two steps have the canary: the score is a sum over all four
    # steps, with the noise of four and the canary's gradient from two
    assert (0.7 if sampling == "poisson" else 0.3) * claimed <= found.epsilon <= claimed
    part = 0.1 if sampling == "poisson" else 0.03
    assert part * claimed <= from_scores(without, present, delta=1e-5, confidence=0.999).epsilon <= claimed


@pytest.mark.slow
def test_one_run_with_many_canaries():
    """With noise of 0.5, 400 canaries in directions of their own show an epsilon between 1.5 and the claimed one."""
    plan = plan_of(400, noise=0.5)
    game = gradient_canaries(Trainer(lambda p, x: jnp.sum(p) * 0.0, optax.sgd(1.0), plan, 1.0), None, 400)
    included = np.random.default_rng(0).random(400) < 0.5
    scores = game.play(jnp.zeros(400), included, 1, seed=1).scores[0]
    found = one_run(*coin_guesses(scores, included, 60, 60), 400, delta=1e-5, confidence=0.99)
    assert 1.5 < found.epsilon < float(plan.epsilon.upper)
    assert found.trials == 400


@pytest.mark.slow
def test_one_run_catches_too_little_noise(monkeypatch):
    from jaxacct.training.step import noise

    right = noise.add
    monkeypatch.setattr(noise, "add", lambda key, tree, std: right(key, tree, std / 10))
    plan = plan_of(300, noise=4.0)
    game = gradient_canaries(Trainer(linear, optax.sgd(1.0), plan, 1.0), None, 300)
    included = np.random.default_rng(1).random(300) < 0.5
    scores = game.play(jnp.zeros(300), included, 1, seed=2).scores[0]
    found = one_run(*coin_guesses(scores, included, 100, 100), 300, delta=1e-5, confidence=0.999)
    assert found.epsilon > 1.5 * float(plan.epsilon.upper)


def small(**more):
    return Trainer(linear, optax.sgd(1.0), plan_of(2, steps=2), **({"clip_norm": 1.0} | more))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: gradient_canaries(small(), None), "data and canaries are 1 examples, must be 2"),
        (lambda: gradient_canaries(small(), None, 2).play(jnp.zeros(1), True, 1), "count = 2 must be <= 1"),
        (
            lambda: input_canary(small(clip_norm=AdaptiveClip(1.0, count_noise=9.0)), jnp.zeros((1, 2)), jnp.ones(2)),
            "an AdaptiveClip",
        ),
        (lambda: gradient_canaries(small(clip_norm={"a": 1.0, "b": 2.0}), None, 2), "clip_norm must be one number"),
        (lambda: gradient_canaries(small(), None, 2).play(jnp.zeros(3), True, 1, steps=3), "steps = 3 must be <= 2"),
        (lambda: gradient_canaries(small(), None, 2).play(jnp.zeros(3), True, 0), "runs = 0"),
        (
            lambda: gradient_canaries(small(), None, 2).play(jnp.zeros(3), True, 1, hyperparameters={"rate": [1.0]}),
            "hyperparameters\\['rate'\\] is none of the optimizer's",
        ),
    ],
)
def test_bad_input_is_refused(call, words):
    with pytest.raises(InputError, match=words):
        call()
