"""jaxacct: certified, vectorised differential-privacy accounting on JAX."""

from jaxacct.account import delta, epsilon
from jaxacct.bounds import Bounds, explain
from jaxacct.calibrate import (
    Calibration,
    calibrate_noise_multiplier,
    calibrate_sampling_probability,
    calibrate_steps,
)
from jaxacct.gradient import epsilon_gradient
from jaxacct.mechanisms import (
    ApproximateDP,
    Gaussian,
    Laplace,
    Mechanism,
    PoissonSampled,
    PureDP,
    RandomisedResponse,
    RandomizedResponse,
    compose,
    dp_sgd,
    repeat,
)
from jaxacct.validation import InputError

__all__ = [
    "ApproximateDP",
    "Bounds",
    "Calibration",
    "Gaussian",
    "InputError",
    "Laplace",
    "Mechanism",
    "PoissonSampled",
    "PureDP",
    "RandomisedResponse",
    "RandomizedResponse",
    "calibrate_noise_multiplier",
    "calibrate_sampling_probability",
    "calibrate_steps",
    "compose",
    "delta",
    "dp_sgd",
    "epsilon",
    "epsilon_gradient",
    "explain",
    "repeat",
]
