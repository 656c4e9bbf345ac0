"""The worst score for "run K times, keep the best": an upper bound of the leak, and an order that nearly attains it.

With `T` the concave trade-off curve of the base (largest P-mass of a set of Q-mass u), `L` its slope and `phi` the
generating function of K, for `E = e^eps >= 1`

    U(E) = int_0^1 max_{u<=w<=1} (L(u) phi'(T(w) - T(u)) - E phi'(w - u))_+ du + phi(1) - phi(1 - T(0)).

Rows are intervals of u, columns intervals of w.  A sketch on few cells finds E, the rows that are active and where
the maxima lie; it decides which lines of the curve are kept, and nothing else: whichever they are, the polygon through
them lies above the curve.  jaxacct/selection/README.md has the theorem and the proofs.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax

from jaxacct.kernels.arrays import Array, Generating
from jaxacct.kernels.worst_bound import SUM_ROUNDING, bound, lines
from jaxacct.kernels.worst_mesh import (
    Inner,
    Mesh,
    Outer,
    Resolution,
    at_infinity,
    mesh,
    middles,
    sketch,
    sketched_epsilon,
    steep,
)

PLACES_BETWEEN_COLUMNS = 32
"""Places between two columns that are looked at for the end of a group."""
SETTLED_EPSILON = 1e-3
"""Distance of two eps below which the order that is best at one is as good as best at the other."""
MOST_ORDERS = 5
"""Most orders that are tried for eps."""
NEAR_EPSILON = 0.02
"""Distance from the eps for which lines were chosen beyond which they are chosen anew."""
MOST_PASSES = 3
"""Most times that the lines are chosen."""
FIRST_STEP = 4e-4
"""First step to the right of an eps."""
STEP_GROWTH = 5.0
"""Factor by which each step to the right is longer than the one before."""
CHORD_WIDTH = 2e-3
"""Width in eps below which the chord of a convex bound is near it."""
MOST_REGULA_FALSI = 30
"""Most steps of regula falsi; its end is certified wherever it stops."""
OUTWARD = 1e-12
"""Relative allowance for a target, and absolute one for an eps, that a few operations have made."""
LEAST_LEAK = 1e-320
"""What a leak below it is replaced by before its logarithm is taken; no bound depends on it."""


class Order(NamedTuple):
    """A score order of an inner polygon: the row of Q-mass (q_k, q_{k+1}] is served where w is w_k."""

    row_q: Array  # (R + 1,)
    row_p: Array  # (R + 1,)
    served_q: Array  # (R,) non-increasing, at least the end of the active rows
    served_p: Array
    active: Array  # (R,) bool, the first so many
    places: Array  # (G + 1,) w where the ends of groups of rows are best served


def order(phi: Generating, curve: Inner, where: Mesh, ratio: Array, resolution: Resolution) -> Order:
    """The best order at E = ratio, as far as the rows and columns of the mesh allow."""
    groups, each = resolution.groups, resolution.lines
    row_q, row_p = curve.q[where.rows], curve.p[where.rows]
    size_q, size_p = jnp.diff(row_q), jnp.diff(row_p)

    def value(at: Array, size_q: Array, size_p: Array, u_q: Array, u_p: Array) -> tuple[Array, Array]:
        """(what rows of these sizes at u win when served at cells `at`, its cost)."""
        cost = jnp.where(size_q > 0.0, ratio * size_q * steep(phi, curve.q[at] - u_q), 0.0)
        return size_p * steep(phi, curve.p[at] - u_p) - cost, cost

    def best_of(at: Array) -> Array:
        """The best of the cells `at` for each group's end; where none wins, what loses the least of its cost."""
        win, cost = value(at, around_q, around_p, row_q[::each], row_p[::each])
        win = jnp.where(jnp.max(win, axis=0) > 0.0, win, win / jnp.maximum(cost, 1e-300))
        return jnp.argmax(win, axis=0)

    # the ends of groups: the best column, then the best place near it
    node = jnp.arange(groups + 1)
    before, after = jnp.maximum(node - 1, 0) * each, jnp.minimum(node + 1, groups) * each
    around_q, around_p = row_q[after] - row_q[before], row_p[after] - row_p[before]
    columns = jnp.concatenate([where.rows[-1:], where.columns, jnp.array([curve.q.size - 1])])
    best = best_of(columns[:, None])
    first, last = columns[jnp.maximum(best - 1, 0)], columns[jnp.minimum(best + 1, columns.size - 1)]
    near = first + (last - first) * jnp.arange(PLACES_BETWEEN_COLUMNS + 1)[:, None] // PLACES_BETWEEN_COLUMNS
    best = jnp.take_along_axis(near, best_of(near)[None], axis=0)[0]
    # rows in a group: between its ends, or at one of them
    a, b = best[:-1, None], best[1:, None]
    between = a + (b - a) * (2 * jnp.arange(each) + 1) // (2 * each)
    tried = jnp.stack([x.reshape(-1) for x in jnp.broadcast_arrays(a, b, between)])
    values = value(tried, size_q, size_p, middles(row_q), middles(row_p))[0]
    stops = (jnp.max(values, axis=0) <= 0.0) & (size_q > 0.0)
    number = jnp.where(jnp.any(stops), jnp.argmax(stops), size_q.size)
    active = jnp.arange(size_q.size) < number
    served = jnp.take_along_axis(tried, jnp.argmax(values, axis=0)[None], axis=0)[0]
    served = _latest(jnp.where(active, served, where.rows[-1]).reshape(groups, each)).reshape(-1)
    return Order(row_q, row_p, curve.q[served], curve.p[served], active, curve.q[best])


