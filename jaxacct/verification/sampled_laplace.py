"""The Poisson-sampled Laplace mechanism."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jaxacct.verification.smooth import ClosedForm, LaplaceLoss, sampled_hockey_stick

__all__ = ["SampledLaplace"]


@dataclass(frozen=True)
class SampledLaplace(ClosedForm):
    """Lap(0, 1/top) against Lap(1, 1/top), sampled at a rate in (0, 1); the unsampled loss is alike both ways."""

    top: Any
    rate: Any
    direction: str

    @property
    def key(self) -> Any:
        return ("SampledLaplace", self.top.str(40), self.rate.str(40), self.direction)

    @property
    def largest(self) -> Any:
        if self.direction == "remove":
            return (1 - self.rate + self.rate * self.top.exp()).log()
        return -(1 - self.rate + self.rate * (-self.top).exp()).log()

    def hockey_stick(self, epsilon: Any) -> Any:
        return sampled_hockey_stick(LaplaceLoss(self.top), self.rate, self.direction, epsilon)
