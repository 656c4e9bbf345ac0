"""Separates sampled Gaussian steps with small loss from others, and leaves out the largest outputs of steps.

A smooth cut counts the share chi(u) = Phi((u - place)/width) of output u as a large loss.  Proofs: README.md of this
folder, "Steps with small loss taken apart".
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from scipy.special import log_ndtr

from jaxacct.verification.ball_arithmetic import arb, between
from jaxacct.verification.sampled_gaussian import Cut, SampledGaussian

LARGEST_CUT_WIDTHS = (0.5, 0.2, 0.08)
"""Widths, in standard deviations of the noise, that are tried for the cut that leaves out the largest outputs."""


@dataclass(frozen=True)
class SmallLossSteps:
    """The cuts that separate steps with small loss from other steps."""

    cuts: tuple[tuple[float, float], ...]  # (place, width) of the cut of each part
    order: float  # the exponent a of Chernoff's bound in `delta`

    def along_line(self, parts: Any, c: Any, step: Any, rows: range, width: int, bits: float) -> list[Any]:
        """Return each part's enclosures of B at the nodes, about as accurate as values of M to `bits` nats."""
        at, found = np.array([float(c.mid())]), []
        for law, (part, count) in zip(self._large(parts), parts, strict=True):
            less = float((part.log_mgf(at) - law.log_mgf(at))[0])
            found.append(law.values(c, step, rows, width, count, max(bits - less, 20.0)))
        return found

    def tail(self, parts: Any, c: Any, t: Any) -> Any:
        """Bound |M - A| of the composition at c + i s, s >= t, by prod M(c)^n times sum n |B|/M(c) over all parts."""
        whole, share = arb(1), arb(0)
        for law, (part, count) in zip(self._large(parts), parts, strict=True):
            mean = part.mean(c)
            whole *= mean**count
            share += count * law.decay(c, t, count) / mean
        return (whole * share).abs_upper()

    def masses(self, parts: Any) -> tuple[Any, Any]:
        """Return the masses, under P and under Q, of the runs whose steps all have a small loss."""
        p, q = arb(1), arb(1)
        for law, (_, count) in zip(self._small(parts), parts, strict=True):
            one, two = law.masses
            p, q = p * one**count, q * two**count
        return p, q

    def delta(self, parts: Any, epsilon: Any) -> Any:
        """Enclose delta's part from runs with small losses only (README.md, "Steps with small loss taken apart")."""
        remove = parts[0][0].direction == "remove"
        a = arb(self.order)
        most = (a * a.log() - (1 + a) * (1 + a).log()).exp() * (-a * epsilon if remove else (1 + a) * epsilon).exp()
        for law, (_, count) in zip(self._small(parts), parts, strict=True):
            most *= law.altered(direction="remove").mean(a) ** count
        rest = between(0, most.abs_upper())
        if remove:
            return rest
        p, q = self.masses(parts)
        return p - epsilon.exp() * q + rest

    def _large(self, parts: Any) -> list[SampledGaussian]:
        return _cut(parts, self.cuts, 1)

    def _small(self, parts: Any) -> list[SampledGaussian]:
        return _cut(parts, self.cuts, -1)


class SplitPlan(NamedTuple):
    """A way to separate steps with small loss."""

    small_loss: SmallLossSteps
    far: float  # length of the sum along the line
    cost: float  # number of products for B


def only_sampled_gaussians(parts: Any) -> bool:
    return bool(parts) and all(type(part) is SampledGaussian for part, _ in parts)


