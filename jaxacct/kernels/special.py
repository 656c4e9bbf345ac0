"""The model of rounding that every bound rests on, sums that keep to it, and special functions accurate enough for it.

Tests compare this machine with the model, by mpmath. README.md of this folder, section 4, uses the model:

* A sum, difference, product, quotient or square root is off by at most one unit of its value. XLA may contract a
  product with a sum into one rounding. No bound needs a product to be rounded by itself, so that either way holds.
* exp, log and arctan2 are off by at most SIMPLE_UNITS of their value, at any argument. So are sin(x) and cos(x) where
  |x| <= LARGEST_ANGLE; beyond it they are off by SIMPLE_UNITS of 1. (glibc's are off by 10^5 units of their value at
  10^200, near multiples of pi/2. No bound needs more: a sine is relative only to an angle, and 4 units of 1 are less
  than 4 units of such an angle.)
* log1p as in special.py, expm1, hypot and logistic are off by at most COMPOUND_UNITS, erfc(x) by
  SIMPLE_UNITS (4 + x^2).
* Results below SMALLEST_NORMAL may be replaced by 0.
* A sum of n terms, in any order, is off by at most n - 1 units of the sum of their magnitudes.

NumPy's log1p is accurate. XLA's is off by up to 240 units for x in (-.45, -.35), and `jax.scipy.special.log_ndtr` by
4e-9 at -20 (JAX 0.10.2, CPU).
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxacct.kernels.arrays import Array, erfc, keep_apart, namespace

SIMPLE_UNITS = 4.0
"""Error of exp, log, sin, cos and arctan2, in units of the value; twice the measured error (README.md)."""
COMPOUND_UNITS = 6.0
"""Error of log1p, expm1, hypot and logistic, in units of the value; 1.5 times the measured error."""
LARGEST_ANGLE = 1e8
"""Largest angle at which a sine or cosine has this relative error. glibc reduces larger angles in another way."""
SMALLEST_NORMAL = 2.0**-1022
"""The least positive normal number."""
BLOCK_SIZE = 64
"""Terms that are summed at a stretch: about the square root of the longest sums, which makes the bound least."""
_ROOT_HALF_BITS = 0x3FE6A09E667F3BCD
"""The bits of sqrt(1/2)."""
_LN2_HIGH = 6.93147180369123816490e-01
"""The first 32 bits of log 2, so that k times it is exact for the exponent k of any float64."""
_LN2_LOW = 1.90821492927058770002e-10
"""log 2 less _LN2_HIGH."""
_ARTANH_SERIES = (
    6.666666666666735130e-01,
    3.999999999940941908e-01,
    2.857142874366239149e-01,
    2.222219843214978396e-01,
    1.818357216161805012e-01,
    1.531383769920937332e-01,
    1.479819860511658591e-01,
)
"""Coefficients of `2 artanh(s)/s - 2` in s^2, from fdlibm's e_log.c."""
_ASYMPTOTIC_BELOW = -36.0
"""Below this argument Phi is computed by its asymptotic series, since erfc underflows from -37.5 on."""


def log1p(x: Array) -> Array:
    """Return `log(1 + x)` for x > -1, to 5 units in the last place."""
    if namespace(x) is np:
        return np.log1p(x)
    return jnp.where(jnp.abs(x) < 0.3, jnp.log1p(x), jnp.log(1.0 + x))


def log1p_inline(x: Array) -> Array:
    """Return `log(1 + x)` for x >= -1, to one unit in the last place; half the time of `log1p`, more to compile.

    Kernels that do little else use it. The engines' kernels run no faster with it, and compile for a fifth longer.
    """
    return np.log1p(x) if namespace(x) is np else _log1p_by_bits(x)


def log1p_complex(a: Array, b: Array) -> Array:
    """Return log(1 + a + ib) on NumPy, within a few units of |a + ib| where that is small.

    NumPy's own complex log1p is within a few units of 1, however small its argument is.
    """
    square = 2.0 * a + a * a + b * b
    near = (square > -0.75) & (square < 1e8)
    with np.errstate(divide="ignore"):
        size = np.log(np.hypot(1.0 + a, b))
    return np.where(near, 0.5 * np.log1p(np.where(near, square, 0.0)), size) + 1j * np.arctan2(b, 1.0 + a)


