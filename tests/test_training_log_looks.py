"""A log's looks, without a training: nothing waits for the device, and epsilon covers all that was released."""

import threading
from collections import deque
from types import SimpleNamespace

import numpy as np
import pytest
from training_cases import DELTA, FULL, PLAN, gaussian_epsilon, note

import jaxacct as ja
from jaxacct.training import Ledger, Plan
from jaxacct.training.run import log as run_log
from jaxacct.training.run.log import EpsilonSoFar
from jaxacct.training.run.state import History, Stretch, followed
from jaxacct.training.step.step_function import Observed


class Number:
    """An array on a device that has not computed it yet: fetching it then is waiting for it."""

    def __init__(self):
        self.there, self.waited = False, False

    def copy_to_host_async(self):
        self.waited |= not self.there

    def is_ready(self):
        return self.there

    def block_until_ready(self):
        self.waited |= not self.there
        self.there = True

    def __array__(self, dtype=None, copy=None):
        self.waited |= not self.there
        return np.array(4.0)

    def __int__(self):
        return int(np.asarray(self))


def observed():
    return Observed(Number(), (), Number(), Number(), Number(), None)


def of_plan(plan, end, first=0):
    return (Stretch(plan, first, end, ""),)


@pytest.fixture
def at_once(monkeypatch):
    """Let each look tell all steps that are done."""
    monkeypatch.setattr(run_log, "PAUSE_SECONDS", 0.0)


@pytest.fixture
def followed_run(at_once):
    """(the log of a run from step 0, what it has told)."""
    told = []
    found = run_log.RunLog(told.append, None, 1, "run")
    found.begin(PLAN, SimpleNamespace(step=0, history=History()), None)
    PLAN.live_epsilon(1)
    return found, told


def test_nothing_is_waited_for(followed_run):
    """Each look tells the steps that are done, in order, and waits for none of the few that still run."""
    log, told = followed_run
    seen = [observed() for _ in range(5)]
    for step, one in enumerate(seen, 1):
        log.look(step, one, of_plan(PLAN, step))
    assert not told and all(not x.waited for one in seen for x in one[:1] + one[2:5])
    for one in (seen[1], seen[0]):
        for x in one[:1] + one[2:5]:
            x.there = True
    log.look(6, observed(), of_plan(PLAN, 6))
    wait_for_table(log)
    log.look(7, observed(), of_plan(PLAN, 7))
    assert [record["step"] for record in told] == [1, 2]
    assert not any(x.waited for one in seen for x in one[:1] + one[2:5])
    log.close()
    assert [record["step"] for record in told] == [*range(1, 8)]


def wait_for_table(log):
    for thread in threading.enumerate():
        if thread.name == "epsilon of the log":
            thread.join(60)


def test_the_host_does_not_run_away(followed_run):
    """If too many steps are under way, a look waits for the oldest step, so that a slow device is followed too."""
    log, told = followed_run
    for step in range(1, 31):
        log.look(step, observed(), of_plan(PLAN, step))
    wait_for_table(log)
    log.look(31, observed(), of_plan(PLAN, 31))
    assert [record["step"] for record in told] == [*range(1, 32 - run_log.MOST_PENDING)]


def test_what_is_there_is_told_together(monkeypatch, followed_run):
    """Records are told once a second, or as soon as many are held; those still held at the end are told then."""
    log, told = followed_run
    clock = [0.0]
    monkeypatch.setattr(run_log, "PAUSE_SECONDS", 1.0)
    monkeypatch.setattr(run_log.time, "monotonic", lambda: clock[0])
    log._begin = log._told = 0.0
    calls = []

    def look(step):
        one, before = observed(), len(told)
        for x in one[:1] + one[2:5]:
            x.there = True
        log.look(step, one, of_plan(PLAN, step))
        calls.extend([len(told) - before] if len(told) > before else [])

    look(1)
    wait_for_table(log)
    assert not told
    clock[0] = 1.0
    for step in range(2, 4 + run_log.MOST_HELD):
        clock[0] += 1e-3
        look(step)
    assert calls == [2, run_log.MOST_HELD]
    for step in range(4 + run_log.MOST_HELD, 8 + run_log.MOST_HELD):
        look(step)
    log.close()
    assert [record["step"] for record in told] == [*range(1, 8 + run_log.MOST_HELD)]
    # a record tells when its step was seen to be done, not when the record was written
    assert told[2]["not_private"]["seconds"] == pytest.approx(1.002)
    assert told[2]["not_private"]["steps_per_second"] == pytest.approx(2 / 1.002)


