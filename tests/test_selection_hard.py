"""Selections whose worst order is hard to find: large or fixed K, weak bases, small delta.  Old brackets were wide."""

import numpy as np
import pytest
from scipy.special import ndtr

import jaxacct as ja
from jaxacct import selection
from jaxacct.selection.worst_case import bracket

DELTAS = 10.0 ** -np.array([3.0, 5.0, 6.0, 8.0])
GEOMETRIC = lambda gamma: lambda x: gamma / (1.0 - (1.0 - gamma) * x) ** 2
HARD = [
    (selection.Poisson(14.2), lambda x: 14.2 * np.exp(14.2 * (x - 1.0)), 6.0 / np.sqrt(2.0)),
    pytest.param(selection.Poisson(30.0), lambda x: 30.0 * np.exp(30.0 * (x - 1.0)), 40.0, marks=pytest.mark.slow),
    pytest.param(selection.Poisson(100.0), lambda x: 100.0 * np.exp(100.0 * (x - 1.0)), 10.0, marks=pytest.mark.slow),
    pytest.param(selection.PointMass(2), lambda x: 2.0 * x, 4.0, marks=pytest.mark.slow),
    pytest.param(selection.PointMass(5), lambda x: 5.0 * x**4, 4.0, marks=pytest.mark.slow),
    pytest.param(selection.PointMass(20), lambda x: 20.0 * x**19, 10.0, marks=pytest.mark.slow),
    pytest.param(selection.Geometric(0.001), GEOMETRIC(0.001), 10.0, marks=pytest.mark.slow),
]


def leak(first, mu, ratio, rows=3000):
    """`int max_w (L(u) phi'(T(w) - T(u)) - E phi'(w - u))_+ du` of a Gaussian, by plain sums over its quantiles."""
    z = np.linspace(-8.5, 8.5, rows + 1)
    q, p = ndtr(z), ndtr(z + mu)
    slope_one = np.searchsorted(z, -0.5 * mu)
    middle = 0.5 * (z[1:] + z[:-1])
    total, cost_of = 0.0, np.diff(q)
    for k in range(slope_one):
        x, t = p[k + 1 :] - ndtr(middle[k] + mu), q[k + 1 :] - ndtr(middle[k])
        value = np.diff(p)[k] * first(np.maximum(x, 0.0)) - ratio * cost_of[k] * first(np.maximum(t, 0.0))
        total += max(np.max(value), 0.0)
    return total


@pytest.mark.parametrize(("law", "first", "sigma"), HARD, ids=lambda x: str(x) if isinstance(x, selection.Law) else "")
def test_brackets_are_narrow_and_around_plain_sums(law, first, sigma):
    low, high = bracket("epsilon", ja.Gaussian(sigma), law, DELTAS, "add_or_remove_one")
    assert np.all(high - low <= 2e-4 * np.maximum(high, 1.0)), (low, high)
    assert np.all(low > 0.0)
    for k in (1, 2):  # sums over 3,000 rows are within 4e-3 of the integral
        near = 2e-4 * max(high[k], 1.0)
        assert leak(first, 1.0 / sigma, np.exp(low[k] - near)) > DELTAS[k] * (1.0 - 4e-3)
        assert leak(first, 1.0 / sigma, np.exp(high[k] + near)) < DELTAS[k] * (1.0 + 4e-3)


@pytest.mark.parametrize(
    ("law", "sigma", "eps"), [(selection.Poisson(15.0), 4.0, 3.0), (selection.Geometric(0.01), 10.0, 0.9)]
)
def test_delta_far_in_the_tail_is_no_larger_than_the_envelope(law, sigma, eps):
    found = ja.delta(selection.select(ja.Gaussian(sigma), law), eps)
    cheap = selection.bound_delta(ja.Gaussian(sigma), law, eps, bound="envelope")
    assert 0.0 < found.lower <= found.upper <= cheap.upper * (1.0 + 1e-3)
    assert found.upper <= 1.02 * found.lower
