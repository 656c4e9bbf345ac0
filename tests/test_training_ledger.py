"""Ledgers: what counts, and how often."""

import dataclasses
import math
from collections import defaultdict

import pytest
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent
from dp_accounting import pld as peer
from helpers import refusal
from hypothesis import given, settings
from hypothesis import strategies as st
from mechanism_tables import EXAMPLES
from training_cases import DELTA, FIXED, PLAN, gaussian_epsilon, mu2, note

import jaxacct as ja
from jaxacct import selection, strategies
from jaxacct.training import Ledger, Plan


def test_an_exact_replay_counts_once_and_any_other_again(path):
    with Ledger.create(path, PLAN) as ledger:
        for step in (0, 1, 2, 1, 1):
            note(ledger, step)
        assert mu2(ledger) == pytest.approx(0.03)
        note(ledger, 1, key="another")
        note(ledger, 1, noise=5.0)  # the same key, but not the same release
        ledger.record(2, "key 2", "another batch", 10.0, 1.0)
        assert mu2(ledger) == pytest.approx(0.05 + 0.04)
        spent = ledger.runs[ledger.run]
        assert (spent.steps, spent.same, spent.again, len(spent.numbers)) == (6, 2, 3, 3)
        expected = gaussian_epsilon(0.3)
        assert ledger.epsilon(DELTA).upper == pytest.approx(expected, rel=1e-6)
    assert Ledger.read(path).epsilon(DELTA).upper == pytest.approx(expected, rel=1e-6)


def test_equal_entries_are_merged_into_repeats(path):
    with Ledger.create(path, PLAN) as ledger:
        ledger.record_many(range(60), [f"k{s}" for s in range(60)], ["b"] * 60, [10.0] * 50 + [20.0] * 10, 1.0)
        assert ledger.spent() == ja.compose(ja.dp_sgd(10.0, 1.0, 50), ja.dp_sgd(20.0, 1.0, 10))
        assert ledger.epsilon(DELTA).upper == pytest.approx(gaussian_epsilon(math.sqrt(0.525)), rel=1e-6)


def test_several_in_one_write_are_the_same_lines(path, tmp_path):
    one, many = (Ledger.create(p, PLAN, run="r") for p in (path, tmp_path / "many"))
    for step in range(5):
        note(one, step)
    many.record_many(range(5), [f"key {s}" for s in range(5)], [f"batch {s}" for s in range(5)], 10.0, [1.0] * 5)
    assert path.read_bytes() == (tmp_path / "many").read_bytes()
    assert "needs 2 fingerprints of each kind" in refusal(many.record_many, [1, 2], ["k"], ["b", "c"], 1.0, 1.0)


def test_a_heterogeneous_run_against_dp_accounting(path):
    plan = Plan(target_delta=DELTA, dataset_size=500, expected_batch_size=100, steps=55, noise_multiplier=3.0)
    with Ledger.create(path, plan) as ledger:
        for sigma, q, steps in ((3.0, 0.2, range(25)), (4.0, 0.3, range(25, 55))):
            ledger.record_many(steps, [str(s) for s in steps], ["b"] * len(steps), sigma, q)
        found = ledger.epsilon(DELTA)
    accountant = peer.PLDAccountant(value_discretization_interval=1e-3)
    for sigma, q, count in ((3.0, 0.2, 25), (4.0, 0.3, 30)):
        accountant.compose(SelfComposedDpEvent(PoissonSampledDpEvent(q, GaussianDpEvent(sigma)), count))
    # dp_accounting rounds up
    assert found.kind == "certified" and 0.0 <= accountant.get_epsilon(DELTA) - found.upper <= 1e-4


