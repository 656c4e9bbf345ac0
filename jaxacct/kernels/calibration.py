"""Kernels for calibrations of a Poisson sampled Gaussian, and derivatives of log delta. Nothing here enters a bound.

README.md of this folder, section 8, has the equations. x is the logarithm of the parameter that is sought, and c is the
abscissa of the contour. A kernel takes a fixed number of steps, and callers certify what it finds.
"""

from functools import partial
from typing import NamedTuple

from jaxacct.kernels.arrays import Array, log1p, namespace, repeat
from jaxacct.kernels.contour import plain, split
from jaxacct.kernels.contour.core import departures, polar
from jaxacct.kernels.contour.plain import axis_nodes
from jaxacct.kernels.contour.split import estimate, integrand_at, needed
from jaxacct.kernels.law import LossLaw, Saddle, Tilted, cumulants, finite_weights, saddle_point, tilted_gaussian

LARGEST_SPLIT_STEP = 0.4
"""Largest secant step of `solve_split` in x, the logarithm of the parameter that is solved for."""
SETTLED = 0.15
"""If `solve_split` moves x farther than this, new windows are needed. x is the logarithm of the parameter."""


def sensitivity(
    law: LossLaw, tangent: LossLaw, epsilon: Array, log_tol: Array, points: int, count: int
) -> tuple[Array, Array, Array, Array]:
    """Return log delta's derivative along a tangent; -d log delta/d eps; log delta; (points, nodes) that suffice."""
    xp = namespace(law.sign, epsilon, tangent.mu2)
    point = saddle_point(partial(cumulants, law, nodes=axis_nodes(points)), "epsilon", epsilon)
    nodes = plain.nodes_for(law, point, epsilon, log_tol, points, count)
    c = nodes.c
    z = c[..., None] + 1j * nodes.t
    change = tangent.mu2[..., None] * z * (z + 1.0) / 2.0
    at, along = c[..., None], nodes.t[..., None, :]
    if law.gauss_n.shape[-1]:
        found = gaussian_change(law, tangent, c, nodes.h, nodes.t, points, count)
        change = change + xp.sum(found, axis=-2)
    if law.laplace_n.shape[-1]:
        change = change + xp.sum(_laplace_change(law, tangent, at[..., None] + 1j * along), axis=-2)
    if law.finite_n.shape[-1]:
        change = change + xp.sum(_finite_change(law, tangent, at, along), axis=-2)
    re, im = nodes.weight
    terms = (re + 1j * im) * xp.exp(nodes.log_modulus + 1j * (nodes.angle - nodes.t * epsilon[..., None]))
    value = xp.sum(terms.real, axis=-1)
    moved = xp.sum(xp.where(nodes.log_modulus > -xp.inf, (change * terms).real, 0.0), axis=-1)
    log_delta = nodes.k0 - c * epsilon + xp.log(value)
    return moved / value, xp.sum((z * terms).real, axis=-1) / value, log_delta, nodes.needs


def loss_change(sigma: Array, q: Array, t: Tilted, sigma_moved: Array, q_moved: Array) -> Array:
    """Return the derivative, (X,), of `log_mix` (law.py) in the direction (`sigma_moved`, `q_moved`) of (sigma, q)."""
    sigma, q = sigma[..., None], q[..., None]
    in_sigma = t.posterior * (1.0 / sigma**2 - t.u / sigma) / sigma
    in_q = t.posterior / q - (1.0 - t.posterior) / (1.0 - q)
    return in_sigma * sigma_moved[..., None] + in_q * q_moved[..., None]


def gaussian_change(law: LossLaw, tangent: LossLaw, c: Array, h: Array, t: Array, points: int, count: int) -> Array:
    """Return `n' log M + n M'/M` (README.md, section 8) of J Gaussians at nodes c + i t_k, (J, count), complex."""
    xp = namespace(law.sign, c, tangent.mu2)
    sign, along = law.sign[..., None], t[..., None, :]
    grid = tilted_gaussian(law.gauss_sigma, law.gauss_q, sign, c[..., None], points)
    moved = loss_change(law.gauss_sigma, law.gauss_q, grid, tangent.gauss_sigma, tangent.gauss_q)
    angle = (h * law.sign)[..., None, None] * grid.loss
    re, im = departures(grid.weight, angle, count)
    weight = grid.weight * moved
    moved_re, moved_im = departures(weight, angle, count)
    whole = xp.sum(weight, axis=-1)[..., None]
    power = grid.power[..., None] + 1j * sign[..., None] * along
    rate = power * (whole + moved_re + 1j * moved_im) / (1.0 + re + 1j * im)
    log_size, turn = polar(re, im)
    log_m = grid.log_m[..., None] + log_size + 1j * turn
    n, n_moved = law.gauss_n[..., None], tangent.gauss_n[..., None]
    return xp.where(n > 0, n * rate + n_moved * log_m, n_moved * log_m)


