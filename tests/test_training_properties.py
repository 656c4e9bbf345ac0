"""Properties of plans over random schedules: live epsilon is safe, and recalibration never exceeds a target."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from training_cases import DELTA, FIXED, FULL, gaussian_epsilon

import jaxacct as ja
from jaxacct.training import Plan
from jaxacct.training.plan.plan import MANY_KINDS

ROUNDING = 1 + 1e-9


@st.composite
def schedules(draw, most=40):
    """Noise factors, one per step: at most four distinct ones, sorted, or more than the table keeps apart."""
    steps = draw(st.integers(1, most))
    if draw(st.booleans()):
        steps = max(steps, MANY_KINDS + 4)
        low, high = draw(st.floats(0.3, 1.0)), draw(st.floats(1.0, 4.0))
        factors = [low * (high / low) ** (k / steps) for k in range(steps)]
        return draw(st.permutations(factors))
    kinds = draw(st.lists(st.floats(0.3, 4.0), min_size=1, max_size=4))
    return sorted(draw(st.sampled_from(kinds)) for _ in range(steps))


def mu_after(plan, step):
    """mu of the plan's first `step` steps, which are Gaussians on all the data."""
    return math.sqrt(sum(plan.at(s).noise_multiplier ** -2.0 for s in range(step)))


@given(schedules(), st.floats(2.0, 60.0), st.data())
@settings(deadline=None, max_examples=30)
def test_live_epsilon_is_never_below_what_is_spent(factors, noise, data):
    plan = Plan(**FULL, steps=len(factors), noise_multiplier=noise, noise_schedule=factors)
    steps = {data.draw(st.integers(0, plan.steps)) for _ in range(4)} | {1, plan.steps}
    for step in steps:
        live = plan.live_epsilon(step).upper
        assert live >= plan.epsilon_after(step).lower
        assert live * ROUNDING >= (gaussian_epsilon(mu_after(plan, step)) if step else 0.0)
        assert live <= plan.live_epsilon(plan.steps).upper


@pytest.mark.slow
@pytest.mark.parametrize("kinds", [2, MANY_KINDS + 1])
def test_live_epsilon_of_sampled_steps_is_never_below_what_is_spent(kinds):
    """Poisson batches of several sizes at several noises; the larger number of kinds is more than the table keeps."""
    noise = [(5 * (k + 1), 1.0 + 0.7 * ((7 * k) % kinds) / kinds) for k in range(kinds)]
    batches = [(5 * (k + 1), 100 + 10 * ((3 * k) % kinds)) for k in range(kinds)]
    plan = Plan(
        target_delta=DELTA,
        dataset_size=1000,
        steps=5 * kinds,
        noise_multiplier=1.2,
        noise_schedule=noise,
        batch_schedule=batches,
    )
    assert (len(plan.whole) > MANY_KINDS) == (kinds > MANY_KINDS)
    for step in (plan.steps // 2, plan.steps):
        assert plan.epsilon_after(step).lower <= plan.live_epsilon(step).upper <= plan.epsilon.upper * 1.02


@st.composite
def scenarios(draw):
    """(plan, step, changes): a plan with a target, when it is changed, and to what."""
    target, steps = draw(st.floats(0.2, 10.0)), draw(st.integers(2, 60))
    at = draw(st.integers(0, steps - 1))
    longer = draw(st.integers(at + 1, 150))
    fixed = draw(st.booleans())
    schedule = None if draw(st.booleans()) else [(steps // 2 + 1, 1.0), (None, draw(st.floats(0.5, 2.0)))]
    given = {**FIXED, "expected_batch_size": 100} if fixed else FULL
    declared = draw(st.booleans())
    plan = Plan(target_epsilon=target, **given, steps=steps, noise_schedule=schedule, data_dependent=declared)
    change = {"steps": longer}
    if fixed and draw(st.booleans()):
        change["expected_batch_size"] = draw(st.sampled_from([50, 100, 200, 1000]))
    return plan, at, change


@given(scenarios())
@settings(deadline=None, max_examples=15)
def test_a_recalibrated_plan_is_never_above_its_target(scenario):
    plan, at, change = scenario
    data_dependent = plan.data_dependent
    nothing_left = data_dependent and plan.releases_after(at) == plan.whole  # a pass under way counts as a whole one
    if nothing_left or (not data_dependent and plan.epsilon_after(at).upper >= plan.target_epsilon):
        with pytest.raises(ja.InputError, match="already exceeds|nothing is left"):
            plan.recalibrate(at, **change, data_dependent=data_dependent)
        return
    again = plan.recalibrate(at, **change, data_dependent=data_dependent)
    assert again.steps == change["steps"]
    assert [again.at(s)[2:] for s in range(at)] == [plan.at(s)[2:] for s in range(at)]
    exact = of_passes(again) if plan.sampling == "fixed_batches" else gaussian_epsilon(mu_after(again, again.steps))
    if data_dependent:
        assert again.epsilon.engine == "rdp_filter" and again.epsilon.upper == plan.epsilon.upper
    assert again.epsilon.upper <= plan.target_epsilon and exact <= plan.target_epsilon * ROUNDING
    assert again.epsilon.upper >= plan.target_epsilon * (1 - 2e-4) - 1e-4


def of_passes(plan):
    """Epsilon of a plan of fixed batches: a pass costs its least noise, and a new batch size begins a new pass."""
    worst, begun, size = [], None, None
    for step in range(plan.steps):
        segment = plan.at(step)
        if begun is None or segment.expected_batch_size != size or (step - begun) * size >= plan.dataset_size:
            begun, size = step, segment.expected_batch_size
            worst.append(0.0)
        worst[-1] = max(worst[-1], segment.noise_multiplier**-2.0)
    return gaussian_epsilon(math.sqrt(sum(worst)))
