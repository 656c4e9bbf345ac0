"""The plain contour, which integrates the whole law, with its certificate (kernels/README.md, sections 1 to 5)."""

from functools import partial
from typing import NamedTuple

from jaxacct.core.floats import ROUNDOFF
from jaxacct.kernels.arrays import Array, horner, namespace, repeat, stack
from jaxacct.kernels.contour import core, gaussian_errors
from jaxacct.kernels.contour.core import Bracketed, Nodes
from jaxacct.kernels.law import LossLaw, Saddle, cumulants, finite_weights, lifted, saddle_point, tilted_gaussian

SPARE_NATS = 7.0
"""The terms that are cut off must lie at least this many nats below the tolerance."""
DECAY_ROUNDING = 1e-9
"""Relative rounding error of the result of `_decay_at`."""


class Part(NamedTuple):
    """Moment generating functions M of J laws of one kind at the nodes z_k = c + ikh. First axes have length J."""

    n: Array  # number of steps with each law
    log_m: Array  # log M(c)
    re: Array  # (count,) real part of M(z_k)/M(c) - 1
    im: Array  # (count,) imaginary part of M(z_k)/M(c)
    error: Array  # (count,) bound of the error of M(z_k)/M(c)
    at_c: Array  # bound of the error of log M(c)


def _laplace_nodes(n: Array, scale: Array, c: Array, t: Array) -> Part:
    xp = namespace(scale, c, t)

    def value(z: Array, scale: Array) -> Array:
        rest = 2.0 * z * xp.exp(-(1.0 + 2.0 * z) / scale)
        return 0.5 * xp.exp(z / scale) * (1.0 + (1.0 + rest) / (1.0 + 2.0 * z))

    base = value(c, scale)
    ratio = value(c[..., None] + 1j * t, scale[..., None]) / base[..., None]
    error = ROUNDOFF * (120.0 + 24.0 * (c + 1.0 + t[..., -1]) / scale)
    return Part(n, xp.log(base), ratio.real - 1.0, ratio.imag, error[..., None] + 0.0 * t, error)


def _finite_nodes(n: Array, loss: Array, mass: Array, c: Array, t: Array) -> Part:
    xp = namespace(loss, c, t)
    top, weight = finite_weights(loss, mass, c)
    total = xp.sum(weight, axis=-1)
    phase = t[..., None] * loss[..., None, :]
    re = xp.sum(-2.0 * xp.sin(0.5 * phase) ** 2 * weight[..., None, :], axis=-1) / total[..., None]
    im = xp.sum(xp.sin(phase) * weight[..., None, :], axis=-1) / total[..., None]
    reach = xp.max(xp.where(mass > 0, xp.abs(loss), 0.0), axis=-1)
    error = ROUNDOFF * (gaussian_errors.finite_units(loss, mass, weight) + 24.0 * (c + 1.0 + t[..., -1]) * reach)
    error = error + (c + t[..., -1]) * gaussian_errors.FINITE_LOSS_ERROR
    return Part(n, top + xp.log(total), re, im, error[..., None] + 0.0 * t, error)


def _cut_off(law: LossLaw, h: Array, levels: tuple[Array, Array], log_tol: Array) -> Array:
    """Return the smallest tried number of nodes after which the terms are small enough to be cut off."""
    xp = namespace(law.sign, h)
    cuts = xp.ceil(xp.geomspace(12.0, 2048.0, 18))  # the largest compiled program has 2048 nodes
    frequency = h[..., None] * cuts
    decay = law.mu2[..., None] * frequency**2 / 2.0
    if law.gauss_n.shape[-1]:
        slabs, lengths = (x[..., None, :] for x in levels)
        each = gaussian_errors.gaussian_decay(slabs, lengths, frequency[..., None, :])
        decay = decay + xp.sum(law.gauss_n[..., None] * each, axis=-2)
    enough = decay >= (SPARE_NATS - log_tol)[..., None]
    return xp.where(xp.any(enough, axis=-1), cuts[xp.argmax(enough, axis=-1)], 2.0 * cuts[-1])


def _decay_at(law: LossLaw, levels: tuple[Array, Array], frequency: Array, at_c: Array) -> Array:
    """Return a lower bound of -sum n log|M(c+it)/M(c)| for all t >= frequency. `at_c` bounds the error of log M(c)."""
    xp = namespace(law.sign, frequency)
    decay = law.mu2 * frequency**2 / 2.0
    if law.gauss_n.shape[-1]:
        each = gaussian_errors.gaussian_decay(*levels, frequency[..., None])
        decay = decay + xp.sum(law.gauss_n * each * xp.maximum(1.0 - 2.0 * at_c, 0.0), axis=-1)
    return decay * (1.0 - DECAY_ROUNDING)


