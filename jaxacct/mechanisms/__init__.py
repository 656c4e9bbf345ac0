"""Mechanisms: frozen pytrees that describe what is run, and the components that the engines consume."""

from jaxacct.mechanisms.balls_in_bins import BallsInBins
from jaxacct.mechanisms.base import DIRECTIONS, RELATIONS, BaseMechanism, Mechanism, batch_shape
from jaxacct.mechanisms.combinators import Composed, Repeated, compose, repeat
from jaxacct.mechanisms.concentrated import ZCDP
from jaxacct.mechanisms.discrete import DiscreteGaussian, DiscreteLaplace
from jaxacct.mechanisms.dp_sgd_run import SAMPLING, dp_sgd
from jaxacct.mechanisms.finite import ApproximateDP, PureDP, RandomisedResponse, RandomizedResponse
from jaxacct.mechanisms.finite_output import FiniteOutput
from jaxacct.mechanisms.gaussian import Gaussian
from jaxacct.mechanisms.gaussian_mixture import MixtureOfGaussians
from jaxacct.mechanisms.laplace import Laplace
from jaxacct.mechanisms.loss_components import Components, components, directions
from jaxacct.mechanisms.poisson_sampled import PoissonSampled
from jaxacct.mechanisms.profile import PrivacyProfile, profile_from_cdfs
from jaxacct.mechanisms.propose_test_release import ProposeTestRelease
from jaxacct.mechanisms.random_allocation import RandomAllocation
from jaxacct.mechanisms.selection_by_noise import ExponentialMechanism, GaussianNoisyMax, ReportNoisyMax
from jaxacct.mechanisms.shuffled_batches import ShuffledBatches
from jaxacct.mechanisms.smooth_sensitivity import SmoothSensitivityGaussian
from jaxacct.mechanisms.sparse_vector import AboveThreshold, NumericSparse
from jaxacct.mechanisms.truncated_poisson import TruncatedPoissonSampled, cap_for
from jaxacct.mechanisms.with_replacement import SampledWithReplacement
from jaxacct.mechanisms.without_replacement import SampledWithoutReplacement

__all__ = [
    "DIRECTIONS",
    "RELATIONS",
    "SAMPLING",
    "ZCDP",
    "AboveThreshold",
    "ApproximateDP",
    "BallsInBins",
    "BaseMechanism",
    "Components",
    "Composed",
    "DiscreteGaussian",
    "DiscreteLaplace",
    "ExponentialMechanism",
    "FiniteOutput",
    "Gaussian",
    "GaussianNoisyMax",
    "Laplace",
    "Mechanism",
    "MixtureOfGaussians",
    "NumericSparse",
    "PoissonSampled",
    "PrivacyProfile",
    "ProposeTestRelease",
    "PureDP",
    "RandomAllocation",
    "RandomisedResponse",
    "RandomizedResponse",
    "Repeated",
    "ReportNoisyMax",
    "SampledWithReplacement",
    "SampledWithoutReplacement",
    "ShuffledBatches",
    "SmoothSensitivityGaussian",
    "TruncatedPoissonSampled",
    "batch_shape",
    "cap_for",
    "components",
    "compose",
    "directions",
    "dp_sgd",
    "profile_from_cdfs",
    "repeat",
]
