"""Selections among candidates that depend on each other: `sum_k p_k delta_k`, by arithmetic of its own."""

import itertools
import math

import numpy as np
import pytest
from helpers import refusal
from scipy.stats import binom, nbinom, norm, poisson
from selection_cases import hockey_stick

import jaxacct as ja
from jaxacct import selection
from jaxacct.interop import from_json, to_json
from jaxacct.mechanisms import components
from jaxacct.selection import adaptive as adaptive_selection
from jaxacct.selection.adaptive import weights

MU = 0.2680511  # a (1, 1e-5)-DP Gaussian
BASE = ja.Gaussian(1.0 / MU)


def adaptive(run, law):
    return selection.select(run, law, candidates="adaptive")


def gaussian_delta(mu, eps):
    return norm.cdf(0.5 * mu - eps / mu) - np.exp(eps + norm.logcdf(-0.5 * mu - eps / mu))


def mixture(p, eps, mu=MU):
    """sum_k p_k delta_k(eps) of a Gaussian base; p_0 counts for nothing at eps >= 0."""
    return math.fsum(share * gaussian_delta(mu * math.sqrt(k), eps) for k, share in enumerate(p) if k and share)


def randomized(k, ratio):
    """H_E of randomised response with .75, k times, by the binomial law of how often it tells the truth."""
    j = np.arange(k + 1)
    return float(np.sum(np.maximum(binom.pmf(j, k, 0.75) - ratio * binom.pmf(j, k, 0.25), 0.0)))


def test_the_law_of_the_theorem_on_randomised_response():
    run, law = ja.RandomizedResponse(0.75), [0.1, 0.3, 0.35, 0.25]
    ratios = [1.0, 2.0, 5.0, 8.0, 20.0]
    found = ja.delta(adaptive(run, selection.Categorical(law)), np.log(ratios))
    truth = [sum(p * randomized(k, ratio) for k, p in enumerate(law) if k) for ratio in ratios]
    np.testing.assert_allclose(truth, [0.496875, 0.360938, 0.173438, 0.096094, 0.027344], atol=5e-7)
    assert (found.lower <= np.array(truth) + 1e-15).all() and (np.array(truth) <= found.upper + 1e-15).all()
    np.testing.assert_allclose(found.upper, truth, rtol=1e-6)
    assert set(found.kind.tolist()) == {"certified"}


def test_below_eps_0_what_is_released_without_a_run_counts(monkeypatch):
    monkeypatch.setattr(adaptive_selection, "COMPOSED_POINTS", 81)
    law, ratio = [0.1, 0.5, 0.4], 0.3
    run = adaptive(ja.RandomizedResponse(0.75), selection.Categorical(law))
    truth = sum(p * randomized(k, ratio) for k, p in enumerate(law))
    for direction in ("remove", "add"):
        part = components(run, "add_or_remove_one", direction)
        loss, mass = part.finite_loss[0, 0], part.finite_mass[0, 0]
        upper = float(np.sum(mass * np.maximum(1.0 - ratio * np.exp(-loss), 0.0)) + part.delta_infinity[0])
        assert truth - 1e-9 <= upper <= truth + 1e-3


def test_the_counterexample_is_covered_and_i_i_d_is_not():
    """The list has a fixed order; K is 1 or 2. (2, H) beats only (1, H), so its release needs K = 2 and two H."""
    run, law = ja.RandomizedResponse(0.75), selection.Categorical([0.0, 0.5, 0.5])
    eps = np.log([2.0, 3.0, 4.0, 5.0, 8.0])
    found = ja.delta(adaptive(run, law), eps)
    np.testing.assert_allclose(found.upper, [0.34375, 0.1875, 0.15625, 0.125, 0.03125], rtol=1e-6)
    score = {(1, "H"): 0, (2, "H"): 1, (1, "L"): 2, (2, "L"): 3}
    laws = []
    for truth in (0.75, 0.25):
        released = dict.fromkeys(score, 0.0)
        for count in (1, 2):
            for word in itertools.product("HL", repeat=count):
                best = max(enumerate(word, 1), key=lambda one: score[one])
                released[best] += 0.5 * math.prod(truth if letter == "H" else 1 - truth for letter in word)
        laws.append(np.array(list(released.values())))
    leaked = hockey_stick(*laws, eps)
    assert leaked[3] == pytest.approx(0.125) and (leaked <= found.upper + 1e-12).all()
    assert float(ja.delta(selection.select(run, law), eps[3]).upper) < 1e-10  # what the i.i.d. answer says


