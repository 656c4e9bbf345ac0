"""Zero-concentrated guarantees against mechanisms of two outputs: none exceeds the answer, and one attains it."""

import dp_accounting as dpa
import numpy as np
import pytest

import jaxacct as ja
from jaxacct import interop
from jaxacct.representations import renyi_divergence, zero_concentrated

ORDERS = 1.0 + np.geomspace(1e-4, 1e4, 800)[:, None]
"""Rényi orders, so many that the gaps between them change a delta by at most 1e-3 of its value."""


def allowed(p, q, rho, xi):
    """Whether both Rényi divergences of Bernoulli(p) and Bernoulli(q) are at most xi + rho alpha."""
    good = np.ones(p.shape, bool)
    for a, b in ((p, q), (q, p)):
        two = ORDERS * np.log(a) + (1 - ORDERS) * np.log(b), ORDERS * np.log1p(-a) + (1 - ORDERS) * np.log1p(-b)
        good &= np.all(np.logaddexp(*two) <= (ORDERS - 1) * (xi + rho * ORDERS), axis=0)
    return good


def two_outputs(rho, xi, count=40):
    """Pairs (p, q) that are allowed: on a grid of q, and for each the largest p by bisection."""
    q = 1 / (1 + np.exp(np.linspace(0.0, 6.0 * (xi + np.sqrt(rho) + 3.0), count)))
    low, high = q.copy(), np.ones(count) * (1 - 1e-15)
    for _ in range(30):
        p = 0.5 * (low + high)
        good = allowed(p, q, rho, xi)
        low, high = np.where(good, p, low), np.where(good, high, p)
    return low, q


SLOW = (pytest.param(*row, marks=pytest.mark.slow) for row in ((8.0, 0.0), (1e-4, 0.5), (0.01, 3.0)))


@pytest.mark.parametrize(("rho", "xi"), [(0.5, 0.0), (0.05, 1.0), *SLOW])
def test_two_outputs_attain_the_profile_and_none_exceeds_it(rho, xi):
    p, q = two_outputs(rho, xi)
    scale = xi + rho + np.sqrt(rho)
    epsilon = scale * np.array([0.0, 0.1, 0.5, 1.0, 2.0, 4.0, 6.0])
    best = np.max(p[:, None] - np.exp(epsilon) * q[:, None], axis=0)
    found = ja.delta(ja.ZCDP(rho, xi), epsilon)
    assert np.all(found.upper >= best * (1 - 1e-3))
    shown = best > 1e-11
    assert np.all(found.upper[shown] <= best[shown] * 1.15 + 1e-12) and shown.sum() >= 4
    assert np.all(found.kind == "bound") and not found.lower.any()


def test_gaussian_has_the_guarantee():
    rho = np.array([1e-3, 0.1, 2.0])[:, None]
    epsilon = np.array([0.0, 0.3, 1.0, 4.0])
    assert np.all(ja.delta(ja.ZCDP(rho), epsilon).upper >= ja.delta(ja.Gaussian(1 / np.sqrt(2 * rho)), epsilon).lower)


def test_known_values():
    # V = delta(0) solves V log((1 + V)/(1 - V)) = 1/2
    assert ja.delta(ja.ZCDP(0.5), 0.0).upper == pytest.approx(0.4790985, abs=1e-6)
    assert ja.profile(ja.ZCDP(0.5)).tradeoff(0.1).lower == pytest.approx(0.516, abs=1e-3)
    assert ja.epsilon(ja.ZCDP(1 / (2 * 3.14159**2)), 1e-2).upper <= 0.632569 * (1 + 1e-4)


def test_rho_adds_however_it_is_composed():
    one = ja.epsilon(ja.ZCDP(0.1, 0.2), 1e-6).upper
    several = (
        ja.repeat(ja.ZCDP(0.002, 0.004), 50),
        ja.compose(ja.ZCDP(0.06, 0.0), ja.repeat(ja.ZCDP(0.01, 0.05), 4)),
        ja.compose(*(ja.ZCDP(0.01, 0.02) for _ in range(10))),
    )
    for mechanism in several:
        assert ja.epsilon(mechanism, 1e-6).upper == pytest.approx(one, rel=1e-12)
    batch = ja.repeat(ja.ZCDP([0.002, 0.0]), [50, 3])
    assert ja.epsilon(batch, 1e-6).upper == pytest.approx([ja.epsilon(ja.ZCDP(0.1), 1e-6).upper, 0.0])


def test_events_add_over_the_calls_of_an_accountant():
    accountant = interop.CertifiedAccountant()
    for _ in range(4):
        accountant.compose(dpa.ZCDpEvent(0.025))
    assert accountant.get_epsilon(1e-6) == pytest.approx(2.14194, rel=1e-5)
    one = ja.delta(interop.from_dp_event(dpa.ZCDpEvent(0.5)), 0.0)
    assert one.upper < 0.5 and one.kind == "bound"


def test_beside_others_the_moments_add_too():
    beside = ja.compose(ja.repeat(ja.PureDP(0.05), 100), ja.ZCDP(0.2))
    orders = 1.0 + np.geomspace(0.1, 300.0, 400)
    curve = 100 * renyi_divergence(ja.PureDP(0.05), orders).upper + 0.2 * orders
    for delta in (1e-3, 1e-8, 1e-40):
        c = orders - 1
        known = np.min(curve + (c * np.log(c) - orders * np.log(orders) - np.log(delta)) / c)
        alone = ja.epsilon(ja.ZCDP(0.2), delta).upper
        assert alone < ja.epsilon(beside, delta).upper <= known * (1 + 1e-4)


def test_divergences_are_those_of_the_guarantee():
    orders = np.array([1.5, 2.0, 20.0])
    assert renyi_divergence(ja.ZCDP(0.1, 0.3), orders).upper == pytest.approx(0.3 + 0.1 * orders)
    assert zero_concentrated(ja.repeat(ja.ZCDP(0.1), 3)).upper == pytest.approx(0.3, rel=2e-3)


def test_a_sampled_guarantee_is_below_the_whole_one():
    sampled = ja.epsilon(ja.PoissonSampled(ja.ZCDP(0.1), 0.1), 1e-6).upper
    assert sampled < 0.5 < ja.epsilon(ja.ZCDP(0.1), 1e-6).upper
    assert ja.epsilon(ja.PoissonSampled(ja.ZCDP(0.1), 1.0), 1e-6).upper == ja.epsilon(ja.ZCDP(0.1), 1e-6).upper
