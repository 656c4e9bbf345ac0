"""Tuning on a random subset, and candidates that differ in their privacy."""

import itertools

import numpy as np
import pytest
from helpers import refusal
from scipy.special import comb
from selection_cases import hockey_stick

import jaxacct as ja
from jaxacct import selection
from jaxacct.selection.subset_privacy import WHOLE_ORDERS, _renyi

ONCE = selection.PointMass(1)


def gaussian_moment(q, first, second, power):
    """`E[(q r_1 + (1-q) r_2)^power]` for ratios of two independent Gaussians under Q, by Gauss-Hermite in 2-D."""
    x, w = np.polynomial.hermite_e.hermegauss(120)
    w = w / np.sqrt(2 * np.pi)
    one, two = (np.exp(x / s - 0.5 / s**2) for s in (first, second))
    return np.sum(np.outer(w, w) * (q * one[:, None] + (1 - q) * two[None, :]) ** power)


@pytest.mark.parametrize("q", [0.0, 0.1, 0.6, 1.0])
def test_theorem_1_against_quadrature(q):
    first, second = 3.0, 2.0
    orders = np.arange(2, 7)
    tuning, training = (np.stack([orders / (2 * s**2)] * 2) for s in (first, second))
    bound = _renyi(tuning, training, q, "rest")
    for i, a in enumerate(orders):
        removed = np.log(gaussian_moment(q, first, second, a)) / (a - 1)
        added = np.log(gaussian_moment(q, first, second, 1 - a)) / (a - 1)
        assert bound[i] >= max(removed, added) * (1 - 1e-12)
    if q in (0.0, 1.0):
        np.testing.assert_allclose(bound, orders / (2 * (second if q == 0.0 else first) ** 2), rtol=1e-10)


def test_equation_3_6_is_an_identity_for_gaussians():
    orders = np.arange(2, 9)
    tuning, training = (np.stack([orders / (2 * s**2), np.zeros(7)]) for s in (1.5, 2.0))
    found = _renyi(tuning, training, 0.3, "rest")  # nothing is lost in the other direction
    exact = [np.log(gaussian_moment(0.3, 1.5, 2.0, a)) / (a - 1) for a in orders]
    np.testing.assert_allclose(found, exact, rtol=1e-9)


def test_the_other_variant_is_sampling_and_composition():
    orders = np.arange(2, 9)
    values = np.stack([orders / 8.0] * 2)
    found = _renyi(values, 2 * values, 0.05, "all")
    truth = []
    for a in orders:  # Zhu and Wang (2019): the Gaussian of noise 2, Poisson sampled at q, from its Rényi curve a/8
        j, q = np.arange(2, a + 1), 0.05
        terms = np.where(j > 2, 3, 1) * comb(a, j) * q**j * (1 - q) ** (a - j) * np.exp((j - 1) * j / 8.0)
        whole = (1 - q) ** (a - 1) * (a * q - q + 1) + terms.sum()
        truth.append(np.log(whole) / (a - 1) + a / 4.0)
    np.testing.assert_allclose(found, truth, rtol=1e-9)


@pytest.mark.parametrize("q", [0.2, 0.7])
def test_profile_of_the_rest_against_enumeration(q):
    a, b = 0.7, 0.62
    p1, p2 = np.array([a, 1 - a]), np.array([b, 1 - b])
    base = np.outer(p1[::-1], p2[::-1]).ravel()
    mixed = (q * np.outer(p1, p2[::-1]) + (1 - q) * np.outer(p1[::-1], p2)).ravel()
    grid = np.linspace(0, 3, 300_001)
    leak = np.maximum(hockey_stick(mixed, base, grid), hockey_stick(base, mixed, grid))
    truth = grid[np.argmax(leak <= 0.05)]
    found = selection.subset_epsilon(ja.RandomizedResponse(a), ONCE, ja.RandomizedResponse(b), q, 0.05, form="profile")
    assert truth - 1e-5 <= found.upper <= truth + 0.01


@pytest.mark.parametrize("variant", ["rest", "all"])
def test_both_variants_hold_for_every_score_order(variant):
    rng, delta = np.random.default_rng(5), 0.01
    for q, law in ((0.2, selection.Geometric(0.3)), (0.6, selection.Poisson(2.0)), (0.9, selection.PointMass(3))):
        (p1, q1), (p2, q2) = (rng.dirichlet(np.full(3, 2.0), 2) for _ in range(2))
        found = selection.subset_epsilon(
            ja.FiniteOutput(p1, q1), law, ja.FiniteOutput(p2, q2), q, delta, variant=variant
        ).upper
        for order in itertools.permutations(range(3)):
            with_it, without = (selection.output_law(each[list(order)], law) for each in (p1, q1))
            if variant == "rest":
                mixed = q * np.outer(with_it, q2) + (1 - q) * np.outer(without, p2)
            else:
                mixed = np.outer(q * with_it + (1 - q) * without, p2)
            mixed, base = mixed.ravel(), np.outer(without, q2).ravel()
            assert hockey_stick(mixed, base, found) <= delta and hockey_stick(base, mixed, found) <= delta


