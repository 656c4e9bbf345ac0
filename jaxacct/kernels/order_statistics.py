"""The best of K draws of N(0, 1) against the best of K draws of N(mu, 1): hockey-stick divergences.

Let F, G be the distribution functions of the two normal laws, f, g their densities, and phi the generating function of
K. The best has the densities `phi'(F) f` and `phi'(G) g`. An interval (a, b] has the mass `phi(F(b)) - phi(F(a))`. The
mass phi(0) of K = 0 is common to both. With P and Q the two laws of the best, the divergence at ratio E = e^eps is
`P(A) - E Q(A)`. Here A is the set on which l, the log ratio of the densities, is above eps. A is a union of few
intervals, whose ends are solved for (jaxacct/selection/README.md, "Computing monotone_score", has the errors).

These kernels run on NumPy only, since the values in the arrays decide which ends are solved for. Rows do not depend on
each other.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import numpy as np

from jaxacct.kernels.arrays import Array

REACHES = (9.0, 13.0, 37.5)
"""How many standard deviations the nodes go beyond the means. A row takes the first number whose nodes hold all but
1e-9 of delta. Beyond the last of these distances masses underflow in float64."""
STEP = 0.32
"""Distance between the nodes around each mean. If two means are near, the nodes around one lie between the nodes around
the other."""
CROSSING_STEPS = 40
"""Largest number of Newton steps for an end of an interval. 3 are usual; near an extremum of the log ratio more are
needed."""
CLOSE = 1e-6
"""Newton's method stops after a step of at most this. If an end is off by e, the divergence is off by about e^2."""
MOST_ROUNDS = 60
"""Largest number of rounds that solve for eps; 5 are usual, since the error falls faster than geometrically."""
LARGEST_EPS = 700.0
"""Largest eps that is searched, whose exp is finite."""


class Laws(Protocol):
    """The functions that these kernels need of the laws of K, one law in each row (`jaxacct.selection.Law`)."""

    def steepness(self, x: Any, y: Any) -> tuple[Any, Any]: ...

    def rise(self, x: Any, y: Any, d: Any) -> Any: ...

    def taken(self, index: Any) -> Laws: ...


class Line(NamedTuple):
    """Nodes from -inf to inf, log ratios there, and masses of the cells between nodes; each row is a configuration."""

    laws: Any
    mu: Array  # (R,)
    x: Array  # (R, X)
    log_ratio: Array  # (R, X): log ratio of the densities, best of N(mu, 1) over best of N(0, 1); nan if both underflow
    present: Array  # (R, X - 1): masses of the best of N(mu, 1)
    without: Array  # (R, X - 1): masses of the best of N(0, 1)

    def rows(self, index: Array) -> Line:
        """Return some of the rows."""
        return Line(self.laws.taken(index), *(each[index] for each in self[1:]))


def line(laws: Any, mu: Array, reach: float) -> Line:
    """Return the nodes of every row. If the log ratio has an extremum between two nodes, one node is moved to it."""
    steps = int(np.ceil(2.0 * reach / STEP))
    own = np.linspace(-reach, reach, steps + 1)
    x = np.sort(np.concatenate([own + 0.0 * mu[:, None], own[:-1] + reach / steps + mu[:, None]], axis=1), axis=1)
    edge = np.full((mu.size, 1), np.inf)
    x = np.concatenate([-edge, x, edge], axis=1)
    column = laws.taken((slice(None), None))
    log_ratio, slope = _log_ratio(column, mu[:, None], x)
    turned = (slope[:, 2:-1] > 0.0) != (slope[:, 1:-2] > 0.0)
    row, cell = np.nonzero(turned & np.isfinite(slope[:, 2:-1]) & np.isfinite(slope[:, 1:-2]))
    if row.size:
        cell = cell + 1
        at, height = _extremum(laws.taken(row), mu[row], x[row, cell], x[row, cell + 1])
        node = cell + (at - x[row, cell] > x[row, cell + 1] - at)
        x[row, node], log_ratio[row, node] = at, height
    masses = [_masses(column, z[:, :-1], z[:, 1:]) for z in (x - mu[:, None], x)]
    return Line(laws, mu, x, log_ratio, *masses)


