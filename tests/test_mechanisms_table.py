"""The tables of mechanisms in the READMEs are what the code says and leave none out."""

import inspect
import pathlib
from types import SimpleNamespace

import numpy as np
from mechanism_tables import EXAMPLES, table_of_mechanisms, table_of_representations

import jaxacct.mechanisms as mechanisms
import jaxacct.representations as representations
from jaxacct.mechanisms import sampled_releases

END = "<!-- end of table -->\n"


def written(room, name):
    """The table that the page of a room holds."""
    text = pathlib.Path(room.__file__).with_name("README.md").read_text()
    return text.split(f"<!-- table: made by tests/mechanism_tables.py, {name} -->\n")[1].split(END)[0]


def test_readme_holds_the_table(monkeypatch):
    """Kinds and refusals do not depend on the deltas of replaced records, which take seconds."""
    some = lambda base, loss, relation: SimpleNamespace(lower=np.exp(-loss), upper=np.exp(-loss))
    monkeypatch.setattr(sampled_releases, "_ask", some)

    def few_losses(base, relation):
        if not (relation == "replace_one" and base.replaced_apart()):
            mechanisms.components(base, relation, "remove")  # raises the refusal that the true `_losses` would raise
        return np.linspace(0.0, 9.0, 20)

    monkeypatch.setattr(sampled_releases, "_losses", few_losses)
    for kept in ("_replaced", "_in_two_steps"):  # what the functions above give must not be cached
        monkeypatch.setattr(sampled_releases, kept, getattr(sampled_releases, kept).__wrapped__)
    assert written(mechanisms, "table_of_mechanisms") == table_of_mechanisms()


def test_readme_holds_the_table_of_representations():
    assert written(representations, "table_of_representations") == table_of_representations()


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
