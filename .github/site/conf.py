"""Sphinx's settings for the site.  The site loads nothing from the network: the theme brings its own files."""

import re
from typing import Any

import jaxacct

project = "jaxacct"
author = "The jaxacct maintainers"
copyright = "The jaxacct maintainers, Apache-2.0"
version = release = jaxacct.__version__
extensions = ["myst_parser", *(f"sphinx.ext.{name}" for name in ("autodoc", "autosummary", "napoleon", "viewcode"))]
exclude_patterns = [".github/site/pages", "tests"]
suppress_warnings = ["myst.header", "misc.highlighting_failure", "ref.python", "docutils"]
"""Kinds of warnings to ignore, such as those of docutils about docstrings, which are written as plain text."""
smartquotes = False
highlight_language = "text"
pygments_style = "tango"
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 4

default_role = "py:obj"
autodoc_mock_imports = ["opacus"]
autodoc_typehints = "none"
napoleon_use_rtype = False
autosummary_generate = False
python_maximum_signature_line_length = 80

html_theme = "furo"
html_title = "jaxacct"
html_static_path = ["static"]
html_css_files = ["style.css"]
html_copy_source = False
html_show_sphinx = False
html_theme_options = {"navigation_with_keys": True}
toc_object_entries_show_parents = "hide"

ROOMS = (
    "audit|interop|mechanisms|plots|report|representations|samplers|selection|strategies|sweeps|training|tuning|"
    "verification"
)
NAME = re.compile(rf"```.*?```|(?<![`\[}}])`((?:ja|jaxacct(?:\.\w+)?|{ROOMS})\.)(\w+)([^`<>|\n]*)`(?!`)", re.DOTALL)
"""Pattern that matches a code block of a page, which stays unchanged, or a public name in a code span."""


def setup(app: Any) -> None:
    """Connect the functions that title examples, escape the text of docstrings, and link names in pages."""
    app.connect("autodoc-process-docstring", _begin_examples, priority=400)  # napoleon must see the title
    app.connect("autodoc-process-docstring", _escape)
    app.connect("source-read", _link)


def _begin_examples(app: Any, what: str, name: str, value: Any, options: Any, lines: list[str]) -> None:
    """Put a title above the examples at the end of a docstring.  Without it they would belong to the section before."""
    first = next((place for place, line in enumerate(lines) if line.startswith(">>>")), None)
    if first is not None:
        lines[first:first] = ["Examples", "--------", ""]


def _escape(app: Any, what: str, name: str, value: Any, options: Any, lines: list[str]) -> None:
    """Escape a docstring up to its examples: `|x|` is an absolute value, `x_` no link, `*shape` no emphasis."""
    for place, line in enumerate(lines):
        if line.lstrip().startswith(">>>"):
            break
        line = re.sub(r"(?<=\w)``(?=[_\[])", r"``\\ ", line.replace("|", r"\|"))  # in ``a``_i only a is code
        lines[place] = re.sub(r"(?<=\w)_(?![\w`])|(?<=, )\*(?=\w)", r"\\\g<0>", line)


def _link(app: Any, page: str, source: list[str]) -> None:
    """Link public names in the code of a page to the reference."""

    def linked(match: re.Match[str]) -> str:
        if match[1] is None:
            return match[0]
        room = match[1].removeprefix("jaxacct.").removeprefix("ja.")
        return f"{{py:obj}}`{match[1]}{match[2]}{match[3]} <jaxacct.{room}{match[2]}>`"

    # in the site the pages of this folder lie at the top
    source[0] = NAME.sub(linked, source[0]).replace("](.github/site/pages/", "](")
