"""Private training: the plan of what is spent, the ledger of what has been, and the steps themselves.

Names are imported when first used: what needs flax, optax or orbax imports it there.
"""

import importlib
from typing import Any

_HOMES = {
    "AdaptiveClip": "adaptive",
    "CHACHA20": "chacha",
    "Clipped": "clipping",
    "Ledger": "ledger",
    "Plan": "plan",
    "Segment": "schedule",
    "State": "trainer",
    "Trainer": "trainer",
    "clipped_sum": "clipping",
    "fixed_batches": "sampler",
    "fresh_key": "chacha",
    "noisy_mean": "transform",
    "over_micro_batches": "sampler",
    "poisson": "sampler",
    "sensitivity": "clipping",
    "ways": "clipping",
    "without_replacement": "sampler",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'jaxacct.training' has no attribute {name!r}")
    return getattr(importlib.import_module(f"jaxacct.training.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
