"""The envelope of Gaussian bases at once: never below the exact worst case, near the row-by-row envelope."""

import mpmath
import numpy as np
import pytest
from scipy.special import ndtr

import jaxacct as ja
from jaxacct import selection
from jaxacct.mechanisms.base import element
from jaxacct.selection import envelope

LAWS = [
    selection.Geometric(0.1),
    selection.TruncatedNegativeBinomial(2.5, 0.01),
    selection.Logarithmic(0.01),
    selection.Poisson(10.0),
    selection.Binomial(20, 0.5),
    selection.PointMass(5),
    selection.TwoPoint(1, 12, 0.3),
]
SIGMAS = np.array([0.7, 2.0, 7.0, 20.0])


@pytest.mark.parametrize("law", LAWS, ids=repr)
def test_it_is_near_the_envelope_of_polygons(law, monkeypatch):
    found = {}
    for which in ("fast", "slow"):
        if which == "slow":
            monkeypatch.setattr(envelope, "gaussian_mu", lambda run: None)
        found[which] = selection.bound_epsilon(ja.Gaussian(SIGMAS), law, 1e-6, bound="envelope").upper
    assert np.all(found["fast"] <= found["slow"] * (1 + 1e-4)) and np.all(found["fast"] >= found["slow"] * (1 - 3e-4))


@pytest.mark.parametrize("law", LAWS, ids=repr)
def test_it_is_no_less_than_the_exact_worst_case(law):
    for sigma in (0.7, 5.0):
        exact = ja.epsilon(selection.select(ja.Gaussian(sigma), law), 1e-5)
        assert selection.bound_epsilon(ja.Gaussian(sigma), law, 1e-5, bound="envelope").upper >= exact.lower


@pytest.mark.parametrize("law", LAWS, ids=repr)
def test_lines_lie_above_the_function(law):
    mu = np.array([0.05, 0.5, 2.0])[:, None]
    laws = law.flattened((3,)).taken((slice(None), None))
    x = np.linspace(-7.0, 9.0, 41) * np.ones((3, 1))
    fine = np.linspace(-9.0, 11.0, 20001)
    gain, cost = laws.slopes(ndtr(fine - mu))[0], laws.slopes(ndtr(fine) * np.ones((3, 1)))[0]
    for least in (-np.inf, -1.0):
        with np.errstate(all="ignore"):
            lines = envelope.cells(mu, laws, x).lines(np.full(3, least))
        for r in np.exp([-1.0, -0.1, 0.0, 0.1, 1.0, 3.0]):
            true = np.max(r * gain - cost, axis=1)
            assert np.all(np.max(r * lines.gain - lines.cost, axis=1) >= true - 1e-14 * np.max(r * gain))


def test_a_row_has_the_same_bits_alone_and_in_a_batch():
    run = ja.Gaussian(np.linspace(0.7, 8.0, 70))
    for ask in (selection.bound_epsilon, selection.bound_delta):
        value = 1e-5 if ask is selection.bound_epsilon else 1.0
        whole = ask(run, selection.Poisson(10.0), value, bound="envelope").upper
        for i in (0, 33, 69):
            alone = ask(element(run, (i,)), selection.Poisson(10.0), value, bound="envelope").upper
            assert float(alone) == whole[i]


def test_the_risen_mass_is_a_lower_bound_at_the_float_end_of_a_cell():
    # near y = 1 floats are 1e-16 apart, which a steep likelihood ratio makes 1e-3 of B and more
    x = np.linspace(6.5, 8.4, 60)[None, :]
    for mu in (9.0, 12.5, 20.0):
        _, above, _ = envelope._risen(np.array([[mu]]), x, ndtr(x))
        for y, low in zip(ndtr(x)[0], above[0], strict=True):
            with mpmath.workdps(60):
                exact = mpmath.ncdf(_quantile(mpmath.mpf(float(y))) - mu) if y < 1.0 else mpmath.mpf(1)
                assert mpmath.mpf(float(low)) <= exact


def _quantile(y):
    """The standard normal quantile of y near 1, by Newton's method."""
    x = mpmath.mpf(6)  # from below: the function is concave
    for _ in range(40):
        x -= (mpmath.ncdf(x) - y) / mpmath.npdf(x)
    return x
