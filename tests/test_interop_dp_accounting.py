"""The accountant against dp_accounting's own tests, tables and accountants."""

import math
from types import SimpleNamespace

import dp_accounting as dpa
import mpmath
import numpy as np
import pytest
from dp_accounting import dp_event, privacy_accountant_test
from dp_accounting.pld import privacy_loss_distribution as pld
from helpers import doctests_of, refusal
from scipy.stats import norm

import jaxacct as ja
from jaxacct import interop
from jaxacct.interop import accountant as accountant_module
from jaxacct.interop.accountant import CertifiedAccountant
from jaxacct.mechanisms import sampled_releases

ADD_OR_REMOVE, REPLACE = dpa.NeighboringRelation.ADD_OR_REMOVE_ONE, dpa.NeighboringRelation.REPLACE_ONE
SPECIAL = dpa.NeighboringRelation.REPLACE_SPECIAL
Gauss, Laplace, Poisson = dpa.GaussianDpEvent, dpa.LaplaceDpEvent, dpa.PoissonSampledDpEvent
Discrete, Mixture = dpa.dp_event.DiscreteLaplaceDpEvent, dpa.dp_event.MixtureOfGaussiansDpEvent
Repeat, Compose, Response = dpa.SelfComposedDpEvent, dpa.ComposedDpEvent, dpa.RandomizedResponseDpEvent


def test_doctests():
    assert doctests_of(accountant_module) > 0


class TestContract(privacy_accountant_test.PrivacyAccountantTest):
    """dp_accounting's own abstract test of what every PrivacyAccountant must do."""

    def _make_test_accountants(self):
        return [CertifiedAccountant(relation) for relation in (ADD_OR_REMOVE, REPLACE, SPECIAL)]


# Events, epsilons, deltas and tolerances of dp_accounting 0.6.0's pld_privacy_accountant_test.py:
# (events with counts, relation, epsilon, delta, tolerance in delta, tolerance in epsilon).
PUBLISHED = {
    "gaussian": ([(Gauss(math.sqrt(3)), 1), (Gauss(math.sqrt(3)), 2)], ADD_OR_REMOVE, 1, 0.126936, 1e-3, 1e-3),
    "laplace": ([(Laplace(1), 3), (Laplace(2), 2)], ADD_OR_REMOVE, 4, 1e-14, 1e-6, 1e-6),
    "sampled laplace": ([(Poisson(0.2, Laplace(0.5)), 3)], ADD_OR_REMOVE, 2.46964, 1e-14, 1e-6, 1e-3),
    "sampled": (
        [(Poisson(0.2, Gauss(0.5)), 1), (Repeat(Poisson(0.2, Gauss(0.5)), 2), 1)],
        ADD_OR_REMOVE,
        1,
        0.15594,
        1e-3,
        1e-3,
    ),
    "discrete laplace": ([(Discrete(1, 1), 3), (Discrete(0.5, 1), 2)], ADD_OR_REMOVE, 4, 0.0, 1e-6, 1e-6),
    "responses": ([(Response(4 / (3 + math.exp(1)), 4), 1)], REPLACE, 1.0, 0.0, 1e-7, 1e-7),
}


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.slow] * (case == "sampled")) for case in PUBLISHED]
)
def test_published_tables(case):
    events, relation, epsilon, delta, delta_tolerance, epsilon_tolerance = PUBLISHED[case]
    accountant = CertifiedAccountant(relation)
    for event, count in events:
        assert accountant.supports(event) and accountant.compose(event, count) is accountant
    assert accountant.get_delta(epsilon) == pytest.approx(delta, abs=delta_tolerance)
    assert accountant.get_epsilon(delta) == pytest.approx(epsilon, abs=epsilon_tolerance)


@pytest.mark.parametrize(
    "event",
    [
        Gauss(0),
        Laplace(0),
        Poisson(0.1, Gauss(0)),
        Poisson(0.1, Laplace(0)),
        Discrete(0, 1),
        Mixture(0, [1, 2], [0.5, 0.5]),
        Compose([Gauss(1.0), dpa.NonPrivateDpEvent()]),
    ],
    ids=repr,
)
def test_events_without_noise_have_infinite_epsilon(event):
    accountant = CertifiedAccountant().compose(event).compose(Gauss(1.0))
    assert accountant.get_delta(1.0) == accountant.get_delta(math.inf) == 1.0
    assert accountant.get_epsilon(0.01) == accountant.get_epsilon(1.0) == math.inf
    assert "without noise" in refusal(lambda: accountant.mechanism)


