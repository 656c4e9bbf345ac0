"""Runs whose certificates were false (losses beyond 700, 1e14 steps, noise of .02, NaN), checked with mpmath.

`from_below` bounds delta by a test on the number of outputs beyond a threshold.  `from_above` bounds delta by an
attacker who is told which steps were hit.
"""

from __future__ import annotations

import mpmath as mp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxacct as ja

SMALL = 2**25
DELTA = 1e-5


@pytest.fixture(autouse=True)
def digits():
    with mp.workdps(30):
        yield


def tail(x):
    """Pr[N(0, 1) > x]."""
    return mp.erfc(x / mp.sqrt(2)) / 2


def gaussian(mu, eps):
    """delta(eps) of a Gaussian."""
    return tail(eps / mu - mu / 2) - mp.exp(eps) * tail(eps / mu + mu / 2)


def counted(n, p, k):
    """Return a lower bound of Pr[N >= k] for a binomial N: the sum of the first terms."""
    first = mp.exp(mp.loggamma(n + 1) - mp.loggamma(k + 1) - mp.loggamma(n - k + 1) + k * mp.log(p)) * (1 - p) ** (
        n - k
    )
    total = term = first
    for j in range(int(k), int(min(n, k + 60))):
        term *= (n - j) / mp.mpf(j + 1) * p / (1 - p)
        total += term
    return total


def from_below(sigma, q, n, eps):
    """Lower bound of delta(eps) of removing: the largest `Pr_P[N >= k] - e^eps Pr_Q[N >= k]` over thresholds and k."""
    s, best = 1 / mp.mpf(sigma), mp.mpf(0)
    grown = mp.exp(mp.mpf(eps))
    for z in (2, 4, 6):
        u = s - z
        p, other = (1 - mp.mpf(q)) * tail(u) + mp.mpf(q) * tail(u - s), tail(u)
        for k in range(1, int(min(n, 200)) + 1):
            # under Q: a union bound over all sets of k steps
            under_q = mp.exp(mp.loggamma(n + 1) - mp.loggamma(k + 1) - mp.loggamma(n - k + 1) + k * mp.log(other))
            best = max(best, counted(n, p, k) - grown * under_q)
    return best


def from_above(sigma, q, n, eps):
    """sum_k Pr[k hits] delta_k(eps)."""
    s, total = 1 / mp.mpf(sigma), mp.mpf(0)
    for k in range(1, int(min(n, 400)) + 1):
        weight = mp.binomial(n, k) * mp.mpf(q) ** k * (1 - mp.mpf(q)) ** (n - k)
        total += weight * gaussian(mp.sqrt(k) * s, mp.mpf(eps))
    return total + (counted(n, mp.mpf(q), 400) if n > 400 else 0)


@pytest.mark.parametrize(
    "sigma, q, steps",
    [
        (0.02, 0.5, 10),
        (0.02, 0.01, 100),
        (0.02, 0.1, 100),
        (0.02, 0.9, 2),
        (1e-12, 0.01, 1000),
    ],
)
def test_hits_of_large_loss_are_in_the_certificate(sigma, q, steps):
    """The old code gave the epsilons 6.93, 1.005, 10.5, 4.6 and 2.4e-8 for these runs; all of them exceed 500."""
    found = ja.epsilon(ja.dp_sgd(sigma, q, steps), DELTA, memory_bytes=SMALL)
    assert from_below(sigma, q, steps, found.upper * 0.999) > 0 or found.upper > 700
    assert from_below(sigma, q, steps, found.upper) <= DELTA
    assert from_above(sigma, q, steps, found.lower) >= DELTA * (1 - 1e-9)
    assert found.lower > 0.5 * found.upper > 500


def test_two_steps_of_little_noise():
    """At the old code's upper end of epsilon, delta was 1.084e-6, which is more than 1e-6."""
    found = ja.epsilon(ja.dp_sgd(0.03, 0.1, 2), 1e-6, relation="remove_one", memory_bytes=SMALL)
    assert found.lower <= found.upper and found.lower > 1279.8990
    assert from_below(0.03, 0.1, 2, found.upper) <= 1e-6 <= from_above(0.03, 0.1, 2, found.lower) * (1 + mp.mpf(1e-9))


def test_no_steps_are_found_where_one_is_too_many():
    found = ja.calibrate_steps(800.0, 1e-5, noise_multiplier=0.02, sampling_probability=0.5, max_steps=4)
    assert not found.ok and np.isnan(found.value)


@pytest.mark.parametrize("steps, per_step", [pytest.param(1e14, 1.4e-3, marks=pytest.mark.slow), (2.0**53, 1.4e-3)])
def test_very_many_steps(steps, per_step):
    """The true epsilon is about n KL; the old code gave 4.7e-10 and 4.2e-8."""
    found = ja.epsilon(ja.dp_sgd(2.0, 0.1, steps), DELTA)
    kl = 0.5 * 0.1**2 * np.expm1(0.25)
    assert 0.8 * steps * per_step < found.lower <= 1.01 * steps * kl <= 1.1 * found.upper
    assert found.upper <= steps / 8 * (1 + 1e-3)  # each step without sampling has KL 1/8


