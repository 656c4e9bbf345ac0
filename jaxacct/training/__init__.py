"""Private training: plans of the privacy to spend, ledgers of the privacy spent, and the training steps (README.md).

A name is imported when it is first used.  Only code that needs flax, optax or orbax imports them.
"""

from typing import TYPE_CHECKING

from jaxacct import strategies as strategies
from jaxacct.core.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from jaxacct.core.chacha import CHACHA20, fresh_key
    from jaxacct.training.clipping.clipped_sum import Clipped, clipped_sum, norm_methods, sensitivity
    from jaxacct.training.ledger import Ledger
    from jaxacct.training.plan import Plan
    from jaxacct.training.plan.early_stop import EarlyStop
    from jaxacct.training.plan.segments import Segment
    from jaxacct.training.plan.strategy_advice import advise_strategy
    from jaxacct.training.run.checkpoints import params_of
    from jaxacct.training.run.state import State
    from jaxacct.training.sampling.sampler import (
        cyclic_poisson,
        fixed_batches,
        over_micro_batches,
        poisson,
        random_allocation,
        truncated_poisson,
        without_replacement,
    )
    from jaxacct.training.source import Source
    from jaxacct.training.step.counts_and_losses import AdaptiveClip, PrivateLoss
    from jaxacct.training.step.models import LoRA, lora
    from jaxacct.training.step.noise import noisy_mean
    from jaxacct.training.step.step_function import Averaged, averaged
    from jaxacct.training.trainer import Trainer

__all__ = [
    "CHACHA20",
    "AdaptiveClip",
    "Averaged",
    "Clipped",
    "EarlyStop",
    "Ledger",
    "LoRA",
    "Plan",
    "PrivateLoss",
    "Segment",
    "Source",
    "State",
    "Trainer",
    "advise_strategy",
    "averaged",
    "clipped_sum",
    "cyclic_poisson",
    "fixed_batches",
    "fresh_key",
    "lora",
    "noisy_mean",
    "norm_methods",
    "over_micro_batches",
    "params_of",
    "poisson",
    "random_allocation",
    "sensitivity",
    "truncated_poisson",
    "without_replacement",
]

_HOMES = {
    **dict.fromkeys(("CHACHA20", "fresh_key"), "jaxacct.core.chacha"),
    **dict.fromkeys(("Clipped", "clipped_sum", "norm_methods", "sensitivity"), "clipping.clipped_sum"),
    "Ledger": "ledger",
    "Plan": "plan",
    "EarlyStop": "plan.early_stop",
    "Segment": "plan.segments",
    "advise_strategy": "plan.strategy_advice",
    "params_of": "run.checkpoints",
    "State": "run.state",
    **dict.fromkeys(("cyclic_poisson", "fixed_batches", "over_micro_batches", "poisson"), "sampling.sampler"),
    **dict.fromkeys(("random_allocation", "truncated_poisson", "without_replacement"), "sampling.sampler"),
    "Source": "source",
    **dict.fromkeys(("AdaptiveClip", "PrivateLoss"), "step.counts_and_losses"),
    **dict.fromkeys(("LoRA", "lora"), "step.models"),
    "noisy_mean": "step.noise",
    **dict.fromkeys(("Averaged", "averaged"), "step.step_function"),
    "Trainer": "trainer",
}
if not TYPE_CHECKING:  # a type checker that sees `__getattr__` would accept every misspelt name
    __getattr__, __dir__ = lazy_exports(__name__, _HOMES, "strategies")
