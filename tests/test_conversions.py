"""Conversions between representations: round trips within a stated error, and independent oracles."""

import importlib

import mpmath
import numpy as np
import pytest
from helpers import doctests_of, refusal
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import norm

import jaxacct as ja
from jaxacct.representations import profile_conversions, renyi_divergences
from jaxacct.representations.profile_conversions import gdp_from_profile, profile_from_tradeoff, tradeoff_from_profile
from jaxacct.representations.renyi_divergences import epsilon_from_renyi, tradeoff_from_renyi


def gaussian_delta(mu, eps):
    return norm.cdf(mu / 2 - eps / mu) - np.exp(eps) * norm.cdf(-mu / 2 - eps / mu)


@pytest.mark.parametrize("module", [profile_conversions, renyi_divergences])
def test_doctests(module):
    assert doctests_of(importlib.import_module(module.__name__)) > 0


# Profile and trade-off function


@pytest.mark.parametrize("mu", [0.3, 1.0, 3.0])
def test_profile_to_tradeoff_and_back(mu):
    eps = np.linspace(0.0, mu**2 / 2 + 6 * mu, 601)
    bounds = ja.delta(ja.Gaussian(1 / mu), eps)
    a = np.unique(np.concatenate([np.geomspace(1e-9, 0.5, 400), 1 - np.geomspace(1e-9, 0.5, 400)]))
    f = tradeoff_from_profile(eps, bounds, a)
    truth = norm.cdf(norm.isf(a) - mu)
    assert ((f.lower <= truth + 1e-14) & (truth <= f.upper + 1e-14)).all() and f.kind[0] == "certified"
    assert np.max(f.upper - f.lower) < 5e-4
    back = profile_from_tradeoff(a, f, [0.0, 0.5, 2.0])
    wanted = gaussian_delta(mu, np.array([0.0, 0.5, 2.0]))
    assert ((back.lower <= wanted) & (wanted <= back.upper)).all()
    assert np.max(back.upper - back.lower) < 1e-3


def test_guarantees_stay_guarantees():
    eps, delta = np.array([0.0, 1.0]), np.array([0.4, 0.1])
    a = np.linspace(0, 1, 41)
    f = tradeoff_from_profile(eps, delta, a)
    brute = [
        max(0.0, *(max(1 - d - np.exp(e) * x, np.exp(-e) * (1 - d - x)) for e, d in zip(eps, delta, strict=True)))
        for x in a
    ]
    np.testing.assert_allclose(f.lower, brute, atol=1e-12)
    assert (f.kind == "bound").all() and (f.upper == 1 - a).all()
    one_way = tradeoff_from_profile(eps, delta, a, symmetric=False)
    assert (one_way.lower <= f.lower + 1e-15).all() and (one_way.lower < f.lower - 0.01).any()
    again = profile_from_tradeoff(a, brute, eps)
    np.testing.assert_allclose(again.upper, delta, atol=2e-3)
    assert (again.upper >= delta - 1e-12).all() and (again.kind == "bound").all()


# Gaussian differential privacy


@given(st.floats(0.05, 6.0), st.floats(0.0, 8.0))
@settings(max_examples=24, deadline=None)
def test_gdp_round_trip(mu, eps):
    with mpmath.workdps(40):
        m, e = mpmath.mpf(mu), mpmath.mpf(eps)
        delta = float(mpmath.ncdf(m / 2 - e / m) - mpmath.exp(e) * mpmath.ncdf(-m / 2 - e / m))
    if delta > 1e-290:
        back = profile_conversions.gdp_from_profile(eps, delta)
        assert back.lower <= mu * (1 + 1e-9) and back.upper >= mu * (1 - 1e-9) and back.relative_width < 1e-6


# Rényi divergence


def test_renyi_to_epsilon_is_the_formula_minimised():
    orders = np.array([1.5, 2.0, 4.0, 10.0, 30.0])
    values = orders * 0.5
    brute = [
        min(r + np.log((a - 1) / a) - (np.log(d) + np.log(a)) / (a - 1) for a, r in zip(orders, values, strict=True))
        for d in (1e-5, 1e-9)
    ]
    np.testing.assert_allclose(epsilon_from_renyi(orders, values, [1e-5, 1e-9]).upper, brute, rtol=1e-12)
    found = epsilon_from_renyi(orders, np.stack([values, 2 * values], 1), 1e-5)
    assert found.shape == (2,) and found.upper[1] > found.upper[0] and (found.kind == "bound").all()
    assert (renyi_divergences.delta_from_renyi([2.0], [0.1], [744.0, 1e9]).upper > 0.0).all()  # e^-1e9 underflows
    back = renyi_divergences.delta_from_renyi(orders, values, epsilon_from_renyi(orders, values, 1e-5).upper)
    assert back.upper == pytest.approx(1e-5, rel=1e-9)


@given(st.floats(0.01, 5.0), st.floats(1e-12, 1e-2))
@settings(max_examples=18, deadline=None)
def test_zcdp(rho, delta):
    found = ja.epsilon(ja.ZCDP(rho), delta).upper
    alpha = 1 + np.geomspace(1e-3, 1e5, 4_001)
    brute = np.min(rho * alpha + np.log((alpha - 1) / alpha) - (np.log(delta) + np.log(alpha)) / (alpha - 1))
    assert found <= max(brute, 0) * (1 + 1e-5)
    # a Gaussian is rho-zCDP, and its exact epsilon is smaller
    assert found >= ja.epsilon(ja.Gaussian(1 / np.sqrt(2 * rho)), delta).lower


