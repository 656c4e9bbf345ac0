"""The Laplace mechanism."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from jaxacct.mechanisms.base import BaseMechanism, register, sensitivity
from jaxacct.mechanisms.parts import LaplacePart
from jaxacct.validation import POSITIVE

__all__ = ["Laplace"]


@register
@dataclass(frozen=True, eq=False)
class Laplace(BaseMechanism):
    """Laplace noise of scale ``scale`` times the add/remove sensitivity: (1/scale)-DP.

    Pair Lap(0, b), Lap(1, b); the loss lies in [-1/b, 1/b] with atoms at both ends, alike in both
    directions, and delta(eps) = 1 - e^{(eps - 1/b)/2} for 0 <= eps <= 1/b [Dwork et al. 2006; Balle et al.
    2018]. Under ``replace_one`` the sensitivity is 2, so b is halved.

    scale : finite, > 0; a scalar or an array, one configuration per element.  InputError otherwise.

    >>> Laplace(scale=10.0)
    Laplace(scale=10.0)
    """

    scale: Any
    constraints: ClassVar = {"scale": POSITIVE}

    def part(self, rate: np.ndarray, relation: str, direction: str) -> LaplacePart:
        return LaplacePart(np.asarray(self.scale) / sensitivity(relation), rate)
