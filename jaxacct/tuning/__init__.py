"""Private tuning: a selection that is run, not only accounted for.

Names are imported when first used: what needs optax imports it there.
"""

from typing import TYPE_CHECKING

from jaxacct.core.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from jaxacct.tuning.adaptive_search import Adaptive, Tried
    from jaxacct.tuning.advice import Advice
    from jaxacct.tuning.advisor import advise
    from jaxacct.tuning.candidate_runs import Winner
    from jaxacct.tuning.cost import Cost
    from jaxacct.tuning.distributions import Choice, Distribution, LogUniform, Uniform
    from jaxacct.tuning.matched_plan import MatchedPlan
    from jaxacct.tuning.padding import truncated
    from jaxacct.tuning.private_score import PrivateScore
    from jaxacct.tuning.rounds_run import tune_in_rounds
    from jaxacct.tuning.search_plan import SearchPlan
    from jaxacct.tuning.search_spaces import Grid, Random, Space, grid
    from jaxacct.tuning.side_by_side_training import key_words, side_by_side
    from jaxacct.tuning.subset_plan import SubsetPlan
    from jaxacct.tuning.subset_tuning import SubsetTuned, extrapolated, tune_on_subset
    from jaxacct.tuning.tuned import Tuned
    from jaxacct.tuning.tuning_run import tune, tune_with

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
    "Adaptive": "adaptive_search",
    "Advice": "advice",
    "Choice": "distributions",
    "Cost": "cost",
    "Distribution": "distributions",
    "Grid": "search_spaces",
    "LogUniform": "distributions",
    "MatchedPlan": "matched_plan",
    "PrivateScore": "private_score",
    "Random": "search_spaces",
    "SearchPlan": "search_plan",
    "Space": "search_spaces",
    "SubsetPlan": "subset_plan",
    "SubsetTuned": "subset_tuning",
    "Tried": "adaptive_search",
    "Tuned": "tuned",
    "Uniform": "distributions",
    "Winner": "candidate_runs",
    "advise": "advisor",
    "extrapolated": "subset_tuning",
    "grid": "search_spaces",
    "key_words": "side_by_side_training",
    "side_by_side": "side_by_side_training",
    "truncated": "padding",
    "tune": "tuning_run",
    "tune_in_rounds": "rounds_run",
    "tune_on_subset": "subset_tuning",
    "tune_with": "tuning_run",
}
if not TYPE_CHECKING:  # a checker that sees `__getattr__` would accept every misspelt name
    __getattr__, __dir__ = lazy_exports(__name__, _HOMES)
