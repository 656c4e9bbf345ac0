"""What the split contour does not integrate: compositions with a far step, and those of bulk steps alone.

The first have a closed form and a bounded excess; the second are bounded.

*Far.*  Let W be the event that no step is far (in the sense of the smooth window w2).  With a far step the loss
almost surely exceeds eps, so that its payoff `(1 - e^{eps-S})_+` is `1 - e^{eps-S}`, whose expectation is

    far(eps) = (1 - prod m^n) - e^eps (1 - prod m'^n),    m = E_P[w2],  m' = E_Q[w2].

The true contribution is at least that and at least 0, at most `1 - prod m^n`, and at most far + excess, where
`(e^x - 1)_+ <= kappa(theta - 1) e^{theta x}` gives

    excess = sum n E_P[(1 - w2) e^{-theta L}] prod M(-theta)^n e^{theta eps} kappa(theta - 1)    for every theta > 1,

with `M_remove(-theta) = M_add(theta - 1)`.

*Bulk.*  For keep_bulk = 0 the compositions of bulk steps alone are bounded by Chernoff.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxacct.floats import ROUNDOFF
from jaxacct.kernels import certificate
from jaxacct.kernels.arrays import Array
from jaxacct.kernels.law import LossLaw, log_mix
from jaxacct.kernels.special import log1p, log_ndtr
from jaxacct.kernels.split.parts import NO_WINDOW, Grid, Windows, grid, high_blur, low_blur, place_of

LOW_WINDOWS = 14
"""Places of the low window that are tried; no bound depends on how many."""
LOWEST_LOSS, HIGHEST_LOSS = 0.005, 0.8
"""Between which losses, over eps, they lie: from nearly all outcomes jumps to the bulk reaching nearly to eps."""
FAR_WINDOWS = 24
"""Places of the far window that are tried; no bound depends on how many."""
NEAREST_EXCESS, FARTHEST_EXCESS = 0.05, 100.0
"""By how much, over eps, the loss at these places exceeds eps."""
ABSCISSAE = 14
"""Abscissae at which the Chernoff bounds that choose windows are tried."""
LEAST_ABSCISSA, LARGEST_ABSCISSA = 1.5, 150.0
"""Between which of them they lie, over 1/eps."""
BULK_END = 13.0
"""Widths of the low window beyond it at which a bulk step ends sharply; what is left is counted by its mass."""
BULK_ABSCISSA_FACTORS = (0.85, 1.1)
"""Where the bounds of bulk compositions are certified, around the best abscissa of a few."""
EXCESS_ABSCISSA_FACTORS = (0.8, 1.25)
"""The same for the bounds of the excess."""
CHOICE_POINTS = 160
"""Quadrature points for choosing windows; no bound depends on them."""
CHOICE_REACH = 9.0
"""How far that quadrature reaches below 0 in u: beyond are 1e-19 of the outcomes."""
LARGEST_EXPONENT = 600.0
"""Largest eps whose exponential is used: e^600 is far from float64's limits."""
LARGEST_MOMENT = 1e200
"""Beyond it a moment bounds nothing, and is replaced by inf."""
FAR_CELLS_BELOW, FAR_CELLS_ABOVE = 25.0, 40.0
"""Widths of the far window between which the far moment is bounded cell by cell: 1 - w2 < e^-312 below."""
LAST_NODE_SHARE = 1e-60
"""More than the share of the far mass that the integrated law loses beyond its last node."""
FAR_ROUNDING = 1e-11
"""Relative rounding of the far masses, far more than their few operations make."""
OUTWARD = 1.000001
"""Factor for the rounding of a sum of exponentials, whose logarithms are known to a part in 1e8 or better."""


class FarMasses(NamedTuple):
    """The masses of the compositions with a far step."""

    p: Array  # under P: 1 - prod m^n
    q: Array  # under Q: 1 - prod m'^n


