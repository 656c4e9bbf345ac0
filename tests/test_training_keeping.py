"""Checkpoints name their arrays and survive a full disk, no state shows its key, and memory maps are not copied."""

import base64
import contextlib
import copy
import dataclasses
import errno
import functools
import json
import os
import pickle
import re
import tempfile

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import refusal
from training_runs import adam, sgd, shared, squares

from jaxacct import strategies
from jaxacct.training import Ledger, Plan, Trainer
from jaxacct.training.run.checkpoints import Store
from jaxacct.training.source import source_of_mapped

KEY = bytes(range(1, 33))
ROWS = np.linspace(-1.0, 1.0, 20, dtype=np.float32)[:, None] * np.ones((1, 3), np.float32)


def plan_of(steps=4, size=20):
    return Plan(target_delta=1e-5, dataset_size=size, sampling_probability=0.5, noise_multiplier=5.0, steps=steps)


def loss(params, x):
    return sum(jnp.sum((leaf - x) ** 2) for leaf in params.values())


def trainer_of(steps=4, optimizer=None):
    return shared(loss, optimizer or adam(0.1), plan_of(steps))


def params_of(*names):
    return {name: jnp.full((2, 3), float(place)) for place, name in enumerate(names)}


def begin(folder, steps=2, key=KEY, **more):
    """A run stopped by its plan, in a folder of checkpoints."""
    trainer = trainer_of(steps, **more)
    return trainer.fit(trainer.init(params_of("enc", "out"), key), ROWS, checkpoints=folder, progress=False)


# Names


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (("z_enc", "out"), "params['enc'] of shape (2, 3) and dtype float32 where the model has params['z_enc']"),
        (("enc",), "params['out'] of shape (2, 3) and dtype float32 where the model has nothing"),
        (("enc", "out", "then"), "it has nothing where the model has params['then'] of shape"),
    ],
)
def test_a_checkpoint_of_other_names_is_refused(tmp_path, still_steps, names, words):
    begin(tmp_path)
    trainer = trainer_of(4)
    message = refusal(trainer.fit, trainer.init(params_of(*names), KEY), ROWS, checkpoints=tmp_path, progress=False)
    assert words in message and "is not of this model and optimizer" in message


def test_a_checkpoint_of_another_optimizer_with_the_same_shapes_is_refused(tmp_path, still_steps):
    begin(tmp_path, optimizer=optax.trace(0.9))
    trainer = trainer_of(4, optimizer=optax.ema(0.9, debias=False))
    start = trainer.init(params_of("enc", "out"), KEY)
    message = refusal(trainer.fit, start, ROWS, checkpoints=tmp_path, progress=False)
    assert re.search(r"it has opt_state\.trace.* where the model has opt_state\.", message)


def without_names(monkeypatch):
    """Checkpoints as earlier versions wrote them."""
    import orbax.checkpoint as ocp

    plain = ocp.args.JsonSave
    monkeypatch.setattr(ocp.args, "JsonSave", lambda run: plain({k: v for k, v in run.items() if k != "leaves"}))


def test_a_checkpoint_without_names_is_read_where_its_arrays_are_those_it_was_sealed_with(
    tmp_path, monkeypatch, keyed_steps
):
    without_names(monkeypatch)
    whole = begin(tmp_path / "one", 4)
    begin(tmp_path / "two", 2)
    trainer = trainer_of(4)
    start = trainer.init(params_of("enc", "out"), KEY)
    again = trainer.fit(start, ROWS, checkpoints=tmp_path / "one", progress=False)
    np.testing.assert_array_equal(again.params["enc"], whole.params["enc"])
    other = trainer.init(params_of("z_enc", "out"), KEY)
    message = refusal(trainer.fit, other, ROWS, checkpoints=tmp_path / "two", progress=False)
    assert "of an earlier version, which kept no names, and of another model" in message


# Keys


WRITERS = {
    "pickle": pickle.dumps,
    "pickle of a dict": lambda s: pickle.dumps(vars(s)),
    "pickle of asdict": lambda s: pickle.dumps(dataclasses.asdict(s)),
    "pickle of astuple": lambda s: pickle.dumps(dataclasses.astuple(s)),
    "pickle of a deep copy": lambda s: pickle.dumps(copy.deepcopy(s)),
    "pickle of a copy's lineage": lambda s: pickle.dumps(copy.copy(s).lineage),
    "pickle of parts": lambda s: pickle.dumps(tuple(s.lineage)),
    "pickle of leaves": lambda s: pickle.dumps(jax.tree.leaves(vars(s))),
    "repr": repr,
    "repr of a dict": lambda s: repr(vars(s)),
    "repr of asdict": lambda s: repr(dataclasses.asdict(s)),
    "repr of leaves": lambda s: repr(jax.tree.leaves(vars(s))),
    "repr of __reduce__": lambda s: repr(s.__reduce_ex__(4)),
    "repr of the lineage": lambda s: f"{s.lineage!r} {s.lineage!s}",
    "str of a part": lambda s: str(s.lineage._asdict()),
    "dict of the lineage": lambda s: repr(vars(s.lineage)),
    "json": lambda s: json.dumps(dataclasses.asdict(s), default=str),
    "json, repr": lambda s: json.dumps(vars(s), default=repr),
    "json of the lineage": lambda s: json.dumps(s.lineage, default=str),
    "flax": lambda s: repr(flax.serialization.to_state_dict(vars(s))),
    "flax, msgpack": lambda s: flax.serialization.msgpack_serialize(flax.serialization.to_state_dict(vars(s))),
    **{f"protocol {number}": functools.partial(pickle.dumps, protocol=number) for number in range(6)},
}
"""Every usual way to write down a state."""


