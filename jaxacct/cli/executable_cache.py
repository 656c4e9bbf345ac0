"""Compiled programs in the cache directory, so that a later run neither traces nor compiles.

A file holds a digest and the executable as XLA serialises it.  Its name is a hash of everything the executable
depends on, so that files of other versions or machines are never looked at; what is damaged, or does not load,
counts as absent and is written anew.
"""

from __future__ import annotations

import hashlib
import os
import platform
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jaxlib
from jaxlib import xla_client

import jaxacct
from jaxacct import engines, kernels

DIGEST = hashlib.sha256
CPU_FIELDS = ("vendor_id", "model name", "flags", "CPU implementer", "CPU part", "Features")


class ExecutableCache:
    """The programs of this machine and these versions in a folder; for one device, the CPU."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._place = _place()

    def load(self, label: str) -> Callable[..., Sequence[Any]] | None:
        """The program kept under a label, as a function of flat arrays; None where there is no sound one."""
        try:
            path = self._path(label)
            if hasattr(os, "getuid") and path.stat().st_uid != os.getuid():
                return None
            content = path.read_bytes()
        except OSError:
            return None
        digest, payload = content[: DIGEST().digest_size], content[DIGEST().digest_size :]
        if DIGEST(payload).digest() != digest:
            return None
        device = jax.devices()[0]
        client: Any = device.client
        try:
            loaded = client.deserialize_executable(payload, xla_client.DeviceList((device,)), None)
        except Exception:  # whatever XLA has against it
            return None

        def run(*arrays: Any) -> Sequence[Any]:
            placed = jax.device_put(list(arrays), device)
            return [out[0] for out in loaded.execute_sharded(placed).disassemble_into_single_device_arrays()]

        return run

    def save(self, label: str, compiled: jax.stages.Compiled) -> None:
        """Keep a program; without room, or without a way to serialise it, it is not kept."""
        try:
            executable: Any = compiled.runtime_executable()
            payload = executable.client.serialize_executable(executable)
        except Exception:  # not every backend and version can
            return
        try:
            handle, name = tempfile.mkstemp(dir=self._folder)
            with os.fdopen(handle, "wb") as file:
                file.write(DIGEST(payload).digest() + payload)
            os.replace(name, self._path(label))
        except OSError:
            return

    def _path(self, label: str) -> Path:
        return self._folder / f"{DIGEST((self._place + label).encode()).hexdigest()}.program"


def _place() -> str:
    """The sources, the versions, the machine, and the environment variables that steer JAX and XLA."""
    sources = DIGEST()
    for package in (kernels, engines):
        for path in sorted(Path(package.__file__ or "").parent.rglob("*.py")):
            sources.update(path.read_bytes())
    steering = sorted(f"{k}={v}" for k, v in os.environ.items() if k.startswith(("JAX_", "XLA_")))
    versions = (jaxacct.__version__, jax.__version__, jaxlib.__version__, jax.devices()[0].client.platform_version)
    return repr((sources.hexdigest(), versions, _machine(), steering))


def _machine() -> list[str]:
    try:
        with open("/proc/cpuinfo") as file:
            first = file.read(8192).split("\n\n")[0].splitlines()
        lines = [line for line in first if line.startswith(CPU_FIELDS)]
    except OSError:
        lines = [platform.processor()]
    return [platform.machine(), platform.system(), *lines]
