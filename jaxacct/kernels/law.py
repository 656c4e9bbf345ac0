"""The law of a composed privacy loss under an exponential tilt, and where its saddle point lies (kernels/README.md).

The contour crosses the real axis near the saddle point c of `K(c) - c eps - log c(c+1)`.  Newton's method in log c
finds it for a given eps or delta, since both are explicit functions of c:

    eps(c)       = K'(c) - 1/c - 1/(c+1)
    log delta(c) ~ K(c) - c eps(c) - log c(c+1) - log(2 pi Psi''(c))/2,   Psi'' = K'' + 1/c^2 + 1/(c+1)^2
"""

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

from jaxacct.kernels.arrays import Array, constant, iterate, keep_apart, log1p, namespace, total

NEWTON_STEPS = 14
"""Largest number of safeguarded Newton steps from a start that may be far off."""
REFINEMENT_STEPS = 7
"""Largest number of Newton steps from a start that is within a factor of two of the solution."""
LARGEST_STEP = 3.0
"""Largest Newton step in log c."""
Cumulants: TypeAlias = Callable[[Array], tuple[Array, Array, Array]]
"""Maps an abscissa c to K(c), K'(c) and K''(c)."""
TAIL_NATS = 42.0
"""The quadrature range leaves out at most a share e^-42 = 6e-19 of a Gaussian's mass, far below rounding errors."""


class LossLaw(NamedTuple):
    """One configuration in one direction, or a batch: J sampled Gaussians, K Laplace laws, F finite laws of A atoms."""

    sign: Array  # +1 for remove, -1 for add
    mu2: Array  # sum of n / sigma^2 over the Gaussians that are not sampled
    gauss_sigma: Array  # (J,) noise multipliers of the sampled Gaussians
    gauss_q: Array  # (J,) sampling probabilities of these Gaussians
    gauss_n: Array  # (J,) how often each of these Gaussians is composed; 0 if absent
    laplace_scale: Array  # (K,) scales of the Laplace noise, for sensitivity 1
    laplace_n: Array  # (K,) how often each Laplace part is composed; 0 if absent
    finite_loss: Array  # (F, A) losses of the A atoms of each finite part
    finite_mass: Array  # (F, A) P-masses of these atoms
    finite_n: Array  # (F,) how often each finite part is composed; 0 if absent


OWN_AXES = LossLaw(0, 0, 1, 1, 1, 1, 1, 2, 2, 1)
"""Number of axes of each field of `LossLaw` after its batch axes."""


class Tilted(NamedTuple):
    """A sampled Gaussian under the tilt c, on a grid of X nodes in u."""

    u: Array  # (X,) nodes
    step: Array  # distance of neighbouring nodes
    loss: Array  # (X,) log mix(u), which is the loss for remove and minus the loss for add
    posterior: Array  # (X,) q e^y / mix, the derivative of log mix in y
    weight: Array  # (X,) tilted masses of the nodes, which sum to one
    log_m: Array  # log M(c)
    power: Array  # exponent a of mix in the tilted density mix^a e^{-u^2/2}: c + 1 for remove, -c for add


def log_mix(sigma: Array, q: Array, u: Array) -> tuple[Array, Array]:
    """Return log mix and q e^y/mix, where mix = 1 - q + q e^y, y = u/sigma - 1/(2 sigma^2) and 0 < q < 1."""
    xp = namespace(sigma, q, u)
    y = u / sigma - 0.5 / sigma**2
    # log1p(q expm1(y)) is accurate to a few roundoffs, except where e^y may overflow (`high`) or 1 + q expm1(y) cancels
    # (`low`). For `high` the value is y + log(q + (1 - q) e^-y). Its two terms cancel if q e^y < 1, so `high` excludes
    # such y.
    high, low = (y > 30.0) & (y > -xp.log(q)), (q > 0.5) & (y < -1.0)
    small = xp.exp(-xp.abs(y))
    grown = xp.expm1(xp.where(high, 0.0, xp.minimum(y, 709.0)))
    added = xp.where(high, q + (1.0 - q) * small, (1.0 - q) + q * small)
    apart = high | low
    # XLA's log1p is accurate only for small arguments (arrays.log1p). For all other arguments log is used.
    log = xp.log(xp.where(apart, added, 1.0 + q * grown))
    near = xp.where(xp.abs(q * grown) < 0.3, xp.log1p(q * grown), log)
    value = xp.where(apart, xp.where(high, y, 0.0) + log, near)
    share = xp.where(high, q, q * small) / added
    ratio = xp.where(y < 0.0, small, 1.0 / small)
    return value, xp.where(apart, share, q * ratio / (1.0 + q * grown))


