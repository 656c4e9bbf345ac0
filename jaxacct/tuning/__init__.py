"""Private tuning: a selection that is run, not only accounted for.

Names are imported when first used: what needs optax imports it there.
"""

import importlib
from typing import Any

_HOMES = {
    "Advice": "advisor",
    "Choice": "spaces",
    "Cost": "cost",
    "Distribution": "spaces",
    "Grid": "spaces",
    "LogUniform": "spaces",
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


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'jaxacct.tuning' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"jaxacct.tuning.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
