"""Samplers against their exact laws, their privacy by brute force, their utility bounds by simulation."""

import itertools
import math
import random
from fractions import Fraction

import jax
import numpy as np
import pytest
from helpers import refusal
from scipy import stats

import jaxacct as ja
from jaxacct import samplers
from jaxacct.core.chacha import CHACHA20
from jaxacct.samplers import exact_draws
from jaxacct.training import fresh_key


def seeded(number):
    """A key of 256 bits that anyone can guess, for tests."""
    return jax.random.key(number, impl=CHACHA20)


def fits(counts, law, least=1e-4):
    """Whether counts fit a law, by chi-square over the cells that expect 5 or more and the rest together."""
    counts, expected = np.asarray(counts, float), np.asarray(law) * np.sum(counts)
    common = expected >= 5
    pooled = [np.append(x[common], x[~common].sum()) for x in (counts, expected)]
    if pooled[1][-1] < 5:
        pooled = [np.append(x[:-2], x[-2:].sum()) for x in pooled]
    pooled[1] *= pooled[0].sum() / pooled[1].sum()
    return bool(stats.chisquare(*pooled).pvalue > least)


def integer_counts(draw, size, reach):
    draws = np.array([draw() for _ in range(size)])
    return np.bincount(np.clip(draws, -reach, reach) + reach, minlength=2 * reach + 1)


def test_chi_square_would_notice_a_wrong_scale():
    rng, x = random.Random(5), np.arange(-40, 41)
    counts = integer_counts(lambda: exact_draws.discrete_laplace(Fraction(2), rng), 6_000, 40)
    for scale, expected in ((2.0, True), (2.25, False)):
        law = np.exp(-np.abs(x) / scale)
        assert fits(counts, law / law.sum()) is expected


# Exact integer noise


@pytest.mark.parametrize("exponent", [Fraction(0), Fraction(1, 3), Fraction(1), Fraction(7, 3), Fraction(0.1)])
def test_bernoulli_exp(exponent):
    rng, n = random.Random(1), 5_000
    hits = sum(exact_draws.bernoulli_exp(exponent, rng) for _ in range(n))
    assert stats.binomtest(hits, n, math.exp(-exponent)).pvalue > 1e-4


@pytest.mark.parametrize("scale", [Fraction(1, 3), Fraction(1), Fraction(5, 2), Fraction(0.7), Fraction(12)])
def test_discrete_laplace_fits_its_law(scale):
    rng, x = random.Random(2), np.arange(-200, 201)
    law = np.tanh(0.5 / float(scale)) * np.exp(-np.abs(x) / float(scale))
    assert law.sum() == pytest.approx(1.0, abs=1e-6)
    assert fits(integer_counts(lambda: exact_draws.discrete_laplace(scale, rng), 6_000, 200), law)


@pytest.mark.parametrize("variance", [Fraction(1, 5), Fraction(1), Fraction(9, 2), Fraction(2.3), Fraction(60)])
def test_discrete_gaussian_fits_its_law(variance):
    rng, x = random.Random(3), np.arange(-100, 101)
    law = np.exp(-(x**2) / (2 * float(variance)))
    assert fits(integer_counts(lambda: exact_draws.discrete_gaussian(variance, rng), 4_000, 100), law / law.sum())


def test_every_draw_uses_only_integer_arithmetic_on_the_source():
    class Bits(random.Random):
        def getrandbits(self, k):
            return super().getrandbits(k)

        def random(self):
            raise AssertionError("a float was drawn")

    rng = Bits(0)
    for _ in range(200):
        assert type(exact_draws.discrete_laplace(Fraction(0.3), rng)) is int
        assert type(exact_draws.discrete_gaussian(Fraction(0.3), rng)) is int


