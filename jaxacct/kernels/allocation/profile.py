"""The profile of one round at many losses at once: certified brackets of delta, for the pairs that are composed.

Contours are placed at some of the losses and read at their neighbours too, which costs little.  Where such a bracket is
wide a contour of its own is placed.  Theorems answer what no contour does.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from jaxacct.floats import ROUNDOFF
from jaxacct.kernels.allocation import theorems
from jaxacct.kernels.allocation.bracket import Contour, bracket_near, contour_at

__all__ = ["RoundProfile", "losses_for", "round_profile"]

READ_TOGETHER = 3
"""Losses that are read from one contour: its own and one on either side."""
BLOCK = 8
"""Contours placed together."""
WIDTHS = ((-9.0, 1e-7), (-36.0, 1e-5), (-np.inf, 1e-2))
"""(log of delta, relative width): above such a delta a wider bracket gets a contour of its own.

The largest deltas decide for many rounds, where errors of each round add up."""
LEAST_S, MOST_S, MOST_SLOTS = 1e-4, 20.0, 1e9
"""1/sigma between which, and slots up to which, contours are placed."""
LAST_LOG_DELTA = -69.0
"""log of the delta at which the losses end; what is left there is mass at infinity."""
FAR_LOG_DELTA = -31.0
"""log of the delta from which the losses lie further apart."""
LARGEST_LOSS = 600.0
"""e^eps and products with it stay within float64 up to here."""
BULK_POINTS = 110
"""Losses within a few deviations of the loss of one round; they decide the width for many rounds."""
BULK_SPREAD = 2.0
"""How far they spread, in deviations: the best density is the cube root of the law's, which is sqrt(3) as wide."""
NATS, FAR_NATS = 0.4, 1.5
"""By how much log delta falls from one loss to the next, beyond the bulk: they decide the width for few rounds."""
LEAST_GAP = 1e-7
"""Least distance of two losses."""
LEAST_DEVIATION = 1e-300
"""Of one round's loss, whose variance may underflow."""
SCAN = 4000
"""Losses at which the guess of the profile is looked at."""


class RoundProfile(NamedTuple):
    """Losses, ascending from 0, and the ends of delta there; all of shape (K,)."""

    epsilon: np.ndarray
    lower: np.ndarray
    upper: np.ndarray


def losses_for(s: float, t: float, sign: float) -> np.ndarray:
    """Losses eps at which the profile should be known: dense where one round's loss lies, and along its tail."""
    variance = np.log1p(np.expm1(min(s * s, 600.0)) / t)
    deviation = max(float(np.sqrt(variance)), LEAST_DEVIATION)
    reach = min(0.5 * s * s + 12.0 * s, LARGEST_LOSS)
    scan = np.concatenate([np.linspace(0.0, 1.0, SCAN) * min(12.0 * deviation, reach), np.linspace(0.0, reach, SCAN)])
    scan = np.unique(scan)
    log_delta = _guess(sign, s, t, scan)
    log_delta = np.minimum.accumulate(np.where(np.isnan(log_delta), LAST_LOG_DELTA, log_delta))
    last = int(np.argmax(log_delta <= LAST_LOG_DELTA)) if log_delta[-1] <= LAST_LOG_DELTA else scan.size - 1
    scan, log_delta = scan[: max(last, 2) + 1], log_delta[: max(last, 2) + 1]
    middle = 0.5 * (scan[1:] + scan[:-1])
    bulk = np.exp(-0.5 * np.square(middle / (BULK_SPREAD * deviation)))
    weight = BULK_POINTS * bulk / (BULK_SPREAD * deviation * np.sqrt(0.5 * np.pi)) * np.diff(scan)
    weight += -np.diff(log_delta) / np.where(log_delta[1:] > FAR_LOG_DELTA, NATS, FAR_NATS)
    count = np.concatenate([[0.0], np.cumsum(weight)])
    eps = np.interp(np.arange(np.ceil(count[-1]) + 1.0) * count[-1] / np.ceil(count[-1]), count, scan)
    return eps[np.concatenate([[True], np.diff(eps) > LEAST_GAP * max(deviation, 1e-3)])]


