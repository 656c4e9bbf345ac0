"""Bounds of a selection: reference rows, and never below what an exhaustive search over score orders leaks."""

import numpy as np
import pytest
from helpers import refusal
from scipy.special import ndtr
from selection_cases import hockey_stick, rows, worst_order

import jaxacct as ja
from jaxacct import selection
from jaxacct.selection import envelope
from jaxacct.selection.base_profile import Sides, sides, upper_delta
from jaxacct.selection.envelope import lines, points_of, table_of
from jaxacct.selection.law_of_k import evaluated
from jaxacct.selection.named_bounds import shift

COLUMNS = {
    "envelope": "epsilon_envelope",
    "monotone_score": "epsilon_monotone_score",
    "privacy_profile": "epsilon_published_profile_bound",
}
LAWS = [
    selection.Geometric(0.1),
    selection.TruncatedNegativeBinomial(-0.5, 0.05),
    selection.TruncatedNegativeBinomial(-0.9, 0.01),
    selection.TruncatedNegativeBinomial(3.0, 0.3),
    selection.Logarithmic(0.02),
    selection.Poisson(4.0),
    selection.Poisson(0.3),
    selection.Binomial(8, 0.4),
    selection.Binomial(1, 0.7),
    selection.PointMass(3),
    selection.TwoPoint(1, 12, 0.3),
]


def bases(count, seed):
    """Pairs of pmfs on 4 outcomes. In every third pair each pmf lacks an outcome that the other one has."""
    rng = np.random.default_rng(seed)
    for i in range(count):
        p, q = rng.dirichlet(np.full(4, 0.7), 2)
        if i % 3 == 2:
            p[0] = q[1] = 0.0
        yield p / p.sum(), q / q.sum()


@pytest.mark.parametrize("bound", COLUMNS)
def test_reference_rows(bound):
    for law, row in rows()[::4]:
        truth = float(row[COLUMNS[bound]])
        if np.isnan(truth):
            assert "bound='envelope'" in refusal(selection.bound_epsilon, ja.Gaussian(1.0), law, 1e-5, bound=bound)
            continue
        found = selection.bound_epsilon(ja.Gaussian(1 / float(row["gdp_mu"])), law, float(row["delta"]), bound=bound)
        assert found.upper == pytest.approx(truth, abs=2e-4), (law, row["gdp_mu"])
        assert found.kind == ("bound" if bound != "monotone_score" else "conditional: monotone score")
        if bound == "envelope":
            assert float(row["epsilon_lower"]) <= found.upper


@pytest.mark.parametrize("law", LAWS, ids=repr)
def test_bounds_hold_against_every_score_order(law):
    eps = np.array([0.0, 0.3, 1.0, 2.0, 4.0])
    for p, q in list(bases(3, 1))[1:]:
        run = ja.FiniteOutput(p, q)
        for relation, (a, b) in {"remove_one": (p, q), "add_one": (q, p)}.items():
            leak = worst_order(a, b, law, eps)
            for name in ("envelope", "privacy_profile", "renyi"):
                if isinstance(law, selection.BOUNDS[name].laws):
                    found = selection.bound_delta(run, law, eps, bound=name, relation=relation)
                    assert np.all(found.upper >= leak - 1e-13), (name, relation, p, q)  # `leak` is off by 1e-14


@pytest.mark.parametrize(
    "law",
    [
        selection.TruncatedNegativeBinomial(-0.999, 1e-9),
        selection.TruncatedNegativeBinomial(-0.9, 0.01),
        selection.TruncatedNegativeBinomial(50.0, 0.9),
        selection.Geometric(1e-9),
        selection.Geometric(1 - 1e-9),
        selection.Poisson(1e-6),
        selection.Poisson(1000.0),
        selection.PointMass(1),
        selection.PointMass(1000),
        selection.Binomial(10**6, 1e-3),
    ],
    ids=repr,
)
def test_points_are_the_best_of_all_lines_and_0(law):
    for run in (ja.Gaussian(2.0), ja.RandomizedResponse(0.9)):
        top = float(ja.epsilon(run, 1e-12).upper)
        grid = np.linspace(-top, top, 201)
        table, knots = table_of(np.exp(grid), upper_delta(run, grid, "add_or_remove_one"))
        gain, cost = lines(law, *knots)
        found = points_of(gain, cost, table)
        at = np.geomspace(np.exp(-top), np.exp(2 * top), 50)
        best = np.maximum(np.max(at[:, None] * gain - cost, axis=1), 0.0)
        value = np.sum(found.weight * np.maximum(at[:, None] - np.exp(found.at), 0.0), axis=1)
        assert np.all(value >= best - 1e-14 * at * gain[-1]) and np.all(value <= best + 1e-10 * at * gain[-1])


