"""What the split contour leaves aside, in closed form or bounded: compositions with a far step, and calm ones.

*Far.*  Let W be the event that no step is far (in the sense of the smooth window w2).  With a far step the loss
almost surely exceeds eps, so that its payoff `(1 - e^{eps-S})_+` is `1 - e^{eps-S}`, whose expectation is

    far(eps) = (1 - prod m^n) - e^eps (1 - prod m'^n),    m = E_P[w2],  m' = E_Q[w2].

The true contribution is at least that and at least 0, at most `1 - prod m^n`, and at most far + excess, where
`(e^x - 1)_+ <= kappa(theta - 1) e^{theta x}` gives

    excess = sum n E_P[(1 - w2) e^{-theta L}] prod M(-theta)^n e^{theta eps} kappa(theta - 1)    for every theta > 1,

with `M_remove(-theta) = M_add(theta - 1)`.

*Calm.*  For keep = 0 the compositions of calm steps alone are bounded by Chernoff.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxacct.floats import ROUNDOFF
from jaxacct.kernels import certificate
from jaxacct.kernels.law import Law, log_mix
from jaxacct.kernels.special import log1p, log_ndtr
from jaxacct.kernels.split import AWAY, Window, frame, high_blur, low_blur, place_of

CALM_LEVELS = 14
FAR_LEVELS = 24
ABSCISSAE = 14
CALM_RIM = 13.0
"""Widths of the low window beyond it at which a calm step ends sharply; what is left is counted by its mass."""
CALM_ABOUT = (0.85, 1.1)
"""Where the bounds of calm compositions are certified, around the best abscissa of a few."""
POINTS = 160
"""Quadrature points for choosing windows; no bound depends on them."""


class Far(NamedTuple):
    """The masses of the compositions with a far step."""

    p: jax.Array  # 1 - prod m^n
    q: jax.Array  # 1 - prod m'^n


class Aside(NamedTuple):
    """Bounds of what is left aside, as functions of eps."""

    far: Far
    excess_at: jax.Array  # (E,) theta
    excess_log: jax.Array  # (E,) log of the excess at eps = 0
    calm_at: jax.Array  # (E,) abscissae
    calm_log: jax.Array  # (E,) log of the Chernoff bounds at eps = 0
    calm_mass: jax.Array  # of calm compositions with a step beyond the sharp end
    log_mass: jax.Array  # log of a bound of the mass that the contour integrates


class Choice(NamedTuple):
    """Windows, and the best abscissae for the bounds of what they leave aside."""

    low: jax.Array  # (J,)
    high: jax.Array  # (J,)
    calm_at: jax.Array
    excess_at: jax.Array
    separable: jax.Array  # whether calm compositions can be neglected


def _phi(x):
    """Phi(x)."""
    return 0.5 * lax.erfc(-x * 0.5**0.5)


def far_by_mass(law: Law, log_goal):
    """(J,) places beyond which all n steps together have less than e^log_goal of the mass."""
    spread = jnp.sqrt(1.0 + high_blur(law.gauss_sigma) ** 2)
    room = jnp.log(2.0 * law.gauss_n * law.gauss_n.size) - log_goal
    bulk = jnp.sqrt(2.0 * jnp.maximum(room, 1.0))
    hits = 1.0 / law.gauss_sigma + jnp.sqrt(2.0 * jnp.maximum(room + jnp.log(law.gauss_q), 1.0))
    return spread * jnp.maximum(bulk, hits)


def choose(law: Law, epsilon, log_delta, log_tol):
    """Where to split for a given eps, so that what is left aside is below e^{log_delta + log_tol}."""
    goal = log_delta + log_tol
    scale = jnp.maximum(epsilon, 1e-12)
    widest = far_by_mass(law, log_delta + log_tol)
    sigma, q, n = law.gauss_sigma[:, None], law.gauss_q[:, None], law.gauss_n
    step = (widest + 9.0) / (POINTS - 1)
    u = -9.0 + step[:, None] * jnp.arange(POINTS)
    loss, _ = jax.vmap(log_mix)(law.gauss_sigma, law.gauss_q, u)
    base = jnp.log(step)[:, None] - 0.5 * u**2 - 0.5 * jnp.log(2.0 * jnp.pi)

    c = jnp.geomspace(1.5, 150.0, ABSCISSAE) / scale
    plain = law.mu2 * c * (c + 1.0) / 2.0 + certificate.log_kappa(c)

    # the lowest split above which the loss exceeds eps whatever the other steps do
    highs = place_of(sigma, q, scale * (1.0 + jnp.geomspace(0.05, 100.0, FAR_LEVELS))) + 2.0 * high_blur(sigma)
    highs = jnp.minimum(highs, widest[:, None])
    outside = _phi((u[:, None, :] - highs[:, :, None]) / high_blur(sigma)[:, :, None])
    shrunk = jnp.exp(base[:, None, :] - c[:, None] * loss[:, None, :])
    whole = jnp.log(jnp.sum(shrunk, axis=2) + 1e-300)
    sums = jnp.log(jnp.einsum("j,jcl->cl", n, jnp.einsum("jcx,jlx->jcl", shrunk, outside)) + 1e-300)
    bounds = sums + (n @ whole + plain + (c + 1.0) * epsilon)[:, None]
    reached = jnp.min(bounds, axis=0) <= goal
    first = jnp.where(jnp.any(reached), jnp.argmax(reached), FAR_LEVELS - 1)
    high = jnp.where(jnp.any(reached), highs[:, first], widest)
    excess_at = c[jnp.argmin(bounds[:, first])]

    # the highest split below which calm steps alone cannot reach eps
    lows = place_of(sigma, q, scale * jnp.geomspace(0.005, 0.8, CALM_LEVELS)) - 2.0 * low_blur(sigma)
    inside = log_ndtr((lows[:, :, None] - u[:, None, :]) / low_blur(sigma)[:, :, None])
    inside = jnp.where(u[:, None, :] < (lows + CALM_RIM * low_blur(sigma))[:, :, None], inside, -jnp.inf)
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
    low, calm_at = lows[:, level], c[jnp.argmin(bounds[:, level])]
    removing = law.sign > 0
    away = jnp.full_like(high, AWAY)
    return Choice(
        jnp.where(removing, jnp.minimum(low, high), away),
        jnp.where(removing, high, away),
        calm_at,
        excess_at,
        separable,
    )


def far_masses(law: Law, high) -> Far:
    """What the far windows cut off, composed."""
    sigma, q = law.gauss_sigma, law.gauss_q
    spread = jnp.sqrt(1.0 + high_blur(sigma) ** 2)
    from_q = _phi(-high / spread)
    from_p = (1.0 - q) * from_q + q * _phi((1.0 / sigma - high) / spread)
    return Far(*(-jnp.expm1(law.gauss_n @ log1p(-tail)) for tail in (from_p, from_q)))


def calm_frames(law: Law, choice: Choice, points):
    """Grids for calm steps, with their sharp ends, and the abscissae for their Chernoff bounds."""
    stop = choice.low + CALM_RIM * low_blur(law.gauss_sigma)
    each = jax.vmap(frame, (0, 0, None, 0, 0, None, None, None, 0))
    frames = each(law.gauss_sigma, law.gauss_q, law.sign, choice.low, choice.high, 1.0, points, None, stop)
    return frames, choice.calm_at * jnp.array(CALM_ABOUT)  # the larger may be too much for the grid


def bounds(law: Law, window: Window, choice: Choice, masses: Far, calm_at, calm_log, points) -> Aside:
    """Certified bounds of what the windows leave aside, given the Chernoff bounds of calm compositions."""
    sigma, q, n = law.gauss_sigma, law.gauss_q, law.gauss_n
    near = jnp.sqrt(1.0 + low_blur(sigma) ** 2)
    leap = (1.0 - q) * _phi(-choice.low / near) + q * _phi((1.0 / sigma - choice.low) / near)
    log_mass = jnp.where(window.keep > 0, 0.0, jnp.minimum(jnp.log(n @ leap + 1e-300), 0.0))
    opposite = law._replace(sign=-law.sign)

    def excess(c):
        each = jax.vmap(_far_moment, (0, 0, 0, None, None))(sigma, q, window.high, c, points)
        most = jnp.where(n > 0, n * jnp.minimum(each, 1e200), 0.0)  # beyond 1e200 it bounds nothing anyway
        useless = jnp.any((n > 0) & ~(each < 1e200))
        bound = jnp.log(jnp.sum(most) + 1e-300) + certificate.chernoff(opposite, c, points)
        return jnp.where(useless | jnp.isnan(bound), jnp.inf, bound)

    at = choice.excess_at * jnp.array([0.8, 1.25])
    stop = choice.low + CALM_RIM * low_blur(sigma)
    calm = jnp.where(window.keep > 0, -jnp.inf, calm_log)
    beyond = (1.0 - q) * _phi(-stop) + q * _phi(1.0 / sigma - stop)
    stopped = jnp.where(window.keep > 0, 0.0, _phi(-CALM_RIM) * 1.01 * (n @ beyond))
    return Aside(masses, at + 1.0, jax.vmap(excess)(at), calm_at, calm, stopped, log_mass)


def _far_moment(sigma, q, high, c, points):
    """An upper bound of `E_P[(1 - w2) e^{-(c+1) L}] = E_Q[(1 - w2) mix^{-c}]`, cell by cell."""
    start, end = high - 25.0 * high_blur(sigma), high + 40.0 * high_blur(sigma)
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
    rounding = ROUNDOFF * c * (2.0 * certificate.LOSS * jnp.abs(loss) + posterior * in_y)
    cells = jnp.exp(window - c * loss + rounding - 0.5 * nearest**2)
    below = jnp.exp(-312.0 - c * log1p(-q))  # w2 there, and mix >= 1 - q
    last = jnp.exp(-c * log_mix(sigma, q, end)[0] - 0.5 * jnp.maximum(end, 0.0) ** 2)
    return jnp.sum(cells) * step / jnp.sqrt(2.0 * jnp.pi) * 1.0000001 + below + last


def far(masses: Far, epsilon):
    """(lower end, derivative) of the far compositions' share of delta."""
    scaled = jnp.exp(jnp.minimum(epsilon, 600.0)) * masses.q
    linear = masses.p * (1.0 - 1e-11) - scaled * (1.0 + 1e-11)
    linear = jnp.where((epsilon < 600.0) & (masses.q > 1e-290), linear, 0.0)  # neither e^eps nor m' at its limits
    return jnp.maximum(linear, 0.0), jnp.where(linear > 0, -scaled, 0.0)


def far_above(a: Aside, epsilon):
    """The upper end of the far compositions' share of delta."""
    excess = jnp.exp(jnp.minimum(jnp.min(a.excess_log + a.excess_at * epsilon), 0.0))
    scaled = jnp.exp(jnp.minimum(epsilon, 600.0)) * a.far.q
    linear = a.far.p * (1.0 + 1e-11) - scaled * (1.0 - 1e-11)
    cut = 1e-60 * a.far.p  # beyond the last node, 17 widths out
    return jnp.minimum(jnp.maximum(linear, 0.0) + 1.000001 * excess + cut, a.far.p * (1.0 + 1e-11))


def calm(a: Aside, epsilon):
    """An upper bound of the calm compositions' share of delta."""
    return 1.000001 * jnp.exp(jnp.minimum(jnp.min(a.calm_log - a.calm_at * epsilon), 0.0)) + a.calm_mass
