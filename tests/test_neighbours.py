"""What a bracket says of real data sets: which records a claim covers, and which pairs of data sets attain it."""

import math

import numpy as np
import pytest
from helpers import refusal

import jaxacct as ja
from jaxacct import selection, strategies
from jaxacct.tuning import PrivateScore
from jaxacct.tuning.private_score import whole

BANDS = strategies.Toeplitz((0.5**0.5, 0.5**0.5), steps=80)
CYCLIC = ja.MatrixMechanism(BANDS, 0.8, strategies.CyclicPoisson(2, 0.1))


@pytest.mark.parametrize(
    "trained",
    [
        ja.SampledWithoutReplacement(ja.Gaussian(1.0), 0.01),
        ja.repeat(ja.SampledWithoutReplacement(ja.Gaussian(1.0), 0.01), 3),
        ja.SampledWithReplacement(ja.Gaussian(4.0), 10, 1000),
        ja.TruncatedPoissonSampled(ja.Gaussian(1.0), 0.1, 100, 20),
    ],
)
def test_a_final_run_on_the_rest_has_no_batches_of_fixed_size(trained):
    """With half of 1,000 records in the sample, 10 draws are a share of .02: 1.99 was claimed, and 3.02 is true."""
    given = ja.Gaussian(1000.0), selection.Poisson(0.01), trained, 0.5, 1e-5
    assert "no fixed size" in refusal(selection.subset_epsilon, *given)


def test_a_final_run_on_all_data_may_have_batches_of_fixed_size():
    trained = ja.SampledWithoutReplacement(ja.Gaussian(1.0), 0.01)
    given = ja.Gaussian(1000.0), selection.Poisson(0.01), trained, 0.5, 1e-5
    assert selection.subset_epsilon(*given, variant="all").upper >= ja.epsilon(trained, 1e-5).lower


def test_a_replaced_record_may_change_its_group():
    """The group follows from a hash of the identifier. The deltas are from 800,000 draws, less 5 standard errors."""
    for run in (CYCLIC, ja.dp_sgd(0.8, 0.1, 80, sampling="cyclic_poisson", bands=2, groups=2)):
        found = ja.delta(run, 3.0, relation="replace_one")
        assert found.upper >= 0.0796 and found.kind == "bound"


@pytest.mark.slow
def test_a_replaced_record_may_change_its_group_inside_other_mechanisms():
    for mechanism in (ja.repeat(CYCLIC, 1), ja.compose(CYCLIC, ja.PureDP(0.0))):
        assert ja.delta(mechanism, 1.0, relation="replace_one").upper >= 0.364
    assert ja.delta(ja.SampledWithoutReplacement(CYCLIC, 0.5), 1.0).upper >= 0.135


def test_every_door_knows_that_groups_take_turns():
    """The quick calibration took the run of one group, and the expression of a run left the turns out."""
    run = {"sampling": "cyclic_poisson", "bands": 2, "groups": 2}
    known = {"sampling_probability": 0.1, "steps": 80, **run}
    noise = ja.calibrate_noise_multiplier(4.0, 1e-5, **known, relation="replace_one").value
    solved = ja.dp_sgd(float(noise), **known)
    assert 3.9 <= ja.epsilon(solved, 1e-5, relation="replace_one").upper <= 4.0
    again = eval(solved.expression(), {"ja": ja})
    assert again == solved == ja.interop.from_json(ja.interop.to_json(solved)) and again.mechanism.in_turns
    row = {"noise_multiplier": float(noise), "delta": 1e-5, **known}
    table = ja.sweep(row, relation="replace_one", progress=False)
    assert table["upper"][0] == pytest.approx(float(ja.epsilon(solved, 1e-5, relation="replace_one").upper), rel=1e-6)
    chosen = selection.select(solved, selection.PointMass(1))
    assert ja.epsilon(chosen, 1e-5, relation="replace_one").upper >= 3.9


def test_no_door_has_a_pair_of_a_replaced_record_where_groups_take_turns():
    """Each of these took the pair of one group, and claimed delta(3) = .0701 for .0806."""
    run, one = ja.dp_sgd(0.8, 0.1, 80, sampling="cyclic_poisson", bands=2), {"relation": "replace_one"}
    law, finite = (
        selection.Geometric(0.5),
        ja.PoissonSampled(ja.FiniteOutput([0.7, 0.3], [0.2, 0.8]), 0.5, in_turns=True),
    )
    asked = [
        (selection.candidates_profile, [run], [0.0, 3.0]),
        (selection.bound_delta, run, law, 3.0),
        (selection.bound_epsilon, run, law, 1e-5),
        (ja.interop.to_dp_accounting_pld, run),
        (lambda m, relation: ja.profile(m, relation).renyi(2.0), finite),
        (lambda m, relation: ja.profile(m, relation).zcdp(), finite),
        (whole, run, law, PrivateScore(lambda w, x: x > w, np.arange(10.0), noise_multiplier=9.0), 1e-5),
    ]
    for door, *given in asked:
        assert "groups take turns; ask ja.epsilon" in refusal(door, *given, **one)
    assert "must be True or False" in refusal(ja.PoissonSampled, ja.Gaussian(1.0), 0.1, in_turns="no")
    known = ja.profile(finite, "replace_one")
    assert known.delta(0.3).upper >= 0.1 and known.true_positive_rate(0.2).kind == "bound"


