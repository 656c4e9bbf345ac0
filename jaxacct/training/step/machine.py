"""What besides the program decides the bits of a step: versions, devices, instruction sets, flags, settings."""

from __future__ import annotations

import functools
import json
import os
import platform
import re
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import jax

__all__ = ["machine", "repeats"]

_LIBRARIES = ("jax", "libtpu", "nvidia-", "rocm")
"""Beginnings of the names of packages whose code runs in a step."""
_VARIABLES = re.compile(
    r"(XLA|LIBTPU|TPU|CUDA|CUDNN|CUBLAS|NVIDIA|NCCL|HIP|ROC|HSA|TF|PJRT|OMP|KMP|MKL|ONEDNN|DNNL|OPENBLAS|EIGEN|NPROC|LD_)"
)
"""Environment variables that compilers and numerical libraries read."""
_VARYING = {"processor", "cpu mhz", "bogomips", "apicid", "initial apicid", "core id", "physical id", "bugs"}
"""Lines of /proc/cpuinfo that differ between two looks, or between the cores of one machine."""
_HARMLESS = re.compile(
    r"jax_(numpy_(rank|dtype)_promotion$|.*compilation_cache|persistent_cache|raise_persistent|explain_cache|log|.*dump|"
    r"traceback|.*traceback|tracer_error|pprint|debug_(key_reuse|log|leaked)|check_(tracer|proxy)|enable_checks$|"
    r"thread_guard$|captured_constants|hlo_source_file|compiler_detailed|.*timeout|platforms$|platform_name$)"
)
"""Settings of JAX that change what is printed, cached or refused; those of promotion show in the traced program."""
_OUTSIDE = {"pure_callback", "io_callback", "ffi_call", "infeed", "rng_uniform"}
"""Operations whose outcome is not decided by their arguments, or not known to be."""
_COLLECTIVES = {"psum", "psum_invariant", "reduce_scatter", "psum_scatter"}
"""Operations that add what several devices have."""
_DETERMINISTIC = re.compile(r"--xla_gpu_(?:deterministic_ops|exclude_nondeterministic_ops)(?:=(\S+))?")


def machine() -> str:
    """What this machine is, as one text; equal texts mean that a program's bits come out equal.

    Whatever is not known to be harmless is in it.  If a difference makes none, a replay counts again, no more.
    """
    settings = {name: repr(value) for name, value in jax.config.values.items() if not _HARMLESS.match(name)}
    flags = {name: value for name, value in os.environ.items() if _VARIABLES.match(name)}
    devices = jax.devices()
    told = {
        "libraries": _libraries(),
        "devices": [f"{device.platform} {device.device_kind}" for device in devices],
        "backend": devices[0].client.platform_version,
        "processor": _processor(),
        "threads": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "flags": flags,
        "settings": settings,
    }
    return json.dumps(told, sort_keys=True)


def repeats(primitives: set[str]) -> bool:
    """Whether a program of these operations comes out the same, to the last bit, whenever it runs on this machine.

    XLA's programs for CPUs and TPUs do.  Those for GPUs add in the order in which their threads arrive, unless
    XLA_FLAGS has --xla_gpu_deterministic_ops=true; and what several GPUs have is added in an order that their library
    chooses.  A call of the host's code may do anything.
    """
    if primitives & _OUTSIDE:
        return False
    if jax.devices()[0].platform in ("cpu", "tpu"):
        return True
    if primitives & _COLLECTIVES:
        return False
    asked = _DETERMINISTIC.findall(os.environ.get("XLA_FLAGS", ""))
    return bool(asked) and asked[-1].lower() in ("", "true", "1")


@functools.cache
def _libraries() -> dict[str, str]:
    """Versions of the packages whose code runs in a step, and of the C library."""
    known: dict[str, str] = {}
    for each in distributions():
        name = (each.metadata["Name"] or "").lower()
        if name.startswith(_LIBRARIES):
            known[name] = each.version
    import jaxlib

    return known | {"jax": jax.__version__, "jaxlib": jaxlib.__version__, "libc": " ".join(platform.libc_ver())}


@functools.cache
def _processor() -> list[Any]:
    """Kind, instruction sets and caches of the processors; libraries choose their code, and its order, by them."""
    cores = set()
    try:
        for block in Path("/proc/cpuinfo").read_text().strip().split("\n\n"):
            rows = [line.partition(":")[::2] for line in block.splitlines()]
            cores.add("\n".join(f"{k.strip()}:{v.strip()}" for k, v in rows if k.strip().lower() not in _VARYING))
        caches = sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"))
        sizes = [path.read_text().strip() for path in caches]
    except OSError:
        sizes = []
    return [platform.system(), platform.machine(), platform.processor(), sorted(cores), sizes]
