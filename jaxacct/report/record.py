"""Report: what a page says, ready to be written as HTML or Markdown."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from jaxacct.core.files import replacing
from jaxacct.core.validation import InputError, shown
from jaxacct.report.blocks import Block
from jaxacct.report.claim import Claim
from jaxacct.report.html import html
from jaxacct.report.markdown import markdown
from jaxacct.report.readings import Readings

__all__ = ["ENDINGS", "Report", "page_path"]

ENDINGS = (".html", ".htm", ".md")
"""How the name of a page may end."""


@dataclass(frozen=True, eq=False)
class Report:
    """A page on one or several privacy claims; made by `jaxacct.report.report`.

    Every figure on the page that a claim relies on is the upper end of a bracket, which the fields hold:

        epsilon <= claims[k].upper at delta = claims[k].given.

    Parameters
    ----------
    title : str
    claims : tuple of Claim
        Those that the page states in detail.
    readings : tuple of Readings or None
        The risks of each claim; None where there are none.
    blocks : tuple
        The pieces of the page, in order.
    rows_not_claimed : int
        Rows of the page's table that are not to be claimed.

    References
    ----------
    jaxacct/report/README.md.

    >>> import jaxacct as ja
    >>> from jaxacct.report import report
    >>> page = report(ja.Gaussian(2.0), delta=1e-5)
    >>> page.claims[0].may_be_claimed, "# Privacy report" in page.to_markdown(), "<script" in page.to_html()
    (True, True, False)
    """

    title: str
    claims: tuple[Claim, ...]
    readings: tuple[Readings | None, ...]
    blocks: tuple[Block, ...]
    rows_not_claimed: int = 0

    @property
    def may_all_be_claimed(self) -> bool:
        """Whether everything that the page shows, its table of rows included, may be claimed."""
        return self.rows_not_claimed == 0 and all(claim.may_be_claimed for claim in self.claims)

    def to_html(self) -> str:
        """The page as one HTML file, without scripts and without anything from elsewhere."""
        return html(self.title, self.blocks)

    def to_markdown(self) -> str:
        """The page as Markdown, without the picture."""
        return markdown(self.blocks)

    def write(self, out: str | os.PathLike[str]) -> None:
        """Write the page, as HTML or Markdown by the ending of its name; InputError where that cannot be."""
        path = page_path(out)
        text = self.to_markdown() if path.suffix.lower() == ".md" else self.to_html()
        with replacing(path) as temporary:
            temporary.write_text(text, encoding="utf-8")


def page_path(out: object) -> Path:
    """The path of a page; InputError for what is no path, has another ending or is a folder."""
    if not isinstance(out, str | os.PathLike) or not os.fspath(out):
        raise InputError(f"out = {shown(out)} must be the path of a file; name the page, such as 'report.html'")
    path = Path(os.fsdecode(out))
    if path.suffix.lower() not in ENDINGS:
        raise InputError(f"{path}: a report must end in {', '.join(ENDINGS)}")
    if path.is_dir():
        raise InputError(f"{path}: cannot be written: it is a folder")
    return path
