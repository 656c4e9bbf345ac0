"""What all contour integrals share: sums over nodes, images, brackets, and epsilon (kernels/README.md)."""

from typing import Any, NamedTuple

from jaxacct.core.floats import ROUNDOFF
from jaxacct.kernels.arrays import Array, blocks, keep_apart, log1p, namespace, pick, powers, repeat, sum_depth

ABSCISSA_MULTIPLES = (0.35, 0.45, 0.55, 0.65, 0.75, 0.85, 0.92, 0.97, 1.0, 1.07, 1.2, 1.5, 2.2, 4.0, 9.0)
"""Abscissae c, as multiples of the saddle point: those up to 1 are tried for the contour, all for bounds of images."""
LEAST_VALUE = 1e-300
"""Smaller numbers are raised to this before a logarithm is taken. A smaller lower bound of delta/Z is not used."""
SUM_OUTWARD = 1.0000001
"""Factor that covers the rounding of a sum of error bounds."""
NEWTON_STEPS = 6
"""Number of Newton steps that solve for eps on a contour. The first step starts at the eps of the saddle point."""
MARGIN = 1.02
"""Tried bounds of eps: estimate -+ MARGIN * (error of log delta)/|its slope|. MARGIN > 1, since the slope varies."""


class Bracketed(NamedTuple):
    """A value with a certified lower and upper bound."""

    lower: Array
    estimate: Array
    upper: Array
    ok: Array  # whether the contour gives the bracket; elsewhere a bound may be Chernoff's, or infinite
    needs: Array  # numbers of quadrature points and contour nodes that would make the bracket narrow


class Nodes(NamedTuple):
    """The integrand at z_k = c + i t_k, t_k = k h, without e^{-z eps} and divided by e^{K(c)}, with error bounds."""

    c: Array
    k0: Array  # K(c)
    common: Array  # bound of the error of K(c). It is kept apart, since all nodes share the factor e^{K(c)}
    h: Array
    t: Array  # (count,) t_k, the imaginary part of z_k
    weight: tuple[Array, Array]  # (count,) real and imaginary part of h / (pi z (z + 1)), halved at t = 0
    log_modulus: Array  # (count,) Re K(z_k) - K(c), which is at most 0 up to rounding
    angle: Array  # (count,) Im K(z_k)
    slack: Array  # (count,) bound on the error of e^{K(z_k) - K(c)}
    tail: Array  # bound on the sum of the terms that were cut off, divided by Z = e^{K(c) - c eps}
    images_at: Array  # abscissae of the Chernoff bounds for images at larger eps
    images_log: Array  # logarithms of the Chernoff bounds at `images_at` for eps = 0
    needs: Array  # numbers of quadrature points and contour nodes that would make the certificate narrow


def weight_at(c: Array, h: Array, t: Array) -> tuple[Array, Array]:
    """Return the real and imaginary part of `h/(pi z (z + 1))` at z = c + it, halved at t = 0."""
    xp = namespace(c, t)
    c, h = c[..., None], h[..., None]
    scale = xp.where(t > 0, h, 0.5 * h) / (xp.pi * (t**2 + c**2) * (t**2 + (1.0 + c) ** 2))
    # For w = z (z + 1), 1/w is conj(w)/|w|^2. `scale` contains 1/|w|^2. The line below multiplies it by conj(w).
    return (c * (1.0 + c) - t**2) * scale, -t * (1.0 + 2.0 * c) * scale


def trapezoid(nodes: Any, epsilon: Array) -> tuple[Array, Array]:
    """Return R/Z and -(dR/deps)/Z, where R is the trapezoid sum over `nodes`, and Z is e^{K(c) - c eps}."""
    xp = namespace(nodes.t, epsilon)
    t, (re, im) = nodes.t, nodes.weight
    phase = nodes.angle - t * epsilon[..., None]
    size = xp.exp(nodes.log_modulus)
    cosine, sine = size * xp.cos(phase), size * xp.sin(phase)
    value = re * cosine - im * sine
    odd = re * sine + im * cosine
    return xp.sum(value, axis=-1), xp.sum(nodes.c[..., None] * value - t * odd, axis=-1)