def nodes_at(
    law: LossLaw, c: Array, h: Array, log_tol: Array, points: int, count: int, images: tuple[Array, Array]
) -> Nodes:
    """Evaluate the integrand and bounds of its errors on the contour Re z = c with step h."""
    xp = namespace(law.sign, c, h)
    index = xp.arange(count)
    t = h[..., None] * index
    parts: list[Part] = []
    levels: tuple[Array, Array] = (None, None)
    need_points, at_c = 0.0 * c, None
    sigma, q, sign, at, along = law.gauss_sigma, law.gauss_q, law.sign[..., None], c[..., None], t[..., None, :]
    gaussians = law.gauss_n.shape[-1] > 0
    if gaussians:
        grid = tilted_gaussian(sigma, q, sign, at, points)
        re, im = core.departures(grid.weight, (h * law.sign)[..., None, None] * grid.loss, count)
        levels = gaussian_errors.level_sets(sigma, q, grid)
    need_nodes = _cut_off(law, h, levels, log_tol)
    keep = xp.minimum(need_nodes, float(count))
    t_max = h * (keep - 1.0)
    if gaussians:
        errors_of = gaussian_errors.gaussian_errors(sigma, q, sign, grid, t_max[..., None], core.depth(points, count))
        flat, rate, most, at_c = errors_of
        error = flat[..., None] + xp.minimum(rate[..., None] * along, most[..., None])
        need_points = xp.max(gaussian_errors.points_needed(sigma, grid, (h * need_nodes)[..., None]), axis=-1)
        parts.append(Part(law.gauss_n, grid.log_m, re, im, error, at_c))
    decay = _decay_at(law, levels, h * keep, at_c)
    if law.laplace_n.shape[-1]:
        parts.append(_laplace_nodes(law.laplace_n, law.laplace_scale, at, along))
    if law.finite_n.shape[-1]:
        parts.append(_finite_nodes(law.finite_n, law.finite_loss, law.finite_mass, at, along))

    k0 = law.mu2 * c * (c + 1.0) / 2.0
    log_modulus = -law.mu2[..., None] * t**2 / 2.0
    angle = law.mu2[..., None] * t * (c + 0.5)[..., None]
    log_ceiling, relative, common = log_modulus, 0.0 * t, 0.0 * c
    sizes, turns, terms = k0, xp.abs(angle), 1.0  # sums of |terms|: `sizes` for K(c), `turns` for `angle`
    for part in parts:
        n = part.n[..., None]
        k0 = k0 + xp.sum(part.n * part.log_m, axis=-1)
        sizes, terms = sizes + xp.sum(xp.abs(part.n * part.log_m), axis=-1), terms + part.n.shape[-1]
        common = common + xp.sum(part.n * part.at_c, axis=-1)
        log_size, turn = core.polar(part.re, part.im)
        log_modulus = log_modulus + xp.sum(n * log_size, axis=-2)
        angle, turns = angle + xp.sum(n * turn, axis=-2), turns + xp.sum(n * xp.abs(turn), axis=-2)
        ceiling = xp.exp(log_size) + part.error
        log_ceiling = log_ceiling + xp.sum(n * xp.log(ceiling), axis=-2)
        off = (part.error + 16.0 * ROUNDOFF * xp.hypot(part.re, part.im)) / ceiling
        relative = relative + xp.sum(n * off, axis=-2)
    # roundoffs of n log|M|, n arg M, the factors of a term, and the sum of terms; core.two_sided adds those of t eps
    spread = (terms + 8.0) * (xp.abs(log_modulus) + turns) + 48.0 + count
    kept = index < keep[..., None]
    slack = xp.where(kept, xp.exp(log_ceiling) * (relative + ROUNDOFF * spread), 0.0)
    log_modulus = xp.where(kept, log_modulus, -xp.inf)
    tail = 1.000001 * xp.exp(-decay) / (xp.pi * t_max)
    common = common + ROUNDOFF * (terms + 8.0) * (sizes + 4.0)
    needs = stack(xp, [need_points, need_nodes])
    return Nodes(c, k0, common, h, t, core.weight_at(c, h, t), log_modulus, angle, slack, tail, *images, needs)


def values_along(nodes: Nodes, epsilon: Array) -> Array:
    """Return `core.trapezoid`'s sum, a polynomial in `e^{-i h eps}`, at K values of eps by Horner's rule."""
    xp = namespace(nodes.t, epsilon)
    (re, im), size = nodes.weight, xp.exp(nodes.log_modulus)
    cosine, sine = size * xp.cos(nodes.angle), size * xp.sin(nodes.angle)
    turn = nodes.h[..., None] * epsilon
    return horner(xp, (re * cosine - im * sine, re * sine + im * cosine), (xp.cos(turn), -xp.sin(turn)))[0]


