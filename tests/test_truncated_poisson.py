"""Poisson samples with a cap: a table of another program, enumeration of small data sets, tails against mpmath."""

import functools
import itertools
import math

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binom, norm

import jaxacct as ja
from jaxacct.mechanisms.sampled_batches import cap_of

TABLE = [
    (1, 1000, 0.05, 75, 1000, 1e-5, 0.000399828227, 0.0483596264, 11.1512186, 8.46555317, 11.1703637, 18.8129636),
    (1, 1000, 0.05, 60, 1000, 1e-5, 0.0855519988, 0.0470328125, 19.9598671, 9.75383367, 21.6767114, 26.8725464),
    (2, 1000, 0.05, 50, 1000, 1e-5, 0.517369544, 0.0446944515, 7.3576955, 5.6550516, 11.3637676, 12.5270698),
    (1, 10000, 0.01, 150, 10000, 1e-6, 1.64838851e-06, 0.00981820259, 6.91054931, 6.20752051, 6.91064858, 11.9573863),
    (0.8, 60000, 0.004, 300, 5000, 1e-6, 0.000101589235, 0.00394113126, 5.53630678, 2.19209618, 5.5407333, 5.99426281),
    (1.5, 100, 0.1, 10, 100, 0.001, 0.5355233, 0.0778387211, 5.22302315, 2.65141848, 6.77344348, 7.38909316),
    (1, 5, 0.4, 2, 1, 0.001, 0.5248, 0.24195122, 4.76896757, 0.419052659, 5.04596484, 5.04597295),
]
"""sigma, n, q, cap, steps, delta, tau, q', epsilon of remove, of add, and of a looser form of zero-out and replace."""


@pytest.mark.parametrize("row", TABLE)
def test_table(row):
    sigma, n, q, cap, steps, delta, tau, rate, remove, add, zero, _ = row
    step = ja.TruncatedPoissonSampled(ja.Gaussian(sigma), q, n, cap)
    found = cap_of(n, q, cap)
    assert found.chance[1] == pytest.approx(tau, rel=1e-8) and found.rate[1] == pytest.approx(rate, rel=1e-8)
    for relation, known in (("remove_one", remove), ("add_one", add)):
        bound = ja.epsilon(ja.repeat(step, steps), delta, relation=relation)
        assert bound.upper == pytest.approx(known, rel=1e-7) and bound.kind == "bound" and bound.lower == 0.0
    assert max(remove, add) <= zero


@pytest.mark.parametrize("row", [TABLE[-1], TABLE[-2]])
def test_zero_out_and_replace_are_below_the_looser_form(row):
    sigma, n, q, cap, steps, delta, *_, zero, replaced = row
    run = ja.repeat(ja.TruncatedPoissonSampled(ja.Gaussian(sigma), q, n, cap), steps)
    for relation, known in (("zero_out", zero), ("replace_one", replaced)):
        assert ja.epsilon(run, delta, relation=relation).upper <= known * (1 + 1e-6)


@functools.cache
def law(values, q, cap):
    """Means and weights of the sum of a Poisson sample cut to a uniform subset of `cap`."""
    found = {}
    for drawn in itertools.product((0, 1), repeat=len(values)):
        chosen = [value for value, there in zip(values, drawn, strict=True) if there]
        chance = math.prod(q if there else 1 - q for there in drawn)
        subsets = list(itertools.combinations(chosen, min(cap, len(chosen))))
        for subset in subsets:
            found[sum(subset)] = found.get(sum(subset), 0.0) + chance / len(subsets)
    return found


def hockey_stick(p, q, sigma, eps):
    x = np.linspace(-16.0, 16.0, 4_001)
    one, two = (sum(w * norm.pdf(x, m, sigma) for m, w in law.items()) for law in (p, q))
    return float(np.maximum(one - math.exp(eps) * two, 0.0).sum() * (x[1] - x[0]))


