"""The t-th power of the transforms at the nodes of a line Re z = c, and a bound of its errors (README.md, 2 to 5)."""

from typing import NamedTuple

import numpy as np

from jaxacct.core.floats import ROUNDOFF
from jaxacct.kernels.allocation.law import Windows, tail
from jaxacct.kernels.allocation.quadrature import nodes_of, panel_errors, rounding_units
from jaxacct.kernels.arrays import Array
from jaxacct.kernels.special import log1p_complex

__all__ = ["Line", "Powers", "powers_on", "turned_by"]


NEGLIGIBLE = 1e-24
"""Terms below this share of their sum are left out at the ends of the range of nodes."""
MOST_PRODUCTS = 32_000
"""Multiplications of one matrix product, at most."""


class Line(NamedTuple):
    """Where the integral is evaluated."""

    c: Array
    """(B,) the abscissa."""
    step: Array
    """(B,) of Im z, 2 pi over the period."""
    count: Array
    """(B,) index of the last node that is used."""


class Powers(NamedTuple):
    """The integrand relative to (A(c) + B(c))^t, and bounds of its error."""

    log_scale: Array
    """(B,) t log(A(c) + B(c)), the real part of the exponent at z = c."""
    value: Array
    """(B, N) complex, 0 beyond the last node that is used."""
    error: Array
    """(B, N)."""
    turn: Array
    """(B, N) Im z."""


def turned_by(angle: Array) -> Array:
    """e^{i angle} - 1 = 2 i tau/(1 - i tau) with tau = tan(angle/2): one tangent for a sine and a cosine.

    A relative error of tau is one of at most the same size of the result; NumPy's tangent is off by 4 ulp at most.
    """
    tau = np.tan(0.5 * angle)
    share = 2.0 * tau / (1.0 + tau * tau)
    found = np.empty(angle.shape, np.complex128)
    found.real, found.imag = -tau * share, share
    return found


def _tables(x: Array, step: Array, many: int) -> Array:
    """e^{i k step x} - 1 for k < many, (B, many, X)."""
    angle = np.arange(many)[None, :, None] * (step[:, None] * x)[:, None, :]
    return turned_by(angle)


