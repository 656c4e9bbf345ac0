"""What the bound of the worst score rests on: the integrand falls, and one look at the other direction is enough."""

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxacct as ja
from jaxacct import selection
from jaxacct.kernels import worst_score
from jaxacct.mechanisms import RELATIONS
from jaxacct.selection.base_profile import bases, inner
from jaxacct.selection.worst_case import bracket


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 2**32 - 1), ratio=st.floats(0.2, 30.0))
def test_what_is_to_be_won_does_not_grow_from_row_to_row(seed, ratio):
    """For concave T and any law of K, max over w >= u of L(u) phi'(T(w) - T(u)) - E phi'(w - u) falls with u."""
    rng = np.random.default_rng(seed)
    slopes = np.sort(rng.gamma(0.5, 2.0, 6))[::-1]
    ends = np.concatenate([[0.0], np.sort(rng.random(5)), [1.0]])
    heights = np.concatenate([[rng.choice([0.0, 0.1])], np.diff(ends) * slopes])
    knots = np.cumsum(heights)
    slopes, knots = slopes / knots[-1], knots / knots[-1]
    masses = rng.dirichlet(np.full(8, 0.4))
    first = np.polynomial.Polynomial(masses).deriv()
    u = np.linspace(0.0, 1.0, 601)
    t, slope = np.interp(u, ends, knots), slopes[np.clip(np.searchsorted(ends, u, side="right") - 1, 0, 5)]
    gap_t, gap_u = t[None] - t[:, None], u[None] - u[:, None]
    value = slope[:, None] * first(np.maximum(gap_t, 0.0)) - ratio * first(np.maximum(gap_u, 0.0))
    best = np.max(np.where(gap_u >= 0.0, value, -np.inf), axis=1)
    assert np.all(np.diff(best) <= 1e-9 * (1.0 + np.abs(best[1:])))


CASES = [
    (ja.compose(ja.Gaussian(2.0), ja.ApproximateDP(0.3, 1e-3)), selection.Geometric(0.05), 1.0, worst_score.GLANCE),
    (ja.Gaussian(1.0), selection.Poisson(20.0), 3.0, worst_score.GLANCE),
    (ja.Laplace(1.0), selection.PointMass(4), 1.5, worst_score.QUICK),
]


@pytest.mark.parametrize(("run", "law", "eps", "effort"), CASES, ids=["infinite mass", "large K", "fixed K"])
def test_upper_bounds_are_convex_and_above_plain_sums(run, law, eps, effort):
    """The lines for one E give the bounds at many E. `served` may place the windows of the groups anywhere."""
    above, below = bases(run)[0].curves["remove"]
    at = np.exp(np.linspace(0.05, 2.0 * eps, 41))
    sums = leak(below.q, below.p, law.generating, at)
    with np.errstate(all="ignore"):
        seen = worst_score.sketch(law, above.q, above.p, np.sum(above.ratio > 1.0), effort)
        mesh = worst_score.mesh(seen, np.exp(eps), effort)
        for served in (np.linspace(1.0, 0.4, effort.groups + 1), np.ones(effort.groups + 1)):
            known = worst_score.lines(law, above, mesh, served, effort)
            found = np.array([worst_score.bound(known, e) for e in at])
            slope = np.diff(found) / np.diff(at)
            assert np.all(slope <= 0.0) and np.all(np.diff(slope) >= -1e-9 * np.abs(slope[1:]))
            assert np.all(found >= sums * (1.0 - 1e-9))


def leak(q, p, phi, ratios, rows=500, columns=1000):
    """Bound the worst leak on a polygon from below. Rows are served at knots; gains are rounded down, and costs up."""
    first = lambda x: np.asarray(phi(np.clip(1.0 - x, 0.0, 1.0))[1])
    last = int(np.sum(np.diff(p) > np.diff(q)))
    row = np.unique(np.linspace(0, last, rows + 1).astype(int))
    column = np.unique(np.concatenate([row, np.linspace(0, q.size - 1, columns).astype(int)]))
    a, b = row[:-1, None], row[1:, None]
    gain = (p[b] - p[a]) * first(np.maximum(p[column] - 0.5 * (p[a] + p[b]), 0.0))
    cost = 0.5 * (q[b] - q[a]) * sum(first(np.maximum(q[column] - q[end], 0.0)) for end in (a, b))
    value = lambda e: np.max(np.where(column[None] >= b, gain - e * cost, 0.0), axis=1)
    return np.array([np.sum(np.maximum(value(e), 0.0)) for e in ratios])


def test_both_directions_of_many_are_the_larger_of_each():
    """The second direction is only glanced at where the first one decides."""
    p = np.array([[0.6, 0.3, 0.1], [0.2, 0.3, 0.5]])
    run = ja.FiniteOutput(p, p[::-1])  # two bases, each the reverse of the other
    law, delta = selection.Geometric(np.array([[0.5], [0.1]])), np.array([1e-2, 1e-6])[:, None, None]
    ask = lambda relation: np.stack(bracket("epsilon", run, law, delta, relation, np.inf))
    both, remove, add = map(ask, ("add_or_remove_one", "remove_one", "add_one"))
    larger = np.maximum(remove, add)
    assert np.all(both[0] <= larger[1] + 1e-12) and np.all(larger[0] <= both[1] + 1e-12)
    assert np.all(both[1] - both[0] <= 0.01 * np.maximum(both[1], 1.0))
    np.testing.assert_allclose(remove[..., 0], add[..., 1], rtol=1e-6)