def _log_ratio(laws: Any, mu: Array, x: Array) -> tuple[Array, Array]:
    """Return the log ratio l of the densities, and l'; nan where phi' leaves float64. At x = +-inf l is infinite."""
    from scipy.special import ndtr

    logs, slopes = [], []
    for z in (x - mu, x):
        steep, ratio = laws.steepness(ndtr(z), ndtr(-z))
        logs.append(steep)
        slopes.append(ratio * np.exp(-0.5 * z**2) * (2.0 * np.pi) ** -0.5)
    with np.errstate(invalid="ignore"):
        log_ratio = (logs[0] - logs[1]) + mu * (x - 0.5 * mu)
        log_ratio = np.where(np.isfinite(x), log_ratio, x)
        return log_ratio, slopes[0] - slopes[1] + mu


def _masses(laws: Any, low: Array, high: Array) -> Array:
    """Return masses of the best of N(0, 1) in the intervals (low, high]."""
    from scipy.special import ndtr

    upper = low > 0.0  # differences are taken in the nearer tail
    x, y = ndtr(high), ndtr(-high)
    return laws.rise(x, y, np.maximum(np.where(upper, ndtr(-low) - y, x - ndtr(low)), 0.0))


def _extremum(laws: Any, mu: Array, low: Array, high: Array) -> tuple[Array, Array]:
    """Return (x, l) at the extremum of the log ratio l between `low` and `high`, by the Illinois rule for l' = 0."""
    at_low, at_high = _log_ratio(laws, mu, low)[1], _log_ratio(laws, mu, high)[1]
    at, value = low, _log_ratio(laws, mu, low)[0]
    for _ in range(12):  # twelve steps of the Illinois rule
        with np.errstate(divide="ignore", invalid="ignore"):
            share = at_low / (at_low - at_high)
        at = low + np.where(np.isfinite(share), np.clip(share, 0.0, 1.0), 0.5) * (high - low)
        value, slope = _log_ratio(laws, mu, at)
        left = (slope > 0.0) == (at_low > 0.0)  # l' is halved at the end that stays
        low, at_low, high, at_high = (
            np.where(left, at, low),
            np.where(left, slope, 0.5 * at_low),
            np.where(left, high, at),
            np.where(left, 0.5 * at_high, slope),
        )
    return at, value


def _best_set(rows: Line, side: float, eps: Array) -> tuple[Array, Array]:
    """Return (P(A), Q(A)) for `A = {side * l > eps}`, l being the log ratio.

    P is the best of N(mu, 1) for side 1, and the best of N(0, 1) for side -1.
    """
    active = side * rows.log_ratio > eps[:, None]
    full = active[:, 1:] & active[:, :-1]
    masses = (rows.present, rows.without)[:: int(side)]
    first, second = (np.sum(np.where(full, each, 0.0), axis=1) for each in masses)
    row, cell = np.nonzero(active[:, 1:] != active[:, :-1])
    laws, mu, rising = rows.laws.taken(row), rows.mu[row], active[row, cell + 1]
    ends = rows.x[row, cell], rows.x[row, cell + 1]
    heights = side * rows.log_ratio[row, cell] - eps[row], side * rows.log_ratio[row, cell + 1] - eps[row]
    at = _crossing(laws, mu, side, eps[row], ends, heights)
    low, high = np.where(rising, at, ends[0]), np.where(rising, ends[1], at)
    shifts = (mu, 0.0 * mu)[:: int(side)]
    for total, shift in zip((first, second), shifts, strict=True):
        np.add.at(total, row, _masses(laws, low - shift, high - shift))
    return first, second