def plan_split(
    parts: Any, c: float, epsilon: float, wanted: float, step: float, most: int, bits: float
) -> SplitPlan | None:
    """Return the cheapest plan or None. All cuts lie at the same multiple of their part's least likelihood ratio."""
    best: SplitPlan | None = None
    ends = sum(count * np.log1p(-float(part.rate.mid())) for part, count in parts)
    gap = epsilon - ends if parts[0][0].direction == "remove" else -ends - epsilon
    if not gap > 0:
        return best
    means = [float(part.log_mgf(np.array([c]))[0]) for part, _ in parts]
    flat = sum(count * mean for mean, (_, count) in zip(means, parts, strict=True))
    weights = [np.log(count) - mean for mean, (_, count) in zip(means, parts, strict=True)]
    for width in (0.06, 0.12, 0.25, 0.5, 1.0):  # widths as shares of min(sigma, 1)
        low, high, order = np.log(gap) - 60.0, np.log(gap), 0.0
        while high - low > 0.2:
            middle = 0.5 * (low + high)
            found = _order(parts, _cuts(parts, float(np.exp(middle)), width), epsilon, gap, wanted)
            low, high = (middle, high) if found else (low, middle)
            order = found or order
        if not order:
            continue
        cuts = _cuts(parts, float(np.exp(low)), width)
        large = _cut(parts, cuts, 1)

        def left_over(t: float, large: list[SampledGaussian] = large) -> float:
            shares = [law.log_decay(c, t) + x for law, x in zip(large, weights, strict=True)]
            return float(flat + np.logaddexp.reduce(shares) - c * epsilon - np.log(t) - 1.1)

        nodes = sum(law.cost(c, bits) for law in large)
        limit = most if best is None else min(most, best.cost / nodes)
        far = where_it_falls_to(left_over, step, limit * step, wanted) if limit > 1 else float("inf")
        if np.isfinite(far):
            best = SplitPlan(SmallLossSteps(cuts, order), far, far / step * nodes)
    return best


def where_it_falls_to(function: Any, low: float, high: float, wanted: float) -> float:
    """Return, to 2 %, the least point in [low, high] where a falling function is at most `wanted`, or inf."""
    if not function(high) <= wanted:
        return float("inf")
    while high > 1.02 * low:
        middle = float(np.sqrt(low * high))
        low, high = (low, middle) if function(middle) <= wanted else (middle, high)
    return high


def _order(parts: Any, cuts: Any, epsilon: float, gap: float, wanted: float) -> float:
    """Return the order at which the bound in `SmallLossSteps.delta` is least, or 0 if that bound is above e^wanted."""
    a = np.geomspace(1.0, 1e5, 24) / gap
    remove = parts[0][0].direction == "remove"
    total = a * np.log(a) - (1 + a) * np.log1p(a) + (-a * epsilon if remove else (1 + a) * epsilon)
    for law, (_, count) in zip(_cut(parts, cuts, -1), parts, strict=True):
        total = total + count * law.altered(direction="remove").log_mgf(a)
    best = int(np.argmin(np.where(np.isnan(total), np.inf, total)))
    return float(a[best]) if total[best] < wanted else 0.0


def _cuts(parts: Any, x: float, width: float) -> tuple[tuple[float, float], ...]:
    """Return a cut for each part, at the output whose likelihood ratio is e^x times the least ratio, 1 - rate."""
    cuts = []
    for part, _ in parts:
        sigma, rate = float(part.sigma.mid()), float(part.rate.mid())
        place = sigma * (np.log1p(-rate) - np.log(rate) + x + np.log(-np.expm1(-x))) + 0.5 / sigma
        cuts.append((float(place), width * min(sigma, 1.0)))
    return tuple(cuts)


def _cut(parts: Any, cuts: Any, side: int) -> list[SampledGaussian]:
    return [
        part.altered(cuts=(Cut(place, width, side), *part.cuts))
        for (part, _), (place, width) in zip(parts, cuts, strict=True)
    ]


def without_largest(parts: Any, wanted: float, width: float) -> list[Any]:
    """Return the parts without their largest outputs. These outputs make M(c) huge, but have P-mass about e^wanted."""
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
    """Bound from above the probability, under P, of the outputs that `without_largest` left out."""
    total = arb(0)
    for part, count in parts:
        (cut,) = part.cuts
        total += count * part.altered(cuts=(replace(cut, side=-cut.side),)).masses[0]
    return total.abs_upper()
