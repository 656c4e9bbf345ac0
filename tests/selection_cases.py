"""Rows of tests/data/selection.csv with their laws, and the worst order of a small finite base by brute force."""

import csv
import itertools
import pathlib

import numpy as np

from jaxacct import selection


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
    """The largest H_{e^eps}(best under p || best under q) over all orders of the outcomes: (E,)."""
    orders = np.array(list(itertools.permutations(range(p.size))))
    laws = [selection.output_law(each[orders], law)[:, None, :] for each in (p, q)]
    return np.max(hockey_stick(*laws, eps), axis=0)
