"""Parts: the laws that a mechanism expands into, in one direction of one relation."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

__all__ = ["FinitePart", "GaussianPart", "LaplacePart", "Part"]


class GaussianPart(NamedTuple):
    """Gaussian of sensitivity 1 and standard deviation ``sigma``, Poisson sampled at ``rate``."""

    sigma: np.ndarray
    rate: np.ndarray


class LaplacePart(NamedTuple):
    """Laplace of sensitivity 1 and scale ``scale``, Poisson sampled at ``rate``."""

    scale: np.ndarray
    rate: np.ndarray


class FinitePart(NamedTuple):
    """Finite law of the loss in the direction asked for, sampling and sign already applied.

    ``loss`` and ``mass`` (mass under P) have one trailing atom axis beyond the batch; ``infinity`` has the
    batch shape, and mass.sum(-1) + infinity is 1.
    """

    loss: np.ndarray
    mass: np.ndarray
    infinity: np.ndarray


Part = GaussianPart | LaplacePart | FinitePart
