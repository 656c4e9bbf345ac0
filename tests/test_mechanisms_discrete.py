"""Finite-output and integer-noise mechanisms, sampled or not, against enumeration, mpmath and dp_accounting."""

import itertools
import math

import jax
import mpmath
import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution
from helpers import refusal
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxacct as ja
from jaxacct.mechanisms import additive_noise as mechanisms_discrete
from jaxacct.mechanisms import batch_shape, directions

BOTH = "add_or_remove_one"


def hockey_stick(p, q, alpha):
    return math.fsum(max(a - alpha * b, 0.0) for a, b in zip(p, q, strict=True))


def products(p, n):
    return [math.prod(outcome) for outcome in itertools.product(p, repeat=n)]


def by_enumeration(p, q, rate, n, eps):
    """delta(eps) in both directions of n Poisson sampled steps, over all joint outcomes."""
    mixture = [(1.0 - rate) * b + rate * a for a, b in zip(p, q, strict=True)]
    one, two = products(mixture, n), products(q, n)
    return hockey_stick(one, two, math.exp(eps)), hockey_stick(two, one, math.exp(eps))


def assert_brackets(bounds, truth, rtol=1e-9):
    assert np.all(bounds.lower <= truth * (1.0 + rtol) + 1e-300), (bounds, truth)
    assert np.all(truth * (1.0 - rtol) <= bounds.upper), (bounds, truth)


def assert_close(bounds, truth, rtol=1e-6):
    assert_brackets(bounds, truth)
    np.testing.assert_allclose(bounds.estimate, truth, rtol=rtol)


# Finite outputs


@pytest.mark.parametrize("rate", [0.15, 1.0])
@pytest.mark.parametrize(
    ("p", "q"),
    [
        ([0.5, 0.3, 0.2], [0.2, 0.35, 0.45]),
        ([0.7, 0.2, 0.1, 0.0], [0.1, 0.2, 0.3, 0.4]),
        ([0.05, 0.95, 0.0], [0.0, 0.9, 0.1]),
    ],
)
def test_both_directions_against_enumeration(p, q, rate):
    run = ja.repeat(ja.PoissonSampled(ja.FiniteOutput(p, q), rate), 4)
    for eps in (0.0, 0.7):
        for relation, truth in zip(("remove_one", "add_one"), by_enumeration(p, q, rate, 4, eps), strict=True):
            bounds = ja.delta(run, eps, relation=relation)
            assert_brackets(bounds, truth)
            np.testing.assert_allclose(bounds.upper, truth, rtol=1e-6, atol=1e-300)


def test_symmetry_is_decided_from_the_data():
    flipped = ja.FiniteOutput([0.2, 0.3, 0.5], [0.5, 0.3, 0.2])
    skewed = ja.FiniteOutput([0.2, 0.3, 0.5], [0.5, 0.2, 0.3])
    assert directions(flipped, BOTH) == ("remove",) and directions(skewed, BOTH) == ("remove", "add")
    one_sided = ja.FiniteOutput([0.5, 0.5, 0.0], [0.0, 0.5, 0.5])
    assert directions(one_sided, BOTH) == ("remove",)
    assert directions(ja.FiniteOutput([0.5, 0.5], [0.0, 1.0]), BOTH) == ("remove", "add")
    batch = ja.FiniteOutput([[0.2, 0.8], [0.3, 0.7]], [[0.8, 0.2], [0.4, 0.6]])
    assert batch_shape(batch) == (2,) and directions(batch, BOTH) == ("remove", "add")
    assert directions(ja.repeat(skewed, 3), "replace_one") == ("remove", "add")


