"""Mechanisms known by a profile or a theorem: dominating pairs of points, exponential mechanism, noisy max."""

import itertools
import math
import time
from dataclasses import dataclass

import numpy as np
import pytest
from helpers import refusal
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import norm

import jaxacct as ja
from jaxacct import selection
from jaxacct.mechanisms import directions
from jaxacct.mechanisms.base import register
from jaxacct.mechanisms.profile import BracketedProfile, pair_above, pair_below, pair_of_profile


def profile_of(pair, eps):
    """delta(eps) of a finite pair in the remove direction, by definition."""
    gain = np.maximum(pair.p - np.exp(eps)[:, None] * pair.q, 0.0)
    return gain.sum(-1) + pair.p_infinity


def hull(eps, delta, reverse, alphas):
    """Return the largest convex falling profile below the points: at each alpha, the lowest of all chords."""
    xs = [0.0, *np.exp(-eps), *np.exp(eps)]
    ys = [1.0, *(1 - np.exp(-eps) + np.exp(-eps) * reverse), *delta]
    xs, ys = [*xs, 1e15], [*ys, min(ys)]
    points = list(zip(xs, ys, strict=True))
    out = []
    for a in alphas:
        chords = [
            y0 + (y1 - y0) * (a - x0) / (x1 - x0)
            for (x0, y0), (x1, y1) in itertools.permutations(points, 2)
            if x0 <= a <= x1 and x0 < x1
        ]
        out.append(min([*chords, *(y for x, y in points if x <= a)]))
    return np.array(out)


levels = st.floats(0.0, 1.0)


points = st.tuples(st.integers(0, 300).map(lambda x: 0.01 * x), levels, levels)


@given(st.lists(points, min_size=1, max_size=6, unique_by=lambda point: point[0]))
@settings(max_examples=150, deadline=None)
def test_pair_of_random_points_has_their_hull_as_its_profile(chosen):
    eps, delta, reverse = (np.array(column) for column in zip(*sorted(chosen), strict=True))
    pair = pair_of_profile(eps, delta, reverse)
    assert np.sum(pair.p) + pair.p_infinity == pytest.approx(1.0, abs=1e-9)
    assert np.sum(pair.q) + pair.q_infinity == pytest.approx(1.0, abs=1e-9)
    alphas = np.exp(np.linspace(-3.2, 3.2, 33))
    got = profile_of(pair, np.log(alphas))
    expected = hull(eps, delta, reverse, alphas)
    assert np.all(got >= expected - 1e-12)
    np.testing.assert_allclose(got, expected, atol=1e-9)


@pytest.mark.parametrize("unknown", [slice(None), slice(0, 1), slice(10, 20), slice(39, None)])
def test_a_delta_that_is_nan_is_anything_from_0_to_1(unknown):
    eps = np.linspace(0.0, 6.0, 40)
    delta = np.asarray(ja.delta(ja.Gaussian(1.0), eps).estimate)
    known = BracketedProfile(eps, delta * (1 - 1e-9), delta * (1 + 1e-9))
    ends = known.lower.copy(), known.upper.copy()
    for end in ends:
        end[unknown] = np.nan
    some = BracketedProfile(eps, *ends)
    at = np.linspace(-6.0, 6.0, 241)
    truth = np.asarray(ja.delta(ja.Gaussian(1.0), np.abs(at)).estimate)
    truth = np.where(at < 0.0, 1.0 - np.exp(at) * (1.0 - truth), truth)
    for given_profiles in ((known, some), (some, known), (some, some)):
        assert np.all(profile_of(pair_above(*given_profiles), at) >= truth * (1 - 1e-12))
        assert np.all(profile_of(pair_below(*given_profiles), at) <= truth * (1 + 1e-8))


def test_points_are_met_and_all_between_stays_above():
    gaussian = ja.Gaussian(1.0)
    eps = np.linspace(0.0, 8.0, 33)
    delta = ja.delta(gaussian, eps).upper
    known = ja.PrivacyProfile(eps, delta)
    np.testing.assert_allclose(ja.delta(known, eps).upper, delta, rtol=1e-8)
    between = 0.5 * (eps[1:] + eps[:-1])
    assert np.all(ja.delta(known, between).upper >= ja.delta(gaussian, between).lower)
    assert ja.delta(known, 20.0).upper == pytest.approx(delta[-1], rel=1e-12)


def test_a_fine_profile_composes_almost_like_the_mechanism():
    eps = np.linspace(0.0, 12.0, 1500)
    known = ja.PrivacyProfile(eps, ja.delta(ja.Gaussian(2.0), eps).upper)
    truth = ja.epsilon(ja.repeat(ja.Gaussian(2.0), 10), 1e-6)
    bounds = ja.epsilon(ja.repeat(known, 10), 1e-6)
    assert bounds.upper >= truth.lower and bounds.upper == pytest.approx(truth.upper, rel=1e-4)


