"""Private tuning: trains candidates, releases the best, and accounts for the whole search."""

from jaxacct.tuning.advisor import Advice, advise
from jaxacct.tuning.candidates import Adaptive, Tried, Winner, key_words, side_by_side, truncated
from jaxacct.tuning.plans import Cost, MatchedPlan, SearchPlan, SubsetPlan
from jaxacct.tuning.private_score import PrivateScore
from jaxacct.tuning.search_spaces import Choice, Distribution, Grid, LogUniform, Random, Space, Uniform, grid
from jaxacct.tuning.subset_tuning import SubsetTuned, extrapolated, tune_on_subset
from jaxacct.tuning.tuning_run import Tuned, tune, tune_in_rounds, tune_with

__all__ = [
    "Adaptive",
    "Advice",
    "Choice",
    "Cost",
    "Distribution",
    "Grid",
    "LogUniform",
    "MatchedPlan",
    "PrivateScore",
    "Random",
    "SearchPlan",
    "Space",
    "SubsetPlan",
    "SubsetTuned",
    "Tried",
    "Tuned",
    "Uniform",
    "Winner",
    "advise",
    "extrapolated",
    "grid",
    "key_words",
    "side_by_side",
    "truncated",
    "tune",
    "tune_in_rounds",
    "tune_on_subset",
    "tune_with",
]