class Remainder(NamedTuple):
    """Bounds of what the contour does not integrate, as functions of eps."""

    far: FarMasses
    excess_at: Array  # (E,) theta
    excess_log: Array  # (E,) log of the excess at eps = 0
    bulk_at: Array  # (E,) abscissae
    bulk_log: Array  # (E,) log of the Chernoff bounds at eps = 0
    bulk_mass: Array  # of bulk compositions with a step beyond the sharp end
    log_mass: Array  # log of a bound of the mass that the contour does integrate


class WindowChoice(NamedTuple):
    """Where to split, and the best abscissae for bounding what is then not integrated."""

    low: Array  # (J,) centre of the low window in u
    high: Array  # (J,) and of the far window
    bulk_at: Array
    excess_at: Array
    separable: Array  # whether the compositions of bulk steps are negligible at eps


def _phi(x: Array) -> Array:
    """Phi(x)."""
    return 0.5 * lax.erfc(-x * 0.5**0.5)


def far_by_mass(law: LossLaw, log_goal: Array) -> Array:
    """(J,) places beyond which all n steps together have less than e^log_goal of the mass."""
    spread = jnp.sqrt(1.0 + high_blur(law.gauss_sigma) ** 2)
    room = jnp.log(2.0 * law.gauss_n * law.gauss_n.size) - log_goal
    bulk = jnp.sqrt(2.0 * jnp.maximum(room, 1.0))
    hits = 1.0 / law.gauss_sigma + jnp.sqrt(2.0 * jnp.maximum(room + jnp.log(law.gauss_q), 1.0))
    return spread * jnp.maximum(bulk, hits)


def choose(law: LossLaw, epsilon: Array, log_delta: Array, log_tol: Array) -> WindowChoice:
    """Where to split for a given eps, so that what is not integrated is below e^{log_delta + log_tol}."""
    goal = log_delta + log_tol
    scale = jnp.maximum(epsilon, 1e-12)
    widest = far_by_mass(law, log_delta + log_tol)
    sigma, q, n = law.gauss_sigma[:, None], law.gauss_q[:, None], law.gauss_n
    step = (widest + CHOICE_REACH) / (CHOICE_POINTS - 1)
    u = -CHOICE_REACH + step[:, None] * jnp.arange(CHOICE_POINTS)
    loss, _ = jax.vmap(log_mix)(law.gauss_sigma, law.gauss_q, u)
    base = jnp.log(step)[:, None] - 0.5 * u**2 - 0.5 * jnp.log(2.0 * jnp.pi)

    c = jnp.geomspace(LEAST_ABSCISSA, LARGEST_ABSCISSA, ABSCISSAE) / scale
    plain = law.mu2 * c * (c + 1.0) / 2.0 + certificate.log_kappa(c)

    # the lowest split above which the loss exceeds eps whatever the other steps do
    losses = scale * (1.0 + jnp.geomspace(NEAREST_EXCESS, FARTHEST_EXCESS, FAR_WINDOWS))
    highs = place_of(sigma, q, losses) + 2.0 * high_blur(sigma)
    highs = jnp.minimum(highs, widest[:, None])
    outside = _phi((u[:, None, :] - highs[:, :, None]) / high_blur(sigma)[:, :, None])
    shrunk = jnp.exp(base[:, None, :] - c[:, None] * loss[:, None, :])
    whole = jnp.log(jnp.sum(shrunk, axis=2) + 1e-300)
    sums = jnp.log(jnp.einsum("j,jcl->cl", n, jnp.einsum("jcx,jlx->jcl", shrunk, outside)) + 1e-300)
    bounds = sums + (n @ whole + plain + (c + 1.0) * epsilon)[:, None]
    reached = jnp.min(bounds, axis=0) <= goal
    first = jnp.where(jnp.any(reached), jnp.argmax(reached), FAR_WINDOWS - 1)
    high = jnp.where(jnp.any(reached), highs[:, first], widest)
    excess_at = c[jnp.argmin(bounds[:, first])]

    # the highest split below which bulk steps alone cannot reach eps
    lows = place_of(sigma, q, scale * jnp.geomspace(LOWEST_LOSS, HIGHEST_LOSS, LOW_WINDOWS)) - 2.0 * low_blur(sigma)
    inside = log_ndtr((lows[:, :, None] - u[:, None, :]) / low_blur(sigma)[:, :, None])
    inside = jnp.where(u[:, None, :] < (lows + BULK_END * low_blur(sigma))[:, :, None], inside, -jnp.inf)
    most = inside[:, -1:]  # the widest: the others are at most that
    shares = jnp.exp(inside - jnp.where(jnp.isfinite(most), most, 0.0))
    grown = base[:, None, :] + (c[:, None] + 1.0) * loss[:, None, :] + most
    top = jnp.max(grown, axis=2, keepdims=True)
    sums = jnp.einsum("jcx,jlx->jcl", jnp.exp(grown - top), shares)
    moments = top + jnp.log(jnp.maximum(sums, 1e-300))
    bounds = jnp.einsum("j,jcl->cl", n, moments) + (plain - c * epsilon)[:, None]
    level = jnp.sum(jnp.cumprod(jnp.where(jnp.min(bounds, axis=0) <= goal, 1, 0))) - 1
    separable = (level >= 0) & (law.sign > 0)
    level = jnp.maximum(level, 0)
    low, bulk_at = lows[:, level], c[jnp.argmin(bounds[:, level])]
    removing = law.sign > 0
    away = jnp.full_like(high, NO_WINDOW)
    return WindowChoice(
        jnp.where(removing, jnp.minimum(low, high), away),
        jnp.where(removing, high, away),
        bulk_at,
        excess_at,
        separable,
    )


