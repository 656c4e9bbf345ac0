"""HTML tables that show results in a notebook. All text is escaped. The colours suit light and dark themes."""

from __future__ import annotations

import html
import itertools
import math
from collections.abc import Callable, Container, Iterable, Sequence

import numpy as np

MOST_ROWS = 10
"""Largest number of rows of a batch that a table shows."""
_ROW = '<tr style="border-bottom:1px solid rgba(128,128,128,.35)">'
_TABLE = "border-collapse:collapse;margin:.3em 0;color:inherit;font-size:inherit;text-align:"
_HEAD = "font-weight:600;white-space:nowrap;text-align:"
_NOTE = "opacity:.75;font-size:90%"


def cut(count: int) -> tuple[range, str]:
    """Return which of `count` rows a table shows, and a line that counts the rows left out ("" if it shows all)."""
    if count <= MOST_ROWS:
        return range(count), ""
    return range(MOST_ROWS), f"{count - MOST_ROWS:,} more rows of {count:,} are not shown"


def table(title: str, head: Sequence[str], rows: Iterable[Sequence[str]], *notes: str) -> str:
    """Return a table with a header line; the notes that are not empty stand below the table."""
    top = "".join(f'<th style="{_HEAD}right">{html.escape(cell)}</th>' for cell in head)
    body = "".join(f"{_ROW}{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    content = f"<thead>{_ROW}{top}</tr></thead><tbody>{body}</tbody>"
    return _framed(title, f"{_TABLE}right;white-space:nowrap", content, notes)


def batch(
    title: str, head: Sequence[str], shape: tuple[int, ...], cells: Callable[[tuple[int, ...]], Sequence[str]]
) -> str:
    """Return a table of the first `MOST_ROWS` elements of a batch; `cells` returns the cells of one element."""
    shown, rest = cut(math.prod(shape))
    places = itertools.islice(np.ndindex(shape), len(shown))
    rows = [[*([", ".join(map(str, index))] if shape else []), *cells(index)] for index in places]
    named = f"{title}, batch of shape {shape}" if shape else title
    return table(named, [*(["index"] if shape else []), *head], rows, rest)


def fields(title: str, pairs: Iterable[tuple[str, str]], *notes: str, code: Container[str] = ()) -> str:
    """Return a table of names and values, one pair a line. Values whose names are in `code` appear in code style."""
    rows = []
    for name, value in pairs:
        shown = html.escape(value)
        shown = f"<code>{shown}</code>" if name in code else shown
        first = f'<th scope="row" style="{_HEAD}left">{html.escape(name)}</th>'
        rows.append(f'{_ROW}{first}<td style="text-align:left">{shown}</td></tr>')
    return _framed(title, f"{_TABLE}left", f"<tbody>{''.join(rows)}</tbody>", notes)


def _framed(title: str, style: str, content: str, notes: Iterable[str]) -> str:
    below = "".join(f'<div style="{_NOTE}">{html.escape(note)}</div>' for note in notes if note)
    opening = f'<div style="overflow-x:auto"><div><strong>{html.escape(title)}</strong></div>'
    return f'{opening}<table cellpadding="4" style="{style}">{content}</table>{below}</div>'
