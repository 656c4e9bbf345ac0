"""The split contour: delta(eps) where few steps sample the record (kernels/README.md, section 6, has a glossary)."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np

from jaxacct.core.floats import ROUNDOFF
from jaxacct.kernels.arrays import Array, iterate, log1p, logistic, namespace, pick, repeat, stack, sum_depth
from jaxacct.kernels.contour import core, gaussian_errors, split_parts, split_remainder
from jaxacct.kernels.contour.core import Bracketed
from jaxacct.kernels.contour.split_parts import (
    Grid,
    Steps,
    TiltedParts,
    Windows,
    composed,
    high_blur,
    low_blur,
    steps_of,
)
from jaxacct.kernels.contour.split_remainder import FarMasses, Remainder
from jaxacct.kernels.law import REFINEMENT_STEPS, LossLaw, saddle_point

LARGEST_CANCELLATION = 9.0
"""Nats by which moving the abscissa may enlarge the integrand; fewer if terms cancel at the saddle point already."""
SPARE_NATS = 2.0
"""Terms that are cut off lie this many nats below the tolerance, since their decay is estimated on a coarse grid."""
PLACEMENT_POINTS = 128
"""Number of quadrature points for placing the contour."""
SCAN = np.geomspace(0.04, 6.0, 7)
"""Abscissae at which the search for the saddle point may start, in units of log(1/delta) divided by `scale_of`."""
CUTS = np.ceil(np.geomspace(8.0, 4096.0, 19))
"""Numbers of contour nodes that are tried. Each is about sqrt(2) times the one before."""


class Contour(NamedTuple):
    """Windows, abscissa and period of the integral, and the number of nodes that the cut-off asks for."""

    windows: Windows
    c: Array  # abscissa
    period: Array  # 2 pi/(spacing of the nodes in t)
    images_at: Array  # abscissa for the Chernoff bound of the images
    nodes_needed: Array  # number of nodes after which the terms are negligible
    nodes_kept: Array  # the smaller of `nodes_needed` and the program's number of nodes
    cancellation: Array  # nats by which the integrand at t = 0 exceeds delta


class Placement(NamedTuple):
    """A contour, and the choice of windows that it belongs to. A certificate is computed from both."""

    contour: Contour
    choice: split_remainder.WindowChoice


def grids_of(law: LossLaw, windows: Windows, c: Array, points: int, frequency: Array | None = None) -> Grid:
    """Return grids in u of J sampled Gaussians: evenly spaced, or fine enough for e^{it loss} up to t = `frequency`."""
    turns = None if frequency is None else frequency[..., None]
    return split_parts.grid(steps_of(law, windows.low, windows.high), c[..., None], points, turns)


def _contours(law: LossLaw, windows: Windows, epsilon: Array, log_delta: Array, log_tol: Array, count: int) -> Contour:
    """Return a contour for each of two choices in `windows` (first axis): with bulk compositions, and without them."""
    xp = namespace(law.gauss_n, windows.low, epsilon)
    start = xp.maximum(-log_delta, 1.0) / split_remainder.scale_of(law, epsilon)
    start = xp.broadcast_to(start, windows.low.shape[:-1])
    grids = grids_of(law, windows, start, PLACEMENT_POINTS)
    both = split_parts.shares(grids)

    def k(c: Array) -> tuple[Array, Array, Array]:
        return split_parts.cumulants(law, windows.keep_bulk, both, c)

    def size(c: Array) -> Array:
        return split_parts.log_size(law, windows.keep_bulk, both, c) + core.log_kappa(c)

    _, mean, variance = k(1e-3 * start)
    gap = epsilon - mean
    # if the loss were normal with this mean and variance, its saddle point would be `normal`
    normal = (gap + xp.sqrt(gap**2 + 4.0 * variance)) / (2.0 * variance)
    scan = xp.stack([f * start for f in SCAN] + [xp.clip(normal, 1e-3 * start, 1e4 * start)])
    first = _pick_in_front(scan, xp.argmin(size(scan) - scan * epsilon, axis=0))
    point = saddle_point(k, "epsilon", epsilon, first, REFINEMENT_STEPS, down=3.0, up=3.0)
    at = xp.stack([f * point.c for f in core.ABSCISSA_MULTIPLES])
    sizes = size(at)
    # At the best abscissa the integrand exceeds delta by `least` nats, so cancellation loses `least` nats of accuracy.
    least = xp.min(sizes - at * epsilon, axis=0) - log_delta
    # Rounding errors are about e^-30 of the largest term. So a cancellation of 16 nats leaves an accuracy of e^-14.
    # A cancellation of `least` + 1.5 nats is always allowed, since a lower limit would leave hardly any abscissa.
    allowed = xp.clip(16.0 - least, 1.5, LARGEST_CANCELLATION)
    tried, bound = (xp.moveaxis(x, 0, -1) for x in (at, sizes))
    c, period = core.period_for(point.c, tried, bound, epsilon, log_delta, log_tol, allowed[..., None])
    right = xp.where(at > c, sizes - at * epsilon - (at - c) * period, xp.inf)
    images_at = _pick_in_front(at, xp.argmin(right, axis=0))
    parts = split_parts.tilted(law.sign[..., None], c[..., None], grids)
    cuts = CUTS.reshape(-1, *[1] * c.ndim)
    t = 2.0 * xp.pi / period * cuts
    decay = split_parts.decay_of_both(law, windows, grids, parts, c, t) + xp.log(xp.pi * (t - 0.5 * t / cuts))
    lost = split_parts.log_size(law, windows.keep_bulk, both, c) - c * epsilon - log_delta
    enough = decay >= lost - log_tol + SPARE_NATS
    cuts = xp.asarray(CUTS)
    needed = xp.where(xp.any(enough, axis=0), cuts[xp.argmax(enough, axis=0)], 2.0 * cuts[-1])
    kept = xp.sum(cuts <= xp.minimum(needed, float(count))[..., None], axis=-1)
    needed = xp.where(xp.isfinite(period), needed, 2.0 * cuts[-1])
    return Contour(windows, c, period, images_at, needed, cuts[xp.maximum(kept, 1) - 1], lost)


def _pick_in_front(x: Array, index: Array) -> Array:
    """Return the entry of x at `index` along the first axis of x."""
    xp = namespace(x)
    return pick(xp, xp.moveaxis(x, 0, -1), index)


def place(law: LossLaw, epsilon: Array, log_delta: Array, log_tol: Array, count: int) -> Placement:
    """Place windows and contour. The contour leaves out bulk compositions where this saves nodes."""
    xp = namespace(law.gauss_n, epsilon)
    choice = split_remainder.choose(law, epsilon, log_delta, log_tol)
    low, high, one = choice.low, choice.high, xp.ones_like(choice.bulk_at)
    windows = Windows(
        xp.stack([xp.full_like(low, split_parts.NO_WINDOW), low]),
        xp.stack([high, high]),
        xp.stack([one, xp.zeros_like(one)]),
    )
    options = _contours(law, windows, epsilon, log_delta, log_tol, count)
    cost = xp.log(options.nodes_needed) + xp.maximum(options.cancellation - 12.0, 0.0)
    cost = xp.where(xp.isfinite(cost), cost, xp.inf)
    without = choice.separable & (cost[1] < cost[0])

    def chosen(x: Array) -> Array:
        return xp.where(xp.reshape(without, without.shape + (1,) * (x.ndim - 1 - without.ndim)), x[1], x[0])

    return Placement(jax.tree.map(chosen, options), choice)


class Integrand(NamedTuple):
    """The integrand at z_k = c + i t_k, t_k = k h, without its factor e^{-z eps} and divided by e^{K(c)}."""

    c: Array
    k0: Array  # K(c)
    h: Array
    t: Array  # (count,) t_k, the imaginary part of z_k
    weight: tuple[Array, Array]  # (count,) real and imaginary part of h / (pi z (z + 1)), halved at t = 0
    log_modulus: Array  # (count,) Re K(z_k) - K(c); -inf at nodes that are cut off
    angle: Array  # (count,) Im K(z_k)
    far: FarMasses  # probabilities that the outcome of some step is in the far tail


class Quadrature(NamedTuple):
    """Grids in u, and the moment generating functions A of the bulk and B of the jumps that are computed on them."""

    grids: Grid
    parts: TiltedParts  # bulk and jumps under the tilt c
    bulk: tuple[Array, Array]  # real and imaginary parts of A(z_k)/A(c) - 1, (J, count) each
    jump: tuple[Array, Array]  # real and imaginary parts of B(z_k)/B(c) - 1, (J, count) each


def _quadrature(law: LossLaw, contour: Contour, points: int, count: int) -> Quadrature:
    """Compute A(z)/A(c) - 1 and B(z)/B(c) - 1 at all nodes, on grids in u that resolve e^{it loss} up to the last t."""
    xp = namespace(law.gauss_n, contour.period)
    h = 2.0 * xp.pi / contour.period
    grids = grids_of(law, contour.windows, contour.c, points, h * contour.nodes_kept)
    parts = split_parts.tilted(law.sign[..., None], contour.c[..., None], grids)
    turn = (h * law.sign)[..., None, None] * grids.loss
    re, im = core.departures(xp.stack([parts.bulk, parts.jump]), turn, count)
    return Quadrature(grids, parts, (re[0], im[0]), (re[1], im[1]))


def _ratio(odds: Array, bulk: tuple[Array, Array], jump: tuple[Array, Array]) -> tuple[Array, Array]:
    """Return B(z_k)/A(z_k), given odds = log(B(c)/A(c)), bulk = A(z_k)/A(c) - 1 and jump = B(z_k)/B(c) - 1."""
    xp = namespace(odds, bulk[0])
    whole = 1.0 + bulk[0], 1.0 + jump[0]
    scale = xp.exp(odds)[..., None] / xp.maximum(whole[0] ** 2 + bulk[1] ** 2, 1e-300)
    re = scale * (whole[1] * whole[0] + jump[1] * bulk[1])
    return re, scale * (jump[1] * whole[0] - whole[1] * bulk[1])


class Logs(NamedTuple):
    """Logs, (count,), of F = `prod (A(z)/A(c))^n` times unsampled Gaussians' factors, and of G = `prod (1 + B/A)^n`."""

    plain: Array  # log |F|
    plain_turn: Array  # arg F
    rise: Array  # log |G|
    rise_turn: Array  # arg G
    turned: Array  # sum of the magnitudes of all terms of arg F and arg G (the terms may cancel)


