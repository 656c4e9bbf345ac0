"""Probability generating functions `phi(x) = E[x^K]` of K, the number of times a selection runs its base mechanism.

They take `y = 1 - x` to keep all digits near x = 1, where the phi of a law with many repetitions varies most.
Derivatives are in x: phi' and phi'' are convex and non-decreasing.
"""

from typing import Any

import numpy as np
from jax import lax

from jaxacct.kernels.arrays import Array, Namespace, log1p_inline, namespace


def _log_base(xp: Namespace, gamma: Array, y: Array) -> Array:
    """Return `log(1 - (1-gamma) x)` with a small relative error, for gamma near 0 and near 1 as well."""
    base = gamma + (1.0 - gamma) * y
    return xp.where(base < 0.7, xp.log(base), xp.log1p(-(1.0 - gamma) * (1.0 - y)))


def truncated_negative_binomial(eta: Array, gamma: Array, y: Array) -> tuple[Array, Array, Array]:
    """Return (phi, phi', phi'') for `phi = ((1 - (1-gamma) x)^-eta - 1)/(gamma^-eta - 1)`."""
    # `(base/gamma)^-eta expm1(eta log base)/expm1(eta log gamma)` does not overflow for large eta, nor cancel for small
    xp = namespace(eta, gamma, y)
    log_base, (grown, log_gamma, flat, below, first, second) = _log_base(xp, gamma, y), grown_base(eta, gamma, y)
    value = xp.where(flat, log_base / log_gamma, grown * xp.expm1(eta * log_base) / below)
    return value, first, second


def grown_base(eta: Array, gamma: Array, y: Array) -> tuple[Array, ...]:
    """For b = (1 - (1-gamma) x)/gamma return (b^-eta, log gamma, eta == 0, expm1(eta log gamma), phi', phi'')."""
    xp = namespace(eta, gamma, y)
    log_gamma = _log_base(xp, gamma, xp.zeros_like(gamma))
    whole = eta * log_gamma
    flat = xp.abs(whole) < 1e-290  # where True, the formulas for eta = 0 are used
    below = xp.where(flat, 1.0, xp.expm1(whole))
    grown = xp.exp(-eta * log1p_inline((1.0 - gamma) * y / gamma))
    scale = xp.where(flat, -1.0 / log_gamma, -eta / below)
    base = gamma + (1.0 - gamma) * y
    first = scale * (1.0 - gamma) / base * grown
    return grown, log_gamma, flat, below, first, first * (eta + 1.0) * (1.0 - gamma) / base


def poisson(mean: Array, y: Array) -> tuple[Array, Array, Array]:
    """Return (phi, phi', phi'') for `phi = e^{mean (x - 1)}`."""
    value = namespace(mean, y).exp(-mean * y)
    return value, mean * value, mean * mean * value  # `mean ** 2` of a Python float would raise OverflowError


def binomial(trials: Array, probability: Array, y: Array) -> tuple[Array, Array, Array]:
    """Return (phi, phi', phi'') for `phi = (1 - p + p x)^n`, with n = `trials` and p = `probability`."""
    log_base = _log_kept(probability, y)
    return namespace(trials, log_base).exp(trials * log_base), *binomial_slopes(trials, probability, y)


def _log_kept(probability: Array, y: Array) -> Array:
    """Return `log(1 - p y)` for p = `probability`, or -1e300 where p = y = 1."""
    with np.errstate(divide="ignore"):
        # -1e300 replaces log 0 = -inf, since -inf times 0 is NaN.
        return namespace(probability, y).maximum(log1p_inline(-probability * y), -1e300)


def binomial_slopes(trials: Array, probability: Array, y: Array) -> tuple[Array, Array]:
    """Return only (phi', phi'') of the binomial law."""
    xp, log_base = namespace(trials, probability, y), _log_kept(probability, y)
    first = trials * probability * xp.exp((trials - 1.0) * log_base)
    return first, trials * (trials - 1.0) * probability**2 * xp.exp(xp.maximum(trials - 2.0, 0.0) * log_base)


