"""Gaussian parts on the lattice, unsampled and Poisson sampled, on the ratio coordinate l = log mix."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.optimize import brentq
from scipy.special import log_ndtr, ndtr

from jaxacct.core.floats import ROUNDOFF
from jaxacct.engines.lattice_backend import Runner
from jaxacct.engines.lattice_part import ApproximateLaw, Placed, last_node, placed_from
from jaxacct.kernels import lattice_cells as kernel

__all__ = ["PlainGaussian", "SampledGaussian"]


@dataclass(frozen=True)
class PlainGaussian:
    """Loss N(s^2/2, s^2): every Gaussian that is not sampled, composed."""

    deviation: float
    sign: float
    count: float = 1.0

    def sketch(self, cut: float) -> ApproximateLaw:
        z = np.linspace(-38.0, 38.0 + self.deviation, 4001)
        log_mass = -0.5 * z * z + np.log((z[1] - z[0]) / np.sqrt(2 * np.pi))
        return ApproximateLaw(self.deviation * (z + 0.5 * self.deviation), log_mass, 1.0)

    def extent(self, theta: float, cut: float, share: float) -> tuple[float, float]:
        s, z = self.deviation, np.linspace(-37.0, 37.0 + 0.5 * theta * self.deviation, 4001)
        moved = log_ndtr(z) + theta * s * z - 0.5 * (theta * s) ** 2
        low = float(z[max(int(np.searchsorted(moved, share)) - 1, 0)])
        high = float(z[min(int(np.searchsorted(-log_ndtr(-z), -cut)) + 1, z.size - 1)])
        # base quantile: z + s under Q for remove, -z under P for add
        low, high = (low + s, high + s) if self.sign > 0 else (-high, -low)
        return s * low - 0.5 * s * s, s * high - 0.5 * s * s

    def highest(self) -> float:
        return np.inf

    def gaps(self) -> list[tuple[float, float]]:
        return []

    def step(self, step: float, upper: bool) -> float:
        return step

    def place(self, extent: tuple[float, float], step: float, nodes: int, upper: bool, run: Runner) -> Placed:
        s, origin = self.deviation, max(extent[0], -37.0 * self.deviation - 0.5 * self.deviation**2)
        last = last_node(extent, origin, step, nodes)
        u = run(kernel.plain_gaussian_nodes, s, origin, step, nodes=nodes)
        remove = self.sign > 0
        lift = (origin + step * np.arange(nodes)) * remove
        cells = run(kernel.gaussian_cells, u, last, s, lift, float(remove), upper)
        low, high, moved = float(u[0]), float(u[last]), s * remove
        infinity, pairs = 0.0, []
        if upper and remove:
            infinity, pairs = _above(high, moved), [(0, _above(-low, -moved))]
        elif upper:
            infinity, pairs = _above(-low, 0.0), [(last, _above(high, 0.0))]
        shift = 8.0 * ROUNDOFF * (abs(origin) + last * step + s * s + s)
        return placed_from(self, cells, pairs, origin, step, last, upper, shift, infinity, run)


def _above(u: float, mean: float) -> float:
    """The mass of N(mean, 1) above u, rounded up."""
    x = mean - u
    x += 8.0 * ROUNDOFF * (abs(mean) + abs(u))
    return min(float(ndtr(x)) * (1.0 + 1e-12 * (1.0 + x * x)) + 1e-307, 1.0)


@dataclass(frozen=True)
class SampledGaussian:
    """Poisson-sampled Gaussian, 0 < q < 1, composed `count` times."""

    sigma: float
    q: float
    count: float
    sign: float

    def _rise(self, u: np.ndarray | float) -> np.ndarray:
        """log mix - log(1 - q) at the standard quantile u."""
        y = np.asarray(u) / self.sigma - 0.5 / self.sigma**2
        return np.logaddexp(0.0, y + np.log(self.q) - np.log1p(-self.q))

    def _mean_rise(self, u: float) -> float:
        """log of the mean ratio below u, less log(1 - q)."""
        log_mean = log_ndtr(u - 1.0 / self.sigma) - log_ndtr(u)
        return float(np.logaddexp(0.0, log_mean + np.log(self.q) - np.log1p(-self.q)))

    def sketch(self, cut: float) -> ApproximateLaw:
        top, mode = (self._top(cut), 1.0 / self.sigma) if self.sign > 0 else (38.0, 0.0)
        count = int(min(2e5, max(2000.0, 4 * (min(top, 1e5) + 38.0) / min(1.0, self.sigma))))
        u = np.linspace(-38.0, top, count)
        if mode > 2.0 * 38.0:  # two modes, and nothing between them
            u = np.append(np.linspace(-38.0, 38.0, count), np.linspace(mode - 38.0, max(top, mode), count))
        weight = np.log(np.gradient(u) / np.sqrt(2 * np.pi))
        ratio = np.log1p(-self.q) + self._rise(u)
        if self.sign < 0:
            return ApproximateLaw(-ratio, weight - 0.5 * u * u, self.count)
        unhit, hit = np.log1p(-self.q) - 0.5 * u * u, np.log(self.q) - 0.5 * (u - mode) ** 2
        return ApproximateLaw(ratio, weight + np.logaddexp(unhit, hit), self.count)

    def _top(self, cut: float) -> float:
        """Standard quantile above which the P-mass for remove, times the count, is at most e^cut."""
        mode = 1.0 / self.sigma
        u = np.linspace(0.0, 38.0 + mode, 4001)
        if mode > 2.0 * 38.0:
            u = np.append(np.linspace(0.0, 38.0, 2001), np.linspace(mode - 38.0, mode + 38.0, 2001))
        unhit, hit = log_ndtr(-u), log_ndtr(mode - u)
        log_tail = np.logaddexp(np.log1p(-self.q) + unhit, np.log(self.q) + hit)
        small = log_tail + np.log(self.count) <= cut
        return float(u[np.argmax(small)] if small.any() else u[-1])

    def extent(self, theta: float, cut: float, share: float) -> tuple[float, float]:
        low = float(np.log1p(-self.q))
        if self.sign > 0:
            return low, low + float(self._rise(self._top(cut)))
        u = np.linspace(0.0, 38.0, 4001)
        ratio = low + self._rise(u)
        small = log_ndtr(-u) + np.log(self.count) - theta * np.maximum(ratio, 0.0) <= share
        return low, float(ratio[np.argmax(small)] if small.any() else ratio[-1])

    def highest(self) -> float:
        return np.inf if self.sign > 0 else -float(np.log1p(-self.q))

    def gaps(self) -> list[tuple[float, float]]:
        return []

    def step(self, step: float, upper: bool) -> float:
        return step

    def place(self, extent: tuple[float, float], step: float, nodes: int, upper: bool, run: Runner) -> Placed:
        rise, kept = (0.0, False) if upper else self._contracted(step)
        origin = float(np.log1p(-self.q)) + rise
        last = last_node(extent, origin, step, nodes)
        u = run(kernel.gaussian_nodes, self.sigma, self.q, rise, step, nodes=nodes)
        remove, mode = self.sign > 0, 1.0 / self.sigma
        lift = (origin + step * np.arange(nodes)) * remove
        cells = run(kernel.gaussian_cells, u, last, mode, lift, self.q * remove, upper)
        pairs: list[tuple[int, float]] = []
        infinity, inexact, high = 0.0, 0.0, float(u[last])
        if upper and remove:
            infinity = (1.0 - self.q) * _above(high, 0.0) + self.q * _above(high, mode)
        elif upper:
            pairs = [(last, _above(high, 0.0))]
        else:
            cells = cells.without_first()
            bottom, inexact = self._below(float(u[1]), rise) if kept else (0.0, 0.0)
            pairs = [(0, bottom * float(np.exp(origin * remove)))]
        shift = self._shift(rise, last * step) + inexact
        return placed_from(self, cells, pairs, origin, step, last, upper, shift, infinity, run)

    def _contracted(self, step: float) -> tuple[float, bool]:
        """Rise of a node 0 at the mean ratio of all below node 1 = node 0 + step; whether that mass is kept.

        All mass below node 1 is replaced by its conditional mean (a post-processing), because no mass could
        be merged onto the infimum itself.
        """
        low, high = -37.0, 38.0 + 1.0 / self.sigma

        def excess(u: float) -> float:
            return float(self._rise(u)) - self._mean_rise(u) - step

        if excess(low) > 0:
            return max(float(self._rise(low)) - step, 0.0), False
        if excess(high) < 0:
            return -float(np.log1p(-self.q)), True
        return self._mean_rise(float(brentq(excess, low, high, xtol=1e-14, rtol=1e-15))), True

    def _below(self, edge: float, rise: float) -> tuple[float, float]:
        """The mass below node 1, which is at the standard quantile `edge`, and the error of its mean ratio."""
        mass = float(ndtr(edge)) * (1.0 - ROUNDOFF * (8.0 + 8.0 * min(edge, 0.0) ** 2))
        return mass, abs(self._mean_rise(edge) - rise)

    def _shift(self, rise: float, span: float) -> float:
        """Error of the stored node positions: p_k |error of y_k|, p_k = q e^{y_k}/mix_k."""
        odds = self.q / (1.0 - self.q)
        heavy = -np.expm1(-(rise + span))
        far = abs(np.log(self.q)) + 0.5 / self.sigma**2 + 4.0
        top = max(span + rise + far, 0.0)
        return float(8.0 * ROUNDOFF * (heavy * (top + far) + min(odds, np.log1p(odds) + 0.4)) + 2e-12 * rise)
