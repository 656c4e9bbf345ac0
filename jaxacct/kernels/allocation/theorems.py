"""Brackets of one round's delta in closed form, which hold for every sigma and t (README.md, section 6)."""

import numpy as np

from jaxacct.core.floats import ROUNDOFF
from jaxacct.kernels.allocation.law import tail
from jaxacct.kernels.arrays import Array
from jaxacct.kernels.special import log_ndtr

__all__ = ["bounds", "guess"]

RARE = 0.1
"""Chance of a large slot below which it is looked at by itself in a guess."""
LEAST_VARIANCE = 1e-300
"""Added to the variance of S, whose s^2 may underflow."""


def bounds(sign: float, s: Array, t: Array, k: Array) -> tuple[Array, Array]:
    """(lower, upper) of E(S - k)_+ (sign = 1) or E(k - S)_+ (sign = -1), (B,).

    Above: S has mean 1 and variance v = (e^{s^2} - 1)/t, hence `(sqrt(v + (k-1)^2) -+ (k-1))/2` (Scarf); and 1 or k.
    Below: the payoff on {some X_i > tk}, where S > k, or on {all X_i <= k}, where S <= k; and (1 - k)_+ or (k - 1)_+.
    """
    with np.errstate(all="ignore"):
        variance = np.expm1(s * s) / t * (1.0 + (16.0 + 8.0 * s * s) * ROUNDOFF) + LEAST_VARIANCE
        away = sign * (k - 1.0)
        root = np.hypot(np.sqrt(variance), away)
        upper = 0.5 * np.where(away > 0.0, variance / (root + away), root - away) * (1.0 + 32.0 * ROUNDOFF)
        upper = np.fmin(upper + 32.0 * ROUNDOFF * np.maximum(-away, 0.0), np.where(sign > 0, 1.0, k))
        if sign > 0:
            edge = (np.log(t) + np.log(k)) / s + 0.5 * s
            far, far_x = tail(edge), tail(edge - s)
            gone, gone_x = t * np.log1p(-far), np.log1p(-far_x) + (t - 1.0) * np.log1p(-far)
            first, second = -np.expm1(gone_x), -np.expm1(gone)
            doubt = (100.0 + 10.0 * (edge * edge + s * np.abs(edge))) * ROUNDOFF * (first + k * second)
            lower = first - k * second - doubt
        else:
            edge = np.log(k) / s + 0.5 * s
            log_m, log_mx = log_ndtr(edge), log_ndtr(edge - s)
            shrunk, m, mx = np.exp((t - 1.0) * log_m), np.exp(log_m), np.exp(log_mx)
            units = 100.0 + 20.0 * t * (1.0 + np.abs(log_m)) + 10.0 * (np.abs(edge) + s) ** 2
            lower = shrunk * (k * m - mx) - units * ROUNDOFF * shrunk * (k * m + mx)
        lower = np.fmax(lower, np.maximum(-away, 0.0) * (1.0 - 4.0 * ROUNDOFF))
        upper = np.where(np.isnan(upper), np.where(sign > 0, 1.0, k), upper)
    return np.where(lower <= upper, lower, 0.0), upper


def guess(sign: float, s: Array, t: Array, k: Array) -> Array:
    """log of about E(S - k)_+ or E(k - S)_+: the law of S taken for lognormal, or one large slot, the others 1."""
    with np.errstate(all="ignore"):
        spread = np.sqrt(np.log1p(np.expm1(np.minimum(s * s, 600.0)) / t))
        d = -np.log(k) / spread
        plus, minus = d + 0.5 * spread, d - 0.5 * spread
        if sign > 0:
            first, second = log_ndtr(plus), np.log(k) + log_ndtr(minus)
        else:
            first, second = np.log(k) + log_ndtr(-minus), log_ndtr(-plus)
        found = first + np.log(-np.expm1(np.minimum(second - first, -1e-12)))
        low = np.log(np.maximum(bounds(sign, s, t, k)[0], 1e-300))
        if sign < 0:
            return np.where(np.isnan(found), low, found)
        strike = t * (k - 1.0)
        edge = np.log(strike) / s + 0.5 * s
        first, second = log_ndtr(s - edge), np.log(k - 1.0) + np.log(t) + log_ndtr(-edge)
        large = first + np.log(-np.expm1(np.minimum(second - first, -1e-12)))
        return np.fmax(np.fmax(found, low), np.where(t * tail(edge) < RARE, large, -np.inf))
