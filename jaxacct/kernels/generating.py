"""Probability generating functions `phi(x) = E[x^K]` of how often a selection repeats its base.

Functions of `y = 1 - x`, so that nothing is lost near x = 1, where a law with many repetitions varies fastest.  All
return (phi, phi', phi'') with derivatives in x; phi' and phi'' are convex and non-decreasing in x.
"""

import jax.numpy as jnp
from jax import lax

from jaxacct.kernels.arrays import Array
from jaxacct.kernels.special import log1p_inline


def _log_base(gamma: Array, y: Array) -> Array:
    """`log(1 - (1-gamma) x)`, relatively accurate for gamma near 0 and near 1."""
    base = gamma + (1.0 - gamma) * y
    return jnp.where(base < 0.7, jnp.log(base), jnp.log1p(-(1.0 - gamma) * (1.0 - y)))


def truncated_negative_binomial(eta: Array, gamma: Array, y: Array) -> tuple[Array, Array, Array]:
    """`phi = ((1 - (1-gamma) x)^-eta - 1)/(gamma^-eta - 1)`, at eta = 0 `log(1 - (1-gamma) x)/log gamma`.

    Computed as `(base/gamma)^-eta expm1(eta log base)/expm1(eta log gamma)`, which neither overflows for large eta nor
    cancels for small.
    """
    log_base, log_gamma = _log_base(gamma, y), _log_base(gamma, jnp.zeros_like(y))
    whole = eta * log_gamma
    flat = jnp.abs(whole) < 1e-290  # the limit eta = 0
    below = jnp.where(flat, 1.0, jnp.expm1(whole))
    grown = jnp.exp(-eta * log1p_inline((1.0 - gamma) * y / gamma))
    value = jnp.where(flat, log_base / log_gamma, grown * jnp.expm1(eta * log_base) / below)
    scale = jnp.where(flat, -1.0 / log_gamma, -eta / below)
    base = gamma + (1.0 - gamma) * y
    first = scale * (1.0 - gamma) / base * grown
    return value, first, first * (eta + 1.0) * (1.0 - gamma) / base


def poisson(mean: Array, y: Array) -> tuple[Array, Array, Array]:
    """`phi = e^{mean (x - 1)}`."""
    value = jnp.exp(-mean * y)
    return value, mean * value, mean**2 * value


def binomial(trials: Array, probability: Array, y: Array) -> tuple[Array, Array, Array]:
    """`phi = (1 - p + p x)^n`."""
    log_base = jnp.maximum(log1p_inline(-probability * y), -1e300)  # finite also where p = y = 1
    first = trials * probability * jnp.exp((trials - 1.0) * log_base)
    second = trials * (trials - 1.0) * probability**2 * jnp.exp(jnp.maximum(trials - 2.0, 0.0) * log_base)
    return jnp.exp(trials * log_base), first, second


def categorical(probabilities: Array, y: Array) -> tuple[Array, Array, Array]:
    """`phi = sum p_k x^k`, for any law on 0, 1, ..., by Horner's rule."""
    x = 1.0 - y

    def step(carry: tuple[Array, Array, Array], p: Array) -> tuple[tuple[Array, Array, Array], None]:
        value, first, second = carry
        return (value * x + p, first * x + value, second * x + 2.0 * first), None

    zero = jnp.zeros_like(x)
    return lax.scan(step, (zero, zero, zero), probabilities[::-1])[0]
