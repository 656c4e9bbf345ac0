"""The worst score: reference rows, brute force over all orders, the attack's order, and compositions."""

import numpy as np
import pytest
from helpers import doctests_of, refusal
from scipy import stats
from selection_cases import hockey_stick, rows, worst_of_two, worst_order

import jaxacct as ja
from jaxacct import selection
from jaxacct.mechanisms.base import element
from jaxacct.selection import base_profile, mechanism, worst_case

EPS = np.array([-2.0, -1.0, -0.3, 0.0, 0.2, 0.7, 1.5, 3.0, 5.0])


def known(name, every=1):
    """Every so-many-th row of the reference table of one law, its laws stacked into a batch."""
    found = [(law, row) for law, row in rows() if row["repetitions"] == name][::every]
    fields = {f: np.array([getattr(law, f) for law, _ in found]) for f in found[0][0].constraints}
    law = type(found[0][0])(**fields)
    return law, *(np.array([float(row[c]) for _, row in found]) for c in ("gdp_mu", "epsilon_exact"))


@pytest.mark.parametrize("name", ["truncated_negative_binomial"])
def test_reference_rows(name):
    _check_rows(name, every=4)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["poisson", "binomial", "point_mass", "two_point"])
def test_reference_rows_of_other_laws(name):
    _check_rows(name)


def _check_rows(name, every=1):
    law, mu, exact = known(name, every)
    b = ja.epsilon(selection.select(ja.Gaussian(1.0 / mu), law), 1e-5)
    assert (b.upper >= exact - 1e-6).all() and (b.lower <= exact + 1e-5).all()
    assert (b.upper - b.lower <= 2e-4).all() and set(b.kind) == {"certified"}


def small_base(rng, outcomes):
    """Two random pmfs; now and then with outcomes that only one of them has."""
    p, q = rng.dirichlet(np.full(outcomes, 0.6), 2)
    for side in (p, q):
        if rng.random() < 0.3:
            side[rng.integers(outcomes)] = 0.0
    return p / p.sum(), q / q.sum()


def random_law(rng):
    """The probabilities of K = 0, ..., 5.  In half of the draws that of K = 0 is 0."""
    masses = rng.dirichlet(np.full(6, 0.5))
    if rng.random() < 0.5:
        masses[0] = 0.0
    return masses / masses.sum()


FAMILIES = {
    "categorical": lambda rng, n: selection.Categorical(np.array([random_law(rng) for _ in range(n)])),
    "negative binomial": lambda rng, n: selection.TruncatedNegativeBinomial(rng.uniform(-0.9, 3, n), rng.beta(1, 3, n)),
    "poisson": lambda rng, n: selection.Poisson(rng.gamma(1.0, 3.0, n)),
    "binomial": lambda rng, n: selection.Binomial(rng.integers(1, 12, n), rng.uniform(0.05, 1, n)),
    "point mass": lambda rng, n: selection.PointMass(rng.integers(1, 8, n)),
}


def above_any_order(seed, count, family, width=0.0):
    """Bases of up to 7 outcomes: all orders, and the attack, stay below the bound at eps of either sign."""
    rng = np.random.default_rng(seed)
    bases = [small_base(rng, rng.integers(2, 8)) for _ in range(count)]
    padded = ([np.append(base[side], np.zeros(7 - base[side].size)) for base in bases] for side in (0, 1))
    run, law = ja.FiniteOutput(*map(np.array, padded)), FAMILIES[family](rng, count)
    at = np.abs(EPS)[:, None]
    forward = worst_case.bracket("delta", run, law, at, "remove_one", width)
    reverse = worst_case.bracket("delta", run, law, at, "add_one", width)
    for i, (p, q) in enumerate(bases):
        truth = worst_order(p, q, law.element((i,)), EPS)
        grown = np.exp(EPS)
        upper = np.where(EPS >= 0.0, forward[1][:, i], 1.0 - grown + grown * reverse[1][:, i])
        lower = np.where(EPS >= 0.0, forward[0][:, i], 1.0 - grown + grown * reverse[0][:, i])
        assert (truth <= upper + 1e-12).all(), (p, q, law.element((i,)), truth - upper)
        assert (lower <= upper).all() and (upper <= 1.0 + 1e-12).all()


