"""The law of a composed privacy loss under an exponential tilt, for every part that the contour engine composes.

A `LossLaw` describes one configuration in one direction.  Kernels take one `LossLaw` of scalars and short vectors
and are vmapped over configurations.  `M(z) = E_P[e^{zL}]` is the moment generating function of the loss.

Parts of a `LossLaw`:
* pure Gaussians, merged: `log M = mu2 z(z+1)/2`;
* Poisson sampled Gaussians, by a trapezoid rule in `u = x/sigma` (see README.md of this folder);
* Laplace, in closed form; finite laws, as sums.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxacct.kernels.arrays import Array
from jaxacct.kernels.rounding import total
from jaxacct.kernels.special import log1p

TAIL_NATS = 42.0
"""Nats of Gaussian tail kept inside the quadrature range: e^-42 is 6e-19, far below rounding."""


class LossLaw(NamedTuple):
    """One configuration, one direction: J sampled Gaussians, K Laplace parts, F finite parts of A atoms.

    The fields are those of `mechanisms.loss_components.Components` without the batch axis.
    """

    sign: Array  # +1 remove, -1 add
    mu2: Array  # sum of n / sigma^2 over the Gaussians that are not sampled
    gauss_sigma: Array  # (J,)
    gauss_q: Array  # (J,)
    gauss_n: Array  # (J,) how many times each is composed; 0 is absent
    laplace_scale: Array  # (K,)
    laplace_n: Array  # (K,)
    finite_loss: Array  # (F, A)
    finite_mass: Array  # (F, A) under P
    finite_n: Array  # (F,)


class Tilted(NamedTuple):
    """A sampled Gaussian under the tilt c, on a grid of X nodes in u."""

    u: Array  # (X,) nodes
    step: Array  # spacing of u
    loss: Array  # (X,) log mix(u), before the sign
    posterior: Array  # (X,) q e^y / mix, the derivative of log mix in y
    weight: Array  # (X,) normalised to sum to one
    log_m: Array  # log M(c)
    power: Array  # the real exponent a of mix: c + 1 (remove), -c (add)


def log_mix(sigma: Array, q: Array, u: Array) -> tuple[Array, Array]:
    """`log(1 - q + q e^y)` with `y = u/sigma - 1/(2 sigma^2)`, and `q e^y / mix`; 0 < q < 1."""
    y = u / sigma - 0.5 / sigma**2
    # log1p(q expm1(y)) is exact to a few units but where e^y overflows or 1 + q expm1(y) cancels; there the two
    # positive terms are added (not where q e^y is small still, since y + log q would cancel)
    high, low = (y > 30.0) & (y > -jnp.log(q)), (q > 0.5) & (y < -1.0)
    small = jnp.exp(-jnp.abs(y))
    grown = jnp.expm1(jnp.where(high, 0.0, jnp.minimum(y, 709.0)))
    added = jnp.where(high, q + (1.0 - q) * small, (1.0 - q) + q * small)
    apart = high | low
    # log1p as in special.py, which shares its logarithm with the other case
    log = jnp.log(jnp.where(apart, added, 1.0 + q * grown))
    near = jnp.where(jnp.abs(q * grown) < 0.3, jnp.log1p(q * grown), log)
    value = jnp.where(apart, jnp.where(high, y, 0.0) + log, near)
    share = jnp.where(high, q, q * small) / added
    ratio = jnp.where(y < 0.0, small, 1.0 / small)
    return value, jnp.where(apart, share, q * ratio / (1.0 + q * grown))


def quadrature_range(sigma: Array, q: Array, sign: Array, c: Array) -> tuple[Array, Array]:
    """Ends in u that keep all but e^-42 of M(c); from Gaussian bounds on the tilted integrand."""
    a = c + 1.0
    grown = a * (a - 1.0) / (2.0 * sigma**2)
    below = a * jnp.log(q) + grown
    # of the second Gaussian's size less that bound of log M(c) which is larger: written so that nothing cancels
    second = jnp.where(below > 0.0, -c * jnp.log(q), jnp.log(q) + grown)
    below = jnp.maximum(0.0, below)
    first_reach = jnp.sqrt(2.0 * jnp.maximum(TAIL_NATS - below, 0.0))
    second_reach = jnp.sqrt(2.0 * jnp.maximum(TAIL_NATS + second, 0.0))
    has_first = below < TAIL_NATS
    has_second = TAIL_NATS + second > 0.0
    remove_hi = jnp.maximum(first_reach, jnp.where(has_second, a / sigma + second_reach, first_reach))
    remove_lo = jnp.minimum(
        jnp.where(has_first, -first_reach, a / sigma), jnp.where(has_second, a / sigma - second_reach, 0.0)
    )

    # the loss is at least log(1 - q), and at least q y by Jensen
    floor = -c * log1p(-q)
    reach = jnp.sqrt(2.0 * TAIL_NATS)
    by_mean = -c * q * (reach / sigma - 0.5 / sigma**2)
    add_hi = jnp.sqrt(2.0 * (TAIL_NATS + jnp.clip(by_mean, 0.0, floor)))
    by_floor = -jnp.sqrt(2.0 * (TAIL_NATS + floor))
    by_jensen = -c * q / sigma - jnp.sqrt(2.0 * TAIL_NATS + (c * q / sigma) ** 2 + c * q / sigma**2)
    add_lo = jnp.maximum(by_floor, by_jensen)
    removing = sign > 0
    return jnp.where(removing, remove_lo, add_lo), jnp.where(removing, remove_hi, add_hi)


def tilted_gaussian(sigma: Array, q: Array, sign: Array, c: Array, nodes: int) -> Tilted:
    """The tilted law of one sampled Gaussian on `nodes` equidistant points."""
    # the integral does not depend on the ends of its range, and their square roots have no derivative at 0
    lo, hi = lax.stop_gradient(quadrature_range(sigma, q, sign, c))
    step = (hi - lo) / (nodes - 1)
    u = lo + step * jnp.arange(nodes)
    loss, posterior = log_mix(sigma, q, u)
    power = jnp.where(sign > 0, c + 1.0, -c)
    exponent = power * loss - 0.5 * u**2
    top = jnp.max(exponent)
    weight = jnp.exp(exponent - top)
    mass = total(weight)
    log_m = top + jnp.log(mass) + jnp.log(step) - 0.5 * jnp.log(2.0 * jnp.pi)
    # without the barrier XLA would evaluate the logarithms again inside every consumer's loop
    return lax.optimization_barrier(Tilted(u, step, loss, posterior, weight / mass, log_m, power))


def _gaussian_cumulants(sigma: Array, q: Array, sign: Array, c: Array, nodes: int) -> tuple[Array, Array, Array]:
    t = tilted_gaussian(sigma, q, sign, c, nodes)
    mean = jnp.sum(t.weight * t.loss)
    variance = jnp.sum(t.weight * (t.loss - mean) ** 2)
    return t.log_m, sign * mean, variance


def laplace_log_m(scale: Array, c: Array) -> Array:
    rest = -(1.0 + 2.0 * c) / scale
    return c / scale - jnp.log(2.0) + log1p((1.0 + 2.0 * c * jnp.exp(rest)) / (1.0 + 2.0 * c))


def _laplace_cumulants(scale: Array, c: Array) -> tuple[Array, Array, Array]:
    first = jax.grad(laplace_log_m, argnums=1)
    return laplace_log_m(scale, c), first(scale, c), jax.grad(first, argnums=1)(scale, c)


def _finite_cumulants(loss: Array, mass: Array, c: Array) -> tuple[Array, Array, Array]:
    exponent = jnp.where(mass > 0, c * loss + jnp.log(jnp.where(mass > 0, mass, 1.0)), -jnp.inf)
    top = jnp.max(exponent)
    weight = jnp.exp(exponent - top)
    mass = jnp.sum(weight)
    mean = jnp.sum(weight * loss) / mass
    return top + jnp.log(mass), mean, jnp.sum(weight * (loss - mean) ** 2) / mass


def cumulants(law: LossLaw, c: Array, nodes: int) -> tuple[Array, Array, Array]:
    """`K(c) = log E_P[e^{cL}]` of the composition, with its first two derivatives (tilted mean, variance)."""
    value, mean, variance = law.mu2 * c * (c + 1.0) / 2.0, law.mu2 * (c + 0.5), law.mu2
    parts = []
    if law.gauss_n.size:
        each = jax.vmap(_gaussian_cumulants, (0, 0, None, None, None))
        parts.append((law.gauss_n, each(law.gauss_sigma, law.gauss_q, law.sign, c, nodes)))
    if law.laplace_n.size:
        parts.append((law.laplace_n, jax.vmap(_laplace_cumulants, (0, None))(law.laplace_scale, c)))
    if law.finite_n.size:
        finite = jax.vmap(_finite_cumulants, (0, 0, None))
        parts.append((law.finite_n, finite(law.finite_loss, law.finite_mass, c)))
    for n, (k0, k1, k2) in parts:
        value, mean, variance = value + jnp.sum(n * k0), mean + jnp.sum(n * k1), variance + jnp.sum(n * k2)
    return value, mean, variance
