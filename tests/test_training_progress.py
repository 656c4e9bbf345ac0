"""The progress line: epsilon beside the steps, without making them wait."""

import math
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from training_cases import gaussian_epsilon
from training_runs import plan_of, sgd, shared, squares

from jaxacct import selection
from jaxacct.core import progress
from jaxacct.training import Plan
from jaxacct.training.run import log
from jaxacct.training.run.state import Stretch


@pytest.fixture
def every_step(monkeypatch):
    """A line for each step."""
    monkeypatch.setattr(log, "PAUSES", (0.0, 0.0))
    monkeypatch.setattr(progress, "WAIT", 1e9)  # no lines before the first step, however slow the machine


def fitted(plan, progress=True, state=None, **more):
    trainer = shared(squares, sgd(0.1), plan)
    state = trainer.init(np.zeros(2, np.float32)) if state is None else state
    return trainer.fit(state, jnp.ones((10, 2)), progress=progress, **more)


def line_of(plan, show=True):
    """A progress line of a run by itself."""
    return log.ProgressLine(log.EpsilonSoFar(plan, 0, (), None), 0, show)


def update(bar, plan, step):
    bar.update(step, jnp.zeros(()), (Stretch(plan, 0, step, ""),))


def join():
    for thread in threading.enumerate():
        if thread.name == "epsilon of the log":
            thread.join(300)


def shown(capsys):
    """What each line says of epsilon."""
    return [line.split("  epsilon")[1] for line in capsys.readouterr().err.splitlines() if "  epsilon" in line]


@pytest.fixture
def waited_for(monkeypatch):
    """Make each line wait until the table of epsilon is there."""
    real = log._Table.at

    def at(table, step):
        point = real(table, step)
        table.wait(60)
        return point

    monkeypatch.setattr(log._Table, "at", at)


@pytest.mark.parametrize("held", ["an earlier plan", "another run of the ledger"])
def test_the_line_counts_what_was_spent_before(every_step, still_steps, waited_for, capsys, tmp_path, held):
    before, plan = plan_of(10, noise=2.0, steps=4), plan_of(10, noise=9.0, steps=6)
    more = {"ledger": tmp_path / "ledger.jsonl"} if held == "another run of the ledger" else {}
    state = fitted(before, False, **more)
    state = fitted(plan, True, None if more else state, **more)
    assert len(told := shown(capsys)) == (6 if more else 2)
    spent = float(state.epsilon.upper)
    assert spent <= float(told[-1].removeprefix(" <= ")) <= 1.03 * spent


def test_the_line_of_a_run_of_a_tuning_says_so(every_step, still_steps, waited_for, capsys):
    plan = plan_of(10, noise=9.0, steps=4, repetitions=selection.PointMass(3))
    one, told = fitted(plan).epsilon.upper, shown(capsys)
    assert len(told) == 4 and all(text.startswith(" of one run <= ") for text in told)
    assert one <= float(told[-1].split("<= ")[1]) < plan.epsilon.upper


def test_training_does_not_wait_for_the_table(every_step, still_steps, monkeypatch, capsys):
    """Training ends while the table is still being computed; no line shows epsilon before the table is ready."""
    real, go = Plan.epsilon_curve, threading.Event()

    def slow(plan, points=64):
        assert go.wait(60)
        return real(plan, points)

    monkeypatch.setattr(Plan, "epsilon_curve", slow)
    plan = plan_of(10, noise=3.0, steps=5)
    try:
        assert fitted(plan).step == 5
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 5 and "5/5" in lines[-1] and not any("epsilon" in line for line in lines)
    finally:
        go.set()
    join()


def test_each_line_shows_epsilon_so_far(every_step, still_steps, waited_for, capsys):
    fitted(plan_of(10, noise=3.0, steps=5))
    told = [float(text.removeprefix(" <= ")) for text in shown(capsys)]
    assert told == [pytest.approx(gaussian_epsilon(math.sqrt(step) / 3.0), rel=0.03) for step in range(1, 6)]


@pytest.mark.parametrize("show", [True, False, None])
def test_tracing_and_compiling_say_so(monkeypatch, still_steps, capsys, show):
    monkeypatch.setattr(progress, "WAIT", 0.0)
    monkeypatch.setattr(progress, "on_terminal", lambda: False)
    fitted(plan_of(10, noise=3.0, steps=2), show)
    lines = capsys.readouterr().err.splitlines()
    assert lines[:2] == (["0 steps: tracing the step", "0 steps: compiling the step"] if show else [])


@pytest.mark.slow
def test_the_table_is_the_same_from_another_thread(every_step):
    """The thread that computes the table uses double precision, whatever the caller's thread uses."""
    one, plan = plan_of(100, q=0.3, noise=2.0, steps=40), plan_of(100, 0.3, 2.0, 40)
    bar = line_of(one)
    update(bar, one, 1)
    update(bar, one, 2)
    join()
    assert not jax.config.jax_enable_x64 and "_curve" in vars(one)
    for step in (1, 20, 40):
        assert one.live_epsilon(step).upper == plan.live_epsilon(step).upper
        assert np.float64(plan.live_epsilon(step).upper) != np.float32(plan.live_epsilon(step).upper)
    bar.close()


def test_nothing_is_computed_where_nothing_is_shown(every_step):
    plan = plan_of(100, q=0.3, noise=2.0, steps=40)
    bar = line_of(plan, False)
    for step in range(1, 41):
        update(bar, plan, step)
    last = line_of(plan)
    update(last, plan, 40)  # too late for a table
    assert all(table._thread is None for bar in (bar, last) for table in bar._epsilon._tables)


def test_a_table_that_ends_in_an_error_says_nothing(every_step, monkeypatch):
    """Such an error comes if the interpreter is ending and takes no new work; the slow test below causes this."""
    told = []
    monkeypatch.setattr(threading, "excepthook", told.append)
    monkeypatch.setattr(Plan, "epsilon_curve", lambda plan, points=64: ThreadPoolExecutor(0))
    plan = plan_of(10, noise=3.0, steps=3)
    bar = line_of(plan)
    update(bar, plan, 1)
    thread = bar._epsilon._tables[0]._thread
    join()
    assert not told and not thread.daemon and "_curve" not in vars(plan)


@pytest.mark.slow
def test_a_short_script_ends_quietly():
    """The interpreter is ending while the table is computed, and takes no new work."""
    program = """
import time
from concurrent.futures import ThreadPoolExecutor, thread
import jax.numpy as jnp
from jaxacct.training import Plan
from jaxacct.training.run import log
from jaxacct.training.run.state import Stretch

def table(plan, points=64):
    while not thread._shutdown:
        time.sleep(0.01)
    ThreadPoolExecutor().submit(int)

Plan.epsilon_curve = table
plan = Plan(target_delta=1e-5, dataset_size=10, sampling_probability=1.0, noise_multiplier=3.0, steps=3)
bar = log.ProgressLine(log.EpsilonSoFar(plan, 0, (), None), 0, True)
bar.update(1, jnp.zeros(()), (Stretch(plan, 0, 1, ""),))
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    ended = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=300
    )
    assert ended.returncode == 0 and "1/3" in ended.stderr and "Traceback" not in ended.stderr
