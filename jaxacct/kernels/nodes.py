"""The integrand of the contour integral at its nodes, with bounds of its errors, and its trapezoid sum.

The characteristic functions of all nodes come from one set of quadrature points by one matrix product, without a
transcendental function per pair of point and node.  See README.md of this folder for the error terms.
"""

from typing import NamedTuple, Protocol

import jax

from jaxacct.core.floats import ROUNDOFF
from jaxacct.kernels import certificate, characteristic_decay
from jaxacct.kernels.arrays import Array, horner, namespace, stack
from jaxacct.kernels.departures import departures, depth, polar
from jaxacct.kernels.law import LossLaw, finite_weights, tilted_gaussian

FEWEST_NODES, MOST_NODES = 12.0, 2048.0
"""Ends of the range in which numbers of nodes are tried for the cut-off in t; the finest rung has 2048."""
NODE_COUNTS = 18
"""How many are tried, in geometric steps."""
SPARE_NATS = 7.0
"""Nats beyond the tolerance by which the cut-off terms must have decayed."""
DECAY_ROUNDING = 1e-9
"""Relative rounding of a decay."""
HORNER_UNITS = 16.0
"""Units of a coefficient by which each step of Horner's rule on the unit circle moves it (README.md, section 4)."""
SUM_OUTWARD = 1.0000001
"""Factor for the rounding of a sum of error bounds."""


class Summand(Protocol):
    """What a trapezoid sum needs of an integrand: `Nodes`, or that of the split contour."""

    @property
    def c(self) -> Array: ...

    @property
    def t(self) -> Array: ...

    @property
    def weight(self) -> tuple[Array, Array]: ...

    @property
    def log_modulus(self) -> Array: ...

    @property
    def angle(self) -> Array: ...


class Nodes(NamedTuple):
    """The integrand without its dependence on eps, at t_k = k h, relative to e^{K(c)}."""

    c: Array
    k0: Array  # K(c)
    common: Array  # bound on the error of K(c), a factor common to all nodes
    h: Array
    t: Array  # (count,)
    weight: tuple[Array, Array]  # (count,) real and imaginary part of h / (pi z (z + 1)), halved at t = 0
    log_modulus: Array  # (count,) Re K(z_k) - K(c), never above 0 but for rounding
    angle: Array  # (count,) Im K(z_k)
    slack: Array  # (count,) bound on the error of e^{K(z_k) - K(c)}
    tail: Array  # bound on the terms that were cut off, over Z
    images_at: Array  # abscissae of the Chernoff bounds for images to the right
    images_log: Array  # and their logarithms at eps = 0
    needs: Array  # (points, nodes) with which the certificate would be narrow


OWN_AXES = Nodes(0, 0, 0, 0, 1, (1, 1), 1, 1, 1, 0, 1, 1, 1)
"""How many axes of each field are its own; those before them are batch axes."""


def lifted(nodes: Nodes) -> Nodes:
    """The nodes with another batch axis behind the others, of size 1: to go with several epsilons each."""
    xp = namespace(nodes.c)
    return jax.tree.map(lambda x, own: xp.expand_dims(x, -1 - own), nodes, OWN_AXES)


class Part(NamedTuple):
    """Laws of one kind, `n` steps of each, at the nodes; with J of them every field has (J,) in front."""

    n: Array
    log_m: Array  # log M(c)
    re: Array  # (count,) real part of M(z_k)/M(c) - 1
    im: Array  # (count,)
    error: Array  # (count,) bound on the error of either
    at_c: Array  # bound on the error of log M(c)


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
    error = ROUNDOFF * (certificate.finite_units(loss, mass, weight) + 24.0 * (c + 1.0 + t[..., -1]) * reach)
    error = error + (c + t[..., -1]) * certificate.FINITE_LOSS_ERROR
    return Part(n, top + xp.log(total), re, im, error[..., None] + 0.0 * t, error)


def _cut_off(law: LossLaw, h: Array, levels: tuple[Array, Array], log_tol: Array) -> Array:
    """How many nodes are needed: the first number tried for which the terms cut off are small enough."""
    xp = namespace(law.sign, h)
    cuts = xp.ceil(xp.geomspace(FEWEST_NODES, MOST_NODES, NODE_COUNTS))
    frequency = h[..., None] * cuts
    decay = law.mu2[..., None] * frequency**2 / 2.0
    if law.gauss_n.shape[-1]:
        slabs, lengths = (x[..., None, :] for x in levels)
        each = characteristic_decay.gaussian_decay(slabs, lengths, frequency[..., None, :])
        decay = decay + xp.sum(law.gauss_n[..., None] * each, axis=-2)
    enough = decay >= (SPARE_NATS - log_tol)[..., None]
    return xp.where(xp.any(enough, axis=-1), cuts[xp.argmax(enough, axis=-1)], 2.0 * cuts[-1])