def test_integer_noise_privacy_by_brute_force():
    x = np.arange(-4000, 4001)
    for scale, shift in ((Fraction(3, 2), 1), (Fraction(10), 3)):
        claim = samplers.DiscreteLaplaceNoise(scale, shift).privacy.epsilon
        ratio = np.max(np.abs(x - shift) - np.abs(x)) / float(scale)
        assert ratio <= claim == pytest.approx(float(shift / scale), rel=1e-15)
        assert Fraction(claim) >= shift / scale
    for variance, shift in ((Fraction(4), 1), (Fraction(50), 3)):
        noise = samplers.DiscreteGaussianNoise(variance, shift)
        law = np.exp(-(x**2) / (2 * float(variance)))
        p, q = law / law.sum(), np.roll(law, shift) / law.sum()
        for delta in (1e-2, 1e-6, 1e-10):
            claim = noise.privacy(delta)
            assert np.maximum(p - math.exp(claim.epsilon) * q, 0).sum() <= claim.delta == delta
        for order in (1.5, 2.0, 8.0):
            exponent = -(order * x**2 + (1 - order) * (x - shift) ** 2) / (2 * float(variance))
            divergence = np.log(np.sum(np.exp(exponent)) / law.sum()) / (order - 1)
            assert divergence <= noise.rho * order * (1 + 1e-9)
    assert noise.rho >= 9 / 100


def test_releases():
    rng = random.Random(4)
    released = samplers.DiscreteGaussianNoise(2.25).release([10, np.int64(20)], rng)
    assert len(released) == 2 and all(type(x) is int for x in released)
    same = [samplers.DiscreteLaplaceNoise(3).release(7, random.Random(9)) for _ in range(2)]
    assert same[0] == same[1] and type(same[0]) is int
    assert len({samplers.DiscreteLaplaceNoise(1000).release(0) for _ in range(20)}) > 1


def test_bad_integer_noise_is_refused():
    assert "scale = 0 must be > 0" in refusal(samplers.DiscreteLaplaceNoise, 0)
    assert "variance = nan must be finite" in refusal(samplers.DiscreteGaussianNoise, math.nan)
    assert "sensitivity = '1' must be a number" in refusal(samplers.DiscreteLaplaceNoise, 1, "1")
    noise = samplers.DiscreteLaplaceNoise(np.float32(0.5))
    assert noise.scale == Fraction(1, 2)
    assert "counts = 1.0 must be an integer" in refusal(noise.release, 1.0)
    assert "counts[1] = True must be an integer" in refusal(noise.release, [1, True])
    assert "counts must be an integer or a list" in refusal(noise.release, "12")
    assert "rng must be a random.Random" in refusal(noise.release, 1, np.random.default_rng(0))
    assert "delta = 0.0 must be" in refusal(samplers.DiscreteGaussianNoise(1).privacy, 0.0)


# Choice

UTILITIES = np.array([3.0, 2.5, 0.0, 3.0, -1.0])
DRAWS = (10_000,)
"""Most tests draw this shape, since each further shape is compiled."""
SHIFTS = {False: (-1.0, 0.0, 1.0), True: (0.0, 1.0)}


def law_of_noisy_max(utilities, noise, scale):
    """Pr[i is the largest] by quadrature of the density of its noisy value times the others' distributions."""
    noises = {"laplace": stats.laplace, "exponential": stats.expon, "gumbel": stats.gumbel_r, "normal": stats.norm}
    laws = [noises[noise](loc=u, scale=scale) for u in utilities]
    kinks = sorted(set(utilities))
    ends = [kinks[0] - 40 * scale, *kinks, kinks[-1] + 40 * scale]
    panels = np.unique(np.concatenate([np.linspace(a, b, 25) for a, b in itertools.pairwise(ends)]))
    at, weight = np.polynomial.legendre.leggauss(20)
    half = 0.5 * np.diff(panels)[:, None]
    x = panels[:-1, None] + half * (1.0 + at)
    cdfs = [law.cdf(x) for law in laws]
    return np.array(
        [
            np.sum(half * weight * law.pdf(x) * math.prod(c for j, c in enumerate(cdfs) if j != i))
            for i, law in enumerate(laws)
        ]
    )


