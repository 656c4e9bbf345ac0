"""Checkpoints: a resumed run is the same run, and a killed one loses nothing."""

import os
import pathlib
import random
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

from jaxacct.training import Trainer
from jaxacct.training.ledger import Ledger


def test_a_resumed_run_is_the_same_run(tmp_path):
    trainer, state, data = training_runs.start()
    whole = trainer.fit(state, data, progress=False)
    half = trainer.fit(
        state, data, checkpoints=tmp_path, checkpoint_every=7, callbacks=[lambda s: s.step == 23], progress=False
    )
    in_memory = trainer.fit(half, data, progress=False)
    resumed = trainer.fit(trainer.init(jnp.zeros(3)), data, checkpoints=tmp_path, checkpoint_every=7, progress=False)
    for other in (in_memory, resumed):
        assert other.step == training_runs.STEPS and other.lineage == whole.lineage
        for a, b in zip(jax.tree.leaves(other.opt_state), jax.tree.leaves(whole.opt_state), strict=True):
            np.testing.assert_array_equal(a, b)
        np.testing.assert_array_equal(other.params, whole.params)
    changed = Trainer(trainer.loss_fn, optax.sgd(0.1), trainer.plan, 1.0)
    assert "is not of this model and optimizer" in refusal(
        changed.fit, changed.init(jnp.zeros(3)), data, checkpoints=tmp_path, progress=False
    )


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
        ledger = Ledger.read(f"{folder}/run.jsonl")
        assert sum(ledger.releases().values()) >= acknowledged
        assert float(ledger.epsilon(1e-5).upper) <= 4.0
    trainer, state, data = training_runs.start()
    ended = trainer.fit(state, data, ledger=f"{folder}/run.jsonl", checkpoints=f"{folder}/checkpoints", progress=False)
    whole = trainer.fit(state, data, progress=False)
    np.testing.assert_array_equal(ended.params, whole.params)
    assert ended.step == training_runs.STEPS and float(ended.epsilon.upper) <= 4.0
    assert float(ended.epsilon.upper) == pytest.approx(float(whole.epsilon.upper), rel=1e-9)
    assert pathlib.Path(folder, "checkpoints").stat().st_mode & 0o077 == 0


def test_a_killed_run_loses_nothing(tmp_path):
    killed_run(tmp_path, kills=2, seed=0)


@pytest.mark.slow
def test_a_run_killed_fifty_times_loses_nothing(tmp_path):
    for seed in range(10):
        folder = tmp_path / str(seed)
        folder.mkdir()
        killed_run(folder, kills=5, seed=seed)
