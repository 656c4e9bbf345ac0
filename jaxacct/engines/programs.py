"""Compiles programs with XLA, keeps them on the disk, and loads them from there (README.md, "Compiled programs")."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import platform
import re
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jaxlib
from jax.experimental.serialize_executable import deserialize_and_load, serialize

import jaxacct
from jaxacct.core import progress
from jaxacct.engines import devices

Run = Callable[..., Sequence[Any]]
"""A program: a function from the leaves of its arguments (arrays on one device) to the leaves of the answer."""

VARIABLE = "JAXACCT_CACHE_DIR"
"""Environment variable that names the folder of kept programs. If it is set and empty, no programs are kept."""
LIMIT_BYTES = 512 * 2**20
"""Largest size of all kept programs together, in bytes. One program takes 1 to 6 MiB."""
ENDING, WARM_ENDING = ".program", ".warm"
"""Endings of file names. ENDING: a kept program. WARM_ENDING: the empty file that `jaxacct warm` writes at its end."""
TEMPORARY = ".unfinished-"
"""Beginning of the name of a file that is being written."""


class Unusable(Exception):
    """Raised if the folder of kept programs cannot be used. The message says why, in one line."""


class Missing(Unusable):
    """Raised if the folder of kept programs does not exist yet."""


def directory() -> Path | None:
    """Return the folder of kept programs; None if $JAXACCT_CACHE_DIR is set and empty."""
    chosen = os.environ.get(VARIABLE)
    if chosen is not None:
        return Path(chosen) if chosen else None
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "jaxacct"
    except RuntimeError as error:
        raise Unusable(f"no cache folder: {error}") from None


def safe_folder(create: bool) -> Path:
    """Return the folder of kept programs. Raise Unusable if it is not safe. If `create`, first make it (mode 0700)."""
    path = directory()
    if path is None:
        raise Unusable(f"{VARIABLE} is empty")
    try:
        if create:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.mkdir(mode=0o700, exist_ok=True)
        status = path.stat()
    except FileNotFoundError:
        raise Missing(f"{path} is not there yet; the first program that is compiled makes it") from None
    except OSError as error:
        raise Unusable(f"{path}: {error.strerror or error}") from None
    if not stat.S_ISDIR(status.st_mode):
        raise Unusable(f"{path} is not a folder")
    if not _ours(status):
        raise Unusable(f"{path} belongs to another user; name a folder of your own in {VARIABLE}")
    if _others_write(status):
        raise Unusable(f"{path} can be written by others; chmod 700 makes it safe")
    return path


def read(path: Path) -> bytes | None:
    """Return the payload of a file and mark it as used; None if the file is missing, damaged or not safe."""
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            if not _ours(status) or _others_write(status) or not stat.S_ISREG(status.st_mode):
                return None
            digest, payload = file.read(hashlib.sha256().digest_size), file.read()
    except OSError:
        return None
    if _digest(path.name, payload) != digest:
        return None
    with contextlib.suppress(OSError):  # marking fails in a read-only folder
        os.utime(path)
    return payload


def write(path: Path, payload: bytes) -> bool:
    """Write a temporary file and rename it to `path`, so that nobody reads half a file. Return whether this worked."""
    temporary = None
    try:
        handle, temporary = tempfile.mkstemp(prefix=TEMPORARY, dir=path.parent)  # makes the file with mode 0600
        with os.fdopen(handle, "wb") as file:
            file.write(_digest(path.name, payload))
            file.write(payload)
        os.replace(temporary, path)
    except OSError:  # a full disk, or a read-only folder
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
        return False
    trim(path.parent)
    return True


def kept(folder: Path) -> list[tuple[Path, os.stat_result]]:
    """Return the programs in the folder. The program unused for longest comes first."""
    found = []
    with contextlib.suppress(OSError):
        for path in folder.glob(f"*{ENDING}"):
            with contextlib.suppress(OSError):  # another process may have removed it
                found.append((path, path.stat()))
    return sorted(found, key=lambda each: (each[1].st_mtime, each[0].name))


def trim(folder: Path, limit: int | None = None) -> None:
    """Remove the programs unused for longest until the rest fit into `limit` bytes. Remove old unfinished files too."""
    files = kept(folder)
    excess = sum(status.st_size for _, status in files) - (LIMIT_BYTES if limit is None else limit)
    for path, status in files:
        if excess <= 0:
            break
        excess -= status.st_size * _removed(path)
    # writing takes a second, so the process that wrote an hour-old unfinished file has surely ended
    _sweep_up(folder, 3600.0)


def _sweep_up(folder: Path, age: float) -> None:
    with contextlib.suppress(OSError):
        for path in folder.glob(f"{TEMPORARY}*"):
            with contextlib.suppress(OSError):
                if time.time() - path.stat().st_mtime >= age:
                    path.unlink()


def _removed(path: Path) -> bool:
    try:
        path.unlink()
    except OSError:
        return False
    return True


def _ours(status: os.stat_result) -> bool:
    return not hasattr(os, "getuid") or status.st_uid == os.getuid()


def _others_write(status: os.stat_result) -> bool:
    return bool(status.st_mode & (stat.S_IWGRP | stat.S_IWOTH))


def _digest(name: str, payload: bytes) -> bytes:
    """Return the digest of a kept program. It covers the file's name, so that a renamed file is refused."""
    return hashlib.sha256(name.encode() + b"\n" + payload).digest()


