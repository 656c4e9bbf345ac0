"""Noise for a target risk: held against the reference table, closed forms and the profile's own readings."""

import numpy as np
import pytest
from helpers import refusal
from scipy.special import ndtri

import jaxacct as ja

RUNS = [  # noise multiplier, rate, steps; then of shared/reference/risk.csv: advantage, tpr at .01 and at .001
    (1.0, 0.1, 1, 0.0382924923, 0.0182362248, 0.00272984684),
    (0.5, 0.5, 1, 0.341344746, 0.191040293, 0.0694027064),
    (1.0, 0.01, 1000, 0.16101762, 0.0291390946, 0.00406844788),
    (0.8, 0.01, 2000, 0.32074031, 0.0744412177, 0.0145887568),
    (3.0, 0.2, 1000, 0.714372907, 0.428818474, 0.174563241),
]
NOISE, RATE, STEPS, ADVANTAGE, TPR_01, TPR_001 = np.array(RUNS).T


def checked(found, target, noise, slack):
    assert np.all(found.ok) and np.all(found.risk.upper <= target)
    # the table is rounded to nine digits
    assert np.all(np.abs(found.value / noise - 1.0) <= slack)


def test_advantage_agrees_with_the_reference():
    checked(ja.calibrate_noise_to_risk(RATE, STEPS, advantage=ADVANTAGE), ADVANTAGE, NOISE, 1e-4)


@pytest.mark.parametrize(("fpr", "rates"), [(0.01, TPR_01), (0.001, TPR_001)])
def test_true_positive_rates_agree_with_the_reference(fpr, rates):
    found = ja.calibrate_noise_to_risk(RATE, STEPS, true_positive_rate=rates, at_fpr=fpr)
    checked(found, rates, NOISE, 1e-4)
    assert np.all(np.asarray(found.risk.kind) == "bound")


def test_bayes_success_agrees_with_the_reference():
    found = ja.calibrate_noise_to_risk([0.5, 0.01], [1, 10_000], bayes_success=[0.910266131, 0.906399351], prior=0.1)
    checked(found, [0.910266131, 0.906399351], [0.5, 1.0], 1e-4)
    other = ja.calibrate_noise_to_risk(
        [0.01, 0.01], [10_000, 10_000], bayes_success=[0.905502962, 0.906399351], prior=[0.9, 0.1]
    )
    checked(other, [0.905502962, 0.906399351], [1.0, 1.0], 1e-4)


def test_of_gaussians_it_is_the_closed_form():
    fpr, rate = 1e-4, np.array([0.01, 0.2, 0.9])
    found = ja.calibrate_noise_to_risk(1.0, 1, true_positive_rate=rate, at_fpr=fpr)
    checked(found, rate, 1.0 / (ndtri(rate) - ndtri(fpr)), 1e-4)
    advantage = np.array([1e-3, 0.1, 0.9])
    found = ja.calibrate_noise_to_risk(1.0, 1, advantage=advantage)
    checked(found, advantage, 0.5 / ndtri(0.5 * (1.0 + advantage)), 1e-4)


def test_the_profile_at_the_noise_has_the_risk():
    found = ja.calibrate_noise_to_risk(0.02, 500, true_positive_rate=0.05, at_fpr=0.01)
    at = ja.profile(ja.dp_sgd(float(found.value), 0.02, 500))
    reading = at.true_positive_rate(0.01)
    assert reading.lower <= found.risk.upper <= 0.05 and reading.upper >= 0.05 * (1 - 1e-3)
    bayes = ja.calibrate_noise_to_risk(0.02, 500, bayes_success=0.6, prior=0.5)
    reading = ja.profile(ja.dp_sgd(float(bayes.value), 0.02, 500)).bayes_success(0.5)
    assert reading.lower <= bayes.risk.upper <= 0.6 and reading.upper >= 0.6 - 1e-4


def test_bad_input_has_one_line():
    call = ja.calibrate_noise_to_risk
    assert "0 targets are given" in refusal(call, 0.1, 10)
    assert "at_fpr belongs to the target true_positive_rate" in refusal(call, 0.1, 10, true_positive_rate=0.1)
    assert "prior belongs to the target bayes_success" in refusal(call, 0.1, 10, advantage=0.1, prior=0.1)
    message = refusal(call, 0.1, 10, bayes_success=[0.95, 0.9], prior=0.1)
    assert message.startswith("bayes_success[1] = 0.9 must be above max(prior, 1 - prior) = 0.9")
    assert "true_positive_rate = 0.01 must be above at_fpr" in refusal(
        call, 0.1, 10, true_positive_rate=0.01, at_fpr=0.01
    )


def test_a_row_out_of_reach_does_not_end_the_batch():
    found = ja.calibrate_noise_to_risk(1.0, 10**9, advantage=[1e-9, 0.2])
    assert found.ok.tolist() == [False, True] and found.status[0] == "infeasible_noise"
    assert np.isnan(found.value[0])


@pytest.mark.filterwarnings("error")
def test_targets_at_the_ends_of_float64_have_a_status():
    for value, fpr in ((np.nextafter(0.01, 1.0), 0.01), (1e-299, 1e-300), (1.0 - 1e-15, 1e-300), (0.5, 0.4)):
        found = ja.calibrate_noise_to_risk(1.0, 1, true_positive_rate=value, at_fpr=fpr)
        assert found.risk.upper <= value if found.ok else found.status == "infeasible_noise"
    for value, prior in ((np.nextafter(0.9, 1.0), 0.1), (1.0 - 1e-16, 0.1), (1.0 - 1e-11, 1e-10)):
        found = ja.calibrate_noise_to_risk(0.5, 100, bayes_success=value, prior=prior)
        assert found.risk.upper <= value if found.ok else found.status == "infeasible_noise"
    for value in (1e-300, 1.0 - 1e-16):
        found = ja.calibrate_noise_to_risk(1.0, 1, advantage=value)
        assert found.risk.upper <= value if found.ok else found.status == "infeasible_noise"