def _decay_at(law: LossLaw, levels: tuple[Array, Array], frequency: Array, at_c: Array) -> Array:
    """A certified bound of -log|phi| at and beyond a frequency, for heights that are off as M(c) is."""
    xp = namespace(law.sign, frequency)
    decay = law.mu2 * frequency**2 / 2.0
    if law.gauss_n.shape[-1]:
        each = characteristic_decay.gaussian_decay(*levels, frequency[..., None])
        decay = decay + xp.sum(law.gauss_n * each * xp.maximum(1.0 - 2.0 * at_c, 0.0), axis=-1)
    return decay * (1.0 - DECAY_ROUNDING)


def nodes_at(
    law: LossLaw, c: Array, h: Array, log_tol: Array, points: int, count: int, images: tuple[Array, Array]
) -> Nodes:
    """Evaluate the integrand on the contour Re z = c with step h."""
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
        re, im = departures(grid.weight, (h * law.sign)[..., None, None] * grid.loss, count)
        levels = characteristic_decay.level_sets(sigma, q, grid)
    need_nodes = _cut_off(law, h, levels, log_tol)
    keep = xp.minimum(need_nodes, float(count))
    t_max = h * (keep - 1.0)
    if gaussians:
        errors_of = certificate.gaussian_errors(sigma, q, sign, grid, t_max[..., None], depth(points, count))
        flat, rate, most, at_c = errors_of
        error = flat[..., None] + xp.minimum(rate[..., None] * along, most[..., None])
        need_points = xp.max(certificate.points_needed(sigma, grid, (h * need_nodes)[..., None]), axis=-1)
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
    sizes, turns, terms = k0, xp.abs(angle), 1.0  # of the sums' terms, which may cancel
    for part in parts:
        n = part.n[..., None]
        k0 = k0 + xp.sum(part.n * part.log_m, axis=-1)
        sizes, terms = sizes + xp.sum(xp.abs(part.n * part.log_m), axis=-1), terms + part.n.shape[-1]
        common = common + xp.sum(part.n * part.at_c, axis=-1)
        log_size, turn = polar(part.re, part.im)
        log_modulus = log_modulus + xp.sum(n * log_size, axis=-2)
        angle, turns = angle + xp.sum(n * turn, axis=-2), turns + xp.sum(n * xp.abs(turn), axis=-2)
        ceiling = xp.exp(log_size) + part.error
        log_ceiling = log_ceiling + xp.sum(n * xp.log(ceiling), axis=-2)
        off = (part.error + 16.0 * ROUNDOFF * xp.hypot(part.re, part.im)) / ceiling
        relative = relative + xp.sum(n * off, axis=-2)
    # rounding of the exponent n log|phi| and of the phase n arg M - t eps, where the two nearly cancel; of the
    # factors of a term, and of the sum of `count` of them
    spread = (terms + 8.0) * (xp.abs(log_modulus) + turns) + 48.0 + count
    kept = index < keep[..., None]
    slack = xp.where(kept, xp.exp(log_ceiling) * (relative + ROUNDOFF * spread), 0.0)
    log_modulus = xp.where(kept, log_modulus, -xp.inf)
    tail = 1.000001 * xp.exp(-decay) / (xp.pi * t_max)
    common = common + ROUNDOFF * (terms + 8.0) * (sizes + 4.0)
    needs = stack(xp, [need_points, need_nodes])
    return Nodes(c, k0, common, h, t, weight_at(c, h, t), log_modulus, angle, slack, tail, *images, needs)


def weight_at(c: Array, h: Array, t: Array) -> tuple[Array, Array]:
    """`h / (pi z (z + 1))` at z = c + it, halved at t = 0: real and imaginary part."""
    xp = namespace(c, t)
    c, h = c[..., None], h[..., None]
    scale = xp.where(t > 0, h, 0.5 * h) / (xp.pi * (t**2 + c**2) * (t**2 + (1.0 + c) ** 2))
    # 1/(z(z+1)) = conj(z(z+1)) / |z(z+1)|^2
    return (c * (1.0 + c) - t**2) * scale, -t * (1.0 + 2.0 * c) * scale


def trapezoid(nodes: Summand, epsilon: Array) -> tuple[Array, Array]:
    """The trapezoid sum and minus its derivative in eps, both over `Z = e^{K(c) - c eps}`."""
    xp = namespace(nodes.t, epsilon)
    t, (re, im) = nodes.t, nodes.weight
    phase = nodes.angle - t * epsilon[..., None]
    size = xp.exp(nodes.log_modulus)
    cosine, sine = size * xp.cos(phase), size * xp.sin(phase)
    value = re * cosine - im * sine
    odd = re * sine + im * cosine
    return xp.sum(value, axis=-1), xp.sum(nodes.c[..., None] * value - t * odd, axis=-1)


