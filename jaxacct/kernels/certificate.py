"""Rigorous error terms of the contour engine; derivations in README.md of this folder.

Every function bounds one source of error, relative to the tilted mass `M(c)` of its part: quadrature range, quadrature
step and rounding (section 3 and 4), and the periodic images (section 1, by Chernoff).  The cut-off of the t-sum is in
characteristic_decay.py.  All functions are for one configuration and are vmapped by their callers.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxacct.floats import ROUNDOFF
from jaxacct.kernels.arrays import Array
from jaxacct.kernels.law import LossLaw, Tilted, laplace_log_m, log_mix, tilted_gaussian
from jaxacct.kernels.rounding import SMALLEST_NORMAL, sum_depth
from jaxacct.kernels.special import log1p

FINITE_LOSS_ERROR = 1e-26
"""Absolute error of a finite loss, besides 16 units of itself (mechanisms/README.md)."""
LOG_MIX_UNITS = 18.0
"""Units of itself by which log mix is off, besides what is off in y (README.md, section 4)."""
TALLEST_LINE = 12.0
"""Largest height of a shifted line, in u."""
RANGE_FACTOR = 1.0 + 2.0 * TALLEST_LINE
"""Mass beyond a grid's ends, and the two sides of the shifted path there, over the bound of the first."""
STRIP_SHARES = (0.5, 0.8, 0.95)
"""Heights tried for the shifted line, over the one that seems best; any of them gives a bound."""
LARGEST_DOUBT = 0.1
"""Error of the logarithm of a weight from which on the first order says nothing, and nothing is certified."""
ROUNDED_UP = 1.001
"""Factor for the rounding of an error bound's own arithmetic."""
LARGEST_EXPONENT = 600.0
"""Cap of the logarithm of odds, which at e^600 are as good as infinite."""
LARGEST_OUTCOME = 1e14
"""An end of a grid in u beyond which float64 cannot tell its points apart."""


def _range_error(sigma: Array, q: Array, sign: Array, t: Tilted) -> Array:
    """Mass of the tilted integrand outside the grid, and the ends of the shifted path, over M(c)."""
    lo, hi, a = t.u[0], t.u[-1], t.power
    second = jnp.log(q) + a * (a - 1.0) / (2.0 * sigma**2)
    first = log1p(-q)
    shift, move = a / sigma, -a * q / sigma
    by_jensen = 0.5 * move * (move + 1.0 / sigma)
    #  remove: both sides of either Gaussian;  add: above, and below by the lesser of two bounds
    beyond = jnp.stack([hi, -lo, hi - shift, shift - lo, hi, -lo, -lo - move])
    log_size = jnp.stack([first, first, second, second, a * t.loss[-1], a * first, by_jensen])
    log_tail = jnp.where(beyond > 0, -jnp.log(2.0) - 0.5 * beyond**2, 0.0)
    tail = jnp.exp(log_size - t.log_m + log_tail)
    return RANGE_FACTOR * jnp.where(sign > 0, jnp.sum(tail[:4]), tail[4] + jnp.minimum(tail[5], tail[6]))


