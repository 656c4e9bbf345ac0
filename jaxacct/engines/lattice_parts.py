"""The parts of a composition. The lattice engine makes a sketch of each part, and places the part on a lattice's nodes.

A sketch, an approximate law, only serves to choose the tilt and the range of the lattice. Gaussian and Laplace parts
are placed by their ratio coordinate log mix, where mix = 1 - q + q dP/dQ for the sampling rate q and the pair (P, Q)
without sampling. Finite laws are placed atom by atom (README.md, "The lattice engine").
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from scipy.special import log_ndtr, ndtr

from jaxacct.core.floats import ROUNDOFF
from jaxacct.engines.backend import Runner
from jaxacct.kernels import lattice_laws as kernel
from jaxacct.kernels.contour.gaussian_errors import FINITE_LOSS_ERROR
from jaxacct.kernels.lattice_laws import Cells

MOST_PAIRS = 2**17
"""Largest number of pairs of atoms when two finite laws are convolved. Sorting so many sums takes about 10 ms."""
CUT_SHARE = 1e-6
"""Finite laws are cut at both ends. Either cut removes at most this share of the mass that may be left out."""
UNDERFLOW = 1e-307
"""Upper bound of what a product of masses loses by underflow."""
LOSS_UNITS = 128.0
"""Bound of the relative error of a finite law's loss, in units of ROUNDOFF. Losses of `FiniteOutput` need 16. If
a mechanism without `FinitePair.excess` has losses that need 4, then its losses at a sampling rate q >= 1e-8 need
`16 + 4 (1 + 1.45 |log q|)` (mechanisms/README.md, "Rounding of finite laws")."""
SUM_ROUNDING = 1e-8
"""Rounding may move a sum of masses away from 1 by at most this number. For 2^22 masses 5e-10 would do."""


class ApproximateLaw(NamedTuple):
    """An approximation of the law of one part's loss under P."""

    loss: np.ndarray
    log_mass: np.ndarray
    repeats: float  # how often the part is composed


class Placed(NamedTuple):
    """One part on N nodes of spacing h, rounded up or down. Node k has the loss `direction (origin + k h)`."""

    mass: np.ndarray  # (N,) P-mass at each node
    origin: float  # the loss of node 0, times the direction
    direction: float  # +1 or -1
    repeats: float  # how often the part is composed
    shift: float  # bound of the absolute error of each loss
    infinity: float  # upper law: P-mass that was moved to an infinite loss
    deficit: float  # lower law: upper bound of (its delta - true delta) and of (its P-mass - 1)


class LatticePart(ABC):
    """A part of a composition."""

    count: float  # how often the part is composed
    sign: float  # +1 for the direction remove, -1 for add

    @abstractmethod
    def sketch(self, cut: float) -> ApproximateLaw:
        """Return an approximate loss law under P. High losses of P-mass e^cut, over all steps, may be left out."""

    @abstractmethod
    def extent(self, theta: float, cut: float, share: float) -> tuple[float, float]:
        """Return the range of log mix that the lattice must hold.

        Over all steps together, the losses above those of the range have a P-mass of at most e^cut. The losses below
        those of the range have a tilted mass of at most e^share.
        """

    @abstractmethod
    def place(self, extent: tuple[float, float], step: float, nodes: int, upper: bool, run: Runner) -> Placed:
        """Return the law on the lattice, rounded up if `upper` and down otherwise."""

    def highest(self) -> float:
        """Return the largest loss, inf if losses are unbounded."""
        return np.inf

    def gaps(self) -> list[tuple[float, float]]:
        """Return pairs (distance of two atoms, weight). The lattice spacing should divide distances of large weight."""
        return []

    def step(self, step: float, upper: bool) -> float:
        """Return a lattice spacing near `step` at which this law's own atoms fall on nodes."""
        return step


def last_node(extent: tuple[float, float], origin: float, step: float, nodes: int) -> int:
    """Return the index of the first node that is at or above the upper end of the extent."""
    return int(np.clip(np.ceil((extent[1] - origin) / step - 1e-9), 1, nodes - 2))


