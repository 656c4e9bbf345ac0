"""Samplers with their guarantees: exact integer noise, private choice, and their utility bounds."""

from jaxacct.samplers.choice import ExponentialMechanism, NoisyMax, NoisyMaxGaussian
from jaxacct.samplers.integer import DiscreteGaussianNoise, DiscreteLaplaceNoise
from jaxacct.samplers.sparse import AboveThreshold
from jaxacct.samplers.utility import exponential_epsilon, exponential_error, exponential_failure

__all__ = [
    "AboveThreshold",
    "DiscreteGaussianNoise",
    "DiscreteLaplaceNoise",
    "ExponentialMechanism",
    "NoisyMax",
    "NoisyMaxGaussian",
    "exponential_epsilon",
    "exponential_error",
    "exponential_failure",
]
