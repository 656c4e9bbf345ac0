"""Samples of compositions as events, true positive rates, mu, and errors of the types that callers catch."""

import math

import dp_accounting as dpa
import numpy as np
import pytest
from dp_accounting import dp_event
from helpers import refusal
from scipy.stats import norm

import jaxacct as ja
from jaxacct import interop
from jaxacct.interop.accountant import CertifiedAccountant

Gauss, Laplace, Poisson = dpa.GaussianDpEvent, dpa.LaplaceDpEvent, dpa.PoissonSampledDpEvent
Repeat, Compose, Fixed = dpa.SelfComposedDpEvent, dpa.ComposedDpEvent, dp_event.SampledWithoutReplacementDpEvent
Response, Discrete = dpa.RandomizedResponseDpEvent, dp_event.DiscreteLaplaceDpEvent
REPLACE, SPECIAL = dpa.NeighboringRelation.REPLACE_ONE, dpa.NeighboringRelation.REPLACE_SPECIAL

BOTH = ja.compose(ja.Gaussian(2.0), ja.repeat(ja.Laplace(5.0), 2))
EVENT = Compose([Gauss(2.0), Repeat(Laplace(5.0), 2)])


@pytest.mark.parametrize(
    "event, mechanism",
    [
        (Poisson(0.25, EVENT), ja.PoissonSampled(BOTH, 0.25)),
        (
            Repeat(Poisson(0.25, Repeat(Gauss(2.0), 3)), 5),
            ja.repeat(ja.PoissonSampled(ja.repeat(ja.Gaussian(2.0), 3), 0.25), 5),
        ),
        (Fixed(100, 7, EVENT), ja.SampledWithoutReplacement(BOTH, 0.07)),
        (Poisson(0.5, Poisson(0.5, EVENT)), ja.PoissonSampled(ja.PoissonSampled(BOTH, 0.5), 0.5)),
        (
            Poisson(0.25, dp_event.MixtureOfGaussiansDpEvent(2.0, [0.0, 1.0], [0.5, 0.5])),
            ja.PoissonSampled(ja.MixtureOfGaussians(2.0, [0.0, 1.0], [0.5, 0.5]), 0.25),
        ),
        (Poisson(0.25, Discrete(0.5, 1)), ja.PoissonSampled(ja.DiscreteLaplace(2.0), 0.25)),
        (Poisson(0.25, Response(0.5, 2)), ja.PoissonSampled(ja.RandomizedResponse(0.75), 0.25)),
        (Poisson(0.25, dp_event.ZCDpEvent(0.5)), ja.PoissonSampled(ja.ZCDP(0.5), 0.25)),
    ],
    ids=lambda x: type(x).__name__,
)
def test_there_and_back(event, mechanism):
    assert interop.from_dp_event(event) == mechanism
    back = interop.to_dp_event(mechanism) if "ZCDP" not in repr(mechanism) else event
    assert interop.from_dp_event(back) == mechanism
    assert interop.from_json(interop.to_json(mechanism)) == mechanism
    assert eval(mechanism.expression(), {"ja": ja}) == mechanism


@pytest.mark.slow
def test_the_accountant_asks_about_the_sample_as_a_whole():
    for relation, name in ((SPECIAL, "zero_out"), (REPLACE, "replace_one")):
        for event, mechanism in (
            (Poisson(0.1, EVENT), ja.PoissonSampled(BOTH, 0.1)),
            (Fixed(10, 1, EVENT), ja.SampledWithoutReplacement(BOTH, 0.1)),
        ):
            accountant = CertifiedAccountant(relation).compose(event)
            assert accountant.get_epsilon(1e-5) == ja.epsilon(mechanism, 1e-5, relation=name).upper
    bounded = CertifiedAccountant().compose(Poisson(0.1, Repeat(Laplace(2.0), 3)))
    assert bounded.get_epsilon(0.0) == pytest.approx(math.log1p(0.1 * math.expm1(1.5)), rel=1e-9)
    assert CertifiedAccountant().compose(Poisson(0.1, EVENT)).get_epsilon(0.0) == math.inf
    assert CertifiedAccountant().compose(Poisson(0.1, Compose([Gauss(1.0), Gauss(0.0)]))).get_epsilon(0.1) == math.inf
    assert CertifiedAccountant().compose(Poisson(0.0, Compose([Gauss(0.0)]))).get_epsilon(0.1) == 0.0


