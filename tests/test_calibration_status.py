"""A calibration says "ok" or `best` only of values that are shown to be so: checked against known least values."""

import warnings

import numpy as np
import pytest
from scipy.optimize import brentq
from scipy.special import log_ndtr, ndtri

import jaxacct as ja
from jaxacct import selection
from jaxacct.training import Plan


def least_mu(epsilon, delta):
    """mu of the Gaussian with delta(epsilon) = delta, by its closed form in logarithms."""

    def gap(x):
        mu = np.exp(x)
        one, two = log_ndtr(-epsilon / mu + mu / 2), epsilon + log_ndtr(-epsilon / mu - mu / 2)
        return one + np.log1p(-np.exp(two - one)) - np.log(delta) if two < one else -1e3

    return np.exp(brentq(gap, -25.0, 8.0, xtol=1e-13))


def honest(found, least, rising=False):
    """The share of values that are "ok" or best. All values must hold, and these must be within 1 % of the least."""
    value = np.asarray(found.value) if not rising else 1.0 / np.asarray(found.value)
    least = np.asarray(least) if not rising else 1.0 / np.asarray(least)
    ok = np.asarray(found.ok)
    assert np.all(value[ok] >= least[ok] * (1 - 1e-9))
    said = np.asarray(found.best) | (np.asarray(found.status) == "ok")
    assert np.all(value[said] <= 1.01 * least[said])
    return np.mean(said)


def test_no_early_stop_where_epsilon_falls_to_zero():
    found = ja.calibrate_noise_multiplier(1e-12, 0.999, 1.0, 1)
    least = 0.5 / ndtri(0.5 * 1.999)
    assert least <= found.value <= least * 1.001 and found.best and found.status == "ok"


def test_gaussians_at_the_ends_of_what_can_be_asked():
    epsilon = np.array([1e-9, 1e-4, 0.3, 1.0, 30.0, 200.0, 1e-3, 5.0, 0.1])
    delta = np.array([1e-3, 0.9, 1e-300, 0.999, 1e-12, 1e-5, 1e-100, 0.5, 1e-15])
    steps = np.array([1.0, 3.0, 1e6, 1.0, 1e15, 7.0, 1.0, 100.0, 1e9])
    found = ja.calibrate_noise_multiplier(epsilon, delta, 1.0, steps)
    least = [np.sqrt(n) / least_mu(e, d) for e, d, n in zip(epsilon, delta, steps, strict=True)]
    inside = np.array(least) < 1e6
    assert np.array_equal(found.ok, inside) and honest(found, least) == np.mean(inside)


def test_a_flat_epsilon_is_not_taken_for_the_best_value():
    # the loss of adding a record is at most log 2 here, and hardly changes with little noise
    flat = ja.calibrate_noise_multiplier(0.69314, 1e-5, 0.5, 1, relation="add_one")
    assert flat.ok and flat.status == "loose" and not flat.best and "hardly changes" in ja.explain(flat.status)
    steep = ja.calibrate_noise_multiplier(0.5, 1e-5, 0.5, 1, relation="add_one")
    assert steep.status == "ok" and steep.best


def test_the_end_of_the_search_is_not_the_best_unless_nothing_lies_beyond():
    assert not ja.calibrate_noise_multiplier(1e4, 1e-5, 1.0, 1).best
    assert not ja.calibrate_steps(100.0, 1e-5, 50.0, 0.01, max_steps=10).best
    assert ja.calibrate_sampling_probability(100.0, 1e-5, 50.0, 10).best


def test_a_bound_is_the_best_for_that_bound():
    found = ja.calibrate(
        lambda x: ja.ExponentialMechanism(x), target_epsilon=2.0, target_delta=1e-6, bracket=(0.1, 9.0), monotone=True
    )
    assert found.epsilon.kind == "bound" and found.status == "ok" and found.best


def test_whole_numbers_next_to_each_other_decide():
    found = ja.calibrate(
        lambda n: ja.repeat(ja.Laplace(10.0), n),
        target_epsilon=[2.95, 3.0],
        target_delta=0.0,
        bracket=(1, 1000),
        whole=True,
        monotone=True,
    )
    assert found.value.tolist() == [29.0, 29.0]  # the sum of 30 is 3, rounded up: more than 3
    assert found.status.tolist() == ["ok", "loose"] and found.best.tolist() == [True, False]