def _step_error(sigma: Array, q: Array, sign: Array, t: Tilted, t_max: Array) -> Array:
    """Trapezoid error by shifting the line of integration to `x + i a`, over M(c), for every |t| <= t_max.

    `|mix(x + ia)|` and its argument are monotone in x, so each cell is bounded by its worse end.  The path goes
    back to the real axis half a step outside the grid; what that costs is in `_range_error`.
    """
    ends = jnp.stack([t.u[0] - t.step, t.u[-1] + t.step])
    end_loss, _ = log_mix(sigma, q, ends)
    u = jnp.concatenate([ends[:1], t.u, ends[1:]])
    loss = jnp.concatenate([end_loss[:1], t.loss, end_loss[1:]])
    y = u / sigma - 0.5 / sigma**2
    odds = jnp.exp(jnp.log(q) - log1p(-q) + jnp.minimum(y, LARGEST_EXPONENT))
    nearest = jnp.minimum(jnp.abs(u[:-1]), jnp.abs(u[1:])) * (u[:-1] * u[1:] > 0)
    # what rounding can add to an exponent, but for a factor of its argument
    off = 4.0 * ROUNDOFF * (jnp.maximum(jnp.abs(u[0]), jnp.abs(u[-1])) / sigma + 0.5 / sigma**2 + 1.0)
    z = jnp.abs(t.power) + 1.0
    blurred = (
        z * (odds / (1.0 + odds) * off + 4.0 * LOG_MIX_UNITS * ROUNDOFF * jnp.abs(loss))
        + 16.0 * SMALLEST_NORMAL * t_max
    )

    def log_error(alpha: Array) -> Array:
        angle = alpha / sigma
        sine, cosine = jnp.sin(angle), jnp.cos(angle)
        argument = jnp.arctan2(odds * sine, 1.0 + odds * cosine)
        log_shrink = 0.5 * log1p(-4.0 * odds / (1.0 + odds) ** 2 * jnp.sin(0.5 * angle) ** 2)
        log_modulus = loss + log_shrink
        floor = loss + jnp.log(jnp.cos(0.5 * angle))
        lowest = jnp.where(angle <= 0.5 * jnp.pi, log_modulus, floor)
        upper = jnp.where(angle <= 0.5 * jnp.pi, log_modulus, loss)
        grown = jnp.where(sign > 0, t.power * upper[1:], t.power * lowest[:-1])
        turned = (1.0 + 8.0 * off) * t_max * argument[1:] + jnp.maximum(blurred[:-1], blurred[1:])
        exponent = grown + turned - 0.5 * nearest**2
        top = jnp.max(exponent)
        total = top + jnp.log(jnp.sum(jnp.exp(exponent - top)) * t.step) - 0.5 * jnp.log(2.0 * jnp.pi)
        decay = 2.0 * jnp.pi * alpha / t.step
        return 0.5 * alpha**2 + total - t.log_m + jnp.log(2.0) - decay - log1p(-jnp.exp(-decay))

    widest = jnp.pi * sigma
    wanted = jnp.minimum(2.0 * jnp.pi / t.step - t_max * jnp.max(t.posterior * (t.weight > 1e-12)) / sigma, 9.5)
    shifts = jnp.stack([f * jnp.minimum(widest, wanted) for f in STRIP_SHARES])
    shifts = jnp.clip(shifts, 1e-3 * widest, jnp.minimum(0.97 * widest, TALLEST_LINE))
    return jnp.exp(jnp.min(jax.vmap(log_error)(shifts)))


def points_needed(sigma: Array, t: Tilted, t_max: Array) -> Array:
    """Points on which `_step_error` would be negligible at t_max: the phase turns by t posterior/sigma per unit."""
    turning = t_max * jnp.max(t.posterior * (t.weight > 1e-14)) / sigma
    reach = jnp.minimum(9.0, 0.95 * jnp.pi * sigma)
    return (t.u[-1] - t.u[0]) * (turning + 0.5 * reach + 45.0 / reach) / (2.0 * jnp.pi)


class Rounding(NamedTuple):
    """Rounding of one quadrature sum's terms, in units; (X,) unless said otherwise."""

    weight: Array  # of the logarithm of a weight
    loss: Array  # of the loss, absolute
    y: Array  # () the largest error of y, no units
    doubt: Array  # () the largest error of the logarithm of a weight and of y, no units


def per_term(sigma: Array, q: Array, t: Tilted) -> Rounding:
    """Bounds of the rounding of every term of a grid's sum (README.md, section 4)."""
    edge = jnp.maximum(jnp.abs(t.u[0]), jnp.abs(t.u[-1]))
    through_y = 4.0 * (jnp.abs(t.u) / sigma + 0.5 / sigma**2)
    z, size = jnp.abs(t.power) + 1.0, jnp.abs(t.loss)
    y = through_y - 3.0 * jnp.log(q)
    placed = 3.0 * edge * jnp.abs(t.power * t.posterior / sigma - t.u)
    weight = 20.0 + jnp.abs(t.log_m) + (LOG_MIX_UNITS + 2.0) * z * size + 2.0 * t.u**2 + placed + z * t.posterior * y
    loss = LOG_MIX_UNITS * size + t.posterior * (y + 3.0 * edge / sigma) + 16.0 * SMALLEST_NORMAL / ROUNDOFF
    y = ROUNDOFF * (jnp.max(through_y) + 3.0 * edge / sigma)
    return Rounding(weight, loss, y, jnp.maximum(ROUNDOFF * jnp.max(weight), y))


