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

from jaxacct.core import progress
from jaxacct.training import Plan
from jaxacct.training.run import log


@pytest.fixture
def every_step(monkeypatch):
    """A line for each step."""
    monkeypatch.setattr(log, "PAUSES", (0.0, 0.0))
    monkeypatch.setattr(progress, "WAIT", 1e9)  # no lines before the first step, however slow the machine


def fitted(plan, progress=True):
    trainer = shared(squares, sgd(0.1), plan)
    return trainer.fit(trainer.init(np.zeros(2, np.float32)), jnp.ones((10, 2)), progress=progress)


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
        assert not plan.has_curve
    finally:
        go.set()
    for thread in threading.enumerate():
        if thread.name == "live epsilon":
            thread.join(60)
    assert plan.has_curve
    fitted(plan)
    lines = capsys.readouterr().err.splitlines()
    shown = [float(line.rsplit("epsilon <= ", 1)[1]) for line in lines]
    assert shown == [pytest.approx(gaussian_epsilon(math.sqrt(step) / 3.0), rel=0.03) for step in range(1, 6)]


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
    bar, plan = log.ProgressLine(plan_of(100, q=0.3, noise=2.0, steps=40), 0, True), plan_of(100, 0.3, 2.0, 40)
    bar.update(1, jnp.zeros(()))
    bar.update(2, jnp.zeros(()))
    bar.table.join(300)
    assert not jax.config.jax_enable_x64
    for step in (1, 20, 40):
        assert bar._plan.live_epsilon(step).upper == plan.live_epsilon(step).upper
        assert np.float64(plan.live_epsilon(step).upper) != np.float32(plan.live_epsilon(step).upper)
    bar.close()


def test_nothing_is_computed_where_nothing_is_shown(every_step):
    bar = log.ProgressLine(plan_of(100, q=0.3, noise=2.0, steps=40), 0, False)
    for step in range(1, 41):
        bar.update(step, None)
    assert bar.table is None and not bar._plan.has_curve


def test_a_table_that_ends_in_an_error_says_nothing(every_step, monkeypatch):
    """Such an error comes if the interpreter is ending and takes no new work; the slow test below causes this."""
    told = []
    monkeypatch.setattr(threading, "excepthook", told.append)
    monkeypatch.setattr(Plan, "epsilon_curve", lambda plan, points=64: ThreadPoolExecutor(0))
    bar = log.ProgressLine(plan_of(10, noise=3.0, steps=3), 0, True)
    bar.update(1, jnp.zeros(()))
    bar.table.join(60)
    assert not told and not bar.table.daemon and not bar._plan.has_curve


@pytest.mark.slow
def test_a_short_script_ends_quietly():
    """The interpreter is ending while the table is computed, and takes no new work."""
    program = """
import time
from concurrent.futures import ThreadPoolExecutor, thread
import jax.numpy as jnp
from jaxacct.training import Plan
from jaxacct.training.run import log

def table(plan, points=64):
    while not thread._shutdown:
        time.sleep(0.01)
    ThreadPoolExecutor().submit(int)

Plan.epsilon_curve = table
plan = Plan(target_delta=1e-5, dataset_size=10, sampling_probability=1.0, noise_multiplier=3.0, steps=3)
bar = log.ProgressLine(plan, 0, True)
bar.update(1, jnp.zeros(()))
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    ended = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=300
    )
    assert ended.returncode == 0 and "1/3" in ended.stderr and "Traceback" not in ended.stderr
