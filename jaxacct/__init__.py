"""jaxacct: certified, vectorised differential-privacy accounting on JAX.

Public names are imported when first used, so that `import jaxacct` and `jaxacct --help` are quick.
"""

from jaxacct.lazy import names

_HOMES = {
    "account": ("delta", "epsilon"),
    "bounds": ("Bounds", "explain"),
    "calibrate": (
        "Calibration",
        "calibrate_noise_multiplier",
        "calibrate_sampling_probability",
        "calibrate_steps",
    ),
    "gradient": ("epsilon_gradient",),
    "mechanisms": (
        "AboveThreshold",
        "ApproximateDP",
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
        "RandomisedResponse",
        "RandomizedResponse",
        "ReportNoisyMax",
        "SampledWithoutReplacement",
        "SmoothSensitivityGaussian",
        "compose",
        "dp_sgd",
        "profile_from_cdfs",
        "repeat",
    ),
    "representations.mechanism_profile": ("Profile", "profile"),
    "representations.renyi_accounting": ("rdp_delta", "rdp_epsilon"),
    "selection.allowed": ("AllowedRepetitions", "repetitions_allowed"),
    "sweep": ("sweep",),
    "validation": ("InputError",),
    "verification": ("Verification", "verify"),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}
__all__ = sorted(_HOME)
__version__ = "0.1.0"
__getattr__, __dir__ = names(__name__, _HOME, "__version__")
