"""The hard stop: it comes just in time, and costs nothing while a run follows its plan."""

import math

import numpy as np
import pytest
from helpers import refusal
from hypothesis import given, settings
from hypothesis import strategies as st
from training_cases import DELTA, FIXED, FULL, PLAN, TARGETED, gaussian_epsilon, mu2, note

import jaxacct as ja
from jaxacct import strategies
from jaxacct.accounting import account
from jaxacct.training import Ledger, Plan
from jaxacct.training.ledger.contents import Spent, ahead
from jaxacct.training.ledger.format import Step
from jaxacct.training.plan.solver import Filter


def trained(plan, ledger, replays=()):
    """Return the first step that the plan forbids.  Each step in `replays` is taken twice, with other noise."""
    again = dict(replays)
    for step in range(plan.steps + 5):
        if not plan.allows(ledger, step):
            return step
        segment = plan.at(step)
        label = str(plan.pass_of(step)[0]) if plan.sampling == "fixed_batches" else None
        note(ledger, step, "first", segment.noise_multiplier, segment.sampling_probability, partition=label)
        if step in again:
            noise = segment.noise_multiplier * again[step]
            note(ledger, step, "again", noise, segment.sampling_probability, partition=label)
    raise AssertionError("the hard stop never came")


def test_following_the_plan_needs_no_accounting(path, monkeypatch):
    assert TARGETED.within

    def counted(*_, **__):
        raise AssertionError("accounted for")

    monkeypatch.setattr(account, "epsilon", counted)
    with Ledger.create(path, TARGETED) as ledger:
        assert trained(TARGETED, ledger) == 50


@pytest.mark.parametrize("replays", [{3: 1.0}, {40: 1.0}, {3: 2.0, 4: 0.9}, {0: 0.7, 49: 5.0}, {10: 0.26}], ids=str)
def test_the_stop_comes_just_in_time(path, replays):
    """A step is allowed exactly if the closed form, with this step counted, does not exceed the target."""
    with Ledger.create(path, TARGETED) as ledger:
        done = trained(TARGETED, ledger, replays)
        spent = [TARGETED.at(s).noise_multiplier ** -2.0 for s in range(done)]
        spent += [(TARGETED.at(s).noise_multiplier * x) ** -2.0 for s, x in replays.items() if s < done]
        if done not in (s + 1 for s in replays):  # no replay asks the plan
            assert gaussian_epsilon(math.sqrt(sum(spent))) <= 1.0
        if done < 50:
            more = TARGETED.at(done).noise_multiplier ** -2.0
            assert gaussian_epsilon(math.sqrt(sum(spent) + more)) > 1.0 - 1e-9
        assert mu2(ledger) == pytest.approx(sum(spent))


def test_the_stop_sees_other_mechanisms_runs_and_filters(path, tmp_path):
    with Ledger.create(path, TARGETED) as ledger:
        ledger.spend(ja.Gaussian(5.0), "look")
        done = trained(TARGETED, ledger)
        assert 0 < done < 50 and ledger.epsilon(DELTA).upper <= 1.0
        ledger.begin(TARGETED)
        assert not TARGETED.allows(ledger, 0)
    filtered = Plan(target_epsilon=1.0, **FULL, steps=50, data_dependent=True).recalibrate(20, steps=60)
    with Ledger.create(tmp_path / "filtered", filtered) as ledger:
        claim_run = ledger.run
        assert trained(filtered, ledger, {50: 1.0}) == 59
        assert ledger.epsilon(DELTA).upper == filtered.epsilon.upper and ledger.epsilon(DELTA).kind == "bound"
        assert "a Renyi filter of another order" in refusal(TARGETED.allows, ledger, 0)
        ledger.begin(PLAN, "other")
        note(ledger, 0)
        order, budget = filtered.filter
        renyi = budget + order / 2 / 100  # the filter's budget and one Gaussian of noise multiplier 10
        expected = renyi + math.log((order - 1) / order) - (math.log(DELTA) + math.log(order)) / (order - 1)
        assert ledger.epsilon(DELTA).upper == pytest.approx(expected, rel=1e-9)
        ledger.run = claim_run
        note(ledger, 59, noise=1.0)
        assert np.isinf(ledger.epsilon(DELTA).upper)  # beyond its budget a filter says nothing


