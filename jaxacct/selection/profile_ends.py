"""The ends of a selection's profile: what it leaks at every eps, and its largest loss where the base has one.

At every eps a selection leaks at least `phi(1) - phi(1 - p)`, p the base's mass at infinity.  Where the finite losses
of the base are at most L, those of the selection are at most `L + log max_v phi'(T(v) - p)/phi'(v)`, T the trade-off
curve.  For truncated negative binomial K and a symmetric base that is at most (eta + 2) L.  README.md of this folder,
"The ends of the profile", has the proofs.

Lower ends come from score orders that serve the most revealing outcome of the base.  A share a of its Q-mass, put
above exactly the ranks in (a, v], leaks at least `a (slope phi'(T(v) - p - slope a) - E phi'(v))` besides what has
dQ = 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from scipy.special import expit

from jaxacct.core.floats import ROUNDOFF
from jaxacct.engines.quick_bounds import largest_loss
from jaxacct.mechanisms import DIRECTIONS, Components, Mechanism, batch_shape, components
from jaxacct.mechanisms.base import element
from jaxacct.mechanisms.finite import log_mixture
from jaxacct.selection.base_profile import SAYS_NOTHING, Sides, bounded_loss, meet, place, sides, upper_delta
from jaxacct.selection.bounds_from_base import growth, growth_of
from jaxacct.selection.largest_ratio import (
    LARGEST_LOSS,
    LEAST_SLOPE,
    LOG_ODDS_FIRST,
    LOG_ODDS_LAST,
    MASS_ERROR,
    RELATIVE_ERROR,
    largest_ratio,
    log_ratio_at_knots,
    log_slopes,
    slopes,
)
from jaxacct.selection.law_of_k import Law, evaluated
from jaxacct.selection.tradeoff_polygons import Curve
from jaxacct.selection.worst_case import known_curves

__all__ = ["Limits", "bounded", "last", "leak", "narrowed"]

SERVED_SHARES = np.geomspace(1e-12, 1.0, 97)[:, None]
"""Shares of the most revealing outcome that an order may serve: eight for each power of ten."""
RANKS_TRIED = 160
"""How many v are tried with each share, evenly in their log-odds."""


class Limits(NamedTuple):
    """One direction of one selection; every end is certified."""

    leak: tuple[float, float]  # (lower, upper) of delta at infinity
    largest: float  # no finite loss is larger; inf where nothing is known
    gain: np.ndarray  # for genuine orders: by how much they leak more than their cost times E
    cost: np.ndarray
    reached: float  # orders have losses up to this

    def epsilon(self, delta: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(lower, upper) of epsilon at delta >= 0."""
        left = np.maximum(delta - self.leak[0], 0.0) * (1.0 + RELATIVE_ERROR)
        ratio = np.max((self.gain - left[..., None]) / self.cost, axis=-1, initial=1.0)
        low = np.where(left > 0.0, np.log(ratio), np.maximum(np.log(ratio), self.reached))
        low = np.where(delta < self.leak[0], np.inf, low)
        return low, np.where(delta >= self.leak[1], self.largest, np.inf)

    def delta(self, epsilon: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(lower, upper) of delta at eps >= 0."""
        return np.full(epsilon.shape, self.leak[0]), np.where(epsilon >= self.largest, self.leak[1], 1.0)


def bounded(run: Mechanism) -> np.ndarray:
    """Whether the finite losses are bounded, of the batch's shape: where delta = 0 has a meaning."""
    return bounded_loss(components(run, "add_or_remove_one", "remove")).reshape(batch_shape(run))


def narrowed(
    quantity: str, run: Mechanism, law: Law, values: np.ndarray, relation: str, ends: np.ndarray, rows: np.ndarray
) -> np.ndarray:
    """Certified (2, *shape) ends of "epsilon" at delta or "delta" at eps, in some rows narrowed by the limits.

    Where the limits contradict the ends that were given, (0, inf) or (0, 1).
    """
    shape = ends.shape[1:]
    flat = np.broadcast_to(values, shape).reshape(-1)
    pairs = np.broadcast_shapes(batch_shape(run), law.shape)
    number = np.broadcast_to(np.arange(int(np.prod(pairs))).reshape(pairs), shape).reshape(-1)
    base = np.broadcast_to(np.arange(int(np.prod(batch_shape(run)))).reshape(batch_shape(run)), pairs).reshape(-1)
    place = np.broadcast_to(np.arange(int(np.prod(law.shape))).reshape(law.shape), pairs).reshape(-1)
    found = ends.reshape(2, -1).copy()
    for one in np.unique(number[rows.reshape(-1)]):
        here = np.flatnonzero((number == one) & rows.reshape(-1))
        low, high = np.zeros(here.size), np.zeros(here.size)
        index = tuple(int(i) for i in np.unravel_index(int(place[one]), law.shape))
        for limits in _limits(run, law.element(index), relation, int(base[one])):
            side = limits.epsilon(flat[here]) if quantity == "epsilon" else limits.delta(flat[here])
            low, high = np.maximum(low, side[0]), np.maximum(high, side[1])
        found[:, here] = meet(found[:, here], (low, high), SAYS_NOTHING[quantity])
    return found.reshape(ends.shape)


def last(run: Mechanism, law: Law, relation: str) -> tuple[np.ndarray, np.ndarray]:
    """(largest finite loss, mass at infinity), upper ends, of the shape of base and law; inf where unbounded."""
    mine = batch_shape(run)
    shape = np.broadcast_shapes(mine, law.shape)
    base = np.broadcast_to(np.arange(int(np.prod(mine))).reshape(mine), shape)
    found = np.zeros((2, *shape))
    for index in np.ndindex(shape):
        some = law.element(place(law.shape, index)) if law.shape else law
        for one in _limits(run, some, relation, int(base[index])):
            found[:, *index] = np.maximum(found[:, *index], (one.largest, one.leak[1]))
    return found[0], found[1]


def _limits(run: Mechanism, law: Law, relation: str, row: int) -> Iterator[Limits]:
    """The limits of each direction for one configuration of the base."""
    parts = {name: components(run, "add_or_remove_one", name).take(slice(row, row + 1)) for name in DIRECTIONS}
    curves = known_curves(run)[row]
    one = element(run, np.unravel_index(row, batch_shape(run))) if batch_shape(run) else run
    for side in sides(run, relation):
        yield _of_one(one, parts[side.direction], parts[side.opposite], curves[side.direction], law, side)


def _of_one(run: Mechanism, ahead: Components, back: Components, curve: Curve, law: Law, side: Sides) -> Limits:
    apart, unseen = (abs(float(each.delta_infinity[0])) for each in (ahead, back))
    lost = leak(law, apart)
    if not bounded_loss(ahead)[0]:
        return Limits(lost, np.inf, np.zeros(0), np.ones(0), 0.0)
    top, returned = (float(largest_loss(each).above[0]) for each in (ahead, back))
    returned = returned if bounded_loss(back)[0] else np.inf

    def most(s: np.ndarray) -> np.ndarray:
        """1 - (T(v) - p), rounded down: 1 less the smallest of three bounds of T."""
        v = expit(s)
        by_curve = 1.0 - (np.interp(v, curve.above.q, curve.above.p) - apart * (1.0 - RELATIVE_ERROR)) - MASS_ERROR
        by_loss = 1.0 - np.exp(top) * v * (1.0 + RELATIVE_ERROR) - MASS_ERROR
        by_return = np.exp(-returned) * np.maximum(expit(-s) - unseen - MASS_ERROR, 0.0) * (1.0 - RELATIVE_ERROR)
        return np.clip(np.maximum(np.maximum(by_curve, by_loss), by_return), 0.0, 1.0)

    largest = np.inf
    if top < LARGEST_LOSS:
        ratio = largest_ratio(law, most, np.exp(top))
        largest = top + float(np.log(ratio)) + 1e-12 if ratio >= 1.0 else np.inf
    grown = growth(law, growth_of(run, float(upper_delta(run, np.zeros(()), side.forward)), side))
    simple = (top + np.fmin(grown, log_ratio_at_knots(curve.above, law, apart))) * (1.0 + 4.0 * ROUNDOFF)
    return Limits(
        lost, float(np.fmin(largest, simple)), *orders(ahead, curve, law), largest_loss_reached(ahead, curve, law)
    )


def leak(law: Law, apart: float) -> tuple[float, float]:
    """`phi(1) - phi(1 - p)` between p times phi' in the middle and p times the mean of phi' at the ends."""
    factors = np.array([0.0, 0.5 * (1.0 + RELATIVE_ERROR), 1.0 - RELATIVE_ERROR, 1.0 + RELATIVE_ERROR])
    ends = np.clip(apart * factors, 0.0, 1.0)
    value, first, _ = evaluated(law, ends)
    rounding = RELATIVE_ERROR + ROUNDOFF * first[0]
    low = np.fmax(apart * first[1] * (1.0 - 4.0 * RELATIVE_ERROR), value[0] - value[2] - rounding)
    high = np.fmin(apart * 0.5 * (first[0] + first[2]) * (1.0 + 4.0 * RELATIVE_ERROR), value[0] - value[3] + rounding)
    above = np.nextafter(high, 2.0) if apart > 0.0 else high
    found = meet((np.nextafter(low, -1.0), 1.0), (0.0, above), 1.0)
    return float(found[0]), float(found[1])


def orders(parts: Components, curve: Curve, law: Law) -> tuple[np.ndarray, np.ndarray]:
    """(gain, cost) of orders that serve part of the most revealing outcome of finite losses above a share v of Q.

    A share of Q-mass a leaks at least `a (slope phi'(T(v) - p - slope a) - E phi'(v))`, besides what has dQ = 0.
    """
    top, mass = _most_revealing(parts)
    if not 0.0 < top < LARGEST_LOSS:
        return np.zeros(0), np.ones(0)
    slope = np.exp(top) * (1.0 - RELATIVE_ERROR)
    share = mass * np.exp(-top) * (1.0 - RELATIVE_ERROR) * SERVED_SHARES
    v, left = _ranks_tried(curve, law, parts.delta_infinity[0] * (1.0 + RELATIVE_ERROR))
    left = left - slope * (1.0 + 4.0 * RELATIVE_ERROR) * share - MASS_ERROR
    gain = share * slope * np.where(left >= 0.0, slopes(law, 1.0 - left), 0.0) * (1.0 - 2.0 * RELATIVE_ERROR)
    cost = share * slopes(law, 1.0 - v - 4.0 * ROUNDOFF) * (1.0 + 2.0 * RELATIVE_ERROR)
    kept = (gain > cost) & (v >= share) & (cost > LEAST_SLOPE)
    return gain[kept], cost[kept]


def largest_loss_reached(parts: Components, curve: Curve, law: Law) -> float:
    """Orders have losses up to this: a small share of the most revealing outcome above the ranks of each knot."""
    top = _most_revealing(parts)[0] * (1.0 - 32.0 * ROUNDOFF)
    if not top > 0.0:
        return 0.0
    below = 1.0 - curve.below.p + parts.delta_infinity[0] * (1.0 + RELATIVE_ERROR) + MASS_ERROR
    gain, cost = log_slopes(law, below, -1.0), log_slopes(law, 1.0 - curve.below.q, 1.0)
    with np.errstate(invalid="ignore"):
        grown = np.where(below <= 1.0, gain - cost, 0.0)
    return top + float(np.max(grown, initial=0.0, where=np.isfinite(grown)))


def _most_revealing(parts: Components) -> tuple[float, float]:
    """(loss, P-mass) of the outcomes with the largest finite loss."""
    loss = np.where(parts.finite_mass[0] > 0.0, parts.finite_loss[0], -np.inf)
    top, n = np.max(loss, axis=1, initial=-np.inf), parts.finite_n[0]
    mass = np.max(np.where(loss == top[:, None], parts.finite_mass[0], 0.0), axis=1, initial=0.0)
    rate, size = parts.laplace_q[0], 1.0 / parts.laplace_scale[0]
    removing = parts.sign[0] > 0.0
    kept = rate + (1.0 - rate) * np.exp(-size) if removing else np.ones_like(rate)
    tops = np.append(top, log_mixture(size, rate) if removing else -log_mixture(-size, rate))
    masses, counts = np.append(mass, 0.5 * kept), np.append(n, parts.laplace_n[0])
    used = counts > 0.0
    with np.errstate(divide="ignore"):
        return float(np.sum(counts[used] * tops[used])), float(np.exp(np.sum(counts[used] * np.log(masses[used]))))


def _ranks_tried(curve: Curve, law: Law, apart: float) -> tuple[np.ndarray, np.ndarray]:
    """Some v, with the knot where phi'(T - p)/phi'(v) is largest, and T(v) - p rounded down."""
    q, p = curve.below.q[1:], np.maximum(curve.below.p[1:] - apart, 0.0)
    steep = slopes(law, 1.0 - np.stack([p, q]))
    best = int(np.argmax(steep[0] / np.maximum(steep[1], 1e-300)))
    v = np.append(expit(np.linspace(LOG_ODDS_FIRST, LOG_ODDS_LAST, RANKS_TRIED)), q[best])
    return v, np.interp(v, curve.below.q, curve.below.p) - apart
