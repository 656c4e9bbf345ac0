"""A sampled Gaussian, its outcomes split smoothly in u = x/sigma: calm below `low`, far above `high`, jumps between.

    calm   A(z) = int w1 w2 P e^{zL} du          w1(u) = Phi((low - u)/low_blur)
    jump   B(z) = int (1 - w1) w2 P e^{zL} du    w2(u) = Phi((high - u)/high_blur)

What the contour integrates is `prod (A+B)^n - (1 - keep) prod A^n`: compositions without a far step, and for
keep = 0 with at least one jump.  The windows are entire, so that the trapezoid rule stays exponentially accurate.
Its nodes are equidistant in `v = u + warp L(u)`: dense where the loss is steep, so that following e^{itL} costs one
point per turn and no more.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxacct.kernels.law import TAIL, Law, log_mix, quadrature_range
from jaxacct.kernels.rounding import total
from jaxacct.kernels.special import log1p, log_ndtr

RIM = 17.0
"""Widths of the far window that the grid reaches beyond it: e^-45 for a tilted law that grows e^60 on the way."""
FULLEST = 0.85
"""Share of the points that may go to following the turns of e^{itL}."""
AWAY = 1e9
"""A place in u beyond every outcome: no window."""


class Window(NamedTuple):
    """Where the outcomes of the J sampled Gaussians are split, and whether calm compositions stay in."""

    low: Any  # (J,)
    high: Any  # (J,)
    keep: Any  # 1 or 0


class Frame(NamedTuple):
    """Nodes for one sampled Gaussian with everything that does not depend on the tilt."""

    u: jax.Array  # (X,)
    gap: jax.Array  # (X,) du per node
    step: jax.Array  # spacing in v
    warp: jax.Array
    slack: jax.Array  # (X,) bound on the error of u as a node
    loss: jax.Array  # (X,) log mix, before the sign
    posterior: jax.Array  # (X,)
    log_calm: jax.Array  # (X,) log of w1 w2 phi gap
    log_jump: jax.Array  # (X,)


class Split(NamedTuple):
    """Both parts under a tilt: weights that sum to one, and the logarithms of A(c) and B(c)."""

    calm: jax.Array  # (X,)
    jump: jax.Array  # (X,)
    log_calm: jax.Array
    log_jump: jax.Array


def low_blur(sigma):
    """Width of the low window: losses grow like e^{u/sigma}, so that it is narrower for small sigma."""
    return 0.15 * jnp.minimum(sigma, 1.0)


def high_blur(sigma):
    """Width of the far window."""
    return 0.1 * jnp.minimum(sigma, 1.0)


def ends(sigma, q, sign, high, c):
    """The range in u: up to the far window, or for the add direction as far as the law tilted by c reaches."""
    lo, hi = quadrature_range(sigma, q, sign, c)
    u = lo + (hi - lo) / 128.0 * jnp.arange(129)
    exponent = -c * log_mix(sigma, q, u)[0] - 0.5 * u**2
    inside = exponent > jnp.max(exponent) - TAIL
    hi = jnp.where(inside[-1], hi, lo + (hi - lo) / 128.0 * (129 - jnp.argmax(inside[::-1])))
    removing = sign > 0
    return jnp.where(removing, -jnp.sqrt(2.0 * TAIL), lo), jnp.where(removing, high + RIM * high_blur(sigma), hi)


def frame(sigma, q, sign, low, high, c, nodes, frequency=None, stop=jnp.inf):
    """`nodes` points up to a sharp end, even in u, or dense enough to follow a frequency."""
    lo, hi = ends(sigma, q, sign, high, c)
    hi = jnp.minimum(hi, stop)
    if frequency is None:
        step = (hi - lo) / (nodes - 1)
        u = lo + step * jnp.arange(nodes)
        gap, warp, slack = jnp.full_like(u, step), 0.0 * step, jnp.zeros_like(u)
    else:
        u, gap, step, warp, slack = _warped(sigma, q, lo, hi, nodes, frequency)
    loss, posterior = log_mix(sigma, q, u)
    base = -0.5 * u**2 + jnp.log(gap) - 0.5 * jnp.log(2.0 * jnp.pi) + log_ndtr((high - u) / high_blur(sigma))
    place = (low - u) / low_blur(sigma)
    return lax.optimization_barrier(
        Frame(u, gap, step, warp, slack, loss, posterior, base + log_ndtr(place), base + log_ndtr(-place))
    )


def _warped(sigma, q, lo, hi, nodes, frequency):
    even = lo + (hi - lo) / (nodes - 1) * jnp.arange(nodes)
    loss, _ = log_mix(sigma, q, even)
    rise = jnp.maximum(loss[-1] - loss[0], 1e-300)
    turns = jnp.minimum(frequency * rise / (2.0 * jnp.pi), FULLEST * (nodes - 1.0))
    step = (hi - lo) / (nodes - 1.0 - turns)
    warp = turns * step / rise
    v = lo + warp * loss[0] + step * jnp.arange(nodes)

    def newton(_, u):
        loss, posterior = log_mix(sigma, q, u)
        return u - (u + warp * loss - v) / (1.0 + warp * posterior / sigma)

    u = lax.fori_loop(0, 4, newton, jnp.interp(v, even + warp * loss, even))
    loss, posterior = log_mix(sigma, q, u)
    growth = 1.0 + warp * posterior / sigma
    return u, step / growth, step, warp, jnp.abs(u + warp * loss - v) / growth


def tilted(sign, c, nodes: Frame):
    """Both parts under the tilt c."""
    power = jnp.where(sign > 0, c + 1.0, -c)
    calm, log_calm = _normalised(nodes.log_calm + power * nodes.loss)
    jump, log_jump = _normalised(nodes.log_jump + power * nodes.loss)
    return Split(calm, jump, log_calm, log_jump)


def _normalised(exponent):
    top = jnp.max(exponent)
    weight = jnp.exp(exponent - top)
    mass = total(weight)
    return weight / mass, top + jnp.log(mass)


def rise_and_norm(law: Law, keep, log_calm, log_jump):
    """`R = sum n log(1 + B/A)` and `log(1 - (1 - keep) e^{-R})`."""
    rise = jnp.sum(law.gauss_n * jnp.logaddexp(0.0, log_jump - log_calm))
    return rise, jnp.where(keep > 0, 0.0, jnp.log(-jnp.expm1(-rise)))


class Shares(NamedTuple):
    """What the cumulants need of the frames of J sampled Gaussians, whatever the tilt; (J, X) each."""

    loss: jax.Array
    log_both: jax.Array  # log of w2 phi gap
    calm: jax.Array  # shares of the two parts, which sum to one
    jump: jax.Array


def shares(frames: Frame):
    """Both parts as shares of their sum."""
    both = jnp.logaddexp(frames.log_calm, frames.log_jump)
    calm, jump = jnp.exp(frames.log_calm - both), jnp.exp(frames.log_jump - both)
    return lax.optimization_barrier(Shares(frames.loss, both, calm, jump))


def cumulants(law: Law, keep, parts: Shares, c):
    """`K(c) = log(prod (A+B)^n - (1 - keep) prod A^n)`, pure Gaussians included, and its first two derivatives.

    For placing the contour: a part smaller than e^-600 of the other is not resolved.
    """
    n, loss = law.gauss_n, law.sign * parts.loss
    exponent = jnp.where(law.sign > 0, c + 1.0, -c) * parts.loss + parts.log_both
    top = jnp.max(exponent, axis=1)
    weight = jnp.exp(exponent - top[:, None])

    def moments(share):
        w = weight * share
        mass = jnp.maximum(jnp.sum(w, axis=1), 1e-300)
        mean = jnp.sum(w * loss, axis=1) / mass
        return top + jnp.log(mass), mean, jnp.sum(w * (loss - mean[:, None]) ** 2, axis=1) / mass

    (log_calm, mean_calm, spread_calm), (log_jump, mean_jump, spread_jump) = map(moments, (parts.calm, parts.jump))
    rise, log_norm = rise_and_norm(law, keep, log_calm, log_jump)
    share, apart = jax.nn.sigmoid(log_jump - log_calm), mean_jump - mean_calm
    first = n @ (share * apart)
    second = n @ (share * ((1.0 - share) * apart**2 + spread_jump - spread_calm))
    gain = jnp.exp(-log_norm)
    value = n @ log_calm + rise + log_norm
    mean = n @ mean_calm + gain * first
    variance = n @ spread_calm + gain * second - gain * (gain - 1.0) * first**2
    variance = jnp.maximum(variance, 1e-3 * (n @ spread_calm))
    return value + law.mu2 * c * (c + 1.0) / 2.0, mean + law.mu2 * (c + 0.5), variance + law.mu2


def log_odds_at(loss, q):
    """`log(e^loss - (1 - q)) - log q`, the y with log mix = loss, for loss > 0."""
    return jnp.where(loss > 1.0, loss + log1p(-(1.0 - q) * jnp.exp(-loss)), jnp.log(jnp.expm1(loss) + q)) - jnp.log(q)


def place_of(sigma, q, loss):
    """The u at which log mix is a given positive loss."""
    return sigma * (log_odds_at(loss, q) + 0.5 / sigma**2)
