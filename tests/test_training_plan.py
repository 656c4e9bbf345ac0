"""Plans: what they solve for against closed forms and dp_accounting, schedules, sampling kinds, and refusals."""

import importlib
import json
import math
from collections import Counter

import dp_accounting
import numpy as np
import pytest
from dp_accounting import pld as peer
from helpers import doctests_of, refusal
from hypothesis import given, settings
from hypothesis import strategies as st
from training_cases import DELTA, FIXED, FULL, gaussian_epsilon

import jaxacct as ja
from jaxacct import selection
from jaxacct.training import Ledger, Plan, Segment
from jaxacct.training.plan.segments import stand_ins
from jaxacct.training.step.step_mechanisms import Release

MODULES = ("plan.plan", "ledger.ledger")


def mu_of(plan):
    """mu of a plan whose batches are all of the data."""
    return math.sqrt(sum(s.steps / s.noise_multiplier**2 for s in plan.segments))


@pytest.mark.parametrize("module", MODULES)
def test_doctests(module):
    assert doctests_of(importlib.import_module(f"jaxacct.training.{module}")) > 0


# What is left open


@pytest.mark.parametrize("target", [0.05, 0.5, 3.0, 20.0])
def test_the_noise_is_that_of_the_closed_form(target):
    plan = Plan(target_epsilon=target, **FULL, steps=30)
    assert target - 1e-4 <= gaussian_epsilon(math.sqrt(30) / plan.noise_multiplier) <= target * (1 + 1e-9)
    assert plan.epsilon.upper <= target and plan.within and plan.epochs == 30.0 and plan.expected_batch_size == 1000


def test_the_steps_are_the_largest_number_that_holds():
    plan = Plan(target_epsilon=3.0, **FULL, noise_multiplier=5.0)
    assert gaussian_epsilon(math.sqrt(plan.steps) / 5.0) <= 3.0 < gaussian_epsilon(math.sqrt(plan.steps + 1) / 5.0)


def test_the_rate_is_the_largest_that_holds():
    """The size of fixed batches is the largest that meets the target, which the test finds by trying every size."""
    settings = {**FIXED, "noise_multiplier": 5.0, "steps": 90}
    plan = Plan(target_epsilon=3.0, **settings)
    held = [b for b in range(1, 1001) if gaussian_epsilon(math.sqrt(math.ceil(90 / math.ceil(1000 / b))) / 5.0) <= 3.0]
    assert plan.expected_batch_size == max(held) and plan.sampling_probability == max(held) / 1000


def test_steps_are_the_ceiling_of_epochs_times_data_over_batch():
    plan = Plan(target_delta=DELTA, dataset_size=1001, expected_batch_size=10, epochs=3, noise_multiplier=1.0)
    assert plan.steps == 301 and plan.epochs == pytest.approx(3010 / 1001)
    assert plan.at(300) == Segment(0, 301, 1.0, 10 / 1001, 10.0) == plan.segments[0]


def test_poisson_noise_against_dp_accounting():
    plan = Plan(target_epsilon=2.0, target_delta=DELTA, dataset_size=500, expected_batch_size=100, steps=60)
    assert 2.0 - 1e-4 <= plan.epsilon.upper <= 2.0
    event = dp_accounting.PoissonSampledDpEvent(0.2, dp_accounting.GaussianDpEvent(plan.noise_multiplier))
    accountant = peer.PLDAccountant(value_discretization_interval=1e-3)
    accountant.compose(dp_accounting.SelfComposedDpEvent(event, 60))
    assert 0.0 <= accountant.get_epsilon(DELTA) - plan.epsilon.upper <= 1e-4  # dp_accounting rounds up
    assert plan.mechanism == ja.dp_sgd(plan.noise_multiplier, 0.2, 60)


@pytest.mark.slow
@pytest.mark.parametrize("left_open", ["steps", "sampling_probability", "epochs and rate"])
def test_poisson_steps_and_rates_hold_and_no_more_would(left_open):
    given = {"target_epsilon": 2.0, "target_delta": DELTA, "dataset_size": 500, "noise_multiplier": 3.0}
    if left_open == "steps":
        plan = Plan(**given, sampling_probability=0.2)
        more = ja.dp_sgd(3.0, 0.2, plan.steps + 1)
    elif left_open == "epochs and rate":
        plan = Plan(**given, epochs=10)
        more = ja.dp_sgd(3.0, plan.sampling_probability * 1.01, plan.steps)
        assert plan.steps == math.ceil(10 / plan.sampling_probability)
    else:
        plan = Plan(**given, steps=60)
        more = ja.dp_sgd(3.0, plan.sampling_probability * 1.001, 60)
    assert plan.epsilon.upper <= 2.0 < ja.epsilon(more, DELTA).upper


