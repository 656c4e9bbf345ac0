"""Where several theorems hold, the answer is the smallest bound. The tests write each theorem down anew."""

import mpmath as mp
import numpy as np
import pytest
from dp_accounting import dp_event
from scipy.special import gammaln, logsumexp
from scipy.stats import laplace, norm

import jaxacct as ja
from jaxacct import interop, selection
from jaxacct.engines import loss_moments
from jaxacct.mechanisms import components
from jaxacct.representations import rdp_epsilon


@pytest.mark.parametrize(
    ("steps", "epsilon"), [(1e12, 2e12), (1e14, 5.1e13), (1e15, 5.000002e14), (1e10, 5.0001e9), (1e8, 1e9)]
)
def test_moments_bound_far_losses_from_above(steps, epsilon):
    """Terms of 1e14 cancel, and a delta may lie below float64's range: the bound is still above the exact value."""
    mp.mp.dps = 60
    parts = components(ja.repeat(ja.Gaussian(1.0), steps), "add_or_remove_one", "remove")
    mu, eps = mp.sqrt(steps), mp.mpf(epsilon)
    exact = mp.ncdf(mu / 2 - eps / mu) - mp.exp(eps) * mp.ncdf(-mu / 2 - eps / mu)
    assert loss_moments.least_delta(parts, np.array([epsilon]))[0] >= exact > 0


def renyi_epsilon_of_dp_sgd(sigma, q, steps, log_delta, orders=range(2, 400, 6)):
    """Mironov, Talwar and Zhang (2019) at whole orders, and Canonne, Kamath and Steinke's conversion."""
    best = np.inf
    for a in orders:
        k = np.arange(a + 1)
        choose = gammaln(a + 1) - gammaln(k + 1) - gammaln(a - k + 1)
        moment = steps * logsumexp(choose + k * np.log(q) + (a - k) * np.log1p(-q) + k * (k - 1) / (2 * sigma**2))
        best = min(best, (moment - log_delta - np.log(a) + (a - 1) * np.log1p(-1 / a)) / (a - 1))
    return best


@pytest.mark.parametrize(
    ("sigma", "group", "delta"),
    [(13.0, 1, 1e-300), *(pytest.param(*row, marks=pytest.mark.slow) for row in ((4.0, 1, 3e-305), (1.0, 2, 1e-300)))],
)
def test_tiny_deltas_have_the_bound_by_moments(sigma, group, delta):
    found = ja.epsilon(ja.dp_sgd(sigma, 0.01, 1000, group=group), delta)
    if group == 1:
        known = renyi_epsilon_of_dp_sgd(sigma, 0.01, 1000, np.log(delta))
    else:
        known = rdp_epsilon(ja.dp_sgd(sigma, 0.01, 1000, group=group), delta).upper
    assert found.lower <= found.upper <= known * 1.001
    assert found.kind == "certified" and found.lower > 0.0


def test_wide_deltas_have_the_bound_by_moments():
    run = ja.dp_sgd(13.0, 0.01, 1000)
    known = renyi_epsilon_of_dp_sgd(13.0, 0.01, 1000, -690.0)
    assert ja.delta(run, known * 1.001).upper <= np.exp(-690.0)


@pytest.mark.slow
def test_calibration_at_a_tiny_delta_meets_what_moments_meet():
    found = ja.calibrate_noise_multiplier(1.0, 1e-300, 0.01, 1000)
    assert renyi_epsilon_of_dp_sgd(13.0, 0.01, 1000, np.log(1e-300), orders=range(602, 1600, 25)) < 1.0
    assert found.value <= 13.0


def test_replaced_groups_are_removed_and_added():
    run = ja.dp_sgd(1.0, 0.01, 1, group=2)
    found = ja.epsilon(run, 1e-5, relation="replace_one")
    share = 1e-5 / 2  # half of delta for the first step
    first = ja.epsilon(run, share, relation="remove_one").upper
    second = ja.epsilon(run, share * np.exp(-first), relation="add_one").upper
    assert found.kind == "bound" and found.upper <= first + second < 8.0
    # removing two records costs no more than replacing them
    assert found.upper >= ja.epsilon(run, 1e-5, relation="remove_one").lower
    assert ja.delta(run, found.upper, relation="replace_one", rtol=1e-2).upper <= 2e-5


def test_replaced_groups_row_by_row():
    run = ja.PoissonSampled(ja.Gaussian([1.0, 30.0]), [0.1, 1.0], group=2)  # in row 2 the exact pair is better
    found = ja.epsilon(run, 1e-5, relation="replace_one")
    assert found.upper[0] < 4.0 and found.upper[1] == pytest.approx(ja.epsilon(ja.Gaussian(7.5), 1e-5).upper, rel=1e-3)


def winner_law(scores, sigma):
    """The law of the place of the largest of scores with Gaussian noise, by quadrature."""
    x = np.linspace(-9.0 * sigma, 9.0 * sigma + scores.max(), 1501)[:, None]
    density, below = norm.pdf(x, scores, sigma), norm.cdf(x, scores, sigma)
    others = np.stack([np.prod(np.delete(below, i, axis=1), axis=1) for i in range(scores.size)], 1)
    return np.trapezoid(density * others, x[:, 0], axis=0)


