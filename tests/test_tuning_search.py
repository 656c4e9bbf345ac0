"""Adaptive searches, rounds with public winners and several winners are run, and accounted for as such."""

import functools
import json
import math

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import refusal
from training_runs import quick_candidates

import jaxacct as ja
from jaxacct import selection, tuning
from jaxacct.selection import law_of_k
from jaxacct.training import Ledger, Plan
from jaxacct.tuning.private_score import whole

SIZE = 40
DATA = np.ones((SIZE, 2), np.float32)
SPACE = tuning.grid(rate=[0.01, 0.1, 0.5])
KEY = bytes(range(32))
LAW = selection.PointMass(3)
SETTINGS = {"target_delta": 1e-5, "dataset_size": SIZE, "sampling_probability": 1.0, "steps": 2}
PLAN = Plan(noise_multiplier=4.0, repetitions=LAW, **SETTINGS)
RUN = ja.repeat(ja.Gaussian(4.0), 2)
OPTIONS = {"init": lambda key: jnp.zeros(2), "score": lambda w: -float(np.sum((w - 1.0) ** 2)), "key": KEY}


def loss(w, x):
    return jnp.sum((w - x) ** 2)


def optimizer(config):
    return optax.sgd(config["rate"])


def run(space=SPACE, plan=PLAN, **more):
    return tuning.tune(loss, optimizer, space, DATA, plan, **OPTIONS | more)


def in_rounds(plan=PLAN, space=SPACE, update=lambda winners: SPACE, **more):
    return tuning.tune_in_rounds(loss, optimizer, space, DATA, plan, update=update, **OPTIONS | more)


@pytest.fixture(scope="module", autouse=True)
def nothing_compiled():
    with quick_candidates():
        yield


@pytest.fixture
def forced(monkeypatch):
    def force(*counts):
        left = list(counts)
        monkeypatch.setattr(law_of_k.Law, "sample", lambda law, rng=None: left.pop(0) if len(left) > 1 else left[0])

    return force


@functools.cache
def search_plan(**more):
    return tuning.SearchPlan(4.0, 1e-5, SIZE, LAW, 1.0, steps=2, **more)


def spent(path):
    return [x for x in map(json.loads, path.read_text().splitlines()) if x["kind"] == "spend"]


def test_an_adaptive_search_sees_all_that_came_before_and_pays_for_it(tmp_path):
    seen, path = [], tmp_path / "ledger.jsonl"

    def propose(history, key):
        seen.append(history)
        return {"rate": np.float32(0.05) if not history else 2.0 * history[-1].config["rate"]}

    best = run(tuning.Adaptive(propose), ledger=path)
    assert [len(history) for history in seen] == [0, 1, 2]
    rates = [one.config["rate"] for one in seen[2]]
    assert rates == [float(np.float32(0.05)), 2 * float(np.float32(0.05))]
    for one in seen[2]:
        assert one.result.shape == (2,) and one.score == OPTIONS["score"](one.result)
    # everything seen counts: K runs composed, and nothing less
    assert best.candidates == "adaptive" and best.mechanism == selection.select(
        PLAN.mechanism, LAW, candidates="adaptive"
    )
    assert best.epsilon.upper == pytest.approx(float(ja.epsilon(ja.repeat(RUN, 3), 1e-5).upper), rel=1e-3)
    (line,) = spent(path)
    assert "candidates adaptive" in json.dumps(line) and "AdaptiveSelection" in json.dumps(line)
    again = run(tuning.Adaptive(propose))
    np.testing.assert_array_equal(again.params, best.params)


def test_an_adaptive_search_is_refused_by_a_plan_for_i_i_d_candidates_before_anything_is_spent(tmp_path):
    called = []
    search = tuning.Adaptive(lambda history, key: called.append(0) or {"rate": 0.1})
    plan = Plan(target_epsilon=8.0, repetitions=selection.Geometric(0.2), **SETTINGS)
    words = refusal(run, search, plan, ledger=tmp_path / "ledger.jsonl")
    assert "make the plan with candidates='adaptive'" in words and not called
    assert not (tmp_path / "ledger.jsonl").exists()
    assert "'iid' does not hold for an Adaptive search" in refusal(run, search, candidates="iid")
    assert "pays for a public one" in refusal(run, search, pad=3)
    assert "must be a function" in refusal(tuning.Adaptive, 3)
    assert "must give a mapping" in refusal(run, tuning.Adaptive(lambda history, key: 3))


def test_an_adaptive_candidate_that_raises_is_a_nan_and_the_search_goes_on(capfd):
    seen = []

    def propose(history, key):
        seen.append([one.score for one in history])
        return {"x": len(history)}

    def train(config, key):
        if config["x"] == 1:
            raise ValueError("secret")
        return config["x"]

    options = {"target_delta": 1e-5, "score": float, "key": KEY}
    best = tuning.tune_with(train, tuning.Adaptive(propose), RUN, LAW, top=3, **options)
    assert best.params == 2 and [one.params for one in best.winners] == [2, 0]
    assert math.isnan(seen[2][1]) and capfd.readouterr().err == ""
    assert best.mechanism == selection.select(RUN, LAW, candidates="adaptive")


def test_the_best_two_are_released_and_accounted_for(tmp_path):
    path = tmp_path / "ledger.jsonl"
    best = run(top=2, ledger=path)
    assert best.mechanism == selection.select(PLAN.mechanism, LAW, top=2)
    assert best.epsilon.upper == ja.epsilon(best.mechanism, 1e-5).upper and best.epsilon.kind == "bound"
    first, second = best.winners
    assert first.score >= second.score and best.score == first.score and best.config == first.config
    everything = run(top=3).winners
    assert [one.score for one in everything][:2] == [first.score, second.score]
    assert "the best 2" in json.dumps(spent(path)) and "TopSelection" in json.dumps(spent(path))
    assert Ledger.read(path).epsilon(1e-5).upper >= best.epsilon.upper * (1 - 1e-2)