def two_sided(nodes: Any, slack: Array, tail: Array, epsilon: Array) -> Array:
    """Bound the error of `trapezoid`'s sum: rounding, quadrature and cut-off, but not the images."""
    xp = namespace(nodes.t, epsilon)
    turned = 8.0 * ROUNDOFF * (nodes.t + nodes.c[..., None]) * xp.abs(epsilon)[..., None] * xp.exp(nodes.log_modulus)
    return SUM_OUTWARD * (xp.sum(xp.hypot(*nodes.weight) * (slack + turned), axis=-1) + tail)


def log_geometric(gap: Array) -> Array:
    """Return the logarithm of the sum of e^{-j gap} over j >= 1."""
    xp = namespace(gap)
    return -gap - xp.log(-xp.expm1(-gap))


def log_images(c: Array, h: Array, at: Array, log_bound: Array, epsilon: Array, log_mass: Array | float = 0.0) -> Array:
    """Bound the log of the sum of images from above. `log_bound`, (A,): logs of Chernoff's bounds at `at`, eps = 0."""
    xp = namespace(c, epsilon)
    period = 2.0 * xp.pi / h
    gap = (at - c[..., None]) * period[..., None]
    beyond = gap > 0
    right = log_bound - at * epsilon[..., None] + log_geometric(xp.where(beyond, gap, 1.0))
    right = xp.min(xp.where(beyond, right, xp.inf), axis=-1)
    # at smaller eps delta is at most the mass of the law that the contour integrates
    return xp.logaddexp(log_mass + log_geometric(c * period), right)


def errors(nodes: Nodes, epsilon: Array) -> tuple[Array, Array]:
    """Return the error bound of `two_sided`, and the log of a bound of the images. Images can only raise the sum."""
    images = log_images(nodes.c, nodes.h, nodes.images_at, nodes.images_log, epsilon)
    return two_sided(nodes, nodes.slack, nodes.tail, epsilon), images


def ends(nodes: Nodes, epsilon: Array, value: Array, off: tuple[Array, Array]) -> tuple[Array, Array]:
    """Return lower and upper bounds of log delta(eps) from `trapezoid`'s sum and the result of `errors`."""
    xp = namespace(nodes.t, epsilon)
    both, images = off
    log_z = nodes.k0 - nodes.c * epsilon
    # add the rounding errors of `value - both` and `value + both`
    both = both + 4.0 * ROUNDOFF * xp.abs(value)
    rest = value - both - xp.exp(images - log_z + nodes.common + 8.0 * ROUNDOFF * (xp.abs(images) + xp.abs(log_z)))
    low, high = (xp.log(xp.maximum(x, LEAST_VALUE)) for x in (rest, value + both))
    grain = 8.0 * ROUNDOFF * (xp.abs(log_z) + 4.0)
    lower = log_z - nodes.common + low - grain - 8.0 * ROUNDOFF * xp.abs(low)
    upper = log_z + nodes.common + high + grain + 8.0 * ROUNDOFF * xp.abs(high)
    # An upper bound of 0 or less would contradict delta > 0. Then neither bound is used.
    certain = (value + both > 0.0) & (upper < xp.inf)
    return xp.where(certain & (rest > LEAST_VALUE), lower, -xp.inf), xp.where(certain, upper, xp.inf)


def bracketed(nodes: Nodes, epsilon: Array, value: Array, off: tuple[Array, Array]) -> Bracketed:
    """Return the bracket of log delta(eps) from the trapezoid sum. A smaller Chernoff bound replaces the upper end."""
    xp = namespace(nodes.t, epsilon)
    log_z = nodes.k0 - nodes.c * epsilon
    lower, upper = ends(nodes, epsilon, value, off)
    estimate = log_z + xp.log(xp.maximum(value, LEAST_VALUE))
    # the contour's result is used only where its upper bound of log delta is less than 0.1 above its estimate
    ok = (value > 0) & xp.isfinite(upper) & (upper - estimate < 0.1)
    chernoff = nodes.images_log - nodes.images_at * epsilon[..., None]
    chernoff = chernoff + 8.0 * ROUNDOFF * (xp.abs(nodes.images_log) + xp.abs(chernoff))
    chernoff = xp.min(xp.where(chernoff > -xp.inf, chernoff, xp.inf), axis=-1)
    upper = xp.minimum(xp.where(ok, upper, xp.inf), chernoff)
    lower, estimate = xp.where(ok, lower, -xp.inf), xp.where(ok, estimate, upper)
    return Bracketed(lower, xp.clip(estimate, lower, upper), upper, ok, nodes.needs)


