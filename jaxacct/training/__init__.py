"""Private training: the plan of what is spent, the ledger of what has been, and the steps themselves.

The rooms, and which may import which, are in jaxacct/training/README.md.  Names are imported when first used: what
needs flax, optax or orbax imports it there.
"""

from typing import TYPE_CHECKING

from jaxacct.core.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from jaxacct.core.chacha import CHACHA20, fresh_key
    from jaxacct.training.ledger import Ledger
    from jaxacct.training.plan import Plan
    from jaxacct.training.plan.segments import Segment
    from jaxacct.training.run.state import State
    from jaxacct.training.source import Source
    from jaxacct.training.step.adaptive_clip import AdaptiveClip
    from jaxacct.training.step.clip_norm import sensitivity
    from jaxacct.training.step.clipping import Clipped, clipped_sum, norm_methods, ways
    from jaxacct.training.step.lora import LoRA, lora
    from jaxacct.training.step.optax_transform import noisy_mean
    from jaxacct.training.step.private_loss import PrivateLoss
    from jaxacct.training.step.sampler import (
        fixed_batches,
        over_micro_batches,
        poisson,
        random_allocation,
        truncated_poisson,
        without_replacement,
    )
    from jaxacct.training.trainer import Trainer

__all__ = [
    "CHACHA20",
    "AdaptiveClip",
    "Clipped",
    "Ledger",
    "LoRA",
    "Plan",
    "PrivateLoss",
    "Segment",
    "Source",
    "State",
    "Trainer",
    "clipped_sum",
    "fixed_batches",
    "fresh_key",
    "lora",
    "noisy_mean",
    "norm_methods",
    "over_micro_batches",
    "poisson",
    "random_allocation",
    "sensitivity",
    "truncated_poisson",
    "ways",
    "without_replacement",
]

_HOMES = {
    "AdaptiveClip": "step.adaptive_clip",
    "CHACHA20": "jaxacct.core.chacha",
    "Clipped": "step.clipping",
    "Ledger": "ledger",
    "LoRA": "step.lora",
    "Plan": "plan",
    "PrivateLoss": "step.private_loss",
    "Segment": "plan.segments",
    "Source": "source",
    "State": "run.state",
    "Trainer": "trainer",
    "clipped_sum": "step.clipping",
    "fixed_batches": "step.sampler",
    "fresh_key": "jaxacct.core.chacha",
    "lora": "step.lora",
    "noisy_mean": "step.optax_transform",
    "norm_methods": "step.clipping",
    "over_micro_batches": "step.sampler",
    "poisson": "step.sampler",
    "random_allocation": "step.sampler",
    "sensitivity": "step.clip_norm",
    "truncated_poisson": "step.sampler",
    "ways": "step.clipping",
    "without_replacement": "step.sampler",
}
if not TYPE_CHECKING:  # a checker that sees `__getattr__` would accept every misspelt name
    __getattr__, __dir__ = lazy_exports(__name__, _HOMES)
