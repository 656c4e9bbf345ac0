"""Groups of records, against tables of another program, theorems and enumeration."""

import itertools
import math

import numpy as np
import pytest
from helpers import refusal
from scipy.stats import binom, hypergeom

import jaxacct as ja
from jaxacct.interop import from_json, to_json
from jaxacct.mechanisms.gaussian_mixtures import binomial, hypergeometric

TABLE = [
    (1, 0.01, 1000, 5, 1e-5, 11.6379744, 8.54296028),
    (1, 0.01, 1000, 10, 1e-5, 27.8995583, 19.4620893),
    (2, 0.01, 10000, 5, 1e-6, 15.8606694, 15.2168673),
    (4, 0.05, 1000, 10, 1e-5, 24.9721247, 23.4651576),
    (1.5, 0.1, 100, 2, 1e-8, 10.8377517, 6.90724606),
    (3, 0.2, 50, 4, 1e-5, 10.4137326, 8.32246589),
    (1, 0.01, 1, 2, 1e-8, 1.69827934, 0.0197697123),
    (1, 0.1, 1, 3, 1e-5, 5.61615726, 0.302879201),
]
"""sigma, q, steps, k, delta, epsilon of remove and of add: Gauss-Legendre and damped inversion, eight digits."""


@pytest.mark.parametrize("row", TABLE)
def test_table(row):
    sigma, q, steps, group, delta, remove, add = row
    run = ja.dp_sgd(sigma, q, steps, group=group)
    for relation, known in (("remove_one", remove), ("add_one", add), ("zero_out", max(remove, add))):
        found = ja.epsilon(run, delta, relation=relation)
        assert found.lower * (1 - 2e-8) <= known <= found.upper * (1 + 2e-8)
        assert found.upper == pytest.approx(known, rel=1e-7) and found.kind == "certified" and found.ok


def test_group_of_one_is_the_sampled_gaussian_bit_for_bit():
    one, two = ja.PoissonSampled(ja.Gaussian(1.0), 0.01, group=1), ja.PoissonSampled(ja.Gaussian(1.0), 0.01)
    assert one == two and repr(one) == repr(two) and to_json(one) == to_json(two)
    assert ja.epsilon(ja.repeat(one, 100), 1e-5).upper == ja.epsilon(ja.dp_sgd(1.0, 0.01, 100), 1e-5).upper


def test_certain_sampling_is_a_gaussian_of_k_times_the_sensitivity():
    for run, sigma in ((ja.dp_sgd(6.0, 1.0, 4, group=3), 1.0), (ja.dp_sgd(500.0, 1.0, 1, group=1000), 0.5)):
        one, two = ja.epsilon(run, 1e-5), ja.epsilon(ja.Gaussian(sigma), 1e-5)
        assert one.lower <= two.upper and two.lower <= one.upper and one.relative_width < 1e-6
    replaced = ja.epsilon(ja.dp_sgd(6.0, 1.0, 4, group=3), 1e-5, relation="replace_one")
    assert replaced.upper == pytest.approx(ja.epsilon(ja.Gaussian(0.5), 1e-5).upper, rel=1e-3)
    assert replaced.kind == "bound" and replaced.upper >= ja.epsilon(ja.Gaussian(0.5), 1e-5).lower


def test_larger_groups_leak_more():
    ends = [ja.epsilon(ja.dp_sgd(2.0, 0.02, 200, group=k), 1e-6) for k in (1, 2, 5)]
    assert all(a.upper < b.lower for a, b in itertools.pairwise(ends))


def test_weights():
    from decimal import Decimal

    assert binomial(7, Decimal("0.25")) == pytest.approx(binom.pmf(np.arange(8), 7, 0.25), rel=1e-12)
    assert hypergeometric(30, 4, 9) == pytest.approx(hypergeom.pmf(np.arange(5), 30, 4, 9), rel=1e-10)
    assert hypergeometric(10, 4, 8) == pytest.approx(hypergeom.pmf(np.arange(5), 10, 4, 8), rel=1e-10)


