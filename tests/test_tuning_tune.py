"""`tune`: within its budget, the best of K, and nothing that tells K."""

import dataclasses
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from helpers import refusal
from training_runs import quick_candidates, squares

import jaxacct as ja
from jaxacct import selection, tuning
from jaxacct.core.chacha import key_from_bytes
from jaxacct.core.text import outward
from jaxacct.selection import law_of_k
from jaxacct.training import Ledger, Plan, PrivateLoss
from jaxacct.training.run.evaluations import units
from jaxacct.tuning import private_score, tuning_run
from jaxacct.tuning.candidates import selected, side_by_side
from jaxacct.tuning.private_score import noisy, whole, with_noise

SIZE = 40
DATA = np.ones((SIZE, 2), np.float32)
SPACE = tuning.Random({"rate": tuning.LogUniform(0.01, 0.5), "clip_norm": tuning.Choice([0.5, 1.0])})
KEY = bytes(range(32))


def plan_of(law, target=8.0, steps=2):
    return Plan(
        target_epsilon=target,
        target_delta=1e-5,
        dataset_size=SIZE,
        sampling_probability=1.0,
        steps=steps,
        repetitions=law,
    )


def sgd(config):
    return optax.sgd(config["rate"])


def run(plan, space=SPACE, score=lambda w: -float(np.sum((w - 1.0) ** 2)), optimizer=sgd, **more):
    return tuning.tune(squares, optimizer, space, DATA, plan, init=lambda key: jnp.zeros(2), score=score, **more)


@pytest.fixture(scope="module", autouse=True)
def given():
    """What was given to `side_by_side`, which is replaced."""
    with quick_candidates() as given:
        yield given


@pytest.fixture
def forced(monkeypatch):
    """Forces K, whatever the law."""

    def force(count):
        monkeypatch.setattr(law_of_k.Law, "sample", lambda law, rng=None: count)

    return force


GEOMETRIC = plan_of(selection.Geometric(0.1))
TRUNCATED = plan_of(tuning.truncated(selection.Geometric(0.1), 50))


def test_the_whole_meets_its_target(monkeypatch):
    """Candidates are trained here; the other tests need none that learns."""
    monkeypatch.setattr(tuning_run, "side_by_side", side_by_side)
    best = run(GEOMETRIC)
    assert np.all(best.params != 0.0)
    again = ja.epsilon(selection.select(GEOMETRIC.mechanism, selection.Geometric(0.1)), 1e-5)
    assert 7.99 < best.epsilon.upper <= 8.0 and best.epsilon.kind == "certified"
    assert again.lower <= best.epsilon.upper and best.epsilon.lower <= again.upper
    assert ja.epsilon(GEOMETRIC.mechanism, 1e-5).upper < 6.0  # the choice costs the rest of 8


def test_the_best_of_all_candidates_wins(forced):
    """The score function records every score that it gives."""
    seen = []

    def score(w):
        seen.append(float(np.sum(w)))
        return seen[-1]

    forced(5)
    best = run(GEOMETRIC, score=score, key=KEY)
    assert len(seen) == 5 and best.score == max(seen) == pytest.approx(float(np.sum(best.params)))
    assert set(best.config) == {"rate", "clip_norm"} and best.status == "tuned"
    seen.clear()
    forced(2)
    fewer = run(GEOMETRIC, score=score, key=KEY)
    assert len(seen) == 2 and fewer.score == max(seen)  # the same first two candidates
    same = [run(GEOMETRIC, score=score, key=KEY).params for _ in range(2)]
    assert np.array_equal(*same)


def test_a_ruined_candidate_and_a_nan_score_lose(forced):
    forced(5)
    space, ruined = tuning.Random({"rate": tuning.Choice([0.1, 1e30])}), []
    score = lambda w: math.nan if ruined.append(not abs(w[0]) <= 1e3) or ruined[-1] else -1.0
    best = run(GEOMETRIC, space, key=KEY, score=score)
    assert 0 < sum(ruined) < 5
    assert best.config["rate"] == 0.1 and best.score == -1.0 and np.isfinite(best.params).all()
    lost = run(GEOMETRIC, space, key=KEY, score=lambda w: math.nan)
    assert lost.status == "tuned" and math.isnan(lost.score)  # somebody wins, always


