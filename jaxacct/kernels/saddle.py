"""Where to put the contour: the saddle point of `K(c) - c eps - log c(c+1)` on the real axis.

Along the saddle everything is explicit in c:
    eps(c)       = K'(c) - 1/c - 1/(c+1)
    log delta(c) ~ K(c) - c eps(c) - log c(c+1) - log(2 pi Psi''(c))/2,   Psi'' = K'' + 1/c^2 + 1/(c+1)^2
so that solving for a given delta, or a given eps, is one safeguarded Newton iteration in log c.  These are
starting values only: the contour integral is exact for every c > 0, and nothing here enters a bound.
"""

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

from jaxacct.kernels.arrays import Array, namespace, repeat
from jaxacct.kernels.law import LossLaw, cumulants
from jaxacct.kernels.special import log1p

NEWTON_STEPS = 14
"""Safeguarded Newton steps from a start that may be far off.  Fixed, so that all of a batch take as many."""
REFINEMENT_STEPS = 7
"""The same from a start that is within a factor of two."""
SAFE_STEP = 1e-7
"""Newton steps in log c of at most this size need no safeguard."""
LARGEST_STEP = 3.0
"""Largest Newton step in log c."""
SMALL_ABSCISSA = 1e-3
"""Where mean and variance of the loss are taken as those without a tilt."""
CERTAIN_LOG_DELTA = -0.02
"""The largest log delta that a saddle is looked for: near delta = 1 the approximation has none."""
LARGEST_LOG_DELTA = -0.01
"""What an approximation of log delta above it is replaced by: the Newton step takes its logarithm."""


Cumulants: TypeAlias = Callable[[Array], tuple[Array, Array, Array]]
"""Maps an abscissa c to K(c), K'(c) and K''(c)."""


class Saddle(NamedTuple):
    """Contour abscissa with the composed loss's cumulants there and the saddle point approximation."""

    c: Array
    k1: Array  # tilted mean
    k2: Array  # tilted variance
    epsilon: Array
    log_delta: Array


def at(k: Cumulants, c: Array) -> tuple[Saddle, Array]:
    """The saddle point quantities at the abscissa c, for cumulants k."""
    xp = namespace(c)
    k0, k1, k2 = k(c)
    curvature = k2 + 1.0 / c**2 + 1.0 / (1.0 + c) ** 2
    epsilon = k1 - 1.0 / c - 1.0 / (1.0 + c)
    log_delta = k0 - c * epsilon - xp.log(c) - log1p(c) - 0.5 * xp.log(2.0 * xp.pi * curvature)
    return Saddle(c, k1, k2, epsilon, log_delta), curvature


def _safeguarded(
    k: Cumulants,
    first: Callable[[Saddle], Array] | Array,
    down: float,
    up: float,
    residual_and_step: Callable[[Saddle, Array], tuple[Array, Array]],
    like: Array,
    iterations: int = NEWTON_STEPS,
) -> Saddle:
    """Newton's method in w = log c; bisection where a step leaves the bracket or fails to halve the one before.

    `first` maps the variance at a small abscissa to a starting value of w, or is that value itself.  Returns the
    last saddle point that was evaluated.
    """
    xp = namespace(like)
    start = xp.log(SMALL_ABSCISSA) * xp.ones_like(like) if callable(first) else first
    guessing = callable(first)

    def body(i: Array, carry: tuple[Array, Array, Array, Array, Saddle]) -> tuple[Array, Array, Array, Array, Saddle]:
        w, lo, hi, last, _ = carry
        saddle, curvature = at(k, xp.exp(w))
        residual, step = residual_and_step(saddle, curvature)
        lo = xp.where(residual < 0, w, lo)
        hi = xp.where(residual < 0, hi, w)
        trial = w - xp.clip(step, -LARGEST_STEP, LARGEST_STEP)
        newton = (trial > lo) & (trial < hi) & (xp.abs(step) < 0.5 * last)
        # at the solution rounding decides on which side of it a step ends: no reason to bisect a stale bracket
        newton = newton | (xp.abs(step) < SAFE_STEP)
        following = xp.where(newton, trial, 0.5 * (lo + hi))
        last = xp.abs(following - w) + 1e-12
        if guessing:
            w0 = first(saddle)
            following = xp.where(i == 0, w0, following)
            lo, hi = xp.where(i == 0, w0 - down, lo), xp.where(i == 0, w0 + up, hi)
            last = xp.where(i == 0, xp.inf, last)
        return following, lo, hi, last, saddle

    nothing = xp.zeros_like(start)
    carry = (start, start - down, start + up, xp.full_like(start, xp.inf), Saddle(*([nothing] * 5)))
    return repeat(xp, iterations, body, carry)[-1]


def for_delta(law: LossLaw, log_delta: Array, nodes: int) -> Saddle:
    """The saddle whose approximate delta is the one asked for."""
    return for_delta_of(lambda c: cumulants(law, c, nodes), log_delta)


def for_delta_of(k: Cumulants, log_delta: Array) -> Saddle:
    """The same for a law given by its cumulants."""
    xp = namespace(log_delta)
    target = xp.minimum(log_delta, CERTAIN_LOG_DELTA)

    def residual_and_step(saddle: Saddle, curvature: Array) -> tuple[Array, Array]:
        reached = xp.minimum(saddle.log_delta, LARGEST_LOG_DELTA)
        return target - reached, xp.log(reached / target) * (-reached) / (saddle.c**2 * curvature)

    def first(saddle: Saddle) -> Array:
        return 0.5 * xp.log(2.0 * xp.maximum(-log_delta, 0.5) / saddle.k2)

    return _safeguarded(k, first, 16.0, 4.0, residual_and_step, log_delta)


def _residual_for(epsilon: Array) -> Callable[[Saddle, Array], tuple[Array, Array]]:
    def residual_and_step(saddle: Saddle, curvature: Array) -> tuple[Array, Array]:
        residual = saddle.epsilon - epsilon
        return residual, residual / (saddle.c * curvature)

    return residual_and_step


def for_epsilon(law: LossLaw, epsilon: Array, nodes: int, start: Array | None = None) -> Saddle:
    """The saddle for a given eps, from a starting abscissa or from the untilted mean and variance."""
    xp = namespace(epsilon)

    def first(saddle: Saddle) -> Array:
        gap = epsilon - saddle.k1
        return xp.log((gap + xp.sqrt(gap**2 + 4.0 * saddle.k2)) / (2.0 * saddle.k2))

    begin = first if start is None else xp.log(start)
    return _safeguarded(lambda c: cumulants(law, c, nodes), begin, 12.0, 4.0, _residual_for(epsilon), epsilon)


def search(k: Cumulants, epsilon: Array, start: Array, iterations: int) -> Saddle:
    """The saddle for a given eps of a law given by its cumulants, near a starting abscissa."""
    return _safeguarded(k, namespace(start).log(start), 3.0, 3.0, _residual_for(epsilon), epsilon, iterations)