def hockey_stick(p, q, sigma, eps):
    """H of two mixtures of N(m, sigma^2) on the line, each a dict of means and weights."""
    x = np.linspace(-12.0, 12.0, 4_801)
    one, two = (sum(w * np.exp(-0.5 * ((x - m) / sigma) ** 2) for m, w in law.items()) for law in (p, q))
    area = np.maximum(one - math.exp(eps) * two, 0.0).sum() * (x[1] - x[0])
    return float(area / (sigma * math.sqrt(2.0 * math.pi)))


def law_of_sums(values, batch):
    """Means and weights of the sum of a uniform subset of a fixed size."""
    found = {}
    subsets = list(itertools.combinations(values, batch))
    for subset in subsets:
        found[sum(subset)] = found.get(sum(subset), 0.0) + 1.0 / len(subsets)
    return found


@pytest.mark.parametrize(("n", "batch", "group"), [(6, 2, 2), (5, 2, 3), (6, 3, 2)])
def test_without_replacement_by_enumeration(n, batch, group):
    """The bounds of adding and removing a group are attained where all other records are -1."""
    sigma, eps = 1.5, 0.6
    step = ja.SampledWithoutReplacement(ja.Gaussian(sigma), batch / n, group=group, dataset_size=n)
    relations = ("remove_one", "add_one", "replace_one", "zero_out")
    bound = {relation: ja.delta(step, eps, relation=relation).upper for relation in relations}
    worst = dict.fromkeys(bound, 0.0)
    for others in itertools.product((-1.0, 1.0), repeat=n - group):
        with_it = law_of_sums([1.0] * group + list(others), batch)
        without = law_of_sums(others, batch) if len(others) >= batch else None
        zero = law_of_sums([0.0] * group + list(others), batch)
        replaced = law_of_sums([-1.0] * group + list(others), batch)
        pairs = {"replace_one": (with_it, replaced), "zero_out": (with_it, zero)}
        if without:
            pairs |= {"remove_one": (with_it, without), "add_one": (without, with_it)}
        for relation, (p, q) in pairs.items():
            worst[relation] = max(worst[relation], hockey_stick(p, q, sigma, eps))
        worst["zero_out"] = max(worst["zero_out"], hockey_stick(zero, with_it, sigma, eps))
    for relation, value in worst.items():
        assert value <= bound[relation] * (1 + 1e-5), relation
    if n - group >= batch:
        for relation in ("remove_one", "add_one"):
            assert bound[relation] == pytest.approx(worst[relation], rel=1e-5)


@pytest.mark.parametrize("relation", ["remove_one", "add_one", "replace_one", "zero_out"])
def test_zero_out_without_replacement_and_draws_with_it_by_enumeration(relation):
    sigma, eps, n, batch = 1.2, 0.5, 4, 2
    fixed = ja.SampledWithoutReplacement(ja.Gaussian(sigma), batch / n)
    drawn = ja.SampledWithReplacement(ja.Gaussian(sigma), batch, n)
    worst = {"fixed": 0.0, "drawn": 0.0}

    def draws(values):
        found = {}
        for chosen in itertools.product(values, repeat=batch):
            found[sum(chosen)] = found.get(sum(chosen), 0.0) + len(values) ** -batch
        return found

    for others in itertools.product((-1.0, 0.0, 1.0), repeat=n - 1):
        rest = {"replace_one": [-1.0, *others], "zero_out": [0.0, *others]}.get(relation, list(others))
        for name, law in (("fixed", lambda values: law_of_sums(values, batch)), ("drawn", draws)):
            p, q = law([1.0, *others]), law(rest)
            orders = {"remove_one": [(p, q)], "add_one": [(q, p)]}.get(relation, [(p, q), (q, p)])
            worst[name] = max(worst[name], *(hockey_stick(*order, sigma, eps) for order in orders))
    found = {"fixed": ja.delta(fixed, eps, relation=relation), "drawn": ja.delta(drawn, eps, relation=relation)}
    for name, value in worst.items():
        assert value <= found[name].upper * (1 + 1e-5), name
    assert found["fixed"].upper == pytest.approx(worst["fixed"], rel=1e-3)  # some other records attain the bound
    if relation in ("remove_one", "add_one"):
        assert found["drawn"].upper == pytest.approx(worst["drawn"], rel=1e-5) and found["drawn"].kind == "certified"
    else:
        assert found["drawn"].kind == "bound"


