"""The laws that a mechanism expands into, in one direction of a neighbouring relation, and finite dominating pairs."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class GaussianPart(NamedTuple):
    """Gaussian of sensitivity 1 and standard deviation ``sigma``, Poisson sampled at ``rate``."""

    sigma: np.ndarray
    rate: np.ndarray


class LaplacePart(NamedTuple):
    """Laplace noise of sensitivity 1 and scale ``scale``, Poisson sampled at ``rate``."""

    scale: np.ndarray
    rate: np.ndarray


class FinitePart(NamedTuple):
    """Finite law of the loss in one direction; losses and masses are those of the sampled mechanism.

    ``loss`` and ``mass`` (mass under P) have the batch shape and one trailing axis of atoms. ``infinity``, the mass at
    infinite loss, has the batch shape, and mass.sum(-1) + infinity is 1.
    """

    loss: np.ndarray
    mass: np.ndarray
    infinity: np.ndarray


class ConcentratedPart(NamedTuple):
    """Zero-concentrated guarantee: in both directions Rényi divergences of order alpha are at most xi + rho alpha."""

    rho: np.ndarray
    xi: np.ndarray


class FinitePair(NamedTuple):
    """Dominating pair (P, Q) with finitely many likelihood ratios.

    ``loss``, ``p`` and ``q`` have a trailing axis of atoms: outcomes of masses p and q with log p/q = loss.
    ``p_infinity`` is the P-mass where dQ = 0, and ``q_infinity`` is the Q-mass where dP = 0; both have the batch shape.
    ``excess`` is p/q - 1. It is given if it is known more accurately than e^loss - 1 (README.md, "Rounding of finite
    laws").
    """

    loss: np.ndarray
    p: np.ndarray
    q: np.ndarray
    p_infinity: np.ndarray
    q_infinity: np.ndarray
    excess: np.ndarray | None = None


Part = GaussianPart | LaplacePart | FinitePart | ConcentratedPart
