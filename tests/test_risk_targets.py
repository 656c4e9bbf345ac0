"""Calibration to a risk: held against the reference table, closed forms and the profile's own readings."""

import numpy as np
import pytest
from helpers import refusal
from scipy.special import ndtri

import jaxacct as ja
from jaxacct.calibration import risks
from jaxacct.selection import Geometric

# from shared/reference/risk.csv: noise multiplier, rate, steps; advantage, tpr at fpr .001, mu above the floor 1e-10
RUNS = [
    (1.0, 0.1, 1, 0.0382924923, 0.00272984684, 0.601927),
    (0.5, 0.5, 1, 0.341344746, 0.0694027064, 1.85071),
    (1.0, 0.01, 1000, 0.16101762, 0.00406844788, 0.522201),
    (3.0, 0.2, 1000, 0.714372907, 0.174563241, 2.18409),
]
NOISE, RATE, STEPS, ADVANTAGE, TPR_001, MU = np.array(RUNS).T
noise, rate, steps = ja.calibrate_noise_multiplier, ja.calibrate_sampling_probability, ja.calibrate_steps


def checked(found, target, truth, slack):
    assert np.all(found.ok) and np.all(found.risk.upper <= target) and np.all(found.risk.lower <= found.risk.upper)
    # the table is rounded to nine digits
    assert np.all(np.abs(found.value / truth - 1.0) <= slack)


def test_advantage_agrees_with_the_reference():
    checked(noise(target_advantage=ADVANTAGE, sampling_probability=RATE, steps=STEPS), ADVANTAGE, NOISE, 1e-4)


def test_true_positive_rates_agree_with_the_reference():
    found = noise(target_tpr=TPR_001, at_fpr=0.001, sampling_probability=RATE, steps=STEPS)
    checked(found, TPR_001, NOISE, 1e-4)
    assert np.all(found.risk.lower >= 0.98 * TPR_001) and np.all(np.asarray(found.risk.kind) == "certified")
    assert np.all(found.epsilon.lower == found.epsilon.upper)
    # delta at eps* alone proves the target, whichever eps* was found
    delta = ja.delta(ja.dp_sgd(found.value, RATE, STEPS), found.epsilon.upper).upper
    assert np.all(delta + np.exp(found.epsilon.upper) * 0.001 <= TPR_001 * (1 + 1e-8))


def test_posterior_and_reconstruction_are_true_positive_rates():
    posterior = 0.1 * TPR_001[:2] / (0.1 * TPR_001[:2] + 0.9 * 0.001)
    found = noise(target_posterior=posterior, prior=0.1, at_fpr=0.001, sampling_probability=RATE[:2], steps=1)
    checked(found, posterior, NOISE[:2], 1e-4)
    found = noise(target_reconstruction=TPR_001[:2], baseline=0.001, sampling_probability=RATE[:2], steps=1)
    checked(found, TPR_001[:2], NOISE[:2], 1e-4)


def test_bayes_success_agrees_with_the_reference():
    found = noise(
        target_bayes_success=[0.910266131, 0.905502962, 0.906399351],
        prior=[0.1, 0.9, 0.1],
        sampling_probability=[0.5, 0.01, 0.01],
        steps=[1, 10_000, 10_000],
    )
    checked(found, [0.910266131, 0.905502962, 0.906399351], [0.5, 1.0, 1.0], 1e-4)


def test_mu_agrees_with_the_reference():
    found = noise(target_mu=MU[2], sampling_probability=RATE[2], steps=STEPS[2])
    checked(found, MU[2], NOISE[2], 2e-4)
    full = noise(target_mu=[0.5, 2.0], sampling_probability=1.0, steps=4)
    checked(full, [0.5, 2.0], [4.0, 1.0], 1e-4)
    lower_floor = noise(target_mu=MU[2], above_fpr=1e-12, sampling_probability=0.01, steps=1000)
    assert lower_floor.value > found.value


