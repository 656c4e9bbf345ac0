"""Compiled programs as files: XLA's own serialised form, which holds no pickled object.

A file's name is a hash of all that its program depends on: the kernel, shapes and compile options (the caller's label),
the sources of jaxacct, versions, the processor, the device, settings and environment variables.  So programs of other
versions or machines are never looked at.  A program that is damaged or does not load counts as absent.
"""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jaxlib

import jaxacct
from jaxacct.engines import cache_folder

Run = Callable[..., Sequence[Any]]

ROOMS = ("kernels", "engines", "mechanisms", "selection")
"""Rooms whose code gets into compiled programs."""
FOUNDATIONS = ("core/floats.py",)
"""Modules of other rooms whose constants do."""
STEERING = re.compile(r"(JAX|XLA|TF|PJRT|LIBTPU|TPU|CUDA|CUDNN|NVIDIA|HIP|ROC|OMP|EIGEN|NPROC|LLVM)_")
"""Environment variables that decide what compilers make.  One too many costs a compilation, one missing soundness."""
HARMLESS = re.compile(
    r"cache|(^|_)log|traceback|timeout|dump|pprint|(^|_)platform|thread_guard|array_garbage|transfer_guard"
)
"""Settings of JAX that change what is printed, kept or refused, and not what is computed."""
CPU_FIELDS = ("vendor_id", "model name", "flags", "CPU implementer", "CPU part", "Features")
"""Lines of /proc/cpuinfo that decide which instructions a program may use."""
CPUINFO_CHARACTERS = 16384
"""How much of /proc/cpuinfo is read: more than the entry of one processor."""


def load(folder: Path, label: str, device: Any) -> Run | None:
    """The program kept under a label, as a function of flat arrays on one device; None where there is no sound one."""
    payload = cache_folder.read(path_of(folder, label, device))
    if payload is None:
        return None
    try:
        from jaxlib import xla_client

        loaded = device.client.deserialize_executable(payload, xla_client.DeviceList((device,)), None)
    except Exception:  # XLA raises many kinds of error for a program that it cannot load, and a jaxlib may lack this
        return None

    def run(*arrays: Any) -> Sequence[Any]:
        placed = jax.device_put(list(arrays), device)
        return [out[0] for out in loaded.execute_sharded(placed).disassemble_into_single_device_arrays()]

    return run


def save(folder: Path, label: str, device: Any, compiled: jax.stages.Compiled) -> bool:
    """Whether a program was kept; without room, or without a way to serialise it, it is not."""
    try:
        executable: Any = compiled.runtime_executable()
        payload = executable.client.serialize_executable(executable)
    except Exception:  # not every backend and version can
        return False
    return cache_folder.write(path_of(folder, label, device), payload)


def note_warm(folder: Path, device: Any) -> None:
    """Remember that the programs of sweeps are kept."""
    cache_folder.write(path_of(folder, "jaxacct warm", device).with_suffix(cache_folder.WARM_ENDING), b"")


def is_warm(folder: Path, device: Any) -> bool:
    """Whether `jaxacct warm` has kept the programs of sweeps, of these versions and for this machine."""
    path = path_of(folder, "jaxacct warm", device).with_suffix(cache_folder.WARM_ENDING)
    return cache_folder.read(path) is not None


def path_of(folder: Path, label: str, device: Any) -> Path:
    """The file of a program."""
    settings = sorted((name, repr(value)) for name, value in jax.config.values.items() if not HARMLESS.search(name))
    variables = [(name, value) for name, value in os.environ.items() if STEERING.match(name)]
    steering = sorted((name, value) for name, value in variables if not HARMLESS.search(name.lower()))
    where = (device.platform, device.device_kind, device.id, device.client.platform_version)
    whole = repr((label, _sources(), _versions(), _machine(), where, settings, steering))
    return folder / f"{hashlib.sha256(whole.encode()).hexdigest()}{cache_folder.ENDING}"


@functools.cache
def _sources() -> str:
    root, digest = Path(jaxacct.__file__).parent, hashlib.sha256()
    files = [root / name for name in FOUNDATIONS]
    files += [path for room in ROOMS for path in sorted((root / room).rglob("*.py"))]
    for path in files:
        digest.update(f"{path.relative_to(root)}\n".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _versions() -> tuple[str, ...]:
    return jaxacct.__version__, jax.__version__, jaxlib.__version__


@functools.cache
def _machine() -> tuple[str, ...]:
    """The processor, and how many of them a program may divide its work among."""
    try:
        with open("/proc/cpuinfo") as file:
            first = file.read(CPUINFO_CHARACTERS).split("\n\n")[0].splitlines()
        lines = [line for line in first if line.startswith(CPU_FIELDS)]
    except OSError:
        lines = []
    if not lines:  # the instruction sets are not known: programs stay on this host
        lines = [platform.processor(), platform.node()]
    threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return (platform.machine(), platform.system(), str(threads), *lines)
