"""An upper bound of the worst score's leak as lines in E, on the rows and columns of a mesh.

Proofs in jaxacct/selection/README.md.  Cells of columns run along the first axis, groups of rows along the last.
"""

from typing import NamedTuple

import jax.numpy as jnp

from jaxacct.kernels.arrays import Array, Generating
from jaxacct.kernels.worst_mesh import MASS_ERROR, SLOPE_ERROR, Mesh, Outer, Resolution, at_infinity, steep

SUM_ROUNDING = 1e-9
"""Relative allowance for the arithmetic of a sum of positive terms, far more than its thousands of terms make."""
WINDOW_MARGIN = 2
"""Shared columns by which a window reaches beyond the places that it is given."""
GROUPS_PER_SHARED_COLUMN = 4
"""Of so many groups of rows the first line is a shared column."""
LEAST_LINE = -1e300
"""Finite stand-in for the value of a line whose cost is infinite, so that a weight of 0 makes it 0."""


class Lines(NamedTuple):
    """Upper bounds that are lines in E, for one polygon: the values of cells are `slope gain - E cost`."""

    infinite: Array
    slope: Array  # (2, G) largest and smallest of a group
    gain: Array  # (2, 2, C, G) at both ends of a group and of a cell
    cost: Array  # (2, 2, C, G)
    height: Array  # (S, G) Q-mass of a line's rows
    share: Array  # (2, S, G) where in their group they begin and end
    weight: Array  # (2, S, G) of the group's slopes in theirs
    own_gain: Array  # (S, G) of cells too near for corners
    own_cost: Array
    after: Array  # Q-mass after the last group, up to slope one


def _meet(curve: Outer, index: Array) -> tuple[Array, Array]:
    """(q, p) where each line of ascending `index` meets the next, along the first axis."""
    a, b = index[:-1], index[1:]
    ratio, q, p, _ = curve
    fall = ratio[a] - ratio[b]
    # beyond the end of cell a, before the start of cell b; both lines lie above the polygon in between
    gap = p[b] - p[a + 1] - ratio[b] * (q[b] - q[a + 1])
    ahead = jnp.where(fall > 0.0, gap / jnp.where(fall > 0.0, fall, 1.0), jnp.inf)
    ahead = jnp.clip(ahead, 0.0, jnp.maximum(q[b] - q[a + 1], 0.0))
    at_q = jnp.where(a == b, q[a], q[a + 1] + ahead)
    rising, falling = p[a + 1] + ratio[a] * ahead, p[b] - ratio[b] * jnp.maximum(q[b] - at_q, 0.0)
    return at_q, jnp.where(a == b, p[a], jnp.minimum(jnp.maximum(rising, falling), 1.0))


def _own(phi: Generating, slope: Array, reach: Array) -> tuple[Array, Array]:
    """(gain, cost) of the best w with w - u <= reach, if the value is positive at all: T(w) - T(u) <= slope (w - u).

    `phi'(slope x)/phi'(x)` is non-decreasing for a power series, so the value is largest at the end, or where the
    slope has used up all mass.
    """
    reach = jnp.clip(reach, 0.0, 1.0 / slope)
    return slope * steep(phi, slope * reach, 1.0), steep(phi, reach, -1.0)


def _costs(phi: Generating, u: Array, w: Array) -> Array:
    """(2, 2, C, G) lower bounds of phi'(w - u) at the corners of each cell; interpolated, they hold within it.

    They are the tangent of phi' in the middle or, where the tangent falls far below phi', its least value.
    u : (2, G), w : (2, C, G).
    """
    _, first, second = phi(1.0 - jnp.clip(0.5 * (w[0] + w[1] - u[0] - u[1]), 0.0, 1.0))
    height, width = u[1] - u[0], w[1] - w[0]
    reach = 0.5 * (width + height)
    first = first - SLOPE_ERROR * first - (SLOPE_ERROR * reach + MASS_ERROR) * second
    least = steep(phi, w[0] - u[1], -1.0)
    flat = first - second * reach < 0.8 * least - 0.05 * first
    corners = [[first + second * ((e - 0.5) * width - (s - 0.5) * height) for e in (0, 1)] for s in (0, 1)]
    tangents = jnp.where(flat, least, jnp.stack([jnp.stack(row) for row in corners]))
    return jnp.where(w[0] >= u[1], tangents, jnp.inf)


