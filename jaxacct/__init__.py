"""jaxacct: certified, vectorised differential-privacy accounting on JAX.

Public names are imported when first used, so that `import jaxacct` and `jaxacct --help` are quick.
"""

from typing import TYPE_CHECKING

from jaxacct.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from jaxacct.account import delta, epsilon
    from jaxacct.bounds import Bounds, explain
    from jaxacct.calibration import (
        Calibration,
        calibrate,
        calibrate_noise_multiplier,
        calibrate_sampling_probability,
        calibrate_steps,
    )
    from jaxacct.gradient import epsilon_gradient
    from jaxacct.mechanisms import (
        AboveThreshold,
        ApproximateDP,
        DiscreteGaussian,
        DiscreteLaplace,
        ExponentialMechanism,
        FiniteOutput,
        Gaussian,
        GaussianNoisyMax,
        Laplace,
        Mechanism,
        MixtureOfGaussians,
        NumericSparse,
        PoissonSampled,
        PrivacyProfile,
        ProposeTestRelease,
        PureDP,
        RandomisedResponse,
        RandomizedResponse,
        ReportNoisyMax,
        SampledWithoutReplacement,
        SmoothSensitivityGaussian,
        compose,
        dp_sgd,
        profile_from_cdfs,
        repeat,
    )
    from jaxacct.representations.profile import Profile, profile
    from jaxacct.representations.rdp import rdp_delta, rdp_epsilon
    from jaxacct.selection.allowed import AllowedRepetitions, repetitions_allowed
    from jaxacct.sweep import sweep
    from jaxacct.validation import InputError
    from jaxacct.verification import Verification, verify

__all__ = [
    "AboveThreshold",
    "AllowedRepetitions",
    "ApproximateDP",
    "Bounds",
    "Calibration",
    "DiscreteGaussian",
    "DiscreteLaplace",
    "ExponentialMechanism",
    "FiniteOutput",
    "Gaussian",
    "GaussianNoisyMax",
    "InputError",
    "Laplace",
    "Mechanism",
    "MixtureOfGaussians",
    "NumericSparse",
    "PoissonSampled",
    "PrivacyProfile",
    "Profile",
    "ProposeTestRelease",
    "PureDP",
    "RandomisedResponse",
    "RandomizedResponse",
    "ReportNoisyMax",
    "SampledWithoutReplacement",
    "SmoothSensitivityGaussian",
    "Verification",
    "calibrate",
    "calibrate_noise_multiplier",
    "calibrate_sampling_probability",
    "calibrate_steps",
    "compose",
    "delta",
    "dp_sgd",
    "epsilon",
    "epsilon_gradient",
    "explain",
    "profile",
    "profile_from_cdfs",
    "rdp_delta",
    "rdp_epsilon",
    "repeat",
    "repetitions_allowed",
    "sweep",
    "verify",
]

__version__ = "0.1.0"

_HOMES = {
    "AboveThreshold": "mechanisms",
    "AllowedRepetitions": "selection.allowed",
    "ApproximateDP": "mechanisms",
    "Bounds": "bounds",
    "Calibration": "calibration",
    "DiscreteGaussian": "mechanisms",
    "DiscreteLaplace": "mechanisms",
    "ExponentialMechanism": "mechanisms",
    "FiniteOutput": "mechanisms",
    "Gaussian": "mechanisms",
    "GaussianNoisyMax": "mechanisms",
    "InputError": "validation",
    "Laplace": "mechanisms",
    "Mechanism": "mechanisms",
    "MixtureOfGaussians": "mechanisms",
    "NumericSparse": "mechanisms",
    "PoissonSampled": "mechanisms",
    "PrivacyProfile": "mechanisms",
    "Profile": "representations.profile",
    "ProposeTestRelease": "mechanisms",
    "PureDP": "mechanisms",
    "RandomisedResponse": "mechanisms",
    "RandomizedResponse": "mechanisms",
    "ReportNoisyMax": "mechanisms",
    "SampledWithoutReplacement": "mechanisms",
    "SmoothSensitivityGaussian": "mechanisms",
    "Verification": "verification",
    "calibrate": "calibration",
    "calibrate_noise_multiplier": "calibration",
    "calibrate_sampling_probability": "calibration",
    "calibrate_steps": "calibration",
    "compose": "mechanisms",
    "delta": "account",
    "dp_sgd": "mechanisms",
    "epsilon": "account",
    "epsilon_gradient": "gradient",
    "explain": "bounds",
    "profile": "representations.profile",
    "profile_from_cdfs": "mechanisms",
    "rdp_delta": "representations.rdp",
    "rdp_epsilon": "representations.rdp",
    "repeat": "mechanisms",
    "repetitions_allowed": "selection.allowed",
    "sweep": "sweep",
    "verify": "verification",
}
if not TYPE_CHECKING:  # a checker that sees `__getattr__` would accept every misspelt name
    __getattr__, __dir__ = lazy_exports(__name__, _HOMES, "__version__")