@jax.custom_jvp
def _log1p_by_bits(x: Array) -> Array:
    """Return `log1p_inline` for XLA.

    1 + x = 2^k m with m in (sqrt(1/2), sqrt 2), `log m = 2 artanh s`, s = (m - 1)/(m + 1), by the polynomial in s^2 of
    fdlibm's e_log.c (Sun Microsystems 1993). The rounding error of 1 + x, over 1 + x, is added.
    """
    one = jnp.where(jnp.isnan(x), 2.0, 1.0)  # XLA rewrites (1 + x) - 1 to x where it knows the 1
    whole = one + x
    rest = jnp.where(jnp.abs(x) >= 1.0, one - (whole - x), x - (whole - one)) / jnp.where(whole > 0.0, whole, 1.0)
    bits = lax.bitcast_convert_type(whole, jnp.int64)
    k = lax.shift_right_arithmetic(bits - _ROOT_HALF_BITS, jnp.int64(52))
    f = lax.bitcast_convert_type(bits - lax.shift_left(k, jnp.int64(52)), jnp.float64) - 1.0
    k, s = k.astype(jnp.float64), f / (2.0 + f)
    z, half = s * s, 0.5 * f * f
    w = z * z
    a, b, c, d, e, g, h = _ARTANH_SERIES
    series = z * (a + w * (c + w * (e + w * h))) + w * (b + w * (d + w * g))
    value = k * _LN2_HIGH - ((half - (s * (half + series) + (k * _LN2_LOW + rest))) - f)
    return jnp.where(
        whole > 0.0, jnp.where(whole < jnp.inf, value, jnp.inf), jnp.where(whole == 0.0, -jnp.inf, jnp.nan)
    )


@_log1p_by_bits.defjvp
def _(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    return _log1p_by_bits(primals[0]), tangents[0] / (1.0 + primals[0])


def log_ndtr(x: Array) -> Array:
    """Return `log Phi(x)`, of absolute error at most (12 + 3 x^2) units."""
    xp = namespace(x)
    less, more = _log_tails(x)
    return xp.where(x > 0.0, more, less)


def log_ndtr_sides(x: Array) -> tuple[Array, Array]:
    """Return (`log Phi(x)`, `log Phi(-x)`) as by `log_ndtr`, in the time of one."""
    xp = namespace(x)
    less, more = _log_tails(x)
    above = x > 0.0
    return xp.where(above, more, less), xp.where(above, less, more)


def _log_tails(x: Array) -> tuple[Array, Array]:
    """Return (`log Phi(-|x|)`, `log Phi(|x|)`)."""
    xp = namespace(x)
    size = xp.abs(x)
    half = 0.5 * erfc(xp, size * 0.5**0.5)
    far = xp.maximum(size, -_ASYMPTOTIC_BELOW)
    double = far * far
    square = 1.0 / double
    small = -square * (1.0 - 3.0 * square * (1.0 - 5.0 * square * (1.0 - 7.0 * square)))
    series = small * (1.0 - small * (0.5 - small / 3.0))  # log1p(small), |small| < 1e-3
    # One logarithm serves both cases, since logarithms take most of the time.
    beyond = size > -_ASYMPTOTIC_BELOW
    log = xp.log(xp.where(beyond, far, half))
    less = xp.where(beyond, -0.5 * double - 0.5 * np.log(2.0 * np.pi) + series - log, log)
    return less, log1p(-half)


def logsumexp(x: Array) -> Array:
    """Return `log sum e^x` along the last axis. SciPy's takes 70 microseconds a call, whatever the size."""
    xp = namespace(x)
    top = xp.max(x, axis=-1, keepdims=True)
    held = xp.where(xp.isfinite(top), top, 0.0)
    with np.errstate(divide="ignore"):
        return xp.log(xp.sum(xp.exp(x - held), axis=-1)) + held[..., 0]


def softplus(x: Array) -> Array:
    """Return `log(1 + e^x)`."""
    xp = namespace(x)
    return xp.maximum(x, 0.0) + xp.log1p(xp.exp(-xp.abs(x)))


def blocks(size: int) -> int:
    """Return the number of blocks into which `total` and the quadrature sums cut a number of points."""
    return size // BLOCK_SIZE if size % BLOCK_SIZE == 0 else 1


def total(x: Array) -> Array:
    """Return the sum of x, (X,), in two stages that a barrier keeps apart: off by at most sum_depth units."""
    xp = namespace(x)
    parts = xp.sum(xp.reshape(x, (*x.shape[:-1], blocks(x.shape[-1]), -1)), axis=-1)
    return xp.sum(keep_apart(xp, parts), axis=-1)


def sum_depth(size: int) -> float:
    """Return the largest error of `total`, in units of the sum of magnitudes."""
    return blocks(size) + size / blocks(size)