def test_what_a_broken_device_does_not_give_is_left_out(followed_run):
    log, told = followed_run

    class Broken(Number):
        def __array__(self, dtype=None, copy=None):
            raise RuntimeError("the device is gone")

    log.look(1, observed(), of_plan(PLAN, 1))
    log.look(2, Observed(Broken(), (), Broken(), Broken(), Broken(), None), of_plan(PLAN, 2))
    log.close()
    assert [record["step"] for record in told] == [1]


def test_a_function_is_told_once_what_an_interrupt_left_behind(followed_run):
    """The interrupt comes before the record is handed over, while its look is still in the queue."""
    log, told = followed_run
    log.epsilon.point(1, of_plan(PLAN, 1)).table.wait(60)

    class Interrupted(deque):
        left = 1

        def popleft(self):
            if self.left:
                self.left -= 1
                raise KeyboardInterrupt
            return super().popleft()

    log._looks = Interrupted()
    one = observed()
    for x in one[:1] + one[2:5]:
        x.there = True
    with pytest.raises(KeyboardInterrupt):
        log.look(1, one, of_plan(PLAN, 1))
    log.close()
    assert [record["step"] for record in told] == [1]


def test_records_wait_for_the_table_and_not_for_ever(monkeypatch, at_once):
    """A thread computes the table, once; a record that waits too long is written without epsilon, and says why."""
    go, calls, real = threading.Event(), [], Plan.epsilon_curve

    def slow(plan, points=64):
        calls.append(plan)
        assert go.wait(60)
        return real(plan, points)

    monkeypatch.setattr(Plan, "epsilon_curve", slow)
    told, plan = [], Plan(**FULL, steps=20, noise_multiplier=10.0)
    log = run_log.RunLog(told.append, None, 1, "run")
    log.begin(plan, SimpleNamespace(step=0, history=History()), None)

    def look(step):
        one = observed()
        for x in one[:1] + one[2:5]:
            x.there = True
        log.look(step, one, of_plan(plan, step))

    try:
        look(1)
        assert not told
        monkeypatch.setattr(run_log, "WAIT_SECONDS", 0.0)
        look(2)
        assert [record["step"] for record in told] == [1, 2]
        assert all(record["epsilon"]["upper"] is None and "in time" in record["epsilon"]["why"] for record in told)
    finally:
        go.set()
    wait_for_table(log)
    look(3)
    assert told[-1]["epsilon"]["upper"] == pytest.approx(gaussian_epsilon(3**0.5 / 10.0), rel=0.02) and len(calls) == 1


# Epsilon of what was released


def upper(found, step, stretches=()):
    """The upper epsilon that a log tells after `step` steps, once its table is computed."""
    point = found.point(step, stretches)
    if point is not None:
        point.table.wait(60)
    return found.told(point)["upper"]


def test_a_run_by_itself():
    found = EpsilonSoFar(PLAN, 0, (), None)
    for step in (1, 50, 100):
        exact = PLAN.epsilon_after(step).upper
        assert exact <= upper(found, step, of_plan(PLAN, step)) <= 1.1 * exact
    assert upper(found, 100, of_plan(PLAN, 100)) == pytest.approx(gaussian_epsilon(1.0), rel=0.02)


