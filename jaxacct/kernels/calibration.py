"""Solve delta(eps; x) = delta for x, the logarithm of one parameter of a Poisson sampled Gaussian.

Two stages with fixed iteration counts, neither of which enters a bound (the answer is certified afterwards):
1. Newton on the saddle point equations in (log c, x) at once.  At the saddle the value does not change with c,
   so the system is triangular: x from the value, then c from `eps(c) = eps`.
2. Secant steps in x on the contour integral itself, c and the period kept.
"""

from jaxacct.kernels import contour, nodes, saddle
from jaxacct.kernels.arrays import Array, namespace, repeat
from jaxacct.kernels.law import LossLaw, tilted_gaussian
from jaxacct.kernels.sensitivity import loss_change
from jaxacct.kernels.special import log1p

SADDLE_STEPS = 12
"""Newton steps on the saddle point equations."""
SECANT_STEPS = 4
"""Secant steps on the contour integral, to convergence from the saddle point's x."""
LARGEST_NEWTON_STEP = 0.7
"""Largest step in log c and in x: a factor of two."""
LARGEST_SECANT_STEP = 0.3
"""Largest secant step in x; the contour was placed near where they begin."""
LEAST_SECANT = 1e-7
"""Distance in x below which a secant is rounding."""
SLOPE_CHANGE = 10.0
"""Factor by which the slope may change from one step to the next; a secant beyond it is taken for rounding."""
LARGEST_Q = 1.0 - 1e-12
"""Largest sampling probability: the kernels take 0 < q < 1."""


def single(sign: Array, log_sigma: Array, log_q: Array, log_n: Array) -> LossLaw:
    """The law of one Poisson sampled Gaussian composed n times."""
    xp = namespace(sign, log_sigma, log_q, log_n)
    none = xp.zeros((*log_n.shape, 0))
    table = xp.zeros((*log_n.shape, 0, 0))
    sigma, q, n = (xp.exp(v)[..., None] for v in (log_sigma, log_q, log_n))
    return LossLaw(sign, 0.0 * log_n, sigma, xp.minimum(q, LARGEST_Q), n, none, none, table, table, none)


def saddle_slopes(law: LossLaw, unknown: Array, c: Array, nodes: int) -> tuple[Array, Array, Array, Array, Array]:
    """K(c), K'(c), K''(c), and the derivatives of the first two in x; law: one sampled Gaussian, unknown: (3,).

    In the logarithms of sigma and q, `dK/dx = n a E[dL/dx]` and `dK'/dx = n s (E[dL/dx] + a Cov(L, dL/dx))` under the
    tilt, with L = log mix, a the power of mix and s the sign.  In the logarithm of n either is itself.
    """
    xp = namespace(law.sign, c)
    t = tilted_gaussian(law.gauss_sigma[..., 0], law.gauss_q[..., 0], law.sign, c, nodes)
    sigma, q, n = law.gauss_sigma[..., 0], law.gauss_q[..., 0], law.gauss_n[..., 0]
    # nothing moves where q has reached its largest value
    in_q = xp.where(q < LARGEST_Q, q, 0.0) * unknown[..., 1]
    moved = loss_change(sigma, q, t, sigma * unknown[..., 0], in_q)
    mean, mean_moved = xp.sum(t.weight * t.loss, axis=-1), xp.sum(t.weight * moved, axis=-1)
    off = t.loss - mean[..., None]
    variance, both = xp.sum(t.weight * off**2, axis=-1), xp.sum(t.weight * off * moved, axis=-1)
    k0, k1 = n * t.log_m, n * law.sign * mean
    in_n = unknown[..., 2]
    return (
        k0,
        k1,
        n * variance,
        n * t.power * mean_moved + in_n * k0,
        n * law.sign * (mean_moved + t.power * both) + in_n * k1,
    )


def solve(
    sign: Array,
    base: Array,
    unknown: Array,
    x0: Array,
    c0: Array,
    epsilon: Array,
    log_delta: Array,
    log_tol: Array,
    points: int,
    count: int,
    rounds: int,
) -> tuple[Array, Array, Array, Array, Array]:
    """(x, d log delta / dx, that over minus d log delta / d eps, residual of log delta, nodes needed) at the solution.

    base: (3,) logarithms of noise multiplier, sampling probability and steps, 0 at the unknown one;
    unknown: (3,) one at the unknown, zero elsewhere; sign: +1 remove, -1 add.  Every round after the first
    places the contour anew, for laws on which the saddle point approximation is poor.
    """
    xp = namespace(sign, base, x0)
    one = xp.ones_like(x0)
    axis = contour.axis_nodes(points)

    def law_at(x: Array) -> LossLaw:
        at = base + x[..., None] * unknown
        return single(one * sign, at[..., 0], at[..., 1], at[..., 2])

    def improve(_: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        w, x = carry
        c = xp.exp(w)
        k0, k1, k2, k0_x, k1_x = saddle_slopes(law_at(x), unknown, c, axis)
        curvature = k2 + 1.0 / c**2 + 1.0 / (1.0 + c) ** 2
        value = k0 - c * epsilon - xp.log(c) - log1p(c) - 0.5 * xp.log(2.0 * xp.pi * curvature)
        dx = -xp.clip((value - log_delta) / k0_x, -LARGEST_NEWTON_STEP, LARGEST_NEWTON_STEP)
        gap = k1 + k1_x * dx - 1.0 / c - 1.0 / (1.0 + c) - epsilon
        return w - xp.clip(gap / (c * curvature), -LARGEST_NEWTON_STEP, LARGEST_NEWTON_STEP), x + dx

    w, x = repeat(xp, SADDLE_STEPS, improve, (xp.log(c0), x0))

    def stage(_: Array, carry: tuple[Array, ...]) -> tuple[Array, ...]:
        x, c, *_ = carry
        point = saddle.for_epsilon(law_at(x), epsilon, axis, c)._replace(log_delta=log_delta)
        chosen, period = contour.place(law_at(x), point, epsilon, log_tol, axis)
        h = 2.0 * xp.pi / period
        need = nodes.reach(law_at(x), chosen, h, log_tol, points)
        slope = saddle_slopes(law_at(x), unknown, point.c, axis)[3]

        def residual(x: Array) -> Array:
            return nodes.log_value(law_at(x), chosen, h, need, epsilon, points, count) - log_delta

        def secant(_: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            x, r, slope = carry
            step = -xp.clip(r / slope, -LARGEST_SECANT_STEP, LARGEST_SECANT_STEP)
            following = residual(x + step)
            fresh = (following - r) / xp.where(step == 0, 1.0, step)
            trusted = (
                (xp.abs(step) > LEAST_SECANT) & (fresh / slope > 1.0 / SLOPE_CHANGE) & (fresh / slope < SLOPE_CHANGE)
            )
            return x + step, following, xp.where(trusted, fresh, slope)

        x, r, slope = repeat(xp, SECANT_STEPS, secant, (x, residual(x), slope))
        return x, point.c, slope, r, need

    carry: tuple[Array, ...] = (x, xp.exp(w), 0.0 * x, 0.0 * x, 0.0 * x)
    x, c, slope, r, need = stage(0, carry) if rounds == 1 else repeat(xp, rounds, stage, carry)
    return x, slope, slope / c, r, need
