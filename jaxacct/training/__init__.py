"""Private training: the plan of what is spent, the ledger of what has been, and the steps themselves.

Names are imported when first used: what needs flax, optax or orbax imports it there.
"""

from jaxacct.lazy import names

_HOMES = {
    "AdaptiveClip": "adaptive",
    "CHACHA20": "chacha",
    "Clipped": "clipping",
    "Ledger": "ledger",
    "Plan": "plan",
    "Segment": "schedule",
    "State": "state",
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
__getattr__, __dir__ = names(__name__, _HOMES)
