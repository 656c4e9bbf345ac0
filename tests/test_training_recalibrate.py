"""Recalibration: what is spent stays, and the whole ends within 1e-4 of its target and never above."""

import itertools
import math

import numpy as np
import pytest
from dp_accounting import GaussianDpEvent as Noise
from dp_accounting import PoissonSampledDpEvent, SelfComposedDpEvent, rdp
from helpers import refusal
from training_cases import DELTA, FIXED, FULL, gaussian_epsilon

import jaxacct as ja
from jaxacct import selection
from jaxacct.training import Plan

POISSON = {"target_delta": DELTA, "dataset_size": 500, "expected_batch_size": 100}
"""At this high rate, 0.2, few of the accountant's programs are needed."""


def spent_alike(plan, again, step):
    """The first steps of a recalibrated plan are those of the plan before."""
    assert all(again.at(s)[2:] == plan.at(s)[2:] for s in range(step))


def gaussians(plan):
    """Epsilon of a plan on all the data: the closed form of the sum of 1/sigma^2 over its steps."""
    return gaussian_epsilon(math.sqrt(sum(plan.at(s).noise_multiplier ** -2.0 for s in range(plan.steps))))


def passes(plan, lengths):
    """Epsilon of a plan of fixed batches whose passes have these lengths, by the closed form."""
    ends = np.cumsum([0, *lengths])
    assert ends[-1] == plan.steps
    worst = [max(plan.at(s).noise_multiplier ** -2.0 for s in range(*pair)) for pair in itertools.pairwise(ends)]
    return gaussian_epsilon(math.sqrt(sum(worst)))


def close(epsilon, target):
    """Whether `epsilon`, which is right to 1e-9, is at most 1e-4 below the target and not above the target."""
    return target - 1e-4 <= epsilon <= target * (1 + 1e-9)


FULL_BATCH = [
    (2.0, 30, 10, {"steps": 60}),
    (2.0, 30, 29, {"steps": 31}),
    (8.0, 100, 50, {"epochs": 75}),
    (0.3, 1000, 1, {}),
    (1.0, 10, 0, {"steps": 500}),
]


@pytest.mark.parametrize(("target", "steps", "at", "change"), FULL_BATCH, ids=range(len(FULL_BATCH)))
def test_full_batches(target, steps, at, change):
    plan = Plan(target_epsilon=target, **FULL, steps=steps)
    again = plan.recalibrate(at, **change)
    spent_alike(plan, again, at)
    assert again.steps == change.get("steps", change.get("epochs", steps))
    assert close(gaussians(again), target) and target - 1e-4 <= again.epsilon.upper <= target
    assert again.epsilon.kind == "certified" and again.filter is None and again.within


def test_a_scheduled_plan_recalibrated_twice():
    plan = Plan(target_epsilon=3.0, **FULL, steps=40, noise_schedule=[(20, 1.0), (30, 2.0), (None, 3.0)])
    once = plan.recalibrate(10, steps=50)
    twice = once.recalibrate(25, steps=35)
    spent_alike(plan, once, 10)
    spent_alike(once, twice, 25)
    for again in (once, twice):
        assert close(gaussians(again), 3.0) and again.epsilon.upper <= 3.0
    noise = [once.at(s).noise_multiplier for s in (10, 20, 30, 49)]
    np.testing.assert_allclose(np.array(noise) / noise[0], [1.0, 2.0, 3.0, 3.0], rtol=1e-12)  # the schedule is kept
    assert twice.at(25).noise_multiplier < once.at(25).noise_multiplier


def test_fixed_batches_go_on_with_their_pass_or_begin_another():
    plan = Plan(target_epsilon=1.0, **FIXED, expected_batch_size=100, epochs=6)  # passes of 10 steps
    longer = plan.recalibrate(25, steps=80)
    spent_alike(plan, longer, 25)
    assert close(passes(longer, [10] * 8), 1.0)  # the third pass costs its dearer part
    larger = plan.recalibrate(25, epochs=6.5, expected_batch_size=200)
    assert close(passes(larger, [10, 10, 5, 5, 5, 5, 5]), 1.0)  # 2.5 epochs are spent, 20 steps of 200 make 4


