"""The loss, released privately beside the gradient, and optimizers that ask for it."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import refusal
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from training_runs import KEY, plan_of

import jaxacct as ja
from jaxacct.audit import Game
from jaxacct.training import AdaptiveClip, PrivateLoss, Trainer
from jaxacct.training.step.counts_and_losses import gradient_noise
from jaxacct.training.step.step_function import Carried, numbers_at

SQUARE = lambda w, x: jnp.sum((w - x) ** 2)


@pytest.mark.parametrize("z", [0.3, 1.0, 7.0])
def test_gradients_count_and_loss_together_are_one_gaussian(z):
    adaptive, loss = AdaptiveClip(1.0, count_noise=9.0), PrivateLoss(3.0, noise=11.0)
    for with_count in (adaptive, None):
        gradients = gradient_noise(z, 100.0, with_count, loss)
        parts = [gradients, 2 * 11.0, *([] if with_count is None else [2 * 9.0])]
        assert sum(part**-2 for part in parts) == pytest.approx(z**-2, rel=1e-12)
        assert sum(part**-2 for part in parts) <= z**-2
    assert gradient_noise(z, 100.0, None, None) == z
    assert gradient_noise(z, 100.0, adaptive, None) ** -2 + (2 * 9.0) ** -2 == pytest.approx(z**-2, rel=1e-12)


@pytest.mark.slow
def test_what_it_costs_is_what_the_plan_says():
    gradients = gradient_noise(2.0, 100.0, None, PrivateLoss(5.0, noise=4.0))
    both = ja.epsilon(ja.compose(ja.Gaussian(gradients), ja.Gaussian(2 * 4.0)), 1e-5)
    assert float(both.upper) == pytest.approx(float(ja.epsilon(ja.Gaussian(2.0), 1e-5).upper), rel=1e-6)


@settings(deadline=None, max_examples=50)
@given(st.floats(width=32), st.floats(1e-6, 1e6))
def test_a_loss_counts_between_zero_and_the_bound(loss, bound):
    """A summand is a loss's distance from half the bound.  Clipping keeps it within half the bound, even for NaN."""
    value = PrivateLoss(bound).clipped(jnp.float32(loss))
    assert 0.0 <= value <= np.float32(bound)
    if math.isnan(loss):
        assert value == np.float32(bound)
    elif 0.0 <= loss <= np.float32(bound):
        assert value == np.float32(loss) or abs(loss) < 1.2e-38


def test_the_noise_has_its_deviation_and_the_mean_its_middle():
    rule, keys = PrivateLoss(8.0, noise=5.0), np.random.default_rng(3).integers(0, 2**32, (1500, 8), np.uint32)
    release = lambda drawn: rule.release(jnp.int32(400 * 128), jnp.int32(100), drawn, 100.0)
    drawn = np.asarray(jax.jit(jax.vmap(release))(np.array([rule.draw(key, 100.0) for key in keys])))
    assert stats.kstest((drawn - 4.0) / (5.0 * 8.0 / 100.0), "norm").pvalue > 1e-6


def one_value(trainer, params, data):
    before = Carried(params, trainer.optimizer.init(params), jnp.float32(1.0), jnp.int32(0))
    words = np.arange(8, dtype=np.uint32)
    now = numbers_at(trainer.plan, 0, None, trainer.rule.private_loss, words)
    return jax.jit(trainer.step_function)(before, words, words, data, now)


def test_the_optimizer_gets_the_private_loss_and_the_log_the_others():
    """The optimizer gets the mean clipped loss, with little noise; a loss whose gradient is NaN counts as 0."""
    seen = optax.GradientTransformationExtraArgs(lambda p: jnp.zeros(()), lambda g, s, p, *, value: (g, value))
    data = jnp.array([[0.4], [1.0], [3.0], [jnp.nan]])
    plan = plan_of(4, noise=1e-5)
    trainer = Trainer(SQUARE, seen, plan, 1.0, private_loss=PrivateLoss(4.0, noise=1e-4), micro_batch=3)
    after, observed = one_value(trainer, jnp.zeros(1), data)
    assert float(after.opt_state) == float(observed.value) == pytest.approx((0.16 + 1.0 + 4.0 + 0.0) / 4, abs=2e-3)
    assert float(observed.loss) == pytest.approx(0.16 + 1.0 + 9.0)
    assert (int(observed.members), int(observed.clipped), int(observed.not_finite)) == (4, 2, 1)


@pytest.mark.parametrize(
    "call, text",
    [
        (lambda: PrivateLoss(0.0), "bound = 0.0 must be"),
        (lambda: PrivateLoss(1.0, noise=-1.0), "noise = -1.0 must be"),
        # float32 would hold zero or infinity: no noise at all, or NaN
        (lambda: PrivateLoss(1e-40), "bound = 1e-40 must be"),
        (lambda: PrivateLoss(1e40), "bound = 1e+40 must be"),
        (lambda: PrivateLoss(1.0, noise=1e40), "noise = 1e+40 must be"),
        (lambda: AdaptiveClip(1.0, count_noise=1e40), "count_noise = 1e+40 must be"),
        (lambda: gradient_noise(2.0, 9.0, None, PrivateLoss(1.0, noise=1.0)), "must be > 1, which leaves room"),
        (
            lambda: gradient_noise(2.0, 9.0, AdaptiveClip(1.0, count_noise=1.2), PrivateLoss(1.0, noise=1.2)),
            "must be > 1.41",
        ),
        (
            lambda: of(optax.contrib.reduce_on_plateau()),
            "asks for value, the loss, which is not private; give private_loss=",
        ),
        (lambda: of(optax.polyak_sgd()), "asks for value, the loss, which is not private"),
        (lambda: of(optax.lbfgs(), PrivateLoss(1.0)), "asks for grad, value_fn, computed from the data without noise"),
        (lambda: Trainer(SQUARE, optax.sgd(1.0), plan_of(3), 1.0, private_loss=PrivateLoss(1.0, 0.4)), "leaves room"),
    ],
)
def test_what_is_not_private_or_leaves_no_room_is_refused(call, text):
    assert text in refusal(call)


def of(optimizer, private_loss=None):
    return Trainer(SQUARE, optimizer, plan_of(30), 1.0, private_loss=private_loss).init(np.zeros(2, np.float32))


def test_canaries_refuse_a_trainer_with_more_than_a_gradient():
    trainer = Trainer(SQUARE, optax.sgd(1.0), plan_of(30), 1.0, private_loss=PrivateLoss(1.0))
    marks = np.zeros(30, np.int32)
    assert "which canaries do not support" in refusal(Game, trainer, SQUARE, jnp.zeros((30, 2)), marks, None, 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "optimizer", [optax.chain(optax.adam(0.5), optax.contrib.reduce_on_plateau(patience=5)), optax.polyak_sgd()]
)
def test_optimizers_that_look_at_the_loss(optimizer):
    trainer = Trainer(SQUARE, optimizer, plan_of(50, noise=0.1, steps=40), 1.0, private_loss=PrivateLoss(4.0))
    state = trainer.fit(trainer.init(np.zeros(2, np.float32), KEY), np.full((50, 2), 0.5, np.float32), progress=False)
    np.testing.assert_allclose(state.params, 0.5, atol=0.2)
    assert float(state.epsilon.upper) == float(trainer.plan.epsilon.upper)
