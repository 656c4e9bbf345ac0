"""The worst score for "run K times, keep the best": an upper bound of the leak, and an order that nearly attains it.

With `T` the concave trade-off curve of the base (largest P-mass of a set of Q-mass u), `L` its slope and `phi` the
generating function of K, for `E = e^eps >= 1`

    U(E) = int_0^1 max_{u<=w<=1} (L(u) phi'(T(w) - T(u)) - E phi'(w - u))_+ du + phi(1) - phi(1 - T(0)).

Rows are intervals of u, columns intervals of w.  A sketch on few cells finds E, the rows that are active and where
the maxima lie; it decides which lines of the curve are kept, and nothing else: whichever they are, the polygon through
them lies above the curve.  jaxacct/selection/README.md has the theorem and the proofs.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

CELLS = 16384
"""Cells of a curve."""
SKETCH = (96, 256)
"""Rows and columns of the sketch."""
JOINED = 48
"""Rows that join the slopes above one that are not expected to be active."""


class Effort(NamedTuple):
    """Sizes: how narrow the bracket gets, and what it costs; it holds for any."""

    groups: int  # active rows: groups of so many
    lines: int  # lines of the curve each
    columns: int  # columns beyond the active rows
    tolerance: float  # relative error of a row that columns aim at


QUICK = Effort(40, 8, 448, 1e-4)
FINE = Effort(320, 2, 2000, 1e-5)
NEAR = 0.02
"""Distance from the eps for which lines were chosen beyond which they are chosen anew."""
STEPS = 30
"""Most steps of regula falsi for eps; its end is certified wherever it stops."""
WIDTH = 2e-7
"""Absolute width of eps at which it stops."""
PASSES = 3
"""Most times that the lines are chosen anew."""
UNIT = 2.0**-53
SHIFT = 16.0 * UNIT
"""Absolute error of a difference of two masses."""
RELATIVE = 4e-12
"""Relative error of phi'."""
ROUNDING = 1e-9
"""Relative allowance for the arithmetic of a sum of positive terms."""


class Outer(NamedTuple):
    """A concave polygon above a curve: lines of descending slope, the last one of slope 0."""

    ratio: Any  # (N,) slopes
    q: Any  # (N + 1,) where the cells begin and end, from 0 to 1
    p: Any  # (N + 1,) the polygon there


class Inner(NamedTuple):
    """Knots of a concave polygon below a curve."""

    q: Any  # (N + 1,)
    p: Any  # (N + 1,)


class Sketch(NamedTuple):
    """Gain and cost of each coarse row if all of it is served at the end of a coarse column."""

    gain: jax.Array  # (A, B)
    cost: jax.Array  # (A, B)
    infinite: jax.Array  # leak of the outcomes with dQ = 0
    mass: jax.Array  # (A,) P-mass of the rows
    rows: jax.Array  # (A + 1,) cells of the curve at which rows end
    columns: jax.Array  # (B + 1,)


class Plan(NamedTuple):
    """Densities of rows and columns over the pieces of a sketch, and the cell with which the active rows end."""

    rows: jax.Array
    columns: jax.Array
    end: jax.Array


class Lines(NamedTuple):
    """Upper bounds that are lines in E, for one polygon: the values of cells are `gain - E cost`."""

    infinite: jax.Array
    slope: jax.Array  # (G, S)
    weight: jax.Array  # (2, G, S) height of a row, shared between the two ends of its group
    own_gain: jax.Array  # (G, S)
    own_cost: jax.Array
    gain: jax.Array  # (G + 1, C + 1) at the corners
    cost: jax.Array  # (2, 2, G, C) tangents at the corners
    joined: tuple  # the same for joined rows: height, own gain and cost, gain, cost, gain and cost by monotonicity


def _steep(phi, mass, side=0.0):
    """phi' at a mass; rounded up for side 1, down for side -1."""
    return phi(1.0 - jnp.clip(mass + side * SHIFT, 0.0, 1.0))[1] * (1.0 + side * RELATIVE)


def _middles(ends):
    return 0.5 * (ends[1:] + ends[:-1])


