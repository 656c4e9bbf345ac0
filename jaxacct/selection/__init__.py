"""Private selection: run K times, K random and secret, and release the best; laws of K and what it costs."""

from jaxacct.selection.bounds import BOUNDS, bound_delta, bound_epsilon
from jaxacct.selection.candidates import candidates_profile, grid_noise_multipliers, line_noise_multiplier
from jaxacct.selection.finite import output_law
from jaxacct.selection.laws import (
    Binomial,
    Categorical,
    Geometric,
    Law,
    Logarithmic,
    PointMass,
    Poisson,
    TruncatedNegativeBinomial,
    TwoPoint,
)
from jaxacct.selection.monotone_score import monotone_score_delta, monotone_score_epsilon
from jaxacct.selection.subset import expected_cost, subset_epsilon, subset_renyi

__all__ = [
    "BOUNDS",
    "Binomial",
    "Categorical",
    "Geometric",
    "Law",
    "Logarithmic",
    "PointMass",
    "Poisson",
    "TruncatedNegativeBinomial",
    "TwoPoint",
    "bound_delta",
    "bound_epsilon",
    "candidates_profile",
    "expected_cost",
    "grid_noise_multipliers",
    "line_noise_multiplier",
    "monotone_score_delta",
    "monotone_score_epsilon",
    "output_law",
    "subset_epsilon",
    "subset_renyi",
]