def test_disjoint_outputs_reveal_everything():
    open_book = ja.repeat(ja.FiniteOutput([1.0, 0.0], [0.0, 1.0]), 3)
    assert ja.delta(open_book, 2.0).upper == 1.0 and ja.delta(open_book, 2.0).lower > 1.0 - 1e-12
    assert ja.epsilon(open_book, 0.5).upper == np.inf
    sampled = ja.PoissonSampled(ja.FiniteOutput([1.0, 0.0], [0.0, 1.0]), 0.25)
    assert ja.delta(sampled, 1.0, relation="remove_one").upper == pytest.approx(0.25, rel=1e-12)
    add = ja.delta(sampled, 0.1, relation="add_one", rtol=1e-5)
    assert add.upper == pytest.approx(1 - 0.75 * math.exp(0.1), rel=1e-9)


def test_equal_laws_leak_nothing():
    assert ja.epsilon(ja.repeat(ja.FiniteOutput([0.3, 0.7], [0.3, 0.7]), 5), 1e-9).upper == 0.0


def test_differences_below_rounding_of_the_sum_are_kept():
    """p and q as given, divided by their exact sums, differ by 2^-56: a billion steps tell them apart."""
    p, q = [0.0, 1.0], [2.0**-56, 1.0]
    assert directions(ja.FiniteOutput(p, q), BOTH) == ("remove", "add")
    with mpmath.workdps(40):
        ratio = 1 / (1 + mpmath.mpf(2) ** -56)
        truth = float(1 - ratio ** (10**9))
    for relation in ("remove_one", "add_one"):
        assert_brackets(ja.delta(ja.repeat(ja.FiniteOutput(p, q), 10**9), 0.0, relation=relation), truth)


def test_a_batch_is_its_elements():
    p = np.array([[[0.5, 0.5]], [[0.6, 0.4]]])
    q = np.array([[0.3, 0.7], [0.25, 0.75], [0.5, 0.5]])
    batch = ja.delta(ja.repeat(ja.FiniteOutput(p, q), [2, 3, 4]), 0.2)
    assert batch.shape == (2, 3)
    for i, j in ((0, 1), (1, 0), (1, 2)):
        single = ja.delta(ja.repeat(ja.FiniteOutput(p[i, 0], q[j]), [2, 3, 4][j]), 0.2)
        assert batch.upper[i, j] == single.upper and batch.lower[i, j] == single.lower


def test_finite_output_is_the_other_finite_mechanisms():
    assert_close(ja.delta(ja.FiniteOutput([0.75, 0.25], [0.25, 0.75]), 0.5), 0.75 - math.exp(0.5) * 0.25, 1e-9)
    rate = ja.repeat(ja.PoissonSampled(ja.RandomizedResponse(0.7, 3), 0.2), 10)
    same = ja.repeat(ja.PoissonSampled(ja.FiniteOutput([0.7, 0.15, 0.15], [0.15, 0.7, 0.15]), 0.2), 10)
    np.testing.assert_allclose(ja.epsilon(same, 1e-6).upper, ja.epsilon(rate, 1e-6).upper, rtol=1e-9)


@given(st.lists(st.floats(0.01, 1.0), min_size=3, max_size=5), st.lists(st.floats(0.01, 1.0), min_size=3, max_size=5))
@settings(max_examples=8, deadline=None)
def test_post_processing_and_shape_of_the_profile(p, q):
    size = min(len(p), len(q))
    p, q = (np.array(x[:size]) / np.sum(x[:size]) for x in (p, q))
    eps = np.log([1.0, 1.5, 2.0])
    fine = ja.delta(ja.FiniteOutput(p, q), eps)
    merged = ja.FiniteOutput([p[:2].sum(), *p[2:]], [q[:2].sum(), *q[2:]])
    assert np.all(ja.delta(merged, eps).lower <= fine.upper)
    assert np.all(fine.lower[1:] <= fine.upper[:-1])
    assert fine.lower[1] <= 0.5 * (fine.upper[0] + fine.upper[2])  # convex in e^eps


