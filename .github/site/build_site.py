"""Build the site with Sphinx: reference, tutorials, proofs and glossary of this repository in HTML.

`python .github/site/build_site.py --out FOLDER` runs in a checkout.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import os
import pkgutil
import shutil
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
"""The root folder of the checkout, whose package is documented, whatever is installed."""
sys.path.insert(0, str(ROOT))

import tutorials  # noqa: E402

import jaxacct  # noqa: E402
from jaxacct.core.progress import say  # noqa: E402

FOLDERS = ("jaxacct", "examples", "benchmarks", "tests", ".github/site")
"""Folders that are copied along with the files at the top, so that links between pages and files hold unchanged."""


def main() -> int:
    """Build the site and return the exit status, which is not 0 if Sphinx has warned or a tutorial has raised."""
    parser = argparse.ArgumentParser(
        prog="python .github/site/build_site.py",
        description="Build the site: reference, tutorials (which are run), proofs, glossary. Fails on a link that "
        'leads nowhere and a tutorial that raises. Needs pip install ".[docs]".',
    )
    parser.add_argument("--out", default="site", help="the folder to write, which is replaced (default: site)")
    parser.add_argument("--builder", default="html", help="of Sphinx: html (default), or linkcheck")
    options = parser.parse_args()
    out = Path(options.out)
    if out.exists() and not (out / "index.html").is_file() and any(out.iterdir()):
        print(f"{out} is there, and is no site; give another folder to --out, or remove it", file=sys.stderr)
        return 1
    try:
        from sphinx.cmd.build import build_main
    except ModuleNotFoundError as error:
        print(f'the package {error.name} is missing; pip install ".[docs]"', file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as folder:
        source, site = Path(folder) / "source", Path(folder) / "site"
        try:
            write(source, run=options.builder == "html")
        except tutorials.TutorialError as error:
            print(error, file=sys.stderr)
            return 1
        words = ["-b", options.builder, "-q", "-W", "--keep-going", "-c", str(HERE), str(source), str(site)]
        status = build_main(words)
        if status == 0:
            shutil.rmtree(out, ignore_errors=True)
            shutil.copytree(site, out)
            print(f"open {out / 'index.html'}")
    return int(status)


def write(source: Path, run: bool = True) -> None:
    """Write the sources of the site into a new folder that has the layout of the repository.

    `run` says whether to run the tutorials; otherwise they are copied unchanged.
    """
    source.mkdir()
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy(path, source)
    for name in FOLDERS:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(HERE / "pages", source, dirs_exist_ok=True)
    for page in sorted((source / "examples" / "tutorials").glob("*.md")) if run else ():
        begin = time.monotonic()
        say(f"tutorial: {page.name}")
        page.write_text(tutorials.run(page, page.parent / "pictures", ROOT))
        say(f"tutorial: {page.name} {time.monotonic() - begin:.0f} s")
    reference = source / "reference"
    reference.mkdir()
    for package in packages():
        (reference / f"{package}.rst").write_text(package_page(package))
    (reference / "command_line.md").write_text(command_line())


def packages() -> list[str]:
    """Return `jaxacct` and its packages with public names, without `jaxacct.cli`, whose page is made from the help."""
    found = [f"jaxacct.{m.name}" for m in pkgutil.iter_modules(jaxacct.__path__) if m.ispkg and m.name != "cli"]
    return ["jaxacct", *(name for name in sorted(found) if getattr(importlib.import_module(name), "__all__", []))]


def package_page(package: str) -> str:
    """Return the page of a package: a list of its public names, then the docstrings of those that `jaxacct` lacks."""
    module = importlib.import_module(package)
    names = [name for name in module.__all__ if callable(getattr(module, name))]
    known = [name for name in names if package != "jaxacct" and getattr(module, name) is vars(jaxacct).get(name)]
    listed = "".join(f"   {'jaxacct.' if name in known else ''}{name}\n" for name in names)
    return (
        f"{package}\n{'=' * len(package)}\n\n.. currentmodule:: {package}\n\n"
        f".. autosummary::\n   :nosignatures:\n\n{listed}\n"
        f".. automodule:: {package}\n   :members:\n   :exclude-members: {', '.join(known)}\n"
    )


def command_line() -> str:
    """Return a page with the output of `jaxacct --help` and `jaxacct COMMAND --help`, 100 columns wide."""
    arguments = importlib.import_module("jaxacct.cli.arguments")
    os.environ |= {"COLUMNS": "100", "NO_COLOR": "1"}
    page = "# The command line\n\nWhat `jaxacct --help` and `jaxacct COMMAND --help` print.\n"
    for name in ("", *arguments.COMMANDS):
        with contextlib.redirect_stdout(io.StringIO()) as text, contextlib.suppress(SystemExit):
            arguments.parse([name, "--help"] if name else ["--help"])
        page += f"\n## {f'jaxacct {name}'.strip()}\n\n```text\n{text.getvalue().rstrip()}\n```\n"
    return page


if __name__ == "__main__":
    sys.exit(main())
