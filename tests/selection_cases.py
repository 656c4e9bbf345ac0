"""Rows of tests/data/selection.csv with their laws, and the worst of all orders of a small finite base."""

import csv
import pathlib

import numpy as np

from jaxacct import selection
from jaxacct.selection.law import evaluated


def rows():
    """(law of K, row) of every reference row."""
    path = pathlib.Path(__file__).parent / "data" / "selection.csv"
    return [(law(row), row) for row in csv.DictReader(path.read_text().splitlines())]


def law(row):
    if row["repetitions"] == "two_point":
        return selection.TwoPoint(1, 100, 0.1)
    numbers = [float(part.split("=")[1]) for part in row["parameters"].split(";")]
    make = {
        "truncated_negative_binomial": selection.TruncatedNegativeBinomial,
        "poisson": selection.Poisson,
        "binomial": selection.Binomial,
        "point_mass": selection.PointMass,
    }[row["repetitions"]]
    return make(*numbers)


def hockey_stick(p, q, eps):
    """H_{e^eps} of pmfs along the last axis, for eps of any shape."""
    return np.sum(np.maximum(p - np.exp(np.asarray(eps))[..., None] * q, 0.0), axis=-1)


def worst_order(p, q, law, eps):
    """The largest H_{e^eps}(best under p || best under q) over all orders of the outcomes: (E,).

    What an outcome adds depends on the set of those below it and not on their order, so that the best order is found
    set by set: 2^n sets stand for n! orders.
    """
    n, grown = p.size, np.exp(np.atleast_1d(eps))[:, None]
    sets = np.arange(2**n)
    has = (sets[:, None] >> np.arange(n)) & 1
    one, two = (evaluated(law, np.clip((1 - has) @ x, 0.0, 1.0))[0] for x in (p, q))
    best = np.full((grown.size, sets.size), -np.inf)
    best[:, 0] = (np.maximum(1.0 - grown, 0.0) * float(evaluated(law, np.ones(1))[0][0]))[:, 0]
    for count in range(n):
        below = sets[has.sum(axis=1) == count]
        for i in range(n):
            here = below[has[below, i] == 0]
            after = here + (1 << i)
            added = one[after] - one[here] - grown * (two[after] - two[here])
            best[:, after] = np.maximum(best[:, after], best[:, here] + np.maximum(added, 0.0))
    return best[:, -1].reshape(np.shape(eps))
