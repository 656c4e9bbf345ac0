"""Sampled Gaussians whose outputs are cut in two: calm steps taken apart, the largest outputs left out.

A smooth cut gives each output u a share chi(u) = Phi((u - place)/width) that is rare and a share 1 - chi(u) that is
calm: M = A + B with A = E[mix^e (1 - chi)] and B = E[mix^e chi].  Where all steps are calm the loss is a sum of small
losses, and what it adds to delta(eps) is known next to exactly; the sum over the line is left with

    (M^n - A^n) e^{-z eps}/(z (z + 1)),    |M^n - A^n| <= n M(c)^{n-1} |B|,

and B falls fast, since the smallest losses are not in it.  See README.md.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scipy.special import log_ndtr

from jaxacct.verification.balls import arb, between
from jaxacct.verification.sampled_floats import Cut
from jaxacct.verification.sampled_gaussian import SampledGauss

__all__ = ["TOP_WIDTHS", "Calm", "falls_to", "fits", "mass_of_largest", "plan", "without_largest"]

WIDTHS = (0.06, 0.12, 0.25, 0.5, 1.0)
"""Widths of the cut of the calm outputs, in shares of the lesser of sigma and 1."""
TOP_WIDTHS = (0.5, 0.2, 0.08)
"""Widths of the cut of the largest outputs."""


@dataclass(frozen=True)
class Calm:
    """The cut of each part, as (place, width), and the order of the bound of what the calm steps add."""

    cuts: tuple[tuple[float, float], ...]
    order: float

    def lines(self, parts: Any, c: Any, step: Any, rows: range, width: int, bits: float) -> list[Any]:
        """Enclosures of B along the line, of each part, as close to it as M's are to M."""
        at, found = np.array([float(c.mid())]), []
        for law, (part, count) in zip(self._rare(parts), parts, strict=True):
            less = float((part.log_mgf(at) - law.log_mgf(at))[0])
            found.append(law.values(c, step, rows, width, count, max(bits - less, 20.0)))
        return found

    def tail(self, parts: Any, c: Any, t: Any) -> Any:
        """Upper bound of |M - A| at c + is for all s >= t: the product of M(c), times the sum of n |B|/M(c)."""
        whole, share = arb(1), arb(0)
        for law, (part, count) in zip(self._rare(parts), parts, strict=True):
            mean = part.mean(c)
            whole *= mean**count
            share += count * law.decay(c, t, count) / mean
        return (whole * share).abs_upper()

    def masses(self, parts: Any) -> tuple[Any, Any]:
        """P- and Q-mass of the calm steps."""
        p, q = arb(1), arb(1)
        for law, (_, count) in zip(self._quiet(parts), parts, strict=True):
            one, two = law.masses
            p, q = p * one**count, q * two**count
        return p, q

    def delta(self, parts: Any, epsilon: Any) -> Any:
        """What the calm steps add: for remove next to nothing, for add next to P - e^eps Q.

        With R = prod mix and Q's law of R, remove adds E[(R - e^eps)_+] and add E[1 - e^eps R] + E[(e^eps R - 1)_+];
        (x - 1)_+ <= x^{1+a} a^a/(1 + a)^{1+a}.
        """
        remove = parts[0][0].direction == "remove"
        a = arb(self.order)
        most = (a * a.log() - (1 + a) * (1 + a).log()).exp() * (-a * epsilon if remove else (1 + a) * epsilon).exp()
        for law, (_, count) in zip(self._quiet(parts), parts, strict=True):
            most *= law.altered(direction="remove").mean(a) ** count
        rest = between(0, most.abs_upper())
        if remove:
            return rest
        p, q = self.masses(parts)
        return p - epsilon.exp() * q + rest

    def _rare(self, parts: Any) -> list[SampledGauss]:
        return _cut(parts, self.cuts, 1)

    def _quiet(self, parts: Any) -> list[SampledGauss]:
        return _cut(parts, self.cuts, -1)


@dataclass(frozen=True)
class Plan:
    """Cuts, how far the sum goes after them, and how many products that is."""

    calm: Calm
    far: float
    cost: float


def fits(parts: Any) -> bool:
    """Whether the composition has sampled Gaussians only."""
    return bool(parts) and all(isinstance(part, SampledGauss) for part, _ in parts)


