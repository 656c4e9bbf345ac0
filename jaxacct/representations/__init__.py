"""Representations of privacy and conversions between them: profile, trade-off function, Rényi, zCDP, Gaussian DP."""

from jaxacct.representations.profile_conversions import gdp_from_profile, profile_from_tradeoff, tradeoff_from_profile
from jaxacct.representations.renyi_divergences import (
    RenyiCurve,
    delta_from_renyi,
    epsilon_from_renyi,
    rdp_delta,
    rdp_epsilon,
    renyi_curve,
    renyi_divergence,
    tradeoff_from_renyi,
    zero_concentrated,
)

__all__ = [
    "RenyiCurve",
    "delta_from_renyi",
    "epsilon_from_renyi",
    "gdp_from_profile",
    "profile_from_tradeoff",
    "rdp_delta",
    "rdp_epsilon",
    "renyi_curve",
    "renyi_divergence",
    "tradeoff_from_profile",
    "tradeoff_from_renyi",
    "zero_concentrated",
]