@pytest.mark.parametrize(("m", "monotone"), [(2, False), (2, True), (3, False), (5, True), (6, False)])
def test_noisy_maxima_against_their_laws(m, monotone):
    rng, sigma, epsilon = np.random.default_rng(m), 2.0, np.array([0.0, 0.2, 0.7, 1.5])
    found = ja.delta(ja.GaussianNoisyMax(sigma, m, monotone=monotone), epsilon).upper
    replaced = ja.delta(ja.GaussianNoisyMax(sigma, m, monotone=monotone), epsilon, relation="replace_one").upper
    largest = 0.0
    for _ in range(6):
        scores = rng.choice([0.0, 0.5, 1.0, 3.0], m)
        moved = scores + rng.choice([0.0, 1.0] if monotone else [-1.0, 1.0], m)
        away = scores - rng.choice([0.0, 1.0] if monotone else [-1.0, 1.0], m)
        p, q, r = (winner_law(each, sigma) for each in (scores, moved, away))
        for a, b, limit in ((p, q, found), (q, p, found), (q, r, replaced), (r, q, replaced)):
            exact = np.array([np.sum(np.maximum(a - np.exp(eps) * b, 0.0)) for eps in epsilon])
            assert np.all(exact <= limit + 1e-9)
            largest = max(largest, exact[0] / limit[0])
    assert largest > 0.4


def test_noisy_maxima_take_the_smaller_bound():
    run = ja.repeat(ja.GaussianNoisyMax(40.0, candidates=2), 200)
    assert ja.epsilon(run, 1e-6).upper == pytest.approx(
        ja.epsilon(ja.Gaussian(40.0 / np.sqrt(400.0)), 1e-6).upper, rel=1e-9
    )
    for m in (4, 5, 1000):
        all_scores = ja.Gaussian(3.0 / np.sqrt(m))
        union = m * ja.delta(ja.Gaussian(1.5), [0.5, 2.0, 6.0]).upper
        known = np.minimum(union, ja.delta(all_scores, [0.5, 2.0, 6.0]).upper)
        found = ja.delta(ja.GaussianNoisyMax(3.0, m), [0.5, 2.0, 6.0]).upper
        assert np.all(found <= known * 1.001)
    assert ja.epsilon(ja.GaussianNoisyMax(1.0, 1), 1e-6).upper == 0.0
    assert ja.epsilon(ja.GaussianNoisyMax(1.0, [1, 2]), 1e-6).upper[0] == 0.0


def chances_of_the_largest(scores, cdf, density, top):
    """Each candidate's probability of having the largest noisy score, by quadrature."""
    x = np.linspace(scores.min() - top, scores.max() + top, 20_001)[:, None]
    below = cdf(x - scores)
    others = np.stack([np.prod(np.delete(below, i, axis=1), axis=1) for i in range(scores.size)], 1)
    law = np.trapezoid(density(x - scores) * others, x[:, 0], axis=0)
    return law / law.sum()


EXPONENTIAL = (lambda x: -np.expm1(-np.maximum(x, 0.0)), lambda x: np.where(x >= 0.0, np.exp(-np.maximum(x, 0.0)), 0.0))
LAPLACE = (laplace.cdf, laplace.pdf)


@pytest.mark.parametrize(("noise", "law"), [("exponential", EXPONENTIAL), ("laplace", LAPLACE)])
@pytest.mark.parametrize("m", [2, 3, 4])
def test_laplace_pair_dominates_noisy_maxima(noise, law, m):
    epsilon, rng = 0.8, np.random.default_rng(m)  # the scores have sensitivity 1 and noise of scale 2/epsilon
    at = np.array([0.0, 0.1, 0.3, 0.6, 0.75])
    limit = ja.delta(ja.ReportNoisyMax(epsilon, noise=noise), at).upper
    assert limit == pytest.approx(-np.expm1((at - epsilon) / 2), rel=1e-3)  # delta of Laplace noise of scale 1/epsilon
    largest = 0.0
    for turn in range(6):
        scores, inside = rng.choice([0.0, 0.4, 1.0, 3.0, 8.0], m), rng.integers(1, m)
        if turn == 0:  # only two candidates have a chance, and their order is reversed
            scores, inside = np.concatenate([[0.0, 1.0], np.full(m - 2, -30.0)]), 1
        moved = scores + np.where(np.arange(m) < inside, 1.0, -1.0)
        p, q = (chances_of_the_largest(u * epsilon / 2, *law, 40.0) for u in (moved, scores))
        for a, b in ((p, q), (q, p)):
            exact = np.array([np.sum(np.maximum(a - np.exp(s) * b, 0.0)) for s in at])
            assert np.all(exact <= limit * (1.0 + 1e-3) + 1e-4)  # the quadrature is good to 1e-4
            largest = max(largest, exact[0] / limit[0])
    assert largest > (0.99 if noise == "exponential" else 0.4)


def test_permute_and_flip_composed():
    runs = ja.repeat(ja.ReportNoisyMax(0.1, noise="exponential"), 100)
    assert ja.epsilon(runs, 1e-5).upper == pytest.approx(
        ja.epsilon(ja.repeat(ja.Laplace(10.0), 100), 1e-5).upper, rel=1e-3
    )
    assert ja.epsilon(ja.ReportNoisyMax([0.0, 0.5]), 0.0).upper == pytest.approx([0.0, 0.5], rel=1e-12)
    assert ja.verify(runs, ja.epsilon(runs, 1e-5), delta=1e-5).status == "verified"


@pytest.mark.slow
def test_selections_of_many_candidates_have_the_bound_by_moments():
    found = ja.epsilon(selection.select(ja.Laplace(1.0), selection.Poisson(1e10)), 1e-5)
    assert found.lower < found.upper < 67.7


@pytest.mark.slow
def test_an_accountant_warns_of_ends_far_apart():
    accountant = interop.CertifiedAccountant()
    accountant.compose(dp_event.RepeatAndSelectDpEvent(dp_event.LaplaceDpEvent(1.0), 1e10, np.inf))
    with pytest.warns(UserWarning, match=r"between 16\.4.* and 59\.8"):
        assert accountant.get_epsilon(1e-5) < 67.7