ROOMS = ("kernels", "engines", "mechanisms", "selection")
"""Packages of `jaxacct` whose code gets into compiled programs."""
FOUNDATIONS = ("core/floats.py",)
"""Modules outside of `ROOMS` whose constants get into compiled programs."""
STEERING = re.compile(r"(JAX|XLA|TF|PJRT|LIBTPU|TPU|CUDA|CUDNN|NVIDIA|HIP|ROC|OMP|EIGEN|NPROC|LLVM)_")
"""Environment variables that may change compiled programs. A missing name would let a wrong program be loaded."""
HARMLESS = re.compile(
    r"cache|(^|_)log|traceback|timeout|dump|pprint|(^|_)platform|thread_guard|array_garbage|transfer_guard"
)
"""Names of JAX settings and environment variables that change printing, caching, errors or the device, not programs."""
CPU_FIELDS = ("vendor_id", "model name", "flags", "CPU implementer", "CPU part", "Features")
"""Beginnings of the lines of /proc/cpuinfo that decide which instructions a program may use."""


def path_of(folder: Path, label: str, device: Any) -> Path:
    """Return the path of the program's file. The label names the kernel, the shapes and the compile options."""
    settings = sorted((name, repr(value)) for name, value in jax.config.values.items() if not HARMLESS.search(name))
    variables = [(name, value) for name, value in os.environ.items() if STEERING.match(name)]
    steering = sorted((name, value) for name, value in variables if not HARMLESS.search(name.lower()))
    where = (device.platform, device.device_kind, device.id, device.client.platform_version)
    versions = (jaxacct.__version__, jax.__version__, jaxlib.__version__)
    whole = repr((label, _sources(), versions, _machine(), where, settings, steering))
    return folder / f"{hashlib.sha256(whole.encode()).hexdigest()}{ENDING}"


