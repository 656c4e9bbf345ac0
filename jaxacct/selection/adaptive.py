"""Selection among K candidates that may depend on each other."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import numpy as np

from jaxacct.accounting import account
from jaxacct.core.bounds import Bounds
from jaxacct.core.floats import ROUNDOFF
from jaxacct.core.validation import InputError
from jaxacct.engines import backend, contour
from jaxacct.mechanisms import Mechanism, batch_shape, components, repeat
from jaxacct.mechanisms.base import FinitePair, register
from jaxacct.mechanisms.profile import pair_of_profile, stacked
from jaxacct.selection.any_selection import COMPOSED_POINTS, LAST_DELTA, AnySelection, as_bounds
from jaxacct.selection.base_profile import bounded_loss, each_pair, infinite_mass, sides
from jaxacct.selection.law_of_k import (
    Binomial,
    Categorical,
    Law,
    PointMass,
    Poisson,
    TruncatedNegativeBinomial,
    largest_k,
)

TAIL_SHARE = 1e-7
"""The sum over K leaves out small and large K. The probability left out on each side is at most this share of delta."""
LEAST_DELTA = 1e-290
"""Smallest delta for which epsilon is searched. For a smaller delta the upper bound of epsilon is the largest loss."""
ROUNDINGS_PER_TERM = 8.0
"""Largest relative error of one factor of a product, and of one term of a sum, in units of ROUNDOFF."""
NODES_BY_LATTICE = 8
"""If the contour engine's bracket is wide, the lattice engine computes delta_k again for at most this many k."""
MOST_ROUNDS = 12
"""At one eps, at most this many rounds add values of k. A search for epsilon has at most MOST_ROUNDS + 1 passes."""
LAST_EPS = 1e300
"""Largest eps that the search tries. It is below the overflow of float64."""


@register
class AdaptiveSelection(AnySelection):
    """Selection whose candidates may depend on all earlier outputs, made by `select(..., candidates="adaptive")`.

    In each direction of the neighbouring relation the profile is

        delta(eps) = sum_k Pr[K = k] delta_k(eps)

    where delta_k is the profile of ``mechanism`` composed k times.  Candidate k may be chosen after seeing all earlier
    outputs, K and public randomness, as long as ``mechanism`` dominates it.  All outputs may be released; if K is 0,
    none is.  K must depend neither on the data nor on the outputs, but need not be secret.  The sum is the supremum
    over such candidates, so `ja.epsilon` and `ja.delta` return brackets of kind "certified", unless ``mechanism`` has
    kind "bound" or, under ``replace_one``, is not symmetric.  If K is constant, the selection is the K-fold composition
    of ``mechanism``.  Otherwise a composition of the selection with other mechanisms uses only upper bounds of its
    profile, and has kind "bound".

    Parameters
    ----------
    mechanism : Mechanism
        One candidate.
    law : Law
        The law of K.  It broadcasts with the mechanism.

    References
    ----------
    README.md of this folder, "Candidates that depend on each other", has the theorem and the proof.

    >>> import jaxacct as ja
    >>> from jaxacct import selection
    >>> m = selection.select(ja.Gaussian(3.73), selection.Poisson(10.0), candidates="adaptive")
    >>> b = ja.epsilon(m, 1e-5)
    >>> round(float(b.upper), 2), b.kind
    (4.27, 'certified')
    """

    candidates: ClassVar[str] = "adaptive"

    def kind_under(self, relation: str, composed: bool = False) -> str:
        runs = self._as_composition()
        return "bound" if runs is None else runs.kind_under(relation, composed)

    def _options(self) -> str:
        return ', candidates="adaptive"'

    def _as_composition(self) -> Mechanism | None:
        return repeat(self.mechanism, self.law.repetitions) if isinstance(self.law, PointMass) else None

    def _pair(self) -> FinitePair:
        shape = np.broadcast_shapes(batch_shape(self.mechanism), self.law.shape)
        rows = [_points(base, law) for _, base, law in each_pair(self.mechanism, self.law, shape)]
        return stacked([pair_of_profile(*row) for row in rows], shape)

    def _answer(self, quantity: str, run: Mechanism, values: np.ndarray, relation: str, rtol: float) -> Bounds:
        solve = _epsilon if quantity == "epsilon" else _delta
        ends, flat = np.zeros((2, values.size)), values.reshape(-1)
        for places, base, law in each_pair(run, self.law, values.shape):
            for place in places:
                ends[:, place] = solve(base, law, float(flat[place]), relation, rtol)
        low, high = ends.reshape(2, *values.shape)
        return as_bounds(low, high, run.kind_under(relation, composed=True), rtol, "adaptive_mixture")


