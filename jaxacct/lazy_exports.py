"""Public names of a package that are imported when first used, so that importing the package is quick.

A package that uses this writes its names three times: in the table of lazy exports, in `__all__`, and in imports under
`if TYPE_CHECKING`, where type checkers and editors find them.  `tests/test_front_door.py` compares the three.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["lazy_exports"]


def lazy_exports(
    package: str, homes: Mapping[str, str], *others: str
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """``__getattr__`` and ``__dir__`` of a package, for names that live in its submodules.

    A submodule that needs a package which is not installed is refused in one line that names that package.  A name that
    is not there is refused in one line that says what it is called here, if it is known from elsewhere or misspelt.

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
            raise AttributeError(f"module {package!r} has no attribute {name!r}{_hint(package, name, homes)}")
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


def _hint(package: str, name: str, homes: Mapping[str, str]) -> str:
    """What to use instead of a name that is not there; nothing where that is not known."""
    if name.startswith("_"):
        return ""
    if importlib.util.find_spec(f"{package}.{name}"):
        return f"; import {package}.{name} first"
    from jaxacct.keywords import FRONT_DOOR, nearest

    known = FRONT_DOOR.get(name, "") if package == "jaxacct" else ""
    near = known or nearest(name, homes, 0.7)
    return f"; did you mean {near}?" if near else ""