def plan(parts: Any, c: float, epsilon: float, wanted: float, step: float, most: int, bits: float) -> Plan | None:
    """The cuts after which the sum costs least, in floats; None where there are none.

    All cuts are at one loss above the least (remove) or below the largest (add), as high as what the calm steps add
    allows.
    """
    best: Plan | None = None
    ends = sum(count * np.log1p(-float(part.rate.mid())) for part, count in parts)
    gap = epsilon - ends if parts[0][0].direction == "remove" else -ends - epsilon
    if not gap > 0:
        return best
    means = [float(part.log_mgf(np.array([c]))[0]) for part, _ in parts]
    flat = sum(count * mean for mean, (_, count) in zip(means, parts, strict=True))
    weights = [np.log(count) - mean for mean, (_, count) in zip(means, parts, strict=True)]
    for width in WIDTHS:
        low, high, order = np.log(gap) - 60.0, np.log(gap), 0.0
        while high - low > 0.2:
            middle = 0.5 * (low + high)
            found = _order(parts, _cuts(parts, float(np.exp(middle)), width), epsilon, gap, wanted)
            low, high = (middle, high) if found else (low, middle)
            order = found or order
        if not order:
            continue
        cuts = _cuts(parts, float(np.exp(low)), width)
        rare = _cut(parts, cuts, 1)

        def left_over(t: float, rare: list[SampledGauss] = rare) -> float:
            shares = [law.log_decay(c, t) + x for law, x in zip(rare, weights, strict=True)]
            return float(flat + np.logaddexp.reduce(shares) - c * epsilon - np.log(t) - 1.1)

        nodes = sum(law.cost(c, bits) for law in rare)
        limit = most if best is None else min(most, best.cost / nodes)
        far = falls_to(left_over, step, limit * step, wanted) if limit > 1 else float("inf")
        if np.isfinite(far):
            best = Plan(Calm(cuts, order), far, far / step * nodes)
    return best


def falls_to(function: Any, low: float, high: float, wanted: float) -> float:
    """Where a falling function reaches `wanted`, at least `low`; infinite where that is beyond `high`."""
    if not function(high) <= wanted:
        return float("inf")
    while high > 1.02 * low:
        middle = float(np.sqrt(low * high))
        low, high = (middle, high) if function(middle) > wanted else (low, middle)
    return high


def _order(parts: Any, cuts: Any, epsilon: float, gap: float, wanted: float) -> float:
    """The order at which the bound in `Calm.delta` is below e^wanted, 0 where it nowhere is, in floats."""
    a = np.geomspace(1.0, 1e5, 24) / gap
    remove = parts[0][0].direction == "remove"
    total = a * np.log(a) - (1 + a) * np.log1p(a) + (-a * epsilon if remove else (1 + a) * epsilon)
    for law, (_, count) in zip(_cut(parts, cuts, -1), parts, strict=True):
        total = total + count * law.altered(direction="remove").log_mgf(a)
    best = int(np.argmin(np.where(np.isnan(total), np.inf, total)))
    return float(a[best]) if total[best] < wanted else 0.0


def _cuts(parts: Any, x: float, width: float) -> tuple[tuple[float, float], ...]:
    """Where each ratio is e^x times its least."""
    cuts = []
    for part, _ in parts:
        sigma, rate = float(part.sigma.mid()), float(part.rate.mid())
        place = sigma * (np.log1p(-rate) - np.log(rate) + x + np.log(-np.expm1(-x))) + 0.5 / sigma
        cuts.append((float(place), width * min(sigma, 1.0)))
    return tuple(cuts)


def _cut(parts: Any, cuts: Any, side: int) -> list[SampledGauss]:
    return [
        part.altered(cuts=(Cut(place, width, side), *part.cuts))
        for (part, _), (place, width) in zip(parts, cuts, strict=True)
    ]


def without_largest(parts: Any, wanted: float, width: float) -> list[Any]:
    """The parts without outputs so large that all of them together have a P-mass below e^wanted, in floats.

    Few of them make M(c) huge where c is large: the loss grows with the exponential of the output.
    """
    kept, spread = [], np.hypot(1.0, width)
    for part, count in parts:
        sigma, rate = float(part.sigma.mid()), float(part.rate.mid())
        aim, low, high = wanted - np.log(count * len(parts)), 0.0, 60.0 + 1 / sigma
        while high - low > 1e-2:
            middle = 0.5 * (low + high)
            mass = np.logaddexp(log_ndtr(-middle / spread), np.log(rate) + log_ndtr((1 / sigma - middle) / spread))
            low, high = (middle, high) if mass > aim else (low, middle)
        kept.append((part.altered(cuts=(Cut(high, width, -1), *part.cuts)), count))
    return kept


def mass_of_largest(parts: Any) -> Any:
    """P-mass of what `without_largest` left out, at most."""
    total = arb(0)
    for part, count in parts:
        (cut,) = part.cuts
        total += count * part.altered(cuts=(replace(cut, side=-cut.side),)).masses[0]
    return total.abs_upper()
