"""The quick theorems against closed forms and against the thorough ones, over the whole range of float64."""

from __future__ import annotations

import numpy as np
import pytest

import jaxacct as ja
from jaxacct.engines import closed_form, quick_bounds, theorems
from jaxacct.mechanisms import components

RELATION = "add_or_remove_one"
SIZE = 150


def log_uniform(rng, low, high):
    return np.exp(rng.uniform(np.log(low), np.log(high), SIZE))


@pytest.mark.parametrize("direction", ["remove", "add"])
@pytest.mark.parametrize("noise", [(0.3, 30.0), (1e-12, 1e170)])
def test_one_step_lies_between(direction, noise):
    rng = np.random.default_rng(1)
    sigma, q, delta = (
        log_uniform(rng, *noise),
        np.minimum(log_uniform(rng, 1e-300, 1.0), 1 - 1e-9),
        log_uniform(rng, 1e-300, 0.999),
    )
    parts = components(ja.PoissonSampled(ja.Gaussian(sigma), q), RELATION, direction)
    removing = np.full(SIZE, direction == "remove")
    with np.errstate(all="ignore"):
        truth = closed_form.epsilon_of_one_step(sigma, q, removing, delta, np.full(SIZE, 1e-15))
    lower, upper = quick_bounds.limits("epsilon", parts, delta, np.full(SIZE, 1e-15))
    assert np.all(lower <= truth.upper) and np.all(truth.lower <= upper) and np.all(np.isfinite(upper))
    eps = np.minimum(upper * rng.uniform(0.0, 1.2, SIZE), 1e300)
    with np.errstate(all="ignore"):
        truth = closed_form.delta_of_one_step(sigma, q, removing, eps)
    lower, upper = quick_bounds.limits("delta", parts, eps, np.zeros(SIZE))
    assert np.all(lower <= truth.upper) and np.all(truth.lower <= upper)


@pytest.mark.parametrize("direction", ["remove", "add"])
def test_compositions_agree_with_the_thorough_theorems(direction):
    rng = np.random.default_rng(2)
    run = ja.compose(
        ja.dp_sgd(log_uniform(rng, 1e-12, 1e6), np.minimum(log_uniform(rng, 1e-12, 1.0), 0.999), np.floor(
            log_uniform(rng, 1.0, 2.0**50)
        )),
        ja.Laplace(log_uniform(rng, 1e-10, 1e10)),
        ja.ApproximateDP(log_uniform(rng, 1e-300, 1e4), log_uniform(rng, 1e-300, 0.5)),
        ja.Gaussian(log_uniform(rng, 1e-6, 1e150)),
    )  # fmt: skip
    parts = components(run, RELATION, direction)
    delta, slack = log_uniform(rng, 1e-300, 0.4), np.full(SIZE, 1e-15)
    lower, upper = quick_bounds.limits("epsilon", parts, delta, slack)
    with np.errstate(all="ignore"):
        best = theorems.best_epsilon(theorems.tests_of(parts), delta)
        least = theorems.least_epsilon(parts, delta, slack)
    assert np.all(lower <= least) and np.all(best <= upper) and np.all(best <= least)
    assert np.all(lower <= upper) and np.all(least <= upper * (1 + 1e-9))


def test_large_losses_are_seen():
    """One sampled step has a loss of 1250. The old lattice engine certified epsilon = 1.005 for the hundred steps."""
    parts = components(ja.dp_sgd(0.02, 0.01, 100), RELATION, "remove")
    lower, _ = quick_bounds.limits("epsilon", parts, np.array([1e-5]), np.zeros(1))
    assert 1000.0 < lower[0] < 8969.7
    many = components(ja.dp_sgd(2.0, 0.1, 1e14), RELATION, "remove")
    lower, _ = quick_bounds.limits("epsilon", many, np.array([1e-5]), np.zeros(1))
    assert 1.2e11 < lower[0] < 1.42e11
    loud = components(ja.Laplace(1 / 400), RELATION, "remove")
    lower, upper = quick_bounds.limits("epsilon", loud, np.array([1e-5]), np.zeros(1))
    assert 399.0 < lower[0] <= 400.0 <= upper[0] < 401.0
