"""Risks from a certified privacy profile, for many rows: true-positive rates, and mu of Gaussian differential privacy.

mu-GDP is claimed only where both error rates are at least a given rate, the floor. T(a) is the largest true-positive
rate of an attack whose false-positive rate is a. The best eps for the rate a is the eps at which `delta(eps) + e^eps a`
is least. L is the privacy loss of the dominating pair (P, Q). jaxacct/representations/README.md has the derivations.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from scipy.special import ndtri

from jaxacct.accounting.account import profile_at
from jaxacct.accounting.dispatch import kinds_of
from jaxacct.core.bounds import Bounds
from jaxacct.core.floats import ROUNDOFF
from jaxacct.engines.contour import delta_about, delta_along, reach
from jaxacct.engines.protocol import Answer
from jaxacct.mechanisms import Components, Mechanism, components, directions
from jaxacct.mechanisms.base import take_rows

# The largest true-positive rate at a false-positive rate, `T(a) = min over E of {delta(log E) + E a}`
#
# `delta(log E) + E a` is convex in E = e^eps. A secant search estimates the best eps. Three values of delta around the
# estimate give a bracket of the minimum. A poor estimate only makes the bracket wide.

Deltas = Callable[[np.ndarray, np.ndarray], Bounds]
"""Maps (epsilons of shape (K, n), indices of n rows) to certified deltas of shape (K, n), at any real epsilon."""

NEAR = 2e-4
"""The secant search ends if the normal quantiles of Q(L > eps) and the false-positive rate differ by at most this."""
WIDTH = 0.0015
"""Distance of the three epsilons of `rate_at`, in standard deviations of the loss: far larger than `NEAR`, and so small
that the lower end of the true-positive rate is too low by only about WIDTH^2."""
LONGEST = 2.0
"""Longest step of the secant search, in standard deviations of the loss."""
LEAST_DEVIATION, LARGEST_DEVIATION = 1e-9, 50.0
"""Smallest and largest standard deviation of the loss that the search assumes."""


class Place(NamedTuple):
    """Estimates, row by row: the best eps for a false-positive rate, and the standard deviation of the loss."""

    epsilon: np.ndarray
    deviation: np.ndarray


def best_epsilon(deltas: Deltas, fpr: np.ndarray, start: Place | None = None) -> Place:
    """Estimate the best eps for `fpr`: the one with `Q(L > eps) = fpr`."""
    # The normal quantile of Q(L > eps) is linear in eps for Gaussians, and nearly so for compositions. So a secant
    # search needs few steps.
    everywhere, wanted = np.arange(fpr.size), -ndtri(fpr)
    if start is None:
        start = start_at(np.asarray(deltas(np.zeros((1, fpr.size)), everywhere).estimate)[0], fpr)
    epsilon, deviation = start.epsilon.copy(), start.deviation.copy()
    low, high = np.full(fpr.size, -np.inf), np.full(fpr.size, np.inf)
    last, last_gap = np.full(fpr.size, np.nan), np.full(fpr.size, np.nan)
    rows = everywhere
    for _ in range(8):
        at, spread = epsilon[rows], deviation[rows]
        gap = _quantile(deltas, at, spread, rows) - wanted[rows]
        with np.errstate(all="ignore"):  # where the slope is not finite and positive, `spread` is kept
            slope = (gap - last_gap[rows]) / (at - last[rows])
            fresh = np.isfinite(slope) & (slope > 0.0)
            spread = np.clip(np.where(fresh, 1.0 / slope, spread), LEAST_DEVIATION, LARGEST_DEVIATION)
        low[rows], high[rows] = np.where(gap < 0.0, at, low[rows]), np.where(gap < 0.0, high[rows], at)
        last[rows], last_gap[rows], deviation[rows] = at, gap, spread
        moved = at - spread * np.clip(gap, -LONGEST, LONGEST)
        inside = (moved > low[rows]) & (moved < high[rows])
        moved = np.where(inside, moved, 0.5 * (low[rows] + high[rows]))
        epsilon[rows] = np.where(np.isfinite(moved), moved, at)
        rows = rows[np.abs(gap) > NEAR]
        if not rows.size:
            break
    return Place(epsilon, deviation)


def start_at(advantage: np.ndarray, fpr: np.ndarray) -> Place:
    """Return the `Place` of a Gaussian mechanism with delta(0) = `advantage`, for the false-positive rate `fpr`."""
    deviation = np.clip(2.0 * ndtri(0.5 * (1.0 + advantage)), LEAST_DEVIATION, LARGEST_DEVIATION)
    return Place(deviation * (-ndtri(fpr) - 0.5 * deviation), deviation)


def _quantile(deltas: Deltas, epsilon: np.ndarray, deviation: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Estimate -Phi^-1(Q(L > eps)). A difference quotient of delta gives `Q(L > eps) = -d delta/d(e^eps)`."""
    half = 0.005 * deviation
    values = np.asarray(deltas(np.stack([epsilon - half, epsilon + half]), rows).estimate)
    with np.errstate(all="ignore"):
        tail = (values[0] - values[1]) / (2.0 * np.exp(epsilon) * np.sinh(half))
        return -ndtri(np.clip(np.nan_to_num(tail), 1e-300, 1.0 - 1e-16))