def lines(phi: Generating, curve: Outer, where: Mesh, served: Array, resolution: Resolution) -> Lines:
    """The lines of a mesh; phi maps y = 1 - x to (phi, phi', phi''); served : (G + 1,) about where groups' ends are."""
    groups, each = resolution.groups, resolution.lines
    index, end = where.rows[:-1], where.rows[-1:]
    ends_q, ends_p = _meet(curve, where.rows)
    ends_q, ends_p = jnp.concatenate([curve.q[:1], ends_q]), jnp.concatenate([curve.p[:1], ends_p])
    q, p = ends_q[::each], ends_p[::each]
    grouped = lambda x: x.reshape(groups, each).T
    slope, height = grouped(curve.ratio[index]), grouped(jnp.diff(ends_q))
    fraction = lambda part, whole: jnp.clip(part / jnp.where(whole > 0.0, whole, 1.0), 0.0, 1.0)
    share = jnp.stack([fraction(grouped(x) - q[:-1], jnp.diff(q)) for x in (ends_q[:-1], ends_q[1:])])
    # each by itself: slopes may differ by 1e23, and one minus a weight would lose what the other line is worth
    weight = jnp.stack(
        [fraction(slope - slope[-1], slope[0] - slope[-1]), fraction(slope[0] - slope, slope[0] - slope[-1])]
    )
    weight = jnp.where(slope[0] > slope[-1], weight, jnp.array([0.0, 1.0])[:, None, None])

    few = index[:: GROUPS_PER_SHARED_COLUMN * each]
    shared = jnp.concatenate([few, index[-1:], end, where.columns, jnp.array([curve.ratio.size - 1])])
    w_q, w_p = _meet(curve, shared)
    w_q = jnp.concatenate([jnp.zeros(1), w_q, jnp.ones(1)])
    w_p = jnp.concatenate([curve.p[:1], w_p, jnp.ones(1)])
    start = w_q[jnp.searchsorted(w_q, q[1:], method="compare_all")]
    own_gain, own_cost = _own(phi, slope, start - grouped(ends_q[:-1]))

    # a window replaces the shared cells from first to last
    cell = jnp.searchsorted(w_q, served.at[0].set(1.0), side="right", method="compare_all") - 1
    first = jnp.clip(jnp.minimum(cell[1:], cell[:-1]) - WINDOW_MARGIN, few.size + 1, shared.size - 1)
    last = jnp.clip(jnp.maximum(cell[1:], cell[:-1]) + WINDOW_MARGIN, first, shared.size - 1)
    step = jnp.arange(resolution.window)[:, None] * (last - first)
    below, part = first + step // (resolution.window - 1), step % (resolution.window - 1)
    after = jnp.minimum(below + 1, shared.size - 1)
    inside = shared[below] + (shared[after] - shared[below]) * part // (resolution.window - 1)
    v_q, v_p = _meet(curve, inside)
    v_q = jnp.concatenate([w_q[first][None], v_q, w_q[last + 1][None]])
    v_p = jnp.concatenate([w_p[first][None], v_p, w_p[last + 1][None]])

    ends = lambda x: jnp.stack([x[:-1], x[1:]])
    u = ends(q)
    gain = steep(phi, w_p[:, None] - p, 1.0)
    gain = jnp.stack([ends(gain[:, :-1]), ends(gain[:, 1:])])
    size = jnp.arange(shared.size)[:, None]
    cost = jnp.where((size >= first) & (size <= last), jnp.inf, _costs(phi, u, ends(w_q)[:, :, None]))
    near = jnp.stack([ends(steep(phi, v_p - p[s : groups + s], 1.0)) for s in (0, 1)])
    both = lambda a, b: jnp.concatenate([a, b], axis=2)
    # a sketch without numbers places nothing: then nothing is known
    placed = jnp.all(jnp.diff(shared) >= 0) & jnp.all(height >= 0.0) & jnp.all(jnp.diff(where.rows) >= 0)
    return Lines(
        infinite=jnp.where(placed, at_infinity(phi, curve.p[0], 1.0), jnp.inf),
        slope=slope[jnp.array([0, -1])],
        gain=both(gain, near),
        cost=both(cost, _costs(phi, u, ends(v_q))),
        height=height,
        share=share,
        weight=weight,
        own_gain=own_gain,
        own_cost=own_cost,
        after=jnp.maximum(curve.q[where.above] - q[-1], 0.0),
    )


def _mean_above(least: Array, a: Array, b: Array) -> Array:
    """The mean of `max(x, least)` where x runs linearly from a to b."""
    low, high = jnp.minimum(a, b) - least, jnp.maximum(a, b) - least
    crossing = jnp.maximum(high, 0.0) ** 2 / jnp.where(high > low, 2.0 * (high - low), 1.0)
    return least + jnp.where(low >= 0.0, 0.5 * (low + high), crossing)


def bound(known: Lines, ratio: Array) -> Array:
    """An upper bound of the leak at E = ratio >= 1, convex in E."""
    ends = []
    for s in (0, 1):
        first, last = (
            jnp.maximum(jnp.max(slope * known.gain[s] - ratio * known.cost[s], axis=(0, 1)), LEAST_LINE)
            for slope in known.slope
        )
        ends.append(known.weight[0] * first + known.weight[1] * last)
    own = jnp.maximum(known.own_gain - ratio * known.own_cost, 0.0)
    best = _mean_above(own, *((1.0 - share) * ends[0] + share * ends[1] for share in known.share))
    # what is to be won does not grow from row to row
    after = known.after * jnp.maximum(own[-1, -1], ends[1][-1, -1])
    return (known.infinite + jnp.sum(known.height * best) + after) * (1.0 + SUM_ROUNDING)
