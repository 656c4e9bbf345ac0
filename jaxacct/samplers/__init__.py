"""Samplers with their guarantees: exact integer noise and private choices, with bounds of a choice's utility."""

from jaxacct.samplers.integer_noise import DiscreteGaussianNoise, DiscreteLaplaceNoise, SparseVector
from jaxacct.samplers.private_choice import (
    ExponentialChoice,
    GaussianNoisyMaxChoice,
    NoisyMaxChoice,
    exponential_epsilon,
    exponential_error,
    exponential_failure,
)

__all__ = [
    "DiscreteGaussianNoise",
    "DiscreteLaplaceNoise",
    "ExponentialChoice",
    "GaussianNoisyMaxChoice",
    "NoisyMaxChoice",
    "SparseVector",
    "exponential_epsilon",
    "exponential_error",
    "exponential_failure",
]
