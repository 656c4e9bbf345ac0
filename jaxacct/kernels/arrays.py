"""What all kernels share: arrays of NumPy or JAX, the model of rounding, and special functions that keep to the model.

A kernel is written once, for NumPy, which compiles nothing, and for JAX. It calls functions of `xp = namespace(...)`.
Functions that NumPy and JAX do not share (loops, barriers, scans, erfc) are here.

**Shapes.** Every argument has shape `(..., own axes)`. The leading axes `...` are batch axes, if any, and broadcast.
Docstrings and comments name the own axes only: `(X,)` stands for `(..., X)`, and a number for `(...)`.

**Rounding.** Every bound rests on this model. Tests check by mpmath that this machine obeys it (README.md, section 4):

* A unit of a value is 2^-53 times its magnitude.
* A sum, difference, product, quotient or square root is off by at most one unit of its value. XLA may contract a
  product with a sum into one rounding. No bound needs a product to be rounded by itself, so bounds hold either way.
* exp, log and arctan2 are off by at most SIMPLE_UNITS of their value, at any argument. So are sin(x) and cos(x) where
  |x| <= LARGEST_ANGLE. For larger angles sin(x) and cos(x) are off by at most SIMPLE_UNITS of 1. That is enough, since
  at such angles every bound allows an error of SIMPLE_UNITS of the angle.
* expm1, hypot, logistic and this module's log1p are off by at most COMPOUND_UNITS of their value. erfc(x) is off by at
  most SIMPLE_UNITS times (4 + x^2) units of its value.
* Results below SMALLEST_NORMAL may be replaced by 0.
* A sum of n terms, in any order, is off by at most n - 1 units of the sum of their magnitudes.

NumPy's log1p is accurate. XLA's is off by up to 240 units for x in (-.45, -.35), and `jax.scipy.special.log_ndtr` by
4e-9 at -20 (JAX 0.10.2, CPU).
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

SIMPLE_UNITS = 4.0
"""Error allowed for exp, log, sin, cos and arctan2, in units (see above): twice the measured error."""
COMPOUND_UNITS = 6.0
"""Error allowed for log1p, expm1, hypot and logistic, in units: 1.5 times the measured error (README.md)."""
LARGEST_ANGLE = 1e8
"""Up to this angle, in radians, sin and cos are within SIMPLE_UNITS; at 10^200 glibc's may be off by 10^5 units."""
SMALLEST_NORMAL = 2.0**-1022
BLOCK_SIZE = 64
"""Number of terms in a block of a sum. For BLOCK_SIZE^2 terms this number gives the least bound of the rounding."""
_ASYMPTOTIC_BELOW = -36.0
"""Below this x, log Phi(x) is computed by an asymptotic series, since erfc underflows for x < -37.5."""
Array: TypeAlias = Any
"""A float64 array, or a number. No static type covers NumPy arrays, JAX arrays, tracers and the arithmetic of them."""
Namespace: TypeAlias = Any
"""The module `numpy` or `jax.numpy`."""
Carry = TypeVar("Carry")


def namespace(*arrays: Array) -> Namespace:
    """Return `numpy`, or `jax.numpy` if any argument is a JAX array or a tracer."""
    for array in arrays:
        if not isinstance(array, (np.ndarray, np.generic, float, int)) and isinstance(array, jax.Array):
            return jnp
    return np


def repeat(xp: Namespace, steps: int, body: Callable[[Any, Carry], Carry], carry: Carry) -> Carry:
    """Return the carry after `carry = body(i, carry)` for i = 0, ..., steps - 1."""
    if xp is jnp:
        return lax.fori_loop(0, steps, body, carry)
    for i in range(steps):
        carry = body(i, carry)
    return carry


def iterate(xp: Namespace, going: Callable[[Carry], Array], body: Callable[[Carry], Carry], carry: Carry) -> Carry:
    """Repeat `carry = body(carry)` while `going(carry)`, for each configuration. All arrays have all batch axes."""

    def step(carry: Carry) -> Carry:
        active, following = going(carry), body(carry)
        if xp is np and np.all(active):
            return following

        def kept(new: Array, old: Array) -> Array:
            mask = xp.reshape(active, xp.shape(active) + (1,) * (xp.ndim(new) - xp.ndim(active)))
            return xp.where(mask, new, old)

        return jax.tree.map(kept, following, carry)

    if xp is jnp:
        return lax.while_loop(lambda carry: jnp.any(going(carry)), step, carry)
    while np.any(going(carry)):
        carry = step(carry)
    return carry


def powers(
    xp: Namespace, turn: Callable[[tuple[Array, ...]], tuple[Array, ...]], carry: tuple[Array, ...], count: int
) -> tuple[Array, ...]:
    """Apply `turn` to the carry `count` times. Return the carry before each call, stacked along axis -2."""
    if xp is jnp:
        _, kept = lax.scan(lambda carry, _: (turn(carry), carry), carry, None, length=count)
        return tuple(jnp.moveaxis(x, 0, -2) for x in kept)
    carries = [carry]
    while len(carries) < count:
        carries.append(turn(carries[-1]))
    return tuple(np.stack(each, axis=-2) for each in zip(*carries, strict=True))


