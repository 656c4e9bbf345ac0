"""Tuning on a random subset, and candidates that differ in their privacy."""

import itertools

import numpy as np
import pytest
from helpers import refusal
from selection_cases import hockey_stick

import jaxacct as ja
from jaxacct import selection

ONCE = selection.PointMass(1)


@pytest.mark.parametrize("q", [0.2, 0.7])
def test_profile_of_the_rest_against_enumeration(q):
    a, b = 0.7, 0.62
    p1, p2 = np.array([a, 1 - a]), np.array([b, 1 - b])
    base = np.outer(p1[::-1], p2[::-1]).ravel()
    mixed = (q * np.outer(p1, p2[::-1]) + (1 - q) * np.outer(p1[::-1], p2)).ravel()
    grid = np.linspace(0, 3, 30_001)
    leak = np.maximum(hockey_stick(mixed, base, grid), hockey_stick(base, mixed, grid))
    truth = grid[np.argmax(leak <= 0.05)]
    found = selection.subset_epsilon(ja.RandomizedResponse(a), ONCE, ja.RandomizedResponse(b), q, 0.05)
    assert truth - 1e-4 <= found.upper <= truth + 0.01


@pytest.mark.parametrize("variant", ["rest", "all"])
def test_both_variants_hold_for_every_score_order(variant):
    rng, delta = np.random.default_rng(5), 0.01
    for q, law in ((0.2, selection.Geometric(0.3)) if variant == "rest" else (0.9, selection.PointMass(3)),):
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


def test_the_rest_costs_less_than_all():
    run, law = ja.Gaussian(4.0), selection.Poisson(15)
    rest, all_ = (float(selection.subset_epsilon(run, law, run, 0.1, 1e-5, variant=v).upper) for v in ("rest", "all"))
    assert rest < all_ and all_ > float(ja.epsilon(run, 1e-5).upper)


@pytest.mark.slow
def test_candidates():
    grid = np.array([0.0, 0.5, 1.0, 2.0])
    both = [ja.Gaussian(2.0), ja.PoissonSampled(ja.Gaussian(0.8), 0.2)]
    worst, mixed = selection.candidates_profile(both, grid), selection.candidates_profile(both, grid, [0.25, 0.75])
    for name, relation in (("delta", "remove_one"), ("reverse_delta", "add_one")):
        each = np.array([ja.delta(one, grid, relation=relation).estimate for one in both])
        np.testing.assert_allclose(getattr(worst, name), np.max(each, axis=0), rtol=1e-4)
        np.testing.assert_allclose(getattr(mixed, name), [0.25, 0.75] @ each, rtol=1e-4)
    found = selection.bound_delta(worst, selection.Geometric(0.3), 1.0)  # `worst` bounds a selection among both
    assert found.upper >= max(selection.bound_delta(one, selection.Geometric(0.3), 1.0).upper for one in both) * 0.999


def test_refusals():
    run, law = ja.Gaussian(1.0), selection.Poisson(3.0)
    assert "one configuration" in refusal(selection.subset_epsilon, ja.Gaussian([1.0, 2.0]), law, run, 0.1, 1e-5)
    assert "single number" in refusal(selection.subset_epsilon, run, law, run, [0.1, 0.2], 1e-5)
    assert "variant = 'both'" in refusal(selection.subset_epsilon, run, law, run, 0.1, 1e-5, variant="both")
    assert "empty" in refusal(selection.candidates_profile, [], [0.0])
    assert "sum to 1" in refusal(selection.candidates_profile, [run], [0.0], [0.5])
    assert "one direction" in refusal(selection.candidates_profile, [run], [0.0], relation="add_one")