def test_what_the_trainer_takes_is_handed_on(given):
    more = {"clip_norm": 2.0, "method": "ghost", "micro_batch": 7, "rngs": True, "trainable": lambda path: path == "w"}
    more["private_loss"] = PrivateLoss(bound=4.0, noise=20.0)
    run(GEOMETRIC, **more)
    assert given[-1] == (squares, GEOMETRIC, more)


class Line(nn.Module):
    normalised: bool = False

    @nn.compact
    def __call__(self, x):
        return nn.Dense(1)(nn.BatchNorm(use_running_average=True)(x) if self.normalised else x)[..., 0]


def distance(output, target):
    return (output - target) ** 2


def of_line(params, example):
    return distance(Line().apply(params, example[0]), example[1])


@pytest.mark.parametrize("tune, more", [(tuning.tune, {}), (tuning.tune_in_rounds, {"update": list, "rounds": 1})])
def test_a_linen_module_is_tuned_as_a_loss_function_is(tune, more, given):
    law, module = selection.PointMass(2), Line()
    plan = Plan(None, 1e-5, SIZE, sampling_probability=1.0, steps=2, noise_multiplier=9.0, repetitions=law)
    rest = sgd, tuning.grid(rate=[0.1, 0.2]), (DATA, DATA[:, 0]), plan
    more = {"key": KEY, "score": lambda w: -float(np.sum(w["params"]["Dense_0"]["kernel"] ** 2)), **more}
    of_module = tune(module, *rest, loss=distance, **more)
    of_function = tune(of_line, *rest, init=lambda key: module.init({"params": key}, DATA[0]), **more)
    assert of_module.config == of_function.config
    jax.tree.map(np.testing.assert_array_equal, of_module.params, of_function.params)
    losses = [float(loss(of_module.params, (DATA[0], 3.0))) for loss, *_ in given[-2:]]
    assert losses[0] == losses[1] > 0.0


def test_what_is_no_linen_module_or_lacks_a_start_is_refused():
    data = DATA, DATA[:, 0]
    ask = lambda *given, **more: refusal(tuning.tune, *given, sgd, SPACE, data, GEOMETRIC, score=lambda w: 0.0, **more)
    assert "init is missing" in ask(Line())
    assert "must be linen's" in ask(nnx.Linear(2, 1, rngs=nnx.Rngs(0)), loss=distance)
    assert "batch_stats" in ask(Line(normalised=True), loss=distance)


def test_ties_go_to_the_candidate_drawn_first(forced):
    space = tuning.Random({"rate": tuning.LogUniform(0.01, 0.5), "name": tuning.Choice(["sgd", "adam"])})
    make = lambda c: optax.sgd(c["rate"]) if c["name"] == "sgd" else optax.adam(c["rate"])
    configs = []
    for count in (1, 4):
        forced(count)
        configs.append(run(GEOMETRIC, space, lambda w: 0.0, make, key=KEY).config)
    assert configs[0] == configs[1]  # though candidates are trained in groups, one for each name


def test_no_candidate_at_all_looks_at_no_data(forced):
    forced(0)
    plan = plan_of(selection.Poisson(3.0))
    ends = [run(plan, key=KEY, score=s) for s in (lambda w: 1.0, lambda w: -1.0)]
    for end in ends:
        assert end.status == "none" and math.isnan(end.score) and np.array_equal(end.params, np.zeros(2))
    assert ends[0].config == ends[1].config


@pytest.mark.parametrize("pad", [None, 50])
def test_everything_that_is_left_looks_the_same_for_1_and_many_candidates(forced, tmp_path, capfd, pad):
    plan = TRUNCATED if pad else GEOMETRIC
    left = []
    for count in (1, 50 if pad else 20):
        forced(count)
        folder = tmp_path / str(count)
        folder.mkdir()
        best = run(plan, ledger=folder / "ledger.jsonl", pad=pad)
        shown = capfd.readouterr()
        files = sorted((path.name, path.stat().st_size) for path in folder.iterdir())
        lines = [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()]
        shape = [sorted(line) for line in lines]
        leaves = [(np.shape(x), np.asarray(x).dtype) for x in jax.tree_util.tree_leaves(best.params)]
        fields = sorted(vars(best)), sorted(best.config), type(best.score), best.status, best.epsilon.upper
        left.append((shown, files, shape, leaves, fields, ja.interop.to_json(best.mechanism)))
    assert left[0] == left[1]
    assert left[0][0] == ("", "")


