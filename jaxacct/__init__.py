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
        calibrate_noise_multiplier,
        calibrate_sampling_probability,
        calibrate_steps,
    )
    from jaxacct.engines.program_cache import CacheInfo, cache_info, clear_cache
    from jaxacct.gradient import epsilon_gradient
    from jaxacct.mechanism_calibration import calibrate
    from jaxacct.mechanisms import (
        AboveThreshold,
        ApproximateDP,
        BallsInBins,
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
        RandomAllocation,
        RandomisedResponse,
        RandomizedResponse,
        ReportNoisyMax,
        SampledWithoutReplacement,
        SampledWithReplacement,
        ShuffledBatches,
        SmoothSensitivityGaussian,
        TruncatedPoissonSampled,
        cap_for,
        compose,
        dp_sgd,
        profile_from_cdfs,
        repeat,
    )
    from jaxacct.plots import plot_profiles, plot_tradeoffs
    from jaxacct.representations.mechanism_profile import Profile, profile
    from jaxacct.representations.renyi_accounting import rdp_delta, rdp_epsilon
    from jaxacct.representations.risk_table import RiskTable, risk
    from jaxacct.selection.allowed_repetitions import AllowedRepetitions, repetitions_allowed
    from jaxacct.sweep import sweep
    from jaxacct.validation import InputError
    from jaxacct.verification import Verification, verify

__all__ = [
    "AboveThreshold",
    "AllowedRepetitions",
    "ApproximateDP",
    "BallsInBins",
    "Bounds",
    "CacheInfo",
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
    "RandomAllocation",
    "RandomisedResponse",
    "RandomizedResponse",
    "ReportNoisyMax",
    "RiskTable",
    "SampledWithReplacement",
    "SampledWithoutReplacement",
    "ShuffledBatches",
    "SmoothSensitivityGaussian",
    "TruncatedPoissonSampled",
    "Verification",
    "cache_info",
    "calibrate",
    "calibrate_noise_multiplier",
    "calibrate_sampling_probability",
    "calibrate_steps",
    "cap_for",
    "clear_cache",
    "compose",
    "delta",
    "dp_sgd",
    "epsilon",
    "epsilon_gradient",
    "explain",
    "plot_profiles",
    "plot_tradeoffs",
    "profile",
    "profile_from_cdfs",
    "rdp_delta",
    "rdp_epsilon",
    "repeat",
    "repetitions_allowed",
    "risk",
    "sweep",
    "verify",
]

__version__ = "0.1.0"

_HOMES = {
    "AboveThreshold": "mechanisms",
    "AllowedRepetitions": "selection.allowed_repetitions",
    "ApproximateDP": "mechanisms",
    "BallsInBins": "mechanisms",
    "Bounds": "bounds",
    "CacheInfo": "engines.program_cache",
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
    "Profile": "representations.mechanism_profile",
    "ProposeTestRelease": "mechanisms",
    "PureDP": "mechanisms",
    "RandomAllocation": "mechanisms",
    "RandomisedResponse": "mechanisms",
    "RandomizedResponse": "mechanisms",
    "ReportNoisyMax": "mechanisms",
    "RiskTable": "representations.risk_table",
    "SampledWithReplacement": "mechanisms",
    "SampledWithoutReplacement": "mechanisms",
    "ShuffledBatches": "mechanisms",
    "SmoothSensitivityGaussian": "mechanisms",
    "TruncatedPoissonSampled": "mechanisms",
    "Verification": "verification",
    "cache_info": "engines.program_cache",
    "calibrate": "mechanism_calibration",
    "calibrate_noise_multiplier": "calibration",
    "calibrate_sampling_probability": "calibration",
    "calibrate_steps": "calibration",
    "cap_for": "mechanisms",
    "clear_cache": "engines.program_cache",
    "compose": "mechanisms",
    "delta": "account",
    "dp_sgd": "mechanisms",
    "epsilon": "account",
    "epsilon_gradient": "gradient",
    "explain": "bounds",
    "plot_profiles": "plots",
    "plot_tradeoffs": "plots",
    "profile": "representations.mechanism_profile",
    "profile_from_cdfs": "mechanisms",
    "rdp_delta": "representations.renyi_accounting",
    "rdp_epsilon": "representations.renyi_accounting",
    "repeat": "mechanisms",
    "repetitions_allowed": "selection.allowed_repetitions",
    "risk": "representations.risk_table",
    "sweep": "sweep",
    "verify": "verification",
}
if not TYPE_CHECKING:  # a checker that sees `__getattr__` would accept every misspelt name
    __getattr__, __dir__ = lazy_exports(__name__, _HOMES, "__version__")
