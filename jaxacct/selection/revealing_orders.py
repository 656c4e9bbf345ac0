"""Score orders that serve the most revealing outcome of the base: they leak at the far end of the profile.

A share a of its Q-mass, put above exactly the ranks in (a, v], leaks at least `a (slope phi'(T(v) - p - slope a) -
E phi'(v))` besides what has dQ = 0.  These are lower ends (README.md of this folder, "The ends of the profile").
"""

from __future__ import annotations

import numpy as np
from scipy.special import expit

from jaxacct.core.floats import ROUNDOFF
from jaxacct.mechanisms import Components
from jaxacct.mechanisms.finite import log_mixture
from jaxacct.selection.largest_ratio import (
    LARGEST_LOSS,
    LEAST_SLOPE,
    LOG_ODDS_FIRST,
    LOG_ODDS_LAST,
    MASS_ERROR,
    RELATIVE_ERROR,
    log_slopes,
    slopes,
)
from jaxacct.selection.law_of_k import Law
from jaxacct.selection.tradeoff_polygons import Curve

__all__ = ["largest_loss_reached", "orders"]

SERVED_SHARES = np.geomspace(1e-12, 1.0, 97)[:, None]
"""Shares of the most revealing outcome that an order may serve: eight for each power of ten."""
RANKS_TRIED = 160
"""How many v are tried with each share, evenly in their log-odds."""


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
