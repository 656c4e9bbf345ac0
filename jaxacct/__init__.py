"""jaxacct: certified, vectorised differential-privacy accounting on JAX.

Public names are imported when first used, so that `import jaxacct` and `jaxacct --help` are quick.
"""

from typing import TYPE_CHECKING

from jaxacct.core.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from jaxacct.accounting.account import delta, epsilon
    from jaxacct.accounting.gradient import epsilon_gradient
    from jaxacct.calibration.allowed_repetitions import AllowedRepetitions, repetitions_allowed
    from jaxacct.calibration.any_parameter import calibrate
    from jaxacct.calibration.noise_rate_steps import (
        Calibration,
        calibrate_noise_multiplier,
        calibrate_sampling_probability,
        calibrate_steps,
    )
    from jaxacct.core.bounds import Bounds, explain
    from jaxacct.core.validation import InputError
    from jaxacct.engines.programs import CacheInfo, cache_info, clear_cache
    from jaxacct.mechanisms import (
        ZCDP,
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
        MatrixMechanism,
        Mechanism,
        MixtureOfGaussians,
        NumericSparse,
        PartitionSelection,
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
    from jaxacct.plots import plot_profiles, plot_risks, plot_tradeoffs
    from jaxacct.representations.mechanism_profile import Profile, profile
    from jaxacct.representations.renyi_divergences import rdp_delta, rdp_epsilon
    from jaxacct.representations.risk_table import RiskTable, risk
    from jaxacct.sweeps import sweep
    from jaxacct.verification import Verification, verify

__all__ = [
    "ZCDP",
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
    "MatrixMechanism",
    "Mechanism",
    "MixtureOfGaussians",
    "NumericSparse",
    "PartitionSelection",
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
    "plot_risks",
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

_HOMES = dict.fromkeys(__all__, "mechanisms") | {
    **dict.fromkeys(("delta", "epsilon"), "accounting.account"),
    "epsilon_gradient": "accounting.gradient",
    **dict.fromkeys(("AllowedRepetitions", "repetitions_allowed"), "calibration.allowed_repetitions"),
    "calibrate": "calibration.any_parameter",
    **dict.fromkeys(
        ("Calibration", "calibrate_noise_multiplier", "calibrate_sampling_probability", "calibrate_steps"),
        "calibration.noise_rate_steps",
    ),
    **dict.fromkeys(("Bounds", "explain"), "core.bounds"),
    "InputError": "core.validation",
    **dict.fromkeys(("CacheInfo", "cache_info", "clear_cache"), "engines.programs"),
    **dict.fromkeys(("plot_profiles", "plot_risks", "plot_tradeoffs"), "plots"),
    **dict.fromkeys(("Profile", "profile"), "representations.mechanism_profile"),
    **dict.fromkeys(("rdp_delta", "rdp_epsilon"), "representations.renyi_divergences"),
    **dict.fromkeys(("RiskTable", "risk"), "representations.risk_table"),
    "sweep": "sweeps",
    **dict.fromkeys(("Verification", "verify"), "verification"),
}
"""Module of each public name, relative to `jaxacct`. Names that are not listed one by one are in `mechanisms`."""
if not TYPE_CHECKING:  # a type checker that sees `__getattr__` would accept every misspelt name
    __getattr__, __dir__ = lazy_exports(__name__, _HOMES, "__version__")
