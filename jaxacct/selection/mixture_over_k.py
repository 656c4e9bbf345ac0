"""`sum_k Pr[K=k] delta_k(eps)`, delta_k that of a base composed k times, as a certified bracket; and its epsilon."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from jaxacct.accounting import account
from jaxacct.core.floats import ROUNDOFF
from jaxacct.engines import backend, contour
from jaxacct.mechanisms import Mechanism, components, repeat
from jaxacct.selection.base_profile import infinite_mass
from jaxacct.selection.probabilities_of_k import Weights

__all__ = ["Mixture"]

FIRST_NODES_BEYOND = (0.9, 0.5, 0.1, 1e-2, 1e-3, 1e-5, 1e-8)
"""delta_k is computed first at those k beyond which K lies with these probabilities, from the bulk into the tail."""
MOST_NODES = 3000
"""Numbers k at which delta_k is computed, at most."""
MOST_NODES_ON_LATTICE = 96
"""The same where the lattice engine answers, on which each takes some 20 ms."""
NODES_BY_LATTICE = 8
"""At so many numbers k, at most, the lattice engine takes the place of a contour engine that leaves the sum wide."""
OPEN_SHARE = 0.02
"""It does so where the contour brackets leave more than this share of the sum open, or more than is asked for."""
MOST_PIECES = 9
"""The numbers between two nodes are cut into at most so many pieces at a time, where much is open."""
MOST_ROUNDS = 12
"""Rounds of new nodes for one eps, and of searches for one delta, at most; each adds nodes where most is open."""
CHORD_STEPS = np.array([-0.2, -0.04, -5e-3, -3e-4, 0.0, 3e-4, 5e-3, 0.04, 0.2])
"""Where a search looks about the root of a chord, in shares of the interval; of one k they share a composition."""
LAST_EPS = 1e300
"""Largest eps that is looked at, short of overflow."""
DELTA_RTOL = 1e-4
"""rtol with which delta_k is asked for: the default of `ja.delta`."""


class Sum(NamedTuple):
    """A bracket of the sum, and a value within it."""

    low: float
    middle: float
    high: float


class Mixture:
    """The sum for one base, one list of weights and one direction.

    delta_k does not decrease in k, since fewer releases are a function of more.  It is computed at some numbers k, the
    nodes. Between two nodes it lies between their values, and before the first node between 0 and the first value.
    Nodes are added where that leaves most open.
    """

    def __init__(self, run: Mechanism, weights: Weights, relation: str, rtol: float) -> None:
        self.run, self.weights, self.relation, self.rtol = run, weights, relation, rtol
        parts = components(run, "add_or_remove_one", "add" if relation == "add_one" else "remove")
        sampled = bool(np.any(parts.gauss_n > 0.0)) and bool(contour.reach(parts).answers.all())
        self.engine = "contour" if sampled else "auto"
        self.most, self.hard = MOST_NODES, np.zeros(0, np.intp)
        size = weights.k.size
        beyond = np.cumsum(weights.high[::-1])[::-1]
        spread = np.searchsorted(-beyond, -beyond[0] * np.array(FIRST_NODES_BEYOND)) if size else []
        self.nodes = np.unique(np.clip([*spread, size - 1], 0, size - 1)).astype(np.intp) if size else np.zeros(0, int)

    def deltas(self, nodes: np.ndarray, eps: np.ndarray) -> np.ndarray:
        """(2, eps, nodes): lower and upper ends of delta_k(eps); an end that is NaN is replaced by 0 or 1."""
        ends = np.zeros((2, eps.size, nodes.size))
        hard = np.isin(nodes, self.hard)
        for engine, some in ((self.engine, ~hard), ("auto", hard)):
            if not some.any():
                continue
            runs = repeat(self.run, self.weights.k[nodes[some]])
            with backend.job(nodes.size, apart=True):  # of one selection
                found = account.delta(runs, eps[:, None], relation=self.relation, engine=engine, rtol=DELTA_RTOL)
            if self.engine == "auto" and np.any(np.asarray(found.engine) == "lattice"):
                self.most = MOST_NODES_ON_LATTICE
            ends[:, :, some] = found.lower, found.upper
        low, high = ends
        return np.stack([np.where(low >= 0.0, np.minimum(low, 1.0), 0.0), np.where(high <= 1.0, high, 1.0)])

    def sums(self, eps: np.ndarray) -> list[Sum]:
        """The sum at several eps >= 0, by the present nodes."""
        ends = self.deltas(self.nodes, eps)
        return [self._summed(*_monotone(*ends[:, place])) for place in range(eps.size)]

    def at(self, eps: float, width: float) -> Sum:
        """The sum at one eps, with enough new nodes to make it relatively as narrow as `width`."""
        known: dict[int, np.ndarray] = {}
        for _ in range(MOST_ROUNDS):
            low, high = self._known(known, eps)
            found = self._summed(low, high)
            if not self._refined(low, high, width * found.high):
                break
        own = self.weights.high[self.nodes] * (high - low)
        if self.engine == "contour" and np.sum(own) > max(width, OPEN_SHARE) * found.high:
            hard = self.nodes[np.argsort(-own, kind="stable")[:NODES_BY_LATTICE]]
            self.hard = np.union1d(self.hard, hard[: max(NODES_BY_LATTICE - self.hard.size, 0)])
            for node in self.hard.tolist():
                known.pop(node, None)
            found = self._summed(*self._known(known, eps))
        return found

    def _known(self, known: dict[int, np.ndarray], eps: float) -> tuple[np.ndarray, np.ndarray]:
        """Ends at the nodes, each narrowed by those of the other nodes; computed where they are not yet known."""
        fresh = np.array([node for node in self.nodes.tolist() if node not in known], np.intp)
        if fresh.size:
            known.update(zip(fresh.tolist(), self.deltas(fresh, np.array([eps]))[:, 0].T, strict=True))
        each = np.array([known[node] for node in self.nodes.tolist()]).reshape(-1, 2)
        return _monotone(each[:, 0], each[:, 1])

    def epsilon(self, target: float) -> tuple[float, float]:
        """(low, high) ends of the least eps >= 0 at which the sum is at most `target` > 0."""
        least, _ = self.at_infinity()
        if least > target:
            return math.inf, math.inf
        search = _Search(self, target)
        if search.fan(np.zeros(1))[0].high <= target:
            return 0.0, 0.0
        if not search.bracketed(self._guess(target)):
            return search.low, search.high
        for width in (max(self.rtol, 0.01), *[self.rtol] * MOST_ROUNDS):
            search.narrow(0.1)
            before = self.nodes.size
            # places nodes, also where the sum may fall in a step, so that what was seen of the middle may have moved
            self.at(search.left[0], width)
            self.at(search.root()[0], width)
            search.around()
            if self.nodes.size <= 1.1 * before and width == self.rtol:
                break
        search.narrow(0.1 * self.rtol)
        search.tighten()
        return search.low, search.high

    def _guess(self, target: float) -> float:
        """Where the search begins: the epsilon of the mean of the listed numbers."""
        k, mass = self.weights.k, self.weights.high
        mean = max(round(float(np.sum(k * mass) / np.sum(mass))), 1) if k.size else 1
        level = min(target, 1.0 - ROUNDOFF)
        found = float(account.epsilon(repeat(self.run, mean), level, relation=self.relation, rtol=1e-2).upper)
        return found if 1e-12 < found < LAST_EPS else 1.0

    def at_infinity(self) -> tuple[float, float]:
        """Ends of `sum_k p_k (1 - (1 - q)^k)`, q the mass at infinity of one run."""
        mass = float(infinite_mass(self.run, self.relation))
        k, low, high, below, above_low, above = self.weights
        with np.errstate(divide="ignore", invalid="ignore"):
            lost = -np.expm1(k * np.log1p(-min(mass, 1.0))) if mass > 0.0 else np.zeros(k.size)
        last = float(lost[-1]) if k.size else 0.0
        first = float(lost[0]) if k.size else 1.0
        least = float(np.sum(low * lost)) + above_low * last
        most = float(np.sum(high * lost)) + below * first + (above if mass > 0.0 else 0.0)
        return least * (1.0 - 1e-9), most * (1.0 + 1e-9)

    def _summed(self, low: np.ndarray, high: np.ndarray) -> Sum:
        """The sum from the ends at the nodes."""
        weights, nodes = self.weights, self.nodes
        before = np.concatenate([[0.0], low])
        slack = 4.0 * ROUNDOFF * (weights.k.size + 64.0)
        least = weights.low[nodes] @ low + self._between(weights.low) @ before[:-1] + weights.above_low * before[-1]
        most = weights.high[nodes] @ high + self._between(weights.high) @ high
        beyond = weights.above + weights.below * (high[0] if high.size else 1.0)
        middle = 0.5 * (weights.high[nodes] @ (low + high) + self._between(weights.high) @ (before[:-1] + high))
        bottom, top = max(float(least) * (1.0 - slack), 0.0), min(float(most + beyond) * (1.0 + slack), 1.0)
        return Sum(bottom, min(max(float(middle), bottom), top), top)

    def _between(self, mass: np.ndarray) -> np.ndarray:
        """The sums of the weights strictly between neighbouring nodes, and before the first."""
        if not self.nodes.size:
            return np.zeros(0)
        before = np.concatenate([[-1], self.nodes[:-1]])
        ends = np.stack([before + 1, self.nodes], axis=1).reshape(-1)
        return np.where(self.nodes - before > 1, np.add.reduceat(mass, ends)[::2], 0.0)

    def _refined(self, low: np.ndarray, high: np.ndarray, allowed: float) -> bool:
        """Add nodes between those that leave most open; False where no more is open than is allowed."""
        before = np.concatenate([[-1], self.nodes[:-1]])
        gaps = self.nodes - before
        between = self._between(self.weights.high) * (high - np.concatenate([[0.0], low[:-1]]))
        room = self.most - self.nodes.size
        if not np.sum(between) > allowed or room <= 0:
            return False
        share = max(allowed / np.count_nonzero(gaps > 1), 1e-320)
        rows = np.flatnonzero(between > 0.5 * share)
        rows = rows[np.argsort(-between[rows], kind="stable")][:room]
        pieces = np.clip(np.ceil(np.sqrt(between[rows] / share)), 2, max(room // rows.size + 1, 2))
        pieces = np.minimum(pieces, MOST_PIECES)
        fresh = [before[row] + np.arange(1, int(n)) * gaps[row] // int(n) for row, n in zip(rows, pieces, strict=True)]
        nodes = np.unique(np.concatenate([self.nodes, *fresh]))
        nodes = nodes[nodes >= 0]
        grown = nodes.size > self.nodes.size
        self.nodes = nodes
        return grown


def _monotone(low: np.ndarray, high: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Ends of brackets of a sequence that does not decrease, each narrowed by the other brackets."""
    return np.maximum.accumulate(low), np.minimum.accumulate(high[::-1])[::-1]


