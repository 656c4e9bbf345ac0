"""Users as the unit: their examples are averaged, clipped as one, and drawn together."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import refusal
from scipy import stats
from training_runs import KEY, linear, sgd, shared

from jaxacct.core.chacha import key_from_bytes
from jaxacct.training import Ledger, Plan, Trainer, clipped_sum
from jaxacct.training.sampling.sampler import of_users, user_data
from jaxacct.training.step.step_function import mean_over_examples

RARE = 1e-6
USERS = np.array([2, 0, 2, 2, 3, 3, 0])
"""Of five users: number 1 and 4 have no example."""
DATA = np.random.default_rng(0).normal(size=(7, 3)).astype(np.float32)


def plan_of(noise=1e-6, steps=1, users=5, **more):
    more = {"sampling_probability": 1.0} | more
    return Plan(target_delta=1e-5, dataset_size=users, noise_multiplier=noise, steps=steps, unit="user", **more)


def step_of(data, users, most, clip=1.0, plan=None, micro_batch=2, log=None):
    """Minus the noisy sum of one real step."""
    plan = plan_of(sampling="without_replacement") if plan is None else plan  # draws all
    more = {"examples_per_user": most, "micro_batch": micro_batch}
    trainer = shared(linear, sgd(plan.expected_batch_size), plan, clip, **more)
    state = trainer.fit(
        trainer.init(np.zeros(data.shape[1], np.float32), KEY), data, users=users, log=log, progress=False
    )
    return -np.asarray(state.params), state


@pytest.mark.parametrize("micro_batch", [2, *(pytest.param(one, marks=pytest.mark.slow) for one in (1, None))])
def test_the_mean_of_a_users_gradients_is_clipped_as_one(micro_batch):
    expected = np.zeros(3)
    for user in range(5):
        if (user == USERS).any():
            mean = DATA[user == USERS].mean(0)
            expected += mean * min(1.0, 0.7 / np.linalg.norm(mean))
    found, _ = step_of(DATA, USERS, 3, 0.7, micro_batch=micro_batch)
    np.testing.assert_allclose(found, expected, atol=3e-5)


def test_one_user_moves_the_sum_by_the_clip_norm_at_most():
    """However many examples the user has: six long ones count as one of norm C."""
    of_length = lambda length: np.concatenate([DATA[:1], np.full((6, 3), length, np.float32)])
    with_them, without = (step_of(of_length(length), np.array([2, *[4] * 6]), 3)[0] for length in (1e3, 0.0))
    assert 0.999 < np.linalg.norm(with_them - without) <= 1.0 + 1e-4


def test_of_many_examples_a_uniform_subset_is_taken_and_of_few_all():
    data = user_data(jnp.arange(9), [0, 1, 1, 1, 1, 1, 0, 2, 2], 4)
    keys = jax.random.split(key_from_bytes(KEY), 1500)
    draw = jax.jit(jax.vmap(lambda key: of_users(key, data, jnp.arange(4), 3)))
    (examples, weights), has_any = jax.tree.map(np.asarray, draw(keys))
    assert has_any.all(0).tolist() == [True, True, True, False] and not has_any[:, 3].any()
    np.testing.assert_allclose(weights.sum(2)[:, :3], 1.0, rtol=1e-6)
    assert (weights[:, 3] == 0).all()
    assert {tuple(sorted(row[:2])) for row in examples[:, 0].tolist()} == {(0, 6)}
    assert (examples[:, 0, 2] == 0).all() and (examples[:, 2, 2] == 7).all()  # free places repeat an own example
    chosen = [tuple(sorted(row)) for row in examples[:, 1].tolist()]
    known = list(itertools.combinations(range(1, 6), 3))
    counts = np.array([chosen.count(subset) for subset in known])
    assert counts.sum() == 1500 and stats.chisquare(counts).pvalue > RARE


def test_users_are_drawn_as_units_and_their_subsets_anew_in_every_step():
    """User j has examples that pull at coordinates 3 j to 3 j + 2: two of them in a step, or none."""
    pulls, owner = np.eye(15, dtype=np.float32), np.repeat(np.arange(5), 3)
    plan = plan_of(steps=40, sampling_probability=0.5)
    trainer = shared(linear, sgd(plan.expected_batch_size), plan, examples_per_user=2)
    seen = [np.zeros(15)]
    look = lambda state: seen.append(np.asarray(state.params))
    trainer.fit(trainer.init(np.zeros(15, np.float32), KEY), pulls, users=owner, callbacks=[look], progress=False)
    drawn = np.round(-2 * np.diff(seen, axis=0)).astype(int).reshape(40, 5, 3)
    assert set(np.unique(drawn.sum(2))) == {0, 2} and drawn.max() == 1
    assert (drawn.sum((0, 1)) > 5).all() and 60 < (drawn.sum(2) > 0).sum() < 140


def test_a_gradient_that_is_not_finite_is_its_users_alone():
    bad = DATA.copy()
    bad[2] = np.nan  # of user 2
    found, state = step_of(bad, USERS, 3)
    without, _ = step_of(np.where(USERS[:, None] == 2, np.float32(0), DATA), USERS, 3)
    np.testing.assert_allclose(found, without, atol=3e-5)
    assert int(state.not_finite) == 1


@pytest.mark.parametrize("method", ["ghost", pytest.param("vmap", marks=pytest.mark.slow)])
def test_ghost_clipping_takes_a_users_examples_for_rows(method):
    loss = lambda params, x: jnp.sum(jnp.tanh(x @ params["w"]) ** 2)
    params = {"w": np.random.default_rng(1).normal(size=(3, 4)).astype(np.float32)}
    counts = np.bincount(USERS, minlength=5)[:, None]
    examples = np.array([np.resize(DATA[user == USERS], (3, 3)) for user in range(5)])
    weights = ((np.arange(3) < counts) / np.maximum(counts, 1)).astype(np.float32)
    found = clipped_sum(mean_over_examples(loss), params, (examples, weights), counts[:, 0] > 0, 0.5, method)
    expected, gradients = 0, jax.jit(jax.vmap(jax.grad(loss), (None, 0)))(params, DATA)["w"]
    for user in (0, 2, 3):
        g = np.mean(np.asarray(gradients)[user == USERS], axis=0)
        expected = expected + g * min(1.0, 0.5 / np.linalg.norm(g))
    np.testing.assert_allclose(found.total["w"], expected, atol=2e-5)
    trainer = Trainer(loss, optax.sgd(0.1), plan_of(), 0.5, method=method, examples_per_user=3)
    assert trainer.norm_methods(params, DATA) == {"['w']": method}


@pytest.mark.slow  # quick tests draw Poisson samples of users, and samples without replacement that hold all users
@pytest.mark.parametrize("sampling", ["random_allocation", "truncated_poisson", "without_replacement", "fixed_batches"])
def test_every_way_of_sampling_draws_users(sampling):
    """Users are the units of any rule: a sum with next to no noise shows each user drawn whole or not at all."""
    more = {"cap": 2} if sampling == "truncated_poisson" else {}
    plan = plan_of(users=4, sampling=sampling, sampling_probability=0.5, **more)
    data = np.repeat(np.eye(4, dtype=np.float32), 2, axis=0)
    found, _ = step_of(data, np.repeat(np.arange(4), 2), 2, plan=plan)
    assert set(np.round(found, 3).tolist()) <= {0.0, 1.0} and found.sum() <= 4.0


def test_a_plan_of_users_says_so_and_is_no_plan_of_records():
    plan = plan_of(noise=1.0)
    assert Plan.from_json(plan.to_json()) == plan and Plan.from_json(plan.to_json()).unit == "user"
    records = Plan(target_delta=1e-5, dataset_size=5, sampling_probability=1.0, noise_multiplier=1.0, steps=1)
    assert records != plan and "unit" not in records.to_json() and "user" in plan._repr_html_()


def test_records_and_users_are_not_added_up(tmp_path, monkeypatch, still_steps):
    """A step whose records were clipped one by one says nothing of a user with several."""
    records = Plan(target_delta=1e-5, dataset_size=5, sampling_probability=1.0, noise_multiplier=1.0, steps=1)
    spent = shared(linear, sgd(1.0), records)
    state = spent.fit(spent.init(np.zeros(3, np.float32), KEY), DATA[:5], progress=False)
    of_users = shared(linear, sgd(1.0), plan_of(noise=1.0, steps=3), examples_per_user=3)
    for more in ({}, {"ledger": tmp_path / "run"}):
        assert "use one unit for both" in refusal(of_users.fit, state, DATA, users=USERS, progress=False, **more)
    monkeypatch.setattr(Ledger, "_require_unit", lambda *_: None)  # as in ledgers from before units were checked
    with Ledger.create(tmp_path / "both", records) as ledger:
        ledger.begin(plan_of(noise=1.0))
        assert "do not add up" in refusal(ledger.epsilon, 1e-5)
        target = Plan(target_epsilon=9.0, target_delta=1e-5, dataset_size=5, sampling_probability=1.0, steps=3)
        assert "use one unit for both" in refusal(target.allows, ledger, 0)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: step_of(DATA, USERS, None), "examples_per_user = None does not go with unit = 'user'"),
        (lambda: step_of(DATA, None, 3), "users is missing, and the plan's unit is 'user'"),
        (lambda: step_of(DATA, USERS[:6], 3), "one integer for each example"),
        (lambda: step_of(DATA, USERS * 1.0, 3), "one integer for each example"),
        (lambda: step_of(DATA, USERS + 2, 3), "users[4] = 5 must be from 0 to 4"),
        (lambda: step_of(DATA, USERS, 0), "examples_per_user = 0 must be"),
    ],
)
def test_bad_users_are_refused(call, text):
    assert text in refusal(call)


def test_a_user_without_examples_is_in_no_count():
    """Else giving the user one long example would move the count of an adaptive clip norm by 1, not by 1/2."""
    told = []
    step_of(DATA, USERS, 3, log=told.append)
    assert [record["not_private"]["members"] for record in told if record["event"] == "step"] == [3]
