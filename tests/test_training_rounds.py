"""Rounds of random allocation: what plans, ledgers and resumed runs count, and when slots are drawn anew."""

import functools
from collections import Counter

import numpy as np
import pytest
from helpers import refusal
from training_cases import DELTA, note
from training_runs import KEY, drawing_trainer, still_trainer

import jaxacct as ja
from jaxacct.training import Ledger, Plan
from jaxacct.training.step import step_mechanisms
from jaxacct.training.step.step_mechanisms import Release

ROUNDS = {"target_delta": DELTA, "dataset_size": 20, "sampling": "random_allocation", "noise_multiplier": 2.0}
DATA = np.eye(20, dtype=np.float32)


def rounds(noise, count, slots=4):
    return {Release("random_allocation", noise, 1.0 / slots): count}


def stop_at(step):
    return [lambda state: state.step == step]


@functools.cache
def trainer_of(noise, rate, steps, slots):
    return drawing_trainer(Plan(**(ROUNDS | {"noise_multiplier": noise}), slots=slots, steps=steps), rate)


class Run:
    """A run with four slots in each round; each step shows which records were drawn."""

    def __init__(self, noise=1e-6, rate=1.0, steps=12, slots=4):
        self.trainer = trainer_of(noise, rate, steps, slots)
        self.rate = rate

    def half(self, step=6, **more):
        """The state at `step`, where a callback that looks at no outputs stops the run."""
        first = self.trainer.init(np.zeros(20, np.float32), KEY)
        return self.trainer.fit(first, DATA, callbacks=stop_at(step), progress=False, **more)

    def fit(self, state=None, until=None, data=DATA, **more):
        """(state, {step: who was drawn})."""
        state = self.trainer.init(np.zeros(20, np.float32), KEY) if state is None else state
        drawn, last = {}, [np.asarray(state.params)]

        def look(now):
            drawn[now.step - 1] = np.flatnonzero(np.round((last[0] - np.asarray(now.params)) / self.rate)).tolist()
            last[0] = np.asarray(now.params)
            return now.step == until

        return self.trainer.fit(state, data, callbacks=[look], progress=False, **more), drawn


def test_a_plan_counts_rounds():
    plan = Plan(**ROUNDS, slots=4, steps=10)
    assert plan.whole == rounds(2.0, 3) and plan.slots == 4  # a round that has begun counts whole
    assert [plan.pass_of(s) for s in (0, 3, 4, 9)] == [(0, 0, 4), (0, 0, 4), (1, 4, 8), (2, 8, 10)]
    assert plan.releases_between(2, 6) == rounds(2.0, 2)
    assert [plan.begins_pass(s) for s in (0, 3, 4, 8, 10)] == [True, False, True, True, False]
    by_size = Plan(**ROUNDS, expected_batch_size=6, epochs=2)
    assert (by_size.slots, by_size.steps, by_size.expected_batch_size) == (4, 8, 5.0)  # no larger than asked for
    assert by_size.epochs == 2.0 and Plan.from_json(by_size.to_json()) == by_size
    assert Plan.from_json(by_size.to_json()).slots == 4
    scheduled = Plan(**ROUNDS, slots=4, steps=8, noise_schedule=[(6, 1.0), (None, 0.5)])
    assert dict(scheduled.whole) == rounds(2.0, 1) | rounds(1.0, 1)
    two = Plan(**ROUNDS, batch_schedule=[(6, 5), (None, 10)], steps=10)
    assert dict(two.whole) == rounds(2.0, 2) | rounds(2.0, 2, slots=2) and two.slots is None
    assert [two.pass_of(s)[1] for s in (5, 6, 7, 8)] == [4, 6, 6, 8]  # another size begins another round
    assert Plan.from_json(two.to_json()) == two


@pytest.fixture(params=["slots revealed", pytest.param("as they are", marks=pytest.mark.slow)])
def accounting(request, monkeypatch):
    """Exact accounting of a round takes seconds for every noise; with its slots revealed, the round is a Gaussian."""
    if request.param == "slots revealed":
        monkeypatch.setattr(step_mechanisms, "RandomAllocation", lambda base, slots: base)


