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

from jaxacct.kernels.arrays import Array, iterate, namespace
from jaxacct.kernels.worst_bound import SUM_ROUNDING, bound, lines
from jaxacct.kernels.worst_mesh import (
    Inner,
    Mesh,
    Outer,
    Repetitions,
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


def order(law: Repetitions, curve: Inner, where: Mesh, ratio: Array, resolution: Resolution) -> Order:
    """The best order at E = ratio, as far as the rows and columns of the mesh allow."""
    xp = namespace(curve.q)
    groups, each = resolution.groups, resolution.lines
    row_q, row_p = curve.q[where.rows], curve.p[where.rows]
    size_q, size_p = xp.diff(row_q), xp.diff(row_p)

    def value(at: Array, size_q: Array, size_p: Array, u_q: Array, u_p: Array) -> tuple[Array, Array]:
        """(what rows of these sizes at u win when served at cells `at`, its cost)."""
        cost = xp.where(size_q > 0.0, ratio * size_q * steep(law, curve.q[at] - u_q), 0.0)
        return size_p * steep(law, curve.p[at] - u_p) - cost, cost

    def best_of(at: Array) -> Array:
        """The best of the cells `at` for each group's end; where none wins, what loses the least of its cost."""
        win, cost = value(at, around_q, around_p, row_q[::each], row_p[::each])
        win = xp.where(xp.max(win, axis=0) > 0.0, win, win / xp.maximum(cost, 1e-300))
        return xp.argmax(win, axis=0)

    # the ends of groups: the best column, then the best place near it
    node = xp.arange(groups + 1)
    left, right = xp.maximum(node - 1, 0) * each, xp.minimum(node + 1, groups) * each
    around_q, around_p = row_q[right] - row_q[left], row_p[right] - row_p[left]
    columns = xp.concatenate([where.rows[-1:], where.columns, xp.array([curve.q.size - 1])])
    best = best_of(columns[:, None])
    first, last = columns[xp.maximum(best - 1, 0)], columns[xp.minimum(best + 1, columns.size - 1)]
    near = first + (last - first) * xp.arange(PLACES_BETWEEN_COLUMNS + 1)[:, None] // PLACES_BETWEEN_COLUMNS
    best = xp.take_along_axis(near, best_of(near)[None], axis=0)[0]
    # rows in a group: between its ends, or at one of them
    a, b = best[:-1, None], best[1:, None]
    between = a + (b - a) * (2 * xp.arange(each) + 1) // (2 * each)
    tried = xp.stack([x.reshape(-1) for x in xp.broadcast_arrays(a, b, between)])
    values = value(tried, size_q, size_p, middles(row_q), middles(row_p))[0]
    stops = (xp.max(values, axis=0) <= 0.0) & (size_q > 0.0)
    number = xp.where(xp.any(stops), xp.argmax(stops), size_q.size)
    active = xp.arange(size_q.size) < number
    served = xp.take_along_axis(tried, xp.argmax(values, axis=0)[None], axis=0)[0]
    served = _latest(xp.where(active, served, where.rows[-1]).reshape(groups, each)).reshape(-1)
    return Order(row_q, row_p, curve.q[served], curve.p[served], active, curve.q[best])


def _latest(served: Array) -> Array:
    """The largest entry from each one on, in row-major order: a reversed `lax.cummax` in two steps."""
    xp = namespace(served)
    later = lambda n: xp.arange(n)[:, None] <= xp.arange(n)
    within = xp.max(xp.where(later(served.shape[1]), served[:, None, :], 0), axis=2)
    whole = xp.max(xp.where(later(served.shape[0]), within[:, 0], 0), axis=1)
    return xp.maximum(within, xp.append(whole[1:], 0)[:, None])


def attained(law: Repetitions, curve: Inner, found: Order) -> tuple[Array, Array]:
    """(gain, cost): the order leaks at least gain - E cost at every E.

    phi' is convex, so phi(x + h) - phi(x) is at least h times phi' in the middle and at most h times its mean.
    """
    xp = namespace(curve.q)
    row_q, row_p, served_q, served_p, active, _ = found
    size_q, size_p = xp.diff(row_q), xp.diff(row_p)
    gain = size_p * steep(law, served_p - middles(row_p), -1.0)
    cost = 0.5 * size_q * (steep(law, served_q - row_q[:-1], 1.0) + steep(law, served_q - row_q[1:], 1.0))
    infinite = at_infinity(law, curve.p[0], -1.0)
    gain = (xp.sum(xp.where(active, gain, 0.0)) + infinite) * (1.0 - SUM_ROUNDING)
    genuine = xp.all(size_q >= 0.0) & xp.all(xp.diff(served_q) <= 0.0) & (served_q[-1] >= row_q[-1])
    # more than all mass is not released: then the sum is not to be trusted
    return xp.where(genuine & (gain <= 1.0), gain, 0.0), xp.sum(xp.where(active, cost, 0.0)) * (1.0 + SUM_ROUNDING)


def delta(law: Repetitions, above: Outer, below: Inner, ratio: Array, resolution: Resolution) -> tuple[Array, Array]:
    """(lower, upper) of the worst leak at E = ratio >= 1; (0, 1) where the two contradict each other."""
    xp = namespace(above.q)
    where = mesh(sketch(law, above.q, above.p, xp.sum(above.ratio > 1.0), resolution), ratio, resolution)
    found = order(law, below, _moved(where, above), ratio, resolution)
    gain, cost = attained(law, below, found)
    upper = bound(lines(law, above, where, found.places, resolution), ratio)
    lower = gain - ratio * cost
    lower, upper = xp.where(lower > 0.0, lower, 0.0), xp.where(upper <= 1.0, upper, 1.0)
    agree = lower <= upper
    return xp.where(agree, lower, 0.0), xp.where(agree, upper, 1.0)


def best_order(law: Repetitions, below: Inner, ratio: Array, resolution: Resolution) -> Order:
    """The order that leaks most at E = ratio, or nearly."""
    xp = namespace(below.q)
    count = xp.sum(xp.diff(below.p) > xp.diff(below.q))
    return order(
        law, below, mesh(sketch(law, below.q, below.p, count, resolution), ratio, resolution), ratio, resolution
    )


def _moved(where: Mesh, above: Outer) -> Mesh:
    """A mesh for the polygon above as one for the polygon below."""
    return Mesh(*(above.twin[index] for index in where))


def epsilon(
    law: Repetitions, above: Outer, below: Inner, log_delta: Array, highest: Array, resolution: Resolution
) -> tuple[Array, Array]:
    """(lower, upper) of eps in [0, highest]; upper is inf where even `highest` leaks more than delta.

    (0, inf) where the two contradict each other.
    """
    xp = namespace(above.q)
    seen = sketch(law, above.q, above.p, xp.sum(above.ratio > 1.0), resolution)
    target = xp.exp(log_delta) * (1.0 + OUTWARD)
    infinite = at_infinity(law, below.p[0], -1.0) * (1.0 - SUM_ROUNDING)

    def reached(start: Array) -> tuple[Array, Array]:
        """eps at which the order that is best at `start` leaks delta, and where its groups are served."""
        found = order(law, below, _moved(mesh(seen, xp.exp(start), resolution), above), xp.exp(start), resolution)
        gain, cost = attained(law, below, found)
        room = gain - target
        end = xp.log(xp.maximum(room, 1e-300)) - xp.log(xp.maximum(cost, 1e-300)) - OUTWARD
        return xp.clip(xp.where(room > 0.0, end, 0.0), 0.0, highest), found.places

    def better(carry: tuple[Array, ...]) -> tuple[Array, Array, Array, Array]:
        i, start, low, _ = carry
        next_low, places = reached(xp.where(i == 0, start, low))
        return i + 1, xp.where(i == 0, start, low), xp.maximum(next_low, low), places

    def unsettled(carry: tuple[Array, ...]) -> Array:
        i, start, low, _ = carry
        return (i < 1) | ((i < MOST_ORDERS) & (xp.abs(low - start) > SETTLED_EPSILON) & (low > 0.0))

    start = sketched_epsilon(seen, log_delta, highest)
    carry = (0, start, 0.0 * start, xp.zeros(resolution.groups + 1))
    _, _, lower, places = iterate(xp, unsettled, better, carry)

    def refine(carry: tuple[Array, ...]) -> tuple[Array, Array, Array, Array]:
        i, _, here, best = carry
        known = lines(law, above, mesh(seen, xp.exp(here), resolution), places, resolution)
        upper = _crossing(lambda e: bound(known, xp.exp(e)), lower, xp.exp(log_delta), highest)
        # whichever lines were chosen: where they find no more than delta at `lower`, one of the two ends is false
        upper = xp.where((upper > lower) | (lower == 0.0) & (upper >= 0.0), upper, -xp.inf)
        return i + 1, here, xp.minimum(upper, highest), xp.minimum(best, upper)

    def again(carry: tuple[Array, ...]) -> Array:
        i, before, here, _ = carry
        return (i < MOST_PASSES) & (xp.abs(here - before) > NEAR_EPSILON)

    first = xp.where(lower > 0.0, lower, start)
    carry = (0, xp.inf * highest, first, xp.inf * highest)
    upper = iterate(xp, again, refine, carry)[3]
    lower = xp.where(infinite > target, xp.inf, lower)
    agree = lower <= upper
    return xp.where(agree, lower, 0.0), xp.where(agree, upper, xp.inf)


def _crossing(leak: Callable[[Array], Array], start: Array, delta: Array, highest: Array) -> Array:
    """A certified upper end of the eps in [start, highest] from which a leak convex in e^eps is at most delta.

    inf if even `highest` leaks more; `start` where that leaks no more.
    """
    xp = namespace(start)

    def outwards(carry: tuple[Array, ...]) -> tuple[Array, Array, Array, Array, Array]:
        _, _, right, at_right, width = carry
        further = xp.minimum(right + width, highest)
        return right, at_right, further, leak(further), STEP_GROWTH * width

    def short(carry: tuple[Array, ...]) -> Array:
        _, _, right, at_right, _ = carry
        return (at_right > delta) & (right < highest)

    at_start = leak(start)
    carry = (start, at_start, start, at_start, FIRST_STEP * xp.ones_like(highest))
    left, at_left, right, at_right, _ = iterate(xp, short, outwards, carry)
    excess = lambda value: xp.log(xp.maximum(value, LEAST_LEAK)) - xp.log(delta)

    def step(carry: tuple[Array, ...]) -> tuple[Array, Array, Array, Array, Array]:
        i, left, at_left, right, at_right = carry
        share = xp.clip(excess(at_left) / (excess(at_left) - excess(at_right)), 0.02, 0.98)
        middle = left + (right - left) * xp.where(i % 3 == 2, 0.5, share)
        here = leak(middle)
        over = here > delta
        pick = lambda a, b: xp.where(over, a, b)
        return i + 1, pick(middle, left), pick(here, at_left), pick(right, middle), pick(at_right, here)

    def wide(carry: tuple[Array, ...]) -> Array:
        i, left, at_left, right, at_right = carry
        return (i < MOST_REGULA_FALSI) & (right - left > CHORD_WIDTH) & (at_left > delta) & (at_right <= delta)

    _, left, at_left, right, at_right = iterate(xp, wide, step, (0, left, at_left, right, at_right))
    # a convex function lies below its chord
    share = (at_left - delta) / xp.where(at_left > at_right, at_left - at_right, 1.0)
    crossed = left + xp.log1p(xp.clip(share, 0.0, 1.0) * xp.expm1(right - left)) + OUTWARD
    crossed = xp.minimum(xp.where(at_left > at_right, crossed, right), right)
    return xp.where(at_left <= delta, left, xp.where(at_right <= delta, crossed, xp.inf))
