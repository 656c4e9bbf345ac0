"""Certificates of selections at the ends of float64: closed forms, all orders of outcomes, contradicting brackets."""

import importlib.util
import itertools
import pathlib

import mpmath
import numpy as np
import pytest
from selection_cases import worst_order

import jaxacct as ja
from jaxacct import selection
from jaxacct.kernels import worst_score
from jaxacct.kernels.worst_score import GLANCE
from jaxacct.selection import base_profile, mechanism, profile_ends, worst_case
from jaxacct.selection.base_profile import bases, inner, meet
from jaxacct.selection.envelope import Envelope, Points, Table

DELTAS = np.array([0.0, 1e-310, 1e-300, 1e-100, 1e-12, 1e-5, 0.1, 0.9])
NOTHING = np.stack([np.zeros(DELTAS.size), np.full(DELTAS.size, np.inf)])
LAWS = [
    selection.Geometric(0.1),
    selection.TruncatedNegativeBinomial(-0.99, 1e-9),
    selection.TruncatedNegativeBinomial(500.0, 1.0 - 1e-9),
    selection.Poisson(1e6),
    selection.Poisson(1e-9),
    selection.Binomial(1e6, 1e-9),
    selection.Binomial(20, 1.0),
    selection.PointMass(1),
    selection.PointMass(3),
    selection.Categorical([0.0, 1.0, 1e-300]),
    selection.Categorical([0.5, 0.0, 0.5]),
]


def slow(value):
    return pytest.param(value, marks=pytest.mark.slow)


def few_of(values, *often):
    """Mark all values as slow, except those at the indices `often`."""
    return [value if k in often else slow(value) for k, value in enumerate(values)]


def below_and_above(run, law, deltas=DELTAS, relation="add_or_remove_one"):
    """What the limits and the simple bounds say together, without the worst score, whose programs compile slowly."""
    nothing = np.stack([np.zeros(deltas.size), np.full(deltas.size, np.inf)])
    narrowed = profile_ends.narrowed("epsilon", run, law, deltas, relation, nothing, np.ones(deltas.size, bool))
    return meet(narrowed, profile_ends.by_base("epsilon", run, law, deltas, relation), np.inf)


def largest(law, loss):
    """The largest loss of a selection of randomised response: loss + log(phi'(1 - v)/phi'(v)) at v = 1/(1 + e^loss)."""
    with mpmath.workdps(400):
        v = 1 / (1 + mpmath.exp(mpmath.mpf(loss)))
        ends = [1 - v, v]
        if isinstance(law, selection.TruncatedNegativeBinomial):
            g = mpmath.mpf(law.gamma)
            logs = [-(mpmath.mpf(law.eta) + 1) * mpmath.log(1 - (1 - g) * x) for x in ends]
        elif isinstance(law, selection.Poisson):
            logs = [mpmath.mpf(law.mean) * x for x in ends]
        else:
            n, p = (law.trials, law.probability_of_run) if isinstance(law, selection.Binomial) else (law.repetitions, 1)
            logs = [(n - 1) * mpmath.log(1 - mpmath.mpf(p) + mpmath.mpf(p) * x) for x in ends]
        return float(loss + logs[0] - logs[1])


@pytest.mark.parametrize("loss", [1e-300, 1e-9, 1.0, 659.0, 1e5])
@pytest.mark.parametrize("law", few_of(LAWS[:9], 0, 3), ids=repr)
def test_the_largest_loss_of_randomised_response_at_any_size(law, loss):
    low, high = below_and_above(ja.PureDP(loss), law)
    truth = largest(law, loss)
    assert low[0] <= truth * (1 + 1e-9) and truth * (1 - 1e-9) <= high[0] <= truth * 1.2
    assert np.all(low <= high) and np.all(np.diff(high) <= 1e-9 * high[1:])
    if isinstance(law, selection.TruncatedNegativeBinomial):
        assert high[0] <= (law.eta + 2.0) * loss * (1 + 1e-9)


@pytest.mark.parametrize("loss", [800.0, 1e5])
@pytest.mark.parametrize("law", few_of(LAWS, 8), ids=repr)
def test_curves_of_large_losses_claim_no_mass_at_infinity(law, loss):
    """The Q-mass of a knot that underflows to 0 in float64 is not 0: its loss is finite."""
    found = bases(ja.PureDP(loss))[0].curves["remove"]
    assert found.below.p[0] == 0.0 and np.all(np.isfinite(found.above.q)) and np.all(np.diff(found.above.q) >= 0.0)
    low, high = below_and_above(ja.PureDP(loss), law)
    assert np.all(np.isfinite(low)) and np.isfinite(high[0])


