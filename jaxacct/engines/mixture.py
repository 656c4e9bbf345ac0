"""Brackets for compositions of Gaussian mixtures, one direction and one row (configuration) at a time.

A row for which the contour integral fails gets [-inf, inf]. The delta of a single step that draws one of several
mixtures (its branches) needs no contour. The loss of every branch is monotone in the output u. So a branch's
delta is P(H) - e^eps Q(H) for a half line H of outputs, whose endpoint solves loss = eps.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import scipy

from jaxacct.core.floats import FAILURES, ROUNDOFF, SMALLEST_POSITIVE
from jaxacct.engines import closed_form
from jaxacct.engines.contour import LEAST_DELTA, LOWEST_LOG_DELTA
from jaxacct.engines.protocol import Answer
from jaxacct.kernels.arrays import logsumexp
from jaxacct.kernels.contour import mixture as kernel
from jaxacct.kernels.contour.core import Nodes
from jaxacct.kernels.contour.mixture import BranchLaw, Part
from jaxacct.mechanisms import Composed, Mechanism, Repeated, batch_shape
from jaxacct.mechanisms.base import GaussianPart
from jaxacct.mechanisms.gaussian_mixtures import Branch, OfGaussianMixtures
from jaxacct.mechanisms.loss_components import exact_product

ROUNDING, ROUNDING_OF_SQUARES = 1e-12, 4e-15
"""A branch's delta is the difference of two terms. The relative error allowed for each term is ROUNDING, plus
ROUNDING_OF_SQUARES times the sum of |eps| and the squares in the term's exponents."""
LARGEST_EPSILON = 1e7
"""The search for one step's epsilon gives up beyond this eps. The upper bound is then inf."""
Row = list[tuple[float, list[Branch]]]
"""One configuration: for each part, how often the part is composed, and the mixtures (branches) of one step."""
Ends = tuple[float, float, float]
Known = dict[float, list[tuple[float, Nodes]]]
"""For each value of `LEFT_OUT`, pairs (eps, contour placed for this eps) of one row in one direction."""
UNKNOWN: Ends = (-np.inf, np.nan, np.inf)
LEFT_OUT = (1e-60, 1e-290)
"""Limits on the chance that any step draws a left-out rare component. The second is tried if the first changes delta
too much. In a search for epsilon both are multiplied by the given delta."""
PLACEMENTS = 4
"""Largest number of contours that are placed for one epsilon."""
NARROW = 1e-6
"""A bracket of at most this relative width is narrow enough: no other contour is placed."""
CONTOURS_READ, CONTOURS_KEPT, ROWS_KEPT = 3, 100, 8
"""CONTOURS_READ: how many kept contours are tried for an eps before a new contour is placed. CONTOURS_KEPT: how many
contours each list of `Known` keeps. ROWS_KEPT: for how many rows contours are kept."""
SHARE_LEFT_OUT = 1e-12
"""Largest relative change of delta that the left-out components may cause."""


