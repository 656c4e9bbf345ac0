"""Releasing the best j of K: the bound against brute force over all orders, figures, limits, and how it composes."""

import itertools
import math

import numpy as np
import pytest
from helpers import refusal
from scipy.stats import norm
from selection_cases import hockey_stick

import jaxacct as ja
from jaxacct import selection
from jaxacct.interop import from_json, to_json
from jaxacct.selection.law_of_k import derivative, probability_of
from jaxacct.selection.top import by_envelope

RATIOS = np.array([1.0, 1.5, 2.0, 4.0, 7.0, 12.0])
MU = 0.2680511  # a (1, 1e-5)-DP Gaussian
BASE = ja.Gaussian(1.0 / MU)
LAWS = {
    "geometric": selection.Geometric(0.1),
    "few": selection.TruncatedNegativeBinomial(-0.5, 0.03),
    "logarithmic": selection.Logarithmic(0.02),
    "poisson": selection.Poisson(3.7),
    "binomial": selection.Binomial(7, 0.4),
    "always": selection.PointMass(5),
    "any": selection.Categorical([0.1, 0.0, 0.3, 0.2, 0.1, 0.3]),
}


def released(p, q, mass, top):
    """(P, Q) of what is released, for every order of the outcomes: the multiset of the best `top` of K draws.

    Of orders that differ only in the places of outcomes with equal masses, one is enough: all of them release the same.
    """
    n = p.size
    different = {tuple((p[i], q[i]) for i in np.argsort(order)): order for order in itertools.permutations(range(n))}
    for order in different.values():
        found = {}
        for count, share in enumerate(mass):
            for word in itertools.combinations_with_replacement(range(n), count):
                each = np.bincount(word, minlength=n)
                ways = share * math.factorial(count) / math.prod(math.factorial(int(x)) for x in each)
                kept = tuple(sorted(word, key=lambda i: order[i])[-top:])
                one, two = found.get(kept, (0.0, 0.0))
                found[kept] = (one + ways * math.prod(p[i] for i in word), two + ways * math.prod(q[i] for i in word))
        yield np.array(list(found.values())).T


def cases(count, seed=3):
    rng = np.random.default_rng(seed)
    for _ in range(count):
        n, most = int(rng.integers(2, 5)), int(rng.integers(1, 6))
        p, q = rng.dirichlet(np.full(n, 0.7)), rng.dirichlet(np.full(n, 0.7))
        if rng.random() < 0.15:  # outcome 0 proves that the data are not Q's
            q[0] = 0.0
            q /= q.sum()
        mass = rng.dirichlet(np.ones(most + 1))
        mass[0] *= rng.random() < 0.5
        yield p, q, mass / mass.sum()


def check(p, q, mass):
    """The largest ratio of the exact delta to the bound, over all orders, both directions and j = 2, 3."""
    eps, run, law, closest = np.log(RATIOS), ja.FiniteOutput(p, q), selection.Categorical(mass), 0.0
    for top, relation in itertools.product((2, 3), ("remove_one", "add_one")):
        bound = by_envelope("delta", run, law, top, eps, relation)
        for pair in released(p, q, mass, top):
            exact = hockey_stick(*(pair if relation == "remove_one" else pair[::-1]), eps)
            assert (exact <= bound + 1e-13).all(), (p, q, mass, top, relation)
            closest = max(closest, float(np.max(exact[bound > 1e-6] / bound[bound > 1e-6], initial=0.0)))
    return closest


def test_no_order_of_a_small_base_leaks_more():
    assert 0.9 < max(check(*case) for case in cases(4)) <= 1.0 + 1e-9


@pytest.mark.slow  # half a minute of enumeration
def test_no_order_of_a_hundred_small_bases_leaks_more():
    assert 0.99 < max(check(*case) for case in cases(100, 11)) <= 1.0 + 1e-9


