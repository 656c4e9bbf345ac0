"""Balls: numbers with an enclosed error, from python-flint; every operation encloses its own rounding."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from jaxacct.verification.record import OutOfTime

try:
    from flint import acb, acb_mat, arb, ctx
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "ja.verify needs the package python-flint; pip install 'jaxacct[verify]'", name="flint"
    ) from error

__all__ = [
    "acb",
    "acb_mat",
    "arb",
    "ball",
    "between",
    "ctx",
    "ends",
    "gaussian_tail",
    "integrate",
    "outward",
    "precision",
    "tick",
    "until",
    "within",
]

_LOCK = threading.RLock()
_CLOCK = threading.local()


@contextmanager
def precision(bits: int) -> Iterator[None]:
    """Work at so many bits; the setting is the library's own and global, so that threads take turns."""
    with _LOCK:
        before = ctx.prec
        ctx.prec = max(int(bits), 53)
        try:
            yield
        finally:
            ctx.prec = before


@contextmanager
def until(deadline: float) -> Iterator[None]:
    """Let `tick` raise OutOfTime after a moment of `time.monotonic`."""
    before, _CLOCK.deadline = getattr(_CLOCK, "deadline", math.inf), deadline
    try:
        yield
    finally:
        _CLOCK.deadline = before


def tick() -> None:
    """Called between pieces of work."""
    if time.monotonic() > getattr(_CLOCK, "deadline", math.inf):
        raise OutOfTime


def ball(value: Any) -> Any:
    """The real number as given, exactly (a float or an integer)."""
    return arb(int(value) if isinstance(value, int) else float(value))


def between(low: Any, high: Any) -> Any:
    """The ball that holds both and everything between."""
    return arb(low).union(arb(high))


def within(radius: Any) -> Any:
    """The ball [-radius, radius] of a bound on an error."""
    bound = arb(radius).abs_upper()
    return (-bound).union(bound)


def ends(x: Any) -> tuple[Any, Any]:
    """Both ends of a ball, as exact balls."""
    return x.lower(), x.upper()


def outward(x: Any) -> tuple[float, float]:
    """Both ends of a ball as float64, rounded outward; -inf and inf where nothing is known."""
    if not x.is_finite():
        return -math.inf, math.inf
    low, high = float(x.lower()), float(x.upper())
    return math.nextafter(low, -math.inf), math.nextafter(high, math.inf)


def gaussian_tail(x: Any) -> Any:
    """Pr[N(0, 1) > x]."""
    return (x / arb(2).sqrt()).erfc() / 2


def integrate(function: Any, low: Any, high: Any, tolerance: Any) -> Any:
    """The integral of a function along a segment, enclosed.

    The function is called as ``function(z, analytic)`` with balls z.  Where ``analytic`` is true it must return
    something infinite unless it is analytic on the whole ball: every logarithm, root and power in it is given the
    flag, as in ``z.log(analytic)``.
    """
    return acb.integral(function, acb(low), acb(high), abs_tol=tolerance, rel_tol=tolerance)