def texts_of(state):
    """The bytes that the ways write, one after the other; some refuse a state."""
    for write in WRITERS.values():
        with contextlib.suppress(TypeError, AttributeError, ValueError):
            text = write(state)
            yield text if isinstance(text, bytes) else text.encode()


def forms_of(secret):
    """The middle of secret bytes as they are, in hex, base64 (at each offset), and escaped as Python and JSON do."""
    part = secret[2:14]
    shifted = (base64.b64encode(bytes(skip) + part)[4:-4] for skip in range(3))
    raw, escaped = repr(part)[2:-1], json.dumps(repr(part))[3:-2]
    texts = raw, escaped, json.dumps(part.decode("latin-1"))[1:-1], str(list(part))[1:-1]
    return [part, part.hex().encode(), part.hex().upper().encode(), *shifted, *(each.encode() for each in texts)]


def test_nothing_written_of_a_state_has_its_key(still_steps):
    seen = []
    trainer = trainer_of()
    see = lambda state: seen.extend(texts_of(state))
    state = trainer.fit(trainer.init(params_of("a"), KEY), ROWS, callbacks=[see], progress=False)
    for text in [*texts_of(state), *texts_of(trainer.init(params_of("a"), KEY)), *seen]:
        assert not any(form in text for form in forms_of(KEY))


def test_a_pickled_state_keeps_what_it_spent_and_goes_on_from_its_checkpoints_alone(tmp_path, keyed_steps):
    state = begin(tmp_path / "kept")
    found = pickle.loads(pickle.dumps(state))
    np.testing.assert_array_equal(found.params["enc"], state.params["enc"])
    assert float(found.epsilon.upper) == float(state.epsilon.upper) > 0 and found.step == 2
    longer = trainer_of(4)
    whole = longer.fit(state, ROWS, progress=False)
    for more in ({}, {"ledger": tmp_path / "l.jsonl"}, {"checkpoints": tmp_path / "empty"}):
        assert "no secret key, which pickling leaves out" in refusal(longer.fit, found, ROWS, progress=False, **more)
    assert not (tmp_path / "l.jsonl").exists()
    begin(tmp_path / "other", key=bytes(32))
    assert "are of two runs" in refusal(longer.fit, found, ROWS, progress=False, checkpoints=tmp_path / "other")
    again = longer.fit(found, ROWS, progress=False, checkpoints=tmp_path / "kept")
    np.testing.assert_array_equal(again.params["enc"], whole.params["enc"])
    assert again.lineage.root == state.lineage.root and copy.deepcopy(state).lineage == state.lineage


def test_a_pickled_state_finds_its_ledger(tmp_path, still_steps):
    trainer = trainer_of()
    path = tmp_path / "l.jsonl"
    state = trainer.fit(trainer.init(params_of("a"), KEY), ROWS, ledger=path, progress=False)
    found = pickle.loads(pickle.dumps(state))
    assert float(found.epsilon.upper) == float(state.epsilon.upper) == float(Ledger.read(path).epsilon(1e-5).upper)


RULES = {
    "Poisson": {"sampling_probability": 0.5},
    "all": {"sampling_probability": 1.0},
    "truncated": {"sampling": "truncated_poisson", "sampling_probability": 0.5, "cap": 15},
    "without replacement": {"sampling": "without_replacement", "expected_batch_size": 5},
    "cyclic Poisson": {"sampling": "cyclic_poisson", "sampling_probability": 0.5, "noise": strategies.Banded(4)},
    "order": {"sampling": "fixed_order", "expected_batch_size": 5, "noise": strategies.BLT(2)},
    "allocation": {"sampling": "random_allocation", "slots": 4},
    "fixed batches": {"sampling": "fixed_batches", "expected_batch_size": 5},
}


