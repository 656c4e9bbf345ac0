"""How many programs a sweep compiles: a handful, whatever it mixes."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

import jaxacct as ja
from jaxacct import dp_sgd_calibration
from jaxacct.engines import contour, programs
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
from jaxacct.engines import programs
from jaxacct.sweeps import sweep
programs.MANY = int(sys.argv[1])
table = sweep(json.loads(sys.argv[2]), block=16)
words = {name: sorted(set(table[name].tolist())) for name in ("status", "engine")}
info = ja.cache_info()
counts = {"prepared": info.compiled + info.loaded, "programs": programs._batched.cache_info().currsize}
print(json.dumps(words | counts))
"""


@pytest.mark.slow
@pytest.mark.parametrize("many", [10_000, 0], ids=["quick", "optimised"])
def test_a_sweep_of_everything_compiles_a_handful_of_programs(many):
    environment = os.environ | {"PYTHONPATH": ":".join(sys.path)}
    command = [sys.executable, "-c", COUNTED, str(many), json.dumps(MIX)]
    told = json.loads(subprocess.run(command, env=environment, check=True, capture_output=True, timeout=900).stdout)
    assert told["status"] == ["ok", "zero"]
    assert told["programs"] == len(contour.LADDER), "the mix does not reach every rung"
    assert told["prepared"] <= MOST  # what other tests have compiled is loaded, and counts all the same


class Unhelpful:
    """A program that certifies nothing, so that every row climbs every rung."""

    def __init__(self, kernel, quick, static):
        self.quick, self.shapes = quick, set()

    def __call__(self, law, *values):
        self.shapes.add(values[0].shape)
        nothing = np.full(values[0].shape, np.nan)
        return nothing, nothing, nothing, np.zeros(nothing.shape, bool), np.zeros((nothing.size, 2))


GRID = {"noise_multiplier": 1.0, "sampling_probability": 0.01, "delta": 1e-5}


@pytest.fixture
def asked(monkeypatch):
    """The programs asked for, none of which is any help."""
    found = {}
    monkeypatch.setattr(programs, "_batched", lambda *what: found.setdefault(what, Unhelpful(*what)))
    return found


@pytest.mark.parametrize(("rows", "quick"), [(3, True), (programs.MANY, True), (programs.MANY + 1, False)])
def test_one_variant_and_one_shape_serve_a_whole_sweep(asked, rows, quick):
    sweep({**GRID, "steps": np.arange(2, rows + 2)}, engine="contour", block=50)
    assert len(asked) == len(contour.LADDER) and {program.quick for program in asked.values()} == {quick}
    assert all(len(program.shapes) == 1 for program in asked.values())


@pytest.mark.parametrize(("many", "quick"), [(1, False), (2, True)])
def test_what_is_left_over_of_a_large_batch_is_optimised_too(monkeypatch, asked, many, quick):
    monkeypatch.setattr(programs, "MANY", many)
    ja.epsilon(ja.dp_sgd(1.0, 0.01, [2, 3]), 1e-5, engine="contour")
    assert {program.quick for program in asked.values()} == {quick}
    asked.clear()

    def leftover(*_):
        programs.program(contour.epsilon, 1, 1)
        raise KeyboardInterrupt

    monkeypatch.setattr(dp_sgd_calibration, "certified_search", leftover)
    with pytest.raises(KeyboardInterrupt):
        ja.calibrate_noise_multiplier([1.0, 2.0], 1e-5, 0.01, 100)
    assert {program.quick for program in asked.values()} == {quick}
