"""The moment generating function of a mixture of Gaussians by the trapezoid rule, with its error.

One branch has the pair P = sum_j w_j N(s_j, 1), Q = N(0, 1) in u, s_j >= 0, with the ratio
mix = sum_j w_j e^{s_j u - s_j^2/2}.  In either direction M(z) = int phi(u) mix(u)^a du, with a = z + 1 for remove and
a = -z for add.  README.md, section 7, has the proofs.  NumPy only.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import scipy

from jaxacct.core.floats import ROUNDOFF
from jaxacct.kernels.arrays import Array
from jaxacct.kernels.special import logsumexp

__all__ = ["BranchLaw", "Line", "Quadrature", "TooMany", "line", "quadrature"]

SMALL_LOSSES = 30.0
"""Largest exponent up to which mix - 1 is a sum of expm1."""
RANGE = 12.0
"""Standard deviations that the grid goes beyond where the tilted law can have its mass."""
LINES = (1.0, 0.75, 0.5, 0.35, 0.25, 0.16, 0.1, 0.06, 0.03)
"""Heights of the lines on which the integrand is bounded, over the largest that serves."""
MOST_POINTS = 100_000
"""Most points of a grid."""
MOST_CELLS = 6e6
"""Most points times components."""
REFINEMENTS = 8
"""Times that the step is made 1.4 times shorter where the bound of the quadrature error is not small enough."""


class TooMany(ArithmeticError):
    """A grid or a contour would be longer than is allowed, or float64 does not hold its numbers."""


class BranchLaw(NamedTuple):
    """A branch in one direction."""

    shift: Array  # (A,) in deviations, ascending
    weight: Array  # (A,) positive; their true values, each within 4 units, sum to 1
    sign: float  # 1 remove, -1 add


class Quadrature(NamedTuple):
    """A branch under the tilt e^{c loss}: p sums to 1 up to rounding and error."""

    law: BranchLaw
    power: float  # a at t = 0
    step: float
    u: Array  # (X,)
    log_mix: Array  # (X,)
    slope: Array  # (X,) d log_mix/du, the posterior mean of the shift
    p: Array  # (X,)
    log_m: float  # log M(c)
    log_m_error: float
    from_step: float
    """Relative to M(c): what step and range cost for any t up to the largest asked for."""
    by_size: float
    by_length: float
    """Rounding of M(c + it)/M(c): at most min(by_size, t by_length)."""


def quadrature(law: BranchLaw, c: float, t: float, log_goal: float) -> Quadrature:
    """M on the line Re z = c up to Im z = t; the error of step and range is driven to e^log_goal of M(c)."""
    shift, weight = law.shift, law.weight
    power = c + 1.0 if law.sign > 0 else -c
    least, most = float(shift[0]), float(shift[-1])
    spread = most - least
    need = -log_goal
    reach = max(RANGE, float(np.sqrt(2.0 * (need + 5.0))))
    if law.sign > 0:
        left, right = -reach, power * most + reach
    else:
        # the posterior mean of the shift falls to the left, so that the tilted law has its mode above -c mean
        at_zero = weight * np.exp(-0.5 * (shift**2 - least**2))
        left, right = -(c * float(at_zero @ shift / at_zero.sum()) + reach), reach
    top = 0.5 * np.pi / spread if spread > 0.0 else np.inf
    best = np.sqrt(2.0 * need)
    height = min(best, top)
    width = 2.0 * np.pi / (t * most + need / height + 0.5 * height)
    for _ in range(REFINEMENTS):
        fraction, exponent = np.frexp(width)
        step = float(np.ldexp(np.floor(fraction * 32.0) / 32.0, int(exponent)))  # nodes are exact
        first, last = int(np.floor(left / step)), int(np.ceil(right / step))
        if not 0 < last - first <= MOST_POINTS or (last - first) * shift.size > MOST_CELLS:
            raise TooMany("quadrature points")
        found = _on_grid(law, power, t, step * np.arange(first, last + 1), step, height)
        if np.log(max(found.from_step, 1e-320)) <= log_goal + 1.0:
            break
        width *= 0.7
    if not np.isfinite(found.log_m) or not found.from_step < 1e-3:
        raise TooMany("the error of a step")
    return found


def _log_mix(law: BranchLaw, u: Array) -> tuple[Array, Array, Array, Array]:
    """(log mix, its error, the posterior mean of the shift, the posterior (X, A))."""
    shift, weight = law.shift, law.weight
    y = u[:, None] * shift - 0.5 * shift**2
    top = np.max(y + np.log(weight), axis=1)
    posterior = np.exp(y + np.log(weight) - top[:, None])
    total = posterior.sum(axis=1)
    posterior /= total[:, None]
    plain = top + np.log(total)
    small = np.expm1(np.minimum(y, SMALL_LOSSES))
    change, size = small @ weight, np.abs(small) @ weight
    by_change = (np.max(y, axis=1) <= SMALL_LOSSES) & (change > -0.5)
    log_mix = np.where(by_change, np.log1p(np.where(by_change, change, 0.0)), plain)
    moved = (posterior * (8.0 * np.abs(u[:, None] * shift) + 8.0 * shift**2)).sum(axis=1)
    terms = shift.size + 16.0
    relative = np.where(by_change, size / np.maximum(1.0 + change, 0.5), 1.0 + np.abs(top))
    error = ROUNDOFF * (moved + terms * relative + 8.0 * np.abs(log_mix))
    return log_mix, error, posterior @ shift, posterior


def _on_grid(law: BranchLaw, power: float, t: float, u: Array, step: float, height: float) -> Quadrature:
    shift = law.shift
    log_mix, wrong, slope, posterior = _log_mix(law, u)
    log_phi = -0.5 * u**2 - 0.5 * np.log(2.0 * np.pi)
    exponent = power * log_mix
    log_f = log_phi + exponent
    top = float(np.max(log_f)) + np.log(step)
    own = np.abs(power) * wrong + 4.0 * ROUNDOFF * np.abs(exponent)  # relative error of mix^a
    drift = ROUNDOFF * (2.0 * u**2 + 20.0)  # relative error of step * phi
    if top < 20.0:
        base = step * np.exp(log_phi)
        rise = np.where(
            exponent > SMALL_LOSSES, step * np.exp(log_f) - base, base * np.expm1(np.minimum(exponent, 31.0))
        )
        size, both = np.abs(rise), step * np.exp(log_f)
        less_one = float(np.sum(rise))
        log_m = float(np.log1p(less_one)) if less_one > -0.5 else -np.inf
        rounding = float(np.sum(size * (drift + 4.0 * ROUNDOFF) + both * own) + u.size * ROUNDOFF * np.sum(size))
        rounding = rounding / (1.0 + less_one) + 6.0 * ROUNDOFF * abs(log_m)
    else:
        log_m = float(logsumexp(log_f)) + float(np.log(step))
        weight = np.exp(log_f + np.log(step) - log_m)
        rounding = float(np.sum(weight * (drift + own))) + ROUNDOFF * (u.size + 8.0 * abs(log_m) + 8.0 * abs(top))
    p = np.exp(log_f + np.log(step) - log_m)
    relative = drift + own + 8.0 * ROUNDOFF * (np.abs(log_f) + abs(log_m)) + ROUNDOFF * (5.0 * u.size + 40.0) + rounding
    length = float(np.sum(p * (relative * np.abs(log_mix) + 2.0 * wrong + 8.0 * ROUNDOFF * np.abs(log_mix))))
    size = float(np.sum(p * (2.0 * relative + 16.0 * ROUNDOFF)))
    ends = np.array([0, -1])
    log_tails = _log_tails(law, power, u[ends], log_mix[ends], log_f[ends])
    tails = float(np.exp(min(np.logaddexp(*log_tails) - log_m, 700.0)))
    unit = float(np.exp(np.logaddexp(scipy.special.log_ndtr(u[0]), scipy.special.log_ndtr(-u[-1])) - log_m))
    strip = _strip(law, power, t, u, step, height, log_m, log_mix, posterior)
    unit += 2.0 / np.expm1(min(2.0 * np.pi**2 / step**2, 700.0)) * np.exp(-log_m) if top < 20.0 else 0.0
    from_step = 1.01 * (2.0 * tails + 2.0 * unit + strip) if shift.size else np.inf
    log_m_error = 2.0 * (rounding + from_step) if rounding + from_step < 0.25 else np.inf
    return Quadrature(law, power, step, u, log_mix, slope, p, log_m, log_m_error, from_step, 1.1 * size, 1.1 * length)


def _log_tails(law: BranchLaw, power: float, ends: Array, log_mix: Array, log_f: Array) -> tuple[float, float]:
    """Logarithms of bounds of the integral of phi mix^a beyond either end of the grid."""
    low, high = float(ends[0]), float(ends[1])
    if power >= 0.0:
        gap = high - power * float(law.shift[-1])
        if gap < 0.0:
            return np.inf, np.inf
        return power * float(log_mix[0]) + float(scipy.special.log_ndtr(low)), float(log_f[1]) - float(
            np.log(max(gap, 0.79))
        )
    return _left_of_add(law, -power, low, float(log_mix[0]))[0], power * float(log_mix[1]) + float(
        scipy.special.log_ndtr(-high)
    )


def _left_of_add(law: BranchLaw, c: float, low: float, log_mix: float) -> tuple[float, float]:
    """Logarithms of two bounds of the integral of phi mix^-c below `low`: by the tangent there, and by w_min."""
    y = np.log(law.weight) + law.shift * low - 0.5 * law.shift**2
    posterior = np.exp(y - logsumexp(y))
    mean, least = float(posterior @ law.shift), float(law.shift[0])
    tangent = -c * log_mix + c * mean * low + 0.5 * (c * mean) ** 2 + float(scipy.special.log_ndtr(low + c * mean))
    by_least = (
        -c * float(np.log(law.weight[0]))
        + 0.5 * (c * c + c) * least**2
        + float(scipy.special.log_ndtr(low + c * least))
    )
    return tangent + 1e-9 * (1.0 + abs(c * mean * low) * 1e-3), by_least


class Line(NamedTuple):
    """Bounds of the modulus of phi mix^a at Im a = 0 on u + iv, over M(c), and arg mix there, which grows with u."""

    v: float
    log_cells: Array  # (X - 1,) integrals over the cells of the grid
    angle: Array  # (X,)
    log_left: float
    log_right: float
    """Integrals beyond either end of the grid."""


def line(law: BranchLaw, power: float, u: Array, step: float, v: float, log_m: float) -> Line:
    """The line at a height v of at most pi/2 over the spread of the shifts, bounded cell by cell by the worse end."""
    log_mix, _, _, posterior = _log_mix(law, u)
    return _line(law, power, u, step, v, log_m, log_mix, posterior)


def _line(
    law: BranchLaw, power: float, u: Array, step: float, v: float, log_m: float, log_mix: Array, posterior: Array
) -> Line:
    shift, middle = law.shift, 0.5 * float(law.shift[0] + law.shift[-1])
    log_phi = -0.5 * u**2 - 0.5 * np.log(2.0 * np.pi)
    turned = posterior @ np.exp(1j * (shift - middle) * v)
    with np.errstate(divide="ignore"):
        modulus = power * (log_mix + np.log(np.abs(turned)))
    grown = 0.5 * v * v - log_m
    cells = np.maximum(log_phi[:-1], log_phi[1:]) + np.maximum(modulus[:-1], modulus[1:]) + np.log(step) + grown
    left, right = _log_tails(law, power, u[[0, -1]], log_mix[[0, -1]], (log_phi + power * log_mix)[[0, -1]])
    if power >= 0.0:
        left += float(modulus[0]) - power * float(log_mix[0])
    else:
        right += float(modulus[-1]) - power * float(log_mix[-1])
        bent = float(np.log(np.cos(0.5 * float(law.shift[-1] - law.shift[0]) * v)))  # of |mix(u + iv)|/mix(u), at least
        left = min(left + power * bent, _left_of_add(law, -power, float(u[0]), float(log_mix[0]))[1])
    return Line(v, cells, middle * v + np.angle(turned), left + grown, right + grown)


def _strip(
    law: BranchLaw, power: float, t: float, u: Array, step: float, height: float, log_m: float, *known: Array
) -> float:
    """The quadrature error over M(c), by the integral of the modulus on two lines u +- iv."""
    least = np.inf
    for share in LINES:
        v = share * height
        on = _line(law, power, u, step, v, log_m, *known)
        grown = on.log_cells + t * np.maximum(on.angle[:-1], on.angle[1:])
        ends = np.logaddexp(on.log_left + t * float(on.angle[0]), on.log_right + t * float(law.shift[-1]) * v)
        total = float(np.logaddexp(logsumexp(np.concatenate([grown, on.log_cells])), np.log(2.0) + ends))
        kernel = 2.0 * np.pi * v / step
        least = min(least, float(np.exp(np.minimum(total - kernel - np.log(-np.expm1(-kernel)), 700.0))))
    return least
