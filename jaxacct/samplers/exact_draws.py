"""Exact random draws in integer arithmetic. Nothing is rounded, so a draw has exactly the law that its proof assumes.

Discrete laws: Canonne, Kamath, Steinke (2020), Algorithms 1 to 3. Others: README.md, "Rounded Gaussian noise".
"""

from __future__ import annotations

import hmac
import itertools
import math
import numbers
import random
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from jaxacct.core.validation import InputError


def bernoulli_exp(exponent: Fraction, rng: random.Random) -> bool:
    """Return True with a probability of exactly exp(-exponent), for a rational exponent >= 0."""
    while exponent > 1:
        if not _bernoulli_exp_unit(Fraction(1), rng):
            return False
        exponent -= 1
    return _bernoulli_exp_unit(exponent, rng)


def discrete_laplace(scale: Fraction, rng: random.Random) -> int:
    """Draw an integer x with a probability of exactly tanh(1/(2 scale)) exp(-|x|/scale)."""
    return _signed(lambda: _geometric(scale, rng), rng)


def discrete_gaussian(variance: Fraction, rng: random.Random) -> int:
    """Draw an integer x with a probability exactly proportional to exp(-x^2 / (2 variance))."""
    return _signed(lambda: _half_gaussian(variance, rng), rng)


def rounded_gaussian(variance: Fraction, rng: random.Random) -> int:
    """Draw from N(0, variance) exactly, and round the draw to the nearest integer."""
    # |x| for x ~ N(0, square) is drawn as h + u, an integer plus a fraction. x/2^(digits + 1) is N(0, variance).
    square, digits = 4 * variance, 0
    while square < 1:
        square, digits = 4 * square, digits + 1
    while True:
        h, u = _half_gaussian(square, rng), _Uniform(rng)
        # if h + u is kept with probability exp(-(2 h u + u^2) / (2 square)), it has the law of |x|
        if _bernoulli_exp_product(h / square, u.above, rng) and _bernoulli_exp_product(1 / (2 * square), u.twice, rng):
            size = ((h >> digits) + 1) // 2
            return -size if rng.getrandbits(1) else size


def _geometric(scale: Fraction, rng: random.Random) -> int:
    """Draw an integer x >= 0 with probability proportional to exp(-x/scale)."""
    t, s = scale.numerator, scale.denominator
    while True:
        low = rng.randrange(t)
        if not bernoulli_exp(Fraction(low, t), rng):
            continue
        high = 0
        while bernoulli_exp(Fraction(1), rng):
            high += 1
        return (low + t * high) // s


def _half_gaussian(variance: Fraction, rng: random.Random) -> int:
    """Draw an integer x >= 0 with probability proportional to exp(-x^2 / (2 variance))."""
    t = math.isqrt(variance.numerator // variance.denominator) + 1
    while True:
        x = _geometric(Fraction(t), rng)
        if bernoulli_exp((x - variance / t) ** 2 / (2 * variance), rng):
            return x


def _signed(size_of: Callable[[], int], rng: random.Random) -> int:
    """Return a drawn size with a random sign. -0 is drawn again, since 0 would otherwise be twice as likely."""
    while True:
        size, negative = size_of(), rng.randrange(2) == 1
        if not (negative and size == 0):
            return -size if negative else size


class _Uniform:
    """A uniform random number in [0, 1). Each of its binary digits is drawn when it is first needed."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._digits: list[int] = []

    def above(self) -> bool:
        """Return True with probability x, the value of this number: whether a fresh uniform number is below x."""
        for place in itertools.count():
            if place == len(self._digits):
                self._digits.append(self._rng.getrandbits(1))
            other = self._rng.getrandbits(1)
            if other != self._digits[place]:
                return other < self._digits[place]
        raise AssertionError

    def twice(self) -> bool:
        """Return True with probability x^2, where x is the value of this number."""
        return self.above() and self.above()


def _bernoulli_exp_product(factor: Fraction, coin: Callable[[], bool], rng: random.Random) -> bool:
    """Return True with probability `exp(-factor * p)`, where `coin` returns True with probability p at each toss."""
    pieces = math.ceil(factor)
    for _ in range(pieces):
        k, share = 1, factor / pieces
        while rng.randrange(share.denominator * k) < share.numerator and coin():
            k += 1
        if k % 2 == 0:
            return False
    return True


def _bernoulli_exp_unit(exponent: Fraction, rng: random.Random) -> bool:
    """Return True with probability exp(-exponent), for an exponent in [0, 1], by the alternating series of exp."""
    k = 1
    while rng.randrange(exponent.denominator * k) < exponent.numerator:
        k += 1
    return k % 2 == 1


class KeyedBits(random.Random):
    """Source of random bits: HMAC-SHA256 of a counter under a secret key of 32 bytes, which fixes all of the bits."""

    def __init__(self, key: bytes) -> None:
        super().__init__()
        self._key, self._block, self._held, self._count = key, 0, 0, 0

    def getrandbits(self, k: int, /) -> int:
        while self._count < k:
            block = hmac.digest(self._key, self._block.to_bytes(8, "little"), "sha256")
            self._held |= int.from_bytes(block, "little") << self._count
            self._block, self._count = self._block + 1, self._count + 256
        found = self._held & ((1 << k) - 1)
        self._held, self._count = self._held >> k, self._count - k
        return found

    def random(self) -> float:
        raise NotImplementedError  # the exact draws use random bits only, and never a random float


def generator(rng: random.Random | None) -> random.Random:
    """Return a source of random bits: `rng`, or the source of the operating system if `rng` is None."""
    if rng is None:
        return random.SystemRandom()
    if not isinstance(rng, random.Random):
        raise InputError(f"rng must be a random.Random, not {type(rng).__name__}; use random.Random(seed) in tests")
    return rng


def rational(name: str, value: Any, *, positive: bool = True) -> Fraction:
    """Convert a finite number to the fraction that equals it exactly. If `positive`, refuse a number <= 0."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise InputError(f"{name} = {value!r:.40} must be a number; use an int, a float or a Fraction")
    if isinstance(value, numbers.Rational):
        exact = Fraction(int(value.numerator), int(value.denominator))
    elif math.isfinite(value):
        exact = Fraction(float(value))
    else:
        raise InputError(f"{name} = {value!r} must be finite; use an int, a float or a Fraction")
    if positive and exact <= 0:
        raise InputError(f"{name} = {value!r} must be > 0; use a positive, finite number")
    return exact


def whole(name: str, value: Any) -> int:
    """Convert an integer to an `int`. Refuse every float, even 3.0, since it may already have been rounded."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise InputError(f"{name} = {value!r:.40} must be an integer; round and scale before adding integer noise")
    return int(value)


def round_up(exact: Fraction) -> float:
    """Return the smallest float64 that is at least the fraction."""
    try:
        value = float(exact)
    except OverflowError:
        return math.inf
    return math.nextafter(value, math.inf) if Fraction(value) < exact else value