def _latest(served: Array) -> Array:
    """The largest entry from each one on, in row-major order: a reversed `lax.cummax` in two steps."""
    later = lambda n: jnp.arange(n)[:, None] <= jnp.arange(n)
    within = jnp.max(jnp.where(later(served.shape[1]), served[:, None, :], 0), axis=2)
    whole = jnp.max(jnp.where(later(served.shape[0]), within[:, 0], 0), axis=1)
    return jnp.maximum(within, jnp.append(whole[1:], 0)[:, None])


def attained(phi: Generating, curve: Inner, found: Order) -> tuple[Array, Array]:
    """(gain, cost): the order leaks at least gain - E cost at every E.

    phi' is convex, so phi(x + h) - phi(x) is at least h times phi' in the middle and at most h times its mean.
    """
    row_q, row_p, served_q, served_p, active, _ = found
    size_q, size_p = jnp.diff(row_q), jnp.diff(row_p)
    gain = size_p * steep(phi, served_p - middles(row_p), -1.0)
    cost = 0.5 * size_q * (steep(phi, served_q - row_q[:-1], 1.0) + steep(phi, served_q - row_q[1:], 1.0))
    infinite = at_infinity(phi, curve.p[0], -1.0)
    gain = (jnp.sum(jnp.where(active, gain, 0.0)) + infinite) * (1.0 - SUM_ROUNDING)
    genuine = jnp.all(size_q >= 0.0) & jnp.all(jnp.diff(served_q) <= 0.0) & (served_q[-1] >= row_q[-1])
    # more than all mass is not released: then the sum is not to be trusted
    return jnp.where(genuine & (gain <= 1.0), gain, 0.0), jnp.sum(jnp.where(active, cost, 0.0)) * (1.0 + SUM_ROUNDING)


def delta(phi: Generating, above: Outer, below: Inner, ratio: Array, resolution: Resolution) -> tuple[Array, Array]:
    """(lower, upper) of the worst leak at E = ratio >= 1; (0, 1) where the two contradict each other."""
    where = mesh(sketch(phi, above.q, above.p, jnp.sum(above.ratio > 1.0), resolution), ratio, resolution)
    found = order(phi, below, _moved(where, above), ratio, resolution)
    gain, cost = attained(phi, below, found)
    upper = bound(lines(phi, above, where, found.places, resolution), ratio)
    lower = gain - ratio * cost
    lower, upper = jnp.where(lower > 0.0, lower, 0.0), jnp.where(upper <= 1.0, upper, 1.0)
    agree = lower <= upper
    return jnp.where(agree, lower, 0.0), jnp.where(agree, upper, 1.0)


def best_order(phi: Generating, below: Inner, ratio: Array, resolution: Resolution) -> Order:
    """The order that leaks most at E = ratio, or nearly."""
    count = jnp.sum(jnp.diff(below.p) > jnp.diff(below.q))
    return order(
        phi, below, mesh(sketch(phi, below.q, below.p, count, resolution), ratio, resolution), ratio, resolution
    )


def _moved(where: Mesh, above: Outer) -> Mesh:
    """A mesh for the polygon above as one for the polygon below."""
    return Mesh(*(above.twin[index] for index in where))


