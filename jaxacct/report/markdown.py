"""A page as Markdown: the same pieces, the picture left out, and every text escaped."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape

from jaxacct.report.blocks import Blanks, Block, Code, Facts, Heading, Items, Paragraph, Picture, Rows, Statement

__all__ = ["markdown"]


def markdown(blocks: Sequence[Block]) -> str:
    """The whole page."""
    return "\n\n".join(_block(block) for block in blocks) + "\n"


def _block(block: Block) -> str:
    match block:
        case Heading(text, level, _):
            return f"{'#' * level} {_text(text)}"
        case Paragraph(text):
            return _text(text)
        case Statement(label, figure, text, _):
            return f"> {_text(label)}\n>\n> **{_text(figure)}**\n>\n> {_text(text)}"
        case Items(texts):
            return "\n".join(f"- {_text(text)}" for text in texts)
        case Facts(pairs):
            return "\n".join(f"- {_text(a)}: {_text(b)}" for a, b in pairs)
        case Rows(caption, header, rows, _):
            lines = [f"| {' | '.join(_text(cell) for cell in row)} |" for row in (header, *rows)]
            lines.insert(1, f"| {' | '.join(['---'] * len(header))} |")
            return f"{_text(caption)}\n\n" + "\n".join(lines)
        case Picture(_, description, caption):
            return f"{_text(caption)}\n\n{_text(description)}"
        case Code(lines):
            return "\n".join(f"    {line}" for line in lines)
        case Blanks(names):
            return "\n\n".join(f"{_text(name)}: {'.' * 40}" for name in names)


def _text(text: str) -> str:
    """Plain text: what Markdown or HTML would take for a sign of its own, or for a link, is escaped."""
    marked = re.sub(r"([\\`*_\[\]|~#]|:(?=//)|(?<=www)\.)", r"\\\1", text.replace("<=", "≤"))
    return escape(marked, quote=False)
