"""One step of the trainer against its definition, and an audit of it."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import refusal
from scipy import stats
from training_cases import gaussian_epsilon
from training_runs import linear, plan_of, sgd, shared

from jaxacct.audit import from_scores, gradient_canaries
from jaxacct.training import Trainer, fresh_key, noisy_mean
from jaxacct.training.clipping.clipped_sum import deviation
from jaxacct.training.step import noise
from jaxacct.training.step.step_function import Carried, numbers_at

KEY = bytes(range(32))


def one_step(trainer, data, runs, seed=0):
    """The parameters, started at 0, after one real step with each of `runs` keys: shape (runs, dimension)."""
    zeros = np.zeros(data.shape[1], np.float32)
    start = Carried(zeros, trainer.optimizer.init(zeros), np.float32(1), np.int32(0))
    now = numbers_at(trainer.plan, 0, trainer.adaptive)
    words = np.random.default_rng(seed).integers(0, 2**32, (runs, 8), np.uint32)
    return np.asarray(many_steps(trainer.step_function)(words, start, data, now), np.float64)


@functools.cache
def many_steps(step):
    """The compiled step for many keys."""
    one = lambda words, start, data, now: step(start, words, words, data, now)[0].params
    return jax.jit(jax.vmap(one, (0, None, None, None)))


def test_a_run_against_its_definition():
    """Fifteen steps with next to no noise equal clipped gradient descent with momentum in float64."""
    rng = np.random.default_rng(1)
    x, w = rng.normal(size=(20, 3)).astype(np.float32), np.zeros(3)
    plan = plan_of(20, noise=1e-6, steps=15)
    trainer = Trainer(lambda p, e: 0.5 * jnp.sum((p - e) ** 2), optax.sgd(0.3, momentum=0.9), plan, 0.7, micro_batch=6)
    state = trainer.fit(trainer.init(np.zeros(3, np.float32), KEY), x, progress=False)
    velocity = np.zeros(3)
    for _ in range(15):
        g = w - x
        g *= np.minimum(1, 0.7 / np.linalg.norm(g, axis=1, keepdims=True))
        velocity = 0.9 * velocity + g.sum(0) / 20
        w = w - 0.3 * velocity
    np.testing.assert_allclose(np.asarray(state.params), w, atol=2e-5)
    assert state.step == 15 and state.stopped == "finished" and state.not_finite == 0


def test_noise_of_a_step_has_the_deviation_of_the_plan():
    """Gradients of zero: what is left is noise of deviation z C / expected batch size, independent in each entry."""
    trainer = shared(linear, sgd(1.0), plan_of(40, q=0.25, noise=1.7), 3.0, micro_batch=4)
    assert float(trainer.init(np.zeros(2, np.float32)).clip_norm) == 3.0
    draws = one_step(trainer, np.zeros((40, 6), np.float32), 1_500) / (1.7 * 1.0 / 10.0)
    assert stats.kstest(draws.ravel(), "norm").pvalue > 1e-6
    assert abs(draws.std() - 1) < 6 / math.sqrt(2 * draws.size)
    assert np.abs(np.corrcoef(draws.T) - np.eye(6)).max() < 6 / math.sqrt(1_500)


def scale_is_right(step_params):
    """Whether, without noise, a step moves by (number drawn) C / (expected batch size) and that number is binomial."""
    moved = -step_params[:, 0] * 10.0  # every example pulls by C = 1 along the first axis; 10 are expected of 40
    whole = np.abs(moved - np.round(moved)).max() < 1e-3
    counts = np.bincount(np.clip(np.round(moved), 0, 40).astype(int), minlength=41)
    expected = len(moved) * stats.binom.pmf(np.arange(41), 40, 0.25)
    body = expected > 10
    surprise = stats.chi2.sf(((counts - expected)[body] ** 2 / expected[body]).sum(), body.sum())
    return bool(whole and surprise > 1e-6)


BROKEN = {
    "normalised by the drawn batch size": lambda total, count: total * 10.0 / jnp.maximum(count, 1),
    "batch truncated to what is expected": lambda total, count: total * jnp.minimum(count, 10) / jnp.maximum(count, 1),
}


@pytest.mark.parametrize("variant", [None, *BROKEN])
def test_all_examples_drawn_are_used_and_normalised_by_the_expected_number(variant, monkeypatch):
    """The real step passes; steps broken in two well-known ways do not."""
    from jaxacct.training.sampling import sampler

    if variant is not None:
        fold = sampler.over_micro_batches

        def broken(selection, size, body, init, **more):
            done = fold(selection, size, body, init, **more)
            total = BROKEN[variant](done.clipped.total, selection.count)
            return done._replace(clipped=done.clipped._replace(total=total))

        monkeypatch.setattr(sampler, "over_micro_batches", broken)
    made = Trainer if variant else shared
    trainer = made(linear, sgd(1.0), plan_of(40, q=0.25, noise=1e-6), 1.0, micro_batch=4)
    params = one_step(trainer, np.tile(np.float32([5, 0, 0, 0, 0, 0]), (40, 1)), 1_500)
    assert scale_is_right(params) == (variant is None)


# Audit: a lower bound on epsilon from many runs of the real step


def audited_epsilon(trainer, runs=20_000):
    """Lower bound on epsilon by a Gaussian fit, at 99.9 % confidence, from a canary orthogonal to all examples."""
    game = gradient_canaries(trainer, np.tile(np.float32([0, 0.5]), (4, 1)))
    scores = [game.play(jnp.zeros(2), there, runs).scores[:, 0] for there in (False, True)]
    options = {"method": "gaussian_fit", "thresholds": [0.25, 0.5, 0.75]}
    return from_scores(*scores, delta=1e-5, confidence=0.999, **options).epsilon


@pytest.mark.slow  # test_audit_canaries.py audits whole runs
def test_audit_of_one_step_finds_its_epsilon_and_no_more():
    plan = plan_of(5)
    claimed = float(plan.epsilon.upper)
    assert claimed == pytest.approx(gaussian_epsilon(1.0), rel=1e-6)
    found = audited_epsilon(Trainer(linear, optax.sgd(1.0), plan, 1.0))
    assert 0.85 * claimed <= found <= claimed


@pytest.mark.slow  # the deviation is tested above; test_audit_sound.py has an audit of steps with too little noise
def test_audit_catches_noise_of_the_wrong_scale(monkeypatch):
    """The sum's noise is divided by the batch size before it is added, and again when the mean is taken."""
    from jaxacct.training.step import noise

    right = noise.add
    monkeypatch.setattr(noise, "add", lambda key, tree, std: right(key, tree, std / 5))
    plan = plan_of(5)
    assert audited_epsilon(Trainer(linear, optax.sgd(1.0), plan, 1.0), runs=2_000) > 1.5 * float(plan.epsilon.upper)


