"""Rigorous bounds of what the split contour's sum leaves out: terms beyond the cut-off in t, and periodic images.

Derivations in README.md, sections 1, 2 and 6.  The images are bounded by Chernoff's inequality on the real axis.
"""

import jax
import jax.numpy as jnp

from jaxacct.floats import ROUNDOFF
from jaxacct.kernels import certificate, characteristic_decay
from jaxacct.kernels.arrays import Array
from jaxacct.kernels.law import LossLaw, Tilted
from jaxacct.kernels.split.errors import SIDES_FACTOR, STRIP_SHARE, cell_bounds, cell_edges, log_sum, side_bounds
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
    log_m = jnp.logaddexp(parts.log_bulk, parts.log_jump)
    weight = parts.bulk * jnp.exp(parts.log_bulk - log_m) + parts.jump * jnp.exp(parts.log_jump - log_m)
    power = jnp.where(sign > 0, c + 1.0, -c)
    return Tilted(nodes.u, nodes.step, nodes.loss, nodes.posterior, weight, log_m, power)


def decay(law: LossLaw, windows: Windows, grids: Grid, parts: TiltedParts, c: Array, frequencies: Array) -> Array:
    """-log of a bound, over e^{K(c)}, of the integrand's modulus at every t >= each of the frequencies."""
    plain = law.mu2 * frequencies**2 / 2.0
    total = jax.vmap(_whole, (0, 0, None, None))(grids, parts, law.sign, c)
    slabs, lengths = jax.vmap(characteristic_decay.level_sets)(law.gauss_sigma, law.gauss_q, total)
    each = jax.vmap(characteristic_decay.gaussian_decay, (0, 0, None))
    by_levels = law.gauss_n @ jax.vmap(each, (None, None, 0), 1)(slabs, lengths, frequencies)
    ceilings = jax.vmap(_jump_ceiling, (0, 0, 0, 0, None, 0, 0, None))(
        law.gauss_sigma, law.gauss_q, windows.low, windows.high, c, grids, parts.log_jump, frequencies
    )
    odds = parts.log_jump - parts.log_bulk
    rise, log_norm = rise_and_norm(law, windows.keep_bulk, parts.log_bulk, parts.log_jump)
    reached = law.gauss_n @ jnp.logaddexp(0.0, odds[:, None] + ceilings)
    by_jumps = rise - reached + log_norm - jnp.log(-jnp.expm1(-reached))
    by_jumps = by_jumps - DECAY_ROUNDING * (rise + reached)
    return (plain + jnp.where(windows.keep_bulk > 0, by_levels, by_jumps)) * (1.0 - DECAY_ROUNDING) - DECAY_MARGIN


def _jump_ceiling(
    sigma: Array, q: Array, low: Array, high: Array, c: Array, nodes: Grid, log_jump: Array, frequencies: Array
) -> Array:
    """log of a bound of |B(c + it)|/B(c) for every t >= each frequency: on a shifted line e^{itL} decays (remove)."""
    edges = cell_edges(sigma, q, nodes)

    def at(alpha: Array) -> Array:
        _, jump, turn, _ = cell_bounds(sigma, q, 1.0, low, high, c, alpha, edges)
        sides = side_bounds(sigma, q, 1.0, low, high, c, alpha, nodes)[1]
        sums = jax.vmap(lambda t: log_sum(jump - t * turn))(frequencies)
        return jnp.logaddexp(sums, jnp.log(SIDES_FACTOR) + log_sum(sides))

    alphas = jnp.minimum(jnp.array(DECAY_HEIGHTS) * low_blur(sigma), STRIP_SHARE * jnp.pi * sigma)
    return jnp.minimum(jnp.min(jax.vmap(at)(alphas), axis=0) - log_jump, 0.0)


def _raised(law: LossLaw, keep_bulk: Array, parts: TiltedParts, errors: Array, rise: Array) -> Array:
    """By how much errors (J, 2) relative to the parts can raise K(c)."""
    n = law.gauss_n
    share = jax.nn.sigmoid(parts.log_jump - parts.log_bulk)
    # raising both parts alike adds n (error of A); raising B further, d log(e^R - 1) <= (1 + R)/R dR, dR <= R error
    without = n @ errors[:, 0] + (1.0 + rise) * jnp.sum(jnp.where(n > 0, errors[:, 1], 0.0))
    with_bulk = n @ ((1.0 - share) * errors[:, 0] + share * errors[:, 1])
    return FIRST_ORDER * jnp.where(keep_bulk > 0, with_bulk, without)


def _log_total(law: LossLaw, keep_bulk: Array, parts: TiltedParts, c: Array) -> tuple[Array, Array]:
    rise, log_norm = rise_and_norm(law, keep_bulk, parts.log_bulk, parts.log_jump)
    return law.mu2 * c * (c + 1.0) / 2.0 + law.gauss_n @ parts.log_bulk + rise + log_norm, rise


def chernoff(law: LossLaw, keep_bulk: Array, parts: TiltedParts, errors: Array, c: Array) -> Array:
    """An upper bound of `K(c) + log kappa(c)` for what the contour integrates, from the (J, 2) errors of its parts."""
    own, rise = _log_total(law, keep_bulk, parts, c)
    value = own + _raised(law, keep_bulk, parts, errors, rise) + certificate.log_kappa(c)
    return value + _sum_rounding(law, parts, rise, c)


def _sum_rounding(law: LossLaw, parts: TiltedParts, rise: Array, c: Array) -> Array:
    """Rounding of sums of `n log A`, `n log(1 + B/A)` and the logarithm of kappa(c), about twice over."""
    size = law.mu2 * c * (c + 1.0) + law.gauss_n @ jnp.abs(parts.log_bulk) + rise + jnp.abs(certificate.log_kappa(c))
    return ROUNDOFF * (law.gauss_n.size + 24.0) * (size + 40.0)


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
    bound = decay(law, windows, grids, parts, c, frequency[None])[0]
    rounding = 2.0 * _sum_rounding(law, parts, rise, c)
    return bound - _raised(law, windows.keep_bulk, parts, errors, rise) + k0 - own - rounding


def bulk_chernoff(law: LossLaw, parts: TiltedParts, errors: Array, c: Array) -> Array:
    """The same for compositions of bulk steps alone."""
    bulk = law.gauss_n @ (parts.log_bulk + FIRST_ORDER * errors[:, 0])
    value = law.mu2 * c * (c + 1.0) / 2.0 + bulk + certificate.log_kappa(c)
    return value + _sum_rounding(law, parts, 0.0, c)
