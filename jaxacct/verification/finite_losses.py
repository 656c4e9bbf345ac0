"""Pairs of laws with finitely many losses, as two vectors of masses.  Discrete Gaussian noise has its tails cut off."""

from __future__ import annotations

import functools
import math
import operator
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from jaxacct.verification.ball_arithmetic import NotCovered, acb, arb, ball

Masses = tuple[Any, ...]
"""Fields (p, q, loss, grid, cut, unbounded) of a `FiniteLosses`. A loss None stands for log p/q, yet to be computed."""

MOST_OUTCOMES = 20_000
"""Largest number of outcomes of integer noise. It limits the memory, since several balls are kept for every outcome."""


@dataclass(frozen=True)
class FiniteLosses:
    """Two laws P and Q with finitely many outcomes: loss log p/q, p and q of each outcome whose loss is finite."""

    key: Any  # equal for equal laws: parts with equal keys are counted together
    loss: tuple[Any, ...]
    p: tuple[Any, ...]
    q: tuple[Any, ...]
    infinity: Any  # probability, under P, of the outcomes with q = 0, whose loss is infinite
    grid: Any  # (offset, step, whole numbers k) if every loss is known to be offset + k step; None otherwise
    cut: Any  # upper bound of the probability, under P, of outcomes left out; 0 except for discrete Gaussian noise
    unbounded: bool = False  # whether the losses would be unbounded if no outcome were left out

    @property
    def largest(self) -> Any:
        if self.unbounded:
            return None
        return functools.reduce(arb.max, self.loss, arb("-inf"))

    @property
    def least(self) -> Any:
        if self.unbounded:
            return None
        return functools.reduce(arb.min, self.loss, arb("inf"))

    @property
    def masses(self) -> tuple[Any, Any]:
        """The mass of the finite losses under P, which is M(0), and under Q, which is M(-1)."""
        return sum(self.p, arb(0)), sum(self.q, arb(0))

    def log_mgf(self, c: np.ndarray) -> np.ndarray:
        """Compute log M(c) = log E_P[e^{cL}] in floats, for planning only."""
        loss, mass = self._floats
        exponents = np.outer(c, loss) + mass
        top = exponents.max(-1)
        return top + np.log(np.exp(exponents - top[:, None]).sum(-1))

    @functools.cached_property
    def _floats(self) -> tuple[np.ndarray, np.ndarray]:
        logs = [float(p.log().mid()) for p in self.p]
        return np.array([float(loss.mid()) for loss in self.loss]), np.array(logs)

    def mgf(self, z: Any) -> Any:
        """Compute M(z) = E_P[e^{zL}] over the finite losses."""
        return sum((p * (z * loss).exp() for loss, p in zip(self.loss, self.p, strict=True)), acb(0))

    def values(self, c: Any, step: Any, rows: range, width: int, count: int, bits: float) -> Any:
        """Yield, for each row, a list of balls M(c + i k step), i^2 = -1, for `width` numbers k from row * width on."""
        # compute each power by its own exponential: in a running product the radius would grow with every factor
        turns = [[acb(0, step * j * loss).exp() for loss in self.loss] for j in range(width)]
        for row in rows:
            at = row * width
            terms = [p * (acb(c, at * step) * x).exp() for x, p in zip(self.loss, self.p, strict=True)]
            yield [sum((term * by for term, by in zip(terms, turn, strict=True)), acb(0)) for turn in turns]

    def decay(self, c: Any, t: Any, count: int) -> Any:
        """Bound |M(c + iu)| from above for all u >= t."""
        return self.mgf(acb(c)).abs_upper()

    def log_decay(self, c: float, t: float) -> float:
        return float(self.log_mgf(np.array([c]))[0])

    def hockey_stick(self, epsilon: Any) -> Any:
        """Return the finite losses' part of delta: the sum of (p - e^eps q)_+ over the outcomes with a finite loss."""
        grown, rows = epsilon.exp(), zip(self.loss, self.p, self.q, strict=True)
        return sum(((p - grown * q).max(0) for loss, p, q in rows if not loss <= epsilon), arb(0))


