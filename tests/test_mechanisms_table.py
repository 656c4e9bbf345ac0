"""The tables of mechanisms in the READMEs are what the code says and leave none out."""

import inspect
import pathlib

import jaxacct.mechanisms as mechanisms
import jaxacct.representations as representations
from jaxacct.mechanisms.table import EXAMPLES, table
from jaxacct.representations import readme_table as representations_table

README = pathlib.Path(mechanisms.__file__).parent / "README.md"
START, END = "<!-- table: made by jaxacct.mechanisms.table.table() -->\n", "<!-- end of table -->\n"


def test_readme_holds_the_table():
    text = README.read_text()
    assert text.split(START)[1].split(END)[0] == table()


def test_readme_holds_the_table_of_representations():
    text = pathlib.Path(representations.__file__).with_name("README.md").read_text()
    start = "<!-- table: made by jaxacct.representations.readme_table.table() -->\n"
    assert text.split(start)[1].split(END)[0] == representations_table.table()


def test_no_mechanism_is_left_out():
    public = {getattr(mechanisms, name) for name in mechanisms.__all__}
    classes = {
        c for c in public if inspect.isclass(c) and issubclass(c, mechanisms.Mechanism) and not inspect.isabstract(c)
    }
    ways = {
        mechanisms.PoissonSampled,
        mechanisms.SampledWithReplacement,
        mechanisms.SampledWithoutReplacement,
        mechanisms.ShuffledBatches,
        mechanisms.TruncatedPoissonSampled,
    }
    assert classes - ways == {type(example) for example in EXAMPLES}
