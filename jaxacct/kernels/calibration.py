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
from jaxacct.kernels.arrays import Array
from jaxacct.kernels.law import LossLaw, cumulants
from jaxacct.kernels.special import log1p

SADDLE_STEPS = 12
"""Newton steps on the saddle point equations."""
SECANT_STEPS = 4
"""Secant steps on the contour integral, to convergence from the saddle point's x."""
LARGEST_NEWTON_STEP = 0.7
"""Largest step in log c and in x: a factor of two."""
LARGEST_SECANT_STEP = 0.3
"""Largest secant step in x; the contour was placed near where they begin."""
LEAST_SECANT = 1e-7
"""Distance in x below which a secant is rounding."""
SLOPE_CHANGE = 10.0
"""Factor by which the slope may change from one step to the next; a secant beyond it is taken for rounding."""
LARGEST_Q = 1.0 - 1e-12
"""Largest sampling probability: the kernels take 0 < q < 1."""


def single(sign: Array, log_sigma: Array, log_q: Array, log_n: Array) -> LossLaw:
    """The law of one Poisson sampled Gaussian composed n times."""
    none = jnp.zeros((0,), log_n.dtype)
    table = jnp.zeros((0, 0), log_n.dtype)
    sigma, q, n = (jnp.exp(v)[None] for v in (log_sigma, log_q, log_n))
    return LossLaw(sign, 0.0 * log_n, sigma, jnp.minimum(q, LARGEST_Q), n, none, none, table, table, none)


def solve(
    sign: Array,
    base: Array,
    unknown: Array,
    x0: Array,
    c0: Array,
    epsilon: Array,
    log_delta: Array,
    log_tol: Array,
    points: int,
    count: int,
    rounds: int,
) -> tuple[Array, Array, Array, Array]:
    """(x, minus d log delta / dx over d log delta / d eps, residual of log delta) at the solution.

    base: (3,) logarithms of noise multiplier, sampling probability and steps, 0 at the unknown one;
    unknown: (3,) one at the unknown, zero elsewhere; sign: +1 remove, -1 add.  Every round after the first
    places the contour anew, for laws on which the saddle point approximation is poor.
    """
    one = jnp.ones_like(x0)
    axis = contour.axis_nodes(points)

    def law_at(x: Array) -> Array:
        return single(one * sign, *(base + x * unknown))

    def improve(_: Array, carry: Array) -> tuple[Array, Array]:
        w, x = carry
        c = jnp.exp(w)
        (k0, k1, k2), (k0_x, k1_x, _) = jax.jvp(lambda v: cumulants(law_at(v), c, axis), (x,), (one,))
        curvature = k2 + 1.0 / c**2 + 1.0 / (1.0 + c) ** 2
        value = k0 - c * epsilon - jnp.log(c) - log1p(c) - 0.5 * jnp.log(2.0 * jnp.pi * curvature)
        dx = -jnp.clip((value - log_delta) / k0_x, -LARGEST_NEWTON_STEP, LARGEST_NEWTON_STEP)
        gap = k1 + k1_x * dx - 1.0 / c - 1.0 / (1.0 + c) - epsilon
        return w - jnp.clip(gap / (c * curvature), -LARGEST_NEWTON_STEP, LARGEST_NEWTON_STEP), x + dx

    w, x = lax.fori_loop(0, SADDLE_STEPS, improve, (jnp.log(c0), x0))

    def stage(_: Array, carry: Array) -> tuple[Array, Array, Array, Array, Array]:
        x, c, *_ = carry
        point = saddle.for_epsilon(law_at(x), epsilon, axis, c)._replace(log_delta=log_delta)
        chosen, period = contour.place(law_at(x), point, epsilon, log_tol, axis)
        h = 2.0 * jnp.pi / period
        need = nodes.reach(law_at(x), chosen, h, log_tol, points)
        slope = jax.jvp(lambda v: cumulants(law_at(v), point.c, axis)[0], (x,), (one,))[1]

        def residual(x: Array) -> Array:
            return nodes.log_value(law_at(x), chosen, h, need, epsilon, points, count) - log_delta

        def secant(_: Array, carry: Array) -> tuple[Array, Array, Array]:
            x, r, slope = carry
            step = -jnp.clip(r / slope, -LARGEST_SECANT_STEP, LARGEST_SECANT_STEP)
            following = residual(x + step)
            fresh = (following - r) / jnp.where(step == 0, 1.0, step)
            trusted = (
                (jnp.abs(step) > LEAST_SECANT) & (fresh / slope > 1.0 / SLOPE_CHANGE) & (fresh / slope < SLOPE_CHANGE)
            )
            return x + step, following, jnp.where(trusted, fresh, slope)

        x, r, slope = lax.fori_loop(0, SECANT_STEPS, secant, (x, residual(x), slope))
        return x, point.c, slope / point.c, r, need

    carry = (x, jnp.exp(w), 0.0 * x, 0.0 * x, 0.0 * x)
    x, _, slope, r, need = stage(0, carry) if rounds == 1 else lax.fori_loop(0, rounds, stage, carry)
    return x, slope, r, need
