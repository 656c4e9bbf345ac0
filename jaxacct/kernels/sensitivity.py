"""How log delta changes along a tangent of the law, by the derivative under the contour integral.

With `V = sum_k Re[w_k e^{K(z_k) - z_k eps}]` the trapezoid sum,

    V' = sum_k Re[w_k K'(z_k) e^{K(z_k) - z_k eps}],    K' = sum n' log M + n M'/M,

where ' is the derivative along the tangent.  The contour stays where it is: the integral does not depend on it.  Nor
do quadrature points of a sampled Gaussian move: the integral over u does not depend on them.  Nothing here enters a
bound.
"""

from jaxacct.kernels import saddle
from jaxacct.kernels.arrays import Array, namespace
from jaxacct.kernels.contour import axis_nodes, place_with_bounds
from jaxacct.kernels.departures import departures, polar
from jaxacct.kernels.law import LossLaw, Tilted, finite_weights, tilted_gaussian
from jaxacct.kernels.nodes import nodes_at


def sensitivity(
    law: LossLaw, tangent: LossLaw, epsilon: Array, log_tol: Array, points: int, count: int
) -> tuple[Array, Array, Array]:
    """(derivative of log delta along a tangent of the law, minus its derivative in eps, needs)."""
    xp = namespace(law.sign, epsilon, tangent.mu2)
    point = saddle.for_epsilon(law, epsilon, axis_nodes(points))
    c, period, *images = place_with_bounds(law, point, epsilon, log_tol, axis_nodes(points))
    nodes = nodes_at(law, c, 2.0 * xp.pi / period, log_tol, points, count, (images[0], images[1]))
    z = c[..., None] + 1j * nodes.t
    change = tangent.mu2[..., None] * z * (z + 1.0) / 2.0
    at, along = c[..., None], nodes.t[..., None, :]
    if law.gauss_n.shape[-1]:
        found = gaussian_change(law, tangent, c, nodes.h, nodes.t, points, count)
        change = change + xp.sum(found, axis=-2)
    if law.laplace_n.shape[-1]:
        change = change + xp.sum(_laplace_change(law, tangent, at[..., None] + 1j * along), axis=-2)
    if law.finite_n.shape[-1]:
        change = change + xp.sum(_finite_change(law, tangent, at, along), axis=-2)
    re, im = nodes.weight
    terms = (re + 1j * im) * xp.exp(nodes.log_modulus + 1j * (nodes.angle - nodes.t * epsilon[..., None]))
    value = xp.sum(terms.real, axis=-1)
    moved = xp.sum(xp.where(nodes.log_modulus > -xp.inf, (change * terms).real, 0.0), axis=-1)
    return moved / value, xp.sum((z * terms).real, axis=-1) / value, nodes.needs


def loss_change(sigma: Array, q: Array, t: Tilted, sigma_moved: Array, q_moved: Array) -> Array:
    """The change of `log mix` at the points of a grid, (X,), where sigma and q move by so much."""
    sigma, q = sigma[..., None], q[..., None]
    in_sigma = t.posterior * (1.0 / sigma**2 - t.u / sigma) / sigma
    in_q = t.posterior / q - (1.0 - t.posterior) / (1.0 - q)
    return in_sigma * sigma_moved[..., None] + in_q * q_moved[..., None]


def gaussian_change(law: LossLaw, tangent: LossLaw, c: Array, h: Array, t: Array, points: int, count: int) -> Array:
    """(J, count), complex: `n' log M + n M'/M` of every sampled Gaussian at z_k = c + i t_k."""
    xp = namespace(law.sign, c, tangent.mu2)
    sign, along = law.sign[..., None], t[..., None, :]
    grid = tilted_gaussian(law.gauss_sigma, law.gauss_q, sign, c[..., None], points)
    moved = loss_change(law.gauss_sigma, law.gauss_q, grid, tangent.gauss_sigma, tangent.gauss_q)
    angle = (h * law.sign)[..., None, None] * grid.loss
    re, im = departures(grid.weight, angle, count)
    weight = grid.weight * moved
    moved_re, moved_im = departures(weight, angle, count)
    whole = xp.sum(weight, axis=-1)[..., None]
    power = grid.power[..., None] + 1j * sign[..., None] * along
    rate = power * (whole + moved_re + 1j * moved_im) / (1.0 + re + 1j * im)
    log_size, turn = polar(re, im)
    log_m = grid.log_m[..., None] + log_size + 1j * turn
    n, n_moved = law.gauss_n[..., None], tangent.gauss_n[..., None]
    return xp.where(n > 0, n * rate + n_moved * log_m, n_moved * log_m)


def _laplace_change(law: LossLaw, tangent: LossLaw, z: Array) -> Array:
    """The same of Laplace parts; the argument of M is taken between -pi and pi, as departures.polar does.

    `M = e^{z/s} (1 + h)/2` with `h = (1 + 2z e^{-(1 + 2z)/s})/(1 + 2z)`.
    """
    xp = namespace(law.sign, z)
    scale, a = law.laplace_scale[..., None], 1.0 + 2.0 * z
    fallen = xp.exp(-a / scale)
    whole = 1.0 + (1.0 + 2.0 * z * fallen) / a
    turn = z.imag / scale + xp.angle(whole)
    log_m = z.real / scale + xp.log(0.5 * xp.abs(whole)) + 1j * xp.arctan2(xp.sin(turn), xp.cos(turn))
    in_scale = -z / scale**2 + 2.0 * z * fallen / scale**2 / whole
    return law.laplace_n[..., None] * in_scale * tangent.laplace_scale[..., None] + tangent.laplace_n[..., None] * log_m


def _finite_change(law: LossLaw, tangent: LossLaw, c: Array, t: Array) -> Array:
    """`M = sum p_j e^{z l_j}`: `M' = sum (p_j' + p_j z l_j') e^{z l_j}`."""
    xp = namespace(law.sign, c, t)
    loss, mass = law.finite_loss, law.finite_mass
    top, weight = finite_weights(loss, mass, c)
    turned = weight[..., None, :] * xp.exp(1j * t[..., None] * loss[..., None, :])
    share = xp.where(mass > 0, tangent.finite_mass / xp.where(mass > 0, mass, 1.0), 0.0)[..., None, :]
    z = (c[..., None] + 1j * t)[..., None]
    whole = xp.sum(turned, axis=-1)
    rate = xp.sum(turned * (share + z * tangent.finite_loss[..., None, :]), axis=-1) / whole
    log_m = top[..., None] + xp.log(whole)
    return law.finite_n[..., None] * rate + tangent.finite_n[..., None] * log_m