@pytest.mark.parametrize("monotone", [False, True])
def test_exponential_mechanism_follows_its_law(monotone):
    mechanism = samplers.ExponentialChoice(1.3, sensitivity=0.5, monotone=monotone)
    rate = 1.3 / 0.5 / (1 if monotone else 2)
    law = np.exp(rate * UTILITIES) / np.exp(rate * UTILITIES).sum()
    np.testing.assert_allclose(mechanism.probabilities(UTILITIES), law, rtol=1e-12)
    fast = mechanism.sample(seeded(1), UTILITIES, DRAWS)
    assert fast.shape == DRAWS and fits(np.bincount(fast, minlength=5), law)
    rng = random.Random(6)
    slow = [mechanism.sample_exact(UTILITIES.tolist(), rng) for _ in range(2000)]
    assert fits(np.bincount(slow, minlength=5), law)


@pytest.mark.parametrize("monotone", [False, True])
def test_exponential_mechanism_privacy_by_brute_force(monotone):
    mechanism = samplers.ExponentialChoice(0.7, monotone=monotone)
    first = mechanism.probabilities(UTILITIES)
    worst = 0.0
    for shift in itertools.product(SHIFTS[monotone], repeat=5):
        second = mechanism.probabilities(UTILITIES + shift)
        worst = max(worst, np.max(np.abs(np.log(first / second))))
    assert 0.3 < worst <= mechanism.privacy.epsilon * (1 + 1e-12)


@pytest.mark.parametrize("noise", ["laplace", "exponential", "gumbel"])
def test_noisy_max_follows_its_law(noise):
    mechanism = samplers.NoisyMaxChoice(1.0, noise)
    assert mechanism.scale == 2.0 and samplers.NoisyMaxChoice(1.0, noise, 3.0, monotone=True).scale == 3.0
    chosen = mechanism.sample(seeded(2), UTILITIES, DRAWS)
    law = law_of_noisy_max(UTILITIES, noise, mechanism.scale)
    assert law.sum() == pytest.approx(1.0, abs=1e-9)
    assert fits(np.bincount(chosen, minlength=5), law)
    if noise == "gumbel":
        np.testing.assert_allclose(law, samplers.ExponentialChoice(1.0).probabilities(UTILITIES), rtol=1e-7)


@pytest.mark.parametrize("monotone", [False, True])
@pytest.mark.parametrize("noise", ["laplace", "exponential", "gumbel"])
def test_noisy_max_privacy_by_brute_force(noise, monotone):
    mechanism, utilities = samplers.NoisyMaxChoice(1.0, noise, monotone=monotone), np.array([1.0, 0.0, 0.4])
    first = law_of_noisy_max(utilities, noise, mechanism.scale)
    shifts = itertools.product(SHIFTS[monotone], repeat=3)
    laws = [law_of_noisy_max(utilities + shift, noise, mechanism.scale) for shift in shifts]
    worst = max(np.max(np.abs(np.log(first / law))) for law in laws)
    assert 0.3 < worst <= 1.0 + 1e-6


@pytest.mark.parametrize("monotone", [False, True])
def test_gaussian_noisy_max_privacy_by_brute_force(monotone):
    mechanism, utilities, delta = (
        samplers.GaussianNoisyMaxChoice(1.5, monotone=monotone),
        np.array([1.0, 0.0, 0.4]),
        1e-3,
    )
    claim = mechanism.privacy(delta, candidates=3)
    first = law_of_noisy_max(utilities, "normal", 1.5)
    for shift in itertools.product(SHIFTS[monotone], repeat=3):
        second = law_of_noisy_max(utilities + shift, "normal", 1.5)
        for p, q in ((first, second), (second, first)):
            assert np.maximum(p - math.exp(claim.epsilon) * q, 0).sum() <= delta
    by_vector = ja.epsilon(ja.Gaussian(1.5 / math.sqrt(3)), delta).upper
    by_choice = ja.epsilon(ja.Gaussian(1.5 / (1 if monotone else 2)), delta / 3).upper
    assert claim.epsilon <= min(by_vector, by_choice) * (1 + 1e-9)
    chosen = mechanism.sample(seeded(3), utilities, DRAWS)
    assert fits(np.bincount(chosen, minlength=3), first)


