"""jaxacct/README.md: its code runs, its numbers are right, and its figure shows the rooms of test_imports.py."""

import doctest
import pathlib
import re
import xml.etree.ElementTree as ElementTree

import pytest
from test_imports import ARROWS, FOUNDATIONS

import jaxacct
from jaxacct.accounting.dispatch import ENGINES

FOLDER = pathlib.Path(jaxacct.__file__).parent
PAGE = (FOLDER / "README.md").read_text()
ADDED = dict(re.findall(r"^### (.+?)\n(.*?)(?=^##|\Z)", PAGE.split("## How to add")[1], re.DOTALL | re.MULTILINE))
"""The sections under "How to add", by title."""
MODULE = "jaxacct_readme"
"""The module that the code of the page is run as."""
NEW = {"mechanisms/student_t.py"}
"""Files that a reader would make."""


@pytest.fixture
def engines():
    """The list of engines. After the test the page's engines are removed; engines of other modules stay."""
    yield ENGINES
    ENGINES[:] = [engine for engine in ENGINES if type(engine).__module__ != MODULE]


def blocks(language, text):
    """The blocks of code in a text, without the indentation of a list."""
    found = re.findall(rf"^( *)```{language}\n(.*?)^ *```$", text, re.DOTALL | re.MULTILINE)
    return [re.sub(rf"^{indent}", "", code, flags=re.MULTILINE) for indent, code in found]


def test_the_sections():
    assert list(ADDED) == ["A mechanism", "An engine", "A law of K", "A sampler"]


@pytest.mark.parametrize("title", ADDED)
def test_what_is_added_works_and_has_a_test(title, engines):
    made, test = blocks("python", ADDED[title])
    names = {"__name__": MODULE}
    exec(compile(made, f"README.md, {title}", "exec"), names)
    before = set(names)
    exec(compile(test, f"README.md, {title}, test", "exec"), names)
    tests = [name for name in set(names) - before if name.startswith("test_")]
    assert len(tests) == 1
    names[tests[0]]()


def test_an_engine_of_the_page_does_not_stay():
    assert {engine.name for engine in ENGINES} >= {"closed_form", "contour", "lattice"}
    assert "one_laplace" not in {engine.name for engine in ENGINES}


def test_the_numbers_on_the_way():
    code = "\n".join(blocks("pycon", PAGE))
    test = doctest.DocTestParser().get_doctest(code, {}, "README.md", None, None)
    found = doctest.DocTestRunner().run(test)
    assert found.attempted >= 5 and found.failed == 0


def test_every_file_and_function_on_the_page_exists():
    """Every path in code is a file. Names in code right after a path, separated by commas, are defined in that file."""
    prose = re.sub(r" *```.*?```", "", PAGE, flags=re.DOTALL)
    for path in re.findall(r"`([\w/]+(?:\.py|/))`", prose):
        assert any((base / path).exists() for base in (FOLDER, FOLDER.parent)) or path in NEW or _somewhere(path), path
    for path, rest in re.findall(r"`([\w/]+\.py)`, ((?:`\w+`(?:, | and |))+)", prose):
        text = "".join(found.read_text() for found in FOLDER.rglob(pathlib.Path(path).name))
        text += (FOLDER.parent / path).read_text() if (FOLDER.parent / path).is_file() else ""
        for name in re.findall(r"`(\w+)`", rest):
            assert re.search(rf"(def|class) {name}\b|^{name}\b", text, re.MULTILINE), f"{name} in {path}"


def _somewhere(path):
    """Return whether `path` is a file name without a folder, and a file of that name stands in the package."""
    return "/" not in path and any(FOLDER.rglob(path))


def reduced(graph):
    """The arrows of a graph without circles, less each arrow that a path of two or more arrows replaces."""
    reached = {}
    for node, targets in graph.items():
        reached[node] = targets.union(*(reached[target] for target in targets))
    return {(a, b) for a, targets in graph.items() for b in targets if not any(b in reached[c] for c in targets)}


def test_the_figure_shows_the_rooms_and_arrows():
    """Each arrow of the figure has a title such as "engines imports kernels"; a room's name is a text of its own."""
    tree = ElementTree.parse(FOLDER / "rooms.svg")
    spaced = "{http://www.w3.org/2000/svg}"
    drawn = {tuple(x.text.split(" imports ")) for x in tree.iter(f"{spaced}title") if " imports " in x.text}
    graph = {name: targets - FOUNDATIONS for name, targets in ARROWS.items() if name not in FOUNDATIONS}
    assert drawn == reduced(graph)
    texts = [text.text for text in tree.iter(f"{spaced}text")]
    assert set(graph) <= set(texts)
    (foundations,) = [text.removeprefix("Foundations: ") for text in texts if text.startswith("Foundations: ")]
    assert set(foundations.split(", ")) == FOUNDATIONS
