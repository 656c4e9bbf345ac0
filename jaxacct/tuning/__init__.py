"""Private tuning: a selection that is run, not only accounted for.

Names are imported when first used: what needs optax imports it there.
"""

from typing import TYPE_CHECKING

from jaxacct.core.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from jaxacct.tuning.advisor import Advice, advise
    from jaxacct.tuning.candidates import Adaptive, Tried, Winner, truncated
    from jaxacct.tuning.plans import Cost, MatchedPlan, SearchPlan, SubsetPlan
    from jaxacct.tuning.private_score import PrivateScore
    from jaxacct.tuning.search_spaces import Choice, Distribution, Grid, LogUniform, Random, Space, Uniform, grid
    from jaxacct.tuning.side_by_side_training import key_words, side_by_side
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

_HOMES = {
    "Adaptive": "candidates",
    "Advice": "advisor",
    "Choice": "search_spaces",
    "Cost": "plans",
    "Distribution": "search_spaces",
    "Grid": "search_spaces",
    "LogUniform": "search_spaces",
    "MatchedPlan": "plans",
    "PrivateScore": "private_score",
    "Random": "search_spaces",
    "SearchPlan": "plans",
    "Space": "search_spaces",
    "SubsetPlan": "plans",
    "SubsetTuned": "subset_tuning",
    "Tried": "candidates",
    "Tuned": "tuning_run",
    "Uniform": "search_spaces",
    "Winner": "candidates",
    "advise": "advisor",
    "extrapolated": "subset_tuning",
    "grid": "search_spaces",
    "key_words": "side_by_side_training",
    "side_by_side": "side_by_side_training",
    "truncated": "candidates",
    "tune": "tuning_run",
    "tune_in_rounds": "tuning_run",
    "tune_on_subset": "subset_tuning",
    "tune_with": "tuning_run",
}
if not TYPE_CHECKING:  # a checker that sees `__getattr__` would accept every misspelt name
    __getattr__, __dir__ = lazy_exports(__name__, _HOMES)
