"""The table of bounds by law of K and base, made by asking the code: README.md of this folder, "Bounds"."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxacct.mechanisms import Gaussian
from jaxacct.selection.law_families import (
    Binomial,
    Geometric,
    Law,
    Logarithmic,
    PointMass,
    Poisson,
    TruncatedNegativeBinomial,
    TwoPoint,
)
from jaxacct.selection.named_bounds import BOUNDS, bound_epsilon

__all__ = ["MU_BY_EPSILON", "NAMED_LAWS", "table"]

TABLE_DELTA = 1e-5
"""delta of all numbers of the table."""
MU_BY_EPSILON = {1: 0.2681, 2: 0.5016, 4: 0.9249}
"""mu of the Gaussian bases, by the epsilon that they have at delta 1e-5."""
NAMED_LAWS: tuple[tuple[str, Law], ...] = (
    ("geometric, gamma 0.1", Geometric(0.1)),
    ("geometric, gamma 0.01", Geometric(0.01)),
    ("TNB, eta 0.5, gamma 0.01", TruncatedNegativeBinomial(0.5, 0.01)),
    ("logarithmic, gamma 0.01", Logarithmic(0.01)),
    ("TNB, eta -0.5, gamma 0.01", TruncatedNegativeBinomial(-0.5, 0.01)),
    ("Poisson, mean 10", Poisson(10)),
    ("binomial, 20 at 0.5", Binomial(20, 0.5)),
    ("always 10", PointMass(10)),
    ("1 at 0.1, else 100", TwoPoint(1, 100, 0.1)),
)
"""The rows of the table: the name of a law of K, and the law."""


def table(laws: Sequence[tuple[str, Law]] = NAMED_LAWS) -> str:
    """Markdown: eps at delta 1e-5, a row for every law, a column for every bound and base.

    >>> print(table(NAMED_LAWS[:1]).splitlines()[2])
    | geometric, gamma 0.1 | 10.0 | 1.54 3.02 5.89 | 2.00 3.77 6.95 | 2.31 4.33 7.90 | 1.14 2.26 4.47 |
    """
    run = Gaussian(1.0 / np.array(list(MU_BY_EPSILON.values())))
    lines = [f"| K | E[K] | {' | '.join(BOUNDS)} |", "|---" * (len(BOUNDS) + 2) + "|"]
    for name, law in laws:
        cells = []
        for bound, how in BOUNDS.items():
            known = isinstance(law, how.laws)
            upper = bound_epsilon(run, law, TABLE_DELTA, bound=bound).upper if known else None
            cells.append("-" if upper is None else " ".join(f"{value:.2f}" for value in upper))
        lines.append(f"| {name} | {float(law.mean):.1f} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"
