"""Composed Gaussians in closed form: the loss of all of them together is N(mu^2/2, mu^2).

    delta(eps) = Phi(-a) - e^eps Phi(-b),   a = eps/mu - mu/2,  b = eps/mu + mu/2.

With the Mills ratio `R(x) = Phi(-x)/phi(x)` and `e^eps phi(b) = phi(a)` this is `phi(a) (R(a) - R(b))`, accurate
relative to delta itself down to 1e-300. One Poisson sampled Gaussian reduces to the same function G of the Gaussian:

    remove: delta(eps) = q G(log(1 + (e^eps - 1)/q)),
    add:    delta(eps) = k G(log(q e^eps/k)),   k = 1 - (1 - q) e^eps, and 0 once k <= 0.

  Rounding is bounded and put into the bracket.
"""

from __future__ import annotations

import numpy as np
from scipy import special

from jaxacct.engines import contour
from jaxacct.engines.contour import Answer

UNIT = 2.0**-53
ROUNDING = 64.0
"""Units in the last place allowed for erfcx, log_ndtr, and the arithmetic around them."""


def log_delta(mu: np.ndarray, epsilon: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(log delta, minus its derivative in eps, bound on the error of log delta)."""
    a, b = epsilon / mu - 0.5 * mu, epsilon / mu + 0.5 * mu
    right = a > 0
    safe = np.where(right, a, 1.0)
    mills_a = np.sqrt(np.pi / 2) * special.erfcx(safe / np.sqrt(2))
    mills_b = np.sqrt(np.pi / 2) * special.erfcx(np.maximum(b, 0.0) / np.sqrt(2))
    gap = np.maximum(mills_a - mills_b, 1e-300)
    far = -0.5 * safe**2 - 0.5 * np.log(2 * np.pi) + np.log(gap)
    second = np.exp(np.minimum(epsilon + special.log_ndtr(-b), 0.0))
    near_value = np.maximum(special.ndtr(-a) - second, 1e-300)
    value = np.where(right, far, np.log(near_value))
    slope = np.where(right, mills_b / gap, second / near_value)
    # the arguments a and b are off by a few units; the Mills difference and the exponent feel it
    shift = (np.abs(epsilon / mu) + mu) * np.where(right, np.abs(safe) + 1.0, 1.0)
    amplify = np.where(right, (mills_a + mills_b) / gap, 1.0 / near_value)
    error = ROUNDING * UNIT * (1.0 + np.abs(value) + shift + amplify * (1.0 + np.where(right, 0.0, shift)))
    return value, slope, error


def epsilon(mu2: np.ndarray, delta: np.ndarray, slack: np.ndarray) -> Answer:
    """Bracket of `inf {eps >= 0 : delta(eps) <= delta}`; log delta is concave in eps, so Newton from the right."""
    mu = np.sqrt(mu2)
    target = np.log(delta)
    eps = 0.5 * mu2 + mu * np.sqrt(np.maximum(-2.0 * target, 0.0))
    for _ in range(40):
        value, slope, _ = log_delta(mu, eps)
        eps = np.maximum(eps + (value - target) / np.maximum(slope, 1e-300), 0.0)
    value, slope, error = log_delta(mu, eps)
    reach = 4.0 * (np.abs(value - target) * (eps > 0) + error + slack) / np.maximum(slope, 1e-300) + 4 * UNIT * eps
    upper, lower = eps + reach, np.maximum(eps - reach, 0.0)
    value_up, _, error_up = log_delta(mu, upper)
    value_low, _, error_low = log_delta(mu, lower)
    zero_value, _, zero_error = log_delta(mu, np.zeros_like(mu))
    zero = zero_value + zero_error <= target - slack
    upper = np.where(value_up + error_up <= target - slack, upper, np.inf)
    lower = np.where(value_low - error_low >= target + slack, lower, 0.0)
    return Answer(np.where(zero, 0.0, lower), np.where(zero, 0.0, eps), np.where(zero, 0.0, upper))


def delta(mu2: np.ndarray, epsilon: np.ndarray) -> Answer:
    """Bracket of delta(eps)."""
    value, _, error = log_delta(np.sqrt(mu2), epsilon)
    return _exponentials(value, error)


def log_delta_of_one_step(
    sigma: np.ndarray, q: np.ndarray, removing: np.ndarray, eps: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """(log delta, bound on its error) of one Poisson sampled Gaussian, 0 < q < 1; -inf where delta is 0."""
    room = -np.log1p(-q) - eps
    k = np.where(removing, 1.0, -np.expm1(-np.maximum(room, 0.0)))
    alive = k > 0
    k = np.where(alive, k, 1.0)
    with np.errstate(over="ignore"):
        shifted = np.where(removing, np.log1p(np.expm1(eps) / q), np.log(q) + eps - np.log(k))
    value, slope, error = log_delta(1.0 / sigma, np.maximum(shifted, 0.0))
    through_k = np.where(removing, 0.0, (np.abs(room) + 2.0 * np.abs(eps) + q) / k)
    moved = 16.0 * UNIT * (1.0 + np.abs(shifted) + np.abs(np.log(q)) + through_k)
    total = np.where(removing, np.log(q), np.log(k)) + value
    bound = error + (slope + 1.0) * moved + 8.0 * UNIT * np.abs(total)
    return np.where(alive, total, -np.inf), np.where(alive, bound, 0.0)


def delta_of_one_step(sigma: np.ndarray, q: np.ndarray, removing: np.ndarray, eps: np.ndarray) -> Answer:
    """Bracket of delta(eps) of one Poisson sampled Gaussian."""
    return _exponentials(*log_delta_of_one_step(sigma, q, removing, eps))


def _exponentials(value: np.ndarray, error: np.ndarray) -> Answer:
    """A bracket of e^value; where that underflows the upper end does not."""
    upper = np.where(value > -np.inf, np.maximum(np.exp(value + error), contour.LEAST), 0.0)
    middle = np.exp(value)
    return Answer(np.exp(value - error) * (value > contour.LOWEST), middle, np.minimum(upper, 1.0))


def epsilon_of_one_step(
    sigma: np.ndarray, q: np.ndarray, removing: np.ndarray, delta: np.ndarray, slack: np.ndarray
) -> Answer:
    """Bracket of epsilon of one Poisson sampled Gaussian: each end by bisection on the bound that it must meet."""
    target = np.log(delta)
    largest = 0.5 / sigma**2 + (np.sqrt(np.maximum(-2.0 * target, 0.0)) + 1.0) / sigma
    top = np.where(removing, largest, np.minimum(largest, -np.log1p(-q)))

    def crossing(side: float) -> tuple[np.ndarray, np.ndarray]:
        low, high = np.zeros_like(top), top.copy()
        for _ in range(200):
            middle = 0.5 * (low + high)
            value, error = log_delta_of_one_step(sigma, q, removing, middle)
            above = value + side * error > target - side * slack
            low, high = np.where(above, middle, low), np.where(above, high, middle)
        value, error = log_delta_of_one_step(sigma, q, removing, np.zeros_like(top))
        zero = value + side * error <= target - side * slack
        return np.where(zero, 0.0, low), np.where(zero, 0.0, high)

    _, upper = crossing(1.0)
    lower, _ = crossing(-1.0)
    lower = np.minimum(lower, upper)
    return Answer(lower, 0.5 * (lower + upper), upper)
