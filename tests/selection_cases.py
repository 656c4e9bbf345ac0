"""Rows of tests/data/selection.csv with their laws, and the worst of all orders of a small finite base."""

import csv
import pathlib

import numpy as np

from jaxacct import selection
from jaxacct.selection.law_of_k import evaluated


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


def worst_of_two(p, q, law, eps):
    """U(e^eps) of a finite base where K is at most 2: phi' is linear, so the integrand is piecewise linear.

    The integral is exact between the integrand's kinks. The kernel's cells, chords and columns are not used.
    """
    first, last = evaluated(law, np.array([1.0, 0.0]))[1]  # phi' at x = 0 and 1
    slope = last - first
    seen, apart = q > 0.0, p[q == 0.0].sum()
    order = np.argsort(-p[seen] / q[seen], kind="stable")
    knots = np.concatenate([[0.0], np.cumsum(q[seen][order])])
    curve = apart + np.concatenate([[0.0], np.cumsum(p[seen][order])])
    value, steep = evaluated(law, np.array([0.0, apart]))[0], lambda x: first + slope * x
    total = value[0] - value[1]
    for k in range(knots.size - 1):
        size, rise = knots[k + 1] - knots[k], curve[k + 1] - curve[k]
        ends = []
        for u, t in ((knots[k], curve[k]), (knots[k + 1], curve[k + 1])):
            later = rise / size * steep(curve[k + 1 :] - t) - np.exp(eps) * steep(knots[k + 1 :] - u)
            ends.append(np.concatenate([later, [(rise / size - np.exp(eps)) * first, 0.0]]))
        ends = np.array(ends)
        fall = (ends[1] - ends[0])[:, None] - (ends[1] - ends[0])
        gap = -(ends[0][:, None] - ends[0])
        with np.errstate(divide="ignore", invalid="ignore"):
            cut = (gap / fall)[np.isfinite(gap / fall)]
        share = np.unique(np.concatenate([[0.0, 1.0], cut[(cut > 0.0) & (cut < 1.0)]]))
        best = np.max((1.0 - share)[:, None] * ends[0] + share[:, None] * ends[1], axis=1)
        total += size * np.sum(np.diff(share) * 0.5 * (best[1:] + best[:-1]))
    return total
