"""The pieces of a page. A piece holds plain text, which it writes, escaped, as HTML or as Markdown."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple


def html(title: str, blocks: Sequence[Block]) -> str:
    """Return the page as one HTML file, for a screen of any width and for paper."""
    body = "\n".join(block.html() for block in blocks)
    style = Path(__file__).with_name("page.css").read_text(encoding="utf-8")
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<title>{_plain(title)}</title>\n'
        f"<style>\n{style}</style>\n</head>\n<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def markdown(blocks: Sequence[Block]) -> str:
    return "\n\n".join(block.markdown() for block in blocks) + "\n"


class Heading(NamedTuple):
    """The title of the page (level 1), of a section (level 2) or of a part of a section (level 3)."""

    text: str
    level: int = 2
    new_page: bool = False

    def html(self) -> str:
        page = ' class="page"' if self.new_page else ""
        return f"<h{self.level}{page}>{_text(self.text)}</h{self.level}>"

    def markdown(self) -> str:
        return f"{'#' * self.level} {_marked(self.text)}"


class Paragraph(NamedTuple):
    text: str

    def html(self) -> str:
        return f"<p>{_text(self.text)}</p>"

    def markdown(self) -> str:
        return _marked(self.text)


class Statement(NamedTuple):
    """A claim (`may` is True), or the reason why nothing may be claimed (`may` is False)."""

    label: str
    figure: str
    text: str
    may: bool

    def html(self) -> str:
        label, figure, text = map(_text, self[:3])
        return f'<div class="claim{"" if self.may else " stop"}"><b>{label}</b><strong>{figure}</strong>{text}</div>'

    def markdown(self) -> str:
        label, figure, text = map(_marked, self[:3])
        return f"> {label}\n>\n> **{figure}**\n>\n> {text}"


class Items(NamedTuple):
    texts: Sequence[str]

    def html(self) -> str:
        return "<ul>" + "".join(f"<li>{_text(text)}</li>" for text in self.texts) + "</ul>"

    def markdown(self) -> str:
        return "\n".join(f"- {_marked(text)}" for text in self.texts)


class Facts(NamedTuple):
    pairs: Sequence[tuple[str, str]]  # (name, value)

    def html(self) -> str:
        return "<dl>" + "".join(f"<dt>{_text(a)}</dt><dd>{_text(b)}</dd>" for a, b in self.pairs) + "</dl>"

    def markdown(self) -> str:
        return "\n".join(f"- {_marked(a)}: {_marked(b)}" for a, b in self.pairs)


class Rows(NamedTuple):
    """A table; `stop` holds the numbers of the rows that must not be claimed."""

    caption: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    stop: frozenset[int] = frozenset()

    def html(self) -> str:
        head = "".join(f"<th>{_text(name)}</th>" for name in self.header)
        body = ""
        for number, row in enumerate(self.rows):
            mark = ' class="stop"' if number in self.stop else ""
            body += f"<tr{mark}>" + "".join(f"<td>{_text(cell)}</td>" for cell in row) + "</tr>"
        return (
            f'<p class="note">{_text(self.caption)}</p><div class="wide"><table><thead><tr>{head}</tr></thead>'
            f"<tbody>{body}</tbody></table></div>"
        )

    def markdown(self) -> str:
        lines = [f"| {' | '.join(_marked(cell) for cell in row)} |" for row in (self.header, *self.rows)]
        lines.insert(1, f"| {' | '.join(['---'] * len(self.header))} |")
        return f"{_marked(self.caption)}\n\n" + "\n".join(lines)


class Picture(NamedTuple):
    """An SVG from this package, a description for readers who cannot see it, and a caption."""

    svg: str
    description: str
    caption: str

    def html(self) -> str:
        named = self.svg.replace('role="img"', f'role="img" aria-label="{_plain(self.description)}"', 1)
        return f"<figure>{named}<figcaption>{_text(self.caption)}</figcaption></figure>"

    def markdown(self) -> str:
        return f"{_marked(self.caption)}\n\n{_marked(self.description)}"


class Code(NamedTuple):
    lines: Sequence[str]

    def html(self) -> str:
        return "<pre>" + escape("\n".join(self.lines)) + "</pre>"

    def markdown(self) -> str:
        return "\n".join(f"    {line}" for line in self.lines)


class Blanks(NamedTuple):
    """Lines to be filled in by hand."""

    names: Sequence[str]

    def html(self) -> str:
        return '<div class="blanks">' + "".join(f"<span>{_text(name)}</span>" for name in self.names) + "</div>"

    def markdown(self) -> str:
        return "\n\n".join(f"{_marked(name)}: {'.' * 40}" for name in self.names)


Block = Heading | Paragraph | Statement | Items | Facts | Rows | Picture | Code | Blanks


def _text(text: str) -> str:
    """Write plain text as HTML in which numbers such as 1e-05 stay on one line."""
    return re.sub(r"\d[\d.]*e-\d+", r'<span class="n">\g<0></span>', _plain(text))


def _plain(text: str) -> str:
    """Write plain text as HTML that may stand in an attribute or a title."""
    return escape(text.replace("<=", "≤").replace(" %", "\u00a0%"))


def _marked(text: str) -> str:
    """Write plain text as Markdown. Escape what Markdown or HTML would read as markup or as a link."""
    return escape(re.sub(r"([\\`*_\[\]|~#]|:(?=//)|(?<=www)\.)", r"\\\1", text.replace("<=", "≤")), quote=False)
