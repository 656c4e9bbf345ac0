"""The least private noise, sampling probability or number of steps whose certified delta meets a target, row by row.

To bound mu of Gaussian differential privacy above a floor, the tangents are chosen beforehand.  One contour serves all
tangents of a direction.  Tangents are close together near the best eps at the floor, where mu is attained as a rule,
and rough far from it.  What they do not decide is left to `gaussian_mu.gaussian_fit`. Derivation:
jaxacct/representations/README.md, "Gaussian differential privacy".
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from scipy.special import ndtr, ndtri

from jaxacct.accounting import account
from jaxacct.accounting.gaussian_mu import KNOWN_WIDTH, gaussian_fit, largest_mu, least_mu
from jaxacct.accounting.gaussian_mu import Goal as MuGoal
from jaxacct.accounting.nearby_deltas import deltas_about, deltas_along
from jaxacct.accounting.true_positive_rates import Deltas, Place, Rates, best_epsilon, rate_from_three, three_places
from jaxacct.calibration.dp_sgd_search import search_for
from jaxacct.calibration.risk_noise import Target, by_contour, noise_for, noise_for_rate
from jaxacct.calibration.search import AIM, Found, Start, beside, certified_search, least_apart
from jaxacct.calibration.starting_points import Goal, by_central_limit, gaussian_mu, room
from jaxacct.core.bounds import Bounds
from jaxacct.core.floats import ROUNDOFF
from jaxacct.engines.contour import no_hint
from jaxacct.mechanisms import Mechanism, dp_sgd
from jaxacct.mechanisms.base import take_rows

__all__ = [
    "Unknown",
    "deltas_at",
    "deltas_near",
    "less_private",
    "shown_on_one_contour",
    "value_for",
    "value_for_mu",
    "value_for_rate",
]

BLOCK = 64
"""Tangents of a block, which share a contour."""
TRIES = ((1, 1e-2), (1, 1e-2), (1, 1e-5), (4, 1e-8))
"""Blocks of tangents, and what the contour may cut off of the width, try by try.

