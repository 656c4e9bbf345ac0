"""Lower bounds from counts and scores: against exact binomial laws, brute-force p-values and Gaussians."""

import math

import numpy as np
import pytest
from helpers import refusal
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from training_cases import gaussian_epsilon

from jaxacct.audit import clopper_pearson, coin_guesses, from_scores, gaussian_fit, one_run, one_run_p_value
from jaxacct.audit.error_counts import upper_limit
from jaxacct.core.validation import InputError


@settings(deadline=None, max_examples=100)
@given(st.integers(1, 10**6), st.floats(0, 1), st.floats(-12, -0.01))
def test_limits_are_those_of_the_binomial_law(trials, share, log_error):
    hits, error = int(share * trials), 10.0**log_error
    limit = float(upper_limit(hits, trials, error))
    if hits == trials:
        assert limit == 1.0
    else:
        found = stats.binom.cdf(hits, trials, limit)
        assert found <= error * (1 + 1e-9)
        if limit < 1 - 1e-4:  # the allowance for rounding is 1e-10 of the limit
            assert found == pytest.approx(error, rel=1e-4)


@pytest.mark.parametrize("relation", ["add_or_remove_one", "remove_one", "add_one"])
@pytest.mark.parametrize(("epsilon", "delta"), [(1.0, 0.0), (0.3, 0.02), (0.0, 0.1)])
def test_clopper_pearson_covers_by_the_exact_law_of_the_counts(epsilon, delta, relation):
    """For the (epsilon, delta)-DP pair that is easiest to tell apart, the bound is wrong with chance <= `error`."""
    runs, error = 60, 0.1
    q = (1 - delta) / (1 + math.exp(epsilon))  # FPR = FNR, on the line FNR = 1 - delta - e^epsilon FPR
    k = np.arange(runs + 1)
    found = clopper_pearson(k[:, None], runs, k, runs, delta=delta, confidence=1 - error, relation=relation)
    weight = stats.binom.pmf(k, runs, q)
    wrong = weight @ (found.epsilon > epsilon) @ weight
    assert wrong <= error
    assert weight @ found.epsilon @ weight < epsilon + 0.05  # the mean; it is nearly 0 where epsilon is 0
    if relation == "add_or_remove_one":
        sides = [
            clopper_pearson(k[:, None], runs, k, runs, delta=delta, confidence=1 - error, relation=name).epsilon
            for name in ("remove_one", "add_one")
        ]
        np.testing.assert_array_equal(found.epsilon, np.maximum(*sides))
        np.testing.assert_allclose(sides[0], sides[1].T)


def test_clopper_pearson_is_the_formula():
    found = clopper_pearson(3, 500, 120, 400, delta=1e-3, confidence=0.98)
    fpr, fnr = stats.beta.ppf(0.99, 4, 497), stats.beta.ppf(0.99, 121, 280)
    assert found.epsilon == pytest.approx(math.log((1 - 1e-3 - fnr) / fpr), rel=1e-8)
    assert (found.trials, found.kind, found.confidence, found.delta) == (900, "lower bound", 0.98, 1e-3)
    assert clopper_pearson(500, 500, 400, 400, delta=0.0).epsilon == 0.0


def test_gaussian_fit_covers_and_finds():
    """Counts of mu-Gaussian DP at three thresholds of the same runs: the bound exceeds mu as rarely as promised."""
    rng, mu, runs, error, repeats = np.random.default_rng(0), 1.3, 400, 0.2, 3000
    cuts = np.array([0.3, 0.65, 1.0])
    absent, present = rng.normal(size=(repeats, runs, 1)), rng.normal(mu, 1.0, (repeats, runs, 1))
    found = gaussian_fit((absent > cuts).sum(1), runs, (present <= cuts).sum(1), runs, delta=1e-5, confidence=1 - error)
    wrong = np.mean(found.mu > mu)
    assert 0.003 < wrong <= error + 4 * math.sqrt(error / repeats)
    assert np.mean(found.mu) > 0.8 * mu
    for i in range(3):
        assert found.epsilon[i] == pytest.approx(gaussian_epsilon(found.mu[i]), rel=1e-6)
    assert np.all((found.epsilon > gaussian_epsilon(mu)) == (found.mu > mu))


def brute_p_value(epsilon, v, r, m, delta):
    q = 1 / (1 + math.exp(-epsilon))
    tail = lambda k: float(stats.binom.sf(k - 1, r, q))
    return tail(v) + 2 * m * delta * max((tail(v - i) - tail(v)) / i for i in range(1, v + 1))


