"""Published closed forms: report noisy max, and selections from a base of which one (eps, delta) is known."""

import dataclasses

import jax
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
def test_selection_from_one_point_is_below_its_closed_form_and_above_every_score_order(law, eps, delta):
    """Koskela, Redberg and Wang's Corollary 5.4: eps_2 + (eta+1) log(e^{eps_1} + (1-gamma)/gamma delta_1)."""
    likely = (1 - delta) / (1 + np.exp(-eps))
    p = np.array([delta, likely, 1 - delta - likely, 0.0])
    level = max(float(law.mean) * delta, 1e-6)
    run = ja.PrivacyProfile([eps], [delta])
    found = float(ja.epsilon(selection.select(run, law), level).upper)
    theorem = eps + (law.eta + 1.0) * np.log(np.exp(eps) + (1.0 - law.gamma) / law.gamma * delta)
    assert found <= theorem * (1 + 1e-6) and worst_order(p, p[::-1], law, np.array(found)) <= level + 1e-15


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


def test_noisy_max_is_never_above_the_composed_theorem():
    """Koskela, Redberg and Wang's Theorem 3.3: m^k delta_k(eps), with delta_k of k Gaussians."""
    sigma, delta = np.array([5.0, 20.0]), 1e-6
    for m, k in ((2, 5), (50, 1), (50, 20)):
        theorem = ja.epsilon(ja.repeat(ja.Gaussian(sigma / 2), k), delta / float(m) ** k).upper
        assert np.all(ja.epsilon(ja.repeat(ja.GaussianNoisyMax(sigma, m), k), delta).upper <= theorem * (1 + 1e-4))


@pytest.mark.parametrize(
    "run", [ja.ZCDP(0.1), ja.ReportNoisyMax(1.0), ja.RandomAllocation(ja.Gaussian(2.0), 4)], ids=repr
)
@pytest.mark.parametrize("candidates", ["iid", pytest.param("adaptive", marks=pytest.mark.slow)])
def test_a_finite_bound_without_a_lower_end_is_ok(run, candidates):
    b = ja.epsilon(selection.select(run, selection.Geometric(0.3), candidates=candidates), 1e-5)
    assert (b.kind, b.status, b.lower) == ("bound", "ok", 0.0) and ja.epsilon(run, 1e-5).upper < b.upper < np.inf


@pytest.mark.parametrize("change", [lambda x: x * np.nan, lambda x: -1.0 * x])
def test_a_law_that_a_transformation_made_false_is_refused(change):
    """Only compositions checked the law again: masses of NaN and a mean of -3 gave "0, certified"."""
    for law in (selection.Categorical([0.5, 0.25, 0.25]), selection.Poisson(3.0), selection.PointMass(3)):
        changed = jax.tree.map(change, law)
        for more in ({}, {"candidates": "adaptive"}, {"top": 2}):
            chosen = dataclasses.replace(selection.select(ja.Gaussian(4.0), law, **more), law=changed)
            assert refusal(ja.epsilon, chosen, 1e-5) and refusal(ja.delta, chosen, 0.5)
        assert refusal(selection.bound_epsilon, ja.Gaussian(4.0), changed, 1e-5)


def test_laws_of_float32_are_computed_in_float64():
    """The bracket at the float32 nearest to the probability lay below the truth, by mpmath, .75447923649294."""
    law, base = selection.Binomial(10, 0.5914174342232362), ja.FiniteOutput([0.75, 0.25], [0.25, 0.75])
    chosen = selection.select(base, law, candidates="adaptive")
    narrow = dataclasses.replace(chosen, law=jax.tree.map(lambda x: np.float32(x), law))
    assert ja.delta(narrow, 0.5).upper >= 0.75447923649294
