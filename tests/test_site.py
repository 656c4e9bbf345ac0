"""The site: names are documented, links lead somewhere, tutorials run.  Sphinx is not needed."""

import pathlib
import subprocess
import sys

import pytest

import jaxacct
from jaxacct.site import build, docstrings, links, names, reference, sources, tutorials

ROOT = pathlib.Path(jaxacct.__file__).parent.parent


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """The sources of the site, with the tutorials as they are."""
    folder = tmp_path_factory.mktemp("sources")
    sources.write(folder, run=None)
    return folder


# Names


def test_every_public_name_and_member_has_a_docstring():
    assert names.undocumented() == []


def test_every_public_name_has_a_page_or_shares_one(tree):
    """Names are listed here by another route: the literal `__all__` of each package."""
    from test_front_door import PACKAGES, public

    listed = {f"{package}.{name}" for package in PACKAGES for name in public(package)}
    assert set(names.homes()) == listed
    for home in names.homes().values():
        page = tree / "reference" / reference.path_of(home)
        assert f"# {home.full}\n" in page.read_text()
    paths = [str(path.relative_to(tree)).lower() for path in tree.rglob("*.md")]
    assert len(paths) == len(set(paths)), "two pages whose names differ in case only"


def test_a_name_without_a_docstring_is_found(monkeypatch):
    def bare():
        pass

    class Bare:
        """A class with a bare method."""

        __module__ = "jaxacct.somewhere"

        def method(self):
            pass

    found = tuple(names.PublicName("jaxacct", value.__name__, value) for value in (bare, Bare))
    monkeypatch.setattr(names, "public_names", lambda: found)
    monkeypatch.setattr(names, "homes", names.homes.__wrapped__)
    assert names.undocumented() == ["jaxacct.bare", "jaxacct.Bare.method"]


