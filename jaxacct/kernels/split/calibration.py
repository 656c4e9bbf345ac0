"""Solve delta(eps; x) = delta for x where few steps matter: secant steps on the contour integral of a split law.

As kernels/calibration.py, on the windows and the contour of placement.py.  These are placed once for all steps of a
call; the caller calls again until x stays where it is.  Nothing here enters a bound.
"""

from typing import NamedTuple

import jax

from jaxacct.kernels.arrays import Array, namespace, repeat
from jaxacct.kernels.calibration import single
from jaxacct.kernels.law import LossLaw
from jaxacct.kernels.split import placement
from jaxacct.kernels.split.integrand import estimate, integrand_at, needed
from jaxacct.kernels.split.placement import Placement

SECANT_STEPS = 3
"""Secant steps in a call.  Further ones leave the region that the contour was placed for, or change nothing."""
LARGEST_STEP = 0.4
"""Largest step in x, the logarithm of a parameter."""
SETTLED = 0.15
"""Distance in x within which windows need not be placed anew."""
SLOPE_CHANGE = 50.0
"""Factor by which the slope may change from one step to the next; a secant beyond it is taken for rounding."""
CURVATURE = 3.0
"""`|f''/2f'|` of log delta in x, about: a secant step leaves this times the product of the last two distances."""
LEAST_SECANT = 1e-7
"""Distance in x below which a secant is rounding."""


class Solved(NamedTuple):
    """What a call found; slopes are derivatives in x."""

    x: Array
    slope: Array  # of log delta
    epsilon_slope: Array
    residual: Array  # of log delta before the last step
    off: Array  # what the last step leaves, as secants converge
    moved: Array  # distance between x0 and x
    needs: Array  # (points, nodes)
    placed: Placement  # for x0


SHAPE = jax.tree.structure(Solved(0, 1, 2, 3, 4, 5, 6, placement.no_placements(1, 1)))
"""The tree structure of what a call returns: compiled programs return its leaves alone."""


def solve(
    sign: Array,
    base: Array,
    unknown: Array,
    x0: Array,
    slope0: Array,
    epsilon: Array,
    log_delta: Array,
    log_tol: Array,
    points: int,
    count: int,
) -> Solved:
    """Arguments as for calibration.solve; slope0 is a first guess of d log delta / dx."""
    xp = namespace(x0, base)

    def law(x: Array) -> LossLaw:
        return single(sign * xp.ones_like(x0), *xp.moveaxis(base + x[..., None] * unknown, -1, 0))

    placed = placement.place(law(x0), epsilon, log_delta, log_tol, count)

    def evaluate(x: Array) -> tuple[Array, Array, Array]:
        integrand, made_from = integrand_at(law(x), placed.contour, points, count)
        value, rate = estimate(integrand, epsilon)
        return value - log_delta, rate, needed(law(x), placed.contour, made_from.grids)

    def secant(_: Array, carry: tuple[Array, ...]) -> tuple[Array, ...]:
        x, slope, last_x, last_r, *_ = carry
        residual, rate, needs = evaluate(x)
        fresh = (residual - last_r) / xp.where(x == last_x, 1.0, x - last_x)
        trusted = (
            (xp.abs(x - last_x) > LEAST_SECANT) & (fresh / slope > 1.0 / SLOPE_CHANGE) & (fresh / slope < SLOPE_CHANGE)
        )
        slope = xp.where(trusted, fresh, slope)
        step = xp.clip(-residual / slope, -LARGEST_STEP, LARGEST_STEP)
        off = xp.abs(step) * xp.where(x == x0, 1.0, CURVATURE * xp.abs(x - last_x))
        # too far from x0 the windows and the period no longer serve
        serves = (xp.abs(x - x0) <= SETTLED) & ((x == x0) | (xp.abs(residual) < xp.abs(last_r)))
        following = (x + step, slope, x, residual, rate, off)
        kept = (xp.where(serves, new, old) for old, new in zip(carry, following, strict=False))
        return *kept, xp.where(serves[..., None], needs, carry[-1])

    carry = (x0, slope0, x0, 0.0 * x0, 0.0 * x0, 0.0 * x0, xp.zeros((*x0.shape, 2)))
    x, slope, _, residual, rate, off, needs = repeat(xp, SECANT_STEPS, secant, carry)
    return Solved(x, slope, slope / rate, residual, off, xp.abs(x - x0), needs, placed)