@settings(deadline=None, max_examples=50)
@given(st.floats(0, 6), st.integers(1, 200), st.floats(0, 1), st.integers(0, 300), st.floats(-9, -1))
def test_one_run_p_value_against_sums_of_tails(epsilon, r, share, more, log_delta):
    v, m, delta = max(int(share * r), 1), r + more, 10.0**log_delta
    brute, found = brute_p_value(epsilon, v, r, m, delta), one_run_p_value(epsilon, v, r, m, delta)
    if 2 * m * delta <= 1:
        assert found == pytest.approx(min(brute, 1.0), rel=1e-8, abs=1e-14)
    else:
        assert found >= min(brute, 1.0) * (1 - 1e-8)
        assert np.all(np.diff(one_run_p_value(np.linspace(0, 8, 50), v, r, m, delta)) >= -1e-12)


def test_one_run_inverts_its_p_value_in_one_batch():
    v, m = np.array([60, 90, 100, 30]), np.array([[100], [1000]])
    found = one_run(v, 100, m, delta=1e-5, confidence=0.95)
    assert found.epsilon.shape == (2, 4) and np.all(found.epsilon[:, 3] == 0.0) and np.all(found.epsilon[:, :3] > 0)
    for (i, j), epsilon in np.ndenumerate(found.epsilon[:, :3]):
        assert brute_p_value(epsilon, v[j], 100, m[i, 0], 1e-5) == pytest.approx(0.05, rel=1e-6)
    assert one_run(0, 10, 10, delta=0.0).epsilon == 0.0


@pytest.mark.parametrize("epsilon", [0.0, 0.5, 2.0])
def test_one_run_covers_by_the_exact_law_of_randomised_response(epsilon):
    """The bound from 80 guesses by randomised response, of which Bin(80, q) are right, is wrong with chance <= .1."""
    k, q = np.arange(81), 1 / (1 + math.exp(-epsilon))
    found = one_run(k, 80, 80, delta=0.0, confidence=0.9).epsilon
    weight = stats.binom.pmf(k, 80, q)
    assert 0.03 < weight @ (found > epsilon + 1e-9) <= 0.1


def test_one_run_allows_for_delta():
    """To reveal m coins with chance delta is (0, delta)-DP. All guesses are right with chance delta + (1-delta)/2^m."""
    for m, delta in [(20, 1e-3), (200, 1e-6)]:
        assert one_run_p_value(0.0, m, m, m, delta) >= delta + (1 - delta) * 2.0**-m


def test_coin_guesses_take_both_ends():
    rng = np.random.default_rng(1)
    scores, included = rng.normal(size=50), rng.random(50) < 0.5
    correct, guesses = coin_guesses(scores, included, 7, 5)
    ranked = sorted(range(50), key=lambda i: scores[i])
    assert guesses == 12
    assert correct == sum(included[i] for i in ranked[-7:]) + sum(not included[i] for i in ranked[:5])
    assert coin_guesses(scores, included, 0, 0) == (0, 0)


CHOSEN, NONE = [0.3, 0.5, 0.7, 0.9], None


@pytest.mark.parametrize(
    ("method", "thresholds", "repeats"),
    [
        ("clopper_pearson", NONE, 100),
        *(
            pytest.param(method, thresholds, 150, marks=pytest.mark.slow)
            for method in ("clopper_pearson", "gaussian_fit")
            for thresholds in (NONE, CHOSEN)
        ),
    ],
)
def test_scores_cover_however_thresholds_are_chosen(method, thresholds, repeats):
    """The bound is wrong as rarely as promised. The largest of many uncorrected bounds is wrong far too often."""
    rng, runs, error = np.random.default_rng(2), 300, 0.2
    gaussian = method == "gaussian_fit"
    delta = 1e-5 if gaussian else 0.0
    truth = gaussian_epsilon(1.0) if gaussian else 0.5
    wrong, counts = 0, []
    for _ in range(repeats):
        absent, present = rng.normal(size=(2, runs)) + np.array([[0.0], [1.0]])
        if not gaussian:
            # u = 1 - score: below 1/(1 + e^0.5) its density is 1 in `absent`, e^0.5 in `present`; thresholds are alike
            absent, present = 1 - rng.random(runs), 1 - np.interp(rng.random(runs), [0, 0.622459, 1], [0, 0.377541, 1])
        found = from_scores(absent, present, thresholds=thresholds, delta=delta, confidence=1 - error, method=method)
        assert found.trials == (runs if thresholds is None else 2 * runs)
        wrong += found.epsilon > truth
        cuts = np.sort(np.concatenate([absent, present]))[:, None]
        counts.append([(absent > cuts).sum(1), (present <= cuts).sum(1)])
    false, missed = np.array(counts).transpose(1, 0, 2)
    if gaussian:
        single = gaussian_fit(false[..., None], runs, missed[..., None], runs, delta=0.5, confidence=1 - error)
        naive = np.sum(np.max(single.mu, axis=1) > 1)
    else:
        single = clopper_pearson(false, runs, missed, runs, delta=delta, confidence=1 - error)
        naive = np.sum(np.max(single.epsilon, axis=1) > truth)
    assert wrong / repeats <= error + 4 * math.sqrt(error / repeats) < naive / repeats