def test_the_answer_is_the_smaller_of_the_envelope_and_of_all_candidates():
    """At e^eps = 4 and 15 the envelope B_j of selection/README.md, "The best j", is larger than D: the answer is D."""
    run, law, eps = ja.RandomizedResponse(0.75), selection.Categorical([0.0, 0.4, 0.3, 0.2, 0.1]), np.log([4.0, 15.0])
    envelope = by_envelope("delta", run, law, 2, eps, "add_or_remove_one")
    np.testing.assert_allclose(envelope, [0.4969, 0.1547], atol=6e-5)
    found = ja.delta(selection.select(run, law, top=2), eps)
    np.testing.assert_allclose(found.upper, [0.2191, 0.0633], atol=6e-5)
    assert set(found.kind.tolist()) == {"bound"} and (found.lower == 0.0).all()
    split = [np.repeat(x, 3) / 3.0 for x in ([0.75, 0.25], [0.25, 0.75])]
    best = np.max([hockey_stick(*pair, eps) for pair in released(*split, [0.0, 0.4, 0.3, 0.2, 0.1], 2)], axis=0)
    np.testing.assert_allclose(best, [0.1959, 0.0077], atol=6e-5)
    assert (best <= found.upper).all()


@pytest.mark.parametrize(("law", "eta"), [(selection.Geometric, 1.0), (selection.Logarithmic, 0.0)], ids=["1", "0"])
def test_pure_dp_is_never_below_what_is_reached_and_at_most_2j_plus_eta(law, eta):
    """A rare part of outcome H is scored just below outcome L.  As gamma falls, the loss tends to (2j + eta) eps0."""
    run, unit = ja.RandomizedResponse(0.75), math.log(3.0)
    for top, gamma in ((2, 0.01), (3, 0.001)):
        found = float(ja.epsilon(selection.select(run, law(gamma), top=top), 0.0).upper) / unit
        # j draws of the rare part have ratio 3^j; below it is only the rest of H, of P-mass 3/4 and Q-mass 1/4
        ratio = (gamma + (1.0 - gamma) * 0.75) / (gamma + (1.0 - gamma) * 0.25)
        reached = top + (eta + top) * math.log(ratio) / unit
        assert reached <= found * (1.0 + 1e-9) and found <= 2 * top + eta + 1e-9
        assert found == pytest.approx(reached, rel=1e-6)
    if eta == 1.0:
        assert found == pytest.approx(6.990, abs=1e-3)  # j = 3, gamma = .001


@pytest.mark.parametrize("name", ["geometric", "few", "always", "poisson", "any"])
def test_more_winners_cost_more_and_all_of_them_the_most(name):
    law = LAWS[name]
    upper = [float(ja.epsilon(selection.select(BASE, law, top=top), 1e-5).upper) for top in (1, 2, 3)]
    whole = float(ja.epsilon(selection.select(BASE, law, candidates="adaptive"), 1e-5).upper)
    assert all(a <= b * (1.0 + 1e-9) for a, b in itertools.pairwise(upper)) and upper[-1] <= whole * (1.0 + 2e-3)
    # j = 1 gives the exact worst case, as a selection without `top` does
    one = selection.select(BASE, law, top=1)
    assert one == selection.select(BASE, law) and ja.epsilon(one, 1e-5).kind == "certified"


def test_one_fixed_order_of_gaussian_outputs_leaks_less():
    """For the best two of K = 2 or 3 draws by the likelihood ratio, the exact delta, integrated, is below the bound."""
    law, eps = selection.Categorical([0.0, 0.0, 0.5, 0.5]), 2.0
    mu, x = 1.5, np.linspace(-9.0, 10.0, 1500)
    step, y = x[1] - x[0], x[:, None]
    # ordered pair y >= x: 2 f f (p_2 + 3 p_3 F(x))
    dense = [2.0 * norm.pdf(y, m) * norm.pdf(x, m) * (0.5 + 1.5 * norm.cdf(x, m)) for m in (mu, 0.0)]
    leak = np.maximum(dense[0] - math.exp(eps) * dense[1], 0.0) * np.where(y > x, 1.0, np.where(y == x, 0.5, 0.0))
    exact = float(np.sum(leak)) * step**2
    found = ja.delta(selection.select(ja.Gaussian(1.0 / mu), law, top=2), eps)
    assert 0.5 * found.upper < exact <= found.upper


