"""Mechanisms (frozen pytrees that describe what is run), and the loss components from which engines compute answers."""

from jaxacct.core.validation import RELATIONS
from jaxacct.mechanisms.additive_noise import (
    DiscreteGaussian,
    DiscreteLaplace,
    Gaussian,
    Laplace,
    SmoothSensitivityGaussian,
)
from jaxacct.mechanisms.base import DIRECTIONS, BaseMechanism, Mechanism, batch_shape
from jaxacct.mechanisms.combinators import Composed, ProposeTestRelease, Repeated, compose, repeat
from jaxacct.mechanisms.concentrated import ZCDP
from jaxacct.mechanisms.dp_sgd_run import SAMPLING, dp_sgd
from jaxacct.mechanisms.finite import ApproximateDP, FiniteOutput, PureDP, RandomisedResponse, RandomizedResponse
from jaxacct.mechanisms.gaussian_mixtures import MixtureOfGaussians
from jaxacct.mechanisms.loss_components import Components, components, directions
from jaxacct.mechanisms.matrix_mechanism import MatrixMechanism
from jaxacct.mechanisms.noisy_choices import (
    AboveThreshold,
    ExponentialMechanism,
    GaussianNoisyMax,
    NumericSparse,
    PartitionSelection,
    ReportNoisyMax,
)
from jaxacct.mechanisms.profile import PrivacyProfile, profile_from_cdfs
from jaxacct.mechanisms.random_allocation import BallsInBins, RandomAllocation
from jaxacct.mechanisms.sampled_batches import (
    PoissonSampled,
    SampledWithoutReplacement,
    SampledWithReplacement,
    TruncatedPoissonSampled,
    cap_for,
)
from jaxacct.mechanisms.shuffled_batches import ShuffledBatches

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
    "MatrixMechanism",
    "Mechanism",
    "MixtureOfGaussians",
    "NumericSparse",
    "PartitionSelection",
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