def test_one_entry_is_on_the_disk_before_anything_is_trained(forced, tmp_path):
    forced(2)
    path = tmp_path / "ledger.jsonl"

    def score(w):
        held = Ledger.read(path)
        assert held.epsilon(1e-5).upper > 7.9
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(GEOMETRIC, score=score, ledger=path)
    kinds = [json.loads(line)["kind"] for line in path.read_text().splitlines()]
    assert kinds.count("spend") == 1 and "step" not in kinds
    assert Ledger.read(path).epsilon(1e-5).upper <= 8.0


def test_a_second_tuning_into_a_ledger_that_has_no_room_for_it_is_refused(tmp_path):
    path, plan = tmp_path / "ledger.jsonl", plan_of(selection.PointMass(1))
    run(plan, ledger=path)
    before = path.read_bytes()
    words = refusal(run, plan, ledger=path)
    assert (
        "above the plan's target 8.0;" in words
        and "a tuning counts, finished or not" in words
        and path.read_bytes() == before
    )
    # a plan without a target of its own only reports
    free = Plan.of(plan.segments, plan, target_epsilon=None)
    run(free, ledger=path)
    assert len(path.read_bytes().splitlines()) == len(before.splitlines()) + 1


def test_a_release_is_shown_in_one_line_with_its_claim_and_without_parameters(forced):
    forced(2)
    best = tuning.tune(
        squares, sgd, SPACE, DATA, GEOMETRIC, init=lambda key: jnp.zeros(2), score=lambda w: 0.25, candidates="iid"
    )
    shown, (winner,) = repr(best), best.winners
    claim = outward(best.epsilon.upper, ".7g", up=True)
    assert shown == f"Tuned(tuned, {best.config!r}, score 0.25, epsilon <= {claim} at delta 1e-05, 2 parameters)"
    assert repr(winner) == f"Winner({best.config!r}, score 0.25, 2 parameters)"
    secret = "-41.125"  # a number of the parameters
    tried = tuning.Tried(best.config, 0.25, np.full(2, float(secret)))
    one = dataclasses.replace(best, params=np.full(2, float(secret)), candidates="iid, declared", relation="zero_out")
    assert secret not in repr(one) + repr(tried) and "zero_out, candidates iid, declared, 2 parameters" in repr(one)
    assert "epsilon" not in repr(dataclasses.replace(one, target_delta=None))


def test_padding_needs_a_law_that_ends(forced):
    assert "use tuning.truncated(law, 10)" in refusal(run, GEOMETRIC, pad=10)
    law = tuning.truncated(selection.Geometric(0.1), 10)
    exact = 0.9 ** np.arange(10) * 0.1
    np.testing.assert_allclose(law.probability(np.arange(1, 11)), exact / exact.sum(), rtol=1e-12)
    seen = []
    forced(3)
    best = run(TRUNCATED, score=lambda w: seen.append(w) or float(len(seen)), pad=50, key=KEY)
    assert len(seen) == 50 and best.score == 3.0  # those beyond K count for nothing


def test_plans_and_data_that_do_not_fit_are_refused():
    alone = Plan(target_epsilon=8.0, target_delta=1e-5, dataset_size=SIZE, sampling_probability=1.0, steps=2)
    assert "plan has no repetitions" in refusal(run, alone)
    size = SIZE + 1
    segments = [each._replace(expected_batch_size=each.sampling_probability * size) for each in GEOMETRIC.segments]
    other = Plan.of(segments, GEOMETRIC, dataset_size=size)
    assert "must be (41,)" in refusal(run, other)
    assert "key must be 32 bytes" in refusal(run, GEOMETRIC, key=b"short")
    assert "score = 3 must be a function" in refusal(run, GEOMETRIC, score=3)
    assert "plan has no repetitions" in refusal(run, 3)
    assert "make_optimizer = " in refusal(run, GEOMETRIC, optimizer=optax.sgd(0.1))


@pytest.mark.parametrize("space", [{"rate": [0.1]}, 3, None, tuning.Random], ids=repr)
def test_what_is_no_space_is_refused_at_once(space):
    words = "draws nothing; use tuning.grid"
    assert words in refusal(run, GEOMETRIC, space)
    one = tuning.tune_with, lambda config, key: 0.0, space, ja.Gaussian(2.0), selection.PointMass(2)
    assert words in refusal(*one, target_delta=1e-5, score=float)