def test_batches_and_bad_choices():
    mechanism = samplers.ExponentialChoice(50.0)
    rows = mechanism.sample(seeded(0), [[0.0, 9.0, 1.0], [9.0, 0.0, 1.0]], (4,))
    assert rows.tolist() == [[1, 0]] * 4
    assert "epsilon = 0.0 must be > 0" in refusal(samplers.NoisyMaxChoice, 0.0)
    assert "must be one number" in refusal(samplers.ExponentialChoice, [1.0, 2.0])
    assert "noise = 'cauchy' is not known" in refusal(samplers.NoisyMaxChoice, 1.0, "cauchy")
    for bad in ([1.0, math.nan], [], 3.0):
        assert "utilities must be finite numbers" in refusal(mechanism.sample, seeded(0), bad)
    assert "utilities is empty" in refusal(mechanism.sample_exact, [])
    assert "utilities[1] = inf must be finite" in refusal(mechanism.sample_exact, [0, math.inf])
    assert "candidates = 0 must be" in refusal(samplers.GaussianNoisyMaxChoice(1.0).privacy, 1e-5, 0)
    assert ja.epsilon(ja.repeat(mechanism.privacy, 2), 0.0).upper == pytest.approx(100.0)


@pytest.mark.parametrize("mechanism", [samplers.NoisyMaxChoice(2.0), samplers.GaussianNoisyMaxChoice(1.0)])
def test_keys_that_can_be_tried_are_refused(mechanism):
    for key, text in [
        (jax.random.key(0), "key has 64 bits"),
        (jax.random.key(0, impl="rbg"), "key has 128 bits"),
        (jax.random.PRNGKey(0), "must be a typed JAX key"),
        (7, "must be a typed JAX key"),
    ]:
        assert text in refusal(mechanism.sample, key, UTILITIES) and "fresh_key" in refusal(mechanism.sample, key, [1])
    chosen = [mechanism.sample(key, np.zeros(5), DRAWS) for key in (None, None, fresh_key(), seeded(1), seeded(1))]
    assert len({row.tobytes() for row in chosen}) == 4  # only the two draws with equal keys are equal


# Utility


@pytest.mark.parametrize("monotone", [False, True])
def test_utility_bound_holds_exactly_and_in_simulation(monotone):
    utilities = np.concatenate([np.full(3, 50.0), np.arange(0.0, 50.0, 0.5)])
    mechanism = samplers.ExponentialChoice(0.8, monotone=monotone)
    law = mechanism.probabilities(utilities)
    draws = utilities[mechanism.sample(seeded(4), utilities, (2_000,))]
    for beta in (0.5, 0.1, 0.01):
        error = samplers.exponential_error(0.8, beta, utilities.size, optimal=3, monotone=monotone)
        assert law[utilities <= 50.0 - error].sum() <= beta
        assert np.mean(draws <= 50.0 - error) <= beta


def test_utility_bounds_broadcast_and_refuse():
    errors = samplers.exponential_error([0.5, 1.0], [[0.1], [0.01]], 100, sensitivity=2.0)
    assert errors.shape == (2, 2)
    assert errors[1, 0] == pytest.approx(2 * 2.0 / 0.5 * (math.log(100) + math.log(100)))
    assert "optimal must be <= candidates" in refusal(samplers.exponential_error, 1.0, 0.1, 10, optimal=11)
    assert "candidates = 0.5 must be" in refusal(samplers.exponential_error, 1.0, 0.1, 0.5)
    assert "do not broadcast" in refusal(samplers.exponential_error, [1.0, 2.0], [0.1, 0.2, 0.3], 10)


# AboveThreshold


def law_of_sparse(values, threshold, above, reach):
    """Return Pr[the first yes is at i] for each i, then Pr[no yes], as sums over the threshold's noise."""
    b, c = float(above.threshold_scale), float(above.query_scale)
    noise = np.arange(-reach, reach + 1)
    start = np.tanh(0.5 / b) * np.exp(-np.abs(noise) / b)
    none, chances = np.ones_like(start), []
    for value in values:
        gap = threshold + noise - value
        yes = np.exp(-np.abs(gap) / c) / (1 + np.exp(-1 / c))
        yes = np.where(gap > 0, yes, 1 - np.exp(-(np.abs(gap) + 1) / c) / (1 + np.exp(-1 / c)))
        chances.append(np.sum(start * none * yes))
        none = none * (1 - yes)
    return np.array([*chances, np.sum(start * none)])