def sketch(phi, q, p, above):
    """A coarse look at a polygon given by N + 1 knots, of which the first `above` cells have slopes above one."""
    rows = (jnp.arange(SKETCH[0] + 1) * above) // SKETCH[0]
    columns = jnp.arange(SKETCH[1] + 1) * ((q.size - 1) // SKETCH[1])
    u_q, u_p, w_q, w_p = q[rows], p[rows], q[columns[1:]], p[columns[1:]]
    gain = jnp.diff(u_p)[:, None] * _steep(phi, w_p[None] - _middles(u_p)[:, None])
    cost = jnp.diff(u_q)[:, None] * _steep(phi, w_q[None] - _middles(u_q)[:, None])
    later = columns[None, 1:] >= rows[1:, None]
    infinite = p[0] * _steep(phi, 1.0 - p[0])
    return Sketch(jnp.where(later, gain, 0.0), jnp.where(later, cost, jnp.inf), infinite, jnp.diff(u_p), rows, columns)


def sketched_epsilon(found: Sketch, log_delta, highest):
    """eps in [0, highest] at which the sketch leaks delta, by bisection."""

    def step(_, ends):
        low, high = ends
        middle = 0.5 * (low + high)
        best = jnp.max(found.gain - jnp.exp(middle) * found.cost, axis=1)
        leak = jnp.sum(jnp.maximum(best, 0.0)) + found.infinite
        over = jnp.log(jnp.maximum(leak, 1e-320)) > log_delta
        return jnp.where(over, middle, low), jnp.where(over, high, middle)

    low, high = lax.fori_loop(0, 20, step, (0.0 * highest, highest))
    return 0.5 * (low + high)


def plan(found: Sketch, ratio, effort: Effort):
    """Where rows and columns are needed at E = ratio."""
    value = found.gain - ratio * found.cost
    best = jnp.maximum(jnp.max(value, axis=1), 0.0)
    total = jnp.sum(best) + 1e-300
    size = jnp.arange(best.size)
    # chords overstate a row by the square of its height, and a group by the square of what phi' changes over it; the
    # rows after the last active one are treated as if they were
    last = jnp.max(jnp.where(best > 3e-5 * total, size, 0))
    end = jnp.minimum(last + 2, best.size)
    at = jnp.argmax(value[jnp.minimum(size, last)], axis=1)
    steep = found.gain / jnp.maximum(found.mass, 1e-300)[:, None]
    here, after = steep[size, at], steep[jnp.minimum(size + 1, best.size - 1), at]
    change = jnp.clip(1.0 - after / jnp.maximum(here, 1e-300), 0.0, 1.0)
    rows = ((best + 0.5 * effort.lines**2 * found.mass * here * change**2) / total) ** (1.0 / 3.0)
    rows = jnp.maximum(rows, jnp.where(size > 0, jnp.roll(rows, 1), 0.0))
    rows = jnp.maximum(rows, jnp.where(size > 0, jnp.roll(rows, 1), 0.0)) + 0.02 * jnp.max(rows) + 1e-6
    rows = jnp.maximum(rows, jnp.where(jnp.cumsum(best) > 1e-6 * total, 0.15 * jnp.max(rows), 0.0))
    # a cell over which the gain grows by g is overstated by g^2/8 of it, which must not pass what the best is ahead
    ahead = best[:, None] - value + effort.tolerance * (best + total / 16.0)[:, None]
    before = jnp.concatenate([found.gain[:, :1], found.gain[:, :-1]], axis=1)
    growth = jnp.clip(jnp.log(jnp.maximum(found.gain, 1e-300)) - jnp.log(jnp.maximum(before, 1e-300)), 0.0, 4.0)
    wanted = jnp.where(found.gain > 0.0, growth * jnp.sqrt(found.gain / ahead), 0.0)
    columns = jnp.max(wanted, axis=0)
    return Plan(rows, columns + 0.2 * jnp.mean(columns) + 1e-6, found.rows[end])


def _placed(density, pieces, first, last, count):
    """`count` ascending cells from `first` to before `last`, where density puts them."""
    ends = jnp.clip(pieces, first, last).astype(jnp.float64)
    mass = jnp.concatenate([jnp.zeros(1), jnp.cumsum(density * jnp.diff(ends) / jnp.maximum(jnp.diff(pieces), 1))])
    share = (jnp.arange(count) + 0.5) / count * mass[-1]
    cell = jnp.floor(jnp.interp(share, mass, ends)).astype(pieces.dtype)
    return jnp.clip(cell, first, jnp.maximum(last - 1, first))


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
    return slope * _steep(phi, slope * reach, 1.0), _steep(phi, reach, -1.0)


def _costs(phi, q, w_q):
    """(2, 2, R, C) lower bounds of phi'(w - u) at the corners of each cell, which hold when interpolated between them.

    The tangent of phi' in the middle, or, where that falls far below it, its least value.
    """
    middle = jnp.clip(_middles(w_q)[None] - _middles(q)[:, None], 0.0, 1.0)
    _, first, second = phi(1.0 - middle)
    height, width = jnp.diff(q)[:, None], jnp.diff(w_q)[None]
    reach = 0.5 * (width + height)
    first = first - RELATIVE * first - (RELATIVE * reach + SHIFT) * second
    least = _steep(phi, w_q[None, :-1] - q[1:, None], -1.0)
    flat = first - second * reach < 0.8 * least
    corners = [[first + second * ((e - 0.5) * width - (s - 0.5) * height) for e in (0, 1)] for s in (0, 1)]
    beyond = w_q[None, :-1] >= q[1:, None]
    tangents = jnp.where(flat, least, jnp.stack([jnp.stack(row) for row in corners]))
    return jnp.where(beyond, tangents, jnp.inf), jnp.where(beyond, least, jnp.inf)


def lines(phi, curve: Outer, where: Plan, found: Sketch, effort: Effort) -> Lines:
    """The lines of a plan; phi maps y = 1 - x to (phi, phi', phi'')."""
    groups, each, count, _ = effort
    above = found.rows[-1]
    index = _placed(where.rows, found.rows, 0, where.end, groups * each).at[0].set(0)
    bulk = _placed(where.columns, found.columns, where.end, curve.ratio.size, count)
    last = curve.ratio.size - 1
    w_q, w_p = _meet(curve, jnp.concatenate([index[::each], where.end[None], bulk, jnp.array([last])]))
    w_q = jnp.concatenate([jnp.zeros(1), w_q, jnp.ones(1)])
    w_p = jnp.concatenate([curve.p[:1], w_p, jnp.ones(1)])

    ends_q, ends_p = _meet(curve, jnp.concatenate([index, where.end[None]]))
    ends_q, ends_p = jnp.concatenate([curve.q[:1], ends_q]), jnp.concatenate([curve.p[:1], ends_p])
    q, p = ends_q[::each], ends_p[::each]
    slope = curve.ratio[index].reshape(groups, each)
    height = jnp.diff(ends_q).reshape(groups, each)
    share = (_middles(ends_q).reshape(groups, each) - q[:-1, None]) / jnp.maximum(jnp.diff(q), 1e-300)[:, None]
    share = jnp.clip(share, 0.0, 1.0)
    start = w_q[jnp.searchsorted(w_q, q[1:])]
    own_gain, own_cost = _own(phi, slope, start[:, None] - ends_q[:-1].reshape(groups, each))
    gain = _steep(phi, w_p[None] - p[:, None], 1.0)
    joined = _joined(phi, curve, where.end, above, (ends_q[-1], ends_p[-1]), (w_q, w_p))
    weight = height * jnp.stack([1.0 - share, share])
    infinite = curve.p[0] * _steep(phi, 1.0, 1.0)
    return Lines(infinite, slope, weight, own_gain, own_cost, gain, _costs(phi, q, w_q)[0], joined)


def _joined(phi, curve: Outer, begin, above, start, columns):
    """Rows of joined cells, with the largest slope of each, from the end of the active rows to slope one."""
    w_q, w_p = columns
    cuts = begin + jnp.round((jnp.arange(JOINED + 1) / JOINED) ** 2 * (above - begin)).astype(begin.dtype)
    q, p = curve.q[cuts].at[0].set(start[0]), curve.p[cuts].at[0].set(start[1])
    slope = curve.ratio[cuts[:-1]]
    reach = w_q[jnp.minimum(jnp.searchsorted(w_q, q[1:]), w_q.size - 1)] - q[:-1]
    own_gain, own_cost = _own(phi, slope, reach)
    cost, least = _costs(phi, q, w_q)
    gain = slope[:, None] * _steep(phi, w_p[None] - p[:-1, None], 1.0)
    low_gain = slope[:, None] * _steep(phi, w_p[None] - p[1:, None], 1.0)
    return jnp.diff(q), own_gain, own_cost, gain, low_gain, cost, least


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
    height, own_gain, own_cost, gain, low_gain, cost, least = known.joined
    corners = [
        corner[:, e : columns + e] - ratio * cost[s, e] for s, corner in ((0, gain), (1, low_gain)) for e in (0, 1)
    ]
    steady = gain[:, 1:] - ratio * least
    best = jnp.max(
        jnp.minimum(jnp.maximum(*map(lambda x: jnp.maximum(*x), (corners[:2], corners[2:]))), steady), axis=1
    )
    best = jnp.maximum(jnp.maximum(best, own_gain - ratio * own_cost), 0.0)
    return (total + jnp.sum(height * best)) * (1.0 + ROUNDING)


class Order(NamedTuple):
    """A genuine score order of an inner polygon: active rows of Q-mass (q_k, q_{k+1}], served where w is w_k."""

    row_q: jax.Array  # (R + 1,)
    row_p: jax.Array  # (R + 1,)
    served_q: jax.Array  # (R,) non-increasing, at least the end of the active rows
    served_p: jax.Array
    active: jax.Array  # (R,) bool, the first so many


def order(phi, curve: Inner, where: Plan, found: Sketch, ratio, effort: Effort) -> Order:
    """The best order at E = ratio, as far as the rows and columns of the plan allow."""
    groups, each, count, _ = effort
    cells = curve.q.size - 1
    inside = _placed(where.rows, found.rows, 0, where.end, groups * each)[1:]
    index = jnp.concatenate([jnp.zeros(1, inside.dtype), inside, where.end[None]])
    bulk = _placed(where.columns, found.columns, where.end, cells, count)
    columns = jnp.concatenate([index[each::each], bulk, jnp.array([cells])])
    row_q, row_p, w_q, w_p = curve.q[index], curve.p[index], curve.q[columns], curve.p[columns]
    size_q, size_p = jnp.diff(row_q), jnp.diff(row_p)
    middle_q, middle_p = _middles(row_q[::each]), _middles(row_p[::each])
    gain, cost = _steep(phi, w_p[None] - middle_p[:, None]), _steep(phi, w_q[None] - middle_q[:, None])
    cost = jnp.where(w_q[None] >= row_q[each::each, None], cost, jnp.inf)
    shape = (groups, each, 1)
    value = size_p.reshape(shape) * gain[:, None] - ratio * jnp.where(
        size_q.reshape(shape) > 0.0, size_q.reshape(shape) * cost[:, None], 0.0
    )
    best = jnp.argmax(value, axis=2).reshape(-1)
    stops = (jnp.max(value, axis=2).reshape(-1) <= 0.0) & (size_q > 0.0)
    number = jnp.where(jnp.any(stops), jnp.argmax(stops), size_q.size)
    active = jnp.arange(size_q.size) < number
    alpha = jnp.searchsorted(w_q, row_q[number])
    served = lax.cummax(jnp.where(active, jnp.maximum(best, alpha), 0), reverse=True)
    return Order(row_q, row_p, w_q[served], w_p[served], active)


def attained(phi, curve: Inner, found: Order):
    """(gain, cost): the order leaks at least gain - E cost at every E.

    phi' is convex, so phi(x + h) - phi(x) is at least h times phi' in the middle and at most h times its mean.
    """
    row_q, row_p, served_q, served_p, active = found
    size_q, size_p = jnp.diff(row_q), jnp.diff(row_p)
    gain = size_p * _steep(phi, served_p - _middles(row_p), -1.0)
    cost = 0.5 * size_q * (_steep(phi, served_q - row_q[:-1], 1.0) + _steep(phi, served_q - row_q[1:], 1.0))
    infinite = curve.p[0] * _steep(phi, 1.0 - curve.p[0], -1.0)
    gain = (jnp.sum(jnp.where(active, gain, 0.0)) + infinite) * (1.0 - ROUNDING)
    return gain, jnp.sum(jnp.where(active, cost, 0.0)) * (1.0 + ROUNDING)


def delta(phi, above: Outer, below: Inner, ratio, effort: Effort):
    """(lower, upper) of the worst leak at E = ratio >= 1."""
    found = sketch(phi, above.q, above.p, jnp.sum(above.ratio > 1.0))
    upper = bound(lines(phi, above, plan(found, ratio, effort), found, effort), ratio)
    gain, cost = attained(phi, below, best_order(phi, below, ratio, effort))
    return jnp.clip(gain - ratio * cost, 0.0, 1.0), jnp.clip(upper, 0.0, 1.0)


def best_order(phi, below: Inner, ratio, effort: Effort) -> Order:
    """The order that leaks most at E = ratio, or nearly."""
    found = sketch(phi, below.q, below.p, jnp.sum(jnp.diff(below.p) > jnp.diff(below.q)))
    return order(phi, below, plan(found, ratio, effort), found, ratio, effort)


def epsilon(phi, above: Outer, below: Inner, log_delta, highest, effort: Effort):
    """(lower, upper) of eps in [0, highest]; upper is inf where even `highest` leaks more than delta."""
    found = sketch(phi, above.q, above.p, jnp.sum(above.ratio > 1.0))

    def refine(carry):
        i, start, _, best = carry
        known = lines(phi, above, plan(found, jnp.exp(start), effort), found, effort)
        upper = _crossing(lambda e: jnp.log(jnp.maximum(bound(known, jnp.exp(e)), 1e-320)) - log_delta, start, highest)
        return i + 1, jnp.minimum(upper, highest), start, jnp.minimum(best, upper)

    def again(carry):
        i, start, before, _ = carry
        return (i < PASSES) & (jnp.abs(start - before) > NEAR)

    start = sketched_epsilon(found, log_delta, highest)
    _, last, _, upper = lax.while_loop(again, refine, (0, start, jnp.inf * highest, jnp.inf * highest))
    chosen = best_order(phi, below, jnp.exp(jnp.where(jnp.isfinite(upper), jnp.minimum(upper, last), start)), effort)
    gain, cost = attained(phi, below, chosen)
    target = jnp.exp(log_delta) * (1.0 + 1e-12)
    room = gain - target
    lower = jnp.log(jnp.maximum(room, 1e-300)) - jnp.log(jnp.maximum(cost, 1e-300)) - 1e-12
    lower = jnp.where(room > 0.0, jnp.maximum(lower, 0.0), 0.0)
    infinite = below.p[0] * _steep(phi, 1.0 - below.p[0], -1.0) * (1.0 - ROUNDING)
    return jnp.where(infinite > target, jnp.inf, jnp.minimum(lower, upper)), upper


def _crossing(residual, start, highest):
    """A certified upper end of the zero of a decreasing residual in [0, highest], by regula falsi; inf if none."""

    def outwards(carry):
        low, high, at_low, at_high, width = carry
        low, high = (
            jnp.where(at_high > 0.0, high, jnp.where(at_low > 0.0, low, jnp.maximum(start - width, 0.0))),
            jnp.where(at_high > 0.0, jnp.minimum(start + width, highest), jnp.where(at_low > 0.0, high, low)),
        )
        at_low, at_high = lax.map(residual, jnp.stack([low, high]))
        return low, high, at_low, at_high, 5.0 * width

    def open_ended(carry):
        low, high, at_low, at_high, _ = carry
        return ((at_high > 0.0) & (high < highest)) | ((at_low <= 0.0) & (low > 0.0))

    near = 0.25 * NEAR
    first = jnp.maximum(start - near, 0.0)
    unknown = (first, first, -jnp.inf * highest, jnp.inf * highest, near * jnp.ones_like(highest))
    low, high, at_low, at_high, _ = lax.while_loop(open_ended, outwards, unknown)
    reached, nothing = at_high <= 0.0, at_low <= 0.0

    def step(carry):
        i, low, at_low, high, at_high, kept = carry
        share = jnp.clip(at_low / (at_low - at_high), 0.005, 0.995)
        middle = low + (high - low) * jnp.where(i % 6 == 5, 0.5, share)
        here = residual(middle)
        right = here > 0.0
        # Illinois: an end that is kept twice in a row counts for half
        at_low, at_high = (
            jnp.where(right, here, jnp.where(kept < 0, 0.5 * at_low, at_low)),
            jnp.where(right, jnp.where(kept > 0, 0.5 * at_high, at_high), here),
        )
        low, high = jnp.where(right, middle, low), jnp.where(right, high, middle)
        return i + 1, low, at_low, high, at_high, jnp.where(right, 1, -1)

    def wide(carry):
        i, low, _, high, at_high, _ = carry
        return (i < STEPS) & reached & ~nothing & (high - low > WIDTH) & (at_high < -1e-7)

    carry = (0, low, jnp.maximum(at_low, 1e-12), high, jnp.minimum(at_high, -1e-12), 0)
    high = lax.while_loop(wide, step, carry)[3]
    return jnp.where(nothing, 0.0, jnp.where(reached, high, jnp.inf))