def behind(found: Bracketed) -> Bracketed:
    """Move the first axis of every array, along which eps varies, behind the batch axes."""
    xp = namespace(found.lower)
    lower, estimate, upper, ok = (xp.moveaxis(end, 0, -1) for end in found[:4])
    return Bracketed(lower, estimate, upper, ok, found.needs)


def newton(nodes: Nodes, start: Array, log_delta: Array, steps: int = NEWTON_STEPS) -> Array:
    """Return the eps at which the trapezoid sum is delta, by Newton steps from `start`."""
    xp = namespace(nodes.t, start)

    def step(_: Array, eps: Array) -> Array:
        value, slope = trapezoid(nodes, eps)
        value = xp.maximum(value, LEAST_VALUE)
        residual = nodes.k0 - nodes.c * eps + xp.log(value) - log_delta
        return eps + xp.clip(residual / rate_of(nodes, value, slope), -2.0 / nodes.c, 2.0 / nodes.c)

    return repeat(xp, steps, step, start)


def rate_of(nodes: Nodes, value: Array, slope: Array) -> Array:
    """Return -d(log delta)/d(eps), clipped to the range that this derivative has near the saddle point."""
    return namespace(value).clip(slope / value, 0.2 * nodes.c, 5.0 * nodes.c + 5.0)


def certified(
    candidates: Array, bounds: tuple[Array, Array], log_delta_low: Array, log_delta_high: Array
) -> tuple[Array, Array, Array, Array]:
    """Return (lower, lower_ok, upper, upper_ok) for eps. A candidate that `bounds` do not prove becomes -inf or inf."""
    xp = namespace(candidates)
    below, above = candidates[0], candidates[1]  # `bounds` are lower and upper bounds of log delta at both
    # A margin of 4 roundoffs is kept, since the given logarithms of delta may be off by a few roundoffs.
    lower_ok = bounds[0][0] - 4.0 * ROUNDOFF * xp.abs(log_delta_high) >= log_delta_high
    upper_ok = bounds[1][1] + 4.0 * ROUNDOFF * xp.abs(log_delta_low) <= log_delta_low
    lower_ok = lower_ok & (below < xp.inf)
    return xp.where(lower_ok, below, -xp.inf), lower_ok, xp.where(upper_ok, above, xp.inf), upper_ok


def epsilon_of(
    nodes: Nodes, estimate: Array, log_delta_low: Array, log_delta_high: Array, margin: float = MARGIN
) -> tuple[Array, Array, Array, Array]:
    """Return what `certified` returns for the candidates `estimate` -+ `margin` * (error of log delta)/|its slope|."""
    xp = namespace(nodes.t, estimate)
    value, slope = trapezoid(nodes, estimate)
    value = xp.maximum(value, LEAST_VALUE)
    rate = rate_of(nodes, value, slope)
    both, images = errors(nodes, estimate)
    log_z = nodes.k0 - nodes.c * estimate
    grain = 16.0 * ROUNDOFF * (xp.abs(log_z) + xp.abs(log_delta_low) + 4.0)
    off = xp.abs(log_z + xp.log(value) - log_delta_low) + grain + nodes.common
    above = estimate + margin * (both / value + off) / rate
    spread = both / value + xp.exp(images - log_z) / value + (log_delta_high - log_delta_low)
    below = estimate - margin * (spread + off) / rate
    both_ends = xp.stack([below, above])
    bounds = ends(nodes, both_ends, trapezoid(nodes, both_ends)[0], errors(nodes, both_ends))
    return certified(both_ends, bounds, log_delta_low, log_delta_high)


def log_kappa(c: Array) -> Array:
    """Return log kappa, kappa = `c^c/(1+c)^{1+c}`, the least number with `(1 - e^{-x})_+ <= kappa e^{cx}` for all x."""
    return -log1p(c) - c * log1p(1.0 / c)


