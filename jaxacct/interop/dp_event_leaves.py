"""The mechanism of a DpEvent that has no other event in it; None where no noise protects it."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from jaxacct.interop.dp_event_fields import checked, number, numbers, refuse, rounded, whole
from jaxacct.mechanisms import (
    ZCDP,
    ApproximateDP,
    DiscreteGaussian,
    DiscreteLaplace,
    ExponentialMechanism,
    Gaussian,
    Laplace,
    Mechanism,
    MixtureOfGaussians,
    PureDP,
    RandomizedResponse,
    ReportNoisyMax,
    TruncatedPoissonSampled,
    repeat,
)

__all__ = ["LARGEST_DATASET", "LEAVES"]

LARGEST_SCALE = 1e300
"""The scale of discrete Laplace noise whose parameter is so small that its inverse may be beyond float64."""
LARGEST_DATASET = 10**9
"""Most records of a data set from which samples of a capped or a fixed size are drawn."""

Leaf = Callable[[Any, str], Mechanism | None]


def _additive(mechanism: Callable[[Any], Mechanism]) -> Leaf:
    def build(event: Any, path: str) -> Mechanism | None:
        noise = number(event, "noise_multiplier", path)
        return None if noise == 0 else checked(event, path, lambda: mechanism(noise))

    return build


def _by_epsilon(mechanism: Callable[[Any], Mechanism]) -> Leaf:
    return lambda event, path: checked(event, path, lambda: mechanism(number(event, "epsilon", path)))


def _response(event: Any, path: str) -> Mechanism | None:
    k, noise = number(event, "num_buckets", path), number(event, "noise_parameter", path)
    if not isinstance(k, int):
        refuse(event, path, f"num_buckets = {k!r:.30} must be a whole number from 1 to 2**53; use the answers' number")
    k = whole(event, "num_buckets", path, 1)
    if not 0 <= noise <= 1:
        refuse(event, path, f"noise_parameter = {noise!r:.30} must be between 0 and 1; use a probability")
    if k == 1:
        return PureDP(0.0)
    truth = rounded(1 - Fraction(noise) * Fraction(k - 1, k), 1.0)
    if truth == 1.0:
        return None
    return checked(event, path, lambda: RandomizedResponse(truth, k))


def _discrete_laplace(event: Any, path: str) -> Mechanism | None:
    noise = number(event, "noise_parameter", path)
    if noise == 0:
        return None
    if not 0 < noise < math.inf:
        refuse(event, path, f"noise_parameter = {noise!r:.30} must be >= 0 and finite; use the inverse of the scale")
    scale = rounded(1 / Fraction(noise), 0.0) if noise > 1 / LARGEST_SCALE else LARGEST_SCALE
    moved: Any = number(event, "sensitivity", path)  # the constructor refuses what is no integer
    return checked(event, path, lambda: DiscreteLaplace(scale, moved))


def _discrete_gaussian(event: Any, path: str) -> Mechanism | None:
    """The noise itself in one dimension; otherwise its zCDP, which does not depend on how the shift is spread."""
    sigma, moved, dimension = number(event, "sigma", path), number(event, "sensitivity", path), event.dimension
    if dimension is not None and (type(dimension) is not int or dimension < 1):
        refuse(event, path, f"dimension = {dimension!r:.30} must be a whole number or None; use that of the vector")
    if dimension != 1:
        for name, value in (("sigma", sigma), ("sensitivity", moved)):
            if not 0 <= value < math.inf:
                refuse(event, path, f"{name} = {value!r:.30} must be >= 0 and finite; use that of the noise")
        if moved == 0 or sigma == 0:
            return PureDP(0.0) if moved == 0 else None
        rho = Fraction(moved) ** 2 / (2 * Fraction(sigma) ** 2)
        return checked(event, path, lambda: ZCDP(rounded(rho, math.inf)))
    if moved == 0:
        return PureDP(0.0)
    whole(event, "sensitivity", path, 1)
    return None if sigma == 0 else checked(event, path, lambda: DiscreteGaussian(sigma, int(moved)))


def _mixture(event: Any, path: str) -> Mechanism | None:
    sigma = number(event, "standard_deviation", path)
    shifts, chances = (numbers(event, name, path) for name in ("sensitivities", "sampling_probs"))
    mixture = checked(event, path, lambda: MixtureOfGaussians(sigma or 1.0, shifts, chances))
    if not any(shift * chance for shift, chance in zip(shifts, chances, strict=True)):
        return PureDP(0.0)
    return mixture if sigma != 0 else None


def _guarantee(event: Any, path: str) -> Mechanism | None:
    epsilon, delta = number(event, "epsilon", path), number(event, "delta", path)
    if delta == 1:
        return None
    return checked(event, path, lambda: ApproximateDP(epsilon, delta) if delta != 0 else PureDP(epsilon))


def _zcdp(event: Any, path: str) -> Mechanism | None:
    rho, xi = (number(event, name, path) for name in ("rho", "xi"))
    for name, value in (("rho", rho), ("xi", xi)):
        if not 0 <= value < math.inf:
            refuse(event, path, f"{name} = {value!r:.30} must be >= 0 and finite; use the numbers of the guarantee")
    return checked(event, path, lambda: ZCDP(float(rho), float(xi)) if rho > 0 else PureDP(float(xi)))


def _tree(event: Any, path: str) -> Mechanism | None:
    """A record is in one leaf of one tree, and changes the nodes above it: as many as the steps have binary digits."""
    counts = event.step_counts
    counts = list(counts) if type(counts) in (list, tuple) else [counts]
    if not counts or any(type(n) is not int or not 0 <= n <= 2**53 for n in counts):
        refuse(event, path, "step_counts must be one or more whole numbers from 0 to 2**53; use the steps of each tree")
    noise, depth = number(event, "noise_multiplier", path), max(counts).bit_length()
    if depth == 0:
        return PureDP(0.0)
    return None if noise == 0 else checked(event, path, lambda: repeat(Gaussian(noise), depth))


def _capped(event: Any, path: str) -> Mechanism | None:
    size, cap = (whole(event, name, path, 0, LARGEST_DATASET) for name in ("dataset_size", "truncated_batch_size"))
    rate, noise = number(event, "sampling_probability", path), number(event, "noise_multiplier", path)
    build = lambda: TruncatedPoissonSampled(Gaussian(noise or 1.0), rate, max(size, 1), max(cap, 1))
    step = checked(event, path, build)
    if 0 in (size, cap, rate):
        return PureDP(0.0)
    return step if noise != 0 else None


LEAVES: dict[str, Leaf] = {
    "NoOpDpEvent": lambda event, path: PureDP(0.0),
    "NonPrivateDpEvent": lambda event, path: None,
    "GaussianDpEvent": _additive(Gaussian),
    "LaplaceDpEvent": _additive(Laplace),
    "DiscreteLaplaceDpEvent": _discrete_laplace,
    "DiscreteGaussianDpEvent": _discrete_gaussian,
    "MixtureOfGaussiansDpEvent": _mixture,
    "RandomizedResponseDpEvent": _response,
    "ExponentialMechanismDpEvent": _by_epsilon(ExponentialMechanism),
    "PermuteAndFlipDpEvent": _by_epsilon(lambda epsilon: ReportNoisyMax(epsilon, "exponential")),
    "EpsilonDeltaDpEvent": _guarantee,
    "ZCDpEvent": _zcdp,
    "SingleEpochTreeAggregationDpEvent": _tree,
    "TruncatedSubsampledGaussianDpEvent": _capped,
}
"""By the name of the event's class, which dp_accounting's dp_event must have; not every version has all."""
