"""Plans and ledgers of truncated Poisson sampling: the cap, what is counted, and what a cut-off line counts as."""

from fractions import Fraction

import numpy as np
import pytest
from helpers import refusal
from training_cases import DELTA

import jaxacct as ja
from jaxacct.training import Ledger, Plan
from jaxacct.training.plan.segments import stand_ins
from jaxacct.training.sampling import sampler
from jaxacct.training.step.step_mechanisms import TRUNCATED, Release, single

CAPPED = {"target_delta": DELTA, "dataset_size": 1000, "sampling": "truncated_poisson", "noise_multiplier": 1.0}
RATE = {"sampling_probability": 0.05}


def test_the_cap_of_a_plan_costs_nothing_unless_it_is_asked_for():
    plan = Plan(**CAPPED, **RATE, steps=100)
    assert plan.cap == ja.cap_for(0.05, 1000, 100, DELTA)
    poisson = Plan(**CAPPED | {"sampling": "poisson"}, **RATE, steps=100)
    assert poisson.epsilon.lower <= plan.epsilon.upper <= poisson.epsilon.upper * (1 + 1e-3)
    low = Plan(**CAPPED, **RATE, steps=100, cap=60)
    assert low.cap == 60 and low.epsilon.upper > 1.1 * poisson.epsilon.upper and low.epsilon.kind == "bound"
    assert low.mechanism == ja.repeat(ja.TruncatedPoissonSampled(ja.Gaussian(1.0), 0.05, 1000, 60), 100)
    assert Plan.from_json(low.to_json()) == low and Plan.from_json(low.to_json()).cap == 60
    assert "cap=60" in repr(low) and ">60<" in low._repr_html_()
    assert Plan(**CAPPED, sampling_probability=1.0, steps=1).cap == 1000


@pytest.mark.slow
def test_the_curve_of_a_capped_plan():
    plan = Plan(**CAPPED, **RATE, steps=20, cap=70, noise_schedule=[(10, 1.0), (None, 2.0)])
    at, curve = plan.epsilon_curve(4)
    for step, upper in zip(at, curve.upper, strict=True):
        exact = plan.epsilon_after(int(step))
        assert exact.lower <= upper <= exact.upper * 1.05


def test_rates_are_solved_for_with_a_cap():
    widest = Plan(**CAPPED, target_epsilon=2.0, steps=1)
    assert 2.0 - 1e-3 < widest.epsilon.upper <= 2.0
    assert widest.cap == ja.cap_for(widest.sampling_probability, 1000, 1, DELTA)


@pytest.mark.slow
def test_steps_are_solved_for_with_a_cap():
    """The search for steps uses the same bounds as the search for a rate, above."""
    longest = Plan(**CAPPED, **RATE, target_epsilon=2.0, cap=100)
    assert longest.epsilon.upper <= 2.0 < Plan(**CAPPED, **RATE, cap=100, steps=longest.steps + 1).epsilon.upper


def test_a_higher_rate_stands_for_no_lower_one_where_there_are_caps():
    releases = [Release("truncated_poisson", 1.0, q, 60, 1000) for q in (0.05, 0.0500001)]
    assert stand_ins(dict.fromkeys(releases, 1), 1) == {release: release for release in releases}
    free = [Release("poisson", 1.0, q) for q in (0.05, 0.0500001)]
    assert set(stand_ins(dict.fromkeys(free, 1), 1).values()) == {free[1]}


@pytest.mark.parametrize("several", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_ledger_of_capped_steps(tmp_path, several):
    plan = Plan(**CAPPED, **RATE, steps=10, cap=60) if not several else Plan(
        **CAPPED, batch_schedule=[(5, 50), (None, 40)], steps=10, cap=60
    )  # fmt: skip
    path = tmp_path / "run"
    with Ledger.create(path, plan) as ledger:
        for step in range(4):
            assert plan.allows(ledger, step)
            ledger.record(step, f"key {step}", "batch", 1.0, 0.05)
        expected = {Release("truncated_poisson", 1.0, 0.05, 60, 1000): 4}
        assert ledger.releases() == expected
    assert Ledger.read(path).releases() == expected
    path.write_bytes(path.read_bytes()[:-30])
    with Ledger.open(path) as ledger:
        torn = Release("poisson", 0.5, 1.0) if several else next(iter(expected))
        assert ledger.releases()[torn] == (1 if several else 4) and ledger.runs[ledger.run].torn == 1
        found = ledger.epsilon(DELTA)
    assert Ledger.read(path).epsilon(DELTA).upper == found.upper
    text = path.read_text()
    assert '"cap": 60, "dataset_size": 1000' in text
    assert np.isfinite(found.upper)


def test_a_plan_of_segments_needs_its_cap():
    plan = Plan(**CAPPED, **RATE, steps=10, cap=60)
    assert "cap is missing" in refusal(Plan.of, plan.segments, target_delta=DELTA, dataset_size=1000,
                                       sampling="truncated_poisson")  # fmt: skip
    assert Plan.of(plan.segments, plan) == plan


@pytest.mark.parametrize("rate", [1e-5, 3e-12, 0.3, 1.0])
def test_a_capped_sample_is_accounted_for_at_the_very_rate_that_is_drawn(rate):
    """With a cap a lower rate may tell more, so that rounding down is not safe by itself."""
    certain, high, low = (int(word) for word in sampler.threshold(rate))
    mechanism = single(TRUNCATED, 1.0, rate, 4, 1000)
    assert Fraction(float(mechanism.sampling_probability)) == Fraction(certain * 2**64 + high * 2**32 + low, 2**64)
