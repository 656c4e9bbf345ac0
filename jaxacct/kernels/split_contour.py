"""delta(eps) where few steps matter: the contour integral of a split law, with the rest in closed form.

    delta = (contour integral of prod (A+B)^n - (1 - keep) prod A^n) + far compositions + (calm compositions)

Cutting the far outcomes off frees the tilted law of losses that matter to nobody; taking the calm compositions out
frees the characteristic function of the near-atom of steps without a hit.  See aside.py and README.md of this folder.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxacct.kernels import aside, certificate, saddle, split_certificate
from jaxacct.kernels.aside import Aside, Choice, Far
from jaxacct.kernels.contour import MULTIPLES, Bracketed, departures, depth, period_for, polar, trapezoid
from jaxacct.kernels.law import Law
from jaxacct.kernels.special import log1p
from jaxacct.kernels.split import AWAY, FULLEST, Window, cumulants, frame, high_blur, rise_and_norm, shares, tilted

CUTS = (8.0, 4096.0, 19)
CANCEL = 9.0
CANCEL_LEAST = 1.5
AFFORDED = 16.0
"""Nats that may be lost to cancellation in all; rounding is some e^-30."""
AXIS = 192
"""Points for placing the contour; no bound depends on them."""
USUAL = -20.0
"""Where log delta starts if nothing is known."""
SEARCH = 2.5
"""Rounds move eps by at most this factor."""


class Wave(NamedTuple):
    """The integrand without its dependence on eps, at t_k = k h, relative to e^{K(c)}; no certificate."""

    c: jax.Array
    k0: jax.Array
    h: jax.Array
    log_modulus: jax.Array  # (count,)
    angle: jax.Array  # (count,)
    far: Far


class Proof(NamedTuple):
    """What the certificate needs besides: errors of the wave, and bounds of what is left aside."""

    common: jax.Array  # bound on the error of K(c)
    slack: jax.Array  # (count,)
    tail: jax.Array
    images_at: jax.Array
    images_log: jax.Array
    aside: Aside
    needs: jax.Array


class Place(NamedTuple):
    """Where to integrate: windows, abscissa and period, and what the cut-off asks for."""

    window: Window
    c: jax.Array
    period: jax.Array
    images_at: jax.Array  # abscissa for the Chernoff bound of the images
    count: jax.Array  # nodes needed
    kept: jax.Array  # nodes kept, as many of those as there are
    lost: jax.Array  # nats by which the integrand exceeds delta


def _frames(law: Law, window: Window, c, points, frequency=None):
    each = jax.vmap(frame, (0, 0, None, 0, 0, None, None, None))
    return each(law.gauss_sigma, law.gauss_q, law.sign, window.low, window.high, c, points, frequency)


def _option(law: Law, window: Window, epsilon, log_delta, log_tol, count):
    """The best contour for one pair of windows."""
    start = jnp.maximum(-log_delta, 1.0) / jnp.maximum(epsilon, 1e-12)
    frames = _frames(law, window, start, AXIS)
    both = shares(frames)

    def k(c):
        return cumulants(law, window.keep, both, c)

    def size(c):
        return k(c)[0] + split_certificate.log_kappa(c)

    _, mean, variance = k(1e-3 * start)
    gap = epsilon - mean
    normal = (gap + jnp.sqrt(gap**2 + 4.0 * variance)) / (2.0 * variance)  # where many steps make it normal
    scan = jnp.append(start * jnp.geomspace(0.04, 6.0, 7), jnp.clip(normal, 1e-3 * start, 1e4 * start))
    first = scan[jnp.argmin(jax.vmap(size)(scan) - scan * epsilon)]
    point = saddle.search(k, epsilon, first, saddle.REFINEMENTS)
    at = point.c * jnp.array(MULTIPLES)
    sizes = jax.vmap(size)(at)
    least = jnp.min(sizes - at * epsilon) - log_delta  # lost to cancellation even at the saddle point
    allowed = jnp.clip(AFFORDED - least, CANCEL_LEAST, CANCEL)
    c, period = period_for(point.c, at, sizes, epsilon, log_delta, log_tol, allowed)
    right = jnp.where(at > c, sizes - at * epsilon - (at - c) * period, jnp.inf)
    images_at = at[jnp.argmin(right)]
    parts = jax.vmap(tilted, (None, None, 0))(law.sign, c, frames)
    cuts = jnp.ceil(jnp.geomspace(*CUTS))
    t = 2.0 * jnp.pi / period * cuts
    decay = split_certificate.decay(law, window, frames, parts, c, t) + jnp.log(jnp.pi * (t - 0.5 * t / cuts))
    lost = k(c)[0] - c * epsilon - log_delta
    enough = decay >= lost - log_tol + 2.0
    needed = jnp.where(jnp.any(enough), cuts[jnp.argmax(enough)], 2.0 * cuts[-1])
    kept = jnp.maximum(jnp.sum(cuts <= jnp.minimum(needed, float(count))), 1) - 1
    needed = jnp.where(jnp.isfinite(period), needed, 2.0 * cuts[-1])
    return Place(window, c, period, images_at, needed, cuts[kept], lost)


def plan(law: Law, epsilon, log_delta, log_tol, count):
    """Windows and contour: with the calm compositions or without, whichever needs fewer nodes."""
    choice = aside.choose(law, epsilon, log_delta, log_tol)
    keep = jnp.array([1.0, 0.0])
    lows = jnp.stack([jnp.full_like(choice.low, AWAY), choice.low])
    windows = Window(lows, jnp.stack([choice.high, choice.high]), keep)
    options = jax.vmap(lambda w: _option(law, w, epsilon, log_delta, log_tol, count))(windows)
    cost = jnp.log(options.count) + jnp.maximum(options.lost - 12.0, 0.0)
    cost = jnp.where(jnp.isfinite(cost), cost, jnp.inf)
    cost = cost.at[1].set(jnp.where(choice.separable, cost[1], jnp.inf))
    return jax.tree.map(lambda x: x[jnp.argmin(cost)], options), choice


def _sums(law: Law, place: Place, points, count):
    """The grid that follows t up to the last node kept, and both parts' departures from one at every node."""
    h = 2.0 * jnp.pi / place.period
    frames = _frames(law, place.window, place.c, points, h * place.kept)
    parts = jax.vmap(tilted, (None, None, 0))(law.sign, place.c, frames)
    sums = jax.vmap(lambda w, a: departures(w, a, count))
    turn = h * law.sign * frames.loss
    return frames, parts, sums(parts.calm, turn), sums(parts.jump, turn)