def test_no_strategy_on_a_small_base_leaks_more_and_one_leaks_as_much():
    """The strategy that leaks most: each output contains all earlier outputs, and the last one is released."""
    p, q, law = np.array([0.5, 0.3, 0.2]), np.array([0.1, 0.3, 0.6]), np.array([0.2, 0.5, 0.3])
    run = adaptive(ja.FiniteOutput(p, q), selection.Categorical(law))
    eps = np.array([0.0, 0.3, 1.0, 2.0])
    told = [np.concatenate([[law[0]], law[1] * x, law[2] * np.outer(x, x).ravel()]) for x in (p, q)]
    for relation, pair in (("remove_one", told), ("add_one", told[::-1])):
        found = ja.delta(run, eps, relation=relation)
        truth = hockey_stick(*pair, eps)
        assert (found.lower <= truth + 1e-12).all() and (truth <= found.upper + 1e-12).all()
        np.testing.assert_allclose(found.upper, truth, rtol=1e-6, atol=1e-12)
    rng = np.random.default_rng(7)
    for _ in range(60):
        # a random strategy: the first output sets the labels of the second candidate's outputs; the best score wins
        maps, scores = rng.integers(0, 3, (3, 3)), rng.permutation(6)
        laws = []
        for x in (p, q):
            released = np.zeros(7)
            released[6] += law[0]
            released[:3] += law[1] * x
            for a, b in itertools.product(range(3), repeat=2):
                second = 3 + maps[a, b]
                released[a if scores[a] > scores[second] else second] += law[2] * x[a] * x[b]
            laws.append(released)
        for relation, pair in (("remove_one", laws), ("add_one", laws[::-1])):
            assert (hockey_stick(*pair, eps) <= ja_upper(run, eps, relation) + 1e-12).all()


_seen = {}


def ja_upper(run, eps, relation):
    key = relation, eps.tobytes()
    if key not in _seen:
        _seen[key] = np.asarray(ja.delta(run, eps, relation=relation).upper)
    return _seen[key]


@pytest.mark.parametrize(
    ("law", "p", "eps"),
    [
        (selection.PointMass(10), np.eye(11)[10], 3.619),
        (selection.Poisson(10.0), poisson.pmf(np.arange(90), 10.0), 4.266),
        (selection.Geometric(0.1), np.append(0.0, 0.1 * 0.9 ** np.arange(400)), 8.017),
        (selection.Poisson(64.0), poisson.pmf(np.arange(200), 64.0), 11.47),
        (selection.Geometric(1 / 64), np.append(0.0, (1 - 1 / 64) ** np.arange(3000) / 64), 33.4),
        (selection.Binomial(20, 0.5), binom.pmf(np.arange(21), 20, 0.5), None),
        (selection.TwoPoint(1, 50, 0.3), np.eye(51)[1] * 0.3 + np.eye(51)[50] * 0.7, None),
        (
            selection.TruncatedNegativeBinomial(3.0, 0.2),
            np.append(0.0, nbinom.pmf(np.arange(1, 300), 3, 0.2) / (1 - 0.2**3)),
            None,
        ),
    ],
    ids=lambda x: type(x).__name__,
)
def test_a_gaussian_base_against_the_sum_written_out(law, p, eps):
    found = ja.epsilon(adaptive(BASE, law), 1e-5)
    if eps is not None:
        assert found.upper == pytest.approx(eps, rel=4e-4)
    assert found.upper - found.lower <= 2e-4 * found.upper and found.kind == "certified" and found.ok
    assert mixture(p, found.upper) <= 1e-5 * (1 + 1e-7) and mixture(p, found.lower) >= 1e-5 * (1 - 1e-7)
    at = ja.delta(adaptive(BASE, law), 2.5)
    assert at.lower * (1 - 1e-9) <= mixture(p, 2.5) <= at.upper * (1 + 1e-9) and at.upper <= at.lower * 1.001


@pytest.mark.parametrize(
    ("law", "delta"),
    [
        (selection.Poisson(1e300), 1e-5),
        pytest.param(selection.Geometric(1e-9), 1e-5, marks=pytest.mark.slow),
        pytest.param(selection.Poisson(10.0), 1e-295, marks=pytest.mark.slow),
    ],
)
def test_extreme_laws_and_deltas_are_said_to_be_wide(law, delta):
    found = ja.epsilon(adaptive(BASE, law), delta)
    assert found.upper == np.inf and found.status == "width" and found.lower < np.inf