def test_steps_and_sampling_probability():
    found = steps(target_advantage=[0.161018, 0.3415], noise_multiplier=[1.0, 0.5], sampling_probability=[0.01, 0.5])
    assert found.value.tolist() == [1000.0, 1.0] and np.all(found.risk.upper <= [0.161018, 0.3415])
    found = steps(target_tpr=0.0040686, at_fpr=0.001, noise_multiplier=1.0, sampling_probability=0.01)
    assert found.value == 1000.0 and found.risk.upper <= 0.0040686
    checked(rate(target_tpr=TPR_001[0], at_fpr=0.001, noise_multiplier=1.0, steps=1), TPR_001[0], 0.1, 1e-4)
    checked(rate(target_advantage=ADVANTAGE[:2], noise_multiplier=NOISE[:2], steps=1), ADVANTAGE[:2], RATE[:2], 1e-4)
    most = rate(target_advantage=0.9, noise_multiplier=10.0, steps=1)
    assert most.value == 1.0 and most.status == "not_binding" and most.ok
    never = steps(target_advantage=1e-3, noise_multiplier=0.5, sampling_probability=0.5)
    assert not never.ok and never.status == "infeasible_steps" and np.isnan(never.risk.upper)


def test_of_gaussians_it_is_the_closed_form():
    fpr, power = 1e-4, np.array([0.01, 0.2, 0.9])
    found = noise(target_tpr=power, at_fpr=fpr, sampling_probability=1.0, steps=1)
    checked(found, power, 1.0 / (ndtri(power) - ndtri(fpr)), 1e-4)
    advantage = np.array([1e-3, 0.1, 0.9])
    found = noise(target_advantage=advantage, sampling_probability=1.0, steps=1)
    checked(found, advantage, 0.5 / ndtri(0.5 * (1.0 + advantage)), 1e-4)


def test_the_old_calls_are_unchanged():
    found = noise(1.0, 1e-5, 1.0, 1)
    assert found.ok and found.epsilon.upper <= 1.0 and found.risk is None
    assert noise(1.0, 1e-5, sampling_probability=1.0, steps=1).value == found.value


def test_bad_input_has_one_line():
    run = {"sampling_probability": 0.1, "steps": 10}
    assert "0 targets are given; give target_epsilon with target_delta, or one of" in refusal(noise, **run)
    assert "2 targets are given (target_epsilon, target_mu)" in refusal(noise, 1.0, 1e-5, target_mu=1.0, **run)
    assert "target_epsilon needs target_delta" in refusal(noise, 1.0, **run)
    assert "target_tpr needs at_fpr" in refusal(noise, target_tpr=0.1, **run)
    assert "prior belongs to target_bayes_success or target_posterior" in refusal(
        noise, target_advantage=0.1, prior=0.1, **run
    )
    message = refusal(noise, target_bayes_success=[0.95, 0.9], prior=0.1, **run)
    assert message.startswith("target_bayes_success[1] = 0.9 must be above max(prior, 1 - prior) = 0.9")
    for one in (0.01, [0.01]):  # as the command line has it, in a table of one row
        assert "target_tpr = 0.01 must be above at_fpr" in refusal(noise, target_tpr=one, at_fpr=0.01, **run)
    assert "target_posterior = 0.1 must be above prior" in refusal(
        noise, target_posterior=0.1, prior=0.1, at_fpr=0.01, **run
    )
    assert "sampling_probability is missing" in refusal(noise, target_advantage=0.1, steps=10)
    assert "above_fpr = 0.5 must be" in refusal(noise, target_mu=1.0, above_fpr=0.5, **run)
    assert "repetitions goes with target_epsilon" in refusal(
        noise, target_advantage=0.1, repetitions=Geometric(0.1), **run
    )


def test_a_row_out_of_reach_does_not_end_the_batch():
    found = noise(target_advantage=[1e-9, 0.2], sampling_probability=1.0, steps=10**9)
    assert found.ok.tolist() == [False, True] and found.status[0] == "infeasible_noise"
    assert np.isnan(found.value[0]) and np.isnan(found.risk.upper[0]) and found.risk.upper[1] <= 0.2


def test_nothing_is_sampled():
    for target in ({"target_advantage": 0.1}, {"target_tpr": 0.1, "at_fpr": 0.01}, {"target_mu": 1.0}):
        found = noise(sampling_probability=0.0, steps=10, **target)
        assert found.ok and found.status == "not_binding", target


