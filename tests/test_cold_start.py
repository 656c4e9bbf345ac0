"""A quick first answer: what a query imports, and programs compiled quickly."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxacct import cli
from jaxacct.engines import contour, programs
from jaxacct.engines.contour import LADDER
from jaxacct.kernels import contour as kernel
from jaxacct.mechanisms import components, dp_sgd

QUERY = "epsilon --noise-multiplier 1 --sampling-probability 0.01 --steps 10000 --delta 1e-5 --json"


def half(x, scale):
    """A kernel of one line."""
    return (0.5 * scale * x,)


def dot_of_a_stack(x, y):
    return (jnp.stack([x * y, x, y]) @ jnp.stack([y, x]).T,)


def test_a_plain_query_imports_no_scipy_and_answers_alike_from_the_kept_program(tmp_path):
    code = f"import sys; from jaxacct import cli; cli.main({QUERY.split()!r}); print('scipy' in sys.modules)"
    environment = {**os.environ, "JAXACCT_CACHE_DIR": str(tmp_path)}
    outputs = []
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
        outputs.append(done.stdout)
        assert done.stdout.endswith("False\n") and done.stderr == ""
        assert len(list(tmp_path.glob("*.program"))) == 1
    assert outputs[0] == outputs[1]


def test_options_that_this_xla_lacks_are_left_out_and_no_others():
    options = {"xla_no_such_option": True, "xla_llvm_disable_expensive_passes": True}
    assert programs.known(**options) == {"xla_llvm_disable_expensive_passes": True}
    assert programs._compile(jax.jit(lambda x: 2 * x).lower(1), options)(3) == 6


def test_quickly_compiled_programs_keep_their_transposes():
    """jaxlib 0.10.2 drops one here when the simplification after layout assignment runs without fusion emitters."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(2, 8, 1, 64))
    expected = np.stack([x * y, x, y], 2) @ np.stack([y, x], 2).swapaxes(2, 3)
    with jax.enable_x64():
        for fusion in ("", ",fusion"):
            options = programs.QUICK | {"xla_disable_hlo_passes": programs.QUICK["xla_disable_hlo_passes"] + fusion}
            (out,) = jax.jit(jax.vmap(jax.vmap(dot_of_a_stack)), compiler_options=options)(x, y)
            np.testing.assert_allclose(out, expected, atol=1e-12)


@pytest.mark.parametrize("direction", ["remove", "add"])
def test_quick_and_optimised_programs_agree(direction):
    """Both brackets hold, so they overlap; where they are narrow their ends differ by rounding."""
    mechanism = dp_sgd([0.6, 1.0, 2.0, 5.0], [0.002, 0.01, 0.1, 0.3], [50_000, 10_000, 3_000, 200])
    parts = components(mechanism, "add_or_remove_one", direction)
    target, tolerance = np.full(4, np.log(1e-6)), np.full(4, np.log(contour.TOLERANCE))
    arguments = (contour.law(parts), target, target, tolerance)
    rung = LADDER[1]
    static = {"points": rung.points, "count": rung.nodes, "rounds": rung.rounds}
    few, many = (
        programs.in_chunks(*programs.program(kernel.epsilon, size, rung.chunk, **static), arguments, 4)
        for size in (4, 1000)
    )
    assert few[3].any() and (few[3] == many[3]).all()
    rows = few[3]
    assert (few[0] <= many[2])[rows].all() and (many[0] <= few[2])[rows].all()
    narrow = rows & (few[2] - few[0] < 1e-6 * few[2])
    assert narrow.any()
    for a, b in zip(few[:3], many[:3], strict=True):
        np.testing.assert_allclose(a[narrow], b[narrow], rtol=1e-8)


def test_a_large_batch_is_optimised_and_a_small_one_is_not(monkeypatch):
    seen = []
    monkeypatch.setattr(programs, "_batched", lambda kernel, quick, static: seen.append(quick))
    chunks = [programs.program(half, size, 128, scale=1).chunk for size in (1, programs.FEW, programs.FEW + 1)]
    assert seen == [True, True, False] and chunks[0] == chunks[1] < chunks[2] == 128


def test_the_command_frees_nothing_at_its_end(monkeypatch, capsys):
    calls = []
    monkeypatch.setattr("gc.freeze", lambda: calls.append("frozen"))
    monkeypatch.setattr("gc.set_threshold", lambda *_: None)
    monkeypatch.setattr(sys, "argv", ["jaxacct", "nonsense"])
    assert cli.command() == 2 and calls == ["frozen"]
    capsys.readouterr()