def test_with_nothing_open_epsilon_is_reported():
    plan = Plan(**FULL, steps=9, noise_multiplier=4.0)
    assert plan.epsilon.upper == pytest.approx(gaussian_epsilon(0.75), rel=1e-6) and plan.epsilon.kind == "certified"
    assert plan.target_epsilon is None and plan.within


# Schedules


def test_a_schedule_per_step_and_one_in_pieces_are_the_same():
    factors = [1.0] * 10 + [2.0] * 20
    per_step = Plan(target_epsilon=2.0, **FULL, steps=30, noise_schedule=factors)
    for pieces in ([(10, 1.0), (None, 2.0)], [(10, 1.0), (30, 2.0)]):
        assert Plan(target_epsilon=2.0, **FULL, steps=30, noise_schedule=pieces) == per_step
    assert Plan(target_epsilon=2.0, **FULL, steps=30, noise_schedule=np.array(factors)) == per_step
    first, second = per_step.segments
    assert (first.steps, second.start, second.steps) == (10, 10, 20)
    assert second.noise_multiplier == 2 * first.noise_multiplier == 2 * per_step.noise_multiplier
    assert 2.0 - 1e-4 <= gaussian_epsilon(mu_of(per_step)) <= 2.0
    assert [per_step.at(step) for step in (0, 9, 10, 29)] == [first, first, second, second]


@pytest.mark.slow
def test_a_thousand_different_steps():
    factors = np.geomspace(1.0, 3.0, 1000)
    plan = Plan(target_epsilon=2.0, **FULL, steps=1000, noise_schedule=factors)
    assert len(plan.segments) == 1000
    assert 2.0 - 1e-4 <= gaussian_epsilon(math.sqrt(np.sum((plan.noise_multiplier * factors) ** -2.0))) <= 2.0