def horner(xp: Namespace, coefficients: tuple[Array, Array], x: tuple[Array, Array]) -> tuple[Array, Array]:
    """Return `sum_n a_n x^n` for coefficients a, (N,), at every x, (K,). All are pairs (real part, imaginary part)."""

    def step(total: tuple[Array, Array], a: tuple[Array, Array]) -> tuple[tuple[Array, Array], None]:
        (re, im), (x_re, x_im) = total, x
        return (re * x_re - im * x_im + a[0][..., None], re * x_im + im * x_re + a[1][..., None]), None

    shape = np.broadcast_shapes(xp.shape(coefficients[0])[:-1], xp.shape(x[0])[:-1]) + xp.shape(x[0])[-1:]
    total = (xp.zeros(shape), xp.zeros(shape))
    if xp is jnp:
        return lax.scan(step, total, jax.tree.map(lambda a: jnp.moveaxis(a, -1, 0), coefficients), reverse=True)[0]
    for k in reversed(range(coefficients[0].shape[-1])):
        total, _ = step(total, (coefficients[0][..., k], coefficients[1][..., k]))
    return total


def keep_apart(xp: Namespace, values: Carry) -> Carry:
    """Return the values unchanged. XLA does not merge operations before this call with operations after it."""
    return lax.optimization_barrier(values) if xp is jnp else values


def constant(xp: Namespace, values: Carry) -> Carry:
    """Return the values unchanged. JAX takes their derivatives to be 0."""
    return lax.stop_gradient(values) if xp is jnp else values


def cummin(xp: Namespace, x: Array, reverse: bool = False) -> Array:
    """Return the running minimum along the last axis; if `reverse`, from the last entry backwards."""
    if xp is jnp:
        return lax.cummin(x, axis=x.ndim - 1, reverse=reverse)
    order = slice(None, None, -1 if reverse else 1)
    return np.minimum.accumulate(x[..., order], axis=-1)[..., order]


def pick(xp: Namespace, x: Array, index: Array) -> Array:
    """Return the entry of x, (X,), at `index` along the last axis. The batch axes of x and `index` broadcast."""
    shape = np.broadcast_shapes(xp.shape(x)[:-1], xp.shape(index))
    x, index = xp.broadcast_to(x, (*shape, x.shape[-1])), xp.broadcast_to(index, shape)
    return xp.take_along_axis(x, index[..., None], axis=-1)[..., 0]


def stack(xp: Namespace, arrays: Sequence[Array]) -> Array:
    """Stack arrays, whose shapes broadcast, along a new last axis."""
    return xp.stack(xp.broadcast_arrays(*arrays), axis=-1)


def interp(xp: Namespace, x: Array, places: Array, values: Array) -> Array:
    """Interpolate linearly, at every x, (X,), between `values`, (N,), which are given at increasing `places`, (N,)."""
    if xp is jnp:
        return jnp.vectorize(jnp.interp, signature="(x),(n),(n)->(x)")(x, places, values)
    shape = np.broadcast_shapes(x.shape[:-1], places.shape[:-1], values.shape[:-1])
    each = (np.broadcast_to(a, (*shape, a.shape[-1])).reshape(-1, a.shape[-1]) for a in (x, places, values))
    return np.stack([np.interp(*row) for row in zip(*each, strict=True)]).reshape(*shape, x.shape[-1])


def logistic(xp: Namespace, x: Array) -> Array:
    return lax.logistic(x) if xp is jnp else 1.0 / (1.0 + np.exp(-x))


def erfc(xp: Namespace, x: Array) -> Array:
    """Return the complementary error function."""
    if xp is jnp:
        return lax.erfc(x)
    from scipy import special  # SciPy imports slowly, and few questions need it

    # Just below 1, SciPy's erfc is off by 18 units, since it computes 1 - erf(x). SciPy's erfcx is off by 2 units.
    x = np.asarray(x, np.float64)
    cancels = (x > 0.7) & (x < 1.0)
    if not np.any(cancels):
        return special.erfc(x)
    bounded = np.where(cancels, x, 0.0)
    return np.where(cancels, special.erfcx(bounded) * np.exp(-bounded * bounded), special.erfc(x))


def log1p(x: Array) -> Array:
    """Return `log(1 + x)` for x > -1, off by at most 5 units in the last place."""
    if namespace(x) is np:
        return np.log1p(x)
    return jnp.where(jnp.abs(x) < 0.3, jnp.log1p(x), jnp.log(1.0 + x))


def log1p_inline(x: Array) -> Array:
    """Return `log(1 + x)` for x >= -1, to one unit in the last place. XLA runs it fast, but is slow to compile it."""
    return np.log1p(x) if namespace(x) is np else _log1p_by_bits(x)


