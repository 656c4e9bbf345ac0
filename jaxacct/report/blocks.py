"""The pieces of a page, without their looks: every text in them is plain, and each renderer escapes it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["Blanks", "Block", "Code", "Facts", "Heading", "Items", "Paragraph", "Picture", "Rows", "Statement"]


class Heading(NamedTuple):
    """A title; level 1 is the page's, 2 a section's, 3 a part's."""

    text: str
    level: int = 2
    new_page: bool = False


class Paragraph(NamedTuple):
    """Running text."""

    text: str


class Statement(NamedTuple):
    """The claim, or why there is none; may : whether it may be claimed."""

    label: str
    figure: str
    text: str
    may: bool


class Items(NamedTuple):
    """A list."""

    texts: Sequence[str]


class Facts(NamedTuple):
    """Names with what they are."""

    pairs: Sequence[tuple[str, str]]


class Rows(NamedTuple):
    """A table.  stop : rows, by number, of which nothing may be claimed."""

    caption: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    stop: frozenset[int] = frozenset()


class Picture(NamedTuple):
    """An SVG of our own, what it shows for those who do not see it, and the words below it."""

    svg: str
    description: str
    caption: str


class Code(NamedTuple):
    """Command lines."""

    lines: Sequence[str]


class Blanks(NamedTuple):
    """Lines to be filled in by hand."""

    names: Sequence[str]


Block = Heading | Paragraph | Statement | Items | Facts | Rows | Picture | Code | Blanks
