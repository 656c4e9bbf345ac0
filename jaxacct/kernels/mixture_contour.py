"""delta(eps) of compositions of mixtures of Gaussians, by damped inversion with a certificate (mixture.md).

    delta(eps) = (1/2 pi i) int e^{K(z) - z eps}/(z (z+1)) dz on Re z = c,   K = sum_i n_i log sum_b share_b M_b(z)
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from scipy.special import logsumexp

from jaxacct.floats import ROUNDOFF
from jaxacct.kernels.arrays import Array
from jaxacct.kernels.contour import ABSCISSA_MULTIPLES, period_for
from jaxacct.kernels.mixture_decay import largest_modulus_gap
from jaxacct.kernels.mixture_law import BranchLaw, Quadrature, TooMany, quadrature

__all__ = ["Part", "Nodes", "delta_bracket", "epsilon_bracket", "nodes_for_delta", "nodes_for_epsilon"]

LOG_TOLERANCE = float(np.log(1e-9))
"""What images and cut-off may cost, relative to delta."""
LARGEST_CANCELLATION = 3.0
"""Nats by which moving the abscissa away from the saddle point may enlarge the integrand."""
MOST_NODES = 400_000
"""Most nodes of a contour."""
MOST_WORK = 6e8
"""Most products of nodes and quadrature points."""
LEAST_C, MOST_C = 1e-6, 1e7
"""Range of the saddle points that are searched."""
BISECTIONS = 46
"""Halvings of the logarithm of the abscissa."""


class Part(NamedTuple):
    """What is composed `count` times: one of several branches, drawn with its share."""

    count: float
    shares: tuple[float, ...]
    doubt: float  # relative error of the shares
    branches: tuple[BranchLaw, ...]


class Nodes(NamedTuple):
    """The integrand on a contour, relative to e^{K(c)}."""

    c: float
    period: float
    t: Array
    log_power: Array  # K(c + it) - K(c), complex
    wrong: Array  # absolute error of the modulus of its exponential
    k: float
    k_error: float
    cut: float  # what lies beyond the last node
    images_at: Array
    images_log: Array  # log of a bound of E e^{c' loss} kappa(c')


class Sketch(NamedTuple):
    """Uncertified K and its derivatives, for placing the contour."""

    k: float
    mean: float
    variance: float


def _sketch(parts: list[Part], c: float) -> Sketch:
    k = mean = variance = 0.0
    for part in parts:
        logs, means, squares = [], [], []
        for share, law in zip(part.shares, part.branches, strict=True):
            power = c + 1.0 if law.sign > 0 else -c
            high = max(power, 0.0) * float(law.shift[-1]) + 10.0
            low = -10.0 if law.sign > 0 else -10.0 - c * float(law.shift[0])
            u = np.linspace(low, high, int(min(4000, 300 + 12.0 * (high - low) * min(1.0 + law.shift[-1], 4.0))))
            y = logsumexp(u[:, None] * law.shift - 0.5 * law.shift**2 + np.log(law.weight), axis=1)
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
        k += part.count * total
        mean += part.count * first
        variance += part.count * max(float(p @ squares) - first**2, 0.0)
    return Sketch(k, mean, variance)


def _log_delta(c: float, at: Sketch) -> tuple[float, float]:
    """(eps, log delta) by the saddle point approximation of the integrand with its pole."""
    eps = at.mean - 1.0 / c - 1.0 / (c + 1.0)
    bend = at.variance + 1.0 / c**2 + 1.0 / (c + 1.0) ** 2
    return eps, at.k - c * eps - np.log(c) - np.log1p(c) - 0.5 * np.log(2.0 * np.pi * bend)


def _saddle(parts: list[Part], too_small: object, least: float = LEAST_C) -> tuple[float, float]:
    """(c, eps) where `too_small(c, eps, log_delta)` turns false, by bisection in log c."""
    low, high = np.log(least), np.log(MOST_C)
    for _ in range(BISECTIONS):
        middle = 0.5 * (low + high)
        c = float(np.exp(middle))
        eps, log_delta = _log_delta(c, _sketch(parts, c))
        if np.isfinite(eps) and np.isfinite(log_delta) and too_small(eps, log_delta):  # type: ignore[operator]
            low = middle
        else:
            high = middle
        if high - low < 1e-3:
            break
    c = float(np.exp(0.5 * (low + high)))
    return c, _log_delta(c, _sketch(parts, c))[0]


def nodes_for_epsilon(parts: list[Part], epsilon: float) -> Nodes:
    """A contour for delta at an epsilon."""
    c, _ = _saddle(parts, lambda eps, _: eps < epsilon)
    log_delta = _log_delta(c, _sketch(parts, c))[1]
    return _nodes(parts, c, epsilon, min(log_delta, 0.0))


def nodes_for_delta(parts: list[Part], log_delta: float) -> Nodes:
    """A contour for epsilon at a delta."""
    c, eps = _saddle(parts, lambda _, found: found > log_delta)
    return _nodes(parts, c, eps, log_delta)


def _log_kappa(c: Array | float) -> Array:
    """log of the best constant in (1 - e^-x)_+ <= kappa e^{cx}."""
    return c * np.log(c) - (1.0 + c) * np.log1p(c)


def _nodes(parts: list[Part], saddle: float, epsilon: float, log_delta: float) -> Nodes:
    at = saddle * np.array(ABSCISSA_MULTIPLES)
    with np.errstate(all="ignore"):
        bound = np.array([_sketch(parts, c).k + _log_kappa(c) for c in at])
        bound = np.where(np.isfinite(bound), bound, np.inf)
        c, period = (
            float(x)
            for x in period_for(
                np.asarray(saddle * 1.0001),
                at,
                bound,
                np.asarray(epsilon),
                np.asarray(log_delta),
                np.asarray(LOG_TOLERANCE),
                np.asarray(LARGEST_CANCELLATION),
            )
        )
    if not (np.isfinite(c) and np.isfinite(period)):
        raise TooMany("no contour")
    step = 2.0 * np.pi / period
    flat = _quadratures(parts, c, 0.0, LOG_TOLERANCE)
    k, _ = _exponent(parts, flat, c)
    t_last = _cut_off(parts, flat, k - c * epsilon, log_delta)
    count = int(np.ceil(t_last / step)) + 2
    if count > MOST_NODES:
        raise TooMany("nodes")
    laws = _quadratures(parts, c, count * step, LOG_TOLERANCE - 5.0)
    if count * sum(q.u.size for row in laws for q in row) > MOST_WORK:
        raise TooMany("work")
    k, k_error = _exponent(parts, laws, c)
    t = step * np.arange(count)
    power, wrong = _powers(parts, laws, t, step)
    cut = float(np.exp(min(_log_modulus(parts, laws, np.array([t[-1]]))[0], 0.0)) / (np.pi * t[-1]))
    beyond = at[at > 1.01 * c]
    gap = bound[at > 1.01 * c] - beyond * epsilon
    chosen = np.unique(beyond[np.argsort(gap - (beyond - c) * period)[:3]])
    logs = []
    for one in chosen:
        try:
            rows = _quadratures(parts, float(one), 0.0, LOG_TOLERANCE)
            value, error = _exponent(parts, rows, float(one))
            logs.append(value + error + float(_log_kappa(one)))
        except TooMany:
            logs.append(np.inf)
    return Nodes(c, period, t, power, wrong, k, k_error, cut, chosen, np.array(logs))


def _quadratures(parts: list[Part], c: float, t: float, log_goal: float) -> list[list[Quadrature]]:
    return [
        [quadrature(law, c, t, log_goal - 20.0 - float(np.log(part.count))) for law in part.branches] for part in parts
    ]


def _portions(part: Part, row: list[Quadrature]) -> tuple[Array, float]:
    """(share_b M_b(c)/M(c), log M(c)) of a part."""
    logs = np.array([np.log(share) + q.log_m for share, q in zip(part.shares, row, strict=True)])
    total = float(logsumexp(logs)) if logs.size > 1 else float(logs[0])
    return np.exp(logs - total), total


def _exponent(parts: list[Part], laws: list[list[Quadrature]], c: float) -> tuple[float, float]:
    """K(c) and its error."""
    k = error = terms = 0.0
    for part, row in zip(parts, laws, strict=True):
        portion, total = _portions(part, row)
        if len(row) > 1:  # a sum of shares close to 1: log1p keeps digits of small logarithms
            rise = sum(s * np.expm1(min(q.log_m, 700.0)) for s, q in zip(part.shares, row, strict=True))
            whole = float(np.sum(part.shares)) - 1.0
            if abs(rise) < 0.5:
                total = float(np.log1p(rise + whole))
        single = float(sum(p * q.log_m_error for p, q in zip(portion, row, strict=True)))
        mixing = 0.0 if len(row) == 1 and part.shares[0] == 1.0 else 2.0 * part.doubt + 16.0 * ROUNDOFF
        k += part.count * total
        error += part.count * (1.1 * single + mixing * (1.0 + min(abs(total), 1.0)) + 8.0 * ROUNDOFF * abs(total))
        terms += part.count * abs(total)
    return k, error + (len(parts) + 8.0) * ROUNDOFF * terms


def _log_modulus(parts: list[Part], laws: list[list[Quadrature]], t: Array) -> Array:
    """A bound of log |e^{K(c + it') - K(c)}| for all t' >= t."""
    found = np.zeros(t.shape)
    for part, row in zip(parts, laws, strict=True):
        portion, _ = _portions(part, row)
        gap = np.zeros(t.shape)
        for share, branch in zip(portion, row, strict=True):
            gap += share * largest_modulus_gap(branch, t)
        found += part.count * np.log1p(-np.minimum(gap * (1.0 - 1e-9), 1.0 - 1e-16))
    return found


def _cut_off(parts: list[Part], laws: list[list[Quadrature]], log_z: float, log_delta: float) -> float:
    """A t beyond which the integrand is negligible."""
    deviation = np.sqrt(
        sum(
            part.count * sum(float(p) * float(np.sum(q.p * (q.log_mix - np.sum(q.p * q.log_mix)) ** 2)) for p, q in zip(_portions(part, row)[0], row, strict=True))
            for part, row in zip(parts, laws, strict=True)
        )
    )
    t = np.geomspace(1.0, 1e5, 120) / max(float(deviation), 1e-12)
    left = log_z + _log_modulus(parts, laws, t) - np.log(np.pi * t) - (log_delta + LOG_TOLERANCE)
    enough = np.flatnonzero(left <= 0.0)
    if not enough.size:
        raise TooMany("the characteristic function does not fall")
    return float(t[enough[0]])


def _powers(parts: list[Part], laws: list[list[Quadrature]], t: Array, step: float) -> tuple[Array, Array]:
    """K(c + it) - K(c) at the nodes, and the error of the modulus of its exponential."""
    total = np.zeros(t.size, complex)
    rounding = np.zeros(t.size)
    relative = np.zeros(t.size)
    for part, row in zip(parts, laws, strict=True):
        portion, _ = _portions(part, row)
        departure, wrong = np.zeros(t.size, complex), np.zeros(t.size)
        for share, branch in zip(portion, row, strict=True):
            departure += share * _departure(branch, t, step)
            wrong += share * (np.minimum(branch.by_size, t * branch.by_length) + 2.2 * branch.from_step)
        size = np.abs(departure)
        if len(row) > 1 or part.shares[0] != 1.0:
            wrong += (4.0 * part.doubt + 32.0 * ROUNDOFF) * np.minimum(size + 2.0 * ROUNDOFF, 2.0)
            wrong += 2.2 * sum(p * q.log_m_error for p, q in zip(portion, row, strict=True)) * size
        wrong += 16.0 * ROUNDOFF * size
        log_ratio = np.log1p(departure)
        modulus = np.abs(1.0 + departure)
        with np.errstate(over="ignore", divide="ignore"):
            relative += part.count * np.log1p(wrong / np.maximum(modulus, 1e-300))
        total += part.count * log_ratio
        rounding += part.count * np.abs(log_ratio)
    with np.errstate(over="ignore", invalid="ignore"):
        exponent = np.real(total)
        error = np.exp(exponent) * np.expm1(np.minimum(relative, 700.0))
        error = np.where(relative > 600.0, np.exp(np.minimum(exponent + relative, 700.0)), error)
        error += np.exp(exponent) * ROUNDOFF * (10.0 * rounding + 16.0)
    return total, error


def _departure(branch: Quadrature, t: Array, step: float) -> Array:
    """M(c + it)/M(c) - 1 at equidistant t from 0, by two tables whose product is summed as a matrix product."""
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


def _value(nodes: Nodes, epsilon: float) -> tuple[float, float, float]:
    """(S, its error without images, slope): delta = e^{K(c) - c eps} S."""
    z = nodes.c + 1j * nodes.t
    weight = np.full(nodes.t.size, 2.0 / nodes.period)
    weight[0] *= 0.5
    kernel = weight / (z * (z + 1.0))
    terms = kernel * np.exp(nodes.log_power - 1j * nodes.t * epsilon)
    size = np.abs(kernel)
    phase = ROUNDOFF * (6.0 * nodes.t * abs(epsilon) + nodes.t.size + 40.0)
    error = float(np.sum(size * nodes.wrong + np.abs(terms) * phase)) + nodes.cut
    return float(np.sum(np.real(terms))), error, float(np.sum(np.real(z * terms)))


def delta_bracket(nodes: Nodes, epsilon: float) -> tuple[float, float, float]:
    """log of (lower, estimate, upper) of delta(eps)."""
    value, error, _ = _value(nodes, epsilon)
    log_z = nodes.k - nodes.c * epsilon
    grain = nodes.k_error + 8.0 * ROUNDOFF * (abs(nodes.k) + abs(nodes.c * epsilon) + 8.0)
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        left = -np.log(np.expm1(np.minimum(nodes.c * nodes.period, 700.0)))
        right = nodes.images_log - nodes.images_at * epsilon
        right = right - np.log(np.expm1(np.minimum((nodes.images_at - nodes.c) * nodes.period, 700.0)))
        images = np.logaddexp(left, np.min(right) if right.size else np.inf) + 1e-9
        rest = value - error - float(np.exp(min(images - log_z + grain, 700.0)))
        upper = log_z + grain + float(np.log(value + error)) if value + error > 0.0 else np.inf
        lower = log_z - grain + float(np.log(rest)) if rest > 1e-300 else -np.inf
        estimate = log_z + float(np.log(value)) if value > 0.0 else upper
    if not (np.isfinite(upper) and lower <= upper):
        return -np.inf, np.nan, np.inf
    return lower, float(np.clip(estimate, lower, upper)), upper


def epsilon_bracket(nodes: Nodes, log_low: float, log_high: float) -> tuple[float, float, float]:
    """(lower, estimate, upper) of epsilon: its upper end holds for a delta of e^log_low, its lower end for e^log_high."""
    eps = (nodes.k - log_low) / nodes.c
    for _ in range(60):
        value, _, slope = _value(nodes, eps)
        if not value > 0.0:
            eps -= 0.5 / nodes.c
            continue
        move = nodes.k - nodes.c * eps + np.log(value) - log_low
        rate = float(np.clip(slope / value, 0.2 * nodes.c, 5.0 * nodes.c + 5.0))
        move = float(np.clip(move / rate, -2.0 / nodes.c, 2.0 / nodes.c))
        eps += move
        if abs(move) <= 1e-13 * max(abs(eps), 1e-3 / nodes.c):
            break
    low, _, high = delta_bracket(nodes, eps)
    value, _, slope = _value(nodes, eps)
    if not (value > 0.0 and np.isfinite(high)):
        return -np.inf, np.nan, np.inf
    rate = float(np.clip(slope / value, 0.2 * nodes.c, 5.0 * nodes.c + 5.0))
    upper, lower = np.inf, -np.inf
    tiny = 1e-15 * abs(eps) + 1e-300
    for factor in (1.02, 1.5, 4.0):
        above = eps + factor * max(high - log_low, 0.0) / rate + tiny * factor
        if delta_bracket(nodes, above)[2] <= log_low - 4.0 * ROUNDOFF * abs(log_low):
            upper = above
            break
    for factor in (1.02, 1.5, 4.0):
        below = eps - factor * max(log_high - low, 0.0) / rate - tiny * factor
        if np.isfinite(below) and delta_bracket(nodes, below)[0] >= log_high + 4.0 * ROUNDOFF * abs(log_high):
            lower = below
            break
    return lower, float(np.clip(eps, lower, upper)), upper
