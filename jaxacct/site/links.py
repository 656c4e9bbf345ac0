"""Links: what is wrong with those of a tree of Markdown pages, and with those of a site of HTML pages."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

__all__ = ["anchors", "html_complaints", "markdown_complaints", "outside_code"]

LINK = re.compile(r"\]\(<?([^)<>\s]+)>?(?: \"[^\"]*\")?\)")
FENCE = re.compile(r"^( *)(`{3,}|:{3,})(.*)$")


def outside_code(text: str) -> str:
    """Markdown with the lines of fenced code and the insides of code spans left empty; directives are kept."""
    lines, closing = [], ""
    for line in text.splitlines():
        fence = FENCE.match(line)
        if closing:
            closing = "" if fence and fence[2] == closing and not fence[3].strip() else closing
            lines.append("")
        elif fence and fence[2][0] == "`" and not fence[3].startswith("{py:"):
            closing = fence[2]
            lines.append("")
        else:
            lines.append(re.sub(r"`[^`]*`", "``", line))
    return "\n".join(lines)


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as GitHub and MyST name them."""
    found: set[str] = set()
    plain = re.sub(r"^ *```.*?^ *```", "", text, flags=re.DOTALL | re.MULTILINE)
    for heading in re.findall(r"^#+ (.*)$", plain, re.MULTILINE):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").strip()
        slug = base = re.sub(r"[^\w\- ]", "", words.lower()).replace(" ", "-")
        number = 0
        while slug in found:
            number += 1
            slug = f"{base}-{number}"
        found.add(slug)
    return found


def markdown_complaints(root: Path) -> list[str]:
    """Every relative link of the pages below a folder that leads nowhere, one line each."""
    found = []
    for page in sorted(root.rglob("*.md")):
        for target in LINK.findall(outside_code(page.read_text())):
            parts = urlsplit(target)
            if parts.scheme or parts.netloc:
                continue
            path = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            where = f"{page.relative_to(root)}: the link to {target}"
            if not path.is_file():
                found.append(f"{where} leads to no file")
            elif parts.fragment and path.suffix == ".md" and parts.fragment not in anchors(path.read_text()):
                found.append(f"{where} leads to no heading")
    return found


class _Page(HTMLParser):
    """The anchors, the links and the loaded files of one HTML page."""

    def __init__(self) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.anchors |= {given[name] for name in ("id", "name") if name in given}
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        if tag == "link" and given.get("rel") in ("stylesheet", "icon", "preload", "preconnect"):
            self.loaded.append(given.get("href", ""))
        if tag in ("script", "img", "iframe", "source") and given.get("src"):
            self.loaded.append(given["src"])


def html_complaints(site: Path) -> list[str]:
    """Every link of a built site that leads nowhere, anchors too, and every file that a page loads from elsewhere."""
    pages: dict[Path, _Page] = {}
    for path in sorted(site.rglob("*.html")):
        pages[path.resolve()] = page = _Page()
        page.feed(path.read_text())
    found = []
    for path, page in pages.items():
        name = path.relative_to(site.resolve())
        found += [f"{name} loads {one} from the network" for one in page.loaded if urlsplit(one).netloc]
        local = [one for one in page.loaded if not urlsplit(one).netloc and not one.startswith("data:")]
        for target in {*page.links, *local}:
            parts = urlsplit(target)
            if parts.scheme or parts.netloc:
                continue
            goal = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if not goal.is_file():
                found.append(f"{name}: {target} leads to no file")
            elif parts.fragment and goal in pages and unquote(parts.fragment) not in pages[goal].anchors | {"top"}:
                found.append(f"{name}: {target} leads to no anchor")
    return sorted(found)