def rows_of_branches(mechanism: Mechanism, relation: str) -> list[Row | None] | None:
    """Return a list of `Row`s, with None for rows beyond float64's range. If a step has no branches, return None."""
    shape = batch_shape(mechanism)
    size = int(np.prod(shape))
    rows: list[Row] = [[] for _ in range(size)]
    beyond = np.zeros(size, bool)
    plain: list[list[float]] = [[] for _ in range(size)]  # mu of each Gaussian without sampling
    for count, leaf in flat(mechanism.validated()):
        counts = np.broadcast_to(count, shape).reshape(-1)
        if isinstance(leaf, OfGaussianMixtures) and not leaf.ordinary():
            with np.errstate(over="ignore", invalid="ignore"):
                found = leaf.branches(relation)
            if found is None:
                return None
            own = batch_shape(leaf)
            places = np.broadcast_to(np.arange(len(found)).reshape(own), shape).reshape(-1)
            beyond |= ~np.array([all(map(_is_law, row)) for row in found], bool)[places]
            for row, place in enumerate(places.tolist()):
                shift = _only_shift(found[place])
                if shift is None:
                    rows[row].append((float(counts[row]), found[place]))
                else:
                    plain[row].append(float(np.sqrt(counts[row])) * shift)
            continue
        if relation == "replace_one":
            return None
        for part, times in leaf.expand(relation, "remove"):
            if not isinstance(part, GaussianPart):
                return None
            sigma, rate, number = (
                np.broadcast_to(np.asarray(x, np.float64), shape).reshape(-1)
                for x in (part.sigma, part.rate, exact_product(np.asarray(times), np.asarray(count)))
            )
            for row in range(size):
                if rate[row] == 1.0:
                    plain[row].append(float(np.sqrt(number[row]) / sigma[row]))
                elif rate[row] > 0.0:
                    weights = np.array([1.0 - rate[row], rate[row]])
                    branch = Branch(1.0, np.array([0.0, 1.0 / sigma[row]]), weights)
                    rows[row].append((float(number[row]), [branch]))
    for steps, each in zip(rows, plain, strict=True):
        if each:  # Gaussians without sampling are merged into one, so that their mu is rounded once
            steps.append((1.0, [Branch(1.0, np.array([math.hypot(*each)]), np.ones(1))]))
    moving = [[(n, branches) for n, branches in row if any(_moves(b) for b in branches)] for row in rows]
    return [None if lost else row for row, lost in zip(moving, beyond.tolist(), strict=True)]


@np.errstate(all="ignore")
def one_epsilon(row: Row, sign: float, delta: float, rtol: float = 1e-4) -> Ends:
    """Return (lower, estimate, upper) of epsilon at a delta > 0 in one direction; rtol is the wanted relative width."""
    if not row:
        return 0.0, 0.0, 0.0
    if (mu := _gaussian(row)) is not None:
        return _by_formula(closed_form.epsilon, mu, delta, 0.0)
    shift = SHARE_LEFT_OUT * delta
    low, high = delta - shift, delta + shift
    for left_out in LEFT_OUT:
        parts, lost = _parts(row, sign, left_out * delta)
        if _is_one_step(parts):
            ends = epsilon_of_step(parts[0], low, high)
        else:
            ends = _by_contour(parts, low, high, max(NARROW, 0.01 * rtol))
        if _negligible(lost, sign, ends[2], delta):
            low, mid, high = np.maximum(ends, 0.0).tolist()
            if not low <= high:
                low, mid, high = UNKNOWN
            top = _largest_loss(parts, sign)
            return min(low, top), min(mid, top), min(high, top)
    return UNKNOWN


@np.errstate(all="ignore")
def one_delta(row: Row, sign: float, epsilon: float, known: Known | None = None) -> Ends:
    """Return (lower, estimate, upper) of delta at epsilon >= 0, in one direction. New contours are added to `known`."""
    if not row:
        return 0.0, 0.0, 0.0
    if (mu := _gaussian(row)) is not None:
        return _by_formula(closed_form.delta, mu, epsilon)
    for left_out in LEFT_OUT:
        parts, lost = _parts(row, sign, left_out)
        if epsilon >= _largest_loss(parts, sign):
            return 0.0, 0.0, min(_moved(lost, sign, epsilon), 1.0)
        if _is_one_step(parts):
            ends = delta_of_step(parts[0], epsilon)
        else:
            ends = _delta_by_contour(parts, epsilon, [] if known is None else known.setdefault(left_out, []))
        more = _moved(lost, sign, epsilon)
        if more <= SHARE_LEFT_OUT * ends[0] or left_out == LEFT_OUT[-1]:
            low, mid, high = ends[0] - more - SMALLEST_POSITIVE, ends[1], ends[2] + more
            low, high = max(low * (1.0 - 1e-15), 0.0), min(high * (1.0 + 1e-15), 1.0)
            return (low, float(np.clip(mid, low, high)), high) if low <= high else UNKNOWN
    return UNKNOWN


