"""Two steps of the Poisson sampled Gaussian mechanism (README.md, "Two steps", defines G, h, C and mix)."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from scipy import special

from jaxacct.core.floats import ROUNDOFF
from jaxacct.engines import closed_form
from jaxacct.engines.protocol import Answer
from jaxacct.mechanisms.loss_components import Components

LONGEST_CELL = 0.25
"""Largest length of a cell (an interval of the first step's output), in standard deviations of that step's noise."""
LARGEST_TURN = 2.0
"""Largest w (|u| + 2 s) of a cell of length w at an output u, where s = 1/sigma. The quadrature needs this limit."""
LOG_NORMAL_TOP = -0.5 * np.log(2.0 * np.pi)
"""Logarithm of the standard normal density at 0."""
UNDERFLOW = 1e-304
"""Bound of what underflow takes from delta, a sum over the cells of their mass times the second step's delta."""
_ABSCISSAE, _HALVES = np.polynomial.legendre.leggauss(10)
_NODES, _WEIGHTS = 0.5 * (_ABSCISSAE + 1.0), 0.5 * _HALVES
"""Nodes and weights of the Gauss-Legendre rule on [0, 1]."""
LARGEST_EXPONENT = 700.0
"""An exponent above this number is lowered to it, because e^710 exceeds float64's range."""
TAIL_SHARE = 1e-10
"""Each tail beyond the cells adds at most this number times delta to the error of delta."""
GROWTH = 0.2
"""Largest rate at which the length of the cells changes with the first step's output u."""
POINTS_BEYOND = 12
"""The cells for an eps extend this many survey points too far right: for add, nearby eps may need cells there."""
REACH = 39.0
"""Number of standard deviations beyond which a normal law has no mass in float64."""
_ABOUT = np.concatenate([-np.geomspace(60.0, 1e-9, 36), [0.0], np.geomspace(1e-9, 60.0, 36)])
"""Survey points around a possible kink, as distances from the kink in y = s u - s^2/2 (`first_loss`)."""
_WIDE = np.linspace(-REACH, REACH, 105)
"""Survey points around each mode of the first step's output: distances from the mode in standard deviations."""
WIDE = 1e-6
"""A row whose bracket has a larger relative width is solved again with more cells."""
CELLS_AT_A_TIME = 2**25 // (8 * 60)
"""Largest number of cells in memory at a time. About 60 float64 arrays of this size take 32 MiB."""
LEAST_BOUND = 1e-305
"""A bound or an estimate of delta is raised to at least this number before its logarithm is taken."""
FARTHEST = 30.0
"""In `_search`, lower bounds of log(delta/target) are raised to -FARTHEST, and upper bounds lowered to FARTHEST."""
NEAR = 0.05
"""To converge, both searches need a step in v (see `_search`) < NEAR, and `_rough` also |log(delta/target)| < NEAR."""


def _steps(parts: Components) -> Steps:
    """Return each row's two steps. The step of larger total variation is second, to make the integrand G smoother."""
    order = np.argsort(-parts.gauss_n, axis=1, kind="stable")
    most, other = order[:, :1], order[:, :2][:, -1:]
    twice = np.take_along_axis(parts.gauss_n, most, 1) == 2
    columns = np.concatenate([most, np.where(twice, most, other)], axis=1)
    sigma, q = (np.take_along_axis(x, columns, 1) for x in (parts.gauss_sigma, parts.gauss_q))
    swap = np.diff(q * special.erf(8.0**-0.5 / sigma), axis=1) < 0.0
    first_sigma, first_q = (np.where(swap, x[:, 1:], x[:, :1]) for x in (sigma, q))
    second_sigma, second_q = (np.where(swap, x[:, :1], x[:, 1:]) for x in (sigma, q))
    return Steps(first_sigma, first_q, second_sigma, second_q, parts.sign[:, None] > 0)


def _in_blocks(solve: Callable[..., Answer], parts: Components, enough: np.ndarray, *values: np.ndarray) -> Answer:
    """Solve all rows, in blocks that fit into memory. Then solve the rows with wide brackets again, with more cells."""
    size = parts.mu2.size
    answer = Answer(np.zeros(size), np.zeros(size), np.full(size, np.inf))
    steps = _steps(parts)
    with np.errstate(all="ignore"):
        for count in (800, 5000):
            wide = np.flatnonzero(~((answer.upper * (1.0 - WIDE) <= answer.lower) | (answer.upper <= enough)))
            for start in range(0, wide.size, CELLS_AT_A_TIME // count):
                rows = wide[start : start + CELLS_AT_A_TIME // count]
                found = solve(steps.take(rows), count, *(v[rows] for v in values))
                for end, known in zip(answer, found, strict=True):
                    end[rows] = known
    return answer


def delta(parts: Components, eps: np.ndarray) -> Answer:
    # A row whose upper bound of delta is at most 1e-300 is not solved again with more cells.
    return _in_blocks(_delta, parts, np.full_like(eps, 1e-300), eps)


def epsilon(parts: Components, delta: np.ndarray, slack: np.ndarray, floor: np.ndarray) -> Answer:
    """Return bounds of epsilon. If epsilon <= `floor`, they may be wide. `slack`: largest relative error of `delta`."""
    return _in_blocks(_epsilon, parts, np.maximum(floor, 0.0), delta, slack, floor)


def _made(steps: Steps, eps: np.ndarray, count: int) -> Cells:
    return cells(steps, placed(steps, eps, count, surveyed(steps, eps)))


def _largest(steps: Steps) -> np.ndarray:
    """Return (B,) the largest privacy loss of both steps together, rounded up. In the remove direction it is inf."""
    most = -(np.log1p(-steps.q) + np.log1p(-steps.second_q)) * (1.0 + 16.0 * ROUNDOFF)
    return np.where(steps.removing, np.inf, most)[:, 0]


def _delta(steps: Steps, count: int, eps: np.ndarray) -> Answer:
    low, high = bounds(steps, _made(steps, eps, count), eps)
    beyond = eps > _largest(steps)
    low, high = np.where(beyond, 0.0, low), np.where(beyond, 0.0, high)
    return Answer(low, 0.5 * (low + high), high)


class _Found:
    """The bracket [lower, upper] of epsilon in each row, at first [0, largest loss]. `look` narrows it."""

    def __init__(self, steps: Steps, delta: np.ndarray, slack: np.ndarray) -> None:
        self.steps = steps
        self.small = delta * (1.0 - slack) * (1.0 - 4.0 * ROUNDOFF)
        self.large = delta * (1.0 + slack) * (1.0 + 4.0 * ROUNDOFF)
        self.lower, self.upper = np.zeros_like(delta), _largest(steps)

    def look(self, made: Cells, eps: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Bound delta at eps, and narrow the bracket. Return log(lower bound/target) and log(upper bound/target)."""
        low, high = bounds(self.steps.take(rows), made, eps)
        large, small = self.large[rows], self.small[rows]
        self.lower[rows] = np.where(low >= large, np.maximum(self.lower[rows], eps), self.lower[rows])
        self.upper[rows] = np.where(high <= small, np.minimum(self.upper[rows], eps), self.upper[rows])
        return np.log(np.maximum(low, LEAST_BOUND) / large), np.log(high / small)


def _epsilon(steps: Steps, count: int, delta: np.ndarray, slack: np.ndarray, floor: np.ndarray) -> Answer:
    found = _Found(steps, delta, slack)
    zero = np.zeros_like(delta)
    least = surveyed(steps, zero).delta
    excess = np.full_like(delta, np.nan)  # log(delta(0)/target), or NaN in rows where delta(0) is not evaluated
    # Evaluate delta at 0 where epsilon may be 0, and at `floor`. A row whose epsilon is below `floor` needs no search.
    for eps, some in ((zero, least < 1.2 * delta), (floor, (floor > 0.0) & np.isfinite(floor))):
        rows = np.flatnonzero(some & (found.upper > eps))
        if rows.size:
            low, high = found.look(_made(steps.take(rows), eps[rows], count), eps[rows], rows)
            if eps is zero:
                excess[rows] = 0.5 * (low + high)
    rows = np.flatnonzero(found.upper > np.maximum(floor, 0.0))
    middle = np.zeros_like(delta)
    if rows.size:
        middle[rows] = _search(found, rows, count, delta[rows], slack[rows], least[rows], excess[rows])
    lower = np.where(found.lower <= found.upper, found.lower, 0.0)
    return Answer(lower, np.clip(middle, lower, found.upper), found.upper)


def _search(
    found: _Found,
    asked: np.ndarray,  # indices in `found` of the rows to search; the arguments after `count` hold only these rows
    count: int,
    delta: np.ndarray,
    slack: np.ndarray,
    least: np.ndarray,  # estimate of delta(0)
    excess: np.ndarray,  # log(delta(0)/target), or NaN where it is unknown
) -> np.ndarray:
    """Return an estimate of epsilon by Newton's method in v = log(eps/(top - eps)). Narrow the bracket in `found`."""
    steps = found.steps.take(asked)
    mu = np.hypot(1.0 / steps.sigma, 1.0 / steps.second_sigma)[:, 0]
    top = np.fmin(closed_form.simple_epsilon(mu, np.log(delta), slack).upper, _largest(steps))
    bias = np.where(np.isnan(excess), 0.0, np.log(least / delta) - excess)
    v, slope = _rough(steps, np.log(delta) + bias, top, least)
    before, value, gap = np.full_like(v, -np.inf), excess.copy(), np.zeros_like(v)
    rows = np.arange(asked.size)
    for turn in range(12):  # at most 12 steps; each row stops by its own numbers, so no row depends on another
        eps = top[rows] * special.expit(v[rows])
        part = _made(steps.take(rows), eps, count)
        if turn == 0:
            made = part
        else:
            for whole, new in zip(made, part, strict=True):
                whole[rows] = new
        low, high = found.look(part, eps, asked[rows])
        risen = 0.5 * (np.maximum(low, -FARTHEST) + np.minimum(high, FARTHEST))
        slope[rows] = _secant(v[rows], risen, before[rows], value[rows], slope[rows])
        before[rows], value[rows], gap[rows] = v[rows], risen, high - low
        v[rows] = _moved(v[rows], -risen / slope[rows])
        rows = rows[~((np.abs(risen) < 1e-4) & (np.abs(risen / slope[rows]) < NEAR))]
        if not rows.size:
            break
    left, right, margin, units = v + gap / slope, v - gap / slope, 0.05 * gap + 2.0**-45, 4.0 * ROUNDOFF
    rows = np.arange(asked.size)
    for _ in range(6):
        part, most, rise, near = made.take(rows), top[rows], slope[rows], margin[rows]
        low, _ = found.look(part, most * special.expit(left[rows]) * (1.0 - units), asked[rows])
        _, high = found.look(part, most * special.expit(right[rows]) * (1.0 + units), asked[rows])
        left[rows] = _moved(left[rows], (near - low) / rise)
        right[rows] = _moved(right[rows], (-near - high) / rise)
        rows = rows[~((low >= 0.0) & (low < 3.0 * near) & (high <= 0.0) & (high > -3.0 * near))]
        units *= 64.0
        if not rows.size:
            break
    return top * special.expit(v)


def _moved(v: np.ndarray, step: np.ndarray) -> np.ndarray:
    """Return v after a Newton step. If v < 0, `step` is the relative change of eps (nearly that of e^v)."""
    return v + np.where(v < 0.0, np.log1p(np.clip(step, -0.95, 1e9)), np.clip(step, -3.0, 3.0))


def _secant(v: np.ndarray, value: np.ndarray, before: np.ndarray, old: np.ndarray, slope: np.ndarray) -> np.ndarray:
    """Return the slope of `value` in v by a secant (in eps if v < 0); `slope` if the secant rises or is inexact."""
    apart = v - before
    secant = (value - old) / np.where(v < 0.0, -np.expm1(-apart), apart)
    return np.where((np.abs(apart) > 1e-6) & (secant < 0.0) & np.isfinite(secant), secant, slope)


def _rough(steps: Steps, log_delta: np.ndarray, top: np.ndarray, least: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return a v (as in `_search`) where an estimate of delta is near the target, and the slope of log delta there."""

    def value(v: np.ndarray, rows: np.ndarray) -> np.ndarray:
        estimate = surveyed(steps.take(rows), top[rows] * special.expit(v)).delta
        return np.log(np.maximum(estimate, LEAST_BOUND)) - log_delta[rows]

    excess = 0.9 * (least - np.exp(log_delta))  # lower end of the search: delta falls by at most 1 per unit of eps
    low = np.clip(excess, 1e-9 * np.exp(log_delta), 0.5 * top)
    a = np.log(low / (top - low))
    b, slope = np.full_like(a, 37.0), np.full_like(a, -1.0)  # at v = 37, eps equals `top` in float64
    v, at = np.full_like(a, -np.inf), np.log(least) - log_delta  # v and log(delta/target) at eps = 0
    rows, new = np.arange(a.size), a + 1.0
    for turn in range(30):
        risen = value(new[rows], rows)
        slope[rows] = _secant(new[rows], risen, v[rows], at[rows], slope[rows])
        nearer = np.abs(risen) < 0.5 * np.abs(at[rows])
        v[rows], at[rows] = new[rows], risen
        a[rows], b[rows] = np.where(risen > 0.0, v[rows], a[rows]), np.where(risen > 0.0, b[rows], v[rows])
        step = _moved(v, -at / slope)
        # bisect if the secant step leaves the interval, or if the last step did not halve |log(delta/target)|
        new = np.where((step > a) & (step < b), step, 0.5 * (a + b))
        new[rows] = np.where(nearer | (turn < 2), new[rows], 0.5 * (a + b)[rows])
        rows = np.flatnonzero(~((np.abs(at) < NEAR) & (np.abs(at / slope) < NEAR)) & (b - a > 1e-6))
        if not rows.size:
            break
    return v, slope


class Survey(NamedTuple):
    """A rough grid of outputs of the first step, from which `placed` chooses the cells, and an estimate of delta."""

    u: np.ndarray  # (B, S) the outputs, ascending
    loss: np.ndarray  # (B, S) log of the first step's likelihood ratio
    left: np.ndarray  # (B, S) bound of how much the second step's profile changes left of each output
    right: np.ndarray  # (B, S) bound of how much the second step's profile changes right of each output
    delta: np.ndarray  # (B,) estimate of delta


def surveyed(steps: Steps, eps: np.ndarray) -> Survey:
    """Return the survey for eps (B,). It covers both modes of the first output, with more points near kinks."""
    eps = eps[:, None]
    s = 1.0 / steps.sigma
    signed = np.where(steps.removing, eps, -eps)
    knee = np.log1p(-steps.q) - np.log(steps.q)
    # The integrand has kinks at L = eps and eps - L = b: L is the first step's loss, and b a bound of the second's.
    places = [_exponent(steps, loss) for loss in (signed, signed - np.log1p(-steps.second_q))]
    centres = [(np.where(np.isfinite(y), y, knee) / s + 0.5 * s) + _ABOUT / s for y in (knee, *places)]
    u = np.concatenate([_WIDE + 0.0 * s, _WIDE + s, *centres], axis=1)
    u = np.sort(np.clip(u, -REACH, REACH + np.where(steps.removing, s, 0.0)), axis=1)
    loss, off = first_loss(steps, u)
    log_mass = -0.5 * u * u - 0.5 * np.log(2.0 * np.pi) + np.where(steps.removing, loss, 0.0)
    every = np.concatenate([np.log1p(-steps.q), loss], axis=1)
    off = np.concatenate([0.0 * eps, off], axis=1)
    at = eps - np.where(steps.removing, every, -every)
    low, high = closed_form.profile_of_one_step(steps.second_sigma, steps.second_q, steps.removing, at, off)
    logs = log_mass + np.log(np.maximum(low[:, 1:], 1e-305))
    delta = np.sum(_log_linear(logs, np.diff(u, axis=1)), axis=1)
    limit = np.where(steps.removing, 1.0, 0.0)
    left, right = (
        np.maximum(high, high[:, :1]) - np.minimum(low, low[:, :1]),
        np.maximum(high, limit) - np.minimum(low, limit),
    )
    return Survey(u, loss, left[:, 1:], right[:, 1:], delta)


def _exponent(steps: Steps, loss: np.ndarray) -> np.ndarray:
    """Solve log(1 - q + q e^y) = loss, and return y; -inf where there is no solution."""
    with np.errstate(divide="ignore", invalid="ignore"):
        rest = np.log(np.maximum(1.0 + np.expm1(np.minimum(loss, 1.0)) / steps.q, 0.0))
        return np.where(
            loss > 1.0, loss + np.log1p((steps.q - 1.0) * np.exp(-np.maximum(loss, 1.0))) - np.log(steps.q), rest
        )


def _log_linear(logs: np.ndarray, width: np.ndarray) -> np.ndarray:
    """Return each interval's integral of a function whose logarithm is `logs` at the ends and linear between them."""
    rise = np.diff(logs, axis=1)
    mean = np.where(np.abs(rise) < 1e-6, 1.0, np.expm1(-np.abs(rise)) / np.where(rise == 0.0, 1.0, -np.abs(rise)))
    return np.exp(np.maximum(logs[:, :-1], logs[:, 1:])) * mean * width


def placed(steps: Steps, eps: np.ndarray, count: int, survey: Survey) -> np.ndarray:
    """Return (B, count + 1) the nodes of the cells, placed for computing delta at values near eps (B,)."""
    u, s = survey.u, 1.0 / steps.sigma
    left, right = _unknown(steps, survey)
    inside = left[:, 1:] & right[:, :-1]
    width = np.diff(u, axis=1) * inside
    density = _density(steps, eps[:, None], survey)
    density = np.maximum(density[:, :-1], density[:, 1:])
    far = np.maximum(np.abs(u[:, :-1]), np.abs(u[:, 1:]))
    # the least number of cells per unit of u; 1.02 makes cells that span two survey intervals short enough for both
    least = 1.02 * np.maximum((far + 2.0 * s) / LARGEST_TURN, 1.0 / LONGEST_CELL)
    used = np.sum(least * width, axis=1, keepdims=True)
    # 70 % of the cells follow the density, and the others make the widths change gradually
    every = least + density * _share(0.7 * count - used, density * width)
    extra = np.maximum(every, 1.0 / _graded(u, 1.0 / every)) - least
    total = np.cumsum((least + extra * _share(count - used, extra * width)) * width, axis=1)
    total = np.concatenate([np.zeros_like(total[:, :1]), total], axis=1)
    nodes = np.empty((u.shape[0], count + 1))
    for row in range(u.shape[0]):
        some = np.flatnonzero(inside[row])
        if some.size:
            some = np.arange(some[0], some[-1] + 2)
            ends = np.linspace(total[row, some[0]], total[row, some[-1]], count + 1)
            nodes[row] = np.interp(ends, total[row, some], u[row, some])
        else:  # no cell is needed: put all nodes at the first point that needs no cells to its right
            nodes[row] = u[row, np.argmax(~right[row])]
    return nodes


def _share(left: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Return (B, 1) the factor by which to multiply `wanted` so that it adds up to `left`."""
    return np.maximum(left, 0.0) / np.maximum(np.sum(wanted, axis=1, keepdims=True), 1e-300)


def _graded(u: np.ndarray, w: np.ndarray) -> np.ndarray:
    """Return the widths `w`, lowered as little as possible so that they change by at most GROWTH per unit of u."""
    left, right = GROWTH * u[:, :-1], GROWTH * u[:, 1:]
    graded = w.copy()
    rising = np.minimum.accumulate((w - right)[:, :-1], axis=1) + left[:, 1:]
    falling = np.minimum.accumulate((w + left)[:, :0:-1], axis=1)[:, ::-1] - right[:, :-1]
    graded[:, 1:] = np.minimum(graded[:, 1:], rising)
    graded[:, :-1] = np.minimum(graded[:, :-1], falling)
    return np.maximum(graded, 1e-300)


def _density(steps: Steps, eps: np.ndarray, survey: Survey) -> np.ndarray:
    """Return (B, S) the wanted number of cells per unit of u at the survey's outputs, divided by its largest value."""
    s, mu2 = 1.0 / steps.sigma, np.square(1.0 / steps.second_sigma)
    t = np.where(steps.removing, eps, -eps) - survey.loss
    value = shifted(steps, t)
    y = s * (survey.u - 0.5 * s)
    share = np.exp(np.minimum(np.log(steps.q) + y - survey.loss, 0.0))
    value = np.where(np.isfinite(value), value, -1e3 * (1.0 + mu2))
    inverse = np.exp(np.minimum(-value, 300.0))
    steep = np.minimum(1.0 + (1.0 - steps.second_q) / steps.second_q * inverse, 1e200)
    rate = s * share * (3.0 + np.abs(1.5 + value / mu2) * steep)
    bend = log_bend(steps, eps)[0] - 3.0 * survey.loss - value * (1.5 + 0.5 * value / mu2)
    logs = -0.5 * survey.u**2 + 2.0 * y + bend + np.log(np.maximum(rate, 1e-300))
    logs = 0.25 * np.where(np.isnan(logs), -np.inf, logs)
    top = np.max(logs, axis=1, keepdims=True)
    # at least e^-20, so that cells are everywhere
    return np.exp(np.maximum(logs - np.where(np.isfinite(top), top, 0.0), -20.0))


def _unknown(steps: Steps, survey: Survey) -> tuple[np.ndarray, np.ndarray]:
    """Return whether a point needs cells on its left, and on its right: if that side's error > TAIL_SHARE * delta."""
    s, q = 1.0 / steps.sigma, np.where(steps.removing, steps.q, 0.0)
    u, enough = survey.u, TAIL_SHARE * survey.delta[:, None]
    below, above = ((1.0 - q) * special.ndtr(-side * u) + q * special.ndtr(-side * (u - s)) for side in (-1.0, 1.0))
    left, right = below * survey.left > enough, above * survey.right > enough
    # make both monotone along the points, in spite of rounding errors of the second step's profile
    left, right = np.maximum.accumulate(left, axis=1), np.maximum.accumulate(right[:, ::-1], axis=1)[:, ::-1]
    right[:, POINTS_BEYOND:] |= right[:, :-POINTS_BEYOND]
    return left, right


class Steps(NamedTuple):
    """Two steps of the sampled Gaussian in one direction, as arrays (B, 1). delta is a mean over the first output."""

    sigma: np.ndarray  # noise of the first step
    q: np.ndarray  # sampling rate of the first step
    second_sigma: np.ndarray
    second_q: np.ndarray
    removing: np.ndarray  # whether the direction is remove

    def take(self, rows: np.ndarray | slice) -> Steps:
        return Steps(*(x[rows] for x in self))


class Cells(NamedTuple):
    """Cells (intervals of the first step's output u), and what `bounds` needs of them at any eps. P is the law of u."""

    nodes: np.ndarray  # (B, N + 1) outputs u at the ends of the cells
    loss: np.ndarray  # (B, N + 1) log of the first step's likelihood ratio at the nodes
    off: np.ndarray  # (B, N + 1) bound of the error of these losses
    first: np.ndarray  # (B, N) weight, in the sums of `bounds`, of the second step's profile at a cell's left end
    last: np.ndarray  # (B, N) weight of the profile at the right end; `first + last` is the cell's mass under P
    wrong: np.ndarray  # (B, N) bound of the relative error of `first` and of `last`
    log_bend: np.ndarray  # (B, N) log of C/2 (README.md defines C under "A cell.")
    bend_wrong: np.ndarray  # (B, N) bound of the error of `log_bend`
    below: np.ndarray  # (B, 2) bounds of P(u < first node)
    above: np.ndarray  # (B, 2) bounds of P(u > last node)
    sound: np.ndarray  # (B,) whether every cell is short enough for the quadrature

    def take(self, rows: np.ndarray) -> Cells:
        return Cells(*(x[rows] for x in self))


def first_loss(steps: Steps, u: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the first step's log likelihood ratio, log mix, at the output u, and a bound on its error."""
    s, q = 1.0 / steps.sigma, steps.q
    y = s * (u - 0.5 * s)
    part = q * np.expm1(np.minimum(y, LARGEST_EXPONENT))
    small = np.abs(part) <= 0.5
    far = np.logaddexp(np.log1p(-q), np.log(q) + y)
    loss = np.where(small, np.log1p(np.where(small, part, 0.0)), far)
    # y has an error <= 4 ROUNDOFF (|s u| + s^2). In log mix this error is multiplied by `share`, which
    # is q e^y/mix. Computing log mix from y adds an error of 16 ROUNDOFF times `rounding`.
    share = np.exp(np.minimum(np.log(q) + y - loss, 0.0))
    off = share * 4.0 * ROUNDOFF * (np.abs(s * u) + s * s) * 1.01
    rounding = np.where(small, np.abs(loss), 1.0 + np.abs(loss) + np.abs(np.log(q)) + np.abs(y) * share)
    return loss, off + 16.0 * ROUNDOFF * rounding


def cells(steps: Steps, nodes: np.ndarray) -> Cells:
    """Return the cells between ascending nodes (B, N + 1)."""
    s = 1.0 / steps.sigma
    left, w = nodes[:, :-1], np.diff(nodes, axis=1)
    turn, whole = w * np.maximum(np.abs(left), np.abs(nodes[:, 1:])), np.expm1(s * w)
    short = (w <= LONGEST_CELL) & (turn + 2.0 * s * w <= LARGEST_TURN) & (whole > 1e-290)
    divisor = np.where(short, whole, 1.0)
    begin, end, bend = (np.zeros_like(w) for _ in range(3))
    for v, weight in zip(_NODES, _WEIGHTS, strict=True):
        density = weight * np.exp(-v * w * (left + 0.5 * v * w))
        part = np.expm1(v * s * w) / divisor
        begin += density * (1.0 - part)
        end += density * part
        bend += density * part * (1.0 - part)
    loss, off = first_loss(steps, nodes)
    counted = np.where(steps.removing, loss, 0.0)
    log_scale = np.log(np.maximum(w, 1e-300)) - 0.5 * left * left + LOG_NORMAL_TOP
    first = np.exp(log_scale + counted[:, :-1]) * begin
    last = np.exp(log_scale + counted[:, 1:]) * end
    size = np.abs(log_scale) + left * left + np.abs(counted[:, :-1]) + np.abs(counted[:, 1:])
    moved = np.where(steps.removing, off[:, :-1] + off[:, 1:], 0.0)
    y = s * (left - 0.5 * s)
    log_bend = log_scale + 2.0 * (y + np.log(divisor)) + np.log(np.where(short, bend, 1.0)) - np.log(2.0)
    bend_wrong = 1e-13 + 16.0 * ROUNDOFF * (  # 1e-13: relative error of C
        size + np.abs(s * left) + s * s + np.abs(np.log(divisor)) + np.abs(log_bend)
    )
    # 2e-14 covers the error of a weight from the quadrature, and from the rounding of its ten terms and their sum
    wrong = 2e-14 + 8.0 * ROUNDOFF * size + 1.1 * moved
    empty = w == 0.0
    return Cells(
        nodes,
        loss,
        off,
        np.where(empty, 0.0, first),
        np.where(empty, 0.0, last),
        wrong,
        np.where(empty, -1e300, log_bend),  # instead of log 0 = -inf, since -inf + inf is NaN
        bend_wrong,
        _tail(steps, nodes[:, :1], -1.0),
        _tail(steps, nodes[:, -1:], 1.0),
        np.all((short | empty) & (w >= 0.0) & (wrong < 0.05), axis=1),
    )


def _tail(steps: Steps, at: np.ndarray, side: float) -> np.ndarray:
    """Return (B, 2) bounds of the probability, under P, of outputs u below `at` (side -1) or above `at` (side 1)."""
    s, q = 1.0 / steps.sigma, np.where(steps.removing, steps.q, 0.0)
    mass, wrong = np.zeros_like(at), np.zeros_like(at)
    for share, x in ((1.0 - q, -side * at), (q, -side * (at - s))):
        term = share * special.ndtr(x)
        mass, wrong = mass + term, wrong + term * ROUNDOFF * (64.0 + 8.0 * (np.abs(x) + 1.0) * (np.abs(at) + s))
    return np.concatenate([np.maximum(mass - wrong, 0.0), np.minimum(mass + wrong, 1.0)], axis=1)


def shifted(steps: Steps, t: np.ndarray) -> np.ndarray:
    """Return lambda = log((q_2 + e^t - 1)/q_2), where q_2 is the second step's rate; -inf where lambda is undefined."""
    q = steps.second_q
    ratio = np.expm1(np.minimum(t, 1.0)) / q
    near = np.log1p(np.where(ratio > -1.0, ratio, 0.0))
    far = t - np.log(q) + np.log1p((q - 1.0) * np.exp(-np.maximum(t, 1.0)))
    return np.where(t > 1.0, far, np.where(ratio > -1.0, near, -np.inf))


def log_bend(steps: Steps, eps: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (B, 1) the log of the lambda-free factors of `G'' mix^3` (README.md), and a bound of the log's error."""
    mu = 1.0 / steps.second_sigma
    grown = np.where(steps.removing, 2.0, -1.0) * eps
    terms = (2.0 * np.log(steps.q), -np.log(steps.second_q), -np.log(mu), grown, -0.125 * mu * mu, LOG_NORMAL_TOP)
    value, size = np.asarray(sum(terms)), np.asarray(sum(np.abs(term) for term in terms))
    return value, 16.0 * ROUNDOFF * (1.0 + size)


def _bends(steps: Steps, made: Cells, eps: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return lower and upper bounds of each cell's integral of (chord of G) - G: m C/2 and M C/2 in README.md."""
    t = np.where(steps.removing, eps, -eps) - made.loss
    value, mu2 = shifted(steps, t), np.square(1.0 / steps.second_sigma)
    off = made.off + 2.0 * ROUNDOFF * (np.abs(eps) + np.abs(made.loss))
    with np.errstate(over="ignore", invalid="ignore"):
        # `value` is lambda. Its derivative in t is 1 + (1 - q_2) e^-lambda/q_2. An error of up to .09 in lambda raises
        # the derivative by at most 10 %, hence the factor 1.1.
        inverse = np.exp(-value)
        moved = 1.1 * off * (1.0 + (1.0 - steps.second_q) / steps.second_q * inverse)
        moved += 16.0 * ROUNDOFF * (np.abs(value) + np.where(t < 0.0, inverse, 0.0))
        exponent = -value * (1.5 + 0.5 * value / mu2)
        size = np.abs(value)
        wrong = moved * (1.5 + (size + moved) / mu2) + 16.0 * ROUNDOFF * size * (1.5 + size / mu2)
        known = (moved < 0.09) & np.isfinite(wrong)
    top = 1.125 * mu2 * (1.0 + 8.0 * ROUNDOFF)
    straight = np.expm1(np.minimum(t, 1.0) + off) < -steps.second_q * (1.0 + 4.0 * ROUNDOFF)
    low = np.where(known, exponent - wrong, -np.inf)
    high = np.where(straight, -np.inf, np.where(known, exponent + wrong, top))
    peak = -1.5 * mu2
    across = (value[:, :-1] >= peak) & (value[:, 1:] <= peak)
    most = np.where(across, top, np.maximum(high[:, :-1], high[:, 1:]))
    least = np.minimum(low[:, :-1], low[:, 1:])
    fixed, error = log_bend(steps, eps)
    error = error + made.bend_wrong
    three, loose = 3.0 * made.loss, 3.1 * made.off
    base = made.log_bend + fixed
    up = base - three[:, :-1] + most + error + loose[:, :-1] + 8.0 * ROUNDOFF * (np.abs(base) + np.abs(three[:, :-1]))
    down = base - three[:, 1:] + least - error - loose[:, 1:] - 8.0 * ROUNDOFF * (np.abs(base) + np.abs(three[:, 1:]))
    down, up = (np.exp(np.minimum(exponent, LARGEST_EXPONENT)) for exponent in (down, up))
    return down * (1.0 - 1e-12), up * (1.0 + 1e-12)


def bounds(steps: Steps, made: Cells, eps: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return lower and upper bounds of delta at eps (B,) >= 0; 0 and 1 where nothing is known."""
    eps = eps[:, None]
    sign = np.where(steps.removing, -1.0, 1.0)
    end = np.log1p(-steps.q)
    loss, off = np.concatenate([end, made.loss], axis=1), np.concatenate([-4.0 * ROUNDOFF * end, made.off], axis=1)
    at = eps + sign * loss
    off = off + 2.0 * ROUNDOFF * (np.abs(eps) + np.abs(loss))
    low, high = closed_form.profile_of_one_step(steps.second_sigma, steps.second_q, steps.removing, at, off)
    least, most = _bends(steps, made, eps)
    # `limit` is the second step's profile as the first output u tends to infinity.
    limit = np.where(steps.removing[:, 0], 1.0, 0.0)
    (lowest, low), (highest, high) = ((x[:, 0], x[:, 1:]) for x in (low, high))
    less, more = 1.0 - made.wrong, 1.0 + made.wrong
    chord = (made.first * low[:, :-1] + made.last * low[:, 1:]) * less - most
    flat = (made.first + made.last) * less * np.minimum(low[:, :-1], low[:, 1:])
    lower = np.sum(np.fmax(chord, flat), axis=1)
    chord = (made.first * high[:, :-1] + made.last * high[:, 1:]) * more
    upper = np.sum(np.maximum(chord - least, 0.0), axis=1)
    lower += made.below[:, 0] * np.minimum(lowest, low[:, 0]) + made.above[:, 0] * np.minimum(limit, low[:, -1])
    upper += made.below[:, 1] * np.maximum(highest, high[:, 0]) + made.above[:, 1] * np.maximum(limit, high[:, -1])
    rounding = ROUNDOFF * (made.nodes.shape[1] + 64.0)
    lower, upper = np.maximum(lower * (1.0 - rounding) - UNDERFLOW, 0.0), upper * (1.0 + rounding) + UNDERFLOW
    known = made.sound & (lower <= upper)
    return np.where(known, np.minimum(lower, 1.0), 0.0), np.where(known, np.minimum(upper, 1.0), 1.0)