def _laplace_change(law: LossLaw, tangent: LossLaw, z: Array) -> Array:
    """Return `n' log M + n M'/M` of Laplace parts of scale s: `M = e^{z/s} (1 + (1 + 2z e^{-a/s})/a)/2`, a = 1 + 2z."""
    xp = namespace(law.sign, z)
    scale, a = law.laplace_scale[..., None], 1.0 + 2.0 * z
    fallen = xp.exp(-a / scale)
    whole = 1.0 + (1.0 + 2.0 * z * fallen) / a
    turn = z.imag / scale + xp.angle(whole)
    log_m = z.real / scale + xp.log(0.5 * xp.abs(whole)) + 1j * xp.arctan2(xp.sin(turn), xp.cos(turn))
    in_scale = -z / scale**2 + 2.0 * z * fallen / scale**2 / whole
    return law.laplace_n[..., None] * in_scale * tangent.laplace_scale[..., None] + tangent.laplace_n[..., None] * log_m


def _finite_change(law: LossLaw, tangent: LossLaw, c: Array, t: Array) -> Array:
    """Return `n' log M + n M'/M` of the finite parts; `M = sum p_j e^{z l_j}` for losses l_j of probability p_j."""
    xp = namespace(law.sign, c, t)
    loss, mass = law.finite_loss, law.finite_mass
    top, weight = finite_weights(loss, mass, c)
    turned = weight[..., None, :] * xp.exp(1j * t[..., None] * loss[..., None, :])
    share = xp.where(mass > 0, tangent.finite_mass / xp.where(mass > 0, mass, 1.0), 0.0)[..., None, :]
    z = (c[..., None] + 1j * t)[..., None]
    whole = xp.sum(turned, axis=-1)
    rate = xp.sum(turned * (share + z * tangent.finite_loss[..., None, :]), axis=-1) / whole
    log_m = top[..., None] + xp.log(whole)
    return law.finite_n[..., None] * rate + tangent.finite_n[..., None] * log_m


LARGEST_X_STEP, LARGEST_C_STEP = 0.2, 0.2
"""Largest Newton steps of `solve_rate` in x and log c (see the top): small, since the loss changes fast with noise."""
LARGEST_EPSILON_STEP = 1.0
"""Largest Newton step of `solve_rate` in eps, times c. Such a step changes log delta by about 1."""
LARGEST_SHARE = 0.999
"""Cap on e^eps a/b, so that delta = b - e^eps a > 0."""
LARGEST_NEWTON_STEP = 0.7
"""Largest Newton step of `solve` in log c and in x."""
LARGEST_SECANT_STEP = 0.3
"""Largest secant step of x: small, since the contour is placed once, for the x where these steps begin."""
LARGEST_Q = 1.0 - 1e-12
"""Largest sampling probability that is used, since the kernels take 0 < q < 1."""


def single(sign: Array, log_sigma: Array, log_q: Array, log_n: Array) -> LossLaw:
    """Return the law of one Poisson sampled Gaussian composed n times."""
    xp = namespace(sign, log_sigma, log_q, log_n)
    none = xp.zeros((*log_n.shape, 0))
    table = xp.zeros((*log_n.shape, 0, 0))
    sigma, q, n = (xp.exp(v)[..., None] for v in (log_sigma, log_q, log_n))
    return LossLaw(sign, 0.0 * log_n, sigma, xp.minimum(q, LARGEST_Q), n, none, none, table, table, none)


def saddle_slopes(law: LossLaw, unknown: Array, c: Array, nodes: int) -> tuple[Array, Array, Array, Array, Array]:
    """Return K(c), K'(c), K''(c), and the derivatives of K(c) and K'(c) in x, for one sampled Gaussian.

    If x is log n, these derivatives are K and K'. Otherwise they are `n a E[dL/dx]` and
    `n s (E[dL/dx] + a Cov(L, dL/dx))`: L = log mix, a = `Tilted.power`, s is the sign, E and Cov are of the tilted law.
    """
    xp = namespace(law.sign, c)
    t = tilted_gaussian(law.gauss_sigma[..., 0], law.gauss_q[..., 0], law.sign, c, nodes)
    sigma, q, n = law.gauss_sigma[..., 0], law.gauss_q[..., 0], law.gauss_n[..., 0]
    # a q that is capped at LARGEST_Q does not change with x
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


