"""The integrand of the contour integral at its nodes, with bounds of its errors, and its trapezoid sum.

The characteristic functions of all nodes come from one set of quadrature points by one matrix product, without a
transcendental function per pair of point and node.  See README.md of this folder for the error terms.
"""

from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from jaxacct.floats import ROUNDOFF
from jaxacct.kernels import certificate, characteristic_decay
from jaxacct.kernels.arrays import Array
from jaxacct.kernels.law import LossLaw, Tilted, tilted_gaussian
from jaxacct.kernels.rounding import blocks, sum_depth
from jaxacct.kernels.special import log1p

FEWEST_NODES, MOST_NODES = 12.0, 2048.0
"""Ends of the range in which numbers of nodes are tried for the cut-off in t; the finest rung has 2048."""
NODE_COUNTS = 18
"""How many are tried, in geometric steps."""
SPARE_NATS = 7.0
"""Nats beyond the tolerance by which the cut-off terms must have decayed."""
DECAY_ROUNDING = 1e-9
"""Relative rounding of a decay."""
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


def _powers(angle: Array, count: int) -> tuple[Array, Array]:
    """`e^{i k angle} - 1` for k < count by repeated rotation, as (count, X) real and imaginary parts."""
    re1, im1 = -2.0 * jnp.sin(0.5 * angle) ** 2, jnp.sin(angle)

    def turn(carry: tuple[Array, Array], _: Array) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
        re, im = carry
        return (re + re1 + re * re1 - im * im1, im + im1 + re * im1 + im * re1), carry

    zero = jnp.zeros_like(angle)
    return lax.scan(turn, (zero, zero), None, length=count)[1]


def _split(count: int) -> tuple[int, int]:
    """count = inner * outer with both near its root, powers of two first."""
    inner = 8
    while inner * inner * 2 < count:
        inner *= 2
    return inner, count // inner


def departures(weight: Array, angle: Array, count: int) -> tuple[Array, Array]:
    """`sum_j w_j (e^{i k angle_j} - 1)` for k < count, accurate relative to its own terms.

    With k = a + inner b, `e^{ik} - 1` is the sum and the product of two short tables, so all k come from one matrix
    product; the points are summed in blocks of rounding.BLOCK_SIZE first, which keeps the summation shallow.
    """
    inner, outer = _split(count)
    left = jnp.concatenate([*(weight * e for e in _powers(angle, inner)), weight[None]])
    right = jnp.concatenate([*_powers(inner * angle, outer), jnp.ones_like(weight)[None]])
    size = blocks(weight.size)
    left = left.reshape(2 * inner + 1, size, -1)
    right = right.reshape(2 * outer + 1, size, -1)
    product = jnp.sum(lax.optimization_barrier(jnp.einsum("abx,cbx->bac", left, right)), axis=0)
    both, only_left, only_right = product[:-1, :-1], product[:-1, -1:], product[-1:, :-1]
    re = both[:inner, :outer] - both[inner:, outer:] + only_left[:inner] + only_right[:, :outer]
    im = both[:inner, outer:] + both[inner:, :outer] + only_left[inner:] + only_right[:, outer:]
    return re.T.reshape(-1), im.T.reshape(-1)


def polar(re: Array, im: Array) -> tuple[Array, Array]:
    """(log|1 + d|, arg(1 + d)) of d = re + i im, accurate for a small d and for a small 1 + d."""
    rise = 2.0 * re + re**2 + im**2
    whole = jnp.maximum((1.0 + re) ** 2 + im**2, 1e-300)
    near = rise > -0.5
    log_size = 0.5 * jnp.where(near, log1p(jnp.where(near, rise, 0.0)), jnp.log(jnp.where(near, 1.0, whole)))
    return log_size, jnp.arctan2(im, 1.0 + re)


def depth(points: int, count: int) -> float:
    """Units of `w_j min(2, t |loss_j|)` by which the terms of `departures` are off, weights and losses aside.

    5.1 a step of either table, 4.9 for every rounding of a sum of products, and the weights' own sum.
    """
    return 5.1 * sum(_split(count)) + 4.9 * (sum_depth(points) + 4.0) + sum_depth(points)


def _gaussian_nodes(
    sigma: Array, q: Array, sign: Array, c: Array, h: Array, points: int, count: int
) -> tuple[Tilted, Array, Array, Array, Array]:
    t = tilted_gaussian(sigma, q, sign, c, points)
    re, im = departures(t.weight, h * sign * t.loss, count)
    return t, re, im, *characteristic_decay.level_sets(sigma, q, t)


def _laplace_nodes(scale: Array, c: Array, t: Array) -> tuple[Array, Array, Array, Array, Array]:
    def value(z: Array) -> Array:
        rest = 2.0 * z * jnp.exp(-(1.0 + 2.0 * z) / scale)
        return 0.5 * jnp.exp(z / scale) * (1.0 + (1.0 + rest) / (1.0 + 2.0 * z))

    base = value(lax.complex(c, 0.0 * c)).real
    ratio = value(lax.complex(c, t)) / base
    error = ROUNDOFF * (120.0 + 24.0 * (c + 1.0 + t[-1]) / scale)
    return jnp.log(base), ratio.real - 1.0, ratio.imag, jnp.full_like(t, error), error


