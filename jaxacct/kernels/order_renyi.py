"""The best of K draws of N(0, 1) against the best of K draws of N(mu, 1): Rényi divergences, for many rows.

The densities are `phi'(F) f` and `phi'(G) g` (order_statistics.py).  Between `low` and `high` the integral of
`p^a q^{1-a}` is a Gauss-Legendre sum.  Outside phi' is constant to less than FLAT/a, so that the rest is the integral
of a Gaussian density, in closed form.  Where phi' is no constant on the left, as for K >= 2, the nodes go to where
float64 ends; an order for which that is not far enough has the divergence inf.  NumPy only.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from jaxacct.kernels.arrays import Array

__all__ = ["Nodes", "nodes", "panels", "renyi"]

FLAT = 1e-12
"""Relative change of phi'^a that is neglected outside of the nodes."""
FARTHEST = 37.5
"""Standard deviations beyond which float64 has no masses."""
PANEL = 0.8
"""Largest width of a panel of sixteen nodes."""
LEFT_OUT = 1e-10
"""Largest share of the integral that the last node may carry, where nothing is known beyond it."""
_POINTS, _WEIGHTS = np.polynomial.legendre.leggauss(16)


class Nodes(NamedTuple):
    """Logarithms of the densities at the nodes, and what is needed beyond them; one configuration a row."""

    mu: Array  # (R,)
    log_present: Array  # (R, X)
    log_without: Array  # (R, X)
    log_weight: Array  # (R, X)
    ends: Array  # (R, 2): where the nodes begin and end
    beyond: Array  # (R, 2): log phi' beyond them, -inf where it is not constant
    log_nothing: Array  # (R,): log phi(0)

    def rows(self, index: Array) -> Nodes:
        """Some of the rows."""
        return Nodes(*(each[index] for each in self))


def panels(laws: Any, mu: Array, largest_order: float) -> tuple[Array, Array]:
    """((R, 2) where the nodes must begin and end, (R,) how many panels that takes)."""
    from scipy.special import ndtri

    sides = []
    for x, y, further in ((np.zeros_like(mu), np.ones_like(mu), 0.0), (np.ones_like(mu), np.zeros_like(mu), mu)):
        steep, rate = laws.steepness(x, y)
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            flat = np.minimum(FLAT / (largest_order * np.maximum(rate, 1e-300)), 1e-12)
            known = np.isfinite(steep) & (np.abs(steep) < 1e200) & (flat > 1e-300)
            sides.append(further + np.where(known, -ndtri(np.where(known, flat, 0.5)), FARTHEST))
    ends = np.stack([-sides[0], sides[1]], axis=1)
    return ends, np.ceil((ends[:, 1] - ends[:, 0]) / PANEL)


def nodes(laws: Any, mu: Array, ends: Array, count: int) -> Nodes:
    """The densities at the nodes of `count` panels between the ends."""
    from scipy.special import ndtr

    share = ((np.arange(count)[:, None] + 0.5 + 0.5 * _POINTS) / count).reshape(-1)
    width = ends[:, 1:] - ends[:, :1]
    x = ends[:, :1] + width * share
    column = laws.taken((slice(None), None))
    present, without = (
        column.steepness(ndtr(z), ndtr(-z))[0] - 0.5 * z**2 - 0.5 * np.log(2.0 * np.pi) for z in (x - mu[:, None], x)
    )
    weight = np.log(width * 0.5 / count) + np.log(np.tile(_WEIGHTS, count))
    zero, one = np.zeros_like(mu), np.ones_like(mu)
    beyond = np.stack([laws.steepness(zero, one)[0], laws.steepness(one, zero)[0]], axis=1)
    beyond[:, 0] = np.where(ends[:, 0] > -FARTHEST, beyond[:, 0], -np.inf)
    with np.errstate(divide="ignore"):
        nothing = np.log(laws.generating(one)[0] + zero)
    return Nodes(mu, present, without, weight, ends, beyond, nothing)


def renyi(rows: Nodes, order: Array) -> Array:
    """The larger of the two Rényi divergences of an order > 1, (R,); inf where the nodes do not reach far enough."""
    from scipy.special import log_ndtr

    mu, a = rows.mu, order
    grown = 0.5 * a * (a - 1.0) * mu**2
    largest = rows.log_nothing
    for p, q, centre in (
        (rows.log_present, rows.log_without, a * mu),
        (rows.log_without, rows.log_present, (1.0 - a) * mu),
    ):
        with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
            terms = a[:, None] * p + (1.0 - a)[:, None] * q + rows.log_weight
            terms = np.where(np.isfinite(terms), terms, -np.inf)
            left = rows.beyond[:, 0] + grown + log_ndtr(rows.ends[:, 0] - centre)
            right = rows.beyond[:, 1] + grown + log_ndtr(centre - rows.ends[:, 1])
            top = np.maximum(np.maximum(np.max(terms, axis=1), left), right)
            each = np.exp(terms - top[:, None])
            total = np.sum(each, axis=1)
            first = each[np.arange(mu.size), np.argmax(each > 0.0, axis=1)]
            reached = np.isfinite(rows.beyond[:, 0]) | (first <= LEFT_OUT * total)
            total = top + np.log(total + np.exp(left - top) + np.exp(right - top))
        here = np.logaddexp(total, rows.log_nothing)
        largest = np.maximum(largest, np.where(reached, here, np.inf))
    return np.maximum(largest / (a - 1.0), 0.0)