def test_scores_find_most_of_a_gaussian():
    rng, mu = np.random.default_rng(3), 2.0
    absent, present = rng.normal(size=100_000), rng.normal(mu, 1.0, 100_000)
    fit = from_scores(absent, present, delta=1e-5, confidence=0.99, method="gaussian_fit")
    assert 0.96 * mu < fit.mu < mu and fit.kind == "conditional: Gaussian DP"
    assert 0.4 * gaussian_epsilon(mu) < from_scores(absent, present, delta=1e-5, confidence=0.99).epsilon
    worse = from_scores(present, absent, delta=1e-5, confidence=0.99)  # the rule guesses the wrong way round
    assert worse.epsilon == 0.0


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: clopper_pearson(5, 4, 0, 9, delta=0.1), "false_positives = 5 must be <= absent = 4"),
        (lambda: clopper_pearson([1, 2], 4, [1, 5], 4, delta=0.1), r"false_negatives\[1\] = 5 must be <= present = 4"),
        (lambda: clopper_pearson(0.5, 4, 0, 9, delta=0.1), "whole number"),
        (lambda: clopper_pearson(0, 4, 0, 9, delta=1.0), "delta = 1.0"),
        (lambda: clopper_pearson(0, 4, 0, 9, delta=0.1, confidence=1.0), "confidence = 1.0"),
        (lambda: clopper_pearson(0, 4, 0, 9, delta=0.1, confidence=[0.9]), "confidence must be one number"),
        (lambda: clopper_pearson(0, 4, 0, 9, delta=0.1, relation="replace"), "relation = 'replace' is not known"),
        (lambda: gaussian_fit(0, 4, 0, 9, delta=0.0), "delta = 0.0"),
        (lambda: one_run(5, 4, 9, delta=0.1), "correct = 5 must be <= guesses = 4"),
        (lambda: one_run(3, [4, 12], 9, delta=0.1), r"guesses\[1\] = 12 must be <= canaries = 9"),
        (lambda: coin_guesses([1.0, 2.0], [True, False], 2, 1), r"positive \+ negative = 3 must be <= 2"),
        (lambda: coin_guesses([1.0, math.nan], [True, False], 1, 1), r"scores\[1\] = nan"),
        (lambda: from_scores([1.0, math.nan], [1.0, 2.0], delta=0.1), "absent must be scores"),
        (lambda: from_scores([1.0, 2.0], [1.0, 2.0], delta=0.1, thresholds=[]), "thresholds must be"),
        (lambda: from_scores([1.0, 2.0], [1.0, 2.0], delta=0.1, method="best"), "method = 'best' is not known"),
    ],
)
def test_bad_input_is_refused_in_one_line(call, words):
    with pytest.raises(InputError, match=words) as refusal:
        call()
    assert "\n" not in str(refusal.value)


def test_scores_say_for_which_relation_they_bound_epsilon():
    """Of the two inequalities of DP, that of add_one gives the larger epsilon here; remove_one has only the other."""
    absent, present = np.arange(200.0) / 100.0, np.full(200, 1.9)
    ask = lambda relation: from_scores(absent, present, delta=1e-5, thresholds=[1.5], relation=relation)
    found = {relation: ask(relation) for relation in ("add_or_remove_one", "zero_out", "remove_one", "add_one")}
    assert all(each.relation == relation for relation, each in found.items())
    assert found["remove_one"].epsilon < found["add_one"].epsilon == found["zero_out"].epsilon
    assert "zero_out" in repr(found["zero_out"]) and "one" not in repr(found["add_or_remove_one"])
    fitted = from_scores(absent, present, delta=1e-5, method="gaussian_fit", relation="zero_out")
    assert fitted.relation == "zero_out"
    assert "relation = 'replace_one'" in refusal(from_scores, absent, present, delta=1e-5, relation="replace_one")
