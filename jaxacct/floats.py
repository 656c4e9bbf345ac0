"""Constants of float64 arithmetic, each written once."""

__all__ = ["ROUNDOFF", "SMALLEST_POSITIVE"]

ROUNDOFF = 2.0**-53
"""The unit roundoff: the largest relative error of one correctly rounded operation."""
SMALLEST_POSITIVE = 5e-324
"""The least positive float64, which is subnormal."""