def test_a_sample_of_repetitions_beside_dp_accounting():
    """Four Gaussian releases of one sample equal one with half the noise, which dp_accounting can compose."""
    event = Poisson(0.2, Repeat(Gauss(2.0), 4))
    ours = CertifiedAccountant().compose(event, 10).get_epsilon(1e-5)
    accountant = dpa.pld.PLDAccountant(value_discretization_interval=1e-3)
    theirs = accountant.compose(Poisson(0.2, Gauss(1.0)), 10).get_epsilon(1e-5)
    assert ours <= theirs * (1 + 1e-6) and ours == pytest.approx(theirs, rel=1e-3)


def test_true_positive_rates():
    accountant = CertifiedAccountant().compose(Gauss(2.0), 4)
    rates = np.array([1e-6, 0.01, 0.3])
    exact = norm.cdf(norm.ppf(rates) + 1.0)
    found = accountant.get_true_positive_rates(rates, deltas=[1e-5])
    assert isinstance(found, np.ndarray) and np.all(found >= exact) and np.allclose(found, exact, rtol=1e-5)
    one = accountant.get_true_positive_rates(0.01)
    assert isinstance(one, float) and one == found[1]
    assert CertifiedAccountant().get_true_positive_rates(0.2) == pytest.approx(0.2, abs=1e-12)
    exposed = CertifiedAccountant().compose(dpa.NonPrivateDpEvent())
    assert exposed.get_true_positive_rates(0.1) == 1.0 and exposed.get_true_positive_rates(rates).tolist() == [1.0] * 3
    assert "false_positive_rates" in refusal(accountant.get_true_positive_rates, 1.5)


def test_true_positive_rates_of_pure_privacy():
    """The rates lie between those of Laplace noise and randomised response, min(e^eps a, 1 - e^-eps (1 - a))."""
    rates, eps = np.array([0.0, 0.2, 1.0]), 1.0
    accountant = CertifiedAccountant(SPECIAL).compose(Laplace(1.0))
    most = np.minimum(np.exp(eps) * rates, 1.0 - np.exp(-eps) * (1.0 - rates))
    found = accountant.get_true_positive_rates(rates)
    assert np.all(found <= most + 1e-9)
    x = np.linspace(-30.0, 30.0, 60_001)  # Laplace noise: the tests are half lines
    wrong, right = (np.where(x < m, 1 - 0.5 * np.exp(x - m), 0.5 * np.exp(-np.abs(x - m))) for m in (0.0, 1.0))
    assert np.all(found >= np.interp(rates, wrong[::-1], right[::-1]) - 1e-6)


@pytest.mark.slow
def test_gdp_parameter():
    accountant = CertifiedAccountant().compose(Gauss(2.0), 4)
    assert 1.0 <= accountant.get_gdp_parameter_estimate() <= 1.0 + 1e-6
    assert 1.0 <= accountant.get_gdp_parameter_estimate([1e-4, 0.1], deltas=[1e-6]) <= 1.0 + 1e-4
    assert CertifiedAccountant().compose(dpa.NonPrivateDpEvent()).get_gdp_parameter_estimate() == math.inf
    step = CertifiedAccountant().compose(Poisson(0.1, Gauss(1.0)), 50)
    mu, rates = step.get_gdp_parameter_estimate([0.01, 0.1]), np.array([0.01, 0.1])
    reached = step.get_true_positive_rates(rates)
    bound = norm.cdf(norm.ppf(rates) + mu)
    assert np.all(bound >= reached) and np.isclose(bound, reached, rtol=1e-9).any()
    assert mu <= step.get_gdp_parameter_estimate() * (1 + 1e-9)