def _epsilon(run: Mechanism, law: Law, delta: float, relation: str, rtol: float) -> tuple[float, float]:
    """Return lower and upper bounds of one selection's epsilon, the largest epsilon over the directions."""
    if delta < LEAST_DELTA:
        bounded = bool(bounded_loss(components(run, "add_or_remove_one", "remove")).all())
        low, high = _without_delta(run, law, relation) if bounded else (0.0, np.inf)
        return (low, high) if delta == 0.0 else (_epsilon(run, law, LEAST_DELTA, relation, rtol)[0], high)
    listed = weights(law, TAIL_SHARE * delta)
    each = [Mixture(run, listed, side.forward, rtol).epsilon(delta) for side in sides(run, relation)]
    return max(low for low, _ in each), max(high for _, high in each)


def _delta(run: Mechanism, law: Law, eps: float, relation: str, rtol: float) -> tuple[float, float]:
    """Return lower and upper bounds of one selection's delta."""
    ends = (0.0, 1.0)
    for tail in (1e-12, 1e-40, 1e-150, LEAST_DELTA):
        listed = weights(law, tail)
        each = [Mixture(run, listed, side.forward, rtol).at(eps, 0.5 * rtol) for side in sides(run, relation)]
        ends = max(found.low for found in each), max(found.high for found in each)
        if listed.above + listed.below <= 0.1 * rtol * ends[1]:
            break
    return ends


def upper_ends(quantity: str, run: Mechanism, law: Law, values: np.ndarray, relation: str, rtol: float) -> np.ndarray:
    """Return upper bounds of one selection's "epsilon" or "delta" at every element of `values`."""
    if quantity == "epsilon":
        return np.array([_epsilon(run, law, float(x), relation, rtol)[1] for x in values])
    if values.size < 3:  # three or more values share a mixture per direction, and get looser bounds
        return np.array([_delta(run, law, float(x), relation, rtol)[1] for x in values])
    most = np.zeros(values.shape)
    listed = weights(law, LAST_DELTA * TAIL_SHARE)
    for side in sides(run, relation):
        mixture = Mixture(run, listed, side.forward, rtol)
        for eps in np.quantile(values, [0.05, 0.25, 0.5]):
            mixture.at(float(eps), rtol)  # `at` adds nodes to the mixture, and `sums` below uses them at every eps
        most = np.maximum(most, [found.high for found in mixture.sums(values)])
    return most


def _without_delta(run: Mechanism, law: Law, relation: str) -> tuple[float, float]:
    """Return lower and upper bounds of epsilon at delta = 0: the epsilon of `largest_k(law)` composed runs."""
    most = largest_k(law)
    if not np.isfinite(most):
        one = account.epsilon(run, 0.0, relation=relation)
        return (np.inf, np.inf) if one.lower > 0.0 else (0.0, 0.0 if one.upper == 0.0 else np.inf)
    if not most >= 1.0:
        return 0.0, 0.0
    found = account.epsilon(repeat(run, most), 0.0, relation=relation)
    return float(found.lower), float(found.upper)


def _points(run: Mechanism, law: Law) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return COMPOSED_POINTS eps, and for each direction upper bounds of the selection's delta at these eps."""
    listed = weights(law, 1e-3 * LAST_DELTA)
    both = sides(run, "add_or_remove_one")
    each = {name: Mixture(run, listed, name, 1e-3) for name in dict.fromkeys((both[0].forward, both[-1].forward))}
    last = 1e-3
    for mixture in each.values():
        high = mixture.epsilon(min(LAST_DELTA + 2.0 * mixture.at_infinity()[1], 0.5))[1]
        last = max(last, high if np.isfinite(high) else 1.0)
    grid = np.linspace(0.0, 1.0, COMPOSED_POINTS) * last
    for mixture in each.values():
        for eps in grid[[8, 40, 80]]:
            mixture.at(float(eps), 1e-3)
    upper = {name: np.array([found.high for found in mixture.sums(grid)]) for name, mixture in each.items()}
    return grid, upper[both[0].forward], upper[both[-1].forward]