def test_renyi_to_tradeoff_never_exceeds_the_truth():
    orders = np.concatenate([[0.55, 0.75, 1.0], np.geomspace(1.1, 60.0, 30)])
    a = np.array([1e-4, 0.01, 0.1, 0.4, 0.8])
    for mu in (0.5, 2.0):
        found = tradeoff_from_renyi(orders, orders * mu**2 / 2, a)
        truth = norm.cdf(norm.isf(a) - mu)
        assert (found.lower <= truth).all() and (found.kind == "bound").all()
        assert found.lower[2] > 0.4 * truth[2]
        one = tradeoff_from_renyi(orders, orders * mu**2 / 2, a, both_directions=False)
        assert (one.lower <= found.lower + 1e-15).all()


def test_renyi_to_tradeoff_is_tight_for_randomised_response():
    # Rényi divergences of randomised response come back as its trade-off function at its own error rates
    e = 1.0
    p = 1 / (1 + np.exp(-e))
    orders = np.array([0.6, 1.0, 2.0, 5.0])
    exact = ja.profile(ja.PureDP(e)).renyi(orders)
    found = tradeoff_from_renyi(orders, exact.upper, np.array([1 - p]))
    assert found.lower[0] == pytest.approx(1 - p, rel=2e-4) and found.lower[0] <= 1 - p


def test_renyi_to_tradeoff_satisfies_its_constraints_with_equality():
    order, value, x = 3.0, 0.9, 0.2
    y = float(tradeoff_from_renyi([order], [value], x).lower)
    pairs = [(1 - y, x), (x, 1 - y)]
    divergences = [
        np.log(p**order * q ** (1 - order) + (1 - p) ** order * (1 - q) ** (1 - order)) / 2 for p, q in pairs
    ]
    assert max(divergences) == pytest.approx(value, rel=1e-9)


def test_refusals():
    assert "orders of shape" in refusal(epsilon_from_renyi, [2.0, 3.0], [1.0], 1e-5)
    assert "negative number or NaN" in refusal(epsilon_from_renyi, [2.0], [np.nan], 1e-5)
    assert "delta = 0.0 must be > 0" in refusal(epsilon_from_renyi, [2.0], [1.0], 0.0)
    assert "grid's shape" in refusal(tradeoff_from_profile, [0.0, 1.0], [0.1], 0.5)
    assert "fpr[1] = 1.5" in refusal(profile_from_tradeoff, [0.0, 1.5], [0.1, 0.0], 1.0)


def test_a_bracket_that_no_convex_function_fits_says_nothing():
    """No convex function has these deltas, so they are wrong: both ends of the answer become trivial."""
    eps, delta = np.array([0.0, 1.0, 2.0]), np.array([0.1, 0.3, 0.05])
    claimed = ja.Bounds(delta, delta, delta)
    found = tradeoff_from_profile(eps, claimed, 0.3)
    assert (found.lower, found.upper) == (0.0, 1.0)


@pytest.mark.parametrize("mechanism", [ja.Gaussian(0.02), ja.PureDP(1e4), ja.Laplace(1e-4)])
@pytest.mark.filterwarnings("error")
def test_true_positive_rates_of_losses_beyond_the_exponential_of_float64(mechanism):
    """Slopes stop before e^eps overflows; the attack is all but certain at any rate of false positives."""
    found = ja.profile(mechanism).true_positive_rate([1e-300, 1e-10, 0.25])
    assert np.all(found.lower > 0.99999) and np.all(found.upper == 1.0) and np.all(found.status == "ok")


def test_points_that_no_mechanism_has_are_refused_and_extremes_answered():
    for made in (lambda: profile_from_tradeoff([], [], 0.0), lambda: tradeoff_from_profile([], [], 0.5)):
        assert "is empty" in refusal(made)
    assert "orders is empty" in refusal(renyi_divergences.delta_from_renyi, [], [], 1.0)
    assert "must be <= 1 - fpr" in refusal(profile_from_tradeoff, [0.0, 0.5, 1.0], [0.2, 0.9, 0.0], 0.0)
    far = profile_from_tradeoff([0.0, 1.0], [0.9, 0.0], [1.0, 1e3])
    assert far.upper[1] >= 0.1 and far.upper[1] <= far.upper[0] and (far.lower == 0.0).all()
    assert (
        tradeoff_from_profile([0.0, 800.0], [0.3, 1e-300], 0.1).lower == tradeoff_from_profile([0.0], [0.3], 0.1).lower
    )
    assert "no value from -700" in refusal(tradeoff_from_profile, [800.0], [0.1], 0.1)
    few = ja.profile(ja.Gaussian(1.0)).tradeoff(np.linspace(0.0, 1.0, 5))  # too few points for any upper end
    assert profile_from_tradeoff(np.linspace(0.0, 1.0, 5), few, 9.0).status == "width"
    mu = gdp_from_profile(0.0, [1e-9, 1e-280, 1e-300])  # delta(0) is about mu/sqrt(2 pi)
    truth = np.sqrt(2.0 * np.pi) * np.array([1e-9, 1e-280, 1e-300])
    assert (mu.lower <= truth * (1 + 1e-12)).all() and (truth <= mu.upper * (1 + 1e-12)).all()
    assert gdp_from_profile([1.0, 1e300], [0.1, 1e-320]).status.tolist() == ["ok", "width"]