def epsilon(
    phi: Generating, above: Outer, below: Inner, log_delta: Array, highest: Array, resolution: Resolution
) -> tuple[Array, Array]:
    """(lower, upper) of eps in [0, highest]; upper is inf where even `highest` leaks more than delta.

    (0, inf) where the two contradict each other.
    """
    seen = sketch(phi, above.q, above.p, jnp.sum(above.ratio > 1.0), resolution)
    target = jnp.exp(log_delta) * (1.0 + OUTWARD)
    infinite = at_infinity(phi, below.p[0], -1.0) * (1.0 - SUM_ROUNDING)

    def reached(start: Array) -> tuple[Array, Array]:
        """eps at which the order that is best at `start` leaks delta, and where its groups are served."""
        found = order(phi, below, _moved(mesh(seen, jnp.exp(start), resolution), above), jnp.exp(start), resolution)
        gain, cost = attained(phi, below, found)
        room = gain - target
        end = jnp.log(jnp.maximum(room, 1e-300)) - jnp.log(jnp.maximum(cost, 1e-300)) - OUTWARD
        return jnp.clip(jnp.where(room > 0.0, end, 0.0), 0.0, highest), found.places

    def better(carry: tuple[Array, ...]) -> tuple[Array, Array, Array, Array]:
        i, start, low, _ = carry
        next_low, places = reached(jnp.where(i == 0, start, low))
        return i + 1, jnp.where(i == 0, start, low), jnp.maximum(next_low, low), places

    def unsettled(carry: tuple[Array, ...]) -> Array:
        i, start, low, _ = carry
        return (i < 1) | ((i < MOST_ORDERS) & (jnp.abs(low - start) > SETTLED_EPSILON) & (low > 0.0))

    start = sketched_epsilon(seen, log_delta, highest)
    carry = (0, start, 0.0 * start, jnp.zeros(resolution.groups + 1))
    _, _, lower, places = lax.while_loop(unsettled, better, carry)

    def refine(carry: tuple[Array, ...]) -> tuple[Array, Array, Array, Array]:
        i, _, here, best = carry
        known = lines(phi, above, mesh(seen, jnp.exp(here), resolution), places, resolution)
        upper = _crossing(lambda e: bound(known, jnp.exp(e)), lower, jnp.exp(log_delta), highest)
        # whichever lines were chosen: where they find no more than delta at `lower`, one of the two ends is false
        upper = jnp.where((upper > lower) | (lower == 0.0) & (upper >= 0.0), upper, -jnp.inf)
        return i + 1, here, jnp.minimum(upper, highest), jnp.minimum(best, upper)

    def again(carry: tuple[Array, ...]) -> Array:
        i, before, here, _ = carry
        return (i < MOST_PASSES) & (jnp.abs(here - before) > NEAR_EPSILON)

    first = jnp.where(lower > 0.0, lower, start)
    carry = (0, jnp.inf * highest, first, jnp.inf * highest)
    upper = lax.while_loop(again, refine, carry)[3]
    lower = jnp.where(infinite > target, jnp.inf, lower)
    agree = lower <= upper
    return jnp.where(agree, lower, 0.0), jnp.where(agree, upper, jnp.inf)


def _crossing(leak: Callable[[Array], Array], start: Array, delta: Array, highest: Array) -> Array:
    """A certified upper end of the eps in [start, highest] from which a leak convex in e^eps is at most delta.

    inf if even `highest` leaks more; `start` where that leaks no more.
    """

    def outwards(carry: tuple[Array, ...]) -> tuple[Array, Array, Array, Array, Array]:
        _, _, right, at_right, width = carry
        further = jnp.minimum(right + width, highest)
        return right, at_right, further, leak(further), STEP_GROWTH * width

    def short(carry: tuple[Array, ...]) -> Array:
        _, _, right, at_right, _ = carry
        return (at_right > delta) & (right < highest)

    at_start = leak(start)
    carry = (start, at_start, start, at_start, FIRST_STEP * jnp.ones_like(highest))
    left, at_left, right, at_right, _ = lax.while_loop(short, outwards, carry)
    excess = lambda value: jnp.log(jnp.maximum(value, LEAST_LEAK)) - jnp.log(delta)

    def step(carry: tuple[Array, ...]) -> tuple[Array, Array, Array, Array, Array]:
        i, left, at_left, right, at_right = carry
        share = jnp.clip(excess(at_left) / (excess(at_left) - excess(at_right)), 0.02, 0.98)
        middle = left + (right - left) * jnp.where(i % 3 == 2, 0.5, share)
        here = leak(middle)
        over = here > delta
        pick = lambda a, b: jnp.where(over, a, b)
        return i + 1, pick(middle, left), pick(here, at_left), pick(right, middle), pick(at_right, here)

    def wide(carry: tuple[Array, ...]) -> Array:
        i, left, at_left, right, at_right = carry
        return (i < MOST_REGULA_FALSI) & (right - left > CHORD_WIDTH) & (at_left > delta) & (at_right <= delta)

    _, left, at_left, right, at_right = lax.while_loop(wide, step, (0, left, at_left, right, at_right))
    # a convex function lies below its chord
    share = (at_left - delta) / jnp.where(at_left > at_right, at_left - at_right, 1.0)
    crossed = left + jnp.log1p(jnp.clip(share, 0.0, 1.0) * jnp.expm1(right - left)) + OUTWARD
    crossed = jnp.minimum(jnp.where(at_left > at_right, crossed, right), right)
    return jnp.where(at_left <= delta, left, jnp.where(at_right <= delta, crossed, jnp.inf))
