"""delta(eps) of compositions of mixtures of Gaussians, by damped inversion with a certificate (README.md, section 7).

delta(eps) = (1/2 pi i) int e^{K(z) - z eps}/(z (z+1)) dz on Re z = c,   K = sum_i n_i log sum_b share_b M_b(z)
"""

from __future__ import annotations

import numpy as np

from jaxacct.core.floats import ROUNDOFF
from jaxacct.kernels.mixture_nodes import Nodes

__all__ = ["delta_bracket", "epsilon_bracket"]

NEWTON_STEPS = 60
"""Most Newton steps for epsilon."""
FACTORS = (1.02, 1.5, 4.0)
"""How far an end is moved, over the error divided by the slope, until it passes its check."""


def _value(nodes: Nodes, epsilon: float) -> tuple[float, float, float]:
    """(S, its error without images, slope): delta = e^{K(c) - c eps} S."""
    z = nodes.c + 1j * nodes.t
    weight = np.full(nodes.t.size, 2.0 / nodes.period)
    weight[0] *= 0.5
    kernel = weight / (z * (z + 1.0))
    terms = kernel * np.exp(nodes.log_power - 1j * nodes.t * epsilon)
    size = np.abs(kernel)
    phase = ROUNDOFF * (6.0 * nodes.t * abs(epsilon) + nodes.t.size + 40.0)
    error = float(np.sum(size * nodes.wrong + np.abs(terms) * phase)) + nodes.cut
    return float(np.sum(np.real(terms))), error, float(np.sum(np.real(z * terms)))


def delta_bracket(nodes: Nodes, epsilon: float) -> tuple[float, float, float]:
    """log of (lower, estimate, upper) of delta(eps)."""
    value, error, _ = _value(nodes, epsilon)
    log_z = nodes.k - nodes.c * epsilon
    grain = nodes.k_error + 8.0 * ROUNDOFF * (abs(nodes.k) + abs(nodes.c * epsilon) + 8.0)
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        left = -np.log(np.expm1(np.minimum(nodes.c * nodes.period, 700.0)))
        right = nodes.images_log - nodes.images_at * epsilon
        right = right - np.log(np.expm1(np.minimum((nodes.images_at - nodes.c) * nodes.period, 700.0)))
        images = np.logaddexp(left, np.min(right) if right.size else np.inf) + 1e-9
        rest = value - error - float(np.exp(min(images - log_z + grain, 700.0)))
        upper = log_z + grain + float(np.log(value + error)) if value + error > 0.0 else np.inf
        lower = log_z - grain + float(np.log(rest)) if rest > 1e-300 else -np.inf
        estimate = log_z + float(np.log(value)) if value > 0.0 else upper
    if not (np.isfinite(upper) and lower <= upper):
        return -np.inf, np.nan, np.inf
    return lower, float(np.clip(estimate, lower, upper)), upper


def epsilon_bracket(nodes: Nodes, log_low: float, log_high: float) -> tuple[float, float, float]:
    """(lower, estimate, upper) of epsilon: the upper end for a delta of e^log_low, the lower end for e^log_high."""
    eps = (nodes.k - log_low) / nodes.c
    for _ in range(NEWTON_STEPS):
        value, _, slope = _value(nodes, eps)
        if not value > 0.0:
            eps -= 0.5 / nodes.c
            continue
        move = nodes.k - nodes.c * eps + np.log(value) - log_low
        rate = float(np.clip(slope / value, 0.2 * nodes.c, 5.0 * nodes.c + 5.0))
        move = float(np.clip(move / rate, -2.0 / nodes.c, 2.0 / nodes.c))
        eps += move
        if abs(move) <= 1e-13 * max(abs(eps), 1e-3 / nodes.c):
            break
    low, _, high = delta_bracket(nodes, eps)
    value, _, slope = _value(nodes, eps)
    if not (value > 0.0 and np.isfinite(high)):
        return -np.inf, np.nan, np.inf
    rate = float(np.clip(slope / value, 0.2 * nodes.c, 5.0 * nodes.c + 5.0))
    upper, lower = np.inf, -np.inf
    tiny = 1e-15 * abs(eps) + 1e-300
    for factor in FACTORS:
        above = eps + factor * max(high - log_low, 0.0) / rate + tiny * factor
        if delta_bracket(nodes, above)[2] <= log_low - 4.0 * ROUNDOFF * abs(log_low):
            upper = above
            break
    for factor in FACTORS:
        below = eps - factor * max(log_high - low, 0.0) / rate - tiny * factor
        if np.isfinite(below) and delta_bracket(nodes, below)[0] >= log_high + 4.0 * ROUNDOFF * abs(log_high):
            lower = below
            break
    return lower, float(np.clip(eps, lower, upper)), upper