def logs_of(
    law: LossLaw, contour: Contour, parts: TiltedParts, bulk: tuple[Array, Array], jump: tuple[Array, Array], t: Array
) -> Logs:
    """Compute `Logs` at the nodes z = c + it from bulk = A(z)/A(c) - 1 and jump = B(z)/B(c) - 1."""
    xp = namespace(law.gauss_n, t)
    log_size, turned = core.polar(*bulk)
    added, added_turn = core.polar(*_ratio(parts.log_jump - parts.log_bulk, bulk, jump))
    n, mu2 = law.gauss_n, law.mu2[..., None]
    plain = composed(n, log_size) - mu2 * t**2 / 2.0
    pure = mu2 * t * (contour.c + 0.5)[..., None]
    sizes = xp.abs(pure) + composed(n, xp.abs(turned) + xp.abs(added_turn))
    return Logs(plain, composed(n, turned) + pure, composed(n, added), composed(n, added_turn), sizes)


def integrand_at(law: LossLaw, contour: Contour, points: int, count: int) -> tuple[Integrand, Quadrature]:
    """Evaluate the integrand at `count` nodes of the contour, by quadratures in u with `points` points each."""
    xp = namespace(law.gauss_n, contour.c)
    h, index = 2.0 * xp.pi / contour.period, xp.arange(count)
    t = h[..., None] * index
    made_from = _quadrature(law, contour, points, count)
    parts = made_from.parts
    logs = logs_of(law, contour, parts, made_from.bulk, made_from.jump, t)
    keep_bulk = contour.windows.keep_bulk
    rise, log_norm = split_parts.rise_and_norm(law, keep_bulk, parts.log_bulk, parts.log_jump)
    # re + i im = (e^R - (1 - keep_bulk))/e^{max(r, 0)}, with R = log prod (1 + B/A)^n and r = Re R
    r, top = logs.rise, xp.maximum(logs.rise, 0.0)
    half = 2.0 * xp.sin(0.5 * logs.rise_turn) ** 2
    less = xp.expm1(-xp.abs(r))
    re = xp.where(r > 0, -less - half, less * (1.0 - half) - half) + keep_bulk[..., None] * xp.exp(-top)
    im = xp.exp(r - top) * xp.sin(logs.rise_turn)
    base = rise + log_norm
    log_modulus = logs.plain + top - base[..., None] + xp.log(xp.maximum(xp.hypot(re, im), 1e-300))
    log_modulus = xp.where(index < contour.nodes_kept[..., None], log_modulus, -xp.inf)
    bulk = xp.sum(law.gauss_n * parts.log_bulk, axis=-1)
    k0 = law.mu2 * contour.c * (contour.c + 1.0) / 2.0 + bulk + base
    far = split_remainder.far_masses(law, contour.windows.high)
    angle = logs.plain_turn + xp.arctan2(im, re)
    return Integrand(contour.c, k0, h, t, core.weight_at(contour.c, h, t), log_modulus, angle, far), made_from