def far_masses(law: LossLaw, high: Array) -> FarMasses:
    """What the far windows cut off, composed."""
    sigma, q = law.gauss_sigma, law.gauss_q
    spread = jnp.sqrt(1.0 + high_blur(sigma) ** 2)
    from_q = _phi(-high / spread)
    from_p = (1.0 - q) * from_q + q * _phi((1.0 / sigma - high) / spread)
    return FarMasses(*(-jnp.expm1(law.gauss_n @ log1p(-tail)) for tail in (from_p, from_q)))


def bulk_grids(law: LossLaw, choice: WindowChoice, points: int) -> tuple[Grid, Array]:
    """Grids for bulk steps, with their sharp ends, and the abscissae for their Chernoff bounds."""
    stop = choice.low + BULK_END * low_blur(law.gauss_sigma)
    each = jax.vmap(grid, (0, 0, None, 0, 0, None, None, None, 0))
    grids = each(law.gauss_sigma, law.gauss_q, law.sign, choice.low, choice.high, 1.0, points, None, stop)
    return grids, choice.bulk_at * jnp.array(BULK_ABSCISSA_FACTORS)  # the larger may be too much for the grid


def bounds(
    law: LossLaw,
    windows: Windows,
    choice: WindowChoice,
    masses: FarMasses,
    bulk_at: Array,
    bulk_log: Array,
    points: int,
) -> Remainder:
    """Certified bounds of what is not integrated, given the Chernoff bounds of bulk compositions."""
    sigma, q, n = law.gauss_sigma, law.gauss_q, law.gauss_n
    near = jnp.sqrt(1.0 + low_blur(sigma) ** 2)
    leap = (1.0 - q) * _phi(-choice.low / near) + q * _phi((1.0 / sigma - choice.low) / near)
    log_mass = jnp.where(windows.keep_bulk > 0, 0.0, jnp.minimum(jnp.log(n @ leap + 1e-300), 0.0))
    opposite = law._replace(sign=-law.sign)

    def excess(c: Array) -> Array:
        each = jax.vmap(_far_moment, (0, 0, 0, None, None))(sigma, q, windows.high, c, points)
        most = jnp.where(n > 0, n * jnp.minimum(each, LARGEST_MOMENT), 0.0)
        useless = jnp.any((n > 0) & ~(each < LARGEST_MOMENT))
        bound = jnp.log(jnp.sum(most) + 1e-300) + certificate.chernoff(opposite, c, points)
        return jnp.where(useless | jnp.isnan(bound), jnp.inf, bound)

    at = choice.excess_at * jnp.array(EXCESS_ABSCISSA_FACTORS)
    stop = choice.low + BULK_END * low_blur(sigma)
    bulk = jnp.where(windows.keep_bulk > 0, -jnp.inf, bulk_log)
    beyond = (1.0 - q) * _phi(-stop) + q * _phi(1.0 / sigma - stop)
    stopped = jnp.where(windows.keep_bulk > 0, 0.0, _phi(-BULK_END) * 1.01 * (n @ beyond))
    return Remainder(masses, at + 1.0, jax.vmap(excess)(at), bulk_at, bulk, stopped, log_mass)