def _ratio(odds, calm, jump):
    """`(B/A)(z)` from the departures."""
    scale = jnp.exp(odds)[:, None] / jnp.maximum((1.0 + calm[0]) ** 2 + calm[1] ** 2, 1e-300)
    re = scale * ((1.0 + jump[0]) * (1.0 + calm[0]) + jump[1] * calm[1])
    return re, scale * (jump[1] * (1.0 + calm[0]) - (1.0 + jump[0]) * calm[1])


class _Logs(NamedTuple):
    """Logarithms of `prod A^n` and of `prod (1 + B/A)^n` along the contour, moduli and angles."""

    plain: jax.Array
    plain_turn: jax.Array
    rise: jax.Array
    rise_turn: jax.Array


def _logs(law: Law, place: Place, parts, calm, jump, t):
    log_size, turned = polar(*calm)
    added, added_turn = polar(*_ratio(parts.log_jump - parts.log_calm, calm, jump))
    n = law.gauss_n
    plain = n @ log_size - law.mu2 * t**2 / 2.0
    return _Logs(plain, n @ turned + law.mu2 * t * (place.c + 0.5), n @ added, n @ added_turn)


def wave_at(law: Law, place: Place, points, count):
    """Evaluate the integrand; returns the wave and what its certificate is made from."""
    h = 2.0 * jnp.pi / place.period
    t = h * jnp.arange(count)
    frames, parts, calm, jump = _sums(law, place, points, count)
    logs = _logs(law, place, parts, calm, jump, t)
    keep = place.window.keep
    rise, log_norm = rise_and_norm(law, keep, parts.log_calm, parts.log_jump)
    # e^R - (1 - keep), relative to e^{max(r, 0)}
    r, top = logs.rise, jnp.maximum(logs.rise, 0.0)
    half = 2.0 * jnp.sin(0.5 * logs.rise_turn) ** 2
    less = jnp.expm1(-jnp.abs(r))
    re = jnp.where(r > 0, -less - half, less * (1.0 - half) - half) + keep * jnp.exp(-top)
    im = jnp.exp(r - top) * jnp.sin(logs.rise_turn)
    base = rise + log_norm
    log_modulus = logs.plain + top - base + jnp.log(jnp.maximum(jnp.hypot(re, im), 1e-300))
    log_modulus = jnp.where(jnp.arange(count) < place.kept, log_modulus, -jnp.inf)
    k0 = law.mu2 * place.c * (place.c + 1.0) / 2.0 + law.gauss_n @ parts.log_calm + base
    far = aside.far_masses(law, place.window.high)
    wave = Wave(place.c, k0, h, log_modulus, logs.plain_turn + jnp.arctan2(im, re), far)
    return wave, (frames, parts, calm, jump)