def needed(law: LossLaw, contour: Contour, grids: Grid) -> Array:
    """Estimate how many quadrature points and how many contour nodes would make the certificate narrow, (2,)."""
    xp = namespace(law.gauss_n, grids.u)
    rise = xp.max(grids.loss[..., -1] - grids.loss[..., 0], axis=-1)
    turns = contour.nodes_needed * rise / contour.period
    reach = xp.max((grids.u[..., -1] - grids.u[..., 0]) / (1.1 * high_blur(law.gauss_sigma)), axis=-1)
    points = xp.maximum(1.05 * (turns + reach), 1.02 * turns / split_parts.LARGEST_TURN_SHARE)
    return stack(xp, [points, contour.nodes_needed])


def estimate(integrand: Integrand, epsilon: Array) -> tuple[Array, Array]:
    """Return estimates of log delta and of minus the derivative of log delta in eps."""
    xp = namespace(integrand.k0, epsilon)
    value, slope = core.trapezoid(integrand, epsilon)
    z = xp.exp(integrand.k0 - integrand.c * epsilon)
    far, far_slope = split_remainder.far(integrand.far, epsilon)
    total = xp.maximum(z * value + far, 1e-300)
    return xp.log(total), xp.maximum(z * slope - far_slope, 0.0) / total


