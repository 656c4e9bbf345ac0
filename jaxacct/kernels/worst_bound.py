"""An upper bound of the worst score's leak as lines in E, on the rows and columns of a mesh.

Proofs in jaxacct/selection/README.md.  Cells of columns run along the first axis, groups of rows along the last.
"""

from typing import NamedTuple

from jaxacct.kernels.arrays import Array, namespace
from jaxacct.kernels.worst_mesh import (
    MASS_ERROR,
    SLOPE_ERROR,
    Mesh,
    Outer,
    Repetitions,
    Resolution,
    at_infinity,
    before,
    steep,
)

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
    xp = namespace(curve.q)
    a, b = index[:-1], index[1:]
    ratio, q, p, _ = curve
    fall = ratio[a] - ratio[b]
    # beyond the end of cell a, before the start of cell b; both lines lie above the polygon in between
    gap = p[b] - p[a + 1] - ratio[b] * (q[b] - q[a + 1])
    ahead = xp.where(fall > 0.0, gap / xp.where(fall > 0.0, fall, 1.0), xp.inf)
    ahead = xp.clip(ahead, 0.0, xp.maximum(q[b] - q[a + 1], 0.0))
    at_q = xp.where(a == b, q[a], q[a + 1] + ahead)
    rising, falling = p[a + 1] + ratio[a] * ahead, p[b] - ratio[b] * xp.maximum(q[b] - at_q, 0.0)
    return at_q, xp.where(a == b, p[a], xp.minimum(xp.maximum(rising, falling), 1.0))


def _own(law: Repetitions, slope: Array, reach: Array) -> tuple[Array, Array]:
    """(gain, cost) of the best w with w - u <= reach, if the value is positive at all: T(w) - T(u) <= slope (w - u).

    `phi'(slope x)/phi'(x)` is non-decreasing for a power series, so the value is largest at the end, or where the
    slope has used up all mass.
    """
    reach = namespace(reach).clip(reach, 0.0, 1.0 / slope)
    return slope * steep(law, slope * reach, 1.0), steep(law, reach, -1.0)


def _costs(law: Repetitions, u: Array, w: Array) -> Array:
    """(2, 2, C, G) lower bounds of phi'(w - u) at the corners of each cell; interpolated, they hold within it.

    They are the tangent of phi' in the middle or, where the tangent falls far below phi', its least value.
    u : (2, G), w : (2, C, G).
    """
    xp = namespace(w)
    first, second = map(xp.asarray, law.slopes(1.0 - xp.clip(0.5 * (w[0] + w[1] - u[0] - u[1]), 0.0, 1.0)))
    height, width = u[1] - u[0], w[1] - w[0]
    reach = 0.5 * (width + height)
    first = first - SLOPE_ERROR * first - (SLOPE_ERROR * reach + MASS_ERROR) * second
    least = steep(law, w[0] - u[1], -1.0)
    flat = first - second * reach < 0.8 * least - 0.05 * first
    corners = [[first + second * ((e - 0.5) * width - (s - 0.5) * height) for e in (0, 1)] for s in (0, 1)]
    tangents = xp.where(flat, least, xp.stack([xp.stack(row) for row in corners]))
    return xp.where(w[0] >= u[1], tangents, xp.inf)