def placed_from(
    law: LatticePart,
    cells: Cells,
    pairs: list[tuple[int, float]],
    origin: float,
    step: float,
    last: int,
    upper: bool,
    shift: float,
    infinity: float,
    run: Runner,
) -> Placed:
    """Return the placed law with the masses of `cells` and `pairs` (node, atom's mass). Its coordinate is log mix."""
    atoms = np.zeros(cells.low.shape[0])
    for node, atom in pairs:
        atoms[node] += atom * (1.0 + 1e-14 if upper else 1.0 - 1e-14)
    turned = law.sign < 0
    first, end = 0, atoms.shape[0] - 1
    if turned:  # for add the loss falls as the coordinate rises; the kernels need ascending losses
        cells, atoms = cells.reversed(), atoms[::-1]
        first, last = end - last, end
    if upper:
        mass, missing = np.asarray(run(kernel.upper_masses, cells, atoms)), 0.0
    else:
        mass, missing = kernel.cancelled(np.asarray(run(kernel.lower_masses, cells, atoms, step, first, last)), step)
    total = float(np.sum(mass))
    if upper:
        lost = 1.0 - total - infinity  # missing P-mass, added to `infinity` if above SUM_ROUNDING
        if not lost <= SUM_ROUNDING:
            infinity = infinity + lost * (1.0 + 1e-9) if np.isfinite(lost) else 1.0
    elif not total <= 1.0 + SUM_ROUNDING:  # the true law has mass 1, so this lower law is no bound
        missing = float("inf")
    return Placed(mass[::-1] if turned else mass, origin, law.sign, law.count, shift, infinity, missing)


@dataclass(frozen=True)
class PlainGaussian(LatticePart):
    """All Gaussians that are not sampled, as one part. Its loss is N(s^2/2, s^2), with s the `deviation`."""

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
        # `low` and `high` are values of z = (loss - its mean)/s. They become outputs u: z + s for remove, -z for add.
        low, high = (low + s, high + s) if self.sign > 0 else (-high, -low)
        return s * low - 0.5 * s * s, s * high - 0.5 * s * s

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
    """Return the mass of N(mean, 1) above u, rounded up."""
    x = mean - u
    x += 8.0 * ROUNDOFF * (abs(mean) + abs(u))
    return min(float(ndtr(x)) * (1.0 + 1e-12 * (1.0 + x * x)) + 1e-307, 1.0)


@dataclass(frozen=True)
class SampledGaussian(LatticePart):
    """A Poisson sampled Gaussian, 0 < q < 1, composed `count` times."""

    sigma: float
    q: float
    count: float
    sign: float

    def _rise(self, u: np.ndarray | float) -> np.ndarray:
        """Return log(mix/(1 - q)), with mix = 1 - q + q e^y and y = u/sigma - 1/(2 sigma^2), at the output sigma u."""
        y = np.asarray(u) / self.sigma - 0.5 / self.sigma**2
        return np.logaddexp(0.0, y + np.log(self.q) - np.log1p(-self.q))

    def _mean_rise(self, u: float) -> float:
        """Return log(m/(1 - q)), where m is the mean under Q of mix over all outputs below sigma u."""
        log_mean = log_ndtr(u - 1.0 / self.sigma) - log_ndtr(u)
        return float(np.logaddexp(0.0, log_mean + np.log(self.q) - np.log1p(-self.q)))

    def sketch(self, cut: float) -> ApproximateLaw:
        top, mode = (self._top(cut), 1.0 / self.sigma) if self.sign > 0 else (38.0, 0.0)
        u = np.linspace(-38.0, top, 2000)
        if mode > 2.0 * 38.0:  # almost no mass lies between the two modes, so u skips that range
            u = np.append(np.linspace(-38.0, 38.0, 1500), np.linspace(mode - 38.0, max(top, mode), 1500))
        # The loss is nearly constant up to a bend that is some sigma wide, and grows like u after it.
        bend = 0.5 / self.sigma + self.sigma * (np.log1p(-self.q) - np.log(self.q) + np.linspace(-40.0, 40.0, 321))
        u = np.union1d(u, bend[(bend > u[0]) & (bend < u[-1])])
        weight = np.log(np.gradient(u) / np.sqrt(2 * np.pi))
        ratio = np.log1p(-self.q) + self._rise(u)
        if self.sign < 0:
            return ApproximateLaw(-ratio, weight - 0.5 * u * u, self.count)
        unhit, hit = np.log1p(-self.q) - 0.5 * u * u, np.log(self.q) - 0.5 * (u - mode) ** 2
        return ApproximateLaw(ratio, weight + np.logaddexp(unhit, hit), self.count)

    def _top(self, cut: float) -> float:
        """Return an output u, in units of sigma, above which the mixture's mass times `count` is at most e^cut."""
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
            bottom = 0.0
            if kept:  # `bottom`: N(0, 1)'s mass below node 1. `inexact`: error of node 0's log mix
                edge = float(u[1])
                bottom = float(ndtr(edge)) * (1.0 - ROUNDOFF * (8.0 + 8.0 * min(edge, 0.0) ** 2))
                inexact = abs(self._mean_rise(edge) - rise)
            pairs = [(0, bottom * float(np.exp(origin * remove)))]
        shift = self._shift(rise, last * step) + inexact
        return placed_from(self, cells, pairs, origin, step, last, upper, shift, infinity, run)

    def _contracted(self, step: float) -> tuple[float, bool]:
        """Merge the outputs below node 1. Return log(mix/(1 - q)) at node 0, and whether the merged output is kept.

        Merging is post-processing, so delta does not rise. Node 0 lies at the merged output's mix: the Q-mean of mix.
        """
        low, high = -37.0, 38.0 + 1.0 / self.sigma

        def excess(u: float) -> float:
            return float(self._rise(u)) - self._mean_rise(u) - step

        if excess(low) > 0:
            return max(float(self._rise(low)) - step, 0.0), False
        if excess(high) < 0:
            return -float(np.log1p(-self.q)), True
        from scipy.optimize import brentq  # slow to import

        return self._mean_rise(float(brentq(excess, low, high, xtol=1e-14, rtol=1e-15))), True

    def _shift(self, rise: float, span: float) -> float:
        """Bound the error of log mix at every node: the error of y (see `_rise`) times q e^y/mix = d(log mix)/dy."""
        odds = self.q / (1.0 - self.q)
        heavy = -np.expm1(-(rise + span))
        far = abs(np.log(self.q)) + 0.5 / self.sigma**2 + 4.0
        top = max(span + rise + far, 0.0)
        return float(8.0 * ROUNDOFF * (heavy * (top + far) + min(odds, np.log1p(odds) + 0.4)) + 2e-12 * rise)


