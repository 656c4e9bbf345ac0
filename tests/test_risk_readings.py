"""Readings of a risk: held against the reference table, closed forms, finite mechanisms by hand, and float64's ends."""

import html
import math
from fractions import Fraction

import numpy as np
import pytest
from helpers import refusal
from scipy.optimize import brentq
from scipy.stats import norm

import jaxacct as ja
from jaxacct.accounting import risk_readings
from jaxacct.accounting.risk_readings import Place, _cells, best_epsilon, gaussian_fit, rate_at
from jaxacct.core.text import outward, percent
from jaxacct.engines import lattice

# from shared/reference/risk.csv: noise, rate, steps; tpr at fpr .01 and .001; mu above the floor 1e-10; regret of mu
ROWS = np.array(
    [
        (1.0, 0.1, 1, 0.0182362248, 0.00272984684, 0.601927, 0.0991),
        (1.0, 0.01, 1000, 0.0291390946, 0.00406844788, 0.522201, 0.0225),
    ]
)
NOISE, RATE, STEPS, TPR_01, TPR_001, MU, REGRET = ROWS.T


@pytest.fixture(scope="module")
def table():
    return ja.risk(ja.dp_sgd(NOISE, RATE, STEPS))


def held(bounds, truth, above, below=1e-8):
    """The truth, rounded in the table, is inside, and the upper end is near it."""
    assert np.all(bounds.lower <= truth * (1 + below)) and np.all(bounds.upper >= truth * (1 - below))
    assert np.all(bounds.upper <= truth * (1 + above)) and np.all(bounds.ok)


def test_true_positive_rates_of_the_reference(table):
    for fpr, truth in ((0.01, TPR_01), (0.001, TPR_001)):
        found = table["true_positive_rate", fpr]
        held(found, truth, 1e-6)
        assert np.max(found.upper - found.lower) < 2e-6 and found.shape == (2,)


def test_mu_and_regret_of_the_reference(table):
    held(table["gdp_mu"], MU, 1e-5, 2e-6)
    held(table["gdp_regret"], REGRET, 5e-3, 5e-3)
    assert np.all(np.asarray(table["gdp_mu"].kind) == "certified")


def test_the_search_for_mu_ends_where_its_bracket_narrows_no_more(monkeypatch):
    rounds, lines = [], risk_readings._lines
    monkeypatch.setattr(risk_readings, "_lines", lambda *given: rounds.append(1) or lines(*given))
    found = ja.profile(ja.PoissonSampled(ja.Gaussian(1.0), 0.1)).gdp_mu(1e-10)
    assert len(rounds) <= 3 and found.relative_width <= 2e-6


def test_mu_holds_between_the_tangents_and_is_larger_above_a_lower_floor():
    # T = 1: f of removing is known in closed form, and f_mu must lie below it everywhere above the floor
    floors, q = np.array([1e-13, 1e-6, 1e-2]), 0.1
    found = ja.profile(ja.PoissonSampled(ja.Gaussian(1.0), q)).gdp_mu(floors)
    assert np.all(found.lower[:-1] > found.upper[1:])
    for floor, mu in zip(floors, found.upper, strict=True):
        a = np.geomspace(floor, 0.9, 4001)
        removed = (1 - q) * a + q * norm.sf(norm.isf(a) - 1.0)  # the true-positive rate
        covered = 1 - removed >= floor
        assert np.all(removed[covered] <= norm.sf(norm.isf(a[covered]) - mu) * (1 + 1e-12))
        # and no smaller mu does
        assert np.max(norm.isf(a) - norm.isf(removed)) >= mu * (1 - 1e-5)


def test_gaussians_have_their_mu_whatever_the_floor():
    found = ja.risk(ja.compose(ja.Gaussian([2.0, 1.0]), ja.Gaussian(2.0)), above_fpr=0.01)
    assert np.allclose(found["gdp_mu"].upper, np.sqrt([0.5, 1.25]), rtol=1e-12)
    assert found["gdp_regret"].upper.tolist() == [0.0, 0.0]