def test_delta_of_a_replacement_is_small_to_the_end():
    """From eps = 5e4 on no split of eps was finite: delta was .04, which a sample took for infinite losses."""
    run = ja.PoissonSampled(ja.Gaussian(2.0), 0.2, in_turns=True)
    for each in (run, ja.RandomAllocation(ja.Gaussian(2.0), 4)):
        found = ja.delta(each, np.array([1e2, 1e4, 1e5, 1e300]), relation="replace_one").upper
        assert np.all(found <= 1e-100)
    fixed = ja.SampledWithoutReplacement(run, 0.5)
    assert ja.epsilon(fixed, 1e-3, relation="zero_out").upper < 0.3
    assert ja.delta(fixed, 0.5, relation="zero_out").upper < 1e-4


def test_no_group_of_records_takes_turns():
    assert "leaks no less" in refusal(ja.PoissonSampled, ja.Gaussian(1.0), 0.1, 3, True)


def test_no_replacement_is_verified_where_groups_take_turns():
    """Without sampling the bound of one group would be verified, which is smaller than that of two."""
    whole = ja.MatrixMechanism(BANDS, 8.0, strategies.CyclicPoisson(2, 1.0))
    for run in (whole, ja.dp_sgd(8.0, 1.0, 80, sampling="cyclic_poisson", bands=2)):
        small = ja.epsilon(ja.Gaussian(8.0 / 40**0.5), 1e-5, relation="replace_one")
        assert ja.epsilon(run, 1e-5, relation="replace_one").upper > small.upper
        assert ja.verify(run, small, delta=1e-5, relation="replace_one").status == "undecided"
        assert ja.verify(run, ja.epsilon(run, 1e-5), delta=1e-5).status == "verified"


def test_one_group_is_a_poisson_sample():
    run = ja.MatrixMechanism(strategies.Toeplitz((1.0,), steps=5), 0.8, strategies.CyclicPoisson(1, 0.1))
    found = ja.epsilon(run, 1e-5, relation="replace_one").upper
    assert found == pytest.approx(
        float(ja.epsilon(ja.dp_sgd(0.8, 0.1, 5), 1e-5, relation="replace_one").upper), rel=1e-6
    )


def test_parts_for_different_groups_are_a_bound_for_the_smallest():
    """For one record epsilon is at most 2.374, and for three at least 7.05. The answer was 5.92, "certified"."""
    three, one = ja.PoissonSampled(ja.Gaussian(1.0), 0.1, group=3), ja.Gaussian(2.0)
    for mechanism in (
        ja.compose(three, one),
        ja.repeat(ja.compose(one, three), 2),
        ja.compose(ja.repeat(three, 2), one),
    ):
        found = ja.epsilon(mechanism, 1e-5)
        assert found.kind == "bound" and found.lower == 0.0 and min(mechanism.group_sizes()) == 1
        assert selection.select(mechanism, selection.Geometric(0.5)).kind_under("add_or_remove_one") == "bound"
    alike = ja.compose(three, ja.PoissonSampled(ja.Gaussian(2.0), 0.2, group=3))
    assert ja.epsilon(alike, 1e-5).kind == "certified" and alike.group_sizes() == {3}
    assert selection.select(alike, selection.Geometric(0.5)).group_sizes() == {3}
    assert ja.ProposeTestRelease(three, 2.0, 10.0).group_sizes() == {1}


