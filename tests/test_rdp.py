"""Rényi accounting against dp_accounting, ball arithmetic and our certified engines."""

import math

import dp_accounting
import numpy as np
import pytest
from dp_accounting import rdp as peer
from helpers import doctests_of, gaussian_moment, refusal

import jaxacct as ja
from jaxacct.representations import renyi_divergences
from jaxacct.representations.renyi_divergences import RenyiCurve, rdp_delta, rdp_epsilon, renyi_curve

ORDERS = [*range(2, 64), 128, 256]


def peer_accountant(sigma, q, steps):
    accountant = peer.RdpAccountant(ORDERS)
    event = dp_accounting.PoissonSampledDpEvent(q, dp_accounting.GaussianDpEvent(sigma))
    return accountant.compose(dp_accounting.SelfComposedDpEvent(event, steps))


def test_doctests():
    assert doctests_of(renyi_divergences) > 0


@pytest.mark.parametrize("sigma,q,steps", [(1.0, 0.01, 1000), (2.0, 0.1, 200), (0.6, 0.001, 5000), (5.0, 0.5, 50)])
def test_the_same_orders_as_dp_accounting(sigma, q, steps):
    accountant, run = peer_accountant(sigma, q, steps), ja.dp_sgd(sigma, q, steps)
    ours = rdp_epsilon(run, 1e-5, orders=ORDERS)
    assert ours.upper == pytest.approx(accountant.get_epsilon(1e-5), rel=1e-6)
    assert renyi_curve(run, ORDERS).epsilon(1e-5).upper == pytest.approx(ours.upper, rel=1e-9)
    assert rdp_delta(run, 2.0, orders=ORDERS).upper == pytest.approx(accountant.get_delta(2.0), rel=1e-6)
    assert rdp_epsilon(run, 1e-5).upper <= ours.upper * (1 + 1e-12)


def test_fractional_orders_of_the_sampled_gaussian():
    # Mironov, Talwar, Zhang 2019: log E_Q[mix^alpha]/(alpha - 1)
    for alpha in (1.7, 4.3, 30.5):
        truth = 50 * float(gaussian_moment(2.0, 0.02, alpha).real.log()) / (alpha - 1)
        assert renyi_curve(ja.dp_sgd(2.0, 0.02, 50), [alpha]).values[0] == pytest.approx(truth, rel=1e-8)


def test_never_below_the_certified_epsilon():
    for mechanism in (
        ja.Gaussian([0.5, 30.0]),
        ja.PoissonSampled(ja.Gaussian(0.7), 0.01),
        ja.compose(ja.ApproximateDP(0.5, 1e-7), ja.Gaussian(1.0)),
    ):
        exact, bound = ja.epsilon(mechanism, 1e-5), rdp_epsilon(mechanism, 1e-5)
        assert (bound.upper >= exact.lower).all() and np.all(np.asarray(bound.kind) == "bound")
        reached = rdp_delta(mechanism, bound.upper).upper
        assert (reached <= 1e-5 * (1 + 1e-6)).all()
        assert (reached >= ja.delta(mechanism, bound.upper).lower).all()


def test_batches_equal_single_calls():
    probability, delta = np.array([0.6, 0.9]), np.array([[1e-5], [1e-8]])
    run = lambda truth: ja.repeat(ja.PoissonSampled(ja.RandomizedResponse(truth), 0.1), 500)
    whole = rdp_epsilon(run(probability), delta)
    assert whole.shape == (2, 2)
    for i, j in ((0, 1), (1, 0)):
        alone = rdp_epsilon(run(probability[j]), delta[i, 0]).upper
        assert alone == pytest.approx(whole.upper[i, j], rel=1e-9)


def test_directions_and_edges():
    run = ja.dp_sgd(0.7, 0.1, 20)
    sides = [rdp_epsilon(run, 1e-6, relation=r).upper for r in ("remove_one", "add_one")]
    assert rdp_epsilon(run, 1e-6).upper == max(sides) and sides[0] != sides[1]
    at_infinity = rdp_epsilon(ja.ApproximateDP(1.0, 1e-3), [1e-4, 1e-2])
    assert at_infinity.status.tolist() == ["mass_at_infinity", "ok"] and np.isinf(at_infinity.upper[0])
    assert rdp_epsilon(ja.Gaussian(1e4), 0.1).status == "zero"
    assert rdp_delta(ja.ApproximateDP(0.0, 0.25), 1.0).upper >= 0.25
    assert "delta = 0.0 must be > 0" in refusal(rdp_epsilon, run, 0.0)
    assert "orders = 1.0 must be > 1" in refusal(rdp_epsilon, run, 1e-5, orders=[1.0, 2.0])


def test_curves_add():
    orders = [2.0, 8.0, 32.0]
    first, second = ja.dp_sgd(1.0, 0.1, 1), ja.Laplace(2.0)
    together = renyi_curve(ja.compose(ja.repeat(first, 30), second), orders)
    added = 30 * renyi_curve(first, orders) + renyi_curve(second, orders)
    np.testing.assert_allclose(together.values, added.values, rtol=1e-9)
    assert (added.tradeoff([0.1, 0.5]).lower <= [0.9, 0.5]).all() and 0 < added.delta(3.0).upper < 1
    assert "different orders" in refusal(lambda: RenyiCurve(np.array([2.0]), np.array([1.0])) + together)


@pytest.mark.parametrize("orders", [[], [1.0], [2.0, math.nan], "x"])
def test_orders_that_cannot_be_used_are_refused(orders):
    assert refusal(rdp_epsilon, ja.Gaussian(1.0), 1e-5, orders=orders).startswith("orders")
    assert refusal(rdp_delta, ja.Gaussian(1.0), 1.0, orders=orders).startswith("orders")


@pytest.mark.parametrize("noise", [ja.Gaussian(0.5), ja.Laplace(0.5)])
def test_removing_has_the_larger_divergence_from_order_one_half_on(noise):
    """From order 1/2 on, the code computes only the divergence of removing and takes it for the larger one."""
    run = ja.compose(ja.repeat(ja.PoissonSampled(noise, np.array([1e-3, 0.2, 0.7])), 3), ja.Gaussian(4.0))
    for order in (1e-3, 0.3, 0.5, 0.7, 1.0, 1.001, 3.0, 40.0):
        add, remove = (ja.profile(run, side).renyi(order) for side in ("add_one", "remove_one"))
        assert np.all(add.lower <= remove.upper if order >= 0.5 else add.upper > remove.lower)
        larger = np.maximum(add.upper, remove.upper) if order < 0.5 else remove.upper
        assert np.all(ja.profile(run).renyi(order).upper == larger)
