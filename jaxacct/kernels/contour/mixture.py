"""Contours of mixtures of Gaussians, by NumPy, with their certificate (kernels/README.md, section 7)."""

from __future__ import annotations

import bisect
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import scipy

from jaxacct.core.floats import ROUNDOFF
from jaxacct.kernels.arrays import Array, log1p_complex, logsumexp
from jaxacct.kernels.contour import core
from jaxacct.kernels.contour.core import Nodes, log_kappa
from jaxacct.kernels.contour.gaussian_errors import sinc_envelope

SMALL_LOSSES = 30.0
"""If every y in mix = sum w e^y is at most this, mix - 1 is summed as w expm1(y), to keep its digits near mix = 1."""
BLOCK = 16
"""Number of values of t for which bounds are evaluated at a time."""
HEIGHT_SHARE = 0.998
"""Factor on a lower bound of the loss's density. It covers rounding errors and a total mass that is only near 1."""
LOG_TOLERANCE = float(np.log(1e-9))
"""Logarithm of the wanted size, relative to delta, of the periodic images (core.py) and of the cut terms."""
LARGEST_CANCELLATION = 3.0
"""Moving the abscissa away from the saddle point may enlarge the integrand by at most this many nats."""
MOST_NODES = 400_000


def delta_bracket(nodes: Nodes, epsilon: float) -> tuple[float, float, float]:
    """Return the logarithms of a lower bound, an estimate and an upper bound of delta(eps)."""
    with np.errstate(all="ignore"):
        at = np.asarray(epsilon)
        value = core.trapezoid(nodes, at)[0]
        lower, upper = core.ends(nodes, at, value, core.errors(nodes, at))
        if not (np.isfinite(upper) and lower <= upper):
            return -np.inf, np.nan, np.inf
        middle = nodes.k0 - nodes.c * epsilon + np.log(value) if value > 0.0 else upper
    return float(lower), float(np.clip(middle, lower, upper)), float(upper)


def epsilon_bracket(nodes: Nodes, start: float, log_low: float, log_high: float) -> tuple[float, float, float]:
    """Return (lower, estimate, upper) of epsilon, for any delta from e^log_low to e^log_high."""
    lower, upper = -np.inf, np.inf
    with np.errstate(all="ignore"):
        found = core.newton(nodes, np.asarray(start), np.asarray(log_low), 16)
        for margin in (1.02, 1.5, 4.0):  # tries the bounds `found` -+ `margin` times the error of `found`
            low, _, high, _ = core.epsilon_of(nodes, found, np.asarray(log_low), np.asarray(log_high), margin)
            lower, upper = max(lower, float(low)), min(upper, float(high))
            if lower > -np.inf and upper < np.inf:
                break
    return lower, float(np.clip(found, lower, upper)), upper


def nodes_for_epsilon(parts: list[Part], epsilon: float, log_delta: float | None = None) -> Nodes:
    """Return a contour's nodes for delta at `epsilon`. `log_delta` is an estimate of log delta, or None."""
    c, _ = saddle(parts, lambda eps, _: eps < epsilon)
    if log_delta is None:
        log_delta = min(log_delta_at(c, sketch(parts, c))[1], 0.0)
    return _nodes(parts, c, epsilon, log_delta)


def nodes_for_delta(parts: list[Part], log_delta: float) -> tuple[Nodes, float]:
    """Return the nodes of a contour for solving delta(eps) = e^log_delta, and the eps for which it was placed."""
    c, eps = saddle(parts, lambda _, found: found > log_delta)
    return _nodes(parts, c, eps, log_delta), eps


def chernoff(parts: list[Part], highest: float) -> tuple[Array, Array]:
    """Return abscissae c and upper bounds b of log(kappa(c) E_P e^{c loss}). So delta(eps) is at most e^{b - c eps}."""
    at = highest * np.geomspace(1e-4, 1.0, 13)
    return at, np.array([_log_chernoff(parts, float(c)) for c in at]) + 1e-12


