"""Sparse vector, propose-test-release, sampling without replacement, Gaussian sums with random counts."""

import itertools
import math

import numpy as np
import pytest
import scipy.special
from dp_accounting.pld import privacy_loss_distribution
from helpers import refusal

import jaxacct as ja
from jaxacct.mechanisms import components


def hockey_stick(p, q, eps):
    return math.fsum(max(a - math.exp(eps) * b, 0.0) for a, b in zip(p, q, strict=True))


# Sparse vector


@pytest.mark.parametrize(("monotone", "relation", "factor"), [
    (False, "add_or_remove_one", 0.25 + 2 * 3 / 16), (True, "add_or_remove_one", 0.25 + 3 / 16),
    (True, "replace_one", 2 * (0.25 + 2 * 3 / 16)),
])  # fmt: skip
def test_above_threshold_is_pure_dp(monotone, relation, factor):
    sparse = ja.AboveThreshold(4.0, 16.0, answers=3, monotone=monotone)
    assert ja.epsilon(sparse, 0.0, relation=relation).upper == pytest.approx(factor, rel=1e-12)
    ten, same = (ja.delta(ja.repeat(m, 10), 3.0, relation=relation) for m in (sparse, ja.PureDP(factor)))
    assert ten.upper == pytest.approx(same.upper, rel=1e-9) and ten.kind == "bound"


def test_above_threshold_bounds_a_simulated_law_in_closed_form():
    """One query at distance 0 and one at 1 from the threshold: Pr[above] by the law of Lap - Lap."""
    b, c = 2.0, 5.0  # threshold and query scales; X = query noise - threshold noise

    def above(x):  # Pr[X > x] for x >= 0, by partial fractions of the two scales
        return (c**2 * math.exp(-x / c) - b**2 * math.exp(-x / b)) / (2 * (c**2 - b**2))

    here, there = above(1.0), above(0.0)
    for eps in (0.0, 0.2, 0.5):
        truth = max(there - math.exp(eps) * here, (1 - here) - math.exp(eps) * (1 - there), 0.0)
        assert ja.delta(ja.AboveThreshold(b, c), eps).upper >= truth


def test_numeric_sparse_composes_finding_and_values():
    sparse = ja.NumericSparse(10.0, 80.0, 40.0, answers=4)
    same = ja.compose(ja.AboveThreshold(10.0, 80.0, 4), ja.repeat(ja.Laplace(40.0), 4))
    one, two = (components(m, "replace_one", "remove") for m in (sparse, same))
    assert all(np.array_equal(a, b) for a, b in zip(one, two, strict=True))
    assert ja.epsilon(sparse, 0.0).upper == pytest.approx(0.1 + 0.1 + 0.1, rel=1e-12)
    assert ja.epsilon(sparse, 0.0).kind == "bound"
    sampled = ja.epsilon(ja.PoissonSampled(sparse, 0.1), 0.0)
    assert sampled.kind == "bound" and sampled.upper == pytest.approx(np.log1p(0.1 * np.expm1(0.3)), rel=1e-9)
    assert "monotone = 1" in refusal(ja.NumericSparse, 1.0, 1.0, 1.0, 1, 1)


# Propose-test-release


def test_propose_test_release_by_its_parts():
    guarded = ja.ProposeTestRelease(ja.PureDP(0.5), test_scale=[2.0, 4.0], threshold=40.0)
    assert ja.epsilon(guarded, 1e-6).upper[1] == np.inf
    lost = 0.5 * math.exp(-20.0)
    base = ja.delta(ja.compose(ja.PureDP(0.5), ja.Laplace(2.0)), 0.6)
    bounds = ja.delta(guarded, 0.6)
    assert bounds.upper[0] == pytest.approx(lost + (1 - lost) * base.upper, rel=1e-6)
    assert bounds.kind[0] == "bound"
    moved = ja.delta(ja.ProposeTestRelease(ja.Laplace(4.0), 2.0, 40.0), 0.6, relation="replace_one")
    base = ja.delta(ja.compose(ja.Laplace(2.0), ja.Laplace(2.0)), 0.6)  # the distance still moves by 1
    assert moved.upper == pytest.approx(lost + (1 - lost) * base.upper, rel=1e-6)


# Sampling without replacement


def test_without_replacement_under_add_and_remove_is_the_sampled_replacement_pair():
    fixed = ja.repeat(ja.SampledWithoutReplacement(ja.Laplace(3.0), 0.2), 20)
    same = ja.repeat(ja.PoissonSampled(ja.Laplace(1.5), 0.2), 20)
    for relation in ("remove_one", "add_one"):
        assert ja.epsilon(fixed, 1e-5, relation=relation).upper == ja.epsilon(same, 1e-5, relation=relation).upper