def errors_along(nodes: Nodes, epsilon: Array) -> tuple[Array, Array]:
    """Do for `values_along` what core.errors does: return error bounds of the sums and logs of bounds of images."""
    xp = namespace(nodes.t, epsilon)
    weight = xp.hypot(*nodes.weight)
    size = weight * xp.exp(nodes.log_modulus)
    # each step of Horner's rule changes a coefficient by at most 16 roundoffs of itself (kernels/README.md, section 4)
    fixed = xp.sum(weight * nodes.slack + 16.0 * ROUNDOFF * nodes.t.shape[-1] * size, axis=-1) + nodes.tail
    far = 8.0 * ROUNDOFF * xp.sum((nodes.t + nodes.c[..., None]) * size, axis=-1)
    both = core.SUM_OUTWARD * (fixed[..., None] + far[..., None] * xp.abs(epsilon))
    many = xp.moveaxis(epsilon, -1, 0)
    return both, xp.moveaxis(core.log_images(nodes.c, nodes.h, nodes.images_at, nodes.images_log, many), 0, -1)


def reach(law: LossLaw, c: Array, h: Array, log_tol: Array, points: int) -> Array:
    """Return the number of nodes after which the terms are negligible, for a law that has only sampled Gaussians."""
    grid = tilted_gaussian(law.gauss_sigma, law.gauss_q, law.sign[..., None], c[..., None], points)
    return _cut_off(law, h, gaussian_errors.level_sets(law.gauss_sigma, law.gauss_q, grid), log_tol)


def value_and_slopes(
    law: LossLaw, c: Array, h: Array, keep: Array, epsilon: Array, points: int, count: int
) -> tuple[Array, Array, Array]:
    """Return log delta, -delta'/delta and delta''/delta from the first `keep` nodes, without error bounds."""
    xp = namespace(law.sign, c)
    grid = tilted_gaussian(law.gauss_sigma, law.gauss_q, law.sign[..., None], c[..., None], points)
    re, im = core.departures(grid.weight, (h * law.sign)[..., None, None] * grid.loss, count)
    index = xp.arange(count)
    log_size, turn = core.polar(re, im)
    n, at = law.gauss_n[..., None], c[..., None]
    log_modulus = xp.where(index < keep[..., None], xp.sum(n * log_size, axis=-2), -xp.inf)
    t = h[..., None] * index
    phase = xp.sum(n * turn, axis=-2) - t * epsilon[..., None]
    k0 = xp.sum(law.gauss_n * grid.log_m, axis=-1)
    (re, im), size = core.weight_at(c, h, t), xp.exp(log_modulus)
    cosine, sine = size * xp.cos(phase), size * xp.sin(phase)
    even, odd = re * cosine - im * sine, re * sine + im * cosine
    # A derivative in eps multiplies the term of node z by -z. `fall` is the sum for -delta', and `bend` for delta''.
    value = xp.maximum(xp.sum(even, axis=-1), 1e-300)
    fall = xp.sum(at * even - t * odd, axis=-1)
    bend = xp.sum((at**2 - t**2) * even - 2.0 * at * t * odd, axis=-1)
    return k0 - c * epsilon + xp.log(value), fall / value, bend / value


LARGEST_CANCELLATION = 5.0
"""Moving the abscissa away from the saddle point may enlarge the integrand by at most this many nats."""


