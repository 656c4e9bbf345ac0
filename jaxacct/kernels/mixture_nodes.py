"""The integrand of a contour for compositions of mixtures of Gaussians, with its errors (README.md, section 7).

|M(c + it)|/M(c) is bounded for all larger t by level sets of the tilted density of the loss, and on moved lines.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from jaxacct.core.floats import ROUNDOFF
from jaxacct.kernels.arrays import Array
from jaxacct.kernels.contour import ABSCISSA_MULTIPLES, period_for
from jaxacct.kernels.mixture_law import Quadrature, TooMany, line, quadrature
from jaxacct.kernels.mixture_placement import Part, log_delta_at, saddle, sketch
from jaxacct.kernels.special import log1p_complex, logsumexp

__all__ = ["Nodes", "chernoff", "largest_modulus_gap", "nodes_for_delta", "nodes_for_epsilon"]

LINES = (1.0, 0.6, 0.35, 0.2)
"""Heights of the moved lines, over the largest that serves."""
HIGHEST_LINE = 3.0
"""Height above which no line is tried: the Gaussian grows by e^{v^2/2}."""
BLOCK = 16
"""Values of t that are taken at a time."""
PEELS = 3
"""Unimodal parts that are taken out of a density, one after the other."""
SIDE_LOBE = 0.217235
"""sup |sin y|/y beyond the first zero, rounded up."""
HEIGHT_SHARE = 0.998
"""What heights are multiplied by: rounding of the density, and of the integral of the tilted law."""
LOG_TOLERANCE = float(np.log(1e-9))
"""What images and cut-off may cost, relative to delta."""
LARGEST_CANCELLATION = 3.0
"""Nats by which moving the abscissa away from the saddle point may enlarge the integrand."""
CHERNOFF_TRIED = 13
"""Abscissae of the Chernoff bounds of a row without a contour."""
MOST_NODES = 400_000
"""Most nodes of a contour."""
MOST_WORK = 3e8
"""Most products of nodes and quadrature points."""


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


def nodes_for_epsilon(parts: list[Part], epsilon: float, log_delta: float | None = None) -> Nodes:
    """A contour for delta at an epsilon, and the logarithm of that delta if it is known better than by the saddle."""
    c, _ = saddle(parts, lambda eps, _: eps < epsilon)
    if log_delta is None:
        log_delta = min(log_delta_at(c, sketch(parts, c))[1], 0.0)
    return _nodes(parts, c, epsilon, log_delta)


def nodes_for_delta(parts: list[Part], log_delta: float) -> Nodes:
    """A contour for epsilon at a delta."""
    c, eps = saddle(parts, lambda _, found: found > log_delta)
    return _nodes(parts, c, eps, log_delta)


def chernoff(parts: list[Part], highest: float) -> tuple[Array, Array]:
    """Abscissae c, and the log of what bounds delta(eps) as a multiple of e^{-c eps}: E e^{c loss} kappa(c)."""
    at = highest * np.geomspace(1e-4, 1.0, CHERNOFF_TRIED)
    logs = np.full(at.size, np.inf)
    for place, c in enumerate(at):
        try:
            value, error = _exponent(parts, _quadratures(parts, float(c), 0.0, LOG_TOLERANCE), float(c))
        except TooMany:
            break
        logs[place] = value + error + float(_log_kappa(c)) + 1e-12
    return at, logs


def _log_kappa(c: Array | float) -> Array:
    """log of the best constant in (1 - e^-x)_+ <= kappa e^{cx}."""
    return c * np.log(c) - (1.0 + c) * np.log1p(c)


def _nodes(parts: list[Part], highest: float, epsilon: float, log_delta: float) -> Nodes:
    at = highest * np.array(ABSCISSA_MULTIPLES)
    with np.errstate(all="ignore"):
        bound = np.array([sketch(parts, c).k + _log_kappa(c) for c in at])
        bound = np.where(np.isfinite(bound), bound, np.inf)
        c, period = (
            float(x)
            for x in period_for(
                np.asarray(highest * 1.0001),
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
        [quadrature(law, c, t, log_goal - 20.0 - float(np.log(part.times))) for law in part.branches] for part in parts
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
        k += part.times * total
        error += part.times * (1.1 * single + mixing * (1.0 + min(abs(total), 1.0)) + 8.0 * ROUNDOFF * abs(total))
        terms += part.times * abs(total)
    return k, error + (len(parts) + 8.0) * ROUNDOFF * terms


def _log_modulus(parts: list[Part], laws: list[list[Quadrature]], t: Array) -> Array:
    """A bound of log |e^{K(c + it') - K(c)}| for all t' >= t."""
    found = np.zeros(t.shape)
    for part, row in zip(parts, laws, strict=True):
        portion, _ = _portions(part, row)
        gap = np.zeros(t.shape)
        for share, branch in zip(portion, row, strict=True):
            gap += share * largest_modulus_gap(branch, t)
        found += part.times * np.log1p(-np.minimum(gap * (1.0 - 1e-9), 1.0 - 1e-16))
    return found


def _cut_off(parts: list[Part], laws: list[list[Quadrature]], log_z: float, log_delta: float) -> float:
    """A t beyond which the integrand is negligible."""
    deviation = np.sqrt(
        sum(
            part.times
            * sum(
                float(p) * float(np.sum(q.p * (q.log_mix - np.sum(q.p * q.log_mix)) ** 2))
                for p, q in zip(_portions(part, row)[0], row, strict=True)
            )
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


def largest_modulus_gap(branch: Quadrature, t: Array) -> Array:
    """A lower bound of 1 - |M(c + i t')|/M(c) for all t' >= t, (T,)."""
    return np.maximum(_by_level_sets(branch, t), 1.0 - _on_lines(branch, t))


def _on_lines(branch: Quadrature, t: Array) -> Array:
    """|M(c + it)|/M(c) on the line u + iv towards which |e^{it loss}| = e^{-t arg mix} falls, the best of a few v."""
    law = branch.law
    spread = float(law.shift[-1] - law.shift[0])
    highest = min(0.5 * np.pi / spread if spread > 0.0 else np.inf, HIGHEST_LINE)
    found = np.ones(t.shape)
    for share in LINES:
        on = line(law, branch.power, branch.u, branch.step, share * highest, branch.log_m)
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
    for _ in range(PEELS):
        if not np.any(height > 0.0):
            break
        under = _unimodal(height, int(np.argmax(height)))
        height = np.maximum(height - under, 0.0)
        order = np.argsort(-under, kind="stable")
        span = np.cumsum(length[order])  # of the level set at each height
        fall = -np.diff(np.append(under[order], 0.0))
        kept = (fall > 0.0) & (span > 0.0)
        span, mass = span[kept], (span * fall)[kept]
        for block in range(0, t.size, BLOCK):
            some = slice(block, block + BLOCK)
            gap[some] += (mass * (1.0 - _sinc(0.5 * t[some, None] * span))).sum(axis=1)
    return np.clip(gap - 1e-12, 0.0, 1.0)


def _cells(branch: Quadrature) -> tuple[Array, Array]:
    """Lengths of the cells in the loss, from below, and the density there, from below."""
    spread = float(branch.law.shift[-1] - branch.law.shift[0])
    bend = -1.0 + max(branch.power, 0.0) * 0.25 * spread**2  # largest second derivative of the logarithm
    low = np.minimum(branch.p[:-1], branch.p[1:]) / branch.step * np.exp(-max(bend, 0.0) * branch.step**2 / 8.0)
    slope = np.maximum(branch.slope[1:], branch.slope[:-1])
    length = np.maximum(
        np.diff(branch.log_mix) * (1.0 - 1e-6)
        - 1e-13 * (1.0 + np.abs(branch.log_mix[1:]) + branch.law.shift.size / 64.0),
        0.0,
    )
    with np.errstate(divide="ignore", invalid="ignore"):
        height = np.where((length > 0.0) & (slope > 0.0), HEIGHT_SHARE * low / slope, 0.0)
    # a cell holds no more than its density times its width, whatever the rounding of its length
    most = HEIGHT_SHARE * low * branch.step
    with np.errstate(divide="ignore", invalid="ignore"):
        height = np.where(length > 0.0, np.minimum(height, most / np.where(length > 0.0, length, 1.0)), 0.0)
    return length, height


def _unimodal(height: Array, mode: int) -> Array:
    """The largest function under `height` that falls on both sides of a place."""
    right = np.minimum.accumulate(height[mode:])
    left = np.minimum.accumulate(height[mode::-1])[::-1]
    return np.concatenate([left[:-1], right])


def _sinc(y: Array) -> Array:
    """sup over y' >= y of |sin y'|/y'."""
    near = np.where(y < 1e-4, 1.0, np.sin(np.minimum(y, np.pi)) / np.maximum(y, 1e-300))
    near = np.where(y < 1e-4, 1.0 - y * y / 6.0 * (1.0 - 1e-6), near)
    return np.where(y < np.pi, np.maximum(near, SIDE_LOBE), np.minimum(SIDE_LOBE, 1.0 / np.maximum(y, 1e-300)))
