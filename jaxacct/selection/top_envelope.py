"""The envelope for the best j of K: an upper bound of what they leak, for every law of K and every score.

With phi^(j) the j-th derivative of the generating function of K, T the trade-off curve of the base, R the product of
the likelihood ratios of j candidates and E = e^eps,

    delta(eps) <= 1/j! E_{Q^j}[max_v (R phi^(j)(T(v)) - E phi^(j)(v))_+] + sum_{k<j} Pr[K=k] delta_k(eps),

delta_k the profile of k runs (README.md of this folder, "The best j", with the mass at infinity).  The function of R is
a maximum of lines, and R is distributed as in j runs, so that the profile of j runs is all that the first term needs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from jaxacct.core.floats import ROUNDOFF
from jaxacct.engines.quick_bounds import largest_loss
from jaxacct.mechanisms import Components, Mechanism, components, repeat
from jaxacct.selection import profile_ends
from jaxacct.selection.base_profile import Sides, bounded_loss, finite_once, sides, upper_delta, upper_epsilon
from jaxacct.selection.envelope_bound import (
    INFLATED,
    LARGEST_EPS,
    TAIL_SHARE,
    Envelope,
    best_lines,
    cells,
    crossing,
    lines,
    rows,
    without_least,
)
from jaxacct.selection.higher_derivatives import derivative, probability_of
from jaxacct.selection.largest_ratio import RELATIVE_ERROR
from jaxacct.selection.law_of_k import Law, evaluated
from jaxacct.selection.tradeoff_polygons import outer

__all__ = ["delta", "ends", "epsilon"]

POINTS = 800
"""Values of eps > 0, and as many of eps < 0, at which a profile is taken."""
MOST_ATOMS = 1500
"""A finite base is multiplied out where j runs have at most so many outcomes."""
ATOM_GAP = 1e-9
"""Losses of outcomes that are nearer than that share one value of eps."""
LEAST_LEVEL = 1e-290
"""Profiles end at the latest where delta is this."""


@dataclass(frozen=True)
class Several:
    """A sum of envelopes: what is released if K >= j, and if it is less."""

    parts: tuple[Envelope, ...]

    def leak(self, ratio: np.ndarray) -> np.ndarray:
        """Upper bounds of delta at ratios E >= 1."""
        total = sum(part.leak(ratio) for part in self.parts) * (1.0 + INFLATED)
        return np.where(total <= 1.0, total, 1.0)

    def next_ratio(self, ratio: np.ndarray, target: np.ndarray) -> np.ndarray:
        """Where the lines that hold at `ratio` fall to the target together."""
        fixed, cost = (sum(each) for each in zip(*(part.line(ratio) for part in self.parts), strict=True))
        return np.asarray((fixed - target) / cost)


def delta(run: Mechanism, law: Law, top: int, at: np.ndarray, relation: str) -> np.ndarray:
    """Upper bounds of delta(eps >= 0) of the best `top` of one base and law."""
    value = np.zeros(at.shape)
    for side in sides(run, relation):
        level = float(np.min(upper_delta(run, at, side.forward), initial=1.0))
        found = _envelope(run, law, top, side, level).leak(np.exp(np.minimum(at, LARGEST_EPS)))
        value = np.maximum(value, found)
    return value


def epsilon(run: Mechanism, law: Law, top: int, target: np.ndarray, relation: str) -> np.ndarray:
    """eps at which the upper bound was at most delta > 0, for one base and law; inf where none is found."""
    value = np.zeros(target.shape)
    for side in sides(run, relation):
        made = _envelope(run, law, top, side, float(np.min(target, initial=1.0)))
        value = np.maximum(value, crossing(made, target))
    return value


def ends(run: Mechanism, law: Law, top: int, relation: str) -> tuple[float, float]:
    """(largest finite loss, mass at infinity) of the best `top`, upper ends; (inf, 1) where losses are unbounded.

    The finite losses are at most `j L + log sup_v phi^(j)(T(v) - p)/phi^(j)(v)`, L the largest loss of the base.
    """
    largest, mass = 0.0, 0.0
    for side in sides(run, relation):
        part = components(run, "add_or_remove_one", side.direction)
        if not bounded_loss(part)[0]:
            return np.inf, 1.0
        one = float(largest_loss(part).above[0])
        scale, other = derivative(law, top)
        grown, _ = profile_ends.last(run, other, side.forward) if scale > 0.0 else (np.zeros(()), 0.0)
        total = (float(grown) + (top - 1) * one) * (1.0 + 8.0 * ROUNDOFF)
        # where nothing is known of the ratio, or a number left float64, nothing is known of the losses
        largest = max(largest, total) if total >= 0.0 and np.isfinite(scale) else np.inf
        mass = max(mass, float(profile_ends.last(run, law, side.forward)[1]))
    return largest, mass


def _envelope(run: Mechanism, law: Law, top: int, side: Sides, level: float) -> Several:
    """The envelope of one direction, whose profiles go down to a small share of `level`."""
    parts = components(run, "add_or_remove_one", side.direction)
    # mass at infinity that is certain counts by itself; of a pair that only dominates none is certain
    certain = run.kind_under("add_or_remove_one", composed=True) == "certified"
    apart = float(np.abs(parts.delta_infinity[0])) * (1.0 - RELATIVE_ERROR) if certain else 0.0
    apart = apart if apart >= LEAST_LEVEL else 0.0  # less may be what a finite table of an endless law leaves out
    scale, other = derivative(law, top)
    most = scale * float(evaluated(other, np.zeros(()))[1]) if scale > 0.0 else 1.0
    share = TAIL_SHARE / max(most, 1.0) if np.isfinite(most) else 0.0
    curves = {k: _curve(run, parts, k, side, level * share) for k in range(1, top + 1)}
    infinite = profile_ends.leak(law, apart)[1] if apart > 0.0 else 0.0
    none = np.zeros(1)
    found = [Envelope(none, none, none, none, infinite)]
    for k in range(1, top):
        weight = probability_of(law, k)
        flat = np.array([1.0 + INFLATED]), np.array([1.0 - INFLATED])
        found.append(_weighted(*curves[k], *flat, weight, _lost(apart, k)))
    if scale > 0.0:
        u, t = curves[1]
        left = np.clip(t - apart + 4.0 * ROUNDOFF, 0.0, 1.0)
        gain, cost = best_lines(*lines(other, *cells(u, left, u.size + 2 * POINTS)))
        weight = scale / math.factorial(top) * (1.0 + 2.0 * INFLATED)
        found.append(_weighted(*curves[top], gain, cost, weight, _lost(apart, top)))
    return Several(tuple(found))


def _weighted(u: np.ndarray, t: np.ndarray, gain: np.ndarray, cost: np.ndarray, weight: float, lost: float) -> Envelope:
    """`weight` times the mean of the best line over a curve, of which the mass at infinity `lost` counts elsewhere."""
    slope, height = rows(u, t)
    beyond = max(float(t[0]) - lost, 0.0) * float(gain[-1]) * weight
    return Envelope(slope, height * weight, gain, cost, beyond * (1.0 + INFLATED))


def _lost(apart: float, count: int) -> float:
    """`1 - (1 - p)^k`, rounded down."""
    return -math.expm1(count * math.log1p(-min(apart, 1.0 - ROUNDOFF))) * (1.0 - RELATIVE_ERROR)


def _curve(run: Mechanism, parts: Components, count: int, side: Sides, level: float) -> tuple[np.ndarray, np.ndarray]:
    """(u, T) at the knots of a polygon above the curve of so many runs."""
    seen = parts.finite_mass[0, 0] > 0.0 if finite_once(parts) else np.zeros(0, bool)
    if seen.any() and np.count_nonzero(seen) ** count <= MOST_ATOMS:
        at, high = _by_outcomes(parts.finite_loss[0, 0][seen], parts.finite_mass[0, 0][seen], parts, count)
    else:
        runs = repeat(run, count)
        floor = float(np.max(components(runs, "add_or_remove_one", side.direction).delta_infinity[0]))
        least = np.array(min(max(level, LEAST_LEVEL, TAIL_SHARE * floor) + floor, 1.0))
        last = float(upper_epsilon(runs, least, side.forward))
        last = min(max(last, 1e-6), LARGEST_EPS)
        at = np.linspace(-last, last, 2 * POINTS + 1)
        high = upper_delta(runs, at, side.forward)
    # a ratio that is rounded up makes a line that is too high
    _, u, t = outer(np.exp(at) * (1.0 + 4.0 * ROUNDOFF), np.where(high <= 1.0, high, 1.0))
    return without_least(u, t)


def _by_outcomes(loss: np.ndarray, mass: np.ndarray, parts: Components, count: int) -> tuple[np.ndarray, np.ndarray]:
    """(eps, upper ends of delta) of a finite law, multiplied out, at its losses, where its profile bends."""
    total, product = np.zeros(1), np.ones(1)
    for _ in range(count):
        total = (total[:, None] + loss).ravel()
        product = (product[:, None] * mass).ravel()
    slack = 16.0 * ROUNDOFF * count * (np.max(np.abs(loss)) + 1.0)
    at = np.unique(np.concatenate([total, [0.0]]))
    at = at[np.concatenate([[True], np.diff(at) > ATOM_GAP])]
    at = np.clip(
        np.concatenate([[at[0] - 1.0], at, at[-1] + np.array([10.0 * slack, 50.0])]), -LARGEST_EPS, LARGEST_EPS
    )
    at = np.unique(at)
    error = slack + 16.0 * ROUNDOFF * np.abs(at)
    below = np.minimum(at[:, None] - total - error[:, None], 0.0)
    infinite = -math.expm1(count * math.log1p(-min(float(np.abs(parts.delta_infinity[0])), 1.0 - ROUNDOFF)))
    high = (-np.expm1(below)) @ product + infinite
    return at, high * (1.0 + RELATIVE_ERROR)