def round_profile(s: float, t: float, sign: float) -> RoundProfile:
    """delta_remove(eps) (sign = 1) or delta_add(eps) (sign = -1) of one round, at the losses of `losses_for`.

    delta_remove(eps) = E(S - e^eps)_+, delta_add(eps) = e^eps E(e^-eps - S)_+, s = 1/sigma.
    """
    eps = losses_for(s, t, sign)
    k = np.exp(sign * eps)
    each, slots = np.full(eps.size, s), np.full(eps.size, t)
    with np.errstate(all="ignore"):
        low, high = theorems.bounds(sign, each, slots, k)
        if sign < 0:
            low, high = low / k, high / k
        low, high = _outward(low, high)
        if LEAST_S < s < MOST_S and 1.0 < t <= MOST_SLOTS:
            low, high = _by_contours(sign, s, t, eps, low, high)
        low, high = np.fmax(low, 0.0), np.fmin(np.where(np.isnan(high), 1.0, high), 1.0)
        low = np.where(low <= high, low, 0.0)
        # e^eps is off by a few units of eps and 1: as much as delta falls in that distance, and it is convex in e^eps
        off = 4.0 * ROUNDOFF * (1.0 + eps[1:])
        wrong = np.concatenate([[0.0], off * high[:-1] / -np.expm1(-np.diff(eps))])
        low = np.maximum(low - wrong, 0.0)
        high = np.minimum(high + wrong, 1.0)
    # delta falls
    return RoundProfile(eps, np.maximum.accumulate(low[::-1])[::-1], np.minimum.accumulate(high))


def _guess(sign: float, s: float, t: float, eps: np.ndarray) -> np.ndarray:
    """log of about delta; nothing certified depends on it."""
    with np.errstate(all="ignore"):
        found = theorems.guess(sign, np.full(eps.size, s), np.full(eps.size, t), np.exp(sign * eps))
    return found - min(sign, 0.0) * eps


def _outward(low: np.ndarray, high: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return low * (1.0 - 8.0 * ROUNDOFF), high * (1.0 + 8.0 * ROUNDOFF)


def _by_contours(
    sign: float, s: float, t: float, eps: np.ndarray, low: np.ndarray, high: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The ends by theorems, narrowed by contours; what contradicts them is not used."""
    least, most = low.copy(), high.copy()
    logs = np.clip(_guess(sign, s, t, eps), np.log(np.maximum(low, 1e-295)), np.log(np.maximum(high, 1e-295)))
    own = np.arange(READ_TOGETHER // 2, eps.size + READ_TOGETHER // 2, READ_TOGETHER)
    own = np.minimum(own, eps.size - 1)
    for turn in range(2):
        for first in range(0, own.size, BLOCK):
            rows = own[first : first + BLOCK]
            # a contour reads better at losses below the one that it is placed for
            beside = np.minimum(rows + (READ_TOGETHER // 2 + 1 if turn == 0 else 1), eps.size - 1)
            contour = _placed(sign, s, t, eps[beside], logs[beside])
            for step in range(-(READ_TOGETHER // 2), READ_TOGETHER // 2 + 1) if turn == 0 else (0,):
                at = np.clip(rows + step, 0, eps.size - 1)
                lower, estimate, upper, _ = bracket_near(contour, np.exp(sign * eps[at]))
                if sign < 0:
                    lower, estimate, upper = (x * np.exp(eps[at]) for x in (lower, estimate, upper))
                lower, upper = _outward(lower, upper)
                good = (lower <= upper) & (lower <= most[at]) & (upper >= least[at])
                low[at] = np.where(good, np.fmax(low[at], lower), low[at])
                high[at] = np.where(good, np.fmin(high[at], upper), high[at])
                known = good & (estimate > 0.0)
                logs[at] = np.where(known, np.log(np.where(known, estimate, 1.0)), logs[at])
        wanted = np.select([logs > log for log, _ in WIDTHS], [width for _, width in WIDTHS])
        own = np.flatnonzero(~(high - low <= wanted * high))
        if own.size == 0:
            break
    return low, high


def _placed(sign: float, s: float, t: float, eps: np.ndarray, logs: np.ndarray) -> Contour:
    shift = np.where(sign > 0, 0.0, -eps)  # of the option against delta
    return contour_at(sign, np.full(eps.size, s), np.full(eps.size, t), np.exp(sign * eps), logs + shift)
