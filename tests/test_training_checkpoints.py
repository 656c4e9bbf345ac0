"""Checkpoints: a resumed run is the same run, and a killed one loses nothing."""

import functools
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import training_runs
from helpers import refusal
from training_runs import KEY, plan_of, still_trainer

from jaxacct.training import Trainer
from jaxacct.training.ledger import Ledger
from jaxacct.training.run import checkpoints


def begun():
    """(trainer, first state, data) of a run whose steps move nothing."""
    trainer = still_trainer(plan_of(4, noise=None, steps=12, target_epsilon=4.0))
    return trainer, trainer.init(np.zeros(3, np.float32), KEY), jnp.ones((4, 3))


def test_a_resumed_run_is_the_same_run(tmp_path):
    trainer, data, whole = whole_run()
    state = trainer.init(np.zeros(3, np.float32), training_runs.KEY)
    half = trainer.fit(
        state, data, checkpoints=tmp_path, checkpoint_every=20, callbacks=[lambda s: s.step == 23], progress=False
    )
    in_memory = trainer.fit(half, data, progress=False)
    resumed = trainer.fit(trainer.init(np.zeros(3, np.float32)), data, checkpoints=tmp_path, progress=False)
    for other in (in_memory, resumed):
        assert other.step == training_runs.STEPS and other.lineage == whole.lineage
        for a, b in zip(jax.tree.leaves(other.opt_state), jax.tree.leaves(whole.opt_state), strict=True):
            np.testing.assert_array_equal(a, b)
        np.testing.assert_array_equal(other.params, whole.params)
    changed = Trainer(trainer.loss_fn, optax.sgd(0.1), trainer.plan, 1.0)
    assert "is not of this model and optimizer" in refusal(
        changed.fit, changed.init(np.zeros(3, np.float32)), data, checkpoints=tmp_path, progress=False
    )


@functools.cache
def whole_run():
    """(trainer, data, last state) of a run that was left in peace."""
    trainer, state, data = training_runs.start()
    return trainer, data, trainer.fit(state, data, progress=False)


def killed_run(folder, kills, seed):
    """Kill a run at random steps, let it finish, and compare it with one that was left in peace."""
    rng = random.Random(seed)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    script = pathlib.Path(training_runs.__file__)
    acknowledged = 0
    for _ in range(kills):
        run = subprocess.Popen([sys.executable, script, folder], stdout=subprocess.PIPE, text=True, env=environment)
        after = rng.randint(1, 12)
        for count, line in enumerate(run.stdout, 1):
            acknowledged = max(acknowledged, int(line))
            if count == after:
                run.send_signal(signal.SIGKILL)
                break
        acknowledged = max([acknowledged, *map(int, run.stdout.read().split())])
        run.wait()
        counts_all(folder, acknowledged)
    goes_on(folder)


def counts_all(folder, acknowledged):
    ledger = Ledger.read(f"{folder}/run.jsonl")
    assert sum(ledger.releases().values()) >= acknowledged
    assert float(ledger.epsilon(1e-5).upper) <= 4.0


def goes_on(folder):
    """A run that resumes from the files of a killed run ends like a run without a kill."""
    trainer, data, whole = whole_run()
    state = trainer.init(np.zeros(3, np.float32), training_runs.KEY)
    ended = trainer.fit(state, data, ledger=f"{folder}/run.jsonl", checkpoints=f"{folder}/checkpoints", progress=False)
    np.testing.assert_array_equal(ended.params, whole.params)
    assert ended.step == training_runs.STEPS and float(ended.epsilon.upper) <= 4.0
    assert float(ended.epsilon.upper) == pytest.approx(float(whole.epsilon.upper), rel=1e-9)
    assert pathlib.Path(folder, "checkpoints").stat().st_mode & 0o077 == 0


def test_files_as_a_kill_leaves_them_lose_nothing(tmp_path):
    """The files of step 11, copied while the run goes on, are those that a kill leaves.  The slow test below kills."""
    running, left = tmp_path / "running", tmp_path / "left"
    running.mkdir()
    copy = lambda state: state.step == 11 and bool(shutil.copytree(running, left))
    files = {"ledger": running / "run.jsonl", "checkpoints": running / "checkpoints", "checkpoint_every": 7}
    trainer, data, _ = whole_run()
    trainer.fit(
        trainer.init(np.zeros(3, np.float32), training_runs.KEY), data, callbacks=[copy], progress=False, **files
    )
    counts_all(left, 11)
    goes_on(left)


