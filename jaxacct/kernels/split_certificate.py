"""Rigorous error terms of the split contour; derivations in README.md of this folder.

Quadrature, rounding and cut-off of the two parts `A` and `B` of split.py, each relative to its own value on the
real axis, and Chernoff bounds of their compositions.
"""

import jax
import jax.numpy as jnp
from jax import lax

from jaxacct.floats import ROUNDOFF
from jaxacct.kernels import certificate
from jaxacct.kernels.law import Law, Tilted, log_mix
from jaxacct.kernels.rounding import sum_depth
from jaxacct.kernels.special import log1p
from jaxacct.kernels.split import Frame, Split, high_blur, low_blur, rise_and_norm

SHIFTS = (0.0, 0.2, 0.4, 0.6)
"""Heights tried for the shifted line, on a scale from what suits the far window to the widest strip."""
AXIS_SHIFTS = (0.1, 0.3, 0.5)
"""The same where t = 0."""
HEIGHTS = (1.5, 2.8, 4.5, 7.0)
"""Heights at which the decay in t is bounded, in widths of the low window."""
USELESS = 1e30
"""An error that certifies nothing; finite, for parts of weight zero (jumps with keep = 1, where low = AWAY)."""
STAIRS = 12.0
"""Steps in which the sides of the path are bounded."""
LEAST_SIGMA = 2e-3
"""Below this nothing is certified: 1/sigma is then too large for the closed forms of aside.py."""
SIDE = 24.0
"""Twice the height of a shifted line at most; on the sides the kernel is at most 1.41 e^{-2 pi Im v/h} (README.md)."""


def _log_tail(x):
    """An upper bound of log Phi(x)."""
    return jnp.where(x < 0.0, -0.5 * x**2 - jnp.log(2.0), 0.0)


def _window(largest, smallest, growth):
    """An upper bound of `log |Phi(x + i y)|` for smallest <= x <= largest, growth = y^2/2."""
    return jnp.minimum(growth + _log_tail(largest), jnp.logaddexp(0.0, growth + _log_tail(-smallest)))


def _windows(sigma, low, high, alpha, u):
    """Upper bounds of the logarithm of both windows' moduli at a height, cell by cell: (calm, jump)."""
    left, right = u[:-1], u[1:]
    far = 0.5 * (alpha / high_blur(sigma)) ** 2
    near = 0.5 * (alpha / low_blur(sigma)) ** 2
    base = _window((high - left) / high_blur(sigma), (high - right) / high_blur(sigma), far)
    calm = base + _window((low - left) / low_blur(sigma), (low - right) / low_blur(sigma), near)
    jump = base + _window((right - low) / low_blur(sigma), (left - low) / low_blur(sigma), near)
    return calm, jump


def _gaussian(u):
    """log of phi times the width at its largest in every cell."""
    left, right = u[:-1], u[1:]
    nearest = jnp.minimum(jnp.abs(left), jnp.abs(right)) * (left * right > 0)
    return jnp.log(right - left) - 0.5 * nearest**2 - 0.5 * jnp.log(2.0 * jnp.pi)


