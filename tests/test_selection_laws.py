"""Laws of K against mpmath: generating functions, probabilities, tails and quantiles over their whole range."""

import random

import jax
import mpmath
import numpy as np
import pytest
from helpers import refusal

from jaxacct.selection import (
    Binomial,
    Categorical,
    Geometric,
    Logarithmic,
    PointMass,
    Poisson,
    TruncatedNegativeBinomial,
    TwoPoint,
)
from jaxacct.selection.law_of_k import evaluated

ETAS = [-1 + 1e-9, -0.5, -1e-12, 0.0, 1e-300, 1e-15, 1e-9, 1e-4, 0.5, 1.0, 3.0, 1000.0]
GAMMAS = [1e-9, 1e-4, 0.1, 0.5, 1 - 1e-9]
YS = np.array([0.0, 1e-18, 1e-9, 1e-3, 0.3, 0.9, 1 - 1e-9])
LAWS = [
    TruncatedNegativeBinomial(0.5, 0.05),
    TruncatedNegativeBinomial(-0.5, 0.05),
    Geometric(0.1),
    Logarithmic(0.01),
    Poisson(3.0),
    Poisson(0.2),
    Binomial(20, 0.5),
    Binomial(1, 1.0),
    PointMass(7),
    Categorical([0.25, 0.0, 0.5, 0.25]),
    TwoPoint(1, 30, 0.1),
]


def evaluate(law, y, plain=False):
    if plain:
        return evaluated(law, y)
    with jax.enable_x64():
        return [np.asarray(x) for x in jax.jit(lambda law, y: law.generating(y))(law, y)]


@pytest.mark.parametrize("plain", [False, True], ids=["xla", "numpy"])
@pytest.mark.parametrize("eta", ETAS)
def test_truncated_negative_binomial_generating_function(eta, plain):
    law = TruncatedNegativeBinomial(eta, np.array(GAMMAS)[:, None])
    values = evaluate(law, YS, plain)
    with mpmath.workdps(400):
        for i, gamma in enumerate(GAMMAS):
            g, n = mpmath.mpf(gamma), mpmath.mpf(eta)
            for j, y in enumerate(YS):
                base = g + (1 - g) * mpmath.mpf(y)
                if eta == 0:
                    value, scale = mpmath.log(base) / mpmath.log(g), 1 / mpmath.log(1 / g)
                else:
                    value, scale = (base**-n - 1) / (g**-n - 1), n / (g**-n - 1)
                first = scale * (1 - g) * base ** (-n - 1)
                exact = (value, first, first * (n + 1) * (1 - g) / base)
                for got, truth in zip(values, exact, strict=True):
                    assert abs(got[i, j] - truth) <= 2e-13 * truth + 1e-280


@pytest.mark.parametrize("plain", [False, True], ids=["xla", "numpy"])
@pytest.mark.parametrize("law", LAWS, ids=repr)
def test_generating_function_is_the_sum_over_the_probabilities(law, plain):
    k = np.arange(3000)
    p = law.probability(k)
    y = np.array([0.0, 1e-3, 0.3, 1.0])
    x = 1.0 - y[:, None]
    powers = [x**k, k * x ** np.maximum(k - 1, 0), k * (k - 1) * x ** np.maximum(k - 2, 0)]
    values = evaluate(law, y, plain)
    for got, power in zip(values, powers, strict=True):
        np.testing.assert_allclose(got, np.sum(p * power, axis=1), rtol=1e-9, atol=1e-13)
    if plain:
        with np.errstate(all="ignore"):
            slopes = law.slopes(y)
        np.testing.assert_allclose(slopes, values[1:], rtol=1e-15)
    assert law.mean == pytest.approx(np.sum(k * p), rel=1e-9)
    np.testing.assert_allclose(law.survival(k[:500]), np.cumsum(p[::-1])[::-1][1:501], rtol=1e-8, atol=1e-14)


@pytest.mark.parametrize("law", LAWS, ids=repr)
def test_quantiles_invert_the_cumulative_sum(law):
    levels = np.array([0.0, 1e-6, 0.1, 0.5, 0.9, 0.999])
    cumulative = np.cumsum(law.probability(np.arange(5000)))
    np.testing.assert_array_equal(law.quantile(levels), np.searchsorted(cumulative, levels - 1e-12))


@pytest.mark.parametrize("eta", [-0.9, -0.5, 0.0, 1e-9, 0.5, 1.0, 4.0])
@pytest.mark.parametrize("gamma", [1e-9, 1e-3, 0.7])
def test_tails_and_probabilities_at_any_size(eta, gamma):
    law = TruncatedNegativeBinomial(eta, gamma)
    with mpmath.workdps(35):
        n, g = mpmath.mpf(eta), mpmath.mpf(gamma)
        scale = -1 / mpmath.log(g) if eta == 0 else n / (g**-n - 1)
        for k in (1, 7, 1000):
            mass = scale * (1 - g) ** k / k * mpmath.rf(n + 1, k - 1) / mpmath.factorial(k - 1)
            integral = g**-n * mpmath.hyp2f1(1 - n, k + 1, k + 2, 1 - g) / (k + 1)
            tail = scale * (1 - g) ** (k + 1) * mpmath.rf(n + 1, k) / mpmath.factorial(k) * integral
            assert float(law.probability(k)) == pytest.approx(float(mass), rel=1e-11, abs=1e-300)
            assert float(law.survival(k)) == pytest.approx(float(tail), rel=1e-11, abs=1e-300)
    many = float(law.quantile(0.5))
    assert float(law.survival(many)) <= 0.5 < float(law.survival(many - 1)) or many == 1


