"""Public names that are imported when first used, and the optional packages that some of them need.

Each name stands in `__all__`, in the table of lazy exports and under `if TYPE_CHECKING`. A test compares the three.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

EXTRAS = {
    "dp_accounting": ("dp-accounting", "interop"),
    "flax": ("flax", "training"),
    "flint": ("python-flint", "verify"),
    "jax_privacy": ("jax-privacy", "benchmark"),
    "matplotlib": ("matplotlib", "plot"),
    "opacus": ("opacus", "opacus"),
    "optax": ("optax", "training"),
    "orbax": ("orbax-checkpoint", "training"),
    "pandas": ("pandas", "pandas"),
    "pyarrow": ("pyarrow", "parquet"),
    "streamlit": ("streamlit", "explore"),
    "xarray": ("xarray", "xarray"),
}
"""For each imported name, the name of its distribution and the extra of jaxacct that installs it."""


def lazy_exports(
    package: str, homes: Mapping[str, str], *others: str
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return a package's ``__getattr__`` and ``__dir__``. `homes` maps lazy names to modules; `others` are not lazy."""

    def __getattr__(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}{_hint(package, name, homes)}")
        try:
            home = homes[name]
            home = home if home.startswith("jaxacct.") else f"{package}.{home}"
            value = getattr(importlib.import_module(home), name)
        except ModuleNotFoundError as error:
            module = (error.name or "").partition(".")[0]
            if module not in EXTRAS:
                raise
            # Python's `_handle_fromlist` calls this function for `from package import name`: raise the error at once.
            # In a star import the argument `recursive` of `_handle_fromlist` is True: return the stand-in.
            caller = sys._getframe(1)
            if caller.f_code.co_name == "_handle_fromlist" and not caller.f_locals.get("recursive"):
                raise ModuleNotFoundError(lacking(f"{package}.{name}", module), name=module) from None
            return _missing(package, name, module)
        if not isinstance(value, Missing):
            setattr(sys.modules[package], name, value)
        return value

    return __getattr__, lambda: sorted([*homes, *others])


class Missing(type):
    """Type of the stand-ins for public names that need a package which is not installed. Using a stand-in raises."""

    needs: str

    def __new__(mcs, name: str, bases: tuple[Any, ...], inside: dict[str, Any]) -> Missing:
        """Create a stand-in. For a class that derives from a stand-in, raise ModuleNotFoundError."""
        return bases[0]() if bases else super().__new__(mcs, name, bases, inside)

    def __call__(cls, *given: Any, **named: Any) -> NoReturn:
        """Raise ModuleNotFoundError; the message says how to install the package."""
        raise ModuleNotFoundError(cls.__doc__, name=cls.needs)

    def __getattr__(cls, name: str) -> NoReturn:
        raise AttributeError(cls.__doc__)


@functools.cache
def _missing(package: str, name: str, module: str) -> Missing:
    """Return the stand-in for a name that needs a missing module."""
    return Missing(name, (), {"__doc__": lacking(f"{package}.{name}", module), "__module__": package, "needs": module})


def _hint(package: str, name: str, homes: Mapping[str, str]) -> str:
    """Return a hint at what to use instead of a name that does not exist; "" if no known name is near."""
    if name.startswith("_"):
        return ""
    if importlib.util.find_spec(f"{package}.{name}"):
        return f"; import {package}.{name} first"
    from jaxacct.core.keywords import FRONT_DOOR, nearest

    near = (FRONT_DOOR.get(name, "") if package == "jaxacct" else "") or nearest(name, homes, 0.7)
    return f"; did you mean {near}?" if near else ""


def lacking(what: str, module: str) -> str:
    """Return one line that says which package `what` needs and how to install the package.

    >>> lacking("ja.verify", "flint")
    "ja.verify needs the package python-flint; pip install 'jaxacct[verify]'"
    """
    distribution, extra = EXTRAS[module.partition(".")[0]]
    return f"{what} needs the package {distribution}; pip install 'jaxacct[{extra}]'"
