"""A step overwrites its state unless a callback has kept it; the loop of steps makes no implicit transfer."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from training_runs import adam, moving, plan_of, shared, squares, still, still_trainer

from jaxacct.training import Ledger, Source, trainer
from jaxacct.training.run.program import Program, Streamed
from jaxacct.training.sharding import placement
from jaxacct.training.sharding.placement import Placement
from jaxacct.training.step.step_function import numbers_at

DATA = np.ones((20, 2), np.float32)
PLAN = plan_of(20, q=0.5, steps=6)


def fit(data=DATA, optimizer=None, **more):
    made = shared(squares, optimizer or adam(0.1), PLAN)
    return made.fit(made.init(np.zeros(2, np.float32), bytes(32)), data, progress=False, **more)


@pytest.mark.parametrize("data", [DATA, Source(DATA)], ids=["resident", "loaded"])
def test_the_loop_moves_no_array_unsaid(data, tmp_path):
    made = still_trainer(PLAN, step=moving) if data is DATA else shared(squares, adam(0.1), PLAN)
    with contextlib.ExitStack() as stack:

        def look(state):
            if state.step == 1:
                stack.enter_context(jax.transfer_guard("disallow"))
            return state.params is None

        records = []
        folders = {"ledger": tmp_path / "run.jsonl", "checkpoints": tmp_path / "run", "checkpoint_every": 2}
        more = {"callbacks": [look], "log": records.append, "progress": False}
        assert made.fit(made.init(np.zeros(2, np.float32)), data, **more, **folders).step == 6
    assert len(records) == 6


@pytest.mark.parametrize("data", [DATA, pytest.param(Source(DATA), marks=pytest.mark.slow)], ids=["resident", "loaded"])
def test_losses_that_use_other_frozen_arrays_have_other_keys(data, tmp_path, monkeypatch):
    """With equal keys both results would have the same noise, and their difference would be that of the gradients."""
    params = {"w": jnp.zeros(2), "near": jnp.zeros(2), "far": jnp.zeros(2)}
    digests, real, compile = [], Placement.digest_program, jax.stages.Lowered.compile
    monkeypatch.setattr(Placement, "digest_program", lambda *each: digests.append(real(*each)) or digests[-1])
    # steps are traced, not compiled; only the check of the loss, which compiles with options, is compiled
    monkeypatch.setattr(jax.stages.Lowered, "compile", lambda *low, **how: compile(*low, **how) if how else None)
    for kind in (Program, Streamed):
        monkeypatch.setattr(kind, "run", lambda self, carried, *given: still(carried, *given, None))

    def run(name):
        digests.clear()
        loss = lambda p, x: squares(p["w"] + p[name], x)
        made = trainer.Trainer(loss, optax.sgd(0.1), PLAN, 1.0, trainable=lambda path: path == "w")
        path = tmp_path / f"{len([*tmp_path.iterdir()])}.jsonl"
        assert made.fit(made.init(params, bytes(32)), data, ledger=path, progress=False).step == 6
        (run,) = Ledger.read(path).runs.values()
        return {*digests}, {entry.key for entry in run.seen}

    near, far = run("near"), run("far")
    assert near[0] != far[0] and len(near[1]) == 6 and not near[1] & far[1]


def test_a_step_overwrites_all_that_it_is_given():
    made = shared(squares, adam(0.1), PLAN)
    carried = made.placement.carried(made.init(np.zeros(2, np.float32)), jnp.zeros(2))
    words = np.zeros(8, np.uint32)
    step = made.placement.step(carried, words, words, DATA, numbers_at(PLAN, 0, None), None)
    used = step.lower().compile().memory_analysis()
    assert used.alias_size_in_bytes >= sum(leaf.nbytes for leaf in jax.tree.leaves(carried))


@pytest.mark.parametrize("optimizer", [adam(0.1), optax.contrib.schedule_free_adamw(0.1)], ids=["adam", "two of one"])
def test_what_callbacks_keep_stays(optimizer, monkeypatch):
    if optimizer is not adam(0.1):  # schedule-free: parameters and state begin as one array, so a fast step will do
        monkeypatch.setattr(placement, "private_step", lambda rule: moving)
    kept, looked = [], []
    first = fit(optimizer=optimizer, callbacks=[kept.append, lambda state: looked.append(state.params)])
    later = [np.asarray(state.params) for state in kept]
    np.testing.assert_array_equal(later, looked)
    assert len({tuple(params) for params in later}) == 6
    np.testing.assert_array_equal(first.params, fit(optimizer=optimizer).params)  # copies change nothing


def test_only_what_may_be_kept_is_copied(monkeypatch):
    copies, real = [], trainer.copied
    monkeypatch.setattr(trainer, "copied", lambda carried: copies.append(1) or real(carried))
    fit(callbacks=[lambda state: state.step > 99])
    assert not copies
    fit(callbacks=[lambda state: state.step == 3 and np.asarray(state.params)[0] > 99])
    assert len(copies) == 1
    kept = []
    fit(callbacks=[lambda state: state.step == 4 and kept.append(state)])
    assert len(copies) == 2 and np.all(np.isfinite(kept[0].params))


def test_the_first_state_is_not_overwritten():
    made = shared(squares, adam(0.1), PLAN)
    begun = made.init(np.zeros(2, np.float32), bytes(32))
    ended = [made.fit(begun, DATA, progress=False).params for _ in range(2)]
    np.testing.assert_array_equal(*ended)
    assert not np.any(begun.params)


def test_data_that_the_caller_changes_during_the_run_change_nothing():
    """On a CPU, JAX shares the memory of a NumPy array that begins at a multiple of 64 bytes, and makes no copy."""
    room = np.ones(56, np.float32)
    begin = -room.ctypes.data % 64 // 4
    data = room[begin : begin + 40].reshape(20, 2)
    ended = fit(data, callbacks=[lambda state: data.fill(9.0)])
    np.testing.assert_array_equal(ended.params, fit().params)