def _log_chernoff(parts: list[Part], c: float) -> float:
    """Return log(kappa(c) E_P e^{c loss}) plus its error bound, or inf if a grid is too long. Callers round up."""
    try:
        value, error = _exponent(parts, _quadratures(parts, c, 0.0, LOG_TOLERANCE))
    except TooMany:
        return np.inf
    return value + error + float(log_kappa(c))


def _nodes(parts: list[Part], highest: float, epsilon: float, log_delta: float) -> Nodes:
    at = highest * np.array(core.ABSCISSA_MULTIPLES)
    with np.errstate(all="ignore"):
        bound = np.array([sketch(parts, c).k + log_kappa(c) for c in at])
        bound = np.where(np.isfinite(bound), bound, np.inf)
        goal = np.asarray(epsilon), np.asarray(log_delta), np.asarray(LOG_TOLERANCE), np.asarray(LARGEST_CANCELLATION)
        c, period = (float(x) for x in core.period_for(np.asarray(highest * 1.0001), at, bound, *goal))
    if not (np.isfinite(c) and np.isfinite(period)):
        raise TooMany("no contour")
    step = 2.0 * np.pi / period
    flat = _quadratures(parts, c, 0.0, LOG_TOLERANCE)
    k, _ = _exponent(parts, flat)
    t_last = _cut_off(parts, flat, k - c * epsilon, log_delta)
    count = int(np.ceil(t_last / step)) + 2
    if count > MOST_NODES:
        raise TooMany("nodes")
    laws = _quadratures(parts, c, count * step, LOG_TOLERANCE - 5.0)
    if count * sum(q.u.size for row in laws for q in row) > 3e8:
        raise TooMany("work")
    k, k_error = _exponent(parts, laws)
    t = step * np.arange(count)
    power, wrong = _powers(parts, laws, t, step)
    cut = float(np.exp(min(_log_modulus(parts, laws, np.array([t[-1]]))[0], 0.0)) / (np.pi * t[-1]))
    beyond = at[at > 1.01 * c]
    gap = bound[at > 1.01 * c] - beyond * epsilon
    chosen = np.unique(beyond[np.argsort(gap - (beyond - c) * period)[:3]])
    logs = np.array([_log_chernoff(parts, float(one)) for one in chosen]) + 1e-9
    # `slack` covers the rounding of Im K and of the sum over the nodes. core.two_sided adds the rounding of t eps.
    slack = wrong + ROUNDOFF * (count + 48.0) * np.exp(power.real)
    place, h = np.float64(c), np.float64(step)
    weight = core.weight_at(place, h, t)
    common = np.float64(k_error + 8.0 * ROUNDOFF * (abs(k) + 8.0))
    return Nodes(place, np.float64(k), common, h, t, weight, power.real, power.imag, slack, cut, chosen, logs, count)


def _quadratures(parts: list[Part], c: float, t: float, log_goal: float) -> list[list[Quadrature]]:
    return [
        [quadrature(law, c, t, log_goal - 20.0 - float(np.log(part.times))) for law in part.branches] for part in parts
    ]


def _portions(part: Part, row: list[Quadrature]) -> tuple[Array, float]:
    """Return share_b M_b(c)/M(c) for each branch b of a part, and log M(c); M(c) is the sum of share_b M_b(c)."""
    logs = np.array([np.log(share) + q.log_m for share, q in zip(part.shares, row, strict=True)])
    total = float(logsumexp(logs)) if logs.size > 1 else float(logs[0])
    return np.exp(logs - total), total


def _exponent(parts: list[Part], laws: list[list[Quadrature]]) -> tuple[float, float]:
    """Return K(c) and a bound of its error."""
    k = error = terms = 0.0
    for part, row in zip(parts, laws, strict=True):
        portion, total = _portions(part, row)
        if len(row) > 1:  # where M(c) is near 1, log1p(M(c) - 1) keeps the digits of log M(c)
            rise = sum(s * np.expm1(min(q.log_m, 700.0)) for s, q in zip(part.shares, row, strict=True))
            whole = float(np.sum(part.shares)) - 1.0
            if abs(rise) < 0.5:
                total = float(np.log1p(rise + whole))
        single = float(sum(p * q.log_m_error for p, q in zip(portion, row, strict=True)))
        mixing = 0.0 if len(row) == 1 and part.shares[0] == 1.0 else 2.0 * part.doubt + 16.0 * ROUNDOFF
        k += part.times * total
        error += part.times * (1.1 * single + mixing * (1.0 + min(abs(total), 1.0)) + 8.0 * ROUNDOFF * abs(total))
        terms += part.times * abs(total)
    return k, error + (len(parts) + 8.0) * ROUNDOFF * terms