@pytest.mark.parametrize("rule", RULES)
def test_nobody_can_try_data_out_on_a_written_state(rule, tmp_path):
    """No digest of a lineage is written as it is: data link two of them. A pickled state still finds its checkpoint."""
    plan = Plan(target_delta=1e-5, dataset_size=20, noise_multiplier=5.0, steps=8, **RULES[rule])
    trainer = Trainer(loss, sgd(0.1), plan, clip_norm=1.0)
    states = [trainer.init(params_of("a"), KEY)]
    keep = lambda state: states.append(state) if state.step in (1, 3, 4) else state.step == 6
    begun = trainer.fit(states[0], ROWS, callbacks=[keep], checkpoints=tmp_path / "run", progress=False)
    for state in (*states, begun):
        line, seen = state.lineage, b"".join(texts_of(state))
        parts = line.chain, line.seal, line.pass_chain, line.pass_cut
        known = b"".join(part for part in parts if len(part) % 32 == 0)  # a pass of fixed batches has its size instead
        digests = [known[place : place + 32] for place in range(0, len(known), 32)]
        assert digests and not any(form in seen for each in digests for form in forms_of(each))
    found = pickle.loads(pickle.dumps(begun))
    assert pickle.loads(pickle.dumps(found)).lineage == found.lineage != begun.lineage == copy.copy(begun.lineage)
    whole = trainer.fit(found, ROWS, checkpoints=tmp_path / "run", progress=False)
    np.testing.assert_array_equal(whole.params["a"], trainer.fit(begun, ROWS, progress=False).params["a"])
    assert "are of two runs" in refusal(trainer.fit, found, ROWS, checkpoints=tmp_path / "run", progress=False)


# Full disks


def full(*_, **__):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def exhausted(*_, **__):
    raise ValueError('RESOURCE_EXHAUSTED: Error writing "x"\nmany\nlines')


@pytest.mark.parametrize(
    ("owner", "name", "raises"),
    [
        (tempfile, "TemporaryFile", full),
        (os, "posix_fallocate", full),
        (Store, "_manager", exhausted),
    ],
)
def test_a_full_disk_is_one_line_and_loses_no_checkpoint(
    tmp_path, monkeypatch, capfd, keyed_steps, owner, name, raises
):
    trainer = trainer_of(4)
    start = trainer.init(params_of("enc", "out"), KEY)
    whole = trainer.fit(start, ROWS, progress=False)

    def fill(state):
        if state.step == 3 and name == "_manager":
            import orbax.checkpoint as ocp

            monkeypatch.setattr(ocp.CheckpointManager, "save", raises)
        elif state.step == 3:
            monkeypatch.setattr(owner, name, raises)

    capfd.readouterr()
    with monkeypatch.context() as monkeypatch:
        more = {"checkpoints": tmp_path / "kept", "checkpoint_every": 2, "progress": False}
        message = refusal(trainer.fit, start, ROWS, callbacks=[fill], **more)
    assert "a checkpoint cannot be written (the disk is full); mend that and call fit again" in message
    assert "Traceback" not in capfd.readouterr().err
    again = trainer.fit(start, ROWS, **more)
    assert again.step == 4
    np.testing.assert_array_equal(again.params["enc"], whole.params["enc"])


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr("pathlib.Path.mkdir", full)
    trainer = trainer_of()
    start = trainer.init(params_of("a"), KEY)
    assert "No space left" in refusal(trainer.fit, start, ROWS, checkpoints=tmp_path / "new", progress=False)


# Memory maps


def anonymous():
    """Bytes of this process that no file backs."""
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) * 1024


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="asks Linux for its memory")
def test_a_memory_map_is_not_copied_into_memory(tmp_path):
    size = 2**16
    rows = np.memmap(tmp_path / "rows", np.float32, "w+", shape=(size, 2048))  # 512 MiB; a sparse file takes no disk
    plan = Plan(target_delta=1e-5, dataset_size=size, expected_batch_size=8, noise_multiplier=1.0, steps=3)
    trainer = Trainer(lambda w, x: x[1] * jnp.dot(w, x[0]), optax.sgd(0.1), plan, 1.0)
    grown = []
    before = anonymous()
    see = lambda state: grown.append(anonymous() - before)
    data = rows, np.zeros(size, np.float32)
    state = trainer.fit(trainer.init(np.zeros(2048, np.float32), KEY), data, callbacks=[see], progress=False)
    assert state.step == 3 and max(grown) < 2**28 and np.isfinite(state.params).all()


def test_a_memory_map_trains_as_a_source(tmp_path, still_steps):
    np.save(tmp_path / "x.npy", ROWS)
    rows = np.load(tmp_path / "x.npy", mmap_mode="r")
    for data in (rows, np.asarray(rows)[::1], rows[:]):
        assert source_of_mapped(data).layout.example.shape == (3,)
    trainer = shared(squares, sgd(0.1), plan_of())
    start = trainer.init(np.zeros(3, np.float32), KEY)
    message = refusal(trainer.fit, start, [rows, np.zeros(20)], progress=False)
    assert "put the maps into a tuple or a dict" in message
    assert "must be (20,), the plan's dataset_size" in refusal(trainer.fit, start, rows[:7], progress=False)