def lines(law: Repetitions, curve: Outer, where: Mesh, served: Array, resolution: Resolution) -> Lines:
    """The lines of a mesh; served : (G + 1,) about where groups' ends are."""
    xp = namespace(curve.q)
    groups, each = resolution.groups, resolution.lines
    index, end = where.rows[:-1], where.rows[-1:]
    ends_q, ends_p = _meet(curve, where.rows)
    ends_q, ends_p = xp.concatenate([curve.q[:1], ends_q]), xp.concatenate([curve.p[:1], ends_p])
    q, p = ends_q[::each], ends_p[::each]
    grouped = lambda x: x.reshape(groups, each).T
    slope, height = grouped(curve.ratio[index]), grouped(xp.diff(ends_q))
    fraction = lambda part, whole: xp.clip(part / xp.where(whole > 0.0, whole, 1.0), 0.0, 1.0)
    share = xp.stack([fraction(grouped(x) - q[:-1], xp.diff(q)) for x in (ends_q[:-1], ends_q[1:])])
    # each by itself: slopes may differ by 1e23, and one minus a weight would lose what the other line is worth
    weight = xp.stack(
        [fraction(slope - slope[-1], slope[0] - slope[-1]), fraction(slope[0] - slope, slope[0] - slope[-1])]
    )
    weight = xp.where(slope[0] > slope[-1], weight, xp.array([0.0, 1.0])[:, None, None])

    few = index[:: GROUPS_PER_SHARED_COLUMN * each]
    shared = xp.concatenate([few, index[-1:], end, where.columns, xp.array([curve.ratio.size - 1])])
    w_q, w_p = _meet(curve, shared)
    w_q = xp.concatenate([xp.zeros(1), w_q, xp.ones(1)])
    w_p = xp.concatenate([curve.p[:1], w_p, xp.ones(1)])
    start = w_q[before(xp, w_q, q[1:])]
    own_gain, own_cost = _own(law, slope, start - grouped(ends_q[:-1]))

    # a window replaces the shared cells from first to last
    cell = before(xp, w_q, xp.concatenate([xp.ones(1), served[1:]]), "right") - 1
    first = xp.clip(xp.minimum(cell[1:], cell[:-1]) - WINDOW_MARGIN, few.size + 1, shared.size - 1)
    last = xp.clip(xp.maximum(cell[1:], cell[:-1]) + WINDOW_MARGIN, first, shared.size - 1)
    step = xp.arange(resolution.window)[:, None] * (last - first)
    below, part = first + step // (resolution.window - 1), step % (resolution.window - 1)
    after = xp.minimum(below + 1, shared.size - 1)
    inside = shared[below] + (shared[after] - shared[below]) * part // (resolution.window - 1)
    v_q, v_p = _meet(curve, inside)
    v_q = xp.concatenate([w_q[first][None], v_q, w_q[last + 1][None]])
    v_p = xp.concatenate([w_p[first][None], v_p, w_p[last + 1][None]])

    ends = lambda x: xp.stack([x[:-1], x[1:]])
    u = ends(q)
    gain = steep(law, w_p[:, None] - p, 1.0)
    gain = xp.stack([ends(gain[:, :-1]), ends(gain[:, 1:])])
    size = xp.arange(shared.size)[:, None]
    cost = xp.where((size >= first) & (size <= last), xp.inf, _costs(law, u, ends(w_q)[:, :, None]))
    near = xp.stack([ends(steep(law, v_p - p[s : groups + s], 1.0)) for s in (0, 1)])
    both = lambda a, b: xp.concatenate([a, b], axis=2)
    # a sketch without numbers places nothing: then nothing is known
    placed = xp.all(xp.diff(shared) >= 0) & xp.all(height >= 0.0) & xp.all(xp.diff(where.rows) >= 0)
    placed = placed & xp.all(xp.diff(w_q) >= 0.0)  # `before` counts among ascending numbers
    return Lines(
        infinite=xp.where(placed, at_infinity(law, curve.p[0], 1.0), xp.inf),
        slope=xp.stack([slope[0], slope[-1]]),
        gain=both(gain, near),
        cost=both(cost, _costs(law, u, ends(v_q))),
        height=height,
        share=share,
        weight=weight,
        own_gain=own_gain,
        own_cost=own_cost,
        after=xp.maximum(curve.q[where.above] - q[-1], 0.0),
    )


def _mean_above(least: Array, a: Array, b: Array) -> Array:
    """The mean of `max(x, least)` where x runs linearly from a to b."""
    xp = namespace(least)
    low, high = xp.minimum(a, b) - least, xp.maximum(a, b) - least
    crossing = xp.maximum(high, 0.0) ** 2 / xp.where(high > low, 2.0 * (high - low), 1.0)
    return least + xp.where(low >= 0.0, 0.5 * (low + high), crossing)


def bound(known: Lines, ratio: Array) -> Array:
    """An upper bound of the leak at E = ratio >= 1, convex in E."""
    xp = namespace(known.height)
    ends = []
    for s in (0, 1):
        first, last = (
            xp.maximum(xp.max(slope * known.gain[s] - ratio * known.cost[s], axis=(0, 1)), LEAST_LINE)
            for slope in known.slope
        )
        ends.append(known.weight[0] * first + known.weight[1] * last)
    own = xp.maximum(known.own_gain - ratio * known.own_cost, 0.0)
    best = _mean_above(own, *((1.0 - share) * ends[0] + share * ends[1] for share in known.share))
    # what is to be won does not grow from row to row
    after = known.after * xp.maximum(own[-1, -1], ends[1][-1, -1])
    return (known.infinite + xp.sum(known.height * best) + after) * (1.0 + SUM_ROUNDING)