def test_delta_zero():
    counts = ja.calibrate(
        lambda b: ja.repeat(ja.Laplace(b), 10),
        target_epsilon=3.0,
        target_delta=0.0,
        bracket=(0.1, 100.0),
        monotone=True,
    )
    assert 10 / 3 <= counts.value <= 10 / 3 * 1.0001 and counts.best and counts.epsilon.upper <= 3.0
    pure = ja.calibrate(ja.PureDP, target_epsilon=0.3, target_delta=0.0, bracket=(1e-3, 9.0), monotone=True)
    assert 0.3 * 0.9999 <= pure.value <= 0.3 and pure.best
    odds = ja.calibrate(
        lambda r: ja.RandomizedResponse(r / (1 + r)),
        target_epsilon=0.3,
        target_delta=0,
        bracket=(1.01, 9),
        monotone=True,
    )
    assert np.exp(0.3) * 0.9999 <= odds.value <= np.exp(0.3) and odds.best
    assert not ja.calibrate(
        lambda d: ja.ApproximateDP(1.0, d), target_epsilon=3.0, target_delta=0.0, bracket=(1e-9, 0.5)
    ).ok


UNBOUNDED = [
    ja.Gaussian,
    lambda s: ja.compose(ja.Laplace(2.0), ja.Gaussian(s)),
    pytest.param(lambda s: ja.RandomAllocation(ja.Gaussian(s), 10), marks=pytest.mark.slow),
    pytest.param(lambda s: selection.select(ja.Gaussian(s), selection.Geometric(0.5)), marks=pytest.mark.slow),
]


@pytest.mark.parametrize("unbounded", UNBOUNDED)
def test_delta_zero_of_an_unbounded_loss_is_a_status(unbounded):
    found = ja.calibrate(unbounded, target_epsilon=1.0, target_delta=[0.0, 0.1], bracket=(0.05, 50.0))
    assert found.ok.tolist() == [False, True] and found.status[0].startswith("infeasible")
    assert np.isnan(found.value[0]) and found.epsilon.upper[1] <= 1.0


def test_rates_that_need_a_negative_epsilon():
    found = ja.calibrate_noise_multiplier(sampling_probability=1.0, steps=1, target_tpr=1 - 1e-9, at_fpr=0.5)
    least = 1.0 / (ndtri(1 - 1e-9) - ndtri(0.5))
    assert least <= found.value <= 1.0005 * least and found.best and found.epsilon.upper < 0.0
    rate, fpr = (x.ravel() for x in np.meshgrid([0.3, 0.6, 0.95, 1 - 1e-6], [1e-3, 0.2, 0.29]))
    found = ja.calibrate_noise_multiplier(sampling_probability=1.0, steps=4, target_tpr=rate, at_fpr=fpr)
    assert found.ok.all() and np.all(found.risk.upper <= rate)
    assert honest(found, 2.0 / (ndtri(rate) - ndtri(fpr))) >= 0.8
    found = ja.calibrate_noise_multiplier(sampling_probability=0.1, steps=100, target_tpr=0.6, at_fpr=0.5)
    curve, bolder = (ja.profile(ja.dp_sgd(share * found.value, 0.1, 100)) for share in (1.0, 0.999))
    assert found.best and 1 - curve.tradeoff(0.5).lower <= 0.6 * (1 + 1e-9) and 1 - bolder.tradeoff(0.5).upper > 0.6


def test_advantages_near_one():
    advantage = np.array([0.1, 0.99, 0.999999])
    found = ja.calibrate_noise_multiplier(target_advantage=advantage, sampling_probability=1.0, steps=1)
    assert honest(found, 0.5 / ndtri(0.5 * (1 + advantage))) == 1.0


def test_a_plan_that_does_not_reach_its_target_says_so():
    with pytest.warns(
        UserWarning, match=r"target_epsilon = 10000.0 is not reached: noise_multiplier = 0.1 .*epsilon <="
    ):
        plan = Plan(target_epsilon=1e4, target_delta=1e-5, dataset_size=1000, sampling_probability=1.0, steps=4)
    assert plan.status == "not_binding" and "the target is not reached" in plan._repr_html_()
    assert Plan.from_json(plan.to_json()).status == "not_binding"
    with pytest.warns(UserWarning, match="sampling_probability = 1.0 is the limit"):
        Plan(target_epsilon=300.0, target_delta=1e-5, dataset_size=1000, noise_multiplier=3.0, steps=100)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan = Plan(target_epsilon=2.0, target_delta=1e-5, dataset_size=1000, sampling_probability=1.0, steps=4)
    assert plan.status == "ok" and "not reached" not in plan._repr_html_()


def test_a_small_risk_of_one_or_two_steps_is_shown_to_be_met_best():
    found = ja.calibrate_sampling_probability(
        target_reconstruction=0.03201, baseline=0.01, noise_multiplier=[0.45, 0.52, 0.56], steps=[[1], [2]]
    )
    assert np.all(found.status == "ok")
