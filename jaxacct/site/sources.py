"""The sources of the site as one folder of Markdown: pages of the repository, pages of its own, and the reference.

The folder is laid out as the repository is, so that relative links between pages, pictures and files hold as they
stand.  What a page links to is copied beside it.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import unquote, urlsplit

from jaxacct.site import reference, tutorials
from jaxacct.site.links import LINK, outside_code
from jaxacct.site.names import homes
from jaxacct.site.reference import ROOT

__all__ = ["unknown_names", "write"]

OWN = Path(__file__).parent / "pages"
"""The pages that are written for the site: the front page, which question is which call, and the words."""
PROJECT = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")
ABOUT = Path("jaxacct/site/README")
"""The page about the site itself, which is no page of proofs."""


def tutorial_pages() -> list[Path]:
    """The tutorials, in their order."""
    return sorted((ROOT / "examples" / "tutorials").glob("*.md"))


def repository_pages() -> list[Path]:
    """Pages of the repository that the site shows, relative to it: proofs first, then examples, then the project's."""
    found = [
        path.relative_to(ROOT)
        for folder in ("jaxacct", "examples")
        for path in sorted((ROOT / folder).rglob("README.md"))
    ]
    return [*found, *map(Path, PROJECT)]


def write(folder: Path, run: Callable[[Path, Path, Path], str] | None = tutorials.run) -> None:
    """Write the sources of the site.

    folder : an empty folder.
    run : what runs a tutorial, given it, the folder of its pictures and the checkout; None copies them as they are.
    """
    for page in repository_pages():
        copy(ROOT / page, folder / page, with_names((ROOT / page).read_text(), page))
        for linked in linked_files(ROOT / page):
            copy(linked, folder / linked.relative_to(ROOT))
    for page in sorted(OWN.glob("*.md")):
        text = with_names(page.read_text(), Path(page.name)).replace("<!-- contents -->", contents())
        copy(page, folder / page.name, text)
    for page in tutorial_pages():
        goal = folder / page.relative_to(ROOT)
        text = run(page, goal.parent / "pictures", ROOT) if run else page.read_text()
        copy(page, goal, with_names(text, page.relative_to(ROOT)))
    for name, text in reference.pages().items():
        path = folder / "reference" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def copy(source: Path, goal: Path, text: str | None = None) -> None:
    """A file, or the text that stands for it, in the folder of the site."""
    goal.parent.mkdir(parents=True, exist_ok=True)
    if text is None:
        shutil.copyfile(source, goal)
    else:
        goal.write_text(text)


def with_names(text: str, page: Path) -> str:
    """The text of a page, its public names and the pages it cites linked, except in headings and code.

    page : where it will stand, below the folder of the site's sources.
    """
    lines, code = [], False
    for line in text.splitlines():
        code ^= line.lstrip().startswith("```")
        plain = code or line.startswith(("#", "    ")) or line.count("`") % 2
        lines.append(line if plain else reference.linked(line, page=str(page)))
    return "\n".join(lines) + "\n"


def linked_files(page: Path) -> Iterator[Path]:
    """The files of the repository, other than pages, that a page links to or shows."""
    for target in LINK.findall(outside_code(page.read_text())):
        parts = urlsplit(target)
        if not (parts.scheme or parts.netloc) and parts.path and not parts.path.endswith(".md"):
            path = (page.parent / unquote(parts.path)).resolve()
            if path.is_file() and path.is_relative_to(ROOT):
                yield path


def contents() -> str:
    """The tree of all pages, for the side bar."""
    pages = [path.with_suffix("") for path in repository_pages()]
    groups = {
        "Tutorials": [str(page.relative_to(ROOT).with_suffix("")) for page in tutorial_pages()],
        "Look up": ["questions", "glossary", "reference/index"],
        "Proofs": [f"{room(page)} <{page}>" for page in pages if page.parts[0] == "jaxacct" and page != ABOUT],
        "Examples": [str(page) for page in pages if page.parts[0] == "examples"],
        "Project": ["README <README>", "Contributing <CONTRIBUTING>", "Changelog <CHANGELOG>", f"This site <{ABOUT}>"],
    }
    return "\n\n".join(
        "\n".join([f"```{{toctree}}\n:hidden:\n:caption: {caption}\n", *entries, "```"])
        for caption, entries in groups.items()
    )


def room(page: Path) -> str:
    """What a page of proofs is called in the side bar: its folder; the page of the package has a title of its own."""
    return "/".join(page.parts[1:-1]) or tutorials.title((ROOT / page).with_suffix(".md").read_text())


def unknown_names() -> list[str]:
    """Names of the form `ja.NAME` in pages that are no public names, one line each."""
    known = {full.removeprefix("jaxacct.") for full in homes() if full.count(".") == 1}
    found = []
    for page in [*(ROOT / page for page in repository_pages()), *sorted(OWN.glob("*.md")), *tutorial_pages()]:
        named = set(re.findall(r"(?<![\w.])ja\.([A-Za-z_]\w*)", page.read_text()))
        found += [f"{page.relative_to(ROOT)}: ja.{name} is no public name" for name in sorted(named - known)]
    return found
