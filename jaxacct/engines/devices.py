"""Where accounting runs: JAX's default device, or the host's CPU if the default device lacks float64 or complex128.

A TPU has no complex128, and makes a float64 from two float32. No certificate computed there would hold.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from jaxacct.core import progress
from jaxacct.core.validation import InputError

WORDS = 120
"""Number of characters that are shown of a device's error message."""


@contextlib.contextmanager
def double_precision() -> Iterator[None]:
    """Run the block with float64 on the device of `certifying`. If that device is None, JAX's functions fail.

    The certificates allow for float64's rounding. User settings that change products or end programs do not apply.
    """
    device = certifying()
    with contextlib.ExitStack() as settings:
        settings.enter_context(jax.enable_x64())
        settings.enter_context(jax.default_matmul_precision("highest"))
        settings.enter_context(jax.numpy_dtype_promotion("standard"))
        settings.enter_context(jax.numpy_rank_promotion("allow"))
        settings.enter_context(jax.disable_jit(False))
        settings.enter_context(jax.debug_nans(False))
        settings.enter_context(jax.debug_infs(False))
        if device is None:
            settings.enter_context(jax.transfer_guard("disallow_explicit"))
        else:
            settings.enter_context(jax.transfer_guard("allow"))
        if device is not None and device != _default():
            settings.enter_context(jax.default_device(device))
        yield


def local() -> list[jax.Device]:
    """Return the devices of this process that can compute certificates. Raise InputError if there are none."""
    default, device = _default(), certifying()
    if device is None:
        raise InputError(
            f"XLA cannot certify on {default.platform}, which has {fault(default)}; give JAX the host's CPU as well, "
            f"JAX_PLATFORMS={default.platform},cpu, or use backend='numpy'"
        )
    mine = jax.local_devices()
    return mine if device in mine else jax.local_devices(backend=device.platform)


def cores() -> int:
    """Return how many of the processor's cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def quiet() -> bool:
    """Return whether $JAXACCT_QUIET asks for no lines on standard error."""
    return os.environ.get("JAXACCT_QUIET", "0") not in ("", "0")


def _default() -> jax.Device:
    """Return JAX's default device in this thread."""
    config: Any = jax.config
    named = config.jax_default_device  # the setting of this thread
    if named is None:
        return jax.local_devices()[0]
    return jax.local_devices(backend=named)[0] if isinstance(named, str) else named


def certifying() -> jax.Device | None:
    """Return the device to certify on: JAX's default one or, with one warning, the host's CPU; None if neither can."""
    default = _default()
    return default if fault(default) is None else _instead(default)


@functools.cache
def _instead(default: jax.Device) -> jax.Device | None:
    """Return the host's CPU, or None if JAX has no CPU. Warn the user that `default` cannot compute certificates."""
    try:
        host = jax.local_devices(backend="cpu")[0]
    except RuntimeError:  # JAX_PLATFORMS leaves the CPU out
        host = None
    if not quiet():
        where = "the host's CPU" if host is not None else "NumPy alone (JAX_PLATFORMS leaves out the host's CPU)"
        progress.say(f"jaxacct: accounting runs on {where}, since {default.platform} has {fault(default)}")
    return host


@functools.cache
def fault(device: jax.Device) -> str | None:
    """Return what a device lacks for certificates, to complete "it has ..."; None if it lacks nothing, as CPUs do."""
    if device.platform == "cpu":
        return None

    def run(function: Callable[..., Any], *arguments: Any) -> list[Any]:
        with jax.enable_x64(), jax.default_device(device):
            return [np.asarray(one) for one in jax.jit(functools.partial(function, jax.numpy))(*arguments)]

    return lacking(run)  # tries no elementary functions, which kernels/README.md assumes to be accurate


def lacking(run: Callable[..., list[Any]]) -> str | None:
    """Return, in words, the type that a device lacks, or None. `run(function, *arguments)` evaluates on the device."""
    rng = np.random.default_rng(0)
    x, y = np.exp(rng.uniform(-400.0, 400.0, (2, 32)))  # values that need more than float32's range and precision
    a, b = rng.normal(size=(2, 32, 2)) @ [1.0, 1.0j]
    for name, function, arguments in (("float64", _real, (x, y)), ("complex128", _complex, (a, b))):
        wanted = function(np, *arguments)
        try:
            found = run(function, *arguments)
        except Exception as error:  # runtimes raise many kinds of errors if a device lacks an operation
            words = " ".join(str(error).split())
            return f"no {name} ({type(error).__name__}: {words[:WORDS]})"
        for one, other in zip(found, wanted, strict=True):
            # results in float64 differ by at most 4 units of 2^-52, and those of pairs of float32 by more
            close = np.abs(one - other) <= 4.0 * 2.0**-52 * np.abs(other)
            if one.dtype != other.dtype or not np.all(close):
                return f"no true {name} (it is less accurate, or of a smaller range)"
    return None


def _real(numpy: Any, x: Any, y: Any) -> list[Any]:
    """Return a few results on which all devices with true float64 agree, since IEEE 754 rounds them correctly."""
    return [x * 1.0, x + y, numpy.sqrt(x) * numpy.sqrt(y), x / numpy.sqrt(y)]


def _complex(numpy: Any, a: Any, b: Any) -> list[Any]:
    """Return a few complex results whose errors in true complex128 are small relative to the results' moduli."""
    return [a * b, a / b, numpy.abs(a) * b]