LEAST_LOG_SCALE = -690.0
"""Smallest logarithm of Z = e^{K(c) - c eps} that is exponentiated: e^-690 is still a normal number."""
BELIEVED = 1e6
"""Value of `Start.trust` for a starting value that a program with fewer nodes has found but not certified."""
LARGEST_MOVE = 2.5
"""Largest factor by which eps moves on one contour, whose brackets are narrow only near the eps it was placed for."""
LEAST_EPSILON, LARGEST_EPSILON = 1e-12, 1e9
"""Smallest and largest eps at which the search for eps may start, if it starts at the saddle point approximation."""
MARGIN = 1.05
"""Tried bounds of eps: estimate -+ MARGIN * (error of log delta)/|its slope|. MARGIN > 1, since the slope varies."""


class Start(NamedTuple):
    """A starting value of eps or of log delta, and how far it is trusted."""

    value: Array  # eps, used within a factor `trust` of the saddle point's eps; or log delta, used if trust >= BELIEVED
    trust: Array  # 0 where there is no value, inf where the value is the solution already


def _solve(integrand: Integrand, start: Array, log_delta: Array) -> Array:
    xp = namespace(integrand.t, start)

    def newton(_: Array, eps: Array) -> Array:
        value, rate = estimate(integrand, eps)
        rate = xp.clip(rate, 0.05 / start, 5.0 * integrand.c + 5.0)
        moved = eps + xp.clip((value - log_delta) / rate, -0.4 * start, 0.4 * start)
        return xp.clip(moved, start / LARGEST_MOVE, start * LARGEST_MOVE)

    return repeat(xp, 7, newton, start)  # seven steps suffice, since the start is at most a factor of LARGEST_MOVE away


class _Round(NamedTuple):
    """The state of the search after a round, and the contour of that round."""

    count: Array  # number of rounds done
    value: Array  # latest value of eps or of log delta
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
    """Place the contour at the latest value and find the next value on it, `rounds` times; return the last round."""
    xp = namespace(law.gauss_n, start)

    def again(count_of: Array, value: Array) -> _Round:
        placed = place_at(value)
        integrand, made_from = integrand_at(law, placed.contour, points, count)
        return _Round(count_of + 1, follow(value, integrand), placed, integrand, made_from)

    none = xp.zeros(start.shape, int)
    if xp is np:
        first = again(none, start)
    else:  # the first round also runs in the loop, so that the compiled program has `again` only once
        shapes = jax.eval_shape(again, none, start)
        first = jax.tree.map(lambda x: xp.zeros(x.shape, x.dtype), shapes)._replace(value=start)
    return iterate(xp, lambda carry: carry.count < rounds, lambda carry: again(*carry[:2]), first)


def _first(law: LossLaw, log_delta: Array, log_tol: Array) -> Array:
    """Return the saddle point approximation of eps. For remove, outcomes that are too rare to matter are left out."""
    xp = namespace(law.gauss_n, log_delta)
    one = xp.ones_like(law.sign)
    high = xp.where(
        law.sign[..., None] > 0, split_remainder.far_by_mass(law, log_delta + log_tol), split_parts.NO_WINDOW
    )
    both = split_parts.shares(
        grids_of(law, Windows(xp.full_like(high, split_parts.NO_WINDOW), high, one), one, PLACEMENT_POINTS)
    )
    return saddle_point(lambda c: split_parts.cumulants(law, one, both, c), "log_delta", log_delta, down=16.0).epsilon


