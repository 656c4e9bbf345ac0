"""How many programs a sweep compiles: a handful, whatever it mixes."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from jaxacct.engines import contour, programs
from jaxacct.sweep import sweep
from jaxacct.sweep.plan import FEW

MOST = 8
MIX = {
    "noise_multiplier": [0.3, 1.0, 100.0],
    "sampling_probability": [1e-5, 1e-3, 0.1, 1.0],
    "steps": [1.0, 1e4, 1e7],
    "delta": [1e-3, 1e-20],
}
"""Ends and middle of every range; together they reach every rung."""
COUNTED = """
import importlib, json, sys
import jax
compiled = []
def listen(event, seconds, fun_name="", **_):
    if event == "/jax/core/compile/backend_compile_duration":
        compiled.append(fun_name)
jax.monitoring.register_event_duration_secs_listener(listen)
from jaxacct.engines import programs
from jaxacct.sweep import sweep
importlib.import_module("jaxacct.sweep.plan").FEW = int(sys.argv[1])
table = sweep(json.loads(sys.argv[2]), block=16)
words = {name: sorted(set(table[name].tolist())) for name in ("status", "engine")}
print(json.dumps(words | {"compiled": compiled, "programs": programs._batched.cache_info().currsize}))
"""


@pytest.mark.parametrize("few", [10_000, pytest.param(0, marks=pytest.mark.slow)], ids=["quick", "optimised"])
def test_a_sweep_of_everything_compiles_a_handful_of_programs(few):
    environment = os.environ | {"PYTHONPATH": ":".join(sys.path)}
    command = [sys.executable, "-c", COUNTED, str(few), json.dumps(MIX)]
    told = json.loads(subprocess.run(command, env=environment, check=True, capture_output=True, timeout=900).stdout)
    assert told["status"] == ["ok", "zero"]
    assert told["programs"] == len(contour.LADDER), "the mix does not reach every rung"
    contours = [name for name in told["compiled"] if "flat" in name]  # the lattice engine compiles on top of these
    assert len(contours) <= MOST, told["compiled"]


class Unhelpful:
    """A program that certifies nothing, so that every row climbs every rung."""

    def __init__(self, kernel, quick, static):
        self.asked, self.quick, self.shapes = (kernel, static), quick, set()

    def __call__(self, law, *values):
        self.shapes.add(values[0].shape)
        nothing = np.full(values[0].shape, np.nan)
        return nothing, nothing, nothing, np.zeros(nothing.shape, bool), np.zeros((nothing.size, 2))


@pytest.mark.parametrize(("rows", "quick"), [(3, True), (FEW, True), (FEW + 1, False)])
def test_one_variant_and_one_shape_serve_a_whole_sweep(monkeypatch, rows, quick):
    asked = {}
    monkeypatch.setattr(programs, "_batched", lambda *what: asked.setdefault(what, Unhelpful(*what)))
    grid = {"noise_multiplier": 1.0, "sampling_probability": 0.01, "steps": np.arange(2, rows + 2), "delta": 1e-5}
    sweep(grid, engine="contour", block=50)
    assert len(asked) == len(contour.LADDER) and {program.quick for program in asked.values()} == {quick}
    assert all(len(program.shapes) == 1 for program in asked.values())