def test_named_laws():
    assert Geometric(0.25) == TruncatedNegativeBinomial(1.0, 0.25) and Logarithmic(0.5).eta == 0.0
    np.testing.assert_allclose(Geometric(0.25).probability([1, 2, 3]), [0.25, 0.1875, 0.140625])
    assert float(Geometric(1e-9).quantile(0.5)) == pytest.approx(np.log(0.5) / np.log1p(-1e-9), rel=1e-6)
    assert TwoPoint(1, 3, 0.25) == Categorical([0.0, 0.25, 0.0, 0.75])


def test_batches():
    law = TruncatedNegativeBinomial(eta=[[1.0], [0.0]], gamma=[0.1, 0.2, 0.5])
    assert law.shape == (2, 3) and law.mean.shape == (2, 3) and law.quantile(0.5).shape == (2, 3)
    assert law.element((1, 2)) == Logarithmic(0.5)
    values = evaluate(law, 0.25)[0]
    for place in ((0, 1), (1, 2)):
        np.testing.assert_allclose(
            values[place], evaluate(law.element(place), np.asarray(0.25), plain=True)[0], rtol=1e-14
        )
    pair = Categorical([[0.5, 0.5], [0.1, 0.9]])
    assert pair.shape == (2,) and evaluate(pair, 0.5)[0] == pytest.approx([0.75, 0.55])
    np.testing.assert_allclose(pair.probability(1), [0.5, 0.9])
    with jax.enable_x64():
        stacked = jax.vmap(lambda law: law.generating(0.5)[0])(Poisson([1.0, 2.0]))
    np.testing.assert_allclose(stacked, np.exp([-0.5, -1.0]), rtol=1e-12)


def test_generating_functions_without_implicit_promotion():
    with jax.enable_x64(), jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        for law in (LAWS[0], Poisson(3.0), Binomial(20, 0.5), PointMass(7), TwoPoint(1, 30, 0.1)):
            leaves, structure = jax.tree.flatten(law)
            law = jax.tree.unflatten(structure, [np.asarray(leaf) for leaf in leaves])
            value, *_ = jax.eval_shape(lambda law, y: law.generating(y), law, np.asarray(0.25))
            assert value.dtype == np.float64 and value.shape == ()
    assert Poisson(1.0).generating(jax.numpy.asarray(0.25))[0].dtype == np.float32  # JAX's default, without x64
    assert isinstance(Poisson(1.0).generating(0.25)[0], np.float64)  # a Python float gives a NumPy number


def test_pytrees():
    for law in LAWS:
        leaves, structure = jax.tree_util.tree_flatten(law)
        again = jax.tree_util.tree_unflatten(structure, leaves)
        assert again == law and hash(again) == hash(law) and law != PointMass(8)


def test_samples_follow_the_law():
    rng = random.Random(1)
    for law in (Logarithmic(0.1), Poisson(2.0), PointMass(5), TwoPoint(1, 3, 0.25)):
        drawn = np.array([law.sample(rng) for _ in range(200)])
        top = int(law.quantile(0.99))
        counts = np.bincount(drawn, minlength=top + 1)[: top + 1]
        expected = 200 * law.probability(np.arange(top + 1))
        assert np.all(np.abs(counts - expected) <= 5 * np.sqrt(expected) + 1e-9)
    assert isinstance(Geometric(0.5).sample(), int)


def test_refusals():
    assert "eta[1] = -1.0 must be > -1" in refusal(TruncatedNegativeBinomial, [0.0, -1.0], 0.5)
    assert "gamma = 1.0 must be > 0 and < 1" in refusal(Geometric, 1.0)
    assert "sum of probabilities[1] = 0.9 must be 1" in refusal(Categorical, [[0.5, 0.5], [0.5, 0.4]])
    assert "must be 1" in refusal(Categorical, 1.0)
    assert "do not broadcast" in refusal(Binomial, [1, 2], [0.1, 0.2, 0.3])
    assert "repetitions = 1.5" in refusal(PointMass, 1.5)
    assert "few = 3" in refusal(TwoPoint, 3, 3, 0.5)
    assert "sample one law" in refusal(Poisson([1.0, 2.0]).sample)
    assert "random.Random" in refusal(Poisson(1.0).sample, np.random.default_rng(0))
    assert "larger gamma" in refusal(Geometric(1e-17).quantile, 0.5)