@pytest.mark.parametrize(
    "event", [Gauss(1.0), Laplace(2.0), Poisson(0.2, Gauss(1.0))], ids=["gauss", "laplace", "sampled"]
)
def test_delta_at_negative_epsilon(event):
    """H at e^-x of (P, Q) is 1 - e^-x + e^-x H at e^x of (Q, P)."""
    accountant = CertifiedAccountant().compose(event)
    for x in (0.1, 1.0, 5.0):
        exact = -math.expm1(-x) + math.exp(-x) * accountant.get_delta(x)
        assert exact * (1 - 1e-6) <= accountant.get_delta(-x) <= exact * (1 + 1e-6)
    assert accountant.get_delta(-math.inf) == 1.0


@pytest.mark.parametrize("event", [Gauss(-1.0), Laplace(-1.0), Poisson(1.5, Gauss(1.0)), Poisson(-0.1, Gauss(1.0))])
def test_numbers_out_of_range_are_value_errors(event):
    for error in (ValueError, dpa.UnsupportedEventError, ja.InputError):
        refusal(CertifiedAccountant().compose, event, error=error)
    assert not CertifiedAccountant().supports(event)


def test_opacus_s_arguments():
    pytest.importorskip("opacus")
    accountant = interop.OpacusAccountant()
    accountant.history = [(1.0, 0.01, 100)]
    for call in ({"alphas": [2.0, 3.0]}, {"eps_error": 0.01, "delta_error": 1e-8}, {"poisson": True}):
        assert accountant.get_epsilon(1e-5, **call) == accountant.get_epsilon(1e-5)
    assert accountant.get_epsilon(1e-5, [2.0, 3.0]) == accountant.get_epsilon(1e-5)
    assert "ja.ShuffledBatches" in refusal(accountant.get_epsilon, 1e-5, poisson=False)


def test_batch_rules_with_a_class_of_their_own_are_named():
    assert "ja.BallsInBins(" in refusal(ja.dp_sgd, 1.0, 0.01, 100, sampling="balls_in_bins")


def test_no_advice_leaks_less():
    """The advised run has no smaller epsilon (or delta) than a similar run that can be accounted for."""
    group = refusal(ja.dp_sgd, 1.0, 0.1, 5, sampling="truncated_poisson", dataset_size=100, cap=30, group=2)
    assert "ja.dp_sgd(noise_multiplier / (2 * group), 1.0, steps), which leaks no less" in group
    advised = ja.epsilon(ja.dp_sgd(1.0 / 4.0, 1.0, 5), 1e-5).upper
    assert advised >= ja.epsilon(ja.dp_sgd(1.0, 0.1, 5, group=2), 1e-5).upper
    mixture = ja.MixtureOfGaussians(2.0, [0.0, 1.0, 3.0], [0.2, 0.5, 0.3])
    assert "ja.Gaussian(noise_multiplier / largest sensitivity)" in refusal(
        ja.epsilon, mixture, 1e-5, relation="replace_one"
    )
    assert ja.epsilon(ja.Gaussian(2.0 / 3.0), 1e-5).upper >= ja.epsilon(mixture, 1e-5).upper
    many = ja.DiscreteLaplace(5000.0, sensitivity=5000)
    assert "ja.PureDP(sensitivity / scale)" in refusal(ja.epsilon, many, 1e-5)
    few = ja.DiscreteLaplace(2.0, sensitivity=2)  # continuous noise of the same scale has a smaller delta
    assert ja.delta(ja.PureDP(1.0), 0.1).upper >= ja.delta(few, 0.1).upper > ja.delta(ja.Laplace(1.0), 0.1).upper
    several = ja.repeat(ja.Gaussian(2.0), 4)
    for build in (
        lambda: ja.RandomAllocation(several, 10),
        lambda: ja.TruncatedPoissonSampled(several, 0.1, 100, 20),
        lambda: ja.SampledWithReplacement(several, 10, 100),
    ):
        assert "(sum z^-2)^(-1/2)" in refusal(build)
    for build in (
        lambda: ja.TruncatedPoissonSampled(ja.Laplace(1.0), 0.1, 100, 20),
        lambda: ja.PoissonSampled(ja.Laplace(1.0), 0.1, group=2),
    ):
        assert "without the sampling, with noise for the most that all the records together move it" in refusal(build)
