"""What a tuning assumes of its candidates, scores and rounding is declared, and enforced where it can be."""

import functools
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import refusal
from training_runs import quick_candidates, squares

import jaxacct as ja
from jaxacct import selection, strategies, tuning
from jaxacct.core.progress import Progress
from jaxacct.selection import law_of_k
from jaxacct.training import Ledger, Plan, PrivateLoss
from jaxacct.training.run.evaluations import units
from jaxacct.tuning import tuning_run
from jaxacct.tuning.candidates import best_few, rank, side_by_side
from jaxacct.tuning.search_spaces import draws_alike

SIZE = 40
DATA = np.ones((SIZE, 2), np.float32)
SPACE = tuning.Random({"rate": tuning.LogUniform(0.01, 0.5)})
KEY = bytes(range(32))
LAW = selection.Binomial(2, 0.75)
SETTINGS = {"target_delta": 1e-5, "dataset_size": SIZE, "sampling_probability": 1.0, "steps": 2, "repetitions": LAW}


class Walk:
    """A list tried in order: not i.i.d., though every draw has a key of its own."""

    def __init__(self):
        self.place = -1

    def sample(self, key):
        self.place += 1
        return {"rate": [0.01, 0.1, 0.5][self.place % 3]}


@pytest.fixture(scope="module")
def plans():
    return {word: Plan(target_epsilon=8.0, candidates=word, **SETTINGS) for word in ("iid", "adaptive")}


@pytest.fixture
def forced(monkeypatch):
    def force(count):
        monkeypatch.setattr(law_of_k.Law, "sample", lambda law, rng=None: count)

    return force


def sgd(config):
    return optax.sgd(config["rate"])


@pytest.fixture(scope="module", autouse=True)
def nothing_compiled():
    with quick_candidates():
        yield


def run(plan, space=SPACE, score=lambda w: -float(np.sum((w - 1.0) ** 2)), **more):
    return tuning.tune(squares, sgd, space, DATA, plan, init=lambda key: jnp.zeros(2), score=score, **more)


def with_function(train, score=float, **more):
    more = {"target_delta": 1e-5, "key": KEY} | more
    return tuning.tune_with(train, tuning.grid(x=list(range(8))), ja.Gaussian(2.0), LAW, score=score, **more)


@pytest.mark.parametrize(
    "more",
    [
        {"clip_norm": -1.0},
        {"method": "fast"},
        {"micro_batch": 0},
        {"private_loss": PrivateLoss(bound=1.0, noise=0.01)},
        {"plan": {"unit": "user"}},
        {"plan": {"noise": strategies.PrefixSum(), "sampling": "fixed_order"}},
    ],
    ids=str,
)
def test_what_cannot_be_trained_is_refused_before_it_is_paid_for(tmp_path, more):
    given = SETTINGS | more.pop("plan", {})
    if "noise" in given:
        given = given | {"sampling_probability": None, "expected_batch_size": 10}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuning_run, "side_by_side", side_by_side)
        refusal(run, Plan(noise_multiplier=5.0, **given), ledger=tmp_path / "ledger", **more)
    assert not (tmp_path / "ledger").exists()


@pytest.mark.parametrize("kind", ["relation", "unit"])
def test_a_tuning_for_other_neighbours_than_the_ledger_is_refused(tmp_path, kind, monkeypatch):
    """A guarantee of fixed batches does not cover added records, and a guarantee for records does not cover users."""
    monkeypatch.setattr(tuning_run, "whole", None)  # refused before the cost is computed, which takes seconds
    asked = {"unit": "user"} if kind == "unit" else {}
    if kind == "relation":
        batches = {"sampling_probability": None, "sampling": "fixed_batches", "expected_batch_size": 10}
        plan = Plan(noise_multiplier=3.0, **SETTINGS | batches)
    else:
        plan = Plan(noise_multiplier=3.0, **SETTINGS)
    path, once = tmp_path / "ledger", SETTINGS | {"repetitions": None}
    with Ledger.create(path, Plan(noise_multiplier=20.0, **once, **asked)) as ledger:
        ledger.record(0, "key", "batch", 20.0, 1.0)
        before = float(ledger.epsilon(1e-5).upper)
    score = tuning.PrivateScore(lambda w, x: x[0] > 0.0, DATA, noise_multiplier=6.0)
    words = refusal(run, plan, tuning.grid(rate=[0.1]), ledger=path, score=score)
    assert f"{kind} = " in words and float(Ledger.read(path).epsilon(1e-5).upper) == before


