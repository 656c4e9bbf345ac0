"""The Poisson-sampled Gaussian: encloses M(z) = E_P[e^{zL}] by a sum whose error does not grow with Im z.

Proofs: README.md of this folder, "The sampled Gaussian" and "Outputs cut in two".
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np
from flint import acb_mat
from scipy.special import log_ndtr

from jaxacct.verification.ball_arithmetic import (
    PRODUCTS_AT_A_TIME,
    Unplanned,
    acb,
    arb,
    between,
    ctx,
    gaussian_tail,
    tick,
    within,
)
from jaxacct.verification.closed_form_losses import GaussianLoss, sampled_hockey_stick

ANGLES = np.geomspace(1e-5, 1.45, 32)
"""Angles in radians; for each, the line of integration Im y = angle is tried. The error bounds hold below pi/2."""


@dataclass(frozen=True)
class Cut:
    """A smooth cut. It keeps the share Phi(side (u - place)/width) of output u. Side 1 keeps the large outputs."""

    place: float
    width: float
    side: int

    def share(self, u: Any) -> Any:
        return (self.side * (arb(self.place) - u) / (arb(self.width) * arb(2).sqrt())).erfc() / 2

    def log_share(self, u: np.ndarray) -> np.ndarray:
        """Return the logarithm of the share that is kept, in floats."""
        return np.asarray(log_ndtr(self.side * (u - self.place) / self.width))


@dataclass(frozen=True)
class SampledGaussian:
    """The loss of N(1, sigma^2) against N(0, sigma^2), sampled at a rate in (0, 1), in one direction.

    Let u ~ N(0, 1) be output/sigma, y = u/sigma - 1/(2 sigma^2), and mix = 1 - rate + rate e^y the likelihood ratio.
    M(z) = E_P[e^{z loss}] is E[mix^{z+1}] for remove and E[mix^{-z}] for add, both entire.  The methods write N(u) for
    the density of u, and e for the exponent of mix at Re z = c, which is c + 1 for remove and -c for add.
    """

    sigma: Any
    rate: Any
    direction: str
    cuts: tuple[Cut, ...] = ()  # the weight of an output in M is the product of the shares that the cuts keep
    _means: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)  # results of `mean`, by (c, bits)
    _terms: dict[float, Any] = field(default_factory=dict, compare=False, repr=False)  # results of `_moved_terms`, by c
    infinity = None

    @property
    def key(self) -> Any:
        return ("SampledGauss", self.sigma.str(40), self.rate.str(40), self.direction)

    @property
    def largest(self) -> Any:
        return None if self.direction == "remove" else -(1 - self.rate).log()

    @property
    def least(self) -> Any:
        return (1 - self.rate).log() if self.direction == "remove" else None

    @property
    def masses(self) -> tuple[Any, Any]:
        """The mass that the cuts keep under P, which is M(0), and under Q, which is M(-1). Both are 1 without cuts."""
        plain, hit = (self._mass(shift) for shift in (0, 1 / self.sigma))
        mixed = (1 - self.rate) * plain + self.rate * hit
        return (mixed, plain) if self.direction == "remove" else (plain, mixed)

    def _mass(self, shift: Any) -> Any:
        """Enclose the mass of N(shift, 1) that all cuts keep, from the mass that each cut alone keeps."""
        found = []
        for cut in self.cuts:
            spread = (1 + arb(cut.width) ** 2).sqrt()
            found.append(gaussian_tail(cut.side * (arb(cut.place) - shift) / spread))
        if not found:
            return arb(1)
        return between(found[0] - sum((1 - x for x in found[1:]), arb(0)), found[0])

    def hockey_stick(self, epsilon: Any) -> Any:
        """Return delta of one step, from delta of the unsampled Gaussian at another epsilon."""
        base = GaussianLoss(1 / self.sigma**2)
        return sampled_hockey_stick(base, self.rate, self.direction, epsilon)

    def decay(self, c: Any, t: Any, count: int) -> Any:
        """Bound |M(c + i s)| from above for all s >= t. On a moved line of integration |mix^{is}| falls as s grows."""
        value, angle = self._best_angle(float(c.mid()), float(t.mid()))
        fallen = max(float(self.log_mgf(np.array([float(c.mid())]))[0]) - value, 0.0)
        return self._moved_bound(c, t, arb(angle), float(np.log(count) + 12.0) + fallen)

    def mgf(self, z: Any) -> Any:
        """Enclose M(z) at a real z above 0 or below -1."""
        x = z.real
        return acb(self.mean(x) if x > 0 else self.mirrored.mean(-1 - x))

    def values(self, c: Any, step: Any, rows: range, width: int, count: int, bits: float) -> Iterator[list[Any]]:
        """Yield, row by row, enclosures of M(c + i j step) for the `width` numbers j of the row."""
        nodes = _Nodes(self, c, count, bits)
        error = acb(within(nodes.error), within(nodes.error))
        size = len(nodes.weights)
        # e^{i b step x} is computed anew for each b, since the radius of a running product would grow with every factor
        places = [acb(0, step * b) for b in range(width)]
        right = []
        for x in nodes.logs:
            tick()
            right += [(place * x).exp() for place in places]
        matrix = acb_mat(size, width, right)
        block = max(1, min(len(rows), width, PRODUCTS_AT_A_TIME // (size * width)))
        for at in range(0, len(rows), block):
            tick()
            some, left = rows[at : at + block], []
            for row in some:
                tick()
                place = acb(0, step * (row * width))
                left += [w * (place * x).exp() for w, x in zip(nodes.weights, nodes.logs, strict=True)]
            product = acb_mat(len(some), size, left) * matrix
            for i in range(len(some)):
                yield [product[i, b] + error for b in range(width)]

    def _moved_bound(self, c: Any, t: Any, angle: Any, wanted: float) -> Any:
        """Bound |M(c + is)| for s >= t by `_risen` times E[|mix|^e e^{-t arg mix}], with mix on the line at `angle`."""
        exponent = self._exponent(c)
        strip, turn, wanted = self._strip(float(c.mid()), float(angle.mid()), wanted)
        h = 2 * arb.pi() / arb(max(turn, 1.0))
        low, high = self._range(float(c.mid()), wanted)
        total = arb(0)
        for j in _whole_between(low, high, h):
            tick()
            u = j * h
            mixed = self._mix(u, angle).log()
            total += self._share(u) * (-u * u / 2 + exponent * mixed.real - t * mixed.imag).exp()
        total *= h / (2 * arb.pi()).sqrt() * self._risen(angle)
        error = 2 * self._apart(c, angle, strip) / ((2 * arb.pi() * self.sigma * strip / h).exp() - 1)
        total += error * self.mean(c).upper()
        small = self.mean(c) * (-arb(wanted)).exp()
        total += self._outside(c, low, high, h, small) * self._grown(c, angle)
        return total.abs_upper()

    def mean(self, c: Any) -> Any:
        """Enclose M(c) for a real c > 0 by a sum over real outputs, with an error relative to M(c)."""
        known = self._means.get((c.str(40), ctx.prec))
        if known is not None:
            return known
        found, turn, wanted, _ = self.line(float(c.mid()), 60.0, 1.0)
        strip, h = arb(found), 2 * arb.pi() / arb(turn)
        low, high = self._range(float(c.mid()), wanted)
        exponent, total = self._exponent(c), arb(0)
        for j in _whole_between(low, high, h):
            tick()
            u = j * h
            total += self._share(u) * (-u * u / 2 + exponent * self._mix_real(u).log()).exp()
        total *= h / (2 * arb.pi()).sqrt()
        total = between(total, total + self._outside(c, low, high, h, total * arb(-60).exp()))
        share = within(self._trapezoid(c, strip, strip, h))
        found = total / (1 - share)
        self._means[(c.str(40), ctx.prec)] = found
        return found

    def _mix(self, u: Any, angle: Any) -> Any:
        y = acb(u / self.sigma - 1 / (2 * self.sigma**2), angle)
        return 1 - self.rate + self.rate * y.exp()

    def _mix_real(self, u: Any) -> Any:
        return 1 - self.rate + self.rate * (u / self.sigma - 1 / (2 * self.sigma**2)).exp()

    def _share_of_slope(self, u: Any) -> Any:
        """Return sigma times the derivative of log mix in u. This derivative rises with u."""
        y = u / self.sigma - 1 / (2 * self.sigma**2)
        return self.rate * y.exp() / (1 - self.rate + self.rate * y.exp())

    def _share(self, u: Any) -> Any:
        return math.prod((cut.share(u) for cut in self.cuts), start=arb(1))

    def _risen(self, angle: Any) -> Any:
        stretch = self.sigma**2 * sum((1 / arb(cut.width) ** 2 for cut in self.cuts), arb(1))
        return (stretch * angle**2 / 2).exp()

    def _grown(self, c: Any, angle: Any) -> Any:
        """Bound the ratio of the integrand's size |N(u) mix^e| on the line at `angle` to its value on the real line."""
        risen = self._risen(angle)
        return risen if self.direction == "remove" else risen * (angle / 2).cos() ** -c

    def _apart(self, c: Any, angle: Any, strip: Any) -> Any:
        """Return the geometric mean of `_grown` at angle + strip and of `_grown` at angle - strip."""
        risen = self._risen(angle) * self._risen(strip)
        if self.direction == "remove":
            return risen
        return risen * (((angle + strip) / 2).cos() * ((angle - strip) / 2).cos()) ** (-c / 2)

    def _trapezoid(self, c: Any, strip: Any, angle: Any, h: Any) -> Any:
        """Bound (trapezoid rule's error)/M(c) by the lines `strip` above and below. Their angles are <= `angle`."""
        return 2 * self._grown(c, angle) / ((2 * arb.pi() * self.sigma * strip / h).exp() - 1)

    def _outside(self, c: Any, low: Any, high: Any, h: Any, small: Any) -> Any:
        """Bound the step h times the sum of the integrand N(u) mix^e over all nodes outside [low, high] (README.md)."""
        exponent, total = self._exponent(c), arb(0)
        if self.direction == "remove":
            last = arb(self._steep(float((exponent / self.sigma).upper()) + 1.0, 1))
            pieces = [(high, last)] if last > high else []
            high = last if pieces else high
            while pieces:
                tick()
                a, b = pieces.pop()
                bound = self._value(a, b, exponent, 1) * (b - a + h)
                if bound > small and b - a > 1e-6:
                    pieces += [(a, (a + b) / 2), ((a + b) / 2, b)]
                else:
                    total += bound
        for end, side in ((low, -1), (high, 1)):
            slope = arb(0)
            if self.direction == "remove" and side > 0:
                slope = exponent / self.sigma
            if self.direction == "add" and side < 0:
                slope = c * self._share_of_slope(end) / self.sigma
            gap = self._fall(end, side) - slope
            if not gap > 0:
                return arb("inf")
            total += self._value(end, end, exponent, side) * (h + 1 / gap)
        return total.abs_upper()

    def _fall(self, end: Any, side: int) -> Any:
        """Bound from below how fast log(N f) falls beyond `end`; f: product of cut shares that fall towards `side`."""
        fall = side * end
        for cut in self.cuts:
            if cut.side != side:
                fall += (side * (end - arb(cut.place))).max(0) / arb(cut.width) ** 2
        return fall

    def _value(self, a: Any, b: Any, exponent: Any, side: int) -> Any:
        """Return mix(b)^exponent N(a) f(a). f is the product of the cut shares that fall towards `side`."""
        value = (-a * a / 2 + exponent * self._mix_real(b).log()).exp() / (2 * arb.pi()).sqrt()
        return math.prod((cut.share(a) for cut in self.cuts if cut.side != side), start=value)

    # Planning in floats: no number below enters a bound without being bounded again in ball arithmetic.

    @property
    def mirrored(self) -> Self:
        """The law of the other direction, whose M(z) is M(-1 - z) of this law."""
        return self.altered(direction="add" if self.direction == "remove" else "remove")

    def altered(self, **fields: Any) -> Self:
        """Return a copy with some fields changed and with empty caches."""
        return replace(self, **fields, _means={}, _terms={})

    def log_mgf(self, c: np.ndarray) -> np.ndarray:
        """Return log M(c) in floats, for planning only. All c must lie on the same side of -1."""
        tick()
        if c.max() < -1.0:
            return self.mirrored.log_mgf(-1.0 - c)
        exponent = self._exponent(c)[:, None]
        total = np.full(c.shape, -np.inf)
        windows = self._windows(c, 9.0)
        if self.cuts:
            # The cuts' shares cost most. So one window serves all c, and the shares are computed only once.
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
            # mix^exponent may grow faster, far above the window, than the cuts' shares fall. So add the peak there.
            far = max(self._top(9.0), 1.0)
            u = far * np.geomspace(1.0, max(float(np.max(exponent)) / float(self.sigma.mid()) / far, 1.0), 200)
            logs = self._log_density(u) + exponent * self._log_mix(u) + np.log(u)
            total = np.logaddexp(total, logs.max(-1))
        return total

    def _points(self, length: float) -> int:
        """Return the number of quadrature steps over `length` that resolve the normal density and the cuts."""
        finest = min([0.12, float(self.sigma.mid()) / 4, *(cut.width / 3 for cut in self.cuts)])
        return int(np.clip(np.ceil(length / finest), 60, 4000))

    def _windows(self, c: np.ndarray, far: float) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return windows about the peaks of N(u) mix^e, the integrand, in floats. The first window holds all cuts."""
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
            low, high = around_fixed_point(slope, scale, np.zeros(c.shape))
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
        """Return the number of nodes that M(c + it) takes, for planning."""
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
        """Return the logarithm of the smallest bound of |M(c + it)| over ANGLES, and the angle that gives it."""
        values = self.log_moved(c, t)
        best = int(np.argmin(values))
        return float(values[best]), float(ANGLES[best])

    def log_moved(self, c: float, t: float) -> np.ndarray:
        """Return, for each of ANGLES, the log of the bound of |M(c + it)| in floats; inf for angles >= `_steepest`."""
        values = np.full(ANGLES.shape, np.inf)
        allowed = self._steepest > ANGLES
        logs, turns = self._moved_terms(c)
        found = logs - t * turns
        top = found.max(-1)
        values[allowed] = top + np.log(np.exp(found - top[:, None]).sum(-1))
        return np.where(np.isnan(values), np.inf, values)

    def _moved_terms(self, c: float) -> tuple[np.ndarray, np.ndarray]:
        """Return, by angle and point, log |integrand| at t = 0, and the fall of log |integrand| per unit of t."""
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
        """Return (angle from the line of integration to the lines of the error bound, 2 pi/step, accuracy in nats)."""
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
        """Return the least of place + far * width over the cuts that remove large outputs, or inf if there are none."""
        return min((cut.place + far * cut.width for cut in self.cuts if cut.side < 0), default=float("inf"))

    @property
    def _bounded(self) -> bool:
        """Whether some cut removes large outputs."""
        return any(cut.side < 0 for cut in self.cuts)

    @property
    def _steepest(self) -> float:
        """Moved lines have angles below this, in radians. Errors in `values` are bounded at 0 and twice the angle."""
        return 1.5 if self.direction == "remove" else 1.0

    @property
    def _stretch(self) -> float:
        """The factor f = sigma^2 (1 + sum of 1/width^2). An angle enlarges |N * shares| by at most e^{f angle^2/2}."""
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
        """Return ends (low, high), found in floats. Outside [low, high], N(u) mix^e is below e^-wanted M(c)."""
        exponent, mean = float(self._exponent(c)), float(self.log_mgf(np.array([c]))[0])
        inside = []
        for low, high in self._windows(np.array([c]), float(np.sqrt(2 * wanted)) + 4.0):
            u = np.linspace(low[0], high[0], 2001)
            inside.append(u[self._log_density(u) + exponent * self._log_mix(u) - mean > -wanted - 3.0])
        kept = np.concatenate(inside)
        if not kept.size:
            raise Unplanned("its largest outputs are not found in floats")
        first, last = self._steep(-0.5, -1), max(self._steep(0.5, 1), 0.0)
        return arb(min(float(kept.min()) - 0.1, first)), arb(max(float(kept.max()) + 0.1, last))

    def _steep(self, slope: float, side: int) -> float:
        """Return, roughly, the u where -log(N f) has this slope; f: product of cut shares that fall towards `side`."""
        rise, total = 1.0, slope
        for cut in self.cuts:
            if cut.side != side and side * (slope - cut.place) > 0:
                rise += cut.width**-2
                total += cut.place * cut.width**-2
        return total / rise

    def line(self, c: float, bits: float, farthest: float = 2.0) -> tuple[float, float, float, int]:
        """Return (angle, 2 pi/step, accuracy in nats, nodes) of the cheapest line, in floats."""
        sigma = float(self.sigma.mid())
        best: tuple[float, float, float, int] | None = None
        for angle in ANGLES[self._steepest > ANGLES]:
            wanted = bits + self._log_grown(c, farthest * float(angle))  # error bounds use angles up to this product
            turn = wanted / (sigma * float(angle))
            nodes = int(2.5 * np.sqrt(2 * wanted) * turn / 6.28) + 2
            if best is None or nodes < best[3]:
                best = (float(angle), float(turn), float(wanted), nodes)
        assert best is not None
        return best


class _Nodes:
    """Weights w and exponents l such that the sum of w e^{itl} is within `error` of M(c + it) for every t >= 0."""

    def __init__(self, law: SampledGaussian, c: Any, count: int, bits: float) -> None:
        found, turn, wanted, _ = law.line(float(c.mid()), bits + float(np.log(count)))
        angle = arb(found)
        h = 2 * arb.pi() / arb(turn)
        exponent = law._exponent(c)
        low, high = law._range(float(c.mid()), wanted)
        sign = 1 if law.direction == "remove" else -1
        self.weights, self.logs = [], []
        scale = h / (2 * arb.pi()).sqrt()
        for j in _whole_between(low, high, h):
            tick()
            u = j * h
            moved = acb(u, sign * law.sigma * angle)
            log = law._mix(u, sign * angle).log()
            self.weights.append(scale * law._share(moved) * (-moved * moved / 2 + exponent * log).exp())
            self.logs.append(sign * log)
        self.error = law._trapezoid(c, angle, 2 * angle, h) * law.mean(c).upper()
        self.error += law._outside(c, low, high, h, law.mean(c) * (-arb(wanted)).exp()) * law._grown(c, angle)


def around_fixed_point(slope: Any, low: np.ndarray, high: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Bisect [low, high], in floats, for the u with slope(u) = u. `slope` must fall. Return ends at most 1e-3 apart."""
    while np.max(high - low) > 1e-3:
        middle = 0.5 * (low + high)
        if not np.all(np.isfinite(middle)) or np.any((middle == low) & (high - low > 1e-3)):
            break
        left = slope(middle) > middle
        low, high = np.where(left, middle, low), np.where(left, high, middle)
    return low, high


def _whole_between(low: Any, high: Any, h: Any) -> range:
    """Return a range that holds all whole numbers j with low <= j h <= high."""
    return range(int(float((low / h).floor().lower())), int(float((high / h).ceil().upper())) + 1)