def test_refusals():
    assert refusal(ja.FiniteOutput, [0.5, 0.6], [0.5, 0.5]).startswith("the sum of p = 1.1 must be 1 within 1e-12")
    assert "the sum of q[1] = 0.9" in refusal(ja.FiniteOutput, [0.5, 0.5], [[0.5, 0.5], [0.4, 0.5]])
    assert "p has 2 outcomes and q has 3" in refusal(ja.FiniteOutput, [0.5, 0.5], [0.5, 0.5, 0.0])
    assert "p[0] = -0.5 must be >= 0" in refusal(ja.FiniteOutput, [-0.5, 1.5], [0.5, 0.5])
    assert "last axis" in refusal(ja.FiniteOutput, 1.0, 1.0)
    assert "do not broadcast" in refusal(ja.FiniteOutput, np.full((2, 2), 0.5), np.full((3, 2), 0.5))
    assert "sensitivity = 1.5 must be an integer >= 1" in refusal(ja.DiscreteGaussian, 1.0, 1.5)
    assert "sigma = -1.0 must be >= 0.01" in refusal(ja.DiscreteGaussian, -1.0)
    message = refusal(ja.epsilon, ja.DiscreteGaussian([1.0, 1e5]), 1e-5)
    assert message.startswith("sigma[1] = 100000.0 needs 7500002 outcomes, must be <= 2097152; use ja.ZCDP(")
    assert "sensitivity = 5000 needs 5001" in refusal(ja.epsilon, ja.DiscreteLaplace(1.0, 5000), 1e-5)


def test_pytrees():
    mechanism = ja.PoissonSampled(ja.FiniteOutput([[0.5, 0.5], [0.25, 0.75]], [0.5, 0.5]), [0.1, 0.2])
    leaves, structure = jax.tree.flatten(mechanism)
    assert jax.tree.unflatten(structure, leaves) == mechanism and mechanism.validated() == mechanism
    jitted = jax.jit(lambda m: m)(ja.DiscreteGaussian([1.0, 2.0], 3))
    assert jitted.sensitivity == 3 and ja.DiscreteGaussian(1.0) != ja.DiscreteGaussian(1.0, 2)


# Integer noise


def gaussian_pmf(sigma, at):
    weights = {x: mpmath.exp(-(mpmath.mpf(x) ** 2) / (2 * mpmath.mpf(sigma) ** 2)) for x in at}
    total = mpmath.fsum(weights.values())
    return {x: w / total for x, w in weights.items()}


def laplace_pmf(scale, at):
    ratio = mpmath.exp(-1 / mpmath.mpf(scale))
    return {x: (1 - ratio) / (1 + ratio) * ratio ** abs(x) for x in at}


@pytest.mark.parametrize("shift", [1, 3])
@pytest.mark.parametrize("rate", [1.0, 0.3])
@pytest.mark.parametrize(("build", "pmf", "parameter"), [
    (ja.DiscreteGaussian, gaussian_pmf, 0.4),
    (ja.DiscreteGaussian, gaussian_pmf, 5.0),
    (ja.DiscreteLaplace, laplace_pmf, 0.7),
    (ja.DiscreteLaplace, laplace_pmf, 4.0),
])  # fmt: skip
def test_one_step_of_integer_noise_against_mpmath(build, pmf, parameter, shift, rate):
    step = ja.PoissonSampled(build(parameter, shift), rate)
    with mpmath.workdps(30):
        law = pmf(parameter, range(-200, 201))
        q = [law[x] for x in range(-190, 190)]
        p = [law[x - shift] for x in range(-190, 190)]
        mixture = [(1 - rate) * b + rate * a for a, b in zip(p, q, strict=True)]
        for eps in (0.0, 0.5, 2.0):
            alpha = mpmath.exp(mpmath.mpf(eps))
            for relation, (one, two) in {"remove_one": (mixture, q), "add_one": (q, mixture)}.items():
                truth = float(mpmath.fsum(max(a - alpha * b, 0) for a, b in zip(one, two, strict=True)))
                bounds = ja.delta(step, eps, relation=relation)
                assert_brackets(bounds, truth, 1e-12)
                np.testing.assert_allclose(bounds.upper, truth, rtol=1e-6, atol=1e-290)