class _Search:
    """The least eps at which a non-increasing sum is at most a target: where it is, and what is certified of it.

    `low` is an eps at which the lower end of the sum is above the target, and `high` one at which the upper end is not.
    Both were compared at that very eps, whatever led there.  The search itself follows the middle of the sum.
    """

    def __init__(self, mixture: Mixture, target: float) -> None:
        self.mixture, self.target, self.low, self.high = mixture, target, 0.0, math.inf
        self.left, self.right = (0.0, 1.0), (math.inf, 0.0)  # (eps, middle) before and beyond the root

    def fan(self, eps: np.ndarray) -> list[Sum]:
        """The sum at several eps; moves the ends of the search accordingly."""
        found = self.mixture.sums(eps)
        for x, one in zip(eps.tolist(), found, strict=True):
            if one.low > self.target:
                self.low = max(self.low, x)
            if one.high <= self.target:
                self.high = min(self.high, x)
            if one.middle > self.target and x >= self.left[0]:
                self.left = x, one.middle
            elif not one.middle > self.target and x < self.right[0]:
                self.right = x, one.middle
        return found

    def bracketed(self, guess: float) -> bool:
        """Whether values on both sides of the target were found."""
        while math.isinf(self.right[0]) and guess <= LAST_EPS:
            self.fan(np.minimum(guess * np.array([0.06, 0.25, 0.5, 0.9, 1.2, 2.0, 4.0, 16.0, 256.0]), LAST_EPS))
            guess *= 4096.0
        return math.isfinite(self.right[0])

    def root(self) -> tuple[float, float]:
        """(where the chord of the logarithm meets the target, minus its slope)."""
        (below, more), (above, less) = self.left, self.right
        rise, fall = math.log(more / self.target), math.log(self.target / max(less, 1e-320))
        share = rise / (rise + fall) if rise + fall > 0.0 else 0.5
        return below + share * (above - below), max((rise + fall) / max(above - below, 1e-300), 1e-300)

    def narrow(self, error: float) -> None:
        """Search until the two sides are that close to each other, relatively in eps or in the sum."""
        for _ in range(8):
            below, above = self.left[0], self.right[0]
            close = above - below <= error * above or self.left[1] <= self.right[1] * (1.0 + error)
            if close or not below < above:
                return
            x, _ = self.root()
            fan = np.concatenate([x + (above - below) * CHORD_STEPS, [0.5 * (below + above)]])
            self.fan(np.unique(np.clip(fan, below, above)))

    def around(self) -> None:
        """Find both sides once more, with the nodes that were added since."""
        x, slope = self.root()
        self.left, self.right = (0.0, 1.0), (math.inf, 0.0)
        reach = max(0.01 * x, 0.1 / max(slope, 1e-2), 1e-12)
        for grown in (1.0, 30.0, 1e3, 1e6, 1e300):
            self.fan(np.clip(x + min(grown * reach, LAST_EPS) * np.array([-1.0, -0.1, 0.0, 0.1, 1.0]), 0.0, LAST_EPS))
            if self.left[1] < 1.0 and math.isfinite(self.right[0]):
                return

    def tighten(self) -> None:
        """Look just beyond the root for places at which the ends of the sum are on their side of the target."""
        if not (self.left[0] < self.right[0] < math.inf):
            return
        x, slope = self.root()
        (found,) = self.fan(np.array([x]))
        places = []
        for sign, end in ((1.0, found.high), (-1.0, found.low)):
            distance = abs(math.log(max(end, 1e-320) / self.target)) / slope + 2.0**-46 * x
            places.append(x + sign * distance * np.array([1.01, 1.1, 1.5, 3.0, 10.0]))
        self.fan(np.clip(np.unique(np.concatenate(places)), 0.0, LAST_EPS))