def quadrature_range(sigma: Array, q: Array, sign: Array, c: Array) -> tuple[Array, Array]:
    """Return the ends of a range of u outside which at most a share e^-42 of M(c) lies, by Gaussian bounds."""
    xp = namespace(sigma, q, c)
    a = c + 1.0
    grown = a * (a - 1.0) / (2.0 * sigma**2)
    below = a * xp.log(q) + grown
    # For remove, mix^a <= 1 - q + q e^{ay}. So the integrand of M(c) is at most the sum of two Gaussians. The second
    # has the mass q e^grown. M(c) is at least max(1, e^below). `second` is log(q e^grown/max(1, e^below)).
    second = xp.where(below > 0.0, -c * xp.log(q), xp.log(q) + grown)
    below = xp.maximum(0.0, below)
    first_reach = xp.sqrt(2.0 * xp.maximum(TAIL_NATS - below, 0.0))
    second_reach = xp.sqrt(2.0 * xp.maximum(TAIL_NATS + second, 0.0))
    has_first = below < TAIL_NATS
    has_second = TAIL_NATS + second > 0.0
    remove_hi = xp.maximum(first_reach, xp.where(has_second, a / sigma + second_reach, first_reach))
    remove_lo = xp.minimum(
        xp.where(has_first, -first_reach, a / sigma), xp.where(has_second, a / sigma - second_reach, 0.0)
    )

    # For add, the ends follow from two lower bounds of log mix: log(1 - q), and q y (by Jensen's inequality).
    floor = -c * log1p(-q)
    reach = xp.sqrt(2.0 * TAIL_NATS)
    by_mean = -c * q * (reach / sigma - 0.5 / sigma**2)
    add_hi = xp.sqrt(2.0 * (TAIL_NATS + xp.clip(by_mean, 0.0, floor)))
    by_floor = -xp.sqrt(2.0 * (TAIL_NATS + floor))
    by_jensen = -c * q / sigma - xp.sqrt(2.0 * TAIL_NATS + (c * q / sigma) ** 2 + c * q / sigma**2)
    add_lo = xp.maximum(by_floor, by_jensen)
    removing = sign > 0
    return xp.where(removing, remove_lo, add_lo), xp.where(removing, remove_hi, add_hi)


def tilted_gaussian(sigma: Array, q: Array, sign: Array, c: Array, nodes: int) -> Tilted:
    """Return the tilted law of one sampled Gaussian on `nodes` equidistant points."""
    xp = namespace(sigma, q, c)
    # Derivatives treat lo and hi as constants. The integral hardly depends on them, and sqrt has no derivative at 0.
    lo, hi = constant(xp, quadrature_range(sigma, q, sign, c))
    step = (hi - lo) / (nodes - 1)
    u = lo[..., None] + step[..., None] * xp.arange(nodes)
    loss, posterior = log_mix(sigma[..., None], q[..., None], u)
    power = xp.where(sign > 0, c + 1.0, -c)
    exponent = power[..., None] * loss - 0.5 * u**2
    top = xp.max(exponent, axis=-1)
    weight = xp.exp(exponent - top[..., None])
    mass = total(weight)
    log_m = top + xp.log(mass) + xp.log(step) - 0.5 * xp.log(2.0 * xp.pi)
    # Without this barrier XLA would evaluate the logarithms again in every loop that uses them.
    return keep_apart(xp, Tilted(u, step, loss, posterior, weight / mass[..., None], log_m, power))