@pytest.mark.parametrize("law", LAWS, ids=repr)
def test_the_envelope_is_no_less_than_the_exact_worst_case(law):
    exact = ja.epsilon(selection.select(ja.Gaussian(2.0), law), 1e-5, rtol=1e-3)
    assert selection.bound_epsilon(ja.Gaussian(2.0), law, 1e-5, bound="envelope").upper >= exact.lower


def test_an_envelope_reaches_far_in_the_direction_with_smaller_losses():
    """The kept profile of both directions ends before adding's delta falls to 1e-18, and must be extended."""
    run, law = ja.dp_sgd(3.0, 0.1, 200), selection.Geometric(0.1)
    upper = selection.bound_epsilon(run, law, 1e-16, bound="envelope", relation="add_one").upper
    assert upper <= selection.bound_epsilon(run, law, 1e-16, bound="privacy_profile", relation="add_one").upper


@pytest.mark.slow  # 4 CPU seconds; the next test says the same of a base whose delta is made coarse
def test_an_envelope_ends_where_the_base_has_a_bound():
    """The upper ends of the base's delta stay above 1e-65 here, though a bound of its epsilon at 1e-108 is known."""
    run, law = ja.dp_sgd(1.9, 1e-6, 1e6), selection.Geometric(0.1)
    assert selection.bound_epsilon(run, law, 1e-100, bound="envelope").upper < 0.2


def test_an_envelope_ends_at_a_known_epsilon_of_the_base(monkeypatch):
    """Here every upper end of the base's delta is at least 1e-9, though its epsilon at smaller deltas is known."""
    coarse, real = (lambda *given: np.maximum(real(*given), 1e-9)), envelope.upper_delta
    monkeypatch.setattr(envelope, "upper_delta", coarse)
    run, law = ja.Gaussian(3.0), selection.Geometric(0.1)
    assert selection.bound_epsilon(run, law, 1e-40, bound="envelope").upper < 6.0


def test_epsilon_and_delta_are_inverse():
    run, delta = ja.Gaussian([2.0, 4.0]), np.array([[1e-3], [1e-8]])
    for law in (selection.Geometric([0.1, 0.01]), selection.Poisson(5.0)):
        for name, bound in selection.BOUNDS.items():
            eps = selection.bound_epsilon(run, law, delta, bound=name)
            assert eps.shape == (2, 2)
            back = selection.bound_delta(run, law, eps.upper, bound=name)
            np.testing.assert_allclose(
                back.upper, np.broadcast_to(delta, (2, 2)), rtol=2e-3 if name != "renyi" else 0.5
            )
            assert np.all(np.asarray(back.kind) == bound.kind)


def test_batches_agree_with_one_at_a_time():
    run, law, delta = ja.Gaussian([[2.0], [4.0]]), selection.Geometric([0.1, 0.02]), np.array([1e-4, 1e-6])
    for name in selection.BOUNDS:
        whole = selection.bound_epsilon(run, law, delta, bound=name).upper
        for i, j in ((0, 1), (1, 0)):
            sigma, gamma = (2.0, 4.0)[i], (0.1, 0.02)[j]
            one = selection.bound_epsilon(ja.Gaussian(sigma), selection.Geometric(gamma), delta[j], bound=name)
            assert whole[i, j] == pytest.approx(float(one.upper), rel=1e-5)


def test_auto_takes_the_smallest_and_names_it():
    run = ja.Gaussian(3.0)
    for law in (selection.Geometric(0.1), selection.PointMass(4)):
        found = selection.bound_epsilon(run, law, 1e-5)
        each = {
            name: float(selection.bound_epsilon(run, law, 1e-5, bound=name).upper)
            for name in ("envelope", "privacy_profile", "renyi")
            if isinstance(law, selection.BOUNDS[name].laws)
        }
        assert found.upper == min(each.values()) and found.engine == min(each, key=each.get)