def test_a_finite_mechanism_by_hand():
    run = ja.RandomizedResponse(0.75)  # likelihood ratios 3 and 1/3: T(a) = min(3 a, 1 - (1 - a)/3)
    found = ja.risk(run, fpr=[0.1, 0.3], prior=[0.1, 0.4], baseline=0.2)
    assert abs(found["advantage"].upper - 0.5) < 1e-12
    for fpr in (0.1, 0.3):
        truth = min(3 * fpr, 1 - (1 - fpr) / 3)
        reading = found["true_positive_rate", fpr]
        assert reading.lower <= truth <= reading.upper <= truth + 1e-4
        reading = found["posterior", 0.4, fpr]
        exact = 0.4 * truth / (0.4 * truth + 0.6 * fpr)
        assert reading.lower <= exact * (1 + 1e-12) and exact <= reading.upper * (1 + 1e-12)
    assert found["bayes_excess", 0.1].upper <= 1e-12  # prior odds of 9 against a ratio of 3
    assert abs(found["bayes_excess", 0.4].upper - 0.15) < 1e-9  # .75 instead of .6
    mu = found["gdp_mu"]
    assert mu.upper < 2.0
    a = np.linspace(1e-10, 1, 10_001)
    power = np.minimum(3 * a, 1 - (1 - a) / 3)
    assert np.all(power <= norm.sf(norm.isf(a) - float(mu.upper)) + 1e-12) and mu.lower <= mu.upper


def test_the_excess_of_subnormal_priors_is_inside():
    """A mass of .3 is at infinity, so that the excess is at least .3 r at every prior r."""
    profile = ja.profile(ja.compose(ja.ApproximateDP(1e-9, 0.3), ja.Gaussian(9.0)))
    for units in (1, 2, 3, 7):
        prior = units * 5e-324
        found = profile.bayes_excess(prior)
        assert float(found.upper) >= Fraction(prior) * Fraction(3, 10)
        assert float(found.lower) <= Fraction(prior) * Fraction(31, 100)


def test_any_place_gives_a_sound_bracket():
    def deltas(epsilon, rows):
        return ja.profile(ja.Gaussian(1.0)).delta(epsilon)

    fpr = np.geomspace(1e-6, 0.9, 7)
    truth = norm.sf(norm.isf(fpr) - 1.0)
    for shift in (-3.0, -0.1, 0.0, 0.001, 0.3, 4.0):
        best = best_epsilon(deltas, fpr)
        for width in (1e-3, 0.1, 1.0):
            found = rate_at(deltas, Place(best.epsilon + shift, best.deviation), fpr, width)
            assert np.all(found.lower <= truth * (1 + 1e-12)) and np.all(found.upper >= truth * (1 - 1e-12)), shift
    assert np.all(np.abs(best.epsilon - (norm.isf(fpr) - 0.5)) < 1e-3)


def test_the_ends_of_float64():
    run = ja.Gaussian(1.0)
    found = ja.risk(run, fpr=1e-300, prior=[1e-300, 1 - 1e-16], baseline=1e-300, above_fpr=1e-300)
    for row in found.rows():
        assert 0.0 <= row["lower"] <= row["estimate"] <= row["upper"] <= 1.0 + 1e-9, row
    p = ja.profile(run)
    reading = p.posterior(1e-300, 0.5)
    truth = 1e-300 * norm.sf(norm.isf(0.5) - 1.0) / 0.5
    assert reading.lower <= truth <= reading.upper
    nothing = ja.risk(ja.dp_sgd(1.0, 0.0, 10))
    assert nothing["advantage"].upper == 0.0 and nothing["gdp_mu"].upper == 0.0
    assert nothing["true_positive_rate", 0.01].upper <= 0.01 + 1e-12


