"""Docstrings as Markdown: prose as it is, sections of NumPy's style as definition lists, examples as sessions."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable

__all__ = ["escaped", "markdown"]

WRAPPED = 96
"""A line that would hold fewer columns with the next word on it was broken on purpose, not wrapped."""
Link = Callable[[str], str]


def markdown(doc: str, link: Link = lambda text: text) -> str:
    """A docstring, without its indentation, as Markdown.

    doc : in the style of this package: a summary, prose, sections underlined with dashes, examples after `>>>`.
    link : applied to prose, such as one that links the names of the reference.

    >>> print(markdown("One number.\\n\\nParameters\\n----------\\nx : float\\n    Its size."))
    One number.
    <BLANKLINE>
    :::{rubric} Parameters
    :::
    <BLANKLINE>
    **`x`** : float
    : Its size.
    """
    lines = doc.splitlines()
    out: list[str] = []
    in_section, at = False, 0
    while at < len(lines):
        line = lines[at]
        if not line.strip():
            at += 1
        elif is_heading(lines, at):
            out.append(f":::{{rubric}} {line.strip()}\n:::")
            in_section, at = True, at + 2
        elif line.startswith(">>>"):
            block, at = until_blank(lines, at)
            out.append(fenced(block, "pycon"))
        elif in_section and is_item(lines, at):
            body, at = indented_below(lines, at + 1)
            out.append(item(line, body, link))
        elif line.startswith("    "):
            block, at = indented_below(lines, at)
            out.append(fenced(textwrap.dedent("\n".join(block)).splitlines(), "text"))
        else:
            block, at = paragraph(lines, at)
            out.append(link(escaped("\n".join(block))))
    return "\n\n".join(out)


def is_heading(lines: list[str], at: int) -> bool:
    """Whether a line is the title of a section: the line below is as many dashes."""
    title = lines[at].strip()
    return at + 1 < len(lines) and title.isidentifier() and lines[at + 1].strip() == "-" * len(title)


def is_item(lines: list[str], at: int) -> bool:
    """Whether a line of a section names something: it is not indented, and a colon or an indented line follows."""
    line = lines[at]
    named = re.match(r"[\w*][\w.*, |\[\]]* : ", line) is not None
    described = at + 1 < len(lines) and lines[at + 1].startswith("    ")
    return not line.startswith((" ", "* ")) and (named or described)


def until_blank(lines: list[str], at: int) -> tuple[list[str], int]:
    """The lines up to an empty one, and where that is."""
    end = at
    while end < len(lines) and lines[end].strip():
        end += 1
    return lines[at:end], end


def paragraph(lines: list[str], at: int) -> tuple[list[str], int]:
    """The lines up to an empty one, a title or an example, and where that is."""
    end = at + 1
    while end < len(lines) and lines[end].strip() and not lines[end].startswith(">>>") and not is_heading(lines, end):
        end += 1
    return lines[at:end], end


def indented_below(lines: list[str], at: int) -> tuple[list[str], int]:
    """The indented lines from a place on, empty ones between them included, and where they end."""
    end = at
    while end < len(lines) and (lines[end].startswith("  ") or not lines[end].strip()):
        end += 1
    block = lines[at:end]
    while block and not block[-1].strip():
        block.pop()
    return block, at + len(block)


def item(line: str, body: list[str], link: Link) -> str:
    """One entry of a definition list."""
    names, colon, rest = line.partition(" : ")
    text = textwrap.dedent("\n".join(body)).splitlines()
    if text and colon and wrapped(line, text[0]):
        text, rest = [f"{rest} {text[0]}", *text[1:]], ""
    if not text:
        text, rest = ([rest], "") if colon else ([""], "")
    term = ", ".join(f"**`{name.strip()}`**" for name in names.split(",")) if colon else link(escaped(names))
    head = f"{term} : {link(escaped(rest))}" if rest else term
    inner = markdown("\n".join(text), link).splitlines()
    if not any(inner):
        return head
    return "\n".join([head, f": {inner[0]}", *(f"  {one}" if one else "" for one in inner[1:])])


def wrapped(line: str, following: str) -> bool:
    """Whether the line below goes on with the same sentence."""
    word = following.split(maxsplit=1)[0]
    return len(line) + 1 + len(word) >= WRAPPED and not word[:1].isupper()


def fenced(block: list[str], language: str) -> str:
    """Lines as a block of code."""
    return "\n".join([f"```{language}", *block, "```"])


def escaped(text: str) -> str:
    """Prose in which no `<` opens a tag and double backticks are single ones."""
    pieces = re.split(r"(``.+?``|`[^`]+`)", text, flags=re.DOTALL)
    pieces[1::2] = [f"`{piece.strip('`')}`" for piece in pieces[1::2]]
    pieces[0::2] = [piece.replace("<", "\\<").replace("$", "\\$") for piece in pieces[0::2]]
    return "".join(pieces)
