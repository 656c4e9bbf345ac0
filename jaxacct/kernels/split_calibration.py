"""Solve delta(eps; x) = delta for x where few steps matter: secant steps on the contour integral of a split law.

As calibration.py, with the windows and the contour of split_place.py, which are placed once for all steps of a
call; the caller calls again until x stays where it is.  Nothing here enters a bound.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxacct.kernels import split_place, split_wave
from jaxacct.kernels.calibration import single
from jaxacct.kernels.split_place import Placed

STEPS = 3
FARTHEST = 0.4
"""Largest step in x."""
SETTLED = 0.15
"""Distance in x within which windows need not be placed anew."""
STEEPER = 50.0
"""Times by which the slope may change from one step to the next."""
CURVED = 3.0
"""`|f''/2f'|` of log delta in x, about: a secant step leaves this times the product of the last two distances."""


class Solved(NamedTuple):
    """What a call found; slopes are derivatives in x."""

    x: Any
    slope: Any  # of log delta
    epsilon_slope: Any
    residual: Any  # of log delta before the last step
    off: Any  # what the last step leaves, as secants converge
    moved: Any  # distance between x0 and x
    needs: Any  # (points, nodes)
    placed: Placed  # for x0


SHAPE = jax.tree.structure(Solved(*range(7), split_place.unplaced(1, 1)))
"""Of what a call returns, whose leaves alone come back from compiled programs."""


def solve(sign, base, unknown, x0, slope0, epsilon, log_delta, log_tol, points, count) -> Solved:
    """Arguments as for calibration.solve; slope0 is a first guess of d log delta / dx."""
    law = lambda x: single(sign * jnp.ones_like(x0), *(base + x * unknown))
    placed = split_place.plan(law(x0), epsilon, log_delta, log_tol, count)

    def evaluate(x):
        wave, made_from = split_wave.wave_at(law(x), placed.place, points, count)
        value, rate = split_wave.estimate(wave, epsilon)
        return value - log_delta, rate, split_wave.needed(law(x), placed.place, made_from[0])

    def secant(_, carry):
        x, slope, last_x, last_r, *_ = carry
        residual, rate, needs = evaluate(x)
        fresh = (residual - last_r) / jnp.where(x == last_x, 1.0, x - last_x)
        trusted = (jnp.abs(x - last_x) > 1e-7) & (fresh / slope > 1.0 / STEEPER) & (fresh / slope < STEEPER)
        slope = jnp.where(trusted, fresh, slope)
        step = jnp.clip(-residual / slope, -FARTHEST, FARTHEST)
        off = jnp.abs(step) * jnp.where(x == x0, 1.0, CURVED * jnp.abs(x - last_x))
        following = (x + step, slope, x, residual, rate, needs, off)
        # too far from x0 the windows and the period no longer serve
        serves = (jnp.abs(x - x0) <= SETTLED) & ((x == x0) | (jnp.abs(residual) < jnp.abs(last_r)))
        return tuple(jnp.where(serves, new, old) for old, new in zip(carry, following, strict=True))

    carry = (x0, slope0, x0, 0.0 * x0, 0.0 * x0, jnp.zeros(2), 0.0 * x0)
    x, slope, _, residual, rate, needs, off = lax.fori_loop(0, STEPS, secant, carry)
    return Solved(x, slope, slope / rate, residual, off, jnp.abs(x - x0), needs, placed)
