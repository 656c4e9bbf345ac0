"""delta(eps) where few steps matter: the contour integral of a split law, and its remainder in closed form.

The far outcomes are cut off, since under the tilt their losses would outweigh all that delta can see.  Compositions of
bulk steps alone are taken out where they form a near-atom (many steps without a hit), since its characteristic function
does not decay.  See remainder.py and README.md of this folder.

The certificate bounds every error of the integrand, the rounding of its two parts included (kernels/README.md, sections
4 and 6).
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np

from jaxacct.core.floats import ROUNDOFF
from jaxacct.kernels import certificate, saddle
from jaxacct.kernels.arrays import Array, iterate, logistic, namespace, repeat, stack
from jaxacct.kernels.contour import Bracketed
from jaxacct.kernels.departures import depth
from jaxacct.kernels.law import LossLaw
from jaxacct.kernels.nodes import trapezoid
from jaxacct.kernels.rounding import sum_depth
from jaxacct.kernels.special import log1p
from jaxacct.kernels.split import cutoff, errors, remainder
from jaxacct.kernels.split.errors import USELESS
from jaxacct.kernels.split.integrand import Integrand, Quadrature, estimate, integrand_at, logs_of, needed
from jaxacct.kernels.split.parts import (
    NO_WINDOW,
    Grid,
    TiltedParts,
    Windows,
    composed,
    cumulants,
    high_blur,
    low_blur,
    rise_and_norm,
    shares,
    tilted,
)
from jaxacct.kernels.split.placement import PLACEMENT_POINTS, Placement, grids_of, place
from jaxacct.kernels.split.remainder import Remainder

LARGEST_DOUBT = 0.1
"""Error of the logarithm of a weight from which on the first order says nothing, and nothing is certified."""
FIRST_ORDER = 1.01
"""Factor for the terms beyond the first order of a small error."""
SUM_OUTWARD = 1.0000001
"""Factor for the rounding of a sum of error bounds."""
LEAST_LOG_SCALE = -690.0
"""Least logarithm of Z that is exponentiated: e^-690 is still a normal number."""
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


class Certificate(NamedTuple):
    """Bounds of the errors of an integrand, and of what is not integrated."""

    common: Array  # bound on the error of K(c), a factor common to all nodes
    slack: Array  # (count,) bound on the error of the integrand at each node, relative to e^{K(c)}
    tail: Array  # bound on the terms that were cut off, over Z
    images_at: Array  # abscissa of the Chernoff bound for images to the right
    images_log: Array  # and its logarithm at eps = 0
    remainder: Remainder
    needs: Array  # (points, nodes) with which the certificate would be narrow


class _OnAxis(NamedTuple):
    """What is computed on the real axis, where t = 0 and grids are even."""

    even: Grid  # at the contour's abscissa
    parts: TiltedParts
    errors: Array  # (J, 2) of both parts
    images_log: Array  # Chernoff bound for the images
    bulk_at: Array  # abscissae of the Chernoff bounds for compositions of bulk steps
    bulk_log: Array


def _on_the_axis(law: LossLaw, placed: Placement, points: int) -> _OnAxis:
    """Bound the images and the bulk compositions; all grids go through one trace of the error bound.

    An axis in front stands for the two kinds of grids, even and of bulk steps, and one behind it for two abscissae.
    """
    xp = namespace(law.gauss_n, placed.contour.c)
    contour, choice = placed
    windows = contour.windows
    bulk, bulk_at = remainder.bulk_grids(law, choice, points)
    even = grids_of(law, windows, contour.c, points)
    grids = jax.tree.map(lambda *x: xp.stack(x)[:, None], even, bulk)
    low = xp.stack([windows.low, choice.low])[:, None]
    at = xp.stack([xp.stack([contour.c, contour.images_at]), bulk_at])
    sides, c = (law.gauss_sigma, law.gauss_q), at[..., None]
    parts = tilted(law.sign[..., None], c, grids)
    found = errors.axis_errors(*sides, law.sign[..., None], low, windows.high, c, grids, parts)
    found = found + weight_errors(*sides, c, grids, parts, low, windows.high)
    own, image, leaps = (jax.tree.map(lambda x, i=i: x[i], parts) for i in ((0, 0), (0, 1), 1))
    images = cutoff.chernoff(law, windows.keep_bulk, image, found[0, 1], contour.images_at)
    bulk_log = cutoff.bulk_chernoff(law, leaps, found[1], bulk_at)
    return _OnAxis(even, own, found[0, 0], images, bulk_at, bulk_log)


def certify(law: LossLaw, placed: Placement, integrand: Integrand, made_from: Quadrature, points: int) -> Certificate:
    """Bound every error of an integrand."""
    xp = namespace(law.gauss_n, integrand.t)
    grids, parts, bulk, jump = made_from
    contour, choice = placed
    windows, c, n, count = contour.windows, contour.c, law.gauss_n, integrand.angle.shape[-1]
    t, t_max = integrand.t, integrand.h * contour.nodes_kept
    logs = logs_of(law, contour, parts, bulk, jump, t)
    axis = _on_the_axis(law, placed, points)
    sides, place = (law.gauss_sigma, law.gauss_q), (windows.low, windows.high)
    at, furthest = c[..., None], t_max[..., None]
    steps = errors.step_errors(*sides, law.sign[..., None], *place, at, grids, parts, furthest)
    # error of a quotient whose numerator and denominator may both be off by this
    steps = xp.where(steps < 0.5, 2.0 * steps / (1.0 - xp.minimum(steps, 0.5)), errors.USELESS)
    part_errors, at_c = [], []
    off = rounding_errors(*sides, at, grids, parts, furthest, depth(points, count), *place)
    for part, (rate, most, own) in enumerate(off):
        step = steps[..., part]
        part_errors.append(step[..., None] + xp.minimum(rate[..., None] * t[..., None, :], most[..., None]))
        at_c.append(step + own)

    odds, keep_bulk = parts.log_jump - parts.log_bulk, windows.keep_bulk
    rise, log_norm = rise_and_norm(law, keep_bulk, parts.log_bulk, parts.log_jump)
    base, share = rise + log_norm, logistic(xp, odds)
    ceilings = xp.hypot(1.0 + bulk[0], bulk[1]) + part_errors[0]
    jumps = xp.hypot(1.0 + jump[0], jump[1]) + part_errors[1]
    ratio = xp.exp(odds)[..., None] * jumps / ceilings
    most = composed(n, log1p(ratio))
    fallen = xp.exp(-most)
    gain = -xp.expm1(-most) + keep_bulk[..., None] * fallen  # (e^R - 1 + keep_bulk) / e^R at its largest
    units = ROUNDOFF * (16.0 + n.shape[-1])
    moved = composed(n, (part_errors[0] + units * xp.hypot(*bulk)) / ceilings)
    jumped = composed(n, ratio / (1.0 + ratio) * (part_errors[1] / jumps + 2.0 * units))
    # the last two: rounding of the factors of a term, and of the sum of `count` of them
    spread = xp.abs(logs.plain) + xp.abs(logs.rise) + most + logs.turned + 6.0 + count / 16.0
    ceiling = composed(n, xp.log(ceilings)) - law.mu2[..., None] * t**2 / 2.0 + most - base[..., None]
    slack = xp.exp(ceiling) * (gain * (moved + units * spread) + jumped)
    slack = xp.where(xp.isfinite(integrand.log_modulus), slack, 0.0)

    jump_error = xp.sum(xp.where(n > 0, at_c[1], 0.0), axis=-1)
    ratio_error = xp.where(keep_bulk > 0, xp.sum(n * (share * at_c[1]), axis=-1), (1.0 + rise) * jump_error)
    size = xp.abs(integrand.k0) + xp.sum(n * xp.abs(parts.log_bulk), axis=-1) + law.mu2 * c * (c + 1.0) + rise + 30.0
    common = FIRST_ORDER * (xp.sum(n * at_c[0], axis=-1) + ratio_error) + units * size
    left_out = remainder.bounds(law, windows, choice, integrand.far, axis.bulk_at, axis.bulk_log, points)
    # the decay by which the contour was placed comes from a coarse grid without a bound of its error
    beyond = cutoff.decay_beyond(law, windows, axis.even, axis.parts, axis.errors, c, integrand.k0, t_max)
    beyond = beyond + xp.log(xp.pi * (t_max - 0.5 * integrand.h))
    needs = needed(law, contour, grids)
    return Certificate(common, slack, xp.exp(-beyond), contour.images_at, axis.images_log, left_out, needs)


def _errors(integrand: Integrand, certificate: Certificate, epsilon: Array) -> tuple[Array, Array]:
    """(two-sided error over Z, images in absolute terms)."""
    xp = namespace(integrand.t, epsilon)
    size = xp.hypot(*integrand.weight)
    height = (integrand.t + integrand.c[..., None]) * xp.exp(integrand.log_modulus)
    turned = 8.0 * ROUNDOFF * height * xp.abs(epsilon)[..., None]
    both = SUM_OUTWARD * xp.sum(size * (certificate.slack + turned), axis=-1) + certificate.tail
    period = 2.0 * xp.pi / integrand.h
    left = certificate.remainder.log_mass - integrand.c * period - xp.log(-xp.expm1(-integrand.c * period))
    gap = (certificate.images_at - integrand.c) * period
    right = certificate.images_log - certificate.images_at * epsilon - gap
    right = right - xp.log(-xp.expm1(-xp.where(gap > 0, gap, 1.0)))
    return both, xp.exp(left) + xp.exp(xp.where(gap > 0, right, xp.inf))


def ends(integrand: Integrand, certificate: Certificate, epsilon: Array) -> tuple[Array, Array]:
    """(log lower, log upper) of delta(eps)."""
    xp = namespace(integrand.k0, epsilon)
    value, _ = trapezoid(integrand, epsilon)
    both, images = _errors(integrand, certificate, epsilon)
    far, _ = remainder.far(integrand.far, epsilon)
    log_z = integrand.k0 - integrand.c * epsilon
    both = both + 8.0 * ROUNDOFF * xp.abs(value)
    z = xp.exp(xp.maximum(log_z, LEAST_LOG_SCALE))
    up, down = xp.exp(certificate.common), xp.exp(-certificate.common)
    beyond = remainder.far_above(certificate.remainder, epsilon) + remainder.bulk(certificate.remainder, epsilon)
    high = z * (value + both) * up + beyond
    least = xp.where(log_z < LEAST_LOG_SCALE, xp.minimum(0.0, value - both), value - both)
    low = z * least * xp.where(least > 0, down, up) - remainder.OUTWARD * images * up + far
    log_low, log_high = (xp.log(xp.maximum(x, 1e-300)) for x in (low, high))
    margin = 16.0 * ROUNDOFF * (xp.abs(log_z) + xp.abs(integrand.c * epsilon) + 8.0)
    # what the contour integrates is at least 0: else the bounds contradict each other
    certain = (value + both >= 0.0) & (high < xp.inf)
    low = xp.where(certain & (low > 1e-300), log_low - margin - 8.0 * ROUNDOFF * xp.abs(log_low), -xp.inf)
    return low, xp.where(certain, log_high + margin + 8.0 * ROUNDOFF * xp.abs(log_high), xp.inf)


def _window_rounding(distance: Array, blur: Array) -> tuple[Array, Array]:
    """(units of rounding of log w, its derivative in u) at a distance inside the window."""
    xp = namespace(distance)
    x = xp.clip(distance / blur, -40.0, 9.0)
    return 20.0 + 6.0 * xp.minimum(x, 0.0) ** 2, xp.where(x < 8.5, xp.maximum(-x, 0.0) + 1.0, 0.0) / blur


class _Units(NamedTuple):
    """Rounding of the terms of one part's sum on a grid, in units; (X,) unless said otherwise."""

    own: Array  # of the logarithm of a weight
    turned: Array  # of a loss, by which its term turns
    doubt: Array  # () the largest error of the logarithm of a weight, no units


