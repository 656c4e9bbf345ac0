"""Constants of float64 arithmetic, the exceptions that numerical code may raise, and bisection."""

from collections.abc import Callable
from typing import Any

import numpy as np

ROUNDOFF = 2.0**-53
"""Unit roundoff: the largest relative error of one correctly rounded operation."""
LOST_TAIL = 1e-309
"""Upper bound of the error of SciPy's ndtr below -37.68. There ndtr returns 0, and the true Phi is at most 6e-311."""
SMALLEST_POSITIVE = 5e-324
"""Smallest positive float64, which is subnormal."""
FAILURES = (ArithmeticError, ValueError, IndexError, RuntimeError, MemoryError)
"""Exceptions that numerical code may raise on a row that it cannot answer."""


def bisected(low: Any, high: Any, holds: Callable[[Any], Any], turns: int) -> tuple[np.ndarray, np.ndarray]:
    """Halve [low, high] `turns` times: a middle at which `holds` is true becomes `low`, any other `high`."""
    for _ in range(turns):
        middle = 0.5 * (low + high)
        right = holds(middle)
        low, high = np.where(right, middle, low), np.where(right, high, middle)
    return low, high
