"""Report noisy max with Gaussian noise, composed adaptively and by Rényi divergences, in closed form."""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxacct.core.validation import COUNT, DELTA, POSITIVE, Constraint, check, check_flag
from jaxacct.mechanisms import Gaussian, repeat
from jaxacct.representations.profile_conversions import Guarantee
from jaxacct.selection.base_profile import upper_epsilon

__all__ = ["noisy_max_epsilon", "noisy_max_renyi"]

ROUNDED_UP = 1.0 + 1e-13
"""A factor larger than the rounding of any of these formulas, by which their values are rounded up."""
_ORDER = Constraint("use an order above 1", 1, lower_open=True)


def noisy_max_epsilon(
    noise_multiplier: Any, candidates: Any, steps: Any, delta: Any, *, monotone: bool = False
) -> Guarantee:
    """k-fold adaptive report noisy max with Gaussian noise: `m^k delta_k(eps) <= delta`, delta_k k Gaussians composed.

    Each step reports which of m ``candidates`` has the largest noisy score.  For few steps composing
    `ja.GaussianNoisyMax` is never looser by more than its discretisation, and usually much tighter.

    Parameters
    ----------
    noise_multiplier : array_like > 0
        Standard deviation of the noise, in units of what a score moves under the relation.
    candidates, steps : array_like of whole numbers >= 1
    delta : array_like in (0, 1)
        All broadcast.
    monotone : bool
        Whether all scores rise or all fall with a record: then the sensitivity is 1, otherwise 2.

    Returns
    -------
    Guarantee
        kind "bound"; epsilon is inf where delta/m^k is below 1e-300.

    References
    ----------
    Koskela, Redberg and Wang (2024), Theorem 3.3.

    >>> round(float(noisy_max_epsilon(10.0, 100, 1, 1e-5).epsilon), 3)
    0.932
    """
    sigma, m, k, target = _noisy(noise_multiplier, candidates, steps, delta, monotone)
    left = np.exp(np.log(target) - k * np.log(m)) / ROUNDED_UP
    epsilon = upper_epsilon(repeat(Gaussian(sigma / (1.0 if monotone else 2.0)), k), left, "add_or_remove_one")
    epsilon, target = np.broadcast_arrays(epsilon, target)
    return Guarantee(epsilon, target)


def noisy_max_renyi(noise_multiplier: Any, candidates: Any, order: Any, *, monotone: bool = False) -> np.ndarray:
    """Rényi divergence of report noisy max with Gaussian noise, a bound: `a D^2/(2 sigma^2) + log(m)/(a-1)`.

    Parameters
    ----------
    noise_multiplier, candidates, monotone
        As for `noisy_max_epsilon`; D is 2, or 1 for monotone scores.
    order : array_like > 1
        The order a; all broadcast.

    Returns
    -------
    numpy.ndarray

    References
    ----------
    Zhu and Wang (2022), Theorem 8.

    >>> float(noisy_max_renyi(2.0, 1, 4.0).round(9))
    2.0
    """
    sigma, m, _, _ = _noisy(noise_multiplier, candidates, 1, 0.5, monotone)
    a = np.asarray(check("order", order, _ORDER))
    return (a * (1.0 if monotone else 4.0) / (2.0 * sigma**2) + np.log(m) / (a - 1.0)) * ROUNDED_UP


def _noisy(sigma: Any, candidates: Any, steps: Any, delta: Any, monotone: bool) -> tuple[np.ndarray, ...]:
    check_flag("monotone", monotone, "say whether all scores move alike")
    values = (
        check("noise_multiplier", sigma, POSITIVE),
        check("candidates", candidates, COUNT),
        check("steps", steps, COUNT),
        check("delta", delta, DELTA),
    )
    return tuple(np.asarray(x) for x in values)