def test_tune_with_notes_nothing_in_a_ledger_of_another_relation(tmp_path):
    """A run that is 0.5-DP when a record is replaced may not be when one is added, which is the ledger's relation."""
    path, once = tmp_path / "ledger", SETTINGS | {"repetitions": None}
    law, asked = selection.PointMass(2), {"target_delta": 1e-5, "score": float, "relation": "replace_one"}
    with Ledger.create(path, Plan(noise_multiplier=20.0, **once)) as ledger:
        given = lambda config, key: 0.0, tuning.grid(rate=[0.1]), ja.PureDP(0.5), law
        assert "relation = 'replace_one'" in refusal(tuning.tune_with, *given, **asked, ledger=ledger)
        assert not ledger.runs[ledger.run].noted
    assert "must be an open Ledger" in refusal(tuning.tune_with, *given, **asked, ledger=path)


def test_the_librarys_spaces_draw_alike_and_others_do_not():
    class Sorted(tuning.Grid):
        pass

    class Own(tuning.Distribution):
        def at(self, bits):
            return 1.0

    assert draws_alike(SPACE) and draws_alike(tuning.grid(rate=[0.1, 0.2]))
    for other in (Sorted([{"rate": 0.1}]), tuning.Random({"rate": Own()}), Walk()):
        assert not draws_alike(other)


def test_a_space_that_keeps_state_is_refused_by_a_plan_for_i_i_d_candidates(plans, tmp_path):
    words = refusal(run, plans["iid"], Walk(), ledger=tmp_path / "ledger.jsonl")
    assert "make the plan with candidates='adaptive', or declare candidates='iid'" in words and "target 8" in words
    assert not (tmp_path / "ledger.jsonl").exists()  # before anything is spent


@pytest.mark.parametrize(
    ("planned", "space", "declared", "word"),
    [
        ("iid", SPACE, None, "iid"),
        ("iid", Walk(), "iid", "iid, declared"),
        ("adaptive", Walk(), None, "adaptive"),
        pytest.param("adaptive", SPACE, None, "adaptive", marks=pytest.mark.slow),
        pytest.param("adaptive", SPACE, "iid", "iid", marks=pytest.mark.slow),
    ],
)
def test_the_claim_is_for_what_was_declared_and_says_so(plans, forced, tmp_path, planned, space, declared, word):
    forced(2)
    plan, path = plans[planned], tmp_path / "ledger.jsonl"
    best = run(plan, space, candidates=declared, ledger=path)
    kind = word.split(",")[0]
    chosen = selection.select(plan.mechanism, LAW, candidates=kind)
    again = ja.epsilon(chosen, 1e-5)
    assert best.candidates == word and best.mechanism == chosen
    assert again.lower <= best.epsilon.upper <= 8.0 and best.epsilon.lower <= again.upper
    (line,) = [x for x in map(json.loads, path.read_text().splitlines()) if x["kind"] == "spend"]
    assert f"candidates {word}" in json.dumps(line)
    assert ('"AdaptiveSelection"' in json.dumps(line)) == (kind == "adaptive")
    assert Ledger.read(path).epsilon(1e-5).upper >= again.lower


def test_a_plan_says_what_it_is_for_and_old_documents_are_i_i_d(plans):
    assert plans["adaptive"].noise_multiplier > plans["iid"].noise_multiplier
    for plan in plans.values():
        assert plan.epsilon.upper <= 8.0 and Plan.from_json(plan.to_json()) == plan
    assert "candidates" not in json.loads(plans["iid"].to_json())
    assert Plan.from_json(plans["iid"].to_json()).candidates == "iid"
    text = plans["adaptive"].to_json()
    assert Plan.from_json(text).candidates == "adaptive"
    assert "candidates = 'some'" in refusal(Plan.from_json, text.replace('"adaptive"', '"some"'))


def test_nan_ranks_below_minus_infinity():
    scores = [-math.inf, math.nan, 0.0, math.nan, -math.inf, math.inf]
    order = sorted(range(6), key=lambda number: rank(scores[number], number))
    assert order == [3, 1, 4, 0, 2, 5]
    best = with_function(lambda config, key: config["x"], lambda x: math.nan, candidates="iid", pad=None)
    assert math.isnan(best.score)


def test_minus_infinity_beats_a_nan_that_was_drawn_first(forced):
    forced(2)
    seen = []
    best = with_function(lambda config, key: seen.append(0) or len(seen), lambda x: math.nan if x == 1 else -math.inf)
    assert best.params == 2 and best.score == -math.inf


