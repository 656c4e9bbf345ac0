"""The formulas of the batch rules against enumeration, and the oracles against each other."""

import itertools
import math
import re

import batch_rules_oracles as oracles
import numpy as np
import pytest
from mpmath import mp

import jaxacct as ja


@pytest.mark.parametrize(
    ("sigma", "epsilon", "direction"),
    [(2.0, 1.46, "add")]
    + [pytest.param(*law, "remove", marks=pytest.mark.slow) for law in ((1.0, 1.0), (0.3, 8.0), (30.0, 0.05))]
    + [pytest.param(*law, "add", marks=pytest.mark.slow) for law in ((1.0, 1.0), (0.3, 8.0), (30.0, 0.05))],
)
def test_two_slots_by_nested_sums_and_by_mpmath(sigma, epsilon, direction, monkeypatch):
    monkeypatch.setattr(oracles, "DIGITS", 16)
    exact = (oracles.allocation_remove if direction == "remove" else oracles.allocation_add)(2, sigma, epsilon)
    assert math.isclose(oracles.allocation_nested(2, sigma, epsilon, direction), exact, rel_tol=1e-9)


@pytest.mark.parametrize("direction", ["remove", "add"])
def test_monte_carlo_holds_the_nested_sums(direction):
    low, high = oracles.allocation_by_sampling(3, 1.0, 1.0, direction, 100_000)
    assert low <= oracles.allocation_nested(3, 1.0, 1.0, direction) <= high
    low, high = oracles.k_of_t_by_sampling(2, 2, 1.0, 1.0, direction, 100_000)  # both slots: a Gaussian of sqrt(2)
    gaussian = oracles.hockey_stick({mp.sqrt(2): 1}, {mp.mpf(0): 1}, mp.e)
    assert low <= gaussian <= high


def test_allocation_of_randomised_response_by_enumeration():
    """One of t slots: the law of the number of outputs that a record makes likely, counted by hand."""
    keep, t, epsilon = 0.75, 4, 0.2
    remove, add = oracles.finite_allocation([keep, 1 - keep], [1 - keep, keep], t, epsilon)
    by_count = [(math.comb(t, m) * (1 - keep) ** m * keep ** (t - m), (m * 3 + (t - m) / 3) / t) for m in range(t + 1)]
    grown = math.exp(epsilon)
    assert math.isclose(remove, sum(q * max(ratio - grown, 0) for q, ratio in by_count), rel_tol=1e-12)
    assert math.isclose(add, sum(q * max(1 - grown * ratio, 0) for q, ratio in by_count), rel_tol=1e-12)


@pytest.mark.parametrize(("k", "t", "upper"), [(2, 4, 0.0846), (2, 5, 0.0640), (3, 6, 0.164), (2, 3, 0.137)])
def test_k_of_t_leaks_less_than_blocks(k, t, upper):
    assert oracles.k_of_t_by_sampling(k, t, 1.0, 1.5, "remove", 200_000)[1] < upper


@pytest.mark.parametrize("relation", ["add_remove", "zero_out", "replace"])
@pytest.mark.parametrize(("n", "cap"), [(3, 1), (4, 2), (5, 2)])
def test_no_capped_sample_of_poles_leaks_more_than_the_bound(relation, n, cap):
    """The changed record is at 1, the others at -1 or 1. Every sample and every kept subset is enumerated."""
    sigma, worst = 1.0, 0.0
    for q, epsilon in itertools.product((0.3, 1.0), (0.0, 0.5)):
        bound = {d: float(oracles.truncated_bound(n, q, cap, sigma, epsilon, relation, d)) for d in ("remove", "add")}
        for ones in range(n):
            others = [1.0] * ones + [-1.0] * (n - 1 - ones)
            changed = {"add_remove": None, "zero_out": 0.0, "replace": -1.0}[relation]
            one = oracles.truncated_by_enumeration([*others, 1.0], q, cap)
            two = oracles.truncated_by_enumeration([*others, changed], q, cap)
            for direction, (p, other) in {"remove": (one, two), "add": (two, one)}.items():
                found = oracles.any_hockey_stick(p, other, sigma, math.exp(epsilon))
                assert found <= bound[direction] * (1 + 1e-9) + 1e-13
                worst = max(worst, found / bound[direction] if bound[direction] > 1e-9 else 0.0)
    assert worst > 0.5  # the bound is near what is attained


