"""The worst score for "run K times, keep the best": an upper bound of the leak, and an order that nearly attains it.

With `T` the concave trade-off curve of the base (largest P-mass of a set of Q-mass u), `L` its slope and `phi` the
generating function of K, for `E = e^eps >= 1`

    U(E) = int_0^1 max_{u<=w<=1} (L(u) phi'(T(w) - T(u)) - E phi'(w - u))_+ du + phi(1) - phi(1 - T(0)).

The curve is a polygon.  Rows are intervals of u in which the slope exceeds one (no others can be active), columns the
cells of w; every row end is a column end.  Blocks of columns are bounded by monotonicity, and only the best few are
looked at cell by cell, so that a row costs tens of evaluations instead of thousands; whatever the other blocks could
hold stays in the bound.  See jaxacct/selection/README.md for the theorem and the proofs.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

UNIT = 2.0**-53
BLOCK = 32
"""Columns of a block."""
BEST = 3
"""Blocks looked at cell by cell."""
ITERATIONS = 24
"""Steps of regula falsi for eps; the bracket is certified wherever they stop."""


class Polygon(NamedTuple):
    """A trade-off curve: R rows and C columns by their ends; padding repeats an end."""

    row_q: jax.Array  # (R + 1,) u at the row ends
    row_p: jax.Array  # (R + 1,) T there
    slope: jax.Array  # (R,) largest L in the row
    column_q: jax.Array  # (C + 1,) w at the column ends; C is a multiple of BLOCK
    column_p: jax.Array  # (C + 1,) T there


def _gap(phi, upper, lower):
    """phi at the mass `upper - lower`."""
    return phi(1.0 - jnp.clip(upper - lower, 0.0, 1.0))


def _blocks(polygon: Polygon):
    """(mass p, mass q) at the ends of the blocks, each (C/BLOCK + 1,)."""
    return polygon.column_p[::BLOCK], polygon.column_q[::BLOCK]


def _at_infinity(phi, polygon: Polygon):
    return phi(jnp.zeros(()))[0] - phi(polygon.row_p[0])[0]


def _over_blocks(phi, polygon: Polygon, middle_q, ratio):
    """(R, blocks): upper bounds of `L phi'(T(w) - T(u)) - E phi'(w - u)` for u in a row and w >= u in a block.

    Over a block T is at most two lines, its first and its last cell prolonged until they meet, on each of which the
    argument for a single cell holds.
    """
    row_q, row_p, slope, column_q, column_p = polygon
    ends_p, ends_q = _blocks(polygon)
    slopes = jnp.diff(column_p) / jnp.maximum(jnp.diff(column_q), 1e-300)
    rise, fall = slopes[::BLOCK], slopes[BLOCK - 1 :: BLOCK]
    size = jnp.diff(ends_q)
    bend = jnp.diff(ends_p) - fall * size
    share = jnp.clip(jnp.where(rise > fall, bend / jnp.where(rise > fall, rise - fall, 1.0), 0.5 * size), 0.0, size)
    meet_p = jnp.maximum(ends_p[:-1] + rise * share, ends_p[1:] - fall * (size - share)) * (1.0 + 1e-13)
    at_p = jnp.stack([ends_p[:-1], meet_p, ends_p[1:]], axis=1)
    at_q = jnp.stack([ends_q[:-1], ends_q[:-1] + share, ends_q[1:]], axis=1)
    middle = jnp.maximum(0.5 * (ends_q[1:] + ends_q[:-1])[None, :] - middle_q[:, None], 0.0)
    _, first, second = phi(1.0 - middle)
    worst = -jnp.inf
    for s in (0, 1):
        u_q, u_p = row_q[s : slope.size + s, None, None], row_p[s : slope.size + s, None, None]
        gain = slope[:, None, None] * _gap(phi, at_p[None], u_p)[1]
        cost = first[:, :, None] + second[:, :, None] * (at_q[None] - u_q - middle[:, :, None])
        worst = jnp.maximum(worst, jnp.max(gain - ratio * cost, axis=2))
    return jnp.where(ends_q[None, 1:] > row_q[:-1, None], worst, -jnp.inf)


def bound(phi, polygon: Polygon, ratio):
    """An upper bound of the leak at E = ratio >= 1; phi maps y = 1 - x to (phi, phi', phi'')."""
    row_q, row_p, slope, column_q, column_p = polygon
    height = jnp.diff(row_q)
    middle_q = 0.5 * (row_q[1:] + row_q[:-1])
    crude = _over_blocks(phi, polygon, middle_q, ratio)
    top, chosen = lax.top_k(crude, BEST + 1)
    others, chosen = top[:, BEST], chosen[:, :BEST]

    # cell by cell `L phi'(T(w) - T(u))` is jointly convex: at most the bilinear interpolation of its corners, and
    # `-E phi'(q)` is at most its tangent at the middle
    index = chosen[:, :, None] * BLOCK + jnp.arange(BLOCK + 1)
    w_q, w_p = column_q[index], column_p[index]
    width = jnp.diff(w_q, axis=2)
    beyond = w_q[:, :, :-1] >= row_q[1:, None, None]
    middle = 0.5 * (w_q[:, :, 1:] + w_q[:, :, :-1])
    _, first, second = _gap(phi, middle, middle_q[:, None, None])
    # w in the row itself: q = w - u runs over [0, height], where T(w) - T(u) <= L q
    _, own_first, own_second = phi(1.0 - 0.5 * height)
    own_gain = phi(jnp.ones_like(height))[1], phi(1.0 - jnp.clip(slope * height, 0.0, 1.0))[1]
    own = [slope * own_gain[e] - ratio * (own_first + (e - 0.5) * own_second * height) for e in (0, 1)]
    floor = jnp.maximum(jnp.maximum(own[0], own[1]), others)

    _, steep, steeper = phi(jnp.zeros(()))
    margin = 32.0 * UNIT * (steep + steeper) * (slope + ratio)
    total = _at_infinity(phi, polygon)
    for s in (0, 1):
        corner = _gap(phi, w_p, row_p[s : slope.size + s, None, None])[1]
        best = floor
        for e in (0, 1):
            gain = slope[:, None, None] * corner[:, :, e : BLOCK + e]
            cost = first + second * ((e - 0.5) * width - (s - 0.5) * height[:, None, None])
            value = jnp.where(beyond, gain - ratio * cost, -jnp.inf)
            best = jnp.maximum(best, jnp.max(value, axis=(1, 2)))
        total = total + 0.5 * jnp.sum(height * jnp.maximum(best + margin, 0.0))
    return total * (1.0 + 1e-12)


def attained(phi, polygon: Polygon, ratio):
    """The leak at E = ratio of a genuine order of an inner polygon: a lower bound of the worst leak.

    The first rows are active, each served where w(u) ends, non-increasing in u and never before the active rows end.
    """
    row_q, row_p, slope, column_q, column_p = polygon
    size, last = slope.size, column_q.size - 1
    ends_p, ends_q = _blocks(polygon)
    middle_p, middle_q = 0.5 * (row_p[1:] + row_p[:-1])[:, None], 0.5 * (row_q[1:] + row_q[:-1])[:, None]

    def value(p, q, u_p, u_q):
        return _gap(phi, p, u_p)[1] * slope.reshape((-1,) + (1,) * (p.ndim - 1)) - ratio * _gap(phi, q, u_q)[1]

    rough = value(ends_p[None], ends_q[None], middle_p, middle_q)
    rough = jnp.where(ends_q[None] >= row_q[1:, None], rough, -jnp.inf)
    near = jnp.argmax(rough, axis=1)
    index = jnp.clip(near[:, None] * BLOCK + jnp.arange(-BLOCK, BLOCK + 1), 0, last)
    fine = value(column_p[index], column_q[index], middle_p, middle_q)
    fine = jnp.where(column_q[index] >= row_q[1:, None], fine, -jnp.inf)
    best = jnp.take_along_axis(index, jnp.argmax(fine, axis=1)[:, None], axis=1)[:, 0]
    stops = ~(jnp.max(fine, axis=1) > 0.0)
    count = jnp.where(jnp.any(stops), jnp.argmax(stops), size)
    active = jnp.arange(size) < count
    alpha = jnp.searchsorted(column_q, row_q[count])
    served = lax.cummax(jnp.where(active, jnp.maximum(best, alpha), 0), reverse=True)
    w_p, w_q = column_p[served], column_q[served]
    gain = _gap(phi, w_p, row_p[:-1])[0] - _gap(phi, w_p, row_p[1:])[0]
    cost = _gap(phi, w_q, row_q[:-1])[0] - _gap(phi, w_q, row_q[1:])[0]
    margin = 32.0 * UNIT * phi(jnp.zeros(()))[1] * (jnp.diff(row_p) + ratio * jnp.diff(row_q))
    rest = jnp.sum(jnp.where(active, gain - ratio * cost - margin, 0.0))
    return rest + _at_infinity(phi, polygon) * (1.0 - 1e-12)


def crossing(leak, log_delta, highest):
    """(below, above) of the eps in [0, highest] at which a decreasing leak(e^eps) passes delta, by regula falsi."""

    def residual(eps):
        return jnp.log(jnp.maximum(leak(jnp.exp(eps)), 1e-320)) - log_delta

    def step(i, carry):
        low, f_low, high, f_high, kept = carry
        share = jnp.clip(f_low / (f_low - f_high), 0.005, 0.995)
        middle = low + (high - low) * jnp.where(i % 6 == 5, 0.5, share)
        f = residual(middle)
        over = f > 0.0
        # Illinois: an end that is kept twice in a row counts for half
        f_low, f_high = (
            jnp.where(over, f, jnp.where(kept < 0, 0.5 * f_low, f_low)),
            jnp.where(over, jnp.where(kept > 0, 0.5 * f_high, f_high), f),
        )
        return jnp.where(over, middle, low), f_low, jnp.where(over, high, middle), f_high, jnp.where(over, 1, -1)

    zero = 0.0 * highest
    start = (zero, residual(zero), highest, jnp.minimum(residual(highest), -1e-9), 0)
    low, _, high, _, _ = lax.fori_loop(0, ITERATIONS, step, start)
    return low, high


def epsilon(phi, above: Polygon, below: Polygon, log_delta, highest):
    """(lower, upper) of eps in [0, highest]; upper is inf where even `highest` leaks more than delta."""
    one = jnp.ones(())
    _, upper = crossing(lambda ratio: bound(phi, above, ratio), log_delta, highest)
    lower, _ = crossing(lambda ratio: attained(phi, below, ratio), log_delta, highest)
    reached = jnp.log(bound(phi, above, jnp.exp(upper))) <= log_delta
    zero = jnp.log(bound(phi, above, one)) <= log_delta
    nothing = jnp.log(jnp.maximum(attained(phi, below, one), 1e-320)) <= log_delta
    upper = jnp.where(zero, 0.0, jnp.where(reached, upper, jnp.inf))
    return jnp.where(zero | nothing, 0.0, lower), upper
