"""What a fingerprint covers besides the program: versions, processors, flags, settings, and what may not repeat."""

import json
import os
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxacct.training.step import key_derivation


def digest(function=lambda x: jnp.sum(x * x)):
    return key_derivation.digest_program(jax.jit(function).trace(np.ones(3, np.float32)))


def test_the_same_twice():
    assert digest() == digest() and key_derivation.machine() == key_derivation.machine()


@pytest.mark.parametrize("name", ["XLA_FLAGS", "ONEDNN_MAX_CPU_ISA", "OMP_NUM_THREADS", "NVIDIA_TF32_OVERRIDE"])
def test_flags_are_part_of_it(monkeypatch, name):
    before = digest()
    monkeypatch.setenv(name, os.environ.get(name, "") + " 1")
    assert digest() != before


@pytest.mark.parametrize(
    ("name", "value"), [("jax_default_matmul_precision", "float32"), ("jax_threefry_partitionable", False)]
)
def test_settings_are_part_of_it(name, value):
    before, old = digest(), jax.config.values[name]
    try:
        jax.config.update(name, value)
        assert digest() != before
    finally:
        jax.config.update(name, old)
    assert digest() == before


def test_libraries_and_processors_are_part_of_it(monkeypatch):
    before, told = digest(), json.loads(key_derivation.machine())
    assert (told["libraries"]["jaxlib"] and "flags:" in str(told["processor"])) or sys.platform != "linux"
    for name, other in (("_libraries", {**told["libraries"], "jaxlib": "0"}), ("_processor", ["another"])):
        with monkeypatch.context() as changed:
            changed.setattr(key_derivation, name, lambda other=other: other)
            assert digest() != before


def test_a_program_that_may_come_out_otherwise_never_repeats_a_key(monkeypatch):
    """A program repeats no key if it calls the host or if its device may add in any order."""

    def outside(x):
        return jnp.sum(jax.pure_callback(np.asarray, jax.ShapeDtypeStruct((3,), np.float32), x))

    looped = lambda x: jax.lax.fori_loop(0, 2, lambda i, y: y + outside(x), 0.0)
    assert digest(looped) != digest(looped)

    class Device:
        platform, device_kind, client = "gpu", "some", type("Client", (), {"platform_version": "1"})

    monkeypatch.setattr(jax, "devices", lambda: [Device])
    assert not key_derivation.repeats(set())
    for flags, same in (("--xla_gpu_deterministic_ops=true", True), ("--xla_gpu_deterministic_ops", True)):
        monkeypatch.setenv("XLA_FLAGS", flags)
        assert key_derivation.repeats(set()) == same and not key_derivation.repeats({"io_callback"})
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_deterministic_ops=true --xla_gpu_deterministic_ops=false")
    assert not key_derivation.repeats(set())
