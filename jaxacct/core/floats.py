"""Constants of float64 arithmetic, and the exceptions that numerical code may raise."""

ROUNDOFF = 2.0**-53
"""Unit roundoff: the largest relative error of one correctly rounded operation."""
LOST_TAIL = 1e-309
"""Upper bound of the error of SciPy's ndtr below -37.68. There ndtr returns 0, and the true Phi is at most 6e-311."""
SMALLEST_POSITIVE = 5e-324
"""Smallest positive float64, which is subnormal."""
FAILURES = (ArithmeticError, ValueError, IndexError, RuntimeError, MemoryError)
"""Exceptions that numerical code may raise on a row that it cannot answer."""
