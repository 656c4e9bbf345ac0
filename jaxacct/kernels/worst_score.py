"""The worst score for "run K times, keep the best": an upper bound of the leak, and an order that nearly attains it.

With `T` the concave trade-off curve of the base (largest P-mass of a set of Q-mass u), `L` its slope and `phi` the
generating function of K, for `E = e^eps >= 1`

    U(E) = int_0^1 max_{u<=w<=1} (L(u) phi'(T(w) - T(u)) - E phi'(w - u))_+ du + phi(1) - phi(1 - T(0)).

Rows are intervals of u, columns intervals of w.  A sketch on few cells finds E, the rows that are active and where
the maxima lie; it decides which lines of the curve are kept, and nothing else: whichever they are, the polygon through
them lies above the curve.  jaxacct/selection/README.md has the theorem and the proofs.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxacct.kernels.worst_bound import ROUNDING, bound, lines
from jaxacct.kernels.worst_plan import (
    Effort,
    Inner,
    Outer,
    Plan,
    Sketch,
    looked_at,
    middles,
    placed,
    plan,
    sketched_epsilon,
    steep,
)

NEAR = 0.02
"""Distance from the eps for which lines were chosen beyond which they are chosen anew."""
STEPS = 30
"""Most steps of regula falsi for eps; its end is certified wherever it stops."""
WIDTH = 2e-7
"""Absolute width of eps at which it stops."""
PASSES = 3
"""Most times that the lines are chosen anew."""


class Order(NamedTuple):
    """A genuine score order of an inner polygon: active rows of Q-mass (q_k, q_{k+1}], served where w is w_k."""

    row_q: jax.Array  # (R + 1,)
    row_p: jax.Array  # (R + 1,)
    served_q: jax.Array  # (R,) non-increasing, at least the end of the active rows
    served_p: jax.Array
    active: jax.Array  # (R,) bool, the first so many


def order(phi, curve: Inner, where: Plan, found: Sketch, ratio, effort: Effort) -> Order:
    """The best order at E = ratio, as far as the rows and columns of the plan allow."""
    groups, each, count = effort.groups, effort.lines, effort.columns
    cells = curve.q.size - 1
    inside = placed(where.rows, found.rows, 0, where.end, groups * each)[1:]
    index = jnp.concatenate([jnp.zeros(1, inside.dtype), inside, where.end[None]])
    bulk = placed(where.columns, found.columns, where.end, cells, count)
    columns = jnp.concatenate([index[each::each], bulk, jnp.array([cells])])
    row_q, row_p, w_q, w_p = curve.q[index], curve.p[index], curve.q[columns], curve.p[columns]
    size_q, size_p = jnp.diff(row_q), jnp.diff(row_p)
    middle_q, middle_p = middles(row_q[::each]), middles(row_p[::each])
    gain, cost = steep(phi, w_p[None] - middle_p[:, None]), steep(phi, w_q[None] - middle_q[:, None])
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
    gain = size_p * steep(phi, served_p - middles(row_p), -1.0)
    cost = 0.5 * size_q * (steep(phi, served_q - row_q[:-1], 1.0) + steep(phi, served_q - row_q[1:], 1.0))
    infinite = curve.p[0] * steep(phi, 1.0 - curve.p[0], -1.0)
    gain = (jnp.sum(jnp.where(active, gain, 0.0)) + infinite) * (1.0 - ROUNDING)
    return gain, jnp.sum(jnp.where(active, cost, 0.0)) * (1.0 + ROUNDING)


def delta(phi, above: Outer, below: Inner, ratio, effort: Effort):
    """(lower, upper) of the worst leak at E = ratio >= 1."""
    found, _ = looked_at(phi, above.q, above.p, jnp.sum(above.ratio > 1.0), lambda _: ratio, effort)
    where = plan(found, ratio, effort)
    upper = bound(lines(phi, above, where, found, effort), ratio)
    gain, cost = attained(phi, below, order(phi, below, *_moved(where, found, above, below), ratio, effort))
    return jnp.clip(gain - ratio * cost, 0.0, 1.0), jnp.clip(upper, 0.0, 1.0)


def best_order(phi, below: Inner, ratio, effort: Effort) -> Order:
    """The order that leaks most at E = ratio, or nearly."""
    count = jnp.sum(jnp.diff(below.p) > jnp.diff(below.q))
    found, _ = looked_at(phi, below.q, below.p, count, lambda _: ratio, effort)
    return order(phi, below, plan(found, ratio, effort), found, ratio, effort)


def _moved(where: Plan, found: Sketch, above: Outer, below: Inner):
    """A plan for one polygon as a plan for another."""
    cell = lambda index: jnp.searchsorted(below.q, above.q[index]).astype(index.dtype)
    return where._replace(end=cell(where.end)), found._replace(rows=cell(found.rows), columns=cell(found.columns))


def epsilon(phi, above: Outer, below: Inner, log_delta, highest, effort: Effort):
    """(lower, upper) of eps in [0, highest]; upper is inf where even `highest` leaks more than delta."""
    guess = lambda seen: jnp.exp(sketched_epsilon(seen, log_delta, highest))
    found, first = looked_at(phi, above.q, above.p, jnp.sum(above.ratio > 1.0), guess, effort)

    def refine(carry):
        i, start, _, best, _ = carry
        where = plan(found, jnp.exp(start), effort)
        known = lines(phi, above, where, found, effort)
        upper = _crossing(lambda e: jnp.log(jnp.maximum(bound(known, jnp.exp(e)), 1e-320)) - log_delta, start, highest)
        return i + 1, jnp.minimum(upper, highest), start, jnp.minimum(best, upper), where

    def again(carry):
        i, start, before, *_ = carry
        return (i < PASSES) & (jnp.abs(start - before) > NEAR)

    start = jnp.log(first)
    nowhere = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(lambda: plan(found, start, effort)))
    carry = (0, start, jnp.inf * highest, jnp.inf * highest, nowhere)
    _, last, _, upper, where = lax.while_loop(again, refine, carry)
    ratio = jnp.exp(jnp.where(jnp.isfinite(upper), jnp.minimum(upper, last), start))
    chosen = order(phi, below, *_moved(where, found, above, below), ratio, effort)
    gain, cost = attained(phi, below, chosen)
    target = jnp.exp(log_delta) * (1.0 + 1e-12)
    room = gain - target
    lower = jnp.log(jnp.maximum(room, 1e-300)) - jnp.log(jnp.maximum(cost, 1e-300)) - 1e-12
    lower = jnp.where(room > 0.0, jnp.maximum(lower, 0.0), 0.0)
    infinite = below.p[0] * steep(phi, 1.0 - below.p[0], -1.0) * (1.0 - ROUNDING)
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
