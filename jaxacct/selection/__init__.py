"""Private selection: run K times, K random and secret, and release the best; laws of K and what it costs."""

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

__all__ = [
    "Binomial",
    "Categorical",
    "Geometric",
    "Law",
    "Logarithmic",
    "PointMass",
    "Poisson",
    "TruncatedNegativeBinomial",
    "TwoPoint",
]
