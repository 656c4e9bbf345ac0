"""How many programs a sweep compiles: a handful, whatever it mixes."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

import jaxacct as ja
from jaxacct.calibration import noise_rate_steps
from jaxacct.engines import backend, contour, programs
from jaxacct.sweeps import sweep

MOST = 8
MIX = {
    "noise_multiplier": [0.3, 1.0, 100.0],
    "sampling_probability": [1e-5, 1e-3, 0.1, 1.0],
    "steps": [1.0, 1e4, 1e7],
    "delta": [1e-3, 1e-20],
}
"""Ends and middle of every range; together they reach every rung."""
COUNTED = """
import json, sys
import jaxacct as ja
from jaxacct.engines import backend
from jaxacct.sweeps import sweep

table = sweep(json.loads(sys.argv[1]), block=16, backend="xla")
words = {name: sorted(set(table[name].tolist())) for name in ("status", "engine")}
info = ja.cache_info()
counts = {"prepared": info.compiled + info.loaded, "programs": backend.program.cache_info().currsize}
print(json.dumps(words | counts))
"""


@pytest.mark.slow
def test_a_sweep_of_everything_compiles_a_handful_of_programs():
    environment = os.environ | {"PYTHONPATH": ":".join(sys.path)}
    command = [sys.executable, "-c", COUNTED, json.dumps(MIX)]
    told = json.loads(subprocess.run(command, env=environment, check=True, capture_output=True, timeout=900).stdout)
    assert told["status"] == ["ok", "zero"]
    assert told["programs"] == len(contour.LADDER), "the mix does not reach every rung"
    assert told["prepared"] <= MOST  # what other tests have compiled is loaded, and counts all the same


class Unhelpful:
    """A program that certifies nothing, so that every row climbs every rung."""

    def __init__(self):
        self.shapes = set()

    def __call__(self, law, *values):
        self.shapes.add(values[0].shape)
        nothing = np.full(values[0].shape, np.nan)
        return nothing, nothing, nothing, np.zeros(nothing.shape, bool), np.zeros((nothing.size, 2))


@pytest.fixture
def asked(monkeypatch):
    """The programs asked for, none of which is any help."""
    found = {}
    known = lambda kernel, **size: found.setdefault((kernel, *size.items()), Unhelpful())
    monkeypatch.setattr(backend, "program", known)
    return found


@pytest.mark.parametrize("rows", [3, pytest.param(12, marks=pytest.mark.slow)])
def test_one_shape_of_each_program_serves_a_whole_sweep(asked, rows):
    grid = {"noise_multiplier": 1.0, "sampling_probability": 0.01, "delta": 1e-5, "steps": np.arange(2, rows + 2)}
    sweep(grid, relation="remove_one", engine="contour", block=2, backend="xla")
    assert len(asked) == len(contour.LADDER) and all(len(program.shapes) == 1 for program in asked.values())


def test_a_small_job_compiles_nothing(asked):
    assert ja.epsilon(ja.dp_sgd(1.0, 0.01, [2, 3]), 1e-5).engine.tolist() == ["two_steps", "contour"]
    assert ja.calibrate_noise_multiplier([1.0, 2.0], 1e-5, 0.01, 100).ok.all()
    assert not asked


def test_what_is_left_over_of_a_large_job_takes_its_path(monkeypatch, asked):
    monkeypatch.setattr(backend, "NUMPY_MOST", 1)
    ja.epsilon(ja.dp_sgd(1.0, 0.01, [2, 3]), 1e-5, engine="contour")
    assert asked
    taken = []

    def leftover(*_):
        taken.append(backend.on_numpy(1))
        raise KeyboardInterrupt

    monkeypatch.setattr(noise_rate_steps, "certified_search", leftover)
    with pytest.raises(KeyboardInterrupt):
        ja.calibrate_noise_multiplier([1.0, 2.0], 1e-5, 0.01, 100)
    assert taken == [False]


def test_what_the_user_asks_for_is_taken():
    for word in ("numpy", "xla"):
        with backend.job(1, word), backend.job(10**9), backend.job(1, apart=True):
            assert backend.on_numpy(1) == backend.on_numpy(10**9) == (word == "numpy")
    with backend.job(10**9), backend.job(1):
        assert not backend.on_numpy(1) and backend.on_numpy(1, apart=True)
    with pytest.raises(ja.InputError, match="backend = 'tpu' is not known"):
        ja.epsilon(ja.Gaussian(1.0), 1e-5, backend="tpu")


def test_a_middling_job_takes_xla_where_its_programs_are_kept(monkeypatch, tmp_path):
    monkeypatch.setenv("JAXACCT_CACHE_DIR", str(tmp_path / "programs"))
    assert backend.suiting(10_000) == "numpy"
    assert [backend.suiting(size, selections=True) for size in (2_400, 2_401)] == ["numpy", "xla"]
    programs.note_warm()
    assert [backend.suiting(size) for size in (1, 10_000)] == ["numpy", "xla"]
    ja.clear_cache()
    assert backend.suiting(10_000) == "numpy"
