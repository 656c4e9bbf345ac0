"""delta(eps) where few steps matter: the contour integral of a split law, and its remainder in closed form.

The far outcomes are cut off, since under the tilt their losses would outweigh all that delta can see.  Compositions of
bulk steps alone are taken out where they form a near-atom (many steps without a hit), since its characteristic function
does not decay.  See remainder.py and README.md of this folder.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np

from jaxacct.core.floats import ROUNDOFF
from jaxacct.kernels import saddle
from jaxacct.kernels.arrays import Array, iterate, namespace, repeat
from jaxacct.kernels.contour import Bracketed
from jaxacct.kernels.law import LossLaw
from jaxacct.kernels.split import remainder
from jaxacct.kernels.split.certificate import certify, ends
from jaxacct.kernels.split.integrand import Integrand, Quadrature, estimate, integrand_at
from jaxacct.kernels.split.parts import NO_WINDOW, Windows, cumulants, shares
from jaxacct.kernels.split.placement import PLACEMENT_POINTS, Placement, grids_of, place

USUAL_LOG_DELTA = -20.0
"""Where log delta starts if nothing is known."""
BELIEVED = 1e6
"""The trust (`Start`) in a value that a split rung has found without certifying it: believed, but to be improved on."""
LARGEST_MOVE = 2.5
"""Factor by which eps moves in one round at most: the contour was placed for an eps near it."""
NEWTON_STEPS = 7
"""Newton steps on the integral in one round; from a value within LARGEST_MOVE more change nothing."""
LEAST_EPSILON, LARGEST_EPSILON = 1e-12, 1e9
"""Ends of the range in which eps is looked for."""
LEAST_PLAUSIBLE = 1e-11
"""A saddle point approximation below this, next to the end of its range, disbelieves no starting value."""
LARGEST_LOG_DELTA_FALL = 20.0
"""Nats by which log delta falls in one round at most."""
MARGIN = 1.05
"""Factor on the distance between an end and the estimate, since the slope changes along the way."""
LEAST_RELATIVE_SLOPE = 1e-3
"""Least slope of log delta in log eps with which that distance is computed; an end too far away is wide but holds."""


class Start(NamedTuple):
    """A value to start from, of eps or of log delta, and how far it is to be trusted.

    `trust` is the factor by which the saddle point approximation may be off before the value is disbelieved:
    0 where there is no value, inf where the value is the solution already.
    """

    value: Array
    trust: Array


def _solve(integrand: Integrand, start: Array, log_delta: Array) -> Array:
    xp = namespace(integrand.t, start)

    def newton(_: Array, eps: Array) -> Array:
        value, rate = estimate(integrand, eps)
        rate = xp.clip(rate, 0.05 / start, 5.0 * integrand.c + 5.0)
        moved = eps + xp.clip((value - log_delta) / rate, -0.4 * start, 0.4 * start)
        return xp.clip(moved, start / LARGEST_MOVE, start * LARGEST_MOVE)

    return repeat(xp, NEWTON_STEPS, newton, start)


class _Round(NamedTuple):
    """Where the search stands, and the contour that led there."""

    count: Array  # rounds done
    value: Array
    placed: Placement
    integrand: Integrand
    made_from: Quadrature


def _rounds(
    law: LossLaw,
    follow: Callable[[Array, Integrand], Array],
    start: Array,
    place_at: Callable[[Array], Placement],
    points: int,
    count: int,
    rounds: Array,
) -> _Round:
    """Place the contour and follow it to the next value, again and again, `rounds` times; the last one is returned."""
    xp = namespace(law.gauss_n, start)

    def again(count_of: Array, value: Array) -> _Round:
        placed = place_at(value)
        integrand, made_from = integrand_at(law, placed.contour, points, count)
        return _Round(count_of + 1, follow(value, integrand), placed, integrand, made_from)

    none = xp.zeros(start.shape, int)
    if xp is np:
        first = again(none, start)
    else:  # all rounds by one trace
        shapes = jax.eval_shape(again, none, start)
        first = jax.tree.map(lambda x: xp.zeros(x.shape, x.dtype), shapes)._replace(value=start)
    return iterate(xp, lambda carry: carry.count < rounds, lambda carry: again(*carry[:2]), first)


def _first(law: LossLaw, log_delta: Array, log_tol: Array) -> Array:
    """The saddle point approximation of eps when far outcomes are cut off by their mass alone."""
    xp = namespace(law.gauss_n, log_delta)
    one = xp.ones_like(law.sign)
    high = xp.where(law.sign[..., None] > 0, remainder.far_by_mass(law, log_delta + log_tol), NO_WINDOW)
    both = shares(grids_of(law, Windows(xp.full_like(high, NO_WINDOW), high, one), one, PLACEMENT_POINTS))
    return saddle.for_delta_of(lambda c: cumulants(law, one, both, c), log_delta).epsilon


def _together(law: LossLaw, *values: Array) -> list[Array]:
    """The values, with all batch axes of the law."""
    xp = namespace(law.gauss_n, *values)
    return xp.broadcast_arrays(*values, law.sign, law.mu2, law.gauss_n[..., 0])[: len(values)]


def epsilon(
    law: LossLaw,
    log_delta_low: Array,
    log_delta_high: Array,
    start: Start,
    log_tol: Array,
    points: int,
    count: int,
    rounds: int,
) -> Bracketed:
    """`inf {eps : delta(eps) <= delta}` for a positive solution."""
    xp = namespace(law.gauss_n, log_delta_low)
    log_delta_low, log_delta_high, log_tol, *known = _together(law, log_delta_low, log_delta_high, log_tol, *start)
    value, trust = known
    guess = xp.clip(_first(law, log_delta_low, log_tol), LEAST_EPSILON, LARGEST_EPSILON)
    likely = (value * trust > guess) & ((value < guess * trust) | (guess < LEAST_PLAUSIBLE))
    found = _rounds(
        law,
        lambda eps, integrand: _solve(integrand, eps, log_delta_low),
        xp.where(likely, value, guess),
        lambda eps: place(law, eps, log_delta_low, log_tol, count),
        points,
        count,
        xp.where(xp.isinf(trust), 1, rounds),
    )
    return _certified(law, *found[1:], log_delta_low, log_delta_high, points)


def epsilon_placed(
    law: LossLaw, log_delta_low: Array, log_delta_high: Array, start: Array, placed: Placement, points: int, count: int
) -> Bracketed:
    """The same from a solution and a placement that are known already, from nearly the same law.

    The certificate bounds every error for this law, wherever the windows are.  The bounds of the remainder assume the
    remove direction, so that in the add direction nothing is certified for windows that cut anything off.
    """
    xp = namespace(law.gauss_n, start)
    log_delta_low, log_delta_high, start = _together(law, log_delta_low, log_delta_high, start)
    integrand, made_from = integrand_at(law, placed.contour, points, count)
    solution = _solve(integrand, start, log_delta_low)
    answer = _certified(law, solution, placed, integrand, made_from, log_delta_low, log_delta_high, points)
    windows = placed.contour.windows
    least = xp.minimum(xp.min(windows.low, axis=-1), xp.min(windows.high, axis=-1))
    fits = (law.sign > 0) | ((windows.keep_bulk > 0) & (least >= NO_WINDOW))
    lower, upper = xp.where(fits, answer.lower, -xp.inf), xp.where(fits, answer.upper, xp.inf)
    return answer._replace(lower=lower, upper=upper, ok=answer.ok & fits)


def _certified(
    law: LossLaw,
    solution: Array,
    placed: Placement,
    integrand: Integrand,
    made_from: Quadrature,
    log_delta_low: Array,
    log_delta_high: Array,
    points: int,
) -> Bracketed:
    xp = namespace(law.gauss_n, solution)
    certificate = certify(law, placed, integrand, made_from, points)
    _, rate = estimate(integrand, solution)
    low, high = ends(integrand, certificate, solution)
    grain = 16.0 * ROUNDOFF * (xp.abs(integrand.k0) + xp.abs(log_delta_low) + 4.0)
    rate = xp.maximum(rate, LEAST_RELATIVE_SLOPE / solution)
    above = solution + MARGIN * (xp.maximum(high - log_delta_low, 0.0) + grain) / rate
    below = solution - MARGIN * (xp.maximum(log_delta_high - low, 0.0) + grain) / rate
    lowers, uppers = ends(integrand, certificate, xp.stack([below, above]))
    # the logarithms of delta come from outside, to a few units
    upper_ok = uppers[1] + 4.0 * ROUNDOFF * xp.abs(log_delta_low) <= log_delta_low
    lower_ok = lowers[0] - 4.0 * ROUNDOFF * xp.abs(log_delta_high) >= log_delta_high
    lower_ok = lower_ok & (below > 0) & (below < xp.inf)
    lower, upper = xp.where(lower_ok, below, -xp.inf), xp.where(upper_ok, above, xp.inf)
    return Bracketed(lower, solution, upper, upper_ok & lower_ok, certificate.needs)


def delta(law: LossLaw, eps: Array, start: Start, log_tol: Array, points: int, count: int, rounds: int) -> Bracketed:
    """log of (lower, estimate, upper) of delta(eps), eps >= 0; `start` as for epsilon, used from BELIEVED on."""
    found, eps = _placed(law, eps, start, log_tol, points, count, rounds)
    return _at(law, found, eps, found.value, points)


def delta_about(
    law: LossLaw, eps: Array, around: Array, start: Start, log_tol: Array, points: int, count: int, rounds: int
) -> Bracketed:
    """The same at several eps, `around`: (K,), on the one contour that is placed for `eps`; `needs` has (1, 2).

    Every end holds wherever the contour is.
    """
    xp = namespace(law.gauss_n, eps)
    found, _ = _placed(law, eps, start, log_tol, points, count, rounds)
    many = xp.moveaxis(around, -1, 0)
    answer = _at(law, found, many, estimate(found.integrand, many)[0], points)
    lower, middle, upper, ok = (xp.moveaxis(end, 0, -1) for end in answer[:4])
    return Bracketed(lower, middle, upper, ok, answer.needs[..., None, :])


def _placed(
    law: LossLaw, eps: Array, start: Start, log_tol: Array, points: int, count: int, rounds: int
) -> tuple[_Round, Array]:
    """The contour for delta(eps), log delta on it, and eps with all batch axes of the law."""
    xp = namespace(law.gauss_n, eps)
    eps, log_tol, value, trust = _together(law, eps, log_tol, *start)
    found = _rounds(
        law,
        lambda log_delta, integrand: xp.clip(estimate(integrand, eps)[0], log_delta - LARGEST_LOG_DELTA_FALL, 0.0),
        xp.where(trust >= BELIEVED, value, USUAL_LOG_DELTA),
        lambda log_delta: place(law, eps, log_delta, log_tol, count),
        points,
        count,
        xp.where(xp.isinf(trust), 1, rounds),
    )
    return found, eps


def _at(law: LossLaw, found: _Round, eps: Array, middle: Array, points: int) -> Bracketed:
    """The ends of log delta at one or more eps, in front, on a contour."""
    xp = namespace(law.gauss_n, eps)
    certificate = certify(law, found.placed, found.integrand, found.made_from, points)
    lower, upper = ends(found.integrand, certificate, eps)
    ok = xp.isfinite(lower) & xp.isfinite(upper)
    return Bracketed(lower, xp.clip(middle, lower, upper), upper, ok, certificate.needs)
