"""What the split contour leaves out: compositions with a far step, and bulk compositions (kernels/README.md)."""

import math
from typing import NamedTuple

import numpy as np

from jaxacct.core.floats import ROUNDOFF
from jaxacct.kernels.arrays import Array, erfc, log1p, namespace, pick
from jaxacct.kernels.contour import gaussian_errors
from jaxacct.kernels.contour.core import log_kappa
from jaxacct.kernels.contour.split_parts import (
    NO_WINDOW,
    Grid,
    Windows,
    composed,
    grid,
    high_blur,
    low_blur,
    place_of,
    steps_of,
)
from jaxacct.kernels.law import LossLaw, log_mix

FAR_LOSSES = np.geomspace(0.05, 100.0, 24)
"""Factors f. A far window is tried two window widths above the u of each loss max(eps, 0) + f scale (`scale_of`)."""
BULK_END = 13.0
"""A bulk step's law is cut off this many window widths above the low window's centre. Bounds cover the lost mass."""
LARGEST_EXPONENT = 600.0
"""eps and 1/sigma^2 are capped at this before they are exponentiated: e^600 is far below the largest float64."""
LARGEST_MOMENT = 1e200
"""A moment larger than this gives no useful bound. In its place the bound is inf."""
FAR_ROUNDING = 1e-11
"""Relative rounding error allowed for `FarMasses`. The few operations that compute them cause far less."""
OUTWARD = 1.000001
"""Factor that covers the rounding of a sum of exponentials whose exponents are accurate to a part in 1e8."""


class FarMasses(NamedTuple):
    """The probability, under P and under Q, that the outcome of at least one step is in the far tail."""

    p: Array  # 1 - prod m^n, where m is the P-mass of one step's outcomes that are not far
    q: Array  # 1 - prod m'^n, where m' is the Q-mass of these outcomes


class Remainder(NamedTuple):
    """Bounds, for every eps, of the part of delta that the contour does not integrate."""

    far: FarMasses  # compositions with a far step contribute far.p - e^eps far.q, plus the excess
    excess_at: Array  # (E,) exponents theta: the excess is at most e^{excess_log + theta eps}
    excess_log: Array  # (E,) logarithms at eps = 0 of the bounds of the excess
    bulk_at: Array  # (E,) abscissae of the Chernoff bounds of bulk compositions
    bulk_log: Array  # (E,) logarithms of these bounds at eps = 0
    bulk_mass: Array  # bound of the mass of bulk compositions with a step beyond the cut-off (BULK_END)
    log_mass: Array  # logarithm of an upper bound of the mass that the contour integrates


class WindowChoice(NamedTuple):
    """Centres of the windows of J sampled Gaussians, and abscissae at which the remainder is bounded."""

    low: Array  # (J,) centre of the low window in u
    high: Array  # (J,) centre of the far window in u
    bulk_at: Array  # abscissa of the Chernoff bound of bulk compositions
    excess_at: Array  # abscissa of the bound of the excess (`Remainder`)
    separable: Array  # whether bulk compositions are negligible at eps


def _phi(x: Array) -> Array:
    """Return Phi(x), the normal distribution function."""
    return 0.5 * erfc(namespace(x), -x * 0.5**0.5)


def far_by_mass(law: LossLaw, log_goal: Array) -> Array:
    """Return limits in u, (J,). The probability that at least one outcome exceeds its limit is below e^log_goal."""
    xp = namespace(law.gauss_n, log_goal)
    spread = xp.sqrt(1.0 + high_blur(law.gauss_sigma) ** 2)
    room = xp.log(2.0 * law.gauss_n * law.gauss_n.shape[-1]) - log_goal[..., None]
    bulk = xp.sqrt(2.0 * xp.maximum(room, 1.0))
    hits = 1.0 / law.gauss_sigma + xp.sqrt(2.0 * xp.maximum(room + xp.log(law.gauss_q), 1.0))
    return spread * xp.maximum(bulk, hits)


