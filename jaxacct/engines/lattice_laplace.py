"""Laplace parts on the lattice, on the ratio coordinate."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.optimize import brentq

from jaxacct.core.floats import ROUNDOFF
from jaxacct.engines.lattice_backend import Runner
from jaxacct.engines.lattice_part import ApproximateLaw, Placed, placed_from
from jaxacct.kernels import lattice_cells as kernel

__all__ = ["Laplace"]


@dataclass(frozen=True)
class Laplace:
    """Laplace noise of scale b and sensitivity 1, Poisson sampled at 0 < q <= 1, composed `count` times."""

    scale: float
    q: float
    count: float
    sign: float

    def _ratio(self, v: np.ndarray | float) -> np.ndarray:
        """log(1 - q + q e^v)."""
        v = np.asarray(v, np.float64)
        small = np.log1p(self.q * np.expm1(np.minimum(v, 1.0)))
        if self.q == 1.0:
            return v
        return np.where(v < 1.0, small, np.logaddexp(np.log1p(-self.q), np.log(self.q) + v))

    def _log_mean(self, v: float) -> float:
        """log of P/Q below base loss v: P = e^{(v - 1/b)/2}/2, Q = 1 - e^{-(v + 1/b)/2}/2."""
        edge = 1.0 / self.scale
        return float(0.5 * (v - edge) - np.log(2.0 - np.exp(-0.5 * (v + edge))))

    def sketch(self, cut: float) -> ApproximateLaw:
        edge = 1.0 / self.scale
        v = np.linspace(-edge, edge, 4001)
        middle = 0.5 * (v[1:] + v[:-1])
        inside = np.log(0.25 * (v[1] - v[0])) - 0.5 * (edge + middle)
        at = np.concatenate([[-edge], middle, [edge]])
        base = np.concatenate([[np.log(0.5)], inside, [np.log(0.5) - edge]])
        ratio = self._ratio(at)
        return ApproximateLaw(self.sign * ratio, base + (ratio if self.sign > 0 else 0.0), self.count)

    def extent(self, theta: float, cut: float, share: float) -> tuple[float, float]:
        return float(self._ratio(-1.0 / self.scale)), float(self._ratio(1.0 / self.scale))

    def highest(self) -> float:
        return float(max(self.sign * x for x in self.extent(0.0, 0.0, 0.0)))

    def gaps(self) -> list[tuple[float, float]]:
        low, high = self.extent(0.0, 0.0, 0.0)
        return [(high - low, self.count)]

    def step(self, step: float, upper: bool) -> float:
        low, high = self.extent(0.0, 0.0, 0.0)
        cells = max(np.floor((high - low) / step), 1.0)
        if upper or cells < 3:
            return step
        for _ in range(60):
            step = (high - self._contracted(step)[0]) / cells
        return float(step)

    def place(self, extent: tuple[float, float], step: float, nodes: int, upper: bool, run: Runner) -> Placed:
        edge, (low, top) = 1.0 / self.scale, self.extent(0.0, 0.0, 0.0)
        origin, first, bottom, inexact = (low, -edge, 0.5, 0.0) if upper else self._contracted(step)
        steps = (top - origin) / step
        snap = 32.0 * ROUNDOFF * (abs(top) + abs(origin) + top - origin)
        on_node = abs(steps - round(steps)) * step <= snap
        last = int(np.clip(round(steps) if on_node else np.ceil(steps), 1, nodes - 2))
        zero = np.zeros(nodes)
        if not upper and bottom == 1.0:
            nothing = kernel.Cells(zero, zero, zero, zero)
            return placed_from(self, nothing, [(0, 1.0)], 0.0, step, 1, upper, 0.0, 0.0, run)
        remove = self.sign > 0
        # log of what turns the base's masses into P-masses, at the lowest ratio and at the highest
        lift_low, lift_high = (origin, top) if remove else (0.0, 0.0)
        described = self.scale, first, origin, self.q, step, last, remove
        cells = run(kernel.laplace_cells, *described, nodes=nodes)
        if not upper:
            cells = cells.without_first()
        pairs, atom = [(0, bottom * float(np.exp(lift_low)))], 0.5 * float(np.exp(lift_high - edge))
        outward = 8.0 * ROUNDOFF * (abs(lift_high) + edge + 1.0)
        atom *= 1.0 + outward if upper else max(1.0 - outward, 0.0)
        if on_node:
            pairs.append((last, atom))
        else:
            inside = float(np.clip(top - origin - (last - 1) * step, 0.0, step))
            cells = self._with(cells, last - 1, atom, inside, step)
        heavy = min(self.q * np.exp(edge - top), 1.0)
        shift = 8.0 * ROUNDOFF * heavy * (4 * edge + abs(np.log(self.q)) + 4.0) + snap + inexact
        return placed_from(self, cells, pairs, origin, step, last, upper, float(shift), 0.0, run)

    def _with(self, cells: kernel.Cells, cell: int, atom: float, inside: float, step: float) -> kernel.Cells:
        """The cells with an atom at a distance `inside` into one of them, split between its ends as all else is."""
        down = np.exp(-inside) if self.sign > 0 else 1.0
        up = 1.0 if self.sign > 0 else np.exp(inside - step)
        low = atom * down * np.expm1(inside - step) / np.expm1(-step)
        high = atom * up * np.expm1(-inside) / np.expm1(-step)
        return cells.with_atom(cell, low, high, 1e-9)

    def _contracted(self, step: float) -> tuple[float, float, float, float]:
        """Origin, base loss and mass of the mean of all below node 1, and its error (see SampledGaussian)."""
        edge = 1.0 / self.scale

        def excess(v: float) -> float:
            return float(self._ratio(v) - self._ratio(self._log_mean(v))) - step

        if excess(edge) <= 0:
            return 0.0, 0.0, 1.0, 0.0
        v = float(brentq(excess, -edge, edge, xtol=1e-15, rtol=1e-15))
        mean = self._log_mean(v)
        origin = float(self._ratio(mean))
        v = min(mean + float(np.log1p(np.exp(origin - mean) / self.q * np.expm1(step))), edge)
        mass = (1.0 - 0.5 * np.exp(-0.5 * (edge + v))) * (1.0 - 1e-14 * (1.0 + edge))
        inexact = abs(float(self._ratio(self._log_mean(v))) - origin)
        return origin, mean, float(mass), inexact
