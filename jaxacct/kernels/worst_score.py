"""The worst score for "run K times, keep the best": an upper bound of the leak, and an order that nearly attains it.

With `T` the concave trade-off curve of the base (largest P-mass of a set of Q-mass u), `L` its slope and `phi` the
generating function of K, for `E = e^eps >= 1`

    U(E) = int_0^1 max_{u<=w<=1} (L(u) phi'(T(w) - T(u)) - E phi'(w - u))_+ du + phi(1) - phi(1 - T(0)).

The curve is a polygon.  Rows are its cells in u with slope above one (no other can be active), columns its cells in w,
cut finer where phi' varies; every row end is a column end.  See jaxacct/selection/README.md for theorem and proofs.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

UNIT = 2.0**-53
BISECTIONS = 46


class Polygon(NamedTuple):
    """A trade-off curve: rows (R cells) and columns (C cells) as ends; padding repeats the last end."""

    row_q: jax.Array  # (R + 1,) u at the row ends
    row_p: jax.Array  # (R + 1,) T there
    slope: jax.Array  # (R,) L, not below the slopes of the cells
    column_q: jax.Array  # (C + 1,) w at the column ends
    column_p: jax.Array  # (C + 1,) T there


class Table(NamedTuple):
    """`U(E) = fixed + sum_r width_r/2 sum_s max(0, max_k gain_{s,r,k} - E cost_{s,r,k})`."""

    gain: jax.Array  # (2, R, 2 C + 2)
    cost: jax.Array
    margin: jax.Array  # (R,) rounding of a gain or a cost, per unit of slope + E
    width: jax.Array  # (R,)
    slope: jax.Array
    fixed: jax.Array


def _mass_at_infinity(phi, polygon: Polygon):
    return phi(jnp.zeros(()))[0] - phi(polygon.row_p[0])[0]


def table(phi, polygon: Polygon) -> Table:
    """Certified cell values; phi maps y = 1 - x to (phi, phi', phi'').

    On a cell `L phi'(T(w) - T(u))` is jointly convex, so at most the bilinear interpolation of its corners, and
    `-E phi'(q)` is at most its tangent at the middle.
    """
    row_q, row_p, slope, column_q, column_p = polygon
    height, width = jnp.diff(row_q), jnp.diff(column_q)
    corner = phi(1.0 - jnp.clip(column_p[None, :] - row_p[:, None], 0.0, 1.0))[1]
    middle = 0.5 * (column_q[1:] + column_q[:-1])[None, :] - 0.5 * (row_q[1:] + row_q[:-1])[:, None]
    _, first, second = phi(1.0 - jnp.clip(middle, 0.0, 1.0))
    beyond = column_q[None, :-1] >= row_q[1:, None]
    # w in the row's own cell: q = w - u runs over [0, height], where T(w) - T(u) = L q
    _, own_first, own_second = phi(1.0 - 0.5 * height)
    own_gain = [phi(jnp.ones_like(height))[1], phi(1.0 - jnp.clip(slope * height, 0.0, 1.0))[1]]
    gains, costs = [], []
    for s in (0, 1):
        gain, cost = [], []
        for e in (0, 1):
            here = slope[:, None] * corner[s : slope.size + s, e : width.size + e]
            gain.append(jnp.where(beyond, here, -jnp.inf))
            cost.append(first + second * ((e - 0.5) * width[None, :] - (s - 0.5) * height[:, None]))
            gain.append((slope * own_gain[e])[:, None])
            cost.append((own_first + (e - 0.5) * own_second * height)[:, None])
        gains.append(jnp.concatenate(gain, axis=1))
        costs.append(jnp.concatenate(cost, axis=1))
    _, steep, steeper = phi(jnp.zeros(()))
    margin = 32.0 * UNIT * (steep + steeper) * jnp.ones_like(slope)
    return Table(jnp.stack(gains), jnp.stack(costs), margin, height, slope, _mass_at_infinity(phi, polygon))


def bound(cells: Table, ratio):
    """An upper bound of the leak at E = ratio >= 1."""
    best = jnp.max(cells.gain - ratio * cells.cost, axis=2) + cells.margin * (cells.slope + ratio)
    total = 0.5 * jnp.sum(cells.width * jnp.sum(jnp.maximum(best, 0.0), axis=0))
    return (total + cells.fixed) * (1.0 + 1e-12)


class Order(NamedTuple):
    """What an order of the polygon's cells is made from: `gain - E cost` if row r is served at column end k."""

    gain: jax.Array  # (R, C + 1)
    cost: jax.Array
    allowed: jax.Array
    margin: jax.Array
    fixed: jax.Array
    alpha: jax.Array  # (R,) the first column end from which the rows before this one can be served


def orders(phi, polygon: Polygon) -> Order:
    """The values of all orders of an inner polygon."""
    row_q, row_p, _, column_q, column_p = polygon
    from_p = phi(1.0 - jnp.clip(column_p[None, :] - row_p[:, None], 0.0, 1.0))[0]
    from_q = phi(1.0 - jnp.clip(column_q[None, :] - row_q[:, None], 0.0, 1.0))[0]
    gain, cost = from_p[:-1] - from_p[1:], from_q[:-1] - from_q[1:]
    allowed = (column_q[None, :] >= row_q[1:, None]) & (jnp.diff(row_q) > 0)[:, None]
    first = phi(jnp.zeros(()))[1]
    margin = 32.0 * UNIT * first * (jnp.diff(row_p) + jnp.diff(row_q))
    fixed = _mass_at_infinity(phi, polygon) * (1.0 - 1e-12)
    return Order(gain, cost, allowed, margin, fixed, jnp.searchsorted(column_q, row_q[:-1]))


def attained(order: Order, ratio):
    """The leak at E = ratio of a genuine order: active rows first, each served at a non-increasing w(u) >= alpha.

    The rows before some row are active and served no earlier than that row's start, wherever they would go by
    themselves; that number of rows is the one at which going by themselves stops paying.
    """
    value = jnp.where(order.allowed, order.gain - ratio * order.cost, -jnp.inf)
    best, at = jnp.max(value, axis=1), jnp.argmax(value, axis=1)
    size = best.size
    stops = ~(best > 0)
    count = jnp.where(jnp.any(stops), jnp.argmax(stops), size)
    active = jnp.arange(size) < count
    last = order.gain.shape[1] - 1
    alpha = jnp.where(count < size, order.alpha[jnp.minimum(count, size - 1)], last)
    served = jnp.where(active, jnp.maximum(at, alpha), 0)
    served = lax.cummax(served, reverse=True)
    taken = jnp.take_along_axis(value, served[:, None], axis=1)[:, 0] - order.margin * (1.0 + ratio)
    return jnp.sum(jnp.where(active, taken, 0.0)) + order.fixed


def crossing(leak, log_delta, highest):
    """(below, above) of the eps in [0, highest] at which a decreasing leak(e^eps) passes delta; equal to rounding."""

    def halve(_, ends):
        low, high = ends
        middle = 0.5 * (low + high)
        over = jnp.log(jnp.maximum(leak(jnp.exp(middle)), 1e-320)) > log_delta
        return jnp.where(over, middle, low), jnp.where(over, high, middle)

    return lax.fori_loop(0, BISECTIONS, halve, (0.0 * highest, highest))


def epsilon(phi, above: Polygon, below: Polygon, log_delta, highest):
    """(lower, upper) of eps in [0, highest]; upper is inf where even `highest` leaks more than delta."""
    cells, order = table(phi, above), orders(phi, below)
    _, upper = crossing(lambda ratio: bound(cells, ratio), log_delta, highest)
    lower, _ = crossing(lambda ratio: attained(order, ratio), log_delta, highest)
    reached = jnp.log(bound(cells, jnp.exp(upper))) <= log_delta
    zero = jnp.log(bound(cells, jnp.ones(()))) <= log_delta
    return jnp.where(zero, 0.0, lower), jnp.where(zero, 0.0, jnp.where(reached, upper, jnp.inf))