def errors(nodes: Nodes, epsilon: Array) -> tuple[Array, Array]:
    """(two-sided error over Z, images to subtract from the lower end, in absolute terms as logs)."""
    xp = namespace(nodes.t, epsilon)
    far = (nodes.t + nodes.c[..., None]) * xp.abs(epsilon)[..., None]
    cancel = 8.0 * ROUNDOFF * far * xp.exp(nodes.log_modulus)
    both = xp.sum(xp.hypot(*nodes.weight) * (nodes.slack + cancel), axis=-1) + nodes.tail
    return SUM_OUTWARD * both, _images(nodes, epsilon)


def values_along(nodes: Nodes, epsilon: Array) -> Array:
    """The trapezoid sum over Z at many eps, (K,): a polynomial in `e^{-i h eps}`, by Horner's rule."""
    xp = namespace(nodes.t, epsilon)
    (re, im), size = nodes.weight, xp.exp(nodes.log_modulus)
    cosine, sine = size * xp.cos(nodes.angle), size * xp.sin(nodes.angle)
    turn = nodes.h[..., None] * epsilon
    return horner(xp, (re * cosine - im * sine, re * sine + im * cosine), (xp.cos(turn), -xp.sin(turn)))[0]


def errors_along(nodes: Nodes, epsilon: Array) -> tuple[Array, Array]:
    """`errors` for `values_along`: those of the phases grow with eps, those of Horner's rule with the node."""
    xp = namespace(nodes.t, epsilon)
    weight = xp.hypot(*nodes.weight)
    size = weight * xp.exp(nodes.log_modulus)
    fixed = xp.sum(weight * nodes.slack + HORNER_UNITS * ROUNDOFF * nodes.t.shape[-1] * size, axis=-1) + nodes.tail
    far = 8.0 * ROUNDOFF * xp.sum((nodes.t + nodes.c[..., None]) * size, axis=-1)
    return SUM_OUTWARD * (fixed[..., None] + far[..., None] * xp.abs(epsilon)), _images(lifted(nodes), epsilon)


def _images(nodes: Nodes, epsilon: Array) -> Array:
    xp = namespace(nodes.t, epsilon)
    period = 2.0 * xp.pi / nodes.h
    left = -nodes.c * period - xp.log(-xp.expm1(-nodes.c * period))
    gap = (nodes.images_at - nodes.c[..., None]) * period[..., None]
    beyond = gap > 0
    gap = xp.where(beyond, gap, 1.0)
    chernoff = nodes.images_log - nodes.images_at * epsilon[..., None] - gap - xp.log(-xp.expm1(-gap))
    right = xp.min(xp.where(beyond, chernoff, xp.inf), axis=-1)
    return xp.logaddexp(left, right)


def reach(law: LossLaw, c: Array, h: Array, log_tol: Array, points: int) -> Array:
    """How many nodes carry the sum, for sampled Gaussian laws."""
    grid = tilted_gaussian(law.gauss_sigma, law.gauss_q, law.sign[..., None], c[..., None], points)
    return _cut_off(law, h, characteristic_decay.level_sets(law.gauss_sigma, law.gauss_q, grid), log_tol)


def value_and_slopes(
    law: LossLaw, c: Array, h: Array, keep: Array, epsilon: Array, points: int, count: int
) -> tuple[Array, Array, Array]:
    """(log delta, minus delta' over delta, delta'' over delta) at eps, for sampled Gaussian laws; no certificate.

    By the trapezoid sum over the first `keep` nodes; every derivative in eps brings a factor -z.
    """
    xp = namespace(law.sign, c)
    grid = tilted_gaussian(law.gauss_sigma, law.gauss_q, law.sign[..., None], c[..., None], points)
    re, im = departures(grid.weight, (h * law.sign)[..., None, None] * grid.loss, count)
    index = xp.arange(count)
    log_size, turn = polar(re, im)
    n, at = law.gauss_n[..., None], c[..., None]
    log_modulus = xp.where(index < keep[..., None], xp.sum(n * log_size, axis=-2), -xp.inf)
    t = h[..., None] * index
    phase = xp.sum(n * turn, axis=-2) - t * epsilon[..., None]
    k0 = xp.sum(law.gauss_n * grid.log_m, axis=-1)
    (re, im), size = weight_at(c, h, t), xp.exp(log_modulus)
    cosine, sine = size * xp.cos(phase), size * xp.sin(phase)
    even, odd = re * cosine - im * sine, re * sine + im * cosine
    value = xp.maximum(xp.sum(even, axis=-1), 1e-300)
    fall = xp.sum(at * even - t * odd, axis=-1)
    bend = xp.sum((at**2 - t**2) * even - 2.0 * at * t * odd, axis=-1)
    return k0 - c * epsilon + xp.log(value), fall / value, bend / value


def log_value(law: LossLaw, c: Array, h: Array, keep: Array, epsilon: Array, points: int, count: int) -> Array:
    """log of the trapezoid sum over the first `keep` nodes, for sampled Gaussian laws; no certificate."""
    return value_and_slopes(law, c, h, keep, epsilon, points, count)[0]