@pytest.mark.parametrize("where", ["train", "score", "text"])
def test_an_exception_is_a_nan_and_shows_nothing(forced, where, capfd):
    forced(5)
    calls = []

    def train(config, key):
        calls.append(config["x"])
        if where == "train" and len(calls) != 3:
            raise ValueError(f"secret {len(calls)}")
        return len(calls)

    def score(x):
        if where == "score" and x != 3:
            raise RuntimeError("secret")
        return "no number" if where == "text" and x != 3 else -math.inf

    best = with_function(train, score)
    assert len(calls) == 5 and best.params == 3 and best.score == -math.inf and best.status == "tuned"
    assert capfd.readouterr() == ("", "")


def test_a_winner_that_raised_is_as_if_none_was_drawn(forced):
    ends = []
    for count in (0, 4):
        forced(count)
        ends.append(with_function(lambda config, key: 1 / 0))
    for end in ends:
        assert end.params is None and end.status == "none" and math.isnan(end.score)
    assert ends[0].config == ends[1].config


@pytest.mark.parametrize("stop", [KeyboardInterrupt, SystemExit])
def test_what_stops_a_program_stops_it(forced, stop):
    forced(2)

    def train(config, key):
        raise stop

    with pytest.raises(stop):
        with_function(train)


@pytest.mark.parametrize("best", [1, 3, 4])
def test_side_by_side_one_candidate_that_raises_leaves_the_others_as_they_are(best):
    sizes = []

    def together(numbers):
        sizes.append(len(numbers))
        if 2 in numbers:
            raise FloatingPointError("secret")
        return [10.0 * number for number in numbers]

    value, bar = lambda x, number: -abs(number - best), Progress(6, False)
    (found,) = best_few(["alike"] * 6, lambda kind: together, value, 6, 1, bar, together=4)
    assert found == (best, 10.0 * best, 0) and set(sizes) == {4}  # every program has the same shapes


@functools.cache
def program(unit):
    return jax.jit(lambda data: units(lambda _, x: x, 0.0, data, unit))


def exact_count(values, unit=2.0**-20):
    upper, lower = program(unit)(values)
    return (int(upper) * 2**10 + int(lower)) * unit


def test_one_record_more_moves_a_count_by_at_most_one_whatever_it_is():
    """The unit once depended on the number of records: a 0 after 2^19 records of 2^-5 made the count fall by 2^14."""
    data = np.full(2**19, 2.0**-5, np.float32)
    count = float(exact_count(data))
    assert count == 2.0**14
    for extra in (0.0, 1.0, 0.3):
        moved = float(exact_count(np.append(data, np.float32(extra)))) - count
        assert 0.0 <= moved <= 1.0 and abs(moved - extra) <= 2.0**-21


@pytest.mark.parametrize("size", [1, 255, 256, 257, 1000])
def test_counts_are_exact_sums_of_rounded_values(size):
    values = np.random.default_rng(size).uniform(-0.2, 1.2, size).astype(np.float32)
    values[::7] = np.nan
    clipped = np.clip(np.nan_to_num(values, nan=0.0), 0.0, 1.0).astype(np.float64)
    exact = np.sum(np.rint(clipped * 2.0**20).astype(np.int64))
    assert abs(float(exact_count(values)) * 2.0**20 - exact) < 1e-9
    assert abs(exact_count(values, 0.25) * 4.0 - np.sum(np.rint(clipped * 4.0))) < 1e-9


def test_the_largest_counts_are_exact():
    full = np.full(2**20, 1.0, np.float32)
    assert float(exact_count(full)) == 2.0**20
    assert float(exact_count(np.float32(1.0 - 2.0**-20) * full)) == 2.0**20 - 1.0
    assert float(exact_count(np.append(full[:-1], np.float32(2.0**-20)))) == 2.0**20 - 1.0 + 2.0**-20


def test_the_unit_is_declared():
    make = lambda unit: tuning.PrivateScore(lambda w, x: x, np.arange(3.0), noise_multiplier=1.0, unit=unit)
    assert make(2.0**-10).unit == 2.0**-10 and tuning.PrivateScore(None, np.arange(3.0)).unit == 2.0**-20
    for unit in (0.3, 2.0, 2.0**-21, 0.0, math.nan):
        assert "must be a power of two from 2^-20 to 1" in refusal(make, unit)
