"""delta at eps = 0 and near it where few hits are expected: the split contour against engines of another kind."""

import numpy as np
import pytest
from scipy.stats import norm

import jaxacct as ja
from jaxacct.accounting.dispatch import kinds_of
from jaxacct.engines.contour import Contour
from jaxacct.engines.protocol import Effort, Question
from jaxacct.mechanisms import components

FEW = [(0.5, 0.01, 1000), (0.5, 1e-4, 1000), (0.35, 1e-3, 400), (1.0, 1e-5, 20_000), (0.8, 1e-3, 3000)]
"""Noise multiplier, sampling probability, steps."""


def test_few_hits_are_certified_at_and_near_zero():
    sigma, q, steps = np.array(FEW).T
    run = ja.dp_sgd(sigma[:, None], q[:, None], steps[:, None])
    found = ja.delta(run, [0.0, 1e-3])
    assert np.all(found.engine == "contour") and np.all(found.status == "ok")
    assert np.all(found.upper[:, 0] >= found.lower[:, 1])
    # TV of one step is q (2 Phi(1/(2 sigma)) - 1). TV of n steps is at least this, and at most n times this.
    one = q * (2.0 * norm.cdf(0.5 / sigma) - 1.0)
    assert np.all(found.upper[:, 0] >= one) and np.all(found.lower[:, 0] <= steps * one)


def test_two_steps_agree_with_their_own_engine():
    sigma, q = np.array([0.4, 1.2]), np.array([1e-3, 0.2])
    run = ja.dp_sgd(sigma, q, 2)
    for eps in (0.0, 0.05):
        ours, other = (ja.delta(run, eps, relation="remove_one", engine=name) for name in ("contour", "auto"))
        assert np.all(other.engine == "two_steps")
        assert np.all(ours.lower <= other.upper) and np.all(other.lower <= ours.upper)


@pytest.mark.slow
def test_it_agrees_with_the_lattice():
    for sigma, q, steps in FEW[:3]:
        run = ja.dp_sgd(sigma, q, steps)
        ours, other = ja.delta(run, 0.0), ja.delta(run, 0.0, relation="remove_one", engine="lattice")
        assert ours.lower <= other.upper and other.lower <= ours.upper


def test_both_directions_have_the_same_delta_at_zero_and_only_there():
    run = ja.dp_sgd([1.0, 0.6], [0.05, 0.2], 100)
    add, remove, both = (ja.delta(run, 0.0, relation=r) for r in ("add_one", "remove_one", "add_or_remove_one"))
    assert np.all(add.upper == remove.upper) and np.all(both.lower == remove.lower)
    # if asked for the direction "add" alone, the engine gives the same delta
    parts = components(run, "add_one", "add")
    zero = np.zeros(2)
    lower, _, upper = Contour().delta(Question(parts, kinds_of(parts), zero, zero, zero, Effort(1e-4)))
    assert np.all(lower <= remove.upper) and np.all(remove.lower <= upper)
    some = ja.delta(run, [0.0, 0.5])
    assert some.upper[1] == max(ja.delta(run, 0.5, relation=r).upper[1] for r in ("add_one", "remove_one"))
    assert ja.delta(run, 0.5, relation="add_one").upper[1] < ja.delta(run, 0.5, relation="remove_one").lower[1]


def test_the_eps_of_a_rate_is_the_best_one():
    """There are two guesses, of which one is far off."""
    q, steps, goal, fpr = 0.0027, 61_886, 0.9, 5e-5
    found = ja.calibrate_noise_multiplier(None, None, q, steps, target_tpr=goal, at_fpr=fpr)
    eps = found.epsilon.upper + np.linspace(-0.3, 0.3, 3)
    run = ja.dp_sgd(found.value, q, steps)
    rates = ja.delta(run, np.maximum(eps, 0.0), rtol=1e-3).lower + np.exp(np.maximum(eps, 0.0)) * fpr
    assert found.risk.upper <= goal and np.min(rates) >= goal * (1.0 - 3e-4)
