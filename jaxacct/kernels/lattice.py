"""Discretisation of a privacy loss on a uniform lattice, from above (connect the dots) and from below.

A law is held as a base measure H on the likelihood ratio alpha = e^l: remove has Q = H, P = alpha H and loss
+l, add has P = H, Q = alpha H and loss -l, so one discretisation serves both directions.  Nodes are
alpha_k = e^{o + k h}, cell k lies between nodes k and k + 1, and its *hat masses* are

    a_k = int_cell (alpha_{k+1} - alpha) dH / Delta_k,  b_k = int_cell (alpha - alpha_k) dH / Delta_k,

Delta_k = alpha_{k+1} - alpha_k, both integrals of positive functions, so that each comes with a *relative*
error `eta`.

*Above.* H_k = a_k + b_{k-1} keeps both masses of every cell and dominates the law (Doroshenko et al. 2022).

*Below.* With E_k = Delta_k a_k b_k / (a_k + b_k), which is at least the chord minus the profile v(alpha) =
int (alpha' - alpha)_+ dH on cell k, and g_k = max(E_{k-1}, E_k), the chords of v(alpha_k) - g_k lie below v;
the mass is the jump of their slope.  Negative jumps are spread on the neighbours (greatest convex minorant),
and what stays negative is cancelled against mass of higher loss; both only lower the profile.

Rounding moves masses up (above) or down (below), so that the statements hold for the stored numbers.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxacct.kernels.special import log1p

__all__ = [
    "UNIT",
    "gaussian_cells",
    "gaussian_nodes",
    "laplace_cells",
    "lower_masses",
    "plain_gaussian_nodes",
    "upper_masses",
]

UNIT = 2.0**-53
LOWEST = -37.5
"""Standard normal quantile below which mass (4.7e-308) is dropped; the caller adds it back absolutely."""
PANELS = 4096
ORDER = 5
SWEEPS = 32
_ABSCISSAE, _WEIGHTS = np.polynomial.legendre.leggauss(ORDER)


def gaussian_nodes(sigma: Array, q: Array, shift: Array, step: Array, nodes: int) -> Array:
    """Standard quantile u_k at which log mix = log(1 - q) + shift + k step, mix as in `Components`.

    u_0 = -inf when shift is 0, the infimum of the log likelihood ratio.  0 < q < 1; shape (nodes,).
    """
    rise = shift + step * jnp.arange(nodes)
    y = log1p(-q) - jnp.log(q) + rise + jnp.log(-jnp.expm1(-rise))
    return sigma * y + 0.5 / sigma


def plain_gaussian_nodes(deviation: Array, origin: Array, step: Array, nodes: int) -> Array:
    """Standard quantile u_k = (origin + k step)/s + s/2; the base loss is N(-s^2/2, s^2)."""
    return (origin + step * jnp.arange(nodes)) / deviation + 0.5 * deviation


@jax.jit
def gaussian_cells(u: Array, last: Array, rate: Array, upper: Array) -> tuple[Array, Array, Array]:
    """Hat masses of the standard normal base on cells between nodes u_k, ratio affine in e^{rate u}.

    Gauss-Legendre of order 5 on the panels cut by the nodes and by a fine uniform grid.  The error of a panel
    of half width r about c is bounded on the Bernstein ellipse rho (Trefethen, ATAP, Theorem 19.3), on which
    the normal density grows by at most e^{|c|R + R^2/2}, R = r (rho + 1/rho)/2, and the hat function,
    relative to its mean, by 2 (1 + rho) e^{rho r rate}.

    Parameters
    ----------
    u : (N,) increasing node quantiles (u_0 may be -inf);  last : index of the last node in use;
    rate : 1/sigma for a Gaussian of noise multiplier sigma;  upper : whether a panel without a useful bound
        carries width times the largest density (True) or nothing (False).

    Returns
    -------
    a, b, eta : (N,)  hat masses of cell k and the bound of their relative error, below 1/4; cells from `last`
        on are empty.
    """
    nodes = u.shape[0]
    top = u[last]
    bottom = jnp.maximum(u[0], LOWEST)
    grid = jnp.linspace(bottom, top, PANELS)
    clipped = jnp.clip(u, bottom, top)
    before = jnp.searchsorted(clipped, grid, side="right")
    earlier = jnp.cumsum(jnp.zeros(nodes + 1, jnp.int64).at[before].add(1))[:nodes]
    of_node, of_grid = jnp.arange(nodes) + earlier, before + jnp.arange(PANELS)
    merged = jnp.zeros(nodes + PANELS).at[of_node].set(clipped).at[of_grid].set(grid)
    cell = jnp.zeros(nodes + PANELS, jnp.int64).at[of_node].set(jnp.arange(nodes)).at[of_grid].set(before - 1)
    cell = cell[:-1]
    start, end = merged[:-1], merged[1:]
    left, right = u[cell], u[jnp.minimum(cell + 1, nodes - 1)]
    width = end - start
    half = 0.5 * width
    used = (width > 0) & (cell < last)
    span = rate * jnp.where(used, right - left, 1.0)
    to_left, to_right = (jnp.where(used, x, 1.0) for x in (rate * (start - left), rate * (right - end)))
    a, b = jnp.zeros_like(width), jnp.zeros_like(width)
    for x, w in zip(_ABSCISSAE, _WEIGHTS, strict=True):
        up, down = half * (1.0 + x), half * (1.0 - x)
        below, above = -jnp.expm1(-(to_left + rate * up)), -jnp.expm1(-(to_right + rate * down))
        density = w * jnp.exp(-0.5 * jnp.square(start + up))
        a += density * above
        b += density * below * jnp.exp(-(to_right + rate * down))
    scale = jnp.where(used, half / (jnp.sqrt(2 * jnp.pi) * -jnp.expm1(-span)), 0.0)
    eta = _quadrature_error(jnp.abs(start + half), half, rate)
    rounding = UNIT * (80.0 + 8.0 * jnp.square(start + half))
    bad = used & ~(eta < 0.1)
    nearest = jnp.maximum(jnp.abs(start + half) - half, 0.0)
    crude = jnp.where(upper, width * jnp.exp(-0.5 * nearest * nearest), 0.0)
    a, b = (jnp.where(bad, crude, x * scale) for x in (a, b))
    eta = jnp.where(used, jnp.where(bad, 0.0, 1.2 * eta) + rounding, 0.0)
    total = partial(jax.ops.segment_sum, segment_ids=cell, num_segments=nodes, indices_are_sorted=True)
    sum_a, sum_b = total(a), total(b)
    wrong_a, wrong_b = total(a * eta), total(b * eta)
    worst = jnp.maximum(wrong_a / jnp.maximum(sum_a, 1e-300), wrong_b / jnp.maximum(sum_b, 1e-300))
    return sum_a, sum_b, worst + 4.0 * UNIT


def _quadrature_error(centre: Array, half: Array, rate: Array) -> Array:
    """Relative error bound of Gauss-Legendre on a panel, at one well chosen Bernstein ellipse."""
    growth = half * (centre + rate) + half * half
    widest = 4.0 / jnp.maximum(half, 1e-4)
    rho = jnp.clip(4.0 * ORDER / (growth + 1e-12), 1.5, widest)
    reach = half * 0.5 * (rho + 1.0 / rho)
    exponent = rho * half * rate + centre * (reach + half) + 0.5 * (reach * reach + half * half)
    geometric = rho ** (-2.0 * ORDER) / (1.0 - rho**-2.0)
    return 64.0 / 15.0 * geometric * (1.0 + rho) * jnp.exp(jnp.minimum(exponent, 700.0))


@partial(jax.jit, static_argnames="nodes")
def laplace_cells(
    scale: Array, first: Array, ratio: Array, step: Array, last: Array, *, nodes: int
) -> tuple[Array, Array, Array]:
    """Hat masses of the Laplace base on the lattice, in closed form, the upper atom not included.

    The base loss v lies in [-1/b, 1/b] with Q-density e^{-1/(2b)} e^{-v/2}/4 inside and ratio 1 - q + q e^v.
    Node k sits at v_k = first + log1p(ratio expm1(k step)), ratio = (1 - q + q e^first)/(q e^first).  On a
    cell of width d of which c is inside, b = 2 e^{-c/2} expm1(c/2)^2/expm1(d) and a = 2 expm1(c/2)
    expm1(d - c/2)/expm1(d), times the density at v_k.  Returns a, b, eta (nodes,), as `gaussian_cells`.
    """
    position = first + log1p(ratio * jnp.expm1(step * jnp.arange(nodes + 1)))
    v, width = position[:-1], jnp.diff(position)
    inside = jnp.clip(1.0 / scale - v, 0.0, width)
    used = (jnp.arange(nodes) < last) & (inside > 0)
    width, inside = jnp.where(used, width, 1.0), jnp.where(used, inside, 0.0)
    density = jnp.where(used, 0.25 * jnp.exp(-0.5 * (1.0 / scale + v)), 0.0)
    rise = jnp.expm1(0.5 * inside)
    b = density * 2.0 * jnp.exp(-0.5 * inside) * rise * rise / jnp.expm1(width)
    a = density * 2.0 * rise * jnp.expm1(width - 0.5 * inside) / jnp.expm1(width)
    return a, b, jnp.where(used, UNIT * (40.0 + 2.0 * (jnp.abs(v) + 1.0 / scale)), 0.0)


@jax.jit
def upper_masses(a: Array, b: Array, eta: Array, atoms: Array) -> Array:
    """Connect-the-dots masses on the nodes, rounded up: a dominating law.  All arguments (N,)."""
    grown = 1.0 + 1.5 * eta + 8.0 * UNIT
    return a * grown + jnp.concatenate([jnp.zeros(1), (b * grown)[:-1]]) + atoms


@jax.jit
def lower_masses(
    a: Array, b: Array, eta: Array, atoms: Array, step: Array, last: Array, ascending: Array
) -> tuple[Array, Array]:
    """Masses on the nodes of a law that is dominated by the given one, second order in the step.

    At the two ends the profile may not be lowered (no mass can be merged onto an extreme point), so there
    g_0 = g_last = 0 and the neighbours take the whole hat mass, g_1 >= a_0 Delta_0 and
    g_{last-1} >= b_{last-1} Delta_{last-1}, which puts the chord below the tangent at the end.

    Parameters
    ----------
    a, b, eta, atoms : (N,) hat masses of the open cells, their relative error, and masses exactly on nodes.
    step : h;  last : index of the last node in use;  ascending : True for remove (loss grows with the ratio).

    Returns
    -------
    masses : (N,) non-negative;  deficit : base mass by which some loss was overstated (to be charged at the
        largest ratio in use), 0 but for rounding.
    """
    index = jnp.arange(a.shape[0])
    open_cell = (index < last) & (last >= 2)
    a, b = jnp.where(open_cell, a, 0.0), jnp.where(open_cell, b, 0.0)
    e, back = jnp.exp(step), jnp.exp(-step)
    spread = jnp.where(a + b > 0, a * b / jnp.maximum(a + b, 1e-300), 0.0)
    spread = spread * (1.0 + 4.0 * eta + 16.0 * UNIT)
    lowered = jnp.maximum(_from_left(spread) * back, spread)
    lowered = jnp.where(index == 1, jnp.maximum(lowered, a[0] * back * (1.0 + 2.0 * eta[0])), lowered)
    final = jnp.maximum(last - 1, 0)
    lowered = jnp.where(index == final, jnp.maximum(lowered, b[final] * (1.0 + 2.0 * eta[final])), lowered)
    lowered = jnp.where((index == 0) | (index >= last), 0.0, lowered)
    kept = a * (1.0 - eta) + _from_left(b * (1.0 - eta)) + atoms
    given = (1.0 + e) * lowered
    taken = e * _from_right(lowered) + _from_left(lowered)
    jump = kept + given - taken - 16.0 * UNIT * (kept + given + taken)
    jump = jnp.where(index <= last, jump, 0.0)
    jump = _convex_minorant(jump, e, last)
    return _cancel(jump, ascending)


def _from_left(x: Array) -> Array:
    return jnp.concatenate([jnp.zeros(1), x[:-1]])


def _from_right(x: Array) -> Array:
    return jnp.concatenate([x[1:], jnp.zeros(1)])


def _convex_minorant(jump: Array, e: Array, last: Array) -> Array:
    """Spread negative slope jumps on the two neighbours, keeping mass and mean, a capped number of times."""
    index = jnp.arange(jump.shape[0])
    inner = (index > 0) & (index < last)

    def negative(x: Array) -> Array:
        return jnp.where(inner & (x < 0), x, 0.0)

    def going(state: tuple[Array, Array]) -> Array:
        return (state[0] < SWEEPS) & jnp.any(negative(state[1]) < 0)

    def sweep(state: tuple[Array, Array]) -> tuple[Array, Array]:
        done, x = state
        debt = negative(x)
        share = _from_right(debt) * (e / (1.0 + e)) + _from_left(debt) / (1.0 + e)
        rest = x - debt
        return done + 1, rest + share - 8.0 * UNIT * (jnp.abs(rest) - share) * (share < 0)

    return jax.lax.while_loop(going, sweep, (jnp.zeros((), jnp.int64), jump))[1]


def _cancel(jump: Array, ascending: Array) -> tuple[Array, Array]:
    """Cancel negative masses against masses of higher loss (first order dominance), where any are left.

    The mass above node k becomes min_{j <= k} of the signed mass above node j, and 0 where that is negative;
    the most negative one is the deficit.
    """

    def repair(x: Array) -> tuple[Array, Array]:
        x = jnp.where(ascending, x, x[::-1])
        size = 256.0 * UNIT * jnp.cumsum(jnp.abs(x)[::-1])[::-1]
        total = jnp.cumsum(x[::-1])[::-1]
        lowest = jnp.min(total)
        tail = jnp.maximum(jax.lax.cummin(total), 0.0)
        untouched = (tail == total) & (_from_right(tail) == _from_right(total)) & (x >= 0)
        mass = jnp.where(untouched, x, tail - _from_right(tail) - size)
        mass = jnp.maximum(mass, 0.0)
        lost = jnp.where(lowest < 0, size[jnp.argmin(total)] - lowest, 0.0)
        return jnp.where(ascending, mass, mass[::-1]), lost

    def keep(x: Array) -> tuple[Array, Array]:
        return x, jnp.zeros(())

    return jax.lax.cond(jnp.any(jump < 0), repair, keep, jump)