@pytest.mark.parametrize("ratio", [0.0, 0.3, 1.0])
@pytest.mark.parametrize(
    ("p", "q"), [([0.5, 0.3, 0.2], [0.2, 0.35, 0.45]), ([0.4, 0.5, 0.1, 0.0], [0.3, 0.5, 0.0, 0.2])]
)
def test_replace_one_without_replacement_is_piecewise(p, q, ratio):
    fixed = ja.SampledWithoutReplacement(ja.FiniteOutput(p, q), ratio)
    to_q = [(1 - ratio) * b + ratio * a for a, b in zip(p, q, strict=True)]
    to_p = [(1 - ratio) * a + ratio * b for a, b in zip(p, q, strict=True)]
    for eps in (0.0, 0.1, 0.4):
        truth = max(hockey_stick(to_q, q, eps), hockey_stick(to_p, p, eps))
        bounds = ja.delta(fixed, eps, relation="replace_one")
        assert bounds.lower <= truth + 1e-15 and bounds.upper >= truth * (1 - 1e-12)
        assert bounds.upper == pytest.approx(truth, rel=1e-6, abs=1e-15)


def test_replace_one_without_replacement_dominates_an_enumerated_run():
    """Each of two rounds draws one of three binary records for randomised response; one of the three is replaced."""
    p, q = np.array([0.8, 0.2]), np.array([0.2, 0.8])
    others = [np.array([0.8, 0.2]), np.array([0.2, 0.8])]
    first, second = ((x + sum(others)) / 3 for x in (p, q))
    fixed = ja.repeat(ja.SampledWithoutReplacement(ja.RandomizedResponse(0.8), 1 / 3), 2)
    one, two = ([math.prod(o) for o in itertools.product(law, repeat=2)] for law in (first, second))
    for eps in (0.0, 0.1, 0.3):
        truth = max(hockey_stick(one, two, eps), hockey_stick(two, one, eps))
        assert ja.delta(fixed, eps, relation="replace_one").upper >= truth


@pytest.mark.parametrize("ratio", [0.01, 0.4])
def test_replace_one_without_replacement_of_continuous_noise_is_piecewise(ratio):
    """delta(eps) = g delta_base(log(1 + (e^eps - 1)/g)), alike in both directions, with delta_base in closed form."""
    eps = np.array([0.0, 0.01, 0.1, 0.3])
    moved = np.log1p(np.expm1(eps) / ratio)
    a, b = moved * 3 / 2 - 1 / 3, moved * 3 / 2 + 1 / 3  # noise 3, sensitivity 2
    gaussian = scipy.special.ndtr(-a) - np.exp(moved) * scipy.special.ndtr(-b)
    laplace = np.maximum(-np.expm1(0.5 * (moved - 2 / 3)), 0.0)
    for base, truth in ((ja.Gaussian(3.0), gaussian), (ja.Laplace(3.0), laplace)):
        got = ja.delta(ja.SampledWithoutReplacement(base, ratio), eps, relation="replace_one")
        assert got.kind[0] == "bound" and np.all(got.upper >= ratio * truth * (1 - 1e-12))
        np.testing.assert_allclose(got.upper, ratio * truth, rtol=2e-4, atol=1e-6 * ratio)
        assert ja.delta(ja.SampledWithoutReplacement(base, ratio), 0.1).kind == "certified"


def test_replace_one_without_replacement_of_a_gaussian_dominates_its_bins():
    """The bin of an output is a post-processing of it. So the epsilon of the Gaussian is at least that of its bins."""
    edges = np.linspace(-9.0, 10.0, 600)
    q, p = (np.diff(scipy.special.ndtr(np.concatenate([[-np.inf], edges - m, [np.inf]]))) for m in (0.0, 1.0))
    runs = (ja.FiniteOutput(p / p.sum(), q / q.sum()), ja.Gaussian(2.0))
    bins, whole = (ja.repeat(ja.SampledWithoutReplacement(base, 0.1), 100) for base in runs)
    low, high = (ja.epsilon(m, 1e-5, relation="replace_one", rtol=1e-3) for m in (bins, whole))
    assert low.lower <= high.upper <= low.upper * (1 + 2e-3) and high.kind == "bound"
    assert ja.profile(whole, relation="replace_one").delta(1.0).kind == "bound"


def test_without_replacement_refusals():
    mixture = ja.SampledWithoutReplacement(ja.MixtureOfGaussians(1.0, [1.0], [1.0]), 0.5)
    assert "replace_one" in refusal(ja.epsilon, mixture, 1e-5, relation="replace_one")
    assert ja.epsilon(ja.SampledWithoutReplacement(ja.Gaussian(1.0), 1.0), 1e-5, relation="replace_one").ok
    assert "sampling_ratio = 1.5" in refusal(ja.SampledWithoutReplacement, ja.Gaussian(1.0), 1.5)