def _rounding_errors(sigma: Array, q: Array, t: Tilted, t_max: Array, depth: Array) -> tuple[Array, Array, Array]:
    """Rounding of `M(c+it)/M(c) - 1`, per unit of t and at most up to t_max, and of log M(c).

    Every weight is off by its own argument's rounding, and so is every `e^{it loss} - 1`, which is at most
    `min(2, t |loss|)`: small losses and small t leave small errors.
    """
    units = per_term(sigma, q, t)
    rotated = units.weight + depth
    turned = units.loss + 12.0 * jnp.abs(t.loss)
    # first order in the errors; at a larger doubt nothing is certified
    grown = ROUNDOFF * jnp.where(units.doubt < LARGEST_DOUBT, 1.0 + 2.0 * units.doubt, jnp.inf)
    own = sum_depth(t.u.size) + 40.0 + 8.0 * jnp.abs(t.log_m)
    return (
        grown * jnp.sum(t.weight * (jnp.abs(t.loss) * rotated + turned)),
        grown * jnp.sum(t.weight * (2.0 * rotated + t_max * turned)),
        grown * (jnp.sum(t.weight * units.weight) + own),
    )


def gaussian_errors(
    sigma: Array, q: Array, sign: Array, t: Tilted, t_max: Array, depth: Array
) -> tuple[Array, Array, Array, Array]:
    """(a, b, m, e): M(c + it)/M(c) is off by at most a + min(b t, m) for |t| <= t_max, and log M(c) by e."""
    quadrature = ROUNDED_UP * (_range_error(sigma, q, sign, t) + _step_error(sigma, q, sign, t, t_max))
    # of the numerator and of the denominator
    quadrature = jnp.where(quadrature < 0.5, 2.0 * quadrature / (1.0 - jnp.minimum(quadrature, 0.5)), jnp.inf)
    rate, ceiling, weight = _rounding_errors(sigma, q, t, t_max, depth)
    return quadrature, rate, ceiling, quadrature + weight


def _step_error_on_the_axis(sigma: Array, q: Array, sign: Array, c: Array, end: Array, step: Array) -> Array:
    """Bound of log M(c) less log of its trapezoid sum.

    With v = alpha/sigma, `mix cos(v/2) <= |mix(x + i alpha)| <= mix` on whole lines; and up to the end of a grid
    `|mix(x + i alpha)|^2 >= mix^2 (1 - s sin^2(v/2))`, s = 4 o/(1+o)^2 at the odds o there (1 for odds beyond 1).
    """
    log_odds = jnp.log(q) - log1p(-q) + end / sigma - 0.5 / sigma**2
    off = 1e-12 + 16.0 * ROUNDOFF * (jnp.abs(end) / sigma + 0.5 / sigma**2)
    share = jnp.where(log_odds < 0.0, jnp.minimum((1.0 + off) / jnp.cosh(0.5 * log_odds) ** 2, 1.0), 1.0)

    def relative(alpha: Array, s: Array) -> Array:
        shrunk = 0.5 * log1p(-s * jnp.sin(0.5 * alpha / sigma) ** 2)
        decay = 2.0 * jnp.pi * alpha / step
        return 2.0 * jnp.exp(0.5 * alpha**2 + jnp.where(sign > 0, 0.0, -c * shrunk) - decay) / (-jnp.expm1(-decay))

    def best(s: Array) -> Array:  # |mix|^-c grows like e^{c s v^2/8}: a tall line is no use against a large c
        return 8.0 * jnp.pi * sigma**2 / (step * (c * s + 4.0 * sigma**2))

    # half a period at most for the last line, and just below a whole one for the others
    s = jnp.stack([jnp.ones_like(share), jnp.ones_like(share), share])
    tallest = jnp.minimum(jnp.array([4.0, 8.0, 8.0]), jnp.array([0.6, 0.95, 0.5]) * jnp.pi * sigma)
    alpha = jnp.minimum(tallest, jnp.where(jnp.array([True, False, True]), best(s), jnp.inf))
    # the error is relative to M(c) itself: from one half on the sum may have missed all of it
    error = jnp.min(relative(alpha, s))
    return jnp.where(error < 0.5, -log1p(-jnp.minimum(error, 0.5)), jnp.inf)


def _laplace_above(scale: Array, c: Array) -> Array:
    return laplace_log_m(scale, c) + ROUNDOFF * (120.0 + 24.0 * (c + 1.0) / scale)


def log_kappa(c: Array) -> Array:
    """log of `c^c/(1+c)^{1+c}`, the best constant in `(1 - e^{-x})_+ <= kappa e^{cx}`, without cancellation."""
    return -log1p(c) - c * log1p(1.0 / c)


