"""Private training: the plan of what is spent, the ledger of what has been, and the steps themselves.

Names are imported when first used: what needs flax, optax or orbax imports it there.
"""

from typing import TYPE_CHECKING

from jaxacct.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from jaxacct.training.adaptive import AdaptiveClip
    from jaxacct.training.chacha import CHACHA20, fresh_key
    from jaxacct.training.clipping import Clipped, clipped_sum, sensitivity, ways
    from jaxacct.training.ledger import Ledger
    from jaxacct.training.plan import Plan
    from jaxacct.training.sampler import fixed_batches, over_micro_batches, poisson, without_replacement
    from jaxacct.training.schedule import Segment
    from jaxacct.training.state import State
    from jaxacct.training.trainer import Trainer
    from jaxacct.training.transform import noisy_mean

__all__ = [
    "CHACHA20",
    "AdaptiveClip",
    "Clipped",
    "Ledger",
    "Plan",
    "Segment",
    "State",
    "Trainer",
    "clipped_sum",
    "fixed_batches",
    "fresh_key",
    "noisy_mean",
    "over_micro_batches",
    "poisson",
    "sensitivity",
    "ways",
    "without_replacement",
]

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
if not TYPE_CHECKING:  # a checker that sees `__getattr__` would accept every misspelt name
    __getattr__, __dir__ = lazy_exports(__name__, _HOMES)
