"""zero_out equals add/remove where a record displaces no other; elsewhere it is never answered by add/remove."""

import numpy as np
import pytest
from helpers import refusal
from mechanism_tables import EXAMPLES

import jaxacct as ja
from jaxacct import audit, selection
from jaxacct.core.validation import RELATIONS
from jaxacct.mechanisms import (
    DIRECTIONS,
    BaseMechanism,
    PoissonSampled,
    SampledWithoutReplacement,
    components,
    directions,
)
from jaxacct.mechanisms.loss_components import add_and_remove
from jaxacct.plots.style import RELATION
from jaxacct.report.wording import RELATIONS as IN_WORDS
from jaxacct.report.wording import in_words

STEP = PoissonSampled(ja.Gaussian(1.0), 0.05)
FIXED = SampledWithoutReplacement(ja.Gaussian(2.0), 0.1)
REFUSED = SampledWithoutReplacement(ja.RandomizedResponse(0.75), 0.1)


def same(one, two):
    return all(np.array_equal(getattr(one, end), getattr(two, end)) for end in ("lower", "estimate", "upper"))


SLOW = ("GaussianNoisyMax", "MixtureOfGaussians", "SmoothSensitivityGaussian")
"""Examples whose pair of laws takes seconds to compute while another process runs."""


@pytest.mark.parametrize(
    "mechanism",
    [pytest.param(m, marks=[pytest.mark.slow] * (type(m).__name__ in SLOW), id=type(m).__name__) for m in EXAMPLES],
)
def test_the_pair_of_add_and_remove_wherever_nobody_is_displaced(mechanism):
    sampled = [PoissonSampled(mechanism, 0.1)] if isinstance(mechanism, BaseMechanism) else []
    for one in (mechanism, *sampled):
        if not add_and_remove(one, "zero_out"):
            continue
        assert directions(one, "zero_out") == directions(one, "add_or_remove_one")
        assert one.kind_under("zero_out") == one.kind_under("add_or_remove_one")
        for direction in DIRECTIONS:
            wanted, found = (components(one, name, direction) for name in ("add_or_remove_one", "zero_out"))
            assert all(np.array_equal(a, b) for a, b in zip(wanted, found, strict=True))


def test_every_reading_is_that_of_add_and_remove():
    known, wanted = ja.profile(STEP, "zero_out"), ja.profile(STEP)
    assert same(ja.epsilon(STEP, 1e-5, relation="zero_out"), ja.epsilon(STEP, 1e-5))
    assert same(known.bayes_success(0.7), wanted.bayes_success(0.7))
    assert same(known.cdf(0.1, "add").p, wanted.cdf(0.1, "add").p)
    assert same(known.tradeoff(0.1), wanted.tradeoff(0.1))
    noise = [
        ja.calibrate_noise_multiplier(2.0, 1e-5, 1.0, 10, relation=name) for name in ("zero_out", "add_or_remove_one")
    ]
    assert noise[0].value == noise[1].value and noise[0].epsilon.upper <= 2.0


@pytest.mark.slow
def test_the_gradient_is_that_of_add_and_remove():
    gradients = [ja.epsilon_gradient(STEP, 1e-5, relation=name) for name in ("zero_out", "add_or_remove_one")]
    assert gradients[0] == gradients[1]


def test_selections_of_what_displaces_nobody():
    chosen = selection.select(ja.Gaussian(4.0), selection.Geometric(0.2))
    assert same(ja.epsilon(chosen, 1e-5, relation="zero_out"), ja.epsilon(chosen, 1e-5))
    two = [ja.Gaussian(2.0), ja.Gaussian(4.0)]
    worst = selection.candidates_profile(two, [0.0, 1.0], relation="zero_out")
    assert worst == selection.candidates_profile(two, [0.0, 1.0])
    assert "one direction" in refusal(selection.candidates_profile, two, [0.0], relation="add_one")
    assert "is not known" in refusal(selection.candidates_profile, two, [0.0], relation="swap")


