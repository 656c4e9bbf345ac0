"""The DpEvent of a mechanism: the inverse of `from_dp_event` (needs the dp_accounting package)."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
from dp_accounting import dp_event

from jaxacct.core.validation import InputError, refuse_tracers
from jaxacct.interop.dp_event_fields import LARGEST_WHOLE, rounded
from jaxacct.mechanisms import (
    ApproximateDP,
    DiscreteGaussian,
    DiscreteLaplace,
    ExponentialMechanism,
    Gaussian,
    Laplace,
    Mechanism,
    MixtureOfGaussians,
    PoissonSampled,
    PureDP,
    RandomAllocation,
    RandomizedResponse,
    ReportNoisyMax,
    SampledWithoutReplacement,
    SampledWithReplacement,
    TruncatedPoissonSampled,
    batch_shape,
)
from jaxacct.mechanisms.combinators import Composed, Repeated
from jaxacct.selection import Poisson, Selection, TruncatedNegativeBinomial

__all__ = ["to_dp_event"]

SIMPLEST = 10**6
"""Data set size up to which the simplest ratio is looked for that is a sampling ratio to the last bit."""


def to_dp_event(mechanism: Mechanism) -> dp_event.DpEvent:
    """The DpEvent of a single mechanism (no batch): the inverse of `from_dp_event`.

    Randomized response needs a probability of at least 1/k. Its noise parameter is rounded down, so that the event
    never promises more. A sampling ratio becomes the smallest sample and data set that give it. dp_accounting 0.6.0 has
    no event for PureDP(epsilon > 0), ApproximateDP, DiscreteGaussian, ExponentialMechanism, ReportNoisyMax and
    RandomAllocation; later versions have.

    Parameters
    ----------
    mechanism : Mechanism
        One configuration.

    Returns
    -------
    dp_accounting.dp_event.DpEvent

    Raises
    ------
    InputError
        A batch, or a mechanism that has no event.

    References
    ----------
    dp_accounting's dp_event.py says what each event means.

    >>> from jaxacct.mechanisms import dp_sgd
    >>> to_dp_event(dp_sgd(1.0, 0.5, 10)).count
    10
    """
    shape = batch_shape(mechanism)
    refuse_tracers("interop.to_dp_event", "the mechanism outside jit", mechanism=mechanism)
    if shape:
        raise InputError(f"a batch of shape {shape} has no DpEvent; convert one configuration at a time")
    return _event(mechanism.validated())


def _event(mechanism: Mechanism) -> dp_event.DpEvent:
    match mechanism:
        case Repeated():
            return _of("SelfComposedDpEvent", mechanism)(_event(mechanism.mechanism), int(mechanism.steps))
        case Composed():
            return _of("ComposedDpEvent", mechanism)([_event(item) for item in mechanism.mechanisms])
        case PoissonSampled(group=1):
            rate = mechanism.sampling_probability
            return _of("PoissonSampledDpEvent", mechanism)(rate, _event(mechanism.mechanism))
        case SampledWithoutReplacement(group=1):
            drawn, size = _sizes(mechanism.sampling_ratio)
            return _of("SampledWithoutReplacementDpEvent", mechanism)(size, drawn, _event(mechanism.mechanism))
        case SampledWithReplacement(group=1):
            sizes = int(mechanism.dataset_size), int(mechanism.batch_size)
            return _of("SampledWithReplacementDpEvent", mechanism)(*sizes, _event(mechanism.mechanism))
        case TruncatedPoissonSampled():
            size, cap = int(mechanism.dataset_size), int(mechanism.cap)
            noise = mechanism.mechanism.noise_multiplier
            return _of("TruncatedSubsampledGaussianDpEvent", mechanism)(
                size, mechanism.sampling_probability, cap, noise
            )
        case RandomAllocation():
            return _of("RandomAllocationDpEvent", mechanism)(
                event=_event(mechanism.mechanism),
                num_selected=int(mechanism.participations),
                num_steps=int(mechanism.slots),
            )
        case Selection(bound="worst_case", law=Poisson() | TruncatedNegativeBinomial()):
            return _selection_event(mechanism)
    return _leaf(mechanism)


def _leaf(mechanism: Mechanism) -> dp_event.DpEvent:
    match mechanism:
        case Gaussian():
            return dp_event.GaussianDpEvent(mechanism.noise_multiplier)
        case Laplace():
            return dp_event.LaplaceDpEvent(mechanism.scale)
        case DiscreteLaplace():
            noise = rounded(1 / Fraction(mechanism.scale), math.inf)
            return _of("DiscreteLaplaceDpEvent", mechanism)(noise, mechanism.sensitivity)
        case DiscreteGaussian():
            return _of("DiscreteGaussianDpEvent", mechanism)(
                sigma=mechanism.sigma, sensitivity=mechanism.sensitivity, dimension=1
            )
        case MixtureOfGaussians():
            shifts, chances = (np.asarray(x).tolist() for x in (mechanism.sensitivities, mechanism.probabilities))
            return _of("MixtureOfGaussiansDpEvent", mechanism)(mechanism.noise_multiplier, shifts, chances)
        case PureDP(epsilon=0.0):
            return dp_event.NoOpDpEvent()
        case PureDP():
            return _of("EpsilonDeltaDpEvent", mechanism)(mechanism.epsilon, 0.0)
        case ApproximateDP():
            return _of("EpsilonDeltaDpEvent", mechanism)(mechanism.epsilon, mechanism.delta)
        case ExponentialMechanism() | ReportNoisyMax(noise="gumbel"):
            return _of("ExponentialMechanismDpEvent", mechanism)(mechanism.epsilon)
        case ReportNoisyMax(noise="exponential"):
            return _of("PermuteAndFlipDpEvent", mechanism)(mechanism.epsilon)
        case RandomizedResponse():
            return _response_event(mechanism)
    raise InputError(f"{type(mechanism).__name__} has no DpEvent; account for it with jaxacct.epsilon")


def _of(name: str, mechanism: Mechanism) -> Callable[..., Any]:
    """The event class of a name, refused where the installed dp_accounting has none."""
    found: Callable[..., Any] | None = getattr(dp_event, name, None)
    if found is None:
        raise InputError(
            f"{type(mechanism).__name__} has no DpEvent: the installed dp_accounting lacks {name}; account for it with "
            "jaxacct.epsilon"
        )
    return found


def _response_event(mechanism: RandomizedResponse) -> dp_event.DpEvent:
    k, truth = mechanism.categories, Fraction(mechanism.probability)
    exact = (1 - truth) * Fraction(k, k - 1)
    if exact > 1:
        raise InputError(f"probability = {mechanism.probability!r} must be >= 1/{k} to have a DpEvent; ask ja.epsilon")
    return _of("RandomizedResponseDpEvent", mechanism)(rounded(exact, 0.0), k)


def _selection_event(mechanism: Selection) -> dp_event.DpEvent:
    law = mechanism.law
    mean, shape = float(law.mean), math.inf if isinstance(law, Poisson) else float(law.eta)
    if mean < 1.0 or shape < 0.0:
        raise InputError(
            f"a law of K with mean {mean!r} and eta {shape!r} has no DpEvent; it needs mean >= 1, eta >= 0"
        )
    return _of("RepeatAndSelectDpEvent", mechanism)(_event(mechanism.mechanism), mean, shape)


def _sizes(ratio: float) -> tuple[int, int]:
    """Sample and data set whose ratio, rounded up, is this one."""
    for exact in (Fraction(ratio).limit_denominator(SIMPLEST), Fraction(ratio)):
        if exact.denominator <= LARGEST_WHOLE and rounded(exact, 1.0) == ratio:
            return exact.numerator, exact.denominator
    raise InputError(f"sampling_ratio = {ratio!r} is no ratio of whole numbers up to 2**53; use a larger one")