@pytest.mark.parametrize("base", [Gauss(1), Laplace(1), Gauss(0), Laplace(0)], ids=repr)
def test_events_sampled_at_rate_zero_leak_nothing(base):
    accountant = CertifiedAccountant().compose(Poisson(0, base))
    assert accountant.get_delta(0) == accountant.get_epsilon(0) == accountant.get_epsilon(1e-10) == 0


def test_relations(monkeypatch):
    # a test of relations needs no real losses and deltas: made-up ones give a pair, too
    monkeypatch.setattr(sampled_releases, "_losses", lambda base, relation: np.linspace(0.0, 9.0, 20))
    some = lambda base, loss, relation: SimpleNamespace(lower=np.exp(-loss), upper=np.exp(-loss))
    monkeypatch.setattr(sampled_releases, "_ask", some)
    monkeypatch.setattr(sampled_releases, "_replaced", sampled_releases._replaced.__wrapped__)
    assert CertifiedAccountant().neighboring_relation is ADD_OR_REMOVE
    assert not CertifiedAccountant().supports(Response(0.1, 3)) and CertifiedAccountant(REPLACE).supports(
        Response(0.1, 3)
    )
    assert "must be `REPLACE_ONE` or `REPLACE_SPECIAL`" in refusal(
        CertifiedAccountant().compose, Response(0.1, 3), error=dpa.UnsupportedEventError
    )
    assert CertifiedAccountant(REPLACE).supports(Compose([Gauss(1.0), Poisson(0.1, Laplace(1.0))]))
    assert CertifiedAccountant(REPLACE).supports(Compose([Gauss(1.0), Poisson(0.1, Gauss(1.0))]))
    assert CertifiedAccountant(REPLACE).supports(Poisson(1.0, Gauss(1.0)))
    assert "REPLACE_SPECIAL" in refusal(CertifiedAccountant, 3)


def test_replace_special_is_zero_out():
    step = Poisson(0.1, Gauss(2.0))
    zeroed, removed = (CertifiedAccountant(relation).compose(step, 2) for relation in (SPECIAL, ADD_OR_REMOVE))
    assert zeroed.get_delta(0.3) == removed.get_delta(0.3) and zeroed.get_epsilon(1e-5) == removed.get_epsilon(1e-5)
    assert zeroed.neighboring_relation is SPECIAL


@pytest.mark.parametrize(
    "noise, buckets", [(0.3, 10), (0.01, 3), ((4 - math.e) / 3, 4), pytest.param(1.0, 7, marks=pytest.mark.slow)]
)
def test_the_special_record_answers_at_random(noise, buckets):
    accountant = CertifiedAccountant(SPECIAL).compose(Response(noise, buckets))
    truth, other = 1 - noise + noise / buckets, noise / buckets
    for epsilon in (0.0, 0.3, 1.5):
        remove = max(truth - math.exp(epsilon) / buckets, 0.0)
        add = (buckets - 1) * max(1 / buckets - math.exp(epsilon) * other, 0.0)
        assert accountant.get_delta(epsilon) == pytest.approx(max(remove, add), rel=1e-9, abs=1e-14)
        assert accountant.get_delta(epsilon) >= max(remove, add) - 1e-15


@pytest.mark.parametrize("relation, sensitivity", [(ADD_OR_REMOVE, 1.0), (REPLACE, 2.0)])
def test_gaussian_against_the_closed_form(relation, sensitivity):
    accountant = CertifiedAccountant(relation).compose(Gauss(10.0), 16).compose(Compose([Gauss(5.0), Gauss(20.0)]))
    mu = sensitivity * math.sqrt(16 / 100 + 1 / 25 + 1 / 400)
    for epsilon in (0.1, 1.0, 3.0):
        exact = norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * norm.cdf(-mu / 2 - epsilon / mu)
        assert exact * (1 - 1e-12) <= accountant.get_delta(epsilon) <= exact * (1 + 1e-6)
        assert epsilon * (1 - 1e-12) <= accountant.get_epsilon(exact) <= epsilon * (1 + 1e-6)
    assert accountant.get_epsilon(0.0) == math.inf and accountant.get_epsilon(1.0) == 0.0
    assert accountant.get_delta(math.inf) == 0.0