FACING = np.array([[0.5, 0.3, 0.2], [0.2, 0.3, 0.5]])
ASKEW = np.array([[0.1, 0.3, 0.6], [0.2, 0.2, 0.6]])


@pytest.mark.parametrize(
    ("order", "count"),
    [(1, 1), pytest.param(-1, np.array([1, 2]), marks=pytest.mark.slow)],
    ids=["first", "last, repeated"],
)
@pytest.mark.parametrize(("quantity", "value"), [("delta", 0.7), pytest.param("epsilon", 1e-3, marks=pytest.mark.slow)])
def test_a_symmetric_base_among_others_is_answered_in_every_direction(order, count, quantity, value):
    """Both directions of a symmetric base share a curve. One may be skipped only where the other was asked for."""
    bases = np.stack([FACING, ASKEW])[::order]
    run = ja.repeat(ja.FiniteOutput(bases[:, 0], bases[:, 1]), count)
    law = selection.Geometric(0.1)
    found = {name: bracket(quantity, run, law, value, name, np.inf) for name in ("remove_one", "add_one", "zero_out")}
    for name, (lower, upper) in found.items():
        for i, base in enumerate(bases):
            twice = ja.repeat(ja.FiniteOutput(*np.stack([base, base], axis=1)), np.broadcast_to(count, 2)[i])
            low, high = (x[0] for x in bracket(quantity, twice, law, value, name, np.inf))
            assert upper[i] > 0.0 and lower[i] <= high and low <= upper[i]
    facing = [0, 1][::order][0]
    np.testing.assert_allclose(found["remove_one"][1][facing], found["add_one"][1][facing], rtol=1e-3)


def test_replacing_a_record_moves_noise_twice_as_far():
    """Replacing moves a Gaussian's statistic twice as far, as if at half the noise. A finite pair stays as it is."""
    finite, law = ja.FiniteOutput(*FACING), selection.Poisson(3.0)
    replaced, alike = (ja.compose(finite, ja.Gaussian(sigma)) for sigma in (2.0, 1.0))
    found = ja.epsilon(selection.select(replaced, law), 1e-3, relation="replace_one", rtol=1e-3)
    same = ja.epsilon(selection.select(alike, law), 1e-3, rtol=1e-3)
    assert found.kind == "certified" and same.lower <= found.upper and found.lower <= same.upper
    assert found.upper - found.lower <= 1e-3 * found.upper
    reached = selection.attack(replaced, law, delta=1e-3, relation="replace_one")
    assert reached == pytest.approx(selection.attack(alike, law, delta=1e-3), rel=1e-6)


@pytest.mark.slow
def test_composed_selections_of_a_mixed_batch_are_those_of_each_base():
    bases, law = np.stack([FACING, ASKEW]), selection.Geometric(0.3)
    of = lambda p, q: ja.repeat(selection.select(ja.FiniteOutput(p, q), law), 4)
    for name in RELATIONS:
        together = ja.epsilon(of(bases[:, 0], bases[:, 1]), 1e-3, relation=name).upper
        alone = [float(ja.epsilon(of(*base), 1e-3, relation=name).upper) for base in bases]
        np.testing.assert_allclose(together, alone, rtol=1e-3)


def test_an_open_bracket_does_not_flatten_the_polygon_below():
    """If delta is unknown at eps = 0 only, the inner polygon is within the grid's error of the true profile."""
    eps = np.linspace(-4.0, 4.0, 401)
    true = np.asarray(ja.delta(ja.Gaussian(1.0), np.abs(eps)).upper)
    true = np.where(eps < 0.0, 1.0 - np.exp(eps) * (1.0 - true), true)
    low = np.where(eps == 0.0, 0.0, true * (1.0 - 1e-9))
    u, t = inner(np.exp(eps), low, true * (1.0 + 1e-9))
    at = np.linspace(-2.0, 3.0, 31)
    reached = np.max(t[None] - np.exp(at)[:, None] * u[None], axis=1)
    exact = np.interp(at, eps, true)
    assert np.all(reached <= exact * (1.0 + 1e-3)) and np.all(reached >= exact * (1.0 - 5e-3))


def test_a_larger_rtol_leaves_wider_brackets_that_hold():
    run, law = ja.Gaussian(0.5), selection.Poisson(20.0)
    narrow, wide = (ja.epsilon(selection.select(run, law), 1e-5, rtol=rtol) for rtol in (1e-4, 0.05))
    assert wide.upper - wide.lower <= 0.05 * wide.upper and wide.status == "ok"
    assert wide.lower <= narrow.upper and narrow.lower <= wide.upper
    assert narrow.upper - narrow.lower <= wide.upper - wide.lower


