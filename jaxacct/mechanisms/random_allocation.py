"""Random allocation: each record takes part in a fixed number of the t slots of a round, chosen at random."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from jaxacct.mechanisms.base import Mechanism, register
from jaxacct.mechanisms.gaussian import Gaussian
from jaxacct.mechanisms.loss_components import exact_product
from jaxacct.mechanisms.parts import Part
from jaxacct.validation import COUNT, InputError, shown

__all__ = ["RandomAllocation"]


@register
@dataclass(frozen=True, eq=False)
class RandomAllocation(Mechanism):
    """A round of t releases, each record in exactly ``participations`` of them, chosen at random by itself.

    With one participation the pair is `P = (1/t) sum_i N(e_i, sigma^2 I)` and `Q = N(0, sigma^2 I)`. The records choose
    their slots independently of each other; batches of equal size are not covered.

    Parameters
    ----------
    mechanism : Gaussian
        What every slot releases.
    slots : array_like of whole numbers from 1 to 2**53
        t, the slots of a round; public.
    participations : array_like of whole numbers from 1 to slots
        In how many of them a record takes part.

    Raises
    ------
    InputError
        Another base mechanism, a value outside its limits, or more participations than slots.

    References
    ----------
    Feldman and Shenfeld (2025), Privacy amplification by random allocation.

    >>> RandomAllocation(Gaussian(1.0), slots=100)
    RandomAllocation(mechanism=Gaussian(noise_multiplier=1.0), slots=100.0, participations=1.0)
    """

    mechanism: Any
    slots: Any
    participations: Any = 1.0
    constraints: ClassVar = {"slots": COUNT, "participations": COUNT}

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.mechanism, Gaussian):
            raise InputError(f"mechanism = {shown(self.mechanism)} must be a Gaussian; use Gaussian(1.0)")
        if np.any(np.asarray(self.participations) > np.asarray(self.slots)):
            raise InputError("participations must be at most slots; use fewer participations or more slots")

    def expand(self, relation: str, direction: str) -> list[tuple[Part, np.ndarray]]:
        """The parts when the slots are revealed, which dominates."""
        count = np.asarray(self.participations, np.float64)
        return [(part, exact_product(each, count)) for part, each in self.mechanism.expand(relation, direction)]

    def symmetric(self) -> bool:
        return False

    def kind_under(self, relation: str, composed: bool = False) -> str:
        simple = bool(np.all(np.asarray(self.participations) == 1.0)) and relation != "replace_one"
        return "certified" if simple and not composed else "bound"