def rate_at(deltas: Deltas, place: Place, fpr: np.ndarray, width: float | np.ndarray = WIDTH) -> Answer:
    """Return a certified bracket of `T(fpr)`, with a useful lower end if `place` is within `width` of the best eps."""
    at = three_places(place, width)
    found = deltas(at, np.arange(fpr.size))
    ends = (np.asarray(end) for end in (found.lower, found.estimate, found.upper))
    return rate_from_three(at, Answer(*ends), place, fpr, width)


def three_places(place: Place, width: float | np.ndarray) -> np.ndarray:
    """Return (3, n) rising epsilons: `place.epsilon` in the middle, the others `width` deviations of the loss away."""
    return place.epsilon + width * place.deviation * np.array([-1.0, 0.0, 1.0])[:, None]


def rate_from_three(at: np.ndarray, found: Answer, place: Place, fpr: np.ndarray, width: float | np.ndarray) -> Answer:
    """Return the bracket of `T(fpr)` from brackets of delta at `three_places`."""
    distance = width * place.deviation
    with np.errstate(over="ignore", invalid="ignore"):
        line = np.exp(at) * fpr
        lower, middle = (found.lower + line) * (1.0 - 16.0 * ROUNDOFF), found.estimate[1] + line[1]
        upper = (found.upper + line) * (1.0 + 16.0 * ROUNDOFF)
        # For E = e^eps at the three epsilons, (E_1 - E_0)/(E_2 - E_1) = e^-distance. `ratio` is this quotient, `rough`
        # its inverse. Rounding both up makes the lower bounds `left` and `right` smaller.
        ratio, rough = np.exp(-distance) * (1.0 + 1e-4), np.exp(distance) * (1.0 + 1e-4)
        left = lower[1] - ratio * np.maximum(upper[2] - lower[1], 0.0)
        right = lower[1] - rough * np.maximum(upper[0] - lower[1], 0.0)
        turns = (lower[0] >= upper[1]) & (lower[2] >= upper[1]) & (distance > 1e-9 * np.abs(place.epsilon))
        low = np.where(turns, np.minimum(left, right), fpr)
        high = np.minimum(np.nan_to_num(np.min(upper, axis=0), nan=1.0, posinf=1.0), 1.0)
    low = np.minimum(np.maximum(np.nan_to_num(low), fpr), 1.0)
    agree = low <= high
    low, high = np.where(agree, low, fpr), np.where(agree, high, 1.0)
    return Answer(low, np.clip(np.nan_to_num(middle), low, high), high)


