"""Which data sets are neighbours under each way of drawing.  Fixed batches are checked over all shuffles."""

import itertools

import numpy as np
import pytest
from helpers import refusal
from scipy.special import ndtr
from training_cases import DELTA, FIXED, gaussian_epsilon

from jaxacct.training import Ledger, Plan
from jaxacct.training.plan.plan import plan_document

SIGMA, EPSILON = 1.0, 1.0


def sums(records, batch_size, batches):
    """Every shuffle's batch sums, all shuffles being equally likely."""
    cut = lambda order: [sum(order[i : i + batch_size]) for i in range(0, batches * batch_size, batch_size)]
    return np.array([cut(order) for order in itertools.permutations(records)], float)


def hockey_stick(first, second):
    """H_e(P || Q) of two mixtures of two-dimensional Gaussians of deviation SIGMA, on a grid of 0.02."""
    axis = np.arange(-12.0, 12.0, 0.02)
    bell = lambda x: np.exp(-0.5 * ((axis - x) / SIGMA) ** 2) / (SIGMA * np.sqrt(2 * np.pi))
    density = lambda points: sum(np.outer(bell(x), bell(y)) for x, y in points) / len(points)
    return np.maximum(density(_few(first)) - np.exp(EPSILON) * density(_few(second)), 0.0).sum() * 0.02**2


def _few(points):
    """Each distinct point, repeated by its count over the greatest common divisor of all counts."""
    rows, counts = np.unique(points, axis=0, return_counts=True)
    return np.repeat(rows, counts // np.gcd.reduce(counts), axis=0)


def gaussian_delta(mu):
    return ndtr(mu / 2 - EPSILON / mu) - np.exp(EPSILON) * ndtr(-mu / 2 - EPSILON / mu)


def test_shuffled_batches_leak_more_than_one_gaussian_when_a_record_is_added_or_removed():
    """Two batches of two; other records are -1.  Both directions exceed the old claim, a Gaussian of sensitivity 1."""
    with_it, without = sums([1, -1, -1, -1], 2, 2), sums([-1, -1, -1], 2, 2)
    old_claim = gaussian_delta(1 / SIGMA)
    assert old_claim == pytest.approx(0.12693, abs=1e-5)
    assert hockey_stick(with_it, without) > 1.5 * old_claim
    assert hockey_stick(without, with_it) > 1.03 * old_claim


def test_zero_out_and_replace_one_of_shuffled_batches_are_within_the_claim():
    zeroed, replaced = sums([0, -1, -1, -1], 2, 2), sums([-1, -1, -1, -1], 2, 2)
    with_it = sums([1, -1, -1, -1], 2, 2)
    for one, other in itertools.permutations((with_it, zeroed)):
        assert 0.7 * gaussian_delta(1 / SIGMA) < hockey_stick(one, other) <= gaussian_delta(1 / SIGMA)
    for one, other in itertools.permutations((with_it, replaced)):
        assert hockey_stick(one, other) <= gaussian_delta(2 / SIGMA)


def test_fixed_batches_are_about_a_record_that_is_zeroed():
    given = {**FIXED, "expected_batch_size": 100, "epochs": 3, "noise_multiplier": 2.0}
    plan = Plan(**given)
    assert plan.relation == "zero_out" and "relation='zero_out'" in repr(plan) and "zero_out" in plan._repr_html_()
    assert plan.epsilon.upper == pytest.approx(gaussian_epsilon(np.sqrt(3) / 2.0), rel=1e-9)
    doubled = Plan(**given, relation="replace_one")
    assert doubled.epsilon.upper == pytest.approx(gaussian_epsilon(np.sqrt(3)), rel=1e-6)
    for relation in ("add_or_remove_one", "add_one", "remove_one"):
        assert "each pass as ja.Gaussian(noise_multiplier / 5**0.5)" in refusal(Plan, **given, relation=relation)
    poisson = Plan(target_delta=DELTA, dataset_size=10, sampling_probability=1.0, noise_multiplier=2.0, steps=1)
    assert poisson.relation == "add_or_remove_one"


def test_a_document_of_an_older_release_is_read_as_what_it_meant(tmp_path):
    """That release said add/remove, but its page said that the record's place stays empty, which is zero-out."""
    plan = Plan(**FIXED, expected_batch_size=100, epochs=3, noise_multiplier=2.0)
    assert Plan.from_document(plan_document(plan) | {"relation": "add_or_remove_one"}) == plan
    with Ledger.create(tmp_path / "run", plan) as ledger:
        ledger.record(0, "key", "batch", 2.0, 0.1, partition="0")
        assert ledger.epsilon(DELTA).upper == pytest.approx(gaussian_epsilon(0.5), rel=1e-9)
        assert "does not hold for fixed batches" in refusal(ledger.epsilon, DELTA, "add_or_remove_one")