@pytest.mark.parametrize(
    "base", [ja.RandomizedResponse(0.9), ja.Gaussian(2.0), ja.FiniteOutput([0.9, 0.1], [0.6, 0.4])]
)
def test_a_sample_of_a_sample_is_a_smaller_sample(base):
    """Half of a half is a quarter. The inner sample's profile belongs to no single pair, so lower ends were false."""
    take = ja.SampledWithoutReplacement
    nested, once = take(take(base, 0.5), 0.5), take(base, 0.25)
    for eps in (-0.4, -0.1, 0.1, 0.4):
        for relation in ("remove_one", "add_one", "add_or_remove_one", "replace_one"):
            if eps < 0.0:
                found, truth = (ja.profile(each, relation).delta(eps) for each in (nested, once))
            else:
                found, truth = (ja.delta(each, eps, relation=relation) for each in (nested, once))
            assert found.upper >= truth.lower * (1.0 - 1e-9)
            assert found.lower <= truth.upper * (1.0 + 1e-9), (eps, relation)
    assert ja.epsilon(nested, 1e-3, relation="add_one").lower <= -math.log(0.75)


def test_a_posterior_and_a_reconstruction_are_of_a_record_that_was_used():
    """Tests for a record that was not used do better here, and their rates were taken: .909 for .5506."""
    run = ja.FiniteOutput([0.5, 0.49, 0.01], [0.5, 0.4, 0.1])
    rate, posterior = 0.01225, 0.01225 / 0.02225
    for relation in ("add_or_remove_one", "remove_one"):
        known = ja.profile(run, relation)
        for found, truth in ((known.posterior(0.5, 0.01), posterior), (known.reconstruction(0.01), rate)):
            assert found.lower <= truth <= found.upper <= truth * (1.0 + 1e-6) and found.kind == "certified"
    risks = ja.risk(run, fpr=0.01, baseline=0.01)
    assert risks["posterior", 0.5, 0.01].upper == pytest.approx(posterior, rel=1e-6)
    assert risks["reconstruction", 0.01].upper == pytest.approx(rate, rel=1e-6)
    assert risks["true_positive_rate", 0.01].lower > 0.09
    steps = ja.dp_sgd(1.0, 0.3, 1)
    both, used = (ja.profile(steps, relation).posterior(0.5, 0.5) for relation in ("add_or_remove_one", "remove_one"))
    assert both.upper == pytest.approx(float(used.upper), rel=1e-9)


def test_noise_for_a_reconstruction_is_that_of_a_record_that_was_used():
    given = {"sampling_probability": 0.3, "steps": 1, "target_reconstruction": 0.8, "baseline": 0.6}
    found = [ja.calibrate_noise_multiplier(**given, relation=name) for name in ("add_or_remove_one", "remove_one")]
    assert float(found[0].value) == pytest.approx(float(found[1].value), rel=1e-6)
    risk = ja.profile(ja.dp_sgd(found[0].value, 0.3, 1)).reconstruction(0.6)
    assert found[0].risk.lower <= risk.upper and risk.lower <= 0.8


@pytest.mark.parametrize("on", [pytest.param("validation", marks=pytest.mark.slow), "training"])
def test_a_replaced_record_moves_a_score_by_one(on):
    """The score's Gaussian moves by 2 there, so the cost is a bound. It was 5.45, "certified", for at most 2.53."""
    score = PrivateScore(lambda w, x: x > w, np.arange(10.0), on, noise_multiplier=2.0)
    law = selection.Geometric(0.3) if on == "training" else selection.PointMass(1)
    cost, exact = (whole(ja.Gaussian(100.0), law, score, 1e-5, name).epsilon for name in ("replace_one", "zero_out"))
    assert (cost.kind, cost.lower, exact.kind) == ("bound", 0.0, "certified")


def test_tests_and_losses_are_of_one_pair_of_data_sets():
    """The profile joins two pairs: with the others as the record, or not. No test has both, .500 for .467."""
    sampled = ja.SampledWithoutReplacement(ja.FiniteOutput([0.7, 0.3], [0.1, 0.9]), 0.5)
    risks = ja.risk(sampled, fpr=0.2, prior=0.5, baseline=0.2, relation="remove_one")
    for key in (("true_positive_rate", 0.2), ("posterior", 0.5, 0.2), ("reconstruction", 0.2)):
        assert risks[key].kind == "bound" and risks[key].upper >= (0.7 if key[0] == "posterior" else 0.46667)
    assert risks["advantage"].kind == risks["bayes_success", 0.5].kind == "certified"
    whole_data = ja.SampledWithoutReplacement(ja.FiniteOutput([0.7, 0.3], [0.1, 0.9]), 1.0)
    for relation in ("remove_one", "add_or_remove_one", "replace_one"):
        known = ja.profile(whole_data, relation)
        assert known.true_positive_rate(0.25).kind == known.tradeoff(0.25).kind == "bound"
    assert ja.profile(sampled, "remove_one").cdf(0.3).p.kind == "bound"
    assert ja.profile(ja.SampledWithoutReplacement(ja.Gaussian(1.0), 0.5)).true_positive_rate(0.2).kind == "certified"