@pytest.fixture(scope="module")
def poisson():
    return Plan(target_epsilon=2.0, **POISSON, steps=60)


def test_poisson_sampling_with_another_batch_size(poisson):
    """The later steps have another rate; `test_training_ledger.py` has such compositions against dp_accounting."""
    again = poisson.recalibrate(25, epochs=14, expected_batch_size=150)
    spent_alike(poisson, again, 25)
    rest = again.at(25)
    assert (again.steps, rest.sampling_probability) == (55, 0.3)  # 5 epochs are spent, 30 steps of .3 make 9
    whole = ja.compose(ja.dp_sgd(poisson.noise_multiplier, 0.2, 25), ja.dp_sgd(rest.noise_multiplier, 0.3, 30))
    assert 2.0 - 1e-4 <= ja.epsilon(whole, DELTA).upper <= 2.0 * (1 + 1e-7)
    assert ja.epsilon(whole, DELTA).upper == pytest.approx(again.epsilon.upper, rel=1e-9)
    shorter = poisson.recalibrate(25, steps=40)
    assert 2.0 - 1e-4 <= shorter.epsilon.upper <= 2.0 and shorter.at(25).noise_multiplier < poisson.noise_multiplier


# Changes that look at the data


def filtered_epsilon(order, renyi, delta=DELTA):
    """The conversion of Canonne, Kamath and Steinke 2020, Proposition 12."""
    return renyi + math.log((order - 1) / order) - (math.log(delta) + math.log(order)) / (order - 1)


def renyi_of(plan, order):
    """The Renyi divergence of a plan on all the data: order/2 times the sum of 1/sigma^2."""
    return order / 2 * sum(plan.at(s).noise_multiplier ** -2.0 for s in range(plan.steps))


FILTERED = [*FULL_BATCH, (2.0, 30, 10, {"expected_batch_size": 1000, "epochs": 20})]


@pytest.mark.parametrize(("target", "steps", "at", "change"), FILTERED, ids=range(len(FILTERED)))
def test_full_batches_through_a_filter(target, steps, at, change):
    """A plan declared data-dependent claims its filter from the start; both plans end within 1e-4 of the target."""
    plan = Plan(target_epsilon=target, **FULL, steps=steps, data_dependent=True)
    again = plan.recalibrate(at, **change, data_dependent=True)
    spent_alike(plan, again, at)
    order, budget = plan.filter
    assert again.filter == plan.filter and again.data_dependent
    assert budget == pytest.approx(renyi_of(plan, order), rel=1e-9)  # an unchanged run just fits the budget
    promised = filtered_epsilon(order, budget)
    assert plan.epsilon.upper == again.epsilon.upper == pytest.approx(promised, rel=1e-9) and close(promised, target)
    assert promised <= min(filtered_epsilon(a, renyi_of(plan, a)) for a in np.geomspace(1.02, 900, 200)) + 0.01 * target
    assert close(filtered_epsilon(order, renyi_of(again, order)), target)
    assert gaussians(plan) < target and gaussians(again) < target  # exact composition would allow less noise
    for each in (plan, again):
        assert (each.epsilon.kind, each.epsilon.engine) == ("bound", "rdp_filter")
        assert each.within and each.epsilon_after(1).upper == each.live_epsilon(1).upper == each.epsilon.upper


def test_what_is_left_open_is_solved_for_through_the_filter(poisson):
    """By dp_accounting at the filter's order, the steps or the noise that a plan solves for just meet the target."""
    sigma = poisson.noise_multiplier
    rates = {"target_delta": DELTA, "dataset_size": 500, "sampling_probability": 0.2}
    for settings in ({**rates, "noise_multiplier": sigma}, {**POISSON, "steps": 60}):
        plan = Plan(target_epsilon=2.0, **settings, data_dependent=True)
        spent = renyi_epsilon(plan, plan.filter.order)
        assert plan.epsilon.upper == pytest.approx(spent, rel=1e-6) and plan.epsilon.upper <= 2.0
        more = Plan.of([plan.segments[0]._replace(steps=plan.steps + 1)], plan)
        assert renyi_epsilon(more, plan.filter.order) > 2.0 or plan.epsilon.upper >= 2.0 - 1e-4
    assert plan.noise_multiplier > sigma