def needed(law: Law, place: Place, frames):
    """(points, nodes) on which the contour could be followed to the end."""
    turns = place.count * jnp.max(frames.loss[:, -1] - frames.loss[:, 0]) / place.period
    reach = (frames.u[:, -1] - frames.u[:, 0]) / (1.1 * high_blur(law.gauss_sigma))
    return jnp.stack([jnp.maximum(1.05 * (turns + jnp.max(reach)), 1.02 * turns / FULLEST), place.count])


class _Axis(NamedTuple):
    """An even grid at the contour's abscissa, its parts and their errors, and Chernoff bounds on the real axis."""

    even: Any
    parts: Any
    errors: jax.Array
    images_log: jax.Array
    calm_at: jax.Array
    calm_log: jax.Array


def _on_the_axis(law: Law, place: Place, choice: Choice, points) -> _Axis:
    """Bound the images and the calm compositions; all grids go through one trace of the error bound."""
    window = place.window
    calm, calm_at = aside.calm_frames(law, choice, points)
    even = _frames(law, window, place.c, points)
    kinds = jnp.array([0, 0] + [1] * calm_at.size)
    grids = jax.tree.map(lambda *x: jnp.stack(x)[kinds], even, calm)
    lows = jnp.stack([window.low, choice.low])[kinds]

    def one(grid, c, low):
        parts = jax.vmap(tilted, (None, None, 0))(law.sign, c, grid)
        bound = jax.vmap(split_certificate.axis_errors, (0, 0, None, 0, 0, None, 0, 0))
        return parts, bound(law.gauss_sigma, law.gauss_q, law.sign, low, window.high, c, grid, parts)

    at = jnp.concatenate([place.c[None], place.images_at[None], calm_at])
    parts, errors = jax.vmap(one)(grids, at, lows)
    own, image = (jax.tree.map(lambda x, i=i: x[i], parts) for i in range(2))
    images = split_certificate.chernoff(law, window.keep, image, errors[1], place.images_at)
    leaps = jax.tree.map(lambda x: x[2:], parts)
    calm_log = jax.vmap(split_certificate.calm_chernoff, (None, 0, 0, 0))(law, leaps, errors[2:], calm_at)
    return _Axis(even, own, errors[0], images, calm_at, calm_log)


