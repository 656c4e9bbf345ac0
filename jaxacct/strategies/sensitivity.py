"""Bound the sensitivity of C X from the entries of C^T C (proof: README.md, "Sensitivity")."""

from __future__ import annotations

import heapq
import math
from typing import NamedTuple

import numpy as np

from jaxacct.core.floats import ROUNDOFF

TIGHT = 1e-13
"""Relative difference below which the pattern found is taken for the worst one."""
MOST_WORK = 200_000
"""Steps that the search for the worst pattern looks at: all patterns of some dozen steps, a second for many."""


class Lags(NamedTuple):
    """Bounds of the entries of C^T C by lag: ``lower[d, i] <= (C^T C)[i, i + d] <= upper[d, i]``, each (D, n).

    Entries of a lag of D or more are 0, and so are those with i + d >= n.
    """

    lower: np.ndarray
    upper: np.ndarray


class Square(NamedTuple):
    """Bounds of the squared sensitivity."""

    lower: float
    upper: float


def of_patterns(lags: Lags, separation: int, most: int) -> Square:
    """Bound the largest squared sensitivity over patterns of at most `most` steps, each `separation` apart."""
    weights = _weights(lags, separation, most)
    upper, pattern = _heaviest(weights, separation, most)
    lower = max(_attained(lags, pattern), _attained(lags, [int(np.argmax(lags.lower[0]))]))
    if lower < upper * (1.0 - TIGHT):
        upper, pattern = _search(lags, weights, separation, most)
        lower = max(lower, _attained(lags, pattern))
    rounding = 8.0 * (weights.size + 1) * ROUNDOFF
    return Square(min(lower * (1.0 - rounding), upper), upper * (1.0 + rounding))


def of_epochs(lags: Lags, period: int) -> Square:
    """Bound the largest squared sensitivity over the patterns j, j + period, j + 2 period, ..., for j < period."""
    steps = lags.lower.shape[1]
    patterns = [range(first, steps, period) for first in range(min(period, steps))]
    magnitude = np.maximum(lags.upper, -lags.lower)
    upper = max(_total(magnitude, pattern) for pattern in patterns)
    lower = max(_attained(lags, pattern) for pattern in patterns)
    rounding = 8.0 * (steps + 1) * ROUNDOFF
    return Square(min(lower * (1.0 - rounding), upper), upper * (1.0 + rounding))


def _weights(lags: Lags, separation: int, most: int) -> np.ndarray:
    """Return, for each step i, a bound of |G_ii| + 2 sum_j |G_ij| over the later steps j of any pattern, (n,)."""
    magnitude = np.maximum(lags.upper, -lags.lower)
    count, steps = magnitude.shape
    possible = (count - 1) // separation  # later steps within the lags
    later = min(most - 1, possible)
    if later <= 0:
        return magnitude[0]
    free = later == possible  # the gaps alone limit the number of later steps
    layers = 1 if free else later  # layer m: at most m later steps
    best = np.zeros((separation, layers + 1, steps))  # a ring over lags
    nearest = np.zeros((layers + 1, steps))
    for lag in range(count - 1, separation - 1, -1):
        after = best[lag % separation]  # of lag + separation
        nearest = nearest.copy()
        nearest[1:] = np.maximum(nearest[1:], magnitude[lag] + (after[1:] if free else after[:-1]))
        best[lag % separation] = nearest
    return magnitude[0] + 2.0 * nearest[layers]


def _search(lags: Lags, weights: np.ndarray, separation: int, most: int) -> tuple[float, list[int]]:
    """Return the largest sum of |G_ij| over a pattern, or a bound of it, and the best pattern (branch and bound)."""
    magnitude = np.maximum(lags.upper, -lags.lower)
    steps = weights.size
    bound, _ = _heaviest(weights, separation, most)
    best, best_pattern = 0.0, [0]
    open_nodes: list[tuple[float, float, tuple[int, ...]]] = [(-bound, 0.0, ())]
    work = 0
    while open_nodes and -open_nodes[0][0] > best * (1.0 + TIGHT):
        if work > MOST_WORK:
            return -open_nodes[0][0], best_pattern
        _, value, pattern = heapq.heappop(open_nodes)
        for step in range(pattern[-1] + separation if pattern else 0, steps):
            longer = (*pattern, step)
            beside = np.zeros(steps)  # |G_ij| of a later step j, summed over the pattern
            for earlier in longer:
                count = min(magnitude.shape[0], steps - earlier)
                beside[earlier : earlier + count] += magnitude[:count, earlier]
            total = value + magnitude[0, step] + 2.0 * (beside[step] - magnitude[0, step])
            if total > best:
                best, best_pattern = total, list(longer)
            after = np.where(np.arange(steps) >= step + separation, weights + 2.0 * beside, 0.0)
            bound = total + (_heaviest(after, separation, most - len(longer))[0] if len(longer) < most else 0.0)
            heapq.heappush(open_nodes, (-bound, total, longer))
            work += steps
    return best * (1.0 + TIGHT), best_pattern


def _heaviest(weights: np.ndarray, separation: int, most: int) -> tuple[float, list[int]]:
    """Return the largest sum of weights over at most `most` steps, each `separation` apart, and these steps."""
    steps = weights.size
    most = min(most, -(-steps // separation))
    free = most * separation >= steps  # no pattern has more steps than `most`
    layers = 1 if free else most
    best = np.zeros((layers + 1, steps + separation))
    for step in range(steps - 1, -1, -1):
        after = best[1:, step + separation] if free else best[:-1, step + separation]
        best[1:, step] = np.maximum(best[1:, step + 1], weights[step] + after)
    pattern, layer, step = [], layers, 0
    while step < steps and layer > 0:
        if best[layer, step] > best[layer, step + 1]:
            pattern.append(step)
            layer -= 0 if free else 1
            step += separation
        else:
            step += 1
    return float(best[layers, 0]), pattern


def _total(entries: np.ndarray, pattern: range | list[int]) -> float:
    """Sum the entries G_ij over all i, j of a pattern."""
    steps = np.asarray(pattern)
    first, second = np.triu_indices(steps.size)
    lag = steps[second] - steps[first]
    kept = lag < entries.shape[0]
    values = entries[lag[kept], steps[first][kept]]
    return math.fsum(np.where(lag[kept] > 0, 2.0, 1.0) * values)


def _attained(lags: Lags, pattern: range | list[int]) -> float:
    """Return a squared norm that gradients e_1 s_i on the pattern reach, signs s_i chosen one after the other."""
    steps = np.asarray(pattern)
    signs = np.ones(steps.size)
    total = 0.0
    for place, step in enumerate(steps):
        lag = step - steps[:place]
        kept = lag < lags.lower.shape[0]
        earlier, sign = (lag[kept], steps[:place][kept]), signs[:place][kept]
        lower, upper = lags.lower[earlier], lags.upper[earlier]
        same = math.fsum(np.where(sign > 0, lower, -upper))
        opposite = math.fsum(np.where(sign > 0, -upper, lower))
        signs[place] = 1.0 if same >= opposite else -1.0
        total += float(lags.lower[0, step]) + 2.0 * max(same, opposite)
    return max(total, 0.0)
