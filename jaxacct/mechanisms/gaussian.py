"""The Gaussian mechanism."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from jaxacct.mechanisms.base import BaseMechanism, register, sensitivity
from jaxacct.mechanisms.parts import GaussianPart
from jaxacct.validation import POSITIVE

__all__ = ["Gaussian"]


@register
@dataclass(frozen=True, eq=False)
class Gaussian(BaseMechanism):
    """Gaussian noise of standard deviation ``noise_multiplier`` times the add/remove sensitivity.

    Pair N(1, s^2), N(0, s^2); the loss is N(1/(2 s^2), 1/s^2) in both directions, and delta(eps) =
    Phi(1/(2s) - eps s) - e^eps Phi(-1/(2s) - eps s) [Balle and Wang 2018]. Under ``replace_one`` the
    sensitivity is 2, so s is halved.

    noise_multiplier : finite, > 0; a scalar or an array, one configuration per element. InputError
    otherwise.

    >>> Gaussian(noise_multiplier=1.5)
    Gaussian(noise_multiplier=1.5)
    >>> Gaussian([1.0, 2.0]).noise_multiplier
    array([1., 2.])
    """

    noise_multiplier: Any
    constraints: ClassVar = {"noise_multiplier": POSITIVE}

    def part(self, rate: np.ndarray, relation: str, direction: str) -> GaussianPart:
        return GaussianPart(np.asarray(self.noise_multiplier) / sensitivity(relation), rate)
