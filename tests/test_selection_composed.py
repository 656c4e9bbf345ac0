"""Selections of small bases, composed: at least the exact composition of any order, and close where one is worst."""

import itertools
import math

import numpy as np
import pytest
from scipy.stats import norm
from selection_cases import hockey_stick

import jaxacct as ja
from jaxacct import selection
from jaxacct.mechanisms import components

EPS = np.array([0.0, 0.5, 1.0, 2.0, 4.0])
BASES = [
    ([0.6, 0.4], [0.4, 0.6]),
    ([0.5, 0.3, 0.2], [0.1, 0.3, 0.6]),
    ([0.5, 0.3, 0.15, 0.05], [0.2, 0.3, 0.3, 0.2]),
    ([0.5, 0.3, 0.19, 0.01], [0.2, 0.3, 0.5, 0.0]),
]
LAW = selection.Geometric(0.3)


def powers(p, q, copies):
    """Return both laws of the outcome counts of `copies` independent outputs."""
    counts = [np.bincount(c, minlength=p.size) for c in itertools.combinations_with_replacement(range(p.size), copies)]
    counts = np.array(counts)
    ways = [math.factorial(copies) // math.prod(map(math.factorial, row)) for row in counts.tolist()]
    return [np.array(ways, float) * np.prod(x**counts, axis=1) for x in (p, q)]


def fixed_orders(p, q, law):
    """The exact output laws with the record and without it, for every order of the outcomes."""
    for order in itertools.permutations(range(p.size)):
        yield tuple(selection.output_law(x[list(order)], law) for x in (p, q))


def composed_delta(run, copies, relation):
    return np.asarray(ja.delta(ja.repeat(run, copies), EPS, relation=relation).upper)


@pytest.mark.parametrize(
    "base",
    [*BASES[:1], *(pytest.param(one, marks=pytest.mark.slow) for one in BASES[1:])],
    ids=lambda base: str(len(base[0])) + str(base[1][-1]),
)
def test_copies_are_above_the_composition_of_every_order(base, coarse_pairs):
    p, q = map(np.array, base)
    run = selection.select(ja.FiniteOutput(p, q), LAW)
    for copies in (9 if p.size < 3 else 4,):
        worst = {"remove_one": 0.0, "add_one": 0.0}
        for one, two in fixed_orders(p, q, LAW):
            many = powers(one, two, copies)
            for relation, pair in (("remove_one", many), ("add_one", many[::-1])):
                worst[relation] = np.maximum(worst[relation], hockey_stick(*pair, EPS))
        for relation, truth in worst.items():
            upper = composed_delta(run, copies, relation)
            assert (truth <= upper + 1e-12).all() and (upper <= 1.0).all(), (relation, copies)


@pytest.mark.slow
@pytest.mark.parametrize("copies", [4, 16])
def test_copies_are_close_where_one_order_is_worst_throughout(copies):
    # there is at most one run, so that the order does not matter; with probability .4 there is no release
    p, q, share = np.array([0.5, 0.3, 0.2]), np.array([0.1, 0.3, 0.6]), 0.6
    many = powers(*(np.append(share * x, 1 - share) for x in (p, q)), copies)
    run = selection.select(ja.FiniteOutput(p, q), selection.Binomial(1, share))
    for relation, pair in (("remove_one", many), ("add_one", many[::-1])):
        truth, upper = hockey_stick(*pair, EPS), composed_delta(run, copies, relation)
        assert (truth <= upper).all() and (upper <= truth * 1.01 + 1e-9).all()


def sampled_step(eps, sigma, q, relation):
    """delta(eps) of one Poisson sampled Gaussian step at any real eps: the best test compares x with a threshold."""
    ratio = np.exp(eps)
    grown = ratio if relation == "remove_one" else 1.0 / ratio
    inside = grown > 1.0 - q
    at = sigma**2 * np.log(np.where(inside, (grown - 1.0 + q) / q, 1.0)) + 0.5
    low, moved = norm.cdf(at / sigma), norm.cdf((at - 1.0) / sigma)
    if relation == "remove_one":  # the event is x above the threshold
        return np.where(inside, (1 - q) * (1 - low) + q * (1 - moved) - ratio * (1 - low), 1.0 - ratio)
    return np.where(inside, low - ratio * ((1 - q) * low + q * moved), 0.0)


@pytest.mark.slow  # runs the engines for selections that are composed with sampled steps
@pytest.mark.parametrize("relation", ["remove_one", "add_one"])
def test_with_dp_sgd_before_or_after_it(relation):
    p, q = map(np.array, BASES[1])
    chosen, sgd = selection.select(ja.FiniteOutput(p, q), LAW), ja.dp_sgd(1.0, 0.1, 1)
    orders = (chosen, sgd), (sgd, chosen)
    first, last = (np.asarray(ja.delta(ja.compose(*each), EPS, relation=relation).upper) for each in orders)
    np.testing.assert_allclose(first, last, rtol=1e-9)
    worst = np.zeros(EPS.size)
    for pair in fixed_orders(p, q, LAW):
        one, two = (x[1:] for x in (pair if relation == "remove_one" else pair[::-1]))  # x[0] is K = 0, of mass 0
        inner = sampled_step(EPS[:, None] - np.log(one / two), 1.0, 0.1, relation)
        worst = np.maximum(worst, np.sum(one * inner, axis=1))
    assert (worst <= first * (1 + 1e-9)).all() and (first <= 1.0).all() and (worst[:3] > 0.3 * first[:3]).all()


@pytest.mark.parametrize("law", [LAW, selection.Binomial(1, 0.6)], ids=repr)
def test_the_pair_is_a_convex_profile_that_agrees_with_itself_backwards(law, coarse_pairs):
    p, q = map(np.array, BASES[1])
    run = selection.select(ja.FiniteOutput(p, q), law)
    ratio = np.exp(np.linspace(-4.0, 4.0, 81))
    sides = {}
    for direction in ("remove", "add"):
        part = components(run, "add_or_remove_one", direction)
        loss, mass = part.finite_loss[0, 0], part.finite_mass[0, 0]
        gain = np.maximum(1.0 - ratio[:, None] * np.exp(-loss), 0.0)
        sides[direction] = np.sum(mass * gain, axis=1) + part.delta_infinity[0]
    for one, other in (("remove", "add"), ("add", "remove")):
        values = sides[one]
        assert (values >= np.maximum(1.0 - ratio, 0.0) - 1e-12).all() and (values <= 1.0 + 1e-12).all()
        assert (np.diff(np.diff(values) / np.diff(ratio)) >= -1e-10).all()
        np.testing.assert_allclose(values, 1.0 - ratio + ratio * sides[other][::-1], atol=1e-11)
        exact = [
            hockey_stick(*(pair if one == "remove" else pair[::-1]), np.log(ratio)) for pair in fixed_orders(p, q, law)
        ]
        assert (np.max(exact, axis=0) <= values + 1e-12).all()
