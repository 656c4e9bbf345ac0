"""Special functions whose ready-made versions are not accurate enough; tested against mpmath.

XLA's float64 log1p is off by up to 240 units in the last place for x in (-.45, -.35) (JAX 0.10.2, CPU), and the
usual repair by the rounding of 1 + x does not survive: XLA rewrites (1 + x) - 1 to x.  `jax.scipy.special.log_ndtr`
is off by 4e-9 at -20.
"""

import jax.numpy as jnp
from jax import lax

__all__ = ["log1p", "log_ndtr"]


def log1p(x):
    """`log(1 + x)` for x > -1 to 5 units in the last place."""
    return jnp.where(jnp.abs(x) < 0.3, jnp.log1p(x), jnp.log(1.0 + x))


def log_ndtr(x):
    """`log Phi(x)`, of absolute error at most (8 + 2 x^2) units for x > -37; about -706 below."""
    half = 0.5 * lax.erfc(jnp.abs(x) * 0.5**0.5)
    return jnp.where(x > 0, log1p(-half), jnp.log(jnp.maximum(half, 1e-307)))