@dataclass(frozen=True)
class Laplace(LatticePart):
    """Laplace noise of scale b and sensitivity 1, Poisson sampled at 0 < q <= 1, composed `count` times."""

    scale: float
    q: float
    count: float
    sign: float

    def _ratio(self, v: np.ndarray | float) -> np.ndarray:
        """Return log mix = log(1 - q + q e^v), where v is the loss without sampling."""
        v = np.asarray(v, np.float64)
        small = np.log1p(self.q * np.expm1(np.minimum(v, 1.0)))
        if self.q == 1.0:
            return v
        return np.where(v < 1.0, small, np.logaddexp(np.log1p(-self.q), np.log(self.q) + v))

    def _log_mean(self, v: float) -> float:
        """Return log(P-mass/Q-mass) of all outputs whose loss without sampling is at most v."""
        edge = 1.0 / self.scale
        # P-mass e^{(v - 1/b)/2}/2, Q-mass 1 - e^{-(v + 1/b)/2}/2
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
        # an output's P-mass is e^lift times its mass without the record, with lift = log mix for remove, 0 for add
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
        """Return `cells` with an atom added to cell number `cell`, at the distance `inside` from its left node."""
        down = np.exp(-inside) if self.sign > 0 else 1.0
        up = 1.0 if self.sign > 0 else np.exp(inside - step)
        low = atom * down * np.expm1(inside - step) / np.expm1(-step)
        high = atom * up * np.expm1(-inside) / np.expm1(-step)
        return cells.with_atom(cell, low, high, 1e-9)

    def _contracted(self, step: float) -> tuple[float, float, float, float]:
        """Merge the outputs below node 1 into one. Return its log mix, unsampled loss, mass, and error of log mix."""
        edge = 1.0 / self.scale

        def excess(v: float) -> float:
            return float(self._ratio(v) - self._ratio(self._log_mean(v))) - step

        if excess(edge) <= 0:
            return 0.0, 0.0, 1.0, 0.0
        from scipy.optimize import brentq

        v = float(brentq(excess, -edge, edge, xtol=1e-15, rtol=1e-15))
        mean = self._log_mean(v)
        origin = float(self._ratio(mean))
        v = min(mean + float(np.log1p(np.exp(origin - mean) / self.q * np.expm1(step))), edge)
        mass = (1.0 - 0.5 * np.exp(-0.5 * (edge + v))) * (1.0 - 1e-14 * (1.0 + edge))
        inexact = abs(float(self._ratio(self._log_mean(v))) - origin)
        return origin, mean, float(mass), inexact