def posterior_of(rate: Any, prior: Any, fpr: Any, turn: int) -> Any:
    """Return the posterior `prior rate/(prior rate + (1 - prior) fpr)`, rounded down (turn -1) or up (turn 1)."""
    with np.errstate(all="ignore"):
        # fpr/rate comes first, since prior * rate and (1 - prior)/prior may be beyond the range of float64
        odds = (1.0 - prior) * (fpr / rate / prior)
        found = 1.0 / (1.0 + odds) * (1.0 + turn * 16.0 * ROUNDOFF)
    tiny = (fpr < 1e-290 * rate) & (fpr > 0.0)  # here fpr/rate may be subnormal, and so inaccurate
    if turn > 0:
        found = np.where(tiny, 1.0, np.maximum(found, 1e-307))
    elif turn < 0:
        found = np.where(tiny | (found < 1e-300), 0.0, found)
    return np.clip(np.where(rate > 0.0, found, prior), 0.0, 1.0)


# The mu of Gaussian differential privacy that holds above a floor of the error rates
#
# The claim is `f(a) >= f_mu(a) wherever a >= floor and f(a) >= floor`, where f is the trade-off function that holds in
# both directions. It is proved by tangents that bound f from below, `f(a) >= 1 - delta(eps) - e^eps a`. Each tangent
# is used on one interval of rates, its cell. f_mu is convex, so comparing it with the tangent at both ends suffices.

ROUNDS = 14
"""Largest number of rounds that add tangents where the upper bound of mu is largest."""
MOST_TANGENTS = 300
"""Brackets that are not "ok" after the first rounds get further rounds, which add tangents to many cells. The further
rounds end once a row has more tangents than this, and begin sooner if a round narrows no bracket enough (`STALLED`)."""
OK_WIDTH = 1e-4
"""Largest relative width of a bracket that is "ok"."""
STALLED = 0.8
"""A round has stalled if it leaves more than this share of a row's width. A stalled row ends if it is "ok", or if the
round added tangents to many cells."""
ADDED = 3
"""Number of tangents that each of the first ROUNDS rounds adds to a row."""
KNOWN_WIDTH = 0.004
"""`WIDTH` for `calibration.risks.by_tangents`. There the middle epsilon may miss the best eps by half this distance."""
NARROW = 2e-6
"""A row is finished when the relative width of its bracket of mu is at most this. `WIDTH` alone makes the lower end
about 1.5e-6 too low."""
ROUNDING = 1e-13
"""Largest relative error that a computed normal quantile is assumed to have."""


class GaussianFit(NamedTuple):
    """Brackets of mu, row by row, and what `gaussian_fit` computed first."""

    mu: Bounds
    lines: np.ndarray  # (3, K, n): eps, lower delta and upper delta of the tangents of the first round
    epsilon: np.ndarray  # (n,), an estimate of the best eps for the false-positive rate `floor`


