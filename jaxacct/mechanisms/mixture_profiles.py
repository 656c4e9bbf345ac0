"""Pairs of mixtures of normal laws, as finite pairs that dominate them (README.md, "Pairs of mixtures").

A pair is given by two pieces: (P, Q) for the profile H_a(P || Q) at a >= 1, and (P, Q) for H_a(Q || P) at a >= 1.  In
each the ratio of the densities is monotone where it exceeds 1, so that the best event is a half line and a point of the
profile is known in closed form for every end of a half line.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from jaxacct.core.floats import ROUNDOFF
from jaxacct.mechanisms.gaussian import profile_of_gaussian
from jaxacct.mechanisms.parts import FinitePair
from jaxacct.mechanisms.profile import pair_of_profile

__all__ = [
    "Mixture",
    "Points",
    "mixed_pair",
    "mixture_pair",
    "points_above",
    "points_below",
    "profile_of_points",
    "quantiles",
    "revealed_pair",
    "taking_part",
    "two_points",
    "zero_out_points",
]

CENTRAL_QUANTILES, QUANTILES_PER_TAIL = 2000, 250
"""Quantiles at which the profile is taken: within 9 deviations of the two ends, and beyond up to 37.

So many cost about 1e-4 in epsilon; at 37 deviations the normal tail is 6e-300."""
PROFILE_ROUNDING, ROUNDING_OF_SQUARES = 1e-12, 4e-15
"""Relative error allowed for the two terms whose difference is a point of the profile.

The first is ample for a few roundings of logarithms up to 700 in magnitude, 8e-14 each; the second counts u^2 and the
squares of the means, which cancel in the second term."""
LEAST_RELATIVE_GAP = 1e-7
"""Points nearer than this, relative to the largest shift in deviations, are left out.