def _by_contour(parts: list[Part], low: float, high: float, narrow: float) -> Ends:
    """Return the bracket of epsilon (the ends may be negative). Contours are placed until the bracket is narrow."""
    log_low, log_high = float(np.log(low)), float(np.log(high))
    best = UNKNOWN
    for attempt in range(PLACEMENTS):
        try:
            if attempt:
                start = max(best[1], 0.0)  # the first contour is badly placed where the tilted law has two modes
                nodes = kernel.nodes_for_epsilon(parts, start, log_low)
            else:
                nodes, start = kernel.nodes_for_delta(parts, log_low)
            found = kernel.epsilon_bracket(nodes, start, log_low, log_high)
        except FAILURES:
            break
        if not np.isfinite(found[2]):
            break
        ends = float(np.fmax(found[0], best[0])), min(found[2], best[2])
        if not ends[0] <= ends[1]:
            return UNKNOWN
        stalled = attempt and not ends[1] - ends[0] < 0.5 * (best[2] - best[0])
        best = ends[0], float(np.clip(found[1], *ends)), ends[1]
        if ends[1] - ends[0] <= narrow * abs(ends[1]) or ends[1] <= 0.0:
            return best
        if stalled:
            break
    if not (best[0] > 0.0 or best[2] <= 0.0):
        with contextlib.suppress(*FAILURES):  # if delta(0) is at most the given delta, epsilon is 0
            if kernel.delta_bracket(kernel.nodes_for_epsilon(parts, 0.0), 0.0)[2] <= log_low:
                return 0.0, 0.0, 0.0
    if not np.isfinite(best[2]):
        return _epsilon_by_chernoff(parts, log_low)
    return best


def contours_of(row: Row) -> dict[float, Known]:
    """Return the contours that earlier calls have placed for this row, by the sign of the direction."""
    numbers = [(n, b.share, b.doubt, b.shifts.tobytes(), b.weights.tobytes()) for n, some in row for b in some]
    return _contours_of((tuple(len(some) for _, some in row), *numbers))


@functools.lru_cache(maxsize=ROWS_KEPT)
def _contours_of(_row: tuple[Any, ...]) -> dict[float, Known]:
    return {}


def _delta_by_contour(parts: list[Part], epsilon: float, known: list[tuple[float, Nodes]]) -> Ends:
    """Return the bracket of delta. Contours in `known` near eps are tried first, then at most two new contours."""
    for _, nodes in sorted(known, key=lambda one: abs(one[0] - epsilon))[:CONTOURS_READ]:
        low, mid, high = kernel.delta_bracket(nodes, epsilon)
        if low <= mid <= high < np.inf and high - low <= NARROW:
            return _from_logs(low, mid, high)
    low, mid, high = UNKNOWN
    with contextlib.suppress(*FAILURES):
        for attempt in range(2):
            nodes = kernel.nodes_for_epsilon(parts, epsilon, None if attempt == 0 else min(mid, 0.0))
            known[:] = [(epsilon, nodes), *known[: CONTOURS_KEPT - 1]]
            found = kernel.delta_bracket(nodes, epsilon)
            low, high = float(np.fmax(low, found[0])), min(high, found[2])
            if not (low <= high and np.isfinite(found[1])):
                break
            mid = float(np.clip(found[1], low, high))
            if high - low <= NARROW:
                break
    if not (low <= high < np.inf and np.isfinite(mid)):
        return _delta_by_chernoff(parts, epsilon)
    return _from_logs(low, mid, high)


def _from_logs(low: float, mid: float, high: float) -> Ends:
    """Return a bracket of delta from one of log delta. Exponentials that may have lost digits are moved outward."""
    return float(np.exp(low)) if low > LOWEST_LOG_DELTA else 0.0, float(np.exp(mid)), max(math.exp(high), LEAST_DELTA)


