"""Optional packages: the extra of each, and the error where one is missing."""

from __future__ import annotations

__all__ = ["EXTRAS", "lacking"]

EXTRAS = {
    "dp_accounting": ("dp-accounting", "interop"),
    "flax": ("flax", "training"),
    "flint": ("python-flint", "verify"),
    "matplotlib": ("matplotlib", "plot"),
    "opacus": ("opacus", "opacus"),
    "optax": ("optax", "training"),
    "orbax": ("orbax-checkpoint", "training"),
    "pandas": ("pandas", "pandas"),
    "pyarrow": ("pyarrow", "parquet"),
    "sphinx": ("sphinx", "docs"),
    "xarray": ("xarray", "xarray"),
}
"""For each imported name: the name of the distribution, which may differ, and the extra of jaxacct that brings it."""


def lacking(what: str, module: str) -> str:
    """One line: what needs the package of a module, and how to get it.

    >>> lacking("ja.verify", "flint")
    "ja.verify needs the package python-flint; pip install 'jaxacct[verify]'"
    """
    distribution, extra = EXTRAS[module.partition(".")[0]]
    return f"{what} needs the package {distribution}; pip install 'jaxacct[{extra}]'"
