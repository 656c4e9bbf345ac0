"""Where the contour of a composition of mixtures of Gaussians goes: saddle points of K, uncertified.

No bound depends on anything here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from jaxacct.kernels.mixture_law import BranchLaw
from jaxacct.kernels.special import logsumexp

__all__ = ["Part", "Sketch", "log_delta_at", "saddle", "sketch"]

LEAST_C, MOST_C = 1e-6, 1e7
"""Range of the saddle points that are searched."""
BISECTIONS = 46
"""Halvings of the logarithm of the abscissa."""


class Part(NamedTuple):
    """What is composed so many `times`: one of several branches, drawn with its share."""

    times: float
    shares: tuple[float, ...]
    doubt: float  # relative error of the shares
    branches: tuple[BranchLaw, ...]


class Sketch(NamedTuple):
    """Uncertified K and its derivatives, for placing the contour."""

    k: float
    mean: float
    variance: float


def sketch(parts: list[Part], c: float) -> Sketch:
    k = mean = variance = 0.0
    for part in parts:
        logs, means, squares = [], [], []
        for share, law in zip(part.shares, part.branches, strict=True):
            power = c + 1.0 if law.sign > 0 else -c
            high = max(power, 0.0) * float(law.shift[-1]) + 10.0
            low = -10.0 if law.sign > 0 else -10.0 - c * float(law.shift[0])
            u = np.linspace(low, high, int(min(4000, 300 + 12.0 * (high - low) * min(1.0 + law.shift[-1], 4.0))))
            y = logsumexp(u[:, None] * law.shift - 0.5 * law.shift**2 + np.log(law.weight), axis=1)
            log_f = -0.5 * u**2 + power * y + np.log((u[1] - u[0]) / np.sqrt(2.0 * np.pi))
            total = float(logsumexp(log_f))
            p = np.exp(log_f - total)
            first = float(p @ y)
            logs.append(np.log(share) + total)
            means.append(law.sign * first)
            squares.append(float(p @ y**2))
        total = float(logsumexp(logs))
        p = np.exp(np.array(logs) - total)
        first = float(p @ means)
        k += part.times * total
        mean += part.times * first
        variance += part.times * max(float(p @ squares) - first**2, 0.0)
    return Sketch(k, mean, variance)


def log_delta_at(c: float, at: Sketch) -> tuple[float, float]:
    """(eps, log delta) by the saddle point approximation of the integrand with its pole."""
    eps = at.mean - 1.0 / c - 1.0 / (c + 1.0)
    bend = at.variance + 1.0 / c**2 + 1.0 / (c + 1.0) ** 2
    return eps, at.k - c * eps - np.log(c) - np.log1p(c) - 0.5 * np.log(2.0 * np.pi * bend)


def saddle(parts: list[Part], too_small: Callable[[float, float], bool]) -> tuple[float, float]:
    """(c, eps) where `too_small(eps, log_delta)` turns false, by bisection in log c."""
    low, high = np.log(LEAST_C), np.log(MOST_C)
    for _ in range(BISECTIONS):
        middle = 0.5 * (low + high)
        c = float(np.exp(middle))
        eps, log_delta = log_delta_at(c, sketch(parts, c))
        if np.isfinite(eps) and np.isfinite(log_delta) and too_small(eps, log_delta):
            low = middle
        else:
            high = middle
        if high - low < 1e-3:
            break
    c = float(np.exp(0.5 * (low + high)))
    return c, log_delta_at(c, sketch(parts, c))[0]
