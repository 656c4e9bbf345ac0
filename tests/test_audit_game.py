"""Selections simulated on the device: against exact laws, Algorithm 3 and the envelope."""

import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats
from scipy.special import ndtr, ndtri

import jaxacct as ja
from jaxacct import selection
from jaxacct.audit import (
    attack_cells,
    cell_audit,
    cell_counts,
    clopper_pearson,
    count_winners,
    finite,
    gaussian,
    selection_game,
    winners,
    winning_ranks,
)
from jaxacct.core.validation import InputError
from jaxacct.representations.profile_conversions import gdp_from_profile
from jaxacct.selection.law_of_k import evaluated

LAWS = [
    selection.Geometric(0.1),
    selection.TruncatedNegativeBinomial(-0.5, 0.01),
    selection.Logarithmic(0.05),
    selection.Poisson(3.0),
    selection.Binomial(6, 0.4),
    selection.PointMass(7),
    selection.TwoPoint(0, 30, 0.3),
]
WORST = 1.67
"""The score |x - WORST| is not monotone: jaxacct/selection/README.md, "The condition of monotone_score"."""


def from_worst(x):
    return abs(x - WORST)


def scored_below(x, mean=0.0):
    """Mass of N(mean, 1) that the score |x - WORST| puts below x."""
    reach = np.abs(x - WORST)
    return ndtr(WORST + reach - mean) - ndtr(WORST - reach - mean)


def chosen_at_least(counts, probabilities, runs):
    """The chi-square test of counts, rare cells put together."""
    expected = runs * probabilities
    rare = expected < 20
    seen = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum() + 1e-12)
    return stats.chi2.sf(((seen - expected) ** 2 / expected)[expected > 1].sum(), max(int((expected > 1).sum()) - 1, 1))


@pytest.mark.parametrize("law", LAWS, ids=lambda law: type(law).__name__)
def test_winners_have_the_law_of_the_mathematics(law):
    """V, the winner's rank, has the distribution function phi where K > 0: so phi(V) is uniform above phi(0)."""
    runs, empty = 40_000, float(evaluated(law, np.ones(1))[0][0])
    for released in (winners(gaussian(), from_worst, law, runs, seed=1), winning_ranks(law, runs, seed=1)):
        there = ~np.isnan(released)
        assert abs(there.mean() - (1 - empty)) < 5 * np.sqrt(empty * (1 - empty) / runs) + 1e-12
        top = 1 - scored_below(released[there]) if released.dtype == np.float32 else released[there]
        uniform = (evaluated(law, top.astype(float))[0] - empty) / (1 - empty)
        assert stats.kstest(uniform, "uniform").pvalue > 1e-5
        half = there.sum() // 2  # runs are exchangeable, in whatever order the Ks were drawn
        assert stats.ks_2samp(uniform[:half], uniform[half:]).pvalue > 1e-5


@pytest.mark.parametrize("law", LAWS[:4], ids=lambda law: type(law).__name__)
def test_cells_are_won_as_often_as_they_should_be(law):
    masses, runs = np.array([0.3, 0.05, 1e-3, 0.4, 0.249]), 50_000
    exact = selection.output_law(masses, law)
    assert chosen_at_least(cell_counts(masses, law, runs, seed=2), exact, runs) > 1e-6
    place = np.array([3, 0, 4, 1, 2])  # outcome i of the base has the score place[i]
    outcomes = winners(finite(masses[place]), lambda i: jnp.asarray(place)[i], law, runs, seed=3)
    won = np.array([np.isnan(outcomes).sum(), *((outcomes == np.argsort(place)[c]).sum() for c in range(5))])
    assert won.sum() == runs and chosen_at_least(won, exact, runs) > 1e-6


