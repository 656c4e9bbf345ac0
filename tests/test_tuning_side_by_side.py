"""Candidates side by side are apart, and each is the trainer's DP-SGD."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from training_runs import linear, plan_of

from jaxacct import selection, tuning
from jaxacct.core.chacha import host_fold_in
from jaxacct.core.validation import InputError
from jaxacct.training import CHACHA20, AdaptiveClip, Plan
from jaxacct.training.step import noise
from jaxacct.training.step.counts_and_losses import PrivateLoss
from jaxacct.training.step.models import split_model
from jaxacct.training.step.step_function import Carried, StepRule, numbers_at, private_step
from jaxacct.tuning import candidates
from jaxacct.tuning.candidates import PASS_STREAM, STEP_STREAM, key_words, side_by_side

ROOTS = [bytes([i]) * 32 for i in range(1, 6)]
RATES = np.array([0.01, 0.1, 0.5, 1.0, 2.0], np.float32)
NORMS = np.array([0.1, 0.5, 1.0, 2.0, 3.0], np.float32)


def regression(params, example):
    return (jnp.tanh(example[0] @ params["w"]).sum() + params["b"] - example[1]) ** 2


@pytest.fixture(scope="module")
def data():
    rng = np.random.default_rng(3)
    x = rng.normal(size=(40, 3)).astype(np.float32)
    return x, np.sin(x[:, 0])


def first(count):
    rng = np.random.default_rng(4)
    return {"w": rng.normal(size=(count, 3, 2)).astype(np.float32), "b": np.zeros(count, np.float32)}


def by_hand(loss, optimizer, plan, params, clip, root, data, micro, adaptive=None):
    """The parameters after a Python loop over the trainer's step, with the root's keys of steps and passes."""
    step = jax.jit(private_step(StepRule(loss, optimizer, plan.sampling, micro, "auto", adaptive)))
    carried = Carried(params, optimizer.init(params), jnp.float32(clip), jnp.int32(0))
    key = jax.random.wrap_key_data(jnp.asarray(key_words([root])[0]), impl=CHACHA20)
    for t in range(plan.steps):
        begins = plan.pass_of(t)[1] if plan.sampling == "fixed_batches" else 0
        words = [jax.random.key_data(noise.stream(key, *of)) for of in ((STEP_STREAM, t), (PASS_STREAM, begins))]
        place = t - begins if plan.sampling == "fixed_batches" else 0
        now = numbers_at(plan, t, adaptive, words=words[0])._replace(position=np.int32(place))
        carried, _ = step(carried, *words, data, now)
    return carried.params


SCHEDULE = Plan(target_delta=1e-5, dataset_size=40, noise_multiplier=0.8, steps=5, batch_schedule=[(2, 10), (None, 20)])


@pytest.mark.slow  # the last test shows a schedule too
@pytest.mark.parametrize(
    "plan",
    [plan_of(40, 0.3, 0.7, 6), plan_of(40, 0.25, 0.7, 6, sampling="fixed_batches"), SCHEDULE],
    ids=["poisson", "fixed", "schedule"],
)
def test_each_candidate_is_the_trainers_dp_sgd(plan, data):
    train = side_by_side(regression, lambda c: optax.adam(c["rate"]), plan, micro_batch=7)
    params = first(5)
    done = train(params, {"rate": RATES, "clip_norm": NORMS}, key_words(ROOTS), data)
    mine = jax.tree.map(lambda a: jnp.asarray(a[3]), params)
    alone = by_hand(regression, optax.adam(float(RATES[3])), plan, mine, NORMS[3], ROOTS[3], data, 7)
    for a, b in zip(jax.tree.leaves(alone), jax.tree.leaves(done), strict=True):
        np.testing.assert_allclose(a, b[3], rtol=2e-4, atol=2e-5)


def test_noise_has_the_scale_of_the_plan_and_the_clip_norm_and_a_ruined_candidate_spoils_no_other():
    plan, count = plan_of(4, 1.0, 3.0, 2), 100
    train = side_by_side(linear, lambda c: optax.sgd(c["rate"]), plan)
    norms, rates = np.where(np.arange(count) % 2, 0.5, 2.0), np.ones(count)
    keys = key_words([i.to_bytes(32, "little") for i in range(1, count + 1)])
    zeros, data = np.zeros((count, 50), np.float32), np.zeros((4, 50), np.float32)
    done = np.asarray(train(zeros, {"rate": rates, "clip_norm": norms}, keys, data))
    for norm in (0.5, 2.0):
        draws = done[norms == norm].ravel() / (np.sqrt(2) * 3.0 * norm / 4.0)  # divided by the expected batch
        assert abs(draws.std() - 1.0) < 5.0 / np.sqrt(2 * draws.size)
        assert abs(draws.mean()) < 5.0 / np.sqrt(draws.size)
    assert abs(np.corrcoef(done[0], done[1])[0, 1]) < 0.8 and len(np.unique(done)) > 0.999 * done.size
    rates[[7, 9]] = np.nan, np.inf
    ruined = np.asarray(train(zeros, {"rate": rates, "clip_norm": norms}, keys, data))
    np.testing.assert_array_equal(np.delete(ruined, [7, 9], axis=0), np.delete(done, [7, 9], axis=0))
    assert not np.isfinite(ruined[[7, 9]]).any()


@pytest.mark.slow
def test_adaptive_clip_norms_are_carried_along(data):
    plan, rule = plan_of(40, 0.5, 1.0, 4), AdaptiveClip(0.3, count_noise=5.0)
    train = side_by_side(regression, lambda c: optax.sgd(c["rate"]), plan, clip_norm=rule, micro_batch=7)
    params = first(5)
    done = train(params, {"rate": np.full(5, 0.1)}, key_words(ROOTS), data)
    mine = jax.tree.map(lambda a: jnp.asarray(a[1]), params)
    alone = by_hand(regression, optax.sgd(0.1), plan, mine, 0.3, ROOTS[1], data, 7, rule)
    np.testing.assert_allclose(alone["w"], done["w"][1], rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"data": np.zeros((3, 2))}, "make the plan for these data"),
        ({"configs": {"rate": np.ones(4)}}, r"rate has shape \(4,\), must begin with 5"),
        ({"configs": {"rate": np.ones(5), "clip_norm": np.zeros(5)}}, r"clip_norm\[0\] = 0.0"),
        ({"params": np.zeros((2, 2), np.float32)}, r"params has shape \(2, 2\)"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(change, words):
    train = side_by_side(linear, lambda c: optax.sgd(c["rate"]), plan_of(4))
    given = {
        "params": np.zeros((5, 2), np.float32),
        "configs": {"rate": np.ones(5)},
        "keys": key_words(ROOTS),
        "data": np.zeros((4, 2), np.float32),
    }
    with pytest.raises(InputError, match=words) as caught:
        train(**(given | change))
    assert "\n" not in str(caught.value)


def test_keys_frozen_parameters_and_a_private_loss(data, monkeypatch):
    """As the trainer's step by hand: dropout by each example's key, a frozen part, an optimizer that reads the loss.

    The plan has a schedule, and each candidate a clip norm of its own.  The program's second call has 2 steps, not 3.
    """
    monkeypatch.setattr(candidates, "STEPS_PER_CALL", 3)
    plan = SCHEDULE
    told = PrivateLoss(bound=2.0, noise=5.0)

    def loss(params, example, key):
        keep = jax.random.bernoulli(key, 0.5, params["w"].shape)
        return (jnp.sum(example[0] * keep * params["w"]) + params["b"] - example[1]) ** 2

    optimizer = lambda config: optax.chain(optax.sgd(config["rate"]), optax.contrib.reduce_on_plateau(patience=1))
    more = {"trainable": lambda path: path == "w", "private_loss": told}
    train = side_by_side(loss, optimizer, plan, rngs=True, micro_batch=4, method="vmap", **more)
    roots = ROOTS[:2]
    params = {"w": np.ones((2, 3), np.float32), "b": np.array([0.5, -0.5], np.float32)}
    done = train(params, {"rate": np.array([0.1, 0.3]), "clip_norm": NORMS[1:3]}, key_words(roots), data)
    assert np.array_equal(done["b"], params["b"]) and not np.allclose(done["w"], params["w"])
    for i, rate in ((1, 0.3),):
        one = optimizer({"rate": np.float32(rate)})
        rule = StepRule(loss, one, plan.sampling, 4, "vmap", None, rngs=True, private_loss=told)
        trained, rest = split_model(jax.tree.map(lambda a, i=i: a[i], params), more["trainable"])
        carried = Carried(trained, one.init(trained), jnp.float32(NORMS[1 + i]), jnp.int32(0))
        step = jax.jit(private_step(rule))
        for t in range(plan.steps):
            words = host_fold_in(host_fold_in(key_words([roots[i]])[0], STEP_STREAM), t)
            now = numbers_at(plan, t, None, told, words)
            carried = step(carried, words, words, data, now, rest)[0]
        np.testing.assert_allclose(done["w"][i], carried.params["w"], rtol=1e-5, atol=1e-6)


def test_an_optimizer_that_asks_for_the_loss_needs_a_private_one(data):
    plan = plan_of(40, q=0.5, noise=1.0, steps=3)
    optimizer = lambda config: optax.chain(optax.sgd(config["rate"]), optax.contrib.reduce_on_plateau(patience=1))
    train = side_by_side(regression, optimizer, plan)
    with pytest.raises(InputError, match="private_loss="):
        train(first(1), {"rate": np.array([0.1])}, key_words([bytes(32)]), data)
    with pytest.raises(InputError, match="leaves room"):
        side_by_side(regression, optimizer, plan, private_loss=PrivateLoss(bound=1.0, noise=0.1))


def test_a_key_that_is_used_again_with_other_data_or_noise_gives_other_noise():
    """Two releases with one noise would show their difference. Equal arguments give equal releases."""
    rows = np.zeros((20, 50), np.float32)
    other = rows.copy()
    other[3, 0] = 1.0

    def released(data, noise=2.0):
        more = {"sampling_probability": 1.0, "steps": 1, "repetitions": selection.PointMass(1)}
        plan = Plan(target_delta=1e-5, dataset_size=20, noise_multiplier=noise, **more)
        done = tuning.tune(
            lambda w, x: jnp.sum(w * x),
            lambda config: optax.sgd(config["rate"]),
            tuning.grid(rate=[1.0]),
            data,
            plan,
            init=lambda key: jnp.zeros(50),
            score=lambda w: 0.0,
            key=bytes(range(32)),
        )
        assert done.params.base is None  # a view would hold the parameters of all candidates
        return np.asarray(done.params)

    first = released(rows)
    np.testing.assert_array_equal(first, released(rows))
    for again in (released(other)[1:], 0.5 * released(rows, 4.0)[1:]):
        assert abs(np.corrcoef(first[1:], again)[0, 1]) < 0.6
