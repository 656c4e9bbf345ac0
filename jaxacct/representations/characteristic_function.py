"""The characteristic function of a privacy loss, by closed forms and quadrature: an estimate."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from jaxacct.mechanisms import Components
from jaxacct.mechanisms.finite import log_mixture

_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(16)
"""Nodes and weights of the Gauss-Legendre rule, which each panel uses."""


class LogCharacteristic(NamedTuple):
    """Logarithm of a characteristic function: exp(value) is the function, `value` is complex, `kind` is "estimate"."""

    value: np.ndarray
    kind: str


def log_characteristic(parts: Components, row: int, t: np.ndarray) -> np.ndarray:
    """Compute `log E_P[e^{itL} ; L < inf]` of one configuration at frequencies t (T,), up to multiples of 2 pi i."""
    z = 1j * np.asarray(t, np.float64)
    value = parts.mu2[row] * z * (z + 1.0) / 2.0
    removing = parts.sign[row] > 0
    power = z + 1.0 if removing else -z
    for sigma, q, n in zip(parts.gauss_sigma[row], parts.gauss_q[row], parts.gauss_n[row], strict=True):
        if n > 0:
            value = value + n * np.log(_sampled_gaussian(float(sigma), float(q), power))
    for b, q, n in zip(parts.laplace_scale[row], parts.laplace_q[row], parts.laplace_n[row], strict=True):
        if n > 0:
            value = value + n * (_laplace(float(b), z) if q == 1.0 else np.log(_sampled_laplace(float(b), q, power)))
    for loss, mass, n in zip(parts.finite_loss[row], parts.finite_mass[row], parts.finite_n[row], strict=True):
        if n > 0:
            value = value + n * np.log(np.exp(np.multiply.outer(z, loss)) @ mass)
    return value


def _laplace(b: float, z: np.ndarray) -> np.ndarray:
    x = (1.0 + 2.0 * z) / b
    return z / b + np.log(1.0 + z / b * np.expm1(-x) / x)


def _sampled_gaussian(sigma: float, q: float, power: np.ndarray) -> np.ndarray:
    """Integrate `e^{power * loss}` over u ~ N(0, 1), which is output / sigma; high frequencies need small steps."""
    fastest = np.max(np.abs(power.imag)) / sigma
    height = min(6.0, 0.9 * np.pi * sigma)
    step = 2.0 * np.pi / (fastest + 40.0 / height + 0.5 * height)
    u = np.arange(-9.0, 9.0 + 1.0 / sigma + step, step)
    loss = log_mixture(u / sigma - 0.5 / sigma**2, np.asarray(q))
    weight = step / np.sqrt(2.0 * np.pi) * np.exp(-0.5 * u**2)
    return integrate(power, loss, weight)


def _sampled_laplace(b: float, q: float, power: np.ndarray) -> np.ndarray:
    panels = int(np.ceil(2.0 / b * (0.25 * np.max(np.abs(power.imag)) + 4.0)))
    half = 1.0 / (b * panels)
    v = ((-1.0 / b + half * (2.0 * np.arange(panels) + 1.0))[:, None] + half * _NODES).ravel()
    weight = 0.25 * half * np.tile(_WEIGHTS, panels) * np.exp(-0.5 * (v + 1.0 / b))
    v = np.concatenate([[-1.0 / b, 1.0 / b], v])
    weight = np.concatenate([[0.5, 0.5 * np.exp(-1.0 / b)], weight])
    return integrate(power, log_mixture(v, np.asarray(q)), weight)


def integrate(power: np.ndarray, loss: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Return the sum of `weight * e^{power * loss}` over the nodes, a block of frequencies at a time."""
    block = max(1, 2**20 // loss.size)  # 2**20 exponentials take 16 MiB
    pieces = [np.exp(np.multiply.outer(power[i : i + block], loss)) @ weight for i in range(0, power.size, block)]
    return np.concatenate(pieces)
