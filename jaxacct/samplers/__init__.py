"""Samplers with their guarantees: exact integer noise, private choice, and their utility bounds."""

from jaxacct.samplers.choice import ExponentialChoice, GaussianNoisyMaxChoice, NoisyMaxChoice
from jaxacct.samplers.integer import DiscreteGaussianNoise, DiscreteLaplaceNoise
from jaxacct.samplers.sparse import SparseVector
from jaxacct.samplers.utility import exponential_epsilon, exponential_error, exponential_failure

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
