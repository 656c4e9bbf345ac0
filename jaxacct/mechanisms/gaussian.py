"""The Gaussian mechanism."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from jaxacct.core.floats import ROUNDOFF, SMALLEST_POSITIVE
from jaxacct.core.validation import POSITIVE
from jaxacct.mechanisms.base import SENSITIVITY, AdditiveNoise, register
from jaxacct.mechanisms.parts import FinitePair, GaussianPart
from jaxacct.mechanisms.profile import LEAST_GAP, pair_of_profile, stacked

__all__ = ["Gaussian", "gaussian_pair", "profile_of_gaussian"]

PROFILE_POINTS = (2000, 500)
"""Points of the profile down to a delta of about e^-72, and from there to e^-684.

So many cost about 1e-5 in epsilon; e^-684 is near the least float64."""
LARGEST_SLACK = 1e-3
"""If the rounding of its place, in deviations, is larger, a point of the profile is bounded by the tail alone."""


@register
@dataclass(frozen=True, eq=False)
class Gaussian(AdditiveNoise):
    """Gaussian noise of standard deviation ``noise_multiplier`` times the add/remove sensitivity.

    Pair N(1, s^2), N(0, s^2); the loss is N(1/(2 s^2), 1/s^2) in both directions, and delta(eps) =
    Phi(1/(2s) - eps s) - e^eps Phi(-1/(2s) - eps s). Under ``replace_one`` the sensitivity is 2, so s is halved.

    Parameters
    ----------
    noise_multiplier : array_like > 0, finite
        s, relative to the add/remove sensitivity; one configuration per element.

    References
    ----------
    Balle, Wang (2018), Improving the Gaussian Mechanism for Differential Privacy.

    >>> Gaussian(noise_multiplier=1.5)
    Gaussian(noise_multiplier=1.5)
    >>> Gaussian([1.0, 2.0]).noise_multiplier
    array([1., 2.])
    """

    noise_multiplier: Any
    constraints: ClassVar = {"noise_multiplier": POSITIVE}
    law: ClassVar = GaussianPart

    def gaussians(self) -> list[tuple[Any, tuple[Any, ...]]]:
        return [(self.noise_multiplier, ())]

    def finite_pair(self, relation: str) -> FinitePair:
        mu = SENSITIVITY[relation] / np.asarray(self.noise_multiplier)
        return stacked([gaussian_pair(one) for one in mu.ravel()], mu.shape)


def gaussian_pair(mu: float, factor: float = 1.0, other: float = np.inf) -> FinitePair:
    """A pair above min(1, factor delta(eps)), with delta the profile of a Gaussian of sensitivity mu and deviation 1.

    other : the sensitivity of a second Gaussian whose delta(eps) is a bound too; the smaller bound is taken.  Both
        sensitivities may have an error of 4 units, and are taken 8 units larger.
    """
    mu, other = mu * (1.0 + 8.0 * ROUNDOFF), other * (1.0 + 8.0 * ROUNDOFF)
    if other == 0.0:
        return pair_of_profile(np.zeros(1), np.zeros(1), np.zeros(1))
    epsilon = _points_of_gaussian(mu) if other > mu else _points_of_gaussian(other)
    if mu < other < factor * mu:
        epsilon = np.union1d(epsilon, _points_of_gaussian(other))
        epsilon = epsilon[np.append(True, np.diff(epsilon) > LEAST_GAP)]
    delta = np.minimum(factor * (1.0 + 2.0 * ROUNDOFF) * profile_of_gaussian(mu, epsilon), 1.0)
    if other < np.inf:
        delta = np.maximum(np.minimum(delta, profile_of_gaussian(other, epsilon)), SMALLEST_POSITIVE)
    return pair_of_profile(epsilon, delta, delta)


def _points_of_gaussian(mu: float) -> np.ndarray:
    """The epsilons at which its profile is evaluated."""
    z = np.concatenate(
        [np.linspace(0.0, 12.0, PROFILE_POINTS[0], endpoint=False), np.linspace(12.0, 37.0, PROFILE_POINTS[1])]
    )
    epsilon = mu * (0.5 * mu + z)
    below = np.linspace(0.0, epsilon[0], PROFILE_POINTS[1], endpoint=False)
    return np.concatenate([below, epsilon])


def profile_of_gaussian(mu: float, epsilon: np.ndarray) -> np.ndarray:
    """delta of a Gaussian of sensitivity mu and deviation 1, rounded up (README.md, "A Gaussian's profile")."""
    from scipy import special  # takes a while to import: only where it is needed

    place = epsilon / mu
    a, b = place - 0.5 * mu, place + 0.5 * mu
    slack = 2.0 * ROUNDOFF * (place + np.abs(a))  # errors of a and of b
    mills_a, mills_b = (np.sqrt(np.pi / 2) * special.erfcx(x / np.sqrt(2)) for x in (np.maximum(a, 0.0), b))
    density = np.exp(-0.5 * a**2) / np.sqrt(2 * np.pi)
    moved = mu * mills_b * slack
    tail = density * (mills_a - mills_b + 1e-13 * mills_a + moved) * (1.0 + ROUNDOFF * (64.0 + 2.0 * a**2))
    near = special.ndtr(-a) - density * (mills_b - moved) + 1e-13
    delta = np.where(a > 0.0, tail + 4.0 * SMALLEST_POSITIVE, near)
    return np.where(slack <= LARGEST_SLACK, delta, special.ndtr(slack - a) + 1e-13)
