"""The best of K draws of N(0, 1) against the best of K draws of N(mu, 1): divergences of order statistic mixtures.

With F, G the two distribution functions and phi the generating function of K, the densities of the best are
`phi'(F) f` and `phi'(G) g`; the mass phi(0) of K = 0 is common to both.  Trapezoid sums; functions of one
configuration, to be vmapped.  Where phi' underflows, far in a tail, the point is left out.
"""

import jax.numpy as jnp
from jax import lax
from jax.scipy.special import logsumexp

from jaxacct.kernels.arrays import Array, Generating
from jaxacct.kernels.special import log_ndtr

DEVIATIONS_BEYOND_MEANS = 12.0
"""Standard deviations that the grid goes beyond the means: what lies further out has a mass of 2e-33."""
GRID_POINTS = 16001
"""Points of the trapezoid sums: dense enough for means hundreds of deviations apart."""
BISECTIONS = 50
"""Bisections for eps: as many as float64 resolves."""
LEAST_SLOPE = 1e-290
"""phi' below which a point is left out: float64 may have lost it."""


def _log_densities(phi: Generating, mu: Array, reach: Array) -> tuple[Array, Array, Array]:
    """(log density without the shift, with it, spacing); -inf for both where one underflows."""
    x = jnp.linspace(-reach, reach + mu, GRID_POINTS)
    logs = []
    for centre in (0.0, mu):
        z = x - centre
        steep = phi(jnp.exp(log_ndtr(-z)))[1]
        log_steep = jnp.where(steep > LEAST_SLOPE, jnp.log(jnp.maximum(steep, LEAST_SLOPE)), -jnp.inf)
        logs.append(log_steep - 0.5 * z**2 - 0.5 * jnp.log(2.0 * jnp.pi))
    seen = jnp.isfinite(logs[0]) & jnp.isfinite(logs[1])
    return *(jnp.where(seen, p, -1e300) for p in logs), (2.0 * reach + mu) / (GRID_POINTS - 1)


def _leak(without: Array, present: Array, step: Array, eps: Array) -> Array:
    ends = []
    for p, q in ((present, without), (without, present)):
        gain = jnp.where(p > q + eps, -jnp.expm1(jnp.minimum(q + eps - p, 0.0)), 0.0)
        ends.append(step * jnp.sum(jnp.exp(p) * gain))
    return jnp.maximum(*ends)


def hockey_stick(phi: Generating, mu: Array, eps: Array) -> Array:
    """The larger of the two hockey-stick divergences at ratio e^eps, eps >= 0."""
    return _leak(*_log_densities(phi, mu, DEVIATIONS_BEYOND_MEANS), eps)


def epsilon(phi: Generating, mu: Array, delta: Array, highest: Array) -> Array:
    """The eps in [0, highest] at which the hockey-stick divergence falls to delta; highest where it does not."""
    densities = _log_densities(phi, mu, DEVIATIONS_BEYOND_MEANS)

    def halve(_: Array, ends: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = ends
        middle = 0.5 * (low + high)
        within = _leak(*densities, middle) <= delta
        return jnp.where(within, low, middle), jnp.where(within, middle, high)

    found = lax.fori_loop(0, BISECTIONS, halve, (0.0 * highest, highest))[1]
    return jnp.where(_leak(*densities, 0.0) <= delta, 0.0, found)


def renyi(phi: Generating, mu: Array, order: Array) -> Array:
    """The larger of the two Rényi divergences of an order > 1."""
    without, present, step = _log_densities(phi, mu, DEVIATIONS_BEYOND_MEANS + order * mu)
    nothing = jnp.log(jnp.maximum(phi(jnp.ones(()))[0], 1e-300))
    totals = [
        logsumexp(jnp.where(p > -1e299, order * p + (1.0 - order) * q, -jnp.inf)) + jnp.log(step)
        for p, q in ((present, without), (without, present))
    ]
    return jnp.logaddexp(jnp.maximum(*totals), nothing) / (order - 1.0)
