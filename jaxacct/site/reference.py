"""The reference: a page for every public name, a list for every package, and one page for the commands."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import io
import os
import re
from pathlib import Path
from typing import Any

from jaxacct.site.docstrings import Link, escaped, markdown
from jaxacct.site.names import PublicName, homes, member_doc, members, packages, public_names

__all__ = ["ROOT", "linked", "pages"]

ROOT = Path(__file__).resolve().parent.parent.parent
"""The checkout."""
CODE = re.compile(r"\[[^\]\n]*\]\([^)\n]*\)|(?<![`\\])`([^`\n]+)`(?!`)")
"""A link, which is left alone, or a code span."""
PAGE = re.compile(r"(?<![\w./(\[-])`?((?:[\w-]+/)+README\.md)`?(?![\w/)])")
"""The path of a page of the repository, as docstrings and pages cite it."""


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
    what = "class" if inspect.isclass(home.value) else "function" if callable(home.value) else "constant"
    alike = sum(1 for o in public_names() if o.package == home.package and o.name.lower() == home.name.lower())
    return f"{home.package}/{home.name}{f'-{what}' if alike > 1 and what != 'function' else ''}.md"


def linked(text: str, package: str = "jaxacct", page: str = "reference/jaxacct/name.md") -> str:
    """Markdown in which every public name in a code span, and every page that is cited, is a link.

    Names are recognised as `ja.epsilon`, `jaxacct.training.Plan` or `training.Plan`, with or without a call after
    them, and, in the reference of a package, also its own classes by their bare names.

    page : where the text will stand, below the folder of the site's sources.
    """
    known = homes()

    def name(match: re.Match[str]) -> str:
        code = match[1]
        dotted = re.match(r"[\w.]+", code or "")
        rest = code[dotted.end() :] if dotted else code
        if not dotted or (rest and not rest.startswith("(")) or any(sign in code for sign in "<>|"):
            return match[0]
        home = known.get(expanded(dotted[0], package))
        return f"{{py:obj}}`{code} <{home.full}>`" if home else match[0]

    def cited(match: re.Match[str]) -> str:
        bases = (Path(page).parent, Path(), Path("jaxacct"))
        found = next((b / match[1] for b in bases if (ROOT / b / match[1]).is_file()), None)
        return f"[{match[0]}]({os.path.relpath(found, Path(page).parent)})" if found else match[0]

    return PAGE.sub(cited, CODE.sub(name, text))


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
    if not callable(home.value):
        return "Constants"
    if not inspect.isclass(home.value):
        return "Functions"
    mechanism = importlib.import_module("jaxacct.mechanisms").BaseMechanism
    return "Mechanisms" if issubclass(home.value, mechanism) else "Classes"


def package_page(package: str) -> str:
    """The list of a package's public names, by what they are."""
    groups: dict[str, list[str]] = {"Functions": [], "Mechanisms": [], "Classes": [], "Constants": []}
    for full, home in homes().items():
        name = full.rpartition(".")[2]
        if full != f"{package}.{name}":
            continue
        other = "" if home.full == full else f"another name of `{home.full}`: "
        summary = linked(escaped(first_sentence(home.doc)), home.package)
        groups[kind(home)].append(f"{{py:obj}}`{name} <{home.full}>`\n: {other}{summary}")
    out = [f"# {package}", linked(markdown(package_doc(package)), package, f"reference/{package}.md")]
    out += ["\n\n".join([f"## {title}", *entries]) for title, entries in groups.items() if entries]
    return "\n\n".join(out) + "\n"


def name_page(home: PublicName) -> str:
    """The page of one public name."""
    link = lambda text: linked(text, home.package, f"reference/{path_of(home)}")
    also = [full for full, other in homes().items() if other is home and full != home.full]
    notes = [f"Also as {', '.join(f'`{name}`' for name in also)}."] if also else []
    notes += [f"Needs the package `{home.needs}`."] if home.needs else []
    what = "class" if inspect.isclass(home.value) else "function" if callable(home.value) else "data"
    body = [markdown(home.doc, link), *notes]
    body += [member_entry(home, name, member, link) for name, member in members(home.value).items()]
    shown = signature(home.value) if callable(home.value) else ""
    entry = directive(what, f"{home.name}{shown}", {"module": home.package}, "\n\n".join(body), fence=7)
    back = f"Back to [{home.package}](../{home.package}.md).\n"
    return f"---\norphan: true\n---\n\n# {home.full}\n\n{entry}\n\n{back}"


def member_entry(home: PublicName, name: str, member: Any, link: Link) -> str:
    """A method or property on the page of its class."""
    text = markdown(member_doc(home.value, name), link)
    if isinstance(member, property):
        return directive("property", name, {}, text, fence=6)
    flags = {"classmethod": ""} if isinstance(member, classmethod) else {}
    flags |= {"staticmethod": ""} if isinstance(member, staticmethod) else {}
    shown = signature(getattr(member, "__func__", member), bound=not isinstance(member, staticmethod))
    return directive("method", f"{name}{shown}", flags, text, fence=6)


def directive(what: str, argument: str, options: dict[str, str], text: str, fence: int) -> str:
    """A directive of Sphinx's Python domain, in Markdown; an outer one has a longer fence."""
    lines = [f":{name}: {value}".rstrip() for name, value in options.items()]
    ticks = "`" * fence
    return "\n".join([f"{ticks}{{py:{what}}} {argument}", *lines, "", text, ticks])


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
    out = ["# The command line", "What `jaxacct --help` and `jaxacct COMMAND --help` print."]
    for name in ("", *importlib.import_module("jaxacct.cli.arguments").COMMANDS):
        title = f"jaxacct {name}".strip()
        out.append(f"## {title}\n\n```text\n{printed_help(name)}\n```")
    return "\n\n".join(out) + "\n"


def printed_help(command: str) -> str:
    """What a command prints for `--help`, 100 columns wide."""
    before = {name: os.environ.get(name) for name in ("COLUMNS", "NO_COLOR")}
    os.environ |= {"COLUMNS": "100", "NO_COLOR": "1"}
    try:
        with contextlib.redirect_stdout(io.StringIO()) as text, contextlib.suppress(SystemExit):
            importlib.import_module("jaxacct.cli.arguments").parse([command, "--help"] if command else ["--help"])
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
    return text.getvalue().rstrip()