mu of a nearly Gaussian run hardly falls, and needs many tangents.  Where losses are rare and large, what is cut off is
many times as much as the saddle point approximation shows.
"""
ABOVE, FARTHEST = 8, 0.12
"""Tangents of a block above the place, in case the best eps is there, and the distance of the last in shares of it."""
ROUNDS = 3
"""How often the eps of a true-positive rate is moved to where it says most."""
ROUGH = 0.01
"""rtol of the searches before the last."""
FAR = 0.2
"""Change of the logarithm of a value beyond which the best eps is looked for anew."""
ALMOST = 0.999
"""Share of log(b/a) beyond which `e^eps a` leaves delta too little of b."""


class Unknown(NamedTuple):
    """A parameter of DP-SGD that is solved for, with the others known, all flat."""

    name: str
    limits: tuple[float, float]
    known: dict[str, np.ndarray]
    relation: str
    rtol: float

    def take(self, rows: np.ndarray) -> Unknown:
        return self._replace(known={name: column[rows] for name, column in self.known.items()})


def deltas_at(unknown: Unknown, values: np.ndarray, rtol: float | None = None) -> Deltas:
    """delta of the rows at some values of the unknown, by default at least as narrow as a search needs it."""
    width = min(1e-4, unknown.rtol) if rtol is None else rtol
    fields = unknown.known | {unknown.name: values}

    def deltas(epsilon: np.ndarray, rows: np.ndarray) -> Bounds:
        run = dp_sgd(**{name: column[rows] for name, column in fields.items()})
        return account.delta_without_attacks(run, epsilon, relation=unknown.relation, rtol=width)

    return deltas


def deltas_near(unknown: Unknown, values: np.ndarray, rtol: float) -> Deltas:
    """The same, quicker, where the epsilons of a row are near each other."""
    fields = unknown.known | {unknown.name: values}

    def deltas(epsilon: np.ndarray, rows: np.ndarray) -> Bounds:
        run = dp_sgd(**{name: column[rows] for name, column in fields.items()})
        return deltas_about(run, epsilon, unknown.relation, rtol)

    return deltas


def less_private(unknown: Unknown, values: np.ndarray) -> np.ndarray:
    """Slightly less private values: if these miss a target, the given ones are shown to be the best."""
    falls = np.full(values.size, unknown.name == "noise_multiplier")
    return beside(values, falls, least_apart(unknown.rtol), unknown.name == "steps")


def value_for(unknown: Unknown, target: Target, near: np.ndarray | None = None) -> Found:
    """The least private value with `delta(epsilon) <= delta` of the target.

    near : values at which to begin; by the central limit theorem where there are none.
    """
    if unknown.name == "noise_multiplier":
        return noise_for(unknown.known, target, unknown.relation, unknown.rtol, near)
    goal = _goal(unknown, target)

    def evaluate(rows: np.ndarray, values: np.ndarray) -> Bounds:
        run = dp_sgd(**{name: column[rows] for name, column in unknown.known.items()} | {unknown.name: values})
        return account.delta(run, target.epsilon[rows], relation=unknown.relation, rtol=0.25 * unknown.rtol)

    def start(rows: np.ndarray) -> Start:
        if near is not None:
            return _from(near[rows])
        with np.errstate(all="ignore"):
            known = {name: column[rows] for name, column in unknown.known.items()}
            x = by_central_limit(goal, known, gaussian_mu(target.epsilon[rows], target.delta[rows]))
        return _from(np.exp(np.clip(np.nan_to_num(x), *np.log(unknown.limits))))

    return certified_search(search_for(goal, evaluate)._replace(target=target.delta, scale=room(target.delta)), start)


def value_for_rate(unknown: Unknown, goal: np.ndarray, fpr: np.ndarray) -> tuple[Found, Target]:
    """The least private value whose true-positive rate at `fpr` is seen to be at most `goal`, and from which eps."""
    if unknown.name == "noise_multiplier":
        return noise_for_rate(unknown.known, goal, fpr, unknown.relation, unknown.rtol)
    mu = ndtri(goal) - ndtri(fpr)
    epsilon = np.maximum(-mu * (ndtri(fpr) + 0.5 * mu), 0.0)
    rough, near = unknown._replace(rtol=ROUGH), None
    for _ in range(ROUNDS):
        found = value_for(rough, _target_of_rate(epsilon, goal, fpr), near)
        middle = float(np.sqrt(unknown.limits[0] * unknown.limits[1]))
        middle = max(float(np.round(middle)), 1.0) if unknown.name == "steps" else middle
        near = np.where(np.isfinite(found.value), found.value, middle)
        better = best_epsilon(deltas_at(unknown, near), fpr, Place(epsilon, np.clip(mu, 1e-9, 50.0))).epsilon
        most = np.maximum(ALMOST * np.log(goal / fpr), 0.0)
        epsilon = np.where(np.isfinite(found.value), np.clip(better, 0.0, most), epsilon)
    target = _target_of_rate(epsilon, goal, fpr)
    return value_for(unknown, target, near), target


def value_for_mu(unknown: Unknown, goal: np.ndarray, floor: np.ndarray) -> tuple[Found, np.ndarray]:
    """The least private value with mu <= `goal` above the floor, and the eps that decides at the floor.

    It begins where the true-positive rate at the floor is that of mu, which is nearly always the answer.
    """
    both = unknown._replace(relation="add_or_remove_one")  # mu is of both directions
    first, place = _start_for_mu(both, goal, floor)
    nothing = np.zeros(goal.shape)
    task = _goal(both, Target(nothing, nothing))
    epsilon, width = np.full(goal.shape, np.nan), 0.5 * unknown.rtol
    made = first.x.copy()  # logarithms of the values at which the places were found
    rungs = np.zeros((2, goal.size), int)  # a value near the last one needs the same

    def evaluate(rows: np.ndarray, values: np.ndarray) -> Bounds:
        some = both.take(rows)
        fields: dict[str, Any] = some.known | {some.name: values}
        exact = fields["sampling_probability"] == 1.0
        mu = np.sqrt(fields["steps"]) / fields["noise_multiplier"]
        ends = np.stack([mu * (1.0 - 8.0 * ROUNDOFF), mu, mu * (1.0 + 8.0 * ROUNDOFF)])
        epsilon[rows] = mu * (-ndtri(floor[rows]) - 0.5 * mu)
        status = np.full(rows.size, "ok", "<U16")
        left = np.flatnonzero(~exact)
        if left.size:
            mine, run = rows[left], dp_sgd(**{name: column[left] for name, column in fields.items()})
            x = np.log(values[left])
            far = np.flatnonzero(~(np.abs(x - made[mine]) <= FAR))
            if far.size:
                again = best_epsilon(deltas_at(both.take(mine[far]), values[left][far]), floor[mine[far]])
                place.epsilon[mine[far]], place.deviation[mine[far]] = again
            made[mine] = x
            there = Place(place.epsilon[mine], place.deviation[mine])
            begin = rungs[:, mine]
            shown = shown_on_one_contour(run, both.relation, floor[mine], there, width, begin)
            rungs[:, mine] = begin
            ends[:, left] = shown.lower, shown.upper, shown.upper
            place.epsilon[mine] = epsilon[mine] = shown.epsilon
            left = left[~shown.narrow]
        if left.size:
            mine, at = rows[left], (some.take(left), values[left])
            there = Place(place.epsilon[mine], place.deviation[mine])
            wanted = MuGoal(goal[mine], there, deltas_near(*at, min(1e-4, unknown.rtol)), width)
            fit = gaussian_fit(deltas_at(*at), floor[mine], "certified", goal=wanted)
            ends[:, left] = fit.mu.lower, fit.mu.estimate, fit.mu.upper
            status[left], epsilon[mine], place.epsilon[mine] = fit.mu.status, fit.epsilon, fit.epsilon
        return Bounds(ends[0], ends[1], ends[2], "certified", status, "tradeoff")

    search = search_for(task, evaluate)._replace(target=goal)
    take = lambda rows: Start(first.x[rows], first.slope[rows], first.solved[rows])
    return certified_search(search, take), epsilon


def _start_for_mu(unknown: Unknown, goal: np.ndarray, floor: np.ndarray) -> tuple[Start, Place]:
    """Where the true-positive rate at the floor is that of mu: about the value, and the eps from which it is seen."""
    with np.errstate(all="ignore"):
        rate = np.clip(ndtr(ndtri(floor) + goal), np.minimum(1.001 * floor, 0.9), 1.0 - 1e-12)
        mu = ndtri(rate) - ndtri(floor)
        place = Place(np.maximum(-mu * (ndtri(floor) + 0.5 * mu), 0.0), np.clip(goal, 1e-9, 50.0))
        start = _from(np.ones(goal.size))
        if unknown.name == "noise_multiplier":
            solved, start.solved[:] = by_contour(
                unknown.known, rate, floor, mu, place.epsilon, unknown.relation, guess=True
            )
            # d mu/dx, where x is the logarithm of the noise: the normal quantile of delta + e^eps a
            room = rate - np.exp(place.epsilon) * floor
            slope = np.sqrt(2.0 * np.pi) * np.exp(0.5 * ndtri(rate) ** 2) * room * solved.slope
            start.solved[:] &= (slope < 0.0) & np.isfinite(slope)
            start.slope[:] = np.where(start.solved, slope, 0.0)
            start.x[:] = np.log(solved.noise) - np.where(start.solved, AIM * unknown.rtol * goal / slope, 0.0)
        left = np.flatnonzero(~start.solved)
        if left.size:
            some = unknown._replace(rtol=max(unknown.rtol, 1e-6)).take(left)
            found, target = value_for_rate(some, rate[left], floor[left])
            middle = np.sqrt(unknown.limits[0]) * np.sqrt(unknown.limits[1])
            start.x[left] = np.log(np.where(np.isfinite(found.value), found.value, middle))
            place.epsilon[left] = target.epsilon
    return start, place


def _goal(unknown: Unknown, target: Target) -> Goal:
    known, hint = unknown.known, no_hint(target.epsilon.size)
    return Goal(unknown.name, target.epsilon, target.delta, known, unknown.limits, unknown.relation, unknown.rtol, hint)


def _from(values: np.ndarray) -> Start:
    return Start(np.log(values), np.zeros(values.size), np.zeros(values.size, bool))


def _target_of_rate(epsilon: np.ndarray, goal: np.ndarray, fpr: np.ndarray) -> Target:
    """`delta + e^eps a <= b`, the sum rounded up."""
    return Target(epsilon, goal * (1.0 - 16.0 * ROUNDOFF) - np.exp(epsilon) * fpr * (1.0 + 16.0 * ROUNDOFF))


class Shown(NamedTuple):
    """Brackets of mu row by row, which of them are narrow, and about the best eps at the floor."""

    lower: np.ndarray
    upper: np.ndarray
    narrow: np.ndarray
    epsilon: np.ndarray


@np.errstate(invalid="ignore")  # a comparison with what is not a number does not hold
def shown_on_one_contour(
    run: Mechanism, relation: str, floor: np.ndarray, place: Place, width: float, rungs: np.ndarray | None = None
) -> Shown:
    """mu of DP-SGD runs under a relation that is its own reverse, where tangents chosen beforehand decide.

    place : where the best eps at the floor is thought to be.  width : relative width of a bracket of mu that is
    narrow enough.  rungs : as of `deltas_along`.
    """
    size = floor.size
    shown = Shown(np.zeros(size), np.full(size, np.inf), np.zeros(size, bool), place.epsilon.copy())
    rungs = np.zeros((2, size), int) if rungs is None else rungs
    rows = np.arange(size)
    for blocks, tolerance in TRIES:
        at = Place(shown.epsilon[rows], place.deviation[rows])
        usable = np.isfinite(at.epsilon) & (three_places(at, KNOWN_WIDTH)[0] > 0.0)
        rows, at = rows[usable], Place(at.epsilon[usable], at.deviation[usable])
        if not rows.size:
            break
        begin = rungs[:, rows]
        lower, upper, better = _bracket(
            take_rows(run, rows), relation, floor[rows], at, width, blocks, tolerance, begin
        )
        rungs[:, rows] = begin
        more = (lower <= upper) & np.isfinite(upper)
        narrow = more & (upper - lower <= width * upper)
        shown.lower[rows], shown.upper[rows], shown.narrow[rows] = lower, upper, narrow
        shown.epsilon[rows] = np.where(narrow | ~np.isfinite(better), at.epsilon, better)
        rows = rows[more & ~narrow]
    # what wide brackets say of the place is not used
    return shown._replace(epsilon=np.where(shown.narrow, shown.epsilon, place.epsilon))


def _bracket(
    run: Mechanism,
    relation: str,
    floor: np.ndarray,
    place: Place,
    width: float,
    blocks: int,
    tolerance: float,
    rungs: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Lower and upper ends of mu, by so many blocks of tangents, and about the best eps at the floor."""
    size, near = floor.size, three_places(place, KNOWN_WIDTH)
    above = ABOVE * blocks
    below = BLOCK * blocks - 3 - above
    # mu falls as the rate rises: the nearer to the floor, the closer the tangents, in eps as the squares
    shares = 1.0 - np.linspace(1.0, 0.0, below + 1)[:-1] ** 2
    shares = np.append(shares, 1.0 + FARTHEST * np.linspace(0.0, 1.0, above + 1)[1:] ** 2)
    epsilon = np.concatenate([place.epsilon * shares[:, None], near])
    order = np.argsort(epsilon, axis=0, kind="stable")
    back = np.argsort(order, axis=0)[-3:]
    epsilon, at_floor = np.take_along_axis(epsilon, order, axis=0), order >= BLOCK * blocks - 3
    # a block is a row of its own
    apart = lambda values: values.reshape(blocks, BLOCK, size).swapaxes(0, 1).reshape(BLOCK, blocks * size)
    whole = lambda values: values.reshape(BLOCK, blocks, size).swapaxes(0, 1).reshape(blocks * BLOCK, size)
    many = take_rows(run, np.tile(np.arange(size), blocks))
    asked = np.tile(place.epsilon, blocks), apart(epsilon), apart(at_floor)
    every = np.tile(rungs, blocks)
    found = deltas_along(many, *asked, relation, width, tolerance, every)
    rungs[:] = every.reshape(2, blocks, size).max(axis=1)
    ends = [whole(end) for end in found]
    low, high = (np.take_along_axis(end, back, axis=0) for end in ends)
    rate = rate_from_three(near, Rates(low, high, high), place, floor, KNOWN_WIDTH)
    upper = largest_mu(np.stack([epsilon, *ends]), floor)[0]
    return np.nan_to_num(least_mu(rate, ends[0][0], floor)), upper, _lowest(epsilon, ends[1], floor)


@np.errstate(all="ignore")  # a place that is not a number is not used
def _lowest(epsilon: np.ndarray, delta: np.ndarray, floor: np.ndarray) -> np.ndarray:
    """About the eps at which `delta + e^eps a` is least, by a parabola through the least value and its neighbours."""
    rates = delta + np.exp(epsilon) * floor
    best = np.clip(np.argmin(rates, axis=0), 2, epsilon.shape[0] - 3)
    # the next but one: neighbours may be so near that only rounding tells them apart
    x, y = (np.take_along_axis(v, best + np.array([-2, 0, 2])[:, None], axis=0) for v in (epsilon, rates))
    left, right = (y[1] - y[0]) / (x[1] - x[0]), (y[2] - y[1]) / (x[2] - x[1])
    bend = (right - left) / (x[2] - x[0])
    found = 0.5 * (x[0] + x[1]) - 0.5 * left / bend
    return np.where((bend > 0.0) & (found > 0.0), np.clip(found, 0.8 * x[0], 1.2 * x[2]), x[1])