def renyi_epsilon(plan, order):
    accountant = rdp.RdpAccountant([order])
    for segment in plan.segments:
        event = PoissonSampledDpEvent(segment.sampling_probability, Noise(segment.noise_multiplier))
        accountant.compose(SelfComposedDpEvent(event, segment.steps))
    return accountant.get_epsilon(DELTA)


def test_poisson_sampling_through_a_filter_against_dp_accounting():
    plan = Plan(target_epsilon=2.0, **POISSON, steps=60, data_dependent=True)
    again = plan.recalibrate(10, steps=80, data_dependent=True)
    first, after = (renyi_epsilon(each, plan.filter.order) for each in (plan, again))
    assert first == pytest.approx(again.epsilon.upper, rel=1e-6)
    assert again.epsilon.upper - 1e-4 <= after <= again.epsilon.upper * (1 + 1e-6) <= 2.0 * (1 + 1e-6)


def test_the_filter_is_the_one_that_was_fixed_first():
    plan = Plan(target_epsilon=4.0, **FULL, steps=40, data_dependent=True)
    once = plan.recalibrate(10, steps=80, data_dependent=True)
    twice = once.recalibrate(30, steps=60)  # ignores the data; the change before did not
    assert (
        twice.filter == once.filter == plan.filter
        and twice.epsilon.engine == "rdp_filter"
        and twice.epsilon.kind == "bound"
    )
    assert close(renyi_of(twice, twice.filter.order), twice.filter.budget)
    spent_alike(once, twice, 30)


def test_a_change_that_looks_at_the_data_must_be_declared_before_the_first_step():
    """Otherwise the run in which the rule changes nothing would claim the exact composition."""
    plan = Plan(target_epsilon=2.0, **FULL, steps=30)
    assert "Plan(..., data_dependent=True)" in refusal(plan.recalibrate, 10, steps=60, data_dependent=True)
    reported = Plan(**FULL, steps=30, noise_multiplier=10.0, data_dependent=True)
    assert reported.epsilon.upper == pytest.approx(filtered_epsilon(*reported.filter), rel=1e-9)
    assert "must be True or False" in refusal(Plan, **FULL, steps=30, noise_multiplier=10.0, data_dependent=1)
    law = selection.Geometric(0.1)
    wanted = {**FULL, "steps": 30, "noise_multiplier": 10.0, "repetitions": law, "data_dependent": True}
    assert "the K runs of a tuning must all be the same" in refusal(Plan, **wanted)


def test_what_cannot_be_recalibrated_is_refused_in_one_line():
    plan = Plan(target_epsilon=2.0, **FULL, steps=30)
    dear = Plan.of([plan.segments[0]._replace(noise_multiplier=1.0)], plan)
    assert "what is spent already exceeds target_epsilon = 2.0" in refusal(dear.recalibrate, 20)
    filtered = Plan(target_epsilon=2.0, **FULL, steps=30, data_dependent=True)
    assert "nothing is left of the Renyi filter" in refusal(filtered.recalibrate, 30, steps=31)
    assert "leaves no steps" in refusal(plan.recalibrate, 30)
    assert "leaves no steps" in refusal(plan.recalibrate, 10, epochs=9)
    assert "leaves no steps" in refusal(plan.recalibrate, 10, steps=10)
    assert "steps and epochs are both given" in refusal(plan.recalibrate, 10, steps=40, epochs=50)
    assert "expected_batch_size = 2000.0 must be <=" in refusal(plan.recalibrate, 10, expected_batch_size=2000)
    assert "step = 31" in refusal(plan.recalibrate, 31)
    assert "steps = 40.5" in refusal(plan.recalibrate, 3, steps=40.5)
    reported = Plan(**FULL, steps=30, noise_multiplier=3.0)
    assert "target_epsilon is missing" in refusal(reported.recalibrate, 3)
    tuning = Plan.of(plan.segments, plan, repetitions=selection.Geometric(0.1))
    assert "the K runs of a tuning must all be the same" in refusal(tuning.recalibrate, 3)
