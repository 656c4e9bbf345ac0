"""The table of mechanisms in the README is what the code says, and it leaves none out."""

import inspect
import pathlib

import jaxacct.mechanisms as mechanisms
from jaxacct.mechanisms.table import EXAMPLES, table

README = pathlib.Path(mechanisms.__file__).parent / "README.md"
START, END = "<!-- table: made by jaxacct.mechanisms.table.table() -->\n", "<!-- end of table -->\n"


def test_readme_holds_the_table():
    text = README.read_text()
    assert text.split(START)[1].split(END)[0] == table()


def test_no_mechanism_is_left_out():
    public = {getattr(mechanisms, name) for name in mechanisms.__all__}
    classes = {
        c for c in public if inspect.isclass(c) and issubclass(c, mechanisms.Mechanism) and not inspect.isabstract(c)
    }
    ways = {mechanisms.PoissonSampled, mechanisms.SampledWithoutReplacement}
    assert classes - ways == {type(example) for example in EXAMPLES}