def test_extreme_laws_bases_and_deltas_are_bracketed():
    assert ja.epsilon(adaptive(BASE, selection.Poisson(1e-300)), 1e-5).status == "zero"
    loud = ja.epsilon(adaptive(ja.Gaussian(1e-10), selection.Geometric(0.1)), 1e-5)
    # delta_k is 0 or 1 there, with a step at k/(2 sigma^2): Pr[K > k] = 1e-5 at k = 109.3
    assert 109 * 0.5e20 <= loud.lower <= loud.upper <= 110.1 * 0.5e20
    small = ja.epsilon(adaptive(BASE, selection.Poisson(10.0)), 1e-100)
    assert mixture(poisson.pmf(np.arange(300), 10.0), small.upper) <= 1e-100 * (1 + 1e-6)
    assert small.upper - small.lower <= 1e-4 * small.upper


def test_mass_at_infinity_and_delta_0():
    approximate = ja.ApproximateDP(1.0, 1e-4)
    assert ja.epsilon(adaptive(approximate, selection.Binomial(3, 0.5)), 1e-5).status == "mass_at_infinity"
    bounded = ja.epsilon(adaptive(ja.PureDP(1.0), selection.Binomial(5, 0.3)), 0.0)
    assert bounded.lower <= 5.0 <= bounded.upper <= 5.0 + 1e-12
    assert ja.epsilon(adaptive(ja.PureDP(1.0), selection.Poisson(3.0)), 0.0).lower == np.inf
    assert "delta[1] = 0 must be > 0" in refusal(
        ja.epsilon, adaptive(ja.Gaussian(1.0), selection.Poisson(3.0)), [1e-5, 0.0]
    )


def test_batches_are_their_elements():
    run, law = ja.Gaussian([[2.0], [3.0]]), selection.Poisson([2.0, 5.0])
    found = ja.epsilon(adaptive(run, law), 1e-6)
    assert found.shape == (2, 2)
    for i, j in ((0, 0), (1, 0)):
        one = ja.epsilon(adaptive(ja.Gaussian([2.0, 3.0][i]), selection.Poisson([2.0, 5.0][j])), 1e-6)
        assert found.upper[i, j] == one.upper and found.lower[i, j] == one.lower


def test_replacing_a_record_moves_a_gaussian_twice_as_far():
    law = selection.Poisson(5.0)
    one = ja.epsilon(adaptive(ja.Gaussian(2.0), law), 1e-5, relation="replace_one")
    other = ja.epsilon(adaptive(ja.Gaussian(1.0), law), 1e-5)
    assert one.upper == pytest.approx(float(other.upper), rel=1e-9)


def test_it_composes_from_above_and_exactly_where_k_is_fixed():
    fixed = adaptive(BASE, selection.PointMass(5))
    one, other = ja.epsilon(ja.repeat(fixed, 2), 1e-5), ja.epsilon(ja.repeat(BASE, 10), 1e-5)
    assert (one.lower, one.upper, one.kind) == (other.lower, other.upper, "certified")
    p = poisson.pmf(np.arange(60), 4.0)
    both = ja.epsilon(ja.compose(adaptive(BASE, selection.Poisson(4.0)), BASE), 1e-5)
    assert both.kind == "bound"
    # one more Gaussian turns the term of k runs into that of k + 1 runs
    truth = lambda eps: math.fsum(share * gaussian_delta(MU * math.sqrt(k + 1), eps) for k, share in enumerate(p))
    assert truth(both.upper) <= 1e-5 and truth(0.97 * both.upper) > 1e-5


def test_documents_say_which_and_old_ones_are_i_i_d():
    run = adaptive(BASE, selection.Geometric(0.1))
    assert from_json(to_json(run)) == run and '"AdaptiveSelection"' in to_json(run)
    assert from_json(to_json(run)).candidates == "adaptive"
    old = to_json(selection.select(BASE, selection.Geometric(0.1)))
    assert from_json(old).candidates == "iid"


def test_what_is_not_for_adaptive_candidates_is_refused():
    law = selection.Geometric(0.1)
    assert "is for i.i.d. candidates" in refusal(selection.select, BASE, law, bound="envelope", candidates="adaptive")
    assert "candidates = 'any'" in refusal(selection.select, BASE, law, candidates="any")
    assert "no worst order of scores" in refusal(selection.attack, BASE, law, delta=1e-5, candidates="adaptive")
    assert "must be a law of K" in refusal(selection.select, BASE, 3, candidates="adaptive")


