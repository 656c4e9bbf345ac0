"""Pairs of laws made from points (eps, delta) of a privacy profile, exact or bracketed; a mechanism given by points."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any, ClassVar, NamedTuple

import numpy as np

from jaxacct.core.floats import ROUNDOFF
from jaxacct.core.types import ArrayLike, Leaf
from jaxacct.core.validation import NON_NEGATIVE, PROBABILITY, InputError, Tracer, check, refuse_where
from jaxacct.mechanisms.base import FinitePair, FinitePart, batch_shape, register
from jaxacct.mechanisms.finite import FiniteMechanism

LEAST_GAP = 1e-9
"""Smallest distance of two epsilons of a profile, since slopes between nearer points lose digits."""
FAR_LOSS = 1e300
"""Losses from here on count as infinite."""
MASS_ROUNDING_UNITS = 8.0
"""A mass is a difference of two terms, each with this relative error in units of ROUNDOFF. Both are added to it."""
LEAST_POINT = 1e-12
"""A smaller first epsilon counts as 0, since the masses of its pair would be lost to rounding."""


@register
class PrivacyProfile(FiniteMechanism):
    """Any mechanism known to be (``epsilon``_k, ``delta``_k)-DP for every k, through the pair that dominates it.

    The guarantee is H_{e^eps_k}(P || Q) <= delta_k (remove) and H_{e^eps_k}(Q || P) <= ``reverse_delta``_k (add), under
    the neighbouring relation of the question. The pair has the largest profile that these points allow (README.md, "A
    profile from points"). The last delta is mass at infinity. The mechanism itself may leak less than its points allow,
    so ``kind`` is "bound".

    Parameters
    ----------
    epsilon : array_like >= 0
        Points eps_k, which ascend along the last axis by 1e-9 or more; the axes before it are the batch.
    delta : array_like in [0, 1]
    reverse_delta : array_like in [0, 1], optional
        The values of ``delta`` by default. `dataclasses.replace` keeps those of the profile that it copies.

    References
    ----------
    Doroshenko et al. (2022), Connect the Dots: Tighter Discrete Approximations of Privacy Loss Distributions.
    Zhu, Dong, Wang (2022), Optimal Accounting of Differential Privacy via Characteristic Function, Proposition 8.

    >>> import jaxacct as ja
    >>> known = ja.PrivacyProfile(epsilon=[0.0, 0.5, 1.0], delta=[0.3, 0.1, 1e-6])
    >>> [round(float(d), 6) for d in ja.delta(known, [0.0, 0.5, 1.0]).upper]
    [0.3, 0.1, 1e-06]
    """

    epsilon: Leaf
    delta: Leaf
    reverse_delta: Leaf = None
    constraints: ClassVar = {"epsilon": NON_NEGATIVE, "delta": PROBABILITY, "reverse_delta": PROBABILITY}
    vectors: ClassVar = ("epsilon", "delta", "reverse_delta")

    def __post_init__(self) -> None:
        if self.reverse_delta is None:
            object.__setattr__(self, "reverse_delta", self.delta)
        super().__post_init__()
        sizes = {name: np.shape(getattr(self, name))[-1:] for name in self.vectors}
        if len(set(sizes.values())) > 1 or sizes["epsilon"] in ((), (0,)):
            words = ", ".join(f"{name} {size[0] if size else 'none'}" for name, size in sizes.items())
            raise InputError(f"points on the last axis: {words}; give every field the same number, 1 or more")
        if not isinstance(self.epsilon, Tracer):
            _refuse_disorder(np.asarray(self.epsilon))

    def pair(self) -> FinitePair:
        shape = (*batch_shape(self), np.shape(self.epsilon)[-1])
        fields = (np.broadcast_to(getattr(self, name), shape).reshape(-1, shape[-1]) for name in self.vectors)
        return stacked([pair_of_profile(*row) for row in zip(*fields, strict=True)], shape[:-1])

    def infinity_exactly(self, relation: str, direction: str) -> Fraction | None:
        own, other = (self.delta, self.reverse_delta) if direction == "remove" else (self.reverse_delta, self.delta)
        least, falls = float(np.min(own)), np.exp(-np.asarray(self.epsilon, np.float64))
        # the bound of delta that the reverse points give, as in `pair_of_profile`
        across = float(np.min(1.0 - falls * (1.0 - np.asarray(other))))
        return Fraction(least) if least < across - 1e-12 else None

    def symmetric(self) -> bool:
        return bool(np.all(np.equal(self.delta, self.reverse_delta)))


def profile_from_cdfs(p_cdf: Callable[[Any], Any], q_cdf: Callable[[Any], Any], grid: ArrayLike) -> PrivacyProfile:
    """Return the PrivacyProfile of a privacy loss L given by its distribution functions under P and under Q.

    delta is Pr_P[L > eps] - e^eps Pr_Q[L > eps] for remove, and Pr_Q[L <= -eps] - e^eps Pr_P[L <= -eps] for add.
    Between the epsilons of the grid the profile is taken to be the chord. Beyond the last epsilon the profile is taken
    to be constant. The answers are therefore upper bounds for every grid, and near the truth for a fine grid.

    Parameters
    ----------
    p_cdf, q_cdf : callable
        Functions of an array x that return Pr[L <= x] under P and under Q. Their absolute error is taken to be at most
        1e-15 and is added, so deltas of interest should be above 1e-14 e^eps.
    grid : array_like >= 0, ascending

    Returns
    -------
    PrivacyProfile

    References
    ----------
    Doroshenko et al. (2022), Connect the Dots: Tighter Discrete Approximations of Privacy Loss Distributions.

    >>> import jaxacct as ja
    >>> import numpy as np
    >>> from scipy.stats import norm  # a Gaussian of noise multiplier 1
    >>> known = ja.profile_from_cdfs(norm(0.5, 1).cdf, norm(-0.5, 1).cdf, np.linspace(0, 6, 601))
    >>> round(float(ja.epsilon(known, 1e-5).upper), 3), round(float(ja.epsilon(ja.Gaussian(1.0), 1e-5).upper), 3)
    (4.377, 4.377)
    """
    grid = np.asarray(check("grid", grid, NON_NEGATIVE))
    named = (("p_cdf", p_cdf), ("q_cdf", q_cdf))
    p_above, q_above = (1.0 - np.asarray(check(name, cdf(grid), PROBABILITY)) for name, cdf in named)
    p_below, q_below = (np.asarray(check(name, cdf(-grid), PROBABILITY)) for name, cdf in named)
    grown = np.exp(grid)
    slack = 2e-15 * (1.0 + grown)  # covers errors of 1e-15 in the values of the functions, and two roundings
    forward, reverse = p_above - grown * q_above, q_below - grown * p_below
    return PrivacyProfile(grid, *(np.clip(delta + slack, 0.0, 1.0) for delta in (forward, reverse)))


@np.errstate(over="ignore")
def pair_of_profile(epsilon: np.ndarray, delta: np.ndarray, reverse: np.ndarray) -> FinitePair:
    """Return the pair that dominates every pair with these points, (K,) each. `epsilon` ascends; a NaN delta is 1."""
    delta, reverse = (np.where(np.isnan(x), 1.0, x) for x in (delta, reverse))
    if 0.0 < epsilon[0] < LEAST_POINT:  # delta(0) <= delta(eps) + e^eps - 1
        first = np.append(np.expm1(epsilon[0]) * (1.0 + 4.0 * ROUNDOFF), np.zeros(epsilon.size - 1))
        delta, reverse = (
            np.minimum((x + first) * (1.0 + 4.0 * ROUNDOFF * (first > 0.0)), 1.0) for x in (delta, reverse)
        )
        epsilon = np.where(first > 0.0, 0.0, epsilon)
    # H_a(P || Q) falls as `a` grows. So its value 1 - a + a * reverse at a = e^-eps <= 1 bounds it at every a >= 1.
    fall = np.minimum.accumulate
    across_f, across_r = (np.min(-np.expm1(-epsilon) + x * np.exp(-epsilon)) for x in (reverse, delta))
    f, r = fall(np.minimum(delta, across_f)), fall(np.minimum(reverse, across_r))
    away = np.flatnonzero(epsilon > 0.0)
    right, left = _hull(epsilon, f, away), _hull(epsilon, r, away)
    centre, rest, doubt = 1.0, 0.0, 0.0
    if epsilon[0] == 0.0:
        centre = float(min(f[0], r[0]))
        for values, chain in ((f, right), (r, left)):
            while _first_is_above(epsilon, values, chain, centre):
                chain.pop(0)
        rest = 1.0 + 2.0 * MASS_ROUNDING_UNITS * ROUNDOFF - centre
        rest = rest - _fall(epsilon, f, right, centre) - _fall(epsilon, r, left, centre)
    if away.size and (epsilon[0] > 0.0 or rest < 0.0):
        centre, right, left = _bridge(epsilon, f, r, right, left)
        rest, doubt = 0.0, MASS_ROUNDING_UNITS * ROUNDOFF * centre
    size = epsilon.size
    p, q = np.zeros(2 * size + 1), np.zeros(2 * size + 1)
    p[size] = q[size] = max(rest, 0.0)
    for values, chain, here, there, side in ((f, right, p, q, 1), (r, left, q, p, -1)):
        at = np.array(chain, int)
        mass = _masses(epsilon[at], values[at], centre, doubt)
        here[size + side * (at + 1)] = mass
        there[size + side * (at + 1)] = mass * np.exp(-epsilon[at])
    loss = np.concatenate([-epsilon[::-1], [0.0], epsilon])
    last_f, last_r = (v[c[-1]] if c else centre for v, c in ((f, right), (r, left)))
    return FinitePair(loss, p, q, np.asarray(last_f), np.asarray(last_r))


def stacked(pairs: list[FinitePair], shape: tuple[int, ...]) -> FinitePair:
    """Join the pairs of all configurations into one batched pair. Shorter pairs are padded with atoms of mass 0."""
    return FinitePair(*_as_one(pairs, 3, 5, shape))


def stacked_parts(parts: list[FinitePart], shape: tuple[int, ...]) -> FinitePart:
    """Join the laws of all configurations into one batched law. Shorter laws are padded with atoms of mass 0."""
    return FinitePart(*_as_one(parts, 2, 3, shape))


def _as_one(
    laws: Sequence[FinitePair | FinitePart], atoms: int, fields: int, shape: tuple[int, ...]
) -> list[np.ndarray]:
    """Stack the first `fields` fields of all laws. The first `atoms` fields have an atom axis, padded with zeros."""
    most = max((law.loss.size for law in laws), default=1)
    padded = np.zeros((atoms, len(laws), most))
    for row, law in enumerate(laws):
        for column, values in zip(padded, law[:atoms], strict=True):
            column[row, : law.loss.size] = values
    ends = np.array([law[atoms:fields] for law in laws], np.float64).reshape(-1, fields - atoms)
    return [*padded.reshape(atoms, *shape, most), *(end.reshape(shape) for end in ends.T)]


def _masses(epsilon: np.ndarray, f: np.ndarray, centre: float, doubt: float) -> np.ndarray:
    """Return the masses p_k (README.md), rounded up. `centre` is delta at eps 0, with an error of `doubt`."""
    if not epsilon.size:
        return epsilon
    rise = -np.diff(f, prepend=centre) / -np.expm1(-np.diff(epsilon, prepend=0.0))
    fall = np.append(-np.diff(f) / np.expm1(np.diff(epsilon)), 0.0)
    rounding = MASS_ROUNDING_UNITS * ROUNDOFF * (rise + fall)
    rounding[0] += doubt / -np.expm1(-epsilon[0])
    return np.maximum(rise - fall, 0.0) + rounding


def _hull(epsilon: np.ndarray, f: np.ndarray, points: np.ndarray) -> list[int]:
    """Return those of the indices `points` that lie on the lower convex hull of (e^eps, f). The first always does."""
    fallen = np.diff(f[points], prepend=np.inf) < 0.0
    fallen[-1:] = True
    points = points[fallen]
    for _ in range(30):
        at, values = epsilon[points], f[points]
        slope, gap = -np.diff(values), np.diff(at)
        above = slope[:-1] / -np.expm1(-gap[:-1]) - slope[1:] / np.expm1(gap[1:]) <= 0.0
        if not above.any():
            return [int(k) for k in points]
        # in a row of points above their chords drop every second point: rounding may put a point above its chord
        place = np.arange(above.size)
        odd = (place - np.maximum.accumulate(np.where(above, -1, place))) % 2 == 1
        points = np.delete(points, 1 + np.flatnonzero(above & odd))
    # 30 passes may be too few: if the last point is low, a pass drops only one point. Then one sweep finds the hull.
    chain: list[int] = []
    for k in map(int, points):
        while len(chain) > 1:
            before, last = chain[-2:]
            rise = (f[before] - f[last]) / -np.expm1(epsilon[before] - epsilon[last])
            if not rise <= (f[last] - f[k]) / np.expm1(epsilon[k] - epsilon[last]):
                break
            chain.pop()
        chain.append(k)
    return chain


def _first_is_above(epsilon: np.ndarray, f: np.ndarray, chain: list[int], centre: float) -> bool:
    """Return whether a hull's first point is above the line from the value `centre` at eps 0 to its second point."""
    if len(chain) < 2:
        return False
    first, second = chain[:2]
    rise = (centre - f[first]) / -np.expm1(-epsilon[first])
    return bool(rise < (f[first] - f[second]) / np.expm1(epsilon[second] - epsilon[first]))


def _fall(epsilon: np.ndarray, f: np.ndarray, chain: list[int], centre: float) -> float:
    """Return how much a profile falls per unit of e^eps, from its value `centre` at eps 0 to its hull's first point."""
    with np.errstate(over="ignore"):
        return float((centre - f[chain[0]]) / np.expm1(epsilon[chain[0]])) if chain else 0.0


def _bridge(
    epsilon: np.ndarray, f: np.ndarray, r: np.ndarray, right: list[int], left: list[int]
) -> tuple[float, list[int], list[int]]:
    """Join the hulls of both directions by a tangent. Return the tangent's value at eps 0 and the new hulls."""
    right, left = list(right), list(left)
    while True:
        a, b = epsilon[left[0]], epsilon[right[0]]
        to_a, to_b = -np.expm1(-a), -np.expm1(-b)
        centre = to_b * (to_a + r[left[0]] * np.exp(-a)) + to_a * f[right[0]] * np.exp(-b)
        centre = float(centre / -np.expm1(-a - b))
        for values, chain in ((f, right), (r, left)):
            if _first_is_above(epsilon, values, chain, centre):
                chain.pop(0)
                break
        else:
            return centre, right, left


def _refuse_disorder(epsilon: np.ndarray) -> None:
    gap = np.diff(epsilon, axis=-1, prepend=0.0)
    bad = gap < LEAST_GAP
    bad[..., 0] &= gap[..., 0] != 0.0
    least = f"{LEAST_GAP:g} or more"
    limit = lambda index: f"{least} above the one before" if index[-1] else f"0, or {least}"
    rest = lambda index: f"must be {limit(index)}; sort the points, or leave it out"
    refuse_where(bad, "epsilon", epsilon, rest)


class BracketedProfile(NamedTuple):
    """A bracket of a convex profile: lower <= delta <= upper at `epsilon`, which ascends from 0. Shape (K,) each."""

    epsilon: np.ndarray
    lower: np.ndarray
    upper: np.ndarray


def pair_above(forward: BracketedProfile, reverse: BracketedProfile) -> FinitePair:
    """Return the pair that dominates the profiles H_{e^eps}(P || Q) (`forward`) and H_{e^eps}(Q || P) (`reverse`)."""
    return pair_of_profile(*_joined(forward.epsilon, forward.upper, reverse.epsilon, reverse.upper))


def pair_below(forward: BracketedProfile, reverse: BracketedProfile) -> FinitePair:
    """Return a pair whose deltas are at most the profiles, but for rounding errors. `direction_of` allows for them."""
    # a delta that is NaN is unknown: its bracket is 0 to 1
    known = (
        BracketedProfile(eps, np.nan_to_num(low), np.nan_to_num(high, nan=1.0)) for eps, low, high in (forward, reverse)
    )
    corners = tuple(_corners(*profile) for profile in known)
    centre = min(values[0] for _, values in corners)
    for _, values in corners:
        values[0] = centre
    return pair_of_profile(*_joined(*corners[0], *corners[1]))


def direction_of(pair: FinitePair, direction: str) -> FinitePart:
    """Given a pair from `pair_below`, return the loss law in one direction, rounded down. The masses sum to 1."""
    order = np.argsort(pair.loss, kind="stable")
    loss, p, q = (x[order] for x in pair[:3])
    keep = (p > 0.0) & (q > 0.0)
    loss, p, q = loss[keep], p[keep], q[keep]
    # The smaller mass of an atom is a difference of two sums of masses (`beyond`), and has their rounding errors. The
    # larger mass is e^|loss| times the smaller mass, and its error is e^|loss| times the smaller mass's error.
    beyond = np.where(loss >= 0.0, np.cumsum(q[::-1])[::-1], np.cumsum(p))
    with np.errstate(over="ignore"):
        # 128 roundoffs: 16 that `pair_of_profile` added, 16 for its error, 96 for the sums and the exponential here
        wrong = 128.0 * ROUNDOFF * (p + q + 2.0 * beyond * np.exp(np.abs(loss)))
    larger, smaller = wrong, wrong * np.exp(-np.abs(loss))
    off_p, off_q = np.where(loss >= 0.0, larger, smaller), np.where(loss >= 0.0, smaller, larger)
    if direction == "add":
        loss, p, q, off_p, off_q = (x[::-1] for x in (-loss, q, p, off_q, off_p))
    p, q = p - off_p, q + off_q
    return lowered_part(p, q)


def lowered_part(p: np.ndarray, q: np.ndarray) -> FinitePart:
    """Return the law of log p/q under P, for masses p that were rounded down and q that were rounded up."""
    keep = p > 0.0
    p, q = p[keep], q[keep]
    if not p.size:
        return FinitePart(np.zeros(1), np.ones(1), np.asarray(0.0))
    loss = np.log(p) - np.log(q)
    rest = 1.0 - p.sum()
    if rest >= 0.0:
        p, q = _lowest_as_one(p, q, loss, rest)
        loss = np.log(p) - np.log(q)
        lowest = int(np.argmin(loss))
        p[lowest] += rest
        # `rest` raises the loss of this atom. The loss is cut at the next larger loss, which only lowers delta.
        others = np.delete(loss, lowest)
        most = float(others.min()) if others.size else 0.0
        loss[lowest] = min(np.log(p[lowest]) - np.log(q[lowest]), most)
    else:
        p = p / p.sum() * (1.0 - 4.0 * ROUNDOFF * p.size)
        loss = np.log(p) - np.log(q)
    return FinitePart(loss, p, np.asarray(0.0))


def _lowest_as_one(p: np.ndarray, q: np.ndarray, loss: np.ndarray, mass: float) -> tuple[np.ndarray, np.ndarray]:
    """Join the atoms of lowest loss (P-mass at most `mass`) into one, so that a lattice of losses is shorter."""
    order = np.argsort(loss, kind="stable")
    many = max(int(np.searchsorted(np.cumsum(p[order]), mass, side="right")), 1)
    first, others = order[:many], order[many:]
    return np.append(p[others], p[first].sum()), np.append(q[others], q[first].sum())


def _joined(
    epsilon: np.ndarray, delta: np.ndarray, back: np.ndarray, reverse: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (eps, delta, reverse) at every eps of either direction. Where a direction has no point, its delta is 1."""
    both = np.union1d(epsilon, back)
    f, r = np.ones(both.size), np.ones(both.size)
    f[np.searchsorted(both, epsilon)], r[np.searchsorted(both, back)] = delta, reverse
    return both, f, r


def _corners(epsilon: np.ndarray, lower: np.ndarray, upper: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (eps, value) at the corners of a convex function below the profile, linear in e^eps between corners."""
    if epsilon.size < 3:  # a corner takes a chord on each side, so 3 points are needed
        return np.zeros(1), np.zeros(1)
    a = np.exp(epsilon)
    gap = a[:-1] * np.expm1(np.diff(epsilon))
    # Slopes of chords, per unit of `a`, bound the slope of the profile: the profile's slope is at least `steep` right
    # of a chord, and at most `flat` left of a chord. `steep` is below 0, so that a line with this slope reaches 0.
    steep = np.minimum((lower[1:] - upper[:-1]) / gap, -1e-20 * lower[1:] / a[1:])
    flat = np.minimum((upper[1:] - lower[:-1]) / gap, 0.0)
    first = lower[1] - flat[1] * gap[0] - _off(lower[1], flat[1], a[1])
    at, values, end = [0.0], [max(float(first), 0.0)], 1e-3
    size = epsilon.size
    points, heights, a, gap, steep, flat = (x.tolist() for x in (epsilon, lower, a, gap, steep, flat))
    for k in range(1, size):
        if heights[k] <= 0.0 or values[-1] <= 0.0:
            break
        slope = steep[k - 1]
        zero = heights[k] / -slope if slope < 0.0 else math.inf  # the line reaches 0 at e^eps = a[k] + zero
        end = points[k] + math.log1p(zero / a[k])
        reach = zero
        if k + 2 < size:
            turn = flat[k + 1] - slope
            reach = (heights[k] - heights[k + 1] + flat[k + 1] * gap[k]) / turn if turn > 0.0 else gap[k]
        if k + 1 < size:
            reach = min(max(reach, 0.0), gap[k])
        here = max(points[k] + math.log1p(reach / a[k]), at[-1] + LEAST_GAP)
        if here >= end:
            break
        reach = a[k] * math.expm1(here - points[k])
        value = heights[k] + slope * reach - _off(heights[k], slope, a[k] + reach)
        at.append(here)
        values.append(max(value, 0.0))
    if values[-1] > 0.0:  # the last line reaches 0 at `end`
        at.append(max(end, at[-1] + LEAST_GAP))
        values.append(0.0)
    return np.array(at), np.array(values)


def _off(value: float, slope: float, a: float) -> float:
    return 32.0 * ROUNDOFF * (abs(value) + abs(slope) * a)


def either_order(forward: FinitePart, reverse: FinitePart) -> FinitePair:
    """Return the pair whose delta at every eps is the larger of the two laws' deltas, rounded up."""
    shape = forward.infinity.shape
    rows = int(np.prod(shape, dtype=np.int64))
    flat = [[np.reshape(x, (rows, -1)) for x in part] for part in (forward, reverse)]
    return stacked([_of_row(*([x[row] for x in part] for part in flat)) for row in range(rows)], shape)


def _of_row(forward: Sequence[np.ndarray], reverse: Sequence[np.ndarray]) -> FinitePair:
    (one, mass_one, infinite_one), (two, mass_two, infinite_two) = forward, reverse
    losses = np.concatenate([[0.0], one[(mass_one > 0.0) & (one > 0.0)], two[(mass_two > 0.0) & (two > 0.0)]])
    knots = spaced(np.unique(losses))
    laws = ((one, mass_one, infinite_one[0]), (two, mass_two, infinite_two[0]))
    first, second = (profile_of_law(*law, knots) for law in laws)
    step, gap = np.diff(knots), first - second
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        share = gap[:-1] / (gap[:-1] - gap[1:])
        crossing = knots[:-1] + np.log1p(np.expm1(step) * share)
    # crossings of the profiles become knots, unless e^step overflows; fewer knots only raise the result
    inside = (gap[:-1] * gap[1:] < 0.0) & (step < 600.0) & np.isfinite(crossing)
    knots = spaced(np.unique(np.concatenate([knots, crossing[inside]])))
    # Raise the last knot by roundoffs, so that no loss exceeds it: `delta[-1]` is only the mass at infinity.
    knots[-1] *= 1.0 + 4.0 * ROUNDOFF
    delta = np.maximum(*(profile_of_law(*law, knots) for law in laws))
    delta[-1] = max(infinite_one[0], infinite_two[0])
    return pair_of_profile(knots, delta, delta)


def profile_of_law(loss: np.ndarray, mass: np.ndarray, infinite: float, eps: np.ndarray) -> np.ndarray:
    """Return delta, rounded up, at ascending eps >= 0 for a law of finitely many losses. Sums begin at the largest."""
    near = (loss > 0.0) & (loss < FAR_LOSS)
    infinite = infinite + float(np.sum(mass[~(loss < FAR_LOSS)]))  # a loss that is NaN counts as infinite
    order = np.flatnonzero(near)[np.argsort(loss[near], kind="stable")]
    atoms = [*zip((loss[order] * (1.0 + 8.0 * ROUNDOFF)).tolist(), mass[order].tolist(), strict=True)]
    units = 16.0 + 8.0 * (len(atoms) + eps.size) + 4.0 * (atoms[-1][0] if atoms else 0.0)
    delta, cost, here, found = 0.0, 0.0, math.inf, []  # cost is e^eps Q(loss > eps). The terms of delta are >= 0
    for at in eps.tolist()[::-1]:
        while atoms and atoms[-1][0] > at:
            there, more = atoms.pop()
            delta -= cost * math.expm1(there - here)
            cost = cost * math.exp(there - here) + more
            here = there
        delta -= cost * math.expm1(at - here)
        cost *= math.exp(at - here)
        here = at
        found.append(delta)
    return np.minimum((np.array(found[::-1]) + infinite) * (1.0 + ROUNDOFF * units), 1.0)


def spaced(points: np.ndarray) -> np.ndarray:
    """Return ascending points without those too near their predecessor. A profile from fewer points is only higher."""
    kept = [points[0]]
    for point in points[1:]:
        if point - kept[-1] >= max(LEAST_GAP, 64.0 * ROUNDOFF * point):
            kept.append(point)
    if kept[-1] < points[-1]:  # the largest loss stays, since only the mass at infinity is beyond it
        kept[-1] = points[-1]
    return np.array(kept)
