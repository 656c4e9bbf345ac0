"""Probability generating functions `phi(x) = E[x^K]` of how often a selection repeats its base.

Functions of `y = 1 - x`, so that nothing is lost near x = 1, where a law with many repetitions varies fastest.  All
return (phi, phi', phi'') with derivatives in x; phi' and phi'' are convex and non-decreasing in x.
"""

import jax.numpy as jnp
from jax import lax

from jaxacct.kernels.special import log1p


def truncated_negative_binomial(eta, gamma, y):
    """`phi = ((1 - (1-gamma) x)^-eta - 1)/(gamma^-eta - 1)`, at eta = 0 `log(1 - (1-gamma) x)/log gamma`."""
    base = gamma + (1.0 - gamma) * y
    log_base = jnp.log(base)
    whole = -eta * jnp.log(gamma)
    flat = jnp.abs(whole) < 1e-8  # there the limit eta = 0, to second order in what is dropped
    scale = jnp.where(flat, -1.0 / jnp.log(gamma), eta / jnp.where(flat, 1.0, jnp.expm1(whole)))
    steep = jnp.expm1(-eta * log_base) / jnp.where(flat, 1.0, jnp.expm1(whole))
    value = jnp.where(flat, log_base / jnp.log(gamma), steep)
    first = scale * (1.0 - gamma) * jnp.exp(-(eta + 1.0) * log_base)
    return value, first, first * (eta + 1.0) * (1.0 - gamma) / base


def poisson(mean, y):
    """`phi = e^{mean (x - 1)}`."""
    value = jnp.exp(-mean * y)
    return value, mean * value, mean**2 * value


def binomial(trials, probability, y):
    """`phi = (1 - p + p x)^n`."""
    log_base = log1p(-probability * y)
    first = trials * probability * jnp.exp((trials - 1.0) * log_base)
    second = trials * (trials - 1.0) * probability**2 * jnp.exp(jnp.maximum(trials - 2.0, 0.0) * log_base)
    return jnp.exp(trials * log_base), first, second


def categorical(probabilities, y):
    """`phi = sum p_k x^k`, for any law on 0, 1, ..., by Horner's rule."""
    x = 1.0 - y

    def step(carry, p):
        value, first, second = carry
        return (value * x + p, first * x + value, second * x + 2.0 * first), None

    zero = jnp.zeros_like(x)
    return lax.scan(step, (zero, zero, zero), probabilities[::-1])[0]