@functools.cache
def _sources() -> str:
    root, digest = Path(jaxacct.__file__).parent, hashlib.sha256()
    files = [root / name for name in FOUNDATIONS]
    files += [path for room in ROOMS for path in sorted((root / room).rglob("*.py"))]
    for path in files:
        digest.update(f"{path.relative_to(root)}\n".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


@functools.cache
def _machine() -> tuple[str, ...]:
    """Return strings that describe the machine: its architecture, system, number of usable threads, and processor."""
    try:
        with open("/proc/cpuinfo") as file:
            # read enough for the first processor's entry, which is shorter than 16,384 characters
            first = file.read(16384).split("\n\n")[0].splitlines()
        lines = [line for line in first if line.startswith(CPU_FIELDS)]
    except OSError:
        lines = []
    if not lines:  # the instruction sets are unknown, so the host's name limits programs to this host
        lines = [platform.processor(), platform.node()]
    return (platform.machine(), platform.system(), str(devices.cores()), *lines)


def load(folder: Path, label: str, device: Any) -> Run | None:
    """Return the program kept under a label; None if no program is kept, or it is damaged, or it does not load."""
    payload = read(path_of(folder, label, device))
    if payload is None:
        return None
    try:
        from jaxlib import xla_client

        loaded = device.client.deserialize_executable(payload, xla_client.DeviceList((device,)), None)
    except Exception:  # XLA raises many kinds of error if it cannot load a program, and a jaxlib may lack this function
        return None

    def run(*arrays: Any) -> Sequence[Any]:
        placed = jax.device_put(list(arrays), device)
        return [out[0] for out in loaded.execute_sharded(placed).disassemble_into_single_device_arrays()]

    return run


def prepare(
    function: Callable[..., Any], options: dict[str, Any] | None, label: str, leaves: list[Any], tree: Any, device: Any
) -> Run:
    """Load or compile `function` for arguments with the shapes of `leaves`. `path_of` says what `label` names."""
    if device is None:
        device = jax.device_put(0.0).device  # the default device
    folder = _folder(create=True) if isinstance(device, jax.Device) and _own(tree) else None
    if folder is not None:
        with loading.running():
            program = load(folder, label, device)
            works = program is not None and _works(program, leaves)
        if program is not None and works:
            loading.add()
            return program

    def flat(*leaves: Any) -> list[Any]:
        return jax.tree.leaves(function(*jax.tree.unflatten(tree, leaves)))

    with announced():
        compiled = _compile(jax.jit(flat, keep_unused=True).lower(*leaves), options)
    # glibc keeps the memory that compiling has freed, some 100 MiB for each optimised program. malloc_trim returns it.
    give_back = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if give_back is not None:
        give_back(0)
    if folder is not None:
        with saving.running():
            if _keep(folder, label, device, compiled, leaves):
                saving.add()
    return compiled


STEP_SECONDS = 1.0
"""The program of a training step is kept on disk if compiling it took at least this many seconds."""


def kept_step(
    lowered: jax.stages.Lowered,
    label: str,
    run_on: list[Any],  # the program's devices, in the order of their mesh
    trial: Callable[[jax.stages.Compiled], Any],  # runs a loaded copy of a new program before the program is kept
) -> Any:
    """Return the compiled form of a lowered training step: the program kept under a label, or a new one."""
    folder = _folder(create=True) if jax.config.values["jax_compilation_cache_dir"] is None else None
    path = None if folder is None else path_of(folder, f"step {label}", devices.local()[0])
    open_ = functools.partial(
        deserialize_and_load, in_tree=lowered.in_tree, out_tree=lowered.out_tree, execution_devices=run_on
    )
    payload = None if path is None else read(path)
    if payload is not None:
        with contextlib.suppress(Exception), loading.running():  # a program that does not load is compiled anew
            found = open_(payload)
            loading.add()
            return found
    begin = time.monotonic()
    compiled = lowered.compile()
    if path is not None and time.monotonic() - begin >= STEP_SECONDS:
        with contextlib.suppress(Exception), saving.running():  # serialize fails for some programs and versions of JAX
            payload = serialize(compiled)[0]
            jax.block_until_ready(trial(open_(payload)))
            if write(path, payload):
                saving.add()
    return compiled


def _keep(folder: Path, label: str, device: Any, compiled: jax.stages.Compiled, leaves: list[Any]) -> bool:
    """Write a program to the disk; if JAX's own cache is on, remove it unless it runs. Return whether it is kept."""
    try:
        executable: Any = compiled.runtime_executable()
        payload = executable.client.serialize_executable(executable)
    except Exception:  # some backends and versions cannot serialise
        return False
    path = path_of(folder, label, device)
    if not write(path, payload):
        return False
    if jax.config.values["jax_compilation_cache_dir"] is None:
        return True
    program = load(folder, label, device)
    works = program is not None and _works(program, leaves)
    if not works:
        _removed(path)
    return works


def _folder(create: bool) -> Path | None:
    """Return the folder of kept programs; None if it is unsafe, keeping is turned off, or JAX has several processes."""
    if jax.process_count() > 1:  # several processes would write to the same folder
        return None
    try:
        return safe_folder(create)
    except Unusable:
        return None


def _warm_mark(folder: Path) -> Path:
    """Return the path of the file that exists once `jaxacct warm` has kept the programs of sweeps for this machine."""
    return path_of(folder, "jaxacct warm", devices.local()[0]).with_suffix(WARM_ENDING)


def note_warm() -> None:
    """Write the file of `_warm_mark`. It tells `are_kept` that the programs of sweeps are kept."""
    folder = _folder(create=True)
    if folder is not None:
        write(_warm_mark(folder), b"")


def are_kept() -> bool:
    """Return whether `jaxacct warm` has kept the programs of sweeps."""
    folder = _folder(create=False)
    return folder is not None and read(_warm_mark(folder)) is not None


def _own(tree: Any) -> bool:
    """Return whether a tree's containers are all built-in or jaxacct's. File names do not hash other classes' code."""
    node = tree.node_data()
    kind = type(None) if node is None else node[0]
    ours = kind.__module__.partition(".")[0] in ("builtins", "jaxacct")
    return ours and all(_own(child) for child in tree.children())


def _works(program: Run, leaves: list[Any]) -> bool:
    """Return whether a kept program runs. Some programs load, but fail when they are called."""
    try:
        jax.block_until_ready(program(*leaves))
    except Exception:  # after any error of the runtime the program is compiled anew
        return False
    return True


@functools.cache
def known(**options: Any) -> dict[str, Any]:
    """Return those of the given compile options that this version of XLA knows."""
    lowered = jax.jit(lambda x: x).lower(0)

    def has(name: str) -> bool:
        try:
            lowered.compile(compiler_options={name: options[name]})
        except jax.errors.JaxRuntimeError as error:
            if "No such compile option" not in str(error):
                raise
            return False
        return True

    return {name: value for name, value in options.items() if has(name)}


def _compile(lowered: jax.stages.Lowered, options: dict[str, Any] | None) -> jax.stages.Compiled:
    try:
        return lowered.compile(compiler_options=options)
    except jax.errors.JaxRuntimeError as error:
        if "No such compile option" not in str(error):
            raise
        return lowered.compile(compiler_options=known(**options or {}))


NOTICE_SECONDS = 1.0
"""Seconds of compiling after which a line on standard error tells the user about it."""


class Clock:
    """Measures the `seconds` in which at least one thread is inside `running`, and counts the calls of `add`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside, self._begin, self._spent, self.count = 0, 0.0, 0.0, 0

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        with self._lock:
            if self._inside == 0:
                self._begin = time.monotonic()
            self._inside += 1
        try:
            yield
        finally:
            with self._lock:
                self._inside -= 1
                if self._inside == 0:
                    self._spent += time.monotonic() - self._begin

    @property
    def seconds(self) -> float:
        with self._lock:
            return self._spent + (time.monotonic() - self._begin if self._inside else 0.0)

    def add(self) -> None:
        with self._lock:
            self.count += 1


preparing, compiling, loading, saving = Clock(), Clock(), Clock(), Clock()
"""Clocks of all preparation of programs, and of its parts: compiling (with tracing), loading and writing."""
_once = threading.Lock()
"""The first thread that prints or suppresses the line about compiling keeps this lock, so no second line appears."""


def seconds() -> float:
    """Return the seconds that this process has spent preparing programs. Reported speeds do not include this time."""
    return preparing.seconds


@contextlib.contextmanager
def announced() -> Iterator[None]:
    """Time and count the compilation in the `with` block. Print a line after NOTICE_SECONDS of compiling in all."""
    timer = None
    if not _once.locked() and _shown():
        timer = threading.Timer(max(NOTICE_SECONDS - compiling.seconds, 0.0), _say)
        timer.daemon = True
        timer.start()
    try:
        with compiling.running():
            yield
        compiling.add()
    finally:
        if timer is not None:
            timer.cancel()


def say_nothing() -> None:
    """Suppress the line about compiling, for a command that shows its compilations itself."""
    _once.acquire(blocking=False)


def _say() -> None:
    if not _once.acquire(blocking=False):
        return
    try:
        where = f"once; kept in {safe_folder(create=True)}); `jaxacct warm` does it ahead"
    except Unusable as reason:
        where = f"in each process: {reason})"
    progress.say(f"jaxacct: compiling kernels for this machine ({where}")


def _shown() -> bool:
    """Return whether to show progress: yes on a terminal or in a notebook, unless the user has asked for quiet."""
    return not devices.quiet() and (progress.on_terminal() or progress.in_notebook())


@dataclass(frozen=True)
class CacheInfo:
    """Compiled programs on the disk and in this process, as `jaxacct.cache_info` returns them.

    Parameters
    ----------
    folder : Path or None
        Where programs are kept; None if keeping is turned off, or if the home folder is unknown.
    used : bool
        Whether programs are loaded from the folder.
    reason : str
        Why the folder is not used, or why no programs are written there, in one line; else empty.
    programs, bytes : int
        How many programs the folder holds, from all versions of jaxacct, and their total size in bytes.
    limit_bytes : int
        The size beyond which the programs unused for longest are removed.
    loaded, compiled, saved : int
        How many programs this process has loaded, compiled, and kept.
    load_seconds, compile_seconds, save_seconds : float
        The time that loading, compiling and keeping programs have taken. Compiling includes tracing.

    >>> import jaxacct as ja
    >>> isinstance(ja.cache_info(), ja.CacheInfo)
    True
    """

    folder: Path | None
    used: bool
    reason: str
    programs: int
    bytes: int
    limit_bytes: int
    loaded: int
    compiled: int
    saved: int
    load_seconds: float
    compile_seconds: float
    save_seconds: float


def cache_info() -> CacheInfo:
    """Return where compiled programs are kept, how large they are, and what this process has loaded and compiled.

    Programs are kept in ``$JAXACCT_CACHE_DIR``, else in ``jaxacct`` under ``$XDG_CACHE_HOME`` or ``~/.cache``.
    If ``$JAXACCT_CACHE_DIR`` is set and empty, none are kept. The folder must be this user's, and nobody else may
    write to it.

    Returns
    -------
    CacheInfo

    >>> import jaxacct as ja
    >>> info = ja.cache_info()
    >>> info.limit_bytes // 2**20, info.used or bool(info.reason)
    (512, True)
    """
    folder, reason = None, ""
    try:
        folder = directory()
        safe_folder(create=False)
        used = True
        if folder is not None and not os.access(folder, os.W_OK):
            reason = f"{folder} may only be read: programs are loaded, and no more are kept"
    except Missing:
        used = True
    except Unusable as error:
        used, reason = False, str(error)
    files = kept(folder) if used and folder is not None else []
    return CacheInfo(
        folder=folder,
        used=used,
        reason=reason,
        programs=len(files),
        bytes=sum(status.st_size for _, status in files),
        limit_bytes=LIMIT_BYTES,
        loaded=loading.count,
        compiled=compiling.count,
        saved=saving.count,
        load_seconds=loading.seconds,
        compile_seconds=compiling.seconds,
        save_seconds=saving.seconds,
    )


def clear_cache() -> int:
    """Remove every program kept on the disk, unless the folder is unsafe. Programs in this process stay.

    Returns
    -------
    int
        How many programs were removed.

    >>> import os, tempfile
    >>> import jaxacct as ja
    >>> before = os.environ.get("JAXACCT_CACHE_DIR")
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     os.environ["JAXACCT_CACHE_DIR"] = folder
    ...     ja.clear_cache()
    0
    >>> if before is None:
    ...     del os.environ["JAXACCT_CACHE_DIR"]
    ... else:
    ...     os.environ["JAXACCT_CACHE_DIR"] = before
    """
    try:
        folder = safe_folder(create=False)
    except Unusable:
        return 0
    count = sum(_removed(path) for path, _ in kept(folder))
    for path in folder.glob(f"*{WARM_ENDING}"):
        _removed(path)
    _sweep_up(folder, 0.0)
    return count