@pytest.mark.filterwarnings("error")
def test_targets_at_the_ends_of_float64_have_a_status():
    def held(goal, **target):
        found = noise(sampling_probability=1.0, steps=1, **target)
        assert found.risk.upper <= goal if found.ok else found.status == "infeasible_noise"

    for value, fpr in ((np.nextafter(0.01, 1.0), 0.01), (1e-299, 1e-300), (1.0 - 1e-15, 1e-300), (0.5, 0.4)):
        held(value, target_tpr=value, at_fpr=fpr)
    for value, prior in ((np.nextafter(0.9, 1.0), 0.1), (1.0 - 1e-16, 0.1), (1.0 - 1e-11, 1e-10), (1 - 1e-16, 1e-300)):
        if value > max(prior, 1 - prior):
            held(value, target_bayes_success=value, prior=prior)
    for value, prior in ((0.5, 1e-300), (1e-299, 1e-300), (1.0 - 1e-16, 0.5), (np.nextafter(0.9, 1.0), 0.9)):
        held(value, target_posterior=value, prior=prior, at_fpr=0.01)
    for value in (1e-300, 1.0 - 1e-16):
        held(value, target_advantage=value)
    for value in (1e-300, 1e3):
        held(value, target_mu=value)


@pytest.mark.parametrize("target, fpr", [(0.95, 0.9), pytest.param(0.5, 1e-300, marks=pytest.mark.slow)])
def test_rates_at_the_ends_of_float64_say_nothing_on_the_way(target, fpr):
    """The old search tried an eps at which e^eps overflowed, and so it warned."""
    found = noise(target_tpr=target, at_fpr=fpr, sampling_probability=0.5, steps=1)
    assert found.ok and found.risk.upper <= target
    assert found.epsilon.upper < 0.0 if fpr == 0.9 else not found.best  # at 1e-300: the least noise searched


def test_noise_for_a_rate_is_the_smallest_even_where_few_hits_are_expected():
    # with slightly less noise the profile's own reading, which searches its eps anew, exceeds the target
    q, t, goal = 1.65e-4, 66931, 0.0566
    found = noise(target_tpr=goal, at_fpr=0.01, sampling_probability=q, steps=t)
    assert found.ok and found.best and found.risk.upper <= goal
    assert found.risk.lower >= 0.98 * goal and found.risk.status == "ok"
    below, at = ja.profile(ja.dp_sgd(found.value * np.array([1 - 2e-4, 1.0]), q, t)).tradeoff(0.01).upper
    assert 1.0 - below > goal and 1.0 - at <= goal


def test_noise_for_a_mu_is_the_smallest():
    q, t, goal = 0.01, 1000, 0.5
    found = noise(target_mu=goal, above_fpr=1e-6, sampling_probability=q, steps=t)
    assert found.ok and found.risk.upper <= goal
    assert found.risk.upper - found.risk.lower <= 1e-4 * found.risk.upper
    mu = ja.profile(ja.dp_sgd(found.value * np.array([1 - 1e-4, 1.0]), q, t)).gdp_mu(1e-6)
    assert mu.lower[0] > goal >= mu.lower[1] and mu.upper[1] >= found.risk.lower


def test_every_relation_meets_a_rate_in_its_own_direction():
    ends = [
        noise(target_tpr=0.1, at_fpr=0.01, sampling_probability=0.05, steps=1000, relation=relation)
        for relation in ("remove_one", "add_one", "add_or_remove_one")
    ]
    assert all(found.ok and found.risk.upper <= 0.1 and found.risk.lower >= 0.098 for found in ends)
    assert ends[1].value < ends[0].value and ends[2].value == pytest.approx(ends[0].value, rel=1e-4)


def test_an_empty_batch_of_risks_is_answered():
    run = {"sampling_probability": [], "steps": []}
    for risk in (("target_tpr", "at_fpr"), ("target_bayes_success", "prior"), ("target_posterior", "prior", "at_fpr")):
        assert ja.calibrate_noise_multiplier(**run, **{key: [] for key in risk}).value.shape == (0,)


def test_a_record_that_is_seldom_sampled_needs_no_search(monkeypatch):
    """The rate of any test exceeds its false-positive rate by at most the chance of a sample."""
    monkeypatch.setattr(risks, "_by_contour", None)
    given = {"target_tpr": [0.02, 0.99], "at_fpr": [0.01, 0.98], "sampling_probability": 1e-3, "steps": 9}
    found = ja.calibrate_noise_multiplier(**given)
    assert found.status.tolist() == ["not_binding", "not_binding"] and np.all(found.risk.upper <= given["target_tpr"])