def _together(law: LossLaw, *values: Array) -> list[Array]:
    """Broadcast the values to all batch axes of the law."""
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
    """Bracket a positive eps = `inf {eps : delta(eps) <= delta}`, given a lower and an upper bound of log delta."""
    xp = namespace(law.gauss_n, log_delta_low)
    log_delta_low, log_delta_high, log_tol, *known = _together(law, log_delta_low, log_delta_high, log_tol, *start)
    value, trust = known
    guess = xp.clip(_first(law, log_delta_low, log_tol), LEAST_EPSILON, LARGEST_EPSILON)
    # A guess below 1e-11 may come from the clip at LEAST_EPSILON. Such a guess does not rule out a larger `value`.
    likely = (value * trust > guess) & ((value < guess * trust) | (guess < 1e-11))
    found = _rounds(
        law,
        lambda eps, integrand: _solve(integrand, eps, log_delta_low),
        xp.where(likely, value, guess),
        lambda eps: place(law, eps, log_delta_low, log_tol, count),
        points,
        count,
        xp.where(xp.isinf(trust), 1, rounds),
    )
    return _certified(law, found, log_delta_low, log_delta_high, points)


def _certified(law: LossLaw, found: _Round, log_delta_low: Array, log_delta_high: Array, points: int) -> Bracketed:
    solution, integrand = found.value, found.integrand
    xp = namespace(law.gauss_n, solution)
    certificate = certify(law, found.placed, integrand, found.made_from, points)
    _, rate = estimate(integrand, solution)
    low, high = ends(integrand, certificate, solution)
    grain = 16.0 * ROUNDOFF * (xp.abs(integrand.k0) + xp.abs(log_delta_low) + 4.0)
    rate = xp.maximum(rate, 1e-3 / solution)  # a rate that is too low makes the bracket wide, but never false
    above = solution + MARGIN * (xp.maximum(high - log_delta_low, 0.0) + grain) / rate
    below = solution - MARGIN * (xp.maximum(log_delta_high - low, 0.0) + grain) / rate
    below = xp.where(below > 0, below, xp.inf)  # replace a bound <= 0 by inf, which `certified` rejects
    both = xp.stack([below, above])
    bounds = ends(integrand, certificate, both)
    lower, lower_ok, upper, upper_ok = core.certified(both, bounds, log_delta_low, log_delta_high)
    return Bracketed(lower, solution, upper, upper_ok & lower_ok, certificate.needs)


def delta(law: LossLaw, eps: Array, start: Start, log_tol: Array, points: int, count: int, rounds: int) -> Bracketed:
    """Bracket log delta at eps >= 0. The search for a contour starts at `start.value` if `start.trust` >= BELIEVED."""
    found, eps = _placed(law, eps, start, log_tol, points, count, rounds)
    return _at(law, found, eps, found.value, points)


def delta_about(
    law: LossLaw, eps: Array, around: Array, start: Start, log_tol: Array, points: int, count: int, rounds: int
) -> Bracketed:
    """Bracket log delta at the K eps in `around` on a contour for `eps`. Brackets far from `eps` are wide."""
    xp = namespace(law.gauss_n, eps)
    found, _ = _placed(law, eps, start, log_tol, points, count, rounds)
    many = xp.moveaxis(around, -1, 0)
    return core.behind(_at(law, found, many, estimate(found.integrand, many)[0], points))


def _placed(
    law: LossLaw, eps: Array, start: Start, log_tol: Array, points: int, count: int, rounds: int
) -> tuple[_Round, Array]:
    """Place the contour for delta(eps); return the last round of the search, and eps with all batch axes of the law."""
    xp = namespace(law.gauss_n, eps)
    eps, log_tol, value, trust = _together(law, eps, log_tol, *start)
    found = _rounds(
        law,
        lambda log_delta, integrand: xp.clip(estimate(integrand, eps)[0], log_delta - 20.0, 0.0),
        xp.where(trust >= BELIEVED, value, -20.0),  # log delta starts at -20 if nothing is known
        lambda log_delta: place(law, eps, log_delta, log_tol, count),
        points,
        count,
        xp.where(xp.isinf(trust), 1, rounds),
    )
    return found, eps


def _at(law: LossLaw, found: _Round, eps: Array, middle: Array, points: int) -> Bracketed:
    """Bracket log delta at eps, on the contour of `found`. Several eps may lie along an axis before the batch axes."""
    xp = namespace(law.gauss_n, eps)
    certificate = certify(law, found.placed, found.integrand, found.made_from, points)
    lower, upper = ends(found.integrand, certificate, eps)
    ok = xp.isfinite(lower) & xp.isfinite(upper)
    return Bracketed(lower, xp.clip(middle, lower, upper), upper, ok, certificate.needs)


