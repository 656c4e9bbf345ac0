"""The arrays that kernels take: NumPy's or JAX's, with any number of batch axes in front.

A kernel is written once. It asks `namespace` whether its arguments are NumPy arrays, which need no compiler, or JAX
arrays, and calls the functions of that namespace as `xp`. This module has what the two namespaces do not share: loops,
barriers, scans along an axis, erfc.

**Shapes.** Every argument has shape `(..., own axes)`. The leading axes `...` are batch axes. Those of all arguments
broadcast against each other, and may be none at all. Docstrings and comments name the own axes only: `(X,)` stands for
`(..., X)`, and a number for `(...)`.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Array: TypeAlias = Any
"""A float64 array, or a number.

The type is `Any`, since a kernel is called with NumPy arrays, JAX arrays and, under jit, vmap and jvp, with tracers. No
static type covers the three and the arithmetic between them. Docstrings and comments on fields name the shapes.
"""
Namespace: TypeAlias = Any
"""The module `numpy` or `jax.numpy`."""
Generating: TypeAlias = Callable[[Array], tuple[Array, Array, Array]]
"""The probability generating function of a law of K: maps `y = 1 - x` to (phi, phi', phi'') at x (generating.py)."""


Carry = TypeVar("Carry")


def namespace(*arrays: Array) -> Namespace:
    """Return `numpy`, or `jax.numpy` if any of the arrays is JAX's or a tracer."""
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
    """Return the carry after `carry = body(carry)` while `going(carry)`, for every configuration by itself.

    `going` returns one truth value for each configuration. A configuration that has stopped keeps its carry, so that
    its answer does not depend on the others of its batch. Every array of the carry has all batch axes in front.
    """

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


def powers(xp: Namespace, turn: Callable[[Carry], Carry], carry: Carry, count: int) -> Carry:
    """Return the carry before each of `count` turns, along a new axis before the last of every array."""
    if xp is jnp:
        _, kept = lax.scan(lambda carry, _: (turn(carry), carry), carry, None, length=count)
        return jax.tree.map(lambda x: jnp.moveaxis(x, 0, -2), kept)
    carries = [carry]
    while len(carries) < count:
        carries.append(turn(carries[-1]))
    return jax.tree.map(lambda *each: np.stack(each, axis=-2), *carries)


def horner(xp: Namespace, coefficients: tuple[Array, Array], x: tuple[Array, Array]) -> tuple[Array, Array]:
    """Return `sum_k a_k x^k` of complex numbers, each as (real, imaginary) part; a is (N,), x and the sums are (K,)."""

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
    """Return the values. XLA may not merge what comes before them with what comes after."""
    return lax.optimization_barrier(values) if xp is jnp else values


def constant(xp: Namespace, values: Carry) -> Carry:
    """Return the values. JAX takes their derivatives to be 0."""
    return lax.stop_gradient(values) if xp is jnp else values


def cummin(xp: Namespace, x: Array, reverse: bool = False) -> Array:
    """Return the least entry up to each one along the last axis, or from each one on if `reverse`."""
    if xp is jnp:
        return lax.cummin(x, axis=x.ndim - 1, reverse=reverse)
    if reverse:
        return np.minimum.accumulate(x[..., ::-1], axis=-1)[..., ::-1]
    return np.minimum.accumulate(x, axis=-1)


def pick(xp: Namespace, x: Array, index: Array) -> Array:
    """Return the entry of x, (X,), at an index along its last axis; the batch axes of both broadcast."""
    shape = np.broadcast_shapes(xp.shape(x)[:-1], xp.shape(index))
    x, index = xp.broadcast_to(x, (*shape, x.shape[-1])), xp.broadcast_to(index, shape)
    return xp.take_along_axis(x, index[..., None], axis=-1)[..., 0]


def flat(xp: Namespace, x: Array) -> Array:
    """Return x with its last two axes as one."""
    return xp.reshape(x, (*x.shape[:-2], x.shape[-2] * x.shape[-1]))


def stack(xp: Namespace, arrays: Sequence[Array]) -> Array:
    """Return the arrays along a new last axis; their shapes broadcast."""
    return xp.stack(xp.broadcast_arrays(*arrays), axis=-1)


def interp(xp: Namespace, x: Array, places: Array, values: Array) -> Array:
    """Return the piecewise linear function with `values` at increasing `places`, (N,) each, at every x, (X,)."""
    if xp is jnp:
        return jnp.vectorize(jnp.interp, signature="(x),(n),(n)->(x)")(x, places, values)
    shape = np.broadcast_shapes(x.shape[:-1], places.shape[:-1], values.shape[:-1])
    each = (np.broadcast_to(a, (*shape, a.shape[-1])).reshape(-1, a.shape[-1]) for a in (x, places, values))
    return np.stack([np.interp(*row) for row in zip(*each, strict=True)]).reshape(*shape, x.shape[-1])


def logistic(xp: Namespace, x: Array) -> Array:
    """Return `1/(1 + e^-x)`."""
    return lax.logistic(x) if xp is jnp else 1.0 / (1.0 + np.exp(-x))


def erfc(xp: Namespace, x: Array) -> Array:
    """Return the complementary error function.

    Just below 1, SciPy takes 1 - erf(x), which is off by 18 units; its erfcx is off by 2.
    """
    if xp is jnp:
        return lax.erfc(x)
    from scipy import special  # takes a while to import, and few questions need it

    x = np.asarray(x, np.float64)
    # From .7 to 1 SciPy's erfc is off by more units than an exponential times erfcx.
    cancels = (x > 0.7) & (x < 1.0)
    if not np.any(cancels):
        return special.erfc(x)
    bounded = np.where(cancels, x, 0.0)
    return np.where(cancels, special.erfcx(bounded) * np.exp(-bounded * bounded), special.erfc(x))