@pytest.mark.parametrize("name", LAWS)
def test_derivatives_and_probabilities_of_every_law(name):
    law = LAWS[name]
    k = np.arange(4000)
    mass = np.asarray(law.probability(k))
    for order, x in itertools.product((1, 2, 3, 4), (0.0, 0.3, 0.9, 1.0)):
        falling = np.prod([k - i for i in range(order)], axis=0) * 1.0
        power = np.power(x, np.maximum(k - order, 0))
        exact = float(np.sum(mass * falling * power))
        scale, other = derivative(law, order)
        found = scale * float(other.generating(np.asarray(1.0 - x))[1]) if scale else 0.0
        assert found == pytest.approx(exact, rel=1e-9, abs=1e-14)
    for count in (1, 2, 3):
        assert float(mass[count]) <= probability_of(law, count) * (1.0 + 1e-11)
        assert probability_of(law, count) <= float(mass[count]) * (1.0 + 1e-9) + 1e-280


@pytest.mark.slow
def test_it_composes_from_above():
    law = selection.Geometric(0.2)
    one = selection.select(BASE, law, top=2)
    single, twice = ja.epsilon(one, 1e-5), ja.epsilon(ja.compose(one, BASE), 1e-5)
    assert twice.kind == "bound" and single.upper < twice.upper < single.upper + 1.2
    alone = ja.epsilon(ja.compose(one, ja.PureDP(0.0)), 1e-5)
    assert single.upper * (1.0 - 1e-3) <= alone.upper <= single.upper * 1.02
    pure = ja.epsilon(ja.repeat(selection.select(ja.PureDP(0.5), law, top=2), 3), 0.0)
    assert pure.upper == pytest.approx(3.0 * float(ja.epsilon(selection.select(ja.PureDP(0.5), law, top=2), 0.0).upper))
    assert pure.upper <= 3 * 5 * 0.5 + 1e-9
    all_of_them = ja.epsilon(ja.compose(selection.select(BASE, selection.PointMass(2), top=3), BASE), 1e-5)
    assert all_of_them.upper == ja.epsilon(ja.repeat(BASE, 3), 1e-5).upper


def test_mass_at_infinity_is_that_of_any_candidate():
    """Any of 4 candidates may reveal the secret of ApproximateDP: the mass at infinity is about 4 p, not 12 p."""
    run, law = ja.ApproximateDP(0.1, 1e-9), selection.PointMass(4)
    top = selection.select(run, law, top=2)
    assert 4e-9 * (1 - 1e-6) <= ja.delta(top, 5.0).upper <= 4e-9 * (1 + 1e-6)
    assert ja.epsilon(top, 1e-9).upper == np.inf
    # the mass at infinity that a base may have, but need not, is not subtracted from its profile
    unsure = ja.PrivacyProfile(epsilon=[0.1], delta=[1e-9])
    assert ja.delta(selection.select(unsure, law, top=2), 5.0).upper >= 4e-9 * (1 - 1e-6)


@pytest.mark.parametrize(
    ("run", "law", "delta"),
    [
        (BASE, selection.Poisson(1e300), 1e-5),
        (BASE, selection.Geometric(1e-300), 1e-5),
        (ja.Gaussian(1e-10), selection.Geometric(0.1), 1e-5),
        (ja.Gaussian(1e300), selection.Geometric(0.1), 1e-5),
        (BASE, selection.Poisson(1e-300), 1e-5),
        (ja.PureDP(650.0), selection.Geometric(0.1), 1e-5),
        (BASE, selection.Geometric(0.1), 1e-295),
        (BASE, selection.Categorical([0.0, 1.0 - 2.0**-53, 1e-300]), 1e-5),
    ],
    ids=str,
)
def test_far_ends_of_float64_answer_or_say_that_nothing_is_known(run, law, delta):
    found = ja.epsilon(selection.select(run, law, top=2), delta)
    best = ja.epsilon(selection.select(run, law), delta)
    assert found.upper >= best.lower * (1.0 - 1e-9) and not np.isnan(found.upper)
    if np.isfinite(found.upper):
        assert ja.delta(selection.select(run, law, top=2), found.upper * 1.001 + 1e-9).upper <= delta * (1.0 + 1e-6)