def _cells(sigma, q, sign, low, high, c, alpha, edges):
    """Upper bounds on a line at height alpha, cell by cell: (log calm, log jump, least and largest argument)."""
    u, loss = edges
    angle = alpha / sigma
    odds = jnp.exp(jnp.log(q) - log1p(-q) + jnp.minimum(u / sigma - 0.5 / sigma**2, 600.0))
    shrink = 1.0 - 4.0 * odds / (1.0 + odds) ** 2 * jnp.sin(0.5 * angle) ** 2
    modulus = loss + 0.5 * jnp.log(jnp.maximum(shrink, 1e-300))
    turn = jnp.arctan2(odds * jnp.sin(angle), 1.0 + odds * jnp.cos(angle))
    # what rounding can add to the exponents
    off = 4.0 * ROUNDOFF * (jnp.maximum(jnp.abs(u[0]), jnp.abs(u[-1])) / sigma + 0.5 / sigma**2 + 1.0)
    blurred = (c + 1.0) * (odds / (1.0 + odds) * off + 4.0 * certificate.LOSS * ROUNDOFF * jnp.abs(loss))
    modulus, turn, blurred = lax.optimization_barrier((modulus, turn, blurred))  # both ends of a cell read them
    # the modulus is monotone in u for angles up to pi/2; beyond, mix cos(v/2) <= |mix| <= mix
    steep = angle > 0.5 * jnp.pi
    highest = jnp.where(steep, loss[1:], modulus[1:])
    lowest = jnp.where(steep, loss[:-1] + jnp.log(jnp.cos(0.5 * angle)), modulus[:-1])
    grown = jnp.where(sign > 0, (c + 1.0) * highest, -c * lowest) + jnp.maximum(blurred[:-1], blurred[1:])
    grown = grown + 0.5 * alpha**2 + _gaussian(u)
    calm, jump = _windows(sigma, low, high, alpha, u)
    return grown + calm, grown + jump, turn[:-1] * (1.0 - 8.0 * off), turn[1:] * (1.0 + 8.0 * off)


def _sides(sigma, q, sign, low, high, c, alpha, nodes: Frame):
    """Upper bounds (2, 2) of the logarithm of (calm, jump) densities at the two ends, at every height up to alpha."""
    # they lie up to half a step outside, where the density, falling outwards, is at most that at the last nodes
    u = jnp.stack([nodes.u[0], nodes.u[-1]])
    loss, posterior = log_mix(sigma, q, u)
    shrink = 0.5 * log1p(-4.0 * posterior * (1.0 - posterior) * jnp.sin(0.5 * alpha / sigma) ** 2)
    grown = jnp.where(sign > 0, (c + 1.0) * loss, -c * (loss + shrink))

    def window(x, width):
        growth = 0.5 * (alpha / width) ** 2
        return jnp.where(x > 0, jnp.logaddexp(0.0, growth + _log_tail(-x)), growth + _log_tail(x))

    base = grown - 0.5 * u**2 + 0.5 * alpha**2 - 0.5 * jnp.log(2.0 * jnp.pi)
    base = base + window((high - u) / high_blur(sigma), high_blur(sigma))
    place = (low - u) / low_blur(sigma)
    return jnp.stack([base + window(place, low_blur(sigma)), base + window(-place, low_blur(sigma))])


def _log_sum(x):
    top = jnp.max(x)
    return top + jnp.log(jnp.sum(jnp.exp(x - top)))


def _edges(sigma, q, nodes: Frame):
    """Cell ends, from half a step or more outside the grid on either side, and log mix there."""
    outside = jnp.stack([nodes.u[0] - nodes.step, nodes.u[-1] + nodes.gap[-1]])
    loss, _ = log_mix(sigma, q, outside)
    join = lambda ends, inner: jnp.concatenate([ends[:1], inner, ends[1:]])
    return lax.optimization_barrier((join(outside, nodes.u), join(loss, nodes.loss)))


def tails(sigma, sign, c, nodes: Frame, parts: Split):
    """Mass of the tilted integrand beyond the ends of the grid, relative to each part."""
    inner = jnp.abs(nodes.u[0])
    slope = jnp.where(sign > 0, 0.0, c * nodes.posterior[0] / sigma)
    outside = jnp.where(slope < inner - 0.5, 1.0 / jnp.maximum(inner - slope, 0.5), USELESS)
    # beyond the right end mix^-c phi falls ever faster; in the remove direction the law ends there
    steep = nodes.u[-1] + c * nodes.posterior[-1] / sigma
    after = jnp.where(sign > 0, 0.0, jnp.where(steep > 0.5, 2.0, USELESS))

    def error(weight):
        density = weight / nodes.gap
        falling = (weight[0] <= weight[1]) & (weight[-1] <= weight[-2])
        return jnp.where(falling, density[0] * outside + density[-1] * after, USELESS)

    return jnp.stack([error(parts.calm), error(parts.jump)])