class Sum(NamedTuple):
    """Lower bound, estimate and upper bound of the sum that a `Mixture` stands for, at one eps."""

    low: float
    middle: float
    high: float


class Mixture:
    """Sum over k of Pr[K = k] delta_k. delta_k does not fall in k, so bounds at some k (nodes) bound all delta_k."""

    def __init__(self, run: Mechanism, weights: Weights, relation: str, rtol: float) -> None:
        self.run, self.weights, self.relation, self.rtol = run, weights, relation, rtol
        parts = components(run, "add_or_remove_one", "add" if relation == "add_one" else "remove")
        sampled = bool(np.any(parts.gauss_n > 0.0)) and bool(contour.reach(parts).answers.all())
        self.engine = "contour" if sampled else "auto"
        self.most, self.hard = 3000, np.zeros(0, np.intp)
        size = weights.k.size
        beyond = np.cumsum(weights.high[::-1])[::-1]
        # the first nodes, as places in k: for each x in `first`, the smallest k with Pr[K >= k] <= x Pr[K >= k[0]]
        first = np.array([0.9, 0.5, 0.1, 1e-2, 1e-3, 1e-5, 1e-8])
        spread = np.searchsorted(-beyond, -beyond[0] * first) if size else []
        self.nodes = np.unique(np.clip([*spread, size - 1], 0, size - 1)).astype(np.intp) if size else np.zeros(0, int)

    def deltas(self, nodes: np.ndarray, eps: np.ndarray) -> np.ndarray:
        """Return lower and upper bounds of delta_k(eps), (2, eps, nodes). A NaN becomes the trivial bound, 0 or 1."""
        ends = np.zeros((2, eps.size, nodes.size))
        hard = np.isin(nodes, self.hard)
        for engine, some in ((self.engine, ~hard), ("auto", hard)):
            if not some.any():
                continue
            runs = repeat(self.run, self.weights.k[nodes[some]])
            # apart=True: the number of nodes, and not the enclosing batch, decides between NumPy and XLA
            with backend.job(nodes.size, apart=True):
                found = account.delta(runs, eps[:, None], relation=self.relation, engine=engine, rtol=1e-4)
            if self.engine == "auto" and np.any(np.asarray(found.engine) == "lattice"):
                self.most = 96  # the lattice engine takes about 20 ms per node, so allow fewer nodes from now on
            ends[:, :, some] = found.lower, found.upper
        low, high = ends
        return np.stack([np.where(low >= 0.0, np.minimum(low, 1.0), 0.0), np.where(high <= 1.0, high, 1.0)])

    def sums(self, eps: np.ndarray) -> list[Sum]:
        """Return the brackets of the sum at several eps >= 0. No nodes are added."""
        ends = self.deltas(self.nodes, eps)
        return [self._summed(*_monotone(*ends[:, place])) for place in range(eps.size)]

    def at(self, eps: float, width: float) -> Sum:
        """Return the bracket of the sum at one eps. Add nodes until the bracket's relative width is at most `width`."""
        known: dict[int, np.ndarray] = {}
        for turn in range(MOST_ROUNDS + 1):
            low, high = self._known(known, eps)
            found = self._summed(low, high)
            if turn == MOST_ROUNDS or not self._refined(low, high, width * found.high):
                break
        own = self.weights.high[self.nodes] * (high - low)
        # if contours leave the bracket wide, the lattice engine computes delta_k again at the nodes that widen it most
        if self.engine == "contour" and np.sum(own) > max(width, 0.02) * found.high:
            hard = self.nodes[np.argsort(-own, kind="stable")[:NODES_BY_LATTICE]]
            self.hard = np.union1d(self.hard, hard[: max(NODES_BY_LATTICE - self.hard.size, 0)])
            for node in self.hard.tolist():
                known.pop(node, None)
            found = self._summed(*self._known(known, eps))
        return found

    def _known(self, known: dict[int, np.ndarray], eps: float) -> tuple[np.ndarray, np.ndarray]:
        """Return lower and upper bounds of delta_k(eps) at all nodes, tightened by `_monotone`. Update `known`."""
        fresh = np.array([node for node in self.nodes.tolist() if node not in known], np.intp)
        if fresh.size:
            known.update(zip(fresh.tolist(), self.deltas(fresh, np.array([eps]))[:, 0].T, strict=True))
        each = np.array([known[node] for node in self.nodes.tolist()]).reshape(-1, 2)
        return _monotone(each[:, 0], each[:, 1])

    def epsilon(self, target: float) -> tuple[float, float]:
        """Return lower and upper bounds of the smallest eps >= 0 at which the sum is at most `target` > 0."""
        least, _ = self.at_infinity()
        if least > target:
            return math.inf, math.inf
        search = _Search(self, target)
        if search.fan(np.zeros(1))[0].high <= target:
            return 0.0, 0.0
        if not search.bracketed(self._guess(target)):
            return search.low, search.high
        for width in (max(self.rtol, 0.01), *[self.rtol] * MOST_ROUNDS):
            if math.isinf(search.right[0]):
                break
            search.narrow(0.1)
            before = self.nodes.size
            # the nodes that `at` adds change the estimates of the sum, so `around` finds `left` and `right` anew
            self.at(search.left[0], width)
            self.at(search.root()[0], width)
            search.around()
            if self.nodes.size <= 1.1 * before and width == self.rtol:
                break
        search.narrow(0.1 * self.rtol)
        search.tighten()
        return search.low, search.high

    def _guess(self, target: float) -> float:
        """Return the eps at which the search begins: the epsilon of m composed runs, where m is the mean of K."""
        k, mass = self.weights.k, self.weights.high
        mean = max(round(float(np.sum(k * mass) / np.sum(mass))), 1) if k.size else 1
        level = min(target, 1.0 - ROUNDOFF)
        found = float(account.epsilon(repeat(self.run, mean), level, relation=self.relation, rtol=1e-2).upper)
        return found if 1e-12 < found < LAST_EPS else 1.0

    def at_infinity(self) -> tuple[float, float]:
        """Return lower and upper bounds of the sum at eps = inf, `sum_k Pr[K = k] (1 - (1 - mass)^k)`."""
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
        """Return the bracket of the sum from lower and upper bounds of delta_k at the nodes."""
        weights, nodes = self.weights, self.nodes
        before = np.concatenate([[0.0], low])
        slack = 4.0 * ROUNDOFF * (weights.k.size + 64.0)
        least = weights.low[nodes] @ low + self._between(weights.low) @ before[:-1] + weights.above_low * before[-1]
        most = weights.high[nodes] @ high + self._between(weights.high) @ high
        beyond = weights.above + weights.below * (high[0] if high.size else 1.0)
        middle = 0.5 * (weights.high[nodes] @ (low + high) + self._between(weights.high) @ (before[:-1] + high))
        bottom, top = max(float(least) * (1.0 - slack), 0.0), min(float(most + beyond) * (1.0 + slack), 1.0)
        # of a base with upper bounds alone the estimate is the upper bound, which is what the search must solve for
        return Sum(bottom, min(max(float(middle), bottom), top) if bottom > 0.0 else top, top)

    def _between(self, mass: np.ndarray) -> np.ndarray:
        """Return for each node the sum of `mass` over the k strictly between the preceding node and this node."""
        if not self.nodes.size:
            return np.zeros(0)
        before = np.concatenate([[-1], self.nodes[:-1]])
        ends = np.stack([before + 1, self.nodes], axis=1).reshape(-1)
        return np.where(self.nodes - before > 1, np.add.reduceat(mass, ends)[::2], 0.0)

    def _refined(self, low: np.ndarray, high: np.ndarray, allowed: float) -> bool:
        """If gaps widen the bracket by more than `allowed`, add nodes in the worst gaps. Return whether it did."""
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
        pieces = np.minimum(pieces, 9)
        fresh = [before[row] + np.arange(1, int(n)) * gaps[row] // int(n) for row, n in zip(rows, pieces, strict=True)]
        nodes = np.unique(np.concatenate([self.nodes, *fresh]))
        nodes = nodes[nodes >= 0]
        grown = nodes.size > self.nodes.size
        self.nodes = nodes
        return grown


def _monotone(low: np.ndarray, high: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Tighten bounds of a non-decreasing sequence: a lower bound holds for later elements too, an upper for earlier."""
    return np.maximum.accumulate(low), np.minimum.accumulate(high[::-1])[::-1]


class _Search:
    """Search for the solution, the least eps where the sum is at most `target`. `low` and `high` are proved bounds."""

    def __init__(self, mixture: Mixture, target: float) -> None:
        self.mixture, self.target, self.low, self.high = mixture, target, 0.0, math.inf
        # pairs (eps, estimate of the sum): the largest eps found whose estimate exceeds the target, and the smallest
        # whose estimate does not
        self.left, self.right = (0.0, 1.0), (math.inf, 0.0)

    def fan(self, eps: np.ndarray) -> list[Sum]:
        """Return the brackets of the sum at several eps, and update `low`, `high`, `left` and `right` from them."""
        found = self.mixture.sums(eps)
        for x, one in zip(eps.tolist(), found, strict=True):
            if one.low > self.target:
                self.low = max(self.low, x)
            if one.high <= self.target:
                self.high = min(self.high, x)
        for x, one in zip(eps.tolist(), found, strict=True):
            if one.middle > self.target and self.left[0] <= x < self.high:
                self.left = x, one.middle
            elif not one.middle > self.target and x < self.right[0]:
                self.right = x, one.middle
        return found

    def bracketed(self, guess: float) -> bool:
        """Return whether an eps with an estimate of at most the target was found, around `guess` or beyond."""
        while math.isinf(self.right[0]) and guess <= LAST_EPS:
            self.fan(np.minimum(guess * np.array([0.25, 0.9, 1.2, 4.0, 256.0]), LAST_EPS))
            guess *= 4096.0
        return math.isfinite(self.right[0])

    def root(self) -> tuple[float, float]:
        """Return where the line through log(sum) at `left` and `right` meets log(target), and the fall of this line."""
        (below, more), (above, less) = self.left, self.right
        rise, fall = math.log(more / self.target), math.log(self.target / max(less, 1e-320))
        share = rise / (rise + fall) if rise + fall > 0.0 else 0.5
        return below + share * (above - below), max((rise + fall) / max(above - below, 1e-300), 1e-300)

    def narrow(self, error: float) -> None:
        """Move `left` and `right` together until their eps, or their sums, differ by a factor of about 1 + `error`."""
        for _ in range(8):
            below, above = self.left[0], self.right[0]
            if not below < above or above - below <= error * above or self.left[1] <= self.right[1] * (1.0 + error):
                return
            x, _ = self.root()
            steps = np.array([-0.02, -3e-4, 3e-4, 0.02])
            self.fan(np.unique(np.clip(x + (above - below) * steps, below, above)))

    def around(self) -> None:
        """Find `left` and `right` again, after new nodes have changed the estimates of the sum."""
        x, slope = self.root()
        self.left, self.right = (0.0, 1.0), (math.inf, 0.0)
        reach = max(0.01 * x, 0.1 / max(slope, 1e-2), 1e-12)
        for grown in (1.0, 30.0, 1e3, 1e6, 1e300):
            self.fan(np.clip(x + min(grown * reach, LAST_EPS) * np.array([-1.0, -0.1, 0.0, 0.1, 1.0]), 0.0, LAST_EPS))
            if self.left[1] < 1.0 and math.isfinite(self.right[0]):
                return

    def tighten(self) -> None:
        """Move `low` and `high` together: try eps near where the ends of the sum's bracket equal the target."""
        if not (self.left[0] < self.right[0] < math.inf):
            return
        x, slope = self.root()
        (found,) = self.fan(np.array([x]))
        places = []
        for sign, end in ((1.0, found.high), (-1.0, found.low)):
            distance = abs(math.log(max(end, 1e-320) / self.target)) / slope + 2.0**-46 * x
            places.append(x + sign * distance * np.array([1.01, 1.3, 4.0]))
        self.fan(np.clip(np.unique(np.concatenate(places)), 0.0, LAST_EPS))


class Weights(NamedTuple):
    """Certified bounds of the probabilities of K, one by one for the listed values of K."""

    k: np.ndarray  # the listed values, all >= 1, ascending
    low: np.ndarray  # lower bounds of Pr[K = k]
    high: np.ndarray  # upper bounds of Pr[K = k]
    below: float  # upper bound of Pr[1 <= K < k[0]]
    above_low: float  # lower bound of Pr[K > k[-1]]
    above: float  # upper bound of Pr[K > k[-1]]


def weights(law: Law, tail: float) -> Weights:
    """Return bounds of Pr[K = k] at some 2^21 consecutive k, or at fewer that leave out at most `tail` on a side."""
    if isinstance(law, Categorical):
        each = np.asarray(law.probabilities)
        # The given probabilities may add up to 1 +- 1e-13, so `error` bounds the relative error of each of them.
        error = 4e-13
        return _listed(np.arange(each.size) * 1.0, each * (1.0 - error), each * (1.0 + error), 0.0, 0.0)
    if isinstance(law, PointMass) or (isinstance(law, Binomial) and float(law.probability_of_run) == 1.0):
        return Weights(np.array([largest_k(law)]), np.ones(1), np.ones(1), 0.0, 0.0, 0.0)
    if not isinstance(law, TruncatedNegativeBinomial | Poisson | Binomial):
        raise InputError(
            f"k of type {type(law).__name__} has no certified probabilities; use a law of jaxacct.selection, "
            "such as Categorical"
        )
    first, mode, last, ratios, gap = _progression(law)
    if not mode < 2.0**52:  # above 2^52 float64 hardly tells neighbouring whole numbers apart, so no K is listed
        return Weights(np.zeros(0), np.zeros(0), np.zeros(0), 1.0, 0.0, 1.0)
    half = 64.0
    while True:
        start, stop = max(mode - half, first), min(mode + half, last)
        k = np.arange(start, stop + 1.0)
        up, down = ratios(np.arange(mode, stop)), 1.0 / ratios(np.arange(start, mode))[::-1]
        with np.errstate(under="ignore"):
            value = np.concatenate([np.cumprod(down)[::-1], [1.0], np.cumprod(up)])
        slack = ROUNDINGS_PER_TERM * ROUNDOFF * (k.size + 8.0)
        low = np.where(value < LEAST_DELTA, 0.0, value * (1.0 - slack))
        high = value * (1.0 + slack) + np.where(value < LEAST_DELTA, 2.0 * LEAST_DELTA, 0.0)
        above = 0.0 if stop == last else high[-1] * _series(ratios(np.asarray(stop)), gap)
        below = 0.0 if start == first else high[0] * _series(1.0 / ratios(np.asarray(start - 1.0)), 0.0)
        if max(above, below) <= tail * (1.0 - 1e-6) or k.size >= 2**21:
            break
        half *= 2.0
    least, most = np.sum(low) * (1.0 - slack), np.sum(high) * (1.0 + slack) + above + below
    return _listed(k, low / most * (1.0 - slack), high / least * (1.0 + slack), below / least, above / least)


def _listed(k: np.ndarray, low: np.ndarray, high: np.ndarray, below: float, above: float) -> Weights:
    """Return `Weights` of the k >= 1 with high > 0. `below`, `above`: upper bounds of Pr[K < k[0]], Pr[K > k[-1]]."""
    slack = ROUNDINGS_PER_TERM * ROUNDOFF * (k.size + 8.0)
    left = 1.0 - np.sum(high) * (1.0 + slack) - below - slack
    kept = (k >= 1.0) & (high > 0.0)  # a selection without runs costs nothing
    rest = min(above * (1.0 + slack), 1.0)
    return Weights(k[kept], low[kept], np.minimum(high[kept], 1.0), min(below, 1.0), min(max(left, 0.0), rest), rest)


def _progression(law: Any) -> tuple[float, float, float, Callable[[np.ndarray], np.ndarray], float]:
    """Return (first k, mode, last k, ratio, gap): ratio(k) = Pr[K = k + 1]/Pr[K = k], <= 1 - gap from the mode on."""
    if isinstance(law, Poisson):
        return 0.0, float(np.floor(law.mean)), np.inf, lambda k: law.mean / (k + 1.0), 0.0
    if isinstance(law, Binomial):
        trials, p = float(law.trials), law.probability_of_run
        mode = min(float(np.floor((trials + 1.0) * p)), trials)
        return 0.0, mode, trials, lambda k: (trials - k) / (k + 1.0) * (p / (1.0 - p)), 0.0
    mode = float(np.floor(max((law.eta - 1.0) * (1.0 - law.gamma) / law.gamma, 1.0)))
    gap = float(law.gamma) if law.eta <= 1.0 else 0.0
    return 1.0, mode, np.inf, lambda k: (1.0 - law.gamma) * ((k + law.eta) / (k + 1.0)), gap


def _series(ratio: np.ndarray, gap: float) -> float:
    """Return an upper bound of `r + r^2 + ...`: for every r <= 1 - gap if gap > 0, otherwise for every r <= `ratio`."""
    slack = 1.0 + ROUNDINGS_PER_TERM * ROUNDOFF
    if gap > 0.0:
        return 1.0 / gap * slack
    left = 1.0 - float(ratio) * slack
    return float(ratio) / left * slack if left > 0.0 else np.inf
