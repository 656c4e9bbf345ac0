"""Every page and section that a docstring, a comment or a page of this repository cites exists in this repository.

A citation is a link with an anchor or the path of a Markdown file.  A section may follow the path, by its title in
quotation marks or by its number: `jaxacct/selection/README.md, "Bounds"`.  A path may be relative to the file that
cites, to the repository or to the package.  Pages outside the repository are not for its readers: what is needed of
them belongs here.  Names and files between marks of code exist, too.
"""

import functools
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
FOLDERS = ("jaxacct", "tests", "examples", "benchmarks", ".github/site")
NOT_YET: dict[str, str] = {}
"""Where a citation may still lead nowhere, by the first part of the path, and why."""

PAGE = r"(?<![\w./-])((?:[\w.-]+/)*[\w-]+\.md)(#[\w-]+)?"
AFTER = r"(?: of this folder)?(?:,? (?:section )?\"([^\"]+)\"|,? (?:section )?(\d+(?:\.\d+)*)(?![\w^]))?"
CITATION = re.compile(PAGE + r"(?:\)|`)?" + AFTER)
"""The path, an anchor, and a section by its title or by its number."""
BEFORE = re.compile(r"\"([A-Z][^\"]{3,80})\" (?:in|of) " + PAGE)
"""The title of a section, and the path."""


def files():
    """Every file of the repository that may cite a page."""
    found = [path for folder in FOLDERS for end in ("*.py", "*.md") for path in (ROOT / folder).rglob(end)]
    return sorted([*found, *ROOT.glob("*.md"), *ROOT.glob("*.py")])


def prose(path):
    """What a file says to its readers: a page without its code, or the docstrings and comments of a program."""
    text = path.read_text()
    if path.suffix == ".md":
        return [re.sub(r"```.*?```", "", text, flags=re.DOTALL)]
    if ".md" not in text:
        return []  # it cites nothing
    strings = re.findall(r'^[ \t]*r?"""(.*?)"""', text, flags=re.DOTALL | re.MULTILINE)
    blocks, last = [], -2
    for number, line in enumerate(text.splitlines()):
        if comment := re.search(r"(?:^|\s)#+ (.*)", line):
            words = comment[1]
            blocks[-1:] = [blocks[-1] + " " + words] if number == last + 1 else [*blocks[-1:], words]
            last = number
    return strings + blocks


@functools.cache
def headings(page):
    """Titles of a page as they are, without marks of code."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    return [line.lstrip("#").strip().replace("`", "") for line in text.splitlines() if re.match(r"#+ ", line)]


def anchor(title):
    """The anchor that a title has on the web."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def resolved(path, name):
    """The page that a file means by a path; None where there is none in the repository."""
    for base in (path.parent, ROOT, ROOT / "jaxacct"):
        page = (base / name).resolve()
        if page.is_file() and page.is_relative_to(ROOT):
            return page
    return None


def complaints(path):
    """What is wrong with the citations of a file, one line each."""
    found = []
    for words in prose(path):
        text = re.sub(r"\s+", " ", words)
        cited = [(m[1], m[2], m[3], m[4]) for m in CITATION.finditer(text)]
        cited += [(m[2], m[3], m[1], None) for m in BEFORE.finditer(text)]
        for name, link, title, number in cited:
            page = resolved(path, name)
            if page is None:
                found.append(f"{name} is no page of this repository")
                continue
            titles = headings(page)
            if link and link[1:] not in map(anchor, titles):
                found.append(f"{name} has no section {link}")
            if title and not any(one.lower().startswith(title.lower().replace("`", "")) for one in titles):
                found.append(f"{name} has no section {title!r}")
            if number and not any(re.match(rf"{re.escape(number)}(?!\d)\.?", one) for one in titles):
                found.append(f"{name} has no section {number}")
    return found


def test_every_cited_page_and_section_exists():
    wrong = []
    for path in files():
        name = str(path.relative_to(ROOT))
        if not name.startswith(tuple(NOT_YET)):
            wrong += [f"{name}: {complaint}" for complaint in complaints(path)]
    assert not wrong, "\n".join(wrong)


FOREIGN = {"DeprecationWarning", "jax.make_array_from_process_local_data", "jax_default_prng_impl", "nnx.reseed"}
"""Names of other packages that pages cite, but that no program of this repository uses."""
PARTS = {"_sampling_probability", "reverse_k", "NAME.xxxxxxxx.tmp", "mechanisms/student_t.py"}
"""The end of a name, a name in a formula, a pattern of file names, and a file in an example: none of them exists."""


def names_and_files(page):
    """The files, and the names of four or more characters, that a page puts between marks of code."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for span in re.findall(r"`([^`\n]+)`", text):
        if re.fullmatch(r"[\w./-]+\.(py|md|toml)", span) or re.fullmatch(r"[A-Za-z_][\w.]{3,}", span):
            yield span


def test_names_and_files_in_pages_exist():
    programs = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    words = set(re.findall(r"\w+", "\n".join(path.read_text() for path in [*programs, ROOT / "pyproject.toml"])))
    paths = {str(path.relative_to(ROOT)) for path in files()} | {"pyproject.toml"}
    wrong = []
    for page in (path for path in files() if path.suffix == ".md" and path.name != "CHANGELOG.md"):
        for name in names_and_files(page):
            if re.search(r"\.(py|md|toml)$", name):
                exists = any(f"/{path}".endswith("/" + name.removeprefix("../")) for path in paths)
            else:
                exists = words.issuperset(filter(None, name.split(".")))
            if not exists and name not in FOREIGN | PARTS:
                wrong.append(f"{page.relative_to(ROOT)}: {name}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ('"""As README.md of this folder, "One section", says."""', None),
        ('"""As README.md, section 2, says."""', None),
        ('"""As README.md of this folder,\n"One section", says."""', None),
        ("# See README.md,\n# section 2.", None),
        ('"""As `README.md` says."""\nPAGE = "nowhere.md"', None),
        ('"""As nowhere.md says."""', "nowhere.md is no page of this repository"),
        ("x = 1\t# nowhere.md", "nowhere.md is no page of this repository"),
        ('"""README.md, "Another section"."""', "README.md has no section 'Another section'"),
        ('"""README.md, section 2.1."""', "README.md has no section 2.1"),
        ('"""See ../outside.md."""', "../outside.md is no page of this repository"),
        (
            '"""[link](README.md#one-section-with-more) and [none](README.md#nothing)"""',
            "README.md has no section #nothing",
        ),
        ('"""See "Another section" of README.md."""', "README.md has no section 'Another section'"),
    ],
)
def test_what_is_a_citation(text, complaint, tmp_path, monkeypatch):
    (tmp_path / "outside.md").write_text("")
    (tmp_path / "house").mkdir()
    monkeypatch.setattr(f"{__name__}.ROOT", tmp_path / "house")
    (tmp_path / "house" / "README.md").write_text("# House\n## One section (with more)\n## 2. The second\n")
    (tmp_path / "house" / "program.py").write_text(text)
    assert complaints(tmp_path / "house" / "program.py") == ([complaint] if complaint else [])
