"""The site: its pages name what is there, and tutorials run.  Sphinx is needed by the slow test alone."""

import pathlib
import re
import sys

import build_site as site
import pytest
import tutorials
from test_front_door import PACKAGES, public

import jaxacct

ROOT = pathlib.Path(jaxacct.__file__).parent.parent
TUTORIALS = sorted((ROOT / "examples" / "tutorials").glob("*.md"), key=lambda page: int(page.name.split("_")[0]))


def test_every_package_has_a_page_that_lists_its_names():
    assert set(site.packages()) == set(PACKAGES)
    for package in PACKAGES:
        page = site.package_page(package)
        for name in public(package):
            if callable(getattr(sys.modules[package], name)):
                assert re.search(rf"^   (jaxacct\.)?{name}$", page, re.MULTILINE), name


def test_the_sources_lie_as_in_the_repository(tmp_path):
    site.write(tmp_path / "source", run=False)
    for page in ("index.md", "glossary.md", "README.md", "jaxacct/kernels/README.md", "reference/jaxacct.sweeps.rst"):
        assert (tmp_path / "source" / page).is_file()
    assert "## jaxacct sweep\n" in (tmp_path / "source" / "reference" / "command_line.md").read_text()


def test_no_page_speaks_of_a_name_that_is_not_there():
    folders = ("jaxacct", "examples", ".github/site")
    pages = [*ROOT.glob("*.md"), *(page for name in folders for page in (ROOT / name).rglob("*.md"))]
    assert len(pages) > 30
    for page in pages:
        named = set(re.findall(r"(?<![\w.])ja\.([A-Za-z_]\w*)", page.read_text()))
        assert named <= set(jaxacct.__all__), (page, named - set(jaxacct.__all__))


# Tutorials


def no_figures():
    """Close what other tests of this process may have left."""
    from matplotlib import pyplot  # takes a second, by which it would delay the collection of tests

    pyplot.close("all")


def test_the_first_tutorial_runs(tmp_path):
    """The tutorial runs in this process; the build of the site starts a process for each tutorial."""
    no_figures()
    (tmp_path / "pictures").mkdir()
    text = tutorials.filled(TUTORIALS[0], tmp_path / "pictures")
    assert "Bounds(6.18771239 in [6.18771229, 6.18771249], certified, ok, contour)" in text
    assert "<!-- check" not in text and len(list((tmp_path / "pictures").glob("*.png"))) == 1


def test_the_front_page_lists_every_tutorial():
    front = (ROOT / ".github/site/pages/index.md").read_text()
    missing = [page.name for page in TUTORIALS if f"(examples/tutorials/{page.name})" not in front]
    assert missing == []


def filled(tmp_path, text):
    no_figures()
    page = tmp_path / "page.md"
    page.write_text(text)
    return tutorials.filled(page, tmp_path)


def test_what_a_block_prints_stands_below_it(tmp_path):
    text = filled(
        tmp_path,
        "```python\nx = 2\nprint(x)\nx + 1\n```\n```python not run\n1 / 0\n```\n```python\nNone\n```\n"
        "<!-- check: x == 2 -->\n```bash\necho hello\n```\n",
    )
    assert text.count(":class: output") == 2
    assert ":class: output\n\n2\n3\n```" in text and ":class: output\n\nhello\n```" in text
    assert "```python\n1 / 0\n```" in text and "check" not in text


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("# T\n\n```python\n1 / 0\n```\n", "block 1, line 3: ZeroDivisionError"),
        ("```python\nx = 1\n```\n<!-- check: x == 2 -->\n", "block 2, line 4: the check is false: x == 2"),
        ("```bash\nexit 3\n```\n", "block 1, line 1: TutorialError: exit status 3"),
    ],
)
def test_a_tutorial_that_raises_or_says_what_is_false_is_refused(tmp_path, text, words):
    with pytest.raises(tutorials.TutorialError, match=words):
        filled(tmp_path, text)


# The command


def test_the_command_refuses_in_words(tmp_path, capsys, monkeypatch):
    (tmp_path / "mine.txt").write_text("")
    monkeypatch.setattr(sys, "argv", ["site", "--out", str(tmp_path)])
    assert site.main() == 1
    assert "is there, and is no site" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "sphinx.cmd.build", None)
    monkeypatch.setattr(sys, "argv", ["site", "--out", str(tmp_path / "new")])
    assert site.main() == 1
    assert 'pip install ".[docs]"' in capsys.readouterr().err


@pytest.mark.slow  # runs all tutorials
def test_the_site_is_built(tmp_path, monkeypatch):
    for package in ("furo", "myst_parser", "sklearn"):
        pytest.importorskip(package)
    monkeypatch.setattr(sys, "argv", ["site", "--out", str(tmp_path / "site")])
    assert site.main() == 0
    page = (tmp_path / "site" / "reference" / "jaxacct.html").read_text()
    assert 'id="jaxacct.epsilon"' in page and "certified bracket" in page
    for page in (tmp_path / "site").rglob("*.html"):  # nothing is loaded from the network
        assert not re.search(r"<(script|img|iframe)[^>]* src=\"https?:|<link[^>]* href=\"https?:", page.read_text())