class Certificate(NamedTuple):
    """Bounds of the errors of an integrand, and of the remainder, the part of delta that is not integrated."""

    common: Array  # bound on the error of K(c); the factor e^{K(c)} is common to all nodes
    slack: Array  # (count,) bound on the error of the integrand at each node, relative to e^{K(c)}
    tail: Array  # bound on the sum of the terms that were cut off, divided by Z = e^{K(c) - c eps}
    images_at: Array  # abscissa of the Chernoff bound for the images (core.py), which lie at larger eps
    images_log: Array  # logarithm of the Chernoff bound at `images_at`, for eps = 0
    remainder: Remainder
    needs: Array  # numbers of quadrature points and contour nodes that would make the certificate narrow


class _OnAxis(NamedTuple):
    """A(c), B(c) and Chernoff bounds, all for t = 0, from grids that are evenly spaced in u."""

    even: Grid  # evenly spaced grids of the J sampled Gaussians, for the tilt by the contour's abscissa c
    parts: TiltedParts  # bulk and jumps on these grids
    errors: Array  # (J, 2) bounds of the errors of log A(c) and log B(c), A being the bulk and B the jumps
    images_log: Array  # logarithm at eps = 0 of the Chernoff bound for the images
    bulk_at: Array  # abscissae of the Chernoff bounds for bulk compositions
    bulk_log: Array  # logarithms of these bounds at eps = 0


def _on_the_axis(law: LossLaw, placed: Placement, points: int) -> _OnAxis:
    """Bound the periodic images, and the contribution of bulk compositions, by Chernoff's bound."""
    xp = namespace(law.gauss_n, placed.contour.c)
    contour, choice = placed
    windows = contour.windows
    bulk, bulk_at = split_remainder.bulk_grids(law, choice, points)
    even = grids_of(law, windows, contour.c, points)
    # All grids are stacked, so that JAX traces the bounds once. The first axis is for the contour's grid and the grid
    # for bulk compositions, the second for each grid's two abscissae.
    grids = jax.tree.map(lambda *x: xp.stack(x)[:, None], even, bulk)
    step_laws = steps_of(law, xp.stack([windows.low, choice.low])[:, None], windows.high)
    at = xp.stack([xp.stack([contour.c, contour.images_at]), bulk_at])
    c = at[..., None]
    parts = split_parts.tilted(step_laws.sign, c, grids)
    found = split_parts.axis_errors(step_laws, c, grids, parts) + weight_errors(step_laws, c, grids, parts)
    own, image, leaps = (jax.tree.map(lambda x, i=i: x[i], parts) for i in ((0, 0), (0, 1), 1))
    images = split_parts.chernoff(law, windows.keep_bulk, image, found[0, 1], contour.images_at)
    bulk_log = split_parts.bulk_chernoff(law, leaps, found[1], bulk_at)
    return _OnAxis(even, own, found[0, 0], images, bulk_at, bulk_log)