def _delta_by_chernoff(parts: list[Part], epsilon: float) -> Ends:
    """Return [0, Chernoff's bound] as delta's bracket. The 0 does no harm if the other direction's delta is larger."""
    try:
        at, logs = kernel.chernoff(parts, kernel.saddle(parts, lambda eps, _: eps < epsilon)[0])
    except FAILURES:
        return UNKNOWN
    log_delta = np.min(logs - at * epsilon * (1.0 - 1e-12))
    return _from_logs(-np.inf, log_delta, log_delta) if np.isfinite(log_delta) else UNKNOWN


def _epsilon_by_chernoff(parts: list[Part], log_delta: float) -> Ends:
    try:
        at, logs = kernel.chernoff(parts, kernel.saddle(parts, lambda _, found: found > log_delta)[0])
    except FAILURES:
        return UNKNOWN
    found = float(np.min((logs - log_delta) / at))
    found += 1e-12 * abs(found)
    return (-np.inf, found, found) if np.isfinite(found) else UNKNOWN


def _largest_loss(parts: list[Part], sign: float) -> float:
    """Return an upper bound of the composed loss: inf for remove, and also for add if a branch has no shift 0."""
    if sign > 0 or any(law.shift[0] > 0.0 for part in parts for law in part.branches):
        return np.inf
    # the term with `LEFT_OUT` covers the weights of components that were left out
    each = (part.times * (2.0 * LEFT_OUT[0] - min(_log_rest(law) for law in part.branches)) for part in parts)
    return sum(each) * (1.0 + 1e-12)


def _negligible(lost: float, sign: float, epsilon: float, delta: float) -> bool:
    """Return whether leaving out components of probability `lost` changes delta by at most SHARE_LEFT_OUT delta."""
    if not np.isfinite(epsilon):
        return lost == 0.0 or sign > 0
    return _moved(lost, sign, max(epsilon, 0.0)) <= SHARE_LEFT_OUT * delta


def _moved(lost: float, sign: float, epsilon: float) -> float:
    """Bound how far left-out components of probability `lost` move delta: `lost` for remove, `lost` e^eps for add."""
    if sign > 0 or lost == 0.0:
        return lost
    return lost * float(np.exp(epsilon)) if epsilon < 700.0 else np.inf


def _is_law(branch: Branch) -> bool:
    """Return whether the branch's numbers are finite and not negative, and its weights add up to 1."""
    numbers = np.array([branch.share, branch.doubt, *branch.shifts, *branch.weights])
    return bool(np.all((numbers >= 0.0) & (numbers < np.inf)) and abs(np.sum(branch.weights) - 1.0) < 1e-6)


def _moves(branch: Branch) -> bool:
    return bool(np.any((branch.shifts > 0.0) & (branch.weights > 0.0)))


def _gaussian(row: Row) -> float | None:
    """Return the shift of the row if the row is one Gaussian without sampling, composed once. Otherwise return None."""
    return _only_shift(row[0][1]) if len(row) == 1 and row[0][0] == 1.0 else None


def _by_formula(formula: Callable[..., Answer], mu: float, *given: float) -> Ends:
    """Return a bracket for all Gaussians of shift mu (1 +- 16 ROUNDOFF). The answer grows with the shift."""
    near = mu * (1.0 + 16.0 * ROUNDOFF * np.array([-1.0, 0.0, 1.0]))
    found = formula(near, *(np.full(3, each) for each in given))
    return float(found.lower[0]), float(found.estimate[1]), float(found.upper[2])


def _only_shift(branches: list[Branch]) -> float | None:
    """Return the shift of a step that is a Gaussian without sampling; None for other steps."""
    kept = branches[0].shifts[branches[0].weights > 0.0]
    known = len(branches) == 1 and branches[0].share == 1.0 and kept.size == 1
    return float(kept[0]) if known else None


