"""The single steps of a composition, and whether the engine of Gaussian mixtures is for them.  Light to import."""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxacct.mechanisms import Composed, Gaussian, Mechanism, Repeated
from jaxacct.mechanisms.gaussian_branches import OfGaussianMixtures
from jaxacct.mechanisms.loss_components import exact_product

__all__ = ["flat", "suits"]


def suits(mechanism: Mechanism) -> bool:
    """Whether it is made of mixtures of Gaussians, of which at least one is not answered by its parts."""
    leaves = [leaf for _, leaf in flat(mechanism)]
    of_mixtures = [leaf for leaf in leaves if isinstance(leaf, OfGaussianMixtures)]
    if not all(isinstance(leaf, Gaussian | OfGaussianMixtures) for leaf in leaves):
        return False
    return all(leaf.of_gaussians() for leaf in of_mixtures) and any(not leaf.ordinary() for leaf in of_mixtures)


def flat(mechanism: Any, count: np.ndarray | float = 1.0) -> list[tuple[np.ndarray, Any]]:
    """The single steps that are composed, each with its count."""
    if isinstance(mechanism, Repeated):
        return flat(mechanism.mechanism, exact_product(np.asarray(mechanism.steps), np.asarray(count)))
    if isinstance(mechanism, Composed):
        return [item for inner in mechanism.mechanisms for item in flat(inner, count)]
    return [(np.asarray(count, np.float64), mechanism)]
