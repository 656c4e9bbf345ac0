"""The parts of a composition as laws that can be sketched (for planning) and put on a lattice (for the bracket).

Every law is held on the ratio coordinate l = log mix of `kernels.lattice`; `sign` says which way the loss runs.
A sketch only steers choices of tilt, window and range; nothing certified depends on it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import jax.numpy as jnp
import numpy as np
from jax import Array
from scipy.optimize import brentq
from scipy.special import log_ndtr, ndtr

from jaxacct.kernels import lattice as kernel
from jaxacct.kernels.lattice import UNIT
from jaxacct.mechanisms.components import Components

__all__ = ["Law", "Placed", "Sketch", "laws_of"]


class Sketch(NamedTuple):
    """Losses and log masses under P of one part, and how often it is composed; approximate."""

    loss: np.ndarray
    log_mass: np.ndarray
    count: float


class Placed(NamedTuple):
    """One part on the lattice, rounded up or down.

    Mass k sits at loss `direction (origin + k h)` up to an error `shift`; its tilt by theta is
    e^{c (origin + k h)} with c = unit + direction theta.  `infinity` is P-mass moved to +infinity (upper law);
    `deficit` bounds P-mass by which losses are overstated (lower law, rounding only).
    """

    mass: Array
    origin: float
    direction: float
    unit: float
    count: float
    shift: float
    infinity: float
    deficit: float


class Law(Protocol):
    """What the engine asks of a part."""

    count: float
    sign: float

    def sketch(self, cut: float) -> Sketch:
        """Approximate loss law under P without the highest losses, of mass e^cut in the composition."""

    def extent(self, theta: float, cut: float, share: float) -> tuple[float, float]:
        """Range of the ratio coordinate to put on the lattice.

        Mass of the highest losses is at most e^cut and mass of the lowest, tilted, at most e^share, in the composition.
        """

    def gaps(self) -> list[tuple[float, float]]:
        """Distances that should be multiples of the step, with weights."""

    def step(self, step: float, upper: bool) -> float:
        """The step nearest to `step` that puts this law's own atoms on nodes."""

    def place(self, extent: tuple[float, float], step: float, nodes: int, upper: bool) -> Placed:
        """The law on the lattice."""


def laws_of(parts: Components, index: int) -> list[Law]:
    """The parts of configuration `index` that are present."""
    sign = float(parts.sign[index])
    laws: list[Law] = []
    if parts.mu2[index] > 0:
        laws.append(PlainGaussian(float(np.sqrt(parts.mu2[index])), sign))
    for sigma, q, n in zip(parts.gauss_sigma[index], parts.gauss_q[index], parts.gauss_n[index], strict=True):
        if n > 0:
            laws.append(SampledGaussian(float(sigma), float(q), float(n), sign))
    for scale, q, n in zip(parts.laplace_scale[index], parts.laplace_q[index], parts.laplace_n[index], strict=True):
        if n > 0:
            laws.append(Laplace(float(scale), float(q), float(n), sign))
    for loss, mass, n in zip(parts.finite_loss[index], parts.finite_mass[index], parts.finite_n[index], strict=True):
        if n > 0:
            laws.append(Finite(loss[mass > 0], mass[mass > 0], float(n), sign))
    return laws


def _last(extent: tuple[float, float], origin: float, step: float, nodes: int) -> int:
    return int(np.clip(np.ceil((extent[1] - origin) / step - 1e-9), 1, nodes - 2))


def _atoms(nodes: int, pairs: list[tuple[int, float]], upper: bool) -> Array:
    """Masses on nodes, rounded outward by `1e-14` relative (inward for a lower law)."""
    atoms = np.zeros(nodes)
    for k, mass in pairs:
        atoms[k] += mass * (1.0 + 1e-14 if upper else 1.0 - 1e-14)
    return jnp.asarray(atoms)


def _placed(law: Law, cells: tuple[Array, Array, Array], atoms: Array, origin: float, step: float, last: int,
            upper: bool, shift: float, infinity: float) -> Placed:
    """Masses from cells for the two kinds of law that live on the ratio coordinate."""
    ascending = law.sign > 0
    if upper:
        mass, deficit = kernel.upper_masses(*cells, atoms), 0.0
    else:
        mass, lost = kernel.lower_masses(*cells, atoms, step, last, ascending=ascending)
        deficit = float(lost) * (float(np.exp(min(origin + last * step, 700.0))) if ascending else 1.0)
    unit = 1.0 if ascending else 0.0
    return Placed(mass, origin, law.sign, unit, law.count, shift, infinity, deficit)