def from_masses(key: Any, masses: Masses, rate: Any, direction: str) -> FiniteLosses:
    """Return the losses, in one direction, of the mechanism with the given masses, Poisson sampled at `rate`."""
    p, q, losses, grid, cut, unbounded = masses
    if direction == "add" and rate == 1:
        # the direction "add" exchanges p and q, so each loss log(p/q) changes its sign
        p, q, losses = q, p, [-x if x is not None else None for x in losses]
        grid = None if grid is None else (-grid[0], -grid[1], grid[2])
    elif rate != 1:
        mixed = [(1 - rate) * b + rate * a for a, b in zip(p, q, strict=True)]
        logs = [None if x is None else (1 - rate + rate * x.exp()).log() for x in losses]
        p, q, losses = (mixed, q, logs) if direction == "remove" else (q, mixed, [x if x is None else -x for x in logs])
        grid = None
    infinity, kept = arb(0), []
    ks = grid[2] if grid is not None else [0] * len(p)
    for a, b, loss, k in zip(p, q, losses, ks, strict=True):
        if a.is_zero():
            continue
        if b.is_zero():
            infinity += a
        else:
            kept.append((a, b, (a / b).log() if loss is None else loss, k))
    if grid is not None:
        grid = (grid[0], grid[1], [row[3] for row in kept])
        if grid[1] < 0:
            grid = (grid[0], -grid[1], [-k for k in grid[2]])
    elif len(kept) == 1:
        grid = (kept[0][2], arb(1), [0])
    elif len(kept) == 2:
        low, high = sorted((row[2] for row in kept), key=lambda x: float(x.mid()))
        if low < high:
            grid = (low, high - low, [int(row[2] is high) for row in kept])
    columns = list(zip(*kept, strict=True)) if kept else [(), (), (), ()]
    return FiniteLosses(key, columns[2], columns[0], columns[1], infinity, grid, cut, unbounded)


def several_answers(p: Any, k: int) -> Masses:
    """Return the masses of randomised response over k answers. The true answer is given with probability p."""
    other = (1 - p) / (k - 1)
    loss = (p / other).log()
    if k == 2:
        return [p, other], [other, p], [loss, -loss], (arb(0), loss, [1, -1]), arb(0), False
    rest = (k - 2) * other
    grid = (arb(0), loss, [1, -1, 0])
    return [p, other, rest], [other, p, rest], [loss, -loss, arb(0)], grid, arb(0), False


def output_masses(p: list[float], q: list[float]) -> Masses:
    """Return the masses of two probability vectors, each divided by its sum."""
    one, two = ([ball(x) for x in law] for law in (p, q))
    # even a division by 1 would round, and then Pr[infinite loss] could not be shown to equal delta
    one, two = (law if total == 1 else [x / total for x in law] for law in (one, two) for total in [sum(law, arb(0))])
    return one, two, [None] * len(one), None, arb(0), False


def in_either_order(p: list[float], q: list[float]) -> Masses:
    """Return the exact masses of the pair of laws whose delta(epsilon) is the larger of those of (p, q) and (q, p)."""
    laws = [[Fraction(x) for x in law] for law in (p, q)]
    one, two = ([x / sum(law) for x in law] for law in laws)
    profiles = [_profile(one, two), _profile(two, one)]
    knots = sorted({a / b for pair in ((one, two), (two, one)) for a, b in zip(*pair, strict=True) if a and b})
    gaps = [profiles[0](knot) - profiles[1](knot) for knot in knots]
    crossings = [
        low + (high - low) * before / (before - after)
        for (low, high), (before, after) in zip(pairwise(knots), pairwise(gaps), strict=True)
        if before * after < 0
    ]
    knots = sorted([*knots, *crossings])
    values = [Fraction(1), *(max(each(knot) for each in profiles) for knot in knots)]
    places = [Fraction(0), *knots]
    slopes = [(b - a) / (y - x) for (x, y), (a, b) in zip(pairwise(places), pairwise(values), strict=True)]
    q_mass = [after - before for before, after in pairwise([*slopes, Fraction(0)])]
    p_mass = [knot * mass for knot, mass in zip(knots, q_mass, strict=True)]
    columns = ([*p_mass, values[-1], Fraction(0)], [*q_mass, Fraction(0), 1 - sum(q_mass, Fraction(0))])
    found = [[arb(x.numerator) / x.denominator for x in column] for column in columns]
    return found[0], found[1], [None] * len(found[0]), None, arb(0), False


