"""The envelope of Gaussian bases, many rows at a time: a sum of points of the base's profile.

With `M(r) = max_v (r phi'(T(v)) - phi'(v))` the envelope is `E int M_+(L/E) du`.  M_+ is convex, so it lies below any
piecewise linear function `sum_j c_j (r - r_j)_+` that is above it at the nodes r_j and rises by phi'(1) beyond them.
The integral of that function is `sum_j c_j delta_base(eps + log r_j)` (README.md of this folder, "The envelope of a
Gaussian base").  Nodes and cells may lie anywhere: where they lie decides how near the bound is, not whether it holds.
M is bounded at the nodes by cells of v: a bound of `r phi'(T(v)) - phi'(v)` inside each cell gives a line in r, and the
largest of these lines is at least M.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from jaxacct.core.floats import ROUNDOFF
from jaxacct.kernels.arrays import interp
from jaxacct.mechanisms import Mechanism, components
from jaxacct.selection.law_of_k import Law

__all__ = ["cells", "delta", "epsilon", "mus"]

LINE_ERROR = 1e-12
"""More than the relative error of the normal distribution function up to 38 deviations, and of a likelihood ratio up
to `exp(700)`.
"""
INFLATED = 4e-12
"""More than the relative errors of generating functions and of sums."""
NEXT_TO_ONE = 1e-9
"""Share of `1/(phi''/phi')`, at 1, of the mass that is scored higher in the first cell."""
LEAST_MASS_DEVIATIONS = 8.3
"""Deviations from the mean of P at which the last cell begins."""
SKETCH_CELLS = 64
"""Places at which phi' is looked at to place the cells of v."""
EVENLY = 0.25
"""Share of cells, and of nodes, that is spread evenly."""
GROWTH_SHARE = 0.3
"""Cells that go where phi' grows, for each that goes where the best places are."""


class Size(NamedTuple):
    """How fine a bound is; it holds for any sizes."""

    sketch_nodes: tuple[int, int]
    sketch_cells: int
    nodes: int  # r_j
    cells: int  # of v
    rows: int  # worked on at once: their arrays stay in the processor's cache


SIZES = (
    Size((24, 32), 96, 80, 224, 64),
    Size((32, 48), 160, 160, 448, 32),
    Size((48, 64), 256, 256, 1024, 16),
)
"""A row that one of them leaves too loose takes the next."""
SKETCH = Size((24, 24), 80, 32, 112, 64)
"""For a guess of delta."""
LARGEST_LEVEL = 0.5
"""Largest delta for which a bound is made: above, it holds as well."""
LOOSE = (8e-5, 9e-5)
"""Relative and absolute error of eps; a bound that is guessed to miss one of them is too loose."""
LOOSE_DELTA = 2e-3
"""Relative error of delta at eps, likewise; it is about what the first would be in delta."""
IGNORED = 1e-6
"""Share of delta that is added for all r below the first node."""
FAR = 1e-9
"""Share of delta beyond the last node of the first sketch."""
NEWTON_STEPS = (6, 2, 2)
"""Newton steps for eps in the two sketches and in the answer."""
FIRST_STEP = 1e-9
"""Relative step from where Newton's method ends to where the leak is looked at for the answer."""
OUTWARD_STEPS = 12
"""Steps from there, each four times as far as the one before, until the leak is at most delta."""
LARGEST_EPS = 700.0
"""Largest eps that is looked at: its exp is finite."""


