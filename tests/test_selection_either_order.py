"""Selections under replace_one: each candidate may look at the record in an order of its own. Truths by enumeration."""

import itertools
import math

import numpy as np
import pytest
from selection_cases import hockey_stick

import jaxacct as ja
from jaxacct import selection

P, Q = np.array([0.9, 0.1]), np.array([0.6, 0.4])
F = ja.FiniteOutput(P, Q)
FAR_P = np.array([0.00459707, 0.14398145, 0.85142148])
FAR_Q = np.array([0.000468171, 0.502331695, 0.497200134])
FAR = ja.FiniteOutput(FAR_P, FAR_Q)
FAR_EPS = 2.797974
GRID = [0.0, 0.05, 0.1, 0.2, math.log(1.5), 0.7, 0.9, 1.2, math.log(4.0)]
MOSTLY_TWO = [0.0, 0.01, 0.99]
BINOMIAL = [0.25, 0.5, 0.25]


def asked(mechanism, eps):
    return ja.delta(mechanism, eps, relation="replace_one")


def composed(laws, eps):
    """Delta of a composition. Each pair in `laws` has the law of an output for each of the two values of the record."""
    one, two = (np.ones(1), np.ones(1))
    for p, q in laws:
        one, two = np.outer(one, p).ravel(), np.outer(two, q).ravel()
    return float(hockey_stick(one, two, eps))


def adaptive_truth(p, q, law, eps):
    """Every candidate reads the record in the order that is worst for the delta of all together."""
    total = 0.0
    for k, share in enumerate(law):
        orders = itertools.product([(p, q), (q, p)], repeat=k)
        total += share * max(composed(order, eps) for order in orders)
    return total


def winners(law, p, q):
    """Yield the laws of the winner, for every order of scores: a candidate draws p or q by a coin, and tells which."""
    one, two = np.concatenate([p, q]) / 2.0, np.concatenate([q, p]) / 2.0
    for order in itertools.permutations(range(one.size)):
        yield [selection.output_law(x[list(order)], law) for x in (one, two)]


def adaptive_cases():
    profile = ja.PrivacyProfile([0.0, math.log(1.5), math.log(4.0)], [0.3, 0.0, 0.0], [0.3, 0.25, 0.0])
    yield F, MOSTLY_TWO, P, Q, 0.9
    yield ja.compose(F, ja.Gaussian(1e6)), MOSTLY_TWO, P, Q, 1.0
    yield ja.PoissonSampled(F, 1.0), MOSTLY_TWO, P, Q, 1.0
    yield profile, MOSTLY_TWO, P, Q, 1.0
    yield F, BINOMIAL, P, Q, 0.9
    yield FAR, [0.0, 0.0, 1.0], FAR_P, FAR_Q, FAR_EPS


@pytest.mark.parametrize(("base", "law", "p", "q", "eps"), list(adaptive_cases()))
def test_adaptive_candidates_have_orders_of_their_own(base, law, p, q, eps):
    k = selection.Binomial(2, 0.5) if law is BINOMIAL else selection.Categorical(law)
    chosen, truth = selection.select(base, k, candidates="adaptive"), adaptive_truth(p, q, law, eps)
    for found in (asked(chosen, eps), ja.profile(chosen, "replace_one").delta(eps)):
        assert found.kind == "bound" and found.lower <= truth <= found.upper * (1.0 + 1e-9)
    assert asked(ja.compose(chosen, ja.PureDP(0.0)), eps).upper >= truth * (1.0 - 1e-9)
    assert ja.epsilon(chosen, truth * (1.0 - 1e-6), relation="replace_one").upper >= eps


def test_a_fixed_number_of_adaptive_candidates_is_a_composition():
    """The pair of two steps belongs to no two data sets, so its delta is no lower end."""
    chosen = selection.select(F, selection.PointMass(2), candidates="adaptive")
    found, whole = asked(chosen, 1.0), asked(ja.repeat(F, 2), 1.0)
    truth = adaptive_truth(P, Q, [0.0, 0.0, 1.0], 1.0)
    assert found.lower <= truth <= found.upper == whole.upper and found.kind == whole.kind == "bound"
    assert chosen.kind_under("replace_one") == "bound" and chosen.kind_under("remove_one") == "certified"