def _finite_nodes(loss: Array, mass: Array, c: Array, t: Array) -> tuple[Array, Array, Array, Array, Array]:
    log_mass = jnp.log(jnp.where(mass > 0, mass, 1.0))
    exponent = jnp.where(mass > 0, c * loss + log_mass, -jnp.inf)
    top = jnp.max(exponent)
    weight = jnp.exp(exponent - top)
    total = jnp.sum(weight)
    phase = t[:, None] * loss[None, :]
    re = -2.0 * jnp.sin(0.5 * phase) ** 2 @ weight / total
    im = jnp.sin(phase) @ weight / total
    reach = jnp.max(jnp.where(mass > 0, jnp.abs(loss), 0.0))
    error = ROUNDOFF * (certificate.finite_units(loss, mass, weight) + 24.0 * (c + 1.0 + t[-1]) * reach)
    error = error + (c + t[-1]) * certificate.FINITE_LOSS_ERROR
    return top + jnp.log(total), re, im, jnp.full_like(t, error), error


def _cut_off(law: LossLaw, h: Array, levels: tuple[Array, Array], log_tol: Array) -> Array:
    """(nodes needed, certified bound of -log|phi| beyond them): the first number tried that suffices."""
    cuts = jnp.ceil(jnp.geomspace(FEWEST_NODES, MOST_NODES, NODE_COUNTS))
    decay = law.mu2 * (h * cuts) ** 2 / 2.0
    if law.gauss_n.size:
        at = jax.vmap(characteristic_decay.gaussian_decay, (None, None, 0))
        decay = decay + law.gauss_n @ jax.vmap(at, (0, 0, None))(*levels, h * cuts)
    enough = decay >= SPARE_NATS - log_tol
    return jnp.where(jnp.any(enough), cuts[jnp.argmax(enough)], 2.0 * cuts[-1])


def _decay_at(law: LossLaw, levels: tuple[Array, Array], frequency: Array, at_c: Array) -> Array:
    """The same at one frequency, for heights that are off as M(c) is."""
    decay = law.mu2 * frequency**2 / 2.0
    if law.gauss_n.size:
        each = jax.vmap(characteristic_decay.gaussian_decay, (0, 0, None))(*levels, frequency)
        decay = decay + law.gauss_n @ (each * jnp.maximum(1.0 - 2.0 * at_c, 0.0))
    return decay * (1.0 - DECAY_ROUNDING)


def nodes_at(
    law: LossLaw, c: Array, h: Array, log_tol: Array, points: int, count: int, images: tuple[Array, Array]
) -> Nodes:
    """Evaluate the integrand on the contour Re z = c with step h."""
    index = jnp.arange(count)
    t = h * index
    parts: list[tuple[Array, tuple[Array, ...]]] = []
    levels: tuple[Array, Array] = (None, None)
    need_points = 0.0 * c
    if law.gauss_n.size:
        each = jax.vmap(_gaussian_nodes, (0, 0, None, None, None, None, None))
        grid, re, im, *found = each(law.gauss_sigma, law.gauss_q, law.sign, c, h, points, count)
        levels = found[0], found[1]
    need_nodes = _cut_off(law, h, levels, log_tol)
    keep = jnp.minimum(need_nodes, float(count))
    t_max, at_c = h * (keep - 1.0), None
    if law.gauss_n.size:
        bound = jax.vmap(certificate.gaussian_errors, (0, 0, None, 0, None, None))
        flat, rate, most, at_c = bound(law.gauss_sigma, law.gauss_q, law.sign, grid, t_max, depth(points, count))
        error = flat[:, None] + jnp.minimum(rate[:, None] * t, most[:, None])
        need_points = jnp.max(jax.vmap(certificate.points_needed, (0, 0, None))(law.gauss_sigma, grid, h * need_nodes))
        parts.append((law.gauss_n, (grid.log_m, re, im, error, at_c)))
    decay = _decay_at(law, levels, h * keep, at_c)
    if law.laplace_n.size:
        parts.append((law.laplace_n, jax.vmap(_laplace_nodes, (0, None, None))(law.laplace_scale, c, t)))
    if law.finite_n.size:
        finite = jax.vmap(_finite_nodes, (0, 0, None, None))
        parts.append((law.finite_n, finite(law.finite_loss, law.finite_mass, c, t)))

    k0 = law.mu2 * c * (c + 1.0) / 2.0
    log_modulus = -law.mu2 * t**2 / 2.0
    angle = law.mu2 * t * (c + 0.5)
    log_ceiling, relative, common = log_modulus, 0.0 * c, 0.0 * c
    sizes, turns, terms = k0, jnp.abs(angle), 1.0  # of the sums' terms, which may cancel
    for n, (log_m, re, im, error, at_c) in parts:
        k0 = k0 + jnp.sum(n * log_m)
        sizes, terms = sizes + jnp.sum(jnp.abs(n * log_m)), terms + n.size
        common = common + jnp.sum(n * at_c)
        log_size, turn = polar(re, im)
        log_modulus = log_modulus + n @ log_size
        angle, turns = angle + n @ turn, turns + n @ jnp.abs(turn)
        ceiling = jnp.exp(log_size) + error
        log_ceiling = log_ceiling + n @ jnp.log(ceiling)
        relative = relative + n @ ((error + 16.0 * ROUNDOFF * jnp.hypot(re, im)) / ceiling)
    # rounding of the exponent n log|phi| and of the phase n arg M - t eps, where the two nearly cancel; of the
    # factors of a term, and of the sum of `count` of them
    spread = (terms + 8.0) * (jnp.abs(log_modulus) + turns) + 48.0 + count
    kept = index < keep
    slack = jnp.where(kept, jnp.exp(log_ceiling) * (relative + ROUNDOFF * spread), 0.0)
    log_modulus = jnp.where(kept, log_modulus, -jnp.inf)
    tail = 1.000001 * jnp.exp(-decay) / (jnp.pi * t_max)
    common = common + ROUNDOFF * (terms + 8.0) * (sizes + 4.0)
    needs = jnp.stack([need_points, need_nodes])
    return Nodes(c, k0, common, h, t, weight_at(c, h, t), log_modulus, angle, slack, tail, *images, needs)


