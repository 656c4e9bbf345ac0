"""Lines whose largest is above the gain of any place in the orders of candidates, for Gaussian bases, row by row.

With `f_r(v) = r phi'(T(v)) - phi'(v)` the envelope needs `M(r) = max_v f_r(v)`.  Cells of v, each with a bound of what
f_r does inside it, give lines in r whose maximum is at least M (README.md of this folder, "The envelope of a Gaussian
base").
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from jaxacct.core.floats import ROUNDOFF
from jaxacct.kernels.arrays import interp
from jaxacct.selection.law_of_k import Law

__all__ = ["INFLATED", "Cells", "Lines", "cells", "crowded_ends", "sketch", "spread"]

LINE_ERROR = 1e-12
"""More than the relative error of the normal distribution function up to 38 deviations, and of a likelihood ratio up
to `exp(700)`.
"""
INFLATED = 4e-12
"""More than the relative errors of generating functions and of sums."""
NEXT_TO_ONE = 1e-9
"""Share of `1/(phi''/phi')`, at 1, of the mass that is scored higher in the first cell."""
LEAST_MASS_DEVIATIONS = 8.3
"""Deviations from the mean of P at which the last cell begins."""
SKETCH_CELLS = 64
"""Places at which phi' is looked at to place the cells of v."""
EVENLY = 0.25
"""Share of cells, and of nodes, that is spread evenly."""
GROWTH_SHARE = 0.3
"""Cells that go where phi' grows, for each that goes where the best places are."""


class Lines(NamedTuple):
    """`M(r) <= max_k (r gain_k - cost_k)` for all r that are at least the one they were made for, (R, K) each."""

    gain: np.ndarray
    cost: np.ndarray
    exact: tuple[np.ndarray, np.ndarray]  # about what gain and cost would be without loss


class Cells(NamedTuple):
    """Cells of v, K ends and K - 1 cells: between two ends f_r is at most the larger one plus `bent - r straight`."""

    gain: np.ndarray
    cost: np.ndarray
    bent: np.ndarray
    straight: np.ndarray
    exact: tuple[np.ndarray, np.ndarray]

    def lines(self, first: np.ndarray) -> Lines:
        """Lines for r whose logarithm is at least `first`, (R,)."""
        more = self.bent - np.exp(first - INFLATED * (1.0 + np.abs(first)))[:, None] * self.straight
        more = np.where(more <= 0.0, 0.0, more) * (1.0 + INFLATED)  # NaN stays
        # where that leaves little of a cost, the least cost of the cell stands at both of its ends
        step = ~(more <= 0.5 * self.cost[:, 1:])
        left = np.where(step, self.cost[:, 1:], self.cost[:, :-1] - more)
        right = np.where(step, self.cost[:, 1:], self.cost[:, 1:] - more)
        cost = np.concatenate([left, self.cost[:, -1:]], -1)
        cost[:, 1:] = np.minimum(cost[:, 1:], right)
        return Lines(self.gain, np.maximum(cost, 0.0), self.exact)


def cells(mu: np.ndarray, law: Law, x: np.ndarray) -> Cells:
    """Cells from scores x at their ends, (R, K) ascending; mu (R, 1)."""
    from scipy import special

    middle = 0.5 * (x[:, 1:] + x[:, :-1])
    # y = 1 - v at the ends, whatever number it is; in the middle the mass of Q to a relative error, and of P
    y = special.ndtr(x)
    v = 1.0 - y
    my, mv = special.ndtr(middle), special.ndtr(-middle)
    mean, missed = special.ndtr(middle - mu), special.ndtr(mu - middle)
    plainly, above, last = _risen(mu, x, y)
    ratio = np.exp(mu * (middle - 0.5 * mu))
    near = middle <= 0.0
    left = np.where(near, y[:, :-1] - my, mv - v[:, :-1])
    right = np.where(near, y[:, 1:] - my, mv - v[:, 1:])
    # the tangent of 1 - T at the middle, rounded down, or a constant where that one would fall below 0
    height = np.where(middle <= mu, mean * (1.0 - LINE_ERROR), 1.0 - missed * (1.0 + LINE_ERROR))
    low = height + ratio * (left - LINE_ERROR * np.where(near, y[:, :-1] + my, mv + v[:, :-1]))
    high = height + ratio * (right - LINE_ERROR * np.where(near, y[:, 1:] + my, mv + v[:, 1:]))
    flat = ~(low >= 0.5 * above[:, :-1])
    low, high = np.where(flat, above[:, :-1], low), np.where(flat, above[:, :-1], high)
    zero = np.zeros_like(mu)
    risen = np.minimum(np.concatenate([zero, high], -1), np.concatenate([low, last], -1))
    risen = np.clip(np.concatenate([risen, last], -1) * (1.0 - 4.0 * ROUNDOFF), 0.0, 1.0)
    gain = law.slopes(risen)[0] * (1.0 + INFLATED)
    plain, steep = law.slopes(np.concatenate([y, zero + 1.0], -1))
    cost = plain * (1.0 - INFLATED)
    # phi'' is convex: its chord before a cell is above its slope there, and its chord behind is below
    width = np.diff(y)
    before = np.concatenate([y[:, :1], width[:, :-1]], -1)
    steeper = np.concatenate([law.slopes(zero)[1], steep[:, :-3]], -1)
    error = 2.0 * INFLATED
    bend = (steeper * (1.0 + error) - steep[:, :-2] * (1.0 - error)) / before
    high = np.clip(high, 0.0, 1.0)
    behind = law.slopes(high)[1]
    fallen = behind[:, :-1] * (1.0 - error) - behind[:, 1:] * (1.0 + error)
    rest = fallen / np.diff(high) * np.square((high - low) / width)[:, :-1]
    rest = np.where((fallen > 0.0) & (np.diff(high) > 0.0), rest, 0.0)
    each = 0.125 * width * width
    bent = np.concatenate([each * bend, zero + np.inf], -1)
    straight = np.concatenate([each[:, :-1] * rest * (1.0 - INFLATED), zero, zero], -1)
    exact = law.slopes(np.concatenate([plainly, last], -1))[0], plain
    return Cells(gain, cost, bent, straight, exact)