# From rdp_privacy_accountant_test.py: events of known exact epsilon, and its grid of single sampled steps.


def test_below_the_renyi_bound_of_a_gaussian():
    accountant = CertifiedAccountant().compose(Gauss(4.530877117))  # (1, 1e-6)-DP by Renyi orders
    assert accountant.get_epsilon(1e-6) < 1.0 and accountant.get_delta(1.0) < 1e-6


@pytest.mark.parametrize(
    "noise, buckets, epsilon",
    [(0.3, 10, 3.1918471524802814), (0.05, 20, 5.942799375126701), (0.01, 3, 5.697093486505405)],
)
def test_randomized_responses_at_the_infinite_order(noise, buckets, epsilon):
    accountant = CertifiedAccountant(REPLACE).compose(Response(noise, buckets))
    assert epsilon * (1 - 1e-12) <= accountant.get_epsilon(0.0) <= epsilon * (1 + 1e-9)


@pytest.mark.parametrize("epsilon, count", [(0.01, 1), (1.0, 1), (100.0, 1), (1.0, 100)])
def test_laplace_at_the_infinite_order(epsilon, count):
    accountant = CertifiedAccountant().compose(Repeat(Laplace(1 / epsilon), count))
    assert accountant.get_epsilon(0.0) == pytest.approx(epsilon * count, rel=1e-12)


def exact_delta(q, sigma, epsilon):
    """delta(epsilon) of one sampled Gaussian step, both directions, in 60 digits."""
    with mpmath.workdps(60):
        q, s, e = mpmath.mpf(q), mpmath.mpf(sigma), mpmath.exp(epsilon)
        cdf = lambda x: mpmath.ncdf(x / s)
        at = s**2 * mpmath.log((e - 1 + q) / q) + mpmath.mpf(1) / 2
        remove = q * cdf(1 - at) + (1 - q - e) * cdf(-at)
        if 1 / e <= 1 - q:
            return float(remove)
        at = s**2 * mpmath.log((1 / e - 1 + q) / q) + mpmath.mpf(1) / 2
        return float(max(remove, cdf(at) - e * ((1 - q) * cdf(at) + q * cdf(at - 1))))


@pytest.mark.parametrize("sigma", [0.1, 1.0, pytest.param(10.0, marks=pytest.mark.slow), 100.0])
def test_the_grid_of_single_sampled_steps(sigma):
    for q in (0.01, 0.8):
        event = Poisson(q, Gauss(sigma))
        ours = CertifiedAccountant().compose(event)
        renyi = dpa.rdp.RdpAccountant(range(2, 50)).compose(event)
        for delta in (0.9, 1e-3, 1e-12):
            epsilon = ours.get_epsilon(delta)
            assert epsilon <= renyi.get_epsilon(delta)
            assert exact_delta(q, sigma, epsilon) <= delta * (1 + 1e-12)
            assert epsilon == 0.0 or exact_delta(q, sigma, epsilon * (1 - 1e-6)) >= delta * (1 - 1e-9)
            assert ours.get_delta(epsilon) <= delta * (1 + 1e-6)


def bracket(sigma, q, steps, delta):
    """dp_accounting's optimistic and pessimistic epsilon of the sampled Gaussian."""
    kinds = (False, True)
    laws = [
        pld.from_gaussian_mechanism(sigma, 1.0, kind, 2e-4, sampling_prob=q, use_connect_dots=True) for kind in kinds
    ]
    return [law.self_compose(steps).get_epsilon_for_delta(delta) for law in laws]


