"""Gaussian noise of data-dependent variance, against quadrature over the densities of every pair of neighbours."""

import math

import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution
from helpers import doctests_of, refusal
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxacct as ja
from jaxacct.mechanisms import additive_noise


def log_densities(m, r, reach=12.0, size=30001):
    """x, log P and log Q of N(m, r^2) and N(0, 1) on a grid that covers both."""
    wide = reach * max(r, 1.0)
    x = np.linspace(min(m, 0.0) - wide, max(m, 0.0) + wide, size)
    log_p = -0.5 * np.square((x - m) / r) - math.log(r * math.sqrt(2 * math.pi))
    return x, log_p, -0.5 * np.square(x) - 0.5 * math.log(2 * math.pi)


def hockey_stick(m, r, eps):
    """H_{e^eps}(N(m, r^2) || N(0, 1)) by the trapezoid rule."""
    x, log_p, log_q = log_densities(m, r)
    return float(np.trapezoid(np.exp(log_p) * -np.expm1(np.minimum(eps + log_q - log_p, 0.0)), x))


def test_doctests():
    assert doctests_of(additive_noise) > 0


@pytest.mark.parametrize(("sigma", "b"), [(4.0, 0.05), (0.3, 0.02), (20.0, 1.0)])
def test_the_largest_of_all_pairs_of_neighbours(sigma, b):
    """No neighbours exceed the profile, and the worst of them attain it."""
    rng = np.random.default_rng(7)
    eps = np.array([0.0, 0.1, 0.5, 1.5, 4.0])
    got = ja.delta(ja.SmoothSensitivityGaussian(sigma, b), eps)
    assert got.kind[0] == "bound"
    ratios = np.exp(np.concatenate([np.linspace(-b, b, 9), rng.uniform(-b, b, 4)]))
    worst = np.zeros(eps.size)
    for r in ratios:
        for share in (1.0, 0.9, 0.0):
            m = share * min(1.0, r) / sigma
            worst = np.maximum(worst, [hockey_stick(m, r, e) for e in eps])
    assert np.all(got.upper >= worst * (1 - 1e-6) - 1e-9)
    assert np.all(got.upper <= worst * (1 + 2e-4) + 1e-9)


@given(st.floats(-1.5, 1.0), st.floats(-4.0, 0.3), st.floats(-1.0, 1.0), st.floats(-4.0, 6.0))
@settings(max_examples=60, deadline=None)
def test_falling_then_rising_in_the_ratio(log_m, log_b, share, at):
    """For eps near the mean loss m^2/2, delta at each ratio is at most the largest of the bounds at e^-b, 1 and e^b."""
    m, b = 10.0**log_m, 10.0**log_b
    epsilon = max(0.5 * m * m + at * m, 0.0)
    ends = [additive_noise._wider(m, s, np.array([epsilon]))[0] for s in (0.0, b)]
    ends.append(additive_noise._narrower(m, b, np.array([epsilon]))[0])
    r = math.exp(share * b)
    assert hockey_stick(m * min(1.0, r), r, epsilon) <= max(ends) * (1 + 1e-5) + 1e-7


def test_two_steps_against_their_joint_densities():
    """Composed, the two worst neighbours leak at most the bound. For eps above 2 the bound is at most 2 % larger."""
    sigma, b = 2.0, 0.1
    run = ja.repeat(ja.SmoothSensitivityGaussian(sigma, b), 2)
    eps = np.array([0.3, 1.5, 4.0, 8.0])
    got = ja.delta(run, eps).upper
    x, log_p, log_q = log_densities(1.0 / sigma, math.exp(b), 12.0, 3001)
    p, loss, cell = np.exp(log_p), log_p - log_q, x[1] - x[0]
    tail, base = (np.append(np.cumsum((np.exp(d) * cell)[order := np.argsort(loss)][::-1])[::-1], 0.0)
                  for d in (log_p, log_q))  # fmt: skip
    ordered = loss[order]
    for e, bound in zip(eps, got, strict=True):
        place = np.searchsorted(ordered, e - loss, side="right")
        truth = float(np.sum(p * cell * tail[place] - math.exp(e) * np.exp(log_q) * cell * base[place]))
        assert truth * (1 - 1e-3) <= bound
        assert e < 2.0 or bound <= truth * 1.02  # for a smaller eps another pair of neighbours is worst


def test_smoothness_zero_is_the_gaussian():
    same = privacy_loss_distribution.from_gaussian_mechanism(3.0, value_discretization_interval=1e-3)
    run = ja.repeat(ja.SmoothSensitivityGaussian(3.0, [0.0, 1e-300, 1e-9]), 20)
    got = ja.epsilon(run, 1e-6).upper
    np.testing.assert_allclose(got, same.self_compose(20).get_epsilon_for_delta(1e-6), rtol=1e-4)
    assert np.all(got >= ja.epsilon(ja.repeat(ja.Gaussian(3.0), 20), 1e-6).lower)


def test_no_moment_generating_function_but_a_small_delta():
    heavy = ja.SmoothSensitivityGaussian(10.0, 0.2)
    order = 1.0 + 1.0 / math.expm1(0.4)
    assert ja.profile(heavy).renyi(1.01 * order).upper == np.inf
    assert ja.delta(heavy, 15.0).upper < 1e-6
    wide = ja.epsilon(heavy, [1e-2, 1e-8, 1e-100], rtol=1e-3).upper
    assert np.all(np.diff(wide) > 0) and np.all(np.isfinite(wide))


def test_sampled_composed_and_refused():
    step = ja.SmoothSensitivityGaussian(4.0, 0.05)
    whole, sampled = (ja.epsilon(ja.repeat(m, 2), 1e-5, rtol=1e-2).upper for m in (step, ja.PoissonSampled(step, 0.1)))
    least = ja.epsilon(ja.repeat(ja.PoissonSampled(ja.Gaussian(4.0), 0.1), 2), 1e-5).lower
    assert least < sampled < whole
    assert "smoothness = -0.1 must be >= 0 and <= 10" in refusal(ja.SmoothSensitivityGaussian, 1.0, -0.1)
    assert "noise_multiplier[1] = 0.0" in refusal(ja.SmoothSensitivityGaussian, [1.0, 0.0], 0.1)
