"""The persistent compilation cache of the command line (the library sets none)."""

from __future__ import annotations

import os
from pathlib import Path


def directory() -> Path | None:
    """$JAXACCT_CACHE_DIR (empty: none), else jaxacct under $XDG_CACHE_HOME or ~/.cache."""
    chosen = os.environ.get("JAXACCT_CACHE_DIR")
    if chosen is not None:
        return Path(chosen) if chosen else None
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "jaxacct"


def enable() -> None:
    """Keep compiled programs between runs; without a writable directory the command works uncached."""
    path = directory()
    if path is None:
        return
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError:
        return
    if not os.access(path, os.W_OK):
        return
    import jax

    from jaxacct.engines import programs

    jax.config.update("jax_compilation_cache_dir", str(path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    if jax.default_backend() != "cpu":
        return
    try:
        from jaxacct.cli.executable_cache import ExecutableCache
    except ImportError:  # a jaxlib that no longer offers what it needs: JAX's own cache remains
        return
    programs.keep_on(ExecutableCache(path))
