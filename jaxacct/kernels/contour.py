"""delta(eps) by damped inversion of the moment generating function, with a certificate.

    delta(eps) = (1/2 pi i) int_{c - i inf}^{c + i inf} e^{K(z) - z eps} / (z (z+1)) dz,    c > 0,

by the trapezoid rule in t = Im z with step h = 2 pi/period, on `count` nodes.
"""

from typing import NamedTuple

from jaxacct.core.floats import ROUNDOFF
from jaxacct.kernels import certificate, saddle
from jaxacct.kernels.arrays import Array, namespace, pick, repeat, stack
from jaxacct.kernels.law import LossLaw, lifted
from jaxacct.kernels.nodes import Nodes, errors, errors_along, nodes_at, trapezoid, values_along
from jaxacct.kernels.nodes import lifted as lifted_nodes

ABSCISSA_MULTIPLES = (0.35, 0.45, 0.55, 0.65, 0.75, 0.85, 0.92, 0.97, 1.0, 1.07, 1.2, 1.5, 2.2, 4.0, 9.0)
"""Abscissae that are tried, over the saddle point: those up to 1 for the contour, all for the images to the right."""
LARGEST_CANCELLATION = 5.0
"""Nats by which moving the abscissa away from the saddle point may enlarge the integrand."""
LARGEST_CANCELLATION_FINE = 1.5
"""The same on the fine rungs, where hidden humps make for more cancellation than Chernoff shows."""
FINE_AXIS_POINTS = 128
"""Points on the real axis from which on a rung counts as fine."""
FEWEST_AXIS_POINTS = 32
"""Least number of points on the real axis, where a quarter of a rung's points serves otherwise."""
LOG_FAR_IMAGE = -11.0
"""Logarithm of the images at an eps far below the contour's, where delta is seldom below e^-5."""
NEWTON_STEPS = 6
"""Newton steps from the saddle point's eps to that of the contour integral."""
LEAST_VALUE = 1e-300
"""What a value or a lower end of at most this is replaced by before its logarithm is taken; such an end is not used."""
LARGEST_LOG_WIDTH = 0.1
"""Distance of the upper end of log delta from the estimate beyond which the estimate is not used."""
MARGIN = 1.02
"""Factor on the distance between an end and the estimate, since the slope changes along the way."""


class Bracketed(NamedTuple):
    """A value with certified ends.  Where `ok` is false the upper end is the Chernoff bound and the lower end -inf."""

    lower: Array
    estimate: Array
    upper: Array
    ok: Array
    needs: Array  # (points, nodes) that would do


