"""The reference: a page for every public name, a list for every package, and one page for the commands."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import io
import os
import re
from typing import Any

from jaxacct.site.docstrings import markdown
from jaxacct.site.names import PublicName, homes, member_doc, members, packages, public_names

__all__ = ["linked", "pages"]

DOTTED = re.compile(r"(?:ja|jaxacct|[a-z_]+)(?:\.[A-Za-z_]\w*)+")
CODE = re.compile(r"(?<![`\\])`([^`\n]+)`(?!`)")


def pages() -> dict[str, str]:
    """Every page of the reference: its path below `reference/`, and its text in MyST Markdown."""
    found = {"index.md": index(), "command_line.md": command_line()}
    for package in packages():
        found[f"{package}.md"] = package_page(package)
    for full, home in homes().items():
        if full == home.full:
            found[path_of(home)] = name_page(home)
    return found


def path_of(home: PublicName) -> str:
    """The path of a page; no two of them differ in case only, since some file systems take those for one."""
    clash = [other for other in public_names() if other.package == home.package and other.name != home.name]
    twin = inspect.isclass(home.value) and any(other.name.lower() == home.name.lower() for other in clash)
    return f"{home.package}/{home.name}{'-class' if twin else ''}.md"


def linked(text: str, package: str = "jaxacct") -> str:
    """Markdown in which every public name in a code span links to its page.

    Names are recognised as `ja.epsilon`, `jaxacct.training.Plan` or `training.Plan`, with or without a call after
    them, and, in the reference of a package, also its own classes by their bare names.
    """
    known = homes()

    def link(match: re.Match[str]) -> str:
        code = match[1]
        dotted = re.match(r"[\w.]+", code)
        rest = code[dotted.end() :] if dotted else code
        if not dotted or (rest and not rest.startswith("(")) or any(sign in code for sign in "<>|"):
            return match[0]
        home = known.get(expanded(dotted[0], package))
        return f"{{py:obj}}`{code} <{home.full}>`" if home else match[0]

    return CODE.sub(link, text)


def expanded(name: str, package: str) -> str:
    """The dotted name that a short one stands for."""
    if name.startswith("ja."):
        return f"jaxacct.{name[3:]}"
    if "." in name:
        return name if name.startswith("jaxacct.") else f"jaxacct.{name}"
    if name[:1].isupper():
        inside = f"{package}.{name}"
        return inside if inside in homes() else f"jaxacct.{name}"
    return ""


def index() -> str:
    """The list of packages."""
    rows = [f"* [`{package}`]({package}.md): {first_sentence(package_doc(package))}" for package in packages()]
    tree = "\n".join([*packages(), "command_line"])
    return (
        "# Reference\n\nEvery public name has a page, made from its docstring. The examples on these pages are run by "
        "the tests. `ja` stands for `jaxacct`.\n\n"
        + "\n".join([*rows, "* [The command line](command_line.md): `jaxacct` and its commands."])
        + f"\n\n```{{toctree}}\n:hidden:\n\n{tree}\n```\n"
    )


def package_doc(package: str) -> str:
    return inspect.cleandoc(importlib.import_module(package).__doc__ or "")


def first_sentence(text: str) -> str:
    """The summary of a docstring, on one line."""
    return " ".join(text.split("\n\n")[0].split())


def kind(home: PublicName) -> str:
    """In which list of a package a name stands."""
    from jaxacct.mechanisms import BaseMechanism

    if not callable(home.value):
        return "Constants"
    if not inspect.isclass(home.value):
        return "Functions"
    return "Mechanisms" if issubclass(home.value, BaseMechanism) else "Classes"


def package_page(package: str) -> str:
    """The list of a package's public names, by what they are."""
    groups: dict[str, list[str]] = {"Functions": [], "Mechanisms": [], "Classes": [], "Constants": []}
    for full, home in homes().items():
        name = full.rpartition(".")[2]
        if full != f"{package}.{name}":
            continue
        other = "" if home.full == full else f"another name of `{home.full}`: "
        summary = linked(first_sentence(home.doc).replace("<", "\\<"), home.package)
        groups[kind(home)].append(f"{{py:obj}}`{name} <{home.full}>`\n: {other}{summary}")
    out = [f"# {package}", linked(markdown(package_doc(package)), package)]
    out += ["\n\n".join([f"## {title}", *entries]) for title, entries in groups.items() if entries]
    return "\n\n".join(out) + "\n"


def name_page(home: PublicName) -> str:
    """The page of one public name."""
    link = lambda text: linked(text, home.package)
    also = [full for full, other in homes().items() if other is home and full != home.full]
    notes = [f"Also as {', '.join(f'`{name}`' for name in also)}."] if also else []
    notes += [f"Needs the package `{home.needs}`."] if home.needs else []
    what = "class" if inspect.isclass(home.value) else "function" if callable(home.value) else "data"
    body = [markdown(home.doc, link), *notes]
    for name, member in members(home.value).items():
        how = "property" if isinstance(member, property) else "method"
        flag = "\n:classmethod:" if isinstance(member, classmethod) else ""
        flag += "\n:staticmethod:" if isinstance(member, staticmethod) else ""
        shown = "" if how == "property" else signature(getattr(member, "__func__", member), bound=flag[-7:] != "static:")
        inner = markdown(member_doc(home.value, name), link)
        body.append(f"``````{{py:{how}}} {name}{shown}{flag}\n\n{inner}\n``````")
    text = "\n\n".join(body)
    shown = signature(home.value) if callable(home.value) else ""
    return (
        f"---\norphan: true\n---\n\n# {home.full}\n\n```````{{py:{what}}} {home.name}{shown}\n:module: {home.package}\n\n{text}\n```````\n\n"
        f"Back to [{home.package}](../{home.package}.md).\n"
    )


def signature(value: Any, bound: bool = False) -> str:
    """What a function or class takes, without types: these stand with the parameters."""
    try:
        parameters = list(inspect.signature(value).parameters.values())
    except (ValueError, TypeError):
        return "()"
    shown = [one.replace(annotation=inspect.Parameter.empty, default=default(one)) for one in parameters]
    shown = shown[1:] if bound and shown and shown[0].name in ("self", "cls") else shown
    return str(inspect.Signature(shown))


class Written:
    """A default value as it is written in a signature."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


def default(parameter: inspect.Parameter) -> Any:
    """The default of a parameter; one whose representation is no expression is shown as dots."""
    if parameter.default is inspect.Parameter.empty:
        return parameter.default
    text = repr(parameter.default)
    return Written("..." if "<" in text or "\n" in text or len(text) > 60 else text)


def command_line() -> str:
    """The help of every command."""
    from jaxacct.cli.arguments import COMMANDS

    out = ["# The command line", "What `jaxacct --help` and `jaxacct COMMAND --help` print."]
    for name in ("", *COMMANDS):
        title = f"jaxacct {name}".strip()
        out.append(f"## {title}\n\n```text\n{printed_help(name)}\n```")
    return "\n\n".join(out) + "\n"


def printed_help(command: str) -> str:
    """What a command prints for `--help`, 100 columns wide."""
    from jaxacct.cli.arguments import parse

    before = {name: os.environ.get(name) for name in ("COLUMNS", "NO_COLOR")}
    os.environ |= {"COLUMNS": "100", "NO_COLOR": "1"}
    try:
        with contextlib.redirect_stdout(io.StringIO()) as text, contextlib.suppress(SystemExit):
            parse([command, "--help"] if command else ["--help"])
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
    return text.getvalue().rstrip()
