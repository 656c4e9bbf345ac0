"""Composition theorems against brute force and against each other; limit theorems against their known figures."""

import itertools

import numpy as np
import pytest
from helpers import doctests_of, refusal
from scipy.stats import binom

import jaxacct as ja
from jaxacct.representations import composition_theorems
from jaxacct.representations.composition_theorems import (
    advanced_composition,
    basic_composition,
    clt_epsilon,
    exact_composition,
    parallel_composition,
)


def test_doctests():
    assert doctests_of(composition_theorems) > 0


def brute_delta(eps, delta, steps, total):
    """Kairouz, Oh, Viswanath: steps with mass delta at infinity, the rest randomised response with e^eps."""
    p = 1 / (1 + np.exp(-eps))
    k = np.arange(steps + 1)
    loss = (2 * k - steps) * eps
    finite = np.sum(binom.pmf(k, steps, p) * np.maximum(-np.expm1(total - loss), 0))
    return 1 - (1 - delta) ** steps * (1 - finite)


@pytest.mark.parametrize("eps,delta,steps,total", [(0.1, 0.0, 30, 1e-5), (0.5, 1e-7, 10, 1e-4), (1.0, 1e-3, 3, 0.01)])
def test_exact_is_optimal_and_below_the_others(eps, delta, steps, total):
    found = exact_composition(eps, delta, steps, total)
    assert brute_delta(eps, delta, steps, found.upper) <= total * (1 + 1e-9)
    assert brute_delta(eps, delta, steps, found.lower) >= total * (1 - 1e-9)
    slack = total - steps * delta
    tight, textbook = (advanced_composition(eps, delta, steps, slack, form=f) for f in ("tight", "textbook"))
    assert found.lower <= tight.epsilon <= textbook.epsilon
    assert tight.delta == pytest.approx(total) and tight.kind == "bound"
    assert found.lower <= basic_composition(np.full(steps, eps), delta).epsilon * (1 + 1e-12)


def test_advanced_composition_by_the_formula():
    found = advanced_composition([0.1, 1.0], 1e-8, 50, 1e-6)
    for got, e in zip(found.epsilon, (0.1, 1.0), strict=True):
        assert got == pytest.approx(e * np.sqrt(100 * np.log(1e6)) + 50 * e * (np.exp(e) - 1) / (np.exp(e) + 1))
    np.testing.assert_allclose(found.delta, 50e-8 + 1e-6)
    textbook = advanced_composition(1.0, 0.0, 50, 1e-6, form="textbook").epsilon
    assert textbook == pytest.approx(np.sqrt(100 * np.log(1e6)) + 50 * (np.e - 1))


def test_basic_and_parallel_on_a_mechanism():
    # two counts on disjoint shards, and both on the same data, by enumerating randomised response
    probabilities = (0.6, 0.75)
    eps = [np.log(p / (1 - p)) for p in probabilities]
    same = 0.0
    for outcome in itertools.product((0, 1), repeat=2):
        first = np.prod([p if o else 1 - p for p, o in zip(probabilities, outcome, strict=True)])
        second = np.prod([1 - p if o else p for p, o in zip(probabilities, outcome, strict=True)])
        same = max(same, np.log(first / second))
    assert basic_composition(eps, 0.0).epsilon == pytest.approx(same)
    assert parallel_composition(eps, [0.0, 1e-3]) == (pytest.approx(max(eps)), 1e-3, "bound")
    assert basic_composition([1.0, 1.0], 0.9).delta == 1.0


@pytest.mark.parametrize("variant,figure", [("poisson", 3.720), ("simplified", 2.258), ("uniform", 5.256)])
def test_limit_theorems_give_their_figures_and_bound_nothing(variant, figure):
    truth = 4.293
    found = clt_epsilon(0.8, 0.01, 2000, 1e-5, variant=variant)
    assert found.estimate == pytest.approx(figure, abs=5e-4) and found.kind == "asymptotic"
    assert abs(found.estimate - truth) > 0.5


def test_limit_theorem_edges_and_refusals():
    edges = clt_epsilon([1.0, 0.01], [0.0, 0.5], 10, 1e-5)
    assert edges.estimate[0] == 0 and np.isinf(edges.estimate[1])
    assert clt_epsilon([1.0, 2.0], 0.01, [[10], [1000]], 1e-5).shape == (2, 2)
    assert "variant = 'exact'" in refusal(clt_epsilon, 1.0, 0.1, 10, 1e-5, variant="exact")
    assert "form" in refusal(advanced_composition, 1.0, 0.0, 10, 1e-5, form="best")
    assert "steps = 1.5" in refusal(advanced_composition, 1.0, 0.0, 1.5, 1e-5)


def test_the_limit_converges_to_the_certified_answer():
    # T to infinity at fixed q sqrt(T): the poisson variant approaches the truth
    gaps = []
    for steps in (400, 40_000):
        q = 0.4 / np.sqrt(steps)
        exact = ja.epsilon(ja.dp_sgd(1.0, q, steps), 1e-3).estimate
        gaps.append(abs(clt_epsilon(1.0, q, steps, 1e-3).estimate - exact) / exact)
    assert gaps[1] < 0.5 * gaps[0]
