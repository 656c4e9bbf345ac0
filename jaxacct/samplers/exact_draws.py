"""Exact random draws from integer arithmetic alone: no rounding stands between a proof and its sample.

Source of all three algorithms: Canonne, Kamath, Steinke 2020, "The Discrete Gaussian for Differential
Privacy", Algorithms 1 to 3.
"""

from __future__ import annotations

import math
import numbers
import random
from fractions import Fraction
from typing import Any

from jaxacct.validation import InputError

__all__ = ["bernoulli_exp", "discrete_gaussian", "discrete_laplace", "generator", "rational", "round_up", "whole"]


def bernoulli_exp(exponent: Fraction, rng: random.Random) -> bool:
    """True with probability exp(-exponent), exactly, for a rational exponent >= 0."""
    while exponent > 1:
        if not _bernoulli_exp_unit(Fraction(1), rng):
            return False
        exponent -= 1
    return _bernoulli_exp_unit(exponent, rng)


def discrete_laplace(scale: Fraction, rng: random.Random) -> int:
    """An integer x with probability tanh(1/(2 scale)) exp(-|x|/scale), exactly."""
    t, s = scale.numerator, scale.denominator
    while True:
        low = rng.randrange(t)
        if not bernoulli_exp(Fraction(low, t), rng):
            continue
        high = 0
        while bernoulli_exp(Fraction(1), rng):
            high += 1
        size = (low + t * high) // s
        negative = rng.randrange(2) == 1
        if not (negative and size == 0):
            return -size if negative else size


def discrete_gaussian(variance: Fraction, rng: random.Random) -> int:
    """An integer x with probability proportional to exp(-x^2 / (2 variance)), exactly."""
    t = math.isqrt(variance.numerator // variance.denominator) + 1
    while True:
        x = discrete_laplace(Fraction(t), rng)
        if bernoulli_exp((abs(x) - variance / t) ** 2 / (2 * variance), rng):
            return x


def _bernoulli_exp_unit(exponent: Fraction, rng: random.Random) -> bool:
    """The same for 0 <= exponent <= 1, by the alternating series of exp."""
    k = 1
    while rng.randrange(exponent.denominator * k) < exponent.numerator:
        k += 1
    return k % 2 == 1


def generator(rng: random.Random | None) -> random.Random:
    """The source of random bits: the operating system's, unless a `random.Random` is given."""
    if rng is None:
        return random.SystemRandom()
    if not isinstance(rng, random.Random):
        raise InputError(f"rng must be a random.Random, not {type(rng).__name__}; use random.Random(seed) in tests")
    return rng


def rational(name: str, value: Any, *, positive: bool = True) -> Fraction:
    """A finite number as the exact fraction it holds; positive unless told otherwise."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise InputError(f"{name} = {value!r:.40} must be a number; use an int, a float or a Fraction")
    if isinstance(value, numbers.Rational):
        exact = Fraction(int(value.numerator), int(value.denominator))
    elif math.isfinite(value):
        exact = Fraction(float(value))
    else:
        raise InputError(f"{name} = {value!r} must be finite; use an int, a float or a Fraction")
    if positive and exact <= 0:
        raise InputError(f"{name} = {value!r} must be > 0; use a positive, finite {name.replace('_', ' ')}")
    return exact


def whole(name: str, value: Any) -> int:
    """An integer, exactly; integral floats are refused, since they may already have been rounded."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise InputError(f"{name} = {value!r:.40} must be an integer; round and scale before adding integer noise")
    return int(value)


def round_up(exact: Fraction) -> float:
    """The least float64 that is not below the fraction: guarantees are rounded away from privacy."""
    try:
        value = float(exact)
    except OverflowError:
        return math.inf
    return math.nextafter(value, math.inf) if Fraction(value) < exact else value