def lifted(law: LossLaw) -> LossLaw:
    """Return the law with a new last batch axis of size 1. Along this axis, several abscissae c can be evaluated."""
    xp = namespace(law.sign)
    return LossLaw(*(xp.expand_dims(x, -1 - own) for x, own in zip(law, OWN_AXES, strict=True)))


def laplace_log_m(scale: Array, c: Array) -> Array:
    """Return log M(c) of a Laplace part."""
    xp = namespace(scale, c)
    rest = -(1.0 + 2.0 * c) / scale
    return c / scale - xp.log(2.0) + log1p((1.0 + 2.0 * c * xp.exp(rest)) / (1.0 + 2.0 * c))


def _laplace_cumulants(scale: Array, c: Array) -> tuple[Array, Array, Array]:
    """Return log M of a Laplace part and its first two derivatives in c. M is e^{c/scale} `whole`/2."""
    xp = namespace(scale, c)
    a = 1.0 + 2.0 * c
    e, fallen = xp.exp(-a / scale), xp.expm1(-a / scale)
    whole = 1.0 + (1.0 + 2.0 * c * e) / a
    part = 4.0 * c * e / (scale * a)
    slope = (2.0 * fallen / a**2 - part) / whole
    bend = (
        -4.0 * e / (scale * a**2) - 8.0 * fallen / a**3 + part * 2.0 * (1.0 / scale + 1.0 / a) - 4.0 * e / (scale * a)
    )
    return laplace_log_m(scale, c), 1.0 / scale + slope, bend / whole - slope**2


def finite_weights(loss: Array, mass: Array, c: Array) -> tuple[Array, Array]:
    """Return (log w, v/w), where v = `mass e^{c loss}`, (A,), are the weights of atoms, and w is the largest weight."""
    xp = namespace(loss, mass, c)
    log_mass = xp.log(xp.where(mass > 0, mass, 1.0))
    exponent = xp.where(mass > 0, c[..., None] * loss + log_mass, -xp.inf)
    top = xp.max(exponent, axis=-1)
    return top, xp.exp(exponent - top[..., None])


def _finite_cumulants(loss: Array, mass: Array, c: Array) -> tuple[Array, Array, Array]:
    xp = namespace(loss, mass, c)
    top, weight = finite_weights(loss, mass, c)
    whole = xp.sum(weight, axis=-1)
    mean = xp.sum(weight * loss, axis=-1) / whole
    return top + xp.log(whole), mean, xp.sum(weight * (loss - mean[..., None]) ** 2, axis=-1) / whole


def cumulants(law: LossLaw, c: Array, nodes: int) -> tuple[Array, Array, Array]:
    """Return K(c) = log E_P[e^{cL}] of the composition, the tilted mean K'(c), and the tilted variance K''(c)."""
    xp = namespace(law.sign, c)
    value, mean, variance = law.mu2 * c * (c + 1.0) / 2.0, law.mu2 * (c + 0.5), law.mu2
    at, parts = c[..., None], []
    if law.gauss_n.shape[-1]:
        sign = law.sign[..., None]
        t = tilted_gaussian(law.gauss_sigma, law.gauss_q, sign, at, nodes)
        average = xp.sum(t.weight * t.loss, axis=-1)
        spread = xp.sum(t.weight * (t.loss - average[..., None]) ** 2, axis=-1)
        parts.append((law.gauss_n, (t.log_m, sign * average, spread)))
    if law.laplace_n.shape[-1]:
        parts.append((law.laplace_n, _laplace_cumulants(law.laplace_scale, at)))
    if law.finite_n.shape[-1]:
        parts.append((law.finite_n, _finite_cumulants(law.finite_loss, law.finite_mass, at)))
    for n, (k0, k1, k2) in parts:
        value, mean = value + xp.sum(n * k0, axis=-1), mean + xp.sum(n * k1, axis=-1)
        variance = variance + xp.sum(n * k2, axis=-1)
    return value, mean, variance