@pytest.mark.usefixtures("accounting")
def test_a_plan_is_recalibrated_between_rounds():
    plan = Plan(target_epsilon=3.0, **ROUNDS | {"noise_multiplier": None}, slots=4, steps=12)
    assert "within the round of steps 4 to 7" in refusal(plan.recalibrate, 6, steps=20)
    again = plan.recalibrate(4, steps=20)
    noise = again.at(4).noise_multiplier
    assert dict(again.whole) == rounds(plan.noise_multiplier, 1) | rounds(noise, 4)
    assert 3.0 - 1e-3 <= again.epsilon.upper <= 3.0
    other = plan.recalibrate(8, epochs=4, expected_batch_size=10)
    assert dict(other.whole) == rounds(plan.noise_multiplier, 2) | rounds(other.at(8).noise_multiplier, 2, slots=2)
    cut = Plan(target_epsilon=3.0, **ROUNDS | {"noise_multiplier": None}, slots=4, steps=10)
    assert "recalibrate at step 8" in refusal(cut.recalibrate, 10, steps=20)


def test_rounds_after_a_cut_one_are_not_joined_to_it():
    """Two and a half rounds come before step 10.  At the same batch size, step 10 would continue the third round."""
    segments = Plan(**ROUNDS, batch_schedule=[(10, 5), (None, 10)], steps=16).segments
    given = {name: ROUNDS[name] for name in ("target_delta", "dataset_size", "sampling")}
    plan = Plan.of(segments, target_epsilon=99.0, **given)
    assert "give another expected_batch_size" in refusal(plan.recalibrate, 10, expected_batch_size=5)


@pytest.mark.slow
def test_steps_are_solved_for_in_whole_rounds_and_slots_for_a_rate():
    """By `ja.RandomAllocation`, one more round or one slot less than the plan has would exceed the target."""
    given = ROUNDS | {"target_epsilon": 2.0, "noise_multiplier": 1.0, "dataset_size": 1000}
    cost = lambda slots, count: ja.epsilon(ja.repeat(ja.RandomAllocation(ja.Gaussian(1.0), slots), count), DELTA)
    longest = Plan(**given, slots=50)
    number = longest.steps // 50
    assert longest.steps == 50 * number and dict(longest.whole) == rounds(1.0, number, slots=50)
    assert longest.epsilon.upper <= 2.0 < cost(50, number + 1).upper
    widest = Plan(**given, epochs=3)
    assert widest.steps == 3 * widest.slots and dict(widest.whole) == rounds(1.0, 3, slots=widest.slots)
    assert widest.epsilon.upper <= 2.0 < cost(widest.slots - 1, 3).upper


def test_a_ledger_counts_rounds_by_their_slots(tmp_path):
    plan = Plan(**ROUNDS, slots=4, steps=12)
    with Ledger.create(tmp_path / "run", plan) as ledger:
        note(ledger, 0, noise=2.0, rate=0.25, partition="a")
        note(ledger, 1, noise=2.0, rate=0.25, partition="a")
        assert ledger.releases() == rounds(2.0, 1)
        note(ledger, 2, noise=1.0, rate=0.25, partition="a")
        assert ledger.releases() == rounds(1.0, 1)  # its least noise
        note(ledger, 2, "again", noise=1.0, rate=0.25, partition="a")  # the same records, other noise
        ((release, count),) = ledger.releases().items()
        assert count == 1 and 0 <= np.sqrt(0.5) - release.noise_multiplier < 1e-11
        note(ledger, 2, "again", noise=1.0, rate=0.25, partition="a")  # exactly the same
        note(ledger, 3, noise=0.9, rate=0.25, partition="a")
        assert ledger.releases() == {release: 1}
        note(ledger, 2, noise=2.0, rate=0.25, partition="b")  # slots of its own
        assert ledger.releases() == {release: 1} | rounds(2.0, 1)
        note(ledger, 5, noise=2.0, rate=0.25)  # nothing is known of its slots: everybody may be in it
        note(ledger, 6, noise=2.0, rate=0.5, partition="b")  # no round has two numbers of slots
        assert ledger.releases() == {release: 1} | rounds(2.0, 1) | rounds(2.0, 2, slots=1)
        assert "must be 1/slots" in refusal(note, ledger, 7, noise=2.0, rate=0.3, partition="c")
        expected = ledger.releases()
        for step in (10, 11, 12, 13, 14):  # the fifth step of a round of four
            note(ledger, step, noise=2.0, rate=0.25, partition="d")
        assert ledger.releases() - expected == rounds(2.0, 1) | rounds(2.0, 1, slots=1)
        expected = ledger.releases()
    assert Ledger.read(tmp_path / "run").releases() == expected
    content = (tmp_path / "run").read_bytes()
    (tmp_path / "run").write_bytes(content[:-40])
    with Ledger.open(tmp_path / "run") as ledger:  # a step that was cut off
        assert ledger.runs[ledger.run].torn == 1
        noise = min(each.noise_multiplier for each in expected)
        assert ledger.releases()[Release("random_allocation", noise, 1.0)] == 1