def test_the_table_prints_and_becomes_a_dict(table):
    lines = str(table).splitlines()
    assert lines[0].split() == ["reading", "at", "lower", "upper", "kind", "status"]
    assert len(lines) == 1 + len(table.rows()) == 1 + 2 * 10
    assert any("gdp_mu" in line and "above_fpr 1e-10" in line for line in lines)
    first = table.to_dict()["readings"][0]
    assert first["reading"] == "advantage" and len(first["upper"]) == 2
    with pytest.raises(KeyError, match="true_positive_rate at"):
        table["true_positive_rate", 0.5]


def test_bad_input_has_one_line():
    run = ja.Gaussian(1.0)
    assert "fpr[1] = 2.0 must be" in refusal(ja.risk, run, fpr=[0.1, 2.0])
    assert "above_fpr = 0.7 must be" in refusal(ja.risk, run, above_fpr=0.7)
    assert "prior" in refusal(ja.risk, run, prior="x")


def test_mu_where_delta_at_zero_is_loose():
    # the pair of randomised response: the upper end of delta(0) is far off, that of every other delta is exact
    edge = np.exp(0.1)

    def deltas(epsilon, rows):
        ratio = np.exp(epsilon)
        inside = np.where(ratio >= edge, 0.0, (edge - ratio) / (1.0 + edge))
        exact = np.where(ratio <= 1.0 / edge, 1.0 - ratio, inside)
        return ja.Bounds(exact, exact, np.where(epsilon == 0.0, 0.5, exact), "certified", "ok")

    found = gaussian_fit(deltas, np.array([1e-3, 0.3]), "certified").mu
    truth = -2.0 * norm.ppf(1.0 / (1.0 + edge))  # the trade-off function has f(a) = a at a = 1/(1 + edge)
    assert np.all(found.upper >= truth * (1 - 1e-12)) and np.all(found.lower <= truth * (1 + 1e-12))


def test_ends_of_mu_that_contradict_each_other_are_not_used():
    def deltas(epsilon, rows):
        mu = 1.0 if len(epsilon) <= 3 else 0.5  # one mechanism for the place at the floor, another one for the tangents
        exact = norm.sf(epsilon / mu - mu / 2) - np.exp(epsilon) * norm.sf(epsilon / mu + mu / 2)
        return ja.Bounds(exact * (1 - 1e-9), exact, exact * (1 + 1e-9), "certified", "ok")

    found = gaussian_fit(deltas, np.array([1e-3]), "certified").mu
    assert found.lower[0] == 0.0 and found.upper[0] == np.inf and found.status[0] == "contradiction"


@pytest.mark.parametrize("steps", (1e15, 1e13, 1e12))
def test_mu_of_a_distance_near_the_roundoff(steps):
    # one step at q: delta(0) = q erf(1/(2 sqrt 2)), and mu on the diagonal is sqrt(2 pi) delta(0) to first order
    truth = np.sqrt(2.0 * np.pi) * math.erf(0.5 / math.sqrt(2.0)) / steps
    found = ja.profile(ja.PoissonSampled(ja.Gaussian(1.0), 1.0 / steps)).gdp_mu(0.4999)
    assert found.lower <= truth * (1 + 1e-9) and found.upper >= truth * (1 - 1e-9)


def test_mu_of_gaussians_whose_square_is_no_float64():
    noise = np.array([1e200, 1e160, 1e-160])
    found = ja.profile(ja.Gaussian(noise)).gdp_mu()
    assert np.all(found.lower <= 1.0 / noise) and np.all(found.upper >= 1.0 / noise)
    assert np.all(found.upper <= (1.0 + 1e-12) / noise)


def test_regret_between_values_of_delta_that_are_near():
    # e^eps of neighbouring values differs by few units of roundoff: their difference says nothing
    def tiny(epsilon, mu):
        z = epsilon / mu
        return mu * (norm.pdf(z) - z * norm.sf(z))

    for near in np.linspace(1e-16, 9e-16, 17):
        epsilon = np.array([0.0, 1e-12, 1e-12 + near, 2e-10])[:, None]
        exact, gaussian = tiny(epsilon, 1e-10), tiny(epsilon, 1.1e-10)
        cells, _ = _cells(epsilon, exact * (1 - 1e-15), exact * (1 + 1e-15), gaussian)
        ends = 0.5 * (gaussian - exact)
        assert np.all(cells >= np.maximum(ends[:-1], ends[1:]) * (1 - 1e-9))