def _units(
    sigma: Array, q: Array, c: Array, nodes: Grid, parts: TiltedParts, low: Array, high: Array
) -> tuple[_Units, _Units]:
    """Of bulk and jumps: as in certificate.py, with the nodes' own errors and the windows'."""
    xp = namespace(nodes.u, c)
    z, size, place = xp.abs(c)[..., None] + 1.0, xp.abs(nodes.loss), xp.abs(nodes.u)
    sigma, q, low, high = (x[..., None] for x in (sigma, q, low, high))
    slope = nodes.posterior / sigma
    edge = xp.maximum(place[..., :1], place[..., -1:])
    in_y = 4.0 * (place / sigma + 0.5 / sigma**2)
    through_y = nodes.posterior * (in_y - 3.0 * xp.log(q))
    # of a node's place, and of its gap by the posterior
    warped = nodes.warp[..., None] * ((certificate.LOG_MIX_UNITS + 6.0) * size + through_y)
    node = nodes.slack / ROUNDOFF + (4.0 * edge + warped) * nodes.gap / nodes.step[..., None]
    far, far_slope = _window_rounding(high - nodes.u, high_blur(sigma))
    common = 32.0 + (certificate.LOG_MIX_UNITS + 2.0) * z * size + 2.0 * nodes.u**2 + z * through_y + in_y + far
    steep = place + z * slope + far_slope + 1.0 / sigma
    turned = (certificate.LOG_MIX_UNITS + 12.0) * size + through_y + node * slope

    def of(weight: Array, log_part: Array, distance: Array) -> _Units:
        near, near_slope = _window_rounding(distance, low_blur(sigma))
        own = common + xp.abs(log_part)[..., None] + near + node * (steep + near_slope)
        return _Units(own, turned, ROUNDOFF * xp.max(xp.where(weight > 0.0, own, 0.0), axis=-1))

    distance = low - nodes.u
    return of(parts.bulk, parts.log_bulk, distance), of(parts.jump, parts.log_jump, -distance)