@dataclass(frozen=True)
class PlainGaussian:
    """Loss N(s^2/2, s^2): every Gaussian that is not sampled, composed."""

    deviation: float
    sign: float
    count: float = 1.0

    def sketch(self, cut: float) -> Sketch:
        z = np.linspace(-38.0, 38.0 + self.deviation, 4001)
        return Sketch(self.deviation * (z + 0.5 * self.deviation), -0.5 * z * z + np.log((z[1] - z[0]) / 2.5066), 1.0)

    def extent(self, theta: float, cut: float, share: float) -> tuple[float, float]:
        s, z = self.deviation, np.linspace(-37.0, 37.0 + 0.5 * theta * self.deviation, 4001)
        moved = log_ndtr(z) + theta * s * z - 0.5 * (theta * s) ** 2
        low = z[max(np.searchsorted(moved, share) - 1, 0)]
        high = z[min(np.searchsorted(-log_ndtr(-z), -cut) + 1, z.size - 1)]
        # base quantile: z + s under Q for remove, -z under P for add
        low, high = (low + s, high + s) if self.sign > 0 else (-high, -low)
        return s * low - 0.5 * s * s, s * high - 0.5 * s * s

    def gaps(self) -> list[tuple[float, float]]:
        return []

    def step(self, step: float, upper: bool) -> float:
        return step

    def place(self, extent: tuple[float, float], step: float, nodes: int, upper: bool) -> Placed:
        s, origin = self.deviation, max(extent[0], -37.0 * self.deviation - 0.5 * self.deviation**2)
        last = _last(extent, origin, step, nodes)
        u = kernel.plain_gaussian_nodes(s, origin, step, nodes)
        cells = kernel.gaussian_cells(u, last, s, upper=upper)
        low, high = float(u[0]), float(u[last])
        grown = 1.0 + 1e-12 * (1.0 + max(low * low, high * high))
        below, above = ndtr(low) * grown, ndtr(-high) * grown
        infinity, pairs = 0.0, []
        if upper and self.sign > 0:
            infinity, pairs = float(ndtr(s - high) * grown), [(0, below)]
        elif upper:
            infinity, pairs = float(below), [(last, above)]
        shift = 8.0 * UNIT * (abs(origin) + last * step + s * s + s)
        return _placed(self, cells, _atoms(nodes, pairs, upper), origin, step, last, upper, shift, infinity)


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
        log_tail = np.logaddexp(np.log1p(-self.q) + log_ndtr(-u), np.log(self.q) + log_ndtr(1.0 / self.sigma - u))
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

    def gaps(self) -> list[tuple[float, float]]:
        return []

    def step(self, step: float, upper: bool) -> float:
        return step

    def place(self, extent: tuple[float, float], step: float, nodes: int, upper: bool) -> Placed:
        rise, bottom, inexact = (0.0, 0.0, 0.0) if upper else self._contracted(step)
        origin = float(np.log1p(-self.q)) + rise
        last = _last(extent, origin, step, nodes)
        u = kernel.gaussian_nodes(self.sigma, self.q, rise, step, nodes)
        a, b, eta = kernel.gaussian_cells(u, last, 1.0 / self.sigma, upper=upper)
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
        atoms = _atoms(nodes, pairs, upper)
        shift = self._shift(rise, last * step) + inexact
        return _placed(self, (a, b, eta), atoms, origin, step, last, upper, shift, infinity)

    def _contracted(self, step: float) -> tuple[float, float, float]:
        """Rise of a node 0 that is the mean ratio of all below node 1 = node 0 + step, that mass, and its error.

        All mass below node 1 is replaced by its conditional mean (a post-processing), because no mass could be
        merged onto the infimum itself.
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

    def sketch(self, cut: float) -> Sketch:
        edge = 1.0 / self.scale
        v = np.linspace(-edge, edge, 4001)
        middle = 0.5 * (v[1:] + v[:-1])
        inside = np.log(0.25 * (v[1] - v[0])) - 0.5 * (edge + middle)
        at = np.concatenate([[-edge], middle, [edge]])
        base = np.concatenate([[np.log(0.5)], inside, [np.log(0.5) - edge]])
        ratio = self._ratio(at)
        return Sketch(self.sign * ratio, base + (ratio if self.sign > 0 else 0.0), self.count)

    def extent(self, theta: float, cut: float, share: float) -> tuple[float, float]:
        return float(self._ratio(-1.0 / self.scale)), float(self._ratio(1.0 / self.scale))

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

    def place(self, extent: tuple[float, float], step: float, nodes: int, upper: bool) -> Placed:
        edge, (low, top) = 1.0 / self.scale, self.extent(0.0, 0.0, 0.0)
        origin, first, bottom, inexact = (low, -edge, 0.5, 0.0) if upper else self._contracted(step)
        cells = (top - origin) / step
        snap = 32.0 * UNIT * (abs(top) + abs(origin) + top - origin)
        on_node = abs(cells - round(cells)) * step <= snap
        last = int(np.clip(round(cells) if on_node else np.ceil(cells), 1, nodes - 2))
        if not upper and bottom == 1.0:
            zero = jnp.zeros(nodes)
            return _placed(self, (zero, zero, zero), _atoms(nodes, [(0, 1.0)], upper), 0.0, step, 1, upper, 0.0, 0.0)
        lift = float(np.exp(origin - first)) / self.q
        a, b, eta = kernel.laplace_cells(self.scale, first, lift, step, last, nodes=nodes)
        if not upper:
            a, b = a.at[0].set(0.0), b.at[0].set(0.0)
        pairs, atom = [(0, bottom)], 0.5 * np.exp(-edge)
        if on_node:
            pairs.append((last, atom))
        else:
            share = float(np.clip(np.expm1(top - origin - (last - 1) * step) / np.expm1(step), 0.0, 1.0))
            a, b = a.at[last - 1].add(atom * (1 - share)), b.at[last - 1].add(atom * share)
            eta = eta.at[last - 1].add(1e-9)
        heavy = self.q * np.exp(edge - top)
        shift = 8.0 * UNIT * heavy * (4 * edge + abs(np.log(self.q)) + 4.0) + snap + inexact
        return _placed(self, (a, b, eta), _atoms(nodes, pairs, upper), origin, step, last, upper, float(shift), 0.0)

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


@dataclass(frozen=True)
class Finite:
    """A finite loss law in the direction asked for, composed `count` times."""

    loss: np.ndarray
    mass: np.ndarray
    count: float
    sign: float

    def sketch(self, cut: float) -> Sketch:
        return Sketch(self.loss, np.log(self.mass), self.count)

    def extent(self, theta: float, cut: float, share: float) -> tuple[float, float]:
        return float(self.loss.min()), float(self.loss.max())

    def gaps(self) -> list[tuple[float, float]]:
        far = self.loss - self.loss.min()
        return [(float(d), self.count * float(m)) for d, m in zip(far, self.mass, strict=True) if d > 0]

    def step(self, step: float, upper: bool) -> float:
        return step

    def place(self, extent: tuple[float, float], step: float, nodes: int, upper: bool) -> Placed:
        origin = float(self.loss.min())
        far = (self.loss - origin) / step
        shift = 8.0 * UNIT * (np.abs(self.loss).max() + abs(origin) + step)
        nearest = np.rint(far)
        exact = np.abs(far - nearest) * step <= shift
        k = np.where(exact, nearest, np.floor(far)).astype(np.int64)
        right = np.where(exact, 0.0, -np.expm1((k - far) * step) / -np.expm1(-step)) if upper else np.zeros(far.size)
        left = np.expm1((k + 1 - far) * step) / np.expm1(step) if upper else np.ones(far.size)
        mass = np.zeros(nodes)
        np.add.at(mass, k, self.mass * np.where(exact, 1.0, left))
        np.add.at(mass, k + 1, self.mass * right)
        mass *= 1.0 + (32.0 if upper else -32.0) * UNIT
        return Placed(jnp.asarray(mass), origin, 1.0, 0.0, self.count, 2.0 * float(shift), 0.0, 0.0)
