"""One step that draws one of several mixtures of Gaussians: its delta in closed form, certified.

The loss of every branch is monotone in u, so that the best event is a half line whose end solves loss = eps.  Any end
gives a lower bound, and an end that is off by d costs the order of d^2.
"""

from __future__ import annotations

import numpy as np
from scipy.special import log_ndtr

from jaxacct.kernels.mixture_law import BranchLaw
from jaxacct.kernels.special import logsumexp

__all__ = ["delta_of_step", "epsilon_of_step"]

ROUNDING, ROUNDING_OF_SQUARES = 1e-12, 4e-15
"""Relative error allowed for the two terms of a branch, and what squares in their exponents add to it."""
MOST_STEPS = 200
"""Most Newton steps; the logarithm of a mixture is nearly piecewise linear, so that few are needed."""
HALVINGS = 60
"""Halvings of an interval of eps; float64 has no more to give."""
MOVES = (1e-15, 1e-12, 1e-10, 1e-8, 1e-6, 1e-4, 1e-2, 0.1)
"""How far an end is moved, relatively, until it passes its check."""
LARGEST_EPSILON = 1e7
"""Largest eps that is searched."""


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

    def at(eps: float) -> tuple[float, float, float]:
        return delta_of_step(shares, doubt, laws, eps)

    if at(0.0)[2] <= low_delta:
        return 0.0, 0.0, 0.0
    low, high = 0.0, 1.0
    while at(high)[1] > low_delta:
        low, high = high, 2.0 * high
        if high > LARGEST_EPSILON:
            return (low if at(low)[0] >= high_delta else 0.0), low, np.inf
    for _ in range(HALVINGS):
        middle = 0.5 * (low + high)
        if not low < middle < high:
            break
        low, high = (middle, high) if at(middle)[1] > low_delta else (low, middle)
    upper, lower = np.inf, 0.0
    for move in MOVES:
        if upper == np.inf and at(high * (1.0 + move))[2] <= low_delta:
            upper = high * (1.0 + move)
        if lower == 0.0 and at(low * (1.0 - move))[0] >= high_delta:
            lower = low * (1.0 - move)
    return lower, float(np.clip(0.5 * (low + high), lower, upper)), upper


def _branch(law: BranchLaw, epsilon: float) -> tuple[float, float]:
    """(delta, error) of one branch; for add the event is u below the end."""
    shift, log_weight = law.shift, np.log(law.weight)
    goal = law.sign * epsilon

    if law.sign < 0.0 and shift[0] == 0.0 and goal <= log_weight[0]:
        return 0.0, 0.0  # the loss of add never exceeds eps
    # log mix is convex and increasing, and above the goal at the start: Newton comes down to it
    u = float((goal + 0.5 * shift[-1] ** 2 - log_weight[-1]) / shift[-1])
    for _ in range(MOST_STEPS):
        terms = log_weight + shift * u - 0.5 * shift**2
        top = float(np.max(terms))
        each = np.exp(terms - top)
        total = float(each.sum())
        move = (top + np.log(total) - goal) * total / float(each @ shift)
        u -= move
        if not move > 1e-15 * max(abs(u), 1e-3):
            break
    else:
        return 1.0, 1.0  # not the best end, of which only a lower bound would be known
    of_q = float(log_ndtr(-law.sign * u))
    of_p = float(logsumexp(log_weight + log_ndtr(law.sign * (shift - u))))
    first, second = (of_p, of_q + epsilon) if law.sign > 0 else (of_q, of_p + epsilon)
    gain, cost = float(np.exp(first)), float(np.exp(min(second, 700.0)))
    doubt = ROUNDING + ROUNDING_OF_SQUARES * (u * u + float(np.square(shift[-1])) + abs(epsilon))
    return max(gain - cost, 0.0), doubt * (gain + cost)