def _first_order(units: _Units, x: Array) -> Array:
    xp = namespace(units.doubt, x)
    return xp.where(units.doubt < LARGEST_DOUBT, ROUNDOFF * (1.0 + 2.0 * units.doubt) * x, USELESS)


def _of_weights(units: _Units, weight: Array, log_part: Array) -> Array:
    xp = namespace(units.own, weight)
    common = sum_depth(weight.shape[-1]) + 40.0 + 8.0 * xp.abs(log_part)
    return _first_order(units, xp.sum(weight * (units.own + common[..., None]), axis=-1))


def weight_errors(sigma: Array, q: Array, c: Array, nodes: Grid, parts: TiltedParts, low: Array, high: Array) -> Array:
    """Rounding of the logarithms of both parts on the real axis, (2,)."""
    of_bulk, of_jump = _units(sigma, q, c, nodes, parts, low, high)
    bulk = _of_weights(of_bulk, parts.bulk, parts.log_bulk)
    return stack(namespace(bulk), [bulk, _of_weights(of_jump, parts.jump, parts.log_jump)])


def rounding_errors(
    sigma: Array,
    q: Array,
    c: Array,
    nodes: Grid,
    parts: TiltedParts,
    t_max: Array,
    depth: float,
    low: Array,
    high: Array,
) -> tuple[tuple[Array, Array, Array], tuple[Array, Array, Array]]:
    """(rate, ceiling, weight) as in certificate.py, of bulk and of jumps."""
    xp = namespace(nodes.u, c, t_max)
    size = xp.abs(nodes.loss)

    def of(units: _Units, weight: Array, log_part: Array) -> tuple[Array, Array, Array]:
        rotated = units.own + depth
        rate = xp.sum(weight * (size * rotated + units.turned), axis=-1)
        ceiling = xp.sum(weight * (2.0 * rotated + t_max[..., None] * units.turned), axis=-1)
        return _first_order(units, rate), _first_order(units, ceiling), _of_weights(units, weight, log_part)

    of_bulk, of_jump = _units(sigma, q, c, nodes, parts, low, high)
    return of(of_bulk, parts.bulk, parts.log_bulk), of(of_jump, parts.jump, parts.log_jump)