def proof(law: Law, place: Place, choice: Choice, wave: Wave, made_from, points) -> Proof:
    """Bound every error of a wave."""
    frames, parts, calm, jump = made_from
    window, c, n, count = place.window, place.c, law.gauss_n, wave.angle.size
    t, t_max = wave.h * jnp.arange(count), wave.h * place.kept
    logs = _logs(law, place, parts, calm, jump, t)
    axis = _on_the_axis(law, place, choice, points)
    bound = jax.vmap(split_certificate.step_errors, (0, 0, None, 0, 0, None, 0, 0, None))
    sides = (law.gauss_sigma, law.gauss_q, law.sign, window.low, window.high)
    steps = bound(*sides, c, frames, parts, t_max)
    rounding = jax.vmap(split_certificate.rounding_errors, (0, None, 0, 0, None, None, 0, 0, None))
    errors, at_c = [], []
    for weight, step, side in ((parts.calm, steps[:, 0], 1.0), (parts.jump, steps[:, 1], -1.0)):
        rate, most, own = rounding(
            law.gauss_sigma, c, frames, weight, t_max, depth(points, count), window.low, window.high, side
        ).T
        errors.append(2.0 * step[:, None] + jnp.minimum(rate[:, None] * t, most[:, None]))
        at_c.append(2.0 * step + 2.0 * own)

    odds = parts.log_jump - parts.log_calm
    rise, log_norm = rise_and_norm(law, window.keep, parts.log_calm, parts.log_jump)
    base, share = rise + log_norm, jax.nn.sigmoid(odds)
    ceilings = jnp.hypot(1.0 + calm[0], calm[1]) + errors[0]
    jumps = jnp.hypot(1.0 + jump[0], jump[1]) + errors[1]
    ratio = jnp.exp(odds)[:, None] * jumps / ceilings
    most = n @ log1p(ratio)
    gain = -jnp.expm1(-most) + window.keep * jnp.exp(-most)  # (e^R - 1 + keep) / e^R at its largest
    units = 8.0 * certificate.UNIT
    moved = n @ ((errors[0] + units * jnp.hypot(*calm)) / ceilings)
    jumped = n @ (ratio / (1.0 + ratio) * (errors[1] / jumps + units))
    angles = jnp.abs(logs.plain_turn) + jnp.abs(logs.rise_turn)
    spread = jnp.abs(logs.plain) + jnp.abs(logs.rise) + most + 2.0 * angles + 30.0
    ceiling = n @ jnp.log(ceilings) - law.mu2 * t**2 / 2.0 + most - base
    slack = jnp.exp(ceiling) * (gain * (moved + units * spread) + jumped)
    slack = jnp.where(jnp.isfinite(wave.log_modulus), slack, 0.0)

    jump_error = jnp.sum(jnp.where(n > 0, at_c[1], 0.0))
    ratio_error = jnp.where(window.keep > 0, n @ (share * at_c[1]), (1.0 + rise) * jump_error)
    size = jnp.abs(wave.k0) + jnp.abs(n @ parts.log_calm) + rise + 30.0
    common = n @ at_c[0] + ratio_error + units * size
    left_aside = aside.bounds(law, window, choice, wave.far, axis.calm_at, axis.calm_log, points)
    # the plan's decay comes from a coarse grid without a bound of its error
    beyond = split_certificate.decay_beyond(law, window, axis.even, axis.parts, axis.errors, c, wave.k0, t_max)
    beyond = beyond + jnp.log(jnp.pi * (t_max - 0.5 * wave.h))
    needs = needed(law, place, frames)
    return Proof(common, slack, jnp.exp(-beyond), place.images_at, axis.images_log, left_aside, needs)


def estimate(wave: Wave, epsilon):
    """(log delta, minus its derivative in eps)."""
    value, slope = trapezoid(wave, epsilon)
    z = jnp.exp(wave.k0 - wave.c * epsilon)
    far, far_slope = aside.far(wave.far, epsilon)
    total = jnp.maximum(z * value + far, 1e-300)
    return jnp.log(total), jnp.maximum(z * slope - far_slope, 0.0) / total


def _errors(wave: Wave, proof: Proof, epsilon):
    """(two-sided error over Z, images in absolute terms)."""
    t = wave.h * jnp.arange(wave.angle.size)
    weight = wave.h / jnp.pi / jnp.sqrt((t**2 + wave.c**2) * (t**2 + (1.0 + wave.c) ** 2))
    turned = 8.0 * certificate.UNIT * (t + wave.c) * jnp.abs(epsilon) * jnp.exp(wave.log_modulus)
    both = 1.0000001 * jnp.sum(weight * (proof.slack + turned)) + proof.tail
    period = 2.0 * jnp.pi / wave.h
    left = proof.aside.log_mass - wave.c * period - jnp.log(-jnp.expm1(-wave.c * period))
    gap = (proof.images_at - wave.c) * period
    right = proof.images_log - proof.images_at * epsilon - gap - jnp.log(-jnp.expm1(-jnp.where(gap > 0, gap, 1.0)))
    return both, jnp.exp(left) + jnp.exp(jnp.where(gap > 0, right, jnp.inf))


def ends(wave: Wave, proof: Proof, epsilon):
    """(log lower, log upper) of delta(eps)."""
    value, _ = trapezoid(wave, epsilon)
    both, images = _errors(wave, proof, epsilon)
    far, _ = aside.far(wave.far, epsilon)
    log_z = wave.k0 - wave.c * epsilon
    z, up, down = jnp.exp(log_z), jnp.exp(proof.common), jnp.exp(-proof.common)
    high = z * (value + both) * up + aside.far_above(proof.aside, epsilon) + aside.calm(proof.aside, epsilon)
    low = z * (value * jnp.where(value > 0, down, up) - both * up) - images * up + far
    margin = 8.0 * certificate.UNIT * (jnp.abs(log_z) + 4.0)
    low = jnp.where(low > 0, jnp.log(jnp.maximum(low, 1e-300)) - margin, -jnp.inf)
    return low, jnp.log(jnp.maximum(high, 1e-300)) + margin