@pytest.mark.parametrize(
    "law", [selection.Geometric(0.3), selection.Poisson(3.0), selection.PointMass(3), selection.Categorical(MOSTLY_TWO)]
)
def test_candidates_of_random_configurations_have_random_orders(law):
    worst = selection.candidates_profile([F, F], GRID, relation="replace_one")
    pairs, eps = list(winners(law, P, Q)), np.array([0.0, 0.3, 0.9, 1.2])
    truth = np.max([hockey_stick(*laws[::side], eps) for laws in pairs for side in (1, -1)], axis=0)
    tighter, wider = (asked(selection.select(base, law), eps) for base in (F, worst))
    for found in (tighter, wider):
        assert (found.upper >= truth * (1.0 - 1e-9)).all() and (found.lower <= truth).all()
        assert set(found.kind.tolist()) == {"bound"}
    assert (tighter.upper <= wider.upper * (1.0 + 1e-3)).all()
    composed_with_nothing = ja.compose(selection.select(worst, law), ja.PureDP(0.0))
    assert (asked(composed_with_nothing, eps).upper >= truth * (1.0 - 1e-9)).all()
    named = selection.bound_delta(F, law, eps, relation="replace_one")
    assert (named.upper >= truth * (1.0 - 1e-9)).all()


def test_two_rounds_of_candidates_with_random_orders():
    law, eps = selection.Geometric(0.3), 1.0
    pairs = [laws[::side] for laws in winners(law, P, Q) for side in (1, -1)]
    truth = max(composed(both, eps) for both in itertools.product(pairs, repeat=2))
    assert asked(ja.repeat(selection.select(F, law), 2), eps).upper >= truth


def test_the_best_two_have_orders_of_their_own():
    pairs = itertools.product([(FAR_P, FAR_Q), (FAR_Q, FAR_P)], repeat=2)
    truth = sum(composed(pair, FAR_EPS) for pair in pairs) / 4.0
    for law in (selection.PointMass(2), selection.Categorical([0.0, 0.0, 1.0])):
        assert asked(selection.select(FAR, law, top=2), FAR_EPS).upper >= truth
    assert truth > 3.0 * composed([(FAR_P, FAR_Q)] * 2, FAR_EPS)


def test_a_weighted_profile_takes_the_worse_order_of_each_candidate():
    turned = ja.FiniteOutput(Q, P)
    for relation in ("replace_one", "add_or_remove_one"):
        mixed = selection.candidates_profile([F, turned], GRID, [0.5, 0.5], relation=relation)
        each = [hockey_stick(*laws, 0.9) for laws in ((P, Q), (Q, P))]
        true = max(each) if relation == "replace_one" else np.mean(each)
        assert ja.delta(mixed, 0.9, relation=relation).upper == pytest.approx(true, rel=1e-9)


def test_an_attack_has_one_order():
    """What an attack reaches is what one score releases, on a base that has one order."""
    law, delta = selection.Geometric(0.3), 0.1
    reached = selection.attack(F, law, delta=delta, relation="replace_one")
    one_order = [selection.attack(F, law, delta=delta, relation=name) for name in ("remove_one", "add_one")]
    assert reached == pytest.approx(max(one_order), rel=1e-6)
    assert reached < 0.99 * ja.epsilon(selection.select(F, law), delta, relation="replace_one").upper


@pytest.mark.parametrize("base", [ja.RandomizedResponse(0.75), ja.Gaussian(2.0), ja.PureDP(1.0)])
def test_a_symmetric_base_has_one_order(base):
    for chosen in (selection.select(base, selection.Poisson(2.0), candidates=way) for way in ("iid", "adaptive")):
        found, same = asked(chosen, 0.5), ja.delta(chosen, 0.5)
        assert found.kind == same.kind == "certified"
        assert isinstance(base, ja.Gaussian) or (found.upper == same.upper and found.lower == same.lower)