def _log_m_above(sigma: Array, q: Array, sign: Array, c: Array, nodes: int) -> Array:
    """An upper bound of log M(c) of one sampled Gaussian: its trapezoid sum, quadrature error and rounding."""
    t = tilted_gaussian(sigma, q, sign, c, nodes)
    edge = jnp.maximum(jnp.abs(t.u[0]), jnp.abs(t.u[-1]))
    # units of the logarithm of a weight as in `per_term`, by the means (or largest values) of its parts:
    # small errors count by their mean, large ones by the largest, since log sum exp moves by no more
    z, through_y = jnp.abs(t.power) + 1.0, 4.0 * (edge / sigma + 0.5 / sigma**2) - 3.0 * jnp.log(q)

    def units(loss: Array, square: Array, posterior: Array) -> Array:
        placed = 3.0 * edge * (z * posterior / sigma + jnp.sqrt(square))
        return (
            20.0
            + jnp.abs(t.log_m)
            + (LOG_MIX_UNITS + 2.0) * z * loss
            + 2.0 * square
            + placed
            + z * posterior * through_y
        )

    worst = ROUNDED_UP * units(jnp.maximum(jnp.abs(t.loss[0]), jnp.abs(t.loss[-1])), edge**2, 1.0)
    mean = units(t.weight @ jnp.abs(t.loss), t.weight @ t.u**2, t.weight @ t.posterior)
    doubt = ROUNDOFF * worst
    rounding = jnp.where(doubt < LARGEST_DOUBT, (ROUNDED_UP + 2.0 * doubt) * mean, worst)
    rounding = ROUNDOFF * (rounding + sum_depth(nodes) + 40.0 + 8.0 * jnp.abs(t.log_m))
    above = t.log_m + ROUNDED_UP * _step_error_on_the_axis(sigma, q, sign, c, t.u[-1] + t.step, t.step) + rounding
    # the range leaves out 2 e^-42 at most, if its ends are places that float64 can tell apart
    return jnp.where((t.step > 0.0) & (edge < LARGEST_OUTCOME), above + 1e-17, jnp.inf)


def finite_units(loss: Array, mass: Array, weight: Array) -> Array:
    """Units by which a sum of finitely many weights `mass e^{c loss}` over their sum is off, c aside."""
    log_mass = jnp.log(jnp.where(mass > 0, mass, 1.0))
    # a mass that came from exp(x) is off by a few units times |x|
    return 100.0 + 4.0 * loss.size + 10.0 * (weight @ jnp.abs(log_mass)) / jnp.sum(weight)


def _finite_above(loss: Array, mass: Array, c: Array) -> Array:
    exponent = jnp.where(mass > 0, c * loss + jnp.log(jnp.where(mass > 0, mass, 1.0)), -jnp.inf)
    top = jnp.max(exponent)
    weight = jnp.exp(exponent - top)
    log_m = top + jnp.log(jnp.sum(weight))
    reach = jnp.max(jnp.where(mass > 0, jnp.abs(loss), 0.0))
    return (
        log_m
        + ROUNDOFF * (finite_units(loss, mass, weight) + 24.0 * c * reach + 8.0 * jnp.abs(log_m))
        + c * FINITE_LOSS_ERROR
    )


def chernoff(law: LossLaw, c: Array, nodes: int) -> Array:
    """An upper bound of `K(c) + log kappa(c)`: `delta(eps) <= e^{K(c) - c eps} kappa(c)` for every eps and c > 0.

    `kappa(c) = c^c/(1+c)^{1+c}` is the best constant in `(1 - e^{-x})_+ <= kappa e^{cx}`; the quadrature error
    of K and all rounding are added.  inf where nothing is certain.
    """
    terms = [law.mu2 * c * (c + 1.0) / 2.0, log_kappa(c)]
    kinds: tuple[tuple[Callable[..., Array], Array, tuple[Array, ...], tuple[Array, ...]], ...] = (
        (_log_m_above, law.gauss_n, (law.gauss_sigma, law.gauss_q), (law.sign, c, nodes)),
        (_laplace_above, law.laplace_n, (law.laplace_scale,), (c,)),
        (_finite_above, law.finite_n, (law.finite_loss, law.finite_mass), (c,)),
    )
    for above, n, own, common in kinds:
        if n.size:
            each = jax.vmap(above, (*[0] * len(own), *[None] * len(common)))(*own, *common)
            terms.append(jnp.where(n > 0, n * each, 0.0))
    every = jnp.hstack(terms)
    value = jnp.sum(every) + ROUNDOFF * (every.size + 16.0) * (jnp.sum(jnp.abs(every)) + 4.0)
    return jnp.where(jnp.isfinite(value), value, jnp.inf)