def test_ends_of_the_sampling_probability():
    tuned, trained, law = ja.Gaussian(5.0), ja.Gaussian(3.0), selection.Geometric(0.2)
    alone = float(ja.epsilon(trained, 1e-5).upper)
    tuning = float(selection.bound_epsilon(tuned, law, 1e-5, bound="envelope").upper)
    none, every = (selection.subset_epsilon(tuned, law, trained, q, 1e-5).upper for q in (0.0, 1.0))
    assert alone <= none <= alone * 1.01 and tuning <= every <= tuning * 1.01
    both = selection.subset_epsilon(tuned, law, trained, 0.0, 1e-5, variant="all").upper
    assert alone <= both <= alone * 1.01


def test_profiles_are_tighter_than_renyi_and_the_rest_than_all():
    run, law = ja.Gaussian(4.0), selection.Poisson(15)
    found = {
        (variant, form): float(selection.subset_epsilon(run, law, run, 0.1, 1e-5, variant=variant, form=form).upper)
        for variant in ("rest", "all")
        for form in ("profile", "renyi")
    }
    assert found["rest", "profile"] < found["all", "profile"]
    assert found["rest", "profile"] < found["rest", "renyi"] and found["all", "profile"] < found["all", "renyi"]
    assert found["all", "profile"] > float(ja.epsilon(run, 1e-5).upper)


@pytest.mark.slow
def test_candidates():
    grid = np.array([0.0, 0.5, 1.0, 2.0])
    both = [ja.Gaussian(2.0), ja.PoissonSampled(ja.Gaussian(0.8), 0.2)]
    worst, mixed = selection.candidates_profile(both, grid), selection.candidates_profile(both, grid, [0.25, 0.75])
    for name, relation in (("delta", "remove_one"), ("reverse_delta", "add_one")):
        each = np.array([ja.delta(one, grid, relation=relation).estimate for one in both])
        np.testing.assert_allclose(getattr(worst, name), np.max(each, axis=0), rtol=1e-4)
        np.testing.assert_allclose(getattr(mixed, name), [0.25, 0.75] @ each, rtol=1e-4)
    found = selection.bound_delta(worst, selection.Geometric(0.3), 1.0)  # a selection among them is bounded through it
    assert found.upper >= max(selection.bound_delta(one, selection.Geometric(0.3), 1.0).upper for one in both) * 0.999


def test_random_search_meets_its_line():
    q, steps, orders = np.array([0.01, 0.05]), 200, np.array([2.0, 8.0, 32.0])
    sigma = selection.line_noise_multiplier(0.05, q, steps, orders)
    curves = ja.profile(ja.dp_sgd(sigma, q, steps)).renyi(orders[:, None]).upper
    assert np.all(curves <= 0.05 * orders[:, None])
    assert np.all(np.max(curves / orders[:, None], axis=0) > 0.05 * (1 - 1e-4))
    assert selection.line_noise_multiplier(0.5, 1.0, [1, 16], [2.0, 4.0]) == pytest.approx([1.0, 4.0])
    assert np.isnan(selection.line_noise_multiplier(1e-15, 1.0, 1, [2.0]))


def test_refusals():
    run, law = ja.Gaussian(1.0), selection.Poisson(3.0)
    assert "one configuration" in refusal(selection.subset_epsilon, ja.Gaussian([1.0, 2.0]), law, run, 0.1, 1e-5)
    assert "single number" in refusal(selection.subset_epsilon, run, law, run, [0.1, 0.2], 1e-5)
    assert "variant = 'both'" in refusal(selection.subset_epsilon, run, law, run, 0.1, 1e-5, variant="both")
    assert "bound='envelope'" in refusal(selection.subset_epsilon, run, ONCE, run, 0.1, 1e-5, form="renyi")
    assert "empty" in refusal(selection.candidates_profile, [], [0.0])
    assert "sum to 1" in refusal(selection.candidates_profile, [run], [0.0], [0.5])
    assert "one direction" in refusal(selection.candidates_profile, [run], [0.0], relation="add_one")
    assert "orders = 1.0" in refusal(selection.line_noise_multiplier, 1.0, 0.1, 10, [1.0])
    assert WHOLE_ORDERS[0] == 2.0