def certify(law: LossLaw, placed: Placement, integrand: Integrand, made_from: Quadrature, points: int) -> Certificate:
    """Return bounds of all errors of an integrand."""
    xp = namespace(law.gauss_n, integrand.t)
    grids, parts, bulk, jump = made_from
    contour, choice = placed
    windows, c, n, count = contour.windows, contour.c, law.gauss_n, integrand.angle.shape[-1]
    t, t_max = integrand.t, integrand.h * contour.nodes_kept
    logs = logs_of(law, contour, parts, bulk, jump, t)
    axis = _on_the_axis(law, placed, points)
    step_laws, at, furthest = steps_of(law, windows.low, windows.high), c[..., None], t_max[..., None]
    steps = split_parts.step_errors(step_laws, at, grids, parts, furthest)
    # `steps` bounds the errors of A(z) and A(c), divided by A(c). Convert it to the error of A(z)/A(c). The same for B.
    steps = xp.where(steps < 0.5, 2.0 * steps / (1.0 - xp.minimum(steps, 0.5)), split_parts.USELESS)
    part_errors, at_c = [], []
    off = rounding_errors(step_laws, at, grids, parts, furthest, core.depth(points, count))
    for part, (rate, most, own) in enumerate(off):
        step = steps[..., part]
        part_errors.append(step[..., None] + xp.minimum(rate[..., None] * t[..., None, :], most[..., None]))
        at_c.append(step + own)

    odds, keep_bulk = parts.log_jump - parts.log_bulk, windows.keep_bulk
    rise, log_norm = split_parts.rise_and_norm(law, keep_bulk, parts.log_bulk, parts.log_jump)
    base, share = rise + log_norm, logistic(xp, odds)
    ceilings = xp.hypot(1.0 + bulk[0], bulk[1]) + part_errors[0]
    jumps = xp.hypot(1.0 + jump[0], jump[1]) + part_errors[1]
    ratio = xp.exp(odds)[..., None] * jumps / ceilings
    most = composed(n, log1p(ratio))
    fallen = xp.exp(-most)
    gain = -xp.expm1(-most) + keep_bulk[..., None] * fallen  # 1 - (1 - keep_bulk)/prod (1 + ratio)^n
    units = ROUNDOFF * (16.0 + n.shape[-1])
    moved = composed(n, (part_errors[0] + units * xp.hypot(*bulk)) / ceilings)
    jumped = composed(n, ratio / (1.0 + ratio) * (part_errors[1] / jumps + 2.0 * units))
    # In `spread`, 6 covers the rounding of the factors of each term. count/16 covers the rounding of the terms' sum.
    spread = xp.abs(logs.plain) + xp.abs(logs.rise) + most + logs.turned + 6.0 + count / 16.0
    ceiling = composed(n, xp.log(ceilings)) - law.mu2[..., None] * t**2 / 2.0 + most - base[..., None]
    slack = xp.exp(ceiling) * (gain * (moved + units * spread) + jumped)
    slack = xp.where(xp.isfinite(integrand.log_modulus), slack, 0.0)

    jump_error = xp.sum(xp.where(n > 0, at_c[1], 0.0), axis=-1)
    ratio_error = xp.where(keep_bulk > 0, xp.sum(n * (share * at_c[1]), axis=-1), (1.0 + rise) * jump_error)
    size = xp.abs(integrand.k0) + xp.sum(n * xp.abs(parts.log_bulk), axis=-1) + law.mu2 * c * (c + 1.0) + rise + 30.0
    common = split_parts.FIRST_ORDER * (xp.sum(n * at_c[0], axis=-1) + ratio_error) + units * size
    left_out = split_remainder.bounds(law, windows, choice, integrand.far, axis.bulk_at, axis.bulk_log, points)
    # Bound the decay again. The decay that placed the contour comes from a coarse grid and has no error bounds.
    beyond = split_parts.decay_beyond(law, windows, axis.even, axis.parts, axis.errors, c, integrand.k0, t_max)
    beyond = beyond + xp.log(xp.pi * (t_max - 0.5 * integrand.h))
    needs = needed(law, contour, grids)
    return Certificate(common, slack, xp.exp(-beyond), contour.images_at, axis.images_log, left_out, needs)


def ends(integrand: Integrand, certificate: Certificate, epsilon: Array) -> tuple[Array, Array]:
    """Return lower and upper bounds of log delta(eps)."""
    xp = namespace(integrand.k0, epsilon)
    value, _ = core.trapezoid(integrand, epsilon)
    both = core.two_sided(integrand, certificate.slack, certificate.tail, epsilon)
    at, log_bound = certificate.images_at[..., None], certificate.images_log[..., None]
    remainder = certificate.remainder
    images = xp.exp(core.log_images(integrand.c, integrand.h, at, log_bound, epsilon, remainder.log_mass))
    far, _ = split_remainder.far(integrand.far, epsilon)
    log_z = integrand.k0 - integrand.c * epsilon
    both = both + 8.0 * ROUNDOFF * xp.abs(value)
    z = xp.exp(xp.maximum(log_z, LEAST_LOG_SCALE))
    up, down = xp.exp(certificate.common), xp.exp(-certificate.common)
    beyond = split_remainder.far_above(remainder, epsilon) + split_remainder.bulk(remainder, epsilon)
    high = z * (value + both) * up + beyond
    least = xp.where(log_z < LEAST_LOG_SCALE, xp.minimum(0.0, value - both), value - both)
    low = z * least * xp.where(least > 0, down, up) - split_remainder.OUTWARD * images * up + far
    log_low, log_high = (xp.log(xp.maximum(x, 1e-300)) for x in (low, high))
    margin = 16.0 * ROUNDOFF * (xp.abs(log_z) + xp.abs(integrand.c * epsilon) + 8.0)
    # A negative upper bound would contradict the integral, which is at least 0. Then neither bound is used.
    certain = (value + both >= 0.0) & (high < xp.inf)
    low = xp.where(certain & (low > 1e-300), log_low - margin - 8.0 * ROUNDOFF * xp.abs(log_low), -xp.inf)
    return low, xp.where(certain, log_high + margin + 8.0 * ROUNDOFF * xp.abs(log_high), xp.inf)


def _window_rounding(distance: Array, blur: Array) -> tuple[Array, Array]:
    """For w = Phi(distance/blur), bound the rounding error of log w, in units of 2^-53. Also bound |d log w/du|."""
    xp = namespace(distance)
    x = xp.clip(distance / blur, -40.0, 9.0)
    return 20.0 + 6.0 * xp.minimum(x, 0.0) ** 2, xp.where(x < 8.5, xp.maximum(-x, 0.0) + 1.0, 0.0) / blur