@pytest.mark.usefixtures("accounting")
def test_the_budget_ends_a_run_by_whole_rounds(tmp_path):
    plan = Plan(target_epsilon=2.0, **ROUNDS | {"noise_multiplier": None}, slots=4, steps=12)
    with Ledger.create(tmp_path / "run", plan) as ledger:
        ledger.spend(plan.mechanism_after(4), "a round elsewhere")
        for step in range(12):
            allowed = plan.allows(ledger, step, str(step // 4))
            assert allowed == (step < 8)
            if allowed:
                note(ledger, step, noise=plan.noise_multiplier, rate=0.25, partition=str(step // 4))


@pytest.mark.parametrize("kept", ["memory", "checkpoints"])
def test_a_run_that_is_resumed_within_a_round_has_the_same_slots(tmp_path, kept):
    _, drawn = Run().fit()
    more = {"checkpoints": tmp_path / "c"} if kept == "checkpoints" else {}
    half = Run().half(**more)
    ended, rest = Run().fit(None if more else half, **more)
    later = [step for step in rest if step > 6]  # before step 6 it was not known who had been drawn
    assert [rest[step] for step in later] == [drawn[step] for step in later] and ended.step == 12
    assert len(ended.history.stretches) == 1 and ended.history.stretches[0].plan.whole == rounds(1e-6, 3)


@pytest.mark.parametrize("other", ["learning rate", "noise", "data"])
def test_what_goes_on_otherwise_within_a_round_draws_slots_anew_and_counts_another(tmp_path, other):
    """The same slots under other noise would be one round of half the variance: much dearer than two fresh rounds."""
    changed = Run(**{"learning rate": {"rate": 0.5}, "noise": {"noise": 2e-6}, "data": {}}[other])
    data, noise = DATA * (0.99 if other == "data" else 1.0), 2e-6 if other == "noise" else 1e-6
    _, usual = Run().fit()
    ended, rest = changed.fit(Run().half(ledger=tmp_path / "run"), data=data, ledger=tmp_path / "run")
    assert ended.step == 12 and any(rest[step] != usual[step] for step in (6, 7))
    assert Ledger.read(tmp_path / "run").releases() == Counter(rounds(1e-6, 2)) + Counter(rounds(noise, 2))
    stretches = changed.fit(Run().half(), data=data)[0].history.stretches
    assert [(one.first, one.end) for one in stretches] == [(0, 6), (6, 12)]
    assert sum(sum(one.plan.releases_between(one.first, one.end).values()) for one in stretches) == 4


def test_a_replay_by_another_program_has_slots_of_its_own(tmp_path):
    """Two other programs go on from step 5; the round under way counts three times, each time with slots of its own."""
    half = Run().half(5, ledger=tmp_path / "run")
    _, one = Run(rate=0.5).fit(half, until=8, ledger=tmp_path / "run")
    _, other = Run(rate=0.25).fit(half, until=8, ledger=tmp_path / "run")
    assert any(one[step] != other[step] for step in (5, 6, 7))
    assert Ledger.read(tmp_path / "run").releases() == rounds(1e-6, 4)


def test_fixed_batches_of_another_size_are_another_pass(tmp_path):
    """Some record is in a batch of each size, so that both passes count."""
    given = {"target_delta": DELTA, "dataset_size": 10, "noise_multiplier": 1e-6, "sampling": "fixed_batches"}
    data = np.eye(10, dtype=np.float32)
    make = lambda size, steps: Plan(**given, expected_batch_size=size, steps=steps)
    first, second = (still_trainer(make(*sizes)) for sizes in ((5, 2), (2, 5)))
    half = first.fit(
        first.init(np.zeros(10, np.float32), KEY), data, callbacks=stop_at(1), progress=False, ledger=tmp_path / "run"
    )
    second.fit(half, data, progress=False, ledger=tmp_path / "run")
    assert Ledger.read(tmp_path / "run").releases() == {Release("fixed_batches", 1e-6, 1.0): 2}