def test_the_numbers_of_a_cap_add_up_to_the_closed_form():
    n, q, cap = 20, 0.3, 7
    tau, rate = oracles.cap_numbers(n, q, cap)
    with mp.workdps(oracles.DIGITS):
        more = sum(oracles.binomial_law(n, q)[cap + 1 :])
        assert mp.almosteq(rate, more * cap / n / tau, 1e-40)


def test_without_replacement_the_group_displaces():
    """Batches of 2 from a group of 2 at 1 and 3 others at -1: their law is exactly the mixture with shifts 2 j."""
    group, others, sigma, epsilon = [1.0, 1.0], [-1.0, -1.0, -1.0], 1.3, 0.4
    p, q = {}, {}
    for law, records in ((p, group + others), (q, others)):
        batches = list(itertools.combinations(records, 2))
        for batch in batches:
            law[sum(batch)] = law.get(sum(batch), 0.0) + 1 / len(batches)
    weights = oracles.hypergeometric_law(5, 2, 2)
    pair = oracles.mixture(2, weights, sigma), {mp.mpf(0): mp.mpf(1)}
    for one, two, (left, right) in ((p, q, pair), (q, p, pair[::-1])):
        exact = oracles.any_hockey_stick(one, two, sigma, math.exp(epsilon))
        assert math.isclose(exact, oracles.hockey_stick(left, right, math.exp(epsilon)), rel_tol=1e-9)


def test_with_replacement_by_enumeration():
    n, draws, sigma, epsilon = 4, 3, 1.1, 0.3
    p, q = {}, {}
    for law, records in ((p, [1.0, -1.0, -1.0, -1.0]), (q, [-1.0] * 3)):
        for drawn in itertools.product(records, repeat=draws):
            law[sum(drawn)] = law.get(sum(drawn), 0.0) + len(records) ** -draws
    exact = oracles.any_hockey_stick(p, q, sigma, math.exp(epsilon))
    weights = oracles.binomial_law(draws, mp.mpf(1) / n)
    pair = oracles.mixture(2, weights, sigma), {mp.mpf(0): mp.mpf(1)}
    assert math.isclose(exact, oracles.hockey_stick(*pair, math.exp(epsilon)), rel_tol=1e-9)


@pytest.mark.parametrize(
    ("batch", "size", "found"), [(100_000, 16, "batch_size = 100000"), ([1, 20], 16, "batch_size[1] = 20")]
)
def test_swapped_counts_of_draws_with_replacement_are_refused(batch, size, found):
    with pytest.raises(ja.InputError, match=re.escape(f"{found} must be <= dataset_size = 16")):
        ja.SampledWithReplacement(ja.Gaussian(1.0), batch, size)


def test_two_steps_of_gaussians_are_one():
    two = oracles.two_steps({mp.mpf(1): mp.mpf(1)}, {mp.mpf(0): mp.mpf(1)}, mp.e, step=0.2)
    one = oracles.hockey_stick({mp.sqrt(2): mp.mpf(1)}, {mp.mpf(0): mp.mpf(1)}, mp.e)
    assert math.isclose(two, one, rel_tol=1e-9)


def test_shuffled_batches_leak_more_than_random_allocation():
    """delta(1) at sigma = 1, t = 2: .1172 between .0592 of random allocation and .1269 of the Gaussian."""
    found = oracles.shuffled_two(1.0, 1.0, "remove")
    assert math.isclose(found, 0.1172148, rel_tol=1e-6)
    # a lower bound without an integral: the event that some output exceeds 2.2, by products of normal cdfs
    u, grown = 2.2, math.e
    low = np.array([float(mp.ncdf(u - m)) for m in (0, 1, 2)])
    assert (1 - low[0] * low[2]) - grown * (1 - low[0] * low[1]) <= found


def test_a_lattice_is_as_long_as_its_last_plan_needs():
    """The first plan expects an epsilon of 25, for which a lattice of 2^17 nodes suffices; epsilon is .31."""
    run = ja.repeat(ja.SampledWithReplacement(ja.Gaussian(1.0), 16, 100_000), 8)
    found = ja.epsilon(run, 1e-6, relation="remove_one")
    assert found.kind == "certified" and found.upper - found.lower <= 0.03 * found.upper
