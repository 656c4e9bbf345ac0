"""Envelope: a fast upper bound of what a selection leaks under the worst score, for every law of K and eps >= 0.

Let phi be the generating function of K, T the concave trade-off curve of the base, L the slope of T, p = T(0) and
E = e^eps.  The selection's profile delta_A has the bound

    delta_A(eps) <= E int_0^1 M_+(L(u)/E) du + phi(1) - phi(1 - p),   M(r) = max_v (r phi'(T(v)) - phi'(v)).

M_+ = max(M, 0) is at most a sum `sum_j c_j (r - r_j)_+`.  For every eps the integral of this sum is a weighted sum of
values of the base's profile, `sum_j c_j (delta_base(eps + log r_j) - p)` (README.md of this folder, "The envelope").
M is the highest of many lines in r.  For a general base the profile is a table of upper bounds, and at each r_j
another line becomes the highest.  For a Gaussian base the profile has a closed form, and a few nodes r_j serve many
rows at a time.  A row of a Gaussian base whose bound is guessed to be too loose uses a table after all.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
from scipy import special

from jaxacct.core.floats import ROUNDOFF
from jaxacct.engines import closed_form
from jaxacct.kernels.arrays import interp
from jaxacct.mechanisms import Mechanism, batch_shape
from jaxacct.selection.base_profile import (
    each_pair,
    gaussian_mu,
    infinite_mass,
    outer,
    sides,
    upper_delta,
    upper_epsilon,
    upper_hull,
)
from jaxacct.selection.law_of_k import Law, evaluated
from jaxacct.selection.profile_ends import mass_on_top

INFLATED = 4e-12
"""Upper bound of the relative errors of generating functions and of sums."""
LARGEST_EPS = 700.0
"""Largest tried eps: its exp is finite."""
POINTS = 800
"""Number of eps > 0, and also of eps < 0, at which a table holds the profile."""
TAIL_SHARE = 1e-6
"""Share of delta that the base's tail beyond the table may add to the answer."""
EVENLY = 0.25
"""Share of the cells, and of the nodes, that is spread evenly; the others crowd where they matter."""
LOOSE, LOOSE_DELTA = (8e-5, 9e-5), 2e-3
"""Guessed errors above which a bound is too loose: relative and absolute error of eps, relative error of delta."""
IGNORED, FAR = 1e-6, 1e-9
"""Shares of delta: IGNORED is added for ratios r below the first node; FAR lies beyond the last node of the sketch."""
NEWTON_STEPS = (6, 2, 2)
"""Numbers of Newton steps for eps: in the first sketch, in the second sketch and in the answer."""
LINE_ERROR = 1e-12
"""Upper bound of the relative errors of the normal distribution function up to 38 deviations, and of exp up to 700."""


