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
    """`log Phi(x)`, of absolute error at most (12 + 3 x^2) units."""
    half = 0.5 * lax.erfc(jnp.abs(x) * 0.5**0.5)
    far = jnp.minimum(x, -36.0)
    square = far**-2
    small = -square * (1.0 - 3.0 * square * (1.0 - 5.0 * square * (1.0 - 7.0 * square)))
    series = small * (1.0 - small * (0.5 - small / 3.0))  # log1p(small), |small| < 1e-3
    # one logarithm for all three cases: they are what takes the time
    beyond, above = x < -36.0, x > 0.0
    log = jnp.log(jnp.where(beyond, -far, jnp.where(above, 1.0 - half, half)))
    log = jnp.where(above & (half < 0.3), jnp.log1p(-half), log)
    return jnp.where(beyond, -0.5 * far**2 - 0.5 * jnp.log(2.0 * jnp.pi) + series - log, log)
