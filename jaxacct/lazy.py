"""Public names of a package that are imported when first used, so that importing the package is quick."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["names"]


def names(package: str, homes: Mapping[str, str], *more: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """``__getattr__`` and ``__dir__`` of a package whose names live in the submodules given, {name: submodule}.

    more : names that are there without this.  A submodule that lacks another package is told of in one line.

    >>> get, listed = names("jaxacct", {"epsilon": "account"}, "__version__")
    >>> get("epsilon").__module__, listed()
    ('jaxacct.account', ['__version__', 'epsilon'])
    """

    def __getattr__(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        try:
            value = getattr(importlib.import_module(f"{package}.{homes[name]}"), name)
        except ModuleNotFoundError as error:
            lacking = (error.name or "").partition(".")[0]
            words = f"{package}.{name} needs the package {lacking}; pip install it"
            raise ModuleNotFoundError(words, name=error.name) from None
        setattr(sys.modules[package], name, value)  # also where a submodule has the name of what it holds
        return value

    return __getattr__, lambda: sorted([*homes, *more])