def test_far_tail_of_the_discrete_gaussian():
    with mpmath.workdps(60):
        law = gaussian_pmf(3.0, range(-300, 301))
        alpha = mpmath.exp(12)
        truth = float(mpmath.fsum(max(law[x - 1] - alpha * law[x], 0) for x in range(-299, 300)))
    assert 1e-290 < truth < 1e-250
    assert_close(ja.delta(ja.DiscreteGaussian(3.0), 12.0), truth)


@pytest.mark.parametrize(("sigma", "shift", "rate", "n"), [(1.5, 1, 1.0, 20), (4.0, 2, 1.0, 50), (2.0, 1, 0.1, 100)])
def test_composed_discrete_gaussian_against_dp_accounting(sigma, shift, rate, n):
    peer = privacy_loss_distribution.from_discrete_gaussian_mechanism(
        sigma, shift, int(40 * sigma), True, 1e-3, rate, use_connect_dots=True
    )
    truth = peer.self_compose(n).get_epsilon_for_delta(1e-5)  # an upper bound
    bounds = ja.epsilon(ja.repeat(ja.PoissonSampled(ja.DiscreteGaussian(sigma, shift), rate), n), 1e-5)
    assert bounds.lower <= truth and bounds.upper <= truth * (1 + 1e-5)
    assert bounds.upper == pytest.approx(truth, rel=1e-3)


def convolved_discrete_gaussian(sigma, shift, steps, eps):
    """delta(eps) of unsampled steps: the loss is linear in the outcome, so that outcomes are convolved."""
    at = np.arange(-int(12 * sigma), int(12 * sigma) + 1)
    law = np.exp(-0.5 * np.square(at / sigma))
    law /= law.sum()
    p = q = law
    for _ in range(steps - 1):
        p = q = np.convolve(q, law)
    place = np.arange(q.size) - q.size // 2 + 0.5 * steps * shift  # measured from -steps * shift / 2
    loss = shift * place / sigma**2
    q = np.append(q, np.zeros(steps * shift))
    p = np.append(np.zeros(steps * shift), p)
    loss = np.append(loss, loss[-1] + shift / sigma**2 * np.arange(1, steps * shift + 1)) - steps * shift**2 / sigma**2
    return float(np.sum(p[loss > eps]) - math.exp(eps) * np.sum(q[loss > eps]))


@pytest.mark.parametrize(("sigma", "shift", "steps"), [(300.0, 20, 1), (300.0, 20, 2), (2000.0, 1500, 1)])
def test_grouped_discrete_gaussian_against_enumeration(sigma, shift, steps):
    eps = np.array([0.1, 0.5]) * shift / sigma * 4 * math.sqrt(steps)
    truth = np.array([convolved_discrete_gaussian(sigma, shift, steps, e) for e in eps])
    got = ja.delta(ja.repeat(ja.DiscreteGaussian(sigma, shift), steps), eps, rtol=1e-3)
    assert np.all(truth > 1e-9) and got.kind[0] == "bound"
    assert np.all(got.upper >= truth * (1 - 1e-8)) and np.all(got.upper <= truth * (1 + 1e-4))


def test_grouping_keeps_the_sums_and_stays_near_the_continuous_noise():
    fine, coarse = (mechanisms_discrete._gaussian_pair(300.0, 20, grouped) for grouped in (False, True))
    for name in ("p", "q"):
        one, two = getattr(fine, name).sum(), getattr(coarse, name).sum()
        assert one <= two <= one * (1 + 1e-12)
    for eps in (0.0, 0.05, 0.3, 0.5, 1.0, 2.0):  # grouping raises the hockey-stick divergence in both directions
        for a, b in (("p", "q"), ("q", "p")):
            one, two = (hockey_stick(getattr(x, a), getattr(x, b), math.exp(eps)) for x in (fine, coarse))
            assert one * (1 - 1e-12) <= two and (eps > 0.5 or two <= one * (1 + 1e-3))
    for sigma, n in ((60.0, 1), (1e4, 100)):
        steps, scale = int(sigma / 40), sigma / int(sigma / 40)
        rough = ja.epsilon(ja.repeat(ja.DiscreteGaussian(sigma, steps), n), 1e-6)
        assert rough.upper == pytest.approx(ja.epsilon(ja.repeat(ja.Gaussian(scale), n), 1e-6).upper, rel=1.5e-5)
        assert rough.kind == "bound"
    assert ja.epsilon(ja.DiscreteGaussian([2.0, 54.0]), 1e-6).kind[0] == "certified"


