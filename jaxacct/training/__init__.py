"""Private training: the plan of what is spent, the ledger of what has been, and the steps themselves.

The rooms, and which may import which, are in jaxacct/training/README.md.  Names are imported when first used: what
needs flax, optax or orbax imports it there.
"""

from jaxacct.lazy import names

_HOMES = {
    "AdaptiveClip": "step.adaptive_clip",
    "CHACHA20": "step.chacha",
    "Clipped": "step.clipping",
    "Ledger": "ledger",
    "Plan": "plan",
    "Segment": "plan",
    "State": "run.state",
    "Trainer": "trainer",
    "clipped_sum": "step.clipping",
    "fixed_batches": "step.sampler",
    "fresh_key": "step.chacha",
    "noisy_mean": "step.optax_transform",
    "norm_methods": "step.clipping",
    "over_micro_batches": "step.sampler",
    "poisson": "step.sampler",
    "sensitivity": "step.clip_norm",
    "ways": "step.clipping",
    "without_replacement": "step.sampler",
}
__all__ = sorted(_HOMES)
__getattr__, __dir__ = names(__name__, _HOMES)
