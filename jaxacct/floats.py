"""Constants of float64 arithmetic, each written once."""

__all__ = ["LOST_TAIL", "ROUNDOFF", "SMALLEST_POSITIVE"]

ROUNDOFF = 2.0**-53
"""The unit roundoff: the largest relative error of one correctly rounded operation."""
LOST_TAIL = 1e-309
"""What SciPy's ndtr may be off by where it underflows: it is 0 from -37.68 on, where Phi is 6e-311."""
SMALLEST_POSITIVE = 5e-324
"""The least positive float64, which is subnormal."""
