"""Accounting on a host whose accelerator has no complex128: JAX's default device is played by stand-ins."""

import collections
import os
import subprocess
import sys
from typing import NamedTuple

import jax
import numpy as np
import pytest

import jaxacct as ja
from jaxacct import selection
from jaxacct.core import progress
from jaxacct.core.validation import InputError
from jaxacct.engines import backend, devices
from jaxacct.sweeps import plan as plan_of_sweep


@pytest.fixture(autouse=True)
def no_bar_stands_on_the_terminal(monkeypatch):
    """A bar that another test left open would change what is printed."""
    monkeypatch.setattr(progress, "_open", collections.deque(maxlen=1))


RUN, DELTA = ja.dp_sgd([2.0, 3.0], 0.01, 1000), 1e-5


def on_cpu(function, *arguments):
    with jax.enable_x64():
        return [np.asarray(one) for one in jax.jit(lambda *a: function(jax.numpy, *a))(*arguments)]


def in_pairs_of_float32(function, *arguments):
    """Results as TPUs hold float64: each exact result is rounded to a sum of two float32."""
    split = lambda x: x.astype(np.float32) + (x - x.astype(np.float32)).astype(np.float32).astype(np.float64)
    with np.errstate(all="ignore"):
        found = function(np, *arguments)
        return [split(x) if x.dtype == np.float64 else x for x in found]


def in_48_bits(function, *arguments):
    """Results off by 2^-47, as a sum of two float32 may be, but with the range of float64."""
    return [x * (1.0 + 2.0**-47) for x in function(np, *arguments)]


def without_complex(function, *arguments):
    if any(np.iscomplexobj(x) for x in arguments):
        raise NotImplementedError("X64 rewriting:\n complex128")
    return function(np, *arguments)


@pytest.mark.parametrize(
    ("run", "words"),
    [
        (on_cpu, None),
        (lambda function, *a: function(np, *a), None),
        (in_pairs_of_float32, "no true float64"),
        (in_48_bits, "no true float64"),
        (lambda function, *a: [x.astype(np.float32) for x in function(np, *a)], "no true float64"),
        (without_complex, "no complex128 (NotImplementedError: X64 rewriting: complex128)"),
        (lambda function, *a: [x * np.nan for x in function(np, *a)], "no true float64"),
    ],
)
@pytest.mark.filterwarnings("ignore:overflow")
def test_what_a_device_lacks_is_found(run, words):
    found = devices.lacking(run)
    assert found is None if words is None else found.startswith(words)


class Stand(NamedTuple):
    platform: str


@pytest.fixture
def tpu(monkeypatch):
    """JAX's default device cannot do complex128; its host's CPU is there."""
    stand_in = Stand("tpu")
    devices._instead.cache_clear()
    monkeypatch.setattr(devices, "_default", lambda: stand_in)
    monkeypatch.setattr(devices, "fault", lambda device: "no complex128" if device is stand_in else None)
    yield monkeypatch
    devices._instead.cache_clear()


@pytest.fixture
def tpu_alone(tpu):
    """JAX's default device cannot do complex128, and JAX was told to leave out the host's CPU."""
    real = jax.local_devices

    def no_cpu(*arguments, backend=None, **more):
        if backend == "cpu":
            raise RuntimeError("Unknown backend cpu")
        return real(*arguments, backend=backend, **more)

    tpu.setattr(jax, "local_devices", no_cpu)


def test_where_the_default_device_certifies_nothing_is_said(capsys):
    assert devices.local() == jax.local_devices() and devices.certifying() == jax.local_devices()[0]
    with devices.double_precision():
        assert jax.numpy.ones(1).dtype == np.float64 and jax.config.jax_default_device is None
    assert capsys.readouterr().err == ""


def test_the_host_answers_and_says_so_once(tpu, capsys):
    before = jax.config.values["jax_default_device"]
    assert devices.certifying().platform == "cpu" and devices.local() == jax.local_devices(backend="cpu")
    assert backend.suiting(1) == "numpy" and backend.suiting(10**6) == "xla"
    answer = ja.epsilon(RUN, DELTA)
    with devices.double_precision():
        assert jax.config.jax_default_device == jax.local_devices(backend="cpu")[0]
    assert capsys.readouterr().err == "jaxacct: accounting runs on the host's CPU, since tpu has no complex128\n"
    assert jax.config.values["jax_default_device"] == before and jax.config.jax_default_device is None
    tpu.undo()
    assert answer.upper.tolist() == ja.epsilon(RUN, DELTA).upper.tolist()


def test_what_names_the_devices_names_the_host(tpu):
    grid = {"noise_multiplier": [2.0], "sampling_probability": 1, "steps": [1], "delta": 1e-5}
    assert plan_of_sweep(grid).devices == f"{len(jax.local_devices())} cpu"


def test_the_line_can_be_turned_off(tpu, capsys):
    tpu.setenv("JAXACCT_QUIET", "1")
    assert devices.certifying().platform == "cpu" and capsys.readouterr().err == ""


def test_without_the_hosts_cpu_numpy_answers_whatever_the_size(tpu_alone, capsys):
    wanted = "jaxacct: accounting runs on NumPy alone (JAX_PLATFORMS leaves out the host's CPU), since tpu has "
    assert devices.certifying() is None and backend.suiting(10**9) == "numpy"
    assert capsys.readouterr().err == f"{wanted}no complex128\n"
    assert ja.epsilon(RUN, DELTA).status.tolist() == ["ok", "ok"]
    assert ja.epsilon(ja.repeat(ja.Laplace(2.0), 30), DELTA).engine == "lattice"  # uses `double_precision`


