"""Many thresholds of one configuration: the profile of delta, and the probabilities of the tails of S = dP/dQ.

Proofs: jaxacct/kernels/allocation/README.md, section 7.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np

from jaxacct.core.floats import ROUNDOFF
from jaxacct.engines import allocation
from jaxacct.engines.blocks import BLOCK
from jaxacct.engines.contour import Answer
from jaxacct.kernels.allocation import theorems
from jaxacct.kernels.allocation.bracket import bracket_near, contours_at

__all__ = ["Tails", "payoff", "profile", "tails"]

BLOCKS = (8, 3, 1, 1)
"""Thresholds that share a contour, round by round; those that are narrow are not asked again."""
NARROW = 1e-7
"""Relative width at which a threshold is not asked again."""


class Tails(NamedTuple):
    """Probabilities that S is beyond a threshold k: S > k where k >= 1, S < k where k < 1; (K,) each."""

    q_lower: np.ndarray
    q_upper: np.ndarray
    p_lower: np.ndarray
    p_upper: np.ndarray


def profile(sigma: float, slots: float, eps: np.ndarray, direction: str) -> Answer:
    """Brackets of delta at many eps >= 0 for one configuration: a contour serves several eps that lie near each other.

    eps : (K,), in any order.
    """
    eps = np.ravel(np.asarray(eps, np.float64))
    sign, s, t = (
        1.0 if direction == "remove" else -1.0,
        np.full(eps.shape, 1.0 / sigma),
        np.full(eps.shape, float(slots)),
    )
    if not allocation.reach(s[:1], t[:1]).all():
        return allocation.delta(np.asarray(sigma), np.asarray(slots), eps, direction)
    with np.errstate(all="ignore"):
        k = np.exp(sign * eps)
        low, mid, high, _ = payoff(sign, s[0], t[0], k)
        if sign < 0:
            low, mid, high = low / k * (1.0 - 16.0 * ROUNDOFF), mid / k, high / k * (1.0 + 16.0 * ROUNDOFF)
        least, most = allocation.theorems_of(sign, s, t, eps)
    agree = (low <= most) & (high >= least)
    low, high = np.where(agree, np.fmax(low, least), least), np.where(agree, np.fmin(high, most), most)
    return Answer(low, np.clip(np.nan_to_num(mid), low, high), high)


def tails(sigma: float, slots: float, k: np.ndarray) -> Tails:
    """Brackets of Q(S > k) and P(S > k) where k >= 1, of Q(S < k) and P(S < k) where k < 1; k > 0 of shape (K,).

    The payoff V(k) = E_Q(S - k)_+ is convex in k, so that the slopes of its chords on both sides bracket -V'(k) =
    Q(S > k); and P(S > k) = V(k) + k Q(S > k).  Likewise for E_Q(k - S)_+, with P(S < k) = k Q(S < k) - V(k).
    """
    k = np.ravel(np.asarray(k, np.float64))
    found = np.empty((4, k.size))
    for sign, rows in ((1.0, np.flatnonzero(k >= 1.0)), (-1.0, np.flatnonzero(k < 1.0))):
        if rows.size:
            found[:, rows] = _tails_of(sign, 1.0 / float(sigma), float(slots), k[rows])
    return Tails(*found)


SHARP = 3e-9
"""The same for slopes, which are differences."""
STEP = 1e-4
"""Chords for slopes: this share of the distance over which the payoff changes by a factor e."""


def _tails_of(sign: float, s: float, t: float, k: np.ndarray) -> np.ndarray:
    if t == 1.0 or not allocation.reach(np.array([s]), np.array([t])).all():
        return np.array([np.zeros_like(k), np.ones_like(k), np.zeros_like(k), np.ones_like(k)])
    with np.errstate(all="ignore"):
        low, mid, high, slope = payoff(sign, s, t, k, SHARP)
        step = STEP * np.clip(mid / (slope * k), 1e-9, 1.0)
        before, after = k * (1.0 - step), k * (1.0 + step)
        _, _, high_0, _ = payoff(sign, s, t, before, SHARP)
        _, _, high_2, _ = payoff(sign, s, t, after, SHARP)
        if sign > 0:
            q_low, q_high = (low - high_2) / (after - k), (high_0 - low) / (k - before)
        else:
            q_low, q_high = (low - high_0) / (k - before), (high_2 - low) / (after - k)
        q_low = np.clip(np.nan_to_num(q_low, nan=0.0), 0.0, 1.0) * (1.0 - 1e-9)
        q_high = np.clip(np.nan_to_num(q_high, nan=1.0), 0.0, 1.0) * (1.0 + 1e-9)
        if sign > 0:
            p_low, p_high = low + k * q_low, high + k * q_high
        else:
            p_low, p_high = k * q_low - high, k * q_high - low
        p_low = np.clip(np.nan_to_num(p_low, nan=0.0), 0.0, 1.0) * (1.0 - 1e-9)
        p_high = np.clip(np.nan_to_num(p_high, nan=1.0), 0.0, 1.0) * (1.0 + 1e-9)
    return np.array([q_low, np.minimum(q_high, 1.0), p_low, np.minimum(p_high, 1.0)])


def payoff(
    sign: float, s: float, t: float, k: np.ndarray, narrow: float = NARROW
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(lower, estimate, upper) of E(S - k)_+ (sign = 1) or E(k - S)_+ (sign = -1) and an estimated slope; (K,)."""
    full = np.ones_like(k)
    low, high = theorems.bounds(sign, s * full, t * full, k)
    guess = np.clip(theorems.guess(sign, s * full, t * full, k), np.log(low + 1e-295), np.log(high + 1e-295))
    found = np.array([low, np.sqrt(low * high), high, np.full_like(k, np.nan)])
    rows = np.flatnonzero(high > 1e-290)
    for together in BLOCKS:
        rows = rows[np.lexsort((sign * k[rows],))]
        leaders = rows[together - 1 :: together] if rows.size >= together else rows[-1:]
        if rows.size % together and leaders[-1] != rows[-1]:
            leaders = np.append(leaders, rows[-1])
        for first in range(0, leaders.size, BLOCK):
            some = slice(first, first + BLOCK)
            lead = leaders[some]
            placed = contours_at(sign, s * full[lead], t * full[lead], k[lead], guess[lead])
            for back, (mine, contour) in itertools.product(range(together), placed):
                at = np.maximum((np.arange(leaders.size)[some][mine] + 1) * together - 1 - back, 0)
                at = rows[np.minimum(at, rows.size - 1)]
                value = np.array(bracket_near(contour, k[at]))
                agree = (value[0] <= found[2, at]) & (value[2] >= found[0, at])
                better = agree & (value[2] - value[0] < found[2, at] - found[0, at])
                found[1, at] = np.where(better, value[1], found[1, at])
                found[3, at] = np.where(better, value[3], found[3, at])
                found[0, at] = np.where(agree, np.fmax(found[0, at], value[0]), found[0, at])
                found[2, at] = np.where(agree, np.fmin(found[2, at], value[2]), found[2, at])
        seen = np.log(np.clip(found[1], 1e-295, None))
        guess = np.where(np.isfinite(seen), seen, guess)
        rows = rows[~(found[2, rows] - found[0, rows] <= narrow * found[2, rows])]
        if rows.size == 0:
            break
    return found[0], np.clip(found[1], found[0], found[2]), found[2], found[3]