@pytest.mark.parametrize(
    ("n", "q", "cap", "sigma"),
    [(4, 0.4, 2, 1.0), (5, 0.6, 2, 0.7), pytest.param(6, 0.3, 1, 1.5, marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("eps", [0.7, pytest.param(0.0, marks=pytest.mark.slow)])
def test_enumeration_of_small_data_sets(n, q, cap, sigma, eps):
    """Every data set of records -1 and 1: no pair of neighbours exceeds the bound."""
    step = ja.TruncatedPoissonSampled(ja.Gaussian(sigma), q, n, cap)
    relations = ("remove_one", "add_one", "zero_out", "replace_one")
    bound = {relation: ja.delta(step, eps, relation=relation, rtol=1e-2).upper for relation in relations}
    worst = dict.fromkeys(relations, 0.0)
    for ones in range(n):  # the order of the others does not matter
        others = (1.0,) * ones + (-1.0,) * (n - 1 - ones)
        p, absent = law((1.0, *others), q, cap), law(others, q, cap)
        zero, other = law((0.0, *others), q, cap), law((-1.0, *others), q, cap)
        for relation, pairs in {
            "remove_one": [(p, absent)],
            "add_one": [(absent, p)],
            "zero_out": [(p, zero), (zero, p)],
            "replace_one": [(p, other), (other, p)],
        }.items():
            worst[relation] = max(worst[relation], *(hockey_stick(*pair, sigma, eps) for pair in pairs))
    for relation in relations:
        assert worst[relation] <= bound[relation] * (1 + 1e-6), relation
        assert worst[relation] >= 0.15 * bound[relation], relation  # the bound is of the right size


def test_cap_that_never_binds_is_poisson_sampling():
    capped, plain = ja.TruncatedPoissonSampled(ja.Gaussian(1.0), 0.1, 50, 50), ja.PoissonSampled(ja.Gaussian(1.0), 0.1)
    one, two = (ja.epsilon(ja.repeat(m, 20), 1e-5) for m in (capped, plain))
    assert (one.lower, one.upper, one.kind) == (two.lower, two.upper, "certified")
    assert capped.chance_of_cap() == 0.0


def test_larger_caps_leak_less():
    caps = [50, 75, 999]
    run = ja.repeat(ja.TruncatedPoissonSampled(ja.Gaussian(1.0), 0.05, 1000, caps), 300)
    upper = ja.epsilon(run, 1e-5).upper
    assert np.all(np.diff(upper) <= 1e-9 * upper[1:])
    plain = ja.epsilon(ja.dp_sgd(1.0, 0.05, 300), 1e-5)
    assert plain.lower <= upper[-1] == pytest.approx(plain.upper, rel=1e-6)


def test_cap_for_finds_one_that_costs_nothing():
    cap = ja.cap_for(0.05, 1000, steps=300, delta=1e-5)
    chances = ja.TruncatedPoissonSampled(ja.Gaussian(1.0), 0.05, 1000, [cap, cap - 1]).chance_of_cap()
    assert 300 * chances[0] <= 1e-8 < 300 * chances[1]
    capped = ja.repeat(ja.TruncatedPoissonSampled(ja.Gaussian(1.0), 0.05, 1000, cap), 300)
    plain = ja.epsilon(ja.dp_sgd(1.0, 0.05, 300), 1e-5).upper
    assert ja.epsilon(capped, 1e-5).upper == pytest.approx(plain, rel=1e-3)
    assert ja.cap_for(0.9, 5, steps=1, delta=1e-9) == 5


@pytest.mark.parametrize(("rate", "size"), [(0.2, 1_000_000), (0.01, 1_000_000), (1e-3, 1000), (0.5, 40)])
def test_cap_for_is_the_smallest_also_below_the_expected_size(rate, size):
    cap = ja.cap_for(rate, size, steps=1, delta=0.9, share=0.9)
    assert binom.sf(cap - 1, size - 1, rate) <= 0.81
    assert cap == 1 or binom.sf(cap - 2, size - 1, rate) > 0.81


@pytest.mark.slow  # test_batch_rules_asked.py calibrates noise under a cap, too
def test_calibration_of_noise_under_a_cap():
    found = ja.calibrate(
        lambda s: ja.repeat(ja.TruncatedPoissonSampled(ja.Gaussian(s), 0.05, 1000, 80), 50),
        target_epsilon=1.5, target_delta=1e-5, bracket=(0.5, 9.0), rtol=3e-2,
    )  # fmt: skip
    assert found.status == "ok" and found.epsilon.upper <= 1.5 <= found.epsilon.upper * 1.06


def tail_and_rate(n, q, cap):
    with mpmath.workdps(60):
        p = mpmath.mpf(q)

        def tail(size, least):
            return mpmath.fsum(mpmath.binomial(size, k) * p**k * (1 - p) ** (size - k) for k in range(least, size + 1))

        tau = tail(n - 1, cap)
        return tau, mpmath.mpf(cap) / n * tail(n, cap + 1) / tau


@given(n=st.integers(2, 200), q=st.floats(1e-6, 0.999), share=st.floats(0.0, 1.0))
@settings(deadline=None, max_examples=40)
def test_tail_and_rate_hold_from_both_sides(n, q, share):
    cap = min(1 + int(share * (n - 1)), n - 1)
    found, (tau, rate) = cap_of(n, q, cap), tail_and_rate(n, q, cap)
    assert found.chance[0] <= tau <= found.chance[1] and found.rate[0] <= rate <= found.rate[1]
    assert found.rate[1] <= found.rate[0] * (1 + 1e-11)
    if tau > 1e-280:
        assert found.chance[1] <= found.chance[0] * (1 + 1e-11)


@pytest.mark.parametrize(
    ("n", "q", "cap"), [(10**9, 1e-3, 10**6 + 5000), (10**9, 0.5, 5 * 10**8), (10**9, 1e-9, 3), (10**6, 0.9, 1)]
)
def test_large_data_sets(n, q, cap):
    found = cap_of(n, q, cap)
    assert 0.0 <= found.chance[0] <= found.chance[1] <= 1.0 and found.chance[1] <= found.chance[0] * (1 + 1e-8)
    assert 0.0 < found.rate[0] <= found.rate[1] <= q * (1 + 1e-8)
    assert found.chance[1] == pytest.approx(binom.sf(cap - 1, n - 1, q), rel=1e-6)


def test_cap_far_beyond_the_sample_is_sound_where_its_chance_underflows():
    found = cap_of(10**6, 1e-3, 10**5)
    assert found.chance == (0.0, 1e-290) and 0.0 < found.rate[1] < 1e-3
    step = ja.TruncatedPoissonSampled(ja.Gaussian(1.0), 1e-3, 10**6, 10**5)
    capped, plain = (ja.epsilon(m, 1e-5) for m in (step, ja.PoissonSampled(ja.Gaussian(1.0), 1e-3)))
    assert plain.lower <= capped.upper == pytest.approx(plain.upper, rel=1e-6)
