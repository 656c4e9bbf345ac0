"""The monotone score: order statistics against mpmath and brute force, for every law of K, alone and in a batch."""

import mpmath
import numpy as np
import pytest
from scipy.special import ndtr

import jaxacct as ja
from jaxacct import selection
from jaxacct.kernels import generating
from jaxacct.selection import named_bounds
from jaxacct.selection.law_of_k import Law, evaluated

LAWS = [
    selection.Geometric(0.1),
    selection.Geometric(1e-9),
    selection.Logarithmic(0.01),
    selection.TruncatedNegativeBinomial(-0.9, 1e-4),
    selection.TruncatedNegativeBinomial(50.0, 0.2),
    selection.Poisson(0.1),
    selection.Poisson(1e4),
    selection.Binomial(20, 0.5),
    selection.PointMass(1),
    selection.PointMass(10),
    selection.TwoPoint(1, 100, 0.1),
    selection.Categorical([0.25, 0.0, 0.5, 0.25]),
]


def epsilon_of(mu, law, delta):
    return selection.bound_epsilon(ja.Gaussian(1.0 / mu), law, delta, bound="monotone_score")


def delta_of(mu, law, eps):
    return selection.bound_delta(ja.Gaussian(1.0 / mu), law, eps, bound="monotone_score")


def densities(law, mu):
    """The densities of the best draw, without and with the record, on a fine grid, and the spacing of the grid."""
    x = np.linspace(-12.0, 12.0 + mu, 600_001)
    found = [np.exp(-0.5 * z**2) / np.sqrt(2 * np.pi) * evaluated(law, ndtr(-z))[1] for z in (x, x - mu)]
    return found, x[1] - x[0]


@pytest.mark.parametrize("law", LAWS, ids=repr)
def test_delta_is_the_integral_of_the_positive_part(law):
    for mu in (0.05, 1.0):
        (without, present), step = densities(law, mu)
        for eps in (0.0, 1.0, 3.0):
            pairs = (without, present), (present, without)
            truth = max(step * np.sum(np.maximum(p - np.exp(eps) * q, 0.0)) for p, q in pairs)
            found = float(delta_of(mu, law, eps).upper)
            assert found == pytest.approx(truth, rel=2e-7, abs=1e-13), (mu, eps)
            if 1e-10 < found < 1.0 and eps > 0.0:
                assert float(epsilon_of(mu, law, found).upper) == pytest.approx(eps, rel=1e-9)


@pytest.mark.parametrize(("n", "mu", "eps"), [(1000, 4.0, 20.0), (10, 8.0, 100.0), (10, 0.2681, 1.0), (3, 1.0, 5.0)])
def test_fixed_k_against_mpmath(n, mu, eps):
    """For a fixed K the loss increases, so the best event is a half-line.  In the first two cases phi' underflows."""
    with mpmath.workdps(40):
        cdf, shift = mpmath.ncdf, mpmath.mpf(mu)
        ratio = lambda x: (n - 1) * mpmath.log(cdf(x - shift) / cdf(x)) + shift * (x - shift / 2)
        found = []
        for side in (1, -1):
            at = mpmath.findroot(lambda x, side=side: side * ratio(x) - eps, (-20, 34), solver="anderson")
            masses = [1 - cdf(at - shift) ** n, 1 - cdf(at) ** n] if side > 0 else [cdf(at) ** n, cdf(at - shift) ** n]
            found.append(masses[0] - mpmath.exp(eps) * masses[1])
        truth = float(max(found))
    assert float(delta_of(mu, selection.PointMass(n), eps).upper) == pytest.approx(truth, rel=1e-11)


@pytest.mark.parametrize("law", LAWS, ids=repr)
def test_masses_of_intervals(law):
    """`rise` and `steepness` of each law, and the general formulas of `Law`, against the generating function."""
    x, d = np.array([0.9, 0.5, 1.0, 1.0, 0.3]), np.array([0.3, 0.5, 1e-3, 1.0, 0.1])
    value, first, second = evaluated(law, 1.0 - x)
    exact = value - evaluated(law, np.minimum(1.0 - x + d, 1.0))[0]
    np.testing.assert_allclose(law.rise(x, 1.0 - x, d), exact, rtol=1e-11, atol=2e-15)
    np.testing.assert_allclose(Law.rise(law, x[4:], 1.0 - x[4:], d[4:]), exact[4:], rtol=1e-6, atol=2e-15)
    for steep, rate in (law.steepness(x, 1.0 - x), Law.steepness(law, x, 1.0 - x)):
        seen = np.isfinite(steep) & (first > 1e-280)
        np.testing.assert_allclose(np.exp(np.where(seen, steep, 0.0)), np.where(seen, first, 1.0), rtol=1e-11)
        np.testing.assert_allclose((rate * first)[seen], second[seen], rtol=1e-11)


def test_masses_keep_their_relative_accuracy_in_both_tails():
    tiny = np.array([1e-30, 1e-200])
    for law, at_zero in (
        (selection.Geometric(0.1), 0.1),
        (selection.PointMass(1), 1.0),
        (selection.Poisson(2.0), 2 * np.exp(-2)),
    ):
        np.testing.assert_allclose(law.rise(tiny, np.ones(2), tiny), at_zero * tiny, rtol=1e-12)
        np.testing.assert_allclose(law.rise(np.ones(2), 0.0 * tiny, tiny), law.mean * tiny, rtol=1e-12)
    with mpmath.workdps(60):
        p, x, d = [0.25, 0.0, 0.5, 0.25], mpmath.mpf(0.5), mpmath.mpf(1e-12)
        exact = sum(c * (x**k - (x - d) ** k) for k, c in enumerate(p))
    assert generating.categorical_rise(np.array(p), np.array(0.5), np.array(1e-12)) == pytest.approx(
        float(exact), rel=1e-14
    )


def test_no_reach_changes_the_answer():
    mu, delta = np.array([0.01, 0.2681, 1.0, 4.0]), np.full(4, 1e-8)
    for law in LAWS:
        laws = law.flattened((4,))
        near, far = (named_bounds.crossing(named_bounds.line(laws, mu, r), delta) for r in (13.0, 37.5))
        np.testing.assert_allclose(near, far, rtol=1e-9, atol=1e-12)


def test_alone_and_among_many():
    rng = np.random.default_rng(1)
    mu, delta = 10.0 ** rng.uniform(-2, 0.7, 600), 10.0 ** rng.uniform(-12, -2, 600)
    law = selection.TruncatedNegativeBinomial(rng.uniform(-0.9, 3.0, 600), 10.0 ** rng.uniform(-4, -0.1, 600))
    many = epsilon_of(mu, law, delta)
    for i in range(0, 600, 37):
        one = epsilon_of(mu[i], law.element((i,)), delta[i])
        assert one.status == many.status[i] and float(one.upper) == pytest.approx(many.upper[i], rel=1e-12, abs=1e-12)


def test_the_best_of_one_is_the_base():
    mu = np.array([0.1, 1.0, 5.0])
    found = ja.epsilon(selection.select(ja.Gaussian(1 / mu), selection.PointMass(1), bound="monotone_score"), 1e-6)
    np.testing.assert_allclose(found.upper, ja.epsilon(ja.Gaussian(1 / mu), 1e-6).upper, rtol=1e-9)


def test_eps_beyond_the_largest_is_not_understated():
    """The best of 1000 draws at mu = 4: l leaves float64 at small x; the old code left these x out and gave 589."""
    assert float(epsilon_of(4.0, selection.PointMass(1000), 0.01).upper) > 700.0