def scale_of(law: LossLaw, epsilon: Array) -> Array:
    """Return the size of the losses that decide delta: max(eps, m/4), where m = min(`without_hits`, `deviation`)."""
    xp = namespace(law.gauss_n, epsilon)
    q, n, exponent = law.gauss_q, law.gauss_n, xp.minimum(law.gauss_sigma**-2.0, LARGEST_EXPONENT)
    without_hits = -xp.sum(n * log1p(-q), axis=-1)  # the loss if no step samples the record
    deviation = xp.sqrt(xp.sum(n * q**2 * xp.expm1(exponent), axis=-1) + law.mu2)  # standard deviation of the loss
    # At eps = 0, the factors 0.25 and 1 certify all of 180 random configurations with few hits; 0.03 certifies 90 %.
    return xp.maximum(epsilon, xp.maximum(0.25 * xp.minimum(without_hits, deviation), 1e-12))


def choose(law: LossLaw, epsilon: Array, log_delta: Array, log_tol: Array) -> WindowChoice:
    """Choose windows for a given eps so that the remainder is below e^{log_delta + log_tol}."""
    # axes of arrays, in this order: sampled Gaussians, abscissae, centres of a window, points of the quadrature
    xp = namespace(law.gauss_n, epsilon)
    goal = (log_delta + log_tol)[..., None]
    scale = scale_of(law, epsilon)[..., None]
    widest = far_by_mass(law, log_delta + log_tol)
    sigma, q = law.gauss_sigma[..., None], law.gauss_q[..., None]
    # A rough quadrature chooses the windows. No bound depends on it. It starts at u = -9: Q(u < -9) is about 1e-19.
    step = (widest + 9.0) / 159
    u = -9.0 + step[..., None] * xp.arange(160)
    loss, _ = log_mix(sigma, q, u)
    base = xp.log(step)[..., None] - 0.5 * u**2 - 0.5 * xp.log(2.0 * xp.pi)
    base, loss, u = (x[..., None, :] for x in (base, loss, u))

    c = np.geomspace(1.5, 150.0, 14) / scale  # abscissae of the Chernoff bounds that choose windows
    at = c[..., None, :, None]
    plain = law.mu2[..., None] * c * (c + 1.0) / 2.0 + log_kappa(c)

    # the far window goes to the lowest centre at which the excess is negligible
    losses = xp.maximum(epsilon, 0.0)[..., None] + scale * FAR_LOSSES
    highs = place_of(sigma, q, losses[..., None, :]) + 2.0 * high_blur(sigma)
    highs = xp.minimum(highs, widest[..., None])
    outside = _phi((u - highs[..., None]) / high_blur(sigma)[..., None])
    shrunk = xp.exp(base - at * loss)
    whole = xp.log(xp.sum(shrunk, axis=-1) + 1e-300)
    sums = xp.log(_composed_pairs(law.gauss_n, xp.matmul(shrunk, xp.swapaxes(outside, -1, -2))) + 1e-300)
    bounds = sums + (composed(law.gauss_n, whole) + plain + (c + 1.0) * epsilon[..., None])[..., None]
    reached = xp.min(bounds, axis=-2) <= goal
    found = xp.any(reached, axis=-1)
    first = xp.where(found, xp.argmax(reached, axis=-1), FAR_LOSSES.size - 1)
    high = xp.where(found[..., None], pick(xp, highs, first[..., None]), widest)
    excess_at = pick(xp, c, xp.argmin(pick(xp, bounds, first[..., None]), axis=-1))

    # The low window goes to the highest of 14 centres at which bulk compositions are negligible at eps. A centre
    # lies two window widths below the u of a loss. The 14 losses range from 0.005 to 0.8 times `scale`.
    lows = place_of(sigma, q, (scale * np.geomspace(0.005, 0.8, 14))[..., None, :]) - 2.0 * low_blur(sigma)
    place = (lows[..., None] - u) / low_blur(sigma)[..., None]
    inside = xp.where(place > -BULK_END, _phi(place), 0.0)
    most = inside[..., -1:, :]  # the last window has the highest centre, so it is the largest at every u
    shares = inside / xp.where(most > 0.0, most, 1.0)
    grown = base + (at + 1.0) * loss + xp.log(most)
    top = xp.max(grown, axis=-1)[..., None]
    sums = xp.matmul(xp.exp(grown - top), xp.swapaxes(shares, -1, -2))
    moments = top + xp.log(xp.maximum(sums, 1e-300))
    bounds = _composed_pairs(law.gauss_n, moments) + (plain - c * epsilon[..., None])[..., None]
    level = xp.sum(xp.cumprod(xp.where(xp.min(bounds, axis=-2) <= goal, 1, 0), axis=-1), axis=-1) - 1
    removing = law.sign > 0
    separable = (level >= 0) & removing
    level = xp.maximum(level, 0)[..., None]
    low, bulk_at = pick(xp, lows, level), pick(xp, c, xp.argmin(pick(xp, bounds, level), axis=-1))
    low, high = (xp.where(removing[..., None], x, NO_WINDOW) for x in (xp.minimum(low, high), high))
    return WindowChoice(low, high, bulk_at, excess_at, separable)


