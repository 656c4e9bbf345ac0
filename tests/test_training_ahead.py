"""Steps that are noted ahead: one write for several, never more outputs than entries, and the same stop."""

import dataclasses
import os
import pathlib
import random
import signal
import subprocess
import sys

import numpy as np
import pytest
from training_runs import keyed, still_trainer

import jaxacct as ja
from jaxacct.training import Ledger, Plan
from jaxacct.training.run import run_ledger

STEPS = 200
PLAN = Plan(target_delta=1e-5, dataset_size=40, sampling_probability=1.0, noise_multiplier=20.0, steps=STEPS)
TRAINER = still_trainer(PLAN, step=keyed)
DATA = np.ones((40, 2), np.float32)
KEY = bytes(range(32))


@pytest.fixture(autouse=True)
def _slow_disk(monkeypatch):
    """Allow the ledger's writes hardly any of a run's time, so that each write notes as many steps as allowed."""
    monkeypatch.setattr(run_ledger, "_NOTING", 1e-9)


def run(path, trainer=TRAINER, key=KEY, **how):
    return trainer.fit(trainer.init(np.zeros(2, np.float32), key=key), DATA, ledger=path, progress=False, **how)


def entries(path):
    return Ledger.read(path).runs


def steps_noted(path):
    return sum(spent.steps for spent in Ledger.read(path).runs.values())


@pytest.mark.parametrize("most", [None, 1, 2])
def test_no_step_runs_before_it_is_noted_and_few_are_noted_ahead(tmp_path, most, monkeypatch):
    syncs, ahead = [], []
    sync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: syncs.append(sync(file)))
    path = tmp_path / "run.jsonl"
    state = run(
        path,
        note_ahead=most,
        callbacks=[lambda s: ahead.append(steps_noted(path) - s.step) if s.step % 29 == 1 else None],
    )
    limit = STEPS // 100 if most is None else most
    assert state.step == STEPS == steps_noted(path)
    assert min(ahead) >= 0 and max(ahead) == limit - 1  # every step is noted before it runs
    assert len(syncs) <= 2 + 1 + -(-STEPS // limit) + 1
    assert Ledger.read(path).epsilon(1e-5).upper == PLAN.epsilon.upper == state.epsilon.upper


def test_a_run_that_was_stopped_goes_on_with_the_steps_that_were_noted(tmp_path):
    path, alone = tmp_path / "run.jsonl", run(tmp_path / "alone.jsonl", note_ahead=1)
    stopped = run(path, callbacks=[lambda s: s.step == 100])
    assert stopped.step == 100 and steps_noted(path) == 101
    ended = TRAINER.fit(stopped, DATA, ledger=path, progress=False)
    (spent,) = Ledger.read(path).runs.values()
    assert (spent.steps, spent.again) == (STEPS, 0)
    np.testing.assert_array_equal(ended.params, alone.params)
    assert ended.epsilon.upper == alone.epsilon.upper


def test_the_budget_ends_a_run_at_the_same_step(tmp_path):
    plan = Plan(target_epsilon=2.0, target_delta=1e-5, dataset_size=40, sampling_probability=1.0, steps=STEPS)
    trainer, ended = still_trainer(plan), {}
    for most in (1, None):
        path = tmp_path / f"{most}.jsonl"
        with Ledger.create(path, PLAN) as ledger:
            ledger.spend(ja.Gaussian(8.0), "a look")
        with pytest.warns(UserWarning, match="fit the budget"):
            ended[most] = run(path, trainer, note_ahead=most)
        assert ended[most].stopped == "budget" and steps_noted(path) == ended[most].step
        assert float(ended[most].epsilon.upper) <= 2.0
    assert ended[1].step == ended[None].step < STEPS


@pytest.mark.parametrize(
    "rule",
    [{"sampling": "fixed_batches", "sampling_probability": 0.5}, {"sampling": "random_allocation", "epochs": 100.0}],
)
def test_steps_of_a_pass_are_noted_one_by_one(tmp_path, rule):
    settings = {"steps": STEPS} if "epochs" not in rule else {"expected_batch_size": 20.0}
    plan = Plan(target_delta=1e-5, dataset_size=40, noise_multiplier=20.0, **rule, **settings)
    trainer, path, ahead = still_trainer(plan), tmp_path / "run.jsonl", []
    run(path, trainer, callbacks=[lambda s: ahead.append(steps_noted(path) - s.step) or s.step == 12])
    assert ahead == [0] * 12


def test_a_state_that_was_put_back_draws_other_keys(tmp_path):
    """The chain of keys at step 3 does not fit the first parameters: three steps are noted again, with new keys."""
    path, seen = tmp_path / "run.jsonl", {}
    start = TRAINER.init(np.zeros(2, np.float32), key=KEY)
    keep = lambda s: seen.update({s.step: dataclasses.replace(s)}) or s.step == 6
    TRAINER.fit(start, DATA, ledger=path, progress=False, callbacks=[keep], note_ahead=1)
    back = dataclasses.replace(seen[3], params=start.params, opt_state=start.opt_state)
    TRAINER.fit(back, DATA, ledger=path, progress=False, callbacks=[lambda s: s.step == 6], note_ahead=1)
    (spent,) = Ledger.read(path).runs.values()
    assert (spent.steps, spent.again) == (9, 3)


def _child(folder):
    """Train, and print every step whose output is known."""
    run_ledger._NOTING = 1e-9
    run(
        f"{folder}/run.jsonl",
        checkpoints=f"{folder}/kept",
        checkpoint_every=20,
        callbacks=[lambda s: print(s.step, flush=True)],
    )


@pytest.mark.slow
def test_fifty_kills_never_leave_more_outputs_than_entries(tmp_path):
    chance = random.Random(0)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(part for part in sys.path if part)}
    for number in range(10):
        folder = tmp_path / str(number)
        folder.mkdir()
        last = 0
        for _ in range(5):
            command = [sys.executable, str(pathlib.Path(__file__)), str(folder)]
            child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
            kill_at = chance.randint(1, 50)
            for count, line in enumerate(child.stdout, 1):
                last = max(last, int(line))
                if count == kill_at:
                    child.send_signal(signal.SIGKILL)
            child.wait()
            assert last <= steps_noted(folder / "run.jsonl") <= last + STEPS // 100
        ended = run(folder / "run.jsonl", checkpoints=folder / "kept")
        (spent,) = Ledger.read(folder / "run.jsonl").runs.values()
        assert (spent.steps, spent.again, ended.step) == (STEPS, 0, STEPS)


if __name__ == "__main__":
    _child(sys.argv[1])