@pytest.mark.parametrize("sensitivity", [1, 2])
def test_above_threshold_privacy_by_brute_force(sensitivity):
    above = samplers.SparseVector(1.0, 2, sensitivity=sensitivity)
    values = np.array([0, 3, 1, 2])
    first = law_of_sparse(values, 2, above, 200)
    worst = 0.0
    for shift in itertools.product((-sensitivity, 0, sensitivity), repeat=4):
        second = law_of_sparse(values + shift, 2, above, 200)
        worst = max(worst, np.max(np.abs(np.log(first / second))))
    assert 0.3 < worst <= above.privacy.epsilon * (1 + 1e-9)


def test_above_threshold_follows_its_law():
    values, rng, stops = [0, 3, 1, 2], random.Random(7), []
    for _ in range(3000):
        above = samplers.SparseVector(Fraction(3, 2), 2, rng=rng)
        stops.append(next((i for i, value in enumerate(values) if above.ask(value)), 4))
    assert fits(np.bincount(stops, minlength=5), law_of_sparse(values, 2, above, 200))


def test_above_threshold_accuracy_holds_in_simulation():
    rng, queries, threshold = random.Random(8), 20, 1000
    alpha = samplers.SparseVector(1.0, threshold, rng=rng).accuracy(0.2, queries)
    textbook = 8 * (math.log(queries) + math.log(2 / 0.2))
    assert 0.5 * textbook < alpha < 1.1 * textbook
    wrong, runs = 0, 600
    for _ in range(runs):
        above = samplers.SparseVector(1.0, threshold, rng=rng)
        low, high = threshold - alpha - 1, threshold + alpha + 1
        answers = [above.ask(low) for _ in range(queries - 1) if not above.halted]
        wrong += any(answers) or not above.ask(high)
    assert wrong / runs <= 0.2
    assert above.failure(alpha, queries) <= 0.2 < above.failure(alpha - 2, queries)
    assert above.failure(0, 1) == 1.0


def test_above_threshold_stops_and_refuses():
    above = samplers.SparseVector(5.0, 0, rng=random.Random(0))
    assert above.ask(1000) and above.halted
    assert "has halted" in refusal(above.ask, 0)
    assert "value = 0.5 must be an integer" in refusal(samplers.SparseVector(1.0, 0).ask, 0.5)
    assert "epsilon = -1 must be > 0" in refusal(samplers.SparseVector, -1, 0)
    assert "sensitivity = 0 must be >= 1" in refusal(samplers.SparseVector, 1, 0, sensitivity=0)
    assert "alpha = -1 must be >= 0" in refusal(above.failure, -1, 10)
    assert above.privacy == ja.PureDP(5.0)


def test_accuracy_of_the_least_and_largest_epsilon():
    """The old search for alpha raised an error beyond 2^63."""
    for epsilon in (5e-324, 1e-17, 1e17):
        vector = samplers.SparseVector(epsilon, 3)
        alpha = vector.accuracy(0.05, 5)
        assert vector.failure(alpha, 5) <= 0.05 and (alpha == 2 or vector.failure(alpha - 2, 5) > 0.05)


def test_choices_whose_noise_is_beyond_float64_are_refused():
    """In the old code a noise scale that underflowed to 0 made the probabilities NaN."""
    for make, given in (
        (samplers.ExponentialChoice, (1e300, 1e-300)),
        (samplers.GaussianNoisyMaxChoice, (1e-300, 1e-300)),
    ):
        assert "= 0.0 must be >= 1e-290" in refusal(make, *given)
    assert "finite" in refusal(samplers.NoisyMaxChoice, 1e-300, sensitivity=1e300)
