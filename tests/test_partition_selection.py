"""Partition selection: its cost, and the stated privacy of the optimal rule and of thresholded counts."""

import itertools
import math
import random
from fractions import Fraction

import mpmath
import numpy as np
import pytest
from helpers import refusal
from scipy import stats

import jaxacct as ja
from jaxacct import samplers
from jaxacct.core.validation import InputError

RULES = [(1.0, 1e-5), (0.1, 1e-6), (3.0, 0.01), (0.01, 0.3), (1e-9, 1e-3)]


def delta_of(p, q, epsilon):
    """Return delta between Bernoulli(p) and Bernoulli(q), the larger of both directions."""
    p, q = float(p), float(q)
    both = ((p, q), (1.0 - p, 1.0 - q), (q, p), (1.0 - q, 1.0 - p))
    return max(a - math.exp(epsilon) * b for a, b in both)


def test_the_mechanism_is_a_composition():
    keys, one = ja.PartitionSelection(0.1, [1e-8, 1e-7], [5, 20]), ja.ApproximateDP(0.1, [1e-8, 1e-7])
    for relation, times in (("add_or_remove_one", 1), ("zero_out", 1), ("replace_one", 2)):
        ours = ja.epsilon(keys, 1e-5, relation=relation)
        theirs = ja.epsilon(ja.repeat(one, [5 * times, 20 * times]), 1e-5, relation=relation)
        np.testing.assert_allclose(ours.upper, theirs.upper, rtol=1e-9)
        assert np.all(ours.kind == "bound") and np.all(ours.lower == 0.0)
    single = ja.PartitionSelection(0.5, 1e-6)
    assert 0.499 < float(ja.epsilon(single, 1.0001e-6).upper) <= 0.5 * (1 + 1e-9)
    assert math.isinf(ja.epsilon(single, 0.9999e-6).upper)
    bracket = ja.epsilon(ja.PartitionSelection(0.1, 1e-8, 20), 1e-5)
    assert ja.verify(ja.PartitionSelection(0.1, 1e-8, 20), bracket, delta=1e-5).status == "verified"
    assert ja.verify(ja.PartitionSelection(0.1, 1e-8, 40), bracket, delta=1e-5).status == "refuted"
    assert 0.0 < ja.epsilon(ja.PoissonSampled(single, 0.1), 1e-6).upper < 0.1


@pytest.mark.parametrize("epsilon, delta", RULES)
def test_the_rule_is_private_and_the_largest(epsilon, delta):
    """The check is exact, with rational bounds of e^epsilon. It ends at the first count that is sure to be released."""
    choice = samplers.PartitionChoice(epsilon, delta)
    table = [Fraction(x, 2**128) for x in choice._table(20_000)]
    power, d = Fraction(math.exp(epsilon)), Fraction(delta)
    low, high = power * (1 - Fraction(1, 2**45)), power * (1 + Fraction(1, 2**45))  # the float is within 2^-51
    assert table[0] == 0 and (table[-1] == 1 or len(table) == 20_001)
    for p, q in itertools.pairwise(table):
        assert p <= q
        assert q <= high * p + d and 1 - p <= high * (1 - q) + d + Fraction(1, 2**45)
        largest = min(low * p + d, 1 - (1 - p - d) / low, Fraction(1))
        assert q >= largest - Fraction(1, 2**44)


def test_its_profile_is_near_that_of_the_pair():
    choice = samplers.PartitionChoice(0.1, 1e-6)
    table = [Fraction(x, 2**128) for x in choice._table(250)]
    assert [choice.probability(n) for n in (0, 1, 99)] == [table[n] for n in (0, 1, 99)]
    for epsilon in (0.0, 0.03, 0.07, 0.1):
        worst = max(delta_of(p, q, epsilon) for p, q in itertools.pairwise(table))
        bound = float(ja.delta(choice.privacy, epsilon).upper)
        assert worst <= bound * (1 + 1e-9) and worst >= 0.9 * bound