def _crossing(
    laws: Any, mu: Array, side: float, eps: Array, ends: tuple[Array, Array], heights: tuple[Array, Array]
) -> Array:
    """Return the x between the two `ends` at which side * l crosses eps, by a bracketed Newton's method.

    l is the log ratio. If l is not finite at one finite end, the result is the other end.
    """
    low: Array
    high: Array
    (low, high), (at_low, at_high) = ends, heights
    low = np.asarray(np.where(np.isfinite(at_low) | np.isinf(low), low, high))
    high = np.asarray(np.where(np.isfinite(at_high) | np.isinf(high), high, low))
    with np.errstate(invalid="ignore", divide="ignore"):
        chord = low + (high - low) * (at_low / (at_low - at_high))
    at = np.asarray(np.where(np.isfinite(chord), chord, np.where(np.isfinite(low), low, high)))
    going = np.flatnonzero(np.isfinite(at))
    for _ in range(CROSSING_STEPS):
        if not going.size:
            break
        here, below, above = at[going], low[going], high[going]
        value, slope = _log_ratio(laws.taken(going), mu[going], here)
        value, slope = side * value - eps[going], side * slope
        left = (value > 0.0) == (at_low[going] > 0.0)
        below, above = np.where(left, here, below), np.where(left, above, here)
        with np.errstate(invalid="ignore", divide="ignore"):
            following = here - value / slope
            middle = 0.5 * (below + above)
        inside = (following >= below) & (following <= above)
        following = np.where(inside, following, np.where(np.isfinite(middle), middle, here))
        at[going], low[going], high[going] = following, below, above
        going = going[np.abs(following - here) > CLOSE]
    return at


def divergence(rows: Line, eps: Array) -> Array:
    """Return the larger of the two hockey-stick divergences at ratio e^eps, eps >= 0, (R,)."""
    found = np.zeros(rows.mu.size)
    for side in (1.0, -1.0):
        first, second = _best_set(rows, side, eps)
        with np.errstate(divide="ignore"):
            cost = np.exp(np.minimum(eps + np.log(second), LARGEST_EPS))
        found = np.maximum(found, first - cost)
    return found


def crossing(rows: Line, delta: Array) -> Array:
    """Return the least eps >= 0 at which both divergences are at most delta, (R,); inf beyond LARGEST_EPS."""
    largest = np.exp(LARGEST_EPS)
    found = np.ones(rows.mu.size)
    for side in (1.0, -1.0):
        first, second = (rows.present, rows.without)[:: int(side)]
        ratio = np.maximum(found, _of_cells(first, second, delta))
        going = np.arange(rows.mu.size)
        for _ in range(MOST_ROUNDS):
            before = ratio[going]
            part = rows if going.size == ratio.size else rows.rows(going)
            first, second = _best_set(part, side, np.log(before))
            above = _next(first, second, delta[going], before)
            ratio[going] = above
            # A row is done when its ratio E = e^eps grows relatively by less than 1e-13.
            going = going[(above > before * (1.0 + 1e-13)) & (above < largest)]
            if not going.size:
                break
        found = np.maximum(found, ratio)
    return np.where(found < largest, np.log(found), np.inf)


def _of_cells(first: Array, second: Array, delta: Array) -> Array:
    """Return a lower bound of E = e^eps: the ratio at which the divergence of the cells' masses falls to delta."""
    ratio = np.ones(delta.size)
    for _ in range(MOST_ROUNDS):
        active = first > ratio[:, None] * second
        gained, lost = (np.sum(np.where(active, each, 0.0), axis=1) for each in (first, second))
        above = _next(gained, lost, delta, ratio)
        done = not np.any(above > ratio * (1.0 + 1e-3))
        ratio = above
        if done:
            break
    return ratio


def _next(first: Array, second: Array, delta: Array, ratio: Array) -> Array:
    """Return the E at which `P(A) - E Q(A) = delta` for a fixed set A, at least `ratio` and at most e^LARGEST_EPS."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        above = (first - delta) / second
    return np.minimum(np.where(above > ratio, above, ratio), np.exp(LARGEST_EPS))
