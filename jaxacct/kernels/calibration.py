"""Solve delta(eps; x) = delta for x, the logarithm of one parameter of a Poisson sampled Gaussian.

Two stages with fixed iteration counts, neither of which enters a bound (the answer is certified afterwards):
1. Newton on the saddle point equations in (log c, x) at once.  At the saddle the value does not change with c,
   so the system is triangular: x from the value, then c from `eps(c) = eps`.
2. Secant steps in x on the contour integral itself, c and the period kept.
"""

import jax
import jax.numpy as jnp
from jax import lax

from jaxacct.kernels import contour, nodes, saddle
from jaxacct.kernels.law import Law, cumulants
from jaxacct.kernels.special import log1p

SADDLE_ITERATIONS = 12
SECANT_ITERATIONS = 4


def single(sign, log_sigma, log_q, log_n):
    """The law of one Poisson sampled Gaussian composed n times."""
    none = jnp.zeros((0,), log_n.dtype)
    table = jnp.zeros((0, 0), log_n.dtype)
    sigma, q, n = (jnp.exp(v)[None] for v in (log_sigma, log_q, log_n))
    return Law(sign, 0.0 * log_n, sigma, jnp.minimum(q, 1.0 - 1e-12), n, none, none, table, table, none)


def solve(sign, base, unknown, x0, c0, epsilon, log_delta, log_tol, points, count, rounds):
    """(x, minus d log delta / dx over d log delta / d eps, residual of log delta) at the solution.

    base: (3,) logarithms of noise multiplier, sampling probability and steps, 0 at the unknown one;
    unknown: (3,) one at the unknown, zero elsewhere; sign: +1 remove, -1 add.  Every round after the first
    places the contour anew, for laws on which the saddle point approximation is poor.
    """
    one = jnp.ones_like(x0)
    axis = contour.axis_nodes(points)

    def law_at(x):
        return single(one * sign, *(base + x * unknown))

    def improve(_, carry):
        w, x = carry
        c = jnp.exp(w)
        (k0, k1, k2), (k0_x, k1_x, _) = jax.jvp(lambda v: cumulants(law_at(v), c, axis), (x,), (one,))
        curvature = k2 + 1.0 / c**2 + 1.0 / (1.0 + c) ** 2
        value = k0 - c * epsilon - jnp.log(c) - log1p(c) - 0.5 * jnp.log(2.0 * jnp.pi * curvature)
        dx = -jnp.clip((value - log_delta) / k0_x, -0.7, 0.7)
        gap = k1 + k1_x * dx - 1.0 / c - 1.0 / (1.0 + c) - epsilon
        return w - jnp.clip(gap / (c * curvature), -0.7, 0.7), x + dx

    w, x = lax.fori_loop(0, SADDLE_ITERATIONS, improve, (jnp.log(c0), x0))

    def stage(_, carry):
        x, c, *_ = carry
        point = saddle.for_epsilon(law_at(x), epsilon, axis, c)._replace(log_delta=log_delta)
        chosen, period = contour.place(law_at(x), point, epsilon, log_tol, axis)
        h = 2.0 * jnp.pi / period
        need = nodes.reach(law_at(x), chosen, h, log_tol, points)
        slope = jax.jvp(lambda v: cumulants(law_at(v), point.c, axis)[0], (x,), (one,))[1]

        def residual(x):
            return nodes.log_value(law_at(x), chosen, h, need, epsilon, points, count) - log_delta

        def secant(_, carry):
            x, r, slope = carry
            step = -jnp.clip(r / slope, -0.3, 0.3)
            following = residual(x + step)
            fresh = (following - r) / jnp.where(step == 0, 1.0, step)
            trusted = (jnp.abs(step) > 1e-7) & (fresh / slope > 0.1) & (fresh / slope < 10.0)
            return x + step, following, jnp.where(trusted, fresh, slope)

        x, r, slope = lax.fori_loop(0, SECANT_ITERATIONS, secant, (x, residual(x), slope))
        return x, point.c, slope / point.c, r, need

    carry = (x, jnp.exp(w), 0.0 * x, 0.0 * x, 0.0 * x)
    x, _, slope, r, need = stage(0, carry) if rounds == 1 else lax.fori_loop(0, rounds, stage, carry)
    return x, slope, r, need
