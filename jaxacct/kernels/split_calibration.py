"""Solve delta(eps; x) = delta for x where few steps matter: secant steps on the contour integral of a split law.

As calibration.py, with the windows and the contour of split_contour.py, which are placed once for all steps of a
call; the caller calls again until x stays where it is.  Nothing here enters a bound.
"""

import jax.numpy as jnp
from jax import lax

from jaxacct.kernels import split_contour
from jaxacct.kernels.calibration import single

STEPS = 3
FARTHEST = 0.4
"""Largest step in x."""


def solve(sign, base, unknown, x0, slope0, epsilon, log_delta, log_tol, points, count):
    """(x, d log delta / dx, d eps / dx, the residual of log delta before the last step, distance moved, needs).

    Arguments as for calibration.solve; slope0 is a first guess of d log delta / dx.
    """
    law = lambda x: single(sign * jnp.ones_like(x0), *(base + x * unknown))
    place, _ = split_contour.plan(law(x0), epsilon, log_delta, log_tol, count)

    def evaluate(x):
        wave, made_from = split_contour.wave_at(law(x), place, points, count)
        value, rate = split_contour.estimate(wave, epsilon)
        return value - log_delta, rate, split_contour.needed(law(x), place, made_from[0])

    def secant(_, carry):
        x, slope, last_x, last_r, *_ = carry
        residual, rate, needs = evaluate(x)
        fresh = (residual - last_r) / jnp.where(x == last_x, 1.0, x - last_x)
        trusted = (jnp.abs(x - last_x) > 1e-7) & (fresh / slope > 0.1) & (fresh / slope < 10.0)
        slope = jnp.where(trusted, fresh, slope)
        step = jnp.clip(-residual / slope, -FARTHEST, FARTHEST)
        return x + step, slope, x, residual, rate, needs

    carry = (x0, slope0, x0, 0.0 * x0, 0.0 * x0, jnp.zeros(2))
    x, slope, _, residual, rate, needs = lax.fori_loop(0, STEPS, secant, carry)
    return x, slope, slope / rate, residual, jnp.abs(x - x0), needs