def test_a_score_on_private_validation_data_costs_no_more_than_the_worse_of_both(monkeypatch, coarse_pairs):
    score = tuning.PrivateScore(lambda w, x: x > w[0], np.linspace(-1.0, 1.0, 30))
    best = run(GEOMETRIC, score=score)
    noise = with_noise(score, GEOMETRIC, "iid", 1, 1).noise_multiplier
    alone = ja.epsilon(selection.select(ja.Gaussian(noise), selection.Geometric(0.1)), 1e-5)
    assert 7.99 < alone.upper <= 8.0 and best.epsilon.upper <= 8.0
    # a ledger claims this epsilon; as the larger of two upper bounds it has no lower end
    found = ja.epsilon(best.mechanism, 1e-5)
    assert 7.99 < found.upper <= best.epsilon.upper * (1 + 1e-9) and found.lower == 0.0 and found.kind == "bound"
    few = lambda _, at, **more: ja.PrivacyProfile(at, np.ones_like(at))
    monkeypatch.setattr(private_score, "candidates_profile", few)  # takes seconds
    louder = tuning.PrivateScore(score.value, score.data, noise_multiplier=0.9 * noise)
    assert "above the plan's target" in refusal(run, GEOMETRIC, score=louder)


def test_a_score_on_the_training_data_is_composed_with_every_candidate():
    score = tuning.PrivateScore(lambda w, x: x[0] > w[0], DATA, on="training", noise_multiplier=5.0)
    law = selection.Geometric(0.1)
    assert "above the plan's target" in refusal(run, GEOMETRIC, score=score)
    cost = whole(GEOMETRIC.mechanism, law, score, 1e-5, "add_or_remove_one")
    both = math.sqrt(2.0 / GEOMETRIC.noise_multiplier**2 + 1 / 25.0)
    direct = ja.epsilon(selection.select(ja.Gaussian(1.0 / both), law), 1e-5)
    assert cost.epsilon.upper == pytest.approx(float(direct.upper), rel=1e-4)


def test_the_noise_of_a_private_score_is_there():
    value = lambda w, x: x > w
    count = jax.jit(lambda data: units(value, 4.0, data, 2.0**-20))(np.arange(10.0))
    keys = [key_from_bytes(number.to_bytes(32)) for number in range(1, 201)]
    found = np.array([noisy(count, key, 3.0, 2.0**-20) for key in keys])
    assert abs(found.mean() - 5.0) < 4.5 * 3.0 / math.sqrt(200)
    assert abs(found.std() / 3.0 - 1.0) < 4.5 / math.sqrt(400)


def test_one_record_moves_a_count_by_at_most_one_whatever_the_size():
    """At a sum of 2^29 units of 2^-10 the spacing of float32 doubles. Rounding there once made a move of 1 1.03125."""
    parts = jax.jit(lambda data: units(lambda _, x: x, 0.0, data, 2.0**-20))
    count = lambda data: np.dot(np.asarray(parts(data), np.int64), [2**10, 1]) * 2.0**-20
    data = np.zeros(2**20, np.float32)
    data[1 : 2**19] = 1.0
    data[-1] = 33 / 1024
    without = float(count(data))
    data[0] = 1.0
    assert float(count(data)) - without == 1.0


def test_tune_with_a_function_of_ones_own(forced):
    forced(7)
    law = selection.Geometric(0.2)
    for declared, word in ((None, "adaptive"), ("iid", "iid, declared")):
        calls = []
        best = tuning.tune_with(
            lambda config, key, calls=calls: calls.append(config) or config["x"],
            tuning.grid(x=list(range(50))),
            ja.Gaussian(2.0),
            law,
            target_delta=1e-5,
            score=float,
            key=KEY,
            **({"candidates": declared} if declared else {}),
        )
        assert len(calls) == 7 and best.params == max(c["x"] for c in calls) == best.config["x"]
        chosen = selection.select(ja.Gaussian(2.0), law, candidates=declared or "adaptive")
        assert best.epsilon.upper == ja.epsilon(chosen, 1e-5).upper
        assert best.candidates == word and best.mechanism == chosen


def test_chunks_do_not_change_a_candidate(forced, monkeypatch):
    forced(5)
    ends = []
    for together in (2, 16):
        monkeypatch.setattr(selected, "__defaults__", (together, None))
        ends.append(run(GEOMETRIC, key=KEY))
    assert ends[0].config == ends[1].config
    np.testing.assert_allclose(ends[0].params, ends[1].params, rtol=1e-5)
