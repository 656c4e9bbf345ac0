"""Private tuning: a selection that is run, not only accounted for.

Names are imported when first used: what needs optax imports it there.
"""

from jaxacct.lazy import names

_HOMES = {
    "Advice": "advice",
    "Choice": "distributions",
    "Cost": "cost",
    "Distribution": "distributions",
    "Grid": "search_spaces",
    "LogUniform": "distributions",
    "MatchedPlan": "matched_plan",
    "PrivateScore": "private_score",
    "Random": "search_spaces",
    "Space": "search_spaces",
    "SubsetPlan": "subset_plan",
    "SubsetTuned": "subset_tuning",
    "Tuned": "tuning_run",
    "Uniform": "distributions",
    "advise": "advisor",
    "extrapolated": "subset_tuning",
    "grid": "search_spaces",
    "key_words": "side_by_side_training",
    "side_by_side": "side_by_side_training",
    "truncated": "padding",
    "tune": "tuning_run",
    "tune_on_subset": "subset_tuning",
    "tune_with": "tuning_run",
}
__all__ = sorted(_HOMES)
__getattr__, __dir__ = names(__name__, _HOMES)
