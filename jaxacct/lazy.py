"""Public names of a package that are imported when first used, so that importing the package is quick."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, cast

__all__ = ["make_callable", "names"]


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
        package_of_that_name = sys.modules.get(f"{package}.{name}")
        if isinstance(package_of_that_name, CallableModule):
            value = package_of_that_name
        setattr(sys.modules[package], name, value)
        return value

    return __getattr__, lambda: sorted([*homes, *more])


class CallableModule(ModuleType):
    """A package that can be called as the function that has its name."""

    __call_function__: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__call_function__(*args, **kwargs)


def make_callable(module: str, function: Callable[..., Any]) -> None:
    """Let a package be called as the function that has its name.

    `jaxacct.sweep` is a package and a function: the import system binds the package to that name whenever something
    inside it is imported, so the package itself answers the call, whatever was imported before.

    >>> import jaxacct as ja
    >>> from jaxacct.sweep import merge
    >>> callable(ja.sweep), ja.sweep.merge is merge
    (True, True)
    """

    package = cast(Any, sys.modules[module])
    package.__class__ = CallableModule
    package.__call_function__ = function
    package.__signature__ = inspect.signature(function)
