"""Where to put the contour: the saddle point of `K(c) - c eps - log c(c+1)` on the real axis.

Along the saddle everything is explicit in c:
    eps(c)       = K'(c) - 1/c - 1/(c+1)
    log delta(c) ~ K(c) - c eps(c) - log c(c+1) - log(2 pi Psi''(c))/2,   Psi'' = K'' + 1/c^2 + 1/(c+1)^2
so that solving for a given delta, or a given eps, is one safeguarded Newton iteration in log c.  These are
starting values only: the contour integral is exact for every c > 0, and nothing here enters a bound.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax

from jaxacct.kernels.law import Law, cumulants

ITERATIONS = 15


class Saddle(NamedTuple):
    """Contour abscissa with the composed loss's cumulants there and the saddle point approximation."""

    c: object
    k0: object
    k2: object
    epsilon: object
    log_delta: object


def at(law: Law, c, nodes):
    """The saddle point quantities at the abscissa c."""
    k0, k1, k2 = cumulants(law, c, nodes)
    curvature = k2 + 1.0 / c**2 + 1.0 / (1.0 + c) ** 2
    epsilon = k1 - 1.0 / c - 1.0 / (1.0 + c)
    log_delta = k0 - c * epsilon - jnp.log(c) - jnp.log1p(c) - 0.5 * jnp.log(2.0 * jnp.pi * curvature)
    return Saddle(c, k0, k2, epsilon, log_delta), curvature


def _safeguarded(residual_and_step, w0, down, up):
    """Newton in w = log c; bisection where a step leaves the bracket or fails to halve the one before."""

    def body(_, carry):
        w, lo, hi, last = carry
        residual, step = residual_and_step(w)
        lo = jnp.where(residual < 0, w, lo)
        hi = jnp.where(residual < 0, hi, w)
        trial = w - jnp.clip(step, -3.0, 3.0)
        newton = (trial > lo) & (trial < hi) & (jnp.abs(step) < 0.5 * last)
        following = jnp.where(newton, trial, 0.5 * (lo + hi))
        return following, lo, hi, jnp.abs(following - w) + 1e-12

    return lax.fori_loop(0, ITERATIONS, body, (w0, w0 - down, w0 + up, jnp.inf * jnp.ones_like(w0)))[0]


def for_delta(law: Law, log_delta, nodes):
    """The saddle whose approximate delta is the one asked for."""
    _, _, k2 = cumulants(law, 1e-3, nodes)
    w0 = 0.5 * jnp.log(2.0 * jnp.maximum(-log_delta, 0.5) / k2)
    target = jnp.minimum(log_delta, -0.02)

    def residual_and_step(w):
        c = jnp.exp(w)
        saddle, curvature = at(law, c, nodes)
        reached = jnp.minimum(saddle.log_delta, -0.01)
        residual = target - reached
        step = jnp.log(reached / target) * (-reached) / (c**2 * curvature)
        return residual, step

    w = _safeguarded(residual_and_step, w0, 16.0, 4.0)
    return at(law, jnp.exp(w), nodes)[0]


def for_epsilon(law: Law, epsilon, nodes, start=None):
    """The saddle for a given eps, from a starting abscissa or from the untilted variance."""
    if start is None:
        _, k1, k2 = cumulants(law, 1e-3, nodes)
        gap = epsilon - k1
        start = (gap + jnp.sqrt(gap**2 + 4.0 * k2)) / (2.0 * k2)

    def residual_and_step(w):
        c = jnp.exp(w)
        saddle, curvature = at(law, c, nodes)
        residual = saddle.epsilon - epsilon
        return residual, residual / (c * curvature)

    w = _safeguarded(residual_and_step, jnp.log(start), 12.0, 4.0)
    return at(law, jnp.exp(w), nodes)[0]
