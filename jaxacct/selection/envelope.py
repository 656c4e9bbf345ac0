"""A fast upper bound of what a selection leaks under the worst score (README.md, "The envelope")."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import numpy as np

from jaxacct.core.floats import ROUNDOFF
from jaxacct.engines import backend
from jaxacct.mechanisms import Mechanism, batch_shape
from jaxacct.selection.base_profile import (
    PROFILE_RTOL,
    Sides,
    each_pair,
    infinite_mass,
    outer,
    sides,
    upper_delta,
    upper_epsilon,
    upper_hull,
)
from jaxacct.selection.law_of_k import Law, evaluated
from jaxacct.selection.profile_ends import mass_on_top
from jaxacct.selection.worst_case import known_bases

INFLATED = 4e-12
"""Upper bound of the relative errors of generating functions and of sums."""
LARGEST_EPS = 700.0
"""Largest eps that is tried, so that e^eps is finite."""
VALUES = 24_000
"""Number of points v spread evenly among the knots of the polygon above T. Each v, and each knot, gives a line."""
FAR_POINTS = 24
"""Number of points at larger eps that extend the base's cached profile, if this profile ends too early."""
LEVELS = 1e3
"""Deltas at which a profile ends are rounded down to powers of this number."""
MOST_KEPT = 64
"""Number of extensions of profiles that are kept."""
TAIL_SHARE = 1e-6
"""The table ends where the losses beyond its last eps add at most this share of delta to the answer."""