@pytest.mark.parametrize(
    "sigma, q, steps, delta",
    [(2.0, 0.2, 100, 1e-8), (1.0, 0.01, 1000, 1e-5), (0.8, 0.05, 200, 1e-6)],
)
def test_sampled_gaussian_lies_within_dp_accounting_s_bracket(sigma, q, steps, delta):
    event = Repeat(Poisson(q, Gauss(sigma)), steps)
    low, high = bracket(sigma, q, steps, delta)
    ours = CertifiedAccountant().compose(event).get_epsilon(delta)
    assert low <= ours <= high * (1 + 1e-9) and high < low * 1.2
    renyi = dpa.rdp.RdpAccountant().compose(event).get_epsilon(delta)
    assert ours < renyi


def test_mixtures_of_gaussians_against_the_table():
    accountant = CertifiedAccountant()
    accountant.compose(Mixture(1.0, [0.0, 1.0, 2.0], [0.2, 0.6, 0.2]), 3)
    accountant.compose(Mixture(2.0, [0.0, 2.0, 3.0], [0.33, 0.34, 0.33]), 2)
    assert accountant.get_epsilon(1e-6) == pytest.approx(17.193115, rel=1e-3)  # the table has an upper bound, as we do
    assert not CertifiedAccountant(REPLACE).supports(Mixture(1.0, [1.0], [1.0]))


def test_counts_add_up_however_they_are_given():
    step = Poisson(0.05, Gauss(1.0))
    once = CertifiedAccountant().compose(step, 6)
    ways = [
        CertifiedAccountant().compose(Repeat(step, 2), 3),
        CertifiedAccountant().compose(Compose([step] * 6)),
        CertifiedAccountant()
        .compose(step)
        .compose(Compose([Repeat(step, 2), step, dpa.NoOpDpEvent()]))
        .compose(step, 2),
    ]
    for way in ways:
        assert way.mechanism == once.mechanism == ja.compose(ja.dp_sgd(1.0, 0.05, 6))
    assert not CertifiedAccountant().supports(Repeat(Repeat(step, 2**52), 3))
    assert "2**53" in refusal(once.compose, step, 2**53, error=dpa.UnsupportedEventError)
    assert once.ledger == Repeat(step, 6)
    for count in (0, -1):
        assert refusal(once.compose, step, count, error=ValueError)
    assert refusal(once.compose, "step", error=TypeError)


def test_targets_out_of_range_are_refused():
    accountant = CertifiedAccountant().compose(Gauss(1.0))
    assert "target_delta = 1.5 must be" in refusal(accountant.get_epsilon, 1.5)
    assert "target_delta = nan must be" in refusal(accountant.get_epsilon, math.nan)
    assert "target_epsilon = nan must be finite; use" in refusal(accountant.get_delta, math.nan)
    for ask, name in ((accountant.get_epsilon, "target_delta"), (accountant.get_delta, "target_epsilon")):
        assert f"{name} must be one number, not 2" in refusal(ask, [0.1, 0.2])
    assert accountant.mechanism == ja.compose(ja.Gaussian(1.0))


def test_calibrate_dp_mechanism():
    def event(sigma):
        return Repeat(Poisson(0.01, Gauss(sigma)), 1000)

    sigma = dpa.calibrate_dp_mechanism(
        CertifiedAccountant, event, 2.0, 1e-5, dpa.ExplicitBracketInterval(0.9, 1.0), tol=1e-3
    )
    at, below = (CertifiedAccountant().compose(event(s)).get_epsilon(1e-5) for s in (sigma, sigma - 2e-3))
    assert at <= 2.0 < below
    theirs = dpa.pld.PLDAccountant(value_discretization_interval=1e-3).compose(event(sigma))
    assert 2.0 - 5e-3 <= theirs.get_epsilon(1e-5) <= 2.0 + 1e-3  # their epsilon is an upper bound


def test_calibrate_a_count():
    count = dpa.calibrate_dp_mechanism(
        CertifiedAccountant,
        lambda n: Repeat(Gauss(10.0), n) if n else dpa.NoOpDpEvent(),
        1.0,
        1e-5,
        discrete=True,
    )
    spent = [CertifiedAccountant().compose(Gauss(10.0), n).get_epsilon(1e-5) for n in (count, count + 1)]
    assert spent[0] <= 1.0 < spent[1]


def test_names_come_from_the_package():
    assert interop.CertifiedAccountant is CertifiedAccountant and dp_event.DpEvent is dpa.DpEvent
    with pytest.raises(AttributeError):
        _ = interop.nothing
