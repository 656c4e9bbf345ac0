"""The public names of the packages: what each one is, where its page is, and whether it is documented.

Nothing is listed by hand.  A name is public when a package of `jaxacct` has it in `__all__`.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import pkgutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import jaxacct
from jaxacct.core.lazy_exports import Missing

__all__ = ["PublicName", "homes", "members", "packages", "public_names", "undocumented"]

COMMANDS = {"cli", "site"}
"""Packages that are commands: their pages come from their help."""


@dataclass(frozen=True)
class PublicName:
    """A public name: `package.name`, what it stands for, and the package it needs where that is not installed."""

    package: str
    name: str
    value: Any
    needs: str = ""

    @property
    def full(self) -> str:
        """The dotted name."""
        return f"{self.package}.{self.name}"

    @property
    def doc(self) -> str:
        """Its docstring; of a constant, the string that stands after its assignment. Empty where there is none."""
        if not callable(self.value):
            return constant_doc(self.package, self.name)
        own = vars(self.value).get("__doc__") if inspect.isclass(self.value) else self.value.__doc__
        if not own or own.startswith(f"{self.value.__name__}("):  # what dataclasses make by themselves
            return ""
        return inspect.cleandoc(own)


def packages() -> list[str]:
    """`jaxacct` first, then its packages with public names, in alphabetical order."""
    found = [f"jaxacct.{m.name}" for m in pkgutil.iter_modules(jaxacct.__path__) if m.ispkg and m.name not in COMMANDS]
    return ["jaxacct", *(name for name in sorted(found) if getattr(importlib.import_module(name), "__all__", []))]


@functools.cache
def public_names() -> tuple[PublicName, ...]:
    """Every public name of every package; one that several packages export appears once for each of them."""
    return tuple(loaded(package, name) for package in packages() for name in importlib.import_module(package).__all__)


@functools.cache
def homes() -> dict[str, PublicName]:
    """Every dotted public name with the name under which it is documented: the first that stands for the same."""
    found: dict[str, PublicName] = {}
    first: list[PublicName] = []
    for one in public_names():
        same = (other for other in first if other.value is one.value and callable(one.value))
        home = next(same, None)
        if home is None:
            first.append(home := one)
        found[one.full] = home
    return found


def loaded(package: str, name: str) -> PublicName:
    """A public name by import; where it needs a package that is not installed, with a stand-in for that package."""
    module = importlib.import_module(package)
    value = getattr(module, name)
    if not isinstance(value, Missing):
        return PublicName(package, name, value)
    with stand_in(value.needs):
        return PublicName(package, name, getattr(module, name), value.needs)


class _Anything(type):
    """A class that has whatever it is asked for, each time a new class of the same kind."""

    def __getattr__(cls, name: str) -> Any:
        return anything(name)


def anything(name: str) -> Any:
    """A class of that name, to be called with anything, that has whatever it is asked for but Python's own names."""
    if name.startswith("__"):
        raise AttributeError(name)
    return _Anything(name, (), {"__init__": lambda self, *given, **named: None})


class _StandIn(MetaPathFinder, Loader):
    """Finds one package and its modules, which hold whatever they are asked for."""

    def __init__(self, package: str) -> None:
        self.package = package

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(fullname, self, is_package=True) if fullname.partition(".")[0] == self.package else None

    def exec_module(self, module: Any) -> None:
        module.__getattr__ = anything


@contextmanager
def stand_in(package: str) -> Iterator[None]:
    """A package that is not installed can be imported; afterwards no module is left that was imported with it."""
    everywhere = [sys.modules[name] for name in packages()]
    before = set(sys.modules)
    finder = _StandIn(package)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        new = set(sys.modules) - before
        gone = {name for name in new if name.partition(".")[0] == package or imports(sys.modules[name], package)}
        for module in everywhere:
            for name, value in list(vars(module).items()):
                if getattr(value, "__module__", None) in gone or getattr(value, "__name__", None) in gone:
                    delattr(module, name)
        for name in gone:
            del sys.modules[name]


def imports(module: Any, package: str) -> bool:
    """Whether a module of this library imports a package, by its source."""
    if not module.__name__.startswith("jaxacct."):
        return False
    nodes = list(ast.walk(ast.parse(inspect.getsource(module))))
    named = [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
    named += [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    return any(name.partition(".")[0] == package for name in named)


def constant_doc(module: str, name: str) -> str:
    """The string after the assignment of a constant, in this module or in the one that it is imported from."""
    path = Path(importlib.import_module(module).__file__ or "")
    body = ast.parse(path.read_text()).body
    for node, after in zip(body, [*body[1:], None], strict=True):
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(after, ast.Expr):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            named = any(isinstance(target, ast.Name) and target.id == name for target in targets)
            if named and isinstance(after.value, ast.Constant):
                return inspect.cleandoc(str(after.value.value))
    for one in (each for top in body for each in ast.walk(top)):
        if isinstance(one, ast.ImportFrom):
            for alias in one.names:
                if (alias.asname or alias.name) == name:
                    return constant_doc(one.module or "", alias.name)
    return ""


def members(value: Any) -> dict[str, Any]:
    """The public methods and properties that a class of this package has, inherited ones of this package included."""
    if not inspect.isclass(value):
        return {}
    found: dict[str, Any] = {}
    for owner in value.__mro__:
        if owner.__module__.startswith("jaxacct"):
            for name, member in vars(owner).items():
                called = isinstance(member, property | classmethod | staticmethod) or inspect.isfunction(member)
                if called and not name.startswith("_"):
                    found.setdefault(name, member)
    return found


def member_doc(value: Any, name: str) -> str:
    """The docstring of a method or property, or of what it overrides."""
    for owner in value.__mro__:
        doc = getattr(vars(owner).get(name), "__doc__", None)
        if doc:
            return inspect.cleandoc(doc)
    return ""


def undocumented() -> list[str]:
    """Public names, and public methods and properties of public classes, that have no docstring."""
    missing = [home.full for full, home in homes().items() if full == home.full and not home.doc]
    for full, home in homes().items():
        if full == home.full:
            missing += [f"{full}.{name}" for name in members(home.value) if not member_doc(home.value, name)]
    return missing
