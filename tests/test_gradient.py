"""Gradients against differences of certified brackets that are far narrower than the step."""

import jax
import numpy as np
import pytest

import jaxacct as ja


def test_gradient_of_dp_sgd():
    sigma, q, n = np.array([0.8, 2.0]), np.array([0.01, 0.05]), np.array([1000.0, 5000.0])
    g = ja.epsilon_gradient(ja.dp_sgd(sigma, q, n), 1e-6)

    def estimate(*fields):
        return ja.epsilon(ja.dp_sgd(*fields), 1e-6).estimate

    h = 1e-4
    by_sigma = (estimate(sigma * (1 + h), q, n) - estimate(sigma * (1 - h), q, n)) / (2 * h * sigma)
    by_q = (estimate(sigma, q * (1 + h), n) - estimate(sigma, q * (1 - h), n)) / (2 * h * q)
    by_n = (estimate(sigma, q, n + 1) - estimate(sigma, q, n - 1)) / 2
    np.testing.assert_allclose(g.mechanism.mechanism.noise_multiplier, by_sigma, rtol=1e-5)
    np.testing.assert_allclose(g.mechanism.sampling_probability, by_q, rtol=1e-5)
    np.testing.assert_allclose(g.steps, by_n, rtol=1e-4)


@pytest.mark.parametrize("sigma, q, n, delta", [(18.0, 0.005, 500, 1e-20), (1.2, 1.3e-5, 54_000, 5e-20)])
def test_gradient_where_losses_have_two_humps(sigma, q, n, delta):
    """The old code put a plain contour around the wrong hump, and gave -1e-5 for a derivative of -.077."""
    h, run = 1e-3, ja.dp_sgd(sigma * np.array([1 - 1e-3, 1 + 1e-3, 1, 1]), q * np.array([1, 1, 1 - 1e-3, 1 + 1e-3]), n)
    found = ja.epsilon_gradient(ja.dp_sgd(sigma, q, n), delta, relation="remove_one")
    at = ja.epsilon(run, delta, relation="remove_one")
    low_sigma, high_sigma, low_q, high_q = at.estimate
    assert found.mechanism.mechanism.noise_multiplier == pytest.approx((high_sigma - low_sigma) / (2 * h * sigma), 1e-3)
    assert found.mechanism.sampling_probability == pytest.approx((high_q - low_q) / (2 * h * q), 1e-3)


@pytest.mark.slow
def test_gradient_of_a_heterogeneous_composition():
    def run(b, e, d):
        return ja.compose(ja.dp_sgd(1.0, 0.01, 1000), ja.Laplace(b), ja.ApproximateDP(e, d))

    g = ja.epsilon_gradient(run(10.0, 0.1, 1e-7), 1e-5)
    at = lambda *fields: ja.epsilon(run(*fields), 1e-5).estimate
    laplace, approximate = g.mechanisms[1], g.mechanisms[2]
    assert laplace.scale == pytest.approx((at(10.01, 0.1, 1e-7) - at(9.99, 0.1, 1e-7)) / 0.02, rel=1e-4)
    assert approximate.epsilon == pytest.approx((at(10.0, 0.101, 1e-7) - at(10.0, 0.099, 1e-7)) / 0.002, rel=1e-4)
    assert approximate.delta == pytest.approx((at(10.0, 0.1, 1.01e-7) - at(10.0, 0.1, 0.99e-7)) / 2e-9, rel=1e-4)


def test_gradient_is_zero_where_epsilon_does_not_move():
    g = ja.epsilon_gradient(ja.dp_sgd(5.0, 1e-4, 10), 0.1)
    assert g.mechanism.sampling_probability == 0


def test_a_count_that_cannot_be_one_more_has_no_derivative():
    """Random allocation of a base with finitely many outputs allows no group above 1, so `group` has no derivative."""
    g = ja.epsilon_gradient(ja.RandomAllocation(ja.PureDP(0.5), 10), 1e-5)
    at = lambda epsilon: ja.epsilon(ja.RandomAllocation(ja.PureDP(epsilon), 10), 1e-5).estimate
    assert g.mechanism.epsilon == pytest.approx((at(0.501) - at(0.499)) / 0.002, rel=1e-3)
    assert np.isnan(g.group) and np.isfinite(g.slots) and np.isfinite(g.participations)


def test_more_fields_than_are_differentiated_one_by_one_are_refused():
    many = ja.compose(*[ja.Gaussian(900.0 + i) for i in range(2000)])
    with pytest.raises(ja.InputError, match="at most 400 fields and this mechanism has 2000; gather equal parts"):
        ja.epsilon_gradient(many, 1e-6)


@pytest.mark.parametrize(
    "make, fields, relation",
    [
        (ja.ZCDP, {"rho": 0.1, "xi": 0.0}, "add_or_remove_one"),
        (lambda epsilon: ja.compose(ja.Gaussian(2.0), ja.PureDP(epsilon)), {"epsilon": 0.0}, "add_or_remove_one"),
        (lambda delta: ja.compose(ja.Gaussian(2.0), ja.ApproximateDP(0.1, delta)), {"delta": 0.0}, "add_or_remove_one"),
        (lambda batches: ja.ShuffledBatches(ja.Gaussian(2.0), batches), {"batches": 5}, "zero_out"),
        (lambda r: ja.SampledWithoutReplacement(ja.Gaussian(2.0), r), {"sampling_ratio": 1.0}, "replace_one"),
        (
            lambda n, cap: ja.TruncatedPoissonSampled(ja.Gaussian(2.0), 0.1, n, cap),
            {"dataset_size": 100, "cap": 20},
            "add_or_remove_one",
        ),
        (
            lambda batch, n: ja.SampledWithReplacement(ja.Gaussian(2.0), batch, n),
            {"batch_size": 5, "dataset_size": 100},
            "add_or_remove_one",
        ),
    ],
)
def test_fields_at_a_limit_and_whole_fields_have_derivatives(make, fields, relation):
    """The old difference quotient left a field's limits: for xi = 0 it asked for xi = -1e-17, which is refused."""
    found = {}
    gradient = ja.epsilon_gradient(make(*fields.values()), 1e-4, relation=relation)
    for leaf in jax.tree_util.tree_flatten_with_path(gradient)[0]:
        found[leaf[0][-1].name] = float(leaf[1])
    at = lambda values: float(ja.epsilon(make(*values), 1e-4, relation=relation, rtol=1e-6).estimate)
    for place, (name, value) in enumerate(fields.items()):
        step = 1 if isinstance(value, int) else -1e-3 if name == "sampling_ratio" else 2e-6 if name == "delta" else 1e-3
        moved = [other + step * (i == place) for i, other in enumerate(fields.values())]
        assert found[name] == pytest.approx((at(moved) - at(fields.values())) / step, rel=2e-2, abs=1e-9)
