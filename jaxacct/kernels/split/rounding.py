"""Rigorous bounds of the rounding errors of the split contour's two parts (kernels/README.md, sections 4 and 6)."""

from typing import NamedTuple

from jaxacct.core.floats import ROUNDOFF
from jaxacct.kernels import certificate
from jaxacct.kernels.arrays import Array, namespace, stack
from jaxacct.kernels.rounding import sum_depth
from jaxacct.kernels.split.errors import USELESS
from jaxacct.kernels.split.parts import Grid, TiltedParts, high_blur, low_blur

LARGEST_DOUBT = 0.1
"""Error of the logarithm of a weight from which on the first order says nothing, and nothing is certified."""


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