class _Units(NamedTuple):
    """Bounds of rounding errors, for each of the X terms in the sum of one part (bulk or jumps)."""

    own: Array  # (X,) error of the logarithm of each weight, in units of 2^-53
    turned: Array  # (X,) error of each loss L, in units of 2^-53; the angle of e^{itL} is off by t times this error
    doubt: Array  # largest error of the logarithm of a positive weight (absolute, not in units of 2^-53)


def _units(steps: Steps, c: Array, nodes: Grid, parts: TiltedParts) -> tuple[_Units, _Units]:
    """Return `_Units` of the bulk's terms and of the jumps' terms. The bounds include errors of nodes and windows."""
    xp = namespace(nodes.u, c)
    z, size, place = xp.abs(c)[..., None] + 1.0, xp.abs(nodes.loss), xp.abs(nodes.u)
    sigma, q, low, high = (x[..., None] for x in (steps.sigma, steps.q, steps.low, steps.high))
    slope = nodes.posterior / sigma
    edge = xp.maximum(place[..., :1], place[..., -1:])
    in_y = 4.0 * (place / sigma + 0.5 / sigma**2)
    through_y = nodes.posterior * (in_y - 3.0 * xp.log(q))
    # `node` bounds the error of each node u, in units of 2^-53. In `steep`, 1/sigma bounds |d log gap/du|.
    warped = nodes.warp[..., None] * ((gaussian_errors.LOG_MIX_UNITS + 6.0) * size + through_y)
    node = nodes.slack / ROUNDOFF + (4.0 * edge + warped) * nodes.gap / nodes.step[..., None]
    far, far_slope = _window_rounding(high - nodes.u, high_blur(sigma))
    common = 32.0 + (gaussian_errors.LOG_MIX_UNITS + 2.0) * z * size + 2.0 * nodes.u**2 + z * through_y + in_y + far
    steep = place + z * slope + far_slope + 1.0 / sigma
    turned = (gaussian_errors.LOG_MIX_UNITS + 12.0) * size + through_y + node * slope

    def of(weight: Array, log_part: Array, distance: Array) -> _Units:
        near, near_slope = _window_rounding(distance, low_blur(sigma))
        own = common + xp.abs(log_part)[..., None] + near + node * (steep + near_slope)
        return _Units(own, turned, ROUNDOFF * xp.max(xp.where(weight > 0.0, own, 0.0), axis=-1))

    distance = low - nodes.u
    return of(parts.bulk, parts.log_bulk, distance), of(parts.jump, parts.log_jump, -distance)


def _first_order(units: _Units, x: Array) -> Array:
    xp = namespace(units.doubt, x)
    return xp.where(
        units.doubt < gaussian_errors.LARGEST_DOUBT, ROUNDOFF * (1.0 + 2.0 * units.doubt) * x, split_parts.USELESS
    )


def _of_weights(units: _Units, weight: Array, log_part: Array) -> Array:
    xp = namespace(units.own, weight)
    common = sum_depth(weight.shape[-1]) + 40.0 + 8.0 * xp.abs(log_part)
    return _first_order(units, xp.sum(weight * (units.own + common[..., None]), axis=-1))


def weight_errors(steps: Steps, c: Array, nodes: Grid, parts: TiltedParts) -> Array:
    """Return two bounds, (2,): of the rounding error of log A(c), and of the rounding error of log B(c)."""
    of_bulk, of_jump = _units(steps, c, nodes, parts)
    bulk = _of_weights(of_bulk, parts.bulk, parts.log_bulk)
    return stack(namespace(bulk), [bulk, _of_weights(of_jump, parts.jump, parts.log_jump)])


def rounding_errors(
    steps: Steps, c: Array, nodes: Grid, parts: TiltedParts, t_max: Array, depth: float
) -> tuple[tuple[Array, Array, Array], tuple[Array, Array, Array]]:
    """For 0 < t <= t_max, bound rounding errors of r/t, r, log A(c), with r = A(c+it)/A(c) - 1. Then do so for B."""
    xp = namespace(nodes.u, c, t_max)
    size = xp.abs(nodes.loss)

    def of(units: _Units, weight: Array, log_part: Array) -> tuple[Array, Array, Array]:
        rotated = units.own + depth
        rate = xp.sum(weight * (size * rotated + units.turned), axis=-1)
        ceiling = xp.sum(weight * (2.0 * rotated + t_max[..., None] * units.turned), axis=-1)
        return _first_order(units, rate), _first_order(units, ceiling), _of_weights(units, weight, log_part)

    of_bulk, of_jump = _units(steps, c, nodes, parts)
    return of(of_bulk, parts.bulk, parts.log_bulk), of(of_jump, parts.jump, parts.log_jump)
