"""Public signatures have types that an editor can use: no bare `Any`.

Where no narrower type is right, an alias in `jaxacct/core/types.py`, such as `PyTree`, says why.  `Any` inside another
type, such as `dict[str, Any]`, is allowed.
"""

import ast
import importlib
import inspect
import pathlib

import pytest

import jaxacct

ROOT = pathlib.Path(jaxacct.__file__).parent
PACKAGES = sorted(".".join(("jaxacct", *path.relative_to(ROOT).parent.parts)) for path in ROOT.rglob("__init__.py"))


def exported():
    """(module, name) of every exported function and class of jaxacct, and of the classes that these inherit from."""
    found = set()
    for package in map(importlib.import_module, PACKAGES):
        for name in getattr(package, "__all__", ()):
            value = getattr(package, name)
            if inspect.isfunction(value):
                found.add((value.__module__, value.__name__))
            elif inspect.isclass(value):  # with the classes from which it inherits
                found |= {(one.__module__, one.__name__) for one in value.__mro__}
    return sorted((module, name) for module, name in found if module.startswith("jaxacct"))


def annotations(definition):
    """(what, annotation) of a function, or of the fields and public methods of a class."""
    if isinstance(definition, ast.FunctionDef):
        arguments = [*definition.args.posonlyargs, *definition.args.args, *definition.args.kwonlyargs]
        yield from ((argument.arg, argument.annotation) for argument in arguments)
        yield "what it returns", definition.returns
        return
    for part in definition.body:
        if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
            if not part.target.id.startswith("_"):
                yield part.target.id, part.annotation
        elif isinstance(part, ast.FunctionDef) and (part.name == "__init__" or not part.name.startswith("_")):
            yield from ((f"{part.name}: {what}", annotation) for what, annotation in annotations(part))


def is_bare(annotation):
    """Whether an annotation is Any, or Any beside None."""
    return annotation is not None and ast.unparse(annotation).replace(" ", "") in ("Any", "Any|None", "None|Any")


def test_packages_export_what_users_call():
    assert len(exported()) > 150


@pytest.mark.parametrize("module", sorted({module for module, _ in exported()}))
def test_no_public_signature_has_a_bare_any(module):
    names = {name for home, name in exported() if home == module}
    tree = ast.parse(pathlib.Path(inspect.getsourcefile(importlib.import_module(module))).read_text())
    kinds = (ast.FunctionDef, ast.ClassDef)
    wrong = [
        f"{part.name}: {what}"
        for part in tree.body
        if isinstance(part, kinds) and part.name in names
        for what, annotation in annotations(part)
        if is_bare(annotation)
    ]
    assert not wrong, f"{module}: no type for " + ", ".join(wrong)