def _solve(wave: Wave, start, log_delta):
    def newton(_, eps):
        value, rate = estimate(wave, eps)
        rate = jnp.clip(rate, 0.05 / start, 5.0 * wave.c + 5.0)
        moved = eps + jnp.clip((value - log_delta) / rate, -0.4 * start, 0.4 * start)
        return jnp.clip(moved, start / SEARCH, start * SEARCH)

    return lax.fori_loop(0, 7, newton, start)


def _rounds(law: Law, follow, start, plan_at, points, count, rounds):
    """Place the contour and follow it to the next value, again and again; the last placement is returned."""

    def again(_, carry):
        place, choice = plan_at(carry[0])
        wave, made_from = wave_at(law, place, points, count)
        return follow(carry[0], wave), place, choice, wave, made_from

    shapes = jax.eval_shape(again, 0, (start,))[1:]
    empty = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    return lax.fori_loop(0, rounds, again, (start, *empty))


def _first(law: Law, log_delta, log_tol):
    """The saddle point approximation of eps when far outcomes are cut off by their mass alone."""
    high = jnp.where(law.sign > 0, aside.far_by_mass(law, log_delta + log_tol), AWAY)
    away = jnp.full_like(high, AWAY)
    both = shares(_frames(law, Window(away, high, jnp.ones_like(log_delta)), 1.0, AXIS))
    return saddle.for_delta_of(lambda c: cumulants(law, 1.0, both, c), log_delta).epsilon


def epsilon(law: Law, log_delta_low, log_delta_high, start, log_tol, points, count, rounds):
    """`inf {eps : delta(eps) <= delta}` for a positive solution.

    start: a starting value and the factor by which the saddle point approximation may be off before the value is
    disbelieved (inf: never; 0: there is none).
    """
    guess = jnp.clip(_first(law, log_delta_low, log_tol), 1e-12, 1e9)
    value, trust = start
    likely = (value * trust > guess) & ((value < guess * trust) | (guess < 1e-11))
    start = jnp.where(likely, value, guess)
    rounds = jnp.where(jnp.isinf(trust), 1, rounds)  # a value never disbelieved is one already solved for
    solution, place, choice, wave, made_from = _rounds(
        law,
        lambda eps, wave: _solve(wave, eps, log_delta_low),
        start,
        lambda eps: plan(law, eps, log_delta_low, log_tol, count),
        points,
        count,
        rounds,
    )
    shown = proof(law, place, choice, wave, made_from, points)
    _, rate = estimate(wave, solution)
    low, high = ends(wave, shown, solution)
    grain = 16.0 * certificate.UNIT * (jnp.abs(wave.k0) + jnp.abs(log_delta_low) + 4.0)
    rate = jnp.maximum(rate, 1e-3 / solution)
    above = solution + 1.05 * (jnp.maximum(high - log_delta_low, 0.0) + grain) / rate
    below = solution - 1.05 * (jnp.maximum(log_delta_high - low, 0.0) + grain) / rate
    upper_ok = ends(wave, shown, above)[1] <= log_delta_low
    lower_ok = (below > 0) & (ends(wave, shown, below)[0] >= log_delta_high)
    lower, upper = jnp.where(lower_ok, below, -jnp.inf), jnp.where(upper_ok, above, jnp.inf)
    return Bracketed(lower, solution, upper, upper_ok & lower_ok, shown.needs)


def delta(law: Law, eps, start, log_tol, points, count, rounds):
    """log of (lower, estimate, upper) of delta(eps), eps > 0; `start` as for epsilon, believed if never disbelieved."""
    begin = jnp.where(jnp.isinf(start[1]), start[0], USUAL)
    middle, place, choice, wave, made_from = _rounds(
        law,
        lambda log_delta, wave: jnp.clip(estimate(wave, eps)[0], log_delta - 20.0, 0.0),
        begin,
        lambda log_delta: plan(law, eps, log_delta, log_tol, count),
        points,
        count,
        rounds,
    )
    shown = proof(law, place, choice, wave, made_from, points)
    lower, upper = ends(wave, shown, eps)
    ok = jnp.isfinite(lower) & jnp.isfinite(upper)
    return Bracketed(lower, jnp.clip(middle, lower, upper), upper, ok, shown.needs)
