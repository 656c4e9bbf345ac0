"""A wide enclosure of delta(eps) at almost no cost: enough to refute what is grossly false.

From below: delta(eps) >= P(S) - e^eps Q(S) for every set S of outcomes, among them the best test of a single step.
From above: Poisson sampled Gaussians leak at most what they leak unsampled, as H_E(P || Q) is convex in P and in Q.
"""

from __future__ import annotations

from typing import Any

from jaxacct.verification.balls import arb, between, gaussian_tail
from jaxacct.verification.finite import Finite
from jaxacct.verification.sampled_gaussian import SampledGauss
from jaxacct.verification.smooth import Gauss

__all__ = ["enclose"]

THRESHOLDS = (1, 2, 3, 4, 5, 6, 8, 10, 14, 20)
"""Where an output of noise 1 is cut."""


def enclose(composition: Any, epsilon: Any) -> Any:
    """A ball that holds delta(epsilon) of a composition in one direction."""
    low, high = composition.infinity.max(0), arb(1)
    for part, count in composition.parts:
        if not count > 0:
            continue
        if hasattr(part, "hockey_stick"):
            low = low.max(part.hockey_stick(epsilon) + (part.infinity if isinstance(part, Finite) else 0))
        if isinstance(part, SampledGauss):
            low = low.max(_any_output(part, count, epsilon))
    if composition.parts and all(isinstance(part, SampledGauss | Gauss) for part, _ in composition.parts):
        square = sum(
            (
                count * (part.square if isinstance(part, Gauss) else 1 / part.sigma**2)
                for part, count in composition.parts
            ),
            arb(0),
        )
        high = high.min(Gauss(square).hockey_stick(epsilon))
    low, high = low.lower(), high.upper()
    # what is left out of integer noise counts for neither side: masses are those of the whole law
    return between(low.max(0), high) if low <= high and high.is_finite() else arb("nan")


def _any_output(law: SampledGauss, count: int, epsilon: Any) -> Any:
    """remove: any of the outputs is above a threshold; add: none is."""
    best, shift, grown = arb(0), 1 / law.sigma, epsilon.exp()
    for place in (*THRESHOLDS, *(shift + k for k in (-3, -1, 0, 2))):
        u = arb(place)
        plain, hit = gaussian_tail(u), gaussian_tail(u - shift)
        mixed = (1 - law.rate) * plain + law.rate * hit
        none, none_mixed = (1 - plain) ** count, (1 - mixed) ** count
        if law.direction == "remove":
            best = best.max((1 - none_mixed) - grown * (1 - none))
        else:
            best = best.max(none - grown * none_mixed)
    return best
