"""delta(eps) where few steps matter: the contour integral of a split law, with the rest in closed form.

    delta = (contour integral of prod (A+B)^n - (1 - keep) prod A^n) + far compositions + (calm compositions)

Cutting the far outcomes off frees the tilted law of losses that matter to nobody; taking the calm compositions out
frees the characteristic function of the near-atom of steps without a hit.  See aside.py and README.md of this folder.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxacct.kernels import aside, certificate, saddle, split_certificate
from jaxacct.kernels.aside import Aside, Choice
from jaxacct.kernels.contour import MULTIPLES, Bracketed, depth, departures, period_for, polar, trapezoid
from jaxacct.kernels.law import Law
from jaxacct.kernels.special import log1p
from jaxacct.kernels.split import AWAY, Window, cumulants, frame, rise_and_norm, tilted

CUTS = (8.0, 4096.0, 19)
CANCEL = 9.0
SEARCH = 1.6
"""Rounds move eps by at most this factor."""


class Nodes(NamedTuple):
    """The integrand without its dependence on eps, at t_k = k h, relative to e^{K(c)}."""

    c: jax.Array
    k0: jax.Array
    common: jax.Array  # bound on the error of K(c)
    h: jax.Array
    log_modulus: jax.Array  # (count,)
    angle: jax.Array  # (count,)
    slack: jax.Array  # (count,)
    tail: jax.Array
    images_at: jax.Array
    images_log: jax.Array
    needs: jax.Array
    aside: Aside


class Place(NamedTuple):
    """Where to integrate: windows, abscissa and period, and what the cut-off asks for."""

    window: Window
    c: jax.Array
    period: jax.Array
    images_at: jax.Array  # abscissae for the Chernoff bounds of the images
    count: jax.Array  # nodes needed
    decay: jax.Array  # certified, at the node kept last
    lost: jax.Array  # nats by which the integrand exceeds delta


def _frames(law: Law, window: Window, c, points, frequency=None):
    each = jax.vmap(frame, (0, 0, None, 0, 0, None, None, None))
    return each(law.gauss_sigma, law.gauss_q, law.sign, window.low, window.high, c, points, frequency)


def _option(law: Law, window: Window, epsilon, log_delta, log_tol, points, count):
    """The best contour for one pair of windows."""
    start = jnp.maximum(-log_delta, 1.0) / jnp.maximum(epsilon, 1e-12)
    frames = _frames(law, window, start, points)

    def k(c):
        return cumulants(law, window.keep, frames, c)

    def size(c):
        return k(c)[0] + split_certificate.log_kappa(c)

    scan = start * jnp.geomspace(0.03, 8.0, 9)
    first = scan[jnp.argmin(jax.vmap(size)(scan) - scan * epsilon)]
    point = saddle.search(k, epsilon, first, saddle.REFINEMENTS)
    at = point.c * jnp.array(MULTIPLES)
    sizes = jax.vmap(size)(at)
    c, period = period_for(point.c, at, sizes, epsilon, log_delta, log_tol, CANCEL)
    right = jnp.where(at > c, sizes - at * epsilon - (at - c) * period, jnp.inf)
    images_at = at[jnp.clip(jnp.argmin(right) + jnp.arange(-1, 2), 0, at.size - 1)]
    parts = jax.vmap(tilted, (None, None, 0))(law.sign, c, frames)
    cuts = jnp.ceil(jnp.geomspace(*CUTS))
    t = 2.0 * jnp.pi / period * cuts
    decay = split_certificate.decay(law, window, frames, parts, c, t) + jnp.log(jnp.pi * t)
    lost = k(c)[0] - c * epsilon - log_delta
    enough = decay >= lost - log_tol + 2.0
    needed = jnp.where(jnp.any(enough), cuts[jnp.argmax(enough)], 2.0 * cuts[-1])
    kept = jnp.maximum(jnp.sum(cuts <= jnp.minimum(needed, float(count))), 1) - 1
    needed = jnp.where(jnp.isfinite(period), needed, 2.0 * cuts[-1])
    return Place(window, c, period, images_at, needed, jnp.stack([decay[kept], cuts[kept]]), lost)


def plan(law: Law, epsilon, log_delta, log_tol, points, count):
    """Windows and contour: with the calm compositions or without, whichever needs fewer nodes."""
    choice = aside.choose(law, epsilon, log_delta, log_tol, points)
    keep = jnp.array([1.0, 0.0])
    lows = jnp.stack([jnp.full_like(choice.low, AWAY), choice.low])
    windows = Window(lows, jnp.stack([choice.high, choice.high]), keep)
    options = jax.vmap(lambda w: _option(law, w, epsilon, log_delta, log_tol, points, count))(windows)
    cost = jnp.log(options.count) + jnp.maximum(options.lost - 12.0, 0.0)
    cost = jnp.where(jnp.isfinite(cost), cost, jnp.inf)
    cost = cost.at[1].set(jnp.where(choice.separable, cost[1], jnp.inf))
    return jax.tree.map(lambda x: x[jnp.argmin(cost)], options), choice


def nodes_at(law: Law, place: Place, choice: Choice, points, count):
    """Evaluate the integrand on the contour."""
    c, h, window = place.c, 2.0 * jnp.pi / place.period, place.window
    index = jnp.arange(count)
    t = h * index
    keep = place.decay[1]
    t_max = h * keep
    frames = _frames(law, window, c, points, t_max)
    parts = jax.vmap(tilted, (None, None, 0))(law.sign, c, frames)
    turn = h * law.sign * frames.loss
    n = law.gauss_n
    sums = jax.vmap(lambda w, a: departures(w, a, count))
    calm_re, calm_im = sums(parts.calm, turn)
    jump_re, jump_im = sums(parts.jump, turn)

    bound = jax.vmap(split_certificate.step_errors, (0, 0, None, 0, 0, None, 0, 0, None))
    steps = bound(law.gauss_sigma, law.gauss_q, law.sign, window.low, window.high, c, frames, parts, t_max)
    rounding = jax.vmap(split_certificate.rounding_errors, (0, None, 0, 0, None, None, 0, 0))
    errors, at_c = [], []
    for weight, step in ((parts.calm, steps[:, 0]), (parts.jump, steps[:, 1])):
        rate, most, own = rounding(
            law.gauss_sigma, c, frames, weight, t_max, depth(points, count), window.low, window.high
        ).T
        errors.append(2.0 * step[:, None] + jnp.minimum(rate[:, None] * t, most[:, None]))
        at_c.append(2.0 * step + 2.0 * own)

    odds = parts.log_jump - parts.log_calm
    rise, log_norm = rise_and_norm(law, window.keep, parts.log_calm, parts.log_jump)
    share = jax.nn.sigmoid(odds)
    log_size, turned = polar(calm_re, calm_im)
    # x = (B/A)(z), its log1p, and R(z) = sum n log(1 + x)
    scale = jnp.exp(odds)[:, None] / jnp.maximum((1.0 + calm_re) ** 2 + calm_im**2, 1e-300)
    x_re = scale * ((1.0 + jump_re) * (1.0 + calm_re) + jump_im * calm_im)
    x_im = scale * (jump_im * (1.0 + calm_re) - (1.0 + jump_re) * calm_im)
    added, added_turn = polar(x_re, x_im)
    plain, r, r_turn = n @ log_size - law.mu2 * t**2 / 2.0, n @ added, n @ added_turn
    angle = n @ turned + law.mu2 * t * (c + 0.5)
    # e^R - (1 - keep), relative to e^{max(r, 0)}
    top = jnp.maximum(r, 0.0)
    half = 2.0 * jnp.sin(0.5 * r_turn) ** 2
    re = jnp.where(r > 0, -jnp.expm1(-jnp.abs(r)) - half, jnp.expm1(-jnp.abs(r)) * (1.0 - half) - half)
    re = re + window.keep * jnp.exp(-top)
    im = jnp.exp(r - top) * jnp.sin(r_turn)
    base = rise + log_norm
    size = jnp.log(jnp.maximum(jnp.hypot(re, im), 1e-300))
    log_modulus = plain + top + size - base

    ceilings = jnp.exp(log_size) + errors[0]
    jumps = jnp.hypot(1.0 + jump_re, jump_im) + errors[1]
    ratio = jnp.exp(odds)[:, None] * jumps / ceilings
    most = n @ log1p(ratio)
    gain = -jnp.expm1(-most) + window.keep * jnp.exp(-most)  # (e^R - 1 + keep) / e^R at its largest
    units = 8.0 * certificate.UNIT
    moved = n @ ((errors[0] + units * jnp.hypot(calm_re, calm_im)) / ceilings)
    jumped = n @ (ratio / (1.0 + ratio) * (errors[1] / jumps + units))
    spread = jnp.abs(plain) + jnp.abs(r) + most + 2.0 * (jnp.abs(angle) + jnp.abs(r_turn)) + 30.0
    ceiling = n @ jnp.log(ceilings) - law.mu2 * t**2 / 2.0 + most - base
    slack = jnp.exp(ceiling) * (gain * moved + jumped + gain * units * spread)

    kept = index < keep
    k0 = law.mu2 * c * (c + 1.0) / 2.0 + n @ parts.log_calm + base
    ratio_error = jnp.where(window.keep > 0, n @ (share * at_c[1]), (1.0 + rise) * jnp.sum(at_c[1]))
    common = n @ at_c[0] + ratio_error + units * (jnp.abs(k0) + jnp.abs(n @ parts.log_calm) + rise + 30.0)
    even = _frames(law, window, c, points)
    images_log = jax.vmap(lambda c: split_certificate.chernoff(law, window, even, c))(place.images_at)
    turns = t_max * jnp.max(frames.loss[:, -1] - frames.loss[:, 0]) / (2.0 * jnp.pi)
    reach = (frames.u[:, -1] - frames.u[:, 0]) / (0.11 * jnp.minimum(law.gauss_sigma, 1.0))
    needs = jnp.stack([(turns * place.count / keep + jnp.max(reach)) * 1.05, place.count])
    return Nodes(
        c,
        k0,
        common,
        h,
        jnp.where(kept, log_modulus, -jnp.inf),
        angle + jnp.arctan2(im, re),
        jnp.where(kept, slack, 0.0),
        jnp.exp(-place.decay[0]),
        place.images_at,
        images_log,
        needs,
        aside.aside(law, window, choice, points),
    )


def _value(nodes: Nodes, epsilon):
    """(contour share of delta over Z, its slope, log Z)."""
    value, slope = trapezoid(nodes, epsilon)
    return value, slope, nodes.k0 - nodes.c * epsilon


def estimate(nodes: Nodes, epsilon):
    """(log delta, minus its derivative in eps)."""
    value, slope, log_z = _value(nodes, epsilon)
    z = jnp.exp(log_z)
    far, _, far_slope = aside.far(nodes.aside, epsilon)
    total = jnp.maximum(z * value + far, 1e-300)
    return jnp.log(total), jnp.maximum(z * slope - far_slope, 0.0) / total


def _errors(nodes: Nodes, epsilon):
    """(two-sided error over Z, images in absolute terms)."""
    t = nodes.h * jnp.arange(nodes.angle.size)
    weight = nodes.h / jnp.pi / jnp.sqrt((t**2 + nodes.c**2) * (t**2 + (1.0 + nodes.c) ** 2))
    turned = 8.0 * certificate.UNIT * (t + nodes.c) * jnp.abs(epsilon) * jnp.exp(nodes.log_modulus)
    both = 1.0000001 * jnp.sum(weight * (nodes.slack + turned)) + nodes.tail
    period = 2.0 * jnp.pi / nodes.h
    left = nodes.aside.log_mass - nodes.c * period - jnp.log(-jnp.expm1(-nodes.c * period))
    gap = (nodes.images_at - nodes.c) * period
    beyond = gap > 0
    gap = jnp.where(beyond, gap, 1.0)
    right = nodes.images_log - nodes.images_at * epsilon - gap - jnp.log(-jnp.expm1(-gap))
    return both, jnp.exp(left) + jnp.exp(jnp.min(jnp.where(beyond, right, jnp.inf)))


def ends(nodes: Nodes, epsilon):
    """(log lower, log upper) of delta(eps)."""
    value, _, log_z = _value(nodes, epsilon)
    both, images = _errors(nodes, epsilon)
    far_low, far_high, _ = aside.far(nodes.aside, epsilon)
    z = jnp.exp(log_z)
    up, down = jnp.exp(nodes.common), jnp.exp(-nodes.common)
    high = z * (value + both) * up + far_high + aside.calm(nodes.aside, epsilon)
    low = z * (value * jnp.where(value > 0, down, up) - both * up) - images * up + far_low
    margin = 8.0 * certificate.UNIT * (jnp.abs(log_z) + 4.0)
    low = jnp.where(low > 0, jnp.log(jnp.maximum(low, 1e-300)) - margin, -jnp.inf)
    return low, jnp.log(jnp.maximum(high, 1e-300)) + margin


def _solve(nodes: Nodes, start, log_delta):
    def newton(_, eps):
        value, rate = estimate(nodes, eps)
        rate = jnp.clip(rate, 0.05 / jnp.abs(start), 5.0 * nodes.c + 5.0)
        moved = eps + jnp.clip((value - log_delta) / rate, -0.3 * start, 0.3 * start)
        return jnp.clip(moved, start / SEARCH, start * SEARCH)

    return lax.fori_loop(0, 7, newton, start)


def epsilon(law: Law, log_delta_low, log_delta_high, start, log_tol, points, count, rounds):
    """`inf {eps : delta(eps) <= delta}` for a positive solution, from a starting value."""

    def again(_, carry):
        eps, _ = carry
        nodes = nodes_at(law, *plan(law, eps, log_delta_low, log_tol, points, count), points, count)
        return _solve(nodes, eps, log_delta_low), nodes

    nothing = jax.eval_shape(again, 0, (start, None))[1]
    empty = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), nothing)
    solution, nodes = lax.fori_loop(0, rounds, again, (start, empty))
    value, rate = estimate(nodes, solution)
    low, high = ends(nodes, solution)
    grain = 16.0 * certificate.UNIT * (jnp.abs(nodes.k0) + jnp.abs(log_delta_low) + 4.0)
    rate = jnp.maximum(rate, 1e-3 / solution)
    above = solution + 1.05 * (jnp.maximum(high - log_delta_low, 0.0) + grain) / rate
    below = solution - 1.05 * (jnp.maximum(log_delta_high - low, 0.0) + grain) / rate
    upper_ok = ends(nodes, above)[1] <= log_delta_low
    lower_ok = (below > 0) & (ends(nodes, below)[0] >= log_delta_high)
    lower, upper = jnp.where(lower_ok, below, -jnp.inf), jnp.where(upper_ok, above, jnp.inf)
    return Bracketed(lower, solution, upper, upper_ok & lower_ok, nodes.needs)


def delta(law: Law, eps, start, log_tol, points, count, rounds):
    """log of (lower, estimate, upper) of delta(eps), eps > 0, from a starting value of log delta."""

    def again(_, carry):
        log_delta, _ = carry
        nodes = nodes_at(law, *plan(law, eps, log_delta, log_tol, points, count), points, count)
        return jnp.clip(estimate(nodes, eps)[0], log_delta - 20.0, 0.0), nodes

    nothing = jax.eval_shape(again, 0, (start, None))[1]
    empty = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), nothing)
    middle, nodes = lax.fori_loop(0, rounds, again, (start, empty))
    lower, upper = ends(nodes, eps)
    ok = jnp.isfinite(lower) & jnp.isfinite(upper)
    return Bracketed(lower, jnp.clip(middle, lower, upper), upper, ok, nodes.needs)
