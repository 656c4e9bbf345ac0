"""The table of bounds in jaxacct/selection/README.md is what the code says.  As a script this file prints it."""

import pathlib

import numpy as np

import jaxacct as ja
from jaxacct import selection

TABLE_DELTA = 1e-5
"""The delta at which each number of the table holds."""
MU_BY_EPSILON = {1: 0.2681, 2: 0.5016, 4: 0.9249}
"""mu of the Gaussian bases, by the epsilon that they have at delta 1e-5."""
NAMED_LAWS = (
    ("geometric, gamma 0.1", selection.Geometric(0.1)),
    ("geometric, gamma 0.01", selection.Geometric(0.01)),
    ("TNB, eta 0.5, gamma 0.01", selection.TruncatedNegativeBinomial(0.5, 0.01)),
    ("logarithmic, gamma 0.01", selection.Logarithmic(0.01)),
    ("TNB, eta -0.5, gamma 0.01", selection.TruncatedNegativeBinomial(-0.5, 0.01)),
    ("Poisson, mean 10", selection.Poisson(10)),
    ("binomial, 20 at 0.5", selection.Binomial(20, 0.5)),
    ("always 10", selection.PointMass(10)),
    ("1 at 0.1, else 100", selection.TwoPoint(1, 100, 0.1)),
)
"""The rows of the table: the name of a law of K, and the law."""


def table():
    """Markdown: eps at delta 1e-5, a row for every law, a column for every bound and base."""
    run = ja.Gaussian(1.0 / np.array(list(MU_BY_EPSILON.values())))
    lines = [f"| K | E[K] | {' | '.join(selection.BOUNDS)} |", "|---" * (len(selection.BOUNDS) + 2) + "|"]
    for name, law in NAMED_LAWS:
        cells = []
        for bound, how in selection.BOUNDS.items():
            known = isinstance(law, how.laws)
            upper = selection.bound_epsilon(run, law, TABLE_DELTA, bound=bound).upper if known else None
            cells.append("-" if upper is None else " ".join(f"{value:.2f}" for value in upper))
        lines.append(f"| {name} | {float(law.mean):.1f} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def test_readme_shows_the_table():
    readme = (pathlib.Path(ja.__file__).parent / "selection" / "README.md").read_text()
    shown = readme.split("test_selection_table.py -->\n")[1].split("<!-- end of table")[0]
    assert shown == table()


if __name__ == "__main__":
    print(table())