def axis_nodes(points: int) -> int:
    """Return how many quadrature points serve at t = 0, where few suffice: a quarter of `points`, but at least 32."""
    return max(32, points // 4)


def place(law: LossLaw, point: Saddle, epsilon: Array, log_tol: Array, axis: int) -> tuple[Array, Array, Array, Array]:
    """Return the abscissa c, the period, all abscissae tried, and the log of the Chernoff bound of each at eps = 0."""
    xp = namespace(law.sign, point.c)
    at = point.c[..., None] * xp.asarray(core.ABSCISSA_MULTIPLES)
    log_bound = gaussian_errors.chernoff(lifted(law), at, axis)
    # Tails are nearly exponential. So a c below the saddle point allows a far shorter period, but terms then cancel.
    # A law that needs 128 points may have a second hump, where terms cancel more than Chernoff's bound shows.
    allowed = LARGEST_CANCELLATION if axis < 128 else 1.5
    return *core.period_for(point.c, at, log_bound, epsilon, point.log_delta, log_tol, allowed), at, log_bound


def nodes_for(law: LossLaw, point: Saddle, epsilon: Array, log_tol: Array, points: int, count: int) -> Nodes:
    """Place the contour near a saddle point. Return the contour's nodes."""
    c, period, at, log_bound = place(law, point, epsilon, log_tol, axis_nodes(points))
    return nodes_at(law, c, 2.0 * namespace(c).pi / period, log_tol, points, count, (at, log_bound))


def delta(law: LossLaw, epsilon: Array, log_tol: Array, points: int, count: int) -> Bracketed:
    """Bracket log delta at eps. The probability of an infinite loss is not part of this delta."""
    point = saddle_point(partial(cumulants, law, nodes=axis_nodes(points)), "epsilon", epsilon)
    nodes = nodes_for(law, point, epsilon, log_tol, points, count)
    return core.bracketed(nodes, epsilon, core.trapezoid(nodes, epsilon)[0], core.errors(nodes, epsilon))


def delta_about(law: LossLaw, epsilon: Array, around: Array, log_tol: Array, points: int, count: int) -> Bracketed:
    """Bracket log delta at the K eps in `around` on a contour for `epsilon`. Brackets far from `epsilon` are wide."""
    xp = namespace(law.sign, around)
    point = saddle_point(partial(cumulants, law, nodes=axis_nodes(points)), "epsilon", epsilon)
    nodes = nodes_for(law, point, epsilon, log_tol, points, count)
    many = xp.moveaxis(around, -1, 0)
    return core.behind(core.bracketed(nodes, many, core.trapezoid(nodes, many)[0], core.errors(nodes, many)))


def delta_along(law: LossLaw, epsilon: Array, along: Array, log_tol: Array, points: int, count: int) -> Bracketed:
    """Bracket log delta at the K eps in `along` by `values_along`, on one contour. Its period suffices for all K."""
    xp = namespace(law.sign, along)
    point = saddle_point(partial(cumulants, law, nodes=axis_nodes(points)), "epsilon", epsilon)
    c, period, at, log_bound = place(law, point, epsilon, log_tol, axis_nodes(points))
    gap = at - c[..., None]
    # The least eps in `along` has the largest images from larger eps. `wider` keeps the bound of the first image there
    # below e^-11. So it is below e^-6 delta at each eps with delta > e^-5.
    image = log_bound - at * xp.min(along, axis=-1)[..., None] + 11.0
    wider = xp.min(xp.where(gap > 0.0, image / xp.where(gap > 0.0, gap, 1.0), xp.inf), axis=-1)
    h = 2.0 * xp.pi / xp.maximum(period, wider)
    nodes = nodes_at(law, c, h, log_tol, points, count, (at, log_bound))
    off = errors_along(nodes, along)
    value, many, both, images = (xp.moveaxis(x, -1, 0) for x in (values_along(nodes, along), along, *off))
    return core.behind(core.bracketed(nodes, many, value, (both, images)))


def epsilon(
    law: LossLaw, log_delta_low: Array, log_delta_high: Array, log_tol: Array, points: int, count: int, rounds: int = 1
) -> Bracketed:
    """Bracket `inf {eps : delta(eps) <= delta}`, which may be negative. Two bounds of log delta are given.

    `upper` holds if log delta >= log_delta_low, and `lower` holds if log delta <= log_delta_high. Each later round
    places the contour anew, at the eps found on the contour before. The first contour is placed at the eps of the
    saddle point, which is a poor guess where rare large losses put a second hump into the tilted law.
    """
    xp = namespace(law.sign, log_delta_low)
    k = partial(cumulants, law, nodes=axis_nodes(points))
    point = saddle_point(k, "log_delta", log_delta_low, down=16.0)

    def again(_: Array, point: Saddle) -> Saddle:
        nodes = nodes_for(law, point, point.epsilon, log_tol, points, count)
        solution = core.newton(nodes, point.epsilon, log_delta_low)
        following = saddle_point(k, "epsilon", solution, point.c)
        return following._replace(epsilon=solution, log_delta=log_delta_low)

    if rounds > 1:
        point = repeat(xp, rounds - 1, again, point)
    nodes = nodes_for(law, point, point.epsilon, log_tol, points, count)
    estimate = core.newton(nodes, point.epsilon, log_delta_low)
    lower, lower_ok, upper, upper_ok = core.epsilon_of(nodes, estimate, log_delta_low, log_delta_high)
    target = log_delta_low[..., None]
    rest = nodes.images_log - target
    rest = rest + 8.0 * ROUNDOFF * (xp.abs(nodes.images_log) + xp.abs(target))
    by_chernoff = rest / nodes.images_at
    by_chernoff = by_chernoff + 4.0 * ROUNDOFF * xp.abs(by_chernoff)
    by_chernoff = xp.min(xp.where(by_chernoff > -xp.inf, by_chernoff, xp.inf), axis=-1)
    return Bracketed(lower, estimate, xp.minimum(upper, by_chernoff), upper_ok & lower_ok, nodes.needs)
