"""The Poisson-sampled Gaussian: M(z) = E_P[e^{zL}] as a sum over nodes, with an error that does not grow with Im z."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxacct.verification.balls import acb, acb_mat, arb, between, ctx, tick, within
from jaxacct.verification.smooth import Gauss

__all__ = ["SampledGauss", "sampled_hockey_stick", "whole_between"]

ANGLES = np.geomspace(1e-5, 1.45, 32)


@dataclass(frozen=True)
class SampledGauss:
    """N(1, sigma^2) against N(0, sigma^2), sampled at a rate in (0, 1).

    With u ~ N(0, 1) and y = u/sigma - 1/(2 sigma^2), mix = 1 - rate + rate e^y, remove has M(z) = E[mix^{z+1}] and add
    M(z) = E[mix^{-z}]; both are entire.
    """

    sigma: Any
    rate: Any
    direction: str
    infinity = None
    _means: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)

    @property
    def key(self) -> Any:
        return ("SampledGauss", self.sigma.str(40), self.rate.str(40), self.direction)

    @property
    def largest(self) -> Any:
        return None if self.direction == "remove" else -(1 - self.rate).log()

    def hockey_stick(self, epsilon: Any) -> Any:
        """One step, from the unsampled profile at a shifted epsilon."""
        base = Gauss(1 / self.sigma**2)
        return sampled_hockey_stick(base, self.rate, self.direction, epsilon)

    def log_mgf(self, c: np.ndarray) -> np.ndarray:
        """In floats, for planning only."""
        exponent = self._exponent(c)[:, None]
        total = np.full(c.shape, -np.inf)
        for low, high in self._windows(c, 9.0):
            step = (high - low) / 1000
            u = low[:, None] + step[:, None] * np.arange(1001)
            logs = -0.5 * u * u + exponent * self._log_mix(u)
            top = logs.max(-1)
            found = top + np.log(np.exp(logs - top[:, None]).sum(-1) * np.maximum(step, 1e-300) / np.sqrt(2 * np.pi))
            total = np.logaddexp(total, np.where(step > 0, found, -np.inf))
        return total

    def _windows(self, c: np.ndarray, far: float) -> list[tuple[np.ndarray, np.ndarray]]:
        """Where N(u) mix^e has its mass, in floats: around its peak (add), or around its lowest and highest (remove).

        A peak is where u is e/sigma times the share of rate e^y in mix, which rises with u.
        """
        sigma, scale = float(self.sigma.mid()), self._exponent(c) / float(self.sigma.mid())

        def slope(u: np.ndarray) -> np.ndarray:
            share = np.log(float(self.rate.mid())) + u / sigma - 0.5 / sigma**2 - self._log_mix(u)
            return scale * np.exp(np.minimum(share, 0.0))

        if self.direction == "add":
            low, high = scale.copy(), np.zeros(c.shape)
            while np.max(high - low) > 1e-3:
                middle = 0.5 * (low + high)
                if not np.all(np.isfinite(middle)) or np.any((middle == low) & (high - low > 1e-3)):
                    break
                left = slope(middle) > middle
                low, high = np.where(left, middle, low), np.where(left, high, middle)
            return [(low - far, high + far)]
        low, high = np.zeros(c.shape), scale.copy()
        for _ in range(60):
            before = low, high
            low, high = slope(low), slope(high)
            if np.max(np.abs(low - before[0])) < 1e-3 and np.max(np.abs(high - before[1])) < 1e-3:
                break
        high = np.maximum(high, low)
        apart = high - low > 80.0
        one = (low - far, np.where(apart, low + 25.0 + far, high + far))
        return [one, (np.where(apart, high - 25.0 - far, high), np.where(apart, high + far, high))]

    def decay(self, c: Any, t: Any, count: int) -> Any:
        """Upper bound of |M(c + is)| for all s >= t: the line is moved by an angle, where mix^{it} decays."""
        value, angle = self._best_angle(float(c.mid()), float(t.mid()))
        fallen = max(float(self.log_mgf(np.array([float(c.mid())]))[0]) - value, 0.0)
        return self._moved_bound(c, t, arb(angle), float(np.log(count) + 12.0) + fallen)

    def log_decay(self, c: float, t: float) -> float:
        return self._best_angle(c, t)[0]

    def mgf(self, z: Any) -> Any:
        """M at a real point."""
        return acb(self.mean(z.real))

    def values(self, c: Any, step: Any, rows: range, width: int, count: int, bits: float) -> Iterator[list[Any]]:
        """Enclosures of M(c + i j step) for j = row * width + 0 ... width - 1, one row at a time.

        e^{i(a + b)l} = e^{ia l} e^{ib l}: a block of rows is one product of two matrices.
        """
        nodes = _Nodes(self, c, count, bits)
        error = acb(within(nodes.error), within(nodes.error))
        size = len(nodes.weights)
        # each power by its own exponential: a product of many balls would be blown up by each turn
        places = [acb(0, step * b) for b in range(width)]
        right = []
        for x in nodes.logs:
            tick()
            right += [(place * x).exp() for place in places]
        matrix = acb_mat(size, width, right)
        block = max(1, min(len(rows), width))
        start = list(rows)
        for at in range(0, len(start), block):
            tick()
            some = start[at : at + block]
            left = []
            for row in some:
                tick()
                place = acb(0, step * (row * width))
                left += [w * (place * x).exp() for w, x in zip(nodes.weights, nodes.logs, strict=True)]
            product = acb_mat(len(some), size, left) * matrix
            for i in range(len(some)):
                yield [product[i, b] + error for b in range(width)]

    def cost(self, c: float, bits: float) -> int:
        """How many nodes a sum takes, for planning."""
        return _plan(self, c, bits)[3]

    def _exponent(self, c: Any) -> Any:
        return c + 1 if self.direction == "remove" else -c

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
        sigma, exponent = float(self.sigma.mid()), float(self._exponent(c))
        values = np.full(ANGLES.shape, np.inf)
        total = np.full(ANGLES.shape, -np.inf)
        allowed = (1.5 if self.direction == "remove" else 1.0) > ANGLES
        angles = ANGLES[allowed]
        for low, high in self._windows(np.array([c]), 9.0):
            if not high[0] > low[0]:
                continue
            u = np.linspace(low[0], high[0], 300)
            logs = self._log_mix(u, angles[:, None])
            found = -0.5 * u * u + exponent * logs.real - t * logs.imag
            top = found.max(-1)
            found = top + np.log(np.exp(found - top[:, None]).sum(-1) * (u[1] - u[0]) / np.sqrt(2 * np.pi))
            total[allowed] = np.logaddexp(total[allowed], found)
        values[allowed] = total[allowed] + 0.5 * (sigma * angles) ** 2
        return np.where(np.isnan(values), np.inf, values)

    def _moved_bound(self, c: Any, t: Any, angle: Any, wanted: float) -> Any:
        """e^{(sigma angle)^2/2} E[|mix|^e e^{-t arg mix}] on the line at an angle, by the trapezoid rule."""
        exponent = self._exponent(c)
        farthest = arb(3.0 if self.direction == "remove" else 2.0)
        strip = (arb("1.57") - angle).max(angle.min(farthest - angle))
        wanted += self._log_grown(float(c.mid()), float((angle + strip).mid()))
        h = 2 * arb.pi() / arb(max(wanted / float((self.sigma * strip).mid()), 1.0))
        low, high = self._range(float(c.mid()), wanted)
        total = arb(0)
        for j in whole_between(low, high, h):
            tick()
            u = j * h
            mixed = self._mix(u, angle).log()
            total += (-u * u / 2 + exponent * mixed.real - t * mixed.imag).exp()
        total *= h / (2 * arb.pi()).sqrt() * ((self.sigma * angle) ** 2 / 2).exp()
        total += self._trapezoid(c, strip, angle + strip, h) * self.mean(c).upper()
        small = self.mean(c) * (-arb(wanted)).exp()
        total += self._outside(c, low, high, h, small) * self._grown(c, angle)
        return total.abs_upper()

    def mean(self, c: Any) -> Any:
        """M(c) at a real c > 0, on the real line: its error is a share of M(c) itself."""
        known = self._means.get((c.str(40), ctx.prec))
        if known is not None:
            return known
        strip = arb(float(min(1.5 if self.direction == "remove" else 1.0, max(4.0 / float(self.sigma.mid()), 1e-4))))
        wanted = 60.0 + self._log_grown(float(c.mid()), float(strip.mid()))
        h = 2 * arb.pi() / arb(wanted / float((self.sigma * strip).mid()))
        low, high = self._range(float(c.mid()), wanted)
        exponent, total = self._exponent(c), arb(0)
        for j in whole_between(low, high, h):
            tick()
            u = j * h
            y = u / self.sigma - 1 / (2 * self.sigma**2)
            total += (-u * u / 2 + exponent * (1 - self.rate + self.rate * y.exp()).log()).exp()
        total *= h / (2 * arb.pi()).sqrt()
        total = between(total, total + self._outside(c, low, high, h, total * arb(-60).exp()))
        share = within(self._trapezoid(c, strip, strip, h))
        found = total / (1 - share)
        self._means[(c.str(40), ctx.prec)] = found
        return found

    def _mix(self, u: Any, angle: Any) -> Any:
        y = acb(u / self.sigma - 1 / (2 * self.sigma**2), angle)
        return 1 - self.rate + self.rate * y.exp()

    def _grown(self, c: Any, angle: Any) -> Any:
        """Bound of |N(u) mix^e| on the line at an angle relative to the real line, without the phase of e."""
        grown = ((self.sigma * angle) ** 2 / 2).exp()
        return grown if self.direction == "remove" else grown * (angle / 2).cos() ** -c

    def _log_grown(self, c: float, angle: float) -> float:
        grown = 0.5 * (float(self.sigma.mid()) * angle) ** 2
        return grown if self.direction == "remove" else grown - c * float(np.log(np.cos(angle / 2)))

    def _trapezoid(self, c: Any, strip: Any, angle: Any, h: Any) -> Any:
        """Bound of the trapezoid rule's error as a share of M(c): lines `strip` away, none beyond `angle`."""
        return 2 * self._grown(c, angle) / ((2 * arb.pi() * self.sigma * strip / h).exp() - 1)

    def _range(self, c: float, wanted: float) -> tuple[Any, Any]:
        """Where N(u) mix^e has fallen to e^-wanted of M(c), in floats; whatever it is, `_outside` bounds the rest."""
        exponent, mean = float(self._exponent(c)), float(self.log_mgf(np.array([c]))[0])
        inside = []
        for low, high in self._windows(np.array([c]), float(np.sqrt(2 * wanted)) + 4.0):
            u = np.linspace(low[0], high[0], 2001)
            inside.append(u[-0.5 * u * u + exponent * self._log_mix(u) - mean > -wanted - 3.0])
        kept = np.concatenate(inside)
        return arb(float(min(kept.min() - 0.1, -1.0))), arb(float(max(kept.max() + 0.1, 1.0)))

    def _outside(self, c: Any, low: Any, high: Any, h: Any, small: Any) -> Any:
        """Bound of h times the sum of N(u) mix^e over the nodes beyond the range, on the real line.

        Beyond an end U the slope of log mix^e is at most g away from it, so that the sum is at most the value at U
        times h + 1/(|U| - g).  For remove g is (c + 1)/sigma; up to there, piece by piece: on [a, b] the value is at
        most N(a) mix(b)^e.  Pieces are halved until their bounds are small, compared with `small`.
        """
        exponent, total = self._exponent(c), arb(0)
        if self.direction == "remove":
            last = arb(float((exponent / self.sigma).upper()) + 1.0)
            pieces = [(high, last)] if last > high else []
            high = last if pieces else high
            while pieces:
                tick()
                a, b = pieces.pop()
                bound = self._value(a, b, exponent) * (b - a + h)
                if bound > small and b - a > 1e-6:
                    pieces += [(a, (a + b) / 2), ((a + b) / 2, b)]
                else:
                    total += bound
        for end in (low, high):
            slope = arb(0)
            if self.direction == "remove" and end is high:
                slope = exponent / self.sigma
            if self.direction == "add" and end is low:
                y = end / self.sigma - 1 / (2 * self.sigma**2)
                slope = c * self.rate * y.exp() / (1 - self.rate + self.rate * y.exp()) / self.sigma
            gap = abs(end) - slope
            if not gap > 0:
                return arb("inf")
            total += self._value(end, end, exponent) * (h + 1 / gap)
        return total.abs_upper()

    def _value(self, a: Any, b: Any, exponent: Any) -> Any:
        """N(a) mix(b)^exponent."""
        y = b / self.sigma - 1 / (2 * self.sigma**2)
        mixed = 1 - self.rate + self.rate * y.exp()
        return (-a * a / 2 + exponent * mixed.log()).exp() / (2 * arb.pi()).sqrt()


