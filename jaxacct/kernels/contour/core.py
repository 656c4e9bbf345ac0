"""Sums of `e^{i k angle}` over quadrature points, for many k at once: characteristic functions less 1.

One matrix product gives all k, without a transcendental function per pair of point and k.  README.md of this folder,
section 4, bounds the rounding of the rotations and of the sums.
"""

from jaxacct.kernels.arrays import Array, keep_apart, namespace, powers
from jaxacct.kernels.special import blocks, log1p, sum_depth

__all__ = ["departures", "depth", "polar"]


def _rotations(angle: Array, count: int) -> tuple[Array, Array]:
    """`e^{i k angle} - 1` for k < count by repeated rotation, as (count, X) real and imaginary parts."""
    xp = namespace(angle)
    re1, im1 = -2.0 * xp.sin(0.5 * angle) ** 2, xp.sin(angle)

    def turn(carry: tuple[Array, Array]) -> tuple[Array, Array]:
        re, im = carry
        return re + re1 + re * re1 - im * im1, im + im1 + re * im1 + im * re1

    zero = xp.zeros_like(angle)
    return powers(xp, turn, (zero, zero), count)


def _split(count: int) -> tuple[int, int]:
    """count = inner * outer with both near its root, powers of two first."""
    inner = 8
    while inner * inner * 2 < count:
        inner *= 2
    return inner, count // inner


def departures(weight: Array, angle: Array, count: int) -> tuple[Array, Array]:
    """`sum_j w_j (e^{i k angle_j} - 1)` for k < count, accurate relative to its own terms; (X,) to (count,).

    With k = a + inner b, `e^{ik} - 1` is the sum and the product of two short tables, so all k come from one matrix
    product; the points are summed in blocks of rounding.BLOCK_SIZE first, which keeps the summation shallow.
    """
    xp = namespace(weight, angle)
    inner, outer = _split(count)
    size = blocks(weight.shape[-1])
    one, weight = xp.ones_like(angle)[..., None, :], weight[..., None, :]
    left = xp.concatenate([*(weight * e for e in _rotations(angle, inner)), weight], axis=-2)
    right = xp.concatenate([*_rotations(inner * angle, outer), one], axis=-2)

    def in_blocks(table: Array) -> Array:
        return xp.moveaxis(xp.reshape(table, (*table.shape[:-1], size, -1)), -2, -3)

    product = xp.matmul(in_blocks(left), xp.swapaxes(in_blocks(right), -1, -2))
    product = xp.sum(keep_apart(xp, product), axis=-3)
    both, only_left, only_right = product[..., :-1, :-1], product[..., :-1, -1:], product[..., -1:, :-1]
    re_re, re_im = both[..., :inner, :outer], both[..., :inner, outer:]
    im_re, im_im = both[..., inner:, :outer], both[..., inner:, outer:]
    re = re_re - im_im + only_left[..., :inner, :] + only_right[..., :outer]
    im = re_im + im_re + only_left[..., inner:, :] + only_right[..., outer:]

    def in_order(table: Array) -> Array:
        return xp.reshape(xp.swapaxes(table, -1, -2), (*table.shape[:-2], count))

    return in_order(re), in_order(im)


def polar(re: Array, im: Array) -> tuple[Array, Array]:
    """(log|1 + d|, arg(1 + d)) of d = re + i im, accurate for a small d and for a small 1 + d."""
    xp = namespace(re)
    rise = 2.0 * re + re**2 + im**2
    whole = xp.maximum((1.0 + re) ** 2 + im**2, 1e-300)
    near = rise > -0.5
    log_size = 0.5 * xp.where(near, log1p(xp.where(near, rise, 0.0)), xp.log(xp.where(near, 1.0, whole)))
    return log_size, xp.arctan2(im, 1.0 + re)


def depth(points: int, count: int) -> float:
    """Units of `w_j min(2, t |loss_j|)` by which the terms of `departures` are off, weights and losses aside.

    5.1 a step of either table, 4.9 for every rounding of a sum of products, and the weights' own sum.
    """
    return 5.1 * sum(_split(count)) + 4.9 * (sum_depth(points) + 4.0) + sum_depth(points)
