"""Ball arithmetic from python-flint, and the exceptions by which a verification stops.

A ball is a midpoint with a radius.  Every operation returns a ball that holds the results for all members of its
arguments, so that rounding is enclosed and never estimated.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from flint import acb as acb
from flint import arb, ctx

_LOCK = threading.RLock()
"""Held while python-flint's precision is changed. The precision is one global setting, so threads take turns."""
_CLOCK = threading.local()
"""Holds a `deadline` for each thread. Once `time.monotonic()` is past it, `tick` raises OutOfTime."""
PRODUCTS_AT_A_TIME = 2_000_000
"""Largest number of multiplications in one product of matrices. `tick` cannot be called during a product."""


class NotCovered(Exception):
    """The verifier has no definition of the mechanism that the message names."""


class OutOfTime(Exception):
    """The time limit was reached."""


class Unplanned(Exception):
    """No way to compute delta in reasonable time was found. The message says why."""


@contextmanager
def precision(bits: int) -> Iterator[None]:
    """Work at `bits` bits of precision. python-flint's setting is global, so threads wait for each other."""
    with _LOCK:
        before = ctx.prec
        ctx.prec = max(int(bits), 53)  # at least the 53 bits of a float64
        try:
            yield
        finally:
            ctx.prec = before


@contextmanager
def until(deadline: float) -> Iterator[None]:
    """Let `tick` raise OutOfTime once `time.monotonic()` is past `deadline`."""
    before, _CLOCK.deadline = getattr(_CLOCK, "deadline", math.inf), deadline
    try:
        yield
    finally:
        _CLOCK.deadline = before


def tick() -> None:
    """Raise OutOfTime after the deadline that `until` set. Long computations call `tick` between their pieces."""
    if time.monotonic() > getattr(_CLOCK, "deadline", math.inf):
        raise OutOfTime


def ball(value: Any) -> Any:
    """Return a float or an integer as an exact ball."""
    return arb(int(value) if isinstance(value, int) else float(value))


def between(low: Any, high: Any) -> Any:
    """Return the ball that holds both numbers and everything between them."""
    return arb(low).union(arb(high))


def within(radius: Any) -> Any:
    """Return the ball [-radius, radius], which holds every error of size at most `radius`."""
    bound = arb(radius).abs_upper()
    return (-bound).union(bound)


def outward(x: Any) -> tuple[float, float]:
    """Return both ends of a ball as float64, rounded outward; (-inf, inf) if the ball is not finite."""
    if not x.is_finite():
        return -math.inf, math.inf
    low, high = float(x.lower()), float(x.upper())
    return math.nextafter(low, -math.inf), math.nextafter(high, math.inf)


def digits_of(found: Any) -> int:
    """Return the number of decimal digits to which a ball is known: 99 if the ball is exact."""
    if not found.is_finite():
        return 0
    with precision(64):
        size, radius = found.abs_upper(), arb(found.rad())
        if radius.is_zero():
            return 99
        if size.is_zero():
            return 0
        return max(0, min(99, math.floor(float((size / radius).log().mid()) / math.log(10.0))))


def gaussian_tail(x: Any) -> Any:
    """Return Pr[N(0, 1) > x]."""
    return (x / arb(2).sqrt()).erfc() / 2
