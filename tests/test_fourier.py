"""The Fourier accountant of Zhu, Dong and Wang 2022 against our certified engines."""

import pathlib
import sys

import numpy as np
import pytest
from helpers import doctests_of, refusal
from scipy.stats import norm

import jaxacct as ja

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "examples" / "zhu_dong_wang_2022"))
import fourier_accountant
from fourier_accountant import fourier_delta, riemann_delta

sys.path.pop(0)


def test_doctests():
    assert doctests_of(fourier_accountant) > 0


@pytest.mark.parametrize("sigma", [0.5, 2.0, 30.0])
def test_gaussian_in_closed_form(sigma):
    eps = np.array([0.0, 0.5, 2.0])
    found = fourier_delta(ja.Gaussian(sigma), eps, method="analytical")
    truth = norm.cdf(0.5 / sigma - eps * sigma) - np.exp(eps) * norm.cdf(-0.5 / sigma - eps * sigma)
    np.testing.assert_allclose(found.estimate, truth, atol=1e-12)
    assert (found.kind == "estimate").all() and found.ok.all()


def test_double_quadrature_agrees_with_the_contour():
    run = ja.dp_sgd(1.0, 0.05, 300)
    exact = ja.delta(run, 1.0)
    found = fourier_delta(run, 1.0)
    assert found.estimate == pytest.approx(exact.estimate, abs=1e-8) and found.ok
    assert exact.kind == "certified" and found.kind == "estimate"


def test_heterogeneous_with_mass_at_infinity():
    mechanism = ja.compose(ja.Gaussian(1.0), ja.ApproximateDP(0.3, 0.01), ja.Laplace(2.0))
    exact = ja.delta(mechanism, 0.7)
    found = fourier_delta(mechanism, 0.7, method="analytical")
    assert found.estimate == pytest.approx(exact.estimate, abs=1e-6)


def test_atoms_are_reported():
    assert fourier_delta(ja.PureDP(1.0), 0.5, method="analytical").status == "width"


@pytest.mark.parametrize("direction", ["remove", pytest.param("add", marks=pytest.mark.slow)])
def test_riemann_sums_bracket_and_narrow(direction):
    exact = ja.delta(ja.dp_sgd(1.0, 0.05, 300), 1.0, relation=f"{direction}_one")
    wide, narrow = (riemann_delta(1.0, 0.05, 300, 1.0, direction=direction, cells=c) for c in (500, 2500))
    for found in (wide, narrow):
        assert found.lower <= exact.lower and exact.upper <= found.upper
    assert narrow.upper - narrow.lower < 0.25 * (wide.upper - wide.lower)


def test_refusals():
    assert "needs unsampled parts" in refusal(fourier_delta, ja.dp_sgd(1.0, 0.1, 10), 1.0, method="analytical")
    assert "one configuration" in refusal(fourier_delta, ja.Gaussian([1.0, 2.0]), 1.0)
    assert "method = 'fft'" in refusal(fourier_delta, ja.Gaussian(1.0), 1.0, method="fft")
    assert "cells" in refusal(riemann_delta, 1.0, 0.1, 10, 1.0, cells=10)
