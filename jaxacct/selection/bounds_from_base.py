"""Simple bounds of a selection from its base alone, for every law of K, for where the worst score is out of reach.

With m = E[K], phi the generating function of K, T the trade-off curve of the base in one direction and p its mass at
infinity:

    (1 - phi(0)) delta_base(eps)  <=  delta(eps)  <=  min(m delta_base(eps - log R), 1 - phi(1 - delta_base(0))),

R at least `sup_v phi'(T(v) - p)/phi'(v)`, and `delta(eps) <= delta_{n copies of the base}(eps)` where K <= n.
README.md of this folder, "Bounds from the base alone", has the proofs.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from jaxacct.core.floats import ROUNDOFF
from jaxacct.engines.quick_bounds import largest_loss
from jaxacct.mechanisms import Mechanism, batch_shape, components, repeat
from jaxacct.mechanisms.base import element
from jaxacct.mechanisms.finite import log_mixture
from jaxacct.selection.base_profile import (
    LEAST_DELTA,
    SAYS_NOTHING,
    Sides,
    base_delta,
    base_epsilon,
    bounded_loss,
    place,
    sides,
    upper_delta,
)
from jaxacct.selection.law_families import Binomial, Poisson, TruncatedNegativeBinomial, largest_k
from jaxacct.selection.law_of_k import Law, evaluated

__all__ = ["Growth", "ends", "growth", "growth_of"]

ROUNDED_UP = 1.0 + 1e-11
"""A factor larger than the rounding of any of these formulas; phi and phi' are accurate to 4e-12."""
MOST_COPIES = 16
"""Where K is at most this, copies of any base are composed; copies of Gaussians, in closed form, are any number."""
LARGEST_LOSS = 600.0
"""Largest finite loss of a base whose copies are composed: the engines go so far."""


class Growth(NamedTuple):
    """What is known of the base, in one direction, to bound `phi'(T(v) - p)/phi'(v)`."""

    distance: float  # delta_base(0), at least the largest T(v) - p - v
    ahead: float  # largest finite loss; inf where it is unbounded
    back: float  # that of the reverse direction; inf also where the reverse direction has mass at infinity


def growth(law: Law, base: Growth) -> float:
    """An upper bound of `log phi'(T(v) - p) - log phi'(v)` over all v, for one law; inf where nothing is known."""
    distance, ahead, back = base
    with np.errstate(divide="ignore", over="ignore"):
        if isinstance(law, TruncatedNegativeBinomial):
            value = (law.eta + 1.0) * min(back, float(np.log1p(distance * ((1.0 - law.gamma) / law.gamma))))
        elif isinstance(law, Poisson):
            value = law.mean * distance
        elif isinstance(law, Binomial) and law.trials > 1.0:
            p = np.asarray(law.probability_of_run)
            by_loss = -float(log_mixture(-np.asarray(ahead), p)) if np.isfinite(ahead) else -float(np.log1p(-p))
            by_distance = float(np.log1p(p * distance / (1.0 - p))) if p < 1.0 else np.inf
            value = (law.trials - 1.0) * min(by_loss, by_distance)
        elif (most := largest_k(law)) <= 1.0:
            value = 0.0
        else:  # a polynomial of degree n - 1 with coefficients >= 0
            value = (most - 1.0) * ahead
            _, first, _ = evaluated(law, np.array([0.0, 1.0]))
            value = min(value, float(np.log(first[0] / first[1]))) if first[1] > 0.0 else value
    value = float(value) * ROUNDED_UP
    return value if value >= 0.0 else np.inf