@pytest.mark.parametrize(
    ("law", "truth"),
    [
        (selection.Poisson(700.0), lambda k: poisson.logpmf(k, 700.0)),
        (selection.Poisson(0.3), lambda k: poisson.logpmf(k, 0.3)),
        (selection.Binomial(500, 0.97), lambda k: binom.logpmf(k, 500, 0.97)),
        (selection.Geometric(1e-3), lambda k: math.log(1e-3) + (k - 1) * math.log1p(-1e-3)),
        (selection.Logarithmic(0.01), lambda k: k * math.log1p(-0.01) - np.log(k) - math.log(math.log(100.0))),
    ],
    ids=lambda x: type(x).__name__,
)
def test_the_weights_of_k_are_bracketed_and_nothing_is_left_out(law, truth):
    found = weights(law, 1e-12)
    exact = np.exp(truth(found.k))
    assert (found.low <= exact * (1 + 1e-10)).all() and (exact <= found.high * (1 + 1e-10) + 1e-280).all()
    assert np.all(np.diff(found.k) == 1.0) and found.above <= 1e-12 and found.below <= 1e-12
    assert np.sum(found.high - found.low) <= 1e-9


def test_noise_for_adaptive_candidates():
    law = selection.Poisson(10.0)
    found = ja.calibrate_noise_multiplier(4.266, 1e-5, 1.0, 1, repetitions=law, candidates="adaptive")
    assert found.ok and found.epsilon.upper <= 4.266
    assert float(found.value) == pytest.approx(1.0 / MU, rel=2e-3)


@pytest.mark.parametrize(
    "law", [selection.PointMass(3), pytest.param(selection.Poisson(0.1), marks=pytest.mark.slow)], ids=repr
)
@pytest.mark.parametrize("candidates", ["adaptive", "iid"])
def test_a_base_whose_pair_joins_several_is_only_bounded(law, candidates):
    """Sampling without replacement of an asymmetric law: its pair is attained eps by eps, not as a whole."""
    base = ja.SampledWithoutReplacement(ja.FiniteOutput([0.6, 0.3, 0.1], [0.2, 0.3, 0.5]), 0.5)
    assert ja.epsilon(ja.repeat(base, 3), 1e-3).kind == "bound"
    found = ja.epsilon(selection.select(base, law, candidates=candidates), 1e-3)
    assert found.kind == "bound" and found.lower == 0.0 < found.upper


def test_nodes_added_in_the_last_round_have_their_deltas(monkeypatch):
    run = adaptive(ja.dp_sgd(1.0, 0.01, 100), selection.Geometric(0.01))
    narrow = ja.delta(run, 2.0)
    monkeypatch.setattr(adaptive_selection, "MOST_ROUNDS", 1)
    wide = ja.delta(run, 2.0)
    assert wide.lower <= narrow.lower <= narrow.upper <= wide.upper


@pytest.mark.parametrize(
    ("base", "delta", "relation"),
    [
        (ja.FiniteOutput([0.7, 0.2, 0.1], [0.5, 0.2, 0.3]), 0.2, "replace_one"),
        (ja.FiniteOutput([0.7, 0.2, 0.1], [0.5, 0.2, 0.3]), 0.1, "replace_one"),
        pytest.param(
            ja.TruncatedPoissonSampled(ja.Gaussian(1.5), 0.1, 100, 14),
            0.021,
            "add_or_remove_one",
            marks=pytest.mark.slow,
        ),
        (ja.RandomAllocation(ja.Gaussian(1.1), 10), 1e-5, "add_or_remove_one"),
    ],
)
def test_epsilon_of_a_bound_is_where_delta_meets_the_target(base, delta, relation):
    """The search took half the upper end of delta for its estimate: epsilon was 1e287, "ok", for .0834."""
    chosen = selection.select(base, selection.Categorical([0.2, 0.4, 0.4]), candidates="adaptive")
    found = float(ja.epsilon(chosen, delta, relation=relation).upper)
    below, at = (ja.delta(chosen, x, relation=relation).upper for x in (0.97 * found, 1.0001 * found))
    assert at <= delta < below and found < 10.0


def test_a_target_at_the_mass_at_infinity_is_no_error():
    """The search had no right end, and asked for delta at NaN."""
    base = ja.FiniteOutput([0.0, 1.0], [1.0, 0.0])
    found = ja.epsilon(selection.select(base, selection.Categorical([0.2, 0.4, 0.4]), candidates="adaptive"), 0.8)
    assert found.lower == 0.0 and found.status == "width"