def axis_nodes(points: int) -> int:
    """Nodes for the work on the real axis, where the trapezoid rule is at its best."""
    return max(FEWEST_AXIS_POINTS, points // 4)


def place(law: LossLaw, point: saddle.Saddle, epsilon: Array, log_tol: Array, axis: int) -> tuple[Array, Array]:
    """(abscissa, period), chosen together; `axis` nodes for the work on the real axis.

    The images that the trapezoid rule adds are bounded by 1 to the left (`e^{-c period}` of it) and by Chernoff
    to the right.  Tails of sampled mechanisms are nearly exponential, so an abscissa somewhat below the saddle
    point shortens the period several times, at the price of some cancellation.
    """
    return place_with_bounds(law, point, epsilon, log_tol, axis)[:2]


def place_with_bounds(
    law: LossLaw, point: saddle.Saddle, epsilon: Array, log_tol: Array, axis: int
) -> tuple[Array, Array, Array, Array]:
    """The same, and the abscissae of Chernoff bounds, (A,), with their logarithms at eps = 0, (A,)."""
    xp = namespace(law.sign, point.c)
    at = point.c[..., None] * xp.asarray(ABSCISSA_MULTIPLES)
    log_bound = certificate.chernoff(lifted(law), at, axis)
    allowed = LARGEST_CANCELLATION if axis < FINE_AXIS_POINTS else LARGEST_CANCELLATION_FINE
    return *period_for(point.c, at, log_bound, epsilon, point.log_delta, log_tol, allowed), at, log_bound


def period_for(
    highest: Array, at: Array, log_bound: Array, epsilon: Array, log_delta: Array, log_tol: Array, allowed: Array
) -> tuple[Array, Array]:
    """The best of the abscissae, (A,), up to the highest, and its period; at most `allowed` nats are cancelled."""
    xp = namespace(at, log_bound)
    goal = xp.minimum(log_delta, 0.0) + log_tol
    # the Chernoff bound stands in for the size of the integrand: its constant varies slowly with c
    size = log_bound - at * epsilon[..., None]
    # in row i and column j: from abscissa i, the image bounded at abscissa j
    gap = at[..., None, :] - at[..., None]
    right = (size - goal[..., None])[..., None, :] / xp.where(gap > 0, gap, 1.0)
    period = xp.maximum(-goal[..., None] / at, xp.min(xp.where(gap > 0, right, xp.inf), axis=-1))
    cancelled = size - xp.min(size, axis=-1)[..., None]
    best = xp.argmin(xp.where((cancelled < allowed) & (at <= highest[..., None]), period, xp.inf), axis=-1)
    return pick(xp, at, best), pick(xp, period, best)


def nodes_for(law: LossLaw, point: saddle.Saddle, epsilon: Array, log_tol: Array, points: int, count: int) -> Nodes:
    """The nodes for a saddle point."""
    c, period, at, log_bound = place_with_bounds(law, point, epsilon, log_tol, axis_nodes(points))
    return nodes_at(law, c, 2.0 * namespace(c).pi / period, log_tol, points, count, (at, log_bound))


def _ends(nodes: Nodes, epsilon: Array, value: Array, off: tuple[Array, Array]) -> tuple[Array, Array]:
    """log delta(eps) from below and from above, by a sum over Z and its errors."""
    xp = namespace(nodes.t, epsilon)
    both, images = off
    log_z = nodes.k0 - nodes.c * epsilon
    # value and both are sums of the same terms; here they are only subtracted and added
    both = both + 4.0 * ROUNDOFF * xp.abs(value)
    rest = value - both - xp.exp(images - log_z + nodes.common + 8.0 * ROUNDOFF * (xp.abs(images) + xp.abs(log_z)))
    low, high = (xp.log(xp.maximum(x, LEAST_VALUE)) for x in (rest, value + both))
    grain = 8.0 * ROUNDOFF * (xp.abs(log_z) + 4.0)
    lower = log_z - nodes.common + low - grain - 8.0 * ROUNDOFF * xp.abs(low)
    upper = log_z + nodes.common + high + grain + 8.0 * ROUNDOFF * xp.abs(high)
    # a true value has an upper end above 0: else the bounds contradict each other
    certain = (value + both > 0.0) & (upper < xp.inf)
    return xp.where(certain & (rest > LEAST_VALUE), lower, -xp.inf), xp.where(certain, upper, xp.inf)


def _by_chernoff(nodes: Nodes, epsilon: Array) -> Array:
    """log delta(eps) from above by the bounds that serve the images."""
    xp = namespace(nodes.t, epsilon)
    found = nodes.images_log - nodes.images_at * epsilon[..., None]
    found = found + 8.0 * ROUNDOFF * (xp.abs(nodes.images_log) + xp.abs(found))
    return xp.min(xp.where(found > -xp.inf, found, xp.inf), axis=-1)


def delta(law: LossLaw, epsilon: Array, log_tol: Array, points: int, count: int) -> Bracketed:
    """log of (lower, estimate, upper) of the finite part of delta(eps)."""
    point = saddle.for_epsilon(law, epsilon, axis_nodes(points))
    nodes = nodes_for(law, point, epsilon, log_tol, points, count)
    return _bracketed(nodes, epsilon, trapezoid(nodes, epsilon)[0], errors(nodes, epsilon))


def delta_about(law: LossLaw, epsilon: Array, around: Array, log_tol: Array, points: int, count: int) -> Bracketed:
    """The same at several eps, `around`: (K,), on the one contour that is placed for `epsilon`; `needs` has (1, 2).

    Every end holds wherever the contour is.  The ends are narrow within about a deviation of the loss.
    """
    point = saddle.for_epsilon(law, epsilon, axis_nodes(points))
    nodes = lifted_nodes(nodes_for(law, point, epsilon, log_tol, points, count))
    return _bracketed(nodes, around, trapezoid(nodes, around)[0], errors(nodes, around))


def delta_along(law: LossLaw, epsilon: Array, along: Array, log_tol: Array, points: int, count: int) -> Bracketed:
    """`delta_about` for many eps, `along`: (K,), which cost little each: their sums are polynomials at K points.

    The period is long enough for the least of them, too, whose images to the right are enlarged by the tilt.
    Rounding is somewhat larger.
    """
    xp = namespace(law.sign, along)
    point = saddle.for_epsilon(law, epsilon, axis_nodes(points))
    c, period, at, log_bound = place_with_bounds(law, point, epsilon, log_tol, axis_nodes(points))
    gap = at - c[..., None]
    image = log_bound - at * xp.min(along, axis=-1)[..., None] - LOG_FAR_IMAGE
    wider = xp.min(xp.where(gap > 0.0, image / xp.where(gap > 0.0, gap, 1.0), xp.inf), axis=-1)
    h = 2.0 * xp.pi / xp.maximum(period, wider)
    nodes = nodes_at(law, c, h, log_tol, points, count, (at, log_bound))
    value, off = values_along(nodes, along), errors_along(nodes, along)
    return _bracketed(lifted_nodes(nodes), along, value, off)


def _bracketed(nodes: Nodes, epsilon: Array, value: Array, off: tuple[Array, Array]) -> Bracketed:
    xp = namespace(nodes.t, epsilon)
    log_z = nodes.k0 - nodes.c * epsilon
    lower, upper = _ends(nodes, epsilon, value, off)
    estimate = log_z + xp.log(xp.maximum(value, LEAST_VALUE))
    ok = (value > 0) & xp.isfinite(upper) & (upper - estimate < LARGEST_LOG_WIDTH)
    upper = xp.minimum(xp.where(ok, upper, xp.inf), _by_chernoff(nodes, epsilon))
    lower, estimate = xp.where(ok, lower, -xp.inf), xp.where(ok, estimate, upper)
    return Bracketed(lower, xp.clip(estimate, lower, upper), upper, ok, nodes.needs)


def _newton(nodes: Nodes, start: Array, log_delta: Array) -> Array:
    xp = namespace(nodes.t, start)

    def body(_: Array, eps: Array) -> Array:
        value, slope = trapezoid(nodes, eps)
        value = xp.maximum(value, LEAST_VALUE)
        residual = nodes.k0 - nodes.c * eps + xp.log(value) - log_delta
        rate = xp.clip(slope / value, 0.2 * nodes.c, 5.0 * nodes.c + 5.0)
        return eps + xp.clip(residual / rate, -2.0 / nodes.c, 2.0 / nodes.c)

    return repeat(xp, NEWTON_STEPS, body, start)


def epsilon(
    law: LossLaw, log_delta_low: Array, log_delta_high: Array, log_tol: Array, points: int, count: int, rounds: int = 1
) -> Bracketed:
    """`inf {eps : delta(eps) <= delta}` before clipping at 0, for a delta between two ends.

    The answer's upper end holds for log_delta_low, its lower end for log_delta_high.

    The saddle point approximation supplies the first contour.  It is poor where rare large losses put a second
    hump into the tilted law, so every further round places the contour anew at the solution so far.
    """
    xp = namespace(law.sign, log_delta_low)
    point = saddle.for_delta(law, log_delta_low, axis_nodes(points))

    def again(_: Array, point: saddle.Saddle) -> saddle.Saddle:
        nodes = nodes_for(law, point, point.epsilon, log_tol, points, count)
        solution = _newton(nodes, point.epsilon, log_delta_low)
        following = saddle.for_epsilon(law, solution, axis_nodes(points), point.c)
        return following._replace(epsilon=solution, log_delta=log_delta_low)

    if rounds > 1:
        point = repeat(xp, rounds - 1, again, point)
    nodes = nodes_for(law, point, point.epsilon, log_tol, points, count)
    estimate = _newton(nodes, point.epsilon, log_delta_low)
    value, slope = trapezoid(nodes, estimate)
    value = xp.maximum(value, LEAST_VALUE)
    rate = xp.clip(slope / value, 0.2 * nodes.c, 5.0 * nodes.c + 5.0)
    both, images = errors(nodes, estimate)
    log_z = nodes.k0 - nodes.c * estimate
    grain = 16.0 * ROUNDOFF * (xp.abs(log_z) + xp.abs(log_delta_low) + 4.0)
    off = xp.abs(log_z + xp.log(value) - log_delta_low) + grain
    off = off + nodes.common
    above = estimate + MARGIN * (both / value + off) / rate
    spread = both / value + xp.exp(images - log_z) / value + (log_delta_high - log_delta_low)
    below = estimate - MARGIN * (spread + off) / rate
    several, at = lifted_nodes(nodes), stack(xp, [below, above])
    lowers, uppers = _ends(several, at, trapezoid(several, at)[0], errors(several, at))
    # the logarithms of delta come from outside, to a few units
    upper_ok = uppers[..., 1] + 4.0 * ROUNDOFF * xp.abs(log_delta_low) <= log_delta_low
    lower_ok = (lowers[..., 0] - 4.0 * ROUNDOFF * xp.abs(log_delta_high) >= log_delta_high) & (below < xp.inf)
    target = log_delta_low[..., None]
    rest = nodes.images_log - target
    rest = rest + 8.0 * ROUNDOFF * (xp.abs(nodes.images_log) + xp.abs(target))
    by_chernoff = rest / nodes.images_at
    by_chernoff = by_chernoff + 4.0 * ROUNDOFF * xp.abs(by_chernoff)
    by_chernoff = xp.min(xp.where(by_chernoff > -xp.inf, by_chernoff, xp.inf), axis=-1)
    lower = xp.where(lower_ok, below, -xp.inf)
    upper = xp.minimum(xp.where(upper_ok, above, xp.inf), by_chernoff)
    return Bracketed(lower, estimate, upper, upper_ok & lower_ok, nodes.needs)
