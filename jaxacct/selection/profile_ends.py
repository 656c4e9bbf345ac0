"""A selection's mass at infinity, its largest loss (if bounded), and bounds from the base's own epsilon and delta.

The base has the mass p at infinity.  The rank v of an outcome is the Q-mass of the outcomes with a larger likelihood
ratio.  Proofs: README.md of this folder, "The ends of the profile" and "Bounds from the base alone".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
from scipy.special import expit

from jaxacct.core.floats import ROUNDOFF
from jaxacct.engines.quick_bounds import largest_loss
from jaxacct.kernels.worst_score import Outer
from jaxacct.mechanisms import Components, Mechanism, batch_shape, components, repeat
from jaxacct.mechanisms.finite import log_mixture
from jaxacct.selection.base_profile import (
    LEAST_DELTA,
    PROFILE_RTOL,
    SAYS_NOTHING,
    Curve,
    Sides,
    bounded_loss,
    delta_ends,
    each_pair,
    epsilon_ends,
    gaussian_mu,
    meet,
    sides,
    upper_delta,
)
from jaxacct.selection.law_of_k import (
    Binomial,
    Law,
    PointMass,
    Poisson,
    TruncatedNegativeBinomial,
    evaluated,
    largest_k,
)
from jaxacct.selection.worst_case import known_bases

MASS_ERROR = 16.0 * ROUNDOFF
"""Bound of the absolute error of a mass, or of a difference of two masses: a few roundings of numbers up to 1."""
RELATIVE_ERROR = 4e-12
"""Upper bound of the relative errors of masses, phi and phi'. It is large because phi' is e^x with |x| up to 700."""
ROUNDED_UP = 1.0 + 1e-11
"""Factor by which the bounds from the base alone are rounded up. It covers the rounding error of each formula."""
LOG_ODDS_FIRST, LOG_ODDS_LAST = -40.0, 60.0
"""The range of s for cells of v = 1/(1 + e^-s), from v = 4e-18 to 1 - v = 1e-26. The last cell goes on to v = 1."""
FIRST_CELLS, MOST_CELLS, PIECES_PER_CUT = 4096, 2**18, 4
"""The search over v begins with FIRST_CELLS cells, cuts cells into PIECES_PER_CUT pieces, and ends at MOST_CELLS."""
RATIO_TOLERANCE = 1e-8
"""Relative error that `largest_ratio` aims at. The largest loss has the term log(ratio), with an error of 1e-8."""
KNOTS_DECIDE = (Binomial, PointMass, Poisson, TruncatedNegativeBinomial)
"""Laws of K for which phi'(T(v) - p)/phi'(v) is largest at a knot of T (README.md, "The ends of the profile")."""
LARGEST_LOSS = 650.0
"""`largest_ratio` and `orders` are used only for bases with a largest loss below this, so that e^loss is finite."""
LEAST_SLOPE = 1e-290
"""`largest_ratio` rounds a smaller phi' up to this, and `orders` drops a smaller cost: float64 may lose its digits."""