def _log_modulus(parts: list[Part], laws: list[list[Quadrature]], t: Array) -> Array:
    """Return an upper bound of log |e^{K(c + it') - K(c)}| for all t' >= t."""
    found = np.zeros(t.shape)
    for part, row in zip(parts, laws, strict=True):
        portion, _ = _portions(part, row)
        gap = np.zeros(t.shape)
        for share, branch in zip(portion, row, strict=True):
            gap += share * largest_modulus_gap(branch, t)
        found += part.times * np.log1p(-np.minimum(gap * (1.0 - 1e-9), 1.0 - 1e-16))
    return found


def _cut_off(parts: list[Part], laws: list[list[Quadrature]], log_z: float, log_delta: float) -> float:
    """Return a t beyond which the terms of the integral are negligible."""
    variance = 0.0
    for part, row in zip(parts, laws, strict=True):
        each = [float(np.sum(q.p * (q.log_mix - np.sum(q.p * q.log_mix)) ** 2)) for q in row]
        variance += part.times * sum(float(p) * x for p, x in zip(_portions(part, row)[0], each, strict=True))
    t = np.geomspace(1.0, 1e5, 120) / max(float(np.sqrt(variance)), 1e-12)

    def negligible(place: int) -> bool:
        left = log_z + _log_modulus(parts, laws, t[[place]])[0] - np.log(np.pi * t[place])
        return bool(left <= log_delta + LOG_TOLERANCE)

    first = bisect.bisect_left(range(t.size), True, key=negligible)  # bisection works, since the bound falls with t
    if first == t.size:
        raise TooMany("the characteristic function does not fall")
    return float(t[first])


def _powers(parts: list[Part], laws: list[list[Quadrature]], t: Array, step: float) -> tuple[Array, Array]:
    """Return K(c + it) - K(c) at the nodes, and bounds of the error of e^{K(c + it) - K(c)}."""
    total = np.zeros(t.size, complex)
    rounding = np.zeros(t.size)
    relative = np.zeros(t.size)
    for part, row in zip(parts, laws, strict=True):
        portion, _ = _portions(part, row)
        departure, wrong, size, skewed = np.zeros(t.size, complex), *np.zeros((3, t.size))
        for share, branch in zip(portion, row, strict=True):
            one = _departure(branch, t, step)
            departure += share * one
            wrong += share * (np.minimum(branch.by_size, t * branch.by_length) + 2.2 * branch.from_step)
            size += share * np.abs(one)
            skewed += share * branch.log_m_error * np.abs(one)
        if len(row) > 1 or part.shares[0] != 1.0:  # then portions have errors, in proportion to `size`
            wrong += (4.0 * part.doubt + 32.0 * ROUNDOFF) * np.minimum(size + 2.0 * ROUNDOFF, 2.0)
            wrong += 1.1 * (skewed + sum(p * q.log_m_error for p, q in zip(portion, row, strict=True)) * size)
        wrong += 16.0 * ROUNDOFF * size
        log_ratio = log1p_complex(departure.real, departure.imag)
        modulus = np.abs(1.0 + departure)
        with np.errstate(over="ignore", divide="ignore"):
            relative += part.times * np.log1p(wrong / np.maximum(modulus, 1e-300))
        total += part.times * log_ratio
        rounding += part.times * np.abs(log_ratio)
    with np.errstate(over="ignore", invalid="ignore"):
        exponent = np.real(total)
        error = np.exp(exponent) * np.expm1(np.minimum(relative, 700.0))
        error = np.where(relative > 600.0, np.exp(np.minimum(exponent + relative, 700.0)), error)
        error += np.exp(exponent) * ROUNDOFF * ((len(parts) + 10.0) * rounding + 16.0)
    return total, error