# Gaussian sums with random counts


def test_mixture_of_one_is_the_gaussian():
    mixture = ja.MixtureOfGaussians(2.0, [1.0], [1.0])
    for eps in (0.0, 0.5, 2.0):
        truth = ja.delta(ja.Gaussian(2.0), eps).upper
        bounds = ja.delta(mixture, eps)
        assert bounds.upper >= truth * (1 - 1e-12) and bounds.upper == pytest.approx(truth, rel=1e-9)
        assert bounds.kind == "certified"


@pytest.mark.parametrize("relation", ["remove_one", "add_one"])
def test_mixture_with_nothing_is_poisson_sampling(relation):
    mixture = ja.repeat(ja.MixtureOfGaussians(1.5, [0.0, 1.0], [0.9, 0.1]), 50)
    same = ja.repeat(ja.PoissonSampled(ja.Gaussian(1.5), 0.1), 50)
    truth, bounds = (ja.epsilon(m, 1e-6, relation=relation, rtol=1e-3) for m in (same, mixture))
    assert truth.upper * (1 - 1e-6) <= bounds.upper <= truth.upper * (1 + 1e-3)


@pytest.mark.slow
def test_group_mixture_against_dp_accounting():
    sensitivities, probabilities = [0.0, 1.0, 2.0, 3.0], [0.729, 0.243, 0.027, 0.001]
    peer = privacy_loss_distribution.from_mixture_gaussian_mechanism(4.0, sensitivities, probabilities)
    truth = peer.self_compose(30).get_epsilon_for_delta(1e-5)  # an upper bound, good to about 1e-4
    run = ja.repeat(ja.MixtureOfGaussians(4.0, sensitivities, probabilities), 30)
    assert ja.epsilon(run, 1e-5, rtol=1e-3).upper == pytest.approx(truth, rel=1e-3)


def test_mixture_edges_and_refusals():
    batch = ja.MixtureOfGaussians([1.0, 2.0], [[0.0, 0.0], [0.0, 1.0]], [0.5, 0.5])
    bounds = ja.delta(batch, 0.1)
    assert bounds.upper[0] == 0.0 and bounds.upper[1] > 0.0
    bounded = ja.epsilon(batch, 1e-200, relation="add_one").upper  # at most -log(1/2)
    assert bounded[1] <= math.log(2) * (1 + 1e-12)
    assert "sum of probabilities = 0.9" in refusal(ja.MixtureOfGaussians, 1.0, [0.0, 1.0], [0.5, 0.4])
    assert "same number" in refusal(ja.MixtureOfGaussians, 1.0, [0.0, 1.0], [1.0])
    assert "replace_one" in refusal(ja.epsilon, batch, 1e-5, relation="replace_one")


def test_empty_batches_and_gradients():
    empty = [
        ja.DiscreteGaussian([]), ja.GaussianNoisyMax([], 3), ja.MixtureOfGaussians([], [0, 1], [0.5, 0.5]),
        ja.PrivacyProfile(np.zeros((0, 1)), [0.1]), ja.FiniteOutput(np.zeros((0, 2)), [0.5, 0.5]),
        ja.repeat(ja.PureDP(1.0), []), ja.PoissonSampled(ja.repeat(ja.Gaussian([]), 2), 0.1),
    ]  # fmt: skip
    assert all(ja.delta(mechanism, 1.0).shape == (0,) for mechanism in empty)
    vectors = ja.compose(ja.Gaussian(1.0), ja.repeat(ja.FiniteOutput([0.5, 0.5], [0.3, 0.7]), 2))
    assert "this mechanism holds vectors" in refusal(ja.epsilon_gradient, vectors, 1e-5)
    slope = ja.epsilon_gradient(ja.GaussianNoisyMax(10.0, 4), 1e-2)
    near = ja.epsilon(ja.GaussianNoisyMax(10.0, [4, 5]), 1e-2).estimate
    assert slope.candidates == pytest.approx(near[1] - near[0], rel=1e-2)


def test_nested_rates_near_one_must_have_an_exact_product():
    """(1 - 2^-52)^2 is no float64. A rounded product changes the chance that the record is out, and so the loss."""
    gaussian = ja.Gaussian(1.0)
    exact = ja.PoissonSampled(ja.PoissonSampled(gaussian, 1 - 2.0**-20), [1 - 2.0**-20, 1.0])
    assert ja.epsilon(exact, 1e-5).upper.shape == (2,)
    message = refusal(
        ja.epsilon, ja.PoissonSampled(ja.PoissonSampled(gaussian, 1 - 2.0**-52), [0.5, 1 - 2.0**-52]), 0.1
    )
    assert "nested sampling_probability[1] multiply to" in message and "give the product as one rate" in message
