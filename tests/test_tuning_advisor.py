"""The budget advisor: every option meets the target, and its answers agree with those found in other ways."""

import csv

import numpy as np
import pytest
from helpers import refusal

import jaxacct as ja
from jaxacct import selection
from jaxacct.tuning import Cost, SubsetPlan, advisor

TARGET, DELTA = 2.0, 1e-5


@pytest.fixture(scope="module")
def by_noise():
    """Advice whose noise is solved for, given E[K]; batches are whole, as their Gaussians are quick."""
    shares = [1.0, 0.25]
    return advisor.advise(TARGET, DELTA, 1000, 1.0, steps=2, candidates=[3, 9], shares=shares, families=["poisson"])


@pytest.fixture(scope="module")
def by_candidates():
    return advisor.advise(TARGET, DELTA, 1000, 1.0, steps=2, noise_multiplier=6.0, shares=[1.0], families=["poisson"])


@pytest.mark.slow
def test_least_noise_meets_the_target_closely(by_noise):
    assert [(one.split, one.candidates) for one in by_noise.options] == [
        ("everything", 3.0),
        ("everything", 9.0),
        ("rest", 3.0),
        ("rest", 9.0),
    ]
    for one in by_noise.options:
        assert one.status == "ok" and TARGET * 0.998 <= one.epsilon <= TARGET


@pytest.mark.slow
def test_plain_options_against_the_selection_itself(by_noise):
    for one in by_noise.options[:2]:
        run = ja.Gaussian(one.noise_multiplier / np.sqrt(2.0))  # two whole batches are one Gaussian
        exact = ja.epsilon(selection.select(run, selection.Poisson(one.candidates)), DELTA)
        assert one.epsilon == pytest.approx(exact.upper, rel=1e-3)


@pytest.mark.slow
def test_subset_options_against_plans(by_noise):
    one = by_noise.options[2]
    plan = SubsetPlan(TARGET, DELTA, 1000, 0.25, selection.Poisson(3), 1.0, steps=2)
    assert one.noise_multiplier == pytest.approx(plan.settings[0].final_noise, rel=3e-3)
    assert one.gradients == plan.cost.expected == (3 * 250 + 750) * 2
    assert one.gradients_95 == plan.cost.quantile(0.95) == (6 * 250 + 750) * 2
    assert one.released_noise == pytest.approx(one.noise_multiplier / 750)
    assert one.candidate_noise == pytest.approx(one.noise_multiplier / 250)


@pytest.mark.slow
def test_noise_is_monotone(by_noise):
    few, many, few_on_sample, many_on_sample = (one.noise_multiplier for one in by_noise.options)
    assert by_noise.untuned_noise < few < many and few_on_sample < many_on_sample
    # every record is in one of the two runs only, so that a sample with few candidates costs less than a single run
    assert few_on_sample < few and many_on_sample < many


@pytest.mark.slow
def test_most_candidates_meet_the_target_and_a_few_more_do_not(by_candidates):
    (one,) = by_candidates.options
    run = ja.dp_sgd(6.0, 1.0, 2)
    more = selection.Poisson(one.candidates * 1.03)
    assert one.epsilon <= TARGET < ja.epsilon(selection.select(run, more), DELTA).upper
    allowed = ja.repetitions_allowed(run, TARGET, DELTA, family="poisson")
    assert one.candidates == pytest.approx(float(allowed.repetitions), rel=0.02)
    assert by_candidates.best() == one


@pytest.mark.slow
def test_best_within_a_noise(by_noise):
    limit = by_noise.options[2].released_noise * 1.0001
    best = by_noise.best(max(limit, by_noise.options[0].released_noise))
    assert best.released_noise <= max(limit, by_noise.options[0].released_noise)
    assert "no option" in refusal(by_noise.best, 1e-9)