def _departure(branch: Quadrature, t: Array, step: float) -> Array:
    """Return M(c + it)/M(c) - 1 at each t = 0, step, 2 step, ..., by a matrix product of two tables."""
    loss = branch.law.sign * branch.log_mix
    kept = branch.p > 0.0
    p, loss = branch.p[kept], loss[kept]
    inner = int(np.ceil(np.sqrt(t.size)))
    outer = -(-t.size // inner)
    small, large = (step * np.arange(inner))[:, None] * loss, (step * inner * np.arange(outer))[:, None] * loss
    first, second = np.expm1(1j * small), np.expm1(1j * large)
    weighted = second * p
    found = (weighted @ first.T) + (first @ p)[None, :] + weighted.sum(axis=1)[:, None]
    return found.reshape(-1)[: t.size]


def largest_modulus_gap(branch: Quadrature, t: Array) -> Array:
    """Return a lower bound, (T,), of 1 - |M(c + i t')|/M(c) for all t' >= t."""
    return np.maximum(_by_level_sets(branch, t), 1.0 - _on_lines(branch, t))


def _on_lines(branch: Quadrature, t: Array) -> Array:
    """Return upper bounds, (T,), of |M(c + it')|/M(c) for all t' >= t, by integrals on lines u + iv."""
    law = branch.law
    spread = float(law.shift[-1] - law.shift[0])
    # If v > 0, |mix^{it}| = e^{-t arg mix} falls with t. So a bound at t holds beyond t.
    # no line lies above v = 3, since the Gaussian grows by e^{v^2/2} at height v
    highest = min(0.5 * np.pi / spread if spread > 0.0 else np.inf, 3.0)
    found = np.ones(t.shape)
    log_mix, _, _, posterior = _log_mix(law, branch.u)
    for share in (1.0, 0.6, 0.35, 0.2):
        height = share * highest
        on = line(law, branch.power, branch.u, branch.step, height, branch.log_m, log_mix, posterior)
        angle = np.minimum(on.angle[:-1], on.angle[1:])
        ends = float(np.logaddexp(on.log_left, on.log_right))
        for block in range(0, t.size, BLOCK):
            some = slice(block, block + BLOCK)
            inside = np.exp(np.minimum(on.log_cells - t[some, None] * angle * (1.0 - 1e-12), 50.0)).sum(axis=1)
            found[some] = np.minimum(found[some], 1.001 * (inside + np.exp(min(ends, 50.0))))
    return found


def _by_level_sets(branch: Quadrature, t: Array) -> Array:
    length, height = _cells(branch)
    gap = np.zeros(t.shape)
    for _ in range(3):  # each pass adds the gap from one unimodal part of the density
        if not np.any(height > 0.0):
            break
        under = _unimodal(height, int(np.argmax(height)))
        height = np.maximum(height - under, 0.0)
        order = np.argsort(-under, kind="stable")
        span = np.cumsum(length[order])  # length of the level set at each height
        fall = -np.diff(np.append(under[order], 0.0))
        kept = (fall > 0.0) & (span > 0.0)
        span, mass = span[kept], (span * fall)[kept]
        for block in range(0, t.size, BLOCK):
            some = slice(block, block + BLOCK)
            gap[some] += (mass * (1.0 - sinc_envelope(0.5 * t[some, None] * span))).sum(axis=1)
    return np.clip(gap - 1e-12, 0.0, 1.0)


def _cells(branch: Quadrature) -> tuple[Array, Array]:
    """Return, for each cell between two nodes, lower bounds of the cell's length in loss and of the loss's density."""
    spread = float(branch.law.shift[-1] - branch.law.shift[0])
    bend = -1.0 + max(branch.power, 0.0) * 0.25 * spread**2  # largest second derivative of log p
    low = np.minimum(branch.p[:-1], branch.p[1:]) / branch.step * np.exp(-max(bend, 0.0) * branch.step**2 / 8.0)
    slope = np.maximum(branch.slope[1:], branch.slope[:-1])
    rounding = 1e-13 * (1.0 + np.abs(branch.log_mix[1:]) + branch.law.shift.size / 64.0)
    length = np.maximum(np.diff(branch.log_mix) * (1.0 - 1e-6) - rounding, 0.0)
    # `most` caps length times height, so that rounding of the length cannot lift the product above the cell's mass
    most = HEIGHT_SHARE * low * branch.step
    with np.errstate(divide="ignore", invalid="ignore"):
        height = np.where((length > 0.0) & (slope > 0.0), HEIGHT_SHARE * low / slope, 0.0)
        height = np.where(length > 0.0, np.minimum(height, most / np.where(length > 0.0, length, 1.0)), 0.0)
    return length, height


def _unimodal(height: Array, mode: int) -> Array:
    """Return the largest function under `height` that falls on both sides of the index `mode`."""
    right = np.minimum.accumulate(height[mode:])
    left = np.minimum.accumulate(height[mode::-1])[::-1]
    return np.concatenate([left[:-1], right])


class TooMany(ArithmeticError):
    """Raised where a grid or a contour would be too long, or where float64 cannot hold its numbers."""


class BranchLaw(NamedTuple):
    """The two laws of a branch's output, a mixture of A normals N(shift, 1) and the normal N(0, 1), and a direction."""

    shift: Array  # (A,) in standard deviations, ascending
    weight: Array  # (A,) positive; each is off by at most 4 roundoffs from the true weight, and true weights sum to 1
    sign: float  # 1 for remove, -1 for add


class Quadrature(NamedTuple):
    """The law of a branch under the tilt e^{c loss}, on a grid of X nodes."""

    law: BranchLaw
    power: float  # a at z = c: c + 1 for remove, -c for add
    step: float
    u: Array  # (X,) nodes, `step` apart
    log_mix: Array  # (X,) log mix at the nodes
    slope: Array  # (X,) d log_mix/du, the posterior mean of the shift
    p: Array  # (X,) tilted mass at each node; the masses sum to 1, up to rounding and `from_step`
    log_m: float  # log M(c)
    log_m_error: float  # bound of the error of log M(c)
    from_step: float  # bound of the error of M(c + it)/M(c) that comes from the grid's step and range
    by_size: float  # the rounding error of M(c + it)/M(c) is at most min(by_size, t by_length)
    by_length: float


def quadrature(law: BranchLaw, c: float, t: float, log_goal: float) -> Quadrature:
    """Return the tilted law on a grid for which the error of M(c + it'), |t'| <= t, is about e^log_goal M(c)."""
    shift, weight = law.shift, law.weight
    power = c + 1.0 if law.sign > 0 else -c
    least, most = float(shift[0]), float(shift[-1])
    spread = most - least
    need = -log_goal
    # number of standard deviations by which the grid extends beyond every possible mode of the tilted law
    reach = max(12.0, float(np.sqrt(2.0 * (need + 5.0))))
    if law.sign > 0:
        left, right = -reach, power * most + reach
    else:
        # The tilted law's mode solves u = -c E[shift | u] <= 0. E[shift | u] grows with u, so u >= -c E[shift | 0].
        at_zero = weight * np.exp(-0.5 * (shift**2 - least**2))
        left, right = -(c * float(at_zero @ shift / at_zero.sum()) + reach), reach
    top = 0.5 * np.pi / spread if spread > 0.0 else np.inf
    best = np.sqrt(2.0 * need)
    height = min(best, top)
    width = 2.0 * np.pi / (t * most + need / height + 0.5 * height)
    for _ in range(8):  # the step is shortened until the bound of the quadrature error is small enough
        fraction, exponent = np.frexp(width)
        # `step` has five binary digits, so that the nodes, which are multiples of `step`, are exact
        step = float(np.ldexp(np.floor(fraction * 32.0) / 32.0, int(exponent)))
        first, last = int(np.floor(left / step)), int(np.ceil(right / step))
        if not 0 < last - first <= 100_000 or (last - first) * shift.size > 6e6:
            raise TooMany("quadrature points")
        found = _on_grid(law, power, t, step * np.arange(first, last + 1), step, height)
        if np.log(max(found.from_step, 1e-320)) <= log_goal + 1.0:
            break
        width *= 0.7
    if not np.isfinite(found.log_m) or not found.from_step < 1e-3:
        raise TooMany("the error of a step")
    return found


def _log_mix(law: BranchLaw, u: Array) -> tuple[Array, Array, Array, Array]:
    """Return log mix at each u, a bound of its error, and the shift's posterior mean and posterior masses, (X, A)."""
    shift, weight = law.shift, law.weight
    y = u[:, None] * shift - 0.5 * shift**2
    top = np.max(y + np.log(weight), axis=1)
    posterior = np.exp(y + np.log(weight) - top[:, None])
    total = posterior.sum(axis=1)
    posterior /= total[:, None]
    plain = top + np.log(total)
    small = np.expm1(np.minimum(y, SMALL_LOSSES))
    change, size = small @ weight, np.abs(small) @ weight
    by_change = (np.max(y, axis=1) <= SMALL_LOSSES) & (change > -0.5)
    log_mix = np.where(by_change, np.log1p(np.where(by_change, change, 0.0)), plain)
    moved = (posterior * (8.0 * np.abs(u[:, None] * shift) + 8.0 * shift**2)).sum(axis=1)
    terms = shift.size + 16.0
    relative = np.where(by_change, size / np.maximum(1.0 + change, 0.5), 1.0 + np.abs(top))
    error = ROUNDOFF * (moved + terms * relative + 8.0 * np.abs(log_mix))
    return log_mix, error, posterior @ shift, posterior


def _on_grid(law: BranchLaw, power: float, t: float, u: Array, step: float, height: float) -> Quadrature:
    shift = law.shift
    log_mix, wrong, slope, posterior = _log_mix(law, u)
    log_phi = -0.5 * u**2 - 0.5 * np.log(2.0 * np.pi)
    exponent = power * log_mix
    log_f = log_phi + exponent
    top = float(np.max(log_f)) + np.log(step)
    own = np.abs(power) * wrong + 4.0 * ROUNDOFF * np.abs(exponent)  # relative error of mix^a
    drift = ROUNDOFF * (2.0 * u**2 + 20.0)  # relative error of `step * phi`
    if top < 20.0:
        base = step * np.exp(log_phi)
        both = step * np.exp(log_f)
        rise = np.where(exponent > SMALL_LOSSES, both - base, base * np.expm1(np.minimum(exponent, 31.0)))
        size = np.abs(rise)
        less_one = float(np.sum(rise))
        log_m = float(np.log1p(less_one)) if less_one > -0.5 else -np.inf
        rounding = float(np.sum(size * (drift + 4.0 * ROUNDOFF) + both * own) + u.size * ROUNDOFF * np.sum(size))
        rounding = rounding / (1.0 + less_one) + 6.0 * ROUNDOFF * abs(log_m)
    else:
        log_m = float(logsumexp(log_f)) + float(np.log(step))
        weight = np.exp(log_f + np.log(step) - log_m)
        rounding = float(np.sum(weight * (drift + own))) + ROUNDOFF * (u.size + 8.0 * abs(log_m) + 8.0 * abs(top))
    p = np.exp(log_f + np.log(step) - log_m)
    relative = drift + own + 8.0 * ROUNDOFF * (np.abs(log_f) + abs(log_m)) + ROUNDOFF * (5.0 * u.size + 40.0) + rounding
    length = float(np.sum(p * (relative * np.abs(log_mix) + 2.0 * wrong + 8.0 * ROUNDOFF * np.abs(log_mix))))
    size = float(np.sum(p * (2.0 * relative + 16.0 * ROUNDOFF)))
    ends = np.array([0, -1])
    log_tails = _log_tails(law, power, u[ends], log_mix[ends], log_f[ends])
    tails = float(np.exp(min(np.logaddexp(*log_tails) - log_m, 700.0)))
    unit = float(np.exp(np.logaddexp(scipy.special.log_ndtr(u[0]), scipy.special.log_ndtr(-u[-1])) - log_m))
    strip = _strip(law, power, t, u, step, height, log_m, log_mix, posterior)
    unit += 2.0 / np.expm1(min(2.0 * np.pi**2 / step**2, 700.0)) * np.exp(-log_m) if top < 20.0 else 0.0
    from_step = 1.01 * (2.0 * tails + 2.0 * unit + strip) if shift.size else np.inf
    log_m_error = 2.0 * (rounding + from_step) if rounding + from_step < 0.25 else np.inf
    return Quadrature(law, power, step, u, log_mix, slope, p, log_m, log_m_error, from_step, 1.1 * size, 1.1 * length)


def _log_tails(law: BranchLaw, power: float, ends: Array, log_mix: Array, log_f: Array) -> tuple[float, float]:
    """Return the logs of upper bounds of two integrals of phi mix^a: to the left of the grid, and to its right."""
    low, high = float(ends[0]), float(ends[1])
    if power >= 0.0:
        gap = high - power * float(law.shift[-1])
        if gap < 0.0:
            return np.inf, np.inf
        below = power * float(log_mix[0]) + float(scipy.special.log_ndtr(low))
        return below, float(log_f[1]) - float(np.log(max(gap, 0.79)))
    beyond = power * float(log_mix[1]) + float(scipy.special.log_ndtr(-high))
    return _left_of_add(law, -power, low, float(log_mix[0]))[0], beyond


def _left_of_add(law: BranchLaw, c: float, low: float, log_mix: float) -> tuple[float, float]:
    """Return upper bounds of log int_{u < low} phi mix^-c: by log mix's tangent at `low`, and by mix's first term."""
    y = np.log(law.weight) + law.shift * low - 0.5 * law.shift**2
    posterior = np.exp(y - logsumexp(y))
    mean, least = float(posterior @ law.shift), float(law.shift[0])
    tangent = -c * log_mix + c * mean * low + 0.5 * (c * mean) ** 2 + float(scipy.special.log_ndtr(low + c * mean))
    by_least = -c * float(np.log(law.weight[0])) + 0.5 * (c * c + c) * least**2
    by_least += float(scipy.special.log_ndtr(low + c * least))
    return tangent + 1e-9 * (1.0 + abs(c * mean * low) * 1e-3), by_least


class Line(NamedTuple):
    """Bounds of integrals of |phi mix^a|/M(c), for real a, over the line u + iv. On the line arg mix grows with u."""

    log_cells: Array  # (X - 1,) log of a bound of the integral over each cell of the grid
    angle: Array  # (X,) arg mix at the nodes u + iv
    log_left: float  # log of a bound of the integral to the left of the grid
    log_right: float


def line(
    law: BranchLaw, power: float, u: Array, step: float, v: float, log_m: float, log_mix: Array, posterior: Array
) -> Line:
    """Bound integrals of |phi mix^a|/M(c) over the line u + iv. v times the range of the shifts must be <= pi/2."""
    shift, middle = law.shift, 0.5 * float(law.shift[0] + law.shift[-1])
    log_phi = -0.5 * u**2 - 0.5 * np.log(2.0 * np.pi)
    turned = posterior @ np.exp(1j * (shift - middle) * v)
    with np.errstate(divide="ignore"):
        modulus = power * (log_mix + np.log(np.abs(turned)))
    grown = 0.5 * v * v - log_m
    cells = np.maximum(log_phi[:-1], log_phi[1:]) + np.maximum(modulus[:-1], modulus[1:]) + np.log(step) + grown
    left, right = _log_tails(law, power, u[[0, -1]], log_mix[[0, -1]], (log_phi + power * log_mix)[[0, -1]])
    if power >= 0.0:
        left += float(modulus[0]) - power * float(log_mix[0])
    else:
        right += float(modulus[-1]) - power * float(log_mix[-1])
        # `bent` is the log of a lower bound of |mix(u + iv)|/mix(u)
        bent = float(np.log(np.cos(0.5 * float(law.shift[-1] - law.shift[0]) * v)))
        left = min(left + power * bent, _left_of_add(law, -power, float(u[0]), float(log_mix[0]))[1])
    return Line(cells, middle * v + np.angle(turned), left + grown, right + grown)


def _strip(
    law: BranchLaw, power: float, t: float, u: Array, step: float, height: float, log_m: float, *known: Array
) -> float:
    """Bound the quadrature error, relative to M(c), by integrals of |phi mix^a| on the lines u + iv and u - iv."""
    least = np.inf
    for share in (1.0, 0.75, 0.5, 0.35, 0.25, 0.16, 0.1, 0.06, 0.03):
        v = share * height
        on = line(law, power, u, step, v, log_m, *known)
        grown = on.log_cells + t * np.maximum(on.angle[:-1], on.angle[1:])
        ends = np.logaddexp(on.log_left + t * float(on.angle[0]), on.log_right + t * float(law.shift[-1]) * v)
        total = float(np.logaddexp(logsumexp(np.concatenate([grown, on.log_cells])), np.log(2.0) + ends))
        kernel = 2.0 * np.pi * v / step
        least = min(least, float(np.exp(np.minimum(total - kernel - np.log(-np.expm1(-kernel)), 700.0))))
    return least


class Part(NamedTuple):
    """A step that is composed `times` times. Each time it draws one of several branches."""

    times: float
    shares: tuple[float, ...]  # probabilities of the branches
    doubt: float  # bound of the relative error of the shares
    branches: tuple[BranchLaw, ...]


class Sketch(NamedTuple):
    """Estimates of K, K' and K'' at some c. They serve to place the contour."""

    k: float
    mean: float
    variance: float


def sketch(parts: list[Part], c: float) -> Sketch:
    """Return the `Sketch` at c."""
    k = mean = variance = 0.0
    for part in parts:
        logs, means, squares = [], [], []
        for share, law in zip(part.shares, part.branches, strict=True):
            power = c + 1.0 if law.sign > 0 else -c
            high = max(power, 0.0) * float(law.shift[-1]) + 10.0
            low = -10.0 if law.sign > 0 else -10.0 - c * float(law.shift[0])
            u = np.linspace(low, high, int(min(4000, 300 + 12.0 * (high - low) * min(1.0 + law.shift[-1], 4.0))))
            y = logsumexp(u[:, None] * law.shift - 0.5 * law.shift**2 + np.log(law.weight))
            log_f = -0.5 * u**2 + power * y + np.log((u[1] - u[0]) / np.sqrt(2.0 * np.pi))
            total = float(logsumexp(log_f))
            p = np.exp(log_f - total)
            first = float(p @ y)
            logs.append(np.log(share) + total)
            means.append(law.sign * first)
            squares.append(float(p @ y**2))
        total = float(logsumexp(logs))
        p = np.exp(np.array(logs) - total)
        first = float(p @ means)
        k += part.times * total
        mean += part.times * first
        variance += part.times * max(float(p @ squares) - first**2, 0.0)
    return Sketch(k, mean, variance)


def log_delta_at(c: float, at: Sketch) -> tuple[float, float]:
    """Return the eps for which e^{K(z) - z eps}/(z (z+1)) has its saddle point at c, and an estimate of log delta."""
    eps = at.mean - 1.0 / c - 1.0 / (c + 1.0)
    bend = at.variance + 1.0 / c**2 + 1.0 / (c + 1.0) ** 2
    return eps, at.k - c * eps - np.log(c) - np.log1p(c) - 0.5 * np.log(2.0 * np.pi * bend)


def saddle(parts: list[Part], too_small: Callable[[float, float], bool]) -> tuple[float, float]:
    """Find by bisection the least c at which `too_small(*log_delta_at(c, ...))` is false. Return c and its eps."""
    low, high = np.log(1e-6), np.log(1e7)
    for _ in range(46):
        middle = 0.5 * (low + high)
        c = float(np.exp(middle))
        eps, log_delta = log_delta_at(c, sketch(parts, c))
        if np.isfinite(eps) and np.isfinite(log_delta) and too_small(eps, log_delta):
            low = middle
        else:
            high = middle
        if high - low < 1e-3:
            break
    c = float(np.exp(0.5 * (low + high)))
    return c, log_delta_at(c, sketch(parts, c))[0]