def gaussian_fit(
    deltas: Deltas, floor: np.ndarray, kind: str, start: Place | None = None, narrow: float = NARROW
) -> GaussianFit:
    """Return brackets of mu, row by row.

    deltas : for a symmetric relation. Unless the kind is "certified", lower ends of delta may be too large.
    floor : (n,), least false-positive and false-negative rate, in (0, 1/2).
    narrow : relative width at which a row is finished.
    """
    size = floor.size
    rows = np.arange(size)
    place = best_epsilon(deltas, floor, start)
    rate = rate_at(deltas, place, floor)
    # The first tangents are evenly spread in eps, from 0 to the estimate of the best eps. If the lower end of `rate` is
    # useless, the estimate may be too small. Then three tangents lie beyond it, the last one at least at
    # eps = -log(floor). Tangents at larger eps are useless: the true-positive rate that they allow is at least 1.
    known, last = rate.lower > floor, np.maximum(place.epsilon, 1e-9)
    beyond = np.append(np.linspace(0.0, 1.0, 11), [2.0, 4.0])[:, None]
    at = last * np.where(known, np.linspace(0.0, 1.0, 13)[:, None], beyond)
    at[-1] = np.where(known, last, np.maximum(at[-1], -np.log(floor)))
    first = lines = _lines(deltas, at, rows)
    low = least_mu(rate, lines[1, 0], floor)
    high = np.full(size, np.inf)
    everywhere = False  # whether each cell that limits the bracket gets a tangent
    for turn in itertools.count():
        most, ends, edges = largest_mu(lines, floor[rows])
        before = high[rows] - low[rows]
        high[rows] = np.minimum(high[rows], most)
        # For a loss with atoms, mu is attained at the floor or at a corner of T, near an edge of a cell.
        corners = np.take_along_axis(edges, np.argpartition(-ends, ADDED, axis=0)[:ADDED], axis=0)
        low[rows] = np.fmax(low[rows], _mu_at(lines, np.vstack([corners, floor[rows]]), floor[rows]))
        width, ok = high[rows] - low[rows], high[rows] - low[rows] <= OK_WIDTH * high[rows]
        stalled = width > STALLED * before
        done = (width <= narrow * high[rows]) | (ok & (turn >= ROUNDS)) | (stalled & (ok | everywhere))
        if done.all() or lines.shape[1] > MOST_TANGENTS:
            break
        everywhere = everywhere or turn >= ROUNDS or bool(stalled[~done].all())
        rows, lines, ends = rows[~done], lines[:, :, ~done], ends[:, ~done]
        # A tangent in a cell's middle leaves about a quarter of the cell's error, so smaller errors can wait.
        many = ends - low[rows] > 0.25 * (np.max(ends, axis=0) - low[rows])
        added = max(ADDED, int(np.max(np.sum(many, axis=0)))) if everywhere else ADDED
        worst = np.argsort(-ends, axis=0)[:added]
        lines = with_more(deltas, lines, worst, rows)
    low = np.nan_to_num(low)
    # for kinds that are not certified only `high` is a bound, and it is kept
    agree = (low <= high) | (kind != "certified")
    low, high = np.where(agree, low, 0.0), np.where(agree, high, np.inf)
    ok = np.isfinite(high) & (high - low <= OK_WIDTH * high)
    status = np.where(agree, np.where(ok, "ok", "width"), "contradiction")
    mu = Bounds(low if kind == "certified" else np.zeros(size), high, high, kind, status, "tradeoff")
    return GaussianFit(mu, first, place.epsilon)


def least_mu(rate: Answer, least_advantage: np.ndarray, floor: np.ndarray) -> np.ndarray:
    """Return a lower bound of mu, or NaN, from the true-positive rate at `floor` and a lower bound of delta(0)."""
    low = np.maximum(_distance(rate.lower, floor, -1.0), _on_diagonal(0.5 * (1.0 - least_advantage), -1.0))
    # If the false-negative rate, 1 - rate, may be below `floor`, mu-GDP is not claimed there, and no mu is refuted.
    return np.where(1.0 - rate.upper >= floor * (1.0 + 4.0 * ROUNDOFF), low, 0.0)


def _distance(rate: np.ndarray, fpr: np.ndarray, turn: float) -> np.ndarray:
    """Return the mu whose curve passes through (fpr, rate), rounded up (turn 1) or down (turn -1)."""
    with np.errstate(invalid="ignore"):
        first, second = ndtri(np.clip(rate * (1.0 + turn * 8.0 * ROUNDOFF), 0.0, 1.0)), ndtri(fpr)
        return first - second + turn * ROUNDING * (np.abs(second) + np.where(np.isfinite(first), np.abs(first), 0.0))


