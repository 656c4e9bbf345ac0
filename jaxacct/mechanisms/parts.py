"""Parts: the laws that a mechanism expands into, in one direction of one relation; and finite dominating pairs."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


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


class ConcentratedPart(NamedTuple):
    """Zero-concentrated differential privacy: Rényi divergences of at most ``xi + rho alpha``, in either direction."""

    rho: np.ndarray
    xi: np.ndarray


class FinitePair(NamedTuple):
    """A dominating pair (P, Q) with finitely many likelihood ratios.

    ``loss``, ``p`` and ``q`` have a trailing atom axis: outcomes with log p/q = loss. ``p_infinity`` is the
    P-mass where dQ = 0, ``q_infinity`` the Q-mass where dP = 0 (batch shape). ``excess`` is p/q - 1 where that is
    known better than through the loss (README.md, "Rounding of finite laws").
    """

    loss: np.ndarray
    p: np.ndarray
    q: np.ndarray
    p_infinity: np.ndarray
    q_infinity: np.ndarray
    excess: np.ndarray | None = None


Part = GaussianPart | LaplacePart | FinitePart | ConcentratedPart