def test_batches_are_their_elements_and_documents_keep_them():
    many = selection.select(ja.Gaussian([[2.0], [3.0]]), selection.Poisson([2.0, 5.0]), top=2)
    found = ja.epsilon(many, 1e-6)
    assert found.shape == (2, 2) and from_json(to_json(many)) == many
    one = ja.epsilon(selection.select(ja.Gaussian(3.0), selection.Poisson(2.0), top=2), 1e-6)
    assert found.upper[1, 0] == one.upper
    replaced = ja.epsilon(
        selection.select(ja.Gaussian(2.0), selection.Poisson(2.0), top=2), 1e-6, relation="replace_one"
    )
    other = ja.epsilon(selection.select(ja.Gaussian(1.0), selection.Poisson(2.0), top=2), 1e-6)
    assert replaced.upper == pytest.approx(float(other.upper), rel=1e-6)


def test_what_is_no_number_of_winners_is_refused():
    law = selection.Geometric(0.1)
    for top in (0, 17, 1.5, math.nan):
        assert "use a whole number of candidates from 1 to 16" in refusal(selection.select, BASE, law, top=top)
    assert "is for one winner" in refusal(selection.select, BASE, law, top=2, bound="envelope")
    assert selection.select(BASE, law, top=2, candidates="adaptive") == selection.select(
        BASE, law, candidates="adaptive"
    )

    class Own(selection.Poisson):
        pass

    assert "no higher derivatives" in refusal(ja.epsilon, selection.select(BASE, Own(3.0), top=2), 1e-5)


def test_losses_near_the_last_number_that_exp_holds_are_not_lost():
    """The first line of the polygon is then so short that float64 hardly holds its length."""
    law, run = selection.Geometric(0.1), ja.PureDP(349.9)
    # K >= 2 has probability .9, and then the best two almost surely reveal the record
    assert ja.delta(selection.select(run, law, top=2), 650.0).upper >= 0.9
    assert ja.epsilon(selection.select(run, law, top=2), 0.3).upper >= 2 * 349.9 - 1.0
    one = selection.select(ja.PureDP(695.0), law)
    assert ja.epsilon(one, 0.3).upper >= 695.0
    envelope = selection.bound_delta(ja.PureDP(695.0), law, np.array([600.0]), bound="envelope")
    assert envelope.upper >= 1.0 - 1e-9


@pytest.mark.parametrize(
    "law",
    [selection.Poisson(1e-200), selection.Binomial(5, 1e-200), selection.Categorical([0.0, 1.0, 0.0, 1e-300])],
    ids=str,
)
def test_a_number_of_candidates_that_float64_hardly_sees_has_its_losses(law):
    """K >= 3 is possible, however rare, and then the best three have three times the largest loss."""
    assert ja.epsilon(selection.select(ja.PureDP(1.0), law, top=3), 0.0).upper >= 3.0


def test_a_law_of_one_value_has_no_more_winners_than_candidates():
    for mass in ([0.0, 0.5, 0.5, 0.0], [0.0, 0.5, 0.5]):
        found = ja.epsilon(selection.select(ja.PureDP(1.0), selection.Categorical(mass), top=3), 0.0)
        assert found.upper == pytest.approx(2.0)


def test_it_is_written_as_it_is_typed():
    typed = "selection.select(ja.Gaussian(noise_multiplier=2.0), selection.Poisson(mean=3.0), top=3)"
    assert selection.select(ja.Gaussian(2.0), selection.Poisson(3.0), top=3).expression() == typed
    assert eval(typed) == selection.select(ja.Gaussian(2.0), selection.Poisson(3.0), top=3)
