"""The Poisson-sampled Gaussian in floats: where its integrands are large, and which lines suit them.

This is for planning only: nothing here enters a bound without being bounded again in ball arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np
from scipy.special import log_ndtr

from jaxacct.verification.ball_arithmetic import arb

__all__ = ["ANGLES", "Cut", "SampledGaussianPlanning"]

ANGLES = np.geomspace(1e-5, 1.45, 32)
"""Angles of a moved line that are tried, in radians: the bounds hold below a right angle."""


@dataclass(frozen=True)
class Cut:
    """A share of every output: Phi(side (u - place)/width), entire in u; side 1 keeps those above, -1 those below."""

    place: float
    width: float
    side: int

    def share(self, u: Any) -> Any:
        return (self.side * (arb(self.place) - u) / (arb(self.width) * arb(2).sqrt())).erfc() / 2

    def log_share(self, u: np.ndarray) -> np.ndarray:
        """In floats."""
        return np.asarray(log_ndtr(self.side * (u - self.place) / self.width))


@dataclass(frozen=True)
class SampledGaussianPlanning:
    """The fields of a sampled Gaussian and all that is planned about it.

    sigma, rate, direction : its noise multiplier, its sampling probability, and "remove" or "add".
    cuts : shares of every output that are kept, none unless outputs are cut.
    _means, _terms : values that were computed before, by their arguments.
    """

    sigma: Any
    rate: Any
    direction: str
    cuts: tuple[Cut, ...] = ()
    _means: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)
    _terms: dict[float, Any] = field(default_factory=dict, compare=False, repr=False)

    @property
    def mirrored(self) -> Self:
        """The law whose M(z) is this one's M(-1 - z): the other direction."""
        return self.altered(direction="add" if self.direction == "remove" else "remove")

    def altered(self, **fields: Any) -> Self:
        """With other fields, and without the values computed before."""
        return replace(self, **fields, _means={}, _terms={})

    def log_mgf(self, c: np.ndarray) -> np.ndarray:
        """In floats, for planning only; c all above -1 or all below."""
        if c.max() < -1.0:
            return self.mirrored.log_mgf(-1.0 - c)
        exponent = self._exponent(c)[:, None]
        total = np.full(c.shape, -np.inf)
        windows = self._windows(c, 9.0)
        if self.cuts:
            # one window for all c, since the shares of the cuts cost most and are then computed once
            windows = [(np.min(low, keepdims=True), np.max(high, keepdims=True)) for low, high in windows]
        for low, high in windows:
            count = self._points(float(np.max(high - low)))
            step = (high - low) / count
            u = low[:, None] + step[:, None] * np.arange(count + 1)
            logs = self._log_density(u) + exponent * self._log_mix(u)
            top = logs.max(-1)
            found = top + np.log(np.exp(logs - top[:, None]).sum(-1) * np.maximum(step, 1e-300) / np.sqrt(2 * np.pi))
            total = np.logaddexp(total, np.where(step > 0, found, -np.inf))
        if self._bounded and self.direction == "remove":
            # far out, where a share falls slower than a high power grows
            far = max(self._top(9.0), 1.0)
            u = far * np.geomspace(1.0, max(float(np.max(exponent)) / float(self.sigma.mid()) / far, 1.0), 200)
            logs = self._log_density(u) + exponent * self._log_mix(u) + np.log(u)
            total = np.logaddexp(total, logs.max(-1))
        return total

    def _points(self, length: float) -> int:
        """Steps that resolve N and the cuts, in floats."""
        finest = min([0.12, float(self.sigma.mid()) / 4, *(cut.width / 3 for cut in self.cuts)])
        return int(np.clip(np.ceil(length / finest), 60, 4000))

    def _windows(self, c: np.ndarray, far: float) -> list[tuple[np.ndarray, np.ndarray]]:
        """Where N(u) mix^e has its mass, in floats: around its peak (add), or around its lowest and highest (remove).

        At a peak, u is e/sigma times the share of rate e^y in mix.  That share rises with u.  All cuts lie in the first
        window.
        """
        sigma, scale = float(self.sigma.mid()), self._exponent(c) / float(self.sigma.mid())

        def slope(u: np.ndarray) -> np.ndarray:
            share = np.log(float(self.rate.mid())) + u / sigma - 0.5 / sigma**2 - self._log_mix(u)
            return scale * np.exp(np.minimum(share, 0.0))

        def around(low: np.ndarray, high: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            for cut in self.cuts:
                low = np.minimum(low, cut.place - far * cut.width)
                high = np.maximum(high, cut.place + far * cut.width)
            return low, np.minimum(high, self._top(far))

        if self.direction == "add":
            low, high = scale.copy(), np.zeros(c.shape)
            while np.max(high - low) > 1e-3:
                middle = 0.5 * (low + high)
                if not np.all(np.isfinite(middle)) or np.any((middle == low) & (high - low > 1e-3)):
                    break
                left = slope(middle) > middle
                low, high = np.where(left, middle, low), np.where(left, high, middle)
            return [around(low - far, high + far)]
        low, high = np.zeros(c.shape), scale.copy()
        for _ in range(60):
            before = low, high
            low, high = slope(low), slope(high)
            if np.max(np.abs(low - before[0])) < 1e-3 and np.max(np.abs(high - before[1])) < 1e-3:
                break
        high = np.maximum(high, low)
        apart = high - low > 80.0
        one = around(low - far, np.where(apart, low + 25.0 + far, high + far))
        if self._bounded:
            return [one]
        return [one, (np.where(apart, high - 25.0 - far, high), np.where(apart, high + far, high))]

    def log_decay(self, c: float, t: float) -> float:
        return self._best_angle(c, t)[0]

    def cost(self, c: float, bits: float) -> int:
        """How many nodes a sum takes, for planning."""
        return self.line(c, bits)[3]

    def _exponent(self, c: Any) -> Any:
        return c + 1 if self.direction == "remove" else -c

    def _log_density(self, u: np.ndarray) -> np.ndarray:
        return sum((cut.log_share(u) for cut in self.cuts), -0.5 * u * u)

    def _log_mix(self, u: np.ndarray, angle: Any = None) -> Any:
        sigma, rate = float(self.sigma.mid()), float(self.rate.mid())
        y = u / sigma - 0.5 / sigma**2
        if angle is None:
            return np.logaddexp(np.log1p(-rate), np.log(rate) + y)
        top = np.maximum(y, 0.0)
        return top + np.log((1 - rate) * np.exp(-top) + rate * np.exp(y - top + 1j * angle))

    def _best_angle(self, c: float, t: float) -> tuple[float, float]:
        """log of the bound of |M| at t and the angle that gives it, in floats."""
        values = self.log_moved(c, t)
        best = int(np.argmin(values))
        return float(values[best]), float(ANGLES[best])

    def log_moved(self, c: float, t: float) -> np.ndarray:
        """log of the bound of |M| at t on the line at each of ANGLES, in floats; inf where it is not to be used."""
        values = np.full(ANGLES.shape, np.inf)
        allowed = self._steepest > ANGLES
        logs, turns = self._moved_terms(c)
        found = logs - t * turns
        top = found.max(-1)
        values[allowed] = top + np.log(np.exp(found - top[:, None]).sum(-1))
        return np.where(np.isnan(values), np.inf, values)

    def _moved_terms(self, c: float) -> tuple[np.ndarray, np.ndarray]:
        """For each angle log of the integrand's size at points, and how fast its phase makes it fall with t."""
        if c not in self._terms:
            exponent, angles = float(self._exponent(c)), ANGLES[self._steepest > ANGLES]
            sizes, turns = [], []
            for low, high in self._windows(np.array([c]), 9.0):
                if high[0] > low[0]:
                    u = np.linspace(low[0], high[0], self._points(float(high[0] - low[0])))
                    logs = self._log_mix(u, angles[:, None])
                    grown = 0.5 * self._stretch * angles[:, None] ** 2 + np.log((u[1] - u[0]) / np.sqrt(2 * np.pi))
                    sizes.append(self._log_density(u) + exponent * logs.real + grown)
                    turns.append(logs.imag)
            self._terms[c] = np.concatenate(sizes, -1), np.concatenate(turns, -1)
        return self._terms[c]

    def _strip(self, c: float, angle: float, wanted: float) -> tuple[Any, float, float]:
        """How far on either side of the line at an angle a strip goes, 2 pi over the step, natural digits wanted.

        A bound of the integrand holds on strips within the angle, and up to a right angle.
        """
        farthest = 3.0 if self.direction == "remove" else 2.0
        widest = max(1.57 - angle, min(angle, farthest - angle))
        best = None
        for strip in widest * np.geomspace(1e-5, 1.0, 32):
            digits = wanted + float(self._log_apart(c, angle, float(strip)))
            if best is None or digits**1.5 / strip < best[2] ** 1.5 / best[0]:
                best = (float(strip), digits / (float(self.sigma.mid()) * float(strip)), digits)
        assert best is not None
        return arb(best[0]), best[1], best[2]

    def _top(self, far: float) -> float:
        """The place `far` widths above the lowest of the cuts of large outputs; inf where there is none."""
        return min((cut.place + far * cut.width for cut in self.cuts if cut.side < 0), default=float("inf"))

    @property
    def _bounded(self) -> bool:
        """Whether large outputs are cut off."""
        return any(cut.side < 0 for cut in self.cuts)

    @property
    def _steepest(self) -> float:
        """The largest angle of a moved line; the error of the step is bounded on lines at up to twice that angle."""
        return 1.5 if self.direction == "remove" else 1.0

    @property
    def _stretch(self) -> float:
        """sigma^2 (1 + the sum of 1/width^2 over the cuts): N and the shares grow by e^{stretch angle^2/2}."""
        return float(self.sigma.mid()) ** 2 * (1.0 + sum(cut.width**-2 for cut in self.cuts))

    def _log_grown(self, c: float, angle: float) -> float:
        risen = 0.5 * self._stretch * angle**2
        return risen if self.direction == "remove" else risen - c * float(np.log(np.cos(angle / 2)))

    def _log_apart(self, c: float, angle: float, strip: float) -> float:
        risen = 0.5 * self._stretch * (angle**2 + strip**2)
        if self.direction == "remove":
            return risen
        return risen - c / 2 * float(np.log(np.cos((angle + strip) / 2) * np.cos((angle - strip) / 2)))

    def _range(self, c: float, wanted: float) -> tuple[Any, Any]:
        """Where N(u) mix^e has fallen to e^-wanted of M(c), in floats; whatever it is, `_outside` bounds the rest."""
        exponent, mean = float(self._exponent(c)), float(self.log_mgf(np.array([c]))[0])
        inside = []
        for low, high in self._windows(np.array([c]), float(np.sqrt(2 * wanted)) + 4.0):
            u = np.linspace(low[0], high[0], 2001)
            inside.append(u[self._log_density(u) + exponent * self._log_mix(u) - mean > -wanted - 3.0])
        kept = np.concatenate(inside)
        first, last = self._steep(-0.5, -1), max(self._steep(0.5, 1), 0.0)
        return arb(min(float(kept.min()) - 0.1, first)), arb(max(float(kept.max()) + 0.1, last))

    def _steep(self, slope: float, side: int) -> float:
        """Where N times the shares that fall on that side falls at a slope, see `_fall`, in floats."""
        rise, total = 1.0, slope
        for cut in self.cuts:
            if cut.side != side and side * (slope - cut.place) > 0:
                rise += cut.width**-2
                total += cut.place * cut.width**-2
        return total / rise

    def line(self, c: float, bits: float, farthest: float = 2.0) -> tuple[float, float, float, int]:
        """The line that takes fewest nodes: its angle, 2 pi over the step, natural digits wanted, and nodes.

        farthest : the bound of the step is taken at so many times the angle.
        """
        sigma = float(self.sigma.mid())
        best: tuple[float, float, float, int] | None = None
        for angle in ANGLES[self._steepest > ANGLES]:
            wanted = bits + self._log_grown(c, farthest * float(angle))
            turn = wanted / (sigma * float(angle))
            nodes = int(2.5 * np.sqrt(2 * wanted) * turn / 6.28) + 2
            if best is None or nodes < best[3]:
                best = (float(angle), float(turn), float(wanted), nodes)
        assert best is not None
        return best