def ends(quantity: str, run: Mechanism, law: Law, values: np.ndarray, relation: str) -> np.ndarray:
    """(2, *shape) lower and upper ends of "epsilon" at delta in [0, 1) or "delta" at eps >= 0; all broadcast."""
    mine = batch_shape(run)
    pairs = np.broadcast_shapes(mine, law.shape)
    shape = np.broadcast_shapes(pairs, np.shape(values))
    flat = np.broadcast_to(values, shape).reshape(-1)
    number = np.broadcast_to(np.arange(int(np.prod(pairs))).reshape(pairs), shape).reshape(-1)
    found = np.empty((2, flat.size))
    for count, index in enumerate(np.ndindex(pairs)):
        here = np.flatnonzero(number == count)
        one = element(run, place(mine, index)) if mine else run
        some = law.element(place(law.shape, index)) if law.shape else law
        sided = [_of_one(quantity, one, some, flat[here], side) for side in sides(one, relation)]
        found[:, here] = np.max(sided, axis=0)
    return found.reshape(2, *shape)


def _of_one(quantity: str, run: Mechanism, law: Law, values: np.ndarray, side: Sides) -> np.ndarray:
    """The ends of one configuration in one direction."""
    most = SAYS_NOTHING[quantity]
    if not law.mean > 0.0:  # nothing is ever released
        return np.zeros((2, *values.shape))
    (none,), (once,), _ = evaluated(law, np.ones(1))
    mean, tried = float(law.mean) * ROUNDED_UP, max(1.0 - none * ROUNDED_UP - 4.0 * ROUNDOFF, once / ROUNDED_UP)
    distance = float(upper_delta(run, np.zeros(()), side.forward))
    base = growth_of(run, distance, side)
    grown = growth(law, base)
    moved = _moved(law, distance)
    if quantity == "delta":
        low = tried * base_delta(run, values, side.forward)[0]
        shifted = values - grown
        below = np.maximum(-shifted, 0.0)  # delta(-x) = 1 - e^-x + e^-x reverse(x), which is at most reverse(0)
        known = np.where(
            shifted >= 0.0, upper_delta(run, np.maximum(shifted, 0.0), side.forward), -np.expm1(-below) + distance
        )
        high = np.fmin(np.fmin(mean * known * ROUNDED_UP, moved), 1.0)
    else:
        low = base_epsilon(run, values / tried if tried > LEAST_DELTA else np.ones(values.shape), side.forward)[0]
        high = (base_epsilon(run, values / mean / ROUNDED_UP, side.forward)[1] + grown) * ROUNDED_UP
        high = np.where(moved <= values, 0.0, high)
    copies = largest_k(law)
    if 1.0 < copies < np.inf and (_gaussian(run) or (copies <= MOST_COPIES and not LARGEST_LOSS < base.ahead < np.inf)):
        many = repeat(run, copies)
        ask = base_delta if quantity == "delta" else base_epsilon
        high = np.fmin(high, ask(many, values, side.forward)[1])
    return np.stack([np.where(low >= 0.0, low, 0.0), np.where(high >= 0.0, high, most)])


def _moved(law: Law, distance: float) -> float:
    """`1 - phi(1 - distance)`, rounded up: with probability phi(1 - distance) coupled candidates are all the same."""
    (sure, survived), (steep, _), _ = evaluated(law, np.array([0.0, min(distance, 1.0)]))
    difference = sure - survived + 4.0 * ROUNDOFF * (1.0 + steep) + (ROUNDED_UP - 1.0)
    return float(np.fmin(np.fmin(difference, steep * distance * ROUNDED_UP), 1.0))


def growth_of(run: Mechanism, distance: float, side: Sides) -> Growth:
    """What bounds the growth of phi' for one configuration."""
    ahead, back = (components(run, "add_or_remove_one", name) for name in (side.direction, side.opposite))
    losses = [float(largest_loss(each).above[0]) if bounded_loss(each)[0] else np.inf for each in (ahead, back)]
    return Growth(distance, losses[0], losses[1] if float(back.delta_infinity[0]) == 0.0 else np.inf)


def _gaussian(run: Mechanism) -> bool:
    """Whether the base is Gaussian throughout, so that copies of it have a closed form."""
    parts = components(run, "add_or_remove_one", "remove")
    others = (parts.gauss_n, parts.laplace_n, parts.finite_n)
    return bool(np.all(parts.mu2 > 0.0)) and not any(np.any(n > 0.0) for n in others)
