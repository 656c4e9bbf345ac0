"""The definition of each mechanism: its privacy loss in one direction, as independent losses each with a count.

This is written from the mechanisms' documentation and shares no code with `Mechanism.expand`, which the engines use.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jaxacct import mechanisms as known
from jaxacct.mechanisms.combinators import Composed, Repeated
from jaxacct.validation import InputError
from jaxacct.verification import batch_rules
from jaxacct.verification.ball_arithmetic import arb, ball
from jaxacct.verification.closed_form_losses import BoundedRange, GaussianLoss, LaplaceLoss, SampledLaplace
from jaxacct.verification.finite_losses import FiniteLosses, from_masses
from jaxacct.verification.gaussian_mixture import GaussianMixture
from jaxacct.verification.result import NotCovered
from jaxacct.verification.sampled_gaussian import SampledGaussian

__all__ = ["Composition", "directions", "expand"]

REVERSED = " of the laws in reverse"
"""Ending of the name of a direction in which the two laws of FiniteOutput have changed places."""


@dataclass(frozen=True)
class Composition:
    """Independent losses, each with its count."""

    parts: tuple[tuple[Any, int], ...]

    @property
    def infinity(self) -> Any:
        """The P-mass of an infinite loss: 1 less the product of what each part keeps finite."""
        kept = arb(1)
        for part, count in self.parts:
            if isinstance(part, FiniteLosses) and not part.infinity.is_zero():
                kept *= (1 - part.infinity) ** count
        return 1 - kept

    @property
    def cut(self) -> Any:
        """Upper bound of the P-mass of runs in which a step of integer noise leaves the outcomes that are kept."""
        return sum((count * part.cut for part, count in self.parts if isinstance(part, FiniteLosses)), arb(0))

    @property
    def lost(self) -> Any:
        """Upper bound of the P-mass of contributions to a sampled batch that are left out."""
        return sum((count * part.lost for part, count in self.parts if isinstance(part, GaussianMixture)), arb(0))

    @property
    def keys(self) -> frozenset[Any]:
        """What is composed; equal for two directions whose losses have the same law."""
        return frozenset((part.key, count) for part, count in self.parts)

    @property
    def largest(self) -> Any:
        """The largest finite loss; None where the losses are unbounded."""
        total = arb(0)
        for part, count in self.parts:
            if part.largest is None:
                return None
            total += count * part.largest
        return total


def expand(mechanism: Any, relation: str, direction: str) -> Composition:
    """The losses of one configuration in one of `directions` of a neighbouring relation."""
    if relation == "zero_out" and mechanism.displaces() and not batch_rules.knows(mechanism, relation):
        raise NotCovered("zero_out where a record displaces others")
    if isinstance(mechanism, known.SampledWithoutReplacement) and not batch_rules.knows(mechanism, relation):
        base = mechanism.mechanism
        if direction.endswith(REVERSED):
            base = known.FiniteOutput(base.q, base.p)
        if isinstance(base, known.PrivacyProfile):
            raise NotCovered("PrivacyProfile sampled without replacement")
        rate, way = ball(mechanism.sampling_ratio), direction.removesuffix(REVERSED)
        found = [] if rate.is_zero() else _sampled(base, rate, "replace_one", way)
    else:
        found = _parts(mechanism, relation, direction, 1)
    square = arb(0)
    counts: dict[Any, tuple[Any, int]] = {}
    for part, count in found:
        if isinstance(part, GaussianLoss):
            square += count * part.square
            continue
        before = counts.get(part.key, (part, 0))[1]
        counts[part.key] = (part, before + count)
    parts = list(counts.values())
    if not square.is_zero():
        parts.append((GaussianLoss(square), 1))
    return Composition(tuple(parts))


def directions(mechanism: Any, relation: str) -> tuple[str, ...]:
    """The directions of which the relation's delta is the largest: both, unless the relation names one.

    One step without replacement: under replace_one delta is the remove direction's for eps >= 0, and the two laws of
    FiniteOutput stand either way round.
    """
    names: tuple[str, ...] = ("remove", "add")
    if relation in ("add_one", "remove_one"):
        names = (relation.split("_")[0],)
    if isinstance(mechanism, known.SampledWithoutReplacement) and not batch_rules.knows(mechanism, relation):
        if relation == "replace_one":
            names = ("remove",) if not bool(mechanism.sampling_ratio == 1) else names
        if isinstance(mechanism.mechanism, known.FiniteOutput):
            names = (*names, *(name + REVERSED for name in names))
    return names


def _parts(mechanism: Any, relation: str, direction: str, count: int) -> list[tuple[Any, int]]:
    if isinstance(mechanism, Repeated):
        return _parts(mechanism.mechanism, relation, direction, count * int(mechanism.steps))
    if isinstance(mechanism, Composed):
        return [item for inner in mechanism.mechanisms for item in _parts(inner, relation, direction, count)]
    if batch_rules.knows(mechanism, relation):
        return [(part, n * count) for part, n in batch_rules.parts(mechanism, relation, direction)]
    rate, base = arb(1), mechanism
    while isinstance(base, known.PoissonSampled):
        rate *= ball(base.sampling_probability)
        base = base.mechanism
    if not (rate == 1 or rate.is_zero()) and relation == "replace_one":
        raise InputError("relation = 'replace_one' is not defined for Poisson sampling; use 'add_or_remove_one'")
    if isinstance(base, known.SampledWithoutReplacement) and base is mechanism:
        rate, base = ball(base.sampling_ratio), base.mechanism
        if relation == "replace_one" and not (rate == 1 or rate.is_zero()):
            raise NotCovered("sampling without replacement, composed, under replace_one")
        if isinstance(base, known.FiniteOutput | known.PrivacyProfile):
            raise NotCovered(f"{type(base).__name__} sampled without replacement and composed")
        relation = "replace_one"
    if rate.is_zero():
        return []
    return [(part, count * n) for part, n in _sampled(base, rate, relation, direction)]


def _sampled(base: Any, rate: Any, relation: str, direction: str) -> list[tuple[Any, int]]:
    """A base mechanism Poisson sampled at a rate in (0, 1]."""
    moved = 2 if relation == "replace_one" else 1
    whole = bool(rate == 1)
    if isinstance(base, known.Gaussian):
        deviation = ball(base.noise_multiplier) / moved
        return [(GaussianLoss(1 / deviation**2) if whole else SampledGaussian(deviation, rate, direction), 1)]
    if isinstance(base, known.Laplace):
        top = moved / ball(base.scale)
        return [(LaplaceLoss(top) if whole else SampledLaplace(top, rate, direction), 1)]
    if isinstance(base, known.ExponentialMechanism) or (
        isinstance(base, known.ReportNoisyMax) and base.noise == "gumbel"
    ):
        if not whole:
            raise NotCovered(f"{type(base).__name__} under sampling")
        top = ball(base.epsilon)
        return [(BoundedRange(top), 1)] if not top.is_zero() else []
    if isinstance(base, known.NumericSparse) and whole:
        finding = known.AboveThreshold(base.threshold_scale, base.query_scale, base.answers, base.monotone)
        found = _sampled(finding, rate, relation, direction)
        return [*found, (LaplaceLoss(moved / ball(base.value_scale)), int(base.answers))]
    return [(from_masses(base, rate, relation, direction, moved), 1)]