def _spun(weight: Array, first: Array, second: Array, count: int) -> Array:
    """sum_x w (e^{iyx} - 1) at all y of the line from tables of its multiples, coarse and fine, (B, count)."""
    # in pieces too small for the linear algebra library to start threads of its own, which would wait for each other
    size = max(MOST_PRODUCTS // (first.shape[1] * second.shape[2]), 1)
    found: Array | float = 0.0
    for begin in range(0, weight.shape[1], size):
        some = slice(begin, begin + size)
        part = weight[:, some]
        left = first[:, :, some] * part[:, None, :]
        alone = np.sum(left, axis=2)[:, :, None]
        found = found + (alone + (left + part[:, None, :]) @ second[:, some])
    return np.reshape(found, (len(weight), -1))[:, :count]


def powers_on(line: Line, s: Array, t: Array, windows: Windows, ends: Array, sign: float) -> Powers:
    """(A + B)^t, or (A + B)^t - A^t where there is a bulk, at all nodes of the line."""
    count = int(line.count.max()) + 1
    whole: Array = np.isneginf(windows.low)
    nodes = nodes_of(s, t, windows, ends)
    c, step = line.c, line.step
    grown = np.exp(sign * c[:, None] * nodes.x)
    less = np.expm1(sign * c[:, None] * nodes.x)
    base = np.where(whole[:, None], nodes.jump, nodes.bulk)
    rest = np.where(whole[:, None], 0.0, nodes.jump)
    # what the base lacks of a probability law
    root = np.sqrt(1.0 + windows.low_blur**2)
    lack = np.where(whole, 0.0, tail(np.where(whole, 0.0, windows.low) / root))
    lost = np.where(whole, 0.0, 2.0 * tail((windows.end - np.where(whole, 0.0, windows.low)) / windows.low_blur))
    if sign > 0:
        lack = lack + np.where(whole, tail(windows.high / np.sqrt(1.0 + windows.high_blur**2)), 0.0)
        lost = lost + tail((windows.end - windows.high) / windows.high_blur) * tail(windows.end)
        lost = lost + np.where(whole, 0.0, tail((windows.high - windows.low) / (windows.low_blur + windows.high_blur)))
        lost_rest = np.zeros_like(lost)
    else:
        beyond = tail(windows.end) * np.exp(-c * np.exp(s * windows.end - 0.5 * s * s - np.log(t)))
        lack = lack + np.where(whole, tail(windows.end), 0.0)
        lost, lost_rest = lost + np.where(whole, beyond, 0.0), beyond
    small = np.exp(s * windows.start - 0.5 * s * s - np.log(t))
    below = tail(-windows.start)
    start_grown = np.exp(np.maximum(sign, 0.0) * c * small)
    departure = np.sum(base * less, axis=1) - lack
    direct = ~(departure > -0.5)  # the sum itself is more accurate than 1 less what it lacks
    at_c = np.where(direct, np.maximum(np.sum(base * grown, axis=1), 1e-200), 1.0 + departure)
    log_at_c = np.where(direct, np.log(at_c), np.log1p(np.where(direct, 0.0, departure)))
    rest_at_c = np.sum(rest * grown, axis=1)
    log_total = log_at_c + np.log1p(rest_at_c / at_c)
    total = np.exp(log_total)
    # tables of e^{i k h x} - 1
    fine = int(np.ceil(np.sqrt(count)))
    coarse = -(-count // fine)
    first = _tables(nodes.x, sign * step * fine, coarse)
    second = _tables(nodes.x, sign * step, fine).transpose(0, 2, 1)
    spun, dropped = [], []
    for weight in (base * grown, rest * grown):
        # bulk and jumps have each their own range of nodes; what is left out is counted as an error
        large = np.flatnonzero(np.any(weight > NEGLIGIBLE * np.sum(weight, axis=1)[:, None], axis=0))
        if large.size:
            some = slice(large[0], large[-1] + 1)
            spun.append(_spun(weight[:, some], first[:, :, some], second[:, some], count))
            dropped.append(2.0 * (np.sum(weight[:, : some.start], axis=1) + np.sum(weight[:, some.stop :], axis=1)))
        else:
            spun.append(np.zeros((len(c), count), np.complex128))
            dropped.append(2.0 * np.sum(weight, axis=1))
    turn = np.arange(count) * step[:, None]
    used = np.arange(count) <= line.count[:, None]
    moved, other = spun[0], spun[1] + rest_at_c[:, None]
    at = at_c[:, None]
    a, b = moved.real / at, moved.imag / at
    bent = np.abs(a) + b * b  # 2 a + a^2 + b^2 may cancel
    log_base = log_at_c[:, None] + log1p_complex(a, b)
    size_base = np.exp(log_base.real - log_total[:, None])
    t_ = t[:, None]
    main = np.exp(t_ * (log_base - log_total[:, None]))
    if whole.all():
        value, size_rest, log_more = main, np.zeros_like(size_base), np.zeros_like(log_base)
    else:
        quotient = other * np.exp(-log_base)
        a, b = quotient.real, quotient.imag
        log_more = log1p_complex(a, b)
        w = t_ * log_more
        half = np.sin(0.5 * w.imag)
        grow = np.expm1(np.minimum(w.real, 700.0))
        more = (grow * np.cos(w.imag) - 2.0 * half * half) + 1j * (1.0 + grow) * np.sin(w.imag)
        # where A^t is the smaller by far, the difference is taken as such: A^t may underflow
        both = np.exp(t_ * (log_base + log_more - log_total[:, None]))
        value = np.where(whole[:, None], main, np.where(w.real > 30.0, both - main, main * more))
        size_rest = np.where(whole[:, None], 0.0, np.abs(other) / total[:, None])
    # errors, relative to the total
    units = rounding_units(nodes, s, t, windows) * ROUNDOFF
    last = line.count * step
    quad_base, quad_rest = panel_errors(s, t, windows, ends, c, last, sign, ~direct)
    quad_base, quad_rest = np.where(whole, quad_rest, quad_base), np.where(whole, 0.0, quad_rest)
    fixed = np.sum(base * units * np.where(direct[:, None], grown, np.abs(less)), axis=1) + np.where(
        direct, 0.0, 600.0 * ROUNDOFF * lack
    )
    slope = 6.0 * np.sum(base * units * grown * nodes.x, axis=1) + np.where(direct, 0.0, below * small * start_grown)
    fixed = fixed + quad_base + lost + dropped[0] + np.where(direct, below, 0.0) + below * small * start_grown * c
    error_base = (fixed[:, None] + turn * slope[:, None]) / total[:, None]
    fixed = np.sum(rest * units * grown, axis=1) + quad_rest + lost_rest + dropped[1]
    fixed = fixed + np.where(whole, 0.0, below * start_grown * _above(windows, whole))
    slope = 6.0 * np.sum(rest * units * grown * nodes.x, axis=1)
    error_rest = np.where(whole[:, None], 0.0, (fixed[:, None] + turn * slope[:, None]) / total[:, None])
    reach = size_base + size_rest + error_base + error_rest
    log_reach = np.log(reach) + 4.0 * ROUNDOFF
    with np.errstate(over="ignore", invalid="ignore"):
        powered = np.exp(np.minimum((t_ - 1.0) * log_reach, 700.0))
        per_base = np.where(
            whole[:, None], t_ * error_base, t_ * (t_ - 1.0) * (size_rest + error_rest) * error_base / reach
        )
        error = powered * (per_base + t_ * error_rest)
        # the exponents' own rounding
        size = np.abs(value)
        error = error + ROUNDOFF * size * (
            40.0 + 12.0 * t_ * (np.abs(log_base) + np.abs(log_at_c)[:, None] + np.abs(log_total)[:, None])
        )
        error = error + ROUNDOFF * size * 12.0 * t_ * bent
        swell = np.exp(np.maximum(t_ * (log_base.real + np.maximum(log_more.real, 0.0) - log_total[:, None]), -745.0))
        error = error + np.where(whole[:, None], 0.0, 40.0 * ROUNDOFF * t_ * np.abs(log_more) * swell)
    value, error = np.where(used, value, 0.0), np.where(used, error, 0.0)
    return Powers(t * log_total, value, error, turn)


def _above(windows: Windows, whole: Array) -> Array:
    """An upper bound of 1 - w1 below the first node."""
    return tail((np.where(whole, 0.0, windows.low) - windows.start) / windows.low_blur)