class Table(NamedTuple):
    """An upper bound of a base's profile: the chords between points (e^eps, delta)."""

    ratio: np.ndarray  # e^eps at the points, ascending from 0
    delta: np.ndarray  # delta at the points, not increasing

    def about(self, eps: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (upper bounds of delta at any real eps, the rates at which these bounds fall with eps)."""
        with np.errstate(over="ignore", invalid="ignore"):
            r = np.exp(eps)
            cell = np.clip(np.searchsorted(self.ratio, r), 1, self.ratio.size - 1)
            fall = (self.delta[cell - 1] - self.delta[cell]) / (self.ratio[cell] - self.ratio[cell - 1])
            ahead = np.maximum(self.ratio[cell] - r, 0.0)
            return self.delta[cell] + fall * ahead, np.where(ahead > 0.0, fall * r, 0.0)


class Points(NamedTuple):
    """The function `sum_j weight_j profile(eps + at_j)` of eps, where `at` and `weight` have shape (J,)."""

    at: np.ndarray
    weight: np.ndarray
    profile: Table


class Envelope(NamedTuple):
    """An upper bound of a selection's delta(eps): `start` plus the values of all functions in `sums` at eps."""

    start: Any
    sums: tuple[Points, ...]

    def leak(self, eps: np.ndarray) -> np.ndarray:
        """Return upper bounds of the selection's delta at eps >= 0, (R,). Return 1 where no bound below 1 is known."""
        total = self.about(eps, 4.0 * ROUNDOFF)[0] * (1.0 + INFLATED)
        return np.where(total <= 1.0, total, 1.0)

    def about(self, eps: np.ndarray, rounding: float = 0.0) -> tuple[np.ndarray, np.ndarray]:
        """Return (estimates of delta at eps, their rates of fall). `rounding` is a relative error taken off eps."""
        value, fall, eps = self.start, np.zeros(eps.shape), eps[..., None]
        for at, weight, profile in self.sums:
            # `rounding` = 0 is left out, since 0 |at| is NaN where `at` is -inf
            moved = eps + at - (rounding * (1.0 + eps + np.abs(at)) if rounding else 0.0)
            each = profile.about(moved)
            value, fall = value + np.sum(weight * each[0], axis=-1), fall + np.sum(weight * each[1], axis=-1)
        return value, fall


def upper(quantity: str, run: Mechanism, law: Law, given: np.ndarray, relation: str) -> np.ndarray:
    """Return upper bounds of a selection's "epsilon" at deltas > 0, inf if none is found, or "delta" at eps >= 0."""
    shape = np.broadcast_shapes(batch_shape(run), law.shape, given.shape)
    wanted = np.broadcast_to(given, shape).reshape(-1)
    value = np.zeros(wanted.size)
    for side in sides(run, relation):
        least = wanted
        if quantity == "delta":
            least = upper_delta(run, wanted.reshape(shape), side.forward, PROFILE_RTOL).reshape(-1)
        for here, base, one in each_pair(run, law, shape):
            # one table serves all of `wanted[here]`; the smallest delta in `least[here]` decides where this table ends
            made, last = _of_table(base, one, float(np.min(least[here])), side)
            at = wanted[here]
            value[here] = np.maximum(value[here], made.leak(at) if quantity == "delta" else solved(made, at, last))
    return value.reshape(shape)


@np.errstate(all="ignore")
def solved(made: Envelope, delta: np.ndarray, unit: float) -> np.ndarray:
    """Return for each delta an eps at which the bound `made` is at most delta, or inf if none is found."""
    # the returned eps exceeds the least eps with this property by a small share of eps + `unit`
    low, high, done = np.zeros(delta.shape), np.full(delta.shape, LARGEST_EPS), np.zeros(delta.shape, bool)
    eps = low
    # Newton's method is applied to log(leak) as a function of eps. If this step leaves [low, high], it is replaced by
    # a Newton step for the leak as a function of e^eps, which is convex, or by a bisection.
    for _ in range(60):
        value, fall = made.about(eps)
        low, high = np.where(value > delta, eps, low), np.where(value > delta, high, eps)
        moved = eps + np.log(value / delta) * value / fall
        safe = np.where(value > delta, eps + np.log1p((value - delta) / fall), 0.5 * (low + high))
        moved = np.where((moved >= low) & (moved <= high), moved, np.where(safe <= high, safe, 0.5 * (low + high)))
        moved, done = np.where(done, eps, moved), done | (np.abs(moved - eps) <= 1e-10 * eps)
        eps = moved
        if done.all():
            break
    found = np.where(made.leak(np.zeros(delta.shape)) <= delta, 0.0, np.inf)
    share = INFLATED
    while share < 300.0 and np.any(np.isinf(found)):
        at = np.minimum(eps * (1.0 + share) + share * unit, LARGEST_EPS)
        found = np.where(np.isinf(found) & (made.leak(at) <= delta), at, found)
        share *= 4.0
    return found


def _of_table(run: Mechanism, law: Law, least: float, side: Sides) -> tuple[Envelope, float]:
    """Return the envelope of `run` under `law` for deltas >= `least`, and the last eps of the table in the envelope."""
    table, (u, t) = table_of(*profile_points(run, least * TAIL_SHARE / max(law.mean, 1.0), side))
    lost = float(table.delta[-1])
    points = points_of(*lines(law, u, t), Table(table.ratio, table.delta - lost))
    return Envelope(mass_on_top(law, lost)[1], (points,)), float(np.log(table.ratio[-1]))


def profile_points(run: Mechanism, level: float, side: Sides) -> tuple[np.ndarray, np.ndarray]:
    """Return (e^eps, upper bounds of delta) at eps of both signs, up to a delta within `level` of the infinite mass."""
    ratio, _, high = known_bases(run)[0].profile.joined(side.direction)
    # the other direction may have further eps, at which the bound of this direction falls no more
    end = int(np.argmax(high <= 1.001 * np.min(high))) + 1
    ratio, high = ratio[:end], high[:end]
    infinite = float(infinite_mass(run, side.forward))
    level = max(level, TAIL_SHARE * infinite, 1e-290)
    if high[-1] > infinite + level:  # the profile ends before delta is small enough, so add points at larger eps
        # A search over laws of K asks for many levels. Rounded down they are few, and the points of each are kept.
        level = max(LEVELS ** math.floor(math.log(level, LEVELS)), 1e-290)
        eps, deltas = _beyond(run, float(np.log(ratio[-1])), infinite, level, side, backend.on_numpy(1))
        # e^eps is rounded up. The upper bound of delta also holds there, because delta does not rise with eps.
        ratio = np.append(ratio, np.exp(eps) * (1.0 + 4.0 * ROUNDOFF * (1.0 + eps)))
        high = np.append(high, deltas)
    return ratio, high


@functools.lru_cache(MOST_KEPT)
def _beyond(
    run: Mechanism, end: float, infinite: float, level: float, side: Sides, plain: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Return (eps, upper bounds of delta) beyond the eps `end`. `plain`: by NumPy."""
    last = np.fmin(upper_epsilon(run, np.asarray(infinite + level), side.forward, PROFILE_RTOL), LARGEST_EPS)
    # of a Gaussian the log of delta falls with the square of eps, so these eps are evenly spread over the logs
    eps = np.append(np.sqrt(np.linspace(end * end, last * last, FAR_POINTS + 1)[1:-1]), last)
    deltas = np.array(upper_delta(run, eps, side.forward, PROFILE_RTOL))
    if last < LARGEST_EPS:  # then `last` is an upper bound of the epsilon at the delta `infinite + level`
        deltas[-1] = min(deltas[-1], infinite + level)
    further = (np.diff(eps, prepend=end) > 1e-12) & (eps <= LARGEST_EPS)
    return eps[further], deltas[further]


def table_of(ratio: np.ndarray, high: np.ndarray) -> tuple[Table, tuple[np.ndarray, np.ndarray]]:
    """Return (Table, knots (u, t) of a polygon above T) from upper bounds `high` of delta at e^eps = `ratio`."""
    high = np.where(high <= 1.0, high, 1.0)
    _, u, t = outer(ratio, high)
    return Table(np.append(0.0, ratio), np.minimum.accumulate(np.append(1.0, high))), (u, t)


def lines(law: Law, u: np.ndarray, t: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (gains, costs) of lines `r gain - cost` whose maximum is >= M(r) for r >= 0, from a polygon above T."""
    near_one = 1.0 - np.geomspace(1e-13, 1.0, 1500)
    knots = np.linspace(0.0, u.size - 1.0, VALUES)
    v = np.concatenate([u, np.interp(knots, np.arange(u.size), u), near_one, np.interp(near_one, t, u)])
    v = np.sort(v)
    with np.errstate(all="ignore"):  # a NaN may arise here, and makes the bound infinite in `points_of`
        _, first, second = evaluated(law, 1.0 - np.stack([0.5 * (v[1:] + v[:-1]), v[:-1]]))
        _, gain, steeper = evaluated(law, 1.0 - np.interp(v, u, t))
        least, tilt = first * (1.0 - INFLATED) - 4.0 * ROUNDOFF * second, second * np.diff(v)
        middle = (tilt[0] < first[0]) & (first[0] > 16.0 * ROUNDOFF * second[0])
        left = np.where(middle, least[0] - 0.5 * tilt[0] * (1.0 + INFLATED), least[1])
        right = np.where(middle, least[0] + 0.5 * tilt[0] * (1.0 - INFLATED), least[1] + tilt[1] * (1.0 - INFLATED))
        cost = np.minimum(np.append(left, np.inf), np.append(np.inf, right))
        # a gain below 1e-300 may have lost digits in float64, and is rounded up to 1e-300
        gain = np.maximum(gain * (1.0 + INFLATED) + 4.0 * ROUNDOFF * steeper, 1e-300)
    return np.maximum.accumulate(gain), np.maximum(cost, 0.0)  # rounding may put nearly equal gains out of order


def points_of(gain: np.ndarray, cost: np.ndarray, profile: Table, weight: float = 1.0) -> Points:
    """Return the `Points` for lines `r gain - cost` of ascending gain (README.md of this folder, "The envelope")."""
    if not (np.isfinite(gain).all() and np.isfinite(cost).all()):
        return Points(np.array([-np.inf]), np.array([np.inf]), profile)  # a NaN gives no bound, so return inf
    # Each cost is lowered to the least cost of the lines with a higher gain. For r >= 0, the changed line is still
    # below the line that this cost came from.
    cost = np.minimum.accumulate(cost[::-1])[::-1]
    with np.errstate(divide="ignore", over="ignore"):
        # lines before `first` are dropped: at every r each lies below line `first` or below 0
        first = int(np.argmin(cost / gain))
        gain, cost = np.append(0.0, gain[first:]), np.append(0.0, cost[first:])
        kept = upper_hull(gain, -cost)
        rise, further = np.diff(gain[kept]), np.diff(cost[kept])
        at = np.minimum(np.log(further / rise), 1e4)
    return Points(at - 16.0 * ROUNDOFF, rise * (weight * (1.0 + INFLATED)), profile)
