"""Candidates that differ in sampling probability and length: noise of their own, one target, the exact worst case."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import refusal

import jaxacct as ja
from jaxacct import selection, tuning
from jaxacct.selection import law_of_k
from jaxacct.training import Ledger
from jaxacct.tuning import tuning_run

SIZE, DELTA, LAW = 30, 1e-5, selection.Geometric(0.2)


@pytest.fixture(scope="module")
def plan():
    return tuning.MatchedPlan(6.0, DELTA, SIZE, LAW, sampling_probability=1.0, steps=[1, 2, 8])


def test_every_candidate_has_the_least_noise_for_one_epsilon(plan):
    assert [one.steps for one in plan.plans] == [1, 2, 8] and plan.relation == "add_or_remove_one"
    noise = np.array([one.noise_multiplier for one in plan.plans])
    np.testing.assert_allclose(noise / np.sqrt([1.0, 2.0, 8.0]), noise[0], rtol=2e-4)  # all runs are one Gaussian
    # a mixture of equal profiles is that profile, so that each plan has the noise of a single plan
    alone = ja.calibrate_noise_multiplier(6.0, DELTA, 1.0, 1, repetitions=LAW).value
    assert 5.98 < plan.epsilon.upper <= 6.0 and float(alone) == pytest.approx(noise[0], rel=3e-3)


@pytest.mark.slow
def test_the_whole_is_between_selections_of_the_best_and_the_worst_candidate():
    unequal = tuning.MatchedPlan(4.0, DELTA, 1000, LAW, sampling_probability=[0.1, 1.0], steps=[4])
    each = [ja.epsilon(selection.select(one.mechanism, LAW), DELTA) for one in unequal.plans]
    assert each[0].upper != pytest.approx(each[1].upper, rel=1e-3)  # the runs share one (epsilon, delta) alone
    assert min(b.lower for b in each) <= unequal.epsilon.upper <= 1.001 * max(b.upper for b in each)
    assert unequal.epsilon.upper <= 4.0


def test_candidates_are_trained_by_their_own_plans_and_the_winner_tells_which(plan, monkeypatch, tmp_path):
    monkeypatch.setattr(law_of_k.Law, "sample", lambda law, rng=None: 12)
    trained = []

    def seen(loss, optimizer, one, **more):  # a training is compiled anew for each plan and number of candidates
        trained.append(one)
        return lambda params, configs, keys, data, private, trial: (
            params + np.asarray(configs["rate"])[:, None] / one.steps
        )

    monkeypatch.setattr(tuning_run, "side_by_side", seen)
    path = tmp_path / "ledger.jsonl"
    best = tuning.tune(
        lambda w, x: jnp.sum((w - x) ** 2),
        lambda config: optax.sgd(config["rate"]),
        tuning.grid(rate=[0.01, 0.1]),
        np.ones((SIZE, 2), np.float32),
        plan,
        init=lambda key: jnp.zeros(2),
        score=lambda w: -float(np.sum((w - 1.0) ** 2)),
        ledger=path,
        key=bytes(range(32)),
    )
    assert best.plan in plan.plans and {one.steps for one in trained} == {1, 2, 8}
    assert best.epsilon.upper <= 6.0 and best.epsilon.kind == "bound"
    assert Ledger.read(path).epsilon(DELTA).upper == pytest.approx(best.epsilon.upper, rel=1e-3)


def test_refusals():
    make = lambda **changed: tuning.MatchedPlan(
        **{"target_epsilon": 6.0, "target_delta": DELTA, "dataset_size": 9, "repetitions": LAW} | changed
    )
    assert "one of epochs and steps" in refusal(make, sampling_probability=1.0)
    assert "law of K" in refusal(make, repetitions=3, sampling_probability=1.0, steps=1)
    assert "target_epsilon" in refusal(make, target_epsilon=-1.0, sampling_probability=1.0, steps=1)
    assert "must be one number" in refusal(make, target_delta=[DELTA, DELTA], sampling_probability=1.0, steps=1)