def _heights(sigma, nodes: Frame, shifts):
    widest = jnp.minimum(0.97 * jnp.pi * sigma, 12.0)
    lowest = jnp.minimum(4.0 * high_blur(sigma) ** 2 / nodes.step, 0.9 * widest)
    return lowest * (widest / lowest) ** jnp.array(shifts)


def _least(sigma, nodes: Frame, error, shifts):
    """The smallest of the errors at some heights of the line, if the grid can see the law at all."""
    errors = 1.001 * jnp.min(jax.vmap(error)(_heights(sigma, nodes, shifts)), axis=0)
    seen = (sigma > 0.05 * nodes.step) & (sigma > LEAST_SIGMA)
    return jnp.where(seen, jnp.minimum(errors, USELESS), USELESS)


def _climbed(sigma, q, sign, low, high, c, alpha, nodes: Frame, own, turning):
    """What the sides of the path cost, relative to each part; `turning` is the phase per unit of height."""
    climb = jnp.arange(1.0, STAIRS + 1.0) / STAIRS
    decay = 2.0 * jnp.pi * alpha / nodes.step
    # up a side, the integrand grows and the kernel falls: each stair by its worse ends
    rise = jax.vmap(lambda f: _sides(sigma, q, sign, low, high, c, f * alpha, nodes))(climb)
    turned = turning * alpha - decay * (climb - climb[0])
    return SIDE * jnp.max(jnp.sum(jnp.exp(rise + turned[:, None, None] - own[:, None]), axis=2), axis=0)


def step_errors(sigma, q, sign, low, high, c, nodes: Frame, parts: Split, t_max):
    """Trapezoid error of (A, B)(c + it), relative to (A, B)(c), for every |t| <= t_max, ends included.

    The line of integration is moved to height alpha in u.  There `Im v = alpha + warp arg mix`, so that the warp
    pays for the phase `t arg mix`.
    """
    edges = _edges(sigma, q, nodes)
    own = jnp.stack([parts.log_calm, parts.log_jump])
    excess = t_max - 2.0 * jnp.pi * nodes.warp / nodes.step

    def error(alpha):
        calm, jump, turn_l, turn_r = _cells(sigma, q, sign, low, high, c, alpha, edges)
        phase = excess * jnp.where(excess > 0, turn_r, turn_l)
        decay = 2.0 * jnp.pi * alpha / nodes.step
        moved = jnp.stack([_log_sum(calm + phase), _log_sum(jump + phase)]) - own
        turning = jnp.maximum(excess, 0.0) / sigma  # arg mix <= alpha/sigma
        sides = _climbed(sigma, q, sign, low, high, c, alpha, nodes, own, turning)
        return 2.0 * jnp.exp(moved - decay) / (-jnp.expm1(-decay)) + sides

    return _least(sigma, nodes, error, SHIFTS) + tails(sigma, sign, c, nodes, parts)


def axis_errors(sigma, q, sign, low, high, c, nodes: Frame, parts: Split):
    """The same for t = 0 on an even grid, from `mix cos(v/2) <= |mix(x + i sigma v)| <= mix` at every height."""
    u, loss = _edges(sigma, q, nodes)
    own = jnp.stack([parts.log_calm, parts.log_jump])
    flat = lax.optimization_barrier(jnp.where(sign > 0, (c + 1.0) * loss[1:], -c * loss[:-1]) + _gaussian(u))

    def error(alpha):
        calm, jump = _windows(sigma, low, high, alpha, u)
        shrink = jnp.where(sign > 0, 0.0, -c * jnp.log(jnp.cos(0.5 * alpha / sigma)))
        decay = 2.0 * jnp.pi * alpha / nodes.step
        moved = jnp.stack([_log_sum(flat + calm), _log_sum(flat + jump)]) + 0.5 * alpha**2 + shrink - own
        sides = _climbed(sigma, q, sign, low, high, c, alpha, nodes, own, 0.0)
        return 2.0 * jnp.exp(moved - decay) / (-jnp.expm1(-decay)) + sides

    return _least(sigma, nodes, error, AXIS_SHIFTS) + tails(sigma, sign, c, nodes, parts)


