"""A wide enclosure of delta(eps) at almost no cost, which is enough to refute what is grossly false.

From below: delta(eps) >= P(S) - e^eps Q(S) for every set S of outcomes, among them the best test of a single step.
From above: Poisson sampled Gaussians leak at most what they leak unsampled, as H_E(P || Q) is convex in P and in Q.
"""

from __future__ import annotations

from typing import Any

from jaxacct.verification.ball_arithmetic import arb, between, gaussian_tail
from jaxacct.verification.closed_form_losses import GaussianLoss
from jaxacct.verification.finite_losses import FiniteLosses
from jaxacct.verification.sampled_gaussian import SampledGaussian

__all__ = ["enclose"]

THRESHOLDS = (1, 2, 3, 4, 5, 6, 8, 10, 14, 20)
"""Thresholds of the tests, in deviations of the noise: dense where DP-SGD's outputs are, and out to where none is."""


def enclose(composition: Any, epsilon: Any) -> Any:
    """A ball that holds delta(epsilon) of a composition in one direction."""
    low, high = composition.infinity.max(0), arb(1)
    for part, count in composition.parts:
        if not count > 0:
            continue
        if hasattr(part, "hockey_stick"):
            low = low.max(part.hockey_stick(epsilon) + (part.infinity if isinstance(part, FiniteLosses) else 0))
        if type(part) is SampledGaussian:
            low = low.max(_any_output(part, count, epsilon))
    if composition.parts and all(type(part) in (SampledGaussian, GaussianLoss) for part, _ in composition.parts):
        square = sum(
            (
                count * (part.square if isinstance(part, GaussianLoss) else 1 / part.sigma**2)
                for part, count in composition.parts
            ),
            arb(0),
        )
        high = high.min(GaussianLoss(square).hockey_stick(epsilon))
    low, high = low.lower(), high.upper()
    # outcomes of integer noise that are cut off count for neither end: the other masses are those of the whole law
    return between(low.max(0), high) if low <= high and high.is_finite() else arb("nan")


def _any_output(law: SampledGaussian, count: int, epsilon: Any) -> Any:
    """The best of the tests "some output is above a threshold" (remove) or "no output is" (add), as P - e^eps Q."""
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
