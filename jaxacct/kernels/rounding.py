"""The model of rounding that every bound of the contour engine rests on, and sums that keep to it.

Stated here once; README.md of this folder, section 4, uses it, and the tests hold this machine to it:

* A sum, difference, product, quotient or square root is off by at most one unit of its value; a product with a sum
  may instead be rounded once (XLA contracts them on CPUs as it sees fit).  No bound needs a product to be rounded
  by itself, so that either way holds.
* exp, log, sin, cos and arctan2 are off by at most SIMPLE units of their value, at any argument.
* log1p as in special.py, expm1, hypot and logistic by at most COMPOUND units; erfc(x) by SIMPLE (4 + x^2).
* Results below TINY may be replaced by 0.
* A sum of n terms is taken in any order: off by at most n - 1 units of the sum of their magnitudes.
"""

import jax.numpy as jnp
from jax import lax

SIMPLE = 4.0
COMPOUND = 6.0
TINY = 2.0**-1022
BLOCK = 64
"""Terms that are summed at a stretch."""


def blocks(size):
    """How many blocks `total` and the quadrature sums make of a number of points."""
    return size // BLOCK if size % BLOCK == 0 else 1


def total(x):
    """The sum of a vector in two stages, which the barrier keeps apart: its error is at most sum_depth units."""
    return jnp.sum(lax.optimization_barrier(jnp.sum(x.reshape(blocks(x.size), -1), axis=1)))


def sum_depth(size):
    """Units of the sum of magnitudes by which `total` is off at most."""
    return blocks(size) + size / blocks(size)