def log1p_complex(a: Array, b: Array) -> Array:
    """Return log(1 + a + ib) for NumPy arrays. Errors are relative to |a + ib| where that is small (np.log1p: to 1)."""
    square = 2.0 * a + a * a + b * b
    near = (square > -0.75) & (square < 1e8)
    with np.errstate(divide="ignore"):
        size = np.log(np.hypot(1.0 + a, b))
    return np.where(near, 0.5 * np.log1p(np.where(near, square, 0.0)), size) + 1j * np.arctan2(b, 1.0 + a)


@jax.custom_jvp
def _log1p_by_bits(x: Array) -> Array:
    """Compute `log1p_inline` under XLA.

    For 1 + x = 2^k m, m in (sqrt(1/2), sqrt 2) and s = (m - 1)/(m + 1), the logarithm is `k log 2 + 2 artanh s`. The
    artanh is fdlibm's polynomial (e_log.c, 1993). `rest` adds the rounding error of 1 + x, divided by 1 + x.
    """
    one = jnp.where(jnp.isnan(x), 2.0, 1.0)  # XLA would rewrite (1 + x) - 1 to x if it knew that `one` is 1
    whole = one + x
    rest = jnp.where(jnp.abs(x) >= 1.0, one - (whole - x), x - (whole - one)) / jnp.where(whole > 0.0, whole, 1.0)
    bits = lax.bitcast_convert_type(whole, jnp.int64)
    k = lax.shift_right_arithmetic(bits - 0x3FE6A09E667F3BCD, jnp.int64(52))  # the hex number is the bits of sqrt(1/2)
    f = lax.bitcast_convert_type(bits - lax.shift_left(k, jnp.int64(52)), jnp.float64) - 1.0
    k, s = k.astype(jnp.float64), f / (2.0 + f)
    z, half = s * s, 0.5 * f * f
    w = z * z
    # coefficients, in s^2, of 2 artanh(s)/s - 2
    a, b, c, d = 6.666666666666735130e-01, 3.999999999940941908e-01, 2.857142874366239149e-01, 2.222219843214978396e-01
    e, g, h = 1.818357216161805012e-01, 1.531383769920937332e-01, 1.479819860511658591e-01
    series = z * (a + w * (c + w * (e + w * h))) + w * (b + w * (d + w * g))
    # log 2 = high + low; `high` has 32 bits, so that k * high is exact
    high, low = 6.93147180369123816490e-01, 1.90821492927058770002e-10
    value = k * high - ((half - (s * (half + series) + (k * low + rest))) - f)
    return jnp.where(
        whole > 0.0, jnp.where(whole < jnp.inf, value, jnp.inf), jnp.where(whole == 0.0, -jnp.inf, jnp.nan)
    )


@_log1p_by_bits.defjvp
def _(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    return _log1p_by_bits(primals[0]), tangents[0] / (1.0 + primals[0])


def log_ndtr(x: Array) -> Array:
    """Return `log Phi(x)`. Its absolute error is at most (12 + 3 x^2) 2^-53."""
    xp = namespace(x)
    less, more = _log_tails(x)
    return xp.where(x > 0.0, more, less)


def log_ndtr_sides(x: Array) -> tuple[Array, Array]:
    """Return (`log_ndtr(x)`, `log_ndtr(-x)`) in the time of one call of `log_ndtr`."""
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
    # one call of log serves near and far arguments, since logarithms take most of the time
    beyond = size > -_ASYMPTOTIC_BELOW
    log = xp.log(xp.where(beyond, far, half))
    less = xp.where(beyond, -0.5 * double - 0.5 * np.log(2.0 * np.pi) + series - log, log)
    return less, log1p(-half)


def logsumexp(x: Array) -> Array:
    """Return `log sum e^x` along the last axis. SciPy's logsumexp would take at least 70 microseconds a call."""
    xp = namespace(x)
    top = xp.max(x, axis=-1, keepdims=True)
    held = xp.where(xp.isfinite(top), top, 0.0)
    with np.errstate(divide="ignore"):
        return xp.log(xp.sum(xp.exp(x - held), axis=-1)) + held[..., 0]


def softplus(x: Array) -> Array:
    xp = namespace(x)
    return xp.maximum(x, 0.0) + xp.log1p(xp.exp(-xp.abs(x)))


def blocks(size: int) -> int:
    """Return the number of blocks into which `size` points are cut, by `total` and by the quadrature sums."""
    return size // BLOCK_SIZE if size % BLOCK_SIZE == 0 else 1


def total(x: Array) -> Array:
    """Return the sum of x, (X,), taken block by block. `sum_depth` bounds the rounding error."""
    xp = namespace(x)
    parts = xp.sum(xp.reshape(x, (*x.shape[:-1], blocks(x.shape[-1]), -1)), axis=-1)
    return xp.sum(keep_apart(xp, parts), axis=-1)


def sum_depth(size: int) -> float:
    """Return a bound of the error of `total`, in units of 2^-53 times the sum of the terms' magnitudes."""
    return blocks(size) + size / blocks(size)
