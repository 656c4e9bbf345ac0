"""Private tuning: a selection that is run, not only accounted for.

Names are imported when first used: what needs optax imports it there.
"""

from jaxacct.lazy import names

_HOMES = {
    "Advice": "advisor",
    "Choice": "spaces",
    "Cost": "cost",
    "Distribution": "spaces",
    "Grid": "spaces",
    "LogUniform": "spaces",
    "MatchedPlan": "matched",
    "PrivateScore": "score",
    "Random": "spaces",
    "Space": "spaces",
    "SubsetPlan": "subset_plan",
    "SubsetTuned": "subset",
    "Tuned": "run",
    "Uniform": "spaces",
    "advise": "advisor",
    "extrapolated": "subset",
    "grid": "spaces",
    "key_words": "candidates",
    "side_by_side": "candidates",
    "truncated": "run",
    "tune": "run",
    "tune_on_subset": "subset",
    "tune_with": "run",
}
__all__ = sorted(_HOMES)
__getattr__, __dir__ = names(__name__, _HOMES)