@pytest.mark.parametrize(
    ("seed", "count"), [(1, 3), pytest.param(2, 2000, marks=pytest.mark.slow)], ids=["some", "many"]
)
def test_selections_of_at_most_two_are_within_their_brackets(seed, count):
    """In a row inside which winning ends, the old code took the middle for the mean: delta was up to 1e-4 too low."""
    rng, eps = np.random.default_rng(seed), np.array([0.0, 0.2, 0.7, 1.5, 3.0, 5.0])
    bases = [small_base(rng, 7) for _ in range(count)]
    law = selection.Binomial(2, rng.uniform(0.05, 1.0, count))
    run, gaps = ja.FiniteOutput(*(np.array([base[side] for base in bases]) for side in (0, 1))), []
    for relation, turn in (("remove_one", 1), ("add_one", -1)):
        low, high = worst_case.bracket("delta", run, law, eps[:, None], relation, np.inf)
        for i, base in enumerate(bases):
            truth = np.array([worst_of_two(*base[::turn], law.element((i,)), each) for each in eps])
            assert (low[:, i] <= truth * (1 + 1e-12) + 1e-16).all(), (i, low[:, i] - truth)
            assert (truth <= high[:, i] * (1 + 1e-12) + 1e-16).all(), (i, truth - high[:, i])
            gaps.append((high[:, i] - low[:, i]) / np.maximum(truth, 1e-12))
    assert np.median(gaps) <= 5e-3


def test_brute_force():
    above_any_order(0, 3, "categorical", width=np.inf)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_brute_force_on_two_hundred_bases(family):
    above_any_order(1, 200, family)


def test_brute_force_attack_and_bound_meet_on_fine_splits():
    p, q, law = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.3, 0.5]), selection.Geometric(0.3)
    eps = np.array([0.3, 1.2])
    low, high = worst_case.bracket("delta", ja.FiniteOutput(p, q), law, eps, "remove_one")
    split = [worst_order(np.repeat(p / m, m), np.repeat(q / m, m), law, eps) for m in (1, 2, 5)]
    gaps = np.array([high - each for each in split])
    assert (gaps >= 0.0).all() and (np.diff(np.max(gaps, axis=1)) < -0.5 * np.max(gaps, axis=1)[:-1]).all()
    assert (gaps[2] <= 0.02 * high).all() and (high - low <= 5e-3 * high).all()


def leak_of(score, mu, law, eps):
    """The hockey-stick divergence of N(mu, 1) from N(0, 1), on a fine grid, after selection by a score of the rank."""
    z = np.concatenate([[np.inf], np.linspace(9.0, -9.0, 40_001), [-np.inf]])
    p, q = (np.diff(stats.norm.sf(z, shift)) for shift in (mu, 0.0))
    order = np.argsort(score(stats.norm.sf(z)[:-1] + 0.5 * q), kind="stable")
    return hockey_stick(*(selection.output_law(x[order], law) for x in (p, q)), eps)


def test_replacing_a_record_covers_both_orders_of_a_finite_base():
    p, q = np.array([0.9, 0.1]), np.array([0.5, 0.5])
    law, at = selection.Poisson(2.0), np.array([0.3, 1.0])
    split = np.repeat(p / 3, 3), np.repeat(q / 3, 3)  # a score may split an outcome at random
    truth = np.maximum(worst_order(*split, law, at), worst_order(*split[::-1], law, at))
    chosen = selection.select(ja.FiniteOutput(p, q), law)
    found = ja.delta(chosen, at, relation="replace_one")
    assert (truth <= found.upper).all() and set(found.kind.tolist()) == {"bound"}


def test_a_batch_of_which_some_bases_are_symmetric():
    p, q = np.array([[0.7, 0.3], [0.6, 0.4]]), np.array([[0.3, 0.7], [0.1, 0.9]])
    whole = [base.curves for base in base_profile.bases(ja.FiniteOutput(p, q))]
    assert [each["remove"] is each["add"] for each in whole] == [True, False]
    for i, each in enumerate(whole):
        alone = base_profile.bases(ja.FiniteOutput(p[i], q[i]))[0].curves
        for direction in ("remove", "add"):
            np.testing.assert_array_equal(each[direction].above.p, alone[direction].above.p)