def test_batch_and_noise_schedules_together():
    plan = Plan(
        **{**FULL, "sampling_probability": None},
        epochs=11,
        noise_multiplier=3.0,
        noise_schedule=[(6, 1.0), (None, 0.5)],
        batch_schedule=[(4, 1000.0), (8, 500.0), (None, 100.0)],
    )
    # 4 steps of 1000, 4 of 500, and 50 of 100 are 11 epochs
    rows = [(0, 4, 3.0, 1.0, 1000.0), (4, 2, 3.0, 0.5, 500.0), (6, 2, 1.5, 0.5, 500.0), (8, 50, 1.5, 0.1, 100.0)]
    assert plan.segments == tuple(Segment(*row) for row in rows)
    assert plan.steps == 58 and plan.expected_batch_size == pytest.approx(11_000 / 58)
    assert plan.mechanism == ja.compose(*(ja.dp_sgd(s[2], s[3], s[1]) for s in rows))


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_a_pass_of_fixed_batches_costs_its_least_noise(data):
    """After any number of steps, each pass counts once, at the least noise that it has had so far."""
    size, batch = data.draw(st.integers(1, 60)), data.draw(st.integers(1, 20))
    batch = min(batch, size)
    steps = data.draw(st.integers(1, 40))
    noise = data.draw(st.lists(st.sampled_from([1.0, 2.0, 3.0]), min_size=steps, max_size=steps))
    plan = Plan(
        target_delta=DELTA, dataset_size=size, expected_batch_size=batch, steps=steps, noise_multiplier=1.0,
        noise_schedule=noise, sampling="fixed_batches",
    )  # fmt: skip
    length = math.ceil(size / batch)
    worst = sum(max(s**-2 for s in noise[a : a + length]) for a in range(0, steps, length))
    until = data.draw(st.integers(0, steps))
    so_far = sum(max(s**-2 for s in noise[a : min(a + length, until)]) for a in range(0, until, length))
    for step, cost in ((steps, worst), (until, so_far)):
        counts = plan.releases_after(step)
        assert sum(n * r.noise_multiplier**-2 for r, n in counts.items()) == pytest.approx(cost, abs=1e-12)
        assert all(r.sampling_probability == 1.0 for r in counts)
    at = data.draw(st.integers(0, steps - 1))
    assert plan.pass_of(at) == (at // length, at // length * length, min((at // length + 1) * length, steps))


def test_a_new_batch_size_begins_a_new_pass():
    plan = Plan(**FIXED, steps=10, noise_multiplier=2.0, batch_schedule=[(6, 250), (None, 500)])
    assert sorted({plan.pass_of(at)[1:] for at in range(10)}) == [(0, 4), (4, 6), (6, 8), (8, 10)]
    assert plan.epsilon.upper == pytest.approx(gaussian_epsilon(1.0), rel=1e-6)


# Ways of sampling


def test_fixed_batches_are_not_amplified():
    plan = Plan(target_epsilon=1.0, **FIXED, expected_batch_size=10, epochs=7)
    assert plan.steps == 700 and 1.0 - 1e-4 <= gaussian_epsilon(math.sqrt(7) / plan.noise_multiplier) <= 1.0
    twice = Plan(target_epsilon=1.0, **FIXED, expected_batch_size=10, epochs=7, relation="replace_one")
    assert twice.noise_multiplier == pytest.approx(2 * plan.noise_multiplier, rel=1e-4)
    assert "has no passes" in refusal(Plan(**FULL, steps=1, noise_multiplier=1.0).pass_of, 0)


def test_without_replacement_is_accounted_as_such():
    given = {"target_delta": DELTA, "dataset_size": 100, "expected_batch_size": 20, "sampling": "without_replacement"}
    plan = Plan(**given, steps=60, noise_multiplier=5.0)
    assert plan.mechanism == ja.repeat(ja.SampledWithoutReplacement(ja.Gaussian(5.0), 0.2), 60)
    assert Plan(**given, steps=60, noise_multiplier=5.0, relation="replace_one").relation == "replace_one"
    given_rate = given | {"expected_batch_size": None, "sampling_probability": 0.2 - 1e-12}
    drawn = Plan(**given_rate, steps=1, noise_multiplier=5.0)
    assert (drawn.sampling_probability, drawn.expected_batch_size) == (0.2, 20.0)  # the rate of the batch that is drawn
    # Poisson sampling with half the noise has the same dominating pair (sampled_batches.py)
    assert plan.epsilon.upper == pytest.approx(float(ja.epsilon(ja.dp_sgd(2.5, 0.2, 60), DELTA).upper), rel=1e-6)


@pytest.mark.slow
def test_without_replacement_is_solved_under_replacement():
    given = {"target_delta": DELTA, "dataset_size": 100, "sampling": "without_replacement", "relation": "replace_one"}
    plan = Plan(target_epsilon=2.0, **given, expected_batch_size=20, steps=20)
    assert 2.0 - 1e-4 <= plan.epsilon.upper <= 2.0 and plan.epsilon.kind == "bound"
    size = Plan(target_epsilon=2.0, **given, noise_multiplier=plan.noise_multiplier, steps=20).expected_batch_size
    assert size == 20


# Epsilon on the way


def test_the_curve_and_the_live_epsilon_are_safe():
    plan = Plan(target_epsilon=3.0, **FULL, steps=200, noise_schedule=[(50, 1.0), (None, 2.0)])
    steps, curve = plan.epsilon_curve(7)
    assert steps[-1] == 200 and len(steps) == 7 == len(curve)
    exact = []
    for step in range(201):
        mu2 = sum(max(min(s.end, step) - s.start, 0) / s.noise_multiplier**2 for s in plan.segments)
        exact.append(gaussian_epsilon(math.sqrt(mu2)) if step else 0.0)
        if step % 7 and step not in (1, 50, 51, 199, 200):
            continue
        assert plan.epsilon_after(step).upper == pytest.approx(exact[step], rel=1e-6, abs=1e-9)
        live = plan.live_epsilon(step)
        assert exact[step] * (1 - 1e-9) <= live.upper <= 3.0 and live.kind == "bound" and live.lower == 0
        later = min(step + 4, 200)  # the table has 64 places
        assert live.upper <= gaussian_epsilon(math.sqrt(mu2 + (later - step) / plan.noise_multiplier**2)) * (1 + 1e-6)
    np.testing.assert_allclose(curve.upper, [exact[step] for step in steps], rtol=1e-6)
    first, second = (s.noise_multiplier for s in plan.segments)
    assert plan.mechanism_after(60) == ja.compose(ja.dp_sgd(first, 1.0, 50), ja.dp_sgd(second, 1.0, 10))


@pytest.mark.slow
def test_repetitions_cost_all_runs_together():
    law = selection.Geometric(0.1)
    plan = Plan(**FULL, steps=10, noise_multiplier=20.0, repetitions=law)
    alone = Plan(**FULL, steps=10, noise_multiplier=20.0)
    assert plan.epsilon.upper == ja.epsilon(selection.select(alone.mechanism, law), DELTA, rtol=2e-5).upper
    assert plan.mechanism == alone.mechanism and plan.epsilon_after(10).upper == alone.epsilon.upper
    assert plan.epsilon.upper > alone.epsilon.upper


@pytest.mark.slow
def test_the_noise_for_repetitions():
    plan = Plan(target_epsilon=2.0, **FULL, steps=10, repetitions=selection.Geometric(0.1))
    again = ja.epsilon(selection.select(ja.dp_sgd(plan.noise_multiplier, 1.0, 10), plan.repetitions), DELTA)
    assert 1.99 <= again.upper <= 2.0 * (1 + 1e-6) and plan.within


def test_the_curve_of_many_different_steps_is_above_them():
    factors = np.geomspace(3.0, 1.0, 100)
    plan = Plan(target_epsilon=2.0, **FULL, steps=100, noise_schedule=factors)
    steps, curve = plan.epsilon_curve(10)
    exact = [gaussian_epsilon(math.sqrt(np.sum((plan.noise_multiplier * factors[:s]) ** -2.0))) for s in steps]
    assert len(plan.segments) == 100 and 2.0 - 1e-4 <= exact[-1] <= 2.0
    assert (curve.upper >= exact).all() and (curve.upper <= np.array(exact) * 1.15).all()
    assert curve.upper[-1] <= 2.0 and set(curve.kind) == {"bound"} and (curve.lower == 0).all()
    varied = [Release("poisson", s, q) for s in (1.0, 1.1, 2.0) for q in (0.1, 0.2, 0.4)]
    for few, known in ((12, plan.whole), (4, varied)):
        stand_in = stand_ins(dict.fromkeys(known, 1), few)
        assert len(set(stand_in.values())) == few
        for a, b in stand_in.items():
            assert b.noise_multiplier <= a.noise_multiplier and b.sampling_probability >= a.sampling_probability


# Refusals

REFUSED = [
    ({}, "dataset_size is missing"),
    ({"dataset_size": 10}, "steps or epochs and sampling_probability or expected_batch_size is left open without"),
    ({**FULL, "noise_multiplier": 1.0}, "steps or epochs is left open without a target_epsilon"),
    ({**FULL, "target_epsilon": 1.0, "noise_multiplier": 1.0, "steps": 5}, "nothing is left open"),
    ({**FULL, "target_epsilon": 1.0}, "noise_multiplier and steps or epochs are left open; one can be solved for"),
    ({**FULL, "steps": 5, "epochs": 2, "noise_multiplier": 1.0}, "steps and epochs are both given"),
    ({**FULL, "expected_batch_size": 5, "steps": 5, "noise_multiplier": 1.0}, "are both given; give one of them"),
    ({**FULL, "steps": 2.5, "noise_multiplier": 1.0}, "steps = 2.5 must be an integer"),
    ({**FULL, "steps": 2, "noise_multiplier": [1.0, 2.0]}, "noise_multiplier must be one number, not 2"),
    ({**FULL, "steps": 2, "noise_multiplier": -1.0}, "noise_multiplier = -1.0 must be > 0"),
    ({**FULL, "target_delta": 0.0, "steps": 2, "noise_multiplier": 1.0}, "target_delta = 0.0 must be > 0"),
    ({**FULL, "sampling_probability": 0.0, "steps": 2, "noise_multiplier": 1.0}, "sampling_probability = 0.0 must be"),
    ({**FULL, "sampling": "shuffle", "steps": 2, "noise_multiplier": 1.0}, "sampling = 'shuffle' is not known"),
    ({**FULL, "relation": "replace_one", "steps": 2, "noise_multiplier": 1.0}, "relation = 'replace_one' is not a rel"),
    ({**FIXED, "expected_batch_size": 2.5, "steps": 2, "noise_multiplier": 1.0}, "must be a whole number with"),
    ({**FIXED, "expected_batch_size": 2000, "steps": 2, "noise_multiplier": 1.0}, "must be <= dataset_size = 1000"),
    ({**FULL, "target_epsilon": 1.0, "noise_multiplier": 1.0, "noise_schedule": [1.0]}, "so only noise_multiplier can"),
    ({**FULL, "steps": 3, "noise_multiplier": 1.0, "noise_schedule": [1.0, 1.0]}, "ends at step 2 but the plan has 3"),
    ({**FULL, "steps": 3, "noise_multiplier": 1.0, "noise_schedule": []}, "noise_schedule is empty"),
    ({**FULL, "steps": 3, "noise_multiplier": 1.0, "noise_schedule": [(2, 1.0), (1, 1.0)]}, "[1][0] = 1 must be > 2"),
    ({**FULL, "steps": 3, "noise_multiplier": 1.0, "noise_schedule": [(2, 1.0), 3]}, "must be a pair"),
    ({**FULL, "steps": 3, "noise_multiplier": 1.0, "noise_schedule": [1.0, -1.0, 1.0]}, "noise_schedule[1] = -1.0"),
    ({**FIXED, "epochs": 9, "noise_multiplier": 1.0, "batch_schedule": [(3, 10)]}, "ends at step 3, before the epochs"),
    ({**FULL, "target_delta": 1e-12, "target_epsilon": 1e-9, "steps": 2}, "cannot be met: No searched noise"),
    ({**FULL, "target_epsilon": 0.1, "noise_multiplier": 1.0}, "cannot be met: One step already exceeds"),
    ({**FIXED, "target_epsilon": 0.1, "noise_multiplier": 1.0, "steps": 9}, "cannot be met: No searched sampling"),
    ({**FULL, "target_epsilon": 1.0, "noise_multiplier": 1e6}, "allows 1e+09 steps and more"),
    ({**FULL, "steps": 3, "noise_multiplier": 1.0, "repetitions": 4}, "must be a law of K"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "message"), REFUSED, ids=range(len(REFUSED)))
def test_refusals_are_one_line(given, message):
    assert message in refusal(Plan, **{"target_delta": DELTA, **given})


def test_steps_outside_the_plan_are_refused():
    plan = Plan(**FULL, steps=5, noise_multiplier=1.0)
    for call in (plan.at, plan.epsilon_after, plan.live_epsilon, plan.mechanism_after):
        assert "step = 6 must be a whole number" in refusal(call, 6)
        assert "step" in refusal(call, -1) and "step = 1.5" in refusal(call, 1.5)
    assert "step = 5" in refusal(plan.at, 5)


# Documents


PLANS = {
    "scheduled": lambda: Plan(target_epsilon=2.0, **FULL, steps=30, noise_schedule=[(10, 1.0), (None, 2.0)]),
    "repeated": lambda: Plan(**FULL, steps=10, noise_multiplier=20.0, repetitions=selection.Geometric(0.1)),
    "batches": lambda: Plan(**FIXED, steps=10, noise_multiplier=2.0, batch_schedule=[(6, 250), (None, 500)]),
    "filtered": lambda: Plan(target_epsilon=2.0, **FULL, steps=30, data_dependent=True).recalibrate(3, steps=40),
}


@pytest.mark.parametrize("name", PLANS)
def test_documents_round_trip(name):
    plan = PLANS[name]()
    again = Plan.from_json(plan.to_json())
    assert again == plan and hash(again) == hash(plan) and again.to_json() == plan.to_json()
    assert again.filter == plan.filter and again.segments == plan.segments and again.steps == plan.steps
    assert again.repetitions or (again.within and again.epsilon.upper == plan.epsilon.upper)


HOSTILE = [
    ("version", 2, "format and version must be"),
    ("version", True, "format and version must be"),
    ("segments", [], "segments must be a list"),
    ("segments", [[1, 1.0, 1.0]], "segments[0] must be a list of steps"),
    ("segments", [[0, 1.0, 1.0, 1000.0]], "segments[0].steps = 0"),
    ("segments", [[1, 1.0, 0.5, 1000.0]], "must be sampling_probability * dataset_size"),
    ("segments", [[[1], 1.0, 1.0, 1000.0]], "must hold numbers"),
    ("dataset_size", None, "dataset_size is missing"),
    ("dataset_size", "__import__('os')", "dataset_size"),
    ("sampling", ["poisson"], "sampling = ['poisson'] is not known"),
    ("target_epsilon", "inf", "target_epsilon = 'inf'"),
    ("filter", [0.5, 1.0], "filter: its order = 0.5 must be > 1"),
    ("filter", [2.0, -1.0], "filter = -1.0 must be > 0"),
    ("filter", [2.0], "must be a list of its order and its budget"),
    ("repetitions", {"type": "Law"}, "must be an object whose type is one of"),
    ("more", 1, "plan must be an object with the keys"),
]


@pytest.mark.parametrize(("name", "value", "message"), HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_documents_are_refused(name, value, message):
    document = json.loads(Plan(target_epsilon=2.0, **FULL, steps=3).to_json())
    assert message in refusal(Plan.from_json, json.dumps(document | {name: value}))


def test_text_that_is_no_document_is_refused():
    for text in ("", "{", "[1]", '{"a": NaN}', '{"a": 1, "a": 2}', "[" * 100_000, "9" * 5000, "7"):
        assert "text is no plan" in refusal(Plan.from_json, text)


def test_a_document_cannot_state_a_share_below_what_is_drawn():
    document = json.loads(Plan(**FIXED, expected_batch_size=100, steps=3, noise_multiplier=1.0).to_json())
    for row in ([3, 1.0, 0.1 - 1e-12, 100.0], [3, 1.0, 0.1, 100.00000001]):
        message = refusal(Plan.from_json, json.dumps(document | {"segments": [row]}))
        assert "must be sampling_probability * dataset_size = " in message


MORE = {"cyclic_poisson": {"groups": 4}, "truncated_poisson": {"cap": 200}}
OF_RULE = {  # for each batch rule, the rate of batches of 100 of 1000 records
    "poisson": 0.1,
    "truncated_poisson": 0.1,
    "random_allocation": 0.1,
    "without_replacement": 0.1,
    "fixed_batches": 0.1,
    "shuffled": 0.1,
    "cyclic_poisson": 0.4,
    "fixed_order": 0.1,
}


def of_segments(segments, sampling="poisson", **given):
    return Plan.of(segments, **{"target_delta": DELTA, "dataset_size": 1000, "sampling": sampling} | given)


@pytest.mark.parametrize("sampling", OF_RULE)
def test_a_rate_and_a_batch_size_cannot_contradict_each_other(sampling):
    """By every way to make a plan of segments: the one is accounted for, and some rules draw by the other."""
    rate, more = OF_RULE[sampling], MORE.get(sampling, {})
    plan = of_segments([Segment(0, 8, 2.0, rate, 100.0), Segment(8, 4, 3.0, rate, 100.0)], sampling, **more)
    assert Plan.from_json(plan.to_json()) == plan and Plan.of(plan.segments, plan) == plan
    document = json.loads(plan.to_json())
    for wrong in ((0.01, 100.0), (rate, 10.0), (rate, 100.001), (rate * (1 - 1e-8), 100.0), (0.5 * rate, 100.0)):
        segments = [plan.segments[0], plan.segments[1]._replace(**dict(zip(Segment._fields[3:], wrong, strict=True)))]
        rows = [list(segment[1:]) for segment in segments]
        for call in (
            lambda segments=segments: Plan.of(segments, plan),
            lambda segments=segments: of_segments(segments, sampling, **more),
            lambda rows=rows: Plan.from_json(json.dumps(document | {"segments": rows})),
        ):
            message = refusal(call)
            assert f"segments[1].expected_batch_size = {wrong[1]!r} must be" in message, message
            assert "sampling_probability * dataset_size" in message and "use that" in message, message
    for size in (100, 999, 1001, 10**6):
        assert "segments[0].expected_batch_size" in refusal(Plan.of, plan.segments, plan, dataset_size=size)


@pytest.mark.parametrize(
    ("start", "sampling", "change"),
    [
        ("poisson", "cyclic_poisson", {"groups": 4}),
        ("poisson", "without_replacement", {}),
        ("cyclic_poisson", "poisson", {"groups": None, "noise": None}),
        ("cyclic_poisson", "cyclic_poisson", {"groups": 5}),
    ],
)
def test_another_rule_is_held_against_the_segments(start, sampling, change):
    plan = of_segments([Segment(0, 8, 2.0, OF_RULE[start] * 1.001, 100.1)], start, **MORE.get(start, {}))
    assert "segments[0].expected_batch_size" in refusal(Plan.of, plan.segments, plan, sampling=sampling, **change)


FITS = Segment(0, 10, 2.0, 0.1, 100.0)


@pytest.mark.parametrize(
    ("segments", "given", "message"),
    [
        ([], {}, "segments must be a list of 1 to 1000000"),
        ([(0, 10, 2.0, 0.1)], {}, "segments[0] must be a list of steps"),
        ([FITS._replace(start=5)], {}, "segments[0].start = 5 must be 0"),
        ([FITS, FITS._replace(start=20)], {}, "segments[1].start = 20 must be 10"),
        ([FITS, FITS._replace(start=5)], {}, "segments[1].start = 5 must be 10"),
        ([FITS, FITS], {}, "segments[1].start = 0 must be 10"),
        ([FITS._replace(steps=0)], {}, "segments[0].steps = 0"),
        ([FITS, Segment(10, -3, 2.0, 0.1, 100.0)], {}, "segments[1].steps = -3"),
        ([FITS._replace(steps=2.5)], {}, "segments[0].steps = 2.5"),
        ([FITS._replace(noise_multiplier=0.0)], {}, "segments[0].noise_multiplier = 0.0"),
        ([FITS._replace(noise_multiplier=math.inf)], {}, "segments[0].noise_multiplier = inf"),
        ([FITS._replace(noise_multiplier=np.array([1.0, 2.0]))], {}, "segments[0] must hold numbers"),
        ([FITS._replace(sampling_probability=1.5)], {}, "segments[0].sampling_probability = 1.5"),
        ([FITS._replace(sampling_probability=0.0)], {}, "segments[0].sampling_probability = 0.0"),
        ([FITS._replace(sampling_probability=math.nan)], {}, "segments[0].sampling_probability = nan"),
        ([FITS._replace(expected_batch_size=0.0)], {}, "segments[0].expected_batch_size = 0.0"),
        ([FITS], {"target_delta": None}, "target_delta is missing"),
        ([FITS], {"dataset_size": None}, "dataset_size is missing"),
        ([FITS], {"filter": (0.5, 1.0)}, "its order = 0.5 must be > 1"),
        ([FITS], {"filter": (8.0, -1.0)}, "filter = -1.0 must be > 0"),
        ([FITS], {"filter": (8.0, math.nan)}, "filter = nan"),
        ([FITS], {"filter": (8.0,)}, "filter must be a list of its order and its budget"),
        ([FITS], {"steps": 3}, "steps is no setting of a plan of segments"),
        ([FITS], {"sampling_probability": 0.01}, "sampling_probability is no setting of a plan of segments"),
        ([FITS], {"data_dependent": True}, "data_dependent is no setting of a plan of segments"),
    ],
)
def test_what_no_document_may_say_no_segments_may_say(segments, given, message):
    assert message in refusal(of_segments, segments, **given)


def test_segments_of_numpy_numbers_are_a_plan_that_can_be_written():
    plan = of_segments([Segment(0, np.int64(10), np.float64(2.0), np.float32(0.125), np.float64(125.0))])
    assert Plan.from_json(plan.to_json()) == plan == of_segments([Segment(0, 10, 2.0, 0.125, 125.0)])


def test_a_document_cannot_claim_less_than_it_spends():
    document = json.loads(Plan(target_epsilon=2.0, **FULL, steps=3).to_json())
    document["segments"] = [[300, 1.0, 1.0, 1000.0]]
    assert not Plan.from_json(json.dumps(document)).within
    filtered = Plan.from_json(json.dumps(document | {"filter": [5.0, 0.1]}))
    assert not filtered.within and np.isinf(filtered.epsilon.upper) and not filtered.epsilon.ok


def test_a_run_of_a_trillion_fixed_batches():
    """Passes are counted, not gone through."""
    plan = Plan(
        **FIXED, expected_batch_size=100, steps=10**12, noise_multiplier=1e6, noise_schedule=[(55, 1.0), (None, 2.0)]
    )
    truth = math.sqrt(6 * 1e-12 + (10**11 - 6) * 2.5e-13)  # the first half of the sixth pass has less noise
    assert plan.epsilon.upper == pytest.approx(gaussian_epsilon(truth), rel=1e-6)
    assert plan.pass_of(10**12 - 1) == (10**11 - 1, 10**12 - 10, 10**12) and plan.at(10**12 - 1).noise_multiplier == 2e6
    assert plan.live_epsilon(10**11).upper >= plan.epsilon_after(10**11).upper
    with_target = Plan(target_epsilon=10.0, **FIXED, expected_batch_size=100, steps=10**12)
    assert with_target.epsilon.upper <= 10.0 and with_target.recalibrate(10**11, steps=10**11 + 7).within


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_what_lies_between_two_steps_of_fixed_batches(data):
    """Against a walk over the steps: each pass with steps in between costs the least noise of these steps."""
    size = data.draw(st.integers(1, 30))
    rows = data.draw(
        st.lists(
            st.tuples(st.integers(1, 12), st.sampled_from([1.0, 2.0, 3.0]), st.sampled_from([1, 3, 7])),
            min_size=1,
            max_size=6,
        )
    )
    segments, start = [], 0
    for steps, noise, batch in rows:
        batch = float(min(batch, size))
        segments.append(Segment(start, steps, noise, batch / size, batch))
        start += steps
    plan = Plan.of(segments, target_delta=DELTA, dataset_size=size, sampling="fixed_batches")
    walked, at = [], 0
    while at < start:
        batch, end = plan.at(at).expected_batch_size, at
        while end < min(start, at + math.ceil(size / batch)) and plan.at(end).expected_batch_size == batch:
            end += 1
        walked.append((at, end))
        at = end
    assert sorted({plan.pass_of(at)[1:] for at in range(start)}) == walked
    first, last = data.draw(st.integers(0, start)), data.draw(st.integers(0, start))
    met = [range(max(a, first), min(b, last)) for a, b in walked]
    cost = Counter(min(plan.at(s).noise_multiplier for s in steps) for steps in met if steps)
    assert {r.noise_multiplier: n for r, n in plan.releases_between(first, last).items()} == dict(cost)


@pytest.mark.parametrize("target", [None, 1e6])
def test_a_filter_in_a_document_is_held_against_its_segments(tmp_path, target):
    node = json.loads(Plan(**FULL, steps=30, noise_multiplier=0.3).to_json()) | {"target_epsilon": target}
    plan = Plan.from_json(json.dumps(node | {"filter": [2, 1e-300]}))
    for claim in (plan.epsilon, plan.epsilon_after(1), plan.live_epsilon(3), plan.epsilon_curve(3)[1]):
        assert np.all(np.isinf(claim.upper)) and not np.any(claim.ok)
    assert not plan.within
    with Ledger.create(tmp_path / "run", plan) as ledger:
        assert not plan.allows(ledger, 0)  # without a target, too
    for node_filter in ([1.0, 1.0], [math.nan, 1.0], [2], [2, 0], ["2", 1], [2, 1, 1], {}):
        refusal(Plan.from_json, json.dumps(node | {"filter": node_filter}))
    large = Plan.from_json(json.dumps(node | {"filter": [2, 1e6]}))
    assert large.epsilon.upper >= 877.0 and large.within == (target is None or large.epsilon.upper <= target)


def test_a_setting_that_no_plan_has_is_refused():
    plan = Plan(target_delta=DELTA, dataset_size=100, sampling_probability=0.1, noise_multiplier=1.0, steps=3)
    message = refusal(Plan.of, plan.segments, plan, target_epsilom=3.0)
    assert (
        message.startswith("target_epsilom is no setting of a plan of segments; use one of")
        and "target_epsilon" in message
    )


def test_a_plan_shows_what_differs_from_the_defaults():
    given = {
        "target_delta": DELTA,
        "dataset_size": 100,
        "sampling_probability": 0.1,
        "noise_multiplier": 1.0,
        "steps": 3,
    }
    assert repr(Plan(**given)) == (
        f"Plan(target_delta={DELTA!r}, dataset_size=100, sampling_probability=0.1, expected_batch_size=10.0, "
        "noise_multiplier=1.0, steps=3, epochs=0.3, relation='add_or_remove_one')"
    )
    assert repr(Plan(**given, unit="user")).endswith("unit='user')")
