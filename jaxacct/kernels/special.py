"""Special functions whose ready-made versions are not accurate enough; tested against mpmath.

XLA's float64 log1p is off by up to 240 units in the last place for x in (-.45, -.35) (JAX 0.10.2, CPU), and the
usual repair by the rounding of 1 + x does not survive: XLA rewrites (1 + x) - 1 to x.
"""

import jax.numpy as jnp

__all__ = ["log1p"]


def log1p(x):
    """`log(1 + x)` for x > -1 to 5 units in the last place."""
    return jnp.where(jnp.abs(x) < 0.3, jnp.log1p(x), jnp.log(1.0 + x))
