"""The table of bounds in jaxacct/selection/README.md is what the code says."""

import pathlib

import jaxacct
from jaxacct.selection.bounds_table import table


def test_readme_shows_the_table():
    readme = (pathlib.Path(jaxacct.__file__).parent / "selection" / "README.md").read_text()
    shown = readme.split("table() -->\n")[1].split("<!-- end of table")[0]
    assert shown == table()
