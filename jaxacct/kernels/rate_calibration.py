"""The eps from which a true-positive rate is best seen, together with the noise of a Poisson sampled Gaussian.

The rate at a false-positive rate a is at most `F = delta(eps) + e^eps a` for every eps.  Where F is to be b and least,

    F = b,    dF/d eps = e^eps (a - Q(L > eps)) = 0.

Two stages with fixed iteration counts, neither of which enters a bound (the noise is certified afterwards at that eps):
1. Newton on the saddle point equations in (log c, x), x the logarithm of the noise.  There `-d log delta/d eps = c`, so
   that `eps = log(b/a) + log(c/(1 + c))` and `delta = b/(1 + c)`.
2. On the contour integral, c and the period kept: a secant in x and Newton in eps, at once.  To first order x does not
   change with eps, so that the secant sees x alone.
"""

from jaxacct.kernels import contour, nodes, saddle
from jaxacct.kernels.arrays import Array, namespace, repeat
from jaxacct.kernels.calibration import (
    LARGEST_SECANT_STEP,
    LEAST_SECANT,
    SLOPE_CHANGE,
    saddle_slopes,
    single,
)
from jaxacct.kernels.law import LossLaw
from jaxacct.kernels.special import log1p

SADDLE_STEPS = 16
"""Newton steps on the saddle point equations."""
LARGEST_X_STEP, LARGEST_C_STEP = 0.2, 0.2
"""Largest steps there in x and in log c: small, since with the noise the loss soon changes beyond recognition."""
LARGEST_EPSILON_STEP = 1.0
"""Largest step in eps, times c."""
LARGEST_SHARE = 0.999
"""Largest share of the rate that e^eps a may take: delta must be positive."""


def solve(
    sign: Array,
    log_q: Array,
    log_n: Array,
    x0: Array,
    c0: Array,
    log_rate: Array,
    log_fpr: Array,
    log_tol: Array,
    points: int,
    count: int,
    steps: int,
) -> tuple[Array, Array, Array, Array, Array, Array]:
    """(eps, x, last step in eps times c, last step in x, d log delta/dx, nodes needed); sign: +1 remove, -1 add.

    steps : on the contour integral, from a saddle point that is some hundredths off, or tenths where hits are few.

    The last step in x is made at the final eps, so that x belongs to it.
    """
    xp = namespace(sign, log_q, x0)
    one, axis = xp.ones_like(x0), contour.axis_nodes(points)
    unknown = one[..., None] * xp.asarray([1.0, 0.0, 0.0])
    most = log_rate - log_fpr

    def law_at(x: Array) -> LossLaw:
        return single(one * sign, x, log_q, log_n)

    def improve(_: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        w, x = carry
        c = xp.exp(w)
        k0, k1, k2, k0_x, k1_x = saddle_slopes(law_at(x), unknown, c, axis)
        epsilon = most + w - log1p(c)
        curvature = k2 + 1.0 / c**2 + 1.0 / (1.0 + c) ** 2
        value = k0 - c * epsilon - w - log1p(c) - 0.5 * xp.log(2.0 * xp.pi * curvature)
        dx = -xp.clip((value - (log_rate - log1p(c))) / k0_x, -LARGEST_X_STEP, LARGEST_X_STEP)
        gap = k1 + k1_x * dx - 1.0 / c - 1.0 / (1.0 + c) - epsilon
        dw = -gap / (c * curvature - 1.0 / (1.0 + c))
        return w + xp.clip(dw, -LARGEST_C_STEP, LARGEST_C_STEP), x + dx

    w, x = repeat(xp, SADDLE_STEPS, improve, (xp.log(c0), x0))
    c = xp.exp(w)
    epsilon, log_delta = most + w - log1p(c), log_rate - log1p(c)
    slope = saddle_slopes(law_at(x), unknown, c, axis)[3]
    point = saddle.Saddle(c, 0.0 * c, 0.0 * c, epsilon, log_delta)
    chosen, period = contour.place(law_at(x), point, epsilon, log_tol, axis)
    h = 2.0 * xp.pi / period
    need = nodes.reach(law_at(x), chosen, h, log_tol, points)

    def at(x: Array, epsilon: Array) -> tuple[Array, Array, Array]:
        """log delta over its target, and the first two derivatives of log F in eps times F over delta."""
        value, fall, bend = nodes.value_and_slopes(law_at(x), chosen, h, need, epsilon, points, count)
        # relative to delta: F_eps = e^eps a - delta fall, F_eps,eps = e^eps a + delta bend
        share = xp.exp(epsilon + log_fpr - value)
        target = log_rate + log1p(-xp.minimum(xp.exp(epsilon - most), LARGEST_SHARE))
        return value - target, share - fall, xp.maximum(bend + share, 1e-3 * fall**2)

    def step(_: Array, carry: tuple[Array, ...]) -> tuple[Array, ...]:
        x, epsilon, slope, last, dx, _ = carry
        off, first, second = at(x, epsilon)
        slope = steeper(off, last, dx, slope)
        move = xp.clip(-first / second, -LARGEST_EPSILON_STEP / c, LARGEST_EPSILON_STEP / c)
        dx = xp.clip(-off / slope, -LARGEST_SECANT_STEP, LARGEST_SECANT_STEP)
        return x + dx, xp.minimum(epsilon + move, most - 1e-3), slope, off, dx, xp.abs(move) * c

    def steeper(off: Array, last: Array, dx: Array, slope: Array) -> Array:
        """The slope of the secant, where that is not rounding."""
        fresh = (off - last) / xp.where(dx == 0, 1.0, dx)
        trusted = (xp.abs(dx) > LEAST_SECANT) & (fresh / slope > 1.0 / SLOPE_CHANGE) & (fresh / slope < SLOPE_CHANGE)
        return xp.where(trusted, fresh, slope)

    nothing = 0.0 * x
    x, epsilon, slope, last, dx, moved = repeat(xp, steps, step, (x, epsilon, slope, nothing, nothing, nothing))
    epsilon = xp.maximum(epsilon, 0.0)
    off, _, _ = at(x, epsilon)
    slope = steeper(off, last, dx, slope)
    dx = xp.clip(-off / slope, -LARGEST_SECANT_STEP, LARGEST_SECANT_STEP)
    return epsilon, x + dx, moved, dx, slope, need