def test_keys_are_released_with_the_stated_probability():
    choice, rng = samplers.PartitionChoice(1.0, 0.05), random.Random(1)
    counts = {f"{n}, {copy}": n for n in (0, 1, 2, 3, 5, 9) for copy in range(1000)}
    kept = choice.sample(counts, rng)
    assert kept == sorted(kept, key=repr)
    for n in (0, 1, 2, 3, 5, 9):
        number = sum(counts[key] == n for key in kept)
        assert stats.binomtest(number, 1000, float(choice.probability(n))).pvalue > 1e-6
    assert choice.sample({}) == [] and choice.probability(10**9) == 1


@pytest.mark.parametrize("epsilon, delta", [(1.0, 1e-5), (0.1, 1e-6), (3.0, 0.01), (5.0, 0.9)])
def test_the_threshold_is_the_least_that_holds(epsilon, delta):
    tail = lambda t: math.exp(-epsilon * (t - 1)) / (1.0 + math.exp(-epsilon)) if t > 1 else 1.0
    t = samplers.ThresholdedCounts(epsilon, delta).threshold
    assert tail(t) <= delta and tail(t - 1) > delta


@pytest.mark.parametrize("epsilon, delta", [(1e-300, 1e-5), (1e-20, 1e-10)])
def test_a_threshold_beyond_2_to_the_53_is_found_and_holds(epsilon, delta):
    """Above 2^53, x + 1 may be the same float as x, so that the old search in steps of 1 did not end."""
    t = samplers.ThresholdedCounts(epsilon, delta).threshold
    assert mpmath.exp(-mpmath.mpf(epsilon) * (t - 1)) / (1 + mpmath.exp(-mpmath.mpf(epsilon))) <= delta


def test_thresholded_counts_have_the_stated_law():
    table, rng = samplers.ThresholdedCounts(0.5, 0.02), random.Random(2)
    counts = {f"{n}, {copy}": n for n in (0, 1, 4, 30) for copy in range(1000)}
    released = table.release(counts, rng)
    x, base = table.threshold, math.exp(-0.5)
    for n in (0, 1, 4, 30):
        values = [value for key, value in released.items() if counts[key] == n]
        at_least = base ** (x - n) / (1 + base) if x > n else 1.0 - base ** (n - x + 1) / (1 + base)
        assert stats.binomtest(len(values), 1000, at_least if n else 0.0).pvalue > 1e-6
        assert all(value >= x for value in values)
    assert float(table.privacy.delta) >= base ** (x - 1) / (1 + base)


def test_what_is_refused():
    for one in (samplers.PartitionChoice, samplers.ThresholdedCounts):
        for bad in ((0.0, 0.1), (1.0, 0.0), (1.0, 1.0), (1.0, 0.1, 0), (1.0, 0.1, 1.5)):
            with pytest.raises(InputError):
                one(*bad)
    for bad in ({"a": -1}, {"a": 1.5}, [1, 2]):
        assert "count" in refusal(samplers.PartitionChoice(1.0, 0.1).sample, bad)
        assert "count" in refusal(samplers.ThresholdedCounts(1.0, 0.1).release, bad)
    assert "count" in refusal(samplers.PartitionChoice(1.0, 0.1).probability, -1)


def test_at_the_mass_at_infinity_itself_epsilon_is_that_of_all_keys():
    for keys, relation, delta, epsilon in [
        (ja.PartitionSelection(1.0, 1e-5), "add_or_remove_one", 1e-5, 1.0),
        (ja.PartitionSelection(0.5, 0.5, 2), "zero_out", 0.75, 1.0),
        (ja.PartitionSelection(0.5, 0.5), "replace_one", 0.75, 1.0),
    ]:
        assert ja.epsilon(keys, delta, relation=relation).upper == pytest.approx(epsilon, rel=1e-12)
        assert ja.epsilon(keys, np.nextafter(delta, 0.0), relation=relation).upper == np.inf