def test_composed_discrete_laplace_against_dp_accounting():
    peer = privacy_loss_distribution.from_discrete_laplace_mechanism(0.25, 2, True, 1e-4, 0.2)
    truth = peer.self_compose(50).get_epsilon_for_delta(1e-5)
    bounds = ja.epsilon(ja.repeat(ja.PoissonSampled(ja.DiscreteLaplace(4.0, 2), 0.2), 50), 1e-5)
    assert bounds.lower <= truth
    assert bounds.upper == pytest.approx(truth, rel=1e-2)


def test_replace_one_doubles_the_sensitivity():
    for build, parameter in ((ja.DiscreteGaussian, 2.0), (ja.DiscreteLaplace, 3.0)):
        replaced = ja.delta(build(parameter, 1), 0.4, relation="replace_one")
        assert replaced.upper == ja.delta(build(parameter, 2), 0.4).upper


# Poisson sampled Laplace


@pytest.mark.parametrize(("scale", "rate"), [(0.5, 0.3), (3.0, 0.01), (1.0, 1.0)])
def test_sampled_laplace_against_quadrature(scale, rate):
    """One step: the gain, max(p - e^eps q, 0), is integrated on both sides of the point where it becomes 0."""
    step = ja.PoissonSampled(ja.Laplace(scale), rate)
    with mpmath.workdps(30):
        b, r = mpmath.mpf(scale), mpmath.mpf(rate)

        def density(x, at):
            return mpmath.exp(-abs(x - at) / b) / (2 * b)

        def one_way(remove, alpha):
            def gain(x):
                base, mixed = density(x, 0), (1 - r) * density(x, 0) + r * density(x, 1)
                return max(mixed - alpha * base, 0) if remove else max(base - alpha * mixed, 0)

            # the ratio is constant outside [0, 1]: integrate in closed form there
            left, right = gain(mpmath.mpf(0)) * b, gain(mpmath.mpf(1)) * b
            odds = ((alpha if remove else 1 / alpha) - 1 + r) / r  # e^loss of the base where the gain is 0
            turn = min(max((1 + b * mpmath.log(odds)) / 2, mpmath.mpf(0)), mpmath.mpf(1)) if odds > 0 else mpmath.mpf(0)
            return float(left + right + mpmath.quad(gain, [0, turn]) + mpmath.quad(gain, [turn, 1]))

        eps = np.array([0.0, 0.1, 0.2])
        for relation, remove in (("remove_one", True), ("add_one", False)):
            truth = [one_way(remove, mpmath.exp(e)) for e in eps]
            bounds = ja.delta(step, eps, relation=relation)
            np.testing.assert_allclose(bounds.upper, truth, rtol=1e-5, atol=1e-12)
            np.testing.assert_allclose(bounds.lower, truth, rtol=1e-5, atol=1e-12)


def test_composed_sampled_laplace_against_dp_accounting():
    peer = privacy_loss_distribution.from_laplace_mechanism(2.0, 1.0, True, 1e-4, 0.1)
    truth = peer.self_compose(100).get_epsilon_for_delta(1e-6)
    bounds = ja.epsilon(ja.repeat(ja.PoissonSampled(ja.Laplace(2.0), 0.1), 100), 1e-6)
    assert bounds.lower <= truth and bounds.upper <= truth * (1 + 1e-5)
    assert bounds.upper == pytest.approx(truth, rel=1e-2)