def period_for(
    highest: Array, at: Array, log_bound: Array, epsilon: Array, log_delta: Array, log_tol: Array, allowed: Array
) -> tuple[Array, Array]:
    """Return the abscissa in `at`, (A,), that needs the shortest period to make images negligible, and that period."""
    xp = namespace(at, log_bound)
    goal = xp.minimum(log_delta, 0.0) + log_tol
    # Take Chernoff's bound as the integrand's size: the ratio of bound and size varies slowly with the abscissa.
    size = log_bound - at * epsilon[..., None]
    # row i, column j: the contour is at abscissa i, and Chernoff's bound at abscissa j bounds the images
    gap = at[..., None, :] - at[..., None]
    right = (size - goal[..., None])[..., None, :] / xp.where(gap > 0, gap, 1.0)
    period = xp.maximum(-goal[..., None] / at, xp.min(xp.where(gap > 0, right, xp.inf), axis=-1))
    cancelled = size - xp.min(size, axis=-1)[..., None]  # nats above the least size of the integrand
    best = xp.argmin(xp.where((cancelled < allowed) & (at <= highest[..., None]), period, xp.inf), axis=-1)
    return pick(xp, at, best), pick(xp, period, best)


def _rotations(angle: Array, count: int) -> tuple[Array, ...]:
    """Return real and imaginary parts of `e^{i k angle} - 1` for all k < count, (count, X), by repeated rotation."""
    xp = namespace(angle)
    re1, im1 = -2.0 * xp.sin(0.5 * angle) ** 2, xp.sin(angle)

    def turn(carry: tuple[Array, ...]) -> tuple[Array, ...]:
        re, im = carry
        return re + re1 + re * re1 - im * im1, im + im1 + re * im1 + im * re1

    zero = xp.zeros_like(angle)
    return powers(xp, turn, (zero, zero), count)


def _split(count: int) -> tuple[int, int]:
    """Factor a count into inner * outer, both near its square root. `inner` is a power of two."""
    inner = 8
    while inner * inner * 2 < count:
        inner *= 2
    return inner, count // inner


def departures(weight: Array, angle: Array, count: int) -> tuple[Array, Array]:
    """Return real and imaginary parts, (count,), of `sum_j weight_j (e^{i k angle_j} - 1)` for all k < count."""
    xp = namespace(weight, angle)
    # For k = a + inner b, `e^{i k angle} - 1` is x + y + x y: x is its value for k = a, y its value for k = inner b.
    # So a table of x and a table of y give the sums for all k in one matrix product. Its errors are small relative to
    # the terms. Summing by blocks rounds less than one long sum.
    inner, outer = _split(count)
    size = blocks(weight.shape[-1])
    one, weight = xp.ones_like(angle)[..., None, :], weight[..., None, :]
    left = xp.concatenate([*(weight * e for e in _rotations(angle, inner)), weight], axis=-2)
    right = xp.concatenate([*_rotations(inner * angle, outer), one], axis=-2)
    left, right = (xp.moveaxis(xp.reshape(x, (*x.shape[:-1], size, -1)), -2, -3) for x in (left, right))  # in blocks
    product = xp.sum(keep_apart(xp, xp.matmul(left, xp.swapaxes(right, -1, -2))), axis=-3)
    both, only_left, only_right = product[..., :-1, :-1], product[..., :-1, -1:], product[..., -1:, :-1]
    re_re, re_im = both[..., :inner, :outer], both[..., :inner, outer:]
    im_re, im_im = both[..., inner:, :outer], both[..., inner:, outer:]
    re = re_re - im_im + only_left[..., :inner, :] + only_right[..., :outer]
    im = re_im + im_re + only_left[..., inner:, :] + only_right[..., outer:]
    re, im = (xp.reshape(xp.swapaxes(x, -1, -2), (*x.shape[:-2], count)) for x in (re, im))  # in the order of k
    return re, im


def polar(re: Array, im: Array) -> tuple[Array, Array]:
    """Return log|1 + d| and arg(1 + d) of d = re + i im, accurate for a small d and for a small 1 + d."""
    xp = namespace(re)
    rise = 2.0 * re + re**2 + im**2
    whole = xp.maximum((1.0 + re) ** 2 + im**2, 1e-300)
    near = rise > -0.5
    log_size = 0.5 * xp.where(near, log1p(xp.where(near, rise, 0.0)), xp.log(xp.where(near, 1.0, whole)))
    return log_size, xp.arctan2(im, 1.0 + re)


def depth(points: int, count: int) -> float:
    """Bound the rounding of a term of `departures` for exact inputs, in units of 2^-53 weight_j min(2, k |angle_j|)."""
    # Each step of a table costs 5.1 units, each rounding in a sum of products 4.9. The weights' sum adds the last term.
    return 5.1 * sum(_split(count)) + 4.9 * (sum_depth(points) + 4.0) + sum_depth(points)