def test_points_prove_no_lower_end():
    """The five points are on the Gaussian's profile. Between them, the profile that they prove lies far above it."""
    known = ja.profile_from_cdfs(norm(0.5, 1.0).cdf, norm(-0.5, 1.0).cdf, np.linspace(0.0, 8.0, 5))
    found, truth = ja.epsilon(known, 1e-5), ja.epsilon(ja.Gaussian(1.0), 1e-5)
    assert found.kind == "bound" and found.lower <= truth.upper < found.upper


def test_many_points_above_a_low_last_one_take_no_long_time():
    """If the last point is low, each pass over the points drops only one of them: all passes would take minutes."""
    epsilon = np.linspace(0.0, 20.0, 100_000)
    delta = np.append(0.5 * np.exp(-0.7 * epsilon[:-1]), 0.0)
    before = time.process_time()
    found = ja.delta(ja.PrivacyProfile(epsilon, delta), [1.0, 12.0]).upper
    assert time.process_time() - before < 20.0
    assert np.all(found <= 0.5 * np.exp(-0.7 * np.array([1.0, 12.0])) * (1.0 + 1e-3))


@pytest.mark.parametrize("delta", [0.0, 1e-7])
def test_one_point_is_approximate_dp(delta):
    known, same = (ja.repeat(m, 20) for m in (ja.PrivacyProfile([0.3], [delta]), ja.ApproximateDP(0.3, delta)))
    one, two = ja.epsilon(known, 1e-4), ja.epsilon(same, 1e-4)
    assert one.upper == pytest.approx(two.upper, rel=1e-9)


def test_asymmetric_points_give_back_a_finite_pair():
    p, q = np.array([0.5, 0.3, 0.15, 0.05]), np.array([0.2, 0.35, 0.45, 0.0])
    base = ja.FiniteOutput(p, q)
    eps = np.sort([0.0, *np.abs(np.log(p[:3] / q[:3]))])
    known = ja.PrivacyProfile(eps, *(ja.delta(base, eps, relation=r).upper for r in ("remove_one", "add_one")))
    assert directions(known, "add_or_remove_one") == ("remove", "add")
    for relation in ("remove_one", "add_one"):
        for rate in (1.0, 0.2):
            one, two = (
                ja.delta(ja.repeat(ja.PoissonSampled(m, rate), 3), 0.4, relation=relation) for m in (known, base)
            )
            assert one.upper == pytest.approx(two.upper, rel=1e-7)


def test_a_batch_of_profiles():
    batch = ja.PrivacyProfile([0.0, 1.0], [[0.5, 0.1], [0.2, 0.01]])
    assert batch.delta.shape == (2, 2)
    np.testing.assert_allclose(ja.delta(batch, 1.0).upper, [0.1, 0.01], rtol=1e-11)


def test_profile_from_distribution_functions():
    """Ten Laplace steps known by distribution functions, with atoms at both ends, cost what the mechanism costs."""
    top = 0.5

    def laplace_p(x):
        x = np.asarray(x)
        return np.where(x < -top, 0.0, np.where(x >= top, 1.0, 0.5 * np.exp(0.5 * (x - top))))

    def laplace_q(x):
        x = np.asarray(x)
        return np.where(x < -top, 0.0, np.where(x >= top, 1.0, 1.0 - 0.5 * np.exp(-0.5 * (x + top))))

    known = ja.profile_from_cdfs(laplace_p, laplace_q, np.linspace(0.0, 0.6, 601))
    for relation in ("remove_one", "add_one"):
        truth = ja.epsilon(ja.repeat(ja.Laplace(2.0), 10), 1e-4, relation=relation, rtol=1e-3)
        bounds = ja.epsilon(ja.repeat(known, 10), 1e-4, relation=relation, rtol=1e-3)
        assert truth.lower <= bounds.upper <= truth.upper * (1 + 1e-3)
    assert "p_cdf[0] = 1.5" in refusal(ja.profile_from_cdfs, lambda x: x + 1.5, laplace_q, [0.0, 1.0])


def test_refusals():
    assert "epsilon[1] = 0.5 must be 1e-09 or more above the one before" in refusal(
        ja.PrivacyProfile, [0.5, 0.5], [0.1, 0.1]
    )
    assert "epsilon[0] = 1e-12 must be 0, or 1e-09 or more" in refusal(ja.PrivacyProfile, [1e-12, 1.0], [0.1, 0.1])
    assert "the same number" in refusal(ja.PrivacyProfile, [0.5, 1.0], [0.1])
    assert "delta[0] = 2.0" in refusal(ja.PrivacyProfile, [0.5], [2.0])
    assert "noise = 'uniform'" in refusal(ja.ReportNoisyMax, 1.0, "uniform")
    assert "monotone = 1" in refusal(ja.GaussianNoisyMax, 1.0, 5, 1)
    assert "candidates = 0.5 must be an integer" in refusal(ja.GaussianNoisyMax, 1.0, 0.5)


# Exponential mechanism and noisy max