DISPLACED = {
    "epsilon": lambda m: ja.epsilon(m, 1e-5, relation="zero_out"),
    "selection": lambda m: ja.epsilon(
        selection.select(m, selection.Geometric(0.2), bound="envelope"), 1e-5, relation="zero_out"
    ),
    "attack": lambda m: selection.attack(m, selection.Geometric(0.2), delta=1e-5, relation="zero_out"),
    "profile": lambda m: ja.profile(m, "zero_out").bayes_success(0.3),
    "direction": lambda m: ja.profile(m, "zero_out").cdf(0.1, "add"),
    "gradient": lambda m: ja.epsilon_gradient(m, 1e-5, relation="zero_out"),
    "candidates": lambda m: selection.candidates_profile([m], [0.5], relation="zero_out"),
    "claim": lambda m: audit.one_run(5, 10, 20, claim=ja.profile(m, "zero_out"), delta=1e-5),
}
"""Calls for one direction or for a pair of directions; the old code answered each by the pair of add/remove."""


@pytest.mark.parametrize("call", DISPLACED)
def test_a_sample_of_fixed_size_is_never_answered_by_the_pair_of_add_and_remove(call, monkeypatch):
    asked = []
    expand = SampledWithoutReplacement.expand

    def recorded(self, relation, direction):
        asked.append(relation)
        return expand(self, relation, direction)

    monkeypatch.setattr(SampledWithoutReplacement, "expand", recorded)
    try:
        DISPLACED[call](REFUSED)
    except ja.InputError as error:
        assert "zero_out" in str(error)
    assert set(asked) <= {"zero_out"}
    assert not add_and_remove(ja.repeat(FIXED, 3), "zero_out") and FIXED.displaces()


def test_a_claim_about_a_zeroed_canary():
    counts = dict(delta=1e-5, confidence=0.99)
    one = audit.clopper_pearson(0, 1000, 300, 1000, relation="zero_out", **counts)
    assert one.epsilon == audit.clopper_pearson(0, 1000, 300, 1000, **counts).epsilon
    claims = [ja.profile(ja.Gaussian(1.0), name) for name in ("zero_out", "add_or_remove_one")]
    p_values = [audit.one_run(19, 20, 100, claim=claim, delta=1e-5).p_value for claim in claims]
    assert p_values[0] == p_values[1]


def test_every_relation_has_its_words():
    assert set(RELATION) == set(IN_WORDS) == set(RELATIONS)
    from jaxacct.report import report

    page = report(ja.Gaussian(2.0), delta=1e-5, relation="zero_out")
    assert "contribution of one record" in in_words(page.claims[0]) and page.readings[0] is not None


def test_a_plan_of_fixed_batches_and_one_of_poisson_samples():
    from jaxacct.training import Plan

    plain = dict(target_delta=1e-5, dataset_size=1000, expected_batch_size=100, epochs=1, noise_multiplier=2.0)
    one, two = (Plan(**plain, relation=name) for name in ("zero_out", "add_or_remove_one"))
    assert same(one.epsilon, two.epsilon) and one.relation == "zero_out"
    assert Plan(**plain, sampling="fixed_batches").relation == "zero_out"
    with pytest.raises(ja.InputError, match="fixed_batches"):
        Plan(**plain, sampling="fixed_batches", relation="add_or_remove_one")
    fixed = Plan(**plain, sampling="fixed_batches")
    found, whole = fixed.epsilon, ja.epsilon(ja.Gaussian(2.0), 1e-5)
    assert (fixed.relation, found.kind, found.upper) == ("zero_out", "bound", whole.upper)
    assert set(fixed.epsilon_curve(2)[1].kind) == {"bound"}
    for relation in ("add_or_remove_one", "add_one", "remove_one"):
        assert "ja.Gaussian(noise_multiplier / 5**0.5)" in refusal(ja.epsilon, fixed.mechanism, 1e-5, relation=relation)


def test_the_second_program_agrees_or_does_not_decide():
    found = ja.epsilon(ja.Gaussian(1.5), 1e-5, relation="zero_out")
    pytest.importorskip("flint")
    assert ja.verify(ja.Gaussian(1.5), found, delta=1e-5, relation="zero_out").status == "verified"
    bracket = ja.epsilon(FIXED, 1e-5, relation="replace_one")
    assert ja.verify(FIXED, bracket, delta=1e-5, relation="zero_out").status == "verified"
    assert ja.verify(ja.repeat(FIXED, 2), bracket, delta=1e-5, relation="zero_out").status == "undecided"
    several = ja.repeat(FIXED, 3)
    bracket = ja.epsilon(several, 1e-5, relation="replace_one")
    assert ja.verify(several, bracket, delta=1e-5, relation="zero_out").status == "undecided"