def test_fewer_candidates_than_winners_are_all_released(forced):
    for count in (0, 1, 2):
        forced(count)
        best = run(top=3)
        assert len(best.winners) == count and best.status == ("tuned" if count else "none")


def test_rounds_follow_the_public_winners_and_are_a_composition(tmp_path, forced, coarse_pairs):
    forced(2, 3, 1)
    told, path = [], tmp_path / "ledger.jsonl"

    def update(winners):
        told.append(winners)
        return tuning.grid(rate=[winners[-1].config["rate"], 0.3])

    law = selection.Geometric(0.4)
    plan = Plan(noise_multiplier=4.0, repetitions=law, **SETTINGS)
    best = in_rounds(plan, rounds=3, update=update, ledger=path)
    assert [len(winners) for winners in told] == [1, 2] and len(best.winners) == 3
    assert best.winners[:2] == told[1] and best.score == max(one.score for one in best.winners)
    assert all(one.config["rate"] in (told[i][-1].config["rate"], 0.3) for i, one in enumerate(best.winners[1:]))
    assert best.mechanism == ja.repeat(selection.select(plan.mechanism, law), 3)
    assert best.epsilon.kind == "bound" and best.epsilon.upper == ja.epsilon(best.mechanism, 1e-5).upper
    (line,) = spent(path)
    assert "3 rounds" in json.dumps(line)
    assert len({one.params.tobytes() for one in best.winners}) == 3  # fresh keys in every round


def test_stopping_after_a_round_claims_no_less():
    space = tuning.Adaptive(lambda history, key: {"rate": 0.1})  # its rounds take no time to account for
    best = in_rounds(space=space, rounds=2, update=lambda winners: None)
    assert len(best.winners) == 1
    assert best.epsilon.upper == in_rounds(space=space, rounds=2, update=lambda winners: space).epsilon.upper


@pytest.mark.slow
def test_rounds_beyond_the_target_are_refused_before_anything_is_spent(tmp_path):
    plan = Plan(target_epsilon=8.0, repetitions=selection.Geometric(0.4), **SETTINGS)
    words = refusal(in_rounds, plan, rounds=2, ledger=tmp_path / "ledger.jsonl")
    assert "above the plan's target 8; make a tuning.SearchPlan" in words
    assert not (tmp_path / "ledger.jsonl").exists()
    assert "make a tuning.SearchPlan" in refusal(run, plan=plan, top=2)
    assert "use tuning.tune_in_rounds" in refusal(run, plan=search_plan(rounds=2))


def test_the_space_of_a_later_round_may_not_keep_state():
    class Walk:
        def sample(self, key):
            return {"rate": 0.1}

    plan = Plan(noise_multiplier=4.0, repetitions=selection.PointMass(1), **SETTINGS)
    words = refusal(in_rounds, plan, rounds=2, update=lambda winners: Walk())
    assert "the space of round 2 may keep state" in words
    assert "draws nothing; use tuning.grid" in refusal(
        in_rounds, rounds=2, update=lambda winners: {"rate": [0.1]}, candidates="adaptive"
    )
    declared = in_rounds(plan, rounds=2, update=lambda winners: Walk(), candidates="iid")
    assert declared.candidates == "iid, declared" and len(declared.winners) == 2
    assert "must be a function of the winners" in refusal(in_rounds, rounds=2, update=SPACE)


@pytest.mark.parametrize(
    "more",
    [
        pytest.param({"rounds": 2}, marks=pytest.mark.slow),  # ten seconds: solves for the noise of two selections
        {"top": 2},
        {"candidates": "adaptive"},
        {"rounds": 2, "candidates": "adaptive"},
    ],
    ids=str,
)
def test_a_search_plan_meets_its_target_with_the_whole(more):
    plan = search_plan(**more)
    assert 3.9 <= plan.epsilon.upper <= 4.0
    call = in_rounds if plan.rounds > 1 else run
    best = call(plan=plan)
    assert best.epsilon.upper <= 4.0 and best.plan.noise_multiplier == plan.plans[0].noise_multiplier
    assert len(best.winners) == plan.top * plan.rounds
    assert best.candidates == more.get("candidates", "iid")


@pytest.mark.slow  # the lattice computes two profiles, each of composed selections
def test_a_private_score_of_rounds_costs_its_share():
    score = tuning.PrivateScore(lambda w, x: jnp.exp(-jnp.sum((w - x) ** 2)), np.zeros((7, 2), np.float32))
    assert "give it for several winners or rounds" in refusal(in_rounds, rounds=2, score=score)
    score = tuning.PrivateScore(
        lambda w, x: jnp.exp(-jnp.sum((w - x) ** 2)), np.zeros((7, 2), np.float32), noise_multiplier=1.0
    )
    best = in_rounds(rounds=2, score=score)
    by_score = selection.rounds(ja.Gaussian(1.0), LAW, 2, target_delta=1e-5)
    assert best.epsilon.upper >= ja.epsilon(by_score, 1e-5).upper * (1 - 1e-9)


def test_the_cost_of_rounds_is_a_bound():
    """The old code called it certified where adaptive candidates bound the rounds."""
    cost = whole(ja.Laplace(2.0), selection.PointMass(3), None, 0.1, "add_or_remove_one", count=2)
    assert (cost.epsilon.kind, cost.epsilon.lower) == ("bound", 0.0)
    assert cost.epsilon.upper == ja.epsilon(cost.mechanism, 0.1).upper
