"""An upper bound of the worst score's leak as lines in E, on the rows and columns of a plan.

Proofs in jaxacct/selection/README.md.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxacct.kernels.worst_plan import RELATIVE, SHIFT, Effort, Outer, Plan, Sketch, middles, placed, steep

ROUNDING = 1e-9
"""Relative allowance for the arithmetic of a sum of positive terms."""


class Joined(NamedTuple):
    """The same for R joined rows, from the end of the active ones to slope one."""

    height: jax.Array  # (R,)
    own_gain: jax.Array  # (R, C + 1)
    own_cost: jax.Array
    gain: jax.Array  # (R, C + 2) at the starts of rows
    low_gain: jax.Array  # at their ends
    cost: jax.Array  # (2, 2, R, C + 1) tangents at the corners
    least: jax.Array  # (R, C + 1) phi' where it is least
    within: jax.Array  # (R, C + 1) bool, cells that begin in the row


class Lines(NamedTuple):
    """Upper bounds that are lines in E, for one polygon: the values of cells are `gain - E cost`."""

    infinite: jax.Array
    slope: jax.Array  # (G, S)
    weight: jax.Array  # (2, G, S) height of a row, shared between the two ends of its group
    own_gain: jax.Array  # (G, S)
    own_cost: jax.Array
    gain: jax.Array  # (G + 1, C + 1) at the corners
    cost: jax.Array  # (2, 2, G, C) tangents at the corners
    joined: Joined


def _meet(curve: Outer, index):
    """(q, p) where each line of ascending `index` meets the next."""
    a, b = index[:-1], index[1:]
    ratio, q, p = curve
    fall = ratio[a] - ratio[b]
    # beyond the end of cell a, before the start of cell b; both lines lie above the polygon in between
    gap = p[b] - p[a + 1] - ratio[b] * (q[b] - q[a + 1])
    ahead = jnp.where(fall > 0.0, gap / jnp.where(fall > 0.0, fall, 1.0), jnp.inf)
    ahead = jnp.clip(ahead, 0.0, jnp.maximum(q[b] - q[a + 1], 0.0))
    at_q = jnp.where(a == b, q[a], q[a + 1] + ahead)
    rising, falling = p[a + 1] + ratio[a] * ahead, p[b] - ratio[b] * jnp.maximum(q[b] - at_q, 0.0)
    return at_q, jnp.where(a == b, p[a], jnp.minimum(jnp.maximum(rising, falling), 1.0))


def _own(phi, slope, reach):
    """(gain, cost) of the best w with w - u <= reach, if the value is positive at all: T(w) - T(u) <= slope (w - u).

    `phi'(slope x)/phi'(x)` is non-decreasing for a power series, so the value is largest at the end, or where the
    slope has used up all mass.
    """
    reach = jnp.clip(reach, 0.0, 1.0 / slope)
    return slope * steep(phi, slope * reach, 1.0), steep(phi, reach, -1.0)


def _costs(phi, q, w_q):
    """(2, 2, R, C) lower bounds of phi'(w - u) at the corners of each cell, which hold when interpolated between them.

    The tangent of phi' in the middle, or, where that falls far below it, its least value.
    """
    middle = jnp.clip(middles(w_q)[None] - middles(q)[:, None], 0.0, 1.0)
    _, first, second = phi(1.0 - middle)
    height, width = jnp.diff(q)[:, None], jnp.diff(w_q)[None]
    reach = 0.5 * (width + height)
    first = first - RELATIVE * first - (RELATIVE * reach + SHIFT) * second
    least = steep(phi, w_q[None, :-1] - q[1:, None], -1.0)
    flat = first - second * reach < 0.8 * least - 0.05 * first
    corners = [[first + second * ((e - 0.5) * width - (s - 0.5) * height) for e in (0, 1)] for s in (0, 1)]
    beyond = w_q[None, :-1] >= q[1:, None]
    tangents = jnp.where(flat, least, jnp.stack([jnp.stack(row) for row in corners]))
    return jnp.where(beyond, tangents, jnp.inf), jnp.where(beyond, least, jnp.inf)


def lines(phi, curve: Outer, where: Plan, found: Sketch, effort: Effort) -> Lines:
    """The lines of a plan; phi maps y = 1 - x to (phi, phi', phi'')."""
    groups, each, count = effort.groups, effort.lines, effort.columns
    above = found.rows[-1]
    index = placed(where.rows, found.rows, 0, where.end, groups * each).at[0].set(0)
    bulk = placed(where.columns, found.columns, where.end, curve.ratio.size, count)
    last = curve.ratio.size - 1
    w_q, w_p = _meet(curve, jnp.concatenate([index[::each], where.end[None], bulk, jnp.array([last])]))
    w_q = jnp.concatenate([jnp.zeros(1), w_q, jnp.ones(1)])
    w_p = jnp.concatenate([curve.p[:1], w_p, jnp.ones(1)])

    ends_q, ends_p = _meet(curve, jnp.concatenate([index, where.end[None]]))
    ends_q, ends_p = jnp.concatenate([curve.q[:1], ends_q]), jnp.concatenate([curve.p[:1], ends_p])
    q, p = ends_q[::each], ends_p[::each]
    slope = curve.ratio[index].reshape(groups, each)
    height = jnp.diff(ends_q).reshape(groups, each)
    share = (middles(ends_q).reshape(groups, each) - q[:-1, None]) / jnp.maximum(jnp.diff(q), 1e-300)[:, None]
    share = jnp.clip(share, 0.0, 1.0)
    start = w_q[jnp.searchsorted(w_q, q[1:])]
    own_gain, own_cost = _own(phi, slope, start[:, None] - ends_q[:-1].reshape(groups, each))
    gain = steep(phi, w_p[None] - p[:, None], 1.0)
    cuts = placed(where.joined, found.rows, where.end, above, effort.joined - 1)
    cuts = jnp.concatenate([where.end[None], cuts, above[None]])
    joined = _joined(phi, curve, cuts, (ends_q[-1], ends_p[-1]), (w_q, w_p))
    weight = height * jnp.stack([1.0 - share, share])
    infinite = curve.p[0] * steep(phi, 1.0, 1.0)
    return Lines(infinite, slope, weight, own_gain, own_cost, gain, _costs(phi, q, w_q)[0], joined)


def _joined(phi, curve: Outer, cuts, start, columns) -> Joined:
    """Rows of joined cells, with the largest slope of each, from the end of the active rows to slope one."""
    w_q, w_p = columns
    q, p = curve.q[cuts].at[0].set(start[0]), curve.p[cuts].at[0].set(start[1])
    slope = curve.ratio[cuts[:-1]]
    # cells that begin in the row have nothing but this; others the smallest of three bounds
    own_gain, own_cost = _own(phi, slope[:, None], w_q[None, 1:] - q[:-1, None])
    cost, least = _costs(phi, q, w_q)
    gain = slope[:, None] * steep(phi, w_p[None] - p[:-1, None], 1.0)
    low_gain = slope[:, None] * steep(phi, w_p[None] - p[1:, None], 1.0)
    within = w_q[None, :-1] < q[1:, None]
    return Joined(jnp.diff(q), own_gain, own_cost, gain, low_gain, cost, least, within)


def bound(known: Lines, ratio):
    """An upper bound of the leak at E = ratio >= 1."""
    total = known.infinite
    own = known.own_gain - ratio * known.own_cost
    columns = known.cost.shape[-1]
    for s in (0, 1):
        best = jnp.maximum(own, 0.0)
        for e in (0, 1):
            corner = known.gain[s : known.gain.shape[0] - 1 + s, None, e : columns + e]
            value = known.slope[:, :, None] * corner - ratio * known.cost[s, e][:, None, :]
            best = jnp.maximum(best, jnp.max(value, axis=2))
        total = total + jnp.sum(known.weight[s] * best)
    joined = known.joined
    corners = [
        corner[:, e : columns + e] - ratio * joined.cost[s, e]
        for s, corner in ((0, joined.gain), (1, joined.low_gain))
        for e in (0, 1)
    ]
    steady = jnp.minimum(joined.gain[:, 1:] - ratio * joined.least, functools.reduce(jnp.maximum, corners))
    own = jnp.maximum(joined.own_gain - ratio * joined.own_cost, 0.0)
    cells = jnp.minimum(jnp.where(joined.within, jnp.inf, steady), own)
    best = jnp.maximum(jnp.max(cells, axis=1), 0.0)
    return (total + jnp.sum(joined.height * best)) * (1.0 + ROUNDING)
