"""Two steps from one state under different settings differ in noise and batches, or the ledger counts both steps."""

import numpy as np
import pytest
from training_cases import DELTA
from training_runs import KEY, keyed, linear, sgd, shared, still_trainer

from jaxacct.training import AdaptiveClip, Ledger, Plan

DATA = np.eye(8, dtype=np.float32)


OF_ROUNDS = {"sampling": "random_allocation", "slots": 1}


@pytest.mark.parametrize("sampling", [{"sampling_probability": 1.0}, pytest.param(OF_ROUNDS, marks=pytest.mark.slow)])
def test_another_noise_on_the_count_of_clipped_gradients_has_keys_of_its_own(tmp_path, sampling):
    """With one key, the two noisy sums would have the same noise at two scales, and so reveal the noise and the sum.

    In this test a step moves the parameters by an amount that depends on the step's key.
    """
    plan = Plan(target_delta=DELTA, dataset_size=8, noise_multiplier=1.0, steps=1, **sampling)
    clips = [AdaptiveClip(1.0, count_noise=noise) for noise in (5.0, 0.6)]
    trainers = [still_trainer(plan, clip_norm=clip, step=keyed) for clip in clips]
    first = trainers[0].init(np.zeros(8, np.float32), KEY)
    moved = [float(t.fit(first, DATA, progress=False, ledger=tmp_path / "run").params[0]) for t in trainers]
    assert moved[0] != moved[1]
    assert Ledger.read(tmp_path / "run").releases().total() == 2


def test_a_pass_of_fixed_batches_that_begins_elsewhere_is_cut_anew(tmp_path, still_steps):
    """Two plans go on from step 2: one begins a pass there, and the other is within a pass that began at step 1.

    If both passes cut the data alike, a record could be in step 3 of one plan and in step 2 of the other.  The ledger
    takes these two steps to be disjoint.
    """
    given = {"target_delta": DELTA, "dataset_size": 8, "noise_multiplier": 1.0, "sampling": "fixed_batches"}
    plans = [Plan(**given, batch_schedule=[(until, 4), (None, 2)], steps=6) for until in (2, 1)]
    assert [plan.pass_of(2)[1] for plan in plans] == [2, 1]
    trainers = [shared(linear, sgd(1.0), plan) for plan in plans]
    with Ledger.create(tmp_path / "run", plans[0]) as ledger:
        first, stop = trainers[0].init(np.zeros(8, np.float32), KEY), [lambda state: state.step == 2]
        half = trainers[0].fit(first, DATA, callbacks=stop, progress=False, ledger=ledger)
        for trainer in trainers:
            trainer.fit(half, DATA, progress=False, ledger=ledger)
        labels = {entry.partition for run in ledger.runs.values() for entry in run.seen if entry.step == 2}
    assert len(labels) == 2