def _far_moment(sigma: Array, q: Array, high: Array, c: Array, points: int) -> Array:
    """An upper bound of `E_P[(1 - w2) e^{-(c+1) L}] = E_Q[(1 - w2) mix^{-c}]`, cell by cell."""
    start, end = high - FAR_CELLS_BELOW * high_blur(sigma), high + FAR_CELLS_ABOVE * high_blur(sigma)
    step = (end - start) / points
    left = start + step * jnp.arange(points)
    window = jnp.minimum(-0.5 * jnp.maximum((high - left - step) / high_blur(sigma), 0.0) ** 2, 0.0)
    nearest = jnp.maximum(left, 0.0)
    loss, posterior = log_mix(sigma, q, left)
    in_y = (
        4.0 * (jnp.abs(left) / sigma + 0.5 / sigma**2)
        + 4.0 * (jnp.abs(start) + jnp.abs(end)) / sigma
        - 3.0 * jnp.log(q)
    )
    rounding = ROUNDOFF * c * (2.0 * certificate.LOG_MIX_UNITS * jnp.abs(loss) + posterior * in_y)
    cells = jnp.exp(window - c * loss + rounding - 0.5 * nearest**2)
    below = jnp.exp(-312.0 - c * log1p(-q))  # w2 there, and mix >= 1 - q
    last = jnp.exp(-c * log_mix(sigma, q, end)[0] - 0.5 * jnp.maximum(end, 0.0) ** 2)
    return jnp.sum(cells) * step / jnp.sqrt(2.0 * jnp.pi) * 1.0000001 + below + last


def far(masses: FarMasses, epsilon: Array) -> tuple[Array, Array]:
    """(lower end, derivative) of the far compositions' share of delta."""
    scaled = jnp.exp(jnp.minimum(epsilon, LARGEST_EXPONENT)) * masses.q
    linear = masses.p * (1.0 - FAR_ROUNDING) - scaled * (1.0 + FAR_ROUNDING)
    # neither e^eps nor m' may be at float64's limits
    linear = jnp.where((epsilon < LARGEST_EXPONENT) & (masses.q > 1e-290), linear, 0.0)
    return jnp.maximum(linear, 0.0), jnp.where(linear > 0, -scaled, 0.0)


def far_above(bounds: Remainder, epsilon: Array) -> Array:
    """The upper end of the far compositions' share of delta."""
    excess = jnp.exp(jnp.minimum(jnp.min(bounds.excess_log + bounds.excess_at * epsilon), 0.0))
    scaled = jnp.exp(jnp.minimum(epsilon, LARGEST_EXPONENT)) * bounds.far.q
    linear = bounds.far.p * (1.0 + FAR_ROUNDING) - scaled * (1.0 - FAR_ROUNDING)
    cut = LAST_NODE_SHARE * bounds.far.p
    return jnp.minimum(jnp.maximum(linear, 0.0) + OUTWARD * excess + cut, bounds.far.p * (1.0 + FAR_ROUNDING))


def bulk(bounds: Remainder, epsilon: Array) -> Array:
    """An upper bound of the bulk compositions' share of delta."""
    return OUTWARD * jnp.exp(jnp.minimum(jnp.min(bounds.bulk_log - bounds.bulk_at * epsilon), 0.0)) + bounds.bulk_mass