class _Nodes:
    """Weights w and exponents l with M(c + it) = sum of w e^{itl} within `error`, for every t >= 0."""

    def __init__(self, law: SampledGauss, c: Any, count: int, bits: float) -> None:
        found, turn, wanted, _ = _plan(law, float(c.mid()), bits + float(np.log(count)))
        angle = arb(found)
        h = 2 * arb.pi() / arb(turn)
        exponent = law._exponent(c)
        low, high = law._range(float(c.mid()), wanted)
        sign = 1 if law.direction == "remove" else -1
        self.weights, self.logs = [], []
        scale = h / (2 * arb.pi()).sqrt()
        for j in whole_between(low, high, h):
            tick()
            u = j * h
            moved = acb(u, sign * law.sigma * angle)
            log = law._mix(u, sign * angle).log()
            self.weights.append(scale * (-moved * moved / 2 + exponent * log).exp())
            self.logs.append(sign * log)
        self.error = law._trapezoid(c, angle, 2 * angle, h) * law.mean(c).upper()
        self.error += law._outside(c, low, high, h, law.mean(c) * (-arb(wanted)).exp()) * law._grown(c, angle)


def _plan(law: SampledGauss, c: float, bits: float) -> tuple[float, float, float, int]:
    """Angle of the line, 2 pi over the step, natural digits wanted, number of nodes; the fewest nodes."""
    sigma = float(law.sigma.mid())
    best: tuple[float, float, float, int] | None = None
    for angle in ANGLES[(1.5 if law.direction == "remove" else 1.0) > ANGLES]:
        wanted = bits + law._log_grown(c, 2 * float(angle))
        turn = wanted / (sigma * float(angle))
        nodes = int(2.5 * np.sqrt(2 * wanted) * turn / 6.28) + 2
        if best is None or nodes < best[3]:
            best = (float(angle), float(turn), float(wanted), nodes)
    assert best is not None
    return best


def whole_between(low: Any, high: Any, h: Any) -> range:
    """The whole numbers j with low <= j h <= high, and no fewer."""
    return range(int(float((low / h).floor().lower())), int(float((high / h).ceil().upper())) + 1)


def sampled_hockey_stick(base: Any, rate: Any, direction: str, epsilon: Any) -> Any:
    """One sampled step, from the profile of a pair that is alike in both directions.

    remove: H_E((1-q)Q + qP || Q) = q H_{1 + (E-1)/q}(P || Q); add: H_E(Q || (1-q)Q + qP) = a H_{Eq/a}(Q || P) with a =
    1 - E(1-q), and 0 where a <= 0.
    """
    grown = epsilon.exp()
    if direction == "remove":
        inner = 1 + (grown - 1) / rate
        return rate * base.hockey_stick(inner.log())
    left = 1 - grown * (1 - rate)
    if left <= 0:
        return arb(0)
    if not left > 0:
        return left.max(0).union(arb(0))
    return left * base.hockey_stick((grown * rate / left).log())
