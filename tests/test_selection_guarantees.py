"""Closed forms for selections, and report noisy max, against exhaustive orders, tighter bounds and exact laws."""

import numpy as np
import pytest
from helpers import refusal
from scipy.special import ndtr
from selection_cases import hockey_stick, worst_order

import jaxacct as ja
from jaxacct import selection

LAWS = [selection.Geometric(0.1), selection.TruncatedNegativeBinomial(-0.5, 0.05), selection.Logarithmic(0.1)]


@pytest.mark.parametrize("law", LAWS, ids=repr)
@pytest.mark.parametrize(("eps", "delta"), [(0.5, 0.0), (0.3, 1e-3), (1.0, 0.01)])
def test_selection_from_one_point_holds_for_every_score_order(law, eps, delta):
    likely = (1 - delta) / (1 + np.exp(-eps))
    p = np.array([delta, likely, 1 - delta - likely, 0.0])
    found = selection.two_point_selection(law, eps, delta)
    assert worst_order(p, p[::-1], law, found.epsilon) <= found.delta + 1e-15
    again = selection.two_point_selection(law, eps, delta, eps, delta)
    assert (again.epsilon, again.delta) == (found.epsilon, found.delta)


def test_two_thresholds_of_a_gaussian_are_the_optimised_theorem():
    base, delta = ja.Gaussian(3.0), 1e-6
    for law in LAWS:
        at = float(ja.epsilon(base, delta).estimate)
        points = selection.thresholds(law, at, delta, 1e-5)
        found = selection.two_point_selection(law, *points)
        best = selection.bound_epsilon(base, law, 1e-5, bound="privacy_profile").upper
        assert found.epsilon == pytest.approx(float(best), rel=1e-5) and found.delta <= 1e-5


def test_closed_form_is_above_the_theorem_it_comes_from():
    mu, delta = np.array([0.1, 0.5, 1.5]), np.array([[1e-4], [1e-9]])
    for law in LAWS:
        found = selection.gaussian_selection(law, mu, delta)
        best = selection.bound_epsilon(ja.Gaussian(1 / mu), law, delta, bound="privacy_profile").upper
        assert np.all(found.epsilon >= best) and np.all(found.epsilon <= 3.5 * best)


def two_candidates(gap, sigma):
    """The law of which of two candidates wins, the first ahead by `gap`."""
    first = ndtr(gap / (sigma * np.sqrt(2)))
    return np.array([first, 1 - first])


@pytest.mark.parametrize("monotone", [False, True])
def test_noisy_max_bounds_the_exact_law_of_two_candidates(monotone):
    sigma, moved = 2.0, 1.0 if monotone else 2.0
    for gap in (-3.0, -1.0, 0.0, 0.5, 2.0):
        p, q = two_candidates(gap + moved, sigma), two_candidates(gap, sigma)
        for delta in (1e-3, 0.05):
            eps = selection.noisy_max_epsilon(sigma, 2, 1, delta, monotone=monotone).epsilon
            assert hockey_stick(p, q, eps) <= delta and hockey_stick(q, p, eps) <= delta
            twice = selection.noisy_max_epsilon(sigma, 2, 2, delta, monotone=monotone).epsilon
            assert hockey_stick(np.outer(p, p).ravel(), np.outer(q, q).ravel(), twice) <= delta
        for order in (1.5, 3.0, 8.0):
            exact = np.log(np.sum(p**order * q ** (1 - order))) / (order - 1)
            assert exact <= selection.noisy_max_renyi(sigma, 2, order, monotone=monotone)


def test_noisy_max_agrees_with_the_mechanism_and_the_closed_form():
    sigma, m, delta = np.array([5.0, 20.0]), 50, 1e-6
    found = selection.noisy_max_epsilon(sigma, m, 1, delta).epsilon
    np.testing.assert_allclose(found, ja.epsilon(ja.GaussianNoisyMax(sigma, m), delta).upper, rtol=1e-3)
    closed = 2 / sigma**2 + 2 / sigma * np.sqrt(2 * np.log(m / delta))  # Corollary 3.4
    assert np.all(found <= closed) and np.all(closed <= 1.5 * found)
    assert np.isinf(selection.noisy_max_epsilon(5.0, 1000, 200, 1e-6).epsilon)


def test_refusals():
    law = selection.Geometric(0.5)
    assert "truncated negative binomial" in refusal(selection.two_point_selection, selection.Poisson(2.0), 1.0, 0.0)
    assert "go together" in refusal(selection.two_point_selection, law, 1.0, 0.0, 2.0)
    assert "one law" in refusal(selection.thresholds, selection.Geometric([0.1, 0.2]), 1.0, 1e-5, 1e-5)
    assert "mu = 0.0" in refusal(selection.gaussian_selection, law, 0.0, 1e-5)
    assert "order = 1.0" in refusal(selection.noisy_max_renyi, 1.0, 2, 1.0)
    assert "monotone = 1" in refusal(selection.noisy_max_renyi, 1.0, 2, 2.0, monotone=1)
