"""A quick first answer: what a query imports, and programs compiled quickly."""

import os
import subprocess
import sys

import jax
import pytest

from jaxacct import cli
from jaxacct.engines import programs

pytestmark = pytest.mark.usefixtures("without_cache_of_jax")

QUERY = "epsilon --noise-multiplier 1 --sampling-probability 0.01 --steps 10000 --delta 1e-5 --json"


PLAIN = f"""
import jax, pathlib, sys
before = dict(jax.config.values)
from jaxacct import cli
cli.main({QUERY.split()!r})
print("scipy" in sys.modules, pathlib.Path(sys.argv[1]).exists())
import numpy as np
from jaxacct.engines import backend
program = backend.program(lambda x, scale: (scale * x,), scale=3)
print(backend.in_chunks(program, 4, (np.arange(4.0),), 4)[0][3], dict(jax.config.values) == before)
"""


def test_a_plain_query_imports_no_scipy_compiles_nothing_and_leaves_the_settings_of_jax_alone(tmp_path):
    """A program that is compiled leaves the settings of JAX alone, too."""
    folder = str(tmp_path / "programs")
    environment = {**os.environ, "JAXACCT_CACHE_DIR": folder, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", PLAIN, folder]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.endswith("False False\n9.0 True\n") and done.stderr == ""


@pytest.mark.slow  # `test_program_cache.py` tests the same with a small program
def test_kept_programs_answer_as_they_did_when_compiled(tmp_path):
    code = f"from jaxacct import cli; cli.main({[*QUERY.split(), '--backend', 'xla']!r})"
    environment = {**os.environ, "JAXACCT_CACHE_DIR": str(tmp_path)}
    outputs = []
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
        outputs.append(done.stdout)
        assert len(list(tmp_path.glob("*.program"))) == 1
    assert outputs[0] == outputs[1] and "epsilon" in outputs[0]


def test_options_that_this_xla_lacks_are_left_out_and_no_others():
    options = {"xla_no_such_option": True, "xla_llvm_disable_expensive_passes": True}
    assert programs.known(**options) == {"xla_llvm_disable_expensive_passes": True}
    assert programs._compile(jax.jit(lambda x: 2 * x).lower(1), options)(3) == 6


def test_the_command_frees_nothing_at_its_end(monkeypatch, capsys):
    calls = []
    monkeypatch.setattr("gc.freeze", lambda: calls.append("frozen"))
    monkeypatch.setattr("gc.set_threshold", lambda *_: None)
    monkeypatch.setattr(sys, "argv", ["jaxacct", "nonsense"])
    assert cli.command() == 2 and calls == ["frozen"]
    capsys.readouterr()