def _risen(mu: np.ndarray, x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(about B, no more than B, the same at the last one), at the floats y that are nearly the Q-masses below x.

    y misses the Q-mass by less than `missed`, and B, convex, falls by at most its slope times that.  B(1) = 1.
    """
    from scipy import special

    missed = LINE_ERROR * np.minimum(y, special.ndtr(-x)) + np.where(x > 0.0, 2.0 * ROUNDOFF, 0.0)
    loss = np.where(y < 1.0, np.exp(mu * (x - 0.5 * mu)) * (1.0 + LINE_ERROR) * missed, 0.0)
    about = special.ndtr(x - mu)
    above = np.maximum(about * (1.0 - LINE_ERROR) - loss, 0.0)
    last = 1.0 - special.ndtr(mu - x[:, -1:]) * (1.0 + LINE_ERROR) - loss[:, -1:]
    return about, above, last


def sketch(mu: np.ndarray, law: Law, least: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(scores x, by how much log phi'(v) and log phi'(T(v)) grow from one to the next)."""
    from scipy import special

    first, second = law.slopes(np.zeros_like(mu))
    begin = special.ndtri(NEXT_TO_ONE / np.maximum(second / first, 1.0))
    end = np.maximum(mu + LEAST_MASS_DEVIATIONS, begin + 1.0)
    x = begin + (end - begin) * np.linspace(0.0, 1.0, SKETCH_CELLS)
    floor = np.maximum(least, 1e-290)
    grown = [np.log(np.maximum(law.slopes(special.ndtr(x - shift))[0], floor)) for shift in (0.0, mu)]
    return x, np.abs(np.diff(grown[0])) + np.abs(np.diff(grown[1]))


def spread(places: np.ndarray, dense: np.ndarray, width: np.ndarray, count: int) -> np.ndarray:
    """`count` places, from the first to the last, of which every cell gets its share."""
    share = (1.0 - EVENLY) * dense / np.sum(dense, axis=-1, keepdims=True)
    share = np.where(np.isfinite(share), share, 0.0) + EVENLY * width / np.sum(width, axis=-1, keepdims=True)
    risen = np.concatenate([np.zeros((places.shape[0], 1)), np.cumsum(share, axis=-1)], axis=-1)
    wanted = risen[:, -1:] * np.linspace(0.0, 1.0, count)
    found = interp(np, wanted, risen, places)
    found[:, 0] = places[:, 0]
    return found


def crowded_ends(x: np.ndarray, grown: np.ndarray, best: np.ndarray, weight: np.ndarray, count: int) -> np.ndarray:
    """Ends of cells that are narrow where the best places are, each of which has a weight."""
    risen = np.concatenate([np.zeros((x.shape[0], 1)), np.cumsum(weight, axis=-1)], axis=-1)
    hit = np.abs(np.diff(interp(np, -x, np.maximum.accumulate(-best, axis=-1), risen), axis=-1))
    beside = np.concatenate([hit[:, :1] * 0.0, hit, hit[:, :1] * 0.0], axis=-1)
    near = np.cbrt((hit + beside[:, 2:] + beside[:, :-2]) * np.square(grown))
    dense = near / np.sum(near, axis=-1, keepdims=True)
    dense = np.where(np.isfinite(dense), dense, 0.0) + GROWTH_SHARE * grown / np.sum(grown, axis=-1, keepdims=True)
    return spread(x, dense, np.diff(x), count)