def one_sampled_step(mu, q, eps):
    return q * gaussian(mu, mp.log1p(mp.expm1(eps) / q))


@settings(deadline=None, max_examples=15)
@given(
    st.floats(-12, 60).map(lambda x: 10.0**x),
    st.floats(-290, -1e-9).map(lambda x: 10.0**x),
    st.floats(-290, -0.01).map(lambda x: 10.0**x),
)
def test_one_step_over_the_whole_range(sigma, q, delta):
    """In the old code expm1(eps)/q overflowed for eps > 709, and the NaN that followed passed as a valid bound."""
    found = ja.epsilon(ja.PoissonSampled(ja.Gaussian(sigma), q), delta, relation="remove_one")
    mu = 1 / mp.mpf(sigma)
    with mp.workdps(60 + 2 * abs(int(mp.log10(mu))) + abs(int(np.log10(q)))):
        at = [one_sampled_step(mu, mp.mpf(q), mp.mpf(float(end))) for end in (found.lower, found.upper)]
    assert at[1] <= delta * (1 + mp.mpf(10) ** -12)
    assert found.lower == 0.0 or at[0] >= delta * (1 - mp.mpf(10) ** -12)


@pytest.mark.parametrize("scale", [1e-3, 1 / 400, 1e-10, 1 / 800])
def test_laplace_noise_of_large_loss(scale):
    """The true epsilon is 1/b + 2 log(1 - delta); the old code gave 1e-11."""
    truth = 1 / mp.mpf(scale) + 2 * mp.log1p(-mp.mpf(DELTA))
    found = ja.epsilon(ja.Laplace(scale), DELTA)
    assert found.lower <= truth <= found.upper <= found.lower * (1 + 1e-4)


def test_sampled_and_composed_laplace_noise_of_large_loss():
    """The old code gave .693 and 1.7e-11, although losses near 1000 and near 600 have P-mass 1/4 and 1/2."""
    sampled = ja.epsilon(ja.PoissonSampled(ja.Laplace(1e-3), 0.5), DELTA)
    truth = mp.log(mp.mpf(0.5) + mp.exp(1000 + 2 * mp.log1p(-2 * mp.mpf(DELTA))) / 2)
    assert sampled.lower <= truth <= sampled.upper <= sampled.lower * (1 + 1e-4)
    composed = ja.epsilon(ja.compose(ja.Laplace(1 / 600), ja.Laplace(1.0)), DELTA, memory_bytes=SMALL)
    assert 600 < composed.upper <= 601 + 1e-9 and composed.lower <= 601


def test_losses_of_the_least_noise_and_of_next_to_none():
    found = ja.delta(ja.Gaussian(1e170), 0.0)
    assert found.lower <= 3.989422804014327e-171 <= found.upper
    assert np.isinf(ja.epsilon(ja.ProposeTestRelease(ja.Laplace(1.0), 1.0, 800.0), 0.0).upper)
    assert ja.epsilon(ja.Gaussian(1e-160), 1e-5).status == "width"  # epsilon is finite, but too large for float64


def test_products_of_tiny_masses_are_not_lost():
    """The old lower end, 3.01005456e-11, was too high: `a b/(a + b)` underflowed, so that no mass was lowered."""
    run = ja.compose(ja.repeat(ja.Gaussian(1.0), 400), ja.PoissonSampled(ja.Laplace(1e13), 0.5))
    found = ja.delta(run, 330.0, relation="remove_one")
    assert found.lower <= 3.01004916e-11 and found.upper >= 3.01004914e-11


@pytest.mark.parametrize("run", [
    ja.compose(ja.Gaussian(1.0), ja.PoissonSampled(ja.Laplace(100.0), 0.1)),
    ja.dp_sgd(1.0, 0.01, 1),
])  # fmt: skip
def test_brackets_far_out_are_not_empty(run):
    found = ja.delta(run, 24.0, engine="lattice", memory_bytes=SMALL)
    assert 0.0 <= found.lower <= found.upper < 1e-60


@pytest.mark.parametrize("loss", [700.0, 1e3, 1e5, 1e12, 1e300])
def test_pure_dp_of_large_loss(loss):
    """delta(eps) = 1 - e^{eps - loss} near the loss."""
    found = ja.epsilon(ja.PureDP(loss), DELTA)
    assert found.lower <= loss * (1 + 1e-12) and found.upper >= loss - 1e-4
    assert ja.delta(ja.PureDP(loss), 0.5 * loss).upper == 1.0


def test_one_bad_row_does_not_end_a_batch():
    found = ja.epsilon(ja.dp_sgd([1.0, 0.025, 1e-12, 1e170], 0.01, 10), DELTA, memory_bytes=SMALL)
    alone = ja.epsilon(ja.dp_sgd(1.0, 0.01, 10), DELTA, memory_bytes=SMALL)
    assert found.lower[0] <= alone.upper and alone.lower <= found.upper[0]
    assert np.all(found.lower <= found.upper) and found.upper[3] == 0.0