@pytest.mark.parametrize("run", [ja.Gaussian(1e-3), *map(slow, (ja.Gaussian(1e-12), ja.Gaussian(1e8)))], ids=repr)
def test_gaussians_of_any_size_against_copies_and_a_constant_score(run):
    some = DELTAS[3:]
    base = ja.epsilon(run, some)
    for law in LAWS:
        low, high = below_and_above(run, law, some)
        assert np.all(low <= high) and np.all(np.isfinite(high[1:]))
        if law.probability(0) == 0.0:
            assert np.all(high >= base.lower)
    low, high = below_and_above(run, selection.PointMass(1), some)
    np.testing.assert_allclose(high, base.upper, rtol=1e-9)
    copies = ja.epsilon(ja.repeat(run, 20), some)
    assert np.all(below_and_above(run, selection.Binomial(20, 1.0), some)[1] <= copies.upper * (1 + 1e-9))


@pytest.mark.parametrize("law", few_of(LAWS, 0, 6, 10), ids=repr)
def test_simple_bounds_of_few_outcomes_against_all_orders(law):
    eps = np.array([0.0, 0.1, 1.0, 3.0])
    for p, q in (([0.5, 0.3, 0.2], [0.1, 0.3, 0.6]), ([0.5, 0.5 - 1e-5, 1e-5], [0.5, 0.5, 0.0])):
        run, p, q = ja.FiniteOutput(p, q), np.array(p), np.array(q)
        low, high = profile_ends.by_base("delta", run, law, eps, "remove_one")
        worst = worst_order(p, q, law, eps)
        assert np.all(worst <= high * (1 + 1e-9) + 1e-13) and np.all(low <= high)
        base = np.sum(np.maximum(p - np.exp(eps)[:, None] * q, 0.0), axis=1)
        assert np.all(low <= (1.0 - law.probability(0)) * base * (1 + 1e-9) + 1e-15)


def test_brackets_that_contradict_each_other_are_open():
    low, high = meet(([0.1, 0.3, np.nan], [0.2, 0.4, 0.5]), ([0.15, 0.1, 0.2], [0.3, 0.2, np.nan]), 1.0)
    np.testing.assert_array_equal(low, [0.15, 0.0, 0.2])
    np.testing.assert_array_equal(high, [0.2, 1.0, 0.5])


def test_curves_that_contradict_each_other_give_nothing():
    """Where the polygon "below" lies above the polygon "above", delta is in [0, 1] and epsilon in [0, inf]."""
    law = selection.Geometric(0.1)
    above, false = bases(ja.Gaussian(2.0))[0].curves["remove"].above, bases(ja.Gaussian(0.5))[0].curves["remove"].below
    with np.errstate(all="ignore"):
        leak = worst_score.delta(law, above, false, np.exp(1.0), GLANCE)
        loss = worst_score.epsilon(law, above, false, np.log(1e-5), np.float64(600.0), GLANCE)
    assert tuple(map(float, leak)) == (0.0, 1.0)
    assert tuple(map(float, loss)) == (0.0, np.inf)


def test_contradictions_in_an_answer_leave_the_simple_bounds(monkeypatch):
    run, law = ja.Gaussian(2.0), selection.Geometric(0.1)
    false = lambda quantity, run, law, values, *_: np.stack(
        [np.full(np.shape(values), 9.0), np.full(np.shape(values), 8.0)]
    )
    monkeypatch.setattr(mechanism, "bracket", false)
    low, high = mechanism.certified("epsilon", run, law, np.array([1e-5]), "add_or_remove_one")
    base = ja.epsilon(run, 1e-5)
    assert base.lower <= low[0] <= high[0] < 8.0
    monkeypatch.setattr(mechanism, "bracket", lambda *a: np.full((2, 1), np.nan))
    low, high = mechanism.certified("delta", run, law, np.array([1.0]), "add_or_remove_one")
    assert 0.0 <= low[0] <= high[0] <= 1.0