def test_refusals_and_forms():
    gauss = ja.Gaussian(1.0)
    assert "an integer >= 1 and <= 1000" in refusal(ja.PoissonSampled, gauss, 0.1, group=1.5)
    assert "must be one number" in refusal(ja.PoissonSampled, gauss, 0.1, group=[1, 2])
    assert "Laplace" in refusal(ja.PoissonSampled, ja.Laplace(1.0), 0.1, group=2)
    assert "outermost" in refusal(ja.PoissonSampled, ja.PoissonSampled(gauss, 0.1, group=2), 0.1)
    assert "dataset_size" in refusal(ja.SampledWithoutReplacement, gauss, 0.1, group=2)
    assert "whole number <= dataset_size - group" in refusal(
        ja.SampledWithoutReplacement, gauss, 0.15, group=2, dataset_size=10
    )
    words = refusal(ja.epsilon, ja.ShuffledBatches(gauss, 4), 1e-5)
    assert "ja.Gaussian(noise_multiplier / 5**0.5)" in words and "the other claim" in words and "zero_out" in words
    assert "> group" in refusal(ja.SampledWithReplacement, gauss, 2, 3, group=3)
    for mechanism in (
        ja.dp_sgd(1.0, 0.1, 10, group=4),
        ja.SampledWithoutReplacement(gauss, 0.1, group=2, dataset_size=100),
        ja.SampledWithReplacement(gauss, 10, 1000, group=2),
        ja.TruncatedPoissonSampled(gauss, 0.1, 100, 20),
        ja.ShuffledBatches(gauss, 7),
    ):
        assert from_json(to_json(mechanism)) == mechanism
        assert eval(mechanism.expression(), {"ja": ja}) == mechanism
    assert eval(repr(ja.PoissonSampled(gauss, 0.1, group=2)), vars(ja)) == ja.PoissonSampled(gauss, 0.1, group=2)


def test_shuffled_batches_are_one_gaussian_a_pass():
    passes = ja.repeat(ja.ShuffledBatches(ja.Gaussian(3.0), 2), 4)
    assert ja.epsilon(passes, 1e-5, relation="zero_out").upper == ja.epsilon(ja.Gaussian(1.5), 1e-5).upper
    assert ja.epsilon(passes, 1e-5, relation="replace_one").upper == ja.epsilon(ja.Gaussian(0.75), 1e-5).upper


def test_calibration_of_noise_and_of_the_group():
    goal = {"target_epsilon": 2.0, "target_delta": 1e-5}
    noise = ja.calibrate(lambda s: ja.dp_sgd(s, 0.05, 1, group=2), bracket=(0.5, 8.0), rtol=0.1, **goal)
    assert noise.status == "ok" and noise.epsilon.upper <= 2.0 < noise.epsilon.upper * 1.3
    group = ja.calibrate(lambda k: ja.dp_sgd(2.0, 0.05, 1, group=k), bracket=(2, 20), whole=True, rtol=1e-2, **goal)
    at, beyond = (ja.epsilon(ja.dp_sgd(2.0, 0.05, 1, group=int(group.value) + more), 1e-5) for more in (0, 1))
    assert at.upper <= 2.0 < beyond.upper


def test_a_group_that_is_always_there_is_one_gaussian():
    """With 1e9 steps neither the contour engine nor the lattice engine narrows the bracket; a closed form does."""
    whole = ja.epsilon(ja.dp_sgd(1.0, 1.0, 1e9, group=2), 1e-20)
    plain = ja.epsilon(ja.repeat(ja.Gaussian(0.5), 1e9), 1e-20)
    assert whole.status == "ok" and whole.lower <= plain.upper and plain.lower <= whole.upper
    assert whole.upper - whole.lower < 1e-9 * whole.upper