@dataclass(frozen=True)
class Finite(LatticePart):
    """A finite loss law in one direction, composed `count` times."""

    loss: np.ndarray
    mass: np.ndarray
    count: float
    sign: float
    away: float = 0.0  # P-mass of left-out losses, which an upper law puts at infinity and a lower law drops
    blur: float = 0.0  # bound of the absolute error of each loss
    wrong: np.ndarray | None = None  # bound of each mass's absolute error; if None, `inexact` bounds it

    def pieces(self, cut: float, most_pairs: int = MOST_PAIRS) -> list[Finite]:
        """Return parts of fewer steps, with more atoms, to replace this part. The mass left out is far below e^cut."""
        laws = powers(trimmed(self.loss, self.mass, self.count, cut), self.count, most_pairs)
        return [Finite(x.loss, x.mass, count, self.sign, x.away, x.blur, x.wrong) for x, count in laws]

    def sketch(self, cut: float) -> ApproximateLaw:
        return ApproximateLaw(self.loss, np.log(self.mass), self.count)

    def extent(self, theta: float, cut: float, share: float) -> tuple[float, float]:
        return float(self.loss.min()), float(self.loss.max())

    def highest(self) -> float:
        return float(self.loss.max())

    def gaps(self) -> list[tuple[float, float]]:
        far = self.loss - self.loss.min()
        # Only the 64 atoms of largest mass times `far` (distance to the lowest loss) influence the lattice spacing.
        heaviest = np.argsort(self.mass * far)[-64:]
        return [(float(far[i]), self.count * float(self.mass[i])) for i in heaviest if far[i] > 0]

    def place(self, extent: tuple[float, float], step: float, nodes: int, upper: bool, run: Runner) -> Placed:
        sign = 1.0 if upper else -1.0
        place = sign * self.loss
        origin = float(place.min())
        far = (place - origin) / step
        rounding = ROUNDOFF * (LOSS_UNITS * np.abs(self.loss).max() + 8.0 * (abs(origin) + step))
        shift = rounding + FINITE_LOSS_ERROR + self.blur
        nearest = np.rint(far)
        exact = np.abs(far - nearest) * step <= shift
        cell = np.where(exact, nearest, np.floor(far)).astype(np.int64)
        inside = np.where(exact, 0.0, far - cell) * step
        wrong = inexact(self.mass) if self.wrong is None else self.wrong
        given = np.maximum(self.mass + sign * wrong, 0.0)
        mass = np.zeros(nodes)
        if upper:
            # each atom is split between two nodes, so that the mean of e^-loss is kept
            right = np.expm1(-inside) / np.expm1(-step)
            left = np.exp(-inside) * np.expm1(inside - step) / np.expm1(-step)
            np.add.at(mass, cell, given * left)
            np.add.at(mass, cell + 1, given * right)
        else:
            for index, amount in _contracted(cell, inside, given, step):
                np.add.at(mass, index, amount)
        mass *= 1.0 + sign * ROUNDOFF * self.loss.size
        away = self.away if upper else 0.0
        return Placed(mass, origin, sign, self.count, 2.0 * float(shift), away, 0.0)


