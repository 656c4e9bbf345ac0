"""Public names of a package that are imported when first used, so that importing the package is quick.

A package that uses this writes its names three times: in the table of lazy exports, in `__all__`, and in imports under
`if TYPE_CHECKING`, where type checkers and editors find them.  `tests/test_front_door.py` compares the three.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["lazy_exports"]


def lazy_exports(
    package: str, homes: Mapping[str, str], *others: str
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """``__getattr__`` and ``__dir__`` of a package, for names that live in its submodules.

    A submodule that needs a package which is not installed is refused in one line that names that package.

    Parameters
    ----------
    package : str
        The package's ``__name__``.
    homes : mapping of str to str
        Each lazy name with the module that defines it: relative to the package, or from "jaxacct." on.
    *others : str
        Names that the package defines itself; ``__dir__`` lists them too.

    >>> get, listed = lazy_exports("jaxacct", {"epsilon": "account"}, "__version__")
    >>> get("epsilon").__module__, listed()
    ('jaxacct.account', ['__version__', 'epsilon'])
    """

    def __getattr__(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        try:
            home = homes[name]
            home = home if home.startswith("jaxacct.") else f"{package}.{home}"
            value = getattr(importlib.import_module(home), name)
        except ModuleNotFoundError as error:
            lacking = (error.name or "").partition(".")[0]
            words = f"{package}.{name} needs the package {lacking}; pip install it"
            raise ModuleNotFoundError(words, name=error.name) from None
        setattr(sys.modules[package], name, value)
        return value

    return __getattr__, lambda: sorted([*homes, *others])