def test_pure_dp_costs_eta_plus_two():
    for eta in (0.5, 1.0, 3.0):
        law = selection.TruncatedNegativeBinomial(eta, 0.001)
        found = selection.bound_epsilon(ja.PureDP(0.7), law, 1e-9, bound="privacy_profile")
        assert found.upper == pytest.approx((eta + 2) * 0.7, rel=1e-5)


def test_geometric_repetition_of_pure_dp_attains_three_epsilon():
    # Xiang, Wang, Wang 2024, Example 1: a rare outcome scores just below a likelier one; the limit 2.99 is our own
    high, rare, grown = 1e-4, 1e-9, np.e
    p, q = np.array([0.0, rare * grown, high]), np.array([0.0, rare, high * grown])
    p[0], q[0] = 1 - p.sum(), 1 - q.sum()
    law = selection.Geometric(1e-7)
    one, two = selection.output_law(p, law), selection.output_law(q, law)
    assert 2.99 < np.log(one[2] / two[2]) <= 3.0


def test_the_same_example_with_a_delta_of_its_own():
    # the approximate-DP variant: one more outcome, of probability delta, gives the record away
    delta, law = 1e-6, selection.Geometric(0.01)
    rare, high = 1e-7, 1e-3
    p, q = np.array([0.0, rare * np.e, high, delta]), np.array([0.0, rare, high * np.e, 0.0])
    p[0], q[0] = 1 - p.sum(), 1 - q.sum()
    level = delta * law.mean
    run = ja.PrivacyProfile([1.0], [delta])
    found = float(ja.epsilon(selection.select(run, law), level).upper)
    assert 0.98 * 3.0 < found < 3.0 * (1 + 1e-3) and worst_order(p, q, law, np.array(found)) <= level
    assert worst_order(p, q, law, np.array(0.99 * 3.0)) > 0.9 * level  # the mass at infinity is paid in full


def test_many_repetitions_at_small_delta():
    law = selection.Geometric(1e-9)  # a billion runs
    found = selection.bound_epsilon(ja.Gaussian(20.0), law, [1e-5, 1e-12], bound="envelope")
    best = selection.bound_epsilon(ja.Gaussian(20.0), law, [1e-5, 1e-12], bound="privacy_profile")
    assert np.all(np.isfinite(found.upper)) and np.all(found.upper < best.upper)
    assert np.all(found.upper > ja.epsilon(ja.Gaussian(20.0), [1e-5, 1e-12]).lower)


def test_one_score_per_outcome_leaks_most():
    """Theorem 1 of Xiang, Wang, Wang 2024: outcomes of one score, one of them released at random, leak less."""
    eps = np.array([0.0, 0.2, 0.7, 1.5])
    for p, q in bases(8, 3):
        for law in (selection.Geometric(0.2), selection.Poisson(2.0), selection.PointMass(3)):
            tied = []
            for each in (p, q):
                joined = selection.output_law(np.array([each[0], each[1] + each[2], each[3]]), law)
                tied.append(np.array([joined[0], joined[1], joined[2] / 2, joined[2] / 2, joined[3]]))
            for order in ([0, 1, 2, 3], [0, 2, 1, 3]):
                strict = [selection.output_law(each[order], law) for each in (p, q)]
                assert np.all(hockey_stick(*tied, eps) <= hockey_stick(*strict, eps) + 1e-14)


def test_output_law_by_enumeration():
    p = np.array([0.5, 0.2, 0.3])
    law = selection.Categorical([0.1, 0.3, 0.6])
    best = np.zeros(4)
    best[0] = 0.1
    for i in range(3):
        best[1 + i] += 0.3 * p[i]
        for j in range(3):
            best[1 + max(i, j)] += 0.6 * p[i] * p[j]
    np.testing.assert_allclose(selection.output_law(p, law), best, atol=1e-15)