Slopes between nearer points lose their digits."""
MOST_GRIDS = 12
"""Gaussians of a revealed shift whose own grids of eps are joined."""
Points = tuple[np.ndarray, np.ndarray]


class Mixture(NamedTuple):
    """sum_j weight_j N(mean_j, 1): means in standard deviations, shape (A,), weights > 0."""

    mean: np.ndarray
    weight: np.ndarray


def quantiles(low: float, high: float, fineness: int = 1) -> np.ndarray:
    """Ends of half lines for laws whose means lie between low and high, `fineness` times as many as usual."""
    far = QUANTILES_PER_TAIL * fineness
    return np.concatenate(
        [
            np.linspace(-37.0, -9.0, far)[:-1] + low,
            np.linspace(low - 9.0, high + 9.0, CENTRAL_QUANTILES * fineness),
            np.linspace(9.0, 37.0, far)[1:] + high,
        ]
    )


def points_above(p: Mixture, q: Mixture, u: np.ndarray) -> Points:
    """(eps, delta): the gain of P over e^eps Q above u, where the ratio p/q increases and exceeds 1."""
    return _points(p, q, u, 1.0)


def points_below(p: Mixture, q: Mixture, u: np.ndarray) -> Points:
    """(eps, delta): the gain of P over e^eps Q below u, where the ratio p/q decreases and exceeds 1."""
    return _points(p, q, u, -1.0)


def _points(p: Mixture, q: Mixture, u: np.ndarray, sign: float) -> Points:
    from scipy import special  # takes a while to import: only where it is needed

    def log_tail(law: Mixture) -> np.ndarray:
        return special.logsumexp(np.log(law.weight) + special.log_ndtr(sign * (law.mean - u[:, None])), axis=1)

    def log_density(law: Mixture) -> np.ndarray:
        return special.logsumexp(np.log(law.weight) + law.mean * u[:, None] - 0.5 * law.mean**2, axis=1)

    with np.errstate(over="ignore", invalid="ignore"):  # squares of means beyond 1e308 leave no point
        loss = log_density(p) - log_density(q)
        gain = np.exp(log_tail(p))
        cost = np.exp(log_tail(q) + loss)
        squares = u**2 + max(np.max(p.mean**2), np.max(q.mean**2))
        doubt = PROFILE_ROUNDING + ROUNDING_OF_SQUARES * squares
        delta = np.maximum(gain - cost, 0.0) + doubt * (gain + cost)
    order = np.flatnonzero((loss > 0.0) & np.isfinite(loss) & ~np.isnan(delta))[:: int(sign)]
    return loss[order], np.minimum(delta[order], 1.0)


def profile_of_points(forward: Points, reverse: Points, scale: float) -> FinitePair:
    """The pair that dominates the points of both directions; scale: the largest shift in deviations."""
    least = LEAST_RELATIVE_GAP * scale
    # a profile falls: what it is at an eps it is at most at a larger one
    epsilon = np.maximum(np.concatenate([forward[0], reverse[0]]), least)
    if not epsilon.size:
        return pair_of_profile(np.zeros(1), np.ones(1), np.ones(1))
    none = (np.ones(forward[0].size), np.ones(reverse[0].size))
    delta, back = np.concatenate([forward[1], none[1]]), np.concatenate([none[0], reverse[1]])
    order = np.argsort(epsilon, kind="stable")
    epsilon, delta, back = epsilon[order], delta[order], back[order]
    # of points that nearly coincide only the last is kept, with what the earlier ones say
    delta, back = np.minimum.accumulate(delta), np.minimum.accumulate(back)
    keep = np.append(np.diff(epsilon) > least, True)
    return pair_of_profile(epsilon[keep], delta[keep], back[keep])


def mixture_pair(shift: np.ndarray, weight: np.ndarray) -> FinitePair:
    """The pair (sum_j weight_j N(shift_j, 1), N(0, 1)) for shifts >= 0, from above."""
    shift, weight = shift[weight > 0.0], weight[weight > 0.0]
    widest = float(shift.max())
    if widest == 0.0:
        return pair_of_profile(np.zeros(1), np.zeros(1), np.zeros(1))
    p, q = Mixture(shift, weight), Mixture(np.zeros(1), np.ones(1))
    u = quantiles(0.0, widest)
    forward, reverse = points_above(p, q, u), points_below(q, p, u)
    nothing = float(weight[shift == 0.0].sum())
    if nothing > 0.0:  # the loss of add is at most -log of the chance of no contribution
        largest = -np.log(nothing) * (1.0 + 1e-15) + 1e-15
        keep = reverse[0] < largest
        reverse = (np.append(reverse[0][keep], largest), np.append(reverse[1][keep], 0.0))
    return profile_of_points(forward, reverse, widest)


def mixed_pair(shares: list[float], pairs: list[FinitePair]) -> FinitePair:
    """The pair that runs pair i with probability share_i and says which; shares that are rounded up are bounds too."""
    atoms = [np.concatenate([pair.loss for pair in pairs])]
    for law in ("p", "q"):
        atoms.append(np.concatenate([share * getattr(pair, law) for share, pair in zip(shares, pairs, strict=True)]))
    ends = [  # at most 1, which shares that are rounded up may exceed
        np.minimum(sum(share * getattr(pair, end) for share, pair in zip(shares, pairs, strict=True)), 1.0)
        for end in ("p_infinity", "q_infinity")
    ]
    return FinitePair(*atoms, *ends)


def revealed_pair(*ways: tuple[np.ndarray, np.ndarray, float]) -> FinitePair:
    """The pair of a symmetric profile, from above: the least of sum_j weight_j Gaussian(shift_j) at 1 + (a - 1)/reach.

    ways : (shift, weight, reach) each; reach 1 where the shift is drawn and revealed, and where less the chance that
    the record takes part at all (README.md, "Pairs of mixtures").
    """
    laws, grids = [], [np.zeros(1)]
    z = np.concatenate([np.linspace(-1.0, 12.0, 400), np.linspace(12.0, 37.0, 80)[1:]])
    for shift, weight, reach in ways:
        some = (shift > 0.0) & (weight > 0.0)
        if not some.any():
            return pair_of_profile(np.zeros(1), np.zeros(1), np.zeros(1))
        order = np.argsort(shift[some])
        shift, weight = shift[some][order], weight[some][order]
        laws.append((shift, weight, reach))
        for one in shift[np.unique(np.linspace(0, shift.size - 1, MOST_GRIDS).astype(int))]:
            inner = np.concatenate([np.linspace(0.0, one, 100), one * (0.5 * one + z)])
            inner = inner[inner > 0.0]
            grids.append(inner if reach == 1.0 else np.logaddexp(np.log1p(-reach), np.log(reach) + inner))
    epsilon = np.unique(np.concatenate(grids))
    least = LEAST_RELATIVE_GAP * min(float(epsilon[-1]), float(laws[0][0][-1]))
    epsilon = epsilon[np.append(True, np.diff(epsilon) > least)]
    delta = np.ones(epsilon.size)
    for shift, weight, reach in laws:
        with np.errstate(over="ignore"):
            inner = np.where(epsilon < 600.0, np.log1p(np.expm1(epsilon) / reach), epsilon - np.log(reach))
        inner = inner * (1.0 - 1e-13)  # delta falls: that of a slightly smaller eps is an upper bound
        found = np.zeros(epsilon.size)
        for one, chance in zip(shift, weight, strict=True):
            found += chance * profile_of_gaussian(one * (1.0 + 4.0 * ROUNDOFF), inner)
        delta = np.minimum(delta, found * (1.0 + 1e-12))
    return pair_of_profile(epsilon, delta, delta)


def two_points(first: float, second: float, q: float) -> Mixture:
    """(1-q) N(first, 1) + q N(second, 1)."""
    law = ((mean, weight) for mean, weight in ((first, 1.0 - q), (second, q)) if weight > 0.0)
    mean, weight = zip(*law, strict=True)
    return Mixture(np.array(mean), np.array(weight))


def zero_out_points(rate: float, s: float) -> tuple[Points, Points]:
    """Both directions of a contribution that is there or 0, and with probability 1 - rate another one in its place.

    H_a(P || Q) of ((1-g) N(-s) + g N(s), (1-g) N(-s) + g N(0)) and H_a(Q || P) of (N(s), (1-g) N(s) + g N(0)), a >= 1
    (README.md, "Zero-out where the slot is kept").
    """
    u = quantiles(-s, s)
    with_it, without = two_points(-s, s, rate), two_points(-s, 0.0, rate)
    forward = points_above(with_it, without, np.append(0.5 * s, u[u > 0.5 * s]))
    nothing = Mixture(np.zeros(1), np.ones(1))
    return forward, points_above(two_points(0.0, s, rate), nothing, quantiles(0.0, s))


def taking_part(weight: np.ndarray) -> tuple[np.ndarray, float]:
    """The weights of a count from 0 on, and the chance that it is not 0, rounded up, for `revealed_pair`.

    Up, since delta rises with the reach: 1 + (a - 1)/reach falls.
    """
    return weight, min(float(weight[1:].sum()) * (1.0 + 1e-12), 1.0)
