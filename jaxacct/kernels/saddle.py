"""Where to put the contour: the saddle point of `K(c) - c eps - log c(c+1)` on the real axis.

Along the saddle everything is explicit in c:
    eps(c)       = K'(c) - 1/c - 1/(c+1)
    log delta(c) ~ K(c) - c eps(c) - log c(c+1) - log(2 pi Psi''(c))/2,   Psi'' = K'' + 1/c^2 + 1/(c+1)^2
so that solving for a given delta, or a given eps, is one safeguarded Newton iteration in log c.  These are
starting values only: the contour integral is exact for every c > 0, and nothing here enters a bound.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxacct.kernels.law import Law, cumulants
from jaxacct.kernels.special import log1p

ITERATIONS = 14
REFINEMENTS = 7
"""Iterations from a start that is within a factor of two."""
SETTLED = 1e-7
"""Newton steps in log c that need no safeguard."""


class Saddle(NamedTuple):
    """Contour abscissa with the composed loss's cumulants there and the saddle point approximation."""

    c: jax.Array
    k1: jax.Array  # tilted mean
    k2: jax.Array  # tilted variance
    epsilon: jax.Array
    log_delta: jax.Array


def at(k, c):
    """The saddle point quantities at the abscissa c, for cumulants k."""
    k0, k1, k2 = k(c)
    curvature = k2 + 1.0 / c**2 + 1.0 / (1.0 + c) ** 2
    epsilon = k1 - 1.0 / c - 1.0 / (1.0 + c)
    log_delta = k0 - c * epsilon - jnp.log(c) - log1p(c) - 0.5 * jnp.log(2.0 * jnp.pi * curvature)
    return Saddle(c, k1, k2, epsilon, log_delta), curvature


def _safeguarded(k, first, down, up, residual_and_step, like, iterations=ITERATIONS):
    """Newton in w = log c; bisection where a step leaves the bracket or fails to halve the one before.

    `first` maps the variance at a small abscissa to a starting value of w, or is that value itself.  Returns the
    last saddle point that was evaluated.
    """
    start = jnp.log(1e-3) * jnp.ones_like(like) if callable(first) else first
    guessing = callable(first)

    def body(i, carry):
        w, lo, hi, last, _ = carry
        saddle, curvature = at(k, jnp.exp(w))
        residual, step = residual_and_step(saddle, curvature)
        lo = jnp.where(residual < 0, w, lo)
        hi = jnp.where(residual < 0, hi, w)
        trial = w - jnp.clip(step, -3.0, 3.0)
        newton = (trial > lo) & (trial < hi) & (jnp.abs(step) < 0.5 * last)
        # at the solution rounding decides on which side of it a step ends: no reason to bisect a stale bracket
        newton = newton | (jnp.abs(step) < SETTLED)
        following = jnp.where(newton, trial, 0.5 * (lo + hi))
        last = jnp.abs(following - w) + 1e-12
        if guessing:
            w0 = first(saddle)
            following = jnp.where(i == 0, w0, following)
            lo, hi = jnp.where(i == 0, w0 - down, lo), jnp.where(i == 0, w0 + up, hi)
            last = jnp.where(i == 0, jnp.inf, last)
        return following, lo, hi, last, saddle

    nothing = jnp.zeros_like(start)
    carry = (start, start - down, start + up, jnp.full_like(start, jnp.inf), Saddle(*([nothing] * 5)))
    return lax.fori_loop(0, iterations, body, carry)[-1]


def for_delta(law: Law, log_delta, nodes):
    """The saddle whose approximate delta is the one asked for."""
    return for_delta_of(lambda c: cumulants(law, c, nodes), log_delta)


def for_delta_of(k, log_delta):
    """The same for a law given by its cumulants."""
    target = jnp.minimum(log_delta, -0.02)

    def residual_and_step(saddle, curvature):
        reached = jnp.minimum(saddle.log_delta, -0.01)
        return target - reached, jnp.log(reached / target) * (-reached) / (saddle.c**2 * curvature)

    def first(saddle):
        return 0.5 * jnp.log(2.0 * jnp.maximum(-log_delta, 0.5) / saddle.k2)

    return _safeguarded(k, first, 16.0, 4.0, residual_and_step, log_delta)


def _residual_for(epsilon):
    def residual_and_step(saddle, curvature):
        residual = saddle.epsilon - epsilon
        return residual, residual / (saddle.c * curvature)

    return residual_and_step


def for_epsilon(law: Law, epsilon, nodes, start=None):
    """The saddle for a given eps, from a starting abscissa or from the untilted mean and variance."""

    def first(saddle):
        gap = epsilon - saddle.k1
        return jnp.log((gap + jnp.sqrt(gap**2 + 4.0 * saddle.k2)) / (2.0 * saddle.k2))

    begin = first if start is None else jnp.log(start)
    return _safeguarded(lambda c: cumulants(law, c, nodes), begin, 12.0, 4.0, _residual_for(epsilon), epsilon)


def search(k, epsilon, start, iterations):
    """The saddle for a given eps of a law given by its cumulants, near a starting abscissa."""
    return _safeguarded(k, jnp.log(start), 3.0, 3.0, _residual_for(epsilon), epsilon, iterations)