def binomial_base(probability: Array, x: Array, y: Array) -> tuple[Array, Array]:
    """Return (log b, b) for b = max(1 - p + p x, 1e-300), with p = `probability` and y = 1 - x."""
    base = np.maximum((1.0 - probability) + probability * x, 1e-300)
    return np.where(base < 0.5, np.log(base), np.log1p(-np.minimum(probability * y, 0.5))), base


def categorical(probabilities: Array, y: Array) -> tuple[Array, Array, Array]:
    """Return (phi, phi', phi'') for `phi = sum p_k x^k`, with p_k = `probabilities[k]`, by Horner's rule."""
    xp = namespace(probabilities, y)
    x = 1.0 - y
    if xp is np:
        return polynomial(np.asarray(probabilities), x)

    def step(carry: tuple[Array, Array, Array], p: Array) -> tuple[tuple[Array, Array, Array], None]:
        value, first, second = carry
        return (value * x + p, first * x + value, second * x + 2.0 * first), None

    zero = xp.zeros_like(x)
    return lax.scan(step, (zero, zero, zero), probabilities[::-1])[0]


def categorical_rise(probabilities: Array, x: Array, d: Array) -> Array:
    """Return phi(x) - phi(x - d) for `phi = sum p_k x^k`, as d times a divided difference without negative terms."""
    before = np.maximum(x - d, 0.0)
    value = divided = np.zeros(np.broadcast_shapes(np.shape(x), np.shape(d), np.shape(probabilities)[1:]))
    power = gap = 0
    for k in _degrees(probabilities):
        if power:
            gap = power - k
            value, divided = (
                value * _power(x, gap),
                divided * _power(before, gap) + value * _sum_of_powers(x, before, gap),
            )
        value, power = value + probabilities[k], k
    return d * (divided * _power(before, power) + value * _sum_of_powers(x, before, power))


def _power(x: Any, degree: int) -> Any:
    """Return `x^n` for n = `degree`, by squaring. The relative error is at most 2 n roundoffs."""
    found = np.ones_like(x)
    for bit in bin(degree)[2:]:
        found = found * found * x if bit == "1" else found * found
    return found


def _sum_of_powers(x: Any, before: Any, degree: int) -> Any:
    """Return `s_n = sum_i x^i b^{n-1-i} = (x^n - b^n)/(x - b)`, n = `degree` and b = `before`, without subtractions."""
    # The bits of n, from the leading bit on, select s_2m = s_m (x^m + b^m) or s_{2m+1} = x s_2m + b^2m.
    total, x_power, before_power = np.zeros_like(x * before), np.ones_like(x * before), np.ones_like(x * before)
    for bit in bin(degree)[2:]:
        total = total * (x_power + before_power)
        x_power, before_power = x_power**2, before_power**2
        if bit == "1":
            total = total * x + before_power
            x_power, before_power = x_power * x, before_power * before
    return total


def polynomial(probabilities: Any, x: Any) -> tuple[Any, Any, Any]:
    """Return (phi, phi', phi'') for `phi = sum p_k x^k` by Horner's rule, skipping degrees absent from the batch."""
    value = first = second = np.zeros(np.broadcast_shapes(np.shape(x), np.shape(probabilities)[1:]))
    power = 0
    for k in (*_degrees(probabilities), 0):
        gap = power - k
        if power and gap == 1:
            value, first, second = value * x, first * x + value, second * x + 2.0 * first
        elif power and gap:
            low = _power(x, gap - 2)
            grown, slope, bend = low * x * x, gap * (low * x), gap * (gap - 1.0) * low
            value, first, second = (
                value * grown,
                first * grown + value * slope,
                second * grown + 2.0 * first * slope + value * bend,
            )
        if k != power or not power:
            value, power = value + probabilities[k], k
    return value, first, second


def _degrees(probabilities: Any) -> list[int]:
    """Return, in descending order, the degrees k >= 1 whose probability is positive somewhere in the batch."""
    other = np.any(np.asarray(probabilities) != 0.0, axis=tuple(range(1, np.ndim(probabilities))))
    return [int(k) for k in np.flatnonzero(other)[::-1] if k > 0]