@pytest.mark.parametrize("epsilon", [1e-6, 0.5, 3.0, 40.0])
def test_one_exponential_mechanism_against_its_closed_form(epsilon):
    share = np.array([0.0, 0.3, 0.8])
    truth = np.square(np.expm1(-0.5 * epsilon * (1.0 - share))) / -math.expm1(-epsilon)
    bounds = ja.delta(ja.ExponentialMechanism(epsilon), epsilon * share)
    assert np.all(bounds.upper >= truth) and bounds.kind[0] == "bound" and np.all(bounds.lower == 0.0)
    np.testing.assert_allclose(bounds.upper, truth, rtol=1e-3 if epsilon > 10 else 1e-4)
    assert ja.epsilon(ja.ExponentialMechanism(epsilon), 0.0).upper == pytest.approx(epsilon, rel=1e-12)


@given(st.lists(st.floats(0.0, 1.0), min_size=3, max_size=3), st.floats(0.0, 1.0))
@settings(max_examples=10, deadline=None)
def test_compositions_of_bounded_range_steps_stay_below(shares, at):
    """The composition of three steps, each with two outcomes of losses t and t - 0.7, does not exceed the bound."""
    steps = []
    for share in shares:
        t = 0.7 * share
        likely = (math.exp(0.7) - math.exp(t)) / math.expm1(0.7)
        steps.append([(likely, likely * math.exp(-t)), (1 - likely, (1 - likely) * math.exp(0.7 - t))])
    eps = 2.1 * at
    outcomes = itertools.product(*steps)
    truth = math.fsum(
        max(math.prod(p for p, _ in o) - math.exp(eps) * math.prod(q for _, q in o), 0.0) for o in outcomes
    )
    assert ja.delta(ja.repeat(ja.ExponentialMechanism(0.7), 3), eps).upper >= truth * (1 - 1e-12)


def test_gumbel_is_the_exponential_mechanism_and_the_rest_laplace():
    laplace = lambda epsilon: ja.Laplace(1.0 / epsilon)
    for noise, same in (("gumbel", ja.ExponentialMechanism), ("laplace", laplace), ("exponential", laplace)):
        one, two = (ja.epsilon(ja.repeat(m, 30), 1e-6) for m in (ja.ReportNoisyMax(0.2, noise), same(0.2)))
        assert one.upper == pytest.approx(two.upper, rel=1e-4) and one.kind == "bound"
    assert ja.epsilon(ja.repeat(ja.ExponentialMechanism(0.2), 30), 1e-6).upper < two.upper
    assert two.upper < ja.epsilon(ja.repeat(ja.PureDP(0.2), 30), 1e-6).upper


@pytest.mark.parametrize(("monotone", "relation", "moves"), [
    (False, "add_or_remove_one", 2.0), (True, "add_or_remove_one", 1.0), (True, "replace_one", 2.0),
])  # fmt: skip
def test_gaussian_noisy_max_is_the_theorem(monotone, relation, moves):
    eps = np.array([0.0, 0.25, 0.5, 1.0, 2.0, 4.0])
    expected = 20 * ja.delta(ja.Gaussian(6.0 / moves), eps).upper
    bounds = ja.delta(ja.GaussianNoisyMax(6.0, 20, monotone), eps, relation=relation)
    assert bounds.kind[0] == "bound" and np.all(np.diff(bounds.upper) < 0) and bounds.upper[0] < 1.0
    tail = (expected < 0.02) & (expected > 1e-60)  # where `expected` is larger, convexity lowers the bound
    assert tail.sum() >= 2
    assert np.all(bounds.upper[tail] >= expected[tail] * (1 - 1e-12))
    np.testing.assert_allclose(bounds.upper[tail], expected[tail], rtol=2e-3)


def test_kinds_of_compositions():
    mixed = ja.compose(ja.repeat(ja.PoissonSampled(ja.ExponentialMechanism(0.1), 0.5), 3), ja.Gaussian(5.0))
    assert ja.epsilon(mixed, 1e-5).kind == "bound"
    assert ja.epsilon(ja.compose(ja.PureDP(0.1), ja.Gaussian(5.0)), 1e-5).kind == "certified"


def test_what_is_made_of_a_conditional_guarantee_is_conditional():
    assumed = selection.select(ja.Gaussian(4.0), selection.Geometric(0.1), bound="monotone_score")
    bound = ja.ExponentialMechanism(0.1)
    for run in (ja.compose(assumed, ja.Gaussian(5.0)), ja.compose(bound, assumed), ja.repeat(assumed, 2)):
        assert run.kind == run.kind_under("remove_one") == "conditional: monotone score"
    assert ja.compose(bound, ja.Gaussian(5.0)).kind == "bound"


def test_a_kind_that_nothing_asks_is_refused():
    with pytest.raises(TypeError, match="kind_under"):

        @register
        @dataclass(frozen=True, eq=False)
        class Mine(ja.Gaussian):
            kind = "bound"


def test_a_long_mechanism_prints_short():
    long = ja.PrivacyProfile(np.linspace(0.0, 5.0, 300), np.geomspace(1e-2, 1e-9, 300))
    for one in (long, ja.compose(long, ja.Gaussian(2.0)), ja.profile(ja.repeat(long, 3))):
        assert "shape=(300,)" in repr(one) and len(repr(one)) < 900
    many = ja.compose(*(ja.Gaussian(1.0 + i) for i in range(2000)))
    assert repr(many).endswith("Gaussian(noise_multiplier=8.0), ... 2,000 in all))")