@pytest.mark.slow
def test_what_needs_a_package_that_is_not_installed_is_read_and_forgotten():
    """Run apart, since it hides a package."""
    code = (
        "import sys\n"
        "class Hidden:\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        if name.startswith('dp_accounting'):\n"
        "            raise ModuleNotFoundError(name, name=name)\n"
        "sys.meta_path.insert(0, Hidden())\n"
        "from jaxacct.site import names\n"
        "names.packages = lambda: ['jaxacct', 'jaxacct.interop']\n"
        "import jaxacct.interop, jaxacct.mechanisms\n"
        "kept = jaxacct.mechanisms.Gaussian\n"
        "one = names.loaded('jaxacct.interop', 'CertifiedAccountant')\n"
        "assert one.needs == 'dp_accounting' and 'certified upper ends' in one.doc, one\n"
        "from jaxacct import interop\n"
        "assert jaxacct.mechanisms.Gaussian is kept and not any('dp_accounting' in name for name in sys.modules)\n"
        "try:\n    interop.CertifiedAccountant()\nexcept ModuleNotFoundError as error:\n    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert "needs the package dp-accounting" in done.stdout, done.stderr


def test_no_page_speaks_of_a_name_that_is_not_there(tmp_path, monkeypatch):
    assert sources.unknown_names() == []
    (tmp_path / "one.md").write_text("`ja.epsilom(run, 1e-5)` and `ja.epsilon`")
    monkeypatch.setattr(sources, "OWN", tmp_path)
    monkeypatch.setattr(sources, "ROOT", tmp_path)
    monkeypatch.setattr(sources, "repository_pages", list)
    assert sources.unknown_names() == ["one.md: ja.epsilom is no public name"]


# Docstrings


def test_a_docstring_as_markdown():
    doc = (
        "Summary with a < b.\n\nParameters\n----------\nx, y : float\n    Two numbers.\nz : {1, 2}\n\n"
        "Returns\n-------\nBounds\n\nAfterwards ``code``.\n\n    a formula\n\n>>> 1 + 1\n2"
    )
    text = docstrings.markdown(doc)
    assert "Summary with a \\< b." in text
    assert "**`x`**, **`y`** : float\n: Two numbers." in text
    assert "**`z`**\n: {1, 2}" in text
    assert ":::{rubric} Returns\n:::\n\nBounds" in text
    assert "Afterwards `code`." in text
    assert "```text\na formula\n```" in text
    assert "```pycon\n>>> 1 + 1\n2\n```" in text


def test_public_names_and_cited_pages_become_links():
    text = reference.linked("`ja.epsilon(run, 1e-5)`, `training.Plan`, `other`, [`ja.delta`](x.md)", page="a.md")
    assert text == (
        "{py:obj}`ja.epsilon(run, 1e-5) <jaxacct.epsilon>`, {py:obj}`training.Plan <jaxacct.training.Plan>`, "
        "`other`, [`ja.delta`](x.md)"
    )
    cited = reference.linked("see jaxacct/kernels/README.md.", page="reference/jaxacct/epsilon.md")
    assert cited == "see [jaxacct/kernels/README.md](../../jaxacct/kernels/README.md)."


# Links


def test_every_link_of_the_sources_leads_somewhere(tree):
    assert links.markdown_complaints(tree) == []
    assert len(list(tree.rglob("*.md"))) > 200


def test_a_broken_link_of_the_sources_is_found(tmp_path):
    (tmp_path / "a.md").write_text(
        "# A title, with `code`\n[x](b.md#none) [y](c.md) [z](#a-title-with-code) [w](https://example.org/x)\n"
        "```python\n[in code](nowhere.md)\n```\n`[in code](nowhere.md)` ![picture](p.png)\n"
    )
    (tmp_path / "b.md").write_text("# B\n## B\n[back](a.md#a-title-with-code) [second](#b-1)")
    assert links.markdown_complaints(tmp_path) == [
        "a.md: the link to b.md#none leads to no heading",
        "a.md: the link to c.md leads to no file",
        "a.md: the link to p.png leads to no file",
    ]


def test_a_broken_link_of_the_built_site_is_found(tmp_path):
    (tmp_path / "index.html").write_text(
        '<link rel="stylesheet" href="https://cdn.example/x.css"><script src="here.js"></script>'
        '<a href="b.html#there">1</a><a href="b.html#nowhere">2</a><a href="c.html">3</a><a href="#">4</a>'
    )
    (tmp_path / "b.html").write_text('<p id="there"><a href="https://example.org">out</a>')
    assert links.html_complaints(tmp_path) == [
        "index.html loads https://cdn.example/x.css from the network",
        "index.html: b.html#nowhere leads to no anchor",
        "index.html: c.html leads to no file",
        "index.html: here.js leads to no file",
    ]


# Tutorials


def test_the_first_tutorial_runs(tmp_path):
    first = sources.tutorial_pages()[0]
    text = tutorials.run(first, tmp_path / "pictures", ROOT)
    assert "Bounds(6.18771239 in [6.1877123, 6.18771249], certified, ok, contour)" in text
    assert "<!-- check" not in text and len(list((tmp_path / "pictures").glob("*.png"))) == 1


def test_the_front_page_lists_every_tutorial():
    front = (ROOT / "jaxacct/site/pages/index.md").read_text()
    missing = [page.name for page in sources.tutorial_pages() if f"(examples/tutorials/{page.name})" not in front]
    assert missing == []


def filled(tmp_path, text):
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
    assert build.main(["--out", str(tmp_path)]) == 1
    assert "is there, and is no site" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "sphinx.application", None)
    assert build.main(["--out", str(tmp_path / "new")]) == 1
    assert 'pip install ".[docs]"' in capsys.readouterr().err


@pytest.mark.slow  # runs all tutorials and writes 350 pages
def test_the_site_is_built(tmp_path):
    pytest.importorskip("furo")
    pytest.importorskip("myst_parser")
    build.build(tmp_path / "site")
    assert "certified bracket" in (tmp_path / "site" / "reference" / "jaxacct" / "epsilon.html").read_text()