@pytest.mark.parametrize(
    "run",
    [ja.Gaussian([1e-3, 0.7, 4.0]), ja.dp_sgd([1.0, 3.0], [1.0, 0.02], [1, 300])],
    ids=["Gaussian", "DP-SGD"],
)
def test_bases_asked_together_have_the_curves_that_each_has_alone(run):
    whole = [base.curves for base in base_profile.bases(run, coarse=True)]
    for i, each in enumerate(whole):
        alone = base_profile.bases(element(run, (i,)), coarse=True)[0].curves
        assert (each["remove"] is each["add"]) == (alone["remove"] is alone["add"])
        for direction in ("remove", "add"):
            for one, other in zip(
                (*each[direction].above, *each[direction].below),
                (*alone[direction].above, *alone[direction].below),
                strict=True,
            ):
                np.testing.assert_array_equal(one, other)


def test_a_profile_ends_at_a_delta_that_is_known_to_be_small(monkeypatch):
    """Losses of the add direction end at -3 log(1 - q).  The last delta is small although no engine is narrow there."""
    monkeypatch.setattr(base_profile, "EPS_POINTS", {"contour": 16, "lattice": 16})
    profile = base_profile.bases(ja.dp_sgd(0.3, 0.01, 3), coarse=True)[0].profile
    assert profile.high[1][-1] <= 1.01 * base_profile.LAST_DELTA


def test_the_last_delta_of_a_profile_is_an_upper_end_in_both_directions(monkeypatch):
    """The directions end so near to each other that the profile ends at the first of the two."""
    monkeypatch.setattr(base_profile, "EPS_POINTS", {"closed_form": 200, "contour": 200, "lattice": 200})
    run = ja.dp_sgd(2.0, 0.9999, 1)
    profile = base_profile.bases(run, coarse=True)[0].profile
    for high, relation in zip(profile.high, ("remove_one", "add_one"), strict=True):
        assert high[-1] >= ja.delta(run, profile.eps[-1], relation=relation).lower


def test_an_envelope_asks_for_no_profile_of_its_own(monkeypatch):
    run, law = ja.compose(ja.Gaussian(4.0), ja.Laplace(9.0)), selection.Geometric(0.1)
    worst = ja.epsilon(selection.select(run, law), 1e-5)
    monkeypatch.setattr(base_profile, "delta", None)
    assert worst.upper <= selection.bound_epsilon(run, law, 1e-5, bound="envelope").upper <= 1.02 * worst.upper


def test_attack_is_a_score_that_leaks_what_it_says():
    mu, law = 0.5016, selection.Geometric(0.1)
    found = selection.attack(ja.Gaussian(1.0 / mu), law, delta=1e-5)
    assert found.epsilon == pytest.approx(3.020077, abs=3e-5)
    assert np.all(np.diff(found.served) <= 0.0) and found.served[-1] >= found.rank[-1]
    assert leak_of(found.score, mu, law, found.epsilon) == pytest.approx(1e-5, rel=2e-3)
    # the natural score leaks less
    assert leak_of(lambda u: -u, mu, law, found.epsilon) < 1e-7


def test_polygons_enclose_the_gaussian_curve():
    mu = 0.7
    found = base_profile.bases(ja.Gaussian(1.0 / mu))[0].curves["remove"]
    for ends, sign in ((found.above, 1.0), (found.below, -1.0)):
        q = ends.q[1:-1]
        truth = stats.norm.sf(stats.norm.isf(q) - mu)
        gap = sign * (ends.p[1:-1] - truth)
        assert np.min(gap) >= -1e-15 and np.max(gap) < 3e-6


def test_single_selections_compose_as_their_profile(coarse_pairs):
    m = selection.select(ja.Gaussian(1.0 / 0.2681), selection.Geometric(0.1))
    once, alone = ja.epsilon(ja.compose(m, ja.Gaussian(1e4)), 1e-5), ja.epsilon(m, 1e-5)
    assert once.kind == "bound" and once.lower == 0.0
    assert alone.upper <= once.upper <= alone.upper + 0.03