def _is_one_step(parts: list[Part]) -> bool:
    return len(parts) == 1 and parts[0].times == 1.0


def _parts(row: Row, sign: float, left_out: float) -> tuple[list[Part], float]:
    """Return the row as `Part`s without rare components, and the chance that any step draws a left-out component."""
    steps = sum(count for count, _ in row)
    parts, lost = [], 0.0
    for count, branches in row:
        laws, shares = [], []
        doubt = max(branch.doubt for branch in branches)
        for branch in branches:
            law, chance = _law(branch, sign, left_out / steps)
            laws.append(law)
            shares.append(branch.share)
            lost += count * chance * branch.share
        parts.append(Part(count, tuple(shares), doubt, tuple(laws)))
    return parts, lost


def _law(branch: Branch, sign: float, left_out: float) -> tuple[BranchLaw, float]:
    kept = branch.weights > 0.0
    shift, weight = branch.shifts[kept], branch.weights[kept]
    rare = np.argsort(weight)
    chance = np.cumsum(weight[rare])
    gone = rare[chance <= left_out]
    lost = float(chance[gone.size - 1]) if gone.size else 0.0
    mask = np.ones(weight.size, bool)
    mask[gone] = False
    shift, weight = shift[mask], weight[mask]
    # Equal shifts are merged, since `_largest_loss` needs the whole weight of the shift 0 (if there is one).
    each = np.unique(shift)
    joint = np.array([math.fsum(weight[shift == one]) for one in each])
    underflow = 0.0 if branch.weights.size <= 2 else 1e-300
    return BranchLaw(each, joint, sign), lost * 1.01 + underflow


def delta_of_step(step: Part, epsilon: float) -> Ends:
    """Return (lower, estimate, upper) of delta of one step at eps >= 0."""
    value = error = 0.0
    for share, law in zip(step.shares, step.branches, strict=True):
        one, wrong = _branch(law, epsilon)
        value += share * one
        error += share * (wrong + step.doubt * one)
    error += 1e-15 * value
    return max(value - error, 0.0), value, min(value + error, 1.0)


def epsilon_of_step(step: Part, low_delta: float, high_delta: float) -> Ends:
    """Return (lower, estimate, upper) of one step's eps >= 0. The bounds hold for low_delta <= delta <= high_delta."""
    at = functools.partial(delta_of_step, step)
    if at(0.0)[2] <= low_delta:
        return 0.0, 0.0, 0.0
    low, high = 0.0, 1.0
    while at(high)[1] > low_delta:
        low, high = high, 2.0 * high
        if high > LARGEST_EPSILON:
            return (low if at(low)[0] >= high_delta else 0.0), low, np.inf
    # bisect until the interval's ends are neighbouring float64 numbers, but at most 60 times
    for _ in range(60):
        middle = 0.5 * (low + high)
        if not low < middle < high:
            break
        low, high = (middle, high) if at(middle)[1] > low_delta else (low, middle)
    upper, lower = np.inf, 0.0
    # move `high` up and `low` down until they are proved bounds
    for move in (1e-15, 1e-12, 1e-10, 1e-8, 1e-6, 1e-4, 1e-2, 0.1):
        if upper == np.inf and at(high * (1.0 + move))[2] <= low_delta:
            upper = high * (1.0 + move)
        if lower == 0.0 and at(low * (1.0 - move))[0] >= high_delta:
            lower = low * (1.0 - move)
    return lower, float(np.clip(0.5 * (low + high), lower, upper)), upper