@pytest.mark.slow
def test_table_and_picture(by_noise, by_candidates, tmp_path):
    by_noise.to_csv(tmp_path / "advice.csv")
    with (tmp_path / "advice.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [float(row["noise_multiplier"]) for row in rows] == [one.noise_multiplier for one in by_noise.options]
    lines = str(by_noise).splitlines()
    assert len(lines) == 5 and len({len(line) for line in lines}) == 1 and "poisson 9" in lines[2]
    pytest.importorskip("pandas")
    assert by_noise.to_pandas().shape == (4, 13)
    pytest.importorskip("matplotlib")
    for name, advice in (("noise.png", by_noise), ("candidates.svg", by_candidates)):
        advice.draw(tmp_path / name)
        assert (tmp_path / name).stat().st_size > 5000


@pytest.mark.parametrize("family", ["geometric", "logarithmic", "truncated_negative_binomial"])
@pytest.mark.parametrize("mean", [1.001, 7.0, 3e4])
def test_laws_have_the_mean(family, mean):
    law = advisor.law_of_mean(family, mean, 0.5 if family == "truncated_negative_binomial" else None)
    assert float(law.mean) == pytest.approx(mean, rel=1e-9)


@pytest.mark.slow  # tests/test_tuning_search.py has the accounting of both
def test_rounds_and_adaptive_candidates_are_compared():
    """Of eight candidates adaptive ones need the most noise and i.i.d. ones the least; two rounds lie between."""
    found = advisor.advise(
        TARGET,
        DELTA,
        1000,
        1.0,
        steps=2,
        candidates=[8],
        shares=[1.0],
        families=["poisson"],
        rounds=[1, 2],
        adaptive=True,
    )
    by = {one.search: one for one in found.options}
    assert list(by) == ["iid", "2 rounds", "adaptive"]
    assert by["iid"].noise_multiplier < by["2 rounds"].noise_multiplier < by["adaptive"].noise_multiplier
    assert all(one.candidates == 8.0 and one.epsilon <= TARGET and one.status == "ok" for one in found.options)
    sigma = by["2 rounds"].noise_multiplier
    whole = ja.repeat(selection.select(ja.dp_sgd(sigma, 1.0, 2), selection.Poisson(4.0)), 2)
    assert by["2 rounds"].epsilon == ja.epsilon(whole, DELTA).upper
    # the candidates of both rounds are paid for: Poisson(8) of 2,000 gradients each
    assert by["2 rounds"].gradients == by["iid"].gradients == by["adaptive"].gradients == 16_000.0
    assert by["2 rounds"].gradients_95 == by["iid"].gradients_95 > by["adaptive"].gradients_95 == 16_000.0
    assert "2 rounds" in str(found) and found.rows()[2][-1] == "adaptive"


def test_the_most_adaptive_candidates_at_a_noise():
    found = advisor.advise(
        TARGET, DELTA, 1000, 1.0, steps=2, noise_multiplier=6.0, shares=[1.0], families=[], adaptive=True
    )
    (one,) = found.options
    cost = lambda k: float(ja.epsilon(ja.repeat(ja.Gaussian(6.0), 2 * k), DELTA).upper)
    assert cost(int(one.candidates)) <= TARGET * (1 + 1e-6) and cost(int(one.candidates) + 1) > TARGET


def test_the_quantile_of_two_rounds_is_that_of_the_sum():
    law = selection.Geometric(0.3)
    k = np.arange(400)
    sums = np.convolve(law.probability(k), law.probability(k))
    cost = Cost(advisor._sum(law, 2), 100, 1.0)
    assert cost.quantile(0.95) == 100 * np.searchsorted(np.cumsum(sums), 0.95)


def test_infeasible_and_refusals():
    found = advisor.advise(0.1, DELTA, 1000, 1.0, steps=2, noise_multiplier=1.0, shares=[1.0], families=["poisson"])
    assert found.options[0].status == "infeasible" and np.isnan(found.options[0].epsilon)
    ask = lambda **changed: advisor.advise(TARGET, DELTA, 1000, **({"sampling_probability": 0.1} | changed))
    assert "one of epochs and steps" in refusal(ask, candidates=[3])
    assert "one of candidates and noise_multiplier" in refusal(ask, steps=3)
    assert "families = 'binomial'" in refusal(ask, steps=3, candidates=[3], families=["binomial"])
    assert "eta goes with" in refusal(ask, steps=3, candidates=[3], eta=0.5)
    assert "variants = 'some'" in refusal(ask, steps=3, candidates=[3], variants=["some"], shares=[0.5])
    assert "mean = 1.0 must be > 1" in refusal(advisor.law_of_mean, "geometric", 1.0)
