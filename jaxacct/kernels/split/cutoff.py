"""Rigorous bounds of what the split contour's sum leaves out: terms beyond the cut-off in t, and periodic images.

Derivations in README.md, sections 1, 2 and 6.  The images are bounded by Chernoff's inequality on the real axis.
"""

import jax
import numpy as np

from jaxacct.core.floats import ROUNDOFF
from jaxacct.kernels import certificate, characteristic_decay
from jaxacct.kernels.arrays import Array, logistic, namespace
from jaxacct.kernels.law import LossLaw, Tilted
from jaxacct.kernels.special import softplus
from jaxacct.kernels.split.errors import (
    SIDES_FACTOR,
    STRIP_SHARE,
    cell_bounds,
    cell_edges,
    in_front,
    log_sum,
    side_bounds,
)
from jaxacct.kernels.split.parts import Grid, TiltedParts, Windows, low_blur, rise_and_norm

DECAY_HEIGHTS = (1.5, 2.8, 4.5, 7.0)
"""Heights of the shifted line on which the decay in t is bounded, in widths of the low window."""
DECAY_ROUNDING = 1e-9
"""Relative rounding of a decay, and of the logarithms that it is the difference of."""
DECAY_MARGIN = 0.01
"""Nats subtracted from every decay, for the rounding of what is not relative to it."""
FIRST_ORDER = 1.01
"""Factor for the terms beyond the first order of a small error."""


def _whole(nodes: Grid, parts: TiltedParts, sign: Array, c: Array) -> Tilted:
    """A + B as a tilted law on an even grid."""
    xp = namespace(nodes.u, c)
    log_m = xp.logaddexp(parts.log_bulk, parts.log_jump)
    bulk, jump = (xp.exp(x - log_m)[..., None] for x in (parts.log_bulk, parts.log_jump))
    power = xp.where(sign > 0, c + 1.0, -c)
    return Tilted(nodes.u, nodes.step, nodes.loss, nodes.posterior, parts.bulk * bulk + parts.jump * jump, log_m, power)


def decay(law: LossLaw, windows: Windows, grids: Grid, parts: TiltedParts, c: Array, frequency: Array) -> Array:
    """-log of a bound, over e^{K(c)}, of the integrand's modulus at every t >= frequency."""
    xp = namespace(law.gauss_n, windows.low, frequency)
    by_levels = _by_levels(law, grids, parts, c, frequency)
    by_jumps = _by_jumps(law, windows, grids, parts, c, frequency)
    return _rounded_down(law, xp.where(windows.keep_bulk > 0, by_levels, by_jumps), frequency)


def decay_of_both(law: LossLaw, windows: Windows, grids: Grid, parts: TiltedParts, c: Array, frequency: Array) -> Array:
    """The same where keep_bulk is 1, and where it is 0: an axis in front of everything but the law.

    Frequencies have another axis in front of that one.
    """
    xp = namespace(law.gauss_n, windows.low, frequency)
    (_, *kept), (windows, *left) = (jax.tree.map(lambda x, i=i: x[i], (windows, grids, parts, c)) for i in range(2))
    by_levels = _by_levels(law, kept[0], kept[1], kept[2], frequency[:, 0])
    by_jumps = _by_jumps(law, windows, left[0], left[1], left[2], frequency[:, 1])
    return _rounded_down(law, xp.stack([by_levels, by_jumps], axis=1), frequency)


def _rounded_down(law: LossLaw, sampled: Array, frequency: Array) -> Array:
    plain = law.mu2 * frequency**2 / 2.0
    return (plain + sampled) * (1.0 - DECAY_ROUNDING) - DECAY_MARGIN


def _by_levels(law: LossLaw, grids: Grid, parts: TiltedParts, c: Array, frequency: Array) -> Array:
    """By the level sets of the sampled Gaussians, for keep_bulk = 1."""
    xp = namespace(law.gauss_n, grids.u, frequency)
    whole = _whole(grids, parts, law.sign[..., None], c[..., None])
    slabs, lengths = characteristic_decay.level_sets(law.gauss_sigma, law.gauss_q, whole)
    each = characteristic_decay.gaussian_decay(slabs, lengths, frequency[..., None])
    return xp.sum(law.gauss_n * each, axis=-1)


def _by_jumps(law: LossLaw, windows: Windows, grids: Grid, parts: TiltedParts, c: Array, frequency: Array) -> Array:
    """By the jumps, for keep_bulk = 0."""
    xp = namespace(law.gauss_n, grids.u, frequency)
    ceilings = _jump_ceiling(law, windows, c[..., None], grids, parts.log_jump, frequency[..., None])
    odds = parts.log_jump - parts.log_bulk
    rise, log_norm = rise_and_norm(law, windows.keep_bulk, parts.log_bulk, parts.log_jump)
    reached = xp.sum(law.gauss_n * softplus(odds + ceilings), axis=-1)
    by_jumps = rise - reached + log_norm - xp.log(-xp.expm1(-reached))
    return by_jumps - DECAY_ROUNDING * (rise + reached)