def _window_rounding(distance, blur):
    """(units of rounding of log w, its derivative in u) at a distance inside the window."""
    x = jnp.clip(distance / blur, -40.0, 9.0)
    return 20.0 + 6.0 * jnp.minimum(x, 0.0) ** 2, jnp.where(x < 8.5, jnp.maximum(-x, 0.0) + 1.0, 0.0) / blur


def rounding_errors(sigma, q, c, nodes: Frame, weight, log_part, t_max, depth, low, high, side):
    """(rate, ceiling, weight) as in certificate.py, with the nodes' own errors and the windows'.

    side is 1 for the calm part and -1 for the jumps.
    """
    z, size = jnp.abs(c) + 1.0, jnp.abs(nodes.loss)
    slope = nodes.posterior / sigma
    edge = jnp.maximum(jnp.abs(nodes.u[0]), jnp.abs(nodes.u[-1]))
    in_y = 4.0 * (jnp.abs(nodes.u) / sigma + 0.5 / sigma**2)
    through_y = nodes.posterior * (in_y - 3.0 * jnp.log(q))
    growth = nodes.step / nodes.gap
    # of a node's place, and of its gap by the posterior
    node = nodes.slack / ROUNDOFF + (4.0 * edge + nodes.warp * ((certificate.LOSS + 6.0) * size + through_y)) / growth
    near, near_slope = _window_rounding(side * (low - nodes.u), low_blur(sigma))
    far, far_slope = _window_rounding(high - nodes.u, high_blur(sigma))
    steepness = jnp.abs(nodes.u) + z * slope + near_slope + far_slope + 1.0 / sigma
    own = 32.0 + jnp.abs(log_part) + (certificate.LOSS + 2.0) * z * size + 2.0 * nodes.u**2 + z * through_y + in_y
    own = own + near + far + node * steepness
    doubt = ROUNDOFF * jnp.max(jnp.where(weight > 0.0, own, 0.0))
    rotated = own + depth
    turned = (certificate.LOSS + 12.0) * size + through_y + node * slope
    common = sum_depth(nodes.u.size) + 40.0 + 8.0 * jnp.abs(log_part)
    bounds = jnp.stack([size * rotated + turned, 2.0 * rotated + t_max * turned, own + common])
    return jnp.where(doubt < 0.1, ROUNDOFF * (1.0 + 2.0 * doubt) * (bounds @ weight), USELESS)


def _total(nodes: Frame, parts: Split, sign, c):
    """A + B as a tilted law on an even grid."""
    log_m = jnp.logaddexp(parts.log_calm, parts.log_jump)
    weight = parts.calm * jnp.exp(parts.log_calm - log_m) + parts.jump * jnp.exp(parts.log_jump - log_m)
    power = jnp.where(sign > 0, c + 1.0, -c)
    return Tilted(nodes.u, nodes.step, nodes.loss, nodes.posterior, weight, log_m, power)


def decay(law: Law, window, frames: Frame, parts: Split, c, frequencies):
    """-log of a bound, over e^{K(c)}, of the integrand's modulus at every t >= each of the frequencies."""
    plain = law.mu2 * frequencies**2 / 2.0
    total = jax.vmap(_total, (0, 0, None, None))(frames, parts, law.sign, c)
    slabs, lengths = jax.vmap(certificate.level_sets)(law.gauss_sigma, law.gauss_q, total)
    each = jax.vmap(certificate.gaussian_decay, (0, 0, None))
    by_levels = law.gauss_n @ jax.vmap(each, (None, None, 0), 1)(slabs, lengths, frequencies)
    ceilings = jax.vmap(_jump_ceiling, (0, 0, 0, 0, None, 0, 0, None))(
        law.gauss_sigma, law.gauss_q, window.low, window.high, c, frames, parts.log_jump, frequencies
    )
    odds = parts.log_jump - parts.log_calm
    rise, log_norm = rise_and_norm(law, window.keep, parts.log_calm, parts.log_jump)
    reached = law.gauss_n @ jnp.logaddexp(0.0, odds[:, None] + ceilings)
    by_jumps = rise - reached + log_norm - jnp.log(-jnp.expm1(-reached))
    by_jumps = by_jumps - 1e-9 * (rise + reached)
    return (plain + jnp.where(window.keep > 0, by_levels, by_jumps)) * (1.0 - 1e-9) - 0.01


