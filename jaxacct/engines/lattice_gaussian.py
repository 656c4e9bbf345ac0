"""Gaussian parts on the lattice, unsampled and Poisson sampled, on the ratio coordinate l = log mix."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.optimize import brentq
from scipy.special import log_ndtr, ndtr

from jaxacct.engines.lattice_law import Placed, Sketch, atoms_on, last_node, placed_from
from jaxacct.kernels import lattice as kernel
from jaxacct.kernels.lattice import UNIT

__all__ = ["PlainGaussian", "SampledGaussian"]


@dataclass(frozen=True)
class PlainGaussian:
    """Loss N(s^2/2, s^2): every Gaussian that is not sampled, composed."""

    deviation: float
    sign: float
    count: float = 1.0

    def sketch(self, cut: float) -> Sketch:
        z = np.linspace(-38.0, 38.0 + self.deviation, 4001)
        log_mass = -0.5 * z * z + np.log((z[1] - z[0]) / np.sqrt(2 * np.pi))
        return Sketch(self.deviation * (z + 0.5 * self.deviation), log_mass, 1.0)

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

    def place(self, extent: tuple[float, float], step: float, nodes: int, upper: bool) -> Placed:
        s, origin = self.deviation, max(extent[0], -37.0 * self.deviation - 0.5 * self.deviation**2)
        last = last_node(extent, origin, step, nodes)
        u = kernel.plain_gaussian_nodes(s, origin, step, nodes)
        cells = kernel.gaussian_cells(u, last, s, upper)
        low, high = float(u[0]), float(u[last])
        grown = 1.0 + 1e-12 * (1.0 + max(low * low, high * high))
        below, above = ndtr(low) * grown, ndtr(-high) * grown
        infinity, pairs = 0.0, []
        if upper and self.sign > 0:
            infinity, pairs = float(ndtr(s - high) * grown), [(0, below)]
        elif upper:
            infinity, pairs = float(below), [(last, above)]
        shift = 8.0 * UNIT * (abs(origin) + last * step + s * s + s)
        return placed_from(self, cells, atoms_on(nodes, pairs, upper), origin, step, last, upper, shift, infinity)


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

    def sketch(self, cut: float) -> Sketch:
        top = self._top(cut) if self.sign > 0 else 38.0
        u = np.linspace(-38.0, top, int(min(2e5, max(2000.0, 4 * (top + 38.0) / min(1.0, self.sigma)))))
        ratio = np.log1p(-self.q) + self._rise(u)
        base = -0.5 * u * u + np.log((u[1] - u[0]) / np.sqrt(2 * np.pi))
        return Sketch(self.sign * ratio, base + (ratio if self.sign > 0 else 0.0), self.count)

    def _top(self, cut: float) -> float:
        """Standard quantile above which the P-mass for remove, times the count, is at most e^cut."""
        u = np.linspace(0.0, 38.0 + 1.0 / self.sigma, 4001)
        unhit, hit = log_ndtr(-u), log_ndtr(1.0 / self.sigma - u)
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

    def place(self, extent: tuple[float, float], step: float, nodes: int, upper: bool) -> Placed:
        rise, bottom, inexact = (0.0, 0.0, 0.0) if upper else self._contracted(step)
        origin = float(np.log1p(-self.q)) + rise
        last = last_node(extent, origin, step, nodes)
        u = kernel.gaussian_nodes(self.sigma, self.q, rise, step, nodes)
        a, b, eta = kernel.gaussian_cells(u, last, 1.0 / self.sigma, upper)
        pairs: list[tuple[int, float]] = []
        infinity, high = 0.0, float(u[last])
        if upper:
            grown = 1.0 + 1e-12 * (1.0 + high * high)
            if self.sign > 0:
                tail = (1 - self.q) * ndtr(-high) + self.q * ndtr(1.0 / self.sigma - high)
                infinity = float(tail * grown)
            else:
                pairs = [(last, float(ndtr(-high) * grown))]
        else:
            a, b = a.at[0].set(0.0), b.at[0].set(0.0)
            pairs = [(0, bottom)]
        atoms = atoms_on(nodes, pairs, upper)
        shift = self._shift(rise, last * step) + inexact
        return placed_from(self, (a, b, eta), atoms, origin, step, last, upper, shift, infinity)

    def _contracted(self, step: float) -> tuple[float, float, float]:
        """Rise of a node 0 at the mean ratio of all below node 1 = node 0 + step, that mass, and the error.

        All mass below node 1 is replaced by its conditional mean (a post-processing), because no mass could
        be merged onto the infimum itself.
        """
        low, high = -37.0, 38.0 + 1.0 / self.sigma

        def excess(u: float) -> float:
            return float(self._rise(u)) - self._mean_rise(u) - step

        if excess(low) > 0:
            return max(float(self._rise(low)) - step, 0.0), 0.0, 0.0
        if excess(high) < 0:
            return -float(np.log1p(-self.q)), 1.0, 0.0
        rise = self._mean_rise(float(brentq(excess, low, high, xtol=1e-14, rtol=1e-15)))
        edge = float(kernel.gaussian_nodes(self.sigma, self.q, rise, step, 2)[1])
        mass = float(ndtr(edge)) * (1.0 - UNIT * (8.0 + 8.0 * min(edge, 0.0) ** 2))
        return rise, mass, abs(self._mean_rise(edge) - rise)

    def _shift(self, rise: float, span: float) -> float:
        """Error of the stored node positions: p_k |error of y_k|, p_k = q e^{y_k}/mix_k."""
        odds = self.q / (1.0 - self.q)
        heavy = -np.expm1(-(rise + span))
        far = abs(np.log(self.q)) + 0.5 / self.sigma**2 + 4.0
        top = max(span + rise + far, 0.0)
        return float(8.0 * UNIT * (heavy * (top + far) + min(odds, np.log1p(odds) + 0.4)) + 2e-12 * rise)