def _on_diagonal(rate: np.ndarray, turn: float) -> np.ndarray:
    """Return the mu for which both error rates can equal `rate` <= 1/2, rounded up (turn 1) or down (turn -1)."""
    with np.errstate(invalid="ignore"):
        found = -2.0 * ndtri(np.clip(rate * (1.0 - turn * 8.0 * ROUNDOFF), 0.0, 0.5)) * (1.0 + turn * ROUNDING)
        return np.maximum(found, 0.0)


def _mu_at(lines: np.ndarray, fpr: np.ndarray, floor: np.ndarray) -> np.ndarray:
    """Return a lower bound of mu from lower bounds of T at the false-positive rates `fpr` (C, n)."""
    # T(a) is the least `delta + E a` over E = e^eps. Since delta is convex in E, delta between two neighbouring E of
    # `lines` lies above the extended chords of the cells before and after, and above every weighted mean of the two.
    # The mean whose slope is nearest to -a is used.
    epsilon, low, high = lines
    a, ratio = fpr[:, None], np.exp(epsilon)
    width = ratio[:-1] * np.expm1(np.diff(epsilon, axis=0))
    # On each cell the slope of delta is at least `before` and at most `after`.
    before = np.concatenate([-np.ones_like(low[:1]), (low[1:] - high[:-1]) / width])
    after = np.concatenate([np.minimum((high[2:] - low[1:-1]) / width[1:], 0.0), np.zeros_like(low[:1])])
    last, before = before[-1], before[:-1]
    with np.errstate(all="ignore"):
        share = np.clip(np.nan_to_num((after + a) / (after - before), nan=1.0), 0.0, 1.0)
        at_left = share * low[:-1] + (1.0 - share) * (low[1:] - after * width) + a * ratio[:-1]
        at_right = share * (low[:-1] + before * width) + (1.0 - share) * low[1:] + a * ratio[1:]
        wrong = 4.0 + a * ratio[1:] + (np.abs(before) + np.abs(after)) * width
        cells = np.minimum(at_left, at_right) - 32.0 * ROUNDOFF * wrong
        # `beyond` bounds `delta + E a` from below for E > ratio[-1], where delta is above 0, and above the line through
        # the last point with the slope `last`.
        beyond = a[:, 0] * ratio[-1] + np.minimum(low[-1], a[:, 0] * low[-1] / np.maximum(-last, 1e-300))
        rate = np.minimum(np.min(cells, axis=1), beyond * (1.0 - 32.0 * ROUNDOFF))
    found = _distance(np.minimum(rate, 1.0), fpr, -1.0)
    # A false-positive rate counts only if it lies between `floor` and c (see `largest_mu`), and if its false-negative
    # rate is at least `floor`. Up to c the best E is at least 1, so no cells with eps < 0 are needed.
    held = np.min(high + a * ratio, axis=1) * (1.0 + 16.0 * ROUNDOFF) <= 1.0 - floor * (1.0 + 4.0 * ROUNDOFF)
    held &= (fpr >= floor) & (fpr <= 0.5 * (1.0 - high[0]))
    return np.max(np.where(held & ~np.isnan(found), found, 0.0), axis=0)