def _secant_slope(moved: Array, risen: Array, slope: Array, change: float = 10.0) -> Array:
    """Return risen/moved, or `slope` if `moved` is tiny or the quotient differs from `slope` by a factor > `change`."""
    xp = namespace(moved, risen)
    fresh = risen / xp.where(moved == 0, 1.0, moved)
    trusted = (xp.abs(moved) > 1e-7) & (fresh / slope > 1.0 / change) & (fresh / slope < change)
    return xp.where(trusted, fresh, slope)


def solve(
    sign: Array,
    base: Array,  # (3,) logarithms of noise multiplier, sampling probability and steps; 0 for the unknown parameter
    unknown: Array,  # (3,) 1 for the unknown parameter, 0 for the two others
    x0: Array,
    c0: Array,
    epsilon: Array,
    log_delta: Array,
    log_tol: Array,
    points: int,
    count: int,
    rounds: int,  # how often the contour is placed: several times where the saddle point approximation is poor
) -> tuple[Array, Array, Array, Array, Array]:
    """Return (x, d log delta/dx, d eps/dx at fixed delta, residual of log delta, nodes needed) at the solution."""
    xp = namespace(sign, base, x0)
    one = xp.ones_like(x0)
    axis = plain.axis_nodes(points)

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

    w, x = repeat(xp, 12, improve, (xp.log(c0), x0))  # Newton steps on the saddle point equations

    def stage(_: Array, carry: tuple[Array, ...]) -> tuple[Array, ...]:
        x, c, *_ = carry
        point = saddle_point(partial(cumulants, law_at(x), nodes=axis), "epsilon", epsilon, c)
        point = point._replace(log_delta=log_delta)
        chosen, period, *_ = plain.place(law_at(x), point, epsilon, log_tol, axis)
        h = 2.0 * xp.pi / period
        need = plain.reach(law_at(x), chosen, h, log_tol, points)
        slope = saddle_slopes(law_at(x), unknown, point.c, axis)[3]

        def residual(x: Array) -> Array:
            return plain.value_and_slopes(law_at(x), chosen, h, need, epsilon, points, count)[0] - log_delta

        def secant(_: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            x, r, slope = carry
            step = -xp.clip(r / slope, -LARGEST_SECANT_STEP, LARGEST_SECANT_STEP)
            following = residual(x + step)
            return x + step, following, _secant_slope(step, following - r, slope)

        # four secant steps suffice, since x starts near the solution
        x, r, slope = repeat(xp, 4, secant, (x, residual(x), slope))
        return x, point.c, slope, r, need

    carry: tuple[Array, ...] = (x, xp.exp(w), 0.0 * x, 0.0 * x, 0.0 * x)
    x, c, slope, r, need = stage(0, carry) if rounds == 1 else repeat(xp, rounds, stage, carry)
    return x, slope, slope / c, r, need


def solve_rate(
    sign: Array,
    log_q: Array,
    log_n: Array,
    x0: Array,
    c0: Array,
    log_rate: Array,  # logarithm of the true-positive rate
    log_fpr: Array,  # logarithm of the false-positive rate
    log_tol: Array,
    points: int,
    count: int,
    steps: int,  # steps on the contour integral. At first x is off by hundredths, or by tenths if q is small.
) -> tuple[Array, Array, Array, Array, Array, Array]:
    """Return (eps, x at this eps, c |last step of eps|, last step of x, d log delta/dx, nodes needed)."""
    xp = namespace(sign, log_q, x0)
    one, axis = xp.ones_like(x0), plain.axis_nodes(points)
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

    w, x = repeat(xp, 16, improve, (xp.log(c0), x0))  # Newton steps on the saddle point equations
    c = xp.exp(w)
    epsilon, log_delta = most + w - log1p(c), log_rate - log1p(c)
    slope = saddle_slopes(law_at(x), unknown, c, axis)[3]
    point = Saddle(c, epsilon, log_delta)
    chosen, period, *_ = plain.place(law_at(x), point, epsilon, log_tol, axis)
    h = 2.0 * xp.pi / period
    need = plain.reach(law_at(x), chosen, h, log_tol, points)

    def at(x: Array, epsilon: Array) -> tuple[Array, Array, Array]:
        """Return log(delta/(b - e^eps a)), F'/delta, and F''/delta (raised if too small for a Newton step)."""
        value, fall, bend = plain.value_and_slopes(law_at(x), chosen, h, need, epsilon, points, count)
        # `fall` is -delta'/delta, `bend` is delta''/delta, and `share` is e^eps a/delta
        share = xp.exp(epsilon + log_fpr - value)
        target = log_rate + log1p(-xp.minimum(xp.exp(epsilon - most), LARGEST_SHARE))
        return value - target, share - fall, xp.maximum(bend + share, 1e-3 * fall**2)

    def step(_: Array, carry: tuple[Array, ...]) -> tuple[Array, ...]:
        x, epsilon, slope, last, dx, _ = carry
        off, first, second = at(x, epsilon)
        slope = _secant_slope(dx, off - last, slope)
        move = xp.clip(-first / second, -LARGEST_EPSILON_STEP / c, LARGEST_EPSILON_STEP / c)
        dx = xp.clip(-off / slope, -LARGEST_SECANT_STEP, LARGEST_SECANT_STEP)
        return x + dx, xp.minimum(epsilon + move, most - 1e-3), slope, off, dx, xp.abs(move) * c

    nothing = 0.0 * x
    x, epsilon, slope, last, dx, moved = repeat(xp, steps, step, (x, epsilon, slope, nothing, nothing, nothing))
    epsilon = xp.maximum(epsilon, 0.0)
    off, _, _ = at(x, epsilon)
    slope = _secant_slope(dx, off - last, slope)
    dx = xp.clip(-off / slope, -LARGEST_SECANT_STEP, LARGEST_SECANT_STEP)
    return epsilon, x + dx, moved, dx, slope, need


class Solved(NamedTuple):
    """The result of one call of `solve_split`. x is the logarithm of the unknown parameter."""

    x: Array  # the solution
    slope: Array  # d log delta / dx
    epsilon_slope: Array  # d eps / dx at fixed delta
    residual: Array  # log(delta/target) before the last secant step
    off: Array  # estimated error of x after the last secant step
    moved: Array  # distance between x0 and x
    needs: Array  # (points, nodes) that the contour needs


def solve_split(
    sign: Array,
    base: Array,
    unknown: Array,
    x0: Array,
    slope0: Array,
    epsilon: Array,
    log_delta: Array,
    log_tol: Array,
    points: int,
    count: int,
) -> Solved:
    """Solve the problem of `solve` on a split law's contour, placed for x0. `slope0` is a guess of d log delta/dx."""
    xp = namespace(x0, base)

    def law(x: Array) -> LossLaw:
        return single(sign * xp.ones_like(x0), *xp.moveaxis(base + x[..., None] * unknown, -1, 0))

    placed = split.place(law(x0), epsilon, log_delta, log_tol, count)

    def evaluate(x: Array) -> tuple[Array, Array, Array]:
        integrand, made_from = integrand_at(law(x), placed.contour, points, count)
        value, rate = estimate(integrand, epsilon)
        return value - log_delta, rate, needed(law(x), placed.contour, made_from.grids)

    def secant(_: Array, carry: tuple[Array, ...]) -> tuple[Array, ...]:
        x, slope, last_x, last_r, *_ = carry
        residual, rate, needs = evaluate(x)
        slope = _secant_slope(x - last_x, residual - last_r, slope, 50.0)
        step = xp.clip(-residual / slope, -LARGEST_SPLIT_STEP, LARGEST_SPLIT_STEP)
        # A secant step for f(x) errs by about |f''/(2 f')|, taken to be 3, times the product of the last two steps.
        off = xp.abs(step) * xp.where(x == x0, 1.0, 3.0 * xp.abs(x - last_x))
        # x moves on only while it is near x0, where the windows were placed, and while steps reduce the residual
        serves = (xp.abs(x - x0) <= SETTLED) & ((x == x0) | (xp.abs(residual) < xp.abs(last_r)))
        following = (x + step, slope, x, residual, rate, off)
        kept = (xp.where(serves, new, old) for old, new in zip(carry, following, strict=False))
        return *kept, xp.where(serves[..., None], needs, carry[-1])

    carry = (x0, slope0, x0, 0.0 * x0, 0.0 * x0, 0.0 * x0, xp.zeros((*x0.shape, 2)))
    # a fourth step would change nothing, or move x too far from x0
    x, slope, _, residual, rate, off, needs = repeat(xp, 3, secant, carry)
    return Solved(x, slope, slope / rate, residual, off, xp.abs(x - x0), needs)