@pytest.mark.slow
def test_a_run_killed_fifty_times_loses_nothing(tmp_path):
    for seed in range(10):
        folder = tmp_path / str(seed)
        folder.mkdir()
        killed_run(folder, kills=5, seed=seed)


def modes(folder):
    return {path.stat().st_mode & 0o777 for path in [folder, *folder.rglob("*")]}


def test_checkpoints_are_their_owners_alone_whatever_was_there(tmp_path):
    trainer, state, data = begun()
    folder = tmp_path / "run"
    before = os.umask(0o000)
    try:
        folder.mkdir(mode=0o755)
        stop = [lambda s: s.step == 3]
        trainer.fit(state, data, checkpoints=folder, callbacks=stop, progress=False)
        assert modes(folder) <= {0o700, 0o600}
        for path in [folder, *folder.rglob("*")]:
            path.chmod(0o777 if path.is_dir() else 0o666)
        trainer.fit(state, data, checkpoints=folder, progress=False)
        assert modes(folder) <= {0o700, 0o600}
        folder.chmod(0o755)
        (folder / "notes.txt").write_text("mine")
        assert "holds 'notes.txt', no checkpoint" in refusal(
            trainer.fit, state, data, checkpoints=folder, progress=False
        )
        assert (folder / "notes.txt").stat().st_mode & 0o777 == 0o666
    finally:
        os.umask(before)


def test_files_are_private_while_they_are_written(tmp_path, monkeypatch):
    seen = []
    real = checkpoints.Store.save

    def save(self, found):
        manager, write = self._manager, self._manager.save
        monkeypatch.setattr(manager, "save", lambda *a, **k: (seen.append(os.umask(0o077)), write(*a, **k)))
        real(self, found)

    monkeypatch.setattr(checkpoints.Store, "save", save)
    trainer, state, data = begun()
    trainer.fit(state, data, checkpoints=tmp_path / "run", callbacks=[lambda s: True], progress=False)
    assert len(seen) >= 2 and set(seen) == {0o077}


def test_checkpoints_that_do_not_say_what_was_spent_are_refused(tmp_path):
    """Checkpoints of earlier versions hold parameters and keys, and nothing of the plan."""
    trainer, state, data = begun()
    trainer.fit(state, data, checkpoints=tmp_path, callbacks=[lambda s: s.step == 2], progress=False)
    last = max(int(path.name) for path in tmp_path.iterdir() if path.name.isdigit())
    shutil.rmtree(tmp_path / str(last) / "run")
    assert "does not say what was spent" in refusal(trainer.fit, state, data, checkpoints=tmp_path, progress=False)


def test_a_state_that_is_not_the_last_checkpoint_is_refused(tmp_path):
    trainer, state, data = begun()
    seen = []
    trainer.fit(state, data, checkpoints=tmp_path, callbacks=[lambda s: seen.append(s) or s.step == 4], progress=False)
    other = trainer.fit(trainer.init(np.zeros(3, np.float32)), data, callbacks=[lambda s: s.step == 4], progress=False)
    early, last = seen[1], seen[3]
    again = lambda start: refusal(trainer.fit, start, data, checkpoints=tmp_path, progress=False)
    assert "is not the last checkpoint, 4" in again(early) and "are of two runs" in again(other)
    assert trainer.fit(last, data, checkpoints=tmp_path, progress=False).step == 12


def test_a_checkpoint_of_another_program_needs_a_ledger(tmp_path):
    """Later steps may have been released, and only a ledger shows them."""
    trainer, state, data = begun()

    def crash(state):
        if state.step == 10:
            raise RuntimeError

    for with_ledger in (False, True):
        folder = tmp_path / str(with_ledger)
        more = {"checkpoints": folder, "checkpoint_every": 7, "progress": False}
        more |= {"ledger": f"{folder}.jsonl"} if with_ledger else {}
        with pytest.raises(RuntimeError):
            trainer.fit(state, data, callbacks=[crash], **more)
        changed = still_trainer(trainer.plan, rate=0.2)
        if not with_ledger:
            assert "keep a ledger" in refusal(changed.fit, changed.init(np.zeros(3, np.float32)), data, **more)
            continue
        ended = changed.fit(changed.init(np.zeros(3, np.float32)), data, **more)
        assert (ended.step, ended.stopped) == (12 - 3, "budget")  # steps 8 to 10 were taken twice
