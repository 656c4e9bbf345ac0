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
            step = ja.GaussianNoisyMax(sigma, 2, monotone=monotone)
            eps = ja.epsilon(step, delta).upper
            assert hockey_stick(p, q, eps) <= delta and hockey_stick(q, p, eps) <= delta
            twice = ja.epsilon(ja.repeat(step, 2), delta).upper
            assert hockey_stick(np.outer(p, p).ravel(), np.outer(q, q).ravel(), twice) <= delta
        for order in (1.5, 3.0, 8.0):
            exact = np.log(np.sum(p**order * q ** (1 - order))) / (order - 1)
            assert exact <= selection.noisy_max_renyi(sigma, 2, order, monotone=monotone)


def test_noisy_max_is_never_above_the_composed_theorem():
    """Koskela, Redberg and Wang's Theorem 3.3: m^k delta_k(eps), with delta_k of k Gaussians."""
    sigma, delta = np.array([5.0, 20.0]), 1e-6
    for m, k in ((2, 5), (50, 1), (50, 20)):
        theorem = ja.epsilon(ja.repeat(ja.Gaussian(sigma / 2), k), delta / float(m) ** k).upper
        assert np.all(ja.epsilon(ja.repeat(ja.GaussianNoisyMax(sigma, m), k), delta).upper <= theorem * (1 + 1e-4))


def test_refusals():
    law = selection.Geometric(0.5)
    assert "truncated negative binomial" in refusal(selection.two_point_selection, selection.Poisson(2.0), 1.0, 0.0)
    assert "go together" in refusal(selection.two_point_selection, law, 1.0, 0.0, 2.0)
    assert "one law" in refusal(selection.thresholds, selection.Geometric([0.1, 0.2]), 1.0, 1e-5, 1e-5)
    assert "order = 1.0" in refusal(selection.noisy_max_renyi, 1.0, 2, 1.0)
    assert "monotone = 1" in refusal(selection.noisy_max_renyi, 1.0, 2, 2.0, monotone=1)
