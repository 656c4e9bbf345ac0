"""Samplers with privacy guarantees: integer noise, private choices with error bounds, and partition selection."""

from jaxacct.samplers.integer_noise import DiscreteGaussianNoise, DiscreteLaplaceNoise, SparseVector
from jaxacct.samplers.private_choice import (
    ExponentialChoice,
    GaussianNoisyMaxChoice,
    NoisyMaxChoice,
    PartitionChoice,
    ThresholdedCounts,
    exponential_error,
)

__all__ = [
    "DiscreteGaussianNoise",
    "DiscreteLaplaceNoise",
    "ExponentialChoice",
    "GaussianNoisyMaxChoice",
    "NoisyMaxChoice",
    "PartitionChoice",
    "SparseVector",
    "ThresholdedCounts",
    "exponential_error",
]