def largest_mu(lines: np.ndarray, floor: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (an upper bound of mu from all cells, the largest mu at each edge between two cells, these edges).

    The first tangent (eps = 0) meets the diagonal, where both error rates are equal, at the rate c. The cells divide
    the rates from `floor` to c. In cell k tangent k bounds the true-positive rate. Any division gives a valid bound.
    """
    epsilon, _, delta = lines
    with np.errstate(over="ignore"):  # a tangent whose slope overflows to inf bounds no rate
        ratio = np.exp(epsilon) * (1.0 + 4.0 * ROUNDOFF)
    # `fixed` is c. The cells end at c, since the trade-off function beyond c mirrors the trade-off function before c.
    fixed = 0.5 * (1.0 - delta[0])
    floor = np.minimum(floor, np.maximum(fixed, 0.0))
    with np.errstate(all="ignore"):
        ends = (delta[:-1] - delta[1:]) / np.diff(ratio, axis=0)
    ends = np.minimum.accumulate(np.clip(np.nan_to_num(ends, nan=1.0), floor, np.maximum(fixed, floor)), axis=0)
    edges = np.concatenate([fixed[None], ends, floor[None]])  # edges fall; cell k is [edges[k + 1], edges[k]]
    at_left, at_right = (_distance(delta + ratio * edge, edge, 1.0) for edge in (edges[1:], edges[:-1]))
    used = edges[1:] < edges[:-1]
    shown = np.where(used, np.maximum(at_left, at_right), -np.inf)
    nowhere = ~used.any(axis=0)
    alone = np.min(_distance(delta + ratio * floor, floor, 1.0), axis=0)
    # Another tangent may meet the diagonal at a rate p > `fixed`. No cell covers the rates from `fixed` to p, but there
    # f >= f_mu too: this tangent proves f >= `fixed`, and `largest` >= `_on_diagonal(fixed)` gives f_mu <= `fixed`.
    largest = np.maximum(np.where(nowhere, alone, np.max(shown, axis=0)), _on_diagonal(fixed, 1.0))
    # no finite mu is proved if `fixed` is not positive (delta(0) may be 1), or if a normal quantile is NaN
    largest = np.where((fixed > 0.0) & ~np.isnan(largest), largest, np.inf)
    between = np.maximum(np.where(used[:-1], at_left[:-1], -np.inf), np.where(used[1:], at_right[1:], -np.inf))
    return largest, np.nan_to_num(between, nan=np.inf), edges[1:-1]


def with_more(deltas: Deltas, lines: np.ndarray, cells: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Add R tangents to each row, midway in eps between the tangents c and c + 1, for each c of `cells` (R, n)."""
    left, right = (np.take_along_axis(lines[0], cells + more, axis=0) for more in (0, 1))
    together = np.concatenate([lines, _lines(deltas, 0.5 * (left + right), rows)], axis=1)
    order = np.argsort(together[0], axis=0, kind="stable")
    return np.take_along_axis(together, order[None], axis=1)


def _lines(deltas: Deltas, epsilon: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Return an array (3, K, n) with eps, lower delta and upper delta of the tangents at `epsilon` (K, n)."""
    found = deltas(epsilon, rows)
    return np.stack([epsilon, found.lower, found.upper])


# The regret of f_mu is the least kappa with `f(a + kappa) - kappa <= f_mu(a)` for all a, where f is the mechanism's
# trade-off function
#
# The regret is at most `sup over eps >= 0 of (delta_mu(eps) - delta(eps))/(1 + e^eps)`. The value of this quotient at
# eps = 0 is a lower bound of the regret.

REGRET_ROUNDS = 8
"""Largest number of rounds, which evaluate delta at more eps, where the upper bound of the regret is largest."""
VALUES_ADDED = 4
"""Number of values of delta that a round adds to a row."""
REGRET_WIDTH = 1e-3
"""A row is finished when its bracket's relative width is at most this, or its width at most `NARROW_ABSOLUTE`."""
NARROW_ABSOLUTE = 1e-7


def gaussian_regret(deltas: Deltas, lines: np.ndarray, mu: np.ndarray, kind: str) -> Bounds:
    """Return each row's bracket of the regret of f_mu. `deltas` and the first `lines` are for a symmetric relation."""
    from jaxacct.engines import closed_form

    low, high = np.zeros(mu.size), np.full(mu.size, 0.5)  # a regret is at most 1/2, since f(a + 1/2) - 1/2 <= 0
    rows = np.flatnonzero(np.isfinite(mu) & (mu > 0.0))
    high[mu == 0.0] = 0.0
    lines = lines[:, :, rows]
    if kind != "certified":
        lines[1:] = 0.0  # only delta >= 0 is used
    for turn in range(REGRET_ROUNDS + 1):
        if not rows.size:
            break
        epsilon, below, above = lines
        flat = np.broadcast_to(mu[rows], epsilon.shape).reshape(-1)
        gaussian = closed_form.delta(flat, epsilon.reshape(-1))
        most, least = (end.reshape(epsilon.shape) for end in (gaussian.upper, gaussian.lower))
        cells, last = _cells(epsilon, below, above, most)
        bound = np.maximum(np.max(cells, axis=0), last) * (1.0 + 1e-12) + 4.0 * ROUNDOFF
        low[rows] = np.maximum(low[rows], 0.5 * (least[0] - above[0]) - 4.0 * ROUNDOFF)
        high[rows] = np.maximum(np.minimum(high[rows], np.maximum(bound, 0.0)), low[rows])
        done = (high[rows] - low[rows] <= np.maximum(REGRET_WIDTH * high[rows], NARROW_ABSOLUTE)) | (
            turn == REGRET_ROUNDS
        )
        rows, lines, cells = rows[~done], lines[:, :, ~done], cells[:, ~done]
        if rows.size:
            worst = np.argpartition(-cells, VALUES_ADDED, axis=0)[:VALUES_ADDED]
            lines = with_more(deltas, lines, worst, rows)
    narrow = high - low <= np.maximum(10.0 * REGRET_WIDTH * high, NARROW_ABSOLUTE)
    low, middle = (low, low + 0.5 * (high - low)) if kind == "certified" else (np.zeros_like(low), high)
    return Bounds(low, middle, high, kind, np.where(narrow, "ok", "width"), "tradeoff")


def _cells(
    epsilon: np.ndarray, low: np.ndarray, high: np.ndarray, gaussian: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return upper bounds of `(delta_mu - delta)/(1 + e^eps)` on each cell between two eps, and beyond the last eps."""
    # delta_mu and delta are convex and decreasing in e^eps. So on a cell delta_mu is below its chord, and delta is
    # above the extended chords of the cells before and after, and above its value at the cell's right end. A line
    # divided by 1 + e^eps is monotone, so the larger of its values at the two ends of the cell is an upper bound.
    with np.errstate(all="ignore"):
        ratio = np.exp(epsilon)
        # expm1 avoids the difference of two neighbouring e^eps, which would cancel.
        width, share = ratio[:-1] * np.expm1(np.diff(epsilon, axis=0)), 1.0 / (1.0 + ratio)
        # `before` is at most the slope of delta, in e^eps, on the cell before. For the first cell `before` is
        # -(1 - delta(0))/2, which is a subgradient of delta at eps = 0, because the relation is symmetric.
        before = np.concatenate([-0.5 * (1.0 - low[:1]), (low[1:-1] - high[:-2]) / width[:-1]]) * (1.0 + 1e-9)
        # `after` is at least the slope of delta, in e^eps, on the cell after. For the last cell `after` is 0.
        after = np.minimum((high[2:] - low[1:-1]) / width[1:], 0.0) * (1.0 - 1e-9)
    after = np.concatenate([after, np.zeros_like(low[:1])])
    bounds = []
    for left, right in ((low[:-1], low[:-1] + before * width), (low[1:] - after * width, low[1:]), (low[1:], low[1:])):
        at_left, at_right = (gaussian[:-1] - left) * share[:-1], (gaussian[1:] - right) * share[1:]
        bounds.append(np.nan_to_num(np.maximum(at_left, at_right), nan=np.inf))
    return np.min(bounds, axis=0), gaussian[-1] * share[-1]


# Delta of many runs, each at several epsilons, by one contour for each run and direction ("add" or "remove")

DIRECTION_WIDTH, TOLERANCE = 0.25, 0.01
"""Relative width of delta's bracket in one direction, and relative size of the terms cut off, in units of rtol."""


def deltas_about(run: Mechanism, epsilon: np.ndarray, relation: str, rtol: float) -> Bounds:
    """Return delta of n DP-SGD runs at (K, n) real epsilons. `profile_at` answers runs that one contour does not."""
    ends = np.zeros((3, *epsilon.shape))
    one_contour = np.all(epsilon >= 0.0, axis=0)
    with np.errstate(all="ignore"):
        for direction in directions(run, relation):
            parts = components(run, relation, direction)
            one_contour &= _plain(parts)
            rows = np.flatnonzero(one_contour)
            if rows.size:
                found = delta_about(
                    parts.take(rows), epsilon[:, rows].T, ends[0][:, rows].T, DIRECTION_WIDTH * rtol, TOLERANCE * rtol
                )
                ends[:, :, rows] = np.maximum(ends[:, :, rows], np.stack(found).transpose(0, 2, 1))
    one_contour &= np.all((ends[2] - ends[0] <= rtol * ends[2]) & (ends[2] > 0.0), axis=0)
    ends *= 1.0 + 4.0 * ROUNDOFF * np.array([-1.0, 0.0, 1.0])[:, None, None]
    left = np.flatnonzero(~one_contour)
    if left.size:
        rest = profile_at(take_rows(run, left), epsilon[:, left], relation=relation, rtol=rtol)
        ends[:, :, left] = rest.lower, rest.estimate, rest.upper
    low, high = ends[0], np.minimum(ends[2], 1.0)
    return Bounds(low, np.clip(ends[1], low, high), high, run.kind_under(relation), "ok", "tradeoff")


def deltas_along(
    run: Mechanism,
    place: np.ndarray,  # (n,), an eps near those at which rtol is wanted; the contour is placed for it
    epsilon: np.ndarray,  # (K, n)
    both: np.ndarray,  # (K, n), whether both bounds are wanted to within rtol, and not just a rough upper bound
    relation: str,
    rtol: float,
    tolerance: float = TOLERANCE,  # the terms cut off are up to tolerance * rtol * (first approximation at `place`)
) -> tuple[np.ndarray, np.ndarray]:
    """Bound delta of n DP-SGD runs at rising eps, by one contour per direction. A contour that fails gives [0, 1]."""
    low, high = np.zeros(epsilon.shape), np.zeros(epsilon.shape)
    with np.errstate(all="ignore"):
        # "remove" comes first. An upper bound for "add" is narrow enough once it is below the lower bound for "remove".
        for direction in sorted(directions(run, relation), reverse=True):
            parts = components(run, relation, direction)
            plain = _plain(parts) & np.all(epsilon >= 0.0, axis=0)
            high[:, ~plain] = 1.0
            rows = np.flatnonzero(plain)
            if rows.size:
                some, at, cut_off, asked = parts.take(rows), place[rows], tolerance * rtol, both[:, rows].T
                if direction == "add":
                    # For "add" only deltas near eps = 0 matter, so the contour is placed for a lower eps. `cut_off` is
                    # small, since delta is much smaller several standard deviations above that eps.
                    at, cut_off = 0.28 * np.minimum(at, reach(some).largest_loss), 1e-9
                    asked = np.zeros(asked.shape, bool)
                widths = np.where(asked, DIRECTION_WIDTH * rtol, 3e-3)
                found = delta_along(some, at, epsilon[:, rows].T, low[:, rows].T, widths, asked, cut_off)
                low[:, rows] = np.maximum(low[:, rows], found.lower.T)
                high[:, rows] = np.maximum(high[:, rows], found.upper.T)
    return low * (1.0 - 4.0 * ROUNDOFF), np.minimum(high * (1.0 + 4.0 * ROUNDOFF), 1.0)


def _plain(parts: Components) -> np.ndarray:
    """Return, for each row, whether the contour engine would answer it without another engine or a theorem."""
    kinds = kinds_of(parts)
    others = kinds.before_contours() | kinds.beyond_kernels | kinds.nearly_always_sampled
    return kinds.answered_by["contour"] & (parts.delta_infinity == 0.0) & ~others