def _jump_ceiling(sigma, q, low, high, c, nodes: Frame, log_jump, frequencies):
    """log of a bound of |B(c + it)|/B(c) for every t >= each frequency: on a shifted line e^{itL} decays (remove)."""
    edges = _edges(sigma, q, nodes)

    def at(alpha):
        _, jump, turn, _ = _cells(sigma, q, 1.0, low, high, c, alpha, edges)
        sides = _sides(sigma, q, 1.0, low, high, c, alpha, nodes)[1]
        sums = jax.vmap(lambda t: _log_sum(jump - t * turn))(frequencies)
        return jnp.logaddexp(sums, jnp.log(SIDE) + _log_sum(sides))

    alphas = jnp.minimum(jnp.array(HEIGHTS) * low_blur(sigma), 0.97 * jnp.pi * sigma)
    return jnp.minimum(jnp.min(jax.vmap(at)(alphas), axis=0) - log_jump, 0.0)


def _raised(law: Law, keep, parts: Split, errors, rise):
    """By how much errors (J, 2) relative to the parts can raise K(c)."""
    n = law.gauss_n
    share = jax.nn.sigmoid(parts.log_jump - parts.log_calm)
    # raising both parts alike adds n (error of A); raising B further, d log(e^R - 1) <= (1 + R)/R dR, dR <= R error
    without = n @ errors[:, 0] + (1.0 + rise) * jnp.sum(jnp.where(n > 0, errors[:, 1], 0.0))
    with_calm = n @ ((1.0 - share) * errors[:, 0] + share * errors[:, 1])
    return 1.01 * jnp.where(keep > 0, with_calm, without)


def _log_total(law: Law, keep, parts: Split, c):
    rise, log_norm = rise_and_norm(law, keep, parts.log_calm, parts.log_jump)
    return law.mu2 * c * (c + 1.0) / 2.0 + law.gauss_n @ parts.log_calm + rise + log_norm, rise


def chernoff(law: Law, keep, parts: Split, errors, c):
    """An upper bound of `K(c) + log kappa(c)` for what the contour integrates, from the (J, 2) errors of its parts."""
    own, rise = _log_total(law, keep, parts, c)
    value = own + _raised(law, keep, parts, errors, rise) + certificate.log_kappa(c)
    return value + _sum_rounding(law, parts, rise, c)


def _sum_rounding(law: Law, parts: Split, rise, c):
    """Rounding of sums of `n log A`, `n log(1 + B/A)` and the logarithm of kappa(c), about twice over."""
    size = law.mu2 * c * (c + 1.0) + law.gauss_n @ jnp.abs(parts.log_calm) + rise + jnp.abs(certificate.log_kappa(c))
    return ROUNDOFF * (law.gauss_n.size + 24.0) * (size + 40.0)


def decay_beyond(law: Law, window, frames: Frame, parts: Split, errors, c, k0, frequency):
    """`decay` at one frequency over e^{k0}, with the quadrature errors of the parts that it is made from."""
    own, rise = _log_total(law, window.keep, parts, c)
    bound = decay(law, window, frames, parts, c, frequency[None])[0]
    rounding = 2.0 * _sum_rounding(law, parts, rise, c)
    return bound - _raised(law, window.keep, parts, errors, rise) + k0 - own - rounding


def calm_chernoff(law: Law, parts: Split, errors, c):
    """The same for compositions of calm steps alone."""
    calm = law.gauss_n @ (parts.log_calm + 1.01 * errors[:, 0])
    value = law.mu2 * c * (c + 1.0) / 2.0 + calm + certificate.log_kappa(c)
    return value + _sum_rounding(law, parts, 0.0, c)