def _jump_ceiling(law: LossLaw, windows: Windows, c: Array, nodes: Grid, log_jump: Array, frequency: Array) -> Array:
    """log of a bound of |B(c + it)|/B(c) for every t >= frequency: on a shifted line e^{itL} decays (remove)."""
    xp = namespace(nodes.u, frequency)
    sigma, q = law.gauss_sigma, law.gauss_q
    heights = in_front(DECAY_HEIGHTS, frequency.ndim) * low_blur(sigma)
    alpha = xp.minimum(heights, STRIP_SHARE * xp.pi * sigma)
    edges, removing = cell_edges(sigma, q, nodes), xp.ones_like(c)
    _, jump, turn, _ = cell_bounds(sigma, q, removing, windows.low, windows.high, c, alpha, edges)
    sides = side_bounds(sigma, q, removing, windows.low, windows.high, c, alpha, nodes)[..., 1, :]
    # height by height: all together would not fit into a cache
    sums = xp.stack([log_sum(own - frequency[..., None] * angle) for own, angle in zip(jump, turn, strict=True)])
    sums = xp.logaddexp(sums, np.log(SIDES_FACTOR) + log_sum(sides))
    return xp.minimum(xp.min(sums, axis=0) - log_jump, 0.0)


def _raised(law: LossLaw, keep_bulk: Array, parts: TiltedParts, errors: Array, rise: Array) -> Array:
    """By how much errors (J, 2) relative to the parts can raise K(c)."""
    xp = namespace(law.gauss_n, errors)
    n, of_bulk, of_jump = law.gauss_n, errors[..., 0], errors[..., 1]
    share = logistic(xp, parts.log_jump - parts.log_bulk)
    # raising both parts alike adds n (error of A); raising B further, d log(e^R - 1) <= (1 + R)/R dR, dR <= R error
    jumps = xp.sum(xp.where(n > 0, of_jump, 0.0), axis=-1)
    without = xp.sum(n * of_bulk, axis=-1) + (1.0 + rise) * jumps
    with_bulk = xp.sum(n * ((1.0 - share) * of_bulk + share * of_jump), axis=-1)
    return FIRST_ORDER * xp.where(keep_bulk > 0, with_bulk, without)


def _log_total(law: LossLaw, keep_bulk: Array, parts: TiltedParts, c: Array) -> tuple[Array, Array]:
    xp = namespace(law.gauss_n, parts.log_bulk, c)
    rise, log_norm = rise_and_norm(law, keep_bulk, parts.log_bulk, parts.log_jump)
    bulk = xp.sum(law.gauss_n * parts.log_bulk, axis=-1)
    return law.mu2 * c * (c + 1.0) / 2.0 + bulk + rise + log_norm, rise


def chernoff(law: LossLaw, keep_bulk: Array, parts: TiltedParts, errors: Array, c: Array) -> Array:
    """An upper bound of `K(c) + log kappa(c)` for what the contour integrates, from the (J, 2) errors of its parts."""
    own, rise = _log_total(law, keep_bulk, parts, c)
    value = own + _raised(law, keep_bulk, parts, errors, rise) + certificate.log_kappa(c)
    return value + _sum_rounding(law, parts, rise, c)


def _sum_rounding(law: LossLaw, parts: TiltedParts, rise: Array, c: Array) -> Array:
    """Rounding of sums of `n log A`, `n log(1 + B/A)` and the logarithm of kappa(c), about twice over."""
    xp = namespace(law.gauss_n, parts.log_bulk, c)
    bulk = xp.sum(law.gauss_n * xp.abs(parts.log_bulk), axis=-1)
    size = law.mu2 * c * (c + 1.0) + bulk + rise + xp.abs(certificate.log_kappa(c))
    return ROUNDOFF * (law.gauss_n.shape[-1] + 24.0) * (size + 40.0)


def decay_beyond(
    law: LossLaw,
    windows: Windows,
    grids: Grid,
    parts: TiltedParts,
    errors: Array,
    c: Array,
    k0: Array,
    frequency: Array,
) -> Array:
    """`decay` at one frequency over e^{k0}, with the quadrature errors of the parts that it is made from."""
    own, rise = _log_total(law, windows.keep_bulk, parts, c)
    bound = decay(law, windows, grids, parts, c, frequency)
    rounding = 2.0 * _sum_rounding(law, parts, rise, c)
    return bound - _raised(law, windows.keep_bulk, parts, errors, rise) + k0 - own - rounding


def bulk_chernoff(law: LossLaw, parts: TiltedParts, errors: Array, c: Array) -> Array:
    """The same for compositions of bulk steps alone."""
    xp = namespace(law.gauss_n, parts.log_bulk, c)
    bulk = xp.sum(law.gauss_n * (parts.log_bulk + FIRST_ORDER * errors[..., 0]), axis=-1)
    value = law.mu2 * c * (c + 1.0) / 2.0 + bulk + certificate.log_kappa(c)
    return value + _sum_rounding(law, parts, xp.zeros_like(c), c)
