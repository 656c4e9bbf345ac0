"""Tails of the binomial law from both sides, for a cap on a Poisson sample; n up to 1e9."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from jaxacct.core.floats import ROUNDOFF

__all__ = ["Cap", "cap_of"]

CHUNK = 4096
"""Terms of a series that are taken at a time at first; each further chunk is twice as long."""
UNITS_PER_TERM = 16.0
"""Roundings of one factor of a product of ratios: a difference, two quotients and three products, and half as much
again for the odds, which are the same in all."""
NEGLIGIBLE = 1e-25
"""Share of a sum below which the rest of a falling series is bounded and no longer summed."""


class Cap(NamedTuple):
    """What a cap on a Poisson sample does to one record, each from below and from above."""

    chance: tuple[float, float]
    """tau = Pr[Bin(n-1, q) >= cap]: enough of the others are sampled to fill the batch."""
    rate: tuple[float, float]
    """q' = (cap/n) Pr[Bin(n, q) > cap]/tau: the record's chance to be in the batch then."""


def cap_of(size: float, q: float, cap: float) -> Cap:
    """tau and q' of README.md, "A cap on a Poisson sample", with all rounding.

    With p_k = Pr[Bin(n-1, q) = k] and S = sum_{k >= cap} p_k/p_cap, q' = (cap/n) (S - 1 + q)/S, and tau is the share
    of the terms from cap on in the sum of all, each a product of ratios from the mode or from the cap on.
    """
    n = size - 1.0
    if cap >= size or q == 0.0:
        return Cap((0.0, 0.0), (0.0, 0.0))
    if q == 1.0:
        return Cap((1.0, 1.0), (cap / size * (1.0 - 2.0 * ROUNDOFF), min(cap / size * (1.0 + 2.0 * ROUNDOFF), 1.0)))
    beyond, wrong = _series(n, q, cap, 1)  # S - 1
    if not np.isfinite(
        beyond
    ):  # S is beyond 1e308, and the cap below the mode, so that all terms before it are smaller
        rate = cap / size
        return Cap((1.0 - 2.0 * ROUNDOFF, 1.0), (rate * (1.0 - 4.0 * ROUNDOFF), rate * (1.0 + 2.0 * ROUNDOFF)))
    around, doubt = _series(n, q, cap, -1)  # sum_{k < cap} p_k/p_cap
    if np.isfinite(around):
        tau = (1.0 + beyond) / (1.0 + beyond + around)
        error = wrong + doubt + 16.0 * ROUNDOFF
        chance = (tau * (1.0 - error), min(tau * (1.0 + error), 1.0))
    else:  # less than about 1e-300
        chance = (0.0, 1e-290)
    rate = cap / size * ((beyond + q) / (1.0 + beyond))
    error = 2.0 * wrong + 16.0 * ROUNDOFF
    return Cap(chance, (rate * (1.0 - error), min(rate * (1.0 + error), 1.0)))


def _series(n: float, q: float, start: float, way: int) -> tuple[float, float]:
    """(sum of p_k/p_start over k beyond `start` in one direction, its relative error); inf where it overflows.

    The series is summed to its end, or to where its terms fall and the rest is a geometric series below 1e-25 of it.
    """
    total, last, k, length, terms = 0.0, 1.0, float(start), CHUNK, 0.0
    with np.errstate(over="ignore", invalid="ignore", divide="ignore", under="ignore"):
        while True:
            left = n - k if way > 0 else k
            if left <= 0.0:
                rest = 0.0
                break
            step = k + way * np.arange(min(length, int(left)))
            odds = q / (1.0 - q)
            ratio = (n - step) / (step + 1.0) * odds if way > 0 else step / (n - step + 1.0) / odds
            product = last * np.cumprod(ratio)
            total += float(np.sum(product))
            if not np.isfinite(total):
                return np.inf, 0.0
            last, k, terms = float(product[-1]), k + way * step.size, terms + step.size
            at = (n - k) / (k + 1.0) * odds if way > 0 else k / (n - k + 1.0) / odds
            rest = last * at / (1.0 - at) if at < 1.0 else np.inf  # ratios fall along the series
            if rest <= NEGLIGIBLE * max(total, 1e-300):
                break
            length *= 2
    return total, UNITS_PER_TERM * ROUNDOFF * (terms + 4.0) + 4.0 * NEGLIGIBLE