def weight_at(c: Array, h: Array, t: Array) -> tuple[Array, Array]:
    """`h / (pi z (z + 1))` at z = c + it, halved at t = 0: real and imaginary part."""
    scale = jnp.where(t > 0, h, 0.5 * h) / (jnp.pi * (t**2 + c**2) * (t**2 + (1.0 + c) ** 2))
    # 1/(z(z+1)) = conj(z(z+1)) / |z(z+1)|^2
    return (c * (1.0 + c) - t**2) * scale, -t * (1.0 + 2.0 * c) * scale


def trapezoid(nodes: Summand, epsilon: Array) -> tuple[Array, Array]:
    """The trapezoid sum and minus its derivative in eps, both over `Z = e^{K(c) - c eps}`."""
    t, (re, im) = nodes.t, nodes.weight
    phase = nodes.angle - t * epsilon
    size = jnp.exp(nodes.log_modulus)
    cosine, sine = size * jnp.cos(phase), size * jnp.sin(phase)
    value = re * cosine - im * sine
    odd = re * sine + im * cosine
    return jnp.sum(value), jnp.sum(nodes.c * value - t * odd)


def errors(nodes: Nodes, epsilon: Array) -> tuple[Array, Array]:
    """(two-sided error over Z, images to subtract from the lower end, in absolute terms as logs)."""
    cancel = 8.0 * ROUNDOFF * (nodes.t + nodes.c) * jnp.abs(epsilon) * jnp.exp(nodes.log_modulus)
    both = jnp.sum(jnp.hypot(*nodes.weight) * (nodes.slack + cancel)) + nodes.tail
    period = 2.0 * jnp.pi / nodes.h
    left = -nodes.c * period - jnp.log(-jnp.expm1(-nodes.c * period))
    gap = (nodes.images_at - nodes.c) * period
    beyond = gap > 0
    gap = jnp.where(beyond, gap, 1.0)
    chernoff = nodes.images_log - nodes.images_at * epsilon - gap - jnp.log(-jnp.expm1(-gap))
    right = jnp.min(jnp.where(beyond, chernoff, jnp.inf))
    return SUM_OUTWARD * both, jnp.logaddexp(left, right)


def reach(law: LossLaw, c: Array, h: Array, log_tol: Array, points: int) -> Array:
    """How many nodes carry the sum, for sampled Gaussian laws."""
    grid = jax.vmap(tilted_gaussian, (0, 0, None, None, None))(law.gauss_sigma, law.gauss_q, law.sign, c, points)
    return _cut_off(law, h, jax.vmap(characteristic_decay.level_sets)(law.gauss_sigma, law.gauss_q, grid), log_tol)


def log_value(law: LossLaw, c: Array, h: Array, keep: Array, epsilon: Array, points: int, count: int) -> Array:
    """log of the trapezoid sum over the first `keep` nodes, for sampled Gaussian laws; no certificate."""
    grid = jax.vmap(tilted_gaussian, (0, 0, None, None, None))(law.gauss_sigma, law.gauss_q, law.sign, c, points)
    re, im = jax.vmap(departures, (0, 0, None))(grid.weight, h * law.sign * grid.loss, count)
    kept = jnp.arange(count) < keep
    log_size, turn = polar(re, im)
    log_modulus = jnp.where(kept, law.gauss_n @ log_size, -jnp.inf)
    angle = law.gauss_n @ turn
    k0 = jnp.sum(law.gauss_n * grid.log_m)
    zero = jnp.zeros_like(angle)
    t = h * jnp.arange(count)
    nodes = Nodes(c, k0, 0.0 * c, h, t, weight_at(c, h, t), log_modulus, angle, zero, 0.0 * c, zero, zero, zero)
    return k0 - c * epsilon + jnp.log(jnp.maximum(trapezoid(nodes, epsilon)[0], 1e-300))