def test_the_largest_served_from_each_row_on():
    served = np.random.default_rng(0).integers(0, 100, (7, 4))
    exact = np.maximum.accumulate(served.reshape(-1)[::-1])[::-1].reshape(7, 4)
    np.testing.assert_array_equal(worst_score._latest(served), exact)


@pytest.mark.parametrize("law", [selection.Poisson(30.0), selection.Geometric(1e-3), selection.Binomial(50, 0.3)])
@pytest.mark.parametrize("mass", [1e-12, 1e-7, 1e-3, 0.4])
def test_the_mass_at_infinity_is_exact(law, mass):
    """The mass at infinity, phi(1) - phi(1 - p), agrees with mpmath. At a slightly larger delta, epsilon is narrow."""
    with mpmath.workdps(40):
        p = mpmath.mpf(mass)
        if isinstance(law, selection.Poisson):
            exact = -mpmath.expm1(-30 * p)
        elif isinstance(law, selection.Binomial):
            exact = 1 - (1 - mpmath.mpf(0.3) * p) ** 50
        else:
            gamma = mpmath.mpf(1e-3)
            exact = 1 - gamma * (1 - p) / (1 - (1 - gamma) * (1 - p))
    low, high = (float(worst_score.at_infinity(law, np.float64(mass), side)) for side in (-1.0, 1.0))
    assert low <= exact <= high
    assert high - low <= 1e-5 * high
    base = ja.FiniteOutput([0.6 * (1.0 - mass), 0.4 * (1.0 - mass), mass], [0.4, 0.6, 0.0])
    found = ja.epsilon(selection.select(base, law), min(1.01 * high, 0.5 * (1.0 + high)), relation="remove_one")
    assert found.upper - found.lower <= 3e-3


@pytest.mark.parametrize("run", [ja.repeat(ja.PureDP(0.1), 10), ja.repeat(ja.Laplace(10.0), 5)])
def test_selections_over_bases_of_the_lattice_engine_are_narrow(run):
    found = ja.epsilon(selection.select(run, selection.Poisson(10.0)), 1e-2)
    assert np.all(found.upper - found.lower <= 1e-3)


@pytest.mark.slow
def test_a_large_batch_is_as_narrow_as_its_status_says_and_agrees_with_single_answers():
    run, deltas = ja.Gaussian(np.linspace(0.5, 20.0, 300)), np.geomspace(1e-2, 1e-9, 300)
    law = selection.Poisson(np.linspace(1.0, 40.0, 300))
    found = ja.epsilon(selection.select(run, law), deltas)
    assert np.all(found.upper - found.lower <= np.where(found.status == "ok", 2e-4 * found.upper, np.inf))
    assert np.mean(found.status == "ok") > 0.95
    for i in range(0, 300, 37):
        one = selection.select(ja.Gaussian(run.noise_multiplier[i]), selection.Poisson(law.mean[i]))
        alone = ja.epsilon(one, deltas[i])
        assert max(alone.lower, found.lower[i]) <= min(alone.upper, found.upper[i])


@pytest.mark.parametrize("effort", [worst_score.GLANCE, worst_score.QUICK], ids=["glance", "quick"])
def test_slopes_of_a_group_may_differ_by_any_factor(effort):
    """Weights of a group's steepest and flattest line give every slope between, even if the steepest is huge."""
    base = ja.FiniteOutput([1e-3, 0.02, 0.03, 0.15, 0.3, 0.499], [0.0, 0.001, 0.01, 0.139, 0.35, 0.5])
    law = selection.Poisson(10.0)
    above = bases(base)[0].curves["remove"].above
    with np.errstate(all="ignore"):
        seen = worst_score.sketch(law, above.q, above.p, np.sum(above.ratio > 1.0), effort)
        where = worst_score.mesh(seen, 2.0, effort)
        first = np.sort(np.unique(above.ratio, return_index=True)[1])[: effort.lines]
        spanning = np.sort(np.resize(first, effort.lines))
        rows = np.concatenate([spanning, np.maximum(where.rows[effort.lines :], first[-1])])
        where = where._replace(rows=rows)  # the first group spans several slopes
        known = worst_score.lines(law, above, where, np.zeros(effort.groups + 1), effort)
        slopes = above.ratio[rows[:-1]].reshape(effort.groups, effort.lines).T
        assert slopes[0, 0] / slopes[1, 0] > 1e18
        assert np.unique(slopes[:, 0]).size > 3
        made = known.weight[0] * known.slope[0] + known.weight[1] * known.slope[1]
        np.testing.assert_allclose(made, slopes, rtol=1e-12)


def test_a_selection_of_few_outcomes_with_mass_at_infinity_is_narrow():
    base = ja.FiniteOutput([0.6, 0.399, 0.001], [0.4, 0.6, 0.0])
    found = ja.epsilon(selection.select(base, selection.PointMass(5)), 0.01)
    assert found.status == "ok"