def test_counts_are_those_of_the_winners_whatever_the_chunks(monkeypatch):
    monkeypatch.setattr(selection_game, "SELECTIONS_PER_CALL", 2**13)
    runs = 2**13 + 1234
    law, inside = selection.Poisson(2.0), lambda x: (x > 1.0) & (x < 2.0)
    kept = winners(gaussian(0.5), from_worst, law, runs, seed=4)
    assert kept.shape == (runs,) and kept.dtype == np.float32
    assert count_winners(gaussian(0.5), from_worst, law, runs, inside, seed=4) == inside(kept).sum()
    both = count_winners(gaussian(0.5), from_worst, law, runs, lambda x: np.array([[1.0], [2.0]]) < x, seed=4)
    np.testing.assert_array_equal(both, [(kept > 1).sum(), (kept > 2).sum()])
    assert cell_counts([0.5, 0.5], law, runs, seed=4).sum() == runs
    assert not np.array_equal(kept[:100], winners(gaussian(0.5), from_worst, law, runs, seed=5)[:100])


def test_draws_of_k_beyond_the_table(monkeypatch):
    monkeypatch.setattr(selection_game, "LONGEST_TABLE", 8)
    law, runs = selection.Logarithmic(1e-3), 600
    table = selection_game._table(law)
    assert table.size == 10
    drawn = selection_game.repetition_counts(law, table, runs, np.random.default_rng(0))
    for k in (1, 5, 8, 9, 20, 100, 1000):
        expected = float(law.survival(k))
        assert abs((drawn > k).mean() - expected) < 5 * np.sqrt(expected / runs)


def test_a_score_of_nan_never_wins_and_ties_go_to_the_first():
    law = selection.PointMass(4)
    released = winners(gaussian(), lambda x: jnp.where(x > 0, jnp.nan, 1.0), law, 20_000)
    assert abs((released > 0).mean() - 2.0**-4) < 0.01
    assert stats.kstest(-released[released < 0], "halfnorm").pvalue > 1e-5


@pytest.mark.slow
def test_the_gaussian_base_has_gaussian_tails():
    released = winners(gaussian(), lambda x: x, selection.PointMass(1), 300_000, seed=6)
    assert stats.kstest(released, "norm").pvalue > 1e-5
    most = winners(gaussian(), lambda x: x, selection.PointMass(2000), 4000, seed=7)
    assert stats.kstest(ndtr(-most.astype(float)) * 2000, "expon").pvalue > 1e-4


def test_the_gaussian_base_is_the_inverse_of_its_bits(monkeypatch):
    """Every tail mass, from 2^-33 to 1/2, against scipy."""
    mass = np.unique(np.geomspace(0.5, 2**31 - 1, 20_000).astype(np.uint32))
    for sign in (0, 1):
        monkeypatch.setattr(
            selection_game.jax.random, "bits", lambda key, shape, dtype, s=sign: jnp.asarray(2 * mass + s, dtype)
        )
        drawn = np.asarray(gaussian()(None, mass.shape), np.float64)
        tail = ndtr(-np.abs(drawn)) / ((mass + 0.5) * 2.0**-32) - 1
        assert (drawn * (2 * sign - 1) >= 0).all()
        assert np.abs(tail).max() < 0.02
        assert np.abs(tail[mass > 2**32 * 1e-8]).max() < 1e-4
        assert np.abs(tail[mass > 2**32 * 1e-7]).max() < 1e-5


@pytest.fixture(scope="module")
def example():
    """Base (1, 1e-5), geometric K of mean 10, the worst score: jaxacct/selection/README.md, "Bounds"."""
    mu, law = float(gdp_from_profile(1.0, 1e-5).lower), selection.Geometric(0.1)
    found = selection.attack(ja.Gaussian(1 / mu), law, delta=1e-5)
    return mu, law, found, attack_cells(found, lambda u: ndtr(ndtri(u) + mu))


@pytest.mark.slow
def test_the_worst_score_leaks_more_than_algorithm_3_and_less_than_the_envelope(example):
    mu, law, _, cells = example
    algorithm_3 = float(selection.bound_epsilon(ja.Gaussian(1.0 / mu), law, 1e-5, bound="monotone_score").upper)
    envelope = float(selection.bound_epsilon(ja.Gaussian(1 / mu), law, 1e-5, bound="envelope").upper)
    assert algorithm_3 == pytest.approx(1.144, abs=1e-3)
    audited = cell_audit(cells, law, delta=1e-5, runs=10_000_000, confidence=0.99)
    assert algorithm_3 + 0.05 < audited.epsilon < envelope
    assert audited.kind == "lower bound" and audited.trials == 20_000_000