class Saddle(NamedTuple):
    """An abscissa c, and the eps and delta for which c is the saddle point."""

    c: Array
    epsilon: Array  # eps(c)
    log_delta: Array  # saddle point approximation of log delta at this eps


def saddle_point(
    k: Cumulants,
    quantity: str,
    target: Array,
    start: Array | None = None,  # the first c; if None, it is guessed from the mean and variance of the loss
    iterations: int = NEWTON_STEPS,
    down: float = 12.0,  # the bracket of log c begins this far below the log of the first c,
    up: float = 4.0,  # and ends this far above
) -> Saddle:
    """Return the saddle point at which `quantity` ("epsilon", or the approximate "log_delta") is `target`."""
    xp = namespace(target)
    if quantity == "log_delta":  # no saddle point has a delta near 1, so a target near 1 is lowered
        target = xp.minimum(target, -0.02)
    # Without `start`, the first evaluation is at c = 1e-3. This tilt hardly changes the mean and variance of the loss.
    begin = xp.log(1e-3) * xp.ones_like(target) if start is None else xp.log(start)

    def going(carry: tuple[Array, ...]) -> Array:
        return (carry[0] < iterations) & (carry[4] > 1e-4)  # go on if the last step moved log c by over 1e-4

    def body(carry: tuple[Array, ...]) -> tuple[Array, ...]:
        i, w, lo, hi, last, _ = carry
        c = xp.exp(w)
        k0, k1, k2 = k(c)
        curvature = k2 + 1.0 / c**2 + 1.0 / (1.0 + c) ** 2
        epsilon = k1 - 1.0 / c - 1.0 / (1.0 + c)
        log_delta = k0 - c * epsilon - xp.log(c) - log1p(c) - 0.5 * xp.log(2.0 * xp.pi * curvature)
        saddle = Saddle(c, epsilon, log_delta)
        if quantity == "epsilon":
            residual = epsilon - target
            step = residual / (c * curvature)
        else:  # Newton's method is applied to log(-log delta), so log delta is kept below 0
            reached = xp.minimum(log_delta, -0.01)
            residual, step = target - reached, xp.log(reached / target) * (-reached) / (c**2 * curvature)
        lo = xp.where(residual < 0, w, lo)
        hi = xp.where(residual < 0, hi, w)
        trial = w - xp.clip(step, -LARGEST_STEP, LARGEST_STEP)
        newton = (trial > lo) & (trial < hi) & (xp.abs(step) < 0.5 * last)
        # Rounding decides on which side of the solution a tiny step ends, so the bracket may exclude a good step.
        newton = newton | (xp.abs(step) < 1e-7)
        following = xp.where(newton, trial, 0.5 * (lo + hi))
        last = xp.abs(following - w) + 1e-12
        if start is None:  # the first evaluation gives the mean and variance for the guess w0
            if quantity == "epsilon":
                gap = target - k1
                w0 = xp.log((gap + xp.sqrt(gap**2 + 4.0 * k2)) / (2.0 * k2))
            else:
                w0 = 0.5 * xp.log(2.0 * xp.maximum(-target, 0.5) / k2)
            following = xp.where(i == 0, w0, following)
            lo, hi = xp.where(i == 0, w0 - down, lo), xp.where(i == 0, w0 + up, hi)
            last = xp.where(i == 0, xp.inf, last)
        return i + 1, following, lo, hi, last, saddle

    nothing = xp.zeros_like(begin)
    carry = (nothing, begin, begin - down, begin + up, xp.full_like(begin, xp.inf), Saddle(nothing, nothing, nothing))
    return iterate(xp, going, body, carry)[-1]