@pytest.mark.slow  # test_selection_composed.py does so for every order
def test_composition_of_small_selections_bounds_the_direct_one():
    p, q = np.array([0.5, 0.3, 0.15, 0.05]), np.array([0.2, 0.3, 0.3, 0.2])
    law = selection.Geometric(0.3)
    run = selection.select(ja.FiniteOutput(p, q), law)
    order = np.array([2, 0, 3, 1])
    one = [selection.output_law(x[order], law) for x in (p, q)]
    for steps, eps in ((4, 2.0),):
        many = one
        for _ in range(steps - 1):
            many = [np.multiply.outer(a, b).ravel() for a, b in zip(many, one, strict=True)]
        for pair, relation in ((many, "remove_one"), (many[::-1], "add_one")):
            upper = ja.delta(ja.repeat(run, steps), eps, relation=relation).upper
            assert hockey_stick(*pair, eps) <= upper <= 1.0


def test_profile_is_convex_and_above_its_least():
    law = selection.Geometric(0.1)
    at = np.linspace(0.0, 3.0, 4)
    b = ja.delta(selection.select(ja.Gaussian(2.0), law), at)
    slopes = np.diff(b.upper) / np.diff(np.exp(at))
    assert (np.diff(slopes) >= -1e-4).all() and (b.lower <= b.upper).all() and (b.upper <= 1.0).all()


def test_select_by_other_bounds():
    run, law = ja.Gaussian(3.73), selection.Geometric([0.1, 0.01])
    worst = ja.epsilon(selection.select(run, law), 1e-5, rtol=1e-3)
    for name in selection.BOUNDS:
        chosen = selection.select(run, law, bound=name)
        named, direct = ja.epsilon(chosen, 1e-5), selection.bound_epsilon(run, law, 1e-5, bound=name)
        np.testing.assert_array_equal(named.upper, direct.upper)
        assert set(np.unique(named.kind)) == {selection.BOUNDS[name].kind} == {chosen.kind}
        if chosen.kind == "bound":
            assert np.all(named.upper >= worst.lower)
        assert "gives no pair to compose" in refusal(ja.epsilon, ja.compose(chosen, run), 1e-5)
    assert "is not known" in refusal(selection.select, run, law, bound="best")


def test_refusals():
    run = ja.Gaussian(1.0)
    assert "k = 3 must be a law of K" in refusal(selection.select, run, 3)
    assert "run = 1.0 of type float is not a mechanism" in refusal(selection.select, 1.0, selection.Geometric(0.1))
    assert "delta = 0" in refusal(ja.epsilon, selection.select(run, selection.Geometric(0.1)), 0.0)
    assert "do not broadcast" in refusal(selection.select, ja.Gaussian([1.0, 2.0]), selection.Geometric([0.1] * 3))
    selected = selection.select(ja.Gaussian([1.0, 2.0]), selection.Geometric(0.1))
    assert "delta of shape (3,)" in refusal(ja.epsilon, selected, [1e-5, 1e-6, 1e-7])
    assert "epsilon of shape (3,)" in refusal(ja.delta, selected, [0.1, 0.2, 0.3])


def test_doctests():
    assert doctests_of(mechanism) > 0


@pytest.mark.slow
def test_tiny_deltas_have_finite_ends():
    delta = np.array([1e-12, 1e-20, 1e-30])
    base = ja.epsilon(ja.Gaussian(1.0), delta)
    once = ja.epsilon(selection.select(ja.Gaussian(1.0), selection.PointMass(1)), delta)
    assert np.all(base.lower * (1 - 1e-9) <= once.upper) and np.all(once.upper <= base.upper * 1.02)
    one = ja.epsilon(selection.select(ja.Gaussian(1.0), selection.Geometric(0.5)), delta)
    assert np.all(
        one.upper
        >= selection.bound_epsilon(ja.Gaussian(1.0), selection.Geometric(0.5), delta, bound="monotone_score").upper
    )
    assert np.all(np.isfinite(one.upper))