def test_a_glance_without_a_number_skips_no_direction(monkeypatch):
    """Where the glance at the second direction gives NaN, that direction is solved too."""
    seen = []

    def solved(quantity, stacked, rows, width, quick, other):
        size = rows[2].size
        seen.append(size)
        return np.stack([np.full(size, 0.5), np.full(size, 0.6)])

    monkeypatch.setattr(worst_case, "_solved", solved)
    monkeypatch.setattr(worst_case, "_run", lambda *a: (np.full(20, np.nan), np.full(20, np.nan)))
    run = ja.FiniteOutput([0.5, 0.3, 0.2], [0.1, 0.3, 0.6])
    worst_case.bracket("epsilon", run, selection.Geometric(0.1), np.full(20, 1e-3), "add_or_remove_one")
    assert seen == [20, 20]


def test_an_envelope_that_is_not_a_number_says_nothing():
    table = Table(np.array([0.0, 1.0, 2.0]), np.array([1.0, 0.1, 0.0]))
    for weight in (np.nan, np.inf):
        broken = Envelope(0.0, (Points(np.array([0.0, 0.1]), np.array([1.0, weight]), table),))
        assert np.all(broken.leak(np.array([0.0, 0.5])) == 1.0)


def test_composed_selections_of_bounded_bases_end_at_the_largest_loss(coarse_pairs):
    run = selection.select(ja.RandomizedResponse(0.75), selection.PointMass(3))
    part = run.expand("add_or_remove_one", "remove")[0][0]
    loss = 3.0 * np.log(3.0)
    assert float(part.infinity) <= 1e-12 and np.max(part.loss) <= loss * (1 + 1e-9)
    assert ja.epsilon(ja.repeat(run, 2), 1e-5).upper <= 2.0 * loss * (1 + 1e-9)
    single = selection.select(ja.RandomizedResponse(0.75), selection.PointMass(1))
    assert ja.delta(ja.compose(single), 0.0).upper <= 0.5 * (1 + 2e-9)


def test_large_eta_has_tails_and_probabilities():
    for eta, gamma in ((500.0, 1e-9), (500.0, 0.1), (1000.0, 0.01)):
        law = selection.TruncatedNegativeBinomial(eta, gamma)
        with mpmath.workdps(50):
            n, g = mpmath.mpf(eta), mpmath.mpf(gamma)
            for share in (0.9, 1.1):
                k = int(law.mean * share)
                mass = mpmath.loggamma(n + k) - mpmath.loggamma(n + 1) - mpmath.loggamma(mpmath.mpf(k))
                mass = n / (g**-n - 1) * mpmath.exp(mass + k * mpmath.log1p(-g)) / k
                assert float(law.probability(k)) == pytest.approx(float(mass), rel=1e-10)
        assert abs(float(law.quantile(0.5)) / law.mean - 1.0) < 0.01
        assert 0.0 < float(law.survival(np.round(1.1 * law.mean))) < 0.5 < float(law.survival(np.round(0.9 * law.mean)))


def attacks():
    path = pathlib.Path(__file__).parents[1] / "benchmarks" / "soundness_selection.py"
    spec = importlib.util.spec_from_file_location("soundness_selection", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_random_cases_of_the_whole_range(seed):
    module = attacks()
    wrong = [line for case in itertools.islice(module.cases(seed), 8) for line in module.check(case)]
    assert not wrong, "\n".join(wrong)


def test_brackets_that_are_open_where_slopes_exceed_one_claim_nothing_below():
    """Where only the brackets at negative eps are narrow, `inner` returns no more than T(u) = u."""
    ratio = np.array([1e-200, 1e-100, 1.0, 1e100])
    u, t = inner(ratio, np.array([1.0, 1.0, 0.0, 0.0]), np.ones(4))
    np.testing.assert_array_equal(t, u)


def test_a_base_whose_last_epsilon_is_not_known_is_evaluated_as_far_as_possible(monkeypatch):
    """The old code evaluated delta at an eps of NaN.  `_last` returns ASKED_EPS where epsilon is NaN."""
    failed = ja.Bounds(*np.full((3, 1), np.nan), status="failed")
    monkeypatch.setattr(base_profile, "epsilon", lambda *_, **__: failed)
    assert base_profile._last(ja.Gaussian(1.0), np.array([1e-9]), "remove_one") == base_profile.ASKED_EPS
