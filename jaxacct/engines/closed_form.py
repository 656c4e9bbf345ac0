"""Composed Gaussians, one sampled Gaussian, and finitely many losses, in closed form (README.md, "Closed forms")."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import scipy

from jaxacct.core.floats import ROUNDOFF
from jaxacct.engines import contour
from jaxacct.engines.lattice_parts import LOSS_UNITS, inexact
from jaxacct.engines.protocol import Answer
from jaxacct.kernels.contour.gaussian_errors import FINITE_LOSS_ERROR

LEAST_GAP = 1e-300
"""Deltas, slopes, and differences of Mills ratios are raised to at least this, to keep logs and quotients finite."""
LEAST_EPSILON = 2.0**-1060
"""Bisection raises the lower end of its interval to this subnormal number before it takes the ends' geometric mean."""
ROUNDOFF_OF_LOG = 4096.0 * ROUNDOFF
"""Bound of the rounding errors of log(delta) and log(target), for a delta of at least 1e-308."""
_NODES, _WEIGHTS = (0.5 * x for x in np.polynomial.legendre.leggauss(6))
"""Nodes and weights of the Gauss-Legendre rule of order 6 on [-1/2, 1/2]."""


def log_delta(mu: np.ndarray, epsilon: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (log delta, minus its derivative in eps, bound on the error of log delta), for eps >= 0."""
    shape = np.broadcast_shapes(np.shape(mu), np.shape(epsilon))
    mu, epsilon = (np.broadcast_to(np.asarray(x, np.float64), shape).reshape(-1) for x in (mu, epsilon))
    a, b = epsilon / mu - 0.5 * mu, epsilon / mu + 0.5 * mu
    right, small = a > 0, mu < 0.1  # where mu < .1, R(a) - R(b) is computed as the integral of K
    far = np.where(right | small, a, 1.0)
    mills_a = np.sqrt(np.pi / 2) * scipy.special.erfcx(far / np.sqrt(2))
    mills_b = np.sqrt(np.pi / 2) * scipy.special.erfcx(np.maximum(b, 0.0) / np.sqrt(2))
    gap, rounding = mills_a - mills_b, mills_a + mills_b
    if small.any():
        some, x = mu[small], a[small] + 0.5 * mu[small]
        at = x[:, None] + some[:, None] * _NODES
        k = 1.0 - at * np.sqrt(np.pi / 2) * scipy.special.erfcx(at / np.sqrt(2))
        gap[small] = some * (np.maximum(k, 0.0) @ _WEIGHTS)
        # since 1 < (x^2 + 3) K, K's error, a few ROUNDOFF (1 + x^2 K), is at most a few ROUNDOFF (3 + 2 x^2) K
        rounding[small] = gap[small] * (8.0 + np.square(np.abs(x) + some))
    gap = np.maximum(gap, LEAST_GAP)
    log_far = -0.5 * far**2 - 0.5 * np.log(2 * np.pi) + np.log(gap)
    second = np.exp(np.minimum(epsilon + scipy.special.log_ndtr(-b), 0.0))
    near_value = np.maximum(scipy.special.ndtr(-a) - second, LEAST_GAP)
    by_gap = right | small
    value = np.where(by_gap, log_far, np.log(near_value))
    slope = np.where(by_gap, mills_b / gap, second / near_value)
    # `a` and `b` have errors of a few ROUNDOFF (eps/mu + mu). In units of ROUNDOFF, `shift` is their effect: on
    # -a^2/2 and on the log of the difference of Mills ratios where `by_gap`, else on the arguments of Phi.
    shift = (np.abs(epsilon / mu) + mu) * np.where(by_gap, np.abs(far) + 1.0, 1.0)
    amplify = np.where(by_gap, rounding / gap, 1.0 / near_value)
    # 64 ROUNDOFF covers the errors of erfcx and log_ndtr, and of the arithmetic around them.
    error = 64.0 * ROUNDOFF * (1.0 + np.abs(value) + shift + amplify * (1.0 + np.where(by_gap, 0.0, shift)))
    return value.reshape(shape), slope.reshape(shape), error.reshape(shape)


def epsilon(mu: np.ndarray, delta: np.ndarray, slack: np.ndarray) -> Answer:
    """Return the bracket of the least eps >= 0 with delta(eps) <= `delta`. `slack` bounds the error of log(`delta`)."""
    target = np.log(delta)
    reach = np.sqrt(np.maximum(-2.0 * target, 0.0))
    eps = mu * (0.5 * mu + reach)
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        for _ in range(40):  # at most 40 Newton steps; the bounds hold wherever the steps end
            value, slope, _ = log_delta(mu, eps)
            lower = np.maximum(eps + (value - target) / np.maximum(slope, LEAST_GAP), 0.0)
            before, eps = eps, np.minimum(eps, lower)  # log delta is concave: Newton's steps go down
            if np.array_equal(before, eps, equal_nan=True):
                break  # further steps would change no row
        value, slope, error = log_delta(mu, eps)
        move = 4.0 * (np.abs(value - target) * (eps > 0) + error + slack) / np.maximum(slope, LEAST_GAP)
        move += 4 * ROUNDOFF * eps
        upper, lower = eps + move, np.maximum(eps - move, 0.0)
        values, _, errors = log_delta(mu, np.stack([upper, lower, np.zeros_like(mu)]))
        (value_up, value_low, zero_value), (error_up, error_low, zero_error) = values, errors
        zero = (zero_value + zero_error <= target - slack) | (np.log(mu / np.sqrt(2 * np.pi)) <= target - slack - 1e-12)
        upper = np.where(value_up + error_up <= target - slack, upper, np.inf)
        lower = np.where(value_low - error_low >= target + slack, lower, 0.0)
        simple = simple_epsilon(mu, target, slack)
        upper, lower = np.fmin(upper, simple.upper), np.fmax(lower, simple.lower)
        eps = np.clip(np.where(np.isnan(eps), lower, eps), lower, upper)
    return Answer(np.where(zero, 0.0, lower), np.where(zero, 0.0, eps), np.where(zero, 0.0, upper))


def simple_epsilon(mu: np.ndarray, log_delta: np.ndarray, slack: np.ndarray) -> Answer:
    """Return bounds of epsilon by the two inequalities of README.md, "Closed forms", which hold for every mu."""
    z = np.sqrt(np.maximum(-2.0 * (log_delta - slack + np.log(2.0)), 0.0))
    upper = mu * (0.5 * mu + z) * (1.0 + 16.0 * ROUNDOFF)
    share = np.exp(np.minimum(log_delta + slack, 0.0)) / -np.expm1(-1.0)
    quantile = -scipy.special.ndtri(np.minimum(share * (1.0 + 1e-12), 1.0))
    quantile = np.where(share < 1.0, quantile, -np.inf)
    lower = (0.5 * mu**2 + mu * (quantile - 1e-9 * (1.0 + np.abs(quantile))) - 1.0) * (1.0 - 16.0 * ROUNDOFF)
    lower = np.where(lower > 0.0, np.minimum(lower, np.finfo(np.float64).max), 0.0)
    return Answer(lower, lower, upper)


def delta(mu: np.ndarray, epsilon: np.ndarray) -> Answer:
    """Return the bracket of delta at eps."""
    with np.errstate(invalid="ignore", over="ignore"):
        value, _, error = log_delta(mu, epsilon)
        # Where rounding makes the bracket useless, use delta <= e^{-a^2/2}/2. It holds because `a` is rounded down.
        a = epsilon / mu - 0.5 * mu - 16.0 * ROUNDOFF * (epsilon / mu + mu)
        most = np.where(a > 0.0, np.maximum(0.5 * np.exp(-0.5 * a * a) * (1.0 + 1e-9), contour.LEAST_DELTA), 1.0)
    low, middle, high = _exponentials(value, error)
    high = np.where(low <= most, np.minimum(high, most), high)
    return Answer(low, np.minimum(middle, high), high)


def log_delta_of_one_step(
    sigma: np.ndarray, q: np.ndarray, removing: np.ndarray | bool, eps: np.ndarray, off: np.ndarray | float = 0.0
) -> tuple[np.ndarray, np.ndarray]:
    """Return (log delta or -inf, bound on its error) of one Poisson sampled Gaussian at an eps known up to `off`."""
    k, wrong = _factor(q, eps)
    alive, known = removing | (k + wrong + 1.1 * off > 0.0), removing | (wrong < 0.01 * k)
    k = np.where(removing | ~known, 1.0, k)
    inexact = 16.0 * ROUNDOFF + np.where(removing | ~known, 0.0, 1.1 * wrong / k)
    below = np.minimum(eps, 1.0)
    rising = np.where(
        eps > 1.0, eps - np.log(q) + np.log1p((q - 1.0) * np.exp(-np.maximum(eps, 1.0))), np.log1p(np.expm1(below) / q)
    )
    falling = np.log1p(np.expm1(np.where(removing, 0.0, np.minimum(eps, 700.0))) / k)
    shifted, mu = np.where(removing, rising, falling), 1.0 / sigma
    value, _, error = log_delta(mu, shifted)
    b = shifted / mu + 0.5 * mu
    total = np.where(removing, np.log(q), np.log(k)) + value
    bound = error + 1.1 * inexact * (shifted / mu * (b + 4.0) + 1.0) + 8.0 * ROUNDOFF * np.abs(total)
    if np.any(off):
        divisor = np.where(removing, q + np.expm1(below), k)
        known = known & (off <= 0.01 * divisor)
        moved = 1.1 * off * np.where(removing, np.exp(below), 1.0) / divisor
        bound = bound + moved / mu * (b + 4.0 + moved / mu) + np.where(removing, 0.0, moved)
    return np.where(alive, total, -np.inf), np.where(alive, np.where(known, bound, np.inf), 0.0)


def _factor(q: np.ndarray, eps: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return k = 1 - (1 - q) e^eps, and a bound on its error. Where eps exceeds the largest loss, k is at most 0."""
    largest = -np.log1p(-q)
    k = -np.expm1(np.clip(eps - largest, -np.inf, 1.0))
    return k, 8.0 * ROUNDOFF * (np.abs(k) + 3.0 * (largest + np.minimum(eps, largest + 1.0)))


def delta_of_one_step(
    sigma: np.ndarray, q: np.ndarray, removing: np.ndarray, eps: np.ndarray, off: np.ndarray | float = 0.0
) -> Answer:
    """Return the bracket of delta of one Poisson sampled Gaussian, at an eps >= 0 that is known up to `off`."""
    value, error = log_delta_of_one_step(sigma, q, removing, eps, off)
    low, middle, high = _exponentials(value, error)
    most = np.where(removing, q, np.maximum(np.sum(_factor(q, eps), axis=0) + 1.1 * off, 0.0)) * (1.0 + 4.0 * ROUNDOFF)
    doubtful = ~np.isfinite(error)
    if doubtful.any():
        some = (np.broadcast_to(x, doubtful.shape)[doubtful] for x in (sigma, q, removing, eps, off))
        most = np.broadcast_to(most, doubtful.shape).copy()
        most[doubtful] = np.fmin(most[doubtful], _most_of_one_step(*some))
    return Answer(*(np.minimum(end, most) for end in (low, middle, high)))


def _most_of_one_step(
    sigma: np.ndarray, q: np.ndarray, removing: np.ndarray, eps: np.ndarray, off: np.ndarray
) -> np.ndarray:
    """Bound delta from above by delta at the least possible eps, with the largest possible k there (README.md)."""
    eps = np.maximum(eps - off - 2.0 * ROUNDOFF * eps, 0.0)
    k, mu = np.maximum(np.sum(_factor(q, eps), axis=0), 0.0), 1.0 / sigma
    falling = np.log(q) + eps - np.log(k)
    inexact = 8.0 * ROUNDOFF * (np.abs(np.log(q)) + eps + np.abs(np.log(k)))
    usable = falling > 0.0
    value, _, error = log_delta(mu, np.where(usable, falling, 0.0))
    error += inexact + inexact / mu * (falling / mu + 0.5 * mu + 4.0 + inexact / mu)
    high = np.where(removing, log_delta_of_one_step(sigma, q, True, eps), (np.log(k) + value, error))
    return np.where(removing | usable, _exponentials(*high).upper, np.where(k > 0.0, k, 0.0) + contour.LEAST_DELTA)


def profile_of_one_step(
    sigma: np.ndarray, q: np.ndarray, removing: np.ndarray, eps: np.ndarray, off: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return bounds of `H_{e^eps}(P || Q)` of one Poisson sampled Gaussian, at real eps with errors up to `off`."""
    negative = eps < 0.0
    low, _, high = delta_of_one_step(sigma, q, removing ^ negative, np.abs(eps), off)
    factor, line = np.exp(np.minimum(eps, 0.0)), np.maximum(-np.expm1(eps), 0.0)
    wrong = np.where(negative, 1.1 * off, 0.0) + 4.0 * ROUNDOFF * line
    moved = np.where(negative, 1.1 * off + 4.0 * ROUNDOFF, 0.0)
    lower = np.maximum(line - wrong, 0.0) + factor * low * (1.0 - moved)
    upper = line + wrong + factor * high * (1.0 + moved)
    known = off <= 0.05
    lower = np.where(known, np.maximum(lower, 0.0) * (1.0 - 4.0 * ROUNDOFF), 0.0)
    return lower, np.where(known & (upper <= 1.0), upper * (1.0 + 4.0 * ROUNDOFF), 1.0)


def _exponentials(value: np.ndarray, error: np.ndarray) -> Answer:
    """Return a bracket of e^value; [0, 1] if the error is not finite. The upper bound is 0 only if `value` is -inf."""
    with np.errstate(invalid="ignore", over="ignore"):
        high, low = np.exp(value + error), np.exp(value - error)
        upper = np.where(value > -np.inf, np.maximum(high, contour.LEAST_DELTA), 0.0)
        upper = np.where((upper <= 1.0) & np.isfinite(error), upper, 1.0)
        lower = np.where((value > contour.LOWEST_LOG_DELTA) & (low <= upper), low, 0.0)
        middle = np.clip(np.where(np.isnan(value), 0.0, np.exp(value)), lower, upper)
    return Answer(lower, middle, upper)


def epsilon_of_one_step(
    sigma: np.ndarray, q: np.ndarray, removing: np.ndarray, delta: np.ndarray, slack: np.ndarray
) -> Answer:
    """Return the bracket of epsilon of one Poisson sampled Gaussian."""
    # Epsilon is at most the epsilon of the Gaussian without sampling and, for add, at most the largest loss.
    largest = simple_epsilon(1.0 / sigma, np.log(delta), slack).upper
    top = np.where(removing, largest, np.minimum(largest, -np.log1p(-q) * (1.0 + 4.0 * ROUNDOFF)))

    def bounds(at: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        value, error = log_delta_of_one_step(sigma, q, removing, at)
        with np.errstate(invalid="ignore"):
            return value - error, value + error

    return by_bisection(bounds, top, np.log(delta), slack)


def by_bisection(
    bounds: Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]],  # (lower, upper) bounds of log delta at eps, (2, B)
    top: np.ndarray,
    target: np.ndarray,
    slack: np.ndarray,
) -> Answer:
    """Return the bracket of the least eps in [0, top] with log delta <= target. `slack` bounds the target's error."""
    surely = np.array([[True], [False]])  # row 0 finds the upper bound of epsilon, row 1 the lower bound
    low, high = np.zeros((2, top.size)), np.stack([top, top])
    for turn in range(78):  # 12 turns for the exponent of epsilon, 53 for its digits, and 13 to spare
        # The exponent is bisected first, since epsilon may be as small as the smallest float64.
        root = np.sqrt(np.maximum(low, LEAST_EPSILON)) * np.sqrt(high)
        at = np.where(high > 4.0 * np.maximum(low, LEAST_EPSILON), root, 0.5 * (low + high))
        at = np.zeros_like(at) if turn == 0 else at
        least, most = bounds(at)
        with np.errstate(invalid="ignore"):
            met = np.where(surely, most <= target - slack, ~(least >= target + slack))
        if turn == 0:
            high = np.where(met, 0.0, high)
            continue
        before = low, high
        low, high = np.where(met, low, at), np.where(met, at, high)
        if np.array_equal(before, (low, high)):
            break  # `low` and `high` are neighbours in float64 in every row
    low = np.where(high == 0.0, 0.0, low)
    lower, upper = np.where(low[1] <= high[0], low[1], 0.0), high[0]
    return Answer(lower, 0.5 * (lower + upper), upper)


class Atoms(NamedTuple):
    """Finite losses of one step and their masses: pairs (lower, upper) of bounds, (B, A) for B rows and A losses."""

    loss: tuple[np.ndarray, np.ndarray]
    mass: tuple[np.ndarray, np.ndarray]

    def delta(self, eps: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return lower and upper bounds of `sum mass (1 - e^{eps - loss})_+` at eps, (..., B)."""
        # Every term is positive and has a relative error of a few ROUNDOFF, so `units` covers the sum's error.
        units = ROUNDOFF * (self.mass[0].shape[-1] + 16.0)
        ends = []
        for loss, mass, outward in zip(self.loss, self.mass, (-1.0, 1.0), strict=True):
            share = -np.expm1(np.minimum(eps[..., None] - loss, 0.0))
            underflow = np.sum(share > 0.0, axis=-1) * contour.LEAST_DELTA
            ends.append(np.sum(mass * share, axis=-1) * (1.0 + outward * units) + outward * underflow)
        return np.maximum(ends[0], 0.0), ends[1]


def atoms(loss: np.ndarray, mass: np.ndarray) -> Atoms:
    """Return `Atoms`: bounds of the exact losses and masses, given the losses and masses that were computed."""
    wrong = ROUNDOFF * (LOSS_UNITS + 4.0) * np.abs(loss) + 2.0 * FINITE_LOSS_ERROR
    off = np.where(mass > 0.0, inexact(np.where(mass > 0.0, mass, 1.0)), 0.0)
    return Atoms((loss - wrong, loss + wrong), (np.maximum(mass - off, 0.0), mass + off))


def delta_of_atoms(loss: np.ndarray, mass: np.ndarray, eps: np.ndarray) -> Answer:
    """Return the bracket of delta of one step with finitely many losses."""
    low, high = atoms(loss, mass).delta(eps)
    high = np.minimum(high, 1.0)
    return Answer(np.minimum(low, high), np.minimum(0.5 * (low + high), high), high)


def epsilon_of_atoms(loss: np.ndarray, mass: np.ndarray, delta: np.ndarray, slack: np.ndarray) -> Answer:
    """Return the bracket of epsilon of one step with finitely many losses."""
    law = atoms(loss, mass)
    top = np.maximum(np.max(law.loss[1], axis=1), 0.0)

    def bounds(at: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        low, high = law.delta(at)
        with np.errstate(divide="ignore"):
            return np.log(low) - ROUNDOFF_OF_LOG, np.log(high) + ROUNDOFF_OF_LOG

    return by_bisection(bounds, top, np.log(delta), slack)
