"""Private selection: run K times, K random and secret, and release the best; laws of K and what it costs."""

from jaxacct.selection.bounds import BOUNDS, bound_delta, bound_epsilon
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
    "monotone_score_delta",
    "monotone_score_epsilon",
    "output_law",
]