def _branch(law: BranchLaw, epsilon: float) -> tuple[float, float]:
    """Return (delta, its error) of a branch: P(S) - e^eps Q(S), S = {output > u} for remove, {output < u} for add.

    u is chosen so that S surely contains every output with a loss above eps, however log mix is rounded. The losses of
    all other outputs in S are at least eps - `gap`, so they lower the value by at most `gap` times a mass of S.
    """
    shift, goal = law.shift, law.sign * epsilon
    lowest = _log_rest(law) if shift[0] == 0.0 else -np.inf  # log mix where u is far below 0
    if law.sign < 0.0 and goal <= lowest - 32.0 * ROUNDOFF * abs(lowest) - 2.0 * LEFT_OUT[0]:
        return 0.0, 0.0  # the loss never exceeds eps, so delta is 0
    margin = 64.0 * ROUNDOFF * (1.0 + abs(goal))
    for _ in range(8):
        target = goal - 2.0 * law.sign * margin
        if law.sign > 0.0 and target <= lowest + 2.0 * margin:
            u, found, needed = -np.inf, min(lowest, goal), 0.0  # S holds every output
        else:
            u, found, needed = _solved(law, max(target, lowest + 2.0 * margin))
        gap = abs(found - goal) + margin
        if needed <= margin and law.sign * (goal - found) >= min(margin, needed):
            break
        margin = 2.0 * max(needed, margin)
    else:
        return 1.0, 1.0  # no u is known to be good: delta is only known to be in [0, 1]
    of_q = float(scipy.special.log_ndtr(-law.sign * u))
    of_p = float(logsumexp(np.log(law.weight) + scipy.special.log_ndtr(law.sign * (shift - u))))
    first, second = (of_p, of_q + epsilon) if law.sign > 0 else (of_q, of_p + epsilon)
    gain, cost = float(np.exp(first)), float(np.exp(min(second, 700.0)))
    squares = (u * u if np.isfinite(u) else 0.0) + float(np.square(shift[-1])) + abs(epsilon)
    doubt = ROUNDING + ROUNDING_OF_SQUARES * squares + np.expm1(gap)
    return max(gain - cost, 0.0), doubt * (gain + cost) + LEAST_DELTA


def _log_rest(law: BranchLaw) -> float:
    """Return the log of the first weight. Its relative error is small even if the weight is near 1."""
    others = math.fsum(law.weight[1:])
    return math.log1p(-others) if others < 0.5 else math.log(law.weight[0])


def _solved(law: BranchLaw, target: float) -> tuple[float, float, float]:
    """Return u with log mix(u) about `target`, the computed log mix(u), and a bound of its rounding error."""
    # mix is the mixture's density divided by that of N(0, 1). log mix is convex and increasing, so Newton's method
    # descends from a u where log mix is at least the target.
    shift, log_weight = law.shift, np.log(law.weight)
    u = float((target + 0.5 * shift[-1] ** 2 - log_weight[-1]) / shift[-1])
    # log mix is nearly piecewise linear, so Newton's method needs only few of the 200 steps
    for _ in range(200):
        terms = log_weight + shift * u - 0.5 * shift**2
        top = float(np.max(terms))
        each = np.exp(terms - top)
        total = float(each.sum())
        found = top + float(np.log(total))
        size = float(each @ (np.abs(log_weight) + np.abs(shift * u) + shift**2)) / total
        rounding = ROUNDOFF * (64.0 + 8.0 * size + 8.0 * abs(found))
        if not found - target > 0.25 * rounding:
            return u, found, rounding
        u -= (found - target) * total / float(each @ shift)
    return u, np.nan, np.inf


def flat(mechanism: Any, count: np.ndarray | float = 1.0) -> list[tuple[np.ndarray, Any]]:
    """Return (count, step) for each single step of a composition. The count says how often the step is composed."""
    if isinstance(mechanism, Repeated):
        return flat(mechanism.mechanism, exact_product(np.asarray(mechanism.steps), np.asarray(count)))
    if isinstance(mechanism, Composed):
        return [item for inner in mechanism.mechanisms for item in flat(inner, count)]
    return [(np.asarray(count, np.float64), mechanism)]