def _profile(p: list[Fraction], q: list[Fraction]) -> Callable[[Fraction], Fraction]:
    """Return delta as a function of x = e^epsilon > 0: the sum of (p - x q)_+ over the outcomes."""
    ordered = sorted((a / b, a, b) for a, b in zip(p, q, strict=True) if b)
    ratios, beyond = [row[0] for row in ordered], [(1 - sum((a for _, a, _ in ordered), Fraction(0)), Fraction(0))]
    for _, a, b in reversed(ordered):
        beyond.append((beyond[-1][0] + a, beyond[-1][1] + b))

    def at(grown: Fraction) -> Fraction:
        p_above, q_above = beyond[len(ratios) - bisect_right(ratios, grown)]
        return p_above - grown * q_above

    return at


def response(epsilon: Any, delta: Any) -> Masses:
    """Return the masses of the pair of laws that dominates every (epsilon, delta)-DP mechanism."""
    rare = (1 - delta) / (1 + epsilon.exp())
    likely = (1 - delta) / (1 + (-epsilon).exp())
    p, q = [likely, rare], [rare, likely]
    losses, ks = [epsilon, -epsilon], [1, -1]
    if epsilon.is_zero():
        p, q, losses, ks = [1 - delta], [1 - delta], [arb(0)], [0]
    if not delta.is_zero():
        p, q, losses, ks = [*p, delta, arb(0)], [*q, arb(0), delta], [*losses, None, None], [*ks, 0, 0]
    return p, q, losses, (arb(0), epsilon if not epsilon.is_zero() else arb(1), ks), arb(0), False


def discrete_laplace(scale: Any, shift: int) -> Masses:
    """Return the masses of discrete Laplace noise plus `shift` and of the noise alone. Outcomes of equal loss merge."""
    if shift >= MOST_OUTCOMES:
        raise NotCovered(f"DiscreteLaplace of sensitivity {shift}")
    r = (-1 / scale).exp()
    inner, half = (1 - r) / (1 + r), 1 / (1 + r)
    powers = list(accumulate([r] * shift, operator.mul, initial=arb(1)))
    share = [half if x in (0, shift) else inner for x in range(shift + 1)]
    p = [s * powers[shift - x] for x, s in enumerate(share)]
    q = [s * powers[x] for x, s in enumerate(share)]
    ks = [2 * x - shift for x in range(shift + 1)]
    return p, q, [k / scale for k in ks], (arb(0), 1 / scale, ks), arb(0), False


def discrete_gaussian(sigma: float, shift: int) -> Masses:
    """Return the masses of discrete Gaussian noise plus `shift` and of the noise alone, without the far tails."""
    reach = math.ceil(24 * sigma) + 1  # the mass of each tail beyond `reach` is below e^{-288}
    if 2 * reach + shift > MOST_OUTCOMES:
        raise NotCovered(f"DiscreteGaussian with sigma = {sigma}")
    square = 2 * ball(sigma) ** 2
    beyond = 2 * (-(ball(reach) ** 2) / square).exp()  # a tail beyond m has at most the mass e^{-m^2/(2 sigma^2)}
    noise = {x: (-(ball(x) ** 2) / square).exp() for x in range(reach + shift + 1)}
    inside = 2 * sum((noise[x] for x in range(1, reach + 1)), arb(0)) + 1
    # The outcomes beyond `reach` have a probability `tail` in [0, beyond]. So all weights sum to inside/(1 - tail).
    whole = inside * (1 / (1 - beyond)).union(arb(1))
    at = range(-reach, reach + shift + 1)
    far = reach + shift
    p = [noise[abs(x - shift)] / whole if abs(x - shift) <= far else arb(0) for x in at]
    q = [noise[abs(x)] / whole for x in at]
    ks = [2 * x - shift for x in at]
    unit = shift / square
    losses = [k * unit for k in ks]
    return p, q, losses, (arb(0), unit, ks), beyond, True


def spread(grid: Any) -> int:
    """Return the greatest common divisor of the differences of a grid's whole numbers k, or 1 if all k are equal."""
    ordered = sorted(set(grid[2]))
    return math.gcd(*(b - a for a, b in pairwise(ordered))) if len(ordered) > 1 else 1
