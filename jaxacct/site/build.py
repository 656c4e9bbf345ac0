"""The command that builds the site: checks, then tutorials, then Sphinx, then the links of what it wrote."""

from __future__ import annotations

import argparse
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jaxacct
from jaxacct.core.progress import Progress, say
from jaxacct.site import links, names, sources, tutorials

__all__ = ["build", "main"]

STYLE = Path(__file__).parent / "style.css"
SETTINGS: dict[str, Any] = {
    "project": "jaxacct",
    "author": "The jaxacct maintainers",
    "copyright": "The jaxacct maintainers, Apache-2.0",
    "extensions": ["myst_parser", "sphinx.ext.viewcode"],
    "html_theme": "furo",
    "html_title": "jaxacct",
    "html_css_files": ["style.css"],
    "html_copy_source": False,
    "html_show_sphinx": False,
    "html_theme_options": {"navigation_with_keys": True},
    "pygments_style": "tango",
    "highlight_language": "text",
    "smartquotes": False,
    "myst_enable_extensions": ["colon_fence", "deflist"],
    "myst_heading_anchors": 4,
    "python_maximum_signature_line_length": 80,
    "add_module_names": True,
    "toc_object_entries": False,
    "suppress_warnings": ["myst.header", "misc.highlighting_failure"],
}
"""Settings of Sphinx, MyST and the theme.  Nothing is loaded from the network: the theme brings its own files."""

BACK = re.compile(r'(class="viewcode-back" href="[^"#]*)#[^"]*')
"""A link from a source to its page.  viewcode writes the anchors of all names of a module with one package, which is
wrong where two packages export them; every page holds one name, so that its address is enough."""


class SiteError(Exception):
    """The site was not built; the message says why, one line for each reason."""


def main(argv: Sequence[str] | None = None) -> int:
    """Build the site and return the exit status: 0, or 1 where something is wrong with its pages."""
    parser = argparse.ArgumentParser(
        prog="python -m jaxacct.site",
        description="Build the site: reference, tutorials (which are run), proofs, glossary. Fails on a link that "
        "leads nowhere, a public name without a docstring, and a tutorial that raises. "
        'Needs pip install ".[docs]".',
    )
    parser.add_argument("--out", default="site", help="the folder to write, which is replaced (default: site)")
    parser.add_argument("--check", action="store_true", help="check names and links only; write nothing, run nothing")
    options = parser.parse_args(argv)
    try:
        if options.check:
            check()
            print("names and links are in order")
        else:
            build(Path(options.out))
            print(f"open {Path(options.out) / 'index.html'}")
    except SiteError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def check() -> None:
    """SiteError where a public name is undocumented or unknown, or a link of the sources leads nowhere."""
    wrong = [f"{name} has no docstring" for name in names.undocumented()] + sources.unknown_names()
    with tempfile.TemporaryDirectory() as folder:
        sources.write(Path(folder), run=None)
        wrong += links.markdown_complaints(Path(folder))
    if wrong:
        raise SiteError("\n".join(wrong))


def build(out: Path) -> None:
    """Write the site into a folder, in place of what the last build has left there."""
    if out.exists() and not (out / "index.html").is_file() and any(out.iterdir()):
        raise SiteError(f"{out} is there, and is no site; give another folder to --out, or remove it")
    try:
        from sphinx.application import Sphinx
    except ModuleNotFoundError as error:
        raise SiteError(f'the package {error.name} is missing; pip install ".[docs]"') from None
    say("names and links")
    check()
    with tempfile.TemporaryDirectory() as folder:
        source, site = Path(folder) / "source", Path(folder) / "site"
        source.mkdir()
        try:
            sources.write(source, run=_timed)
        except tutorials.TutorialError as error:
            raise SiteError(str(error)) from None
        (source / "_static").mkdir()
        shutil.copyfile(STYLE, source / "_static" / "style.css")
        version = {"version": jaxacct.__version__, "release": jaxacct.__version__}
        settings = SETTINGS | version | {"html_static_path": [str(source / "_static")]}
        app = Sphinx(source, None, site, Path(folder) / "doctrees", "html", settings, status=None, warningiserror=True)
        show_progress(app, len(list(source.rglob("*.md"))))
        app.build()
        if app.statuscode:
            raise SiteError("Sphinx has warned; see above")
        for page in (site / "_modules").rglob("*.html"):
            page.write_text(BACK.sub(r"\1", page.read_text()))
        wrong = links.html_complaints(site)
        if wrong:
            raise SiteError("\n".join(wrong))
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(site, out)


def show_progress(app: Any, pages: int) -> None:
    """Show how many pages Sphinx has read and written; each counts twice."""
    bar, done = Progress(2 * pages, show=True, unit="pages"), iter(range(1, 2 * pages + 1))
    app.connect("source-read", lambda app, name, text: bar.update(next(done)))
    app.connect(
        "html-page-context",
        lambda app, name, *more: bar.update(next(done)) if name in app.env.all_docs else None,
    )
    app.connect("build-finished", lambda app, error: bar.close())


def _timed(page: Path, pictures: Path, root: Path) -> str:
    """`tutorials.run`, with a line that says what is run, and how long it took."""
    say(f"tutorial: {page.name}")
    begin = time.monotonic()
    text = tutorials.run(page, pictures, root)
    say(f"tutorial: {page.name} {time.monotonic() - begin:.0f} s")
    return text