def test_deltas_that_are_no_number_show_nothing():
    def deltas(epsilon, rows):
        nothing = np.full(epsilon.shape, np.nan)
        return ja.Bounds(nothing, nothing, nothing, "certified", "failed")

    start = Place(np.array([6.0, 6.0]), np.ones(2))
    found = gaussian_fit(deltas, np.array([1e-10, 1e-10]), "certified", start, 5e-5).mu
    assert np.all(found.upper == np.inf) and np.all(found.lower == 0.0) and not np.any(found.status == "ok")


@pytest.mark.parametrize("narrow", (1e-2, 5e-5))
def test_mu_holds_wherever_its_search_begins(narrow):
    # a Gaussian has the same mu, here 1, at every rate: no tangent may be loose
    def deltas(epsilon, rows):
        exact = norm.sf(epsilon - 0.5) - np.exp(epsilon) * norm.sf(epsilon + 0.5)
        return ja.Bounds(exact * (1 - 1e-9), exact, exact * (1 + 1e-9), "certified", "ok")

    for off in (0.0, 0.01, 3.0):  # error of the eps at which the search begins
        place = Place(np.array([-norm.ppf(1e-6) - 0.5 + off]), np.ones(1))
        found = gaussian_fit(deltas, np.array([1e-6]), "certified", place, narrow).mu
        assert found.upper[0] >= 1.0 >= found.lower[0] and found.upper[0] - found.lower[0] <= max(narrow, 1e-4)


@pytest.mark.parametrize("relation", ja.mechanisms.RELATIONS)
def test_each_reading_has_a_sentence_with_its_upper_end(relation):
    found = ja.risk(ja.Gaussian([1.0, 3.0]), prior=0.2, relation=relation)
    for place in (0, 1):
        said = found.explain((place,))
        assert len(said) == len(found.readings)
        for reading, words in zip(found.readings, said, strict=True):
            value = float(reading.bounds.upper[place])
            told = outward(value, ".4g", up=True) if reading.name == "gdp_mu" else percent(value)
            assert f" {told}" in words and "{" not in words, reading.name
        assert "without the output it is 80 %" in said[[one.name for one in found.readings].index("bayes_success")]
    assert ("two given records" in said[0]) == (relation == "replace_one")
    assert ("was not used" in said[0]) == (relation == "add_one")


def test_forms_of_the_table(table):
    run = ja.Gaussian(2.0)
    one = ja.risk(run)
    page = one._repr_html_()
    assert all(html.escape(words) in page for words in one.explain()) and page.count("<tr") == 1 + len(one.readings)
    assert "10 more rows of 20 are not shown" in table._repr_html_()
    frame = table.to_pandas()
    assert frame.upper.tolist() == [row["upper"] for row in table.rows()] and list(frame["index"][:2]) == [[0], [1]]
    assert set(frame.prior.dropna()) == {0.5}


def test_the_picture_has_a_bar_for_each_probability(table):
    for found, count in ((ja.risk(ja.Gaussian(2.0)), 1), (table, 2)):
        axes = found.plot()
        drawn = [one for one in found.readings if one.name not in ("gdp_mu", "gdp_regret", "bayes_excess")]
        for number, bars in enumerate(axes.containers):
            assert [bar.get_width() for bar in bars] == [np.ravel(one.bounds.upper)[number] for one in drawn]
        assert len(axes.containers) == count and axes.get_yticklabels()[0].get_text() == "advantage"
        marks = dict(zip([one.name for one in drawn], axes.get_lines()[0].get_xdata(), strict=True))
        assert (marks["advantage"], marks["bayes_success"], marks["reconstruction"]) == (0.0, 0.5, 0.01)
    assert "draw at most 8" in refusal(ja.risk(ja.Gaussian(np.arange(1.0, 10.0))).plot)


