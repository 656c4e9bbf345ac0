"""Composition of lattice laws by the FFT under an exponential tilt, with bounds of every error.

Part i has mass m_ik at loss s_i (o_i + k h), s_i = +1 or -1.  With the tilt e^{theta x} the weights
w_ik = m_ik e^{c_i k h}/M_i sum to 1, their n_i-fold cyclic convolution T is a real FFT, a power and its
inverse, and

    delta(eps) = e^{K(theta) - theta eps} sum_j T_j f(X_j - eps),    f(d) = e^{-theta d} (1 - e^{-d})_+,

with K(theta) = log E_P[e^{theta L}]: the rounding of the transform is relative to the tail's own size.

Rounding.  A transform of length N is off by at most r = 8 log2(N) u times the 1-norm of its input at each
frequency, and times its 2-norm in the 2-norm (Higham, Accuracy and Stability, Theorem 24.2, constant 7;
engines/README.md says why NumPy's keeps to 8).  The mass at k = 0 is kept out of the transform and added
afterwards, so that a near-atom costs u and not r.  The power is exp(n log|phi|), n arg phi: an error e of phi
becomes at most n e (|phi| + e)^{n-1}.  The polar form adds n u (22 + 3.2 R + (4 + R) |log|phi||) relatively for R
parts: hypot 6, arctan2 4 pi, log 4 |log|phi||, products 1 and sums R - 1 of pi and of |log|phi||; and once exp 4,
cos and sin 4, the last product 1.  The squares are summed over the frequencies, which bounds the 2-norm of the
error of T; Cauchy-Schwarz against f bounds that of delta.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from jaxacct.core.floats import ROUNDOFF
from jaxacct.kernels.arrays import Array, Namespace, namespace

__all__ = ["Composition", "Payoff", "compose", "payoff"]

FFT_CONSTANT = 8.0
"""Units of rounding of a transform over log2 of its length: Higham's constant is 7."""
ROUNDED_UP = 1.001
"""Factor for the rounding of an error bound's own arithmetic."""


class Composition(NamedTuple):
    """Tilted cyclic composition (N,), a bound of the 2-norm of its error, and log M_i at the three tilts."""

    mass: Array
    error: Array
    log_moments: Array


class Payoff(NamedTuple):
    """sum T f, minus its derivative's Q-part sum T e^{-(theta+1)d} 1[d > 0], |f|_2, and sum |T| f."""

    value: Array
    slope: Array
    norm: Array
    magnitude: Array


def compose(
    mass: Array, tilt: Array, direction: Array, count: Array, step: Array, roll: Array, upper: Array
) -> Composition:
    """Compose R lattice laws.

    Parameters
    ----------
    mass : (R, N) non-negative masses at index k;  tilt : (R, 3) exponents c_i of e^{c_i k h}: the tilt itself
        and two more at which only the moment is wanted (for Chernoff bounds).
    direction : (R,) s_i;  count : (R,) n_i >= 1;  step : h;  roll : index j0 of the first element returned.
    upper : rounds the masses up (True) or down, by the rounding of the tilt.

    Returns
    -------
    Composition : mass[i] is the tilted mass at cyclic index roll + i.
    """
    xp = namespace(mass, tilt, direction, count, step, roll, upper)
    laws, length = mass.shape
    place, full = step * xp.arange(length), mass
    if xp is np:  # laws of few atoms leave most nodes empty; one that is NaN is kept, and says so in the end
        there = np.flatnonzero((mass != 0).any(axis=0) | (np.arange(length) == 0))
        place, mass = place[there], mass[:, there]
    log_mass = xp.log(mass)

    def moment(c: Array) -> Array:
        return _log_sum_exp(xp, log_mass + c[:, None] * place)

    log_moments = xp.stack([moment(tilt[:, i]) for i in range(tilt.shape[1])], axis=1)
    tilted = tilt[:, :1] * place
    exponent = log_mass + tilted - log_moments[:, :1]
    size = xp.where(mass > 0, xp.abs(log_mass) + xp.abs(tilted), 0.0)
    slack = ROUNDOFF * (8.0 + 4.0 * (size + xp.abs(log_moments[:, :1])))
    weight = xp.where(mass > 0, xp.exp(exponent) * (1.0 + xp.where(upper, slack, -slack)), 0.0)
    if xp is np:
        some, weight = weight, np.zeros_like(full)
        weight[:, there] = some

    first = weight[:, :1]
    rest = xp.concatenate([xp.zeros_like(first), weight[:, 1:]], axis=1)
    relative = FFT_CONSTANT * ROUNDOFF * np.log2(length)
    phi = xp.fft.rfft(rest, axis=1) + first
    modulus = xp.abs(phi)
    wrong = relative * xp.sum(rest, axis=1, keepdims=True) + 2.0 * ROUNDOFF * modulus
    log_modulus, log_bound = xp.log(modulus), xp.log(modulus + wrong)
    times = count[:, None]
    angle = xp.sum(direction[:, None] * times * xp.angle(phi), axis=0)
    power = xp.exp(xp.sum(times * log_modulus, axis=0))
    largest = xp.exp(xp.sum(times * log_bound, axis=0))
    polar = ROUNDOFF * (22.0 + 3.2 * laws + (4.0 + laws) * xp.abs(log_bound))
    factor = xp.sum(times * (wrong / (modulus + wrong) + polar), axis=0)
    error = largest * (factor + ROUNDOFF * 12.0)
    spectrum = power * (xp.cos(angle) + 1j * xp.sin(angle))
    composed = xp.roll(xp.fft.irfft(spectrum, n=length), -roll)

    twice = xp.where(xp.arange(largest.size) % (largest.size - 1) == 0, 1.0, 2.0)  # but for the first and the last
    norm = xp.sqrt(xp.sum(twice * largest * largest) / length)
    total = xp.sqrt(xp.sum(twice * error * error) / length) + relative * norm
    return Composition(composed, ROUNDED_UP * total, log_moments)


def _log_sum_exp(xp: Namespace, x: Array) -> Array:
    """log of the sum of e^x along the last axis; -inf where every x is."""
    top = xp.max(x, axis=-1, keepdims=True)
    top = xp.where(top > -xp.inf, top, 0.0)
    return top[..., 0] + xp.log(xp.sum(xp.exp(x - top), axis=-1))


def payoff(mass: Array, start: Array, step: Array, theta: Array) -> Payoff:
    """Sums of T against the tilted payoff f; element i of `mass` lies at X - eps = start + i step."""
    xp = namespace(mass, start, step, theta)
    d = start + step * xp.arange(mass.shape[0])
    above = d > 0
    d = xp.where(above, d, 0.0)
    decay = xp.exp(-theta * d)
    f = xp.where(above, -decay * xp.expm1(-d), 0.0)
    slope = xp.where(above, decay * xp.exp(-d), 0.0)
    largest = xp.maximum(xp.max(f), 1e-300)
    norm = largest * xp.sqrt(xp.sum(xp.square(f / largest)))  # the squares of f itself may underflow
    return Payoff(xp.sum(mass * f), xp.sum(mass * slope), norm, xp.sum(xp.abs(mass) * f))