class Limits(NamedTuple):
    """Certified limits of delta and of the losses, for one direction of one selection."""

    leak: tuple[float, float]  # lower and upper bounds of the mass at infinity
    largest: float  # upper bound of the finite losses; inf if unknown
    gain: np.ndarray  # (M,); for each i, some order of scores has delta(eps) >= leak[0] + gain[i] - e^eps cost[i]
    cost: np.ndarray  # (M,) see `gain`
    reached: float  # some order of scores has a loss at least this large; 0 if none is known

    def epsilon(self, delta: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return lower and upper bounds of epsilon at delta >= 0."""
        left = np.maximum(delta - self.leak[0], 0.0) * (1.0 + RELATIVE_ERROR)
        ratio = np.max((self.gain - left[..., None]) / self.cost, axis=-1, initial=1.0)
        low = np.where(left > 0.0, np.log(ratio), np.maximum(np.log(ratio), self.reached))
        low = np.where(delta < self.leak[0], np.inf, low)
        return low, np.where(delta >= self.leak[1], self.largest, np.inf)

    def delta(self, epsilon: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return lower and upper bounds of delta at eps >= 0."""
        return np.full(epsilon.shape, self.leak[0]), np.where(epsilon >= self.largest, self.leak[1], 1.0)


def narrowed(
    quantity: str, run: Mechanism, law: Law, values: np.ndarray, relation: str, ends: np.ndarray, rows: np.ndarray
) -> np.ndarray:
    """Return the brackets `ends`, (2, *shape), intersected with the bounds of `Limits` where `rows` is true."""
    shape = ends.shape[1:]
    flat, found = np.broadcast_to(values, shape).reshape(-1), ends.reshape(2, -1).copy()
    for here, base, one in each_pair(run, law, shape, rows):
        both = np.zeros((2, here.size))
        for limits in _limits(base, one, relation):
            both = np.maximum(both, getattr(limits, quantity)(flat[here]))
        found[:, here] = meet(found[:, here], both, SAYS_NOTHING[quantity])
    return found.reshape(ends.shape)


def last(run: Mechanism, law: Law, relation: str) -> tuple[np.ndarray, np.ndarray]:
    """Return upper bounds of the selection's largest finite loss (inf if unbounded) and of its mass at infinity."""
    shape = np.broadcast_shapes(batch_shape(run), law.shape)
    found = np.zeros((2, int(np.prod(shape))))
    for here, base, one in each_pair(run, law, shape):
        for limits in _limits(base, one, relation):
            found[:, here] = np.maximum(found[:, here], [[limits.largest], [limits.leak[1]]])
    largest, mass = found.reshape(2, *shape)
    return largest, mass


class Direction(NamedTuple):
    """The losses of a base in one direction and in the reverse direction, and the base's delta at eps = 0."""

    ahead: Components
    back: Components
    loss: float  # largest finite loss; inf if unbounded
    reverse_loss: float  # largest finite loss of the reverse direction
    distance: float  # delta_base(0), an upper bound of T(v) - p - v at every v, where p is the mass at infinity


def _direction(run: Mechanism, side: Sides) -> Direction:
    ahead, back = (components(run, "add_or_remove_one", name) for name in (side.direction, side.opposite))
    loss, reverse = (float(largest_loss(x).above[0]) if bounded_loss(x)[0] else np.inf for x in (ahead, back))
    return Direction(ahead, back, loss, reverse, float(upper_delta(run, np.zeros(()), side.forward)))


def _limits(run: Mechanism, law: Law, relation: str) -> Iterator[Limits]:
    """Yield the limits of each direction for one configuration."""
    for side in sides(run, relation):
        base = _direction(run, side)
        lost = mass_on_top(law, abs(float(base.ahead.delta_infinity[0])))
        if base.loss == np.inf:
            yield Limits(lost, np.inf, np.zeros(0), np.ones(0), 0.0)
        else:  # only bounded losses need the curve, which can take seconds
            yield _of_bounded(base, known_bases(run)[0].curves[side.direction], law, lost)


def _of_bounded(base: Direction, curve: Curve, law: Law, lost: tuple[float, float]) -> Limits:
    apart, unseen = (abs(float(each.delta_infinity[0])) for each in (base.ahead, base.back))

    def most(s: np.ndarray) -> np.ndarray:
        """Return a lower bound of 1 - (T(v) - p) at v = 1/(1 + e^-s), from the least of three upper bounds of T(v)."""
        v = expit(s)
        by_curve = 1.0 - (np.interp(v, curve.above.q, curve.above.p) - apart * (1.0 - RELATIVE_ERROR)) - MASS_ERROR
        by_loss = 1.0 - np.exp(base.loss) * v * (1.0 + RELATIVE_ERROR) - MASS_ERROR
        left = np.maximum(expit(-s) - unseen - MASS_ERROR, 0.0)
        by_return = np.exp(-base.reverse_loss) * left * (1.0 - RELATIVE_ERROR)
        return np.clip(np.maximum(np.maximum(by_curve, by_loss), by_return), 0.0, 1.0)

    largest = np.inf
    if base.loss < LARGEST_LOSS:
        ratio = largest_ratio(law, most, np.exp(base.loss))
        largest = base.loss + float(np.log(ratio)) + 1e-12 if ratio >= 1.0 else np.inf
    grown = np.fmin(growth(law, base), log_ratio_at_knots(curve.above, law, apart))
    largest = float(np.fmin(largest, (base.loss + grown) * (1.0 + 4.0 * ROUNDOFF)))
    return Limits(lost, largest, *orders(base.ahead, curve, law), largest_loss_reached(base.ahead, curve, law))


def mass_on_top(law: Law, apart: float) -> tuple[float, float]:
    """Return (lower, upper) for phi(1) - phi(1 - p), the chance that any of K draws hits a set of mass p = `apart`."""
    factors = np.array([0.0, 0.5 * (1.0 + RELATIVE_ERROR), 1.0 - RELATIVE_ERROR, 1.0 + RELATIVE_ERROR])
    value, first, _ = evaluated(law, np.clip(apart * factors, 0.0, 1.0))
    rounding = RELATIVE_ERROR + ROUNDOFF * first[0]
    low = np.fmax(apart * first[1] * (1.0 - 4.0 * RELATIVE_ERROR), value[0] - value[2] - rounding)
    high = np.fmin(apart * 0.5 * (first[0] + first[2]) * (1.0 + 4.0 * RELATIVE_ERROR), value[0] - value[3] + rounding)
    found = meet((np.nextafter(low, -1.0), 1.0), (0.0, np.nextafter(high, 2.0) if apart > 0.0 else high), 1.0)
    return float(found[0]), float(found[1])


def orders(parts: Components, curve: Curve, law: Law) -> tuple[np.ndarray, np.ndarray]:
    """Return `Limits.gain` and `cost`. In each order, part of the largest-loss outcome outscores only ranks up to v."""
    top, mass = _most_revealing(parts)
    if not 0.0 < top < LARGEST_LOSS:
        return np.zeros(0), np.ones(0)
    slope = np.exp(top) * (1.0 - RELATIVE_ERROR)
    share = mass * np.exp(-top) * (1.0 - RELATIVE_ERROR) * np.geomspace(1e-12, 1.0, 97)[:, None]
    v, left = _ranks_tried(curve, law, parts.delta_infinity[0] * (1.0 + RELATIVE_ERROR))
    left = left - slope * (1.0 + 4.0 * RELATIVE_ERROR) * share - MASS_ERROR
    gain = share * slope * np.where(left >= 0.0, slopes(law, 1.0 - left), 0.0) * (1.0 - 2.0 * RELATIVE_ERROR)
    cost = share * slopes(law, 1.0 - v - 4.0 * ROUNDOFF) * (1.0 + 2.0 * RELATIVE_ERROR)
    kept = (gain > cost) & (v >= share) & (cost > LEAST_SLOPE)
    return gain[kept], cost[kept]


def largest_loss_reached(parts: Components, curve: Curve, law: Law) -> float:
    """Return a lower bound of the largest loss under the orders of scores in `orders`, with v at the curve's knots."""
    top = _most_revealing(parts)[0] * (1.0 - 32.0 * ROUNDOFF)
    if not top > 0.0:
        return 0.0
    below = 1.0 - curve.below.p + parts.delta_infinity[0] * (1.0 + RELATIVE_ERROR) + MASS_ERROR
    gain, cost = log_slopes(law, below, -1.0), log_slopes(law, 1.0 - curve.below.q, 1.0)
    with np.errstate(invalid="ignore"):
        grown = np.where(below <= 1.0, gain - cost, 0.0)
    return top + float(np.max(grown, initial=0.0, where=np.isfinite(grown)))


def _most_revealing(parts: Components) -> tuple[float, float]:
    """Return (loss, P-mass) of the outcome with the largest finite loss."""
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
    """Return ranks v, among them the knot of largest phi'(T(v) - p)/phi'(v), and a lower bound of each T(v) - p."""
    q, p = curve.below.q[1:], np.maximum(curve.below.p[1:] - apart, 0.0)
    steep = slopes(law, 1.0 - np.stack([p, q]))
    best = int(np.argmax(steep[0] / np.maximum(steep[1], 1e-300)))
    v = np.append(expit(np.linspace(LOG_ODDS_FIRST, LOG_ODDS_LAST, 160)), q[best])
    return v, np.interp(v, curve.below.q, curve.below.p) - apart


def log_ratio_at_knots(above: Outer, law: Law, apart: float) -> float:
    """Return an upper bound of `log phi'(T(v) - p) - log phi'(v)` over all v; inf unless the law is in KNOTS_DECIDE."""
    if type(law) not in KNOTS_DECIDE:
        return np.inf
    gain = log_slopes(law, 1.0 - above.p + apart * (1.0 - RELATIVE_ERROR) - MASS_ERROR, 1.0)
    cost = log_slopes(law, 1.0 - above.q, -1.0)
    with np.errstate(invalid="ignore"):
        found = float(np.max(gain - cost))
    return found if found >= 0.0 else np.inf


def log_slopes(law: Law, y: np.ndarray, side: float) -> np.ndarray:
    """Return bounds of log phi'(1 - y) plus a constant: upper if side = 1, lower if -1, NaN or -inf where unknown."""
    y = np.clip(y, 0.0, 1.0)
    known = type(law) in KNOTS_DECIDE  # not isinstance, since a subclass may have another phi
    with np.errstate(divide="ignore", invalid="ignore"):
        if isinstance(law, TruncatedNegativeBinomial) and known:
            value = -(law.eta + 1.0) * np.log(law.gamma + (1.0 - law.gamma) * y)
            error = 8.0 * ROUNDOFF * (law.eta + 1.0)
        elif isinstance(law, Poisson) and known:
            value, error = -law.mean * y, 0.0
        elif isinstance(law, Binomial | PointMass) and known:
            n, p = (law.trials, law.probability_of_run) if isinstance(law, Binomial) else (law.repetitions, 1.0)
            value = (n - 1.0) * np.log1p(-p * y) if n > 1.0 else np.zeros(y.shape)
            error = 8.0 * ROUNDOFF * (n - 1.0) / np.maximum(1.0 - p * y, ROUNDOFF)
        else:
            steep = slopes(law, y)
            value = np.where(steep > LEAST_SLOPE, np.log(np.maximum(steep, LEAST_SLOPE)), np.nan)
            error = 2.0 * RELATIVE_ERROR
        return value + side * (error + 8.0 * ROUNDOFF * np.abs(value))


def slopes(law: Law, y: np.ndarray) -> np.ndarray:
    """Return phi' at 1 - y, where phi is the generating function of K."""
    return evaluated(law, np.clip(y, 0.0, 1.0))[1]


def largest_ratio(law: Law, most: Callable[[np.ndarray], np.ndarray], slope: float) -> float:
    """Return an upper bound, at least 1, of `phi'(T(v) - p)/phi'(v)` for all v in (0, 1]; inf if it overflows.

    `most` maps the log-odds of v to a lower bound of 1 - (T(v) - p).  `slope` bounds the slope of T.
    """

    def bounds(ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return upper bounds of the ratio on C cells, and estimates at the left ends. `ends`, (2, C), are log-odds."""
        gain = np.maximum(slopes(law, most(ends)) * (1.0 + 2.0 * RELATIVE_ERROR), LEAST_SLOPE)
        cost = slopes(law, expit(-ends) * (1.0 + 4.0 * ROUNDOFF)) * (1.0 - 2.0 * RELATIVE_ERROR)
        with np.errstate(divide="ignore", over="ignore"):
            return gain[1] / cost[0], gain[0] / cost[0]

    s = np.linspace(LOG_ODDS_FIRST, LOG_ODDS_LAST, FIRST_CELLS + 1)
    high, low = bounds(np.stack([s[:-1], np.append(s[1:-1], np.inf)]))
    reach = np.minimum(expit(s[:-1]), 1.0 / slope)
    start = np.maximum(slopes(law, 1.0 - slope * reach - MASS_ERROR) * (1.0 + 2.0 * RELATIVE_ERROR), LEAST_SLOPE)
    with np.errstate(divide="ignore", over="ignore"):
        before = start / (slopes(law, 1.0 - reach + MASS_ERROR) * (1.0 - 2.0 * RELATIVE_ERROR))
    # For each cell, `before` is an upper bound of the ratio at all v before the cell, `after` at all v in the cell or
    # later, and `least` at all v.  `reached` estimates the largest ratio in the cell or later.  The search begins at
    # the cell `first`, since `before[first]` bounds the ratio at all v before that cell.
    after, reached = (np.maximum.accumulate(x[::-1])[::-1] for x in (high, low))
    least = np.maximum(before, after)
    first = int(np.argmin(least))
    enough = np.flatnonzero((before <= reached * (1.0 + RATIO_TOLERANCE)) & (least <= 1.1 * least[first]))
    first = int(enough[-1]) if enough.size else first
    ends = np.stack([s[:-1], np.append(s[1:-1], np.inf)])[:, first:]
    settled, best = max(1.0, float(before[first])), float(reached[first])
    high = high[first:]
    while np.isfinite(high).all():
        open_ = high > max(settled, best * (1.0 + RATIO_TOLERANCE))
        if not open_.any() or open_.sum() * PIECES_PER_CUT > MOST_CELLS:
            break
        settled = max(settled, float(np.max(high[~open_], initial=1.0)))
        left, right = ends[:, open_]
        width = np.minimum(right, LOG_ODDS_LAST) - left
        cuts = left + width * np.arange(PIECES_PER_CUT + 1)[:, None] / PIECES_PER_CUT
        cuts[-1] = right  # `right` itself, since the last cell ends at inf and not at LOG_ODDS_LAST
        if np.any(np.diff(cuts, axis=0) <= 0.0):
            break
        ends = np.stack([cuts[:-1], cuts[1:]]).reshape(2, -1)
        high, low = bounds(ends)
        best = max(best, float(np.max(low)))
    return max(settled, float(np.max(high)))


def growth(law: Law, base: Direction) -> float:
    """Return an upper bound of `log phi'(T(v) - p) - log phi'(v)` for all v, by a formula for the law; inf if none."""
    # Outcomes with dP = 0 have an infinite reverse loss. If there are any, the finite `reverse_loss` is no bound.
    back = base.reverse_loss if float(base.back.delta_infinity[0]) == 0.0 else np.inf
    with np.errstate(divide="ignore", over="ignore"):
        if isinstance(law, TruncatedNegativeBinomial):
            value = (law.eta + 1.0) * min(back, float(np.log1p(base.distance * ((1.0 - law.gamma) / law.gamma))))
        elif isinstance(law, Poisson):
            value = law.mean * base.distance
        elif isinstance(law, Binomial) and law.trials > 1.0:
            p = np.asarray(law.probability_of_run)
            by_loss = -float(log_mixture(-np.asarray(base.loss), p)) if np.isfinite(base.loss) else -float(np.log1p(-p))
            by_distance = float(np.log1p(p * base.distance / (1.0 - p))) if p < 1.0 else np.inf
            value = (law.trials - 1.0) * min(by_loss, by_distance)
        elif (most := largest_k(law)) <= 1.0:
            value = 0.0
        else:
            # With n = `most` and L = `base.loss`, T(v) - p is at most e^L v, and phi' is a polynomial of degree n - 1
            # with coefficients >= 0. So phi'(T(v) - p) is at most e^{(n-1) L} phi'(v).
            value = (most - 1.0) * base.loss
            _, first, _ = evaluated(law, np.array([0.0, 1.0]))
            value = min(value, float(np.log(first[0] / first[1]))) if first[1] > 0.0 else value
    value = float(value) * ROUNDED_UP
    return value if value >= 0.0 else np.inf


def by_base(
    quantity: str, run: Mechanism, law: Law, values: np.ndarray, relation: str, asked: np.ndarray | None = None
) -> np.ndarray:
    """Return brackets (2, *shape) from the base's own epsilon and delta. Where `asked` is False they are (0, inf)."""
    shape = np.broadcast_shapes(batch_shape(run), law.shape, np.shape(values))
    flat = np.broadcast_to(values, shape).reshape(-1)
    found = np.stack([np.zeros(flat.size), np.full(flat.size, np.inf)])
    for here, base, one in each_pair(run, law, shape, asked):
        sided = [_by_direction(quantity, base, one, flat[here], side) for side in sides(base, relation)]
        found[:, here] = np.max(sided, axis=0)
    return found.reshape(2, *shape)


def _by_direction(quantity: str, run: Mechanism, law: Law, values: np.ndarray, side: Sides) -> np.ndarray:
    """Return the brackets of `by_base`, (2, n), for one configuration and one direction."""
    most = SAYS_NOTHING[quantity]
    if not law.mean > 0.0:  # nothing is ever released
        return np.zeros((2, *values.shape))
    (none,), (once,), _ = evaluated(law, np.ones(1))
    mean, tried = float(law.mean) * ROUNDED_UP, max(1.0 - none * ROUNDED_UP - 4.0 * ROUNDOFF, once / ROUNDED_UP)
    base = _direction(run, side)
    grown = growth(law, base)
    # The selections on two neighbouring data sets can be coupled so that all candidates agree with probability
    # phi(1 - delta(0)). So the selection's delta is at most 1 - phi(1 - delta(0)), which `moved` bounds.
    moved = mass_on_top(law, min(base.distance, 1.0))[1]
    if quantity == "delta":
        low = tried * delta_ends(run, values, side.forward, PROFILE_RTOL)[0]
        shifted = values - grown
        # At eps = -x < 0, the base's delta is 1 - e^-x + e^-x delta_reverse(x), at most 1 - e^-x + `base.distance`.
        below = np.maximum(-shifted, 0.0)
        known = np.where(
            shifted >= 0.0,
            upper_delta(run, np.maximum(shifted, 0.0), side.forward, PROFILE_RTOL),
            -np.expm1(-below) + base.distance,
        )
        high = np.fmin(np.fmin(mean * known * ROUNDED_UP, moved), 1.0)
    else:
        at = values / tried if tried > LEAST_DELTA else np.ones(values.shape)
        low = epsilon_ends(run, at, side.forward, PROFILE_RTOL)[0]
        high = (epsilon_ends(run, values / mean / ROUNDED_UP, side.forward, PROFILE_RTOL)[1] + grown) * ROUNDED_UP
        high = np.where(moved <= values, 0.0, high)
    copies = largest_k(law)
    if 1.0 < copies < np.inf and (
        # The delta of K <= n candidates is at most that of n runs, which for Gaussian runs has a closed form. Other
        # runs are composed only if n <= 16.
        gaussian_mu(run) is not None or (copies <= 16 and not 600.0 < base.loss < np.inf)
    ):
        many = repeat(run, copies)
        ask = delta_ends if quantity == "delta" else epsilon_ends
        high = np.fmin(high, ask(many, values, side.forward, PROFILE_RTOL)[1])
    return np.stack([np.where(low >= 0.0, low, 0.0), np.where(high >= 0.0, high, most)])