def test_monotone_score_is_not_a_bound():
    """Base (1, 1e-5), geometric with mean 10: the score |x - 1.67| leaks more than Algorithm 3 says."""
    mu, law = 0.2681, selection.Geometric(0.1)
    claimed = float(selection.bound_epsilon(ja.Gaussian(1.0 / mu), law, 1e-5, bound="monotone_score").upper)
    x = np.linspace(-14.0, 14.0, 50_001)
    densities = []
    for centre in (0.0, mu):
        near = np.abs(x - 1.67)  # the score: the mass of x' with |x' - 1.67| >= near is what is scored higher
        f = np.exp(-0.5 * (x - centre) ** 2) / np.sqrt(2 * np.pi)
        outside = ndtr(1.67 - near - centre) + ndtr(centre - 1.67 - near)
        densities.append(f * evaluated(law, outside)[1])
    step = x[1] - x[0]
    leaks = lambda eps: max(
        step * np.sum(np.maximum(a - np.exp(eps) * b, 0.0)) for a, b in (densities, densities[::-1])
    )
    assert leaks(claimed) > 1e-5 and leaks(1.52) > 1e-5 > leaks(1.55)
    assert claimed == pytest.approx(1.144, abs=1e-3)
    assert selection.bound_epsilon(ja.Gaussian(1 / mu), law, 1e-5).upper >= 1.53


def test_directions_are_taken_as_stated():
    p, q = np.array([0.7, 0.2, 0.1]), np.array([0.3, 0.3, 0.4])
    run = ja.FiniteOutput(p, q)
    assert sides(run, "add_or_remove_one") == (Sides("remove_one", "add_one"), Sides("add_one", "remove_one"))
    for relation in (
        "add_or_remove_one",
        "remove_one",
        "add_one",
    ):  # the one direction of a symmetric run is not left out
        assert [side.forward for side in sides(ja.Gaussian(1.0), relation)] == [relation]
    law = selection.Geometric(0.1)
    grid = np.linspace(0.0, 3.0, 30001)
    for side, (a, b) in zip(sides(run, "add_or_remove_one"), ((p, q), (q, p)), strict=True):
        np.testing.assert_allclose(upper_delta(run, grid, side.forward), hockey_stick(a, b, grid), atol=1e-12)
        least = 2.0 * np.min(np.log(np.exp(grid) + 9.0 * hockey_stick(b, a, grid)))
        assert shift(run, law, side) == pytest.approx(least, rel=1e-5)
        trial = selection.Binomial(5, 0.4)
        meets = np.expm1(grid) * 0.6 >= 0.4 * hockey_stick(a, b, grid)
        first = grid[meets][0]
        value = 4.0 * np.log(1 + 0.4 * np.expm1(first) + 0.4 * hockey_stick(a, b, first))
        assert shift(run, trial, side) == pytest.approx(value, rel=1e-3)


def test_mass_at_infinity():
    run = ja.ApproximateDP(0.5, 1e-6)
    law = selection.Geometric(0.1)
    found = selection.bound_epsilon(run, law, [1e-6, 1e-4], bound="envelope")
    assert np.isinf(found.upper[0]) and not found.ok[0] and found.upper[1] < 1.51
    assert selection.bound_delta(run, law, 5.0, bound="envelope").upper == pytest.approx(1e-5, rel=1e-3)


def test_sampled_base_in_both_directions():
    run, law = ja.PoissonSampled(ja.Gaussian(1.0), 0.1), selection.Poisson(3.0)
    both = selection.bound_epsilon(run, law, 1e-5, bound="privacy_profile").upper
    each = [
        selection.bound_epsilon(run, law, 1e-5, bound="privacy_profile", relation=r).upper
        for r in ("remove_one", "add_one")
    ]
    assert both == max(each)


def test_refusals():
    run, law = ja.Gaussian(1.0), selection.Geometric(0.1)
    assert "k = 3 must be a law" in refusal(selection.bound_epsilon, run, 3, 1e-5)
    assert "bound = 'best'" in refusal(selection.bound_epsilon, run, law, 1e-5, bound="best")
    assert "delta = 0.0" in refusal(selection.bound_epsilon, run, law, 0.0)
    assert "do not broadcast" in refusal(selection.bound_epsilon, ja.Gaussian([1.0, 2.0]), law, [1e-5, 1e-6, 1e-7])
    assert "Gaussians" in refusal(selection.bound_epsilon, ja.Laplace(1.0), law, 1e-5, bound="monotone_score")
    assert "run = 1.0 of type float is not a mechanism" in refusal(selection.bound_delta, 1.0, law, 1.0)
    assert "sum to 1" in refusal(selection.output_law, [0.5, 0.4], law)