def test_other_mechanisms_compose_with_the_steps(path):
    chosen = selection.select(ja.Gaussian(30.0), selection.Geometric(0.1))
    with Ledger.create(path, PLAN) as ledger:
        note(ledger, 0)
        ledger.spend(ja.Laplace(50.0), "look at the labels")
        ledger.spend(ja.Laplace(50.0), "look again")
        ledger.spend(chosen, "tuning")
        whole = ledger.spent()
    assert whole == Ledger.read(path).spent()
    assert set(whole.mechanisms) == {ja.dp_sgd(10.0, 1.0, 1), ja.repeat(ja.Laplace(50.0), 2), chosen}
    with Ledger.open(path) as ledger:
        assert "is not a mechanism" in refusal(ledger.spend, "Laplace")
        assert "must be one configuration" in refusal(ledger.spend, ja.Laplace([1.0, 2.0]))


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_a_partition_costs_its_dearest_step(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("ledger") / "run"
    rows = st.tuples(st.integers(0, 3), st.sampled_from("ab"), st.sampled_from([1.0, 2.0, 3.0]), st.integers(0, 2))
    entries = data.draw(st.lists(rows, max_size=15))
    with Ledger.create(path, Plan(**FIXED, expected_batch_size=100, steps=100, noise_multiplier=1.0)) as ledger:
        for step, partition, noise, key in entries:
            note(ledger, step, key=str(key), noise=noise, rate=0.1, partition=partition)
        counted = mu2(ledger)
    costs = defaultdict(float)  # a record is in one step of each partition, in all entries of that step
    for step, partition, noise, _ in set(entries):
        costs[partition, step] += noise**-2
    worst = sum(max((c for (p, _), c in costs.items() if p == label), default=0.0) for label in "ab")
    assert counted == pytest.approx(worst, abs=1e-12) == pytest.approx(mu2(Ledger.read(path)), abs=1e-12)


def test_a_step_of_sampled_groups_is_not_outweighed_by_several_with_more_noise(path):
    """1/sigma^2 does not order sampled Gaussians: at rate 1 %, two with noise 1.3 cost less than one with noise 1."""
    plan = Plan(
        target_delta=DELTA, dataset_size=2000, sampling="cyclic_poisson", sampling_probability=0.01, groups=4, steps=4,
        noise=strategies.Identity(), noise_multiplier=1.0, noise_schedule=[(1, 1.0), (None, 1.3)],
    )  # fmt: skip
    cost = lambda noise, count: float(ja.epsilon(ja.dp_sgd(noise, 0.01, count), DELTA).upper)
    with Ledger.create(path, plan) as ledger:
        for step, noise, key in ((0, 1.0, ""), (1, 1.3, ""), (2, 1.3, ""), (1, 1.3, "another program")):
            note(ledger, step, key, noise=noise, rate=0.01, partition="pass")
        held, both = float(ledger.epsilon(DELTA).upper), ja.compose(ja.dp_sgd(1.0, 0.01, 1), ja.dp_sgd(1.3, 0.01, 1))
        assert cost(1.3, 2) < cost(1.0, 1) < held == pytest.approx(float(ja.epsilon(both, DELTA).upper), rel=1e-6)


def test_without_a_partition_every_fixed_batch_counts(path):
    with Ledger.create(path, Plan(**FIXED, expected_batch_size=100, steps=100, noise_multiplier=10.0)) as ledger:
        for step in range(7):
            note(ledger, step, rate=0.1)
        assert ledger.spent() == ja.repeat(ja.ShuffledBatches(ja.Gaussian(10.0), 1), 7)


def test_runs_are_told_apart_and_add_up(path):
    with Ledger.create(path, PLAN, run="first", by="ada") as ledger:
        note(ledger, 0)
        assert ledger.begin(PLAN, "second", by="grace") == ledger.run == "second"
        note(ledger, 0)
        assert "is in the ledger already" in refusal(ledger.begin, PLAN, "first")
    with Ledger.open(path, run="first") as ledger:
        note(ledger, 0)
        note(ledger, 1)
        assert ledger.releases("first").total() == 2 and ledger.releases("second").total() == 1
        assert ledger.spent() == ja.dp_sgd(10.0, 1.0, 3) and ledger.spent("second") == ja.dp_sgd(10.0, 1.0, 1)
        assert ledger.epsilon(DELTA, run="first").upper == pytest.approx(gaussian_epsilon(math.sqrt(0.02)), rel=1e-6)
        assert "run = 'third' is not in" in refusal(ledger.spent, "third")
    assert "run = 'third' is not in" in refusal(Ledger.open, path, run="third")
    assert [line.by for line in Ledger.read(path).headers["second"]] == ["grace"]


def test_runs_of_records_and_of_users_are_not_in_one_ledger(path):
    users = Plan(
        target_delta=DELTA, dataset_size=1000, sampling_probability=1.0, noise_multiplier=10.0, steps=9, unit="user"
    )
    with Ledger.create(path, PLAN) as ledger:
        for begun in (ledger.begin, ledger.replan):
            assert "unit = 'user', but what was spent before is for unit = 'record'" in refusal(begun, users)
        assert len(ledger.runs) == 1 and ledger.plan == PLAN


def test_nothing_spent_is_nothing(path):
    with Ledger.create(path, PLAN) as ledger:
        assert ledger.epsilon(DELTA).upper == 0.0


STATED = {
    "pure": ja.PureDP(0.5),
    "points": ja.repeat(ja.PrivacyProfile([0.0, 0.5], [0.2, 1e-9]), 2),
    "zcdp": ja.compose(ja.ZCDP(0.01), ja.Gaussian(9.0)),
    "selection": selection.select(ja.ExponentialMechanism(0.5), selection.PointMass(2)),
}


@pytest.mark.parametrize("each", EXAMPLES, ids=lambda each: type(each).__name__)
def test_what_serves_every_relation_costs_more_where_a_record_is_replaced(each):
    """A guarantee stated for one relation gives the same epsilon under all relations."""
    # the first is local, the second is refused under replacement, and a part of the third is a stated guarantee
    if isinstance(each, ja.RandomizedResponse | ja.MixtureOfGaussians | ja.ProposeTestRelease):
        return
    moved, replaced = (ja.epsilon(each, DELTA, relation=r).upper for r in ("add_or_remove_one", "replace_one"))
    assert each.of_every_relation() == bool(replaced > moved)


SAMPLED = (
    ja.PoissonSampled(ja.Gaussian(1.0), 0.1),
    ja.SampledWithoutReplacement(ja.Gaussian(1.0), 0.1, dataset_size=100),
    ja.SampledWithReplacement(ja.Gaussian(1.0), 10, 100),
    ja.TruncatedPoissonSampled(ja.Gaussian(1.0), 0.1, 100, 20),
)


@pytest.mark.parametrize("each", [*EXAMPLES, *SAMPLED], ids=lambda each: type(each).__name__)
def test_every_mechanism_can_be_noted_also_without_its_optional_fields(each, path):
    usual = {field.name: field.default for field in dataclasses.fields(each) if field.metadata.get("optional")}
    both = each, dataclasses.replace(each, **usual)
    with Ledger.create(path, PLAN) as ledger:
        for one in both:
            ledger.spend(one, "one release")
    assert tuple(line.mechanism for line in Ledger.read(path).runs[ledger.run].noted) == both


def test_bins_that_share_noise_serve_every_relation():
    shared = ja.MatrixMechanism(strategies.Banded(2, 8), 4.0, strategies.BallsInBins(4))
    assert shared.of_every_relation()
    assert not ja.compose(shared, ja.PureDP(0.1)).of_every_relation() and ja.PureDP(0.0).of_every_relation()


@pytest.mark.parametrize("stated", STATED.values(), ids=STATED)
def test_a_guarantee_stated_for_one_relation_is_none_for_another(path, stated):
    """A stated guarantee is refused under other relations, because a replaced record may cost twice as much."""
    with Ledger.create(path, PLAN) as ledger:
        note(ledger, 0)
        ledger.spend(stated)
        assert ledger.epsilon(DELTA, "add_one").upper <= ledger.epsilon(DELTA).upper * (1.0 + 1e-12)
        for relation in ("replace_one", "zero_out"):
            assert "says nothing of other neighbours" in refusal(ledger.epsilon, DELTA, relation)


def test_noise_is_accounted_for_under_any_relation(path):
    with Ledger.create(path, PLAN) as ledger:
        ledger.spend(ja.compose(ja.Gaussian(9.0), ja.Laplace(20.0), ja.AboveThreshold(40.0, 80.0)))
        ledger.spend(ja.RandomizedResponse(0.6))
        ledger.spend(ja.PureDP(0.0))
        assert ledger.epsilon(DELTA, "replace_one").upper > ledger.epsilon(DELTA).upper