@pytest.mark.parametrize(
    ("mechanism", "rate", "power"),
    [
        (ja.ApproximateDP(1.0, 0.01), 1e-10, 0.01 + np.e * 1e-10),
        (ja.FiniteOutput([0.25, 0.05, 0.17, 0.53], [0.67, 0.08, 0.19, 0.06]), 0.06, 0.53),
        (ja.RandomizedResponse(0.75, 4), 1 / 12, 0.75),
        (ja.FiniteOutput([0.5, 0.3, 0.2], [0.2, 0.5, 0.3]), 0.2, 0.5),
        (ja.PoissonSampled(ja.PureDP(1.0), 0.1), 1 / (1 + np.e), 0.9 / (1 + np.e) + 0.1 * np.e / (1 + np.e)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_mu_of_losses_with_atoms_is_decided_at_a_corner(mechanism, rate, power):
    found, exact = ja.profile(mechanism).gdp_mu(), norm.ppf(power) - norm.ppf(rate)
    assert found.lower <= exact * (1 + 1e-12) and exact * (1 - 1e-12) <= found.upper
    assert (found.kind, found.status) == ("certified", "ok")


@pytest.mark.parametrize("leak", [1e-9, 1e-6, 1e-3])
def test_mu_of_small_losses_with_atoms_is_narrow(leak):
    """T has one corner, at 1/2.  Tangents that are spread over large eps alone do not find it."""
    found = ja.profile(ja.FiniteOutput([0.5 + leak, 0.5 - leak], [0.5, 0.5])).gdp_mu()
    truth = norm.ppf(0.5 + leak)
    assert found.ok and found.lower <= truth * (1 + 1e-6) and found.upper >= truth * (1 - 1e-6)


def test_error_rates_need_no_lattice_where_delta_at_zero_settles_them(monkeypatch):
    """The old code made a lattice even for runs that leak next to nothing or hide nothing."""
    monkeypatch.setattr(lattice, "deltas", lambda *_, **__: pytest.fail("a lattice was made"))
    for sigma, rate, steps, least, most in [(10.0, 1e-9, 1e6, 0.9 - 5e-8, 0.9 + 1e-12), (0.1, 0.1, 1e9, 0.0, 2e-12)]:
        found = ja.profile(ja.dp_sgd(sigma, rate, steps)).tradeoff(0.1)
        assert found.status == "ok" and least <= found.lower <= found.upper <= most


@pytest.mark.parametrize(("sigma", "rate"), [(0.3, 0.2), (0.6, 0.05), (2.0, 0.5)])
def test_a_true_positive_rate_is_that_of_a_test_between_two_data_sets(sigma, rate):
    """The old code took the concave envelope of both directions, and called its lower end certified. No test has it."""
    for fpr in (0.01, 0.3, 0.4, 0.5, 0.7):
        found = ja.risk(ja.dp_sgd(sigma, rate, 1), fpr=(fpr,))["true_positive_rate"]
        at = norm.isf(fpr)  # by Neyman and Pearson, tests are thresholds: first where "without" is true, then "with"
        remove = (1.0 - rate) * fpr + rate * norm.sf(at - 1.0 / sigma)
        mix = lambda u, fpr=fpr: (1.0 - rate) * norm.cdf(u) + rate * norm.cdf(u - 1.0 / sigma) - fpr
        add = norm.cdf(brentq(mix, -40.0, 40.0 + 1.0 / sigma, xtol=1e-14))
        exact = max(remove, add)
        assert found.lower <= exact * (1.0 + 1e-12) and exact <= found.upper * (1.0 + 1e-12)
        assert found.upper - found.lower < 2e-4


def test_a_true_positive_rate_of_two_outcomes_by_hand():
    law = ja.FiniteOutput([0.9, 0.1], [0.6, 0.4])
    found = ja.risk(law, fpr=(0.3,))["true_positive_rate"]  # remove: .45. add: all of .1, then .2/.9 of .6
    assert found.lower <= 0.4 + 0.6 * 0.2 / 0.9 <= found.upper < 0.5335