@pytest.mark.parametrize(("replays", "done"), [({}, 60), ({13: 1.0}, 60), ({5: 1.0}, 30)], ids=str)
def test_the_stop_of_fixed_batches(path, replays, done):
    """Passes have ten steps.  A replay of step 5 costs 2.25 passes of later noise; one of step 13 fits in its pass."""
    plan = Plan(
        target_epsilon=1.0, **FIXED, expected_batch_size=100, epochs=6, noise_schedule=[(13, 1.0), (None, 1.5)]
    )  # fmt: skip
    with Ledger.create(path, plan) as ledger:
        assert trained(plan, ledger, replays) == done
        assert ledger.epsilon(DELTA).upper <= 1.0


def test_another_partition_in_a_pass_costs_a_pass(path):
    """After a new shuffle within the last pass its further steps cost another Gaussian, which exceeds the target."""
    plan = Plan(target_epsilon=1.0, **FIXED, expected_batch_size=100, epochs=2)
    with Ledger.create(path, plan) as ledger:
        for step in range(15):
            assert plan.allows(ledger, step, partition=str(step // 10))
            note(ledger, step, noise=plan.noise_multiplier, rate=0.1, partition=str(step // 10))
        assert plan.allows(ledger, 15) and plan.allows(ledger, 15, partition="1")
        assert not plan.allows(ledger, 15, partition="anew")
        assert not plan.allows(ledger, 14, partition="1")  # in that partition it was taken already


def test_a_filter_does_not_meet_its_target_beside_other_runs(path):
    """The claim adds the filter's whole budget to what other runs have spent, so that the plan may allow no step."""
    plan = Plan(target_epsilon=1.0, **FULL, steps=50, data_dependent=True)
    with Ledger.create(path, plan) as ledger:
        ledger.spend(ja.Gaussian(50.0))  # in the run itself: within its budget
        assert plan.allows(ledger, 0)
        ledger.begin(plan)
        assert not plan.allows(ledger, 0)
        assert ledger.epsilon(DELTA).upper > 1.0


def test_a_filter_does_not_meet_its_target_after_a_larger_one(path):
    """The claim takes the largest budget that a run has had."""
    large = Plan(target_epsilon=2.0, **FULL, steps=50, data_dependent=True)
    small = Filter(large.filter.order, large.filter.budget / 3.0)
    target = small.epsilon(DELTA) * 1.001
    plan = Plan.of(
        [s._replace(noise_multiplier=40.0) for s in large.segments], large, target_epsilon=target, filter=small
    )
    with Ledger.create(path, plan) as ledger:
        assert plan.allows(ledger, 0)
        ledger.replan(large)
        ledger.replan(plan)
        assert ledger.epsilon(DELTA).upper > target
        assert not plan.allows(ledger, 0)


def test_what_was_certified_of_one_run_says_nothing_of_a_dearer_one(path):
    """Each of the ledger's two runs has a release beside its steps; that of the second run alone exceeds the target."""
    given = {"target_delta": DELTA, "dataset_size": 20, "sampling_probability": 1.0, "noise_multiplier": 9.0}
    plan = Plan(**given, steps=3, repetitions=ja.selection.PointMass(2))
    plan = Plan.of(plan.segments, plan, target_epsilon=float(plan.epsilon.upper) * 1.5)
    with Ledger.create(path, plan) as ledger:
        ledger.spend(ja.Gaussian(50.0))
        assert plan.allows(ledger, 0, steps=3) and plan.allows(ledger, 0)
        ledger.begin(plan)
        ledger.spend(ja.Gaussian(0.5))
        assert not plan.allows(ledger, 0)


def test_no_step_is_allowed_beside_releases_under_another_relation(path):
    """A 2-DP release for an added record may be only 4-DP for a replaced one, so that the costs do not add up."""
    given = {"target_delta": DELTA, "dataset_size": 50, "steps": 4}
    same = {"sampling": "without_replacement", "relation": "replace_one", "expected_batch_size": 50}
    plan = Plan(**given, **same, noise_multiplier=9.0)
    plan = Plan.of(plan.segments, plan, target_epsilon=9.5)
    with Ledger.create(path, Plan(**given, sampling_probability=1.0, noise_multiplier=9.0)) as ledger:
        ledger.spend(ja.PureDP(2.0), "a median")
        ledger.begin(plan)
        assert "use one relation for both" in refusal(plan.allows, ledger, 0)


RULES = {
    "fixed_batches": {"expected_batch_size": 5},
    "random_allocation": {"slots": 4},
    "cyclic_poisson": {"sampling_probability": 0.6, "groups": 4, "noise": strategies.Identity()},
    "fixed_order": {"expected_batch_size": 5, "noise": strategies.PrefixSum()},
}
SCHEDULES = [[(3, 1.0), (6, 1.2), (None, 1.6)], [(3, 1.0), (6, 1.6), (None, 1.2)]]
RISING = ("fixed_order",)
"""Batch rules whose noise must not fall during a run."""


@given(st.sampled_from([*RULES]), st.sampled_from([None, *SCHEDULES]), st.data())
@settings(max_examples=100, deadline=None)
def test_the_stop_expects_exactly_what_the_entries_will_cost(rule, schedule, data):
    """Too low, it would allow a step that exceeds the target; too high, it would end a run too early after a look.

    Passes of fixed batches and rounds are drawn anew ("a", "b", ...); groups and a fixed order stay for the whole run.
    """
    given = {"target_delta": DELTA, "dataset_size": 20, "sampling": rule, "noise_multiplier": 2.0, "steps": 12}
    plan = Plan(**given, **RULES[rule], noise_schedule=SCHEDULES[0] if schedule and rule in RISING else schedule)
    spent = Spent(shared=0 if plan.shared else None)
    stays, names = rule in ("cyclic_poisson", "fixed_order"), st.sampled_from("ab")
    for number, (step, name, count) in enumerate(
        data.draw(st.lists(st.tuples(st.integers(0, 11), names, st.integers(1, 12)), max_size=12))
    ):
        numbers, first = range(step, min(step + count, 12)), plan.pass_of(step)[1]
        place = lambda each: 0 if rule == "fixed_order" else plan.pass_of(each)[1]
        label = lambda each: f"{'' if stays else name if place(each) == first else number} {place(each)}"  # noqa: B023
        expected = spent.releases.copy()
        expected.update(ahead(plan, spent, step, len(numbers), label(step)))
        for each in numbers:
            entry = (f"{number} {each}", "", *plan.at(each)[2:4], rule, label(each))
            spent.add(Step("", each, *entry, groups=plan.groups or 0))
        assert +expected == +spent.releases


@pytest.mark.parametrize(("noise", "last"), [(strategies.Identity(), 0.5), (strategies.Banded(3), 1.5)], ids=str)
def test_a_pass_of_groups_that_was_noted_goes_on_without_its_name(noise, last):
    """After a replay of step 3 the next step is 4.  Its pass has an entry, step 7, so that it needs no label."""
    given = {"target_delta": DELTA, "dataset_size": 20, "sampling": "cyclic_poisson", "sampling_probability": 0.6}
    plan = Plan(**given, groups=4, noise=noise, noise_multiplier=2.0, steps=9, noise_schedule=[(7, 1.0), (None, last)])
    spent = Spent(shared=0 if plan.shared else None)
    for key, steps in (("first", (0, 1, 2, 3, 7)), ("again", [3])):
        for step in steps:
            label = str(plan.pass_of(step)[1])
            spent.add(Step("", step, key, "", *plan.at(step)[2:4], plan.sampling, label, groups=4))
    assert spent.next == 4
    assert ahead(plan, spent, 4, 3, None) == ahead(plan, spent, 4, 3, "4")


def test_a_shorter_plan_in_a_fixed_order_goes_on_in_the_pass_of_the_longer_one():
    """A run has a single pass. Steps beyond the end of the plan belong to it, too."""
    given = {"target_delta": DELTA, "dataset_size": 20, "noise_multiplier": 2.0, "noise": strategies.Identity()}
    plan, longer = (Plan(**given, sampling="fixed_order", expected_batch_size=5, steps=steps) for steps in (6, 12))
    spent = Spent()
    for step in (8, 9):
        spent.add(Step("", step, "", "", *longer.at(step)[2:4], plan.sampling, "all"))
    assert not ahead(plan, spent, 0, 6, "all")


def test_a_plan_that_no_step_has_followed_shares_no_noise(path):
    """A plan with independent noise costs the same if a banded plan was replaced by it before the first step."""
    given = {"target_delta": DELTA, "dataset_size": 20, "sampling": "cyclic_poisson", "sampling_probability": 0.6}
    first, plan = (
        Plan(**given, groups=4, noise=noise, noise_multiplier=2.0, steps=8, noise_schedule=schedule)
        for noise, schedule in ((strategies.Banded(3), None), (strategies.Identity(), [(4, 1.5), (None, 1.0)]))
    )
    with Ledger.create(path, first) as ledger:
        ledger.replan(plan)
        for step in range(8):
            noise, rate = plan.at(step)[2:4]
            ledger.record(step, f"key {step}", "", noise, rate, str(plan.pass_of(step)[1]))
        assert ledger.releases() == plan.whole


def test_the_stop_expects_gaussians_where_no_slots_are_told(path):
    """Without a partition everybody may be in a step; a second sum over the same slots is not a round of its own."""
    plan = Plan(
        target_delta=DELTA, dataset_size=20, sampling="random_allocation", slots=4, noise_multiplier=2.0, steps=8
    )
    asked = Plan.of(plan.segments, plan, target_epsilon=float(plan.epsilon.upper) * 1.001)
    one = float(ja.epsilon(ja.Gaussian(2.0), DELTA).upper)
    assert one > asked.target_epsilon
    with Ledger.create(path, asked) as ledger:
        assert not asked.allows(ledger, 0) and asked.allows(ledger, 0, "a")
        note(ledger, 0, noise=2.0, rate=0.25, partition="a")
        assert asked.allows(ledger, 1) and not asked.allows(ledger, 0, "a")
        assert float(ledger.epsilon(DELTA).upper) <= asked.target_epsilon


def test_without_a_target_everything_is_allowed(path):
    with Ledger.create(path, PLAN) as ledger:
        assert PLAN.allows(ledger, 10**6)


@pytest.mark.parametrize("rule", ["fixed_batches", "random_allocation"])
@pytest.mark.parametrize("noise", [1e-200, 1e200])
def test_a_pass_counts_next_to_no_noise_and_very_much_noise(path, rule, noise):
    """1/sigma^2 is beyond the range of float64."""
    given = {"target_delta": DELTA, "dataset_size": 20, "sampling": rule, "noise_multiplier": 2.0, "steps": 8}
    with Ledger.create(path, Plan(**given, **RULES[rule])) as ledger:
        for key in ("first", "again"):
            note(ledger, 0, key, noise, rate=0.25, partition="a")
    found = Ledger.read(path).releases()
    assert sum(count / (release.noise_multiplier / noise) ** 2 for release, count in found.items()) == pytest.approx(
        2.0
    )
