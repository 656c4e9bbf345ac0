"""Where a line ends: the node behind which the bound of the rest is as small as is asked (README.md, section 4)."""

from typing import TypeVar

import jax
import numpy as np

from jaxacct.kernels.allocation.cutoff import log_beyond_on
from jaxacct.kernels.allocation.law import Cells, Cuts
from jaxacct.kernels.arrays import Array

__all__ = ["MOST_NODES", "last_node"]

MOST_NODES = 6_000
"""Most nodes on the line."""
PROBES = 12
"""Most indices that are tried for the last node."""
PAST_THE_GOAL = 0.02
"""By how much, in the logarithm, the secant aims past the goal, so that what it finds is mostly enough."""
STRIDE = 0.8
"""Step of the logarithm of the index where the bound says nothing about the way to go."""
NEAR_ENOUGH = 0.2
"""Distance, in the logarithm, of an index that is not too small from one that is, or from where the secant sees it."""
Some = TypeVar("Some")


def last_node(
    cells: Cells,
    cuts: Cuts,
    t: Array,
    c: Array,
    step: Array,
    scale: Array,
    goal: Array,
    deviation: Array,
    sign: float,
) -> tuple[Array, Array]:
    """The index of the last node, where the bound of what lies beyond falls to the goal, and that bound.

    The fall below the scale grows about as a power of the index, as its square where the law is nearly normal: a
    secant in the logarithms of both, kept between an index that is too small and one that is not.  Which path serves is
    settled at an index where they do not both suffice: far out either may be the smaller by a hair.
    """
    most = np.log(MOST_NODES)
    low, high = np.zeros_like(c), np.full_like(c, most)
    wanted = np.log(np.maximum(scale - goal, 1.0)) + PAST_THE_GOAL
    at = np.clip(0.5 * (np.log(2.0) + wanted) - np.log(deviation * step), 0.0, most)
    at = np.where(np.isnan(at), 0.5 * most, at)
    power, before, seen = np.full_like(c, 2.0), np.full_like(c, np.nan), np.full_like(c, np.nan)
    local, open_ = np.zeros(len(c), bool), np.ones(len(c), bool)
    beyond = np.full_like(c, np.inf)
    rows = np.arange(len(c))
    for _ in range(PROBES):
        some = _taken((cells, cuts, t, c), rows)
        y = np.ceil(np.exp(at[rows])) * step[rows]
        bound = np.empty(rows.size)
        both, one = np.flatnonzero(open_[rows]), np.flatnonzero(~open_[rows])
        if both.size:
            near, far = (
                log_beyond_on(*_taken(some, both), y[both], sign, np.full(both.size, x)) for x in (True, False)
            )
            bound[both], local[rows[both]] = np.fmin(near, far), ~(far < near)
            open_[rows[both]] = np.maximum(near, far) < goal[rows[both]]
        if one.size:
            bound[one] = log_beyond_on(*_taken(some, one), y[one], sign, local[rows[one]])
        here, less = at[rows], low[rows]
        fine = bound < goal[rows]
        low[rows] = less = np.where(fine, less, np.maximum(less, here))
        high[rows] = more = np.where(fine, np.minimum(high[rows], here), high[rows])
        beyond[rows] = np.where(fine, bound, beyond[rows])
        fall = np.log(np.maximum(scale[rows] - bound, 1e-2))
        fresh = (fall - seen[rows]) / (here - before[rows])
        power[rows] = steep = np.where((fresh > 0.1) & (fresh < 4.0), fresh, power[rows])
        before[rows], seen[rows] = here, fall
        # far out the bound may be poor, and one that is above the scale says nothing about the way
        stride = np.where(fall > 0.0, (wanted[rows] - fall) / steep, np.where(fine, -STRIDE, STRIDE))
        new = here + stride
        middle = 0.5 * (less + np.where(more < most, more, np.minimum(more, less + 2.0 * STRIDE)))
        at[rows] = np.where((new > less) & (new < more), new, middle)
        spare = fine & (fall - wanted[rows] < NEAR_ENOUGH * steep)  # hardly more than is asked
        rows = rows[~spare & ~(more - less < NEAR_ENOUGH)]
        if rows.size == 0:
            break
    last = np.ceil(np.exp(high))
    if np.any(high == most):  # no index tried is enough
        beyond = np.where(high == most, log_beyond_on(cells, cuts, t, c, last * step, sign, local), beyond)
    return last, beyond


def _taken(some: Some, rows: Array) -> Some:
    """Some rows of arrays that all have one for each of them."""
    return jax.tree.map(lambda x: x[rows], some) if rows.size < len(jax.tree.leaves(some)[0]) else some
