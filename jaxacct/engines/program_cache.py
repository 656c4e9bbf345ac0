"""What is kept of compiled programs, and what preparing them has cost, for users to see; and how to remove it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from jaxacct.engines import cache_folder, compiling


@dataclass(frozen=True)
class CacheInfo:
    """Compiled programs on the disk and in this process.  `jaxacct.cache_info` makes one.

    Parameters
    ----------
    folder : Path or None
        Where programs are kept; None where that is turned off or there is no such place.
    used : bool
        Whether programs are loaded from there.
    reason : str
        Why not, or why none are written there, in one line; else empty.
    programs, bytes : int
        How many programs there are, of all versions of jaxacct, and their size together.
    limit_bytes : int
        The size beyond which the programs unused for longest are removed.
    loaded, compiled, saved : int
        How many programs this process has loaded, compiled, and kept.
    load_seconds, compile_seconds, save_seconds : float
        The time in which it did; compiling includes tracing.

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
    """Where compiled programs are kept, how large they are, and what this process has loaded and compiled.

    XLA compiles a kernel once for each machine.  The program is then kept in the folder that ``$JAXACCT_CACHE_DIR``
    names, else in ``jaxacct`` under ``$XDG_CACHE_HOME`` or ``~/.cache``; where the variable is set and empty, programs
    are not kept.  A folder is used only if it belongs to this user and nobody else may write to it.

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
        folder = cache_folder.directory()
        cache_folder.safe_folder(create=False)
        used = True
        if folder is not None and not os.access(folder, os.W_OK):
            reason = f"{folder} may only be read: programs are loaded, and no more are kept"
    except cache_folder.Missing:
        used = True
    except cache_folder.Unusable as error:
        used, reason = False, str(error)
    files = cache_folder.kept(folder) if used and folder is not None else []
    return CacheInfo(
        folder=folder,
        used=used,
        reason=reason,
        programs=len(files),
        bytes=sum(status.st_size for _, status in files),
        limit_bytes=cache_folder.LIMIT_BYTES,
        loaded=compiling.loading.count,
        compiled=compiling.compiling.count,
        saved=compiling.saving.count,
        load_seconds=compiling.loading.seconds,
        compile_seconds=compiling.compiling.seconds,
        save_seconds=compiling.saving.seconds,
    )


def clear_cache() -> int:
    """Remove every program that is kept on the disk; those in this process stay.

    The folder is left alone where it is not safe to use (`jaxacct.cache_info` says why).

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
        return cache_folder.clear(cache_folder.safe_folder(create=False))[0]
    except cache_folder.Unusable:
        return 0