def _composed_pairs(n: Array, x: Array) -> Array:
    """Return `sum n x` over the J sampled Gaussians, for n of shape (J,) and x of shape (J, abscissae, windows)."""
    return namespace(n, x).sum(n[..., None, None] * x, axis=-3)


def far_masses(law: LossLaw, high: Array) -> FarMasses:
    """Return the probabilities, under P and under Q, that at least one step has an outcome in the far tail."""
    xp = namespace(law.gauss_n, high)
    sigma, q = law.gauss_sigma, law.gauss_q
    spread = xp.sqrt(1.0 + high_blur(sigma) ** 2)
    from_q = _phi(-high / spread)
    from_p = (1.0 - q) * from_q + q * _phi((1.0 / sigma - high) / spread)
    return FarMasses(*(-xp.expm1(xp.sum(law.gauss_n * log1p(-tail), axis=-1)) for tail in (from_p, from_q)))


def bulk_grids(law: LossLaw, choice: WindowChoice, points: int) -> tuple[Grid, Array]:
    """Return grids cut off BULK_END widths above the low window, and two abscissae for the bulk's Chernoff bound."""
    xp = namespace(law.gauss_n, choice.low)
    sigma, one = law.gauss_sigma, xp.ones_like(choice.bulk_at)
    stop = choice.low + BULK_END * low_blur(sigma)
    grids = grid(steps_of(law, choice.low, choice.high), one[..., None], points, stop=stop)
    return grids, xp.stack([f * choice.bulk_at for f in (0.85, 1.1)])  # if 1.1 is too large for the grid, 0.85 counts


def bounds(
    law: LossLaw,
    windows: Windows,
    choice: WindowChoice,
    masses: FarMasses,
    bulk_at: Array,
    bulk_log: Array,
    points: int,
) -> Remainder:
    """Return certified bounds of the remainder; `bulk_at` and `bulk_log` are as in `Remainder`."""
    xp = namespace(law.gauss_n, windows.high)
    sigma, q, n = law.gauss_sigma, law.gauss_q, law.gauss_n
    near = xp.sqrt(1.0 + low_blur(sigma) ** 2)
    leap = (1.0 - q) * _phi(-choice.low / near) + q * _phi((1.0 / sigma - choice.low) / near)
    leap = xp.sum(n * leap, axis=-1)
    log_mass = xp.where(windows.keep_bulk > 0, 0.0, xp.minimum(xp.log(leap + 1e-300), 0.0))

    at = xp.stack([f * choice.excess_at for f in (0.8, 1.25)])
    each = _far_moment(sigma, q, windows.high, at[..., None], points)
    most = xp.where(n > 0, n * xp.minimum(each, LARGEST_MOMENT), 0.0)
    useless = xp.any((n > 0) & ~(each < LARGEST_MOMENT), axis=-1)
    excess = xp.log(xp.sum(most, axis=-1) + 1e-300) + gaussian_errors.chernoff(law._replace(sign=-law.sign), at, points)
    excess = xp.where(useless | xp.isnan(excess), xp.inf, excess)

    stop = choice.low + BULK_END * low_blur(sigma)
    bulk = xp.where(windows.keep_bulk > 0, -xp.inf, bulk_log)
    beyond = (1.0 - q) * _phi(-stop) + q * _phi(1.0 / sigma - stop)
    largest_window = 1.01 * 0.5 * math.erfc(BULK_END * 0.5**0.5)  # upper bound of w1 beyond `stop`
    stopped = xp.where(windows.keep_bulk > 0, 0.0, largest_window * xp.sum(n * beyond, axis=-1))
    excess_at, excess, bulk_at, bulk = (xp.moveaxis(x, 0, -1) for x in (at + 1.0, excess, bulk_at, bulk))
    return Remainder(masses, excess_at, excess, bulk_at, bulk, stopped, log_mass)


