"""The compiled step of a training is kept for later processes, and takes the same steps when it is loaded."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from training_runs import moving, plan_of

from jaxacct.engines import programs
from jaxacct.training import Ledger, Trainer
from jaxacct.training.sharding import placement
from jaxacct.training.step import key_derivation

pytestmark = pytest.mark.usefixtures("without_cache_of_jax")
DATA = np.random.default_rng(0).normal(size=(20, 3)).astype(np.float32)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXACCT_CACHE_DIR", str(tmp_path / "programs"))
    monkeypatch.setattr(programs, "STEP_SECONDS", 0.0)
    return tmp_path / "programs"


def run(ledger=None, target=0.0):
    """Parameters after four steps, of a trainer that shares nothing with others."""
    loss = lambda params, example: jnp.sum((params - example - target) ** 2)
    made = Trainer(loss, optax.adam(0.1), plan_of(20, q=0.5, steps=4), 1.0)
    return made.fit(made.init(np.zeros(3, np.float32), bytes(32)), DATA, ledger=ledger, progress=False).params.tolist()


def kept(folder):
    return sorted(folder.glob("*.program"))


@pytest.mark.parametrize("step", [moving, pytest.param(None, marks=pytest.mark.slow)], ids=["small", "real"])
def test_a_loaded_step_is_the_compiled_one(folder, tmp_path, monkeypatch, step):
    """A damaged file is not loaded: its step is compiled anew."""
    if step is not None:
        monkeypatch.setattr(placement, "private_step", lambda rule: step)
    before, ledgers = programs.loading.count, [tmp_path / "compiled.jsonl", tmp_path / "loaded.jsonl"]
    compiled = run(ledgers[0])
    (file,) = kept(folder)
    assert programs.loading.count == before and file.stat().st_mode & 0o777 == 0o600
    assert run(ledgers[1]) == compiled and kept(folder) == [file]
    assert programs.loading.count == before + 1
    one, other = (next(iter(Ledger.read(path).runs.values())).seen for path in ledgers)
    assert [entry.key for entry in one] == [entry.key for entry in other]
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    assert run() == compiled
    assert programs.loading.count == before + 1


@pytest.mark.slow
def test_a_file_that_others_may_write_is_compiled_anew(folder):
    compiled = run()
    (file,) = kept(folder)
    file.chmod(0o666)
    before = programs.loading.count
    assert run() == compiled
    assert programs.loading.count == before


@pytest.mark.slow
def test_another_program_has_another_file(folder):
    assert run() != run(target=1.0)
    assert len(kept(folder)) == 2


def test_what_does_not_run_once_loaded_is_not_kept(folder, monkeypatch, still_steps):
    def fails(*arguments):
        raise RuntimeError("a function is missing")

    monkeypatch.setattr(programs, "deserialize_and_load", lambda *payload, **trees: fails)
    assert len(run()) == 3 and not kept(folder)


def test_a_program_that_does_not_repeat_itself_is_not_kept(folder, monkeypatch, still_steps):
    monkeypatch.setattr(key_derivation, "repeats", lambda primitives: False)
    assert len(run()) == 3 and not kept(folder)


@pytest.mark.slow
def test_quick_programs_are_not_kept(folder, monkeypatch):
    monkeypatch.setattr(programs, "STEP_SECONDS", 1e9)
    assert len(run()) == 3 and not kept(folder)
