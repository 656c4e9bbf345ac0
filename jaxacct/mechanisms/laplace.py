"""The Laplace mechanism."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from jaxacct.core.validation import POSITIVE
from jaxacct.mechanisms.base import SENSITIVITY, AdditiveNoise, register
from jaxacct.mechanisms.parts import FinitePair, LaplacePart

__all__ = ["Laplace", "laplace_pair"]

LOSS_CELLS = 2048
"""Cells of the loss grid of ``laplace_pair``; the grid adds about 1e-5 to epsilon."""


@register
@dataclass(frozen=True, eq=False)
class Laplace(AdditiveNoise):
    """Laplace noise of scale ``scale`` times the add/remove sensitivity: (1/scale)-DP.

    Pair Lap(0, b), Lap(1, b); the loss lies in [-1/b, 1/b] with atoms at both ends, alike in both directions, and
    delta(eps) = 1 - e^{(eps - 1/b)/2} for 0 <= eps <= 1/b. Under ``replace_one`` the sensitivity is 2, so b is halved.

    Parameters
    ----------
    scale : array_like > 0, finite
        b, relative to the add/remove sensitivity; one configuration per element.

    References
    ----------
    Dwork, McSherry, Nissim, Smith (2006), Calibrating Noise to Sensitivity in Private Data Analysis.
    Balle, Barthe, Gaboardi (2018), Privacy Amplification by Subsampling (the profile).

    >>> Laplace(scale=10.0)
    Laplace(scale=10.0)
    """

    scale: Any
    constraints: ClassVar = {"scale": POSITIVE}
    law: ClassVar = LaplacePart

    def finite_pair(self, relation: str) -> FinitePair:
        return laplace_pair(SENSITIVITY[relation] / np.asarray(self.scale))


def laplace_pair(largest: np.ndarray) -> FinitePair:
    """The pair of largest loss l: hat masses e^{(x - l)/2} tanh(d/4) on losses x, d apart, and atoms at both ends."""
    top = largest[..., None]
    place = np.arange(LOSS_CELLS + 1) / LOSS_CELLS
    ends = (place == 0.0) | (place == 1.0)
    height = np.tanh(0.5 * top / LOSS_CELLS) * np.where(ends, 0.5, 1.0)
    p = np.exp(-top * (1.0 - place)) * (height + np.where(ends, 0.5, 0.0))
    zero = np.zeros(top.shape[:-1])
    return FinitePair(top * (2.0 * place - 1.0), p, p[..., ::-1], zero, zero)