def _far_moment(sigma: Array, q: Array, high: Array, c: Array, points: int) -> Array:
    """Return an upper bound of `E_Q[(1 - w2) mix^{-c}]`. The share 1 - w2 of an outcome belongs to the far tail."""
    xp = namespace(sigma, high, c)
    blur = high_blur(sigma)
    start, end = high - 25.0 * blur, high + 40.0 * blur  # the range of u that is cut into `points` cells
    step = (end - start) / points
    left = start[..., None] + step[..., None] * xp.arange(points)
    window = (high[..., None] - left - step[..., None]) / blur[..., None]
    window = xp.minimum(-0.5 * xp.maximum(window, 0.0) ** 2, 0.0)
    nearest = xp.maximum(left, 0.0)
    loss, posterior = log_mix(sigma[..., None], q[..., None], left)
    edge = 2.0 / sigma**2 + 4.0 * (xp.abs(start) + xp.abs(end)) / sigma - 3.0 * xp.log(q)
    in_y = 4.0 * xp.abs(left) / sigma[..., None] + edge[..., None]
    rounding = ROUNDOFF * (2.0 * gaussian_errors.LOG_MIX_UNITS * xp.abs(loss) + posterior * in_y)
    cells = xp.exp((window - 0.5 * nearest**2) - c[..., None] * (loss - rounding))
    below = xp.exp(-312.0 - c * log1p(-q))  # bounds the part u < `start`, where 1 - w2 < e^-312 and mix >= 1 - q
    last = xp.exp(-c * log_mix(sigma, q, end)[0] - 0.5 * xp.maximum(end, 0.0) ** 2)
    return xp.sum(cells, axis=-1) * step / xp.sqrt(2.0 * xp.pi) * 1.0000001 + below + last


def far(masses: FarMasses, epsilon: Array) -> tuple[Array, Array]:
    """Return (lower bound of the part of delta where at least one step is in the far tail, its derivative in eps)."""
    xp = namespace(masses.p, epsilon)
    scaled = xp.exp(xp.minimum(epsilon, LARGEST_EXPONENT)) * masses.q
    linear = masses.p * (1.0 - FAR_ROUNDING) - scaled * (1.0 + FAR_ROUNDING)
    # Where e^eps or the mass under Q is near float64's limits, the bound is set to 0.
    linear = xp.where((epsilon < LARGEST_EXPONENT) & (masses.q > 1e-290), linear, 0.0)
    return xp.maximum(linear, 0.0), xp.where(linear > 0, -scaled, 0.0)


def far_above(bounds: Remainder, epsilon: Array) -> Array:
    """Return an upper bound of the part of delta where at least one step is in the far tail."""
    xp = namespace(bounds.excess_log, epsilon)
    least = xp.min(bounds.excess_log + bounds.excess_at * epsilon[..., None], axis=-1)
    scaled = xp.exp(xp.minimum(epsilon, LARGEST_EXPONENT)) * bounds.far.q
    linear = bounds.far.p * (1.0 + FAR_ROUNDING) - scaled * (1.0 - FAR_ROUNDING)
    # The contour's integral ends at the last node of its grid. The term 1e-60 far.p bounds the mass beyond this node.
    above = xp.maximum(linear, 0.0) + OUTWARD * xp.exp(xp.minimum(least, 0.0)) + 1e-60 * bounds.far.p
    return xp.minimum(above, bounds.far.p * (1.0 + FAR_ROUNDING))


def bulk(bounds: Remainder, epsilon: Array) -> Array:
    """Return an upper bound of the part of delta where all steps are in the bulk."""
    xp = namespace(bounds.bulk_log, epsilon)
    least = xp.min(bounds.bulk_log - bounds.bulk_at * epsilon[..., None], axis=-1)
    return OUTWARD * xp.exp(xp.minimum(least, 0.0)) + bounds.bulk_mass
