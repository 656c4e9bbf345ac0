"""Representations of privacy and conversions between them: profile, trade-off function, Rényi, zCDP, Gaussian DP."""

from jaxacct.representations.composition_theorems import (
    Guarantee,
    advanced_composition,
    basic_composition,
    clt_epsilon,
    exact_composition,
    gdp_clt,
    parallel_composition,
)
from jaxacct.representations.fourier_accountant import fourier_delta, riemann_delta
from jaxacct.representations.gdp_conversions import gdp_from_profile, profile_from_gdp, tradeoff_from_gdp
from jaxacct.representations.profile_conversions import (
    profile_from_tradeoff,
    renyi_from_profile,
    tradeoff_from_approximate_dp,
    tradeoff_from_profile,
)
from jaxacct.representations.renyi_accounting import RenyiCurve, rdp_delta, rdp_epsilon, renyi_curve, subsampled_renyi
from jaxacct.representations.renyi_conversions import delta_from_renyi, epsilon_from_renyi, tradeoff_from_renyi
from jaxacct.representations.renyi_divergences import renyi_divergence, zero_concentrated
from jaxacct.representations.zcdp_conversions import (
    delta_from_zcdp,
    epsilon_from_zcdp,
    renyi_from_zcdp,
    zcdp_from_renyi,
)

__all__ = [
    "Guarantee",
    "RenyiCurve",
    "advanced_composition",
    "basic_composition",
    "clt_epsilon",
    "delta_from_renyi",
    "delta_from_zcdp",
    "epsilon_from_renyi",
    "epsilon_from_zcdp",
    "exact_composition",
    "fourier_delta",
    "gdp_clt",
    "gdp_from_profile",
    "parallel_composition",
    "profile_from_gdp",
    "profile_from_tradeoff",
    "rdp_delta",
    "rdp_epsilon",
    "renyi_curve",
    "renyi_divergence",
    "renyi_from_profile",
    "renyi_from_zcdp",
    "riemann_delta",
    "subsampled_renyi",
    "tradeoff_from_approximate_dp",
    "tradeoff_from_gdp",
    "tradeoff_from_profile",
    "tradeoff_from_renyi",
    "zcdp_from_renyi",
    "zero_concentrated",
]