def test_cells_of_an_attack_leak_what_it_says(example):
    """By the exact law of the cells, without simulation."""
    _, law, found, cells = example
    one, other = (selection.output_law(x, law) for x in (cells.numerator, cells.denominator))
    leak = lambda eps: np.maximum(one - np.exp(eps) * other, 0).sum()
    assert leak(float(found)) >= 1e-5 > leak(float(found) + 1e-3)
    assert found.score(cells.rank.mean(axis=1)).tolist() == sorted(found.score(cells.rank.mean(axis=1)))


@pytest.mark.slow  # `test_cells_are_won_as_often_as_they_should_be` scores candidates one by one too
def test_candidates_by_the_worst_score_are_won_like_cells(example):
    """K Gaussian candidates, scored one by one, against the draw of the winner's rank."""
    mu, law, _, cells = example
    runs, order = 50_000, np.argsort(cells.rank[:, 0])
    ends = -ndtri(cells.rank[order[1:], 0])[::-1].astype(np.float32)  # cells of x, ascending
    place = np.empty(order.size, np.int32)
    place[np.arange(order.size)[::-1]] = order
    score = lambda x: jnp.asarray(place)[jnp.searchsorted(jnp.asarray(ends), x)]
    released = winners(gaussian(mu), score, law, runs, seed=8)
    won = np.bincount(place[np.searchsorted(ends, released)], minlength=order.size)
    assert chosen_at_least(won, selection.output_law(cells.numerator, law)[1:], runs) > 1e-6


@pytest.mark.slow
def test_a_continuous_score_by_candidates_leaks_more_than_algorithm_3(example):
    """The score of 4e8 candidates is |x - 1.67|. The event is where the winner's log density ratio exceeds 1.53."""
    mu, law, _, _ = example
    x = np.linspace(-6, 8, 4001)
    density = [
        evaluated(law, np.clip(1 - scored_below(x, mean), 0, 1))[1] * stats.norm.pdf(x, mean) for mean in (mu, 0.0)
    ]
    taken = np.r_[np.log(density[0] / density[1]) > 1.53, False]
    inside = lambda y: jnp.asarray(taken)[jnp.clip(jnp.searchsorted(jnp.asarray(x, jnp.float32), y), 0, x.size)]
    runs = 20_000_000
    one, other = (
        int(count_winners(gaussian(mean), from_worst, law, runs, inside, seed=9 + place))
        for place, mean in enumerate((mu, 0.0))
    )
    audited = clopper_pearson(other, runs, runs - one, runs, delta=1e-5, confidence=0.99)
    assert (
        float(selection.bound_epsilon(ja.Gaussian(1.0 / mu), law, 1e-5, bound="monotone_score").upper)
        < audited.epsilon
        < 1.531
    )


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: winners(gaussian(), abs, selection.Geometric([0.1, 0.2]), 10), "law = .* must be one law of K"),
        (lambda: winners(gaussian(), abs, 3, 10), "law = 3 must be one law of K"),
        (lambda: winners(gaussian(), abs, LAWS[0], 0), "runs = 0"),
        (lambda: winning_ranks(LAWS[0], 10, seed=-1), "seed = -1"),
        (lambda: cell_counts([0.5, 0.6], LAWS[0], 10), "masses must be a vector that sums to 1"),
        (lambda: finite([0.5, 0.6]), "probabilities must be a vector that sums to 1"),
        (
            lambda: attack_cells(selection.Attack(1.0, "add", np.array([0, 0.1]), np.array([0.2])), lambda u: -u),
            "curve",
        ),
    ],
)
def test_bad_input_is_refused(call, words):
    with pytest.raises(InputError, match=words):
        call()
