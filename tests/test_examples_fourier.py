"""The figures of Zhu, Dong and Wang 2022 run with tiny settings, and their numbers are in the right order."""

import importlib
import pathlib
import sys

import numpy as np
import pytest
from scipy.special import ndtr
from scipy.stats import binom

import jaxacct as ja
from jaxacct.representations import renyi_divergence

FOLDER = pathlib.Path(__file__).parents[1] / "examples" / "zhu_dong_wang_2022"


def gaussian_delta(mu, eps):
    """H_{e^eps}(N(mu, 1) || N(0, 1)) for every real eps."""
    return ndtr(mu / 2 - eps / mu) - np.exp(eps) * ndtr(-mu / 2 - eps / mu)


@pytest.fixture
def figure(monkeypatch, tmp_path, capsys):
    """A function that runs a script as a user would, in this process, and returns the columns that were drawn."""
    monkeypatch.syspath_prepend(str(FOLDER))

    def run(name):
        pytest.importorskip("matplotlib")
        module = importlib.import_module(name)
        out = tmp_path / f"{name}.png"
        found = {}

        def once(small):
            found.update(module_numbers(small))
            return found

        module_numbers = module.numbers
        monkeypatch.setattr(sys, "argv", [name, "--small", "--out", str(out)])
        importlib.import_module("drawing").run(module.__doc__, once, "x", "y")
        assert out.read_bytes().startswith(b"\x89PNG") and len(capsys.readouterr().out.splitlines()) > 2
        return found

    return run


def test_figure1(figure):
    c = figure("figure1")
    assert (c["Renyi to f"] <= np.minimum(c["Gaussian"], c["randomised response"]) + 1e-9).all()
    # the curves touch, and the Rényi divergence of randomised response is at most its order
    assert np.max(c["Renyi to f"] / c["randomised response"]) == pytest.approx(1.0, abs=1e-6)
    orders = np.geomspace(0.5, 50.0, 40)
    assert (renyi_divergence(ja.PureDP(2 * np.arccosh(np.exp(0.25))), orders).lower <= orders).all()
    assert (c["Renyi to (eps, delta) to f"] <= c["Renyi to f"] + 5e-3).all()
    np.testing.assert_allclose(c["response by its profile"], c["randomised response"], atol=2e-3)


def test_figure3a(figure):
    c = figure("figure3a")
    np.testing.assert_allclose(c["Fourier"], c["exact (certified)"], rtol=1e-6)
    np.testing.assert_allclose(gaussian_delta(np.sqrt(c["compositions"]) / 20, c["exact (certified)"]), 1e-5, rtol=1e-6)
    assert (c["Renyi"] > c["exact (certified)"]).all()


def test_figure3b(figure):
    """The losses of the responses are binomial, so that the profile is a mixture of Gaussian ones."""
    c = figure("figure3b")
    np.testing.assert_allclose(c["Fourier"], c["exact (certified)"], rtol=1e-6)
    for k, eps in zip(c["k"], c["exact (certified)"], strict=True):
        right = np.arange(k + 1)
        left = eps - (2 * right - k) * np.log(0.52 / 0.48)
        assert binom.pmf(right, k, 0.52) @ gaussian_delta(np.sqrt(k) / 5, left) == pytest.approx(1e-6, rel=1e-6)
    assert (c["Renyi"] > c["exact (certified)"]).all()


def test_figure3c(figure):
    c = figure("figure3c")
    assert (c["Riemann lower"] <= c["double quadrature"]).all() and (c["double quadrature"] <= c["Riemann upper"]).all()
    np.testing.assert_allclose(c["double quadrature"], c["exact (certified)"], rtol=2e-3, atol=1e-11)
    assert (c["Renyi"] > c["exact (certified)"]).all()


def test_figure4a(figure):
    c = figure("figure4a")
    assert (c["H(mixture || Q)"] >= c["H(P || mixture)"] - 1e-12)[c["alpha"] > 1].all()
    assert (c["H(mixture || Q)"] <= c["H(P || mixture)"] + 1e-12)[c["alpha"] < 1].all()
    above = c["alpha"] > 1.0  # H_alpha(mixture || Q) = q H_{1 + (alpha - 1)/q}(P || Q): sigma = 0.5, q = 0.3
    moved = np.log1p((c["alpha"][above] - 1.0) / 0.3)
    np.testing.assert_allclose(c["H(mixture || Q)"][above], 0.3 * gaussian_delta(2.0, moved), rtol=1e-9)


def test_example15(figure):
    c = figure("example15")
    assert c["mode 1"][0] > c["mode 2"][0] and c["mode 1"][-1] < 1e-12 and c["mode 2"][-1] == pytest.approx(0.005)