@pytest.mark.parametrize("z", [1e-50, 1e-40, 1e39])
def test_noise_that_float32_does_not_hold_is_refused(z):
    """The old code added no noise at 1e-50, under a finite certified epsilon, and infinite noise at 1e39."""
    text = f"noise_multiplier = {z} must be >= 1e-10 and <= 1e+10"
    assert text in refusal(lambda: Trainer(linear, optax.sgd(0.1), plan_of(4, noise=z), 1.0))
    assert text in refusal(lambda: noisy_mean(fresh_key(), z, 1.0, 4.0))


@pytest.mark.parametrize("small", [1, 100, pytest.param(3000, marks=pytest.mark.slow)])
def test_the_noise_of_many_clip_norms_is_not_rounded_down(small):
    """Squares of 2^-25, added one by one to 1 in float32, are lost."""
    norms, z = [1.0, *[2.0**-12.5] * small], 1.1
    held = [np.float64(np.float32(c)) for c in norms]
    found = float(jax.jit(lambda *c: deviation(z, c))(*map(jnp.float32, norms)))
    assert 0 <= found / (z * math.sqrt(math.fsum(c * c for c in held))) - 1 < (20 + small) * 2.0**-24


@pytest.mark.parametrize("z", [1.1, 0.7, 1 + 2.0**-25])
def test_noisy_mean_does_not_round_the_noise_down(monkeypatch, z):
    seen = []
    monkeypatch.setattr(noise, "add", lambda key, tree, std: seen.append(std) or tree)
    transformation = noisy_mean(fresh_key(), z, 1.0, 1.0)
    transformation.update(jnp.zeros(3), transformation.init(np.zeros(3, np.float32)))
    assert z <= np.float64(np.float32(seen[0])) <= z * (1 + 1e-6)