def test_a_run_under_two_plans():
    """A recalibrated plan includes the old plan's steps and counts alone.  With any other plan, both plans count."""
    plan = Plan(target_epsilon=1.0, **FULL, steps=20)
    longer = plan.recalibrate(10, steps=30)
    before = of_plan(plan, 10)
    found = EpsilonSoFar(longer, 10, before, None)
    point = found.point(15, followed(before, longer, 10, 15, ""))
    assert (point.step, point.table) == (15, found._tables[0])
    other = Plan(**FULL, steps=30, noise_multiplier=5.0)
    found = EpsilonSoFar(other, 10, before, None)
    mu2 = 10 / plan.noise_multiplier**2 + 20 / 25
    assert upper(found, 30, followed(before, other, 10, 30, "")) == pytest.approx(gaussian_epsilon(mu2**0.5), rel=1e-3)


def test_a_ledger_that_holds_more(path):
    """Epsilon covers a run and a query from before the log.  After a later query, no epsilon is told."""
    with Ledger.create(path, PLAN, run="other") as ledger:
        for step in range(40):
            note(ledger, step)
        ledger.spend(ja.Gaussian(2.0), "a query")
        ledger.begin(PLAN, "this")
        found = EpsilonSoFar(PLAN, 0, (), ledger)
        for step in range(100):
            note(ledger, step, key=f"another {step}")
            if step in (0, 99):
                told = upper(found, step + 1)
                exact = ledger.epsilon(DELTA).upper
                assert exact <= told <= 1.1 * exact
        assert told == pytest.approx(gaussian_epsilon((1.4 + 0.25) ** 0.5), rel=1e-3)
        ledger.spend(ja.Gaussian(2.0), "another query")
        assert found.point(100, ()) is None and upper(found, 100) is None
        assert "more was released" in found.told(None)["why"] and found.covers == "all runs of the ledger"


def test_a_ledger_that_is_ahead_of_the_run(path):
    """A run is resumed from step 5 with 8 steps in its ledger: epsilon covers all 8 at once, and counts each once."""
    with Ledger.create(path, PLAN, run="this") as ledger:
        for step in range(8):
            note(ledger, step)
        found = EpsilonSoFar(PLAN, 5, (), ledger)
        for step in range(5, 12):
            note(ledger, step)
            assert found.point(step + 1, ()).step == max(step + 1, 8)
            assert ledger.epsilon(DELTA).upper <= upper(found, step + 1)


def test_a_step_that_is_repeated_otherwise_counts(path):
    """Under another key a repeated step is one more release, which the plan's own table does not count."""
    with Ledger.create(path, PLAN, run="this") as ledger:
        for step in range(100):
            note(ledger, step)
        found = EpsilonSoFar(PLAN, 50, (), ledger)
        for step in range(50, 100):
            note(ledger, step, key=f"again {step}")
        exact = gaussian_epsilon(1.5**0.5)
        assert ledger.epsilon(DELTA).upper == pytest.approx(exact, rel=1e-3)
        assert upper(found, 100) == pytest.approx(exact, rel=1e-3)


@pytest.mark.parametrize("told", [{}, {"target_epsilon": 1.0}])
def test_steps_that_a_filter_accounts_for(told):
    """For a plan with a Renyi filter, a log tells the whole plan's epsilon from the first step on."""
    plan = Plan(**FULL, **told, steps=20, **({} if told else {"noise_multiplier": 20.0}), data_dependent=True)
    assert upper(EpsilonSoFar(plan, 0, (), None), 1, of_plan(plan, 1)) == pytest.approx(float(plan.epsilon.upper))


def test_a_run_of_a_tuning(path):
    """The log of one of K runs counts that run alone; the law of K covers the others, and the target is for all K."""
    from jaxacct import selection

    plan = Plan(target_epsilon=3.0, **FULL, steps=10, repetitions=selection.Geometric(0.5))
    with Ledger.create(path, plan, run="first") as ledger:
        ledger.begin(plan, "second")
        found = EpsilonSoFar(plan, 0, (), ledger)
        note(ledger, 0, noise=plan.noise_multiplier)
        exact = gaussian_epsilon(1 / plan.noise_multiplier)
        assert upper(found, 1) == pytest.approx(exact, rel=0.02) and found.covers == "this run of the tuning"
        assert found.told(None)["upper"] is None
