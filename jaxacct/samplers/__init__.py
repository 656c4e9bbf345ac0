"""Samplers with their guarantees: exact integer noise, private choice, and their utility bounds."""

from jaxacct.samplers.choice_utility import exponential_epsilon, exponential_error, exponential_failure
from jaxacct.samplers.integer_noise import DiscreteGaussianNoise, DiscreteLaplaceNoise
from jaxacct.samplers.private_choice import ExponentialChoice, GaussianNoisyMaxChoice, NoisyMaxChoice
from jaxacct.samplers.sparse_vector import SparseVector

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