def test_without_the_hosts_cpu_xla_is_refused(tpu_alone):
    with pytest.raises(InputError, match="JAX_PLATFORMS=tpu,cpu") as refusal:
        ja.epsilon(RUN, DELTA, backend="xla")
    assert "\n" not in str(refusal.value)


def test_without_the_hosts_cpu_a_law_in_jax_is_not_evaluated_on_the_device(tpu_alone):
    """JAX would evaluate the law on its default device, which is unfit; an error is raised instead."""

    class InJax(selection.PointMass):
        def generating(self, y):
            return tuple(jax.numpy.exp(x) for x in (y, y, y))

    with pytest.raises(jax.errors.JaxRuntimeError, match="host-to-device"):
        selection.law_of_k.evaluated(InJax(3), np.ones(2))


TWO_BACKENDS = """
import jax, numpy as np
from jax._src import xla_bridge
xla_bridge.register_backend_factory("stand-in", xla_bridge.make_cpu_client, priority=500, fail_quietly=False)
import jaxacct as ja
from jaxacct.engines import devices
default, host = jax.local_devices()[0], jax.local_devices(backend="cpu")[0]
assert default.client is not host.client
devices.fault = lambda device: "no complex128" if device.client is default.client else None
"""
"""A process with two backends, the default one of which is declared unfit.  Both are XLA's for CPUs."""


def run(program, **more):
    """What a program prints, in a process of its own."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)} | more
    ended = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.split(), ended.stderr


def test_programs_are_put_on_the_host_and_training_is_not():
    """Accounting by XLA uses the host and leaves no program on the default device, which any other program uses.

    The host has four devices, to which the chunks of a batch go in turn.
    """
    found, told = run(
        TWO_BACKENDS
        + """
from jaxacct.engines import backend
hosts = set(jax.local_devices(backend="cpu"))
def kernel(x, *, points):
    return (1j * x).real, jax.numpy.sqrt(x)
with backend.job(1, "xla"):
    double = backend.evaluate(kernel, (np.arange(5.0) + 2.0**-40,), 5, 2, points=1)[1]
with devices.double_precision():
    other = backend._by_xla(lambda x: x + 1.0, np.ones(1))
print(double.dtype, double.size, other.dtype, other.devices().pop().client is host.client)
used, program = set(), backend.program(lambda x: (jax.numpy.exp(x) / 3, x))
def spy(x):
    used.add(x.device)
    return program(x)
line = np.linspace(0, 1, 33)
out, same = backend.in_chunks(spy, 4, (line,), 33)
with devices.double_precision():
    alone = program(line[:4])[0]
print(len(hosts), used == hosts, (same == line).all(), (out[:4] == alone).all())
print(len(default.client.live_executables()))
print(jax.jit(lambda x: x + 1.0)(np.ones(1)).devices().pop().client is default.client)
""",
        XLA_FLAGS="--xla_force_host_platform_device_count=4",
        JAX_PLATFORMS="",
    )
    assert found == ["float64", "5", "float64", "True", "4", "True", "True", "True", "0", "True"]
    assert told.count("accounting runs on the host's CPU") == 1


@pytest.mark.slow
def test_every_engine_that_compiles_is_put_on_the_host():
    found, _ = run(
        TWO_BACKENDS
        + """
from jaxacct import selection
from jaxacct.core import progress
run = ja.dp_sgd([2.0, 3.0], 0.01, 1000)
for asked in (run, ja.repeat(ja.Laplace(2.0), 30), selection.select(ja.Gaussian(3.0), selection.Geometric(0.1))):
    by_xla, by_numpy = (ja.epsilon(asked, 1e-5, backend=name) for name in ("xla", "numpy"))
    print(bool(np.all(np.abs(by_xla.upper - by_numpy.upper) <= 1e-4 * by_numpy.upper)))
selection.attack(ja.Gaussian(3.73), selection.Geometric(0.1), delta=1e-5)
print(len(default.client.live_executables()))
"""
    )
    assert found == ["True", "True", "True", "0"]


@pytest.mark.slow
@pytest.mark.parametrize("platforms", ["", "cpu"])
def test_where_jax_finds_a_cpu_alone_nothing_changes(platforms):
    found, told = run(
        "import jax, jaxacct as ja\nprint(jax.default_backend(), ja.epsilon(ja.Gaussian(2.0), 1e-5).upper)",
        JAX_PLATFORMS=platforms,
    )
    assert found == ["cpu", str(ja.epsilon(ja.Gaussian(2.0), 1e-5).upper)] and "accounting runs" not in told


def test_settings_of_the_user_for_products_and_types_do_not_apply():
    """Products of bfloat16 made a bracket 3e-4 too low, "certified", in the block and after it."""
    left, right = np.random.default_rng(0).normal(size=(2, 64, 64))
    settings = {
        "jax_default_matmul_precision": "BF16_BF16_F32",
        "jax_numpy_dtype_promotion": "strict",
        "jax_numpy_rank_promotion": "raise",
        "jax_disable_jit": True,
        "jax_debug_nans": True,
        "jax_debug_infs": True,
        "jax_transfer_guard": "disallow",
    }
    before = {name: getattr(jax.config, name) for name in settings}
    try:
        for name, value in settings.items():
            jax.config.update(name, value)
        with devices.double_precision():
            assert np.isinf(jax.jit(lambda x: 1.0 / x)(np.zeros(1))).all()  # kernels may make infinities and NaN
            product = np.asarray(jax.jit(lambda a, b: a @ b + np.arange(64, dtype=np.int32))(left, right))
        assert {name: getattr(jax.config, name) for name in settings} == settings
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
    np.testing.assert_allclose(product, left @ right + np.arange(64), rtol=1e-12, atol=1e-12)