def _contracted(
    cell: np.ndarray, inside: np.ndarray, mass: np.ndarray, step: float
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return pairs (nodes, masses) that add up to a law dominated by the atoms of loss -(cell step + inside)."""
    order = np.lexsort((inside, cell))
    cell, inside, mass = cell[order], inside[order], mass[order]
    start, stop = _payers(cell, mass, step)
    moved = cell + (inside > 0.0)  # every atom moves to the next node of lower loss
    first, last = moved[start], moved[stop]
    kept = (first < moved) & (moved < last)
    if not inside[kept].any():
        return [(moved, mass)]
    b = mass[kept] * np.expm1(inside[kept]) / np.expm1(step)
    a = mass[kept] * np.expm1(inside[kept] - step) / np.expm1(-step)
    index = np.unique(np.concatenate([[first, last], cell[kept], cell[kept][inside[kept] > 0.0] + 1]))
    here, after = np.searchsorted(index, cell[kept]), np.searchsorted(index, cell[kept] + 1)
    partial = inside[kept] > 0.0
    have_a, have_b, exact = np.zeros(index.size), np.zeros(index.size), np.zeros(index.size)
    np.add.at(have_a, here[partial], a[partial])
    np.add.at(have_b, here[partial], b[partial])
    np.add.at(exact, here[~partial], mass[kept][~partial])
    exact[0], exact[-1] = mass[moved == first].sum(), mass[moved == last].sum()
    total = exact + have_a
    np.add.at(total, after[partial], b[partial])
    jumps = _jumps(index, total, have_a, have_b, step)
    found = _without_debts(index, jumps, step)
    if found is None:
        return [(moved, mass)]
    rest = (moved < first) | (moved > last)
    return [(moved[rest], mass[rest]), found]


def _payers(cell: np.ndarray, mass: np.ndarray, step: float) -> tuple[int, int]:
    """Return the indices of two atoms that are heavy enough for all atoms between them to be moved onto nodes."""
    gap = np.maximum(np.diff(cell), 1) * step
    from_right = step * np.append(mass[1:] / -np.expm1(-gap), 0.0)
    with np.errstate(over="ignore"):
        from_left = step * np.append(0.0, mass[:-1] / np.expm1(gap))
    return int(np.argmax(mass >= from_right)), mass.size - 1 - int(np.argmax((mass >= from_left)[::-1]))


def _jumps(index: np.ndarray, total: np.ndarray, a: np.ndarray, b: np.ndarray, step: float) -> np.ndarray:
    """Return masses at the nodes, such that the atoms' law dominates the law on the nodes (engines/README.md).

    `total` holds the nodes' masses after the atoms between the nodes j and j + 1 have given a[j] to node j, and b[j] to
    node j + 1. This raises the profile E[(e^-loss - alpha)_+] at some alpha. So a polygon c is subtracted from it. The
    polygon's two ends take mass from the two atoms of `_payers`.
    """
    growth = np.expm1(step)
    # `g` is c/alpha at each node, with alpha = e^-loss. In a cell, the profile of `total` is a chord of the atoms'
    # profile. The chord exceeds that profile by at most E, where E is `excess` times alpha at the left node. So c is at
    # least E at both nodes. At the law's first and last node c is 0, so c is raised at the node next to each.
    excess = growth * a * (b / np.where(b > 0.0, a + b, 1.0))
    g = excess.copy()
    g[1:] = np.maximum(g[1:], excess[:-1] * np.exp(-step))
    g[1] = max(g[1], a[0] * growth * np.exp(-step))
    g[-2] = max(g[-2], b[-2] * growth)
    g[0] = g[-1] = 0.0
    g *= 1.0 + 32.0 * ROUNDOFF
    distance = np.diff(index) * step
    fall, rise = g[:-1] * np.exp(-distance) / -np.expm1(-distance), g[1:] / -np.expm1(-distance)
    slope = rise - fall
    size = rise + fall
    corner = np.append(slope, 0.0) - np.append(0.0, slope)
    return total - corner - 32.0 * ROUNDOFF * (total + np.append(size, 0.0) + np.append(0.0, size))


def _without_debts(index: np.ndarray, jumps: np.ndarray, step: float) -> tuple[np.ndarray, np.ndarray] | None:
    """Remove each node of negative mass; its neighbours share this debt. Return None if the first node has a debt.

    The last node's debt goes to its one neighbour. This neighbour has a higher loss, so delta does not rise at any eps.
    """
    nodes: list[int] = []
    masses: list[float] = []
    coming, owed = index.tolist(), jumps.tolist()
    indebted = [*np.flatnonzero(jumps < 0.0).tolist(), len(coming)]
    place = debtor = 0  # `place` is an index in `coming`, `debtor` an index in `indebted`
    again: list[tuple[int, float]] = []  # (node, mass) to be processed once more
    while again or place < len(coming):
        while indebted[debtor] < place:
            debtor += 1
        if not again and owed[place] >= 0.0:  # keep all nodes up to the next one with a debt
            end = max(indebted[debtor], place + 1)
            nodes += coming[place:end]
            masses += owed[place:end]
            place = end
            continue
        if again:
            node, mass = again.pop()
        else:
            node, mass = coming[place], owed[place]
            place += 1
        if mass >= 0.0:
            nodes.append(node)
            masses.append(mass)
            continue
        if not nodes:
            return None
        debt, to_left = mass * (1.0 + 16.0 * ROUNDOFF), 1.0
        if place < len(coming):
            following, owned = coming[place], owed[place]
            before, behind = (node - nodes[-1]) * step, (following - node) * step
            whole = -np.expm1(-before - behind)
            to_left, to_right = -np.expm1(-behind) / whole, np.exp(-behind) * -np.expm1(-before) / whole
            owed[place] = owned + debt * to_right - 4.0 * ROUNDOFF * abs(owned)
        # The last kept node takes its share of the debt. Its own mass may now be negative, so it is processed again.
        again.append((nodes.pop(), masses.pop() * (1.0 - 4.0 * ROUNDOFF) + debt * to_left))
    return np.array(nodes), np.array(masses)


class Atoms(NamedTuple):
    """A finite law of the loss."""

    loss: np.ndarray  # (A,) ascending
    mass: np.ndarray  # (A,) P-masses
    wrong: np.ndarray  # (A,) bound of the error of each mass
    away: float  # P-mass of the outcomes that were left out
    blur: float  # bound of the error of each loss


def inexact(mass: np.ndarray) -> np.ndarray:
    """Bound the errors of masses that were computed as exp(x): a relative error of a few times ROUNDOFF |x|."""
    return mass * ROUNDOFF * (32.0 + 8.0 * np.abs(np.log(mass)))


def trimmed(loss: np.ndarray, mass: np.ndarray, count: float, cut: float) -> Atoms:
    """Return the law sorted by loss and cut at both ends. Each end has mass <= CUT_SHARE e^cut in `count` steps."""
    order = np.argsort(loss)
    loss, mass = loss[order], mass[order]
    light = np.exp(cut) * CUT_SHARE / count
    keep = (np.cumsum(mass) > light) & (np.cumsum(mass[::-1])[::-1] > light)
    keep[np.argmax(mass)] = True  # one atom stays, even if the atoms' total mass is below `light`
    away = float(mass[~keep].sum()) * (1.0 + 1e-12)
    loss, mass = loss[keep], mass[keep]
    return Atoms(loss, mass, inexact(mass), away, 0.0)


def powers(atoms: Atoms, count: float, most_pairs: int = MOST_PAIRS) -> list[tuple[Atoms, float]]:
    """Return pairs (law, how often it is composed). Together they are the law `atoms` composed `count` times."""
    doubled = [atoms]
    while 2.0 ** len(doubled) <= count and doubled[-1].loss.size ** 2 <= most_pairs:
        doubled.append(_sum(doubled[-1], doubled[-1]))
    whole = 2.0 ** (len(doubled) - 1)
    repeats, rest = divmod(count, whole)
    digits = [law for k, law in enumerate(doubled[:-1]) if int(rest) >> k & 1]
    laws = [(doubled[-1], repeats)] if repeats > 1.0 else []
    singles = digits if laws else [*digits, doubled[-1]]
    while len(singles) > 1 and singles[0].loss.size * singles[1].loss.size <= most_pairs:
        singles[:2] = [_sum(singles[0], singles[1])]
    return laws + [(law, 1.0) for law in singles]


def _sum(first: Atoms, second: Atoms) -> Atoms:
    """Return the law of the sum of two independent losses. Sums that differ only by rounding become one atom."""
    loss = np.add.outer(first.loss, second.loss).ravel()
    mass = np.multiply.outer(first.mass, second.mass).ravel()
    most = np.multiply.outer(first.mass + first.wrong, second.mass + second.wrong).ravel()
    order = np.argsort(loss, kind="stable")
    loss, mass, wrong = loss[order], mass[order], (most - mass)[order]
    size = float(max(abs(loss[0]), abs(loss[-1])))
    new = np.append(True, np.diff(loss) > 16.0 * ROUNDOFF * size)
    group, start = np.cumsum(new) - 1, loss[new]
    blur = first.blur + second.blur + ROUNDOFF * size + float(np.max(loss - start[group]))
    total, many = np.bincount(group, mass), np.bincount(group)
    wrong = np.bincount(group, wrong) + ROUNDOFF * (many + 8.0) * total + UNDERFLOW * many
    keep = total > 0.0
    return Atoms(start[keep], total[keep], wrong[keep], first.away + second.away + float(wrong[~keep].sum()), blur)
