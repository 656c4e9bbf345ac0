"""The model of rounding that every bound of the contour engine rests on, and sums that keep to it.

Stated here once; README.md of this folder, section 4, uses it, and the tests hold this machine to it:

* A sum, difference, product, quotient or square root is off by at most one unit of its value; a product with a sum
  may instead be rounded once (XLA contracts them on CPUs as it sees fit).  No bound needs a product to be rounded
  by itself, so that either way holds.
* exp, log and arctan2 are off by at most SIMPLE_UNITS of their value, at any argument; sin(x) and cos(x) where
  |x| <= LARGEST_ANGLE, and beyond it by SIMPLE_UNITS of 1.  (glibc's are off by 10^5 units of their value at 10^200,
  near multiples of pi/2.  No bound needs more: a sine is relative only to an angle, and 4 units of 1 are less than
  those of such an angle.)
* log1p as in special.py, expm1, hypot and logistic by at most COMPOUND_UNITS; erfc(x) by SIMPLE_UNITS (4 + x^2).
* Results below SMALLEST_NORMAL may be replaced by 0.
* A sum of n terms is taken in any order: off by at most n - 1 units of the sum of their magnitudes.
"""

from jaxacct.kernels.arrays import Array, keep_apart, namespace

SIMPLE_UNITS = 4.0
"""Units of its value by which exp, log, sin, cos and arctan2 may be off; twice what has been measured (README.md)."""
COMPOUND_UNITS = 6.0
"""The same of log1p, expm1, hypot and logistic; half as much again as has been measured."""
LARGEST_ANGLE = 1e8
"""Largest angle at which a sine or cosine is held to units of its value; glibc reduces larger ones in another way."""
SMALLEST_NORMAL = 2.0**-1022
"""The least positive normal number."""
BLOCK_SIZE = 64
"""Terms that are summed at a stretch: about the square root of the longest sums, which makes the bound least."""


def blocks(size: int) -> int:
    """How many blocks `total` and the quadrature sums make of a number of points."""
    return size // BLOCK_SIZE if size % BLOCK_SIZE == 0 else 1


def total(x: Array) -> Array:
    """The sum of x, (X,), in two stages, which the barrier keeps apart: its error is at most sum_depth units."""
    xp = namespace(x)
    parts = xp.sum(xp.reshape(x, (*x.shape[:-1], blocks(x.shape[-1]), -1)), axis=-1)
    return xp.sum(keep_apart(xp, parts), axis=-1)


def sum_depth(size: int) -> float:
    """Units of the sum of magnitudes by which `total` is off at most."""
    return blocks(size) + size / blocks(size)