class Table(NamedTuple):
    """Profile made of chords between upper bounds of delta, which do not increase, at ascending ratios e^eps from 0."""

    ratio: np.ndarray
    delta: np.ndarray

    def about(self, eps: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return an estimate of delta at any real eps, and the rate at which delta falls with eps."""
        with np.errstate(over="ignore", invalid="ignore"):
            r = np.exp(eps)
            cell = np.clip(np.searchsorted(self.ratio, r), 1, self.ratio.size - 1)
            fall = (self.delta[cell - 1] - self.delta[cell]) / (self.ratio[cell] - self.ratio[cell - 1])
            ahead = np.maximum(self.ratio[cell] - r, 0.0)
            return self.delta[cell] + fall * ahead, np.where(ahead > 0.0, fall * r, 0.0)

    def upper(self, eps: np.ndarray) -> np.ndarray:
        """Return upper bounds of delta at any real eps."""
        return self.about(eps)[0]


class Gaussians(NamedTuple):
    """Profiles of R Gaussian bases, mu (R, 1).  The bases are symmetric: delta(-x) = 1 - e^-x (1 - delta(x))."""

    mu: np.ndarray

    def upper(self, eps: np.ndarray) -> np.ndarray:
        away, shrink = closed_form.delta(self.mu, np.abs(eps)).upper, np.minimum(eps, 0.0)
        return np.where(eps < 0.0, -np.expm1(shrink) + np.exp(shrink) * away, away)

    def about(self, eps: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        log, fall, _ = closed_form.log_delta(self.mu, np.abs(eps))
        away, shrink = np.exp(log), np.exp(np.minimum(eps, 0.0))
        value = np.where(eps < 0.0, 1.0 - shrink + shrink * away, away)
        return value, np.where(eps < 0.0, shrink * (1.0 - away * (1.0 + fall)), away * fall)


class Points(NamedTuple):
    """Sum `sum_j weight_j profile(eps + at_j)`; the arrays are (J,), or (R, J) with a profile for each row."""

    at: np.ndarray
    weight: np.ndarray
    profile: Table | Gaussians


class Envelope(NamedTuple):
    """Upper bound of delta(eps): `start` plus weighted sums of values of profiles."""

    start: Any
    sums: tuple[Points, ...]

    def leak(self, eps: np.ndarray) -> np.ndarray:
        """Return upper bounds of delta at eps >= 0, (R,) for R rows; 1 where the bound is not finite."""
        total, eps = self.start, eps[..., None]
        for at, weight, profile in self.sums:
            moved = eps + at
            moved -= 4.0 * ROUNDOFF * (1.0 + eps + np.abs(at))
            total = np.sum(weight * profile.upper(moved), axis=-1) + total
        total = total * (1.0 + INFLATED)
        return np.where(total <= 1.0, total, 1.0)

    def about(self, eps: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return an estimate of the leak, and the rate at which it falls with eps."""
        value, fall = self.start, np.zeros(eps.shape)
        for at, weight, profile in self.sums:
            each = profile.about(eps[..., None] + at)
            value, fall = value + np.sum(weight * each[0], axis=-1), fall + np.sum(weight * each[1], axis=-1)
        return value, fall

    def newton(self, level: np.ndarray, eps: np.ndarray, high: np.ndarray, steps: int) -> np.ndarray:
        """Estimate the eps at which the leak is `level`.

        Each step is Newton's for the logarithm of the leak.  Where this step leaves [low, high], Newton's step for the
        leak itself is taken.  The leak is convex in e^eps, so from the left this second step never passes the solution.
        """
        low, high, done = np.zeros(level.shape), np.maximum(high, eps), np.zeros(level.shape, bool)
        for _ in range(steps):
            value, fall = self.about(eps)
            low, high = np.where(value > level, eps, low), np.where(value > level, high, eps)
            moved = eps + np.log(value / level) * value / fall
            safe = np.where(value > level, eps + np.log1p((value - level) / fall), 0.5 * (low + high))
            moved = np.where((moved >= low) & (moved <= high), moved, np.where(safe <= high, safe, 0.5 * (low + high)))
            moved, done = np.where(done, eps, moved), done | (np.abs(moved - eps) <= 1e-10 * eps)
            eps = moved
            if done.all():
                break
        return eps

    def crossing(
        self, level: np.ndarray, near: np.ndarray, steps: tuple[float, float], unit: Any, asked: Any = True
    ) -> np.ndarray:
        """Find eps a little above `near` at which the leak is at most `level`; NaN where none is found.

        steps : first and largest distance from `near`, as shares of `near + unit`.
        asked : the rows for which an eps is needed.
        """
        found = np.where(self.leak(np.zeros(level.shape)) <= level, 0.0, np.nan)
        step, largest = steps
        while step < largest and np.any(np.isnan(found) & asked):
            at = np.minimum(near * (1.0 + step) + step * unit, LARGEST_EPS)
            found = np.where(np.isnan(found) & (self.leak(at) <= level), at, found)
            step *= 4.0
        return found


def upper(quantity: str, run: Mechanism, law: Law, given: np.ndarray, relation: str) -> np.ndarray:
    """Return upper bounds of "epsilon" at delta > 0, inf where none is found, or of "delta" at eps >= 0."""
    shape = np.broadcast_shapes(batch_shape(run), law.shape, given.shape)
    wanted = np.broadcast_to(given, shape).reshape(-1)
    value, left = np.zeros(wanted.size), np.ones(wanted.size, bool)
    if (mu := gaussian_mu(run)) is not None:
        rows = np.broadcast_to(mu.reshape(batch_shape(run)) * (1.0 + 8.0 * ROUNDOFF), shape).reshape(-1)
        found = _of_gaussians(quantity, rows, law.flattened(shape), wanted)
        left = ~np.isfinite(found)
        value = np.where(left, 0.0, found)
    pairs, asked = np.broadcast_shapes(batch_shape(run), law.shape), left.reshape(shape)
    for side in sides(run, relation) if left.any() else ():
        # One call of the engines finds the last eps of all tables.  There is one table for each pair of a base and a
        # law.  The table serves all values asked for this pair, so the least delta among them decides where it ends.
        least = (
            wanted.reshape(shape) if quantity == "epsilon" else upper_delta(run, wanted.reshape(shape), side.forward)
        )
        least = np.min(np.where(asked, least, np.inf), axis=tuple(range(len(shape) - len(pairs))))
        least = np.min(least, axis=tuple(k for k, n in enumerate(pairs) if n == 1), keepdims=True)
        last = last_eps(run, least * (TAIL_SHARE / np.maximum(law.mean, 1.0)), side.forward)
        last = np.broadcast_to(last, shape).reshape(-1)
        for here, base, one in each_pair(run, law, shape, asked):
            at, top = wanted[here], float(last[here[0]])
            made = _of_table(base, one, top, side.forward)
            value[here] = np.maximum(value[here], made.leak(at) if quantity == "delta" else solved(made, at, top))
    return value.reshape(shape)


def solved(made: Envelope, delta: np.ndarray, unit: float) -> np.ndarray:
    """Return eps at which the leak is at most delta; inf where none is found."""
    with np.errstate(all="ignore"):
        near = made.newton(delta, np.zeros(delta.shape), np.full(delta.shape, LARGEST_EPS), 60)
        found = made.crossing(delta, near, (INFLATED, 300.0), unit)
    return np.where(np.isnan(found), np.inf, found)


def _of_table(run: Mechanism, law: Law, last: float, relation: str) -> Envelope:
    """Return the envelope of one base and law, from a table that ends at eps = `last`."""
    table, (u, t) = table_of(*profile_points(run, last, relation))
    lost = float(table.delta[-1])
    points = points_of(*lines(law, u, t), Table(table.ratio, table.delta - lost))
    return Envelope(mass_on_top(law, lost)[1], (points,))


def last_eps(run: Mechanism, level: np.ndarray, relation: str) -> np.ndarray:
    """Return the eps at which delta exceeds the mass at infinity by `level`, or by TAIL_SHARE of the mass if larger."""
    infinite = infinite_mass(run, relation)
    least = np.minimum(np.clip(np.maximum(level, TAIL_SHARE * infinite), 1e-290, 1.0) + infinite, 1.0)
    return np.clip(upper_epsilon(run, least, relation), 1e-6, LARGEST_EPS)


def profile_points(run: Mechanism, last: float, relation: str) -> tuple[np.ndarray, np.ndarray]:
    """Return eps of both signs, and upper bounds of one base's delta there."""
    eps = np.linspace(-last, last, 2 * POINTS + 1)
    return eps, upper_delta(run, eps, relation)


def table_of(eps: np.ndarray, high: np.ndarray) -> tuple[Table, tuple[np.ndarray, np.ndarray]]:
    """Return the Table of upper bounds at eps, with ratios rounded up, and (u, t) of a polygon above the curve."""
    ratio, high = np.exp(eps) * (1.0 + 4.0 * ROUNDOFF), np.where(high <= 1.0, high, 1.0)
    _, u, t = outer(ratio, high)
    return Table(np.append(0.0, ratio), np.minimum.accumulate(np.append(1.0, high))), (u, t)


def lines(law: Law, u: np.ndarray, t: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return gains and costs of lines `r gain - cost`, the maximum of which is at least M(r) (top of this file)."""
    near_one = 1.0 - np.geomspace(1e-13, 1.0, 1500)
    knots = np.linspace(0.0, u.size - 1.0, 12 * (POINTS + 2))
    v = np.concatenate([u, np.interp(knots, np.arange(u.size), u), near_one, np.interp(near_one, t, u)])
    v = np.sort(v)
    with np.errstate(all="ignore"):  # `points_of` handles NaN
        _, first, second = evaluated(law, 1.0 - np.stack([0.5 * (v[1:] + v[:-1]), v[:-1]]))
        _, gain, steeper = evaluated(law, 1.0 - np.interp(v, u, t))
        least, tilt = first * (1.0 - INFLATED) - 4.0 * ROUNDOFF * second, second * np.diff(v)
        middle = (tilt[0] < first[0]) & (first[0] > 16.0 * ROUNDOFF * second[0])
        left = np.where(middle, least[0] - 0.5 * tilt[0] * (1.0 + INFLATED), least[1])
        right = np.where(middle, least[0] + 0.5 * tilt[0] * (1.0 - INFLATED), least[1] + tilt[1] * (1.0 - INFLATED))
        cost = np.minimum(np.append(left, np.inf), np.append(np.inf, right))
        # a gain below 1e-300 may have lost digits in float64, and is rounded up to 1e-300
        gain = np.maximum(gain * (1.0 + INFLATED) + 4.0 * ROUNDOFF * steeper, 1e-300)
    return np.maximum.accumulate(gain), np.maximum(cost, 0.0)  # nearly equal gains may be out of order


def points_of(gain: np.ndarray, cost: np.ndarray, profile: Table | Gaussians, weight: float = 1.0) -> Points:
    """Return, as Points, the integral of the maximum of lines `r gain - cost`, which have ascending gains.

    There is a point for each r_j at which another line becomes the highest.  The sum of points is at least every line
    that is kept, even where rounding puts some r_j out of order: `(r - r_j)_+` is at least r - r_j, and at least 0.
    """
    if not (np.isfinite(gain).all() and np.isfinite(cost).all()):
        return Points(np.array([-np.inf]), np.array([np.inf]), profile)  # a NaN bounds nothing
    cost = np.minimum.accumulate(cost[::-1])[::-1]  # a line of more cost and less gain than another is never highest
    with np.errstate(divide="ignore", over="ignore"):
        first = int(np.argmin(cost / gain))  # for every r, a line before `first` lies below line `first` or below 0
        gain, cost = np.append(0.0, gain[first:]), np.append(0.0, cost[first:])
        kept = upper_hull(gain, -cost)
        rise, further = np.diff(gain[kept]), np.diff(cost[kept])
        at = np.minimum(np.log(further / rise), 1e4)
    return Points(at - 16.0 * ROUNDOFF, rise * (weight * (1.0 + INFLATED)), profile)


class Size(NamedTuple):
    """Numbers of nodes and cells for Gaussian bases; any numbers give a bound. Sketches are coarse first envelopes."""

    sketch_nodes: tuple[int, int]  # numbers of nodes in the first and in the second sketch
    sketch_cells: int  # number of cells of v in the sketches
    nodes: int  # number of nodes r_j
    cells: int  # number of cells of v
    rows: int  # number of rows computed at once: their arrays stay in the processor's cache


SIZES = (Size((24, 32), 96, 80, 224, 64), Size((32, 48), 160, 160, 448, 32), Size((48, 64), 256, 256, 1024, 16))
"""Sizes in the order of use: a row whose bound is too loose at one size takes the next size."""
SKETCH = Size((24, 24), 80, 32, 112, 64)
"""Size of the sketch from which delta is guessed."""


def _of_gaussians(quantity: str, mu: np.ndarray, law: Law, given: np.ndarray) -> np.ndarray:
    """Return the answers of `upper` for Gaussian bases, flattened to (R,); NaN where they are too loose."""
    answer = _epsilon if quantity == "epsilon" else _delta
    found = np.full(mu.shape, np.nan)
    for size in SIZES:
        left = np.flatnonzero(np.isnan(found))
        chunks = [left[begin : begin + size.rows] for begin in range(0, left.size, size.rows)]

        def one(rows: np.ndarray, size: Size = size) -> np.ndarray:
            with np.errstate(all="ignore"):  # a NaN row takes the next size
                return answer(mu[rows], law.taken((rows, None)), given[rows], size)

        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            for rows, piece in zip(chunks, pool.map(one, chunks), strict=True):
                found[rows] = piece
    return found


def _epsilon(mu: np.ndarray, law: Law, target: np.ndarray, size: Size) -> np.ndarray:
    """Return upper bounds of a selection's epsilon at delta, for Gaussian bases; NaN where they are too loose."""
    made, eps, close = _of_nodes(mu, law, target, None, size)
    found = made.crossing(target, eps, (1e-9, 0.005), mu, close)
    return np.where(close | (found == 0.0), found, np.nan)


def _delta(mu: np.ndarray, law: Law, eps: np.ndarray, size: Size) -> np.ndarray:
    """Return upper bounds of a selection's delta at eps, for Gaussian bases; NaN where they are too loose."""
    # the base's delta may be far below the answer, so a coarse envelope at this delta guesses the level of the answer
    base, _ = Gaussians(mu).about(eps)
    # no level above 0.5 is needed: an envelope made for 0.5 also holds for larger deltas
    level = np.clip(_of_nodes(mu, law, base, eps, SKETCH)[0].leak(eps), base, 0.5)
    made, _, close = _of_nodes(mu, law, level, eps, size)
    return np.where(close, made.leak(eps), np.nan)


def _of_nodes(
    mu: np.ndarray, law: Law, level: np.ndarray, eps: np.ndarray | None, size: Size
) -> tuple[Envelope, np.ndarray, np.ndarray]:
    """Return an envelope for a level of delta, the eps (given or solved for), and whether the bound seems tight."""
    start = IGNORED * level
    x, grown = sketch(mu[:, None], law, start[:, None])
    ends = spread(x, grown, np.diff(x), size.sketch_cells)
    rough = cells(mu[:, None], law, ends)
    first = _first(rough.lines(np.full(mu.shape, -np.inf)), start)
    lines = rough.lines(first)
    first, most = np.maximum(first, _first(lines, start)), np.max(lines.gain, axis=-1)
    far, low = _loss(mu, FAR * level / most), np.zeros(mu.shape) if eps is None else eps
    at = high = np.clip(_loss(mu, level / most) - first, 0.0, LARGEST_EPS) if eps is None else eps
    last = np.maximum(far - low, first + mu)
    nodes = first[:, None] + (last - first)[:, None] * np.linspace(0.0, 1.0, size.sketch_nodes[0])
    made, _, _ = _through(mu, lines, start, nodes)
    if eps is None:
        at = made.newton(level, at, high, NEWTON_STEPS[0])
    nodes = _placed(made, _between(made, at), size.sketch_nodes[1])
    made, chosen, _ = _through(mu, lines, start, nodes)
    if eps is None:
        at = made.newton(level, at, high, NEWTON_STEPS[1])
    best = np.take_along_axis(ends, np.minimum(chosen, ends.shape[1] - 1), axis=-1)
    slopes = start[:, None] + np.cumsum(made.sums[0].weight, axis=-1)
    between = _between(made, at)
    dense = crowded_ends(x, grown, best, between * slopes[:, :-1], size.cells)
    lines = cells(mu[:, None], law, dense).lines(first)
    nodes = _placed(made, between, size.nodes)
    # stretch the nodes so that the first node is where the new lines put it
    first, begin, end = np.maximum(first, _first(lines, start)), nodes[:, :1], nodes[:, -1:]
    nodes = end - (end - nodes) * ((end - first[:, None]) / (end - begin))
    nodes[:, 0] = first
    made, _, excess = _through(mu, lines, start, nodes)
    if eps is None:
        at = made.newton(level, at, high, NEWTON_STEPS[2])
    leak, falls = made.about(at)
    error = _missed(made, excess, at)
    if eps is None:
        return made, at, error <= falls * np.minimum(LOOSE[0] * at, LOOSE[1])
    return made, at, (error <= LOOSE_DELTA * leak) | (leak - error >= 1.0)


def _missed(made: Envelope, excess: np.ndarray, eps: np.ndarray) -> np.ndarray:
    """Guess how far the bound lies above the true leak."""
    nodes = made.sums[0].at
    r, turn = np.exp(nodes), _turns(made)
    over = 0.5 * (excess[:, 1:] / r[:, 1:] + excess[:, :-1] / r[:, :-1]) + 0.125 * turn * np.diff(nodes)
    missed: np.ndarray = np.sum(over * _between(made, eps), axis=-1) + made.start
    return missed


def _turns(made: Envelope) -> np.ndarray:
    """Return how much the slope of M's bound rises around each interval of nodes, without the kinks at both ends."""
    turn = made.sums[0].weight.copy()
    turn[:, 0], turn[:, -1] = turn[:, 1], turn[:, -2]
    return 0.5 * (turn[:, 1:] + turn[:, :-1])


def _between(made: Envelope, eps: np.ndarray) -> np.ndarray:
    """Estimate for each node the Q-mass of losses from `eps + node` to eps + the next node, times e^(eps + node)."""
    nodes, _, profile = made.sums[0]
    _, fall = profile.about(eps[:, None] + nodes)
    return np.maximum(fall[:, :-1] - fall[:, 1:] * np.exp(-np.diff(nodes)), 0.0)


def _placed(made: Envelope, between: np.ndarray, count: int) -> np.ndarray:
    """Return nodes (R, count) such that each chord between two of them overstates the leak by about the same amount."""
    nodes, width = made.sums[0].at, np.diff(made.sums[0].at)
    return spread(nodes, np.cbrt(_turns(made) * width * between), width, count)


def _first(lines: Lines, start: np.ndarray) -> np.ndarray:
    """Return log r for the largest r up to which no line `r gain - cost` exceeds `start * r`."""
    left = lines.gain > start[:, None]
    room = np.where(left, lines.gain - start[:, None], 1.0)
    return np.log(np.min(np.where(left, lines.cost / room, np.inf), axis=-1) * (1.0 - INFLATED))


def _loss(mu: np.ndarray, mass: np.ndarray) -> np.ndarray:
    """Return a loss such that the larger losses have about the P-mass `mass`."""
    return mu * (0.5 * mu - special.ndtri(np.clip(mass, 1e-300, 1.0 - 1e-9)))


def _through(
    mu: np.ndarray, lines: Lines, start: np.ndarray, nodes: np.ndarray
) -> tuple[Envelope, np.ndarray, np.ndarray]:
    """Return the envelope through the highest lines at r = e^nodes, their indices, and how far they exceed M(r)."""
    r = np.exp(nodes)
    best, chosen = np.zeros(r.shape), np.zeros(r.shape, np.int64)
    row = np.arange(r.shape[0])
    for j in range(r.shape[1]):
        value = r[:, j, None] * lines.gain
        value -= lines.cost
        chosen[:, j] = np.argmax(value, axis=-1)
        best[:, j] = value[row, chosen[:, j]]
    gain, cost = (np.take_along_axis(x, chosen, axis=-1) for x in lines.exact)
    excess = best - np.maximum(r * gain - cost, 0.0)
    best[:, 0] = np.maximum(best[:, 0], start * r[:, 0])
    best = np.maximum(best, 0.0)
    slope = np.concatenate([(best[:, :1] / r[:, :1]), np.diff(best) / np.diff(r), lines.gain.max(axis=-1)[:, None]], -1)
    slope = np.maximum.accumulate(slope, axis=-1)
    return Envelope(slope[:, 0], (Points(nodes, np.diff(slope), Gaussians(mu[:, None])),)), chosen, excess


class Lines(NamedTuple):
    """Lines whose maximum `max_k (r gain_k - cost_k)` is at least M(r) from a first r on; gain and cost are (R, K)."""

    gain: np.ndarray
    cost: np.ndarray
    exact: tuple[np.ndarray, np.ndarray]  # estimates of gain and cost, without the allowance for cells


class Cells(NamedTuple):
    """Cells of the Q-mass v with K ends.

    On a cell `r phi'(T(v)) - phi'(v)` is at most the larger of its values at the two ends, plus `bent - r straight`
    (top of this file: T is the trade-off curve, and phi the generating function of K).
    """

    gain: np.ndarray
    cost: np.ndarray
    bent: np.ndarray
    straight: np.ndarray
    exact: tuple[np.ndarray, np.ndarray]

    def lines(self, first: np.ndarray) -> Lines:
        """Return lines that hold for all r with log r >= `first`; `first` is (R,)."""
        more = self.bent - np.exp(first - INFLATED * (1.0 + np.abs(first)))[:, None] * self.straight
        more = np.where(more <= 0.0, 0.0, more) * (1.0 + INFLATED)  # NaN stays NaN
        # if `more` is over half of a cell's smaller cost, both ends of the cell take this cost without the correction
        step = ~(more <= 0.5 * self.cost[:, 1:])
        left = np.where(step, self.cost[:, 1:], self.cost[:, :-1] - more)
        right = np.where(step, self.cost[:, 1:], self.cost[:, 1:] - more)
        cost = np.concatenate([left, self.cost[:, -1:]], -1)
        cost[:, 1:] = np.minimum(cost[:, 1:], right)
        return Lines(self.gain, np.maximum(cost, 0.0), self.exact)


def cells(mu: np.ndarray, law: Law, x: np.ndarray) -> Cells:
    """Return the cells whose ends have the ascending scores x, (R, K); mu is (R, 1)."""
    middle = 0.5 * (x[:, 1:] + x[:, :-1])
    # at the ends v is exactly 1 minus the floats y; the masses at the middle of a cell have relative errors
    y = special.ndtr(x)
    v = 1.0 - y
    my, mv = special.ndtr(middle), special.ndtr(-middle)
    mean, missed = special.ndtr(middle - mu), special.ndtr(mu - middle)
    plainly, above, last = _risen(mu, x, y)
    ratio = np.exp(mu * (middle - 0.5 * mu))
    near = middle <= 0.0
    left = np.where(near, y[:, :-1] - my, mv - v[:, :-1])
    right = np.where(near, y[:, 1:] - my, mv - v[:, 1:])
    # lower bounds of 1 - T: the tangent at the cell's middle, rounded down, or a constant where the tangent is too low
    height = np.where(middle <= mu, mean * (1.0 - LINE_ERROR), 1.0 - missed * (1.0 + LINE_ERROR))
    low = height + ratio * (left - LINE_ERROR * np.where(near, y[:, :-1] + my, mv + v[:, :-1]))
    high = height + ratio * (right - LINE_ERROR * np.where(near, y[:, 1:] + my, mv + v[:, 1:]))
    flat = ~(low >= 0.5 * above[:, :-1])
    low, high = np.where(flat, above[:, :-1], low), np.where(flat, above[:, :-1], high)
    zero = np.zeros_like(mu)
    risen = np.minimum(np.concatenate([zero, high], -1), np.concatenate([low, last], -1))
    risen = np.clip(np.concatenate([risen, last], -1) * (1.0 - 4.0 * ROUNDOFF), 0.0, 1.0)
    gain = law.slopes(risen)[0] * (1.0 + INFLATED)
    plain, steep = law.slopes(np.concatenate([y, zero + 1.0], -1))
    cost = plain * (1.0 - INFLATED)
    # phi'' is convex: it changes in a cell at most as fast as in the cell before, and at least as fast as in the next
    width = np.diff(y)
    before = np.concatenate([y[:, :1], width[:, :-1]], -1)
    steeper = np.concatenate([law.slopes(zero)[1], steep[:, :-3]], -1)
    error = 2.0 * INFLATED
    bend = (steeper * (1.0 + error) - steep[:, :-2] * (1.0 - error)) / before
    high = np.clip(high, 0.0, 1.0)
    behind = law.slopes(high)[1]
    fallen = behind[:, :-1] * (1.0 - error) - behind[:, 1:] * (1.0 + error)
    rest = fallen / np.diff(high) * np.square((high - low) / width)[:, :-1]
    rest = np.where((fallen > 0.0) & (np.diff(high) > 0.0), rest, 0.0)
    each = 0.125 * width * width
    bent = np.concatenate([each * bend, zero + np.inf], -1)
    straight = np.concatenate([each[:, :-1] * rest * (1.0 - INFLATED), zero, zero], -1)
    exact = law.slopes(np.concatenate([plainly, last], -1))[0], plain
    return Cells(gain, cost, bent, straight, exact)


def _risen(mu: np.ndarray, x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return estimates and lower bounds of B, 1 minus the trade-off curve, at floats y; another bound at the last y.

    y is near the Q-mass of the scores below x, and misses this mass by less than `missed`.  B is convex, so over this
    distance B falls by at most its slope times `missed`.  B(1) = 1.
    """
    missed = LINE_ERROR * np.minimum(y, special.ndtr(-x)) + np.where(x > 0.0, 2.0 * ROUNDOFF, 0.0)
    loss = np.where(y < 1.0, np.exp(mu * (x - 0.5 * mu)) * (1.0 + LINE_ERROR) * missed, 0.0)
    about = special.ndtr(x - mu)
    above = np.maximum(about * (1.0 - LINE_ERROR) - loss, 0.0)
    last = 1.0 - special.ndtr(mu - x[:, -1:]) * (1.0 + LINE_ERROR) - loss[:, -1:]
    return about, above, last


def sketch(mu: np.ndarray, law: Law, least: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return scores x and, from one score to the next, the growth of log phi' under Q plus its growth under P."""
    first, second = law.slopes(np.zeros_like(mu))
    begin = special.ndtri(1e-9 / np.maximum(second / first, 1.0))
    end = np.maximum(mu + 8.3, begin + 1.0)
    x = begin + (end - begin) * np.linspace(0.0, 1.0, 64)
    floor = np.maximum(least, 1e-290)
    grown = [np.log(np.maximum(law.slopes(special.ndtr(x - shift))[0], floor)) for shift in (0.0, mu)]
    return x, np.abs(np.diff(grown[0])) + np.abs(np.diff(grown[1]))


def spread(places: np.ndarray, dense: np.ndarray, width: np.ndarray, count: int) -> np.ndarray:
    """Return `count` numbers between the first and the last of `places`, more of them in cells of larger `dense`."""
    share = (1.0 - EVENLY) * dense / np.sum(dense, axis=-1, keepdims=True)
    share = np.where(np.isfinite(share), share, 0.0) + EVENLY * width / np.sum(width, axis=-1, keepdims=True)
    risen = np.concatenate([np.zeros((places.shape[0], 1)), np.cumsum(share, axis=-1)], axis=-1)
    wanted = risen[:, -1:] * np.linspace(0.0, 1.0, count)
    found = interp(np, wanted, risen, places)
    found[:, 0] = places[:, 0]
    return found


def crowded_ends(x: np.ndarray, grown: np.ndarray, best: np.ndarray, weight: np.ndarray, count: int) -> np.ndarray:
    """Return `count` ends of cells, which are narrow near the scores `best`, above all where `weight` is large."""
    risen = np.concatenate([np.zeros((x.shape[0], 1)), np.cumsum(weight, axis=-1)], axis=-1)
    hit = np.abs(np.diff(interp(np, -x, np.maximum.accumulate(-best, axis=-1), risen), axis=-1))
    beside = np.concatenate([hit[:, :1] * 0.0, hit, hit[:, :1] * 0.0], axis=-1)
    near = np.cbrt((hit + beside[:, 2:] + beside[:, :-2]) * np.square(grown))
    dense = near / np.sum(near, axis=-1, keepdims=True)
    dense = np.where(np.isfinite(dense), dense, 0.0) + 0.3 * grown / np.sum(grown, axis=-1, keepdims=True)
    return spread(x, dense, np.diff(x), count)
