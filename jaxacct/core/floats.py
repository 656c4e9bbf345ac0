"""Constants of float64 arithmetic, and the exceptions that numerical code may raise."""

ROUNDOFF = 2.0**-53
"""Unit roundoff: the largest relative error of one correctly rounded operation."""
LOST_TAIL = 1e-309
"""Bound of the error of SciPy's ndtr below -37.68, where ndtr underflows to 0 and Phi is at most 6e-311."""
SMALLEST_POSITIVE = 5e-324
"""Smallest positive float64, which is subnormal."""
FAILURES = (ArithmeticError, ValueError, IndexError, RuntimeError, MemoryError)
"""Exceptions that numerical code may raise on a row that it cannot answer."""