class Sum(NamedTuple):
    """`leak(eps) <= start + sum_j weight_j delta_base(eps + at_j)`; mu (R, 1), start (R,), the others (R, J)."""

    mu: np.ndarray
    start: np.ndarray
    at: np.ndarray
    weight: np.ndarray

    def leak(self, eps: np.ndarray) -> np.ndarray:
        """Upper bounds of delta at eps >= 0, (R,)."""
        from jaxacct.engines import closed_form

        at = eps[:, None] + self.at
        at -= 4.0 * ROUNDOFF * (1.0 + eps[:, None] + np.abs(self.at))
        away = closed_form.delta(self.mu, np.abs(at)).upper
        here = np.where(at < 0.0, -np.expm1(np.minimum(at, 0.0)) + np.exp(np.minimum(at, 0.0)) * away, away)
        total = (np.sum(self.weight * here, axis=-1) + self.start) * (1.0 + INFLATED)
        return np.where(total <= 1.0, total, 1.0)

    def parts(self, eps: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(delta of the base at every node, by how much it falls per unit of eps), (R, J), not certified."""
        from jaxacct.engines import closed_form

        at = eps[:, None] + self.at
        log, fall, _ = closed_form.log_delta(self.mu, np.abs(at))
        away, shrink = np.exp(log), np.exp(np.minimum(at, 0.0))
        value = np.where(at < 0.0, 1.0 - shrink + shrink * away, away)
        slope = np.where(at < 0.0, shrink * (1.0 - away * (1.0 + fall)), away * fall)
        return value, slope


def mus(run: Mechanism) -> np.ndarray | None:
    """mu of every configuration, (B,), if all are Gaussians without sampling, composed; otherwise None."""
    parts = components(run, "add_or_remove_one", "remove")
    if not run.symmetric() or any(np.any(n > 0) for n in (parts.gauss_n, parts.laplace_n, parts.finite_n)):
        return None
    if np.any(parts.delta_infinity > 0.0) or np.any(parts.mu == 0.0):
        return None
    return parts.mu * (1.0 + 8.0 * ROUNDOFF)


def epsilon(mu: np.ndarray, law: Law, delta: np.ndarray) -> np.ndarray:
    """eps at which the bound is at most delta, row by row, NaN where it is too loose; all flattened to (R,)."""
    return _in_chunks(_epsilon, mu, law, delta)


def delta(mu: np.ndarray, law: Law, epsilon: np.ndarray) -> np.ndarray:
    """Upper bounds of delta at eps >= 0, row by row, NaN where they are too loose; all flattened to (R,)."""
    return _in_chunks(_delta, mu, law, epsilon)


def _in_chunks(
    answer: Callable[[np.ndarray, Law, np.ndarray, Size], np.ndarray], mu: np.ndarray, law: Law, given: np.ndarray
) -> np.ndarray:
    """Answers of the first size, and of the next one where they are too loose."""
    found = np.full(mu.shape, np.nan)
    workers = os.cpu_count() or 1
    for size in SIZES:
        left = np.flatnonzero(np.isnan(found))
        chunks = [left[begin : begin + size.rows] for begin in range(0, left.size, size.rows)]

        def one(rows: np.ndarray, size: Size = size) -> np.ndarray:
            with np.errstate(all="ignore"):  # what is not a number says nothing
                return answer(mu[rows], law.taken((rows, None)), given[rows], size)

        if len(chunks) > 1 and workers > 1:
            with ThreadPoolExecutor(workers) as pool:
                pieces = list(pool.map(one, chunks))
        else:
            pieces = [one(rows) for rows in chunks]
        for rows, piece in zip(chunks, pieces, strict=True):
            found[rows] = piece
    return found


def _epsilon(mu: np.ndarray, law: Law, target: np.ndarray, size: Size) -> np.ndarray:
    made, eps, close = _sum(mu, law, target, None, size)
    found = np.full(target.shape, np.nan)
    step = FIRST_STEP
    for _ in range(OUTWARD_STEPS):
        at = np.minimum(eps * (1.0 + step) + step * mu, LARGEST_EPS)
        found = np.where(np.isnan(found) & (made.leak(at) <= target), at, found)
        if not np.any(np.isnan(found) & close):
            break
        step *= 4.0
    found = np.where(close, found, np.nan)
    return np.where(made.leak(np.zeros(target.shape)) <= target, 0.0, found)


def _delta(mu: np.ndarray, law: Law, eps: np.ndarray, size: Size) -> np.ndarray:
    from jaxacct.engines import closed_form

    # the base's delta may be far below the answer, which a first sum guesses
    base = np.exp(closed_form.log_delta(mu, eps)[0])
    level = np.clip(_sum(mu, law, base, eps, SKETCH)[0].leak(eps), base, LARGEST_LEVEL)
    made, _, close = _sum(mu, law, level, eps, size)
    return np.where(close, made.leak(eps), np.nan)


def _sum(
    mu: np.ndarray, law: Law, level: np.ndarray, eps: np.ndarray | None, size: Size
) -> tuple[Sum, np.ndarray, np.ndarray]:
    """(the sum, the eps for which it was made, whether it seems close there), from a level of delta.

    eps is found where it is not given.
    """
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
        at = _newton(made, level, at, high, NEWTON_STEPS[0])
    nodes = _placed(made, _between(made, at), size.sketch_nodes[1])
    made, chosen, _ = _through(mu, lines, start, nodes)
    if eps is None:
        at = _newton(made, level, at, high, NEWTON_STEPS[1])
    between = _between(made, at)
    best = np.take_along_axis(ends, np.minimum(chosen, ends.shape[1] - 1), axis=-1)
    dense = crowded_ends(x, grown, best, between * _slopes(made)[:, :-1], size.cells)
    lines = cells(mu[:, None], law, dense).lines(first)
    nodes = _moved(_placed(made, between, size.nodes), np.maximum(first, _first(lines, start)))
    made, _, excess = _through(mu, lines, start, nodes)
    if eps is None:
        at = _newton(made, level, at, high, NEWTON_STEPS[2])
    error, leak, falls = _missed(made, excess, at)
    if eps is None:
        return made, at, error <= falls * np.minimum(LOOSE[0] * at, LOOSE[1])
    return made, at, (error <= LOOSE_DELTA * leak) | (leak - error >= 1.0)


def _missed(made: Sum, excess: np.ndarray, eps: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(by how much delta is guessed to be too high, the leak, by how much it falls per unit of eps)."""
    value, fall = made.parts(eps)
    between = _between(made, eps)
    r, turn = np.exp(made.at), _turns(made)
    over = 0.5 * (excess[:, 1:] / r[:, 1:] + excess[:, :-1] / r[:, :-1]) + 0.125 * turn * np.diff(made.at)
    error = np.sum(over * between, axis=-1) + made.start
    leak, falls = (np.sum(made.weight * x, axis=-1) for x in (value, fall))
    return error, leak, falls


def _turns(made: Sum) -> np.ndarray:
    """By how much the slope rises about every cell between two nodes; the kink at the first node does not count."""
    turn = made.weight.copy()
    turn[:, 0], turn[:, -1] = turn[:, 1], turn[:, -2]
    return 0.5 * (turn[:, 1:] + turn[:, :-1])


def _placed(made: Sum, between: np.ndarray, count: int) -> np.ndarray:
    """Nodes such that the chords between them overstate the leak by about the same, (R, count)."""
    width = np.diff(made.at)
    return spread(made.at, np.cbrt(_turns(made) * width * between), width, count)


def _moved(nodes: np.ndarray, first: np.ndarray) -> np.ndarray:
    """Nodes that begin at another place."""
    last = nodes[:, -1]
    nodes = last[:, None] - (last[:, None] - nodes) * ((last - first) / (last - nodes[:, 0]))[:, None]
    nodes[:, 0] = first
    return nodes


def _first(lines: Lines, start: np.ndarray) -> np.ndarray:
    """The logarithm of the r up to which M is at most `start r`."""
    left = lines.gain > start[:, None]
    room = np.where(left, lines.gain - start[:, None], 1.0)
    return np.log(np.min(np.where(left, lines.cost / room, np.inf), axis=-1) * (1.0 - INFLATED))


def _slopes(made: Sum) -> np.ndarray:
    """Slopes behind every node."""
    return made.start[:, None] + np.cumsum(made.weight, axis=-1)


def _between(made: Sum, eps: np.ndarray) -> np.ndarray:
    """For losses between two nodes about the Q-mass times the likelihood ratio."""
    _, fall = made.parts(eps)
    return np.maximum(fall[:, :-1] - fall[:, 1:] * np.exp(-np.diff(made.at)), 0.0)


def _loss(mu: np.ndarray, mass: np.ndarray) -> np.ndarray:
    """A loss beyond which there is about this P-mass."""
    from scipy import special

    return mu * (0.5 * mu - special.ndtri(np.clip(mass, 1e-300, 1.0 - 1e-9)))


def _newton(made: Sum, level: np.ndarray, eps: np.ndarray, high: np.ndarray, steps: int) -> np.ndarray:
    """eps at which the sum falls to a level: steps of Newton on its logarithm, halves where they lead out."""
    low, high = np.zeros(level.shape), np.maximum(high, eps)
    for _ in range(steps):
        value, fall = (np.sum(made.weight * x, axis=-1) for x in made.parts(eps))
        value += made.start
        low, high = np.where(value > level, eps, low), np.where(value > level, high, eps)
        moved = eps + np.log(value / level) * value / fall
        eps = np.where((moved >= low) & (moved <= high), moved, 0.5 * (low + high))
    return eps


def _through(mu: np.ndarray, lines: Lines, start: np.ndarray, nodes: np.ndarray) -> tuple[Sum, np.ndarray, np.ndarray]:
    """(the sum of the function through bounds of M at the nodes, the best line of each, by how much it is too high).

    Nodes are logarithms of r.
    """
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
    return Sum(mu[:, None], slope[:, 0], nodes, np.diff(slope)), chosen, excess


class Lines(NamedTuple):
    """`M(r) <= max_k (r gain_k - cost_k)` for all r that are at least the one they were made for, (R, K) each."""

    gain: np.ndarray
    cost: np.ndarray
    exact: tuple[np.ndarray, np.ndarray]  # about what gain and cost would be without loss


class Cells(NamedTuple):
    """Cells of v, K ends and K - 1 cells: between two ends f_r is at most the larger one plus `bent - r straight`."""

    gain: np.ndarray
    cost: np.ndarray
    bent: np.ndarray
    straight: np.ndarray
    exact: tuple[np.ndarray, np.ndarray]

    def lines(self, first: np.ndarray) -> Lines:
        """Lines for r whose logarithm is at least `first`, (R,)."""
        more = self.bent - np.exp(first - INFLATED * (1.0 + np.abs(first)))[:, None] * self.straight
        more = np.where(more <= 0.0, 0.0, more) * (1.0 + INFLATED)  # NaN stays
        # where that leaves little of a cost, the least cost of the cell stands at both of its ends
        step = ~(more <= 0.5 * self.cost[:, 1:])
        left = np.where(step, self.cost[:, 1:], self.cost[:, :-1] - more)
        right = np.where(step, self.cost[:, 1:], self.cost[:, 1:] - more)
        cost = np.concatenate([left, self.cost[:, -1:]], -1)
        cost[:, 1:] = np.minimum(cost[:, 1:], right)
        return Lines(self.gain, np.maximum(cost, 0.0), self.exact)


def cells(mu: np.ndarray, law: Law, x: np.ndarray) -> Cells:
    """Cells from scores x at their ends, (R, K) ascending; mu (R, 1)."""
    from scipy import special

    middle = 0.5 * (x[:, 1:] + x[:, :-1])
    # y = 1 - v at the ends, whatever number it is; in the middle the mass of Q to a relative error, and of P
    y = special.ndtr(x)
    v = 1.0 - y
    my, mv = special.ndtr(middle), special.ndtr(-middle)
    mean, missed = special.ndtr(middle - mu), special.ndtr(mu - middle)
    plainly, above, last = _risen(mu, x, y)
    ratio = np.exp(mu * (middle - 0.5 * mu))
    near = middle <= 0.0
    left = np.where(near, y[:, :-1] - my, mv - v[:, :-1])
    right = np.where(near, y[:, 1:] - my, mv - v[:, 1:])
    # the tangent of 1 - T at the middle, rounded down, or a constant where that one would fall below 0
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
    # phi'' is convex: its chord before a cell is above its slope there, and its chord behind is below
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
    """(about B, no more than B, the same at the last one), at the floats y that are nearly the Q-masses below x.

    y misses the Q-mass by less than `missed`, and B, convex, falls by at most its slope times that.  B(1) = 1.
    """
    from scipy import special

    missed = LINE_ERROR * np.minimum(y, special.ndtr(-x)) + np.where(x > 0.0, 2.0 * ROUNDOFF, 0.0)
    loss = np.where(y < 1.0, np.exp(mu * (x - 0.5 * mu)) * (1.0 + LINE_ERROR) * missed, 0.0)
    about = special.ndtr(x - mu)
    above = np.maximum(about * (1.0 - LINE_ERROR) - loss, 0.0)
    last = 1.0 - special.ndtr(mu - x[:, -1:]) * (1.0 + LINE_ERROR) - loss[:, -1:]
    return about, above, last


def sketch(mu: np.ndarray, law: Law, least: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(scores x, by how much log phi'(v) and log phi'(T(v)) grow from one to the next)."""
    from scipy import special

    first, second = law.slopes(np.zeros_like(mu))
    begin = special.ndtri(NEXT_TO_ONE / np.maximum(second / first, 1.0))
    end = np.maximum(mu + LEAST_MASS_DEVIATIONS, begin + 1.0)
    x = begin + (end - begin) * np.linspace(0.0, 1.0, SKETCH_CELLS)
    floor = np.maximum(least, 1e-290)
    grown = [np.log(np.maximum(law.slopes(special.ndtr(x - shift))[0], floor)) for shift in (0.0, mu)]
    return x, np.abs(np.diff(grown[0])) + np.abs(np.diff(grown[1]))


def spread(places: np.ndarray, dense: np.ndarray, width: np.ndarray, count: int) -> np.ndarray:
    """`count` places, from the first to the last, of which every cell gets its share."""
    share = (1.0 - EVENLY) * dense / np.sum(dense, axis=-1, keepdims=True)
    share = np.where(np.isfinite(share), share, 0.0) + EVENLY * width / np.sum(width, axis=-1, keepdims=True)
    risen = np.concatenate([np.zeros((places.shape[0], 1)), np.cumsum(share, axis=-1)], axis=-1)
    wanted = risen[:, -1:] * np.linspace(0.0, 1.0, count)
    found = interp(np, wanted, risen, places)
    found[:, 0] = places[:, 0]
    return found


def crowded_ends(x: np.ndarray, grown: np.ndarray, best: np.ndarray, weight: np.ndarray, count: int) -> np.ndarray:
    """Ends of cells that are narrow where the best places are, each of which has a weight."""
    risen = np.concatenate([np.zeros((x.shape[0], 1)), np.cumsum(weight, axis=-1)], axis=-1)
    hit = np.abs(np.diff(interp(np, -x, np.maximum.accumulate(-best, axis=-1), risen), axis=-1))
    beside = np.concatenate([hit[:, :1] * 0.0, hit, hit[:, :1] * 0.0], axis=-1)
    near = np.cbrt((hit + beside[:, 2:] + beside[:, :-2]) * np.square(grown))
    dense = near / np.sum(near, axis=-1, keepdims=True)
    dense = np.where(np.isfinite(dense), dense, 0.0) + GROWTH_SHARE * grown / np.sum(grown, axis=-1, keepdims=True)
    return spread(x, dense, np.diff(x), count)
