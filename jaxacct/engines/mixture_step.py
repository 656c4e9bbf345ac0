"""One step that draws one of several mixtures of Gaussians: its delta in closed form, certified.

The loss of every branch is monotone in u, so that the best event is a half line whose end solves loss = eps.  Any end
gives a lower bound, and an end that is off by d costs the order of d^2.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from scipy.special import log_ndtr, logsumexp

from jaxacct.kernels.mixture_law import BranchLaw

__all__ = ["delta_of_step", "epsilon_of_step"]

ROUNDING, ROUNDING_OF_SQUARES = 1e-12, 4e-15
"""Relative error allowed for the two terms of a branch, and what squares in their exponents add to it."""
FARTHEST = 1e6
"""Largest end of a half line that is searched, in standard deviations."""
HALVINGS = 110
"""Halvings of an interval; float64 has no more to give."""
LARGEST_EPSILON = 700.0
"""Largest eps that is searched: its exponential is finite."""


def delta_of_step(
    shares: tuple[float, ...], doubt: float, laws: tuple[BranchLaw, ...], epsilon: float
) -> tuple[float, float, float]:
    """(lower, estimate, upper) of delta at eps >= 0."""
    value = error = 0.0
    for share, law in zip(shares, laws, strict=True):
        one, wrong = _branch(law, epsilon)
        value += share * one
        error += share * (wrong + doubt * one)
    error += 1e-15 * value
    return max(value - error, 0.0), value, min(value + error, 1.0)


def epsilon_of_step(
    shares: tuple[float, ...], doubt: float, laws: tuple[BranchLaw, ...], low_delta: float, high_delta: float
) -> tuple[float, float, float]:
    """(lower, estimate, upper) of eps >= 0; the upper end holds for low_delta, the lower end for high_delta."""

    def last(holds: Callable[[tuple[float, float, float]], bool]) -> tuple[float, float]:
        """An interval in which delta(eps) stops being as said, from eps = 0 on."""
        if not holds(delta_of_step(shares, doubt, laws, 0.0)):
            return 0.0, 0.0
        if holds(delta_of_step(shares, doubt, laws, LARGEST_EPSILON)):
            return LARGEST_EPSILON, np.inf
        low, high = 0.0, LARGEST_EPSILON
        for _ in range(HALVINGS):
            middle = 0.5 * (low + high)
            if not low < middle < high:
                break
            low, high = (middle, high) if holds(delta_of_step(shares, doubt, laws, middle)) else (low, middle)
        return low, high

    upper = last(lambda found: not found[2] <= low_delta)[1]
    lower = last(lambda found: found[0] >= high_delta)[0]
    estimate = last(lambda found: found[1] > low_delta)[0]
    return lower, float(np.clip(estimate, lower, upper)), upper


def _branch(law: BranchLaw, epsilon: float) -> tuple[float, float]:
    """(delta, error) of one branch; for add the event is u below the end."""
    shift, log_weight = law.shift, np.log(law.weight)
    goal = law.sign * epsilon

    def log_mix(u: float) -> float:
        return float(logsumexp(log_weight + shift * u - 0.5 * shift**2))

    low, high = -FARTHEST, FARTHEST
    if log_mix(low) >= goal:
        if law.sign < 0.0:
            return 0.0, 0.0  # the loss of add never exceeds eps
        high = low
    for _ in range(HALVINGS):
        middle = 0.5 * (low + high)
        if not low < middle < high:
            break
        low, high = (low, middle) if log_mix(middle) >= goal else (middle, high)
    u = 0.5 * (low + high)
    of_q = float(log_ndtr(-law.sign * u))
    of_p = float(logsumexp(log_weight + log_ndtr(law.sign * (shift - u))))
    first, second = (of_p, of_q + epsilon) if law.sign > 0 else (of_q, of_p + epsilon)
    gain, cost = float(np.exp(first)), float(np.exp(min(second, 700.0)))
    doubt = ROUNDING + ROUNDING_OF_SQUARES * (u * u + float(shift[-1]) ** 2 + abs(epsilon))
    return max(gain - cost, 0.0), doubt * (gain + cost)
