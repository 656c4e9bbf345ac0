"""Private selection: run a mechanism K times, where K is random, release the best output, and compute its guarantee."""

from jaxacct.selection.adaptive import AdaptiveSelection
from jaxacct.selection.base_profile import candidates_profile
from jaxacct.selection.law_of_k import (
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
from jaxacct.selection.mechanism import Selection, rounds, select
from jaxacct.selection.named_bounds import BOUNDS, bound_delta, bound_epsilon
from jaxacct.selection.subset_privacy import subset_epsilon
from jaxacct.selection.top import TopSelection
from jaxacct.selection.worst_case import Attack, attack, output_law

__all__ = [
    "BOUNDS",
    "AdaptiveSelection",
    "Attack",
    "Binomial",
    "Categorical",
    "Geometric",
    "Law",
    "Logarithmic",
    "PointMass",
    "Poisson",
    "Selection",
    "TopSelection",
    "TruncatedNegativeBinomial",
    "TwoPoint",
    "attack",
    "bound_delta",
    "bound_epsilon",
    "candidates_profile",
    "output_law",
    "rounds",
    "select",
    "subset_epsilon",
]
